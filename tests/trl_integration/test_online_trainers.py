"""Our OnlineDPO, A2PO, GMPO and TPO pairs beside TRL's: the same losses, gradient norms and metrics over
several optimizer steps."""

from contextlib import nullcontext

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset

import logitless.trl_integration as ours
from logitless.tools.check import relative_error
from logitless.trl_integration import apply_to
from tests.support import AllocationWatcher, assert_close

from .test_log_prob_trainers import (
    ROLLOUTS,
    RTOL,
    assert_same,
    preference_dataset,
    prompt_dataset,
    reward,
    side_by_side,
    text,
    words,
)
from .test_sft import options
from .tiny import SIZES, VOCAB, tiny_model

LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
FROZEN = frozenset({"cached_grad", "loss_only"})
# TPO's latest loss is the cross-entropy of its gold answers, where these count.
TPO = frozenset({"fused", "recompute", "loss_only"})


def text_reward(prompts, completions, **kwargs) -> list[float]:
    return [len(set(completion)) % 7 / 7 for completion in completions]


def right_or_wrong(prompts, completions, **kwargs) -> list[float]:
    return [float(len(set(completion)) % 2) for completion in completions]


def triple_dataset(examples=24) -> Dataset:
    names = ("prompt", "chosen", "rejected", "reference")
    return Dataset.from_dict({name: text(examples, seed) for seed, name in enumerate(names)})


def other_model(family="llama"):
    """Not the policy: of two equal models the margins are rounding errors, and their signs are logged as
    accuracies."""
    model = tiny_model(family)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    return model


def adapted(model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, LORA)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "ipo", "gradient_accumulation_steps": 2},
        {"temperature": 0.7, "missing_eos_penalty": 0.5, "max_length": 10},
        {"max_length": 7},
        # Nothing is left of the prompt, and TRL shifts nothing.
        {"max_length": 5},
    ],
    ids=["default", "ipo", "penalty", "prompt_of_one_token", "no_prompt"],
)
def test_online_dpo(tmp_path, changes):
    given = {"reward_funcs": text_reward} | ({"ref_model": other_model()} if changes else {})
    settings = {"max_new_tokens": 6, "max_length": 64, "beta": 0.1} | changes
    assert_same(*side_by_side(tmp_path, "OnlineDPO", prompt_dataset(), trainer=given, **settings), rtol=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_online_dpo_heads_of_families_and_a_reference_of_its_own(tmp_path, family):
    given = {"reward_funcs": text_reward, "ref_model": other_model(family)}
    runs = side_by_side(
        tmp_path, "OnlineDPO", prompt_dataset(), family=family, trainer=given, max_new_tokens=6, max_length=64
    )
    assert_same(*runs, rtol=1e-3)


def test_online_dpo_with_lora_keeps_the_vectors_of_a_frozen_head(tmp_path):
    given = {"reward_funcs": text_reward, "peft_config": LORA}
    runs = side_by_side(
        tmp_path, "OnlineDPO", prompt_dataset(), trainer=given, max_new_tokens=6, max_length=64
    )
    assert_same(*runs, rtol=1e-3, strategies=FROZEN)


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2, "beta2": 0.1}], ids=["default", "accumulated"]
)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_a2po(tmp_path, changes, lora):
    settings = {"max_completion_length": 6, "num_value_samples": 2, "filter_all_incorrect": False} | changes
    given = {"reward_funcs": right_or_wrong}
    wrap = adapted if lora else lambda model: model
    runs = side_by_side(tmp_path, "A2PO", prompt_dataset(), trainer=given, wrap=wrap, **settings)
    assert_same(*runs, rtol=1e-3, **({"strategies": FROZEN} if lora else {}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.1, "num_iterations": 2, "epsilon": 0.1},
        {"top_entropy_quantile": 0.5, "temperature": 0.8, "gradient_accumulation_steps": 2},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_gmpo(tmp_path, changes):
    assert_same(
        *side_by_side(
            tmp_path, "GMPO", prompt_dataset(), trainer={"reward_funcs": reward}, **ROLLOUTS | changes
        ),
        rtol=1e-3,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing": 0.1},
        {"loss_type": "hinge", "gradient_accumulation_steps": 2},
        {"loss_type": "ipo", "tpo_alpha": 0.0},
        {"loss_type": "tpo-l", "tpo_l_gamma": 0.7, "max_length": 12, "truncation_mode": "keep_end"},
    ],
    ids=lambda changes: changes.get("loss_type", "sigmoid"),
)
def test_tpo(tmp_path, changes):
    assert_same(*side_by_side(tmp_path, "TPO", triple_dataset(), **changes), strategies=TPO)


