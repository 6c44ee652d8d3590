"""Other tile sizes for the launchers of the layer operators, to choose those of the library by."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from unittest import mock

import torch

from benchmarks.harness.registry import one_line
from benchmarks.layers.comparison import backward_us, copy_us, forward_us
from benchmarks.layers.operators import Operator


def sweep(operator: Operator, device: torch.device, deadline: float, say: Callable[[str], None]) -> None:
    """Times our operator with every tile and prints the best."""
    for direction, time_us in (("forward", forward_us), ("backward", backward_us)):
        copy = copy_us(getattr(operator, f"{direction}_bytes"), device)
        found = {"as it is": time_us(operator, operator.ours, device)}
        for label, patches in variants(operator, direction):
            if time.perf_counter() > deadline:
                break
            with ExitStack() as stack:
                for each in patches:
                    stack.enter_context(each)
                try:
                    found[label] = time_us(operator, operator.ours, device)
                except Exception as error:  # a tile that does not fit the device is no reason to stop
                    say(f"  {label}: {one_line(error)[:90]}")
        now = found["as it is"]
        say(f"{operator.name} {direction}, {len(found)} tiles: copy {copy:.1f} us, as it is {now:.1f} us")
        for label in sorted(found, key=found.get)[:6]:
            say(f"    {found[label]:7.1f} us {copy / found[label]:4.0%}  {label}")


def variants(operator: Operator, direction: str) -> Iterator[tuple[str, list]]:
    """Other tiles for an operator's launcher: what to print, and the patches that bring it about."""
    from logitless.layers import gated_triton, norm_triton, qk_norm_rope_triton, rope_triton

    patch = mock.patch.object
    if operator.name.startswith("gated"):
        for block, warps in product((512, 1024, 2048, 4096), (2, 4, 8)):
            yield (
                f"BLOCK {block} warps {warps}",
                [patch(gated_triton, "BLOCK", block), patch(gated_triton, "WARPS", warps)],
            )
    elif "rope" in operator.name:
        normalized = operator.name.startswith("qk") and direction == "backward"
        launch_constants = rope_triton.launch_constants

        def with_warps(warps):
            return lambda *args: {**launch_constants(*args), "num_warps": warps}

        for warps, programs, stages in product(
            (1, 2, 4, 8), (1, 2, 4, 8) if normalized else (0,), (1, 2, 3) if normalized else (0,)
        ):
            patches = [patch(rope_triton, "launch_constants", with_warps(warps))]
            if normalized:
                own = {
                    "SHORT_WARPS": warps,
                    "LONG_WARPS": warps,
                    "programs_per_multiprocessor": lambda _, n=programs: n,
                    "choose_num_stages": lambda _, n=stages: n,
                }
                patches = [patch(qk_norm_rope_triton, name, value) for name, value in own.items()]
            yield f"warps {warps}" + (f" programs {programs} stages {stages}" if normalized else ""), patches
    else:
        columns = operator.inputs(0)["x"].shape[-1]
        block = 1 << (columns - 1).bit_length()
        rows = [r for r in (1, 2, 4, 8, 16, 32) if 1024 <= r * block <= max(8192, block)]
        if direction == "forward":
            for r, warps in product(rows, (1, 2, 4, 8, 16)):
                tile = {"ROWS": r, "BLOCK": block, "num_warps": warps}
                if 8 <= r * block / (32 * warps) <= 64:
                    yield (
                        f"rows {r} warps {warps}",
                        [patch(norm_triton, "forward_tile", lambda _, t=tile: t)],
                    )
        else:
            block, rest = norm_triton.split_columns(columns)
            width = block + rest
            current_tile, _ = norm_triton.backward_tile(columns, 4)
            rows = [r for r in (1, 2, 4, 8, 16) if 1024 <= r * block <= max(4096, block)]
            for r, warps, stages, programs in product(rows, (1, 2, 4, 8, 16, 32), (1, 3, 4), (1, 2, 3, 4, 8)):
                tile = current_tile | {"ROWS": r, "num_warps": warps, "STAGES": stages}
                if 8 <= r * width / (32 * warps) <= 40 and 4 <= warps * programs <= 32:
                    label = f"rows {r} warps {warps} stages {stages} programs {programs}"
                    yield label, [patch(norm_triton, "backward_tile", lambda *_, t=tile, p=programs: (t, p))]
