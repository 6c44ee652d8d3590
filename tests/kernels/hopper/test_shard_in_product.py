"""Shards of the head whose logits are read in the product: two ranks have what one process has in fp64.

Over NCCL these are the kernels; on a CPU they run in Triton's interpreter, whose products take no bf16.
"""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless import BudgetWarning, CrossEntropyLoss, DPOLoss, GRPOLoss, ORPOLoss
from logitless.kernels import fused_projection as fused
from tests.kernels.hopper.interpreted import replacements
from tests.kernels.support import INTERPRETED
from tests.ranks import device_type, on_devices, to_rank_device

SERVED = torch.cuda.device_count() >= 2 and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not INTERPRETED and not SERVED, reason="needs two Hopper GPUs, or the interpreter"),
]
B, T, H, REF_H, V = 4, 6, 16, 8, 47
SIZES = (30, 17)  # many targets are on the other rank
FP32 = torch.float32
# Tiles of the interpreter, whose time grows with them.
TILES = {"BM": 16, "BN": 16, "BK": 16}
# Rows of these shards take some 80 bytes: several chunks, which a pair does not fit in.
SMALL = 500


def random(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers in every process, which bf16 holds."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), device="cpu")
    return x.bfloat16().double()


def targets() -> Tensor:
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5), device="cpu")
    ids[:, 1] = -100
    return ids


REFERENCE = {"ref_hidden": random(B, T, REF_H, seed=1), "ref_weight": random(V, REF_H, seed=2)}
POLICY = {"advantages": random(B, seed=3), "old_logps": random(B, T, seed=4) - 4}
# Loss, its inputs, whether the head has a bias, which kernels run (with a trainable head, with a frozen one).
CASES = {
    "ce": (CrossEntropyLoss(), {}, False, ("r", "r")),
    "ce, chunks": (CrossEntropyLoss(logits_budget=SMALL), {}, False, ("r", "r")),
    "ce, softcap and bias": (CrossEntropyLoss(softcap=3.0, logit_scale=1.3), {}, True, ("r", "r")),
    "ce, all rows": (CrossEntropyLoss(compact=False), {}, False, ("r", "r")),
    "ce, unreduced": (CrossEntropyLoss(reduction="none", z_loss=0.1), {}, True, ("rw", "r")),
    "dpo": (DPOLoss(beta=0.5), REFERENCE, False, ("r", "r")),
    "dpo, chunks": (DPOLoss(beta=0.5, logits_budget=SMALL), REFERENCE, False, ("rw", "r")),
    "orpo": (ORPOLoss(), {}, False, ("r", "r")),
    "grpo": (GRPOLoss(epsilon=0.2), POLICY, False, ("r", "r")),
}
SHARDED = ("ref_weight",)
# Cases, and whether the head is frozen; on a CPU without --all the usual ones.
EACH = [(name, frozen) for name in CASES for frozen in (False, True)]
USUAL = [("ce, softcap and bias", False), ("ce, chunks", True), ("dpo, chunks", False), ("grpo", False)]


def run(loss, inputs, operands, frozen: bool) -> dict[str, Tensor]:
    """Loss, metrics and gradients."""
    names = ("hidden",) if frozen else tuple(name for name, x in operands.items() if x is not None)
    leaves = {
        name: None if x is None else x.detach().clone().requires_grad_(name in names)
        for name, x in operands.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        out = loss(
            leaves["hidden"], leaves["weight"], to_rank_device(targets()), bias=leaves["bias"], **inputs
        )
    value = (
        out.loss
        if out.loss.dim() == 0
        else (out.loss * to_rank_device(random(B, T, seed=20)).to(out.loss.dtype)).sum()
    )
    gradients = torch.autograd.grad(1.7 * value, [leaves[name] for name in names])
    actual = {"loss": out.loss.detach()} | {f"d_{name}": x for name, x in zip(names, gradients, strict=True)}
    return actual | {f"metric {name}": x for name, x in out.metrics.items()}


def operands(bias: bool) -> dict[str, Tensor | None]:
    return {"hidden": random(B, T, H), "weight": random(V, H) / 4, "bias": random(V) if bias else None}


def prepared() -> dict[str, int]:
    """The kernels for this rank's device, and how often each runs."""
    if device_type() == "cpu":
        for owner, name, value in replacements(**TILES):
            setattr(owner, name, value)
    ran = {"r": 0, "w": 0}

    def counted(name: str) -> None:
        kernel = getattr(fused, name)

        def run(*args, **kwargs):
            ran[name[0]] += 1
            return kernel(*args, **kwargs)

        setattr(fused, name, run)

    counted("read")
    counted("write")
    return ran


def found(cases: list[tuple[str, bool]]) -> dict:
    """What a rank finds: numbers and gradients of each case, and which kernels ran."""
    ran, group, rank = prepared(), dist.group.WORLD, dist.get_rank()
    dtype = FP32 if device_type() == "cpu" else torch.bfloat16

    def mine(name: str, x):
        x = x.split(SIZES)[rank] if name in ("weight", "bias", *SHARDED) and x is not None else x
        return to_rank_device(x) if x is None or name in POLICY else to_rank_device(x).to(dtype)

    def computed(loss, inputs, bias, frozen):
        ran.update(r=0, w=0)
        inputs = {name: mine(name, x) for name, x in inputs.items()}
        heads = {name: mine(name, x) for name, x in operands(bias).items()}
        numbers = run(replace(loss, tp_group=group), inputs, heads, frozen)
        return numbers | {"ran": "".join(name for name, times in ran.items() if times)}

    results = {
        f"{name}, {frozen}": computed(loss, inputs, bias, frozen)
        for name, frozen in cases
        for loss, inputs, bias, _ in [CASES[name]]
    }
    # One rank whose kernels cannot: both must do without.
    serves = fused.serves
    fused.serves = lambda *args: rank == 0 and serves(*args)
    return results | {"one cannot": computed(*CASES["dpo"][:3], False)}


@pytest.fixture(scope="module")
def ranks(with_repeats):
    return on_devices(2, found, EACH if with_repeats else USUAL)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{'frozen head' if case[1] else 'trainable'}",
            marks=[] if case in USUAL else pytest.mark.repeats,
        )
        for case in EACH
    ],
)
def test_equals_one_process(ranks, name, frozen):
    loss, inputs, bias, kernels = CASES[name]
    actual = [rank[f"{name}, {frozen}"] for rank in ranks]
    assert [rank["ran"] for rank in actual] == [kernels[frozen]] * 2
    agree(actual, run(loss, inputs, operands(bias), frozen))


def test_all_ranks_do_without_where_one_must(ranks):
    loss, inputs, bias, _ = CASES["dpo"]
    actual = [rank["one cannot"] for rank in ranks]
    assert [rank["ran"] for rank in actual] == ["", ""]
    agree(actual, run(loss, inputs, operands(bias), False), rounded=True)


def agree(actual: list[dict], truth: dict[str, Tensor], *, rounded: bool = False) -> None:
    wide = actual[0]["d_hidden"].dtype == FP32
    for name, x in truth.items():
        sharded = name in ("d_weight", "d_bias")
        ours = torch.cat([rank[name] for rank in actual]) if sharded else actual[0][name]
        if not sharded:
            assert torch.equal(actual[1][name], ours), name
        limit = 2e-5 if wide else 3e-2 if rounded else 1e-2 if name.startswith("d_") else 1e-4
        assert (ours.double() - x).norm() <= limit * x.norm() + 1e-6, name
