"""Triton kernels of `norm.py`: each tensor is read or written once, with its rows in registers in between.

Both are bound by memory traffic. A program handles ROWS whole rows at a time: several short rows, so that
enough loads are in flight, and with few warps, so that the sum over a row rarely crosses warps.

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
from logitless.kernels.operands import as_rows, multiprocessors, widest_dtype


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x_ptr,
    residual_ptr,  # or None
    weight_ptr,  # or None
    bias_ptr,  # or None
    h_ptr,  # written where a residual is added before; else None
    y_ptr,
    mean_ptr,  # written by LayerNorm; else None
    rstd_ptr,  # written, as is the mean; with KNOWN both are read
    x_stride,
    residual_stride,
    rows,
    columns,
    multiplier,
    eps,
    ROUND: tl.constexpr,
    GEMMA: tl.constexpr,
    KNOWN: tl.constexpr,
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
        if KNOWN:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        else:
            mean = tl.sum(h, 1, keep_dims=True) / columns
            tl.store(mean_ptr + row, mean, mask=row < rows)
        h = tl.where(mask, h - mean, 0.0)
    if KNOWN:
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
    """The factor of a normalized value: the weight, or 1 + weight in Gemma's norms."""
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
    d_x_ptr,  # or None, where d_sum serves x as well
    d_sum_ptr,  # gradient of h: the residual's, or x's where nothing was added or both are the same
    shares_ptr,  # (programs, D_WEIGHT + D_BIAS, columns) fp32, or None
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
    CUT: tl.constexpr,  # whether BLOCK is more than `columns`
    REST: tl.constexpr,  # 0, or at least as many as there are columns behind BLOCK
    HOLD: tl.constexpr,  # whether registers hold the weight
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
        if weight_ptr is not None and HOLD:
            weights = weights + (norm_factor(weight_ptr, col, columns, GEMMA),)
        none = tl.zeros([ROWS, col.shape[1]], tl.float32)
        d_weights, d_biases = d_weights + (none,), d_biases + (none,)
    for block in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        each = block * ROWS + lane
        row = each[:, None]
        rstd = tl.load(rstd_ptr + each, mask=each < rows, other=0.0)[:, None]
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + each, mask=each < rows, other=0.0)[:, None]
        masks = ((row < rows) & (cols[0] < columns) if CUT else row < rows,)
        if REST > 0:
            masks = masks + ((row < rows) & (cols[1] < columns),)
        along, total = 0.0, 0.0
        gs, zs, d_weights_now, d_biases_now = (), (), (), ()
        for part in tl.static_range(len(cols)):
            col, mask = cols[part], masks[part]
            # Beyond the mask g is 0, so that whatever z holds there counts nothing.
            g = tl.load(d_y_ptr + row * d_y_stride + col, mask=mask, other=0.0).to(tl.float32)
            z = tl.load(h_ptr + row * h_stride + col, mask=mask, other=0.0).to(tl.float32)
            if mean_ptr is not None:
                z -= mean
            z *= rstd
            d_weights_now = d_weights_now + (d_weights[part] + g * z if D_WEIGHT else d_weights[part],)
            d_biases_now = d_biases_now + (d_biases[part] + g if D_BIAS else d_biases[part],)
            if weight_ptr is not None:
                g *= weights[part] if HOLD else norm_factor(weight_ptr, col, columns, GEMMA)
            along += tl.sum(g * z, 1, keep_dims=True)
            if mean_ptr is not None:
                total += tl.sum(g, 1, keep_dims=True)
            gs, zs = gs + (g,), zs + (z,)
        d_weights, d_biases = d_weights_now, d_biases_now
        along, total = along / columns, total / columns
        for part in tl.static_range(len(cols)):
            col, mask = cols[part], masks[part]
            d = gs[part] - zs[part] * along
            if mean_ptr is not None:
                d -= total
            d *= rstd
            if d_h_ptr is not None:
                d += tl.load(d_h_ptr + row * d_h_stride + col, mask=mask, other=0.0).to(tl.float32)
            tl.store(d_sum_ptr + row * columns + col, d.to(d_sum_ptr.dtype.element_ty), mask=mask)
            if d_x_ptr is not None:
                d_x = (multiplier * d).to(d_x_ptr.dtype.element_ty)
                tl.store(d_x_ptr + row * columns + col, d_x, mask=mask)
    for part in tl.static_range(len(cols)):
        col = cols[part]
        share = program.to(tl.int64) * (D_WEIGHT + D_BIAS) * columns + col
        if D_WEIGHT:
            tl.store(shares_ptr + share, tl.sum(d_weights[part], 0, keep_dims=True), mask=col < columns)
        if D_BIAS:
            at = shares_ptr + share + D_WEIGHT * columns
            tl.store(at, tl.sum(d_biases[part], 0, keep_dims=True), mask=col < columns)


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


# Narrow blocks make many programs, tall ones few turns: 1,000 shares of 1,024 columns, 64 programs, 4 turns.
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 256, 16, 8


