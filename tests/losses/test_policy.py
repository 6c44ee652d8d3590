"""Policy losses against the fp64 reference: every type, level and option, in every strategy, padded and
packed."""

import math

import pytest
import torch
from torch import Tensor

from logitless import GRPOLoss, PPOLoss, REINFORCELoss, RLOOLoss
from logitless.losses.grpo_types import LEVELS, PER_SEQUENCE, SURROGATES, clipped
from tests import reference
from tests.cases import DTYPES
from tests.support import (
    DEVICE,
    GemmCounter,
    assert_close,
    assert_metrics_close,
    relative_error,
    run,
    sum_error,
)

H, V = 16, 300
ROW = V * 8  # bytes of a row of fp64 logits
SCRATCH = 6 * 8 * 2**10  # of the twins beside them

MATHS = {
    GRPOLoss: reference.grpo,
    PPOLoss: reference.ppo,
    RLOOLoss: reference.rloo,
    REINFORCELoss: reference.reinforce,
}
OPTIONS = {
    "": {},
    "kl": {"beta": 0.3},
    "corrected kl": {"beta": 0.3, "use_bias_correction_kl": True},
    "entropy": {"entropy_coef": 0.2},
    "top entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.2},
    "top entropy, kl": {"top_entropy_quantile": 0.6, "beta": 0.2},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "sampled, off-policy mask": {"off_policy_mask_threshold": 0.05},
    "weights": {"epsilon_high": 0.35},
    "sequence weights": {"beta": 0.1},
    "everything": {
        "beta": 0.3,
        "use_bias_correction_kl": True,
        "entropy_coef": 0.1,
        "top_entropy_quantile": 0.7,
        "off_policy_mask_threshold": 0.05,
        "epsilon": 0.1,
        "epsilon_high": 0.25,
    },
}


def variants():
    for loss_type in SURROGATES:
        for level in LEVELS:
            for name, options in OPTIONS.items():
                settings = {"loss_type": loss_type, "importance_sampling_level": level, **options}
                if loss_type == "cispo":
                    settings["epsilon_high"] = 1.1
                if loss_type == "dr_grpo":
                    settings["max_completion_length"] = 20
                yield " ".join(filter(None, (loss_type, level, name))), GRPOLoss, settings
        if SURROGATES[loss_type] is clipped:
            delta = {"loss_type": loss_type, "delta": 1.3, "epsilon": 0.3, "max_completion_length": 9}
            yield f"{loss_type} delta", GRPOLoss, delta
            yield f"{loss_type} on policy", GRPOLoss, delta | {"delta": None}
    yield "ppo", PPOLoss, {"epsilon": 0.1}
    yield "rloo", RLOOLoss, {"epsilon": 0.1, "epsilon_high": 0.3}
    yield "rloo sums", RLOOLoss, {}
    yield "rloo on policy", RLOOLoss, {}
    yield "reinforce", REINFORCELoss, {}


VARIANTS = {name: (kind, settings) for name, kind, settings in variants()}
HEADS = ({}, {"softcap": 9.0, "logit_scale": 0.7}, {"temperature": 1.3}, {"softcap": 9.0, "temperature": 0.8})


