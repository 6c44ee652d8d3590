"""Forward passes of fused modules, and the functions that rewritten forward passes call.

Each function runs the model's own code where the fused operator would behave differently: if a module that
would be bypassed has hooks or a `forward` attribute on the instance, if its code was replaced after
`fuse_layers`, if a parameter is not a plain tensor (DTensor, ZeRO-3, quantized), or for other dtypes. Under
torch.compile the model's own code runs, because Inductor fuses it better.
"""

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from logitless.exchange import state_of
from logitless.layers import add_layer_norm, add_rms_norm, gated, qk_norm_rope, rms_norm_add
from logitless.layers.bodies import Norm, Rotation, activation_of, apply_norm, apply_rotation, operator_angles
from logitless.layers.expert_gates import ExpertGate, apply_expert_gate
from logitless.layers.source import Recognized

KEY = "layers"
# Key of the exchange of a method other than the forward pass.
GATE_KEY = "expert gate"
# The LayerNorm of torch. It is one kernel already; only an addition before it is fused.
LAYER_NORM = Norm("single", "eps", center=True)
# Arguments of attentions and decoder layers that hold the keys and values of earlier tokens in generation.
CACHES = ("cache", "past_key_values", "layer_past", "cache_params")
PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
_hooks_of = itemgetter("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Addition(NamedTuple):
    """Second argument of a fused norm in a rewritten forward pass: the addition to fuse with the norm.

    The norm then returns (norm(h), h) with h = residual + multiplier * x; if `is_after`, residual + norm(x).
    """

    residual: Tensor
    multiplier: float
    is_after: bool


def norm_forward(module: nn.Module, norm: Recognized, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Forward pass of a fused norm; with an `Addition` as second argument, of norm and addition."""
    if len(args) == 2 and type(args[1]) is Addition:
        return _run_norm_with_addition(module, norm.value, *args)
    weight = getattr(module, "weight", None)
    if (
        len(args) != (1 if norm.value.gate is None else 2)
        or kwargs
        or is_transformed()
        or not norm.is_current()
        or not _is_plain(*args, weight)
        or (norm.value.gate is not None and not _have_one_shape(*args))
        or not _has_width_of(weight, args[0])
        or not _has_options(module, norm.value)
    ):
        return original(*args, **kwargs)
    return apply_norm(norm.value, module, weight, *args)


def rewritten_forward(
    module: nn.Module, new_forward: Recognized, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Forward pass of a module in whose `forward` `rewrite.py` has replaced statements."""
    has_cache = any(kwargs.get(name) is not None for name in CACHES)
    if (has_cache and not torch.is_grad_enabled()) or is_transformed() or not new_forward.is_current():
        return original(*args, **kwargs)
    return new_forward.value(module, *args, **kwargs)


def add_norm(
    norm: nn.Module, *, residual: Tensor, x: Tensor, multiplier: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return (norm(h), h) with h = residual + x * multiplier."""
    factor = 1.0 if multiplier is None else multiplier
    if type(factor) in (int, float) and _can_fuse_addition(norm, x, residual):
        if type(norm) is not nn.LayerNorm:
            return norm(x, Addition(residual, factor, False))
        out_dtype = None
        if torch.is_autocast_enabled(x.device.type) and _autocast_widens_layer_norm(x.device.type):
            out_dtype = torch.float32
        return add_layer_norm(
            x, residual, norm.weight, norm.bias, eps=norm.eps, multiplier=factor, out_dtype=out_dtype
        )
    h = residual + (x if multiplier is None else x * multiplier)
    return norm(h), h


def norm_add(norm: nn.Module, *, x: Tensor, residual: Tensor) -> Tensor:
    """Return residual + norm(x)."""
    if _can_fuse_addition(norm, x, residual) and not body_of(norm).center:
        return norm(x, Addition(residual, 1.0, True))
    return residual + norm(x)


def gate(act: nn.Module, *, a: Tensor, b: Tensor) -> Tensor:
    """Return act(a) * b."""
    activation = activation_of(act)
    if activation is not None and is_untouched(act) and _is_plain(a, b) and a.shape == b.shape:
        return gated(a, b, activation=activation)
    return act(a) * b


def gate_packed(act: nn.Module, x: Tensor) -> Tensor:
    """Return act(a) * b, where a and b are the two halves of x's last dimension."""
    activation = activation_of(act)
    if activation is not None and is_untouched(act) and _is_plain(x) and x.shape[-1] % 2 == 0:
        return gated(x, activation=activation)
    a, b = x.chunk(2, dim=-1)
    return act(a) * b


def expert_gate(module: nn.Module, gate: Recognized, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """The `_apply_gate(gate_up)` of fused experts."""
    activations = [module._modules.get(name) for name in gate.value.activations]
    if (
        len(args) != 1
        or kwargs
        or is_transformed()
        or not gate.is_current()
        or not _is_plain(*args)
        or not _has_options(module, gate.value)
        or any(activation_of(act) != gate.value.activation for act in activations)
        or not is_untouched(*activations)
    ):
        return original(*args, **kwargs)
    return apply_expert_gate(gate.value, *args)


class Rotate:
    """Replaces a model's function `original(q, k, cos, sin) -> (q, k)`, also with the norms of q and k."""

    def __init__(self, original: Callable, rotation: Rotation) -> None:
        self.original = original
        self.rotation = rotation

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self._supports(q, k, cos, sin):
            return self.original(q, k, cos, sin, *args, **kwargs)
        return apply_rotation(self.rotation, q, k, cos, sin)

    def norm_and_rotate(
        self,
        q_norm: nn.Module,
        k_norm: nn.Module,
        norm_before_transpose: bool,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Normalize and rotate q and k (B, heads, T, D).

        Args:
            norm_before_transpose: whether the model normalizes (B, T, heads, D), before the transpose.
        """
        if self._can_fuse_norms((q_norm, k_norm), q, k, cos, sin):
            return self._norm_and_rotate((q_norm, k_norm), q, k, cos, sin)
        if norm_before_transpose:
            q, k = (norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in ((q_norm, q), (k_norm, k)))
        else:
            q, k = q_norm(q), k_norm(k)
        return self(q, k, cos, sin)

    def _can_fuse_norms(
        self, norms: tuple[nn.Module, ...], q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor
    ) -> bool:
        """Whether the fused operator computes the same as these norms and the model's rotation."""
        bodies = [body_of(norm) for norm in norms]
        weights = [getattr(norm, "weight", None) for norm in norms]
        return (
            is_untouched(*norms)
            and not self.rotation.deinterleave
            and self._supports(q, k, cos, sin)
            and _are_equal_norms(norms, bodies)
            and _is_plain(*weights)
            and all(_has_width_of(weight, q) for weight in weights)
            and (bodies[0].rounding != "llama" or _preserves_dtype(q, *weights))
        )

    def _norm_and_rotate(
        self, norms: tuple[nn.Module, ...], q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Normalize and rotate q, or q and k, by the fused operator."""
        body = body_of(norms[0])
        cos, sin, width = operator_angles(self.rotation, cos, sin)
        return qk_norm_rope(
            q,
            k,
            cos,
            sin,
            *(getattr(norm, "weight", None) for norm in norms),
            eps=getattr(norms[0], body.eps),
            rounding=body.rounding,
            rotary_dim=width,
            interleaved=self.rotation.interleaved,
        )

    def _supports(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> bool:
        """Whether the fused operator computes the same as the model's function for these tensors."""
        if isinstance(self.original, nn.Module) and not is_untouched(self.original):
            return False
        if not _is_plain(q, k, cos, sin) or q.dim() != 4 or cos.dim() != 3:
            return False
        batch, _, tokens, head_dim = q.shape
        # PyTorch would broadcast q or k of another batch or length, and angles of one token.
        if k is not None and (
            k.dim() != 4
            or (k.shape[0], k.shape[2], k.shape[3]) != (batch, tokens, head_dim)
            or q.dtype != k.dtype
        ):
            return False
        if cos.shape != sin.shape or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
            return False
        rotary_dim = cos.shape[2] * (2 if self.rotation.angle_layout == "pairs" else 1)
        is_partial = rotary_dim < head_dim and not self.rotation.whole_head
        if rotary_dim % 2 or not (rotary_dim == head_dim or is_partial):
            return False
        return self.rotation.keeps_dtype or _preserves_dtype(q, cos)


class RotateOne(Rotate):
    """Replaces a model's function `original(x, cos, sin) -> x`.

    x is (B, heads, T, D), or (B, T, heads, D) with `unsqueeze_dim=2`.
    """

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_transposed = kwargs == {"unsqueeze_dim": 2}
        if not args and (is_transposed or not kwargs):
            q = x.transpose(1, 2) if is_transposed else x
            if self._supports(q, None, cos, sin):
                q, _ = apply_rotation(self.rotation, q, None, cos, sin)
                return q.transpose(1, 2) if is_transposed else q
        return self.original(x, cos, sin, *args, **kwargs)

    def norm_and_rotate_one(
        self, norm: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, **kwargs: Any
    ) -> Tensor:
        """Normalize and rotate x; see `__call__` for its layouts."""
        is_transposed = kwargs == {"unsqueeze_dim": 2}
        if is_transposed or not kwargs:
            q = x.transpose(1, 2) if is_transposed else x
            if self._can_fuse_norms((norm,), q, None, cos, sin):
                q, _ = self._norm_and_rotate((norm,), q, None, cos, sin)
                return q.transpose(1, 2) if is_transposed else q
        return self(norm(x), cos, sin, **kwargs)


def _run_norm_with_addition(module: nn.Module, body: Norm, x: Tensor, addition: Addition) -> Any:
    eps = getattr(module, body.eps)
    weight = getattr(module, "weight", None)
    if addition.is_after:
        return rms_norm_add(x, addition.residual, weight, eps=eps, rounding=body.rounding)
    factor = addition.multiplier
    if body.center:
        return add_layer_norm(x, addition.residual, weight, eps=eps, multiplier=factor)
    return add_rms_norm(x, addition.residual, weight, eps=eps, rounding=body.rounding, multiplier=factor)


@functools.cache
def _autocast_widens_layer_norm(device_type: str) -> bool:
    """Whether autocast runs LayerNorm in fp32, as on CUDA, but not on a CPU."""
    with torch.no_grad(), torch.autocast(device_type, torch.bfloat16):
        x = torch.zeros(1, 2, dtype=torch.bfloat16, device=device_type)
        return nn.functional.layer_norm(x, (2,)).dtype == torch.float32


def body_of(module: nn.Module) -> Norm | None:
    """Return which norm a module computes if it can be fused with an addition, else None."""
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return LAYER_NORM
    state = state_of(module, KEY)
    is_norm = state is not None and type(state.value) is Norm and state.is_current()
    return state.value if is_norm and state.value.gate is None and _has_options(module, state.value) else None


def is_untouched(*modules: nn.Module) -> bool:
    """Whether calls of the modules run only the forward pass of their class: no hooks, no other forward."""
    for module in modules:
        attributes = module.__dict__
        if (
            any(_hooks_of(attributes))
            or "forward" in attributes
            or attributes.get("_compiled_call_impl") is not None
        ):
            return False
    return not torch_module._has_any_global_hook()


def _can_fuse_addition(norm: nn.Module, x: Tensor, residual: Tensor) -> bool:
    """Whether the norm can be fused with this addition: it is fused or a LayerNorm, and has no hooks."""
    weight = getattr(norm, "weight", None)
    return (
        body_of(norm) is not None
        and is_untouched(norm)
        and _is_plain(x, residual, weight, getattr(norm, "bias", None))
        and x.shape == residual.shape
        and _has_width_of(weight, x)
    )


def _has_width_of(weight: Tensor | None, x: Tensor) -> bool:
    """Whether the operators accept the weight: PyTorch would broadcast another."""
    return weight is None or weight.shape == x.shape[-1:]


def _have_one_shape(x: Tensor, gate: Tensor | None) -> bool:
    """Whether the gate has x's shape: PyTorch would broadcast another, and a module may do without a gate."""
    return gate is not None and gate.shape == x.shape


def _has_options(module: nn.Module, body: Norm | ExpertGate) -> bool:
    """Whether the attributes that the norm or the gate reads are those of `fuse_layers`."""
    return all(getattr(module, name, None) == value for name, value in body.options)


def _are_equal_norms(norms: tuple[nn.Module, ...], bodies: list[Norm | None]) -> bool:
    """Whether all norms are fused RMS norms with the same rounding and eps."""
    first = bodies[0]
    if first is None or first.center or any(body != first for body in bodies):
        return False
    return len({getattr(norm, first.eps) for norm in norms}) == 1


def is_transformed() -> bool:
    """Whether the model runs under torch.compile, a functorch transform such as vmap, or torch.jit.trace."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether all tensors are plain tensors or parameters of a supported dtype."""
    for x in tensors:
        if x is not None and not (type(x) in PLAIN_TYPES and x.dtype in DTYPES):
            return False
    return True


def _preserves_dtype(q: Tensor, *others: Tensor | None) -> bool:
    """Whether the model's own result has q's dtype, or autocast casts it to that dtype before attention."""
    for x in others:
        if x is not None and x.dtype != q.dtype and torch.promote_types(q.dtype, x.dtype) != q.dtype:
            return torch.is_autocast_enabled(q.device.type)
    return True
