"""Options of the policy losses, alone and in pairs, against fp64 full logits: values and both gradients."""

import itertools
import math

import pytest
import torch

from logitless import GRPOLoss, REINFORCELoss, RLOOLoss, SamplerCorrection
from logitless.losses.framework_names import REMEDIES
from logitless.losses.grpo_types import AGG_MODES, LEVELS, TRUST_REGIONS, TYPES
from logitless.losses.kl_estimators import NAMES as KL_ESTIMATORS
from tests import reference
from tests.cases import usually
from tests.reference.policy import sampler_weights
from tests.support import DEVICE, GemmCounter

B, T, H, V = 5, 7, 6, 40
TOKENS = B * T

TIS = SamplerCorrection(high=2.0)
ICEPOP = SamplerCorrection(action="mask", low=0.5, high=5.0)
CORRECTIONS = {
    "plain": SamplerCorrection(),
    "tis": TIS,
    "icepop": ICEPOP,
    "reject": SamplerCorrection(action="reject", low=0.5),
    "sequence": SamplerCorrection(level="sequence", low=0.2, high=3.0),
    "sequence mask": SamplerCorrection(level="sequence", action="mask", high=3.0),
    "geometric": SamplerCorrection(level="geometric", high=1.1),
    "geometric reject": SamplerCorrection(level="geometric", action="reject", low=0.8, high=1.3),
    "k2": SamplerCorrection(action="reject", measure="k2", high=0.3),
    "sequence k3": SamplerCorrection(level="sequence", action="reject", measure="k3", high=2.0),
    "geometric k3": SamplerCorrection(level="geometric", action="reject", measure="k3", high=0.3),
    "two": (TIS, SamplerCorrection(level="geometric", action="reject", high=1.2)),
}
ESTIMATORS = [
    {"beta": 0.3, "kl_estimator": name, "use_bias_correction_kl": corrected, "kl_max": largest}
    for name in KL_ESTIMATORS
    for corrected in (False, True)
    for largest in (None, 0.2)
    if largest is None or not corrected or name != "k3"
]
# Each axis has the values of one option, and what they need beside them. Pairs are of two axes.
AXES = {
    "type": [{"loss_type": name} for name in TYPES],
    "region": [{"trust_region": name} for name in TRUST_REGIONS],
    "level": [{"importance_sampling_level": name} for name in LEVELS],
    "delta": [{"delta": 1.1}],
    "mean": [{"loss_agg_mode": name} for name in AGG_MODES],
    "kl": [
        {"beta": 0.3, "kl_estimator": "k3"},
        {"beta": 0.3, "kl_estimator": "k2", "use_bias_correction_kl": False},
        {"beta": 0.3, "kl_estimator": "k3+", "kl_max": 0.2},
    ],
    "old_kl": [{"old_kl_coef": 0.4}],
    "ref_advantage": [{"ref_advantage": 0.7}],
    "correction": [
        {"sampler_correction": CORRECTIONS[x]} for x in ("icepop", "sequence", "geometric k3", "two")
    ],
    "entropy": [{"entropy_coef": 0.2}],
    "quantile": [{"top_entropy_quantile": 0.5}],
    "off-policy": [{"off_policy_mask_threshold": 0.05}],
}
NEEDED = {"cispo": {"epsilon_high": 1.3, "cispo_min": 0.6}, "gmpo": {"epsilon": 0.4}}
BOUNDS = {"epsilon": 0.1, "epsilon_high": 0.3, "max_completion_length": 9}


def rollout(spread: float, seed: int = 0) -> tuple[tuple, dict]:
    """A call in fp64: log-ratios of standard deviation `spread`, one empty sequence, one of one token."""
    make = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=DEVICE, dtype=torch.float64)

    hidden, weight = random(B, T, H), random(V, H)
    targets = torch.randint(0, V, (B, T), generator=make, device=DEVICE)
    mask = torch.rand(B, T, generator=make, device=DEVICE) < 0.7
    mask[1], mask[2] = False, torch.arange(T, device=DEVICE) == 3
    logps = reference.token_logprobs(hidden, weight, targets)[0]
    old = (logps + spread * random(B, T)).clamp(max=-1e-3)
    inputs = {
        "old_logps": old,
        "sampling_logps": old + 0.3 * spread * random(B, T),
        "ref_logps": logps + 0.5 * random(B, T),
        "advantages": random(B),
        "mask": mask,
    }
    return (hidden, weight, targets), inputs


