"""Models and trainers that existed before the flag: the same losses and gradients, and the way back."""

import pytest
import torch
import transformers
import trl

from logitless.trl_integration import ORPOConfig, ORPOTrainer, SFTConfig, SFTTrainer, apply_to, patch_model

from .served import serve
from .test_distillation_trainers import teacher
from .test_log_prob_trainers import ROLLOUTS, preference_dataset, prompt_dataset, reward, stock, words
from .test_self_distillation_trainers import privileged_dataset
from .test_sft import options
from .test_teacher_distillation_trainers import batches
from .tiny import VOCAB, tiny_dataset, tiny_model, tiny_tokenizer


def gradients(model, **inputs):
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["llama", "tied", "gemma2", "granite", "cohere", "mixtral"])
@pytest.mark.parametrize("num_items", [None, torch.tensor(50)], ids=["mean", "num_items"])
def test_patched_model(family, num_items, calls):
    model = tiny_model(family, **({"output_router_logits": True} if family == "mixtral" else {}))
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    inputs |= {} if num_items is None else {"num_items_in_batch": num_items}
    theirs, expected = gradients(model, **inputs)
    undo = patch_model(model, logits_budget=2**14)
    assert calls.number == 0
    ours, found = gradients(model, **inputs)
    assert calls.number == 1 and ours.logits is None
    assert torch.allclose(ours.loss, theirs.loss, rtol=1e-5)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    # Without labels nothing has changed.
    assert torch.equal(model(input_ids=ids).logits, theirs.logits) or torch.allclose(
        model(input_ids=ids).logits, theirs.logits
    )
    undo()
    assert gradients(model, **inputs)[0].logits is not None and calls.number == 1


