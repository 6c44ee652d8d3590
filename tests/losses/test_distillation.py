"""Distillation losses against the fp64 reference: every divergence, teacher and option, on the twin and
through the kernel."""

import math

import pytest
import torch
from torch import Tensor

from logitless import DistillationLoss, JSDLoss
from logitless.losses.distillation import NAMES
from tests import reference
from tests.cases import DTYPES
from tests.support import (
    DEVICE,
    AllocationWatcher,
    EngineCalls,
    GemmCounter,
    assert_close,
    assert_metrics_close,
    relative_error,
    run,
)

H, V, H_TEACHER = 16, 150, 12

DIVERGENCES = {
    **{name: {"divergence": name} for name in NAMES},
    "jsd 0": {"beta": 0.0},
    "jsd 1": {"beta": 1.0},
    "jsd 0.1": {"beta": 0.1},
    "skewed 0.4": {"divergence": "skewed_kl", "skew_alpha": 0.4},
}
TEACHERS = (
    "same vocabulary",
    "larger vocabulary",
    "smaller vocabulary",
    "tail",
    "renormalize",
    "all ids",
    "empty slots",
)
HEADS = {
    "": {},
    "capped": {"softcap": 9.0, "teacher_softcap": 5.0, "logit_scale": 0.7, "teacher_logit_scale": 1.4},
    "tempered": {"temperature": 1.7, "softcap": 9.0},
}


# The function itself is what is tested; that it is compiled, test_own_loss.py shows once.
pytestmark = pytest.mark.usefixtures("uncompiled")


class Problem:
    def __init__(
        self, teacher: str = "same vocabulary", *, seed: int = 0, dtype=torch.float64, shape=(5, 11), vocab=V
    ):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(
            DEVICE, dtype
        )
        self.shape = shape
        self.hidden, self.weight, self.bias = (
            self.random(*shape, H),
            self.random(vocab, H) / 2,
            self.random(vocab),
        )
        self.targets = torch.randint(0, vocab, shape, generator=generator).to(DEVICE)
        self.targets[:, ::4] = -100
        self.mask = (torch.rand(shape, generator=generator) < 0.8).to(DEVICE)
        width = {"larger vocabulary": vocab + 23, "smaller vocabulary": vocab - 23}.get(teacher, vocab)
        heads = {
            "teacher_hidden": self.random(*shape, H_TEACHER),
            "teacher_weight": self.random(width, H_TEACHER) / 2,
        }
        self.teacher = heads | {"teacher_bias": self.random(width)}
        self.settings = {}
        if not teacher.endswith("vocabulary"):
            self.settings["topk_mode"] = "renormalize" if teacher == "renormalize" else "tail"
            log_p = (heads["teacher_hidden"] @ heads["teacher_weight"].T).log_softmax(-1)
            values, ids = log_p.topk(vocab if teacher == "all ids" else 6)
            if teacher == "empty slots":
                values[..., 4:], ids[..., 4:] = -math.inf, -1
            self.teacher = {"teacher_logprobs_topk": (values, ids)}


def compare(ours, truth, metrics, tolerance) -> None:
    assert relative_error(ours.value, truth.value) < tolerance
    for name, gradient in truth.grads.items():
        assert gradient.norm() > 0, name
        assert relative_error(ours.grads[name], gradient) < 20 * tolerance, name
    assert_metrics_close(ours.output.metrics, metrics, tolerance)


def both(
    problem: Problem,
    settings: dict,
    *,
    targets=True,
    mask=True,
    num_items=None,
    requires=("hidden", "weight", "bias"),
    budget=None,
):
    inputs = problem.teacher | ({"mask": problem.mask} if mask else {})
    found = {}

    def truth_loss(h, w, t, *, bias):
        teacher = dict(inputs)
        if "teacher_logprobs_topk" in teacher:
            values, ids = teacher["teacher_logprobs_topk"]
            teacher["teacher_logprobs_topk"] = values, ids.clamp(min=0)
        value, found["metrics"] = reference.distillation(
            h, w, t if targets else None, bias=bias, num_items=num_items, **settings, **teacher
        )
        return value

    def our_loss(h, w, t, *, bias):
        return DistillationLoss(**settings, logits_budget=budget)(
            h, w, t if targets else None, bias=bias, num_items=num_items, **inputs
        )

    operands = problem.hidden, problem.weight, problem.targets, problem.bias
    upstream = 1.7
    if settings.get("reduction") == "none":
        upstream = torch.randn(
            problem.shape, dtype=torch.float64, generator=torch.Generator(DEVICE).manual_seed(1)
        )
    return (
        run(our_loss, *operands, upstream, requires),
        run(truth_loss, *operands, upstream, requires),
        found["metrics"],
    )


