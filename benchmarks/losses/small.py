"""Calls of few tokens, which wait for the host: us, uncompiled PyTorch and torch.compile.

The losses, their inputs and their truth are those of the benchmarks of large shapes. "without CUDA graphs" is
our call with `LOGITLESS_CUDA_GRAPHS=0`, "in a compiled step" a function of the user under torch.compile
(fullgraph=True) that calls our loss. `host_ms` is the time until a call and its backward pass have
returned.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from tabulate import tabulate

from benchmarks.harness.objective import Objective, Problem, Shape
from benchmarks.harness.report import write_json
from benchmarks.harness.yardstick import Yardstick, yardstick
from benchmarks.losses import ce, distillation, policy, preference
from benchmarks.losses.ce import CE
from benchmarks.losses.distillation import DISTILLATION
from benchmarks.losses.policy import POLICY
from benchmarks.losses.preference import PREFERENCE
from logitless.engine import captured

OURS, UNCAPTURED = "logitless", "logitless, without CUDA graphs"
COMPILED = "logitless, in a compiled step"
OTHERS = ("eager, fp32 upcast", "torch.compile")
H, V = 2048, 151_936
# Tokens with a trainable and with a frozen head, H, V.
FULL = ((128, 256, 512, 1024, 2048, 4096), (512,), H, V)
QUICK = ((64,), (64,), 32, 517)
# Which tokens have no label does not matter to a call of static rows.
IGNORED = "CE, 30% ignored"
OBJECTIVES: dict[str, Objective] = {
    "CE": CE,
    IGNORED: CE,
    "DPO": PREFERENCE,
    "ORPO": PREFERENCE,
    "GRPO": POLICY,
    "JSD": DISTILLATION,
}


def products(problem: Problem, loss: str, *, frozen: bool) -> Yardstick:
    """The bare products of a call. At these sizes they take different times, so each of them is measured."""
    if OBJECTIVES[loss] not in (PREFERENCE, POLICY):
        return problem.yardstick
    hidden, weight, _, *more = problem.arguments
    hidden, weight, *reference = (x.detach() for x in (hidden, weight, *(more if loss == "DPO" else ())))
    constant = ((reference[0].flatten(0, -2), reference[1]),) if reference else ()
    return yardstick(hidden.flatten(0, -2), weight, constant=constant, frozen=frozen)


def shape_of(loss: str, tokens: int, H: int, V: int, *, frozen: bool) -> Shape:
    if loss in ("CE", IGNORED):
        return ce.Shape(tokens, H, V, ignored=0.3 if loss == IGNORED else 0.0)
    if loss == "JSD":
        return distillation.Shape(tokens, H, H, V, frozen_head=frozen)
    if loss == "GRPO":
        return policy.Shape(2, tokens // 2, H, V, frozen_head=frozen)
    return preference.Shape(loss, 1, tokens // 2, H, V, frozen_head=frozen)


def shapes(*, quick: bool) -> Iterable[tuple[str, bool, Shape]]:
    """(loss, whether the head is frozen, shape). Cross-entropy is measured with a trainable head alone."""
    trainable, frozen, *sizes = QUICK if quick else FULL
    for loss, tokens in itertools.product(OBJECTIVES, trainable):
        yield loss, False, shape_of(loss, tokens, *sizes, frozen=False)
    for loss, tokens in itertools.product(OBJECTIVES, frozen):
        if loss not in ("CE", IGNORED):
            yield loss, True, shape_of(loss, tokens, *sizes, frozen=True)


def run(
    document: dict,
    device: torch.device,
    *,
    only: Collection[str],
    quick: bool,
    seconds: float,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    document |= {"absent": {}, "sections": []}
    for index, (loss, frozen, shape) in enumerate(shapes(quick=quick)):
        if loss not in only:
            continue
        objective = OBJECTIVES[loss]
        present, absent = objective.peers.load(device, (OURS, *OTHERS))
        document["absent"] |= absent
        calls = variants(present[OURS], device) | {name: present[name] for name in OTHERS if name in present}
        seed = document["seed"] + index
        # The losses share the code of the compiled step.
        with torch._dynamo.config.patch(recompile_limit=64):
            bare = partial(products, loss=loss, frozen=frozen)
            section = objective.measure_shape(shape, calls, device, seed, seconds, say, bare)
        section |= {"objective": loss, "tokens": shape.N, "frozen": frozen}
        document["sections"].append(section)
        write_json(out, document)
    document["complete"] = True


def variants(ours: Callable, device: torch.device) -> dict[str, Callable]:
    """Our call, with and without CUDA graphs, and in a compiled step."""

    def uncaptured(*arguments: object) -> object:
        with mock.patch.object(captured, "CAPTURES_ON", ()):
            return ours(*arguments)

    def step(*arguments: object) -> object:
        return ours(*arguments)

    return {UNCAPTURED: uncaptured, OURS: ours, COMPILED: torch.compile(step, fullgraph=True)}


def table(document: dict, **options) -> str:
    """Milliseconds of each call, after a rest and in a row."""
    measured = {row["name"] for section in document["sections"] for row in section["rows"]}
    names = [name for name in (*OTHERS, UNCAPTURED, OURS, COMPILED) if name in measured]
    rows = []
    for section in document["sections"]:
        found = {row["name"]: row for row in section["rows"]}
        bare = section["yardstick"]
        title = section["objective"] + (", frozen head" if section["frozen"] else "")
        products = products_ms(section)
        both = f"{products:.2f} / {products / bare['ms'] * bare['hot_ms']:.2f}"
        cells = [cell(found.get(name), bare["hot_ms"]) for name in names]
        rows.append([title, section["tokens"], both, *cells])
    headers = ["loss", "tokens", "products", *names]
    return tabulate(rows, headers, disable_numparse=True, **options)


def products_ms(section: Mapping) -> float:
    """Milliseconds of the products. Files of older commits have a multiple of one product in their place."""
    return section.get("products_ms", section["yardstick"]["ms"])


def cell(row: Mapping | None, hot_ms: float) -> str:
    if row is None or row["verdict"] != "ok":
        return "" if row is None else row["verdict"]
    # Out of memory only where calls follow each other.
    hot = f"{row['hot_ratio'] * hot_ms:.2f}" if "hot_ratio" in row else ""
    return f"{row['ms']:.2f} / {hot}"


def for_page(document: dict, source: str) -> str:
    """The table in Markdown."""
    cut = "" if document["complete"] else "\n\nRows that are missing were not measured: the run was cut off."
    runs = f"medians of {document['runs']} runs, " if "runs" in document else ""
    return (
        f"{table(document, tablefmt='github')}\n\n"
        f"One {document['device']}, {document['date'][:10]}, {runs}bf16, H {H}, V {V:,}. Milliseconds of a "
        "call and its backward pass, after a rest / one after the other. Products: the matrix products of "
        "such a call alone."
        f"{cut}\n\n{source}"
    )


def failed(document: dict) -> list[str]:
    """Our own rows that are not right."""
    return [
        f"{section['objective']}, {section['tokens']} tokens: {row['name']}"
        for section in document["sections"]
        for row in section["rows"]
        if row["name"].startswith(OURS) and row["verdict"] != "ok"
    ]
