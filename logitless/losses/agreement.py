"""LOGITLESS_DEBUG=1: compare the arguments of a call between the ranks that share it."""

from collections.abc import Iterable
from dataclasses import fields

import torch
from torch import Tensor

from logitless.engine.budget import default_budget
from logitless.errors import value_error
from logitless.parallel.agreement import expect_alike, expect_different, gather_facts

GROUPS = ("tp_group", "cp_group")


def check_agreement(loss, tensors: dict[str, Tensor | None], names: Iterable[str]) -> None:
    """Raise ValueError on every rank unless all ranks pass equal options and different shards or slices.

    Args:
        loss: the loss, with `tp_group` and `cp_group` resolved to process groups.
        tensors: hidden, weight, targets and bias of the call, by name.
        names: names of the other arguments of the call that are not None.
    """
    hidden, weight = tensors["hidden"], tensors["weight"]
    facts = {"loss": type(loss).__name__, "inputs": sorted(names), "autograd": torch.is_grad_enabled()}
    facts |= {
        field.name: repr(getattr(loss, field.name)) for field in fields(loss) if field.name not in GROUPS
    }
    facts["logits_budget"] = loss.logits_budget or default_budget(hidden.device)
    facts["autocast"] = torch.is_autocast_enabled(hidden.device.type)
    for name, x in tensors.items():
        kind = None if x is None else [str(x.dtype), isinstance(x, Tensor) and x.requires_grad]
        facts[name] = kind
    facts["hidden's last dimension"] = hidden.shape[-1]
    if loss.tp_group is not None:
        whole = {"targets' shape": list(tensors["targets"].shape), "targets' sum": _sum(tensors["targets"])}
        reports = gather_facts("tp_group", loss.tp_group, facts | whole | {"own": _shard(weight)})
        parts = {rank: report.pop("own") for rank, report in reports.items()}
        expect_alike("tp_group", reports)
        remedy = "pass this rank's rows of the head"
        expect_different(
            "tp_group", "weight", {rank: shard["numbers"] for rank, shard in parts.items()}, remedy
        )
        _expect_in_order(parts)
    if loss.cp_group is not None:
        # All ranks have the same sequences, but different tokens of each sequence.
        sequences = {"sequences": hidden.shape[0]} if hidden.dim() > 2 else {}
        reports = gather_facts("cp_group", loss.cp_group, facts | sequences | {"own": _numbers(hidden)})
        parts = {rank: report.pop("own") for rank, report in reports.items()}
        expect_alike("cp_group", reports)
        expect_different("cp_group", "hidden", parts, "pass this rank's slice of the sequences")


def _sum(x: Tensor) -> int:
    """Return the sum of the integers x, each multiplied by its position: a checksum."""
    places = torch.arange(1, x.numel() + 1, device=x.device)
    return int((x.detach().reshape(-1).long() * places).sum())


def _numbers(x: Tensor) -> list[float] | None:
    """Return shape, sum and sum of squares of a tensor, to compare tensors of different ranks.

    None if all elements are equal, as after initialization with a constant.
    """
    if not x.numel() or bool((x == x.reshape(-1)[0]).all()):
        return None
    return [*x.shape, float(x.detach().double().sum()), float(x.detach().double().square().sum())]


def _shard(weight: Tensor) -> dict:
    """Describe this rank's shard of the head.

    For a DTensor on a one-dimensional mesh, the description includes the index of the shard's first row and
    the number of rows of the whole head.
    """
    local = weight.frozen if hasattr(weight, "frozen") else weight
    if not hasattr(local, "to_local"):
        return {"numbers": _numbers(local), "rows": local.shape[0]}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mine = local.to_local()
    start = None
    if local.device_mesh.ndim == 1:
        _, (start, *_) = compute_local_shape_and_global_offset(
            local.shape, local.device_mesh, local.placements
        )
    return {"numbers": _numbers(mine), "rows": mine.shape[0], "start": start, "all": local.shape[0]}


def _expect_in_order(shards: dict[int, dict]) -> None:
    """Raise ValueError unless the shards are contiguous in rank order and contain all rows of the head."""
    start = 0
    for rank, shard in shards.items():
        if shard.get("start") is not None and shard["start"] != start:
            raise value_error(
                "weight",
                f"rows from {start} on, on rank {rank}",
                f"rows from {shard.get('start')} on",
                "shard the head in the group's order",
            )
        start += shard["rows"]
    rows = {shard["all"] for shard in shards.values() if shard.get("start") is not None}
    if not rows <= {start}:
        raise value_error(
            "weight",
            f"{sorted(rows)} rows in total on the ranks of tp_group",
            start,
            "pass the process group of the head's device mesh",
        )
