"""Sampling masks: log-probabilities over kept ids, against full logits with -inf outside the sets."""

import random
from types import SimpleNamespace

import pytest
import torch

from logitless import SamplingMask, linear_logprobs
from logitless.engine.replay import most_gathered
from tests.cases import TRAINABLE, covering_array, dtypes, one_row_warning, operands
from tests.reference import sampling as reference
from tests.support import DEVICE, assert_close, run

HEADS = {
    "plain": {},
    "capped": {"softcap": 3.0, "logit_scale": 0.5, "temperature": 0.7},
}
# Numbers of ids of a set: of them 0 keeps the whole vocabulary, and more than 64 of 300 ids are projected.
SIZES = {
    "certain": (1,),
    "two": (2,),
    "few": (1, 2, 5, 17),
    "none": (0,),
    "many": (70, 90),
    "all kinds": (0, 1, 2, 5, 65, 290),
    "whole": (300, 1),
}
V = 300


def sets_for(targets, sizes, V, seed=0):
    """A list of ids for each token, in any order, with some ids twice; its target is one of them."""
    draw = random.Random(seed)
    kept = []
    for target in targets.reshape(-1).tolist():
        k = draw.choice(sizes)
        ids = draw.sample(range(V), k)
        if k and target >= 0 and target not in ids:
            ids[draw.randrange(k)] = target
        if k > 1:
            ids += ids[:1]
        kept.append(ids)
    return kept


def statistics(hidden, weight, targets, kept, bias=None, **head):
    """What `linear_logprobs` returns, by its definition."""
    z = reference.head_logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias, **head)
    mask = reference.kept(kept, weight.shape[0]).to(z.device)
    actual = reference.statistics(z, mask, targets.reshape(-1))
    return [x.view(targets.shape) for x in actual]


def later(logps, entropy, lse):
    """A loss that is not linear in any of the three."""
    return (logps / 8).exp() * 4 - 0.5 * entropy + 0.05 * lse**2


def logps_only(logps, entropy, lse):
    return 0.1 * logps**2 + logps


FACTORS = {
    "sizes": list(SIZES),
    "head": list(HEADS),
    "loss": [later, logps_only],
    "trainable": [name for name in TRAINABLE if name != "nothing"],
    "ignored": [0.0, 0.4],
    "budget": [None, 10],
    "bias": [False, True],
    "compact": [True, False],
    "entropy": [True, "metric"],
}


def has_effect(case: dict) -> bool:
    # Without a gradient of entropy, `later` would have a term less.
    return not (case.get("entropy") == "metric" and case.get("loss") is later)


@one_row_warning
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", covering_array(FACTORS, has_effect))
def test_statistics_over_kept_ids(case, dtype):
    h, w, targets, b = operands((3, 13), 24, V, dtype, seed=case["seed"], ignored=case["ignored"])
    kept, head = sets_for(targets, SIZES[case["sizes"]], V, case["seed"]), HEADS[case["head"]]
    mask = SamplingMask.from_lists(kept, device=DEVICE)
    engine = {"compact": case["compact"], "entropy": case["entropy"]}
    engine["logits_budget"] = case["budget"] and case["budget"] * V * dtype.itemsize
    upstream = torch.randn(targets.shape, generator=torch.Generator(DEVICE).manual_seed(1))

    def ours(*tensors, **given):
        return case["loss"](*linear_logprobs(*tensors, sampling_mask=mask, **given, **head, **engine))

    def full_logits(hidden, weight, targets, bias=None):
        return case["loss"](*statistics(hidden, weight, targets, kept, bias, **head))

    bias = b if case["bias"] else None
    requires = TRAINABLE[case["trainable"]]
    exact = h.double(), w.double(), targets, None if bias is None else bias.double()
    truth = run(full_logits, *exact, upstream, requires)
    naive = run(full_logits, h, w, targets, bias, upstream, requires)
    actual = run(ours, h, w, targets, bias, upstream, requires)
    certain = case["sizes"] == "certain" and case["loss"] is logps_only
    assert_close(actual.value, truth.value, naive.value, name="value", allow_zero=certain)
    for name in truth.grads:
        names = truth.grads[name], naive.grads[name]
        assert_close(actual.grads[name], *names, name=f"d_{name}", allow_zero=certain)


