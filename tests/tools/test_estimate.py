"""`logitless.estimate`: the plan that then runs, and the products that then are counted."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import logitless
from logitless import (
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    MedusaHeads,
    MedusaLoss,
    MultiTokenLoss,
    linear_logprobs,
)
from logitless.__main__ import main, parser
from logitless.engine import budget
from logitless.engine.plan import MIB
from logitless.engine.readers.logits import LogitsReader
from tests.losses import every_loss
from tests.losses.every_loss import LOSSES, TEACHER_H, B, H, K, LossCase, V
from tests.support import DEVICE
from tests.tools.test_check import UNREDUCED

pytestmark = pytest.mark.usefixtures("uncompiled")
ROOT = Path(__file__).parents[2]
T = 11
SIZES = {"tokens": B * T, "hidden_size": H, "vocab_size": V, "dtype": torch.float32, "device": DEVICE}
TEACHER = {"teacher_hidden_size": TEACHER_H}


def prepared(name: str, **options):
    """A loss, its call's arguments, and the sizes that describe them."""
    x = every_loss.given(T)
    sizes = SIZES | {"sequences": B, "targets": x.targets}
    if name == "gathered":
        loss = DistillationLoss(support="teacher", topk_mode="renormalize")
        weight = torch.randn(400, H, device=DEVICE, requires_grad=True)
        best = torch.full_like(x.topk_logprobs[..., :1], -1.0), x.topk_ids[..., :1]
        sizes |= {"vocab_size": 400, "teacher_topk": 1}
        return loss, (x.hidden, weight, x.targets), {"teacher_logprobs_topk": best}, sizes
    case = LOSSES[name]
    if isinstance(case, LossCase):
        loss, arguments, inputs = case.prepare(x, every_loss.heads(), **options)
    else:
        loss = functools.partial(linear_logprobs, entropy=True, **options)
        arguments, inputs = (x.hidden, x.weight, x.targets), {"bias": x.bias}
    if "teacher_hidden" in inputs:
        sizes |= TEACHER
    if "teacher_logprobs_topk" in inputs:
        sizes |= {"teacher_topk": K}
    if getattr(loss, "reader", None) is LogitsReader:  # the sum of logits and bias is one more temporary
        sizes |= {"bias": inputs["bias"]}
    if name in ("multi-token", "Medusa"):
        sizes |= {"heads": 1 if name == "multi-token" else 2}
    return loss, arguments, inputs, sizes


# In several chunks, and groups of which some do not fit.
BUDGETS = {"one chunk": {}, "chunks": {"logits_budget": 5_000}, "no reduction": {"reduction": "none"}}
PLANNED = [(name, how) for name in LOSSES for how in BUDGETS if how != "no reduction" or name in UNREDUCED]


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(("name", "how"), PLANNED)
def test_the_plan_is_the_one_that_runs(name, how):
    loss, arguments, inputs, sizes = prepared(name, **BUDGETS[how])
    ran, make_plan = [], budget.make_plan

    def noted(*arguments, **options):
        ran.append(make_plan(*arguments, **options))
        return ran[-1]

    with mock.patch.object(budget, "make_plan", noted):
        out = loss(*arguments, **inputs)
        (out.logps if name == "logprobs" else out.loss).sum().backward()
    assert list(logitless.estimate(loss, **sizes).plans) == ran
    if name != "logprobs":
        with torch.no_grad():
            assert logitless.estimate(loss, **sizes).plan == loss(*arguments, **inputs).plan


