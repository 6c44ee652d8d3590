"""The benchmark harness on a CPU: that it refuses wrong results, keeps its files whole, and runs the real
library."""

import json
import math
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import logitless
from benchmarks import (
    ce,
    compare_trees,
    distillation,
    gemm,
    measure,
    medusa,
    objective,
    own_rows,
    pages,
    peers,
    picture,
    policy,
    preference,
    profile,
    report,
    summary,
    tensor_parallel,
    timing,
    yardstick,
)
from benchmarks.__main__ import app
from benchmarks.ce import CE
from benchmarks.ce_peers import PEERS, eager_loss
from benchmarks.distillation import DISTILLATION
from benchmarks.distillation_peers import eager_loss as eager_jsd
from benchmarks.medusa import MEDUSA
from benchmarks.medusa_peers import eager_loss as eager_medusa
from benchmarks.medusa_peers import terms
from benchmarks.policy import POLICY
from benchmarks.policy_peers import eager_loss as eager_grpo
from benchmarks.preference import PREFERENCE
from benchmarks.preference_peers import BETA, dpo, full_logps, orpo
from benchmarks.preference_peers import eager_loss as eager_preference
from tests import reference
from tests.ranks import forked

CPU = torch.device("cpu")
SHAPE = ce.Shape(48, 16, 131, ignored=0.5)
PAIRED = preference.QUICK_SHAPES
SAMPLED = policy.QUICK_SHAPES
*STAGES, LONG = medusa.QUICK_SHAPES
FROZEN = [distillation.Shape(48, 16, 24, 131, frozen_head=frozen) for frozen in (False, True)]


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def measured(**losses) -> dict[str, dict]:
    """The rows that the harness gives these losses at SHAPE."""
    return rows_of(CE, SHAPE, losses)


def rows_of(what: objective.Objective, shape: objective.Shape, losses: dict) -> dict[str, dict]:
    section = what.measure_shape(shape, losses, CPU, seed=0, seconds=0.0, say=lambda text: None)
    return {row["name"]: row for row in section["rows"]}


def document(benchmark: str = "ce", *, date: str = "2026-01-01", **changes) -> dict:
    """A result as a GPU would leave it, with numbers that tests can recognise."""
    row = {
        "verdict": "ok",
        "ms": 12.5,
        "ratio": 1.25,
        "peak_bytes": 3 * 2**30,
        "beyond_gradients_bytes": 2**30,
    }
    errors = {"loss_error": 1e-6, "d_hidden_error": 2e-3, "d_weight_error": 4e-3}
    rows = [
        {"name": "logitless"} | row | errors,
        {"name": "eager, fp32 upcast", "verdict": "out of memory"},
        {"name": "Liger", "verdict": "wrong"} | errors | {"d_weight_error": 0.25},
    ]
    section = {
        "shape": asdict(SHAPE),
        "yardstick": {"ms": 10.0, "tflops": 700.0, "chunk": 2048},
        "rows": rows,
    }
    head = report.new_document(benchmark, CPU, quick=False) | {
        "date": date,
        "absent": {"QuACK": "quack-kernels is not installed"},
    }
    return head | {"sections": [section], "complete": True} | changes


def test_ce_measures_the_library_and_its_peers(tmp_path):
    out = tmp_path / "ce.json"
    result = invoke(
        "ce", "--quick", "--device", "cpu", "--out", str(out), "--skip", "TRL", "--skip", "torch F."
    )
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["complete"] and written["quick"] and written["command"].startswith("python -m benchmarks")
    assert written["versions"]["torch"] == torch.__version__
    assert written["absent"]["Liger"] == "needs CUDA, the device is cpu"
    assert [section["shape"]["ignored"] for section in written["sections"]] == [0.0, 0.5]
    for section in written["sections"]:
        rows = {row["name"]: row for row in section["rows"]}
        assert {"logitless", "logitless, bf16 d_weight", "eager, fp32 upcast"} <= rows.keys()
        for row in rows.values():
            assert row["verdict"] == "ok"
            assert row["ratio"] == pytest.approx(row["ms"] / section["yardstick"]["ms"])
            assert row["hot_ratio"] > 0
        assert "fused" in rows["logitless"]["plan"] and rows["logitless"]["budget_bytes"] > 0
    assert "three bare GEMMs" in result.output


def test_truth_is_the_fp64_autograd_result():
    hidden, weight, targets = ce.inputs(SHAPE, CPU, seed=3)
    assert 0 < (targets == ce.IGNORE).sum() < SHAPE.N
    found = ce.truth(hidden, weight, targets, chunk=7)
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    loss = F.cross_entropy(wide[0] @ wide[1].t(), targets)
    gradients = torch.autograd.grad(loss, wide)
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in zip(("hidden", "weight"), gradients, strict=True):
        assert measure.relative_l2(found.gradients[name], gradient.float()) < 1e-5


def test_the_inputs_show_every_term_of_the_gradient():
    """A large vocabulary makes the softmax term vanish from plain noise; here it must not."""
    shape = ce.Shape(64, 256, 20_000)
    hidden, weight, targets = ce.inputs(shape, CPU, seed=1)
    truth = ce.truth(hidden, weight, targets)
    assert 1.0 < truth.loss < 6.0
    no_softmax_term(hidden, weight, targets).backward()
    assert measure.relative_l2(hidden.grad, truth.gradients["hidden"]) > 0.5
    assert measure.relative_l2(weight.grad, truth.gradients["weight"]) > 0.5


def wrong_weight_gradient(hidden, weight, targets):
    return eager_loss(hidden, weight.detach() + 0.9 * (weight - weight.detach()), targets)


def no_softmax_term(hidden, weight, targets):
    """The right loss, with the gradient of the target's logit alone."""
    logits = (hidden @ weight.t()).float()
    kept = targets != ce.IGNORE
    picked = logits[kept].gather(1, targets[kept, None]).squeeze(1)
    return (logits[kept].logsumexp(1).detach() - picked).mean()


