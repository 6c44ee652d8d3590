"""`check`: compare a loss with its definition on full logits, in one chunk and in several."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace

import torch
from torch import Tensor

from logitless.engine.base import CallResult, Mode, replaced, run_calls
from logitless.engine.call import HeadCall, pack, unpack
from logitless.engine.plan import BudgetWarning, Pass, Plan
from logitless.engine.spec import LossSpec
from logitless.errors import type_error, value_error
from logitless.losses.base import LinearLoss
from logitless.losses.inputs import HeadWeight
from logitless.tools.leaves import Leaves, flatten
from logitless.tools.oracle import Oracle, full_logits_bytes

MAX_LOGITS_BYTES = 2**30
ONE_CHUNK, MANY_CHUNKS = "one chunk", "many chunks"
# A budget within which any call of at most MAX_LOGITS_BYTES has one chunk.
AMPLE_BUDGET = 2**40
# Number of chunks for which the budget of the call with many chunks is chosen. As chunks have whole rows, the
# call has three to five chunks, or one chunk per row if it has fewer rows.
CHUNKS = 5


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Relative L2 error `|actual - truth| / |truth|`, computed in fp64."""
    truth = truth.double()
    return ((actual.double() - truth).norm() / truth.norm()).item()


def allowed_error(naive: float, dtype: torch.dtype) -> float:
    """Return the relative error that a result may have: twice the naive error, plus 8 eps.

    Args:
        naive: relative error of plain PyTorch on full logits in the operands' dtype.
        dtype: dtype of the result.
    """
    return 2 * naive + 8 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class CheckReport:
    """Result of `check`; true if every error is within its tolerance.

    Attributes:
        errors: "one chunk: name" and "many chunks: name" -> error, where name is `loss`, a metric, or
            `d_name` for the gradient of a tensor that requires one. Errors are relative; they are absolute
            if the fp64 value is 0, and for metrics below 1.
        allowed: the tolerance of each error.
        ok: whether every error is within its tolerance.
    """

    errors: dict[str, float]
    allowed: dict[str, float]
    ok: bool

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        width = max(map(len, self.errors), default=0)
        failed = "check FAILED: the engine's results differ from those on full logits"
        lines = ["check passed" if self.ok else failed]
        for name, error in self.errors.items():
            verdict = "ok" if error <= self.allowed[name] else "WRONG"
            lines.append(f"  {name:{width}}  error {error:.1e}  allowed {self.allowed[name]:.1e}  {verdict}")
        return "\n".join(lines)


def check(
    loss: LinearLoss,
    hidden: Tensor | Sequence[Tensor],
    weight: HeadWeight,
    targets: Tensor | None = None,
    **inputs: object,
) -> CheckReport:
    """Compare a loss, as the engine computes it, with ordinary autograd over full logits in fp64.

    The loss is called in one chunk (of up to 4,096 tokens), in three to five chunks, and on full logits,
    where the loss's `terms` gets all tokens at once. This finds errors that shapes do not reveal: values that
    depend on other tokens of a chunk, a statistic that `terms` uses but `differentiates` does not name, a
    loss of groups that uses tokens outside its group. The formula in `terms` itself is not checked.

    The error of a result may be twice that of the same computation on full logits in the operands' dtype,
    plus 8 eps; for a metric, plus the square root of eps. Gradients are compared of the tensors that require
    one. Their `grad` and the state of the random number generators do not change.

    Args:
        loss: the loss to check, without `tp_group` and `cp_group`.
        hidden: as in a call of the loss; at most 1 GiB of logits in fp64, 8 * tokens * V bytes.
        weight: as in a call of the loss: a head, or a module of heads.
        targets: as in a call of the loss. Short sequences with some ignored tokens reveal most errors.
        **inputs: the other arguments of the call.

    Returns:
        A `CheckReport`, true if every error is within its tolerance.

    Raises:
        ValueError: the inputs do not fit together, or cannot be cut into chunks.
        TypeError: `loss` is not a loss.
    """
    is_loss = is_dataclass(loss) and hasattr(loss, "logits_budget")
    got = type(loss).__name__
    if not is_loss:
        raise type_error("loss", "a loss", got, "pass an object such as CrossEntropyLoss()")
    remedy = "check the loss on one rank, with the whole vocabulary and whole sequences"
    for name in ("tp_group", "cp_group"):
        if getattr(loss, name) is not None:
            raise value_error(name, "None in a check", getattr(loss, name), remedy)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, **inputs}
    main_grad = arguments.get("accumulate_into")
    remedy = "leave it out, and let the weight require a gradient"
    if main_grad is not None:
        raise value_error("accumulate_into", "None in a check", type(main_grad).__name__, remedy)
    device = next((x.device for x in flatten(arguments) if isinstance(x, Tensor)), torch.device("cpu"))
    with _check_context(device):
        one_chunk = RecordingPasses()
        results = {ONE_CHUNK: _run(replace(loss, logits_budget=AMPLE_BUDGET), arguments, one_chunk)}
        many_chunks = RecordingPasses()
        results[MANY_CHUNKS] = _run(
            replace(loss, logits_budget=one_chunk.many_chunks_budget), arguments, many_chunks
        )
        # With a sampling mask, there may be no chunk of logits.
        has_several_chunks = any(plan.chunks > 1 or plan.replay is not None for plan in many_chunks.plans)
        if not has_several_chunks:
            remedy = "pass a batch that can be cut into chunks"
            raise value_error("targets", "at least 2 supervised tokens", "fewer", remedy)
        naive = _run(loss, arguments, Oracle())
        fp64_loss = replace(loss, accum_dtype=None, logits_dtype=None)
        with torch.autocast(device.type, enabled=False):
            truth = _run(fp64_loss, arguments, Oracle(), is_fp64=True)
    return _compare(results, naive, truth, one_chunk.dtype)


