"""Errors in one form: `argument: expected X, got Y; remedy.`"""

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def expect(condition: bool, argument: str, expected: str, got: object, remedy: str, error: type[Exception] = ValueError) -> None:
    if not condition:
        raise error(f"{argument}: expected {expected}, got {got}; {remedy}.")


def check_choice(argument: str, value: object, choices) -> None:
    expect(value in choices, argument, f"one of {', '.join(map(repr, choices))}", repr(value), "pick one of these")


def check_operands(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, *, autocast: bool) -> None:
    """Shapes, dtypes and devices of one projection `(…, H) x (V, H)` and its targets."""
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is None:
            continue
        expect(isinstance(x, Tensor), name, "a tensor", type(x).__name__, f"pass {name} as a torch.Tensor", TypeError)
        expect(
            x.dtype in FLOATS and x.layout == torch.strided,
            name,
            "a dense bfloat16, float16, float32 or float64 tensor",
            f"{x.dtype}, {x.layout}",
            "dequantize it (or cast it) before the call",
            TypeError,
        )
    expect(hidden.dim() >= 2, "hidden", "shape (..., H) with at least 2 dimensions", tuple(hidden.shape), "add a token dimension")
    expect(weight.dim() == 2, "weight", "shape (V, H)", tuple(weight.shape), "pass the LM head's weight matrix")
    expect(
        hidden.shape[-1] == weight.shape[1],
        "hidden",
        f"a last dimension of {weight.shape[1]} to match weight {tuple(weight.shape)}",
        tuple(hidden.shape),
        "pass the hidden states that enter this LM head, and weight as (V, H)",
    )
    expect(isinstance(targets, Tensor), "targets", "an int64 tensor", type(targets).__name__, "pass token ids", TypeError)
    expect(
        not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool),
        "targets",
        "integer token ids (int64)",
        targets.dtype,
        "pass token ids, not probabilities or a mask",
        TypeError,
    )
    expect(
        targets.shape == hidden.shape[:-1],
        "targets",
        f"shape {tuple(hidden.shape[:-1])}, one per row of hidden",
        tuple(targets.shape),
        "align targets with hidden (shift=True takes unshifted labels of the same length)",
    )
    if bias is not None:
        expect(
            bias.shape == weight.shape[:1],
            "bias",
            f"shape ({weight.shape[0]},), one per row of weight",
            tuple(bias.shape),
            "pass the bias of the same head",
        )
    for name, x in (("weight", weight), ("bias", bias)):
        if x is None:
            continue
        expect(
            autocast or x.dtype == hidden.dtype,
            name,
            f"hidden's dtype {hidden.dtype}",
            x.dtype,
            "cast one of them, or call under torch.autocast",
            TypeError,
        )
    for name, x in (("weight", weight), ("targets", targets), ("bias", bias)):
        if x is not None:
            expect(x.device == hidden.device, name, f"hidden's device {hidden.device}", x.device, f"move {name} there")


def check_vocabulary_input(name: str, x: Tensor | None, V: int) -> None:
    """A per-token-id vector such as class_weights."""
    if x is not None:
        expect(tuple(x.shape) == (V,), name, f"shape ({V},), one per token id", tuple(x.shape), "give every token id an entry")
