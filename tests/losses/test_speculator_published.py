"""The losses of speculators 0.9.0 and SpecForge 0.2.0, from their wheels where they can be found, and from
numbers that they gave."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from logitless import SpeculatorLoss
from tests.support import DEVICE

# Logits of two pairs over four ids; the draft's columns are the verifier's.
DRAFT = [[0.0, 1.0, 2.0, -1.0], [1.5, 0.0, -0.5, 0.5]]
VERIFIER = [[1.0, 0.0, 2.0, 0.0], [0.0, 2.0, 1.0, -1.0]]
EAGER = {
    "kl_div": ("kl_div_loss", {"divergence": "forward_kl"}),
    "rkl": ("reverse_kl_div_loss", {"divergence": "reverse_kl"}),
    "jsd": ("js_div_loss", {"divergence": "jsd"}),
    "tv": ("tv_loss", {"divergence": "total_variation"}),
    "nla": ("neg_log_acceptance_loss", {"divergence": "neg_log_acceptance"}),
    "lk_hybrid": ("lk_hybrid_loss", {"divergence": "lk_hybrid"}),
    "ce": ("ce_loss", {"hard_loss_weight": 1.0}),
}
# What speculators.losses.eager gave for these logits.
GIVEN = {
    "kl_div": [0.170893, 1.070165],
    "rkl": [0.171302, 1.206626],
    "jsd": [0.04109, 0.253472],
    "tv": [0.187907, 0.673153],
    "nla": [0.20814, 1.118263],
    "lk_hybrid": [0.186418, 0.822075],
    "ce": [0.44019, 2.046006],
}


def file_of(package: str, path: str):
    """A module of an installed package, without the imports of the package itself."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(found.submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(f"{package}_{Path(path).stem}", folder / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_logits(draft: torch.Tensor, verifier: torch.Tensor, **options):
    """The unreduced loss of one step on given logits, (rows, ids) each, and its output."""
    rows, width = draft.shape
    eye = torch.eye(width, device=DEVICE, dtype=draft.dtype)
    # Each row is a sequence of two positions, as a row predicts a token after its own.
    stacked = torch.stack((draft, torch.zeros_like(draft)), 1)
    taught = torch.stack((verifier, torch.zeros_like(verifier)), 1)
    loss = SpeculatorLoss(offset=0, reduction="none", **options)
    out = loss([stacked], eye, teacher_hidden=taught, teacher_weight=eye)
    return out.loss[0, :, 0], out


@pytest.mark.parametrize("name", EAGER)
def test_numbers_of_speculators(name):
    draft, verifier = (torch.tensor(x, device=DEVICE) for x in (DRAFT, VERIFIER))
    values, _ = by_logits(draft, verifier, **EAGER[name][1])
    assert torch.allclose(values, torch.tensor(GIVEN[name], device=DEVICE), atol=1e-6)


