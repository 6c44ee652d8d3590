"""Checks of the operands of a projection (..., H) x (V, H), and of its targets, masks and boundaries."""

from typing import NamedTuple

import torch
from torch import Tensor

from logitless.errors import type_error, value_error
from logitless.kernels.head import targets as kernels

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Targets of tokens whose entry in a mask is neither 0 nor 1, or in a mask of floats negative or NaN. They are
# no valid ids, so that `choose.py` reports a fault.
WRONG_MASK = torch.iinfo(torch.int64).min
NEGATIVE_MASK, NAN_MASK = WRONG_MASK + 1, WRONG_MASK + 2
MASKS = "booleans, or numbers that are 0 or 1"


class SplitHead(NamedTuple):
    """A weight with H frozen columns followed by r trained columns: LoRA on the head, with hidden [h,
    s·h·Aᵀ].

    The product uses the concatenation (V, H + r), and d_weight is computed only for the r trained columns.
    The concatenation is a copy of V * (H + r) elements, which exists during a pass. One product with the
    concatenation is faster than two products whose results are added.
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


def check_operands(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H), or the trained columns (V, r) if there are frozen columns
    targets: Tensor,  # (...)
    bias: Tensor | None,  # (V,)
    frozen: Tensor | None = None,  # (V, H - r)
) -> torch.dtype:
    """Check types, shapes, dtypes and devices.

    Return the dtype of the products (under autocast, its dtype).
    """
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        fits = isinstance(x, Tensor) and x.dtype in FLOATS and x.layout == torch.strided
        if not fits and not (x is None and name == "bias"):
            _check_floats(name, x)
    if not isinstance(targets, Tensor) or targets.dtype not in INTEGERS:
        _check_ids(targets)
    head, rows = (
        (weight, hidden.shape) if frozen is None else (frozen, hidden[..., : -weight.shape[-1]].shape)
    )
    if hidden.dim() < 1:
        raise value_error(
            "hidden", "shape (..., H)", tuple(hidden.shape), "pass hidden states, one row per target"
        )
    if weight.dim() != 2:
        raise value_error("weight", "shape (V, H)", tuple(weight.shape), "pass the LM head's weight matrix")
    if head.shape[0] != weight.shape[0]:
        raise value_error(
            "weight",
            "the same number of rows in both parts of a SplitHead",
            tuple(weight.shape),
            "both parts have the same vocabulary",
        )
    if rows[-1] != head.shape[1]:
        # Only the width of the frozen columns is checked. The remaining columns of hidden match the trained
        # columns by construction.
        raise value_error(
            "hidden",
            f"a last dimension of {head.shape[1]} to match weight {tuple(head.shape)}",
            tuple(rows),
            "pass the hidden states that enter this LM head, and weight as (V, H)",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise value_error(
            "bias",
            f"shape ({weight.shape[0]},), one per row of weight",
            tuple(bias.shape),
            "pass the bias of the same head",
        )
    if targets.shape != hidden.shape[:-1]:
        raise value_error(
            "targets",
            f"shape {tuple(hidden.shape[:-1])}, one per row of hidden",
            tuple(targets.shape),
            "align targets with hidden (shift=True takes unshifted labels of the same length)",
        )
    device = hidden.device
    if device.type == "meta":
        check_data(hidden=hidden)
    autocast = torch.is_autocast_enabled(device.type) and hidden.dtype != torch.float64
    for name, x in (("weight", weight), ("bias", bias), ("weight", frozen), ("targets", targets)):
        if x is None:
            continue
        if not autocast and name != "targets" and x.dtype != hidden.dtype:
            raise type_error(
                name,
                f"hidden's dtype {hidden.dtype}",
                x.dtype,
                "cast one of them, or call under torch.autocast",
            )
        if x.device != device:
            check_data(**{name: x})
            raise value_error(name, f"hidden's device {device}", x.device, f"move {name} there")
    return torch.get_autocast_dtype(device.type) if autocast else weight.dtype


def check_data(**tensors: Tensor) -> None:
    """Raise ValueError for tensors on the meta device, which have no data."""
    for name, x in tensors.items():
        if x.is_meta:
            raise value_error(
                name,
                "a tensor with data",
                "one on the meta device",
                "load the model, or make the tensor, on a real device first",
            )


def _check_floats(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        remedies = {
            "hidden": "pass the hidden states, such as model.model(ids).last_hidden_state",
            "weight": "pass the LM head's weight as a torch.Tensor, such as model.lm_head.weight",
            "bias": "pass bias as a torch.Tensor",
        }
        raise type_error(name, "a tensor", type(x).__name__, remedies[name])
    expected = "a dense bfloat16, float16, float32 or float64 tensor"
    got = f"{x.dtype}, {x.layout}"
    dense = x.dtype in FLOATS and x.layout == torch.strided
    remedy = "dequantize it (or cast it) before the call"
    if name != "bias" and x.dtype in INTEGERS[:2] and x.layout == torch.strided:
        # These are token ids: the arguments are probably in the wrong order.
        remedy = "the order is (hidden, weight, targets), with the token ids last"
    if not dense:
        raise type_error(name, expected, got, remedy)


def _check_ids(targets: object) -> None:
    if not isinstance(targets, Tensor):
        raise type_error("targets", "an int64 tensor", type(targets).__name__, "pass token ids")
    if targets.dtype not in INTEGERS:
        raise type_error(
            "targets",
            "integer token ids (int64)",
            targets.dtype,
            "pass token ids, not probabilities or a mask; the order is (hidden, weight, targets)",
        )


def holds_flags(x: Tensor) -> bool:
    """Whether x is bool or integer."""
    return x.dtype == torch.bool or x.dtype in INTEGERS


def apply_mask(targets: Tensor, mask: Tensor, ignore_index: int) -> Tensor:
    """Return targets with `ignore_index` where the mask is 0, and an invalid id where it is neither 0 nor 1.

    The invalid ids are `WRONG_MASK`, `NEGATIVE_MASK` and `NAN_MASK`. The call counts them with the other
    invalid targets, and `mask_error` says what they are.

    Args:
        targets: (...) integers.
        mask: (...), bool, integers or floats.
        ignore_index: the new target of tokens with mask 0 (False).
    """
    if mask.shape != targets.shape:
        raise value_error(
            "mask", f"targets' shape {tuple(targets.shape)}", tuple(mask.shape), "pass one entry per target"
        )
    if not holds_flags(mask):
        if mask.dtype not in FLOATS:
            raise type_error("mask", MASKS, mask.dtype, "pass which tokens count, such as mask != 0")
        if mask.requires_grad:
            remedy = "detach it: a mask gets no gradient"
            raise value_error("mask", "a tensor that requires no gradient", "one that does", remedy)
    return kernels.masked(targets.long(), mask, ignore_index, WRONG_MASK)


def mask_error(targets: Tensor, weights: str) -> ValueError | None:
    """The error about a mask that is neither 0 nor 1 at some of the targets (n,) of `apply_mask`; else None.

    `weights` is the end of the remedy for a mask that holds weights of the tokens.
    """
    wrong, negative, nan = [(targets == code).sum().item() for code in (WRONG_MASK, NEGATIVE_MASK, NAN_MASK)]
    if nan:
        return value_error("mask", MASKS, f"{nan} NaN", "check the computation that it comes from")
    if negative:
        got = f"{negative} negative numbers, as in an additive mask (0 keeps, -inf drops)"
        return value_error("mask", MASKS, got, "pass mask == 0")
    if wrong:
        remedy = f"pass which tokens count, such as mask != 0{weights}"
        return value_error("mask", MASKS, f"{wrong} others", remedy)
    return None


def supervised_where(
    mask: Tensor | None, shape: torch.Size, ignore_index: int, device: torch.device
) -> Tensor:
    """Return targets (...) for a call without labels: 0 if the mask is 1, else `ignore_index` (not 0)."""
    every = torch.zeros(shape, dtype=torch.int64, device=device)
    return every if mask is None else apply_mask(every, mask, ignore_index)


def checked_boundaries(cu_seqlens: Tensor, like: Tensor, name: str = "cu_seqlens") -> Tensor:
    """Check type, dtype and shape of the boundaries of packed sequences. Return them as int64 on the device
    of `like`.

    Every call with boundaries begins with this function. The values of the boundaries are checked later, on
    the device, and the result of this check is read together with the number of supervised tokens
    (`rows.compact_rows`). Until then the values may be invalid, and code that uses them must not index out of
    bounds (see `sequence_numbers`).

    Args:
        cu_seqlens: (sequences + 1,) integers.
        like: targets (N,) or hidden states (N, H) of the packed tokens.
        name: name of the argument, for error messages.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise type_error(name, "a tensor", type(cu_seqlens).__name__, f"pass torch.as_tensor({name})")
    expected = "(sequences + 1,) int64 boundaries"
    if cu_seqlens.dtype not in INTEGERS or cu_seqlens.dim() != 1:
        raise value_error(
            name,
            expected,
            f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}",
            "pass the offsets of the sequences, 0 to N",
        )
    needed = 2 if like.numel() > 0 else 1
    if cu_seqlens.shape[0] < needed:
        raise value_error(
            name,
            expected,
            f"{cu_seqlens.shape[0]} of them",
            "one sequence of N tokens has the boundaries (0, N)",
        )
    return cu_seqlens.to(like.device, torch.int64)


