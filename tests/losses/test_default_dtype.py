"""Every loss under `torch.set_default_dtype(bfloat16)`, as of Fabric's "bf16-true", and under fp64: bit for
bit what it is under fp32. Other options are compared in tests/random."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from logitless import CrossEntropyLoss, check, global_num_items
from tests.losses.every_loss import LOSSES, V, given, gradients, heads

pytestmark = [
    pytest.mark.usefixtures("uncompiled"),
    pytest.mark.filterwarnings("ignore::logitless.BudgetWarning"),
]
# Dtype of the operands, and options of the loss.
OPTIONS = {
    "fp32, chunks": (torch.float32, {"logits_budget": 4 * V * 4}),
    "bf16, every row": (torch.bfloat16, {"compact": False}),
}
T = 7  # 24 of 28 tokens are supervised: no power of two


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def same_under(request) -> Callable:
    """Compares what a function returns under another default dtype with what it returns under fp32."""

    def compare(results: Callable[[], list[Tensor]]) -> None:
        expected, before = results(), torch.get_default_dtype()
        torch.set_default_dtype(request.param)
        try:
            actual = results()
        finally:
            torch.set_default_dtype(before)
        for x, y in zip(actual, expected, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)

    return compare


@pytest.mark.each_value
@pytest.mark.parametrize(("dtype", "options"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name, dtype, options, same_under):
    x, medusa = given(T, dtype=dtype), heads(dtype)

    def results():
        value, *others = LOSSES[name](x, medusa, **options)
        return [value.detach(), *others, *gradients(value, x, medusa).values()]

    same_under(results)


@pytest.mark.parametrize("counted", [True, False])
def test_the_normalizer(counted, same_under):
    """257 is no number of bf16."""
    x = given(T)

    def results():
        num_items = global_num_items(x.targets) if counted else 257
        loss = CrossEntropyLoss()(x.hidden, x.weight, x.targets, num_items=num_items).loss
        return [loss.detach(), *torch.autograd.grad(loss, (x.hidden, x.weight))]

    same_under(results)


def test_check(same_under):
    x = given(T)

    def results():
        report = check(CrossEntropyLoss(label_smoothing=0.1), x.hidden, x.weight, x.targets)
        assert report.ok, report
        return [torch.as_tensor(list(report.errors.values()), dtype=torch.float64)]

    same_under(results)
