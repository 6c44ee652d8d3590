"""LM heads that are passed as a module or as a `HeadView` instead of a weight.

`view_of` reads the parameters of `nn.Linear` and of subclasses with its forward pass, parametrized ones among
them. For modules of other packages, it uses a converter in `logitless.models`, which is imported at its first
use. Modules without a converter are refused, because their forward pass may differ from `nn.Linear`.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.engine.operands import SplitHead
from logitless.errors import type_error, value_error
from logitless.parallel.groups import is_dtensor, local_parameter, sharded_like

# Package of the head's class -> module with a function `view_of(module) -> HeadView`.
CONVERTERS = {"peft": "logitless.models.peft_heads"}
FSDP = "torch.distributed.fsdp"
# Packages that set hooks, or a `forward` on an instance, themselves.
PACKAGES = ("torch", "accelerate", "deepspeed", "peft", "transformers", "trl", "logitless")
LEAVE_WHOLE = "leave the LM head out of quantization ({}), or dequantize it"
# Package of the head's class -> remedy for a head that is refused. Such heads of `transformers` are quantized
# layers.
REMEDIES = {
    "bitsandbytes": LEAVE_WHOLE.format("BitsAndBytesConfig(llm_int8_skip_modules=['lm_head'])"),
    "auto_gptq": LEAVE_WHOLE.format("lm_head=False"),
    "gptqmodel": LEAVE_WHOLE.format("lm_head=False"),
    "awq": LEAVE_WHOLE.format("modules_to_not_convert=['lm_head']"),
    "transformers": LEAVE_WHOLE.format("modules_to_not_convert=['lm_head']"),
}


class LowRank(NamedTuple):
    """A LoRA adapter of a head, which adds x @ (scale * up @ down).T to the logits."""

    down: Tensor  # (r, H)
    up: Tensor  # (V, r)
    scale: float
    bias: Tensor | None = None  # (V,), multiplied by the scale as well
    dropout: Callable[[Tensor], Tensor] | None = None  # applied to the input


class HeadView(NamedTuple):
    """The parameters of a head that computes softcap * tanh(logit_scale * (h·w + b) / softcap).

    Attributes:
        weight: (V, H), a plain tensor or a DTensor.
        bias: (V,), a plain tensor or a DTensor; None for no bias.
        columns: the LoRA adapters of the head.
        softcap: like the field of the losses; None: no softcap.
        logit_scale: like the field of the losses.
        of_model: whether softcap and logit_scale are read from a model. A loss with different values is then
            refused.
        in_shards: how a loss uses a DTensor weight. True: each rank keeps its rows, and a loss without
            `tp_group` uses the mesh dimension "tp". False: the weight is gathered, unless the loss has a
            `tp_group`.
    """

    weight: Tensor
    bias: Tensor | None = None
    columns: tuple[LowRank, ...] = ()
    softcap: float | None = None
    logit_scale: float = 1.0
    of_model: bool = False
    in_shards: bool = False

    @property
    def options(self) -> dict[str, float | None]:
        """softcap and logit_scale as keyword arguments of a loss."""
        return {"softcap": self.softcap, "logit_scale": self.logit_scale}

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def first(self, rows: int) -> "HeadView":
        """Return the head with only the first `rows` token ids."""
        columns = tuple(
            x._replace(up=x.up[:rows], bias=None if x.bias is None else x.bias[:rows]) for x in self.columns
        )
        bias = None if self.bias is None else self.bias[:rows]
        return self._replace(weight=self.weight[:rows], bias=bias, columns=columns)

    def split_like(self, weight: Tensor) -> "HeadView":
        """Return the head as a DTensor that is sharded like `weight`.

        Its shard is a view of this rank's rows.
        """
        if is_dtensor(self.weight) or self.shape[0] != weight.shape[0]:
            return self
        bias = None if self.bias is None else sharded_like(self.bias, weight)
        return self._replace(weight=sharded_like(self.weight, weight), bias=bias)

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor | SplitHead, Tensor | None]:
        """Return (hidden, weight, bias) of the product h·w + b.

        With LoRA, hidden and weight have additional columns: [h, s·h·Aᵀ] and [W, B]. If W is frozen, the
        weight is a `SplitHead`, in which W gets no gradient.
        """
        weight, bias = self.weight, self.bias
        if not self.columns:
            return hidden, weight, bias
        weight, bias = local_parameter("weight", weight, None), local_parameter("bias", bias, None)
        wide = [hidden]
        trained = []
        for columns in self.columns:
            down, up, extra = (
                local_parameter("weight", x, None) for x in (columns.down, columns.up, columns.bias)
            )
            # PEFT keeps the adapters of a half-precision model in fp32.
            x = hidden.to(down.dtype)
            x = x if columns.dropout is None else columns.dropout(x)
            wide.append((nn.functional.linear(x, down) * columns.scale).to(hidden.dtype))
            trained.append(up.to(weight.dtype))
            if extra is not None:
                extra = (extra * columns.scale).to(weight.dtype)
                bias = extra if bias is None else bias + extra
        columns = torch.cat(trained, dim=1)
        whole = torch.cat((weight, columns), dim=1) if weight.requires_grad else SplitHead(weight, columns)
        return torch.cat(wide, dim=-1), whole, bias


def same_option(one: float | str | None, other: float | str | None) -> bool:
    """Whether two softcaps or scales are equal up to rounding: a model may divide by the inverse scale."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other) if numbers else one == other


def is_head(*arguments: object) -> bool:
    """Whether any argument is a module or a `HeadView` instead of a weight tensor."""
    for x in arguments:
        if isinstance(x, nn.Module | HeadView):
            return True
    return False