WRONG = {
    "no softmax term": no_softmax_term,
    "loss off by 2%": lambda hidden, weight, targets: 1.02 * eager_loss(hidden, weight, targets),
    "mean over all rows": lambda hidden, weight, targets: (
        F.cross_entropy(hidden @ weight.t(), targets, reduction="sum") / SHAPE.N
    ),
    "d_weight off by 10%": wrong_weight_gradient,
    "no d_weight": lambda hidden, weight, targets: eager_loss(hidden, weight.detach(), targets),
    "NaN": lambda hidden, weight, targets: eager_loss(hidden, weight, targets) * math.nan,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_gets_its_errors_and_no_time(name):
    rows = measured(**{name: WRONG[name], "eager": eager_loss})
    assert rows[name]["verdict"] == "wrong"
    assert "ms" not in rows[name] and "loss_error" in rows[name]
    assert rows["eager"]["verdict"] == "ok" and rows["eager"]["ms"] > 0


def test_a_peer_that_fails_or_exhausts_memory_does_not_stop_the_others():
    def fails(hidden, weight, targets):
        raise AssertionError("chunk\nof the wrong size")

    def exhausts(hidden, weight, targets):
        raise torch.OutOfMemoryError("40 GiB")

    rows = measured(fails=fails, exhausts=exhausts, eager=eager_loss)
    assert (rows["fails"]["verdict"], rows["fails"]["reason"]) == (
        "failed",
        "AssertionError: chunk of the wrong size",
    )
    assert rows["exhausts"]["verdict"] == "out of memory"
    assert rows["eager"]["verdict"] == "ok"


def test_a_peer_that_fails_while_it_is_timed_does_not_stop_the_others():
    calls = []

    def fails_late(hidden, weight, targets):
        calls.append("once more")
        if len(calls) > 2:
            raise RuntimeError("Triton Error [CUDA]:\nout of memory")
        return eager_loss(hidden, weight, targets)

    rows = measured(fails=fails_late, eager=eager_loss)
    assert (rows["fails"]["verdict"], rows["fails"]["reason"]) == (
        "failed",
        "RuntimeError: Triton Error [CUDA]: out of memory",
    )
    assert "ms" not in rows["fails"] and len(calls) == 3
    assert rows["eager"]["verdict"] == "ok" and rows["eager"]["ms"] > 0


def test_a_lost_device_ends_the_run_and_names_the_culprit(monkeypatch, tmp_path):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(measure, "release", lost)
    result = invoke("ce", "--quick", "--device", "cpu", "--only", "eager", "--out", str(tmp_path / "ce.json"))
    assert result.exit_code == 1
    assert "illegal memory access" in result.output and "--skip 'eager, fp32 upcast'" in result.output


def test_after_running_out_of_memory_longer_inputs_are_not_tried():
    tried = []

    def exhausts(hidden, weight, targets):
        tried.append(len(hidden))
        if len(hidden) > 32:
            raise torch.OutOfMemoryError("40 GiB")
        return eager_loss(hidden, weight, targets)

    registry = peers.Peers()
    registry.add("exhausts")(lambda: exhausts)
    shapes = (*(ce.Shape(N, 8, 64) for N in (32, 64, 128, 32)), ce.Shape(128, 8, 65))
    document = report.new_document("sweep", CPU, quick=True)
    run = replace(CE, peers=registry).run(document, shapes, CPU, seconds=0.0, out=None, say=lambda text: None)
    assert [section["rows"][0]["verdict"] for section in run["sections"]] == [
        "ok",
        "out of memory",
        "out of memory",
        "ok",
        "out of memory",
    ]
    # The last one has another head: it is another problem, and was tried.
    assert tried.count(64) == tried.count(128) == 1
    assert len({section["loss"] for section in run["sections"]}) == 5, "two shapes share their inputs"


@pytest.mark.parametrize(
    ("shape", "larger", "other"),
    [
        (preference.Shape("ORPO", 2, 8, 4, 11), {"pairs": 4}, {"loss": "DPO"}),
        (preference.Shape("DPO", 1, 8, 4, 11), {"T": 16}, {"H": 8}),
        (policy.Shape(2, 8, 4, 11), {"sequences": 3, "T": 9}, {"frozen_head": True}),
        (medusa.Shape(3, 1, 8, 4, 11), {"heads": 5, "stage": 2, "T": 16}, {"V": 12}),
        (SHAPE, {"N": 96}, {"V": 132}),
    ],
    ids=["pairs", "length", "sequences", "heads", "tokens"],
)
def test_more_tokens_of_the_same_problem_need_more_memory(shape, larger, other):
    more = replace(shape, **larger)
    assert (
        objective.covers(shape, shape) and objective.covers(shape, more) and not objective.covers(more, shape)
    )
    assert not objective.covers(shape, replace(more, **other))


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("taught", [False, True], ids=["alone", "taught"])
def test_the_yardstick_is_the_products(taught, frozen):
    hidden, weight, teacher_hidden, teacher_weight = distillation.inputs(
        distillation.Shape(5, 4, 6, 11), CPU, seed=0
    )
    constant = ((teacher_hidden, teacher_weight),) if taught else ()
    products = []
    original = torch.mm

    def watch(a, b, **options):
        products.append((tuple(a.shape), tuple(b.shape)))
        return original(a, b, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", watch)
        yardstick.chunked_gemms(hidden, weight, 3, constant=constant, frozen=frozen)()()
        bare = yardstick.yardstick(hidden, weight, constant=constant, frozen=frozen)
        bare.cases[5]()()
    expected = []
    for n in (3, 2, 5):
        expected.append(((n, 4), (4, 11)))
        expected += [((n, 6), (6, 11))] * taught
        expected.append(((n, 11), (11, 4)))
        expected += [((11, n), (n, 4))] * (not frozen)
    assert products == expected

    assert 2 * bare.flops == 2 * sum(a[0] * a[1] * b[1] for a, b in products)
    assert bare.name == f"{['two', 'three', 'four'][taught + (not frozen)]} bare GEMMs"
    summary = bare.summary({5: [4.0, 2.0, 3.0], "logitless": [1.0]})
    assert (summary["ms"], summary["chunk"], summary["tflops"]) == (3.0, 5, pytest.approx(bare.flops / 3e9))


@pytest.mark.parametrize(
    ("N", "V", "chunks"),
    [
        (512, 128, [512]),
        (4096, 128, [2048, 4096]),
        (8192, 128, [2048, 4096, 8192]),
        (8192, 2**20, [2048, 4096]),
    ],
)
def test_yardstick_chunks(N, V, chunks):
    # Meta tensors: only the sizes matter, and the last case would be 16 GiB of logits.
    shape = {"device": "meta", "dtype": torch.bfloat16}
    assert list(yardstick.yardstick(torch.empty(N, 1, **shape), torch.empty(V, 1, **shape)).cases) == chunks


def test_a_teachers_logits_count_as_buffer():
    shape = {"device": "meta", "dtype": torch.bfloat16}
    hidden, weight, other = (
        torch.empty(8192, 1, **shape),
        torch.empty(2**18, 1, **shape),
        torch.empty(2**19, 1, **shape),
    )
    assert list(yardstick.yardstick(hidden, weight, constant=((hidden, weight),)).cases) == [2048, 4096, 8192]
    assert list(yardstick.yardstick(hidden, weight, constant=((hidden, other),)).cases) == [2048, 4096]


def test_rounds_are_interleaved_and_rotate():
    calls = []
    cases = {name: lambda name=name: lambda: calls.append(name) for name in "abc"}
    times = timing.interleave(cases, CPU, seconds=0.0, least=3)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert all(len(ms) == 3 for ms in times.values())


def test_a_hot_round_does_not_rest(monkeypatch):
    rests = []
    monkeypatch.setattr(timing, "time_ms", lambda run, device, rest: rests.append(rest) or 1.0)
    for rest in (0.0, 0.05):
        timing.interleave({"a": lambda: None}, CPU, seconds=0.0, least=1, rest=rest)
    assert rests == [0.0] * 2 + [0.05] * 2


def test_a_profile_tells_kernels_apart():
    names = {
        "nvjet_sm90_tst_320x128_64x3": "product",
        "read_kernel": "product, with its logits read",
        "row_kernel": "pass over logits",
        "scale_kernel": "scaling",
        "void at::native::vectorized_elementwise_kernel<4>": "small",
    }
    kernels = [
        profile.Kernel(name, profile.kind_of(name), start, start + 10.0)
        for name, start in zip(names, (0.0, 5.0, 30.0, 40.0, 52.0), strict=True)
    ]
    assert [kernel.kind for kernel in kernels] == list(names.values())
    found = profile.summary(kernels, chunks=2)
    # The first two overlap by 5 us, and the last waits for 2.
    assert found["busy_us"] == 45.0 and found["span_us"] == 62.0
    assert found["small_launches_a_chunk"] == 1.0
    assert sum(kind["us"] for kind in found["kinds"]) == 50.0


def test_profile_of_one_row(tmp_path):
    out = tmp_path / "profile.json"
    result = invoke("profile", "--quick", "--device", "cpu", "--row", "KTO", "--out", str(out))
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["name"] == "KTO" and row["chunks"] >= 1 and row["host_us"] > 0
    assert (
        "product" in [kind["kind"] for kind in row["kinds"]] and "before the first product" in result.output
    )
    result = invoke("profile", "--quick", "--device", "cpu", "--row", "KTO", "--shape", "many")
    assert result.exit_code == 2 and "--shapes: expected" in result.output


def test_peers_say_why_they_are_absent():
    registry = peers.Peers()
    registry.add("here")(lambda: eager_loss)
    registry.add("elsewhere", package="no-such-distribution")(lambda: eager_loss)
    registry.add("on a GPU", needs_cuda=True)(lambda: eager_loss)

    @registry.add("broken")
    def broken():
        raise ImportError("no libfoo.so")

    present, absent = registry.load(CPU)
    assert list(present) == ["here"]
    assert absent == {
        "elsewhere": "no-such-distribution is not installed",
        "on a GPU": "needs CUDA, the device is cpu",
        "broken": "ImportError: no libfoo.so",
    }
    assert registry.versions() == {"no-such-distribution": None}


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["logitless"], ["logitless"]),
        (["d_weight"], ["logitless, bf16 d_weight"]),
        (["ger"], ["eager, fp32 upcast"]),
    ],
)
def test_only_takes_a_name_or_a_part_of_several(only, names):
    present, absent = PEERS.load(CPU, only=only)
    assert [name for name in [*present, *absent] if "Liger" not in name] == names


@pytest.mark.parametrize("text", ["12x3", "axbxc", "1x2x3@1", "0x2x3", "1x2x3@-1", ""])
def test_malformed_shapes_are_refused(text):
    with pytest.raises(ValueError, match="expected NxHxV"):
        ce.Shape.parse(text)


@pytest.mark.parametrize(
    "shape", [*ce.SHAPES, *distillation.SHAPES, *preference.SHAPES, *policy.SHAPES, *medusa.SHAPES], ids=str
)
def test_shapes_read_what_they_print(shape):
    assert type(shape).parse(str(shape)) == shape


@pytest.mark.parametrize(
    "text", ["1x2x3", "1x2x3x4@", "1x2x3x4@thawed", "1x2x3x4@frozen@", "0x2x3x4", "1x2x3xV", ""]
)
def test_malformed_distillation_shapes_are_refused(text):
    with pytest.raises(ValueError, match="expected NxHxTxV"):
        distillation.Shape.parse(text)


@pytest.mark.parametrize(
    "text", ["1x2x3x4", "kto:1x2x3x4", "orpo:1x2x3", "dpo:1x2x3x4@", "dpo:1x0x3x4", "orpo:1x2x3x4@thawed", ""]
)
def test_malformed_preference_shapes_are_refused(text):
    with pytest.raises(ValueError, match="expected orpo:PAIRSxTxHxV"):
        preference.Shape.parse(text)


@pytest.mark.parametrize("text", ["1x2x3", "1x2x3x4@", "1x2x3x4@thawed", "0x2x3x4", "1x2x3xV", ""])
def test_malformed_policy_shapes_are_refused(text):
    with pytest.raises(ValueError, match="expected BxTxHxV"):
        policy.Shape.parse(text)


@pytest.mark.parametrize(
    "text", ["3x8x4x11", "3x8x4x11@3", "3x8x4x11@", "3x4x4x11@1", "0x8x4x11@1", "3x8x4@1", ""]
)
def test_malformed_medusa_shapes_are_refused(text):
    with pytest.raises(ValueError, match="expected HEADSxTxHxV@STAGE"):
        medusa.Shape.parse(text)


