"""Policy losses with a sampling mask, against the same losses of full logits with -inf outside the sets."""

import runpy
from pathlib import Path

import pytest
import torch

from logitless import (
    CrossEntropyLoss,
    DistillationLoss,
    GRPOLoss,
    PPOLoss,
    REINFORCELoss,
    RLOOLoss,
    SamplingMask,
    check,
    estimate,
    linear_logprobs,
    linear_topk,
)
from tests.cases import covering_array, one_row_warning, operands
from tests.losses.test_policy import VARIANTS
from tests.losses.test_sampling_mask import sets_for, statistics
from tests.ranks import in_processes
from tests.reference import policy
from tests.reference import sampling as reference
from tests.support import DEVICE, AllocationWatcher, assert_close, assert_metrics_close

B, T, H, V = 5, 8, 12, 200
# Sets that are gathered or certain, and with "mixed" also the whole vocabulary and sets that are projected.
KINDS = {"small": (1, 1, 2, 3, 8), "mixed": (0, 1, 2, 5, 70)}

REFERENCES = {
    GRPOLoss: policy.grpo,
    PPOLoss: policy.ppo,
    RLOOLoss: policy.rloo,
    REINFORCELoss: policy.reinforce,
}


class Case:
    """A padded batch in fp64, its sets, and its loss on full logits."""

    def __init__(self, kind: str, settings: dict, sizes: str, *, seed: int = 0):
        generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.hidden, self.weight, self.bias = random(B, T, H), random(V, H) * 0.7, random(V)
        self.targets = torch.randint(V, (B, T), generator=generator)
        self.targets[:, ::4] = -100
        self.sets = sets_for(self.targets, KINDS[sizes], V, seed)
        self.mask = SamplingMask.from_lists(self.sets)
        self.kept = reference.kept(self.sets, V).view(B, T, V)
        self.kind, self.settings = kind, settings
        self.certain = torch.tensor([len(set(ids)) == 1 for ids in self.sets]).view(B, T)
        self.inputs = {"advantages": random(B, T) if kind is PPOLoss else random(B)}
        if kind is not REINFORCELoss or settings:
            noise = 0.3 * random(B, T).masked_fill(self.certain, 0.0)
            self.inputs["old_logps"] = self.statistics(self.hidden, self.weight)[0] + noise
        self.other = {"ref_hidden": random(B, T, 6), "ref_weight": random(V, 6)}
        if settings.get("off_policy_mask_threshold") is not None or settings.get("sampler_correction"):
            self.inputs["sampling_logps"] = self.inputs["old_logps"] + noise

    def statistics(self, hidden, weight, bias=None):
        return statistics(hidden, weight, self.targets, self.sets, bias)

    def on_full_logits(self, hidden, weight, bias, monkeypatch, **options):
        """(loss, metrics, log-probabilities) by `tests.reference.policy`, with its softmax over the sets."""

        def over_sets(hidden, weight, targets, **head):
            return statistics(hidden, weight, targets, self.sets, bias)

        monkeypatch.setattr(policy, "token_logprobs", over_sets)
        given = self.inputs | self.settings | options
        if self.settings.get("beta"):
            given["ref_logps"] = self.statistics(self.other["ref_hidden"], self.other["ref_weight"])[0]
        return REFERENCES[self.kind](hidden, weight, self.targets, **given)

    @property
    def reference(self):
        return self.other if self.settings.get("beta") else {}


def leaves(case, requires=("hidden", "weight", "bias"), dtype=torch.float64):
    tensors = (getattr(case, name).to(dtype) for name in ("hidden", "weight", "bias"))
    names = ("hidden", "weight", "bias")
    return [x.clone().requires_grad_(name in requires) for name, x in zip(names, tensors)]


FACTORS = {
    "name": list(VARIANTS),
    "sizes": list(KINDS),
    "requires": [("hidden", "weight", "bias"), ("hidden",)],
    "compact": [True, False],
    "budget": [None, 10 * V * 8],
    "reduction": ["mean", "none", "sum"],
    "dtype": [torch.float64, torch.float32],
}


def has_effect(case: dict) -> bool:
    # A term over the tokens beside one over the sequences has no values without reduction.
    return case.get("reduction") != "none" or case.get("name") not in ("entropy", "top entropy")


