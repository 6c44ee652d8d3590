"""Cross-entropy as each library offers it: `(hidden (N, H), weight (V, H), targets (N,)) -> loss`, mean over
targets != -100.

Signatures were checked against liger-kernel 0.8.5, cut-cross-entropy 25.1.1, trl 1.16.0, quack-kernels 0.6.5
and torch 2.13. Liger chooses its kernels once for a process: those in CuTe with `LIGER_KERNEL_IMPL=cutedsl`.
"""

import functools
import importlib
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.registry import Absent, Peers

PEERS = Peers()


@PEERS.add("logitless")
def logitless():
    from logitless import CrossEntropyLoss

    return CrossEntropyLoss()


@PEERS.add("logitless, bf16 d_weight")
def logitless_bf16():
    from logitless import CrossEntropyLoss

    return CrossEntropyLoss(accum_dtype=torch.bfloat16)


def logitless_fp32_logits():
    from logitless import CrossEntropyLoss

    return CrossEntropyLoss(logits_dtype=torch.float32)


def eager_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), targets)


@PEERS.add("eager, fp32 upcast")
def eager():
    return eager_loss


@PEERS.add("torch.compile", needs_cuda=True)
def compiled():
    # A graph for every shape, so that the peer is not slowed down by symbolic sizes.
    return torch.compile(eager_loss, dynamic=False)


def torch_chunks(policy: str, reduction: str = "mean"):
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
        return lambda hidden, weight, targets: F.linear_cross_entropy(
            hidden, weight, targets, options=options, reduction=reduction
        )
    # An older torch can run torch 2.13's Python, of which this takes the reduction "mean": two files of
    # torch/nn/modules on PYTHONPATH.
    if reduction == "none":
        raise Absent(f"reduction='none' is not in torch {torch.__version__}, it came with 2.13")
    try:
        chunked = importlib.import_module("linear_cross_entropy")
        options = importlib.import_module("linear_cross_entropy_options")
    except ImportError:
        raise Absent(f"not in torch {torch.__version__}, it came with 2.13") from None
    options = options.LinearCrossEntropyOptions(acc_policy=policy)

    # The arguments of F.linear_cross_entropy's chunked path, reduction "mean".
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        (N, H), V = hidden.shape, weight.shape[0]
        sizes = {"num_batches": N, "in_features": H, "num_classes": V}
        chosen = options._adjust(**sizes, dtype=hidden.dtype, device=hidden.device)
        how = (chosen.batch_chunk_size, chosen.acc_policy, chosen.acc_dtype, False)
        needs = (hidden.requires_grad, weight.requires_grad, False)
        return chunked._linear_cross_entropy_batch_chunked(
            hidden, weight, targets, None, None, "mean", -100, 0.0, *how, *needs
        )[0]

    return loss


@PEERS.add("torch F.linear_cross_entropy")
def torch_linear_cross_entropy():
    return torch_chunks("auto")


@PEERS.add("torch F.linear_cross_entropy, accurate")
def torch_linear_cross_entropy_accurate():
    return torch_chunks("accurate")


@PEERS.add("torch F.linear_cross_entropy, reduction='none'")
def torch_linear_cross_entropy_none():
    chunks = torch_chunks("auto", "none")

    # The mean of the losses of the tokens, in fp32: that of reduction="mean" is added up in bf16.
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return chunks(hidden, weight, targets).float().sum() / (targets != -100).sum()

    return loss


def of_cute() -> bool:
    return os.environ.get("LIGER_KERNEL_IMPL") == "cutedsl"


@PEERS.add("Liger", package="liger-kernel", needs_cuda=True)
def liger():
    if of_cute():
        raise Absent("this process has Liger's CuTe kernels")
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


@PEERS.add("Liger, accum_dtype fp32", package="liger-kernel", needs_cuda=True)
def liger_fp32():
    if of_cute():
        raise Absent("this process has Liger's CuTe kernels")
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as loss

    return lambda hidden, weight, targets: loss(hidden, weight, targets, accum_dtype=torch.float32)


@PEERS.add("Liger, CuTe", package="liger-kernel", needs_cuda=True)
def liger_cute():
    if not of_cute():
        raise Absent("needs compute capability 10.0, and a process with LIGER_KERNEL_IMPL=cutedsl")
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


@PEERS.add("Liger scaled CE", package="liger-kernel", needs_cuda=True)
def liger_scaled():
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    # Of one token each, 0 where it is ignored; kernels in CuTe on Hopper.
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        found = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets)
        nll = found[0] if isinstance(found, tuple) else found
        return nll.sum() / (targets != -100).sum()

    return loss


@PEERS.add("Liger sm90", package="liger-kernel", needs_cuda=True)
def liger_sm90():
    # For Hopper, N a multiple of 128 and V of 256; no class of Liger calls it.
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return liger_fused_linear_cross_entropy_sm90


@PEERS.add("CCE (filtered)", package="cut-cross-entropy", needs_cuda=True)
def cce():
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


@PEERS.add("CCE (exact)", package="cut-cross-entropy", needs_cuda=True)
def cce_exact():
    from cut_cross_entropy import linear_cross_entropy

    # 25.1.1 has no impl="cce_exact" (later sources do); the gradient filter off is its exact mode.
    return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, filter_eps=None)


@PEERS.add("TRL ChunkedLogProb", package="trl")
def trl():
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as vocab_chunk

    # As the trainers call it (trl/trainer/utils.py, `_fused_forward`): supervised rows only, no optional
    # outputs.
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        mask = targets != -100
        logps = ChunkedLogProbFunction.apply(
            hidden[mask], weight, None, targets[mask], 1.0, vocab_chunk, None, 1.0, ()
        )[0]
        return -logps.sum() / mask.sum().clamp(min=1)

    return loss


def quack(chunk_size: int):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return functools.partial(chunked_linear_cross_entropy, chunk_size=chunk_size)


# Its default, 4,096, raises an error where a chunk has as many rows as a dimension of the head.
for chunk_size in (2048, 8192):
    PEERS.add(f"QuACK, chunks of {chunk_size:,}", package="quack-kernels", needs_cuda=True)(
        functools.partial(quack, chunk_size)
    )


# Of the portable kernels, which other GPUs run: logits rounded to the dtype of the operands, and in fp32.
FP32_LOGITS = "logitless, fp32 logits"
PORTABLE = Peers([peer for peer in PEERS.peers if peer.name in ("logitless", "eager, fp32 upcast")])
PORTABLE.add(FP32_LOGITS)(logitless_fp32_logits)
