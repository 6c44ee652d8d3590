"""Distillation losses against numbers computed by hand; see conftest.py."""

import math

import pytest
import torch

from tests import reference

# Two tokens of a student that says (1/4, 3/4) and (3/4, 1/4), and a teacher that says (1/2, 1/2) and (1/5,
# 4/5): with `hidden` the identity, `weight.T` is the logits.
STUDENT = ((1 / 4, 3 / 4), (3 / 4, 1 / 4))
TEACHER = ((1 / 2, 1 / 2), (1 / 5, 4 / 5))
EYE = torch.eye(2, dtype=torch.float64)
TARGETS = torch.tensor([1, 1])
NLL = (math.log(4 / 3), math.log(4))
DIVERGENCES = ("jsd", "forward_kl", "reverse_kl", "skewed_kl", "total_variation")
TOPK_MODES = ("tail", "renormalize")


def weight_of(rows) -> torch.Tensor:
    """The head that gives each token of the identity the log-probabilities of its row."""
    return torch.tensor(rows, dtype=torch.float64).log().T


def two_tokens(student=STUDENT, teacher=TEACHER, targets=None, **options):
    if "teacher_logprobs_topk" not in options:
        options |= {"teacher_hidden": EYE, "teacher_weight": weight_of(teacher)}
    return reference.distillation(EYE, weight_of(student), targets, **{"reduction": "none"} | options)


def kl_by_hand(p, q) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def mixed(p, q, share) -> list[float]:
    return [(1 - share) * a + share * b for a, b in zip(p, q, strict=True)]


def jsd_by_hand(s, t, beta) -> float:
    m = mixed(s, t, beta)
    return beta * kl_by_hand(t, m) + (1 - beta) * kl_by_hand(s, m)


BY_HAND = {
    "jsd": lambda s, t: jsd_by_hand(s, t, 0.5),
    "forward_kl": lambda s, t: kl_by_hand(t, s),
    "reverse_kl": lambda s, t: kl_by_hand(s, t),
    "skewed_kl": lambda s, t: kl_by_hand(t, mixed(s, t, 0.1)),
    "total_variation": lambda s, t: sum(abs(a - b) for a, b in zip(s, t, strict=True)) / 2,
}


TV = {"divergence": "total_variation"}
LOG_ODDS = torch.tensor([0, math.log(3)], dtype=torch.float64)
MASKED_AND_IGNORED = {"mask": torch.tensor([1, 0]), "targets": torch.tensor([7, 1]), "ignore_index": 7}
# Options, and the loss of each token.
TOKENS = {
    **{
        name: ({"divergence": name}, [function(s, t) for s, t in zip(STUDENT, TEACHER)])
        for name, function in BY_HAND.items()
    },
    "jsd of another share": ({"beta": 0.1}, [jsd_by_hand(s, t, 0.1) for s, t in zip(STUDENT, TEACHER)]),
    # At half the temperature the probabilities are squared: s = (1/10, 9/10) and (9/10, 1/10), t = (1/2,
    # 1/2), (1/17, 16/17).
    "temperature": (TV | {"temperature": 0.5}, [2 / 5, 9 / 10 - 1 / 17]),
    "logit_scale": (TV | {"logit_scale": 2.0}, [2 / 5, 9 / 10 - 1 / 5]),
    "teacher's scale": (TV | {"teacher_logit_scale": 2.0}, [1 / 4, 3 / 4 - 1 / 17]),
    # The bias triples the odds of class 1: s = (1/10, 9/10) and (1/2, 1/2), or t = (1/4, 3/4) and (1/13,
    # 12/13).
    "bias": (TV | {"bias": LOG_ODDS}, [2 / 5, 3 / 10]),
    "teacher's bias": (TV | {"teacher_bias": LOG_ODDS}, [0, 3 / 4 - 1 / 13]),
    "a hard loss is not tempered": (
        TV | {"hard_loss_weight": 0.25, "targets": TARGETS, "temperature": 0.5},
        [NLL[0] / 4 + 3 / 4 * 2 / 5, NLL[1] / 4 + 3 / 4 * (9 / 10 - 1 / 17)],
    ),
    "hard loss alone": ({"hard_loss_weight": 1.0, "targets": TARGETS}, NLL),
    "ignored": (TV | {"targets": torch.tensor([-100, 1])}, [0, 11 / 20]),
    "masked": (TV | {"mask": torch.tensor([1, 0])}, [1 / 4, 0]),
    "masked and ignored": (TV | MASKED_AND_IGNORED, [0, 0]),
}
# Options, and the loss of both tokens.
REDUCED = {
    "mean": ({}, (1 / 4 + 11 / 20) / 2),
    "sum": ({"reduction": "sum"}, 1 / 4 + 11 / 20),
    "ignored": ({"targets": torch.tensor([-100, 1])}, 11 / 20),
    "masked": ({"mask": torch.tensor([True, False])}, 1 / 4),
    "nothing counts": (MASKED_AND_IGNORED, 0),
    "num_items": ({"num_items": torch.tensor(5), "mask": torch.tensor([1, 0])}, 1 / 20),
    "no items": ({"num_items": 0, "mask": torch.tensor([0, 0])}, 0),
}


