"""Vocabulary-parallel heads: every rank of two or four has what one process with the whole head has."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from logitless import (
    BudgetWarning,
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    MedusaHeads,
    MedusaLoss,
    MultiTokenLoss,
    ORPOLoss,
    RLOOLoss,
    SamplerCorrection,
)
from logitless.engine.terms import Term
from logitless.losses.base import LogitsLoss
from logitless.losses.distillation import NAMES
from logitless.losses.logprobs import TokenStatistics
from tests.ranks import device_type, on_devices, random, to_rank_device
from tests.support import AllocationWatcher, host_reads

B, T, H, TEACHER_H = 4, 6, 10, 7
# A sharded LogitsLoss is not compiled, so that the whole one need not be either.
pytestmark = [pytest.mark.usefixtures("uncompiled"), pytest.mark.ranks]
# Rows of the head on each rank: uneven, and few enough on one of them that many targets are elsewhere.
SIZES = {2: (30, 17), 4: (11, 2, 19, 15)}
V = 47
# The same in two calls; some ranks' shards stay as they are.
RESIZED = {2: ((12, 30), (17, 30)), 4: ((11, 2, 19, 10), (11, 2, 24, 10))}
# Whole chunks, and chunks of a few rows: of a loss of logits, and of one that the twins read, beside theirs.
LARGE, SMALL, SMALL_BESIDE_TWINS = 2**24, {2: 20_000, 4: 14_000}, 49_152 + 1_100


class Numbers(TokenStatistics):
    """`TokenStatistics` as a loss: a function of every statistic that it returns."""

    def __call__(self, hidden, weight, targets, *, bias=None):
        actual, plan = self.statistics(hidden, weight, targets, bias=bias)
        values = (
            actual["logps"].cos() + 0.1 * actual["lse"].square() + actual.get("entropy", torch.zeros(())) ** 2
        )
        return Answer(
            values.sum(), {name: x.detach() for name, x in actual.items() if x.shape == targets.shape}, plan
        )


@dataclass
class Answer:
    loss: Tensor
    metrics: dict
    plan: object = None
    tokens: dict = field(default_factory=dict)


def targets() -> Tensor:
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(3), device="cpu")
    ids[0, :2] = ids[2, 3] = -100
    return to_rank_device(ids)


def ce(**options):
    call = {name: options.pop(name) for name in ("token_weights", "class_weights") if name in options}
    return CrossEntropyLoss(**options), call


REFERENCE = {"ref_hidden": random(B, T, TEACHER_H, seed=5), "ref_weight": random(V, TEACHER_H, seed=6)}
TEACHER = {"teacher_hidden": random(B, T, TEACHER_H, seed=7), "teacher_weight": random(V, TEACHER_H, seed=8)}
ROLLOUT = {"advantages": random(B, seed=9), "old_logps": -3 + 0.1 * random(B, T, seed=9)}
KL = {
    "kl_hidden": random(B, T, H, seed=11),
    "kl_targets": targets(),
    "ref_logps": torch.full((B,), -30.0, dtype=torch.float64, device="cpu"),
}
BIAS = random(V, seed=1)

# What is a shard's alone; everything else is the same on all ranks.
SHARDED = ("ref_weight", "ref_bias", "teacher_weight", "teacher_bias")
CASES = {
    "ce": ce(),
    "ce smoothed": ce(label_smoothing=0.2, z_loss=0.01, softcap=3.0, logit_scale=0.7),
    "ce class weights": ce(label_smoothing=0.2, class_weights=random(V, seed=2).abs(), reduction="sum"),
    "ce capped": ce(softcap=3.0, logit_scale=2.0),
    "ce dft": ce(dft=True, temperature=0.8, token_weights=random(B, T, seed=4).abs()),
    "ce unreduced": ce(reduction="none", z_loss=0.1, label_smoothing=0.1),
    "ce all rows": ce(compact=False, ignore_index=-100),
    "ce ignoring an id": ce(ignore_index=12, z_loss=0.1),
    "logprobs": (Numbers(entropy="metric", also=("sum_logits", "log_sum_sq_probs", "is_top1")), {}),
    "logprobs entropy": (Numbers(entropy=True, softcap=4.0), {}),
    "dpo": (DPOLoss(), REFERENCE),
    "dpo weighted": (
        DPOLoss(loss_type=["sigmoid", "sft"], use_weighting=True),
        REFERENCE | {"ref_bias": random(V, seed=12)},
    ),
    "orpo": (ORPOLoss(), {}),
    "kto": (
        KTOLoss(),
        {
            "labels": torch.tensor([True, False, True, True], device="cpu"),
            "kl": KL,
            "ref_logps": random(B, seed=3),
        },
    ),
    "grpo": (GRPOLoss(return_logps=True), ROLLOUT),
    "grpo reference": (GRPOLoss(beta=0.1, return_predictions=True), ROLLOUT | REFERENCE),
    "grpo entropy": (GRPOLoss(entropy_coef=0.3, top_entropy_quantile=0.5), ROLLOUT),
    "grpo corrected": (
        GRPOLoss(
            trust_region="binary_tv",
            beta=0.1,
            kl_estimator="k2",
            ref_advantage=0.3,
            old_kl_coef=0.1,
            sampler_correction=SamplerCorrection(level="geometric", action="mask", low=0.9, high=1.1),
        ),
        ROLLOUT | REFERENCE | {"sampling_logps": random(B, T, seed=14) - 3},
    ),
    "rloo": (RLOOLoss(), ROLLOUT),
    "jsd": (JSDLoss(temperature=1.5, hard_loss_weight=0.3), TEACHER),
    "jsd capped": (
        JSDLoss(beta=0.3, softcap=5.0, teacher_logit_scale=0.5),
        TEACHER | {"teacher_bias": random(V, seed=13)},
    ),
    **{
        name: (DistillationLoss(divergence=name), TEACHER)
        for name in ("forward_kl", "reverse_kl", "skewed_kl", "total_variation", "cosine")
    },
    "jsd unreduced": (JSDLoss(reduction="none"), TEACHER),
}
TRAINED = {
    "all": ("hidden", "weight", "bias"),
    "frozen head": ("hidden",),
    "frozen hidden": ("weight",),
    "nothing": (),
}


def run(loss, options: dict, operands: dict[str, Tensor], trained: tuple[str, ...]) -> dict[str, Tensor]:
    operands, options = to_rank_device((operands, options))
    leaves = {name: x.clone().requires_grad_(name in trained) for name, x in operands.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        ids = torch.where(targets() == -100, loss.ignore_index, targets())
        out = loss(leaves["hidden"], leaves["weight"], ids, bias=leaves["bias"], **options)
    assert loss.logits_budget not in (*SMALL.values(), SMALL_BESIDE_TWINS) or out.plan.chunks > 2, out.plan
    value = (
        out.loss
        if out.loss.dim() == 0
        else (out.loss * to_rank_device(random(*out.loss.shape, seed=20))).sum()
    )
    actual = {"loss": out.loss.detach()} | {f"metric {name}": x for name, x in out.metrics.items()}
    actual |= {f"token {name}": x.double() for name, x in out.tokens.items()}
    if trained:
        gradients = torch.autograd.grad(1.7 * value, [leaves[name] for name in trained])
        actual |= {f"d_{name}": x for name, x in zip(trained, gradients, strict=True)}
    return actual


def cases(ranks: int):
    """Of two ranks everything; of four what is trained in full, and one of the others by turns."""
    for number, (name, (loss, options)) in enumerate(CASES.items()):
        small = SMALL[ranks] if isinstance(loss, LogitsLoss) else SMALL_BESIDE_TWINS
        for turn, (frozen, trained) in enumerate(TRAINED.items()):
            if ranks > 2 and turn not in (0, 1 + number % 3):
                continue
            budget = (LARGE, small)[(number + turn) % 2]
            yield f"{name}, {frozen}", replace(loss, logits_budget=budget), options, trained


def cut(x: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
    return x.split(sizes)[rank]


def everything() -> dict:
    """What a rank finds."""
    group, rank = dist.group.WORLD, dist.get_rank()
    sizes, actual = SIZES[group.size()], {}
    head = to_rank_device({"hidden": random(B, T, H), "weight": random(V, H), "bias": BIAS})
    for name, loss, options, trained in cases(group.size()):
        options = {key: cut(x, sizes, rank) if key in SHARDED else x for key, x in options.items()}
        operands = {key: x if key == "hidden" else cut(x, sizes, rank) for key, x in head.items()}
        actual[name] = run(replace(loss, tp_group=group), options, operands, trained)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        operands = {key: (x if key == "hidden" else cut(x, sizes, rank)).to(dtype) for key, x in head.items()}
        actual[str(dtype)] = run(CrossEntropyLoss(z_loss=0.01, tp_group=group), {}, operands, TRAINED["all"])
    return actual | apart(rank, group, sizes, head)


def apart(rank: int, group, sizes, head) -> dict:
    """What is no case of the table: other names of the group, ties, confident tokens, errors."""
    ranks = len(sizes)
    mesh = init_device_mesh(device_type(), (ranks,), mesh_dim_names=("tp",))
    # As a plan of tensor parallelism leaves a head.
    layer = torch.nn.Linear(H, V, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(head["weight"])
    sharded = parallelize_module(layer, mesh, ColwiseParallel()).weight
    by_name = CrossEntropyLoss(tp_group="tp")(head["hidden"], sharded, targets())
    by_name.loss.backward()
    assert isinstance(sharded.grad, DTensor) and sharded.grad.placements == (Shard(0),)
    actual = {"dtensor": {"loss": by_name.loss.detach(), "d_weight": sharded.grad.full_tensor()}}
    by_mesh = CrossEntropyLoss(tp_group=mesh)(head["hidden"], cut(head["weight"], sizes, rank), targets())
    actual["mesh"] = {"loss": by_mesh.loss}

    # Tokens of one logit far above all others, and of equal ones on all ranks.
    logits = torch.zeros(3, V, dtype=torch.float64)
    logits[0, 40], logits[1, 5] = 30.0, 12.0
    eye = torch.eye(V, dtype=torch.float64)
    ids = torch.tensor([40, 5, 33])
    out = CrossEntropyLoss(tp_group=group, reduction="none")(logits, cut(eye, sizes, rank), ids)
    actual["confident"] = {"loss": out.loss, "metric token_accuracy": out.metrics["token_accuracy"]}
    equal = CrossEntropyLoss(tp_group=group)(
        torch.zeros_like(logits[:1]), cut(eye, sizes, rank), torch.tensor([0])
    )
    # The shard of the target has no share of the probability that fp32 could tell from none.
    far = torch.full((V,), -100.0)
    far[: sizes[0]] = 0.0
    x, row = torch.ones(1, 1, requires_grad=True), cut(far[:, None], sizes, rank).clone().requires_grad_()
    CrossEntropyLoss(tp_group=group)(x, row, torch.tensor([V - 1])).loss.backward()
    actual["no share"] = {"d_hidden": x.grad, "d_weight": row.grad}
    actual["first of equals"] = {"token_accuracy": equal.metrics["token_accuracy"]}
    for name in MAIN:
        (loss, options), weight = CASES[name], cut(head["weight"], sizes, rank).requires_grad_()
        options = {
            key: cut(x, sizes, rank) if key in SHARDED else x for key, x in to_rank_device(options).items()
        }
        main = torch.zeros_like(weight).detach()
        replace(loss, tp_group=group)(
            head["hidden"], weight, targets(), accumulate_into=main, grad_scale=1.7, **options
        ).loss.backward()
        actual[f"main {name}"] = {"d_weight": main}
    actual |= resized(group, rank, head) | {"peaks": peaks(group, rank) if watched(ranks) else {}}
    actual["heads"] = several_heads(lambda x: cut(x, sizes, rank).clone(), tp_group=group)
    actual["depths"] = several_depths(lambda x: cut(x, sizes, rank).clone(), tp_group=group)
    actual["ignored"] = [
        not_a_number(CrossEntropyLoss(tp_group=group, compact=compact), head, sizes, rank, labels)
        for compact in (True, False)
        for labels in (torch.full((B, T), -100), targets())
    ]
    mine = distribute_tensor(head["weight"], mesh, [Shard(0)])
    actual["depths of a DTensor"] = several_depths(lambda x: mine if x.dim() > 1 else None, tp_group="tp")
    x = SimpleNamespace(
        **head, shard=cut(head["weight"], sizes, rank), sharded=sharded, group=group, rank=rank
    )
    return actual | {"errors": {what: refusal(attempt, x) for what, (attempt, _) in BAD.items()}}


def refusal(attempt: Callable, x: SimpleNamespace) -> str:
    try:
        attempt(x)
        return "nothing"
    except (ValueError, RuntimeError) as error:
        return str(error)


def on_shards(x: SimpleNamespace, ids: Tensor, *, compact=True, **given):
    return CrossEntropyLoss(tp_group=x.group, compact=compact)(x.hidden, x.shard, ids, **given)


# What is wrong, of what a rank has, and its error.
BAD = {
    "own": (lambda x: Own(tp_group=x.group), "tp_group: expected None for Own"),
    "name": (
        lambda x: CrossEntropyLoss(tp_group="tensor")(x.hidden, x.sharded, targets()),
        "tp_group: expected a dimension of weight's device mesh",
    ),
    "teacher": (
        lambda x: JSDLoss(tp_group=x.group)(x.hidden, x.shard, **to_rank_device(TEACHER)),
        "teacher_weight: expected",
    ),
    "whole teacher": (
        lambda x: JSDLoss(tp_group="tp")(x.hidden, x.sharded, **to_rank_device(TEACHER)),
        "teacher_weight: expected a DTensor of 47 rows with tp_group, got a plain tensor",
    ),
    "whole reference": (
        lambda x: DPOLoss(tp_group="tp")(
            x.hidden, x.sharded, targets(), ref_hidden=x.hidden, ref_weight=x.weight
        ),
        "ref_weight: expected a DTensor of 47 rows with tp_group, got a plain tensor",
    ),
    "whole Medusa heads": (
        lambda x: MedusaLoss(tp_group="tp")(
            x.hidden, medusa_heads(lambda whole: whole), targets(), base_weight=x.sharded
        ),
        "head_0: expected .* rows on this rank, like base, got 47; shard all",
    ),
    "class_weights": (
        lambda x: on_shards(x, targets(), class_weights=torch.ones(V + 1)),
        "class_weights: expected shape",
    ),
    "target": (
        lambda x: on_shards(x, targets() + V),
        r"targets: expected ids in \[0, 47\) or ignore_index, got 24 outside on ranks 0, 1",
    ),
    "one target": (
        lambda x: on_shards(x, targets() + V * (x.rank == 1)),
        r"targets: expected ids in \[0, 47\) or ignore_index, got 24 outside on rank 1[;:] ",
    ),
}
if torch.cuda.device_count() < 2:  # there an assertion on the device ends a process's use of it
    BAD["one target, all rows"] = (
        lambda x: on_shards(x, targets() + V * (x.rank == 1), compact=False),
        r"targets: expected ids in \[0, 47\)",
    )


def resized(group, rank: int, head) -> dict[str, dict]:
    """A head whose shards change between calls, on one rank in place: nobody is told, and all must notice."""
    first, second = RESIZED[group.size()]
    weight = torch.nn.Parameter(cut(head["weight"][:-5], first, rank).clone())
    actual = {}
    for name, rows, sizes in (("before", V - 5, first), ("after", V, second)):
        if weight.shape[0] != sizes[rank]:
            weight.data = cut(head["weight"][:rows], sizes, rank).clone()
        for time in ("", " again"):
            hidden = head["hidden"].clone().requires_grad_()
            with host_reads() as reads:
                out = CrossEntropyLoss(tp_group=group)(hidden, weight, targets() % (V - 5))
                (d_hidden,) = torch.autograd.grad(out.loss, hidden)
            this = {"loss": out.loss.detach(), "d_hidden": d_hidden, "reads": reads}
            actual[f"resized {name}{time}"] = this | {"shard": weight.detach().clone()}
            del out  # its graph holds the weight's shape
    return actual


def watched(ranks: int) -> bool:
    """Whether peaks are taken: the watcher sees the CPU's allocations, and one number of ranks is enough."""
    return ranks == 4 and device_type() == "cpu"


