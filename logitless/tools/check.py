"""`check`: compare a loss with its definition on full logits, in one chunk and in several."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.engine.function import CallResult, Mode, replaced, run_calls
from logitless.engine.packing import pack, unpack
from logitless.engine.plan import BudgetWarning, Pass, Plan
from logitless.engine.spec import LossSpec
from logitless.errors import type_error, value_error
from logitless.losses.base import LinearLoss
from logitless.losses.inputs import HeadWeight
from logitless.tools.leaves import Leaves, flat
from logitless.tools.oracle import Oracle, logits_bytes

MOST_LOGITS = 2**30
ONE_CHUNK, MANY_CHUNKS = "one chunk", "many chunks"
# More than any call needs whose logits are within the limit.
AMPLE_BUDGET = 2**40
# Into so many chunks the logits are cut, or more.
CHUNKS = 5


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Relative L2 error `|actual - truth| / |truth|`, computed in fp64."""
    truth = truth.double()
    return ((actual.double() - truth).norm() / truth.norm()).item()


def allowed_error(naive: float, dtype: torch.dtype) -> float:
    """The 2x-naive rule: the relative error that a result of this dtype may have.

    Args:
        naive: relative error of plain PyTorch on full logits in the operands' dtype.
        dtype: of the result.
    """
    return 2 * naive + 8 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class CheckReport:
    """What `check` found; true where everything is within its tolerance.

    Attributes:
        errors: by "one chunk: name" and "many chunks: name", the error of `loss`, of each metric and of the
            gradient `d_name` of each tensor that requires one. It is relative; absolute where the truth is 0
            and for metrics below 1.
        allowed: the largest acceptable error of each.
        ok: whether no error is larger.
    """

    errors: dict[str, float]
    allowed: dict[str, float]
    ok: bool

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        width = max(map(len, self.errors), default=0)
        failed = "check FAILED: not the same in the engine as on full logits"
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

    The call is made in one chunk (of up to 4,096 tokens), in at least three, and on full logits, on which the
    loss's own `terms` sees all tokens at once. So it finds what shapes cannot show: values that depend on the
    other tokens of a chunk, a statistic that `terms` uses but `differentiates` does not name, a loss of
    groups that looks beyond its group. What `terms` itself computes is taken as meant.

    A result may be off by twice the error of the same computation on full logits in the operands' own dtype,
    plus 8 eps; a metric by the square root of eps beyond that. Tensors need a gradient here if and only if
    they require one when given; their `grad` and the state of the random number generators stay as they are.

    Args:
        loss: the loss to check; without tp_group and cp_group.
        hidden: as in a call of the loss; at most 1 GiB of logits in fp64, 8 * tokens * V bytes.
        weight: as in a call of the loss: a head, or a module of heads.
        targets: as in a call of the loss; short sequences with some ignored tokens show most.
        **inputs: what else the call takes.

    Returns:
        A `CheckReport`, true where everything is within its tolerance.

    Raises:
        ValueError: the inputs do not fit together, or cannot be cut into chunks.
        TypeError: `loss` is no loss.
    """
    own = is_dataclass(loss) and hasattr(loss, "logits_budget")
    got = type(loss).__name__
    if not own:
        raise type_error("loss", "a loss", got, "pass an object such as CrossEntropyLoss()")
    remedy = "check the loss on one rank, with the whole vocabulary and whole sequences"
    for name in ("tp_group", "cp_group"):
        if getattr(loss, name) is not None:
            raise value_error(name, "None in a check", getattr(loss, name), remedy)
    given = {"hidden": hidden, "weight": weight, "targets": targets, **inputs}
    into = given.get("accumulate_into")
    remedy = "leave it out, and let the weight require a gradient"
    if into is not None:
        raise value_error("accumulate_into", "None in a check", type(into).__name__, remedy)
    device = next((x.device for x in flat(given) if isinstance(x, Tensor)), torch.device("cpu"))
    with _undisturbed(device):
        whole = Passes()
        results = {ONE_CHUNK: _run(replace(loss, logits_budget=AMPLE_BUDGET), given, whole)}
        cut = Passes()
        results[MANY_CHUNKS] = _run(replace(loss, logits_budget=whole.cutting_budget), given, cut)
        # Of kept ids alone there may be no chunk of logits.
        several = any(plan.chunks > 1 or plan.replay is not None for plan in cut.plans)
        if not several:
            remedy = "give a batch that can be cut"
            raise value_error("targets", "at least 2 supervised tokens", "fewer", remedy)
        naive = _run(loss, given, Oracle())
        wide = replace(loss, accum_dtype=None, logits_dtype=None)
        with torch.autocast(device.type, enabled=False):
            truth = _run(wide, given, Oracle(), wide=True)
    return _compared(results, naive, truth, whole.dtype)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Context with gradients on and without budget warnings; random states are restored on exit."""
    generators = nullcontext()
    if device.type in ("cuda", "xpu"):
        generators = torch.random.fork_rng([device], device_type=device.type)
    with warnings.catch_warnings(), torch.random.fork_rng([]), generators, torch.enable_grad():
        warnings.simplefilter("ignore", BudgetWarning)
        yield


