"""axolotl: the plugin in axolotl's own PluginManager, from its YAML to the loss."""

import logging
import re

import pytest
import torch
import yaml

from tests.integrations.support import PAGE, another_version, check_parameters, require
from tests.support import assert_close

FOLDER = require("axolotl")

from axolotl.integrations.base import BasePlugin, PluginManager  # noqa: E402
from axolotl.logging_config import AxolotlOrWarnErrorFilter  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402
from pydantic import BaseModel, ConfigDict, ValidationError  # noqa: E402

from benchmarks.harness.registry import Peer, Peers  # noqa: E402
from benchmarks.models import lora, steps  # noqa: E402
from benchmarks.peers import lora as lora_peers  # noqa: E402
from logitless.exchange import state_of  # noqa: E402
from logitless.integrations.axolotl import (  # noqa: E402
    INCOMPATIBLE_KEYS,
    LIGER_LAYER_KEYS,
    LogitlessArgs,
    LogitlessPlugin,
)
from logitless.models.patch import KEY  # noqa: E402
from tests.trl_integration.tiny import VOCAB, tiny_model  # noqa: E402

YAML = """
plugins:
  - logitless.integrations.axolotl.LogitlessPlugin
logitless_budget: 100000
"""
IDS = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "labels": torch.where(IDS % 4 == 0, -100, IDS)}


class Config(LogitlessArgs):
    """As `merge_input_args` makes it: axolotl's own keys beside those of the plugin."""

    model_config = ConfigDict(extra="allow")


@pytest.fixture
def manager(monkeypatch):
    """axolotl's plugin manager, of its own for each test, without axolotl's own plugins."""
    monkeypatch.setattr(PluginManager, "_instance", None)
    monkeypatch.setattr("axolotl.integrations.base.get_builtin_plugins", lambda: ())
    return PluginManager.get_instance()


def configured(manager, text: str) -> DictDefault:
    """The config of a YAML file, registered and validated as `axolotl train` does."""
    given = yaml.safe_load(text)
    for name in given["plugins"]:
        manager.register(name, required=True)
    (where,) = manager.get_input_args()
    assert where == "logitless.integrations.axolotl.LogitlessArgs"
    return DictDefault(Config(**given).model_dump(exclude_none=True))


def test_from_yaml_to_the_loss(manager, caplog):
    cfg = configured(manager, YAML)
    model, twin = tiny_model(), tiny_model()
    twin.load_state_dict(model.state_dict())
    with caplog.at_level(logging.INFO, "axolotl"):
        manager.post_model_load(cfg, model)
    (record,) = [record for record in caplog.records if record.msg.startswith("logitless")]
    line = "logitless: axolotl's loss of labelled calls replaced, logits_budget 9.31e-05 GiB"
    assert record.getMessage() == line and AxolotlOrWarnErrorFilter().filter(record)
    out, expected = model(**INPUTS), twin.double()(**INPUTS)
    assert out.logits is None and state_of(model, KEY).logits_budget == 100000
    assert state_of(model, KEY).last_plan.rows == (INPUTS["labels"][:, 1:] != -100).sum()
    assert_close(out.loss.detach(), expected.loss.detach().double(), 1e-6, name="loss")
    out.loss.backward()
    expected.loss.backward()
    for (name, ours), reference_value in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(ours.grad, reference_value.grad, 1e-5, name=name)
    state_of(model, KEY)()
    assert model(**INPUTS).logits is not None


def test_axolotls_own_validation(manager):
    """The YAML of the documentation, as `axolotl train` reads it."""
    from axolotl.utils.config import prepare_plugins, validate_config

    (text,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "plugins:" in block]
    needed = "base_model: tiny\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\nlearning_rate: 1.0e-4\n"
    needed += "datasets: [{path: tiny, type: alpaca}]\n"
    cfg = DictDefault(yaml.safe_load(needed + text))
    prepare_plugins(cfg)
    actual = validate_config(cfg)
    assert (actual.logitless, actual.logitless_budget, actual.logitless_fused_layers) == (
        True,
        2684354560,
        True,
    )
    model = tiny_model()
    manager.post_model_load(actual, model)
    assert model(**INPUTS).logits is None
    with pytest.raises(ValidationError, match="use_dft: expected unset if logitless is enabled"):
        validate_config(DictDefault(yaml.safe_load(needed + text + "use_dft: true\n")))


def test_switched_off(manager):
    model = tiny_model()
    manager.post_model_load(configured(manager, YAML + "logitless: false\n"), model)
    assert model(**INPUTS).logits is not None


