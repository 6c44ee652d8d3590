"""The operators over a chunk of logits against fp64 autograd on the same logits.

The same file tests the twins, the Triton kernels in the interpreter, and the Triton kernels on a GPU. Memory
that the operators write is poisoned with NaN first, and so are the logits of ignored rows.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import logitless
from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import (
    TokenBuffers,
    allocate_stats,
    logits_gradient,
    logprob_gradient,
    single_pass,
    token_statistics,
)
from logitless.kernels.head.statistics import DIFFERENTIABLE, NAMES
from logitless.kernels.head.transform import LogitTransform
from tests.cases import DTYPES, covering_array
from tests.kernels.support import DEVICE, INTERPRETED, TWINS, Random, rounded
from tests.support import assert_close, relative_error

IGNORED = -7
# Dtypes of the logits and of their gradient.
PAIRS = {
    "bf16": ("bf16", "bf16"),
    "fp16": ("fp16", "fp16"),
    "fp32": ("fp32", "fp32"),
    "to bf16": ("fp32", "bf16"),
    "to fp16": ("fp32", "fp16"),
}
if INTERPRETED:  # which is slow; this pair adds nothing to "fp16" and "to bf16"
    del PAIRS["to fp16"]
pairs = pytest.mark.parametrize(
    ("dtype", "gradient_dtype"), [(DTYPES[a], DTYPES[b]) for a, b in PAIRS.values()], ids=PAIRS
)


@dataclass
class Chunk:
    """One call's worth of arguments; rows whose target is IGNORED hold nothing but NaN."""

    logits: Tensor  # (C, V), every row a part of a wider one
    targets: Tensor  # (C,)
    gradient_dtype: torch.dtype
    transform: LogitTransform = LogitTransform()
    bias: Tensor | None = None
    class_weights: Tensor | None = None

    @property
    def supervised(self) -> Tensor:
        return self.targets != IGNORED

    @property
    def options(self) -> dict:
        return {"transform": self.transform, "bias": self.bias, "ignore_index": IGNORED}

    def buffer(self) -> tuple[Tensor, Tensor]:
        """(logits in a buffer with wider rows, what lies beside them)."""
        C, V = self.logits.shape
        wide = torch.full((C, V + 6), 3.25, dtype=self.logits.dtype, device=DEVICE)
        wide[:, :V] = self.logits
        return wide[:, :V], wide[:, V:]

    def stats(self, *names: str) -> TokenBuffers:
        stats = allocate_stats(names, len(self.targets), torch.float32, DEVICE)
        for _, x in stats.items():
            x.fill_(float("nan"))
        return stats


def chunk(
    rows: Tensor, targets: list[int] | Tensor, dtype: torch.dtype, gradient_dtype: torch.dtype, **options
) -> Chunk:
    targets = torch.as_tensor(targets, device=DEVICE)
    logits = rows.to(dtype)
    logits[targets == IGNORED] = float("nan")
    return Chunk(logits, targets, gradient_dtype, **options)


