"""The sentences of README.md and docs that have measured numbers, and where each number comes from.

`python -m benchmarks numbers` lists all of them; tests/test_numbers.py compares them with the result files. A
number in a sentence is rounded as it is printed.
"""

from collections.abc import Callable
from math import comb

from benchmarks.harness.measure import LOSS_LIMIT
from benchmarks.harness.report import GIB
from benchmarks.losses import small
from benchmarks.pages.numbers import Claim, Derived, Result, Source, document
from benchmarks.proof import curves

README = "README.md"
BENCHMARKS = "docs/benchmarks.md"
INDEX = "docs/index.md"
WHY = "docs/why.md"
STEPS = "trl.json"
SAMPLER = "sampler.json"
SPECULATORS = "speculators.json"
FUSED_KL = "speculators, fused kernel"


def row(file: str, section: int, name: str, key: str = "ratio", unit: float = 1.0) -> Result:
    """A number of one row of one section."""
    return Result(file, ("sections", section, "rows", name, key), unit)


def ce(section: int, name: str, key: str = "ratio", unit: float = 1.0) -> Result:
    """A number of cross-entropy."""
    return row("ce.json", section, name, key, unit)


def extremes(name: str, key: str, sections: tuple[int, ...], unit: float = 1.0) -> tuple[Derived, Derived]:
    """The least and the most of one implementation of cross-entropy over shapes."""
    sources = tuple(ce(section, name, key, unit) for section in sections)
    return (
        Derived("the least", lambda *values: min(values), sources),
        Derived("the most", lambda *values: max(values), sources),
    )


def peak(file: str, section: int, name: str = "logitless") -> Result:
    return row(file, section, name, "peak_bytes", GIB)


def beyond(file: str, section: int) -> Result:
    return row(file, section, "logitless", "beyond_gradients_bytes", GIB)


def ms(file: str, section: int, name: str) -> Result:
    return row(file, section, name, "ms")


def shorter(file: str, section: int, stock: str, ours: str) -> Derived:
    """By how many percent a step of ours is shorter than the stock one."""
    formula = "100 (1 - ours / stock)"
    sources = (ms(file, section, ours), ms(file, section, stock))
    return Derived(formula, lambda ours, stock: 100 * (1 - ours / stock), sources)


def over_target(of: str, section: int) -> Derived:
    """By how many percent our ratio is above its target."""
    sources = tuple(row(f"{of}.json", section, "logitless", key) for key in ("ratio", "target"))
    return Derived("100 (ratio / target - 1)", lambda ratio, target: 100 * (ratio / target - 1), sources)


def ratio(above: Source, below: Source) -> Derived:
    return Derived("one divided by the other", lambda x, y: x / y, (above, below))


def stated(value: float, why: str) -> Derived:
    """A number that follows from a definition and not from a measurement."""
    return Derived(why, lambda: value)


def chunk_costs(chunk: int) -> list[float]:
    """By how many percent the products of chunks of this size are slower than at a shape's best size."""
    costs = []
    for section in document("gemm-h200.json")["sections"]:
        times = {row["chunk"]: row["us_per_token"] for row in section["rows"] if row["d_weight"] == "fp32"}
        costs.append(100 * (times[chunk] / min(times.values()) - 1))
    return costs


def sum_costs(chunk: int) -> list[float]:
    """By how many percent a sum of d_weight in fp32 makes the products slower than overwriting d_weight."""
    costs = []
    for section in document("gemm-h200.json")["sections"]:
        times = {row["d_weight"]: row["us_per_token"] for row in section["rows"] if row["chunk"] == chunk}
        costs.append(100 * (times["fp32"] / times["overwrite"] - 1))
    return costs


def of_compile(name: str, file: str = "small.json", **where: object) -> list[float]:
    """Times of small calls, of 512 tokens and more, divided by those of torch.compile."""
    ratios = []
    for section in document(file)["sections"]:
        if section["tokens"] >= 512 and where.items() <= section.items():
            rows = {row["name"]: row for row in section["rows"]}
            ratios += [rows[name][key] / rows["torch.compile"][key] for key in ("ratio", "hot_ratio")]
    return ratios


def small_call(objective: str, tokens: int, name: str) -> tuple[dict, dict]:
    """Section and row of small-h200.json, with a trained head."""
    chosen = {"objective": objective, "tokens": tokens, "frozen": False}
    (section,) = [x for x in document("small-h200.json")["sections"] if chosen.items() <= x.items()]
    (row,) = [row for row in section["rows"] if row["name"] == name]
    return section, row


def of_cross_entropy(name: str) -> Derived:
    """Milliseconds of the host for a call of 256 tokens and its backward pass."""
    where = f"benchmarks/results/small-h200.json, CE, 256 tokens: {name} / host_ms"
    return Derived(where, lambda: small_call("CE", 256, name)[1]["host_ms"])


def of_products(objective: str, tokens: int, name: str = "logitless") -> Derived:
    """Time of a small call, one after the other on an H200, divided by that of its products."""

    def found() -> float:
        section, row = small_call(objective, tokens, name)
        return row["hot_ratio"] * section["yardstick"]["ms"] / small.products_ms(section)

    where = f"benchmarks/results/small-h200.json, {objective}, {tokens} tokens: {name}, hot / products"
    return Derived(where, found)


def in_and_out_of_a_graph(objective: str, tokens: int) -> tuple[Derived, Derived]:
    names = "logitless, in a compiled step", "logitless"
    within, without = [of_products(objective, tokens, name) for name in names]
    return within, without


def between(costs: Callable[[int], list[float]], chunk: int) -> tuple[Derived, Derived]:
    """The least and the most over the shapes of gemm-h200.json."""
    where = f"benchmarks/results/gemm-h200.json, chunks of {chunk}: {costs.__doc__}"
    return (
        Derived(f"the least: {where}", lambda: min(costs(chunk))),
        Derived(f"the most: {where}", lambda: max(costs(chunk))),
    )


# The default of logits_budget in GiB, and the cards that it belongs to.
BUDGET = "logitless/engine/budget.py: default_budget"
LARGE, LARGE_CARD, SMALLER, CPU = (
    stated(2.5, BUDGET),
    stated(60, BUDGET),
    stated(1, BUDGET),
    stated(256, BUDGET),
)
ON_CPU = ratio(ms("ce-cpu.json", 0, "logitless"), ms("ce-cpu.json", 0, "eager, fp32 upcast"))
BUDGET_STEPS = "step-budget.json"
STEP_OF = {
    name: ms("step.json", 0, name)
    for name in ("stock", "logitless loss", "logitless layers", "logitless loss + layers")
}


