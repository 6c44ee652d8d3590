"""The preference losses of the reference against numbers computed by hand and against TRL's own code on the
same tensors."""

import contextlib
import importlib
import math
from collections import defaultdict
from types import SimpleNamespace

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
BETA = 0.5
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
    "sigmoid": -logsigma(MARGIN),
    "hinge": 1 - MARGIN,
    "ipo": (C / 2 - R - 1) ** 2,
    "exo_pair": sigma(MARGIN) * math.log(sigma(MARGIN) / (1 - EPS))
    + sigma(-MARGIN) * math.log(sigma(-MARGIN) / EPS),
    "nca_pair": -logsigma(BETA * C) - 0.5 * logsigma(-BETA * C) - 0.5 * logsigma(-BETA * R),
    "robust": ((1 - EPS) * -logsigma(MARGIN) - EPS * -logsigma(-MARGIN)) / (1 - 2 * EPS),
    "bco_pair": -logsigma(BETA * C) - logsigma(-BETA * R),
    "sppo_hard": (C - 1) ** 2 + (R + 1) ** 2,
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
    smoothing = 0.0 if loss_type == "sigmoid" else EPS
    assert dpo(loss_type=loss_type, label_smoothing=smoothing, discopop_tau=TAU)[0] == approx(
        BY_HAND[loss_type]
    )


def test_smoothed_sigmoid_by_hand():
    assert dpo(label_smoothing=EPS)[0] == approx(-(1 - EPS) * logsigma(MARGIN) - EPS * logsigma(-MARGIN))


def test_hinge_is_zero_beyond_the_margin():
    assert dpo(loss_type="hinge", ref_logps=torch.tensor([-9.0, 0.0], dtype=torch.float64))[0] == 0


@pytest.mark.parametrize(
    ("divergence", "coefficient", "chosen", "rejected"),
    [
        pytest.param("forward_kl", 0.5, 1 - 4 / 3, 1 - 4 / 7, id="forward_kl"),
        pytest.param("js_divergence", 0.5, math.log(6 / 7), math.log(14 / 11), id="js"),
        pytest.param("alpha_divergence", 0.5, 2 - 2 * (4 / 3) ** 0.5, 2 - 2 * (4 / 7) ** 0.5, id="alpha"),
        pytest.param("alpha_divergence", 2.0, -1 / 4, 3 / 4, id="alpha_2"),
        pytest.param("alpha_divergence", 1.0, C, R, id="alpha_1"),
    ],
)
def test_f_divergences_by_hand(divergence, coefficient, chosen, rejected):
    options = {"f_divergence_type": divergence, "f_alpha_divergence_coef": coefficient}
    loss, metrics = dpo(**options)
    assert loss == approx(-logsigma(BETA * (chosen - rejected)))
    assert metrics["rewards/chosen"] == approx(BETA * C)
    assert dpo(loss_type="ipo", **options)[0] == approx((chosen / 2 - rejected - 1) ** 2)


def test_ld_alpha_by_hand():
    # Of the chosen sequence only the first token lies within the length of the rejected one.
    chosen, ref = math.log(3 / 4) + 0.25 * math.log(1 / 4), -1.25 * LOG2
    loss, metrics = dpo(ld_alpha=0.25)
    assert loss == approx(-logsigma(BETA * (chosen - ref - R)))
    assert metrics["logps/chosen"] == approx(chosen)
    assert metrics["rewards/margins"] == approx(BETA * (chosen - ref - R))
    assert dpo(ld_alpha=0.25, loss_type="ipo")[0] == approx(((chosen - ref) / 2 - R - 1) ** 2)
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


def test_weights_of_wpo_are_not_differentiated():
    hidden = HIDDEN.clone().requires_grad_()
    options = {"ref_logps": REF_TOKENS, "beta": BETA}
    plain, weighted = (
        reference.dpo(hidden, WEIGHT, TARGETS, use_weighting=on, **options)[0] for on in (False, True)
    )
    (gradient,) = torch.autograd.grad(weighted, hidden)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(plain, hidden)[0] * (weighted / plain).detach(), rtol=1e-12, atol=0
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


def test_accuracy_counts_wins_and_no_ties():
    # The chosen log-ratio is the larger, the equal and the smaller one.
    hidden, targets = torch.zeros(6, 1, 1, dtype=torch.float64), torch.ones(6, 1, dtype=torch.int64)
    ref = torch.tensor([-2.0, -1.0, -1.0, -1.0, -1.0, -2.0])
    assert values(reference.dpo(hidden, WEIGHT, targets, ref_logps=ref))[1]["rewards/accuracies"] == approx(
        1 / 3
    )


def test_of_equal_logits_the_first_is_the_top():
    targets = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]])
    metrics = values(reference.simpo(torch.zeros(2, 4, 1), WEIGHT.float(), targets))[1]
    assert metrics["mean_token_accuracy"] == 0.75