@pytest.mark.parametrize(("options", "expected"), TOKENS.values(), ids=TOKENS)
def test_two_tokens_by_hand(options, expected):
    assert two_tokens(**options)[0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("options", "expected"), REDUCED.values(), ids=REDUCED)
def test_reductions_by_hand(options, expected):
    loss, _ = two_tokens(**TV | {"reduction": "mean"} | options)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("divergence", "beta"), [("forward_kl", 0), ("reverse_kl", 1)])
def test_the_ends_of_the_jsd_are_the_two_kls(divergence, beta):
    assert two_tokens(beta=beta)[0].tolist() == two_tokens(divergence=divergence)[0].tolist()


@pytest.mark.parametrize(("skew_alpha", "divergence"), [(0.0, "forward_kl"), (1.0, None)])
def test_the_ends_of_the_skewed_kl(skew_alpha, divergence):
    expected = two_tokens(divergence=divergence)[0].tolist() if divergence else [0, 0]
    assert two_tokens(divergence="skewed_kl", skew_alpha=skew_alpha)[0].tolist() == expected


def test_skewed_reverse_kl_by_hand():
    """Student and teacher are exchanged; at 0 it is the reverse KL, at 1 it is 0."""
    options = {"divergence": "skewed_reverse_kl"}
    expected = [kl_by_hand(s, mixed(t, s, 0.1)) for s, t in zip(STUDENT, TEACHER)]
    assert two_tokens(**options)[0].tolist() == pytest.approx(expected, rel=1e-12)
    assert (
        two_tokens(**options, skew_alpha=0.0)[0].tolist() == two_tokens(divergence="reverse_kl")[0].tolist()
    )
    assert two_tokens(**options, skew_alpha=1.0)[0].tolist() == [0, 0]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_partial_topk_by_hand(divergence):
    """Of the student's four probabilities the two at the teacher's ids; nothing is renormalized."""
    student, teacher = [(1 / 2, 1 / 8), (1 / 5, 3 / 10)], [(1 / 3, 1 / 2), (1 / 10, 1 / 5)]
    loss, _ = two_tokens(FOUR, teacher_logprobs_topk=BEST, topk_mode="partial", divergence=divergence)
    pairs = zip(teacher, student) if divergence == "forward_kl" else zip(student, teacher)
    assert loss.tolist() == pytest.approx([kl_by_hand(p, q) for p, q in pairs], rel=1e-12)


def test_softcaps_by_hand():
    """Each model has its own cap, and its logits go through it before the temperature."""
    student = [2 * math.tanh(math.log(odds) / 2) / 0.5 for odds in STUDENT[0]]
    teacher = [3 * math.tanh(math.log(odds) / 3) / 0.5 for odds in TEACHER[0]]
    p, q = ([math.exp(z) / (math.exp(a) + math.exp(b)) for z in (a, b)] for a, b in (student, teacher))
    loss, _ = two_tokens(divergence="forward_kl", temperature=0.5, softcap=2.0, teacher_softcap=3.0)
    assert loss[0].item() == pytest.approx(kl_by_hand(q, p), rel=1e-12)


