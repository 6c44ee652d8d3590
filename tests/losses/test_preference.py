"""Preference losses: what they cost, extremes, and what they refuse. Their numbers are compared in
tests/reference_tests and tests/random."""

import math

import pytest
import torch
from torch import Tensor

from logitless import BudgetWarning, CPOLoss, DPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from logitless.engine import budget as engine_budget
from logitless.losses.dpo_types import DIVERGENCES, DPO_TYPES
from logitless.losses.kto import KTO_MARGINS
from logitless.losses.reference_free import CPO_LOSSES
from tests.support import DEVICE, AllocationWatcher, GemmCounter, relative_error, run

H, V, H_REF = 16, 300, 12
ROW = V * 8  # bytes of a row of fp64 logits
SCRATCH = 6 * 8 * 2**10  # of the twins beside them

VARIANTS = {
    **{f"dpo {name}": (DPOLoss, {"loss_type": name, "label_smoothing": 0.1}) for name in DPO_TYPES},
    **{f"dpo {name}": (DPOLoss, {"f_divergence_type": name}) for name in DIVERGENCES},
    "dpo weighted": (DPOLoss, {"use_weighting": True, "ld_alpha": 0.3}),
    "orpo": (ORPOLoss, {}),
    **{f"cpo {name}": (CPOLoss, {"loss_type": name}) for name in CPO_LOSSES},
    "alphapo": (CPOLoss, {"loss_type": "simpo", "alpha": 0.25}),
    "simpo": (SimPOLoss, {}),
    **{f"kto {name}": (KTOLoss, {"loss_type": name}) for name in KTO_MARGINS},
}


class Problem:
    """Six sequences of 15 tokens in fp64, prompts masked, one of them with nothing supervised."""

    def __init__(self, seed: int):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.random = lambda *shape: torch.randn(
            shape, generator=generator, dtype=torch.float64, device=DEVICE
        )
        self.hidden, self.weight, self.bias = self.random(6, 15, H), self.random(V, H) / 3, self.random(V)
        prompt = torch.rand(6, 15, generator=generator, device=DEVICE) < 0.3
        prompt[4] = True
        ids = torch.randint(0, V, (6, 15), generator=generator, device=DEVICE)
        self.targets = ids.masked_fill(prompt, -100)

    def inputs(self, kind: type) -> dict[str, Tensor]:
        if kind is DPOLoss:
            return {"ref_logps": self.random(6) - 50}
        if kind is KTOLoss:
            labels = torch.tensor([True, False, True, True, False, False], device=DEVICE)
            return {"ref_logps": self.random(6) - 50, "labels": labels, "kl": 0.4}
        return {}


# -- cost


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(
    "trainable, rows, given, products",
    [
        (True, 200, None, 3),
        (True, 3, None, 4),
        (False, 3, None, 2),
        (True, 200, "hidden", 4),
        (False, 3, "hidden", 3),
    ],
)
def test_products(trainable, rows, given, products):
    """3 products where pairs fit the budget, 2 with a frozen head; one more for a reference that is
    walked."""
    problem = Problem(7)
    inputs = problem.inputs(DPOLoss)
    if given:
        inputs = {"ref_hidden": problem.random(6, 15, H), "ref_weight": problem.random(V, H)}
    targets = problem.targets.clamp(min=0)
    loss = DPOLoss(logits_budget=SCRATCH + rows * ROW)
    weight = problem.weight.requires_grad_(trainable)
    with GemmCounter(90, V, H) as counter:
        loss(problem.hidden.requires_grad_(), weight, targets, **inputs).loss.backward()
    assert counter.gemms == pytest.approx(products, abs=0.02)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen head"])
@pytest.mark.parametrize("T", [16, 128, 1024])
def test_one_pair_of_any_length_keeps_the_budget(T, trainable):
    hidden, weight = (
        torch.randn(2, T, H, device=DEVICE),
        torch.randn(V, H, device=DEVICE).requires_grad_(trainable),
    )
    ref_hidden, ref_weight = torch.randn(2, T, H, device=DEVICE), torch.randn(V, H, device=DEVICE)
    targets = torch.randint(0, V, (2, T), device=DEVICE)
    budget, hidden = 160 * 2**10, hidden.requires_grad_()
    watch = AllocationWatcher()
    with watch:
        out = DPOLoss(logits_budget=budget)(
            hidden, weight, targets, ref_hidden=ref_hidden, ref_weight=ref_weight
        )
        out.loss.backward()
    gradients = hidden.nbytes + 2 * V * H * 4
    per_token = 64 * 4 * 2 * T
    assert watch.peak <= budget * 1.02 + gradients + 2 * hidden.nbytes + per_token, out.plan.describe()


