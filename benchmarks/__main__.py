"""`python -m benchmarks`: the commands. Each measures one thing, prints it, and writes it down as JSON."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import numbers
from benchmarks.harness.measure import DeviceLost
from benchmarks.harness.objective import Objective, Shape
from benchmarks.harness.options import (
    Device,
    Only,
    Out,
    Quick,
    Seconds,
    Skip,
    chosen_device,
    finish,
    out_path,
    picked,
    portable_kernels,
    speaker,
)
from benchmarks.harness.registry import package_version
from benchmarks.harness.report import RESULTS, every, new_document, newest, origin, rewrite, write_json
from benchmarks.layers import commands as layer_commands
from benchmarks.layers import comparison as layers
from benchmarks.losses import ce as cross_entropy
from benchmarks.losses import distillation as teaching
from benchmarks.losses import gemm as chunk_gemms
from benchmarks.losses import medusa as multi_head
from benchmarks.losses import preference as pairs
from benchmarks.losses import rounding as emulation
from benchmarks.losses import sampler as kept_ids
from benchmarks.losses import small, summary
from benchmarks.losses import tables as pages
from benchmarks.losses import tensor_parallel as shards
from benchmarks.losses import topk as several_ids
from benchmarks.losses.ce import CE, CE_PORTABLE
from benchmarks.losses.distillation import DISTILLATION
from benchmarks.losses.medusa import MEDUSA
from benchmarks.losses.policy import POLICY
from benchmarks.losses.preference import PREFERENCE
from benchmarks.losses.speculators import SPECULATORS
from benchmarks.models import activations, fsdp, lora, recipes, steps, trainers, usecase
from benchmarks.models import commands as model_commands
from benchmarks.proof import commands as proof_commands
from benchmarks.proof import tables as proof_tables
from benchmarks.regressions import compare_trees
from benchmarks.regressions import counts as counted
from benchmarks.regressions import profile as kernels
from benchmarks.regressions.own_rows import HOST_CALLS, ROWS

app = typer.Typer(help="Measure logitless beside its peers.", add_completion=False, no_args_is_help=True)
app.add_typer(model_commands.app)
app.add_typer(layer_commands.app)
app.add_typer(proof_commands.app)

# The benchmarks with a table in docs/benchmarks.md, and what writes it.
CE_TABLES = ("ce", "ce-few", "ce-ignored")
TABLES = dict.fromkeys((*CE_TABLES, "distillation", "preference", "policy"), pages.table) | {
    "medusa": multi_head.by_length,
    "trl": trainers.by_trainer,
    "tensor-parallel": shards.by_loss,
    "fsdp": fsdp.by_trainer,
}

# Those with a table on another page: the page, and what writes the table.
ELSEWHERE = {
    "step": ("layers.md", steps.for_page),
    "usecase": ("layers.md", usecase.for_page),
    "recipes": ("recipes.md", recipes.for_page),
    "lora": ("howto/lora.md", lora.for_page),
    "topk": ("several_ids.md", several_ids.for_page),
    "rounding": ("sampling.md", emulation.for_page),
    "small": ("howto/small-batches.md", small.for_page),
    "ce-portable": ("proof.md", pages.table),
    "speculators": ("howto/speculators.md", pages.table),
}

Shapes = Annotated[
    list[str] | None, typer.Option(help="NxHxV or NxHxV@IGNORED, several with commas. Default: the design's.")
]


@app.command()
def ce(
    shapes: Shapes = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 10.0,
) -> None:
    """Cross-entropy: us and every installed peer, at the four shapes of the design and with half the labels
    ignored."""
    compare("ce", CE, parsed(CE, shapes), out, quick, device, tuple(only or ()), tuple(skip or ()), seconds)


@app.command()
def ce_portable(
    shapes: Shapes = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    seconds: Seconds = 4.0,
) -> None:
    """Cross-entropy by the portable kernels, those of GPUs other than Hopper: logits rounded to bf16, and in
    fp32."""
    picked = parsed(CE_PORTABLE, shapes)
    with portable_kernels():
        compare("ce-portable", CE_PORTABLE, picked, out, quick, device, (), (), seconds)


@app.command()
def distillation(
    shapes: Annotated[
        list[str] | None,
        typer.Option(help="NxHxTxV (T: the teacher's H) or NxHxTxV@frozen, several with commas."),
    ] = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 10.0,
) -> None:
    """Jensen-Shannon divergence from a teacher: us and every installed peer, with a trainable and with a
    frozen head."""
    picked = parsed(DISTILLATION, shapes)
    compare(
        "distillation",
        DISTILLATION,
        picked,
        out,
        quick,
        device,
        tuple(only or ()),
        tuple(skip or ()),
        seconds,
    )


@app.command()
def speculators(
    shapes: Annotated[
        list[str] | None, typer.Option(help="STEPSxNxHxD or STEPSxNxHxD@frozen, several with commas.")
    ] = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 4.0,
) -> None:
    """Drafts of speculative decoding, 3 and 7 steps, by the forward KL: us and every installed peer, whose
    logits of all steps are whole."""
    compare(
        "speculators",
        SPECULATORS,
        parsed(SPECULATORS, shapes),
        out,
        quick,
        device,
        tuple(only or ()),
        tuple(skip or ()),
        seconds,
    )


@app.command()
def preference(
    shapes: Annotated[
        list[str] | None, typer.Option(help="orpo:PAIRSxTxHxV or dpo:PAIRSxTxHxV, or either with @frozen.")
    ] = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 4.0,
) -> None:
    """ORPO and DPO with a reference, in GEMM-equivalents: us and every installed peer, with a trainable and
    with a frozen head."""
    compare(
        "preference",
        PREFERENCE,
        parsed(PREFERENCE, shapes),
        out,
        quick,
        device,
        tuple(only or ()),
        tuple(skip or ()),
        seconds,
    )


@app.command()
def policy(
    shapes: Annotated[
        list[str] | None, typer.Option(help="BxTxHxV or BxTxHxV@frozen, several with commas.")
    ] = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 4.0,
) -> None:
    """GRPO, in GEMM-equivalents: us and every installed peer, with a trainable and with a frozen head."""
    compare(
        "policy",
        POLICY,
        parsed(POLICY, shapes),
        out,
        quick,
        device,
        tuple(only or ()),
        tuple(skip or ()),
        seconds,
    )


@app.command()
def orpo_batch(
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 3.0,
) -> None:
    """ORPO of 32, 64 and 128 pairs of 1,024 tokens, the table of Liger's paper: peak memory and tokens per
    second."""
    shapes = pairs.QUICK_BATCH_SHAPES if quick else pairs.BATCH_SHAPES
    document = compare(
        "orpo-batch", PREFERENCE, shapes, out, quick, device, tuple(only or ()), tuple(skip or ()), seconds
    )
    typer.echo(pairs.by_token(document))


@app.command()
def dpo_length(
    max_length: Annotated[
        int, typer.Option(min=1024, help="The largest T; the sizes double from 1,024.")
    ] = 65536,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 2.0,
) -> None:
    """DPO of one pair against its length T, with a reference: memory beyond the gradients, time per token,
    and the plan."""
    shapes = pairs.QUICK_LENGTH_SHAPES if quick else pairs.length_shapes(max_length)
    names = tuple(only or pairs.LENGTH_NAMES)
    document = compare(
        "dpo-length", PREFERENCE, shapes, out, quick, device, names, tuple(skip or ()), seconds
    )
    typer.echo(pairs.by_token(document))


@app.command()
def distillation_length(
    max_tokens: Annotated[
        int, typer.Option(min=8192, help="The largest N; the sizes grow fourfold from 8,192.")
    ] = 131072,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    seconds: Seconds = 2.0,
) -> None:
    """JSD against N: our memory beyond the gradients, and the ratio to the bare products."""
    shapes = teaching.QUICK_SHAPES[:1] if quick else teaching.length_shapes(max_tokens)
    compare("distillation-length", DISTILLATION, shapes, out, quick, device, ("logitless",), (), seconds)


@app.command()
def medusa(
    shapes: Annotated[list[str] | None, typer.Option(help="HEADSxTxHxV@STAGE, several with commas.")] = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 0.0,
) -> None:
    """Medusa heads, 3 and 5, in both stages against the length T: time per token, and memory that must not
    grow with the heads."""
    document = compare(
        "medusa",
        MEDUSA,
        parsed(MEDUSA, shapes),
        out,
        quick,
        device,
        tuple(only or ()),
        tuple(skip or ()),
        seconds,
    )
    typer.echo(multi_head.table(document))
    if grown := multi_head.grown(document):
        typer.echo("memory grows with the heads: " + "; ".join(grown), err=True)
        raise typer.Exit(1)


@app.command()
def tensor_parallel(
    ranks: Annotated[int, typer.Option(min=2, help="Processes, each with a GPU.")] = 2,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
) -> None:
    """Heads sharded over the vocabulary (CE, DPO, GRPO, JSD) beside one GPU, and peers' cross-entropies of
    sharded heads: agreement, time and memory of each rank."""
    target = chosen_device(device, quick)
    document = new_document("tensor-parallel", target, quick=quick, versions=shards.PEERS.versions())
    path = out_path(out, document)
    shards.run(document, ranks, quick=quick, device=target.type, say=speaker())
    write_json(path, document)
    finish(path)
    if wrong := [
        section["loss"] for section in document["sections"] for row in section["rows"][1:] if not row["right"]
    ]:
        typer.echo(f"not right: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


@app.command()
def topk(out: Out = None, quick: Quick = False, device: Device = "", seconds: Seconds = 4.0) -> None:
    """Log-probabilities of 64 ids per token, the 64 best, and the renormalized top-k loss: time in bare
    products, memory, beside PyTorch on full logits."""
    target = chosen_device(device, quick)
    document = new_document("topk", target, quick=quick)
    path, shape = out_path(out, document), several_ids.QUICK_SHAPE if quick else several_ids.SHAPE
    several_ids.run(document, shape, target, seconds=0.0 if quick else seconds, out=path, say=speaker())
    finish(path)
    typer.echo(several_ids.table(document))
    if wrong := several_ids.failed(document):
        typer.echo("not right: " + "; ".join(wrong), err=True)
        raise typer.Exit(1)


@app.command()
def sampler(out: Out = None, quick: Quick = False, device: Device = "", seconds: Seconds = 4.0) -> None:
    """GRPO over a sampler's kept ids: time in three bare products, memory, beside the call without sets and
    beside full logits."""
    target = chosen_device(device, quick)
    document = new_document("sampler", target, quick=quick)
    path = out_path(out, document)
    kept_ids.run(document, target, quick=quick, seconds=0.0 if quick else seconds, out=path, say=speaker())
    finish(path)
    typer.echo(kept_ids.table(document))
    if wrong := kept_ids.failed(document):
        typer.echo("not right: " + "; ".join(wrong), err=True)
        raise typer.Exit(1)


@app.command()
def rounding(out: Out = None, quick: Quick = False, device: Device = "cpu") -> None:
    """Emulation of a generator and a trainer that round their logits or do not; always on the CPU."""
    document = new_document("rounding", torch.device("cpu"), quick=quick)
    path = out_path(out, document)
    emulation.run(document, quick=quick, out=path, say=speaker())
    finish(path)


@app.command("compare")
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


@app.command()
def counts(
    out: Annotated[Path, typer.Option(help="The JSON file, with which a test compares.")] = counted.FILE,
) -> None:
    """What a warm call executes on a CPU and on a simulated Hopper GPU: Python calls, functions, records,
    opcodes, operators and launches. The same in every run."""
    versions = {"trl": package_version("trl")}
    document = new_document("counts", torch.device("cpu"), quick=False, versions=versions)
    counted.run(document)
    write_json(out, document)
    finish(out)
    typer.echo(counted.table(document))


@app.command("small")
def small_calls(
    only: Annotated[list[str] | None, typer.Option(help="Measure only this loss; repeatable.")] = None,
    seconds: Seconds = 1.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    portable: Annotated[
        bool,
        typer.Option(help="By the portable kernels, those of GPUs other than Hopper (small-portable.json)."),
    ] = False,
) -> None:
    """Calls of 128 to 4,096 tokens, which wait for the host: us, with and without CUDA graphs
    (`LOGITLESS_CUDA_GRAPHS=0`), eager PyTorch and torch.compile; time, and time of the host."""
    target = chosen_device(device, quick)
    name = "small-portable" if portable else "small"
    document = new_document(name, target, quick=quick) | {"complete": False}
    path = out_path(out, document)
    options = {"quick": quick, "seconds": seconds, "out": path, "say": speaker()}
    with portable_kernels() if portable else nullcontext():
        small.run(document, target, only=picked(small.OBJECTIVES, only), **options)
    write_json(path, document)
    finish(path)
    typer.echo(small.table(document))
    if broken := small.failed(document):
        typer.echo(f"not right: {', '.join(broken)}")
        raise typer.Exit(1)


@app.command()
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


@app.command()
def cpu(out: Out = None, quick: Quick = False, seconds: Seconds = 30.0) -> None:
    """Cross-entropy on this machine's CPU beside plain PyTorch."""
    shapes = cross_entropy.QUICK_SHAPES[:1] if quick else (cross_entropy.CPU_SHAPE,)
    document = new_document("cpu", torch.device("cpu"), quick=quick)
    path = out_path(out, document)
    names = ("logitless", "eager, fp32 upcast")
    CE.run(
        document,
        shapes,
        torch.device("cpu"),
        only=names,
        seconds=0.0 if quick else seconds,
        out=path,
        say=speaker(),
    )
    finish(path)
    ours, plain = (row["ms"] for row in document["sections"][0]["rows"])
    typer.echo(f"{ours / plain:.2f} x plain PyTorch, on {torch.get_num_threads()} threads")


