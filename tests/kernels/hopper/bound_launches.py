"""Check the bound launches of `fused_projection_triton.read` and of LoRA dropout on a simulated Hopper GPU.

Each launch must have operands for which Triton compiles the kernel that was bound. test_bound_launches.py
runs this file in a separate process, because the simulation patches torch and the library.
"""

import itertools
from types import SimpleNamespace

import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from benchmarks.regressions import simulated_hopper
from logitless.kernels import launch
from logitless.kernels.head.cross_entropy import allocate_stats
from logitless.kernels.head.transform import LogitTransform

HOPPER = CUDABackend(GPUTarget("cuda", 90, 32))
bound: dict[launch.BoundLaunch, tuple] = {}


def specialized(param: SimpleNamespace, operand: object) -> object:
    """What Triton compiles for an operand."""
    value, alignment = not param.do_not_specialize, not param.do_not_specialize_on_alignment
    return native_specialize_impl(HOPPER, operand, param.is_const, value, alignment)


def checked(self: launch.BoundLaunch, grid: tuple, *operands) -> None:
    params = [param for param in self.kernel.kernel.params if not param.is_constexpr]
    kinds = tuple(specialized(*pair) for pair in zip(params, operands, strict=True))
    assert bound.setdefault(self, kinds) == kinds, self.kernel.kernel.fn.__name__


def cut(x: torch.Tensor | None, *, aligned: bool | None) -> torch.Tensor | None:
    """The same values at an address that is a multiple of 16 bytes, or not; None: no tensor."""
    if aligned is None:
        return None
    return x if aligned else torch.cat((x[:1], x))[1:]


def half(rows: int, columns: int, *, behind: int = 0, aligned: bool = True) -> torch.Tensor:
    """A matrix, with columns of memory behind its own, at a multiple of 16 bytes or not."""
    first = 0 if aligned else 1
    flat = torch.ones(rows * (columns + behind) + first).bfloat16()[first:]
    return flat.view(rows, columns + behind)[:, :columns]


def run_lora_dropout() -> None:
    from logitless.layers import lora_dropout

    kinds = itertools.product((1, 3), (1, 16, 24, 128), (24, 64, 1024), (0, 8), (True, False), (True, False))
    for count, rank, columns, behind, x_aligned, a_aligned in kinds:
        for rows in (1, 16, 33):
            x = half(rows, columns, behind=behind, aligned=x_aligned)
            a, h = half(count * rank, columns, aligned=a_aligned), half(rows, count * rank)
            masks = lora_dropout.project(x, 0.5, count, a, 2.0, h)
            for d_x in (None, half(rows, columns), torch.ones(rows, columns)):
                for x_or_none in (x, None):
                    if d_x is not None or x_or_none is not None:
                        lora_dropout.backward(h, x_or_none, d_x, masks, a, torch.float32)


def main() -> None:
    simulated_hopper.simulate()
    from logitless.kernels.hopper import fused_projection_triton as fused

    launch.BoundLaunch.__call__ = checked
    heads = LogitTransform(None, 1.0, 1.0), LogitTransform(30.0, 2.0, 0.5)
    no_or = None, True, False
    kinds = itertools.product(
        (("lse",), ("entropy",), ("sum_logits",), ("log_sum_sq_probs",)),
        heads,
        (True, False),  # gradient
        no_or,  # bias
        no_or,  # sums
        ((16, 64), (16, 72), (24, 72)),  # H, V
        (-100, 16),  # ignore_index
        (0, 8),  # columns of hidden's memory behind H
    )
    rows = ((1, 0, torch.int64), (2, 1, torch.int64), (16, 4, torch.int64), (33, 1, torch.int32))
    for names, transform, writes, bias, sums, (H, V), ignored, behind in kinds:
        for C, first, dtype in rows:
            hidden = torch.ones(C, H + behind).bfloat16()[:, :H]
            stats = allocate_stats(names, first + C, torch.float32, hidden.device)[first : first + C]
            options = {"bias": cut(torch.ones(V), aligned=bias), "sums": cut(torch.ones(H + 1), aligned=sums)}
            weight, targets = torch.ones(V, H).bfloat16(), torch.zeros(C, dtype=dtype)
            gradient = torch.empty(C, -(-V // 8) * 8).bfloat16()[:, :V] if writes else None
            options |= {"gradient": gradient, "transform": transform, "ignore_index": ignored}
            fused.read(hidden, weight, targets, stats, **options)
    run_lora_dropout()
    print(f"{len(bound)} bound launches")


main()
