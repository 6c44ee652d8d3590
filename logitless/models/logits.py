"""Deferred logits: objects that replace the logits while a model's own forward pass runs.

In calls inside `defer_logits` the LM head returns `DeferredLogits`: its hidden states and itself, without
their product. The model's own code then scales and caps them, shifts the labels and adds its router loss;
`cross_entropy` of deferred logits runs `CrossEntropyLoss`. Therefore no code here is specific to a model
family. An operation that needs the values of the logits raises TypeError.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitless.engine.head_view import HeadView, check_no_backward_hooks, unviewed, view_of
from logitless.engine.operands import SplitHead
from logitless.engine.plan import Plan
from logitless.errors import message, value_error
from logitless.exchange import exchange, exchanged, instance_forward, state_of, withdraw
from logitless.losses.cross_entropy import CrossEntropyLoss
from logitless.losses.logprobs import TokenStatistics
from logitless.models.heads import COPIED, COPY_REMEDY, ONE_PROCESS, calls_another_model, read_head
from logitless.models.probes import check_head
from logitless.parallel.groups import is_dtensor, local_parameter, split_over_vocabulary

KEY = "logits"


@dataclass
class Deferral:
    """State of a head whose forward pass is exchanged for one that can return deferred logits."""

    is_enabled: bool = False  # whether the head returns deferred logits now
    was_called: bool = False  # whether the head was called since `is_enabled` was set
    is_checked: bool = False  # whether the head's output was compared with the product by its parameters
    checked_forward: Callable | None = None  # the `forward` on the instance of the head in that comparison
    logits_budget: int | str | None = None
    needs_cross_entropy: bool = True  # whether to compute the cross-entropy; if not, it is 0
    last_plan: Plan | None = None


def deferral_of(model: nn.Module, new: Deferral | None = None) -> Deferral:
    """Return the `Deferral` of the model's current head, which PEFT or the user may have replaced.

    A head without one gets `new`, by an exchange that lasts until `remove_deferral`.
    """
    head = model.get_output_embeddings()
    deferral = state_of(head, KEY)
    if deferral is None:
        deferral = Deferral() if new is None else new
        exchange(head, KEY, _deferring_forward, deferral)
    return deferral


def remove_deferral(model: nn.Module) -> None:
    """Undo the exchange of `deferral_of`."""
    for module in model.modules():  # PEFT may have wrapped the head in another module
        withdraw(module, KEY)


def deferring_head(head: nn.Module, deferral: Deferral) -> AbstractContextManager:
    """Context in which the head returns deferred logits in calls inside `defer_logits`."""
    return exchanged(head, KEY, _deferring_forward, deferral)


@contextmanager
def defer_logits(
    model: nn.Module,
    logits_budget: int | str | None = None,
    *,
    unverified: bool = False,
    needs_cross_entropy: bool = True,
) -> Iterator[Deferral]:
    """Context in which the head of the model returns deferred logits. Yields the head's `Deferral`.

    Args:
        model: a causal language model.
        logits_budget: bytes that a chunk of logits and its temporaries may take.
        unverified: whether a compiled graph may include a head that was never compared with its parameters.
        needs_cross_entropy: whether `cross_entropy` computes the loss. If not, it returns 0, for a caller
            that computes the loss from the deferred logits itself.

    Raises:
        ValueError: the head was not called, must be checked before it is compiled, or is a replica of
            nn.DataParallel.
    """
    if getattr(model, "_is_replica", False):
        got = "nn.DataParallel around the chunked loss"
        raise value_error("model", "one process per GPU", got, ONE_PROCESS)
    deferral = deferral_of(model)
    can_defer = deferral.is_checked or unverified or not torch.compiler.is_compiling()
    if not can_defer:
        remedy = "run one step uncompiled, or pass unverified=True"
        raise value_error(
            "model", "a head that was checked before it is compiled", "an unchecked one", remedy
        )
    deferral.is_enabled = True
    deferral.was_called = False
    deferral.needs_cross_entropy = needs_cross_entropy
    deferral.logits_budget = logits_budget
    try:
        yield deferral
    finally:
        deferral.is_enabled = False
    if not deferral.was_called:
        expected = "a forward pass that calls the module of get_output_embeddings()"
        remedy = "its logits were computed elsewhere; compute its loss without logitless"
        if calls_another_model(model):
            raise value_error("model", expected, COPIED, COPY_REMEDY)
        raise value_error("model", expected, type(model).__name__, remedy)


def keywords_of(forward: Callable) -> frozenset[str] | None:
    """Return the names of the arguments that a forward pass takes; None if it takes any (`**kwargs`)."""
    parameters = inspect.signature(forward).parameters
    takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    return None if takes_any else frozenset(parameters)


def accepted(keywords: frozenset[str] | None, **options: Any) -> dict[str, Any]:
    """Return the options that a forward pass with these `keywords_of` takes."""
    return {name: x for name, x in options.items() if keywords is None or name in keywords}


def logits_in(output: Any, model: nn.Module) -> "DeferredLogits":
    """Return the deferred logits of a model's output: a `ModelOutput`, a tuple, or the logits alone.

    Raises:
        ValueError: the output does not hold them, or a tuple holds several.
    """
    values = output if isinstance(output, tuple) else (getattr(output, "logits", None),)
    found = [output] if isinstance(output, DeferredLogits) else list(values)
    found = [x for x in found if isinstance(x, DeferredLogits)]
    if len(found) != 1:
        expected = "a forward pass that returns the logits of its LM head"
        got = f"{type(output).__name__} of {type(model).__name__}"
        raise value_error("model", expected, got, "return a ModelOutput with logits, or a tuple with them")
    return found[0]


def _deferring_forward(
    head: nn.Module,
    deferral: Deferral,
    original: Callable,
    input: Tensor,  # named as by nn.Linear
    compute: Callable | None = None,
) -> Any:
    hidden = input
    if compute is not None:
        return compute(hidden)
    if not deferral.is_enabled:
        return original(hidden)
    if not torch.compiler.is_compiling():
        forward = instance_forward(head)
        if not deferral.is_checked or forward is not deferral.checked_forward:
            check_head(head, original, hidden)
            deferral.is_checked = True
            deferral.checked_forward = forward
    deferral.was_called = True
    if deferral.needs_cross_entropy and torch.is_grad_enabled():
        check_no_backward_hooks(head, "model")
    return DeferredLogits(
        unviewed(hidden, head), head, deferral, view_of(head, "model", called=True).shape[0]
    )


def _refusal(use: str) -> Callable:
    """Return a method that refuses a use of the logits."""

    def refuse(self: "DeferredLogits", *args: Any) -> Any:
        return self._refuse(use)

    return refuse


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Logits (..., V) that are not computed: z = logit_scale * (h·w + b), or softcap * tanh(z / softcap)."""

    hidden: Tensor  # (..., H)
    head: nn.Module | HeadView
    deferral: Deferral = field(repr=False)
    rows: int  # number of leading rows of the head: V, unless the model slices padding rows off the logits
    logit_scale: float = 1.0
    softcap: float | None = None

    # PyTorch function -> method that implements it; any other use raises.
    operations: ClassVar = {
        F.cross_entropy: "cross_entropy",
        torch.logsumexp: "logsumexp",
        torch.tanh: "tanh",
    }
    supported: ClassVar = "a loss that is their cross-entropy"
    remedy: ClassVar = "compute the loss of this model without logitless"

    def current_view(self) -> HeadView:
        """Return the head with its transform, as it is now: FSDP may have resharded the weight."""
        view = read_head(self.head)
        if self.rows < view.shape[0]:
            view = view.first(self.rows)
        return view._replace(softcap=self.softcap, logit_scale=self.logit_scale, of_model=True)

    def call_with_head(self, function: Callable[[Tensor, HeadView], Any]) -> Any:
        """Return `function(hidden, view)` of the `operands`.

        DeepSpeed ZeRO-3 gathers the parameters of a module only during its own forward and backward pass, so
        there `function` runs inside a call of the head.
        """

        def compute(hidden: Tensor) -> Any:
            return function(*self.operands(hidden))

        is_partitioned = any(hasattr(x, "ds_id") for x in self.head.parameters())
        return self.head(self.hidden, compute) if is_partitioned else compute(self.hidden)

    def operands(self, hidden: Tensor) -> tuple[Tensor, HeadView]:
        """Return the hidden states, on the head's device and in its dtype, and the head as plain tensors.

        LoRA adapters are concatenated to hidden states and weight. A weight that FSDP2 shards is gathered; a
        weight whose rows tensor parallelism shards remains a DTensor.
        """
        view = self.current_view()
        hidden = hidden.to(view.device)
        weight = view.weight
        if is_dtensor(weight):
            # Mixed precision of FSDP2 has cast the inputs, and would cast the parameters.
            cast = [None if x is None else x.to(hidden.dtype) for x in (weight, view.bias)]
            view = view._replace(weight=cast[0], bias=cast[1])
        elif not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)
        hidden, weight, bias = view.operands(hidden)
        is_sharded = split_over_vocabulary(weight)
        if not isinstance(weight, SplitHead) and not is_sharded:
            weight, bias = (local_parameter("weight", x, None) for x in (weight, bias))
        return hidden, view._replace(weight=weight, bias=bias, columns=(), in_shards=is_sharded)

    # What models and their losses do with logits

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.rows))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def _return_self(self, *args: Any, **kwargs: Any) -> "DeferredLogits":
        """Ignore `.float()`, `.contiguous()` and `.to(...)`: the loss casts and moves the operands itself."""
        return self

    contiguous = float = to = _return_self

    def __mul__(self, factor: Any) -> "DeferredLogits":
        if not isinstance(factor, Real):
            return self._refuse(f"a product with {type(factor).__name__}")
        softcap = None if self.softcap is None else self.softcap * factor
        return replace(self, logit_scale=self.logit_scale * factor, softcap=softcap)

    __rmul__ = __mul__

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refusal("a sum or a difference")
    __setitem__ = __delitem__ = _refusal("an assignment to parts")
    __pow__ = __rpow__ = _refusal("a power")
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = _refusal("a quotient")
    __matmul__ = __rmatmul__ = _refusal("a matrix product")
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refusal("a comparison")
    __abs__ = _refusal("the absolute values")
    __iter__ = __len__ = __contains__ = _refusal("an iteration")
    __bool__ = __int__ = __float__ = _refusal("a conversion to a number")
    __hash__ = object.__hash__

    def __truediv__(self, divisor: Any) -> "DeferredLogits":
        return self * (1 / divisor)

    def tanh(self) -> "DeferredLogits":
        return replace(self, softcap=1.0) if self.softcap is None else self._refuse("a second tanh")

    def view(self, *shape: int) -> "DeferredLogits":
        if len(shape) < 2 or shape[-1] not in (-1, self.rows):
            self._refuse(f"view{shape} of shape {tuple(self.shape)}")
        return replace(self, hidden=self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> "DeferredLogits":
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() < self.dim()
        if is_mask:
            return replace(self, hidden=self.hidden[index])
        index = index if isinstance(index, tuple) else (index,)
        dims = self.dim()
        if index[0] is Ellipsis:
            index = (*[slice(None)] * (dims - len(index) + 1), *index[1:])
        *rows, last = index if len(index) == dims else (*index, slice(None))
        if not all(isinstance(x, slice) for x in (*rows, last)) or last.start or last.step:
            self._refuse(f"an index of {', '.join(type(x).__name__ for x in index)}")
        selected = replace(self, hidden=self.hidden[tuple(rows)])
        return replace(selected, rows=len(range(self.rows)[last]))

    def logsumexp(self, dim: int) -> Tensor:
        """Return the log-sum-exp over the vocabulary, (...), in fp32 and differentiable."""
        if dim != -1:
            self._refuse(f"logsumexp over dimension {dim}")

        def compute_lse(hidden: Tensor, view: HeadView) -> Tensor:
            targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
            statistics = TokenStatistics(logits_budget=self.deferral.logits_budget)
            return statistics.statistics(hidden, view, targets)[0]["lse"]

        return self.call_with_head(compute_lse)

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
        """Return `torch.nn.functional.cross_entropy` of the logits, computed in chunks."""
        if self.dim() != 2 or size_average is not None or reduce is not None:
            # In PyTorch, dimension 1 is that of the classes.
            self._refuse(
                f"cross_entropy of shape {tuple(self.shape)}, size_average={size_average}, reduce={reduce}"
            )
        if not self.deferral.needs_cross_entropy:
            return torch.zeros((), dtype=torch.float32, device=self.device)
        options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        loss = CrossEntropyLoss(**options, logits_budget=self.deferral.logits_budget)

        def compute_loss(hidden: Tensor, view: HeadView) -> Tensor:
            out = loss(hidden, view, target.to(hidden.device), class_weights=weight)
            self.deferral.last_plan = out.plan
            return out.loss.to(self.device)

        return self.call_with_head(compute_loss)

    @classmethod
    def __torch_function__(
        cls, function: Any, classes: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = cls.operations.get(function)
        if name is None:
            # PyTorch's function passes what torch.nn.functional has under its name: a wrapper of the user's.
            name = next((name for name in cls.operations.values() if vars(F).get(name) is function), None)
        if name is None:
            cls._refuse(getattr(function, "__name__", repr(function)))
        return getattr(cls, name)(*args, **kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in ("device", "dtype", "requires_grad", "dim", "ndim"):
            return getattr(self.hidden, name)
        return self._refuse(repr(name), AttributeError)

    @classmethod
    def _refuse(cls, use: str, error: type[Exception] = TypeError) -> Any:
        got, remedy = f"{use} of them", cls.remedy
        replacement = _running_replacement(cls.operations.values())
        if replacement is not None:
            name, function = replacement
            function_name = getattr(function, "__qualname__", type(function).__qualname__)
            got += f" in {function.__module__}.{function_name}, which replaces torch.nn.functional.{name}"
            remedy = f"restore PyTorch's {name}, which Liger replaces with the option {name}=True"
        raise error(message("logits", cls.supported, got, remedy))


def _running_replacement(names: Iterable[str]) -> tuple[str, Callable] | None:
    """Return (name, function) of a function that someone put into torch.nn.functional, if it is running and
    has not called PyTorch's own; else None."""
    replacements = {}
    for name in names:
        function = vars(F).get(name)
        # functools.wraps gives a wrapper the names of PyTorch's function, but not its globals.
        if function is not None and getattr(function, "__globals__", None) is not vars(F):
            code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
            replacements[code] = name, function
    frame = sys._getframe(1)
    while replacements and frame is not None and frame.f_globals is not vars(F):
        if frame.f_code in replacements:
            return replacements[frame.f_code]
        frame = frame.f_back
    return None
