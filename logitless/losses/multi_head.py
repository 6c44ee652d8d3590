"""A weighted sum of cross-entropies of several heads over the same tokens: one autograd Function, and one operator for `torch.compile`.

Every head is one walk of the engine over its own targets, and all of them add to the same gradients: one d_hidden, one d_weight in fp32
at a time. Residual blocks are run on a chunk of rows, forward and backward, inside the walk. So nothing grows with the number of
heads but their own gradients.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.losses import engine
from logitless.losses.arguments import prepare
from logitless.losses.base import LossOutput
from logitless.losses.checks import expect
from logitless.losses.cross_entropy import CrossEntropyLoss
from logitless.losses.engine import Problem
from logitless.losses.function import outside_dispatch, registered_loss
from logitless.losses.plan import Plan
from logitless.losses.walk import Blocks, Needs


@dataclass
class Part:
    """One head's share of a loss."""

    name: str
    coefficient: float
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    offset: int  # position i predicts token i + offset
    head: int | None = None  # whose residual blocks come before the weight
    blocks: dict[str, Tensor] | None = None  # their parameters and buffers


class Share(NamedTuple):
    """A part by the numbers of its tensors among those of the call."""

    coefficient: float
    hidden: int
    weight: int
    bias: int | None
    head: int | None
    names: tuple[str, ...]  # of the blocks' tensors
    blocks: tuple[int, ...]


def ahead(labels: Tensor, offset: int, ignore_index: int, cu_seqlens: Tensor | None) -> Tensor:
    """Targets of a head: at each position the label `offset` further on in the same sequence, (B, T) or packed (N,)."""
    T = labels.shape[-1]
    positions = torch.arange(T, device=labels.device) + offset
    inside = positions < T
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(labels.device)
        end = ends[torch.searchsorted(ends, positions - offset, right=True).clamp(max=len(ends) - 1)]
        inside = positions < end
    return torch.where(inside, labels[..., positions.clamp(max=max(T - 1, 0))], ignore_index)


class BlockHeads(nn.Module):
    """What a module with residual blocks before its heads has: `blocks(k)`, and a name that stands for it in a compiled graph."""

    def blocks(self, k: int) -> nn.Module:
        raise NotImplementedError

    def block_tensors(self, k: int) -> dict[str, Tensor]:
        """Parameters and buffers of `blocks(k)` by name."""
        raise NotImplementedError

    @torch.compiler.assume_constant_result
    def registered(self) -> str:
        """The graph hands in the tensors itself, so that what is kept of the module needs none: a copy of it on the meta device."""
        key = f"{type(self).__qualname__}#{len(_MODULES)}"
        memo = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in self.parameters()}
        memo |= {id(x): x.to("meta") for x in self.buffers()}
        _MODULES[key] = copy.deepcopy(self, memo)
        return key


@dataclass(frozen=True, kw_only=True)
class MultiHeadLoss(CrossEntropyLoss):
    """What the losses of several heads share: a weighted sum of cross-entropies, solved head after head."""

    def __post_init__(self) -> None:
        coefficients = getattr(self, "coefficients", None)
        if coefficients is not None:
            object.__setattr__(self, "coefficients", tuple(map(float, coefficients)))
        super().__post_init__()
        expect(self.reduction != "none", "reduction", "'mean' or 'sum' for several heads", repr(self.reduction), "sum over the heads")
        expect(
            self.tp_group is None, "tp_group", "None for several heads", self.tp_group, "gather the heads, or take linear_logprobs of each"
        )
        expect(not self.return_logps, "return_logps", "False for several heads", True, "each has log-probabilities of its own")

    def solve_parts(
        self, parts: Sequence[Part], targets: Tensor, cu_seqlens: Tensor | None, num_items: float | Tensor | None,
        module: BlockHeads | None = None,
    ) -> LossOutput:  # fmt: skip
        if cu_seqlens is not None:
            expect(targets.dim() == 1, "targets", "shape (N,) with cu_seqlens", tuple(targets.shape), "flatten the tokens or leave it out")
        shares, tensors, labels = [], [], []
        for part in parts:
            shifted = ahead(targets, part.offset, self.ignore_index, cu_seqlens)
            problem = prepare(self, part.hidden, part.weight, shifted, part.bias, num_items, False, None, {})
            labels.append(problem.targets)
            numbers = [number(tensors, x) for x in (part.hidden, problem.weight, problem.bias)]
            names = () if part.blocks is None else tuple(part.blocks)
            blocks = tuple(number(tensors, part.blocks[name]) for name in names)
            shares.append((part.coefficient, *numbers, part.head, names, blocks))
        grad, device = torch.is_grad_enabled(), targets.device.type
        call = Call(
            [Share(*share) for share in shares], module, problem.dtype, [grad and x.requires_grad for x in tensors],
            torch.is_autocast_enabled(device),
            key=registered_call(self.key, tuple(shares), "" if module is None else module.registered())
            if torch.compiler.is_compiling() else None,
        )  # fmt: skip
        plans: list[Plan] = []
        loss, found = MultiHead.apply(self, call, plans, *tensors, *labels, problem.num_items)
        metrics = {}
        for part, (value, accuracy) in zip(parts, found.unbind(), strict=True):
            metrics |= {f"{part.name}/loss": value, f"{part.name}/accuracy": accuracy}
        return LossOutput(loss, metrics, plans[0] if plans else None)


