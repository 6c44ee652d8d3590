"""Rotary position embedding of queries and keys, alone or fused with the RMSNorm before it.

    rope            rotate(q), rotate(k)
    qk_norm_rope    rotate(rms_norm(q)), rotate(rms_norm(k))          Qwen 3, Gemma 3

The first R elements of a head (R = rotary_dim, by default all) are R/2 pairs (a, b), each rotated by an
angle of its token; the other elements stay unchanged:

    a' = a cos - b sin     b' = b cos + a sin          d_a = d_a' cos + d_b' sin     d_b = d_b' cos - d_a' sin

A pair is one element of each half (i and i + R/2, as in Llama) or two neighbours (2i and 2i + 1:
`interleaved`, as in Cohere and GLM). With `deinterleave`, neighbours are rotated and stored one in each half
(DeepSeek-V3). All computations are in fp32; the results are rounded once, to the
dtypes of q and k.

Queries and keys are `(B, heads, T, D)` with any strides: a view of `(B, T, heads * D)` is read without a
copy, and the kernels' results and gradients have the same memory order.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitless.kernels.operands import (
    all_triton,
    check_choice,
    check_device,
    check_floating,
    check_vector,
    on_device,
    widest_dtype,
)
from logitless.layers import recipes
from logitless.layers.norm import ROUNDINGS


class RopeConfig(NamedTuple):
    """Configuration of a rotation and of the norm before it: all arguments that are not tensors."""

    rotary_dim: int
    interleaved: bool
    normalized: bool = False
    eps: float = 0.0
    gemma: bool = False  # the norm multiplies by 1 + weight
    deinterleave: bool = False

    def layouts(self, inverse: bool) -> tuple[bool, bool]:
        """Return whether pairs are neighbours in the input and in the result of a rotation or its inverse."""
        layouts = self.interleaved, self.interleaved and not self.deinterleave
        return layouts[::-1] if inverse else layouts


def rope(
    q: Tensor,  # (B, heads, T, D)
    k: Tensor | None,  # (B, key heads, T, D)
    cos: Tensor,  # (B or 1, T, R) or (T, R)
    sin: Tensor,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    deinterleave: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding of queries and keys, out of place.

    Args:
        q: `(B, heads, T, D)`, of any strides.
        k: `(B, key heads, T, D)`, or None.
        cos: `(B, T, R)`, `(1, T, R)` or `(T, R)`, one for each rotated element, as the models' rotary
            embeddings return them; or of width R/2, one for each pair, if `rotary_dim` is passed.
        sin: of the shape of cos.
        rotary_dim: R, number of elements of a head that are rotated; None means the width of cos.
        interleaved: whether a pair is two neighbouring elements, rather than one element of each half.
        deinterleave: whether the results of a pair of neighbours are stored as one element of each half;
            requires `interleaved`, and a rotation of all D elements.

    Returns:
        Rotated q and k, in their dtypes. Differentiable once in both; in cos and sin too, by plain PyTorch.

    Raises:
        ValueError: an odd head size, or a shape or device that does not match.
        TypeError: an operand that is not a floating-point tensor.

    Reference: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
    """
    width = cos.shape[-1] if rotary_dim is None else rotary_dim
    config = RopeConfig(width, interleaved, deinterleave=deinterleave)
    return _rotate(q, k, cos, sin, None, None, config)


