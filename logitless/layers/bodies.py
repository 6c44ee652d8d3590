"""The norms, rotations and activations that can be fused, recognized by test runs.

Norms and rotations differ from model to model in few ways: where they round, and how the angles are stored.
A module or function is run on random and on extreme values, and compared with the operator in each of these
ways: results in fp32 and bf16, and gradients. One that agrees with none of them is not fused.
"""

import ast
import functools
import inspect
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.layers import gated, layer_norm, rms_norm, rope
from logitless.layers.source import (
    Definition,
    Recognized,
    UnrecognizedSource,
    calls_of,
    functions_of,
    tree_of,
    undecorated_forward_of,
)

BF16, FP32 = torch.bfloat16, torch.float32


class Norm(NamedTuple):
    """What the forward pass of a norm computes.

    Attributes:
        rounding: `rounding` of the operator.
        eps: name of the module's attribute that holds eps.
        center: whether the norm subtracts the mean (LayerNorm).
    """

    rounding: str
    eps: str = "variance_epsilon"
    center: bool = False


class Rotation(NamedTuple):
    """What a function (q, k, cos, sin) -> (q, k) computes.

    Attributes:
        interleaved: whether a pair is two neighbouring elements.
        angle_layout: "each": cos and sin have one element for each element of a head; "pairs": one for each
            pair; "first half": one for each element, of which only the first half is used, one for each pair.
        keeps_dtype: whether the result has q's dtype, rather than the wider dtype of q and cos.
    """

    interleaved: bool = False
    angle_layout: str = "each"
    keeps_dtype: bool = False


