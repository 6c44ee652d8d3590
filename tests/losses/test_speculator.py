"""The losses of drafts against plain PyTorch on full logits in fp64, pair by pair."""

import math
from dataclasses import replace

import pytest
import torch

from logitless import SpeculatorLoss, check, estimate
from tests.cases import covering_array
from tests.support import DEVICE, AllocationWatcher, GemmCounter, relative_error

H, HV = 12, 10
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_acceptance", "lk_hybrid")
pytestmark = pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")


class World:
    """Tensors of a call, and what a reference needs to know of them."""

    def __init__(
        self, *, steps=3, draft=40, vocab=64, packed=False, blocks=False, seed=0, dtype=torch.float64
    ):
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.lengths = [9, 1, 7, 4] if packed else [7, 7, 7]
        self.steps, self.draft, self.vocab = steps, draft, vocab
        total = sum(self.lengths)
        tokens = (total,) if packed else (3, 7)
        self.starts = None
        rows = tokens
        if blocks:
            rows = (12,) if packed else (3, 6)
            limit = total if packed else 7
            picks = [
                torch.randperm(limit, generator=self.generator, device="cpu")[: rows[-1]]
                for _ in range(math.prod(rows[:-1]))
            ]
            self.starts = torch.stack(picks).view(rows).to(DEVICE)
            self.starts[..., 1] = -1
        self.hiddens = [self.normal(*rows, H, dtype=dtype).requires_grad_() for _ in range(steps)]
        self.weight = (self.normal(draft, H, dtype=dtype) / 2).requires_grad_()
        self.bias = self.normal(draft, dtype=dtype).requires_grad_()
        self.teacher_hidden = self.normal(*tokens, HV, dtype=dtype)
        self.teacher_weight = self.normal(vocab, HV, dtype=dtype) / 2
        self.teacher_bias = self.normal(vocab, dtype=dtype)
        self.draft_ids = torch.randperm(vocab, generator=self.generator, device="cpu")[:draft].to(DEVICE)
        self.targets = torch.randint(vocab, tokens, generator=self.generator, device="cpu").to(DEVICE)
        self.targets.view(-1)[::8] = -100
        self.mask = (torch.rand(tokens, generator=self.generator, device="cpu") < 0.8).to(DEVICE)
        bounds = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], device=DEVICE)
        self.packing = {"cu_seqlens": bounds} if packed else {}

    def normal(self, *shape, dtype=torch.float64):
        options = {"dtype": torch.float64, "device": "cpu"}
        return torch.randn(shape, generator=self.generator, **options).to(DEVICE, dtype)

    def trained(self):
        return [*self.hiddens, self.weight, self.bias]


def pairs_of(w: World, k: int, offset: int, masks) -> list[tuple[int, int, int]]:
    """(row of the draft, row of the verifier, predicted token), flat, that count in step k; by hand."""
    actual, ends, total = [], [], 0
    for length in w.lengths:
        total += length
        ends += [total] * length
    if w.starts is None:
        positions = list(range(total))
    else:
        T = w.teacher_hidden.shape[-2]
        by_row = w.starts.reshape(-1, w.starts.shape[-1]).tolist()
        positions = [None if s < 0 else b * T + s for b, row in enumerate(by_row) for s in row]
    for row, position in enumerate(positions):
        if position is None:
            continue
        token = position + offset + k + 1
        if token < ends[position] and all(mask.view(-1)[token] for mask in masks):
            actual.append((row, token - 1, token))
    return actual


