"""How many functions of the library a call passes: what a reader follows, and the host pays for in each step.

Counted are distinct Python functions (code objects) in files under `logitless/` outside `kernels/`, in the
forward pass of a warm, uncompiled cross-entropy call on the CPU. Comprehensions and generator expressions are
part of the function around them, as in Python 3.12, which inlines most of them. Functions that dataclasses
and named tuples generate have no file, and do not count.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import pytest
import torch

import logitless
from logitless import CrossEntropyLoss

LIBRARY = Path(logitless.__file__).parent
INLINED = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
PRODUCTS = {"mm", "addmm"}

MOST, MOST_BEFORE_PRODUCT = 60, 40


class Trace(NamedTuple):
    functions: list[str]  # in the order in which they were first entered
    before_product: int | None  # how many of them came before the first matrix product; None without one


def counted(code: CodeType) -> bool:
    file = Path(code.co_filename)
    inside = file.is_relative_to(LIBRARY) and not file.is_relative_to(LIBRARY / "kernels")
    return inside and code.co_name not in INLINED


def trace(call: Callable[[], object]) -> Trace:
    """The functions that `call()` passes."""
    entered: dict[CodeType, None] = {}
    at_product: list[int] = []

    def note(frame: FrameType, event: str, builtin: object) -> None:
        if event == "call" and counted(frame.f_code):
            entered.setdefault(frame.f_code)
        elif event == "c_call" and builtin.__name__ in PRODUCTS:
            at_product.append(len(entered))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    names = [f"{Path(code.co_filename).relative_to(LIBRARY)}: {code.co_qualname}" for code in entered]
    return Trace(names, at_product[0] if at_product else None)


@pytest.fixture(scope="module")
def warm_call() -> Trace:
    random = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    hidden = torch.randn(64, 32, **random, requires_grad=True)
    weight = torch.randn(517, 32, **random, requires_grad=True)
    targets = torch.randint(517, (64,), **random)
    loss = CrossEntropyLoss()
    loss(hidden, weight, targets)
    return trace(lambda: loss(hidden, weight, targets))


def listed(functions: list[str]) -> str:
    return f"{len(functions)} functions:\n" + "\n".join(functions)


def test_the_trace_sees_the_call_and_its_first_product(warm_call):
    assert any("CrossEntropyLoss.terms" in function for function in warm_call.functions)
    assert warm_call.functions[0].endswith("CrossEntropyLoss.__call__")
    assert 0 < warm_call.before_product < len(warm_call.functions)


def test_a_warm_call_passes_few_functions(warm_call):
    assert len(warm_call.functions) <= MOST, listed(warm_call.functions)


def test_few_functions_come_before_the_first_product(warm_call):
    before = warm_call.functions[: warm_call.before_product]
    assert len(before) <= MOST_BEFORE_PRODUCT, listed(before)


def test_a_call_without_a_product_has_none():
    assert trace(lambda: CrossEntropyLoss(z_loss=0.1)).before_product is None
