"""Trains Medusa heads on a small model and Python's own source code, in both stages of the paper, and sees
that they can predict.

    backbone   a small Llama learns next tokens
    stage 1    backbone and base head frozen: only the Medusa heads train
    stage 2    everything trains together

Fails unless, on text that was held out, every head's top-1 accuracy after either stage beats that of always
guessing the most frequent token by a margin, and unless stage 1 left the backbone as it was. Needs no
network, a few minutes on a CPU:

    python examples/medusa.py
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from demo_text import make_rows
from rich.console import Console
from rich.progress import track
from tabulate import tabulate

from logitless import MedusaHeads, MedusaLoss, linear_cross_entropy

VOCAB, HIDDEN, LAYERS, ROWS, ROW_TOKENS = 2000, 128, 2, 16, 128
HELD_OUT = 32  # rows
CORPUS = 2**21  # characters
MARGIN = 0.02  # of accuracy, above the most frequent token's


def build(device: str) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=ROW_TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config).to(device)


def batches(rows: torch.Tensor, steps: int, what: str) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in track(range(steps), what, console=Console(stderr=True)):
        yield rows[torch.randint(len(rows), (ROWS,), generator=generator).to(rows.device)]


def hidden_states(model: transformers.LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model.base_model(input_ids=ids).last_hidden_state


def train_backbone(model, rows: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for ids in batches(rows, steps, "backbone"):
        optimizer.zero_grad()
        linear_cross_entropy(hidden_states(model, ids), model.lm_head.weight, ids, shift=True).backward()
        optimizer.step()


def train_heads(model, heads: MedusaHeads, rows: torch.Tensor, steps: int, stage: int) -> None:
    model.requires_grad_(stage == 2)
    # The paper weighs the untrained heads down while everything trains.
    loss = (
        MedusaLoss(base_coefficient=0.0)
        if stage == 1
        else MedusaLoss(coefficients=[0.2 * 0.8**k for k in range(len(heads))])
    )
    groups = [{"params": heads.parameters(), "lr": 3e-3}]
    if stage == 2:
        groups.append({"params": model.parameters(), "lr": 1e-3})
    optimizer = torch.optim.AdamW(groups)
    for ids in batches(rows, steps, f"stage {stage}"):
        optimizer.zero_grad()
        loss(hidden_states(model, ids), heads, ids, base_weight=model.lm_head.weight).loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracies(model, heads: MedusaHeads, rows: torch.Tensor) -> list[float]:
    """Top-1 accuracy of the base head and of every Medusa head on held-out rows."""
    metrics = MedusaLoss()(hidden_states(model, rows), heads, rows, base_weight=model.lm_head.weight).metrics
    return [
        metrics[f"{name}/accuracy"].item() for name in ("base", *(f"head_{k}" for k in range(len(heads))))
    ]


def main(
    backbone_steps: Annotated[int, typer.Option(help="Steps of the backbone.")] = 250,
    head_steps: Annotated[int, typer.Option(help="Steps of each stage.")] = 120,
    num_heads: Annotated[int, typer.Option(help="Medusa heads.")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = "",
) -> None:
    """Train a backbone, then Medusa heads in both stages; exit with 1 unless every head has learned to
    predict."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(1024 + HELD_OUT, ROW_TOKENS, VOCAB, CORPUS, Path(folder) / "tokenizer.json")
    rows = rows.to(device)
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    baseline = (held_out == rows.flatten().bincount().argmax()).float().mean().item()

    model = build(device)
    train_backbone(model, rows, backbone_steps)
    heads = MedusaHeads(HIDDEN, VOCAB, num_heads, device=device).start_from(model.lm_head.weight)
    before = [parameter.clone() for parameter in model.parameters()]
    found = {"untrained heads": accuracies(model, heads, held_out)}
    train_heads(model, heads, rows, head_steps, stage=1)
    untouched = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    found["stage 1"] = accuracies(model, heads, held_out)
    train_heads(model, heads, rows, head_steps, stage=2)
    found["stage 2"] = accuracies(model, heads, held_out)

    names = ["base", *(f"head {k}" for k in range(num_heads))]
    table = [[stage, *(f"{value:.1%}" for value in values)] for stage, values in found.items()]
    print(
        tabulate(
            [*table, ["most frequent token", *[f"{baseline:.1%}"] * len(names)]],
            headers=["top-1, held out", *names],
        )
    )
    weak = [
        f"{stage}: {name} {value:.1%}"
        for stage in ("stage 1", "stage 2")
        for name, value in zip(names, found[stage], strict=True)
        if value < baseline + MARGIN
    ]
    failures = weak + ([] if untouched else ["stage 1 changed the backbone"])
    if failures:
        raise SystemExit(
            f"expected every head {MARGIN:.0%} above the most frequent token, got " + "; ".join(failures)
        )


if __name__ == "__main__":
    typer.run(main)