def test_reference_free_by_hand():
    for options in ({}, {"ref_logps": None}):
        loss, metrics = dpo(reference_free=True, **options)
        assert loss == approx(-logsigma(BETA * (CHOSEN - REJECTED)))
        assert metrics["rewards/chosen"] == approx(BETA * CHOSEN)


def test_no_reference_is_an_error():
    with pytest.raises(ValueError, match="ref_logps"):
        dpo(ref_logps=None)


# Two pairs of one token each: 3/4 preferred to 1/4, and 1/8 to 7/8. Under the reference 1/2, but 1 for the
# second chosen one.
TWO_PAIRS = (
    torch.tensor([LOG3, LOG7, LOG3, LOG7], dtype=torch.float64).reshape(4, 1, 1),
    WEIGHT,
    torch.tensor([[1], [0], [0], [1]]),
)
TWO_PAIRS_REF = torch.tensor([-LOG2, 0.0, -LOG2, -LOG2], dtype=torch.float64)


def two_pairs(function=reference.dpo, **options) -> float:
    return values(
        function(
            *TWO_PAIRS,
            **({"ref_logps": TWO_PAIRS_REF} if function is reference.dpo else {}),
            beta=BETA,
            **options,
        )
    )[0]


@pytest.mark.parametrize(
    ("loss_type", "odds"),
    [
        # Chosen over rejected: 3 and 1/7, under the reference 1 and 2.
        pytest.param("sigmoid", (3 / 1, (1 / 7) / 2), id="paired"),
        pytest.param("aot", ((1 / 7) / 1, 3 / 2), id="aot"),
        # Policy over reference: 3/2 and 1/8 for the chosen ones, 1/2 and 7/4 for the rejected ones.
        pytest.param("aot_unpaired", ((1 / 8) / (1 / 2), (3 / 2) / (7 / 4)), id="aot_unpaired"),
    ],
)
def test_what_aot_compares_by_hand(loss_type, odds):
    assert two_pairs(loss_type=loss_type) == approx(
        -sum(logsigma(BETA * math.log(ratio)) for ratio in odds) / 2
    )


SIGMOIDS = [-logsigma(BETA * math.log(3)), -logsigma(BETA * math.log(1 / 14))]
SFT = [math.log(4 / 3), math.log(8)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, sum(SIGMOIDS) / 2, id="mean"),
        pytest.param({"reduction": "sum"}, sum(SIGMOIDS), id="sum"),
        pytest.param({"num_items": 8}, sum(SIGMOIDS) / 8, id="num_items"),
        pytest.param({"num_items": torch.tensor(8)}, sum(SIGMOIDS) / 8, id="num_items_tensor"),
        pytest.param({"loss_type": "sft", "num_items": 8}, sum(SFT) / 2, id="sft_num_items"),
        pytest.param({"loss_type": "sft", "reduction": "sum"}, sum(SFT), id="sft_sum"),
        pytest.param(
            {"loss_type": ["sigmoid", "sft"], "num_items": 8}, sum(SIGMOIDS) / 8 + sum(SFT) / 2, id="list"
        ),
        pytest.param(
            {"loss_type": ("sigmoid", "sft"), "loss_weights": (0.5, 3.0)},
            0.5 * sum(SIGMOIDS) / 2 + 3 * sum(SFT) / 2,
            id="weights",
        ),
    ],
)
def test_reductions_of_dpo_by_hand(options, expected):
    assert two_pairs(**options) == approx(expected)


def test_one_weight_per_loss_type():
    with pytest.raises(ValueError, match="zip"):
        two_pairs(loss_type=["sigmoid", "sft"], loss_weights=[1.0])


def orpo(**options) -> tuple[float, dict[str, float]]:
    return values(reference.orpo(HIDDEN, WEIGHT, TARGETS, beta=BETA, **options))


MEAN_P = (3 / 16) ** 0.5  # geometric mean of the chosen probabilities
LOG_ODDS = math.log(MEAN_P / (1 - MEAN_P)) - LOG7


def test_orpo_by_hand():
    loss, metrics = orpo()
    assert loss == approx(BY_HAND["sft"] - BETA * logsigma(LOG_ODDS))
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Prompt and response: the odds stay those of the targets.
        pytest.param(
            {"nll_targets": torch.tensor([[0, 0], [0, 0]])},
            math.log(4) - BETA * logsigma(LOG_ODDS),
            id="nll_targets",
        ),
        pytest.param(
            {"nll_targets": torch.tensor([[IGNORED, 0], [1, 1]])},
            math.log(4) - BETA * logsigma(LOG_ODDS),
            id="masked",
        ),
        pytest.param({"num_items": 5}, BY_HAND["sft"] - BETA * logsigma(LOG_ODDS) / 5, id="num_items"),
        pytest.param({"reduction": "sum"}, 2 * BY_HAND["sft"] - BETA * logsigma(LOG_ODDS), id="sum"),
    ],
)
def test_reductions_of_orpo_by_hand(options, expected):
    assert orpo(**options)[0] == approx(expected)