@one_row_warning
@pytest.mark.parametrize("chosen", covering_array(FACTORS, has_effect, repeats=True))
def test_pairs_of_options(chosen, monkeypatch):
    kind, settings = VARIANTS[chosen["name"]]
    case, requires, dtype = Case(kind, settings, chosen["sizes"]), chosen["requires"], chosen["dtype"]
    error = 1e-12 if dtype == torch.float64 else 1e-5
    ours, exact = leaves(case, requires, dtype), leaves(case, requires)
    options = {"reduction": chosen["reduction"], "compact": chosen["compact"]}
    loss = kind(**settings, **options, logits_budget=chosen["budget"])
    given = {name: x.to(dtype) for name, x in (case.inputs | case.reference).items()}
    out = loss(*ours[:2], case.targets, bias=ours[2], sampling_mask=case.mask, **given)
    value, metrics, _ = case.on_full_logits(*exact, monkeypatch, reduction=chosen["reduction"])
    upstream = torch.linspace(2, 3, value.numel(), dtype=torch.float64).view_as(value)
    out.loss.backward(upstream.to(dtype))
    value.backward(upstream)
    assert_close(out.loss.detach(), value.detach(), error, name="loss")
    assert_metrics_close(out.metrics, metrics, max(error, 1e-11))
    for name, a, b in zip(("hidden", "weight", "bias"), ours, exact):
        if name in requires:
            assert_close(a.grad, b.grad, error, name=f"d_{name}")
    if chosen["compact"]:  # otherwise the host does not know
        assert out.plan.replayed and out.plan.certain and "replayed: " in out.plan.describe()
        assert (out.plan.products == 0) == (chosen["sizes"] == "small")


@pytest.mark.parametrize("name", ["dapo token", "dapo sequence"])
def test_log_probabilities_are_handed_out(name, monkeypatch):
    case = Case(*VARIANTS[name], "mixed")
    hidden, weight, bias = leaves(case)
    loss = case.kind(**case.settings, return_logps=True)
    out = loss(hidden, weight, case.targets, bias=bias, sampling_mask=case.mask, **case.inputs)
    logps, entropy, lse = case.statistics(case.hidden, case.weight, case.bias)
    for name, exact in (("logps", logps), ("entropy", entropy), ("lse", lse)):
        assert_close(out.tokens[name], exact, 1e-12, name=name)
    # Of a loss of log-probabilities alone, d_logps gives all gradients.
    exact = leaves(case)
    again = case.statistics(*exact)[0]
    again.backward(out.tokens["d_logps"])
    out.loss.backward()
    assert_close(hidden.grad, exact[0].grad, 1e-12, name="d_hidden")


def test_into_a_main_gradient(monkeypatch):
    case = Case(*VARIANTS["kl"], "mixed")
    hidden, weight, bias = leaves(case, dtype=torch.float32)
    main, exact = torch.ones(V, H), leaves(case)
    inputs = {name: x.float() for name, x in (case.inputs | case.reference).items()}
    given = {"sampling_mask": case.mask, "accumulate_into": main, "bias": bias}
    out = case.kind(**case.settings)(hidden, weight, case.targets, **given, **inputs)
    out.loss.backward()
    case.on_full_logits(*exact, monkeypatch)[0].backward()
    assert weight.grad is None
    assert_close(main - 1, exact[1].grad, 1e-4, name="d_weight")
    assert_close(hidden.grad, exact[0].grad, 1e-5, name="d_hidden")


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("upstream", [torch.inf, torch.nan])
def test_ignored_tokens_get_0_whatever_the_upstream_gradient_is(compact, upstream):
    case = Case(*VARIANTS["dapo token"], "mixed")
    hidden, weight, bias = leaves(case, dtype=torch.float32)
    ignored = case.targets == -100
    inputs = {name: x.float() for name, x in case.inputs.items()}
    loss = case.kind(**case.settings, compact=compact)
    out = loss(hidden, weight, case.targets, bias=bias, sampling_mask=case.mask, **inputs)
    (out.loss * upstream).backward()
    assert ignored.any() and not hidden.grad[ignored].any()
    assert not hidden.grad[~ignored].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["dapo token", "grpo sequence", "kl"])
