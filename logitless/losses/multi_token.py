"""Several heads over the same tokens: Medusa, and multi-token prediction.

Every head is one walk of the engine over its own targets, and all of them add to the same gradients: one d_hidden, one d_weight in fp32
at a time. Residual blocks are run on a chunk of rows, forward and backward, inside the walk. So nothing grows with the number of
heads but their own gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from logitless.losses import engine
from logitless.losses.arguments import prepare
from logitless.losses.base import LossOutput
from logitless.losses.checks import expect
from logitless.losses.cross_entropy import CrossEntropyLoss
from logitless.losses.engine import Problem
from logitless.losses.plan import Plan
from logitless.losses.walk import Blocks


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)); the identity at first."""

    def __init__(self, hidden_size: int, **options):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, **options)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """K heads for the tokens beyond the next: `num_layers` residual blocks each, and a projection of its own.

    The state dict has the layout of the reference implementation: `medusa_head.{k}.{layer}.linear.{weight,bias}` and
    `medusa_head.{k}.{num_layers}.weight`.

    Args:
        hidden_size: H of the backbone.
        vocab_size: V.
        num_heads: K, at least 1.
        num_layers: residual blocks per head.
        shared: use the base model's head in place of projections of their own.
        device, dtype: of the parameters.

    Reference: Cai et al., 2024, https://arxiv.org/abs/2401.10774, section 2.1.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, num_heads: int, num_layers: int = 1, *, shared: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        expect(num_heads >= 1, "num_heads", "at least 1", num_heads, "a model without heads needs no MedusaHeads")
        expect(num_layers >= 0, "num_layers", "0 or more", num_layers, "the paper's is 1")
        self.hidden_size, self.vocab_size, self.num_layers, self.shared = hidden_size, vocab_size, num_layers, shared
        options = {"device": device, "dtype": dtype}
        self.medusa_head = nn.ModuleList()
        for _ in range(num_heads):
            blocks = [ResidualBlock(hidden_size, **options) for _ in range(num_layers)]
            projection = [] if shared else [nn.Linear(hidden_size, vocab_size, bias=False, **options)]
            self.medusa_head.append(nn.Sequential(*blocks, *projection))

    def __len__(self) -> int:
        return len(self.medusa_head)

    @torch.no_grad()
    def start_from(self, weight: Tensor) -> "MedusaHeads":
        """Copy the base model's head (V, H) into every projection, so that training starts from its predictions, as in the paper."""
        expect(
            weight.shape == (self.vocab_size, self.hidden_size),
            "weight",
            "the base head (V, H)",
            tuple(weight.shape),
            "pass lm_head.weight",
        )
        for k in range(len(self) if not self.shared else 0):
            self.projection(k).copy_(weight)
        return self

    def blocks(self, k: int) -> nn.Sequential:
        return self.medusa_head[k][: self.num_layers]

    def projection(self, k: int) -> Tensor | None:
        """(V, H), or None where the base model's head is used."""
        return None if self.shared else self.medusa_head[k][self.num_layers].weight

    def forward(self, hidden: Tensor, base_weight: Tensor | None = None) -> Tensor:
        """Logits of all heads, (K, ..., V): for decoding a few positions, not for training."""
        weights = [base_weight if self.shared else self.projection(k) for k in range(len(self))]
        return torch.stack([nn.functional.linear(self.blocks(k)(hidden), weight) for k, weight in enumerate(weights)])


@dataclass
class Part:
    """One head's share of a loss."""

    name: str
    coefficient: float
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    offset: int  # position i predicts token i + offset
    module: nn.Module | None = None  # residual blocks

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {} if self.module is None else dict(self.module.named_parameters())


