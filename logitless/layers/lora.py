"""LoRA projections of PEFT: y = x W' + b + s (dropout(x) A') B', with frozen W and b.

    h   = s x A'          y   = x W' + b;  y += h B'
    d_h = s d_y B         d_B = d_y' h     d_A = d_h' x     d_x = d_y W;  d_x += d_h A

PEFT's layer casts x to the adapter's fp32 and, under autocast, back; multiplies by s and adds in kernels of
their own, forward and backward; and keeps a copy of x for each projection. Here the products accumulate the
sums, s is applied to h and d_h, which have r numbers a token, and x, h, A and B are saved in the products'
dtype. W in a wider dtype or in 4 bits is converted in the forward pass and again in the backward pass.
Results differ from PEFT's by rounding. Dropout masks are drawn in PEFT's order.
"""

import functools
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from logitless.exchange import is_plain_exchange, state_of, stock_forward
from logitless.kernels.matmul import accumulate
from logitless.layers import lora_dropout
from logitless.layers.fused_forwards import PLAIN_TYPES, is_transformed, is_untouched
from logitless.layers.lora_dropout import product, scaled_product
from logitless.layers.source import UnrecognizedSource, undecorated_forward_of

logger = logging.getLogger(__name__)
_thread = threading.local()

KEY = "lora"
# Names of PEFT's classes that are fused -> those of their base layers. Subclasses may compute something else.
FUSED_CLASSES = {
    "peft.tuners.lora.layer.Linear": "torch.nn.modules.linear.Linear",
    "peft.tuners.lora.bnb.Linear4bit": "bitsandbytes.nn.modules.Linear4bit",
}
PARAMS_4BIT = "bitsandbytes.nn.modules.Params4bit"


class LoraProjection(NamedTuple):
    """What a LoRA layer computes with in one call."""

    weight: Tensor  # (O, K), or that packed into 4 bits a number
    bias: Tensor | None  # (O,)
    a: Tensor  # (r, K)
    b: Tensor  # (O, r)
    scale: float
    dropout: float  # probability; 0 in evaluation mode
    quant_state: Any = None  # bitsandbytes' description of a packed weight


class Fused(NamedTuple):
    """State of a fused LoRA layer.

    Attributes:
        forward: PEFT's forward pass when the layer was fused.
        stock_calls: reason -> number of calls that ran PEFT's forward pass, in all layers of a model.
    """

    forward: Callable
    stock_calls: Counter


