"""What the tests of frameworks share. `make test-frameworks` has the wheels; `make test` skips the rest.

Of a framework whose package imports more than its one wheel brings, `hollow` makes the parents of the modules
that a test imports: packages without their `__init__`.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from logitless.integrations import versions

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "frameworks.md").read_text()
# Set by `make test-frameworks`: what is not there fails then.
REQUIRED = "LOGITLESS_TEST_FRAMEWORKS"


def require(package: str) -> Path:
    """The folder of a framework's package; skips the test or the module if it is not installed."""
    actual = PathFinder.find_spec(package)
    if actual is not None:
        return Path(list(actual.submodule_search_locations)[0])
    if REQUIRED in os.environ:
        raise ModuleNotFoundError(f"{package}: expected its wheel in `make test-frameworks`, got none.")
    pytest.skip(f"{package} is not installed; `make test-frameworks` tests it", allow_module_level=True)


def hollow(*packages: str) -> None:
    """Put packages into `sys.modules` without running their `__init__`."""
    for name in packages:
        top, *inner = name.split(".")
        if name not in sys.modules:
            module = sys.modules[name] = ModuleType(name)
            module.__path__ = [str(require(top).joinpath(*inner))]


def at(place: str) -> Any:
    """What a framework has at "module:name" or "module:Class.name"."""
    module, path = place.split(":")
    try:
        actual = import_module(module)
        for name in path.split("."):
            actual = getattr(actual, name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise AssertionError(f"{place} moved: {error}") from error
    return actual


@contextmanager
def another_version() -> Iterator[None]:
    """Expects the warning about a version that was not tested."""
    versions._warn_once.cache_clear()
    with (
        mock.patch.object(versions, "version", lambda package: "99.9.1"),
        pytest.warns(UserWarning, match=r", with which logitless was tested, got 99\.9\.1; "),
    ):
        yield
    versions._warn_once.cache_clear()


def tiny_qwen3(vocab: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """One layer of hidden size 16, with the same weights on every call."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": vocab}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).to(dtype)


def sum_gradients(model: nn.Module) -> None:
    """Has FSDP2 sum gradients and divide them afterwards: gloo has no other reduction."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


def check_parameters(place: str, parameters: str) -> None:
    """Compare the names of a function's parameters; a failure names the function that moved."""
    actual = " ".join(inspect.signature(at(place)).parameters)
    assert actual == parameters, f"{place} moved: expected ({parameters}), got ({actual})"


def check_text(file: Path, text: str) -> None:
    """A line of a framework's source that a module relies on."""
    assert text in file.read_text(), f"{file.name} moved: expected {text!r} in it"
