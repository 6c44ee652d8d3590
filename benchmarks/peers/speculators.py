"""The forward KL of a draft's steps from its verifier, the sum of the steps' means over all pairs:
`(hiddens, (N, H) per step, weight (D, H), verifier_hidden (N, H), verifier_weight (D, H)) -> loss`.

Row i of step k is compared with row i + 1 + k of the verifier, whose head is cut to the draft's ids.
Signatures were checked against speculators 0.9.0.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.harness.registry import Peers

PEERS = Peers()


def pairs(k: int, draft: Tensor, verifier: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of step k that have a token to predict, and those of the verifier that predict it."""
    count = len(draft) - 2 - k
    return draft[:count], verifier[1 + k : 1 + k + count]


@PEERS.add("logitless")
def logitless():
    from logitless import SpeculatorLoss

    kl = SpeculatorLoss(teacher_softmax="draft", decay=1.0)

    def loss(hiddens: Sequence[Tensor], weight: Tensor, verifier_hidden: Tensor, verifier_weight: Tensor):
        # One document.
        return kl(
            [hidden[None] for hidden in hiddens],
            weight,
            teacher_hidden=verifier_hidden[None],
            teacher_weight=verifier_weight,
        )

    return loss


@PEERS.add("logitless, a DistillationLoss per step")
def logitless_by_step():
    from logitless import DistillationLoss

    kl = DistillationLoss(divergence="forward_kl")

    def loss(
        hiddens: Sequence[Tensor], weight: Tensor, verifier_hidden: Tensor, verifier_weight: Tensor
    ) -> Tensor:
        total = 0.0
        for k, hidden in enumerate(hiddens):
            rows, taught = pairs(k, hidden, verifier_hidden)
            total = total + kl(rows, weight, teacher_hidden=taught, teacher_weight=verifier_weight).loss
        return total

    return loss


def of_logits(divergence: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    """The loss by a function of the logits of draft and verifier, (1, n, D) each, with values (1, n).

    The verifier's logits are computed once for all steps.
    """

    def loss(
        hiddens: Sequence[Tensor], weight: Tensor, verifier_hidden: Tensor, verifier_weight: Tensor
    ) -> Tensor:
        taught = verifier_hidden @ verifier_weight.t()
        total = 0.0
        for k, hidden in enumerate(hiddens):
            draft, verifier = pairs(k, hidden @ weight.t(), taught)
            total = total + divergence(draft[None], verifier[None]).mean()
        return total

    return loss


def eager_kl(draft: Tensor, verifier: Tensor) -> Tensor:
    log_q, log_p = (x.float().log_softmax(-1) for x in (draft, verifier))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


eager_loss = of_logits(eager_kl)


@PEERS.add("eager, fp32 upcast")
def eager():
    return eager_loss


@PEERS.add("torch.compile", needs_cuda=True)
def compiled():
    # A graph for every shape, so that the peer is not slowed down by symbolic sizes.
    return torch.compile(eager_loss, dynamic=False)


@PEERS.add("speculators, eager", package="speculators")
def speculators_eager():
    from speculators.losses.eager import kl_div_loss

    return of_logits(kl_div_loss)


@PEERS.add("speculators, fused kernel", package="speculators", needs_cuda=True)
def speculators_fused():
    from speculators.losses import kl_div_loss

    return of_logits(kl_div_loss)
