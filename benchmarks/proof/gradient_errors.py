"""Errors of the gradients of each implementation on a trained head, against fp64 on full logits.

The operands are in bf16 and equal for all. A head comes with K batches of N rows: the errors of several
batches tell a bias, which stays, from rounding, which averages out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness.registry import Peers, one_line
from benchmarks.peers import ce as ce_peers
from benchmarks.peers import policy as policy_peers
from benchmarks.peers import preference as preference_peers
from benchmarks.peers.policy import grpo
from benchmarks.peers.preference import dpo

FLOOR = "the truth, rounded"
# Edges of the histogram of the rows' relative errors: 10^-5 to 10^1.
BINS = (-5, 1, 30)
# A filter of Cut Cross-Entropy leaves probabilities below this out.
FILTERED = 2.0**-12
# A logits_budget for which every batch has several chunks: this share of its logits, and on a tiny head the
# least for which a chunk has many rows.
SEVERAL_CHUNKS, LEAST_BUDGET = 5, 2**17
SEQUENCE = 512


@dataclass(frozen=True)
class Head:
    """A head, and K batches of hidden states and targets that belong to it."""

    name: str
    weight: Tensor  # (V, H)
    hidden: Tensor  # (K, N, H)
    targets: Tensor  # (K, N)
    # (V,) ids of the text that the head was trained on; None: not known
    seen: Tensor | None = None


# -- implementations

CE = Peers()
PREFERENCE = Peers()
POLICY = Peers()
LORA = Peers()
DEFAULT = "logitless"
SMALL = "logitless, several chunks"


def ours(load: Callable, **options) -> Callable[[], Callable]:
    return lambda: load(**options)


def our_cross_entropy(**options) -> Callable:
    from logitless import CrossEntropyLoss

    return CrossEntropyLoss(**options)


class SeveralChunks:
    """Cross-entropy in several chunks."""

    def __init__(self, **options):
        self.options, self.losses = options, {}

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor):
        budget = max(len(hidden) * weight.shape[0] * weight.element_size() // SEVERAL_CHUNKS, LEAST_BUDGET)
        if budget not in self.losses:
            self.losses[budget] = our_cross_entropy(logits_budget=budget, **self.options)
        return self.losses[budget](hidden, weight, targets)


CE.add(DEFAULT)(our_cross_entropy)
CE.add(SMALL)(SeveralChunks)
CE.add("logitless, several chunks, bf16 d_weight")(ours(SeveralChunks, accum_dtype=torch.bfloat16))
CE.add("logitless, fp32 logits")(ours(our_cross_entropy, logits_dtype=torch.float32))
CE.add("logitless, bf16 logits")(ours(our_cross_entropy, logits_dtype=torch.bfloat16))
CE.add("eager")(ce_peers.eager)
CE.add("eager, no upcast")(
    lambda: lambda hidden, weight, targets: torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
)
CE.add("eager, fp32 logits")(
    lambda: (
        lambda hidden, weight, targets: torch.nn.functional.cross_entropy(
            hidden.float() @ weight.float().t(), targets
        )
    )
)
CE.add("torch.compile", needs_cuda=True)(ce_peers.compiled)
CE.add("TRL", package="trl")(ce_peers.trl)
CE.add("Liger", package="liger-kernel", needs_cuda=True)(ce_peers.liger)
CE.add("Liger, fp32 d_weight", package="liger-kernel", needs_cuda=True)(ce_peers.liger_fp32)
CE.add("CCE (filtered)", package="cut-cross-entropy", needs_cuda=True)(ce_peers.cce)
CE.add("CCE (no filter)", package="cut-cross-entropy", needs_cuda=True)(ce_peers.cce_exact)

RANK, LORA_SCALE = 16, 2.0


@LORA.add(DEFAULT, package="peft")
def our_lora() -> Callable:
    from peft import LoraConfig
    from peft.tuners.lora import Linear
    from torch import nn

    loss = our_cross_entropy()

    def call(hidden: Tensor, b: Tensor, targets: Tensor, weight: Tensor, a: Tensor):
        base = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        base.weight = nn.Parameter(weight, requires_grad=False)
        config = LoraConfig(r=RANK, lora_alpha=int(LORA_SCALE * RANK))
        head = Linear(base, "default", config, r=RANK, lora_alpha=config.lora_alpha)
        head.lora_A["default"].weight = nn.Parameter(a, requires_grad=False)
        head.lora_B["default"].weight = b
        return loss(hidden, head, targets)

    return call


@LORA.add("eager")
def eager_lora() -> Callable:
    def call(hidden: Tensor, b: Tensor, targets: Tensor, weight: Tensor, a: Tensor) -> Tensor:
        logits = hidden @ weight.t() + (hidden @ a.t()) @ b.t() * LORA_SCALE
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    return call


for peers, module in ((PREFERENCE, preference_peers), (POLICY, policy_peers)):
    peers.add(DEFAULT)(module.logitless)
    peers.add("eager")(module.eager)
    peers.add("Liger", package="liger-kernel", needs_cuda=True)(module.liger)
    peers.add("TRL", package="trl")(module.trl)


# -- the truth


@dataclass(frozen=True)
class Truth:
    loss: float
    d_hidden: Tensor  # (N, H)
    d_weight: Tensor  # (V, H)
    facts: dict[str, float]


def truth(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss_of_logps: Callable[[Tensor], Tensor]
) -> Truth:
    """Loss and gradients in fp64 of a loss that is a function of the targets' log-probabilities (N,)."""
    h, w = hidden.double(), weight.double()
    with torch.no_grad():
        p = h @ w.t()
        largest = p.amax(1)
        lse = p.logsumexp(1)
        picked = p.gather(1, targets[:, None])[:, 0] - lse
        p = p.sub_(lse[:, None]).exp_()
        facts = {
            "nats": -picked.mean().item(),
            "entropy": -torch.special.xlogy(p, p).sum(1).mean().item(),
            "largest logit": largest.mean().item(),
            "share of rows with a probability above 0.9": (p.amax(1) > 0.9).double().mean().item(),
            "probability mass below 2^-12": torch.where(p < FILTERED, p, 0.0).sum(1).mean().item(),
        }
    logps = picked.requires_grad_()
    loss = loss_of_logps(logps)
    (coefficients,) = torch.autograd.grad(loss, logps)
    with torch.no_grad():
        # d loss / d logits = coefficient * (onehot - p)
        p.scatter_add_(1, targets[:, None], torch.full_like(p[:, :1], -1.0))
        p *= -coefficients[:, None]
        return Truth(loss.item(), p @ w, p.t() @ h, facts)


