"""docs/losses.md: every row is computed, and compared with the framework's formula on full logits in fp64."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import logitless
from tests import reference

PAGE = (Path(__file__).parents[1] / "docs" / "losses.md").read_text()
B, T, H, V = 4, 6, 5, 30
pytestmark = pytest.mark.usefixtures("uncompiled")


def table(title: str) -> dict[tuple[str, str], list[str]]:
    """(framework, name) -> the other cells of a row."""
    text = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {(framework, name.replace("`", "")): rest for framework, name, *rest in cells}


def loss_of(cell: str):
    return eval(cell.strip("`"), vars(logitless))


POLICIES, KLS, CORRECTIONS = (
    table(x) for x in ("Policy losses", "KL to a reference model", "Sampler corrections")
)


def rollout() -> SimpleNamespace:
    make = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    x = SimpleNamespace(hidden=random(B, T, H), weight=random(V, H))
    x.targets = torch.randint(0, V, (B, T), generator=make)
    x.mask = torch.arange(T) < torch.tensor([[6], [4], [1], [5]])
    logps = reference.token_logprobs(x.hidden, x.weight, x.targets)[0]
    x.old = (logps + 0.5 * random(B, T)).clamp(max=-1e-3)
    x.sampled = x.old + 0.7 * random(B, T)
    x.ref = logps + 1.5 * random(B, T)
    x.A = random(B)[:, None].expand(B, T)
    return x


def sg(x: Tensor) -> Tensor:
    return x.detach()


def mean(x, values: Tensor) -> Tensor:
    return total(x, values) / x.mask.sum()


def total(x, values: Tensor) -> Tensor:
    return (values * x.mask).sum()


def of_sequence(x, values: Tensor) -> Tensor:
    """(B, 1) the mean over each sequence."""
    return (values * x.mask).sum(1, keepdim=True) / x.mask.sum(1, keepdim=True)


def ppo(x, ratio: Tensor | None = None, *, low=0.2, high=0.2, c=None) -> Tensor:
    ratio = x.r if ratio is None else ratio
    worse = torch.maximum(-x.A * ratio, -x.A * ratio.clamp(1 - low, 1 + high))
    return worse if c is None else torch.where(x.A < 0, torch.minimum(-x.A * c, worse), worse)


def dppo(x, keep: Tensor, c: float = 1e9) -> Tensor:
    """The gradient of verl's, the value of prime-rl's."""
    weight = sg(x.r.clamp(max=c)) * keep
    gradient = -x.A * weight * x.logps
    return gradient - sg(gradient) - weight * x.A


def binary(x, distance: Tensor) -> Tensor:
    return torch.where(x.A > 0, (x.p < x.q) | (distance <= 0.2), (x.p > x.q) | (distance <= 0.2))


def binary_kl(x) -> Tensor:
    return x.q * (x.q / x.p).log() + (1 - x.q) * ((1 - x.q) / (1 - x.p)).log()


def gmpo(x, epsilon: float) -> Tensor:
    sign = x.A.sign()
    clipped = sign * torch.minimum(sign * x.l, sign * x.l.clamp(-epsilon, epsilon))
    return (-x.A[:, :1] * of_sequence(x, clipped).exp()).mean()


def cispo(x, low: float, high: float) -> Tensor:
    return -sg(x.r.clamp(low, high)) * x.A * x.logps


def sapo(x) -> Tensor:
    tau = torch.where(x.A > 0, x.A.new_tensor(1.0), x.A.new_tensor(1.05))
    return -x.A * torch.sigmoid(tau * (x.r - 1)) * 4 / tau


def gspo_token(x) -> Tensor:
    return (x.logps - sg(x.logps) + sg(of_sequence(x, x.l))).exp()


def opd(x) -> Tensor:
    """prime-rl's ref_kl, in which the advantage is that of the teacher alone."""
    x.A = sg(x.ref - x.logps)
    return dppo(x, (x.p - x.q >= -0.2) & (x.p - x.q <= 1.0)) + 1e-3 * x.l**2


