"""The layer operators to be measured: shapes, what stock models compute, and the bytes that must be moved.

Shapes are those of Qwen3-0.6B at 4 x 4,096 tokens, Llama-3.1-8B and Gemma at 2 x 4,096; and 8,192 tokens at
several widths, which the picture shows. Gated norms are those of Qwen3-Next, Bamba-9B and Nemotron-H-8B.
Gates of experts have a row for each token and each of its experts: one for 8,192 tokens; 8 in Qwen3-30B-A3B
(768 columns), Qwen3.5-35B-A3B (512) and DeepSeek (2,048), 4 in gpt-oss (2,880), 2 in Mixtral (14,336).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.layers import BF16, EPS, FP32, Operator
from logitless import layers

FP64 = torch.float64
# Of the picture: numbers in a token's vector.
WIDTHS, ROWS = (1024, 2048, 4096, 8192, 16384), 8192


class Maker:
    """Makes operands on one device; `scale` shrinks the rows for a trial on a CPU."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny

    def rows(self, count: int) -> int:
        return 6 if self.tiny else count

    def randn(
        self, generator: torch.Generator, *shape: int, dtype: torch.dtype = BF16, mean: float = 0.0
    ) -> Tensor:
        return torch.randn(*shape, generator=generator, device=self.device).add_(mean).to(dtype)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


def rms(h: Tensor, weight: Tensor, gemma: bool = False) -> Tensor:
    """LlamaRMSNorm's or GemmaRMSNorm's forward; in fp64 throughout where h is."""
    wide = h.double() if h.dtype == FP64 else h.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (y * (1.0 + weight.to(wide.dtype))).type_as(h) if gemma else weight * y.to(h.dtype)


def norms(make: Maker) -> Iterator[Operator]:
    def operator(
        kind, rows, H, ours, stock, forward, backward, *, residual=None, bias=False, weight=BF16, width=None
    ):
        rows = make.rows(rows)

        def inputs(seed: int) -> dict[str, Tensor]:
            g = make.generator(seed)
            leaves = {"x": make.randn(g, rows, H)}
            if residual is not None:
                leaves["residual"] = make.randn(g, rows, H, dtype=residual)
            leaves["weight"] = make.randn(g, H, dtype=weight, mean=1.0)
            if bias:
                leaves["bias"] = make.randn(g, H, dtype=weight)
            return leaves

        moved = forward * rows * H, backward * rows * H
        return Operator(kind, f"{kind} {rows}x{H}", inputs, ours, stock, *moved, width)

    def add(x, residual, weight):
        h = residual + x
        return rms(h, weight), h

    def add_fp32(x, residual, weight):
        h = residual + x
        y = rms(h, weight)
        return (y if y.dtype == FP64 else y.to(BF16)), h

    def add_layer(x, residual, weight, bias):
        h = residual + x
        return F.layer_norm(h, h.shape[-1:], weight, bias), h

    def ours_fp32(x, residual, weight):
        return layers.add_rms_norm(x, residual, weight, out_dtype=BF16)

    def ours_after(x, residual, weight):
        return (layers.rms_norm_add(x, residual, weight, rounding="gemma"),)

    def alone(x, weight):
        return (layers.rms_norm(x, weight),)

    for rows, H in ((16384, 1024), (8192, 4096), (8192, 2560)):
        yield operator("add_rms_norm", rows, H, layers.add_rms_norm, add, 8, 8, residual=BF16)
    for H in WIDTHS:
        yield operator("add_rms_norm", ROWS, H, layers.add_rms_norm, add, 8, 8, residual=BF16, width=H)
    yield operator(
        "add_rms_norm fp32 residual", 16384, 1024, ours_fp32, add_fp32, 12, 16, residual=FP32, weight=FP32
    )
    for rows, H in ((16384, 1024), (8192, 4096), (16384 * 16, 128)):
        yield operator("rms_norm", rows, H, alone, lambda x, weight: (rms(x, weight),), 4, 6)
    yield operator(
        "rms_norm_add gemma", 8192, 2304, ours_after,
        lambda x, residual, weight: (residual + rms(x, weight, gemma=True),), 6, 6, residual=BF16,
    )  # fmt: skip
    yield operator(
        "add_layer_norm", 8192, 4096, layers.add_layer_norm, add_layer, 8, 8, residual=BF16, bias=True
    )


