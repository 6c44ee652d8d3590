"""How many tokens belong in a chunk: the three products' time per token against the chunk size, for tuning
`plan.py`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.harness.report import write_json
from benchmarks.harness.timing import interleave, spread
from benchmarks.harness.yardstick import chunked_gemms
from benchmarks.losses.ce import Shape, inputs

CHUNKS = tuple(range(1024, 4096 + 1, 128))
QUICK_CHUNKS = (16, 32)
# Enough tokens for a few chunks of any size; the time is per token, so a longer run would only repeat them.
TOKENS = 8192


def run(
    document: dict,
    shapes: tuple[Shape, ...],
    chunks: tuple[int, ...],
    device: torch.device,
    *,
    seconds: float,
    out: Path | None,
    say: Callable[[str], None],
) -> dict:
    """Fills `document` with microseconds per token for every shape, chunk size and way to accumulate
    d_weight."""
    # The fp32 accumulation of the engine needs mm's out_dtype, which a CPU does not have.
    ways = {"overwrite": False} | ({"fp32": True} if device.type == "cuda" else {})
    document |= {"sections": [], "complete": False}
    for shape in shapes:
        say(f"{shape}: {len(chunks)} chunk sizes")
        hidden, weight, _ = inputs(shape, device, document["seed"])
        # Whole chunks only: a ragged last one would blur the comparison.
        tokens = {chunk: min(shape.N, TOKENS) // chunk * chunk for chunk in chunks if chunk <= shape.N}
        cases = {
            (chunk, way): chunked_gemms(hidden[:count], weight, chunk, fp32_d_weight=fp32)
            for chunk, count in tokens.items()
            for way, fp32 in ways.items()
        }
        times = interleave(cases, device, seconds=seconds, most=15)
        rows = [
            {
                "chunk": chunk,
                "d_weight": way,
                "tokens": tokens[chunk],
                "us_per_token": 1e3 * spread(ms)["ms"] / tokens[chunk],
            }
            | spread(ms)
            for (chunk, way), ms in times.items()
            if ms
        ]
        document["sections"].append({"shape": asdict(shape), "rows": rows})
        write_json(out, document)
        say("\n" + lines(rows, tuple(ways)) + "\n")
    document["complete"] = True
    write_json(out, document)
    return document


def lines(rows: list[dict], ways: tuple[str, ...]) -> str:
    best = {way: min(row["us_per_token"] for row in rows if row["d_weight"] == way) for way in ways}
    body = []
    for chunk in sorted({row["chunk"] for row in rows}):
        costs = {row["d_weight"]: row["us_per_token"] for row in rows if row["chunk"] == chunk}
        body.append([chunk] + [f"{cost:.3f} ({cost / best[way] - 1:+.1%})" for way, cost in costs.items()])
    return tabulate(
        body,
        ["chunk", *(f"us/token, d_weight {way}" for way in ways)],
        disable_numparse=True,
        stralign="right",
    )