# What the counter of torch leaves out.
IN_PLACE = {torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * a[0] * a[1] * b[1]}
# What a walk multiplies with, and how often: a frozen head, a reference, unreduced numbers.
COUNTED = {
    "cross-entropy": ("cross-entropy", {}, {}),
    "cross-entropy, frozen head": ("cross-entropy", {}, {"frozen_head": True}),
    "unreduced": ("cross-entropy", {"reduction": "none"}, {}),
    "unreduced, frozen head": ("cross-entropy", {"reduction": "none"}, {"frozen_head": True}),
    "log-probabilities": ("logprobs", {}, {}),
    "reference": ("DPO", {}, {"reference_hidden_size": TEACHER_H}),
    "reference, frozen head": ("DPO", {}, {"reference_hidden_size": TEACHER_H, "frozen_head": True}),
    "reference, walked twice": ("DPO", {"logits_budget": 4000}, {"reference_hidden_size": TEACHER_H}),
    "reference of a policy": ("GRPO", {}, {"reference_hidden_size": TEACHER_H}),
    "predictions": ("cross-entropy", {"return_predictions": True, "logits_budget": 5_000}, {}),
    "teacher": ("JSD", {}, {}),
    "unreduced, teacher": ("JSD", {"reduction": "none"}, {}),
    "gathered columns": ("gathered", {}, {}),
}


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(("name", "options", "sizes"), COUNTED.values(), ids=COUNTED)
def test_products_and_bytes_are_those_that_are_counted(name, options, sizes):
    loss, arguments, inputs, own = prepared(name, **options)
    x, sizes = every_loss.given(T), own | sizes
    for options in (inputs, sizes):
        options.pop("bias", None)
    if "reference_hidden_size" in sizes:
        inputs |= {"ref_hidden": x.teacher_hidden, "ref_weight": x.teacher_weight}
        inputs.pop("ref_logps")
    arguments[1].requires_grad_(not sizes.get("frozen_head", False))
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        out = loss(*arguments, **inputs)
        (out.logps if name == "logprobs" else out.loss).sum().backward()
    rows, vocab = (x.targets != -100).sum().item(), sizes["vocab_size"]
    actual = logitless.estimate(loss, **sizes)
    assert name == "logprobs" or actual.plan == out.plan
    counted = counter.get_total_flops() / (2 * rows * H * vocab)
    assert actual.products + actual.other_products * TEACHER_H / H == pytest.approx(counted)
    gradients = [x.grad.nbytes for x in arguments[:2] if x.grad is not None]
    assert actual.gradient_bytes == sum(gradients)
    assert actual.logits_bytes == B * T * vocab * 4


def test_gathered_columns_are_no_products_in_any_walk():
    loss = DistillationLoss(support="teacher", topk_mode="renormalize", reduction="none")
    actual = logitless.estimate(loss, **SIZES | {"vocab_size": 400}, sequences=B, teacher_topk=1)
    assert actual.plan.columns == 1 and len(actual.plans) == 2 and actual.products == 0


def test_no_memory_is_taken():
    """Of hidden states of 128 TiB and a head of 2 PiB, which nothing can allocate."""
    huge = {"tokens": 2**16, "hidden_size": 2**30, "vocab_size": 2**20, "device": DEVICE}
    for loss, sizes in (
        (DPOLoss(), {"sequences": 8, "reference_hidden_size": 2**30}),
        (JSDLoss(logits_dtype=torch.float32), {}),
        (MedusaLoss(), {"heads": 2}),
    ):
        actual = logitless.estimate(loss, **huge, **sizes)
        assert actual.logits_bytes == 2**37 and actual.gradient_bytes > 2**51


def test_several_chunks_sum_in_fp32():
    sizes = SIZES | {"tokens": 40, "dtype": torch.bfloat16}
    whole, cut = (
        logitless.estimate(CrossEntropyLoss(logits_budget=budget), **sizes) for budget in (None, 2**12)
    )
    assert (whole.plan.chunks, whole.sum_bytes) == (1, 0)
    assert cut.plan.chunks > 1 and cut.sum_bytes == V * H * 4
    assert cut.chunk_bytes <= 2**12 or cut.plan.token_chunk == 1
    assert whole.gradient_bytes == (40 + V) * H * 2


SWEEP = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "sweep.json").read_text())
# tokens -> MiB at the peak beyond the inputs
MEASURED = {
    section["shape"]["N"]: row["peak_bytes"] / MIB
    for section in SWEEP["sections"]
    for row in section["rows"]
    if row["name"] == "logitless"
}