def qk_norm_rope(
    q: Tensor,  # (B, heads, T, D)
    k: Tensor | None,  # (B, key heads, T, D)
    cos: Tensor,  # (B or 1, T, R) or (T, R)
    sin: Tensor,
    q_weight: Tensor | None = None,  # (D,)
    k_weight: Tensor | None = None,  # (D,)
    *,
    eps: float = 1e-6,
    rounding: str = "llama",
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """RMSNorm of each head of queries and keys and their rotary position embedding, in one pass.

    Args:
        q: `(B, heads, T, D)`, before its norm.
        k: `(B, key heads, T, D)`, before its norm, or None.
        cos: as in `rope`.
        sin: of the shape of cos.
        q_weight: `(D,)` of q's norm, or None; its dtype may differ from q's.
        k_weight: `(D,)` of k's norm, or None; its dtype may differ from k's.
        eps: of both norms.
        rounding: of the norm, as in `rms_norm`. Nothing is rounded between norm and rotation, so
            it only determines whether the norm multiplies by 1 + weight ("gemma") or by weight (the others).
        rotary_dim: R, number of elements of a head that are rotated; None means the width of cos.
        interleaved: whether a pair is two neighbouring elements, rather than one element of each half.

    Returns:
        Normalized and rotated q and k, in their dtypes. Differentiable once in both and in the weights.
    """
    check_choice("rounding", rounding, ROUNDINGS)
    width = cos.shape[-1] if rotary_dim is None else rotary_dim
    return _rotate(
        q, k, cos, sin, q_weight, k_weight, RopeConfig(width, interleaved, True, eps, rounding == "gemma")
    )


def _check(q, k, cos, sin, q_weight, k_weight, config: RopeConfig) -> None:
    for name, x in (("q", q), ("k", k)):
        if x is not None and (x.dim() != 4 or x.shape[3] % 2 or x.shape[3] == 0):
            raise ValueError(
                f"{name}: expected shape (B, heads, T, D) with an even head size D, got {tuple(x.shape)}; "
                "pass queries or keys with the heads before the tokens."
            )
    B, _, T, D = q.shape
    if k is not None and (k.shape[0], k.shape[2], k.shape[3]) != (B, T, D):
        raise ValueError(
            f"k: expected shape ({B}, key heads, {T}, {D}), as q is {tuple(q.shape)}, got {tuple(k.shape)}; "
            "pass queries and keys of the same tokens."
        )
    R = config.rotary_dim
    if not 0 < R <= D or R % 2:
        raise ValueError(
            f"rotary_dim: expected an even number up to the head size {D}, got {R}; "
            "it is the number of elements of a head that are rotated, by default the width of cos."
        )
    if config.deinterleave and not (config.interleaved and R == D):
        raise ValueError(
            f"deinterleave: expected False unless interleaved=True and all {D} elements are rotated, "
            f"got True; pass interleaved=True and rotary_dim={D}, or leave deinterleave out."
        )
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape[-1] not in (R, R // 2):
            raise ValueError(
                f"{name}: expected {R} or {R // 2} columns for rotary_dim={R}, got {tuple(x.shape)}; "
                f"pass a {name} for each rotated element or for each pair."
            )
        if x.shape != cos.shape or tuple(x.shape[:-1]) not in ((T,), (1, T), (B, T)):
            raise ValueError(
                f"{name}: expected shape ({B}, {T}, {cos.shape[-1]}), or with 1 or nothing for {B}, "
                f"got {tuple(x.shape)}; pass the angles of q's {T} tokens."
            )
    check_vector(D, q_weight=q_weight, k_weight=k_weight)
    check_device(q.device, "q", k=k, cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight)


def _rotate(q, k, cos, sin, q_weight, k_weight, config: RopeConfig) -> tuple[Tensor, Tensor | None]:
    check_floating(q=q, cos=cos, sin=sin)
    check_floating(optional=True, k=k, q_weight=q_weight, k_weight=k_weight)
    _check(q, k, cos, sin, q_weight, k_weight, config)
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    ):
        # The compiler fuses plain PyTorch with neighbouring operators; kernels do not differentiate angles.
        return _forward_twin(q, k, cos, sin, q_weight, k_weight, config)
    return _Rope.apply(q, k, cos, sin, q_weight, k_weight, config)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, q_weight, k_weight, config):
        ctx.set_materialize_grads(False)
        # The backward pass of a rotation alone does not need q and k.
        ctx.save_for_backward(cos, sin, *((q, k) if config.normalized else (None, None)), q_weight, k_weight)
        ctx.config = config
        inputs = q, k, cos, sin, q_weight, k_weight
        results = _forward(config, *inputs)
        collector = recipes.current()
        # A rotation alone does not save q and k, so its outputs cannot be recomputed.
        if collector is not None and config.normalized:
            collector.add(ctx, results, functools.partial(_forward, config), inputs)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, d_q, d_k):
        cos, sin, q, k, q_weight, k_weight = ctx.saved_tensors
        if d_q is None and d_k is None:
            return (None,) * 7
        first, second = (d_k, d_q) if d_q is None else (d_q, d_k)
        runs_triton = all_triton(first, second, cos, sin, q, k, q_weight, k_weight)
        if runs_triton and not ctx.config.normalized:
            from logitless.layers import rope_triton

            d_q, d_k = rope_triton.backward(d_q, d_k, cos, sin, ctx.config)
            return d_q, d_k, None, None, None, None, None
        if runs_triton:
            from logitless.layers import qk_norm_rope_triton

            backward = qk_norm_rope_triton.backward
        else:
            backward = _backward_twin
        needs_weight_gradients = ctx.needs_input_grad[4], ctx.needs_input_grad[5]
        d_q, d_k, *d_weights = backward(
            d_q, d_k, cos, sin, q, k, q_weight, k_weight, ctx.config, needs_weight_gradients
        )
        return d_q, d_k, None, None, *d_weights, None


