"""`linear_logprobs` of one id or of several per position, and the k best: values, the gradients of any later
loss, ties, bad input."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist

from logitless import DistillationLoss, linear_logprobs, linear_topk
from tests import cases, reference
from tests.cases import TRAINABLE, covering_array, dtypes, one_row_warning, operands
from tests.random.calls import Rounding
from tests.ranks import in_processes, random
from tests.support import DEVICE, AllocationWatcher, GemmCounter, assert_close, relative_error, run

SHAPES = cases.SHAPES | {"5x9": ((5, 9), 8, 131)}
FACTORS = {
    "shape": ["1", "7", "5x9"],
    "k": [1, 2, 64, "V"],
    "outputs": ["all", "logps", "entropy", "lse", "renormalized"],
    "trainable": ["all", "hidden", "head", "all but weight"],
    "empty": [0.0, 0.5],
    "budget": [None, 10],
    "softcap": [None, 5.0],
    "logit_scale": [1.0, 0.5, -0.7],
    "temperature": [1.0, 0.7],
    "bias": [False, True],
    "compact": [True, False],
}
ONE_ID = {"shape": list(cases.SHAPES), "k": [None], "outputs": ["all", "logps", "entropy", "lse"]}


def has_effect(case: dict) -> bool:
    return not (case.get("shape") == "1" and case.get("empty"))


def ids_of(shape, V, k, seed, empty=0.0):
    """Any ids, some of them twice; a share of the slots and the last position (unless it is alone) empty."""
    if k is None:
        return ids_of(shape, V, 1, seed, empty)[..., 0]
    generator = torch.Generator(DEVICE).manual_seed(seed)
    k = V if k == "V" else k
    ids = torch.rand(*shape, max(k, V), generator=generator).argsort(-1)[..., :k] % V
    if k > 2:
        ids[..., 1] = ids[..., 0]
    if empty:
        ids[torch.rand(*shape, k, generator=generator) < empty] = -100
        if len(ids) > 1:
            ids[-1] = -100
    return ids


def combined(which, logps, entropy, lse):
    """A number per position that is linear in none of the outputs that it looks at."""
    logps = logps if logps.dim() > lse.dim() else logps[..., None]
    filled = logps > -torch.inf
    kept = torch.where(filled, logps, 0.0)
    if which == "renormalized":
        # The gradients of a position's log-probabilities sum to 0.
        q = torch.where(filled, logps, -1e4).log_softmax(-1)
        return (q.exp() * q * filled).sum(-1)
    if which == "lse":
        return lse**2 / 8
    if which == "entropy":
        return entropy * entropy.detach().sin()
    value = (kept / 4).sin().sum(-1)
    return value if which == "logps" else value - 0.5 * entropy**2 + 0.05 * lse**2


@one_row_warning
@dtypes
@pytest.mark.parametrize(
    "case", covering_array(FACTORS, lambda case: True) + covering_array(FACTORS | ONE_ID, has_effect)
)
def test_any_loss_of_the_outputs(case, dtype):
    shape, hidden, V = SHAPES[case["shape"]]
    h, w, _, b = operands(shape, hidden, V, dtype, seed=case["seed"])
    ids = ids_of(shape, V, case["k"], case["seed"], case["empty"])
    head = {name: case[name] for name in ("softcap", "logit_scale", "temperature")}
    engine = {
        "compact": case["compact"],
        "logits_budget": case["budget"] and case["budget"] * V * dtype.itemsize,
    }

    def ours(hidden, weight, targets, **kwargs):
        entropy = case["outputs"] in ("all", "entropy")
        out = linear_logprobs(hidden, weight, targets, entropy=entropy, **kwargs, **head, **engine)
        return combined(case["outputs"], *out)

    def full_logits(*tensors, **kwargs):
        logprobs = reference.token_logprobs if case["k"] is None else reference.ids_logprobs
        return combined(case["outputs"], *logprobs(*tensors, **kwargs, **head))

    bias = b if case["bias"] else None
    exact_bias = None if bias is None else bias.double()
    upstream = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(case["seed"]))
    requires = TRAINABLE[case["trainable"]]
    requires = [name for name in requires if name != "bias" or bias is not None] or ["hidden"]
    exact = h.double(), w.double(), ids, exact_bias, upstream, requires
    truth, roundings = run(full_logits, *exact), []
    for seed in range(2):
        with Rounding(torch.finfo(torch.float32).eps, seed):
            roundings.append(run(full_logits, *exact))
    naive = run(full_logits, h, w, ids, bias, upstream, requires)
    actual = run(ours, h, w, ids, bias, upstream, requires)

    def compare(name, of):
        """At least the error of rounding is allowed: the naive one of a few numbers may be small by luck, and
        `log p = z - lse` cancels where p is near 1."""
        expected = of(truth)
        assert of(actual).dtype == of(naive).dtype
        errors = [relative_error(of(x), expected) for x in (naive, *roundings)] if expected.any() else [0.0]
        assert_close(of(actual), expected, max(errors), name=name)

    if not any(grad.any() for grad in truth.grads.values()):
        # One id alone is certain; what is left of its gradient is rounding.
        assert all(grad.abs().max() < 1e-5 for grad in actual.grads.values())
        return
    compare("value", lambda outcome: outcome.value)
    for name in truth.grads:
        compare(f"d_{name}", lambda outcome: outcome.grads[name])


def test_certain_tokens_keep_their_digits():
    # p = 1 - 3e-9 for the first, whose log-probability a difference of fp32 logits and lse would not show.
    logits = torch.tensor([[20.0, 0.0, -1.0, 0.1], [20.0, 20.0, -1.0, 0.1]])
    eye, ids = torch.eye(4), torch.tensor([[0, 3], [1, 2]])
    h = logits.clone().requires_grad_()
    logps, entropy, _ = linear_logprobs(h, eye, ids, entropy="metric")
    truth = logits.double().log_softmax(-1).requires_grad_()
    assert (logps.double() / truth.gather(1, ids) - 1).abs().max() < 1e-6
    assert (entropy.double() / -(truth.exp() * truth).sum(-1) - 1).abs().max() < 1e-6
    logps[0, 0].backward()
    # 1 - p, which rounds to 0 where it is taken as a difference.
    assert h.grad[0, 0].item() == pytest.approx(-torch.expm1(truth[0, 0]).item(), rel=1e-5)


@dtypes
@pytest.mark.parametrize("scale", [1.0, 30.0, -1.5])
def test_nothing_but_the_ids(dtype, scale):
    """All ids of the vocabulary, or all that have a probability: no softmax is left beside them."""
    h, w, _, _ = operands((3,), 8, 40, dtype)
    bias = torch.zeros(40, dtype=dtype)
    bias[6:] = -torch.inf if scale > 0 else torch.inf
    for ids, own in ((torch.arange(40).expand(3, 40), None), (torch.arange(6).expand(3, 6), bias)):
        h, options = h.detach().requires_grad_(), {"bias": own, "logit_scale": scale / 10, "temperature": 0.1}
        logps = linear_logprobs(h, w, ids, **options).logps
        (actual,) = torch.autograd.grad(logps.float().sin().sum(), h)
        results = []
        for x in (h.detach().double(), h.detach()):
            x.requires_grad_()
            b = None if own is None else own.to(x.dtype)
            z = reference.ids_logprobs(x, w.to(x.dtype), ids, **options | {"bias": b})[0]
            results.append(torch.autograd.grad(z.sin().sum(), x)[0])
        assert_close(actual, *results, name="d_hidden")


def test_masked_vocabulary():
    """-inf logits: no probability, no NaN, and no gradient where nobody asks for one."""
    h, w, _, _ = operands((6,), 8, 12, torch.float32)
    bias = torch.zeros(12)
    bias[3:] = -torch.inf
    ids = torch.tensor([0, 2, 5]).expand(6, 3)
    h.requires_grad_()
    logps, entropy, lse = linear_logprobs(h, w, ids, bias=bias, entropy=True)
    z = h @ w.t() + bias
    assert (logps[:, 2] == -torch.inf).all()
    torch.testing.assert_close(logps, z.log_softmax(-1).gather(1, ids))
    torch.testing.assert_close(lse, z.logsumexp(-1))
    (d_hidden,) = torch.autograd.grad(logps[:, :2].sin().sum() + entropy.sum(), h)
    z = (h @ w[:3].t()).log_softmax(-1)
    (truth,) = torch.autograd.grad(z[:, [0, 2]].sin().sum() - (z.exp() * z).sum(), h)
    torch.testing.assert_close(d_hidden, truth)


def products(function, N, V, H):
    with GemmCounter(N, V, H) as counter:
        function()
    return counter.gemms


@pytest.mark.parametrize(("trainable", "expected"), [("all", 4), ("hidden", 2), ("nothing", 1)])
def test_products(trainable, expected):
    h, w, _, b = operands((64,), 32, 500, torch.float32)
    ids = ids_of((64,), 500, 3, 0)
    h.requires_grad_("hidden" in TRAINABLE[trainable])
    w.requires_grad_("weight" in TRAINABLE[trainable])

    def call():
        out = linear_logprobs(h, w, ids, logits_budget=2**20)
        if out.logps.requires_grad:
            (out.logps.sin().sum() + out.lse.sum()).backward()

    assert products(call, 64, 500, 32) == pytest.approx(expected, abs=0.02)


@dtypes
@pytest.mark.parametrize("k", [1, 7, 29])
def test_topk(dtype, k):
    h, w, _, b = operands((2, 9), 8, 29, dtype)
    head = {"softcap": 5.0, "temperature": 0.8}
    actual = linear_topk(h, w, k, bias=b, **head, logits_budget=30_000)
    h, w, b = (x.float() for x in (h, w, b))
    logps, ids = reference.best_ids(h, w, k, bias=b, **head)
    assert torch.equal(actual.ids, ids)
    torch.testing.assert_close(actual.logps, logps)
    _, entropy, lse = reference.ids_logprobs(h, w, ids, bias=b, **head)
    torch.testing.assert_close(actual.entropy, entropy)
    torch.testing.assert_close(actual.lse, lse)


def test_topk_of_equal_logits_and_without_gradient():
    h, w = torch.ones(3, 2, requires_grad=True), torch.ones(40, 2, requires_grad=True)
    out = linear_topk(h, w, 5, mask=torch.tensor([True, False, True]))
    assert out.ids.tolist() == [[0, 1, 2, 3, 4], [0] * 5, [0, 1, 2, 3, 4]]
    assert not any(x.requires_grad for x in out) and not out.logps[1].any() and not out.entropy[1].any()
    whole = linear_topk(h, w, 5, mask=torch.tensor([True, False, True]), compact=False)
    assert all(torch.equal(x, y) for x, y in zip(out, whole))


def test_topk_of_one_id():
    mask = torch.tensor([True, False, True])
    hidden, weight = torch.randn(3, 2), torch.randn(1, 2)
    actual = linear_topk(hidden, weight, 1, mask=mask)
    assert not actual.logps.any() and not actual.ids.any()
    torch.testing.assert_close(actual.lse, (hidden @ weight.T)[:, 0] * mask)


def test_topk_ranks_unrounded_logits():
    h, w, _, _ = operands((30,), 64, 400, torch.bfloat16)
    ids = reference.best_ids(h.float(), w.float(), 64)[1]
    assert torch.equal(linear_topk(h, w, 64).ids, ids)
    assert not torch.equal(linear_topk(h, w, 64, logits_dtype=torch.bfloat16).ids, ids)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert torch.equal(linear_topk(h.float(), w, 64).ids, ids)


def test_memory_stays_within_the_budget():
    tokens, V, k, budget = 6_144, 512, 2, 2**22
    h, w, _, _ = operands((tokens,), 2, V, torch.float32)
    ids = ids_of((tokens,), V, k, 0)
    # Memory in addition to the budget: the results of a call, and O(N k) to cut the ids.
    handed = 8 * tokens * (4 * k + 6)
    with AllocationWatcher() as watcher:
        out = linear_logprobs(h, w.requires_grad_(), ids, logits_budget=budget)
        assert watcher.peak <= budget + handed < tokens * V * 4, watcher.peak
        out.logps.sum().backward()
        assert watcher.largest <= budget
    with AllocationWatcher() as watcher:
        linear_topk(h, w, k, logits_budget=budget)
        assert watcher.peak <= budget + handed, watcher.peak


@pytest.mark.repeats
def test_the_plan_of_many_tokens():
    h, w, _, _ = operands((131_072,), 2, 32, torch.float32)
    ids = ids_of((131_072,), 32, 2, 0)
    teacher = torch.full((131_072, 2), -2.0), ids
    loss = DistillationLoss(support="teacher", logits_budget=2**20)
    plan = loss(h, w.requires_grad_(), teacher_logprobs_topk=teacher).plan
    assert plan.chunk_bytes <= plan.budget <= 2**20 and plan.chunks > 32


def of_ids(ids, **options):
    return lambda h, w: linear_logprobs(h, w, ids.to(DEVICE), **options)


def best(k, **options):
    return lambda h, w: linear_topk(h, w, k, **options)


ZEROS = torch.zeros(6, 1, dtype=torch.int64, device=DEVICE)
BAD = {
    "float ids": (of_ids(ZEROS * 1.0), "TypeError: targets: .*integer"),
    "ids too large": (
        of_ids(ZEROS + 40),
        r"ValueError: targets: expected ids in \[0, 40\) or ignore_index, got 6 outside",
    ),
    "negative ids": (of_ids(ZEROS - 1), r"ValueError: targets: expected ids in \[0, 40\)"),
    "shape": (of_ids(ZEROS[1:]), r"ValueError: targets: expected shape \(6,\) \+ \(k,\)"),
    "no ids": (of_ids(ZEROS[:, :0]), "ValueError: .*k >= 1"),
    "entropy": (of_ids(ZEROS, entropy="yes"), "ValueError: entropy: expected one of"),
    "k above V": (best(41), "ValueError: k: expected at most the 40 ids"),
    "k of 0": (best(0), "ValueError: k: expected at least 1"),
    "k a float": (best(2.0), "TypeError: k: expected a whole number"),
    "mask": (best(2, mask=ZEROS[1:, 0]), "ValueError: mask: expected shape"),
    "option": (best(2, entropy=True), "TypeError: .*entropy"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    h, w, _, _ = operands((6,), 4, 40, torch.float32)
    call, message = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call(h, w)
    assert re.match(message, f"{caught.typename}: {caught.value}")


# Two ranks with a shard each, one smaller than k.

SIZES, V, H, N = (5, 26), 31, 6, 12


def sharded_cases():
    ids = torch.rand(N, V, generator=torch.Generator().manual_seed(2)).argsort(-1)
    ids[:, 1] = ids[:, 0]
    ids[3], ids[4, 2] = -100, -100
    for k in (1, 4, V):
        for head in ({}, {"softcap": 3.0, "temperature": 0.6}):
            for leaves in (("hidden",), ("hidden", "weight", "bias")):
                yield ids[:, :k], k, head, leaves


def numbers(group, rank) -> list[dict]:
    actual = []
    for ids, k, head, leaves in sharded_cases():
        tensors = {"hidden": random(N, H), "weight": random(V, H), "bias": random(V)}
        for name in ("weight", "bias"):
            tensors[name] = tensors[name] if group is None else tensors[name].split(SIZES)[rank].clone()
        for name in leaves:
            tensors[name].requires_grad_()
        hidden, weight, bias = tensors.values()
        options = head | {"tp_group": group, "logits_budget": 40_000}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Without a gradient of the entropy a frozen head's vectors are kept.
            entropy = True if "weight" in leaves else "metric"
            out = linear_logprobs(hidden, weight, ids, bias=bias, entropy=entropy, **options)
            best = linear_topk(hidden, weight, k, bias=bias, **options)
        value = (
            combined("all", *out).sum() + combined("renormalized", *out).sum() + combined("lse", *out).sum()
        )
        gradients = torch.autograd.grad(value, [tensors[name] for name in leaves])
        actual.append(
            {"logps": out.logps.detach(), "entropy": out.entropy.detach(), "lse": out.lse.detach()}
            | {f"best {name}": x for name, x in best._asdict().items()}
            | {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}
        )
    return actual


def on_a_rank():
    group, rank = dist.group.WORLD, dist.get_rank()
    actual, errors = numbers(group, rank), []
    # Equal logits in both shards, and more ids than one of them has.
    weight = torch.ones(V, 2).split(SIZES)[rank]
    ties = linear_topk(torch.ones(1, 2), weight, 9, tp_group=group).ids.tolist()
    masked = torch.full((V,), -torch.inf)
    masked[20] = 0.0
    low = linear_topk(torch.ones(1, 2), weight, 9, bias=masked.split(SIZES)[rank], tp_group=group)
    for call in (
        lambda: linear_topk(torch.ones(1, 2), weight, V + 1, tp_group=group),
        lambda: linear_logprobs(torch.ones(1, 2), weight, torch.tensor([[V]]), tp_group=group),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return actual, ties, low.ids.tolist(), errors


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the ranks are on the CPU, and the truth must be too")
def test_two_processes_equal_one():
    truth, ranks = numbers(None, 0), in_processes(2, on_a_rank)
    for case, whole in enumerate(truth):
        for name, x in whole.items():
            ours = [rank[0][case][name] for rank in ranks]
            if name in ("d_weight", "d_bias"):
                ours = [torch.cat(ours)]
            for y in ours:
                torch.testing.assert_close(y, x, msg=f"{case}: {name}")
    for _, ties, low, errors in ranks:
        assert ties == [list(range(9))] and low == [[20, *range(8)]]
        assert re.match("k: expected at most the 31 ids", errors[0])
        assert re.match(r"targets: expected ids in \[0, 31\)", errors[1])
