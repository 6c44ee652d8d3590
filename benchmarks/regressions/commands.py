"""The commands that measure the library alone."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness.options import (
    Device,
    Out,
    Quick,
    chosen_device,
    finish,
    out_path,
    picked,
    speaker,
)
from benchmarks.harness.registry import package_version
from benchmarks.harness.report import new_document, write_json
from benchmarks.regressions import compare_trees
from benchmarks.regressions import counts as counted
from benchmarks.regressions import profile as kernels
from benchmarks.regressions.own_rows import HOST_CALLS, ROWS


def compare_two_trees(
    before: Annotated[Path, typer.Option(help="A checkout with the library as it was.")],
    after: Annotated[Path, typer.Option(help="A checkout with the library as it is now.")],
    rounds: Annotated[int, typer.Option(min=1, help="Processes for each tree.")] = 5,
    rows: Annotated[
        list[str] | None, typer.Option(help="Only rows whose name contains this; repeatable.")
    ] = None,
    sharded: Annotated[
        bool, typer.Option("--tensor-parallel", help="Heads sharded over two GPUs instead.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(help="Timed calls of a row in a process. Default: 7, 30 of small calls.")
    ] = 0,
    limit: Annotated[float, typer.Option(help="Seconds after which a process is ended.")] = 150.0,
    minutes: Annotated[float, typer.Option(help="Start no round that would not end within these.")] = 60.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
) -> None:
    """Our own rows in two checkouts, alternating in fresh processes: ratios, peak memory, host time to the
    first product."""
    target = chosen_device(device, quick)
    trees = {"before": before.resolve(), "after": after.resolve()}
    for name, tree in trees.items():
        if not (tree / "logitless" / "__init__.py").exists():
            raise typer.BadParameter(
                f"--{name}: expected a folder that holds logitless/, got {tree}; pass a checkout."
            )
    document = new_document("compare-tensor-parallel" if sharded else "compare", target, quick=quick)
    # Without the folders, which mean nothing elsewhere: the trees are told by their commits and sources.
    words = tuple(rows or ())
    options = [*(["--tensor-parallel"] if sharded else []), *(f"--rows '{word}'" for word in words)]
    document["command"] = " ".join(["python -m benchmarks compare --before BEFORE --after AFTER", *options])
    settings = compare_trees.Settings(
        device=target.type,
        seed=document["seed"],
        quick=quick,
        repeats=repeats or (1 if quick else None),
        host_calls=5 if quick else HOST_CALLS,
        words=words,
        ranks=2 if sharded else 1,
        limit=limit,
    )
    path = out_path(out, document)
    compare_trees.run(document, trees, settings, rounds, minutes=minutes, out=path, say=speaker())
    finish(path)
    typer.echo(compare_trees.table(document))
    if document["summary"]["wrong"]:
        raise typer.Exit(1)


def counts(
    out: Annotated[Path, typer.Option(help="The JSON file, with which a test compares.")] = counted.FILE,
    machines: Annotated[
        list[str] | None,
        typer.Option("--machine", help="Only this machine of the table, for another file; repeatable."),
    ] = None,
) -> None:
    """What a warm call executes on a CPU and on a simulated Hopper GPU: Python calls, functions, records,
    opcodes, operators and launches. The same in every run."""
    chosen = list(counted.MACHINES) if machines is None else machines
    if not {*chosen} <= {*counted.MACHINES} or (machines and out == counted.FILE):
        raise typer.BadParameter(f"--machine: expected some of {', '.join(counted.MACHINES)}, and --out")
    versions = {"trl": package_version("trl")}
    document = new_document("counts", torch.device("cpu"), quick=False, versions=versions)
    counted.run(document, chosen)
    write_json(out, document)
    finish(out)
    typer.echo(counted.table(document))


def profile(
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--row", help="Only rows of `compare` whose name contains this; repeatable. Default: all."
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Another shape for them, as their own benchmark reads it.")
    ] = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
) -> None:
    """The kernels of one call by kind, its span, and the host's time before the first product."""
    target = chosen_device(device, quick)
    document = new_document("profile", target, quick=quick) | {"rows": [], "complete": False}
    path = out_path(out, document)
    chosen = picked([row.name for row in ROWS], rows)
    for row in ROWS:
        if row.name in chosen:
            try:
                row = kernels.with_shape(row, shape)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            document["rows"].append(kernels.measure(row, target, document["seed"], quick=quick))
            write_json(path, document)
            typer.echo(kernels.table(document["rows"][-1]) + "\n")
    document["complete"] = True
    write_json(path, document)
    finish(path)
