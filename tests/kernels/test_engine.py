"""The engine end to end on the kernels: every strategy's launches, ragged chunks and gathered rows included.

On a CPU the twins are covered by `tests/losses`; this file is what runs the engine in Triton's interpreter
and on a GPU.
"""

import pytest
import torch

from logitless import CrossEntropyLoss, linear_logprobs
from tests import reference
from tests.cases import DTYPES, TRAINABLE, operands
from tests.kernels.support import DEVICE, INTERPRETED
from tests.support import assert_close, relative_error, run

LOSSES = {
    "plain": {},
    "z_loss": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.2},
    "softcap": {"softcap": 5.0, "temperature": 0.7},
}
trainable = pytest.mark.parametrize("trainable", ["all", "hidden", "head"])
# Dtype of the operands, and logits_dtype. The interpreter is slow: it runs the second, which has every
# feature.
PAIRS = {
    "bf16": (torch.bfloat16, None),
    "bf16, fp32 logits": (torch.bfloat16, torch.float32),
    **{x: (DTYPES[x], None) for x in ("fp16", "fp32")},
}
PAIRS = {name: pair for name, pair in PAIRS.items() if not INTERPRETED or name == "bf16, fp32 logits"}
pairs = pytest.mark.parametrize(("dtype", "logits_dtype"), PAIRS.values(), ids=PAIRS)
# The vocabulary has a ragged second block, and a d_weight that fills whole blocks of `scale`: the interpreter
# takes its time for each.
SHAPE = ((11,), 16, 1056)
BUDGET = 6_000


def close(actual, truth, naive, name) -> None:
    # The interpreter cuts fp32 off to bf16, which is twice as far from the truth as rounding.
    error = relative_error(naive, truth) * (2 if INTERPRETED and actual.dtype == torch.bfloat16 else 1)
    assert_close(actual, truth, max(error, torch.finfo(actual.dtype).eps / 2), name=name)


def compare(ours, full, dtype, requires) -> None:
    tensors = [x.to(DEVICE) for x in operands(*SHAPE, dtype, ignored=0.3)]
    h, w, targets, b = tensors
    upstream = torch.linspace(0.5, 1.5, 11, device=DEVICE)
    truth = run(full, h.double(), w.double(), targets, b.double(), upstream, requires)
    naive = run(full, h, w, targets, b, upstream, requires)
    actual = run(ours, h, w, targets, b, upstream, requires)
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

    def total(loss_fn):
        weights = torch.linspace(0.5, 1.5, 11, device=DEVICE)
        return lambda *tensors, **kwargs: loss_fn(*tensors, **kwargs, token_weights=weights).loss

    loss = CrossEntropyLoss(**options, reduction="none", logits_dtype=logits_dtype, logits_budget=BUDGET)
    compare(lambda *a, **k: loss(*a, **k).loss, per_token, dtype, TRAINABLE[trainable])
    summed = CrossEntropyLoss(**options, reduction="sum", logits_dtype=logits_dtype, logits_budget=BUDGET)
    weights = torch.linspace(0.5, 1.5, 11, device=DEVICE)
    h, w, targets, b = (x.to(DEVICE) for x in operands(*SHAPE, dtype, ignored=0.3))
    exact = [x.double() for x in (h, w)]
    truth = run(
        lambda *a, **k: (
            per_token(*a, **k) @ weights.to(a[0].dtype).to(torch.promote_types(a[0].dtype, torch.float32))
        ),
        *exact,
        targets,
        b.double(),
        0.7,
        TRAINABLE[trainable],
    )
    naive = run(lambda *a, **k: per_token(*a, **k) @ weights, h, w, targets, b, 0.7, TRAINABLE[trainable])
    actual = run(total(summed), h, w, targets, b, 0.7, TRAINABLE[trainable])
    for name in truth.grads:
        close(actual.grads[name], truth.grads[name], naive.grads[name], f"d_{name} of the sum")


@pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning")
@pairs
@trainable
def test_logprobs(trainable, logits_dtype, dtype):
    def loss(logps, entropy, lse):
        return (logps / 8).exp() * 4 - 0.5 * entropy + 0.05 * lse**2

    def ours(*tensors, **kwargs):
        return loss(
            *linear_logprobs(
                *tensors, **kwargs, entropy=True, logits_dtype=logits_dtype, logits_budget=BUDGET
            )
        )

    compare(ours, lambda *a, **k: loss(*reference.token_logprobs(*a, **k)), dtype, TRAINABLE[trainable])