@dtypes
def test_statistics_themselves(dtype):
    h, w, targets, _ = operands((40,), 24, V, dtype, ignored=0.2)
    kept = sets_for(targets, SIZES["all kinds"], V)
    actual = linear_logprobs(h, w, targets, entropy=True, sampling_mask=SamplingMask.from_lists(kept))
    truth = statistics(h.double(), w.double(), targets, kept)
    naive = statistics(h, w, targets, kept)
    for name, ours, exact, rough in zip(actual._fields, actual, truth, naive):
        assert_close(ours, exact, rough, name=name)
    single = torch.tensor([len(set(ids)) == 1 for ids in kept], device="cpu") & (targets.cpu() >= 0)
    assert single.any() and (actual.logps[single] == 0).all() and (actual.entropy[single] == 0).all()


def test_no_set_is_as_without_a_mask():
    h, w, targets, _ = operands((40,), 24, V, torch.float32, ignored=0.2)
    empty = SamplingMask.from_lists([None] * 40)
    for entropy in (False, "metric", True):
        plain, masked = (
            linear_logprobs(h, w, targets, entropy=entropy, **given)
            for given in ({}, {"sampling_mask": empty})
        )
        for a, b in zip(plain, masked):
            assert a is b is None or torch.equal(a, b)


def test_a_token_does_not_depend_on_its_neighbours():
    """Neither on their sets nor on the budget."""
    h, w, targets, _ = operands((40,), 24, V, torch.float32)
    kept = sets_for(targets, (2, 5), V)
    alone = linear_logprobs(h, w, targets, sampling_mask=SamplingMask.from_lists(kept)).logps
    others = [ids if n % 2 else list(range(n % 3, V)) + [int(targets[n])] for n, ids in enumerate(kept)]
    for budget in (None, 100 * V):
        mask = SamplingMask.from_lists(others)
        beside = linear_logprobs(h, w, targets, sampling_mask=mask, logits_budget=budget).logps
        assert torch.equal(alone[1::2], beside[1::2])


@pytest.mark.parametrize("gap", [12.0, 25.0])
def test_nearly_certain_tokens(gap):
    """log p and the gradient keep their digits where 1 - p is small."""
    h = torch.tensor([[1.0, 0.0]])
    w = torch.tensor([[gap, 1.0], [0.0, 2.0], [-1.0, 0.5], [5.0, 5.0]])
    targets, mask = torch.tensor([0]), SamplingMask.from_lists([[2, 0, 1]])
    actual, exact = w.clone().requires_grad_(), w.double().requires_grad_()
    logps = linear_logprobs(h, actual, targets, sampling_mask=mask).logps
    logps.sum().backward()
    z = h.double() @ exact.t()
    truth = -torch.nn.functional.softplus((z[:, [1, 2]] - z[:, :1]).logsumexp(1), threshold=1e9)
    truth.sum().backward()
    assert_close(logps.detach(), truth.detach(), 1e-6, name="logps")
    assert_close(actual.grad, exact.grad, 2e-6, name="d_weight")


