"""Deferred logits: stand-ins with which a model's own forward pass runs without computing logits.

In calls inside of `deferred` the LM head returns `DeferredLogits`: its hidden states and its parameters, not
multiplied. The model's own code then scales and caps them, shifts the labels, adds its router loss;
`cross_entropy` of deferred logits is our loss. So no model family is described here. An operation that needs
the values of the logits raises.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitless.engine.head_view import HeadView, unviewed, view_of
from logitless.engine.operands import SplitHead
from logitless.engine.plan import Plan
from logitless.errors import value_error
from logitless.exchange import exchange, exchanged, state_of, withdraw
from logitless.losses.cross_entropy import CrossEntropyLoss
from logitless.losses.logprobs import TokenStatistics
from logitless.models.heads import ONE_PROCESS, read_head
from logitless.models.probes import check_head
from logitless.parallel.groups import is_dtensor, local_parameter, split_over_vocabulary

KEY = "logits"


@dataclass
class Deferral:
    """State of a model's exchanged head: whether it returns deferred logits now, and with which options."""

    asked: bool = False  # whether the head returns deferred logits now
    seen: bool = False  # whether the head was called since `asked` was set
    checked: bool = False  # whether its output was compared with the product of its parameters
    logits_budget: int | None = None
    summed: bool = True  # whether cross-entropy is to be computed
    last_plan: Plan | None = None


def deferral_of(model: nn.Module, new: Deferral | None = None) -> Deferral:
    """The `Deferral` of the model's current head; PEFT and users replace heads.

    A head without one gets `new`, by a permanent exchange."""
    head = model.get_output_embeddings()
    deferral = state_of(head, KEY)
    if deferral is None:
        deferral = Deferral() if new is None else new
        exchange(head, KEY, _answer, deferral)
    return deferral


def undeferred(model: nn.Module) -> None:
    """Take the permanent exchange of the head back."""
    for module in model.modules():  # PEFT may have put another head around it
        withdraw(module, KEY)


def answering(head: nn.Module, deferral: Deferral) -> AbstractContextManager:
    """While this is active, the head returns deferred logits in calls inside of `deferred`."""
    return exchanged(head, KEY, _answer, deferral)


@contextmanager
def deferred(
    model: nn.Module, logits_budget: int | None = None, *, unverified: bool = False, summed: bool = True
) -> Iterator[Deferral]:
    """While this is active, the model's forward pass works with deferred logits.

    Args:
        unverified: whether a compiled graph may hold a head that was never compared with its parameters.
        summed: False makes their cross-entropy 0, for a caller that computes the loss from deferred logits.
    """
    if getattr(model, "_is_replica", False):
        got = "nn.DataParallel around the chunked loss"
        raise value_error("model", "one process per GPU", got, ONE_PROCESS)
    deferral = deferral_of(model)
    known = deferral.checked or unverified or not torch.compiler.is_compiling()
    if not known:
        remedy = "run one step uncompiled, or pass unverified=True"
        raise value_error(
            "model", "a head that was checked before it is compiled", "an unchecked one", remedy
        )
    deferral.asked = True
    deferral.seen = False
    deferral.summed = summed
    deferral.logits_budget = logits_budget
    try:
        yield deferral
    finally:
        deferral.asked = False
    if not deferral.seen:
        expected = "a forward pass that calls the module of get_output_embeddings()"
        remedy = "its logits were computed elsewhere; compute its loss without logitless"
        raise value_error("model", expected, type(model).__name__, remedy)


def _answer(
    head: nn.Module, deferral: Deferral, stock: Callable, hidden: Tensor, compute: Callable | None = None
) -> Any:
    if compute is not None:
        return compute(hidden)
    if not deferral.asked:
        return stock(hidden)
    if not deferral.checked and not torch.compiler.is_compiling():
        check_head(head, stock, hidden)
        deferral.checked = True
    deferral.seen = True
    return DeferredLogits(
        unviewed(hidden, head), head, deferral, view_of(head, "model", called=True).shape[0]
    )