@app.command()
def sweep(
    max_tokens: Annotated[
        int, typer.Option(min=1024, help="The largest N; the sizes double from 1,024.")
    ] = 131072,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 3.0,
) -> None:
    """Cross-entropy against N at H=2048, V=151936, until memory runs out: what the picture is drawn from."""
    shapes = cross_entropy.QUICK_SHAPES[:1] if quick else cross_entropy.sweep_shapes(max_tokens)
    names = tuple(only or cross_entropy.SWEEP_NAMES)
    compare("sweep", CE, shapes, out, quick, device, names, tuple(skip or ()), seconds)


@app.command()
def gemm(
    shapes: Shapes = None,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
    seconds: Seconds = 10.0,
) -> None:
    """The three bare products against the chunk size: time per token, to choose the engine's chunks by."""
    target = chosen_device(device, quick)
    default = [shape for shape in cross_entropy.SHAPES if not shape.ignored]
    picked = parsed(CE, shapes) or (cross_entropy.QUICK_SHAPES[:1] if quick else tuple(default))
    chunks = chunk_gemms.QUICK_CHUNKS if quick else chunk_gemms.CHUNKS
    document = new_document("gemm", target, quick=quick)
    path = out_path(out, document)
    chunk_gemms.run(
        document, picked, chunks, target, seconds=0.0 if quick else seconds, out=path, say=speaker()
    )
    finish(path)


