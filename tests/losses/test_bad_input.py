"""Bad input: every error names the argument, what was expected, what came, and the remedy."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from logitless import (
    CrossEntropyLoss,
    DPOLoss,
    GRPOLoss,
    SimPOLoss,
    Term,
    TokenLoss,
    linear_cross_entropy,
    linear_logprobs,
)
from tests.support import DEVICE

FORM = re.compile(r"^\w+: expected .*, got .*; .+", re.DOTALL)
randn, ones = partial(torch.randn, device=DEVICE), partial(torch.ones, device=DEVICE)
HIDDEN, WEIGHT, TARGETS = randn(2, 6, 8), randn(20, 8), torch.arange(12, device=DEVICE).view(2, 6)


def with_loss_object(hidden, weight, targets, **options):
    arguments = {"bias", "class_weights", "token_weights", "shift", "num_items"} & options.keys()
    call = {name: options.pop(name) for name in arguments}
    return CrossEntropyLoss(**options)(hidden, weight, targets, **call)


ENTRIES = {
    "CrossEntropyLoss": with_loss_object,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_logprobs": linear_logprobs,
}


def changed_target(value: int) -> torch.Tensor:
    targets = TARGETS.clone()
    targets[1, 2] = value
    return targets


# What every entry point refuses: the argument that the message must name, and the call's changes.
OPERANDS = {
    "hidden 0-d": ("hidden", {"hidden": torch.tensor(1.0, device=DEVICE)}),
    "hidden of another size": ("hidden|weight", {"hidden": randn(2, 6, 7)}),
    "hidden of integers": ("hidden", {"hidden": ones(2, 6, 8, dtype=torch.int64)}),
    "weight 1-d": ("weight", {"weight": randn(8)}),
    "weight 3-d": ("weight", {"weight": randn(1, 20, 8)}),
    "weight transposed": ("hidden|weight", {"weight": randn(8, 20)}),
    "weight of another dtype": ("hidden|weight", {"weight": WEIGHT.bfloat16()}),
    "weight of integers": ("weight", {"weight": ones(20, 8, dtype=torch.int8)}),
    "weight quantized": ("weight", {"weight": torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8)}),
    "weight sparse": ("weight", {"weight": WEIGHT.to_sparse()}),
    "weight on another device": ("hidden|weight", {"weight": WEIGHT.to("meta")}),
    "weight without rows": ("weight|targets", {"weight": torch.empty(0, 8, device=DEVICE)}),
    "targets of another shape": ("targets", {"targets": TARGETS[:, :5]}),
    "targets flat": ("targets", {"targets": TARGETS.flatten()}),
    "targets of floats": ("targets", {"targets": TARGETS.float()}),
    "targets on another device": ("targets", {"targets": TARGETS.to("meta")}),
    "target too large": ("targets", {"targets": changed_target(20)}),
    "target much too large": ("targets", {"targets": changed_target(2**40)}),
    "target negative": ("targets", {"targets": changed_target(-1)}),
    "target -100 that is not ignore_index": (
        "targets",
        {"targets": changed_target(-100), "ignore_index": -1},
    ),
    "bias of another size": ("bias", {"bias": randn(21)}),
    "bias 2-d": ("bias", {"bias": randn(20, 1)}),
    "bias on another device": ("bias", {"bias": torch.empty(20, device="meta")}),
    "negative budget": ("logits_budget", {"logits_budget": -1}),
    "no budget": ("logits_budget", {"logits_budget": 0}),
    "budget in words": ("logits_budget", {"logits_budget": "1GB"}),
    "softcap 0": ("softcap", {"softcap": 0.0}),
    "softcap negative": ("softcap", {"softcap": -5.0}),
    "temperature 0": ("temperature", {"temperature": 0.0}),
    "temperature negative": ("temperature", {"temperature": -1.0}),
}
CROSS_ENTROPY = {
    "reduction": ("reduction", {"reduction": "average"}),
    "label_smoothing above 1": ("label_smoothing", {"label_smoothing": 1.1}),
    "label_smoothing negative": ("label_smoothing", {"label_smoothing": -0.1}),
    "label_smoothing nan": ("label_smoothing", {"label_smoothing": float("nan")}),
    "class_weights of another length": ("class_weights", {"class_weights": ones(19)}),
    "class_weights 2-d": ("class_weights", {"class_weights": ones(20, 1)}),
    "token_weights of another shape": ("token_weights", {"token_weights": ones(2, 5)}),
    "shift with aligned targets": ("targets", {"targets": TARGETS[:, 1:], "shift": True}),
    "num_items of several": ("num_items", {"num_items": ones(2)}),
}


def check_refusal(entry, argument: str, changes: dict) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, **changes}
    with pytest.raises((ValueError, TypeError)) as caught:
        entry(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("targets"), **arguments)
    message = str(caught.value)
    assert FORM.match(message), message
    assert re.match(rf"({argument}): ", message), message


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize(("argument", "changes"), OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_refused_by_every_entry(entry, argument, changes):
    check_refusal(entry, argument, changes)


@pytest.mark.parametrize(("argument", "changes"), CROSS_ENTROPY.values(), ids=CROSS_ENTROPY)
@pytest.mark.parametrize(
    "entry", [with_loss_object, linear_cross_entropy], ids=["CrossEntropyLoss", "linear_cross_entropy"]
)
def test_refused_by_cross_entropy(entry, argument, changes):
    check_refusal(entry, argument, changes)


def test_logprobs_refuses_an_unknown_entropy():
    check_refusal(linear_logprobs, "entropy", {"entropy": "yes"})


@pytest.mark.skipif(
    DEVICE.type == "cuda",
    reason="a device-side assertion ends the process's use of the GPU, and all later tests",
)
@pytest.mark.parametrize("value", [20, -1, 2**40])
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_bad_targets_never_reach_the_loss_without_compaction(entry, value):
    # On a device the check is then an assertion in the kernel; on CPU it is raised where it happens.
    with pytest.raises(RuntimeError, match="^targets: expected"):
        entry(HIDDEN, WEIGHT, changed_target(value), compact=False)


def test_ignored_targets_may_be_out_of_range():
    targets = changed_target(20)
    losses = linear_cross_entropy(HIDDEN, WEIGHT, targets, ignore_index=20, reduction="none")
    assert losses[1, 2] == 0 and (losses != 0).sum() == 11


def test_choices_of_reduction_are_listed():
    with pytest.raises(ValueError) as caught:
        linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, reduction="average")
    assert all(repr(choice) in str(caught.value) for choice in ("none", "mean", "sum", "average")), str(
        caught.value
    )


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("trainable", ["hidden", "weight"])
def test_create_graph(entry, trainable):
    leaves = {"hidden": HIDDEN.clone(), "weight": WEIGHT.clone()}
    leaf = leaves[trainable].requires_grad_()
    output = entry(leaves["hidden"], leaves["weight"], TARGETS)
    value = output if isinstance(output, torch.Tensor) else getattr(output, "loss", output[0]).sum()
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(value, leaf, create_graph=True)
    assert FORM.match(str(caught.value)), str(caught.value)
    assert "hidden @ weight.T" in str(caught.value), "a remedy that needs nothing of the library"


SMALL_BUDGET = """
import torch, warnings
from logitless import CrossEntropyLoss
torch.manual_seed(0)
hidden, weight, targets = torch.randn(5, 4, requires_grad=True), torch.randn(100, 4), torch.arange(5)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for _ in range(3):
        output = CrossEntropyLoss(logits_budget=16)(hidden, weight, targets)
expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
print(output.plan.chunks, output.plan.token_chunk, torch.allclose(output.loss, expected))
for warning in caught:
    print(issubclass(warning.category, UserWarning), warning.message)
"""


def test_budget_below_one_row_works_and_warns_once():
    # In a process of its own: "once" counts from the start of the process.
    result = subprocess.run([sys.executable, "-c", SMALL_BUDGET], capture_output=True, text=True, check=True)
    facts, *warned = result.stdout.strip().splitlines()
    assert facts == "5 1 True"
    assert len(warned) == 1 and warned[0].startswith("True logits_budget: "), warned


# -- a user's own loss. What is wrong with the class may be said when it is defined, made or called.


def refused(attempt: Callable[[], object]) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        attempt()
    message = str(caught.value)
    assert FORM.match(message), message
    return message


def returning(terms: Callable, kind: type = TokenLoss, **attributes) -> type:
    """A loss class with these `terms`."""
    return type("Own", (kind,), {"terms": terms, **attributes})


def test_a_class_without_terms():
    def attempt():
        @dataclass(frozen=True, kw_only=True)
        class Forgetful(TokenLoss):
            gamma: float = 2.0

        Forgetful()(HIDDEN, WEIGHT, TARGETS)

    assert "terms" in refused(attempt)


def test_fields_without_the_dataclass_decorator():
    def attempt():
        class Undecorated(TokenLoss):
            gamma: float = 2.0

            def terms(self, stats, batch):
                return {"nll": Term(-self.gamma * stats.logps)}, {}

        Undecorated()(HIDDEN, WEIGHT, TARGETS)

    assert "dataclass" in refused(attempt)


def test_class_variables_need_no_decorator():
    class Undecorated(TokenLoss):
        metric_names: ClassVar[tuple[str, ...]] = ("logps",)

        def terms(self, stats, batch):
            return {"nll": Term(-stats.logps)}, {"logps": Term(stats.logps)}

    out = Undecorated()(HIDDEN, WEIGHT, TARGETS)
    assert out.loss == -out.metrics["logps"]


def test_a_field_that_holds_a_tensor():
    def attempt():
        @dataclass(frozen=True, kw_only=True)
        class Tabled(TokenLoss):
            table: Tensor

            def terms(self, stats, batch):
                return {"nll": Term(-stats.logps * self.table[batch.targets])}, {}

        Tabled(table=torch.ones(20))(HIDDEN, WEIGHT, TARGETS)

    assert "shared_inputs" in refused(attempt)


# -- normalizer


NORMALIZED = {
    "CrossEntropyLoss": (CrossEntropyLoss, {}),
    "DPOLoss": (DPOLoss, {"ref_logps": torch.zeros(2, device=DEVICE)}),
    "SimPOLoss": (SimPOLoss, {}),
    "GRPOLoss": (GRPOLoss, {"advantages": torch.ones(2, device=DEVICE)}),
}
by_loss = pytest.mark.parametrize("kind, inputs", NORMALIZED.values(), ids=NORMALIZED)


@by_loss
@pytest.mark.parametrize("zero", [0, 0.0, "tensor"])
def test_num_items_of_0_with_supervised_tokens(kind, inputs, zero):
    zero = torch.tensor(0) if zero == "tensor" else zero
    message = refused(lambda: kind()(HIDDEN, WEIGHT, TARGETS, num_items=zero, **inputs))
    assert message.startswith("num_items: expected")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device-side assertion ends the process's use of the GPU")
def test_num_items_of_0_on_the_device_without_compaction():
    with pytest.raises(RuntimeError, match="^num_items: expected"):
        CrossEntropyLoss(compact=False)(HIDDEN, WEIGHT, TARGETS, num_items=torch.tensor(0))


@pytest.mark.parametrize("zero", [0, 0.0, "tensor"])
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
def test_num_items_of_0_without_supervised_tokens(zero, compact):
    zero, hidden = torch.tensor(0) if zero == "tensor" else zero, HIDDEN.clone().requires_grad_()
    nothing = torch.full_like(TARGETS, -100)
    loss = CrossEntropyLoss(compact=compact)(hidden, WEIGHT, nothing, num_items=zero).loss
    loss.backward()
    assert loss == 0 and not hidden.grad.any()


@by_loss
@pytest.mark.parametrize("num_items", [3, torch.tensor(3, device=DEVICE)], ids=["number", "tensor"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_num_items_of_what_is_no_mean(kind, inputs, num_items, reduction):
    loss = kind(reduction=reduction)
    assert loss(HIDDEN, WEIGHT, TARGETS, **inputs).loss.isfinite().all()
    message = refused(lambda: loss(HIDDEN, WEIGHT, TARGETS, num_items=num_items, **inputs))
    assert message.startswith("num_items: expected None")
