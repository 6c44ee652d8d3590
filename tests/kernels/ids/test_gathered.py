"""Products with k rows of the head per token, and the gradient of those rows."""

import pytest
import torch

from logitless.kernels.ids import gathered
from tests.cases import DTYPES
from tests.kernels.support import DEVICE, INTERPRETED, Random, poisoned, strided
from tests.support import assert_close


def operands(n, k, V, H, dtype, seed=0):
    random = Random(seed)
    ids = random.integers(V, n, k)
    ids[0] = -1
    ids[1, 0] = -1
    ids[2:, -1] = 3  # an id that nearly all tokens have
    g = torch.where(ids >= 0, random.normal(n, k), float("nan"))
    return random.normal(n, H).to(dtype), random.normal(V, H).to(dtype), ids, g


CASES = [
    ((5, 1, 7, 3), torch.bfloat16),
    *(((9, 20, 40, 300), dtype) for dtype in DTYPES.values()),
    ((36, 17, 4, 5), torch.float32),  # ids of several pieces
]


def slots(n, k, V, dtype=torch.float32, seed=0):
    """Ids that repeat, log-probabilities, and some empty slots, with ids of other slots or of nobody."""
    random = Random(seed)
    ids, values = random.integers(V, n, k), -random.uniform(n, k).to(dtype)
    empty, nobody = random.uniform(n, k) < 0.7, random.uniform(n, k) < 0.55
    return ids.masked_fill(empty & nobody, 10**9), values.masked_fill(empty, -torch.inf)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 4), (5, 64, 40), (4, 150, 90)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_an_id_counts_in_its_first_slot(shape, dtype):
    ids, values = slots(*shape, dtype)
    n, k, V = shape
    kept_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for start, width in ((0, V), (V // 3, V // 2)):
        rows, kept = gathered.first_slots(strided(ids), strided(values), start, width, kept_dtype)
        assert rows.dtype == torch.int32 and kept.dtype == kept_dtype
        expected_rows, expected = torch.full((n, k), -1), torch.full((n, k), -torch.inf, dtype=kept_dtype)
        for token in range(n):
            seen = set()
            for slot, (x, value) in enumerate(zip(ids[token].tolist(), values[token].tolist())):
                if value != -torch.inf and x not in seen:
                    seen.add(x)
                    expected[token, slot] = value
                    expected_rows[token, slot] = x - start if start <= x < start + width else -1
        assert torch.equal(rows.long().cpu(), expected_rows) and torch.equal(kept.cpu(), expected)


def test_wrong_slots_are_marked():
    ids, values = slots(9, 70, 30)
    right = ids.clone(), values.clone()
    empty = int((values[1] == -torch.inf).nonzero()[0])
    assert not gathered.wrong_slots(*right, 30).any()
    ids[0, 0] = ids[2, 69] = ids[3, 5] = 0
    values[0, 0], values[2, 69], values[3, 5] = 1e-4, 0.5, float("nan")
    ids[1, empty] = -7  # which nobody looks at
    ids[4, 69], values[4, 69] = 30, -1.0
    ids[5, 0], values[5, 0] = -1, -1.0
    ids[6, 66], values[6, 66] = 29, -1.0
    outside, above = gathered.wrong_slots(strided(ids), strided(values), 30)
    assert outside.nonzero()[:, 0].tolist() == [4, 5] and above.nonzero()[:, 0].tolist() == [2, 3]


@pytest.mark.parametrize("shape, dtype", CASES, ids=str)
def test_against_the_definition(shape, dtype):
    hidden, weight, ids, g = operands(*shape, dtype)
    filled = ids >= 0
    rows = weight.double()[ids.clamp(min=0)]
    z = torch.where(filled, torch.einsum("nh,nkh->nk", hidden.double(), rows), 0.0)
    actual = gathered.gathered_logits(hidden, weight, ids, poisoned(*ids.shape, dtype=torch.float32))
    assert_close(actual, z, 1e-6, name="logits")
    exact_g = torch.where(filled, g, 0.0).double()
    d_hidden = torch.einsum("nk,nkh->nh", exact_g, rows)
    assert_close(gathered.weighted_rows(weight, ids, g), d_hidden, 1e-6, name="d_hidden")
    out = gathered.weighted_rows(weight, ids, g, poisoned(*hidden.shape, dtype=dtype))
    # The interpreter cuts fp32 off to bf16 where hardware rounds.
    error = torch.finfo(dtype).eps * (2 if INTERPRETED else 1)
    assert_close(out, d_hidden, error, name="d_hidden, narrow")
    base, factor = Random(5).normal(*hidden.shape).to(dtype), Random(6).normal(len(ids))
    out = gathered.weighted_rows(weight, ids, g, torch.empty_like(out), base=base, factor=strided(factor))
    both = d_hidden + factor.double()[:, None] * base.double()
    assert_close(out, both, error, name="d_hidden and a base")
    products = exact_g[:, :, None] * hidden.double()[:, None]
    d_weight = torch.zeros(weight.shape, dtype=torch.float64, device=DEVICE)
    d_weight.index_add_(0, ids.clamp(min=0).reshape(-1), products.flatten(0, 1))
    for total_dtype in (torch.float32, dtype):
        total = poisoned(*weight.shape, dtype=total_dtype)
        gathered.add_rows(total, ids, g, hidden, first=True)
        error = 1e-6 if total_dtype == torch.float32 else torch.finfo(dtype).eps * 2
        assert_close(total, d_weight, error, name="d_weight")
    gathered.add_rows(total := total.float(), ids, g, hidden, first=False)
    assert_close(total, 2 * d_weight, torch.finfo(dtype).eps * 2, name="twice")


def test_one_id_for_all_tokens_and_runs_of_every_length():
    hidden, _, ids, g = operands(150, 3, 6, 5, torch.float32)
    ids[:, 1] = 4  # whole pieces, and a part of one at either end
    ids[:, 0] = torch.arange(150, device=DEVICE) // 28 - 1
    g = torch.where(ids >= 0, Random(1).normal(150, 3), float("nan"))
    total, again = (poisoned(6, 5, dtype=torch.float32) for _ in range(2))
    for x in (total, again):
        gathered.add_rows(x, ids, g, hidden, first=True)
    assert torch.equal(total, again)
    truth = torch.zeros(6, 5, dtype=torch.float64, device=DEVICE)
    for n, j in (ids >= 0).nonzero().tolist():
        truth[ids[n, j]] += g[n, j].double() * hidden[n].double()
    assert_close(total, truth, 1e-6, name="d_weight")


LAYOUTS = {
    # Hidden states and head are parts of wider matrices, and so is d_weight.
    "wide": lambda x: torch.cat((x, x), 1)[:, 8:],
    # As of a transposed head.
    "columns": lambda x: x.t().contiguous().t(),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout):
    hidden, weight, ids, g = operands(9, 4, 20, 8, torch.float32)

    def results(hidden, weight, ids, g, total):
        logits = gathered.gathered_logits(hidden, weight, ids, torch.empty(9, 4, device=DEVICE))
        gathered.add_rows(total, ids, g, hidden, first=True)
        return {"logits": logits, "d_hidden": gathered.weighted_rows(weight, ids, g), "d_weight": total}

    total = torch.empty(20, 8, device=DEVICE)
    expected = results(hidden, weight, ids, g, total.clone())
    actual = results(layout(hidden), layout(weight), strided(ids), strided(g), layout(total))
    # Other alignments are summed in another order on a GPU.
    for name, x in actual.items():
        assert_close(x, expected[name].double(), 1e-6, name=name)
    logits = gathered.gathered_logits(hidden, weight, ids.to(torch.int32), torch.empty(9, 4, device=DEVICE))
    assert_close(logits, expected["logits"].double(), 1e-6, name="logits of int32 ids")


def test_without_rows():
    ids, g = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE), torch.zeros(0, 3, device=DEVICE)
    hidden, weight = torch.ones(0, 4, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    total = poisoned(5, 4, dtype=torch.float32)
    gathered.add_rows(total, ids, g, hidden, first=True)
    assert not total.any() and gathered.weighted_rows(weight, ids, g).shape == (0, 4)
