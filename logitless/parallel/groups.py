"""Resolve `tp_group` and `cp_group` to process groups, and DTensor parameters to plain tensors."""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from logitless.errors import type_error, value_error
from logitless.parallel.fsdp import as_fsdp_reduces

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup
    from torch.distributed.tensor import DTensor


# Types of tensors that are neither sharded nor quantized.
PLAIN = (Tensor, nn.Parameter)


def process_group(name: str, named: "ProcessGroup | DeviceMesh | str", weight: Tensor) -> "ProcessGroup":
    """Resolve `tp_group` or `cp_group` to a process group.

    `named` is a process group, a one-dimensional DeviceMesh, or the name of a dimension of the weight's mesh.
    """
    if isinstance(named, str):
        mesh = weight.device_mesh if is_dtensor(weight) else None
        names = () if mesh is None else mesh.mesh_dim_names or ()
        if named not in names:
            expected = f"a dimension of weight's device mesh, one of {names}"
            raise value_error(name, expected, repr(named), "or pass a ProcessGroup")
        return mesh.get_group(named)
    if isinstance(named, dist.DeviceMesh):
        if named.ndim != 1:
            raise value_error(
                name, "a DeviceMesh of one dimension", f"{named.ndim}", "index it by the dimension's name"
            )
        return named.get_group()
    if not isinstance(named, dist.ProcessGroup):
        kinds = "a ProcessGroup, a DeviceMesh or the name of a mesh dimension"
        kind = type(named).__name__
        remedy = "pass one of them, of which this rank is a member"
        raise type_error(name, kinds, kind, remedy)
    return named


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor. Imports torch.distributed.tensor only for subclasses of Tensor."""
    if type(x) in PLAIN or not isinstance(x, Tensor) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


# The name of the tensor-parallel mesh dimension in transformers and accelerate.
TENSOR_PARALLEL = "tp"


def split_over_vocabulary(x: object) -> bool:
    """Whether x is a DTensor whose rows are sharded by tensor parallelism, so that ranks share all tokens."""
    if not is_dtensor(x):
        return False
    names = x.device_mesh.mesh_dim_names or ()
    if TENSOR_PARALLEL not in names:
        return False
    dim = names.index(TENSOR_PARALLEL)
    return x.device_mesh.size(dim) > 1 and x.placements[dim].is_shard(0)


def sharded_like(x: Tensor, other: "DTensor") -> "DTensor":
    """Shard `x`, which is replicated on all ranks, by rows over the "tp" mesh dimension of `other`.

    The local tensor is a view of this rank's rows, without copy or communication.
    """
    from torch.distributed.tensor import DTensor, Shard

    mesh = other.device_mesh[TENSOR_PARALLEL]
    each = -(-x.shape[0] // mesh.size())
    local = x[each * mesh.get_local_rank() : each * (mesh.get_local_rank() + 1)]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())


def local_parameter(name: str, x: Tensor | None, tp_group: "ProcessGroup | None") -> Tensor | None:
    """Return a parameter as a plain tensor: gathered without `tp_group`, this rank's rows with `tp_group`."""
    if x is None or type(x) in PLAIN:
        return x
    if is_dtensor(x):
        return gathered(name, x) if tp_group is None else _local_rows(name, x, tp_group)
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    quantized = isinstance(x, Tensor) and is_traceable_wrapper_subclass(x)
    if quantized:
        remedy = "dequantize it before the call"
        raise type_error(name, "a dense tensor or a DTensor", type(x).__name__, remedy)
    return x


def check_alike(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless the head of a teacher or reference is sharded like the trained head
    (`tp_group`).

    Both must be DTensors, whose shape is that of the whole head, or plain tensors, whose shape is that of
    this rank's rows. The comparison then has the same result on all ranks.
    """
    kinds = ["a DTensor" if is_dtensor(each) else "a plain tensor" for each in (x, weight)]
    got, expected = (f"{kind} of {each.shape[0]} rows" for kind, each in zip(kinds, (x, weight)))
    if got != expected:
        raise value_error(name, f"{expected} with tp_group", got, "shard both heads in the same way")


def whole(x: Tensor) -> Tensor:
    """Gather a DTensor, without gradient; return any other tensor unchanged."""
    return x.full_tensor() if is_dtensor(x) else x


def gathered(name: str, x: "DTensor") -> Tensor:
    """Gather a sharded parameter; its gradient is averaged over the ranks, or reduced as FSDP2 reduces it."""
    from torch.distributed.tensor import Partial

    # No Partial("avg"): in a compiled call, torch 2.11 takes it for Partial("sum").
    x = as_fsdp_reduces(name, x, x.device_mesh.size())
    return x.full_tensor(grad_placements=[Partial("sum")] * x.device_mesh.ndim)


def _local_rows(name: str, x: "DTensor", group: "ProcessGroup") -> Tensor:
    """Return this rank's rows of a head or its bias, which are sharded over `group`.

    Over all other mesh dimensions, the parameter is gathered, and its gradient is reduced as in `gathered`.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = x.device_mesh
    at = next((dim for dim in range(mesh.ndim) if mesh.get_group(dim).group_name == group.group_name), None)
    if at is None:
        raise value_error(
            "tp_group", f"a group of {name}'s device mesh {mesh}", group.group_name, "name its dimension"
        )
    sharded = x.placements[at] == Shard(0)
    remedy = "shard the head by rows, or leave tp_group out"
    if not sharded:
        raise value_error(name, "Shard(0) on the dimension of tp_group", x.placements[at], remedy)
    placed = [Shard(0) if dim == at else Replicate() for dim in range(mesh.ndim)]
    grads = [Shard(0) if dim == at else Partial("sum") for dim in range(mesh.ndim)]
    x = as_fsdp_reduces(name, x, mesh.size() // mesh.size(at))
    return x.redistribute(placements=placed).to_local(grad_placements=grads)
