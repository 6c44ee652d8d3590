"""The gradient divide factor of FSDP2, for a head that is gathered outside of FSDP2's hooks.

FSDP2 sums a gradient over its ranks and divides the sum by a factor: the number of ranks, or the argument of
`set_gradient_divide_factor` (torchtitan sets 1.0 on every module). The factor is private state of FSDP2. Only
this file reads it, from attributes of torch 2.11 to 2.15. If they do not exist, the call is refused.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.errors import value_error

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import DTensor

GATHER = (
    "gather it before the call, such as weight.full_tensor(grad_placements=[Partial('sum')]) for a gradient "
    "that is summed over the ranks"
)
# Dtypes for which the collective of FSDP2 divides (ReduceOp.AVG).
UNSCALED_DTYPES = (torch.float32, torch.bfloat16)


class ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor, None


def as_fsdp_reduces(name: str, x: "DTensor", ranks: int) -> "DTensor":
    """Scale the gradient of a sharded parameter, so that its sum over `ranks` ranks is FSDP2's gradient, or
    the average if x is not a parameter of FSDP2."""
    if not x.requires_grad:
        return x
    factor = (mean_factor(name, x) if "torch.distributed.fsdp" in sys.modules else 1.0) / ranks
    return x if factor == 1.0 else ScaledGradient.apply(x, factor)


def mean_factor(name: str, x: "DTensor") -> float:
    """FSDP2's gradient of `x` divided by the average over the ranks; 1 if x is not a parameter of FSDP2.

    A compiled graph uses the number that was read when it was traced.
    """
    try:
        factors = {_factor_of(name, group, x.dtype) for group in _groups_of(x)}
    except (ImportError, AttributeError) as error:
        got = f"that of torch {torch.__version__} ({error})"
        raise value_error(name, "a parameter of an FSDP2 whose state is known", got, GATHER) from error
    if len(factors) >= 2:
        expected = "parameters with one gradient divide factor"
        got = f"factors {sorted(factors)} of the mean"
        raise value_error(name, expected, got, "give their modules the same factor")
    return factors.pop() if factors else 1.0


# Dynamo calls this function while tracing: see `engine.graph_names.constant_in_graphs`.
mean_factor._dynamo_marked_constant = True


def _groups_of(x: "DTensor") -> list["FSDPParamGroup"]:
    """The FSDP2 parameter groups of x, or of the parameters from which x is computed."""
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    parameters = {id(parameter) for parameter in _parameters_of(x)}
    parameter_groups = []
    for reference in list(_module_state_mapping.values()):
        state = reference()
        if not isinstance(state, FSDPState):
            continue
        # One group in torch 2.11, a list of groups in later versions.
        several = hasattr(state, "_fsdp_param_groups")
        groups = state._fsdp_param_groups if several else [state._fsdp_param_group]
        for group in groups:
            if group is not None and any(
                id(param.sharded_param) in parameters for param in group.fsdp_params
            ):
                parameter_groups.append(group)
    return parameter_groups


def _parameters_of(x: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of the autograd graph of x, or x if it is a leaf."""
    if x.grad_fn is None:
        yield x
        return
    seen = set()
    nodes = [x.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


def _factor_of(name: str, group: "FSDPParamGroup", dtype: torch.dtype) -> float:
    """FSDP2's gradient of a parameter in `group`, divided by the average over the ranks."""
    expected = "a parameter without an all-reduce hook of FSDP2"
    remedy = f"its gradient would pass the hook by; {GATHER}"
    if group._all_reduce_hook is not None:
        raise value_error(name, expected, "one with a hook", remedy)
    divisor = group.gradient_divide_factor
    if divisor is None:
        return 1.0
    info = group.mesh_info
    shards = 1 if info.shard_mesh_dim is None else info.mesh.size(info.shard_mesh_dim)
    replicas = 1 if info.replicate_mesh_dim is None else info.mesh.size(info.replicate_mesh_dim)
    # The policy is an attribute of the group until torch 2.14, of each parameter in torch 2.15.
    policy = getattr(group, "mp_policy", None) or group.fsdp_params[0].mp_policy
    reduced = policy.reduce_dtype or policy.param_dtype or dtype
    divides_apart = group.force_sum_reduction_for_comms or reduced not in UNSCALED_DTYPES
    # In this case FSDP2 divides both before and after the sum.
    twice = shards == 1 and divides_apart and divisor != 1.0
    if twice:
        expected = "a gradient divide factor of None or 1.0 on replicas that are not sharded"
        raise value_error(
            name, expected, f"{divisor}, by which FSDP2 divides twice", "divide the loss instead"
        )
    return shards * replicas / divisor
