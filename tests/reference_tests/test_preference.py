"""Preference losses against numbers computed by hand; see conftest.py."""

import math

import pytest
import torch

from tests import reference

LOG2, LOG3, LOG7 = math.log(2), math.log(3), math.log(7)
IGNORED = -100

# Of two classes, the second has the hidden state as its logit: log 3 gives it 3/4, log 7 gives it 7/8.
WEIGHT = torch.tensor([[0.0], [1.0]], dtype=torch.float64)

# A pair: the chosen sequence has tokens of probability 3/4 and 1/4, the rejected one a token of 7/8.
HIDDEN = torch.tensor([[LOG3, LOG3], [LOG7, LOG7]], dtype=torch.float64).unsqueeze(-1)
TARGETS = torch.tensor([[1, 0], [1, IGNORED]])
CHOSEN, REJECTED = math.log(3 / 4) + math.log(1 / 4), math.log(7 / 8)
# Under the reference every token has a probability of 1/2.
REF_TOKENS = torch.full((2, 2), -LOG2, dtype=torch.float64)
C, R = CHOSEN + 2 * LOG2, REJECTED + LOG2  # log-ratios log 3/4 and log 7/4
BETA = 0.25
EPS = 0.25
TAU = 2.0


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logsigma(x: float) -> float:
    return math.log(sigma(x))


def approx(expected, rel=1e-12):
    return pytest.approx(expected, rel=rel, abs=1e-14)


def dpo(**options) -> tuple[float, dict[str, float]]:
    return values(reference.dpo(HIDDEN, WEIGHT, TARGETS, **{"ref_logps": REF_TOKENS, "beta": BETA} | options))


def values(result) -> tuple[float, dict[str, float]]:
    loss, metrics = result
    assert loss.shape == () and all(
        value.shape == () and not value.requires_grad for value in metrics.values()
    )
    return loss.item(), {name: value.item() for name, value in metrics.items()}


MARGIN = BETA * (C - R)
BLEND = sigma(MARGIN / TAU)
BY_HAND = {
    "sigmoid": -(1 - EPS) * logsigma(MARGIN) - EPS * logsigma(-MARGIN),
    "hinge": 1 - MARGIN,
    "ipo": (C / 2 - R - 2) ** 2,
    "exo_pair": sigma(MARGIN) * math.log(sigma(MARGIN) / (1 - EPS))
    + sigma(-MARGIN) * math.log(sigma(-MARGIN) / EPS),
    "nca_pair": -logsigma(BETA * C) - 0.5 * logsigma(-BETA * C) - 0.5 * logsigma(-BETA * R),
    "robust": ((1 - EPS) * -logsigma(MARGIN) - EPS * -logsigma(-MARGIN)) / (1 - 2 * EPS),
    "bco_pair": -logsigma(BETA * C) - logsigma(-BETA * R),
    "sppo_hard": (C - 2) ** 2 + (R + 2) ** 2,
    "aot": -(1 - EPS) * logsigma(MARGIN) - EPS * logsigma(-MARGIN),
    "aot_unpaired": -(1 - EPS) * logsigma(MARGIN) - EPS * logsigma(-MARGIN),
    "apo_zero": 1 - sigma(BETA * C) + sigma(BETA * R),
    "apo_down": sigma(BETA * C) + 1 - sigma(MARGIN),
    "discopop": -logsigma(MARGIN) * (1 - BLEND) + math.exp(-MARGIN) * BLEND,
    "sft": (math.log(4 / 3) + math.log(4)) / 2,
    "sigmoid_norm": -logsigma(BETA * (C / 2 - R)),
}


@pytest.mark.parametrize("loss_type", BY_HAND)
def test_dpo_by_hand(loss_type):
    loss, _ = dpo(loss_type=loss_type, label_smoothing=EPS, discopop_tau=TAU)
    assert loss == approx(BY_HAND[loss_type])
    assert dpo()[0] == approx(-logsigma(MARGIN))


def test_hinge_is_zero_beyond_the_margin():
    assert dpo(loss_type="hinge", ref_logps=torch.tensor([-9.0, 0.0], dtype=torch.float64))[0] == 0


