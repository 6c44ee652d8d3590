"""Exponentials for computations on every logit. Subnormal results (below 2^-126) are flushed to 0.

On NVIDIA GPUs, `tl.exp` and `tl.exp2` take three additional instructions to compute subnormal results,
compared with about twenty instructions per logit in total. The interpreter and Intel's Triton use `tl.exp`
and `tl.exp2`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

if triton.knobs.runtime.interpret or getattr(torch.version, "xpu", None) is not None:

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def exp2(x):
        return tl.exp2(x)
else:
    exp, exp2 = libdevice.fast_expf, libdevice.exp2
