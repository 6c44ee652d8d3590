"""Sequences in slices: every rank of two or four has the loss of the whole sequences, and its own tokens'
part of the gradient."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from logitless import (
    BudgetWarning,
    CPOLoss,
    CrossEntropyLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    LogitsLoss,
    MultiTokenLoss,
    ORPOLoss,
    PPOLoss,
    REINFORCELoss,
    RLOOLoss,
    SamplerCorrection,
    SimPOLoss,
    Term,
    TokenLoss,
    global_num_items,
)
from logitless.losses.base import LinearLoss
from tests.ranks import device_type, on_devices, random, to_rank_device
from tests.support import uncompiled

pytestmark = pytest.mark.ranks

B, T, H, V, REFERENCE_H = 4, 7, 6, 23, 5
# Which tokens of every sequence each rank has. "halved" is accelerate's order: of 2n chunks, rank r has r and
# 2n - 1 - r.
SLICES = {
    2: {
        "uneven": ((0, 1, 2), (3, 4, 5, 6)),
        "none here": ((), range(7)),
        "halved": ((0, 1, 6), (2, 3, 4, 5)),
    },
    4: {"uneven": ((0, 1), (2,), (3, 4, 5), (6,)), "gaps": ((5, 0, 3), (), (1, 2, 4, 6), ())},
}
Slices = Sequence[Sequence[int]]
HALVES = (0, 1), (2, 3, 4, 5, 6)
LARGE, SMALL = 2**24, 9_000
SLICED = (
    "hidden",
    "targets",
    "ref_hidden",
    "nll_targets",
    "token_ref_logps",
    "kl_hidden",
    "kl_targets",
    "teacher_hidden",
    "position_ids",
    "old_logps",
    "sampling_logps",
    "mask",
    "token_advantages",
    "token_importance_weights",
)


def labels(seed: int = 3) -> Tensor:
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed), device="cpu")
    ids[0, :2] = ids[1, 4:] = ids[2, 1:3] = ids[3, 6] = -100
    return ids


@dataclass(frozen=True, kw_only=True)
class Own(TokenLoss):
    """Tokens weighed by a function of their whole sequence, under differentiation."""

    scope = "group"
    unit = "sequences"
    context_parallel = True
    prediction_inputs = ("position_ids",)
    metric_names = ("position", "share", "sum")

    def terms(self, stats, batch):
        sums = batch.sum_by_sequence(stats.logps)
        weighed = batch.spread((sums / batch.lengths).exp()) * stats.logps
        positions = batch.positions.to(sums.dtype)
        metrics = {
            "position": Term(positions),
            "share": Term(stats.logps, over=stats.logps < -3),
            "sum": Term(weighed, over=None),
        }
        return {"tokens": Term(weighed), "sequences": Term(sums.square(), over="sequences")}, metrics


@dataclass(frozen=True, kw_only=True)
class OwnLogits(LogitsLoss):
    """A loss of logits with a metric."""

    context_parallel = True
    metric_names = ("norm",)

    def terms(self, logits, batch):
        logps = logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
        return {"logps": Term(-logps)}, {"norm": Term(logits.norm(dim=-1), over=None)}


@dataclass(frozen=True, kw_only=True)
class OwnTokens(TokenLoss):
    """A loss of single tokens with a metric of them over the sequences."""

    context_parallel = True
    metric_names = ("sums",)

    def terms(self, stats, batch):
        return {"logps": Term(-stats.logps)}, {"sums": Term(stats.logps, over="sequences")}


HEAD = {"hidden": random(B, T, H), "weight": random(V, H), "bias": random(V, seed=1)}
REFERENCE = {"ref_hidden": random(B, T, REFERENCE_H, seed=5), "ref_weight": random(V, REFERENCE_H, seed=6)}
SCORED = {"ref_logps": random(B, seed=8) - 15}
TOKENS = {"token_ref_logps": random(B, T, seed=8) - 3}
TASTES = {"labels": torch.tensor([True, False, True, True], device="cpu")}
KL = {"kl_hidden": random(B, T, H, seed=11), "kl_targets": labels(4)}
UNALIKE = {"ref_logps": torch.full((B,), -30.0, dtype=torch.float64, device="cpu")}
PROMPTED = {"nll_targets": torch.where(labels() == -100, 5, labels())}
POSITIONS = {"position_ids": torch.arange(T, device="cpu").expand(B, T)}
ROLLOUT = {"advantages": random(B, seed=9), "old_logps": -3 + random(B, T, seed=9)}
PER_TOKEN = {"token_advantages": random(B, T, seed=10), "old_logps": ROLLOUT["old_logps"]}
SAMPLED = ROLLOUT | {"sampling_logps": -3 + random(B, T, seed=12), "mask": random(B, T, seed=13) > -1}
WEIGHED = {"importance_weights": random(B, seed=14).exp()}
TOKEN_LEVEL = SamplerCorrection(action="mask", low=0.2, high=2.0)
# Each rank has a part of a sequence; all drop the same sequences.
OF_SEQUENCES = (
    SamplerCorrection(level="geometric", action="reject", low=0.4, high=2.5),
    SamplerCorrection(level="sequence", high=2.0),
)
POLICIES = {
    "grpo": (GRPOLoss(loss_type="grpo", beta=0.1), SAMPLED | TOKENS),
    "grpo, reference": (GRPOLoss(loss_type="grpo", beta=0.1), ROLLOUT | REFERENCE),
    "dapo": (GRPOLoss(return_logps=True, entropy_coef=0.1), ROLLOUT),
    "dapo, packed": (GRPOLoss(), ROLLOUT | WEIGHED),
    "dr_grpo, packed, tokens": (GRPOLoss(loss_type="dr_grpo", max_completion_length=9), PER_TOKEN),
    "gspo": (GRPOLoss(importance_sampling_level="sequence", loss_type="grpo", entropy_coef=0.1), ROLLOUT),
    "gspo, tokens": (GRPOLoss(importance_sampling_level="sequence"), PER_TOKEN),
    "dapo, unreduced": (GRPOLoss(reduction="none"), ROLLOUT),
    "gspo, unreduced": (
        GRPOLoss(importance_sampling_level="sequence", loss_type="luspo", reduction="none"),
        ROLLOUT,
    ),
    "cispo": (
        GRPOLoss(loss_type="cispo", off_policy_mask_threshold=0.0, epsilon_high=2.0),
        SAMPLED | {"mask": SAMPLED["mask"].float()},
    ),
    "sapo": (GRPOLoss(loss_type="sapo", reduction="sum"), ROLLOUT),
    "vespo": (GRPOLoss(loss_type="vespo"), ROLLOUT | {"token_importance_weights": random(B, T).exp()}),
    "vespo, sequences": (GRPOLoss(loss_type="vespo"), ROLLOUT | WEIGHED),
    "quantile": (GRPOLoss(top_entropy_quantile=0.5, entropy_coef=0.1), ROLLOUT),
    "quantile, all rows": (GRPOLoss(top_entropy_quantile=0.3, compact=False), ROLLOUT),
    "ppo": (PPOLoss(), PER_TOKEN),
    "rloo": (RLOOLoss(), ROLLOUT),
    "rloo, packed": (RLOOLoss(), ROLLOUT),
    "rloo, sums": (RLOOLoss(), ROLLOUT | {"old_logps": random(B, seed=15) - 20}),
    "regions": (GRPOLoss(trust_region="binary_kl", old_kl_coef=0.1, sampler_correction=TOKEN_LEVEL), SAMPLED),
    "gspo token": (GRPOLoss(importance_sampling_level="sequence_token", loss_type="grpo"), ROLLOUT),
    "gmpo": (GRPOLoss(loss_type="gmpo", epsilon=0.4, sampler_correction=OF_SEQUENCES), SAMPLED),
    "corrected, packed": (
        GRPOLoss(sampler_correction=OF_SEQUENCES, ref_advantage=0.3, loss_agg_mode="seq-mean-token-mean"),
        SAMPLED | TOKENS,
    ),
    "rloo, corrected": (RLOOLoss(sampler_correction=OF_SEQUENCES), SAMPLED),
    "reinforce, corrected": (REINFORCELoss(sampler_correction=OF_SEQUENCES), SAMPLED),
    "reinforce": (REINFORCELoss(), {"advantages": ROLLOUT["advantages"]}),
}
CASES = {
    "dpo": (DPOLoss(return_logps=True), REFERENCE),
    "dpo, packed": (DPOLoss(), SCORED),
    "dpo, packed, tokens": (DPOLoss(), TOKENS),
    "dpo, ipo": (DPOLoss(loss_type="ipo"), SCORED),
    "dpo, mixed": (DPOLoss(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3]), TOKENS),
    "dpo, ld_alpha": (DPOLoss(ld_alpha=0.4), REFERENCE | POSITIONS),
    "dpo, ld_alpha, all rows": (DPOLoss(ld_alpha=0.4, compact=False), REFERENCE | POSITIONS),
    "dpo, weighted": (DPOLoss(loss_type=["sigmoid", "sft"], use_weighting=True), SCORED),
    "dpo, sorted": (DPOLoss(loss_type="aot"), SCORED),
    "dpo, unreduced": (DPOLoss(reduction="none"), REFERENCE),
    "dpo, summed": (DPOLoss(reduction="sum", loss_type=["sigmoid", "sft"]), SCORED),
    "orpo": (ORPOLoss(), {}),
    "orpo, prompts": (ORPOLoss(logits_over="position"), PROMPTED),
    "orpo, all rows": (ORPOLoss(compact=False), PROMPTED),
    "cpo": (CPOLoss(), {}),
    "simpo": (SimPOLoss(), {}),
    "kto": (KTOLoss(), TASTES | TOKENS | {"kl": 0.3}),
    "kto, kl": (KTOLoss(), TASTES | SCORED | {"kl": KL | UNALIKE}),
    "kto, kl, reference": (
        KTOLoss(),
        TASTES | REFERENCE | {"kl": KL | {"ref_hidden": REFERENCE["ref_hidden"]}},
    ),
    "own": (Own(), POSITIONS),
    **POLICIES,
}
SEPARABLE = {
    "ce": (CrossEntropyLoss(z_loss=0.1), {}),
    "jsd": (
        JSDLoss(),
        {"teacher_hidden": REFERENCE["ref_hidden"], "teacher_weight": REFERENCE["ref_weight"]},
    ),
}
TRAINED = {"all": ("hidden", "weight", "bias"), "frozen head": ("hidden",), "nothing": ()}
CALLS = [
    (name, trained, SMALL if (number + turn) % 2 else LARGE)
    for number, name in enumerate(CASES)
    for turn, trained in enumerate(TRAINED)
    if trained == "all"
    or (trained == "frozen head" and (name not in POLICIES or turn == number % 2))
    or name in ("dpo", "own", "dapo", "gspo")
]
TARGETS = {
    "some": labels(),
    "none of the first": torch.where(torch.arange(T, device="cpu") < 3, -100, labels()),
}


def sliced(inputs: dict, slices: Slices | None, rank: int) -> dict:
    """What a rank holds of a call's inputs; all of them without `slices`."""
    actual = {}
    for name, x in inputs.items():
        if isinstance(x, dict):
            actual[name] = sliced(x, slices, rank)
        else:
            cut = slices is not None and name in SLICED and (name != "old_logps" or x.dim() > 1)
            actual[name.removeprefix("token_")] = x[:, list(slices[rank])] if cut else x
    return actual


