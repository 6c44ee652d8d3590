"""What each kind of trainer needs for a run of a few steps: its data, its settings, and how close two runs
come."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from .test_distillation_trainers import FUSED, collate, teacher
from .test_log_prob_trainers import ROLLOUTS, kto_dataset, preference_dataset, prompt_dataset, reward
from .tiny import tiny_dataset

KINDS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "ORPO", "CPO", "GKD", "Distillation")


def needs(kind: str, folder: Path) -> tuple[Dataset, dict[str, Any], dict[str, Any]]:
    """(dataset, settings of the config, arguments of the trainer)."""
    if kind == "SFT":
        return tiny_dataset(), {}, {}
    if kind in ("DPO", "ORPO", "CPO"):
        return preference_dataset(), {} if kind == "DPO" else {"max_length": 48}, {}
    if kind == "KTO":
        return kto_dataset(), {"per_device_train_batch_size": 4}, {}
    if kind in ("GRPO", "RLOO"):
        # with a reference model
        return prompt_dataset(), ROLLOUTS | {"beta": 0.1}, {"reward_funcs": reward}
    if kind == "GKD":
        return (
            tiny_dataset(),
            {"lmbda": 0.0, "max_length": None},
            {"teacher_model": teacher(folder), "data_collator": collate},
        )
    return prompt_dataset(), {"max_completion_length": 6}, {"teacher_model": teacher(folder)}


def tolerances(kind: str) -> dict[str, Any]:
    """For `test_log_prob_trainers.assert_same`."""
    given = {"strategies": FUSED} if kind in ("SFT", "GKD", "Distillation") else {}
    return given | ({"rtol": 1e-3} if kind in ("GRPO", "RLOO", "Distillation") else {})
