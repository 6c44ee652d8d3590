"""Trainers whose rollouts come from a vLLM server: rounding of the logits, and what is logged about it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from logitless.engine.head_view import HeadView
from logitless.trl_integration import per_token

SERVED = {
    "no server": ({"use_vllm": False}, False, None),
    "a server": ({"use_vllm": True}, True, "logits of bf16 heads are rounded to bf16"),
    "fp32 head": ({"use_vllm": True, "cast_lm_head_to_fp32": True}, False, "logits are not rounded"),
    "AsyncGRPO": ({"vllm_server_base_url": "http://here"}, True, "logits of bf16 heads are rounded"),
    "SFT": ({}, False, None),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding(name, dtype, monkeypatch):
    options, follows, line = SERVED[name]
    trainer = SimpleNamespace(args=SimpleNamespace(**options))
    assert per_token.follows_server(trainer) == follows
    found = per_token.server_rounding(trainer)
    assert found is None if line is None else found.startswith(line)
    made, numbers = [], per_token.TokenStatistics
    monkeypatch.setattr(per_token, "TokenStatistics", lambda **given: made.append(given) or numbers(**given))
    chunked = SimpleNamespace(trainer=trainer, budget=None, saving=nullcontext, note=lambda plan: None)
    score = per_token.per_token_score(chunked, "entropy")
    hidden, weight = torch.randn(2, 3, 8, dtype=dtype), torch.randn(20, 8, dtype=dtype)
    score(hidden, HeadView(weight, None), torch.ones(2, 3, dtype=torch.int64), True)
    rounded = torch.bfloat16 if follows and dtype == torch.bfloat16 else None
    expected = torch.float32 if "cast_lm_head_to_fp32" in options else rounded
    assert made and all(given.get("logits_dtype") == expected for given in made)


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}], ids=str)
def test_truncation_is_warned_of(option):
    plain = {"top_p": 1.0, "top_k": 0, "min_p": None}
    of = lambda **given: SimpleNamespace(args=SimpleNamespace(**given))  # noqa: E731
    assert per_token.truncated_sampling(of(use_vllm=True, **plain)) is None
    assert per_token.truncated_sampling(of(use_vllm=False, **plain | option)) is None
    (name, value), found = *option.items(), per_token.truncated_sampling(of(use_vllm=True, **plain | option))
    assert found.startswith(f"{name}={value}: ") and "#6789" in found


def test_the_trainers_that_have_a_server_say_so():
    for adapter in (per_token.GRPO, per_token.RLOO, per_token.GMPO, per_token.AsyncGRPO):
        assert adapter.notes == (per_token.server_rounding,)
        assert adapter.warnings == (per_token.truncated_sampling,)
    assert per_token.SFT.notes == per_token.DPO.warnings == ()