# A divergence, its coefficient, and what it makes of the chosen and of the rejected log-ratio.
DIVERGENCES = [
    ("forward_kl", 0.5, 1 - 4 / 3, 1 - 4 / 7),
    ("js_divergence", 0.5, math.log(6 / 7), math.log(14 / 11)),
    ("alpha_divergence", 0.5, 2 - 2 * (4 / 3) ** 0.5, 2 - 2 * (4 / 7) ** 0.5),
    ("alpha_divergence", 2.0, -1 / 4, 3 / 4),
    ("alpha_divergence", 1.0, C, R),
]


@pytest.mark.parametrize(("divergence", "coefficient", "chosen", "rejected"), DIVERGENCES)
def test_f_divergences_by_hand(divergence, coefficient, chosen, rejected):
    options = {"f_divergence_type": divergence, "f_alpha_divergence_coef": coefficient}
    loss, metrics = dpo(**options)
    assert loss == approx(-logsigma(BETA * (chosen - rejected)))
    assert metrics["rewards/chosen"] == approx(BETA * C)
    assert dpo(loss_type="ipo", **options)[0] == approx((chosen / 2 - rejected - 2) ** 2)


def test_ld_alpha_by_hand():
    # Of the chosen sequence only the first token lies within the length of the rejected one.
    chosen, ref = math.log(3 / 4) + 0.25 * math.log(1 / 4), -1.25 * LOG2
    loss, metrics = dpo(ld_alpha=0.25)
    assert loss == approx(-logsigma(BETA * (chosen - ref - R)))
    assert metrics["logps/chosen"] == approx(chosen)
    assert metrics["rewards/margins"] == approx(BETA * (chosen - ref - R))
    assert dpo(ld_alpha=0.25, loss_type="ipo")[0] == approx(((chosen - ref) / 2 - R - 2) ** 2)
    # Sums of the reference are taken as they are, the nll is that of all tokens.
    assert dpo(ld_alpha=0.25, ref_logps=torch.tensor([ref, -LOG2], dtype=torch.float64))[0] == approx(loss)
    assert dpo(ld_alpha=0.25, loss_type="sft")[0] == approx(BY_HAND["sft"])


def test_weighting_by_hand():
    # p / Σp² is 6/5 and 2/5 for the chosen tokens, 28/25 for the rejected one.
    weight = (6 / 5 * 2 / 5) ** 0.5 * 28 / 25
    assert dpo(use_weighting=True)[0] == approx(-logsigma(MARGIN) * weight)
    assert dpo(use_weighting=True, loss_type=["hinge", "sft"])[0] == approx(
        (1 - MARGIN + BY_HAND["sft"]) * weight
    )


def test_dpo_metrics_by_hand():
    loss, metrics = dpo()
    assert metrics == approx(
        {
            "rewards/chosen": BETA * C,
            "rewards/rejected": BETA * R,
            "rewards/margins": MARGIN,
            "rewards/accuracies": 0.0,
            "logps/chosen": CHOSEN,
            "logps/rejected": REJECTED,
            "logits/chosen": LOG3 / 2,
            "logits/rejected": LOG7 / 2,
            # The entropies of two tokens with 3/4 and of one with 7/8.
            "entropy": (2 * (math.log(4) - 3 / 4 * LOG3) + math.log(8) - 7 / 8 * LOG7) / 3,
            "mean_token_accuracy": 0.5,
            "nll_loss": BY_HAND["sft"],
        }
    )


def test_accuracies_by_hand():
    # The chosen log-ratio is the larger, the equal and the smaller one: one win.
    hidden, targets = torch.zeros(6, 1, 1, dtype=torch.float64), torch.ones(6, 1, dtype=torch.int64)
    ref = torch.tensor([-2.0, -1.0, -1.0, -1.0, -1.0, -2.0])
    _, metrics = values(reference.dpo(hidden, WEIGHT, targets, ref_logps=ref))
    assert metrics["rewards/accuracies"] == approx(1 / 3)
    # Of equal logits the first is the top.
    targets = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]])
    _, metrics = values(reference.simpo(torch.zeros(2, 4, 1), WEIGHT.float(), targets))
    assert metrics["mean_token_accuracy"] == 0.75