def test_the_table_has_every_error_that_any_row_has():
    section = document()["sections"][0]
    section["yardstick"]["name"] = "four bare GEMMs"
    rows = section["rows"]
    printed = report.lines(section | {"rows": [rows[1], rows[2] | {"d_bias_error": 0.5}, rows[0]]})
    head, columns, _, *lines = printed.splitlines()
    assert head == "N 48, H 16, V 131, 50% ignored: bare GEMMs at 700 TFLOP/s in chunks of 2048"
    assert all(name in columns for name in ("loss err", "d_hidden err", "d_weight err", "d_bias err"))
    assert [line.split("  ")[0] for line in (line.strip() for line in lines)] == [
        "four bare GEMMs",
        "eager, fp32 upcast",
        "Liger",
        "logitless",
    ]
    assert "2.5e-01" in lines[2] and "5.0e-01" in lines[2] and "12.50" in lines[3]


def test_the_truth_is_free_of_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with measure.exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_sizes_in_words():
    assert report.sizes(asdict(ce.Shape(8192, 4096, 128256))) == "N 8,192, H 4,096, V 128,256"
    assert report.sizes(asdict(SHAPE)) == "N 48, H 16, V 131, 50% ignored"
    assert report.sizes(asdict(FROZEN[1])) == "N 48, H 16, teacher H 24, V 131, frozen head"
    assert (
        report.sizes(asdict(preference.SHAPES[-1]))
        == "DPO, pairs 4, T 2,048, H 4,096, V 128,256, frozen head"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ce", "--device", "cpu"], "pass --quick"),
        (["ce", "--quick", "--shapes", "12x3"], "expected NxHxV"),
        (["distillation", "--quick", "--shapes", "12x3x5"], "expected NxHxTxV"),
        (["preference", "--quick", "--shapes", "12x3x5x7"], "expected orpo:PAIRSxTxHxV"),
        (["policy", "--quick", "--shapes", "12x3x5"], "expected BxTxHxV"),
        (["medusa", "--quick", "--shapes", "3x12x3x5"], "expected HEADSxTxHxV@STAGE"),
        (["ce", "--quick", "--device", "cpu", "--only", "nobody"], "nobody"),
    ],
)
def test_bad_arguments_end_in_one_message(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_an_unsound_or_absent_library_fails_the_run():
    good = document()
    assert CE.ours_failed(good) == []
    good["sections"][0]["rows"][0]["verdict"] = "wrong"
    assert CE.ours_failed(good | {"absent": {"logitless, bf16 d_weight": "broken"}}) == [
        "logitless: wrong",
        "logitless, bf16 d_weight: broken",
    ]


def judged(what: objective.Objective, shape: objective.Shape, **measured) -> dict[str, dict]:
    rows = {name: {"verdict": "ok"} | measured for name in what.goals(shape)}
    for name, row in rows.items():
        objective.judge(row, what.goals(shape)[name])
    return rows


def test_targets_are_judged():
    rows = judged(CE, ce.SHAPES[0], ratio=1.06, budget_bytes=2**30, beyond_gradients_bytes=3 * 2**30)
    assert list(rows) == ["logitless", "logitless, bf16 d_weight"]
    assert [row["target"] for row in rows.values()] == [1.08, 1.05]
    assert [row["meets_target"] for row in rows.values()] == [True, False]
    # 1 GiB of budget + 64 MiB of d_hidden + 1.96 GiB of fp32 d_weight
    assert [row["meets_memory_limit"] for row in rows.values()] == [True, False]
    assert [row.keys() for row in judged(CE, SHAPE, ratio=1.0, beyond_gradients_bytes=None).values()] == [
        {"verdict", "ratio", "beyond_gradients_bytes"}
    ] * 2


def test_targets_of_distillation():
    trainable, frozen = (
        judged(DISTILLATION, s, ratio=1.2, budget_bytes=2**30, beyond_gradients_bytes=2**31)
        for s in distillation.SHAPES
    )
    assert (trainable["logitless"]["target"], trainable["logitless"]["meets_target"]) == (1.22, True)
    assert "target" not in frozen["logitless"]
    assert [rows["logitless"]["meets_memory_limit"] for rows in (trainable, frozen)] == [True, False]
    d_hidden, fp32_d_weight = 2 * 8192 * 2048, 4 * 151936 * 2048
    assert [rows["logitless"]["memory_limit_bytes"] - 2**30 for rows in (trainable, frozen)] == [
        d_hidden + fp32_d_weight,
        d_hidden,
    ]


def test_a_result_without_a_time_is_not_judged():
    row = {"verdict": "wrong"}
    objective.judge(row, objective.Goal(ratio=1.0, extra_bytes=0))
    assert row == {"verdict": "wrong"}


def test_only_our_own_rows_are_judged():
    theirs = rows_of(CE, SHAPE, {"Liger": eager_loss, "eager": eager_loss})
    assert not any("target" in row or "memory_limit_bytes" in row for row in theirs.values())
    # On a CPU no memory is measured, so that a target is all that can be set.
    goals = {"eager": objective.Goal(ratio=1e9, extra_bytes=0)}
    ours = rows_of(replace(CE, goals=lambda shape: goals), SHAPE, {"Liger": eager_loss, "eager": eager_loss})
    assert ours["eager"]["meets_target"] and "target" not in ours["Liger"]


def test_sweep_and_gemm_run(tmp_path):
    out = tmp_path / "sweep.json"
    assert (
        invoke("sweep", "--quick", "--device", "cpu", "--only", "logitless", "--out", str(out)).exit_code == 0
    )
    assert [row["name"] for row in json.loads(out.read_text())["sections"][0]["rows"]] == ["logitless"]

    out = tmp_path / "gemm.json"
    assert invoke("gemm", "--quick", "--device", "cpu", "--out", str(out)).exit_code == 0
    (section,) = json.loads(out.read_text())["sections"]
    assert [row["chunk"] for row in section["rows"]] == list(gemm.QUICK_CHUNKS)
    assert all(
        row["us_per_token"] == pytest.approx(1e3 * row["ms"] / row["tokens"]) for row in section["rows"]
    )


def test_distillation_measures_the_library_and_its_peers(tmp_path):
    out = tmp_path / "distillation.json"
    result = invoke("distillation", "--quick", "--device", "cpu", "--out", str(out), "--skip", "TRL")
    written = json.loads(out.read_text())
    assert written["complete"]
    assert written["absent"]["Liger chunked_loss"] == "needs CUDA, the device is cpu"
    for section, yardsticks in zip(written["sections"], ("four bare GEMMs", "three bare GEMMs"), strict=True):
        rows = {row["name"]: row for row in section["rows"]}
        assert section["yardstick"]["name"] == yardsticks and yardsticks in result.output
        assert rows["eager, fp32 upcast"]["verdict"] == "ok"
        assert ("d_weight_error" in rows["eager, fp32 upcast"]) == (not section["shape"]["frozen_head"])
        if hasattr(logitless, "JSDLoss"):
            assert rows["logitless"]["verdict"] == "ok"
    assert result.exit_code == (0 if hasattr(logitless, "JSDLoss") else 1), result.output
    assert hasattr(logitless, "JSDLoss") != ("logitless" in written["absent"])
    assert "N 96, H 32, teacher H 48, V 517, frozen head" in result.output


@pytest.mark.parametrize("shape", FROZEN, ids=str)
def test_distillation_truth_is_the_reference(shape):
    *operands, teacher_hidden, teacher_weight = distillation.inputs(shape, CPU, seed=3)
    found = distillation.truth(*operands, teacher_hidden, teacher_weight, chunk=7)
    wide = [leaf.detach().double().requires_grad_() for leaf in operands]
    teacher = {"teacher_hidden": teacher_hidden.double(), "teacher_weight": teacher_weight.double()}
    loss, _ = reference.distillation(*wide, **teacher, beta=0.5)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    gradients = dict(zip(("hidden", "weight"), torch.autograd.grad(loss, wide), strict=True))
    assert found.gradients.keys() == ({"hidden"} if shape.frozen_head else {"hidden", "weight"})
    for name, gradient in found.gradients.items():
        assert measure.relative_l2(gradients[name], gradient) < 1e-5


def test_distillation_inputs_are_peaked_and_mostly_agree():
    operands = distillation.inputs(distillation.Shape(64, 256, 512, 20_000), CPU, seed=1)
    *_, metrics = reference.distillation(*(x.float() for x in operands[:2]), **wide_teacher(operands))
    assert 0.05 < metrics["soft_loss"] < 0.2
    assert 0.8 < metrics["agreement"] < 1.0
    peaks = (operands[0] @ operands[1].t()).float().softmax(-1).amax(-1)
    assert 0.5 < (peaks > 0.5).float().mean() < 0.85


def wide_teacher(operands) -> dict:
    return dict(zip(("teacher_hidden", "teacher_weight"), (x.float() for x in operands[2:]), strict=True))


def by_reference(**options):
    """A loss of the reference instead of the JSD with beta 0.5."""
    return lambda *operands: reference.distillation(*operands[:2], **wide_teacher(operands), **options)[0]


def no_mean_ratio(hidden, weight, *teacher):
    """The right loss, with a gradient that lacks the term of each row's KL(s||m)."""
    logps = (hidden @ weight.t()).float().log_softmax(-1)
    log_m = torch.logaddexp(logps, (teacher[0] @ teacher[1].t()).float().log_softmax(-1)) - math.log(2)
    d_logits = (logps.exp() * (logps - log_m)).detach() / (2 * len(hidden))
    bent = ((hidden @ weight.t()) * d_logits).sum()
    return eager_jsd(hidden, weight, *teacher).detach() + bent - bent.detach()


WRONG_JSD = {
    "forward KL": by_reference(divergence="forward_kl"),
    "beta 0.4": by_reference(beta=0.4),
    "temperature 1.1": by_reference(temperature=1.1),
    "half the tokens": lambda hidden, weight, *teacher: eager_jsd(
        hidden[::2], weight, teacher[0][::2], teacher[1]
    ),
    "teacher misaligned": lambda hidden, weight, *teacher: eager_jsd(
        hidden, weight, teacher[0].roll(1, 0), teacher[1]
    ),
    "no term of the row": no_mean_ratio,
}


@pytest.mark.parametrize("name", WRONG_JSD)
@pytest.mark.parametrize("shape", FROZEN, ids=str)
def test_a_wrong_divergence_gets_no_time(name, shape):
    rows = rows_of(DISTILLATION, shape, {name: WRONG_JSD[name], "eager": eager_jsd})
    assert rows[name]["verdict"] == "wrong" and "ms" not in rows[name]
    assert rows["eager"]["verdict"] == "ok"


def test_the_yardstick_of_preference_and_policy_is_one_product():
    hidden, weight = torch.randn(1, 5, 4), torch.randn(11, 4, requires_grad=True)
    bare = preference.one_gemm(hidden, weight)
    with pytest.MonkeyPatch.context() as patch:
        products, original = [], torch.mm
        patch.setattr(
            torch,
            "mm",
            lambda a, b, **options: (
                products.append((tuple(a.shape), tuple(b.shape))) or original(a, b, **options)
            ),
        )
        bare.cases[5]()()
    assert products == [((5, 4), (4, 11))]
    assert (bare.name, bare.flops) == ("one bare GEMM", 2 * 5 * 4 * 11)
    # Chunks as in the other yardsticks; on meta tensors only the sizes matter.
    shape = {"device": "meta", "dtype": torch.bfloat16}
    hidden, weight = torch.empty(64, 1024, 1, **shape), torch.empty(128256, 1, **shape)
    assert list(preference.one_gemm(hidden, weight).cases) == [2048, 4096]


@pytest.mark.parametrize(
    ("command", "shapes", "plans"),
    [
        ("preference", PAIRED, ["resident", "row_scaled"] * 2),
        ("policy", SAMPLED, ["fused", "fused"]),
    ],
)
def test_preference_and_policy_measure_the_library_and_its_peers(command, shapes, plans, tmp_path):
    out = tmp_path / "result.json"
    result = invoke(command, "--quick", "--device", "cpu", "--out", str(out), "--skip", "TRL")
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["complete"] and written["benchmark"] == command
    assert written["absent"] == dict.fromkeys(("torch.compile", "Liger"), "needs CUDA, the device is cpu")
    assert [section["shape"] for section in written["sections"]] == [asdict(shape) for shape in shapes]
    ours = {"logitless", "logitless, fp32 logits"} if command == "policy" else {"logitless"}
    for section, plan in zip(written["sections"], plans, strict=True):
        assert section["yardstick"]["name"] == "one bare GEMM"
        rows = {row["name"]: row for row in section["rows"]}
        assert rows.keys() == ours | {"eager, fp32 upcast"}
        for row in rows.values():
            assert row["verdict"] == "ok" and row["ratio"] == pytest.approx(
                row["ms"] / section["yardstick"]["ms"]
            )
            assert ("d_weight_error" in row) == (not section["shape"]["frozen_head"])
        assert all(rows[name]["plan"].startswith(plan) and rows[name]["budget_bytes"] > 0 for name in ours)
        assert rows["logitless"]["plan"] in result.output
    if command == "policy":
        assert rows["logitless, fp32 logits"]["d_hidden_error"] < rows["logitless"]["d_hidden_error"] / 3


@pytest.mark.parametrize(
    ("command", "shapes", "largest"),
    [("orpo-batch", ["2 x 32", "4 x 32"], "128x1024"), ("dpo-length", ["1 x 64", "1 x 128"], "1x65536")],
)
def test_orpo_batch_and_dpo_length_end_in_one_table(command, shapes, largest, tmp_path):
    out = tmp_path / "result.json"
    result = invoke(
        command, "--quick", "--device", "cpu", "--out", str(out), "--only", "logitless", "--only", "eager"
    )
    assert result.exit_code == 0, result.output
    table = result.output[result.output.index("pairs x T") :]
    rows = [row for section in json.loads(out.read_text())["sections"] for row in section["rows"]]
    lines = [
        line for line in table.splitlines() if any(line.strip().startswith(f"{shape}  ") for shape in shapes)
    ]
    assert len(lines) == len(rows) == 4
    for line, row, shape in zip(lines, rows, [shape for shape in shapes for _ in range(2)], strict=True):
        N = 2 * math.prod(int(size) for size in shape.split(" x "))
        assert all(
            part in line
            for part in (shape, row["name"], f"{1e3 * row['ms'] / N:.2f}", f"{1e3 * N / row['ms']:,.0f}")
        )
        assert row.get("plan", "") in line
    full = preference.BATCH_SHAPES if command == "orpo-batch" else preference.length_shapes(65536)
    assert largest in str(full[-1])


def test_the_table_by_token_says_who_kept_the_limit_and_who_ran_out():
    run = document("dpo-length")
    section = run["sections"][0] | {"shape": asdict(preference.Shape("DPO", 1, 1024, 4096, 128256))}
    section["rows"][0] |= {"memory_limit_bytes": 2**29, "meets_memory_limit": False, "plan": "resident: all"}
    *_, ours, eager, liger = preference.by_token(run | {"sections": [section]}).splitlines()
    # 12.5 ms for 2,048 tokens
    assert ours.split() == "1 x 1,024 logitless 6.10 163,840 3.00 1.00 0.50 NO resident: all".split()
    assert "out of memory" in eager and "wrong" in liger and "yes" not in eager + liger


@pytest.mark.parametrize("shape", PAIRED, ids=str)
def test_preference_truth_is_the_reference(shape):
    problem = preference.problem(shape, CPU, seed=3)
    wide = [leaf.detach().double().requires_grad_() for leaf in problem.leaves.values()]
    head = {
        "hidden": wide[0],
        "weight": wide[1] if len(wide) == 2 else problem.arguments[1].double(),
        "targets": problem.arguments[2],
    }
    if shape.loss == "DPO":
        names = dict(
            zip(("ref_hidden", "ref_weight"), (x.double() for x in problem.arguments[3:]), strict=True)
        )
        loss, metrics = reference.dpo(**head, **names, beta=BETA)
    else:
        loss, metrics = reference.orpo(**head, beta=BETA)
    assert_truth(problem, shape, loss, wide)


@pytest.mark.parametrize("shape", SAMPLED, ids=str)
def test_policy_truth_is_the_reference(shape):
    problem = policy.problem(shape, CPU, seed=3)
    hidden, weight, targets, advantages, old_logps = problem.arguments
    wide = [leaf.detach().double().requires_grad_() for leaf in problem.leaves.values()]
    operands = (wide[0], wide[1] if len(wide) == 2 else weight.double(), targets)
    numbers = {"advantages": advantages.double(), "old_logps": old_logps.double()}
    loss, metrics, *_ = reference.grpo(*operands, **numbers, loss_type="dapo", beta=0.0, epsilon=0.2)
    assert_truth(problem, shape, loss, wide)
    assert (
        0.05 < metrics["clip_ratio/region_mean"] < 0.2
        and min(metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) > 0
    )


def assert_truth(problem, shape, loss, wide):
    assert problem.truth.loss == pytest.approx(loss.item(), rel=1e-5)
    assert (
        list(problem.truth.gradients)
        == ["hidden"] + ["weight"] * (not shape.frozen_head)
        == list(problem.leaves)
    )
    for found, gradient in zip(
        problem.truth.gradients.values(), torch.autograd.grad(loss, wide), strict=True
    ):
        assert found.shape == gradient.shape and measure.relative_l2(gradient, found) < 1e-5


def test_the_truth_does_not_depend_on_its_chunks():
    hidden, weight, targets = preference.inputs(PAIRED[0], CPU, seed=5)
    numbers = [preference.token_numbers(hidden, weight, targets, chunk=chunk) for chunk in (7, 1024)]
    truths = [
        preference.truth(orpo, *numbers[0], hidden, weight, targets, chunk=chunk) for chunk in (7, 1024)
    ]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*numbers, strict=True))
    assert all(
        measure.relative_l2(truths[0].gradients[leaf], truths[1].gradients[leaf]) < 1e-5
        for leaf in ("hidden", "weight")
    )


