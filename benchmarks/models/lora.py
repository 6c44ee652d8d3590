"""Training steps with LoRA on all linear layers, beside full fine-tuning of the same model.

Every row has the loss without full logits (`patch_model`) and, unless its name says otherwise, the other
fused layers; the rows differ in who computes the LoRA layers. axolotl's kernels compute the gate of an MLP
too. Compiled decoder layers are stock ones. A step is forward and backward pass under
autocast, clipping, and fused AdamW of the trained parameters, as TRL and PEFT train; the base has random bf16
weights, and the adapters are fp32 unless the name says otherwise. All rows of a run are measured in one
process, one after the other, each with its own model. The first step's loss and gradients are compared with
those of PEFT.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.harness import report
from benchmarks.harness.measure import GRADIENT_LIMIT, LOSS_LIMIT, synchronize
from benchmarks.harness.profiler import busy, kernels_of
from benchmarks.harness.registry import one_line
from benchmarks.harness.timing import release
from benchmarks.models.steps import MODELS, QUICK, Model
from benchmarks.peers.lora import PEERS
from logitless.exchange import withdraw
from logitless.layers import lora
from logitless.models import fuse_layers, patch_model

FULL, PEFT = "full fine-tuning", "PEFT"
WARMUP = 2
# With dropout, PEFT's masks are others.
NORM_LIMIT = 0.2


@dataclass(frozen=True)
class Row:
    """Who computes LoRA layers: "PEFT", a peer, or we, "each" by itself or "grouped"; None: no LoRA."""

    layers: str | None
    fused: bool = True  # the other layers
    base: torch.dtype = torch.bfloat16
    adapters: torch.dtype = torch.float32
    in_4_bits: bool = False  # the base's weights, as NF4 of bitsandbytes
    compiled: bool = False  # the decoder layers

    @property
    def is_reference(self) -> bool:
        return self.layers == "PEFT" and not self.compiled

    @property
    def is_peer(self) -> bool:
        return self.layers not in (None, "PEFT", "each", "grouped") or self.compiled


ROWS = {
    FULL: Row(None),
    PEFT: Row("PEFT"),
    "PEFT, compiled layers": Row("PEFT", fused=False, compiled=True),
    "axolotl": Row("axolotl"),
    "each by itself": Row("each"),
    "grouped": Row("grouped"),
}
# Measured only if they are named.
MORE_ROWS = {
    "PEFT, stock layers": Row("PEFT", fused=False),
    "PEFT, bf16 adapters": Row("PEFT", adapters=torch.bfloat16),
    "grouped, bf16 adapters": Row("grouped", adapters=torch.bfloat16),
    "PEFT, fp32 base": Row("PEFT", base=torch.float32),
    "grouped, fp32 base": Row("grouped", base=torch.float32),
    "PEFT, 4-bit base": Row("PEFT", in_4_bits=True),
    "grouped, 4-bit base": Row("grouped", in_4_bits=True),
}

# Below a table that has the row
NOTES = {
    "PEFT, compiled layers": "Compiled layers: `torch.compile` of each decoder layer of the stock model.",
    "axolotl": "axolotl: its kernels for LoRA layers and gates, our other fused layers; with dropout, the "
    "projections of one input share a mask, and `down_proj` has none.",
}


@dataclass(frozen=True)
class Settings:
    rank: int
    seconds: float  # of timed steps in a row
    minutes: float  # start no row that might not end within these
    profiled: bool  # whether one more step is profiled


def run(
    document: dict,
    device: torch.device,
    models: dict[str, Model],
    rows: dict[str, Row],
    *,
    checkpointing: tuple[bool, ...],
    dropouts: tuple[float, ...],
    settings: Settings,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """Fill `document`, a section for each model, checkpointing and dropout, and write it after every row."""
    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    wanted = {row.layers for row in rows.values()} & {peer.name for peer in PEERS.peers}
    peers, absent = PEERS.load(device, wanted) if wanted else ({}, {})
    for name, reason in absent.items():
        say(f"absent: {name}: {reason}")
    rows = {name: row for name, row in rows.items() if row.layers not in absent}
    document |= {"absent": absent, "sections": [], "complete": False}
    for name, model in models.items():
        longest = 0.0
        for is_checkpointed in checkpointing:
            for p in dropouts:
                section = {
                    "model": name,
                    "checkpointing": is_checkpointed,
                    "dropout": p,
                    "rank": settings.rank,
                }
                section |= {"sequences": model.sequences, "tokens": model.tokens, "rows": []}
                document["sections"].append(section)
                reference: dict = {}
                for row_name, row in rows.items():
                    if row.layers is None and p != dropouts[0]:
                        continue
                    begin = time.perf_counter()
                    if begin - start + longest > 60 * settings.minutes:
                        say(f"stopped before {title(section)}: {row_name}")
                        report.write_json(out, document)
                        return
                    found = attempt(model, row, section, document["seed"], device, settings, reference, peers)
                    section["rows"].append({"name": row_name} | found)
                    longest = max(longest, time.perf_counter() - begin)
                    report.write_json(out, document)
                    say(f"{title(section)}: {row_name}: {describe(section['rows'][-1])}")
    document["complete"] = True
    report.write_json(out, document)


def attempt(
    model: Model,
    row: Row,
    section: dict,
    seed: int,
    device: torch.device,
    settings: Settings,
    reference: dict,
    peers: dict[str, Callable],
) -> dict:
    """Measure one row. `reference` has the first step of PEFT's row, by dtypes, and gets it from that row."""
    begin = time.perf_counter()
    try:
        with ungrouped() if row.layers == "each" else contextlib.nullcontext():
            found, gradients = measure(model, row, section, seed, device, settings, peers)
    except torch.OutOfMemoryError:
        found, gradients = {"verdict": "out of memory"}, {}
    # The other rows must still be measured.
    except Exception as error:
        found, gradients = {"verdict": "failed", "reason": one_line(error)}, {}
    if row.compiled:
        torch.compiler.reset()
    release(device)
    kind = row.base, row.adapters, row.in_4_bits
    if row.is_reference and found["verdict"] == "ok":
        reference[kind] = found, gradients
    elif row.layers is not None and found["verdict"] == "ok" and kind in reference:
        compare(found, gradients, *reference[kind], masked=section["dropout"] > 0)
    return found | {"row_seconds": time.perf_counter() - begin}


