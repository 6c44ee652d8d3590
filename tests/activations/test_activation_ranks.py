"""`fit_activations` over two processes: FSDP2, with the budget put on before and after, and DDP."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from logitless.models import fit_activations, fuse_layers
from tests.cases import usually
from tests.layers.tiny import Step, tiny
from tests.ranks import in_processes

LAYERS = 3
KINDS = ("FSDP2", "FSDP2, budget first", "FSDP2, bf16", "DDP")
USUAL = ("FSDP2",)
# Of what all layers hold when they are kept; the ranks have batches of other lengths, and so other plans.
SHARES = (0.2, 0.45, 0.7, 1.0)


def batch() -> torch.Tensor:
    rank = dist.get_rank()
    return torch.randint(64, (2, 15 + 8 * rank), generator=torch.Generator().manual_seed(rank))


def whole(model: nn.Module) -> Step:
    model.zero_grad(set_to_none=True)
    ids = batch()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    for name, grad in grads.items():
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    return Step(loss.detach(), grads)


def sharded(model: nn.Module, **options) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def run(kind: str) -> dict:
    """By the share: whether loss and gradients are equal to those without a budget, held bytes, plan."""
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if kind == "FSDP2, bf16" else {}
    wrap = DistributedDataParallel if kind == "DDP" else partial(sharded, **options)
    model = tiny("Qwen3", num_hidden_layers=LAYERS).train()
    fuse_layers(model)
    stock = wrap(copy.deepcopy(model))
    truth = whole(stock)
    alone = fit_activations(model, 10**9)
    whole(model)
    whole(model)
    alone()
    if kind == "FSDP2, budget first":
        fitted = fit_activations(model, 10**9)
        model = wrap(model)
    else:
        model = wrap(model)
        fitted = fit_activations(model, 10**9)
    whole(model)
    whole(model)
    most, actual = fitted.last_plan.bytes, {}
    for share in SHARES:
        fitted.budget = int(share * most)
        step = whole(model)
        same = torch.equal(step.loss, truth.loss) and all(
            torch.equal(step.gradients[name], x) for name, x in truth.gradients.items()
        )
        ids = batch()
        loss = model(input_ids=ids, labels=ids).loss
        held = fitted.held_bytes
        loss.backward()
        actual[share] = same, held, fitted.budget, fitted.last_plan, fitted.held_bytes
    fitted()
    step = whole(model)
    actual["undone"] = all(torch.equal(step.gradients[name], x) for name, x in truth.gradients.items())
    actual["most"], actual["most of one process"] = most, alone.last_plan.bytes
    return actual


def each_of(kinds: tuple[str, ...]) -> dict:
    return {kind: run(kind) for kind in kinds}


@pytest.fixture(scope="module")
def ranks(with_repeats) -> list[dict]:
    return in_processes(2, each_of, KINDS if with_repeats else USUAL)


@pytest.mark.parametrize("kind", usually(USUAL, KINDS))
def test_gradients_are_equal_under_two_processes(ranks, kind):
    for rank in ranks:
        actual, levels = rank[kind], set()
        assert actual["undone"]
        # Gathered parameters are not counted.
        assert actual["most"] == actual["most of one process"] or "bf16" in kind
        for same, held, budget, plan, after in (actual[share] for share in SHARES):
            assert same and after == 0 and held <= plan.bytes <= budget
            levels |= set(plan.levels)
        assert levels == {"full", "cheap", "keep"}
    # Each rank has a plan of its own.
    assert ranks[0][kind][0.45][3].tokens != ranks[1][kind][0.45][3].tokens
