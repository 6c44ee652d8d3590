"""Every specialization of the kernels that their launchers can ask for, and a script that compiles them for
one target.

    python -m tests.kernels.compile_kernels cuda 90            # or: hip gfx942; then numbers, or all

No GPU is needed. Which Triton compiles is decided by PYTHONPATH, see `offline.py`.
"""

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests.kernels.offline import Source, compile_sources, jitted

BLOCK, LONG_BLOCK = 1024, 2048
SCALE_BLOCK, COMBINE_BLOCK, SUM_BLOCK = 2048, 128, 2048
TYPES = ("fp32", "bf16", "fp16")
# Dtype of the logits and of the products (weight, hidden states, gradient): the latter may be narrower.
PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"))


INTEGERS = (
    "numel",
    "y_numel",
    "y_columns",
    "n",
    "start",
    "width",
    "V",
    "common",
    "ignore_index",
    "ignored",
    "columns",
    "count",
    "length",
    "bounds",
    "N",
    "write",
    "rows",
    "k",
    "H",
    "C",
    "rank",
    "ranks",
)
INT64 = (
    "columns_ptr",
    "targets_ptr",
    "labels_ptr",
    "teacher_rows_ptr",
    "ids_ptr",
    "order_ptr",
    "starts_ptr",
    "found_ptr",
    "counts_ptr",
    "masked_ptr",
    "bounds_ptr",
    "own_ptr",
)
INT32, INT8 = ("scratch_ptr", "rows_ptr", "tokens_ptr"), ("wrong_ptr", "marks_ptr", "others_ptr", "mask_ptr")
SELECT_TILE, SELECT_BLOCK, SELECT_WARPS = 64, 2048, 8
SLOTS, RUN_SLOTS, RUN_BLOCK, COMPARED = 8, 2, 2048, 64
READ_SLOTS = 64
# Kernels with one warp a program, which reads few numbers.
ONE_WARP = ("picked_logits_kernel", "set_statistics_kernel", "set_gradient_kernel")
FEWEST_SLOTS, MOST_SLOTS = 16, 256
MARK_BLOCK, COUNTED, POSITIONS, POSITION_SLOTS = 1024, 4096, 16, 64


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
        flags["BLOCK"] = BLOCK if extra else LONG_BLOCK
        # With the maxima of tiles, for the k best.
        tiles = {0, SELECT_TILE} if extra and not (total or write) else {0}
        for tile, head in itertools.product(tiles, heads()):
            flags["TILE"] = tile
            yield combination("row_kernel", {"logits": logits, "grad": gradient}, flags | head)


def gradient_combinations() -> Iterator[Combination]:
    for (logits, product), (extra, weights) in itertools.product(
        PAIRS, ((False, False), (True, False), (True, True))
    ):
        for head in heads():
            flags = {"EXTRA": extra, "HAS_WEIGHTS": weights, "ALIAS": logits != product, "BLOCK": BLOCK}
            yield combination("logits_gradient_kernel", {"logits": logits, "grad": product}, flags | head)


# MODE with OVERLAP, ROWS and MASS, of DistillationLoss, where total variation alone is a function of the
# acceptance rate, and of SpeculatorLoss.
DISTILLATION = (*itertools.product(range(4), ((False, False, False),)), (4, (True, False, False)))
OVERLAPS = (*DISTILLATION, *itertools.product(range(7), ((True, True, False), (True, True, True))))


def divergence_combinations() -> Iterator[Combination]:
    for (logits, product), (mode, overlap), plain, split in itertools.product(
        PAIRS, OVERLAPS, *[(False, True)] * 2
    ):
        flags = {"MODE": mode, "PLAIN": plain, "SPLIT": split, "ALIAS": logits != product, "BLOCK": BLOCK}
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
            "BLOCK": BLOCK,
        }
        yield combination("shard_kernel", {"student": logits, "teacher": logits, "grad": gradient}, flags)