def peaks(group, rank: int) -> dict[str, tuple[int, int]]:
    """Bytes at the peak of each divergence, and those that it may take."""
    wide, actual = 500, {}
    shard = random(wide, H, seed=rank).float().requires_grad_()
    hidden, taught = random(100, H).float().requires_grad_(), random(100, TEACHER_H).float()
    teacher = {"teacher_hidden": taught, "teacher_weight": random(wide, TEACHER_H, seed=rank).float()}
    for name in NAMES:
        loss = DistillationLoss(divergence=name, hard_loss_weight=0.5, tp_group=group, logits_budget=2**19)
        # Beside the budget: sums of d_weight, the chunks' matrices, numbers of each token.
        limit = 2**19 + 2 * shard.nbytes + 6 * hidden.nbytes
        # Gloo's threads free what they send, which the watcher does not always see: the lowest of some peaks.
        peak = torch.tensor(float("inf"))
        for _ in range(8):
            with AllocationWatcher() as watcher:
                out = loss(hidden, shard, torch.arange(100), **teacher)
            assert out.plan.chunks > 3
            peak = peak.clamp(max=watcher.peak)
            highest = peak.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            if highest <= limit:
                break
        actual[name] = peak.item(), limit
    return actual


@torch.no_grad()
def medusa_heads(rows) -> MedusaHeads:
    """Two heads with a block each, whose projections are `rows` of the same matrices everywhere."""
    heads = MedusaHeads(H, rows(to_rank_device(BIAS)).shape[0], 2, dtype=torch.float64)
    for k in range(2):
        heads.projection(k).copy_(rows(to_rank_device(random(V, H, seed=30 + k))))
        for name, x in heads.blocks(k).named_parameters():
            x.copy_(random(*x.shape, seed=32 + k + len(name)) / 4)
    return heads


