"""The commands that measure models: TRL's trainers, whole steps, five models."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from benchmarks.harness.options import (
    Device,
    Only,
    Out,
    Quick,
    Skip,
    check,
    chosen_device,
    finish,
    out_path,
    picked,
    speaker,
)
from benchmarks.harness.registry import package_version
from benchmarks.harness.report import new_document
from benchmarks.models import activations, fsdp, lora, recipes, steps, trainers, usecase


def trl(
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Measure only trainers whose name is or contains this; repeatable."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Leave out trainers whose name is or contains this; repeatable.")
    ] = None,
    sizes: Annotated[
        list[int] | None, typer.Option("--size", help="Only these sizes (tokens, or GRPO's batch).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of either trainer at a size, in turns.")] = 1,
    timed: Annotated[int, typer.Option(min=1, help="Timed steps of a run.")] = trainers.Scale.timed,
    step_by_step: Annotated[
        bool, typer.Option(help="Both trainers in turns at every step: times that can be told apart.")
    ] = False,
    short: Annotated[
        bool, typer.Option(help="Steps of 512 and 2,048 tokens, with both flags (trl-short.json).")
    ] = False,
) -> None:
    """Whole training steps of TRL's trainers and of ours at Qwen3-0.6B's architecture: time, memory, and the
    same loss."""
    target = chosen_device(device, quick)
    packages = ("trl", "peft", "accelerate")
    name = "trl-short" if short else "trl"
    document = new_document(
        name, target, quick=quick, versions={name: package_version(name) for name in packages}
    )
    path = out_path(out, document)
    try:
        chosen = {"only": tuple(only or ()), "skip": tuple(skip or ()), "sizes": tuple(sizes or ())}
        chosen |= {"rounds": rounds, "timed": timed, "step_by_step": step_by_step}
        chosen["short"] = short
        trainers.run(document, target, **chosen, out=path, say=speaker())
    except (ImportError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    finish(path)
    check(trainers.failed(document))


Timed = Annotated[int, typer.Option(min=1, help="Timed steps in a process.")]
Rounds = Annotated[int, typer.Option(min=1, help="Processes for each configuration, in turns.")]
Limit = Annotated[float, typer.Option(help="Seconds after which a process is ended.")]
Minutes = Annotated[float, typer.Option(help="Start no process that might not end within these.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="Only models whose name contains this.")]


def whole_steps(
    models: Models = None,
    checkpointing: Annotated[str, typer.Option(help="on, off or both.")] = "both",
    rounds: Rounds = 1,
    timed: Timed = 12,
    limit: Limit = 240.0,
    minutes: Minutes = 60.0,
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            "--budget", help="Also both flags with this activation budget: 12GiB, or 50%; repeatable."
        ),
    ] = None,
    lora_rows: Annotated[
        bool,
        typer.Option("--lora", help="Instead full fine-tuning and LoRA, stock and both (step-lora.json)."),
    ] = False,
    families: Annotated[
        bool,
        typer.Option(
            "--families", help="Instead models of about 1B of the architectures of 2026 (step-families.json)."
        ),
    ] = False,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
) -> None:
    """Whole SFT steps of TRL, each configuration in its own process: stock, Liger's layers, compiled layers,
    logitless's loss, layers, both."""
    available = steps.QUICK if quick else steps.MODELS
    known = steps.LORA if lora_rows else steps.CONFIGURATIONS
    if families:
        if lora_rows:
            raise typer.BadParameter("--families: expected no --lora with it; measure one after the other.")
        available = steps.QUICK_FAMILIES if quick else steps.FAMILIES
        known = steps.OF_FAMILIES
    made = configurations(known, only, skip) | steps.budgeted(budgets or [])
    document = measure(
        "step-lora" if lora_rows else "step-families" if families else "step",
        [(name, available[name]) for name in named(available, models)],
        made,
        Where(out, quick, device),
        checkpointing=switches(checkpointing),
        timed=timed,
        rounds=rounds,
        limits=steps.Limits(limit, minutes),
    )
    for section in document["sections"]:
        typer.echo(f"\n{steps.table(section)}")
    check(steps.failed(document))


def activation_budgets_of_a_small_model(
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each budget, in turns.")] = 9,
) -> None:
    """A small model's steps, on any device, under activation budgets from full checkpointing to none."""
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    document = new_document("activations", target, quick=quick)
    path = out_path(out, document)
    rounds = 1 if quick else rounds
    activations.run(document, target, rounds=rounds, out=path, say=speaker())
    finish(path)
    check(activations.failed(document))


