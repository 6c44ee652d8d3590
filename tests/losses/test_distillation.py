"""Distillation losses: nearly equal models, what they cost, and what they refuse. Their numbers are compared
in tests/reference_tests and tests/random."""

import math

import pytest
import torch
from torch import Tensor

from logitless import DistillationLoss, JSDLoss
from logitless.losses.distillation import NAMES
from tests import reference
from tests.support import DEVICE, AllocationWatcher, GemmCounter, relative_error, run

H = 16

# The function itself is what is tested; that it is compiled, test_own_loss.py shows once.
pytestmark = pytest.mark.usefixtures("uncompiled")


def random(*shape: int, seed: int = 3) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("divergence", NAMES)
def test_nearly_equal_and_equal_distributions(divergence):
    """A JSD of 1e-3 is right to 1% in bf16, and of two equal models exactly 0, with gradients of 0."""
    hidden, weight = random(256, H), random(999, H, seed=4).bfloat16() / 2
    student, teacher = hidden.bfloat16(), (hidden + 0.03 * random(256, H, seed=5)).bfloat16()
    targets = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    loss = DistillationLoss(divergence=divergence)

    def call(h, w, t, *, bias, teacher=teacher):
        return loss(h, w, teacher_hidden=teacher, teacher_weight=weight)

    ours = run(call, student, weight, targets)
    exact = {"teacher_hidden": teacher.double(), "teacher_weight": weight.double()}
    truth = run(
        lambda h, w, t, *, bias: reference.distillation(h, w, divergence=divergence, **exact)[0],
        student.double(),
        weight.double(),
        targets,
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

    same = run(lambda h, w, t, *, bias: call(h, w, t, bias=bias, teacher=student), student, weight, targets)
    limit = 1e-12 if divergence == "cosine" else 0.0
    assert same.value.abs() <= limit
    assert all(gradient.abs().max() <= 1e-6 * (divergence == "cosine") for gradient in same.grads.values())


@pytest.mark.parametrize("teacher", ["whole", "tail", "renormalize", "support"])
@pytest.mark.parametrize("gap", [16.0, 18.0, 300.0, 3e4])
@pytest.mark.parametrize("alpha", [0.0, 1e-9, 0.1, 1.0])
def test_skewed_kl_of_any_gap(alpha, gap, teacher):
    """In fp32; the formula is a logaddexp of full logits in fp64."""
    hidden = torch.eye(3, device=DEVICE)[:2]
    weight = torch.zeros(5, 3, device=DEVICE)
    teacher_weight = torch.arange(15.0, device=DEVICE).view(5, 3) / -50  # no two ids are equally good
    weight[1, 0], weight[2, 1], teacher_weight[1, 0], teacher_weight[3, 1] = -gap, gap, 1.0, 2.0
    taught = (hidden @ teacher_weight.T).double().log_softmax(-1)
    values, ids = taught.topk(2)
    options = {"divergence": "skewed_kl", "skew_alpha": alpha}
    inputs = {"teacher_hidden": hidden, "teacher_weight": teacher_weight}
    if teacher in ("tail", "renormalize"):
        inputs, options = {"teacher_logprobs_topk": (values.float(), ids)}, options | {"topk_mode": teacher}
    elif teacher == "support":
        options |= {"support": "teacher", "k": 2}

    def cut(logps):
        if teacher == "whole":
            return logps
        kept = logps.gather(1, ids)
        if teacher == "renormalize":
            return kept.log_softmax(-1)
        return torch.cat((kept, logps.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)), 1)

    exact = weight.double().requires_grad_()
    s, t = cut((hidden.double() @ exact.T).log_softmax(-1)), cut(taught)
    logs = t + math.log(alpha) if alpha else torch.full_like(t, -torch.inf)
    m = t + 0 * s if alpha == 1 else torch.logaddexp(logs, s + math.log1p(-alpha))
    truth = (t.exp() * (t - m)).sum(-1).mean()
    truth.backward()
    head = weight.clone().requires_grad_()
    out = DistillationLoss(**options)(hidden, head, **inputs).loss
    out.backward()
    assert out.item() == pytest.approx(truth.item(), rel=1e-5, abs=1e-7)
    # A log-probability of -3e4 has a rounding error of 1e-3.
    assert torch.allclose(head.grad.double(), exact.grad, rtol=1e-4, atol=3e-7 + 1e-8 * gap)


@pytest.mark.parametrize("divergence", NAMES)
def test_ids_that_both_biases_rule_out_are_not_there(divergence):
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)

    hidden, teacher, weight, teacher_weight = random(6, 4), random(6, 3), random(9, 4), random(9, 3)
    kept = torch.tensor([0, 1, 3, 4, 6, 7, 8], device=DEVICE)
    ruled_out = torch.full((9,), -torch.inf, dtype=torch.float64, device=DEVICE).index_fill(0, kept, 0.0)
    head, exact = weight.clone().requires_grad_(), weight[kept].clone().requires_grad_()
    options = {"bias": ruled_out, "teacher_bias": ruled_out}
    actual = DistillationLoss(divergence=divergence)(
        hidden, head, teacher_hidden=teacher, teacher_weight=teacher_weight, **options
    ).loss
    truth, _ = reference.distillation(
        hidden, exact, divergence=divergence, teacher_hidden=teacher, teacher_weight=teacher_weight[kept]
    )
    actual.backward()
    truth.backward()
    torch.testing.assert_close(actual, truth)
    torch.testing.assert_close(head.grad[kept], exact.grad)
    assert not head.grad[[2, 5]].any()


