"""Every specialization of the kernels that their launchers can ask for, and a script that compiles them for
one target.

    python -m tests.kernels.compile_kernels cuda 90            # or: hip gfx942; then numbers, or all

No GPU is needed. Which Triton compiles is decided by PYTHONPATH, see `offline.py`.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from logitless.kernels.head import (
    cross_entropy_triton,
    divergence_triton,
    scale_triton,
    select_triton,
    shards_triton,
    split_rows_triton,
    targets_triton,
)
from logitless.kernels.ids import distinct_triton, gathered_triton, sets_triton, slots, slots_triton
from tests.kernels.offline import Source, compile_sources, jitted, kernel_modules

TYPES = ("fp32", "bf16", "fp16")
# Dtype of the logits and of the products (weight, hidden states, gradient): the latter may be narrower.
PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"))


INTEGERS = set(
    "numel y_numel y_columns n start width V common ignore_index ignored columns count length bounds N write"
    " rows parts k H C rank ranks S M total most_gathered kind size".split()
)
INT64 = set(
    "columns_ptr targets_ptr labels_ptr teacher_rows_ptr ids_ptr order_ptr starts_ptr found_ptr counts_ptr"
    " masked_ptr words_ptr bounds_ptr own_ptr keys_ptr ordinals_ptr lengths_ptr offsets_ptr numbers_ptr"
    " begins_ptr owns_ptr kinds_ptr tallies_ptr places_ptr ends_ptr".split()
)
INT32 = {"arrivals_ptr", "slot_ids_ptr", "scratch_ptr", "rows_ptr", "tokens_ptr"}
INT8 = {"first_ptr", "missing_ptr", "wrong_ptr", "marks_ptr", "others_ptr"}
# Kernels with one warp a program, which reads few numbers.
ONE_WARP = ("picked_logits_kernel", "set_statistics_kernel", "set_gradient_kernel")


class Combination(NamedTuple):
    kernel: str
    pointers: tuple[tuple[str, str], ...]  # dtypes by argument; those not named are fp32
    constants: tuple[tuple[str, bool | int], ...]


def combination(kernel: str, pointers: dict[str, str], constants: dict[str, bool | int]) -> Combination:
    return Combination(kernel, tuple(sorted(pointers.items())), tuple(sorted(constants.items())))


def heads() -> Iterator[dict]:
    for softcap, bias in itertools.product((False, True), repeat=2):
        yield {"HAS_BIAS": bias, "HAS_SOFTCAP": softcap}


def row_combinations() -> Iterator[Combination]:
    statistics = (
        (False, False, False, False),
        (True, False, False, False),
        (True, True, False, False),
        (True, True, False, True),
        (True, True, True, False),
    )  # EXTRA, SUM, SQUARES, HAS_WEIGHTS
    for (logits, product), (extra, total, squares, weights), write in itertools.product(
        PAIRS, statistics, (False, True)
    ):
        # fp16 holds no unnormalized exponentials; a loss of the weighted sum of logits has a gradient of
        # another shape.
        if write and (product == "fp16" or weights):
            continue
        gradient = product if write else logits
        flags = {
            "EXTRA": extra,
            "SUM": total,
            "SQUARES": squares,
            "HAS_WEIGHTS": weights,
            "WRITE": write,
            "ALIAS": gradient != logits,
        }
        flags["BLOCK"] = cross_entropy_triton.BLOCK if extra else cross_entropy_triton.LONG_BLOCK
        # With the maxima of tiles, for the k best.
        tiles = {0, select_triton.TILE} if extra and not (total or write) else {0}
        for tile, transform in itertools.product(tiles, heads()):
            flags["TILE"] = tile
            yield combination("row_kernel", {"logits": logits, "grad": gradient}, flags | transform)


def gradient_combinations() -> Iterator[Combination]:
    for (logits, product), (extra, weights) in itertools.product(
        PAIRS, ((False, False), (True, False), (True, True))
    ):
        for transform in heads():
            flags = transform | {"EXTRA": extra, "HAS_WEIGHTS": weights, "ALIAS": logits != product}
            flags["BLOCK"] = cross_entropy_triton.BLOCK
            factors = [(0, False)]
            if logits == product and not transform["HAS_BIAS"]:  # of given logits
                factors += itertools.product((1, 2), (False, True))
            for upstream, unless_one in factors:
                flags |= {"UPSTREAM": upstream, "UNLESS_ONE": unless_one}
                yield combination("logits_gradient_kernel", {"logits": logits, "grad": product}, flags)


def split_combinations() -> Iterator[Combination]:
    for dtype, (total, weights), softcap, V in itertools.product(
        TYPES, ((False, False), (True, False), (True, True)), (False, True), (4096, 151_936)
    ):
        length = split_rows_triton.length_of(split_rows_triton.LENGTH, has_softcap=softcap)
        parts = -(-V // length)
        flags = {"HAS_SOFTCAP": softcap, "HAS_WEIGHTS": weights, "SUM": total, "PARTS": parts}
        flags |= {"PADDED": 1 << (parts - 1).bit_length(), "PUBLISH": True, "FINISH": True}
        flags["LENGTH"] = length
        flags["PACKED"] = split_options(dtype, flags)["PACKED"]
        yield combination("split_rows_kernel", {"logits": dtype, "grad": dtype}, flags)


def split_options(dtype: str, flags: Mapping) -> dict:
    softcap, weights, total = (flags[name] for name in ("HAS_SOFTCAP", "HAS_WEIGHTS", "SUM"))
    bytes_each = 4 if dtype == "fp32" else 2
    return split_rows_triton.options_of(bytes_each, has_softcap=softcap, has_weights=weights, has_sum=total)


# MODE with OVERLAP, ROWS and MASS, of DistillationLoss, where total variation alone is a function of the
# acceptance rate, and of SpeculatorLoss.
DISTILLATION = (*itertools.product(range(4), ((False, False, False),)), (4, (True, False, False)))
OVERLAPS = (*DISTILLATION, *itertools.product(range(7), ((True, True, False), (True, True, True))))


def divergence_combinations() -> Iterator[Combination]:
    for (logits, product), (mode, overlap), plain, split in itertools.product(
        PAIRS, OVERLAPS, *[(False, True)] * 2
    ):
        flags = {"MODE": mode, "PLAIN": plain, "SPLIT": split, "ALIAS": logits != product}
        flags["BLOCK"] = divergence_triton.BLOCK
        flags |= dict(zip(("OVERLAP", "ROWS", "MASS"), overlap, strict=True))
        yield combination("divergence_kernel", {"student": logits, "teacher": logits, "grad": product}, flags)


def shard_combinations() -> Iterator[Combination]:
    overlaps = [(mode, overlap[:2]) for mode, overlap in DISTILLATION]
    overlaps += itertools.product(range(7), ((True, True),))
    for (logits, product), (mode, (overlap, rows)), plain, (write, hard) in itertools.product(
        PAIRS, overlaps, (False, True), ((False, False), (True, False), (True, True))
    ):
        gradient = product if write else logits
        flags = {
            "MODE": mode,
            "PLAIN": plain,
            "HARD": hard,
            "WRITE": write,
            "ALIAS": gradient != logits,
            "OVERLAP": overlap,
            "ROWS": rows,
            "BLOCK": divergence_triton.BLOCK,
        }
        yield combination("shard_kernel", {"student": logits, "teacher": logits, "grad": gradient}, flags)


# Dtype of `supervised_ptr` and GUARD. Without a guard, the kernel gets the factor in its place; the count of
# several heads is a bool.
UNGUARDED, COUNT = ("fp32", scale_triton.NONE.value), ("i64", scale_triton.ALL.value)
SOME, ROWS = ("i8", scale_triton.ALL.value), ("i8", scale_triton.ROWS.value)
# Of d_hidden and d_weight, and of d_weight and d_bias.
GUARDS = ((UNGUARDED, UNGUARDED), (ROWS, UNGUARDED), (ROWS, COUNT), (COUNT, COUNT))


def scale_combinations() -> Iterator[Combination]:
    both, block = (False, True), {"BLOCK": scale_triton.BLOCK}
    for x, out in itertools.product(TYPES, TYPES):
        for in_place in {False, x == out}:
            # A call with a single matrix passes it as the other matrix as well.
            pointers = {"x": x, "out": out, "y": x, "y_out": out}
            flags = {"PAIR": False, "IN_PLACE": in_place, "Y_IN_PLACE": in_place} | block
            for kind, guard in (UNGUARDED, COUNT, SOME, ROWS):
                guards = {"supervised": kind, "y_supervised": kind}
                yield combination(
                    "scale_all_kernel", pointers | guards, flags | {"GUARD": guard, "Y_GUARD": guard}
                )
            for two in both:
                yield combination("scale_kernel", pointers, flags | {"TWO": two})
    for x in TYPES:
        # d_hidden and d_weight, of products in x: leaves in x or in fp32, and a sum of several chunks.
        kinds = dict.fromkeys((x, "fp32"))
        # In fp16 both are summed in fp32.
        firsts = (x, "fp32") if x == "fp16" else (x,)
        for first, out, y, y_out in itertools.product(firsts, kinds, kinds, kinds):
            for in_place, y_in_place, ((kind, guard), (y_kind, y_guard)) in itertools.product(
                {False, first == out}, {False, y == y_out}, GUARDS
            ):
                pointers = {"x": first, "out": out, "y": y, "y_out": y_out}
                pointers |= {"supervised": kind, "y_supervised": y_kind}
                flags = {"PAIR": True, "IN_PLACE": in_place, "Y_IN_PLACE": y_in_place} | block
                yield combination("scale_all_kernel", pointers, flags | {"GUARD": guard, "Y_GUARD": y_guard})
        # Features and d_features; in fp16 these are in fp32.
        rows = "fp32" if x == "fp16" else x
        for in_place, two in itertools.product(both, both):
            pointers = {"x": x, "out": x, "y": rows, "y_out": rows}
            flags = {"PAIR": True, "IN_PLACE": in_place, "Y_IN_PLACE": True} | block
            yield combination("scale_kernel", pointers, flags | {"TWO": two})
            if x == "bf16":  # product 2 is in fp32 until the row factors are applied
                wide = pointers | {"y": "fp32"}
                yield combination("scale_kernel", wide, flags | {"Y_IN_PLACE": False, "TWO": two})


def select_combinations() -> Iterator[Combination]:
    for logits, bias in itertools.product(TYPES, (False, True)):
        flags = {"TILE": select_triton.TILE, "HAS_BIAS": bias}
        yield combination("tile_max_kernel", {"logits": logits}, flags | {"BLOCK": select_triton.BLOCK})
        yield combination("select_kernel", {"logits": logits}, flags | {"TILES": 16, "K": 16})
    # 64 of 151,936 ids; that takes seconds to compile.
    yield combination("select_kernel", {"logits": "bf16"}, flags | {"TILES": 4096, "K": 64})


def gathered_combinations() -> Iterator[Combination]:
    slot = {"BLOCK": gathered_triton.BLOCK, "SLOTS": gathered_triton.SLOTS}
    run = {"BLOCK": gathered_triton.RUN_BLOCK, "SLOTS": gathered_triton.RUN_SLOTS}
    yield combination("first_slots_kernel", {}, {"SLOTS": gathered_triton.COMPARED})
    yield combination("wrong_slots_kernel", {}, {"SLOTS": gathered_triton.COMPARED})
    for x in TYPES:
        yield combination("gathered_logits_kernel", {"hidden": x, "weight": x, "out": "fp32"}, slot)
        for out in {x, "fp32"}:
            pointers = {"weight": x, "out": out, "base": out}
            yield combination("weighted_rows_kernel", pointers, slot | {"HAS_BASE": False})
            if out == x or x == "fp16":
                yield combination("weighted_rows_kernel", pointers, slot | {"HAS_BASE": True})
            for ragged in (False, True):
                yield combination("piece_kernel", {"hidden": x}, slot | {"RAGGED": ragged})
                for first in (False, True):
                    flags = run | {"RAGGED": ragged, "FIRST": first}
                    yield combination("run_kernel", {"hidden": x, "total": out}, flags)


def set_combinations() -> Iterator[Combination]:
    both, read = (False, True), {"SLOTS": sets_triton.READ}
    products = {"BLOCK": sets_triton.BLOCK, "SLOTS": sets_triton.SLOTS}
    for x in TYPES:
        yield combination("slot_products_kernel", {"hidden": x, "weight": x, "out": "fp32"}, products)
        for out in {x, "fp32"}:
            yield combination("slot_rows_kernel", {"weight": x, "out": out}, products)
        for transform in heads():
            yield combination("picked_logits_kernel", {"logits": x}, read | transform)
    for extra in both:
        yield combination("set_statistics_kernel", {}, read | {"EXTRA": extra})
    names = ("LOGPS", "LSE", "ENTROPY", "HAS_SOFTCAP")
    for flags in itertools.product(both, repeat=4):
        flags = read | dict(zip(names, flags, strict=True))
        yield combination("set_gradient_kernel", {"out": "fp32"}, flags | {"DENSE": False})
        for out in TYPES:
            yield combination("set_gradient_kernel", {"out": out}, flags | {"DENSE": True})


def distinct_combinations() -> Iterator[Combination]:
    block = {"BLOCK": distinct_triton.BLOCK}
    yield combination("first_kernel", {}, block)
    for flag in (False, True):
        yield combination("keys_kernel", {}, block | {"ADD_TARGETS": flag})
        yield combination("rows_kernel", {}, block | {"CERTAIN_ROWS": flag})
        yield combination("slots_kernel", {}, block | {"EVERY": flag})


def target_combinations() -> Iterator[Combination]:
    for others in (0, 1, 2, 3):
        yield combination("mark_kernel", {}, {"OTHERS": others, "BLOCK": targets_triton.BLOCK})
    yield combination(
        "one_per_position_kernel", {}, {"POSITIONS": targets_triton.POSITIONS, "SLOTS": targets_triton.SLOTS}
    )
    for mask in ("i8", "i64", "fp64", *TYPES):
        yield combination("mask_kernel", {"mask": mask}, {"WRONG": -(2**63), "BLOCK": targets_triton.BLOCK})
    for packed in (False, True):
        yield combination("count_kernel", {}, {"PACKED": packed, "COUNTED": targets_triton.COUNTED})
    yield combination("count_targets_kernel", {}, {"COUNTED": targets_triton.COUNTED})
    for items in (False, True):
        flags = {"HAS_ITEMS": items, "HAS_SUPERVISED": not items, "BLOCK": targets_triton.BLOCK}
        yield combination("clamp_kernel", {}, flags)
        flags = {"HAS_ITEMS": items, "BLOCK": targets_triton.BLOCK}
        yield combination("clean_kernel", {"supervised": "i8"}, flags)
    yield combination("shard_columns_kernel", {}, {"BLOCK": targets_triton.BLOCK})


def slot_combinations() -> Iterator[Combination]:
    few, both = {"K": slots_triton.FEWEST}, (False, True)
    for transform in heads():
        for logits in TYPES:
            yield combination("pop_logits_kernel", {"logits": logits}, few | transform)
        for extra in both:
            yield combination("slot_statistics_kernel", {}, few | transform | {"EXTRA": extra})
    names = ("LOGPS", "LSE", "REST", "EXTRA", "HAS_SOFTCAP")
    for flags in itertools.product(both, repeat=5):
        yield combination("sparse_grad_kernel", {}, few | dict(zip(names, flags, strict=True)))
    for grad in TYPES:
        yield combination("scatter_kernel", {"grad": grad}, few | {"SAME": False})
    # In fp16, which holds no unnormalized exponentials, a frozen head's chunk is written in a second pass.
    yield combination("scatter_kernel", {"grad": "fp16"}, few | {"SAME": True})
    # As many as the kernels hold.
    most = {"K": slots.MOST_SLOTS}
    everything = dict.fromkeys(names, True)
    yield combination("pop_logits_kernel", {"logits": "bf16"}, most | {"HAS_BIAS": True, "HAS_SOFTCAP": True})
    flags = {"HAS_BIAS": True, "HAS_SOFTCAP": True, "EXTRA": True}
    yield combination("slot_statistics_kernel", {}, most | flags)
    yield combination("sparse_grad_kernel", {}, most | everything)
    yield combination("scatter_kernel", {"grad": "bf16"}, most | {"SAME": False})


def combine_combinations() -> Iterator[Combination]:
    # EXTRA, SUM, SQUARES, NUMBERS
    levels = (
        (False, False, False, 3),
        (True, False, False, 5),
        (True, True, False, 6),
        (True, True, True, 7),
    )
    # As for row_kernel, fp16 holds no unnormalized exponentials.
    writes = ((None, False), *itertools.product(("fp32", "bf16"), (False, True)))
    for (extra, total, squares, numbers), (grad, softcap) in itertools.product(levels, writes):
        flags = {
            "EXTRA": extra,
            "SUM": total,
            "SQUARES": squares,
            "STATISTICS": numbers,
            "BLOCK": shards_triton.BLOCK,
        }
        flags |= {"WRITE": grad is not None, "HAS_SOFTCAP": softcap}
        yield combination("merge_kernel", {"grad": grad or "fp32"}, flags)


def combinations() -> list[Combination]:
    """What the launchers can ask for."""
    return [
        *row_combinations(),
        *gradient_combinations(),
        *split_combinations(),
        *divergence_combinations(),
        *shard_combinations(),
        *combine_combinations(),
        *scale_combinations(),
        *select_combinations(),
        *gathered_combinations(),
        *set_combinations(),
        *distinct_combinations(),
        *slot_combinations(),
        *target_combinations(),
    ]


def signature(argument_names: list[str], c: Combination) -> dict[str, str]:
    dtypes, constants = dict(c.pointers), dict(c.constants)

    def dtype(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in INT64:
            return "*i64"
        if name in INT32:
            return "*i32"
        if name in INT8:
            return "*i8"
        if name.endswith("_ptr"):
            return "*" + dtypes.get(name.removesuffix("_ptr"), "fp32")
        return "i32" if name.endswith("_stride") or name in INTEGERS else "fp32"

    return {name: dtype(name) for name in argument_names}


def source(number: int, c: Combination) -> Source:
    """Every other one as a launch with 16-byte aligned pointers, strides and vocabulary is specialized, and
    one as a launch without."""
    kernel = jitted(getattr(kernel_modules()[c.kernel], c.kernel))
    types, attributes = signature(kernel.arg_names, c), {}
    for i, name in enumerate(types):
        if number % 2 and (name.endswith(("_ptr", "_stride")) or name in ("V", "common", "columns")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    warps = select_triton.SELECT_WARPS if c.kernel == "select_kernel" else cross_entropy_triton.WARPS
    warps = 1 if c.kernel in ONE_WARP else warps
    constants = dict(c.constants)
    if c.kernel == "split_rows_kernel":
        options = split_options(dict(c.pointers)["logits"], constants)
        limits = options["num_warps"], options["maxnreg"], options["PACKED"]
        return Source(kernel, types, constants, attributes, *limits)
    if constants.get("K") == slots.MOST_SLOTS:
        warps = slots_triton.sizes(slots.MOST_SLOTS)["num_warps"]
    return Source(kernel, types, constants, attributes, warps)


if __name__ == "__main__":
    compile_sources(list(enumerate(combinations())), lambda variant: source(*variant), sys.argv[1:])