def test_reference_free_by_hand():
    loss, metrics = dpo(reference_free=True, ref_logps=None)
    assert loss == approx(-logsigma(BETA * (CHOSEN - REJECTED)))
    assert metrics["rewards/chosen"] == approx(BETA * CHOSEN)


# Two pairs of one token each: 3/4 preferred to 1/4, and 1/8 to 7/8. Under the reference 1/2, but 1 for the
# second chosen one.
TWO_PAIRS = (
    torch.tensor([LOG3, LOG7, LOG3, LOG7], dtype=torch.float64).reshape(4, 1, 1),
    WEIGHT,
    torch.tensor([[1], [0], [0], [1]]),
)
TWO_PAIRS_REF = torch.tensor([-LOG2, 0.0, -LOG2, -LOG2], dtype=torch.float64)


def two_pairs(loss="dpo", **options) -> float:
    given = {"ref_logps": TWO_PAIRS_REF} if loss == "dpo" else {}
    return values(getattr(reference, loss)(*TWO_PAIRS, beta=BETA, **given, **options))[0]


# Chosen over rejected: 3 and 1/7, under the reference 1 and 2. Policy over reference: 3/2 and 1/8 for the
# chosen ones, 1/2 and 7/4 for the rejected ones.
ODDS = {
    "sigmoid": (3 / 1, (1 / 7) / 2),
    "aot": ((1 / 7) / 1, 3 / 2),
    "aot_unpaired": ((1 / 8) / (1 / 2), (3 / 2) / (7 / 4)),
}


@pytest.mark.parametrize("loss_type", ODDS)
def test_what_aot_compares_by_hand(loss_type):
    expected = -sum(logsigma(BETA * math.log(ratio)) for ratio in ODDS[loss_type]) / 2
    assert two_pairs(loss_type=loss_type) == approx(expected)


SIGMOIDS = -logsigma(BETA * math.log(3)) - logsigma(BETA * math.log(1 / 14))
SFT = math.log(4 / 3) + math.log(8)
REDUCED = {
    "sum": ({"reduction": "sum"}, SIGMOIDS),
    "num_items": ({"num_items": torch.tensor(8)}, SIGMOIDS / 8),
    "num_items of sft": ({"loss_type": "sft", "num_items": 8}, SFT / 8),
    "sum of sft": ({"loss_type": "sft", "reduction": "sum"}, SFT),
    "num_items of two types": ({"loss_type": ["sigmoid", "sft"], "num_items": 8}, SIGMOIDS / 8 + SFT / 2),
    "weights": (
        {"loss_type": ("sigmoid", "sft"), "loss_weights": (0.5, 3.0)},
        0.5 * SIGMOIDS / 2 + 3 * SFT / 2,
    ),
}


@pytest.mark.parametrize(("options", "expected"), REDUCED.values(), ids=REDUCED)
def test_reductions_of_dpo_by_hand(options, expected):
    assert two_pairs(**options) == approx(expected)


def orpo(**options) -> tuple[float, dict[str, float]]:
    return values(reference.orpo(HIDDEN, WEIGHT, TARGETS, beta=BETA, **options))


MEAN_P = (3 / 16) ** 0.5  # geometric mean of the chosen probabilities
LOG_ODDS = math.log(MEAN_P / (1 - MEAN_P)) - LOG7


def test_orpo_by_hand():
    loss, metrics = orpo()
    assert loss == approx(BY_HAND["sft"] - BETA * logsigma(LOG_ODDS))
    assert orpo(num_items=5)[0] == approx(BY_HAND["sft"] - BETA * logsigma(LOG_ODDS) / 5)
    assert orpo(reduction="sum")[0] == approx(2 * BY_HAND["sft"] - BETA * logsigma(LOG_ODDS))
    assert metrics == approx(
        dpo()[1]
        | {
            "rewards/chosen": BETA * math.log(MEAN_P),
            "rewards/rejected": BETA * REJECTED,
            "rewards/margins": BETA * (math.log(MEAN_P) - REJECTED),
            "logps/chosen": math.log(MEAN_P),
            "logps/rejected": REJECTED,
            "log_odds_ratio": logsigma(LOG_ODDS),
            "log_odds_chosen": LOG_ODDS,
        }
    )


