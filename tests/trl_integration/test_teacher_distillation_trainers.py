"""Our IW-OPD, ServerDistillation and GOLD pairs beside TRL's: the same losses, gradient norms and metrics
over several steps."""

from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import logitless.trl_integration as ours
from logitless.trl_integration.deferred import one_vocabulary
from logitless.trl_integration.pairs import ADAPTERS

from .served import serve
from .test_distillation_trainers import collate, teacher
from .test_log_prob_trainers import assert_same, prompt_dataset, side_by_side, stock, words
from .test_self_distillation_trainers import decided
from .test_sft import options
from .tiny import SIZES, VOCAB, tiny_dataset

FUSED = frozenset({"fused", "loss_only"})
SGD = {"optim": "sgd", "learning_rate": 0.3, "per_device_train_batch_size": 4}
OFF_POLICY = {"lmbda": 0.0, "max_length": 48, "max_completion_length": 8, **SGD}
IW_OPD = OFF_POLICY | {"distillation_objective": "jsd"}
ON_POLICY = OFF_POLICY | {"lmbda": 1.0, "distillation_objective": "iw_opd"}


def batches(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Rows padded on the left, as TRL's collators do; the first third of each is the prompt."""
    batch = collate(rows)
    full, prompts = batch["input_ids"].shape[1], [len(row["input_ids"]) // 3 for row in rows]
    order = [(torch.arange(full) + len(row["input_ids"])) % full for row in rows]
    for name in ("input_ids", "attention_mask", "labels"):
        batch[name] = torch.stack([x[rule] for x, rule in zip(batch[name], order, strict=True)])
    width = max(prompts)
    batch["prompts"] = torch.stack(
        [torch.tensor([0] * (width - n) + row["input_ids"][:n]) for n, row in zip(prompts, rows, strict=True)]
    )
    batch["prompt_attention_mask"] = torch.stack([torch.tensor([0] * (width - n) + [1] * n) for n in prompts])
    return batch


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.5, "loss_top_k": 0},
        {"beta": 0.0, "loss_top_k": 5, "gradient_accumulation_steps": 2},
        {"beta": 1.0, "loss_top_k": 4, "loss_add_tail": False, "temperature": 0.7},
        {"beta": 0.3, "loss_top_k": 6},
        {"beta": 0.3, "loss_top_k": 1},
        {"beta": 0.3, "loss_top_k": 1, "reverse_kl_top_1_mode": "argmax", "loss_add_tail": False},
        {"beta": 1.0, "loss_top_k": 1},
        {"beta": 0.5, "loss_top_k": 200},
    ],
    ids=["full", "teacher", "student", "both", "top1", "top1-argmax", "top1-reverse", "more-than-all"],
)
def test_iw_opd_divergences(tmp_path, changes):
    decided(tmp_path)
    trainer = {"teacher_model": teacher(tmp_path), "data_collator": batches}
    runs = side_by_side(tmp_path, "IWOPD", tiny_dataset(examples=16), trainer=trainer, **IW_OPD | changes)
    # Of the best id alone TRL takes log-probabilities, of more a divergence.
    strategies = {"recompute"} if changes["loss_top_k"] == 1 else FUSED
    assert_same(*runs, strategies=strategies, rtol=1e-3)


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 2, "temperature": 1.3, "iw_opd_gamma": 2.0}]
)
def test_iw_opd(tmp_path, changes):
    decided(tmp_path)
    trainer = {"teacher_model": teacher(tmp_path), "data_collator": batches}
    runs = side_by_side(tmp_path, "IWOPD", tiny_dataset(examples=16), trainer=trainer, **ON_POLICY | changes)
    assert_same(*runs, rtol=1e-3)
    assert "iw_opd/mean_weight" in runs[1].logs[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.0, "loss_top_k": 5},
        {"beta": 0.0, "loss_top_k": 3, "loss_add_tail": False},
        {"beta": 0.4, "loss_top_k": 1, "gradient_accumulation_steps": 2},
        {"beta": 1.0, "loss_top_k": 1},
        {"distillation_objective": "iw_opd", "lmbda": 1.0},
    ],
    ids=["forward", "renormalized", "mixed", "reverse", "iw_opd"],
)
def test_iw_opd_from_a_server(tmp_path, monkeypatch, changes):
    decided(tmp_path)
    serve(monkeypatch)
    served = {"use_teacher_server": True, "teacher_model_server_url": "http://nowhere"}
    runs = side_by_side(
        tmp_path,
        "IWOPD",
        tiny_dataset(examples=16),
        trainer={"data_collator": batches},
        **IW_OPD | served | changes,
    )
    assert_same(*runs, rtol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.0, "loss_top_k": 5},
        {"beta": 0.0, "loss_top_k": 3, "loss_add_tail": False, "temperature": 0.8},
        {"beta": 0.4, "gradient_accumulation_steps": 2},
        {"beta": 1.0},
    ],
    ids=["forward", "renormalized", "mixed", "reverse"],
)
def test_server_distillation(tmp_path, monkeypatch, changes):
    decided(tmp_path)
    serve(monkeypatch)
    settings = SGD | {"teacher_model_server_url": "http://nowhere", "max_completion_length": 6} | changes
    assert_same(
        *side_by_side(tmp_path, "ServerDistillation", prompt_dataset(), **settings),
        rtol=1e-3,
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.5, "temperature": 0.9},
        {"beta": 0.0, "gradient_accumulation_steps": 2},
        {"beta": 1.0, "lmbda": 1.0},
    ],
    ids=["jsd", "forward", "on-policy"],
)
def test_gold(tmp_path, family, changes):
    trainer = {"teacher_model": teacher(tmp_path), "data_collator": batches}
    settings = OFF_POLICY | {"dataset_kwargs": {"skip_prepare_dataset": True}} | changes
    runs = side_by_side(
        tmp_path, "GOLD", tiny_dataset(examples=16), family=family, trainer=trainer, **settings
    )
    assert_same(*runs, strategies=FUSED, rtol=1e-3)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("IWOPD", IW_OPD | {"loss_top_k": 3, "beta": 0.5}),
        ("GOLD", OFF_POLICY | {"dataset_kwargs": {"skip_prepare_dataset": True}}),
    ],
    ids=["IWOPD", "GOLD"],
)
def test_lora_leaves_the_head_alone(tmp_path, kind, changes):
    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )

    decided(tmp_path)
    trainer = {"teacher_model": teacher(tmp_path), "data_collator": batches}
    runs = side_by_side(tmp_path, kind, tiny_dataset(examples=16), wrap=adapted, trainer=trainer, **changes)
    assert_same(*runs, strategies=FUSED, rtol=1e-3)
    assert not any(p.requires_grad for p in runs[1].trainer.model.get_output_embeddings().parameters())


