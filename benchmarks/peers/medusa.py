"""Medusa heads as each library can train them: `(hidden (1, T, H), heads, targets (1, T), base_weight (V, H)
or None) -> loss`.

With K heads (`MedusaHeads`), position i of head k predicts token i + 2 + k; its mean counts 0.8^k.
`base_weight`, given in stage 2, predicts token i + 1 and counts 1. Signatures were checked against
liger-kernel 0.8.5.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from benchmarks.harness.registry import Peers
from benchmarks.peers.ce import eager_loss as full_cross_entropy

PEERS = Peers()

DECAY = 0.8


class Term(NamedTuple):
    coefficient: float
    offset: int  # position i predicts token i + offset
    block: nn.Module | None
    weight: Tensor  # (V, H)


def terms(heads, base_weight: Tensor | None) -> Iterator[Term]:
    if base_weight is not None:
        yield Term(1.0, 1, None, base_weight)
    for k in range(len(heads)):
        yield Term(DECAY**k, k + 2, heads.blocks(k)[0], heads.projection(k))


@PEERS.add("logitless")
def logitless():
    from logitless import MedusaLoss

    stages = {False: MedusaLoss(decay=DECAY, base_coefficient=0.0), True: MedusaLoss(decay=DECAY)}

    def loss(hidden: Tensor, heads, targets: Tensor, base_weight: Tensor | None):
        return stages[base_weight is not None](hidden, heads, targets, base_weight=base_weight)

    return loss


def head_by_head(cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Blocks by autograd, then `cross_entropy(hidden (n, H), weight, targets (n,))` of each head."""

    def loss(hidden: Tensor, heads, targets: Tensor, base_weight: Tensor | None) -> Tensor:
        total = 0.0
        for coefficient, offset, block, weight in terms(heads, base_weight):
            x = hidden[0, :-offset]
            x = x if block is None else block(x)
            total = total + coefficient * cross_entropy(x, weight, targets[0, offset:])
        return total

    return loss


eager_loss = head_by_head(full_cross_entropy)


@PEERS.add("eager, fp32 upcast")
def eager():
    return eager_loss


@PEERS.add("loop over Liger's fused CE", package="liger-kernel", needs_cuda=True)
def liger():
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    # It gives the weight a gradient only where its input requires one: in stage 1 the block's output does,
    # though hidden does not.
    return head_by_head(liger_fused_linear_cross_entropy)