def replayed(file: str) -> tuple[Derived, Derived]:
    """The least and the most of `of_compile`."""
    where = f"benchmarks/results/{file}: {of_compile.__doc__}"
    return (
        Derived(f"the least: {where}", lambda: min(of_compile("logitless", file))),
        Derived(f"the most: {where}", lambda: max(of_compile("logitless", file))),
    )


SHORT_STEPS = tuple(
    Derived(
        f"the {name} ours / stock",
        lambda *times, chosen=chosen: chosen(a / b for a, b in zip(times[::2], times[1::2], strict=True)),
        tuple(ms("trl-short.json", place, x) for place in range(6) for x in ("logitless", "TRL")),
    )
    for name, chosen in (("least", min), ("largest", max))
)
UNCAPTURED = Derived(
    f"the most with 512 tokens: benchmarks/results/small.json: {of_compile.__doc__}",
    lambda: max(of_compile("logitless, without CUDA graphs", tokens=512)),
)
# Shapes of cross-entropy: with 8,192 tokens and more, and with 2,048.
QUACK = "QuACK, chunks of 8,192"
MANY_TOKENS, FEW = (0, 1, 2, 3), 6
TORCH_OFF = extremes("torch F.linear_cross_entropy", "loss_error", tuple(range(9)), unit=0.01)
FSDP = [shorter("fsdp.json", place, "stock", "logitless loss + layers") for place in (0, 1)]

PROOF_PAGE = "docs/proof.md"
PROOF = "convergence.json"  # of it the shadow gradients
GRADIENTS = "convergence-gradients.json"
PORTABLE = "convergence-portable.json"
CURVES = "convergence-curves.json"
CURVES_OF_ALL = "convergence-curves-all.json"
OUTCOMES = "convergence-outcomes.json"
OUTCOMES_OF_GRPO = "convergence-outcomes-grpo.json"
FP32_LOGITS, UPCAST = "logitless, fp32 logits", "eager, fp32 upcast"
READ, STEP_0, STEP_500 = 0, 4, 6  # heads of cross-entropy, as they stand in the result
READ_DPO, READ_GRPO, READ_LORA = 1, 2, 10


def off(section: int, name: str, gradient: str = "d_hidden", key: str = "error") -> Result:
    """The error of a gradient on a trained head, in percent."""
    return Result(GRADIENTS, ("gradients", section, "rows", name, gradient, key), 0.01)


def negative(source: Source) -> Derived:
    """The number without its minus, which stands in the sentence."""
    return Derived("less", lambda value: -value, (source,))


def curve(name: str, *keys: str | int, file: str = CURVES) -> Result:
    """A statistic of the training runs."""
    return Result(file, ("statistics", "rows", name, *keys))


def curve_of(statistic: Callable[[dict, dict], float], seed: int, name: str = "logitless") -> Derived:
    """A distance between the runs of one seed."""

    def distance() -> float:
        runs = {run["name"]: run for run in document(CURVES)["runs"]}
        return statistic(runs[curves.key(curves.EAGER, seed)], runs[curves.key(name, seed)])

    where = f"benchmarks/results/{CURVES}: runs of {name} and eager, seed {seed}"
    return Derived(f"{statistic.__name__}: {where}", distance)


def held_out(name: str) -> tuple[Source, Source]:
    """The interval of a held-out difference, -{} to +{}."""
    return negative(curve(name, "interval", 0)), curve(name, "interval", 1)


def null(*keys: str, file: str = CURVES) -> Result:
    return Result(file, ("statistics", "null", *keys))


def times_null(name: str) -> Derived:
    """Of the runs of all implementations."""
    return ratio(curve(name, "early", file=CURVES_OF_ALL), null("early", file=CURVES_OF_ALL))


def by_seed(statistic: Callable[[dict, dict], float]) -> tuple[Derived, ...]:
    """The distance of logitless as a multiple of the null's largest, of each seed."""
    return tuple(
        ratio(curve_of(statistic, seed), null("by_seed", str(seed), statistic.__name__)) for seed in range(5)
    )


def range_of(values: tuple[Source, ...]) -> tuple[Derived, Derived]:
    return (
        Derived("the least", lambda *values: min(values), values),
        Derived("the most", lambda *values: max(values), values),
    )


def by_chance(*factors: float) -> float:
    """In how many of 100 cases a fourth run of the null is the farthest of the four in so many seeds."""
    above = sum(factor > 1 for factor in factors)
    cases = range(above, len(factors) + 1)
    return 100 * sum(comb(len(factors), k) * 3 ** (len(factors) - k) for k in cases) / 4 ** len(factors)


EARLY_BY_SEED, LATE_BY_SEED = by_seed(curves.early), by_seed(curves.late)
LATE_BY_CHANCE = Derived("a binomial of 1/4 in each seed", by_chance, LATE_BY_SEED)


def outcome(name: str, *keys: str | int, unit: float = 1.0) -> Result:
    """The metric of a recipe."""
    return Result(OUTCOMES_OF_GRPO if name == "GRPO" else OUTCOMES, ("outcomes", name, *keys), unit)


def trained(name: str) -> tuple[Source, Source]:
    """The metric before and after the stock runs."""
    return outcome(name, "before"), outcome(name, "stock")


def paired(name: str, variant: str = "flag", unit: float = 1.0) -> tuple[Source, Source]:
    """The interval of the difference to stock, -{} to +{}."""
    return (
        negative(outcome(name, variant, "interval", 0, unit=unit)),
        outcome(name, variant, "interval", 1, unit=unit),
    )


def largest_missed(name: str) -> Derived:
    return Derived("the larger end", lambda *ends: max(ends), paired(name))


def share_missed(name: str) -> Derived:
    """The larger end of the interval in percent of what the stock runs changed."""
    return Derived(
        "100 x the larger end / |after - before|",
        lambda end, before, after: 100 * end / abs(after - before),
        (largest_missed(name), *trained(name)),
    )


def portable(section: int, name: str, key: str = "ratio", unit: float = 1.0) -> Result:
    return row("ce-portable.json", section, name, key, unit)


