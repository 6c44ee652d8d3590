"""The losses of speculators 0.9.0 and SpecForge 0.2.0: the numbers that they gave for the logits here."""

import math

import pytest
import torch
from torch import Tensor

from logitless import SpeculatorLoss
from tests.support import DEVICE

# Logits of two pairs over four ids; the draft's columns are the verifier's.
DRAFT = [[0.0, 1.0, 2.0, -1.0], [1.5, 0.0, -0.5, 0.5]]
VERIFIER = [[1.0, 0.0, 2.0, 0.0], [0.0, 2.0, 1.0, -1.0]]
# What each function of speculators.losses.eager gave for them.
SPECULATORS = {
    "kl_div_loss": ({"divergence": "forward_kl"}, [0.170893, 1.070165]),
    "reverse_kl_div_loss": ({"divergence": "reverse_kl"}, [0.171302, 1.206626]),
    "js_div_loss": ({"divergence": "jsd"}, [0.04109, 0.253472]),
    "tv_loss": ({"divergence": "total_variation"}, [0.187907, 0.673153]),
    "neg_log_acceptance_loss": ({"divergence": "neg_log_acceptance"}, [0.20814, 1.118263]),
    "lk_hybrid_loss": ({"divergence": "lk_hybrid"}, [0.186418, 0.822075]),
    "ce_loss": ({"hard_loss_weight": 1.0}, [0.44019, 2.046006]),
}


def by_logits(draft: Tensor, verifier: Tensor, **options):
    """The unreduced loss of one step on given logits, (rows, ids) each, and its output."""
    rows, width = draft.shape
    eye = torch.eye(width, device=DEVICE, dtype=draft.dtype)
    # Each row is a sequence of two positions, as a row predicts a token after its own.
    stacked = torch.stack((draft, torch.zeros_like(draft)), 1)
    taught = torch.stack((verifier, torch.zeros_like(verifier)), 1)
    loss = SpeculatorLoss(offset=0, reduction="none", **options)
    out = loss([stacked], eye, teacher_hidden=taught, teacher_weight=eye)
    return out.loss[0, :, 0], out


@pytest.mark.parametrize("name", SPECULATORS)
def test_numbers_of_speculators(name):
    draft, verifier = (torch.tensor(x, device=DEVICE) for x in (DRAFT, VERIFIER))
    options, expected = SPECULATORS[name]
    values, _ = by_logits(draft, verifier, **options)
    assert torch.allclose(values, torch.tensor(expected, device=DEVICE), atol=1e-6)


def wave(*shape: int, seed: int) -> Tensor:
    """Logits that look random, the same on every machine."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.float64, device=DEVICE)
    return 3 * (numbers * (seed + 1) ** 0.5 * 1.7).sin().view(shape).float()


def test_steps_of_speculators():
    """Its walk over the steps of EAGLE-3: the sum over the steps, and the accepted length of its chains
    (`models.metrics.compute_accepted_length_counts`)."""
    verifier, eye = wave(1, 9, 6, seed=0), torch.eye(6, device=DEVICE)
    draft = [wave(1, 9, 6, seed=k + 1) + verifier.roll(-k, 1) for k in range(3)]
    mask = torch.arange(9, device=DEVICE)[None] % 4 != 3
    loss = SpeculatorLoss(divergence="lk_hybrid", teacher_softmax="draft", decay=0.7, offset=0)
    # Their verifier's logits and mask are of the predicted token: our mask is one position later.
    out = loss(draft, eye, teacher_hidden=verifier, teacher_weight=eye, mask=mask.roll(1, 1))
    assert out.loss.item() == pytest.approx(1.473834, rel=1e-5)
    assert out.metrics["accepted_length"].item() == pytest.approx(11 / 7, abs=1e-6)


def test_acceptance_of_specforge():
    """The verifier's softmax over all ids, rows whose best id the draft lacks, and its negative logarithm
    (`core.lk_loss`); the metric is of all rows."""
    # Each row is a sequence of two positions, as a row predicts a token after its own.
    draft, verifier = (torch.stack((x, 0 * x), 1) for x in (wave(7, 5, seed=4), wave(7, 8, seed=5)))
    ids = torch.tensor([6, 1, 0, 3, 7], device=DEVICE)
    covered = torch.isin(verifier[:, 0].argmax(-1), ids).sum().item()
    teacher = {"teacher_hidden": verifier, "teacher_weight": torch.eye(8, device=DEVICE), "draft_ids": ids}
    loss = SpeculatorLoss(divergence="neg_log_acceptance", drop_outside=True, offset=0)
    out = loss([draft], torch.eye(5, device=DEVICE), num_items=covered, **teacher)
    assert covered == 3 and out.loss.item() == pytest.approx(1.29139, rel=1e-5)
    assert out.metrics["step_0/acceptance"].item() == pytest.approx(0.182311, rel=1e-5)


def test_eagle_s_cross_entropy_is_a_kl_and_an_entropy():
    draft, verifier = (torch.tensor(x, device=DEVICE) for x in (DRAFT, VERIFIER))
    values, _ = by_logits(draft, verifier)
    p = verifier.softmax(-1)
    soft_cross_entropy = -(p * draft.log_softmax(-1)).sum(-1)
    assert torch.allclose(values, soft_cross_entropy + (p * p.log()).sum(-1), atol=1e-6)
    # By hand: four equal probabilities against 1/2, 1/6, 1/6, 1/6.
    even, skewed = torch.zeros(1, 4, device=DEVICE), torch.tensor([[math.log(3.0), 0, 0, 0]], device=DEVICE)
    assert by_logits(skewed, even, divergence="total_variation")[0].item() == pytest.approx(0.25)
    assert by_logits(skewed, even, divergence="neg_log_acceptance")[0].item() == pytest.approx(
        -math.log(0.75)
    )
