"""Forward passes of fused modules, and the functions that rewritten forward passes call.

Each runs the model's own code where the fused operator would behave differently: hooks on a module that would
be bypassed, a `forward` attribute on such an instance, a parameter that is not a plain tensor (DTensor,
ZeRO-3, quantized), another dtype. Under torch.compile the model's own code runs: Inductor fuses it better.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from logitless.exchange import state_of
from logitless.layers import add_layer_norm, add_rms_norm, gated, qk_norm_rope, rms_norm_add
from logitless.layers.bodies import Norm, Rotation, activation_of, angles, normalized, rotated

KEY = "layers"
# torch's own, which is one kernel: it stays as it is, but for an addition before it.
LAYER_NORM = Norm("single", "eps", center=True)
PLAIN_TYPES = (Tensor, nn.Parameter)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Addition(NamedTuple):
    """Second argument of a norm in a rewritten layer: the residual addition to fuse with it.

    The norm returns (y, h) with h = residual + multiplier * x, y = norm(h); with `after`, residual + norm(x).
    """

    residual: Tensor
    multiplier: float
    after: bool


def norm(module: nn.Module, body: Norm, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    """Forward pass of a norm."""
    if len(args) == 2 and type(args[1]) is Addition:
        return _norm_with(module, body, *args)
    weight = getattr(module, "weight", None)
    if len(args) != 1 or kwargs or _is_transformed() or not _is_plain(*args, weight):
        return stock(*args, **kwargs)
    return normalized(body, module, args[0], weight)


def rewritten(module: nn.Module, new: FunctionType, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    """Forward pass of a module whose statements `rewrite.py` has replaced."""
    generates = kwargs.get("past_key_values") is not None and not torch.is_grad_enabled()
    if generates or _is_transformed():
        return stock(*args, **kwargs)
    return new(module, *args, **kwargs)


def add_norm(
    norm: nn.Module, *, residual: Tensor, x: Tensor, multiplier: float | None = None
) -> tuple[Tensor, Tensor]:
    """`h = residual + x * multiplier`; (norm(h), h)."""
    factor = 1.0 if multiplier is None else multiplier
    if type(factor) in (int, float) and _can_join(norm, x, residual):
        if type(norm) is not nn.LayerNorm:
            return norm(x, Addition(residual, factor, False))
        kind = x.device.type
        out = torch.float32 if torch.is_autocast_enabled(kind) and _widens_layer_norm(kind) else None
        return add_layer_norm(
            x, residual, norm.weight, norm.bias, eps=norm.eps, multiplier=factor, out_dtype=out
        )
    h = residual + (x if multiplier is None else x * multiplier)
    return norm(h), h


def norm_add(norm: nn.Module, *, x: Tensor, residual: Tensor) -> Tensor:
    """residual + norm(x)."""
    if _can_join(norm, x, residual) and not body_of(norm).center:
        return norm(x, Addition(residual, 1.0, True))
    return residual + norm(x)


def gate(act: nn.Module, *, a: Tensor, b: Tensor) -> Tensor:
    """act(a) * b."""
    kind = activation_of(act)
    if kind is not None and is_untouched(act) and _is_plain(a, b) and a.shape == b.shape:
        return gated(a, b, activation=kind)
    return act(a) * b


def gate_packed(act: nn.Module, x: Tensor) -> Tensor:
    """act(a) * b of a and b side by side in x."""
    kind = activation_of(act)
    if kind is not None and is_untouched(act) and _is_plain(x) and x.shape[-1] % 2 == 0:
        return gated(x, activation=kind)
    a, b = x.chunk(2, dim=-1)
    return act(a) * b


class Rotate:
    """Replaces a model's function (q, k, cos, sin) -> (q, k), also with the norms of q and k before it."""

    def __init__(self, stock: Callable, rotation: Rotation) -> None:
        self.stock, self.rotation = stock, rotation

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self._takes(q, k, cos, sin):
            return self.stock(q, k, cos, sin, *args, **kwargs)
        return rotated(self.rotation, q, k, cos, sin)

    def normed(
        self,
        q_norm: nn.Module,
        k_norm: nn.Module,
        before: bool,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Normalize and rotate q and k (B, heads, T, D).

        `before`: the model's norms take (B, T, heads, D), as q and k were before their transposition."""
        norms = (q_norm, k_norm)
        bodies = [body_of(norm) for norm in norms]
        if all(map(is_untouched, norms)) and self._takes(q, k, cos, sin) and _same_norm(norms, bodies):
            weights = [getattr(norm, "weight", None) for norm in norms]
            if _is_plain(*weights) and all(w is None or w.shape == q.shape[-1:] for w in weights):
                if bodies[0].rounding != "llama" or _keeps(q, *weights):
                    cos, sin, width = angles(self.rotation, cos, sin)
                    form = {"rotary_dim": width, "interleaved": self.rotation.interleaved}
                    eps = getattr(q_norm, bodies[0].eps)
                    rounding = bodies[0].rounding
                    return qk_norm_rope(q, k, cos, sin, *weights, eps=eps, rounding=rounding, **form)
        if before:
            q, k = (norm(x.transpose(1, 2)).transpose(1, 2) for norm, x in zip(norms, (q, k)))
        else:
            q, k = q_norm(q), k_norm(k)
        return self(q, k, cos, sin)

    def _takes(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
        if not _is_plain(q, k, cos, sin) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
            return False
        # PyTorch would stretch the angles of one token to all.
        if cos.shape[1] == 1 != q.shape[2] or cos.shape[0] not in (1, q.shape[0]) or q.dtype != k.dtype:
            return False
        return self.rotation.keeps_dtype or _keeps(q, cos)


def _norm_with(module: nn.Module, body: Norm, x: Tensor, addition: Addition) -> Any:
    eps = getattr(module, body.eps)
    weight = getattr(module, "weight", None)
    if addition.after:
        return rms_norm_add(x, addition.residual, weight, eps=eps, rounding=body.rounding)
    factor = addition.multiplier
    if body.center:
        return add_layer_norm(x, addition.residual, weight, eps=eps, multiplier=factor)
    return add_rms_norm(x, addition.residual, weight, eps=eps, rounding=body.rounding, multiplier=factor)


@functools.cache
def _widens_layer_norm(device_type: str) -> bool:
    """Whether autocast runs LayerNorm in fp32: on CUDA it does, on a CPU it does not."""
    with torch.no_grad(), torch.autocast(device_type, torch.bfloat16):
        x = torch.zeros(1, 2, dtype=torch.bfloat16, device=device_type)
        return nn.functional.layer_norm(x, (2,)).dtype == torch.float32


def body_of(module: nn.Module) -> Norm | None:
    """The table entry of a norm that can be fused with an addition, else None."""
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return LAYER_NORM
    state = state_of(module, KEY)
    return state if isinstance(state, Norm) else None


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's forward pass and nothing else, such as hooks."""
    own = module.__dict__
    return not (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or own.get("_compiled_call_impl") is not None
        or torch_module._has_any_global_hook()
    )


def _can_join(norm: nn.Module, x: Tensor, residual: Tensor) -> bool:
    """Whether the norm can be fused with an addition: it is fused itself, and no hook sees its operands."""
    return (
        body_of(norm) is not None
        and is_untouched(norm)
        and _is_plain(x, residual, getattr(norm, "weight", None), getattr(norm, "bias", None))
        and x.shape == residual.shape
    )


def _same_norm(norms: tuple[nn.Module, nn.Module], bodies: list[Norm | None]) -> bool:
    first, second = bodies
    if first is None or first != second or first.center:
        return False
    return getattr(norms[0], first.eps) == getattr(norms[1], second.eps)


def _is_transformed() -> bool:
    """Whether the model runs under a compiler, a functorch transform such as vmap, or a trace."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _is_plain(*tensors: Tensor | None) -> bool:
    for x in tensors:
        if x is not None and not (type(x) in PLAIN_TYPES and x.dtype in DTYPES):
            return False
    return True


def _keeps(q: Tensor, *others: Tensor | None) -> bool:
    """Whether the model's own result has q's dtype in the end: at once, or because autocast sees to it that
    attention takes no wider one."""
    for x in others:
        if x is not None and x.dtype != q.dtype and torch.promote_types(q.dtype, x.dtype) != q.dtype:
            return torch.is_autocast_enabled(q.device.type)
    return True
