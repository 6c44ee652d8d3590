"""One random call of a loss: what it is called with (`Case`), and the numbers (`World`)."""

import zlib
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests import reference
from tests.support import DEVICE

# Values of an operand are whole numbers up to the first, divided by the second: a row of logits then has no
# rounding error in any dtype, and what is decided by a comparison is decided alike in all of them.
GRIDS = {
    torch.bfloat16: (3, 2),
    torch.float16: (7, 4),
    torch.float32: (255, 128),
    torch.float64: (255, 128),
}
# Inputs per token that belong to the targets: `shift` moves them along.
WITH_TARGETS = (
    "advantages",
    "importance_weights",
    "old_logps",
    "ref_logps",
    "sampling_logps",
    "token_weights",
)
HEADS = ("weight", "bias", "teacher_weight", "teacher_bias", "ref_weight", "ref_bias", "class_weights")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of a loss in plain values, so that its repr runs.

    Attributes:
        loss: a name in `losses.FAMILIES`.
        options: fields of the loss.
        inputs: what the loss takes beside the operands, and which kind of it.
        lengths: tokens of each sequence.
        peak: factor of the logits, a power of two.
        ignored: share of the targets that are `ignore_index`.
        mask: "bool" or the name of an integer dtype.
        padding: positions after the longest sequence, in the padded layout.
        layout: "padded" (S, T), "packed" (N,) with cu_seqlens, or "flat" (N,) without.
        strides: of every tensor: "contiguous", "offset", "step", "transposed", "mixed", or "expanded", where
            all sequences have the same hidden states.
        poison: NaN in the inputs of tokens that do not count.
        head: "tensor", or "module" for an nn.Linear.
        main: "add" for accumulate_into, "now" for accumulate_now.
        wrong: what must be refused: boundaries of another number of tokens ("short", "long", "late"), or a
            "float mask".
    """

    loss: str
    options: dict = field(default_factory=dict)
    inputs: dict = field(default_factory=dict)
    lengths: tuple[int, ...] = (3, 2)
    V: int = 7
    H: int = 3
    dtype: torch.dtype = torch.float32
    default_dtype: torch.dtype = torch.float32
    peak: float = 1.0
    ignored: float = 0.0
    bias: bool = False
    mask: str | None = None
    padding: int = 0
    layout: str = "padded"
    shift: bool = False
    num_items: float | None = None
    trained: tuple[str, ...] = ("hidden", "weight", "bias")
    upstream: float = 1.0
    strides: str = "contiguous"
    poison: bool = False
    head: str = "tensor"
    main: str | None = None
    grad_scale: float = 1.0
    wrong: str | None = None
    seed: int = 0

    def __repr__(self) -> str:
        empty = Case(loss=self.loss)
        given = [f.name for f in fields(self) if getattr(self, f.name) != getattr(empty, f.name)]
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in dict.fromkeys(['loss', *given]))})"

    @property
    def wide(self) -> torch.dtype:
        """Of what is computed from logits."""
        return torch.promote_types(self.dtype, torch.float32)


class World:
    """The tensors of a case, padded (S, T, ...) and in fp64; `ours` lays them out as the case says."""

    def __init__(self, case: Case):
        self.case, self.options = case, case.options
        self.S, self.T = len(case.lengths), max(case.lengths, default=0)
        self.T += case.padding if case.layout != "packed" else 0
        lengths = torch.tensor(case.lengths, dtype=torch.int64)
        self.valid = torch.arange(self.T) < lengths[:, None]
        self.ignore_index = case.options.get("ignore_index", -100)
        self.eye = torch.eye(case.V, dtype=torch.float64)
        self.head = {k: v for k, v in self.options.items() if k in ("softcap", "logit_scale", "temperature")}

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{name} {self.case.seed}".encode()))

    def random(self, name: str, *shape: int) -> Tensor:
        """Standard normal, exact in fp32."""
        return torch.randn(*shape, generator=self.generator(name), dtype=torch.float32).double()

    def uniform(self, name: str, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator(name), dtype=torch.float32).double()

    def ids(self, name: str, *shape: int, high: int | None = None) -> Tensor:
        return torch.randint(high or self.case.V, shape, generator=self.generator(name))

    def grid(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        """What products of operands are exact for."""
        most, step = GRIDS[self.case.dtype]
        return (self.ids(name, *shape, high=2 * most + 1) - most).double() / step * scale

    @cached_property
    def hidden(self) -> Tensor:
        if self.case.strides == "expanded":
            return self.grid("hidden", self.T, self.case.H).expand(self.S, -1, -1)
        return self.grid("hidden", self.S, self.T, self.case.H)

    @cached_property
    def weight(self) -> Tensor:
        return self.grid("weight", self.case.V, self.case.H, scale=self.case.peak)

    @cached_property
    def bias(self) -> Tensor | None:
        return self.grid("bias", self.case.V, scale=self.case.peak) if self.case.bias else None

    @cached_property
    def labels(self) -> Tensor:
        """(S, T) as the call takes them."""
        if "unlabelled" in self.case.inputs:
            return torch.full((self.S, self.T), 10**6)  # every position counts
        dropped = ~self.valid | (self.uniform("ignored", self.S, self.T) < self.case.ignored)
        return self.ids("labels", self.S, self.T).masked_fill(dropped, self.ignore_index)

    @cached_property
    def mask(self) -> Tensor | None:
        """(S, T) bool, as the call takes it."""
        return None if self.case.mask is None else self.uniform("mask", self.S, self.T) < 0.7

    def aligned(self, x: Tensor, fill: float) -> Tensor:
        """What goes with the targets, at the positions that predict them."""
        return reference.shift_left(x, fill) if self.case.shift else x

    @cached_property
    def targets(self) -> Tensor:
        """(S, T), masked and shifted."""
        labels = self.labels if self.mask is None else self.labels.masked_fill(~self.mask, self.ignore_index)
        return self.aligned(labels, self.ignore_index)

    @property
    def counted(self) -> Tensor:
        return self.targets != self.ignore_index

    @cached_property
    def products(self) -> Tensor:
        """(S, T, V) logits before bias, scale, softcap and temperature; exact."""
        return self.hidden @ self.weight.T

    @cached_property
    def logits(self) -> Tensor:
        return reference.head_logits(self.products, self.eye, self.bias, **self.head)

    @cached_property
    def logps(self) -> Tensor:
        """(S, T) of the targets, 0 where they are ignored."""
        found = self.logits.log_softmax(-1).gather(-1, self.targets.masked_fill(~self.counted, 0)[..., None])
        return found[..., 0].masked_fill(~self.counted, 0)

    def near_logps(self, name: str, spread: float) -> Tensor:
        """(S, T) log-probabilities of another policy."""
        near = (self.logps + spread * self.random(name, self.S, self.T)).clamp(max=0)
        return near.float().double()

    def nearly_tied(self) -> bool:
        """Whether rounding decides which id is the best of some position."""
        gaps = self.logits.amax(-1, keepdim=True) - self.logits
        return bool(((gaps > 0) & (gaps < 1e-5 * (1 + self.logits.abs()))).any())

    # Ours.

    def ours(self, name: str, x: Tensor | None) -> Tensor | None:
        """An input as the call takes it: dtype, layout, strides, and NaN where nobody should look."""
        if x is None:
            return None
        case, per_token = self.case, name not in HEADS and x.shape[:2] == (self.S, self.T) and x.dim() > 1
        operand = name.split("_")[-1] in ("hidden", "weight", "bias")
        if x.is_floating_point():
            x = x.to(case.dtype if operand else case.wide)
        if per_token and case.poison and x.is_floating_point():
            x = torch.where(self.counted.view(self.S, self.T, *[1] * (x.dim() - 2)), x, torch.nan)
        if per_token and case.shift and name in WITH_TARGETS:
            x = torch.cat((x[:, :1] * torch.nan if case.poison else x[:, :1], x[:, :-1]), dim=1)
        if per_token:
            x = self.lay(x)
        if case.strides == "expanded" and name == "hidden" and self.S:
            return x[0].to(DEVICE).expand(x.shape)
        return self.strided(name, x.to(DEVICE))

    def lay(self, x: Tensor) -> Tensor:
        """(S, T, ...) in the layout of the case."""
        if self.case.layout == "packed":
            return x[self.valid]
        return x.flatten(0, 1) if self.case.layout == "flat" else x

    def strided(self, name: str, x: Tensor) -> Tensor:
        kinds = ("contiguous", "offset", "step", "transposed")
        kind = kinds[zlib.crc32(name.encode()) % 4] if self.case.strides == "mixed" else self.case.strides
        if kind == "offset":
            return torch.cat((x.new_ones(3), x.reshape(-1)))[3:].view(x.shape)
        if kind == "step" and x.dim():
            return x.repeat_interleave(2, dim=-1)[..., ::2]
        if kind == "transposed" and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        return x.contiguous()

    @property
    def cu_seqlens(self) -> Tensor | None:
        if self.case.layout != "packed":
            return None
        ends = torch.tensor([0, *self.case.lengths]).cumsum(0)
        ends[-1] += {"short": -1, "long": 1}.get(self.case.wrong, 0)
        ends[0] += self.case.wrong == "late"
        return ends.to(DEVICE, torch.int32 if self.case.seed % 2 else torch.int64)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, forward_error: Tensor, backward_error: Tensor) -> Tensor:
        log_p = z.log_softmax(-1)
        ctx.save_for_backward((log_p + backward_error).exp())
        return log_p + forward_error

    @staticmethod
    def backward(ctx, g: Tensor):
        (p,) = ctx.saved_tensors
        return g - p * g.sum(-1, keepdim=True), None, None


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, forward_error: Tensor, backward_error: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(1 - y.square() + backward_error)
        return y + forward_error

    @staticmethod
    def backward(ctx, g: Tensor):
        (slope,) = ctx.saved_tensors
        return g * slope, None, None


class Rounding(TorchFunctionMode):
    """Full logits computed with the rounding errors of a dtype: each log-softmax, log-sum-exp and softcap is
    off by `eps` of its operands, up or down at random, forward and backward."""

    def __init__(self, eps: float, seed: int):
        super().__init__()
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)

    def error(self, like: Tensor, size: Tensor | float) -> Tensor:
        signs = torch.randint(2, like.shape, generator=self.generator) * 2 - 1
        return self.eps * size * signs

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "log_softmax" and args[0].numel():
            z = args[0].detach()
            # What is far below the largest has no share in the sum.
            size = 1 + z.clamp(min=z.amax(-1, keepdim=True) - 100).abs().amax(-1, keepdim=True)
            return _LogSoftmax.apply(args[0], self.error(z, size), self.error(z, size))
        if name == "tanh":
            return _Tanh.apply(args[0], self.error(args[0], 1.0), self.error(args[0], 2.0))
        found = func(*args, **(kwargs or {}))
        if name == "logsumexp":
            found = found + self.error(found, 1 + found.detach().abs())
        return found
