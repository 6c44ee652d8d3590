"""ORPO and DPO as each library offers them, the chosen sequences first, every token supervised:
`(hidden (2B, T, H), weight (V, H), targets (2B, T)) -> ORPO`, and with `ref_hidden (2B, T, H), ref_weight (V,
H)` behind them, DPO.

Signatures were checked against liger-kernel 0.8.5 and trl 1.16.0.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.registry import Peers

PEERS = Peers()

BETA = 0.1


@PEERS.add("logitless")
def logitless():
    from logitless import DPOLoss, ORPOLoss

    orpo, dpo = ORPOLoss(beta=BETA), DPOLoss(beta=BETA)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, *reference: Tensor):
        named = dict(zip(("ref_hidden", "ref_weight"), reference))
        return (dpo if named else orpo)(hidden, weight, targets, **named)

    return loss


def orpo(logps: Tensor) -> Tensor:
    """NLL of the chosen tokens - beta * log sigma(log odds_c - log odds_r), from log-probabilities (2B,
    T)."""
    means = logps.mean(1)
    chosen, rejected = (means - torch.log1p(-means.exp())).chunk(2)
    return -logps.chunk(2)[0].mean() - BETA * F.logsigmoid(chosen - rejected).mean()


def dpo(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """-log sigma(beta * (log-ratio_c - log-ratio_r)), from log-probabilities (2B, T) of the policy and of the
    reference."""
    chosen, rejected = (logps - ref_logps).sum(1).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def preference(token_logps: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Both losses of the log-probabilities that `token_logps(hidden, weight, targets)` gives."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, *reference: Tensor) -> Tensor:
        logps = token_logps(hidden, weight, targets)
        if not reference:
            return orpo(logps)
        with torch.no_grad():
            ref_logps = token_logps(*reference, targets)
        return dpo(logps, ref_logps)

    return loss


def full_logps(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


eager_loss = preference(full_logps)


@PEERS.add("eager, fp32 upcast")
def eager():
    return eager_loss


@PEERS.add("torch.compile", needs_cuda=True)
def compiled():
    # A graph for every shape, so that the peer is not slowed down by symbolic sizes.
    run = torch.compile(eager_loss, dynamic=False)
    # Fresh views: Liger marks the tensors that it is given as dynamic, which holds for whoever compiles with
    # them later.
    return lambda *tensors: run(*(x.view_as(x) for x in tensors))


@PEERS.add("Liger", package="liger-kernel", needs_cuda=True)
def liger():
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearORPOLoss

    orpo, dpo = LigerFusedLinearORPOLoss(beta=BETA), LigerFusedLinearDPOLoss(beta=BETA)

    # Weight first; the loss comes with metrics. The default chunk is one pair.
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, *reference: Tensor) -> Tensor:
        named = dict(zip(("ref_input", "ref_weight"), reference))
        return (dpo if named else orpo)(weight, hidden, targets, **named)[0]

    return loss


def trl_logps() -> Callable[..., Tensor]:
    """TRL's log-probabilities as its trainers get them (trl/trainer/utils.py, `_fused_forward`), without
    optional outputs."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as vocab_chunk

    def token_logps(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        operands = hidden.flatten(0, 1), weight, None, targets.flatten()
        return ChunkedLogProbFunction.apply(*operands, 1.0, vocab_chunk, None, 1.0, ())[0].view(targets.shape)

    return token_logps


@PEERS.add("TRL ChunkedLogProb", package="trl")
def trl():
    return preference(trl_logps())
