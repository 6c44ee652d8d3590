"""Every specialization of the kernels that their launchers can ask for, and a script that compiles them all for one target.

    python -m tests.kernels.compile_kernels cuda 90        # or: hip gfx942

No GPU is needed. Which Triton compiles is decided by PYTHONPATH, see `test_compile.py`.
"""

import itertools
import sys
from typing import NamedTuple

BLOCK = 1024
SCALE_BLOCKS = tuple(2**i for i in range(12))
TYPES = ("bf16", "fp16", "fp32")
# Dtype of the logits and of the products (weight, hidden states, gradient): the latter may be narrower.
PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"))


class Combination(NamedTuple):
    kernel: str
    pointers: tuple[tuple[str, str], ...]  # dtypes by argument; those not named are unused or always fp32
    constants: tuple[tuple[str, bool | int], ...]

    def __str__(self) -> str:
        return f"{self.kernel} {dict(self.pointers)} {dict(self.constants)}"


def combination(kernel: str, pointers: dict[str, str | None], constants: dict[str, bool | int]) -> Combination:
    named = tuple(sorted((name, dtype) for name, dtype in pointers.items() if dtype is not None))
    return Combination(kernel, named, tuple(sorted(constants.items())))


def biases(product: str) -> tuple[str | None, ...]:
    """Without, in the dtype of the products, and under autocast, which leaves an fp32 bias as it is."""
    return tuple(dict.fromkeys((None, product, "fp32")))


def class_weights(used: bool) -> tuple[str | None, ...]:
    return TYPES if used else (None,)


def row_combinations():
    statistics = ((False, False), (True, False), (True, True))  # EXTRA, SUM
    for (logits, product), (extra, total), cap, write in itertools.product(PAIRS, statistics, (False, True), (False, True)):
        # fp16 holds no unnormalized exponentials; a loss of the sum of logits has a gradient of another shape.
        if write and (product == "fp16" or total):
            continue
        gradient = product if write else logits
        for bias, weights in itertools.product(biases(product), class_weights(total)):
            pointers = {"logits": logits, "grad": gradient, "bias": bias, "class_weights": weights}
            flags = {"EXTRA": extra, "SUM": total, "WRITE": write, "ALIAS": gradient != logits}
            yield combination(
                "row_kernel", pointers, {"HAS_BIAS": bias is not None, "HAS_SOFTCAP": cap, **flags, "BLOCK": BLOCK}
            )


def gradient_combinations():
    for (logits, product), extra, cap in itertools.product(PAIRS, (False, True), (False, True)):
        for bias, weights in itertools.product(biases(product), class_weights(extra)):
            pointers = {"logits": logits, "grad": product, "bias": bias, "class_weights": weights}
            flags = {"EXTRA": extra, "ALIAS": logits != product}
            yield combination(
                "logits_gradient_kernel", pointers, {"HAS_BIAS": bias is not None, "HAS_SOFTCAP": cap, **flags, "BLOCK": BLOCK}
            )


def scale_combinations():
    for x, out, block in itertools.product(TYPES, TYPES, SCALE_BLOCKS):
        yield combination("scale_kernel", {"x": x, "out": out}, {"BLOCK": block})


def combinations() -> list[Combination]:
    return list(dict.fromkeys((*row_combinations(), *gradient_combinations(), *scale_combinations())))


def covers_pairs(found: list[Combination]) -> list[Combination]:
    """A part of `found` in which every pair of choices (dtypes of two arguments, two constants, or one of each) still occurs."""
    def choices(c: Combination) -> set:
        named = [("kernel", c.kernel), *c.pointers, *c.constants]
        return set(itertools.combinations(named, 2))
    seen, kept = set(), []
    for c in found:
        if not choices(c) <= seen:
            seen |= choices(c)
            kept.append(c)
    return kept


if __name__ == "__main__":
    import collections, time
    print(len(combinations()), collections.Counter(c.kernel for c in combinations()), len(covers_pairs(combinations())))
