"""In a process of `steps.py`: trains a model with random weights for a few steps."""

import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch import nn
from transformers import PrinterCallback, TrainerCallback

import logitless.trl_integration as our_trainers
from benchmarks.harness.measure import synchronize
from benchmarks.harness.registry import one_line
from benchmarks.models.steps import Configuration, Model, Settings
from benchmarks.models.trainer_steps import EOS, PAD, dtype_on, tokenizer
from logitless.activations.table import activation_table


def attempt(model: Model, configuration: Configuration, settings: Settings) -> dict:
    """A verdict, and numbers if it is "ok"."""
    transformers.logging.set_verbosity_error()
    try:
        return train(model, configuration, settings)
    # Any failure is a result here: the other processes go on.
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return {"verdict": "out of memory"}
        return {"verdict": "failed", "reason": one_line(error)}


def train(model: Model, configuration: Configuration, settings: Settings) -> dict:
    device = torch.device(settings.device)
    trainer = construct(model, configuration, settings, device)
    watch = Watch(device, settings)
    trainer.add_callback(watch)
    # Prints every log where there is no progress bar.
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    fitted = vars(trainer).get("fitted_activations")
    plan = {} if fitted is None else {"activations": fitted.fitted.last_plan.describe()}
    return plan | {
        "verdict": "ok",
        "ms": watch.ms,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        # Of the timed steps: the log before the last is that of the step before them.
        "tokens_per_step": (logs[-1]["num_tokens"] - logs[-2]["num_tokens"]) / settings.timed,
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
    }


class Watch(TrainerCallback):
    """Logs the first steps, then times the others as a whole, and logs what they came to."""

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.device, self.settings, self.start, self.ms = device, settings, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step, last = state.global_step, self.settings.logged + self.settings.timed
        if step == last:
            synchronize(self.device)
            self.ms = 1e3 * (time.perf_counter() - self.start) / self.settings.timed
        control.should_log = step <= self.settings.logged or step == last
        return control

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.settings.logged:
            synchronize(self.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.start = time.perf_counter()


def construct(
    model: Model, configuration: Configuration, settings: Settings, device: torch.device
) -> trl.SFTTrainer:
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": model.sequences,
        "max_length": model.tokens,
        "max_steps": settings.logged + settings.timed,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": settings.checkpointing,
        "logging_steps": 10**9,
        # Reads every loss, and waits for it.
        "logging_nan_inf_filter": False,
        "seed": settings.seed,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if configuration.budget is not None:
        options["activation_budget"] = activation_budget(model, configuration.budget, device)
    flags = {"use_chunked_loss": configuration.loss, "use_fused_layers": configuration.layers == "ours"}
    given = flags | {"use_liger_kernel": configuration.liger}
    options |= {name: True for name, on in given.items() if on} | configuration.options
    ours = our_trainers.SFTConfig, our_trainers.SFTTrainer
    pair = ours if any(flags.values()) else (trl.SFTConfig, trl.SFTTrainer)
    random = torch.Generator().manual_seed(settings.seed)
    count = model.sequences * (settings.logged + settings.timed)
    if configuration.options.get("packing"):
        count *= 4  # several make one row
    ids = torch.randint(2, model.sizes["vocab_size"], (count, model.tokens), generator=random).tolist()
    if configuration.uneven:
        lengths = torch.randint(model.tokens // 8, model.tokens + 1, (count,), generator=random).tolist()
        ids = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    made, own = causal_lm(model, settings, device), {}
    if configuration.layers == "liger":
        give_ligers_layers(made)
    if configuration.fp8:
        to_fp8(made)
    if configuration.adapter == "LoRA":
        own = {"peft_config": lora_config(configuration)}
    if configuration.adapter == "LoRA+":
        made = with_lora(made, configuration)
        own = {"optimizers": (lora_plus(made, options["learning_rate"], fused=on_gpu), None)}
    trainer = pair[1](
        model=made,
        args=pair[0](**options),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tokenizer(),
        **own,
    )
    if configuration.layers == "ours":
        print(trainer.fused_layers.reports["model"])
    if configuration.layers == "compiled":
        for layer in made.model.layers:
            layer.compile()
    return trainer


def activation_budget(model: Model, budget: str, device: torch.device) -> str | int:
    """A budget; "50%" lies half way between all layers full and all kept, which one layer's run counts."""
    if not budget.endswith("%"):
        return budget
    getattr(transformers, model.config)(**model.sizes).save_pretrained("config")
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        table = activation_table(
            "config", batch=model.sequences, length=model.tokens, dtype=dtype_on(device), device=device.type
        )
    least, most = table.total("full"), table.total("keep")
    return least + int((most - least) * float(budget[:-1]) / 100)


def causal_lm(model: Model, settings: Settings, device: torch.device) -> nn.Module:
    """In bf16 on a GPU."""
    config = getattr(transformers, model.config)(
        **model.sizes, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None
    )
    torch.manual_seed(settings.seed)
    with device:
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype_on(device), attn_implementation="sdpa"
        )
    for module in made.modules():
        # Gemma 4 does not divide its scores by sqrt(head_dim); its norms learn to. With weights of 1 every
        # softmax is saturated, and the gradients of a random model are noise.
        if hasattr(module, "q_norm") and getattr(module, "scaling", None) == 1.0:
            nn.init.constant_(module.q_norm.weight, module.head_dim**-0.5)
    return made


def to_fp8(model: nn.Module) -> None:
    """All products but the head's."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda module, name: "lm_head" not in name)


def lora_config(configuration: Configuration) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, lora_dropout=configuration.dropout, target_modules="all-linear")


def with_lora(model: nn.Module, configuration: Configuration) -> nn.Module:
    from peft import get_peft_model

    return get_peft_model(model, lora_config(configuration))


def lora_plus(model: nn.Module, learning_rate: float, *, fused: bool) -> torch.optim.Optimizer:
    from peft.optimizers import create_loraplus_optimizer

    rates = {"lr": learning_rate, "loraplus_lr_ratio": 16}
    return create_loraplus_optimizer(model, torch.optim.AdamW, **rates, fused=fused)


def give_ligers_layers(model: nn.Module) -> None:
    """Its norms, rotation and MLPs; the loss stays TRL's, or ours."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
