"""LoRA projections of PEFT: y = x W' + b + s (dropout(x) A') B', with frozen W and b.

    h   = s x A'          y   = h B' + b;  y += x W'
    d_h = s d_y B         d_B = d_y' h     d_A = d_h' x     d_x = d_h A;  d_x += d_y W

PEFT's layer casts x to the adapter's fp32 and, under autocast, back; multiplies by s and adds in kernels of
their own, forward and backward; and keeps a copy of x for each projection. Here the products accumulate the
sums, the long one last: it reads y while it computes, and adds in fp32. s is applied to h and d_h, which have
r numbers a token, and x, h, A and B are saved in the products' dtype. W in a wider dtype or in 4 bits is
converted in the forward pass and again in the backward pass. Results differ from PEFT's by rounding. Dropout
masks are drawn in PEFT's order.
"""

import functools
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from logitless.exchange import is_plain_exchange, state_of, stock_forward
from logitless.kernels.matmul import add_product
from logitless.layers import lora_dropout
from logitless.layers.fused_forwards import PLAIN_TYPES, is_transformed, is_untouched
from logitless.layers.lora_dropout import product, scaled_product
from logitless.layers.source import UnrecognizedSource, undecorated_forward_of

logger = logging.getLogger(__name__)
_thread = threading.local()

KEY = "lora"
LINEAR_4BIT = "peft.tuners.lora.bnb.Linear4bit"
# Names of PEFT's classes that are fused -> those of their base layers. Subclasses may compute something else.
FUSED_CLASSES = {
    "peft.tuners.lora.layer.Linear": "torch.nn.modules.linear.Linear",
    LINEAR_4BIT: "bitsandbytes.nn.modules.Linear4bit",
}
PARAMS_4BIT = "bitsandbytes.nn.modules.Params4bit"
_dtype_of = attrgetter("dtype")
_scale_dropout_rank = attrgetter("scale", "dropout", "a.shape")


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
    """Context manager for a forward pass outside of training: calls of PEFT's own code are not counted."""
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
    # Attributes that are modules or parameters are looked up by Python code of torch, which takes longer.
    children = module._modules
    if len(names) != 1 or names[0] not in children["lora_A"]._modules:
        return "no adapter is active" if len(names) < 2 else "several adapters are active"
    (name,) = names
    base = children["base_layer"]
    lora_a = children["lora_A"]._modules[name]
    lora_b = children["lora_B"]._modules[name]
    dropout = children["lora_dropout"]._modules[name]
    scale = module.scaling[name]
    if getattr(module, "lora_variant", {}).get(name) is not None:
        return "the adapter is not plain LoRA"
    is_4bit = type(base) is not nn.Linear and _class_name(base) == FUSED_CLASSES[LINEAR_4BIT]
    for layer in (lora_a, lora_b) if is_4bit else (base, lora_a, lora_b):
        if type(layer) is not nn.Linear:
            return f"a layer of the projection is {type(layer).__name__}"
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return f"the dropout is {type(dropout).__name__}"
    p = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    if not is_untouched(base, lora_a, lora_b, dropout):
        return "a layer of the projection has hooks or a forward attribute"
    weight, bias = _weight_and_bias(base)
    a, a_bias = _weight_and_bias(lora_a)
    b, b_bias = _weight_and_bias(lora_b)
    if a_bias is not None or b_bias is not None or type(scale) not in (int, float) or p >= 1:
        return "the adapter is not plain LoRA"
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
    if not PLAIN_TYPES.issuperset(map(type, tensors)) or x.is_meta or x.shape[-1:] != shape[1:]:
        return "a parameter or the input is not a plain tensor"
    dtypes = set(map(_dtype_of, tensors))
    if dtypes != {dtype}:
        if not torch.is_autocast_enabled(x.device.type):
            # PEFT computes a wider adapter in its own dtype.
            return "input, weights and adapters have several dtypes, without autocast"
        if not dtypes <= {dtype, torch.float32}:
            return "a tensor has a dtype that autocast does not cast"
    return LoraProjection(weight, bias, a, b, scale, p, quant_state)