@pytest.mark.parametrize("tokens", MEASURED)
def test_the_peak_is_the_one_that_was_measured(tokens):
    size = {"hidden_size": 2048, "vocab_size": 151_936}
    actual = logitless.estimate(CrossEntropyLoss(), tokens=tokens, **size, card="h100-80")
    assert actual.peak_bytes / MIB == pytest.approx(MEASURED[tokens], rel=0.05)
    assert f"\npeak beyond the inputs: about {actual.peak_bytes / MIB:,.1f} MiB\n" in str(actual)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
def test_what_is_alive_at_the_peak():
    bf16 = {"tokens": 2048, "hidden_size": 256, "vocab_size": 8192, "device": DEVICE}
    head, hidden = 4 * MIB, MIB
    one = logitless.estimate(CrossEntropyLoss(), **bf16)
    assert one.plan.chunks == 1 and one.peak_bytes == hidden + head + one.chunk_bytes
    # Of a small chunk, the cast at the end is the peak.
    small = logitless.estimate(CrossEntropyLoss(logits_budget=1), **bf16)
    assert small.chunk_bytes < head and small.peak_bytes == hidden + 2 * head + head
    large = logitless.estimate(CrossEntropyLoss(logits_budget=8 * MIB), **bf16)
    assert large.plan.chunks > 1 and large.chunk_bytes > head
    assert large.peak_bytes == hidden + 2 * head + large.chunk_bytes
    fp32 = logitless.estimate(CrossEntropyLoss(logits_budget=1), **bf16 | {"dtype": torch.float32})
    assert fp32.peak_bytes == fp32.gradient_bytes + fp32.chunk_bytes
    frozen = logitless.estimate(CrossEntropyLoss(logits_budget=1), **bf16, frozen_head=True)
    assert frozen.peak_bytes == hidden + frozen.chunk_bytes
    # Unreduced, d_hidden is made of a vector per token.
    options = {"logits_budget": 1, "reduction": "none"}
    apart = logitless.estimate(CrossEntropyLoss(**options), **bf16, frozen_head=True)
    assert apart.chunk_bytes < hidden and apart.peak_bytes == 2 * hidden
    heads = logitless.estimate(MultiTokenLoss(logits_budget=8 * MIB), **bf16, heads=2)
    assert heads.peak_bytes == 3 * 2 * hidden + 2 * head + heads.chunk_bytes
    with torch.no_grad():
        actual = logitless.estimate(CrossEntropyLoss(), **bf16)
    assert actual.peak_bytes == actual.chunk_bytes


# Of Qwen3-0.6B's head, as TRL's SFT trainer logged it on an H200 (docs/trl.md).
QWEN = {"tokens": 4094, "hidden_size": 1024, "vocab_size": 151_936}
ON_H200 = "fused: 4094 projected tokens in 1 chunk of 4094, 1232.8 of 2560.0 MiB, 3 products"


def test_a_card_that_is_not_here_has_the_plan_that_it_ran():
    pytest.importorskip("triton")
    assert ON_H200 in " ".join((Path(__file__).parents[2] / "docs" / "trl.md").read_text().split())
    actual = logitless.estimate(CrossEntropyLoss(), **QWEN, card="h200-141")
    assert actual.plan.describe() == ON_H200
    operands = (4094 + 151_936) * 1024 * 2
    assert actual.input_bytes == operands and actual.card.memory == 141 * 2**30
    told = (
        f"planned for h200-141 (141 GiB): about {(operands + actual.peak_bytes) / MIB:,.1f} MiB with hidden"
    )
    assert told in str(actual)
    # Nothing is left behind.
    planned = logitless.estimate(CrossEntropyLoss(), **QWEN, device="cpu")
    assert planned.plan.budget < 256 * MIB and planned.card is None and "planned for" not in str(planned)


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        ({"card": "a100-80"}, 2560),
        ({"card": "a100-40"}, 1024),
        ({"card": "l4-24"}, 768),
        ({"memory": 16 * 2**30}, 512),
        ({"card": "a100-80", "memory": 40 * 2**30}, 1024),
    ],
    ids=str,
)
def test_the_budget_is_that_of_a_card(asked, budget):
    """The portable kernels take no memory beside the chunk, so that all of the budget is for its rows."""
    actual = logitless.estimate(CrossEntropyLoss(), **QWEN, **asked)
    assert actual.plan.budget == budget * MIB and actual.plan.row_bytes == QWEN["vocab_size"] * 2
    own = logitless.estimate(CrossEntropyLoss(logits_budget=300 * MIB), **QWEN, **asked)
    assert own.plan.budget == 300 * MIB
    logps = functools.partial(linear_logprobs, entropy=True)
    assert logitless.estimate(logps, **QWEN, **asked).plan.budget == budget * MIB
    logps = functools.partial(linear_logprobs, logits_budget=300 * MIB)
    assert logitless.estimate(logps, **QWEN, **asked).plan.budget == 300 * MIB