FORMULAS = {
    ("verl", "vanilla"): lambda x: mean(x, ppo(x, c=3.0)),
    ("verl", "dppo_tv"): lambda x: mean(x, dppo(x, binary(x, (x.p - x.q).abs()), 3.0)),
    ("verl", "dppo_kl"): lambda x: mean(x, dppo(x, binary(x, binary_kl(x)), 3.0)),
    ("verl", "gspo"): lambda x: mean(x, ppo(x, gspo_token(x))),
    ("verl", "sapo"): lambda x: of_sequence(x, sapo(x)).mean(),
    ("verl", "gpg"): lambda x: mean(x, -x.A * x.logps),
    ("verl", "geo_mean"): lambda x: gmpo(x, 0.2),
    ("verl", "dro"): lambda x: mean(x, -(x.A * x.logps - 0.5 * 0.05 * x.l**2)),
    ("verl", "cispo"): lambda x: mean(x, cispo(x, 0.8, 1.2)),
    ("verl", "bypass_mode, reinforce"): lambda x: mean(
        x, -x.A * x.logps * sg((x.logps - x.sampled).exp().clamp(max=2.0))
    ),
    ("verl", "seq-mean-token-mean"): lambda x: of_sequence(x, ppo(x)).mean(),
    ("verl", "seq-mean-token-sum"): lambda x: total(x, ppo(x)) / B,
    ("verl", "seq-mean-token-sum-norm"): lambda x: total(x, ppo(x)) / B / T,
    ("verl", "token-sum"): lambda x: total(x, ppo(x)),
    ("prime-rl", "default"): lambda x: mean(x, dppo(x, binary(x, (x.p - x.q).abs())) + 1e-3 * x.l**2),
    ("prime-rl", "ipo"): lambda x: mean(x, dppo(x, (x.p - x.q).abs() <= 0.1) + 1e-3 * x.l**2),
    ("prime-rl", "ref_kl"): lambda x: mean(x, opd(x)),
    ("TRL", "grpo"): lambda x: of_sequence(x, ppo(x)).mean(),
    ("TRL", "GSPO"): lambda x: of_sequence(x, ppo(x, of_sequence(x, x.l).exp().expand(B, T))).mean(),
    ("TRL", "GMPO"): lambda x: gmpo(x, 0.4),
    ("TRL", "delta"): lambda x: mean(x, -torch.minimum(x.r.clamp(max=1.5) * x.A, x.r.clamp(0.8, 1.2) * x.A)),
    ("NeMo-RL", "cispo"): lambda x: mean(x, cispo(x, 0.8, 1.2)),
    ("Tinker", "importance_sampling"): lambda x: total(x, -x.r * x.A),
    ("Tinker", "ppo"): lambda x: total(x, ppo(x)),
    ("Tinker", "cispo"): lambda x: total(x, cispo(x, 0.0, 4.0)),
    ("Tinker", "dro"): lambda x: total(x, -x.A * x.logps + 0.025 * x.l**2),
    ("Tinker", "on-policy distillation"): lambda x: total(x, -x.r * x.A),
}


def k3(x, largest: float = 1e9) -> Tensor:
    d = x.ref - x.logps
    return (d.exp() - d - 1).clamp(max=largest)


def straight_through(value: Tensor, x) -> Tensor:
    k2 = (x.ref - x.logps) ** 2 / 2
    return k2 - sg(k2) + sg(value)


KL_FORMULAS = {
    ("TRL", "default"): lambda x: k3(x) * x.r,
    ("TRL", "use_bias_correction_kl=False"): k3,
    ("verl", "kl"): lambda x: x.logps - x.ref,
    ("verl", "abs"): lambda x: (x.logps - x.ref).abs(),
    ("verl", "mse"): lambda x: 0.5 * (x.logps - x.ref) ** 2,
    ("verl", "low_var_kl"): lambda x: k3(x, 10.0),
    ("verl", "low_var_kl+"): lambda x: straight_through(k3(x, 10.0), x),
}
INPUTS = {"old_logps": "old", "sampling_logps": "sampled", "ref_logps": "ref"}


