"""Our DPO, KTO, GRPO and RLOO pairs beside TRL's: the same losses, gradient norms and metrics over several
optimizer steps."""

import re
from importlib import import_module

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset

import logitless.trl_integration as ours

from .test_sft import RTOL, STEPS, options
from .tiny import SIZES, VOCAB, assert_same_gradients, tiny_model, tiny_tokenizer, train


def sequences(examples: int, seed: int, low=2, high=12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (examples,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def text(examples: int, seed: int) -> list[str]:
    return [" ".join(f"w{i}" for i in row) for row in sequences(examples, seed)]


def preference_dataset(examples=24) -> Dataset:
    return Dataset.from_dict(
        {"prompt": text(examples, 0), "chosen": text(examples, 1), "rejected": text(examples, 2)}
    )


def kto_dataset(examples=24) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": text(examples, 0),
            "completion": text(examples, 1),
            "label": [i % 3 > 0 for i in range(examples)],
        }
    )


def prompt_dataset(examples=12) -> Dataset:
    return Dataset.from_dict({"prompt": text(examples, 0)})


def reward(completion_ids, **kwargs) -> list[float]:
    """Any number that differs between completions."""
    return [sum(ids[:4]) % 13 / 13 for ids in completion_ids]


def words() -> transformers.PreTrainedTokenizerFast:
    """The tiny tokenizer, splitting at spaces."""
    from tokenizers import pre_tokenizers

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def stock(name: str) -> type:
    """TRL's class of that name, wherever it is kept."""
    kind = name.removesuffix("Config").removesuffix("Trainer")
    package = "iw_opd" if kind == "IWOPD" else re.sub("(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    return getattr(trl if hasattr(trl, name) else import_module(f"trl.experimental.{package}"), name)


# Adam divides gradients by themselves: of those that are rounding errors it makes steps of any sign.
SGD = {"optim": "sgd", "learning_rate": 0.03}


def side_by_side(
    tmp_path,
    kind: str,
    dataset: Dataset,
    *,
    family="llama",
    wrap=lambda model: model,
    trainer=None,
    budget=16 * 1024,
    **changes,
):
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


def assert_same(
    stock, mine, *, strategies=frozenset({"recompute", "loss_only"}), rtol=RTOL, steps=STEPS
) -> None:
    assert len(stock.logs) == len(mine.logs) > steps
    for step, (theirs, own) in enumerate(zip(stock.logs, mine.logs, strict=True)):
        assert theirs.keys() == own.keys()
        for key in theirs:
            # Where the reference is the policy itself, margins and their signs are rounding errors.
            tied = "accuracies" in key and abs(theirs.get("rewards/margins", 1.0)) < 1e-4
            if "time" not in key and not tied:
                assert own[key] == pytest.approx(theirs[key], rel=rtol, abs=1e-5), f"{key} at log {step}"
    assert_same_gradients(stock, mine, rtol=rtol)
    assert set(mine.strategies) <= strategies and None not in mine.strategies, mine.strategies
    assert set(stock.strategies) == {None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": ["sigmoid", "sft", "bco_pair"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_type": "ipo", "precompute_ref_log_probs": True},
        {"use_weighting": True, "gradient_accumulation_steps": 2},
        {"loss_type": "aot", "ld_alpha": 0.4, "per_device_train_batch_size": 4},
        {"f_divergence_type": "js_divergence", "padding_free": True},
        {"loss_type": ["robust", "exo_pair"], "label_smoothing": 0.1},
        {"loss_type": ["robust", "sigmoid"], "label_smoothing": 0.1},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_dpo(tmp_path, changes):
    assert_same(*side_by_side(tmp_path, "DPO", preference_dataset(), **changes))


@pytest.mark.parametrize("family", ["gemma2", "granite", "tied"])
def test_dpo_heads_of_families(tmp_path, family):
    assert_same(*side_by_side(tmp_path, "DPO", preference_dataset(), family=family))


def test_dpo_with_lora_keeps_the_vectors_of_a_frozen_head(tmp_path):
    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )

    assert_same(
        *side_by_side(tmp_path, "DPO", preference_dataset(), wrap=adapted),
        strategies={"cached_grad", "loss_only"},
    )


@pytest.mark.parametrize("changes", [{}, {"loss_type": "apo_zero_unpaired"}], ids=["kto", "apo"])
def test_kto(tmp_path, changes):
    assert_same(*side_by_side(tmp_path, "KTO", kto_dataset(), per_device_train_batch_size=4, **changes))


