"""Triton kernels of `gated_norm.py`: each tensor is read or written once, and groups are kept in registers.

A program handles one group of columns of ROWS rows at a time, so it needs the weight of these columns only.
The backward pass starts a few programs per multiprocessor. Each loops over many rows and keeps its partial
sum of d_weight in registers; `norm_triton.column_sum` adds the partial sums in a fixed order.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import cached_launch
from logitless.kernels.operands import as_rows, cdiv, multiprocessors
from logitless.layers.norm_triton import choose_num_stages, column_sum, forward_tile


@triton.jit
def activate_gate(gate, SIGMOID: tl.constexpr):
    """Return act(gate) and act'(gate); the compiler removes the one that a kernel does not use."""
    s = tl.sigmoid(gate)
    if SIGMOID:
        act = s
        derivative = s * (1.0 - s)
    else:
        act = gate * s
        derivative = s * (1.0 + gate * (1.0 - s))
    return act, derivative


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,  # or None
    y_ptr,
    rstd_ptr,  # (rows, groups)
    x_stride,
    gate_stride,
    rows,
    groups,
    columns,  # of a group
    eps,
    ROUND: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,  # whether the product with the weight is rounded before that with the gate
    SIGMOID: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0) % groups
    row = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    is_column = col < columns
    mask = (row < rows) & is_column
    col += group * columns
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    h = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    act, _ = activate_gate(gate, SIGMOID)
    if GATE_FIRST:
        h *= act
    rstd = tl.rsqrt(tl.sum(h * h, 1, keep_dims=True) / columns + eps)
    tl.store(rstd_ptr + row * groups + group, rstd, mask=row < rows)
    y = h * rstd
    if ROUND:
        y = y.to(dtype).to(tl.float32)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + col, mask=is_column, other=0.0).to(tl.float32)
        if ROUND_PRODUCT:
            y = y.to(dtype).to(tl.float32)
    if not GATE_FIRST:
        y *= act
    tl.store(y_ptr + row * groups * columns + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def gated_norm_backward_kernel(
    d_y_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,  # or None
    rstd_ptr,  # (rows, groups)
    d_x_ptr,
    d_gate_ptr,
    partial_sums_ptr,  # (programs of a group, groups, columns) fp32, or None
    d_y_stride,
    x_stride,
    gate_stride,
    rows,
    groups,
    columns,  # of a group
    SIGMOID: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    group = tl.program_id(0) % groups
    program = tl.program_id(0) // groups
    lane = tl.arange(0, ROWS).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    is_column = col < columns
    col += group * columns
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=is_column, other=0.0).to(tl.float32)
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0) // groups, num_stages=STAGES):
        row = (block * ROWS + lane)[:, None]
        mask = (row < rows) & is_column
        rstd = tl.load(rstd_ptr + row * groups + group, mask=row < rows, other=0.0)
        # Where the mask is False g and x are 0, and so are all gradients.
        g = tl.load(d_y_ptr + row * d_y_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
        act, derivative = activate_gate(gate, SIGMOID)
        z = x * rstd
        if GATE_FIRST:
            z *= act
        else:
            d_gate = g * z * derivative
            if weight_ptr is not None:
                d_gate *= weight
            g *= act
        if partial_sums_ptr is not None:
            d_weight += g * z
        if weight_ptr is not None:
            g *= weight
        d = rstd * (g - z * (tl.sum(g * z, 1, keep_dims=True) / columns))
        if GATE_FIRST:
            d_gate = d * x * derivative
            d *= act
        out = row * groups * columns + col
        tl.store(d_x_ptr + out, d.to(d_x_ptr.dtype.element_ty), mask=mask)
        tl.store(d_gate_ptr + out, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    if partial_sums_ptr is not None:
        offset = program.to(tl.int64) * groups * columns + col
        tl.store(partial_sums_ptr + offset, tl.sum(d_weight, 0, keep_dims=True), mask=is_column)


@functools.cache
def backward_tile(columns: int, bytes_per_element: int) -> tuple[dict[str, int], int]:
    """Return (constants of a program, number of programs per multiprocessor).

    Args:
        columns: number of columns of a group.
        bytes_per_element: bytes that are loaded for each element of x.
    """
    block = triton.next_power_of_2(columns)
    rows = max(1, 1024 // block)
    # 16 elements per thread: six values of each are in registers.
    warps = max(2, rows * block // 512)
    programs = max(1, 16 // warps)
    num_stages = choose_num_stages(programs * bytes_per_element * rows * block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps, "STAGES": num_stages}, programs


def forward(x: Tensor, gate: Tensor, weight: Tensor | None, config) -> tuple[Tensor, Tensor]:
    """Return y, and 1 / root mean square of each group."""
    columns = config.group_size
    groups = x.shape[-1] // columns
    rows = x.numel() // x.shape[-1]
    x_rows, x_stride = as_rows(x)
    gate_rows, gate_stride = as_rows(gate)
    y = torch.empty_like(x, dtype=config.y_dtype(x, weight), memory_format=torch.contiguous_format)
    rstd = x.new_empty(rows * groups, dtype=torch.float32)
    is_rounded = config.rounding == "llama"
    tile = forward_tile(columns)
    gated_norm_kernel[(cdiv(rows, tile["ROWS"]) * groups,)](
        x_rows,
        gate_rows,
        None if weight is None else weight.contiguous(),
        y,
        rstd,
        x_stride,
        gate_stride,
        rows,
        groups,
        columns,
        float(config.eps),
        ROUND=is_rounded,
        ROUND_PRODUCT=is_rounded and not config.gate_first and weight is not None and weight.dtype == x.dtype,
        SIGMOID=config.activation == "sigmoid",
        GATE_FIRST=config.gate_first,
        **tile,
    )
    return y, rstd


def backward(
    d_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, rstd: Tensor, config, needs_d_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, gate and weight."""
    columns = config.group_size
    groups = x.shape[-1] // columns
    rows = x.numel() // x.shape[-1]
    d_y_rows, d_y_stride = as_rows(d_y)
    x_rows, x_stride = as_rows(x)
    gate_rows, gate_stride = as_rows(gate)
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    tile, programs = backward_tile(columns, sum(t.element_size() for t in (d_y, x, gate)))
    programs = cdiv(programs * multiprocessors(x.device), groups)
    programs = min(cdiv(rows, tile["ROWS"]), programs)
    partial_sums = x.new_empty((programs, groups, columns), dtype=torch.float32) if needs_d_weight else None
    gated_norm_backward_kernel[(programs * groups,)](
        d_y_rows,
        x_rows,
        gate_rows,
        None if weight is None else weight.contiguous(),
        rstd,
        d_x,
        d_gate,
        partial_sums,
        d_y_stride,
        x_stride,
        gate_stride,
        rows,
        groups,
        columns,
        SIGMOID=config.activation == "sigmoid",
        GATE_FIRST=config.gate_first,
        **tile,
    )
    return d_x, d_gate, column_sum(partial_sums, weight.dtype) if needs_d_weight else None
