"""A head that is gathered outside of FSDP2's hooks gets the gradient that FSDP2 gives its other parameters,
for any gradient divide factor: compared with F.cross_entropy of full logits inside of the hooks."""

from contextlib import suppress
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from logitless import CrossEntropyLoss, linear_cross_entropy
from logitless.parallel import fsdp as module
from tests.ranks import device_type, on_devices, to_rank_device

pytestmark = pytest.mark.ranks
V, H, B, T = 23, 8, 4, 5
# torch 2.11 cannot trace the argument grad_placements: its graph breaks there.
IS_2_11 = torch.__version__.startswith("2.11.")
COMPILED = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=not IS_2_11)


class Model(nn.Module):
    """What is scored outside of `forward` is the output of the norm, so that the head is still in shards."""

    def __init__(self, tied: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.norm = nn.Embedding(V, H), nn.Linear(H, H), nn.LayerNorm(H)
        self.output = nn.Linear(H, V)
        if tied:
            self.output.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, *, logits: bool) -> Tensor:
        hidden = self.norm(self.block(self.embed(ids)).tanh())
        return self.output(hidden) if logits else hidden


@dataclass(frozen=True)
class Case:
    """How a model is sharded."""

    layout: str = "own"  # groups of parameters
    mesh: str = "shards"
    factor: float | None = None
    sums: bool = False
    tied: bool = False
    reshard: bool = True  # the last group after its forward pass; torchtitan does not by default

    def of(self) -> FSDPModule:
        with torch.device("cpu"):
            model = Model(self.tied).to(device_type())
        mesh = self.device_mesh()
        if self.mesh in ("tensor parallel", "grid"):
            whole = ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
            parallelize_module(model.output, mesh["tp"], whole)
            mesh = mesh["dp"]
        if self.layout != "root":
            fully_shard(model.block, mesh=mesh)
        if self.layout == "own":
            fully_shard([model.embed, model.output] if self.tied else model.output, mesh=mesh)
        elif self.layout == "torchtitan":
            if not self.tied:
                fully_shard(model.embed, mesh=mesh)
            last = [model.norm, model.output]
            last = [model.embed, *last] if self.tied else last
            fully_shard(last, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(model, mesh=mesh)
        for each in model.modules():
            if isinstance(each, FSDPModule):
                if self.factor is not None:
                    each.set_gradient_divide_factor(self.factor)
                with suppress(AttributeError):  # not there in every torch
                    each.set_force_sum_reduction_for_comms(self.sums)
        return model

    def device_mesh(self) -> DeviceMesh:
        ranks = dist.get_world_size()
        if self.mesh == "tensor parallel":
            return init_device_mesh(device_type(), (ranks, 1), mesh_dim_names=("dp", "tp"))
        if self.mesh == "grid":
            return init_device_mesh(device_type(), (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        sizes = {"shards": (ranks,), "2 x 1": (ranks, 1), "1 x 2": (1, ranks)}[self.mesh]
        names = ("replicas", "shards")[-len(sizes) :]
        return init_device_mesh(device_type(), sizes, mesh_dim_names=names)


CASES = {
    "default": Case(),
    "torchtitan": Case(layout="torchtitan", factor=1.0),
    "torchtitan, tied": Case(layout="torchtitan", factor=1.0, tied=True),
    "torchtitan, gathered": Case(layout="torchtitan", factor=1.0, reshard=False),
    "accelerate": Case(layout="blocks", factor=1.0),
    "own group": Case(factor=1.0),
    "root alone": Case(layout="root", factor=1.0),
    "tied": Case(factor=1.0, tied=True),
    "tied, default": Case(tied=True),
    "another factor": Case(factor=3.0),
    "factor of the ranks": Case(factor=2.0),
    "sums": Case(sums=True),
    "sums, factor": Case(factor=5.0, sums=True),
    "2 x 1": Case(mesh="2 x 1"),
    "2 x 1, factor": Case(mesh="2 x 1", factor=1.0),
    "1 x 2": Case(mesh="1 x 2"),
    "1 x 2, factor": Case(mesh="1 x 2", factor=1.0),
    "tensor parallel": Case(mesh="tensor parallel", factor=3.0),
    "1 x 2, another": Case(mesh="1 x 2", factor=3.0),
}


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """A rank's own tokens; those of a tensor-parallel group are the same."""
    rank = dist.get_rank()
    make = torch.Generator().manual_seed(rank // 2 if case.mesh == "grid" else rank)
    ids, targets = torch.randint(0, V, (2, B, T), generator=make, device="cpu")
    targets[1, 2:] = -100
    return to_rank_device(ids), to_rank_device(targets)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad.full_tensor() for name, x in model.named_parameters()}


def plain(case: Case) -> dict[str, Tensor]:
    model, (ids, targets) = case.of(), batch(case)
    F.cross_entropy(model(ids, logits=True).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    return gradients(model)


def gathered(case: Case, scored) -> dict[str, Tensor]:
    model, (ids, targets) = case.of(), batch(case)
    hidden = model(ids, logits=False)
    # FSDP2 reshards the parameters of a group after the forward pass of the first module of the group (in
    # torch 2.11, of the last one), unless reshard_after_forward is False.
    has_several_modules = case.layout == "torchtitan" or case.tied
    reshards = case.reshard and not (has_several_modules and IS_2_11)
    # A head that is sharded by tensor parallelism stays a DTensor.
    in_shards = case.mesh == "grid" or case.layout in ("own", "torchtitan") and reshards
    assert isinstance(model.output.weight, DTensor) is in_shards
    scored(model, hidden, targets).backward()
    return gradients(model)


LOSS = CrossEntropyLoss(reduction="sum")
WAYS = {
    "tensors": lambda model, hidden, targets: (
        LOSS(hidden, model.output.weight, targets, bias=model.output.bias).loss
    ),
    "a module": lambda model, hidden, targets: LOSS(hidden, model.output, targets).loss,
    "computed": lambda model, hidden, targets: (
        LOSS(hidden, model.output.weight * 1.0, targets, bias=model.output.bias * 1.0).loss
    ),
    "rows of the head": lambda model, hidden, targets: (
        CrossEntropyLoss(reduction="sum", tp_group="tp")(
            hidden, model.output.weight, targets, bias=model.output.bias
        ).loss
    ),
    "rows of the head, compiled": lambda model, hidden, targets: COMPILED(
        hidden, model.output.weight, targets, bias=model.output.bias, reduction="sum", tp_group="tp"
    ),
    "compiled": lambda model, hidden, targets: COMPILED(
        hidden, model.output.weight, targets, bias=model.output.bias, reduction="sum"
    ),
}


OTHERS = (
    ("own group", "computed"),
    ("own group", "compiled"),
    ("2 x 1", "compiled"),
    ("tensor parallel", "rows of the head"),
    ("tensor parallel", "rows of the head, compiled"),
)


def refused(case: Case, change=None) -> str:
    model, (ids, targets) = case.of(), batch(case)
    if change is not None:
        change(model)
    with pytest.raises(ValueError) as caught:
        WAYS["tensors"](model, model(ids, logits=False), targets)
    return str(caught.value)


def everything() -> dict:
    actual = {name: plain(case) for name, case in CASES.items()}
    for name, case in CASES.items():
        for way in ("tensors", "a module"):
            actual[name, way] = gathered(case, WAYS[way])
    for name, way in OTHERS:
        actual[name, way] = gathered(CASES[name], WAYS[way])
    actual["hook"] = refused(Case(), lambda model: model.output.set_all_reduce_hook(lambda x: None))
    actual["twice"] = refused(Case(mesh="2 x 1", factor=3.0))

    with mock.patch.object(module, "_parameters_of", side_effect=AttributeError("no sharded_param")):
        actual["unknown"] = refused(Case())
    return actual


@pytest.fixture(scope="module")
def ranks():
    return on_devices(2, everything)


@pytest.mark.parametrize("way", ["tensors", "a module"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_logits(ranks, name, way):
    check(ranks, name, way)


@pytest.mark.parametrize(("name", "way"), OTHERS)
def test_other_heads(ranks, name, way):
    check(ranks, name, way)


def check(ranks, name: str, way: str) -> None:
    for actual in ranks:
        expected = actual[name]
        assert actual[name, way].keys() == expected.keys()
        for key, x in expected.items():
            assert x.norm() > 0
            torch.testing.assert_close(
                actual[name, way][key], x, rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
            )


def test_factors_differ(ranks):
    """The cases can tell factors apart."""
    weights = [ranks[0][name]["output.weight"] for name in ("default", "own group", "another factor")]
    assert not torch.allclose(weights[0], weights[1]) and not torch.allclose(weights[0], weights[2])


GRID = Case(layout="torchtitan", mesh="grid", factor=1.0)


def on_a_grid() -> dict:
    return {"grid": plain(GRID), ("grid", "rows"): gathered(GRID, WAYS["rows of the head"])}


def test_torchtitan_with_tensor_parallelism():
    """Two data-parallel ranks by two tensor-parallel ones: the head is a DTensor at the call."""
    ranks = on_devices(4, on_a_grid)
    check(ranks, "grid", "rows")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hook", "weight: expected a parameter without an all-reduce hook of FSDP2, got one with a hook; "),
        (
            "twice",
            "weight: expected a gradient divide factor of None or 1.0 on replicas that are not sharded",
        ),
        ("unknown", "weight: expected a parameter of an FSDP2 whose state is known, got that of torch "),
    ],
)
def test_refused(ranks, name, message):
    for actual in ranks:
        assert actual[name].startswith(message)
        assert name == "twice" or "weight.full_tensor(grad_placements=" in actual[name]
