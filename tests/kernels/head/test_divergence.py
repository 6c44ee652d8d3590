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
from tests import reference
from tests.cases import covering_array
from tests.kernels.support import DEVICE, Random, poisoned
from tests.reference.distillation import generalized_jsd, kl
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
    "mode": list(MODES),
    "dtypes": [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp16", "fp16")],
    "vocab": [(17, 17), (1000, 1000), (2500, 2500), (2500, 1100), (1100, 2500)],
    "temperature": [1.0, 1.7],
    "softcap": [0.0, 6.0],
    "bias": [False, True],
    "scale": [1.0, -0.6],
    "hard": [0.0, 0.4],
    "labels": [True, False],
    "write": [True, False],
    "close": [False, True],
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def divergence_of(student, teacher, divergence: str, beta: float, *, labels=None, factors=None, **options):
    """The kernel's numbers without a hard loss; with `gradient` written there, from ones in `factors`."""
    if options.setdefault("gradient") is not None and factors is None:
        factors = torch.ones(len(student), device=DEVICE)
    options = {"head": LogitTransform(), "teacher_head": LogitTransform()} | options
    return kernels.fused_divergence(
        student, teacher, labels, factors, divergence=divergence, beta=beta, hard_weight=0.0, **options
    )


def has_effect(case: dict) -> bool:
    return not case.get("hard") or case.get("labels", True)


@needs_triton
@pytest.mark.parametrize("case", covering_array(FACTORS, has_effect))
def test_options(case):
    C, (V, V_teacher) = 6, case["vocab"]
    dtype, grad_dtype = (TYPES[name] for name in case["dtypes"])
    random = Random(case["seed"])
    student = (random.normal(C, V) * 3).to(dtype)
    teacher = (random.normal(C, V_teacher) * 3).to(dtype)
    if case["close"] and V == V_teacher:
        teacher = (student.float() * (1 + 1e-2 * random.normal(C, V))).to(dtype)
        teacher[0] = student[0]
    bias, teacher_bias = (random.normal(width) if case["bias"] else None for width in (V, V_teacher))
    labels = random.integers(V, C) if case["labels"] else None
    if labels is not None:
        labels[2] = -100
    factors = random.normal(C) * 2
    factors[3] = 0.0
    head = LogitTransform(case["softcap"] or None, case["scale"], case["temperature"])
    teacher_head = LogitTransform(case["softcap"] / 2 or None, 1.2, case["temperature"])
    divergence, beta = MODES[case["mode"]]

    z = student.double().requires_grad_()
    maths = {
        "divergence": divergence,
        "beta": beta,
        "hard_loss_weight": case["hard"],
        "temperature": case["temperature"],
    }
    values, _ = reference.distillation(
        z,
        torch.eye(V, dtype=torch.float64, device=DEVICE),
        torch.full((C,), 0, device=DEVICE) if labels is None else labels.clamp(min=0),
        teacher_hidden=teacher.double(),
        teacher_weight=torch.eye(V_teacher, dtype=torch.float64, device=DEVICE),
        bias=None if bias is None else bias.double(),
        teacher_bias=None if teacher_bias is None else teacher_bias.double(),
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        teacher_softcap=teacher_head.softcap,
        teacher_logit_scale=1.2,
        reduction="none",
        **maths,
    )
    # The row without a label has no cross-entropy.
    rows = torch.ones(C, device=DEVICE, dtype=torch.bool)
    if labels is not None and case["hard"]:
        rows[2] = False
    (truth,) = torch.autograd.grad((values * factors.double() * rows).sum(), z)

    gradient = None
    if case["write"]:
        gradient = student if grad_dtype == dtype else student.view(grad_dtype)[:, :V]
    found = kernels.fused_divergence(
        student,
        teacher,
        labels,
        factors if case["write"] else None,
        gradient=gradient,
        divergence=divergence,
        beta=beta,
        hard_weight=case["hard"],
        head=head,
        teacher_head=teacher_head,
        bias=bias,
        teacher_bias=teacher_bias,
    )
    total = case["hard"] * found.hard + (1 - case["hard"]) * found.soft
    assert relative_error(total[rows], values.detach()[rows]) < 2e-5
    check_numbers(found, z.detach(), teacher.double(), labels, head, teacher_head, bias, teacher_bias)
    if case["write"]:
        written = gradient[rows].double()
        limit = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[grad_dtype]
        assert relative_error(written, truth[rows]) < limit
        assert not gradient[3].any()


def check_numbers(found, z, teacher, labels, head, teacher_head, bias, teacher_bias) -> None:
    tempered = head.logits(z, bias)[0]
    common = min(tempered.shape[1], teacher.shape[1])
    log_p = tempered[:, :common].log_softmax(-1)
    assert relative_error(found.entropy, -(log_p.exp() * log_p).sum(-1)) < 1e-5
    theirs = teacher_head.logits(teacher, teacher_bias)[0][:, :common].argmax(-1)
    assert torch.equal(found.agreement.bool(), tempered[:, :common].argmax(-1) == theirs)
    if labels is None:
        assert not found.hard.any() and not found.is_top1.any()
        return
    assert torch.equal(found.is_top1.bool(), tempered.argmax(-1) == labels)
    cold = head._replace(temperature=1.0).logits(z, bias)[0].log_softmax(-1)
    hard = torch.where(labels >= 0, -cold.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    assert relative_error(found.hard, hard) < 1e-5


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
        z, eye = student.to(dtype).requires_grad_(), torch.eye(3000, dtype=dtype, device=DEVICE)
        values, _ = reference.distillation(
            z,
            eye,
            teacher_hidden=teacher.to(dtype),
            teacher_weight=eye,
            divergence=divergence,
            beta=beta,
            reduction="none",
        )
        return values.detach(), torch.autograd.grad(values.sum(), z)[0]

    (values, truth), (_, naive) = maths(torch.float64), maths(torch.float32)
    found = divergence_of(student, teacher, divergence, beta, gradient=student)
    assert relative_error(found.soft, values) < 1e-5
    # A certain row's own gradient is the difference of two ones.
    assert relative_error(student, truth) < 2 * relative_error(naive, truth) + 3e-4


@pytest.mark.parametrize("gap", [1e-6, 1e-3, 1.0, 50.0, 1000.0])
def test_twin_of_any_gap(gap):
    """Values down to 1e-13, and log-ratios beyond what exp can hold."""
    random = Random()
    student = random.normal(5, 40).double().log_softmax(-1)
    teacher = (student + gap * random.normal(5, 40)).log_softmax(-1)
    for ours, theirs in (
        (kernels.kl(student, teacher), kl(student, teacher)),
        (kernels.jsd(student, teacher, 0.3), generalized_jsd(student, teacher, 0.3)),
    ):
        assert relative_error(ours, theirs) < 1e-6
    assert not kernels.jsd(student, student, 0.3).any()
    apart = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], device=DEVICE)
    assert kernels.jsd(apart[:1], apart[1:], 0.5).item() == pytest.approx(math.log(2))


