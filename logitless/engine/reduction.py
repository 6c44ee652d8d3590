"""The normalizer of each unit's sum, and the power of two that is deferred to the backward pass.

In fp16, the factor of the loss's main unit is split into m * 2^e with m in [0.5, 1). The gradients of the
chunks are multiplied by m, and the backward pass multiplies them by 2^e, which is exact. Therefore no
gradient underflows, even if there are many tokens. Numbers that the host knows stay Python numbers, because
small kernels would delay the first product.
"""

import math

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.engine.rows import Rows
from logitless.engine.terms import UnitFactors

Number = float | Tensor


def unit_factors(call: HeadCall, rows: Rows, deferred: Number | None) -> tuple[UnitFactors, Number]:
    """Return (the `UnitFactors` of a reduced loss, the deferred power of two).

    The factors of the loss are divided by the power of two. If `deferred` is None, the power of two is
    computed from the factor of the loss's main unit. Otherwise it is `deferred`.
    """
    loss = call.loss
    counts = unit_counts(rows.tokens, rows.chosen_tokens, call.sequence_count)
    if loss.reduction == "sum":
        normalizers = dict.fromkeys(counts, 1)
    else:
        normalizers = loss.normalizers(counts, call.targets, call.inputs)
        if call.num_items is not None:
            normalizers[loss.unit] = call.num_items
    factors = _inverses(normalizers, call.stat_dtype, call.coefficient)
    if deferred is None:
        deferred = power_of_two(factors[loss.unit])
    loss_factors = {unit: factor / deferred for unit, factor in factors.items()}
    counted = None if call.num_items is None else loss.unit
    return UnitFactors(loss_factors, _inverses(counts, call.stat_dtype, 1.0), counted), deferred


def metric_factors(counts: dict[str, int | Tensor], dtype: torch.dtype) -> dict[str | None, Number]:
    """Factors of the metrics, which are means over this call regardless of `num_items` and `reduction`."""
    return _inverses(counts, dtype, 1.0)


def unit_counts(tokens: int | Tensor, chosen_tokens: int | Tensor, sequences: int) -> dict[str, int | Tensor]:
    """Unit -> the number of these units in a call."""
    return {"tokens": tokens, "sequences": sequences, "pairs": sequences // 2, "chosen_tokens": chosen_tokens}


def _inverses(
    normalizers: dict[str, Number], dtype: torch.dtype, coefficient: float
) -> dict[str | None, Number]:
    """Unit -> coefficient / normalizer. A normalizer of 0 (an empty sum) is replaced by 1."""
    factors: dict[str | None, Number] = {None: coefficient}
    for unit, count in normalizers.items():
        if isinstance(count, Tensor):
            count = count.to(dtype)
            factors[unit] = coefficient / torch.where(count == 0, 1.0, count)
        else:
            factors[unit] = coefficient / (count or 1)
    return factors


def power_of_two(x: Number) -> Number:
    """The smallest power of two above x > 0."""
    if not isinstance(x, Tensor):
        return 2.0 ** math.frexp(x)[1]
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(mantissa), exponent)
