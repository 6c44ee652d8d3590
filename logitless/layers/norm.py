"""RMSNorm and LayerNorm, alone or fused with the residual addition before or after them.

    rms_norm        y = n(x)
    add_rms_norm    h = residual + multiplier * x,  y = n(h)     between two blocks; h is the residual stream
    rms_norm_add    y = residual + n(x)                          after a block (Gemma 2 and 3, OLMo 2)

with n(h) = h / sqrt(mean(h^2) + eps) * weight. LayerNorm subtracts the mean first and adds a bias.

With z the normalized row, g = d_y * weight and s = 1 / sqrt(mean(h^2) + eps):

    d_h = s (g - z mean(g z)), LayerNorm: - s mean(g)            d_weight = sum over rows of d_y z

The backward pass of `add_rms_norm` adds the upstream gradient of h to d_h. All computations are in fp32 (fp64
for fp64 operands). `rounding` selects where n(h) is rounded; models differ in this:

    llama    z is rounded to h's dtype, then multiplied by weight: the result has the wider dtype of the two
    single   z * weight is rounded once, to h's dtype (OLMo 2, gpt-oss)
    gemma    z * (1 + weight) is rounded once, to h's dtype

`rms_norm_add` rounds its sum to the wider dtype of residual and n(x). The input of the norm (h, or x in
`rms_norm` and `rms_norm_add`), the weight, and one or two numbers per row are saved for the backward pass.
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

ROUNDINGS = ("llama", "single", "gemma")
# A row is held in the registers of one program. Wider rows run the twin, on any device.
MAX_COLUMNS = 32768


class NormConfig(NamedTuple):
    """Configuration of a norm: all arguments that are not tensors."""

    eps: float
    rounding: str
    out_dtype: torch.dtype | None = None  # of y; None: the default of the rounding
    multiplier: float = 1.0
    added: str | None = None  # the residual is added "before" or "after" the norm; None: no residual
    center: bool = False  # LayerNorm

    def y_dtype(self, x: Tensor, residual: Tensor | None, weight: Tensor | None) -> torch.dtype:
        if self.out_dtype is not None:
            return self.out_dtype
        return widest_dtype(x, residual, weight if self.rounding == "llama" else None)


class GradientDtypes(NamedTuple):
    """Dtypes of the gradients that the backward pass computes; None for a gradient that is not needed."""

    x: torch.dtype
    residual: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None


def rms_norm(
    x: Tensor,  # (..., H)
    weight: Tensor | None = None,  # (H,)
    *,
    eps: float = 1e-6,
    rounding: str = "llama",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Root-mean-square normalization of the last dimension, `x / sqrt(mean(x^2) + eps) * weight`.

    Args:
        x: `(..., H)`, any floating-point dtype.
        weight: `(H,)` or None; its dtype may differ from x's.
        eps: added to the mean square.
        rounding: "llama" (round, times weight), "single" (round once) or "gemma" (1 + weight, round once).
        out_dtype: dtype of the result; None means x's dtype, with "llama" the wider of x's and weight's.

    Returns:
        The normalized tensor, of x's shape. Differentiable once in x and weight.

    Raises:
        ValueError: an unknown rounding, or a shape or device that does not match.
        TypeError: an operand that is not a floating-point tensor.

    Reference: Zhang and Sennrich, Root Mean Square Layer Normalization, https://arxiv.org/abs/1910.07467.
    """
    return _normalize(x, None, weight, None, NormConfig(eps, rounding, out_dtype))


