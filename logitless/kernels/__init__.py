"""The operators. Those of a model's layers are public; the others belong to the losses."""

# At once and not when they are asked for: `rope` and `gated` are modules too, and would otherwise be one or
# the other, depending on what was imported before. No Triton comes with them.
from logitless.kernels.gated import gated
from logitless.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm, rms_norm_add
from logitless.kernels.rope import qk_norm_rope, rope

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