def test_a_set_of_4097_ids_beside_sets_of_two():
    width = 4200
    h, w, targets, _ = operands((9,), 8, width, torch.float32)
    kept = sets_for(targets, (2,), width)
    kept[4] = [*range(4096), int(targets[4])]
    assert len(kept[4]) == 4097 > most_gathered(width)
    kept[7] = []
    hidden, weight = h.clone().requires_grad_(), w.clone().requires_grad_()
    actual = linear_logprobs(
        hidden, weight, targets, entropy=True, sampling_mask=SamplingMask.from_lists(kept)
    )
    later(*actual).sum().backward()
    exact = [x.double().requires_grad_() for x in (h, w)]
    truth = statistics(*exact, targets, kept)
    later(*truth).sum().backward()
    for name, a, b in zip(actual._fields, actual, truth):
        assert_close(a.detach(), b.detach(), 1e-6, name=name)
    assert_close(hidden.grad, exact[0].grad, 1e-6, name="d_hidden")
    assert_close(weight.grad, exact[1].grad, 1e-6, name="d_weight")


# The forms of sets.


def test_all_forms_are_the_same_sets():
    kept = [[5, 2], [], [7], [1, 9, 3], None]
    lists = SamplingMask.from_lists(kept)
    padded = torch.full((5, 4), -1)
    padded[0, 1], padded[0, 3], padded[2, 2] = 5, 2, 7
    padded[3, :3] = torch.tensor([1, 9, 3])
    from_padded = SamplingMask.from_padded(padded)
    longer = SamplingMask(torch.tensor([5, 2, 7, 1, 9, 3, 99], dtype=torch.int32), lists.offsets.int())
    for mask in (lists, from_padded, longer):
        assert mask.offsets.tolist() == [0, 2, 2, 3, 6, 6]
        assert mask.token_ids[:6].tolist() == [5, 2, 7, 1, 9, 3]
        assert len(mask) == 5 and mask.to("cpu").missing == "raise"
    assert "5 tokens" in repr(lists)
    full = SamplingMask.from_padded(torch.arange(6).view(2, 3))
    assert full.token_ids.tolist() == list(range(6)) and full.offsets.tolist() == [0, 3, 6]
    zeros = SamplingMask.from_padded(torch.tensor([[0, 4], [3, 0]]), empty=0)
    assert zeros.token_ids[:2].tolist() == [4, 3] and zeros.offsets.tolist() == [0, 1, 2]


STARTS = {"int": 2, "list": [2, 2], "tensor": torch.tensor([2, 2], device=DEVICE)}


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
def test_completions(starts):
    completions = [([4, 5, 6], [0, 1, 3]), (torch.tensor([9, 8]), torch.tensor([0, 2], dtype=torch.int32))]
    mask = SamplingMask.from_completions(completions, starts, 5, missing="add")
    kept = [[], [], [4], [5, 6], [], [], [], [9, 8], [], []]
    lists = SamplingMask.from_lists(kept)
    assert torch.equal(mask.token_ids, lists.token_ids) and torch.equal(mask.offsets, lists.offsets)
    assert mask.missing == "add"
    of_vllm = SamplingMask.from_completions([[[4], [5, 6]], [[9, 8]]], starts, 5)
    assert torch.equal(of_vllm.token_ids, lists.token_ids) and torch.equal(of_vllm.offsets, lists.offsets)
    some = SamplingMask.from_completions([[None, [5]], None, []], starts if isinstance(starts, int) else 2, 4)
    assert some.token_ids.tolist() == [5] and some.offsets.tolist() == [0] * 4 + [1] * 9
    ragged = SamplingMask.from_completions([completions[0], None], [3, 0], 5)
    assert ragged.offsets.tolist() == [0, 0, 0, 0, 1, 3, 3, 3, 3, 3, 3]
    none = SamplingMask.from_completions([], 0, 5)
    assert len(none) == 0
    with torch.device("meta"):
        there = SamplingMask.from_completions(completions, starts, 5, device="cpu")
        default = SamplingMask.from_completions(completions, starts, 5)
    assert torch.equal(there.token_ids, lists.token_ids.cpu()) and default.offsets.device.type == "meta"


