"""The benchmarks on a CPU: every command runs at tiny sizes, a wrong result is refused, and the pages show
committed results."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness import measure, objective, report, yardstick
from benchmarks.harness.registry import Peer, Peers
from benchmarks.layers import comparison, tiles
from benchmarks.layers.operators import Maker, operators
from benchmarks.losses import ce, distillation, medusa, policy, preference, speculators, tensor_parallel, topk
from benchmarks.losses.ce import CE
from benchmarks.losses.distillation import DISTILLATION
from benchmarks.losses.medusa import MEDUSA
from benchmarks.losses.policy import POLICY
from benchmarks.losses.preference import PREFERENCE
from benchmarks.losses.speculators import SPECULATORS
from benchmarks.models import fsdp, lora, steps, trainer_steps
from benchmarks.peers.ce import eager_loss
from benchmarks.peers.distillation import eager_loss as eager_jsd
from benchmarks.peers.medusa import eager_loss as eager_medusa
from benchmarks.peers.policy import eager_loss as eager_grpo
from benchmarks.peers.preference import eager_loss as eager_preference
from benchmarks.peers.speculators import eager_loss as eager_draft
from benchmarks.proof import tables
from benchmarks.regressions import compare_trees, own_rows
from tests.cases import usually
from tests.ranks import forked
from tests.support import run_uncompiled

CPU = torch.device("cpu")
ROOT = Path(report.RESULTS).parents[1]


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})


def first_operator():
    return next(each for each in operators(Maker(CPU, tiny=True)) if each.kind == "add_rms_norm")


# -- every command

COMMANDS = {
    "ce": (),
    "ce-portable": (),
    "distillation": ("--skip", "TRL"),
    "speculators": (),
    "preference": ("--skip", "TRL"),
    "policy": ("--skip", "TRL"),
    "orpo-batch": ("--only", "logitless", "--only", "eager"),
    "dpo-length": ("--only", "logitless", "--only", "eager"),
    "distillation-length": (),
    "medusa": (),
    "topk": (),
    "sampler": (),
    "given-logits": ("--seconds", "0.1"),
    "rounding": (),
    "sweep": ("--only", "logitless"),
    "gemm": (),
    "cpu": (),
    "profile": ("--row", "KTO"),
    "layers": ("--operator", "fp32 residual", "--operator", "qk_norm_rope 2x3x(16", "--operator", "packed"),
    "tensor-parallel": (),
    "trl": ("--only", "ORPO"),
    "step": ("--only", "stock", "--budget", "50%", "--checkpointing", "off"),
    "activations": (),
    "usecase": ("--only", "stock", "--only", "both", "--batch", "1"),
    "recipes": ("--only", "LoRA+"),
    "lora": ("--checkpointing", "off", "--dropout", "0", "--skip", "each"),
    "convergence": (),
    "small": ("--seconds", "0.1", "--only", "CE", "--only", "DPO"),
}
NEED_TRL = ("trl", "lora", "step", "usecase", "recipes", "activations", "convergence")
# Rows without a verdict: of products alone, and of one profiled call.
WITHOUT_VERDICT = ("gemm", "profile", "activations")


def forked_uncompiled(function, args: tuple, nprocs: int) -> None:
    forked(run_uncompiled, (function, *args), nprocs)


def rows_of_document(written: dict) -> list[dict]:
    if "gradients" in written:
        return [row for x in written["gradients"] for row in x["rows"]] + written["shadow"]
    sections = written.get("sections", ())
    return written.get("rows") or [row for x in sections for row in x["rows"] + x.get("peers", [])]


# Commands that take longest: they run with --all.
LONG = (
    "tensor-parallel",
    "convergence",
    "medusa",
    "speculators",
    "policy",
    "topk",
    "orpo-batch",
    "usecase",
    "activations",
    "preference",
    "recipes",
    "dpo-length",
)


@pytest.mark.parametrize("command", usually({*COMMANDS} - {*LONG}, COMMANDS))
def test_command(command, tmp_path, monkeypatch, uncompiled):
    if command in NEED_TRL:
        pytest.importorskip("trl")
    monkeypatch.setattr(torch.multiprocessing, "spawn", forked_uncompiled)
    out = tmp_path / "result.json"
    where = () if command == "cpu" else ("--device", "cpu")
    result = invoke(command, "--quick", *where, "--out", str(out), *COMMANDS[command])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["complete"] and written["quick"] and written["benchmark"] == command
    assert written["command"].startswith("python -m benchmarks")
    rows = rows_of_document(written)
    assert rows
    for row in rows:
        if command not in WITHOUT_VERDICT:
            assert row["verdict"] == "ok" and row.get("right", True), row
        assert row.get("ms", 1) > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("trl", "--short", "--only", "SFT", "--skip", "smoothing", "--timed", "1"), "trl-short"),
        (("small", "--portable", "--only", "CE", "--seconds", "0.05"), "small-portable"),
        (("step", "--families", "--model", "MoE", "--checkpointing", "off"), "step-families"),
    ],
)
def test_another_file_of_a_command(options, name, tmp_path, uncompiled):
    if name != "small-portable":
        pytest.importorskip("trl")
    out = tmp_path / "result.json"
    command, *rest = options
    result = invoke(command, "--quick", "--device", "cpu", "--out", str(out), *rest)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["complete"] and written["benchmark"] == name
    for row in rows_of_document(written):
        assert row["verdict"] == "ok", row


@pytest.mark.slow
def test_steps_with_lora(tmp_path):
    """A row with an adapter is compared with the stock trainer with the same adapter."""
    pytest.importorskip("trl")
    out = tmp_path / "step-lora.json"
    options = ("--lora", "--checkpointing", "off", "--skip", "full", "--out", str(out))
    result = invoke("step", "--quick", "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["complete"] and written["benchmark"] == "step-lora"
    rows = {row["name"]: row for row in rows_of_document(written)}
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["verdict"] == "ok" and row["stock"] == name.removesuffix(", logitless loss + layers")
        assert row["grad_norm_difference"] < 1e-5  # PEFT's masks, on a CPU
    plain, _, dropped, _ = rows.values()
    assert plain["runs"][0]["grad_norms"] != dropped["runs"][0]["grad_norms"]


@pytest.mark.slow
def test_fsdp_command(tmp_path):
    """In a process of its own: its ranks are forked from one that has imported TRL."""
    pytest.importorskip("trl")
    out = tmp_path / "fsdp.json"
    command = [sys.executable, "-m", "benchmarks", "fsdp", "--quick", "--device", "cpu"]
    command += ["--skip", "Liger's layers", "--out", str(out)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(out.read_text())
    assert written["complete"] and [section["trainer"] for section in written["sections"]] == ["SFT", "DPO"]
    for section in written["sections"]:
        stock, ours = section["rows"]
        assert stock["verdict"] == ours["verdict"] == "ok" and min(stock["grad_norms"]) > 0.1
        # In bf16; what differs shows that they were computed apart.
        assert "plan" in ours and 0 < ours["grad_norm_difference"] < 1e-2


def test_layer_tiles(monkeypatch):
    pytest.importorskip("triton")
    said, times = [], iter(range(10_000, 0, -1))
    monkeypatch.setattr(tiles, "copy_us", lambda count, device: 1.0)
    for direction in comparison.DIRECTIONS:
        monkeypatch.setattr(tiles, f"{direction}_us", lambda *given: float(next(times)))
    tiles.sweep(first_operator(), CPU, float("inf"), said.append)
    assert sum("tiles: copy" in line for line in said) == 2 and any("warps" in line for line in said)


def test_every_row_of_compare_runs(tmp_path, uncompiled):
    settings = {"seed": 0, "quick": True, "repeats": 1, "host_calls": 2, "words": []}
    session = own_rows.Session(device=CPU, out=tmp_path / "rows.json", found={"rows": []}, **settings)
    for row in own_rows.ROWS:
        session.measure(row, lambda row: own_rows.timed(session, row, session.arguments(row.inputs)))
    actual = {row["name"]: row for row in json.loads(session.out.read_text())["rows"]}
    assert list(actual) == [row.name for row in own_rows.ROWS]
    for row in actual.values():
        assert "failed" not in row and math.isfinite(row["loss"])
        assert all(math.isfinite(norm) and norm > 0 for norm in row["norms"])


# -- a wrong result is refused


# Objective, shape, and the right loss of its arguments.
OBJECTIVES = {
    "CE": (CE, ce.Shape(48, 16, 131, ignored=0.5), eager_loss),
    "JSD": (DISTILLATION, distillation.Shape(48, 16, 24, 131, frozen_head=True), eager_jsd),
    "draft": (SPECULATORS, speculators.Shape(3, 48, 16, 131), eager_draft),
    "ORPO": (PREFERENCE, preference.QUICK_SHAPES[0], eager_preference),
    "DPO": (PREFERENCE, preference.QUICK_SHAPES[2], eager_preference),
    "GRPO": (POLICY, policy.QUICK_SHAPES[0], eager_grpo),
    "Medusa": (MEDUSA, medusa.QUICK_SHAPES[1], eager_medusa),
}


def measured(what: objective.Objective, shape: objective.Shape, losses: dict) -> dict[str, dict]:
    section = what.measure_shape(shape, losses, CPU, seed=0, seconds=0.0, say=lambda text: None)
    return {row["name"]: row for row in section["rows"]}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_wrong_loss_gets_no_time(name):
    what, shape, right = OBJECTIVES[name]
    wrong = {
        "2% off": lambda *given: 1.02 * right(*given),
        "NaN": lambda *given: math.nan * right(*given),
        # of another input: references, advantages, a teacher or targets of other rows
        "misaligned": lambda *given: right(*given[:-1], given[-1].roll(1, -1)),
    }
    rows = measured(what, shape, wrong | {"eager": right})
    verdicts = dict.fromkeys(wrong, "wrong") | {"eager": "ok"}
    assert {name: row["verdict"] for name, row in rows.items()} == verdicts
    assert [name for name, row in rows.items() if "ms" in row] == ["eager"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_wrong_gradient_is_seen(name):
    what, shape, right = OBJECTIVES[name]
    problem = what.problem(shape, CPU, 0)
    call = partial(right, *problem.arguments)
    for leaf in problem.truth.gradients:
        hook = problem.leaves[leaf].register_hook(lambda gradient: 0.9 * gradient)
        assert measure.check("wrong", call, problem.leaves, problem.truth)["verdict"] == "wrong", leaf
        hook.remove()


def test_a_wrong_row_of_ours_fails_the_run(monkeypatch):
    monkeypatch.setattr(measure, "LOSS_LIMIT", 0.0)
    result = invoke("ce", "--quick", "--device", "cpu", "--only", "logitless")
    assert result.exit_code == 1 and "logitless: wrong" in result.output


@pytest.mark.parametrize(
    ("name", "factor", "verdict"),
    [("logitless", 1.01, "wrong"), ("Liger", 1.01, "ok"), ("Liger", 1.1, "wrong")],
)
def test_a_wrong_operator_gets_no_time(name, factor, verdict):
    """Ours is held to the stock model's error, a peer to what bf16 can cost."""
    operator = first_operator()

    def off(**leaves):
        return tuple(factor * y for y in operator.stock(**leaves))

    row = comparison.measured(name, operator, off, CPU, dict.fromkeys(comparison.DIRECTIONS, 1.0))
    assert row["verdict"] == verdict and ("forward" in row) == (verdict == "ok")