def formulas(c: Chunk, wide: torch.dtype, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """All numbers of the supervised rows, and the gradient of their weighted sum, on full logits by autograd
    in `wide`."""
    x = c.logits[c.supervised].to(wide).requires_grad_()
    z = x if c.bias is None else x + c.bias.to(wide)
    z = z * c.transform.logit_scale
    if c.transform.softcap is not None:
        z = c.transform.softcap * torch.tanh(z / c.transform.softcap)
    z = z / c.transform.temperature
    log_p = torch.log_softmax(z, 1)
    actual = {
        "logps": log_p.gather(1, c.targets[c.supervised, None])[:, 0],
        "lse": torch.logsumexp(z, 1),
        "entropy": -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(1),
        "sum_logits": (z if c.class_weights is None else z * c.class_weights.to(wide)).sum(1),
        "log_sum_sq_probs": torch.logsumexp(2 * log_p, 1),
    }
    total = sum((actual[name] * weight[c.supervised].to(wide)).sum() for name, weight in weights.items())
    (gradient,) = torch.autograd.grad(total, x)
    return {name: value.detach() for name, value in actual.items()}, gradient


def statistics(c: Chunk, *names: str) -> TokenBuffers:
    logits, beside = c.buffer()
    stats = c.stats(*names)
    token_statistics(logits, c.targets, stats, class_weights=c.class_weights, **c.options)
    assert torch.equal(logits.nan_to_num(), c.logits.nan_to_num()), "the logits were written"
    assert (beside == 3.25).all()
    for name, value in stats.items():
        assert value[~c.supervised].eq(0).all(), f"{name} of an ignored row"
    return stats


def overlay(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits if logits.dtype == dtype else logits.view(dtype)[:, : logits.shape[1]]


def single_pass_gradient(c: Chunk, *names: str) -> tuple[Tensor, TokenBuffers]:
    """d logp / d logits, multiplied out, and the numbers found with it."""
    logits, beside = c.buffer()
    gradient, stats = overlay(logits, c.gradient_dtype), c.stats(*names)
    row_scale = logprob_gradient(logits, c.targets, stats, gradient=gradient, **c.options)
    assert (beside == 3.25).all()
    assert row_scale.dtype == torch.float32
    for name, x in (
        ("gradient", gradient),
        ("row_scale * gradient", row_scale[:, None] * gradient),
        *stats.items(),
    ):
        assert x[~c.supervised].eq(0).all(), f"{name} of an ignored row"
    return row_scale[:, None].float() * gradient.float(), stats


def gradient_of(c: Chunk, stats: TokenBuffers, weights: dict[str, Tensor]) -> Tensor:
    logits, beside = c.buffer()
    gradient = overlay(logits, c.gradient_dtype)
    logits_gradient(
        logits,
        c.targets,
        stats,
        TokenBuffers(**weights),
        gradient=gradient,
        class_weights=c.class_weights,
        **c.options,
    )
    assert (beside == 3.25).all()
    assert gradient[~c.supervised].eq(0).all(), "the gradient of an ignored row"
    return gradient.clone()


def random_weights(c: Chunk, *names: str) -> dict[str, Tensor]:
    random = Random(11)
    return {name: random.uniform(len(c.targets)) for name in names}


def each_row_close(actual: Tensor, truth: Tensor, naive: Tensor, name: str, zero: float = 0.0) -> None:
    """The 2x-naive rule row by row, as the norm of a matrix hides its smaller rows; an error below `zero` is
    none."""
    # On a single row the naive error may be small by luck, where the one large entry happens to be a number
    # of that dtype. At least the rounding of an entry, then, and what fp32 sums of thousands of terms leave.
    least = max(3e-6, torch.finfo(naive.dtype).eps / (1 if INTERPRETED else 2))
    for row, (a, t, n) in enumerate(zip(actual, truth, naive, strict=True)):
        if (a.double() - t).norm() > zero:
            assert_close(a, t, max(relative_error(n, t), least), name=f"{name}, row {row}", allow_zero=True)


def check_numbers(c: Chunk, stats: TokenBuffers, *, tiny: float = 0.0) -> None:
    """`tiny`: absolute error that is allowed beside the rule, for numbers that cancel."""
    truth, _ = formulas(c, torch.float64, random_weights(c, "logps"))
    naive, _ = formulas(c, torch.float32, random_weights(c, "logps"))
    for name, value in stats.items():
        if name in truth:
            actual = value[c.supervised]
            assert actual.isfinite().all(), name
            error, rule = (
                (actual - truth[name]).norm(),
                2 * (naive[name] - truth[name]).norm() + 8 * 1.2e-7 * truth[name].norm(),
            )
            assert error <= rule + tiny, f"{name}: {error:.2e} > {rule:.2e} + {tiny:.0e}"
    assert_residual(stats, truth["lse"], c)


def assert_residual(stats: TokenBuffers, lse: Tensor, c: Chunk) -> None:
    together = stats.lse[c.supervised].double() + stats.lse_residual[c.supervised].double()
    assert (together - lse).abs().max() < 4e-6, "lse + lse_residual"


def check_gradient(
    c: Chunk, actual: Tensor, weights: dict[str, Tensor], name: str, *, zero: float = 0.0
) -> None:
    _, truth = formulas(c, torch.float64, weights)
    _, naive = formulas(c, torch.float32, weights)
    assert truth.any()
    each_row_close(actual[c.supervised], truth, rounded(naive, c.gradient_dtype), name, zero)


def check_everything(c: Chunk, *, tiny: float = 1e-6, zero: float = 0.0, gradients=DIFFERENTIABLE) -> None:
    """Every operator on one chunk."""
    stats = statistics(c, *NAMES)
    check_numbers(c, stats, tiny=tiny)
    if single_pass(c.gradient_dtype):
        for names in ((), ("entropy",)):
            actual, found = single_pass_gradient(c, *names)
            check_gradient(
                c,
                actual,
                {"logps": torch.ones(len(c.targets), device=DEVICE)},
                f"single pass {names}",
                zero=zero,
            )
            check_numbers(c, found, tiny=tiny)
    for names in (*((name,) for name in gradients), gradients):
        weights = random_weights(c, *names)
        # The entropy's gradient p (log p + entropy) of a certain token cancels, to what fp32 leaves of logits
        # some tens above the provisional shift.
        floor = 1e-5 if "entropy" in names else 0.0
        check_gradient(c, gradient_of(c, stats, weights), weights, " + ".join(names), zero=max(zero, floor))


FACTORS = {
    "vocab": [17, 1000, 5003, 3 * 1024],
    "bias": [None, *DTYPES],
    "class_weights": [None, *DTYPES],
    "softcap": [None, 5.0],
    "logit_scale": [1.0, 0.5, -1.5],
    "temperature": [1.0, 0.7],
    "ignored": ["", "some", "all but one"],
    "dtypes": list(PAIRS.values()),
}


@pytest.mark.parametrize("case", covering_array(FACTORS, lambda case: True, repeats=True))
def test_options(case):
    vocab, rows = case["vocab"], 7
    dtype, gradient_dtype = (DTYPES[name] for name in case["dtypes"])
    random = Random(case["seed"])
    logits, bias, weights = random.normal(rows, vocab) * 2, random.normal(vocab), random.uniform(vocab)
    # The first and the last column, columns at the edges of blocks, and whatever comes.
    targets = [0, vocab - 1, min(1023, vocab - 1), min(1024, vocab - 2), vocab // 2, 3, vocab // 3]
    targets = torch.tensor(targets, device=DEVICE)
    targets[{"": [], "some": [1, 4], "all but one": [0, 1, 2, 4, 5, 6]}[case["ignored"]]] = IGNORED
    c = chunk(
        logits,
        targets,
        dtype,
        gradient_dtype,
        transform=LogitTransform(case["softcap"], case["logit_scale"], case["temperature"]),
        bias=bias.to(DTYPES[case["bias"]]) if case["bias"] else None,
        class_weights=weights.to(DTYPES[case["class_weights"]]) if case["class_weights"] else None,
    )
    # A sum of logits of both signs cancels: what fp32 leaves of 5,003 of them.
    check_everything(c, tiny=1e-3)


@pairs
def test_numbers_do_not_depend_on_what_is_asked_for(dtype, gradient_dtype):
    c = chunk(Random().normal(5, 1500), [0, 1, IGNORED, 1499, 1024], dtype, gradient_dtype)
    everything = dict(statistics(c, *NAMES).items())
    for names in ((), ("entropy",), ("is_top1",), ("sum_logits",)):
        for name, value in statistics(c, *names).items():
            # Not the same bits: a compiler may contract other products and sums.
            torch.testing.assert_close(value, everything[name], rtol=1e-5, atol=1e-6, msg=name)


# Extreme rows. Several blocks of 1,024, the last of them ragged.
V = 5003
LAST = V - 1


def peak(position: int, height: float, floor: float = 0.0) -> Tensor:
    row = floor + Random(position).normal(V) * 0.25
    row[position] = height
    return row


def ramp(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, V, device=DEVICE)


EXTREME = {
    # p = 1 / (1 + 5002 exp(-14)) = 0.996
    "certain": ([peak(0, 14.0), peak(2000, 14.0), peak(LAST, 14.0), peak(LAST, 20.0)], [0, 2000, LAST, LAST]),
    "certainly wrong": (
        [peak(0, 14.0), peak(2000, 14.0), peak(LAST, 14.0), peak(1024, 20.0)],
        [LAST, 0, 4999, 1023],
    ),
    "maximum last": ([peak(LAST, h) for h in (5.0, 12.0, 25.0)], [0, LAST, 2500]),
    # The provisional shift is the maximum of the first block; a row that drifts by more than 30 above it is
    # scaled down.
    "drift below 30": ([peak(2000, 29.0), peak(LAST, 29.5), peak(3000, 29.9)], [2000, 0, 1]),
    "drift above 30": (
        [peak(2000, 31.5), peak(LAST, 32.0), peak(3000, 31.5), peak(4000, 40.0)],
        [0, 1, 3000, LAST],
    ),
    "drift twice": (
        [
            torch.maximum(peak(1500, 45.0), peak(4500, 90.0)),
            torch.maximum(peak(1024, 33.0), peak(LAST, 66.5)),
        ],
        [1500, 0],
    ),
    "drift of 100": ([ramp(-50, 50), ramp(50, -50), ramp(-50, 50), ramp(50, -50)], [0, 0, LAST, LAST]),
    "jump at the end": (
        [torch.where(torch.arange(V, device=DEVICE) < 5000, -50.0, 50.0)] * 3,
        [0, 5000, LAST],
    ),
    "far from zero": ([ramp(999, 1001), ramp(-1001, -999), ramp(-1001, -999)], [77, 5001, 0]),
    "all equal": ([ramp(3.0, 3.0), ramp(-300.0, -300.0)], [0, LAST]),
}


@pytest.mark.each_value
@pairs
@pytest.mark.parametrize(("rows", "targets"), EXTREME.values(), ids=EXTREME)
def test_extreme_rows(rows, targets, dtype, gradient_dtype):
    c = chunk(torch.stack(rows), targets, dtype, gradient_dtype)
    # A row of gradients may vanish where fp16 cannot hold it, and where it is far below the rounding of the
    # row's other gradients.
    zero = 6e-8 * V**0.5 * 100 if gradient_dtype == torch.float16 else 1e-12
    check_everything(c, tiny=2e-5 * max(1.0, c.logits.abs().max().item() ** 2 / 100), zero=zero)


only_kernels = pytest.mark.skipif(
    TWINS, reason="the twin is PyTorch's log_softmax, which loses small terms beside a large one"
)


@only_kernels
@pytest.mark.parametrize("gap", [15.0, 30.0, 60.0])
def test_a_certain_target_has_an_accurate_logp_and_gradient(gap):
    rows = torch.zeros(2, V, device=DEVICE)
    rows[0, 10] = rows[1, LAST] = gap
    c = chunk(rows, [10, LAST], torch.float32, torch.float32)
    others = 5002 * math.exp(-gap)
    single, stats = single_pass_gradient(c, "entropy")
    entropy = math.log1p(others) + gap * others / (1 + others)
    written = gradient_of(c, stats, {"logps": torch.ones(2, device=DEVICE)})
    for row, target in enumerate((10, LAST)):
        assert stats.logps[row].item() == pytest.approx(-math.log1p(others), rel=1e-5, abs=0)
        assert stats.entropy[row].item() == pytest.approx(entropy, rel=1e-5, abs=0)
        for gradient in (single, written):
            assert gradient[row, target].item() == pytest.approx(others / (1 + others), rel=1e-5, abs=0)
            assert gradient[row].double().sum().abs() < 1e-5 * others


@pytest.mark.parametrize("gap", [0.0, 0.3, 0.7, 3.0, 15.0, 60.0])
def test_the_target_of_a_gradient_takes_its_logp_from_the_statistics(gap):
    """Whatever the certainty: g_logp (1 - p) + g_lse p - g_entropy p (log p + entropy) + g_sum, in fp64 from
    the same numbers."""
    rows = torch.zeros(2, V, device=DEVICE)
    rows[0, 10] = rows[1, LAST] = gap
    c = chunk(rows, [10, LAST], torch.float32, torch.float32)
    exact = rows.double().log_softmax(1)
    logps = exact.gather(1, c.targets[:, None])[:, 0]
    entropy = -(exact.exp() * exact).sum(1)
    stats, weights = statistics(c, "entropy"), random_weights(c, *DIFFERENTIABLE)
    stats.logps.copy_(logps)
    stats.entropy.copy_(entropy)
    for names in (("logps",), ("lse",), ("logps", "lse"), DIFFERENTIABLE):
        given = {name: weights[name] for name in names}
        g = {name: given[name].double() if name in given else 0.0 for name in DIFFERENTIABLE}
        truth = -g["logps"] * torch.expm1(logps) + g["lse"] * logps.exp()
        truth = truth - g["entropy"] * logps.exp() * (logps + entropy) + g["sum_logits"]
        actual = gradient_of(c, stats, given).gather(1, c.targets[:, None])[:, 0]
        torch.testing.assert_close(actual.double(), truth, rtol=5e-6, atol=1e-12)


TIES = {
    "in a block": ([5, 9], [5, 9, 700], [1, 0, 0]),
    "in two blocks": ([5, 2000], [5, 2000, 9], [1, 0, 0]),
    "last block": ([4990, LAST], [4990, LAST, 0], [1, 0, 0]),
    "everywhere": (list(range(V)), [0, 1, 1024, LAST], [1, 0, 0, 0]),
    "at the edge of a block": ([1023, 1024], [1023, 1024], [1, 0]),
    "no tie": ([3000], [3000, 2999, 3001, 0], [1, 0, 0, 0]),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("tops", "targets", "expected"), TIES.values(), ids=TIES)
def test_arg_max_is_the_first_of_equals(tops, targets, expected, dtype):
    rows = torch.zeros(len(targets), V, device=DEVICE)
    rows[:, tops] = 2.0
    c = chunk(rows, targets, dtype, dtype)
    assert statistics(c, "entropy").is_top1.tolist() == expected
    if single_pass(dtype):
        assert single_pass_gradient(c, "entropy")[1].is_top1.tolist() == expected


@pairs
@pytest.mark.parametrize("columns", [slice(0, 3), slice(0, 1024), slice(0, 2100), slice(5000, None)], ids=str)
def test_tokens_ruled_out_by_a_bias(columns, dtype, gradient_dtype):
    bias = torch.zeros(V, dtype=gradient_dtype, device=DEVICE)
    bias[columns] = -torch.inf
    rows = Random().normal(3, V)
    c = chunk(rows, [4000, IGNORED, 2500], dtype, gradient_dtype, bias=bias)
    stats = statistics(c, "entropy")
    check_numbers(c, stats, tiny=1e-5)
    weights = random_weights(c, "logps", "lse", "entropy")
    gradient = gradient_of(c, stats, weights)
    check_gradient(c, gradient, weights, "logits_gradient")
    assert not gradient[:, columns].any()
    if single_pass(gradient_dtype):
        actual, found = single_pass_gradient(c, "entropy")
        check_numbers(c, found, tiny=1e-5)
        check_gradient(c, actual, {"logps": torch.ones(3, device=DEVICE)}, "single pass")
        assert not actual[:, columns].any()


def test_impossible_target():
    rows = Random().normal(2, 1500)
    rows[0, 7] = rows[1, 1400] = -torch.inf
    c = chunk(rows, [7, 1400], torch.float32, torch.float32)
    truth = torch.nn.functional.one_hot(c.targets, 1500) - rows.double().softmax(1)
    actual, stats = single_pass_gradient(c, "entropy")
    assert stats.logps.eq(-torch.inf).all() and stats.entropy.isfinite().all() and not stats.is_top1.any()
    assert_close(actual, truth, 1e-7, name="single pass")
    written = gradient_of(c, statistics(c, "entropy"), {"logps": torch.ones(2, device=DEVICE)})
    assert_close(written, truth, 1e-7, name="logits_gradient")


NOT_FINITE = {
    "value": [float("nan"), float("inf")],
    "column": [0, 9, 1030, LAST],
    "dtypes": list(PAIRS.values()),
}


@pytest.mark.parametrize("case", covering_array(NOT_FINITE, lambda case: True, repeats=True))
def test_nan_stays_nan_and_in_its_row(case):
    dtype, gradient_dtype = (DTYPES[name] for name in case["dtypes"])
    rows = Random().normal(3, V)
    rows[1, case["column"]] = case["value"]
    c = chunk(rows, [9, 9, 10], dtype, gradient_dtype)
    healthy = [0, 2]
    stats = statistics(c, "entropy")
    assert stats.logps[1].isnan() and not stats.lse[1].isfinite() and not stats.entropy[1].isfinite()
    assert stats.logps[healthy].isfinite().all() and stats.entropy[healthy].isfinite().all()
    written = gradient_of(c, stats, random_weights(c, "logps", "lse"))
    assert written[1].isnan().any() and written[healthy].isfinite().all()
    if single_pass(gradient_dtype):
        actual, _ = single_pass_gradient(c)
        assert actual[1].isnan().any() and actual[healthy].isfinite().all()


@pytest.mark.parametrize("operator", ["single pass", "logits_gradient"])
def test_same_call_same_bits(operator):
    c = chunk(Random().normal(7, V) * 4, list(range(7)), torch.bfloat16, torch.bfloat16)
    stats = statistics(c, *NAMES)

    def call() -> Tensor:
        return (
            single_pass_gradient(c)[0]
            if operator == "single pass"
            else gradient_of(c, stats, random_weights(c, *DIFFERENTIABLE))
        )

    assert torch.equal(call(), call())


def test_entropy_when_the_shift_moves():
    """Most of the row lies just below the drift that moves the shift, the last block above it: what was
    summed must follow."""
    rows = Random(5).normal(3, 5003) * 0.1
    rows[:, 1024:4096] += 29.5
    rows[:, 4096:] += 31
    c = chunk(rows, [0, 3000, 5002], torch.float32, torch.float32)
    log_p = rows.double().log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(statistics(c, "entropy").entropy.double(), entropy, rtol=1e-5, atol=1e-5)


def test_a_softmax_far_from_zero_is_rebuilt_exactly():
    """At |lse| of 1,000 the spacing of fp32 is 6e-5; what rounding left out of lse makes up for it."""
    rows = Random(6).normal(3, 5003).mul_(64).round_().div_(64) + 1000
    c = chunk(rows, [0, 3000, 5002], torch.float32, torch.float32)
    gradient = c.logits.clone()
    grads = TokenBuffers(logps=torch.zeros(3, device=DEVICE), lse=torch.ones(3, device=DEVICE))
    logits_gradient(gradient, c.targets, statistics(c), grads, gradient=gradient, transform=c.transform)
    torch.testing.assert_close(gradient.double(), rows.double().softmax(1), rtol=5e-6, atol=0)


@only_kernels
@pytest.mark.parametrize("center", [0.0, 1000.0, -1000.0])
def test_a_row_of_the_gradient_adds_up_to_nothing(center):
    """Where all logits are large, or all rows of the head alike, d_hidden is what this sum leaves, times
    their size.

    Half a unit in the last place of a log-sum-exp of 8 to 16 is 5e-7, and a whole row has it in common.
    """
    rows = torch.stack([ramp(center - 1 + i / 28, center + 1 + i / 20) for i in range(16)])
    c = chunk(rows, [77 + 300 * i for i in range(16)], torch.float32, torch.float32)
    stats = statistics(c)
    lse = rows.double().logsumexp(1)
    assert (stats.lse.double() + stats.lse_residual.double() - lse).abs().max() < 3e-7
    single, _ = single_pass_gradient(c)
    for gradient in (gradient_of(c, stats, {"logps": torch.ones(16, device=DEVICE)}), single):
        assert gradient.double().sum(1).square().mean().sqrt() < 2e-7


def test_fake_tensors_take_the_twin(monkeypatch):
    """They have no memory that a kernel could read."""
    monkeypatch.setattr(logitless.kernels, "_triton_runs", lambda device: True)
    assert uses_triton(torch.device("cuda"), torch.float32)
    with FakeTensorMode():
        assert not uses_triton(torch.device("cuda"), torch.float32)
