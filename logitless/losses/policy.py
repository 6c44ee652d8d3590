"""Base of the policy losses of reinforcement learning: masks, and inputs per sequence or per token.

Sequences are padded `(B, T)`, or packed with `cu_seqlens`. A token is supervised if its target is not
`ignore_index` and its `mask` is on. Advantages are per sequence or per token.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from logitless.engine.operands import checked_boundaries, sequence_numbers, shifted
from logitless.engine.segments import cached_property
from logitless.errors import message
from logitless.losses.agreement import check_agreement
from logitless.losses.base import LossOutput, TokenLoss
from logitless.losses.levels import is_per_sequence, per_token_shape
from logitless.parallel.agreement import debugging
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences


class Layout:
    """The tokens and sequences of a call; expands inputs per sequence to their tokens."""

    def __init__(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int,
        cu_seqlens: Tensor | None,
        *,
        shift: bool,
        slices: WholeSequences,
    ):
        self._shift, self.packed = shift, cu_seqlens is not None
        self._slices = slices
        if self.packed:
            if targets.dim() != 1:
                raise ValueError(
                    message(
                        "targets",
                        "shape (N,) with cu_seqlens",
                        tuple(targets.shape),
                        "flatten the tokens or leave it out",
                    )
                )
            cu_seqlens = checked_boundaries(cu_seqlens, targets)
        else:
            if targets.dim() != 2:
                raise ValueError(
                    message(
                        "targets", "shape (B, T)", tuple(targets.shape), "or pass flat tokens with cu_seqlens"
                    )
                )
        self.cu_seqlens = cu_seqlens
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.targets = self.aligned(targets.long(), ignore_index)
        self.counted = self.targets != ignore_index
        self.sequences = cu_seqlens.shape[0] - 1 if self.packed else targets.shape[0]
        if self.packed:
            positions = torch.arange(targets.shape[0], device=targets.device)
            self.number = sequence_numbers(cu_seqlens, positions)

    def aligned(self, x: Tensor, last: float) -> Tensor:
        """x aligned with hidden: shifted, if the call has `shift`; `last` fills the last positions."""
        return shifted(x, last, cu_seqlens=self.cu_seqlens) if self._shift else x

    def is_per_sequence(self, name: str, x: Tensor, *, sums: bool = False) -> bool:
        """See `levels.is_per_sequence`."""
        return is_per_sequence(name, x, self.targets, self.sequences, sums=sums, slices=self._slices)

    def spread(self, x: Tensor) -> Tensor:
        """(B,) -> targets' shape."""
        if self.packed:
            return x.reshape(-1)[self.number]
        return x.reshape(-1, 1).expand(self.targets.shape)

    def per_token(self, name: str, x: Tensor, *, per_sequence: bool = False, fill: float = 0.0) -> Tensor:
        """x in targets' shape, detached, with `fill` for unsupervised tokens."""
        if per_sequence and self.is_per_sequence(name, x):
            x = self.spread(x)
        else:
            x = per_token_shape(x, self.targets) if per_sequence else x
            # One f-string: Dynamo concatenates no strings that depend on a dynamic shape.
            if x.shape != self.targets.shape:
                shape = tuple(self.targets.shape)
                either = f"{shape} or ({self.sequences},)" if per_sequence else f"{shape}"
                raise ValueError(
                    message(name, f"targets' shape {either}", tuple(x.shape), "align it with the targets")
                )
            x = self.aligned(x, fill)
        x = x.detach() if x.requires_grad else x
        return torch.where(self.counted, x.to(self.dtype), fill)

    @cached_property
    def lengths(self) -> Tensor:
        """(B,) supervised tokens of each sequence."""
        if self.packed:
            counted = self.counted.to(self.dtype)
            lengths = counted.new_zeros(self.sequences).index_add_(0, self.number, counted)
        else:
            lengths = self.counted.sum(1, dtype=self.dtype)
        return self._slices.sum(lengths)

    @cached_property
    def shares(self) -> Tensor:
        """(B,) 1 / supervised tokens of each sequence; 1 for a sequence without any."""
        return self.lengths.clamp(min=1).reciprocal()

    @cached_property
    def share(self) -> Tensor:
        """() 1 / supervised tokens of the call; 1 without any."""
        return self.lengths.sum().clamp(min=1).reciprocal()


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(TokenLoss):
    """A loss of advantages. `laid_out` computes the declared inputs from the arguments of the call."""

    token_inputs: ClassVar = ("advantages",)
    observes: ClassVar = ("entropy",)
    context_parallel: ClassVar = True

    def laid_out(
        self, layout: Layout, advantages: Tensor, **given: Tensor | None
    ) -> dict[str, Tensor | None]:
        """The declared inputs, from the advantages and the other keyword arguments of the loss."""
        raise NotImplementedError

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        advantages: Tensor,
        mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
        bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shift: bool = False,
        accumulate_into: Tensor | None = None,
        accumulate_now: bool = False,
        grad_scale: float = 1.0,
        **given: Tensor | None,
    ) -> LossOutput:
        tensors = {"hidden": hidden, "targets": targets, "mask": mask, "cu_seqlens": cu_seqlens}
        self.check_call(given, **tensors, advantages=advantages, **given)
        if shift and self.cp_group is not None:
            self.refuse_shift()
        slices = WHOLE_SEQUENCES
        if self.cp_group is not None:
            loss = self.resolved(weight)
            slices = loss.sequences
            if debugging():  # `Layout` may run collectives before `LinearLoss.__call__` compares the ranks
                tensors = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias}
                check_agreement(loss, tensors, [name for name, x in given.items() if x is not None])
        if mask is not None:
            targets = self.masked(targets, mask)
        layout = Layout(hidden, targets, self.ignore_index, cu_seqlens, shift=shift, slices=slices)
        inputs = self.laid_out(layout, advantages, **given)
        return super().__call__(
            hidden,
            weight,
            layout.targets,
            num_items=num_items,
            bias=bias,
            cu_seqlens=layout.cu_seqlens,
            accumulate_into=accumulate_into,
            accumulate_now=accumulate_now,
            grad_scale=grad_scale,
            **inputs,
        )


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """A policy loss of the ratio r of the policy to an older one, clipped to [1 - epsilon, 1 + epsilon_high].

    Args:
        epsilon: clip range below 1; None for 0.2.
        epsilon_low: another name for `epsilon`.
        epsilon_high: clip range above 1, default `epsilon`.
    """

    epsilon: float | None = None
    epsilon_low: float | None = None
    epsilon_high: float | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.epsilon, self.epsilon_low) if x is not None]
        if len(set(given)) >= 2:
            raise ValueError(
                message(
                    "epsilon_low",
                    "epsilon itself, or None",
                    f"{self.epsilon_low} beside epsilon={self.epsilon}",
                    "they are two names of the lower clip range",
                )
            )
        object.__setattr__(self, "epsilon", given[0] if given else 0.2)
        super().__post_init__()
        if self.epsilon < 0:
            raise ValueError(message("epsilon", "a number >= 0", self.epsilon, "TRL's default is 0.2"))
        if self.upper < 0:
            raise ValueError(
                message(
                    "epsilon_high", "a number >= 0 or None", self.epsilon_high, "leave it None for epsilon"
                )
            )

    @property
    def upper(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
