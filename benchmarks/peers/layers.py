"""Who computes the layer operators: us, eager PyTorch, Inductor, Liger, FLA and QuACK.

A peer is a function of an operator's leaves for each operator that it has; for the others it has none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.harness.registry import Peers

LAYERS = Peers()
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6


@dataclass(frozen=True)
class Operator:
    """One operator at one shape."""

    kind: str  # its peers go by that
    name: str
    inputs: Callable[[int], dict[str, Tensor]]  # seed -> leaves
    ours: Callable[..., tuple[Tensor, ...]]
    stock: Callable[..., tuple[Tensor, ...]]
    forward_bytes: int
    backward_bytes: int
    width: int | None = None  # of those in the picture
    constants: dict = field(default_factory=dict)  # cos and sin


# An operator -> what computes it, or None.
Computes = Callable[[Operator], Callable | None]


@LAYERS.add("logitless")
def ours() -> Computes:
    return lambda operator: operator.ours


@LAYERS.add("eager")
def eager() -> Computes:
    return lambda operator: operator.stock


@LAYERS.add("Inductor", needs_cuda=True)
def inductor() -> Computes:
    from torch._functorch import config

    # Each backward pass is replayed, so its saved tensors may not be given away.
    config.donated_buffer = False
    return lambda operator: torch.compile(operator.stock, fullgraph=True, dynamic=False)


def by_kind(makers: dict[str, Callable[[Operator], Callable]]) -> Computes:
    return lambda operator: makers[operator.kind](operator) if operator.kind in makers else None


def turned(rotate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Operator], Callable]:
    """A rotation of one tensor (B, T, heads, D) by half the angles (T, D / 2), for queries and keys."""

    def make(operator: Operator) -> Callable:
        cos, sin = (x[0, :, : x.shape[-1] // 2].contiguous() for x in operator.constants.values())
        return lambda q, k: tuple(rotate(x, cos, sin).transpose(1, 2) for x in (q, k))

    return make


@LAYERS.add("Liger", package="liger-kernel", needs_cuda=True)
def liger() -> Computes:
    from liger_kernel.transformers import functional as F

    def rope(operator: Operator) -> Callable:
        angles = operator.constants.values()
        return lambda q, k: F.liger_rope(q.transpose(1, 2), k.transpose(1, 2), *angles)

    def qk_norm_rope(operator: Operator) -> Callable:
        angles = operator.constants.values()

        def run(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
            normed = F.liger_rms_norm(q, q_weight, EPS), F.liger_rms_norm(k, k_weight, EPS)
            return F.liger_rope(*(x.transpose(1, 2) for x in normed), *angles)

        return run

    def norm_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (residual + F.liger_rms_norm(x, weight, EPS, 1.0, "gemma", in_place=False),)

    def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        h = residual + x
        return F.liger_layer_norm(h, weight, bias, 1e-5), h

    return by_kind(
        {
            "add_rms_norm": lambda _: (
                lambda x, residual, weight: F.liger_fused_add_rms_norm(x, residual, weight, EPS)
            ),
            "rms_norm": lambda _: lambda x, weight: (F.liger_rms_norm(x, weight, EPS),),
            "rms_norm_add gemma": lambda _: norm_add,
            "add_layer_norm": lambda _: add_layer_norm,
            "rope": rope,
            "qk_norm_rope": qk_norm_rope,
            "gated silu": lambda _: lambda a, b: (F.liger_swiglu(a, b),),
            "gated gelu_tanh": lambda _: lambda a, b: (F.liger_geglu(a, b),),
        }
    )


@LAYERS.add("FLA", package="flash-linear-attention", needs_cuda=True)
def fla() -> Computes:
    from fla.modules.activations import swiglu
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.layernorm import layer_norm, rms_norm
    from fla.modules.rotary import rotary_embedding

    options = {"eps": EPS, "prenorm": True}
    return by_kind(
        {
            "add_rms_norm": lambda _: (
                lambda x, residual, weight: rms_norm(x, weight, None, residual, **options)
            ),
            "add_rms_norm fp32 residual": lambda _: (
                lambda x, residual, weight: rms_norm(
                    x, weight, None, residual, **options, residual_in_fp32=True
                )
            ),
            "rms_norm": lambda _: lambda x, weight: (rms_norm(x, weight, None, eps=EPS),),
            "add_layer_norm": lambda _: (
                lambda x, residual, weight, bias: layer_norm(
                    x, weight, bias, residual, eps=1e-5, prenorm=True
                )
            ),
            "gated_rms_norm": lambda _: (
                lambda x, gate, weight: (rms_norm_gated(x, gate, weight, None, eps=EPS),)
            ),
            "rope": turned(rotary_embedding),
            "gated silu": lambda _: lambda a, b: (swiglu(a, b),),
        }
    )


@LAYERS.add("QuACK", package="quack-kernels", needs_cuda=True)
def quack() -> Computes:
    from quack.rmsnorm import rmsnorm
    from quack.rotary import apply_rotary_emb

    def add(residual_dtype: torch.dtype) -> Callable[[Operator], Callable]:
        wide = {"out_dtype": BF16, "residual_dtype": residual_dtype, "eps": EPS, "prenorm": True}
        return lambda _: lambda x, residual, weight: rmsnorm(x, weight, residual=residual, **wide)

    return by_kind(
        {
            "add_rms_norm": add(BF16),
            "add_rms_norm fp32 residual": add(FP32),
            "rms_norm": lambda _: lambda x, weight: (rmsnorm(x, weight, eps=EPS),),
            "rope": turned(apply_rotary_emb),
        }
    )