def whole_use_case(
    models: Models = None,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Only these batch sizes; repeatable.")
    ] = None,
    rounds: Rounds = 1,
    timed: Timed = 5,
    limit: Limit = 240.0,
    minutes: Minutes = 120.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
) -> None:
    """SFT steps of five models against the batch size, as in the use case of Liger's paper: tokens per second
    and memory of stock, Liger, and both flags."""
    names = named(usecase.QUICK_SHAPES if quick else usecase.SHAPES, models)
    sizes = batches or (usecase.QUICK_BATCHES if quick else usecase.BATCHES)
    document = measure(
        "usecase",
        usecase.models(names, sizes, quick=quick),
        configurations(usecase.CONFIGURATIONS, only, skip),
        Where(out, quick, device),
        checkpointing=(True,),
        timed=timed,
        rounds=rounds,
        limits=steps.Limits(limit, minutes),
        logged=2,
    )
    typer.echo(f"\n{usecase.table(document)}")
    check(steps.failed(document))


def recipes_of_steps(
    rounds: Rounds = 1,
    timed: Timed = 12,
    limit: Limit = 240.0,
    minutes: Minutes = 60.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
) -> None:
    """SFT steps with both flags and what goes well with them: fused AdamW, LoRA+, packing, FP8, compiled
    layers."""
    name, model = next(iter((steps.QUICK if quick else steps.MODELS).items()))
    document = measure(
        "recipes",
        [(name, model)],
        configurations(recipes.RECIPES, only, skip),
        Where(out, quick, device),
        checkpointing=(True,),
        timed=timed,
        rounds=rounds,
        limits=steps.Limits(limit, minutes),
    )
    typer.echo(f"\n{recipes.table(document)}")
    rows = document["sections"][0]["rows"]
    check([f"{row['name']}: {row['reason']}" for row in rows if row.get("verdict") == "failed"])


def lora_steps(
    models: Models = None,
    checkpointing: Annotated[str, typer.Option(help="on, off or both.")] = "both",
    dropouts: Annotated[
        list[float] | None, typer.Option("--dropout", help="Repeatable. Default: 0 and 0.05.")
    ] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--size", help="SEQUENCESxTOKENS of a batch; repeatable.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="r of the adapters.")] = 16,
    timed: Annotated[float, typer.Option("--seconds", help="Of timed steps in a row.")] = 2.0,
    profiled: Annotated[bool, typer.Option("--profile", help="Also profile one step of each row.")] = False,
    minutes: Annotated[float, typer.Option(help="Start no row that might not end within these.")] = 60.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only rows whose name is or contains this; repeatable. More: {'; '.join(lora.MORE_ROWS)}."
        ),
    ] = None,
    skip: Skip = None,
) -> None:
    """Training steps with LoRA: full fine-tuning, PEFT with our other fused layers, PEFT with compiled
    layers, axolotl's kernels, our LoRA layers each by itself and grouped by input; time, memory, and PEFT's
    losses and gradients."""
    available = lora.available(quick, sizes or [])
    rows = lora.ROWS | (lora.MORE_ROWS if only else {})
    left_out = picked(rows, skip) if skip else []
    chosen = {name: rows[name] for name in picked(rows, only) if name not in left_out}
    target = chosen_device(device, quick)
    versions = {name: package_version(name) for name in ("peft", "accelerate", "axolotl")}
    document = new_document("lora", target, quick=quick, versions=versions)
    path = out_path(out, document)
    lora.run(
        document,
        target,
        {name: available[name] for name in named(available, models)},
        chosen,
        checkpointing=switches(checkpointing),
        dropouts=tuple(dropouts or (0.0, 0.05)),
        settings=lora.Settings(rank, 0.0 if quick else timed, minutes, profiled),
        out=path,
        say=speaker(),
    )
    finish(path)
    typer.echo(f"\n{lora.table(document)}")
    check(lora.failed(document))


