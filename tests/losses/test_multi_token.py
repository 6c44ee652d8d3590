"""Medusa and multi-token prediction against plain PyTorch: every gradient of every head, block and hidden
state."""

import pytest
import torch
import torch.nn.functional as F

from logitless import MedusaHeads, MedusaLoss, MultiTokenLoss
from tests.cases import covering_array, usually
from tests.support import DEVICE, AllocationWatcher, GemmCounter, relative_error

H, V = 12, 150
ROW = V * 8
SCRATCH = 6 * 8 * 2**10


def problem(packed: bool, *, seed=0, dtype=torch.float64):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    lengths = [9, 2, 14, 1, 7] if packed else [8] * 4
    starts = torch.tensor([0, *lengths]).cumsum(0)
    shape = (sum(lengths),) if packed else (4, 8)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    targets = torch.randint(0, V, shape, generator=generator)
    targets.view(-1)[::7] = -100
    return random, shape, targets, starts, ({"cu_seqlens": starts} if packed else {})


def heads_of(K: int, layers: int, shared: bool, random) -> MedusaHeads:
    heads = MedusaHeads(H, V, K, layers, shared=shared, dtype=torch.float64)
    for parameter in heads.parameters():
        parameter.data = random(*parameter.shape) / 3
    return heads


def plain_targets(targets, offset, starts):
    """Sequence by sequence, by hand."""
    flat = targets.reshape(-1)
    out = torch.full_like(flat, -100)
    for a, b in zip(starts[:-1].tolist(), starts[1:].tolist()):
        for i in range(a, b - offset):
            out[i] = flat[i + offset]
    return out


def plain_loss(terms, targets, starts, num_items=None, **options):
    """Weighted sum of cross-entropies of (coefficient, hidden, weight, bias, offset)."""
    total, losses, hits = 0.0, [], []
    for coefficient, hidden, weight, bias, offset in terms:
        logits = F.linear(hidden.reshape(-1, H), weight, bias)
        labels = plain_targets(targets, offset, starts)
        summed = F.cross_entropy(logits, labels, reduction="sum", **options)
        count = (labels != -100).sum().clamp(min=1)
        losses.append(summed / (count if num_items is None else num_items))
        hits.append(((logits.argmax(-1) == labels) & (labels != -100)).sum() / count)
        total = total + coefficient * losses[-1]
    return total, losses, hits


MEDUSA = {
    "packed": [False, True],
    "layers": [0, 1, 2],
    "shared": [False, True],
    "stage": [1, 2],
    "rows": [1000, 5],
}


def has_parameters(case: dict) -> bool:
    """Whether there is something to train: the first stage trains blocks and projections alone."""
    return not (case.get("stage") == 1 and case.get("layers") == 0 and case.get("shared"))


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("case", covering_array(MEDUSA, has_parameters))
def test_medusa(case):
    packed, layers, shared, stage, rows = (case[name] for name in MEDUSA)
    random, shape, targets, starts, options = problem(packed)
    heads = heads_of(3, layers, shared, random)
    hidden, weight, bias = (
        x.requires_grad_(stage == 2) for x in (random(*shape, H), random(V, H), random(V))
    )
    trained = [x for x in (hidden, weight, bias, *heads.parameters()) if x.requires_grad]
    coefficients = (0.9, 0.5, 0.3) if layers else None
    loss = MedusaLoss(
        coefficients=coefficients,
        base_coefficient=0.0 if stage == 1 else 0.7,
        label_smoothing=0.1,
        logits_budget=SCRATCH + rows * ROW,
    )
    num_items = 23 if layers == 1 else None
    out = loss(hidden, heads, targets, base_weight=weight, base_bias=bias, num_items=num_items, **options)

    terms = [] if stage == 1 else [(0.7, hidden, weight, bias, 1)]
    for k in range(3):
        coefficient = (coefficients or (1.0, 0.8, 0.64))[k]
        projection = weight if shared else heads.projection(k)
        terms.append((coefficient, heads.blocks(k)(hidden), projection, None, k + 2))
    truth, losses, hits = plain_loss(terms, targets, starts, num_items, label_smoothing=0.1)
    assert relative_error(out.loss.detach(), truth.detach()) < 1e-12
    ours = torch.autograd.grad(3.0 * out.loss, trained, retain_graph=True)
    expected = torch.autograd.grad(3.0 * truth, trained)
    for x, a, b in zip(trained, ours, expected, strict=True):
        assert b.norm() > 0 and a.dtype == x.dtype
        assert relative_error(a, b) < 1e-10, tuple(x.shape)
    again = torch.autograd.grad(out.loss, trained)
    assert all(relative_error(3 * a, b) < 1e-12 for a, b in zip(again, ours, strict=True))
    names = ([] if stage == 1 else ["base"]) + [f"head_{k}" for k in range(3)]
    assert set(out.metrics) == {f"{name}/{what}" for name in names for what in ("loss", "accuracy")}
    for name, value, hit in zip(names, losses, hits, strict=True):
        assert relative_error(out.metrics[f"{name}/loss"], value.detach()) < 1e-12
        assert abs(out.metrics[f"{name}/accuracy"] - hit) < 1e-6
        assert not out.metrics[f"{name}/loss"].requires_grad