def packed(operands: tuple, inputs: dict) -> tuple[tuple, dict]:
    hidden, weight, targets = operands
    flat = {name: x if x.shape == (B,) else x.flatten(0, 1) for name, x in inputs.items()}
    boundaries = torch.arange(0, TOKENS + 1, T, device=DEVICE)
    return (hidden.flatten(0, 1), weight, targets.flatten()), flat | {"cu_seqlens": boundaries}


def value_and_gradients(call, operands: tuple, inputs: dict) -> list[torch.Tensor]:
    hidden, weight, targets = operands
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    value = call(hidden, weight, targets, **inputs)
    return [value.detach(), *torch.autograd.grad(value, (hidden, weight))]


def assert_equal(loss, truth, operands: tuple, inputs: dict, options: dict) -> None:
    """Values, gradients and metrics."""
    metrics = {}

    def ours(*x, **given):
        out = loss(*x, **given)
        metrics["ours"] = out.metrics
        return out.loss

    def expected(*x, **given):
        value, metrics["expected"], _ = truth(*x, **given, **options)
        return value

    pairs = zip(value_and_gradients(ours, operands, inputs), value_and_gradients(expected, operands, inputs))
    for name, (x, y) in zip(("loss", "d_hidden", "d_weight"), pairs, strict=True):
        assert y.isfinite().all()
        assert (x - y).norm() <= 1e-9 * max(y.norm().item(), 1.0), (name, options)
    assert metrics["ours"].keys() == metrics["expected"].keys()
    for name, x in metrics["expected"].items():
        assert metrics["ours"][name].item() == pytest.approx(x.item(), rel=1e-9, abs=1e-12), (name, options)


def layouts(operands: tuple, inputs: dict, number: int) -> tuple[tuple, dict, dict]:
    """Padded or packed, in one chunk or in several; the advantages of tokens or of sequences."""
    if number % 2:
        operands, inputs = packed(operands, inputs)
    return operands, inputs, {"logits_budget": V * 8 * 12} if number // 2 % 2 else {}


def used(loss, inputs: dict) -> dict:
    return (
        inputs
        if getattr(loss, "needs_reference", False)
        else {k: x for k, x in inputs.items() if k != "ref_logps"}
    )


def compare(options: dict, number: int, spread: float) -> None:
    """One call of `GRPOLoss`; ValueError where the options do not go together."""
    loss = GRPOLoss(**options)
    operands, inputs = rollout(spread, seed=number)
    if number % 3 == 0 and loss.loss_type != "gmpo":
        inputs["advantages"] = inputs["advantages"][:, None] * inputs["ref_logps"].cos()
    operands, inputs, chunks = layouts(operands, used(loss, inputs), number)
    assert_equal(GRPOLoss(**options, **chunks), reference.grpo, operands, inputs, options)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("spread", usually([1.0], [0.3, 1.0, 4.0]))
def test_options_alone(spread):
    corrections = [{"sampler_correction": x} for x in CORRECTIONS.values()]
    for number, one in enumerate([*itertools.chain(*AXES.values()), *ESTIMATORS, *corrections]):
        compare(BOUNDS | NEEDED.get(one.get("loss_type"), {}) | one, number, spread)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
def test_options_in_pairs(everything):
    """Without --all, half of the pairs."""
    spreads, compared = itertools.cycle((0.3, 1.0, 4.0)), 0
    for number, (first, second) in enumerate(itertools.combinations(AXES, 2)):
        if number % 2 and not everything:
            continue
        for one, other in itertools.product(AXES[first], AXES[second]):
            options = BOUNDS | NEEDED.get(one.get("loss_type"), {}) | one | other
            try:
                compare(options, number + compared, next(spreads))
            except ValueError as error:  # one of `test_refusals_by_name`
                assert ": expected" in str(error), options
            else:
                compared += 1
    assert compared > (300 if everything else 130)


