"""The clamped SwiGLU of experts, of gate a and up b in one tensor (gpt-oss, DeepSeek-V4, MiniMax-M3).

    g = min(a, limit)    u = clamp(b, -limit, limit)    s = sigmoid(alpha g)    out = (u + offset) g s

    d_a = d_out (u + offset) s (1 + alpha g (1 - s))  where a <= limit, else 0
    d_b = d_out g s                                   where |b| <= limit, else 0

All of it is computed in fp32 and rounded once. Only the input is saved.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logitless.kernels.operands import all_triton, check_floating, on_device
from logitless.layers import recipes


class ClampedGate(NamedTuple):
    """The options of `clamped_gated`."""

    limit: float
    alpha: float = 1.0
    offset: float = 0.0
    interleaved: bool = False


def clamped_gated(
    x: Tensor,  # (..., 2I)
    *,
    limit: float,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Clamped SwiGLU `(u + offset) g sigmoid(alpha g)`: g = min(a, limit), u = clamp(b, -limit, limit).

    Args:
        x: gate a and up b `(..., 2I)`: its halves, or its even and odd columns.
        limit: the largest gate, and the largest absolute value of up.
        alpha: factor of the gate in the sigmoid: 1 for SiLU, 1.702 in gpt-oss.
        offset: added to up after it is clamped: 1 in gpt-oss.
        interleaved: whether a and b are the even and odd columns, rather than the halves.

    Returns:
        `(..., I)` in x's dtype. Differentiable once.

    Raises:
        ValueError: the last dimension is odd, or the limit is not above 0.
        TypeError: x is not a floating-point tensor.

    Reference: OpenAI, gpt-oss-120b and gpt-oss-20b Model Card, https://arxiv.org/abs/2508.10925.
    """
    check_floating(x=x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"x: expected an even last dimension, got shape {tuple(x.shape)}; pass gate and up in one tensor."
        )
    if not limit > 0:
        raise ValueError(f"limit: expected a number above 0, got {limit}; pass the model's swiglu_limit.")
    gate = ClampedGate(float(limit), float(alpha), float(offset), interleaved)
    if torch.compiler.is_compiling():
        return _forward_twin(x, gate)
    return _ClampedGated.apply(x, gate)


class _ClampedGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.gate = gate
        out = _forward(gate, x)
        collector = recipes.current()
        if collector is not None:
            collector.add(ctx, (out,), lambda x: (_forward(gate, x),), (x,))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        if d_out is None:
            return None, None
        (x,) = ctx.saved_tensors
        if all_triton(x, d_out):
            from logitless.layers import clamped_gate_triton

            return clamped_gate_triton.backward(d_out, x, ctx.gate.interleaved, *ctx.gate[:3]), None
        return _backward_twin(d_out, x, ctx.gate), None


def _forward(gate: ClampedGate, x: Tensor) -> Tensor:
    if all_triton(x):
        from logitless.layers import clamped_gate_triton

        with on_device(x):
            return clamped_gate_triton.forward(x, gate.interleaved, *gate[:3])
    return _forward_twin(x, gate)


def _split(x: Tensor, gate: ClampedGate) -> tuple[Tensor, Tensor]:
    """Return gate a and up b, views of x."""
    return (x[..., ::2], x[..., 1::2]) if gate.interleaved else x.chunk(2, -1)


def _forward_twin(x: Tensor, gate: ClampedGate) -> Tensor:
    a, b = _split(x.to(torch.promote_types(x.dtype, torch.float32)), gate)
    g = a.clamp(max=gate.limit)
    u = b.clamp(-gate.limit, gate.limit)
    return ((u + gate.offset) * (g * torch.sigmoid(gate.alpha * g))).to(x.dtype)


def _backward_twin(d_out: Tensor, x: Tensor, gate: ClampedGate) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = _split(x.to(wide), gate)
    d_out = d_out.to(wide)
    g = a.clamp(max=gate.limit)
    u = b.clamp(-gate.limit, gate.limit)
    s = torch.sigmoid(gate.alpha * g)
    d_a = d_out * (u + gate.offset) * (s + gate.alpha * g * s * (1 - s))
    d_b = d_out * (g * s)
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, d, inside in zip(_split(d_x, gate), (d_a, d_b), (a <= gate.limit, b.abs() <= gate.limit)):
        part.copy_(torch.where(inside, d, 0))
    return d_x