def longer(section: int) -> Derived:
    """By how many percent fp32 logits make a call longer."""
    sources = (ms("ce-portable.json", section, FP32_LOGITS), ms("ce-portable.json", section, "logitless"))
    return Derived("100 (fp32 / rounded - 1)", lambda wide, low: 100 * (wide / low - 1), sources)


def more_memory(section: int) -> Derived:
    sources = (peak("ce-portable.json", section, FP32_LOGITS), peak("ce-portable.json", section))
    return Derived("the difference of the peaks", lambda wide, low: wide - low, sources)


def portable_errors(*names: str) -> tuple[Source, ...]:
    """Of d_hidden at the first shape, times 1,000."""
    return tuple(portable(0, name, "d_hidden_error", 1e-3) for name in names)


ABOVE_EAGER = tuple(
    Derived(
        "100 (ours / eager - 1)",
        lambda ours, eager: 100 * (ours / eager - 1),
        tuple(portable(section, name, key) for name in ("logitless", UPCAST)),
    )
    for section in (0, 1)
    for key in ("d_hidden_error", "d_weight_error")
)


AGAINST_FP64 = "tests/layers/test_fuse_layers.py: test_the_error_against_fp64_is_that_of_the_stock_models"
HOPPER = "logitless/kernels/hopper/product_tiles_triton.py: GROUP_BYTES"
MORE_MEMORY = Derived(
    "the most that a peak with the flag exceeds stock's, GRPO with 16 sequences",
    lambda ours, stock: ours - stock,
    (peak(STEPS, 6), peak(STEPS, 6, "TRL")),
)

OF_HEADS = ("Medusa, stage 1", "Medusa, stage 2", "draft")


def shadow_most(formula: str, chosen: Callable[[str], bool], unit: float = 1e-6) -> Derived:
    """The largest difference of fp32 gradients, of the trainers chosen by their names."""

    def largest() -> float:
        runs = [each for each in document(PROOF)["shadow"] if each["dtype"] == "float32"]
        return max(each["largest"] for each in runs if chosen(each["trainer"])) / unit

    return Derived(formula, largest)


def bf16_off(trainer: str, key: str = "stock_error") -> Derived:
    """By how many percent a trainer's gradient in bf16 is off."""

    def error() -> float:
        (found,) = [
            each
            for each in document(PROOF)["shadow"]
            if (each["trainer"], each["dtype"]) == (trainer, "bfloat16")
        ]
        return 100 * found[key]

    return Derived(f"benchmarks/results/{PROOF}: shadow, {trainer}, bfloat16, {key}", error)


def lora_of_full(file: str, name: str, key: str) -> tuple:
    """The smallest and largest ratio of a row to full fine-tuning: with, without checkpointing; dropout."""
    full = [row(file, place, "full fine-tuning", key) for place in (0, 0, 2, 2)]
    return range_of(tuple(ratio(row(file, place, name, key), each) for place, each in enumerate(full)))


SFT_BF16 = 1  # as it stands in the result

NINETY_FIVE = stated(95, "benchmarks/proof/curves.py: interval")

# With the kernels of GPUs other than Hopper.
OFF_WITH_OTHERS = Result(PORTABLE, ("gradients", READ, "rows", "logitless", "d_hidden", "error"), 0.01)

START = "docs/start.md"
CARD = "the memory of a card"
STATIC = "logitless/engine/static_rows.py: SIZE"

