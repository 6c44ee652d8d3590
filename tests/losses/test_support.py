"""`DistillationLoss(support=…)`: divergences over a few ids, against their formulas on full logits."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from logitless import DistillationLoss, check, linear_logprobs, linear_topk
from logitless.losses import teachers
from tests import reference
from tests.cases import covering_array, one_row_warning
from tests.ranks import in_processes, random
from tests.support import DEVICE, AllocationWatcher, GemmCounter, assert_close, eager_calls, host_reads, run

N, H, H_TEACHER = 13, 6, 5
TEACHERS = ("same", "larger", "smaller", "given", "given, few of many", "given, with gaps", "given, all")
FACTORS = {
    "teacher": list(TEACHERS),
    "support": ["teacher", "student", "union"],
    "divergence": ["forward_kl", "reverse_kl", "jsd"],
    "topk_mode": ["tail", "renormalize", "partial"],
    "hard_loss_weight": [0.0, 0.3],
    "temperature": [1.0, 1.7],
    "softcap": [None, 4.0],
    "bias": [False, True],
    "labels": [True, False],
    "compact": [True, False],
    "trained": ["all", "hidden", "head"],
    "reduction": ["mean", "none"],
    "budget": [None, 6_000],
}
TRAINED = {"all": ("hidden", "weight", "bias"), "hidden": ("hidden",), "head": ("weight", "bias")}
K = 4
# What has no support is a LogitsLoss, which need not be compiled here.
pytestmark = pytest.mark.usefixtures("uncompiled")


def makes_sense(case: dict) -> bool:
    given = str(case.get("teacher", "")).startswith("given")
    if given and case.get("support", "teacher") != "teacher":
        return False
    if case.get("topk_mode") == "partial" and case.get("divergence") == "jsd":
        return False
    return not (case.get("hard_loss_weight") and case.get("labels") is False)


class Problem:
    def __init__(self, case: dict):
        generator = torch.Generator(DEVICE).manual_seed(case["seed"])

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        teacher = case["teacher"]
        V = {"given, few of many": 200 * K, "given, all": K}.get(teacher, 23)
        self.hidden, self.weight = random(N, H), random(V, H)
        self.bias = random(V) if case["bias"] else None
        self.labels = torch.randint(V, (N,), generator=generator)
        self.labels[2] = -100
        self.mask = torch.rand(N, generator=generator) < 0.8
        self.mask[0] = True
        T = case["temperature"]
        if teacher.startswith("given"):
            values, ids = (random(N, V) / T).log_softmax(-1).topk(K)
            if teacher in ("given, with gaps", "given, few of many"):
                values[3, 1], ids[3, 1] = -torch.inf, 10**6
                values[4, 2], ids[4, 2] = values[4, 0], ids[4, 0]
            self.arguments, self.known = {"teacher_logprobs_topk": (values, ids)}, (values, ids)
            self.k = None
        else:
            rows = {"same": V, "larger": V + 4, "smaller": V - 3}[teacher]
            given = random(N, H_TEACHER), random(rows, H_TEACHER), random(rows)
            self.arguments = dict(zip(("teacher_hidden", "teacher_weight", "teacher_bias"), given))
            self.known = reference.head_logits(*given, logit_scale=0.8) / T
            self.k = K


NAMED = ("support", "divergence", "topk_mode", "hard_loss_weight", "temperature", "softcap", "reduction")


def losses(case: dict, problem: Problem):
    options = {name: case[name] for name in (*NAMED, "compact")} | {"beta": 0.3, "k": problem.k}
    loss = DistillationLoss(**options, logits_budget=case["budget"], teacher_logit_scale=0.8)
    labels = problem.labels if case["labels"] else None

    def ours(hidden, weight, targets, *, bias):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return loss(hidden, weight, labels, bias=bias, mask=problem.mask, **problem.arguments)

    def full_logits(hidden, weight, targets, *, bias):
        z = reference.head_logits(hidden, weight, bias, softcap=case["softcap"])
        names = {name: case[name] for name in ("support", "divergence", "topk_mode")} | {"beta": 0.3}
        kept = problem.mask if labels is None else problem.mask & (labels != -100)
        soft = reference.support_divergence(z / case["temperature"], problem.known, k=problem.k, **names)
        value = soft
        if case["hard_loss_weight"]:
            hard = F.cross_entropy(z, labels, reduction="none")
            value = case["hard_loss_weight"] * hard + (1 - case["hard_loss_weight"]) * soft
        value = torch.where(kept, value, 0.0)
        return value if case["reduction"] == "none" else value.sum() / kept.sum()

    return ours, full_logits


GATHERED = {
    **FACTORS,
    "teacher": ["given, few of many"],
    "support": ["teacher"],
    "topk_mode": ["renormalize"],
    "hard_loss_weight": [0.0],
}
CASES = covering_array(FACTORS, makes_sense) + covering_array(GATHERED, makes_sense)


@one_row_warning
@pytest.mark.parametrize("case", CASES)
def test_against_the_formula(case):
    problem = Problem(case)
    ours, full_logits = losses(case, problem)
    trained = [name for name in TRAINED[case["trained"]] if name != "bias" or case["bias"]]
    upstream = 1.3 if case["reduction"] == "mean" else torch.linspace(0.5, 2, N, dtype=torch.float64)
    operands = problem.hidden, problem.weight, problem.labels, problem.bias, upstream, trained
    truth, actual = run(full_logits, *operands), run(ours, *operands)
    assert_close(actual.value, truth.value, 1e-12, name="value")
    for name in truth.grads:
        assert_close(actual.grads[name], truth.grads[name], 1e-11, name=f"d_{name}")
    alone = not case["hard_loss_weight"] and case["topk_mode"] == "renormalize" and problem.k is None
    plan = actual.output.plan.describe()
    assert ("gathered: 4 columns" in plan) == (alone and case["teacher"] == "given, few of many")
    assert (set(actual.output.metrics) == {"soft_loss"}) == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("V", [23, 900], ids=["products", "gathered"])
@pytest.mark.parametrize("mode", ["tail", "renormalize"])
def test_in_low_precision(mode, V, dtype):
    generator = torch.Generator(DEVICE).manual_seed(1)
    h = (torch.randn(40, 16, generator=generator)).to(dtype)
    w = (torch.randn(V, 16, generator=generator) / 2).to(dtype)
    values, ids = (2 * torch.randn(40, V, generator=generator)).log_softmax(-1).topk(5)
    ids[:30, 4] = 7  # hot, and twice in some tokens
    given = {"divergence": "forward_kl", "topk_mode": mode}

    def ours(hidden, weight, targets, *, bias):
        loss = DistillationLoss(support="teacher", logits_budget=2**14, **given)
        return loss(hidden, weight, teacher_logprobs_topk=(values, ids))

    def full_logits(hidden, weight, targets, *, bias):
        z = reference.head_logits(hidden, weight)
        return reference.support_divergence(z, (values.to(z.dtype), ids), **given).mean()

    targets = torch.zeros(40, dtype=torch.int64)
    truth, naive = run(full_logits, h.double(), w.double(), targets), run(full_logits, h, w, targets)
    actual = run(ours, h, w, targets)
    assert_close(actual.value, truth.value, 2e-3 if dtype != torch.float32 else 1e-6, name="value")
    for name in truth.grads:
        assert_close(actual.grads[name], truth.grads[name], naive.grads[name], name=f"d_{name}")


def given(tokens, k, V, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    ids = torch.randint(V, (tokens, k), generator=generator)
    return -1 - torch.rand(tokens, k, generator=generator), ids


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"support": "teacher", "topk_mode": "tail"}, 3),
        ({"support": "teacher", "topk_mode": "renormalize"}, 0),
        ({"support": "teacher", "topk_mode": "renormalize", "hard_loss_weight": 0.1}, 3),
        ({"support": "teacher", "topk_mode": "partial", "divergence": "forward_kl"}, 3),
    ],
)
def test_products(options, expected):
    h, w = torch.randn(64, 32, requires_grad=True), torch.randn(720, 32, requires_grad=True)
    with GemmCounter(64, 720, 32) as counter, eager_calls() as calls:
        loss = DistillationLoss(**options)
        labels = torch.zeros(64, dtype=torch.int64)
        loss(h, w, labels, teacher_logprobs_topk=given(64, 3, 720)).loss.backward()
    assert counter.gemms == pytest.approx(expected, abs=0.02) and calls.number == 1
    assert h.grad.any() and w.grad.any()


def test_the_gathered_path_holds_neither_logits_nor_rows():
    tokens, k, V, width = 131_072, 2, 400, 4
    h, w = torch.randn(tokens, width, requires_grad=True), torch.randn(V, width, requires_grad=True)
    teacher = given(tokens, k, V)
    with AllocationWatcher() as watcher:
        loss = DistillationLoss(support="teacher", topk_mode="renormalize", logits_budget=2**26)
        out = loss(h, w, teacher_logprobs_topk=teacher)
        out.loss.backward()
    assert "gathered: 2 columns" in out.plan.describe()
    # Hidden states and ids; 16 bytes of temporaries a slot.
    assert watcher.largest <= tokens * max(4 * width, 16 * k) < tokens * V


def test_gathered_gradients_are_the_same_in_every_run():
    h, w = torch.randn(50, 16), torch.randn(900, 16)
    teacher = given(50, 4, 3)  # three ids share all tokens
    actual = []
    for _ in range(2):
        weight = w.clone().requires_grad_()
        loss = DistillationLoss(support="teacher", topk_mode="renormalize")
        loss(h, weight, teacher_logprobs_topk=teacher).loss.backward()
        actual.append(weight.grad)
    assert torch.equal(*actual) and not actual[0][3:].any() and actual[0][:3].any()


def test_the_given_ids_are_read_in_the_calls_one_sync():
    """Wrong ids and log-probabilities are counted on the device; nobody else asks for a number."""
    h, w = torch.randn(9, 4, requires_grad=True), torch.randn(900, 4, requires_grad=True)
    for mode in ("tail", "renormalize"):
        loss = DistillationLoss(support="teacher", topk_mode=mode)
        with host_reads() as reads:
            loss(h, w, teacher_logprobs_topk=given(9, 3, 900)).loss.backward()
        assert len(reads) == 1, "\n\n".join(reads)


def test_inside_a_compiled_graph():
    h, w = torch.randn(7, 5, requires_grad=True), torch.randn(900, 5, requires_grad=True)
    values, ids = given(7, 4, 900)
    few = DistillationLoss(support="teacher", topk_mode="renormalize")
    both = DistillationLoss(support="union", k=3)

    def all_of_them(h, w):
        out = linear_logprobs(h, w, ids, entropy=True)
        loss = few(h, w, teacher_logprobs_topk=(values, ids)).loss
        loss = loss + both(h, w, teacher_hidden=h.detach(), teacher_weight=w.detach().flip(0)).loss
        return out.logps.sin().sum() + out.entropy.sum() + loss, linear_topk(h, w, 3).ids

    eager, best = all_of_them(h, w)
    with torch.compiler.set_stance("default"):
        compiled, same = torch.compile(all_of_them, backend="aot_eager", fullgraph=True)(h, w)
    torch.testing.assert_close(compiled, eager)
    assert torch.equal(best, same)
    truth, actual = torch.autograd.grad(eager, (h, w)), torch.autograd.grad(compiled, (h, w))
    torch.testing.assert_close(actual, truth)


@pytest.mark.parametrize("support", ["teacher", "student", "union"])
def test_check_knows_the_definition(support):
    generator = torch.Generator(DEVICE).manual_seed(7)
    h, w, t, tw = (torch.randn(x, generator=generator) for x in ((9, 4), (30, 4), (9, 3), (30, 3)))
    operands, labels = (h.requires_grad_(), w.requires_grad_()), torch.arange(9)
    teacher = {"teacher_hidden": t, "teacher_weight": tw}
    for reduction in ("mean", "none"):
        loss = DistillationLoss(
            support=support, k=3, hard_loss_weight=0.3, temperature=1.5, reduction=reduction
        )
        report = check(loss, *operands, labels, **teacher)
        assert report, report.errors
    for mode in ("tail", "renormalize"):
        few = DistillationLoss(support="teacher", topk_mode=mode)
        assert check(few, *operands, teacher_logprobs_topk=given(9, 3, 30))


def test_onto_a_main_gradient():
    h, w = torch.randn(9, 4, requires_grad=True), torch.randn(900, 4, requires_grad=True)
    few, main = DistillationLoss(support="teacher", topk_mode="renormalize"), torch.ones(900, 4)
    teacher = {"teacher_logprobs_topk": given(9, 3, 900)}
    few(h, w, **teacher, accumulate_into=main, grad_scale=0.5).loss.backward()
    assert w.grad is None
    few(h, w, **teacher).loss.backward()
    torch.testing.assert_close(main, 1 + 0.5 * w.grad)


def call(loss=None, V=7, V_teacher=7, **arguments):
    hidden, weight = torch.zeros(4, 5), torch.zeros(V, 5)
    if not arguments:
        arguments = {"teacher_hidden": torch.zeros(4, 3), "teacher_weight": torch.zeros(V_teacher, 3)}
    return (loss or DistillationLoss(support="teacher", k=2))(hidden, weight, **arguments)


SEVENS = torch.full((4, 3), 7, device=DEVICE)


def topk(values=None, ids=None, *, support="teacher", k=None, **options):
    values = torch.full((4, 3), -2.0) if values is None else values
    ids = torch.arange(3).expand(4, 3) if ids is None else ids
    loss = DistillationLoss(support=support, k=k, **options)
    return call(loss, teacher_logprobs_topk=(values, ids))


def few(**options):
    return call(DistillationLoss(**{"support": "teacher", "k": 2} | options))


BAD = {
    "support": (lambda: few(support="both"), "ValueError: support: expected one of"),
    "tuple": (lambda: few(support=("teacher",)), "ValueError: support: expected one of"),
    "k alone": (lambda: few(support=None), "ValueError: k: expected None without support"),
    "k of 0": (lambda: few(k=0), "ValueError: k: expected at least 1"),
    "k a float": (lambda: few(k=2.5), "TypeError: k: expected a whole"),
    "cosine": (lambda: few(divergence="cosine"), "ValueError: divergence: expected one of"),
    "no k": (lambda: few(k=None), "ValueError: k: expected a number of token ids"),
    "k above V": (lambda: few(k=8), "ValueError: k: expected at most the 7 ids"),
    "k above shared": (lambda: few(k=5, shared_vocabulary=4), "ValueError: k: expected at most the 4 ids"),
    "shared": (lambda: few(shared_vocabulary=8), "ValueError: shared_vocabulary: expected at most 7"),
    "k beside given": (lambda: topk(k=3), "ValueError: k: expected None with teacher_logprobs_topk"),
    "student's ids": (
        lambda: topk(support="student"),
        "ValueError: support: expected 'teacher' with teacher_logprobs_topk",
    ),
    "union": (lambda: topk(support="union"), "ValueError: .*pass teacher_hidden and teacher_weight"),
    "ids outside": (lambda: topk(ids=SEVENS), r"ValueError: .*ids in \[0, 7\)"),
    "negative ids": (lambda: topk(ids=SEVENS - 8), r"ValueError: .*ids in \[0, 7\)"),
    "float ids": (lambda: topk(ids=torch.zeros(4, 3)), "TypeError: teacher_logprobs_topk: .*integer ids"),
    "logits": (lambda: topk(torch.ones(4, 3)), "ValueError: .*log-probabilities of at most 0"),
    "NaN": (lambda: topk(torch.full((4, 3), torch.nan)), "ValueError: .*log-probabilities of at most 0"),
    "shapes": (lambda: topk(torch.zeros(4, 2)), "ValueError: teacher_logprobs_topk: expected two tensors"),
    "not shared": (
        lambda: topk(ids=SEVENS - 2, shared_vocabulary=5),
        r"ValueError: .*ids in \[0, 5\) and below shared_vocabulary=5",
    ),
    "outside a larger shared vocabulary": (
        lambda: topk(ids=SEVENS, shared_vocabulary=40),
        r"ValueError: .*ids in \[0, 7\) and below shared_vocabulary=40",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    attempt, message = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        attempt()
    assert re.match(message, f"{caught.typename}: {caught.value}")


@pytest.mark.parametrize("support", [None, "teacher"])
def test_wrong_ids_in_a_compiled_graph_and_without_a_sync(support):
    ids = SEVENS
    with torch.compiler.set_stance("default"), pytest.raises(ValueError, match=r"ids in \[0, 7\)"):
        torch.compile(lambda: topk(ids=ids, support=support), backend="aot_eager")()
    if DEVICE.type == "cpu":  # on a GPU the assertion ends the process
        with pytest.raises(RuntimeError, match=r"teacher_logprobs_topk: expected ids in \[0, 7\)"):
            topk(ids=ids, support=support, compact=False)


@pytest.mark.parametrize("compact", [True, False])
def test_a_count_of_tokens_hides_no_wrong_id(compact):
    if DEVICE.type == "cpu" or compact:
        loss, teacher = (
            DistillationLoss(support="teacher", compact=compact),
            (torch.full((4, 3), -2.0), SEVENS),
        )
        message = r"teacher_logprobs_topk: expected ids in \[0, 7\)"
        with pytest.raises(ValueError if compact else RuntimeError, match=message):
            call(loss, teacher_logprobs_topk=teacher, num_items=torch.tensor(4))


@pytest.mark.parametrize("options", [{"support": None}, {"support": "teacher"}, {"topk_mode": "renormalize"}])
@pytest.mark.parametrize("compact", [True, False])
def test_what_stands_at_masked_tokens_is_not_looked_at(options, compact):
    (values, ids), mask = given(4, 3, 720), torch.tensor([True, False, True, False])
    wrong_values, wrong_ids = values.clone(), ids.clone()
    wrong_ids[1], wrong_ids[3], wrong_values[1], wrong_values[3] = -100, 10**6, 3.0, torch.nan
    h, w = torch.randn(4, 8, requires_grad=True), torch.randn(720, 8, requires_grad=True)
    loss, actual = DistillationLoss(**{"support": "teacher"} | options, compact=compact), []
    for known in ((values, ids), (wrong_values, wrong_ids)):
        value = loss(h, w, mask=mask, teacher_logprobs_topk=known).loss
        actual.append((value.detach(), *torch.autograd.grad(value, (h, w))))
    assert all(map(torch.equal, *actual))


@pytest.mark.parametrize("options", [{}, {"support": "teacher", "k": 2}], ids=["whole", "support"])
def test_vocabularies_of_different_size_are_told_once(options):
    teachers.warn_of_sizes.cache_clear()
    with pytest.warns(UserWarning, match="shared_vocabulary") as actual:
        call(DistillationLoss(**options), V_teacher=9)
        call(DistillationLoss(**options), V_teacher=9)
    ours = [warning for warning in actual if "shared_vocabulary" in str(warning.message)]
    assert len(ours) == 1 and ours[0].filename == __file__
    teachers.warn_of_sizes.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="teacher_weight")
        call(DistillationLoss(**options, shared_vocabulary=7), V_teacher=9)
        call(DistillationLoss(**options), V_teacher=7)


def test_shared_vocabulary_cuts_the_teacher():
    generator = torch.Generator(DEVICE).manual_seed(5)
    h, w, t, tw = (torch.randn(x, generator=generator) for x in ((9, 4), (11, 4), (9, 3), (13, 3)))
    cut = DistillationLoss(shared_vocabulary=8)(h, w, teacher_hidden=t, teacher_weight=tw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_hand = DistillationLoss()(h, w, teacher_hidden=t, teacher_weight=tw[:8])
    torch.testing.assert_close(cut.loss, by_hand.loss)


@pytest.mark.parametrize("shared", [None, 11, 8])
@pytest.mark.parametrize("topk_mode", ["tail", "renormalize", "partial"])
@pytest.mark.parametrize("support", ["teacher", "student"])
def test_a_support_has_shared_ids_alone(support, topk_mode, shared):
    """Each model is normalized over its own vocabulary: what is not in the support is in its tail."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    h, w, t, tw = (torch.randn(x, generator=generator) for x in ((9, 4), (11, 4), (9, 3), (13, 3)))
    options = {"divergence": "forward_kl", "support": support, "k": 3, "topk_mode": topk_mode}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = DistillationLoss(**options, shared_vocabulary=shared)
        actual = loss(h, w, teacher_hidden=t, teacher_weight=tw).loss
    student, teacher = (x.double().log_softmax(-1) for x in (h @ w.t(), t @ tw.t()))
    common = 11 if shared is None else shared
    chosen = (teacher if support == "teacher" else student)[:, :common].topk(3).indices
    q, p = student.gather(1, chosen), teacher.gather(1, chosen)
    if topk_mode == "renormalize":
        q, p = q.log_softmax(-1), p.log_softmax(-1)
    if topk_mode == "tail":
        q, p = (torch.cat((x, torch.log1p(-x.exp().sum(1, keepdim=True))), 1) for x in (q, p))
    torch.testing.assert_close(actual.double(), (p.exp() * (p - q)).sum(1).mean(), rtol=1e-4, atol=1e-5)