def run(loss, inputs: dict, trained: str, *, packed: bool = False) -> dict[str, Tensor]:
    inputs = dict(inputs)
    leaves = {name: inputs.pop(name).clone().requires_grad_(name in TRAINED[trained]) for name in HEAD}
    hidden, targets = leaves["hidden"], inputs.pop("targets")
    shape = targets.shape
    if loss.cp_group is None and not isinstance(loss, Own):
        inputs.pop("position_ids", None)
    if packed:
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        inputs = {name: x.flatten() if x.shape == shape else x for name, x in inputs.items()}
        inputs["cu_seqlens"] = torch.arange(B + 1) * shape[1]
    out = loss(hidden, leaves["weight"], targets, bias=leaves["bias"], **inputs)
    actual = {"loss": out.loss.detach()} | {f"metric {name}": x for name, x in out.metrics.items()}
    actual |= {f"token {name}": x for name, x in out.tokens.items()}
    if TRAINED[trained]:
        weights = to_rank_device(random(*out.loss.shape, seed=20)) if out.loss.dim() else 1.7
        weights = out.loss.detach().cos() if out.loss.shape == shape else weights  # whatever the slice
        gradients = torch.autograd.grad(
            (weights * out.loss).sum(), [leaves[name] for name in TRAINED[trained]]
        )
        actual |= {f"d_{name}": x for name, x in zip(TRAINED[trained], gradients, strict=True)}
    return actual


