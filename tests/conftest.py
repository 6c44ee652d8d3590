"""One conftest for all tests: `python -m pytest tests` is one run on any machine, with or without a GPU."""

import os
import sys

# No test may reach a hub; transformers reads the variables when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
# The tensors here are tiny, and there is a process for each core: a second thread only waits for the first,
# for long when the machine is busy (a comparison of trainers in test_benchmarks.py: 146 s with two on two
# busy cores, 18 s with one).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On a GPU, graphs take seconds to compile. Tests of graphs make their own setting.
os.environ.setdefault("LOGITLESS_COMPILE", "0")
# Tests replace what a captured pass would not call again. Tests of captured passes make their own setting.
os.environ.setdefault("LOGITLESS_CUDA_GRAPHS", "0")

import functools  # noqa: E402
import gc  # noqa: E402
import logging  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from logitless.engine import early_projection, static_rows  # noqa: E402
from tests import support  # noqa: E402
from tests.cases import covering  # noqa: E402

# Folders whose tests make their tensors on `support.DEVICE` without saying so. What a module makes while it
# is imported comes before any fixture and must name its device (test_conftest.py). Tests elsewhere name the
# device of each tensor.
ON_DEVICE = ("losses", "engine", "parallel")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also what takes long: `make test-all` says what that is"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the run was not asked for, as the marks in pyproject.toml say."""
    if config.getoption("--all"):
        return
    on_gpu = support.DEVICE.type == "cuda"
    marks = {"slow"} if on_gpu else {"slow", "repeats"}
    kept = [item for item in items if marks.isdisjoint(mark.name for mark in item.iter_markers())]
    if not on_gpu:
        of_test = defaultdict(list)
        for item in kept:
            if item.get_closest_marker("each_value"):
                of_test[item.nodeid.partition("[")[0]].append(item)
        for cases in of_test.values():
            # A parameter's value is a part of the id, and its place there.
            chosen = covering([set(enumerate(case.callspec.id.split("-"))) for case in cases])
            for case in {*cases} - {cases[number] for number in chosen}:
                case.add_marker("repeats")
        kept = [item for item in kept if not item.get_closest_marker("repeats")]
    asked_for = {*kept}
    config.hook.pytest_deselected(items=[item for item in items if item not in asked_for])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Without garbage collections, which take a quarter of the time: what is imported and listed stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    spare_the_collector()


# With the default threshold, garbage collections take a tenth to a fifth of the time of tests that compile or
# train.
gc.set_threshold(100_000)


def spare_the_collector() -> None:
    """Freeze all objects, nearly half a million, so that later garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def spared() -> None:
    """Freeze the objects of earlier modules too, turn off accelerate's garbage collection, which runs several
    times in each training run, and search for each of its optional packages once."""
    spare_the_collector()
    if imports := sys.modules.get("accelerate.utils.imports"):
        imports._is_package_available = functools.cache(imports._is_package_available)
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=lambda: 0)


@pytest.fixture(autouse=True, scope="module")
def reached_from_the_root() -> None:
    """Let torch's loggers pass records on to the root's handlers. For each test, pytest adds a handler to all
    that do not, which takes a tenth of the time of the small tests."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def nothing_learned() -> None:
    """Forget earlier tests: on a GPU the calls of a loss decide whether its next one waits for the counts."""
    early_projection._STREAKS.clear()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A page's block, run as pasted, sets the library's log level: later tests of the process see theirs."""
    logger = logging.getLogger("logitless")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """The default device of one test module: the GPU for the folders of ON_DEVICE, where there is one."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    # What ranks compute is compared with what this process does on the CPU.
    in_ranks = request.node.get_closest_marker("ranks") is not None
    if folder not in ON_DEVICE or support.DEVICE.type == "cpu" or in_ranks:
        yield
        return
    before = torch.get_default_device()
    torch.set_default_device(support.DEVICE)
    yield
    torch.set_default_device(before)


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether this run was asked for all variants of what is tested, not for a share of them."""
    return request.config.getoption("--all")


@pytest.fixture(scope="session")
def with_repeats(request: pytest.FixtureRequest) -> bool:
    """Whether this run has the cases that are marked `repeats`."""
    return request.config.getoption("--all") or support.DEVICE.type == "cuda"


@pytest.fixture
def counted_rows(monkeypatch) -> None:
    """Small calls project their supervised rows alone, on a GPU too."""
    monkeypatch.setattr(static_rows, "SIZE", 0)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Nothing is compiled while the test runs; see `support.uncompiled`."""
    with support.uncompiled():
        yield
