"""What all modules of `logitless.integrations` share."""

import ast
import logging
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from logitless import integrations
from logitless.integrations import FRAMEWORKS, versions
from logitless.integrations.sequences import DivideGradient, GatherSequence
from tests.ranks import in_processes

FOLDER = Path(integrations.__file__).parent
# What a module may import beside torch, this library and Python's own.
OWN = {
    "axolotl": {"axolotl", "pydantic"},
    "llamafactory": {"llamafactory", "transformers"},
    "ms_swift": {"swift", "transformers"},
    "nemo_automodel": {"nemo_automodel"},
    "torchtitan": {"torchtitan"},
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_its_own_framework_alone(path):
    actual = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            actual |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            actual.add(node.module.split(".")[0])
    allowed = {"logitless", "torch", *OWN.get(path.stem, ())}
    assert actual - allowed <= set(sys.stdlib_module_names)


@pytest.fixture
def installed(monkeypatch):
    """Sets the version of every framework; without a version none is installed."""

    def version(actual):
        def of(package):
            if actual is None:
                raise versions.PackageNotFoundError(package)
            return actual

        monkeypatch.setattr(versions, "version", of)

    versions._warn_once.cache_clear()
    yield version
    versions._warn_once.cache_clear()


def test_another_minor_version_warns_once(installed):
    installed("9.9.1")
    with pytest.warns(
        UserWarning, match=r"^verl: expected 0\.9, with which .* got 9\.9\.1; pip install 'verl"
    ):
        versions.import_owner("verl", "torch.nn:Linear.forward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_version("verl")
        for actual in ("0.9.7", None):
            installed(actual)
            versions._warn_once.cache_clear()
            versions.check_version("verl")


def test_a_framework_that_is_not_there(installed):
    installed(None)
    with pytest.raises(ImportError) as caught:
        versions.import_owner("torchtitan", "missing.module:function")
    got = "no installation (No module named 'missing')"
    assert str(caught.value) == f"torchtitan: expected 0.3, got {got}; pip install 'torchtitan==0.3.*'."
    with pytest.raises(ImportError, match="; install it from https://github.com/NVIDIA-NeMo/RL"):
        versions.import_owner("nemo_rl", "missing.module:function")


def test_a_dependency_that_is_not_there(installed, monkeypatch, tmp_path):
    """verl without ray: the version is the tested one, and not the problem."""
    (tmp_path / "framework.py").write_text("import missing.part")
    (tmp_path / "outdated.py").write_text("from math import surprise")
    monkeypatch.syspath_prepend(tmp_path)
    installed("0.9.1")
    expected = "^verl: expected missing, which verl 0.9.1 imports, got no installation; install missing.$"
    with pytest.raises(ImportError, match=expected):
        versions.import_owner("verl", "framework:function")
    expected = r"^verl: expected a complete installation, got 0.9.1 \(cannot import name 'surprise'"
    with pytest.raises(ImportError, match=expected):
        versions.import_owner("verl", "outdated:function")


def test_a_function_that_moved(installed):
    installed("0.9.1")
    assert versions.import_owner("verl", "torch.nn:Linear.forward") == (torch.nn.Linear, "forward")
    for place in ("torch.nn:Linear.surprise", "torch.nn:Surprise.forward", "torch.nn:surprise"):
        expected = rf"^verl: expected a complete installation, got 0\.9\.1 \(nothing at {place}\); pip"
        with pytest.raises(ImportError, match=expected):
            versions.import_owner("verl", place)
        installed("0.10.0")
        with pytest.raises(ImportError, match=rf"^verl: expected 0\.9, got 0\.10\.0 \(nothing at {place}\)"):
            with pytest.warns(UserWarning, match="with which logitless was tested"):
                versions.import_owner("verl", place)
        versions._warn_once.cache_clear()
        installed("0.9.1")


def test_replaced_and_restored():
    owners = [SimpleNamespace(f=1), SimpleNamespace(f=2), SimpleNamespace(f=3)]
    undo = versions.replace_attribute(owners, "f", "ours")
    assert [owner.f for owner in owners] == ["ours"] * 3
    owners[1].f = "another's"
    undo()
    assert [owner.f for owner in owners] == [1, "another's", 3]


def test_one_line_says_what_was_replaced(caplog):
    with caplog.at_level(logging.INFO, "logitless"):
        versions.log_replacement("torchtitan", "ChunkedLossWrapper", 5 * 2**29)
        versions.log_replacement("verl", "FusedLinearForPPO")
    first, second = (record.message for record in caplog.records)
    assert first == "logitless: torchtitan's ChunkedLossWrapper replaced, logits_budget 2.5 GiB"
    assert second == "logitless: verl's FusedLinearForPPO replaced, logits_budget the default"


def test_every_framework_has_a_module_and_tests():
    for name in FRAMEWORKS:
        assert (FOLDER / f"{name}.py").exists() and (Path(__file__).parent / f"test_{name}.py").exists()


def exchanged() -> tuple:
    """Gathered rows, and the gradients of a sum that every rank computes whole from them."""
    group = torch.distributed.group.WORLD
    x = torch.arange(6.0).view(3, 2).add(10 * group.rank()).requires_grad_()
    whole = GatherSequence.apply(x, group)
    (whole * torch.arange(12.0).view(6, 2)).sum().backward()
    y = torch.ones(3, requires_grad=True)
    for given in (group, None):
        (DivideGradient.apply(y, given) * 8).sum().backward()
    return whole.detach(), x.grad, y.grad


@pytest.mark.ranks
def test_sequences_over_ranks():
    actual = in_processes(2, exchanged)
    expected = torch.cat([torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2) + 10])
    for rank, (whole, grad, part) in enumerate(actual):
        assert torch.equal(whole, expected)
        assert torch.equal(grad, torch.arange(12.0).view(6, 2)[3 * rank : 3 * rank + 3])
        assert torch.equal(part, torch.full((3,), 8.0 / 2 + 8))


def test_a_function_is_replaced_where_its_framework_has_imported_it(monkeypatch):
    def stock(): ...

    def ours(): ...

    owner, user, other = (ModuleType(name) for name in ("train", "train.user", "train.other"))
    stranger = ModuleType("strain")
    owner.loss = user.loss = stranger.loss = stock
    other.loss = different = len
    for module in (owner, user, other, stranger):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    undo = versions.replace_function("train", owner, "loss", ours)
    assert owner.loss is user.loss is ours
    assert stranger.loss is stock and other.loss is different
    undo()
    assert owner.loss is user.loss is stock
    assert stranger.loss is stock and other.loss is different
