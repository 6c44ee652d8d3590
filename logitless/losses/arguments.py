"""The arguments of a call, checked and flattened to one row per token."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logitless.losses.checks import check_operands, expect
from logitless.losses.engine import Problem
from logitless.losses.shard import local_rows, process_group
from logitless.losses.walk import Needs

if TYPE_CHECKING:
    from logitless.losses.base import LinearLoss


class SplitHead(NamedTuple):
    """A head whose last columns train and whose others do not, in the place of `weight`: the product is with (V, H + r) and only the
    gradient of `trained` is computed, r columns of a product in the place of H + r. That is LoRA on the head: hidden [h, s·h·Aᵀ].

    What it costs is a copy of the head for as long as a walk lasts, V * (H + r) numbers: one product with both parts side by side is
    faster than a second one over the chunk's logits, and everything that the walks know about a head holds for it.
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


def shifted(x: Tensor, last: float) -> Tensor:
    """Labels (..., T), or what goes with them, of the same length as hidden -> each position gets the next one's, the last `last`."""
    return torch.cat((x[..., 1:], torch.full_like(x[..., :1], last)), dim=-1)


def resolved(loss: "LinearLoss", weight: Tensor) -> "LinearLoss":
    """The loss with its groups as process groups, whatever names them."""
    given = {name: getattr(loss, name) for name in ("tp_group", "cp_group") if getattr(loss, name) is not None}
    groups = {name: process_group(name, group, weight) for name, group in given.items()}
    return loss if all(groups[name] is group for name, group in given.items()) else replace(loss, **groups)


def prepare(
    loss: "LinearLoss", hidden: Tensor, weight: Tensor | SplitHead, targets: Tensor, bias: Tensor | None,
    num_items: float | Tensor | None, shift: bool, cu_seqlens: Tensor | None, inputs: Mapping[str, Tensor | None],
) -> Problem:  # fmt: skip
    """Check a call's arguments and flatten them to one row per token."""
    frozen, weight = weight if isinstance(weight, SplitHead) else (None, weight)
    weight, bias = _here(loss, "weight", weight), _here(loss, "bias", bias)
    frozen = frozen if frozen is None else _here(loss, "weight", frozen.detach())
    alike = frozen is None or frozen.shape[0] == weight.shape[0]
    expect(alike, "weight", "as many rows in both parts of a SplitHead", (tuple(weight.shape),), "both are of the same vocabulary")
    autocast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    if frozen is None:
        check_operands(hidden, weight, targets, bias, autocast=autocast)
    else:
        check_operands(hidden[..., : -weight.shape[1]], frozen, targets, bias, autocast=autocast)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else weight.dtype
    H = hidden.shape[-1]
    if shift:
        targets = shifted(targets, loss.ignore_index)
        inputs = {name: shifted(x, 0) if x is not None and name in loss.token_inputs else x for name, x in inputs.items()}
    for name in ("accum_dtype", "logits_dtype"):
        wanted = getattr(loss, name)
        expect(
            wanted is None or wanted == dtype or wanted == torch.promote_types(wanted, torch.promote_types(dtype, torch.float32)),
            name, f"None, {dtype} or a wider dtype", wanted, "leave it None for the default",
        )  # fmt: skip
    sequences = _sequences(loss, hidden, cu_seqlens)
    flat = {name: _flat_input(loss, name, inputs.get(name), targets.shape, sequences) for name in loss.inputs}
    if cu_seqlens is not None:
        whole = not cu_seqlens.is_floating_point() and cu_seqlens.dim() == 1
        expect(whole, "cu_seqlens", "(sequences + 1,) int64 boundaries", f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}", "pass boundaries")
        expect(hidden.dim() == 2, "hidden", "shape (N, H) with cu_seqlens", tuple(hidden.shape), "flatten the tokens or leave it out")
        cu_seqlens = cu_seqlens.to(hidden.device, torch.int64)
    grad = torch.is_grad_enabled()
    needs = Needs(grad and hidden.requires_grad, grad and weight.requires_grad, grad and bias is not None and bias.requires_grad)
    if num_items is not None:
        if not isinstance(num_items, Tensor):
            num_items = torch.full((), num_items, dtype=torch.float32, device=hidden.device)
        num_items = num_items.to(hidden.device)
        expect(num_items.dim() == 0, "num_items", "a number or a 0-d tensor", tuple(num_items.shape), "sum it first")
    return Problem(
        hidden.reshape(-1, H), weight, bias, targets.reshape(-1).long(), num_items, cu_seqlens, flat, sequences, dtype, needs, frozen=frozen
    )  # fmt: skip


def _here(loss: "LinearLoss", name: str, x: Tensor | None) -> Tensor | None:
    """What this rank multiplies with: the whole parameter, or its shard of the vocabulary."""
    return _gathered(name, x if x is None or loss.tp_group is None else local_rows(name, x, loss.tp_group))


def _gathered(name: str, x: Tensor | None) -> Tensor | None:
    """A sharded (DTensor) parameter, whole; its gradient goes back averaged over the ranks, as FSDP reduces gradients."""
    if x is None or not torch.distributed.is_available():
        return x
    from torch.distributed.tensor import DTensor, Partial
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(x, DTensor):
        return x.full_tensor(grad_placements=[Partial("avg")] * x.device_mesh.ndim)
    quantized = isinstance(x, Tensor) and is_traceable_wrapper_subclass(x)
    expect(not quantized, name, "a dense tensor or a DTensor", type(x).__name__, "dequantize it before the call", TypeError)
    return x


def _flat_input(loss: "LinearLoss", name: str, x: Tensor | None, shape: torch.Size, sequences: int) -> Tensor | None:
    if x is None or name in loss.shared_inputs:
        return x
    if name in loss.sequence_inputs:
        expect(x.shape[:1] == (sequences,), name, f"shape ({sequences},), one entry per sequence", tuple(x.shape), "match the batch")
        return x
    if name.endswith(("_weight", "_bias")):
        return _here(loss, name, x.detach())
    if name in loss.token_inputs or name in ("teacher_hidden", "ref_hidden"):
        fits = x.shape[: len(shape)] == shape
        expect(fits, name, f"a shape that starts with targets' {tuple(shape)}", tuple(x.shape), "give one entry per token")
        return x.reshape(-1, *x.shape[len(shape) :])
    return x


def _sequences(loss: "LinearLoss", hidden: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many sequences the call has; 0 for a loss that does not look at them."""
    if loss.scope == "token" and not loss.sequence_inputs and loss.unit == "tokens":
        return 0
    if cu_seqlens is None and hidden.dim() < 3:
        expect(loss.scope == "batch" and not loss.sequence_inputs, "hidden", "shape (B, T, H)", tuple(hidden.shape), "or pass cu_seqlens")
        return 1
    count = hidden.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expect(
        count % loss.sequences_per_group == 0, "hidden", f"a multiple of {loss.sequences_per_group} sequences", count,
        "give every group all of its sequences",
    )  # fmt: skip
    return count
