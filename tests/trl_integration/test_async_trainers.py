"""Our AsyncGRPO and AsyncDistillation pairs beside TRL's, on rollouts made here: no server, no GPU.

What a server does is replaced by what TRL takes for it (`rollout_worker`, `weight_transfer`), the
FlashAttention kernel by its definition. Trainer, data loader, packing, loss and metrics are the real ones.
"""

import queue
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import transformers
from trl.experimental.async_distillation import async_distillation_trainer
from trl.experimental.async_distillation import async_rollout_worker as distillation_worker
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo import async_rollout_worker as grpo_worker

import logitless.trl_integration as ours
from logitless.trl_integration import apply_to
from tests.support import AllocationWatcher

from .compare import assert_same, options, side_by_side, stock
from .kinds import prompt_dataset
from .tiny import SIZES, VOCAB, tiny_model, words

# New in TRL 1.16. The attention of TRL 1.15 cannot be exchanged on a CPU.
packing = pytest.importorskip("trl.experimental.async_grpo.packing")
TOP_K = 5
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def tokens(number: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Ids and completion mask of a sample; those of a group of four share their prompt."""
    prompt = np.random.default_rng(number // 4).integers(3, VOCAB, 4)
    generator = np.random.default_rng(100 + number)
    completion = generator.integers(3, VOCAB, generator.integers(3, 9))
    return np.concatenate((prompt, completion)), np.repeat([0, 1], (len(prompt), len(completion))), generator


def grpo_sample(number: int) -> grpo_worker.RolloutSample:
    ids, mask, generator = tokens(number)
    return grpo_worker.RolloutSample(
        prompt=[],
        completion=[],
        input_ids=ids,
        completion_mask=mask,
        advantage=float(generator.normal()),
        model_version=0,
        old_log_probs=(-4.5 + generator.normal(size=len(ids)) / 3) * mask,
        group_id=number // 4,
        metrics={"reward": number % 3},
    )


def distillation_sample(number: int) -> distillation_worker.RolloutSample:
    """A teacher that names up to five tokens and the one that was drawn, and now and then none."""
    ids, mask, generator = tokens(number)
    names = np.stack([generator.permutation(np.arange(3, VOCAB))[: TOP_K + 1] for _ in ids])
    names[:, -1] = ids
    names[names[:, :-1].max(1) == ids, -1] = -1
    logps = np.sort(np.log(generator.dirichlet(np.ones(20), len(ids))[:, : TOP_K + 1]))[:, ::-1].copy()
    blank = np.zeros_like(names, dtype=bool)
    blank[:, 3:-1] = generator.random(len(ids))[:, None] < 0.3
    blank[generator.random(len(ids)) < 0.1] = True
    blank |= (
        ~mask.astype(bool)[:, None]
        | (names == -1)
        | (names[:, -1:] == names) & (np.arange(TOP_K + 1) < TOP_K)
    )
    return distillation_worker.RolloutSample(
        prompt=[],
        completion=[],
        input_ids=ids,
        completion_mask=mask,
        model_version=0,
        metrics={},
        prompt_id=number,
        teacher_topk_ids=np.where(blank, -1, names),
        teacher_topk_logprobs=np.where(blank, -np.inf, logps).astype(np.float32),
        teacher_id=("math", "code")[number % 2],
    )


class Worker:
    """Hands out the same samples after each start."""

    def __init__(self, make):
        self.make, self.metrics_queue, self.rollout_buffer = make, queue.Queue(), self

    def start(self):
        self.count = 0

    def get(self, timeout):
        self.count += 1
        return self.make(self.count - 1)

    def qsize(self):
        return 0

    def stop(self, *args):
        pass

    update_model_version = check_health = stop


NO_TRANSFER = SimpleNamespace(
    **dict.fromkeys(("init_weight_transfer", "pause", "resume", "destroy"), lambda: None),
    send_weights=lambda pairs: list(pairs),
)


def varlen_attention(query, key, value, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
    """`flash_attn_varlen_func`: each segment of queries attends to its own path of keys, aligned at the
    end."""
    actual = []
    for i in range(len(cu_q) - 1):
        q, (k, v) = query[cu_q[i] : cu_q[i + 1]], (x[cu_k[i] : cu_k[i + 1]] for x in (key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(k) - len(q)).logical_not()
        actual.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(actual)


@pytest.fixture(autouse=True)
def no_server_and_no_gpu(monkeypatch):
    """The attention of AsyncGRPO by its definition."""
    for module in (async_grpo_trainer, async_distillation_trainer):
        monkeypatch.setattr(module, "VLLMClient", lambda *args: None)
        # For the log of the throughput: it asks CUDA what the GPU is called, and Mixtral for a size that it
        # has under another name.
        monkeypatch.setattr(module, "get_peak_flops_per_device", lambda *args: None)
        monkeypatch.setattr(module, "compute_flops_per_token", lambda *args: 0.0)
    monkeypatch.setattr(
        packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    )


def both(tmp_path, kind, make, *, lora=None, **changes):
    """`lora` says that the model is adapted."""
    peft_config = None if lora is None else LORA
    trainer = {"rollout_worker": Worker(make), "weight_transfer": NO_TRANSFER, "peft_config": peft_config}
    changes = {"token_budget": 0, "dtype": "float32", "per_device_train_batch_size": 4} | changes
    # These trainers load the model themselves.
    runs = side_by_side(
        tmp_path,
        kind,
        prompt_dataset(),
        trainer=trainer,
        wrap=lambda model: model.config._name_or_path,
        **changes,
    )
    for run in runs:
        run.logs = [{key: x for key, x in log.items() if not key.startswith("perf/")} for log in run.logs]
    return runs


EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}, "teacher_top_k": TOP_K}
ROWS = {
    "AsyncGRPO": [
        {},
        {"temperature": 0.7, "epsilon_high": 0.28, "gradient_accumulation_steps": 2},
        {"token_budget": 40, "lora": {}},
        {"family": "mixtral", "router_aux_loss_coef": 0.1},
    ],
    "AsyncDistillation": [
        {"beta": 0.0, "family": "gemma2"},
        {"beta": 0.5, "gradient_accumulation_steps": 2, "teacher_temperature": 1.5, "family": "granite"},
        {"beta": 1.0},
        {"beta": 0.0, "add_tail_bucket": False},
        {"beta": 0.0, "token_budget": 40, "lora": {}},
        {"beta": 0.5, "teacher_server_urls": {"math": "http://math", "code": "http://code"}},
    ],
}


@pytest.mark.parametrize("changes", ROWS["AsyncGRPO"])
def test_async_grpo(tmp_path, changes):
    runs = both(tmp_path, "AsyncGRPO", grpo_sample, **changes)
    assert_same(*runs)
    assert set(runs[1].strategies) == {"cached_grad" if "lora" in changes else "recompute"}
    assert {"kl", "entropy", "clip_ratio/region_mean", "ratio"} <= runs[1].logs[0].keys()


@pytest.mark.parametrize("changes", ROWS["AsyncDistillation"])
def test_async_distillation(tmp_path, changes):
    runs = both(tmp_path, "AsyncDistillation", distillation_sample, **EAGER | changes)
    assert_same(*runs)
    served = "teacher_server_urls" in changes
    assert set(runs[1].strategies) == {"recompute" if served else "fused"}
    teachers = {"teacher_token_frac/math", "teacher_jsd/code", "teacher_entropy/math"}
    assert {"jsd", "entropy", "teacher_entropy"} <= runs[1].logs[0].keys()
    assert served == (teachers <= runs[1].logs[0].keys())


def test_async_distillation_without_a_word_from_the_teacher(tmp_path):
    def silent(number):
        sample = distillation_sample(number)
        sample.teacher_topk_ids[:] = -1
        return sample

    of_stock, mine = both(tmp_path, "AsyncDistillation", silent, **EAGER)
    assert [log.get("loss") for log in mine.logs] == [log.get("loss") for log in of_stock.logs]
    assert mine.logs[0]["loss"] == mine.logs[0]["grad_norm"] == 0.0 and mine.logs[0]["jsd"] is None


KINDS = pytest.mark.parametrize(
    "kind, make", [("AsyncGRPO", grpo_sample), ("AsyncDistillation", distillation_sample)]
)


def trainer_and_batch(cls, config, path, make, **changes):
    settings = options(path / "out", token_budget=0, dtype="float32", **changes) | (
        EAGER if "Distillation" in cls.__name__ else {}
    )
    worker = Worker(make)
    trainer = cls(
        str(path / "model"),
        args=config(**settings),
        train_dataset=prompt_dataset(),
        processing_class=words(),
        rollout_worker=worker,
        weight_transfer=NO_TRANSFER,
    )
    worker.start()
    trainer.current_gradient_accumulation_steps = 1
    return trainer, next(iter(trainer.get_train_dataloader()))


@KINDS
def test_no_allocation_reaches_tokens_times_vocabulary(tmp_path, kind, make):
    sizes = SIZES | {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    pair = getattr(ours, f"{kind}Trainer"), getattr(ours, f"{kind}Config")
    changes = {"per_device_train_batch_size": 12, "use_chunked_loss": True, "logits_budget": 2**19}
    trainer, batch = trainer_and_batch(*pair, tmp_path, make, **changes)
    with AllocationWatcher() as watch:
        trainer.compute_loss(trainer.model, batch).backward()
    tokens = int(batch["global_n_tokens"][0])
    assert 2**19 < tokens * 4096 * 4 and 4096 * 16 * 4 <= watch.largest <= 2**19


@KINDS
def test_apply_to_a_trainer_that_exists(tmp_path, kind, make):
    tiny_model().save_pretrained(tmp_path / "model")
    cls = stock(f"{kind}Trainer")
    trainer, batch = trainer_and_batch(
        cls, stock(f"{kind}Config"), tmp_path, make, per_device_train_batch_size=6
    )

    def gradients():
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, batch).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    expected = gradients()
    forward = trainer.model.forward
    undo = apply_to(trainer, logits_budget=2**13)
    assert trainer.model.forward == forward
    with trainer.chunked_loss.attach_models():
        same = trainer.model.forward == forward
        assert same is (kind == "AsyncDistillation"), "a head that nothing calls"
    actual = gradients()
    assert trainer.last_plan.chunks > 1
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    undo()
    assert type(trainer) is cls and torch.equal(gradients(), expected)