def test_cosine_by_hand():
    # Logits (3, 4) and (1, 0) beside (4, 3) and (0, 2).
    student, teacher = (
        torch.tensor(rows, dtype=torch.float64).T for rows in ([[3, 4], [1, 0]], [[4, 3], [0, 2]])
    )
    options = {"teacher_hidden": EYE, "teacher_weight": teacher, "divergence": "cosine", "reduction": "none"}
    for temperature in (1.0, 2.0):
        loss, _ = reference.distillation(EYE, student, temperature=temperature, **options)
        assert loss.tolist() == pytest.approx([1 - 24 / 25, 1], rel=1e-12)


FOUR = ((1 / 8, 1 / 4, 1 / 2, 1 / 8), (2 / 5, 1 / 5, 1 / 10, 3 / 10))
BEST = (
    torch.tensor([[1 / 3, 1 / 2], [1 / 10, 1 / 5]], dtype=torch.float64).log(),
    torch.tensor([[2, 0], [1, 3]]),
)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("topk_mode", "student", "teacher"),
    [
        (
            "tail",
            [(1 / 2, 1 / 8, 3 / 8), (1 / 5, 3 / 10, 1 / 2)],
            [(1 / 3, 1 / 2, 1 / 6), (1 / 10, 1 / 5, 7 / 10)],
        ),
        ("renormalize", [(4 / 5, 1 / 5), (2 / 5, 3 / 5)], [(2 / 5, 3 / 5), (1 / 3, 2 / 3)]),
    ],
)
def test_topk_by_hand(divergence, topk_mode, student, teacher):
    loss, metrics = two_tokens(FOUR, teacher_logprobs_topk=BEST, topk_mode=topk_mode, divergence=divergence)
    assert loss.tolist() == pytest.approx(
        [BY_HAND[divergence](s, t) for s, t in zip(student, teacher, strict=True)], rel=1e-12
    )
    # The student's best ids over all four are 2 and 0, the teacher's are 0 and 3.
    assert metrics["agreement"] == 0


@pytest.mark.parametrize("topk_mode", TOPK_MODES)
@pytest.mark.parametrize("padding", [[2, 1], [3, 2]], ids=["repeated id", "other id"])
def test_an_empty_slot_is_as_if_not_given(topk_mode, padding):
    values, ids = BEST[0], torch.cat([BEST[1], torch.tensor(padding).unsqueeze(1)], -1)
    values = torch.cat([values, torch.full_like(values[:, :1], -math.inf)], -1)
    expected, _ = two_tokens(FOUR, teacher_logprobs_topk=BEST, topk_mode=topk_mode)
    actual, _ = two_tokens(FOUR, teacher_logprobs_topk=(values, ids), topk_mode=topk_mode)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_small_tail_by_hand(divergence):
    tail = 2.0**-30
    values = torch.tensor([[1 / 2, 1 / 2 - tail]], dtype=torch.float64).log()
    loss, _ = reference.distillation(
        EYE[:1],
        weight_of(FOUR),
        teacher_logprobs_topk=(values, torch.tensor([[2, 0]])),
        divergence=divergence,
    )
    expected = BY_HAND[divergence]((1 / 2, 1 / 8, 3 / 8), (1 / 2, 1 / 2 - tail, tail))
    # 1e-16 of rounding in the values is 1e-7 of the tail.
    assert loss.item() == pytest.approx(expected, rel=1e-12 if divergence != "reverse_kl" else 1e-7)


def test_topk_agreement_is_over_the_whole_vocabulary():
    for ids, agreement in (([[2, 0], [0, 1]], 0.0), ([[0, 2], [0, 1]], 0.5), ([[0, 2], [1, 0]], 1.0)):
        _, metrics = two_tokens(FOUR, teacher_logprobs_topk=(BEST[0], torch.tensor(ids)))
        assert metrics["agreement"].item() == agreement