def test_a_wrong_top_k_gets_no_time():
    x = topk.Inputs.of(topk.QUICK_SHAPE, CPU, 3)
    expected = topk.truth(x, renormalized=False)
    for task in (topk.TASKS[1], topk.TASKS[3]):
        wrong = dataclasses.replace(task, ours=lambda x, task=task: task.ours(x) + 1)
        row, right = topk.rows_of(wrong, x, expected, CPU, 0.0)
        assert row["verdict"] == "wrong" and "ms" not in row and right["verdict"] == "ok"
    assert topk.failed({"rows": [row]}) == ["k best"]


LEARNED = {"verdict": "ok", "ms": 20.0, "times": [20.0], "peak_bytes": 2**30, "tokens_per_step": 64.0}
LEARNED |= {"losses": [2.0, 1.0, 0.5], "grad_norms": [4.0, 3.0, 2.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"losses": [2.0, 1.1, 0.55]},
        {"grad_norms": [4.0, 3.3, 2.2]},
        {"grad_norms": [4.0, math.nan, 2.0]},
        {"verdict": "failed", "reason": "ValueError: no"},
    ],
    ids=["loss", "norm", "NaN", "failed"],
)
@pytest.mark.parametrize("command", ["trl", "step", "fsdp"])
def test_a_trainer_that_learns_something_else_fails_the_run(command, change, monkeypatch):
    pytest.importorskip("trl")

    def measured(ours: bool) -> dict:
        if ours and "verdict" in change:
            return dict(change)
        return LEARNED | {"strategy": "fused", "plan": "fused"} | (change if ours else {})

    monkeypatch.setattr(steps, "package_version", lambda name: "1.0")
    monkeypatch.setattr(steps, "one_run", lambda model, made, *given: measured(made.layers == "ours"))
    monkeypatch.setattr(fsdp, "prepare", lambda: None)
    monkeypatch.setattr(fsdp, "one_run", lambda job: measured(job.configuration.loss))
    monkeypatch.setattr(trainer_steps, "save_model", lambda *given: None)
    monkeypatch.setattr(trainer_steps, "measure", lambda *given, ours: measured(ours))
    only = ("--only", "SFT") if command == "trl" else ()
    result = invoke(command, "--device", "cpu", "--quick", *only)
    assert result.exit_code == 1, result.output
    failed = result.output.partition("not right: ")[2]
    assert change.get("verdict", "wrong") in failed and "stock" not in failed


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "ok"), (1.5, "wrong")])
def test_lora_layers_of_a_peer(scale, verdict, tmp_path, monkeypatch, uncompiled):
    pytest.importorskip("peft")

    def apply(model):
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] *= scale

    monkeypatch.setattr(lora, "PEERS", Peers([Peer("axolotl", lambda: apply)]))
    out = tmp_path / "lora.json"
    options = ("--checkpointing", "off", "--dropout", "0", "--only", "PEFT", "--only", "axolotl")
    result = invoke("lora", "--quick", "--device", "cpu", *options, "--out", str(out))
    # A peer that is wrong does not fail the run.
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert lora.NOTES["axolotl"] in lora.for_page(written, "")
    [section] = written["sections"]
    assert {row["name"]: row["verdict"] for row in section["rows"]} == {"PEFT": "ok", "axolotl": verdict}
    section["rows"][0]["verdict"] = "wrong"
    assert len(lora.failed({"sections": [section]})) == 1


