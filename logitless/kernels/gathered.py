"""Products with k rows of the head per token: `(N, k, H)` never exists."""

from torch import Tensor


def weighted_rows(
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (n, k) int64
    coefficients: Tensor,  # (n, k)
) -> Tensor:
    """(n, H) sums over k of coefficients * weight[ids], in the coefficients' dtype."""
    out = coefficients.new_zeros(ids.shape[0], weight.shape[1])
    for slot in range(ids.shape[1]):
        out.addcmul_(weight[ids[:, slot]].to(out.dtype), coefficients[:, slot, None])
    return out
