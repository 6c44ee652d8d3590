"""Policy losses against numbers computed by hand; see conftest.py."""

import math

import pytest
import torch
from torch import Tensor

from tests import reference

# Every position has the logits (0, log 3). There are two sequences, of two tokens and of one. The targets'
# probabilities are 3/4, 1/4 and 1/4 under the policy, and 1/2 under the old policy.
WEIGHT = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
HIDDEN = torch.ones(2, 2, 1, dtype=torch.float64)
TARGETS = torch.tensor([[1, 0], [0, -100]])
OLD = torch.full((2, 2), -math.log(2), dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -2.0])
PER_TOKEN = torch.tensor([[1.0, -1.0], [2.0, 9.0]])
RATIOS = (1.5, 0.5, 0.5)
ENTROPY = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
# exp(d) - d - 1 with a reference model under which every target has the probability 1/2.
KL = (2 / 3 - math.log(2 / 3) - 1, 2 - math.log(2) - 1)
LP = (math.log(3 / 4), math.log(1 / 4))
S = math.sqrt(1.5 * 0.5)  # the ratio of the first sequence; that of the second is 0.5


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def phi(w: float, k: float, decay: float) -> float:
    return w**k * math.exp(decay * (1 - w))


def by_hand(loss="grpo", *, hidden=HIDDEN, **options):
    options = {"advantages": ADVANTAGES, "old_logps": OLD, "max_completion_length": 8, **options}
    return getattr(reference, loss)(hidden, WEIGHT, TARGETS, **options)