def add_rms_norm(
    x: Tensor,  # (..., H)
    residual: Tensor,  # (..., H)
    weight: Tensor | None = None,  # (H,)
    *,
    eps: float = 1e-6,
    rounding: str = "llama",
    multiplier: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual addition and the RMSNorm after it: `h = residual + multiplier * x`, `y = rms_norm(h)`.

    Args:
        x: `(..., H)`, the output of a block.
        residual: `(..., H)`, the residual stream before that block; may be wider than x.
        weight: `(H,)` or None, as in `rms_norm`.
        eps: added to the mean square.
        rounding: "llama", "single" or "gemma", as in `rms_norm`.
        out_dtype: dtype of y; None means h's, with "llama" the wider of h's and weight's.
        multiplier: factor of x (Granite's residual multiplier).

    Returns:
        `(y, h)`. h has the wider dtype of x and residual, and is rounded to it before it is normalized.
    """
    return _normalize(x, residual, weight, None, NormConfig(eps, rounding, out_dtype, multiplier, "before"))


def rms_norm_add(
    x: Tensor,  # (..., H)
    residual: Tensor,  # (..., H)
    weight: Tensor | None = None,  # (H,)
    *,
    eps: float = 1e-6,
    rounding: str = "llama",
) -> Tensor:
    """RMSNorm of a block's output, added to the residual stream: `residual + rms_norm(x)`.

    Arguments as in `add_rms_norm`. The sum is rounded once, to the wider dtype of residual and `rms_norm(x)`.
    """
    return _normalize(x, residual, weight, None, NormConfig(eps, rounding, added="after"))


def layer_norm(
    x: Tensor,  # (..., H)
    weight: Tensor | None = None,  # (H,)
    bias: Tensor | None = None,  # (H,)
    *,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer normalization of the last dimension, `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`.

    Args:
        bias: `(H,)` or None.
        eps: added to the variance.
        out_dtype: dtype of y; None means that of the normalized tensor.

    Other arguments as in `rms_norm`.

    Reference: Ba, Kiros and Hinton, Layer Normalization, https://arxiv.org/abs/1607.06450.
    """
    return _normalize(x, None, weight, bias, NormConfig(eps, "single", out_dtype, center=True))


def add_layer_norm(
    x: Tensor,  # (..., H)
    residual: Tensor,  # (..., H)
    weight: Tensor | None = None,  # (H,)
    bias: Tensor | None = None,  # (H,)
    *,
    eps: float = 1e-5,
    multiplier: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Residual addition and the LayerNorm after it: `h = residual + multiplier * x`, `y = layer_norm(h)`.

    Returns `(y, h)`, as `add_rms_norm` does. Arguments as in `layer_norm` and `add_rms_norm`.
    """
    return _normalize(
        x, residual, weight, bias, NormConfig(eps, "single", out_dtype, multiplier, "before", True)
    )


def _check(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, config: NormConfig
) -> None:
    # Messages are built only if needed: this function runs twice per decoder layer.
    check_choice("rounding", config.rounding, ROUNDINGS)
    check_floating(x=x)
    check_floating(optional=config.added is None, residual=residual)
    check_floating(optional=True, weight=weight, bias=bias)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"x: expected shape (..., H), H at least 1, got {tuple(x.shape)}; pass hidden states."
        )
    if residual is not None and residual.shape != x.shape:
        shapes = f"expected x's shape {tuple(x.shape)}, got {tuple(residual.shape)}"
        raise ValueError(f"residual: {shapes}; pass the residual stream that x is added to.")
    check_vector(x.shape[-1], weight=weight, bias=bias)
    check_device(x.device, "x", residual=residual, weight=weight, bias=bias)


def _normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, config: NormConfig
):
    """Return y, or (y, h) if the residual is added before the norm."""
    _check(x, residual, weight, bias, config)
    if torch.compiler.is_compiling():
        # The compiler fuses plain PyTorch with neighbouring operators; an opaque operator would prevent that.
        y, h, *_ = _forward_twin(x, residual, weight, bias, config)
        return (y, h) if config.added == "before" else y
    return _Norm.apply(x, residual, weight, bias, config)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, config):
        ctx.set_materialize_grads(False)
        if _runs_triton(x, residual, weight, bias):
            from logitless.layers import norm_triton

            with on_device(x):
                y, h, mean, rstd = norm_triton.forward(x, residual, weight, bias, config)
        else:
            y, h, mean, rstd = _forward_twin(x, residual, weight, bias, config)
        ctx.save_for_backward(h, weight, mean, rstd)
        ctx.config = config
        collector = recipes.current()
        if collector is not None and config.added != "after":
            make = functools.partial(_recompute, config._replace(out_dtype=y.dtype, added=None))
            collector.add(ctx, (y,), make, (h, weight, bias, mean, rstd))
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, weight, bias)]
        return (y, h) if config.added == "before" else y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y, d_h=None):
        config = ctx.config
        x_dtype, residual_dtype, weight_dtype, bias_dtype = ctx.dtypes
        if d_y is None:
            if d_h is None:
                return None, None, None, None, None
            # Only the sum h was used.
            return (config.multiplier * d_h).to(x_dtype), d_h.to(residual_dtype), None, None, None
        h, weight, mean, rstd = ctx.saved_tensors
        gradient_dtypes = GradientDtypes(
            x_dtype,
            residual_dtype if config.added == "before" else None,
            weight_dtype if ctx.needs_input_grad[2] else None,
            bias_dtype if ctx.needs_input_grad[3] else None,
        )
        if _runs_triton(h, d_y, d_h, weight):
            from logitless.layers import norm_triton

            backward = norm_triton.backward
        else:
            backward = _backward_twin
        d_x, d_residual, d_weight, d_bias = backward(d_y, d_h, h, weight, mean, rstd, config, gradient_dtypes)
        if config.added == "after":
            d_residual = d_y.to(residual_dtype)
        return d_x, d_residual, d_weight, d_bias, None


def _recompute(config: NormConfig, h, weight, bias, mean, rstd) -> tuple[Tensor]:
    """Compute y again from the saved mean and rstd of the rows."""
    if _runs_triton(h, weight, bias):
        from logitless.layers import norm_triton

        with on_device(h):
            return (norm_triton.forward(h, None, weight, bias, config, mean=mean, rstd=rstd)[0],)
    compute_dtype = torch.promote_types(widest_dtype(h, weight, bias), torch.float32)
    z = h.to(compute_dtype) - mean if config.center else h.to(compute_dtype)
    return (_apply_weight(z * rstd, h, weight, bias, config, compute_dtype).to(config.out_dtype),)


def _runs_triton(x: Tensor, *others: Tensor | None) -> bool:
    return all_triton(x, *others) and x.shape[-1] <= MAX_COLUMNS


def _forward_twin(x, residual, weight, bias, config: NormConfig):
    """Return y, h, and each row's mean (or None) and 1 / root mean square. Differentiable by autograd."""
    compute_dtype = torch.promote_types(widest_dtype(x, residual, weight, bias), torch.float32)
    h = x
    if config.added == "before":
        h = residual.to(compute_dtype) + config.multiplier * x.to(compute_dtype)
        h = h.to(torch.promote_types(x.dtype, residual.dtype))
    z = h.to(compute_dtype)
    mean = None
    if config.center:
        mean = z.mean(-1, keepdim=True)
        z = z - mean
    rstd = torch.rsqrt(z.square().mean(-1, keepdim=True) + config.eps)
    y = _apply_weight(z * rstd, h, weight, bias, config, compute_dtype)
    if config.added == "after":
        y = residual.to(compute_dtype) + y
    return y.to(config.y_dtype(x, residual, weight)), h, mean, rstd


def _apply_weight(y, h, weight, bias, config: NormConfig, compute_dtype: torch.dtype) -> Tensor:
    """Multiply the normalized rows y by weight, and add bias."""
    if weight is not None:
        if config.rounding == "llama":
            y = y.to(h.dtype)
        factor = weight.to(compute_dtype)
        y = y.to(compute_dtype) * (factor + 1 if config.rounding == "gemma" else factor)
    return y if bias is None else y + bias.to(compute_dtype)


def _backward_twin(d_y, d_h, h, weight, mean, rstd, config: NormConfig, gradient_dtypes: GradientDtypes):
    """Return the gradients of x, residual, weight and bias."""
    compute_dtype = rstd.dtype
    g = d_y.to(compute_dtype)
    z = (h.to(compute_dtype) - mean if config.center else h.to(compute_dtype)) * rstd
    rows = tuple(range(g.dim() - 1))
    d_bias = g.sum(rows).to(gradient_dtypes.bias) if gradient_dtypes.bias else None
    d_weight = (g * z).sum(rows).to(gradient_dtypes.weight) if gradient_dtypes.weight else None
    if weight is not None:
        factor = weight.to(compute_dtype)
        g = g * (factor + 1 if config.rounding == "gemma" else factor)
    d = g - z * (g * z).mean(-1, keepdim=True)
    if config.center:
        d = d - g.mean(-1, keepdim=True)
    d = d * rstd
    if d_h is not None:
        d = d + d_h
    d_x = (config.multiplier * d).to(gradient_dtypes.x)
    d_residual = d.to(gradient_dtypes.residual) if gradient_dtypes.residual else None
    return d_x, d_residual, d_weight, d_bias
