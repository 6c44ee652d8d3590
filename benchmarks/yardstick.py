"""The yardstick: the three matrix products that no linear loss with a trainable head can do without.

`hidden @ weight.T`, `d_logits @ weight` and `d_logits.T @ hidden`, `2 * N * H * V` operations each, with nothing between them.
A loss that takes 1.05 times as long spends 5% on everything else.
"""

from statistics import median

import torch
from torch import Tensor

from benchmarks.timing import Case

# The largest buffer of logits the yardstick may hold. It admits N = 16,384 at V = 151,936 (5 GB) and leaves the rest of the
# card to what is measured beside it.
LARGEST_BUFFER = 8 * 2**30


def chunked_gemms(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    chunk: int,
    *,
    fp32_d_weight: bool = False,
) -> Case:
    """The three products in chunks of `chunk` tokens, into buffers allocated before the clock starts.

    Each chunk's d_weight overwrites the last, which costs less than any real loss can; `fp32_d_weight` accumulates it in fp32
    as logitless does by default (CUDA only: `out_dtype` does not exist on a CPU).
    """
    hidden, weight = hidden.detach(), weight.detach()
    (N, H), V = hidden.shape, weight.shape[0]

    def prepare():
        logits = hidden.new_empty(chunk, V)
        d_hidden = hidden.new_empty(chunk, H)
        d_weight = weight.new_empty(V, H, dtype=torch.float32 if fp32_d_weight else None)

        def run() -> None:
            for start in range(0, N, chunk):
                rows = hidden[start : start + chunk]
                tile = logits[: len(rows)]
                torch.mm(rows, weight.t(), out=tile)
                torch.mm(tile, weight, out=d_hidden[: len(rows)])
                if not fp32_d_weight:
                    torch.mm(tile.t(), rows, out=d_weight)
                elif start == 0:
                    torch.mm(tile.t(), rows, out_dtype=torch.float32, out=d_weight)
                else:
                    torch.addmm(d_weight, tile.t(), rows, out_dtype=torch.float32, out=d_weight)

        return run

    return prepare


def yardstick(hidden: Tensor, weight: Tensor) -> dict[int, Case]:
    """The products at chunks of 2,048, 4,096 and N tokens; which is fastest depends on the shape, and the fastest counts."""
    N, row_bytes = len(hidden), len(weight) * hidden.element_size()
    chunks = {chunk for chunk in (2048, 4096) if chunk < N}
    if not chunks or N * row_bytes <= LARGEST_BUFFER:
        chunks.add(N)
    return {chunk: chunked_gemms(hidden, weight, chunk) for chunk in sorted(chunks)}


def summary(times: dict[int, list[float]], N: int, H: int, V: int) -> dict:
    """The fastest chunk size's median, and what it amounts to in TFLOP/s."""
    by_chunk = {chunk: median(ms) for chunk, ms in times.items() if ms}
    chunk = min(by_chunk, key=by_chunk.__getitem__)
    tflops = 6 * N * H * V / by_chunk[chunk] / 1e9
    return {"ms": by_chunk[chunk], "chunk": chunk, "tflops": tflops, "ms_by_chunk": by_chunk}