def test_preference_inputs_have_lost_pairs_and_open_ones():
    shape = preference.Shape("DPO", 4, 64, 256, 5_000)
    hidden, weight, targets, *ref = preference.inputs(shape, CPU, seed=1)
    logps, ref_logps = full_logps(hidden, weight, targets), full_logps(*ref, targets)
    assert logps[:4].mean() < -1.5 < -0.5 < logps[4:].mean(), (
        "the policy does not prefer the rejected sequences"
    )
    chosen, rejected = (logps - ref_logps).sum(1).chunk(2)
    margins = BETA * (chosen - rejected)
    assert (margins[::2] < -6).all() and (margins[1::2].abs() < 5).all()


def test_no_token_lies_near_the_ends_of_the_clip_range():
    logps = torch.randn(64, 64)
    advantages, old_logps = policy.sampled(logps, seed=0)
    ratio = (logps - old_logps).exp()
    assert min((ratio.log() - math.log(end)).abs().min() for end in (0.8, 1.2)) > 0.1
    assert 0.05 < (ratio < 0.8).float().mean() < 0.15 and 0.05 < (ratio > 1.2).float().mean() < 0.15
    assert advantages.min() < 0 < advantages.max() and advantages.mean() > 0.3 and (advantages != 0).all()


def of_logps(loss, *, ref_logps=lambda ref: ref):
    """A loss (logps, ref_logps or None) -> (), from full logits."""

    def call(hidden, weight, targets, *ref):
        ref = ref_logps(full_logps(*ref, targets)).detach() if ref else None
        return loss(full_logps(hidden, weight, targets), ref)

    return call