# (rounding, center) of the norms that are compared with a module, in this order. Without a weight, all of
# them round alike.
NORMS = (("llama", False), ("single", False), ("gemma", False), ("single", True))
ROTATIONS = tuple(
    Rotation(interleaved, layout, keeps_dtype)
    for layout, interleaved, keeps_dtype in itertools.product(
        ("each", "first half", "pairs"), (False, True), (False, True)
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

    Only a module of one argument is run, without children and buffers, with at most a weight, and with an
    attribute for eps.

    Raises:
        UnrecognizedSource: its forward pass is not that of its class, or not written in Python.
    """
    parameters = {name: x for name, x in module._parameters.items() if x is not None}
    names = [name for name, x in vars(module).items() if "eps" in name.lower() and isinstance(x, float)]
    if module._modules or module._buffers or not names or parameters.keys() - {"weight"}:
        return None
    function = undecorated_forward_of(module)
    if len(inspect.signature(function).parameters) != 2:
        return None
    weight = parameters.get("weight")
    width = None
    if weight is not None:
        # A parameter that ZeRO-3 has partitioned is empty; `ds_shape` is its original shape.
        shape = getattr(weight, "ds_shape", weight.shape)
        if len(shape) != 1:
            raise UnrecognizedSource(f"its weight has {len(shape)} dimensions")
        (width,) = shape
    scalars = {name: x for name, x in vars(module).items() if isinstance(x, SCALARS)}
    functions = functions_of(function, type(module))
    return _norm_of(type(module), functions, tuple(scalars.items()), tuple(names), width)


SCALARS = (bool, int, float, str, type(None))


@functools.lru_cache(maxsize=256)
def _norm_of(
    cls: type, functions: tuple[FunctionType, ...], scalars: tuple, names: tuple[str, ...], width: int | None
) -> Norm | None:
    """Return as `norm_of`, for all modules of a class with these attributes, whose weight is (width,).

    `functions`: the forward pass, and all functions that it calls.
    """
    probe = object.__new__(cls)
    nn.Module.__init__(probe)
    probe.__dict__.update(scalars)
    for name in names:
        for rounding, center in NORMS:
            norm = Norm(rounding, name, center)
            if _norm_agrees(probe, functions[0], norm, width):
                return norm if width is not None else norm._replace(rounding="single")
    return None


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
    """Return which rotation a function computes; None if it is none, or its source is not available."""
    try:
        return _rotation_of(functions_of(function))
    except UnrecognizedSource:
        return None


@functools.lru_cache(maxsize=256)
def _rotation_of(functions: tuple[FunctionType, ...]) -> Rotation | None:
    """Return as `rotation_of`, of a function and all functions that it calls."""
    agreeing = (rotation for rotation in ROTATIONS if _rotation_agrees(functions[0], rotation))
    return next(agreeing, None)


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


def layer_norm_agrees() -> bool:
    """Whether torch's LayerNorm computes what it is known for; its forward pass may have been replaced."""
    x = _random_tensor(8, 32)
    module = nn.LayerNorm(32, device="cpu", dtype=FP32)
    with torch.no_grad():
        module.weight.copy_(_random_tensor(32, seed=1))
        module.bias.copy_(_random_tensor(32, seed=2))
        expected = nn.functional.layer_norm(x, (32,), module.weight, module.bias, module.eps)
        return torch.equal(nn.LayerNorm.forward(module, x), expected)


@functools.cache
def _activation_of_class(cls: type) -> str | None:
    return ACTIVATION_CLASSES.get((cls.__module__, cls.__qualname__))


def apply_norm(norm: Norm, module: nn.Module, x: Tensor, weight: Tensor | None) -> Tensor:
    """Compute the norm by the fused operator."""
    eps = getattr(module, norm.eps)
    if norm.center:
        return layer_norm(x, weight, eps=eps)
    return rms_norm(x, weight, eps=eps, rounding=norm.rounding)


def _random_tensor(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Return random values from a separate generator; the global generators do not advance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=FP32).to(dtype)


def _norm_agrees(probe: nn.Module, function: Callable, norm: Norm, width: int | None) -> bool:
    """Whether `function` and the fused operator give the same results and gradients.

    Args:
        probe: a module of the norm's class with its attributes. It is changed.
        function: the forward function of the class.
        norm: what the operator computes.
        width: the width of the weight; None: the module has none.
    """
    eps = getattr(probe, norm.eps)
    # Rows of usual size, and some so small that eps matters, large, or 0.
    scales = torch.tensor([1.0, 1.0, 1e-3, 1e3, 0.0, 1.0], device="cpu", dtype=FP32)[:, None]
    for dtype, weight_dtype, training, tried in (
        (FP32, FP32, True, 0.25),
        (FP32, FP32, False, eps),
        (BF16, BF16, True, eps),
        (BF16, FP32, True, eps),
    ):
        x = (_random_tensor(6, width or 32) * scales).to(dtype).view(2, 3, -1)
        weight = None if width is None else _random_tensor(width, dtype=weight_dtype, seed=1)
        probe.train(training)
        setattr(probe, norm.eps, tried)
        try:
            results = []
            for run in (lambda x, w: function(probe, x), lambda x, w: apply_norm(norm, probe, x, w)):
                leaves = [x.clone().requires_grad_()]
                if weight is not None:
                    leaves.append(nn.Parameter(weight.clone()))
                    probe._parameters["weight"] = leaves[1]
                with torch.enable_grad():
                    y = run(leaves[0], leaves[1] if weight is not None else None)
                    upstream = _random_tensor(*x.shape, seed=2).to(y.dtype)
                    results.append((y.detach(), *torch.autograd.grad(y, leaves, upstream)))
        except Exception:  # then its results do not agree
            return False
        finally:
            setattr(probe, norm.eps, eps)
        if not _are_alike(*results):
            return False
    return True


def _are_alike(theirs: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> bool:
    """Whether results are equal up to rounding, and gradients about equal."""
    if theirs[0].dtype != ours[0].dtype:
        return False
    low = BF16 in [x.dtype for x in theirs]
    (y, *theirs), (z, *ours) = [[x.float() for x in results] for results in (theirs, ours)]
    if low:
        if not torch.allclose(y, z, rtol=1e-2, atol=1e-5):
            return False
        if any((a - b).norm() > 0.05 * a.norm() for a, b in zip(theirs, ours, strict=True)):
            return False
    elif not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip((y, *theirs), (z, *ours))):
        return False
    # With another rounding, about a third of the elements would differ in the last digits.
    return ((y - z).abs() > 1e-5 * (1 + y.abs())).float().mean() <= 0.05


def _rotation_agrees(function: Callable, rotation: Rotation) -> bool:
    """Whether the function's results and gradients agree with the operator on random operands."""
    q = _random_tensor(2, 3, 5, 8)
    k = _random_tensor(2, 1, 5, 8, seed=1)
    width = 4 if rotation.angle_layout == "pairs" else 8
    cos, sin = _random_tensor(2, 5, width, seed=2), _random_tensor(2, 5, width, seed=3)
    low = q.to(BF16), k.to(BF16)
    try:
        with torch.enable_grad():
            results = []
            for run in (function, functools.partial(apply_rotation, rotation)):
                leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
                found = run(*leaves, cos, sin)
                upstream = [_random_tensor(*x.shape, seed=4) for x in found]
                results.append((*found, *torch.autograd.grad(found, leaves, upstream)))
        with torch.no_grad():
            kept, _ = function(*low, cos, sin)
            rounded, _ = function(*low, cos.to(BF16), sin.to(BF16))
    except Exception:  # then its results do not agree
        return False
    if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True)):
        return False
    return rounded.dtype == BF16 and (kept.dtype == BF16) is rotation.keeps_dtype


def operator_angles(rotation: Rotation, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int]:
    """Convert a model's cos and sin to the operators' arguments (cos, sin, rotary_dim)."""
    width = cos.shape[-1]
    if rotation.angle_layout == "pairs":
        return cos, sin, 2 * width
    if rotation.angle_layout == "first half":
        return cos[..., : width // 2], sin[..., : width // 2], width
    return cos, sin, width


def apply_rotation(
    rotation: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the rotation by the fused operator."""
    cos, sin, width = operator_angles(rotation, cos, sin)
    return rope(q, k, cos, sin, rotary_dim=width, interleaved=rotation.interleaved)
