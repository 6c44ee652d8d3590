"""One projection `(..., H) x (V, H)` and its targets as a caller gives them, and what must be true of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from logitless.errors import expect
from logitless.parallel.groups import local_parameter

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class SplitHead(NamedTuple):
    """A head whose last columns train and whose others do not, in the place of `weight`: LoRA on the head, hidden [h, s·h·Aᵀ].

    The product is with (V, H + r), and only the gradient of `trained` is computed: r columns of a product in the place of H + r.
    It costs a copy of the head, V * (H + r) numbers, for as long as a pass lasts: one product with both parts side by side is
    faster than two that meet in a chunk's logits.
    """

    frozen: Tensor  # (V, H)
    trained: Tensor  # (V, r)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.frozen.shape[0], self.frozen.shape[1] + self.trained.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.frozen.dtype

    @property
    def device(self) -> torch.device:
        return self.frozen.device

    def mean(self, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.cat((self.frozen.mean(dim, dtype=dtype), self.trained.mean(dim, dtype=dtype)), dim=-1)


class Operands(NamedTuple):
    """What enters the product, and the targets."""

    hidden: Tensor  # (..., H)
    weight: Tensor  # (V, H), or the trained columns (V, r) beside frozen ones (V, H - r)
    targets: Tensor  # (...)
    bias: Tensor | None  # (V,)
    frozen: Tensor | None = None

    @classmethod
    def local(cls, hidden: Tensor, weight: Tensor | SplitHead, targets: Tensor, bias: Tensor | None, tp_group) -> "Operands":
        """With what this rank holds of the parameters."""
        frozen, weight = (weight.frozen.detach(), weight.trained) if isinstance(weight, SplitHead) else (None, weight)
        bias = local_parameter("bias", bias, tp_group)
        weight, frozen = (local_parameter("weight", x, tp_group) for x in (weight, frozen))
        return cls(hidden, weight, targets, bias, frozen)

    def check(self) -> torch.dtype:
        """Check types, shapes, dtypes and devices; returns the dtype of the products, autocast's where that is on."""
        _check_floats("hidden", self.hidden, "pass the hidden states, such as model.model(ids).last_hidden_state")
        _check_floats("weight", self.weight, "pass the LM head's weight as a torch.Tensor, such as model.lm_head.weight")
        if self.bias is not None:
            _check_floats("bias", self.bias, "pass bias as a torch.Tensor")
        self._check_shapes()
        self._check_targets()
        device = self.hidden.device
        autocast = torch.is_autocast_enabled(device.type) and self.hidden.dtype != torch.float64
        for name, x in (("weight", self.weight), ("bias", self.bias), ("weight", self.frozen)):
            if x is not None:
                alike, remedy = autocast or x.dtype == self.hidden.dtype, "cast one of them, or call under torch.autocast"
                expect(alike, name, f"hidden's dtype {self.hidden.dtype}", x.dtype, remedy, TypeError)
        for name, x in (("weight", self.weight), ("targets", self.targets), ("bias", self.bias)):
            if x is not None:
                expect(x.device == device, name, f"hidden's device {device}", x.device, f"move {name} there")
        return torch.get_autocast_dtype(device.type) if autocast else self.weight.dtype

    def _check_shapes(self) -> None:
        hidden, weight, _, bias, frozen = self
        got = tuple(hidden.shape)
        expect(hidden.dim() >= 2, "hidden", "shape (..., H) with at least 2 dimensions", got, "add a token dimension")
        expect(weight.dim() == 2, "weight", "shape (V, H)", tuple(weight.shape), "pass the LM head's weight matrix")
        H, head = weight.shape[1], tuple(weight.shape)
        if frozen is not None:
            rows, remedy = frozen.shape[0] == weight.shape[0], "both are of the same vocabulary"
            expect(rows, "weight", "as many rows in both parts of a SplitHead", (head,), remedy)
            # The trained columns' own hidden states are the caller's business; the frozen ones must be the head's.
            H, head, got = frozen.shape[1], tuple(frozen.shape), tuple(hidden[..., : -weight.shape[1]].shape)
        remedy = "pass the hidden states that enter this LM head, and weight as (V, H)"
        expect(got[-1] == H, "hidden", f"a last dimension of {H} to match weight {head}", got, remedy)
        if bias is not None:
            expected = f"shape ({weight.shape[0]},), one per row of weight"
            expect(bias.shape == weight.shape[:1], "bias", expected, tuple(bias.shape), "pass the bias of the same head")

    def _check_targets(self) -> None:
        hidden, targets = self.hidden, self.targets
        kind = type(targets).__name__
        expect(isinstance(targets, Tensor), "targets", "an int64 tensor", kind, "pass token ids", TypeError)
        integer = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
        remedy = "pass token ids, not probabilities or a mask"
        expect(integer, "targets", "integer token ids (int64)", targets.dtype, remedy, TypeError)
        expected = f"shape {tuple(hidden.shape[:-1])}, one per row of hidden"
        remedy = "align targets with hidden (shift=True takes unshifted labels of the same length)"
        expect(targets.shape == hidden.shape[:-1], "targets", expected, tuple(targets.shape), remedy)


def _check_floats(name: str, x: object, remedy: str) -> None:
    expect(isinstance(x, Tensor), name, "a tensor", type(x).__name__, remedy, TypeError)
    dense = x.dtype in FLOATS and x.layout == torch.strided
    expected, remedy = "a dense bfloat16, float16, float32 or float64 tensor", "dequantize it (or cast it) before the call"
    expect(dense, name, expected, f"{x.dtype}, {x.layout}", remedy, TypeError)


def shifted(x: Tensor, last: float, dim: int = -1, ends: Tensor | None = None) -> Tensor:
    """Each position gets the entry of the next one along `dim`, and the last of a sequence gets `last`.

    Args:
        x: labels (..., T), or what is aligned with them.
        last: what the last position of every sequence gets.
        dim: the dimension of the tokens.
        ends: (sequences,) where packed sequences end; None: each row of x is one sequence.
    """
    positions = torch.arange(1, x.shape[dim] + 1, device=x.device)
    is_last = positions == x.shape[dim] if ends is None else torch.isin(positions, ends.to(x.device))
    return x.roll(-1, dim).masked_fill(is_last.view(-1, *[1] * (x.dim() - 1 - dim % x.dim())), last)
