"""`logitless.estimate`: the plan that then runs, and the products that then are counted."""

import functools
import gc

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import logitless
from logitless import CrossEntropyLoss, DPOLoss, GRPOLoss, JSDLoss, KTOLoss, MedusaLoss, linear_logprobs
from logitless.engine.plan import BudgetWarning
from tests.losses import every_loss
from tests.losses.every_loss import LOSSES, B, H, K, TEACHER_H, V, LossCase
from tests.support import DEVICE, uncompiled

T = 11
SIZES = {"tokens": B * T, "hidden_size": H, "vocab_size": V, "dtype": torch.float32, "device": DEVICE}
TEACHER = {"teacher_hidden_size": TEACHER_H}


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    with uncompiled():
        yield


def prepared(name: str, **options):
    """A loss, its call's arguments, and the sizes that describe them."""
    x, sizes = every_loss.given(T), {"sequences": B, "targets": None}
    case = LOSSES[name]
    if isinstance(case, LossCase):
        loss, arguments, inputs = case.prepare(x, every_loss.heads(), **options)
    else:
        loss = functools.partial(linear_logprobs, entropy=True, **options)
        arguments, inputs = (x.hidden, x.weight, x.targets), {"bias": x.bias}
    if "teacher_hidden" in inputs:
        sizes |= TEACHER
    if "teacher_logprobs_topk" in inputs:
        sizes |= {"teacher_topk": K}
    if name in ("multi-token", "Medusa"):
        sizes |= {"heads": 1 if name == "multi-token" else 2}
    return loss, arguments, inputs, sizes | {"targets": x.targets}


# In several chunks, and groups of which some do not fit.
BUDGETS = {"one chunk": {}, "chunks": {"logits_budget": 5_000}, "no reduction": {"reduction": "none"}}


def plans_of(call) -> list:
    """What the engine plans while `call` runs."""
    from logitless.engine import passes

    found, original = [], passes.make_plan

    def noted(*arguments, **options):
        found.append(original(*arguments, **options))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "make_plan", noted)
        call()
    return found


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("how", BUDGETS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_plan_is_the_one_that_runs(name, how):
    options = BUDGETS[how]
    if "reduction" in options and name in ("logprobs", "DPO, sorted", "ORPO", "CPO", "multi-token", "Medusa"):
        pytest.skip("has none")
    loss, arguments, inputs, sizes = prepared(name, **options)

    def run():
        out = loss(*arguments, **inputs)
        value = out.logps.sum() if name == "logprobs" else out.loss.sum()
        value.backward()
        return out

    ran = plans_of(run)
    guess = logitless.estimate(loss, **SIZES, **sizes)
    assert list(guess.walks) == ran
    if name != "logprobs":
        with torch.no_grad():
            assert logitless.estimate(loss, **SIZES, **sizes).plan == loss(*arguments, **inputs).plan