def test_orpo_reports_the_nll_of_its_own_targets():
    assert orpo(nll_targets=torch.tensor([[IGNORED, 0], [1, 1]]))[1]["nll_loss"] == approx(math.log(4))


def test_two_pairs_of_orpo_by_hand():
    # Odds of 3 against 1/3 and of 1/7 against 7.
    log_odds = (math.log(9), math.log(1 / 49))
    expected = sum(SFT) / 2 - BETA * (logsigma(log_odds[0]) + logsigma(log_odds[1])) / 2
    assert two_pairs(reference.orpo) == approx(expected)


def cpo(**options) -> tuple[float, dict[str, float]]:
    return values(reference.cpo(HIDDEN, WEIGHT, TARGETS, beta=BETA, **options))


SUM_MARGIN, MEAN_MARGIN = BETA * (CHOSEN - REJECTED), BETA * (CHOSEN / 2 - REJECTED)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, -logsigma(SUM_MARGIN), id="sigmoid"),
        pytest.param(
            {"label_smoothing": EPS},
            -(1 - EPS) * logsigma(SUM_MARGIN) - EPS * logsigma(-SUM_MARGIN),
            id="smoothed",
        ),
        pytest.param({"loss_type": "hinge"}, 1 - SUM_MARGIN, id="hinge"),
        pytest.param({"loss_type": "ipo"}, (MEAN_MARGIN / BETA - 1) ** 2, id="ipo"),
        pytest.param({"loss_type": "simpo"}, -logsigma(MEAN_MARGIN - 0.5), id="simpo"),
        pytest.param({"loss_type": "simpo", "simpo_gamma": 1.5}, -logsigma(MEAN_MARGIN - 1.5), id="gamma"),
        pytest.param(
            {"loss_type": "simpo", "label_smoothing": EPS},
            -(1 - EPS) * logsigma(MEAN_MARGIN - 0.5) - EPS * logsigma(0.5 - MEAN_MARGIN),
            id="smoothed_simpo",
        ),
        # p^-2 is (16/3)² and (8/7)² for the products of the probabilities, 16/3 and (8/7)² for the squares of
        # their means.
        pytest.param({"alpha": 2.0}, -logsigma(BETA * ((8 / 7) ** 2 - (16 / 3) ** 2) / 2), id="alpha"),
        pytest.param({"alpha": -1.0}, -logsigma(BETA * (3 / 16 - 7 / 8)), id="negative_alpha"),
        pytest.param(
            {"alpha": 2.0, "loss_type": "simpo"},
            -logsigma(BETA * ((8 / 7) ** 2 - 16 / 3) / 2 - 0.5),
            id="alphapo",
        ),
    ],
)
def test_cpo_by_hand(options, expected):
    assert cpo(**options)[0] == approx(expected + BY_HAND["sft"])
    assert cpo(**options, cpo_alpha=0.25)[0] == approx(expected + 0.25 * BY_HAND["sft"])
    assert cpo(**options, num_items=5)[0] == approx(expected / 5 + BY_HAND["sft"])
    assert cpo(**options, reduction="sum")[0] == approx(expected + 2 * BY_HAND["sft"])


def test_two_pairs_of_cpo_by_hand():
    expected = -(logsigma(BETA * LOG3) + logsigma(-BETA * LOG7)) / 2
    assert two_pairs(reference.cpo) == approx(expected + sum(SFT) / 2)


@pytest.mark.parametrize(
    ("options", "logp", "reward"),
    [
        pytest.param({}, CHOSEN, CHOSEN, id="sum"),
        pytest.param({"loss_type": "simpo"}, CHOSEN / 2, CHOSEN / 2, id="mean"),
        pytest.param({"alpha": 2.0}, CHOSEN, (1 - (16 / 3) ** 2) / 2, id="alpha"),
    ],
)
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
    return values(reference.kto(HIDDEN, WEIGHT, TARGETS, **given | options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, (1 - sigma(BETA * C), 1 - sigma(-BETA * R)), id="kto"),
        pytest.param({"kl": 0.75}, (1 - sigma(BETA * (C - 0.75)), 1 - sigma(BETA * (0.75 - R))), id="kl"),
        pytest.param(
            {"kl": torch.tensor(-0.75)}, (1 - sigma(BETA * C), 1 - sigma(-BETA * R)), id="negative_kl"
        ),
        pytest.param(
            {"kl": 0.75, "loss_type": "apo_zero_unpaired"}, (1 - sigma(BETA * C), sigma(BETA * R)), id="apo"
        ),
        pytest.param({"labels": (False, True)}, (1 - sigma(-BETA * C), 1 - sigma(BETA * R)), id="swapped"),
        pytest.param(
            {"desirable_weight": 3.0}, (3 - 3 * sigma(BETA * C), 1 - sigma(-BETA * R)), id="desirable_weight"
        ),
        pytest.param(
            {"undesirable_weight": 3.0},
            (1 - sigma(BETA * C), 3 - 3 * sigma(-BETA * R)),
            id="undesirable_weight",
        ),
    ],
)
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
    assert kto(kl=0.75, loss_type="apo_zero_unpaired")[1]["kl"] == 0