def attempts():
    """(what is called, with which targets)"""
    for call in CALLS:
        yield call, "some"
    for name in ("dpo", "dpo, ld_alpha", "orpo, prompts", "kto"):
        yield (name, "all", SMALL), "none of the first"


def call_of(name: str, which: str, slices: Slices | None = None, rank: int = 0) -> tuple[object, dict]:
    loss, inputs = CASES.get(name) or SEPARABLE[name]
    return loss, to_rank_device(sliced(HEAD | {"targets": TARGETS[which]} | inputs, slices, rank))


@uncompiled()
def everything() -> dict:
    """What a rank finds."""
    warnings.simplefilter("ignore", BudgetWarning)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, actual = init_device_mesh(device_type(), (ranks,), mesh_dim_names=("cp",)), {}
    for layout, slices in SLICES[ranks].items():
        for (name, trained, budget), which in attempts():
            loss, inputs = call_of(name, which, slices, rank)
            loss = replace(loss, cp_group=dist.group.WORLD, logits_budget=budget)
            actual[layout, name, trained, which] = run(loss, inputs, trained, packed="packed" in name)
        for name in SEPARABLE:
            loss, inputs = call_of(name, "some", slices, rank)
            actual[layout, name] = run(
                loss, inputs | {"num_items": global_num_items(inputs["targets"])}, "all"
            )

    # Other names of the group; a head whose gradient is averaged.
    loss, inputs = call_of("dpo", "some", SLICES[ranks]["uneven"], rank)
    actual["mesh"] = run(replace(loss, cp_group=mesh), inputs, "all")
    inputs["weight"] = distribute_tensor(inputs["weight"], mesh, [Shard(0)])
    weight = inputs["weight"].requires_grad_()
    out = replace(loss, cp_group="cp")(
        inputs.pop("hidden"), inputs.pop("weight"), inputs.pop("targets"), **inputs
    )
    (1.7 * ranks * out.loss).backward()
    actual["averaged"] = {"loss": out.loss.detach(), "d_weight": weight.grad.full_tensor()}

    actual["unreduced"] = [
        unreduced(loss, SLICES[ranks]["uneven"], rank, dist.group.WORLD) for loss in (OwnLogits, OwnTokens)
    ]
    actual["errors"] = errors(rank)
    actual["main"] = added(rank, SLICES[ranks]["uneven"])

    if ranks == 4:  # with a head in two shards
        grid = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("cp", "tp"))
        loss, inputs = call_of("dpo", "some", HALVES, grid.get_local_rank("cp"))
        rows = {
            name: inputs[name].split((13, 10))[grid.get_local_rank("tp")]
            for name in ("weight", "bias", "ref_weight")
        }
        actual["grid"] = run(
            replace(loss, cp_group=grid["cp"], tp_group=grid["tp"], logits_budget=SMALL), inputs | rows, "all"
        )
    return actual


