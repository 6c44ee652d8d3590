"""Unshifted labels, and what goes with them, moved to the positions that predict them."""

import torch
from torch import Tensor


def sequence_numbers(
    cu_seqlens: Tensor,  # (sequences + 1,)
    N: int,
    device: torch.device,
) -> Tensor:  # (N,) int64
    """The number of the packed sequence that each token belongs to."""
    positions = torch.arange(N, device=device)
    number = torch.searchsorted(cu_seqlens[1:].to(device), positions, right=True)
    return number.clamp(max=cu_seqlens.shape[0] - 2)


def shifted(
    x: Tensor,  # (..., T), or (N,) packed
    last: float,
    cu_seqlens: Tensor | None = None,  # (sequences + 1,)
) -> Tensor:
    """Each position gets the next one's entry, the last position of a sequence `last`."""
    moved = torch.cat((x[..., 1:], torch.full_like(x[..., :1], last)), dim=-1)
    if cu_seqlens is None:
        return moved
    number = sequence_numbers(cu_seqlens, x.shape[-1], x.device)
    follows = torch.cat((number[1:] == number[:-1], number.new_zeros(number[:1].shape, dtype=torch.bool)))
    return moved.masked_fill(~follows, last)
