"""Triton kernels of `rope.py`: a token's heads are read and written once, its angles once for all heads.

A program handles all heads of a token, as two tiles (heads, D/2): the first and the second elements of each
pair. The columns that are not rotated (rotary_dim < D) form pairs too, with cos = 1 and sin = 0, so that the
two tiles hold whole heads and a norm needs no other tile. Interleaved pairs are read as one tile (heads, D)
and split in registers.

`rope_kernel` rotates; with NORM it normalizes first, and with INVERSE it rotates gradients back. The backward
pass with a norm is in `qk_norm_rope_triton.py`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import cached_launch


@triton.jit
def pair_columns(D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr):
    """Return the columns of the first and the second elements of all pairs (i, i + R / 2).

    If R < D, the first half of the columns that are not rotated is paired with the second half.
    """
    i = tl.arange(0, HALF)[None, :]
    if R == D:
        return i, i + D // 2
    # Columns that are not rotated: the first half of them is paired with the second.
    is_rotated = i < R // 2
    return i + tl.where(is_rotated, 0, R // 2), i + tl.where(is_rotated, R // 2, D // 2)


@triton.jit
def load_pairs(
    ptr, row, mask, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load the first and second elements (rows, HALF) of the pairs in fp32; `row` (rows, 1) are offsets."""
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
    """Load a token's cos or sin for both elements of each pair, (1, HALF); `other` for unrotated pairs."""
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
def rotate_pairs(
    a,
    b,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
):
    if INVERSE:
        rotated_a = a * cos_a + b * sin_b
        rotated_b = b * cos_b - a * sin_a
    else:
        rotated_a = a * cos_a - b * sin_a
        rotated_b = b * cos_b + a * sin_b
    if R < D:
        # Not a * 1 - b * 0, which an infinite b would make NaN.
        is_rotated = tl.arange(0, HALF)[None, :] < R // 2
        rotated_a = tl.where(is_rotated, rotated_a, a)
        rotated_b = tl.where(is_rotated, rotated_b, b)
    return rotated_a, rotated_b


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
    X_INTERLEAVED: tl.constexpr,
    OUT_INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    GEMMA: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Rotate one token's COUNT heads of q or of k, HEADS at a time; with NORM normalize them first."""
    if weight_ptr is not None:
        row = tl.zeros([1, 1], tl.int64)
        weight_a, weight_b = load_pairs(weight_ptr, row, row == 0, D, R, HALF, X_INTERLEAVED)
        if GEMMA:
            weight_a += 1.0
            weight_b += 1.0
    for start in tl.static_range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)[:, None].to(tl.int64)
        mask = head < COUNT
        a, b = load_pairs(x_ptr, x_row + head * x_stride, mask, D, R, HALF, X_INTERLEAVED)
        if NORM:
            rstd = tl.rsqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / D + eps)
            a *= rstd
            b *= rstd
            if weight_ptr is not None:
                a *= weight_a
                b *= weight_b
        a, b = rotate_pairs(a, b, cos_a, cos_b, sin_a, sin_b, D, R, HALF, INVERSE)
        store_pairs(out_ptr, out_row + head * out_stride, mask, a, b, D, R, HALF, OUT_INTERLEAVED)


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
    INTERLEAVED: tl.constexpr,  # of angles
    X_INTERLEAVED: tl.constexpr,
    OUT_INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr,
    NORM: tl.constexpr,
    GEMMA: tl.constexpr,
    INVERSE: tl.constexpr,
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
            X_INTERLEAVED,
            OUT_INTERLEAVED,
            NORM,
            GEMMA,
            INVERSE,
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
            X_INTERLEAVED,
            OUT_INTERLEAVED,
            NORM,
            GEMMA,
            INVERSE,
        )


# Most elements of q or of k that a program holds at a time.
MAX_TILE_ELEMENTS = 4096


@functools.cache
def launch_constants(q_count: int, k_count: int, D: int, config) -> dict[str, object]:
    """Return the arguments of a launch that are constant for a model, and the number of warps."""
    half = triton.next_power_of_2(D // 2)
    max_heads = max(1, MAX_TILE_ELEMENTS // (2 * half))
    q_heads = min(triton.next_power_of_2(max(1, q_count)), max_heads)
    k_heads = min(triton.next_power_of_2(max(1, k_count)), max_heads)
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


def with_strides(x: Tensor | None) -> tuple[Tensor | None, tuple[int, int, int]]:
    """Return x, copied unless each head is contiguous, and its strides of batch, heads and tokens."""
    if x is None:
        return None, (0, 0, 0)
    if x.stride(3) != 1:
        x = x.contiguous()
    return x, x.stride()[:3]


def empty_heads(x: Tensor | None, is_token_major: bool = True) -> Tensor | None:
    """Return an empty tensor like x: token by token in memory, as the products need it, or head by head."""
    if x is None:
        return None
    if is_token_major:
        return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_with_layout(x: Tensor | None) -> Tensor | None:
    """Return an empty tensor with the memory order of x."""
    return None if x is None else empty_heads(x, x.stride(1) <= x.stride(2))


def with_angle_strides(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return (cos, sin, (batch stride, token stride)).

    cos and sin are made contiguous if their strides differ or their last dimension is not contiguous. The
    batch stride is 0 if all sequences share the angles.
    """
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos = cos.contiguous()
        sin = sin.contiguous()
    batch_stride = 0 if cos.dim() == 2 or cos.shape[0] == 1 else cos.stride(0)
    return cos, sin, (batch_stride, cos.stride(-2))


def _launch(q, k, cos, sin, q_weight, k_weight, config, *, q_out, k_out, inverse: bool) -> None:
    shape = (k if q is None else q).shape
    q, q_strides = with_strides(q)
    k, k_strides = with_strides(k)
    cos, sin, angle_strides = with_angle_strides(cos, sin)
    x_interleaved, out_interleaved = config.layouts(inverse)
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
        *with_strides(q_out)[1],
        *with_strides(k_out)[1],
        *angle_strides,
        shape[2],
        config.eps,
        X_INTERLEAVED=x_interleaved,
        OUT_INTERLEAVED=out_interleaved,
        PER_PAIR=cos.shape[-1] != config.rotary_dim,
        NORM=config.normalized,
        INVERSE=inverse,
        **launch_constants(0 if q is None else shape[1], 0 if k is None else k.shape[1], shape[3], config),
    )


def forward(
    q: Tensor, k: Tensor | None, cos, sin, q_weight, k_weight, config
) -> tuple[Tensor, Tensor | None]:
    q_out = empty_with_layout(q)
    k_out = empty_with_layout(k)
    _launch(q, k, cos, sin, q_weight, k_weight, config, q_out=q_out, k_out=k_out, inverse=False)
    return q_out, k_out


def backward(d_q: Tensor | None, d_k: Tensor | None, cos, sin, config) -> tuple[Tensor | None, Tensor | None]:
    q_out = empty_heads(d_q)
    k_out = empty_heads(d_k)
    _launch(d_q, d_k, cos, sin, None, None, config, q_out=q_out, k_out=k_out, inverse=True)
    return q_out, k_out
