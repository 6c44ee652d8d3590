"""Fused operators for the layers of a model: norms, rotary embeddings, gates, residual additions, LoRA.

`norm`, `gated_norm`, `rope`, `gated` and `clamped_gate` are the operators: launcher and PyTorch twin, with
the Triton kernels in `*_triton.py`. `source`, `purity`, `bodies`, `expert_gates`, `statements` and `rewrite`
recognize the modules and statements of a model that compute the same as an operator; `fuse` and
`fused_forwards` replace them by the operator. `lora` has the operator and the forward pass of PEFT's LoRA
layers. `modules` has the operators as modules, for own models. Users call the operators from here and
`fuse_layers` from `logitless.models`.
`models` and the trainers use the operators and `fuse_layers`; the losses use neither.
"""

# Imported eagerly: `rope` and `gated` are also names of submodules, so a lazy attribute would be the function
# or the module, depending on earlier imports. These imports do not load Triton.
from logitless.layers.clamped_gate import clamped_gated
from logitless.layers.gated import gated
from logitless.layers.gated_norm import gated_rms_norm
from logitless.layers.modules import GatedMLP, GeGLU, LayerNorm, RMSNorm, RotaryEmbedding, SwiGLU
from logitless.layers.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm, rms_norm_add
from logitless.layers.rope import qk_norm_rope, rope

__all__ = [
    "GatedMLP",
    "GeGLU",
    "LayerNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "add_layer_norm",
    "add_rms_norm",
    "clamped_gated",
    "gated",
    "gated_rms_norm",
    "layer_norm",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_add",
    "rope",
]