def test_kto_with_one_side_only():
    loss, metrics = kto(labels=(False, False))
    assert loss == approx((sigma(BETA * C) + sigma(BETA * R)) / 2)
    assert metrics["rewards/rejected"] == approx(BETA * (C + R) / 2)
    assert metrics["logits/rejected"] == approx((2 * LOG3 / 2 + LOG7 / 2) / 3)
    for name in ("rewards/chosen", "logps/chosen", "logits/chosen", "rewards/margins"):
        assert metrics[name] == 0


def test_kl_is_not_differentiated():
    kl = torch.tensor(0.75, requires_grad=True)
    hidden = HIDDEN.clone().requires_grad_()
    loss, _ = reference.kto(
        hidden, WEIGHT, TARGETS, labels=torch.tensor([True, False]), ref_logps=REF_TOKENS, kl=kl
    )
    loss.backward()
    assert kl.grad is None and hidden.grad.abs().sum() > 0


# Random sequences whose lengths all differ; two of the six are empty in part of the tests.
LENGTHS = (4, 1, 6, 2, 5, 3)
VOCAB = 11


def random_operands(lengths=LENGTHS, dtype=torch.float64):
    """Padded operands, then the reference's hidden states and head."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(VOCAB, (len(lengths), 8), generator=generator)
    # Each sequence begins with a prompt of one token and ends with padding.
    position = torch.arange(8)
    supervised = (position >= 1) & (position <= torch.tensor(lengths).unsqueeze(1))
    targets[~supervised] = IGNORED
    return (randn(len(lengths), 8, 5), randn(VOCAB, 5), targets), {
        "ref_hidden": randn(len(lengths), 8, 3),
        "ref_weight": randn(VOCAB, 3),
    }


LABELS = torch.tensor([True, False, False, True, True, False])
EVERY_DPO = {
    "loss_type": list(BY_HAND),
    "loss_weights": [0.1 * i for i in range(1, len(BY_HAND) + 1)],
    "label_smoothing": 0.1,
    "f_divergence_type": "alpha_divergence",
    "ld_alpha": 0.3,
    "use_weighting": True,
}
FUNCTIONS = {
    "dpo": (reference.dpo, EVERY_DPO),
    "orpo": (reference.orpo, {}),
    "cpo": (reference.cpo, {"alpha": 0.2}),
    "cpo_ipo": (reference.cpo, {"loss_type": "ipo"}),
    "simpo": (reference.simpo, {}),
    "kto": (reference.kto, {"kl": 0.3, "labels": LABELS}),
}
functions = pytest.mark.parametrize(("function", "options"), FUNCTIONS.values(), ids=FUNCTIONS)


def takes_reference(function) -> bool:
    return function in (reference.dpo, reference.kto)


def outcome(function, operands, **options):
    """Loss, metrics and the gradients of the hidden states and the head."""
    hidden, weight, targets = operands
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss, metrics = function(hidden, weight, targets, **options)
    assert not any(value.requires_grad for value in metrics.values())
    return loss.detach(), metrics, torch.autograd.grad(loss, (hidden, weight))


def assert_same(ours, theirs, rtol=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * 1e-2)


@functions
def test_packed_equals_padded(function, options):
    operands, given = random_operands()
    options = options | (given if takes_reference(function) else {})
    loss, metrics, (d_hidden, d_weight) = outcome(function, operands, **options)

    # Packed, the sequences keep their prompt and lose some padding; what is cut off must not matter.
    kept = torch.arange(8) <= torch.tensor(LENGTHS).unsqueeze(1) + torch.tensor([0, 1, 0, 1, 1, 0]).unsqueeze(
        1
    )
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)])
    hidden, weight, targets = operands
    if takes_reference(function):
        options["ref_hidden"] = options["ref_hidden"][kept]
    packed = outcome(function, (hidden[kept], weight, targets[kept]), cu_seqlens=cu_seqlens, **options)

    assert_same(packed, (loss, metrics, (d_hidden[kept], d_weight)))
    assert d_hidden[~kept].eq(0).all() and d_hidden[targets != IGNORED].ne(0).all(-1).sum() > 10


@functions
def test_head_options_act_on_the_logits(function, options):
    """Any head is the identity on its own logits."""
    (hidden, weight, targets), given = random_operands()
    bias, ref_bias = (
        torch.linspace(-1, 1, VOCAB, dtype=torch.float64),
        torch.linspace(2, 0, VOCAB, dtype=torch.float64),
    )
    identity = torch.eye(VOCAB, dtype=torch.float64)
    head = {"softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3}
    logits = reference.head_logits(hidden, weight, bias, **head)
    ours, theirs = dict(options), dict(options)
    if takes_reference(function):
        ours |= given | {"ref_bias": ref_bias, "ref_softcap": 2.0, "ref_logit_scale": 1.4}
        ref_head = {"softcap": 2.0, "logit_scale": 1.4, "temperature": 1.3}
        theirs |= {
            "ref_hidden": reference.head_logits(*given.values(), ref_bias, **ref_head),
            "ref_weight": identity,
        }
    assert_same(
        function(hidden, weight, targets, bias=bias, **head, **ours),
        function(logits, identity, targets, **theirs),
    )


@pytest.mark.parametrize(("function", "options"), [FUNCTIONS["dpo"], FUNCTIONS["kto"]], ids=["dpo", "kto"])
def test_forms_of_the_reference_agree(function, options):
    operands, given = random_operands()
    targets = operands[2]
    expected = outcome(function, operands, **given, **options)
    logps, _, _ = reference.token_logprobs(given["ref_hidden"], given["ref_weight"], targets)
    # Numbers where nothing is supervised must not matter.
    assert_same(
        outcome(function, operands, ref_logps=logps.masked_fill(targets == IGNORED, 7.0), **options), expected
    )
    sums = logps.sum(1)
    if "ld_alpha" in options:
        supervised = (targets != IGNORED).cumsum(1)
        shorter = torch.minimum(supervised[:3, -1], supervised[3:, -1]).repeat(2)
        sums = torch.where(supervised <= shorter[:, None], logps, options["ld_alpha"] * logps).sum(1)
    assert_same(outcome(function, operands, ref_logps=sums, **options), expected)


def test_the_reference_is_not_differentiated():
    operands, given = random_operands()
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    for options in (
        leaves,
        {"ref_logps": torch.zeros(6, requires_grad=True)},
        {"ref_logps": torch.zeros(6, 8, requires_grad=True)},
    ):
        assert not reference.dpo(*operands, **options)[0].requires_grad


@functions
def test_another_ignore_index(function, options):
    (hidden, weight, targets), given = random_operands()
    options = options | (given if takes_reference(function) else {})
    masked = targets.masked_fill(targets == 4, IGNORED)
    renamed = masked.masked_fill(masked == IGNORED, 4)
    nll = [
        {"nll_targets": labels.flip(1)} if function is reference.orpo else {} for labels in (masked, renamed)
    ]
    expected = function(hidden, weight, masked, **nll[0], **options)
    assert_same(function(hidden, weight, renamed, ignore_index=4, **nll[1], **options), expected)


@functions
def test_empty_sequences_have_a_log_probability_of_zero(function, options):
    # A pair of which one is empty, and an empty pair.
    operands, given = random_operands(lengths=(4, 0, 6, 2, 0, 0))
    options = options | ({"ref_logps": torch.zeros(6)} if takes_reference(function) else {})
    loss, metrics, gradients = outcome(function, operands, **options)
    for value in (loss, *metrics.values(), *gradients):
        assert value.isfinite().all()
    assert metrics["logps/rejected"] < 0
    if function is not reference.kto:
        lone = operands[2].clone()
        lone[[0, 2, 3]] = IGNORED
        assert function(*operands[:2], lone, **options)[1]["logps/chosen"] == 0


@functions
def test_nothing_supervised_keeps_the_graph(function, options):
    (hidden, weight, targets), given = random_operands()
    options = options | (given if takes_reference(function) else {})
    loss, metrics, gradients = outcome(function, (hidden, weight, targets.fill_(IGNORED)), **options)
    assert loss.isfinite()
    assert all(gradient.eq(0).all() for gradient in gradients)
    assert all(
        metrics[name] == 0 for name in metrics if name not in ("kl", "log_odds_ratio", "rewards/accuracies")
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@functions
def test_results_are_in_fp32_at_least(function, options, dtype):
    operands, given = random_operands(dtype=dtype)
    loss, metrics = function(*operands, **options, **(given if takes_reference(function) else {}))
    assert {loss.dtype, *(value.dtype for value in metrics.values())} == {
        torch.promote_types(dtype, torch.float32)
    }


@pytest.mark.parametrize("odds", [-1e4, 1e4], ids=["improbable", "certain"])
@pytest.mark.parametrize(
    ("function", "options"),
    [
        pytest.param(reference.dpo, {"f_divergence_type": "forward_kl"}, id="forward_kl"),
        pytest.param(reference.dpo, {"f_divergence_type": "alpha_divergence"}, id="alpha_divergence"),
        pytest.param(reference.dpo, {"loss_type": "discopop"}, id="discopop"),
        pytest.param(reference.cpo, {"alpha": 0.5}, id="alphapo"),
        pytest.param(reference.orpo, {}, id="orpo"),
    ],
)
def test_extreme_probabilities_stay_finite_in_fp32(function, options, odds):
    hidden = torch.tensor([odds, -odds]).reshape(2, 1, 1)
    options = options | ({"reference_free": True} if takes_reference(function) else {})
    loss, _, gradients = outcome(
        function, (hidden, WEIGHT.float(), torch.ones(2, 1, dtype=torch.int64)), **options
    )
    assert all(value.isfinite().all() for value in (loss, *gradients))


def test_odds_of_a_certain_sequence_are_bounded():
    hidden = torch.tensor([50.0, 0.0], dtype=torch.float64).reshape(2, 1, 1)
    metrics = values(reference.orpo(hidden, WEIGHT, torch.ones(2, 1, dtype=torch.int64)))[1]
    # The rejected sequence has odds of 1.
    assert metrics["log_odds_chosen"] == approx(math.log(1e7), rel=1e-7)


# TRL. Its modules are imported by the tests, not here: tests/trl_integration/conftest.py must come before
# transformers.
TRAINERS = {
    "dpo": ("trl.trainer.dpo_trainer", "DPOTrainer"),
    "kto": ("trl.trainer.kto_trainer", "KTOTrainer"),
    "orpo": ("trl.experimental.orpo.orpo_trainer", "ORPOTrainer"),
    "cpo": ("trl.experimental.cpo.cpo_trainer", "CPOTrainer"),
}


def from_trl(module: str, name: str):
    return getattr(importlib.import_module(module), name)


class Model(torch.nn.Module):
    """A policy without a backbone: the hidden state of a token is its embedding plus that of its position."""

    is_gradient_checkpointing = False

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, rows in {"embedding": VOCAB, "positions": 9, "weight": VOCAB}.items():
            values = torch.randn(rows, 5, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(values))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[ids] + self.positions[: ids.shape[1]]

    def forward(self, input_ids, attention_mask=None, labels=None, fused_lm_head=False, use_cache=False):
        logits = self.hidden(input_ids) @ self.weight.T
        if not fused_lm_head:
            return SimpleNamespace(logits=logits)
        logits, labels = logits[:, :-1], labels[:, 1:]
        probs, ignored = logits.softmax(-1), labels == IGNORED
        per_token = {
            "log_probs": probs.log().gather(-1, labels.clamp(min=0)[..., None])[..., 0],
            "entropy": -(probs * probs.log()).sum(-1),
            "log_sum_sq_probs": probs.square().sum(-1).log(),
            "mean_logits": logits.mean(-1),
            "is_top1": logits.argmax(-1) == labels,
        }
        fields = {name: numbers.masked_fill(ignored, 0) for name, numbers in per_token.items()}
        return from_trl("trl.trainer.utils", "FusedCausalLMOutput")(**fields)


def batch(lengths=LENGTHS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids (S, 9) with a prompt of one token or two, a completion and padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (len(lengths), 9), generator=generator)
    prompts = 1 + torch.arange(len(lengths))[:, None] % 2
    ends = prompts + torch.tensor(lengths)[:, None]
    position = torch.arange(9)
    return {
        "input_ids": ids,
        "attention_mask": (position < ends).long(),
        "completion_mask": ((position >= prompts) & (position < ends)).long(),
    }


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """What gathering gives in one process."""
    return tensor


def trainer(name: str, model: Model, **attributes):
    """A trainer of TRL that its constructor never touched."""
    trainer_class = from_trl(*TRAINERS[name])
    instance = trainer_class.__new__(trainer_class)
    vars(instance).update(
        {
            "model": model,
            "accelerator": SimpleNamespace(
                device=torch.device("cpu"), gather=unchanged, gather_for_metrics=unchanged
            ),
            "args": SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
            "aux_loss_enabled": False,
            "precompute_ref_logps": False,
            "is_encoder_decoder": False,
            "pad_token_id": 0,
            "padding_value": 0,
            "beta": 0.3,
            "label_smoothing": 0.0,
            "_metrics": {"train": defaultdict(list)},
            "_total_train_tokens": 0,
            "_tp_size": 1,
        }
        | attributes
    )
    return instance


@pytest.fixture
def double():
    """TRL makes a few tensors in the default dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def aligned(model: Model, ids: torch.Tensor, mask: torch.Tensor):
    """Operands of the reference."""
    return model.hidden(ids)[:, :-1], model.weight, ids.masked_fill(mask == 0, IGNORED)[:, 1:]