def unreduced(loss, slices: Slices | None, rank: int, group=None) -> tuple[Tensor, dict[str, Tensor]]:
    """Values and metrics, with targets on the last ranks alone."""
    tensors = to_rank_device(sliced(HEAD | {"targets": TARGETS["none of the first"]}, slices, rank))
    out = loss(reduction="none", cp_group=group)(*(tensors[name] for name in ("hidden", "weight", "targets")))
    return out.loss.detach().sum(), out.metrics


def added(rank: int, slices: Slices) -> list:
    """Two steps without targets, one with targets on the last ranks alone, and an upstream gradient of 0.5:
    whether d_hidden and the main gradient are 0, or the error."""
    actual = []
    for nothing, compact in ((True, True), (True, False), (False, True)):
        loss, inputs = call_of("dpo", "none of the first", slices, rank)
        if nothing:
            inputs["targets"] = torch.full_like(inputs["targets"], -100)
        main = torch.zeros_like(inputs["weight"])
        hidden, weight = (inputs.pop(name).clone().requires_grad_() for name in ("hidden", "weight"))
        loss = replace(loss, cp_group=dist.group.WORLD, compact=compact)
        try:
            out = loss(hidden, weight, inputs.pop("targets"), accumulate_into=main, **inputs)
            (out.loss * 0.5).backward()
            actual.append((not hidden.grad.any(), not main.any()))
        except ValueError as error:
            actual.append(str(error))
    return actual


