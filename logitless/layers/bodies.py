"""The norms, rotations and activations that can be fused, recognized by their source and by a test run.

The tables have fingerprints of forward passes (`python -m logitless.layers.bodies CLASS` prints one). If
transformers changes a forward pass, it is not fused until its new fingerprint is added. Whenever a model is
fused, each module is also run on a few random values and compared with the operator of its table entry.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
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
    fingerprint,
    functions_of,
    tree_of,
    undecorated_forward_of,
)

BF16, FP32 = torch.bfloat16, torch.float32


class Norm(NamedTuple):
    """Table entry of a norm's forward pass.

    Attributes:
        rounding: `rounding` of the operator.
        eps: name of the module's attribute that holds eps.
        center: whether the norm subtracts the mean (LayerNorm).
    """

    rounding: str
    eps: str = "variance_epsilon"
    center: bool = False


class Rotation(NamedTuple):
    """Table entry of a function (q, k, cos, sin) -> (q, k).

    Attributes:
        interleaved: whether a pair is two neighbouring elements.
        angle_layout: "each": cos and sin have one element for each element of a head; "pairs": one for each
            pair; "first half": one for each element, of which only the first half is used, one for each pair.
        keeps_dtype: whether the result has q's dtype, rather than the wider dtype of q and cos.
    """

    interleaved: bool = False
    angle_layout: str = "each"
    keeps_dtype: bool = False


# Fingerprint -> table entry. The comments name one class or model with this forward pass.
NORMS = {
    "9635bcd843f3": Norm("llama"),  # LlamaRMSNorm
    "e5559c7750c3": Norm("gemma", "eps"),  # GemmaRMSNorm
    "eef4e978a32a": Norm("single"),  # Olmo2RMSNorm
    "b6d7ab076811": Norm("single"),  # HeliumRMSNorm
    "4ad8d3f59922": Norm("single", "eps"),  # MoshiRMSNorm
    "e0fd214fdd79": Norm("single", "eps"),  # Gemma3nRMSNorm
    "cba6ba41dc15": Norm("single", "eps"),  # Llama4TextL2Norm
    "ec976d1bff62": Norm("single", center=True),  # CohereLayerNorm
}
ROTATIONS = {
    "9b7060d7d257": Rotation(),  # llama
    "e198cae58ccb": Rotation(),  # gpt_neox
    "46babc0a98ca": Rotation(),  # glmasr
    "838043cb0720": Rotation(),  # nemotron
    "dbe5e1562cbc": Rotation(),  # phi3
    "730cf07c648d": Rotation(keeps_dtype=True),  # olmo2
    "ca2dca557c66": Rotation(keeps_dtype=True),  # modernbert
    "435374cf95e8": Rotation(interleaved=True, keeps_dtype=True),  # cohere
    "ba4a324e86c7": Rotation(interleaved=True),  # glm4v
    "7e19d47c1006": Rotation(interleaved=True),  # blt
    "1f68d6dacce5": Rotation(interleaved=True, angle_layout="first half"),  # glm
    "d3941637ba61": Rotation(interleaved=True, angle_layout="first half"),  # helium
    "164cd7b7f972": Rotation(interleaved=True, angle_layout="first half", keeps_dtype=True),  # ernie4_5
    "5678c8a3983c": Rotation(angle_layout="pairs"),  # gpt_oss
}
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
    """Return the table entry of a norm; None if its forward pass is not in the table.

    Raises:
        UnrecognizedSource: the results differ from those of the operator, or the source is not available.
    """
    function = undecorated_forward_of(module)
    norm = NORMS.get(fingerprint(functions_of(function, type(module))))
    if norm is None:
        return None
    weight = getattr(module, "weight", None)
    # A parameter that ZeRO-3 has partitioned is empty; `ds_shape` is its original shape.
    shape = getattr(weight, "ds_shape", None if weight is None else weight.shape)
    if shape is not None and len(shape) != 1:
        raise UnrecognizedSource(f"its weight has {len(shape)} dimensions")
    if not _norm_agrees(module, function, norm, weighted=weight is not None):
        raise UnrecognizedSource("its results differ from those of its table entry")
    return norm


def rotations_of(function: FunctionType) -> tuple[dict[str, Recognized], list[str]]:
    """Return the rotations that a forward pass calls.

    Returns:
        (name in the source -> `Recognized` with value (function, table entry); names of rotations that are
        not in the table).
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
    """Return the table entry of a rotation whose results agree with the operator, else None."""
    try:
        return _rotation_of(functions_of(function))
    except UnrecognizedSource:
        return None


@functools.cache
def _rotation_of(functions: tuple[FunctionType, ...]) -> Rotation | None:
    """Return as `rotation_of`, for a rotation and all functions that it calls."""
    rotation = ROTATIONS.get(fingerprint(functions))
    return rotation if rotation is not None and _rotation_agrees(functions[0], rotation) else None


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


def _norm_agrees(module: nn.Module, function: Callable, norm: Norm, *, weighted: bool) -> bool:
    """Whether `function` and the fused operator give the same results for random rows in fp32 and bf16.

    The module's weight is not used, because it may be all ones, on a GPU, or not loaded yet.

    Args:
        module: the norm module, from which both read eps and other attributes. It is not changed.
        function: the forward function of the module's class.
        norm: the table entry.
        weighted: whether the module has a weight. Both then use the same random weight.
    """
    probe = object.__new__(type(module))
    probe.__dict__.update(module.__dict__)
    probe.__dict__.pop("weight", None)
    for dtype in (FP32, BF16):
        x = _random_tensor(8, 32, dtype=dtype)
        weight = _random_tensor(32, dtype=dtype, seed=1) if weighted else None
        probe.__dict__["_parameters"] = {} if weight is None else {"weight": weight}
        try:
            with torch.no_grad():
                fused = apply_norm(norm, module, x, weight)
                original = function(probe, x)
        except Exception:  # then its results do not agree
            return False
        if fused.dtype != original.dtype or not torch.allclose(
            fused.float(), original.float(), rtol=1e-2, atol=1e-5
        ):
            return False
        # With another rounding, about a third of the elements would differ in the last digits.
        if ((fused - original).abs() > 1e-5).float().mean() > 0.05:
            return False
    return True


def _rotation_agrees(function: Callable, rotation: Rotation) -> bool:
    """Whether the function's results agree with the operator on random queries, keys and angles."""
    q = _random_tensor(2, 3, 5, 8)
    k = _random_tensor(2, 1, 5, 8, seed=1)
    width = 4 if rotation.angle_layout == "pairs" else 8
    cos, sin = _random_tensor(2, 5, width, seed=2), _random_tensor(2, 5, width, seed=3)
    try:
        with torch.no_grad():
            fused = apply_rotation(rotation, q, k, cos, sin)
            original = function(q, k, cos, sin)
            return all(torch.allclose(*pair, atol=1e-5) for pair in zip(fused, original, strict=True))
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
    rotation: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the rotation by the fused operator."""
    cos, sin, width = operator_angles(rotation, cos, sin)
    return rope(q, k, cos, sin, rotary_dim=width, interleaved=rotation.interleaved)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        module_name, _, name = path.rpartition(".")
        target = getattr(import_module(module_name), name)
        called = functions_of(target.forward, target) if isinstance(target, type) else functions_of(target)
        print(fingerprint(called), path)
