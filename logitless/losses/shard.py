"""Vocabulary-parallel heads: each rank of a group holds some rows of the head, and all ranks the same hidden states and targets.

A chunk's logits stay where they are. What crosses the group is a handful of numbers per token, gathered once a chunk, and the sum of
d_hidden. With lse_r, p_r the log-sum-exp and the softmax within shard r and w_r = exp(lse_r - lse) the shard's share:

    lse = log sum_r exp(lse_r)      log p(y) = log p_r(y) + log w_r, r the shard of y      entropy = sum_r w_r (entropy_r - log w_r)

Every rank then has the same numbers of every token, computes the same loss, and gets the whole d_hidden and its own rows of d_weight.
"""

from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.kernels.cross_entropy import TokenStats
from logitless.kernels.head import Head
from logitless.losses.checks import expect

# A build of PyTorch without torch.distributed has no groups to give.
if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

# The local id of an ignored target; a loss's own `ignore_index` may be any id.
IGNORED = -100
# Logits of several shards count as equal within so many rounding errors of their log-sum-exp.
TIE = 4


def process_group(name: str, given: "dist.ProcessGroup | DeviceMesh | str", weight: Tensor) -> "dist.ProcessGroup":
    """The group that a loss's `tp_group` or `cp_group` names."""
    if isinstance(given, str):
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        names = () if mesh is None else mesh.mesh_dim_names or ()
        expect(given in names, name, f"a dimension of weight's device mesh, one of {names}", repr(given), "or pass a ProcessGroup")
        return mesh.get_group(given)
    if isinstance(given, DeviceMesh):
        expect(given.ndim == 1, name, "a DeviceMesh of one dimension", f"{given.ndim}", "index it by the dimension's name")
        return given.get_group()
    kinds = "a ProcessGroup, a DeviceMesh or the name of a mesh dimension"
    expect(isinstance(given, dist.ProcessGroup), name, kinds, type(given).__name__, "pass one of them", TypeError)
    return given