POLICY_GRADIENTS = [
    *((REINFORCELoss, reference.reinforce, {"sampler_correction": x}) for x in CORRECTIONS.values()),
    (REINFORCELoss, reference.reinforce, {"old_kl_coef": 0.4}),
    (REINFORCELoss, reference.reinforce, {"old_kl_coef": 0.4, "sampler_correction": TIS, "reduction": "sum"}),
    *(
        (RLOOLoss, reference.rloo, {"sampler_correction": CORRECTIONS[x]})
        for x in ("sequence", "geometric k3")
    ),
    (RLOOLoss, reference.rloo, {"sampler_correction": (CORRECTIONS["sequence"], CORRECTIONS["geometric"])}),
]


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("with_old", [True, False])
def test_corrections_of_policy_gradients(with_old):
    for number, (kind, truth, options) in enumerate(POLICY_GRADIENTS):
        operands, inputs = rollout(1.0, seed=number)
        if not with_old:
            if "old_kl_coef" in options:
                continue
            inputs["sampling_logps"] = inputs.pop("old_logps")
        if "sampler_correction" not in options:
            inputs.pop("sampling_logps")
        operands, inputs, chunks = layouts(operands, used(kind(**options), inputs), number)
        assert_equal(kind(**options, **chunks), truth, operands, inputs, options)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_rloo_with_sums_of_the_old_policy(level):
    """The sums per sequence have the product's weight; its geometric mean is that of the tokens."""
    operands, inputs = rollout(1.0)
    loss = RLOOLoss(sampler_correction=SamplerCorrection(level=level, low=0.5, high=1.5))
    inputs = used(loss, inputs)
    sums = inputs | {"old_logps": (inputs["old_logps"] * inputs["mask"]).sum(1)}
    torch.testing.assert_close(loss(*operands, **sums).loss, loss(*operands, **inputs).loss)


# -- relations


def test_gspo_token_is_gspo_for_one_advantage_per_sequence():
    operands, inputs = rollout(0.1)
    inputs = used(GRPOLoss(), inputs)
    options = {"loss_type": "grpo", "epsilon": 0.3}
    of_sequences, of_tokens = (
        value_and_gradients(
            lambda *x, level=level, **given: (
                GRPOLoss(importance_sampling_level=level, **options)(*x, **given).loss
            ),
            operands,
            inputs,
        )
        for level in ("sequence", "sequence_token")
    )
    for x, y in zip(of_sequences, of_tokens, strict=True):
        torch.testing.assert_close(x, y)


def test_ratios_of_sequences_without_a_region():
    """Each token's advantage has the gradient of all log-ratios of its sequence."""
    operands, inputs = rollout(1.0)
    inputs = used(GRPOLoss(), inputs) | {"advantages": inputs["ref_logps"].cos()}
    options = {"trust_region": None, "importance_sampling_level": "sequence"}
    assert_equal(GRPOLoss(**options), reference.grpo, operands, inputs, options)


@pytest.mark.parametrize("region", TRUST_REGIONS)
def test_regions_that_keep_everything(region):
    """With bounds that no token reaches, every region has the gradient of the plain policy gradient."""
    operands, inputs = rollout(1.0)
    inputs = used(GRPOLoss(), inputs)
    # A difference of probabilities is at most 1. A ratio of exp(30) is inside of `clip`.
    bounds = {"epsilon": 1e13, "epsilon_high": 1e13} if region in ("clip", "binary_kl") else {"epsilon": 1.0}
    loss = GRPOLoss(trust_region=region, **bounds)
    plain = GRPOLoss(trust_region=None)
    actual, expected = (
        value_and_gradients(lambda *x, of=of, **given: of(*x, **given).loss, operands, inputs)
        for of in (loss, plain)
    )
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert loss(*operands, **inputs).metrics["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("region", ["binary_tv", "binary_kl", "absolute_tv"])
@pytest.mark.parametrize("bound", ["epsilon", "epsilon_high"])
def test_the_two_bounds_of_a_region(region, bound):
    """`epsilon` drops tokens that became less probable, `epsilon_high` those that became more probable."""
    operands, inputs = rollout(1.0)
    loss = GRPOLoss(trust_region=region, **{"epsilon": 20.0, "epsilon_high": 20.0} | {bound: 0.0})
    metrics = loss(*operands, **used(loss, inputs)).metrics
    low, high = metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]
    assert (low > 0.1 and high == 0) if bound == "epsilon" else (high > 0.1 and low == 0)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("corrected", [False, True])