def test_patched_model_in_the_plain_trainer(tmp_path):
    losses = []
    for patched in (False, True):
        model = tiny_model()
        if patched:
            patch_model(model)
        rows = tiny_dataset().map(lambda row: {"input_ids": (row["input_ids"] * 5)[:16]})
        data = rows.map(lambda row: {"labels": row["input_ids"]})
        args = transformers.TrainingArguments(
            **{k: v for k, v in options(tmp_path, gradient_accumulation_steps=2).items()}
        )
        trainer = transformers.Trainer(model, args=args, train_dataset=data, eval_dataset=data)
        trainer.train()
        losses.append(
            [log["loss"] for log in trainer.state.log_history if "loss" in log]
            + [trainer.evaluate()["eval_loss"]]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    "kind, more",
    [("SFT", {}), ("DPO", {"use_weighting": True}), ("ORPO", {"max_length": 48}), ("GRPO", ROLLOUTS)],
)
def test_apply_to(tmp_path, calls, kind, more):
    path = tmp_path / "model"
    tiny_model().save_pretrained(path)
    words().save_pretrained(path)
    logs = []
    for applied in (False, True):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        dataset = {"SFT": tiny_dataset, "GRPO": prompt_dataset}.get(kind, preference_dataset)()
        extra = {"reward_funcs": reward} if kind == "GRPO" else {}
        args = stock(f"{kind}Config")(**options(tmp_path / "out", **more))
        cls = type("Mine", (stock(f"{kind}Trainer"),), {}) if kind == "DPO" else stock(f"{kind}Trainer")
        trainer = cls(model, args=args, train_dataset=dataset, processing_class=words(), **extra)
        undo = apply_to(trainer, logits_budget=2**14) if applied else None
        trainer.train()
        logs.append(
            [
                {
                    k: v
                    for k, v in log.items()
                    if isinstance(v, float) and "time" not in k and "per_second" not in k
                }
                for log in trainer.state.log_history
            ]
        )
        assert (calls.number > 0) == applied
    for theirs, ours in zip(*logs, strict=True):
        for name in theirs.keys() - {"train_runtime", "total_flos"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    undo()
    assert type(trainer) is cls and not hasattr(trainer.args, "use_chunked_loss")


def test_what_needs_logits_is_refused(tmp_path):
    args = trl.SFTConfig(**options(tmp_path))
    trainer = trl.SFTTrainer(
        tiny_model(),
        args=args,
        train_dataset=tiny_dataset(),
        processing_class=tiny_tokenizer(),
        compute_metrics=lambda _: {},
    )
    with pytest.raises(ValueError, match="compute_metrics: expected None"):
        apply_to(trainer)
    mine = SFTTrainer(
        tiny_model(),
        args=SFTConfig(**options(tmp_path)),
        train_dataset=tiny_dataset(),
        processing_class=tiny_tokenizer(),
    )
    with pytest.raises(ValueError, match="trainer: expected one without"):
        apply_to(mine)
    with pytest.raises(ValueError, match="model: expected a causal language model"):
        patch_model(tiny_model().base_model)


DISTILLED = [
    ("SDFT", {"num_generations": 1, "distillation_topk": 7, "max_completion_length": 6}),
    (
        "SDPO",
        {
            "distillation_weight": 0.5,
            "num_generations": 2,
            "max_completion_length": 6,
            "per_device_train_batch_size": 4,
        },
    ),
    (
        "IWOPD",
        {
            "beta": 0.4,
            "loss_top_k": 3,
            "lmbda": 0.0,
            "distillation_objective": "jsd",
            "max_completion_length": 6,
        },
    ),
    ("GOLD", {"lmbda": 0.0, "max_completion_length": 6, "dataset_kwargs": {"skip_prepare_dataset": True}}),
    ("ServerDistillation", {"teacher_model_server_url": "http://nowhere", "max_completion_length": 6}),
]


def distilled(tmp_path, kind, more):
    """A stock trainer of this kind, with a model and a teacher of its own."""
    path = tmp_path / "model"
    tiny_model(initializer_range=0.3).save_pretrained(path)
    words().save_pretrained(path)
    torch.manual_seed(0)
    local = kind in ("IWOPD", "GOLD")
    dataset = (
        tiny_dataset()
        if local
        else prompt_dataset()
        if kind == "ServerDistillation"
        else privileged_dataset()
    )
    extra = (
        {"teacher_model": teacher(tmp_path), "data_collator": batches}
        if local
        else {"reward_funcs": reward}
        if kind == "SDPO"
        else {}
    )
    args = stock(f"{kind}Config")(
        **options(tmp_path / "out", **{"optim": "sgd", "learning_rate": 0.3} | more)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return stock(f"{kind}Trainer")(model, args=args, train_dataset=dataset, processing_class=words(), **extra)


@pytest.mark.parametrize("kind, more", DISTILLED)
def test_apply_to_distillation(tmp_path, monkeypatch, calls, kind, more):
    serve(monkeypatch)
    logs = []
    for applied in (False, True):
        trainer = distilled(tmp_path, kind, more)
        undo = apply_to(trainer, logits_budget=2**14) if applied else None
        trainer.train()
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert (calls.number > 0) == applied
    assert logs[1] == pytest.approx(logs[0], rel=1e-3) and logs[0][0] > 1e-3
    undo()
    assert type(trainer) is stock(f"{kind}Trainer")
    assert isinstance(trainer.model(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits, torch.Tensor)


def test_apply_to_leaves_a_trainer_that_it_refuses_as_it_was(tmp_path):
    trainer = distilled(tmp_path, "SDPO", DISTILLED[1][1] | {"distillation_mode": "topk_logits"})
    with pytest.raises(ValueError, match="distillation_topk: expected a number"):
        apply_to(trainer)
    assert type(trainer) is stock("SDPOTrainer") and not hasattr(trainer.args, "use_chunked_loss")


def test_data_parallel_is_refused(tmp_path):
    """`Trainer` wraps the model in it where one process sees several GPUs. TRL's own trainers refuse that
    themselves, these not."""
    patched, trained = tiny_model(), tiny_model()
    undo = patch_model(patched)
    args = ORPOConfig(**options(tmp_path, use_chunked_loss=True, max_length=48))
    ORPOTrainer(trained, args=args, train_dataset=preference_dataset(), processing_class=words())
    ids = torch.arange(3, 9)[None]
    for model, more in ((patched, {}), (trained, {"fused_lm_head": True})):
        # as torch.nn.parallel.replicate makes it, which needs two GPUs
        replica = model._replicate_for_data_parallel()
        with pytest.raises(ValueError, match="model: expected one process per GPU, got nn.DataParallel"):
            replica(ids, labels=ids, **more)
    undo()
    assert patched._replicate_for_data_parallel()(ids, labels=ids).logits is not None