def number(tensors: list[Tensor], x: Tensor | None) -> int | None:
    """Of a tensor among those of a call: the same tensor in two parts is one tensor with one gradient."""
    if x is None:
        return None
    for index, known in enumerate(tensors):
        if known is x:
            return index
    tensors.append(x)
    return len(tensors) - 1


@dataclass
class Call:
    """What is no tensor in a call."""

    shares: list[Share]
    module: BlockHeads | None
    dtype: torch.dtype  # of the products
    needs: list[bool]  # which tensors need a gradient
    autocast: bool
    key: str | None = None  # its name inside a compiled graph


class MultiHead(torch.autograd.Function):
    """The parts of a call, solved one after the other in the forward pass; the backward pass scales what they left."""

    @staticmethod
    def forward(ctx, loss: MultiHeadLoss, call: Call, plans: list[Plan], *given: Tensor | None):
        tensors, labels, num_items = given[: len(call.needs)], given[len(call.needs) : -1], given[-1]
        if torch.compiler.is_compiling():
            arguments = (list(tensors), list(labels), num_items, call.dtype, call.needs, call.autocast, call.key)
            value, numbers, *kept = _parts_op(*arguments)
        else:
            (value, numbers, *kept), plan = solve_parts(loss, call, tensors, labels, num_items)
            plans.append(plan)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        ctx.dtypes, ctx.needs, ctx.others = [x.dtype for x in tensors], call.needs, len(labels) + 1
        ctx.mark_non_differentiable(numbers)
        return value, numbers

    @staticmethod
    def backward(ctx, upstream: Tensor | None, _):
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():
            raise RuntimeError("create_graph: expected False, got True; logitless losses have no second derivative.")
        pending, *kept = ctx.saved_tensors
        found = [None] * len(ctx.needs)
        if upstream is not None:
            scale, kept = pending * upstream, iter(kept)
            owned = not compiling and not torch._C._autograd._get_current_graph_task_keep_graph()
            for index, need in enumerate(ctx.needs):
                if need:
                    x = next(kept)
                    flat = x.reshape(-1, x.shape[-1])
                    found[index] = engine.finish(flat, scale, ctx.dtypes[index], owned=owned).view(x.shape)
        return (None, None, None, *found, *[None] * ctx.others)


def solve_parts(
    loss: MultiHeadLoss, call: Call, tensors: Sequence[Tensor], labels: Sequence[Tensor], num_items: Tensor | None
) -> tuple[list[Tensor], Plan]:
    """(loss, numbers of each part, pending, gradients of the tensors that need one) and the last part's plan."""
    totals = Totals(call, tensors)
    value, numbers, pending = 0.0, [], None
    for index, (share, targets) in enumerate(zip(call.shares, labels, strict=True)):
        solved, plan = totals.solve(loss, index, targets, num_items, pending)
        pending = solved.pending if pending is None else pending
        value = value + solved.loss
        numbers.append(torch.stack((solved.loss / share.coefficient, solved.metrics[0])))
        del solved  # its d_weight in fp32, before the next part allocates one
    return [value, torch.stack(numbers), pending, *totals.finished()], plan


