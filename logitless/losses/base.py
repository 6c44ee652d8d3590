"""`FusedLinearBase`, the one autograd Function, and the two ways to write a loss for it: `TokenLoss` and `LogitsLoss`.

A call runs in one of two ways:

* The loss is *solved* in the forward pass (`reduction="mean"` or `"sum"`): one walk over the chunks leaves the loss and its
  gradients, accumulated up to a scalar. The backward pass multiplies them by that scalar and the upstream gradient, in the same
  pass that casts d_weight to the weight's dtype.
* *Per-token numbers* are handed out (`reduction="none"`, `linear_logprobs`): what follows is ordinary autograd, and the backward
  pass walks the chunks again once their gradients are known. With a frozen head that second walk is not needed: the first one
  keeps d logp / d hidden, one vector per token.

The whole of either pass is one opaque operator for `torch.compile`, which would otherwise unroll the chunk loop into a new graph
for every length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from logitless.kernels.cross_entropy import TokenStats, allocate_stats
from logitless.kernels.head import Head
from logitless.losses import engine
from logitless.losses.batch import Batch, Segments, Term, settled, tallied, unreduced
from logitless.losses.checks import check_choice, check_operands, expect
from logitless.losses.engine import Problem
from logitless.losses.plan import Plan
from logitless.losses.walk import Needs

REDUCTIONS = ("mean", "sum", "none")
SCOPES = ("token", "group", "batch")


class LossOutput(NamedTuple):
    """What a loss returns.

    Args:
        loss: fp32 (fp64 for fp64 operands); 0-d, or the shape of the loss's unit with `reduction="none"`.
        metrics: detached 0-d tensors by name.
        plan: what ran; None inside a compiled graph, which is traced before anything runs.
        logps: log-probabilities of the targets, in their shape, 0 where ignored, without gradient; None unless `return_logps`.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    plan: Plan | None
    logps: Tensor | None = None


_LOSSES: dict[str, "LinearLoss"] = {}


@torch.compiler.assume_constant_result
def _register(cls: type, values: tuple) -> str:
    """A string that names a loss inside a compiled graph. Works where a loss is built inside one, too."""
    key = f"{cls.__module__}.{cls.__qualname__}@{id(cls):x}{values}"
    if key not in _LOSSES:
        loss = _LOSSES[key] = object.__new__(cls)
        for field, value in zip(fields(cls), values, strict=True):
            object.__setattr__(loss, field.name, value)
        object.__setattr__(loss, "key", key)
    return key


