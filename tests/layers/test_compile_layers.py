"""What the kernels of the fused layers are compiled for; tests/kernels/test_compile.py compiles them."""

import pytest

from tests.kernels.offline import INTERPRETED
from tests.layers.compile_layer_kernels import variants

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiled in the run without TRITON_INTERPRET")


def test_nothing_depends_on_the_batch():
    """No constant, type or number of warps changes with the rows or tokens, so nothing is compiled again."""
    few, many = ({(v.kernel, v.types, v.constants, v.warps) for v in variants(rows)} for rows in (6, 7001))
    assert few == many