@contextmanager
def _check_context(device: torch.device) -> Iterator[None]:
    """Context with gradients enabled and without budget warnings; random states are restored on exit."""
    generators = nullcontext()
    if device.type in ("cuda", "xpu"):
        generators = torch.random.fork_rng([device], device_type=device.type)
    with warnings.catch_warnings(), torch.random.fork_rng([]), generators, torch.enable_grad():
        warnings.simplefilter("ignore", BudgetWarning)
        yield


@dataclass
class RecordingPasses:
    """Replaces the passes (`base.replaced`): runs the engine's own passes, and records their plans."""

    plans: list[Plan] = field(default_factory=list)
    many_chunks_budget: int = AMPLE_BUDGET  # with this budget every recorded call has several chunks
    dtype: torch.dtype = torch.float32  # dtype of the matrix products

    def __call__(self, heads: Sequence[HeadCall], mode: Mode) -> CallResult:
        nbytes = full_logits_bytes(heads)
        remedy = "check fewer tokens"
        if nbytes > MAX_LOGITS_BYTES:
            got = f"{nbytes / 2**30:.1f} GiB"
            raise value_error("hidden", "at most 1 GiB of logits in fp64", got, remedy)
        for call in unpack(*pack(heads)):
            self.many_chunks_budget = min(self.many_chunks_budget, _many_chunks_budget(call))
            self.dtype = call.dtype
        with replaced(None):
            result = run_calls(heads, mode)
        self.plans.append(result.plan)
        return result


