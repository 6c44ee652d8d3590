"""No tensor takes its dtype from `torch.set_default_dtype`, which Fabric's "bf16-true" changes.

tests/losses/test_default_dtype.py runs every loss under others.
"""

import ast
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "logitless"
FACTORIES = (
    *("empty", "zeros", "ones", "linspace", "logspace", "randn", "rand", "eye", "normal", "empty_strided"),
    *("full", "tensor", "as_tensor", "scalar_tensor"),
)


def is_of_floats(arguments: list[ast.expr]) -> bool:
    for part in (part for argument in arguments for part in ast.walk(argument)):
        match part:
            case ast.Constant(value=float()) | ast.Name(id="float"):
                return True
    return False


def without_dtype(source: str) -> list[str]:
    """Calls that make a tensor of the default dtype, or may make one; `arange` where it is of floats."""
    actual = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                told = {keyword.arg for keyword in node.keywords} & {"dtype", "out", None}  # None: **options
                if not told and (name in FACTORIES or name == "arange" and is_of_floats(node.args)):
                    actual.append(f"line {node.lineno}: {ast.unparse(node)}")
    return actual


@pytest.mark.parametrize(
    "path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY))
)
def test_every_tensor_is_told_its_dtype(path):
    assert not without_dtype(path.read_text())
