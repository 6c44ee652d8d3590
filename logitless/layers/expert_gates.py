"""The gates of a mixture's experts that can be fused, recognized by test runs.

transformers' experts compute gate and up of all experts by one grouped product, and call their method
`_apply_gate(gate_up)`. The method is run on random and on extreme values, and compared with each formula of
`FORMULAS`: results, gradients, and the error in low precision. Without a formula's entry in that table its
gates are left to the model's code.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logitless.layers import clamped_gated, gated
from logitless.layers.bodies import (
    BF16,
    FP16,
    FP32,
    SCALARS,
    activation_agrees,
    activation_of,
    random_tensor,
    trial_run,
)
from logitless.layers.clamped_gate import ClampedGate
from logitless.layers.gated import ACTIVATIONS
from logitless.layers.purity import attributes_read
from logitless.layers.source import Recognized, UnrecognizedSource, definitions_of, forward_of, functions_of

METHOD = "_apply_gate"
# Reason for experts whose gate agrees with no formula.
NO_GATE = "no fused gate gives the results of its _apply_gate in a test run"


class ExpertGate(NamedTuple):
    """What an `_apply_gate` computes.

    Attributes:
        activation: `activation` of `gated`.
        clamped: the options of `clamped_gated`, if it is that.
        options: (name, value) of the module's attributes that the method reads.
        activations: names of the module's activations that the method calls.
    """

    activation: str
    clamped: ClampedGate | None = None
    options: tuple[tuple[str, Any], ...] = ()
    activations: tuple[str, ...] = ()


def plain_gates(activation: str, numbers: tuple[float, ...]) -> Iterator[ExpertGate]:
    """The gate of two halves: Mixtral, Qwen 3 MoE, DeepSeek-V3."""
    yield ExpertGate(activation)


def clamped_gates(activation: str, numbers: tuple[float, ...]) -> Iterator[ExpertGate]:
    """Clamped SwiGLU: gpt-oss, DeepSeek-V4, MiniMax-M3."""
    if activation != "silu":
        return
    choices = itertools.product(numbers, (1.0, *numbers), (0.0, 1.0), (False, True))
    for limit, alpha, offset, interleaved in choices:
        if limit > 0 and alpha > 0:
            yield ExpertGate(activation, ClampedGate(limit, alpha, offset, interleaved))


# Functions of a gate's activation and of the numbers that it reads, in the order in which they are tried.
FORMULAS = (plain_gates, clamped_gates)


def calls_gate(module: nn.Module) -> bool:
    """Whether the module is experts whose implementation, as configured, calls their `_apply_gate`.

    Raises:
        UnrecognizedSource: as for `forward_of`.
    """
    if not hasattr(type(module), METHOD) or not getattr(module, "has_gate", True):
        return False
    function = _experts_forward_of(module)
    return METHOD in getattr(getattr(function, "__code__", None), "co_names", ())


def _experts_forward_of(module: nn.Module) -> Callable | None:
    """Return the function that computes the experts: that of their file, or another implementation's."""
    function = forward_of(module)
    written = inspect.unwrap(function)
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation in (None, "eager"):
        return written
    # The decorator of transformers' experts holds the table of implementations.
    while function is not written:
        for held in inspect.getclosurevars(function).nonlocals.values():
            if hasattr(held, "get_interface"):
                return inspect.unwrap(held.get_interface(implementation, written))
        function = function.__wrapped__
    return None


def expert_gate_of(module: nn.Module) -> Recognized | None:
    """Return the `ExpertGate` that the module's `_apply_gate` computes, and the definitions of its code.

    None if the method computes another gate.

    Raises:
        UnrecognizedSource: the method is not that of the class, not written in Python, or depends on more
            than its argument, scalar attributes, and activations.
    """
    cls = type(module)
    if METHOD in module.__dict__:
        raise UnrecognizedSource(f"a {METHOD} attribute is set on this instance")
    function = getattr(cls, METHOD)
    if not isinstance(function, FunctionType):
        raise UnrecognizedSource("its gate is not a Python function")
    if len(inspect.signature(function).parameters) != 2:
        return None
    functions = functions_of(function, cls)
    read = attributes_read(functions, 2, cls)
    children = {name: child for name, child in module._modules.items() if name in read and child is not None}
    for child in children.values():
        if activation_of(child) is None or not activation_agrees(child):
            raise UnrecognizedSource(f"its gate has another activation: {type(child).__name__}")
    scalars = {name: x for name, x in vars(module).items() if name in read and isinstance(x, SCALARS)}
    if unknown := read - children.keys() - scalars.keys():
        raise UnrecognizedSource(
            f"its gate may depend on more than its argument: it reads self.{min(unknown)}"
        )
    activations = tuple((name, activation_of(child)) for name, child in children.items())
    gate = _expert_gate_of(cls, functions, tuple(scalars.items()), activations)
    if gate is None:
        return None
    definitions = definitions_of(cls, METHOD)
    for child_cls in {type(child) for child in children.values()}:
        definitions += definitions_of(child_cls, "forward")
    return Recognized(gate, definitions)


