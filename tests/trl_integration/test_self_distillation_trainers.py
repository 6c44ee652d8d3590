"""Our SDFT and SDPO pairs beside TRL's: the same losses, gradient norms and metrics over several optimizer steps."""

import peft
import pytest
import torch
from datasets import Dataset

from .test_distillation_trainers import uncompiled  # noqa: F401
from .test_log_prob_trainers import assert_same, side_by_side, text
from .test_sft import STEPS

FUSED = frozenset({"fused", "loss_only"})
ROLLOUTS = {"per_device_train_batch_size": 4, "max_completion_length": 6, "max_steps": STEPS, "learning_rate": 1e-2}
SDFT = {"num_generations": 1, **ROLLOUTS}
SDPO = {"num_generations": 2, "success_reward_threshold": 0.5, "scale_rewards": "none", **ROLLOUTS}


def privileged_dataset(examples=12) -> Dataset:
    return Dataset.from_dict({"prompt": text(examples, 0), "privileged_context": text(examples, 1)})


def lora(model, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options))


# Rollouts are used twice, so that the second time the student has moved away from them.
STALE = {"num_iterations": 2, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"distillation_topk": 10},
        {"distillation_topk": 7, "distillation_add_tail": True, "distillation_alpha": 0.0, "teacher_model_kind": "ema"},
        {"distillation_mode": "full_logits", "distillation_alpha": 1.0, "teacher_model_kind": "live", "num_loss_tokens_to_skip": 2},
        {"distillation_mode": "full_logits", "gradient_accumulation_steps": 2, "temperature": 0.8, "steps_per_generation": 2},
        {"distillation_mode": "full_logits", "distillation_is_clip": 1.01, **STALE},
        {"distillation_mode": "sampled_token", "distillation_alpha": 1.0, "distillation_is_clip": 1.01, **STALE},
    ],
    ids=["topk", "tail-ema", "full-live", "accumulated", "full-clip", "sampled-clip"],
)
def test_sdft(tmp_path, changes):
    assert_same(*side_by_side(tmp_path, "SDFT", privileged_dataset(), **SDFT | changes), strategies=FUSED, rtol=1e-3)
