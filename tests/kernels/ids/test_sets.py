"""Kept ids, ragged: slots, statistics and gradients, against full logits with -inf outside the sets."""

import math

import pytest
import torch

from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import LogitTransform
from logitless.kernels.ids import distinct, sets
from tests.cases import dtypes
from tests.kernels.support import DEVICE, INTERPRETED, Random, poisoned, strided
from tests.support import assert_close

V, H = 90, 37
# Ids of each row: none, one, more than a turn of a kernel takes, nearly all.
SIZES = (2, 0, 1, 70, 5, 0, 88, 2)


def drawn(sizes, V, seed=0, *, duplicates=True):
    """(ids (S,), starts, lengths, targets, sets): the target of a row is in its set; some ids come twice."""
    generator = torch.Generator("cpu").manual_seed(seed)
    kept, targets = [], []
    for k in sizes:
        ids = torch.randperm(V, generator=generator)[: max(k, 1)].tolist()
        targets.append(ids[-1])
        kept.append(ids if k else [])
    flat, lengths = [], []
    for ids in kept:
        twice = [*ids, *ids[:3]] if duplicates else ids
        flat += twice
        lengths.append(len(twice))
    lengths = torch.tensor(lengths, device=DEVICE)
    flat = torch.tensor(flat, dtype=torch.int32, device=DEVICE)
    return flat, lengths.cumsum(0) - lengths, lengths, torch.tensor(targets, device=DEVICE), kept


def distinct_ids(flat, starts, lengths, targets, V, *, add_targets=False, most_gathered=64, certain=True):
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    options = {"add_targets": add_targets, "most_gathered": most_gathered, "certain": certain}
    return distinct.distinct_ids(flat, starts, lengths, offsets, targets, -100, V, **options)


def slots_for(sizes=SIZES, V=V, seed=0, size=None):
    flat, starts, lengths, targets, kept = drawn(sizes, V, seed)
    actual = distinct_ids(flat, starts, lengths, targets, V)
    total = sum(map(len, kept)) if size is None else size
    return distinct.slots_of(actual, None, len(sizes), total, V), targets, kept


def mask_of(kept, V):
    mask = torch.zeros(len(kept), V, dtype=torch.bool, device=DEVICE)
    for n, ids in enumerate(kept):
        mask[n, ids] = True
    return mask


HEADS = {"plain": LogitTransform(), "capped": LogitTransform(softcap=3.0, logit_scale=0.5, temperature=0.7)}


def statistics(z, slots, value=math.nan):
    """The statistics of each row; `value` in rows without ids."""
    names = ("logps", "lse", "lse_residual", "entropy", "is_top1")
    out = TokenBuffers(**{name: z.new_full(slots.own.shape, value) for name in names})
    sets.set_statistics(z, slots, out)
    return out


def operands(slots, dtype, seed=1):
    random = Random(seed)
    n = slots.own.shape[0]
    return random.normal(n, H).to(dtype), random.normal(V, H).to(dtype), random.normal(V)