@dataclass(frozen=True, kw_only=True)
class LinearLoss:
    """What every loss has: how logits come from the head, and how the work is bounded.

    Args:
        ignore_index: targets with this id are not supervised; they are never projected.
        reduction: "mean" (the sum over the normalizer of each unit), "sum" or "none".
        softcap, logit_scale, temperature: z = softcap * tanh(logit_scale * (h·w + b) / softcap) / temperature.
        logits_budget: bytes that a chunk of logits and its temporaries may take; default 1 GiB, less on small cards and CPUs.
        accum_dtype: dtype in which d_weight is summed over chunks; default fp32 when there is more than one.
        logits_dtype: dtype of the chunk of logits; default that of the operands. fp32 gives log-probs without rounding noise.
        compact: leave unsupervised rows out before the first product, at the price of one host sync.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    logits_budget: int | None = None
    accum_dtype: torch.dtype | None = None
    logits_dtype: torch.dtype | None = None
    compact: bool = True

    # Tokens that must be seen together: "token", "group" (`sequences_per_group` sequences, 2 for a pair) or "batch".
    scope: ClassVar[str] = "token"
    # The unit that `num_items` counts, and whose normalizer stays out of the chunk.
    unit: ClassVar[str] = "tokens"
    # Names of the tensors that the call takes besides the head's: (N,) per token, (B,) per sequence, or whole.
    token_inputs: ClassVar[tuple[str, ...]] = ()
    sequence_inputs: ClassVar[tuple[str, ...]] = ()
    shared_inputs: ClassVar[tuple[str, ...]] = ()
    metric_names: ClassVar[tuple[str, ...]] = ()
    sequences_per_group: ClassVar[int] = 1
    teacher: ClassVar[bool] = False
    reference: ClassVar[bool] = False
    is_logits_loss: ClassVar[bool] = False
    return_logps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("scope", self.scope, SCOPES)
        expect(self.temperature > 0, "temperature", "a positive number", self.temperature, "use 1.0 for none")
        expect(self.softcap is None or self.softcap > 0, "softcap", "a positive number or None", self.softcap, "use None for none")
        expect(
            self.logits_budget is None or self.logits_budget > 0,
            "logits_budget",
            "a positive number of bytes",
            self.logits_budget,
            "leave it None for the default",
        )
        for name in ("accum_dtype", "logits_dtype"):
            dtype = getattr(self, name)
            expect(dtype is None or dtype.is_floating_point, name, "a floating-point dtype or None", dtype, "leave it None for the default")
        object.__setattr__(self, "key", _register(type(self), tuple(getattr(self, field.name) for field in fields(self))))

    @property
    def head(self) -> Head:
        return Head(self.softcap, self.logit_scale, self.temperature)

    @property
    def inputs(self) -> tuple[str, ...]:
        teacher = ("teacher_hidden", "teacher_weight", "teacher_bias") if self.teacher else ()
        reference = ("ref_hidden", "ref_weight", "ref_bias") if self.reference else ()
        return self.token_inputs + self.sequence_inputs + self.shared_inputs + teacher + reference

    def terms(self, stats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        """The loss itself, unreduced: ({name: Term}, {metric name: Term}). A pure function of tensors."""
        raise NotImplementedError

    def normalizers(self, counts: Mapping[str, Tensor], targets: Tensor, inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """What the sum over each unit is divided by in a mean: how many of it the call contains."""
        return dict(counts)

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, num_items: float | Tensor | None = None,
        shift: bool = False, cu_seqlens: Tensor | None = None, **inputs: Tensor | None,
    ) -> LossOutput:  # fmt: skip
        """
        Args:
            hidden: (..., H); (B, T, H), or flat (N, H) with `cu_seqlens`, where sequences matter.
            weight: (V, H), in hidden's dtype (any, under autocast).
            targets: (...) int64 token ids, or `ignore_index`.
            bias: (V,).
            num_items: normalizer of the mean, in the loss's own unit; under data parallelism the global count / world size.
            shift: targets are unshifted labels of the same length, and per-token inputs go with them: position i predicts targets[i + 1].
            cu_seqlens: (sequences + 1,) int64 boundaries of packed sequences.
            inputs: the tensors that the loss declares.
        """
        unknown = [name for name in inputs if name not in self.inputs]
        expect(not unknown, "inputs", f"names among {self.inputs}", unknown, f"see what {type(self).__name__} takes", TypeError)
        problem = prepare(self, hidden, weight, targets, bias, num_items, shift, cu_seqlens, inputs)
        if self.reduction != "none":
            (loss, metrics, logps), plan = call(self, problem, solved=True)
        else:
            loss, metrics, logps, plan = _unreduced(self, problem, targets.shape)
        logps = logps.view(targets.shape) if self.return_logps else None
        return LossOutput(loss, dict(zip(self.metric_names, metrics.unbind(), strict=True)), plan, logps)


@dataclass(frozen=True, kw_only=True)
class TokenLoss(LinearLoss):
    """A loss that depends on the logits only through per-token numbers: `terms(stats: TokenStats, batch)`.

    `differentiates` names the numbers that carry a gradient, `observes` those that metrics look at without one:
    logps, lse, entropy, sum_logits (class-weighted), log_sum_sq_probs and is_top1; logps and lse are always there.

    Args:
        return_logps: hand out the tokens' log-probabilities beside the loss, so that nobody needs another pass for them.
    """

    return_logps: bool = False

    differentiates: ClassVar[tuple[str, ...]] = ("logps",)
    observes: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class LogitsLoss(LinearLoss):
    """Any differentiable function of a chunk of logits: `terms(logits (n, V), batch)`, every term and metric one value per token.

    With `teacher = True` the call also takes teacher_hidden (..., H'), teacher_weight (V, H') and teacher_bias, and the batch has
    `teacher_logits`, which get no gradient.
    """

    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0

    is_logits_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.scope == "token", "scope", "'token' for a LogitsLoss", repr(self.scope), "write it as a TokenLoss")

    @property
    def teacher_head(self) -> Head:
        return Head(self.teacher_softcap, self.teacher_logit_scale, self.temperature)

    def has_kernel(self, device: torch.device, dtype: torch.dtype, inputs: Mapping[str, Tensor | None]) -> bool:
        """Whether `kernel` takes the place of `terms` and its derivative in this call."""
        return False

    def kernel(
        self, logits: Tensor, bias: Tensor | None, batch: Batch, factors: Tensor | None, gradient: Tensor | None
    ) -> tuple[dict[str, Term], dict[str, Term]]:
        """What `terms` returns, from products with the heads; with `factors` (n,) the gradient of sum(factors * loss) is written."""
        raise NotImplementedError


def shifted(x: Tensor, last: float) -> Tensor:
    """Labels (..., T), or what goes with them, of the same length as hidden -> each position gets the next one's, the last `last`."""
    return torch.cat((x[..., 1:], torch.full_like(x[..., :1], last)), dim=-1)