def is_lora_layer(module: nn.Module) -> bool:
    """Whether the module is one of PEFT's LoRA layers, of any class."""
    return all(hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B", "active_adapters"))


def check_fusible(module: nn.Module) -> None:
    """Check that a LoRA layer can be fused.

    Raises:
        UnrecognizedSource: the layer computes something else, whatever its adapters are later set to.
    """
    name = _class_name(module)
    if name not in FUSED_CLASSES:
        raise UnrecognizedSource(f"it is {name}")
    function = undecorated_forward_of(module)
    if _class_name(module.base_layer) != FUSED_CLASSES[name]:
        raise UnrecognizedSource(f"its base layer is {type(module.base_layer).__name__}")
    if variants := {type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values()}:
        raise UnrecognizedSource(f"its adapter is {', '.join(sorted(variants))}")
    if any(getattr(b, "bias", None) is not None for b in module.lora_B.values()):
        raise UnrecognizedSource("its adapter has a bias")
    if not _agrees(module, function):
        raise UnrecognizedSource("its results differ from those of plain LoRA")


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _agrees(module: nn.Module, function: Callable) -> bool:
    """Whether PEFT's forward pass, with small layers in place of the module's, gives plain LoRA's results."""
    probe = object.__new__(type(module))
    probe.__dict__ |= module.__dict__ | {
        "_active_adapter": ["probe"],
        "_disable_adapters": False,
        "merged_adapters": [],
        "scaling": {"probe": 0.7},
    }
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            probe.__dict__["_modules"], x, y = _small_layers()
            return torch.allclose(function(probe, x), y, atol=1e-5)
    except Exception:  # then its results do not agree
        return False


@functools.cache
def _small_layers() -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    """Return (children of a LoRA layer with the adapter "probe" and scale 0.7, input, result)."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)

    def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
        layer = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight)
        layer.bias = None if bias is None else nn.Parameter(bias)
        return layer

    x, weight, bias, a, b = randn(3, 6), randn(5, 6), randn(5), randn(2, 6), randn(5, 2)
    adapter = {"lora_A": linear(a), "lora_B": linear(b), "lora_dropout": nn.Identity()}
    children = {name: nn.ModuleDict({"probe": layer}) for name, layer in adapter.items()}
    children["base_layer"] = linear(weight, bias)
    return children, x, x @ weight.t() + bias + 0.7 * (x @ a.t() @ b.t())


def projection_forward(
    module: nn.Module, state: Fused, original: Callable, *args: Any, **kwargs: Any
) -> Tensor:
    """Forward pass of a fused LoRA layer."""
    if is_transformed():
        return original(*args, **kwargs)
    if len(args) != 1 or kwargs:
        found = "it is called with other arguments than x"
    elif getattr(original, "func", None) is not state.forward:
        found = "PEFT's forward pass was replaced"
    else:
        found = read_projection(module, args[0])
    if type(found) is str:
        if not getattr(_thread, "is_probe", False):
            if found not in state.stock_calls:
                logger.info("LoRA layers run PEFT's own forward pass where %s", found)
            state.stock_calls[found] += 1
        return original(*args, **kwargs)
    return apply_projections(args[0], [found])[0]


def project_group(x: Tensor, *layers: nn.Module) -> dict[int, Tensor]:
    """Return the results of LoRA layers of one input by position; none if each must be called by itself."""
    found = _read_group(x, layers)
    return {} if found is None else dict(enumerate(apply_projections(x, found)))


def _read_group(x: Tensor, layers: tuple[nn.Module, ...]) -> list[LoraProjection] | None:
    """Return what the layers compute with; None if calling one of them would run any other code."""
    found = []
    for layer in layers:
        state = state_of(layer, KEY)
        if state is None or not is_plain_exchange(layer, KEY) or not is_untouched(layer):
            return None
        if stock_forward(layer).__func__ is not state.forward:
            return None
        projection = read_projection(layer, x)
        if type(projection) is str:
            return None
        found.append(projection)
    return found


@contextmanager
def probing() -> Iterator[None]:
    """Context of a forward pass that is no step of training: calls of PEFT's own code are not counted."""
    before = getattr(_thread, "is_probe", False)
    _thread.is_probe = True
    try:
        yield
    finally:
        _thread.is_probe = before


def read_projection(module: nn.Module, x: Tensor) -> LoraProjection | str:
    """Return what the layer computes with, or the reason why PEFT's own forward pass must run."""
    if module.disable_adapters:
        return "adapters are disabled"
    if module.merged_adapters:
        return "adapters are merged"
    names = module.active_adapters
    if len(names) != 1 or names[0] not in module.lora_A:
        return "no adapter is active" if len(names) < 2 else "several adapters are active"
    (name,) = names
    base = module.base_layer
    lora_a = module.lora_A[name]
    lora_b = module.lora_B[name]
    dropout = module.lora_dropout[name]
    scale = module.scaling[name]
    if getattr(module, "lora_variant", {}).get(name) is not None:
        return "the adapter is not plain LoRA"
    is_4bit = _class_name(base) == FUSED_CLASSES["peft.tuners.lora.bnb.Linear4bit"]
    for layer in (lora_a, lora_b) if is_4bit else (base, lora_a, lora_b):
        if type(layer) is not nn.Linear:
            return f"a layer of the projection is {type(layer).__name__}"
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return f"the dropout is {type(dropout).__name__}"
    p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    if lora_a.bias is not None or lora_b.bias is not None or type(scale) not in (int, float) or p >= 1:
        return "the adapter is not plain LoRA"
    if not all(map(is_untouched, (base, lora_a, lora_b, dropout))):
        return "a layer of the projection has hooks or a forward attribute"
    weight, bias, a, b = base.weight, base.bias, lora_a.weight, lora_b.weight
    if weight.requires_grad or bias is not None and bias.requires_grad:
        return "the base layer is trained"
    dtype = compute_dtype(x)
    quant_state = None
    tensors = [x, a, b] if bias is None else [x, a, b, bias]
    if is_4bit:
        quant_state = getattr(weight, "quant_state", None)
        if reason := _reason_against_4bit(base, x, dtype, quant_state):
            return reason
        shape = quant_state.shape
    else:
        tensors.append(weight)
        shape = weight.shape
    # ZeRO-3 leaves empty parameters.
    if not all(type(t) in PLAIN_TYPES for t in tensors) or x.is_meta or x.shape[-1:] != shape[1:]:
        return "a parameter or the input is not a plain tensor"
    if dtype != x.dtype or any(t.dtype != dtype for t in tensors):
        if not torch.is_autocast_enabled(x.device.type):
            # PEFT computes a wider adapter in its own dtype.
            return "input, weights and adapters have several dtypes, without autocast"
        if not all(t.dtype in (dtype, torch.float32) for t in tensors):
            return "a tensor has a dtype that autocast does not cast"
    return LoraProjection(weight, bias, a, b, scale, p, quant_state)


def _reason_against_4bit(base: nn.Module, x: Tensor, dtype: torch.dtype, quant_state: Any) -> str:
    """Return why PEFT's own forward pass must run for a 4-bit base layer, or ""."""
    if _class_name(base.weight) != PARAMS_4BIT or quant_state is None:
        return "the base weight is not in 4 bits"
    if getattr(quant_state, "packing_format_for_cpu", False):
        return "the base weight is packed for inference on a CPU"
    # bitsandbytes computes in this dtype and returns that of x. Without one, it takes that of its first x.
    computes_in = base.compute_dtype if base.compute_type_is_set else x.dtype
    if not x.dtype == dtype == computes_in:
        return "the 4-bit base layer computes in another dtype"
    return ""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's products: autocast's, or that of its input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def apply_projections(x: Tensor, projections: list[LoraProjection]) -> tuple[Tensor, ...]:
    """Return the results of projections of one input (..., K), each (..., O)."""
    weights, biases, many_a, many_b, scales, dropouts, states = zip(*projections)
    # Cast by autograd, so that it is known as a copy of x where tensors are recomputed.
    cast = x.to(compute_dtype(x))
    # Its gradient would be the sum over the projections, rounded to the products' dtype.
    uncast = None if cast is x else x
    return _Projections.apply(cast, uncast, scales, dropouts, states, *weights, *biases, *many_a, *many_b)


class _Run(NamedTuple):
    """Successive projections of equal scale and dropout, and with dropout of equal rank."""

    members: slice
    columns: slice  # of h; rows of A
    scale: float
    dropout: float


def _runs_of(scales: list[float], dropouts: tuple[float, ...], ranks: list[int]) -> list[_Run]:
    runs = []
    member = column = 0
    alike = itertools.groupby(zip(scales, dropouts, ranks), lambda x: (*x[:2], x[2] if x[1] else None))
    for (scale, p, _), group in alike:
        widths = [rank for _, _, rank in group]
        end, last = member + len(widths), column + sum(widths)
        runs.append(_Run(slice(member, end), slice(column, last), scale, p))
        member, column = end, last
    return runs


class _Projections(torch.autograd.Function):
    """n projections of one x: 2 n + 1 products in the forward pass, 3 n + 2 in the backward pass.

    With dropout, the inputs of A differ: see `lora_dropout`. Products are written with `out` or in place, to
    which autocast does not apply. Where `uncast` is not None, x is its copy in the products' dtype; it has
    the gradient instead of x, summed in its own dtype.
    """

    @staticmethod
    def forward(ctx, x, uncast, scales, dropouts, quant_states, *tensors):
        n = len(scales)
        weights, biases, many_a, many_b = (tensors[i * n : (i + 1) * n] for i in range(4))
        ranks = [a.shape[0] for a in many_a]
        rows = x.reshape(-1, x.shape[-1])
        a, many_b = _cast_adapters(many_a, many_b, ranks, x.dtype)
        h = rows.new_empty(rows.shape[0], sum(ranks))
        # Of the masked x, which is not rounded.
        scales = [scale / (1 - p) for scale, p in zip(scales, dropouts)]
        runs = _runs_of(scales, dropouts, ranks)
        many_masks = []
        for run in runs:
            masks, each, part = None, a[run.columns], h[:, run.columns]
            if run.dropout:
                count = run.members.stop - run.members.start
                masks = lora_dropout.draw_masks(rows, run.dropout, count, each.shape[0] // count)
                lora_dropout.project(rows, masks, each, run.scale, part)
            else:
                scaled_product(rows, each.t(), run.scale, part)
            many_masks.append(masks)
        results = []
        for weight, state, bias, part, b in zip(weights, quant_states, biases, h.split(ranks, 1), many_b):
            # Not a view: the caller may change it in place.
            result = x.new_empty(*x.shape[:-1], b.shape[0])
            y = result.view(-1, b.shape[0])
            weight = _as_matrix(weight, state, x.dtype).t()
            if bias is None:
                torch.mm(rows, weight, out=y)
            else:
                torch.addmm(bias.to(x.dtype), rows, weight, out=y)
            y.addmm_(part, b.t())
            results.append(result)
        ctx.set_materialize_grads(False)
        trains_a = any(ctx.needs_input_grad[5 + 2 * n : 5 + 3 * n])
        ctx.save_for_backward(x if trains_a else None, h, a, *many_b, *weights, *many_masks)
        ctx.quant_states = quant_states
        ctx.scales, ctx.runs, ctx.ranks, ctx.shape = scales, runs, ranks, x.shape
        ctx.d_x_dtype = x.dtype if uncast is None else uncast.dtype
        ctx.dtypes = [each.dtype for each in tensors[2 * n :]]
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        n, ranks = len(ctx.ranks), ctx.ranks
        x, h, a, *rest = ctx.saved_tensors
        many_b, weights, many_masks = rest[:n], rest[n : 2 * n], rest[2 * n :]
        needs_x, needs_a = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[5 + 2 * n : 5 + 3 * n]
        needs_b = ctx.needs_input_grad[5 + 3 * n :]
        d_h = torch.empty_like(h)
        d_x = h.new_empty(h.shape[0], ctx.shape[-1], dtype=ctx.d_x_dtype) if needs_x else None
        d_a, d_b = [None] * n, [None] * n
        is_first = True
        for i, (d_y, part, d_part) in enumerate(zip(grads, h.split(ranks, 1), d_h.split(ranks, 1))):
            if d_y is None:
                d_part.zero_()
                continue
            d_y = d_y.reshape(-1, d_y.shape[-1])
            scaled_product(d_y, many_b[i], ctx.scales[i], d_part)
            if needs_b[i]:
                d_b[i] = product(d_y.t(), part, ctx.dtypes[n + i])
            if needs_x:
                weight = _as_matrix(weights[i], ctx.quant_states[i], d_y.dtype)
                accumulate(d_x, d_y.t(), weight, first=is_first)
                is_first = False
        for run, masks in zip(ctx.runs, many_masks):
            d_part = d_h[:, run.columns]
            if any(needs_a[run.members]):
                rows, dtype = x.reshape(-1, x.shape[-1]), ctx.dtypes[run.members.start]
                if masks is None:
                    gradients = product(d_part.t(), rows, dtype)
                else:
                    gradients = lora_dropout.weight_gradient(d_part, rows, masks, dtype)
                d_a[run.members] = gradients.split(ranks[run.members])
            if needs_x and masks is None:
                accumulate(d_x, d_part.t(), a[run.columns], first=False)
            elif needs_x:
                lora_dropout.add_input_gradient(d_x, d_part, masks, a[run.columns])
        # A projection whose result is not used has no gradient, not zeros: AdamW would decay its A.
        d_a = [each if needed and d_y is not None else None for each, needed, d_y in zip(d_a, needs_a, grads)]
        d_x = None if d_x is None else d_x.view(ctx.shape)
        d_inputs = (d_x, None) if ctx.d_x_dtype == h.dtype else (None, d_x)
        return *d_inputs, None, None, None, *[None] * (2 * n), *d_a, *d_b


def _as_matrix(weight: Tensor, quant_state: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight (O, K) in `dtype`, unpacked if bitsandbytes has packed it."""
    if quant_state is not None:
        import bitsandbytes

        weight = bitsandbytes.functional.dequantize_4bit(weight.data, quant_state)
    return weight.to(dtype)


def _cast_adapters(
    many_a: tuple[Tensor, ...], many_b: tuple[Tensor, ...], ranks: list[int], dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return all A, one below the other, and each B, in `dtype`."""
    if all(each.dtype == dtype for each in (*many_a, *many_b)):
        return torch.cat(many_a) if len(many_a) > 1 else many_a[0], many_b
    a = many_a[0].new_empty(sum(ranks), many_a[0].shape[1], dtype=dtype)
    cast_b = tuple(torch.empty_like(b, dtype=dtype) for b in many_b)
    # One kernel.
    torch._foreach_copy_([*a.split(ranks), *cast_b], [*many_a, *many_b])
    return a, cast_b