def test_shift(name, packed):
    """Unshifted labels, sets and inputs per token, against what they are shifted."""
    case = Case(*VARIANTS[name], "mixed")
    case.targets[:, -1] = -100
    aligned = [[] if label == -100 else ids for ids, label in zip(case.sets, case.targets.view(-1).tolist())]
    unshifted = [[9, 9] if n % T == 0 else aligned[n - 1] for n in range(B * T)]

    def outcome(shift: bool):
        def laid(x):
            """Per token beside the label that the token is, and flat if packed."""
            if x.shape[:2] != (B, T):
                return x
            x = x.roll(1, 1) if shift and x.dim() == 2 else x
            return x.flatten(0, 1) if packed else x

        hidden, weight, _ = leaves(case)
        given = {name: laid(x) for name, x in (case.inputs | case.reference).items()}
        if packed:
            given["cu_seqlens"] = torch.arange(0, B * T + 1, T)
        mask = SamplingMask.from_lists(unshifted if shift else aligned)
        loss = case.kind(**case.settings)
        out = loss(laid(hidden), weight, laid(case.targets), shift=shift, sampling_mask=mask, **given)
        out.loss.backward()
        return out.loss.detach(), hidden.grad, weight.grad, *out.metrics.values()

    for a, b in zip(outcome(True), outcome(False)):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_repeated_rows_are_summed_alike_whatever_the_budget():
    """One id in a fifth of all sets, as text has them: the same bits in every run and with every budget."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    N, width = 400, 500
    hidden, weight = torch.randn(1, N, H, generator=generator), torch.randn(width, H, generator=generator)
    targets = torch.randint(3, 20, (1, N), generator=generator)
    sets = [[int(x), *([1] if n % 5 == 0 else []), 2 + n % 7 + 20] for n, x in enumerate(targets[0])]
    actual = []
    for budget in (None, 2**30, 40 * width, None):
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        loss = GRPOLoss(logits_budget=budget)
        loss(
            h, w, targets, advantages=torch.ones(1), sampling_mask=SamplingMask.from_lists(sets)
        ).loss.backward()
        actual.append((h.grad, w.grad))
    for h, w in actual[1:]:
        assert torch.equal(h, actual[0][0]) and torch.equal(w, actual[0][1])


def logprobs(hidden, weight, targets, mask):
    return linear_logprobs(
        hidden, weight, targets, entropy="metric", sampling_mask=mask, logits_budget=2**30
    ).logps.sum()


def policy_loss(hidden, weight, targets, mask):
    given = {"advantages": torch.ones(2), "sampling_mask": mask}
    return GRPOLoss(logits_budget=2**30)(hidden, weight, targets, **given).loss


@pytest.mark.parametrize("loss", [logprobs, policy_loss])
@pytest.mark.parametrize(("gathered", "most"), [("all", 0.05), ("half", 0.6)])
def test_nothing_of_the_size_of_all_logits(loss, gathered, most):
    N, width = 256, 4000
    hidden, weight, targets, _ = operands((2, N // 2), 16, width, torch.float32)
    sets = sets_for(targets, (1, 1, 2, 8, 30), width)
    if gathered == "half":
        sets = [ids if n % 2 else [] for n, ids in enumerate(sets)]
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with AllocationWatcher() as watch:
        loss(hidden, weight, targets, SamplingMask.from_lists(sets)).backward()
    # The gradient of the head is one of the results.
    assert watch.largest <= max(most * N * width * 4, weight.nbytes)


# Errors.


@pytest.mark.parametrize("name", ["old_logps", "sampling_logps"])
@pytest.mark.parametrize("compact", [True, False])
def test_raw_log_probabilities_beside_sets(name, compact):
    if not compact and DEVICE.type == "cuda":
        pytest.skip("a device-side assertion ends the process's use of the GPU")
    case = Case(GRPOLoss, {}, "small")
    raw = case.inputs["old_logps"].clone()
    row = (case.certain & (case.targets >= 0)).view(-1).nonzero()[1].item()
    raw.view(-1)[row] = -0.02
    given = case.inputs | {name: raw}
    message = rf"{name}: expected log-probabilities over the sampling mask, so 0 for tokens with one kept id"
    more = (
        rf", got 1 below -0.001, the first, -0.02, at row {row}; ask the server for them .*processed_logprobs"
    )
    error, more = (ValueError, more) if compact else (RuntimeError, "")
    with pytest.raises(error, match=message + more):
        GRPOLoss(compact=compact)(case.hidden, case.weight, case.targets, sampling_mask=case.mask, **given)
    raw.view(-1)[row] = -0.0005
    GRPOLoss()(case.hidden, case.weight, case.targets, sampling_mask=case.mask, **given)


def test_losses_without_a_sampler_refuse_it():
    h, w, targets = torch.randn(2, 3, 4), torch.randn(9, 4), torch.zeros(2, 3, dtype=torch.int64)
    mask = SamplingMask.from_lists([[0]] * 6)
    teacher = {"teacher_hidden": h, "teacher_weight": w}
    for call in (
        lambda: CrossEntropyLoss()(h, w, targets, sampling_mask=mask),
        lambda: DistillationLoss()(h, w, targets, sampling_mask=mask, **teacher),
        lambda: linear_topk(h, w, 2, sampling_mask=mask),
    ):
        with pytest.raises(TypeError, match="sampling_mask"):
            call()
    with pytest.raises(TypeError, match="sampling_mask: expected a SamplingMask, got Tensor"):
        REINFORCELoss()(h, w, targets, advantages=torch.ones(2), sampling_mask=torch.zeros(6, 2))
    with pytest.raises(ValueError, match="return_predictions: expected False with sampling_mask"):
        GRPOLoss(return_predictions=True)(h, w, targets, advantages=torch.ones(2), sampling_mask=mask)

    class OfAllLogits(GRPOLoss):
        observes = (*GRPOLoss.observes, "sum_logits")

    with pytest.raises(ValueError, match="sampling_mask: expected a loss of logps, .*, got one of sum_"):
        OfAllLogits()(h, w, targets, advantages=torch.ones(2), sampling_mask=mask)


# Ranks: two shards of the vocabulary, of unequal size, and slices of sequences.

SHARDS = (130, 70)


def shares(rank: int, name: str, over: str) -> tuple:
    """What a rank has of a loss, of its gradients, and of `linear_logprobs`."""
    import torch.distributed as dist

    case = Case(*VARIANTS[name], "mixed")
    group = dist.group.WORLD if dist.is_initialized() else None
    hidden, weight, bias = leaves(case)
    other, inputs, mask = dict(case.reference), dict(case.inputs), case.mask
    options, targets = {}, case.targets
    if over == "vocabulary":
        options = {"tp_group": group}
        weight, bias = (x.detach().split(SHARDS)[rank].clone().requires_grad_() for x in (weight, bias))
        if other:
            other["ref_weight"] = other["ref_weight"].split(SHARDS)[rank]
    elif over == "sequences":
        options = {"cp_group": group}
        tokens = slice(0, 3) if rank == 0 else slice(3, T)
        hidden = hidden.detach()[:, tokens].clone().requires_grad_()
        targets = targets[:, tokens]
        other |= {"ref_hidden": other["ref_hidden"][:, tokens]} if other else {}
        inputs = {k: x[:, tokens] if x.shape == (B, T) else x for k, x in inputs.items()}
        table = [case.sets[b * T + t] for b in range(B) for t in range(T)[tokens]]
        mask = SamplingMask.from_lists(table)
    loss = case.kind(**case.settings, **options)
    out = loss(hidden, weight, targets, bias=bias, sampling_mask=mask, **inputs, **other)
    out.loss.backward()
    actual = [out.loss.detach(), *out.metrics.values(), hidden.grad, weight.grad, bias.grad]
    if over != "sequences":
        numbers = linear_logprobs(
            hidden.detach(),
            weight.detach(),
            targets,
            bias=bias.detach(),
            entropy=True,
            sampling_mask=mask,
            **options,
        )
        actual += list(numbers)
    return actual


def whole(name: str) -> list:
    """The same of one process, on the CPU as the ranks are."""
    with torch.device("cpu"):
        return shares(0, name, "one process")


def on_a_rank(name: str, over: str) -> list:
    import torch.distributed as dist

    return shares(dist.get_rank(), name, over)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["dapo token", "kl", "grpo sequence"])
def test_two_shards_of_the_vocabulary(name):
    truth, ranks = whole(name), in_processes(2, on_a_rank, name, "vocabulary")
    *first, d_hidden, d_weight, d_bias, logps, entropy, lse = truth
    for rank, actual in enumerate(ranks):
        *mine, h, w, b, p, e, z = actual
        for a, exact in zip((*mine, h, p, e, z), (*first, d_hidden, logps, entropy, lse)):
            assert torch.allclose(a, exact, rtol=1e-11, atol=1e-13)
        assert torch.allclose(w, d_weight.split(SHARDS)[rank], rtol=1e-11, atol=1e-13)
        assert torch.allclose(b, d_bias.split(SHARDS)[rank], rtol=1e-11, atol=1e-13)
    # The logits of gathered ids cross the group as one number and zeros: every rank has the same bits.
    assert all(torch.equal(a, b) for a, b in zip(ranks[0][-3:], ranks[1][-3:]))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["dapo token", "kl", "grpo sequence", "top entropy"])
def test_two_slices_of_the_sequences(name):
    truth, ranks = whole(name), in_processes(2, on_a_rank, name, "sequences")
    *first, d_hidden, d_weight, d_bias, _, _, _ = truth
    for mine in ranks:
        for a, exact in zip(mine[:-3], first):
            assert torch.allclose(a, exact, rtol=1e-11, atol=1e-13)
    assert torch.allclose(torch.cat([x[-3] for x in ranks], 1), d_hidden, rtol=1e-11, atol=1e-13)
    assert torch.allclose(sum(x[-2] for x in ranks), d_weight, rtol=1e-11, atol=1e-13)
    assert torch.allclose(sum(x[-1] for x in ranks), d_bias, rtol=1e-11, atol=1e-13)


# The generator's rounding.


@pytest.mark.parametrize("rounded", [True, False])
def test_every_path_rounds_alike(rounded):
    """Logits that bf16 cannot hold, of sums that fp32 holds exactly: projected, picked and gathered."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randint(-8, 9, (60, H), generator=generator).bfloat16()
    weight = torch.randint(-8, 9, (V, H), generator=generator).bfloat16()
    targets = torch.randint(V, (60,), generator=generator)
    sets = sets_for(targets, (0, 1, 3, 80), V)
    dtype = torch.bfloat16 if rounded else torch.float32
    mask = SamplingMask.from_lists(sets)
    actual = linear_logprobs(
        hidden, weight, targets, entropy=True, sampling_mask=mask, logits_dtype=dtype, temperature=8.0
    )
    z = hidden.double() @ weight.double().t()
    assert (z != z.bfloat16()).any()
    z = (z.to(dtype).double()) / 8
    truth = reference.statistics(z, reference.kept(sets, V), targets)
    for name, ours, exact in zip(actual._fields, actual, truth):
        assert_close(ours, exact, 2e-7, name=name)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_a_plan_names_the_rule(dtype):
    hidden, weight = torch.randn(1, 3, 4).bfloat16(), torch.randn(9, 4).bfloat16()
    targets, given = torch.zeros(1, 3, dtype=torch.int64), {"advantages": torch.ones(1)}
    mask = SamplingMask.from_lists([[0, 1], [0], []])
    plan = GRPOLoss(logits_dtype=dtype)(hidden, weight, targets, sampling_mask=mask, **given).plan
    name = str(dtype or torch.bfloat16).removeprefix("torch.")
    assert plan.logits == name and plan.describe().endswith(f"logits in {name}")
    assert plan.describe().startswith(
        "replayed: 2 of 3 tokens over 3 ids, 1 certain, 67% of the tokens not projected; loss_only: "
    )
    assert (plan.replayed, plan.certain, plan.kept_ids) == (2, 1, 3)
    plain = GRPOLoss(logits_dtype=dtype)(hidden, weight, targets, **given).plan
    assert plain.logits == name and plain.replayed is plain.certain is plain.kept_ids is None