def test_a_peer_of_lora_that_is_absent(tmp_path):
    pytest.importorskip("peft")
    out = tmp_path / "lora.json"
    result = invoke("lora", "--quick", "--device", "cpu", "--only", "axolotl", "--out", str(out))
    assert result.exit_code == 0 and "absent: axolotl: needs CUDA" in result.output
    assert "axolotl" in json.loads(out.read_text())["absent"]


def test_gradients_of_zero_are_wrong(monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(steps, "one_run", lambda *given: LEARNED | {"grad_norms": [0.0, 0.0, 0.0]})
    result = invoke("step", "--device", "cpu", "--quick", "--only", "stock")
    assert result.exit_code == 1 and "stock: wrong" in result.output


# Makes the cross-entropy a tenth too large.
SABOTAGE = """
right = CrossEntropyLoss.__call__


def wrong(*args, **options):
    out = right(*args, **options)
    return out._replace(loss=1.1 * out.loss)


CrossEntropyLoss.__call__ = wrong
"""


@pytest.mark.slow
def test_compare_sees_a_wrong_tree(tmp_path):
    out, tree = tmp_path / "compare.json", tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "logitless", tree / "logitless", ignore=ignored)
    with (tree / "logitless" / "__init__.py").open("a") as file:
        file.write(SABOTAGE)
    options = ("--rounds", "1", "--rows", "CE N=512", "--rows", "host CE", "--quick", "--device", "cpu")
    result = invoke("compare", "--before", str(ROOT), "--after", str(tree), "--out", str(out), *options)
    assert result.exit_code == 1, result.output
    rows = {row["name"]: row for row in json.loads(out.read_text())["summary"]["rows"]}
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["after"]["median"] / row["before"]["median"])
        assert bool(row["wrong"]) == (row["unit"] == "ms")
    assert "CE N=512: the trees disagree" in result.output


