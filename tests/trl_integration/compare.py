"""A trainer of TRL and ours, trained from the same weights on the same batches, and what must be equal."""

import copy
import re
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from transformers import PreTrainedModel

import logitless.trl_integration as ours
from logitless.trl_integration.adapter import Adapter, ChunkedLossSession

from .tiny import Run, assert_same_gradients, save, tiny_dataset, tiny_model, tiny_tokenizer, train, words

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


def stock_pair(kind: str) -> dict[str, type]:
    """TRL's `config` and `trainer` of that kind."""
    return {"config": stock(f"{kind}Config"), "trainer": stock(f"{kind}Trainer")}


def our_pair(kind: str) -> dict[str, type]:
    """Our `config` and `trainer` of that kind."""
    return {"config": getattr(ours, f"{kind}Config"), "trainer": getattr(ours, f"{kind}Trainer")}


def unchanged(x):
    return x


def sft_trainer(
    tmp_path,
    cls: Callable = trl.SFTTrainer,
    config: type = trl.SFTConfig,
    *,
    model: PreTrainedModel | None = None,
    **settings: Any,
) -> Any:
    """A trainer with the tiny dataset, before its first step; `settings` are those of its config."""
    return cls(
        tiny_model() if model is None else model,
        args=config(**options(tmp_path, **settings)),
        train_dataset=tiny_dataset(),
        processing_class=tiny_tokenizer(),
    )


def adapted(model: PreTrainedModel, **changes: Any) -> peft.PeftModel:
    torch.manual_seed(1)
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | changes
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def chunked_loss(logits_budget: int | None = None, **trainer: Any) -> ChunkedLossSession:
    """The chunked loss of no trainer of TRL's, but of an object with these attributes."""
    return ChunkedLossSession(SimpleNamespace(**{"args": None} | trainer), Adapter("trl:None"), logits_budget)


def side_by_side(
    tmp_path,
    kind: str,
    dataset: Dataset,
    *,
    family: str = "llama",
    wrap: Callable = unchanged,
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> list[Run]:
    """Trains with TRL's pair and with ours, from the same weights on the same batches."""
    path = tmp_path / "model"
    if not path.exists():
        # KTO and GRPO rebuild the reference from where the model came from.
        save(tiny_model(family), path)
    given = trainer or {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)

    def run(config: type, trainer: type, **flag: Any) -> Run:
        model = wrap(copy.deepcopy(loaded))
        settings = options(tmp_path / "out", **SGD | changes) | flag
        torch.manual_seed(0)
        return train(trainer, config(**settings), model, dataset, tokenizer=words(), **given)

    return [
        run(**stock_pair(kind)),
        run(**our_pair(kind), use_chunked_loss=True, logits_budget=16 * 1024),
    ]


def assert_same_run(of_stock: Run, mine: Run, rtol: float) -> None:
    """Every logged number and every gradient."""
    for stock_log, log in zip(of_stock.logs, mine.logs, strict=True):
        assert log.keys() == stock_log.keys()
        for key, value in stock_log.items():
            if "time" not in key:
                assert log[key] == pytest.approx(value, rel=rtol, abs=rtol / 10), key
    assert_same_gradients(of_stock, mine, rtol=rtol)


def assert_same(stock: Run, mine: Run, *, rtol: float = RTOL) -> None:
    assert len(stock.logs) == len(mine.logs) > STEPS
    for step, (of_stock, own) in enumerate(zip(stock.logs, mine.logs, strict=True)):
        assert of_stock.keys() == own.keys()
        for key in of_stock:
            # Where the reference is the policy itself, margins and their signs are rounding errors.
            tied = "accuracies" in key and abs(of_stock.get("rewards/margins", 1.0)) < 1e-4
            if "time" not in key and not tied:
                assert own[key] == pytest.approx(of_stock[key], rel=rtol, abs=1e-5), f"{key} at log {step}"
    assert_same_gradients(stock, mine, rtol=rtol)
    assert set(mine.strategies) <= {"fused", "recompute", "cached_grad", "loss_only"}, mine.strategies
    assert set(stock.strategies) == {None}