def definition(
    w: World, loss: SpeculatorLoss, *, labelled=False, masked=False, ids=True, num_items=None, exact=True
):
    """(loss, values (S, rows), metrics) with autograd on full logits; `exact`: the products are in fp64."""

    def product(x, weight):
        return x.double() @ weight.double().T if exact else (x @ weight.T).double()

    draft_ids = w.draft_ids if ids else torch.arange(w.vocab, device=DEVICE)
    hiddens, head = loss.logit_transform, loss.teacher_transform
    full = product(w.teacher_hidden.reshape(-1, HV), w.teacher_weight)
    full = head.logits(full, w.teacher_bias.double())[0]
    if loss.teacher_softmax == "draft":
        full, seen = full[:, draft_ids], torch.arange(len(draft_ids), device=DEVICE)
    else:
        seen = draft_ids
    column = torch.full((w.vocab,), -1, device=DEVICE).scatter(
        0, draft_ids, torch.arange(len(draft_ids), device=DEVICE)
    )
    masks = ([w.targets != -100] if labelled else []) + ([w.mask] if masked else [])
    coefficients = loss.coefficients or [loss.decay**k for k in range(w.steps)]
    total, values, metrics, table = 0.0, [], {}, []
    for k, hidden in enumerate(w.hiddens):
        rows = hidden.reshape(-1, H)
        step, a, h, counted = (rows.new_zeros(len(rows), dtype=torch.float64) for _ in range(4))
        if not coefficients[k]:
            values.append(step)
            table.append((a, h, counted))
            continue
        for row, at, token in pairs_of(w, k, loss.offset, masks):
            z = hiddens.logits(product(rows[None, row], w.weight), w.bias.double())[0][0]
            q, p, p_full = z.softmax(-1), full[at, seen].softmax(-1), full[at].softmax(-1)[seen]
            alpha = torch.minimum(q, p_full).sum()
            m = loss.beta * p + (1 - loss.beta) * q
            kl = (p * (p / q).log()).sum()
            lam = torch.exp(-loss.lk_eta * alpha).detach()
            soft = {
                "forward_kl": kl,
                "reverse_kl": (q * (q / p).log()).sum(),
                "jsd": loss.beta * (p * (p / m).log()).sum() + (1 - loss.beta) * (q * (q / m).log()).sum(),
                "total_variation": 1 - alpha,
                "neg_log_acceptance": -alpha.log(),
                "lk_hybrid": lam * kl + (1 - lam) * (1 - alpha),
            }[loss.divergence]
            best = full[at].argmax()
            best = column[best] if loss.teacher_softmax == "full" else best
            label = column[w.targets.view(-1)[token]] if labelled else best
            hard = -(z * loss.temperature).log_softmax(-1)[label] if label >= 0 else 0.0 * z.sum()
            value = loss.hard_loss_weight * hard + (1 - loss.hard_loss_weight) * soft
            if loss.drop_outside and best < 0:
                value = 0.0 * z.sum()
            step = step + torch.nn.functional.one_hot(torch.tensor(row, device=DEVICE), len(rows)) * value
            a[row], h[row], counted[row] = alpha.detach(), float(z.argmax() == best), 1.0
        values.append(step * coefficients[k])
        count = max(1.0, counted.sum().item())
        metrics[f"step_{k}/loss"] = step.sum().detach() / count
        metrics[f"step_{k}/acceptance"] = a.sum() / count
        metrics[f"step_{k}/agreement"] = h.sum() / count
        table.append((a, h, counted))
        divisor = count if num_items is None else num_items
        total = total + coefficients[k] * step.sum() / (divisor if loss.reduction == "mean" else 1)
    chains = [i for i in range(len(rows)) if any(counted[i] for _, _, counted in table)]
    greedy, sampled = [], []
    for i in chains:
        greedy.append(1 + sum(math.prod(h[i].item() for _, h, _ in table[: k + 1]) for k in range(w.steps)))
        sampled.append(1 + sum(math.prod(a[i].item() for a, _, _ in table[: k + 1]) for k in range(w.steps)))
    metrics["accepted_length"] = sum(greedy) / max(1, len(greedy)) if greedy else 1.0
    metrics["expected_length"] = sum(sampled) / max(1, len(sampled)) if sampled else 1.0
    for k, (_, h, counted) in enumerate(table):
        if coefficients[k]:
            so_far = [i for i in range(len(h)) if counted[i] and all(x[1][i] for x in table[:k])]
            metrics[f"step_{k}/conditional_agreement"] = sum(h[i].item() for i in so_far) / max(
                1, len(so_far)
            )
    return total, torch.stack(values).view(w.steps, *w.hiddens[0].shape[:-1]), metrics


FACTORS = {
    "divergence": list(DIVERGENCES),
    "steps": [1, 2, 3, 4, 5],
    "rows": ["sequences", "packed", "blocks", "packed blocks"],
    "ids": ["full", "draft", "same"],
    "drop": [False, True],
    "hard": [0.0, 0.4, 1.0],
    "labels": [False, True],
    "masked": [False, True],
    "offset": [0, 1, 2],
    "head": ["plain", "transformed"],
    "reduction": ["mean", "sum", "none", "num_items"],
    "chunk": ["one", "small", "row"],
    "zero": [False, True],
}
BUDGETS = {"one": None, "small": 30_000, "row": 1}


