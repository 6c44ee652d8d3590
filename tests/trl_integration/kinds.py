"""What each kind of trainer needs for a run of a few steps: its data, its settings, and how close two runs
come."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from datasets import Dataset

from .test_distillation_trainers import FUSED, collate, teacher
from .test_log_prob_trainers import ROLLOUTS, kto_dataset, preference_dataset, prompt_dataset, reward
from .test_online_trainers import text_reward, triple_dataset
from .test_self_distillation_trainers import privileged_dataset
from .test_teacher_distillation_trainers import batches
from .tiny import tiny_dataset

KINDS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "ORPO", "CPO", "GKD", "Distillation")


ROLLED = ROLLOUTS | {"max_completion_length": 6}
DISTILLED = {"max_completion_length": 6, "optim": "sgd", "learning_rate": 0.3}
SETTINGS: dict[str, dict[str, Any]] = {
    "ORPO": {"max_length": 48},
    "CPO": {"max_length": 48},
    "KTO": {"per_device_train_batch_size": 4},
    # with a reference model
    "GRPO": ROLLED | {"beta": 0.1},
    "RLOO": ROLLED | {"beta": 0.1},
    "GMPO": ROLLED,
    "OnlineDPO": {"max_new_tokens": 6, "max_length": 64},
    "A2PO": {"max_completion_length": 6, "num_value_samples": 2, "filter_all_incorrect": False},
    "GKD": {"lmbda": 0.0, "max_length": None},
    "Distillation": {"max_completion_length": 6},
    "SDFT": DISTILLED | {"num_generations": 1, "distillation_topk": 7, "per_device_train_batch_size": 4},
    "SDPO": DISTILLED | {"distillation_weight": 0.5, "num_generations": 2, "per_device_train_batch_size": 4},
    "IWOPD": DISTILLED
    | {"beta": 0.4, "loss_top_k": 3, "lmbda": 0.0, "max_length": 48, "distillation_objective": "jsd"},
    "GOLD": DISTILLED | {"lmbda": 0.0, "max_length": 48, "dataset_kwargs": {"skip_prepare_dataset": True}},
    "ServerDistillation": DISTILLED | {"teacher_model_server_url": "http://nowhere"},
}
# of those that take a model and a dataset; AsyncGRPO and AsyncDistillation load the model and ask a server
ALL = (*KINDS, "GMPO", "OnlineDPO", "A2PO", "TPO", "SDFT", "SDPO", "IWOPD", "GOLD", "ServerDistillation")


def needs(kind: str, folder: Path) -> tuple[Dataset, dict[str, Any], dict[str, Any]]:
    """(dataset, settings of the config, arguments of the trainer)."""
    settings, trainer = SETTINGS.get(kind, {}), {}
    if kind in ("GRPO", "RLOO", "GMPO", "SDPO"):
        trainer["reward_funcs"] = reward
    if kind in ("OnlineDPO", "A2PO"):
        trainer["reward_funcs"] = text_reward
    if kind in ("GKD", "Distillation", "IWOPD", "GOLD"):
        trainer["teacher_model"] = teacher(folder)
    if kind in ("IWOPD", "GOLD"):
        trainer["data_collator"] = batches
    if kind == "GKD":
        trainer["data_collator"] = collate
    data: dict[str, Callable] = {"KTO": kto_dataset, "TPO": triple_dataset}
    data |= dict.fromkeys(("SFT", "GKD", "IWOPD", "GOLD"), tiny_dataset)
    data |= dict.fromkeys(("DPO", "ORPO", "CPO"), preference_dataset)
    data |= dict.fromkeys(("SDFT", "SDPO"), privileged_dataset)
    return data.get(kind, prompt_dataset)(), settings, trainer


def for_ranks(kind: str) -> dict[str, Any]:
    """Settings of a config in one of several processes."""
    found = {"use_cpu": dist.get_backend() == "gloo"}
    if kind in ("DPO", "KTO", "GRPO", "RLOO"):
        # Else TRL spreads the reference model over all cards, whoever has them.
        found["model_init_kwargs"] = {"device_map": None}
    return found


@contextmanager
def with_cards() -> Iterator[None]:
    """Accelerate shards models for processes with cards alone: those of gloo pass for them.

    Trainers make what they make on the CPU and move it themselves.
    """
    made = PartialState.__init__

    def passing(self, *args, **kwargs):
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    with mock.patch.object(PartialState, "__init__", passing), torch.device("cpu"):
        yield


def tolerances(kind: str) -> dict[str, Any]:
    """For `test_log_prob_trainers.assert_same`."""
    given = {"strategies": FUSED} if kind in ("SFT", "GKD", "Distillation") else {}
    return given | ({"rtol": 1e-3} if kind in ("GRPO", "RLOO", "Distillation") else {})
