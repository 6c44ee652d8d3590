"""The engine end to end on the kernels: every strategy's launches, ragged chunks and gathered rows included.

On a CPU the twins are covered by `tests/losses`; this file is what runs the engine in Triton's interpreter
and on a GPU.
"""

import math

import pytest
import torch

from logitless import CrossEntropyLoss, DistillationLoss, linear_logprobs, linear_topk
from tests import reference
from tests.cases import DTYPES, TRAINABLE, covering_array, operands
from tests.kernels.support import DEVICE, INTERPRETED
from tests.support import assert_close, relative_error, run

LOSSES = {
    "plain": {},
    "z_loss": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.2},
    "softcap": {"softcap": 5.0, "temperature": 0.7},
}
trainable = pytest.mark.parametrize("trainable", ["all", "hidden", "head"])
# Dtype of the operands, and logits_dtype. Triton's interpreter is slow, so it runs only "bf16, fp32 logits",
# which covers all code paths.
PAIRS = {
    "bf16": (torch.bfloat16, None),
    "bf16, fp32 logits": (torch.bfloat16, torch.float32),
    **{x: (DTYPES[x], None) for x in ("fp16", "fp32")},
}
PAIRS = {name: pair for name, pair in PAIRS.items() if not INTERPRETED or name == "bf16, fp32 logits"}
pairs = pytest.mark.parametrize(("dtype", "logits_dtype"), PAIRS.values(), ids=PAIRS)
# The last block of the vocabulary is partly masked, and d_weight fills whole blocks of `scale`. The
# vocabulary is small, because the interpreter is slow for every block.
SHAPE = ((11,), 16, 1056)
BUDGET = 14_000
WEIGHTS = torch.linspace(0.5, 1.5, 11, device=DEVICE)


def close(actual, truth, naive, name) -> None:
    # The interpreter cuts fp32 off to bf16, which is twice as far from the truth as rounding.
    error = relative_error(naive, truth) * (2 if INTERPRETED and actual.dtype == torch.bfloat16 else 1)
    assert_close(actual, truth, max(error, torch.finfo(actual.dtype).eps / 2), name=name)


def compare(ours, full, dtype, requires, upstream=None) -> None:
    h, w, targets, b = (x.to(DEVICE) for x in operands(*SHAPE, dtype, ignored=0.3))
    upstream = WEIGHTS if upstream is None else upstream
    truth = run(full, h.double(), w.double(), targets, b.double(), upstream, requires)
    naive = run(full, h, w, targets, b, upstream, requires)
    actual = run(ours, h, w, targets, b, upstream, requires)
    if truth.value.dim():  # the error of a naive sum may be zero by luck
        close(actual.value, truth.value, naive.value, "value")
    for name in truth.grads:
        close(actual.grads[name], truth.grads[name], naive.grads[name], f"d_{name}")


@pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning")
@pairs
@trainable
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_cross_entropy(options, trainable, logits_dtype, dtype):
    def per_token(*tensors, **kwargs):
        return reference.cross_entropy(*tensors, **kwargs, **options, reduction="none")

    def total(*tensors, **kwargs):
        values = per_token(*tensors, **kwargs)
        return values @ WEIGHTS.to(values.dtype)

    engine = {"logits_dtype": logits_dtype, "logits_budget": BUDGET}
    loss, summed = (CrossEntropyLoss(**options, **engine, reduction=x) for x in ("none", "sum"))
    compare(lambda *a, **k: loss(*a, **k).loss, per_token, dtype, TRAINABLE[trainable])
    weighted = lambda *a, **k: summed(*a, **k, token_weights=WEIGHTS).loss  # noqa: E731
    compare(weighted, total, dtype, TRAINABLE[trainable], upstream=0.7)


@pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning")
@pairs
@trainable
@pytest.mark.parametrize("several", [False, True], ids=["targets", "several ids"])
def test_logprobs(several, trainable, logits_dtype, dtype):
    ids = torch.arange(11 * 5, device=DEVICE).view(11, 5) * 19 % SHAPE[2]
    ids[:, 1], ids[4], ids[6, 2] = ids[:, 0], -100, -100

    def loss(logps, entropy, lse):
        logps = torch.where(logps > -torch.inf, logps, 0.0)
        logps = (logps / 4).sin().sum(-1) if several else (logps / 8).exp() * 4
        return logps - 0.5 * entropy + 0.05 * lse**2

    def ours(hidden, weight, targets, **kwargs):
        options = {"entropy": True, "logits_dtype": logits_dtype, "logits_budget": BUDGET}
        return loss(*linear_logprobs(hidden, weight, ids if several else targets, **kwargs, **options))

    def full(hidden, weight, targets, **kwargs):
        if several:
            return loss(*reference.ids_logprobs(hidden, weight, ids, **kwargs))
        return loss(*reference.token_logprobs(hidden, weight, targets, **kwargs))

    compare(ours, full, dtype, TRAINABLE[trainable])


@pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning")
@pairs
@pytest.mark.parametrize(
    "support", ["given", *(pytest.param(x, marks=pytest.mark.repeats) for x in ("union", "gathered"))]
)
def test_supports(support, logits_dtype, dtype):
    generator = torch.Generator("cpu").manual_seed(3)
    teacher = torch.randn(11, 7, generator=generator), torch.randn(SHAPE[2], 7, generator=generator)
    teacher = [x.to(DEVICE) for x in teacher]
    logits = teacher[0] @ teacher[1].t()
    options = {"topk_mode": "renormalize" if support == "gathered" else "tail", "divergence": "forward_kl"}
    if support == "union":
        known, options = logits, options | {"support": "union", "k": 3}
        arguments = {"teacher_hidden": teacher[0], "teacher_weight": teacher[1]}
    else:
        known = logits.log_softmax(-1).topk(4)
        arguments = {"teacher_logprobs_topk": known}
        options |= {"support": "teacher"}
    engine = {"logits_dtype": logits_dtype, "logits_budget": BUDGET}

    def ours(hidden, weight, targets, **kwargs):
        out = DistillationLoss(**options, **engine, reduction="none")(hidden, weight, **kwargs, **arguments)
        assert ("gathered" in out.plan.describe()) == (support == "gathered")
        return out.loss * WEIGHTS

    def full(hidden, weight, targets, *, bias):
        z = reference.head_logits(hidden, weight, bias)
        given = known if support == "union" else tuple(known)
        return reference.support_divergence(z, given, **options) * WEIGHTS

    compare(ours, full, dtype, TRAINABLE["all"])


GATHERED = {
    "divergence": ["forward_kl", "reverse_kl", "jsd", "skewed_kl"],
    "logits_budget": [None, 4_000],
    "compact": [True, False],
}


@pytest.mark.parametrize("case", covering_array(GATHERED, lambda case: True, repeats=True))
def test_gathered_columns(case):
    """Empty slots, repeated ids and tokens that do not count; the gradient from the divergence's kernel."""
    divergence, budget = case["divergence"], case["logits_budget"]
    generator = torch.Generator("cpu").manual_seed(4)
    values, ids = (2 * torch.randn(11, 541, generator=generator)).log_softmax(-1).topk(3)
    values[3, 1], ids[3, 1] = -torch.inf, 10**6
    values[4, 2], ids[4, 2] = values[4, 0], ids[4, 0]
    values[5, 1:] = -torch.inf
    known = values.to(DEVICE), ids.to(DEVICE)
    mask = torch.tensor([token not in (0, 7) for token in range(11)], device=DEVICE)
    options = {"topk_mode": "renormalize", "divergence": divergence}
    transform = {"softcap": 3.0, "temperature": 0.8}

    def ours(hidden, weight, targets, *, bias):
        loss = DistillationLoss(
            **options,
            **transform,
            support="teacher",
            beta=0.3,
            skew_alpha=0.2,
            compact=case["compact"],
            logits_budget=budget,
        )
        out = loss(hidden, weight, bias=bias, mask=mask, teacher_logprobs_topk=known)
        assert "gathered" in out.plan.describe() and (out.plan.chunks > 1) == (budget is not None)
        return out

    def full(hidden, weight, targets, *, bias):
        z = (
            reference.head_logits(hidden, weight, bias, softcap=transform["softcap"])
            / transform["temperature"]
        )
        if divergence == "skewed_kl":
            s, t = renormalized(z, known)
            values = (t.exp() * (t - torch.logaddexp(s + math.log(0.8), t + math.log(0.2)))).sum(-1)
        else:
            values = reference.support_divergence(z, tuple(known), **options, beta=0.3)
        return torch.where(mask, values, 0.0).sum() / mask.sum()

    h, w, targets, b = (x.to(DEVICE) for x in operands((11,), 16, 541, torch.float32))
    truth = run(full, h.double(), w.double(), targets, b.double(), 1.3)
    naive = run(full, h, w, targets, b, 1.3)
    unsupervised = torch.where(mask[:, None], h, float("nan"))
    actual = run(ours, unsupervised, w, targets, b, 1.3)
    assert_close(actual.value, truth.value, 1e-6, name="value")
    assert_close(actual.output.metrics["soft_loss"], truth.value, 1e-6, name="metric")
    for name in truth.grads:
        close(actual.grads[name], truth.grads[name], naive.grads[name], f"d_{name}")


def renormalized(z: torch.Tensor, known: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities (n, k) of student and teacher over the first filled slot of each id."""
    values, ids = known
    same = (ids[:, None, :] == ids[:, :, None]) & (values > -torch.inf)[:, None, :]
    taken = (values > -torch.inf) & ~same.tril(-1).any(2)
    student = z.gather(1, torch.where(taken, ids, 0))
    return [torch.where(taken, x, -1e4).log_softmax(-1) for x in (student, values.to(z.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nothing_but_the_ids_with_a_frozen_head(dtype):
    """Beside all ids of the vocabulary no softmax is left; a large scale leaves nothing of what is read."""
    h, w, _, _ = operands((2,), 8, 20, dtype)
    ids, results = torch.arange(20, device=DEVICE).expand(2, 20).contiguous(), []
    for x in (h, h.double(), h):
        x, weight = x.detach().requires_grad_(), w.detach().to(x.dtype)
        options, which = {"temperature": 1 / 30}, reference.ids_logprobs if results else linear_logprobs
        logps = which(x, weight, ids, **options)[0].double()
        results.append(torch.autograd.grad(logps.sin().sum(), x)[0])
    assert_close(*results, name="d_hidden")


def test_the_best_ids_with_their_log_probabilities():
    h, w, _, b = (x.to(DEVICE) for x in operands(*SHAPE, torch.bfloat16))
    actual = linear_topk(h, w, 9, bias=b, softcap=5.0)
    logps, ids = reference.best_ids(h.float(), w.float(), 9, bias=b.float(), softcap=5.0)
    assert torch.equal(actual.ids, ids)
    torch.testing.assert_close(actual.logps, logps, rtol=1e-4, atol=1e-4)
