"""LM heads with PEFT: plain LoRA, rows of tied embeddings that are trained (`trainable_token_indices`), and
heads that are trained as a whole (`modules_to_save`)."""

from typing import Any

from torch import nn

from logitless.engine import head_view
from logitless.engine.head_view import HeadView, LowRank
from logitless.errors import value_error
from logitless.parallel.groups import is_dtensor

REMEDY = "remove 'lm_head' from target_modules, or train the head as a whole with modules_to_save=['lm_head']"


def view_of(head: nn.Module) -> HeadView:
    """Return the head with the adapters that are active now."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(head, ModulesToSaveWrapper):
        active = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapter]
        return head_view.view_of(active)
    if isinstance(head, TrainableTokensWrapper):
        head = head.token_adapter
    if isinstance(head, TrainableTokensLayer):
        return _with_trained_rows(head)
    names = _active_adapters(head)
    base = head_view.view_of(head.get_base_layer())
    return base._replace(columns=tuple(_adapter_columns(head, name) for name in names))


def _with_trained_rows(head: Any) -> HeadView:
    """Return the head of a layer that trains single rows of the weight, as its own forward pass computes it.

    Raises:
        ValueError: the weight is sharded or partitioned, which PEFT does not support either.
    """
    base = head_view.view_of(head.get_base_layer())
    _unmerge_if_disabled(head)
    if head.disable_adapters or head.merged or not head.active_adapters:
        return base
    if is_dtensor(base.weight) or hasattr(base.weight, "ds_id"):
        expected = "a whole LM head with trainable_token_indices"
        raise value_error("model", expected, "a sharded or partitioned one", "leave these out")
    return base._replace(weight=head.get_merged_weights(head.active_adapters), bias=None)


def _unmerge_if_disabled(head: Any) -> None:
    """Do as the forward passes of PEFT's layers do."""
    if head.disable_adapters and head.merged:
        head.unmerge()


def _adapter_columns(head: Any, name: str) -> LowRank:
    lora_a = head.lora_A[name]
    lora_b = head.lora_B[name]
    return LowRank(lora_a.weight, lora_b.weight, head.scaling[name], lora_b.bias, head.lora_dropout[name])


def _active_adapters(head: Any) -> list[str]:
    """Return the names of the LoRA adapters that the head's own forward pass applies.

    Raises:
        ValueError: an adapter is not plain LoRA, or there is one under DeepSpeed ZeRO-3.
    """
    from peft.tuners.lora import Linear

    unsupported = [] if isinstance(head, Linear) else [f"{type(head).__module__}.{type(head).__name__}"]
    if not unsupported:
        _unmerge_if_disabled(head)
    is_inactive = bool(unsupported) or head.disable_adapters or head.merged
    names = [] if is_inactive else [name for name in head.active_adapters if name in head.lora_A]
    unsupported += [type(head.lora_variant[name]).__name__ for name in names if name in head.lora_variant]
    if unsupported:
        raise value_error("model", "no adapter but plain LoRA on the LM head", ", ".join(unsupported), REMEDY)
    is_partitioned = any(hasattr(x, "ds_id") for x in head.parameters()) and bool(names)
    if is_partitioned:
        expected = "an LM head without an adapter under DeepSpeed ZeRO-3"
        got = "LoRA, untested there"
        raise value_error("model", expected, got, REMEDY)
    return names
