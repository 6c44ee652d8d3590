"""Ratios of a policy to the sampler that truncates it, with and without a sampling mask, on a CPU.

A tiny policy is sampled with top-p, as an inference server does: the server returns each token's
log-probability over the ids that it kept, and these ids. Without the ids a trainer computes log-probabilities
over the whole vocabulary, so each ratio is off by the mass that was kept.

    python examples/replay.py                          # prints the ratios
    python examples/replay.py --picture docs/replay.png
"""

import argparse

import torch
from torch import Tensor

from logitless import GRPOLoss, SamplingMask

SEQUENCES, LENGTH, H, V, TOP_P = 32, 64, 32, 2000, 0.8


def sampled(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, their log-probabilities over the kept ids, kept ids (..., k) with -1 in empty slots)."""
    probs = (hidden @ weight.t()).softmax(-1)
    ranked, order = probs.sort(-1, descending=True)
    kept = ranked.cumsum(-1) - ranked < TOP_P
    ranked = torch.where(kept, ranked, 0.0)
    ranked /= ranked.sum(-1, keepdim=True)
    place = torch.multinomial(ranked.flatten(0, 1), 1, generator=generator).view(*probs.shape[:2], 1)
    most = int(kept.sum(-1).max())
    ids = torch.where(kept, order, -1)[..., :most]
    return order.gather(-1, place)[..., 0], ranked.gather(-1, place)[..., 0].log(), ids


def main(picture: str | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SEQUENCES, LENGTH, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) * 0.7
    tokens, logps, ids = sampled(hidden, weight, generator)
    # The trainer's hidden states differ a little from the server's.
    trained = hidden * (1 + 2e-3 * torch.randn(hidden.shape, generator=generator))
    loss = GRPOLoss(return_logps=True)
    inputs = {"advantages": torch.randn(SEQUENCES, generator=generator), "old_logps": logps}
    ratios = {}
    for name, mask in (("without replay", None), ("with replay", SamplingMask.from_padded(ids))):
        out = loss(trained, weight, tokens, sampling_mask=mask, **inputs)
        ratio = (out.logps - logps).exp().flatten()
        ratios[name] = ratio
        outside = ((ratio - 1).abs() > 0.1).float().mean()
        print(f"{name}: mean ratio {ratio.mean():.3f}, {outside:.1%} of the tokens outside [0.9, 1.1]")
        print(f"  {out.plan.describe()}")
    if picture is not None:
        draw(ratios, picture)
    return ratios


def draw(ratios: dict[str, Tensor], path: str) -> None:
    """Histograms of the ratios."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    bins = [0.7 + 0.01 * i for i in range(46)]
    for (name, ratio), color in zip(ratios.items(), ("#b0503c", "#2f6f9f"), strict=True):
        axis.hist(ratio.tolist(), bins=bins, alpha=0.75, label=name, color=color)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel("importance ratio")
    axis.set_ylabel("tokens")
    axis.set_title(f"A policy sampled with top-p {TOP_P}, before its first update")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", help="where to save the histograms (needs matplotlib)")
    main(parser.parse_args().picture)