def apart(gap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in fp32: each has an id that the other rates so many nats lower."""
    student, teacher = torch.zeros(2, 2, 5, device=DEVICE)
    student[0, 1], teacher[0, 2], teacher[1, 3] = -gap, -gap, gap
    return student, teacher


def of_mixture(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """log(beta t + (1 - beta) s) of log-probabilities in fp64."""
    if beta in (0.0, 1.0):
        return teacher if beta else student
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


@pytest.mark.parametrize("gap", [1e-3, 1.0, 16.0, 18.0, 200.0, 3e4])
@pytest.mark.parametrize("alpha", [0.0, 1e-9, 0.1, 0.9, 1 - 1e-9, 1.0])
def test_skewed_kl_of_any_gap(alpha, gap):
    student, teacher = apart(gap)
    z, exact = student.clone().requires_grad_(), student.double().requires_grad_()
    values = kernels.skewed_kl(z.log_softmax(-1), teacher.log_softmax(-1), alpha)
    s, t = exact.log_softmax(-1), teacher.double().log_softmax(-1)
    truth = (t.exp() * (t - of_mixture(s, t, alpha)) + 0 * s).sum(-1)
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
    s, t = exact.log_softmax(-1), teacher.double().log_softmax(-1)
    m = of_mixture(s, t, beta)
    truth = {
        "jsd": lambda: (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1),
        "forward_kl": lambda: (t.exp() * (t - s)).sum(-1),
        "reverse_kl": lambda: (s.exp() * (s - t)).sum(-1),
    }[divergence]()
    (expected,) = torch.autograd.grad(truth.sum(), exact)
    found = divergence_of(student, teacher, divergence, beta, gradient=student)
    assert torch.allclose(found.soft.double(), truth, rtol=2e-5, atol=1e-7)
    assert torch.allclose(student.double(), expected, rtol=1e-4, atol=3e-7)


@needs_triton
@pytest.mark.parametrize("mode", MODES)
def test_ids_of_the_student_alone_have_no_divergence(mode):
    divergence, beta = MODES[mode]
    student, teacher = Random().normal(3, 1500), Random().normal(3, 1100) * 2
    z = student.double().requires_grad_()
    ours, theirs = z[:, :1100].log_softmax(-1), teacher.double().log_softmax(-1)
    values = {
        "jsd": lambda: generalized_jsd(ours, theirs, beta),
        "forward_kl": lambda: kl(theirs, ours),
        "reverse_kl": lambda: kl(ours, theirs),
        "total_variation": lambda: 0.5 * (ours.exp() - theirs.exp()).abs().sum(-1),
    }[divergence]()
    (truth,) = torch.autograd.grad(values.sum(), z)
    gradient = torch.full_like(student, torch.nan)
    divergence_of(student, teacher, divergence, beta, gradient=gradient)
    assert not gradient[:, 1100:].any()
    assert relative_error(gradient, truth) < 2e-6


@needs_triton
@pytest.mark.parametrize(
    "mode, whose",
    [
        *itertools.product(("jsd", "jsd even"), ("bias", "teacher_bias", "both")),
        *(
            ("reverse", whose) for whose in ("bias", "both")
        ),  # infinite where only the teacher's are ruled out
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
    found = divergence_of(student, teacher, divergence, beta, gradient=student, **biases)
    assert relative_error(found.soft, values.detach()) < 1e-5
    assert relative_error(student, truth) < 1e-5


@needs_triton
@pytest.mark.parametrize("scales", [(-0.5, 1.0), (1.0, -0.5)])
def test_a_negative_scale_turns_the_order(scales):
    student, teacher = Random().normal(2, 3, 1100)
    heads = [LogitTransform(None, scale) for scale in scales]
    logits = [scale * x.double() for scale, x in zip(scales, (student, teacher))]
    expected = generalized_jsd(*(z.log_softmax(-1) for z in logits), 0.5)
    best = [z.argmax(-1) for z in logits]
    found = divergence_of(student, teacher, "jsd", 0.5, labels=best[0], head=heads[0], teacher_head=heads[1])
    assert relative_error(found.soft, expected) < 1e-5
    assert found.is_top1.all() and torch.equal(found.agreement.bool(), best[0] == best[1])


@needs_triton
def test_the_first_of_equal_maxima_counts():
    """As torch.argmax has it: within a block and across blocks, of the student and of the teacher."""
    student, teacher = torch.zeros(4, 2500, device=DEVICE), torch.zeros(4, 2500, device=DEVICE)
    student[:, [5, 9, 1029]] = 3.0
    teacher[0, [5, 9, 1029]], teacher[1, [9, 1029]], teacher[2, 1029], teacher[3, 5] = 2.0, 2.0, 2.0, 2.0
    found = divergence_of(student, teacher, "jsd", 0.5, labels=torch.tensor([5, 9, 1029, 5], device=DEVICE))
    assert found.agreement.tolist() == [1, 0, 0, 1]
    assert found.is_top1.tolist() == [1, 0, 0, 1]


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


@pytest.mark.parametrize("case", covering_array(SHARDED, has_effect))
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
    head = LogitTransform(case["softcap"] or None, 1.0, case["temperature"])
    divergence, beta = ALL_MODES[case["mode"]]
    rows = torch.tensor([2, 0, 0, 3, 3], device=DEVICE) if case["rows"] else None
    options = {
        "divergence": divergence,
        "teacher_rows": rows,
        "beta": beta,
        "hard_weight": case["hard"],
        "head": head,
        "teacher_head": LogitTransform(None, 0.8, 1.0),
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
        found = kernels.sharded_divergence(
            *logits, columns, factors, ranks=shard, gradient=piece, **biases, **options
        )
        return found, piece

    numbers, pieces = zip(*on_threads(len(sizes), on_rank))
    for found in numbers:
        for name, x, expected in zip(truth._fields, found, truth, strict=True):
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
    head = weight.clone().requires_grad_()

    def results():
        loss = JSDLoss(temperature=1.3)(hidden, head, teacher_hidden=teacher, teacher_weight=weight).loss
        return loss.detach(), *torch.autograd.grad(loss, head)

    expected = results()
    torch.set_default_dtype(default)
    try:
        found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


# The acceptance rate, in the kernel and in the twin.

RATES = {
    "mode": [mode for mode in ALL_MODES if mode not in ("jsd 0", "jsd 1")],
    "dtypes": [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp64", "fp64")],
    "vocab": [17, 1000, 2500],
    "mass": [True, False],
    "rows": [True, False],
    "temperature": [1.0, 1.7],
    "softcap": [0.0, 6.0],
    "bias": [False, True],
    "hard": [0.0, 0.4],
    "write": [True, False],
    "near": [False, True],
}


def plain_divergences(q: torch.Tensor, p: torch.Tensor, p_full: torch.Tensor, beta: float, eta: float):
    """Divergences by name from distributions (n, D), and the acceptance rate, as their papers define them."""
    alpha = torch.minimum(q, p_full).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    m = beta * p + (1 - beta) * q
    lam = (-eta * alpha.detach()).exp()
    return {
        "jsd": (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1),
        "forward_kl": kl,
        "reverse_kl": (q * (q.log() - p.log())).sum(-1),
        "total_variation": 1 - alpha,
        "neg_log_acceptance": -alpha.clamp(min=1e-5).log(),
        "lk_hybrid": lam * kl + (1 - lam) * (1 - alpha),
    }, alpha


@pytest.mark.parametrize("case", covering_array(RATES, lambda case: True))
def test_acceptance_rates(case):
    dtype, grad_dtype = (TYPES[name] for name in case["dtypes"])
    if DEVICE.type != "cpu" and dtype == torch.float64:
        pytest.skip("fp64 is the twin's, which is tested on the CPU")
    random, C, D = Random(case["seed"]), 6, case["vocab"]
    V, R = (D + 300 if case["mass"] else D), (4 if case["rows"] else C)
    student = random.normal(C, D).to(dtype) * 2
    everything = random.normal(R, V).to(dtype) * 2
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:D].to(DEVICE)
    rows = torch.tensor([0, 0, 1, 1, 3, 3], device=DEVICE) if case["rows"] else None
    own = torch.arange(C, device=DEVICE) if rows is None else rows
    if case["near"]:
        everything[:, ids] = 0
        everything[own[:, None], ids] = (student.float() * (1 + 1e-2 * random.normal(C, D))).to(dtype)
    bias = random.normal(D) if case["bias"] else None
    teacher_bias = random.normal(V) if case["bias"] else None
    labels = random.integers(D, C)
    labels[2] = -1
    factors = random.normal(C)
    factors[3] = 0.0
    head = LogitTransform(case["softcap"] or None, 1.0, case["temperature"])
    teacher_head = LogitTransform(case["softcap"] / 2 or None, 1.2, case["temperature"])
    (divergence, beta), eta, hard = ALL_MODES[case["mode"]], 2.5, case["hard"]

    x = student.double().clone().requires_grad_()
    z = head.logits(x, None if bias is None else bias.double())[0]
    taught = teacher_head.logits(
        everything.double(), None if teacher_bias is None else teacher_bias.double()
    )[0][own]
    full = taught.softmax(-1)[:, ids]
    found, alpha = plain_divergences(z.softmax(-1), taught[:, ids].softmax(-1), full, beta, eta)
    known = labels >= 0
    log_q = (z * case["temperature"]).log_softmax(-1)
    cross_entropy = torch.where(known, -log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    total = hard * cross_entropy + (1 - hard) * found[divergence]
    (truth,) = torch.autograd.grad((total * factors.double()).sum(), x)

    lse = None
    if case["mass"]:
        whole = taught.new_empty(R).index_copy_(0, own, taught.logsumexp(-1))
        stored = whole.to(torch.promote_types(dtype, torch.float32))
        lse = (stored, (whole - stored.double()).to(stored.dtype))
    gradient = None
    logits = student.clone()
    if case["write"]:
        gradient = logits if grad_dtype == dtype else logits.view(grad_dtype)[:, :D]
    result = kernels.fused_divergence(
        logits,
        everything[:, ids].contiguous(),
        labels,
        factors if case["write"] else None,
        gradient=gradient,
        divergence=divergence,
        beta=beta,
        hard_weight=hard,
        head=head,
        teacher_head=teacher_head,
        bias=bias,
        teacher_bias=None if teacher_bias is None else teacher_bias[ids],
        overlap=True,
        teacher_rows=rows,
        teacher_lse=lse,
        lk_eta=eta,
    )
    limit = 1e-12 if dtype == torch.float64 else 2e-5
    assert relative_error(result.acceptance, alpha.detach()) < limit
    assert relative_error(result.soft, found[divergence].detach()) < (1e-8 if limit < 1e-6 else 5e-5)
    assert relative_error(result.hard, cross_entropy.detach()) < limit
    assert torch.equal(result.agreement.bool(), z.argmax(-1) == taught[:, ids].argmax(-1))
    if case["write"]:
        # An id whose probabilities are equal but for rounding may be counted on either side.
        limit = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 8e-3}[grad_dtype]
        assert relative_error(gradient.double(), truth) < limit, relative_error(gradient.double(), truth)
        assert not gradient[3].any()


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
    found = divergence_of(student, student.clone(), divergence, beta, gradient=gradient, overlap=overlap)
    assert not found.soft.any() and not gradient.any() and found.agreement.all()
    assert found.acceptance is None or (found.acceptance == 1).all()
    assert found.acceptance is not None or not (overlap or divergence in kernels.OF_ACCEPTANCE)


@pytest.mark.parametrize("gap", [1e-4, 1.0, 9.0, 20.0, 100.0])
@pytest.mark.parametrize("divergence", kernels.OF_ACCEPTANCE)
def test_rates_near_one_and_near_nothing(divergence, gap):
    """1 - alpha of 1e-5, and an alpha below the bound, at which the negative logarithm stops."""
    student, teacher = torch.zeros(2, 1, 2, device=DEVICE)
    student[0, 0], teacher[0, 1] = gap / 2, gap / 2
    x = student.double().requires_grad_()
    q, p = x.softmax(-1), teacher.double().softmax(-1)
    expected, alpha = plain_divergences(q.clamp(min=1e-300), p.clamp(min=1e-300), p, 0.5, 3.0)
    (truth,) = torch.autograd.grad(expected[divergence].sum(), x)
    gradient = torch.empty_like(student)
    found = divergence_of(student, teacher, divergence, 0.5, gradient=gradient)
    assert torch.allclose(found.soft.double(), expected[divergence].detach(), rtol=1e-5, atol=2e-7)
    assert torch.allclose(found.acceptance.double(), alpha.detach(), rtol=1e-5, atol=0)
    assert torch.allclose(gradient.double(), truth, rtol=1e-4, atol=2e-7)