def ahead(labels: Tensor, offset: int, ignore_index: int, cu_seqlens: Tensor | None) -> Tensor:
    """Targets of a head: at each position the label `offset` further on in the same sequence, (B, T) or packed (N,)."""
    T = labels.shape[-1]
    positions = torch.arange(T, device=labels.device) + offset
    inside = positions < T
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(labels.device)
        end = ends[torch.searchsorted(ends, positions - offset, right=True).clamp(max=len(ends) - 1)]
        inside = positions < end
    return torch.where(inside, labels[..., positions.clamp(max=max(T - 1, 0))], ignore_index)


@dataclass(frozen=True, kw_only=True)
class MultiHeadLoss(CrossEntropyLoss):
    """What the losses of several heads share: a weighted sum of cross-entropies, solved head after head."""

    def __post_init__(self) -> None:
        coefficients = getattr(self, "coefficients", None)
        if coefficients is not None:
            object.__setattr__(self, "coefficients", tuple(map(float, coefficients)))
        super().__post_init__()
        expect(self.reduction != "none", "reduction", "'mean' or 'sum' for several heads", repr(self.reduction), "sum over the heads")
        expect(
            self.tp_group is None, "tp_group", "None for several heads", self.tp_group, "gather the heads, or take linear_logprobs of each"
        )
        expect(not self.return_logps, "return_logps", "False for several heads", True, "each has log-probabilities of its own")

    def solve_parts(
        self, parts: Sequence[Part], targets: Tensor, cu_seqlens: Tensor | None, num_items: float | Tensor | None
    ) -> LossOutput:
        if cu_seqlens is not None:
            expect(targets.dim() == 1, "targets", "shape (N,) with cu_seqlens", tuple(targets.shape), "flatten the tokens or leave it out")
        call = Call()
        for part in parts:
            labels = ahead(targets, part.offset, self.ignore_index, cu_seqlens)
            problem = prepare(self, part.hidden, part.weight, labels, part.bias, num_items, False, None, {})
            call.add(part, problem)
        loss, numbers = MultiHead.apply(self, call, *call.tensors)
        metrics = {}
        for part, (value, accuracy) in zip(parts, numbers.unbind(), strict=True):
            metrics |= {f"{part.name}/loss": value, f"{part.name}/accuracy": accuracy}
        return LossOutput(loss, metrics, call.plan)


