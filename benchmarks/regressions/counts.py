"""What a warm call of a loss and its backward pass execute, counted on the CPU and on a simulated Hopper GPU,
there also of calls that are replayed as CUDA graphs.

The counts are the same in every run. A test compares them with the committed file, so that a slower call is
seen without a GPU.

    calls, functions, files   Python calls of the library, the functions that are called, and their files
    records                   dataclass instances and named tuples of the library that are made
    opcodes                   bytecode instructions, those of torch's Python code included
    aten, tensors             operators that Python or autograd calls; those of them that allocate memory
    launches                  Triton kernels and the library's matrix products, in order
"""

import gc
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import logitless
from benchmarks.harness.report import RESULTS
from benchmarks.regressions import simulated_hopper
from benchmarks.regressions.simulated_hopper import REPLAY
from logitless.engine.captured import SIGHTINGS
from logitless.engine.early_projection import LIKELY

FILE = RESULTS / "counts.json"
NOT_COUNTED = (__file__, simulated_hopper.__file__)
LIBRARY = str(Path(logitless.__file__).parent)
HOPPER, REPLAYED = "simulated Hopper", "simulated Hopper, replayed"
MACHINES = {"CPU": torch.float32, HOPPER: torch.bfloat16, REPLAYED: torch.bfloat16}
# A call is projected before its rows are counted after LIKELY calls, and replayed after SIGHTINGS more.
WARM_UPS = LIKELY + SIGHTINGS
# Functions of their own before Python 3.12.
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")
# A count may differ from that of the file by this share, or by one.
ALLOWANCE = 0.02
NUMBERS = ("calls", "functions", "files", "records", "opcodes", "aten", "tensors")
OF_VERSIONS = ("opcodes", "aten", "tensors")  # compared where the versions are those of the file


class Call(NamedTuple):
    leaves: list[Tensor]
    run: Callable[[], object]


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """The calls by name. Half of each sequence is prompt, except in cross-entropy and distillation."""
    B, T, H, V = 4, 16, 16, 64
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    hidden, weight = normal(B, T, H).requires_grad_(), normal(V, H).requires_grad_()
    every = torch.randint(V, (B, T), generator=random)
    answers = every.clone()
    answers[:, : T // 2] = -100
    reference = {"ref_hidden": normal(B, T, H), "ref_weight": normal(V, H)}
    teacher = {"teacher_hidden": normal(B, T, H), "teacher_weight": normal(V, H)}
    logps = {"old_logps": normal(B, T).float(), "ref_logps": normal(B, T).float()}

    def call(loss, targets, **inputs) -> Call:
        return Call([hidden, weight], lambda: loss(hidden, weight, targets, **inputs).loss.backward())

    yield "CE", call(logitless.CrossEntropyLoss(), every)
    yield "DPO, reference head", call(logitless.DPOLoss(), answers, **reference)
    yield (
        "GRPO, KL",
        call(
            logitless.GRPOLoss(beta=0.04, use_bias_correction_kl=False),
            answers,
            advantages=normal(B).float(),
            **logps,
        ),
    )
    yield "ORPO", call(logitless.ORPOLoss(), answers)
    yield "JSD", call(logitless.JSDLoss(), every, **teacher)
    if find_spec("peft"):
        yield "LoRA layers", lora_layers(dtype)
    if find_spec("trl"):
        with tempfile.TemporaryDirectory() as folder:
            yield "TRL SFT step", sft_step(dtype, Path(folder))


def lora_layers(dtype: torch.dtype) -> Call:
    """The projections of a fused attention with PEFT's adapters: q, k and v of one input, and o."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    from logitless.models import fuse_layers

    sizes = {"hidden_size": 16, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    attention = Qwen3Attention(Qwen3Config(**sizes, attn_implementation="sdpa"), 0).to(dtype)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(attention, LoraConfig(r=4, target_modules=names), autocast_adapter_dtype=False)
    fuse_layers(model)
    x = torch.randn(2, 4, 16).to(dtype).requires_grad_()
    angles = torch.ones(2, 4, 8).to(dtype), torch.ones(2, 4, 8).to(dtype)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    return Call(leaves, lambda: model(x, position_embeddings=angles, attention_mask=None)[0].sum().backward())


def sft_step(dtype: torch.dtype, folder: Path) -> Call:
    """`training_step` of TRL's trainer with `use_chunked_loss`, and a model of one layer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Qwen3Config

    from benchmarks.models.trainer_steps import EOS, PAD, quiet, tokenizer
    from logitless.trl_integration import SFTConfig, SFTTrainer

    quiet()
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**sizes, **heads, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    settings = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"}
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings, per_device_train_batch_size=4, use_chunked_loss=True),
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"input_ids": torch.randint(2, 64, (4, 16)).tolist()}),
    )
    model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    tokens = (batch["labels"][:, 1:] != -100).sum()
    return Call(list(model.parameters()), lambda: trainer.training_step(model, dict(batch), tokens))