def gated_norms(make: Maker) -> Iterator[Operator]:
    def operator(rows: int, H: int, group_size: int | None = None) -> Operator:
        """Qwen3-Next's, with group_size Mamba 2's: the gate first, and the norm of each group."""
        rows = make.rows(rows)
        options = {} if group_size is None else {"gate_first": True, "group_size": group_size}

        def inputs(seed: int) -> dict[str, Tensor]:
            g = make.generator(seed)
            leaves = {name: make.randn(g, rows, H) for name in ("x", "gate")}
            return leaves | {"weight": make.randn(g, H, mean=1.0)}

        def ours(x, gate, weight):
            return (layers.gated_rms_norm(x, gate, weight, eps=EPS, **options),)

        def stock(x, gate, weight):
            act = F.silu(gate if gate.dtype == FP64 else gate.float())
            if group_size is None:
                return ((rms(x, weight) * act).to(x.dtype),)
            groups = (x * act).unflatten(-1, (-1, group_size))
            groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + EPS)
            return (weight * groups.flatten(-2).to(x.dtype),)

        kind = f"gated_rms_norm{' gate first' if options else ''}"
        sizes = f"{rows}x{H}" if group_size in (None, H) else f"{rows}x{H // group_size}x{group_size}"
        return Operator(kind, f"{kind} {sizes}", inputs, ours, stock, 6 * rows * H, 10 * rows * H)

    yield operator(8192 * 32, 128)
    yield operator(8192, 8192, 8192)
    yield operator(8192, 8192, 1024)


