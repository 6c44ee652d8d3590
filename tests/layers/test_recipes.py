"""Recipes: what a fused operator's outputs are made of again, which is equal to the bit."""

import pytest
import torch
from torch import Tensor

from logitless.layers import (
    add_layer_norm,
    add_rms_norm,
    clamped_gated,
    gated,
    gated_rms_norm,
    layer_norm,
    qk_norm_rope,
    recipes,
    rms_norm,
    rms_norm_add,
    rope,
)
from tests.layers.layer_support import randn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Collected:
    def __init__(self) -> None:
        self.added: list[tuple] = []

    def add(self, *added: object) -> None:
        self.added.append(added)


def collected(operator, *operands: Tensor | None, **options) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(result, output as it was registered, output made again) of every output with a recipe."""
    with recipes.collecting(actual := Collected()):
        results = operator(*operands, **options)
    results = results if isinstance(results, tuple) else (results,)
    with recipes.collecting(again := Collected()):
        triples = []
        for node, outputs, make, inputs in actual.added:
            made = make(*(x if x is None else x.detach() for x in inputs))
            for index, (output, copy) in enumerate(zip(outputs, made, strict=True)):
                result = results[index]
                assert result.grad_fn is node or not result.requires_grad
                triples.append((result, output, copy))
    assert not again.added and recipes.current() is None
    return triples


def assert_equal(triples: list[tuple[Tensor, Tensor, Tensor]], number: int) -> None:
    assert len(triples) == number
    for result, output, made in triples:
        assert result.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        assert made.data_ptr() != result.data_ptr() and torch.equal(made, result)
        assert (made.dtype, made.shape, made.stride()) == (result.dtype, result.shape, result.stride())


@pytest.mark.parametrize("rounding", ["llama", "single", "gemma"])
@pytest.mark.parametrize("dtype, weight", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16)], ids=str)
def test_norms(dtype, weight, rounding):
    x = (4 * randn(3, 5, 96, seed=0, dtype=dtype)).requires_grad_()
    residual, scale = randn(3, 5, 96, seed=1, dtype=dtype), randn(96, seed=2, dtype=weight)
    bias = randn(96, seed=3, dtype=weight)
    options = {"rounding": rounding, "eps": 1e-5}
    assert_equal(collected(rms_norm, x, scale, **options), 1)
    assert_equal(collected(rms_norm, x, **options), 1)
    assert_equal(collected(rms_norm, x[:, ::2], scale, out_dtype=FP32, **options), 1)
    for wide in (residual, residual.float()):
        assert_equal(collected(add_rms_norm, x, wide, scale, multiplier=0.7, **options), 1)
    # The residual stream itself is saved by whoever needs it.
    assert_equal(collected(rms_norm_add, x, residual, scale, **options), 0)
    assert_equal(collected(layer_norm, x, scale, bias), 1)
    assert_equal(collected(layer_norm, x), 1)
    assert_equal(collected(add_layer_norm, x, residual, scale, bias, multiplier=0.7), 1)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("by_token", [False, True])
def test_rotations(dtype, by_token):
    q, k = (randn(2, 7, heads, 16, seed=heads, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    if not by_token:
        q, k = q.contiguous(), k.contiguous()
    cos, sin = randn(1, 7, 16, seed=2, dtype=dtype), randn(1, 7, 16, seed=3, dtype=dtype)
    weights = randn(16, seed=4, dtype=dtype), randn(16, seed=5, dtype=dtype)
    for x in (q, k):
        x.requires_grad_()
    assert_equal(collected(qk_norm_rope, q, k, cos, sin, *weights), 2)
    assert_equal(collected(qk_norm_rope, q, k, cos, sin, *weights, interleaved=True, rounding="gemma"), 2)
    # It saves nothing to make them from.
    assert_equal(collected(rope, q, k, cos, sin), 0)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gates(dtype, activation):
    a, b = (randn(3, 5, 48, seed=i, dtype=dtype).requires_grad_() for i in range(2))
    assert_equal(collected(gated, a, b, activation=activation), 1)
    assert_equal(collected(gated, a, activation=activation), 1)
    assert_equal(collected(gated, a[:, ::2], b[:, ::2], activation=activation), 1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_clamped_gates(dtype, interleaved):
    x, options = randn(3, 5, 48, seed=0, dtype=dtype).requires_grad_(), {"interleaved": interleaved}
    assert_equal(collected(clamped_gated, x, limit=1.0, **options), 1)
    assert_equal(collected(clamped_gated, x[:, ::2], limit=1.0, alpha=1.7, offset=1.0, **options), 1)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_gated_norms(dtype, gate_first):
    x, gate = (randn(3, 5, 48, seed=i, dtype=dtype).requires_grad_() for i in range(2))
    weight, options = randn(48, seed=2), {"gate_first": gate_first}
    assert_equal(collected(gated_rms_norm, x, gate, weight, **options), 1)
    assert_equal(collected(gated_rms_norm, x[:, ::2], gate[:, ::2], weight, group_size=16, **options), 1)


def test_inputs_are_what_the_operator_saves():
    x, weight = randn(4, 32, seed=0).requires_grad_(), randn(32, seed=1).requires_grad_()
    saved = set()
    with recipes.collecting(actual := Collected()):
        keep = lambda x: saved.add(x.untyped_storage().data_ptr())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            rms_norm(x, weight)
            gated(x, x)
    for _, _, _, inputs in actual.added:
        assert {x.untyped_storage().data_ptr() for x in inputs if x is not None} <= saved


def test_nothing_is_collected_elsewhere():
    import threading

    x, seen = randn(4, 32, seed=0), []
    with recipes.collecting(actual := Collected()):
        thread = threading.Thread(target=lambda: (seen.append(recipes.current()), gated(x)))
        thread.start()
        thread.join()
        assert seen == [None] and not actual.added
        with recipes.collecting(inner := Collected()):
            gated(x)
        gated(x)
    assert len(inner.added) == len(actual.added) == 1
