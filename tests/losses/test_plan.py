"""What the planner decides: the strategy, the chunks, and that neither the budget nor `compact` ever changes
the result."""

import pytest
import torch

from logitless import CrossEntropyLoss, MultiTokenLoss, linear_logprobs
from tests.cases import TRAINABLE, one_row_warning, operands
from tests.support import DEVICE, run

STRATEGIES = {
    "mean": ({}, "all", "fused"),
    "sum": ({"reduction": "sum"}, "all", "fused"),
    "frozen head": ({}, "hidden", "fused"),
    "frozen hidden": ({}, "head", "fused"),
    "frozen weight": ({}, "all but weight", "fused"),
    "none": ({"reduction": "none"}, "all", "recompute"),
    "none, frozen hidden": ({"reduction": "none"}, "head", "recompute"),
    "none, frozen weight": ({"reduction": "none"}, "all but weight", "recompute"),
    "none, frozen head": ({"reduction": "none"}, "hidden", "cached_grad"),
    "none, frozen head, smoothing": ({"reduction": "none", "label_smoothing": 0.1}, "hidden", "recompute"),
    "everything frozen": ({}, "nothing", "loss_only"),
    "none, everything frozen": ({"reduction": "none"}, "nothing", "loss_only"),
}


@pytest.mark.parametrize(("options", "trainable", "strategy"), STRATEGIES.values(), ids=STRATEGIES)
def test_strategy(options, trainable, strategy):
    h, w, targets, b = operands((12,), 8, 50, torch.float32)
    plan = run(CrossEntropyLoss(**options), h, w, targets, b, requires=TRAINABLE[trainable]).output.plan
    assert plan.strategy == strategy
    assert strategy in plan.describe()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_grad_computes_only_the_loss(reduction):
    h, w, targets, _ = operands((12,), 8, 50, torch.float32)
    h.requires_grad_()
    with torch.no_grad():
        output = CrossEntropyLoss(reduction=reduction)(h, w, targets)
    assert output.plan.strategy == "loss_only"
    assert not output.loss.requires_grad
    torch.testing.assert_close(
        output.loss, CrossEntropyLoss(reduction=reduction)(h, w, targets).loss.detach()
    )


@pytest.mark.parametrize("budget", [2_000, 3_000, 7_777, 1 << 20])
def test_chunks_cover_the_tokens_within_the_budget(budget):
    h, w, targets, _ = operands((101,), 8, 100, torch.float32)
    plan = run(CrossEntropyLoss(logits_budget=budget), h, w, targets).output.plan
    assert plan.chunks == -(-101 // plan.token_chunk)
    assert plan.token_chunk * 100 * h.element_size() <= budget
    assert str(plan.chunks) in plan.describe()


ENGINES = {
    "fused": lambda *a, **k: CrossEntropyLoss(label_smoothing=0.1, z_loss=0.1, **k.pop("head", {}))(*a, **k),
    "none": lambda *a, **k: CrossEntropyLoss(reduction="none", z_loss=0.1, **k.pop("head", {}))(*a, **k),
    "logprobs": lambda *a, **k: torch.stack(linear_logprobs(*a, entropy=True, **k.pop("head", {}), **k)),
}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
frozen = pytest.mark.parametrize("trainable", ["all", "hidden", "head"])


def same(one, other, rtol=1e-9):
    torch.testing.assert_close(one.value, other.value, rtol=rtol, atol=1e-12)
    assert one.grads.keys() == other.grads.keys()
    for name in one.grads:
        assert one.grads[name].any()
        torch.testing.assert_close(one.grads[name], other.grads[name], rtol=rtol, atol=1e-12)


CHOICES = [*({"logits_budget": budget} for budget in (1, 1_700, 5_000, 20_000)), {"compact": False}]


@one_row_warning
@frozen
@engines
def test_budget_and_compact_never_change_the_result(engine, trainable):
    h, w, targets, b = operands((53,), 8, 100, torch.float64, ignored=0.4)

    def outcome(head):
        return run(lambda *a, **k: engine(*a, **k, head=head), h, w, targets, b, 0.3, TRAINABLE[trainable])

    whole = outcome({"logits_budget": None})
    for choice in CHOICES:
        same(outcome(choice), whole)


# A loss, whether the head trains, and what its plan says of products.
TOLD = {
    "solved": ({}, True, ", 3 products"),
    "solved, frozen head": ({}, False, ", 2 products"),
    "unreduced": ({"reduction": "none"}, True, ", 4 products"),
    "unreduced, frozen head": ({"reduction": "none"}, False, ", 2 products"),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_is_told_of_products_and_memory(case):
    options, trainable, products = TOLD[case]
    h, w, targets, _ = operands((12,), 8, 50, torch.float32)
    budget = 2**20
    loss = CrossEntropyLoss(logits_budget=budget, **options)
    plan = loss(h.requires_grad_(), w.requires_grad_(trainable), targets).plan
    text = plan.describe()
    assert text.endswith(products), text
    assert plan.budget + plan.fixed_bytes == budget
    assert ("the budget less" in text) == (plan.fixed_bytes > 0)
    assert DEVICE.type == "cuda" or plan.fixed_bytes > 0  # the twins' temporaries


def test_what_is_told_of_heads():
    hidden, w, targets, _ = operands((2, 6), 8, 50, torch.float32)
    plan = MultiTokenLoss()([hidden.requires_grad_(), hidden, hidden], w.requires_grad_(), targets).plan
    assert plan.describe().startswith("the last of 3 heads: fused: ") and plan.heads == 3
    with torch.no_grad():
        assert CrossEntropyLoss()(hidden, w, targets).plan.describe().endswith(", 1 product")
