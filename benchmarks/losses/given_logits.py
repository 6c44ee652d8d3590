"""`logitless.cross_entropy` of logits that exist already, beside other implementations and beside a copy.

A call is the forward and the backward pass, for the gradient of the logits. Each has separate logits, because
some implementations overwrite them. A copy of the logits reads and writes them once; no implementation can
move fewer bytes.

Calls are timed twice: behind matrix products that the GPU still computes while the host makes the call, as it
computes the forward pass of a model, and with an idle GPU, which waits for the host.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness.measure import GRADIENT_LIMIT, LOSS_LIMIT, synchronize
from benchmarks.harness.profiler import busy, kernels_of
from benchmarks.harness.registry import Peers, one_line
from benchmarks.harness.report import gib, text, write_json
from benchmarks.harness.timing import interleave, peak_bytes, release, spread

SHAPE, QUICK_SHAPE = (4096, 151_936), (64, 517)
AHEAD = 8192  # rows and columns of the products that a call is queued behind
PRODUCTS = 4
PROFILED = 5  # calls
CHECKED = 256  # rows that are compared with fp64
COPY = "copy"
GIVEN_LOGITS = Peers()


@GIVEN_LOGITS.add("logitless")
def ours():
    from logitless import cross_entropy

    return cross_entropy


@GIVEN_LOGITS.add("logitless, inplace")
def ours_inplace():
    from logitless import cross_entropy

    return lambda logits, targets: cross_entropy(logits, targets, inplace=True)


@GIVEN_LOGITS.add("F.cross_entropy")
def eager():
    return F.cross_entropy


@GIVEN_LOGITS.add("F.cross_entropy, fp32 upcast, compiled", needs_cuda=True)
def compiled():
    return torch.compile(lambda logits, targets: F.cross_entropy(logits.float(), targets), dynamic=False)


@GIVEN_LOGITS.add("Liger", package="liger-kernel", needs_cuda=True)
def liger():
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


@GIVEN_LOGITS.add("QuACK", package="quack-kernels", needs_cuda=True)
def quack():
    from quack.cross_entropy import cross_entropy

    return cross_entropy


def run(
    document: dict,
    device: torch.device,
    computes: dict[str, Callable],
    *,
    seconds: float,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """Fill `document`: a row for each implementation."""
    N, V = QUICK_SHAPE if document["quick"] else SHAPE
    random = torch.Generator(device).manual_seed(document["seed"])
    source = 2 * torch.randn(N, V, generator=random, device=device, dtype=torch.bfloat16)
    source.requires_grad_()
    targets = torch.randint(V, (N,), generator=random, device=device)

    def gradient(compute: Callable, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = compute(logits, y)
        return loss, *torch.autograd.grad(loss, logits)

    rows = {name: row(name, compute, source, targets, gradient) for name, compute in computes.items()}
    buffer = torch.empty_like(source)

    def case(compute: Callable | None) -> Callable:
        def prepare() -> Callable[[], None]:
            # Neither leaves nor views, which `inplace` refuses.
            logits = source * 1.0

            def call() -> None:
                if compute is None:
                    buffer.copy_(logits.detach())
                else:
                    gradient(compute, logits, targets)

            return call

        return prepare

    right = {name: computes[name] for name, each in rows.items() if each["verdict"] == "ok"}
    cases = {COPY: case(None)} | {name: case(compute) for name, compute in right.items()}
    behind = interleave(cases, device, seconds=seconds / 2, ahead=products(device))
    idle = interleave(cases, device, seconds=seconds / 2)
    copy = median(behind[COPY])
    gpu_copy = gpu_ms(cases[COPY], device)
    document |= {
        "shape": {"N": N, "V": V},
        "copy_ms": copy,
        "idle_copy_ms": median(idle[COPY]),
        "logits_bytes": source.nbytes,
    }
    if gpu_copy:  # not if the profiler sees nothing
        document["copy_gpu_ms"] = gpu_copy
    for name, compute in right.items():
        rows[name] |= spread(behind[name])
        rows[name]["of_copy"] = rows[name]["ms"] / copy
        rows[name]["idle_ms"] = median(idle[name])
        if gpu_copy:
            rows[name]["gpu_ms"] = gpu_ms(cases[name], device)
            rows[name]["gpu_of_copy"] = rows[name]["gpu_ms"] / gpu_copy
        logits = source * 1.0
        call = functools.partial(gradient, compute, logits, targets)
        rows[name]["peak_bytes"] = peak_bytes(call, device)
        del call, logits
        release(device)
    document |= {"rows": [{"name": name} | each for name, each in rows.items()], "complete": True}
    write_json(out, document)
    say(table(document))


def products(device: torch.device) -> Callable[[], None]:
    """A function that queues work for some milliseconds of a GPU."""
    if device.type != "cuda":
        return lambda: None
    a, b = (torch.randn(AHEAD, AHEAD, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def queue() -> None:
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=out)

    return queue


def gpu_ms(prepare: Callable[[], Callable[[], None]], device: torch.device) -> float:
    """Milliseconds in which the GPU is busy for one call."""
    times = []
    for _ in range(PROFILED if device.type == "cuda" else 1):
        call = prepare()
        synchronize(device)
        times.append(busy(kernels_of(call, device)) / 1e3)
    return median(times)


def row(name: str, compute: Callable, source: Tensor, targets: Tensor, gradient: Callable) -> dict:
    """The verdict on an implementation: errors against fp64, of the first rows."""
    wide = source[:CHECKED].detach().double().requires_grad_()
    loss, d_logits = gradient(F.cross_entropy, wide, targets[:CHECKED])
    try:
        found, d_found = gradient(compute, source[:CHECKED] * 1.0, targets[:CHECKED])
    # A peer may fail in any way; the others must still be measured.
    except Exception as error:
        return {"verdict": "failed", "reason": one_line(error)}
    errors = {
        "loss_error": abs(found.item() - loss.item()) / loss.item(),
        "gradient_error": ((d_found.double() - d_logits).norm() / d_logits.norm()).item(),
    }
    is_right = errors["loss_error"] <= LOSS_LIMIT and errors["gradient_error"] <= GRADIENT_LIMIT
    return {"verdict": "ok" if is_right else "wrong"} | errors


def table(document: dict, form: str = "simple") -> str:
    idle = f"{document['idle_copy_ms']:.2f}"
    body = [[COPY, f"{document['copy_ms']:.2f}", "1.00", "1.00", idle, "", ""]]
    for each in document["rows"]:
        numbers = [each["verdict"], "", "", "", ""]
        if "ms" in each:
            # The logits are there before the call.
            memory = text(gib(each["peak_bytes"]), "{:.2f}")
            ratios = [text(each.get(key), "{:.2f}") for key in ("of_copy", "gpu_of_copy")]
            numbers = [f"{each['ms']:.2f}", *ratios, f"{each['idle_ms']:.2f}", memory]
        body.append([each["name"], *numbers, text(each.get("gradient_error"), "{:.0e}")])
    times = ["ms", "copies", "copies, GPU alone", "ms, idle GPU"]
    headers = ["implementation", *times, "GiB", "gradient error"]
    if "copy_gpu_ms" not in document:
        headers, *body = [cells[:3] + cells[4:] for cells in (headers, *body)]
    return tabulate(body, headers, tablefmt=form, disable_numparse=True)


def for_page(document: dict, source: str) -> str:
    """The table of a run, and how it was measured, in Markdown."""
    shape = document["shape"]
    alone = " GPU alone: the time in which the GPU is busy, of both." if "copy_gpu_ms" in document else ""
    how = (
        f"One {document['device']}, {document['date'][:10]}, {shape['N']:,} x {shape['V']:,} logits in bf16: "
        "forward and backward pass of a call that the host makes while the GPU still computes other work, as "
        "it computes the forward pass of a model. Copies: the time divided by the time of a copy of the "
        f"logits, which reads and writes them once.{alone} Idle GPU: a call after a rest, in which the GPU "
        "waits for the host. The upstream gradient is 1. GiB: peak memory beyond the logits."
    )
    return f"{table(document, 'github')}\n\n{how}\n\n{source}"


def failed(document: dict) -> list[str]:
    """Our rows that are not right."""
    return [
        f"{each['name']}: {each['verdict']} {each.get('reason', '')}".strip()
        for each in document["rows"]
        if each["verdict"] != "ok" and each["name"].startswith("logitless")
    ]