class Problem:
    """Five sequences of unequal lengths, some tokens masked, one sequence with nothing counted."""

    def __init__(
        self,
        name: str,
        kind,
        settings: dict,
        *,
        packed: bool,
        seed: int,
        dtype=torch.float64,
        spread: float = 0.3,
    ):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(
            DEVICE, dtype
        )
        lengths = [9, 14, 22, 7, 12] if packed else [12] * 5
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)
        self.shape = (sum(lengths),) if packed else (5, 12)
        self.hidden, self.weight, self.bias = (
            self.random(*self.shape, H),
            self.random(V, H) / 3,
            self.random(V),
        )
        ids = torch.randint(0, V, (sum(lengths),), generator=generator)
        ids[torch.rand(sum(lengths), generator=generator) < 0.2] = -100
        if "vespo" not in name:  # whose phi of an empty sequence is a matter of taste
            ids[starts[3] : starts[4]] = -100
        self.targets = ids.view(self.shape).to(DEVICE)
        self.options = {"cu_seqlens": starts} if packed else {}
        if seed % 3:
            self.options["mask"] = (torch.rand(self.shape, generator=generator) < 0.8).to(DEVICE)
        per_token = seed % 2 == 0 and not name.startswith("rloo")
        self.options["advantages"] = self.random(*self.shape) if per_token else self.random(5)
        if kind is REINFORCELoss:
            return
        counted = (self.targets != -100) & self.options.get("mask", torch.tensor(True, device=DEVICE))
        head = {key: settings[key] for key in ("softcap", "logit_scale", "temperature") if key in settings}
        logps, _, _ = reference.token_logprobs(self.hidden, self.weight, self.targets, bias=self.bias, **head)
        # A ratio of sums leaves its clip range sooner than one of tokens.
        spread = spread / 8 if kind is RLOOLoss else spread
        # What stands at tokens that do not count is nobody's.
        near = lambda size: torch.where(counted, logps + size * self.random(*self.shape), math.nan)  # noqa: E731
        if "on policy" not in name:
            self.options["old_logps"] = near(spread)
        if name == "rloo sums":
            per_sequence = torch.nan_to_num(self.options["old_logps"]).view(-1).split(starts.diff().tolist())
            self.options["old_logps"] = torch.stack([x.sum() for x in per_sequence])
        if settings.get("beta"):
            self.options["ref_logps"] = near(0.5)
        if "sampled" in name:
            self.options["sampling_logps"] = near(0.3)
        if "sequence weights" in name:
            self.options["importance_weights"] = self.random(5).abs() + 0.2
        elif "weights" in name:
            self.options["importance_weights"] = self.random(*self.shape).abs() + 0.2