def scale_combinations() -> Iterator[Combination]:
    both = False, True
    for x, out in itertools.product(TYPES, TYPES):
        for in_place in {False, x == out}:
            # One matrix alone stands in for the other, too.
            pointers = {"x": x, "out": out, "y": x, "y_out": out}
            flags = {"PAIR": False, "IN_PLACE": in_place, "Y_IN_PLACE": in_place, "BLOCK": SCALE_BLOCK}
            yield combination("scale_all_kernel", pointers, flags)
            for two in both:
                yield combination("scale_kernel", pointers, flags | {"TWO": two})
    for x in TYPES:
        # d_hidden and d_weight, of products in x: leaves in x or in fp32, and a sum of several chunks.
        kinds = dict.fromkeys((x, "fp32"))
        # In fp16 both are summed in fp32.
        firsts = (x, "fp32") if x == "fp16" else (x,)
        for first, out, y, y_out in itertools.product(firsts, kinds, kinds, kinds):
            for in_place, y_in_place in itertools.product({False, first == out}, {False, y == y_out}):
                pointers = {"x": first, "out": out, "y": y, "y_out": y_out}
                flags = {"PAIR": True, "IN_PLACE": in_place, "Y_IN_PLACE": y_in_place, "BLOCK": SCALE_BLOCK}
                yield combination("scale_all_kernel", pointers, flags)
        # Features and d_features; in fp16 these are in fp32.
        rows = "fp32" if x == "fp16" else x
        for in_place, two in itertools.product(both, both):
            pointers = {"x": x, "out": x, "y": rows, "y_out": rows}
            flags = {"PAIR": True, "IN_PLACE": in_place, "Y_IN_PLACE": True, "BLOCK": SCALE_BLOCK}
            yield combination("scale_kernel", pointers, flags | {"TWO": two})


def sum_combinations() -> Iterator[Combination]:
    yield combination("sums_kernel", {}, {"BLOCK": SUM_BLOCK})


def select_combinations() -> Iterator[Combination]:
    for logits, bias in itertools.product(TYPES, (False, True)):
        flags = {"TILE": SELECT_TILE, "HAS_BIAS": bias}
        yield combination("tile_max_kernel", {"logits": logits}, flags | {"BLOCK": SELECT_BLOCK})
        yield combination("select_kernel", {"logits": logits}, flags | {"TILES": 16, "K": 16})
    # 64 of 151,936 ids; that takes seconds to compile.
    yield combination("select_kernel", {"logits": "bf16"}, flags | {"TILES": 4096, "K": 64})


def gathered_combinations() -> Iterator[Combination]:
    slots, run = {"BLOCK": BLOCK, "SLOTS": SLOTS}, {"BLOCK": RUN_BLOCK, "SLOTS": RUN_SLOTS}
    yield combination("first_slots_kernel", {}, {"SLOTS": COMPARED})
    yield combination("wrong_slots_kernel", {}, {"SLOTS": COMPARED})
    for x in TYPES:
        yield combination("gathered_logits_kernel", {"hidden": x, "weight": x, "out": "fp32"}, slots)
        for out in {x, "fp32"}:
            sums, pointers = slots, {"weight": x, "out": out, "base": out}
            yield combination("weighted_rows_kernel", pointers, sums | {"HAS_BASE": False})
            if out == x or x == "fp16":
                yield combination("weighted_rows_kernel", pointers, sums | {"HAS_BASE": True})
            for ragged in (False, True):
                yield combination("piece_kernel", {"hidden": x}, slots | {"RAGGED": ragged})
                for first in (False, True):
                    flags = run | {"RAGGED": ragged, "FIRST": first}
                    yield combination("run_kernel", {"hidden": x, "total": out}, flags)


def set_combinations() -> Iterator[Combination]:
    both, read = (False, True), {"SLOTS": READ_SLOTS}
    products = {"BLOCK": BLOCK, "SLOTS": SLOTS}
    for x in TYPES:
        yield combination("slot_products_kernel", {"hidden": x, "weight": x, "out": "fp32"}, products)
        for out in {x, "fp32"}:
            yield combination("slot_rows_kernel", {"weight": x, "out": out}, products)
        for head in heads():
            yield combination("picked_logits_kernel", {"logits": x}, read | head)
    for extra in both:
        yield combination("set_statistics_kernel", {}, read | {"EXTRA": extra})
    names = ("LOGPS", "LSE", "ENTROPY", "HAS_SOFTCAP")
    for flags in itertools.product(both, repeat=4):
        flags = read | dict(zip(names, flags, strict=True))
        yield combination("set_gradient_kernel", {"out": "fp32"}, flags | {"DENSE": False})
        for out in TYPES:
            yield combination("set_gradient_kernel", {"out": out}, flags | {"DENSE": True})


def target_combinations() -> Iterator[Combination]:
    for others in (0, 1, 2, 3):
        yield combination("mark_kernel", {}, {"OTHERS": others, "BLOCK": MARK_BLOCK})
    yield combination("one_per_position_kernel", {}, {"POSITIONS": POSITIONS, "SLOTS": POSITION_SLOTS})
    yield combination("mask_kernel", {}, {"WRONG": -(2**63), "BLOCK": MARK_BLOCK})
    for packed in (False, True):
        yield combination("count_kernel", {}, {"PACKED": packed, "COUNTED": COUNTED})
    for items in (False, True):
        yield combination("clamp_kernel", {}, {"HAS_ITEMS": items, "BLOCK": MARK_BLOCK})
    yield combination("shard_columns_kernel", {}, {"BLOCK": MARK_BLOCK})


