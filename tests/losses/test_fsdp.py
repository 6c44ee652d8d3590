"""Data parallel training: FSDP2 and DDP give the gradient of one process with everybody's batch, whatever a
rank's own batch lacks."""

import warnings
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from logitless import (
    BudgetWarning,
    CrossEntropyLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    global_num_items,
    linear_logprobs,
)
from tests.ranks import device_type, on_devices, to_rank_device
from tests.support import uncompiled

pytestmark = pytest.mark.ranks

V, H, B, T = 23, 8, 4, 5
SMALL = 3 * V * 8  # bytes: a few rows of logits at a time


class Scorer(nn.Module):
    """Embedding, body and head; where the loss is called inside `forward`, its parameters are what the
    wrapper makes of them there."""

    def __init__(self, seed: int, tied: bool = False):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.body, self.head = nn.Embedding(V, H), nn.Linear(H, H), nn.Linear(H, V)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def hidden(self, ids: Tensor) -> Tensor:
        return self.body(self.embed(ids)).tanh()

    def score(self, hidden: Tensor, loss, targets: Tensor, inputs: dict) -> Tensor:
        if isinstance(loss, Likelihood):
            return loss(hidden, self.head.weight, targets, bias=self.head.bias, **inputs).loss
        return loss(hidden, self.head, targets, **inputs).loss

    def forward(self, ids: Tensor, *scored) -> Tensor:
        hidden = self.hidden(ids)
        return self.score(hidden, *scored) if scored else hidden


def pairs() -> DeviceMesh:
    """Replicas of pairs, each of which shares a model."""
    return init_device_mesh(
        device_type(), (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "pair")
    )


