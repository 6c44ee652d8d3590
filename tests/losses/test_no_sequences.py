"""A batch of no sequences: a mean and a sum of 0, an empty tensor without reduction, and gradients of 0."""

import pytest
import torch

from tests.losses.every_loss import LOSSES, TRAINED, Given, given, gradients, heads
from tests.support import DEVICE

# Those of several heads or of several units, which have no values without reduction.
REDUCED = ("multi-token", "Medusa", "DPO, sorted", "ORPO", "CPO")
LOGPROBS = "logprobs"
FORMS = [(name, "padded") for name in LOSSES]
FORMS += [(name, "packed") for name in LOSSES if name not in (LOGPROBS, "multi-token", "Medusa")]
CASES = [
    (name, form, reduction)
    for name, form in FORMS
    for reduction in ("mean", "sum", "none")
    if (reduction == "none" or name != LOGPROBS) and (reduction != "none" or name not in REDUCED)
]


@pytest.fixture(autouse=True)
def uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


def empty(form: str) -> Given:
    x = given(5)
    x = Given(
        **{
            name: value if name in ("weight", "bias", "teacher_weight") else value[:0]
            for name, value in x.items()
        }
    )
    x = x.flat() if form == "packed" else x
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in TRAINED}
    return Given(**dict(x.items()) | leaves)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(("name", "form", "reduction"), CASES)
def test_no_sequences(name, form, reduction, compact):
    x, medusa = empty(form), heads()
    options = {"compact": compact} | ({} if name == LOGPROBS else {"reduction": reduction})
    if form == "packed":
        options["cu_seqlens"] = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    value, *metrics = LOSSES[name](x, medusa, **options)
    if reduction == "none" and name != LOGPROBS:
        assert value.numel() == 0
    else:
        assert value == 0
    assert all(not metric.count_nonzero() for metric in metrics)
    for key, gradient in gradients(value.sum(), x, medusa).items():
        assert not gradient.count_nonzero(), key