@dataclass
class Call:
    """The parts of a call as problems whose tensors are numbered: the same tensor in two parts is one tensor with one gradient."""

    parts: list[tuple[Part, Problem]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    plan: Plan | None = None
    grad: bool = field(default_factory=torch.is_grad_enabled)

    def number(self, x: Tensor) -> int:
        for index, known in enumerate(self.tensors):
            if known is x:
                return index
        self.tensors.append(x)
        return len(self.tensors) - 1

    def add(self, part: Part, problem: Problem) -> None:
        self.parts.append((part, problem))
        for x in (part.hidden, part.weight, part.bias, *part.parameters.values()):
            if x is not None:
                self.number(x)


class MultiHead(torch.autograd.Function):
    """The parts of a call, solved one after the other in the forward pass; the backward pass scales what they left."""

    @staticmethod
    def forward(ctx, loss: MultiHeadLoss, call: Call, *tensors: Tensor):
        ctx.set_materialize_grads(False)
        needs = [call.grad and x.requires_grad for x in call.tensors]
        totals = Totals(call, needs)
        value, numbers, pending = 0.0, [], None
        for index, (part, problem) in enumerate(call.parts):
            solved, call.plan = totals.solve(loss, index, part, problem, pending)
            pending = solved.pending if pending is None else pending
            value = value + solved.loss
            numbers.append(torch.stack((solved.loss / part.coefficient, solved.metrics[0])))
            del solved  # its d_weight in fp32, before the next part allocates one
        ctx.save_for_backward(pending, *totals.finished())
        ctx.dtypes = [x.dtype for x in call.tensors]
        ctx.needs = needs
        numbers = torch.stack(numbers)
        ctx.mark_non_differentiable(numbers)
        return value, numbers

    @staticmethod
    def backward(ctx, upstream: Tensor | None, _):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: expected False, got True; logitless losses have no second derivative.")
        pending, *kept = ctx.saved_tensors
        found = [None] * len(ctx.needs)
        if upstream is not None:
            scale, kept = pending * upstream, iter(kept)
            owned = not torch._C._autograd._get_current_graph_task_keep_graph()
            for index, need in enumerate(ctx.needs):
                if need:
                    x = next(kept)
                    flat = x.reshape(-1, x.shape[-1])
                    found[index] = engine.finish(flat, scale, ctx.dtypes[index], owned=owned).view(x.shape)
        return (None, None, *found)


class Totals:
    """Gradients of a call's tensors, summed over its parts up to the factor `pending`.

    What several parts share is summed in fp32; what is one part's alone is cast as soon as the part is done, so that a single d_weight
    in fp32 is alive at a time. At order one the cast loses nothing that the last one, after an exact power of two, would not.
    """

    def __init__(self, call: Call, needs: Sequence[bool]):
        self.call, self.needs = call, needs
        self.sums: dict[int, Tensor] = {}
        self.last = {call.number(x): index for index, (part, _) in enumerate(call.parts) for x in (part.weight, part.bias) if x is not None}

    def solve(self, loss: MultiHeadLoss, index: int, part: Part, problem: Problem, pending: Tensor | None):
        hidden, weight = self.call.number(part.hidden), self.call.number(part.weight)
        bias = None if part.bias is None else self.call.number(part.bias)
        blocks = None
        if part.module is not None:
            blocks = Blocks(part.module, part.parameters, self.call.grad)
            # The blocks' own gradients come through d_hidden.
            if blocks.trained:
                problem = problem._replace(needs=replace(problem.needs, hidden=True))
        shared = {"d_weight": self.sums.get(weight), "d_bias": None if bias is None else self.sums.get(bias)}
        solved, plan = engine.solve(loss, problem, static=True, coefficient=part.coefficient, pending=pending, blocks=blocks, **shared)
        if self.needs[hidden]:
            d_hidden = solved.d_hidden.view(part.hidden.shape)
            known = self.sums.get(hidden)
            self.sums[hidden] = d_hidden.to(solved.loss.dtype) if known is None else known.add_(d_hidden)
        for key, gradient in ((weight, solved.d_weight), (bias, solved.d_bias)):
            if gradient is not None:
                self.sums[key] = gradient if self.last[key] > index else gradient.to(self.call.tensors[key].dtype)
        if blocks is not None:
            for name, gradient in zip(blocks.trained, blocks.grads, strict=True):
                self.sums[self.call.number(part.parameters[name])] = gradient.to(part.parameters[name].dtype)
        return solved, plan

    def finished(self) -> list[Tensor]:
        """Gradients of the tensors that need one, in their shapes; zeros where no part reached."""
        found = []
        for index, (x, need) in enumerate(zip(self.call.tensors, self.needs, strict=True)):
            if need:
                found.append(self.sums[index].view(x.shape) if index in self.sums else torch.zeros_like(x))
        return found


@dataclass(frozen=True, kw_only=True)
class MedusaLoss(MultiHeadLoss):
    """Cross-entropy of the base head and of K Medusa heads, each a token further ahead.

        base_coefficient * CE(base, i + 1) + sum_k coefficient_k * CE(head k, i + 2 + k)

    Args:
        coefficients: one per head; default `decay ** k`.
        decay: of the default coefficients; the paper's is 0.8.
        base_coefficient: of the base model's own loss; 0 in stage 1, where the backbone and its head are frozen.

    Beside these it has the fields of `CrossEntropyLoss`. The call takes hidden (B, T, H), heads (`MedusaHeads`) and targets (B, T), the
    labels at their own positions (as with `shift=True`); or hidden (N, H), targets (N,) and `cu_seqlens`. By keyword `base_weight` (V, H)
    and `base_bias` (V,), needed unless base_coefficient is 0 and the heads have projections of their own; `num_items` replaces every
    head's count of targets. What does not require a gradient gets none: freeze the backbone and the base head for stage 1.

    Metrics: base/loss, base/accuracy, head_{k}/loss, head_{k}/accuracy (top-1), without coefficients.

    Reference: Cai et al., 2024, https://arxiv.org/abs/2401.10774, sections 2.2.
    """

    coefficients: Sequence[float] | None = None
    decay: float = 0.8
    base_coefficient: float = 1.0

    def __call__(
        self, hidden: Tensor, heads: MedusaHeads, targets: Tensor, *, base_weight: Tensor | None = None, base_bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None, num_items: float | Tensor | None = None,
    ) -> LossOutput:  # fmt: skip
        K = len(heads)
        coefficients = tuple(self.decay**k for k in range(K)) if self.coefficients is None else self.coefficients
        expect(len(coefficients) == K, "coefficients", f"{K} numbers, one per head", len(coefficients), "or None for powers of decay")
        needed = self.base_coefficient != 0 or heads.shared
        expect(base_weight is not None or not needed, "base_weight", "the base head (V, H)", None, "or base_coefficient=0.0")
        if base_weight is not None:
            expect(
                base_weight.shape[0] == heads.vocab_size, "base_weight", f"{heads.vocab_size} rows, as the heads have",
                tuple(base_weight.shape), "base and heads predict the same ids",
            )  # fmt: skip
        parts = []
        if self.base_coefficient:
            parts.append(Part("base", self.base_coefficient, hidden, base_weight, base_bias, 1))
        for k, coefficient in enumerate(coefficients):
            weight = base_weight if heads.shared else heads.projection(k)
            module = heads.blocks(k) if heads.num_layers else None
            if coefficient:
                parts.append(Part(f"head_{k}", coefficient, hidden, weight, None, k + 2, module))
        expect(len(parts) > 0, "coefficients", "one that is not 0", coefficients, "a loss needs a head")
        return self.solve_parts(parts, targets, cu_seqlens, num_items)


@dataclass(frozen=True, kw_only=True)
class MultiTokenLoss(MultiHeadLoss):
    """Multi-token prediction: several hidden states under one head, the k-th predicting k + 1 tokens ahead.

        sum_k coefficient_k * CE(weight @ hidden_k, i + 1 + k)

    Args:
        coefficients: one per hidden state; default 1 for the first and 0.3 for the others (DeepSeek-V3's lambda).

    The call takes a sequence of hidden states, each (B, T, H) or packed (N, H) with `cu_seqlens`, weight (V, H), and targets, the labels at
    their own positions. Metrics: depth_{k}/loss, depth_{k}/accuracy.

    References: Gloeckle et al., 2024, https://arxiv.org/abs/2404.19737; DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437, section 2.2.
    """

    coefficients: Sequence[float] | None = None

    def __call__(
        self, hiddens: Sequence[Tensor], weight: Tensor, targets: Tensor, *, bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None, num_items: float | Tensor | None = None,
    ) -> LossOutput:  # fmt: skip
        depths = len(hiddens)
        expect(depths > 0, "hiddens", "at least one tensor of hidden states", depths, "pass the model's own first")
        coefficients = (1.0,) + (0.3,) * (depths - 1) if self.coefficients is None else self.coefficients
        expect(len(coefficients) == depths, "coefficients", f"{depths} numbers, one per hidden state", len(coefficients), "or None")
        parts = [
            Part(f"depth_{k}", coefficient, hidden, weight, bias, k + 1)
            for k, (hidden, coefficient) in enumerate(zip(hiddens, coefficients, strict=True))
            if coefficient
        ]
        expect(len(parts) > 0, "coefficients", "one that is not 0", coefficients, "a loss needs a head")
        return self.solve_parts(parts, targets, cu_seqlens, num_items)
