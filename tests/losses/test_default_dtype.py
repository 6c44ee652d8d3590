"""Every loss under `torch.set_default_dtype(bfloat16)`, as of Fabric's "bf16-true", and under fp64: bit for
bit what it is under fp32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from logitless import CrossEntropyLoss, DPOLoss, KTOLoss, check, global_num_items, linear_topk
from tests.losses.every_loss import LOSSES, V, given, gradients, heads
from tests.support import DEVICE

DEFAULTS = [torch.bfloat16, torch.float64]
FP32, BF16 = torch.float32, torch.bfloat16
# Dtype of the operands, and options of the loss.
OPTIONS = {
    "fp32": (FP32, {}),
    "bf16": (BF16, {}),
    "fp32, chunks": (FP32, {"logits_budget": 4 * V * 4}),
    "bf16, every row": (BF16, {"compact": False}),
}
T = 7  # 24 of 28 tokens are supervised: no power of two

pytestmark = [
    pytest.mark.usefixtures("uncompiled"),
    pytest.mark.filterwarnings("ignore::logitless.BudgetWarning"),
]


@pytest.fixture(params=DEFAULTS, ids=str)
def under(request) -> Callable:
    """What makes another dtype the default one."""

    @contextmanager
    def context() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(request.param)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return context


def assert_equal(found, expected) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize(("dtype", "options"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name, options, dtype, under):
    x, medusa = given(T, dtype=dtype), heads(dtype)

    def results():
        value, *others = LOSSES[name](x, medusa, **options)
        return [value.detach(), *others, *gradients(value, x, medusa).values()]

    expected = results()
    with under():
        assert_equal(results(), expected)


CALLS = {
    "unreduced": lambda x: CrossEntropyLoss(reduction="none", label_smoothing=0.1)(
        x.hidden, x.weight, x.targets
    ).loss.sum(),
    "num_items": lambda x: (
        CrossEntropyLoss()(x.hidden, x.weight, x.targets, num_items=global_num_items(x.targets)).loss
    ),
    "an odd number of items": lambda x: CrossEntropyLoss()(x.hidden, x.weight, x.targets, num_items=257).loss,
    "class weights, an integer mask": lambda x: (
        CrossEntropyLoss()(
            x.hidden, x.weight, x.targets, class_weights=x.bias.detach().abs(), mask=(x.targets > 7).long()
        ).loss
    ),
    "KTO's KL": lambda x: (
        KTOLoss()(x.hidden, x.weight, x.targets, labels=x.labels, ref_logps=x.ref_logps, kl=0.3).loss
    ),
    "packed": lambda x: (
        DPOLoss(loss_type=("ipo", "sft"), ld_alpha=0.3)(
            x.hidden.flatten(0, 1),
            x.weight,
            x.targets.flatten(),
            ref_logps=x.ref_logps.flatten(),
            cu_seqlens=torch.tensor([0, 3, 7, 15, 28], device=DEVICE),
        ).loss
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls(call, under):
    x = given(T)

    def results():
        value = call(x)
        return [value.detach(), *torch.autograd.grad(value, (x.hidden, x.weight))]

    expected = results()
    with under():
        assert_equal(results(), expected)


def test_what_is_no_loss(under):
    x = given(T)

    def results():
        report = check(CrossEntropyLoss(label_smoothing=0.1), x.hidden, x.weight, x.targets)
        assert report.ok, report
        best = linear_topk(x.hidden, x.weight, 3)
        return [*best, torch.as_tensor(list(report.errors.values()), dtype=torch.float64)]

    expected = results()
    with under():
        assert_equal(results(), expected)
