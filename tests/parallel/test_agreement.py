"""LOGITLESS_DEBUG=1: what ranks disagree on is told on every rank, before anything waits for it."""

import os
import re
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from logitless import CrossEntropyLoss, DPOLoss, GRPOLoss, MultiTokenLoss
from logitless.parallel import agreement
from tests.ranks import device_type, on_devices

pytestmark = pytest.mark.ranks
B, T, H, V = 2, 4, 6, 8


def operands(seed: int) -> list[torch.Tensor]:
    """The same hidden states and targets on all ranks, and rows of the head of each rank's own."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(B, T, H), torch.randint(0, V, (B, T))
    torch.manual_seed(seed)
    return [hidden, torch.randn(V, H, requires_grad=True), targets]


def vocabulary(rank: int) -> dict:
    """Calls with tp_group, by what is wrong with them on rank 1."""
    group, wrong = dist.group.WORLD, rank == 1
    loss, (hidden, weight, targets) = CrossEntropyLoss(tp_group=group), operands(1 + rank)
    weights, other = torch.ones(B, T), nullcontext() if not wrong else torch.no_grad()

    def without_autograd():
        with other:
            loss(hidden, weight, targets)

    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(operands(1)[1].detach(), mesh, [Shard(0)]).requires_grad_()
    return {
        "nothing": lambda: loss(hidden, weight, targets),
        "nothing, a DTensor": lambda: replace(loss, tp_group="tp")(hidden, sharded, targets),
        "nothing, several heads": lambda: MultiTokenLoss(tp_group=group)([hidden, hidden], weight, targets),
        "budget": lambda: replace(loss, logits_budget=2**20 + rank)(hidden, weight, targets),
        "option": lambda: replace(loss, softcap=5.0 if wrong else None)(hidden, weight, targets),
        "dtype": lambda: loss(
            *(x.bfloat16() if wrong and x.is_floating_point() else x for x in (hidden, weight, targets))
        ),
        "autograd": without_autograd,
        "inputs": lambda: loss(hidden, weight, targets, **({"token_weights": weights} if wrong else {})),
        "targets": lambda: loss(hidden, weight, targets.flip(0) if wrong else targets),
        "width": lambda: (
            loss(hidden[..., :5], weight[:, :5], targets) if wrong else loss(hidden, weight, targets)
        ),
        "whole": lambda: loss(hidden, operands(1)[1], targets),
    }


def sequences(rank: int) -> dict:
    """The same with cp_group."""
    group, wrong = dist.group.WORLD, rank == 1
    hidden, weight, targets = operands(1)
    mine = [hidden[:, rank::2], weight, targets[:, rank::2]]
    advantages = {"advantages": torch.ones(B)}
    grpo, dpo = GRPOLoss(cp_group=group), DPOLoss(cp_group=group, reference_free=True)
    return {
        "nothing, slices": lambda: grpo(*mine, **advantages),
        "nothing, pairs": lambda: dpo(*mine),
        "kind": lambda: dpo(*mine) if wrong else grpo(*mine, **advantages),
        "unsliced": lambda: grpo(hidden, weight, targets, **advantages),
        "both": lambda: replace(grpo, tp_group=group)(*mine, **advantages),
    }


def everything() -> dict[str, str]:
    os.environ["LOGITLESS_DEBUG"] = "1"
    rank, actual = dist.get_rank(), {}
    for name, attempt in (vocabulary(rank) | sequences(rank)).items():
        try:
            attempt()
            actual[name] = "fine"
        except Exception as error:
            actual[name] = f"{type(error).__name__}: {error}"
    agreement.PATIENCE, start = 1.0, time.monotonic()
    if rank == 0:  # the other has no call left
        try:
            CrossEntropyLoss(tp_group=dist.group.WORLD)(*operands(1))
        except ValueError as error:
            actual["calls"] = str(error)
    actual["seconds"] = time.monotonic() - start
    dist.barrier()
    return actual


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, str]]:
    return on_devices(2, everything)


MESSAGES = {
    "nothing": "fine",
    "nothing, a DTensor": "fine",
    "nothing, several heads": "fine",
    "nothing, slices": "fine",
    "nothing, pairs": "fine",
    "budget": "logits_budget: expected the same .* of tp_group, got 1048576 on rank 0, 1048577 on rank 1; ",
    "option": "softcap: expected the same on all ranks of tp_group, got None on rank 0, 5.0 on rank 1; every",
    "dtype": r"hidden: expected the same .* got \['torch.float32', .* rank 0, \['torch.bfloat16', False\]",
    "autograd": "autograd: expected the same on all ranks of tp_group, got True on rank 0, False on rank 1",
    "inputs": r"inputs: expected the same .*, got \[\] on rank 0, \['token_weights'\] on rank 1",
    "targets": "targets' sum: expected the same on all ranks of tp_group",
    "width": "hidden's last dimension: expected the same .* got 6 on rank 0, 5 on rank 1",
    "whole": "weight: expected another part on every rank of tp_group, got the same numbers on ranks 0 and 1",
    "kind": "loss: expected the same on all ranks of cp_group, got GRPOLoss on rank 0, DPOLoss on rank 1",
    "unsliced": "hidden: expected another part .* of cp_group, got the same numbers on ranks 0 and 1; pass",
    "both": "cp_group: expected a process group other than tp_group, got tp_group",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_rank_is_told(ranks, name):
    for rank in ranks:
        assert re.search(MESSAGES[name], rank[name]), rank[name]
        assert name.startswith("nothing") or rank[name].startswith("ValueError")


def test_a_rank_that_makes_fewer_calls_is_named(ranks):
    message = (
        r"tp_group: expected call number \d+ from all ranks \[0, 1\] .*, got none from rank 1 within 1 s"
    )
    assert re.match(message, ranks[0]["calls"]) and ranks[0]["seconds"] < 20


def test_rows_out_of_order():
    from logitless.losses.agreement import _expect_in_order

    shards = {0: {"rows": 4, "start": 0, "all": 9}, 1: {"rows": 5, "start": 4, "all": 9}}
    _expect_in_order(shards)
    _expect_in_order({rank: {"rows": 3} for rank in range(2)})
    with pytest.raises(
        ValueError, match="weight: expected rows from 5 on, on rank 1, got rows from 4 on; shard"
    ):
        _expect_in_order({0: shards[0] | {"rows": 5}, 1: shards[1]})
    with pytest.raises(
        ValueError, match=r"weight: expected \[9\] rows in total on the ranks of tp_group, got 8; "
    ):
        _expect_in_order({0: shards[0], 1: shards[1] | {"rows": 4}})
