"""Versions of TRL and transformers: those that are taken, and the messages for others."""

import re

import pytest

from logitless.trl_integration import versions
from logitless.trl_integration.pairs import ADAPTERS


def installed(monkeypatch, **actual):
    def version(package):
        if package not in actual:
            raise versions.PackageNotFoundError(package)
        return actual[package]

    monkeypatch.setattr(versions, "version", version)


@pytest.mark.parametrize("trl", ["1.15.0", "1.16.0", "1.16.3"])
@pytest.mark.parametrize("transformers", ["5.17.0", "5.23.0"])
def test_supported(monkeypatch, trl, transformers):
    installed(monkeypatch, trl=trl, transformers=transformers)
    versions.require_supported()


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (
            {"trl": "1.14.1", "transformers": "5.23.0"},
            "trl: expected >=1.15,<1.17, got 1.14.1; pip install 'trl>=1.15,<1.17'.",
        ),
        ({"trl": "1.17.0", "transformers": "5.23.0"}, "trl: expected >=1.15,<1.17, got 1.17.0"),
        ({"trl": "1.16.0", "transformers": "4.57.1"}, "transformers: expected >=5.17,<6, got 4.57.1"),
        (
            {"transformers": "5.23.0"},
            "trl: expected >=1.15,<1.17, got no installation; pip install 'trl>=1.15,<1.17'.",
        ),
    ],
    ids=["old_trl", "new_trl", "old_transformers", "no_trl"],
)
def test_unsupported(monkeypatch, actual, message):
    installed(monkeypatch, **actual)
    with pytest.raises(ImportError, match=re.escape(message)):
        versions.require_supported()


@pytest.mark.parametrize("name", ["AsyncGRPO", "AsyncDistillation"])
def test_trainers_of_the_newest_minor(monkeypatch, name):
    trainer = type(f"{name}Trainer", (), {})()
    first, *_ = ADAPTERS[name].checks
    installed(monkeypatch, trl="1.16.0")
    first(trainer)
    installed(monkeypatch, trl="1.15.0")
    expected = "expected trl >=1.16,<1.17, got trl 1.15.0; pip install 'trl>=1.16,<1.17'."
    with pytest.raises(ImportError, match=re.escape(f"{name}Trainer: {expected}")):
        first(trainer)