@app.command("numbers")
def list_numbers() -> None:
    """List the measured numbers in the sentences of README.md and docs with their sources; exits with 1 if a
    number has no source or differs from it."""
    from benchmarks.claims import CLAIMS

    found = list(numbers.numbers(CLAIMS, numbers.pages()))
    for number in found:
        typer.echo(f"{number.page}:{number.line}: {number.printed}: {number.fault or number.source}")
    if any(number.fault for number in found):
        raise typer.Exit(1)


@app.command()
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
    if "ce" in documents:
        tables[root / "README.md", "summary"] = summary.losses(documents)
        tables[root / "docs" / "why.md", "why"] = summary.implementations(documents)
    if operators := every("layers", results, partial=True):
        documents["layers"] = whole = layers.together([document for _, document in operators])
        tables[root / "docs" / "layers.md", "layers"] = layers.by_operator(whole, origin(whole, *operators))
    for name, (page, table) in ELSEWHERE.items():
        found_steps = every(name, results, partial=name in ("recipes", "small"))
        runs = [table(run[1], origin(run[1], run)) for run in found_steps]
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
        picture.draw(documents["sweep"], drawn, documents.get("ce"))
        typer.echo(f"{drawn}: drawn from {found['sweep'][0]}")
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


def compare(
    benchmark: str,
    objective: Objective,
    shapes: tuple[Shape, ...],
    out: Path | None,
    quick: bool,
    device: str,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    seconds: float,
) -> dict:
    """Runs a comparison over `shapes`, by default the objective's own; exits with 1 unless our own rows are
    all right."""
    target = chosen_device(device, quick)
    shapes = shapes or (objective.quick_shapes if quick else objective.shapes)
    document = new_document(benchmark, target, quick=quick, versions=objective.peers.versions())
    path = out_path(out, document)
    seconds = 0.0 if quick else seconds
    try:
        objective.run(
            document, shapes, target, only=only, skip=skip, seconds=seconds, out=path, say=speaker()
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except DeviceLost as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    finish(path)
    if failed := objective.ours_failed(document):
        typer.echo("not right: " + "; ".join(failed), err=True)
        raise typer.Exit(1)
    return document


def parsed(objective: Objective, shapes: list[str] | None) -> tuple[Shape, ...]:
    try:
        return tuple(objective.parse(text) for word in shapes or () for text in word.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