@pytest.mark.parametrize("ignore_index", [0, 1, 7])
def test_every_token_counts_without_targets(ignore_index):
    """Also where the id that stands for a target is `ignore_index`."""
    operands = random(6, 4), random(9, 4, seed=4)
    teacher = {"teacher_hidden": random(6, 3, seed=5), "teacher_weight": random(9, 3, seed=6)}
    actual, expected = (
        DistillationLoss(ignore_index=index)(*operands, **teacher).loss for index in (ignore_index, -100)
    )
    assert actual == expected > 0


@pytest.mark.parametrize("make", [DistillationLoss, JSDLoss])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("counted_rows")
def test_a_head_of_one_id_that_is_the_ignored_one(make, reduction):
    """Without labels no token is ignored: the models agree on the one id."""
    hidden, weight = torch.randn(6, 3).requires_grad_(), torch.randn(1, 3).requires_grad_()
    mask = torch.arange(6) % 3 > 0
    for teacher in (
        {"teacher_hidden": torch.randn(6, 4), "teacher_weight": torch.randn(1, 4)},
        {"teacher_logprobs_topk": (torch.zeros(6, 1), torch.zeros(6, 1, dtype=torch.int64))},
    ):
        for given in (teacher, teacher | {"mask": mask}):
            out = make(ignore_index=0, reduction=reduction)(hidden, weight, **given)
            out.loss.sum().backward()
            for x in (out.loss, hidden.grad, weight.grad):  # 0 up to the rounding of a GPU's exponentials
                assert x.abs().max() < 1e-6
            assert out.plan.rows == (4 if "mask" in given else 6)


@pytest.mark.parametrize("trainable, products", [(True, 3), (False, 2)], ids=["trainable", "frozen head"])
def test_products(trainable, products):
    """Three products of the student, two with a frozen head, and the teacher's one: no gradient reaches
    it."""
    N, hidden, vocab = 64, 16, 200
    student = torch.randn(N, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden).requires_grad_(trainable)
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
    student = torch.randn(N, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    teacher = {"teacher_hidden": torch.randn(N, hidden), "teacher_weight": torch.randn(vocab, hidden)}
    loss = JSDLoss(logits_budget=budget)
    loss(student, weight, **teacher).loss.backward()
    student.grad = weight.grad = None
    with AllocationWatcher() as watch:
        loss(student, weight, **teacher).loss.backward()
    assert watch.peak <= budget * 1.02 + 2 * weight.nbytes + 2 * student.nbytes + 64 * 4 * N


# -- bad input


def call(loss=None, *, targets=None, **inputs):
    given = {"teacher_hidden": torch.zeros(4, 3), "teacher_weight": torch.zeros(7, 3)} | inputs
    return (loss or JSDLoss())(torch.zeros(4, 5), torch.zeros(7, 5), targets, **given)


def topk(values, ids, loss=None):
    return (loss or JSDLoss())(torch.zeros(4, 5), torch.zeros(7, 5), teacher_logprobs_topk=(values, ids))


PARTIAL = DistillationLoss(divergence="forward_kl", topk_mode="partial")
IDS = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
BAD = {
    "partial jsd": (
        lambda: JSDLoss(topk_mode="partial"),
        "divergence: expected one of 'forward_kl', 'reverse_kl' with",
    ),
    "partial of all": (
        lambda: call(PARTIAL),
        "topk_mode: expected 'tail' or 'renormalize' for a divergence over",
    ),
    "tokens": (lambda: call(teacher_hidden=torch.zeros(3, 3)), r"teacher_hidden: expected shape \(4,\)"),
    "no head": (lambda: call(teacher_weight=None), "teacher_weight: expected the teacher's head"),
    "head": (lambda: call(teacher_weight=torch.zeros(7, 4)), "teacher_weight: expected shape"),
    "bias": (lambda: call(teacher_bias=torch.zeros(6)), "teacher_bias: expected shape"),
    "no teacher": (lambda: call(teacher_hidden=None, teacher_weight=None), "teacher_hidden: expected one of"),
    "two teachers": (lambda: call(teacher_logprobs_topk=(IDS * 1.0, IDS)), "teacher_hidden: expected one of"),
    "beta": (lambda: JSDLoss(beta=1.5), r"beta: expected a number in \[0, 1\]"),
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
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    attempt, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        attempt()


@pytest.mark.parametrize("support", [None, "teacher"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rest_of_a_rounded_teacher(dtype, support):
    """The other ids of a teacher whose k log-probabilities sum to more than 1 get fp32's eps, those of one
    that is nearly certain what is left to them, in any dtype."""
    above = torch.tensor([0.41, 0.41, 0.20]).log()
    certain = torch.tensor([-3e-4, -10.0, -12.0])
    values = torch.stack((above, certain)).to(DEVICE, dtype)
    ids = torch.tensor([[4, 0, 2], [1, 3, 6]], device=DEVICE)
    # Operands in fp64: what differs is the teacher alone.
    hidden, weight = random(2, H), random(9, H, seed=4)
    sums = values.double().exp().sum(-1)
    assert sums[0] > 1 and 1e-4 < 1 - sums[1] < 4e-4
    rest = (1 - sums).clamp(min=torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)
    teacher = torch.cat((values.double().exp(), rest[:, None]), 1)
    teacher = teacher / teacher.sum(-1, keepdim=True)
    student = (hidden @ weight.T).softmax(-1)
    kept = student.gather(1, ids)
    student = torch.cat((kept, 1 - kept.sum(-1, keepdim=True)), 1)
    truth = (student * (student.log() - teacher.log())).sum(-1).mean()
    loss = DistillationLoss(divergence="reverse_kl", support=support)
    actual = loss(hidden, weight, teacher_logprobs_topk=(values, ids)).loss
    assert actual.item() == pytest.approx(truth.item(), rel=1e-7)
