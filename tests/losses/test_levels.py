"""Inputs per sequence or per token, in packed calls that have as many tokens as sequences."""

import pytest
import torch

from logitless import DPOLoss, GRPOLoss, KTOLoss, PPOLoss, REINFORCELoss, RLOOLoss
from tests.support import DEVICE

generator = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = (torch.randn(n, 3, generator=generator, device="cpu").to(DEVICE) for n in (2, 5))
# Sequences of 2 tokens and of none, which have targets 1 and 3.
CALL = HIDDEN, WEIGHT, torch.tensor([1, 3], device=DEVICE)
CU_SEQLENS = torch.tensor([0, 2, 2], device=DEVICE)
X = torch.tensor([0.5, -2.0], device=DEVICE)
LOGPS = (HIDDEN @ WEIGHT.T).log_softmax(-1)[[0, 1], [1, 3]]
OLD = LOGPS - 0.1
PER_SEQUENCE = {"advantages": torch.ones(2, 1, device=DEVICE)}
UNSUPERVISED = torch.tensor([1, -100], device=DEVICE)
KL = {"kl_hidden": HIDDEN, "kl_targets": UNSUPERVISED, "kl_cu_seqlens": CU_SEQLENS}


def kto(kl=0.0, **reference):
    return KTOLoss()(*CALL, cu_seqlens=CU_SEQLENS, labels=X > 0, kl=kl, **reference)


def dpo(x):
    # Of two pairs: the sequences have 2, 0, 1 and 1 tokens.
    starts = torch.tensor([0, 2, 2, 3, 4], device=DEVICE)
    hidden, targets = HIDDEN.repeat(2, 1), CALL[2].repeat(2)
    x = x.repeat(*(2 if n == 2 else 1 for n in x.shape))
    return DPOLoss()(hidden, WEIGHT, targets, cu_seqlens=starts, ref_logps=x)


def of(loss, name: str, **inputs):
    """A call of the loss with the input `name`."""
    return lambda x: loss(*CALL, cu_seqlens=CU_SEQLENS, **inputs | {name: x})


CALLS = {
    "GRPO's advantages": of(GRPOLoss(), "advantages"),
    "GRPO's importance_weights": of(GRPOLoss(), "importance_weights", **PER_SEQUENCE),
    "VESPO's importance_weights": of(GRPOLoss(loss_type="vespo"), "importance_weights", **PER_SEQUENCE),
    "PPO's advantages": of(PPOLoss(), "advantages"),
    "REINFORCE's advantages": of(REINFORCELoss(), "advantages"),
    "RLOO's old_logps": of(RLOOLoss(), "old_logps", **PER_SEQUENCE),
    "KTO's ref_logps": lambda x: kto(ref_logps=x),
    "KTO's ref_logps in kl": lambda x: kto(kl=KL | {"ref_logps": x - 9}, ref_logps=X[:, None]),
    "DPO's ref_logps": dpo,
}


@pytest.mark.parametrize("name", CALLS)
def test_as_many_tokens_as_sequences(name):
    """Shape (N,) is refused, (sequences, 1) is per sequence, and (1, N) per token."""
    x = X.abs() if "weights" in name else X
    message = rf"{name.split()[1]}: expected shape \((\d), 1\), one per sequence, or \(1, \1\), one per token"
    with pytest.raises(ValueError, match=message):
        CALLS[name](x)
    per_sequence, per_token = CALLS[name](x[:, None]), CALLS[name](x[None])
    assert per_sequence.loss.isfinite() and per_token.loss.isfinite()
    assert abs(per_sequence.loss - per_token.loss) > 1e-3


def test_one_token_that_is_its_sequence():
    """Both readings are the same, so (1,) is not refused; a token that is not supervised has no reference."""
    one = torch.tensor([0, 1], device=DEVICE)
    given = {"cu_seqlens": one, "labels": torch.ones(1, dtype=torch.bool, device=DEVICE), "kl": 0.0}
    call, nothing = (HIDDEN[:1], WEIGHT), torch.tensor([-100], device=DEVICE)
    for x in (X[1:], X[1:, None]):
        assert KTOLoss()(*call, nothing, ref_logps=x, **given).loss.item() == 0.5
        expected = torch.sigmoid(-0.1 * (LOGPS[0] + 2)).item()
        assert KTOLoss()(*call, CALL[2][:1], ref_logps=x, **given).loss.item() == pytest.approx(expected)
        out = GRPOLoss()(*call, CALL[2][:1], cu_seqlens=one, advantages=x)
        assert out.loss.item() == pytest.approx(2.0)


@pytest.mark.parametrize("packed", [False, True])
def test_phi_of_a_sequence_without_tokens(packed):
    """VESPO's weight of an empty product of ratios is 1, and counts in the mean over sequences, as in TRL."""
    given = {"advantages": torch.tensor([1.0, -1.0], device=DEVICE), "old_logps": OLD}
    call = CALL
    if packed:
        given |= {"cu_seqlens": CU_SEQLENS, "advantages": given["advantages"][:, None]}
    else:
        call = HIDDEN.expand(2, 2, 3), WEIGHT, torch.stack((CALL[2], torch.full_like(CALL[2], -100)))
        given["old_logps"] = OLD.expand(2, 2)
    actual = GRPOLoss(loss_type="vespo")(*call, **given).metrics["vespo/phi_seq_mean"]
    w = torch.tensor(0.2).exp()
    phi = w**2 * (3 * (1 - w)).exp()
    assert actual.item() == pytest.approx((phi.item() + 1) / 2, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradient_of_a_corrected_kl(level):
    """kl * ratio has the derivative -d * ratio, d = ref_logp - logp, however large exp(d) is."""
    weight, gap = WEIGHT.clone().requires_grad_(), torch.tensor([[12.5], [25.0]], device=DEVICE)
    hidden, targets = HIDDEN[:, None], CALL[2][:, None]
    given = {"old_logps": OLD[:, None], "ref_logps": LOGPS[:, None] + gap}
    loss = GRPOLoss(beta=1.0, use_bias_correction_kl=True, importance_sampling_level=level, reduction="sum")
    loss(hidden, weight, targets, advantages=torch.zeros(2, device=DEVICE), **given).loss.backward()
    exact = weight.detach().double().requires_grad_()
    logps = (HIDDEN.double() @ exact.T).log_softmax(-1)[[0, 1], CALL[2]]
    slope = -gap[:, 0].double() * torch.tensor(0.1).double().exp()
    (slope * logps).sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_gradient_of_a_corrected_kl_of_tokens_in_one_sequence():
    """With GSPO-token, each token has the derivative -d * ratio, whose ratio is that of the sequence."""
    weight, gap = WEIGHT.clone().requires_grad_(), torch.tensor([[20.0, 25.0]], device=DEVICE)
    given = {"old_logps": OLD[None], "ref_logps": LOGPS[None] + gap}
    loss = GRPOLoss(beta=1.0, importance_sampling_level="sequence_token", reduction="sum")
    loss(
        HIDDEN[None], weight, CALL[2][None], advantages=torch.zeros(1, device=DEVICE), **given
    ).loss.backward()
    exact = weight.detach().double().requires_grad_()
    logps = (HIDDEN.double() @ exact.T).log_softmax(-1)[[0, 1], CALL[2]]
    ratio = (logps.detach() - OLD.double()).mean().exp()
    (-gap[0].double() * ratio * logps).sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
