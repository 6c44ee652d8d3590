"""The gate of an MLP: `act(a) * b`, with a the gate projection and b the up projection.

    silu         act(a) = a sigmoid(a)                                             SwiGLU
    gelu_tanh    act(a) = a/2 (1 + tanh(u)),  u = sqrt(2/pi) (a + 0.044715 a^3)    GeGLU
    gelu_erf     act(a) = a/2 (1 + erf(a / sqrt(2)))                               GeGLU

    d_a = d_out b act'(a)        d_b = d_out act(a)

act(a) is computed in fp32 and rounded to a's dtype before the multiplication, as in a model's two steps. Only
a and b are saved; act is recomputed in the backward pass.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from logitless.kernels.operands import all_triton, check_choice, check_device, check_floating, on_device
from logitless.layers import recipes

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
}


def gated(
    a: Tensor,  # (..., I), or (..., 2I) without b
    b: Tensor | None = None,  # (..., I)
    *,
    activation: str = "silu",
) -> Tensor:
    """Gated activation `act(a) * b`: SwiGLU or GeGLU without the matrix products.

    Args:
        a: the gate projection `(..., I)`; without b, both projections concatenated, the gate first.
        b: the up projection `(..., I)`, or None.
        activation: "silu", "gelu_tanh" or "gelu_erf" (torch's default gelu).

    Returns:
        `(..., I)` in the wider dtype of a and b. Differentiable once in both.

    Raises:
        ValueError: an unknown activation, or shapes or devices that do not match.
        TypeError: an operand that is not a floating-point tensor.

    Reference: Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202.
    """
    _check(a, b, activation)
    if torch.compiler.is_compiling():
        # The compiler fuses plain PyTorch with neighbouring operators; an opaque operator would prevent that.
        return _forward_twin(*_halves(a, b), activation)
    return _Gated.apply(a, b, activation)


def _check(a: Tensor, b: Tensor | None, activation: str) -> None:
    check_choice("activation", activation, ACTIVATIONS)
    check_floating(a=a)
    check_floating(optional=True, b=b)
    if a.dim() == 0:
        raise ValueError("a: expected shape (..., I), got (); pass the gate projection.")
    if b is None:
        if a.shape[-1] % 2:
            raise ValueError(
                f"a: expected an even last dimension without b, got {tuple(a.shape)}; "
                "pass both projections concatenated, or the up projection as b."
            )
        return
    if a.shape != b.shape:
        raise ValueError(
            f"b: expected a's shape {tuple(a.shape)}, got {tuple(b.shape)}; pass projections of one input."
        )
    check_device(a.device, "a", b=b)


def _halves(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    return (a, b) if b is not None else a.chunk(2, -1)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, activation):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        ctx.activation = activation
        out = _forward(activation, a, b)
        collector = recipes.current()
        if collector is not None:
            collector.add(ctx, (out,), lambda a, b: (_forward(activation, a, b),), (a, b))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        if d_out is None:
            return None, None, None
        a, b = ctx.saved_tensors
        if all_triton(a, b, d_out):
            from logitless.layers import gated_triton

            backward = gated_triton.backward
        else:
            backward = _backward_twin
        if b is not None:
            return *backward(d_out, a, b, ctx.activation, None), None
        packed = torch.empty_like(a, memory_format=torch.contiguous_format)
        backward(d_out, *_halves(a, None), ctx.activation, packed.chunk(2, -1))
        return packed, None, None


def _forward(activation: str, a: Tensor, b: Tensor | None) -> Tensor:
    if all_triton(a, b):
        from logitless.layers import gated_triton

        with on_device(a):
            return gated_triton.forward(*_halves(a, b), activation)
    return _forward_twin(*_halves(a, b), activation)


def _forward_twin(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """The PyTorch forward pass, which autograd differentiates under torch.compile."""
    return ACTIVATIONS[activation](a) * b


def _activation_derivative(a: Tensor, activation: str) -> Tensor:
    """Return act'(a)."""
    if activation == "silu":
        s = torch.sigmoid(a)
        return s * (1 + a * (1 - s))
    if activation == "gelu_tanh":
        c = math.sqrt(2 / math.pi)
        s = torch.sigmoid(2 * c * (a + 0.044715 * a**3))
        return s + a * s * (1 - s) * 2 * c * (1 + 3 * 0.044715 * a * a)
    density = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(a / math.sqrt(2))) + a * density


def _backward_twin(d_out, a, b, activation, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return d_a and d_b, written to `out` unless it is None."""
    compute_dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    g = d_out.to(compute_dtype)
    d_a = g * b.to(compute_dtype) * _activation_derivative(a.to(compute_dtype), activation)
    d_b = g * ACTIVATIONS[activation](a).to(compute_dtype)
    if out is None:
        return d_a.to(a.dtype), d_b.to(b.dtype)
    out[0].copy_(d_a)
    out[1].copy_(d_b)
    return out
