"""Policy losses: what they cost, extremes, and what they refuse. Their numbers are compared in
tests/reference_tests and tests/random."""

import pytest
import torch
from torch import Tensor

from logitless import GRPOLoss, PPOLoss, REINFORCELoss, RLOOLoss, SamplerCorrection, linear_logprobs
from logitless.engine.batch import Batch
from logitless.losses.grpo_types import LEVELS, TRUST_REGIONS, TYPES
from logitless.losses.kl_estimators import NAMES as KL_ESTIMATORS
from logitless.losses.sampler_correction import LEVELS as CORRECTION_LEVELS
from tests.support import DEVICE, GemmCounter, run

H, V = 16, 300

VARIANTS = {
    **{
        f"{loss_type} {level}": (GRPOLoss, {"loss_type": loss_type, "importance_sampling_level": level})
        for loss_type in TYPES
        for level in LEVELS
        if loss_type != "gmpo" or level == "token"
    },
    "kl": (GRPOLoss, {"beta": 0.3, "use_bias_correction_kl": False}),
    "corrected kl": (GRPOLoss, {"beta": 0.3}),
    **{f"kl {x}": (GRPOLoss, {"beta": 0.3, "kl_estimator": x}) for x in KL_ESTIMATORS if x != "k3"},
    **{
        f"region {x} {level}": (GRPOLoss, {"trust_region": x, "importance_sampling_level": level})
        for x in TRUST_REGIONS
        for level in (LEVELS if x is None else ("token",))
    },
    "truncated region": (GRPOLoss, {"trust_region": "binary_tv", "delta": 3.0, "old_kl_coef": 0.1}),
    **{
        f"correction {x.level} {x.action}": (GRPOLoss, {"sampler_correction": x})
        for x in (
            SamplerCorrection(level=level, action=action, low=0.5, high=2.0)
            for level in CORRECTION_LEVELS
            for action in ("truncate", "mask", "reject")
        )
    },
    "plain correction": (GRPOLoss, {"sampler_correction": SamplerCorrection(level="sequence")}),
    "dro": (REINFORCELoss, {"old_kl_coef": 0.1}),
    "entropy": (GRPOLoss, {"entropy_coef": 0.2}),
    "top entropy": (GRPOLoss, {"top_entropy_quantile": 0.4, "entropy_coef": 0.2}),
    "off-policy mask": (GRPOLoss, {"off_policy_mask_threshold": 0.05}),
    "ppo": (PPOLoss, {}),
    "rloo": (RLOOLoss, {}),
    "reinforce": (REINFORCELoss, {}),
}
for _, settings in VARIANTS.values():
    if settings.get("loss_type") == "cispo":
        settings["epsilon_high"] = 1.1
    if settings.get("loss_type") == "dr_grpo":
        settings["max_completion_length"] = 20


def operands():
    generator = torch.Generator(DEVICE).manual_seed(14)
    hidden, weight = (torch.randn(n, H, generator=generator, device=DEVICE).double() for n in (60, V))
    targets = torch.randint(0, V, (5, 12), generator=generator, device=DEVICE)
    targets[:, ::4] = -100
    return hidden.view(5, 12, H), weight / 3, targets, torch.randn(5, generator=generator, device=DEVICE)


@pytest.mark.parametrize("packed", [False, True])
def test_shifted_log_probabilities_are_rolled_into_the_next_call(packed):
    """The results of a call with `shift` are aligned with hidden, its inputs with the targets."""
    hidden, weight, targets, advantages = operands()
    shift = {"shift": True}
    if packed:
        shift["cu_seqlens"] = torch.tensor([0, 7, 12, 40, 41, 60], device=DEVICE)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
    logps = linear_logprobs(hidden, weight, targets, **shift).logps

    def loss(old_logps=None):
        return GRPOLoss()(hidden, weight, targets, advantages=advantages, old_logps=old_logps, **shift).loss

    torch.testing.assert_close(loss(logps.roll(1, -1)), loss())
    assert not torch.isclose(loss(logps), loss(), rtol=1e-2)


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


def rollouts(name):
    """The per-token inputs of a variant, and its advantages."""
    kind, settings = VARIANTS[name]
    hidden, weight, targets, advantages = operands()
    old = linear_logprobs(hidden, weight, targets).logps.float()
    if settings.get("loss_type") != "gmpo" and kind is not RLOOLoss:
        advantages = advantages[:, None].expand(targets.shape).clone()
    inputs = {"advantages": advantages}
    if kind is not REINFORCELoss or settings:
        inputs["old_logps"] = old - 0.1
    if settings.get("sampler_correction"):
        inputs["sampling_logps"] = old + 0.1
    if settings.get("beta"):
        inputs["ref_logps"] = old - 0.2
    return inputs


