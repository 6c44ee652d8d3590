"""Triton kernels of `norm.py`: each tensor is read or written once, and rows are kept in registers.

The kernels are bound by memory traffic. A program handles ROWS whole rows at a time: several short rows, so
that enough loads are in flight, with few warps, so that the sum over a row rarely crosses warps.

The backward pass starts a few programs per multiprocessor. Each loops over many rows (a wide row is split in
two parts if the number of columns is not a power of two) and keeps its partial sum of d_weight in registers;
`column_sum_kernel` adds the partial sums in a fixed order, so the result is deterministic.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import cached_launch
from logitless.kernels.operands import as_rows, cdiv, multiprocessors, widest_dtype


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x_ptr,
    residual_ptr,  # or None
    weight_ptr,  # or None
    bias_ptr,  # or None
    h_ptr,  # written if a residual is added before the norm; else None
    y_ptr,
    mean_ptr,  # written by LayerNorm; else None
    rstd_ptr,  # mean and rstd are written; with HAS_STATISTICS they are read
    x_stride,
    residual_stride,
    rows,
    columns,
    multiplier,
    eps,
    ROUND: tl.constexpr,
    GEMMA: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < columns)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty if h_ptr is None else h_ptr.dtype.element_ty
    h = x.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    if h_ptr is not None:
        rounded = (residual + multiplier * h).to(dtype)
        tl.store(h_ptr + row * columns + col, rounded, mask=mask)
        h = rounded.to(tl.float32)
    if mean_ptr is not None:
        if HAS_STATISTICS:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        else:
            mean = tl.sum(h, 1, keep_dims=True) / columns
            tl.store(mean_ptr + row, mean, mask=row < rows)
        h = tl.where(mask, h - mean, 0.0)
    if HAS_STATISTICS:
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    else:
        rstd = tl.rsqrt(tl.sum(h * h, 1, keep_dims=True) / columns + eps)
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = h * rstd
    if weight_ptr is not None:
        if ROUND:
            y = y.to(dtype).to(tl.float32)
        weight = tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
        y *= weight + 1.0 if GEMMA else weight
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
    if residual_ptr is not None and h_ptr is None:
        y += residual
    tl.store(y_ptr + row * columns + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_factor(weight_ptr, col, columns, GEMMA: tl.constexpr):
    """Return the factor of a normalized value: the weight, or 1 + weight in Gemma's norms."""
    weight = tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(tl.float32)
    return weight + 1.0 if GEMMA else weight


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    d_y_ptr,
    d_h_ptr,  # or None
    h_ptr,
    weight_ptr,  # or None
    mean_ptr,  # LayerNorm's; else None
    rstd_ptr,
    d_x_ptr,  # or None if d_sum is also the gradient of x
    d_sum_ptr,  # gradient of h, which is that of the residual, or of x
    partial_sums_ptr,  # (programs, D_WEIGHT + D_BIAS, columns) fp32, or None
    d_y_stride,
    d_h_stride,
    h_stride,
    rows,
    columns,
    multiplier,
    GEMMA: tl.constexpr,
    D_WEIGHT: tl.constexpr,
    D_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PARTIAL: tl.constexpr,  # whether BLOCK is more than `columns`
    REST: tl.constexpr,  # 0, or at least the number of columns after BLOCK
    HOLD_WEIGHT: tl.constexpr,  # whether to keep the weight in registers
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, ROWS).to(tl.int64)
    cols = (tl.arange(0, BLOCK)[None, :],)
    if REST > 0:
        cols = cols + (BLOCK + tl.arange(0, REST)[None, :],)
    weights, d_weights, d_biases = (), (), ()
    for part in tl.static_range(len(cols)):
        col = cols[part]
        if weight_ptr is not None and HOLD_WEIGHT:
            weights = weights + (norm_factor(weight_ptr, col, columns, GEMMA),)
        zeros = tl.zeros([ROWS, col.shape[1]], tl.float32)
        d_weights = d_weights + (zeros,)
        d_biases = d_biases + (zeros,)
    for block in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row_index = block * ROWS + lane
        row = row_index[:, None]
        rstd = tl.load(rstd_ptr + row_index, mask=row_index < rows, other=0.0)[:, None]
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row_index, mask=row_index < rows, other=0.0)[:, None]
        masks = ((row < rows) & (cols[0] < columns) if IS_PARTIAL else row < rows,)
        if REST > 0:
            masks = masks + ((row < rows) & (cols[1] < columns),)
        sum_gz = 0.0
        sum_g = 0.0
        gs = ()
        zs = ()
        new_d_weights = ()
        new_d_biases = ()
        for part in tl.static_range(len(cols)):
            col, mask = cols[part], masks[part]
            # Where the mask is False g is 0, so the value of z there does not matter.
            g = tl.load(d_y_ptr + row * d_y_stride + col, mask=mask, other=0.0).to(tl.float32)
            z = tl.load(h_ptr + row * h_stride + col, mask=mask, other=0.0).to(tl.float32)
            if mean_ptr is not None:
                z -= mean
            z *= rstd
            new_d_weights = new_d_weights + (d_weights[part] + g * z if D_WEIGHT else d_weights[part],)
            new_d_biases = new_d_biases + (d_biases[part] + g if D_BIAS else d_biases[part],)
            if weight_ptr is not None:
                g *= weights[part] if HOLD_WEIGHT else norm_factor(weight_ptr, col, columns, GEMMA)
            sum_gz += tl.sum(g * z, 1, keep_dims=True)
            if mean_ptr is not None:
                sum_g += tl.sum(g, 1, keep_dims=True)
            gs, zs = gs + (g,), zs + (z,)
        d_weights = new_d_weights
        d_biases = new_d_biases
        mean_gz = sum_gz / columns
        mean_g = sum_g / columns
        for part in tl.static_range(len(cols)):
            col, mask = cols[part], masks[part]
            d = gs[part] - zs[part] * mean_gz
            if mean_ptr is not None:
                d -= mean_g
            d *= rstd
            if d_h_ptr is not None:
                d += tl.load(d_h_ptr + row * d_h_stride + col, mask=mask, other=0.0).to(tl.float32)
            tl.store(d_sum_ptr + row * columns + col, d.to(d_sum_ptr.dtype.element_ty), mask=mask)
            if d_x_ptr is not None:
                d_x = (multiplier * d).to(d_x_ptr.dtype.element_ty)
                tl.store(d_x_ptr + row * columns + col, d_x, mask=mask)
    for part in tl.static_range(len(cols)):
        col = cols[part]
        offset = program.to(tl.int64) * (D_WEIGHT + D_BIAS) * columns + col
        if D_WEIGHT:
            tl.store(
                partial_sums_ptr + offset, tl.sum(d_weights[part], 0, keep_dims=True), mask=col < columns
            )
        if D_BIAS:
            d_bias_ptr = partial_sums_ptr + offset + D_WEIGHT * columns
            tl.store(d_bias_ptr, tl.sum(d_biases[part], 0, keep_dims=True), mask=col < columns)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def column_sum_kernel(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(
            x_ptr + row * columns + col[None, :], mask=(row < rows) & (col < columns)[None, :], other=0.0
        )
    tl.store(out_ptr + col, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=col < columns)


# Narrow blocks give many programs, tall blocks few iterations: for 1,000 partial sums of 1,024 columns, 64
# programs of 4 iterations.
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 256, 16, 8


def column_sum(partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum fp32 `partial_sums` (programs, ...) over the programs in a fixed order; flat, in `dtype`."""
    programs = partial_sums.shape[0]
    columns = partial_sums.numel() // programs
    out = partial_sums.new_empty(columns, dtype=dtype)
    column_sum_kernel[(cdiv(columns, SUM_COLUMNS),)](
        partial_sums, out, programs, columns, ROWS=SUM_ROWS, BLOCK=SUM_COLUMNS, num_warps=SUM_WARPS
    )
    return out


@functools.cache
def forward_tile(columns: int) -> dict[str, int]:
    """Return the constants of a program: 32 elements per thread, up to 1,024 columns in one warp."""
    block = triton.next_power_of_2(columns)
    return {"ROWS": max(1, 1024 // block), "BLOCK": block, "num_warps": min(max(1, block // 1024), 16)}


# Most bytes to prefetch: the shared memory of every CUDA device since Ampere has space for them.
PREFETCH_BYTES = 96 * 1024


def choose_num_stages(bytes_per_iteration: int, max_stages: int = 3) -> int:
    """Return `num_stages` of a loop that loads `bytes_per_iteration`; it prefetches num_stages - 1 times."""
    for num_stages in range(max_stages, 1, -1):
        if (num_stages - 1) * bytes_per_iteration <= PREFETCH_BYTES:
            return num_stages
    return 1


def split_columns(columns: int) -> tuple[int, int]:
    """Return two blocks, powers of two, that together cover the columns; the second is 0 if one is enough.

    One block for 2,304 columns would have 4,096, nearly half of them masked. Up to 1,024 columns take one
    block, because two would cost more.
    """
    if columns <= 1024:
        return triton.next_power_of_2(columns), 0
    block = 1 << columns.bit_length() - 1
    rest = triton.next_power_of_2(columns - block) if columns > block else 0
    return block, rest


@functools.cache
def backward_tile(columns: int, bytes_per_element: int) -> tuple[dict[str, int], int]:
    """Return (constants of a program, number of programs per multiprocessor).

    With three prefetched iterations a few programs saturate the memory. Beyond 8,192 columns registers are
    scarce: two programs run without prefetching, and without the weight in registers.

    Args:
        columns: number of columns.
        bytes_per_element: bytes that are loaded for each element of h.
    """
    block, rest = split_columns(columns)
    width = block + rest
    hold_weight = columns <= 8192
    # At most 40 elements per thread.
    warps = max(4, triton.next_power_of_2(cdiv(width, 1280)))
    rows = 1
    programs = max(1, 4096 // block)
    max_stages = 4
    if width <= 512:
        rows = 1024 // triton.next_power_of_2(width)
        warps = 1
        programs = 8
        max_stages = 3
    elif width <= 1280:
        rows = 2
        programs = 3
        max_stages = 3
    elif not hold_weight:
        warps = max(16, warps)
        programs = 2
        max_stages = 1
    if rest:  # prefetching loads at least four bytes per thread
        rest = max(rest, 64 * warps // rows)
    num_stages = choose_num_stages(programs * bytes_per_element * rows * (block + rest), max_stages)
    tile = {
        "ROWS": rows,
        "BLOCK": block,
        "IS_PARTIAL": block > columns,
        "REST": rest,
        "HOLD_WEIGHT": hold_weight,
    }
    return tile | {"num_warps": warps, "STAGES": num_stages}, programs


def _empty_contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    # `torch.empty` with a shape, a dtype and a device costs the host five times as much.
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    config,
    *,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
):
    """Return y, h, and the mean (None for RMSNorm) and 1 / root mean square of each row.

    If `rstd`, and for LayerNorm `mean`, are passed, they are read and not computed.
    """
    columns = x.shape[-1]
    rows = x.numel() // columns
    x_rows, x_stride = as_rows(x)
    residual_rows, residual_stride = (None, 0) if residual is None else as_rows(residual)
    h = x
    h_out = None
    if config.added == "before":
        h = h_out = _empty_contiguous(x, widest_dtype(x, residual))
    y = _empty_contiguous(x, config.y_dtype(x, residual, weight))
    has_statistics = rstd is not None
    if not has_statistics:
        rstd = x.new_empty(rows, dtype=torch.float32)
        mean = torch.empty_like(rstd) if config.center else None
    tile = forward_tile(columns)
    norm_kernel[(cdiv(rows, tile["ROWS"]),)](
        x_rows,
        residual_rows,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        h_out,
        y,
        mean,
        rstd,
        x_stride,
        residual_stride,
        rows,
        columns,
        float(config.multiplier),
        float(config.eps),
        ROUND=config.rounding == "llama",
        GEMMA=config.rounding == "gemma",
        HAS_STATISTICS=has_statistics,
        **tile,
    )
    return y, h, mean, rstd


def backward(
    d_y: Tensor,
    d_h: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean,
    rstd: Tensor,
    config,
    gradient_dtypes,
):
    """Return the gradients of x, residual, weight and bias; the first two may be the same tensor."""
    columns = h.shape[-1]
    rows = h.numel() // columns
    d_y_rows, d_y_stride = as_rows(d_y)
    h_rows, h_stride = as_rows(h)
    d_h_rows, d_h_stride = (None, 0) if d_h is None else as_rows(d_h)
    d_sum = _empty_contiguous(h, gradient_dtypes.residual or gradient_dtypes.x)
    d_x = None
    if d_sum.dtype != gradient_dtypes.x or config.multiplier != 1.0:
        d_x = _empty_contiguous(h, gradient_dtypes.x)
    bytes_per_element = sum(0 if x is None else x.element_size() for x in (d_y, d_h, h))
    tile, programs = backward_tile(columns, bytes_per_element)
    programs = min(cdiv(rows, tile["ROWS"]), programs * multiprocessors(h.device))
    vector_dtypes = [dtype for dtype in (gradient_dtypes.weight, gradient_dtypes.bias) if dtype]
    partial_sums = (
        h.new_empty((programs, len(vector_dtypes), columns), dtype=torch.float32) if vector_dtypes else None
    )
    norm_backward_kernel[(programs,)](
        d_y_rows,
        d_h_rows,
        h_rows,
        None if weight is None else weight.contiguous(),
        mean,
        rstd,
        d_x,
        d_sum,
        partial_sums,
        d_y_stride,
        d_h_stride,
        h_stride,
        rows,
        columns,
        float(config.multiplier),
        GEMMA=config.rounding == "gemma",
        D_WEIGHT=gradient_dtypes.weight is not None,
        D_BIAS=gradient_dtypes.bias is not None,
        **tile,
    )
    d_weight = d_bias = None
    if vector_dtypes:
        vector_gradients = column_sum(partial_sums, vector_dtypes[0])
        if gradient_dtypes.weight is not None:
            d_weight = vector_gradients[:columns] if gradient_dtypes.bias else vector_gradients
        d_bias = vector_gradients[-columns:].to(gradient_dtypes.bias) if gradient_dtypes.bias else None
    d_residual = d_sum if gradient_dtypes.residual else None
    return d_sum if d_x is None else d_x, d_residual, d_weight, d_bias