def check_packed(name: str, x: Tensor, dims: int, boundaries: str = "cu_seqlens") -> None:
    """Raise ValueError unless the tokens of packed sequences are flat: targets (N,), hidden states (N, H).

    Args:
        name: name of the argument.
        x: its value.
        dims: 1 for targets, 2 for hidden states.
        boundaries: name of the argument with the boundaries of the sequences.
    """
    if x.dim() != dims:
        expected = f"shape {'(N,)' if dims == 1 else '(N, H)'} with {boundaries}"
        remedy = f"flatten the tokens or leave {boundaries} out"
        raise value_error(name, expected, tuple(x.shape), remedy)


def sequence_numbers(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """The sequence index of each packed position; in [0, sequences) even if the boundaries are invalid."""
    number = torch.searchsorted(cu_seqlens[1:], positions, right=True)
    return number.clamp(max=cu_seqlens.shape[0] - 2)


def shifted(x: Tensor, last: float, dim: int = -1, cu_seqlens: Tensor | None = None) -> Tensor:
    """Shift x left by one along `dim`: position i gets entry i + 1, and the last of each sequence gets
    `last`.

    Args:
        x: labels (..., T), or an input that is aligned with labels.
        last: the value at the last position of every sequence.
        dim: the dimension of the tokens.
        cu_seqlens: (sequences + 1,) `checked_boundaries` of packed sequences; None: each row of x is one
            sequence.
    """
    after = torch.arange(1, x.shape[dim] + 1, device=x.device)
    if cu_seqlens is None:
        is_last = after == x.shape[dim]
    else:
        is_last = torch.isin(after, cu_seqlens[1:])
    after_dim = x.dim() - 1 - dim % x.dim()
    is_last = is_last.view(-1, *[1] * after_dim) if after_dim else is_last
    return x.roll(-1, dim).masked_fill(is_last, last)


def is_same(x: object, targets: Tensor) -> bool:
    """Whether an input is a tensor in the memory of the targets, with their dtype, shape and strides.

    Labels, for example, may be an input of the loss and its targets.
    """
    if not isinstance(x, Tensor) or x.dtype != targets.dtype or x.shape != targets.shape:
        return False
    return x.data_ptr() == targets.data_ptr() and x.stride() == targets.stride()


def masked_rows(x: Tensor, supervised: Tensor) -> Tensor:
    """Return `x` (N, ...) with 0 in the rows that are not supervised (N,)."""
    zero = False if x.dtype == torch.bool else 0
    return torch.where(supervised.view(-1, *[1] * (x.dim() - 1)), x, zero)
