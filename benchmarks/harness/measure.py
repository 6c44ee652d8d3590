"""One problem, many implementations: agreement with the truth first, then milliseconds, ratio and peak
bytes."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.harness.registry import one_line
from benchmarks.harness.timing import Case, interleave, peak_bytes, release, spread
from benchmarks.harness.yardstick import Yardstick
from logitless.engine.early_projection import LIKELY

try:
    from logitless.engine import captured
except ImportError:  # an older checkout, which `compare` measures, captures no graphs
    captured = None

# Above these a result is wrong and gets no time. bf16 alone costs 3e-3 of a gradient and the roughest peer
# 1.5e-2 (peers.md); a forgotten term, mask or normalizer costs far more, on inputs where every term matters.
GRADIENT_LIMIT = 5e-2
LOSS_LIMIT = 1e-2
# Calls whose host time is measured, and the rest before each, in seconds.
HOST_CALLS, HOST_REST = 15, 3e-3
# Calls before the timed ones, which ours needs until it replays a CUDA graph, for at most so many seconds.
WARM_CALLS, WARM_SECONDS = LIKELY + (captured.SIGHTINGS if captured else 0), 0.3
# Freed memory is filled with NaN before a check, so that reading what was never written shows.
POISON_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Truth:
    """The loss and the gradient of each leaf, computed in fp32."""

    loss: float
    gradients: dict[str, Tensor]


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products of fp32 operands in fp32, without TF32, for the truth."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


class DeviceLost(RuntimeError):
    """An implementation left the device unusable: nothing after it can be measured in this process."""


def measure(
    calls: dict[
        str, Callable[[], object]
    ],  # name -> the public call, returning a loss or something with `.loss`
    leaves: dict[str, Tensor],  # the tensors that get gradients
    truth: Truth,
    yardstick: Yardstick,
    *,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[dict, list[dict]]:
    """Checks every call, then times the right ones interleaved with the yardstick, then takes their peak
    memory.

    Returns the yardstick's numbers and one row for each call, in their order. `row["verdict"]` is "ok",
    "wrong", "out of memory" or "failed"; only "ok" rows have a time.
    """
    rows = {}
    for name, call in calls.items():
        rows[name] = check(name, call, leaves, truth)
        say(f"  {name}: {describe_check(rows[name])}")
    right = {name: calls[name] for name, row in rows.items() if row["verdict"] == "ok"}

    cases = {name: backward_case(call, leaves, rows[name]) for name, call in right.items()}
    for case in cases.values():
        warm_up(case, device_of(leaves))
    # Rested, each with the card at its full clock; and hot, calls in a row at its power limit.
    times = interleave(yardstick.cases | cases, device_of(leaves), seconds=0.6 * seconds)
    bare = yardstick.summary(times)
    ran = {name: case for name, case in (yardstick.cases | cases).items() if times[name]}
    hot = times | interleave(ran, device_of(leaves), seconds=0.4 * seconds, least=3, in_a_row=True)
    bare["hot_ms"] = yardstick.summary(hot)["ms"]

    for name in right:
        if not times[name]:
            rows[name]["verdict"] = "failed" if "reason" in rows[name] else "out of memory"
            say(f"  {name}: {describe_check(rows[name])} while it was timed")
            continue
        rows[name] |= spread(times[name])
        rows[name]["ratio"] = rows[name]["ms"] / bare["ms"]
        if hot[name]:
            rows[name]["hot_ratio"] = median(hot[name]) / bare["hot_ms"]
        rows[name]["host_ms"] = host_ms(cases[name], device_of(leaves))
    for name, call in right.items():
        if times[name]:
            rows[name] |= memory(call, leaves, rows[name])
    clear(leaves)
    return bare, list(rows.values())


def check(name: str, call: Callable[[], object], leaves: dict[str, Tensor], truth: Truth) -> dict:
    """Runs the call once on poisoned memory and compares it with the truth."""
    device = device_of(leaves)
    row: dict = {"name": name}
    clear(leaves)
    poison(device)
    try:
        row |= first_call(call, leaves, truth)
        row["verdict"] = "ok" if sound(row) else "wrong"
    except torch.OutOfMemoryError:
        row["verdict"] = "out of memory"
    # A peer may fail in any way on a shape it was not made for; the others must still be measured.
    except Exception as error:
        row |= {"verdict": "failed", "reason": one_line(error)}
    clear(leaves)
    try:
        release(device)
    except RuntimeError as error:
        raise DeviceLost(
            f"{name} left the device unusable ({one_line(error)}); run again with --skip '{name}'."
        ) from error
    return row


def first_call(call: Callable[[], object], leaves: dict[str, Tensor], truth: Truth) -> dict:
    """The seconds and the errors of one call, and the plan it followed where it tells."""
    start = time.perf_counter()
    output = call()
    loss = loss_of(output)
    loss.backward()
    synchronize(loss.device)
    row = {"first_call_seconds": time.perf_counter() - start}
    row["loss_error"] = abs(loss.item() - truth.loss) / abs(truth.loss)
    for leaf, gradient in truth.gradients.items():
        row[f"d_{leaf}_error"] = relative_l2(leaves[leaf].grad, gradient)
    plan = getattr(output, "plan", None)
    return row if plan is None else row | {"plan": plan.describe(), "budget_bytes": plan.budget}


def sound(row: dict) -> bool:
    """Every error within its limit; NaN never is."""
    gradients = [error for key, error in row.items() if key.startswith("d_") and key.endswith("_error")]
    return row["loss_error"] <= LOSS_LIMIT and all(error <= GRADIENT_LIMIT for error in gradients)


def backward_case(call: Callable[[], object], leaves: dict[str, Tensor], row: dict) -> Case:
    def run() -> None:
        try:
            loss_of(call()).backward()
        except torch.OutOfMemoryError:
            raise
        # What fails only now is dropped like what runs out of memory, with its reason in the row.
        except Exception as error:
            row["reason"] = one_line(error)
            raise torch.OutOfMemoryError(row["reason"]) from error

    def prepare() -> Callable[[], None]:
        clear(leaves)
        return run

    return prepare


def memory(call: Callable[[], object], leaves: dict[str, Tensor], row: dict) -> dict:
    """Peak bytes beyond the inputs, and what of them is not the gradients handed back."""
    device = device_of(leaves)
    if captured:
        captured.forget()  # the memory that a CUDA graph keeps between calls is memory of the call
    run = backward_case(call, leaves, row)()
    try:
        peak = peak_bytes(run, device)
    except torch.OutOfMemoryError:
        peak = None
    returned = sum(leaf.grad.nbytes for leaf in leaves.values() if leaf.grad is not None)
    clear(leaves)
    return {"peak_bytes": peak, "beyond_gradients_bytes": None if peak is None else peak - returned}


def warm_up(case: Case, device: torch.device) -> None:
    """Run a call as often as it takes until its kernels are captured as a CUDA graph, or for a while."""
    if device.type != "cuda":
        return
    start = time.perf_counter()
    for _ in range(WARM_CALLS):
        try:
            case()()
        except torch.OutOfMemoryError:
            return
        synchronize(device)
        if time.perf_counter() - start > WARM_SECONDS:
            return


def host_ms(case: Case, device: torch.device) -> float | None:
    """Milliseconds until a call and its backward pass have returned: the median after rests; None on a
    CPU."""
    if device.type != "cuda":
        return None
    times = []
    for _ in range(HOST_CALLS):
        run = case()
        synchronize(device)
        time.sleep(HOST_REST)
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def relative_l2(value: Tensor | None, truth: Tensor) -> float:
    """The relative L2 error; where the truth is zero, 0 for zeros and infinity for all else."""
    if value is None:
        return math.inf
    error, size = torch.linalg.vector_norm(value.float() - truth), torch.linalg.vector_norm(truth)
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return (error / size).item()


def device_of(leaves: dict[str, Tensor]) -> torch.device:
    return next(iter(leaves.values())).device


def loss_of(output: object) -> Tensor:
    return getattr(output, "loss", output)


def clear(leaves: dict[str, Tensor]) -> None:
    for leaf in leaves.values():
        leaf.grad = None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def poison(device: torch.device) -> None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        torch.full((min(POISON_BYTES, free // 4) // 4,), math.nan, device=device)


def describe_check(row: dict) -> str:
    if row["verdict"] in ("failed", "out of memory"):
        return f"{row['verdict']} {row.get('reason', '')}".strip()
    errors = [
        f"{key.removesuffix('_error')} {value:.1e}" for key, value in row.items() if key.endswith("_error")
    ]
    plan = f"; {row['plan']}" if "plan" in row else ""
    return f"{row['verdict']} ({', '.join(errors)}), first call {row['first_call_seconds']:.1f} s{plan}"
