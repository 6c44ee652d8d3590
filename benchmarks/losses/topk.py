"""Several ids per token, in bare products of the same run: log-probabilities, the k best, and the
renormalized top-k loss, each beside plain PyTorch on full logits."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness.measure import exact_products, poison, relative_l2, synchronize
from benchmarks.harness.report import gib, sizes, text, write_json
from benchmarks.harness.timing import Case, interleave, peak_bytes, release, spread
from benchmarks.harness.yardstick import chunked_gemms
from benchmarks.losses import distillation
from logitless import DistillationLoss, linear_logprobs, linear_topk

# Rows of the truth, and of the product that everything is counted in.
CHUNK = 4096
TRUTH_CHUNK = 512
# Of the fp32 truth: beyond these a row is wrong and gets no time.
LIMITS = {"logps": 1e-2, "d_hidden": 2e-2, "d_weight": 2e-2, "ids": 2e-2}


@dataclass(frozen=True)
class Shape:
    N: int
    H: int
    V: int
    k: int


SHAPE, QUICK_SHAPE = Shape(8192, 4096, 151936, 64), Shape(96, 32, 2000, 8)


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    ids: Tensor  # (N, k) the teacher's best
    values: Tensor  # (N, k) its log-probabilities
    g: Tensor  # (N, k) gradients of the student's

    @classmethod
    def of(cls, shape: Shape, device: torch.device, seed: int) -> "Inputs":
        models = distillation.inputs(distillation.Shape(shape.N, shape.H, shape.H, shape.V), device, seed)
        hidden, weight, teacher_hidden, teacher_weight = models
        best = [
            (rows.float() @ teacher_weight.float().t()).log_softmax(1).topk(shape.k)
            for rows in teacher_hidden.split(TRUTH_CHUNK)
        ]
        values, ids = (torch.cat(parts) for parts in zip(*best, strict=True))
        generator = torch.Generator(device).manual_seed(seed + 1)
        g = torch.randn(values.shape, generator=generator, device=device) / shape.N
        return cls(hidden, weight, ids, values, g)


@torch.no_grad()
def truth(x: Inputs, *, renormalized: bool) -> dict[str, Tensor]:
    """Log-probabilities of the ids, the k best ids, and the gradients, from fp32 operands."""
    N, wide = len(x.hidden), x.weight.float()
    d_weight = torch.zeros_like(wide)
    found: dict[str, list[Tensor]] = {"logps": [], "ids": [], "d_hidden": []}
    with exact_products():
        for start in range(0, N, TRUTH_CHUNK):
            rows = slice(start, start + TRUTH_CHUNK)
            h, ids = x.hidden[rows].float(), x.ids[rows]
            log_p = (h @ wide.t()).log_softmax(1)
            logps = log_p.gather(1, ids)
            found["ids"].append(log_p.topk(ids.shape[1]).indices)
            found["logps"].append(logps)
            if renormalized:
                g = (logps.softmax(1) - x.values[rows].softmax(1)) / N
                d_z = torch.zeros_like(log_p)
            else:
                g = x.g[rows]
                d_z = log_p.exp().mul_(-g.sum(1, keepdim=True))
            d_z.scatter_add_(1, ids, g)
            found["d_hidden"].append(d_z @ wide)
            d_weight.addmm_(d_z.t(), h)
    return {name: torch.cat(parts) for name, parts in found.items()} | {"d_weight": d_weight}


def full_logps(x: Inputs) -> Tensor:
    return (x.hidden @ x.weight.t()).float().log_softmax(1).gather(1, x.ids)


def full_topk(x: Inputs) -> Tensor:
    return (x.hidden @ x.weight.t()).float().log_softmax(1).topk(x.ids.shape[1]).indices


def full_renormalized(x: Inputs) -> Tensor:
    z = (x.hidden @ x.weight.t()).float().gather(1, x.ids).log_softmax(1)
    t = x.values.log_softmax(1)
    return (t.exp() * (t - z)).sum(1).mean()


def our_renormalized(x: Inputs) -> Tensor:
    loss = DistillationLoss(divergence="forward_kl", support="teacher", topk_mode="renormalize")
    return loss(x.hidden, x.weight, teacher_logprobs_topk=(x.values, x.ids)).loss


@dataclass(frozen=True)
class Task:
    """One thing to measure: what it returns, and in how many products its time is to be."""

    name: str
    ours: Callable[[Inputs], Tensor]
    full: Callable[[Inputs], Tensor]
    result: str  # "logps", "ids" or "loss"
    gradients: tuple[str, ...]
    products: int  # it is counted in
    target: float


def our_logps(x: Inputs) -> Tensor:
    return linear_logprobs(x.hidden, x.weight, x.ids).logps


def our_topk(x: Inputs) -> Tensor:
    return linear_topk(x.hidden, x.weight, x.ids.shape[1]).ids


BOTH = ("hidden", "weight")
TASKS = (
    Task("logprobs, forward", our_logps, full_logps, "logps", (), 1, 1.17),
    Task("logprobs", our_logps, full_logps, "logps", BOTH, 1, 4.2),
    Task("logprobs, frozen head", our_logps, full_logps, "logps", BOTH[:1], 1, 2.2),
    Task("k best", our_topk, full_topk, "ids", (), 1, 1.25),
    Task("renormalized", our_renormalized, full_renormalized, "loss", BOTH, 3, 1 / 8),
)


def step(task: Task, function: Callable[[Inputs], Tensor], x: Inputs) -> Callable[[], Tensor]:
    def run() -> Tensor:
        for name in BOTH:
            getattr(x, name).requires_grad_(name in task.gradients).grad = None
        with torch.set_grad_enabled(bool(task.gradients)):
            found = function(x)
        if task.gradients:
            found.backward(x.g if task.result == "logps" else None)
        return found.detach()

    return run


def check(
    run: Callable[[], Tensor], task: Task, x: Inputs, expected: dict[str, Tensor], *, run_of_ours: bool
) -> dict:
    """Errors of one run on poisoned memory."""
    device = x.hidden.device
    poison(device)
    try:
        found = run()
        synchronize(device)
    except torch.OutOfMemoryError:
        return {"verdict": "out of memory"}
    errors = {}
    if task.result == "logps":
        errors["logps"] = relative_l2(found, expected["logps"])
    elif task.result == "ids":
        same = (found.sort(1).values == expected["ids"].sort(1).values).all(1)
        errors["ids"] = 1 - same.float().mean().item()
    for name in task.gradients:
        errors[f"d_{name}"] = relative_l2(getattr(x, name).grad, expected[f"d_{name}"])
    # Full logits in bf16 rank the ids near the k-th place otherwise, which is what they are.
    judged = {name: x for name, x in errors.items() if name != "ids" or run_of_ours}
    right = all(error <= LIMITS[name] for name, error in judged.items())
    return {"verdict": "ok" if right else "wrong"} | {f"{name}_error": x for name, x in errors.items()}


def one_product(x: Inputs) -> Case:
    """`hidden @ weight.T` in chunks, into a buffer that is there before the clock starts."""

    def prepare() -> Callable[[], None]:
        hidden, weight = x.hidden.detach(), x.weight.detach()
        logits = hidden.new_empty(min(CHUNK, len(hidden)), len(weight))

        def run() -> None:
            for rows in hidden.split(CHUNK):
                torch.mm(rows, weight.t(), out=logits[: len(rows)])

        return run

    return prepare


def run(
    document: dict,
    shape: Shape,
    device: torch.device,
    *,
    seconds: float,
    out,
    say: Callable[[str], None],
) -> None:
    """Each task: both implementations checked, timed in turn with the bare products; their peak memory."""
    x = Inputs.of(shape, device, document["seed"])
    document |= {"shape": asdict(shape), "rows": []}
    known: dict[bool, dict[str, Tensor]] = {}
    for task in TASKS:
        renormalized = task.result == "loss"
        if renormalized not in known:
            known.clear()
            known[renormalized] = truth(x, renormalized=renormalized)
        for row in rows_of(task, x, known[renormalized], device, seconds):
            document["rows"].append(row)
            say(f"{row['task']}, {row['name']}: {row['verdict']} {text(row.get('ratio'), '{:.3f}') or ''}")
            write_json(out, document)
    document["complete"] = True
    write_json(out, document)


def rows_of(
    task: Task, x: Inputs, expected: dict[str, Tensor], device: torch.device, seconds: float
) -> Iterator[dict]:
    runs = {
        name: step(task, function, x)
        for name, function in (("logitless", task.ours), ("full logits", task.full))
    }
    rows = {name: {"task": task.name, "name": name} for name in runs}
    for name, call in runs.items():
        rows[name] |= check(call, task, x, expected, run_of_ours=name == "logitless")
        release(device)
    cases: dict[str, Case] = {
        name: (lambda call=runs[name]: call) for name, row in rows.items() if row["verdict"] == "ok"
    }
    chunk = min(CHUNK, len(x.hidden))
    bare = one_product(x) if task.products == 1 else chunked_gemms(x.hidden, x.weight, chunk)
    times = interleave({"bare": bare, **cases}, device, seconds=seconds)
    for name, row in rows.items():
        if times.get(name):
            row |= spread(times[name]) | {"bare_ms": median(times["bare"]), "products": task.products}
            row["ratio"] = row["ms"] / row["bare_ms"]
            row["peak_bytes"] = peak_bytes(runs[name], device)
            if name == "logitless":
                row["target"] = task.target
        yield row


def table(document: dict) -> str:
    body = [
        [
            row["task"],
            row["name"],
            text(row.get("ms"), "{:.2f}") or row["verdict"],
            text(row.get("ratio"), "{:.3f}"),
            text(row.get("target"), "{:.3f}"),
            text(gib(row.get("peak_bytes")), "{:.2f}"),
            *(text(row.get(f"{name}_error"), "{:.1e}") for name in LIMITS),
        ]
        for row in document["rows"]
    ]
    headers = ["", "", "ms", "x products", "target", "peak GiB", *(f"{name} err" for name in LIMITS)]
    return tabulate(body, headers, disable_numparse=True, stralign="right")


# How the page calls each task.
TITLES = {
    "logprobs, forward": "log-probabilities of 64 ids, without gradients",
    "logprobs": "the same with gradients",
    "logprobs, frozen head": "the same with gradients and a frozen head",
    "k best": "`linear_topk`, k = 64",
    "renormalized": '`DistillationLoss`, `topk_mode="renormalize"`, with gradients',
}


def for_page(document: dict, source: str) -> str:
    """The ratios and peaks of both implementations, in Markdown."""
    body = []
    for task, title in TITLES.items():
        rows = {row["name"]: row for row in document["rows"] if row["task"] == task}
        cells = [page_cell(rows.get(name)) for name in ("logitless", "full logits")]
        products = next((row["products"] for row in rows.values() if "products" in row), None)
        body.append([title, products, *cells])
    headers = ["", "products", "**logitless**", "full logits in PyTorch"]
    table = tabulate(
        body, headers, tablefmt="github", colalign=("left", *["right"] * 3), disable_numparse=True
    )
    return (
        f"{table}\n\nOne {document['device']}, {document['date'][:10]}, bf16, {sizes(document['shape'])}. "
        "Time as a multiple of the bare matrix products whose number is shown; peak memory beyond the "
        f"inputs, gradients included.\n\n{source}"
    )


def page_cell(row: dict | None) -> str:
    if row is None or row["verdict"] != "ok":
        return "" if row is None else row["verdict"]
    return f"{row['ratio']:.2f}x" + (text(gib(row["peak_bytes"]), ", {:.1f} GiB") or "")


def failed(document: dict) -> list[str]:
    """Our own rows that are not right."""
    return [row["task"] for row in document["rows"] if row["name"] == "logitless" and row["verdict"] != "ok"]
