"""Where the kernels' tests run: on the GPU if there is one, else on the CPU, as twins or (TRITON_INTERPRET=1)
in Triton's interpreter."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support import DEVICE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and DEVICE.type == "cpu"
# Where the PyTorch twins are what is tested.
TWINS = DEVICE.type == "cpu" and not INTERPRETED


def patch_the_language_once() -> None:
    """Triton's interpreter replaces the functions of `triton.language` before each kernel and again in each
    call of a helper, which takes half of its time. They may stay replaced: nothing is compiled here."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def once(function: Callable) -> object:
        seen = frozenset(
            x.__name__ for x in (tl, tl.core) if any(x is y for y in function.__globals__.values())
        )
        if seen not in done:
            done.add(seen)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


if INTERPRETED:
    patch_the_language_once()


class Random:
    """Random tensors on DEVICE: the same numbers on every device, whatever PyTorch's default device is."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device="cpu").to(DEVICE)

    def uniform(self, *shape: int) -> Tensor:
        """Between 0.5 and 1.5."""
        return torch.rand(shape, generator=self._generator, device="cpu").to(DEVICE) + 0.5

    def integers(self, high: int, *shape: int) -> Tensor:
        """From 0 up to, without, `high`."""
        return torch.randint(high, shape, generator=self._generator, device="cpu").to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor full of NaN: what a kernel leaves out shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, as a kernel stores it: Triton's interpreter cuts fp32 off to bf16 where hardware
    rounds."""
    if INTERPRETED and dtype == torch.bfloat16 and x.dtype != dtype:
        return (x.float().view(torch.int32) & -(2**16)).view(torch.float32).to(dtype)
    return x.to(dtype)


def strided(x: Tensor, step: int = 2) -> Tensor:
    """Return the values of `x` as a view whose last stride is `step`.

    The elements in between are NaN, or `~x` for integers, which is negative for an id.
    """
    junk = torch.full_like(x, float("nan")) if x.is_floating_point() else ~x
    return torch.stack((x, *[junk] * (step - 1)), dim=-1)[..., 0]


def offset(x: Tensor) -> Tensor:
    """Return the values of `x` as a view with an offset: one invalid row before them and one after them."""
    junk = torch.full_like(x[:1], float("nan")) if x.is_floating_point() else ~x[:1]
    return torch.cat((junk, x, junk))[1:-1]


def expanded(x: Tensor) -> Tensor:
    """Return the first element of each row of `x`, expanded (stride 0) to the shape of `x`."""
    return x[..., :1].expand(x.shape)