def test_kl_of_equal_policies_is_0(name, corrected):
    operands, inputs = rollout(1.0)
    inputs["ref_logps"] = reference.token_logprobs(*operands)[0]
    loss = GRPOLoss(beta=1.0, kl_estimator=name, use_bias_correction_kl=corrected)
    assert loss(*operands, **inputs).metrics["kl"].item() == pytest.approx(0, abs=1e-14)


def test_kl_without_old_log_probabilities():
    """TRL's default: on policy the corrected k3 has the gradient -d, where k3 alone has 1 - exp(d)."""
    operands, inputs = rollout(1.0)
    inputs = {"mask": inputs["mask"], "ref_logps": inputs["ref_logps"], "advantages": torch.zeros(B)}
    ours = value_and_gradients(lambda *x, **given: GRPOLoss(beta=1.0)(*x, **given).loss, operands, inputs)

    def truth(hidden, weight, targets, *, mask, ref_logps, advantages):
        logps = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        d = (ref_logps - logps).detach()
        return ((torch.expm1(d) - d - d * (logps - logps.detach())) * mask).sum() / mask.sum()

    for x, y in zip(ours, value_and_gradients(truth, operands, inputs), strict=True):
        torch.testing.assert_close(x, y)


# -- numbers that a sampler may return


@pytest.mark.parametrize("number", [math.nan, -math.inf, 1e30])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_numbers_of_a_sampler(name, number):
    """NaN is weight 1; a token that the sampler never draws has a large, finite weight."""
    operands, inputs = rollout(0.3)
    correction = CORRECTIONS[name]
    inputs["sampling_logps"][0, :2], inputs["mask"][0, :2] = number, torch.tensor([True, False])
    for loss, truth, options in (
        (GRPOLoss(sampler_correction=correction), reference.grpo, {"sampler_correction": correction}),
        (
            REINFORCELoss(sampler_correction=correction),
            reference.reinforce,
            {"sampler_correction": correction},
        ),
    ):
        assert_equal(loss, truth, operands, used(loss, inputs), options)
    weights = [correction] if isinstance(correction, SamplerCorrection) else correction
    for one in weights:
        actual = one.weights(inputs["old_logps"], inputs["sampling_logps"], inputs["mask"])
        expected = sampler_weights([one], inputs["old_logps"], inputs["sampling_logps"], inputs["mask"])
        torch.testing.assert_close(*(torch.where(inputs["mask"], x, 0.0) for x in (actual, expected)))


@pytest.mark.parametrize("region", TRUST_REGIONS)
def test_old_policies_that_never_draw_the_token(region):
    """log q = -inf: p - q is p, the log-ratio is clamped, and its gradient is 0."""
    (hidden, weight, targets), inputs = rollout(0.3)
    inputs = used(GRPOLoss(), inputs)
    inputs["old_logps"][0, 0], inputs["mask"][0, 0] = -math.inf, True
    loss = GRPOLoss(trust_region=region, epsilon=0.0, delta=3.0, old_kl_coef=0.1, reduction="none")
    actual = value_and_gradients(
        lambda *x, **given: loss(*x, **given).loss.sum(), (hidden, weight, targets), inputs
    )
    assert all(x.isfinite().all() for x in actual)
    raised = inputs | {"advantages": inputs["advantages"].abs() + 1}
    value = loss(hidden, weight, targets, **raised).loss[0, 0] - 0.05 * 80**2
    bounded = {None: -3.0, "clip": -1.0}.get(region, 0.0)  # min(r, delta), 1 + epsilon_high, or dropped
    assert value.item() == pytest.approx(bounded * raised["advantages"][0].item())


