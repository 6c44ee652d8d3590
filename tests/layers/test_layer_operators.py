"""What holds for every operator of the fused layers: strides, frozen operands, unused results, the same bits
again, what is saved, and what is refused. The other files compare each with its stock module."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from logitless.layers.clamped_gate import clamped_gated
from logitless.layers.gated import gated
from logitless.layers.gated_norm import gated_rms_norm
from logitless.layers.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm, rms_norm_add
from logitless.layers.rope import qk_norm_rope, rope
from tests.kernels.support import DEVICE, INTERPRETED
from tests.layers.layer_support import STRIDES, outcome, randn, strided

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
MATRIX, HEADS = (4, 7, 24), (2, 3, 5, 24)


@dataclass(frozen=True)
class Operator:
    """An operator of named operands.

    Attributes:
        call: (**operands) -> a tensor or two.
        names: of the operands.
        saved: operands, or "result 0", that are kept for the backward pass; "row" is one number a row.
        shape: of the first operand.
    """

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    names: tuple[str, ...]
    saved: tuple[str, ...]
    shape: tuple[int, ...] = MATRIX

    def operands(self, dtype: torch.dtype = FP32, shape: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        shapes = {name: shape_of(name, shape or self.shape) for name in self.names}
        return {name: randn(*size, seed=i, dtype=dtype) for i, (name, size) in enumerate(shapes.items())}

    def results(self, **operands: Tensor) -> tuple[Tensor, ...]:
        actual = self.call(**operands)
        return actual if isinstance(actual, tuple) else (actual,)


def shape_of(name: str, first: tuple[int, ...]) -> tuple[int, ...]:
    """Of an operand, by the shape of the first one."""
    if name.endswith(("weight", "bias")):
        return first[-1:]
    return (first[0], 2, *first[2:]) if name == "k" else first


def tables(q: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0, 6, q.shape[2] * q.shape[3] // 2, device=q.device, dtype=FP64)
    angle = angle.view(1, q.shape[2], -1).repeat(1, 1, 2)
    return angle.cos().to(q.dtype), angle.sin().to(q.dtype)


OPERATORS = {
    "rms_norm": Operator(rms_norm, ("x", "weight"), ("x", "weight", "row")),
    "add_rms_norm": Operator(add_rms_norm, ("x", "residual", "weight"), ("result 1", "weight", "row")),
    "rms_norm_add": Operator(rms_norm_add, ("x", "residual", "weight"), ("x", "weight", "row")),
    "layer_norm": Operator(layer_norm, ("x", "weight", "bias"), ("x", "weight", "row", "row")),
    "add_layer_norm": Operator(
        add_layer_norm, ("x", "residual", "weight", "bias"), ("result 1", "weight", "row", "row")
    ),
    "rope": Operator(lambda q, k: rope(q, k, *tables(q)), ("q", "k"), ("table", "table"), HEADS),
    "rope, deinterleaved": Operator(
        lambda q, k: rope(q, k, *tables(q), interleaved=True, deinterleave=True),
        ("q", "k"),
        ("table", "table"),
        HEADS,
    ),
    "qk_norm_rope": Operator(
        lambda q, k, q_weight, k_weight: qk_norm_rope(q, k, *tables(q), q_weight, k_weight),
        ("q", "k", "q_weight", "k_weight"),
        ("q", "k", "q_weight", "k_weight", "table", "table"),
        HEADS,
    ),
    "qk_norm_rope of one tensor": Operator(
        lambda q, q_weight: qk_norm_rope(q, None, *tables(q), q_weight)[0],
        ("q", "q_weight"),
        ("q", "q_weight", "table", "table"),
        HEADS,
    ),
    "gated": Operator(gated, ("a", "b"), ("a", "b")),
    "gated_rms_norm": Operator(gated_rms_norm, ("x", "gate", "weight"), ("x", "gate", "weight", "row")),
    "gated_rms_norm, gate first": Operator(
        functools.partial(gated_rms_norm, gate_first=True, activation="sigmoid", rounding="single"),
        ("x", "gate", "weight"),
        ("x", "gate", "weight", "row"),
    ),
    "gated, packed": Operator(gated, ("a",), ("a",)),
    "clamped_gated": Operator(functools.partial(clamped_gated, limit=1.0), ("x",), ("x",)),
    "clamped_gated, interleaved": Operator(
        functools.partial(clamped_gated, limit=1.0, alpha=1.7, offset=1.0, interleaved=True), ("x",), ("x",)
    ),
}
operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
TWO = {
    name: op
    for name, op in OPERATORS.items()
    if ("rope" in name and "one tensor" not in name) or name in ("add_rms_norm", "add_layer_norm")
}


def leaves_of(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone().requires_grad_() for name, x in given.items()}


def upstream_of(results: tuple[Tensor, ...]) -> list[Tensor]:
    """As `outcome` takes them."""
    return [randn(*y.shape, seed=i, dtype=y.dtype) for i, y in enumerate(results, 100)]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.repeats)], ids=str)
@pytest.mark.parametrize("kind", STRIDES)
@operators
def test_strided_operands_and_gradients(operator, kind, dtype):
    given = operator.operands(dtype)
    expected, leaves = outcome(operator.call, given), leaves_of(given)
    views = {name: strided(x, "every other" if x.dim() == 1 else kind) for name, x in leaves.items()}
    results = operator.results(**views)
    upstream = [strided(x, kind) for x in upstream_of(results)]
    actual = torch.autograd.grad(results, list(leaves.values()), upstream)
    for i, y in enumerate(results):
        torch.testing.assert_close(y, expected[f"result {i}"])
    for name, gradient in zip(leaves, actual, strict=True):
        torch.testing.assert_close(gradient, expected[f"d_{name}"])


@operators
def test_one_strided_operand(operator):
    given = operator.operands()
    expected = outcome(operator.call, given)
    for only in given:
        kind = "every other" if given[only].dim() == 1 else "sliced"
        actual = outcome(lambda **x: operator.call(**x | {only: strided(x[only], kind)}), given)
        for name, x in actual.items():
            torch.testing.assert_close(x, expected[name])


@operators
def test_expanded_gradients(operator):
    leaves = leaves_of(operator.operands())
    actual = torch.autograd.grad(sum(y.sum() for y in operator.results(**leaves)), list(leaves.values()))
    results = operator.results(**leaves)
    ones = [torch.ones_like(y) for y in results]
    expected = torch.autograd.grad(results, list(leaves.values()), ones)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("operator", TWO.values(), ids=TWO)
def test_one_of_the_two_results_used(operator, used):
    leaves = leaves_of(operator.operands())
    results = operator.results(**leaves)
    upstream = upstream_of(results)
    actual = torch.autograd.grad(results[used], list(leaves.values()), upstream[used], allow_unused=True)
    results = operator.results(**leaves)
    upstream[1 - used] = torch.zeros_like(upstream[1 - used])
    expected = torch.autograd.grad(results, list(leaves.values()), upstream)
    for name, a, b in zip(leaves, actual, expected, strict=True):
        assert (a is None) == (not b.any()), name
        if a is not None:
            torch.testing.assert_close(a, b)


@operators
def test_frozen_operands(operator):
    given = operator.operands()
    expected = outcome(operator.call, given)
    results = {name for name in expected if name.startswith("result")}
    for trained in given:
        actual = outcome(operator.call, given, frozen=tuple(name for name in given if name != trained))
        assert set(actual) == results | {f"d_{trained}"}
        for name, x in actual.items():
            assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@operators
def test_again_is_the_same_and_nothing_is_overwritten(operator, dtype):
    leaves = leaves_of(operator.operands(dtype))
    results = operator.results(**leaves)
    upstream = upstream_of(results)
    everything = [*leaves.values(), *results, *upstream]
    kept = [x.detach().clone() for x in everything]
    first = torch.autograd.grad(results, list(leaves.values()), upstream, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(results, list(leaves.values()), upstream, retain_graph=True)
    assert all(torch.equal(x, before) for x, before in zip(everything, kept, strict=True))
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, copies, second, strict=True))
    again = operator.results(**leaves)
    assert all(torch.equal(a, b) for a, b in zip(again, results, strict=True))


@operators
def test_saved(operator):
    leaves, saved = leaves_of(operator.operands()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        results = operator.results(**leaves)
    named = leaves | {f"result {i}": y for i, y in enumerate(results)}
    first = next(iter(leaves.values()))
    pointers, others = {x.data_ptr() for x in saved}, {"row": 0, "table": 0}
    for name in operator.saved:
        if name in others:
            others[name] += 1
        else:
            assert named[name].data_ptr() in pointers, name
    assert len(saved) == len(operator.saved)
    assert sum(x.numel() == first[..., 0].numel() for x in saved) == others["row"]


@operators
def test_no_elements(operator):
    shape = (0, *operator.shape[1:])
    given = operator.operands(BF16, shape)
    actual = outcome(operator.call, given)
    assert not any(x.any() for x in actual.values())
    assert {name: x.shape for name, x in given.items()} == {name: actual[f"d_{name}"].shape for name in given}


@operators
def test_gradcheck(operator):
    shape = (2, 2, 3, 6) if operator.shape == HEADS else (2, 3, 6)
    given = leaves_of(operator.operands(FP64, shape))
    assert torch.autograd.gradcheck(lambda *x: operator.call(**dict(zip(given, x))), tuple(given.values()))


@operators
def test_no_second_derivative(operator):
    leaves = leaves_of(operator.operands())
    first = next(iter(leaves.values()))
    value = operator.results(**leaves)[0].square().sum()
    (gradient,) = torch.autograd.grad(value, first, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason="the graph is that of the run without TRITON_INTERPRET")
@operators
def test_compiles_into_one_graph(operator):
    given = operator.operands(BF16)
    expected = outcome(operator.call, given)
    actual = outcome(torch.compile(operator.call, backend="aot_eager", fullgraph=True), given)
    for name, x in actual.items():
        assert x.dtype == expected[name].dtype
        torch.testing.assert_close(x, expected[name], atol=0.1, rtol=0.02)


# The columns of a row are side by side.
DIMENSIONS = [(name, dimension) for name, op in OPERATORS.items() for dimension in range(len(op.shape) - 1)]


@pytest.mark.parametrize(("name", "dimension"), DIMENSIONS)
def test_addresses_in_64_bits(name, dimension):
    """The third of a dimension lies more than 2^31 numbers behind the first. Untouched memory is free."""
    operator = OPERATORS[name]
    shape, far = (3,) * (len(operator.shape) - 1) + (16,), 2**30 + 64
    strides = [16 * 3 ** (len(shape) - 2 - i) for i in range(len(shape) - 1)] + [1]
    strides[dimension] = far
    given = operator.operands(BF16, shape)
    given = {
        each: x if x.dim() == 1 else randn(*shape, seed=i, dtype=BF16)
        for i, (each, x) in enumerate(given.items())
    }
    expected = outcome(operator.call, given)
    buffer = torch.empty(2 * far + 3**3 * 16, dtype=BF16, device=DEVICE)
    apart = buffer.as_strided(shape, strides)
    for each, x in given.items():
        if x.dim() > 1:
            apart.copy_(x)
            for i, y in enumerate(operator.results(**given | {each: apart})):
                assert torch.equal(y, expected[f"result {i}"]), each
    for which, y in enumerate(operator.results(**given)):
        if y.shape != apart.shape:
            continue
        leaves = leaves_of(given)
        results = operator.results(**leaves)
        upstream = upstream_of(results)
        apart.copy_(upstream[which])
        upstream[which] = apart
        actual = torch.autograd.grad(results, list(leaves.values()), upstream)
        assert all(torch.equal(g, expected[f"d_{each}"]) for each, g in zip(leaves, actual)), which


# -- what is refused: the operator, what is changed in its call, and the message


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


NORM, ROPE, GATED, GATED_NORM = "add_layer_norm", "qk_norm_rope", "gated", "gated_rms_norm"
REFUSED = [
    (NORM, {"residual": zeros(4, 25)}, r"residual: expected x's shape \(4, 7, 24\), got \(4, 25\); "),
    (NORM, {"weight": zeros(23)}, r"weight: expected shape \(24,\), one entry per column, got \(23,\); "),
    (NORM, {"bias": zeros(1)}, r"bias: expected shape \(24,\), one entry per column, got \(1,\); "),
    (NORM, {"weight": meta(24)}, r"weight: expected x's device .*, got meta; move weight there"),
    (NORM, {"residual": meta(4, 7, 24)}, r"residual: expected x's device .*, got meta; "),
    (NORM, {"x": zeros(4, 24).long()}, r"x: expected a floating-point tensor, got torch.int64; "),
    (NORM, {"weight": [1.0] * 24}, r"weight: expected a floating-point tensor, got list; "),
    (NORM, {"bias": zeros(24).long()}, r"bias: expected a floating-point tensor, got torch.int64; "),
    (NORM, {"x": zeros()}, r"x: expected shape \(..., H\), H at least 1, got \(\); "),
    (NORM, {"x": zeros(4, 0)}, r"x: expected shape \(..., H\), H at least 1, got \(4, 0\); "),
    (
        "add_rms_norm",
        {"rounding": "gemma9"},
        "rounding: expected one of 'llama', 'single', 'gemma', got 'gemma9'; ",
    ),
    (
        ROPE,
        {"q": zeros(2, 3, 5, 15)},
        r"q: expected shape .* with an even head size D, got \(2, 3, 5, 15\); ",
    ),
    (ROPE, {"k": zeros(2, 5, 24)}, r"k: expected shape .* with an even head size D, got \(2, 5, 24\); "),
    (ROPE, {"q": zeros(2, 3, 5, 0)}, r"q: expected shape .* with an even head size D, got \(2, 3, 5, 0\); "),
    (
        ROPE,
        {"k": zeros(2, 2, 6, 24)},
        r"k: expected shape \(2, key heads, 5, 24\), .*, got \(2, 2, 6, 24\); ",
    ),
    (ROPE, {"k": zeros(2, 2, 5, 8)}, r"k: expected shape \(2, key heads, 5, 24\), .*, got \(2, 2, 5, 8\); "),
    (ROPE, {"cos": zeros(1, 6, 24)}, r"cos: expected shape \(2, 5, 24\), or with 1 .*, got \(1, 6, 24\); "),
    (ROPE, {"sin": zeros(2, 5, 24)}, r"sin: expected shape \(2, 5, 24\), .*, got \(2, 5, 24\); "),
    (ROPE, {"sin": zeros(1, 5, 18)}, r"sin: expected 24 or 12 columns for rotary_dim=24, got \(1, 5, 18\); "),
    (ROPE, {"rotary_dim": 26}, "rotary_dim: expected an even number up to the head size 24, got 26; "),
    (ROPE, {"cos": zeros(1, 5, 7)}, "rotary_dim: expected an even number up to the head size 24, got 7; "),
    (ROPE, {"rotary_dim": 8}, r"cos: expected 8 or 4 columns for rotary_dim=8, got \(1, 5, 24\); "),
    (ROPE, {"k_weight": zeros(8)}, r"k_weight: expected shape \(24,\), one entry per column, got \(8,\); "),
    (ROPE, {"q_weight": meta(24)}, "q_weight: expected q's device .*, got meta; "),
    (ROPE, {"sin": meta(1, 5, 24)}, "sin: expected q's device .*, got meta; "),
    (ROPE, {"k": [1.0]}, "k: expected a floating-point tensor, got list; "),
    (ROPE, {"cos": zeros(1, 5, 24).long()}, "cos: expected a floating-point tensor, got torch.int64; "),
    (ROPE, {"rounding": "double"}, "rounding: expected one of 'llama', 'single', 'gemma', got 'double'; "),
    (
        GATED,
        {"activation": "relu"},
        "activation: expected one of 'silu', 'gelu_tanh', 'gelu_erf', got 'relu'; ",
    ),
    (GATED, {"b": zeros(4, 1)}, r"b: expected a's shape \(4, 7, 24\), got \(4, 1\); "),
    (GATED, {"b": meta(4, 7, 24)}, "b: expected a's device .*, got meta; move b there"),
    (GATED, {"b": zeros(4, 7, 24).long()}, "b: expected a floating-point tensor, got torch.int64; "),
    (GATED, {"a": None}, "a: expected a floating-point tensor, got NoneType; "),
    (GATED, {"a": zeros(4, 23), "b": None}, r"a: expected an even last dimension without b, got \(4, 23\); "),
    (GATED, {"a": zeros()}, r"a: expected shape \(..., I\), got \(\); "),
    (GATED_NORM, {"rounding": "gemma"}, "rounding: expected one of 'llama', 'single', got 'gemma'; "),
    (GATED_NORM, {"activation": "gelu"}, "activation: expected one of 'silu', 'sigmoid', got 'gelu'; "),
    (GATED_NORM, {"x": zeros()}, r"x: expected shape \(..., H\), H at least 1, got \(\); "),
    (GATED_NORM, {"gate": None}, "gate: expected a floating-point tensor, got NoneType; "),
    (GATED_NORM, {"gate": zeros(24)}, r"gate: expected x's shape \(4, 7, 24\), got \(24,\); "),
    (GATED_NORM, {"gate": meta(4, 7, 24)}, "gate: expected x's device .*, got meta; move gate there"),
    (GATED_NORM, {"weight": zeros(8), "group_size": 8}, r"weight: expected shape \(24,\), .*, got \(8,\); "),
    (GATED_NORM, {"group_size": 7}, "group_size: expected a divisor of the 24 columns, got 7; "),
    (GATED_NORM, {"group_size": 0}, "group_size: expected a divisor of the 24 columns, got 0; "),
]
FUNCTIONS = {
    NORM: add_layer_norm,
    "add_rms_norm": add_rms_norm,
    ROPE: qk_norm_rope,
    GATED: gated,
    GATED_NORM: gated_rms_norm,
}


@pytest.mark.parametrize(
    ("name", "change", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused(name, change, message):
    given = OPERATORS[name].operands()
    if name == ROPE:
        given["cos"], given["sin"] = tables(given["q"])
    with pytest.raises((TypeError, ValueError), match=message):
        FUNCTIONS[name](**given | change)
    # `rope` has no weights and no rounding.
    if name == ROPE and not {"q_weight", "k_weight", "rounding"} & set(change):
        with pytest.raises((TypeError, ValueError), match=message):
            rope(**{key: x for key, x in (given | change).items() if not key.endswith("weight")})
