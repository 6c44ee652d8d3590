"""The fused layers of a model: norms, rotary embeddings, gated activations and residual additions.

`norm`, `rope` and `gated` are the operators: launcher and PyTorch twin, with the Triton kernels in
`*_triton.py`. `source`, `bodies`, `statements` and `rewrite` recognize in a model's source what an operator
computes; `fuse` and `fused_forwards` put the operator there. Users call the operators from here and
`fuse_layers` from `logitless.models`; `models` and trainers call both, the losses neither.
"""

# At once and not when they are asked for: `rope` and `gated` are modules too, and would otherwise be one or
# the other, depending on what was imported before. No Triton comes with them.
from logitless.layers.gated import gated
from logitless.layers.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm, rms_norm_add
from logitless.layers.rope import qk_norm_rope, rope

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "gated",
    "layer_norm",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_add",
    "rope",
]