@dtypes
def test_products(dtype):
    slots, _, _ = slots_for(size=200)
    hidden, weight, _ = operands(slots, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    actual = sets.slot_products(hidden, weight, slots, wide)
    ids, rows = slots.ids.long(), slots.rows.long().clamp(max=len(SIZES) - 1)
    truth = (hidden.double()[rows] * weight.double()[ids.clamp(min=0)]).sum(1).masked_fill(ids < 0, 0.0)
    assert_close(actual, truth, torch.finfo(wide).eps, name="products")
    shard = slots._replace(ids=torch.where(slots.ids % 3 == 0, slots.ids, -1))
    part = sets.slot_products(hidden, weight, shard, wide)
    assert torch.equal(part, torch.where(shard.ids >= 0, actual, 0.0))


@dtypes
@pytest.mark.parametrize("transform", HEADS)
@pytest.mark.parametrize("biased", [False, True])
def test_statistics_and_gradients_of_a_chunk(dtype, transform, biased):
    transform, (slots, targets, kept) = HEADS[transform], slots_for()
    n, wide = len(SIZES), torch.promote_types(dtype, torch.float32)
    random = Random(2)
    logits, bias = random.normal(n, V).to(dtype) * 3, random.normal(V).to(dtype) if biased else None
    z = torch.zeros(slots.ids.shape[0], dtype=wide, device=DEVICE)
    room = torch.full((n, V + 6), float("nan"), dtype=dtype, device=DEVICE)
    room[:, :V] = logits
    for start, stop in ((0, 3), (3, n)):  # a chunk is part of the rows
        part = slots.of_rows(start, stop)
        sets.picked_logits(room[start:stop, :V], part, z, transform=transform, bias=bias)
    exact = logits.double().requires_grad_()
    logits_of = transform.logits(exact, None if bias is None else bias.double())[0]
    mask = mask_of(kept, V)
    error = torch.finfo(wide).eps * 4
    assert_close(z, logits_of[mask].detach(), error, name="z")
    filled = mask.any(1)
    log_p = logits_of.masked_fill(~mask, -torch.inf)[filled].log_softmax(1)
    in_set = mask[filled]
    logps = log_p.gather(1, targets[filled, None])[:, 0]
    entropy = -(log_p.exp() * log_p.masked_fill(~in_set, 0.0)).sum(1)
    lse = logits_of.masked_fill(~mask, -torch.inf)[filled].logsumexp(1)
    out = statistics(z, slots, 7.0)
    for name, truth in (("logps", logps), ("entropy", entropy), ("lse", lse)):
        assert (getattr(out, name)[~filled] == 7.0).all()
        assert_close(getattr(out, name)[filled], truth.detach(), error, name=name)
    top = log_p.argmax(1) == targets[filled]
    assert torch.equal(out.is_top1[filled].bool(), top)
    residual = (logits_of[filled].gather(1, targets[filled, None])[:, 0] - out.lse[filled]) - logps
    assert (out.lse_residual[filled] - residual).abs().max() < 2e-6 * max(1, lse.abs().max().item())
    grads = TokenBuffers(**{name: strided(random.normal(n).to(wide)) for name in ("logps", "lse", "entropy")})
    loss = sum((getattr(grads, name)[filled] * x).sum() for name, x in (("logps", logps), ("lse", lse)))
    (loss + (grads.entropy[filled] * entropy).sum()).backward()
    flat = sets.set_gradient(z, slots, out, grads, transform)
    assert_close(flat, exact.grad[mask], error, name="gradient")
    dense = torch.zeros(n, V, dtype=dtype, device=DEVICE)
    for start, stop in ((0, 5), (5, n)):
        rows = slice(start, stop)
        sets.scatter_gradient(dense[rows], z, slots.of_rows(start, stop), out[rows], grads[rows], transform)
    # The interpreter cuts fp32 off to bf16 where hardware rounds.
    rounding = torch.finfo(dtype).eps * (2 if INTERPRETED else 1)
    assert_close(dense, exact.grad, max(error, rounding), name="dense gradient")


@pytest.mark.parametrize("gap", [0.0, 12.0, 40.0, 90.0, -90.0])
def test_nearly_certain_tokens_keep_their_digits(gap):
    slots = sets.Slots(
        torch.tensor([1, 4, 6], dtype=torch.int32, device=DEVICE),
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
        torch.tensor([0, 3], device=DEVICE),
        torch.tensor([1], device=DEVICE),
    )
    z = torch.tensor([-1.0, gap, 0.25], device=DEVICE)
    exact = z.double().requires_grad_()
    log_p = exact.log_softmax(0)
    # log p of a nearly certain token in fp64, without 1 - p.
    others = torch.stack([exact[0] - exact[1], exact[2] - exact[1]])
    logp = -torch.nn.functional.softplus(others.logsumexp(0), threshold=1e9)

    def rounding_at(x):
        """The relative error of fp32 at `x`: 1e-6, and more below 2^-126, where digits get lost, and for
        large exponents, which a GPU rounds once more."""
        return max(1e-6, 2.0**-149 / abs(x.item()), abs(gap) * 2.0**-24)

    entropy = -(log_p[0].exp() * log_p[0] + log_p[2].exp() * log_p[2] + logp.exp() * logp)
    out = statistics(z, slots)
    assert_close(out.logps, logp.detach()[None], rounding_at(logp), name="logps")
    assert_close(out.entropy, entropy.detach()[None], rounding_at(entropy), name="entropy")
    (d,) = torch.autograd.grad(logp, exact, retain_graph=True)
    one = TokenBuffers(logps=z.new_ones(1))
    actual = sets.set_gradient(z, slots, out, one, LogitTransform())
    for i in range(3):
        # Below 2^-126 the kernels' exponentials may be 0.
        assert abs(actual[i].item() - d[i].item()) <= 2e-6 * abs(d[i].item()) + 1e-37


def test_of_equal_logits_the_lowest_id_is_the_largest():
    flat = torch.tensor([2, 5, 7, 2, 5, 7], dtype=torch.int32, device=DEVICE)
    targets = torch.tensor([2, 5], device=DEVICE)
    starts, lengths = (torch.tensor(x, device=DEVICE) for x in ([0, 3], [3, 3]))
    actual = distinct_ids(flat, starts, lengths, targets, 9)
    slots = distinct.slots_of(actual, None, 2, 6, 9)
    z = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0], device=DEVICE)
    out = statistics(z, slots)
    assert out.is_top1.tolist() == [1.0, 0.0]


