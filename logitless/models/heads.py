"""Find the LM head of a transformers model, and read its parameters."""

from contextlib import suppress
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from logitless.engine.head_view import HeadView, view_of
from logitless.errors import type_error, value_error
from logitless.exchange import instance_forward
from logitless.parallel.groups import split_over_vocabulary

COMPILED = "OptimizedModule"
# Class name of a wrapper -> its attribute with the wrapped module. Classes are compared by name, because
# the library does not import their packages.
WRAPPERS = {
    "DistributedDataParallel": "module",
    COMPILED: "_orig_mod",
    "_FabricModule": "module",
    "DeepSpeedEngine": "module",
}
COPIED = "a deep copy whose `forward` calls the model that was copied"
COPY_REMEDY = "delete its attribute `forward`, or copy the model before a trainer is constructed"
ONE_PROCESS = "use torchrun or accelerate launch, or select one GPU with CUDA_VISIBLE_DEVICES"


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DDP, torch.compile, Lightning Fabric and DeepSpeed.

    Raises:
        ValueError: the wrapper is `nn.DataParallel` or FSDP1.
    """
    while isinstance(model, nn.Module):
        name = type(model).__name__
        if name == "DataParallel":
            raise value_error("model", "one process per GPU", "nn.DataParallel", ONE_PROCESS)
        if name == "FullyShardedDataParallel":
            expected = "a model that is not sharded, or sharded by FSDP2"
            raise value_error("model", expected, f"FSDP1's {name}", "shard it with fully_shard")
        if name not in WRAPPERS:
            break
        model = getattr(model, WRAPPERS[name])
    return model


def base_of(model: nn.Module, *, keep_compiled: bool = False) -> nn.Module:
    """Return the transformers model inside its wrappers and PEFT's adapters.

    With `keep_compiled`, a model without adapters keeps the wrapper of torch.compile, because the module
    inside it would run uncompiled.
    """
    if keep_compiled and type(model).__name__ == COMPILED and not hasattr(model, "get_base_model"):
        return model
    model = unwrap(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_head(model: nn.Module) -> nn.Module:
    """Return the model's LM head module.

    Raises:
        TypeError: it is no model.
        ValueError: the model has none.
    """
    if not isinstance(model, nn.Module):
        remedy = "pass a model of AutoModelForCausalLM, such as trainer.model"
        raise type_error("model", "a model", type(model).__name__, remedy)
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    remedy = "pass a model of AutoModelForCausalLM"
    if not isinstance(head, nn.Module):
        expected = "a causal language model with an LM head"
        raise value_error("model", expected, type(model).__name__, remedy)
    return head


def calls_another_model(model: nn.Module) -> bool:
    """Whether the `forward` on the instance calls another module.

    It does in a deep copy of a model on which TRL has set a `forward`: a deep copy of a function refers to
    the same objects, here to the model that was copied.
    """
    pending: list[Any] = [instance_forward(model)]
    seen = set()
    while pending:
        function = pending.pop()
        owner = getattr(function, "__self__", model)
        if isinstance(owner, nn.Module) and owner is not model:
            return True
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType) and function not in seen:
            seen.add(function)
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    pending.append(cell.cell_contents)
    return False


def sharded_head_weight(model: nn.Module) -> Tensor | None:
    """Return the head's weight if tensor parallelism shards its rows over the ranks, else None."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return weight if split_over_vocabulary(weight) else None


def read_head(head: nn.Module) -> HeadView:
    """Return the parameters of a head that is also called, so that its hooks run."""
    view = view_of(head, "model", called=True)
    bias = None if view.bias is None else _read_parameter(view.bias)
    return view._replace(weight=_read_parameter(view.weight), bias=bias)


def _read_parameter(x: Tensor) -> Tensor:
    """Return the parameter, or under DeepSpeed ZeRO-3 a copy, which can also be read in the backward pass.

    Raises:
        ValueError: the parameter is on the meta device.
    """
    if x.device.type == "meta":
        expected = "an LM head on a device"
        remedy = "load the model first; if the head is offloaded, assign it to a device in device_map"
        raise value_error("model", expected, "one on the meta device", remedy)
    if not hasattr(x, "ds_id"):
        return x
    if x.numel():
        return x.clone()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([x]):
        return x.clone()