SEQUENCE = {"importance_sampling_level": "sequence"}
KL_CORRECTED = {"beta": 0.1, "ref_logps": OLD}
KL_TO = KL_CORRECTED | {"use_bias_correction_kl": False}
OF_TOKENS, OF_SEQUENCES = torch.tensor([[0.5, 2.0], [3.0, 9.0]]), torch.tensor([[0.5], [2.0]])
# Per-token loss terms -min(r A, clip(r) A): -1.2 (r = 1.5 clipped to 1.2), -0.5 (r = 0.5), and 1.6 = 2 * 0.8
# (r = 0.5 clipped to 0.8). Sequence-level ratios: sqrt(3/4), inside the clip range, and 1/2, clipped to 0.8.
SUM = -1.2 - 0.5 + 1.6
GRPO = {
    "the default": ({}, SUM / 3),
    "grpo": ({"loss_type": "grpo"}, ((-1.2 - 0.5) / 2 + 1.6) / 2),
    "bnpo": ({"loss_type": "bnpo"}, SUM / 3),
    "dapo": ({"loss_type": "dapo"}, SUM / 3),
    "dr_grpo": ({"loss_type": "dr_grpo"}, SUM / (2 * 8)),
    "luspo of tokens": ({"loss_type": "luspo"}, SUM / 2),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        (-1.1 * LP[0] - 0.5 * LP[1] + 2 * 0.5 * LP[1]) / 3,
    ),
    "sapo": (
        {"loss_type": "sapo"},
        (-4 * (sigmoid(0.5) + sigmoid(-0.5)) / 2 + 2 * 4 / 1.05 * sigmoid(1.05 * -0.5)) / 2,
    ),
    "vespo": ({"loss_type": "vespo"}, (-phi(0.75, 2, 3) * (LP[0] + LP[1]) + 2 * phi(0.5, 3, 2) * LP[1]) / 3),
    "grpo, sequence": (SEQUENCE | {"loss_type": "grpo"}, (-S + 1.6) / 2),
    "dapo, sequence": (SEQUENCE | {"loss_type": "dapo"}, (-2 * S + 1.6) / 3),
    "luspo, sequence": (SEQUENCE | {"loss_type": "luspo"}, (-2 * S + 1.6) / 2),
    "cispo, sequence": (
        SEQUENCE | {"loss_type": "cispo", "epsilon_high": 0.7},
        (-0.7 * (LP[0] + LP[1]) + 2 * 0.5 * LP[1]) / 3,
    ),
    "sapo, sequence": (
        SEQUENCE | {"loss_type": "sapo"},
        (-4 * sigmoid(S - 1) + 2 * 4 / 1.05 * sigmoid(1.05 * -0.5)) / 2,
    ),
    "epsilon": ({"epsilon": 0.6}, (-1.5 - 0.5 + 1.0) / 3),
    "epsilon_high": ({"epsilon_high": 0.3}, (-1.3 - 0.5 + 1.6) / 3),
    # Only where the advantage is negative does the upper clip leave the ratio unbounded.
    "no delta": ({"advantages": -ADVANTAGES.abs()}, (1.5 + 0.8 + 1.6) / 3),
    "delta": ({"advantages": -ADVANTAGES.abs(), "delta": 1.4}, (1.4 + 0.8 + 1.6) / 3),
    "advantages of tokens": ({"advantages": PER_TOKEN}, (-1.2 + 0.8 - 2 * 0.5) / 3),
    "on policy": ({"old_logps": None}, (-1 - 1 + 2) / 3),
    "kl": (KL_TO, (SUM + 0.1 * (KL[0] + 2 * KL[1])) / 3),
    "kl, corrected": (
        KL_CORRECTED,
        (SUM + 0.1 * (1.5 * KL[0] + 2 * 0.5 * KL[1])) / 3,
    ),
    "entropy of tokens": ({"entropy_coef": 0.3, "loss_type": "luspo"}, SUM / 2 - 0.3 * ENTROPY),
    "weights of sequences": ({"importance_weights": OF_SEQUENCES}, (-0.6 - 0.25 + 3.2) / 3),
    "weights of tokens": ({"importance_weights": OF_TOKENS}, (-0.6 - 1 + 4.8) / 3),
    # Tokens' own correction enters w: 0.75 * 0.5 * 2 and 0.5 * 3. One for a whole sequence enters once.
    "vespo, weights of tokens": (
        {"loss_type": "vespo", "importance_weights": OF_TOKENS},
        (-phi(0.75, 2, 3) * (LP[0] + LP[1]) + 2 * phi(1.5, 3, 2) * LP[1]) / 3,
    ),
    "vespo, weights of sequences": (
        {"loss_type": "vespo", "importance_weights": OF_SEQUENCES},
        (-phi(0.375, 2, 3) * (LP[0] + LP[1]) + 2 * phi(1.0, 3, 2) * LP[1]) / 3,
    ),
    # The second sequence is log 2 likelier under the old policy, and its advantage is negative.
    "off policy": (
        KL_TO | {"off_policy_mask_threshold": 0.69},
        (-1.2 - 0.5 + 0.1 * (KL[0] + 2 * KL[1])) / 3,
    ),
    "on policy enough": ({"off_policy_mask_threshold": 0.70}, SUM / 3),
    # Here it is the first, of mean -log(3/4) / 2 = 0.14.
    "mean drift": (
        {"off_policy_mask_threshold": 0.15, "advantages": -ADVANTAGES},
        (1.5 + 0.8 - 2 * 0.5) / 3,
    ),
    "mean drift, over": ({"off_policy_mask_threshold": 0.14, "advantages": -ADVANTAGES}, -2 * 0.5 / 3),
    "num_items": ({"num_items": torch.tensor(10)}, SUM / 10),
    "num_items, grpo": ({"num_items": 10, "loss_type": "grpo"}, ((-1.2 - 0.5) / 2 + 1.6) / 10),
    "num_items, dr_grpo": ({"num_items": 10, "loss_type": "dr_grpo"}, SUM / (10 * 8)),
    "num_items, not of entropy": ({"num_items": 10, "entropy_coef": 0.3}, SUM / 10 - 0.3 * ENTROPY),
    "mask": ({"mask": torch.tensor([[1, 0], [1, 1]])}, (-1.2 + 1.6) / 2),
}


@pytest.mark.parametrize(("options", "expected"), GRPO.values(), ids=GRPO)
def test_grpo_by_hand(options, expected):
    loss, _, logps = by_hand(**options)
    assert loss.item() == pytest.approx(expected, rel=1e-6)  # fp32 advantages and weights
    assert logps.flatten().tolist() == pytest.approx([LP[0], LP[1] if "mask" not in options else 0, LP[1], 0])