LOCAL = "position_ids: expected each token's position in its whole sequence"
# A call, its wrong inputs on a rank with `length` tokens of each sequence, and the error of every rank.
BAD = {
    "no positions": ("own", lambda rank, length: {"position_ids": None}, LOCAL),
    "local positions": (
        "dpo, ld_alpha",
        lambda rank, length: {"position_ids": torch.arange(length).expand(B, -1)},
        LOCAL + ".*got duplicate positions; pass positions in the whole sequence",
    ),
    "target": (
        "dapo",
        lambda rank, length: {"targets": labels()[:, :length] + V * (rank == 1)},
        r"targets: expected ids in \[0, 23\).*, got \d+ outside on rank 1[;:] ",
    ),
    # Over NCCL it asserts on the device, after which the process has no GPU any more.
    "target, all rows": (
        "dpo",
        lambda rank, length: {"targets": labels()[:, :length] + V * (rank == 1)},
        r"targets: expected ids in \[0, 23\)",
    ),
    "mask": (
        "dapo",
        lambda rank, length: {"mask": torch.full((B, length), -1e4 if rank == 1 else 1.0)},
        r"(mask: expected .* negative numbers|targets: expected ids .* on rank 1; .* a mask of 0 and 1 if)",
    ),
    # On four ranks one with a token of each sequence takes them for its tokens'.
    "column": (
        "dapo",
        lambda rank, length: {"advantages": ROLLOUT["advantages"][:, None]},
        "advantages: expected targets' shape",
    ),
}


def errors(rank: int) -> dict[str, str]:
    """What is said on a rank."""
    slices, actual = SLICES[dist.get_world_size()]["uneven"], {}
    for what, (name, wrong, _) in BAD.items():
        if is_possible(what, len(slices)):
            loss, inputs = call_of(name, "some", slices, rank)
            inputs |= to_rank_device(wrong(rank, len(slices[rank])))
            try:
                run(replace(loss, cp_group=dist.group.WORLD, compact="all rows" not in what), inputs, "all")
            except (ValueError, RuntimeError) as error:
                actual[what] = str(error)
    return actual


def is_possible(what: str, ranks: int) -> bool:
    if what == "target, all rows":
        return torch.cuda.device_count() < ranks
    return what != "column" or ranks == 2


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.repeats)], ids="{} ranks".format)
def ranks(request):
    """What each rank found."""
    return on_devices(request.param, everything)


def per_token(name: str, x: Tensor) -> bool:
    return name == "d_hidden" or name.startswith("token ") or (name == "loss" and x.shape == (B, T))


def assert_equal(
    actual: list[dict[str, Tensor]], truth: dict[str, Tensor], what: str, slices: Slices | None = None
) -> None:
    for name, x in truth.items():
        parts = [rank[name] for rank in actual]
        if per_token(name, x):
            order = torch.tensor([token for part in slices for token in part], device="cpu").argsort()
            parts = [torch.cat([part.view(B, -1, *x.shape[2:]) for part in parts], 1)[:, order]]
        elif name in ("d_weight", "d_bias"):
            parts = [sum(parts)]
        assert all(torch.equal(parts[0], part) for part in parts), f"{what}: {name}"
        torch.testing.assert_close(
            parts[0], x, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{what}: {name}: {m}"
        )
        assert not name.startswith("d_") or x.norm() > 0


@pytest.mark.parametrize(
    ("call", "which"), list(attempts()), ids=lambda x: ", ".join(map(str, x)) if isinstance(x, tuple) else x
)
def test_equals_whole_sequences(ranks, call, which):
    name, trained, _ = call
    truth = run(*call_of(name, which), trained)
    for layout, slices in SLICES[len(ranks)].items():
        assert_equal([rank[layout, name, trained, which] for rank in ranks], truth, layout, slices)


