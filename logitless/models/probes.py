"""Probes: compare a model with deferred logits and the same model with full logits, on a few tokens."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from logitless.engine.head_view import view_of
from logitless.engine.operands import SplitHead
from logitless.errors import value_error
from logitless.layers import lora
from logitless.parallel.groups import is_dtensor

# Standard deviation of the logits in the probe of a head: large enough to show a missing adapter, bias or
# mask.
LOGITS_STD = 20.0
NUM_TOKENS = 4


@contextmanager
def probe_mode(module: nn.Module) -> Iterator[None]:
    """Context without gradients, dropout and compiler; on exit, modes and random states are restored."""
    modes = {m: m.training for m in module.modules()}
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with lora.probing(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        with torch.compiler.set_stance("force_eager"):
            module.eval()
            try:
                yield
            finally:
                for m, training in modes.items():
                    m.training = training


def max_difference(dtype: torch.dtype, size: float) -> float:
    """Return the tolerance for two sums of magnitude `size`; fp32 products may use TF32."""
    eps = 2**-11 if dtype is torch.float32 else torch.finfo(dtype).eps
    return 4 * eps * max(size, 1.0)


def check_head(head: nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
    """Compare the head's output for random vectors with the product by the parameters that `view_of` reads.

    Args:
        head: the LM head.
        forward: its original forward pass.
        hidden: a tensor with the dtype, device and last dimension of the hidden states.

    Raises:
        ValueError: the logits differ.
    """
    with probe_mode(head):
        view = view_of(head, "model", called=True)
        autocast = torch.is_autocast_enabled(hidden.device.type)
        dtype = hidden.dtype if autocast else view.dtype
        x = torch.randn(NUM_TOKENS, hidden.shape[-1], dtype=dtype, device=hidden.device)
        unscaled = forward(x).float()
        x = x * (LOGITS_STD / unscaled[unscaled.isfinite()].std().clamp(min=1e-6)).to(x.dtype)
        head_logits = forward(x)
        x_wide, weight, bias = view.operands(x)
        weight = torch.cat(weight, dim=1) if isinstance(weight, SplitHead) else weight
        computed_logits = compute_logits(x_wide.to(weight.dtype), weight, bias)
        # A bias of -inf excludes a token id: both logits are -inf.
        is_excluded = (computed_logits == -torch.inf) & (head_logits == -torch.inf)
        computed_logits = computed_logits.masked_fill(is_excluded, 0.0)
        head_logits = head_logits.masked_fill(is_excluded, 0.0)
        error = (computed_logits.float() - head_logits.float()).abs().max().item()
        tolerance = max_difference(head_logits.dtype, head_logits.float().abs().max().item())
    if not error <= tolerance:  # also where it is nan
        expected = f"logits that differ by at most {tolerance:.2g}"
        remedy = "compute its loss without logitless"
        raise value_error("model", f"{expected} from those of its head's parameters", f"{error:.2g}", remedy)


def compute_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the full logits, also if tensor parallelism shards the rows of the weight."""
    if not is_dtensor(weight):
        return nn.functional.linear(x, weight, bias)
    from torch.distributed.tensor import DTensor

    x = DTensor.from_local(x, weight.device_mesh, run_check=False)
    return nn.functional.linear(x, weight, bias).full_tensor()


def check_call(
    model: nn.Module, forward: Callable[..., Any], deferred_forward: Callable[..., Any]
) -> str | None:
    """Compare the loss of a few token ids with and without deferred logits.

    Args:
        model: the model.
        forward: its original forward pass.
        deferred_forward: its forward pass with deferred logits.

    Returns:
        The reason why the losses could not be compared; None if they were.

    Raises:
        ValueError: the losses differ.
    """
    ids = torch.arange(3, 3 + NUM_TOKENS, device=next(model.parameters()).device)[None]
    inputs = {"input_ids": ids, "labels": ids}
    # Some models select tokens by the mask before the loss (Qwen2-Audio).
    if "attention_mask" in inspect.signature(forward).parameters:
        inputs["attention_mask"] = torch.ones_like(ids)
    with probe_mode(model):
        try:
            original_loss = _loss_of(forward(**inputs)).item()
        except Exception as error:
            # A model that needs pixels or special token ids may raise any exception.
            return f"{type(error).__name__}: {error}"
        deferred_loss = _loss_of(deferred_forward(**inputs)).item()
    if not math.isfinite(original_loss):
        return f"its own loss is {original_loss}"
    tolerance = max_difference(next(model.parameters()).dtype, abs(original_loss))
    if not abs(deferred_loss - original_loss) <= tolerance:  # also where it is nan
        expected = f"the model's own loss {original_loss:.6g}"
        remedy = "compute its loss without logitless"
        raise value_error("model", expected, f"{deferred_loss:.6g}", remedy)
    return None


def _loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output[0]
