"""`LossOutput`, the result of a loss."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Never

from torch import Tensor

from logitless.engine.plan import Plan
from logitless.errors import type_error

_OF_THE_LOSS = "{0}: expected a tensor, got the LossOutput of a call; take its .loss, as in out.loss.{0}()."


def _no_number(self, *others: object) -> Never:
    """Raise TypeError for arithmetic, which would repeat or concatenate the named tuple."""
    raise type_error("out", "a tensor", "the LossOutput of a call", "use its .loss")


class LossOutput(NamedTuple):
    """The result of a loss. `logps` and `predictions` are entries of `tokens`.

    A named tuple, not a tensor. Arithmetic raises TypeError, and `.backward()` and `.item()` raise
    AttributeError; the messages say to use `.loss`.

    Attributes:
        loss: 0-d tensor, or with `reduction="none"` a tensor with one value per unit of the loss; fp32 (fp64
            for fp64 operands).
        metrics: detached 0-d tensors by name.
        plan: the `Plan` of the call; None inside a compiled graph, which is traced before it runs.
        tokens: detached per-token statistics by name, in targets' shape, with 0 at ignored positions. With
            `shift=True` they are aligned with hidden, and `x.roll(1, -1)` is aligned with the targets. With
            `return_logps`: logps, lse, the other statistics of the loss, and d_logps, the gradient of the
            loss with respect to logps (not with reduction="none" or accumulate_into, nor if nothing requires
            a gradient). With `return_predictions`: predictions. Otherwise empty.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    plan: Plan | None
    tokens: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def logps(self) -> Tensor:
        """Log-probabilities of the targets. Raises AttributeError unless the loss has `return_logps=True`."""
        return self._asked_for("logps", "return_logps")

    @property
    def predictions(self) -> Tensor:
        """int64 ids of the largest logits, and the lowest id among equal logits; `ignore_index` at ignored
        positions.

        Raises AttributeError unless the loss has `return_predictions=True`.
        """
        return self._asked_for("predictions", "return_predictions")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_number
    __truediv__ = __rtruediv__ = __neg__ = __pos__ = __abs__ = __pow__ = __float__ = _no_number

    @property
    def backward(self) -> Never:
        """Raises AttributeError: use `.loss.backward()`."""
        raise AttributeError(_OF_THE_LOSS.format("backward"))

    @property
    def item(self) -> Never:
        """Raises AttributeError: use `.loss.item()`."""
        raise AttributeError(_OF_THE_LOSS.format("item"))

    def _asked_for(self, name: str, option: str) -> Tensor:
        if name not in self.tokens:
            remedy = f"make the loss with {option}=True (a LogitsLoss has no such option)"
            raise AttributeError(f"{name}: expected a loss that returns them, got {option}=False; {remedy}.")
        return self.tokens[name]