# Two ranks with a shard each, one smaller than k.

SIZES, V = (3, 540), 543


def sharded_cases():
    for support in ("teacher", "student", "union", "given"):
        T = 1.0 if support == "teacher" else 1.6
        for mode, hard in (("tail", 0.4), ("renormalize", 0.0)):
            options = {"topk_mode": mode, "temperature": T, "hard_loss_weight": hard, "softcap": 5.0}
            yield support, {"divergence": "jsd", "logits_budget": 100_000} | options


def solved(group, rank) -> list[dict]:
    actual = []
    for support, options in sharded_cases():
        teacher = {"teacher_hidden": random(N, H_TEACHER), "teacher_weight": random(V, H_TEACHER)}
        teacher["teacher_bias"] = random(V, seed=1)
        head = {"hidden": random(N, H), "weight": random(V, H), "bias": random(V)}
        if group is not None:
            for tensors in (teacher, head):
                for name in tensors:
                    if "hidden" not in name:
                        tensors[name] = tensors[name].split(SIZES)[rank].clone()
        k = 3
        if support == "given":
            values, ids = random(N, V, seed=2).log_softmax(-1).topk(3)
            ids[:, 0] = torch.arange(N) % 5
            support, k, teacher = "teacher", None, {"teacher_logprobs_topk": (values, ids)}
        labels = torch.arange(N) % 7
        labels[1] = -100
        leaves = {name: x.requires_grad_() for name, x in head.items()}
        hidden, weight, bias = leaves.values()
        loss = DistillationLoss(support=support, k=k, tp_group=group, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = loss(hidden, weight, labels, bias=bias, **teacher)
        gradients = torch.autograd.grad(1.7 * out.loss, list(leaves.values()))
        actual.append(
            {"loss": out.loss.detach(), **out.metrics}
            | {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}
            | {"plan": out.plan.columns}
        )
    return actual


def on_a_rank():
    group, rank = dist.group.WORLD, dist.get_rank()
    weight, ids = torch.zeros(V, 2).split(SIZES)[rank], torch.tensor([[V]])
    loss = DistillationLoss(support="teacher", tp_group=group)
    try:
        loss(torch.zeros(1, 2), weight, teacher_logprobs_topk=(torch.tensor([[-1.0]]), ids))
    except ValueError as error:
        return solved(group, rank), str(error)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the ranks are on the CPU, and the truth must be too")
def test_two_processes_equal_one():
    truth, ranks = solved(None, 0), in_processes(2, on_a_rank)
    assert {case["plan"] for case in truth} == {0, 3}
    for number, whole in enumerate(truth):
        for name, x in whole.items():
            ours = [rank[0][number][name] for rank in ranks]
            if name in ("d_weight", "d_bias"):
                ours = [torch.cat(ours)]
            for y in ours:
                torch.testing.assert_close(y, x, msg=f"{number}: {name}")
    assert all(re.search(rf"ids in \[0, {V}\)", error) for _, error in ranks)


def peaked(scale: float, **options):
    """The loss in fp32, and its definition in fp64, of a student with logits of about 20."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    hidden, weight = (torch.randn(n, H, generator=generator) * 3 for n in (N, 23))
    teacher = {"teacher_hidden": torch.randn(N, H, generator=generator) * scale, "teacher_weight": weight}
    loss = DistillationLoss(k=3, **options)(hidden, weight, **teacher).loss
    hidden, weight = hidden.double(), weight.double()
    teacher = {name: x.double() for name, x in teacher.items()}
    truth, _ = reference.distillation(hidden, weight, **teacher, k=3, **options)
    return loss.item(), truth.item(), hidden @ weight.T


@pytest.mark.parametrize("support", ["student", "teacher", "union"])
def test_best_ids_where_a_softcap_saturates(support):
    """Products far above the cap are one number in fp32 once capped; the best of them are known."""
    loss, truth, products = peaked(3, support=support, softcap=2.5, teacher_softcap=2.5)
    capped, exact = ((x / 2.5).tanh().sort(descending=True).values for x in (products.float(), products))
    assert (capped.diff()[:, 2] == 0).sum() >= 2 and not (exact.diff()[:, 2] == 0).any()
    assert loss == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("support", ["student", "union"])
def test_a_tail_far_below_fp32s_eps(support):
    """The probability of other ids is their sum, not 1 less that of the best: a forward KL takes its log."""
    loss, truth, products = peaked(1 / 3, support=support, divergence="forward_kl")
    p = products.softmax(-1).sort(descending=True).values
    assert (p[:, 3:].sum(-1) < 1e-8).sum() > 2
    assert loss == pytest.approx(truth, rel=1e-5)