def test_heads_start_as_the_base_model_and_have_the_reference_layout():
    base = torch.randn(V, H)
    heads = MedusaHeads(H, V, 2, 1).start_from(base)
    hidden = torch.randn(3, H)
    logits = heads(hidden)
    assert logits.shape == (2, 3, V) and torch.allclose(logits[1], hidden @ base.T, atol=1e-5)
    expected = {
        f"medusa_head.{k}.{name}"
        for k in range(2)
        for name in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    assert set(heads.state_dict()) == expected
    MedusaHeads(H, V, 2, 1).load_state_dict(heads.state_dict())
    shared = MedusaHeads(H, V, 2, 1, shared=True)
    assert torch.allclose(shared(hidden, base)[0], hidden @ base.T, atol=1e-5)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("stage", usually([2], [1, 2]))
def test_memory_does_not_grow_with_the_heads(stage):
    """Beyond the gradients: the budget, one d_weight in fp32, the d_hidden of a head and the sum of all."""
    N, hidden_size, vocab, budget = 300, 64, 4000, 2**20
    for K in (1, 2, 5):
        heads = MedusaHeads(hidden_size, vocab, K, dtype=torch.bfloat16).start_from(
            torch.randn(vocab, hidden_size)
        )
        hidden = torch.randn(1, N, hidden_size, dtype=torch.bfloat16).requires_grad_(stage == 2)
        base = torch.randn(vocab, hidden_size, dtype=torch.bfloat16).requires_grad_(stage == 2)
        targets = torch.randint(0, vocab, (1, N))
        loss = MedusaLoss(logits_budget=budget, base_coefficient=float(stage == 2))
        with AllocationWatcher() as watch:
            loss(hidden, heads, targets, base_weight=base).loss.backward()
        gradients = sum(p.grad.nbytes for p in (hidden, base, *heads.parameters()) if p.grad is not None)
        blocks = 3 * 4 * hidden_size**2
        limit = budget * 1.02 + 4 * vocab * hidden_size + 12 * N * hidden_size + blocks + 64 * 4 * N
        assert watch.peak - gradients <= limit, (K, watch.peak - gradients, limit)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("rows", [1000, 5])
@pytest.mark.parametrize("first", [1.0, 0.0], ids=["all depths", "without the first"])
def test_isolated_depths_see_the_head_as_a_constant(packed, rows, first):
    random, shape, targets, starts, options = problem(packed, seed=4)
    hiddens = [random(*shape, H).requires_grad_() for _ in range(3)]
    weight, bias = random(V, H).requires_grad_(), random(V).requires_grad_()
    coefficients = (first, 0.5, 0.2)
    loss = MultiTokenLoss(isolated=True, coefficients=coefficients, logits_budget=SCRATCH + rows * ROW)
    out = loss(hiddens, weight, targets, bias=bias, **options)

    # The labels of a head with offset k are k positions ahead.
    terms = [(first, hiddens[0], weight, bias, 1)]
    terms += [(coefficients[k], hiddens[k], weight.detach(), bias.detach(), k + 1) for k in (1, 2)]
    truth, _, _ = plain_loss(terms, targets, starts)
    trained = [x for x, used in zip((*hiddens, weight, bias), (first, 1, 1, first, first)) if used]
    ours = torch.autograd.grad(out.loss, trained)
    expected = torch.autograd.grad(truth, trained)
    assert relative_error(out.loss.detach(), truth.detach()) < 1e-12
    for x, a, b in zip(trained, ours, expected, strict=True):
        assert b.norm() > 0 and relative_error(a, b) < 1e-10, tuple(x.shape)


@pytest.mark.parametrize("isolated", [False, True])
def test_products_of_isolated_depths(isolated):
    """3 + 2 (S - 1) products in the place of 3 S."""
    random, shape, _, _, _ = problem(False, seed=5, dtype=torch.float32)
    targets = torch.zeros(shape, dtype=torch.int64)
    hiddens, weight = [random(*shape, H).requires_grad_() for _ in range(4)], random(V, H).requires_grad_()
    with GemmCounter(4, V, H) as counter:  # of one position of all sequences
        out = MultiTokenLoss(isolated=isolated)(hiddens, weight, targets)
        out.loss.backward()
    assert out.plan.describe().startswith("the last of 4 heads: fused: ") and out.plan.heads == 4
    first, *others = (7, 6, 5, 4)
    assert counter.gemms == 3 * first + (2 if isolated else 3) * sum(others)


def medusa(rows=V, **options):
    base = torch.zeros(rows, H) if rows else None
    operands = torch.zeros(1, 4, H), MedusaHeads(H, V, 2), torch.zeros(1, 4).long()
    return MedusaLoss(**options)(*operands, base_weight=base)


def multi_token(depths, **options):
    hiddens = [torch.zeros(1, 4, H)] * depths
    return MultiTokenLoss(**options)(hiddens, torch.zeros(V, H), torch.zeros(1, 4).long())


BAD = {
    "zero heads": (lambda: MedusaHeads(H, V, 0), "num_heads: expected at least 1"),
    "layers": (lambda: MedusaHeads(H, V, 1, -1), "num_layers: expected 0 or more"),
    "start": (
        lambda: MedusaHeads(H, V, 1).start_from(torch.zeros(V + 1, H)),
        "weight: expected the base head",
    ),
    "coefficients": (lambda: medusa(coefficients=(1.0,)), "coefficients: expected 2 numbers"),
    "no base": (lambda: medusa(rows=0), "base_weight: expected the base head"),
    "vocabulary": (lambda: medusa(rows=V + 1), f"base_weight: expected {V} rows"),
    "reduction": (lambda: MedusaLoss(reduction="none"), "reduction: expected 'mean' or 'sum'"),
    "log-probabilities": (lambda: MedusaLoss(return_logps=True), "return_logps: expected False"),
    "no hidden states": (lambda: multi_token(0), "hiddens: expected at least one"),
    "depths": (lambda: multi_token(2, coefficients=(1.0,)), "coefficients: expected 2 numbers"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    attempt, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        attempt()


def test_shared_heads_take_the_base_models_head():
    heads, base = MedusaHeads(8, 20, 2, shared=True), torch.nn.Linear(8, 20, bias=False)
    hidden = torch.randn(3, 8)
    assert torch.equal(heads(hidden, base), heads(hidden, base.weight))
    with pytest.raises(ValueError, match="^base_weight: expected a head, because the heads are shared, got"):
        heads(hidden)
