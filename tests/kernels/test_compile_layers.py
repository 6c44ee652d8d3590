"""The kernels of norm, rope and gated compile offline for every GPU under the oldest and newest Triton."""

import pytest

from tests.kernels.compile_layer_kernels import variants
from tests.kernels.offline import INTERPRETED, TARGETS, TRITONS, an_eighth, check_compilation

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiled in the run without TRITON_INTERPRET")


@pytest.mark.offline
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("version", TRITONS)
def test_compiles(version, target, tmp_path, everything):
    numbers = range(len(variants()))
    numbers = numbers if everything else an_eighth(numbers, version, target)
    check_compilation("tests.kernels.compile_layer_kernels", numbers, version, target, tmp_path)


def test_nothing_depends_on_the_batch():
    """No constant, type or number of warps changes with the rows or tokens, so nothing is compiled again."""
    few, many = ({(v.kernel, v.types, v.constants, v.warps) for v in variants(rows)} for rows in (6, 7001))
    assert few == many