@dtypes
def test_gradients_of_both_matrices(dtype):
    slots, _, _ = slots_for(size=200)
    hidden, weight, _ = operands(slots, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    g = torch.where(slots.ids >= 0, Random(3).normal(200).to(wide), float("nan"))
    exact = torch.where(slots.ids >= 0, g, 0.0).double()
    ids, rows = slots.ids.long().clamp(min=0), slots.rows.long().clamp(max=len(SIZES) - 1)
    d_hidden = torch.zeros(len(SIZES), H, dtype=torch.float64, device=DEVICE)
    d_hidden.index_add_(0, rows, exact[:, None] * weight.double()[ids])
    eps = torch.finfo(dtype).eps * (2 if INTERPRETED else 1)
    for out_dtype in (wide, dtype):
        out = sets.slot_rows(weight, slots, g, poisoned(len(SIZES), H, dtype=out_dtype))
        assert_close(out, d_hidden, 1e-6 if out_dtype == wide else eps, name="d_hidden")
    d_weight = torch.zeros(V, H, dtype=torch.float64, device=DEVICE)
    d_weight.index_add_(0, ids, exact[:, None] * hidden.double()[rows])
    for total_dtype in (wide, dtype):
        total, again = (poisoned(V, H, dtype=total_dtype) for _ in range(2))
        for x in (total, again):
            sets.add_slot_rows(x, slots, g, hidden, first=True)
        assert torch.equal(total, again)
        assert_close(total, d_weight, 1e-6 if total_dtype == wide else 2 * eps, name="d_weight")
    total = total.to(wide)
    sets.add_slot_rows(total, slots, g, hidden, first=False)
    assert_close(total, 2 * d_weight, 2 * eps, name="d_weight twice")


def test_one_id_in_many_sets():
    """Whole pieces of slots of one id, whose sums are made by programs of their own."""
    n = 300
    flat = torch.stack((torch.full((n,), 4), torch.arange(n) % 3), 1).reshape(-1).to(DEVICE)
    lengths = torch.full((n,), 2, device=DEVICE)
    targets = torch.full((n,), 4, device=DEVICE)
    actual = distinct_ids(flat, lengths.cumsum(0) - 2, lengths, targets, 6)
    slots = distinct.slots_of(actual, None, n, 2 * n, 6)
    hidden, g = Random(4).normal(n, 5), Random(5).normal(2 * n)
    total = poisoned(6, 5, dtype=torch.float32)
    sets.add_slot_rows(total, slots, g, hidden, first=True)
    truth = torch.zeros(6, 5, dtype=torch.float64, device=DEVICE)
    truth.index_add_(0, slots.ids.long(), g.double()[:, None] * hidden.double()[slots.rows.long()])
    assert_close(total, truth, 1e-6, name="d_weight")


def test_a_set_of_4097_ids():
    sizes, width = (2, 4097, 1, 0, 2), 4200
    slots, targets, kept = slots_for(sizes, width)
    z = Random(6).normal(slots.ids.shape[0])
    out = statistics(z, slots)
    for n, ids in enumerate(kept):
        part = z[slots.bounds[n] : slots.bounds[n + 1]].double()
        if ids:
            log_p = part.log_softmax(0)
            own = int(slots.own[n] - slots.bounds[n])
            assert abs(out.logps[n] - log_p[own]) < 1e-5
            assert abs(out.entropy[n] + (log_p.exp() * log_p).sum()) < 1e-5
    assert out.logps[2] == 0 and out.entropy[2] == 0