def test_high_entropy_tokens_by_hand():
    """Entropies 0.69 (a head of zeros), 0.56 and 0.36 (logits of log 9): the quantile is of the tokens that
    count."""
    hidden = torch.tensor([[[0.0], [1.0]], [[2.0], [0.0]]], dtype=torch.float64)
    entropies = [math.log(2), ENTROPY, 0.9 * math.log(10 / 9) + 0.1 * math.log(10)]
    losses = [-1.0, -0.5, 0.8 * 2]
    old = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64).log()
    # Quantile 0.4 of three lies between the lowest two.
    for top, kept in ((1.0, 3), (0.6, 2), (0.4, 1), (0.0, 1)):
        loss, metrics, _ = by_hand(hidden=hidden, old_logps=old, top_entropy_quantile=top, entropy_coef=0.3)
        assert loss.item() == pytest.approx(sum(losses[:kept]) / 3 - 0.3 * sum(entropies[:kept]) / kept)
        assert metrics["entropy"].item() == pytest.approx(sum(entropies) / 3)


def test_high_entropy_leaves_the_kl():
    hidden = torch.tensor([[[0.0], [1.0]], [[2.0], [0.0]]], dtype=torch.float64)
    loss, *_ = by_hand(hidden=hidden, top_entropy_quantile=0.0, **KL_TO)
    assert loss.item() == pytest.approx((-1.0 + 0.1 * (KL[1] + 5 - math.log(5) - 1)) / 3)


METRICS = {
    "tokens": (
        {},
        {"clip_ratio/low_mean": 1 / 3, "clip_ratio/high_mean": 1 / 3, "clip_ratio/region_mean": 2 / 3},
    ),
    "sequences": (
        SEQUENCE,
        {
            "clip_ratio/low_mean": 1 / 2,
            "clip_ratio/high_mean": 0,
            "clip_ratio/region_mean": 1 / 2,
            "importance_ratio": (2 * S + 0.5) / 3,
        },
    ),
    "tokens of sequences": (
        SEQUENCE | {"advantages": torch.tensor([[1.0, 1.0], [-2.0, 0.0]])},
        {"clip_ratio/low_mean": 1 / 3, "importance_ratio": (2 * S + 0.5) / 3},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, {"cispo_clip_ratio": 1 / 3}),
    # Not where the advantage is negative, though the ratio is bounded there too.
    "cispo, other side": (
        {"loss_type": "cispo", "epsilon_high": 1.1, "advantages": -ADVANTAGES},
        {"cispo_clip_ratio": 0},
    ),
    "vespo": ({"loss_type": "vespo"}, {"vespo/phi_seq_mean": (phi(0.75, 2, 3) + phi(0.5, 3, 2)) / 2}),
    "kl": (KL_TO, {"kl": (KL[0] + 2 * KL[1]) / 3}),
    "kl, corrected": (KL_CORRECTED, {"kl": (1.5 * KL[0] + KL[1]) / 3}),
    # The metrics look at the ratio that delta bounds, importance_ratio does not.
    "delta": ({"delta": 1.1}, {"clip_ratio/high_mean": 0}),
}


@pytest.mark.parametrize(("options", "expected"), METRICS.values(), ids=METRICS)
def test_metrics_by_hand(options, expected):
    _, metrics, _ = by_hand(**options)
    expected = {"entropy": ENTROPY, "importance_ratio": sum(RATIOS) / 3, **expected}
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected)
    assert not any(x.requires_grad for x in metrics.values())


# Ratios of whole sequences: 1.5 * 0.5 and 0.5, both below 0.8; only the second is clipped.
RLOO = {
    "plain": ({}, (-0.75 + 1.6) / 2),
    "old sums": ({"old_logps": OLD.sum(1) / torch.tensor([1, 2])}, (-0.75 + 1.6) / 2),
    "high": ({"old_logps": torch.tensor([[-3.0], [-3.0]])}, (-1.2 + 2 * math.exp(LP[1] + 3)) / 2),
    "epsilon_high": ({"old_logps": torch.tensor([-3.0, 0.0]), "epsilon_high": 0.5}, (-1.5 + 1.6) / 2),
    "epsilon": ({"epsilon": 0.6}, (-0.75 + 1.0) / 2),
    "on policy": ({"old_logps": None}, (-1 + 2) / 2),
    "num_items": ({"num_items": 5}, (-0.75 + 1.6) / 5),
    "none": ({"reduction": "none"}, [-0.75, 1.6]),
}


