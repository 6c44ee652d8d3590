"""GRPO as each library offers it, with DAPO's mean over all tokens, clipped at 0.2, without a KL, every token
supervised: `(hidden (B, T, H), weight (V, H), targets (B, T), advantages (B,), old_logps (B, T)) -> loss`.

Signatures were checked against liger-kernel 0.8.5 and trl 1.16.0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.registry import Peers
from benchmarks.peers.preference import full_logps, trl_logps

PEERS = Peers()

EPSILON = 0.2
OPTIONS = {"loss_type": "dapo", "beta": 0.0}


@PEERS.add("logitless")
def logitless(**options):
    from logitless import GRPOLoss

    grpo = GRPOLoss(**OPTIONS, epsilon=EPSILON, **options)
    return lambda hidden, weight, targets, advantages, old_logps: grpo(
        hidden, weight, targets, advantages=advantages, old_logps=old_logps
    )


@PEERS.add("logitless, fp32 logits")
def logitless_fp32():
    return logitless(logits_dtype=torch.float32)


def grpo(logps: Tensor, advantages: Tensor, old_logps: Tensor) -> Tensor:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) with r = exp(logp - old_logp), from log-probabilities
    (B, T)."""
    ratio, advantages = (logps - old_logps).exp(), advantages[:, None]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages).mean()


def policy(token_logps: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss of the log-probabilities that `token_logps(hidden, weight, targets)` gives."""

    def loss(
        hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, old_logps: Tensor
    ) -> Tensor:
        return grpo(token_logps(hidden, weight, targets), advantages, old_logps)

    return loss


eager_loss = policy(full_logps)


@PEERS.add("eager, fp32 upcast")
def eager():
    return eager_loss


@PEERS.add("torch.compile", needs_cuda=True)
def compiled():
    # A graph for every shape, so that the peer is not slowed down by symbolic sizes.
    return torch.compile(eager_loss, dynamic=False)


@PEERS.add("Liger", package="liger-kernel", needs_cuda=True)
def liger():
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    grpo = LigerFusedLinearGRPOLoss(**OPTIONS, epsilon_low=EPSILON, epsilon_high=EPSILON, use_ref_model=False)

    # The loss comes with metrics. The default chunk is one sequence.
    def loss(
        hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, old_logps: Tensor
    ) -> Tensor:
        return grpo(
            hidden, weight, targets, torch.ones_like(targets), advantages, old_per_token_logps=old_logps
        )[0]

    return loss


@PEERS.add("TRL ChunkedLogProb", package="trl")
def trl():
    return policy(trl_logps())
