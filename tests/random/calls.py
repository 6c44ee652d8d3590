"""A random call of a loss: `Call` says in plain values what is called with what, `World` has the numbers."""

import zlib
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests import reference
from tests.support import DEVICE

# Operands are whole numbers up to the first, divided by the second: logits then have no rounding error in any
# dtype, and what a comparison decides is decided alike everywhere.
GRIDS = {torch.bfloat16: (3, 2), torch.float16: (7, 4), torch.float32: (7, 4), torch.float64: (7, 4)}
# Inputs that belong to the targets: `shift` moves them along.
WITH_TARGETS = (
    "advantages",
    "importance_weights",
    "old_logps",
    "ref_logps",
    "sampling_logps",
    "token_weights",
)
WITH_TARGETS += ("nll_targets",)
# Inputs that are per sequence or per token, by loss, and of every other policy loss.
EITHER = {"DPO": ("ref_logps",), "KTO": ("ref_logps",), "RLOO": ("old_logps",)}
EITHER_OF_POLICIES = ("advantages", "importance_weights")


# An entry of a float mask that is neither 0 nor 1.
WRONG_MASKS = {
    "additive mask": -torch.inf,
    "finite additive mask": -1e4,
    "weights": 0.5,
    "NaN mask": torch.nan,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to run, whose repr leaves defaults out and runs as it is."""

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {
            f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(self)
        }
        shown = ", ".join(f"{name}={x!r}" for name, x in given.items() if x != defaults[name])
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Call(Case):
    """One call of a loss.

    Attributes:
        loss: a name in `losses.FAMILIES`.
        options, inputs: fields of the loss; what its call takes, by name and kind.
        lengths: tokens of each sequence, and `padding` positions more in a padded call.
        peak: factor of the logits.
        ignored: share of the targets that are `ignore_index`.
        layout: "padded" (S, T), "packed" (N,) with cu_seqlens, or "flat" (N,).
        strides: "contiguous", "offset", "step", "transposed", a mixture, or "expanded": one sequence's hidden
            states for all.
        poison: NaN where a token does not count.
        module: the head is an nn.Linear.
        main: whether the call has accumulate_into.
        wrong: makes the call one to be refused: "short", "long" or "late" boundaries, or one of WRONG_MASKS.
    """

    loss: str
    options: dict = field(default_factory=dict)
    inputs: dict = field(default_factory=dict)
    lengths: tuple[int, ...] = (3, 2)
    padding: int = 0
    V: int = 7
    H: int = 3
    dtype: torch.dtype = torch.float32
    default_dtype: torch.dtype = torch.float32
    peak: float = 1.0
    ignored: float = 0.0
    bias: bool = False
    mask: str | None = None
    layout: str = "padded"
    shift: bool = False
    num_items: float | None = None
    trained: tuple[str, ...] = ("hidden", "weight", "bias")
    upstream: float = 1.0
    strides: str = "contiguous"
    poison: bool = False
    module: bool = False
    main: bool = False
    grad_scale: float = 1.0
    wrong: str | None = None
    seed: int = 0

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class World:
    """The tensors of a call, padded (S, T, ...) and in fp64; `ours` lays them out as the call says."""

    def __init__(self, case: Call):
        self.case, self.options, self.S = case, case.options, len(case.lengths)
        # Never (S, 1) where the call is packed: that shape is per sequence.
        self.T = max(case.lengths, default=0) + (2 if case.layout == "packed" else case.padding)
        self.valid = torch.arange(self.T) < torch.tensor(case.lengths, dtype=torch.int64)[:, None]
        self.ignore_index = case.options.get("ignore_index", -100)
        self.eye = torch.eye(case.V, dtype=torch.float64)
        self.inputs: dict = {}
        transform = {name: case.options[name] for name in TRANSFORM if name in case.options}
        self.head = transform | {"bias": self.grid("bias", case.V, scale=case.peak) if case.bias else None}

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{name} {self.case.seed}".encode()))

    def random(self, name: str, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator(name), dtype=torch.float32).double()

    def uniform(self, name: str, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator(name), dtype=torch.float32).double()

    def ids(self, name: str, *shape: int, high: int | None = None) -> Tensor:
        return torch.randint(high or self.case.V, shape, generator=self.generator(name))

    def grid(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        most, step = GRIDS[self.case.dtype]
        return (self.ids(name, *shape, high=2 * most + 1) - most).double() / step * scale

    @cached_property
    def hiddens(self) -> list[Tensor]:
        """(S, T, H) each: one, or one a depth."""
        S, T, H = self.S, self.T, self.case.H
        if self.case.strides == "expanded":
            return [self.grid("hidden 0", T, H).expand(S, -1, -1)]
        return [self.grid(f"hidden {k}", S, T, H) for k in range(self.case.inputs.get("depths", 1))]

    @cached_property
    def weight(self) -> Tensor:
        return self.grid("weight", self.case.V, self.case.H, scale=self.case.peak)

    @cached_property
    def products(self) -> Tensor:
        """(depths, S, T, V) logits before bias, scale, softcap and temperature."""
        return torch.stack([hidden @ self.weight.T for hidden in self.hiddens])

    @cached_property
    def labels(self) -> Tensor:
        """(S, T) as the call takes them."""
        if "unlabelled" in self.case.inputs:  # every position counts
            there = self.valid | torch.tensor(self.case.layout != "packed")
            return torch.where(there, 10**6, self.ignore_index)
        dropped = ~self.valid | (self.uniform("ignored", self.S, self.T) < self.case.ignored)
        return self.ids("labels", self.S, self.T).masked_fill(dropped, self.ignore_index)

    @cached_property
    def mask(self) -> Tensor:
        """(S, T) bool, as the call takes it."""
        return (self.uniform("mask", self.S, self.T) < 0.7) | torch.tensor(self.case.mask is None)

    @property
    def numbers_of_mask(self) -> Tensor:
        """(S, T) in the dtype in which the call takes it."""
        numbers = self.mask.to(getattr(torch, self.case.mask))
        if self.case.wrong in WRONG_MASKS:
            numbers[:, 1] = WRONG_MASKS[self.case.wrong]
        return numbers

    @cached_property
    def targets(self) -> Tensor:
        """(S, T), masked, at the positions that predict them."""
        return self.aligned(self.labels.masked_fill(~self.mask, self.ignore_index), self.ignore_index)

    def aligned(self, x: Tensor, fill: float) -> Tensor:
        return reference.shift_left(x, fill) if self.case.shift else x

    @property
    def counted(self) -> Tensor:
        return self.targets != self.ignore_index

    @cached_property
    def logps(self) -> Tensor:
        """(S, T) of the targets, 0 where they are ignored."""
        options = {"ignore_index": self.ignore_index, **self.head}
        return reference.token_logprobs(self.hiddens[0], self.weight, self.targets, **options)[0]

    def near_logps(self, name: str, spread: float) -> Tensor:
        """(S, T) log-probabilities of another policy."""
        return (self.logps + spread * self.random(name, self.S, self.T)).clamp(max=0).float().double()

    # As the call takes it.

    def ours(self, name: str, x):
        """An input in the call's dtype, layout and strides, with NaN where nobody should look."""
        if isinstance(x, tuple):
            return tuple(self.ours(name, part) for part in x)
        if not isinstance(x, Tensor):
            return x
        case, per_token = self.case, x.dim() > 1 and x.shape[:2] == (self.S, self.T) and "weight" != name[-6:]
        if x.is_floating_point() and name != "mask":
            narrow = name.endswith(("hidden", "weight", "bias"))
            given = x.dtype if name == "teacher_logprobs_topk" else case.wide
            x = x.to(case.dtype if narrow else given)
        if per_token and case.poison and x.is_floating_point() and name != "mask":
            x = torch.where(self.counted.view(self.S, self.T, *[1] * (x.dim() - 2)), x, torch.nan)
        if per_token and case.shift and name in WITH_TARGETS:
            first = x if x.is_floating_point() else self.labels
            x = torch.cat((first[:, :1], x[:, :-1]), dim=1)
        x = self.lay(x) if per_token else x
        if name in EITHER.get(case.loss, EITHER_OF_POLICIES) and self.shapes_say_the_level:
            x = x[None] if per_token else x[:, None]
        if case.strides == "expanded" and name == "hidden" and self.S:
            return x[0].to(DEVICE).expand(x.shape)
        return strided(x.to(DEVICE), case.strides, zlib.crc32(name.encode()))

    @property
    def shapes_say_the_level(self) -> bool:
        """Whether inputs per sequence have shape (S, 1), and those per token (1, N): needed where S is N."""
        same = len(self.case.lengths) == sum(self.case.lengths)
        return self.case.layout == "packed" and (same or self.case.seed % 3 == 0)

    def lay(self, x: Tensor) -> Tensor:
        """(S, T, ...) in the layout of the call."""
        if self.case.layout == "packed":
            return x[self.valid]
        return x.flatten(0, 1) if self.case.layout == "flat" else x

    @property
    def cu_seqlens(self) -> Tensor:
        ends = torch.tensor([0, *self.case.lengths]).cumsum(0)
        ends[-1] += {"short": -1, "long": 1}.get(self.case.wrong, 0)
        ends[0] += self.case.wrong == "late"
        return ends.to(DEVICE, torch.int32 if self.case.seed % 2 else torch.int64)


TRANSFORM = ("softcap", "logit_scale", "temperature")


def strided(x: Tensor, kind: str, number: int) -> Tensor:
    """The same numbers, stored in another way."""
    if kind == "mixed":
        kind = ("contiguous", "offset", "step", "transposed")[number % 4]
    if kind == "offset":
        return torch.cat((x.new_ones(3), x.reshape(-1)))[3:].view(x.shape)
    if kind == "step" and x.dim():
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if kind == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.contiguous()


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, error: Tensor, backward_error: Tensor) -> Tensor:
        log_p = z.log_softmax(-1)
        ctx.save_for_backward((log_p + backward_error).exp())
        return log_p + error

    @staticmethod
    def backward(ctx, g: Tensor):
        (p,) = ctx.saved_tensors
        return g - p * g.sum(-1, keepdim=True), None, None


class Rounding(TorchFunctionMode):
    """Full logits as a narrower dtype computes them: each log-softmax and log-sum-exp is off by `eps` of its
    operands, up or down at random, forward and backward."""

    def __init__(self, eps: float, seed: int):
        super().__init__()
        self.eps, self.generator = eps, torch.Generator("cpu").manual_seed(seed)

    def error(self, like: Tensor, size: Tensor) -> Tensor:
        signs = torch.randint(2, like.shape, generator=self.generator, device="cpu") * 2 - 1
        return self.eps * size * signs.to(like.device)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, x = getattr(func, "__name__", ""), args[0] if args else None
        if name == "log_softmax" and x.numel():
            # What is far below the largest has no share in the sum.
            z = x.detach()
            size = 1 + z.clamp(min=z.amax(-1, keepdim=True) - 100).abs().amax(-1, keepdim=True)
            return _LogSoftmax.apply(x, self.error(z, size), self.error(z, size))
        actual = func(*args, **(kwargs or {}))
        return actual + self.error(actual, 1 + actual.detach().abs()) if name == "logsumexp" else actual