@dataclass
class Passes:
    """Run the engine's own passes, and record the calls."""

    plans: list[Plan] = field(default_factory=list)
    cutting_budget: int = AMPLE_BUDGET  # with which every call has several chunks
    dtype: torch.dtype = torch.float32  # of the products

    def __call__(self, heads: Sequence[HeadCall], mode: Mode) -> CallResult:
        size = logits_bytes(heads)
        remedy = "check fewer tokens"
        if size > MOST_LOGITS:
            got = f"{size / 2**30:.1f} GiB"
            raise value_error("hidden", "at most 1 GiB of logits in fp64", got, remedy)
        for call in unpack(*pack(heads)):
            self.cutting_budget = min(self.cutting_budget, _cutting_budget(call))
            self.dtype = call.dtype
        with replaced(None):
            outcome = run_calls(heads, mode)
        self.plans.append(outcome.plan)
        return outcome


def _cutting_budget(call: HeadCall) -> int:
    """A budget with which the logits are cut into CHUNKS chunks or more."""
    rows = int((call.targets != call.loss.ignore_index).sum()) if call.loss.compact else call.targets.shape[0]
    purpose = Pass.STATISTICS if call.loss.reduction == "none" else Pass.SOLVE
    costs = functools.partial(call.loss.objective.costs, call, purpose=purpose)
    usable = budget = max(1, -(-rows // CHUNKS)) * costs(AMPLE_BUDGET).row_bytes
    # The fixed temporaries depend on the budget, and take up to a quarter of it.
    for _ in range(3):
        budget = usable + costs(budget).fixed_bytes
    return budget


@dataclass
class Result:
    """Result of a call: loss, metrics and gradients."""

    loss: Tensor
    metrics: dict[str, Tensor]
    gradients: dict[str, Tensor | None]  # by d_name
    starts: list[tuple[Tensor, Tensor | None]]  # those of the oracle, with their gradients


def _run(loss: LossSpec, given: Mapping[str, object], stand_in: Callable, *, wide: bool = False) -> Result:
    """Call the loss on new leaves; with `wide`, in fp64."""
    leaves = Leaves(wide)
    hidden, weight, targets, *_ = made = [leaves.made(name, x) for name, x in given.items()]
    inputs = dict(list(zip(given, made, strict=True))[3:])
    with replaced(stand_in):
        out = loss(hidden, weight, targets, **inputs)
        value, metrics = (out, {}) if isinstance(out, Tensor) else (out.loss, out.metrics)
    starts = getattr(stand_in, "starts", [])
    gradients = [None] * (len(leaves.trained) + len(starts))
    if value.requires_grad:
        wanted = [*leaves.trained.values(), *starts]
        upstream = _upstream(value)
        gradients = torch.autograd.grad(value, wanted, upstream, allow_unused=True)
    trained = dict(zip(leaves.trained, gradients))
    with_gradients = list(zip([x.detach() for x in starts], gradients[len(trained) :], strict=True))
    return Result(value.detach(), dict(metrics), trained, with_gradients)


def _upstream(value: Tensor) -> Tensor:
    """1 for a reduced loss, else random numbers, always the same."""
    if value.dim() == 0:
        return torch.ones_like(value)
    generator = torch.Generator("cpu").manual_seed(0)
    random = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu")
    return random.to(value)


def _compared(results: Mapping[str, Result], naive: Result, truth: Result, dtype: torch.dtype) -> CheckReport:
    errors: dict[str, float] = {}
    allowed: dict[str, float] = {}
    # For fp64 operands the oracle is as accurate as the loss that is checked.
    slack = torch.finfo(dtype).eps ** 0.5
    least = slack if dtype == torch.float64 else 0.0
    for how, result in results.items():

        def note(name: str, error: float, most: float, how: str = how) -> None:
            errors[f"{how}: {name}"] = error
            allowed[f"{how}: {name}"] = max(most, least)

        expected = max(_error(naive.loss, truth.loss), _rounding(naive, truth))
        note("loss", _error(result.loss, truth.loss), allowed_error(expected, result.loss.dtype))
        for name, gradient in result.gradients.items():
            triple = [x.gradients[name] for x in (result, naive, truth)]
            present = next((x for x in triple if x is not None), None)
            if present is None:
                continue
            # No gradient is one of zeros: of two that should be there, one is missing.
            actual, plain, exact = (torch.zeros_like(present) if x is None else x for x in triple)
            note(name, _error(actual, exact), allowed_error(_error(plain, exact), _dtype(gradient, plain)))
        for name, exact in truth.metrics.items():
            scale = max(1.0, abs(exact.item()))
            off, plain = ((x.metrics[name] - exact).abs().item() / scale for x in (result, naive))
            note(name, off, 2 * plain + slack)
    return CheckReport(errors, allowed, all(errors[name] <= allowed[name] for name in errors))


def _dtype(gradient: Tensor | None, plain: Tensor) -> torch.dtype:
    return plain.dtype if gradient is None else gradient.dtype


def _error(actual: Tensor, truth: Tensor) -> float:
    """Relative, or absolute where the truth is 0."""
    zero = truth.norm().item() == 0
    return actual.double().norm().item() if zero else relative_error(actual, truth)


def _rounding(naive: Result, truth: Result) -> float:
    """Expected error of the loss, to first order, from the errors of the tensors that it is computed from.

    Their errors count as independent. One rounding of each summand is added, because the sum may cancel. The
    error of a single naive value can be zero by chance.
    """
    squares = size = 0.0
    for (x, _), (exact, gradient) in zip(naive.starts, truth.starts, strict=True):
        if gradient is not None:
            counts = gradient != 0  # others may be infinite
            squares += (gradient * (x - exact))[counts].square().sum().item()
            size += (gradient * exact)[counts].abs().sum().item()
    eps = torch.finfo(naive.loss.dtype).eps
    return (math.sqrt(squares) + eps * size) / (truth.loss.norm().item() or 1.0)