# -- extremes


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("what", ["nothing supervised", "rejected empty", "chosen empty", "equal", "certain"])
def test_extremes_are_finite(name, what):
    kind, options = VARIANTS[name]
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(4, 5, 8, generator=generator).to(DEVICE)
    weight = torch.randn(30, 8, generator=generator).to(DEVICE)
    targets = torch.randint(0, 30, (4, 5), generator=generator).to(DEVICE)
    if what == "nothing supervised":
        targets[:] = -100
    elif what == "rejected empty":
        targets[2:] = -100
    elif what == "chosen empty":
        targets[:2] = -100
    elif what == "equal":
        hidden[2:], targets[2:] = hidden[:2], targets[:2]
    else:
        hidden = 100 * weight[targets]
    inputs = {}
    if kind is KTOLoss:
        inputs["labels"] = torch.tensor([True, True, False, False], device=DEVICE)
    if name == "kto kto":
        inputs["kl"] = 0.1
    if issubclass(kind, (DPOLoss, KTOLoss)) and kind(**options).needs_reference:
        inputs["ref_logps"] = torch.full((4,), -3.0, device=DEVICE)
    ours = run(
        lambda h, w, t, *, bias: kind(**options)(h, w, t, bias=bias, **inputs), hidden, weight, targets
    )
    values = [ours.value, *ours.grads.values(), *ours.output.metrics.values()]
    assert all(x.isfinite().all() for x in values)
    if what == "nothing supervised":
        assert not ours.grads["hidden"].any() and not ours.grads["weight"].any()


@pytest.mark.parametrize("name", ["dpo discopop", "dpo forward_kl", "dpo alpha_divergence", "alphapo"])
@pytest.mark.parametrize("gap", [300.0, -300.0])
def test_huge_log_ratios_are_finite(name, gap):
    kind, options = VARIANTS[name]
    hidden, weight = torch.randn(2, 5, 8, device=DEVICE), torch.randn(30, 8, device=DEVICE)
    inputs = {"ref_logps": torch.tensor([gap, -gap], device=DEVICE)} if kind is DPOLoss else {}
    loss = kind(**options | ({"beta": 5.0} if kind is DPOLoss else {"alpha": gap}))
    targets = torch.randint(0, 30, (2, 5), device=DEVICE)
    ours = run(lambda h, w, t, *, bias: loss(h, w, t, bias=bias, **inputs), hidden, weight, targets)
    assert all(x.isfinite().all() for x in (ours.value, *ours.grads.values()))


@pytest.mark.parametrize(
    "loss",
    [
        *(kind() for kind in (DPOLoss, ORPOLoss, CPOLoss, SimPOLoss, KTOLoss)),
        *(kind(logits_over="position") for kind in (ORPOLoss, CPOLoss, SimPOLoss)),
    ],
    ids=lambda loss: f"{type(loss).__name__} {getattr(loss, 'logits_over', '')}",
)
def test_a_masked_vocabulary_gives_no_nan(loss):
    """A bias of -inf at ids that no target has: mean logits of -inf, as in TRL, and all else as without these
    ids."""
    problem, kept = Problem(2), V - 20
    targets = torch.where(problem.targets == -100, -100, problem.targets % kept)
    inputs, masked = problem.inputs(type(loss)), problem.bias.clone()
    masked[kept:] = -math.inf
    ours, cut = (
        run(lambda h, w, t, *, bias: loss(h, w, t, bias=bias, **inputs), problem.hidden, w, targets, b)
        for w, b in ((problem.weight, masked), (problem.weight[:kept], problem.bias[:kept]))
    )
    assert relative_error(ours.value, cut.value) < 1e-12
    assert relative_error(ours.grads["hidden"], cut.grads["hidden"]) < 1e-10
    for metric, value in ours.output.metrics.items():
        if metric.startswith("logits/"):
            assert value == -math.inf, metric
        else:
            assert abs(value - cut.output.metrics[metric]) < 1e-10, metric


def test_an_impossible_token_stays_on_its_side():
    """A target of probability 0 makes its own side's numbers infinite, and not the other's NaN."""
    problem = Problem(2)
    problem.targets[3, 5], problem.bias[7] = 7, -math.inf
    problem.targets[:3][problem.targets[:3] == 7] = 8
    rejected = (problem.hidden[3:] @ problem.weight.T + problem.bias).log_softmax(-1)
    assert rejected[0, 5, 7] == -math.inf
    with torch.no_grad():
        for loss in (ORPOLoss(), CPOLoss()):
            out = loss(problem.hidden, problem.weight, problem.targets, bias=problem.bias)
            assert out.loss.isfinite() and out.metrics["nll_loss"].isfinite(), type(loss)
            assert out.metrics["logps/chosen"].isfinite() and out.metrics["logps/rejected"] == -math.inf, (
                type(loss)
            )
        labels = torch.tensor([True] * 3 + [False] * 3, device=DEVICE)
        inputs = problem.inputs(KTOLoss) | {"labels": labels}
        out = KTOLoss()(problem.hidden, problem.weight, problem.targets, bias=problem.bias, **inputs)
        assert out.loss.isfinite() and out.metrics["rewards/chosen"].isfinite()
        assert out.metrics["logps/rejected"] == -math.inf and out.metrics["rewards/margins"] == math.inf


