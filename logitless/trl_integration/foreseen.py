"""Per-token numbers whose gradient was foreseen: DPO and GRPO in 3 products where their numbers alone take 4.

TRL's own code makes the loss from log-probabilities, so the gradient that it will ask for is known only after
the walk that could have used it. But our loss class computes the same loss. So the forward pass solves that
one, with its gradients, and hands out the log-probabilities of the same walk; TRL's code runs on them as it
is, with its metrics and its scaling. When its gradient comes back, it
is compared with the one foreseen: where they agree up to a factor, everything is done; where not, the
    difference is walked once more.
What is trained on is always TRL's gradient.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.engine.operands import shifted
from logitless.engine.plan import Plan
from logitless.losses.base import TokenLoss

from .per_token import PerTokenScore

# Of the largest gradient. The log-probability of a sequence is a sum of thousands of tokens, whose order of
# summation alone puts 1e-3 on DPO's gradient; another formula differs by more.
TOLERANCE = 5e-3


class Foresight(NamedTuple):
    """The loss that TRL's code is about to compute, in our terms."""

    loss: type[TokenLoss]
    options: dict[str, Any]  # of the loss; the head's come from the model
    inputs: dict[str, Tensor | None]  # of its call, beside the head's; per-token ones aligned with the labels


class ForeseenScore(PerTokenScore):
    """A `PerTokenScore` that solves `trainer.foresight` together with its numbers; None for the numbers
    alone."""

    def numbers(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shift: bool
    ) -> tuple[dict, Plan | None]:
        foresight, alone = self.trainer.foresight, super().numbers
        # A frozen head takes 2 products for any loss, and a compiled graph cannot look at a gradient.
        trains = (
            torch.is_grad_enabled()
            and isinstance(weight, Tensor)
            and weight.requires_grad
            and not torch.compiler.is_compiling()
        )
        if foresight is None or not trains:
            return alone(hidden, weight, bias, labels, shift)
        loss = foresight.loss(return_logps=True, **self.head, **foresight.options)
        out = loss(hidden, weight, labels, bias=bias, shift=shift, **foresight.inputs)

        def again(*operands: Tensor | None) -> Tensor:
            return alone(*operands, labels, shift)[0]["logps"]

        # What TRL sums over includes the positions that have no log-probability, and hands them a gradient.
        scored = (shifted(labels, -100) if shift else labels) != -100
        logps = Foreseen.apply(
            again, out.loss, out.logps, out.tokens["d_logps"], scored, hidden, weight, bias
        )
        return out.tokens | {"logps": logps}, out.plan


class Foreseen(torch.autograd.Function):
    """logps, with the gradient of a loss that was solved together with them."""

    @staticmethod
    def forward(
        ctx,
        again: Callable,
        loss: Tensor,
        logps: Tensor,
        d_logps: Tensor,
        scored: Tensor,
        *operands: Tensor | None,
    ) -> Tensor:
        ctx.again = again
        ctx.autocast = (
            torch.is_autocast_enabled(logps.device.type),
            torch.get_autocast_dtype(logps.device.type),
        )
        ctx.save_for_backward(d_logps, scored, *operands)
        return logps.view_as(logps)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        d_logps, scored, *operands = ctx.saved_tensors
        gradient = torch.where(scored, gradient, 0.0)
        square = d_logps.square().sum()
        factor = torch.where(square > 0, (gradient * d_logps).sum() / square, 0.0)
        rest = gradient - factor * d_logps
        if bool(rest.abs().amax() <= TOLERANCE * gradient.abs().amax()):
            return None, factor, *[None] * 6
        _warn_once(
            "the trainer's gradient is not the one foreseen, so its tokens are walked again: slower (5 "
            "products for 3), and as exact. "
            "Please report the configuration."
        )
        enabled, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast(gradient.device.type, dtype=dtype, enabled=enabled):
            leaves = [x if x is None else x.detach().requires_grad_(x.requires_grad) for x in operands]
            logps = ctx.again(*leaves)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(logps, wanted, rest))
        return (
            None,
            factor,
            None,
            None,
            None,
            *(next(found) if x is not None and x.requires_grad else None for x in leaves),
        )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