def test_fp32_regions_of_probable_tokens():
    """p and q near 1, and equal: nothing is dropped, and nothing is NaN."""
    hidden, weight = torch.eye(4)[None] * 40, torch.eye(4)
    targets = torch.arange(4)[None]
    for region in ("binary_tv", "binary_kl", "absolute_tv"):
        loss = GRPOLoss(trust_region=region, epsilon=1e-6)
        out = loss(hidden, weight, targets, advantages=torch.ones(1, 4), old_logps=torch.zeros(1, 4))
        assert out.metrics["clip_ratio/region_mean"] == 0 and out.loss.item() == pytest.approx(-1)


# -- what is refused

TOKEN, GEOMETRIC = SamplerCorrection(high=2.0), SamplerCorrection(level="geometric", high=2.0)
CORRECTED_K3 = {"beta": 0.1, "kl_max": 1.0}
REFUSED = [
    *(
        ({"trust_region": "binary_tv", "loss_type": x}, "trust_region: expected 'clip' for " + x)
        for x in ("sapo", "vespo", "gmpo")
    ),
    (
        {"trust_region": None, "loss_type": "cispo", "epsilon_high": 2.0},
        "trust_region: expected 'clip' for cispo",
    ),
    *(
        (
            {"trust_region": x, "importance_sampling_level": y},
            "trust_region: expected 'clip' or None with importance",
        )
        for x in ("binary_tv", "binary_kl", "absolute_tv")
        for y in ("sequence", "sequence_token")
    ),
    ({"cispo_min": 0.5}, "cispo_min: expected 0.0 for dapo"),
    (
        {"cispo_min": 3.0, "loss_type": "cispo", "epsilon_high": 2.0},
        r"cispo_min: expected a number in \[0, epsilon_high = 2.0",
    ),
    (
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        "max_completion_length: expected a positive number for seq-mean",
    ),
    ({"loss_agg_mode": "seq-mean-token-mean", "loss_type": "gmpo"}, "loss_agg_mode: expected None for gmpo"),
    (
        {"importance_sampling_level": "sequence", "loss_type": "gmpo"},
        "importance_sampling_level: expected 'token' for gmpo",
    ),
    ({"ref_advantage": 1.0, "loss_type": "gmpo"}, "ref_advantage: expected 0.0 for gmpo"),
    ({"top_entropy_quantile": 0.5, "loss_type": "gmpo"}, "top_entropy_quantile: expected 1.0 for gmpo"),
    (
        {"sampler_correction": TOKEN, "loss_type": "gmpo"},
        "sampler_correction: expected level='sequence' or 'geometric' for gmpo",
    ),
    ({"sampler_correction": TOKEN, "loss_type": "vespo"}, "sampler_correction: expected None for vespo"),
    (CORRECTED_K3, "kl_max: expected None for the corrected 'k3'"),
    ({"kl_max": 0.0, "beta": 0.1, "kl_estimator": "k1"}, "kl_max: expected a positive number"),
    ({"kl_max": math.inf}, "kl_max: expected a finite number or None"),
    ({"old_kl_coef": -1.0}, "old_kl_coef: expected a number >= 0"),
    ({"epsilon": math.inf, "trust_region": "binary_tv"}, "epsilon: expected a finite number"),
]
CORRECTIONS_REFUSED = [
    ({"low": 2.0, "high": 1.0}, "low: expected at most high=1.0, got 2.0"),
    ({"low": 0.0}, "low: expected a positive number or None"),
    ({"high": math.inf}, "high: expected a finite number or None"),
    ({"action": "mask"}, "high: expected a bound for action='mask', got None"),
    ({"action": "reject"}, "high: expected a bound for action='reject', got None"),
    ({"measure": "k3", "high": 2.0}, "measure: expected 'ratio' for action='truncate', got 'k3'"),
    ({"measure": "k2", "action": "reject", "high": 2.0, "low": 1.0}, "low: expected None for measure='k2'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refusals_by_name(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        GRPOLoss(**options)


@pytest.mark.parametrize(("options", "message"), CORRECTIONS_REFUSED)
def test_corrections_that_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplerCorrection(**options)


def test_inputs_that_are_refused():
    (hidden, weight, targets), inputs = rollout(1.0)
    call = {"advantages": inputs["advantages"]}
    old, ref = inputs["old_logps"], inputs["ref_logps"]
    per_token = torch.ones(B, T)
    for loss, given, message in (
        (GRPOLoss(sampler_correction=TIS), call, "sampling_logps: expected the sampler's"),
        (REINFORCELoss(sampler_correction=TIS), call, "sampling_logps: expected the sampler's"),
        (RLOOLoss(sampler_correction=GEOMETRIC), call, "sampling_logps: expected the sampler's"),
        (GRPOLoss(old_kl_coef=0.1), call, "old_logps: expected log-probabilities, for old_kl_coef"),
        (REINFORCELoss(old_kl_coef=0.1), call, "old_logps: expected log-probabilities, for old_kl_coef"),
        (REINFORCELoss(), call | {"old_logps": old}, "old_logps: expected None for a loss without ratio"),
        (
            REINFORCELoss(),
            call | {"sampling_logps": old},
            "sampling_logps: expected None without sampler_correction",
        ),
        (
            RLOOLoss(),
            call | {"sampling_logps": old},
            "sampling_logps: expected None without sampler_correction",
        ),
        (GRPOLoss(), call | {"ref_logps": ref}, "ref_logps: expected no reference for this GRPOLoss"),
        (GRPOLoss(ref_advantage=1.0), call, "ref_logps: expected one of ref_logps and ref_hidden"),
        (
            GRPOLoss(loss_type="gmpo"),
            {"advantages": per_token},
            r"advantages: expected shape \(5,\), one per sequence, for gmpo",
        ),
        (
            GRPOLoss(loss_type="gmpo"),
            call | {"importance_weights": per_token},
            r"importance_weights: expected shape \(5,\), one per sequence, for gmpo",
        ),
        (
            RLOOLoss(sampler_correction=CORRECTIONS["sequence k3"]),
            call | {"old_logps": old.sum(1), "sampling_logps": old},
            "old_logps: expected log-probabilities per token, for a correction that measures",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            loss(hidden, weight, targets, **given)
    for kind in (GRPOLoss, RLOOLoss, REINFORCELoss):
        with pytest.raises(
            TypeError, match=r"^sampler_correction: expected a SamplerCorrection.*TIS is Sampler"
        ):
            kind(sampler_correction="tis")
    with pytest.raises(
        ValueError, match="^sampler_correction: expected level='sequence' or 'geometric' for RLOO"
    ):
        RLOOLoss(sampler_correction=(GEOMETRIC, TIS))
    with pytest.raises(ValueError, match=r"^sampling_logps: expected shape \(5, 7\), got \(5, 6\)"):
        TIS.weights(old, old[:, 1:])


def test_names_of_other_frameworks_are_translated():
    """Each name is refused, and what the remedy quotes exists."""
    for option, names in REMEDIES.items():
        kind = SamplerCorrection if option in ("level", "action", "measure") else GRPOLoss
        for name, remedy in names.items():
            with pytest.raises(ValueError, match=f"^{option}: expected one of ") as caught:
                kind(**{option: name})
            assert str(caught.value).endswith(f"; {remedy}.")
    for name, remedy in (("gspo", "'sequence'"), ("dppo_tv", "'binary_tv'"), ("k3+", "kl_estimator")):
        with pytest.raises(ValueError, match=f"^loss_type: .*{remedy}"):
            GRPOLoss(loss_type=name)


# -- products


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(
    "options",
    [*AXES["type"], *AXES["region"], *AXES["level"], {"sampler_correction": GEOMETRIC}, {"old_kl_coef": 0.1}],
)
@pytest.mark.parametrize("budget", [None, V * 8 * 3])
def test_products(options, budget):
    """3, and 4 where a sequence exceeds the budget that it needs as a whole; 2 with a frozen head."""
    (hidden, weight, targets), inputs = rollout(1.0)
    options = NEEDED.get(options.get("loss_type"), {}) | {"max_completion_length": 9} | options
    loss = GRPOLoss(**options, logits_budget=budget)
    inputs = used(loss, inputs) | {"mask": torch.ones(B, T, dtype=torch.bool)}
    for trainable in (True, False):
        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(trainable)
        with GemmCounter(TOKENS, V, H) as counter:
            loss(hidden, weight, targets, **inputs).loss.backward()
        products = 2 if not trainable else 4 if budget and loss.scope == "group" else 3
        assert counter.gemms == pytest.approx(products, abs=0.02), loss.scope