CLAIMS = (
    Claim(
        "docs/design.md",
        "The call takes the GPU {} times as long as a copy of the logits",
        (Result("given-logits.json", ("rows", "logitless", "gpu_of_copy")),),
    ),
    Claim(
        "docs/howto/lora.md",
        "GPU computes for {} of the {} ms of a step with grouped layers ({} ms with full fine-tuning",
        (
            row("lora.json", 1, "grouped", "gpu_ms"),
            ms("lora.json", 1, "grouped"),
            row("lora.json", 0, "full fine-tuning", "gpu_ms"),
        ),
    ),
    Claim(
        "docs/howto/lora.md",
        "computes for {} to {} times as long as with full fine-tuning of a 0.6B model of 4 x 4,096 tokens, "
        "and with PEFT's for {} to {} times",
        lora_of_full("lora.json", "grouped", "gpu_ms") + lora_of_full("lora.json", "PEFT", "gpu_ms"),
    ),
    Claim(
        "docs/howto/lora.md",
        "step takes {} to {} times as long as with full fine-tuning in the tables below",
        lora_of_full("lora.json", "grouped", "ms"),
    ),
    Claim(
        "docs/howto/lora.md",
        "8 x 4,096 tokens it takes {} to {} times as long, and the GPU alone {} to {} times",
        lora_of_full("lora-8x4096.json", "grouped", "ms")
        + lora_of_full("lora-8x4096.json", "grouped", "gpu_ms"),
    ),
    Claim(
        "docs/howto/lora.md",
        "tables below, and {} to {} times in TRL's",
        range_of(
            tuple(
                ratio(
                    ms("step-lora.json", 0, f"LoRA{dropout}, logitless loss + layers"),
                    ms("step-lora.json", 0, "full fine-tuning, logitless loss + layers"),
                )
                for dropout in ("", ", dropout 0.05")
            )
        ),
    ),
    Claim(
        "docs/howto/lora.md",
        "for {} of {} ms with stock decoder layers compiled by torch.compile, and for {} of {} ms",
        tuple(
            number
            for name in ("PEFT, compiled layers", "PEFT")
            for number in (row("lora.json", 1, name, "gpu_ms"), ms("lora.json", 1, name))
        ),
    ),
    Claim(
        "docs/howto/lora.md",
        "without dropout their step takes {} ms, with grouped layers {} ms",
        (ms("lora.json", 0, "PEFT, compiled layers"), ms("lora.json", 0, "grouped")),
    ),
    Claim(
        "docs/howto/lora.md",
        "steps with grouped layers took {} to {} times as long as with full fine-tuning",
        lora_of_full("lora-slow-host.json", "grouped", "ms"),
    ),
    Claim(
        "docs/howto/lora.md",
        "so were PEFT's own, {} for {} ms",
        (ms("lora-slow-host.json", 0, "PEFT"), ms("lora-slow-host.json", 0, "grouped")),
    ),
    Claim(
        "docs/howto/lora.md",
        "differs from PEFT's by {}% with compiled layers, more than the benchmark allows ({}%)",
        (
            row("lora-8b-off-h200.json", 0, "PEFT, compiled layers", "gradient_difference", 0.01),
            stated(5, "benchmarks/harness/measure.py: GRADIENT_LIMIT"),
        ),
    ),
    Claim(
        README,
        "tokens and checkpointing takes {} ms with fused LoRA projections and {} ms with PEFT's",
        (ms("lora-8b.json", 0, "grouped"), ms("lora-8b.json", 0, "PEFT")),
    ),
    Claim(
        START,
        "a step of {} ms with fused LoRA layers and {} ms with PEFT's, in {} and {} GiB",
        (
            ms("lora-8b.json", 0, "grouped"),
            ms("lora-8b.json", 0, "PEFT"),
            peak("lora-8b.json", 0, "grouped"),
            peak("lora-8b.json", 0, "PEFT"),
        ),
    ),
    Claim(
        START,
        "a peak of {} GiB and {} ms a step, with PEFT's layers {} GiB and {} ms",
        (
            peak("lora-4bit.json", 0, "grouped, 4-bit base"),
            ms("lora-4bit.json", 0, "grouped, 4-bit base"),
            peak("lora-4bit.json", 0, "PEFT, 4-bit base"),
            ms("lora-4bit.json", 0, "PEFT, 4-bit base"),
        ),
    ),
    Claim(START, "with TRL, one GPU of {} GB", (stated(80, CARD),)),
    Claim(START, "of a 4-bit base, one GPU of {} GB", (stated(24, CARD),)),
    Claim(START, "a GPU of {} GB. The kernels", (stated(24, CARD),)),
    Claim(START, "of a GPU below {} GiB, at most {} GiB", (LARGE_CARD, SMALLER)),
    *(
        Claim(
            page,
            "cross-entropy with gradients takes {} GiB and {} ms on one H100; PyTorch with full logits, cast "
            "from bf16 to fp32, takes {} GiB and {} ms, and compiled {} GiB and {} ms",
            tuple(
                ce(1, name, key, unit)
                for name in ("logitless", "eager, fp32 upcast", "torch.compile")
                for key, unit in (("peak_bytes", GIB), ("ms", 1.0))
            ),
        )
        for page in (README, INDEX)
    ),
    Claim(
        BENCHMARKS,
        "with the loss of logitless as well: {} ms for {} ms",
        (ms("step.json", 0, "logitless loss + compiled layers"), STEP_OF["logitless loss + layers"]),
    ),
    Claim(
        WHY,
        "measurements with {} to {} of the time of the eager function",
        (stated(0.61, "PyTorch #195829"), stated(0.87, "PyTorch #195829")),
    ),
    Claim(
        WHY,
        "with V 248,320 {} and {}",
        (ce(9, QUACK, "hot_ratio"), ce(9, "logitless", "hot_ratio")),
    ),
    Claim(
        README,
        "takes {} ms with TRL alone, {} ms with the loss, {} ms with fused layers and {} ms with both",
        tuple(STEP_OF.values()),
    ),
    Claim(
        README,
        "compiled by torch.compile a step takes {} ms, and {} ms with the loss of logitless too",
        (ms("step.json", 0, "compiled layers"), ms("step.json", 0, "logitless loss + compiled layers")),
    ),
    *(
        Claim(INDEX, f"| {step} | {{}} ms |", (source,))
        for step, source in zip(
            (
                "TRL alone",
                "with the loss of logitless",
                "with the layers of logitless",
                "with loss and layers of logitless",
            ),
            STEP_OF.values(),
            strict=True,
        )
    ),
    Claim(INDEX, "| with Liger's layers | {} ms |", (ms("step.json", 0, "Liger's layers"),)),
    Claim(
        INDEX,
        "| with compiled layers (torch.compile) | {} ms |",
        (ms("step.json", 0, "compiled layers"),),
    ),
    Claim(
        INDEX,
        "| with the loss of logitless and compiled layers | {} ms |",
        (ms("step.json", 0, "logitless loss + compiled layers"),),
    ),
    *(
        Claim(
            "docs/activations.md",
            f"| {budget} | {{}} ms | {{}} GiB |",
            (ms(BUDGET_STEPS, 0, name), peak(BUDGET_STEPS, 0, name)),
        )
        for budget, name in (
            ("none, gradient checkpointing", "logitless loss + layers"),
            ("a quarter", "logitless loss + layers, 25%"),
            ("half", "logitless loss + layers, 50%"),
            ("three quarters", "logitless loss + layers, 75%"),
            ("everything", "logitless loss + layers, 100%"),
        )
    ),
    Claim(
        README,
        "is {}% shorter for SFT, and with {} of its 32 layers {}% for DPO",
        (FSDP[0], Result("fsdp.json", ("sections", 1, "layers")), FSDP[1]),
    ),
    Claim(README, "cross-entropy takes {} times the time of plain PyTorch", (ON_CPU,)),
    Claim(
        README,
        "In another run it took {} ms, and compiled PyTorch {} ms",
        tuple(row("small.json", 2, name, "ms") for name in ("logitless", "torch.compile")),
    ),
    Claim(
        WHY,
        "shortens a step by {} to {}% at 16,384 tokens",
        (shorter(STEPS, 5, "TRL", "logitless"), shorter(STEPS, 1, "TRL", "logitless")),
    ),
    Claim(
        "docs/layers.md",
        "fused layers shorten the step from {} to {} ms, Liger's to {} ms",
        tuple(ms("step-families.json", 1, name) for name in ("stock", "logitless layers", "Liger's layers")),
    ),
    Claim(
        "docs/layers.md",
        "32 experts: from {} to {} ms, and to {} ms with both flags",
        tuple(
            ms("step-families.json", 2, name)
            for name in ("stock", "logitless layers", "logitless loss + layers")
        ),
    ),
    Claim(
        "docs/layers.md",
        "did not end within the time limit of {} s",
        (stated(130, "step-families.json: the reason of the row"),),
    ),
    Claim(
        "docs/index.md",
        "the same step took {} to {} ms in four of them",
        range_of(
            (
                ms("recipes.json", 0, "both flags"),
                ms("step-lora.json", 0, "full fine-tuning, logitless loss + layers"),
                ms(BUDGET_STEPS, 0, "logitless loss + layers"),
                STEP_OF["logitless loss + layers"],
            )
        ),
    ),
    Claim(
        START,
        "with a 0.6B model a step takes {} ms with both flags, and {} ms without",
        (ms("step-lora.json", 0, "LoRA, logitless loss + layers"), ms("step-lora.json", 0, "LoRA")),
    ),
    Claim(
        START,
        "GPU computes {} ms longer for a step with PEFT's layers, and {} ms longer with fused ones",
        tuple(
            Derived(
                "with dropout - without",
                lambda dropped, plain: dropped - plain,
                (row("lora.json", 1, name, "gpu_ms"), row("lora.json", 0, name, "gpu_ms")),
            )
            for name in ("PEFT", "grouped")
        ),
    ),
    Claim(
        WHY,
        "shortens the step of a 0.6B model from {} to {} ms",
        (STEP_OF["stock"], STEP_OF["logitless layers"]),
    ),
    Claim(
        WHY,
        "takes {} times the products and that of logitless {}",
        (ce(3, QUACK, "hot_ratio"), ce(3, "logitless", "hot_ratio")),
    ),
    Claim(
        WHY,
        "with V 128,256 {} and {}.",
        (ce(0, QUACK, "hot_ratio"), ce(0, "logitless", "hot_ratio")),
    ),
    Claim(
        WHY,
        "in bf16 logitless takes {} and {} at the first two, and with a pause",
        (ce(3, "logitless, bf16 d_weight", "hot_ratio"), ce(9, "logitless, bf16 d_weight", "hot_ratio")),
    ),
    Claim(
        "docs/howto/small-batches.md",
        "In the first table, a call of 512 tokens or more takes {} to {} times the time of",
        replayed("small.json"),
    ),
    Claim(
        "docs/howto/small-batches.md",
        "is the median of three runs: a call of 512 tokens or more takes {} to {} times the time of",
        replayed("small-h200.json"),
    ),
    Claim(
        "docs/howto/small-batches.md",
        "cross-entropy takes {} times its products with 256 tokens, {} with 512 and {} with 1,024; DPO takes "
        "{}, {} and {} times, ORPO {}, {} and {} times, GRPO {}, {} and {} times",
        tuple(of_products(name, n) for name in ("CE", "DPO", "ORPO", "GRPO") for n in (256, 512, 1024)),
    ),
    Claim(
        "docs/howto/small-batches.md",
        "cross-entropy in such a step takes {} times its products with 512 tokens (outside {}), {} with "
        "1,024 ({}) and {} with 2,048 ({}); GRPO {} times with 512 ({}), {} with "
        "1,024 ({}) and {} with 2,048 ({})",
        tuple(
            x for name in ("CE", "GRPO") for n in (512, 1024, 2048) for x in in_and_out_of_a_graph(name, n)
        ),
    ),
    Claim(
        "docs/howto/small-batches.md",
        "with 256 tokens, the host takes {} ms for a replay and {} ms for plain PyTorch",
        tuple(of_cross_entropy(name) for name in ("logitless", "eager, fp32 upcast")),
    ),
    Claim(
        "docs/howto/small-batches.md",
        "In the last table, a step takes {} to {} times as long as that of the stock trainer",
        SHORT_STEPS,
    ),
    Claim(
        "docs/howto/small-batches.md",
        "on a GPU with {} GB and {} on one with {} GB",
        (stated(80, CARD), stated(600, "24 GB / 128 / (151,936 x 2 bytes)"), stated(24, CARD)),
    ),
    Claim(
        "docs/howto/small-batches.md",
        "calls of up to 512 tokens on a GPU with {} GB, of {} on one with {} GB",
        (stated(80, CARD), stated(160, STATIC), stated(24, CARD)),
    ),
    Claim(
        "docs/design.md",
        "at most {} multiplications for each byte of the GPU's memory: 512 tokens with H 2,048 and V 151,936 "
        "on a GPU with {} GB",
        (stated(6, STATIC), stated(80, CARD)),
    ),
    Claim(
        "docs/howto/small-batches.md",
        "with the portable kernels, a call of 512 tokens or more takes {} to {} times",
        replayed("small-portable.json"),
    ),
    Claim("docs/howto/small-batches.md", "a call of 512 tokens takes up to {} times as long", (UNCAPTURED,)),
    Claim(
        WHY,
        "is off by {}% with the filter and by {}% without it, that of logitless on a Hopper GPU by {}%",
        tuple(off(READ, name) for name in ("CCE (filtered)", "CCE (no filter)", "logitless")),
    ),
    Claim(
        BENCHMARKS,
        "| CCE {} ms, full logits {} ms, Liger {} ms | logitless {} ms, CCE {} ms, full logits {} ms, "
        "Liger {} ms, TRL {} ms |",
        (
            *(stated(ms, "TRL #6858") for ms in (92.6, 137.0, 321.2)),
            *(
                ce(9, name, "ms")
                for name in (
                    "logitless",
                    "CCE (filtered)",
                    "eager, fp32 upcast",
                    "Liger",
                    "TRL ChunkedLogProb",
                )
            ),
        ),
    ),
    Claim(
        BENCHMARKS,
        "chunked loss {} ms, Liger {} ms, full logits {} ms; wanted: {} to {} ms and {} GiB | logitless "
        "{} ms and {} GiB, TRL {} ms and {} GiB, Liger {} ms, CCE {} ms, full logits {} ms |",
        (
            *(stated(number, "TRL #7244") for number in (167, 192, 59, 60, 80, 6)),
            ce(8, "logitless", "ms"),
            ce(8, "logitless", "peak_bytes", GIB),
            ce(8, "TRL ChunkedLogProb", "ms"),
            ce(8, "TRL ChunkedLogProb", "peak_bytes", GIB),
            ce(8, "Liger", "ms"),
            ce(8, "CCE (filtered)", "ms"),
            ce(8, "eager, fp32 upcast", "ms"),
        ),
    ),
    Claim(BENCHMARKS, "its loss is off by {} to {}%", TORCH_OFF),
    Claim(WHY, "Its loss is off by {} to {}%", TORCH_OFF),
    *(
        Claim(
            page,
            "off by more than {}%",
            (stated(100 * LOSS_LIMIT, "benchmarks/harness/measure.py: LOSS_LIMIT"),),
        )
        for page in (BENCHMARKS, WHY)
    ),
    Claim(
        BENCHMARKS,
        "cross-entropy of logitless takes {} to {} times the products at the first four shapes of the table, "
        "QuACK in chunks of 8,192 {} to {}, and torch.compile of full logits {} to {}",
        tuple(
            bound
            for name in ("logitless", QUACK, "torch.compile")
            for bound in extremes(name, "hot_ratio", MANY_TOKENS)
        ),
    ),
    Claim(
        BENCHMARKS,
        "torch.compile with H 4,096 and V 151,936 ({} and {} times the products) and with V 248,320 "
        "({} and {}), Liger's operator for Hopper with V 128,256 ({} and {}), and QuACK with V 128,256 "
        "({} and {}), V 248,320 ({} and {}) and H 1,024 ({} and {})",
        tuple(
            ce(place, name, "hot_ratio")
            for place, peer in (
                *((place, "torch.compile") for place in (8, 9)),
                (0, "Liger sm90"),
                *((place, QUACK) for place in (0, 9, 3)),
            )
            for name in (peer, "logitless")
        ),
    ),
    Claim(
        BENCHMARKS,
        "logitless takes {}, {} and {} times the products at the last three",
        tuple(ce(place, "logitless, bf16 d_weight", "hot_ratio") for place in (0, 9, 3)),
    ),
    Claim(
        BENCHMARKS,
        "a step of a 0.6B model is {}% shorter for SFT, {}% for ORPO and {}% for DPO",
        tuple(shorter(STEPS, place, "TRL", "logitless") for place in (1, 3, 5)),
    ),
    Claim(
        BENCHMARKS,
        "its model, reference and AdamW take {} GiB a rank",
        (row("fsdp.json", 1, "stock", "peak_bytes", GIB),),
    ),
    Claim(
        BENCHMARKS,
        "takes {} GiB beyond its gradients, and one of 32,768 tokens {} GiB",
        (beyond("dpo-length.json", 2), beyond("dpo-length.json", 5)),
    ),
    Claim(
        BENCHMARKS,
        "takes {} GiB beyond its gradients, and of 131,072 tokens {} GiB",
        (beyond("distillation-length.json", 0), beyond("distillation-length.json", 2)),
    ),
    Claim(
        BENCHMARKS,
        "32 pairs of 1,024 tokens takes {} GiB, with 128 pairs {} GiB. "
        "With full logits torch.compile takes {} GiB and {} GiB",
        tuple(
            peak("orpo-batch.json", place, name)
            for name in ("logitless", "torch.compile")
            for place in (0, 2)
        ),
    ),
    Claim(
        BENCHMARKS,
        "with H 2,048 it takes {} times its products (target {}), with V 256,000 {} ({}), with H 1,024 {} "
        "({})",
        tuple(
            source
            for place in (1, 2, 3)
            for source in (ce(place, "logitless"), row("ce.json", place, "logitless", "target"))
        ),
    ),
    Claim(
        BENCHMARKS,
        "DPO misses by {}%, with a frozen head by {}%, and the JSD by {}%. "
        "ORPO takes {} products (target {})",
        (
            *(over_target("preference", place) for place in (2, 3)),
            over_target("distillation", 0),
            *(row("preference.json", 0, "logitless", key) for key in ("ratio", "target")),
        ),
    ),
    Claim(BENCHMARKS, "cross-entropy takes {} times the time of plain PyTorch", (ON_CPU,)),
    Claim(
        "docs/choosing.md",
        "Default: {} GiB on GPUs with at least {} GiB; on smaller GPUs 1/32 of the memory, at most {} GiB; "
        "{} MiB",
        (LARGE, LARGE_CARD, SMALLER, CPU),
    ),
    Claim(
        "docs/troubleshooting.md",
        "({} GiB by default on GPUs with at least {} GiB; smaller GPUs 1/32 of the memory, at most {} GiB)",
        (LARGE, LARGE_CARD, SMALLER),
    ),
    Claim(
        "docs/trl.md",
        "The default is {} GiB on GPUs with at least {} GiB, and 1/32 of the memory, at most {} GiB",
        (LARGE, LARGE_CARD, SMALLER),
    ),
    Claim(
        "docs/trl.md",
        "from {} to {} GiB in a step with 16,384 tokens and a budget of {} GiB",
        (peak(STEPS, 3, "TRL"), peak(STEPS, 3), LARGE),
    ),
    Claim(BENCHMARKS, "are the default of an H100: {} GiB", (LARGE,)),
    Claim("docs/trl.md", "take up to {} GiB more", (MORE_MEMORY,)),
    Claim(
        "docs/quickstart.md",
        "a tensor of {} GiB in bf16",
        (stated(16_384 * 151_936 * 2 / GIB, "16,384 x 151,936 x 2 bytes"),),
    ),
    Claim("docs/layers.md", "above {}%", (stated(100, "as fast as a copy"),)),
    Claim(
        "docs/layers.md",
        "at most {} times as large on average over the families, and at most {} times",
        (stated(1.02, AGAINST_FP64), stated(1.25, AGAINST_FP64)),
    ),
    Claim(
        "docs/design.md",
        "4,096 rows cost {}-{}% over a shape's best size, 2,048 rows {}-{}%, 1,024 rows {}-{}%",
        (*between(chunk_costs, 4096), *between(chunk_costs, 2048), *between(chunk_costs, 1024)),
    ),
    Claim(
        "docs/design.md",
        "This costs {}-{}% (chunks of 4,096 rows) or {}-{}% (2,048)",
        (*between(sum_costs, 4096), *between(sum_costs, 2048)),
    ),
    Claim(
        "docs/howto/speculators.md",
        "in bf16 these are {} GB",
        (stated(4 * 8192 * 151_936 * 2 / 1e9, "4 x 8,192 x 151,936 x 2 bytes"),),
    ),
    Claim(
        "docs/howto/speculators.md",
        "logitless takes {} times its matrix products and {} GiB, torch.compile {} and {} GiB, the fused "
        "kernel {} and {} GiB",
        tuple(
            row(SPECULATORS, 2, name, key, unit)
            for name in ("logitless", "torch.compile", FUSED_KL)
            for key, unit in (("ratio", 1.0), ("peak_bytes", GIB))
        ),
    ),
    Claim(
        "docs/howto/speculators.md",
        "the fastest after a pause: {}, torch.compile {}, logitless {}. In calls that follow each other "
        "logitless takes {}, the fused kernel {}",
        (
            *(row(SPECULATORS, 0, name) for name in (FUSED_KL, "torch.compile", "logitless")),
            *(row(SPECULATORS, 0, name, "hot_ratio") for name in ("logitless", FUSED_KL)),
        ),
    ),
    Claim(
        "docs/sampling.md",
        "a call takes {} ms, without sets {} ms, and with full logits {} ms. "
        "The peak memory is {} GiB, {} GiB and {} GiB",
        tuple(
            Result(SAMPLER, ("rows", place, key), unit)
            for key, unit in (("ms", 1.0), ("peak_bytes", GIB))
            for place in (18, 19, 20)
        ),
    ),
    Claim(
        "docs/sampling.md",
        "reports a mean ratio of {} and {}%",
        (stated(0.896, "TRL's issue 7269"), stated(52, "TRL's issue 7269")),
    ),
    Claim("docs/recipes.md", "both flags took {} ms in another", (STEP_OF["logitless loss + layers"],)),
    Claim("docs/design.md", "hidden states, {} MiB, stay", (stated(16, HOPPER),)),
    Claim(
        "docs/howto/distributed.md",
        "is named after {} seconds",
        (stated(30, "logitless/parallel/agreement.py"),),
    ),
    Claim(
        README,
        "is off by {}% on the head of a trained model, and with PyTorch's bf16 logits by {}%",
        tuple(off(READ, name) for name in ("logitless", "eager")),
    ),
    Claim(
        PROOF_PAGE,
        "is off by {}% with logitless, and by {}% with PyTorch's, TRL's and Liger's bf16 "
        "logits. Full logits in fp32 are nearest on every head: {}%",
        tuple(off(READ, name) for name in ("logitless", "eager", "eager, fp32 logits")),
    ),
    Claim(PROOF_PAGE, "and by {}% with PyTorch's, TRL's", (off(READ, "TRL"),)),
    Claim(PROOF_PAGE, "and by {}% with PyTorch's, TRL's and Liger's", (off(READ, "Liger"),)),
    Claim(
        PROOF_PAGE,
        "logitless is farther off ({}%) than PyTorch ({}%)",
        (off(STEP_0, "logitless"), off(STEP_0, "eager")),
    ),
    Claim(
        PROOF_PAGE,
        "differ from the stock trainer's by {}e-6 at most, and those of RLOO by {}e-5 ({} steps of each). "
        "Gradients of Medusa heads and of a draft differ from those of full logits by {}e-6 at most",
        (
            shadow_most("all but RLOO, times 1e6", lambda name: name not in (*OF_HEADS, "RLOO")),
            shadow_most("RLOO, times 1e5", lambda name: name == "RLOO", 1e-5),
            Derived("the steps of the first", lambda: len(document(PROOF)["shadow"][0]["steps"])),
            shadow_most("heads, times 1e6", lambda name: name in OF_HEADS),
        ),
    ),
    Claim(
        PROOF_PAGE,
        "whose largest logit is {} on average",
        (Result(GRADIENTS, ("gradients", READ, "facts", "largest logit")),),
    ),
    Claim(
        PROOF_PAGE,
        "{} times nearer to the truth than eager in the gradient of the hidden states, and {} times in",
        tuple(
            ratio(off(READ, "eager", gradient), off(READ, "logitless", gradient))
            for gradient in ("d_hidden", "d_weight")
        ),
    ),
    Claim(
        PROOF_PAGE,
        "the largest logit is {} after 500 steps, and the distance is smaller: {}% against {}%",
        (
            Result(GRADIENTS, ("gradients", STEP_500, "facts", "largest logit")),
            off(STEP_500, "logitless"),
            off(STEP_500, "eager"),
        ),
    ),
    Claim(
        PROOF_PAGE,
        "the error of the rounded truth; logitless is off by {}% against {}%",
        (off(STEP_0, "logitless"), off(STEP_0, "eager")),
    ),
    Claim(
        PROOF_PAGE,
        "On every head logitless is off by {} to {}%",
        range_of(
            tuple(
                off(place, "logitless")
                for place, section in enumerate(document(GRADIENTS)["gradients"])
                if section["objective"] == "CE"
            )
        ),
    ),
    Claim(
        PROOF_PAGE,
        "the errors were {} to {}%",
        tuple(stated(x, "convergence.json of commit 42c50fd: d_hidden of logitless") for x in (0.29, 0.30)),
    ),
    Claim(
        PROOF_PAGE,
        '"its rows, {}%" is the error that {}% of',
        (stated(99, "the quantile"), stated(1, "100 - 99")),
    ),
    Claim(
        PROOF_PAGE,
        "the noise of the head's gradient is {}% of its norm",
        (Result(GRADIENTS, ("gradients", READ, "facts", "noise of d_weight between batches"), 0.01),),
    ),
    Claim(
        PROOF_PAGE,
        "with a noise of {}% of their size",
        (stated(5, "benchmarks/proof/gradient_errors.py: preference"),),
    ),
    Claim(
        PROOF_PAGE,
        "is {}% too long on SmolLM2's head, and its loss is off by {}",
        (
            off(READ_DPO, "eager", key="gain"),
            Result(GRADIENTS, ("gradients", READ_DPO, "rows", "eager", "loss_error")),
        ),
    ),
    Claim(
        PROOF_PAGE,
        "{} of {} rows of exactly 0 where",
        (
            Result(GRADIENTS, ("gradients", READ_GRPO, "rows", "eager", "d_hidden", "zero_rows")),
            Result(GRADIENTS, ("gradients", READ_GRPO, "shape", "N")),
        ),
    ),
    Claim(
        PROOF_PAGE,
        "logitless is off by {}% and {}%, and eager by {}% and {}%",
        tuple(off(READ_LORA, name, x) for name in ("logitless", "eager") for x in ("d_hidden", "d_weight")),
    ),
    Claim(
        PROOF_PAGE,
        "gradient is {}% off although its loss agrees with that of logitless to {}e-7",
        (
            Result(PROOF, ("shadow", SFT_BF16, "stock_error"), 0.01),
            Result(PROOF, ("shadow", SFT_BF16, "largest_loss_difference"), 1e-7),
        ),
    ),
    Claim(
        PROOF_PAGE,
        "ORPO ({}%), SFT with LoRA ({}%) and GKD ({}%) are as far off, and in GKD the gradient of logitless "
        "is {}% off",
        (*map(bf16_off, ("ORPO", "SFT, LoRA", "GKD")), bf16_off("GKD", "error")),
    ),
    Claim(PROOF_PAGE, "mean and {}% interval", (NINETY_FIVE,)),
    Claim(
        PROOF_PAGE,
        "The {}% interval of the held-out difference is -{} to +{} nats, so that a difference of {} could",
        (NINETY_FIVE, *held_out("logitless"), held_out("logitless")[0]),
    ),
    Claim(PROOF_PAGE, "a fourth repetition, this would happen with a probability of {}%", (LATE_BY_CHANCE,)),
    Claim(
        PROOF_PAGE,
        "The {}% interval of the difference in accuracy is -{} to +{} for SFT, whose accuracy rises from {} "
        "to {}, and -{} to +{} for GRPO, whose accuracy rises from {} to {}",
        (NINETY_FIVE, *paired("SFT"), *trained("SFT"), *paired("GRPO"), *trained("GRPO")),
    ),
    Claim(
        PROOF_PAGE,
        "off by {}e-3, and by {}e-3 with PyTorch's bf16 logits. reduces the error to {}e-3, and "
        "takes {} to {}% more time",
        (*portable_errors("logitless", UPCAST, FP32_LOGITS), longer(1), longer(0)),
    ),
    Claim(
        PROOF_PAGE,
        "same seed, by a factor of {} to {}; in seeds 3 and 4",
        range_of(LATE_BY_SEED[:3]),
    ),
    Claim(PROOF_PAGE, "in three or more of five with a probability of {}%", (LATE_BY_CHANCE,)),
    Claim(
        PROOF_PAGE,
        "its largest late distance, {}, is below that of one run of the null, {}, and that of TRL, {}",
        (curve("logitless", "late"), null("late"), curve("TRL", "late")),
    ),
    Claim(
        PROOF_PAGE,
        "In the first table the distance is {} to {} times the null's largest",
        range_of(EARLY_BY_SEED),
    ),
    Claim(
        PROOF_PAGE,
        "Five or more of all eleven would happen with a probability of {}%",
        (stated(by_chance(*[2] * 5, *[0] * 6), "a binomial of 1/4 in each seed"),),
    ),
    Claim(
        PROOF_PAGE,
        "in eight or more of eleven with a probability of {}%",
        (stated(by_chance(*[2] * 8, *[0] * 3), "a binomial of 1/4 in each seed"),),
    ),
    Claim(
        PROOF_PAGE,
        "in the first table is -{} to +{} nats. A difference within it is not excluded. To call logitless "
        "equivalent, the interval would have to lie within {}",
        (
            *held_out("logitless"),
            Derived("a fifth", lambda x: curves.MARGIN * x, (null("deviation_between_seeds"),)),
        ),
    ),
    Claim(PROOF_PAGE, "held-out interval of these five seeds is -{} to +{} nats", held_out("TRL")),
    Claim(PROOF_PAGE, "it then answers {}% of the", (outcome("SFT", "before", unit=0.01),)),
    Claim(
        PROOF_PAGE,
        "the accuracy rises from {} to {}. The interval of the flag is -{} to +{}: a difference of {}, that "
        "is {}% of this gain",
        (*trained("SFT"), *paired("SFT"), largest_missed("SFT"), share_missed("SFT")),
    ),
    Claim(
        PROOF_PAGE,
        "**SFT with LoRA**: from {} to {}, interval -{} to +{}",
        (*trained("SFT, LoRA"), *paired("SFT, LoRA")),
    ),
    Claim(
        PROOF_PAGE,
        "the margin rises from {} to {} nats. The interval of the flag is -{} to +{} nats",
        (*trained("DPO"), *paired("DPO")),
    ),
    Claim(
        PROOF_PAGE,
        "The interval of the null, -{} to -{}, excludes 0",
        (paired("DPO", "moved")[0], negative(paired("DPO", "moved")[1])),
    ),
    Claim(
        PROOF_PAGE,
        "**GRPO**: the accuracy rises from {} to {}. The interval is -{} to +{}: a difference of {}, that is "
        "{}% of this gain",
        (*trained("GRPO"), *paired("GRPO"), largest_missed("GRPO"), share_missed("GRPO")),
    ),
    Claim(
        PROOF_PAGE,
        "the KL falls from {} to {} nats. The interval is -{}e-5 to +{}e-5 nats",
        (*trained("distillation"), *paired("distillation", unit=1e-5)),
    ),
    Claim(PROOF_PAGE, "the accepted length rises from {} to {}", trained("Medusa")),
    Claim(
        PROOF_PAGE,
        "a call takes {} times the bare products in place of {} at the first shape, and {} in place of {} at "
        "the second: {}% and {}% longer",
        (
            *(portable(section, name) for section in (0, 1) for name in (FP32_LOGITS, "logitless")),
            longer(0),
            longer(1),
        ),
    ),
    Claim(
        PROOF_PAGE,
        "the peak is {} GiB higher at the first shape, where the budget then gives two chunks in place of "
        "one, and {} GiB at the second",
        (more_memory(0), more_memory(1)),
    ),
    Claim(
        PROOF_PAGE,
        "is off by {}e-3 by default, by {}e-3 with eager, and by {}e-3 with fp32 logits",
        portable_errors("logitless", UPCAST, FP32_LOGITS),
    ),
    Claim(
        PROOF_PAGE,
        "its errors in both gradients are {} to {}% above those of eager",
        (
            Derived("the least", lambda *values: min(values), ABOVE_EAGER),
            Derived("the most", lambda *values: max(values), ABOVE_EAGER),
        ),
    ),
    Claim(
        PROOF_PAGE,
        "is off by {}% with these kernels and with eager, and by {}% with the products for Hopper",
        (OFF_WITH_OTHERS, off(READ, "logitless")),
    ),
    Claim(
        PROOF_PAGE,
        "(second table): the early distance is {} times the null's",
        (times_null("CCE (filtered)"),),
    ),
)
