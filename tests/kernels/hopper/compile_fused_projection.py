"""Every specialization of the products with an epilogue, and a script that compiles them for Hopper.

python -m tests.kernels.hopper.compile_fused_projection cuda 90        # then numbers, or all
"""

import itertools
import sys
from typing import NamedTuple

from tests.kernels.compile_kernels import heads
from tests.kernels.offline import Source, compile_sources, jitted

PROGRAMS = 132  # multiprocessors of an H200
GROUP = 16  # row tiles of a group at H = 4,096


class Variant(NamedTuple):
    kernel: str
    flags: tuple[tuple[str, bool], ...]


def variants() -> list[Variant]:
    """What the launchers can ask for."""
    actual = []
    for transform in heads():
        softcap = transform["HAS_SOFTCAP"]
        # Only a soft cap's logits are added up one by one.
        levels = ((False, False, False), (True, False, False), (True, softcap, False), (True, softcap, True))
        for (extra, total, squares), write in itertools.product(dict.fromkeys(levels), (False, True)):
            flags = transform | {"EXTRA": extra, "SUM": total, "SQUARES": squares, "WRITE": write}
            actual += [Variant("read_kernel", (*flags.items(), ("AGAIN", again))) for again in (False, True)]
            if not transform["HAS_BIAS"]:
                del flags["HAS_BIAS"]
                actual += [
                    Variant("finish_kernel", (*flags.items(), ("AGAIN", again))) for again in (False, True)
                ]
        for extra, weights in ((False, False), (True, False), (True, True)):
            flags = transform | {"EXTRA": extra, "HAS_WEIGHTS": weights}
            actual.append(Variant("gradient_kernel", tuple(flags.items())))
        sums = (False,) if softcap else (False, True)
        actual += [Variant("shift_kernel", (*transform.items(), ("SUMS", each))) for each in sums]
    return actual


def source(variant: Variant) -> Source:
    from logitless.kernels.head import row_partials_triton
    from logitless.kernels.hopper import fused_gradient_triton, fused_projection_triton
    from logitless.kernels.hopper.product_tiles_triton import BLOCK_K, BLOCK_M, BLOCK_N, TILE, WARPS

    modules = fused_projection_triton, fused_gradient_triton, row_partials_triton
    actual = [getattr(module, variant.kernel, None) for module in modules]
    kernel = jitted(next(kernel for kernel in actual if kernel is not None))
    product = "x" in kernel.arg_names
    constants = dict(variant.flags)
    if product:
        constants |= TILE | {"GROUP": GROUP, "PROGRAMS": PROGRAMS}
    constants |= {"BLOCK": fused_projection_triton.BLOCK_H} if variant.kernel == "shift_kernel" else {}
    if variant.kernel == "finish_kernel":
        constants |= {"ROWS": fused_projection_triton.ROWS, "TILES": fused_projection_triton.TILES}
        constants |= {"BM": BLOCK_M, "BN": BLOCK_N}
    tiles = {"x": (BLOCK_M, BLOCK_K), "w": (BLOCK_N, BLOCK_K), "grad": (BLOCK_M, BLOCK_N // 2)}

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in tiles:
            return "tensordesc<bf16[{},{}]>".format(*tiles[name])
        if name in ("x_ptr", "w_ptr", "grad_ptr"):
            return "*bf16"
        if name.endswith("_ptr"):
            return {"targets_ptr": "*i64", "again_ptr": "*i32"}.get(name, "*fp32")
        return "fp32" if name in ("gain", "squash", "cap") else "i32"

    signature = {name: type_of(name) for name in kernel.arg_names}
    assert set(constants) <= set(signature), variant
    return Source(kernel, signature, constants, {}, WARPS if product else 4)


if __name__ == "__main__":
    compile_sources(variants(), source, sys.argv[1:])