def _many_chunks_budget(call: HeadCall) -> int:
    """Return a budget with which the logits are cut into about CHUNKS chunks."""
    rows = int((call.targets != call.loss.ignore_index).sum()) if call.loss.compact else call.targets.shape[0]
    purpose = Pass.STATISTICS if call.loss.reduction == "none" else Pass.SOLVE
    costs = functools.partial(call.loss.reader.costs, call, purpose=purpose)
    row_budget = max(1, -(-rows // CHUNKS)) * costs(AMPLE_BUDGET).row_bytes
    budget = row_budget
    # The fixed temporaries depend on the budget, and take up to a quarter of it.
    for _ in range(3):
        budget = row_budget + costs(budget).fixed_bytes
    return budget


@dataclass
class Result:
    """Loss, metrics and gradients of a call."""

    loss: Tensor
    metrics: dict[str, Tensor]
    gradients: dict[str, Tensor | None]  # d_name -> gradient
    intermediates: list[tuple[Tensor, Tensor | None]]  # the oracle's, each with its gradient


def _run(
    loss: LossSpec, arguments: Mapping[str, object], passes: Callable, *, is_fp64: bool = False
) -> Result:
    """Call the loss with `passes` on copies of the arguments, in fp64 if `is_fp64`; compute all gradients."""
    leaves = Leaves(is_fp64)
    copies = {name: leaves.copy_argument(name, x) for name, x in arguments.items()}
    hidden = copies.pop("hidden")
    weight = copies.pop("weight")
    targets = copies.pop("targets")
    with replaced(passes):
        output = loss(hidden, weight, targets, **copies)
    if isinstance(output, Tensor):
        loss_value = output
        metrics = {}
    else:
        loss_value = output.loss
        metrics = output.metrics
    intermediates = getattr(passes, "intermediates", [])
    gradients = [None] * (len(leaves.trainable) + len(intermediates))
    if loss_value.requires_grad:
        inputs_of_gradients = [*leaves.trainable.values(), *intermediates]
        upstream = _upstream_gradient(loss_value)
        gradients = torch.autograd.grad(loss_value, inputs_of_gradients, upstream, allow_unused=True)
    detached = [x.detach() for x in intermediates]
    return Result(
        loss=loss_value.detach(),
        metrics=dict(metrics),
        gradients=dict(zip(leaves.trainable, gradients)),
        intermediates=list(zip(detached, gradients[len(leaves.trainable) :], strict=True)),
    )


def _upstream_gradient(value: Tensor) -> Tensor:
    """Return the upstream gradient: 1 for a reduced loss, else random numbers from a fixed seed."""
    if value.dim() == 0:
        return torch.ones_like(value)
    generator = torch.Generator("cpu").manual_seed(0)
    random = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu")
    return random.to(value)


def _compare(results: Mapping[str, Result], naive: Result, truth: Result, dtype: torch.dtype) -> CheckReport:
    """Compare the results of the engine with the truth in fp64.

    Args:
        results: "one chunk" and "many chunks" -> result of the engine.
        naive: result on full logits in the operands' dtype.
        truth: result on full logits in fp64.
        dtype: dtype of the matrix products.
    """
    errors: dict[str, float] = {}
    allowed: dict[str, float] = {}
    # For fp64 operands the oracle is as accurate as the loss that is checked.
    slack = torch.finfo(dtype).eps ** 0.5
    min_allowed = slack if dtype == torch.float64 else 0.0
    for chunking, result in results.items():

        def record(name: str, error: float, max_error: float, chunking: str = chunking) -> None:
            errors[f"{chunking}: {name}"] = error
            allowed[f"{chunking}: {name}"] = max(max_error, min_allowed)

        expected = max(_error(naive.loss, truth.loss), _expected_loss_error(naive, truth))
        record("loss", _error(result.loss, truth.loss), allowed_error(expected, result.loss.dtype))
        for name, gradient in result.gradients.items():
            gradients = [x.gradients[name] for x in (result, naive, truth)]
            present = next((x for x in gradients if x is not None), None)
            if present is None:
                continue
            # A missing gradient is one of zeros.
            actual, plain, exact = (torch.zeros_like(present) if x is None else x for x in gradients)
            result_dtype = plain.dtype if gradient is None else gradient.dtype
            record(name, _error(actual, exact), allowed_error(_error(plain, exact), result_dtype))
        for name, exact in truth.metrics.items():
            scale = max(1.0, abs(exact.item()))
            error = (result.metrics[name] - exact).abs().item() / scale
            naive_error = (naive.metrics[name] - exact).abs().item() / scale
            record(name, error, 2 * naive_error + slack)
    return CheckReport(errors, allowed, all(errors[name] <= allowed[name] for name in errors))


def _error(actual: Tensor, truth: Tensor) -> float:
    """Return the relative error, or the absolute one if the truth is 0."""
    is_zero = truth.norm().item() == 0
    return actual.double().norm().item() if is_zero else relative_error(actual, truth)


def _expected_loss_error(naive: Result, truth: Result) -> float:
    """Return the expected error of the naive loss, to first order in the errors of its `intermediates`.

    The error of the naive loss itself can be 0 by chance. The errors of the intermediates count as
    independent. One rounding of each summand is added, because the sum may cancel.
    """
    squares = 0.0
    magnitude = 0.0
    for (x, _), (exact, gradient) in zip(naive.intermediates, truth.intermediates, strict=True):
        if gradient is not None:
            is_used = gradient != 0  # the others may be infinite
            squares += (gradient * (x - exact))[is_used].square().sum().item()
            magnitude += (gradient * exact)[is_used].abs().sum().item()
    eps = torch.finfo(naive.loss.dtype).eps
    return (math.sqrt(squares) + eps * magnitude) / (truth.loss.norm().item() or 1.0)