def assert_is_trls(
    ours,
    theirs,
    model: Model,
    *,
    without: tuple[str, ...] = (),
    rtol: float = 1e-10,
    with_gradients: bool = True,
):
    """Loss, gradients and every metric that TRL reports."""
    (loss, metrics), (their_loss, their_metrics) = ours, theirs
    assert_same(loss, their_loss, rtol=rtol)
    if with_gradients:
        gradients, their_gradients = (
            torch.autograd.grad(value, list(model.parameters())) for value in (loss, their_loss)
        )
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
        assert_same(gradients, their_gradients, rtol=10 * rtol)
    their_metrics = {
        name: value for name, value in their_metrics.items() if name not in ("num_tokens", *without)
    }
    assert len(their_metrics) >= 5
    # Theirs are partly in fp32.
    assert {name: metrics[name].item() for name in their_metrics} == pytest.approx(
        their_metrics, rel=max(rtol, 1e-7)
    )


SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # sigmoid is not: TRL has no cDPO
OF_SCORES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm")
DPO_CASES = [
    *({"loss_type": [name]} for name in BY_HAND),
    *({"loss_type": [name], "ld_alpha": 0.4} for name in BY_HAND),
    *(
        {"loss_type": [name], "f_divergence_type": f}
        for f in ("forward_kl", "js_divergence")
        for name in OF_SCORES
    ),
    *(
        {"loss_type": [name], "f_divergence_type": "alpha_divergence", "dtype": torch.float32}
        for name in OF_SCORES
    ),
    {"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    {
        "loss_type": ["hinge"],
        "f_divergence_type": "alpha_divergence",
        "f_alpha_divergence_coef": 1.7,
        "dtype": torch.float32,
    },
    *(
        {"loss_type": [name], "use_weighting": True}
        for name in BY_HAND
        if name not in ("aot", "aot_unpaired", "hinge", "sft")
    ),
    # TRL weights in place, which its relu does not survive and the sft of more than one pair not even in the
    # forward pass.
    {"loss_type": ["hinge"], "use_weighting": True, "with_gradients": False},
    {"loss_type": ["sigmoid", "sft"], "use_weighting": True, "lengths": (4, 2)},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
    {"loss_type": ["sigmoid_norm", "apo_down"], "ld_alpha": 0.4, "use_weighting": True},
    {"loss_type": ["hinge", "sft"], "f_divergence_type": "js_divergence"},
]


