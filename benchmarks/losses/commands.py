"""The commands that measure losses."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness.measure import DeviceLost
from benchmarks.harness.objective import Objective, Shape
from benchmarks.harness.options import (
    Device,
    Only,
    Out,
    Quick,
    Seconds,
    Skip,
    check,
    chosen_device,
    finish,
    out_path,
    picked,
    portable_kernels,
    speaker,
)
from benchmarks.harness.report import new_document, write_json
from benchmarks.losses import ce as cross_entropy
from benchmarks.losses import distillation as teaching
from benchmarks.losses import gemm as chunk_gemms
from benchmarks.losses import given_logits as given
from benchmarks.losses import medusa as multi_head
from benchmarks.losses import preference as pairs
from benchmarks.losses import rounding as emulation
from benchmarks.losses import sampler as kept_ids
from benchmarks.losses import small
from benchmarks.losses import tensor_parallel as shards
from benchmarks.losses import topk as several_ids
from benchmarks.losses.ce import CE, CE_PORTABLE
from benchmarks.losses.distillation import DISTILLATION
from benchmarks.losses.medusa import MEDUSA
from benchmarks.losses.policy import POLICY
from benchmarks.losses.preference import PREFERENCE
from benchmarks.losses.speculators import SPECULATORS

Shapes = Annotated[
    list[str] | None, typer.Option(help="NxHxV or NxHxV@IGNORED, several with commas. Default: the design's.")
]


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
    compare("ce", CE, parsed(CE, shapes), out, quick, device, only, skip, seconds)


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
        compare("ce-portable", CE_PORTABLE, picked, out, quick, device, None, None, seconds)


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
    compare("distillation", DISTILLATION, picked, out, quick, device, only, skip, seconds)


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
    compare("speculators", SPECULATORS, parsed(SPECULATORS, shapes), out, quick, device, only, skip, seconds)


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
    compare("preference", PREFERENCE, parsed(PREFERENCE, shapes), out, quick, device, only, skip, seconds)


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
    compare("policy", POLICY, parsed(POLICY, shapes), out, quick, device, only, skip, seconds)


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
    document = compare("orpo-batch", PREFERENCE, shapes, out, quick, device, only, skip, seconds)
    typer.echo(pairs.by_token(document))


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
    names = only or pairs.LENGTH_NAMES
    document = compare("dpo-length", PREFERENCE, shapes, out, quick, device, names, skip, seconds)
    typer.echo(pairs.by_token(document))


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
    compare("distillation-length", DISTILLATION, shapes, out, quick, device, ("logitless",), None, seconds)


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
    document = compare("medusa", MEDUSA, parsed(MEDUSA, shapes), out, quick, device, only, skip, seconds)
    typer.echo(multi_head.table(document))
    if grown := multi_head.grown(document):
        typer.echo("memory grows with the heads: " + "; ".join(grown), err=True)
        raise typer.Exit(1)


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
    check(
        [section["loss"] for section in document["sections"] for x in section["rows"][1:] if not x["right"]]
    )


def topk(out: Out = None, quick: Quick = False, device: Device = "", seconds: Seconds = 4.0) -> None:
    """Log-probabilities of 64 ids per token, the 64 best, and the renormalized top-k loss: time in bare
    products, memory, beside PyTorch on full logits."""
    target = chosen_device(device, quick)
    document = new_document("topk", target, quick=quick)
    path, shape = out_path(out, document), several_ids.QUICK_SHAPE if quick else several_ids.SHAPE
    several_ids.run(document, shape, target, seconds=0.0 if quick else seconds, out=path, say=speaker())
    finish(path)
    typer.echo(several_ids.table(document))
    check(several_ids.failed(document))


def sampler(out: Out = None, quick: Quick = False, device: Device = "", seconds: Seconds = 4.0) -> None:
    """GRPO over a sampler's kept ids: time in three bare products, memory, beside the call without sets and
    beside full logits."""
    target = chosen_device(device, quick)
    document = new_document("sampler", target, quick=quick)
    path = out_path(out, document)
    kept_ids.run(document, target, quick=quick, seconds=0.0 if quick else seconds, out=path, say=speaker())
    finish(path)
    typer.echo(kept_ids.table(document))
    check(kept_ids.failed(document))


def rounding(out: Out = None, quick: Quick = False, device: Device = "cpu") -> None:
    """Emulation of a generator and a trainer that round their logits or do not; always on the CPU."""
    document = new_document("rounding", torch.device("cpu"), quick=quick)
    path = out_path(out, document)
    emulation.run(document, quick=quick, out=path, say=speaker())
    finish(path)


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
    check(small.failed(document))


def of_given_logits(
    only: Only = None,
    skip: Skip = None,
    seconds: Seconds = 4.0,
    out: Out = None,
    quick: Quick = False,
    device: Device = "",
) -> None:
    """`logitless.cross_entropy` of logits that exist already: us, every installed peer, and a copy of the
    logits."""
    target = chosen_device(device, quick)
    computes, absent = given.GIVEN_LOGITS.load(target, only or (), skip or ())
    document = new_document("given-logits", target, quick=quick, versions=given.GIVEN_LOGITS.versions())
    document |= {"complete": False, "absent": absent}
    path = out_path(out, document)
    given.run(document, target, computes, seconds=seconds, out=path, say=speaker())
    finish(path)
    check(given.failed(document))


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
    names = only or cross_entropy.SWEEP_NAMES
    compare("sweep", CE, shapes, out, quick, device, names, skip, seconds)


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


def compare(
    benchmark: str,
    objective: Objective,
    shapes: tuple[Shape, ...],
    out: Path | None,
    quick: bool,
    device: str,
    only: Sequence[str] | None,
    skip: Sequence[str] | None,
    seconds: float,
) -> dict:
    """Runs a comparison over `shapes`, by default the objective's own; exits with 1 unless our own rows are
    all right."""
    target = chosen_device(device, quick)
    shapes = shapes or (objective.quick_shapes if quick else objective.shapes)
    document = new_document(benchmark, target, quick=quick, versions=objective.peers.versions())
    path = out_path(out, document)
    parts = {"only": tuple(only or ()), "skip": tuple(skip or ())}
    try:
        objective.run(
            document, shapes, target, **parts, seconds=0.0 if quick else seconds, out=path, say=speaker()
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except DeviceLost as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    finish(path)
    check(objective.ours_failed(document))
    return document


def parsed(objective: Objective, shapes: list[str] | None) -> tuple[Shape, ...]:
    try:
        return tuple(objective.parse(text) for word in shapes or () for text in word.split(","))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