def several_heads(rows, **options) -> dict[str, Tensor]:
    """Medusa's loss, of a base head that is shared with no one."""
    heads, hidden = medusa_heads(rows), to_rank_device(random(B, T, H)).requires_grad_()
    weight = rows(to_rank_device(random(V, H))).requires_grad_()
    loss = MedusaLoss(logits_budget=SMALL_BESIDE_TWINS, z_loss=0.1, **options)
    out = loss(hidden, heads, targets(), base_weight=weight, base_bias=rows(to_rank_device(BIAS)))
    (1.7 * out.loss).backward()
    actual = {"loss": out.loss.detach(), "d_hidden": hidden.grad, "d_weight": weight.grad} | out.metrics
    actual |= {f"d_{name}": x.grad for name, x in heads.named_parameters()}
    return actual


def several_depths(rows, **options) -> dict[str, Tensor]:
    """Two hidden states under one head."""
    hidden = to_rank_device(random(2, B, T, H)).requires_grad_()
    weight = rows(to_rank_device(random(V, H))).requires_grad_()
    loss = MultiTokenLoss(logits_budget=LARGE, label_smoothing=0.1, **options)
    out = loss(list(hidden), weight, targets(), bias=rows(to_rank_device(BIAS)))
    (1.7 * out.loss).backward()
    d_weight = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
    return {"loss": out.loss.detach(), "d_hidden": hidden.grad, "d_weight": d_weight} | out.metrics