def run(document: dict, machines: Iterable[str]) -> None:
    """Fill `document`. Each machine is measured in a separate process, a fork of this one."""
    if find_spec("trl"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import benchmarks.models.trainer_steps  # noqa: F401
    document["machines"] = {}
    for machine in machines:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            document["machines"][machine] = pool.submit(on_machine, machine).result()
    document["complete"] = True


def on_machine(machine: str) -> dict[str, dict]:
    torch.set_num_threads(1)
    if machine != "CPU":
        simulated_hopper.simulate()
    if machine == REPLAYED:
        simulated_hopper.simulate_cuda_graphs()
    # Compiling takes seconds and a C++ compiler, and on a GPU the losses here have kernels.
    with torch.compiler.set_stance("force_eager"):
        found = {name: counts_of(call) for name, call in calls(MACHINES[machine])}
    if machine != REPLAYED:
        return found
    return {name: counts for name, counts in found.items() if REPLAY in counts["launches"]}


def counts_of(call: Call) -> dict:
    def once() -> None:
        for leaf in call.leaves:
            leaf.grad = None
        call.run()

    for _ in range(WARM_UPS):
        once()
    trace = Trace()
    with trace.active():
        once()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        once()
    return trace.counts() | operators(session.events())


class Trace:
    """Counts what Python executes."""

    def __init__(self) -> None:
        self.calls = self.opcodes = 0
        self.functions: set[tuple[str, str]] = set()
        self.records: Counter[str] = Counter()

    @contextmanager
    def active(self) -> Iterator[None]:
        gc.collect()
        gc.disable()  # finalizers would be counted
        sys.settrace(self.event)
        try:
            yield
        finally:
            sys.settrace(None)
            gc.enable()

    def event(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        code = frame.f_code
        if code.co_filename in NOT_COUNTED:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            self.opcodes += 1
        elif event == "call" and code.co_filename.startswith(LIBRARY) and code.co_name not in INLINED:
            self.calls += 1
            self.functions.add((code.co_filename, code.co_qualname))
        elif event == "call" and (made := record_made(code, frame)) is not None:
            self.records[made] += 1
        return self.event

    def counts(self) -> dict:
        files = {file for file, _ in self.functions}
        return {
            "calls": self.calls,
            "functions": len(self.functions),
            "files": len(files),
            "records": sum(self.records.values()),
            "opcodes": self.opcodes,
            "record_names": dict(sorted(self.records.items())),
        }


def record_made(code: CodeType, frame: FrameType) -> str | None:
    """The name of the library's class whose constructor `dataclasses` or `collections` has generated."""
    if code.co_filename != "<string>" or code.co_varnames[:1] not in (("self",), ("_cls",)):
        return None
    first = frame.f_locals[code.co_varnames[0]]
    cls = first if isinstance(first, type) else type(first)
    constructs = code.co_name in ("__init__", "<lambda>")
    return cls.__name__ if constructs and cls.__module__.startswith("logitless") else None


def operators(events: list[FunctionEvent]) -> dict:
    """Counts of a profile; an operator that another one or a simulated kernel calls does not count."""
    events = sorted(events, key=lambda event: event.time_range.start)
    events = [event for event in events if is_operator(event) and not any(map(is_operator, parents(event)))]
    aten = [event for event in events if event.name.startswith("aten::")]
    launches = [event.name.removeprefix(simulated_hopper.LAUNCH) for event in events if is_launch(event)]
    tensors = sum(event.cpu_memory_usage > 0 for event in aten)
    return {
        "aten": len(aten),
        "tensors": tensors,
        "launches": [name.removeprefix("aten::") for name in launches],
    }


def is_operator(event: FunctionEvent) -> bool:
    return event.name.startswith(("aten::", simulated_hopper.LAUNCH))


def is_launch(event: FunctionEvent) -> bool:
    """Whether it is a kernel or a product, and no product in the backward pass of an operator of torch."""
    if event.name in PRODUCTS:
        return not any(parent.name.endswith("Backward0") for parent in parents(event))
    return event.name.startswith(simulated_hopper.LAUNCH)


def parents(event: FunctionEvent) -> Iterator[FunctionEvent]:
    while (event := event.cpu_parent) is not None:
        yield event


def differences(fresh: dict, committed: dict) -> list[str]:
    """Where fresh counts are others than those of the file, beyond the allowance."""
    same_versions = versions(fresh) == versions(committed)
    names = [name for name in NUMBERS if same_versions or name not in OF_VERSIONS]
    found = []
    for machine, rows in fresh["machines"].items():
        for call, row in rows.items():
            was = committed["machines"][machine].get(call)
            if was is None:
                found.append(f"{machine}, {call}: not in the file")
                continue
            found += [
                f"{machine}, {call}: {name} {was[name]} -> {row[name]}"
                for name in names
                if abs(row[name] - was[name]) > max(1, ALLOWANCE * was[name])
            ]
            if row["launches"] != was["launches"]:
                found.append(f"{machine}, {call}: launches {was['launches']} -> {row['launches']}")
    return found


def versions(document: dict) -> list[str | None]:
    """Of Python without its patch level, and of torch without its build."""
    known = document["versions"]
    python, torch_version = known["python"].rpartition(".")[0], known["torch"].partition("+")[0]
    return [python, torch_version, known["transformers"], known["trl"]]


def table(document: dict) -> str:
    body = [
        [machine, call, *(row[name] for name in NUMBERS), len(row["launches"])]
        for machine, rows in document["machines"].items()
        for call, row in rows.items()
    ]
    return tabulate(body, ["machine", "call", *NUMBERS, "launches"])
