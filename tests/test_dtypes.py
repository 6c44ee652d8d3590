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


def without_dtype(source: str) -> list[str]:
    """Calls that make a tensor of the default dtype, or may make one; `arange` where it is of floats."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, whose = node.func.attr, node.func.value
        if not isinstance(whose, ast.Name) or whose.id != "torch":
            continue
        of_floats = any(
            isinstance(part, ast.Constant)
            and isinstance(part.value, float)
            or isinstance(part, ast.Name)
            and part.id == "float"
            for argument in node.args
            for part in ast.walk(argument)
        )
        told = {keyword.arg for keyword in node.keywords} & {"dtype", "out", None}  # None: **options
        if not told and (name in FACTORIES or (name == "arange" and of_floats)):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY))
)
def test_every_tensor_is_told_its_dtype(path):
    assert not without_dtype(path.read_text())
