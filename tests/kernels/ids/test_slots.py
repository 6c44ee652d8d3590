"""Numbers of several ids and their gradient, against fp64 autograd on the full logits.

The same file tests the twins, the Triton kernels in the interpreter, and the Triton kernels on a GPU. What
the operators write is poisoned with NaN first, and so are the logits of ignored rows.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from logitless import linear_logprobs
from logitless.kernels.head import cross_entropy
from logitless.kernels.head.cross_entropy import (
    TokenBuffers,
    allocate_stats,
    logits_gradient,
    token_statistics,
)
from logitless.kernels.head.transform import LogitTransform
from logitless.kernels.ids import slots
from logitless.kernels.ids.slots import Upstream
from tests.cases import DTYPES, covering_array, dtypes
from tests.kernels.support import DEVICE, INTERPRETED, Random, offset, poisoned, strided
from tests.support import assert_close

IGNORED, ROWS = -7, 6
NAMES = ("logps", "lse", "lse_residual", "rest", "entropy")


@dataclass
class Case:
    """A chunk and the ids that are asked for; the row before the last is ignored and holds NaN."""

    logits: Tensor  # (n, V)
    ids: Tensor  # (n, k)
    transform: LogitTransform = LogitTransform()
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        self.targets = torch.full((len(self.ids),), self.logits.shape[1], device=DEVICE)
        if len(self.ids) > 1:
            self.targets[-2] = IGNORED
            self.logits[-2] = float("nan")

    @property
    def kept(self) -> Tensor:
        return self.targets != IGNORED

    @property
    def head_options(self) -> dict:
        return {"transform": self.transform, "bias": self.bias}

    @property
    def row_options(self) -> dict:
        return {"targets": self.targets, "ignore_index": IGNORED}

    def truth(self, wide: torch.dtype, upstream: Upstream | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """The numbers of the kept rows on full logits in `wide`, and the gradient of their weighted sum."""
        x = self.logits[self.kept].to(wide).requires_grad_()
        ids, transform = self.ids[self.kept], self.transform
        z = x if self.bias is None else x + self.bias.to(wide)
        z = z * transform.logit_scale
        if transform.softcap is not None:
            z = transform.softcap * torch.tanh(z / transform.softcap)
        log_p = (z / transform.temperature).log_softmax(1)
        chosen = torch.zeros_like(z, dtype=torch.bool)
        for slot in range(ids.shape[1]):
            chosen |= torch.arange(z.shape[1], device=DEVICE) == ids[:, slot, None]
        finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
        actual = {
            "logps": torch.where(ids >= 0, log_p.gather(1, ids.clamp(min=0)), -torch.inf),
            "lse": (z / transform.temperature).logsumexp(1),
            "rest": log_p.masked_fill(chosen, -torch.inf).logsumexp(1),
            "entropy": -(log_p.exp() * finite).sum(1),
        }
        total = torch.zeros((), dtype=wide, device=DEVICE)
        for name, g in zip(Upstream._fields, upstream or Upstream(None), strict=True):
            if g is not None:
                g, number = g[self.kept].to(wide), actual[name]
                if name == "logps":
                    g, number = g.masked_fill(ids < 0, 0.0), number.masked_fill(ids < 0, 0.0)
                total = total + (g * number).sum()
        gradient = torch.autograd.grad(total, x)[0] if total.requires_grad else torch.zeros_like(x)
        return {name: number.detach() for name, number in actual.items()}, gradient

    def read(self, *names: str, logits: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """(the chunk without the ids, the numbers)."""
        if logits is None:
            wide = torch.full((len(self.ids), self.logits.shape[1] + 5), 3.25, device=DEVICE)
            logits = wide.to(self.logits.dtype)[:, : self.logits.shape[1]]
            logits.copy_(self.logits)
        z = slots.pop_logits(logits, self.ids, **self.head_options)
        stats = allocate_stats(("entropy",) if "entropy" in names else (), len(z), torch.float32, DEVICE)
        options = {**self.head_options, "ignore_index": IGNORED}
        token_statistics(logits, self.targets, stats, **options)
        out = {
            name: poisoned(*(z.shape if name == "logps" else z.shape[:1]), dtype=z.dtype) for name in names
        }
        options = {"logits": logits, "columns": self.ids, **self.head_options, **self.row_options}
        slots.statistics(z, self.ids, stats, out, **options)
        for name, x in out.items():
            assert x[~self.kept].eq(0).all(), f"{name} of an ignored row"
        return logits, out

    def gradient(
        self, logits: Tensor, out: dict[str, Tensor], upstream: Upstream, dtype: torch.dtype
    ) -> Tensor:
        """d products of all kept rows."""
        known = {**out, "ids": self.ids}
        columns, entries, factor = slots.sparse_grad(
            known, upstream, transform=self.transform, **self.row_options
        )
        assert torch.equal(columns, torch.where(self.kept[:, None], firsts(self.ids), -1))
        assert not entries[columns < 0][(self.ids < 0)[columns < 0]].any()
        assert not factor[~self.kept].any() and not entries[~self.kept].any()
        known = TokenBuffers(out["lse"], out["lse"], out["lse_residual"], out.get("entropy"))
        gradient = poisoned(*logits.shape, dtype=dtype)
        grads = TokenBuffers(lse=factor, entropy=upstream.entropy)
        options = {**self.head_options, "gradient": gradient, "ignore_index": IGNORED}
        logits_gradient(logits, self.targets, known, grads, **options)
        slots.scatter(gradient, columns, entries)
        assert not gradient[~self.kept].any()
        return gradient[self.kept]


def firsts(ids: Tensor) -> Tensor:
    """Each id in its first slot alone, and -1 elsewhere."""
    rows = [
        [x if x >= 0 and x not in row[:slot] else -1 for slot, x in enumerate(row)] for row in ids.tolist()
    ]
    return torch.tensor(rows, device=DEVICE)


def ids_of(n: int, V: int, k: int, random: Random, empty: bool) -> Tensor:
    """Any ids, some of them twice; with `empty` all slots of the first row and some others hold none."""
    ids = torch.stack([random.normal(max(V, k)).argsort()[:k] % V for _ in range(n)])
    if k > 2:
        ids[:, 1] = ids[:, 0]
        ids[1, k // 2 :] = ids[1, 0]
    if empty:
        ids[0] = -1
        ids[2:, -1] = -1
        ids[3, :] = torch.where(torch.arange(k, device=DEVICE) % 2 == 0, -1, ids[3])
    return ids


def made(case: dict, dtype: torch.dtype) -> tuple[Case, Upstream]:
    random, V = Random(case["seed"]), case["V"]
    k = V if case["k"] == "V" else case["k"]
    transform = LogitTransform(case["softcap"], case["logit_scale"], case["temperature"])
    bias = random.normal(V) if case["bias"] else None
    ids = ids_of(ROWS, V, k, random, case["empty"])
    c = Case((3 * random.normal(ROWS, V)).to(dtype), ids, transform, bias)
    g = random.normal(ROWS, k)
    # What a loss sends back to an empty slot may be anything.
    g = torch.where(ids >= 0, g, float("nan"))
    given = {"logps": g, "lse": random.normal(ROWS), "rest": None, "entropy": None}
    if "entropy" in case["outputs"]:
        given["entropy"] = random.normal(ROWS)
    if "rest" in case["outputs"]:
        # Of a row all of whose ids are asked for nothing is left.
        given["rest"] = random.normal(ROWS) * 0.1 if k < V else None
    if case["outputs"] == "logps":
        given["lse"] = None
    elif case["outputs"] == "lse":
        given["logps"] = None
    return c, Upstream(**given)


# Relative error of Triton's exp on a GPU, beyond that of PyTorch's.
GPU_EXP = 0.0 if DEVICE.type == "cpu" else 1e-7

FACTORS = {
    "k": [1, 3, 16, 21, "V"],
    "V": [23, 1100],
    "outputs": ["logps", "lse", "logps, entropy", "logps, rest", "logps, rest, entropy"],
    "empty": [False, True],
    "softcap": [None, 5.0],
    "logit_scale": [1.0, 0.5, -0.7],
    "temperature": [1.0, 0.7],
    "bias": [False, True],
    "dtype": list(DTYPES),
}


def possible(case: dict) -> bool:
    return not (case.get("k") == "V" and case.get("V", 23) > 256)


@pytest.mark.parametrize("case", covering_array(FACTORS, possible, repeats=True))
def test_numbers_and_gradient(case):
    dtype = DTYPES[case["dtype"]]
    c, upstream = made(case, dtype)
    names = NAMES if "entropy" in case["outputs"] else NAMES[:-1]
    logits, out = c.read(*names)
    actual, gradient = c.truth(torch.float64, upstream)
    naive, naive_gradient = c.truth(torch.float32, upstream)
    filled = actual["logps"] > -torch.inf
    assert torch.equal(out["logps"][c.kept] > -torch.inf, filled)
    rest = actual["rest"] > -torch.inf
    assert torch.equal(out["rest"][c.kept] > -torch.inf, rest)
    own = {"logps": filled, "rest": rest}
    for name in names:
        if name != "lse_residual":
            where = own.get(name, ...)
            parts = out[name][c.kept][where], actual[name][where], naive[name][where]
            assert_close(*parts, name=name, allow_zero=case["V"] == case["k"])
    total = out["lse"].double() + out["lse_residual"].double()
    assert_close(total[c.kept], actual["lse"], 2e-7, name="lse with what rounding left out")
    error = torch.finfo(dtype).eps / 2 * (2 if INTERPRETED else 1)
    allowed = max(error, (naive_gradient - gradient).norm().item() / gradient.norm().item())
    allowed += GPU_EXP
    assert_close(c.gradient(logits, out, upstream, dtype).double(), gradient, allowed, name="gradient")


@dtypes
def test_many_slots_repeated(dtype):
    """More slots than are compared at a time, and sums over many equal ids, the same in each of them."""
    random, k = Random(3), 130
    c = Case(random.normal(ROWS, 40).to(dtype), random.integers(40, ROWS, k) - 1)
    c.ids[0], c.ids[1] = 7, torch.arange(k, device=DEVICE) % 40
    logits, out = c.read(*NAMES)
    upstream = Upstream(torch.where(c.ids >= 0, random.normal(ROWS, k), float("nan")))
    actual, gradient = c.truth(torch.float64, upstream)
    filled = actual["logps"] > -torch.inf
    assert_close(out["logps"][c.kept][filled], actual["logps"][filled], 2e-7, name="logps")
    _, entries, _ = slots.sparse_grad({**out, "ids": c.ids}, upstream, transform=c.transform, **c.row_options)
    assert (entries[0] == entries[0, 0]).all()
    _, again, _ = slots.sparse_grad({**out, "ids": c.ids}, upstream, transform=c.transform, **c.row_options)
    assert torch.equal(entries, again)
    error = torch.finfo(dtype).eps * (1 if INTERPRETED else 0.5)
    assert_close(c.gradient(logits, out, upstream, dtype).double(), gradient, error, name="gradient")


def test_more_slots_than_the_kernels_hold():
    random, k = Random(4), slots.MOST_SLOTS + 1
    c = Case(random.normal(3, 300), random.integers(300, 3, k))
    _, out = c.read(*NAMES)
    assert_close(out["logps"][c.kept], c.truth(torch.float64)[0]["logps"], 2e-7, name="logps")


@pytest.mark.parametrize("V", [7, 23, 33, 50, 100])
def test_all_ids_of_a_soft_cap(V):
    """What was taken out then counts for all that is left, which rounding must not make more than nothing."""
    random = Random(V)
    c = Case(random.normal(ROWS, V), random.normal(ROWS, V).argsort(1), LogitTransform(2.0), random.normal(V))
    _, out = c.read(*NAMES)
    actual, _ = c.truth(torch.float64)
    assert (out["rest"][c.kept] == -torch.inf).all()
    for name in ("logps", "lse", "entropy"):
        assert_close(out[name][c.kept], actual[name], 1e-6, name=name)


def test_a_certain_token_keeps_its_digits():
    """Of p = 1 - 3e-9 neither the log-probability nor 1 - p is a difference."""
    rows = torch.tensor(
        [[20.0, 0.0, -1.0, 0.1], [0.0, 0.0, 0.0, 0.0], [20.0, 20.0, -1.0, 0.1]], device=DEVICE
    )
    c = Case(rows, torch.tensor([[0, 3], [0, 0], [1, 2]], device=DEVICE))
    logits, out = c.read(*NAMES)
    upstream = Upstream(torch.tensor([[1.0, 0.0]], device=DEVICE).expand(3, 2))
    actual, gradient = c.truth(torch.float64, upstream)
    for name in ("logps", "entropy", "rest"):
        assert (out[name][c.kept] / actual[name] - 1).abs().max() < 2e-6, name
    result = c.gradient(logits, out, upstream, torch.float32)
    assert (result / gradient - 1).abs().max() < 1e-5


def test_large_logits_are_not_rounded_away():
    """An lse of 1e4 has no digits behind the point: the residual holds them."""
    random = Random(5)
    c = Case(random.normal(ROWS, 50) + 1e4, random.integers(50, ROWS, 4))
    logits, out = c.read(*NAMES)
    upstream = Upstream(random.normal(ROWS, 4), random.normal(ROWS))
    actual, gradient = c.truth(torch.float64, upstream)
    assert_close(out["logps"][c.kept], actual["logps"], 1e-6, name="logps")
    assert_close(out["rest"][c.kept], actual["rest"], 1e-6, name="rest")
    error = out["lse"].double() + out["lse_residual"].double()
    assert (error[c.kept] - actual["lse"]).abs().max() < 2e-6
    assert_close(c.gradient(logits, out, upstream, torch.float32).double(), gradient, 2e-6, name="gradient")


@dtypes
def test_masked_and_missing_logits(dtype):
    random = Random(6)
    c = Case(random.normal(ROWS, 30).to(dtype), random.integers(12, ROWS, 5))
    c.logits[0, 12:] = -torch.inf  # nothing is left beside some of the others
    c.logits[1, c.ids[1, 2]] = -torch.inf
    c.ids[2] = torch.arange(5, device=DEVICE)
    c.logits[2, 5:] = -torch.inf  # nothing but the ids
    c.logits[3, 20] = float("nan")  # of nobody's id
    _, out = c.read(*NAMES)
    actual, _ = c.truth(torch.float64)
    whole = [0, 1, 2]
    filled = actual["logps"] > -torch.inf
    assert torch.equal((out["logps"][c.kept] > -torch.inf)[whole], filled[whole])
    for name in ("lse", "entropy"):
        assert_close(out[name][whole], actual[name][whole], 1e-6, name=name)
    logps = out["logps"][whole][filled[whole]]
    assert_close(logps, actual["logps"][whole][filled[whole]], 1e-6, name="logps")
    assert out["rest"][2] < -1e3
    # A NaN comes out where full logits give one.
    assert out["logps"][3].isnan().all() and out["lse"][3].isnan() and out["entropy"][3].isnan()


@dtypes
def test_layouts(dtype):
    """Ids, bias, gradients and logits anywhere in memory."""
    random = Random(8)
    c = Case(
        random.normal(ROWS, 40).to(dtype),
        random.integers(40, ROWS, 5),
        LogitTransform(4.0, 0.5),
        random.normal(40),
    )
    upstream = Upstream(*(random.normal(ROWS, *shape) for shape in ((5,), (), (), ())))
    plain = c.read(*NAMES)[1]
    truth = slots.sparse_grad({**plain, "ids": c.ids}, upstream, transform=c.transform, **c.row_options)
    for layout in (strided, offset):
        ids, targets, bias = c.ids, c.targets, c.bias
        c.ids, c.targets, c.bias = layout(ids), layout(targets), layout(bias)
        out = c.read(*NAMES)[1]
        # Other alignments may be summed in another order on a GPU.
        for name, x in plain.items():
            torch.testing.assert_close(out[name], x)
        known = {name: layout(x) for name, x in plain.items()} | {"ids": c.ids}
        actual = slots.sparse_grad(
            known, Upstream(*map(layout, upstream)), transform=c.transform, **c.row_options
        )
        for x, y in zip(actual, truth, strict=True):
            torch.testing.assert_close(x, y)
        matrix, other = poisoned(ROWS, 40, dtype=dtype), poisoned(ROWS, 43, dtype=dtype)[:, 3:]
        slots.scatter(matrix, truth[0], truth[1])
        slots.scatter(other, layout(truth[0]), layout(truth[1]))
        assert torch.equal(matrix.nan_to_num(7.0), other.nan_to_num(7.0))
        c.ids, c.targets, c.bias = ids, targets, bias


def test_what_is_not_wanted_is_not_needed():
    """A teacher's logps and rest alone, and values that are all the same."""
    c = Case(Random(9).normal(ROWS, 20), Random(1).integers(20, ROWS, 3))
    everything, few = c.read(*NAMES)[1], c.read("logps", "rest")[1]
    for name in few:
        torch.testing.assert_close(few[name], everything[name])
    matrix = torch.ones(ROWS, 20, device=DEVICE)
    c.ids[0], c.ids[1, 0] = -1, 25
    slots.scatter(matrix, c.ids, 0.0)
    truth = torch.ones(ROWS, 20, device=DEVICE)
    for row, slot in itertools.product(range(ROWS), range(3)):
        if 0 <= c.ids[row, slot] < 20:
            truth[row, c.ids[row, slot]] = 0.0
    assert torch.equal(matrix, truth)