def fsdp(model: Scorer, *own: str, mesh=None) -> Scorer:
    """`own`: the modules of a group beside the root's."""
    mesh = mesh or init_device_mesh(device_type(), (dist.get_world_size(),))
    if own:
        fully_shard([getattr(model, name) for name in own], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class Likelihood:
    """A loss written in plain PyTorch: the head's gradient needs a second walk, in the backward pass."""

    logits_budget: int | None = None

    def __call__(self, *operands, num_items: Tensor | float | None = None, **options):
        actual = linear_logprobs(*operands, logits_budget=self.logits_budget, **options)
        return SimpleNamespace(
            loss=-actual.logps.sum() / ((operands[2] != -100).sum() if num_items is None else num_items)
        )


# How a model is wrapped, whether the head is tied, and whether the loss is called inside of its forward.
WRAPPERS = {
    "ddp": (DistributedDataParallel, False, True),
    "root group": (fsdp, False, True),
    "root group, outside": (fsdp, False, False),
    "own group": (lambda model: fsdp(model, "head"), False, True),
    "own group, outside": (lambda model: fsdp(model, "head"), False, False),
    "tied": (fsdp, True, True),
    "tied, own group": (lambda model: fsdp(model, "embed", "head"), True, True),
    "tied, own group, outside": (lambda model: fsdp(model, "embed", "head"), True, False),
    "hybrid": (lambda model: fsdp(model, "head", mesh=pairs()), False, True),
}
LOSSES = {
    "ce": CrossEntropyLoss(z_loss=0.1),
    "dpo": DPOLoss(),
    "grpo": GRPOLoss(loss_type="grpo"),
    "dapo": GRPOLoss(),
    "jsd": JSDLoss(hard_loss_weight=0.2),
    "logprobs": Likelihood(),
}
# What is the matter with a batch of rank r.
FAULTS = ("none", "nothing supervised", "no tokens", "several lengths")
CASES = [(wrapper, "ce", "none") for wrapper in WRAPPERS]
CASES += [
    ("own group", loss, fault) for loss in LOSSES for fault in FAULTS if (loss, fault) != ("ce", "none")
]
CASES += [("root group", loss, "no tokens") for loss in LOSSES] + [("ddp", "dpo", "no tokens")]


def batch_of(rank: int, ranks: int, fault: str) -> dict[str, Tensor]:
    """A rank's sequences; the first half are chosen ones."""
    make = torch.Generator().manual_seed(rank)
    length = {"no tokens": T if rank else 0, "several lengths": T + 7 * rank}.get(fault, T)
    ids, targets = torch.randint(0, V, (2, B, length), generator=make)
    targets[1, length // 2 :] = -100
    if fault == "nothing supervised" and rank == ranks - 1:
        targets[:] = -100
    logps = -3 + 0.1 * torch.randn(B, length, generator=make, dtype=torch.float64)
    return {
        "ids": ids,
        "targets": targets,
        "old_logps": logps,
        "advantages": torch.randn(B, generator=make, dtype=torch.float64),
    }


def everybodys(ranks: int, fault: str) -> dict[str, Tensor]:
    """All ranks' sequences, the chosen ones first, padded to the same length."""
    batches = [batch_of(rank, ranks, fault) for rank in range(ranks)]
    length = max(batch["ids"].shape[1] for batch in batches)

    def padded(name: str, x: Tensor) -> Tensor:
        return (
            x
            if x.dim() == 1
            else nn.functional.pad(x, (0, length - x.shape[1]), value=-100 if name == "targets" else 0)
        )

    halves = {name: [padded(name, batch[name]).chunk(2) for batch in batches] for name in batches[0]}
    return {name: torch.cat([x[side] for side in (0, 1) for x in actual]) for name, actual in halves.items()}


def call_of(name: str, batch: dict[str, Tensor], other: Scorer) -> dict:
    """The arguments of a loss beside head and targets. `other` is the reference or the teacher."""
    if name in ("grpo", "dapo"):
        return {key: batch[key] for key in ("advantages", "old_logps")}
    if name in ("ce", "logprobs"):
        return {}
    prefix = "ref" if name == "dpo" else "teacher"
    with torch.no_grad():
        hidden = other(batch["ids"])
    return {
        f"{prefix}_hidden": hidden,
        f"{prefix}_weight": other.head.weight,
        f"{prefix}_bias": other.head.bias,
    }


def items_of(name: str, targets: Tensor) -> float | Tensor:
    return {"dpo": B // 2, "grpo": B}.get(name, targets)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    actual = {
        name: x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        for name, x in model.named_parameters()
    }
    return {name.removeprefix("module."): x for name, x in actual.items()}


@cache
@uncompiled()
def truth(ranks: int, name: str, fault: str, tied: bool) -> dict[str, Tensor]:
    """What one process has of everybody's batch."""
    with torch.device("cpu"):
        model, other, batch = Scorer(0, tied), Scorer(1).requires_grad_(False), everybodys(ranks, fault)
        loss = model(batch["ids"], LOSSES[name], batch["targets"], call_of(name, batch, other))
        loss.backward()
    return {"loss": loss.detach()} | gradients(model)


def run(rank: int, ranks: int, wrapper: str, name: str, fault: str) -> dict[str, Tensor]:
    wrap, tied, inside = WRAPPERS[wrapper]
    with torch.device("cpu"):  # where random numbers are those of the one process
        model, other, batch = Scorer(0, tied), Scorer(1).requires_grad_(False), batch_of(rank, ranks, fault)
    model, other, batch = wrap(model.to(device_type())), other.to(device_type()), to_rank_device(batch)
    other = other if wrapper == "ddp" else fsdp(other, "head")
    loss = LOSSES[name] if fault == "none" else replace(LOSSES[name], logits_budget=SMALL)
    inputs = call_of(name, batch, other) | {"num_items": global_num_items(items_of(name, batch["targets"]))}
    scored = loss, batch["targets"], inputs
    value = model(batch["ids"], *scored) if inside else model.score(model(batch["ids"]), *scored)
    value.backward()
    mean = value.detach() / ranks
    dist.all_reduce(mean)
    return {"loss": mean} | gradients(model)


# What a loss of logits compiles to is tested elsewhere, and takes its time in each process.
@uncompiled()
def everything() -> dict:
    """What a rank finds."""
    warnings.simplefilter("ignore", BudgetWarning)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    actual = {case: run(rank, ranks, *case) for case in CASES}
    pair = pairs()["pair"]
    counts = {
        "a number": rank + 1.0,
        "a tensor": torch.tensor(rank + 1),
        "targets": torch.tensor([[rank, -100, 7], [7, -100, -100]]),
    }
    actual["items"] = {name: global_num_items(x) for name, x in counts.items()}
    actual["items"] |= {
        "other id": global_num_items(counts["targets"], ignore_index=7),
        "mesh": global_num_items(rank, pair),
        "group": global_num_items(torch.tensor(rank), pair.get_group()),
    }
    return actual


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.repeats)], ids="{} ranks".format)
def ranks(request):
    """What each rank found."""
    return on_devices(request.param, everything)


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_equals_one_process(ranks, case):
    wrapper, name, fault = case
    expected = truth(len(ranks), name, fault, WRAPPERS[wrapper][1])
    for rank in ranks:
        assert rank[case].keys() == expected.keys()
        for key, x in expected.items():
            assert x.norm() > 0
            torch.testing.assert_close(
                rank[case][key], x, rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
            )


def test_global_num_items(ranks):
    for rank, actual in enumerate(ranks):
        mean, of_pair = (len(ranks) + 1) / 2, rank // 2 * 2 + 0.5
        expected = {
            "a number": mean,
            "a tensor": mean,
            "targets": 3,
            "other id": 4,
            "mesh": of_pair,
            "group": of_pair,
        }
        assert {name: float(x) for name, x in actual["items"].items()} == expected


def test_global_num_items_of_one_process():
    assert global_num_items(5) == 5
    assert global_num_items(torch.tensor([3, -100, 4])) == 2
    assert global_num_items(torch.tensor([3, -100, 4]), ignore_index=3) == 2