@pytest.mark.parametrize("packed", [False, True])
def test_shift(packed):
    """Set i belongs to labels[i]: it is shifted with them, over the boundaries of sequences too."""
    h, w, labels, _ = operands((24,) if packed else (3, 8), 16, V, torch.float32, ignored=0.2)
    kept = sets_for(labels, (0, 1, 3, 80), V)
    bounds = torch.tensor([0, 5, 6, 24]) if packed else None
    starts = [0, 5, 6] if packed else [0, 8, 16]
    shifted, expected = labels.reshape(-1).roll(-1), [*kept[1:], []]
    for n in [*[x - 1 for x in starts[1:]], 23]:
        shifted[n], expected[n] = -100, []
    given = {"entropy": True, "sampling_mask": SamplingMask.from_lists(kept)}
    actual = linear_logprobs(h, w, labels, shift=True, cu_seqlens=bounds, **given)
    truth = statistics(h.double(), w.double(), shifted.view(labels.shape), expected)
    for name, ours, exact in zip(actual._fields, actual, truth):
        assert_close(ours, exact, 1e-6, name=name)


def test_missing_targets_are_added():
    h, w, targets, _ = operands((12,), 16, V, torch.float32)
    targets[3] = -100
    kept = sets_for(targets, (0, 2, 70), V)
    for n in (0, 1, 2, 3, 7):
        kept[n] = [x for x in kept[n] if x != targets[n]]
    full = [[*ids, int(targets[n])] if ids and n != 3 else ids for n, ids in enumerate(kept)]
    actual = linear_logprobs(h, w, targets, sampling_mask=SamplingMask.from_lists(kept, missing="add"))
    for name, ours, exact in zip(("logps", "lse"), actual[::2], statistics(h, w, targets, full)[::2]):
        assert_close(ours, exact.double(), 1e-6, name=name)


# Errors.


def refused(message, mask, targets=None, error=ValueError, **options):
    h, w, y, _ = operands((6,), 8, V, torch.float32)
    y = y if targets is None else targets
    with pytest.raises(error, match=message):
        linear_logprobs(h, w, y, sampling_mask=mask() if callable(mask) else mask, **options)


def test_refusals():
    _, _, targets, _ = operands((6,), 8, V, torch.float32)
    good = [[int(x)] for x in targets]
    some = [[(int(x) + (n > 2)) % V] for n, x in enumerate(targets)]
    lists = SamplingMask.from_lists
    refused(r"sampling_mask: expected every supervised target in its set, got 3 that are not, the first at "
            r'row 3; pass missing="add"', lists(some))  # fmt: skip
    refused(r"sampling_mask: expected ids in \[0, 300\), got 2 outside: the least is -4, the greatest 300",
            lists([[*good[0], 300, -4], *good[1:]]))  # fmt: skip
    refused("sampling_mask: expected offsets that rise from 0 to at most 6, got others: entry 2 is 1 after 2",
            SamplingMask(torch.tensor(good).view(-1), torch.tensor([0, 2, 1, 3, 4, 5, 6])))  # fmt: skip
    refused("got others: the first is 0, the last 7",
            SamplingMask(torch.tensor(good).view(-1), torch.tensor([0, 1, 2, 3, 4, 5, 7])))  # fmt: skip
    refused("got others: the first is 1, the last 6",
            SamplingMask(torch.tensor(good).view(-1), torch.tensor([1, 1, 2, 3, 4, 5, 6])))  # fmt: skip
    refused("sampling_mask: expected offsets of 6 tokens, one set per target, got 5", lists(good[1:]))
    refused("sampling_mask: expected a SamplingMask, got list", [good], error=TypeError)
    refused(
        "targets: expected one id per token with sampling_mask", lists(good), targets[:, None].repeat(1, 2)
    )
    makes = SamplingMask
    refused("token_ids: expected int32 or int64, got torch.float32; pass padded",
            lambda: makes(torch.ones(3), torch.tensor([0, 3])), error=TypeError)  # fmt: skip
    refused("token_ids: expected int32 or int64, got torch.bool",
            lambda: makes(torch.ones(3, 5).bool(), torch.tensor([0])), error=TypeError)  # fmt: skip
    refused("token_ids: expected a tensor, got list", lambda: makes([1], torch.tensor([0])), error=TypeError)
    refused(r"token_ids: expected shape \(S,\)", lambda: makes(targets[None], torch.tensor([0])))
    refused(r"offsets: expected shape \(N \+ 1,\)", lambda: makes(targets, torch.empty(0, dtype=torch.long)))
    refused("missing: expected one of 'raise', 'add'", lambda: lists(good, missing="skip"))
    completions = SamplingMask.from_completions
    refused("masks: expected completions inside 4 positions, got 2 tokens from position 3",
            lambda: completions([([1, 2], [0, 1, 2])], 3, 4))  # fmt: skip
    refused("masks: expected offsets that rise from 0 to at most 2, got others in row 0",
            lambda: completions([([1, 2], [0, 1, 3])], 0, 4))  # fmt: skip
    refused("masks: expected a list with one list of ids per token, .* got SimpleNamespace in row 0",
            lambda: completions([SimpleNamespace(token_ids=[[1]])], 0, 4), error=TypeError)  # fmt: skip
    for pair in ([torch.tensor([1]), torch.tensor([0, 1])], [4, 5, 6], (1, 2, 3)):
        refused("masks: expected a list with one list of ids per token, a tuple",
                lambda pair=pair: completions([pair], 0, 4), error=TypeError)  # fmt: skip
    refused("masks: expected lists of integer token ids, got floats",
            lambda: completions([[[1.0]]], 0, 4), error=TypeError)  # fmt: skip
    refused("starts: expected 1 positions", lambda: completions([([1], [0, 1])], [1, 2], 4))


