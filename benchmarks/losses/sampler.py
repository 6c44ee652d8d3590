"""GRPO over a sampler's kept ids, in bare products of the same run, beside the same call without sets and
beside full logits with -inf outside the sets."""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness.measure import exact_products, poison, relative_l2, synchronize
from benchmarks.harness.report import gib, text, write_json
from benchmarks.harness.timing import Case, interleave, peak_bytes, release, spread
from benchmarks.harness.yardstick import chunked_gemms
from logitless import GRPOLoss, SamplingMask

CHUNK, TRUTH_CHUNK = 4096, 512
# Of the fp32 truth: beyond these a row is wrong and gets no time.
LIMITS = {"loss": 1e-2, "d_hidden": 2e-2, "d_weight": 2e-2}
# As a share of three products; at the sizes of prime-rl's sets alone.
TARGET = 0.04


@dataclass(frozen=True)
class Shape:
    N: int
    H: int
    V: int


SHAPES = tuple(Shape(16384, H, 151936) for H in (1024, 2048, 4096))
QUICK_SHAPES = (Shape(96, 32, 2000),)


@dataclass(frozen=True)
class Sets:
    """How many ids the sets of tokens have."""

    name: str
    mean: int
    share: float = 1.0  # of the tokens that have a set


SETS = (
    Sets("prime-rl", 8),
    Sets("1 each", 1),
    Sets("8 each", 8),
    Sets("64 each", 64),
    Sets("512 each", 512),
    Sets("half without a set", 8, 0.5),
)
# prime-rl #2979: mean 8, median 2, 99% up to 82, and 45 to 48% of one id.
PRIME_RL = ((0.46, (1, 1)), (0.60, (2, 2)), (0.90, (3, 20)), (0.985, (21, 60)), (1.0, (61, 110)))


def sizes_of(sets: Sets, N: int, V: int, seed: int) -> list[int]:
    """The number of ids of each token's set."""
    draw = random.Random(seed)
    sizes = []
    for _ in range(N):
        size = sets.mean
        if sets.name in ("prime-rl", "half without a set"):
            point = draw.random()
            low, high = next(bounds for most, bounds in PRIME_RL if point <= most)
            size = draw.randint(low, high)
        sizes.append(min(size, V) if draw.random() < sets.share else 0)
    return sizes


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # (1, N, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (1, N)
    old_logps: Tensor  # (1, N) over the sets
    advantages: Tensor  # (1,)
    ids: Tensor  # (S,)
    rows: Tensor  # (S,) the row of each id
    mask: SamplingMask


def inputs(shape: Shape, sets: Sets, device: torch.device, seed: int) -> Inputs:
    """Ids by Zipf's law, as text has them: a few of them are in a large part of all sets."""
    generator = torch.Generator("cpu").manual_seed(seed)
    sizes = torch.tensor(sizes_of(sets, shape.N, shape.V, seed))
    rows = torch.repeat_interleave(sizes)
    ranks = (torch.rand(len(rows), generator=generator) * torch.log(torch.tensor(float(shape.V)))).exp()
    ids = ranks.long().clamp(max=shape.V - 1)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    targets = torch.randint(shape.V, (shape.N,), generator=generator)
    firsts = offsets[:-1].clamp(max=max(0, len(ids) - 1))
    targets = torch.where(sizes > 0, ids[firsts], targets)
    random = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    hidden = torch.randn(shape.N, shape.H, **random).to(torch.bfloat16)
    weight = (torch.randn(shape.V, shape.H, **random) * 2 / shape.H**0.5).to(torch.bfloat16)
    mask = SamplingMask(ids.to(device), offsets.to(device))
    found = Inputs(
        hidden[None],
        weight,
        targets[None].to(device),
        torch.zeros(1, shape.N, device=device),
        torch.ones(1, device=device),
        ids.to(device),
        rows.to(device),
        mask,
    )
    logps = torch.cat([logps_of(found, part)[0] for part in parts(shape.N)])
    found.old_logps.copy_(logps[None] + 0.1 * torch.where(sizes == 1, 0.0, 1.0).to(device))
    return found


def parts(N: int) -> Iterator[slice]:
    return (slice(start, min(start + TRUTH_CHUNK, N)) for start in range(0, N, TRUTH_CHUNK))


@torch.no_grad()
def logps_of(x: Inputs, part: slice) -> tuple[Tensor, Tensor]:
    """(log-probabilities over the sets, all of them (n, V)) in fp32, on full logits."""
    with exact_products():
        z = x.hidden[0, part].float() @ x.weight.float().t()
    here = (x.rows >= part.start) & (x.rows < part.stop)
    out = torch.ones_like(z, dtype=torch.bool)
    out[x.rows[here].unique() - part.start] = False
    out[x.rows[here] - part.start, x.ids[here]] = True
    log_p = z.masked_fill_(~out, -torch.inf).log_softmax(1)
    return log_p.gather(1, x.targets[0, part, None])[:, 0], log_p