@pytest.mark.parametrize("family", ["gemma2", "granite", "mixtral"])
def test_tpo_heads_of_families(tmp_path, family):
    # Gemma 2's third gradient is five times the second: a difference of 1e-5 in that one, which is rounding,
    # is 1e-4 there.
    rtol = 2e-4 if family == "gemma2" else RTOL
    assert_same(*side_by_side(tmp_path, "TPO", triple_dataset(), family=family), rtol=rtol, strategies=TPO)


def test_tpo_with_lora(tmp_path):
    assert_same(
        *side_by_side(tmp_path, "TPO", triple_dataset(), trainer={"peft_config": LORA}), strategies=TPO
    )


def test_tpo_evaluates_the_same_and_predicts_logits(tmp_path):
    changes = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    runs = side_by_side(
        tmp_path, "TPO", triple_dataset(), trainer={"eval_dataset": triple_dataset(8)}, **changes
    )
    assert_same(*runs, strategies=TPO)
    theirs, mine = (run.trainer.predict(run.trainer.eval_dataset) for run in runs)
    assert mine.predictions.shape == theirs.predictions.shape and mine.predictions.ndim == 3


@pytest.mark.parametrize("kind", ["OnlineDPO", "A2PO", "GMPO", "TPO"])
def test_no_allocation_reaches_tokens_times_vocabulary(tmp_path, kind):
    """What the flag is for: with a budget of a few rows nothing of the size of the logits is allocated while
    a loss is computed."""
    tokens, sizes = 8 * 24, []
    changes = {"GMPO": {"num_generations": 4}, "TPO": {"max_length": 24}}.get(kind, {})
    data = triple_dataset(8) if kind == "TPO" else prompt_dataset(8)
    extra = {} if kind == "TPO" else {"reward_funcs": text_reward}
    for flag in (False, True):
        path = tmp_path / "model"
        config = SIZES | {
            "vocab_size": 4096,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
        }
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        settings = options(tmp_path, per_device_train_batch_size=8, **changes)
        settings |= {"use_chunked_loss": True, "logits_budget": 2**19} if flag else {}
        trainer = getattr(ours, f"{kind}Trainer")(
            model,
            args=getattr(ours, f"{kind}Config")(**settings),
            train_dataset=data,
            processing_class=words(),
            **extra,
        )
        attached = trainer.chunked_loss.attached() if flag else nullcontext()
        with attached, AllocationWatcher() as watch:
            LOSSES[kind](trainer, 4096).sum().backward()
        sizes.append(watch.largest)
    # GMPO's stock trainer has a chunked head of its own.
    assert sizes[1] <= 2**19 and (sizes[0] >= tokens * 4096 * 4 or kind == "GMPO"), sizes


def rollout(vocab, prompt=8, completion=24):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(3, vocab, (8, length), generator=generator) for length in (prompt, completion)]
    return parts, [torch.ones_like(part) for part in parts]


def online_dpo_loss(trainer, vocab):
    (prompt, completion), (prompt_mask, mask) = rollout(vocab)
    with torch.no_grad():
        trainer._forward(trainer.ref_model, prompt, prompt_mask, completion, mask)
    return trainer._forward(trainer.model, prompt, prompt_mask, completion, mask)