def fits(case: dict) -> bool:
    if case.get("drop") and case.get("ids") != "full":
        return False
    return not case.get("zero") or case.get("steps", 2) > 1


def loss_of(case: dict, **options) -> SpeculatorLoss:
    head = {}
    if case["head"] == "transformed":
        head = {"softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3}
        head |= {"teacher_softcap": 7.0, "teacher_logit_scale": 1.2}
    coefficients = None
    if case["zero"]:
        coefficients = tuple(0.0 if k == 1 else 0.9**k for k in range(case["steps"]))
    return SpeculatorLoss(
        divergence=case["divergence"],
        beta=0.3,
        lk_eta=2.0,
        hard_loss_weight=case["hard"],
        coefficients=coefficients,
        offset=case["offset"],
        teacher_softmax="draft" if case["ids"] == "draft" else "full",
        drop_outside=case["drop"],
        reduction={"num_items": "mean"}.get(case["reduction"], case["reduction"]),
        logits_budget=BUDGETS[case["chunk"]],
        **head,
        **options,
    )


def compared(w: World, loss: SpeculatorLoss, case: dict, **given) -> None:
    """Value, every gradient and every metric against the definition."""
    ids = case["ids"] != "same"
    num_items = 17 if case["reduction"] == "num_items" else None
    given |= {"draft_ids": w.draft_ids} if ids else {}
    given |= {"mask": w.mask} if case["masked"] else {}
    out = loss(
        w.hiddens,
        w.weight,
        w.targets if case["labels"] else None,
        bias=w.bias,
        teacher_hidden=w.teacher_hidden,
        teacher_weight=w.teacher_weight,
        teacher_bias=w.teacher_bias,
        num_items=num_items,
        starts=w.starts,
        **w.packing,
        **given,
    )
    options = {"labelled": case["labels"], "masked": case["masked"], "ids": ids, "num_items": num_items}
    truth, values, metrics = definition(w, loss, **options)
    ours, upstream = out.loss, None
    if loss.reduction == "none":
        assert relative_error(out.loss.detach(), values.detach()) < 1e-11
        truth, upstream = values, w.normal(*values.shape)
    else:
        assert relative_error(ours.detach(), truth.detach()) < 1e-11
    used = [x for x in w.trained() if x is not None]
    expected = torch.autograd.grad(truth, used, upstream, allow_unused=True)
    actual = torch.autograd.grad(ours, used, upstream, allow_unused=True)
    for x, a, b in zip(used, actual, expected, strict=True):
        if b is None or not b.any():
            assert a is None or not a.any()
        else:
            assert relative_error(a, b) < 1e-9, tuple(x.shape)
    assert set(out.metrics) == set(metrics)
    for name, x in metrics.items():
        assert abs(out.metrics[name].item() - float(x)) < 1e-9, name
        assert not out.metrics[name].requires_grad


@pytest.mark.parametrize("case", covering_array(FACTORS, fits))
def test_against_full_logits(case):
    w = World(
        steps=case["steps"],
        draft=64 if case["ids"] == "same" else 40,
        packed="packed" in case["rows"],
        blocks="blocks" in case["rows"],
        seed=case["seed"],
    )
    compared(w, loss_of(case), case)


def call_of(w: World, **given):
    given |= {"teacher_hidden": w.teacher_hidden, "teacher_weight": w.teacher_weight}
    return {"draft_ids": w.draft_ids, "bias": w.bias} | given


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_draft_that_is_the_verifier(divergence):
    """No loss, no gradient, every token accepted; one tied tensor gets the draft's gradient alone."""
    generator = torch.Generator("cpu").manual_seed(0)
    hidden = torch.randn(2, 9, H, generator=generator, device="cpu").to(DEVICE)
    weight = torch.randn(50, H, generator=generator, device="cpu").to(DEVICE).requires_grad_()
    # Row i of step k is the verifier's row i + 1 + k.
    hiddens = [hidden.roll(-1 - k, 1).clone().requires_grad_() for k in range(3)]
    loss = SpeculatorLoss(divergence=divergence)
    out = loss(hiddens, weight, teacher_hidden=hidden, teacher_weight=weight)
    out.loss.backward()
    if DEVICE.type == "cpu":
        assert out.loss.item() == 0 and not weight.grad.any() and not any(x.grad.any() for x in hiddens)
    else:
        # Products of different numbers of rows are rounded differently.
        assert abs(out.loss.item()) < 1e-6
    assert out.metrics["step_2/acceptance"].item() == pytest.approx(1)
    assert out.metrics["step_1/conditional_agreement"] == 1
    # Chains of 9 tokens with 3 steps ahead: 3 for the first 5, then 2 and 1; the last 2 rows have none.
    assert out.metrics["accepted_length"].item() == pytest.approx(1 + (3 * 5 + 2 + 1) / 7)
    other = torch.randn(2, 9, H, generator=generator, device="cpu").to(DEVICE)
    (tied,) = torch.autograd.grad(
        loss([other], weight, teacher_hidden=hidden, teacher_weight=weight).loss, weight
    )
    frozen = weight.detach()
    (alone,) = torch.autograd.grad(
        loss([other], weight, teacher_hidden=hidden, teacher_weight=frozen).loss, weight
    )
    assert torch.equal(tied, alone)


def test_a_frozen_head_and_head_modules():
    w = World(dtype=torch.float32)
    head, verifier = torch.nn.Linear(H, w.draft), torch.nn.Linear(HV, w.vocab)
    given = {"teacher_hidden": w.teacher_hidden, "draft_ids": w.draft_ids}
    by_module = SpeculatorLoss()(w.hiddens, head, teacher_weight=verifier, **given).loss
    given |= {"teacher_weight": verifier.weight, "teacher_bias": verifier.bias}
    by_tensor = SpeculatorLoss()(w.hiddens, head.weight.detach(), bias=head.bias.detach(), **given).loss
    assert torch.equal(by_module, by_tensor)
    expected = torch.autograd.grad(by_tensor, w.hiddens)
    by_module.backward()
    assert all(torch.equal(x.grad, gradient) for x, gradient in zip(w.hiddens, expected, strict=True))
    assert head.weight.grad.any() and head.bias.grad.any() and verifier.weight.grad is None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_masked_is_nothing_with_a_graph(reduction):
    w = World(dtype=torch.float32)
    loss = SpeculatorLoss(reduction=reduction, drop_outside=True)
    out = loss(w.hiddens, w.weight, **call_of(w, mask=torch.zeros_like(w.mask)))
    for upstream in (1.0, math.inf, math.nan):
        gradients = torch.autograd.grad(out.loss.sum() * upstream, w.trained()[:-1], retain_graph=True)
        assert not out.loss.any() and not any(x.any() for x in gradients)
    assert out.metrics["accepted_length"] == 1 and out.metrics["step_0/acceptance"] == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("packed", [None, "sequences", "no sequence"])
def test_rows_and_tokens_may_be_missing(rows, tokens, packed, reduction):
    """No pair is left: the loss is 0."""
    if packed == "no sequence" and tokens:
        pytest.skip("the tokens belong to a sequence")
    shape = () if packed else (1,)
    hidden = torch.randn(*shape, rows, H, requires_grad=True)
    weight = torch.randn(7, H, requires_grad=True)
    teacher = {"teacher_hidden": torch.randn(*shape, tokens, HV), "teacher_weight": torch.randn(7, HV)}
    teacher["starts"] = torch.full((*shape, rows), -1)
    if packed:
        teacher["cu_seqlens"] = torch.tensor([0] if packed == "no sequence" else [0, 0, tokens])
    out = SpeculatorLoss(reduction=reduction)([hidden, hidden], weight, **teacher)
    assert out.loss.shape == ((2, *shape, rows) if reduction == "none" else ())
    out.loss.sum().backward()
    assert not out.loss.any() and not hidden.grad.any() and not weight.grad.any()


def test_a_verifier_of_one_id_that_is_the_ignored_one():
    hidden, teacher = torch.randn(1, 6, H), torch.randn(1, 6, HV)
    given = {"teacher_hidden": teacher, "teacher_weight": torch.randn(1, HV)}
    out = SpeculatorLoss(ignore_index=0)([hidden], torch.randn(1, H), **given)
    assert out.loss.abs() < 1e-6 and out.metrics["step_0/acceptance"] == 1 and out.plan.rows == 4


def test_expected_length_as_a_loss():
    """reduction="none" carries gradients into what the caller makes of the acceptance rates."""
    w = World(steps=3)
    loss = SpeculatorLoss(divergence="total_variation", reduction="none", coefficients=(1.0, 1.0, 1.0))
    given = call_of(w, teacher_bias=w.teacher_bias)
    rates = 1 - loss(w.hiddens, w.weight, **given).loss
    _, values, _ = definition(w, loss)
    value, truth = (-x[:, :, :4].cumprod(0).sum() for x in (rates, 1 - values))
    bias_free = [*w.hiddens, w.weight]
    for a, b in zip(
        torch.autograd.grad(value, bias_free), torch.autograd.grad(truth, bias_free), strict=True
    ):
        assert relative_error(a, b) < 1e-9


def test_the_expected_length_of_pairs_that_count():
    """The recipe of docs/howto/speculators.md is the metric."""
    w = World(steps=3)
    loss = SpeculatorLoss(divergence="total_variation", reduction="none", decay=1.0)
    out = loss(w.hiddens, w.weight, **call_of(w, teacher_bias=w.teacher_bias))
    counted = out.loss != 0
    lengths = ((1 - out.loss) * counted).cumprod(0).sum(0)
    mean = 1 + lengths.sum() / counted.any(0).sum()
    torch.testing.assert_close(mean, out.metrics["expected_length"], check_dtype=False)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bf16_is_within_the_naive_error(divergence):
    """Twice the error of the same computation on full logits in bf16, in several chunks."""
    w = World(seed=7, draft=400, vocab=600, dtype=torch.bfloat16)
    w.teacher_bias.zero_()
    loss = SpeculatorLoss(divergence=divergence, logits_budget=90_000)
    ours = loss(w.hiddens, w.weight, **call_of(w)).loss
    truth, naive = (definition(w, loss, exact=exact)[0] for exact in (True, False))
    error, allowed = (relative_error(x.detach(), truth.detach()) for x in (ours, naive))
    assert error < 2 * allowed + 1e-3
    exact = [x.detach().double().requires_grad_() for x in w.trained()]
    ours, naive = (torch.autograd.grad(x, w.trained()) for x in (ours, naive))
    *w.hiddens, w.weight, w.bias = exact
    truth = torch.autograd.grad(definition(w, loss)[0], exact)
    for a, b, c in zip(ours, naive, truth, strict=True):
        assert relative_error(a, c) < 2 * relative_error(b, c) + 8 * torch.finfo(torch.bfloat16).eps


PRODUCTS = {
    # Options, whether the head is trained, products of the draft's head per pair, passes of the verifier.
    "trained": ({}, True, 3, 1),
    "frozen": ({}, False, 2, 1),
    "draft ids of the verifier": ({"teacher_softmax": "draft"}, True, 3, 1),
    "unreduced": ({"reduction": "none"}, True, 4, 2),
}


@pytest.mark.parametrize("what", PRODUCTS)
@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("budget", [None, 60_000])
def test_products(what, steps, budget):
    """3 S + 1 products, 2 S + 1 with a frozen head; masked tokens are not projected."""
    options, trained, per_pair, passes = PRODUCTS[what]
    w = World(steps=steps, dtype=torch.float32)
    w.weight.requires_grad_(trained)
    given = call_of(w, bias=None, mask=w.mask)
    pairs = [pairs_of(w, k, 1, [w.mask]) for k in range(steps)]
    count, rows = sum(map(len, pairs)), len({at for actual in pairs for _, at, _ in actual})
    width = w.draft if options.get("teacher_softmax") == "draft" else w.vocab
    draft, verifier = count * w.draft * H, rows * width * HV
    with GemmCounter(1, 1, 1) as counter:
        out = SpeculatorLoss(logits_budget=budget, **options)(w.hiddens, w.weight, **given)
        out.loss.sum().backward()
    # A row of the verifier whose pairs are in two chunks is projected twice.
    twice = counter.gemms - per_pair * draft - passes * verifier
    assert 0 <= twice <= passes * (out.plan.chunks - 1) * width * HV
    if budget is None:
        assert out.plan.chunks == 1
    else:
        # On a GPU the same budget holds more rows.
        assert out.plan.chunks > 2 or steps == 1 or DEVICE.type == "cuda"
    with torch.no_grad(), GemmCounter(1, 1, 1) as counter:
        SpeculatorLoss(**options)(w.hiddens, w.weight, **given)
    assert counter.gemms == draft + verifier


@pytest.mark.each_value
@pytest.mark.parametrize("divergence", ["lk_hybrid", "jsd"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("teacher_softmax", ["full", "draft"])
def test_memory_is_the_budget(divergence, steps, teacher_softmax):
    """The largest tensor is below the budget, and no memory grows with tokens times ids."""
    B, T, size, draft, vocab, budget = 2, 60, 16, 3000, 5000, 2**20
    hiddens = [torch.randn(B, T, size, requires_grad=True) for _ in range(steps)]
    weight, verifier = torch.randn(draft, size, requires_grad=True), torch.randn(vocab, size)
    given = {"teacher_hidden": torch.randn(B, T, size), "teacher_weight": verifier}
    given |= {"draft_ids": torch.arange(draft) + 1000, "mask": torch.ones(B, T, dtype=torch.bool)}
    loss = SpeculatorLoss(
        divergence=divergence, teacher_softmax=teacher_softmax, logits_budget=budget, hard_loss_weight=0.1
    )
    with AllocationWatcher() as watch:
        loss(hiddens, weight, **given).loss.backward()
    logits = 4 * B * T * draft
    assert logits > 1.3 * budget  # one of the steps + 1 tensors of others
    assert watch.largest <= max(budget, 4 * draft * size)
    # Beyond the budget: the stacked steps, their gradient, stacked and not, d_weight, the verifier's rows.
    states, heads = 4 * steps * B * T * size, 4 * draft * size
    limit = budget * 1.05 + 6 * states + 3 * heads + 64 * 4 * steps * B * T
    assert watch.peak <= limit, (watch.peak, limit)


THIRD = torch.tensor([3], device=DEVICE)
# An argument, what is wrong with it, and what is said.
FAULTS = {
    "id outside": ("draft_ids", lambda x: x.index_fill(0, THIRD, 64), r"ids in \[0, 64\), got 1 outside"),
    "id twice": ("draft_ids", lambda x: x.index_copy(0, THIRD, x[:1]), "different ids, got 1 repeated"),
    "no ids": ("draft_ids", lambda x: None, "the verifier's id of each of the 40 rows"),
    "shape of ids": ("draft_ids", lambda x: x[:-1], "integers of shape"),
    "dtype of ids": ("draft_ids", lambda x: x.float(), "integers of shape"),
    "target outside": (
        "targets",
        lambda x: x.index_fill(1, THIRD, 64),
        r"ids in \[0, 64\) or ignore_index, got others in 6 pairs",
    ),
    "shape of targets": ("targets", lambda x: x[:, :-1], "shape"),
    "mask of twos": ("mask", lambda x: x.long() * 2, "booleans, or numbers that are 0 or 1"),
    "additive mask": ("mask", lambda x: x.float().log(), r"booleans, .* got \d+ others; pass mask == 0 if"),
    "shape of mask": ("mask", lambda x: x[:, :-1], "shape"),
    "start outside": ("starts", lambda x: x.index_fill(1, THIRD, 7), "positions in their sequence"),
    "start below": ("starts", lambda x: x.index_fill(1, THIRD, -2), "positions in their sequence"),
    "start twice": ("starts", lambda x: x.index_copy(1, THIRD, x[:, :1]), "each position at most once"),
    "shape of starts": ("starts", lambda x: x[:, :-1], "integers of shape"),
    "falling boundaries": ("cu_seqlens", lambda x: x.flip(0), "non-decreasing boundaries"),
    "positions of the verifier": ("teacher_hidden", lambda x: x[:, :-1], "shape"),
    "no steps": ("hiddens", lambda x: [], "at least one step"),
    "steps of two shapes": ("hiddens", lambda x: [x[0], x[1][:, :-1]], "tensors of one shape"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults(what):
    name, change, expected = FAULTS[what]
    w = World(dtype=torch.float32, blocks=name == "starts", packed=name == "cu_seqlens")
    given = call_of(w, hiddens=w.hiddens, targets=w.targets, mask=w.mask, starts=w.starts, **w.packing)
    given[name] = change(given[name])
    hiddens, targets = given.pop("hiddens"), given.pop("targets")
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
        SpeculatorLoss()(hiddens, w.weight, targets, **given)


BAD_OPTIONS = {
    "divergence": ({"divergence": "kl"}, "divergence: expected one of"),
    "teacher_softmax": ({"teacher_softmax": "all"}, "teacher_softmax: expected one of"),
    "beta": ({"beta": 1.5}, r"beta: expected a number in \[0, 1\]"),
    "hard": ({"hard_loss_weight": -0.1}, "hard_loss_weight: expected a number"),
    "eta": ({"lk_eta": -1.0}, "lk_eta: expected at least 0"),
    "offset": ({"offset": -1}, "offset: expected at least 0"),
    "decay": ({"decay": 0.0}, "decay: expected a number above 0"),
    "coefficients": ({"coefficients": (0.0, 0.0)}, "coefficients: expected one that is not 0"),
    "drop": ({"drop_outside": True, "teacher_softmax": "draft"}, "drop_outside: expected False"),
    "compact": ({"compact": False}, "compact: expected True"),
}


@pytest.mark.parametrize("what", BAD_OPTIONS)
def test_bad_options(what):
    options, text = BAD_OPTIONS[what]
    with pytest.raises(ValueError, match=text):
        SpeculatorLoss(**options)


def test_bad_calls():
    w = World(dtype=torch.float32)
    with pytest.raises(ValueError, match="coefficients: expected 3 numbers, one per step, got 2"):
        SpeculatorLoss(coefficients=(1.0, 0.5))(w.hiddens, w.weight, **call_of(w))
    with pytest.raises(TypeError, match="hiddens: expected a list or tuple of tensors, got Tensor"):
        SpeculatorLoss()(w.hiddens[0], w.weight, **call_of(w))
    with pytest.raises(TypeError, match="shift; targets are unshifted labels already"):
        SpeculatorLoss()(w.hiddens, w.weight, shift=True, **call_of(w))
    with pytest.raises(TypeError, match="d2t; pass draft_ids=d2t"):
        SpeculatorLoss()(w.hiddens, w.weight, d2t=w.draft_ids, **call_of(w))
    with pytest.raises(TypeError, match="teacher_hidden: expected the verifier's hidden states"):
        SpeculatorLoss()(w.hiddens, w.weight)


def test_compiled_and_accumulated(everything):
    w, loss = World(dtype=torch.float32), SpeculatorLoss(divergence="lk_hybrid", drop_outside=True)
    given = call_of(w, mask=w.mask)

    def value(loss):
        out = loss(w.hiddens, w.weight, w.targets, **given)
        return out.loss.square().sum(), *out.metrics.values()

    graph = torch.compile(value, backend="aot_eager", fullgraph=True)
    for each in (loss, replace(loss, reduction="none"))[: 2 if everything else 1]:
        numbers, compiled_numbers = value(each), graph(each)
        torch.testing.assert_close(numbers, compiled_numbers)
        plain, compiled = (torch.autograd.grad(x[0], w.trained()) for x in (numbers, compiled_numbers))
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(plain, compiled, strict=True))
    plain = torch.autograd.grad(loss(w.hiddens, w.weight, w.targets, **given).loss, w.trained())
    main = torch.zeros_like(w.weight)
    loss(w.hiddens, w.weight, w.targets, accumulate_into=main, **given).loss.backward()
    assert torch.allclose(main, plain[-2], atol=1e-6) and w.weight.grad is None


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_check(divergence):
    w = World(dtype=torch.float32)
    loss = SpeculatorLoss(divergence=divergence, hard_loss_weight=0.2, drop_outside=True)
    assert check(loss, w.hiddens, w.weight, w.targets, **call_of(w, teacher_bias=w.teacher_bias))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_estimate_is_the_plan(reduction):
    w = World(dtype=torch.float32)
    loss = SpeculatorLoss(reduction=reduction, logits_budget=100_000)
    out = loss(w.hiddens, w.weight, **call_of(w, bias=None))
    sizes = {"tokens": 21, "hidden_size": H, "vocab_size": 40}
    sizes |= {"teacher_vocab_size": 64, "teacher_hidden_size": HV}
    actual = estimate(loss, sequences=3, steps=3, dtype=torch.float32, device=DEVICE.type, **sizes)
    assert actual.plan == out.plan and actual.products == (3 if reduction == "mean" else 4)
    # 3 sequences of 7: rows 1 to 5 of the verifier, for 5 + 4 + 3 pairs.
    passes = 1 if reduction == "mean" else 2
    assert actual.other_products == pytest.approx(passes * 5 / 12)
    with pytest.raises(ValueError, match="steps: expected the number of steps"):
        estimate(loss, **sizes)