def test_the_verdict_of_a_comparison():
    """The trees' rows in three rounds, all of them twice as slow in the second."""

    def run(tree: str, turn: int, ms: float, peak: int) -> dict:
        times = [ms * (1 + turn % 2)] * 3
        row = {"name": "row", "ms": times, "peak_bytes": peak, "loss": 1.0, "norms": [2.0]}
        return {"tree": tree, "round": turn, "ranks": [{"rows": [row]}]}

    runs = [run("before", turn, 10.0, 2**30) for turn in range(3)]
    runs += [run("after", turn, 10.3, 2**30 + 2**25) for turn in range(3)]
    document = {"runs": runs, "rounds": 3, "device": "GPU", "summary": compare_trees.summary(runs)}
    said = compare_trees.table(document)
    assert "worst row 1.0300 (OVER 1.02): row" in said and "peak memory larger: row by 32.0 MiB" in said
    assert "NOT RIGHT" not in said
    for change, wrong in (({"loss": 1.002}, "loss"), ({"norms": [2.03]}, "norms"), ({"norms": []}, "norms")):
        runs[3]["ranks"][0]["rows"][0] |= {"loss": 1.0, "norms": [2.0]} | change
        assert wrong in compare_trees.summary(runs)["wrong"][0]


def test_a_wrong_shard_fails_the_run(monkeypatch):
    def failing(document, ranks, **given):
        row = {"name": "rank 0", "right": False}
        document |= {"sections": [{"loss": "DPO", "rows": [{}, row], "peers": []}], "complete": True}

    monkeypatch.setattr(tensor_parallel, "run", failing)
    result = invoke("tensor-parallel", "--quick", "--device", "cpu")
    assert result.exit_code == 1 and "not right: DPO" in result.output


