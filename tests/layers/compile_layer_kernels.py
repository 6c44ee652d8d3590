"""Compiles the kernels of the layer operators for one target, as their launchers ask for it.

Needs no GPU:

    python -m tests.layers.compile_layer_kernels cuda 90        # or: hip gfx942

The public functions run forward and backward on tensors without memory, over covering arrays of dtypes,
options and sizes. A recorder in the kernels' place notes what each launch would have been compiled for.
Which Triton compiles is decided by PYTHONPATH, see `test_compile_layers.py`.
"""

import itertools
import sys
from contextlib import ExitStack
from typing import NamedTuple
from unittest import mock

import torch
from allpairspy import AllPairs
from torch import Tensor

from tests.kernels.offline import Source, compile_sources, jitted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", torch.uint8: "u8", torch.int64: "i64"}


class Variant(NamedTuple):
    """What Triton compiles a kernel for."""

    kernel: str
    types: tuple[tuple[str, str], ...]  # by argument, without the constants
    constants: tuple[tuple[str, object], ...]
    divisible: tuple[str, ...]  # arguments known to be multiples of 16
    warps: int


class Recorder:
    """Stands in for a kernel; specializes as Triton does, on None, on 1, on multiples of 16, on 64 bits."""

    def __init__(self, kernel, name: str, variants: dict[Variant, object]) -> None:
        self.kernel, self.name, self.variants = kernel, name, variants

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps: int, **constants) -> None:
        named = dict(zip(self.kernel.arg_names, args, strict=False))
        assert {*named, *constants} == set(self.kernel.arg_names), self.name
        types, divisible = {}, []
        for name, value in named.items():
            if isinstance(value, Tensor):
                assert name.endswith("_ptr"), name
                types[name] = "*" + TYPES[value.dtype]
                divisible += [name] if value.storage_offset() * value.itemsize % 16 == 0 else []
            elif isinstance(value, float):
                types[name] = "fp32"
            elif name in self.kernel.do_not_specialize:
                types[name] = "i32"
            elif value is None or value == 1:
                constants[name] = value
            else:
                types[name] = "i32" if value < 2**31 else "i64"
                divisible += [name] if value % 16 == 0 else []
        fixed = tuple(sorted(constants.items()))
        self.variants[Variant(self.name, tuple(types.items()), fixed, tuple(divisible), num_warps)] = (
            self.kernel
        )


def nothing(*shape: int, dtype: torch.dtype, aligned: bool = True) -> Tensor:
    """A tensor without memory; where it is not aligned, it begins three numbers into its storage."""
    size, offset = torch.Size(shape).numel(), 0 if aligned else 3
    whole = torch.empty(size + 3, dtype=dtype, device="meta")
    return whole[offset : offset + size].view(shape).requires_grad_()


def differentiate(results: Tensor | tuple[Tensor, ...]) -> None:
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [torch.empty_like(y) for y in results])


class MadeAgain:
    """Makes every output with a recipe again, at once."""

    def add(self, node, outputs, make, inputs) -> None:
        make(*inputs)