# Run as a program in which there is no Triton.
ON_A_CARD = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *others: None if name == "triton" else find(name, *others)

from logitless.__main__ import main

for loss in ("CrossEntropyLoss", "JSDLoss"):
    main(["estimate", loss, *sys.argv[1:]])
"""


def test_a_card_is_planned_for_without_triton(capsys):
    """With torch alone, as before a GPU is rented. The plan is that of a machine with Triton."""
    sizes = ["--card", "h100-80", "--tokens", "16384", "--hidden-size", "2048", "--vocab-size", "151936"]
    for loss in ("CrossEntropyLoss", "JSDLoss"):
        assert main(["estimate", loss, *sizes]) == 0
    ran = subprocess.run(
        [sys.executable, "-c", ON_A_CARD, *sizes],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout) == (0, capsys.readouterr().out), ran.stderr


def test_inputs_that_a_card_holds():
    sizes = {"tokens": 64, "hidden_size": 32, "vocab_size": 500, "card": "a100-40"}
    assert logitless.estimate(CrossEntropyLoss(), **sizes).input_bytes == 2 * 32 * (64 + 500)
    taught = logitless.estimate(JSDLoss(), **sizes, teacher_hidden_size=16, teacher_vocab_size=500)
    assert taught.input_bytes == 2 * (32 + 16) * (64 + 500)
    heads = logitless.estimate(MedusaLoss(), **sizes, heads=2)
    own = sum(x.numel() for x in MedusaHeads(32, 500, 2, device="meta").parameters())
    assert heads.input_bytes == 2 * (32 * (64 + 500) + own)


def test_heads_and_groups():
    actual = logitless.estimate(MedusaLoss(), **SIZES, heads=2)
    assert actual.products == 9 and len(actual.plans) == 3
    packed = torch.tensor([0, 20, 30, 40, B * T], device=DEVICE)
    actual = logitless.estimate(DPOLoss(), **SIZES, cu_seqlens=packed)
    assert actual.plan.rows == B * T and actual.plan.strategy == "resident"
    kl = logitless.estimate(KTOLoss(), **SIZES, sequences=B)
    assert kl.plan.strategy == "resident" and len(kl.plans) == 1
    own = logitless.estimate(CrossEntropyLoss(), **SIZES, sequences=B)
    assert str(own).startswith(own.plan.describe()) and "3" in str(own)


REFUSED = {
    "class": (CrossEntropyLoss, {}, "loss: expected a loss, got CrossEntropyLoss"),
    "sizes": (CrossEntropyLoss(), {"tokens": 0}, "tokens: expected a positive number, got 0"),
    "zero": (JSDLoss(), {"teacher_hidden_size": 0}, "teacher_hidden_size: expected a positive number"),
    "dtype": (CrossEntropyLoss(), {"dtype": torch.int64}, "dtype: expected a floating-point dtype"),
    "absent device": (CrossEntropyLoss(), {"device": "cuda:99"}, "device: expected a device of this machine"),
    "meta device": (CrossEntropyLoss(), {"device": "meta"}, "device: expected a device of this machine"),
    "unknown card": (CrossEntropyLoss(), {"card": "h100", "device": None}, "card: expected one of 'a10-24'"),
    "card and device": (CrossEntropyLoss(), {"card": "h100-80"}, "device: expected None beside card or mem"),
    "memory and device": (CrossEntropyLoss(), {"memory": 2**35}, "device: expected None beside card or mem"),
    "gigabytes": (CrossEntropyLoss(), {"memory": 80, "device": None}, "memory: expected at least 1 GiB"),
    "unknown device": (CrossEntropyLoss(), {"device": "gpu"}, "device: expected a device of this machine"),
    "sequences": (DPOLoss(), {"sequences": 3}, "tokens: expected a multiple of 3 sequences"),
    "pairs": (DPOLoss(), {"sequences": 11}, "hidden: expected a multiple of 2 sequences"),
    "both": (DPOLoss(), {"sequences": 2, "cu_seqlens": torch.tensor([0, 44])}, "sequences: expected None"),
    "no heads": (MedusaLoss(), {}, "heads: expected the number"),
    "heads": (CrossEntropyLoss(), {"heads": 2}, "heads: expected None for one head"),
    "two teachers": (JSDLoss(), {"teacher_topk": 2, **TEACHER}, "teacher_topk: expected None"),
    "no teacher": (CrossEntropyLoss(), TEACHER, "inputs: expected keywords of CrossEntropyLoss"),
    "no reference": (GRPOLoss(), {"advantages": None, "reference_hidden_size": 8}, "expected"),
    "main gradient": (CrossEntropyLoss(), {"accumulate_into": 1}, "accumulate_into: expected nothing"),
    "group": (functools.partial(linear_logprobs, tp_group="tp"), {}, "tp_group: expected None"),
}


@pytest.mark.parametrize(("loss", "sizes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(loss, sizes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        logitless.estimate(loss, **SIZES | sizes)


SIZED = "--tokens 44 --hidden-size 8 --vocab-size 50 --dtype float32 --device cpu".split()


def test_estimate_on_the_command_line(capsys):
    asked = ["estimate", "DPOLoss", *SIZED, "--sequences", "4", "--frozen-head", "--set", "beta=0.2"]
    assert main([*asked, "--set", "logits_dtype=float64", "--set", "loss_type=hinge"]) == 0
    loss = DPOLoss(beta=0.2, logits_dtype=torch.float64, loss_type="hinge")
    expected = logitless.estimate(loss, **SIZES | {"device": "cpu"}, sequences=4, frozen_head=True)
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(["estimate", "linear_logprobs", *SIZED, "--set", "entropy=True"]) == 0
    capsys.readouterr()
    on_card = ["--card", "a100-80", "--memory", "40GiB"]
    assert main(["estimate", "DPOLoss", *SIZED[:-2], *on_card]) == 0
    given = SIZES | {"device": None, "card": "a100-80", "memory": 40 * 2**30}
    assert capsys.readouterr().out == f"{logitless.estimate(DPOLoss(), **given)}\n"
    assert logitless.estimate(DPOLoss(), **given | {"memory": "40GiB"}) == logitless.estimate(
        DPOLoss(logits_budget="1 GiB"), **given
    )
    for wrong, told in (
        (["--sequences", "3"], "multiple of 3"),
        (["--set", "bta=1"], "bta"),
        (["--set", "x"], "NAME"),
        (["--memory", "80GB"], "None beside card or memory"),
        (["--memory", "80Gigs"], "memory: expected a positive number of bytes, got '80Gigs'; write"),
    ):
        with pytest.raises(SystemExit):
            main(["estimate", "DPOLoss", *SIZED, *wrong])
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(("command", "least"), [("estimate", 14), ("check", 5)])
def test_every_option_of_the_command_line_is_explained(command, least):
    (commands,) = (x for x in parser()._actions if isinstance(x.choices, dict))
    actions = commands.choices[command]._actions
    assert len(actions) > least and [x.dest for x in actions if not x.help] == []