def test_orpo_of_prompt_and_completion():
    """The odds are those of the completions, here of probability 1/4 and 7/8."""
    targets = torch.tensor([[IGNORED, 0], [1, IGNORED]])
    nll_targets = torch.tensor([[1, 0], [1, 1]])
    loss, metrics = values(reference.orpo(HIDDEN, WEIGHT, targets, beta=BETA, nll_targets=nll_targets))
    assert loss == approx(BY_HAND["sft"] - BETA * logsigma(-LOG3 - LOG7))
    assert metrics["nll_loss"] == approx(BY_HAND["sft"])


def cpo(**options) -> tuple[float, dict[str, float]]:
    return values(reference.cpo(HIDDEN, WEIGHT, TARGETS, beta=BETA, **options))


SUM_MARGIN, MEAN_MARGIN = BETA * (CHOSEN - REJECTED), BETA * (CHOSEN / 2 - REJECTED)


CPO = {
    "sigmoid": ({}, -logsigma(SUM_MARGIN)),
    "smoothed": (
        {"label_smoothing": EPS},
        -(1 - EPS) * logsigma(SUM_MARGIN) - EPS * logsigma(-SUM_MARGIN),
    ),
    "hinge": ({"loss_type": "hinge"}, 1 - SUM_MARGIN),
    "ipo": ({"loss_type": "ipo"}, (MEAN_MARGIN / BETA - 2) ** 2),
    "simpo": ({"loss_type": "simpo"}, -logsigma(MEAN_MARGIN - 0.5)),
    "simpo_gamma": ({"loss_type": "simpo", "simpo_gamma": 1.5}, -logsigma(MEAN_MARGIN - 1.5)),
    "simpo, smoothed": (
        {"loss_type": "simpo", "label_smoothing": EPS},
        -(1 - EPS) * logsigma(MEAN_MARGIN - 0.5) - EPS * logsigma(0.5 - MEAN_MARGIN),
    ),
    # p^-2 is (16/3)² and (8/7)² for the products of the probabilities, 16/3 and (8/7)² for the squares of
    # their means.
    "alpha": ({"alpha": 2.0}, -logsigma(BETA * ((8 / 7) ** 2 - (16 / 3) ** 2) / 2)),
    "negative alpha": ({"alpha": -1.0}, -logsigma(BETA * (3 / 16 - 7 / 8))),
    "alphapo": (
        {"alpha": 2.0, "loss_type": "simpo"},
        -logsigma(BETA * ((8 / 7) ** 2 - 16 / 3) / 2 - 0.5),
    ),
}


@pytest.mark.parametrize(("options", "expected"), CPO.values(), ids=CPO)
def test_cpo_by_hand(options, expected):
    assert cpo(**options)[0] == approx(expected + BY_HAND["sft"])
    assert cpo(**options, cpo_alpha=0.25)[0] == approx(expected + 0.25 * BY_HAND["sft"])
    assert cpo(**options, num_items=5)[0] == approx(expected / 5 + BY_HAND["sft"])
    assert cpo(**options, reduction="sum")[0] == approx(expected + 2 * BY_HAND["sft"])


def test_two_pairs_of_orpo_and_cpo_by_hand():
    # Odds of 3 against 1/3 and of 1/7 against 7.
    odds = logsigma(math.log(9)) + logsigma(math.log(1 / 49))
    assert two_pairs("orpo") == approx(SFT / 2 - BETA * odds / 2)
    margins = logsigma(BETA * LOG3) + logsigma(-BETA * LOG7)
    assert two_pairs("cpo") == approx(SFT / 2 - margins / 2)


OF_CPO = [
    ({}, CHOSEN, CHOSEN),
    ({"loss_type": "simpo"}, CHOSEN / 2, CHOSEN / 2),
    ({"alpha": 2.0}, CHOSEN, (1 - (16 / 3) ** 2) / 2),
]


