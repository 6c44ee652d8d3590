"""Run in a process of its own, by test_bound_launches.py: every call of `read` on a simulated Hopper GPU
launches each kernel with operands of the specialization that it was bound to."""

import itertools

import torch

from benchmarks import simulated_hopper
from logitless.kernels import launch
from logitless.kernels.head.cross_entropy import allocate_stats
from logitless.kernels.head.transform import LogitTransform

bound: dict[launch.BoundLaunch, tuple] = {}
seen: set[tuple] = set()


def checked(self: launch.BoundLaunch, grid: tuple, *operands) -> None:
    key = self.kernel.key(0, operands, self.constants)
    assert bound.setdefault(self, key) == key, self.kernel.kernel.fn.__name__
    seen.add((self.kernel, key))


def cut(x: torch.Tensor | None, *, aligned: bool) -> torch.Tensor | None:
    """The same values at an address that is a multiple of 16 bytes, or not."""
    if x is None or aligned:
        return x
    return torch.cat((x[:1], x))[1:]


def main() -> None:
    simulated_hopper.simulate()
    from logitless.kernels.hopper import fused_projection_triton as fused

    launch.BoundLaunch.__call__ = checked
    heads = LogitTransform(None, 1.0, 1.0), LogitTransform(30.0, 2.0, 0.5)
    levels = ("lse",), ("entropy",), ("sum_logits",), ("log_sum_sq_probs",)
    yes_no = (True, False)
    for names, head, writes, sums_aligned in itertools.product(levels, heads, yes_no, (None, *yes_no)):
        for C, H, V in ((1, 16, 64), (5, 16, 72), (33, 24, 72)):
            others = itertools.product((None, *yes_no), (0, 1), (-100, 16), (0, 8))
            for bias_aligned, first, ignored, more in others:
                hidden, weight = torch.ones(C, H + more).bfloat16()[:, :H], torch.ones(V, H).bfloat16()
                stats = allocate_stats(names, first + C, torch.float32, hidden.device)[first : first + C]
                bias = None if bias_aligned is None else cut(torch.ones(V), aligned=bias_aligned)
                sums = None if sums_aligned is None else cut(torch.ones(H + 1), aligned=sums_aligned)
                gradient = torch.empty(C, -(-V // 8) * 8).bfloat16()[:, :V] if writes else None
                targets = torch.zeros(C, dtype=torch.int64)
                options = {"head": head, "bias": bias, "ignore_index": ignored, "sums": sums}
                fused.read(hidden, weight, targets, stats, gradient=gradient, **options)
    print(f"{len(bound)} bound launches, {len(seen)} specializations")


main()
