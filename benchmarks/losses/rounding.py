"""Emulation of the rounding of logits by a generator and a trainer, on a CPU.

Two engines compute the log-probabilities of sampled tokens from hidden states that differ by little. Noise
of the ratio is the mean of |d log p| between them; k3 is the estimate of the KL between two calls of the
trainer, which should be that of the hidden states' difference alone.
"""

from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness.report import write_json

# The head, and how many tokens are sampled from it.
H, V, TOKENS, KEPT = 1024, 32768, 64, 20
QUICK = (64, 512, 32, 8)
# The largest logit of a token, about, and the relative differences between the hidden states.
LARGEST = 16.0
CHANGES = (0.0, 1e-4, 1e-3, 4e-3, 8e-3)
# Whether the generator and the trainer round their logits to bf16.
SIDES = {"both rounded": (True, True), "generator alone": (True, False), "neither": (False, False)}


def logits(hidden: Tensor, weight: Tensor, *, rounded: bool, halves: bool) -> Tensor:
    """Logits of a bf16 head, summed in fp32; `halves`: in another order."""
    h, w = hidden, weight.bfloat16().float()
    middle = h.shape[1] // 2
    z = h[:, middle:] @ w[:, middle:].t() + h[:, :middle] @ w[:, :middle].t() if halves else h @ w.t()
    return z.bfloat16().float() if rounded else z


def run(document: dict, *, quick: bool, out, say: Callable[[str], None]) -> None:
    """Every change of the hidden states: the noise of the ratio, and k3 between two calls of the trainer."""
    width, vocabulary, tokens, kept = QUICK if quick else (H, V, TOKENS, KEPT)
    generator = torch.Generator("cpu").manual_seed(document["seed"])
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator)
    weight *= LARGEST / (hidden @ weight.t()).amax(1).mean()
    document["rows"] = []
    for change in CHANGES:
        noise = torch.randn(hidden.shape, generator=generator)
        other = hidden + change * hidden.square().mean().sqrt() * noise
        first = logits(hidden, weight, rounded=False, halves=False)
        sampled = torch.multinomial(first.softmax(1), 1, generator=generator)
        best = torch.cat((first.topk(kept).indices, sampled), 1)
        row: dict = {"verdict": "ok", "change": change}
        for name, sides in SIDES.items():
            zs = [
                logits(x, weight, rounded=side, halves=halves)
                for x, side, halves in zip((hidden, other), sides, (False, True), strict=True)
            ]
            whole = [z.double().log_softmax(1).gather(1, sampled)[:, 0] for z in zs]
            few = [over(z.double(), best) for z in zs]
            row[f"{name}, noise"] = (whole[1] - whole[0]).abs().mean().item()
            row[f"{name}, noise of kept ids"] = (few[1] - few[0]).abs().mean().item()
            d = whole[0] - whole[1]
            row[f"{name}, k3"] = (d.exp() - d - 1).mean().item()
        document["rows"].append(row)
        say(f"hidden states that differ by {change:g}")
    document["complete"] = True
    write_json(out, document)


def over(z: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the last of the ids (n, k) of each token, over these ids."""
    mask = torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids, True)
    return z.masked_fill(~mask, -torch.inf).log_softmax(1).gather(1, ids[:, -1:])[:, 0]


def for_page(document: dict, source: str) -> str:
    """The table of the page, in Markdown."""
    names = list(SIDES)
    body = []
    for row in document["rows"]:
        cells = [f"{row[f'{x}, noise']:.1e} / {row[f'{x}, noise of kept ids']:.1e}" for x in names]
        plain = row["neither, k3"]
        inflated = f"{row['both rounded, k3'] / plain:,.1f}x" if row["change"] and plain > 0 else ""
        change = f"{row['change']:g}" if row["change"] else "order of summation alone"
        body.append([change, *cells, inflated])
    headers = ["hidden states differ by", *names, "k3 by rounding both"]
    table = tabulate(body, headers, tablefmt="github", disable_numparse=True)
    return (
        f"{table}\n\nCells: mean |delta log p| of sampled tokens between the two engines, normalized over "
        f"the whole vocabulary / over the top {KEPT} ids. Last column: k3 between two calls of the same "
        f"trainer with rounding, divided by k3 without rounding. H {H:,}, V {V:,}, largest logit about "
        f"{LARGEST:.0f}, emulated on a CPU.\n\n{source}"
    )