# -- errors


def relative(got: Tensor, true: Tensor) -> float | None:
    """Norm of the error by the norm of the truth."""
    norm = true.norm().item()
    return (got - true).norm().item() / norm if norm else None


def errors(got: Tensor, true: Tensor) -> dict:
    """Errors of a gradient with rows: of the whole, of its rows, and the bias along the truth (`gain`)."""
    norms = true.norm(dim=1)
    live = norms > 0
    rows = (got - true).norm(dim=1)[live] / norms[live]
    start, end, bins = BINS
    logs = rows.clamp(10.0**start, 0.99 * 10.0**end).log10()
    quantiles = torch.tensor([0.5, 0.99], dtype=rows.dtype, device=rows.device)
    median, most = rows.quantile(quantiles).tolist()
    return {
        "error": relative(got, true),
        "gain": ((got * true).sum() / true.square().sum() - 1).item(),
        "rows_median": median,
        "rows_99": most,
        "rows_largest": rows.max().item(),
        "zero_rows": int(((got == 0).all(1) & live).sum()),
        "histogram": torch.histc(logs.float().cpu(), bins, start, end).int().tolist(),
    }


@dataclass(frozen=True)
class Problem:
    """Batches of a head for one objective: arguments of the implementations, and the loss of the targets'
    log-probabilities."""

    objective: str
    # (implementation, hidden (N, H), trained weight, index of the batch) -> its loss
    call: Callable[[Callable, Tensor, Tensor, int], Tensor]
    truths: list[Truth]
    # The weight that is trained, with a row for each id, whose gradient is `d_weight`; None: the head's
    trained: Tensor | None = None


def cross_entropy(head: Head) -> Problem:
    def call(implementation: Callable, hidden: Tensor, weight: Tensor, k: int) -> Tensor:
        return implementation(hidden, weight, head.targets[k])

    truths = [
        truth(hidden, head.weight, targets, lambda logps: -logps.mean())
        for hidden, targets in zip(head.hidden, head.targets, strict=True)
    ]
    return Problem("CE", call, truths)