# -- what the numbers count


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("taught", [False, True], ids=["alone", "taught"])
def test_the_yardstick_is_the_products(taught, frozen, monkeypatch):
    shape = distillation.Shape(5, 4, 6, 11)
    *student, teacher_hidden, teacher_weight = distillation.inputs(shape, CPU, seed=0)
    constant = ((teacher_hidden, teacher_weight),) if taught else ()
    products, original = [], torch.mm

    def watch(a, b, **options):
        products.append((tuple(a.shape), tuple(b.shape)))
        return original(a, b, **options)

    bare = yardstick.yardstick(*student, constant=constant, frozen=frozen)
    monkeypatch.setattr(torch, "mm", watch)
    bare.cases[5]()()
    expected = [((5, 4), (4, 11))]
    expected += [((5, 6), (6, 11))] * taught
    expected.append(((5, 11), (11, 4)))
    expected += [((11, 5), (5, 4))] * (not frozen)
    assert products == expected
    assert bare.flops == sum(2 * a[0] * a[1] * b[1] for a, b in products)


# -- pages


def test_pages_are_those_of_the_results(tmp_path):
    """Nobody wrote a number into a table by hand."""
    (tmp_path / "docs/howto").mkdir(parents=True)
    names = (
        "activations",
        "benchmarks",
        "choosing",
        "layers",
        "proof",
        "recipes",
        "sampling",
        "several_ids",
        "why",
    )
    how_to = (f"docs/howto/{name}.md" for name in ("lora", "small-batches", "speculators"))
    pages_with_tables = ("README.md", *how_to, *(f"docs/{name}.md" for name in names))
    for name in pages_with_tables:
        shutil.copy(ROOT / name, tmp_path / name)
    assert invoke("plot", "--root", str(tmp_path)).exit_code == 0
    for name in pages_with_tables:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), "run `python -m benchmarks plot`"
    for drawn in ("ce.png", "layers.png", "proof.png"):
        assert (tmp_path / "docs" / drawn).read_bytes().startswith(b"\x89PNG")


def test_points_of_few_tokens_are_of_the_small_calls():
    """Of the same H and V, and of cross-entropy alone; other implementations keep theirs."""
    from benchmarks.losses.picture import with_few_tokens

    def section(N, V=9, objective="CE", **ratios):
        rows = [{"name": name, "ratio": ratio} for name, ratio in ratios.items()]
        return {"objective": objective, "shape": {"N": N, "V": V}, "rows": rows}

    sweep = [section(8, logitless=1, Liger=2), section(16, logitless=3)]
    small = [section(4, logitless=4), section(8, logitless=5), section(8, V=7, logitless=6)]
    small += [section(16, objective="DPO", logitless=7)]
    found = {
        each["shape"]["N"]: {row["name"]: row["ratio"] for row in each["rows"]}
        for each in with_few_tokens(sweep, {"sections": small})
    }
    assert found == {4: {"logitless": 4}, 8: {"logitless": 5, "Liger": 2}, 16: {"logitless": 3}}
    assert list(found) == sorted(found)


def test_the_picture_has_the_runs_of_the_most_implementations():
    few, many, newer = (
        {"runs": [{"variant": name} for name in names]} for names in (["a"], ["a", "b", "b"], ["a", "c"])
    )
    assert tables.widest([many, newer, few]) is newer
    assert tables.widest([newer, many, few]) is many


