"""The losses of drafts against plain PyTorch on full logits in fp64, pair by pair."""

import math

import pytest
import torch

from logitless import SpeculatorLoss
from tests.cases import covering_array
from tests.support import DEVICE, relative_error

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
            rows = (6,) if packed else (3, 4)
            limit = total if packed else 7
            picks = [
                torch.randperm(limit, generator=self.generator)[: rows[-1]]
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
        self.draft_ids = torch.randperm(vocab, generator=self.generator)[:draft].to(DEVICE)
        self.targets = torch.randint(vocab, tokens, generator=self.generator).to(DEVICE)
        self.targets.view(-1)[::8] = -100
        self.mask = (torch.rand(tokens, generator=self.generator) < 0.8).to(DEVICE)
        bounds = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], device=DEVICE)
        self.packing = {"cu_seqlens": bounds} if packed else {}

    def normal(self, *shape, dtype=torch.float64):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(DEVICE, dtype)

    def trained(self):
        return [*self.hiddens, self.weight, self.bias]


def pairs_of(w: World, k: int, offset: int, masks) -> list[tuple[int, int, int]]:
    """(row of the draft, row of the verifier, predicted token), flat, that count in step k; by hand."""
    found, ends, total = [], [], 0
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
            found.append((row, token - 1, token))
    return found


def definition(w: World, loss: SpeculatorLoss, *, labelled=False, masked=False, ids=True, num_items=None):
    """(loss, values (S, rows), metrics) with autograd on full logits."""
    draft_ids = w.draft_ids if ids else torch.arange(w.vocab, device=DEVICE)
    hiddens, head = loss.head, loss.teacher_head
    full = head.logits(
        w.teacher_hidden.double().reshape(-1, HV) @ w.teacher_weight.double().T, w.teacher_bias.double()
    )[0]
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
            x = rows[row].double() @ w.weight.double().T
            z = hiddens.logits(x[None], w.bias.double())[0][0]
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
    "rows": ["sequences", "packed"],
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
    theirs = torch.autograd.grad(truth, used, upstream, allow_unused=True)
    found = torch.autograd.grad(ours, used, upstream, allow_unused=True)
    for x, a, b in zip(used, found, theirs, strict=True):
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
        packed=case["rows"] == "packed",
        seed=case["seed"],
    )
    compared(w, loss_of(case), case)