def gradients(x, call) -> list[Tensor]:
    leaves = [y.clone().requires_grad_() for y in (x.hidden, x.weight)]
    value = call(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def compare(row: list[str], formula, *, advantages: str = "sequences") -> None:
    cell, inputs, *_ = row
    x = rollout()
    if advantages == "tokens":
        x.A = x.A * x.ref.cos()
    if advantages == "zeros":
        x.A = torch.zeros_like(x.A)
    given = {"advantages": x.A if advantages == "tokens" else x.A[:, 0], "mask": x.mask}
    given |= {name: getattr(x, INPUTS[name]) for name in inputs.split(", ") if name}

    def truth(hidden: Tensor, weight: Tensor) -> Tensor:
        x.logps = (hidden @ weight.T).log_softmax(-1).gather(-1, x.targets[..., None])[..., 0]
        x.l = x.logps - x.old
        x.r, x.p, x.q = x.l.exp(), sg(x.logps).exp(), x.old.exp()
        return formula(x)

    ours = gradients(x, lambda *operands: loss_of(cell)(*operands, x.targets, **given).loss)
    for actual, expected in zip(ours, gradients(x, truth), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    assert ours[1].norm() > 1e-3


@pytest.mark.parametrize("row", POLICIES, ids=str)
def test_policy_losses(row):
    of_row = {"on-policy distillation": "tokens", "ref_kl": "zeros"}
    compare(POLICIES[row], FORMULAS[row], advantages=of_row.get(row[1], "sequences"))


@pytest.mark.parametrize("row", KLS, ids=str)
def test_kl(row):
    compare(KLS[row], lambda x: mean(x, ppo(x) + 0.1 * KL_FORMULAS[row](x)))


def within(w: Tensor, low: float = 0.0, high: float = 1e9) -> Tensor:
    return (w >= low) & (w <= high)


def geometric(x) -> Tensor:
    return of_sequence(x, x.old - x.sampled)


FACTORS = {
    ("TRL", "token_truncate"): lambda x: x.w.clamp(max=3),
    ("TRL", "token_mask"): lambda x: x.w.masked_fill(x.w > 3, 0),
    ("TRL", "sequence_truncate"): lambda x: x.product.clamp(max=3),
    ("TRL", "sequence_mask"): lambda x: x.product.masked_fill(x.product > 3, 0),
    ("verl", "rollout_is=token"): lambda x: x.w.clamp(max=2),
    ("verl", "rollout_is=sequence"): lambda x: x.product.clamp(max=2),
    ("verl", 'rollout_is_threshold="0.5_5.0"'): lambda x: x.w * within(x.w, 0.5, 5),
    # verl's k1 is log p(sampler) - log p(old), and its bounds are those of exp(k1).
    ("verl", 'rollout_rs=token_k1, "0.5_5.0"'): lambda x: within(1 / x.w, 0.5, 5).double(),
    ("verl", 'rollout_rs=seq_sum_k1, "0.5_5.0"'): lambda x: within(1 / x.product, 0.5, 5).double(),
    ("verl", 'rollout_rs=seq_mean_k3, "0.01"'): lambda x: within(
        of_sequence(x, x.w - 1 - x.w.log()), high=0.01
    ).double(),
    ("verl", 'rollout_rs=token_k2, "0.5"'): lambda x: within(x.w.log() ** 2 / 2, high=0.5).double(),
    ("NeMo-RL", "tis"): lambda x: x.w.clamp(max=2),
    ("NeMo-RL", "icepop"): lambda x: x.w * within(x.w, 0.5, 5),
    ("NeMo-RL", "seq-mask-tis"): lambda x: x.w * within(geometric(x).exp(), 0.9, 1.1),
    ("ms-swift", "sequence_truncate"): lambda x: geometric(x).exp().clamp(max=2),
}


@pytest.mark.parametrize("row", CORRECTIONS, ids=str)
def test_corrections(row):
    x = rollout()
    if "seq_mean_k3" in row[1]:
        x.sampled[0] = x.old[0] + 0.1
    if row[1] == "seq-mask-tis":
        x.sampled[1] = x.old[1] + torch.tensor([0.3, -0.3] * 3)
    x.w = (x.old - x.sampled).exp()
    x.product = (torch.where(x.mask, x.old - x.sampled, 0)).sum(1, keepdim=True).exp()
    corrections = loss_of(CORRECTIONS[row][0])
    corrections = corrections if isinstance(corrections, tuple) else (corrections,)
    actual = torch.ones(B, T, dtype=torch.float64)
    for correction in corrections:
        actual = actual * correction.weights(x.old, x.sampled, x.mask)
    expected = FACTORS[row](x).expand(B, T)
    torch.testing.assert_close(actual[x.mask], expected[x.mask])
    assert len(expected[x.mask].unique()) > 1


def skewed(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / (0.1 * p + 0.9 * q)).log()).sum(-1)


def topk_kl(x) -> Tensor:
    (values, ids), log_s = x.topk, x.s.log()
    return (values.exp() * (values - log_s.gather(-1, ids))).sum(-1)


def tail_kl(x) -> Tensor:
    values, ids = x.topk
    rest, s_rest = 1 - values.exp().sum(-1), 1 - x.s.gather(-1, ids).sum(-1)
    return topk_kl(x) + rest * (rest / s_rest).log()


def dft(x) -> Tensor:
    p = x.s.gather(-1, x.targets[..., None])[..., 0]
    return -p.detach() * p.log()


DIVERGENCES = {
    "skewed KL": lambda x: skewed(x.t, x.s),
    "skewed reverse KL": lambda x: skewed(x.s, x.t),
    "forward_kl_topk": topk_kl,
    "knowledge distillation": topk_kl,
    "tail bucket": tail_kl,
    "dft": dft,
}


@pytest.mark.parametrize("row", table("Distillation"), ids=str)
def test_distillation(row):
    x = rollout()
    logits = x.hidden.flip(0) @ x.weight.T
    x.t = logits.softmax(-1)
    x.topk = x.t.log().topk(5)
    loss, formula = loss_of(table("Distillation")[row][0]), DIVERGENCES[row[1]]
    given = {"teacher_hidden": x.hidden.flip(0), "teacher_weight": x.weight}
    given = (
        {"teacher_logprobs_topk": x.topk}
        if getattr(loss, "topk_mode", "tail") == "partial" or "tail" in row[1]
        else given
    )
    given = {} if row[1] == "dft" else given

    def truth(hidden: Tensor, weight: Tensor) -> Tensor:
        x.s = (hidden @ weight.T).softmax(-1)
        return mean(x, formula(x))

    ours = gradients(x, lambda *operands: loss(*operands, x.targets, mask=x.mask, **given).loss)
    for actual, expected in zip(ours, gradients(x, truth), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