def not_a_number(loss, head, sizes, rank, labels) -> dict:
    """Where the gradients are 0 and where they are NaN, of an upstream gradient of NaN."""
    operands = [head["hidden"], cut(head["weight"], sizes, rank), cut(head["bias"], sizes, rank)]
    hidden, weight, bias = (x.clone().requires_grad_() for x in operands)
    (loss(hidden, weight, to_rank_device(labels), bias=bias).loss * torch.nan).backward()
    actual = {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    return {name: (x == 0, x.isnan()) for name, x in actual.items()}


# Losses that add to a shard's main gradient.
MAIN = ("ce smoothed", "dpo", "jsd")


@dataclass(frozen=True, kw_only=True)
class Own(LogitsLoss):
    def terms(self, logits, batch):
        return {"own": Term(logits.square().mean(-1))}, {}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.repeats)], ids="{} ranks".format)
def ranks(request):
    """What each rank found."""
    return on_devices(request.param, everything)


def test_a_main_gradient_of_each_shard(ranks):
    for name in MAIN:
        loss, options = CASES[name]
        hidden, weight = random(B, T, H), random(V, H).requires_grad_()
        (truth,) = torch.autograd.grad(1.7 * loss(hidden, weight, targets(), **options).loss, weight)
        assert_equal([rank[f"main {name}"] for rank in ranks], {"d_weight": truth}, 1e-11)


