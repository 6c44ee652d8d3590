"""Cross-entropy and log-probabilities against numbers computed by hand; see conftest.py."""

import math

import pytest
import torch

from tests import reference

# Two tokens whose logits are (0, log 3) and (log 3, 0): with `hidden` the identity, `weight.T` is the logits.
LOG3 = math.log(3)
HIDDEN = torch.eye(2, dtype=torch.float64)
WEIGHT = torch.tensor([[0, LOG3], [LOG3, 0]], dtype=torch.float64)
TARGETS = torch.tensor([1, 1])  # probabilities 3/4 and 1/4
NLL = (math.log(4 / 3), math.log(4))
LSE = math.log(4)


def two_tokens(targets=TARGETS, **options) -> list[float] | float:
    return reference.cross_entropy(HIDDEN, WEIGHT, targets, **options).tolist()


HALF = [math.log(1 + 3**-0.5), math.log(1 + 3**0.5)]
CLASS_WEIGHTS = torch.tensor([1.0, 3.0])
# Options, and the loss of each token.
TOKENS = {
    "plain": ({}, NLL),
    "smoothed": ({"label_smoothing": 0.2}, [0.9 * NLL[0] + 0.1 * NLL[1], 0.9 * NLL[1] + 0.1 * NLL[0]]),
    # Half of the smoothing falls on each class: ((log 4/3) + log 4) / 2 for both tokens.
    "smoothed, z-loss": (
        {"label_smoothing": 1.0, "z_loss": 0.1},
        [(NLL[0] + NLL[1]) / 2 + 0.1 * LSE**2] * 2,
    ),
    "dft": ({"dft": True}, [0.75 * NLL[0], 0.25 * NLL[1]]),
    "class_weights": ({"class_weights": CLASS_WEIGHTS}, [3 * NLL[0], 3 * NLL[1]]),
    "token_weights": ({"token_weights": torch.tensor([2.0, 0.0])}, [2 * NLL[0], 0.0]),
    "shift": ({"token_weights": torch.tensor([5.0, 2.0]), "shift": True}, [2 * NLL[0], 0.0]),
    # Logits of half the size: odds of sqrt(3).
    "temperature": ({"temperature": 2.0}, HALF),
    "logit_scale": ({"logit_scale": 0.5}, HALF),
    # The bias moves both logits of class 1 by log 3: odds of 9 and 1.
    "bias": ({"bias": torch.tensor([0.0, LOG3], dtype=torch.float64)}, [math.log(10 / 9), math.log(2)]),
    "softcap": (
        {"softcap": 2.0},
        [math.log1p(math.exp(sign * 2 * math.tanh(LOG3 / 2))) for sign in (-1, 1)],
    ),
}
# Targets, options, and the loss of both tokens.
REDUCED = {
    "mean": ([1, 1], {}, (NLL[0] + NLL[1]) / 2),
    "sum": ([1, 1], {"reduction": "sum"}, NLL[0] + NLL[1]),
    "all ignored": ([-100, -100], {}, 0.0),
    "no items": ([-100, -100], {"num_items": 0}, 0.0),
    "num_items": ([1, -100], {"num_items": torch.tensor(4)}, NLL[0] / 4),
    # Weights of the targets 1 and 3: (log 4/3) * 3 + log(4/3) * 1 over 4.
    "class_weights": ([1, 0], {"class_weights": CLASS_WEIGHTS}, NLL[0]),
    "token_weights": ([1, 1], {"token_weights": torch.tensor([2.0, 0.0])}, NLL[0]),
    "shift": ([0, 1], {"shift": True}, NLL[0]),
    "ignore_index": ([7, 1], {"ignore_index": 7}, NLL[1]),
}


@pytest.mark.parametrize(("options", "expected"), TOKENS.values(), ids=TOKENS)
def test_two_tokens_by_hand(options, expected):
    assert two_tokens(reduction="none", **options) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("targets", "options", "expected"), REDUCED.values(), ids=REDUCED)
def test_reductions_by_hand(targets, options, expected):
    assert two_tokens(torch.tensor(targets), **options) == pytest.approx(expected, rel=1e-12)


def test_softcap_acts_on_scaled_logits_and_temperature_on_capped_ones():
    logits = reference.head_logits(HIDDEN, WEIGHT, softcap=2.0, logit_scale=3.0, temperature=0.5)
    assert logits[0, 1].item() == pytest.approx(2 * math.tanh(3 * LOG3 / 2) / 0.5, rel=1e-12)


def test_token_logprobs_by_hand():
    logps, entropy, lse = reference.token_logprobs(HIDDEN, WEIGHT, torch.tensor([1, -100]))
    assert logps.tolist() == pytest.approx([-NLL[0], 0], rel=1e-12)
    assert entropy.tolist() == pytest.approx([0.75 * NLL[0] + 0.25 * NLL[1], 0], rel=1e-12)
    assert lse.tolist() == pytest.approx([LSE, 0], rel=1e-12)


def test_dft_does_not_differentiate_the_probability():
    hidden = HIDDEN.clone().requires_grad_()
    (plain,) = torch.autograd.grad(reference.cross_entropy(hidden, WEIGHT, TARGETS), hidden)
    (scaled,) = torch.autograd.grad(reference.cross_entropy(hidden, WEIGHT, TARGETS, dft=True), hidden)
    torch.testing.assert_close(scaled, plain * torch.tensor([[3 / 4], [1 / 4]]))