def prepare(
    loss: LinearLoss, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, num_items: float | Tensor | None,
    shift: bool, cu_seqlens: Tensor | None, inputs: Mapping[str, Tensor | None],
) -> Problem:  # fmt: skip
    """Check a call's arguments and flatten them to one row per token."""
    weight, bias = _gathered("weight", weight), _gathered("bias", bias)
    autocast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    check_operands(hidden, weight, targets, bias, autocast=autocast)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else weight.dtype
    V, H = weight.shape
    if shift:
        targets = shifted(targets, loss.ignore_index)
        inputs = {name: shifted(x, 0) if x is not None and name in loss.token_inputs else x for name, x in inputs.items()}
    for name in ("accum_dtype", "logits_dtype"):
        wanted = getattr(loss, name)
        expect(
            wanted is None or wanted == dtype or wanted == torch.promote_types(wanted, torch.promote_types(dtype, torch.float32)),
            name, f"None, {dtype} or a wider dtype", wanted, "leave it None for the default",
        )  # fmt: skip
    sequences = _sequences(loss, hidden, cu_seqlens)
    flat = {name: _flat_input(loss, name, inputs.get(name), targets.shape, sequences) for name in loss.inputs}
    if cu_seqlens is not None:
        whole = not cu_seqlens.is_floating_point() and cu_seqlens.dim() == 1
        expect(whole, "cu_seqlens", "(sequences + 1,) int64 boundaries", f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}", "pass boundaries")
        expect(hidden.dim() == 2, "hidden", "shape (N, H) with cu_seqlens", tuple(hidden.shape), "flatten the tokens or leave it out")
        cu_seqlens = cu_seqlens.to(hidden.device, torch.int64)
    grad = torch.is_grad_enabled()
    needs = Needs(grad and hidden.requires_grad, grad and weight.requires_grad, grad and bias is not None and bias.requires_grad)
    if num_items is not None:
        if not isinstance(num_items, Tensor):
            num_items = torch.full((), num_items, dtype=torch.float32, device=hidden.device)
        num_items = num_items.to(hidden.device)
        expect(num_items.dim() == 0, "num_items", "a number or a 0-d tensor", tuple(num_items.shape), "sum it first")
    return Problem(hidden.reshape(-1, H), weight, bias, targets.reshape(-1).long(), num_items, cu_seqlens, flat, sequences, dtype, needs)


def _gathered(name: str, x: Tensor | None) -> Tensor | None:
    """A sharded (DTensor) parameter, whole; its gradient goes back averaged over the ranks, as FSDP reduces gradients."""
    if x is None or not torch.distributed.is_available():
        return x
    from torch.distributed.tensor import DTensor, Partial
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(x, DTensor):
        return x.full_tensor(grad_placements=[Partial("avg")] * x.device_mesh.ndim)
    quantized = isinstance(x, Tensor) and is_traceable_wrapper_subclass(x)
    expect(not quantized, name, "a dense tensor or a DTensor", type(x).__name__, "dequantize it before the call", TypeError)
    return x


def _flat_input(loss: LinearLoss, name: str, x: Tensor | None, shape: torch.Size, sequences: int) -> Tensor | None:
    if x is None or name in loss.shared_inputs:
        return x
    if name in loss.sequence_inputs:
        expect(x.shape[:1] == (sequences,), name, f"shape ({sequences},), one entry per sequence", tuple(x.shape), "match the batch")
        return x
    if name.endswith(("_weight", "_bias")):
        return _gathered(name, x.detach())
    if name in loss.token_inputs or name in ("teacher_hidden", "ref_hidden"):
        fits = x.shape[: len(shape)] == shape
        expect(fits, name, f"a shape that starts with targets' {tuple(shape)}", tuple(x.shape), "give one entry per token")
        return x.reshape(-1, *x.shape[len(shape) :])
    return x