@pytest.mark.parametrize(("options", "logp", "reward"), OF_CPO, ids=str)
def test_cpo_metrics_by_hand(options, logp, reward):
    metrics = cpo(**options)[1]
    assert metrics["logps/chosen"] == approx(logp)
    assert metrics["rewards/chosen"] == approx(BETA * reward)
    assert metrics.keys() == dpo()[1].keys()


def test_simpo_by_hand():
    simpo = values(reference.simpo(HIDDEN, WEIGHT, TARGETS))[0]
    assert simpo == approx(-logsigma(2 * (CHOSEN / 2 - REJECTED) - 0.5))
    simpo = values(reference.simpo(HIDDEN, WEIGHT, TARGETS, beta=BETA, gamma=1.5, num_items=5))[0]
    assert simpo == approx(-logsigma(MEAN_MARGIN - 1.5) / 5)


def kto(labels=(True, False), **options) -> tuple[float, dict[str, float]]:
    given = {"ref_logps": REF_TOKENS, "beta": BETA, "labels": torch.tensor(labels)}
    if options.get("loss_type") != "apo_zero_unpaired":
        given["kl"] = 0.0
    return values(reference.kto(HIDDEN, WEIGHT, TARGETS, **given | options))


KTO = {
    "kto": ({}, (1 - sigma(BETA * C), 1 - sigma(-BETA * R))),
    "kl": ({"kl": 0.75}, (1 - sigma(BETA * (C - 0.75)), 1 - sigma(BETA * (0.75 - R)))),
    "negative kl": ({"kl": torch.tensor(-0.75)}, (1 - sigma(BETA * C), 1 - sigma(-BETA * R))),
    "apo": ({"loss_type": "apo_zero_unpaired"}, (1 - sigma(BETA * C), sigma(BETA * R))),
    "swapped": ({"labels": (False, True)}, (1 - sigma(-BETA * C), 1 - sigma(BETA * R))),
    "desirable_weight": ({"desirable_weight": 3.0}, (3 - 3 * sigma(BETA * C), 1 - sigma(-BETA * R))),
    "undesirable_weight": ({"undesirable_weight": 3.0}, (1 - sigma(BETA * C), 3 - 3 * sigma(-BETA * R))),
}


@pytest.mark.parametrize(("options", "expected"), KTO.values(), ids=KTO)
def test_kto_by_hand(options, expected):
    assert kto(**options)[0] == approx(sum(expected) / 2)
    assert kto(**options, num_items=5)[0] == approx(sum(expected) / 5)
    assert kto(**options, reduction="sum")[0] == approx(sum(expected))


def test_kto_metrics_by_hand():
    shared = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "entropy",
    )
    shared += ("logits/chosen", "logits/rejected")
    of_pairs = dpo()[1]
    assert kto(kl=0.75)[1] == approx({name: of_pairs[name] for name in shared} | {"kl": 0.75})
    assert kto(kl=-0.75)[1]["kl"] == 0
    assert kto(loss_type="apo_zero_unpaired")[1]["kl"] == 0


def test_kto_with_one_side_only():
    loss, metrics = kto(labels=(False, False))
    assert loss == approx((sigma(BETA * C) + sigma(BETA * R)) / 2)
    assert metrics["rewards/rejected"] == approx(BETA * (C + R) / 2)
    assert metrics["logits/rejected"] == approx((2 * LOG3 / 2 + LOG7 / 2) / 3)
    for name in ("rewards/chosen", "logps/chosen", "logits/chosen", "rewards/margins"):
        assert metrics[name] == 0


def test_odds_of_a_certain_sequence_are_bounded():
    hidden = torch.tensor([50.0, 0.0], dtype=torch.float64).reshape(2, 1, 1)
    metrics = values(reference.orpo(hidden, WEIGHT, torch.ones(2, 1, dtype=torch.int64)))[1]
    # The rejected sequence has odds of 1.
    assert metrics["log_odds_chosen"] == approx(math.log(1e7), rel=1e-7)