def fully_sharded(
    ranks: Annotated[int, typer.Option(min=2, help="Processes of a run, each with a GPU.")] = 2,
    trained: Annotated[
        list[str] | None, typer.Option("--trainer", help="SFT or DPO; repeatable. Default: both.")
    ] = None,
    decoder_layers: Annotated[
        int, typer.Option("--layers", min=0, help="Layers of the model. Default: all of Llama-3.1-8B's.")
    ] = 0,
    timed: Annotated[int, typer.Option(min=1, help="Timed steps of a run.")] = 5,
    limit: Annotated[float, typer.Option(help="Seconds after which a run is ended.")] = 120.0,
    minutes: Annotated[float, typer.Option(help="Start no run that might not end within these.")] = 20.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
) -> None:
    """TRL's SFT and DPO of Llama-3.1-8B with FSDP2 on several GPUs: stock, both flags, Liger's layers;
    tokens per second, memory of a rank, and the same loss."""
    target = chosen_device(device, quick)
    if not fsdp.enough_gpus(target, ranks):
        raise typer.BadParameter(
            f"--ranks: expected at most {torch.cuda.device_count()}, the GPUs of this machine, got {ranks}; "
            "pass fewer, or --device cpu --quick."
        )
    models = fsdp.with_layers(fsdp.QUICK if quick else fsdp.FULL, decoder_layers)
    if unknown := [name for name in trained or [] if name not in models]:
        valid = ", ".join(models)
        raise typer.BadParameter(f"--trainer: expected one of {valid}, got {unknown[0]}; pick one of these.")
    models = {name: model for name, model in models.items() if name in (trained or models)}
    chosen = configurations(fsdp.CONFIGURATIONS, only, skip)
    versions = {name: package_version(name) for name in ("trl", "accelerate", "liger-kernel")}
    document = new_document("fsdp", target, quick=quick, versions=versions)
    path, (warm, timed) = out_path(out, document), (1, 1) if quick else (3, timed)
    settings = steps.Settings(target.type, document["seed"], warm, timed)
    limits = steps.Limits(limit, minutes)
    try:
        fsdp.run(document, models, chosen, settings, ranks=ranks, limits=limits, out=path, say=speaker())
    except ImportError as error:
        raise typer.BadParameter(str(error)) from error
    finish(path)
    typer.echo(f"\n{fsdp.table(document)}")
    check(fsdp.failed(document))


class Where(NamedTuple):
    """Where a command measures, and where it writes."""

    out: Path | None
    quick: bool
    device: str


def switches(checkpointing: str) -> tuple[bool, ...]:
    """Whether checkpointing is on, for each time that something is measured."""
    known = {"on": (True,), "off": (False,), "both": (True, False)}
    if checkpointing not in known:
        valid = ", ".join(known)
        raise typer.BadParameter(
            f"--checkpointing: expected one of {valid}, got {checkpointing}; pick one of these."
        )
    return known[checkpointing]


def named(available: Iterable[str], words: list[str] | None) -> list[str]:
    if found := picked(available, words):
        return found
    known, given = ", ".join(available), ", ".join(words or [])
    raise typer.BadParameter(f"--model: expected a name, or part of one, among {known}; got {given}.")


def configurations(
    available: dict[str, steps.Configuration], only: list[str] | None, skip: list[str] | None
) -> dict[str, steps.Configuration]:
    left_out = picked(available, skip) if skip else []
    if found := [name for name in picked(available, only) if name not in left_out]:
        return {name: available[name] for name in found}
    raise typer.BadParameter(
        f"--only, --skip: expected names that leave something of {', '.join(available)}, got none; pick some "
        "of these."
    )


def measure(
    benchmark: str,
    models: list[tuple[str, steps.Model]],
    made: dict[str, steps.Configuration],
    where: Where,
    *,
    checkpointing: tuple[bool, ...],
    timed: int,
    rounds: int,
    limits: steps.Limits,
    logged: int = 4,
) -> dict:
    """The document of a run, which is written where it should be."""
    target, quick = chosen_device(where.device, where.quick), where.quick
    versions = {
        name: package_version(name) for name in ("trl", "accelerate", "liger-kernel", "peft", "torchao")
    }
    document = new_document(benchmark, target, quick=quick, versions=versions)
    logged, timed = (2, 1) if quick else (logged, timed)
    settings = [
        steps.Settings(target.type, document["seed"], logged, timed, checkpointing=switch)
        for switch in checkpointing
    ]
    path = out_path(where.out, document)
    steps.run(document, models, made, settings, rounds=rounds, limits=limits, out=path, say=speaker())
    finish(path)
    return document
