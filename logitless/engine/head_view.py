"""An LM head as a module, or as `HeadView`, in the place of its weight.

Exactly `nn.Linear` is read here. Other modules are read by a converter of `logitless.models`, imported when
the first module of their package comes, and what has none is refused: its forward pass may do anything.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.engine.operands import SplitHead
from logitless.errors import expect
from logitless.parallel.groups import is_dtensor, local_parameter, sharded_like

# Module that has `view_of(module) -> HeadView`, by the package of the module's class.
CONVERTERS = {"peft": "logitless.models.peft_heads"}
FSDP = "torch.distributed.fsdp"
LEAVE_WHOLE = "leave the LM head out of quantization ({}), or dequantize it"
# What to do about a head of that package; `transformers` holds quantized layers only.
REMEDIES = {
    "bitsandbytes": LEAVE_WHOLE.format("BitsAndBytesConfig(llm_int8_skip_modules=['lm_head'])"),
    "auto_gptq": LEAVE_WHOLE.format("lm_head=False"),
    "gptqmodel": LEAVE_WHOLE.format("lm_head=False"),
    "awq": LEAVE_WHOLE.format("modules_to_not_convert=['lm_head']"),
    "transformers": LEAVE_WHOLE.format("modules_to_not_convert=['lm_head']"),
}


class LowRank(NamedTuple):
    """Columns that train beside a head: x @ (scale * up @ down).T."""

    down: Tensor  # (r, H)
    up: Tensor  # (V, r)
    scale: float
    bias: Tensor | None = None  # (V,), scaled too
    dropout: Callable[[Tensor], Tensor] | None = None  # of its input


class HeadView(NamedTuple):
    """What a head computes of hidden states: softcap * tanh(logit_scale * (h·w + b) / softcap).

    Attributes:
        weight: (V, H), whole or a DTensor.
        bias: (V,), whole or a DTensor; None for none.
        columns: LoRA on the head.
        softcap: as the field of the losses; None for none.
        logit_scale: as the field of the losses.
        of_model: whether softcap and logit_scale are a model's, which a loss must not contradict.
        in_shards: whether the rows of a DTensor stay where a tensor-parallel plan has put them, and the loss
            gets its group; else the DTensor is gathered, unless the loss names the group itself.
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
        """Fields of a loss."""
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
        """The head of the first token ids alone."""
        columns = tuple(
            x._replace(up=x.up[:rows], bias=None if x.bias is None else x.bias[:rows]) for x in self.columns
        )
        bias = None if self.bias is None else self.bias[:rows]
        return self._replace(weight=self.weight[:rows], bias=bias, columns=columns)

    def split_like(self, weight: Tensor) -> "HeadView":
        """A whole head as a DTensor in shards like `weight`, of this rank's rows; nothing is copied."""
        if is_dtensor(self.weight) or self.shape[0] != weight.shape[0]:
            return self
        bias = None if self.bias is None else sharded_like(self.bias, weight)
        return self._replace(weight=sharded_like(self.weight, weight), bias=bias)

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor | SplitHead, Tensor | None]:
        """(hidden, weight, bias) of the product.

        LoRA makes the first two wider, [h, s·h·Aᵀ] · [W, B]ᵀ; a frozen W gets no gradient (`SplitHead`).
        """
        weight, bias = self.weight, self.bias
        if not self.columns:
            return hidden, weight, bias
        weight, bias = local_parameter("weight", weight, None), local_parameter("bias", bias, None)
        wide, trained = [hidden], []
        for columns in self.columns:
            down, up, extra = (
                local_parameter("weight", x, None) for x in (columns.down, columns.up, columns.bias)
            )
            # PEFT keeps the adapters of a half-precision model in fp32
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
    """Whether two softcaps or scales are the same, up to rounding: a model may divide where we multiply."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other) if numbers else one == other


def is_head(*given: object) -> bool:
    """Whether any of these is a module or a view in the place of a weight."""
    return any(isinstance(x, nn.Module | HeadView) for x in given)


def view_of(head: object, argument: str = "weight", *, called: bool = False) -> HeadView:
    """What a head module holds now: FSDP and PEFT replace parameters after construction.

    Args:
        head: a module, or a view, which is returned.
        argument: its name in errors.
        called: whether the module is called, so that its hooks run.

    Raises:
        TypeError: for a module that only its own forward pass can read.
    """
    if isinstance(head, HeadView):
        return head
    expected = "a tensor (V, H), or an LM head: torch.nn.Linear, or one under PEFT's LoRA or modules_to_save"
    remedy = "pass the LM head's weight as a torch.Tensor, such as model.lm_head.weight"
    expect(isinstance(head, nn.Module), argument, expected, type(head).__name__, remedy, TypeError)
    cls, sharded = _own_class(type(head))
    package = cls.__module__.partition(".")[0]
    if cls is not nn.Linear:
        name = f"{cls.__module__}.{cls.__qualname__}"
        remedy = REMEDIES.get(package, "pass the weight that it computes, as a tensor")
        expect(package in CONVERTERS, argument, expected, name, remedy, TypeError)
        return _converter(package)(head)
    hooked = (
        bool(head._forward_pre_hooks or head._forward_hooks) and not sharded or "forward" in head.__dict__
    )
    hooked = hooked and not called
    remedy = "remove them, or patch_model(model), which calls the head itself"
    expect(not hooked, argument, "a head whose forward pass is its own", "one with hooks", remedy)
    return HeadView(head.weight, head.bias)


def _own_class(cls: type) -> tuple[type, bool]:
    """(the class under those that FSDP2 and `models.exchange` put on top of it, whether FSDP2 did)."""
    # FSDP2 makes a class of FSDPModule and the module's own.
    added = [c for c in cls.__mro__ if any(b.__module__.startswith(FSDP) for b in (c, *c.__bases__))]
    own = (c for c in cls.__mro__ if c not in added and "exchange_key" not in vars(c))
    return next(own), bool(added)


def unviewed(x: Tensor, module: nn.Module) -> Tensor:
    """What `module` may return: of a view a copy, where FSDP2 would warn of views among its outputs."""
    return x.clone() if _own_class(type(module))[1] and x._base is not None else x


@functools.cache
def _converter(package: str) -> Callable[[nn.Module], HeadView]:
    return importlib.import_module(CONVERTERS[package]).view_of