def local_rows(name: str, x: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """This rank's rows of a head, or of its bias. Of a DTensor every other mesh dimension is gathered, and averages the gradient, as for
    a head that is not vocabulary-parallel."""
    if not isinstance(x, DTensor):
        return x
    mesh = x.device_mesh
    at = next((dim for dim in range(mesh.ndim) if mesh.get_group(dim).group_name == group.group_name), None)
    expect(at is not None, "tp_group", f"a group of {name}'s device mesh {mesh}", group.group_name, "name its dimension")
    fits = x.placements[at] == Shard(0)
    expect(fits, name, "Shard(0) on the dimension of tp_group", x.placements[at], "shard the head by rows, or leave tp_group out")
    placed = [Shard(0) if dim == at else Replicate() for dim in range(mesh.ndim)]
    grads = [Shard(0) if dim == at else Partial("avg") for dim in range(mesh.ndim)]
    return x.redistribute(placements=placed).to_local(grad_placements=grads)


class VocabShard(NamedTuple):
    group: "dist.ProcessGroup"
    sizes: tuple[int, ...]  # rows of each rank's shard

    @classmethod
    def of(cls, weight: Tensor, group: "dist.ProcessGroup") -> Self:
        """From this rank's rows of the head (V_r, H). The sizes cross the group, and are read by the host."""
        own = torch.tensor([weight.shape[0]], device=weight.device)
        sizes = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(sizes, own, group=group)
        return cls(group, tuple(torch.cat(sizes).tolist()))

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def width(self) -> int:
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def columns(self, targets: Tensor, ignore_index: int) -> Tensor:
        """Targets as ids within this shard: its width for those of another one, `IGNORED` for ignored ones."""
        local = targets - self.start
        inside = (local >= 0) & (local < self.width)
        return torch.where(targets == ignore_index, IGNORED, torch.where(inside, local, self.width))

    def rows_of(self, x: Tensor) -> Tensor:
        """This shard's part of something (V,)."""
        return x[self.start : self.start + self.width]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Summed over the group, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_async(self, x: Tensor) -> "dist.Work":
        return dist.all_reduce(x, group=self.group, async_op=True)

    def gathered(self, x: Tensor) -> Tensor:
        """[ranks, ...]"""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in self.sizes]
        dist.all_gather(parts, x, group=self.group)
        return torch.stack(parts)

    def combine(self, stats: TokenStats, columns: Tensor) -> Tensor:
        """Turn a chunk's numbers within each shard into those of the whole vocabulary, in place; returns log w of this shard."""
        names, own = zip(*stats.items(), strict=True)
        shards = dict(zip(names, self.gathered(torch.stack(own)).unbind(1), strict=True))
        lse_r, logps_r = shards["lse"], shards["logps"]
        residual_r = torch.where(lse_r.isfinite(), shards["lse_residual"], 0.0)
        top = lse_r.amax(0)
        shares = (lse_r - top + residual_r).exp()
        whole = shares.sum(0)
        shares = shares / whole
        log_whole = whole.log()
        lse = top + log_whole
        found = {"lse": lse, "lse_residual": torch.where(lse.isfinite(), (top - lse) + log_whole, 0.0)}

        z_y = (logps_r + lse_r + residual_r).amax(0)
        owner = logps_r > -torch.inf
        # A confident token's 1 - p keeps its digits if every sum leaves the target out.
        others = torch.where(owner, torch.expm1(-logps_r), (lse_r - z_y + residual_r).exp()).sum(0)
        found["logps"] = torch.where(z_y - lse > -0.5, -torch.log1p(others), (z_y - top) - log_whole)
        if "entropy" in shards:
            found["entropy"] = (shares * shards["entropy"] - torch.xlogy(shares, shares)).sum(0)
            # A shard without the target reports its largest logit in place of `is_top1`. The first of equal logits wins, as in torch.
            slack = TIE * torch.finfo(lse.dtype).eps * (1 + lse.abs())
            ranks = torch.arange(len(self.sizes), device=lse.device)[:, None]
            earlier = ranks < owner.long().argmax(0)
            beaten = torch.where(earlier, shards["is_top1"] >= z_y - slack, shards["is_top1"] > z_y + slack)
            found["is_top1"] = torch.where(owner, shards["is_top1"] > 0, ~beaten).all(0).to(lse.dtype)
        if "sum_logits" in shards:
            found["sum_logits"] = shards["sum_logits"].sum(0)
            # p = 0 everywhere in a shard: its log is -inf, and stays out.
            found["log_sum_sq_probs"] = (2 * shares.log() + shards["log_sum_sq_probs"]).logsumexp(0)
        for name, x in found.items():
            getattr(stats, name).copy_(torch.where(columns == IGNORED, 0.0, x))
        return shares[self.rank].log()

    def set_target(self, gradient: Tensor, columns: Tensor, stats: TokenStats, row_scale: Tensor, head: Head) -> None:
        """Give the target's entry of `gradient` its value under the whole vocabulary's softmax; the rest needs `row_scale` alone."""
        here = (columns >= 0) & (columns < self.width)
        at = torch.where(here, columns, 0)[:, None]
        slope = head.derivative_at(stats.logps + stats.lse)
        wanted = (-torch.expm1(stats.logps) / row_scale * slope)[:, None]
        gradient.scatter_(1, at, torch.where(here[:, None], wanted.to(gradient.dtype), gradient.gather(1, at)))

    # For functions of the logits themselves, under plain autograd. Every rank computes the same loss, so that a sum over the group passes
    # its gradient on as it is, and what every rank uses on its own logits sums the gradients of all.

    def reduce(self, x: Tensor) -> Tensor:
        """This rank's part -> the sum of all."""
        return GroupSum.apply(x, self.group)

    def shared(self, x: Tensor) -> Tensor:
        """A number that all ranks have, for use on this rank's logits."""
        return GroupShared.apply(x, self.group)

    def logsumexp(self, z: Tensor) -> Tensor:
        """(n,) over the whole vocabulary from this rank's logits (n, V_r), for use on them."""
        own = z.logsumexp(-1)
        top = self.gathered(own.detach()).amax(0)
        return self.shared(top + self.reduce((own - top).exp()).log())

    def argmax(self, values: Tensor, columns: Tensor) -> Tensor:
        """(n,) ids in the whole vocabulary from each shard's largest logit and its column; the first of equal logits."""
        values, ids = self.gathered(values), self.gathered(columns + self.start)
        return ids.gather(0, values.argmax(0, keepdim=True))[0]


class LoneShard(VocabShard):
    """A shard that asks nobody, to learn what memory it takes."""

    @property
    def rank(self) -> int:
        return 0

    def gathered(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce(self, x: Tensor) -> Tensor:
        return x.clone()

    def shared(self, x: Tensor) -> Tensor:
        return x


class GroupSum(torch.autograd.Function):
    """A rank's part -> the sum over the group, from which every rank computes the same loss."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class GroupShared(torch.autograd.Function):
    """What all ranks have the same, for use on what each has of its own; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
