"""Our SDFT and SDPO pairs beside TRL's: the same losses, gradient norms and metrics over several optimizer
steps."""

import peft
import pytest
from datasets import Dataset

import logitless.trl_integration as ours

from .served import serve
from .test_log_prob_trainers import assert_same, side_by_side, stock, text, words
from .test_sft import STEPS, options
from .tiny import SIZES, tiny_model

# SGD: Adam would make a step of the rounding of a gradient that is zero, as those outside of a renormalized
# support are.
ROLLOUTS = {
    "per_device_train_batch_size": 4,
    "max_completion_length": 6,
    "max_steps": STEPS,
    "optim": "sgd",
    "learning_rate": 0.3,
}
SDFT = {"num_generations": 1, **ROLLOUTS}
SDPO = {
    "num_generations": 2,
    "success_reward_threshold": 0.3,
    "include_environment_feedback": True,
    **ROLLOUTS,
}
# Rollouts are used twice; the second time the student has moved away from them.
STALE = {"num_iterations": 2, "gradient_accumulation_steps": 1}


def privileged_dataset(examples=12) -> Dataset:
    return Dataset.from_dict({"prompt": text(examples, 0), "privileged_context": text(examples, 1)})


def solved(completion_ids, **kwargs) -> list[float]:
    """Any number that differs between completions; about half of them succeed."""
    return [sum(ids[:4]) % 13 / 13 for ids in completion_ids]


def decided(path, **options) -> None:
    """A model whose distributions differ from one prompt to another, for `side_by_side` to load."""
    tiny_model(**options).save_pretrained(path / "model")
    words().save_pretrained(path / "model")


def lora(**options) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"distillation_topk": 10},
        {
            "distillation_topk": 7,
            "distillation_add_tail": True,
            "distillation_alpha": 0.0,
            "teacher_model_kind": "ema",
        },
        {
            "distillation_mode": "full_logits",
            "distillation_alpha": 1.0,
            "teacher_model_kind": "live",
            "num_loss_tokens_to_skip": 2,
        },
        {"distillation_mode": "full_logits", "gradient_accumulation_steps": 2, "temperature": 0.8},
        {"distillation_mode": "full_logits", "distillation_is_clip": 1.01, **STALE},
        {
            "distillation_mode": "sampled_token",
            "distillation_alpha": 1.0,
            "distillation_is_clip": 1.01,
            **STALE,
        },
        {"distillation_topk": 10, "num_loss_tokens_to_skip": 6},
    ],
    ids=["topk", "tail-ema", "full-live", "accumulated", "full-clip", "sampled-clip", "nothing-counts"],
)
def test_sdft(tmp_path, changes):
    decided(tmp_path)
    assert_same(*side_by_side(tmp_path, "SDFT", privileged_dataset(), **SDFT | changes), rtol=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "granite", "tied"])
def test_sdft_heads_of_families(tmp_path, family):
    decided(tmp_path, family=family)
    runs = side_by_side(tmp_path, "SDFT", privileged_dataset(), family=family, **SDFT, distillation_topk=10)
    # Student and teacher are so close that fp32 rounds 1e-3 of their divergence, here and in TRL.
    assert_same(*runs, rtol=4e-3)


@pytest.mark.parametrize("kind", ["base", "ema"])
@pytest.mark.parametrize("head", [None, ["lm_head"]], ids=["frozen-head", "head-saved"])
def test_sdft_with_lora(tmp_path, kind, head):
    """The teacher is the same model under another adapter, or none: with its own head, where the adapter has
    one."""
    if head and kind == "ema":
        pytest.skip("TRL has no EMA teacher beside an adapter with more than LoRA weights")
    decided(tmp_path)
    trainer = {"peft_config": lora(modules_to_save=head)}
    changes = {"teacher_model_kind": kind, "distillation_mode": "full_logits", "learning_rate": 0.1}
    assert_same(
        *side_by_side(tmp_path, "SDFT", privileged_dataset(), trainer=trainer, **SDFT | changes),
        rtol=2e-3,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "distillation_mode": "topk_logits",
            "distillation_topk": 5,
            "distillation_add_tail": True,
            "distillation_alpha": 0.3,
        },
        {"distillation_mode": "full_logits", "distillation_weight": 0.6, "gradient_accumulation_steps": 2},
        {"distillation_weight": 0.0, "loss_type": "grpo", "importance_sampling_level": "sequence", **STALE},
        {"distillation_weight": 0.5, "loss_type": "dr_grpo", **STALE},
    ],
    ids=["sampled", "topk", "mixed", "policy", "stale"],
)
def test_sdpo(tmp_path, changes):
    decided(tmp_path)
    trainer = {"reward_funcs": solved}
    runs = side_by_side(tmp_path, "SDPO", privileged_dataset(), trainer=trainer, **SDPO | changes)
    assert_same(*runs, rtol=1e-3)


