"""The divergence kernel and its acceptance rate, against fp64 references; the edges of its twin."""

import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from logitless import JSDLoss
from logitless.kernels import uses_triton
from logitless.kernels.head import divergence as kernels
from logitless.kernels.head.transform import LogitTransform
from logitless.parallel.vocabulary import ShardedVocabulary
from tests.cases import covering_array
from tests.kernels.support import DEVICE, Random, poisoned
from tests.reference.distillation import generalized_jsd, kl, kl_to_mixture
from tests.support import relative_error

needs_triton = pytest.mark.skipif(
    not uses_triton(DEVICE, torch.float32), reason="no Triton; the twin is tested with the losses"
)

MODES = {
    "jsd": ("jsd", 0.3),
    "jsd even": ("jsd", 0.5),
    "jsd 0": ("jsd", 0.0),
    "jsd 1": ("jsd", 1.0),
    "forward": ("forward_kl", 0.5),
    "reverse": ("reverse_kl", 0.5),
    "tv": ("total_variation", 0.5),
}
ALL_MODES = MODES | {"nla": ("neg_log_acceptance", 0.5), "lk": ("lk_hybrid", 0.5)}
FACTORS = {
    "mode": list(ALL_MODES),
    "dtypes": [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp16", "fp16"), ("fp64", "fp64")],
    "vocab": [(17, 17), (1000, 1000), (2500, 2500), (2500, 1100), (1100, 2500)],
    "acceptance": ["", "of shared ids", "of all ids"],
    "rows": [False, True],
    "temperature": [1.0, 1.7],
    "softcap": [0.0, 6.0],
    "bias": [False, True],
    "scales": [(1.0, 1.2), (-0.6, 1.2), (1.0, -0.5)],
    "hard": [0.0, 0.4],
    "labels": [True, False],
    "write": [True, False],
    "close": [False, True],
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
ETA = 2.5


def divergence_of(student, teacher, divergence: str, beta: float, *, labels=None, factors=None, **options):
    """The kernel's numbers without a hard loss; with `gradient` written there, from ones in `factors`."""
    if options.setdefault("gradient") is not None and factors is None:
        factors = torch.ones(len(student), device=DEVICE)
    options = {"transform": LogitTransform(), "teacher_transform": LogitTransform()} | options
    return kernels.fused_divergence(
        student, teacher, labels, factors, divergence=divergence, beta=beta, hard_weight=0.0, **options
    )


def has_effect(case: dict) -> bool:
    return not case.get("hard") or case.get("labels", True)


def plain_divergences(
    log_q: torch.Tensor, log_p: torch.Tensor, beta: float, p_full: torch.Tensor | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Divergences by name from log-probabilities (n, D), and the acceptance rate, as their papers define
    them; `p_full`: the teacher's probabilities where they are not of these ids alone."""
    alpha = torch.minimum(log_q.exp(), log_p.exp() if p_full is None else p_full).sum(-1)
    forward, lam = kl(log_p, log_q), (-ETA * alpha.detach()).exp()
    return {
        "jsd": generalized_jsd(log_q, log_p, beta),
        "forward_kl": forward,
        "reverse_kl": kl(log_q, log_p),
        "total_variation": 1 - alpha,
        "neg_log_acceptance": -alpha.clamp(min=1e-5).log(),
        "lk_hybrid": lam * forward + (1 - lam) * (1 - alpha),
    }, alpha


@pytest.mark.parametrize("case", covering_array(FACTORS, has_effect, repeats=True))
def test_options(case):
    C, (V, V_teacher) = 6, case["vocab"]
    dtype, grad_dtype = (TYPES[name] for name in case["dtypes"])
    if DEVICE.type != "cpu" and dtype == torch.float64:
        pytest.skip("fp64 is the twin's, which is tested on the CPU")
    common, mass = min(case["vocab"]), case["acceptance"] == "of all ids"
    random = Random(case["seed"])
    student = (random.normal(C, V) * 3).to(dtype)
    # The ids from V_teacher on are the teacher's alone: the kernel sees only their share of its log-sum-exp.
    everything = (random.normal(4 if case["rows"] else C, V_teacher + 300 * mass) * 3).to(dtype)
    rows = torch.tensor([0, 0, 1, 1, 3, 3], device=DEVICE) if case["rows"] else None
    own = torch.arange(C, device=DEVICE) if rows is None else rows
    if case["close"]:
        near = student[:, :common].float() * (1 + 1e-2 * random.normal(C, common))
        everything[own, :common] = near.to(dtype)
        everything[own[0], :common] = student[0, :common]
    bias, teacher_bias = (
        random.normal(width) if case["bias"] else None for width in (V, everything.shape[1])
    )
    factors = random.normal(C) * 2
    factors[3] = 0.0
    scale, teacher_scale = case["scales"]
    transform = LogitTransform(case["softcap"] or None, scale, case["temperature"])
    teacher_transform = LogitTransform(case["softcap"] / 2 or None, teacher_scale, case["temperature"])
    (divergence, beta), hard = ALL_MODES[case["mode"]], case["hard"]

    x = student.double().clone().requires_grad_()
    z = transform.logits(x, bias)[0]
    taught = teacher_transform.logits(everything.double(), teacher_bias)[0][own]
    p_full = taught.softmax(-1)[:, :common] if mass else None
    log_q = z[:, :common].log_softmax(-1)
    actual, alpha = plain_divergences(log_q, taught[:, :common].log_softmax(-1), beta, p_full)
    labels, cross_entropy = None, torch.zeros_like(alpha)
    if case["labels"]:
        labels = torch.where(torch.arange(C, device=DEVICE) < 2, z.argmax(-1), random.integers(V, C))
        labels[2], labels[4] = -100, -1
        of_labels = (z * case["temperature"]).log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        cross_entropy = torch.where(labels >= 0, -of_labels, 0.0)
    total = hard * cross_entropy + (1 - hard) * actual[divergence]
    (truth,) = torch.autograd.grad((total * factors.double()).sum(), x)

    lse = None
    if mass:
        whole = taught.new_empty(len(everything)).index_copy_(0, own, taught.logsumexp(-1))
        stored = whole.to(torch.promote_types(dtype, torch.float32))
        lse = (stored, (whole - stored.double()).to(stored.dtype))
    gradient = None
    if case["write"]:
        gradient = student if grad_dtype == dtype else student.view(grad_dtype)[:, :V]
    result = kernels.fused_divergence(
        student,
        everything[:, :V_teacher].contiguous(),
        labels,
        factors if case["write"] else None,
        gradient=gradient,
        divergence=divergence,
        beta=beta,
        hard_weight=hard,
        transform=transform,
        teacher_transform=teacher_transform,
        bias=bias,
        teacher_bias=None if teacher_bias is None else teacher_bias[:V_teacher],
        overlap=bool(case["acceptance"]),
        teacher_rows=rows,
        teacher_lse=lse,
        lk_eta=ETA,
    )
    limit = 1e-12 if dtype == torch.float64 else 2e-5
    assert (result.acceptance is not None) == (
        bool(case["acceptance"]) or divergence in kernels.OF_ACCEPTANCE
    )
    if result.acceptance is not None:
        assert relative_error(result.acceptance, alpha.detach()) < limit
    # A divergence of close distributions cancels.
    assert relative_error(result.soft, actual[divergence].detach()) < (1e-8 if limit < 1e-6 else 5e-5)
    assert relative_error(result.entropy, -(log_q.exp() * log_q).sum(-1).detach()) < limit / 2
    assert torch.equal(result.agreement.bool(), z[:, :common].argmax(-1) == taught[:, :common].argmax(-1))
    if labels is None:
        assert not result.hard.any() and not result.is_top1.any()
    else:
        assert relative_error(result.hard, cross_entropy.detach()) < limit / 2
        assert torch.equal(result.is_top1.bool(), z.argmax(-1) == labels)
    if case["write"]:
        limits = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
        assert relative_error(gradient.double(), truth) < limits[grad_dtype]
        assert not gradient[3].any()


@needs_triton
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rise", [40.0, 200.0])
def test_maxima_in_the_last_block_and_certain_rows(mode, rise):
    divergence, beta = MODES[mode]
    student, teacher = Random().normal(2, 4, 3000)
    student[0, 2990], teacher[1, 2990] = rise, rise
    student[2, 5], teacher[2, 5] = rise, rise
    student[3, 5], teacher[3, 2990] = rise, rise

    def maths(dtype):
        z = student.to(dtype).requires_grad_()
        actual, _ = plain_divergences(z.log_softmax(-1), teacher.to(dtype).log_softmax(-1), beta)
        return actual[divergence].detach(), torch.autograd.grad(actual[divergence].sum(), z)[0]

    (values, truth), (_, naive) = maths(torch.float64), maths(torch.float32)
    actual = divergence_of(student, teacher, divergence, beta, gradient=student)
    assert relative_error(actual.soft, values) < 1e-5
    # A certain row's own gradient is the difference of two ones.
    assert relative_error(student, truth) < 2 * relative_error(naive, truth) + 3e-4


@pytest.mark.parametrize("gap", [1e-6, 1e-3, 1.0, 50.0, 1000.0])
def test_twin_of_any_gap(gap):
    """Values down to 1e-13, and log-ratios beyond what exp can hold."""
    random = Random()
    student = random.normal(5, 40).double().log_softmax(-1)
    teacher = (student + gap * random.normal(5, 40)).log_softmax(-1)
    for ours, expected in (
        (kernels.kl(student, teacher), kl(student, teacher)),
        (kernels.jsd(student, teacher, 0.3), generalized_jsd(student, teacher, 0.3)),
    ):
        assert relative_error(ours, expected) < 1e-6
    assert not kernels.jsd(student, student, 0.3).any()
    apart = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], device=DEVICE)
    assert kernels.jsd(apart[:1], apart[1:], 0.5).item() == pytest.approx(math.log(2))


def apart(gap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in fp32: each has an id that the other rates so many nats lower."""
    student, teacher = torch.zeros(2, 2, 5, device=DEVICE)
    student[0, 1], teacher[0, 2], teacher[1, 3] = -gap, -gap, gap
    return student, teacher


@pytest.mark.parametrize("gap", [1e-3, 1.0, 16.0, 18.0, 200.0, 3e4])
@pytest.mark.parametrize("alpha", [0.0, 1e-9, 0.1, 0.9, 1 - 1e-9, 1.0])
def test_skewed_kl_of_any_gap(alpha, gap):
    student, teacher = apart(gap)
    z, exact = student.clone().requires_grad_(), student.double().requires_grad_()
    values = kernels.skewed_kl(z.log_softmax(-1), teacher.log_softmax(-1), alpha)
    s, t = exact.log_softmax(-1), teacher.double().log_softmax(-1)
    truth = kl_to_mixture(t, s, 1 - alpha) + 0 * s.sum(-1)
    (gradient,), (expected,) = (torch.autograd.grad(x.sum(), y) for x, y in ((values, z), (truth, exact)))
    assert torch.allclose(values.double(), truth, rtol=1e-5, atol=1e-7)
    assert torch.allclose(gradient.double(), expected, rtol=1e-4, atol=2e-7)


@needs_triton
@pytest.mark.parametrize("gap", [1.0, 18.0, 200.0, 3e4])
@pytest.mark.parametrize(
    "divergence, beta",
    [("jsd", 1e-9), ("jsd", 1e-4), ("jsd", 0.3), ("jsd", 0.999), ("forward_kl", 0.5), ("reverse_kl", 0.5)],
)
def test_kernel_of_any_gap(divergence, beta, gap):
    student, teacher = apart(gap)
    exact = student.double().requires_grad_()
    actual, _ = plain_divergences(exact.log_softmax(-1), teacher.double().log_softmax(-1), beta)
    truth = actual[divergence]
    (expected,) = torch.autograd.grad(truth.sum(), exact)
    actual = divergence_of(student, teacher, divergence, beta, gradient=student)
    assert torch.allclose(actual.soft.double(), truth, rtol=2e-5, atol=1e-7)
    assert torch.allclose(student.double(), expected, rtol=1e-4, atol=3e-7)


@needs_triton
@pytest.mark.parametrize(
    "mode, whose",
    [
        *itertools.product(("jsd", "jsd even"), ("bias", "teacher_bias", "both")),
        # The reverse KL is infinite where only the teacher's are ruled out.
        *(("reverse", whose) for whose in ("bias", "both")),
    ],
)
def test_ids_that_a_bias_rules_out(mode, whose):
    """The whole first block of them, from which the shifts are taken."""
    divergence, beta = MODES[mode]
    student, teacher = Random().normal(2, 3, 2500)
    ruled_out = torch.zeros(2500, device=DEVICE)
    ruled_out[:1100] = -torch.inf
    biases = dict.fromkeys(("bias", "teacher_bias") if whose == "both" else (whose,), ruled_out)
    z = student.double().requires_grad_()
    logs = [
        (x + biases.get(name, torch.zeros_like(ruled_out)).double()).log_softmax(-1).clamp(min=-1e4)
        for name, x in (("bias", z), ("teacher_bias", teacher.double()))
    ]
    values = generalized_jsd(*logs, beta) if divergence == "jsd" else kl(*logs)
    (truth,) = torch.autograd.grad(values.sum(), z)
    actual = divergence_of(student, teacher, divergence, beta, gradient=student, **biases)
    assert relative_error(actual.soft, values.detach()) < 1e-5
    assert relative_error(student, truth) < 1e-5


@needs_triton
def test_the_first_of_equal_maxima_counts():
    """As torch.argmax has it: within a block and across blocks, of the student and of the teacher."""
    student, teacher = torch.zeros(4, 2500, device=DEVICE), torch.zeros(4, 2500, device=DEVICE)
    student[:, [5, 9, 1029]] = 3.0
    teacher[0, [5, 9, 1029]], teacher[1, [9, 1029]], teacher[2, 1029], teacher[3, 5] = 2.0, 2.0, 2.0, 2.0
    actual = divergence_of(student, teacher, "jsd", 0.5, labels=torch.tensor([5, 9, 1029, 5], device=DEVICE))
    assert actual.agreement.tolist() == [1, 0, 0, 1]
    assert actual.is_top1.tolist() == [1, 0, 0, 1]


class ThreadVocabulary(ShardedVocabulary):
    """A rank that is a thread of this process."""

    def gathered(self, x):
        return torch.stack(self.group.exchange(x.clone()))

    def all_reduce(self, x):
        return x.copy_(self.gathered(x).sum(0))


class ThreadGroup:
    """A rank's view of a group of threads. One runs at a time: Triton's interpreter has one state."""

    def __init__(self, rank: int, given: list, running: threading.Lock, barrier: threading.Barrier) -> None:
        self._rank, self._given, self._running, self._barrier = rank, given, running, barrier

    def rank(self) -> int:
        return self._rank

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self._rank] = x
        self._running.release()
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        self._running.acquire()
        return everything


def on_threads(world: int, function: Callable[[ThreadGroup], object]) -> list:
    """What `function` returns on each rank."""
    given, running, barrier = [None] * world, threading.Lock(), threading.Barrier(world, timeout=200)

    def run(rank: int) -> object:
        with running:
            return function(ThreadGroup(rank, given, running, barrier))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


SHARDED = {
    "mode": list(ALL_MODES),
    "rows": [False, True],
    "dtypes": [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16")],
    "temperature": [1.0, 1.7],
    "softcap": [0.0, 6.0],
    "bias": [False, True],
    "hard": [0.0, 0.4],
    "labels": [True, False],
    "write": [True, False],
}


@pytest.mark.parametrize("case", covering_array(SHARDED, has_effect, repeats=True))
def test_shards_are_the_whole(case):
    C, sizes = 5, (1300, 40, 1100)
    V = sum(sizes)
    dtype, grad_dtype = (TYPES[name] for name in case["dtypes"])
    random = Random(case["seed"])
    student, teacher = ((random.normal(C, V) * 3).to(dtype) for _ in range(2))
    bias, teacher_bias = (random.normal(V) if case["bias"] else None for _ in range(2))
    labels = (
        torch.tensor([3, 1310, -100, V - 1, 900], device=DEVICE)
        if case["labels"]
        else torch.full((C,), -100, device=DEVICE)
    )
    factors = random.normal(C) * 2 if case["write"] else None
    transform = LogitTransform(case["softcap"] or None, 1.0, case["temperature"])
    divergence, beta = ALL_MODES[case["mode"]]
    rows = torch.tensor([2, 0, 0, 3, 3], device=DEVICE) if case["rows"] else None
    options = {
        "divergence": divergence,
        "teacher_rows": rows,
        "beta": beta,
        "hard_weight": case["hard"],
        "transform": transform,
        "teacher_transform": LogitTransform(None, 0.8, 1.0),
    }

    def gradient_like(x):
        return poisoned(*x.shape, dtype=grad_dtype) if case["write"] else None

    whole = gradient_like(student)
    truth = kernels.fused_divergence(
        student, teacher, labels, factors, gradient=whole, bias=bias, teacher_bias=teacher_bias, **options
    )

    def on_rank(group):
        shard = ThreadVocabulary(group, sizes)
        cut = slice(shard.start, shard.start + shard.width)
        piece = gradient_like(student[:, cut])
        columns = torch.where(labels < 0, -1, shard.columns(labels, -100)[0])
        biases = {
            "bias": None if bias is None else bias[cut],
            "teacher_bias": None if teacher_bias is None else teacher_bias[cut],
        }
        logits = student[:, cut].contiguous(), teacher[:, cut].contiguous()
        actual = kernels.sharded_divergence(
            *logits, columns, factors, ranks=shard, gradient=piece, **biases, **options
        )
        return actual, piece

    numbers, pieces = zip(*on_threads(len(sizes), on_rank))
    for actual in numbers:
        for name, x, expected in zip(truth._fields, actual, truth, strict=True):
            assert (
                (x is None)
                == (expected is None)
                == (name == "acceptance" and divergence not in kernels.OF_ACCEPTANCE)
            )
            assert x is None or torch.allclose(x, expected, rtol=1e-4, atol=1e-5), name
    if case["write"]:
        assert relative_error(torch.cat(pieces, 1), whole) < (1e-4 if grad_dtype == torch.float32 else 5e-3)


@needs_triton
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_another_default_dtype(default):
    """Loss and gradient of three tokens, bit for bit: neither buffers nor factors are of that dtype."""
    random = Random()
    hidden, teacher, weight = random.normal(3, 8), random.normal(3, 8), random.normal(40, 8)
    leaf = weight.clone().requires_grad_()

    def results():
        loss = JSDLoss(temperature=1.3)(hidden, leaf, teacher_hidden=teacher, teacher_weight=weight).loss
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    expected = results()
    torch.set_default_dtype(default)
    try:
        actual = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_a_draft_that_is_the_verifier(dtype, mode, overlap):
    """Loss 0, gradient 0, acceptance 1, exactly."""
    if dtype == torch.float32 and not uses_triton(DEVICE, dtype):
        pytest.skip("no Triton: this would be the twin, in fp32")
    divergence, beta = ALL_MODES[mode]
    student = (Random().normal(3, 2100) * 5).to(dtype)
    gradient = torch.full_like(student, torch.nan)
    actual = divergence_of(student, student.clone(), divergence, beta, gradient=gradient, overlap=overlap)
    assert not actual.soft.any() and not gradient.any() and actual.agreement.all()
    assert actual.acceptance is None or (actual.acceptance == 1).all()
    assert actual.acceptance is not None or not (overlap or divergence in kernels.OF_ACCEPTANCE)


@pytest.mark.parametrize("gap", [1e-4, 1.0, 9.0, 20.0, 100.0])
@pytest.mark.parametrize("divergence", kernels.OF_ACCEPTANCE)
def test_rates_near_one_and_near_nothing(divergence, gap):
    """1 - alpha of 1e-5, and an alpha below the bound, at which the negative logarithm stops."""
    student, teacher = torch.zeros(2, 1, 2, device=DEVICE)
    student[0, 0], teacher[0, 1] = gap / 2, gap / 2
    x = student.double().requires_grad_()
    expected, alpha = plain_divergences(x.log_softmax(-1), teacher.double().log_softmax(-1), 0.5)
    (truth,) = torch.autograd.grad(expected[divergence].sum(), x)
    gradient = torch.empty_like(student)
    actual = divergence_of(student, teacher, divergence, 0.5, gradient=gradient, lk_eta=ETA)
    assert torch.allclose(actual.soft.double(), expected[divergence].detach(), rtol=1e-5, atol=2e-7)
    assert torch.allclose(actual.acceptance.double(), alpha.detach(), rtol=1e-5, atol=0)
    assert torch.allclose(gradient.double(), truth, rtol=1e-4, atol=2e-7)
