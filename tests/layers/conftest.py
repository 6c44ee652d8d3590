"""What all tests of the layers have: bf16 as hardware rounds and multiplies it."""

import numpy as np
import pytest
import torch

from tests.kernels.support import INTERPRETED


@pytest.fixture(autouse=True)
def hardware_rounding(monkeypatch):
    """Triton's interpreter cuts fp32 off to bf16. Here it rounds to nearest even, as hardware does.

    It also multiplies matrices of bf16 as if they were integers.
    """
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding_cast(self, src, dst_type):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding_cast)

    dot = interpreter.InterpreterBuilder.create_dot

    def widening_dot(self, a, b, *args):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, x, tl.float32) for x in (a, b))
        return dot(self, a, b, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widening_dot)