@pytest.mark.parametrize("scale", [1.0, -0.7])
@dtypes
def test_take_out(dtype, scale):
    """Each id's logit once it is out, in all its slots; the chunk then counts without it."""
    c = Case(
        Random(2).normal(4, 12).to(dtype), torch.tensor([[3, 3, -1], [0, 11, 0]], device=DEVICE).repeat(2, 1)
    )
    c.transform, logits = LogitTransform(logit_scale=scale), c.logits.clone()
    z = slots.pop_logits(logits, c.ids, transform=c.transform)
    kept = c.kept[:, None] & (c.ids >= 0)
    assert torch.equal(z[kept], c.logits.gather(1, c.ids.clamp(min=0)).float()[kept] * scale)
    assert (z[c.ids < 0] == -torch.inf).all()
    changed = (logits != c.logits)[c.kept]
    assert changed.sum(1).tolist() == [1, 2, 2] and (logits[c.kept][changed].float() * scale < -1e4).all()


def test_once():
    ids = torch.tensor([[4, 4, -1, 2], [-3, 0, 1, 0], [5, 5, 5, 5]], device=DEVICE)
    assert slots.dedupe(ids).tolist() == [[4, -1, -1, 2], [-1, 0, 1, -1], [5, -1, -1, -1]]


def test_fp64_keeps_its_digits():
    random = Random(11)
    c = Case(random.normal(ROWS, 20).double(), random.integers(20, ROWS, 4), LogitTransform(3.0))
    z = slots.pop_logits(c.logits.clone(), c.ids, transform=c.transform)
    truth = 3.0 * torch.tanh(c.logits.gather(1, c.ids) / 3.0)
    assert (z - truth)[c.kept].abs().max() < 1e-14