class Projections(TorchDispatchMode):
    """The dtypes of the factors of every product with a head, `(…, H) x (H, V)`."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
            and result.shape[-1] == VOCAB
        ):
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return result


@pytest.mark.parametrize("kind", ["IWOPD", "GOLD"])
def test_autocast_covers_the_teacher_and_both_heads(tmp_path, calls, kind):
    """bf16=True leaves the weights in fp32, and accelerate's autocast inside the forward that the flag
    bypasses."""
    decided(tmp_path)
    dtypes, taught = set(), teacher(tmp_path)
    taught.base_model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, args, out: dtypes.add(out.dtype)
    )
    trainer = {"teacher_model": taught, "data_collator": batches}
    changes = (
        IW_OPD | {"loss_top_k": 0}
        if kind == "IWOPD"
        else OFF_POLICY | {"dataset_kwargs": {"skip_prepare_dataset": True}}
    )
    with Projections() as projections:
        runs = side_by_side(
            tmp_path, kind, tiny_dataset(examples=16), trainer=trainer, **changes | {"bf16": True}
        )
    losses = [[log["loss"] for log in run.logs if "loss" in log] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert calls.number and dtypes == projections.dtypes == {torch.bfloat16}


def test_what_needs_logits_is_refused(tmp_path):
    trainer = SimpleNamespace(args=SimpleNamespace(use_uld_loss=True))
    with pytest.raises(ValueError, match="use_uld_loss: expected False with use_chunked_loss=True"):
        one_vocabulary(trainer)
    assert one_vocabulary in ADAPTERS["GOLD"].checks


WATCHED = {
    "full": ("IWOPD", IW_OPD | {"loss_top_k": 0}),
    "both": ("IWOPD", IW_OPD | {"loss_top_k": 5}),
    "top1": ("IWOPD", IW_OPD | {"loss_top_k": 1}),
    "iw_opd": ("IWOPD", ON_POLICY),
    "gold": ("GOLD", OFF_POLICY | {"dataset_kwargs": {"skip_prepare_dataset": True}}),
    "served": (
        "ServerDistillation",
        SGD | {"teacher_model_server_url": "http://nowhere", "beta": 0.0, "loss_top_k": 5},
    ),
}


@pytest.mark.parametrize("name", WATCHED)
def test_no_allocation_reaches_tokens_times_vocabulary(tmp_path, monkeypatch, name):
    from tests.support import AllocationWatcher

    serve(monkeypatch)
    kind, settings = WATCHED[name]
    small = SIZES | {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    words().save_pretrained(tmp_path)
    inputs = batches([{"input_ids": torch.randint(3, 90, (40,)).tolist()} for _ in range(8)])
    ids = inputs["input_ids"]
    inputs |= {"prompt_ids": ids[:, :13], "completion_ids": ids[:, 13:]}
    inputs |= {"prompt_mask": torch.ones_like(ids[:, :13]), "completion_mask": torch.ones_like(ids[:, 13:])}
    sizes = []
    for flag in (False, True):
        changes = {"use_chunked_loss": True, "logits_budget": 2**20} if flag else {}
        model, other = (transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)) for _ in range(2))
        other.config._name_or_path = str(tmp_path)
        find = (lambda name: getattr(ours, name)) if flag else stock
        args = find(f"{kind}Config")(**options(tmp_path, **settings | changes))
        more = {} if kind == "ServerDistillation" else {"teacher_model": other, "data_collator": batches}
        data = prompt_dataset() if kind == "ServerDistillation" else tiny_dataset()
        trainer = find(f"{kind}Trainer")(
            model, args=args, train_dataset=data, processing_class=words(), **more
        )
        trainer.current_gradient_accumulation_steps = 1
        with AllocationWatcher() as watch:
            trainer.compute_loss(trainer.model, dict(inputs)).backward()
        sizes.append(watch.largest)
    tokens = inputs["completion_ids"].numel()
    assert sizes[0] >= tokens * 4096 * 4 > 2**21 and sizes[1] <= 2**20, sizes
