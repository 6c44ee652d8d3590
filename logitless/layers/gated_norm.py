"""RMSNorm with a gate, as in linear attention and state-space mixers.

    y = n(x) act(gate)        norm, then gate: Qwen 3.5, Qwen3-Next, OLMo Hybrid, Kimi Linear
    y = n(x act(gate))        gate, then norm (`gate_first`): Mamba 2, Bamba, Nemotron-H, Zamba 2

with n(h) = h / sqrt(mean(h^2) + eps) * weight, and act(a) = a sigmoid(a) ("silu") or sigmoid(a). With
`group_size`, the mean is taken over each group of adjacent columns.

With z the normalized group, s = 1 / sqrt(mean(h^2) + eps), and g = d_y act(gate), with `gate_first` g = d_y:

    d_weight = sum over rows of g z        d_h = s (g weight - z mean(g weight z))
    norm, then gate:   d_x = d_h                d_gate = d_y z weight act'(gate)
    gate, then norm:   d_x = d_h act(gate)      d_gate = d_h x act'(gate)

All computations are in fp32 (fp64 for fp64 operands). The results are rounded where the models round:

    llama    z to x's dtype, and its product with weight to the wider dtype of the two. The result has that
             dtype with `gate_first`; otherwise the product with act(gate) is rounded once more, to x's dtype
    single   once, to x's dtype

x, gate, weight and one number for each group of a row are saved for the backward pass.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from logitless.errors import value_error
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

ROUNDINGS = ("llama", "single")
ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
# A group is held in the registers of one program. Wider groups run the twin, on any device.
MAX_COLUMNS = 8192


class GatedNormConfig(NamedTuple):
    """Configuration of a gated norm: all arguments that are not tensors."""

    eps: float
    rounding: str
    activation: str
    gate_first: bool
    group_size: int

    def y_dtype(self, x: Tensor, weight: Tensor | None) -> torch.dtype:
        return widest_dtype(x, weight) if self.gate_first and self.rounding == "llama" else x.dtype


def gated_rms_norm(
    x: Tensor,  # (..., H)
    gate: Tensor,  # (..., H)
    weight: Tensor | None = None,  # (H,)
    *,
    eps: float = 1e-6,
    rounding: str = "llama",
    activation: str = "silu",
    gate_first: bool = False,
    group_size: int | None = None,
) -> Tensor:
    """RMSNorm of the last dimension and a gate: `rms_norm(x) * act(gate)`, or `rms_norm(x * act(gate))`.

    Args:
        x: `(..., H)`, any floating-point dtype.
        gate: `(..., H)`, before its activation; its dtype may differ from x's.
        weight: `(H,)` or None; its dtype may differ from x's.
        eps: added to the mean square.
        rounding: "llama" (round the normalized tensor, its product with weight, and the result) or "single"
            (round once).
        activation: "silu" or "sigmoid", of the gate.
        gate_first: whether x is multiplied by the gate before it is normalized (Mamba 2).
        group_size: number of columns of a group, each of which is normalized by itself; None means H.

    Returns:
        `(..., H)` in x's dtype; with `gate_first` and "llama", in the wider dtype of x and weight.
        Differentiable once in x, gate and weight.

    Raises:
        ValueError: an unknown rounding or activation, or a shape or device that does not match.
        TypeError: an operand that is not a floating-point tensor.

    Reference: Dao and Gu, Transformers are SSMs, https://arxiv.org/abs/2405.21060 (the block of Mamba 2).
    """
    check_choice("rounding", rounding, ROUNDINGS)
    check_choice("activation", activation, ACTIVATIONS)
    check_floating(x=x, gate=gate)
    check_floating(optional=True, weight=weight)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise value_error("x", "shape (..., H), H at least 1", tuple(x.shape), "pass hidden states")
    if gate.shape != x.shape:
        expected = f"x's shape {tuple(x.shape)}"
        raise value_error("gate", expected, tuple(gate.shape), "pass the gate of x")
    size = x.shape[-1] if group_size is None else group_size
    if size < 1 or x.shape[-1] % size:
        expected = f"a divisor of the {x.shape[-1]} columns"
        raise value_error("group_size", expected, size, "pass the number of columns of a group")
    check_vector(x.shape[-1], weight=weight)
    check_device(x.device, "x", gate=gate, weight=weight)
    config = GatedNormConfig(eps, rounding, activation, gate_first, size)
    if torch.compiler.is_compiling():
        # The compiler fuses plain PyTorch with neighbouring operators; an opaque operator would prevent that.
        return _forward_twin(x, gate, weight, config)[0]
    return _GatedNorm.apply(x, gate, weight, config)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, config):
        ctx.set_materialize_grads(False)
        y, rstd = _forward(config, x, gate, weight)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.config = config
        collector = recipes.current()
        if collector is not None:
            collector.add(ctx, (y,), functools.partial(_recompute, config), (x, gate, weight))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y):
        if d_y is None:
            return None, None, None, None
        x, gate, weight, rstd = ctx.saved_tensors
        if _runs_triton(ctx.config, x, gate, weight, d_y):
            from logitless.layers import gated_norm_triton

            backward = gated_norm_triton.backward
        else:
            backward = _backward_twin
        return *backward(d_y, x, gate, weight, rstd, ctx.config, ctx.needs_input_grad[2]), None


def _runs_triton(config: GatedNormConfig, x: Tensor, *others: Tensor | None) -> bool:
    return config.group_size <= MAX_COLUMNS and all_triton(x, *others)


def _forward(
    config: GatedNormConfig, x: Tensor, gate: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    if _runs_triton(config, x, gate, weight):
        from logitless.layers import gated_norm_triton

        with on_device(x):
            return gated_norm_triton.forward(x, gate, weight, config)
    return _forward_twin(x, gate, weight, config)


def _recompute(config: GatedNormConfig, x: Tensor, gate: Tensor, weight: Tensor | None) -> tuple[Tensor]:
    return (_forward(config, x, gate, weight)[0],)


def _groups(x: Tensor, config: GatedNormConfig) -> Tensor:
    """Return x as (..., groups, group_size)."""
    # torch 2.11's Dynamo cannot trace `unflatten` where a default device is set.
    return x.reshape(*x.shape[:-1], x.shape[-1] // config.group_size, config.group_size)


def _forward_twin(x, gate, weight, config: GatedNormConfig) -> tuple[Tensor, Tensor]:
    """Return y, and 1 / root mean square of each group (..., groups, 1). Differentiable by autograd."""
    compute_dtype = torch.promote_types(widest_dtype(x, gate, weight), torch.float32)
    act = ACTIVATIONS[config.activation](gate.to(compute_dtype))
    h = x.to(compute_dtype)
    z = _groups(h * act if config.gate_first else h, config)
    rstd = torch.rsqrt(z.square().mean(-1, keepdim=True) + config.eps)
    y = (z * rstd).flatten(-2)
    is_rounded = config.rounding == "llama"
    if is_rounded:
        y = y.to(x.dtype).to(compute_dtype)
    if weight is not None:
        y = y * weight.to(compute_dtype)
    if not config.gate_first:
        if is_rounded:
            y = y.to(widest_dtype(x, weight)).to(compute_dtype)
        y = y * act
    return y.to(config.y_dtype(x, weight)), rstd


def _activation_derivative(gate: Tensor, activation: str) -> Tensor:
    """Return act'(gate)."""
    s = torch.sigmoid(gate)
    return s * (1 - s) if activation == "sigmoid" else s * (1 + gate * (1 - s))


def _backward_twin(d_y, x, gate, weight, rstd, config: GatedNormConfig, needs_d_weight: bool):
    """Return the gradients of x, gate and weight."""
    compute_dtype = rstd.dtype
    g = d_y.to(compute_dtype)
    h = x.to(compute_dtype)
    a = gate.to(compute_dtype)
    act = ACTIVATIONS[config.activation](a)
    derivative = _activation_derivative(a, config.activation)
    factor = None if weight is None else weight.to(compute_dtype)
    z = (_groups(h * act if config.gate_first else h, config) * rstd).flatten(-2)
    if not config.gate_first:
        d_gate = g * (z if factor is None else z * factor) * derivative
        g = g * act
    d_weight = (g * z).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if needs_d_weight else None
    g = _groups(g if factor is None else g * factor, config)
    z = _groups(z, config)
    d = (rstd * (g - z * (g * z).mean(-1, keepdim=True))).flatten(-2)
    if config.gate_first:
        d_gate = d * h * derivative
        d = d * act
    return d.to(x.dtype), d_gate.to(gate.dtype), d_weight