class Launches(TorchDispatchMode):
    """Counts what PyTorch would launch on a GPU: neither views nor allocations."""

    NONE = ("empty", "new_empty", "detach", "promote_types", "_local_scalar_dense", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or func._schema.name.removeprefix("aten::").startswith(self.NONE))
        return func(*args, **(kwargs or {}))


def test_few_launches(monkeypatch):
    """A call of two chunks without gradients: 13 launches of PyTorch, which were 250, and eight kernels."""
    pytest.importorskip("triton")
    from logitless.kernels.head import cross_entropy_triton, targets, targets_triton
    from logitless.kernels.ids import slots_triton

    launched, marks = [], torch.tensor([[1], [0]], dtype=torch.int8, device=DEVICE)

    class Launched:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(self.name)

    class Marked(Launched):
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(self.name) or args[2].copy_(marks)

    for module in (cross_entropy, slots, targets):
        monkeypatch.setattr(module, "uses_triton", lambda device, dtype: True)
    first = "one_per_position_kernel"
    monkeypatch.setattr(targets_triton, first, Launched(first))
    monkeypatch.setattr(targets_triton, "mark_kernel", Marked("mark_kernel"))
    counts = lambda x, *packing: launched.append("count_kernel") or x.sum(1)  # noqa: E731
    monkeypatch.setattr(targets_triton, "counted", counts)
    names = ("pop_logits_kernel", "row_kernel", "slot_statistics_kernel")
    for name in names:
        module = cross_entropy_triton if name == "row_kernel" else slots_triton
        monkeypatch.setattr(module, name, Launched(name))
    random = Random(0)
    hidden, weight = random.normal(64, 4).bfloat16(), random.normal(500, 4).bfloat16()
    ids, budget = random.integers(500, 64, 8), 40 * (500 * 2 + 8 * 160)
    with Launches() as counted:
        linear_logprobs(hidden, weight, ids, logits_budget=budget)
    assert launched == [first, "mark_kernel", "count_kernel", *names, *names]
    # What the host reads of a GPU is copied first.
    assert counted.count <= (13 if DEVICE.type == "cpu" else 15)
