"""Generalized JSD at beta 0.5 as each library offers it, mean over all tokens:
`(hidden (N, H), weight (V, H), teacher_hidden (N, T), teacher_weight (V, T)) -> loss`.

Signatures were checked against liger-kernel 0.8.5 and trl 1.16.0.
"""

import math

import torch
from torch import Tensor

from benchmarks.harness.registry import Peers

PEERS = Peers()


@PEERS.add("logitless")
def logitless():
    from logitless import JSDLoss

    jsd = JSDLoss(beta=0.5)
    return lambda hidden, weight, teacher_hidden, teacher_weight: jsd(
        hidden, weight, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight
    )


def eager_loss(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    student = (hidden @ weight.t()).float().log_softmax(-1)
    teacher = (teacher_hidden @ teacher_weight.t()).float().log_softmax(-1)
    mean = torch.logaddexp(student, teacher) - math.log(2)
    return (student.exp() * (student - mean) + teacher.exp() * (teacher - mean)).sum(-1).mean() / 2


@PEERS.add("eager, fp32 upcast")
def eager():
    return eager_loss


@PEERS.add("torch.compile", needs_cuda=True)
def compiled():
    # A graph for every shape, so that the peer is not slowed down by symbolic sizes.
    return torch.compile(eager_loss, dynamic=False)


# Liger has two: an operator of its own kernels, and the chunks of its preference losses around compiled
# PyTorch.
@PEERS.add("Liger fused_linear_jsd", package="liger-kernel", needs_cuda=True)
def liger_operator():
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    return liger_fused_linear_jsd


@PEERS.add("Liger fused_linear_jsd, accum_dtype fp32", package="liger-kernel", needs_cuda=True)
def liger_operator_fp32():
    from liger_kernel.transformers.functional import liger_fused_linear_jsd as loss

    return lambda *operands: loss(*operands, accum_dtype=torch.float32)


@PEERS.add("Liger chunked_loss", package="liger-kernel", needs_cuda=True)
def liger_chunked():
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    jsd = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5)

    # It takes labels even where no hard loss asks for them: any that are not ignored.
    def loss(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
        return jsd(
            hidden, weight, teacher_hidden, teacher_weight, hidden.new_zeros(len(hidden), dtype=torch.int64)
        )

    return loss


@PEERS.add("TRL ChunkedDivergence", package="trl")
def trl():
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    # As DistillationTrainer calls it: batches of sequences with a mask.
    def loss(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
        mask = torch.ones(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return _chunked_divergence_loss(
            hidden[None], teacher_hidden[None], weight, teacher_weight, mask, beta=0.5
        )[0]

    return loss