def test_the_picture_and_the_page_have_the_same_errors():
    from benchmarks.harness.report import RESULTS, every
    from benchmarks.pages.claims import GRADIENTS, READ, document

    drawn = tables.together([each for _, each in every("convergence", RESULTS, partial=True)])["gradients"][0]
    assert drawn == document(GRADIENTS)["gradients"][READ]


def test_no_two_tables_of_steps_have_one_title():
    page = (ROOT / "docs/layers.md").read_text()
    block = page.partition("<!-- benchmarks:step -->")[2].partition("<!-- /benchmarks:step -->")[0]
    titles = [line for line in block.splitlines() if line.endswith(":")]
    assert len(titles) == block.count("| configuration") == len(set(titles))


def test_operators_of_several_days_are_one_table():
    def document(day, names):
        rows = [{"name": "logitless", "us": day}]
        sections = [{"operator": name, "width": None, "rows": rows} for name in names]
        versions = {"torch": "2"}
        return {"date": f"2026-11-{day}T10:00", "sections": sections, "versions": versions, "absent": {}}

    whole = comparison.together(
        [document(25, ("rope", "norm")), document(25, ()), document(26, ("norm", "gate"))]
    )
    assert whole["date"] == "2026-11-25 and 2026-11-26"
    actual = [(each["operator"], each["rows"][0]["us"]) for each in whole["sections"]]
    assert actual == [("rope", 25), ("norm", 26), ("gate", 26)]


def test_parts_of_the_proof_are_shown_together():
    first = {"device": "A", "versions": {"torch": "1", "cuda": None}, "absent": {"outcomes": "no"}}
    first |= {"left_out": ["x"], "runs": [1], "gradients": [2]}
    second = {"device": "B", "versions": {"torch": "2", "cuda": None}, "absent": {}}
    second |= {"left_out": [], "runs": [], "gradients": [3], "outcomes": [4]}
    assert tables.together([first, second]) == {
        "device": "A and B",
        "versions": {"torch": "1 and 2", "cuda": ""},
        "absent": {},
        "left_out": ["x"],
        "runs": [1],
        "gradients": [3],
        "outcomes": [4],
    }


def test_of_each_recipe_the_newest_outcome_is_shown():
    def document(day, metrics):
        null = {"mean": 0.0, "interval": [0.0, 0.0]}
        rows = [
            {"name": name, "metric": "accuracy", "steps": 1, "seeds": [{"parted": {"flag": 1, "moved": 1}}]}
            | {"before": 0.5, "stock": metric, "flag": null, "moved": null, "verdict": "none found"}
            for name, metric in metrics.items()
        ]
        return {"device": "A", "date": f"2026-11-{day}T10:00", "commit": f"c{day}", "outcomes": rows}

    first, second = document(25, {"SFT": 0.6, "GRPO": 0.7}), document(26, {"GRPO": 0.9})
    actual = tables.recipes([first, second])
    assert "0.500, 0.600" in actual and "0.500, 0.900" in actual and "0.500, 0.700" not in actual
    assert "SFT: one A, 2026-11-25, commit c25." in actual
    assert "GRPO: one A, 2026-11-26, commit c26." in actual
    assert "One A, 2026-11-26, commit c26." in tables.recipes([second])
    assert tables.recipes([]) == "*Not measured yet.*"


def test_medians_of_runs():
    def run(number: int, ms: float) -> dict:
        row = {"name": "a", "ms": ms, "bytes": 5 + number, "plan": f"{number} tokens", "verdict": "ok"}
        return {"benchmark": "small", "complete": True, "date": str(number), "rows": [row]}

    runs = [run(0, 3.0), run(1, 1.0), run(2, 9.0)]
    row = {"name": "a", "ms": 3.0, "bytes": 6, "plan": "2 tokens", "verdict": "ok"}
    expected = {"benchmark": "small", "complete": True, "date": "2", "rows": [row], "runs": 3}
    assert report.medians(runs) == expected
    runs[1]["rows"][0]["verdict"] = "too far"
    with pytest.raises(ValueError, match=r"the same document.rows\[0\].verdict, got ok, too far, ok"):
        report.medians(runs)


def test_medians_of_a_run_that_was_cut_off():
    whole = {"complete": True, "sections": [{"ms": 3.0}, {"ms": 5.0}]}
    cut = {"complete": False, "sections": [{"ms": 1.0}]}
    expected = {"complete": False, "sections": [{"ms": 3.0}], "runs": 3}
    assert report.medians([whole, cut, whole]) == expected