def view_of(head: object, argument: str = "weight", *, called: bool = False) -> HeadView:
    """Return a `HeadView` of a head module.

    Each call of this function reads the parameters from the module. They are not cached, because FSDP and
    PEFT replace them.

    Args:
        head: a module; or a `HeadView`, which is returned unchanged.
        argument: name of the argument, for error messages.
        called: whether the caller also calls the module, so that its forward hooks run. If False, an
            `nn.Linear` with forward hooks or an instance attribute `forward` is refused. The hooks of FSDP2
            are allowed. The hooks of a PEFT wrapper are not checked; those of its `nn.Linear` are.

    Raises:
        TypeError: `head` is neither a module nor a `HeadView`, or a module without the forward pass of
            `nn.Linear` that has no converter.
        ValueError: an `nn.Linear` has hooks or a `forward` on the instance, and `called` is False; or the
            converter refuses the module.
    """
    if isinstance(head, HeadView):
        return head
    expected = (
        "a tensor (V, H), or an LM head: torch.nn.Linear or a subclass with its forward pass, or one under "
        "PEFT's LoRA, trainable_token_indices or modules_to_save"
    )
    if not isinstance(head, nn.Module):
        raise type_error(
            argument,
            expected,
            type(head).__name__,
            "pass the LM head's weight as a torch.Tensor, such as model.lm_head.weight",
        )
    if _is_model(head):
        remedy = "pass its LM head: head_of(model), from logitless.models"
        raise type_error(argument, expected, f"the model {type(head).__name__}", remedy)
    cls, sharded = _own_class(type(head))
    package = cls.__module__.partition(".")[0]
    if package in CONVERTERS:
        return _converter(package)(head)
    if cls.forward is not nn.Linear.forward:
        of_model = "compute its loss without logitless"
        remedy = of_model if argument == "model" else "pass the weight that it computes, as a tensor"
        got = f"{cls.__module__}.{cls.__qualname__}"
        raise type_error(argument, expected, got, REMEDIES.get(package, remedy))
    if cls is not nn.Linear:
        _check_parametrizations(head, argument)
    if not called:
        check_no_backward_hooks(head, argument)
    hooks = head._forward_pre_hooks or head._forward_hooks
    hooked = (hooks and not sharded) or "forward" in head.__dict__
    if hooked and not called:
        raise value_error(
            argument,
            "a head without forward hooks and with its class's `forward`",
            "a hooked or overridden one",
            "remove the hooks, or use patch_model(model), which calls the head",
        )
    return HeadView(head.weight, head.bias)


def _check_parametrizations(head: nn.Module, argument: str) -> None:
    """Raise ValueError for a parametrization of the weight that has buffers, such as `spectral_norm`: each
    time the weight is read, it may change them, and a loss reads the weight more often than the head does."""
    for parametrization in getattr(head, "parametrizations", {}).values():
        for module in parametrization:
            if next(module.buffers(), None) is not None:
                expected = "a head whose parametrizations have no buffers"
                remedy = "use one without, such as parametrizations.weight_norm"
                raise value_error(argument, expected, type(module).__name__, remedy)


def _is_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, also under PEFT or a wrapper such as DDP's."""
    inner = getattr(module, "module", None)
    return hasattr(module, "get_output_embeddings") or hasattr(inner, "get_output_embeddings")


def defined(function: Callable) -> tuple[Callable, str]:
    """Return (the function inside partials and of a bound method, the module in which it is defined).

    The globals of a function tell where it is defined; its `__module__` does not, because functools.wraps
    copies it.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    module = getattr(function, "__module__", None) or ""
    return function, getattr(function, "__globals__", {}).get("__name__", module)


def is_of_user(function: Callable, owner: nn.Module | None = None) -> bool:
    """Whether a hook, or a `forward` on an instance, or a function that it wraps, is the user's and not that
    of a package which sets such functions itself.

    `owner`: the module of a `forward`; its class's own is not the user's.
    """
    classes = () if owner is None else type(owner).__mro__
    while function is not None:
        function, module = defined(function)
        if any(vars(cls).get("forward") is function for cls in classes):
            return False
        if module.partition(".")[0] not in PACKAGES:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def check_no_backward_hooks(head: nn.Module, argument: str) -> None:
    """Raise ValueError if the head has backward hooks, which do not run: its output is not computed.

    The hooks of DeepSpeed ZeRO-3, which partitions the parameters, are allowed.
    """
    is_hooked = head._backward_pre_hooks or head._backward_hooks
    if is_hooked and not any(hasattr(x, "ds_id") for x in head.parameters()):
        remedy = "remove them, or register a hook on the hidden states or on the weight"
        raise value_error(argument, "a head without backward hooks", "one with such hooks", remedy)


def _own_class(cls: type) -> tuple[type, bool]:
    """(class of the module without the subclasses of FSDP2 and `exchange`, whether FSDP2 created one)."""
    # FSDP2 replaces the class by a subclass of FSDPModule and the original class.
    added = [c for c in cls.__mro__ if any(b.__module__.startswith(FSDP) for b in (c, *c.__bases__))]
    classes = (c for c in cls.__mro__ if c not in added and "exchange_key" not in vars(c))
    return next(classes), bool(added)


def unviewed(x: Tensor, module: nn.Module) -> Tensor:
    """Return `x` as an output of `module`.

    If FSDP2 wraps the module, a view is copied, because FSDP2 warns of views.
    """
    return x.clone() if _own_class(type(module))[1] and x._base is not None else x


@functools.cache
def _converter(package: str) -> Callable[[nn.Module], HeadView]:
    return importlib.import_module(CONVERTERS[package]).view_of
