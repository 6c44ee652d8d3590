"""One rank of a run of `fsdp.py`: trains for a few steps with FSDP2, and writes its numbers."""

import faulthandler
import json
import os
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import DistributedType, PartialState
from datasets import Dataset
from torch import Tensor
from tqdm import tqdm
from transformers import PrinterCallback

from benchmarks.harness.forked import detach
from benchmarks.harness.registry import one_line
from benchmarks.models.fsdp import Job
from benchmarks.models.step_process import causal_lm, give_ligers_layers
from benchmarks.models.trainer_steps import Watch, pair, preferences, quiet, tokenizer

FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}


def main(job: Job, rank: int, folder: str) -> None:
    """Writes `<rank>.json` and ends this process at once: leaving the process group might wait for others."""
    detach(f"{folder}/{rank}.log")
    # Where it hangs, if it does.
    faulthandler.dump_traceback_later(max(1.0, job.seconds - 5), file=2)
    quiet()
    # Its own is a semaphore, which nobody would clean up.
    tqdm.set_lock(threading.RLock())
    found = attempt(job, rank, folder)
    draft = Path(folder, f"{rank}.part")
    draft.write_text(json.dumps(found))
    draft.rename(draft.with_suffix(".json"))
    os._exit(found["verdict"] != "ok")


def attempt(job: Job, rank: int, folder: str) -> dict:
    try:
        return in_group(job, rank, folder)
    # Any failure is a result here: the other runs go on.
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return {"verdict": "out of memory", "reason": f"rank {rank}"}
        return {"verdict": "failed", "reason": f"rank {rank}: {one_line(error)}"}


def in_group(job: Job, rank: int, folder: str) -> dict:
    """Trains as this rank of a group, with the variables that torchrun sets."""
    on_gpu = job.settings.device == "cuda"
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        shard_without_cards()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        rank=rank,
        world_size=job.ranks,
        init_method=f"file://{folder}/store",
        timeout=timedelta(seconds=job.seconds),
        device_id=device if on_gpu else None,
    )
    return train(job, device, folder)


def shard_without_cards() -> None:
    """Accelerate shards models for processes with cards alone: it is told that these have some."""
    made = PartialState.__init__

    def with_cards(self: PartialState, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = with_cards


def train(job: Job, device: torch.device, folder: str) -> dict:
    trainer = construct(job, device, folder)
    watch = Watch(device, job.settings.logged)
    trainer.add_callback(watch)
    # Prints every log where there is no progress bar.
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    plan = getattr(trainer, "last_plan", None)
    return {
        "verdict": "ok",
        "times": watch.ms[job.settings.logged :],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
        "parameters_of_rank": sum(x.to_local().numel() for x in trainer.model.parameters()),
    } | ({} if plan is None else {"plan": plan.describe()})


def construct(job: Job, device: torch.device, folder: str) -> transformers.Trainer:
    """On a GPU the model is built there in bf16, whole; FSDP keeps a rank's shard of it."""
    model, made, settings = job.model, job.configuration, job.settings
    ours = made.loss or made.layers == "ours"
    flags = {"use_chunked_loss": made.loss, "use_fused_layers": made.layers == "ours"} if ours else {}
    batch = model.sequences // 2 if job.trainer == "DPO" else model.sequences
    options = {
        "output_dir": f"{folder}/out",
        "per_device_train_batch_size": batch,
        "max_length": model.tokens,
        "max_steps": settings.logged + settings.timed,
        "logging_steps": 1,
        # Else a NaN would be logged as the mean of the losses before it.
        "logging_nan_inf_filter": False,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": settings.checkpointing,
        "seed": settings.seed,
        "bf16": True,
        "use_cpu": device.type == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **made.options,
    }
    config, trainer = pair(job.trainer, ours=ours)
    models = [causal_lm(model, settings, device) for _ in range(2 if job.trainer == "DPO" else 1)]
    if made.layers == "liger":
        for each in models:
            give_ligers_layers(each)
    given: dict[str, Any] = dict(zip(("model", "ref_model"), models))
    # New sequences in every step: the same ones again would be learned by heart within a few.
    random, count = torch.Generator().manual_seed(settings.seed), batch * job.ranks * options["max_steps"]
    if job.trainer == "DPO":
        given["train_dataset"] = preferences(count, model.tokens, random)
    else:
        ids: Tensor = torch.randint(2, model.sizes["vocab_size"], (count, model.tokens), generator=random)
        given["train_dataset"] = Dataset.from_dict({"input_ids": ids.tolist()})
    return trainer(args=config(**options, **flags, **FSDP), processing_class=tokenizer(), **given)