def _forward(config: RopeConfig, q, k, cos, sin, q_weight, k_weight) -> tuple[Tensor, Tensor | None]:
    if all_triton(q, k, cos, sin, q_weight, k_weight):
        from logitless.layers import rope_triton

        with on_device(q):
            return rope_triton.forward(q, k, cos, sin, q_weight, k_weight, config)
    return _forward_twin(q, k, cos, sin, q_weight, k_weight, config)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def _rotate_pairs(
    x: Tensor, cos: Tensor, sin: Tensor, config: RopeConfig, *, inverse: bool = False
) -> Tensor:
    """Rotate x (B, heads, T, D), in x's dtype; with `inverse`, rotate results back."""
    x_interleaved, out_interleaved = config.layouts(inverse)
    a, b = _pairs(x[..., : config.rotary_dim], x_interleaved)
    angles = []
    for table in (cos, sin):
        table = table.to(x.dtype).unsqueeze(-3)
        angles.append(
            _pairs(table, config.interleaved) if table.shape[-1] == config.rotary_dim else (table, table)
        )
    (cos_a, cos_b), (sin_a, sin_b) = angles
    if inverse:
        a, b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    rotated = torch.stack((a, b), -1).flatten(-2) if out_interleaved else torch.cat((a, b), -1)
    return torch.cat((rotated, x[..., config.rotary_dim :]), -1)


def _compute_dtype(x: Tensor, *others: Tensor | None) -> torch.dtype:
    return torch.promote_types(widest_dtype(x, *others), torch.float32)


def _forward_twin(q, k, cos, sin, q_weight, k_weight, config: RopeConfig):
    """Return rotated q and k. Differentiable by autograd."""
    results = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is None:
            results.append(None)
            continue
        z = x.to(_compute_dtype(x, weight))
        if config.normalized:
            z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + config.eps)
        if weight is not None:
            z = z * (weight.to(z.dtype) + 1 if config.gemma else weight)
        results.append(_rotate_pairs(z, cos, sin, config).to(x.dtype))
    return tuple(results)


def _backward_twin(
    d_q,
    d_k,
    cos,
    sin,
    q,
    k,
    q_weight,
    k_weight,
    config: RopeConfig,
    needs_weight_gradients: tuple[bool, bool],
):
    """Return the gradients of q, k and the weights; None if d_q or d_k is None, or a weight needs none."""
    gradients = []
    weight_gradients = []
    for d, x, weight, needs_weight_gradient in (
        (d_q, q, q_weight, needs_weight_gradients[0]),
        (d_k, k, k_weight, needs_weight_gradients[1]),
    ):
        d_weight = None
        if d is not None:
            dtype = d.dtype
            d = _rotate_pairs(d.to(_compute_dtype(d, x, weight)), cos, sin, config, inverse=True)
            if config.normalized:
                x = x.to(d.dtype)
                rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + config.eps)
                z = x * rstd
                d_weight = (d * z).sum((0, 1, 2)).to(weight.dtype) if needs_weight_gradient else None
                if weight is not None:
                    d = d * (weight.to(d.dtype) + 1 if config.gemma else weight)
                d = rstd * (d - z * (d * z).mean(-1, keepdim=True))
            d = d.to(dtype)
        gradients.append(d)
        weight_gradients.append(d_weight)
    return *gradients, *weight_gradients
