"""What the planner decides and says: the strategy, the products, the chunks."""

import pytest
import torch

from logitless import CrossEntropyLoss, MultiTokenLoss
from tests.cases import TRAINABLE, operands
from tests.support import DEVICE, run

# Options of the loss, what is trained, and the plan's strategy and products.
STRATEGIES = {
    "mean": ({}, "all", "fused", 3),
    "sum": ({"reduction": "sum"}, "all", "fused", 3),
    "frozen head": ({}, "hidden", "fused", 2),
    "frozen hidden": ({}, "head", "fused", 2),
    "frozen weight": ({}, "all but weight", "fused", 2),
    "none": ({"reduction": "none"}, "all", "recompute", 4),
    "none, frozen hidden": ({"reduction": "none"}, "head", "recompute", 3),
    "none, frozen weight": ({"reduction": "none"}, "all but weight", "recompute", 3),
    "none, frozen head": ({"reduction": "none"}, "hidden", "cached_grad", 2),
    "none, frozen head, smoothing": ({"reduction": "none", "label_smoothing": 0.1}, "hidden", "recompute", 3),
    "everything frozen": ({}, "nothing", "loss_only", 1),
    "none, everything frozen": ({"reduction": "none"}, "nothing", "loss_only", 1),
}


@pytest.mark.parametrize(
    ("options", "trainable", "strategy", "products"), STRATEGIES.values(), ids=STRATEGIES
)
def test_strategy(options, trainable, strategy, products):
    h, w, targets, b = operands((12,), 8, 50, torch.float32)
    budget = 2**20
    loss = CrossEntropyLoss(logits_budget=budget, **options)
    plan = run(loss, h, w, targets, b, requires=TRAINABLE[trainable]).output.plan
    text = plan.describe()
    assert plan.strategy == strategy and strategy in text
    assert text.endswith(f", {products} product" + "s" * (products > 1)), text
    assert plan.budget + plan.fixed_bytes == budget
    assert ("the budget less" in text) == (plan.fixed_bytes > 0)
    assert DEVICE.type == "cuda" or strategy == "loss_only" or plan.fixed_bytes > 0  # the twins' temporaries


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


def test_what_is_told_of_heads():
    hidden, w, targets, _ = operands((2, 6), 8, 50, torch.float32)
    plan = MultiTokenLoss()([hidden.requires_grad_(), hidden, hidden], w.requires_grad_(), targets).plan
    assert plan.describe().startswith("the last of 3 heads: fused: ") and plan.heads == 3
