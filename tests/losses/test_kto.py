"""KTO's reference point: from unrelated completions, padded or packed, aligned or shifted; never negative."""

import pytest
import torch
from torch import Tensor

from logitless import KTOLoss
from tests.support import DEVICE

B, T, H, H_REF, V = 3, 6, 5, 4, 11
LENGTHS = [4, 2, 6]  # of the packed completions


class Problem:
    """Three sequences, and three unrelated completions, under a policy and a reference."""

    def __init__(self, packed: bool):
        generator = torch.Generator(DEVICE).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device=DEVICE)

        def ids(*shape: int) -> Tensor:
            return torch.randint(0, V, shape, generator=generator, device=DEVICE)

        self.head = random(V, H), random(V)
        self.ref_head = random(V, H_REF), random(V)
        self.hidden, self.ref_hidden, self.targets = random(B, T, H), random(B, T, H_REF), ids(B, T)
        self.labels = torch.tensor([True, False, True], device=DEVICE)
        shape = (sum(LENGTHS),) if packed else (B, T)
        # Small logits rate random tokens higher than large ones do, so that the KL is above 0.
        self.kl_hidden, self.kl_ref = random(*shape, H) / 9, 3 * random(*shape, H_REF)
        self.kl_targets = ids(*shape)
        self.kl_targets.view(-1)[::5] = -100
        bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()] if packed else range(0, B * T + 1, T)
        self.starts = torch.tensor(list(bounds), device=DEVICE)
        self.packed = packed

    def log_ratios(self, shift: bool) -> tuple[Tensor, Tensor, Tensor]:
        """By hand: log-ratios (B,), and the reference's log-probabilities beside the labels and summed."""
        policy = log_probs(self.kl_hidden.view(-1, H), self.head)
        reference = log_probs(self.kl_ref.view(-1, H_REF), self.ref_head)
        labels, bounds = self.kl_targets.view(-1), self.starts.tolist()
        # The values at tokens that do not count must not be used.
        beside, ratios, sums = (
            torch.full_like(policy[:, 0], 9.0),
            torch.zeros_like(policy[:B, 0]),
            torch.zeros_like(policy[:B, 0]),
        )
        for number, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:])):
            for position in range(start, stop - shift):
                label = labels[position + shift]
                if label != -100:
                    beside[position + shift] = reference[position, label]
                    sums[number] += reference[position, label]
                    ratios[number] += policy[position, label] - reference[position, label]
        return ratios, beside.view(self.kl_targets.shape), sums

    def mapping(self, given: str, shift: bool) -> dict[str, Tensor]:
        _, beside, sums = self.log_ratios(shift)
        forms = {
            "hidden": {"ref_hidden": self.kl_ref},
            "token": {"ref_logps": beside},
            "sequence": {"ref_logps": sums},
        }
        starts = {"kl_cu_seqlens": self.starts} if self.packed else {}
        return {"kl_hidden": self.kl_hidden, "kl_targets": self.kl_targets} | starts | forms[given]

    def call(self, kl: object, *, shift: bool = False, **options):
        head = {"ref_hidden": self.ref_hidden, "ref_weight": self.ref_head[0], "ref_bias": self.ref_head[1]}
        inputs = {"labels": self.labels, "kl": kl, "shift": shift} | head
        return KTOLoss(**options)(self.hidden, self.head[0], self.targets, bias=self.head[1], **inputs)

    def loss(self, kl: Tensor | float, *, shift: bool = False, beta: float = 0.1) -> Tensor:
        """TRL's: 1 - sigma(beta (r - z)), or 1 - sigma(beta (z - r)) if undesirable; z = max(kl, 0)."""
        last, first = T - shift, int(shift)
        ids = self.targets[:, first:, None]
        policy = log_probs(self.hidden[:, :last], self.head).gather(-1, ids).sum((1, 2))
        reference = log_probs(self.ref_hidden[:, :last], self.ref_head).gather(-1, ids).sum((1, 2))
        signs = beta * (2 * self.labels.double() - 1)
        return (1 - torch.sigmoid(signs * (policy - reference - max(float(kl), 0.0)))).mean()


def log_probs(hidden: Tensor, head: tuple[Tensor, Tensor]) -> Tensor:
    return (hidden @ head[0].T + head[1]).log_softmax(-1)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
