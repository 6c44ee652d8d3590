"""LM heads with PEFT: plain LoRA, and heads that are trained as a whole (`modules_to_save`)."""

from typing import Any

from torch import nn

from logitless.engine import head_view
from logitless.engine.head_view import HeadView, LowRank
from logitless.errors import value_error

REMEDY = "remove 'lm_head' from target_modules, or train the head as a whole with modules_to_save=['lm_head']"


def view_of(head: nn.Module) -> HeadView:
    """Return the head with the adapters that are active now."""
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(head, ModulesToSaveWrapper):
        active = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapter]
        return head_view.view_of(active)
    names = _active_adapters(head)
    base = head_view.view_of(head.get_base_layer())
    return base._replace(columns=tuple(_adapter_columns(head, name) for name in names))


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
    if not unsupported and head.disable_adapters and head.merged:
        # as the head's own forward pass does
        head.unmerge()
    is_inactive = bool(unsupported) or head.disable_adapters or head.merged
    names = [] if is_inactive else [name for name in head.active_adapters if name in head.lora_A]
    unsupported += [type(head.lora_variant[name]).__name__ for name in names if name in head.lora_variant]
    if unsupported:
        is_of_tokens = "trainable_tokens" in type(head).__module__
        remedy = "leave trainable_token_indices out, or untie the embeddings" if is_of_tokens else REMEDY
        raise value_error("model", "no adapter but plain LoRA on the LM head", ", ".join(unsupported), remedy)
    is_partitioned = any(hasattr(x, "ds_id") for x in head.parameters()) and bool(names)
    if is_partitioned:
        expected = "an LM head without an adapter under DeepSpeed ZeRO-3"
        got = "LoRA, untested there"
        raise value_error("model", expected, got, REMEDY)
    return names