@torch.no_grad()
def truth(x: Inputs) -> dict[str, Tensor]:
    """The loss and its gradients by their definition: no ratio is clipped."""
    N, total, d_hidden = x.targets.numel(), 0.0, []
    d_weight = torch.zeros_like(x.weight, dtype=torch.float32)
    for part in parts(N):
        logps, log_p = logps_of(x, part)
        ratio = (logps - x.old_logps[0, part]).exp()
        total -= ratio.sum() / N
        d_z = log_p.exp().mul_((ratio / N)[:, None])
        d_z.scatter_add_(1, x.targets[0, part, None], -(ratio / N)[:, None])
        with exact_products():
            d_hidden.append(d_z @ x.weight.float())
            d_weight.addmm_(d_z.t(), x.hidden[0, part].float())
    return {"loss": total, "d_hidden": torch.cat(d_hidden)[None], "d_weight": d_weight}


def replayed(x: Inputs) -> Tensor:
    return GRPOLoss()(
        x.hidden,
        x.weight,
        x.targets,
        advantages=x.advantages,
        old_logps=x.old_logps,
        sampling_mask=x.mask,
    ).loss


def without_sets(x: Inputs) -> Tensor:
    return GRPOLoss()(x.hidden, x.weight, x.targets, advantages=x.advantages, old_logps=x.old_logps).loss


def full_logits(x: Inputs) -> Tensor:
    z = (x.hidden[0] @ x.weight.t()).float()
    out = torch.ones_like(z, dtype=torch.bool)
    out[x.rows] = False
    out[x.rows, x.ids] = True
    logps = z.masked_fill(~out, -torch.inf).log_softmax(1).gather(1, x.targets[0, :, None])[:, 0]
    ratio = (logps - x.old_logps[0]).exp()
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()


WAYS = {"logitless": replayed, "without sets": without_sets, "full logits": full_logits}


def step(function: Callable[[Inputs], Tensor], x: Inputs) -> Callable[[], Tensor]:
    def run() -> Tensor:
        for leaf in (x.hidden, x.weight):
            leaf.requires_grad_().grad = None
        loss = function(x)
        loss.backward()
        return loss.detach()

    return run


def check(call: Callable[[], Tensor], x: Inputs, expected: dict[str, Tensor] | None) -> dict:
    """Errors of one run on poisoned memory; of the call without sets there is nothing to compare."""
    device = x.weight.device
    poison(device)
    try:
        loss = call()
        synchronize(device)
    except torch.OutOfMemoryError:
        return {"verdict": "out of memory"}
    if expected is None:
        return {"verdict": "ok"}
    found = {"loss": loss, "d_hidden": x.hidden.grad, "d_weight": x.weight.grad}
    errors = {name: relative_l2(found[name], exact) for name, exact in expected.items()}
    right = all(error <= LIMITS[name] for name, error in errors.items())
    return {"verdict": "ok" if right else "wrong"} | {f"{name}_error": x for name, x in errors.items()}


def rows_of(x: Inputs, shape: Shape, sets: Sets, seconds: float) -> list[dict]:
    device, expected = x.weight.device, truth(x)
    runs = {name: step(function, x) for name, function in WAYS.items()}
    rows = []
    for name, call in runs.items():
        row = {"shape": asdict(shape), "sets": sets.name, "name": name}
        rows.append(row | check(call, x, None if name == "without sets" else expected))
        release(device)
    cases: dict[str, Case] = {
        row["name"]: (lambda call=runs[row["name"]]: call) for row in rows if row["verdict"] == "ok"
    }
    chunk = min(CHUNK, shape.N)
    bare = chunked_gemms(x.hidden[0].detach(), x.weight.detach(), chunk)
    times = interleave({"bare": bare, **cases}, device, seconds=seconds)
    for row in rows:
        if times.get(row["name"]):
            row |= spread(times[row["name"]]) | {"bare_ms": median(times["bare"])}
            row["ratio"] = row["ms"] / row["bare_ms"]
            row["peak_bytes"] = peak_bytes(runs[row["name"]], device)
            if row["name"] == "logitless" and sets.name == "prime-rl":
                row["target"] = TARGET
    return rows


def run(
    document: dict,
    device: torch.device,
    *,
    quick: bool,
    seconds: float,
    out,
    say: Callable[[str], None],
) -> None:
    """Every shape and kind of sets: each way checked, and timed in turn with the three products."""
    document["rows"] = []
    for shape in QUICK_SHAPES if quick else SHAPES:
        for sets in SETS[::5] if quick else SETS:
            x = inputs(shape, sets, device, document["seed"])
            for row in rows_of(x, shape, sets, seconds):
                document["rows"].append(row)
                say(
                    f"{row['sets']}, {row['name']}: {row['verdict']} {text(row.get('ratio'), '{:.3f}') or ''}"
                )
            write_json(out, document)
    document["complete"] = True
    write_json(out, document)


def table(document: dict) -> str:
    body = [
        [
            row["shape"]["H"],
            row["sets"],
            row["name"],
            text(row.get("ms"), "{:.2f}") or row["verdict"],
            text(row.get("ratio"), "{:.3f}"),
            text(row.get("target"), "{:.3f}"),
            text(gib(row.get("peak_bytes")), "{:.2f}"),
        ]
        for row in document["rows"]
    ]
    headers = ["H", "sets", "", "ms", "x 3 products", "target", "peak GiB"]
    return tabulate(body, headers, disable_numparse=True, stralign="right")


def failed(document: dict) -> list[str]:
    """Our own rows that are not right."""
    return [f"{x['sets']}, H {x['shape']['H']}" for x in document["rows"] if x["verdict"] == "wrong"]