# -- bad input


def zeros(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


REF, LABELS = {"ref_logps": zeros(4)}, {"labels": zeros(4, dtype=torch.bool)}
REF_HIDDEN, REF_HEAD = {"ref_hidden": zeros(4, 3, 4)}, {"ref_weight": zeros(7, 4)}
# A loss and its inputs.
BAD_CALLS = {
    "odd": (SimPOLoss, {"B": 3}, "hidden: expected a multiple of 2"),
    "reference head": (
        DPOLoss,
        REF_HEAD | {"ref_hidden": zeros(4, 3, 5)},
        r"ref_weight: expected .*\(7, 5",
    ),
    "reference tokens": (DPOLoss, REF_HEAD | {"ref_hidden": zeros(4, 2, 4)}, "ref_hidden: expected shape"),
    "reference bias": (DPOLoss, REF_HIDDEN | REF_HEAD | {"ref_bias": zeros(3)}, "ref_bias: expected"),
    "labels": (KTOLoss, REF | {"labels": LABELS["labels"][:3], "kl": 0.0}, r"labels: expected shape \(4,\)"),
    "no kl": (KTOLoss, REF | LABELS, "kl: expected a number"),
    "kl parts": (KTOLoss, REF | LABELS | {"kl": {"kl_hidden": None}}, "kl: expected kl_hidden, kl_targets"),
    "nll targets": (ORPOLoss, {"nll_targets": zeros(4, 2)}, "nll_targets: expected targets' shape"),
    "flat": (SimPOLoss, {"hidden": zeros(6, 4)}, r"hidden: expected shape \(B, T"),
    "padded and packed": (
        SimPOLoss,
        {"cu_seqlens": torch.tensor([0, 2, 4], device=DEVICE)},
        r"hidden: expected shape \(N, H\) with cu_seqlens",
    ),
}


@pytest.mark.parametrize(("kind", "inputs", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_calls_that_are_refused(kind, inputs, message):
    inputs = dict(inputs)
    hidden = inputs.pop("hidden", zeros(inputs.pop("B", 4), 3, 4))
    with pytest.raises(ValueError, match=message):
        kind()(hidden, zeros(7, 4), zeros(*hidden.shape[:-1], dtype=torch.int64), **inputs)


def test_a_needless_reference_is_refused():
    operands = zeros(4, 3, 4), zeros(7, 4), zeros(4, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="ref_logps: expected no reference"):
        DPOLoss(reference_free=True)(*operands, **REF)


# A loss and its options.
BAD_OPTIONS = [
    (DPOLoss, {"loss_type": "dpo"}, "loss_type: expected one of .*'sigmoid'.*'sft'"),
    (DPOLoss, {"loss_type": ()}, "loss_type: expected at least one"),
    (DPOLoss, {"loss_type": ("ipo", "sft"), "loss_weights": (1.0,)}, "loss_weights: expected 2 numbers"),
    (DPOLoss, {"loss_type": "exo_pair"}, "label_smoothing: expected .* for exo_pair"),
    (DPOLoss, {"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing: expected less than 0.5"),
    (DPOLoss, {"label_smoothing": 1.1}, "label_smoothing: expected a number in"),
    (DPOLoss, {"f_divergence_type": "kl"}, "f_divergence_type: expected one of"),
    (
        DPOLoss,
        {"f_divergence_type": "forward_kl", "loss_type": "nca_pair"},
        "f_divergence_type: expected 'reverse_kl' for",
    ),
    (DPOLoss, {"use_weighting": True, "loss_type": "aot"}, "use_weighting: expected False"),
    (DPOLoss, {"beta": 0.0}, "beta: expected a positive"),
    (DPOLoss, {"ld_alpha": 1.5}, "ld_alpha: expected"),
    (DPOLoss, {"discopop_tau": 0.0}, "discopop_tau: expected"),
    (CPOLoss, {"loss_type": "dpo"}, "loss_type: expected one of .*'simpo'"),
    (KTOLoss, {"loss_type": "dpo"}, "loss_type: expected one of 'kto'"),
    (
        ORPOLoss,
        {"logits_over": "position", "softcap": 3.0},
        "logits_over: expected 'completion' with a softcap",
    ),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD_OPTIONS)
def test_options_that_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_a_budget_below_a_pair_warns_how_much_would_do():
    problem = Problem(8)
    engine_budget._WARNED.clear()
    with pytest.warns(BudgetWarning, match="set logits_budget="):
        SimPOLoss(logits_budget=SCRATCH + 4 * ROW)(
            problem.hidden.requires_grad_(), problem.weight.requires_grad_(), problem.targets
        )
