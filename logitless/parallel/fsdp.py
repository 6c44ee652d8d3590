"""What FSDP2 does with the gradient of a parameter, for a head that is gathered outside of FSDP's hooks.

FSDP sums a gradient over its ranks and divides it by a factor: the number of ranks, or what
`set_gradient_divide_factor` was given (torchtitan sets 1.0 on every module). It keeps the factor in private
state, which is read in this file alone, by names that torch 2.11 to 2.15 have. Where they are missing, the
call is refused.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.errors import expect

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import DTensor

GATHER = (
    "gather it before the call, such as weight.full_tensor(grad_placements=[Partial('sum')]) for a gradient "
    "that is summed over the ranks"
)
# In which FSDP uses the collective's own division.
UNSCALED_DTYPES = (torch.float32, torch.bfloat16)


class ScaledGradient(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor, None


def as_fsdp_reduces(name: str, x: "DTensor") -> "DTensor":
    """A sharded parameter whose gradient, averaged over the mesh, becomes what FSDP makes of it."""
    if not x.requires_grad or "torch.distributed.fsdp" not in sys.modules:
        return x
    factor = mean_factor(name, x)
    return x if factor == 1.0 else ScaledGradient.apply(x, factor)


def mean_factor(name: str, x: "DTensor") -> float:
    """What the average of x's gradient over the ranks is multiplied by; 1 for what is no parameter of FSDP2.

    A compiled graph keeps the number that was read when it was traced.
    """
    try:
        factors = {_factor_of(name, group, x.dtype) for group in _groups_of(x)}
    except (ImportError, AttributeError) as error:
        expected, got = "a parameter of an FSDP2 whose state is known", f"that of torch {torch.__version__}"
        expect(False, name, expected, f"{got} ({error})", GATHER)
    expected, got = "parameters with one gradient divide factor", f"factors {sorted(factors)} of the mean"
    expect(len(factors) < 2, name, expected, got, "give their modules the same factor")
    return factors.pop() if factors else 1.0


# Dynamo calls it while it traces: see `engine.operators.constant_in_graphs`.
mean_factor._dynamo_marked_constant = True


def _groups_of(x: "DTensor") -> list["FSDPParamGroup"]:
    """The groups of FSDP2 to which the parameters belong that x is, or is computed from."""
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    parameters = {id(parameter) for parameter in _parameters_of(x)}
    found = []
    for reference in list(_module_state_mapping.values()):
        state = reference()
        if not isinstance(state, FSDPState):
            continue
        # One group in torch 2.11, a list of them later.
        several = hasattr(state, "_fsdp_param_groups")
        groups = state._fsdp_param_groups if several else [state._fsdp_param_group]
        for group in groups:
            if group is not None and any(id(own.sharded_param) in parameters for own in group.fsdp_params):
                found.append(group)
    return found


def _parameters_of(x: Tensor) -> Iterator[Tensor]:
    """The leaves of x's graph: x itself, if it is one."""
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
    """What a mean over the ranks is multiplied by to be what FSDP makes of a gradient."""
    expected, remedy = (
        "a parameter without an all-reduce hook of FSDP2",
        f"its gradient would pass the hook by; {GATHER}",
    )
    expect(group._all_reduce_hook is None, name, expected, "one with a hook", remedy)
    divisor = group.gradient_divide_factor
    if divisor is None:
        return 1.0
    info = group.mesh_info
    shards = 1 if info.shard_mesh_dim is None else info.mesh.size(info.shard_mesh_dim)
    replicas = 1 if info.replicate_mesh_dim is None else info.mesh.size(info.replicate_mesh_dim)
    # Of the group until torch 2.14, of each parameter in 2.15.
    policy = getattr(group, "mp_policy", None) or group.fsdp_params[0].mp_policy
    reduced = policy.reduce_dtype or policy.param_dtype or dtype
    divides_apart = group.force_sum_reduction_for_comms or reduced not in UNSCALED_DTYPES
    # FSDP2 divides before and after the sum there.
    twice = shards == 1 and divides_apart and divisor != 1.0
    expected = "a gradient divide factor of None or 1.0 on replicas that are not sharded"
    expect(not twice, name, expected, f"{divisor}, by which FSDP2 divides twice", "divide the loss instead")
    return shards * replicas / divisor