def cases():
    for number, (name, (kind, settings)) in enumerate(VARIANTS.items()):
        for turn, strategy in enumerate(("whole", "small", "frozen")):
            packed = bool((number + turn) % 2)
            reduction = ("mean", "sum")[(number // 3) % 2]
            num_items = 17.5 if reduction == "mean" and turn == 1 else None
            values = (
                name,
                kind,
                settings,
                strategy,
                packed,
                HEADS[(number + turn) % 4],
                reduction,
                num_items,
                bool((number + turn) % 3),
            )
            yield pytest.param(*values, id=f"{name}-{strategy}-{'packed' if packed else 'padded'}")


# Rows that the budget holds: everything, or less than a sequence.
ROWS = {"whole": (True, 200), "small": (True, 2), "frozen": (False, 2)}


def expected_strategy(loss, strategy: str) -> str:
    if loss.scope == "token":
        return "fused"
    if strategy == "frozen" and loss.differentiates == ("logps",):
        return "row_scaled"
    return "resident" if strategy == "whole" else "recompute"


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(
    "name, kind, settings, strategy, packed, head, reduction, num_items, compact", list(cases())
)
def test_equals_the_reference(name, kind, settings, strategy, packed, head, reduction, num_items, compact):
    problem = Problem(name, kind, settings | head, packed=packed, seed=len(name) + 7 * packed)
    trainable, rows = ROWS[strategy]
    engine = {"compact": compact, "logits_budget": SCRATCH + rows * ROW, "return_logps": True}
    loss = kind(**settings, **head, **engine, reduction=reduction)
    maths = {key: value for key, value in settings.items() if kind is not PPOLoss or key != "loss_type"}
    found = {}

    def truth_loss(hidden, weight, targets, *, bias):
        value, found["metrics"], found["logps"] = MATHS[kind](
            hidden,
            weight,
            targets,
            bias=bias,
            reduction=reduction,
            num_items=num_items,
            **maths,
            **head,
            **problem.options,
        )
        return value

    requires = ("hidden", "weight", "bias") if trainable else ("hidden",)
    operands = problem.hidden, problem.weight, problem.targets, problem.bias
    truth = run(truth_loss, *operands, 1.7, requires)
    ours = run(
        lambda h, w, t, *, bias: loss(h, w, t, bias=bias, num_items=num_items, **problem.options),
        *operands,
        1.7,
        requires,
    )
    plan, d_logps = ours.output.plan, ours.output.tokens["d_logps"]
    # A sequence of one or two tokens fits in any budget.
    assert expected_strategy(loss, strategy) in (plan.strategy, *plan.parts), plan.describe()
    assert relative_error(ours.value, truth.value) < 1e-11
    for operand, gradient in truth.grads.items():
        assert gradient.norm() > 0, operand
        assert relative_error(ours.grads[operand], gradient) < 1e-9, operand
    assert_metrics_close(ours.output.metrics, found["metrics"], 1e-9)
    assert ours.output.logps.shape == problem.targets.shape and not ours.output.logps.requires_grad
    assert relative_error(ours.output.logps, found["logps"]) < 1e-12
    if loss.differentiates == ("logps",):
        # By the chain rule they are all that is missing.
        chained = run(
            lambda *a, bias: (reference.token_logprobs(*a, bias=bias, **head)[0] * d_logps).sum(),
            *operands,
            1.7,
            ("hidden",),
        )
        assert relative_error(chained.grads["hidden"], truth.grads["hidden"]) < 1e-9
    with torch.no_grad():
        only = loss(*operands[:3], bias=problem.bias, num_items=num_items, **problem.options)
    assert only.plan.strategy == "loss_only"
    assert relative_error(only.loss, truth.value) < 1e-11
    assert_metrics_close(only.metrics, found["metrics"], 1e-9)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "name",
    [
        "dapo token entropy",
        "grpo token kl",
        "grpo sequence entropy",
        "vespo token",
        "luspo token top entropy",
        "rloo",
    ],
)
def test_unreduced(name, packed):
    kind, settings = VARIANTS[name]
    problem = Problem(name, kind, settings, packed=packed, seed=11)
    hidden = problem.hidden.requires_grad_()
    out = kind(**settings, reduction="none", return_logps=True)(
        hidden, problem.weight, problem.targets, bias=problem.bias, **problem.options
    )
    truth, metrics, logps = MATHS[kind](
        hidden,
        problem.weight,
        problem.targets,
        bias=problem.bias,
        reduction="none",
        **settings,
        **problem.options,
    )
    by_sequence = settings.get("loss_type") in PER_SEQUENCE or kind is RLOOLoss
    assert out.loss.shape == ((5,) if by_sequence else problem.targets.shape)
    assert relative_error(out.loss.detach(), truth.detach()) < 1e-11
    assert relative_error(out.logps, logps) < 1e-12
    assert_metrics_close(out.metrics, metrics, 1e-9)
    upstream = problem.random(*truth.shape)
    ours, theirs = (torch.autograd.grad(x, hidden, upstream)[0] for x in (out.loss, truth))
    assert relative_error(ours, theirs) < 1e-9


def test_shifted_labels():
    """Labels of the same length as hidden, and everything per token with them."""
    kind, settings = VARIANTS["grpo token kl"]
    problem = Problem("grpo token kl", kind, settings, packed=False, seed=12)
    problem.options.pop("mask", None)
    labels = torch.cat((torch.full_like(problem.targets[:, :1], 7), problem.targets[:, :-1]), 1)
    moved = {
        name: torch.cat((x[:, :1], x[:, :-1]), 1) if x.shape == labels.shape else x
        for name, x in problem.options.items()
    }
    aligned = problem.targets.clone()
    aligned[:, -1] = -100
    ours = kind(**settings)(problem.hidden, problem.weight, labels, shift=True, **moved)
    theirs = kind(**settings)(problem.hidden, problem.weight, aligned, **problem.options)
    assert relative_error(ours.loss, theirs.loss) < 1e-12


@pytest.mark.parametrize(
    "name, per_token",
    [("dapo token kl", True), ("dapo token kl", False), ("grpo sequence", True), ("rloo", False)],
)
def test_shifted_labels_of_packed_sequences(name, per_token):
    """The last token of a sequence predicts nothing, least of all the first of the next one."""
    kind, settings = VARIANTS[name]
    problem = Problem(name, kind, settings, packed=True, seed=18)
    options = {
        key: x.nan_to_num(nan=-5.0) if x.is_floating_point() else x for key, x in problem.options.items()
    }
    options["advantages"] = problem.random(*problem.shape) if per_token else problem.random(5)
    starts, labels, loss = options["cu_seqlens"], problem.targets.clamp(min=0), kind(**settings)
    operands = problem.hidden, problem.weight, labels
    ours = run(lambda h, w, t, *, bias: loss(h, w, t, shift=True, **options), *operands)

    # Each sequence by itself: all but its last hidden state, and what stands beside all but its first label.
    pieces = [(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist())]
    cut = lambda x: torch.cat([x[a + 1 : b] for a, b in pieces])  # noqa: E731
    moved = {key: cut(x) if x.shape == labels.shape else x for key, x in options.items()}
    moved["cu_seqlens"] = starts - torch.arange(len(starts), device=DEVICE)
    kept = torch.cat([torch.arange(a, b - 1, device=DEVICE) for a, b in pieces])
    theirs = run(lambda h, w, t, *, bias: loss(h[kept], w, cut(t), **moved), *operands)
    assert relative_error(ours.value, theirs.value) < 1e-12
    for operand, gradient in theirs.grads.items():
        assert gradient.norm() > 0 and relative_error(ours.grads[operand], gradient) < 1e-12, operand


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen head"])
@pytest.mark.parametrize("name", ["dapo token", "grpo sequence kl", "cispo token entropy", "rloo"])
def test_within_twice_the_naive_error(name, trainable, dtype):
    kind, settings = VARIANTS[name]
    problem = Problem(name, kind, settings, packed=False, seed=13, dtype=dtype, spread=1.0)
    requires = ("hidden", "weight", "bias") if trainable else ("hidden",)
    inputs = {
        key: torch.nan_to_num(x.float()) if x.is_floating_point() else x for key, x in problem.options.items()
    }

    def maths(hidden, weight, targets, *, bias, **more):
        return MATHS[kind](hidden, weight, targets, bias=bias, **settings, **inputs, **more)[0]

    operands = problem.hidden, problem.weight, problem.targets, problem.bias
    naive = run(maths, *operands, 1.7, requires)
    naive_terms = maths(*operands[:3], bias=problem.bias, reduction="none")
    ours = run(
        lambda h, w, t, *, bias: kind(**settings)(h, w, t, bias=bias, **inputs), *operands, 1.7, requires
    )
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    exact = [x.double() for x in (problem.hidden, problem.weight, problem.bias)]
    truth = run(maths, *exact[:2], problem.targets, exact[2], 1.7, requires)
    truth_terms = maths(*exact[:2], problem.targets, bias=exact[2], reduction="none")
    # exp of a sum has the rounding error of the sum, which the naive computation may escape by luck.
    floor = torch.finfo(torch.float32).eps * problem.hidden.shape[1] * 4 if kind is RLOOLoss else 0.0
    cancels = (truth_terms.abs().sum() / truth_terms.sum().abs()).item()
    naive_error = max(
        relative_error(naive.value, truth.value), sum_error(naive_terms, truth_terms), floor * cancels
    )
    assert_close(ours.value, truth.value, naive_error, name="loss")
    for operand in truth.grads:
        naive_error = max(relative_error(naive.grads[operand], truth.grads[operand]), floor)
        assert_close(ours.grads[operand], truth.grads[operand], naive_error, name=f"d_{operand}")


# -- properties


def test_on_policy_has_the_gradient_of_reinforce():
    problem = Problem("reinforce", REINFORCELoss, {}, packed=False, seed=14)
    operands = problem.hidden, problem.weight, problem.targets, problem.bias
    gradients = [
        run(lambda h, w, t, *, bias, loss=loss: loss(h, w, t, bias=bias, **problem.options), *operands).grads
        for loss in (GRPOLoss(), REINFORCELoss())
    ]
    for name in gradients[0]:
        assert relative_error(gradients[0][name], gradients[1][name]) < 1e-12


def test_clipped_tokens_have_no_gradient():
    problem = Problem("dapo", GRPOLoss, {}, packed=False, seed=15)
    problem.options["advantages"] = torch.ones(5, device=DEVICE, dtype=torch.float64)
    problem.options["old_logps"] = (
        torch.nan_to_num(problem.options["old_logps"]) - 2
    )  # every ratio is far above 1 + epsilon
    ours = run(
        lambda h, w, t, *, bias: GRPOLoss()(h, w, t, bias=bias, **problem.options), *operands_of(problem)
    )
    assert ours.value != 0
    assert not any(gradient.any() for gradient in ours.grads.values())
    assert ours.output.metrics["clip_ratio/high_mean"].item() == pytest.approx(1)


def operands_of(problem: Problem) -> tuple[Tensor, ...]:
    return problem.hidden, problem.weight, problem.targets, problem.bias


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(
    "trainable, settings, products",
    [
        (True, {}, 3),
        (False, {}, 2),
        (True, {"importance_sampling_level": "sequence"}, 3),
        (False, {"top_entropy_quantile": 0.5}, 2),
        (True, {"entropy_coef": 0.1}, 3),
        (False, {"entropy_coef": 0.1}, 2),
    ],
)
def test_products(trainable, settings, products):
    hidden, weight = torch.randn(4, 16, H, requires_grad=True), torch.randn(V, H).requires_grad_(trainable)
    targets = torch.randint(0, V, (4, 16))
    with GemmCounter(64, V, H) as counter:
        GRPOLoss(**settings)(
            hidden, weight, targets, advantages=torch.randn(4), old_logps=torch.randn(4, 16)
        ).loss.backward()
    assert counter.gemms == pytest.approx(products, abs=0.02)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("what", ["far above", "far below", "no advantage", "nothing counted", "one token"])
def test_extremes_are_finite(name, what):
    kind, settings = VARIANTS[name]
    T = 1 if what == "one token" else 6
    generator = torch.Generator(DEVICE).manual_seed(3)
    random = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)  # noqa: E731
    hidden, weight = random(4, T, 8), random(30, 8)
    targets = torch.randint(0, 30, (4, T), generator=generator).to(DEVICE)
    inputs = {"advantages": random(4)}
    if kind is not REINFORCELoss:
        inputs["old_logps"] = -torch.rand(4, T, generator=generator).to(DEVICE) * 3
    if settings.get("beta"):
        inputs["ref_logps"] = inputs["old_logps"] - 1
    if what == "no advantage":
        inputs["advantages"] = torch.zeros(4, device=DEVICE)
    elif what == "nothing counted":
        inputs["mask"] = torch.zeros(4, T, dtype=torch.int64, device=DEVICE)
    elif what.startswith("far") and "old_logps" in inputs:
        inputs["old_logps"] = inputs["old_logps"] + (100 if what == "far below" else -100)
        if settings.get("beta") and not settings.get("use_bias_correction_kl"):
            inputs["ref_logps"] = inputs["old_logps"]
    ours = run(
        lambda h, w, t, *, bias: kind(**settings)(h, w, t, bias=bias, **inputs), hidden, weight, targets
    )
    assert all(x.isfinite().all() for x in (ours.value, *ours.grads.values(), *ours.output.metrics.values()))
    if what == "nothing counted":
        assert not ours.value.any() and not ours.grads["hidden"].any()