def slot_combinations() -> Iterator[Combination]:
    few, both = {"K": FEWEST_SLOTS}, (False, True)
    for head in heads():
        for logits in TYPES:
            yield combination("pop_logits_kernel", {"logits": logits}, few | head)
        for extra in both:
            yield combination("slot_statistics_kernel", {}, few | head | {"EXTRA": extra})
    names = ("LOGPS", "LSE", "REST", "EXTRA", "HAS_SOFTCAP")
    for flags in itertools.product(both, repeat=5):
        yield combination("sparse_grad_kernel", {}, few | dict(zip(names, flags, strict=True)))
    for grad in TYPES:
        yield combination("scatter_kernel", {"grad": grad}, few | {"SAME": False})
    # In fp16, which holds no unnormalized exponentials, a frozen head's chunk is written in a second pass.
    yield combination("scatter_kernel", {"grad": "fp16"}, few | {"SAME": True})
    # As many as the kernels hold.
    most = {"K": MOST_SLOTS}
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
            "BLOCK": COMBINE_BLOCK,
        }
        flags |= {"WRITE": grad is not None, "HAS_SOFTCAP": softcap}
        yield combination("merge_kernel", {"grad": grad or "fp32"}, flags)


def combinations() -> list[Combination]:
    """What the launchers can ask for."""
    return [
        *row_combinations(),
        *gradient_combinations(),
        *divergence_combinations(),
        *shard_combinations(),
        *combine_combinations(),
        *scale_combinations(),
        *sum_combinations(),
        *select_combinations(),
        *gathered_combinations(),
        *set_combinations(),
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
    from logitless.kernels.head import (
        cross_entropy_triton,
        divergence_shard_triton,
        divergence_triton,
        scale_triton,
        select_triton,
        shards_triton,
        sums_triton,
        targets_triton,
    )
    from logitless.kernels.ids import gathered_triton, sets_triton, slots, slots_triton

    assert (MARK_BLOCK, COUNTED) == (targets_triton.BLOCK, targets_triton.COUNTED)
    assert (POSITIONS, POSITION_SLOTS) == (targets_triton.POSITIONS, targets_triton.SLOTS)
    assert (FEWEST_SLOTS, MOST_SLOTS) == (slots_triton.FEWEST, slots.MOST_SLOTS)
    assert (SELECT_TILE, SELECT_BLOCK) == (select_triton.TILE, select_triton.BLOCK)
    tiles = gathered_triton.SLOTS, gathered_triton.BLOCK, gathered_triton.RUN_SLOTS, gathered_triton.RUN_BLOCK
    assert (SLOTS, BLOCK, RUN_SLOTS, RUN_BLOCK) == tiles and COMPARED == gathered_triton.COMPARED
    assert (SLOTS, BLOCK, READ_SLOTS) == (sets_triton.SLOTS, sets_triton.BLOCK, sets_triton.READ)
    assert SELECT_WARPS == select_triton.SELECT_WARPS
    assert (BLOCK, LONG_BLOCK) == (cross_entropy_triton.BLOCK, cross_entropy_triton.LONG_BLOCK)
    assert (
        SCALE_BLOCK == scale_triton.BLOCK
        and SUM_BLOCK == sums_triton.BLOCK
        and COMBINE_BLOCK == shards_triton.BLOCK
        and BLOCK == divergence_triton.BLOCK
    )
    modules = (
        cross_entropy_triton,
        divergence_triton,
        divergence_shard_triton,
        gathered_triton,
        scale_triton,
        sums_triton,
        select_triton,
        sets_triton,
        shards_triton,
        slots_triton,
        targets_triton,
    )
    kernel = jitted(next(getattr(module, c.kernel) for module in modules if hasattr(module, c.kernel)))
    types, attributes = signature(kernel.arg_names, c), {}
    for i, name in enumerate(types):
        if number % 2 and (name.endswith(("_ptr", "_stride")) or name in ("V", "common", "columns")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    warps = SELECT_WARPS if c.kernel == "select_kernel" else cross_entropy_triton.WARPS
    warps = 1 if c.kernel in ONE_WARP else warps
    if dict(c.constants).get("K") == MOST_SLOTS:
        warps = slots_triton.sizes(MOST_SLOTS)["num_warps"]
    return Source(kernel, types, dict(c.constants), attributes, warps)


if __name__ == "__main__":
    compile_sources(list(enumerate(combinations())), lambda variant: source(*variant), sys.argv[1:])