def half_detached(logps):
    return torch.cat((logps.chunk(2)[0], logps.chunk(2)[1].detach()))


def no_sigmoid(logps, ref_logps):
    """The right loss, with the gradient of a lost pair for every pair."""
    chosen, rejected = (logps - ref_logps).sum(1).chunk(2)
    lost = -BETA * (chosen - rejected).mean()
    return dpo(logps, ref_logps).detach() + lost - lost.detach()


def swapped(x):
    return torch.cat(x.chunk(2)[::-1])


def nll(logps):
    return -logps.chunk(2)[0].mean()


WRONG_ORPO = {
    "no odds ratio": of_logps(lambda logps, _: nll(logps)),
    "no gradient of the odds ratio": of_logps(
        lambda logps, _: nll(logps) + (orpo(logps) - nll(logps)).detach()
    ),
    "no gradient of the rejected": of_logps(lambda logps, _: orpo(half_detached(logps))),
    "beta 0.2": of_logps(lambda logps, _: 2 * orpo(logps) - nll(logps)),
    "chosen and rejected swapped": of_logps(lambda logps, _: orpo(swapped(logps))),
    "NLL of all tokens": of_logps(lambda logps, _: orpo(logps) - nll(logps) - logps.mean()),
    "no 1 - p in the odds": of_logps(
        lambda logps, _: nll(logps) - BETA * F.logsigmoid(torch.sub(*logps.mean(1).chunk(2))).mean()
    ),
}
WRONG_DPO = {
    "no reference": of_logps(lambda logps, ref: dpo(logps, torch.zeros_like(ref))),
    "reference misaligned": of_logps(dpo, ref_logps=lambda ref: ref.roll(1, 0)),
    "means for sums": of_logps(lambda logps, ref: dpo(logps / logps.shape[1], ref / ref.shape[1])),
    "no gradient of the rejected": of_logps(lambda logps, ref: dpo(half_detached(logps), ref)),
    "no sigmoid in the gradient": of_logps(no_sigmoid),
    "chosen and rejected swapped": of_logps(lambda logps, ref: dpo(swapped(logps), swapped(ref))),
    "hinge": of_logps(lambda logps, ref: F.relu(1 - BETA * torch.sub(*(logps - ref).sum(1).chunk(2))).mean()),
    "last pair left out": of_logps(
        lambda logps, ref: dpo(
            logps.view(2, 3, -1)[:, :2].flatten(0, 1), ref.view(2, 3, -1)[:, :2].flatten(0, 1)
        )
    ),
}


@pytest.mark.parametrize("shape", PAIRED, ids=str)
def test_a_wrong_preference_loss_gets_no_time(shape):
    wrong = WRONG_DPO if shape.loss == "DPO" else WRONG_ORPO
    rows = rows_of(PREFERENCE, shape, wrong | {"eager": eager_preference})
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys(wrong, "wrong") | {
        "eager": "ok"
    }
    assert not any("ms" in rows[name] for name in wrong)


def of_ratio(surrogate):
    """A surrogate (ratio (B, T), advantages (B, 1)) -> (B, T), from full logits."""

    def call(hidden, weight, targets, advantages, old_logps):
        return -surrogate((full_logps(hidden, weight, targets) - old_logps).exp(), advantages[:, None]).mean()

    return call


WRONG_GRPO = {
    "not clipped": of_ratio(lambda r, A: r * A),
    "clipped on both sides": of_ratio(lambda r, A: r.clamp(0.8, 1.2) * A),
    "clipped above alone": of_ratio(lambda r, A: torch.minimum(r, r.clamp(max=1.2)) * A),
    "on policy": of_ratio(lambda r, A: r / r.detach() * A),
    "advantages without sign": of_ratio(lambda r, A: torch.minimum(r * A.abs(), r.clamp(0.8, 1.2) * A.abs())),
    "one sequence left out": lambda hidden, *others: eager_grpo(
        hidden[1:], others[0], *(x[1:] for x in others[1:])
    ),
    "sequences misaligned": lambda *head: eager_grpo(*head[:3], head[3].roll(1), head[4]),
    "sum of a sequence": of_ratio(lambda r, A: torch.minimum(r * A, r.clamp(0.8, 1.2) * A).sum(1)),
}


@pytest.mark.parametrize("shape", SAMPLED, ids=str)
def test_a_wrong_policy_loss_gets_no_time(shape):
    rows = rows_of(POLICY, shape, WRONG_GRPO | {"eager": eager_grpo})
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys(WRONG_GRPO, "wrong") | {
        "eager": "ok"
    }
    assert not any("ms" in rows[name] for name in WRONG_GRPO)


@pytest.mark.parametrize(
    ("what", "shapes", "targets"),
    [(PREFERENCE, preference.SHAPES, [3.6, None, 4.3, 3.2]), (POLICY, policy.SHAPES, [3.25, 2.15])],
    ids=["preference", "policy"],
)
def test_targets_of_preference_and_policy(what, shapes, targets):
    budget = 2**30
    for shape, target in zip(shapes, targets, strict=True):
        limit = budget + 2 * shape.N * shape.H + (0 if shape.frozen_head else 4 * shape.V * shape.H)
        rows = judged(what, shape, ratio=3.3, budget_bytes=budget, beyond_gradients_bytes=limit + 1)
        assert rows["logitless"].get("target") == target
        assert rows["logitless"].get("meets_target") == (None if target is None else 3.3 <= target)
        for row in rows.values():
            assert row["memory_limit_bytes"] == limit and not row["meets_memory_limit"]
        rows = judged(what, shape, ratio=3.3, budget_bytes=budget, beyond_gradients_bytes=limit)
        assert all(row["meets_memory_limit"] for row in rows.values())
    assert [shape.N for shape in preference.SHAPES[::2]] == [65536, 16384] and policy.SHAPES[0].N == 16384


@pytest.mark.parametrize("benchmark", ["preference", "policy"])
def test_their_tables_count_in_one_product(benchmark, tmp_path):
    shape = {"preference": preference, "policy": policy}[benchmark].SHAPES[0]
    run = document(benchmark)
    run["sections"] = [section | {"shape": asdict(shape)} for section in run["sections"]]
    run["sections"][0]["yardstick"]["name"] = "one bare GEMM"
    report.write_json(tmp_path / "result.json", run)
    page = page_with(tmp_path, benchmark)
    assert invoke("plot", "--results", str(tmp_path), "--root", str(tmp_path)).exit_code == 0
    text = page.read_text()
    assert report.sizes(asdict(shape)) in text and "**1.25x, 3.0 GiB**" in text and "one bare GEMM" in text
    assert "one bare matrix product, hidden @ weight.T" in text and "of the bare matrix products" not in text


