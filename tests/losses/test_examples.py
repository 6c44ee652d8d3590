"""The `>>>` examples in the docstrings of public losses and functions."""

import doctest
import inspect

import pytest
import torch

import logitless
from tests.support import uncompiled

PUBLIC = {name: getattr(logitless, name) for name in logitless.losses.__all__}
# Base classes and records: `docs/howto/own-loss.md` has examples of the former.
NOT_CALLED = {"TokenLoss", "LogitsLoss"} | {
    name for name, value in PUBLIC.items() if inspect.isclass(value) and not name.endswith("Loss")
}
CALLED = sorted(PUBLIC.keys() - NOT_CALLED)


@pytest.mark.parametrize("name", CALLED)
def test_the_example(name):
    torch.manual_seed(0)
    names = PUBLIC | {"torch": torch}
    [example] = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs=names)
    assert example.examples
    runner = doctest.DocTestRunner()
    # A tensor of another device prints the device. Compiling the function of a LogitsLoss takes seconds.
    with torch.device("cpu"), uncompiled():
        assert runner.run(example).failed == 0