@pytest.mark.parametrize("given", ["token", "sequence", "hidden"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "shifted"])
def test_kl_of_unrelated_completions(shift, packed, given, compact):
    problem = Problem(packed)
    kl = problem.log_ratios(shift)[0].mean()
    assert kl > 1
    out = problem.call(problem.mapping(given, shift), shift=shift, compact=compact)
    torch.testing.assert_close(out.metrics["kl"], kl, rtol=1e-10, atol=0)
    torch.testing.assert_close(out.loss, problem.loss(kl, shift=shift), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "kl", [-0.7, torch.tensor([-3], device="cpu"), torch.tensor(0.7, dtype=torch.float64, device="cpu"), 0]
)
def test_a_given_kl_is_clamped_at_0(kl):
    """As `kl.clamp(min=0)` in TRL's KTOTrainer."""
    problem, value = Problem(packed=False), float(kl)
    out = problem.call(kl, beta=0.5)
    torch.testing.assert_close(out.loss, problem.loss(value, beta=0.5), rtol=1e-6, atol=0)
    assert out.metrics["kl"].item() == pytest.approx(max(value, 0.0), rel=1e-6)


# What is wrong with a packed mapping: entries changed, or dropped (None).
BAD = {
    "flat, and no boundaries": (
        {"kl_cu_seqlens": None},
        ValueError,
        r"kl_targets: expected shape \(B', T'\), got \(12,\); pass .*kl_cu_seqlens",
    ),
    "padded, and boundaries": (
        {"kl_targets": torch.zeros(2, 6, dtype=torch.int64, device=DEVICE)},
        ValueError,
        r"kl_targets: expected shape \(N,\) with kl_cu_seqlens",
    ),
    "boundaries of floats": (
        {"kl_cu_seqlens": torch.tensor([0.0, 4.0, 6.0, 12.0], device=DEVICE)},
        ValueError,
        "kl_cu_seqlens: expected .* int64",
    ),
    "boundaries in a list": (
        {"kl_cu_seqlens": [0, 4, 6, 12]},
        TypeError,
        "kl_cu_seqlens: expected a tensor, got list; pass torch.as_tensor",
    ),
    "reference of two sequences": (
        {"ref_logps": torch.zeros(2, device=DEVICE)},
        ValueError,
        r"ref_logps: expected shape \(3,\) or targets' \(12,\) in kl, got \(2,\)",
    ),
    "another entry": (
        {"kl_mask": torch.ones(12, device=DEVICE)},
        ValueError,
        "kl: expected kl_hidden, kl_targets and one of",
    ),
}


@pytest.mark.parametrize("changes, error, message", BAD.values(), ids=BAD)
def test_bad_kl(changes, error, message):
    problem = Problem(packed=True)
    kl = problem.mapping("sequence", False) | changes
    with pytest.raises(error, match=message):
        problem.call({name: x for name, x in kl.items() if x is not None})


@pytest.mark.parametrize("options", [{}, {"compact": False}, {"reduction": "none"}], ids=str)
def test_sequences_of_one_token(options):
    """As many sequences as tokens, one of them ignored: it has no log-ratio, and counts in the means."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator, device=DEVICE) for shape in ((4, 1, H), (V, H)))
    targets = torch.tensor([[1], [-100], [3], [4]], device=DEVICE)
    labels = torch.tensor([True, True, False, False], device=DEVICE)
    reference = torch.tensor([-1.0, -2.0, -3.0, -4.0], device=DEVICE)
    out = KTOLoss(beta=0.5, **options)(hidden, weight, targets, labels=labels, ref_logps=reference, kl=0.3)
    logps = (hidden @ weight.T).log_softmax(-1)[:, 0].gather(1, targets.clamp(min=0))[:, 0]
    logps = torch.where(targets[:, 0] == -100, 0.0, logps)
    rewards = 0.5 * (logps - reference)
    losses = 1 - torch.sigmoid(torch.where(labels, rewards - 0.5 * 0.3, 0.5 * 0.3 - rewards))
    torch.testing.assert_close(out.loss, losses if "reduction" in options else losses.mean())
    for name, values in (("rewards", rewards), ("logps", logps)):
        assert out.metrics[f"{name}/chosen"].item() == pytest.approx(values[:2].mean().item())
        assert out.metrics[f"{name}/rejected"].item() == pytest.approx(values[2:].mean().item())