def test_medusa_measures_the_library_and_its_peers(tmp_path):
    out = tmp_path / "medusa.json"
    result = invoke("medusa", "--quick", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["complete"] and written["absent"] == {
        "loop over Liger's fused CE": "needs CUDA, the device is cpu"
    }
    assert [section["shape"] for section in written["sections"]] == [
        asdict(shape) for shape in medusa.QUICK_SHAPES
    ]
    table = result.output[result.output.index("  K  ") :].splitlines()[2:]
    for section in written["sections"]:
        shape = medusa.Shape(**section["shape"])
        errors = {"loss_error", "d_weight_0_error", "d_block_0_error"} | (
            {"d_hidden_error"} if shape.stage == 2 else set()
        )
        assert [row["name"] for row in section["rows"]] == ["logitless", "eager, fp32 upcast"]
        for row in section["rows"]:
            assert row["verdict"] == "ok" and row["rounds"] == medusa.ROUNDS == 3
            assert {key for key in row if key.endswith("_error")} == (
                {"loss_error"} if shape == LONG else errors
            )
            assert row["ratio"] == pytest.approx(row["ms"] / section["yardstick"]["ms"])
            assert row["peak_bytes"] is row["beyond_gradients_bytes"] is None
            numbers = f"{row['ms']:.1f}", f"{1e3 * row['ms'] / shape.T:.2f}", f"{row['ratio']:.2f}"
            assert table.pop(0).split() == [
                str(shape.heads),
                str(shape.stage),
                f"{shape.T:,}",
                *row["name"].split(),
                *numbers,
            ]
        assert "fused" in section["rows"][0]["plan"] and section["rows"][0]["budget_bytes"] > 0
    assert not table


def test_medusa_shapes_sweep_the_length_in_both_stages():
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    assert [(s.heads, s.stage, s.T, s.H, s.V) for s in medusa.SHAPES] == [
        (heads, stage, T, 4096, 128256) for heads in (3, 5) for stage in (1, 2) for T in lengths
    ]


@pytest.mark.parametrize("shape", STAGES, ids=str)
def test_medusa_truth_is_the_fp64_autograd_result(shape):
    hidden, heads, targets, base = medusa.inputs(shape, CPU, seed=3)
    arguments = hidden, heads, targets, base
    found = medusa.truth(*arguments, gradients=True, chunk=7)
    wide = {
        name: x.detach().double().requires_grad_()
        for name, x in medusa.problem(shape, CPU, seed=3).leaves.items()
    }
    x, y = wide.get("hidden", hidden.double())[0], targets[0]
    losses = [] if base is None else [F.cross_entropy(x[:-1] @ wide["base"].T, y[1:])]
    for k in range(shape.heads):
        lifted = x + F.silu(x @ wide[f"block_{k}"].T + wide[f"bias_{k}"])
        losses.append(0.8**k * F.cross_entropy((lifted @ wide[f"weight_{k}"].T)[: -(k + 2)], y[k + 2 :]))
    loss = sum(losses)
    assert (base is None) == (shape.stage == 1) == (not hidden.requires_grad)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    assert found.gradients.keys() == {"weight_0", "block_0"} | ({"hidden"} if shape.stage == 2 else set())
    for name, gradient in zip(
        found.gradients, torch.autograd.grad(loss, [wide[name] for name in found.gradients]), strict=True
    ):
        assert (
            found.gradients[name].shape == gradient.shape
            and measure.relative_l2(gradient, found.gradients[name]) < 1e-5
        )
    alone = medusa.truth(*arguments, gradients=False)
    assert alone.gradients == {} and alone.loss == pytest.approx(loss.item(), rel=1e-5)
    assert all(x.grad is None for x in heads.parameters())


def test_two_bf16_products_make_an_fp32_one():
    x, weight = torch.randn(32, 256), torch.randn(300, 256).bfloat16()
    true = (x.double() @ weight.double().T).float()
    assert (
        measure.relative_l2(medusa.logits(x, weight), true)
        < 1e-5
        < 1e-3
        < measure.relative_l2(medusa.product(x.bfloat16(), weight), true)
    )


def test_medusa_inputs_are_those_of_trained_heads():
    """Every head has a loss to speak of, of which its block and its softmax have a share."""
    hidden, heads, targets, base = medusa.inputs(medusa.Shape(3, 2, 128, 512, 20_000), CPU, seed=1)
    for term in terms(heads, base):
        x, y = hidden[0, : -term.offset], targets[0, term.offset :]
        losses = [
            F.cross_entropy((states @ term.weight.T).float(), y).item()
            for states in (x, x if term.block is None else term.block(x))
        ]
        assert all(1.0 < loss < 6.0 for loss in losses)
        assert term.block is None or abs(losses[0] / losses[1] - 1) > 0.02


def of_heads(
    *,
    weigh=lambda term: term.coefficient,
    offset=0,
    states=lambda term, x: x if term.block is None else term.block(x),
    rows=None,
):
    """A sum of cross-entropies of full logits with something bent."""

    def call(hidden, heads, targets, base):
        total = 0.0
        for term in terms(heads, base):
            ahead = term.offset + offset * (term.block is not None)
            logits = states(term, hidden[0, :-ahead]) @ term.weight.t()
            ce = F.cross_entropy(
                logits.float(), targets[0, ahead:], reduction="mean" if rows is None else "sum"
            )
            total = total + weigh(term) * (ce if rows is None else ce / rows)
        return total

    return call


def block_bypassed(term, x):
    """The right states, with a gradient of hidden that lacks the way through the block."""
    return x if term.block is None else x + F.silu(term.block.linear(x.detach()))


WRONG_MEDUSA = {
    "no decay": of_heads(weigh=lambda term: 1.0),
    "a token too near": of_heads(offset=-1),
    "a token too far": of_heads(offset=1),
    "last head left out": of_heads(weigh=lambda term: term.coefficient * (term.offset < 4)),
    "mean over all positions": of_heads(rows=96),
    "no blocks": of_heads(states=lambda term, x: x),
    "no residual": of_heads(states=lambda term, x: x if term.block is None else term.block(x) - x),
    "no SiLU": of_heads(states=lambda term, x: x if term.block is None else x + term.block.linear(x)),
    "no gradient of the blocks": of_heads(
        states=lambda term, x: x if term.block is None else x + (term.block(x) - x).detach()
    ),
}
WRONG_STAGE_2 = {
    "no base head": of_heads(weigh=lambda term: term.coefficient * (term.offset > 1)),
    "no gradient of hidden from the heads": of_heads(
        states=lambda term, x: x if term.block is None else term.block(x.detach())
    ),
    "no gradient of hidden through the blocks": of_heads(states=block_bypassed),
}


@pytest.mark.parametrize("shape", STAGES, ids=str)
def test_a_wrong_medusa_loss_gets_no_time(shape):
    wrong = WRONG_MEDUSA | (WRONG_STAGE_2 if shape.stage == 2 else {})
    rows = rows_of(MEDUSA, shape, wrong | {"eager": eager_medusa, "by hand": of_heads()})
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys(wrong, "wrong") | {
        "eager": "ok",
        "by hand": "ok",
    }
    assert not any("ms" in rows[name] for name in wrong)


@pytest.mark.parametrize("shape", [STAGES[0], LONG], ids=["checked first", "loss alone"])
def test_medusa_rows_of_what_is_wrong_or_fails(shape):
    def fails(*arguments):
        raise AssertionError("chunk\nof the wrong size")

    def exhausts(*arguments):
        raise torch.OutOfMemoryError("40 GiB")

    def off(*arguments):
        return 1.02 * eager_medusa(*arguments)

    losses = {
        "fails": fails,
        "exhausts": exhausts,
        "off": off,
        "NaN": lambda *x: math.nan * eager_medusa(*x),
        "eager": eager_medusa,
    }
    rows = rows_of(MEDUSA, shape, losses)
    assert [rows[name]["verdict"] for name in losses] == ["failed", "out of memory", "wrong", "wrong", "ok"]
    assert rows["fails"]["reason"] == "AssertionError: chunk of the wrong size"
    assert rows["off"]["loss_error"] == pytest.approx(0.02, rel=0.1)
    assert [name for name in losses if "ms" in rows[name]] == ["eager"]


def test_medusa_memory_is_that_of_the_timed_calls(monkeypatch):
    """Beyond what there was before; the returned gradients are those of everything that trains."""
    monkeypatch.setattr(medusa, "allocated", lambda device, restart=False: 1000 if restart else 10_001_000)
    for shape in (STAGES[1], LONG):
        row = rows_of(MEDUSA, shape, {"logitless": eager_medusa_with_plan})["logitless"]
        trained = (3 + 1) * shape.V * shape.H + 3 * shape.H * (shape.H + 1) + shape.T * shape.H
        assert (row["peak_bytes"], row["beyond_gradients_bytes"]) == (10_000_000, 10_000_000 - 2 * trained)
        assert row["memory_limit_bytes"] == 2**20 + medusa.goals(shape)["logitless"].extra_bytes
        assert row["meets_memory_limit"] == (10_000_000 - 2 * trained <= row["memory_limit_bytes"])


def eager_medusa_with_plan(*arguments):
    from logitless import LossOutput
    from logitless.engine.plan import Plan

    return LossOutput(eager_medusa(*arguments), {}, Plan("fused", (), 1, 1, 2**20, 1, 1))


def test_the_memory_goal_of_medusa_knows_no_heads():
    limits = {shape: medusa.goals(shape)["logitless"] for shape in medusa.SHAPES}
    assert all(goal.ratio is None for goal in limits.values())
    for shape, goal in limits.items():
        assert goal == limits[replace(shape, heads=3)]
        d_hidden = 6 * shape.T * 4096 if shape.stage == 2 else 0
        assert goal.extra_bytes == 4 * 128256 * 4096 + d_hidden + 4 * min(shape.T, 4096) * 4096


def medusa_document(*rows):
    """A result with our rows: (heads, stage, T, bytes beyond the gradients)."""
    row = {"name": "logitless", "verdict": "ok", "ms": 12.5, "ratio": 10.0, "peak_bytes": 3 * 2**30}
    limits = {"memory_limit_bytes": 2**30, "meets_memory_limit": True}
    theirs = [{"name": "eager, fp32 upcast", "verdict": "out of memory"}]
    sections = [
        {
            "shape": asdict(medusa.Shape(heads, stage, T, 4096, 128256)),
            "rows": [row | limits | {"beyond_gradients_bytes": beyond}, *theirs],
        }
        for heads, stage, T, beyond in rows
    ]
    return document("medusa", sections=sections)


def test_memory_that_grows_with_the_heads_is_found():
    flat = [
        (3, 1, 1024, 2**30),
        (3, 2, 1024, 2**32),
        (5, 1, 1024, int(1.04 * 2**30)),
        (5, 2, 1024, 2**31),
        (5, 2, 2048, 2**34),
    ]
    assert medusa.grown(medusa_document(*flat)) == []
    grows = medusa_document(*flat, (3, 2, 4096, 2**30), (5, 2, 4096, int(1.06 * 2**30)))
    assert medusa.grown(grows) == ["stage 2, T 4,096: 1.00 GiB with 3 heads, 1.06 GiB with 5 heads"]
    # Neither what failed nor a peer counts, and on a CPU there is nothing to compare.
    grows["sections"][-1]["rows"][0]["verdict"] = "out of memory"
    assert medusa.grown(grows) == medusa.grown(medusa_document((3, 1, 1024, None), (5, 1, 1024, None))) == []


def test_a_medusa_run_whose_memory_grows_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(medusa, "grown", lambda document: ["stage 1, T 96: much"])
    out = tmp_path / "medusa.json"
    result = invoke(
        "medusa",
        "--quick",
        "--device",
        "cpu",
        "--only",
        "eager",
        "--shapes",
        str(STAGES[0]),
        "--out",
        str(out),
    )
    assert result.exit_code == 1 and "memory grows with the heads: stage 1, T 96: much" in result.output
    assert "us/token" in result.output and json.loads(out.read_text())["complete"]


def test_the_medusa_table_says_who_kept_the_limit_and_who_ran_out():
    run = medusa_document((5, 2, 2048, 2**29))
    run["sections"][0]["rows"][0]["meets_memory_limit"] = False
    *_, ours, eager = medusa.table(run).splitlines()
    assert ours.split() == "5 2 2,048 logitless 12.5 6.10 10.00 3.00 0.50 1.00 NO".split()
    assert eager.split() == "5 2 2,048 eager, fp32 upcast out of memory".split()


def test_the_readme_has_medusa_by_length():
    *header, caption = medusa.by_length(
        medusa_document((5, 2, 2048, 2**29), (5, 2, 1024, 2**30)), "here.json"
    ).splitlines()
    titles, _, ours, eager = ([cell.strip() for cell in line.strip("|").split("|")] for line in header[:4])
    assert titles == ["heads", "stage", "", "T 1,024", "T 2,048"]
    assert ours == ["**5**", "**2**", "**logitless**", "**12 ms, 1.0 GiB**", "**12 ms, 0.5 GiB**"]
    assert eager == ["5", "2", "eager, fp32 upcast", "out of memory", "out of memory"]
    assert "H 4,096, V 128,256" in caption and "here.json" in caption


def test_distillation_length_measures_ours_up_to_the_length_asked_for(tmp_path):
    assert [shape.N for shape in distillation.length_shapes(131072)] == [8192, 32768, 131072]
    out = tmp_path / "result.json"
    result = invoke("distillation-length", "--quick", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["benchmark"] == "distillation-length" and [
        row["name"] for row in written["sections"][0]["rows"]
    ] == ["logitless"]


def test_tensor_parallel_compares_every_rank_with_one_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "spawn", forked)
    out = tmp_path / "result.json"
    result = invoke("tensor-parallel", "--quick", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [section["loss"] for section in written["sections"]] == ["cross-entropy", "DPO", "GRPO", "JSD"]
    for section in written["sections"]:
        whole, *ranks = section["rows"]
        assert whole["verdict"] == "ok" and len(ranks) == 2
        # Another head than the whole one: its errors are its own.
        assert all(row["right"] and row["d_weight_error"] != whole["d_weight_error"] for row in ranks)
        for row in section["rows"]:
            row["beyond_gradients_bytes"] = 2**30
    page = tensor_parallel.by_loss(written, "here.json")
    assert "| cross-entropy, N 96, H 32, V 517" in page and "1.0 GiB" in page and "here.json" in page


def test_cpu_compares_with_plain_pytorch(tmp_path):
    out = tmp_path / "result.json"
    result = invoke("cpu", "--quick", "--out", str(out))
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["sections"][0]["rows"]
    assert [row["verdict"] for row in rows] == ["ok"] * 2
    assert f"{rows[0]['ms'] / rows[1]['ms']:.2f} x plain PyTorch" in result.output


def test_sweep_doubles():
    assert [shape.N for shape in ce.sweep_shapes(8192)] == [1024, 2048, 4096, 8192]
    assert ce.sweep_shapes(131072)[-1].N == 131072


def page_with(root: Path, *names: str, readme: tuple[str, ...] = ()) -> Path:
    """docs/benchmarks.md and README.md below `root`, with markers and nothing between them."""
    for page, marked in ((root / "docs" / "benchmarks.md", names), (root / "README.md", readme)):
        page.parent.mkdir(exist_ok=True)
        page.write_text("".join(f"<!-- benchmarks:{x} -->\nold\n<!-- /benchmarks:{x} -->\n" for x in marked))
    return root / "docs" / "benchmarks.md"


def test_plot_rewrites_the_pages_and_draws(tmp_path):
    report.write_json(tmp_path / "ce.json", document())
    report.write_json(tmp_path / "sweep.json", document("sweep"))
    page = page_with(tmp_path, "ce", readme=("summary",))
    page.write_text(f"before\n{page.read_text()}after\n")
    arguments = ["plot", "--results", str(tmp_path), "--root", str(tmp_path)]
    assert invoke(*arguments).exit_code == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- benchmarks:ce -->\n|") and text.endswith(
        "\n<!-- /benchmarks:ce -->\nafter\n"
    )
    assert "old" not in text and "**1.25x, 3.0 GiB**" in text and "10.0 ms" in text
    for part in (
        "out of memory",
        "wrong",
        "2e-01",
        "QuACK: quack-kernels is not installed",
        "benchmarks/results/ce.json",
    ):
        assert part in text
    assert "old" not in (tmp_path / "README.md").read_text()
    assert (tmp_path / "docs" / "ce.png").read_bytes().startswith(b"\x89PNG")

    assert invoke(*arguments).exit_code == 0
    assert page.read_text() == text


def test_plot_writes_a_table_for_each_objective_with_a_result(tmp_path):
    four = {"shape": asdict(FROZEN[1]), "yardstick": {"ms": 7.0, "tflops": 700.0, "chunk": 2048}}
    written = document("distillation")
    written["sections"] = [section | four for section in written["sections"]]
    report.write_json(tmp_path / "distillation.json", written)
    page = page_with(tmp_path, "ce", "distillation")
    untouched = page.read_text()[: page.read_text().index("<!-- benchmarks:distillation")]
    assert invoke("plot", "--results", str(tmp_path), "--root", str(tmp_path)).exit_code == 0
    text = page.read_text()
    assert text.startswith(untouched + "<!-- benchmarks:distillation -->\n|") and "7.0 ms" in text
    assert "N 48, H 16, teacher H 24, V 131, frozen head" in text and "ignored" not in text
    assert not (tmp_path / "docs" / "ce.png").exists()


def test_the_readme_has_a_row_for_each_kind_of_loss():
    """Of two shapes it takes the second of cross-entropy, our defaults, and the fastest of a peer's ways."""
    run = document()
    first, second = ({**run["sections"][0]} for _ in range(2))
    second["rows"] = [{**row, "ms": 99.4} for row in run["sections"][0]["rows"]]
    for name, ms in (("Liger, accum_dtype fp32", 31.0), ("Liger, other", 12.0), ("logitless, bf16", 1.0)):
        second["rows"].append({"name": name, "verdict": "ok", "ms": ms, "peak_bytes": 2**30})
    header, _, row, *_ = summary.losses({"ce": run | {"sections": [first, second]}}).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == f"cross-entropy, {report.sizes(asdict(SHAPE))}"
    assert cells[1:] == ["out of memory", "", "12 ms, 1.0 GiB", "", "**99 ms, 3.0 GiB**"] and "TRL" in header


def test_the_readme_says_what_the_flags_measured():
    def ran(name, size, *verdicts):
        rows = [{"verdict": verdict, "ms": size, "peak_bytes": 2**30} for verdict in verdicts]
        return {"trainer": name, "size": size, "rows": rows}

    sections = [ran("SFT", 8, "ok", "ok"), ran("SFT", 16, "ok", "ok"), ran("SFT", 32, "out of memory", "ok")]
    model = {"hidden_size": 1024, "vocab_size": 151936}
    lines = summary.flags({"sections": sections, "model": model, "device": "GPU"}).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    found = {row[0]: row[-1] for row in rows[2:]}
    assert found["SFT"] == "16 ms, 1.0 GiB → 16 ms, 1.0 GiB"
    assert found["ORPO; alike CPO, SimPO, TPO"] == "not measured"


def test_pages_are_those_of_the_results(tmp_path):
    """Nobody wrote a number into a table by hand."""
    root = Path(report.RESULTS).parents[1]
    (tmp_path / "docs").mkdir()
    pages_with_tables = ("README.md", "docs/benchmarks.md", "docs/layers.md", "docs/recipes.md")
    for name in pages_with_tables:
        shutil.copy(root / name, tmp_path / name)
    assert invoke("plot", "--root", str(tmp_path)).exit_code == 0
    for name in pages_with_tables:
        assert (tmp_path / name).read_text() == (root / name).read_text(), "run `python -m benchmarks plot`"


def test_plot_asks_for_a_result(tmp_path):
    result = invoke("plot", "--results", str(tmp_path))
    assert result.exit_code == 2 and "expected a complete result" in " ".join(
        result.output.replace("│", " ").split()
    )


def test_plot_asks_for_the_markers(tmp_path):
    with pytest.raises(ValueError, match="<!-- benchmarks:ce -->"):
        pages.rewrite(tmp_path / "README.md", "ce", "table")


def test_numbers_in_the_readmes_sentences_are_those_of_the_results():
    page = (Path(report.RESULTS).parents[1] / "README.md").read_text()
    step, cpu = (
        json.loads((report.RESULTS / name).read_text()) for name in ("step-h200.json", "ce-cpu.json")
    )
    ms = {row["name"]: row["ms"] for row in step["sections"][0]["rows"] if "ms" in row}
    assert f"from {ms['stock']:.0f} to {ms['our layers']:.0f} ms" in page
    ours, plain = (row["ms"] for row in cpu["sections"][0]["rows"])
    assert f"{ours / plain:.2f} times plain PyTorch's time" in page


def test_newest_result_is_the_latest_complete_one(tmp_path):
    for name, changes in {
        "z-old": {"date": "2026-01-01"},
        "a-new": {"date": "2026-02-01"},
        "b-partial": {"date": "2026-03-01", "complete": False},
        "c-quick": {"date": "2026-03-01", "quick": True},
        "d-other": {"date": "2026-03-01", "benchmark": "sweep"},
    }.items():
        report.write_json(tmp_path / f"{name}.json", document(**changes))
    path, _ = report.newest("ce", tmp_path)
    assert path.name == "a-new.json"
    assert report.newest("gemm", tmp_path) is None


def test_picture_of_a_cpu_run(tmp_path):
    # Neither memory nor the size of the card is known there.
    run = document("sweep")
    run["sections"][0]["rows"][0]["peak_bytes"] = None
    picture.draw(run | {"device_bytes": None}, tmp_path / "ce.png")
    assert (tmp_path / "ce.png").stat().st_size > 0


def test_the_picture_takes_from_the_comparison_what_the_sweep_lacks():
    sweep, other = document("sweep"), document()
    measured = other["sections"][0]["rows"]
    measured += [
        {"name": name, "verdict": "ok", "ratio": 1.5, "peak_bytes": 1} for name in ("QuACK", "unknown")
    ]
    elsewhere = {"shape": asdict(SHAPE) | {"N": 7}, "rows": measured}
    (section,) = picture.with_others(sweep["sections"], other | {"sections": [*other["sections"], elsewhere]})
    assert [row["name"] for row in section["rows"]] == ["logitless", "eager, fp32 upcast", "Liger", "QuACK"]
    assert picture.label("eager, fp32 upcast", [section]) == "eager, fp32 upcast (out of memory at 48)"
    section["rows"][0]["ratio"] = 19.6
    assert picture.label("logitless", [section]) == "logitless (20x at 48, off the axis)"
    others = [section, elsewhere | {"rows": []}]
    assert picture.label("QuACK", others) == "QuACK (at 48 alone)"


# -- Two trees side by side


def session(tmp_path, **changes) -> own_rows.Session:
    known = {"rows": []}
    settings = {"seed": 0, "quick": True, "repeats": 1, "host_calls": 2, "words": []} | changes
    return own_rows.Session(device=CPU, out=tmp_path / "rows.json", found=known, **settings)


def test_every_row_runs_and_has_gradients_where_its_inputs_need_them(tmp_path):
    here = session(tmp_path)
    with torch.compiler.set_stance("force_eager"):
        for row in own_rows.ROWS:
            here.measure(row, lambda row: own_rows.timed(here, row, here.arguments(row.inputs)))
    found = {row["name"]: row for row in json.loads(here.out.read_text())["rows"]}
    assert list(found) == [row.name for row in own_rows.ROWS]
    assert not [row for row in found.values() if "failed" in row]
    for row in found.values():
        assert len(row["ms"]) == 1 and row["ms"][0] > 0 and math.isfinite(row["loss"])
        assert all(math.isfinite(norm) and norm > 0 for norm in row["norms"])
    # hidden and the head; the frozen head's own norm stands in for its gradient's.
    assert [len(found[name]["norms"]) for name in ("logprobs", "logprobs, frozen head")] == [2, 2]
    # Nothing without a gradient, and the main gradient besides d_hidden.
    assert [len(found[name]["norms"]) for name in ("logprobs, no gradient", "CE accumulate_into")] == [0, 2]


@pytest.mark.parametrize("row", own_rows.HOST_ROWS, ids=lambda row: row.name)
def test_host_time_ends_with_the_first_product(row, tmp_path, monkeypatch):
    """By a clock that only matrix products move: a second each."""
    clock, real = [0.0], torch.mm

    def product(*arguments, **options):
        clock[0] += 1.0
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(own_rows, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    # JSD on a CPU would be compiled, by a compiler that has no place for this product.
    with torch.compiler.set_stance("force_eager"):
        assert own_rows.host_time(session(tmp_path), row)["us"] == [1e6, 1e6]
    # Two calls after two that warm up, each with more products than the first.
    assert clock[0] > 4
    assert torch.mm is product


def sabotaged(folder: Path) -> Path:
    """A checkout whose cross-entropy is a tenth too large."""
    shutil.copytree(
        compare_trees.ROOT / "logitless", folder / "logitless", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (folder / "logitless" / "__init__.py").open("a") as file:
        file.write("\nright = CrossEntropyLoss.__call__\n")
        file.write("def wrong(*args, **options):\n    out = right(*args, **options)\n")
        file.write("    return out._replace(loss=1.1 * out.loss)\nCrossEntropyLoss.__call__ = wrong\n")
    return folder


def test_compare_measures_each_tree_by_itself_and_sees_a_wrong_one(tmp_path):
    out, tree = tmp_path / "compare.json", sabotaged(tmp_path / "tree")
    options = (
        "--rounds",
        "1",
        "--rows",
        "CE N=512",
        "--rows",
        "CE 8192x4096",
        "--rows",
        "host CE",
        "--quick",
        "--device",
        "cpu",
    )
    result = invoke(
        "compare", "--before", str(compare_trees.ROOT), "--after", str(tree), "--out", str(out), *options
    )
    written = json.loads(out.read_text())
    assert result.exit_code == 1, result.output
    assert written["complete"] and str(tmp_path) not in out.read_text()
    assert written["trees"]["before"]["sources"] != written["trees"]["after"]["sources"]
    rows = {row["name"]: row for row in written["summary"]["rows"]}
    assert list(rows) == ["CE 8192x4096x128256", "CE 8192x4096x128256, bf16 d_weight", "CE N=512", "host CE"]
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["after"]["median"] / row["before"]["median"])
        assert bool(row["wrong"]) == (row["unit"] == "ms")
    assert "geometric mean" in result.output and "CE N=512: the trees disagree" in result.output


def test_compare_measures_shards_on_every_rank():
    done = compare_trees.one_run(compare_trees.ROOT, settings(words=("tp cross",), ranks=2, limit=120.0))
    assert "failed" not in done, done
    (first,), (second,) = (rank["rows"] for rank in done["ranks"])
    assert first["name"] == second["name"] == "tp cross-entropy" and first["loss"] == second["loss"]
    # d_hidden is the same on both, d_weight each one's own.
    assert len(set(first["norms"]) & set(second["norms"])) == 1


def settings(**changes) -> compare_trees.Settings:
    known = {
        "device": "cpu",
        "seed": 0,
        "quick": True,
        "repeats": 1,
        "host_calls": 1,
        "words": (),
        "ranks": 1,
        "limit": 60.0,
    }
    return compare_trees.Settings(**known | changes)


@pytest.mark.parametrize(
    "code, limit, said",
    [
        ("import time; time.sleep(60)", 0.5, "did not end within 0.5 s"),
        ("raise SystemExit('no such GPU')", 60.0, "exit status 1: no such GPU"),
    ],
)
def test_a_process_that_fails_or_hangs_is_ended_and_told(tmp_path, code, limit, said):
    (tmp_path / "logitless").mkdir()
    (tmp_path / "logitless" / "__init__.py").write_text(code)
    document, start = {"device": "CPU"}, time.perf_counter()
    trees = dict.fromkeys(compare_trees.TREES, tmp_path)
    compare_trees.run(
        document, trees, settings(limit=limit), 1, minutes=1.0, out=tmp_path / "x.json", say=print
    )
    assert time.perf_counter() - start < 30
    assert [run["failed"] for run in document["runs"]] == [said, said]
    assert f"NOT RIGHT: round 1, before: {said}" in compare_trees.table(document)


def fake_runs(**rows: tuple) -> list[dict]:
    """Three rounds of rows that take (before ms, after ms) with (before, after) bytes; in round 2 everything
    takes twice as long."""
    runs = []
    for turn in range(3):
        for index, tree in enumerate(compare_trees.TREES):
            found = [
                {
                    "name": name,
                    "ms": [ms[index] * (1 + turn % 2)] * 3,
                    "peak_bytes": peaks[index],
                    "loss": 1.0,
                    "norms": [2.0],
                }
                for name, (ms, peaks) in rows.items()
            ]
            runs.append({"tree": tree, "round": turn, "ranks": [{"rows": found}]})
    return runs


def test_the_verdict_of_a_comparison():
    runs = fake_runs(slower=((10.0, 10.3), (2**30, 2**30)), faster=((10.0, 9.5), (2**30, 2**30 + 2**25)))
    document = {"runs": runs, "rounds": 3, "device": "GPU", "summary": compare_trees.summary(runs)}
    assert document["summary"]["geometric_mean"] == pytest.approx(math.sqrt(1.03 * 0.95))
    said = compare_trees.table(document)
    assert "worst row 1.0300 (OVER 1.02): slower" in said and "geometric mean 0.9892 (within 1.005)" in said
    assert "peak memory larger: faster by 32.0 MiB" in said and "NOT RIGHT" not in said


@pytest.mark.parametrize(
    "change, limit", [({"loss": 1.002}, "loss"), ({"norms": [2.03]}, "norms"), ({"norms": []}, "norms")]
)
def test_a_comparison_of_different_results_is_not_right(change, limit):
    runs = fake_runs(row=((10.0, 10.0), (1, 1)))
    runs[1]["ranks"][0]["rows"][0] |= change
    assert limit in compare_trees.summary(runs)["wrong"][0]


def test_a_row_of_one_tree_alone_is_not_right():
    runs = fake_runs(row=((10.0, 10.0), (1, 1)))
    for run in runs[1::2]:
        run["ranks"][0]["rows"] = [{"name": "row", "failed": "OutOfMemoryError"}]
    found = compare_trees.summary(runs)
    assert found["rows"][0]["ratio"] is None and found["wrong"] == ["row: failed after: OutOfMemoryError"]