METRICS = {
    # The first teacher is undecided, and of two equal ids the first counts as its best.
    "all": (
        (STUDENT, TEACHER, TARGETS),
        {"hard_loss_weight": 0.25, "num_items": 8, "reduction": "mean", **TV},
        {
            "soft_loss": (1 / 4 + 11 / 20) / 2,
            "hard_loss": (NLL[0] + NLL[1]) / 2,
            "entropy": math.log(4) - 3 / 4 * math.log(3),
            "token_accuracy": 1 / 2,
            "agreement": 0,
        },
    ),
    "of what counts": (
        (((1 / 4, 3 / 4), (1 / 2, 1 / 2)), ((1 / 3, 2 / 3), (1 / 5, 4 / 5)), TARGETS),
        {"mask": torch.tensor([1, 0])},
        {
            "soft_loss": jsd_by_hand((1 / 4, 3 / 4), (1 / 3, 2 / 3), 0.5),
            "hard_loss": NLL[0],
            "entropy": math.log(4) - 3 / 4 * math.log(3),
            "token_accuracy": 1,
            "agreement": 1,
        },
    ),
    "of nothing": (
        (STUDENT, TEACHER, TARGETS),
        {"mask": torch.tensor([0, 0])},
        dict.fromkeys(("soft_loss", "hard_loss", "entropy", "token_accuracy", "agreement"), 0),
    ),
    "no targets, tempered": (
        (STUDENT, TEACHER),
        {"temperature": 0.5},
        {"hard_loss": 0, "token_accuracy": 0, "entropy": math.log(10) - 9 / 10 * math.log(9)},
    ),
}


@pytest.mark.parametrize(("operands", "options", "expected"), METRICS.values(), ids=METRICS)
def test_metrics_by_hand(operands, options, expected):
    _, metrics = two_tokens(*operands, **options)
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected, rel=1e-12)
    assert metrics.keys() == METRICS["all"][2].keys()


@pytest.mark.parametrize("e", [2.0**-20, 2.0**-26])
def test_almost_equal_distributions_keep_their_digits(e):
    """Divergences of 1e-13 and 1e-17, known from the first term of their series."""
    vocab = 1000
    # The teacher gives all ids the same probability; the student's logits are e for one half of them and -e
    # for the other.
    signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).repeat(vocab // 2, 1)
    student = {"hidden": torch.tensor([[e]], dtype=torch.float64).requires_grad_(), "weight": signs}
    teacher = {"teacher_hidden": torch.zeros(1, 1, dtype=torch.float64), "teacher_weight": signs}

    expected = {
        ("jsd", 0.5): (e**2 / 8, e / 4),
        ("jsd", 0.1): (0.1 * 0.9 * e**2 / 2, 0.1 * 0.9 * e),
        ("forward_kl", None): (e**2 / 2, e),
        ("reverse_kl", None): (e**2 / 2, e),
        ("skewed_kl", None): (0.9**2 * e**2 / 2, 0.9**2 * e),
        ("total_variation", None): (e / 2, 1 / 2),
    }
    for (divergence, beta), (value, slope) in expected.items():
        options = {"divergence": divergence} | ({} if beta is None else {"beta": beta})
        loss, _ = reference.distillation(**student, **teacher, **options)
        (gradient,) = torch.autograd.grad(loss, student["hidden"])
        assert loss.item() == pytest.approx(value, rel=1e-6), options
        assert gradient.item() == pytest.approx(slope, rel=1e-6), options


def test_almost_parallel_logits_keep_their_digits():
    angle = 2.0**-22
    student = torch.tensor([[math.cos(angle)], [math.sin(angle)]], dtype=torch.float64)
    teacher = torch.tensor([[3.0], [0.0]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss, _ = reference.distillation(
        one, student, teacher_hidden=one, teacher_weight=teacher, divergence="cosine"
    )
    assert loss.item() == pytest.approx(angle**2 / 2, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distributions_far_apart_stay_finite(dtype):
    """Odds of e^1000 against each other: probabilities underflow, their logarithms do not."""
    hidden = torch.eye(2, dtype=dtype)
    far = {
        "hidden": hidden.clone().requires_grad_(),
        "weight": torch.tensor([[500.0, -500.0], [-500.0, 500.0]], dtype=dtype),
    }
    teacher = {"teacher_hidden": hidden, "teacher_weight": -far["weight"]}
    expected = {
        "forward_kl": 1000,
        "reverse_kl": 1000,
        "jsd": math.log(2),
        "skewed_kl": -math.log(0.1),
        "total_variation": 1,
    }
    for divergence, value in expected.items():
        loss, _ = reference.distillation(**far, **teacher, divergence=divergence)
        assert loss.item() == pytest.approx(value, rel=1e-6), divergence
        assert torch.autograd.grad(loss, far["hidden"])[0].isfinite().all(), divergence
