"""Whole calls on the Hopper kernels, in Triton's interpreter, against the same losses on full logits.

As on a GPU, a call is projected before its rows are counted, if every row of the last calls was supervised.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from logitless import CrossEntropyLoss, DPOLoss, GRPOLoss, JSDLoss
from logitless.engine import early_projection, static_rows
from logitless.kernels.head.targets import runs_kernels
from tests import reference
from tests.kernels.hopper.interpreted import replacements
from tests.kernels.support import INTERPRETED
from tests.support import assert_close, run

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning"),
]
B, T, H, V = 4, 6, 16, 72
# One chunk; or several, of which none holds a pair.
BUDGETS = {"whole": None, "chunks": 1_400}


@pytest.fixture(autouse=True)
def launched(monkeypatch) -> list[str]:
    """The names of the kernels that were launched, in order."""
    from triton.runtime.interpreter import GridExecutor

    for owner, name, value in replacements(16, 32, 16):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(early_projection, "_runs_on_gpu", runs_kernels)
    monkeypatch.setattr(static_rows, "SIZE", 0)
    names, launch = [], GridExecutor.__call__

    def noted(kernel, *operands, **constants):
        names.append(kernel.fn.__name__)
        return launch(kernel, *operands, **constants)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    return names


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HIDDEN, WEIGHT = random(B, T, H, seed=0), random(V, H, seed=1) / 2
EVERY = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))
ANSWERS = torch.where(torch.arange(T) < torch.tensor([[1], [3], [2], [0]]), -100, EVERY)
REFERENCE = {"ref_hidden": HIDDEN + random(B, T, H, seed=3) / 4, "ref_weight": WEIGHT}
POLICY = {"advantages": random(B, seed=4)} | {
    name: reference.token_logprobs(HIDDEN, WEIGHT, EVERY)[0] + random(B, T, seed=seed) / 4
    for seed, name in enumerate(("old_logps", "ref_logps"), 5)
}
TEACHER = {"teacher_hidden": random(B, T, H, seed=7), "teacher_weight": random(V, H, seed=8) / 2}


def dpo(*operands, **inputs):
    return reference.dpo(*operands, **inputs, beta=0.5)


def grpo(*operands, **inputs):
    return reference.grpo(*operands, **inputs, beta=0.04)


# Loss, the same on full logits, targets, inputs.
LOSSES = {
    "CE": (CrossEntropyLoss(), reference.cross_entropy, ANSWERS, {}),
    "DPO": (DPOLoss(beta=0.5), dpo, ANSWERS, REFERENCE),
    "GRPO": (GRPOLoss(beta=0.04), grpo, ANSWERS, POLICY),
    "JSD": (JSDLoss(), reference.distillation, ANSWERS, TEACHER),
}
# Loss, whether the head is frozen, budget, the kernels that compute statistics or gradients.
CASES = [
    ("CE", True, "chunks", {"read_kernel"}),
    ("DPO", True, "whole", {"read_kernel"}),
    ("DPO", True, "chunks", {"read_kernel"}),
    ("DPO", False, "chunks", {"read_kernel", "gradient_kernel"}),
    ("GRPO", False, "whole", {"read_kernel"}),
    ("GRPO", True, "chunks", {"read_kernel"}),
    ("JSD", False, "chunks", {"divergence_kernel"}),
    ("JSD", True, "whole", {"divergence_kernel"}),
]


def id_of(case: tuple) -> str:
    name, frozen, budget, _ = case
    return f"{name}, {'frozen head' if frozen else 'trainable'}, {budget}"


@pytest.mark.parametrize(("name", "frozen", "budget", "kernels"), CASES, ids=map(id_of, CASES))
def test_equals_full_logits(name, frozen, budget, kernels, launched):
    loss, full, targets, inputs = LOSSES[name]
    loss = replace(loss, logits_budget=BUDGETS[budget])
    plan = check(loss, full, targets, inputs, frozen=frozen)
    assert (plan.chunks > 2) == (budget == "chunks")
    assert kernels == {"read_kernel", "gradient_kernel", "divergence_kernel"}.intersection(launched)


def test_early_projection(launched):
    """The call after as many calls as are needed, and the next one, with prompts."""
    loss, full, prompted, inputs = LOSSES["CE"]
    counted = ["mark_kernel", "count_kernel"]
    for number in range(early_projection.LIKELY + 1):
        before = list(launched)
        check(loss, full, EVERY, inputs)
        assert launched[len(before) :][:2] != counted or number < early_projection.LIKELY
    assert launched[len(before)] == "clamp_kernel"
    early = launched[len(before) :]
    launched.clear()
    check(loss, full, prompted, inputs)
    # Of the discarded projection, without its backward pass, and of the call from its counts.
    assert launched == [*early[:-1], *counted, *early[1:]]


def check(
    loss, full: Callable, targets: Tensor, inputs: dict[str, Tensor], *, frozen: bool = False
) -> object:
    """Compares value and gradients; returns the plan."""

    def on_full_logits(hidden, weight, targets, *, bias):
        found = full(hidden, weight, targets, **{name: x.to(hidden.dtype) for name, x in inputs.items()})
        return found[0] if isinstance(found, tuple) else found

    options = {"upstream": 1.3, "requires": ("hidden",) if frozen else ("hidden", "weight")}
    truth = run(on_full_logits, HIDDEN.double(), WEIGHT.double(), targets, **options)
    naive = run(on_full_logits, HIDDEN, WEIGHT, targets, **options)
    actual = run(lambda *given, bias: loss(*given, **inputs), HIDDEN, WEIGHT, targets, **options)
    assert_close(
        actual.value, truth.value, 1e-6, name="value"
    )  # the naive error of a sum may be zero by luck
    for name in truth.grads:
        assert_close(actual.grads[name], truth.grads[name], naive.grads[name], name=f"d_{name}")
    return actual.output.plan
