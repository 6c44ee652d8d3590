"""Calls as the engine sees them, made as a public call makes them."""

from torch import Tensor

from logitless.engine.call import HeadCall, make_head_call, pack, unpack

OPTIONS = ("num_items", "shift", "cu_seqlens")


def given(loss, hidden: Tensor, weight, targets: Tensor, bias: Tensor | None = None, **inputs) -> HeadCall:
    return make_head_call(
        loss,
        hidden,
        weight,
        targets,
        bias,
        {name: x for name, x in inputs.items() if name not in OPTIONS},
        **{name: x for name, x in inputs.items() if name in OPTIONS},
    )


def call(*args, **options) -> HeadCall:
    (actual,) = unpack(*pack([given(*args, **options)]))
    return actual