@pytest.mark.parametrize(
    "key, remedy",
    [
        ("logitless_bugdet", "write logitless_budget"),
        ("logitles", "write logitless"),
        ("logitless_chunks", "pick one of these"),
    ],
)
def test_a_misspelt_key(manager, key, remedy):
    keys = re.escape("(logitless, logitless_budget, logitless_fused_layers)")
    expected = f"config: expected a key of the plugin {keys}, got {key}; {remedy}"
    with pytest.raises(ValidationError, match=expected):
        configured(manager, YAML + f"{key}: 5\n")


def test_another_version(manager):
    with another_version():
        manager.post_model_load(configured(manager, YAML), tiny_model())


def test_fused_layers(manager):
    model = tiny_model()
    manager.post_model_load(configured(manager, YAML + "logitless_fused_layers: true\n"), model)
    fused = [type(m) for m in model.modules() if any("exchange_key" in vars(c) for c in type(m).__mro__)]
    assert len(fused) > 3


def test_trainers_of_rl_keep_their_loss(manager):
    model = tiny_model()
    with pytest.warns(UserWarning, match="^rl: expected unset if logitless is enabled, because its trainers"):
        manager.post_model_load(configured(manager, YAML + "rl: dpo\n"), model)
    assert model(**INPUTS).logits is not None


@pytest.mark.parametrize("key", INCOMPATIBLE_KEYS)
def test_what_excludes_it(manager, key):
    with pytest.raises(
        ValidationError, match=f"{key}: expected unset if logitless is enabled, got True; leave {key}"
    ):
        configured(manager, YAML + f"{key}: true\n")
    configured(manager, YAML + f"{key}: true\nlogitless: false\n")


def test_layers_of_liger(manager):
    for key in LIGER_LAYER_KEYS:
        configured(manager, YAML + f"{key}: true\n")
        with pytest.raises(
            ValidationError, match=f"{key}: expected unset if logitless_fused_layers is enabled"
        ):
            configured(manager, YAML + f"{key}: true\nlogitless_fused_layers: true\n")


def test_context_parallelism_is_refused(manager):
    configured(manager, YAML + "context_parallel_size: 1\n")
    with pytest.raises(
        ValidationError, match="context_parallel_size: expected 1 if logitless is enabled, got 2"
    ):
        configured(manager, YAML + "context_parallel_size: 2\n")


def test_a_model_without_an_lm_head(manager):
    cfg = configured(manager, YAML)
    with pytest.raises(ValueError, match="model: expected a causal language model with an LM head"):
        manager.post_model_load(cfg, tiny_model().base_model)


def test_names_and_parameters():
    assert issubclass(LogitlessPlugin, BasePlugin) and issubclass(LogitlessArgs, BaseModel)
    check_parameters("axolotl.integrations.base:BasePlugin.post_model_load", "self cfg model")
    check_parameters("axolotl.integrations.base:BasePlugin.get_input_args", "self")
    schema = "".join(x.read_text() for x in (FOLDER / "utils" / "schemas").glob("*.py"))
    args = "".join(x.read_text() for x in (FOLDER / "integrations").glob("*/args.py"))
    for key in (*INCOMPATIBLE_KEYS, *LIGER_LAYER_KEYS, "context_parallel_size", "sequence_parallel_degree"):
        assert key in schema + args, f"{key} moved: expected it among the keys of axolotl"


def activation(gate, up):
    return torch.nn.functional.silu(gate) * up


def activation_backward(d_out, gate, up):
    with torch.enable_grad():
        gate, up = (x.detach().requires_grad_() for x in (gate, up))
        out = activation(gate, up)
    return out.detach(), *torch.autograd.grad(out, (gate, up), d_out)


def test_its_lora_kernels_in_the_benchmark(monkeypatch):
    """`python -m benchmarks lora` has them compute all projections, with PEFT's gradients."""
    pytest.importorskip("peft")

    def load():
        apply = lora_peers.load_axolotl()
        # Its Triton kernels need a GPU.
        kernels = activation, activation_backward
        monkeypatch.setattr("axolotl.kernels.lora._activation_kernels", lambda kind: kernels)

        def apply_alone(model):
            apply(model)
            for module in model.modules():
                if hasattr(module, "lora_A"):
                    module.forward = None  # PEFT's own, which nothing may call

        return apply_alone

    monkeypatch.setattr(lora, "PEERS", Peers([Peer("axolotl", load)]))
    document = {"seed": 0}
    rows = {name: lora.ROWS[name] for name in (lora.PEFT, "axolotl")}
    settings = lora.Settings(rank=16, seconds=0.0, minutes=60.0, profiled=False)
    what = {"checkpointing": (True, False), "dropouts": (0.0, 0.05), "settings": settings}
    lora.run(document, torch.device("cpu"), steps.QUICK, rows, **what, out=None, say=print)
    assert len(document["sections"]) == 4
    for section in document["sections"]:
        peft, axolotl = section["rows"]
        assert peft["verdict"] == axolotl["verdict"] == "ok", axolotl
        assert 0 < axolotl["loss_difference"] < 1e-2
