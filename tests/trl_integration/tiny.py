"""Tiny models, tokens and a training run of a few steps, all built here: nothing is downloaded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

VOCAB = 96
# transformers' 0.02 gives nearly uniform distributions, whose entropy hides what goes wrong with it.
PEAKED = 0.35
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": PEAKED,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
# What makes each family's head its own, with values strong enough to be noticed when they are left out
FAMILIES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        # Not so low that fp32 logits become equal.
        "final_logit_softcapping": 3.0,
    },
    # Not so large that nothing is left beside a few tokens: TRL takes it from 1 as an fp32 difference.
    "granite": {"logits_scaling": 0.5},
    "cohere": {"logit_scale": 1.5},
    "mixtral": EXPERTS,
}
CLASSES = {"tied": "Llama"}
# A labelled batch
IDS = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(IDS % 4 == 0, -100, IDS)
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": LABELS}


def tiny_model(family: str = "llama", **options: Any) -> PreTrainedModel:
    """A model of the family with the same weights on every call."""
    name = CLASSES.get(family, family.capitalize())
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES[family] | options)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Never tokenizes: the datasets hold ids. Trainers ask it for its special tokens."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def partition(head: torch.nn.Linear) -> None:
    """A stand-in for DeepSpeed ZeRO-3: the weight is whole while the module runs forwards or backwards, and
    empty otherwise."""
    weight, whole = head.weight, head.weight.data
    weight.ds_id = 0

    def gather(*args):
        weight.data = whole

    def release(*args):
        weight.data = torch.empty(0)

    head.register_forward_pre_hook(gather)
    head.register_forward_hook(release)
    head.register_full_backward_pre_hook(gather)
    weight.register_post_accumulate_grad_hook(release)
    release()


def words() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, splitting at spaces."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def save(model: PreTrainedModel, path: Path) -> None:
    """Writes the model, with `words()` as its tokenizer, into a folder."""
    model.save_pretrained(path)
    words().save_pretrained(path)


def tiny_dataset(*, examples: int = 24, masked: bool = False, seed: int = 0) -> Dataset:
    """Rows of 5 to 24 ids; with `masked` the first third of each, and the whole of the first two, are not
    trained on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 25, (examples,), generator=generator).tolist()
    ids = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    columns = {"input_ids": ids}
    if masked:
        unsupervised = [len(row) if i < 2 else len(row) // 3 for i, row in enumerate(ids)]
        columns["labels"] = [[-100] * n + row[n:] for row, n in zip(ids, unsupervised, strict=True)]
    return Dataset.from_dict(columns)


@dataclass
class Run:
    """What a training run left behind."""

    trainer: Any
    logs: list[dict[str, float]]
    strategies: list[str] = field(default_factory=list)
    # of every parameter, before each step of the optimizer
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @property
    def weights(self) -> torch.Tensor:
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad]
        return torch.cat([p.detach().flatten() for p in parameters])


class _Watch(TrainerCallback):
    """Notes after each micro-batch which strategy ran last, and the gradients of each step."""

    def __init__(self) -> None:
        self.trainer, self.strategies, self.gradients = None, [], []

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        model = getattr(model, "module", model)
        named = ((name.removeprefix("_orig_mod."), p.grad) for name, p in model.named_parameters())
        self.gradients.append({name: grad.clone() for name, grad in named if grad is not None})

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.strategies.append(getattr(getattr(self.trainer, "last_plan", None), "strategy", None))

    on_step_end = on_substep_end


def train(*args: Any, **options: Any) -> Run:
    """Trains and returns the logs of every step (timings left out); the arguments are those of `prepare`."""
    return prepare(*args, **options)[1]()


def prepare(
    trainer_class: type,
    args: Any,
    model: PreTrainedModel,
    dataset: Dataset,
    *,
    tokenizer: Any = None,
    **options: Any,
) -> tuple[Any, Callable[[], Run]]:
    """A trainer, and the function that trains it."""
    watch = _Watch()
    options |= {"processing_class": tokenizer or tiny_tokenizer(), "callbacks": [watch]}
    trainer = trainer_class(model, args=args, train_dataset=dataset, **options)
    watch.trainer = trainer

    def run() -> Run:
        trainer.train()
        timing = ("runtime", "per_second", "flos")
        logs = [
            {key: value for key, value in log.items() if not key.endswith(timing)}
            for log in trainer.state.log_history
        ]
        return Run(trainer, logs, watch.strategies, watch.gradients)

    return trainer, run


def assert_same_gradients(stock: Run, ours: Run, *, rtol: float) -> None:
    """Of each parameter: the first step's to rounding, later ones' after steps that were made of it."""
    assert len(stock.gradients) == len(ours.gradients) > 0
    for step, (of_stock, mine) in enumerate(zip(stock.gradients, ours.gradients, strict=True)):
        assert of_stock.keys() == mine.keys() and of_stock
        largest = max(grad.norm() for grad in of_stock.values())
        for name, grad in of_stock.items():
            error = (mine[name] - grad).norm()
            allowed = (1 if step == 0 else 30) * rtol * grad.norm() + 1e-5 * largest
            assert error <= allowed, f"{name}, step {step}: off by {error:.1e} of {grad.norm():.1e}"