# Tools.


@pytest.mark.parametrize("name", ["dapo token", "kl", "grpo sequence", "reinforce"])
@pytest.mark.parametrize("sizes", KINDS)
def test_check(name, sizes):
    case = Case(*VARIANTS[name], sizes)
    tensors = {name: x.float() for name, x in (case.inputs | case.reference).items()}
    hidden, weight, _ = leaves(case, dtype=torch.float32)
    report = check(
        case.kind(**case.settings), hidden, weight, case.targets, sampling_mask=case.mask, **tensors
    )
    assert report, str(report)


def test_an_estimate_says_which_tokens_are_gathered():
    mask = SamplingMask.from_lists([[1, 2], [3], [], [4, 5, 6]] * 8)
    sizes = {"tokens": 32, "hidden_size": 16, "vocab_size": 200, "sequences": 4, "dtype": torch.float32}
    actual = estimate(GRPOLoss(), sampling_mask=mask, **sizes)
    assert actual.products == pytest.approx(0.75)
    assert str(actual).startswith("replayed: 24 of 32 tokens over 48 ids, 8 certain, 75% of the tokens not")
    assert estimate(linear_logprobs, sampling_mask=mask, **sizes).products == pytest.approx(1.0)


def test_the_demo_shows_ratios_of_one():
    script = Path(__file__).parents[2] / "examples" / "replay.py"
    with torch.device("cpu"):
        ratios = runpy.run_path(str(script))["main"]()
    assert abs(ratios["with replay"].mean() - 1) < 0.01 and ratios["without replay"].mean() < 0.9
    assert ((ratios["without replay"] - 1).abs() > 0.1).float().mean() > 0.5
