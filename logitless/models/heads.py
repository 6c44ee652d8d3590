"""Where a transformers model keeps its LM head, and how its parameters are read."""

from torch import Tensor, nn

from logitless.engine.head_view import HeadView, view_of
from logitless.errors import value_error
from logitless.parallel.groups import split_over_vocabulary

COMPILED = "OptimizedModule"
# The attribute with the wrapped module, by class of the wrapper. Classes of packages that the library does
# not import are recognized by name.
WRAPPERS = {
    "DistributedDataParallel": "module",
    COMPILED: "_orig_mod",
    "_FabricModule": "module",
    "DeepSpeedEngine": "module",
}
ONE_PROCESS = "start it with torchrun or accelerate launch, or show it one GPU with CUDA_VISIBLE_DEVICES"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model under the wrappers of DDP, torch.compile, Lightning Fabric and DeepSpeed, which accelerate
    puts around a model too.

    Raises:
        ValueError: for `nn.DataParallel` and FSDP1, by name.
    """
    while isinstance(model, nn.Module):
        name = type(model).__name__
        if name == "DataParallel":
            raise value_error("model", "one process per GPU", "nn.DataParallel", ONE_PROCESS)
        if name == "FullyShardedDataParallel":
            expected = "a model that is sharded by FSDP2, if at all"
            raise value_error("model", expected, f"FSDP1's {name}", "shard it with fully_shard")
        if name not in WRAPPERS:
            break
        model = getattr(model, WRAPPERS[name])
    return model


def base_of(model: nn.Module, *, keep_compiled: bool = False) -> nn.Module:
    """The transformers model under its wrappers and under PEFT's adapters.

    With `keep_compiled`, the wrapper of torch.compile around a model without adapters is returned, because
    the module under it runs uncompiled.
    """
    if keep_compiled and type(model).__name__ == COMPILED and not hasattr(model, "get_base_model"):
        return model
    model = unwrapped(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_head(model: nn.Module) -> nn.Module:
    """The model's LM head module."""
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    remedy = "pass AutoModelForCausalLM's"
    if not isinstance(head, nn.Module):
        expected = "a causal language model with an LM head"
        raise value_error("model", expected, type(model).__name__, remedy)
    return head


def split_head(model: nn.Module) -> Tensor | None:
    """The weight of a head whose rows tensor parallelism has spread over the ranks; None for any other."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    return weight if split_over_vocabulary(weight) else None


def read_head(head: nn.Module) -> HeadView:
    """The parameters of a head that is also called, so that its hooks run."""
    view = view_of(head, "model", called=True)
    bias = None if view.bias is None else _readable(view.bias)
    return view._replace(weight=_readable(view.weight), bias=bias)


def _readable(x: Tensor) -> Tensor:
    """A parameter that can be read after DeepSpeed ZeRO-3 has emptied it again, also in the backward pass."""
    if x.device.type == "meta":
        expected = "an LM head on a device"
        remedy = "give it a device of its own in device_map"
        raise value_error("model", expected, "one that is offloaded", remedy)
    if not hasattr(x, "ds_id"):
        return x
    if x.numel():
        return x.clone()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters([x]):
        return x.clone()