@dataclass(frozen=True)
class DeferredLogits:
    """Logits (..., V): gain * (h·w + b), or with a cap cap * tanh(gain * (h·w + b) / cap)."""

    hidden: Tensor  # (..., H)
    head: nn.Module | HeadView
    deferral: Deferral = field(repr=False)
    rows: int  # how many of the first token ids: V, unless the model leaves out what pads its head
    gain: float = 1.0
    cap: float | None = None

    # Our methods for PyTorch's functions of them; any other use is refused.
    operations: ClassVar = {
        F.cross_entropy: "cross_entropy",
        torch.logsumexp: "logsumexp",
        torch.tanh: "tanh",
    }
    usable: ClassVar = "a loss that is their cross-entropy"
    remedy: ClassVar = "compute the loss of this model without logitless"

    __iter__ = None  # or it would be tried index by index

    def view_now(self) -> HeadView:
        """The current head with its transform; FSDP may have put the sharded weight back since the head was
        called."""
        view = read_head(self.head)
        if self.rows < view.shape[0]:
            view = view.first(self.rows)
        return view._replace(softcap=self.cap, logit_scale=self.gain, of_model=True)

    def computed(self, function: Callable[[Tensor, HeadView], Any]) -> Any:
        """`function(hidden, view)` of the hidden states, on the head's device and in its dtype, and the head.

        DeepSpeed ZeRO-3 gathers parameters for the calls of their module alone, forward and backward, and
        takes gradients of gathered ones: there it runs in a call of the head.
        """

        def compute(hidden: Tensor) -> Any:
            return function(*self.operands(hidden))

        partitioned = any(hasattr(x, "ds_id") for x in self.head.parameters())
        return self.head(self.hidden, compute) if partitioned else compute(self.hidden)

    def operands(self, hidden: Tensor) -> tuple[Tensor, HeadView]:
        """Hidden states, on the head's device and in its dtype, and the head, LoRA's columns in it.

        It is whole, unless tensor parallelism splits its rows.
        """
        view = self.view_now()
        hidden = hidden.to(view.device)
        weight = view.weight
        if is_dtensor(weight):
            # Mixed precision of FSDP2 has cast the inputs, and would cast the parameters.
            like = [None if x is None else x.to(hidden.dtype) for x in (weight, view.bias)]
            view = view._replace(weight=like[0], bias=like[1])
        elif not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)
        hidden, weight, bias = view.operands(hidden)
        in_shards = split_over_vocabulary(weight)
        if not isinstance(weight, SplitHead) and not in_shards:
            weight, bias = (local_parameter("weight", x, None) for x in (weight, bias))
        return hidden, view._replace(weight=weight, bias=bias, columns=(), in_shards=in_shards)

    # What models and their losses do with logits

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.rows))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def _as_it_is(self, *args: Any, **kwargs: Any) -> "DeferredLogits":
        """Accept `.float()` and moves to the head's device, which the loss does anyway."""
        return self

    contiguous = float = to = _as_it_is

    def __mul__(self, factor: Any) -> "DeferredLogits":
        if not isinstance(factor, Real):
            return self._refused(f"a product with {type(factor).__name__}")
        cap = None if self.cap is None else self.cap * factor
        return replace(self, gain=self.gain * factor, cap=cap)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "DeferredLogits":
        return self * (1 / divisor)

    def tanh(self) -> "DeferredLogits":
        return replace(self, cap=1.0) if self.cap is None else self._refused("a second tanh")

    def view(self, *shape: int) -> "DeferredLogits":
        if len(shape) < 2 or shape[-1] not in (-1, self.rows):
            self._refused(f"view{shape} of shape {tuple(self.shape)}")
        return replace(self, hidden=self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> "DeferredLogits":
        index = index if isinstance(index, tuple) else (index,)
        dims = self.dim()
        if index[0] is Ellipsis:
            index = (*[slice(None)] * (dims - len(index) + 1), *index[1:])
        *rows, last = index if len(index) == dims else (*index, slice(None))
        if not all(isinstance(x, slice) for x in (*rows, last)) or last.start or last.step:
            self._refused(f"an index of {', '.join(type(x).__name__ for x in index)}")
        selected = replace(self, hidden=self.hidden[tuple(rows)])
        return replace(selected, rows=len(range(self.rows)[last]))

    def logsumexp(self, dim: int) -> Tensor:
        """Over the vocabulary, (...), fp32 and differentiable."""
        if dim != -1:
            self._refused(f"logsumexp over dimension {dim}")

        def lse(hidden: Tensor, view: HeadView) -> Tensor:
            targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
            statistics = TokenStatistics(logits_budget=self.deferral.logits_budget)
            return statistics.statistics(hidden, view, targets)[0]["lse"]

        return self.computed(lse)

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Tensor:
        """`torch.nn.functional.cross_entropy` of the logits, without them."""
        if self.dim() != 2 or size_average is not None or reduce is not None:
            # PyTorch takes dimension 1 for the classes.
            self._refused(
                f"cross_entropy of shape {tuple(self.shape)}, size_average={size_average}, reduce={reduce}"
            )
        if not self.deferral.summed:
            return torch.zeros((), dtype=torch.float32, device=self.device)
        own = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        loss = CrossEntropyLoss(**own, logits_budget=self.deferral.logits_budget)

        def solve(hidden: Tensor, view: HeadView) -> Tensor:
            out = loss(hidden, view, target.to(hidden.device), class_weights=weight)
            self.deferral.last_plan = out.plan
            return out.loss.to(self.device)

        return self.computed(solve)

    @classmethod
    def __torch_function__(
        cls, function: Any, classes: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        own = getattr(cls, cls.operations.get(function, ""), None)
        return cls._refused(function.__name__) if own is None else own(*args, **kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in ("device", "dtype", "requires_grad", "dim", "ndim"):
            return getattr(self.hidden, name)
        return self._refused(repr(name), AttributeError)

    @classmethod
    def _refused(cls, use: str, error: type[Exception] = TypeError) -> Any:
        raise error(f"logits: expected {cls.usable}, got {use} of them; {cls.remedy}.")