ROLLOUTS = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": STEPS,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.1, "loss_type": "grpo", "num_iterations": 2},
        {
            "loss_type": "dr_grpo",
            "importance_sampling_level": "sequence",
            "temperature": 0.8,
            "num_iterations": 2,
        },
        {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
        {"cast_lm_head_to_fp32": True, "gradient_accumulation_steps": 2},
        {"loss_type": "bnpo", "delta": 1.1, "num_iterations": 2, "learning_rate": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.05, "num_iterations": 2, "learning_rate": 0.03},
        {"loss_type": "sapo", "num_iterations": 2, "beta": 0.05, "use_bias_correction_kl": True},
        {"off_policy_mask_threshold": 0.001, "num_iterations": 2, "learning_rate": 0.1},
    ],
    ids=lambda value: "-".join(value) or "default",
)
def test_grpo(tmp_path, changes):
    runs = side_by_side(
        tmp_path, "GRPO", prompt_dataset(), trainer={"reward_funcs": reward}, **ROLLOUTS | changes
    )
    assert_same(*runs, rtol=1e-3)


@pytest.mark.parametrize("loss_type", ["vespo"])
def test_grpo_with_a_sampler_s_corrections(tmp_path, monkeypatch, loss_type):
    original = trl.GRPOTrainer._generate_and_score_completions

    def sampled(self, inputs):
        """What vLLM's log-probabilities would add."""
        self.use_vllm = False
        out = original(self, inputs)
        self.use_vllm = True
        shape = out["completion_ids"].shape
        ratio = torch.rand(shape, generator=torch.Generator().manual_seed(4)) + 0.5
        ratio = torch.where(out["completion_mask"] == 1, ratio, 1.0)
        return out | {"importance_sampling_ratio": ratio, "sampling_per_token_logps": torch.zeros(shape) - 4}

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", sampled)
    changes = ROLLOUTS | {"loss_type": loss_type, "num_iterations": 2}
    runs = side_by_side(tmp_path, "GRPO", prompt_dataset(), trainer={"reward_funcs": reward}, **changes)
    assert_same(*runs, rtol=1e-3)


@pytest.mark.parametrize("changes", [{}, {"beta": 0.1, "num_iterations": 2}], ids=["default", "kl"])
def test_rloo(tmp_path, changes):
    assert_same(
        *side_by_side(
            tmp_path, "RLOO", prompt_dataset(), trainer={"reward_funcs": reward}, **ROLLOUTS | changes
        ),
        rtol=1e-3,
    )


# -- the trainers that build the full logits


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "mixtral"])
def test_orpo(tmp_path, family):
    assert_same(*side_by_side(tmp_path, "ORPO", preference_dataset(), family=family, max_length=48, beta=0.5))


def test_orpo_with_a_router_loss(tmp_path):
    def routed(model):
        model.config.output_router_logits = True
        return model

    runs = side_by_side(tmp_path, "ORPO", preference_dataset(), family="mixtral", wrap=routed, max_length=48)
    assert runs[1].trainer.aux_loss_enabled
    assert_same(*runs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "hinge", "cpo_alpha": 0.0, "gradient_accumulation_steps": 2},
        {"loss_type": "ipo"},
        {"loss_type": "simpo", "simpo_gamma": 0.7, "label_smoothing": 0.1},
        {"loss_type": "alphapo", "alpha": 0.2},
    ],
    ids=lambda changes: changes.get("loss_type", "sigmoid"),
)
def test_cpo(tmp_path, changes):
    assert_same(*side_by_side(tmp_path, "CPO", preference_dataset(), max_length=48, **changes))


@pytest.mark.parametrize("kind", ["ORPO", "CPO"])
def test_no_allocation_reaches_tokens_times_vocabulary(tmp_path, kind):
    """What the flag is for: with a budget of a few rows nothing of the size of the logits is allocated."""
    from tests.support import AllocationWatcher

    sizes = []
    for flag in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **SIZES
                | {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
            )
        )
        changes = {"use_chunked_loss": True, "logits_budget": 2**20} if flag else {}
        settings = options(tmp_path, per_device_train_batch_size=8, max_length=64, **changes)
        trainer = getattr(ours, f"{kind}Trainer")(
            model,
            args=getattr(ours, f"{kind}Config")(**settings),
            train_dataset=preference_dataset(8),
            processing_class=words(),
        )
        batch = next(iter(trainer.get_train_dataloader()))
        with AllocationWatcher() as watch:
            trainer.get_batch_loss_metrics(trainer.model, batch)[0].backward()
        sizes.append(watch.largest)
    tokens = batch["chosen_input_ids"].numel() + batch["rejected_input_ids"].numel()
    assert sizes[0] >= tokens * 4096 * 4 and sizes[1] <= 2**20
