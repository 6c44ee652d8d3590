"""Trainers whose rollouts come from a vLLM server: rounding of the logits, and what is logged about it."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import trl

from logitless.engine.head_view import HeadView
from logitless.trl_integration import per_token

from .compare import options, stock


@dataclass
class OwnConfig(trl.SFTConfig):
    """Fields of the user's, named like those of GRPO."""

    temperature: float = 0.5
    cast_lm_head_to_fp32: bool = False
    use_vllm: bool = True
    vllm_server_base_url: str = "http://here"
    top_p: float = 0.5


GRPO = trl.GRPOConfig
SERVED = {
    "no server": (GRPO, {"use_vllm": False}, False, None),
    "a server": (GRPO, {"use_vllm": True}, True, "logits of bf16 heads are rounded to bf16"),
    "fp32 head": (GRPO, {"use_vllm": True, "cast_lm_head_to_fp32": True}, False, "logits are not rounded"),
    "AsyncGRPO": (stock("AsyncGRPOConfig"), {}, True, "logits of bf16 heads are rounded"),
    "SFT": (trl.SFTConfig, {}, False, None),
    "fields of the user's": (OwnConfig, {}, False, None),
}


def with_args(config, tmp_path, **changes) -> SimpleNamespace:
    """A trainer that has nothing but its `args`."""
    return SimpleNamespace(args=config(**options(tmp_path, per_device_train_batch_size=8, **changes)))


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding(name, dtype, monkeypatch, tmp_path):
    config, changes, follows, line = SERVED[name]
    trainer = with_args(config, tmp_path, **changes)
    assert per_token.needs_server_rounding(trainer) == follows
    actual = per_token.describe_server_rounding(trainer)
    assert actual is None if line is None else actual.startswith(line)
    calls = []
    original = per_token.TokenStatistics
    monkeypatch.setattr(per_token, "TokenStatistics", lambda **kw: calls.append(kw) or original(**kw))
    session = SimpleNamespace(
        trainer=trainer, logits_budget=None, without_offloading=nullcontext, record_plan=lambda plan: None
    )
    compute_fields = per_token.make_per_token_fields(session, "entropy")
    hidden, weight = torch.randn(2, 3, 8, dtype=dtype), torch.randn(20, 8, dtype=dtype)
    compute_fields(hidden, HeadView(weight, None), torch.ones(2, 3, dtype=torch.int64), True)
    rounded = torch.bfloat16 if follows and dtype == torch.bfloat16 else None
    expected = torch.float32 if "cast_lm_head_to_fp32" in changes else rounded
    assert calls and all(kw.get("logits_dtype") == expected and kw["temperature"] == 1 for kw in calls)
    assert name != "fields of the user's" or per_token.describe_truncated_sampling(trainer) is None


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}], ids=str)
def test_truncation_is_warned_of(option, tmp_path):
    plain = {"top_p": 1.0, "top_k": 0, "min_p": None}
    of = partial(with_args, GRPO, tmp_path)
    assert per_token.describe_truncated_sampling(of(use_vllm=True, **plain)) is None
    assert per_token.describe_truncated_sampling(of(use_vllm=False, **plain | option)) is None
    ((name, value),) = option.items()
    actual = per_token.describe_truncated_sampling(of(use_vllm=True, **plain | option))
    assert actual.startswith(f"{name}={value}: ") and "#6789" in actual


def test_the_trainers_that_have_a_server_say_so():
    for adapter in (per_token.GRPO, per_token.RLOO, per_token.GMPO, per_token.AsyncGRPO):
        assert adapter.notes == (per_token.describe_server_rounding,)
        assert adapter.warnings == (per_token.describe_truncated_sampling,)
    assert per_token.SFT.notes == per_token.DPO.warnings == ()
