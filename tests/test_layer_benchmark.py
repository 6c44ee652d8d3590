"""`python -m benchmarks layers`: runs on any device, checks before it times, wrong operators get no time."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import layer_picture, layer_tiles, layers, report
from benchmarks.__main__ import app
from benchmarks.layer_operators import WIDTHS, Maker, operators
from benchmarks.layer_peers import LAYERS, by_kind

CPU = torch.device("cpu")


def invoke(*arguments: str):
    return CliRunner().invoke(
        app, ["layers", "--quick", "--device", "cpu", *arguments], catch_exceptions=False
    )


def first(kind: str = "add_rms_norm"):
    return next(each for each in operators(Maker(CPU, tiny=True)) if each.kind == kind)


def test_a_quick_run(tmp_path):
    out, chosen = tmp_path / "rows.json", ("fp32 residual", "qk_norm_rope 2x3x(16", "packed")
    asked = [word for name in chosen for word in ("--operator", name)]
    result = invoke(*asked, "--out", str(out))
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert (
        document["complete"]
        and document["benchmark"] == "layers"
        and "needs CUDA" in document["absent"]["Liger"]
    )
    kinds = [each["kind"] for each in document["sections"]]
    assert [*dict.fromkeys(kinds)] == ["add_rms_norm fp32 residual", "qk_norm_rope", "gated silu packed"]
    for each in document["sections"]:
        assert [row["name"] for row in each["rows"]] == ["logitless", "eager"]
        for row in each["rows"]:
            assert row["verdict"] == "ok" and row["forward"]["us"] > 0 and row["backward"]["of_copy"] > 0
            assert max(row["errors"].values()) < 1e-2 and row["host_us"] > 0


def test_wrong_operators_get_no_time():
    """Ours is held to the stock model's error, a peer to what bf16 can cost."""
    operator = first()
    copies = dict.fromkeys(layers.DIRECTIONS, 1.0)
    for name, by, verdict in (("logitless", 1.01, "wrong"), ("Liger", 1.01, "ok"), ("Liger", 1.1, "wrong")):

        def off(by=by, **leaves):
            return tuple(by * y for y in operator.stock(**leaves))

        row = layers.measured(name, operator, off, CPU, copies)
        assert row["verdict"] == verdict and ("forward" in row) == (verdict == "ok"), (name, by)


def test_what_a_peer_writes_into_its_operands_is_its_own_affair():
    def inplace(x, residual, weight):
        y, h = operator.stock(x, residual, weight)
        x.data.zero_()
        return y, h

    operator = first()
    assert all(ours == stock for ours, stock in layers.errors(operator, inplace).values())


def test_a_peer_that_breaks_down_or_lacks_the_operator():
    def breaks(operator):
        raise RuntimeError("no such\nkernel")

    peers = {"logitless": lambda operator: operator.ours, "Liger": breaks, "FLA": by_kind({})}
    section = layers.section(first(), peers, CPU)
    assert [row["name"] for row in section["rows"]] == ["logitless", "Liger"]
    assert section["rows"][1] == {
        "name": "Liger",
        "verdict": "failed",
        "reason": "RuntimeError: no such kernel",
    }
    assert "failed" in layers.lines(section)
    document = {"sections": [section]}
    assert layers.failed(document) == []
    section["rows"][0] = {"name": "logitless", "verdict": "wrong"}
    assert layers.failed(document) == [f"{section['operator']}: wrong"]


def test_table_and_picture(tmp_path):
    """A table of the models' shapes, a picture of the widths."""
    row = {"verdict": "ok", "host_us": 9.0, "peak_bytes": 2**30, "errors": {"result 0": 1e-3}}
    row |= {name: {"us": 50.0, "gb_per_s": 2000.0, "of_copy": 0.9} for name in layers.DIRECTIONS}
    rows = [{"name": "logitless"} | row, {"name": "Liger"} | row, {"name": "QuACK", "verdict": "failed"}]
    names = [(each.name, each.kind, each.width) for each in operators(Maker(CPU, tiny=True))]
    assert {width for *_, width in names} == {None, *WIDTHS}
    sections = [{"operator": name, "kind": kind, "width": width, "rows": rows} for name, kind, width in names]
    document = report.new_document("layers", CPU, quick=True, versions=LAYERS.versions())
    document |= {"absent": {"FLA": "not there"}, "sections": sections, "complete": True}
    table = layers.by_operator(document, report.origin(document, (tmp_path / "layers.json", document)))
    assert table.count("50 / 50, 1.00") == 2 * sum(width is None for *_, width in names)
    assert "90% / 90%" in table and "failed" in table and "Absent: FLA: not there" in table
    layer_picture.draw(document, tmp_path / "layers.png")
    assert (tmp_path / "layers.png").stat().st_size > 10_000


def test_runs_of_some_operators_or_peers_make_one_table():
    """What was measured twice counts as it was last; who came later is not absent."""

    def run(absent, **times):
        rows = {
            kind: [{"name": name, "us": us} for name, us in found.items()] for kind, found in times.items()
        }
        sections = [{"operator": kind, "width": None, "rows": found} for kind, found in rows.items()]
        return {"absent": absent, "versions": {"FLA": None if absent else "1"}, "sections": sections}

    first = run({"FLA": "not there"}, rope={"logitless": 1, "Liger": 2}, gated={"logitless": 3})
    later = run({"QuACK": "no"}, rope={"FLA": 4, "logitless": 5}, norm={"FLA": 6})
    whole = layers.together([first, later])
    found = {x["operator"]: {row["name"]: row["us"] for row in x["rows"]} for x in whole["sections"]}
    ropes = {"Liger": 2, "FLA": 4, "logitless": 5}
    assert found == {"rope": ropes, "gated": {"logitless": 3}, "norm": {"FLA": 6}}
    assert whole["absent"] == {"QuACK": "no"}
    assert [row["name"] for row in first["sections"][0]["rows"]] == ["logitless", "Liger"]


@pytest.mark.parametrize("kind", ["add_rms_norm", "rope", "qk_norm_rope", "gated silu"])
def test_other_tiles(kind, monkeypatch):
    said, times = [], iter(range(10_000, 0, -1))
    monkeypatch.setattr(layer_tiles, "copy_us", lambda count, device: 1.0)
    for direction in layers.DIRECTIONS:
        monkeypatch.setattr(layer_tiles, f"{direction}_us", lambda *given: float(next(times)))
    pytest.importorskip("triton")
    layer_tiles.sweep(first(kind), CPU, float("inf"), said.append)
    assert sum("tiles: copy" in line for line in said) == 2 and any("warps" in line for line in said)