def test_metrics_of_unreduced_losses(ranks):
    """All ranks take part in the sums of the metrics, also one without a target."""
    for number, loss in enumerate((OwnLogits, OwnTokens)):
        total, metrics = unreduced(loss, None, 0)
        actual = [rank["unreduced"][number] for rank in ranks]
        torch.testing.assert_close(sum(x for x, _ in actual), total)
        for _, own in actual:
            torch.testing.assert_close(own, metrics)


def test_a_main_gradient_takes_any_loss_without_targets(ranks):
    """On all ranks; with targets on any of them, every rank refuses the loss."""
    for rank in ranks:
        *nothing, some = rank["main"]
        assert nothing == [(True, True)] * 2
        assert "expected an upstream gradient of 1 with accumulate_into, got 0.5" in some


@pytest.mark.parametrize("name", SEPARABLE)
@uncompiled()
def test_tokens_that_stand_alone_need_the_normalizer_only(ranks, name):
    truth = run(*call_of(name, "some"), "all")
    for layout, slices in SLICES[len(ranks)].items():
        actual = [rank[layout, name] for rank in ranks]
        loss = torch.stack([rank["loss"] for rank in actual]).mean()
        torch.testing.assert_close(loss, truth["loss"])
        averaged = [
            {key: x / len(ranks) for key, x in rank.items() if key.startswith("d_")} for rank in actual
        ]
        assert_equal(averaged, {key: x for key, x in truth.items() if key.startswith("d_")}, layout, slices)


def test_the_group_by_mesh_and_an_averaged_head(ranks):
    truth = run(*call_of("dpo", "some"), "all")
    assert_equal([rank["mesh"] for rank in ranks], truth, "mesh", SLICES[len(ranks)]["uneven"])
    for rank in ranks:
        for name, x in rank["averaged"].items():
            torch.testing.assert_close(x, truth[name], rtol=1e-9, atol=1e-11)


def test_beside_a_sharded_head(ranks):
    if len(ranks) < 4:
        pytest.skip("needs four ranks: two slices of two shards")
    truth = run(*call_of("dpo", "some"), "all")
    for name, x in truth.items():
        actual = [rank["grid"][name] for rank in ranks]  # slices by shards
        if name == "d_hidden" or name.startswith("token "):
            actual = [torch.cat(actual[shard::2], 1) for shard in (0, 1)]
        elif name in ("d_weight", "d_bias"):
            actual = [torch.cat((actual[0] + actual[2], actual[1] + actual[3]))]
        for ours in actual:
            torch.testing.assert_close(
                ours, x, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("make", [CrossEntropyLoss, JSDLoss, MultiTokenLoss], ids=lambda make: make.__name__)
def test_other_losses_refuse(make):
    with pytest.raises(
        ValueError,
        match=f"cp_group: expected None for {make.__name__}, got .*; for a per-token loss, pass num_",
    ):
        make(cp_group="cp")


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_on_every_rank(ranks, what):
    for rank in ranks:
        if is_possible(what, len(ranks)):
            assert re.match(BAD[what][2], rank["errors"][what], re.DOTALL), rank["errors"][what]


def test_bad_input(monkeypatch):
    inputs = [torch.zeros(2, 3, H), torch.zeros(V, H), torch.zeros(2, 3, dtype=torch.long)]
    with pytest.raises(
        ValueError, match="shift: expected False with cp_group, got True; shift whole sequences"
    ):
        ORPOLoss(cp_group="cp")(*inputs, shift=True)
    with pytest.raises(ValueError, match="shift: expected False with cp_group, got True"):
        GRPOLoss(cp_group="cp")(*inputs, advantages=torch.zeros(2), shift=True)
    with pytest.raises(ValueError, match="cp_group: expected a dimension of weight's device mesh"):
        ORPOLoss(cp_group="cp")(*inputs)
    with pytest.raises(TypeError, match="cp_group: expected a ProcessGroup"):
        ORPOLoss(cp_group=7)(*inputs)
    # Without ranks: the group's name is taken as it is.
    monkeypatch.setattr(LinearLoss, "resolved", lambda loss, weight: loss)
    with pytest.raises(
        ValueError, match="position_ids: expected each token's position .*, got None; pass position"
    ):
        DPOLoss(cp_group="cp", ld_alpha=0.5)(*inputs)
    with pytest.raises(ValueError, match="position_ids: expected None unless cp_group and ld_alpha are"):
        DPOLoss(cp_group="cp")(*inputs, position_ids=inputs[2])
