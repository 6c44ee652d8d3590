"""Operands as they come out of indexing: `labels[:, -1]`, `bias[::2]`, one number expanded to many. No layout
changes a result.

Triton kernels see addresses and not strides, so this file goes through them where it can: on a GPU, or with
TRITON_INTERPRET=1.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from logitless import CrossEntropyLoss
from tests.kernels.support import expanded, offset, strided
from tests.losses import every_loss
from tests.losses.every_loss import TRAINED, Given, LossCase, Prepared, on

LAYOUTS = {"strided": strided, "offset": offset, "expanded": expanded}


def weighted(reduction: str) -> LossCase:
    """Cross-entropy with weights, for which other inputs of the same shapes stand in: in their layout."""
    loss = CrossEntropyLoss(label_smoothing=0.2, z_loss=0.1, softcap=5.0, reduction=reduction)

    def prepare(x: Given, heads) -> Prepared:
        more = {"class_weights": x.bias.detach(), "token_weights": x.ref_logps}
        return loss, (x.hidden, x.weight, x.targets), {"bias": x.bias, **more}

    return LossCase(prepare)


CALLS = every_loss.LOSSES | {
    "cross-entropy, all rows": on(CrossEntropyLoss, compact=False),
    "cross-entropy, weighted": weighted("sum"),
    "cross-entropy, per token": weighted("none"),
}


def outcome(call: Callable, x: Given) -> list[Tensor]:
    """Everything a call returns, and its gradients."""
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in TRAINED}
    leaves = Given(**dict(x.items()) | leaves)
    heads = every_loss.heads()
    outputs = call(leaves, heads)
    return [*outputs, *every_loss.gradients(outputs[0].sum(), leaves, heads).values()]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_layouts(name, layout):
    """Of all operands at once: the numbers between theirs are NaN or no ids. No operand is written to."""
    x = every_loss.given(6)
    x = Given(**{name: LAYOUTS[layout](value.detach()) for name, value in x.items()})
    plain = Given(**{name: value.clone(memory_format=torch.contiguous_format) for name, value in x.items()})
    kept, versions = [value.clone() for _, value in x.items()], [value._version for _, value in x.items()]
    torch.testing.assert_close(outcome(CALLS[name], x), outcome(CALLS[name], plain), rtol=1e-5, atol=1e-6)
    assert [value._version for _, value in x.items()] == versions
    assert all(torch.equal(value, copy) for (_, value), copy in zip(x.items(), kept))
