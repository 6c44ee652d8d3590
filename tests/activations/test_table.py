"""`python -m logitless activations`: bytes of a configuration's layers, and their upgrades."""

import json
import re

import pytest
import torch
import transformers

from logitless.__main__ import main
from logitless.activations.table import activation_table
from logitless.models import fit_activations, fuse_layers
from tests.layers.tiny import EXPERTS, SIZES, step, tiny

LAYERS = 4


@pytest.fixture
def folder(tmp_path):
    transformers.Qwen3Config(**SIZES | {"num_hidden_layers": LAYERS}).save_pretrained(tmp_path)
    return str(tmp_path)


def counted(model, ids) -> tuple:
    fitted = fit_activations(model, 10**9)
    for _ in range(2):
        step(model, ids)
    return fitted.costs


def test_it_counts_what_a_model_holds(folder):
    ids = torch.randint(64, (2, 21))
    model = tiny("Qwen3", num_hidden_layers=LAYERS).train()
    fuse_layers(model)
    costs, shared = counted(model, ids)
    size = {"batch": 2, "length": 21, "dtype": torch.float32, "device": "cpu"}
    state = torch.get_rng_state()
    table = activation_table(f"{folder}/config.json", **size)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(table.costs) == costs and table.shared == shared and table.tokens == 42
    assert table.total("keep") == shared + sum(cost["keep"] for cost in costs)
    rows = list(table.levels_and_bytes())
    assert len(rows) == 2 * LAYERS + 1 and [number for _, number in rows] == sorted(n for _, n in rows)
    assert rows[0] == ("0 kept, 0 cheap, 4 full", table.total("full"))
    assert rows[-1] == ("4 kept, 0 cheap, 0 full", table.total("keep"))
    assert rows[LAYERS] == ("0 kept, 4 cheap, 0 full", table.total("cheap"))
    for levels, number in rows:
        assert levels in table.plan(number).describe()
    stock = activation_table(folder, stock_layers=True, **size)
    costs, _ = counted(tiny("Qwen3", num_hidden_layers=LAYERS).train(), ids)
    assert list(stock.costs) == costs and "level cheap is unavailable: the layers are stock" in str(stock)
    frozen = activation_table(folder, frozen=True, **size)
    assert frozen.total("full") == table.total("full") and frozen.total("keep") < table.total("keep")


def test_layers_of_several_kinds(tmp_path):
    options = SIZES | EXPERTS | {"num_hidden_layers": LAYERS, "mlp_only_layers": [0, 1]}
    transformers.Qwen3MoeConfig(**options, moe_intermediate_size=24).save_pretrained(tmp_path)
    table = activation_table(str(tmp_path), batch=1, length=21, dtype=torch.float32, device="cpu")
    assert table.kinds == ("Qwen3MoeDecoderLayer as 0",) * 2 + ("Qwen3MoeDecoderLayer as 2",) * 2
    assert table.costs[0] == table.costs[1] != table.costs[2] == table.costs[3]


def test_the_command(folder, capsys):
    size = ["--batch", "2", "--length", "21", "--dtype", "float32", "--device", "cpu"]
    assert main(["activations", folder, *size, "--budget", "100KB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Qwen3ForCausalLM: 4 decoder layers, 42 tokens"
    (each,) = (line for line in lines if line.startswith("4 x Qwen3DecoderLayer "))
    assert len(re.findall(r"[\d.]+ KiB", each)) == 3
    assert sum(" kept, " in line for line in lines) == 2 * LAYERS + 2
    assert re.fullmatch(r"100KB: 4 layers, 42 tokens: 0 kept, \d cheap, \d full: .* of 97.66 KiB", lines[-1])
    for arguments, text in (
        (
            ["activations", "nowhere", *size],
            "CONFIG: expected a folder with a config.json, or that file, got now",
        ),
        (["activations", folder, *size, "--budget", "1B"], "activation_budget: expected at least"),
        (["activations", folder, *size, "--budget", "much"], "--budget: expected a positive number of bytes"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert text in capsys.readouterr().err


def test_models_without_such_layers(tmp_path):
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    transformers.T5Config(**small).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="CONFIG: expected a decoder, got an encoder-decoder"):
        activation_table(str(tmp_path), batch=1, length=5)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "t5"
