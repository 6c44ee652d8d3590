"""Boundaries of packed sequences that are wrong are refused by every call that takes them."""

import pytest
import torch
from torch import Tensor

from logitless import (
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    KTOLoss,
    LogitsLoss,
    MedusaHeads,
    MedusaLoss,
    MultiTokenLoss,
    ORPOLoss,
    PPOLoss,
    REINFORCELoss,
    RLOOLoss,
    SimPOLoss,
    Term,
    linear_logprobs,
)
from tests.support import DEVICE, host_reads

N, H, V, S = 12, 6, 11, 4


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), device=DEVICE).view(shape)


HIDDEN, WEIGHT, TARGETS = numbers(N, H), numbers(V, H), torch.arange(N, device=DEVICE) % V
OPERANDS = (HIDDEN, WEIGHT, TARGETS)
LABELS = torch.arange(S, device=DEVICE) % 2 == 0


class Squares(LogitsLoss):
    def terms(self, logits, batch):
        return {"squares": Term(logits.square().sum(-1))}, {}


def plain(kind: type, options: dict | None = None, **inputs):
    def call(cu_seqlens: Tensor, **fields):
        return kind(**options or {}, **fields)(*OPERANDS, cu_seqlens=cu_seqlens, **inputs)

    return call


def policy(kind: type, **options):
    return plain(kind, options, advantages=numbers(S))


def of_kl(cu_seqlens: Tensor, **fields):
    kl = {"kl_hidden": HIDDEN, "kl_targets": TARGETS, "kl_cu_seqlens": cu_seqlens, "ref_logps": numbers(S)}
    hidden, targets = HIDDEN.view(S, 3, H), TARGETS.view(S, 3)
    return KTOLoss(**fields)(hidden, WEIGHT, targets, labels=LABELS, ref_logps=numbers(S), kl=kl)


def medusa(cu_seqlens: Tensor, **fields):
    heads = MedusaHeads(H, V, 2, device=DEVICE)
    return MedusaLoss(**fields)(HIDDEN, heads, TARGETS, base_weight=WEIGHT, cu_seqlens=cu_seqlens)


def logprobs(targets: Tensor):
    def call(cu_seqlens: Tensor, **fields):
        return linear_logprobs(HIDDEN, WEIGHT, targets, shift=True, cu_seqlens=cu_seqlens, **fields)

    return call


TEACHER = {"teacher_hidden": HIDDEN, "teacher_weight": WEIGHT}
CALLS = {
    "cross-entropy, shifted": plain(CrossEntropyLoss, shift=True),
    "cross-entropy": plain(CrossEntropyLoss),
    "distillation, shifted": plain(DistillationLoss, shift=True, **TEACHER),
    "own LogitsLoss, shifted": plain(Squares, shift=True),
    "logprobs": logprobs(TARGETS),
    "logprobs of several ids": logprobs(TARGETS[:, None].expand(N, 3)),
    "multi-token": lambda bounds, **fields: MultiTokenLoss(**fields)(
        [HIDDEN] * 2, WEIGHT, TARGETS, cu_seqlens=bounds
    ),
    "Medusa": medusa,
    "GRPO": policy(GRPOLoss),
    "GRPO, of type grpo": policy(GRPOLoss, loss_type="grpo"),
    "GRPO, whole sequences": policy(GRPOLoss, importance_sampling_level="sequence"),
    "GRPO, top entropy": policy(GRPOLoss, top_entropy_quantile=0.5),
    "PPO": policy(PPOLoss),
    "RLOO": policy(RLOOLoss),
    "REINFORCE": policy(REINFORCELoss),
    "DPO": plain(DPOLoss, ref_logps=numbers(S)),
    "SimPO": plain(SimPOLoss),
    "ORPO": plain(ORPOLoss, nll_targets=TARGETS),
    "KTO": plain(KTOLoss, labels=LABELS, ref_logps=numbers(S), kl=0.1),
    "KTO's kl": of_kl,
}
GOOD = (0, 3, 3, 7, N)
# Wrong boundaries, and what is said of them.
WRONG = {
    "too short": ((0, 3, 3, 7, 11), "the last 11"),
    "too long": ((0, 3, 3, 7, 13), "the last 13"),
    "much too long": ((0, 3, 3, 7, 2**40), "the last 1099511627776"),
    "too late": ((1, 3, 3, 7, N), "the first is 1, the last 12"),
    "negative": ((-1, 3, 3, 7, N), "the first is -1"),
    "falling": ((0, 7, 3, 7, N), "entry 2 is 3 after 7"),
    "falling from beyond": ((0, 3, 3, 13, N), "entry 4 is 12 after 13"),
}
pytestmark = pytest.mark.usefixtures("uncompiled")
calls = pytest.mark.parametrize("name", CALLS)


def bounds(*values, dtype=torch.int32) -> Tensor:
    return torch.tensor(values, dtype=torch.int64 if max(values) > 2**31 else dtype, device=DEVICE)


def argument(name: str) -> str:
    return "kl_cu_seqlens" if name == "KTO's kl" else "cu_seqlens"


@calls
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("compact", [True, False])
def test_right_boundaries(name, dtype, compact):
    actual = CALLS[name](bounds(*GOOD, dtype=dtype), compact=compact)[0]
    assert actual.isfinite().all()


@calls
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_boundaries(name, wrong):
    values, said = WRONG[wrong]
    expected = (
        f"^{argument(name)}: expected non-decreasing boundaries from 0 to {N}, got others: .*{said}.*; "
    )
    with pytest.raises(ValueError, match=expected):
        CALLS[name](bounds(*values))
    if DEVICE.type != "cuda":  # there a failed assertion ends the process's use of the GPU
        with pytest.raises(RuntimeError, match=f"^{argument(name)}: expected non-decreasing boundaries"):
            CALLS[name](bounds(*values), compact=False)


@calls
def test_what_are_no_boundaries(name):
    expected = rf"^{argument(name)}: expected \(sequences \+ 1,\) int64 boundaries, got .*; "
    for given in (bounds(0, N) * 1.0, bounds(0, N) > 0, bounds(0, N)[None], bounds(0)):
        with pytest.raises(ValueError, match=expected):
            CALLS[name](given)


@calls
def test_one_read(name):
    """The boundaries are read with the number of tokens."""
    with host_reads() as reads:
        CALLS[name](bounds(*GOOD))
    heads = {"multi-token": 2, "Medusa": 3, "KTO's kl": 2}
    assert len(reads) == heads.get(name, 1), "\n\n".join(reads)