def cases():
    number = 0
    for name, settings in DIVERGENCES.items():
        for teacher in TEACHERS:
            if name == "cosine" and not teacher.endswith("vocabulary"):
                continue
            for head in HEADS:
                number += 1
                reduction, hard = ("mean", "sum", "none")[number % 3], (0.0, 0.3, 1.0)[number // 3 % 3]
                yield pytest.param(
                    settings,
                    teacher,
                    head,
                    reduction,
                    hard,
                    number,
                    id=f"{name}-{teacher}-{head}-{reduction}-{hard}",
                )


@pytest.mark.parametrize("settings, teacher, head, reduction, hard, number", list(cases()))
def test_equals_the_reference(settings, teacher, head, reduction, hard, number):
    problem = Problem(teacher, seed=number)
    settings = settings | HEADS[head] | problem.settings | {"reduction": reduction, "hard_loss_weight": hard}
    targets = hard > 0 or number % 2 == 0
    num_items = 17 if reduction == "mean" and number % 2 else None
    requires = ("hidden", "weight", "bias") if number % 4 else ("hidden",)
    # A third of the tokens at a time, or all at once.
    budget = (17 * V * 8 * 40) if number % 3 else None
    ours, truth, metrics = both(
        problem,
        settings,
        targets=targets,
        mask=number % 5 > 0,
        num_items=num_items,
        requires=requires,
        budget=budget,
    )
    compare(ours, truth, metrics, 1e-9)
    strategy = ours.output.plan.strategy
    assert strategy == ("recompute" if reduction == "none" else "fused"), ours.output.plan.describe()


@pytest.mark.parametrize("divergence", NAMES)
def test_nearly_equal_and_equal_distributions(divergence):
    """A JSD of 1e-3 is right to 1% in bf16, and of two equal models exactly 0, with gradients of 0."""
    problem = Problem(seed=3, shape=(4, 64), vocab=999)
    weight = problem.weight.bfloat16()
    student, teacher = (
        problem.hidden.bfloat16(),
        (problem.hidden + 0.03 * problem.random(*problem.shape, H)).bfloat16(),
    )
    loss = DistillationLoss(divergence=divergence)

    def call(h, w, t, *, bias, teacher=teacher):
        return loss(h, w, teacher_hidden=teacher, teacher_weight=weight)

    ours = run(call, student, weight, problem.targets)
    exact = {"teacher_hidden": teacher.double(), "teacher_weight": weight.double()}
    truth = run(
        lambda h, w, t, *, bias: reference.distillation(h, w, divergence=divergence, **exact)[0],
        student.double(),
        weight.double(),
        problem.targets,
    )
    # Logits rounded to bf16 are a few percent off by themselves; fp32 ones show the arithmetic.
    precise = DistillationLoss(divergence=divergence, logits_dtype=torch.float32)
    value = precise(student, weight, teacher_hidden=teacher, teacher_weight=weight).loss
    assert truth.value < 0.1
    assert relative_error(value, truth.value) < 0.01
    # The gradient of the total variation is a sign, which rounding may turn.
    assert relative_error(ours.grads["hidden"], truth.grads["hidden"]) < (
        0.5 if divergence == "total_variation" else 0.2
    )

    same = run(
        lambda h, w, t, *, bias: call(h, w, t, bias=bias, teacher=student), student, weight, problem.targets
    )
    limit = 1e-12 if divergence == "cosine" else 0.0
    assert same.value.abs() <= limit
    assert all(gradient.abs().max() <= 1e-6 * (divergence == "cosine") for gradient in same.grads.values())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "name", ["jsd", "forward_kl", "reverse_kl", "skewed_kl", "total_variation", "cosine"]
)
def test_within_twice_the_naive_error(name, dtype):
    problem = Problem(seed=4, dtype=dtype)

    def maths(cast):
        teacher = {key: cast(x) for key, x in problem.teacher.items()}

        def loss(h, w, t, *, bias):
            return reference.distillation(
                h, w, t, bias=bias, divergence=name, hard_loss_weight=0.2, **teacher
            )[0]

        return run(loss, cast(problem.hidden), cast(problem.weight), problem.targets, cast(problem.bias), 1.7)

    naive, truth = maths(lambda x: x), maths(Tensor.double)
    loss = DistillationLoss(divergence=name, hard_loss_weight=0.2)
    ours = run(
        lambda h, w, t, *, bias: loss(h, w, t, bias=bias, **problem.teacher),
        problem.hidden,
        problem.weight,
        problem.targets,
        problem.bias,
        1.7,
    )
    assert_close(
        ours.value,
        truth.value,
        max(relative_error(naive.value, truth.value), torch.finfo(dtype).eps),
        name="loss",
    )
    for operand in truth.grads:
        assert_close(ours.grads[operand], truth.grads[operand], naive.grads[operand], name=f"d_{operand}")


