"""The yardstick: the matrix products that a linear loss cannot do without.

With a trainable head they are `hidden @ weight.T`, `d_logits @ weight` and `d_logits.T @ hidden`, `2 * N * H
* V` operations each, with nothing between them; a frozen head saves the last one, a teacher or a reference
  model adds one for its own logits. A loss that
takes 1.05 times as long spends 5% on everything else.
"""

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.harness.timing import Case

# The largest buffer of logits the yardstick may hold. It admits N = 16,384 at V = 151,936 (5 GB) and leaves
# the rest of the card to what is measured beside it.
LARGEST_BUFFER = 8 * 2**30
COUNTS = {2: "two", 3: "three", 4: "four"}

Head = tuple[Tensor, Tensor]  # hidden (N, H), weight (V, H)


def chunked_gemms(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    chunk: int,
    *,
    constant: tuple[Head, ...] = (),
    frozen: bool = False,
    fp32_d_weight: bool = False,
) -> Case:
    """The products in chunks of `chunk` tokens, into buffers allocated before the clock starts.

    `constant` heads, a teacher's or a reference model's, give their logits and need no gradient; a `frozen`
    one needs d_hidden alone. Each chunk's d_weight overwrites the last, which costs less than any real loss
    can; `fp32_d_weight` accumulates it in fp32 as logitless does by default (CUDA only: `out_dtype` does not
    exist on a CPU).
    """
    hidden, weight = hidden.detach(), weight.detach()
    (N, H), V = hidden.shape, weight.shape[0]

    def prepare():
        logits = hidden.new_empty(chunk, V)
        others = [hidden.new_empty(chunk, len(head)) for _, head in constant]
        d_hidden = hidden.new_empty(chunk, H)
        d_weight = None if frozen else weight.new_empty(V, H, dtype=torch.float32 if fp32_d_weight else None)

        def run() -> None:
            for start in range(0, N, chunk):
                span = slice(start, start + chunk)
                rows = hidden[span]
                tile = logits[: len(rows)]
                torch.mm(rows, weight.t(), out=tile)
                for (states, head), other in zip(constant, others, strict=True):
                    torch.mm(states[span], head.t(), out=other[: len(rows)])
                torch.mm(tile, weight, out=d_hidden[: len(rows)])
                if frozen:
                    continue
                if not fp32_d_weight:
                    torch.mm(tile.t(), rows, out=d_weight)
                elif start == 0:
                    torch.mm(tile.t(), rows, out_dtype=torch.float32, out=d_weight)
                else:
                    torch.addmm(d_weight, tile.t(), rows, out_dtype=torch.float32, out=d_weight)

        return run

    return prepare


@dataclass(frozen=True)
class Yardstick:
    name: str
    cases: dict[int, Case]  # by chunk size
    flops: int

    def summary(self, times: dict[int, list[float]]) -> dict:
        """The fastest chunk size's median, and what it amounts to in TFLOP/s."""
        by_chunk = {chunk: median(times[chunk]) for chunk in self.cases if times[chunk]}
        chunk = min(by_chunk, key=by_chunk.__getitem__)
        tflops = self.flops / by_chunk[chunk] / 1e9
        return {
            "name": self.name,
            "ms": by_chunk[chunk],
            "chunk": chunk,
            "tflops": tflops,
            "ms_by_chunk": by_chunk,
        }


def yardstick(
    hidden: Tensor, weight: Tensor, *, constant: tuple[Head, ...] = (), frozen: bool = False
) -> Yardstick:
    """The products at chunks of 2,048, 4,096 and N tokens; which is fastest depends on the shape, and the
    fastest counts."""
    N, row_bytes = (
        len(hidden),
        sum(len(head) for _, head in ((hidden, weight), *constant)) * hidden.element_size(),
    )
    chunks = {chunk for chunk in (2048, 4096) if chunk < N}
    if not chunks or N * row_bytes <= LARGEST_BUFFER:
        chunks.add(N)
    count = 2 if frozen else 3
    flops = 2 * N * (count * weight.numel() + sum(head.numel() for _, head in constant))
    cases = {
        chunk: chunked_gemms(hidden, weight, chunk, constant=constant, frozen=frozen)
        for chunk in sorted(chunks)
    }
    return Yardstick(f"{COUNTS[count + len(constant)]} bare GEMMs", cases, flops)
