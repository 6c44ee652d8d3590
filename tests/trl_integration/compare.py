"""A trainer of TRL and ours, trained from the same weights on the same batches, and what must be equal."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from transformers import PreTrainedModel

import logitless.trl_integration as ours

from .tiny import Run, assert_same_gradients, tiny_model, train, words

STEPS = 2
# fp32 sums in another order, then a few optimizer steps on top
RTOL = 1e-4
# Adam divides gradients by themselves: of those that are rounding errors it makes steps of any sign.
SGD = {"optim": "sgd", "learning_rate": 0.03}


def options(tmp_path, **changes) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 3,
        "gradient_checkpointing": False,
        **changes,
    }


def stock(name: str) -> type:
    """TRL's class of that name, wherever it is kept."""
    kind = name.removesuffix("Config").removesuffix("Trainer")
    package = "iw_opd" if kind == "IWOPD" else re.sub("(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    return getattr(trl if hasattr(trl, name) else import_module(f"trl.experimental.{package}"), name)


def unchanged(x):
    return x


def adapted(model: PreTrainedModel, **changes: Any) -> peft.PeftModel:
    torch.manual_seed(1)
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | changes
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def side_by_side(
    tmp_path,
    kind: str,
    dataset: Dataset,
    *,
    family: str = "llama",
    wrap: Callable = unchanged,
    trainer: dict[str, Any] | None = None,
    budget: int = 16 * 1024,
    **changes: Any,
) -> list[Run]:
    """Trains with TRL's pair and with ours, from the same weights on the same batches."""
    path = tmp_path / "model"
    if not path.exists():
        # KTO and GRPO rebuild the reference from where the model came from.
        tiny_model(family).save_pretrained(path)
        words().save_pretrained(path)
    runs = []
    for config, cls, more in (
        (stock(f"{kind}Config"), stock(f"{kind}Trainer"), {}),
        (
            getattr(ours, f"{kind}Config"),
            getattr(ours, f"{kind}Trainer"),
            {"use_chunked_loss": True, "logits_budget": budget},
        ),
    ):
        model = wrap(transformers.AutoModelForCausalLM.from_pretrained(path))
        settings = options(tmp_path / "out", **SGD | changes) | more
        torch.manual_seed(0)
        runs.append(train(cls, config(**settings), model, dataset, tokenizer=words(), **(trainer or {})))
    return runs


def assert_same(stock: Run, mine: Run, *, rtol: float = RTOL, steps: int = STEPS) -> None:
    assert len(stock.logs) == len(mine.logs) > steps
    for step, (theirs, own) in enumerate(zip(stock.logs, mine.logs, strict=True)):
        assert theirs.keys() == own.keys()
        for key in theirs:
            # Where the reference is the policy itself, margins and their signs are rounding errors.
            tied = "accuracies" in key and abs(theirs.get("rewards/margins", 1.0)) < 1e-4
            if "time" not in key and not tied:
                assert own[key] == pytest.approx(theirs[key], rel=rtol, abs=1e-5), f"{key} at log {step}"
    assert_same_gradients(stock, mine, rtol=rtol)
    assert set(mine.strategies) <= {"fused", "recompute", "cached_grad", "loss_only"}, mine.strategies
    assert set(stock.strategies) == {None}