def apply_expert_gate(gate: ExpertGate, gate_up: Tensor) -> Tensor:
    """Compute the gate by the fused operator."""
    if gate.clamped is None:
        return gated(gate_up, activation=gate.activation)
    return clamped_gated(gate_up, **gate.clamped._asdict())


@functools.lru_cache(maxsize=256)
def _expert_gate_of(
    cls: type,
    functions: tuple[FunctionType, ...],
    scalars: tuple[tuple[str, Any], ...],
    activations: tuple[tuple[str, str], ...],
) -> ExpertGate | None:
    """Return as `expert_gate_of`, for all modules of a class with these attributes.

    Args:
        functions: the method, and all functions that it calls.
        scalars: (name, value) of the attributes that the functions read.
        activations: (name, `activation` of `gated`) of the activations that they call.
    """
    numbers = tuple(float(x) for _, x in scalars if type(x) in (int, float) and math.isfinite(x))
    kinds = {kind for _, kind in activations} or {"silu"}
    if len(kinds) > 1:
        return None
    attributes = dict(scalars) | {name: ACTIVATIONS[kind] for name, kind in activations}
    for formula in FORMULAS:
        for gate in formula(*kinds, numbers):
            if _gate_agrees(cls, functions[0], attributes, gate):
                return gate._replace(options=scalars, activations=tuple(name for name, _ in activations))
    return None


def _gate_agrees(cls: type, function: Callable, attributes: dict[str, Any], gate: ExpertGate) -> bool:
    """Whether the method and the fused operator give the same results and gradients.

    Args:
        cls: the class of the module.
        function: the method.
        attributes: the attributes that it reads.
        gate: what the operator computes.
    """
    with trial_run():
        try:
            probe = object.__new__(cls)
            nn.Module.__init__(probe)
            probe.__dict__.update(attributes)
            stock = functools.partial(function, probe)
            operator = functools.partial(apply_expert_gate, gate)
            for width, shape in ((16, (8,)), (48, (2, 4))):
                for dtype in (FP32, BF16, FP16):
                    # Rows of usual size, and some beyond usual limits; large products overflow in fp16.
                    scales = [1.0, 0.01, 4.0, 30.0, 2.0, 1.0, 8.0, 1e4 if dtype is FP32 else 16.0]
                    x = random_tensor(8, width) * torch.tensor(scales, dtype=FP32, device="cpu")[:, None]
                    x = x.to(dtype).view(*shape, width)
                    if not _is_as_exact(stock, operator, x):
                        return False
            # Infinity is beyond every limit.
            x = random_tensor(8, 16)
            x[range(3), 0] = x[range(3, 6), -1] = torch.tensor(
                [torch.inf, -torch.inf, torch.nan], dtype=FP32, device="cpu"
            )
            return torch.allclose(stock(x), operator(x), rtol=1e-4, atol=1e-5, equal_nan=True)
        except Exception:  # then its results do not agree
            return False


def _is_as_exact(stock: Callable, operator: Callable, x: Tensor) -> bool:
    """Whether the errors of result and gradient are about those of the model's function, or smaller.

    They may be 1.05 times as large in the mean, and twice as large in a row. The truth is the function in
    fp64.
    """
    exact = _result_and_gradient(stock, x.double())
    stock_results = _result_and_gradient(stock, x)
    fused_results = _result_and_gradient(operator, x)
    if fused_results[0].dtype != stock_results[0].dtype or fused_results[0].shape != stock_results[0].shape:
        return False
    eps = torch.finfo(x.dtype).eps
    # In fp32 the order of the operations decides about the last digit.
    slack = 4 * eps if x.dtype is FP32 else 0.0
    for truth, stock_result, fused_result in zip(exact, stock_results, fused_results, strict=True):
        size = truth.norm(dim=-1).clamp_min(1e-30)
        stock_error = (stock_result.double() - truth).norm(dim=-1) / size
        fused_error = (fused_result.double() - truth).norm(dim=-1) / size
        if (fused_error > 2 * stock_error + 4 * eps).any():
            return False
        if fused_error.mean() > 1.05 * stock_error.mean() + slack:
            return False
    return True


def _result_and_gradient(run: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = run(x)
    return y.detach(), *torch.autograd.grad(y, x, random_tensor(*y.shape, seed=2).to(BF16).to(y.dtype))
