"""A model's layers on several GPUs: operators run where their operands are, not on the current GPU."""

import functools

import pytest
import torch

from logitless.layers.clamped_gate import clamped_gated
from logitless.layers.gated import gated
from logitless.layers.gated_norm import gated_rms_norm
from logitless.layers.norm import add_layer_norm, add_rms_norm
from logitless.layers.rope import qk_norm_rope, rope
from tests.layers.layer_support import outcome, randn

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TABLES = [randn(1, 5, 16, seed=8), randn(1, 5, 16, seed=9)]


def rotated(function):
    return lambda q, k: function(q, k, *(table.to(q.device) for table in TABLES))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (add_rms_norm, {"x": (6, 40), "residual": (6, 40), "weight": (40,)}),
        (add_layer_norm, {"x": (6, 40), "residual": (6, 40), "weight": (40,)}),
        (gated, {"a": (6, 40), "b": (6, 40)}),
        (functools.partial(clamped_gated, limit=1.0), {"x": (6, 40)}),
        (gated_rms_norm, {"x": (6, 40), "gate": (6, 40), "weight": (40,)}),
        (rotated(rope), {"q": (2, 3, 5, 16), "k": (2, 1, 5, 16)}),
        (rotated(qk_norm_rope), {"q": (2, 3, 5, 16), "k": (2, 1, 5, 16)}),
    ],
    ids=[
        "add_rms_norm",
        "add_layer_norm",
        "gated",
        "clamped_gated",
        "gated_rms_norm",
        "rope",
        "qk_norm_rope",
    ],
)
def test_runs_where_its_operands_are(function, shapes):
    given = {name: randn(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    expected = outcome(function, given)

    def elsewhere(**leaves):
        results = function(**{name: x.to("cuda:1") for name, x in leaves.items()})
        results = results if isinstance(results, tuple) else (results,)
        assert all(y.device == torch.device("cuda:1") for y in results)
        return tuple(y.to("cuda:0") for y in results)

    for name, x in outcome(elsewhere, given).items():
        torch.testing.assert_close(x, expected[name])
