"""Cross-entropy of a head that is sharded over the vocabulary, as each library offers it:
`(group, hidden (N, H), weight (V / ranks, H), targets (N,)) -> loss`, mean over targets != -100.

All shards have equal sizes.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.harness.registry import Peers

PEERS = Peers()


@PEERS.add("PyTorch loss_parallel, fp32 upcast")
def torch_loss_parallel():
    def loss(group, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        mesh = DeviceMesh.from_group(group, hidden.device.type)
        hidden, weight = (
            DTensor.from_local(tensor, mesh, [placement])
            for tensor, placement in ((hidden, Replicate()), (weight, Shard(0)))
        )
        return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets).to_local()

    return loss


@PEERS.add("Liger scaled CE, TP", package="liger-kernel", needs_cuda=True)
def liger():
    from liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp

    def loss(group, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        per_token = liger_fused_linear_scaled_cross_entropy_tp(hidden, weight, targets, group)
        return per_token.sum() / (targets != -100).sum()

    return loss
