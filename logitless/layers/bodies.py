"""The norms, rotations and activations that can be fused, recognized by test runs.

Norms and rotations differ from model to model in few ways: where they round, and how the angles are stored.
A norm is run on random and on extreme values, a rotation on random values, and compared with the operator in
each of these ways: results in several dtypes, and gradients. An activation's results are compared in fp32. A
module that agrees with none of them is not fused. A test run tells nothing about a function whose result
depends on more than its arguments; `purity.py` refuses such functions.
"""

import ast
import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logitless.layers import gated, gated_rms_norm, layer_norm, rms_norm, rope
from logitless.layers.purity import attributes_read
from logitless.layers.source import (
    Definition,
    Recognized,
    UnrecognizedSource,
    activations_of,
    calls_of,
    functions_of,
    tree_of,
    undecorated_forward_of,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class NormGate(NamedTuple):
    """The gate of a norm: the options of `gated_rms_norm` of these names."""

    activation: str
    gate_first: bool
    group_size: int | None


class Norm(NamedTuple):
    """What the forward pass of a norm computes.

    Attributes:
        rounding: `rounding` of the operator.
        eps: name of the module's attribute that holds eps.
        center: whether the norm subtracts the mean (LayerNorm).
        options: (name, value) of the module's other attributes that the forward pass reads.
        gate: how the second argument of the forward pass gates the norm; None if it has one argument.
    """

    rounding: str
    eps: str = "variance_epsilon"
    center: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    gate: NormGate | None = None


class Rotation(NamedTuple):
    """What a function (q, k, cos, sin) -> (q, k), or (x, cos, sin) -> x, computes.

    Attributes:
        interleaved: whether a pair is two neighbouring elements.
        deinterleave: whether the results of neighbours are stored one in each half.
        angle_layout: "each": cos and sin have one element for each element of a head; "pairs": one for each
            pair; "first half": one for each element, of which only the first half is used, one for each pair.
        keeps_dtype: whether the result has q's dtype, rather than the wider dtype of q and cos.
        whole_head: whether all elements of a head are rotated. Otherwise cos and sin may rotate the first
            elements of a head only.
        single: whether the function rotates one tensor: queries and keys in two calls.
    """

    interleaved: bool = False
    angle_layout: str = "each"
    keeps_dtype: bool = False
    whole_head: bool = False
    single: bool = False
    deinterleave: bool = False


# (rounding, center) of the norms that are compared with a module, in this order. Without a weight, the
# three roundings are one.
NORMS = (("llama", False), ("single", False), ("gemma", False), ("single", True))
# (rounding, activation, whether the gate comes first) of the gated norms that are compared with a module.
GATED_NORMS = tuple(itertools.product(("llama", "single"), ("silu", "sigmoid"), (False, True)))
ROTATIONS = tuple(
    Rotation(interleaved, layout, keeps_dtype, deinterleave=deinterleave)
    for (interleaved, deinterleave), layout, keeps_dtype in itertools.product(
        ((False, False), (True, False), (True, True)), ("each", "first half", "pairs"), (False, True)
    )
)
# (module, class) of an activation -> name of the operator's activation.
ACTIVATION_CLASSES: dict[tuple[str, str], str] = {
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu_erf",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
    ("transformers.activations", "NewGELUActivation"): "gelu_tanh",
    ("transformers.activations", "FastGELUActivation"): "gelu_tanh",
    ("transformers.activations", "AccurateGELUActivation"): "gelu_tanh",
}


def norm_of(module: nn.Module) -> Norm | None:
    """Return which norm a module computes; None if it is none.

    Only a module of one argument is run, or of two with a weight, without children and buffers, with at most
    a weight, and with an attribute for eps.

    Raises:
        UnrecognizedSource: its forward pass is not that of its class, not written in Python, or depends on
            more than its argument, its weight and its scalar attributes.
    """
    parameters = {name: x for name, x in module._parameters.items() if x is not None}
    scalars = {name: x for name, x in vars(module).items() if isinstance(x, SCALARS)}
    names = [name for name, x in scalars.items() if "eps" in name.lower() and type(x) in (int, float)]
    if module._modules or module._buffers or not names or parameters.keys() - {"weight"}:
        return None
    function = undecorated_forward_of(module)
    weight = parameters.get("weight")
    num_arguments = len(inspect.signature(function).parameters)
    is_gated = num_arguments == 3
    if num_arguments != 2 and not (is_gated and weight is not None):
        return None
    widths = (32, 96)
    if weight is not None:
        if isinstance(weight, nn.parameter.UninitializedTensorMixin):
            return None
        # A parameter that ZeRO-3 has partitioned is empty; `ds_shape` is its original shape.
        shape = getattr(weight, "ds_shape", weight.shape)
        if len(shape) != 1:
            raise UnrecognizedSource(f"its weight has {len(shape)} dimensions")
        # FSDP1 may leave no element of a weight, or one, on a rank.
        widths = (shape[0] if shape[0] > 1 else 32,)
    functions = functions_of(function, type(module))
    read = attributes_read(functions, num_arguments, type(module)) - {"weight"}
    if not read <= scalars.keys():
        name = min(read - scalars.keys())
        raise UnrecognizedSource(f"its result may depend on more than its arguments: it reads self.{name}")
    read_scalars = tuple((name, x) for name, x in scalars.items() if name in read)
    for definition in activations_of(type(module), read_scalars):
        if definition.name == "forward" and not _is_known_activation(definition.namespace):
            raise UnrecognizedSource(f"its gate has another activation: {definition.namespace.__name__}")
        functions += (definition.value,) if isinstance(definition.value, FunctionType) else ()
    for eps in [name for name in names if name in read]:
        norm = _norm_of(type(module), functions, read_scalars, eps, widths, weight is not None, is_gated)
        if norm is not None:
            return norm
    return None


SCALARS = (bool, int, float, str, type(None))


@functools.lru_cache(maxsize=256)
def _norm_of(
    cls: type,
    functions: tuple[FunctionType, ...],
    scalars: tuple[tuple[str, Any], ...],
    eps: str,
    widths: tuple[int, ...],
    has_weight: bool,
    is_gated: bool,
) -> Norm | None:
    """Return as `norm_of`, for all modules of a class with these attributes.

    Args:
        functions: the forward pass, all functions that it calls, and the activations that it calls.
        scalars: (name, value) of the attributes that the functions read.
        eps: name of the attribute that may hold eps.
        widths: widths of the inputs that are tried.
        has_weight: whether the module has a weight.
        is_gated: whether the forward pass has a second argument.
    """
    options = tuple((name, x) for name, x in scalars if name not in (eps, "training"))
    norms = [Norm(rounding, eps, center, options) for rounding, center in NORMS]
    if is_gated:
        gates = itertools.product(GATED_NORMS, _group_sizes(scalars, *widths))
        norms = [
            Norm(rounding, eps, options=options, gate=NormGate(*gate, size))
            for (rounding, *gate), size in gates
        ]
    for norm in norms:
        if all(_norm_agrees(cls, functions[0], dict(scalars), norm, width, has_weight) for width in widths):
            return norm if has_weight else norm._replace(rounding="single")
    return None


def _group_sizes(scalars: tuple[tuple[str, Any], ...], width: int) -> list[int | None]:
    """Return the sizes of groups of columns to try: None (one group), and those that attributes may tell."""
    numbers = {x for _, x in scalars if type(x) is int and 1 < x < width and width % x == 0}
    return [None, *sorted(numbers | {width // x for x in numbers})]


def rotations_of(function: FunctionType) -> tuple[dict[str, Recognized], list[str]]:
    """Return the rotations that a forward pass calls.

    Returns:
        (name in the source -> `Recognized` with value (function, `Rotation`); names of other rotations).
    """
    function = inspect.unwrap(function)
    rotations = {}
    unrecognized = []
    for name in _called_rotations(function):
        value = function.__globals__.get(name)
        rotation_function = _unwrap_kernel_module(value)
        rotation = rotation_of(rotation_function) if rotation_function is not None else None
        if rotation is not None:
            definition = Definition(function.__globals__, name, value)
            rotations[name] = Recognized((value, rotation), (definition, *calls_of(rotation_function)))
        else:
            unrecognized.append(name)
    return rotations, unrecognized


@functools.cache
def _called_rotations(function: FunctionType) -> tuple[str, ...]:
    """Return the names of the called functions whose name has "rot" in it."""
    calls = (node.func for node in ast.walk(tree_of(function)) if isinstance(node, ast.Call))
    return tuple(
        dict.fromkeys(callee.id for callee in calls if isinstance(callee, ast.Name) and "rot" in callee.id)
    )


def _unwrap_kernel_module(value: object) -> FunctionType | None:
    """Return the function that `value` is, or that a module of the package `kernels` wraps; else None."""
    if isinstance(value, nn.Module) and "forward" not in value.__dict__:
        forward = type(value).forward
        if isinstance(forward, FunctionType) and forward.__code__.co_freevars == ("func",):
            value = forward.__closure__[0].cell_contents
    return value if isinstance(value, FunctionType) else None


def rotation_of(function: FunctionType) -> Rotation | None:
    """Return which rotation a function computes.

    None if it is none, if its source is not available, or if it depends on more than its arguments.
    """
    try:
        functions = functions_of(function)
        attributes_read(functions, 3 if _is_single(function) else 4)
        return _rotation_of(functions)
    except UnrecognizedSource:
        return None


@functools.lru_cache(maxsize=256)
def _rotation_of(functions: tuple[FunctionType, ...]) -> Rotation | None:
    """Return as `rotation_of`, of a function and all functions that it calls."""
    function = functions[0]
    is_single = _is_single(function)
    runs = [function]
    if is_single:
        has_option = "unsqueeze_dim" in inspect.signature(function).parameters
        runs = [functools.partial(_rotate_both, function, {})]
        runs += [functools.partial(_rotate_both, function, {"unsqueeze_dim": 2})] if has_option else []
    for rotation in ROTATIONS:
        if all(_rotation_agrees(run, rotation, size, size) for run in runs for size in (8, 24)):
            whole_head = not all(_rotation_agrees(run, rotation, 24, 8) for run in runs)
            return rotation._replace(whole_head=whole_head, single=is_single)
    return None


def _is_single(function: FunctionType) -> bool:
    """Whether a function has three arguments without defaults: x, cos, sin."""
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters) == 3


def _rotate_both(
    function: Callable, options: dict[str, int], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, heads, T, D) by a function of one tensor.

    Args:
        options: {}, or {"unsqueeze_dim": 2} if the function takes (B, T, heads, D).
    """
    if not options:
        return function(q, cos, sin), function(k, cos, sin)
    q, k = (function(x.transpose(1, 2), cos, sin, **options).transpose(1, 2) for x in (q, k))
    return q, k


def activation_of(module: nn.Module) -> str | None:
    """Return the name of an activation of `gated`; None for any other module."""
    activation = _activation_of_class(type(module))
    if activation is None and type(module) is nn.GELU:
        activation = "gelu_tanh" if module.approximate == "tanh" else "gelu_erf"
    return activation


def activation_agrees(module: nn.Module) -> bool:
    """Whether the module's results agree with those of its `activation_of`."""
    x = torch.linspace(-20, 20, 81, device="cpu", dtype=FP32)
    with torch.no_grad():
        original = type(module).forward(module, x)
        return torch.allclose(
            gated(x, torch.ones_like(x), activation=activation_of(module)), original, atol=1e-5
        )


def _is_known_activation(cls: type) -> bool:
    """Whether the results of a class of activations depend on its argument only."""
    return _activation_of_class(cls) is not None or cls is nn.Sigmoid


def layer_norm_agrees() -> bool:
    """Whether torch's LayerNorm computes what it is known for; its forward pass may have been replaced."""
    x = random_tensor(8, 32)
    module = nn.LayerNorm(32, device="cpu", dtype=FP32)
    with torch.no_grad():
        module.weight.copy_(random_tensor(32, seed=1))
        module.bias.copy_(random_tensor(32, seed=2))
        expected = nn.functional.layer_norm(x, (32,), module.weight, module.bias, module.eps)
        return torch.equal(nn.LayerNorm.forward(module, x), expected)


@functools.cache
def _activation_of_class(cls: type) -> str | None:
    return ACTIVATION_CLASSES.get((cls.__module__, cls.__qualname__))


def apply_norm(
    norm: Norm, module: nn.Module, weight: Tensor | None, x: Tensor, gate: Tensor | None = None
) -> Tensor:
    """Compute the norm by the fused operator."""
    eps = getattr(module, norm.eps)
    if norm.gate is not None:
        return gated_rms_norm(x, gate, weight, eps=eps, rounding=norm.rounding, **norm.gate._asdict())
    if norm.center:
        return layer_norm(x, weight, eps=eps)
    return rms_norm(x, weight, eps=eps, rounding=norm.rounding)


def random_tensor(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Return random values from a separate generator; the global generators do not advance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=FP32).to(dtype)


@contextlib.contextmanager
def trial_run() -> Iterator[None]:
    """Run functions on the CPU with gradients, whatever the modes of the caller; leave no trace."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


# (dtype of the input, dtype of weight and gate, whether in training, leading shape of the input).
NORM_TRIALS = (
    (FP32, FP32, True, (2, 4)),
    (FP32, FP32, False, (8,)),
    (BF16, BF16, True, (2, 4)),
    (BF16, FP32, True, (8,)),
    (FP32, BF16, True, (1, 2, 4)),
    (FP16, FP16, True, (2, 4)),
)


def _norm_agrees(
    cls: type, function: Callable, attributes: dict[str, Any], norm: Norm, width: int, has_weight: bool
) -> bool:
    """Whether `function` and the fused operator give the same results and gradients.

    Args:
        cls: the class of the module.
        function: the forward function of the class.
        attributes: the attributes that the function reads.
        norm: what the operator computes.
        width: the width of the input.
        has_weight: whether the module has a weight.
    """
    eps = attributes[norm.eps]
    # Rows of usual size, and some so small that eps matters, large, or 0.
    scales = torch.tensor(
        [1.0, 1.0, 1e-3, 1e3, 1.0, 0.0 if eps else 1.0, 1.0, 1e-2], device="cpu", dtype=FP32
    )
    with trial_run():
        try:
            probe = object.__new__(cls)
            nn.Module.__init__(probe)
            probe.__dict__.update(attributes)
            for number, (dtype, weight_dtype, training, shape) in enumerate(NORM_TRIALS):
                tried = 0.25 if number == 0 else eps
                probe.__dict__.update({"training": training, norm.eps: tried})
                inputs = [(random_tensor(8, width) * scales[:, None]).to(dtype).view(*shape, width)]
                if norm.gate is not None:  # up to about 30: some models clamp their gates
                    inputs.append((8 * random_tensor(*shape, width, seed=3)).to(weight_dtype))
                weight = random_tensor(width, dtype=weight_dtype, seed=1) if has_weight else None
                runs = (
                    lambda weight, *inputs: function(probe, *inputs),
                    functools.partial(apply_norm, norm, probe),
                )
                if not _are_alike(*[_result_and_gradients(run, probe, weight, *inputs) for run in runs]):
                    return False
            return _are_alike_without_numbers(function, probe, norm, width)
        except Exception:  # then its results do not agree
            return False


def _result_and_gradients(
    run: Callable, probe: nn.Module, weight: Tensor | None, *inputs: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    parameter = None
    if weight is not None:
        parameter = probe._parameters["weight"] = nn.Parameter(weight.clone())
    y = run(parameter, *leaves)
    leaves += [parameter] if weight is not None else []
    upstream = random_tensor(*y.shape, seed=2).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, leaves, upstream)


def _are_alike(theirs: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> bool:
    """Whether results are equal up to rounding, and gradients about equal."""
    if [(x.dtype, x.shape) for x in theirs] != [(x.dtype, x.shape) for x in ours]:
        return False
    is_low = any(x.dtype is not FP32 for x in theirs)
    (y, *theirs), (z, *ours) = [[x.float() for x in results] for results in (theirs, ours)]
    if not torch.allclose(y, z, rtol=1e-2 if is_low else 1e-4, atol=1e-5):
        return False
    # Gradients of rows differ by orders of magnitude.
    allowed = 0.05 if is_low else 1e-3
    for a, b in zip(theirs, ours, strict=True):
        if ((a - b).norm(dim=-1) > allowed * a.norm(dim=-1) + 1e-12).any():
            return False
    # With another rounding, about a third of the elements would differ in the last digits.
    return ((y - z).abs() > 1e-5 * (1 + y.abs())).float().mean() <= 0.05


def _are_alike_without_numbers(function: Callable, probe: nn.Module, norm: Norm, width: int) -> bool:
    """Whether infinity and NaN in the inputs give the same results."""
    inputs = [random_tensor(6, width, seed=seed) for seed in range(1 if norm.gate is None else 2)]
    inputs[0][0, 0], inputs[0][1, 0] = torch.inf, torch.nan
    inputs[-1][2, 0], inputs[-1][3, 0], inputs[-1][4, 0] = torch.inf, torch.nan, -torch.inf
    if "weight" in probe._parameters:
        probe._parameters["weight"] = nn.Parameter(random_tensor(width, seed=1))
    with torch.no_grad():
        y = function(probe, *inputs)
        z = apply_norm(norm, probe, probe._parameters.get("weight"), *inputs)
    return torch.allclose(y, z, rtol=1e-4, atol=1e-5, equal_nan=True)


def _rotation_agrees(function: Callable, rotation: Rotation, head_dim: int, rotary_dim: int) -> bool:
    """Whether the function's results and gradients agree with the operator on random operands.

    Args:
        head_dim: D, the size of a head.
        rotary_dim: R, the number of elements of a head that are rotated.
    """
    q = random_tensor(2, 3, 5, head_dim)
    k = random_tensor(2, 1, 5, head_dim, seed=1)
    width = rotary_dim // 2 if rotation.angle_layout == "pairs" else rotary_dim
    cos, sin = random_tensor(2, 5, width, seed=2), random_tensor(2, 5, width, seed=3)
    low = [x.to(BF16) for x in (q, k, cos, sin)]
    operator = functools.partial(apply_rotation, rotation)
    with trial_run():
        try:
            results = []
            for run in (function, operator):
                leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
                found = run(*leaves, cos, sin)
                upstream = [random_tensor(*x.shape, seed=4) for x in found]
                results.append((*found, *torch.autograd.grad(found, leaves, upstream)))
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True)):
                return False
            kept = function(*low[:2], cos, sin)
            rounded = function(*low)
            if not all(torch.allclose(a, b, rtol=0.02, atol=0.1) for a, b in zip(rounded, operator(*low))):
                return False
            return all((x.dtype is BF16) is rotation.keeps_dtype for x in kept)
        except Exception:  # then its results do not agree
            return False


def operator_angles(rotation: Rotation, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int]:
    """Convert a model's cos and sin to the operators' arguments (cos, sin, rotary_dim)."""
    width = cos.shape[-1]
    if rotation.angle_layout == "pairs":
        return cos, sin, 2 * width
    if rotation.angle_layout == "first half":
        return cos[..., : width // 2], sin[..., : width // 2], width
    return cos, sin, width


def apply_rotation(
    rotation: Rotation, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute the rotation by the fused operator."""
    cos, sin, width = operator_angles(rotation, cos, sin)
    options = {"interleaved": rotation.interleaved, "deinterleave": rotation.deinterleave}
    return rope(q, k, cos, sin, rotary_dim=width, **options)
