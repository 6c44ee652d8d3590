"""`CallArguments`: the arguments of one call of a loss, before they become the engine's `HeadCall`; and the
checks of their names and types.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, Unpack, get_args, get_origin

from torch import Tensor

from logitless.engine.layout import SequenceLayout
from logitless.engine.operands import MASKS, SplitHead, check_data
from logitless.engine.plan import Plan
from logitless.engine.sampling_mask import AlignedMask
from logitless.engine.spec import LossSpec
from logitless.errors import meant, message, type_error, warn
from logitless.losses.inputs import HeadOptions

Called = TypeVar("Called", bound=Callable)


@dataclass
class CallArguments:
    """The arguments of a call, which `LinearLoss.bind` resolves, and the loss's `prepare` reads and changes.

    Attributes:
        loss: the loss that computes the call. `read_heads` sets the softcap and logit_scale of a head module,
            and `bind` resolves `tp_group` and `cp_group` to process groups.
        hidden: (..., H).
        weight: (V, H); after `read_heads`, the weight of the module if the caller passed a head module.
        targets: (...); after `bind`, with `ignore_index` where `mask` is 0. None if the call has no targets.
        inputs: the other tensors of the loss by name. After `prepare`, the inputs that the class declares.
        heads: weights and biases as the caller passed them, by name; empty if no head is a module.
        cu_seqlens: (sequences + 1,) boundaries; after `bind`, int64 on hidden's device.
        aligned_mask: the sampling mask, aligned with hidden; None if the call has no sampling mask.

    The other attributes are the keyword arguments of every loss (`LinearLoss.__call__`).
    """

    loss: LossSpec
    hidden: Tensor
    weight: Tensor | SplitHead
    targets: Any
    inputs: dict[str, Any]
    bias: Tensor | None = None
    num_items: float | Tensor | None = None
    shift: bool = False
    cu_seqlens: Tensor | None = None
    mask: Tensor | None = None
    accumulate_into: Tensor | None = None
    grad_scale: float = 1.0
    heads: Mapping[str, Any] = field(default_factory=dict)
    aligned_mask: AlignedMask | None = None

    def layout(self) -> SequenceLayout:
        """The sequences of the call. With `shift`, the layout shifts targets and inputs per token."""
        return SequenceLayout(
            self.hidden,
            self.targets,
            self.loss.ignore_index,
            self.cu_seqlens,
            shift=self.shift,
            # An unreduced loss is evaluated on all tokens, the ignored ones too.
            fills=not self.loss.compact or self.loss.reduction == "none",
            # With a main gradient, the backward pass reads the rollouts, which may have changed by then.
            copies=self.accumulate_into is not None,
            slices=self.loss.sequences,
            aligned_mask=self.aligned_mask,
        )


# Options of the functions, such as `linear_logprobs`, that are fields of their losses.
HEAD_OPTIONS = (*sorted(HeadOptions.__optional_keys__), "ignore_index")
# Remedy if the output object of a model was passed as hidden states.
ALONE = "pass only the hidden states, such as outputs.last_hidden_state"
MASK = "mask", "pass it as mask", "set the targets to ignore_index where it is off"
# Argument names of other libraries -> (the corresponding argument of logitless, remedy if the call accepts
# it, remedy if it does not).
SYNONYMS = {
    "attention_mask": MASK,
    "completion_mask": MASK,
    "loss_mask": MASK,
    "padding_mask": MASK,
    "labels": ("targets", "pass them as targets (shift=True takes unshifted labels)", ""),
    "position_ids": (
        "cu_seqlens",
        "pass the boundaries of the packed sequences as cu_seqlens",
        "take a loss whose call has cu_seqlens",
    ),
    "teacher_logits": (
        "teacher_hidden",
        "pass teacher_hidden and teacher_weight, of which they are the product",
        "take a DistillationLoss, with teacher_hidden and teacher_weight",
    ),
    "num_items_in_batch": ("num_items", "pass it as num_items", "leave it out"),
    "ce_weight": ("class_weights", "pass it as class_weights", "take a loss whose call has class_weights"),
    "accumulate_now": (
        "accumulate_into",
        "leave it out: accumulate_into adds in the backward pass, with 4 products instead of 3",
        "leave it out",
    ),
    "old_per_token_logps": ("old_logps", "pass it as old_logps", "take a loss whose call has old_logps"),
}


# Whether `warn_of_zeros` has warned in this process.
_warned = False


def warn_of_zeros(mask: Tensor | None, loss: LossSpec, plan: Plan | None) -> None:
    """Warn if a call has no supervised token because its mask of floats has no 1, as an additive mask.

    The mask is read only if the host sync of the call found no supervised token. A slice of a sequence
    (`cp_group`) often has none.
    """
    global _warned
    if mask is None or plan is None or plan.rows or _warned or not mask.is_floating_point():
        return
    if not loss.compact or loss.cp_group is not None or (plan.replay is not None and plan.replay.rows):
        return
    if mask.numel() and not (mask == 1).any():
        _warned = True
        got = "a mask of floats without a 1, so no token is supervised"
        remedy = "pass mask == 0 if it is additive (0 keeps, -inf drops)"
        warn(message("mask", MASKS, got, remedy), UserWarning)


class CheckedCall:
    """Base class of the losses, which raises for unknown keyword arguments and for wrong argument types."""

    # Inputs of the call that are not single tensors, such as a pair of tensors.
    structured_inputs: ClassVar[tuple[str, ...]] = ()
    # Keyword arguments of the call, see `call_keywords`.
    keywords: ClassVar[tuple[str, ...]] = ()
    # Whether a call needs `targets`.
    needs_targets: ClassVar[bool] = True
    # Remedies for unknown keyword arguments. A key is the full name, or the part before the first underscore.
    remedies: ClassVar[Mapping[str, str]] = {}

    def unknown_keywords(self, given: Iterable[str]) -> TypeError:
        """The error about the names in `given` that are not keywords of the call, with the name that is
        meant.
        """
        unknown = [name for name in given if name not in self.keywords]
        name = unknown[0]
        taken = f"keywords of {type(self).__name__} ({', '.join(self.keywords)})"
        remedy = self._remedy(name) or synonym(name, (*self.keywords, "targets"))
        remedy = remedy or meant(name, self.keywords, "leave it out")
        return type_error("inputs", taken, ", ".join(unknown), remedy)

    def check_tensors(self, **tensors: object) -> None:
        """Raise TypeError for arguments that are not tensors with data, and for missing targets."""
        for name, x in tensors.items():
            if isinstance(x, Tensor):
                if x.is_meta:
                    check_data(**{name: x})
            elif x is not None:
                remedy = self._remedy(name) if isinstance(x, (tuple, list)) else None
                if name.endswith("logps") and hasattr(type(x), "logps"):  # the result of `linear_logprobs`
                    remedy = "pass its .logps.detach()"
                elif name.endswith("hidden"):
                    remedy = remedy or ALONE
                raise type_error(
                    name, "a tensor", type(x).__name__, remedy or f"pass torch.as_tensor({name})"
                )
            elif name == "targets" and self.needs_targets:
                raise type_error(name, "a tensor of token ids", None, "pass the labels as targets")

    def _remedy(self, name: str) -> str | None:
        return self.remedies.get(name) or self.remedies.get(name.partition("_")[0])


def accept_missing_targets(function: Called) -> Called:
    """Make the last positional argument, `targets`, None if it is missing, and return the function.

    The function then sees the other names of a call such as loss(hidden, weight, labels=labels), and says
    which name is meant. Type checkers still require the argument.
    """
    code = function.__code__
    if function.__defaults__ is None and code.co_varnames[: code.co_argcount][-1:] == ("targets",):
        function.__defaults__ = (None,)
    return function


def call_keywords(cls: type) -> tuple[str, ...]:
    """The keyword arguments of a loss's call, in alphabetical order.

    They are those of the signature of `__call__`, with the names in its `**arguments: Unpack[...]`, and the
    inputs that a user's subclass declares. The other inputs that a loss of the library declares are computed
    by `prepare` or `__call__`. `**arguments` without `Unpack` are those of the base class.
    """
    names: set[str] = set()
    of_library = next(base for base in cls.__mro__ if base.__module__.startswith("logitless."))
    for owner in cls.__mro__:
        if "__call__" not in vars(owner):
            continue
        parameters = inspect.signature(vars(owner)["__call__"]).parameters.values()
        names |= {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}
        rest = [x for x in parameters if x.kind is x.VAR_KEYWORD]
        # `**unknown` catches unknown names, for which the call raises.
        if not rest or rest[0].name == "unknown":
            break
        if get_origin(rest[0].annotation) is Unpack:
            (typed,) = get_args(rest[0].annotation)
            names |= typed.__required_keys__ | typed.__optional_keys__
            names |= cls.roles.keys() - of_library.roles.keys()
            break
    else:
        names |= cls.roles.keys()
    return tuple(sorted(names))


def check_options(given: Iterable[str], allowed: tuple[str, ...], function: Callable) -> None:
    """Raise TypeError for names in `given`, the `**head` of a function, that are not in `allowed`.

    For the first unknown name, the message suggests the corresponding argument (`SYNONYMS`) or the most
    similar name, also among the arguments in the function's signature.
    """
    unknown = [name for name in given if name not in allowed]
    if unknown:
        parameters = inspect.signature(function).parameters.values()
        names = (*allowed, *[x.name for x in parameters if x.kind is not x.VAR_KEYWORD])
        remedy = synonym(unknown[0], names) or meant(unknown[0], names, "leave it out")
        raise type_error("options", f"any of {', '.join(allowed)}", ", ".join(unknown), remedy)


def synonym(name: str, allowed: Iterable[str]) -> str:
    """The remedy for a name in `SYNONYMS`; "" for any other name."""
    if name not in SYNONYMS:
        return ""
    argument, taken, refused = SYNONYMS[name]
    return taken if argument in allowed else refused