@pytest.mark.parametrize(("options", "expected"), RLOO.values(), ids=RLOO)
def test_rloo_by_hand(options, expected):
    given = {"advantages": ADVANTAGES, "old_logps": OLD, **options}
    loss, metrics, _ = reference.rloo(HIDDEN, WEIGHT, TARGETS, **given)
    assert loss.tolist() == pytest.approx(expected)
    if not options:
        assert {name: x.item() for name, x in metrics.items()} == pytest.approx(
            {
                "entropy": ENTROPY,
                "importance_ratio": (2 * 0.75 + 0.5) / 3,
                "clip_ratio/low_mean": 1 / 2,
                "clip_ratio/high_mean": 0,
                "clip_ratio/region_mean": 1 / 2,
            }
        )


def test_ppo_and_reinforce_by_hand():
    loss, *_ = by_hand("ppo", advantages=PER_TOKEN, epsilon=0.3)
    assert loss.item() == pytest.approx((-1.3 + 0.7 - 2 * 0.5) / 3)
    loss, metrics, _ = reference.reinforce(HIDDEN, WEIGHT, TARGETS, advantages=PER_TOKEN)
    assert loss.item() == pytest.approx((-LP[0] + LP[1] - 2 * LP[1]) / 3)
    assert metrics["entropy"].item() == pytest.approx(ENTROPY)


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sequence_ratio_has_the_gradient_of_every_token():
    """d s / d logp_t = s / length, with the ratio not clipped: -A s / length over the two sequences of the
    mean."""
    logits = HIDDEN * WEIGHT.T  # the identity as a head, so that the hidden states are the logits
    logits = logits.detach().requires_grad_()
    eye = torch.eye(2, dtype=torch.float64)
    loss, *_ = reference.grpo(
        logits,
        eye,
        TARGETS,
        advantages=ADVANTAGES,
        old_logps=OLD,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )
    (grad,) = torch.autograd.grad(loss, logits)
    # Gradients of logp at the target's logit are 1 - p.
    assert grad[0, :, 1].tolist() == pytest.approx([-S / 2 * (1 - 3 / 4) / 2, S / 2 * (3 / 4) / 2])
    assert (grad[1] == 0).all()  # clipped


@pytest.mark.parametrize("loss", ["grpo", "rloo"])
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [(100, -2, 2 * math.exp(80)), (100, 2, -2.4), (-100, -2, 1.6), (-100, 2, -2 * math.exp(-80))],
)
def test_ratio_is_bounded_by_exp_80(loss, log_ratio, advantage, expected):
    hidden = HIDDEN[:1, :1].clone().requires_grad_()
    value, *_ = getattr(reference, loss)(
        hidden,
        WEIGHT,
        TARGETS[:1, :1],
        advantages=tensor([advantage]),
        old_logps=tensor([[LP[0] - log_ratio]]),
    )
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.grad(value, hidden)[0].item() == 0


def test_kl_is_bounded_above_only():
    hidden = HIDDEN[:1, :1].clone().requires_grad_()
    for d, expected, slope in ((100, math.exp(80) - 81, 0), (-100, 99, 1), (1, math.e - 2, 1 - math.e)):
        value, *_ = reference.grpo(
            hidden,
            WEIGHT,
            TARGETS[:1, :1],
            advantages=tensor([0]),
            beta=1.0,
            ref_logps=tensor([[LP[0] + d]]),
            use_bias_correction_kl=False,
        )
        assert value.item() == pytest.approx(expected)
        (grad,) = torch.autograd.grad(value, hidden)
        assert grad.item() == pytest.approx(slope * math.log(3) / 4)  # d logp / d hidden = (1 - 3/4) log 3