@pytest.mark.parametrize("name", EAGER)
def test_values_and_gradients_of_speculators(name):
    eager = file_of("speculators", "losses/eager.py")
    function, options = EAGER[name]
    generator = torch.Generator("cpu").manual_seed(3)
    draft, verifier = (2 * torch.randn(40, 300, generator=generator).to(DEVICE) for _ in range(2))
    ours, theirs = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    values, _ = by_logits(ours, verifier, **options)
    expected = getattr(eager, function)(theirs[None], verifier[None])[0]
    assert torch.allclose(values, expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(40, generator=generator).to(DEVICE)
    values.backward(upstream)
    expected.backward(upstream)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def steps_of(seed: int, S: int, T: int, size: int):
    generator = torch.Generator("cpu").manual_seed(seed)
    draft = [(2 * torch.randn(1, T, size, generator=generator)).to(DEVICE).requires_grad_() for _ in range(S)]
    verifier = (2 * torch.randn(1, T, size, generator=generator)).to(DEVICE)
    mask = (torch.rand(1, T, generator=generator) < 0.8).to(DEVICE)
    return draft, verifier, mask


def test_steps_of_speculators():
    """Its walk over the steps of EAGLE-3: the sum over the steps, and the accepted length of its chains."""
    eager, metrics = file_of("speculators", "losses/eager.py"), file_of("speculators", "models/metrics.py")
    S, T, size = 3, 14, 20
    draft, verifier, mask = steps_of(0, S, T, size)
    for x in draft:  # a draft that is often right
        x.data += 2.0 * verifier
    eye = torch.eye(size, device=DEVICE)
    loss = SpeculatorLoss(divergence="lk_hybrid", teacher_softmax="draft", decay=0.7, offset=0)
    # Their verifier's logits and mask are of the predicted token: our mask is one position later.
    ours = loss(draft, eye, teacher_hidden=verifier, teacher_weight=eye, mask=mask.roll(1, 1))
    total, correct, valid = 0.0, torch.zeros(T, S), torch.zeros(T, S, dtype=torch.bool)
    for k in range(S):
        z, t, counted = draft[k][:, : T - 1 - k], verifier[:, k : T - 1], mask[:, k : T - 1]
        values = eager.lk_hybrid_loss(z, t)
        total = total + 0.7**k * (values * counted).sum() / counted.sum()
        correct[: T - 1 - k, k], valid[: T - 1 - k, k] = (
            (z.argmax(-1) == t.argmax(-1)).float()[0].cpu(),
            counted[0].cpu(),
        )
    assert torch.allclose(ours.loss, total, rtol=1e-5)
    lengths, chains = metrics.compute_accepted_length_counts(correct, valid)
    assert ours.metrics["accepted_length"].item() == pytest.approx((lengths / chains).item(), abs=1e-6)
    for a, b in zip(torch.autograd.grad(ours.loss, draft), torch.autograd.grad(total, draft), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_acceptance_of_specforge():
    """The verifier's softmax over all ids, rows whose best id the draft lacks, and its negative logarithm."""
    lk = file_of("specforge", "core/lk_loss.py")
    generator = torch.Generator("cpu").manual_seed(4)
    rows, D, V = 30, 40, 70
    draft = (2 * torch.randn(rows, D, generator=generator)).to(DEVICE).requires_grad_()
    verifier = (2 * torch.randn(rows, V, generator=generator)).to(DEVICE)
    ids = torch.randperm(V, generator=generator)[:D].to(DEVICE)
    covered = torch.isin(verifier.argmax(-1), ids)
    probs = verifier.softmax(-1)[:, ids]
    options = {"logits": draft[None], "target_probs": probs[None]}
    rate, logarithm = lk.compute_acceptance_rate(**options, position_mask=covered[None, :, None])
    expected = lk.compute_lk_loss(
        kl_loss=torch.zeros(()),
        acceptance_rate=rate,
        log_acceptance_rate=logarithm,
        lk_loss_type="alpha",
        kl_scale=1.0,
        kl_decay=3.0,
    )
    eyes = [torch.eye(size, device=DEVICE) for size in (D, V)]
    pad = [torch.stack((x, torch.zeros_like(x)), 1) for x in (draft, verifier)]
    loss = SpeculatorLoss(divergence="neg_log_acceptance", drop_outside=True, offset=0)
    given = {"teacher_hidden": pad[1], "teacher_weight": eyes[1], "draft_ids": ids}
    out = loss([pad[0]], eyes[0], num_items=int(covered.sum()), **given)
    assert 0 < covered.sum() < rows
    assert torch.allclose(out.loss, expected, rtol=1e-5)
    # The metric is of all rows.
    whole, _ = lk.compute_acceptance_rate(**options, position_mask=torch.ones(1, rows, 1, device=DEVICE))
    assert out.metrics["step_0/acceptance"].item() == pytest.approx(whole.item(), rel=1e-5)
    ours, theirs = (torch.autograd.grad(x, draft)[0] for x in (out.loss, expected))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-7)


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