@pytest.mark.parametrize("kind", ["SDFT", "SDPO"])
@pytest.mark.parametrize(
    "changes",
    [
        {"distillation_mode": "sampled_token"},
        {"distillation_mode": "topk_logits", "distillation_topk": 5, **STALE},
        {
            "distillation_mode": "topk_logits",
            "distillation_topk": 3,
            "distillation_add_tail": True,
            "distillation_alpha": 0.4,
        },
    ],
    ids=["sampled", "topk", "tail"],
)
def test_served_teacher(tmp_path, monkeypatch, kind, changes):
    decided(tmp_path)
    serve(monkeypatch)
    served = {
        "use_teacher_server": True,
        "use_vllm": True,
        "vllm_mode": "server",
        "teacher_model_kind": "live",
        "distillation_alpha": 1.0,
    }
    trainer = {"reward_funcs": solved} if kind == "SDPO" else {}
    settings = (SDPO if kind == "SDPO" else SDFT) | served | changes
    runs = side_by_side(tmp_path, kind, privileged_dataset(), trainer=trainer, **settings)
    assert_same(*runs, rtol=1e-3)
    assert runs[1].logs[0]["self_distillation/server_logprob_abs_diff"] > 0.1


def test_a_server_that_leaves_tokens_out(tmp_path, monkeypatch):
    decided(tmp_path)
    serve(monkeypatch, missing=True)
    served = {
        "use_teacher_server": True,
        "use_vllm": True,
        "vllm_mode": "server",
        "teacher_model_kind": "live",
    }
    args = ours.SDFTConfig(**options(tmp_path, **SDFT, **served, distillation_topk=5, use_chunked_loss=True))
    trainer = ours.SDFTTrainer(
        tiny_model(), args=args, train_dataset=privileged_dataset(), processing_class=words()
    )
    with pytest.raises(ValueError, match="no logprob for a required completion token"):
        trainer.train()


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"distillation_mode": "topk_logits", "distillation_topk": None},
            "distillation_topk: expected a number",
        ),
        ({"distillation_mode": "logits"}, "distillation_mode: expected one of 'full_logits'"),
    ],
)
def test_options_that_make_no_sense(tmp_path, changes, message):
    args = ours.SDFTConfig(
        **options(tmp_path, **SDFT, teacher_model_kind="live", use_chunked_loss=True, **changes)
    )
    given = {"train_dataset": privileged_dataset(), "processing_class": words()}
    with pytest.raises(ValueError, match=message):
        ours.SDFTTrainer(tiny_model(), args=args, **given)


@pytest.mark.parametrize("kind", ["SDFT", "SDPO"])
@pytest.mark.parametrize("mode", ["full_logits", "topk_logits", "sampled_token"])
def test_no_allocation_reaches_tokens_times_vocabulary(tmp_path, kind, mode):
    import transformers

    from tests.support import AllocationWatcher

    small = {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes = []
    for flag in (False, True):
        changes = {"use_chunked_loss": True, "logits_budget": 2**20} if flag else {}
        changes |= {
            "distillation_mode": mode,
            "distillation_topk": 8,
            "distillation_alpha": 1.0,
            "max_completion_length": 40,
        }
        settings = (
            (SDPO if kind == "SDPO" else SDFT) | {"teacher_model_kind": "live", "num_iterations": 2} | changes
        )
        settings |= {"distillation_weight": 0.5} if kind == "SDPO" else {}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | small))
        more = {"reward_funcs": solved} if kind == "SDPO" else {}
        owner = (
            ours
            if flag
            else type(
                "Stock", (), {name: staticmethod(stock(name)) for name in (f"{kind}Config", f"{kind}Trainer")}
            )
        )
        config, cls = getattr(owner, f"{kind}Config"), getattr(owner, f"{kind}Trainer")
        args = config(**options(tmp_path, **settings))
        trainer = cls(model, args=args, train_dataset=privileged_dataset(8), processing_class=words(), **more)
        trainer.current_gradient_accumulation_steps = 1
        inputs = trainer._prepare_training_batch([trainer.train_dataset[i // 2] for i in range(8)])
        with AllocationWatcher() as watch:
            old = {
                name: inputs[name]
                for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
            }
            inputs["old_per_token_logps"] = trainer._compute_rollout_logps(**old)
            trainer.compute_loss(trainer.model, inputs).backward()
        sizes.append(watch.largest)
    tokens = inputs["completion_ids"].numel()
    assert sizes[0] >= tokens * 4096 * 4 > 2**21 and sizes[1] <= 2**20, (sizes, tokens)