def a2po_loss(trainer, vocab):
    ids, mask = (torch.cat(parts, dim=1) for parts in rollout(vocab))
    with torch.no_grad():
        trainer._get_sequence_logps(trainer.ref_model, ids, mask, 24)
    return trainer._get_sequence_logps(trainer.model, ids, mask, 24)


def gmpo_loss(trainer, vocab):
    (prompt, completion), (prompt_mask, mask) = rollout(vocab)
    trainer.current_gradient_accumulation_steps = 1
    batch = {
        "prompt_ids": prompt,
        "prompt_mask": prompt_mask,
        "completion_ids": completion,
        "completion_mask": mask,
    }
    return trainer._compute_loss(trainer.model, batch | {"advantages": torch.linspace(-1, 1, 8)})


def tpo_loss(trainer, vocab):
    (prompt, completion), (prompt_mask, mask) = rollout(vocab)
    ids = torch.cat((prompt, completion), dim=1).repeat(3, 1)
    completions = torch.cat((0 * prompt_mask, mask), dim=1).repeat(3, 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completions}
    return trainer.compute_loss(trainer.model, batch)


LOSSES = {"OnlineDPO": online_dpo_loss, "A2PO": a2po_loss, "GMPO": gmpo_loss, "TPO": tpo_loss}


def test_the_reference_is_scored_in_the_policys_precision(tmp_path):
    """Accelerate wraps the reference in autocast before it gets our head."""
    args = ours.OnlineDPOConfig(**options(tmp_path, bf16=True, use_chunked_loss=True))
    given = {"train_dataset": prompt_dataset(), "processing_class": words(), "reward_funcs": text_reward}
    trainer = ours.OnlineDPOTrainer(tiny_model(), args=args, **given)
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    call = (ids[:, :3], torch.ones(2, 3, dtype=torch.long), ids[:, 3:], torch.ones(2, 6, dtype=torch.long))
    picked_by = lambda m: m(ids).logits[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:, None])[..., 0]  # noqa: E731
    with torch.no_grad():
        reference = trainer._forward(trainer.ref_model, *call)
        policy = trainer._forward(trainer.accelerator.prepare_model(trainer.model), *call)
        exact = picked_by(tiny_model().double())
        with torch.autocast("cpu", torch.bfloat16):
            naive = picked_by(tiny_model())
    assert torch.equal(reference, policy)
    assert (reference - exact).abs().max() > 1e-5
    assert_close(reference, exact, relative_error(naive, exact), name="reference")


def test_apply_to_keeps_the_references_precision(tmp_path):
    args = trl.DPOConfig(**options(tmp_path, bf16=True))
    trainer = trl.DPOTrainer(
        tiny_model(),
        ref_model=tiny_model(),
        args=args,
        train_dataset=preference_dataset(),
        processing_class=words(),
    )
    apply_to(trainer)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    policy = trainer.accelerator.prepare_model(trainer.model)
    with torch.no_grad():
        found = [
            model(ids, labels=ids, fused_lm_head=True).log_probs for model in (policy, trainer.ref_model)
        ]
    assert torch.equal(*found)
    # Every other call is as it was, and so is generation.
    assert trainer.ref_model(ids).logits.dtype == torch.float32
    assert trainer.ref_model.generate(ids, max_new_tokens=2).shape == (2, 11)


def test_an_encoder_decoder_is_refused(tmp_path):
    sizes = {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **sizes))
    args = ours.OnlineDPOConfig(**options(tmp_path, use_chunked_loss=True))
    given = {"train_dataset": prompt_dataset(), "processing_class": words(), "reward_funcs": text_reward}
    with pytest.raises(ValueError, match="model: expected a decoder with the chunked loss"):
        ours.OnlineDPOTrainer(model, args=args, **given)