def run_norms(rows: int) -> None:
    from logitless.layers import recipes
    from logitless.layers.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm, rms_norm_add

    dtypes = [
        (BF16, BF16, BF16),
        (FP16, FP16, FP16),
        (FP32, FP32, FP32),
        (BF16, FP32, FP32),
        (BF16, BF16, FP32),
    ]
    kinds = ["llama", "single", "gemma", "layer", "layer without bias"]
    positions = ["alone", "before", "scaled", "after", "y alone"]
    for dtype, kind, position, H, weight in AllPairs(
        [dtypes, kinds, positions, [64, 1001, 2304, 5376, 8450], [True, True, False]]
    ):
        x, residual, w = (
            nothing(*s, dtype=d, aligned=H % 2 == 0) for s, d in zip(((rows, H), (rows, H), (H,)), dtype)
        )
        w = w if weight else None
        if kind.startswith("layer"):
            vectors = (w, None if kind.endswith("bias") else nothing(H, dtype=dtype[2]))
            alone, before, options = layer_norm, add_layer_norm, {}
        else:
            vectors, alone, before, options = (w,), rms_norm, add_rms_norm, {"rounding": kind}
        match position:
            case "alone":
                with recipes.collecting(MadeAgain()):
                    differentiate(alone(x, *vectors, **options))
            case "after":
                differentiate(rms_norm_add(x, residual, w, rounding=options.get("rounding", "llama")))
            case "scaled":
                differentiate(before(x, residual, *vectors, **options, multiplier=0.5))
            case "before":
                with recipes.collecting(MadeAgain()):
                    differentiate(before(x, residual, *vectors, **options))
            case "y alone":
                differentiate(before(x, residual, *vectors, **options, out_dtype=BF16)[0])


def run_ropes(tokens: int) -> None:
    from logitless.layers.rope import qk_norm_rope, rope

    dtypes = [(BF16, BF16, BF16), (FP16, FP16, FP16), (FP32, FP32, FP32), (BF16, FP32, FP32)]
    heads = [(16, 8, 128, 128), (14, 2, 64, 32), (32, 32, 96, 96), (8, 4, 256, 256)]
    norms = ["none", "llama", "gemma", "frozen"]
    for dtype, (q_heads, k_heads, D, R), norm, interleaved, per_pair in AllPairs(
        [dtypes, heads, norms, [False, True], [False, True]]
    ):
        q, k = (nothing(2, tokens, count, D, dtype=dtype[0]).transpose(1, 2) for count in (q_heads, k_heads))
        cos, sin = (nothing(1, tokens, R // 2 if per_pair else R, dtype=dtype[1]).detach() for _ in range(2))
        options = {"interleaved": interleaved, "rotary_dim": R}
        if norm == "none":
            differentiate(rope(q, k, cos, sin, **options))
            differentiate(rope(q, None, cos, sin, **options)[0])
            if interleaved and R == D:
                differentiate(rope(q, k, cos, sin, **options, deinterleave=True))
            continue
        weights = [nothing(D, dtype=dtype[2]).detach().requires_grad_(norm != "frozen") for _ in range(2)]
        options["rounding"] = norm.replace("frozen", "single")
        differentiate(qk_norm_rope(q, k, cos, sin, *weights, **options))
        differentiate(qk_norm_rope(q, None, cos, sin, weights[0], **options)[0])


def run_gated(rows: int) -> None:
    from logitless.layers.gated import ACTIVATIONS, gated

    dtypes = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)]
    for dtype, activation, packed, columns in AllPairs(
        [dtypes, list(ACTIVATIONS), [False, True], [96, 101, 512, 1408, 2048]]
    ):
        a, b = (nothing(rows, columns, dtype=d) for d in dtype)
        if packed:
            a, b = nothing(rows, 2 * columns, dtype=dtype[0]), None
        differentiate(gated(a, b, activation=activation))


def run_clamped_gates(rows: int) -> None:
    from logitless.layers.clamped_gate import clamped_gated

    for dtype, interleaved, is_sliced, columns in AllPairs(
        [[BF16, FP16, FP32], [False, True], [False, True], [96, 101, 512, 1408, 2048]]
    ):
        x = nothing(rows, 4 * columns, dtype=dtype)[:, : 2 * columns]
        x = x if is_sliced else nothing(rows, 2 * columns, dtype=dtype)
        differentiate(clamped_gated(x, limit=7.0, alpha=1.702, offset=1.0, interleaved=interleaved))