def of_policy(name, inputs, reduction="mean"):
    kind, settings = VARIANTS[name]
    hidden, weight, targets, _ = operands()
    hidden.requires_grad_()
    weight.requires_grad_()
    out = kind(**settings, reduction=reduction)(hidden, weight, targets, **inputs)
    return out.loss, torch.autograd.grad(out.loss.sum(), (hidden, weight))


@pytest.mark.each_value
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", VARIANTS)
def test_inputs_of_ignored_tokens_are_not_read(name, reduction):
    ignored = operands()[2] == -100

    def filled(number):
        return {
            key: x if x.dim() == 1 else x.masked_fill(ignored, number) for key, x in rollouts(name).items()
        }

    expected, gradients = of_policy(name, filled(0.0), reduction)
    for number in (torch.nan, torch.inf):
        loss, grads = of_policy(name, filled(number), reduction)
        assert torch.equal(loss, expected) and all(map(torch.equal, grads, gradients))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("counted", ["all", "some"])
@pytest.mark.parametrize("name", ["grpo token", "grpo sequence", "corrected kl", "reinforce", "rloo"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rollouts_that_change_before_the_backward_pass(mode, name, counted, reduction):
    kind, settings = VARIANTS[name]
    hidden, weight, targets, _ = operands()
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    targets = targets.clamp(min=0) if counted == "all" else targets
    loss = kind(**settings, reduction=reduction)
    given = rollouts(name)
    expected = loss(hidden, weight, targets, **given).loss.sum()
    expected = torch.autograd.grad(expected, (hidden, weight))
    with mode():
        given = {key: x.clone() for key, x in given.items()}
    value = loss(hidden, weight, targets, **given).loss.sum()
    with mode():
        for x in given.values():
            x.zero_()
    assert all(map(torch.equal, torch.autograd.grad(value, (hidden, weight)), expected))


@pytest.mark.parametrize("change", ["in place", "without autograd", "inference mode"])
def test_rollouts_that_change_before_a_main_gradient_is_computed(change):
    hidden, weight, targets, _ = operands()
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    given = rollouts("grpo token")

    def main_gradient(between) -> Tensor:
        with torch.inference_mode(change == "inference mode"):
            rollout = {key: x.clone() for key, x in given.items()}
        main = torch.zeros_like(weight)
        loss = GRPOLoss()(hidden, weight, targets.clamp(min=0), **rollout, accumulate_into=main).loss
        with torch.inference_mode(change == "inference mode"):
            for x in rollout.values():
                between(x.data if change == "without autograd" else x)
        torch.autograd.grad(loss, hidden)
        return main

    assert torch.equal(main_gradient(lambda x: x.zero_()), main_gradient(lambda x: None))


@pytest.mark.parametrize("into_main", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rollouts_of_the_inference_mode_in_a_graph(reduction, into_main):
    hidden, weight, targets, _ = operands()
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    targets = targets.clamp(min=0)
    loss = GRPOLoss(reduction=reduction)

    def gradients(call, given) -> list[Tensor]:
        main = torch.zeros_like(weight)
        options = {"accumulate_into": main} if into_main else {}
        value = call(hidden, weight, targets, given, options)
        return [main, *torch.autograd.grad(value, hidden if into_main else (hidden, weight))]

    def call(hidden, weight, targets, given, options) -> Tensor:
        return loss(hidden, weight, targets, **given, **options).loss

    given = rollouts("grpo token")
    expected = gradients(call, given)
    with torch.inference_mode():
        given = {key: x.clone() for key, x in given.items()}
    graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    for actual, truth in zip(gradients(graph, given), expected, strict=True):
        torch.testing.assert_close(actual, truth)


def test_sums_of_the_inference_mode():
    """`old_logps` of RLOO as sums of sequences."""
    hidden, weight, targets, _ = operands()
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    with torch.inference_mode():
        sums, advantages = torch.zeros(5, device=DEVICE) - 9, torch.ones(5, device=DEVICE)
    out = RLOOLoss(reduction="none")(hidden, weight, targets, advantages=advantages, old_logps=sums)
    out.loss.sum().backward()
    assert hidden.grad.isfinite().all() and hidden.grad.any()


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
    if kind is not REINFORCELoss or settings:
        inputs["old_logps"] = -torch.rand(4, T, generator=generator).to(DEVICE) * 3
    if settings.get("sampler_correction"):
        inputs["sampling_logps"] = inputs["old_logps"] - 50 + 100 * torch.eye(4, T, device=DEVICE)
    if settings.get("beta"):
        inputs["ref_logps"] = inputs["old_logps"] - 1
    if what == "no advantage":
        inputs["advantages"] = torch.zeros(4, device=DEVICE)
    elif what == "nothing counted":
        inputs["mask"] = torch.zeros(4, T, dtype=torch.int64, device=DEVICE)
    elif what.startswith("far") and "old_logps" in inputs:
        inputs["old_logps"] = inputs["old_logps"] + (100 if what == "far below" else -100)
        if not settings.get("use_bias_correction_kl", True):
            inputs["ref_logps"] = inputs["old_logps"]
    ours = run(
        lambda h, w, t, *, bias: kind(**settings)(h, w, t, bias=bias, **inputs), hidden, weight, targets
    )
    assert all(x.isfinite().all() for x in (ours.value, *ours.grads.values(), *ours.output.metrics.values()))
    if what == "nothing counted":
        assert not ours.value.any() and not ours.grads["hidden"].any()


# -- bad input

# A loss and its options.
BAD_OPTIONS = [
    (
        GRPOLoss,
        {"loss_type": "gspo"},
        "loss_type: expected one of 'grpo'.*'gmpo', got 'gspo'; GSPO is importance_sampling_level='sequence'",
    ),
    (
        GRPOLoss,
        {"importance_sampling_level": "batch"},
        "importance_sampling_level: expected one of 'token'",
    ),
    (GRPOLoss, {"loss_type": "dr_grpo"}, "max_completion_length: expected a positive number"),
    (GRPOLoss, {"epsilon": -0.1}, "epsilon: expected a number >= 0"),
    (GRPOLoss, {"epsilon_high": -0.1}, "epsilon_high: expected"),
    (GRPOLoss, {"delta": 0.0}, "delta: expected a positive"),
    (GRPOLoss, {"delta": 2.0, "loss_type": "sapo"}, "delta: expected None for sapo"),
    (GRPOLoss, {"beta": -0.1}, "beta: expected"),
    (GRPOLoss, {"sapo_temperature_neg": 0.0}, "sapo_temperature: expected"),
    (GRPOLoss, {"top_entropy_quantile": 1.5}, "top_entropy_quantile: expected"),
    (RLOOLoss, {"epsilon": -1.0}, "epsilon: expected"),
]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=DEVICE)


# A loss and its inputs.
BAD_INPUTS = [
    (GRPOLoss(), {"advantages": zeros(3)}, r"advantages: expected targets' shape \(4, 3\) or \(4,\)"),
    (GRPOLoss(), {"old_logps": zeros(4)}, "old_logps: expected targets' shape"),
    (GRPOLoss(off_policy_mask_threshold=0.1), {}, "off_policy_mask_threshold: expected old_logps"),
    (RLOOLoss(), {"advantages": zeros(4, 3)}, r"advantages: expected shape \(4,\)"),
    (GRPOLoss(), {"hidden": zeros(4, 4)}, r"targets: expected shape \(B, T\)"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD_OPTIONS)
def test_options_that_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(("loss", "inputs", "message"), BAD_INPUTS)
def test_inputs_that_are_refused(loss, inputs, message):
    given = {"hidden": zeros(4, 3, 4), "advantages": zeros(4)} | inputs
    hidden = given.pop("hidden")
    targets = zeros(*hidden.shape[:-1]).long()
    with pytest.raises(ValueError, match=message):
        loss(hidden, zeros(7, 4), targets, **given)


@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("supervised", ["all", "some", "none"])
def test_tokens_of_the_highest_entropy(quantile, supervised):
    """Those from the quantile of the supervised tokens on, ties included; with 0 those of the largest one."""
    generator = torch.Generator("cpu").manual_seed(round(100 * quantile))
    loss = GRPOLoss(top_entropy_quantile=quantile, compact=False)
    for n in (1, 5, 11, 40):
        entropy = torch.randint(7, (n,), generator=generator, device="cpu").to(DEVICE, torch.float32)
        targets = torch.randint(2, (n,), generator=generator, device="cpu").to(DEVICE)
        targets = {"all": targets.clamp(min=1), "some": targets, "none": targets * 0}[supervised]
        batch = Batch(torch.where(targets == 0, -100, targets), 2, {}, ignore_index=-100)
        known = torch.where(targets == 0, torch.nan, entropy)
        expected = known >= torch.nanquantile(known, 1 - quantile)
        torch.testing.assert_close(loss.top_entropy_mask(entropy, batch), expected.float())


def test_a_rank_that_is_rounded_up_keeps_the_largest_entropy():
    """As fp32 rounds the number of more than 2^24 tokens: bf16 rounds 259 to 260."""
    entropy = torch.arange(260, device=DEVICE).div(260).bfloat16()
    batch = Batch(torch.zeros(260, dtype=torch.int64, device=DEVICE), 2, {})
    kept = GRPOLoss(top_entropy_quantile=0.0).top_entropy_mask(entropy, batch)
    torch.testing.assert_close(kept, (entropy == entropy.max()).bfloat16())