def test_padded_entries_take_no_part():
    """Logits of -inf, written by nobody: what lies beyond the common vocabulary changes nothing."""
    problem = Problem("larger vocabulary", seed=5)
    cut = {name: x[:V] if name != "teacher_hidden" else x for name, x in problem.teacher.items()}
    loss = JSDLoss()
    whole, part = (loss(problem.hidden, problem.weight, **teacher).loss for teacher in (problem.teacher, cut))
    assert relative_error(whole, part) < 1e-12


def test_top_k_of_everything_is_the_whole_teacher():
    problem = Problem(seed=6)
    logits = (
        problem.teacher["teacher_hidden"] @ problem.teacher["teacher_weight"].T
        + problem.teacher["teacher_bias"]
    )
    for mode in ("tail", "renormalize"):
        topk = DistillationLoss(topk_mode=mode)(
            problem.hidden, problem.weight, teacher_logprobs_topk=logits.log_softmax(-1).topk(V)
        )
        whole = JSDLoss()(problem.hidden, problem.weight, **problem.teacher)
        assert relative_error(topk.loss, whole.loss) < 1e-10
        assert topk.metrics["agreement"] == whole.metrics["agreement"]


@pytest.mark.parametrize("trainable, products", [(True, 3), (False, 2)], ids=["trainable", "frozen head"])
def test_products(trainable, products):
    """Three products of the student, two with a frozen head, and the teacher's one: no gradient reaches
    it."""
    N, hidden, vocab = 64, 16, 200
    student, weight = (
        torch.randn(N, hidden, requires_grad=True),
        torch.randn(vocab, hidden).requires_grad_(trainable),
    )
    teacher = {
        "teacher_hidden": torch.randn(N, hidden, requires_grad=True),
        "teacher_weight": torch.randn(vocab, hidden, requires_grad=True),
    }
    with GemmCounter(N, vocab, hidden) as counter:
        JSDLoss()(student, weight, **teacher).loss.backward()
    assert counter.gemms == pytest.approx(products + 1, abs=0.02)
    assert all(x.grad is None for x in teacher.values())


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("N", [1, 100, 4000])
def test_memory_is_flat_in_the_tokens(N):
    hidden, vocab, budget = 8, 500, 4 * 2**20
    student, weight = (
        torch.randn(N, hidden, requires_grad=True),
        torch.randn(vocab, hidden, requires_grad=True),
    )
    teacher = {"teacher_hidden": torch.randn(N, hidden), "teacher_weight": torch.randn(vocab, hidden)}
    loss = JSDLoss(logits_budget=budget)
    loss(student, weight, **teacher).loss.backward()
    student.grad = weight.grad = None
    with AllocationWatcher() as watch:
        loss(student, weight, **teacher).loss.backward()
    assert watch.peak <= budget * 1.02 + 2 * weight.nbytes + 2 * student.nbytes + 64 * 4 * N


def test_nothing_counted_is_zero():
    problem = Problem(seed=7)
    problem.mask = torch.zeros_like(problem.mask)
    ours, _, _ = both(problem, {"hard_loss_weight": 0.5})
    assert ours.value == 0 and not any(gradient.any() for gradient in ours.grads.values())