def run_gated_norms(rows: int) -> None:
    from logitless.layers.gated_norm import gated_rms_norm

    dtypes = [
        (BF16, BF16, BF16),
        (FP16, FP16, FP16),
        (FP32, FP32, FP32),
        (BF16, BF16, FP32),
        (FP32, BF16, FP32),
    ]
    sizes = [(128, 1), (1001, 3), (1024, 8), (8192, 1)]
    weights = ["trained", "trained", "frozen", "none"]
    for dtype, rounding, activation, gate_first, (columns, groups), weight in AllPairs(
        [dtypes, ["llama", "single"], ["silu", "sigmoid"], [False, True], sizes, weights]
    ):
        H = columns * groups
        x, gate = (nothing(rows, H, dtype=d, aligned=columns % 2 == 0) for d in dtype[:2])
        w = None if weight == "none" else nothing(H, dtype=dtype[2])
        w = w.detach() if weight == "frozen" else w
        options = {"rounding": rounding, "activation": activation, "gate_first": gate_first}
        differentiate(gated_rms_norm(x, gate, w, **options, group_size=columns))


def run_lora_dropout(rows: int) -> None:
    from logitless.layers import lora

    cases = AllPairs([[BF16, FP16], [BF16, FP32], [1, 3], [3, 16, 32, 64, 128], [1000, 2304]])
    for dtype, input_dtype, count, rank, K in cases:
        a, b, w = (nothing(*size, dtype=dtype) for size in ((rank, K), (96, rank), (96, K)))
        x = nothing(rows, K, dtype=dtype if input_dtype == BF16 else FP32)
        layer = lora.LoraProjection(w.detach(), None, a, b, 2.0, 0.05)
        with mock.patch.object(lora, "compute_dtype", lambda x, dtype=dtype: dtype):
            differentiate(lora.apply_projections(x, [layer] * count))


def variants(rows: int = 6) -> dict[Variant, object]:
    """What the launchers ask for with so many rows or tokens, and the kernel that it is asked of."""
    from logitless.kernels import operands
    from logitless.layers import (
        clamped_gate_triton,
        gated_norm_triton,
        gated_triton,
        lora_dropout_triton,
        norm_triton,
        qk_norm_rope_triton,
        rope_triton,
    )

    kernels = {
        norm_triton: ("norm_kernel", "norm_backward_kernel", "column_sum_kernel"),
        rope_triton: ("rope_kernel",),
        qk_norm_rope_triton: ("norm_rope_backward_kernel",),
        gated_triton: ("gated_kernel", "gated_backward_kernel"),
        clamped_gate_triton: ("clamped_gate_kernel", "clamped_gate_backward_kernel"),
        gated_norm_triton: ("gated_norm_kernel", "gated_norm_backward_kernel"),
        lora_dropout_triton: (
            "dropout_project_kernel",
            "dropout_backward_kernel",
        ),
    }
    variants = {}
    with ExitStack() as patches:
        supported = mock.patch.object(operands, "uses_triton", lambda device, dtype: dtype in TYPES)
        patches.enter_context(supported)
        for module, names in kernels.items():
            recorders = {name: Recorder(jitted(getattr(module, name)), name, variants) for name in names}
            patches.enter_context(mock.patch.multiple(module, **recorders))
        for name in ("_project_launch", "_backward_launch"):  # caches, which would keep the recorders
            make = getattr(lora_dropout_triton, name).__wrapped__
            patches.enter_context(mock.patch.object(lora_dropout_triton, name, make))
        for run in (run_norms, run_ropes, run_gated, run_clamped_gates, run_gated_norms, run_lora_dropout):
            run(rows)
    assert {v.kernel for v in variants} == set(itertools.chain(*kernels.values()))
    return variants


def source(variant: Variant, kernel: object) -> Source:
    types, at = dict(variant.types), kernel.arg_names.index
    attributes = {(at(name),): [["tt.divisibility", 16]] for name in variant.divisible}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    return Source(kernel, signature, dict(variant.constants), attributes, variant.warps)


if __name__ == "__main__":
    compile_sources(list(variants().items()), lambda variant: source(*variant), sys.argv[1:])