def _sequences(loss: LinearLoss, hidden: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many sequences the call has; 0 for a loss that does not look at them."""
    if loss.scope == "token" and not loss.sequence_inputs and loss.unit == "tokens":
        return 0
    if cu_seqlens is None and hidden.dim() < 3:
        expect(loss.scope == "batch" and not loss.sequence_inputs, "hidden", "shape (B, T, H)", tuple(hidden.shape), "or pass cu_seqlens")
        return 0
    count = hidden.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expect(
        count % loss.sequences_per_group == 0, "hidden", f"a multiple of {loss.sequences_per_group} sequences", count,
        "give every group all of its sequences",
    )  # fmt: skip
    return count


def _names_out(loss: LinearLoss) -> tuple[str, ...]:
    """Names of the per-token numbers that a call hands out, in order."""
    if loss.is_logits_loss:
        return ("values", *loss.metric_names)
    return tuple(name for name, _ in allocate_stats((*loss.differentiates, *loss.observes), 0, torch.float32, torch.device("cpu")).items())


def _differentiable(loss: LinearLoss) -> tuple[str, ...]:
    """Which of them carry a gradient; lse does for nothing."""
    return ("values",) if loss.is_logits_loss else (*loss.differentiates, "lse")


def call(loss: LinearLoss, problem: Problem, *, solved: bool) -> tuple[tuple[Tensor, ...], Plan | None]:
    """Run a call under autograd: (loss, metrics) if solved, else the numbers of `_names_out`; and the plan."""
    p = problem
    needs = [p.needs.hidden, p.needs.weight, p.needs.bias]
    tensors = (p.hidden, p.weight, p.bias, p.targets, p.num_items, p.cu_seqlens, *(p.inputs[name] for name in loss.inputs))
    if not p.needs.any:
        outputs, _, _, plan = _forward(loss, solved, p.sequences, p.dtype, needs, tensors)
        return outputs, plan
    plans: list[Plan] = []
    outputs = FusedLinearBase.apply(loss, plans, solved, p.sequences, p.dtype, needs, *tensors)
    return outputs, plans[0] if plans else None


def _forward(loss: LinearLoss, solved: bool, sequences: int, dtype: torch.dtype, needs: list[bool], tensors: tuple[Tensor | None, ...]):
    """(outputs, what the backward pass needs of this one, rows, plan), eagerly or through an operator."""
    *head, cu_seqlens = tensors[:6]
    arguments = (*head, cu_seqlens, list(tensors[6:]), sequences, dtype, needs)
    if torch.compiler.is_compiling():
        if solved:
            *outputs, pending, d_hidden, d_weight, d_bias = _solve_op(*arguments, loss.key)
            return tuple(outputs), [pending, d_hidden, d_weight, d_bias], None, None
        d_logp, *numbers = _numbers_op(*arguments, loss.key)
        return tuple(numbers), [d_logp], None, None
    problem = _problem(loss, *arguments)
    if solved:
        (*outputs, pending, d_hidden, d_weight, d_bias), plan = engine.solve(loss, problem, static=False)
        return tuple(outputs), [pending, d_hidden, d_weight, d_bias], None, plan
    found, d_logp, rows, plan = engine.token_numbers(loss, problem)
    return tuple(found[name] for name in _names_out(loss)), [d_logp], rows, plan


def _unreduced(loss: LinearLoss, problem: Problem, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor | None, Plan | None]:
    """reduction="none": the terms on all tokens at once, in ordinary autograd over the per-token numbers."""
    numbers, plan = call(loss, problem, solved=False)
    named = dict(zip(_names_out(loss), numbers, strict=True))
    if loss.is_logits_loss:
        values = named.pop("values")
        return values.view(shape), torch.stack(list(named.values())) if named else values.new_zeros(0), None, plan
    segments = None
    if problem.sequences:
        tokens = problem.targets
        even = tokens.new_full((problem.sequences,), tokens.shape[0] // problem.sequences)
        lengths = even if problem.cu_seqlens is None else problem.cu_seqlens.diff()
        segments = Segments(lengths, tokens.shape[0], problem.sequences, 1)
    batch = Batch(problem.targets, problem.weight.shape[0], problem.inputs, segments, ignore_index=loss.ignore_index)
    terms, metrics = batch.masked(*loss.terms(TokenStats(**named), batch))
    values = unreduced(terms)
    supervised = problem.supervised(loss.ignore_index)
    chosen = (supervised & batch.is_chosen).sum() if problem.sequences else 0
    factors, _ = engine.scales(loss, problem, supervised.sum(), chosen, reduced=False)
    found = tallied(metrics, factors.metrics)
    stacked = torch.stack([settled([found[name]]).to(values.dtype) for name in loss.metric_names]) if found else values.new_zeros(0)
    values = values.view(shape) if values.shape == problem.targets.shape else values
    return values, stacked, named["logps"].detach(), plan


class FusedLinearBase(torch.autograd.Function):
    """hidden, head and targets in; the loss, or its per-token numbers, out; the logits nowhere.

    Forward and backward are `engine.solve`, `engine.token_numbers` and `engine.token_gradients`, called directly in eager mode and
    as opaque operators under `torch.compile`.
    """

    @staticmethod
    def forward(ctx, loss, plans, solved, sequences, dtype, needs, *tensors):
        outputs, kept, ctx.rows, plan = _forward(loss, solved, sequences, dtype, needs, tensors)
        if plan is not None:
            plans.append(plan)
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.solved, ctx.sequences, ctx.dtype, ctx.needs = loss, solved, sequences, dtype, needs
        ctx.dtypes = [None if x is None else x.dtype for x in tensors[:3]]
        ctx.tensors = len(tensors)
        if solved:
            ctx.save_for_backward(*kept)
            ctx.mark_non_differentiable(*(x for x in outputs[1:] if x is not None))
        else:
            ctx.save_for_backward(*tensors, *kept, *outputs)
            names = _names_out(loss)
            ctx.mark_non_differentiable(*(x for name, x in zip(names, outputs, strict=True) if name not in _differentiable(loss)))
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: expected False, got True; logitless losses have no second derivative, take logitless.losses.reference "
                "where you need one."
            )
        if ctx.solved:
            pending, *gradients = ctx.saved_tensors
            scale = None if upstream[0] is None else pending * upstream[0]
        else:
            scale, gradients = _second_walk(ctx, upstream, compiling)
        found = [None, None, None]
        if scale is not None:
            # Where nobody can come back for them, the kept gradients become the returned ones.
            owned = not compiling and not (ctx.solved and torch._C._autograd._get_current_graph_task_keep_graph())
            found = [
                engine.finish(gradient, scale, dtype, owned=owned) if need else None
                for gradient, dtype, need in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
            ]
            found[2] = None if found[2] is None else found[2].view(-1)
        return (None,) * 6 + tuple(found) + (None,) * (ctx.tensors - 3)


def _second_walk(ctx, upstream: Sequence[Tensor | None], compiling: bool):
    saved = ctx.saved_tensors
    tensors, d_logp, numbers = saved[: ctx.tensors], saved[ctx.tensors], saved[ctx.tensors + 1 :]
    if all(gradient is None for gradient in upstream):
        return None, ()
    arguments = (*tensors[:6], list(tensors[6:]), ctx.sequences, ctx.dtype, ctx.needs)
    if compiling:
        scale, *gradients = _gradients_op(*arguments, ctx.loss.key, d_logp, list(numbers), list(upstream))
    else:
        scale, *gradients = _token_gradients(ctx.loss, _problem(ctx.loss, *arguments), d_logp, numbers, upstream, ctx.rows, static=False)
    return scale, gradients


def _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, inputs, sequences, dtype, needs) -> Problem:
    named = dict(zip(loss.inputs, inputs, strict=True))
    return Problem(hidden, weight, bias, targets, num_items, cu_seqlens, named, sequences, dtype, Needs(*needs))


def _token_gradients(loss, problem: Problem, d_logp, numbers, upstream, rows, *, static: bool):
    named = dict(zip(_names_out(loss), zip(numbers, upstream, strict=True), strict=True))
    values = {name: x for name, (x, _) in named.items() if x.dim()}
    grads = {name: g for name, (_, g) in named.items() if g is not None and name in _differentiable(loss)}
    return engine.token_gradients(loss, problem, values, grads, d_logp, rows, static=static)


# The same three passes as opaque operators. An operator returns tensors only, always as many: empty ones stand for None.


def _absent(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _problem_shapes(hidden, weight, dtype, needs, accum) -> list[Tensor]:
    V, H = weight.shape
    return [
        hidden.new_empty(hidden.shape if needs[0] else 0, dtype=dtype),
        hidden.new_empty((V, H) if needs[1] else 0, dtype=accum),
        hidden.new_empty((V, 1) if needs[2] else 0, dtype=torch.promote_types(dtype, torch.float32)),
    ]


@torch.library.custom_op("logitless::solve", mutates_args=())
def _solve_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_items: Tensor | None, cu_seqlens: Tensor | None,
    inputs: Sequence[Tensor | None], sequences: int, dtype: torch.dtype, needs: Sequence[bool], key: str,
) -> list[Tensor]:  # fmt: skip
    loss = _LOSSES[key]
    with _outside_dispatch():
        problem = _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, inputs, sequences, dtype, needs)
        found, _ = engine.solve(loss, problem, static=True)
        return [_absent(x, found.loss) for x in found]


@_solve_op.register_fake
def _(hidden, weight, bias, targets, num_items, cu_seqlens, inputs, sequences, dtype, needs, key):
    loss, stat = _LOSSES[key], torch.promote_types(dtype, torch.float32)
    shapes = ((), (len(loss.metric_names),), targets.shape if loss.return_logps else (0,), ())
    numbers = [hidden.new_empty(shape, dtype=stat) for shape in shapes]
    return numbers + _problem_shapes(hidden, weight, dtype, needs, loss.accum_dtype or stat)


@torch.library.custom_op("logitless::numbers", mutates_args=())
def _numbers_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_items: Tensor | None, cu_seqlens: Tensor | None,
    inputs: Sequence[Tensor | None], sequences: int, dtype: torch.dtype, needs: Sequence[bool], key: str,
) -> list[Tensor]:  # fmt: skip
    loss = _LOSSES[key]
    with _outside_dispatch():
        problem = _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, inputs, sequences, dtype, needs)
        found, d_logp, _, _ = engine.token_numbers(loss, problem)
        return [_absent(d_logp, hidden), *(found[name] for name in _names_out(loss))]


@_numbers_op.register_fake
def _(hidden, weight, bias, targets, num_items, cu_seqlens, inputs, sequences, dtype, needs, key):
    loss, stat = _LOSSES[key], torch.promote_types(dtype, torch.float32)
    kept = engine.keeps_vectors(loss, Needs(*needs))
    shapes = [() if name in loss.metric_names else targets.shape for name in _names_out(loss)]
    return [hidden.new_empty(hidden.shape if kept else 0, dtype=dtype), *(hidden.new_empty(shape, dtype=stat) for shape in shapes)]


@torch.library.custom_op("logitless::gradients", mutates_args=())
def _gradients_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_items: Tensor | None, cu_seqlens: Tensor | None,
    inputs: Sequence[Tensor | None], sequences: int, dtype: torch.dtype, needs: Sequence[bool], key: str,
    d_logp: Tensor, numbers: Sequence[Tensor], upstream: Sequence[Tensor | None],
) -> list[Tensor]:  # fmt: skip
    loss = _LOSSES[key]
    with _outside_dispatch():
        problem = _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, inputs, sequences, dtype, needs)
        kept = d_logp if engine.keeps_vectors(loss, problem.needs) else None
        found = _token_gradients(loss, problem, kept, numbers, upstream, None, static=True)
        return [_absent(x, found[0]) for x in found]


@_gradients_op.register_fake
def _(hidden, weight, bias, targets, num_items, cu_seqlens, inputs, sequences, dtype, needs, key, d_logp, numbers, upstream):
    stat = torch.promote_types(dtype, torch.float32)
    return [hidden.new_empty((), dtype=stat), *_problem_shapes(hidden, weight, dtype, needs, _LOSSES[key].accum_dtype or stat)]


# Dispatch state of a plain program, as it is while this module is imported.
_PLAIN_DISPATCH = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _outside_dispatch():
    """Let `torch.func.grad_and_value` work inside an operator's body.

    The dispatcher calls a body with autograd and functorch masked out, and on a compiled graph's first run from inside a dispatch
    mode; differentiating there ends in "Cannot access data pointer of Tensor that doesn't have storage". The guard puts the mask of a
    plain program back. (The alternative, tracing the gradient beforehand with make_fx, costs a trace per loss and shape class.)
    """
    return torch._C._ForceDispatchKeyGuard(*_PLAIN_DISPATCH)
