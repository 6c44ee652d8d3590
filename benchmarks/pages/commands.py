"""The commands that write and check README.md and docs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.options import finish
from benchmarks.harness.report import (
    RESULTS,
    command_line,
    every,
    medians,
    newest,
    origin,
    rewrite,
    write_json,
)
from benchmarks.layers import comparison
from benchmarks.losses import ce as cross_entropy
from benchmarks.losses import given_logits, small, summary
from benchmarks.losses import medusa as multi_head
from benchmarks.losses import rounding as emulation
from benchmarks.losses import tables as loss_tables
from benchmarks.losses import tensor_parallel as shards
from benchmarks.losses import topk as several_ids
from benchmarks.models import activations, fsdp, lora, recipes, steps, trainers, usecase
from benchmarks.pages import numbers
from benchmarks.proof import tables as proof_tables

# The benchmarks with a table in docs/benchmarks.md, and what writes it.
CE_TABLES = ("ce", "ce-few", "ce-ignored")
TABLES = dict.fromkeys((*CE_TABLES, "distillation", "preference", "policy"), loss_tables.table) | {
    "medusa": multi_head.by_length,
    "trl": trainers.by_trainer,
    "tensor-parallel": shards.by_loss,
    "fsdp": fsdp.by_trainer,
}

# Those with a table on another page: the page, and what writes the table.
ELSEWHERE = {
    "step": ("layers.md", steps.for_page),
    "step-families": ("layers.md", steps.for_page),
    "usecase": ("layers.md", usecase.for_page),
    "recipes": ("recipes.md", recipes.for_page),
    "lora": ("howto/lora.md", lora.for_page),
    "step-lora": ("howto/lora.md", steps.for_page),
    "topk": ("several_ids.md", several_ids.for_page),
    "given-logits": ("choosing.md", given_logits.for_page),
    "rounding": ("sampling.md", emulation.for_page),
    "small": ("howto/small-batches.md", small.for_page),
    "small-portable": ("howto/small-batches.md", small.for_page),
    "trl-short": ("howto/small-batches.md", trainers.by_trainer),
    "ce-portable": ("proof.md", loss_tables.table),
    "speculators": ("howto/speculators.md", loss_tables.table),
}


def median_of_runs(
    runs: Annotated[list[Path], typer.Argument(help="Complete results of one commit on one device.")],
    out: Annotated[Path, typer.Option(help="The JSON file.")],
) -> None:
    """Write the medians of several runs of one benchmark as one result."""
    try:
        document = medians([json.loads(path.read_text()) for path in runs])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    document["command"] = f"{document['command']}; {command_line()}"
    write_json(out, document)
    finish(out)


def list_numbers() -> None:
    """List the measured numbers in the sentences of README.md and docs with their sources; exits with 1 if a
    number has no source or differs from it."""
    from benchmarks.pages.claims import CLAIMS

    found = list(numbers.numbers(CLAIMS, numbers.pages()))
    for number in found:
        typer.echo(f"{number.page}:{number.line}: {number.printed}: {number.fault or number.source}")
    if any(number.fault for number in found):
        raise typer.Exit(1)


def plot(
    results: Annotated[Path, typer.Option(help="Where the JSON files lie.")] = RESULTS,
    root: Annotated[
        Path, typer.Option(help="The folder of README.md and docs/, which hold the markers.")
    ] = RESULTS.parents[1],
) -> None:
    """Rewrite the tables of measurements in README.md and docs from the newest results, and draw docs/ce.png,
    docs/layers.png, docs/activations.png and docs/proof.png."""
    # Here alone, so that a machine that only measures needs no matplotlib.
    from benchmarks.layers import picture as layer_picture
    from benchmarks.losses import picture
    from benchmarks.proof import picture as proof_picture

    found = {name: pair for name in (*TABLES, "sweep") if (pair := newest(name, results))}
    if not found:
        names = ", ".join((*TABLES, "sweep"))
        raise typer.BadParameter(
            f"--results: expected a complete result ({names}) in {results}; run `python -m benchmarks ce`."
        )
    runs = {name: [pair] for name, pair in found.items()}
    documents = {name: document for name, (_, document) in found.items()}
    if "ce" in documents:
        for name, document in cross_entropy.by_table(documents["ce"]).items():
            documents[name], runs[name] = document, [found["ce"]]
    tables = {
        (root / "docs" / "benchmarks.md", name): TABLES[name](document, origin(document, *runs[name]))
        for name, document in documents.items()
        if name in TABLES
    }
    if pair := newest("step-lora", results):
        documents["step-lora"] = pair[1]
    if "ce" in documents:
        tables[root / "README.md", "summary"] = summary.losses(documents)
        tables[root / "docs" / "why.md", "why"] = summary.implementations(documents)
    if operators := every("layers", results, partial=True):
        documents["layers"] = whole = comparison.together([document for _, document in operators])
        tables[root / "docs" / "layers.md", "layers"] = comparison.by_operator(
            whole, origin(whole, *operators)
        )
    for name, (page, table) in ELSEWHERE.items():
        # By the names of the files, so that a new run does not move a table.
        ordered = sorted(
            every(name, results, partial=name in ("recipes", "small")), key=lambda run: run[0].stem
        )
        runs = [table(run[1], origin(run[1], run)) for run in ordered]
        if runs:
            tables[root / "docs" / page, name] = "\n\n".join(runs)
    if proofs := every("convergence", results, partial=True):
        parts = [document for _, document in proofs]
        proof = proof_tables.together(parts)
        page = root / "docs" / "proof.md"
        tables |= {(page, name): body for name, body in proof_tables.of_page(parts).items()}
        tables[page, "proof-origin"] = origin(proof, *proofs)
    for (page, name), body in tables.items():
        try:
            rewrite(page, name, body)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        typer.echo(f"{page}: table {name}")
    if "sweep" in documents:
        drawn = root / "docs" / "ce.png"
        device = documents["sweep"]["device"]
        _, small = newest("small", results, device=device) or (None, None)
        heads = proof["gradients"] if proofs else []
        picture.draw(documents["sweep"], drawn, small, heads[0] if heads else None)
        typer.echo(
            f"{drawn}: drawn from {found['sweep'][0]}, the newest small.json of its GPU and convergence.json"
        )
    if fitted := newest("activations", results):
        drawn = root / "docs" / "activations.png"
        activations.draw(fitted[1], drawn)
        typer.echo(f"{drawn}: drawn from {fitted[0]}")
    if proofs:
        drawn = root / "docs" / "proof.png"
        runs = proof_tables.widest(proof_tables.with_part(parts, "runs"))["runs"]
        proof_picture.draw(proof | {"runs": runs}, drawn)
        typer.echo(f"{drawn}: drawn from {', '.join(path.name for path, _ in proofs)}")
    if "layers" in documents:
        drawn = root / "docs" / "layers.png"
        layer_picture.draw(documents["layers"], drawn)
        typer.echo(f"{drawn}: drawn from {', '.join(path.name for path, _ in operators)}")