def ropes(make: Maker) -> Iterator[Operator]:
    def half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    def angles(T: int, D: int) -> tuple[Tensor, Tensor]:
        angle = torch.rand(1, T, D // 2, device=make.device) * 6
        angle = torch.cat((angle, angle), -1)
        return angle.cos().to(BF16), angle.sin().to(BF16)

    def operator(
        B: int, T: int, heads: int, key_heads: int, D: int, *, normalized: bool, width: int | None = None
    ) -> Operator:
        kind = "qk_norm_rope" if normalized else "rope"
        B, T = (2, 3) if make.tiny else (B, T)
        cos, sin = angles(T, D)

        def inputs(seed: int) -> dict[str, Tensor]:
            g = make.generator(seed)
            leaves = {n: make.randn(g, B, T, count, D) for n, count in (("q", heads), ("k", key_heads))}
            if normalized:
                leaves |= {n: make.randn(g, D, mean=1.0) for n in ("q_weight", "k_weight")}
            return leaves

        def ours(q, k, **weights):
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            return (
                layers.qk_norm_rope(q, k, cos, sin, **weights) if normalized else layers.rope(q, k, cos, sin)
            )

        def stock(q, k, q_weight=None, k_weight=None):
            if normalized:
                q, k = rms(q, q_weight), rms(k, k_weight)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            c, s = cos[:, None], sin[:, None]
            return q * c + half(q) * s, k * c + half(k) * s

        elements = B * T * (heads + key_heads) * D
        label = f"{kind} {B}x{T}x({heads}+{key_heads})x{D}"
        moved = 4 * elements, (6 if normalized else 4) * elements
        return Operator(kind, label, inputs, ours, stock, *moved, width, {"cos": cos, "sin": sin})

    def one(B: int, T: int, heads: int, D: int, *, normalized: bool = False) -> Operator:
        """Gemma 4's: queries and keys are rotated in two calls, before the transposition."""
        B, T = (2, 3) if make.tiny else (B, T)
        cos, sin = angles(T, D)

        def inputs(seed: int) -> dict[str, Tensor]:
            g = make.generator(seed)
            leaves = {"x": make.randn(g, B, T, heads, D)}
            return leaves | ({"weight": make.randn(g, D, mean=1.0)} if normalized else {})

        def ours(x, weight=None):
            x = x.transpose(1, 2)
            if normalized:
                y, _ = layers.qk_norm_rope(x, None, cos, sin, weight, eps=EPS)
            else:
                y, _ = layers.rope(x, None, cos, sin)
            return (y.transpose(1, 2),)

        def stock(x, weight=None):
            x = rms(x, weight) if normalized else x
            return (x * cos[:, :, None] + half(x) * sin[:, :, None],)

        name = "qk_norm_rope" if normalized else "rope"
        elements = B * T * heads * D
        moved = 4 * elements, (6 if normalized else 4) * elements
        return Operator(f"{name} of one tensor", f"{name} {B}x{T}x{heads}x{D}", inputs, ours, stock, *moved)

    def deinterleaved(B: int, T: int, heads: int, key_heads: int, D: int) -> Operator:
        """DeepSeek-V3's: it reads neighbours and stores halves."""
        B, T = (2, 3) if make.tiny else (B, T)
        cos, sin = (table[..., : D // 2] for table in angles(T, D))

        def inputs(seed: int) -> dict[str, Tensor]:
            g = make.generator(seed)
            return {n: make.randn(g, B, T, count, D) for n, count in (("q", heads), ("k", key_heads))}

        def ours(q, k):
            options = {"rotary_dim": D, "interleaved": True, "deinterleave": True}
            return layers.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, **options)

        def stock(q, k):
            c, s = cos[:, None], sin[:, None]
            pairs = [(x[..., ::2], x[..., 1::2]) for x in (q.transpose(1, 2), k.transpose(1, 2))]
            return tuple(torch.cat((a * c - b * s, b * c + a * s), -1) for a, b in pairs)

        moved = 4 * B * T * (heads + key_heads) * D
        kind, sizes = "rope deinterleaved", f"{B}x{T}x({heads}+{key_heads})x{D}"
        return Operator(kind, f"{kind} {sizes}", inputs, ours, stock, moved, moved)

    yield deinterleaved(2, 4096, 128, 1, 64)
    yield one(2, 4096, 32, 256)
    yield one(2, 4096, 16, 256)
    yield one(2, 4096, 32, 256, normalized=True)
    yield one(2, 4096, 8, 256, normalized=True)
    yield operator(4, 4096, 16, 8, 128, normalized=False)
    yield operator(2, 4096, 32, 8, 128, normalized=False)
    yield operator(4, 4096, 16, 8, 128, normalized=True)
    yield operator(2, 4096, 8, 4, 256, normalized=True)
    for normalized in (False, True):
        for width in WIDTHS:
            heads = width // 128
            yield operator(2, ROWS // 2, heads, heads // 4, 128, normalized=normalized, width=width)


def gates(make: Maker) -> Iterator[Operator]:
    functions = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu_erf": F.gelu}

    def operator(
        rows: int, columns: int, activation: str, packed: bool = False, width: int | None = None
    ) -> Operator:
        rows, act = make.rows(rows), functions[activation]

        def inputs(seed: int) -> dict[str, Tensor]:
            g = make.generator(seed)
            if packed:
                return {"a": make.randn(g, rows, 2 * columns)}
            return {name: make.randn(g, rows, columns) for name in "ab"}

        def stock(a, b=None):
            a, b = (a, b) if b is not None else a.chunk(2, -1)
            return (act(a) * b,)

        def ours(**leaves):
            return (layers.gated(**leaves, activation=activation),)

        kind = f"gated {activation}{' packed' if packed else ''}"
        moved = 6 * rows * columns, 10 * rows * columns
        return Operator(kind, f"{kind} {rows}x{columns}", inputs, ours, stock, *moved, width)

    yield operator(16384, 3072, "silu")
    yield operator(16384, 3072, "silu", packed=True)
    yield operator(8192, 14336, "silu")
    yield operator(8192, 9216, "gelu_tanh")
    yield operator(8192, 9216, "gelu_erf")
    for width in WIDTHS:
        yield operator(ROWS, width, "silu", width=width)


def expert_gates(make: Maker) -> Iterator[Operator]:
    """Of gate and up in one tensor; `clamped` are the options of `clamped_gated`."""

    def operator(rows: int, columns: int, name: str = "", **clamped: float | bool) -> Operator:
        rows = make.rows(rows)

        def inputs(seed: int) -> dict[str, Tensor]:
            x = make.randn(make.generator(seed), rows, 2 * columns)
            return {"x": x.mul_(4) if clamped else x}

        def stock(x):
            a, b = (x[..., ::2], x[..., 1::2]) if clamped.get("interleaved") else x.chunk(2, -1)
            if clamped:
                limit = clamped["limit"]
                a, b = a.clamp(max=limit), b.clamp(min=-limit, max=limit)
            if "alpha" in clamped:
                return ((b + 1) * (a * torch.sigmoid(a * clamped["alpha"])),)
            return (F.silu(a) * b,)

        def ours(x):
            return (layers.clamped_gated(x, **clamped) if clamped else layers.gated(x),)

        kind = f"{'clamped ' if clamped else ''}expert gate"
        label = f"{kind}{name} {rows}x{columns}"
        return Operator(kind, label, inputs, ours, stock, 6 * rows * columns, 10 * rows * columns)

    yield operator(8192, 768)
    yield operator(8192, 1408)
    yield operator(8192 * 8, 512)
    yield operator(8192 * 8, 768)
    yield operator(8192 * 8, 2048)
    yield operator(8192 * 2, 14336)
    yield operator(8192 * 4, 2880, " gpt-oss", limit=7.0, alpha=1.702, offset=1.0, interleaved=True)
    yield operator(8192 * 8, 2048, " DeepSeek-V4", limit=10.0)


def operators(make: Maker) -> Iterator[Operator]:
    yield from norms(make)
    yield from gated_norms(make)
    yield from ropes(make)
    yield from gates(make)
    yield from expert_gates(make)
