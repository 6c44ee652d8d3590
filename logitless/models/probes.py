"""Probes: compare a model with deferred logits and the same model without them, on a few tokens."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from logitless.engine.head_view import view_of
from logitless.engine.operands import SplitHead
from logitless.errors import value_error
from logitless.parallel.groups import is_dtensor

# Of the logits in the probe of a head: enough that a forgotten adapter, bias or mask shows.
SPREAD = 20.0
TOKENS = 4


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Context without gradients, dropout and compiler; on exit, modes and random states are restored."""
    modes = {m: m.training for m in module.modules()}
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        module.eval()
        try:
            yield
        finally:
            for m, training in modes.items():
                m.training = training


def allowed(dtype: torch.dtype, size: float) -> float:
    """Tolerance between two sums of this size; fp32 products may use TF32."""
    eps = 2**-11 if dtype is torch.float32 else torch.finfo(dtype).eps
    return 4 * eps * max(size, 1.0)


def check_head(head: nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
    """Compare the logits of random vectors with those of the parameters that we read.

    Raises:
        ValueError: they differ.
    """
    with undisturbed(head):
        view = view_of(head, called=True)
        autocast = torch.is_autocast_enabled(hidden.device.type)
        dtype = hidden.dtype if autocast else view.dtype
        x = torch.randn(TOKENS, hidden.shape[-1], dtype=dtype, device=hidden.device)
        first = forward(x).float()
        x = x * (SPREAD / first[first.isfinite()].std().clamp(min=1e-6)).to(x.dtype)
        theirs = forward(x)
        wide, weight, bias = view.operands(x)
        weight = torch.cat(weight, dim=1) if isinstance(weight, SplitHead) else weight
        ours = product(wide.to(weight.dtype), weight, bias)
        # A bias of -inf rules an id out: there the two agree.
        ruled_out = (ours == -torch.inf) & (theirs == -torch.inf)
        ours, theirs = (logits.masked_fill(ruled_out, 0.0) for logits in (ours, theirs))
        error = (ours.float() - theirs.float()).abs().max().item()
        most = allowed(theirs.dtype, theirs.float().abs().max().item())
    if not error <= most:  # also where it is nan
        expected = f"logits that differ by at most {most:.2g}"
        remedy = "compute its loss without logitless"
        raise value_error("model", f"{expected} from those of its head's parameters", f"{error:.2g}", remedy)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits, of whole rows or of rows that tensor parallelism has spread over the ranks."""
    if not is_dtensor(weight):
        return nn.functional.linear(x, weight, bias)
    from torch.distributed.tensor import DTensor

    x = DTensor.from_local(x, weight.device_mesh, run_check=False)
    return nn.functional.linear(x, weight, bias).full_tensor()


def check_call(model: nn.Module, forward: Callable[..., Any], deferred: Callable[..., Any]) -> str | None:
    """Compare the loss of a few ordinary ids with and without deferred logits.

    Returns:
        why the model cannot be called like this; None if it could.

    Raises:
        ValueError: the losses differ.
    """
    ids = torch.arange(3, 3 + TOKENS, device=next(model.parameters()).device)[None]
    with undisturbed(model):
        try:
            theirs = forward(input_ids=ids, labels=ids).loss.item()
        except Exception as error:
            # A model that needs pixels or special ids may raise any exception.
            return f"{type(error).__name__}: {error}"
        ours = deferred(input_ids=ids, labels=ids).loss.item()
    if not math.isfinite(theirs):
        return f"its own loss is {theirs}"
    most = allowed(next(model.parameters()).dtype, abs(theirs))
    if not abs(ours - theirs) <= most:  # also where it is nan
        expected = f"the model's own loss {theirs:.6g}"
        remedy = "compute its loss without logitless"
        raise value_error("model", expected, f"{ours:.6g}", remedy)
    return None
