"""What the flag is for: with a budget of a few rows a training step allocates nothing of the size of the
logits."""

import pytest
import torch
import transformers

import logitless.trl_integration as ours
from tests.support import AllocationWatcher

from .compare import options, stock
from .kinds import ALL, needs
from .served import serve
from .tiny import SIZES, train, words

VOCAB = 4096
SMALL = SIZES | {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
# Ways to compute a loss that allocate differently
WAYS = [(kind, {}) for kind in ALL]
WAYS += [
    (kind, {"distillation_mode": mode, "distillation_topk": 8})
    for kind in ("SDFT", "SDPO")
    for mode in ("full_logits", "topk_logits")
]
WAYS += [("IWOPD", {"loss_top_k": top_k}) for top_k in (0, 1, 5)]
WAYS += [("IWOPD", {"distillation_objective": "iw_opd", "lmbda": 1.0})]
WAYS += [("ServerDistillation", {"beta": 0.0, "loss_top_k": 5})]


def largest(kind: str, folder, flag: bool, changes: dict) -> int:
    """The biggest allocation of a step, what is generated included."""
    dataset, settings, given = needs(kind, folder)
    if "teacher_model" in given:
        given["teacher_model"] = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    settings = settings | {"max_steps": 1, "per_device_train_batch_size": 12} | changes
    settings |= {"use_chunked_loss": True, "logits_budget": 2**19} if flag else {}
    find = (lambda name: getattr(ours, name)) if flag else stock
    watch = AllocationWatcher()

    def build(*args, **kwargs):
        trainer = find(f"{kind}Trainer")(*args, **kwargs)
        step = trainer.training_step

        def watched(*args, **kwargs):
            with watch:
                return step(*args, **kwargs)

        trainer.training_step = watched
        return trainer

    args = find(f"{kind}Config")(**options(folder / "out", **settings))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.manual_seed(0)
    train(build, args, model, dataset, tokenizer=words(), **given)
    return watch.largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(path / "model")
    words().save_pretrained(path / "model")
    return path


@pytest.mark.parametrize("kind, changes", WAYS, ids=lambda value: value if isinstance(value, str) else None)
def test_no_allocation_reaches_tokens_times_vocabulary(folder, monkeypatch, kind, changes):
    serve(monkeypatch, vocab_size=VOCAB)
    assert 0 < largest(kind, folder, True, changes) <= 2**19
    assert largest(kind, folder, False, changes) >= 2**20
