"""The commands that measure layer operators."""

import time
from typing import Annotated

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
    speaker,
)
from benchmarks.harness.report import new_document
from benchmarks.layers import comparison, tiles
from benchmarks.layers.operators import Maker
from benchmarks.layers.operators import operators as every_operator
from benchmarks.peers.layers import LAYERS

Operators = Annotated[
    list[str] | None, typer.Option("--operator", help="Only operators whose name contains this; repeatable.")
]


def layer_operators(
    operators: Operators = None,
    minutes: Annotated[float, typer.Option(help="Begin no operator after these.")] = 10.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
) -> None:
    """Norms, rotations and gates, forward and backward: us and every installed peer beside a copy of as many
    bytes."""
    target = chosen_device(device, quick)
    try:
        computes, absent = LAYERS.load(target, tuple(only or ()), tuple(skip or ()))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    document = new_document("layers", target, quick=quick, versions=LAYERS.versions()) | {"absent": absent}
    path, kinds = out_path(out, document), tuple(operators or ())
    comparison.run(document, target, computes, kinds=kinds, minutes=minutes, out=path, say=speaker())
    finish(path)
    check(comparison.failed(document))


def tiles_of_layers(
    operators: Operators = None,
    minutes: Annotated[float, typer.Option(help="Try no tile after these.")] = 10.0,
    device: Device = "",
) -> None:
    """Tile sizes of our layer operators beside those that the library takes."""
    target, deadline = chosen_device(device, quick=False), time.perf_counter() + 60 * minutes
    for operator in every_operator(Maker(target, tiny=False)):
        if not operators or any(word in operator.name for word in operators):
            tiles.sweep(operator, target, deadline, speaker())