def measure(
    shape: Model,
    row: Row,
    section: dict,
    seed: int,
    device: torch.device,
    settings: Settings,
    peers: dict[str, Callable],
) -> tuple[dict, dict[str, Tensor]]:
    """Return the row's numbers, and the adapters' gradients of the first step on the CPU."""
    model = build(shape, row, section, seed, device, peers)
    generator = torch.Generator().manual_seed(seed)
    size = shape.sequences, shape.tokens
    ids = torch.randint(1, shape.sizes["vocab_size"], size, generator=generator).to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def backward() -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    loss, norm = backward()
    found = {"verdict": "ok", "loss": loss.item(), "grad_norm": norm.item()}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = (
        {} if row.layers is None else {n: p.grad.float().cpu() for n, p in trained if p.grad is not None}
    )
    optimizer.zero_grad()
    for _ in range(WARMUP):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
    count = (
        min(20, max(3, round(settings.seconds / (time.perf_counter() - begin)))) if settings.seconds else 1
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    launched = time.perf_counter()
    synchronize(device)
    found |= {"steps": count, "ms": 1e3 * (time.perf_counter() - begin) / count}
    # The host's time for a step; above it, the GPU does not wait.
    found["host_ms"] = 1e3 * (launched - begin) / count
    found["peak_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if settings.profiled:
        found |= profiled(step, device)
    return found, gradients


def ungrouped() -> contextlib.AbstractContextManager:
    """Context in which every fused LoRA layer is computed by itself."""
    return mock.patch.object(lora, "_read_group", lambda x, layers: None)


def build(
    shape: Model, row: Row, section: dict, seed: int, device: torch.device, peers: dict[str, Callable]
) -> nn.Module:
    torch.manual_seed(seed)
    config = getattr(transformers, shape.config)(**shape.sizes, pad_token_id=0, use_cache=False)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=row.base, attn_implementation="sdpa"
        )
    if row.in_4_bits:
        quantize(model)
    if row.layers is not None:
        model = with_adapters(model, row, section, seed)
    if row.layers in peers:
        peers[row.layers](model)
    if section["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if row.fused:
        fuse_layers(model)
        if row.layers not in ("each", "grouped"):
            for module in model.modules():
                withdraw(module, lora.KEY)
    patch_model(model)
    if row.compiled:
        for layer in model.get_base_model().model.layers:
            layer.compile()
    return model


def quantize(model: nn.Module) -> None:
    """Replace the linear layers of the decoder as `BitsAndBytesConfig(load_in_4bit=True)` does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"quant_type": "nf4", "compress_statistics": True}
    for parent in model.model.modules():
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                new = Linear4bit(
                    layer.in_features,
                    layer.out_features,
                    layer.bias is not None,
                    compute_dtype=torch.bfloat16,
                    device="meta",
                    **options,
                )
                weight = Params4bit(layer.weight.data.cpu(), requires_grad=False, module=new, **options)
                new.weight, new.bias = weight.to(layer.weight.device), layer.bias
                setattr(parent, name, new)
    model.is_loaded_in_4bit = True


def with_adapters(model: nn.Module, row: Row, section: dict, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    r = section["rank"]
    config = LoraConfig(r=r, lora_alpha=2 * r, lora_dropout=section["dropout"], target_modules="all-linear")
    torch.manual_seed(seed)
    model = get_peft_model(model, config, autocast_adapter_dtype=row.adapters == torch.float32)
    model.enable_input_require_grads()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(row.adapters)
            if "lora_B" in name:  # zeros at the start, with which A has no gradient
                parameter.normal_(std=0.02)
    return model


def profiled(step: Callable[[], None], device: torch.device) -> dict:
    kernels = kernels_of(step, device)
    kinds = {
        "products": ("gemm", "nvjet", "cutlass", "splitk", "gemv", "cublas"),
        "attention": ("flash", "fmha", "attention", "sdpa"),
        "copies": ("copy", "memcpy", "cast"),
        "elementwise": ("elementwise", "bernoulli", "dropout"),
    }
    spent = dict.fromkeys((*kinds, "rest"), 0.0)
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        name = kernel.name.lower()
        kind = next((kind for kind, words in kinds.items() if any(word in name for word in words)), "rest")
        us = kernel.stop - kernel.start
        spent[kind] += us / 1e3
        by_name.setdefault(kernel.name[:100], []).append(us / 1e3)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:15]
    return {
        "gpu_ms": busy(kernels) / 1e3,
        "kernels": len(kernels),
        "ms_by_kind": spent,
        "longest": [{"kernel": name, "launches": len(ms), "ms": sum(ms)} for name, ms in longest],
    }


def compare(
    found: dict, gradients: dict[str, Tensor], peft: dict, wanted: dict[str, Tensor], *, masked: bool
) -> None:
    """Write how far the first step is from PEFT's, and "wrong" as the verdict where it is too far."""
    found["loss_difference"] = abs(found["loss"] - peft["loss"]) / abs(peft["loss"])
    found["grad_norm_difference"] = abs(found["grad_norm"] - peft["grad_norm"]) / peft["grad_norm"]
    is_right = found["loss_difference"] <= LOSS_LIMIT and found["grad_norm_difference"] <= NORM_LIMIT
    if not masked:
        pairs = [(gradients.get(name), value) for name, value in wanted.items()]
        errors = [((a - b).norm() / b.norm()).item() if a is not None else float("inf") for a, b in pairs]
        found["gradient_difference"] = max(errors)
        is_right = is_right and found["gradient_difference"] <= GRADIENT_LIMIT
    if not is_right:
        found["verdict"] = "wrong"


def title(section: dict) -> str:
    kind = "with" if section["checkpointing"] else "without"
    return (
        f"{section['model']}, {section['sequences']} x {section['tokens']:,}, r {section['rank']}, {kind} "
        f"checkpointing, dropout {section['dropout']:g}"
    )


def describe(row: dict) -> str:
    if "ms" not in row:
        return f"{row['verdict']} {row.get('reason', '')}".strip()
    memory = report.text(report.gib(row["peak_bytes"]), ", {:.1f} GiB") or ""
    gpu = f", GPU {row['gpu_ms']:.1f} ms in {row['kernels']} kernels" if "gpu_ms" in row else ""
    apart = [f"{name} {row[f'{name}_difference']:.0e}" for name in APART if f"{name}_difference" in row]
    from_peft = f", from PEFT: {', '.join(apart)}" if apart else ""
    return (
        f"{row['verdict']}: {row['ms']:.1f} ms (host {row['host_ms']:.0f}){memory}{gpu}{from_peft}; "
        f"{row['row_seconds']:.0f} s"
    )


APART = ("loss", "grad_norm", "gradient")


def ratio(document: dict, section: dict, row: dict, base: str, key: str = "ms") -> float | None:
    """The row's time over that of the row `base` of the same model and checkpointing (and dropout)."""
    same = [x for x in document["sections"] if all(x[k] == section[k] for k in ("model", "checkpointing"))]
    if base == PEFT:
        same = [x for x in same if x["dropout"] == section["dropout"]]
    times = [x[key] for each in same for x in each["rows"] if x["name"] == base and key in x]
    return row[key] / times[0] if times and key in row else None


HEADERS = ("", "ms a step", "of full", "of PEFT", "GPU: ms", "of full", "of PEFT", "GiB", "from PEFT")


def table(document: dict, form: str = "simple") -> str:
    parts = []
    for section in document["sections"]:
        body = []
        for row in section["rows"]:
            if row["verdict"] != "ok":
                body.append([row["name"], row["verdict"]])
                continue
            times = []
            for key in ("ms", "gpu_ms"):
                ratios = [ratio(document, section, row, base, key) for base in (FULL, PEFT)]
                times += [report.text(row.get(key), "{:.1f}"), *(report.text(x, "{:.2f}") for x in ratios)]
            memory = report.text(report.gib(row["peak_bytes"]), "{:.1f}")
            apart = [f"{row[f'{name}_difference']:.0e}" for name in APART if f"{name}_difference" in row]
            body.append([row["name"], *times, memory, ", ".join(apart)])
        lines = tabulate(body, HEADERS, tablefmt=form, disable_numparse=True)
        heading = title(section) + (f", on one {document['device']}:" if form == "github" else "")
        parts.append(f"{heading}\n\n{lines}")
    return "\n\n".join(parts)


def for_page(document: dict, source: str) -> str:
    how = (
        f"One {document['device']}, {document['date'][:10]}, bf16, random weights, fused AdamW, SDPA, LoRA "
        "on all linear layers: mean of whole steps in one process, without synchronization in between. "
        "GPU: its busy time in one profiled step. From PEFT: relative differences of the first step, "
        "of the loss, the gradient norm and, without dropout, the gradients (the largest of an adapter)."
    )
    names = {row["name"] for section in document["sections"] for row in section["rows"]}
    how = " ".join([how, *(note for name, note in NOTES.items() if name in names)])
    return f"{table(document, 'github')}\n\n{how}\n\n{source}"


def failed(document: dict) -> list[str]:
    """Rows of ours and of PEFT that are wrong or broke down."""
    peers = {name for name, row in (ROWS | MORE_ROWS).items() if row.is_peer}
    return [
        f"{title(section)}: {row['name']}: {row['verdict']} {row.get('reason') or ''}".strip()
        for section in document["sections"]
        for row in section["rows"]
        if row["verdict"] in ("wrong", "failed") and row["name"] not in peers
    ]


def available(quick: bool, sizes: list[str]) -> dict[str, Model]:
    """Return the models; with sizes such as "16x1024", each model with so many sequences and tokens."""
    models = QUICK if quick else MODELS
    if not sizes:
        return models
    batches = [tuple(map(int, size.split("x"))) for size in sizes]
    return {
        name if len(batches) == 1 else f"{name} {sequences}x{tokens}": replace(
            model, sequences=sequences, tokens=tokens
        )
        for name, model in models.items()
        for sequences, tokens in batches
    }
