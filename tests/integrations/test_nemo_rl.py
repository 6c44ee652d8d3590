"""NeMo-RL: log-probabilities against its own function, of which `data` has the text.

NEMO_RL_MODEL_UTILS names another text of nemo_rl/distributed/model_utils.py, such as that of main.
"""

import ast
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor

from logitless.integrations import nemo_rl as module
from tests.ranks import in_processes
from tests.support import assert_close

V, H, S, B = 40, 16, 12, 3
OWN_TEXT = Path(__file__).parent / "data" / "nemo_rl_model_utils.txt"
TEXT = Path(os.environ.get("NEMO_RL_MODEL_UTILS") or OWN_TEXT)
NAME = "from_parallel_hidden_states_to_logprobs"
NEEDED = (
    "_compute_distributed_log_softmax_with_grad",
    "_compute_distributed_log_softmax",
    "ChunkedDistributedHiddenStatesToLogprobs",
    NAME,
)


def stock() -> Callable:
    """NeMo-RL's function, without the imports of its module."""
    tree = ast.parse(TEXT.read_text())
    actual = [node for node in tree.body if getattr(node, "name", None) in NEEDED]
    names = {"torch": torch, "Any": Any, "Optional": Optional}
    exec(compile(ast.Module(actual, []), str(TEXT), "exec"), names)
    moved = f"{module.LOGPROBS_FUNCTION} moved: expected {NEEDED}"
    assert {node.name for node in actual} == set(NEEDED), moved
    return names[NAME]


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (s, b, H), the head, targets (b, s), upstream gradients (b, s - 1)."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=make).to(dtype)
    weight = torch.randn(V, H, generator=make).to(dtype)
    return hidden, weight, torch.randint(0, V, (B, S), generator=make), torch.randn(B, S - 1, generator=make)


def truth() -> dict[str, Tensor]:
    hidden, weight, target, upstream = operands(torch.float64)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logps = (hidden.transpose(0, 1) @ weight.T).log_softmax(-1)[:, :-1]
    logps = logps.gather(-1, target[:, 1:, None])[..., 0]
    (logps * upstream).sum().backward()
    return {"logps": logps.detach(), "hidden": hidden.grad, "weight": weight.grad}


def on_a_rank(dtype: torch.dtype, ours: bool) -> dict[str, Tensor]:
    group = dist.group.WORLD
    rank, ranks = group.rank(), group.size()
    hidden, weight, target, upstream = operands(dtype)
    hidden = hidden.chunk(ranks)[rank].clone().requires_grad_()
    weight = weight.chunk(ranks)[rank].clone().requires_grad_()
    function = module.from_parallel_hidden_states_to_logprobs if ours else stock()
    bounds = {"vocab_start_index": rank * len(weight), "vocab_end_index": (rank + 1) * len(weight)}
    given = {"tp_group": group, "cp_group": None, "chunk_size": 5, **bounds}
    logps = function(hidden, weight, False, target, **given)
    (logps * upstream).sum().backward()
    frozen = function(hidden, weight, False, target, inference_only=True, **given)
    assert torch.equal(frozen, logps) and (not ours or frozen.grad_fn is None)
    return {"logps": logps.detach(), "hidden": hidden.grad, "weight": weight.grad}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_ranks(dtype):
    ours = in_processes(2, on_a_rank, dtype, True)
    reference_value = in_processes(2, on_a_rank, dtype, False)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    for rank, actual in enumerate(ours):
        expected = truth()
        expected["hidden"] = expected["hidden"].chunk(2)[rank]
        expected["weight"] = expected["weight"].chunk(2)[rank]
        for name, x in expected.items():
            assert_close(actual[name], x, tolerance, name=f"{name} on rank {rank}")
            assert_close(reference_value[rank][name], x, tolerance, name=f"NeMo-RL's {name} on rank {rank}")


ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def call(**change) -> Tensor:
    hidden, weight, target, _ = operands(torch.float32)
    given = {
        "tensor_parallel_hidden_states": hidden,
        "output_weight_layer": weight,
        "runtime_gather_output": False,
        "target": target,
        "vocab_start_index": 0,
        "vocab_end_index": V,
        "tp_group": ALONE,
    }
    return module.from_parallel_hidden_states_to_logprobs(**given | change)


def test_the_budget():
    with mock.patch.object(module, "linear_logprobs", wraps=module.linear_logprobs) as loss:
        call(logits_budget=2**20)
    assert loss.call_args.kwargs["logits_budget"] == 2**20


def test_one_rank():
    logps = call()
    assert logps.shape == (B, S - 1)
    assert_close(logps, truth()["logps"], 1e-6, name="log-probabilities")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cp_group": SimpleNamespace(size=lambda: 2)}, "cp_group: expected 1 rank, got 2; set use_fused"),
        ({"vocab_end_index": V - 1}, r"vocab_end_index: expected \(0, 40\), got \(0, 39\)"),
        (
            {"tp_group": SimpleNamespace(size=lambda: 2, rank=lambda: 0)},
            r"tensor_parallel_hidden_states: expected shape \(6, 3\) .*sequence_parallel to true",
        ),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        call(**change)


def test_parameters_of_the_replaced_function():
    actual, ours = (
        list(inspect.signature(function).parameters)
        for function in (stock(), module.from_parallel_hidden_states_to_logprobs)
    )
    assert actual == ours[:-1], f"{module.LOGPROBS_FUNCTION} moved: expected {ours[:-1]}, got {actual}"


def test_patched_and_undone(monkeypatch, caplog):
    """Also in a module that has imported the function by name."""
    packages = {name: ModuleType(name) for name in ("nemo_rl", "nemo_rl.distributed")}
    owner, importer = ModuleType("nemo_rl.distributed.model_utils"), ModuleType("nemo_rl.worker")
    expected = owner.__dict__[NAME] = importer.__dict__[NAME] = stock()
    for each in (*packages.values(), owner, importer):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    with caplog.at_level("INFO", "logitless"):
        undo = module.patch(logits_budget=2**30)
    assert getattr(owner, NAME) is getattr(importer, NAME) is not expected
    assert getattr(owner, NAME).keywords == {"logits_budget": 2**30}
    (record,) = caplog.records
    assert record.message == f"logitless: NeMo-RL's {NAME} replaced, logits_budget 1 GiB"
    undo()
    assert getattr(owner, NAME) is getattr(importer, NAME) is expected


def test_without_nemo_rl():
    with pytest.raises(ImportError, match=r"^nemo-rl: expected 0\.6, got no installation .*NVIDIA-NeMo/RL"):
        module.patch()