@pytest.mark.parametrize("case", DPO_CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_dpo_is_trls(case, double):
    case = {"dtype": torch.float64, "lengths": LENGTHS, "with_gradients": True} | case
    dtype, lengths, with_gradients = (case.pop(name) for name in ("dtype", "lengths", "with_gradients"))
    torch.set_default_dtype(dtype)
    options = {
        "loss_weights": [1.0] * len(case["loss_type"]),
        "label_smoothing": 0.1 if case["loss_type"][0] in SMOOTHED else 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
    } | case
    model, ref_model, inputs = Model(1, dtype), Model(2, dtype), batch(lengths)
    attributes = {name: value for name, value in options.items() if name != "loss_type"}
    dpo_trainer = trainer("dpo", model, ref_model=ref_model, loss_types=options["loss_type"], **attributes)
    loss = dpo_trainer._compute_loss(model, inputs, return_outputs=False)
    metrics = {name: value[-1] for name, value in dpo_trainer._metrics["train"].items()}

    operands = aligned(model, inputs["input_ids"], inputs["completion_mask"])
    ref_hidden = ref_model.hidden(inputs["input_ids"])[:, :-1]
    ours = reference.dpo(*operands, ref_hidden=ref_hidden, ref_weight=ref_model.weight, beta=0.3, **options)
    assert_is_trls(
        ours,
        (loss, metrics),
        model,
        rtol=1e-10 if dtype == torch.float64 else 2e-5,
        with_gradients=with_gradients,
    )


@pytest.mark.parametrize("ld_alpha", [None, 0.4])
def test_takes_the_reference_sums_that_trl_computes_in_advance(ld_alpha, double):
    model, ref_model, inputs = Model(1, torch.float64), Model(2, torch.float64), batch()
    dpo_trainer = trainer("dpo", model, ref_model=ref_model, ld_alpha=ld_alpha)
    dpo_trainer.accelerator.autocast = contextlib.nullcontext
    ref_logps = torch.cat(dpo_trainer.compute_ref_log_probs(ref_model, inputs))
    operands, ref_operands = (
        aligned(one, inputs["input_ids"], inputs["completion_mask"]) for one in (model, ref_model)
    )
    expected = reference.dpo(
        *operands, ref_hidden=ref_operands[0], ref_weight=ref_operands[1], ld_alpha=ld_alpha
    )
    assert_same(reference.dpo(*operands, ref_logps=ref_logps, ld_alpha=ld_alpha), expected)


@pytest.mark.parametrize(
    "labels", [LABELS, torch.ones(6).bool(), torch.zeros(6).bool()], ids=["both", "desirable", "undesirable"]
)
@pytest.mark.parametrize("seeds", [(1, 2), (2, 1)], ids=["negative_kl", "positive_kl"])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_is_trls(loss_type, seeds, labels, double):
    options = {"loss_type": loss_type, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    model, ref_model = (Model(seed, torch.float64) for seed in seeds)
    inputs, mismatched = batch(), batch(seed=7)
    inputs |= {"label": labels} | {f"KL_{name}": value for name, value in mismatched.items()}
    kto_trainer = trainer("kto", model, ref_model=ref_model, calculate_KL=loss_type == "kto", **options)
    loss = kto_trainer._compute_loss(model, inputs, return_outputs=False)
    metrics = {name: value[-1] for name, value in kto_trainer._metrics["train"].items()}

    operands, kl_operands = (
        aligned(model, one["input_ids"], one["completion_mask"]) for one in (inputs, mismatched)
    )
    ref_operands, ref_kl_operands = (
        aligned(ref_model, one["input_ids"], one["completion_mask"]) for one in (inputs, mismatched)
    )
    kl = (
        (reference.token_logprobs(*kl_operands)[0] - reference.token_logprobs(*ref_kl_operands)[0])
        .sum(1)
        .mean()
    )
    assert (kl > 0) == (seeds == (2, 1))
    ref = {"ref_hidden": ref_operands[0], "ref_weight": ref_operands[1]}
    ours = reference.kto(*operands, **ref, labels=labels, kl=kl, beta=0.3, **options)
    assert_is_trls(ours, (loss, metrics), model)


def of_pairs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch in the form of ORPO's and CPO's trainers."""
    ids, attention, completion = inputs.values()
    columns = {
        "input_ids": ids,
        "labels": ids.masked_fill(completion == 0, IGNORED),
        "attention_mask": attention,
    }
    halves = {"chosen": slice(None, 3), "rejected": slice(3, None)}
    return {
        f"{side}_{name}": values[rows] for side, rows in halves.items() for name, values in columns.items()
    }


# They average the logits of prompts and padding too, and CPO's those of the last position.
EVERY_LOGIT = ("logits/chosen", "logits/rejected")


def test_orpo_is_trls(double):
    model, inputs = Model(1, torch.float64), batch()
    theirs = trainer("orpo", model).get_batch_loss_metrics(model, of_pairs(inputs))
    nll_targets = aligned(model, inputs["input_ids"], inputs["attention_mask"])[2]
    ours = reference.orpo(
        *aligned(model, inputs["input_ids"], inputs["completion_mask"]), nll_targets=nll_targets, beta=0.3
    )
    # TRL computes the odds in fp32.
    assert_is_trls(ours, theirs, model, without=EVERY_LOGIT, rtol=1e-6)


def test_logits_of_orpo_are_trls_where_all_tokens_are_supervised(double):
    model, inputs = Model(1, torch.float64), batch()
    inputs |= {name: torch.ones_like(inputs[name]) for name in ("attention_mask", "completion_mask")}
    theirs = trainer("orpo", model).get_batch_loss_metrics(model, of_pairs(inputs))
    ours = reference.orpo(*aligned(model, inputs["input_ids"], inputs["completion_mask"]), beta=0.3)
    assert_is_trls(ours, theirs, model, rtol=1e-6)


def test_odds_are_trls():
    logps = torch.tensor([-1e-6, -0.1, -LOG2, -1.0, -40.0], dtype=torch.float64)
    theirs = logps - from_trl("trl.experimental.orpo.orpo_trainer", "log1mexp")(logps)
    for logp, log_odds in zip(logps, theirs):
        # The rejected sequence has odds of 1.
        hidden = torch.stack([logp - torch.log(-torch.expm1(logp)), torch.zeros_like(logp)]).reshape(2, 1, 1)
        metrics = reference.orpo(hidden, WEIGHT, torch.ones(2, 1, dtype=torch.int64))[1]
        torch.testing.assert_close(metrics["log_odds_chosen"], log_odds, rtol=1e-9, atol=0)


CPO_CASES = [
    *({"loss_type": name} for name in ("sigmoid", "hinge", "ipo", "simpo")),
    *({"loss_type": name, "alpha": 0.2} for name in ("sigmoid", "hinge", "ipo", "simpo")),
    {"loss_type": "sigmoid", "label_smoothing": 0.1},
    {"loss_type": "simpo", "label_smoothing": 0.1, "simpo_gamma": 1.2, "cpo_alpha": 0.4, "alpha": -0.3},
]


@pytest.mark.parametrize("case", CPO_CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_cpo_is_trls(case, double):
    options = {"label_smoothing": 0.0, "cpo_alpha": 1.0, "simpo_gamma": 0.5, "alpha": 0.0} | case
    model, inputs = Model(1, torch.float64), batch()
    theirs = trainer("cpo", model, **options).get_batch_loss_metrics(model, of_pairs(inputs))
    ours = reference.cpo(*aligned(model, inputs["input_ids"], inputs["completion_mask"]), beta=0.3, **options)
    assert_is_trls(ours, theirs, model, without=EVERY_LOGIT)


def test_simpo_is_trls(double):
    model, inputs = Model(1, torch.float64), batch()
    options = {"loss_type": "simpo", "cpo_alpha": 0.0, "alpha": 0.0, "simpo_gamma": 1.2, "beta": 2.5}
    theirs = trainer("cpo", model, **options).get_batch_loss_metrics(model, of_pairs(inputs))
    ours = reference.simpo(
        *aligned(model, inputs["input_ids"], inputs["completion_mask"]), beta=2.5, gamma=1.2
    )
    # Without an nll in the loss TRL reports none.
    assert_is_trls(ours, theirs, model, without=(*EVERY_LOGIT, "nll_loss"))