def column_sum(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of fp32 `shares` (programs, ...) over the programs, in a fixed order, flat and in `dtype`."""
    programs = shares.shape[0]
    columns = shares.numel() // programs
    out = shares.new_empty(columns, dtype=dtype)
    column_sum_kernel[(triton.cdiv(columns, SUM_COLUMNS),)](
        shares, out, programs, columns, ROWS=SUM_ROWS, BLOCK=SUM_COLUMNS, num_warps=SUM_WARPS
    )
    return out


@functools.cache
def forward_tile(columns: int) -> dict[str, int]:
    """Rows and columns of a program, and its warps: 32 numbers a thread, up to 1,024 columns in one warp."""
    block = triton.next_power_of_2(columns)
    return {"ROWS": max(1, 1024 // block), "BLOCK": block, "num_warps": min(max(1, block // 1024), 16)}


# Bytes that are loaded ahead at most: every CUDA device since Ampere has so much shared memory for them.
AHEAD = 96 * 1024


def stages(loaded: int, most: int = 3) -> int:
    """Of a loop that loads so many bytes a turn: up to `most` - 1 turns ahead."""
    return next((n for n in range(most, 1, -1) if (n - 1) * loaded <= AHEAD), 1)


def parts(columns: int) -> tuple[int, int]:
    """Two blocks, powers of two, that together cover the columns; the second is 0 where one block does.

    One block for 2,304 columns would have 4,096, nearly half of them masked. Up to 1,024 columns take one
    block, because two would cost more.
    """
    if columns <= 1024:
        return triton.next_power_of_2(columns), 0
    block = 1 << columns.bit_length() - 1
    return block, triton.next_power_of_2(columns - block) if columns > block else 0


@functools.cache
def backward_tile(columns: int, loaded: int) -> tuple[dict[str, int], int]:
    """Rows, columns, warps and stages of a program, and how many a multiprocessor has.

    `loaded` bytes come in for each number of h. With three turns ahead a few programs saturate the memory;
    where registers are scarce, two programs do without, and without the weight in registers.
    """
    block, rest = parts(columns)
    width = block + rest
    hold = columns <= 8192
    # At most 40 numbers a thread.
    warps = max(4, triton.next_power_of_2(triton.cdiv(width, 1280)))
    rows = 1
    programs = max(1, 4096 // block)
    most = 4
    if width <= 512:
        rows = 1024 // triton.next_power_of_2(width)
        warps = 1
        programs = 8
        most = 3
    elif width <= 1280:
        rows, programs, most = 2, 3, 3
    elif not hold:
        warps = max(16, warps)
        programs = 2
        most = 1
    if rest:  # loads ahead have at least four bytes a thread
        rest = max(rest, 64 * warps // rows)
    ahead = stages(programs * loaded * rows * (block + rest), most)
    tile = {"ROWS": rows, "BLOCK": block, "CUT": block > columns, "REST": rest, "HOLD": hold}
    return tile | {"num_warps": warps, "STAGES": ahead}, programs


def _new(x: Tensor, dtype: torch.dtype) -> Tensor:
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
    """y, h, and the mean (None without centring) and 1 / root mean square of each row.

    With `rstd`, and `mean` where the norm has one, these are read in the place of being computed.
    """
    columns = x.shape[-1]
    rows = x.numel() // columns
    x_rows, x_stride = as_rows(x)
    residual_rows, residual_stride = (None, 0) if residual is None else as_rows(residual)
    h = x
    h_out = None
    if config.added == "before":
        h = h_out = _new(x, widest_dtype(x, residual))
    y = _new(x, config.y_dtype(x, residual, weight))
    known = rstd is not None
    if not known:
        rstd = x.new_empty(rows, dtype=torch.float32)
        mean = torch.empty_like(rstd) if config.center else None
    tile = forward_tile(columns)
    norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
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
        KNOWN=known,
        **tile,
    )
    return y, h, mean, rstd


def backward(
    d_y: Tensor, d_h: Tensor | None, h: Tensor, weight: Tensor | None, mean, rstd: Tensor, config, wanted
):
    """Gradients of x, residual, weight and bias; the first two are one tensor where they are equal."""
    columns = h.shape[-1]
    rows = h.numel() // columns
    (d_y_rows, d_y_stride), (h_rows, h_stride) = as_rows(d_y), as_rows(h)
    d_h_rows, d_h_stride = (None, 0) if d_h is None else as_rows(d_h)
    d_sum = _new(h, wanted.residual or wanted.x)
    d_x = None
    if d_sum.dtype != wanted.x or config.multiplier != 1.0:
        d_x = _new(h, wanted.x)
    loaded = sum(0 if x is None else x.element_size() for x in (d_y, d_h, h))
    tile, programs = backward_tile(columns, loaded)
    programs = min(triton.cdiv(rows, tile["ROWS"]), programs * multiprocessors(h.device))
    vectors = [dtype for dtype in (wanted.weight, wanted.bias) if dtype]
    shares = h.new_empty((programs, len(vectors), columns), dtype=torch.float32) if vectors else None
    norm_backward_kernel[(programs,)](
        d_y_rows,
        d_h_rows,
        h_rows,
        None if weight is None else weight.contiguous(),
        mean,
        rstd,
        d_x,
        d_sum,
        shares,
        d_y_stride,
        d_h_stride,
        h_stride,
        rows,
        columns,
        float(config.multiplier),
        GEMMA=config.rounding == "gemma",
        D_WEIGHT=wanted.weight is not None,
        D_BIAS=wanted.bias is not None,
        **tile,
    )
    d_weight = d_bias = None
    if vectors:
        summed = column_sum(shares, vectors[0])
        if wanted.weight is not None:
            d_weight = summed[:columns] if wanted.bias else summed
        d_bias = summed[-columns:].to(wanted.bias) if wanted.bias else None
    return d_sum if d_x is None else d_x, d_sum if wanted.residual else None, d_weight, d_bias