class Totals:
    """Gradients of a call's tensors, summed over its parts up to the factor `pending`.

    What several parts share is summed in fp32; what is one part's alone is cast as soon as the part is done, so that a single d_weight
    in fp32 is alive at a time. At order one the cast loses nothing that the last one, after an exact power of two, would not.
    """

    def __init__(self, call: Call, tensors: Sequence[Tensor]):
        self.call, self.tensors, self.grad = call, tensors, any(call.needs)
        self.sums: dict[int, Tensor] = {}
        self.last = {key: index for index, share in enumerate(call.shares) for key in (share.weight, share.bias) if key is not None}

    def solve(self, loss: MultiHeadLoss, index: int, targets: Tensor, num_items: Tensor | None, pending: Tensor | None):
        share, needs = self.call.shares[index], self.call.needs
        hidden, weight, bias = (None if key is None else self.tensors[key] for key in share[1:4])
        wanted = Needs(needs[share.hidden], needs[share.weight], bias is not None and needs[share.bias])
        blocks = None
        if share.head is not None:
            trained = [name for name, key in zip(share.names, share.blocks, strict=True) if needs[key]]
            named = {name: self.tensors[key] for name, key in zip(share.names, share.blocks, strict=True)}
            autocast = self.call.dtype if self.call.autocast else None
            blocks = Blocks(self.call.module.blocks(share.head), named, trained, grad=self.grad, autocast=autocast)
            # The blocks' own gradients come through d_hidden.
            wanted = replace(wanted, hidden=wanted.hidden or bool(trained))
        flat, inputs = hidden.reshape(-1, hidden.shape[-1]), dict.fromkeys(loss.inputs)
        problem = Problem(flat, weight, bias, targets, num_items, None, inputs, 0, self.call.dtype, wanted)
        shared = {"d_weight": self.sums.get(share.weight), "d_bias": None if bias is None else self.sums.get(share.bias)}
        solved, plan = engine.solve(loss, problem, static=True, coefficient=share.coefficient, pending=pending, blocks=blocks, **shared)
        if needs[share.hidden]:
            d_hidden = solved.d_hidden.view(hidden.shape)
            known = self.sums.get(share.hidden)
            self.sums[share.hidden] = d_hidden.to(solved.loss.dtype) if known is None else known.add_(d_hidden)
        for key, gradient in ((share.weight, solved.d_weight), (share.bias, solved.d_bias)):
            if gradient is not None:
                self.sums[key] = gradient if self.last[key] > index else gradient.to(self.tensors[key].dtype)
        if blocks is not None:
            keys = (key for key in share.blocks if needs[key])
            self.sums |= {key: x.to(self.tensors[key].dtype) for key, x in zip(keys, blocks.grads, strict=True)}
        return solved, plan

    def finished(self) -> list[Tensor]:
        """Gradients of the tensors that need one, in their shapes; zeros where no part reached."""
        found = []
        for index, (x, need) in enumerate(zip(self.tensors, self.call.needs, strict=True)):
            if need:
                found.append(self.sums[index].view(x.shape) if index in self.sums else torch.zeros_like(x))
        return found


# The same as an opaque operator. What is no tensor of a call is found by a name.

_MODULES: dict[str, BlockHeads] = {}
_CALLS: dict[str, tuple[list[Share], str, str]] = {}


@torch.compiler.assume_constant_result
def registered_call(loss_key: str, shares: tuple, module_key: str) -> str:
    key = f"{loss_key}{shares}{module_key}"
    _CALLS[key] = [Share(*share) for share in shares], loss_key, module_key
    return key


@torch.library.custom_op("logitless::parts", mutates_args=())
def _parts_op(
    tensors: Sequence[Tensor], labels: Sequence[Tensor], num_items: Tensor | None, dtype: torch.dtype, needs: Sequence[bool],
    autocast: bool, key: str,
) -> list[Tensor]:  # fmt: skip
    shares, loss_key, module_key = _CALLS[key]
    with outside_dispatch():
        call = Call(shares, _MODULES.get(module_key), dtype, needs, autocast)
        return solve_parts(registered_loss(loss_key), call, tensors, labels, num_items)[0]


@_parts_op.register_fake
def _(tensors, labels, num_items, dtype, needs, autocast, key):
    shares, stat = _CALLS[key][0], torch.promote_types(dtype, torch.float32)
    hidden = {share.hidden for share in shares}
    kept = [
        torch.empty_like(x, dtype=stat if index in hidden else x.dtype, memory_format=torch.contiguous_format)
        for index, (x, need) in enumerate(zip(tensors, needs, strict=True))
        if need
    ]
    return [labels[0].new_empty(shape, dtype=stat) for shape in ((), (len(shares), 2), ())] + kept