def _weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return layer.weight and layer.bias, also if they are no parameters, as under FSDP1."""
    parameters = layer._parameters
    if "weight" in parameters and "bias" in parameters:
        return parameters["weight"], parameters["bias"]
    return layer.weight, layer.bias


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


def apply_projections(x: Tensor, projections: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    """Return the results of projections of one input (..., K), each (..., O)."""
    # Cast by autograd, so that it is known as a copy of x where tensors are recomputed.
    dtype = compute_dtype(x)
    cast = x if x.dtype == dtype else x.to(dtype)
    # Its gradient would be the sum over the projections, rounded to the products' dtype.
    uncast = None if cast is x else x
    results: tuple[Tensor, ...] = ()
    for _, group in itertools.groupby(projections, _scale_dropout_rank):
        members = list(group)
        adapters = [each.a for each in members] + [each.b for each in members]
        written_from: list[Tensor] = []
        outputs = _Projections.apply(cast, uncast, members, written_from, *adapters)
        # Only now, because the recomputation of an activation checkpoint ends when the last tensor is saved.
        _write_results(outputs, members, *written_from)
        results += outputs
    return results


def _write_results(
    outputs: Sequence[Tensor], members: Sequence[LoraProjection], rows: Tensor, h: Tensor, *many_b: Tensor
) -> None:
    """Write the results (..., O) of projections of rows (N, K), given h (N, n r)."""
    parts = zip(outputs, members, _chunks(h, len(members), 1), many_b)
    with torch.no_grad():
        for output, member, part, b in parts:
            y = output.view(-1, b.shape[0])  # without history, as gradients are disabled
            if member.bias is None:
                torch.mm(part, b.t(), out=y)
            else:
                torch.addmm(member.bias.to(rows.dtype), part, b.t(), out=y)
            y.addmm_(rows, _as_matrix(member, rows.dtype).t())


class _Projections(torch.autograd.Function):
    """n projections of one x: 1 product in the forward pass, 3 n + 2 in the backward pass.

    The forward pass computes h and allocates the outputs, which `_write_results` writes by 2 n products. It
    appends the arguments of `_write_results` to `written_from`.

    Scale, dropout and rank are the same for all. With dropout, the inputs of A differ: see `lora_dropout`.
    Products are written with `out` or in place, to which autocast does not apply. Where `uncast` is not None,
    x is its copy in the products' dtype; it has the gradient instead of x, summed in its own dtype.

    `adapters` are all A, then all B. Frozen weights are neither arguments nor saved for the backward pass:
    every argument and every saved tensor takes host time, most of all under activation checkpointing.
    """

    @staticmethod
    def forward(ctx, x, uncast, members, written_from, *adapters):
        n = len(members)
        scale, p = members[0].scale, members[0].dropout
        scale /= 1 - p  # of the masked x, which is not rounded
        rows = x.reshape(-1, x.shape[-1])
        a, many_b, saved_b = _cast_adapters(adapters[:n], adapters[n:], x.dtype)
        h = rows.new_empty(rows.shape[0], a.shape[0])
        masks = None
        if p:
            masks = lora_dropout.project(rows, p, n, a, scale, h)
        else:
            scaled_product(rows, a.t(), scale, h)
        written_from += [rows, h, *many_b]
        # Not views: the caller may change them in place.
        outputs = [x.new_empty(*x.shape[:-1], member.b.shape[0]) for member in members]
        ctx.set_materialize_grads(False)
        trains_a = any(ctx.needs_input_grad[4 : 4 + n])
        ctx.save_for_backward(x if trains_a else None, h, masks, a, *saved_b)
        ctx.members, ctx.versions = members, _versions(members)
        ctx.scale, ctx.shape = scale, x.shape
        ctx.d_x_dtype = x.dtype if uncast is None else uncast.dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        members, n = ctx.members, len(ctx.members)
        if all([d_y is None for d_y in grads]):
            return (None,) * len(ctx.needs_input_grad)
        if _versions(members) != ctx.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                "operation: the base weight of a LoRA layer"
            )
        x, h, masks, a, *saved_b = ctx.saved_tensors
        needs_cast, needs_uncast, _, _, *needs = ctx.needs_input_grad
        needs_x, needs_a, needs_b = needs_cast or needs_uncast, needs[:n], needs[n:]
        d_h = torch.empty_like(h)
        d_x = h.new_empty(h.shape[0], ctx.shape[-1], dtype=ctx.d_x_dtype) if needs_x else None
        d_a, d_b = [None] * n, [None] * n
        matrices = [None] * n
        parts = zip(grads, _chunks(h, n, 1), _chunks(d_h, n, 1), _each_b(saved_b, members))
        for i, (d_y, part, d_part, b) in enumerate(parts):
            if d_y is None:
                d_part.zero_()
                continue
            d_y = d_y.reshape(-1, b.shape[0])
            scaled_product(d_y, b, ctx.scale, d_part)
            matrices[i] = d_y
            if needs_b[i]:
                d_b[i] = product(d_y.t(), part, members[i].b.dtype)
        rows = x.reshape(-1, ctx.shape[-1]) if any(needs_a) else None
        dtype = members[0].a.dtype
        gradients = None
        if masks is None:
            if rows is not None:
                gradients = product(d_h.t(), rows, dtype)
            if needs_x:
                add_product(d_x, d_h, a, first=True)
        elif rows is not None or needs_x:
            gradients = lora_dropout.backward(d_h, rows, d_x, masks, a, dtype)
        if gradients is not None:
            # A projection whose result is not used has no gradient, not zeros: AdamW would decay its A.
            for i, gradient in enumerate(_chunks(gradients, n, 0)):
                if needs_a[i] and grads[i] is not None:
                    d_a[i] = gradient
        if needs_x:
            for member, d_y in zip(members, matrices):
                if d_y is not None:
                    add_product(d_x, d_y, _as_matrix(member, h.dtype), first=False)
            d_x = d_x.view(ctx.shape)
        d_inputs = (None, d_x) if needs_uncast else (d_x, None)
        return *d_inputs, None, None, *d_a, *d_b


def _versions(members: list[LoraProjection]) -> list[int | None]:
    """Return numbers that change when a base weight is modified in place."""
    return [None if member.weight.is_inference() else member.weight._version for member in members]


def _as_matrix(projection: LoraProjection, dtype: torch.dtype) -> Tensor:
    """Return the base weight (O, K) in `dtype`, unpacked if bitsandbytes has packed it."""
    weight = projection.weight
    if projection.quant_state is not None:
        import bitsandbytes

        weight = bitsandbytes.functional.dequantize_4bit(weight.data, projection.quant_state)
    return weight if weight.dtype == dtype else weight.to(dtype)


def _cast_adapters(
    many_a: Sequence[Tensor], many_b: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Return all A below each other, all B, and the tensors to save for all B: one if they had to be cast."""
    n = len(many_a)
    if all(each.dtype == dtype for each in (*many_a, *many_b)):
        return torch.cat(many_a) if n > 1 else many_a[0], many_b, many_b
    rank, columns = many_a[0].shape
    heights = [each.shape[0] for each in many_b]
    a = many_a[0].new_empty(n * rank, columns, dtype=dtype)
    b = many_a[0].new_empty(sum(heights), rank, dtype=dtype)
    parts = b.split_with_sizes(heights) if n > 1 else [b]
    # One kernel.
    torch._foreach_copy_([*_chunks(a, n, 0), *parts], [*many_a, *many_b])
    return a, parts, [b]


def _each_b(saved_b: Sequence[Tensor], members: list[LoraProjection]) -> Sequence[Tensor]:
    """Return the B of each projection, given the tensors that were saved for them."""
    if len(saved_b) == len(members):
        return saved_b
    return saved_b[0].split_with_sizes([each.b.shape[0] for each in members])


def _chunks(x: Tensor, n: int, dim: int) -> Sequence[Tensor]:
    return [x] if n == 1 else x.chunk(n, dim)
