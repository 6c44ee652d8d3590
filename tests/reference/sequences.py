"""What the losses on sequences share."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def padded(values: Tensor, cu_seqlens: Tensor | None, fill: float = 0.0) -> Tensor:
    """`(N, ...)` packed, or `(S, T, ...)` padded and `cu_seqlens` None -> `(S, T, ...)`."""
    if cu_seqlens is None:
        return values
    return pad_sequence(values.split(cu_seqlens.diff().tolist()), batch_first=True, padding_value=fill)


def ratio_of(total: Tensor, count: float | Tensor) -> Tensor:
    """`total / count`, and the total where there is nothing to count."""
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    return total / count.masked_fill(count == 0, 1)
