"""The norms, rotations and activations that can be fused, recognized by their source and a trial run.

The tables hold fingerprints of forward passes (`python -m logitless.layers.bodies CLASS` prints one), so a
forward pass that transformers changes is not fused until its fingerprint is added. Whenever a model is fused,
each module is also run on a few random values and compared with the operator of its table entry.
"""

import ast
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.layers import gated, layer_norm, rms_norm, rope
from logitless.layers.source import Unknown, fingerprint, forward_of, tree_of

BF16, FP32 = torch.bfloat16, torch.float32


class Norm(NamedTuple):
    """A known forward pass of a norm: the operator's rounding, and the attribute that holds eps."""

    rounding: str
    eps: str = "variance_epsilon"
    center: bool = False  # LayerNorm


class Rotation(NamedTuple):
    """A known function (q, k, cos, sin) -> (q, k)."""

    interleaved: bool = False
    # "each": one angle for each number of a head; "pairs": one for each pair; "first half": what is used of
    # "each" are the numbers of the first half, one for each pair.
    angles: str = "each"
    keeps_dtype: bool = False  # else the result has the wider dtype of q and cos


# The comments name one class or function of each body.
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
    "1f68d6dacce5": Rotation(interleaved=True, angles="first half"),  # glm
    "d3941637ba61": Rotation(interleaved=True, angles="first half"),  # helium
    "164cd7b7f972": Rotation(interleaved=True, angles="first half", keeps_dtype=True),  # ernie4_5
    "5678c8a3983c": Rotation(angles="pairs"),  # gpt_oss
}
# Classes of activations, by where they are defined.
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
    """The body of a norm; None if this is no norm that we know.

    Raises:
        Unknown: it is one, but does something else than that body, or its forward pass cannot be told.
    """
    function = forward_of(module)
    norm = NORMS.get(_fingerprint(function, type(module)))
    if norm is None:
        return None
    weight = getattr(module, "weight", None)
    # A parameter that ZeRO-3 has partitioned is empty, and keeps its shape here.
    shape = getattr(weight, "ds_shape", None if weight is None else weight.shape)
    if shape is not None and len(shape) != 1:
        raise Unknown(f"its weight has {len(shape)} dimensions")
    if not _norm_agrees(module, function, norm, weighted=weight is not None):
        raise Unknown("it computes something else than its source says")
    return norm


def rotations_of(function: FunctionType) -> tuple[dict[str, tuple[Callable, Rotation]], list[str]]:
    """(the known rotations that a forward pass calls, by the name in its source; names of unknown ones)."""
    known = {}
    unknown = []
    for name in _called_rotations(function):
        value = function.__globals__.get(name)
        inner = _function_in(value)
        rotation = rotation_of(inner) if inner is not None else None
        if rotation is not None:
            known[name] = value, rotation
        else:
            unknown.append(name)
    return known, unknown


@functools.cache
def _called_rotations(function: FunctionType) -> tuple[str, ...]:
    calls = (node.func for node in ast.walk(tree_of(function)) if isinstance(node, ast.Call))
    return tuple(dict.fromkeys(f.id for f in calls if isinstance(f, ast.Name) and "rot" in f.id))


def _function_in(value: object) -> FunctionType | None:
    """A function, or the one inside of the module that `kernels` makes of it, unless that runs another."""
    if isinstance(value, nn.Module) and "forward" not in value.__dict__:
        forward = type(value).forward
        if isinstance(forward, FunctionType) and forward.__code__.co_freevars == ("func",):
            value = forward.__closure__[0].cell_contents
    return value if isinstance(value, FunctionType) else None


@functools.cache
def rotation_of(function: FunctionType) -> Rotation | None:
    """The table entry of a rotation whose result agrees with the operator, else None."""
    try:
        rotation = ROTATIONS.get(fingerprint(function))
    except Unknown:
        return None
    return rotation if rotation is not None and _rotation_agrees(function, rotation) else None


def activation_of(module: nn.Module) -> str | None:
    """The name of an activation that `gated` has; None for any other module."""
    kind = _activation_of_class(type(module))
    if kind is None and type(module) is nn.GELU:
        kind = "gelu_tanh" if module.approximate == "tanh" else "gelu_erf"
    return kind


def activation_agrees(module: nn.Module) -> bool:
    """Whether the activation's results agree with the operator of the name that `activation_of` returns."""
    x = torch.linspace(-20, 20, 81, device="cpu", dtype=FP32)
    with torch.no_grad():
        stock = type(module).forward(module, x)
        return torch.allclose(
            gated(x, torch.ones_like(x), activation=activation_of(module)), stock, atol=1e-5
        )


@functools.cache
def _activation_of_class(cls: type) -> str | None:
    return ACTIVATION_CLASSES.get((cls.__module__, cls.__qualname__))


@functools.cache
def _fingerprint(function: FunctionType, owner: type) -> str:
    return fingerprint(function, owner)


def normalized(norm: Norm, module: nn.Module, x: Tensor, weight: Tensor | None) -> Tensor:
    """Compute the norm by our operator."""
    eps = getattr(module, norm.eps)
    if norm.center:
        return layer_norm(x, weight, eps=eps)
    return rms_norm(x, weight, eps=eps, rounding=norm.rounding)


def _random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Random values from a generator of their own; the process's generators do not advance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=FP32).to(dtype)


def _norm_agrees(module: nn.Module, function: Callable, norm: Norm, *, weighted: bool) -> bool:
    """Whether the norm agrees with our operator on random rows and a random weight.

    The module's own weight may be all ones, on a GPU, or not loaded yet."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.pop("weight", None)
    for dtype in (FP32, BF16):
        x = _random(8, 32, dtype=dtype)
        weight = _random(32, dtype=dtype, seed=1) if weighted else None
        twin.__dict__["_parameters"] = {} if weight is None else {"weight": weight}
        try:
            with torch.no_grad():
                ours = normalized(norm, module, x, weight)
                stock = function(twin, x)
        except Exception:  # whatever the module does with these rows, it is not what we know
            return False
        if ours.dtype != stock.dtype or not torch.allclose(ours.float(), stock.float(), rtol=1e-2, atol=1e-5):
            return False
        # Another rounding gives other last digits in a third of the numbers.
        if ((ours - stock).abs() > 1e-5).float().mean() > 0.05:
            return False
    return True


def _rotation_agrees(function: Callable, rotation: Rotation) -> bool:
    q = _random(2, 3, 5, 8)
    k = _random(2, 1, 5, 8, seed=1)
    width = 4 if rotation.angles == "pairs" else 8
    cos, sin = _random(2, 5, width, seed=2), _random(2, 5, width, seed=3)
    try:
        with torch.no_grad():
            ours = rotated(rotation, q, k, cos, sin)
            stock = function(q, k, cos, sin)
            return all(torch.allclose(*pair, atol=1e-5) for pair in zip(ours, stock, strict=True))
    except Exception:  # as above
        return False


def angles(rotation: Rotation, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int]:
    """(cos, sin, rotary_dim) as the operators take them."""
    width = cos.shape[-1]
    if rotation.angles == "pairs":
        return cos, sin, 2 * width
    if rotation.angles == "first half":
        return cos[..., : width // 2], sin[..., : width // 2], width
    return cos, sin, width


def rotated(rotation: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rotation by our operator."""
    cos, sin, width = angles(rotation, cos, sin)
    return rope(q, k, cos, sin, rotary_dim=width, interleaved=rotation.interleaved)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        place, _, name = path.rpartition(".")
        found = getattr(import_module(place), name)
        print(fingerprint(found.forward, found) if isinstance(found, type) else fingerprint(found), path)