# -- numbers by hand: p = softmax([0, log 3]) at every token, 1/2 before


@pytest.mark.parametrize(
    "loss, expected",
    [
        (GRPOLoss(), (-1.2 - 0.5 + 1.6) / 3),
        (GRPOLoss(loss_type="grpo"), ((-1.2 - 0.5) / 2 + 1.6) / 2),
        (GRPOLoss(loss_type="dr_grpo", max_completion_length=8), (-1.2 - 0.5 + 1.6) / 16),
        (GRPOLoss(loss_type="luspo"), (-1.2 - 0.5 + 1.6) / 2),
        (
            GRPOLoss(entropy_coef=2.0),
            (-1.2 - 0.5 + 1.6) / 3 - 2 * (0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
        ),
        (RLOOLoss(), (-0.75 + 2 * 0.8) / 2),
    ],
)
def test_by_hand(loss, expected):
    hidden, weight = torch.ones(2, 2, 1), torch.tensor([[0.0], [math.log(3)]])
    targets, old = torch.tensor([[1, 0], [0, -100]]), torch.full((2, 2), -math.log(2))
    value = loss(hidden, weight, targets, advantages=torch.tensor([1.0, -2.0]), old_logps=old).loss
    assert value.item() == pytest.approx(expected, abs=1e-6)


# -- bad input


def call(loss, **inputs):
    given = {"advantages": torch.zeros(4)} | inputs
    return loss(torch.zeros(4, 3, 4), torch.zeros(7, 4), torch.zeros(4, 3, dtype=torch.int64), **given)


BAD = {
    "type": (lambda: GRPOLoss(loss_type="gspo"), "loss_type: expected one of 'grpo'.*'vespo'"),
    "level": (
        lambda: GRPOLoss(importance_sampling_level="batch"),
        "importance_sampling_level: expected one of 'token'",
    ),
    "advantages": (
        lambda: call(GRPOLoss(), advantages=torch.zeros(3)),
        r"advantages: expected targets' shape \(4, 3\) or \(4,\)",
    ),
    "mask": (lambda: call(GRPOLoss(), mask=torch.zeros(4, 2)), r"mask: expected targets' shape \(4, 3\)"),
    "old": (lambda: call(GRPOLoss(), old_logps=torch.zeros(4)), "old_logps: expected targets' shape"),
    "no reference": (lambda: call(GRPOLoss(beta=0.1)), "ref_logps: expected one of ref_logps and ref_hidden"),
    "dr_grpo": (lambda: GRPOLoss(loss_type="dr_grpo"), "max_completion_length: expected a positive number"),
    "epsilon": (lambda: GRPOLoss(epsilon=-0.1), "epsilon: expected a number >= 0"),
    "epsilon_high": (lambda: GRPOLoss(epsilon_high=-0.1), "epsilon_high: expected"),
    "delta": (lambda: GRPOLoss(delta=0.0), "delta: expected a positive"),
    "needless delta": (lambda: GRPOLoss(delta=2.0, loss_type="sapo"), "delta: expected None for sapo"),
    "beta": (lambda: GRPOLoss(beta=-0.1), "beta: expected"),
    "temperature": (lambda: GRPOLoss(temperature=0.0), "temperature: expected a positive"),
    "sapo": (lambda: GRPOLoss(sapo_temperature_neg=0.0), "sapo_temperature: expected"),
    "quantile": (lambda: GRPOLoss(top_entropy_quantile=1.5), "top_entropy_quantile: expected"),
    "no sampler": (
        lambda: call(GRPOLoss(off_policy_mask_threshold=0.1)),
        "off_policy_mask_threshold: expected old_logps",
    ),
    "rloo advantages": (
        lambda: call(RLOOLoss(), advantages=torch.zeros(4, 3)),
        r"advantages: expected shape \(4,\)",
    ),
    "rloo epsilon": (lambda: RLOOLoss(epsilon=-1.0), "epsilon: expected"),
    "flat": (
        lambda: GRPOLoss()(
            torch.zeros(4, 4), torch.zeros(7, 4), torch.zeros(4, dtype=torch.int64), advantages=torch.zeros(4)
        ),
        r"targets: expected shape \(B, T\)",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    attempt, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        attempt()


@pytest.mark.parametrize("name", ["dapo token kl", "grpo sequence", "rloo on policy"])
def test_compiles_from_outside(name):
    kind, settings = VARIANTS[name]
    problem = Problem(name, kind, settings, packed=False, seed=16, dtype=torch.float32)
    loss = kind(**settings, return_logps=True)
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()

    def model(h, w, t):
        out = loss(h * 2, w, t, **problem.options)
        return out.loss, torch.stack([out.logps, out.tokens["d_logps"]])

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    (ours, logps), (theirs, truth) = (
        compiled(hidden, weight, problem.targets),
        model(hidden, weight, problem.targets),
    )
    assert relative_error(logps, truth) < 1e-5
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(theirs, (hidden, weight)),
        strict=True,
    ):
        assert relative_error(a, b) < 1e-5
