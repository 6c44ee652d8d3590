"""Every specialization of the kernels that their launchers can ask for, and a script that compiles them for one target.

    python -m tests.kernels.compile_kernels cuda 90        # or: hip gfx942

No GPU is needed. Which Triton compiles is decided by PYTHONPATH, see `test_compile.py`.
"""

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 1024
SCALE_BLOCKS = tuple(2**i for i in range(11, -1, -1))
TYPES = ("fp32", "bf16", "fp16")
# Dtype of the logits and of the products (weight, hidden states, gradient): the latter may be narrower.
PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"))


class Combination(NamedTuple):
    kernel: str
    pointers: tuple[tuple[str, str], ...]  # dtypes by argument; those not named are unused or always fp32
    constants: tuple[tuple[str, bool | int], ...]


def combination(kernel: str, pointers: dict[str, str | None], constants: dict[str, bool | int]) -> Combination:
    named = tuple(sorted((name, dtype) for name, dtype in pointers.items() if dtype is not None))
    return Combination(kernel, named, tuple(sorted(constants.items())))


def head_and_weights(product: str, weighted: bool, every: bool) -> Iterator[tuple[dict, dict]]:
    """Dtypes of bias and class weights, and the flags of the head. Autocast leaves an fp32 bias as it is."""
    biases = dict.fromkeys((None, product, "fp32")) if every else (None, product)
    weights = (TYPES if every else TYPES[:1]) if weighted else (None,)
    for softcap, bias, class_weights in itertools.product((False, True), biases, weights):
        yield {"bias": bias, "class_weights": class_weights}, {"HAS_BIAS": bias is not None, "HAS_SOFTCAP": softcap, "BLOCK": BLOCK}


def row_combinations(every: bool) -> Iterator[Combination]:
    statistics = ((False, False), (True, False), (True, True))  # EXTRA, SUM
    for (logits, product), (extra, total), write in itertools.product(PAIRS, statistics, (False, True)):
        # fp16 holds no unnormalized exponentials; a loss of the sum of logits has a gradient of another shape.
        if write and (product == "fp16" or total):
            continue
        gradient = product if write else logits
        for pointers, flags in head_and_weights(product, total, every):
            flags |= {"EXTRA": extra, "SUM": total, "WRITE": write, "ALIAS": gradient != logits}
            yield combination("row_kernel", pointers | {"logits": logits, "grad": gradient}, flags)


def gradient_combinations(every: bool) -> Iterator[Combination]:
    for (logits, product), extra in itertools.product(PAIRS, (False, True)):
        for pointers, flags in head_and_weights(product, extra, every):
            flags |= {"EXTRA": extra, "ALIAS": logits != product}
            yield combination("logits_gradient_kernel", pointers | {"logits": logits, "grad": product}, flags)


def scale_combinations(every: bool) -> Iterator[Combination]:
    for x, out, block in itertools.product(TYPES, TYPES, SCALE_BLOCKS if every else SCALE_BLOCKS[:1]):
        yield combination("scale_kernel", {"x": x, "out": out}, {"BLOCK": block})


def combinations(every: bool = True) -> list[Combination]:
    """What the launchers can ask for; or only, of the bias, the dtype of the products, of class weights fp32 and of `scale` one block."""
    return list(dict.fromkeys((*row_combinations(every), *gradient_combinations(every), *scale_combinations(every))))


def compiled() -> list[Combination]:
    """What is compiled: every combination of the constants with the dtypes of what is streamed. Unusual dtypes of a bias or of class
    weights, and other block sizes of `scale`, each meet every other choice at least once; in full they would double the time."""
    kept, met = [], set()
    usual = combinations(every=False)
    for number, c in enumerate(dict.fromkeys((*usual, *combinations()))):
        choices = set(itertools.combinations((("kernel", c.kernel), *c.pointers, *c.constants), 2))
        if number < len(usual) or not choices <= met:
            met |= choices
            kept.append(c)
    return kept


def signature(argument_names: list[str], c: Combination) -> dict[str, str]:
    dtypes, constants = dict(c.pointers), dict(c.constants)

    def dtype(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name == "targets_ptr":
            return "*i64"
        if name.endswith("_ptr"):
            return "*" + dtypes.get(name.removesuffix("_ptr"), "fp32")
        return "fp32" if name in ("gain", "squash", "cap") else "i32"

    return {name: dtype(name) for name in argument_names}


def compile_all(backend: str, architecture: str) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from logitless.kernels import cross_entropy_triton, scale_triton

    assert BLOCK == cross_entropy_triton.BLOCK and SCALE_BLOCKS[0] == scale_triton.BLOCK
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget(backend, architecture, 64)
    binary = "cubin" if backend == "cuda" else "hsaco"
    wanted = compiled()
    for number, c in enumerate(wanted):
        kernel = getattr(cross_entropy_triton, c.kernel, None) or getattr(scale_triton, c.kernel)
        types = signature(kernel.arg_names, c)
        # Every other one as a launch with 16-byte aligned pointers, strides and vocabulary is specialized, and one as a launch without.
        aligned = [i for i, name in enumerate(types) if name.endswith(("_ptr", "_stride")) or name in ("V", "columns")]
        attributes = {(i,): [["tt.divisibility", 16]] for i in aligned} if number % 2 else {}
        warps = getattr(cross_entropy_triton, "WARPS", 4)
        result = triton.compile(ASTSource(kernel, types, dict(c.constants), attributes), target=target, options={"num_warps": warps})
        assert result.asm[binary], c
    print(f"triton {triton.__version__}: compiled {len(wanted)} kernels for {backend} {architecture}")
    return len(wanted)


if __name__ == "__main__":
    compile_all(*sys.argv[1:])
