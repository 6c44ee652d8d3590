"""The kernels of norm, rope and gated compile offline for every GPU under the oldest and newest Triton."""

import pytest

from tests.kernels.offline import INTERPRETED, TRITONS, by_target, check_compilation, with_each_value
from tests.layers.compile_layer_kernels import variants

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiled in the run without TRITON_INTERPRET")


@pytest.mark.offline
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", TRITONS)
def test_compiles(version, tmp_path, everything):
    every = list(variants())
    # Without --all, every constant and every dtype of each kernel.
    dtypes = [tuple(sorted({dtype for _, dtype in each.types})) for each in every]
    values = [(each.kernel, kinds, each.constants) for each, kinds in zip(every, dtypes, strict=True)]
    chosen = range(len(every)) if everything else with_each_value(values)
    numbers = by_target(chosen, version, everything=everything)
    check_compilation("tests.layers.compile_layer_kernels", numbers, version, tmp_path)


def test_nothing_depends_on_the_batch():
    """No constant, type or number of warps changes with the rows or tokens, so nothing is compiled again."""
    few, many = ({(v.kernel, v.types, v.constants, v.warps) for v in variants(rows)} for rows in (6, 7001))
    assert few == many