def test_sets_of_tokens_that_are_not_supervised_are_not_looked_at():
    h, w, targets, _ = operands((6,), 8, V, torch.float32)
    targets[2:4] = -100
    kept = [[int(x)] if x >= 0 else [10**6, -5] for x in targets]
    for compact in (True, False):
        actual = linear_logprobs(h, w, targets, sampling_mask=SamplingMask.from_lists(kept), compact=compact)
        assert (actual.logps == 0).all()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device-side assertion ends the process's use of the GPU")
def test_without_a_sync_faults_are_asserted():
    h, w, targets, _ = operands((6,), 8, V, torch.float32)
    mask = SamplingMask.from_lists([[(int(x) + 1) % V] for x in targets])
    with pytest.raises(RuntimeError, match="every supervised target in its set"):
        linear_logprobs(h, w, targets, sampling_mask=mask, compact=False)


@pytest.mark.parametrize("count", [0, 5])
def test_no_supervised_token(count):
    h, w = torch.randn(count, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    targets, mask = torch.full((count,), -100), SamplingMask.from_lists([[1, 2]] * count)
    out = linear_logprobs(h, w, targets, entropy=True, sampling_mask=mask)
    assert all((x == 0).all() for x in out)
    sum(x.sum() for x in out).backward()
    assert (h.grad == 0).all() and (w.grad == 0).all()


def test_constructors_of_other_forms():
    empty = SamplingMask.from_padded(torch.full((2, 3, 0), -1, dtype=torch.int64))
    assert len(empty) == 6 and not empty.offsets.any()
    masks = [([1, 2], [0, 1, 2]), None]
    expected = SamplingMask.from_completions(masks, starts=2, length=5)
    for starts in (torch.tensor(2), torch.tensor([2, 0]), (2, 4)):
        actual = SamplingMask.from_completions(masks, starts=starts, length=5)
        assert torch.equal(actual.offsets, expected.offsets) and torch.equal(
            actual.token_ids, expected.token_ids
        )
    with pytest.raises(TypeError, match="^kept: expected lists of integer token ids, got floats"):
        SamplingMask.from_lists([[1.5, 2]])
