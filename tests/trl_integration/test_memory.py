"""What the flag is for: with a budget of a few rows a training step allocates nothing of the size of the
logits."""

import pytest
import torch
import transformers

from tests.support import AllocationWatcher

from .compare import our_pair
from .kinds import ALL, step
from .served import serve
from .tiny import SIZES, save

VOCAB = 4096
BUDGET = 2**19
SMALL = SIZES | {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
# Ways to compute a loss that allocate differently
WAYS = [(kind, {}) for kind in ALL]
WAYS += [(kind, {"distillation_mode": "topk_logits", "distillation_topk": 8}) for kind in ("SDFT", "SDPO")]
WAYS += [("IWOPD", {"loss_top_k": 5})]
WAYS += [
    pytest.param(kind, changes, marks=pytest.mark.repeats)
    for kind, changes in (
        *((kind, {"distillation_mode": "full_logits", "distillation_topk": 8}) for kind in ("SDFT", "SDPO")),
        *(("IWOPD", {"loss_top_k": top_k}) for top_k in (0, 1)),
    )
]
WAYS += [("IWOPD", {"distillation_objective": "iw_opd", "lmbda": 1.0})]
WAYS += [("ServerDistillation", {"beta": 0.0, "loss_top_k": 5})]


def largest(kind: str, folder, **changes) -> int:
    """The biggest allocation of a step, what is generated included."""
    watch = AllocationWatcher()

    def change(trainer):
        training_step = trainer.training_step

        def watched(*args, **kwargs):
            with watch:
                return training_step(*args, **kwargs)

        trainer.training_step = watched

    step(kind, folder, change=change, **{"per_device_train_batch_size": 8} | changes)
    return watch.largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    for name in ("model", "teacher"):
        save(model, path / name)
    return path


@pytest.mark.parametrize("kind, changes", WAYS, ids=lambda value: value if isinstance(value, str) else None)
def test_no_allocation_reaches_tokens_times_vocabulary(folder, monkeypatch, kind, changes):
    serve(monkeypatch, vocab_size=VOCAB)
    flag = {"use_chunked_loss": True, "logits_budget": BUDGET}
    assert 0 < largest(kind, folder, **our_pair(kind), **flag, **changes) <= BUDGET
    assert largest(kind, folder, **changes) >= 1.5 * BUDGET