def test_ignored_tokens_have_no_gradient_whatever_arrives(ranks):
    supervised = (targets() != -100)[..., None].cpu()
    for rank in ranks:
        for i, actual in enumerate(rank["ignored"]):
            kept = supervised if i % 2 else torch.zeros_like(supervised)
            for name, (zero, nan) in actual.items():
                expected = kept.expand(zero.shape) if name == "hidden" else kept.any().expand(zero.shape)
                assert torch.equal(nan, expected) and torch.equal(zero, ~expected), (i, name)


def assert_equal(
    actual: list[dict[str, Tensor]], truth: dict[str, Tensor], tolerance: float, case: str = ""
) -> None:
    assert all(rank.keys() == truth.keys() for rank in actual), case
    for name, x in truth.items():
        if name in ("d_weight", "d_bias"):
            ours = [torch.cat([rank[name] for rank in actual])]
        else:
            ours = [rank[name] for rank in actual]
            # Bit for bit the same everywhere: a replica must not drift.
            assert all(torch.equal(ours[0], other) for other in ours), (case, name)
        error, allowed = (ours[0] - x).norm(), tolerance * max(x.norm(), 1e-3)
        assert error <= allowed, f"{case}, {name}: {ours[0]} instead of {x}"
        assert not name.startswith("d_") or x.norm() > 0, (case, name)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(ranks, case):
    found = [each for each in cases(len(ranks)) if each[0].rpartition(", ")[0] == case]
    assert len(found) >= 2
    for name, loss, options, trained in found:
        truth = run(loss, options, {"hidden": random(B, T, H), "weight": random(V, H), "bias": BIAS}, trained)
        assert_equal([rank[name] for rank in ranks], truth, 1e-10, name)


