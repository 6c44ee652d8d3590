"""Triton kernels of `rope.py`: a token's heads are read and written once, its angles once for all of
them.

A program takes all heads of a token, as tiles (heads, D/2) of the first and of the second numbers
of each pair. The columns that are not rotated (rotary_dim < D) form pairs too, with cos = 1 and sin = 0: so
the two tiles hold whole heads, and a norm needs no further tile. Neighbouring pairs are read as one
tile (heads, D) and taken apart in registers.

`rope_kernel` rotates, with NORM after normalizing, and with BACK it turns gradients back. The
backward pass with a norm is in `qk_norm_rope_triton.py`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import cached_launch


@triton.jit
def pair_columns(D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr):
    """Where the first and the second numbers of the pairs lie, for pairs of two halves."""
    i = tl.arange(0, HALF)[None, :]
    if R == D:
        return i, i + D // 2
    # Columns that are not rotated: the first half of them is paired with the second.
    rotated = i < R // 2
    return i + tl.where(rotated, 0, R // 2), i + tl.where(rotated, R // 2, D // 2)


@triton.jit
def load_pairs(
    ptr, row, mask, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """First and second numbers (rows, HALF) of each pair in fp32, from rows that begin at `row` (rows, 1)."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(ptr + row + both, mask=mask & (both < D), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(x, [row.shape[0], HALF, 2]))
    first, second = pair_columns(D, R, HALF)
    mask = mask & (tl.arange(0, HALF)[None, :] < D // 2)
    a = tl.load(ptr + row + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(ptr + row + second, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(
    ptr, row, mask, a, b, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    a = a.to(ptr.dtype.element_ty)
    b = b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF)[None, :]
        x = tl.reshape(tl.join(a, b), [row.shape[0], 2 * HALF])
        tl.store(ptr + row + both, x, mask=mask & (both < D))
    else:
        first, second = pair_columns(D, R, HALF)
        mask = mask & (tl.arange(0, HALF)[None, :] < D // 2)
        tl.store(ptr + row + first, a, mask=mask)
        tl.store(ptr + row + second, b, mask=mask)


@triton.jit
def load_angles(
    ptr, row, other, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PER_PAIR: tl.constexpr
):
    """cos or sin of a token for the two numbers of each pair, (1, HALF); `other` where nothing turns."""
    i = tl.arange(0, HALF)[None, :]
    if PER_PAIR:
        a = tl.load(ptr + row + i, mask=i < R // 2, other=other).to(tl.float32)
        return a, a
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(ptr + row + both, mask=both < R, other=other).to(tl.float32)
        return tl.split(tl.reshape(x, [1, HALF, 2]))
    a = tl.load(ptr + row + i, mask=i < R // 2, other=other).to(tl.float32)
    b = tl.load(ptr + row + R // 2 + i, mask=i < R // 2, other=other).to(tl.float32)
    return a, b


@triton.jit
def turn(
    a, b, cos_a, cos_b, sin_a, sin_b, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr
):
    if BACK:
        turned_a = a * cos_a + b * sin_b
        turned_b = b * cos_b - a * sin_a
    else:
        turned_a = a * cos_a - b * sin_a
        turned_b = b * cos_b + a * sin_b
    if R < D:
        # Not a * 1 - b * 0, which an infinite b would make NaN.
        rotated = tl.arange(0, HALF)[None, :] < R // 2
        turned_a = tl.where(rotated, turned_a, a)
        turned_b = tl.where(rotated, turned_b, b)
    return turned_a, turned_b


@triton.jit
def rotate_heads(
    x_ptr,
    out_ptr,
    weight_ptr,
    x_row,
    out_row,
    x_stride,
    out_stride,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    eps,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    GEMMA: tl.constexpr,
    BACK: tl.constexpr,
):
    """One token's COUNT heads of q or of k, HEADS at a time; with NORM normalized before."""
    if weight_ptr is not None:
        row = tl.zeros([1, 1], tl.int64)
        weight_a, weight_b = load_pairs(weight_ptr, row, row == 0, D, R, HALF, INTERLEAVED)
        if GEMMA:
            weight_a += 1.0
            weight_b += 1.0
    for start in tl.static_range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)[:, None].to(tl.int64)
        mask = head < COUNT
        a, b = load_pairs(x_ptr, x_row + head * x_stride, mask, D, R, HALF, INTERLEAVED)
        if NORM:
            rstd = tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / D + eps)
            a *= rstd
            b *= rstd
            if weight_ptr is not None:
                a *= weight_a
                b *= weight_b
        a, b = turn(a, b, cos_a, cos_b, sin_a, sin_b, D, R, HALF, BACK)
        store_pairs(out_ptr, out_row + head * out_stride, mask, a, b, D, R, HALF, INTERLEAVED)


@cached_launch
@triton.jit(do_not_specialize=["length"])
def rope_kernel(
    q_ptr,  # or None
    k_ptr,  # or None
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,  # or None
    k_weight_ptr,  # or None
    q_batch_stride,
    q_stride,
    q_token_stride,
    k_batch_stride,
    k_stride,
    k_token_stride,
    q_out_batch_stride,
    q_out_stride,
    q_out_token_stride,
    k_out_batch_stride,
    k_out_stride,
    k_out_token_stride,
    angle_batch_stride,
    angle_token_stride,
    length,  # T
    eps,
    Q_COUNT: tl.constexpr,
    K_COUNT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr,
    NORM: tl.constexpr,
    GEMMA: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0)
    batch = (token // length).to(tl.int64)
    position = (token % length).to(tl.int64)
    angle = batch * angle_batch_stride + position * angle_token_stride
    cos_a, cos_b = load_angles(cos_ptr, angle, 1.0, R, HALF, INTERLEAVED, PER_PAIR)
    sin_a, sin_b = load_angles(sin_ptr, angle, 0.0, R, HALF, INTERLEAVED, PER_PAIR)
    if q_ptr is not None:
        rotate_heads(
            q_ptr,
            q_out_ptr,
            q_weight_ptr,
            batch * q_batch_stride + position * q_token_stride,
            batch * q_out_batch_stride + position * q_out_token_stride,
            q_stride,
            q_out_stride,
            cos_a,
            cos_b,
            sin_a,
            sin_b,
            eps,
            Q_COUNT,
            Q_HEADS,
            D,
            R,
            HALF,
            INTERLEAVED,
            NORM,
            GEMMA,
            BACK,
        )
    if k_ptr is not None:
        rotate_heads(
            k_ptr,
            k_out_ptr,
            k_weight_ptr,
            batch * k_batch_stride + position * k_token_stride,
            batch * k_out_batch_stride + position * k_out_token_stride,
            k_stride,
            k_out_stride,
            cos_a,
            cos_b,
            sin_a,
            sin_b,
            eps,
            K_COUNT,
            K_HEADS,
            D,
            R,
            HALF,
            INTERLEAVED,
            NORM,
            GEMMA,
            BACK,
        )


# Numbers of q or of k that a program holds at most.
TILE = 4096


@functools.cache
def tile(q_count: int, k_count: int, D: int, config) -> dict[str, object]:
    """The arguments of a launch that are constant for a model, and the number of warps."""
    half = triton.next_power_of_2(D // 2)
    q_heads, k_heads = (
        min(triton.next_power_of_2(max(1, count)), max(1, TILE // (2 * half))) for count in (q_count, k_count)
    )
    return {
        "Q_COUNT": q_count,
        "K_COUNT": k_count,
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "D": D,
        "R": config.rotary_dim,
        "HALF": half,
        "INTERLEAVED": config.interleaved,
        "GEMMA": config.gemma,
        # More cost 5 to 25% on an H200. Not measured: interleaved angles.
        "num_warps": 4 if config.interleaved else 2,
    }


def seen(x: Tensor | None) -> tuple[Tensor | None, tuple[int, int, int]]:
    """A tensor in which each head lies in one piece, and its strides of batch, heads and tokens."""
    if x is None:
        return None, (0, 0, 0)
    if x.stride(3) != 1:
        x = x.contiguous()
    return x, x.stride()[:3]


def new(x: Tensor | None, by_token: bool = True) -> Tensor | None:
    """A tensor like x: in memory token by token, as the products around have it, or head by head."""
    if x is None:
        return None
    if by_token:
        return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def like(x: Tensor | None) -> Tensor | None:
    return None if x is None else new(x, x.stride(1) <= x.stride(2))


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """cos and sin with the strides of batch and tokens that they share."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (0 if cos.dim() == 2 or cos.shape[0] == 1 else cos.stride(0), cos.stride(-2))


def _launch(q, k, cos, sin, q_weight, k_weight, config, *, q_out, k_out, back: bool) -> None:
    shape = (k if q is None else q).shape
    (q, q_strides), (k, k_strides) = seen(q), seen(k)
    cos, sin, angle_strides = angles(cos, sin)
    rope_kernel[(shape[0] * shape[2],)](
        q,
        k,
        q_out,
        k_out,
        cos,
        sin,
        None if q_weight is None else q_weight.contiguous(),
        None if k_weight is None else k_weight.contiguous(),
        *q_strides,
        *k_strides,
        *seen(q_out)[1],
        *seen(k_out)[1],
        *angle_strides,
        shape[2],
        config.eps,
        PER_PAIR=cos.shape[-1] != config.rotary_dim,
        NORM=config.normalized,
        BACK=back,
        **tile(0 if q is None else shape[1], 0 if k is None else k.shape[1], shape[3], config),
    )


def forward(
    q: Tensor, k: Tensor | None, cos, sin, q_weight, k_weight, config
) -> tuple[Tensor, Tensor | None]:
    q_out, k_out = like(q), like(k)
    _launch(q, k, cos, sin, q_weight, k_weight, config, q_out=q_out, k_out=k_out, back=False)
    return q_out, k_out


def backward(d_q: Tensor | None, d_k: Tensor | None, cos, sin, config) -> tuple[Tensor | None, Tensor | None]:
    q_out, k_out = new(d_q), new(d_k)
    _launch(d_q, d_k, cos, sin, None, None, config, q_out=q_out, k_out=k_out, back=True)
    return q_out, k_out