# -- numbers by hand: s = (3/4, 1/4), t = (1/2, 1/2)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"divergence": "forward_kl"}, 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)),
        ({"divergence": "reverse_kl"}, 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)),
        ({"divergence": "total_variation"}, 0.25),
        (
            {},
            0.25 * (math.log(0.5 / 0.625) + math.log(0.5 / 0.375))
            + 0.5 * (0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375)),
        ),
        (
            {"divergence": "skewed_kl", "skew_alpha": 0.5},
            0.5 * (math.log(0.5 / 0.625) + math.log(0.5 / 0.375)),
        ),
        ({"divergence": "total_variation", "hard_loss_weight": 0.5}, 0.5 * 0.25 - 0.5 * math.log(0.75)),
    ],
)
def test_by_hand(settings, expected):
    hidden, weight = torch.ones(2, 1), torch.tensor([[math.log(3)], [0.0]])
    value = DistillationLoss(**settings)(
        hidden,
        weight,
        torch.tensor([0, 0]),
        teacher_hidden=torch.ones(2, 1),
        teacher_weight=torch.zeros(2, 1),
    ).loss
    assert value.item() == pytest.approx(expected, abs=1e-6)


# -- bad input


def call(loss=None, *, targets=None, **inputs):
    given = {"teacher_hidden": torch.zeros(4, 3), "teacher_weight": torch.zeros(7, 3)} | inputs
    return (loss or JSDLoss())(torch.zeros(4, 5), torch.zeros(7, 5), targets, **given)


def topk(values, ids, loss=None):
    return (loss or JSDLoss())(torch.zeros(4, 5), torch.zeros(7, 5), teacher_logprobs_topk=(values, ids))


IDS = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
BAD = {
    "tokens": (lambda: call(teacher_hidden=torch.zeros(3, 3)), r"teacher_hidden: expected shape \(4,\)"),
    "no head": (lambda: call(teacher_weight=None), "teacher_weight: expected the teacher's head"),
    "head": (lambda: call(teacher_weight=torch.zeros(7, 4)), "teacher_weight: expected shape"),
    "bias": (lambda: call(teacher_bias=torch.zeros(6)), "teacher_bias: expected shape"),
    "no teacher": (lambda: call(teacher_hidden=None, teacher_weight=None), "teacher_hidden: expected one of"),
    "two teachers": (lambda: call(teacher_logprobs_topk=(IDS * 1.0, IDS)), "teacher_hidden: expected one of"),
    "beta": (lambda: JSDLoss(beta=1.5), r"beta: expected a number in \[0, 1\]"),
    "temperature": (lambda: JSDLoss(temperature=0.0), "temperature: expected a positive"),
    "divergence": (
        lambda: DistillationLoss(divergence="hellinger"),
        "divergence: expected one of 'jsd'.*'cosine'",
    ),
    "mode": (lambda: JSDLoss(topk_mode="drop"), "topk_mode: expected one of"),
    "hard loss": (lambda: call(JSDLoss(hard_loss_weight=0.1)), "targets: expected labels for the hard loss"),
    "ids": (lambda: topk(IDS * 1.0, IDS + 7), r"teacher_logprobs_topk: expected ids in \[0, 7\)"),
    "k": (lambda: topk(IDS[:, :0] * 1.0, IDS[:, :0]), "teacher_logprobs_topk: expected two tensors"),
    "shapes": (lambda: topk(IDS * 1.0, IDS[:, :1]), "teacher_logprobs_topk: expected two tensors"),
    "cosine": (
        lambda: topk(IDS * 1.0, IDS, DistillationLoss(divergence="cosine")),
        "teacher_logprobs_topk: expected a teacher with logits",
    ),
    "mask": (lambda: call(mask=torch.zeros(3)), "mask: expected targets' shape"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    attempt, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        attempt()


def test_compiles_from_outside():
    problem = Problem(seed=8, dtype=torch.float32)
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()

    def model(h, w, t):
        return JSDLoss(hard_loss_weight=0.3)(h * 2, w, t, mask=problem.mask, **problem.teacher).loss

    # The divergence stays as it is: compiling it takes its time and shows nothing here.
    with torch.compiler.set_stance("default"), EngineCalls(uncompiled=True) as calls:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        ours = torch.autograd.grad(compiled(hidden, weight, problem.targets), (hidden, weight))
    assert calls.operators
    theirs = torch.autograd.grad(model(hidden, weight, problem.targets), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-5