def test_several_heads(ranks):
    """Each rank has its rows of every projection; the blocks in front of them are replicas."""
    for name, run_whole in (("heads", several_heads), ("depths", several_depths)):
        truth = run_whole(lambda x: x.clone())
        projections = [key for key in truth if key.startswith("d_medusa_head") and truth[key].shape[0] == V]
        assert len(projections) == (2 if name == "heads" else 0)
        actual = [rank[name] for rank in ranks]
        for key in projections:
            ours = torch.cat([rank.pop(key) for rank in actual])
            torch.testing.assert_close(ours, truth.pop(key), rtol=1e-9, atol=1e-11)
        assert_equal(actual, truth, 1e-10)
    actual = [rank["depths of a DTensor"] for rank in ranks]
    truth = several_depths(lambda x: x.clone() if x.dim() > 1 else None)
    for rank in actual:
        torch.testing.assert_close(rank, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_low_precision(ranks, dtype):
    head = {"hidden": random(B, T, H), "weight": random(V, H), "bias": BIAS}
    rounded = {name: x.to(dtype) for name, x in head.items()}
    truth = run(
        CrossEntropyLoss(z_loss=0.01), {}, {name: x.double() for name, x in rounded.items()}, TRAINED["all"]
    )
    naive = run(CrossEntropyLoss(z_loss=0.01), {}, rounded, TRAINED["all"])
    actual = [rank[str(dtype)] for rank in ranks]
    for name, x in truth.items():
        if name.startswith("metric token"):
            continue
        ours = (
            torch.cat([rank[name] for rank in actual]) if name in ("d_weight", "d_bias") else actual[0][name]
        )
        error, allowed = ((y.double() - x).norm() / x.norm() for y in (ours, naive[name]))
        assert (
            error <= 2 * allowed + 8 * torch.finfo(dtype if name.startswith("d_") else torch.float32).eps
        ), name


def test_the_group_by_name_and_by_mesh(ranks):
    truth = run(
        CrossEntropyLoss(),
        {},
        {"hidden": random(B, T, H), "weight": random(V, H), "bias": torch.zeros(V).double()},
        ("weight",),
    )
    for rank in ranks:
        assert torch.allclose(rank["dtensor"]["loss"], truth["loss"]) and torch.allclose(
            rank["mesh"]["loss"], truth["loss"]
        )
        assert torch.allclose(1.7 * rank["dtensor"]["d_weight"], truth["d_weight"])


def test_confident_tokens_and_ties(ranks):
    for rank in ranks:
        # 46 others at exp(-30), and at exp(-12).
        expected = torch.log1p(46 * torch.exp(torch.tensor([-30.0, -12.0]).double()))
        assert torch.allclose(rank["confident"]["loss"][:2], expected, rtol=1e-4, atol=0)
        # The third token's target is one of 47 equals, and not the first.
        assert rank["confident"]["metric token_accuracy"] == pytest.approx(2 / 3)
        assert rank["first of equals"]["token_accuracy"] == 1


def test_a_target_in_a_shard_without_a_share(ranks):
    far = torch.full((V, 1), -100.0, dtype=torch.float64)
    far[: SIZES[len(ranks)][0]] = 0.0
    x, row = torch.ones(1, 1, dtype=torch.float64, requires_grad=True), far.requires_grad_()
    torch.nn.functional.cross_entropy(x @ row.t(), torch.tensor([V - 1])).backward()
    d_weight = torch.cat([rank["no share"]["d_weight"] for rank in ranks])
    assert torch.allclose(d_weight.double(), row.grad, atol=1e-6) and row.grad.norm() > 1
    assert all(torch.allclose(rank["no share"]["d_hidden"].double(), x.grad, rtol=1e-5) for rank in ranks)


def test_shards_that_change_between_calls(ranks):
    """Their sizes are read in every call, with what is read anyway; once more where they are new."""
    for name, rows in (("before", V - 5), ("before again", V - 5), ("after", V), ("after again", V)):
        weight = torch.cat([rank[f"resized {name}"]["shard"] for rank in ranks])
        assert weight.shape[0] == rows
        hidden = random(B, T, H).requires_grad_()
        loss = CrossEntropyLoss()(hidden, weight, targets() % (V - 5)).loss
        (d_hidden,) = torch.autograd.grad(loss, hidden)
        for rank in ranks:
            actual = rank[f"resized {name}"]
            torch.testing.assert_close(actual["loss"], loss.detach())
            torch.testing.assert_close(actual["d_hidden"], d_hidden)
            expected = 1 if name.endswith("again") else 2
            assert len(actual["reads"]) == expected, "\n\n".join(actual["reads"])


def test_divergences_stay_within_the_budget(ranks):
    for rank in ranks:
        on_cpu = torch.cuda.device_count() < 2
        assert len(rank["peaks"]) == (len(NAMES) if len(ranks) == 4 and on_cpu else 0)
        for name, (peak, limit) in rank["peaks"].items():
            assert 0.4 * 2**18 < peak <= limit, name


@pytest.mark.parametrize("what", BAD)
def test_bad_input(ranks, what):
    for rank in ranks:
        assert re.search(BAD[what][1], rank["errors"][what]), rank["errors"][what]