def logps_of(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Exact log-probabilities (N,)."""
    with torch.no_grad():
        logits = hidden.double() @ weight.double().t()
        return logits.log_softmax(1).gather(1, targets[:, None])[:, 0]


def by_sequence(x: Tensor) -> Tensor:
    """(N, ...) as sequences (B, T, ...), B even."""
    length = min(SEQUENCE, len(x) // 2)
    return x.view(len(x) // length, length, *x.shape[1:])


def preference(head: Head) -> Problem:
    """DPO: pairs of the batch's sequences; the reference's hidden states differ from the policy's by 5%."""
    generator = torch.Generator(head.weight.device).manual_seed(1)
    noise = torch.randn(head.hidden.shape, generator=generator, device=head.weight.device)
    scale = 0.05 * head.hidden.float().square().mean().sqrt()
    ref_hidden = (head.hidden + scale * noise).to(head.hidden.dtype)

    def call(implementation: Callable, hidden: Tensor, weight: Tensor, k: int) -> Tensor:
        shaped = by_sequence(hidden), weight, by_sequence(head.targets[k])
        return implementation(*shaped, by_sequence(ref_hidden[k]), head.weight)

    def loss_of(k: int) -> Callable[[Tensor], Tensor]:
        ref_logps = by_sequence(logps_of(ref_hidden[k], head.weight, head.targets[k]))
        return lambda logps: dpo(by_sequence(logps), ref_logps)

    truths = [
        truth(head.hidden[k], head.weight, head.targets[k], loss_of(k)) for k in range(len(head.hidden))
    ]
    return Problem("DPO", call, truths)


def policy(head: Head) -> Problem:
    """GRPO: random advantages; old log-probabilities that differ from the exact ones by 0.1."""
    generator = torch.Generator(head.weight.device).manual_seed(2)
    device = head.weight.device
    advantages, old = [], []
    for hidden, targets in zip(head.hidden, head.targets, strict=True):
        logps = by_sequence(logps_of(hidden, head.weight, targets))
        advantages.append(torch.randn(len(logps), generator=generator, device=device))
        noise = torch.randn(logps.shape, generator=generator, device=device)
        old.append((logps + 0.1 * noise).float())

    def call(implementation: Callable, hidden: Tensor, weight: Tensor, k: int) -> Tensor:
        shaped = by_sequence(hidden), weight, by_sequence(head.targets[k])
        return implementation(*shaped, advantages[k], old[k])

    def loss_of(k: int) -> Callable[[Tensor], Tensor]:
        return lambda logps: grpo(by_sequence(logps), advantages[k].double(), old[k].double())

    truths = [
        truth(head.hidden[k], head.weight, head.targets[k], loss_of(k)) for k in range(len(head.hidden))
    ]
    return Problem("GRPO", call, truths)


def lora(head: Head) -> Problem:
    """Cross-entropy of a frozen head W + s B A, of which B (V, r) is trained."""
    V, H = head.weight.shape
    options = {"generator": torch.Generator(head.weight.device).manual_seed(3), "device": head.weight.device}
    a = torch.randn(RANK, H, **options).div_(math.sqrt(H)).to(head.weight.dtype)
    b = head.weight.float().std() * torch.randn(V, RANK, **options) / math.sqrt(RANK)
    b = (0.1 * b).to(head.weight.dtype)
    whole = head.weight.double() + LORA_SCALE * b.double() @ a.double()

    def call(implementation: Callable, hidden: Tensor, trained: Tensor, k: int) -> Tensor:
        return implementation(hidden, trained, head.targets[k], head.weight, a)

    def of_b(found: Truth) -> Truth:
        return replace(found, d_weight=LORA_SCALE * found.d_weight @ a.double().t())

    truths = [
        of_b(truth(hidden, whole, targets, lambda logps: -logps.mean()))
        for hidden, targets in zip(head.hidden, head.targets, strict=True)
    ]
    return Problem(ON_LORA, call, truths, b)


ON_LORA = "CE, LoRA on the head"
OBJECTIVES = {
    "CE": (cross_entropy, CE),
    "DPO": (preference, PREFERENCE),
    "GRPO": (policy, POLICY),
    ON_LORA: (lora, LORA),
}


def measure(
    head: Head,
    implementations: dict[str, Callable],
    *,
    problem: Callable[[Head], Problem] = cross_entropy,
    ended: Callable[[], bool] = lambda: False,
) -> dict:
    """A section of the result: the facts of the head, and a row of errors for each implementation.

    `ended()`: whether the time is up; the implementations that are left are not measured.
    """
    made = problem(head)
    truths, K = made.truths, len(made.truths)
    facts = {name: sum(each.facts[name] for each in truths) / K for name in truths[0].facts}
    total = sum(each.d_weight for each in truths)
    if K > 1:
        # How far the gradient of one batch is from that of another: the noise that training lives with.
        first, second = (each.d_weight for each in truths[:2])
        facts["noise of d_weight between batches"] = relative(first, second) / math.sqrt(2)
    rows = []
    for name in (FLOOR, *implementations):
        if ended():
            break
        try:
            rows.append({"name": name, "verdict": "ok"} | row(head, made, implementations.get(name), total))
        # A peer may fail in any way; the others must still be measured.
        except Exception as error:
            rows.append({"name": name, "verdict": "failed", "reason": one_line(error)})
    (V, H), N = head.weight.shape, len(head.targets[0])
    return {
        "head": head.name,
        "objective": made.objective,
        "shape": {"batches": K, "N": N, "H": H, "V": V},
        "dtype": str(head.weight.dtype).removeprefix("torch."),
        "facts": facts,
        "rows": rows,
    }


def row(head: Head, problem: Problem, implementation: Callable | None, total: Tensor) -> dict:
    """Errors of an implementation; None: of the truth rounded to the operands' dtype."""
    K, found, gone = len(problem.truths), {}, []
    for k, true in enumerate(problem.truths):
        if implementation is None:
            dtype = head.weight.dtype
            loss, d_hidden, d_weight = true.loss, true.d_hidden.to(dtype), true.d_weight.to(dtype)
        else:
            hidden = head.hidden[k].clone().requires_grad_()
            weight = torch.nn.Parameter((head.weight if problem.trained is None else problem.trained).clone())
            output = problem.call(implementation, hidden, weight, k)
            output = getattr(output, "loss", output)
            output.backward()
            loss, d_hidden, d_weight = output.item(), hidden.grad, weight.grad
        error = d_weight.double() - true.d_weight
        gone.append(error)
        if k > 0:
            continue
        is_target = torch.zeros(len(head.weight), dtype=torch.bool, device=error.device)
        is_target[head.targets[k]] = True
        found = {
            "loss_error": loss - true.loss,
            "d_hidden": errors(d_hidden.double(), true.d_hidden),
            "d_weight": errors(d_weight.double(), true.d_weight),
            "d_weight_targets": relative(d_weight.double()[is_target], true.d_weight[is_target]),
            "d_weight_others": relative(d_weight.double()[~is_target], true.d_weight[~is_target]),
        }
        if head.seen is not None and (~head.seen).any():
            found["d_weight_never_trained"] = relative(
                d_weight.double()[~head.seen], true.d_weight[~head.seen]
            )
    if K > 1:
        rms = math.sqrt(sum(error.square().sum().item() for error in gone) / K)
        mean = sum(gone) / K
        # 1 / sqrt(K) if the errors of the batches are independent, 1 if they are a bias.
        found["persistence"] = mean.norm().item() / rms if rms else 0.0
        found["d_weight_of_all_batches"] = mean.norm().item() * K / total.norm().item()
    return found


# -- tables


def table(section: dict, form: str = "simple") -> str:
    """One head's table, errors in percent."""

    def percent(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{100 * value:.{digits}f}"

    body = []
    for each in section["rows"]:
        if each["verdict"] != "ok":
            body.append([each["name"], each["verdict"], each["reason"][:60]])
            continue
        cells = [f"{each['loss_error']:.0e}", percent(each["d_hidden"]["error"])]
        cells += [percent(each["d_hidden"]["rows_99"], 2), percent(each["d_weight"]["error"])]
        cells += [percent(each["d_weight_others"]), str(each["d_weight"]["zero_rows"])]
        cells += [f"{each['persistence']:.2f}" if "persistence" in each else ""]
        body.append([each["name"], *cells])
    headers = [
        "%",
        "loss",
        "d_hidden",
        "its rows, 99%",
        "d_weight",
        "rows no target",
        "zero rows",
        "persistence",
    ]
    return tabulate(body, headers, tablefmt=form, disable_numparse=True)


def title(section: dict) -> str:
    shape, facts = section["shape"], section["facts"]
    sizes = f"{shape['batches']} batches of {shape['N']:,} rows, H {shape['H']:,}, V {shape['V']:,}"
    loss = f"{facts['nats']:.2f} nats, largest logit {facts['largest logit']:.0f}"
    return f"{section['head']}, {section['objective']}: {loss}; {sizes}, {section['dtype']}"
