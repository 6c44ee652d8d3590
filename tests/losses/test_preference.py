"""Preference losses against the fp64 reference: every type and option, in every strategy, padded and
packed."""

import math

import pytest
import torch
from torch import Tensor

from logitless import BudgetWarning, CPOLoss, DPOLoss, KTOLoss, ORPOLoss, SimPOLoss
from logitless.engine import budget as engine_budget
from logitless.losses.dpo_types import DIVERGENCES, DPO_TYPES
from logitless.losses.kto import KTO_LOSSES
from logitless.losses.reference_free import CPO_LOSSES
from tests import reference
from tests.cases import DTYPES
from tests.support import (
    DEVICE,
    AllocationWatcher,
    GemmCounter,
    assert_close,
    assert_metrics_close,
    relative_error,
    run,
)

H, V, H_REF = 16, 300, 12
ROW = V * 8  # bytes of a row of fp64 logits
SCRATCH = 6 * 8 * 2**10  # of the twins beside them

MATHS = {
    DPOLoss: reference.dpo,
    ORPOLoss: reference.orpo,
    CPOLoss: reference.cpo,
    SimPOLoss: reference.simpo,
    KTOLoss: reference.kto,
}
SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired")

VARIANTS = {
    **{
        f"dpo {name}": (DPOLoss, {"loss_type": name, "label_smoothing": 0.1 if name == "exo_pair" else 0.0})
        for name in DPO_TYPES
    },
    **{f"dpo {name} smoothed": (DPOLoss, {"loss_type": name, "label_smoothing": 0.2}) for name in SMOOTHED},
    **{f"dpo {name}": (DPOLoss, {"f_divergence_type": name}) for name in DIVERGENCES},
    "dpo alpha near 1": (
        DPOLoss,
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1 + 1e-9},
    ),
    "dpo ipo of scores": (DPOLoss, {"f_divergence_type": "js_divergence", "loss_type": "ipo", "beta": 0.3}),
    "dpo averaged": (DPOLoss, {"average_logps": True, "loss_type": ("sigmoid", "nca_pair", "aot_unpaired")}),
    "dpo averaged scores": (DPOLoss, {"average_logps": True, "f_divergence_type": "js_divergence"}),
    "dpo ipo of sums": (DPOLoss, {"average_logps": False, "loss_type": ("ipo", "sigmoid_norm")}),
    "dpo length-desensitized": (DPOLoss, {"ld_alpha": 0.3}),
    "dpo weighted": (DPOLoss, {"use_weighting": True, "beta": 0.5}),
    "dpo weighted list": (DPOLoss, {"use_weighting": True, "loss_type": ("hinge", "sft", "sppo_hard")}),
    "dpo reference-free": (DPOLoss, {"reference_free": True}),
    "dpo list": (DPOLoss, {"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.5)}),
    "dpo sorted list": (DPOLoss, {"loss_type": ["aot", "sft"], "label_smoothing": 0.1}),
    "dpo discopop cold": (DPOLoss, {"loss_type": "discopop", "discopop_tau": 0.5, "beta": 0.3}),
    "orpo": (ORPOLoss, {"beta": 0.7}),
    "orpo with prompts": (ORPOLoss, {"beta": 0.7}),
    **{f"cpo {name}": (CPOLoss, {"loss_type": name, "beta": 0.3, "cpo_alpha": 0.6}) for name in CPO_LOSSES},
    "cpo averaged": (CPOLoss, {"average_logps": True}),
    "cpo ipo of sums": (CPOLoss, {"average_logps": False, "loss_type": "ipo"}),
    "cpo smoothed": (CPOLoss, {"label_smoothing": 0.2}),
    "cpo simpo smoothed": (CPOLoss, {"loss_type": "simpo", "label_smoothing": 0.2, "simpo_gamma": 1.1}),
    "cpo without nll": (CPOLoss, {"cpo_alpha": 0.0}),
    "alphapo": (CPOLoss, {"loss_type": "simpo", "cpo_alpha": 0.0, "alpha": 0.25}),
    "simpo": (SimPOLoss, {"gamma": 0.9}),
    **{
        f"kto {name}": (KTOLoss, {"loss_type": name, "desirable_weight": 1.3, "undesirable_weight": 0.6})
        for name in KTO_LOSSES
    },
}
# Rows that the budget holds; a pair has 20 to 45.
STRATEGIES = {"resident": (True, 64), "recompute": (True, 3), "row_scaled": (False, 5)}
HEADS = ({}, {"softcap": 9.0, "logit_scale": 0.7}, {"temperature": 1.3}, {"softcap": 9.0, "temperature": 0.8})
REFERENCES = ("sequence", "token", "hidden", "hidden with its own head")


class Problem:
    """Six sequences of unequal lengths, prompts masked, one of them with nothing supervised."""

    def __init__(self, kind, variant: str, *, packed: bool, given: str, seed: int, dtype=torch.float64):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(
            DEVICE, dtype
        )
        lengths = [9, 14, 31, 11, 12, 14] if packed else [15] * 6
        self.starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)
        self.shape = (sum(lengths),) if packed else (6, 15)
        self.hidden, self.weight, self.bias = (
            self.random(*self.shape, H),
            self.random(V, H) / 3,
            self.random(V),
        )
        ids = torch.randint(0, V, (sum(lengths),), generator=generator)
        prompt = torch.rand(sum(lengths), generator=generator) < 0.3
        prompt[self.starts[4] : self.starts[5]] = True
        self.targets = ids.masked_fill(prompt, -100).view(self.shape).to(DEVICE)
        self.options = {"cu_seqlens": self.starts} if packed else {}
        self.own_head = {}
        if kind is KTOLoss:
            self.options |= {
                "labels": torch.tensor([True, False, True, True, False, False], device=DEVICE)
            } | ({"kl": 0.4} if "apo" not in variant else {})
        if "with prompts" in variant:
            padding = torch.rand(sum(lengths), generator=generator) < 0.1
            self.options["nll_targets"] = torch.where(padding & prompt, -100, ids).view(self.shape).to(DEVICE)
        if issubclass(kind, (DPOLoss, KTOLoss)) and "free" not in variant:
            self.refer(given)

    def refer(self, given: str) -> None:
        hidden, weight, bias = self.random(*self.shape, H_REF), self.random(V, H_REF) / 3, self.random(V)
        if given.startswith("hidden"):
            self.options |= {"ref_hidden": hidden, "ref_weight": weight, "ref_bias": bias}
            self.own_head = {"ref_softcap": 7.0, "ref_logit_scale": 0.5} if "own" in given else {}
            return
        per_token = torch.where(
            self.targets == -100, 7.0, -self.random(*self.shape).abs() * 3
        )  # what stands at a prompt is nobody's
        sequences = [
            per_token.view(-1)[a:b][self.targets.view(-1)[a:b] != -100].sum()
            for a, b in zip(self.starts[:-1], self.starts[1:])
        ]
        self.options["ref_logps"] = per_token if given == "token" else torch.stack(sequences)


def truth_of(kind, settings: dict, problem: Problem, **maths):
    """The reference as a function of the operands; what its arguments lack of ours are the engine's
    affairs."""
    head = {name: settings[name] for name in ("softcap", "logit_scale", "temperature") if name in settings}
    extra = {}
    if "ref_hidden" in problem.options:
        extra = {
            f"ref_{name}": problem.own_head.get(f"ref_{name}", head.get(name))
            for name in ("softcap", "logit_scale")
        }
        extra = {name: value for name, value in extra.items() if value is not None}
    options = dict(problem.options)
    if "ref_logps" in options and options["ref_logps"].shape == problem.targets.shape:
        options["ref_logps"] = options["ref_logps"].masked_fill(problem.targets == -100, 0.0)
    found = {}

    def loss(hidden, weight, targets, *, bias):
        value, found["metrics"] = MATHS[kind](
            hidden, weight, targets, bias=bias, **options, **head, **extra, **maths
        )
        return value

    return loss, found


def cases():
    for number, (name, (kind, options)) in enumerate(VARIANTS.items()):
        for turn, strategy in enumerate(STRATEGIES):
            for packed in (False, True):
                mixed = number + turn + 3 * packed
                given, head, reduction = (
                    REFERENCES[mixed % 4],
                    HEADS[(number + 2 * turn + packed) % 4],
                    ("mean", "sum")[number % 2],
                )
                num_items = 2.5 if reduction == "mean" and turn == 1 else None
                values = (
                    name,
                    kind,
                    options,
                    strategy,
                    packed,
                    given,
                    head,
                    reduction,
                    num_items,
                    bool(mixed % 3),
                )
                yield pytest.param(*values, id=f"{name}-{strategy}-{'packed' if packed else 'padded'}")


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(
    "name, kind, options, strategy, packed, given, head, reduction, num_items, compact", list(cases())
)
def test_equals_the_reference(
    name, kind, options, strategy, packed, given, head, reduction, num_items, compact
):
    problem = Problem(kind, name, packed=packed, given=given, seed=len(name))
    trainable, rows = STRATEGIES[strategy]
    batch_scope = kind is DPOLoss and any(word in str(options.get("loss_type")) for word in ("aot",))
    # With compact=False the host does not know where packed groups end, and takes all of them for one.
    if strategy == "resident":
        rows = 200 if batch_scope or (packed and not compact) else 40 if kind is KTOLoss else rows
    settings = (
        options
        | head
        | problem.own_head
        | {"reduction": reduction, "compact": compact, "logits_budget": SCRATCH + rows * ROW}
    )
    loss = kind(**settings)
    truth_loss, found = truth_of(kind, settings, problem, reduction=reduction, num_items=num_items, **options)
    requires = ("hidden", "weight", "bias") if trainable else ("hidden",)
    operands = problem.hidden, problem.weight, problem.targets, problem.bias
    truth = run(truth_loss, *operands, 1.7, requires)
    ours = run(
        lambda h, w, t, *, bias: loss(h, w, t, bias=bias, num_items=num_items, **problem.options),
        *operands,
        1.7,
        requires,
    )
    assert ours.output.plan.strategy == strategy, ours.output.plan.describe()
    assert relative_error(ours.value, truth.value) < 1e-12
    for operand, gradient in truth.grads.items():
        assert gradient.norm() > 0, operand
        assert relative_error(ours.grads[operand], gradient) < 1e-10, operand
    assert_metrics_close(ours.output.metrics, found["metrics"], 1e-10)
    with torch.no_grad():
        only = loss(*operands[:3], bias=problem.bias, num_items=num_items, **problem.options)
    assert only.plan.strategy == "loss_only"
    assert relative_error(only.loss, truth.value) < 1e-12
    assert_metrics_close(only.metrics, found["metrics"], 1e-10)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
def test_a_long_pair_is_recomputed_and_the_others_are_resident():
    problem = Problem(DPOLoss, "", packed=True, given="hidden", seed=1)
    truth_loss, _ = truth_of(DPOLoss, {}, problem)
    loss = DPOLoss(logits_budget=SCRATCH + 22 * ROW)
    operands = problem.hidden, problem.weight, problem.targets, problem.bias
    truth = run(truth_loss, *operands)
    ours = run(lambda h, w, t, *, bias: loss(h, w, t, bias=bias, **problem.options), *operands)
    assert ours.output.plan.strategy == "mixed", ours.output.plan.describe()
    for operand, gradient in truth.grads.items():
        assert relative_error(ours.grads[operand], gradient) < 1e-10, operand


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen head"])
@pytest.mark.parametrize("name", ["dpo sigmoid", "dpo weighted", "orpo", "cpo simpo", "kto kto"])
def test_within_twice_the_naive_error(name, trainable, dtype):
    kind, options = VARIANTS[name]
    problem = Problem(kind, name, packed=False, given="hidden", seed=3, dtype=dtype)
    requires = ("hidden", "weight", "bias") if trainable else ("hidden",)
    truth_loss, _ = truth_of(kind, {}, problem, **options)
    naive = run(truth_loss, problem.hidden, problem.weight, problem.targets, problem.bias, 1.7, requires)
    ours = run(
        lambda h, w, t, *, bias: kind(**options)(h, w, t, bias=bias, **problem.options),
        problem.hidden,
        problem.weight,
        problem.targets,
        problem.bias,
        1.7,
        requires,
    )
    problem.options = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in problem.options.items()
    }
    truth_loss, _ = truth_of(kind, {}, problem, **options)
    exact = [x.double() for x in (problem.hidden, problem.weight, problem.bias)]
    truth = run(truth_loss, *exact[:2], problem.targets, exact[2], 1.7, requires)
    # One number may be right by luck, in the naive computation as in ours.
    assert_close(
        ours.value,
        truth.value,
        max(relative_error(naive.value, truth.value), torch.finfo(dtype).eps),
        name="loss",
    )
    for operand in truth.grads:
        assert_close(ours.grads[operand], truth.grads[operand], naive.grads[operand], name=f"d_{operand}")


@pytest.mark.parametrize("name", ["dpo sigmoid", "dpo weighted", "kto kto", "simpo", "dpo aot smoothed"])
def test_unreduced(name):
    """reduction="none" gives one loss per pair (or sequence), whose gradients are right for any upstream
    vector."""
    kind, options = VARIANTS[name]
    problem = Problem(kind, name, packed=False, given="hidden", seed=4)
    hidden = problem.hidden.requires_grad_()
    out = kind(**options, reduction="none")(
        hidden, problem.weight, problem.targets, bias=problem.bias, **problem.options
    )
    assert out.loss.shape == ((6,) if kind is KTOLoss else (3,))
    truth_loss, found = truth_of(kind, {}, problem, reduction="sum", **options)
    assert (
        relative_error(
            out.loss.sum().detach(),
            truth_loss(hidden, problem.weight, problem.targets, bias=problem.bias).detach(),
        )
        < 1e-12
    )
    assert_metrics_close(out.metrics, found["metrics"], 1e-10)
    upstream = torch.randn(
        out.loss.shape, dtype=torch.float64, generator=torch.Generator(DEVICE).manual_seed(0)
    )
    (ours,) = torch.autograd.grad(out.loss, hidden, upstream)
    rows = (
        [truth_rows(kind, options, problem, hidden, row) for row in range(len(upstream))]
        if "aot" not in name
        else None
    )
    if rows:
        theirs = sum(torch.autograd.grad(row, hidden)[0] * g for row, g in zip(rows, upstream, strict=True))
        assert relative_error(ours, theirs) < 1e-10


@pytest.mark.parametrize("name", ["dpo sigmoid", "kto kto"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_shifted_labels_beside_reference_hidden_states(name, reduction):
    """Position i of policy and reference predicts label i + 1, reduced or not."""
    kind, options = VARIANTS[name]
    problem = Problem(kind, name, packed=False, given="hidden", seed=4)
    loss = kind(**options, reduction=reduction)
    inputs = {"bias": problem.bias, **problem.options}
    ours = loss(problem.hidden, problem.weight, problem.targets, shift=True, **inputs)
    inputs["ref_hidden"] = inputs["ref_hidden"][:, :-1]
    aligned = loss(problem.hidden[:, :-1], problem.weight, problem.targets[:, 1:], **inputs)
    assert relative_error(ours.loss, aligned.loss) < 1e-12


def truth_rows(kind, options, problem, hidden, row):
    """The reference's loss of one pair (or one sequence) of a padded problem."""
    keep = [row] if kind is KTOLoss else [row, row + 3]
    smaller = {
        name: x[keep] if isinstance(x, Tensor) and x.shape[:1] == (6,) else x
        for name, x in problem.options.items()
    }
    part = type("Part", (), {"options": smaller, "own_head": {}, "targets": problem.targets[keep]})
    loss, _ = truth_of(kind, {}, part, reduction="sum", **options)
    return loss(hidden[keep], problem.weight, part.targets, bias=problem.bias)


def test_kl_from_a_second_set_of_hidden_states():
    problem = Problem(KTOLoss, "kto", packed=False, given="hidden", seed=5)
    kl_hidden, kl_ref = problem.random(4, 7, H), problem.random(4, 7, H_REF)
    kl_targets = torch.randint(0, V, (4, 7), generator=torch.Generator(DEVICE).manual_seed(1)).to(DEVICE)
    kl_targets[:, ::3] = -100
    policy, _, _ = reference.token_logprobs(kl_hidden, problem.weight, kl_targets, bias=problem.bias)
    ref, _, _ = reference.token_logprobs(
        kl_ref, problem.options["ref_weight"], kl_targets, bias=problem.options["ref_bias"]
    )
    gap = (policy.sum() - ref.sum()) / 4
    operands = problem.hidden.requires_grad_(), problem.weight, problem.targets

    def with_kl(kl):
        return KTOLoss()(*operands, bias=problem.bias, **problem.options | {"kl": kl})

    given = {"kl_hidden": kl_hidden.requires_grad_(), "kl_targets": kl_targets}
    swapped = {"kl_hidden": kl_hidden, "kl_targets": kl_targets, "ref_logps": policy.sum(1) + 1.0}
    for mapping, kl in (
        (given | {"ref_hidden": kl_ref}, gap.clamp(min=0)),
        (given | {"ref_logps": ref.masked_fill(kl_targets == -100, 9.0)}, gap.clamp(min=0)),
        (given | {"ref_logps": ref.sum(1)}, gap.clamp(min=0)),
        (given | {"ref_logps": policy.sum(1) - 2.0}, torch.tensor(2.0)),
        (swapped, torch.tensor(0.0)),
    ):
        found, expected = with_kl(mapping), with_kl(kl.item())
        assert relative_error(found.loss, expected.loss) < 1e-12
        assert abs(found.metrics["kl"].item() - kl.item()) < 1e-10
    with_kl(given | {"ref_logps": ref.sum(1)}).loss.backward()
    assert kl_hidden.grad is None


def test_logits_over_positions():
    problem = Problem(ORPOLoss, "orpo", packed=True, given="", seed=6)
    bias = problem.bias
    out = ORPOLoss(logits_over="position", logit_scale=0.5, temperature=2.0)(
        problem.hidden, problem.weight, problem.targets, bias=bias, **problem.options
    )
    logits = (problem.hidden @ problem.weight.T + bias) * 0.25
    half = problem.starts[3]
    assert abs(out.metrics["logits/chosen"] - logits[:half].mean()) < 1e-5
    assert abs(out.metrics["logits/rejected"] - logits[half:].mean()) < 1e-5


# -- cost


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(
    "trainable, rows, given, products",
    [
        (True, 200, None, 3),
        (True, 3, None, 4),
        (False, 3, None, 2),
        (True, 200, "hidden", 4),
        (False, 3, "hidden", 3),
    ],
)
def test_products(trainable, rows, given, products):
    """3 products where pairs fit the budget, 2 with a frozen head; one more for a reference that is
    walked."""
    problem = Problem(DPOLoss, "", packed=False, given="sequence", seed=7)
    problem.targets = problem.targets.clamp(min=0)
    if given:
        problem.options = {
            "ref_hidden": problem.random(*problem.shape, H),
            "ref_weight": problem.random(V, H),
        }
    loss = DPOLoss(logits_budget=SCRATCH + rows * ROW)
    weight = problem.weight.requires_grad_(trainable)
    with GemmCounter(90, V, H) as counter:
        loss(problem.hidden.requires_grad_(), weight, problem.targets, **problem.options).loss.backward()
    assert counter.gemms == pytest.approx(products, abs=0.02)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen head"])
@pytest.mark.parametrize("T", [16, 128, 1024])
def test_one_pair_of_any_length_keeps_the_budget(T, trainable):
    hidden, weight = (
        torch.randn(2, T, H, device=DEVICE),
        torch.randn(V, H, device=DEVICE).requires_grad_(trainable),
    )
    ref_hidden, ref_weight = torch.randn(2, T, H, device=DEVICE), torch.randn(V, H, device=DEVICE)
    targets = torch.randint(0, V, (2, T), device=DEVICE)
    budget, hidden = 160 * 2**10, hidden.requires_grad_()
    watch = AllocationWatcher()
    with watch:
        out = DPOLoss(logits_budget=budget)(
            hidden, weight, targets, ref_hidden=ref_hidden, ref_weight=ref_weight
        )
        out.loss.backward()
    gradients = hidden.nbytes + 2 * V * H * 4
    per_token = 64 * 4 * 2 * T
    assert watch.peak <= budget * 1.02 + gradients + 2 * hidden.nbytes + per_token, out.plan.describe()


# -- extremes


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "orpo with prompts"])
@pytest.mark.parametrize("what", ["nothing supervised", "rejected empty", "chosen empty", "equal", "certain"])
def test_extremes_are_finite(name, what):
    kind, options = VARIANTS[name]
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(4, 5, 8, generator=generator).to(DEVICE)
    weight = torch.randn(30, 8, generator=generator).to(DEVICE)
    targets = torch.randint(0, 30, (4, 5), generator=generator).to(DEVICE)
    if what == "nothing supervised":
        targets[:] = -100
    elif what == "rejected empty":
        targets[2:] = -100
    elif what == "chosen empty":
        targets[:2] = -100
    elif what == "equal":
        hidden[2:], targets[2:] = hidden[:2], targets[:2]
    else:
        hidden = 100 * weight[targets]
    inputs = (
        {
            "labels": torch.tensor([True, True, False, False], device=DEVICE),
        }
        if kind is KTOLoss
        else {}
    )
    if name == "kto kto":
        inputs["kl"] = 0.1
    if issubclass(kind, (DPOLoss, KTOLoss)) and kind(**options).needs_reference:
        inputs["ref_logps"] = torch.full((4,), -3.0, device=DEVICE)
    ours = run(
        lambda h, w, t, *, bias: kind(**options)(h, w, t, bias=bias, **inputs), hidden, weight, targets
    )
    values = [ours.value, *ours.grads.values(), *ours.output.metrics.values()]
    assert all(x.isfinite().all() for x in values)
    if what == "nothing supervised":
        assert not ours.grads["hidden"].any() and not ours.grads["weight"].any()


@pytest.mark.parametrize("name", ["dpo discopop", "dpo forward_kl", "dpo alpha_divergence", "alphapo"])
@pytest.mark.parametrize("gap", [300.0, -300.0])
def test_huge_log_ratios_are_finite(name, gap):
    kind, options = VARIANTS[name]
    hidden, weight = torch.randn(2, 5, 8, device=DEVICE), torch.randn(30, 8, device=DEVICE)
    inputs = {"ref_logps": torch.tensor([gap, -gap], device=DEVICE)} if kind is DPOLoss else {}
    options = options | ({"beta": 5.0} if kind is DPOLoss else {"alpha": gap})
    targets = torch.randint(0, 30, (2, 5), device=DEVICE)
    ours = run(
        lambda h, w, t, *, bias: kind(**options)(h, w, t, bias=bias, **inputs), hidden, weight, targets
    )
    assert all(x.isfinite().all() for x in (ours.value, *ours.grads.values()))


@pytest.mark.parametrize(
    "name, more",
    [
        *(
            (name, {})
            for name in ("dpo sigmoid", "dpo list", "orpo with prompts", "cpo sigmoid", "simpo", "kto kto")
        ),
        *((name, {"logits_over": "position"}) for name in ("orpo with prompts", "cpo sigmoid", "simpo")),
    ],
)
def test_a_masked_vocabulary_gives_no_nan(name, more):
    """A bias of -inf at ids that no target has: mean logits of -inf, as in TRL, and all else as without these
    ids."""
    kind, options = VARIANTS[name]
    options = options | more
    problem = Problem(kind, name, packed=False, given="sequence", seed=2)
    kept = V - 20
    targets = torch.where(problem.targets == -100, -100, problem.targets % kept)
    if "nll_targets" in problem.options:
        labels = problem.options["nll_targets"]
        problem.options["nll_targets"] = torch.where(labels == -100, -100, labels % kept)
    masked = problem.bias.clone()
    masked[kept:] = -math.inf
    outs = [
        run(
            lambda h, w, t, *, bias: kind(**options)(h, w, t, bias=bias, **problem.options),
            problem.hidden,
            w,
            targets,
            b,
        )
        for w, b in ((problem.weight, masked), (problem.weight[:kept], problem.bias[:kept]))
    ]
    ours, cut = outs
    assert relative_error(ours.value, cut.value) < 1e-12
    assert relative_error(ours.grads["hidden"], cut.grads["hidden"]) < 1e-10
    for metric, value in ours.output.metrics.items():
        if metric.startswith("logits/"):
            assert value == -math.inf, metric
        else:
            assert abs(value - cut.output.metrics[metric]) < 1e-10, metric


def test_an_impossible_token_stays_on_its_side():
    """A target of probability 0 makes its own side's numbers infinite, and not the other's NaN."""
    problem = Problem(SimPOLoss, "", packed=False, given="", seed=2)
    problem.targets[3, 5], problem.bias[7] = 7, -math.inf
    problem.targets[:3][problem.targets[:3] == 7] = 8
    rejected = (problem.hidden[3:] @ problem.weight.T + problem.bias).log_softmax(-1)
    assert rejected[0, 5, 7] == -math.inf
    with torch.no_grad():
        for loss in (ORPOLoss(), CPOLoss()):
            out = loss(problem.hidden, problem.weight, problem.targets, bias=problem.bias)
            assert out.loss.isfinite() and out.metrics["nll_loss"].isfinite(), type(loss)
            assert out.metrics["logps/chosen"].isfinite() and out.metrics["logps/rejected"] == -math.inf, (
                type(loss)
            )
        labels = torch.tensor([True] * 3 + [False] * 3, device=DEVICE)
        ref_logps = torch.zeros(6, dtype=torch.float64, device=DEVICE)
        out = KTOLoss()(
            problem.hidden,
            problem.weight,
            problem.targets,
            bias=problem.bias,
            labels=labels,
            kl=0.1,
            ref_logps=ref_logps,
        )
        assert out.loss.isfinite() and out.metrics["rewards/chosen"].isfinite()
        assert out.metrics["logps/rejected"] == -math.inf and out.metrics["rewards/margins"] == math.inf


# -- numbers by hand: one token a sequence, p = softmax([log 3, 0]), so that log p is log 3/4 or log 1/4


@pytest.mark.parametrize(
    "loss, expected",
    [
        (DPOLoss(beta=1.0, reference_free=True), -math.log(3 / 4)),  # sigma(log 3) = 3/4
        (DPOLoss(beta=1.0, reference_free=True, loss_type="hinge"), 0.0),
        (DPOLoss(beta=0.5, reference_free=True, loss_type="ipo"), (math.log(3) - 1) ** 2),
        (DPOLoss(reference_free=True, loss_type="sft"), -math.log(3 / 4)),
        (ORPOLoss(beta=2.0), -math.log(3 / 4) - 2 * math.log(9 / 10)),  # odds 3 against 1/3
        (CPOLoss(beta=1.0, cpo_alpha=0.5), -1.5 * math.log(3 / 4)),
        (SimPOLoss(beta=1.0, gamma=math.log(3)), math.log(2)),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, float) else "",
)
def test_by_hand(loss, expected):
    hidden, weight = torch.ones(2, 1, 1), torch.tensor([[math.log(3)], [0.0]])
    value = loss(hidden, weight, torch.tensor([[0], [1]])).loss
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_kto_by_hand():
    hidden, weight, targets = (
        torch.ones(2, 1, 1),
        torch.tensor([[math.log(3)], [0.0]]),
        torch.tensor([[0], [1]]),
    )
    out = KTOLoss(beta=1.0, desirable_weight=2.0)(
        hidden,
        weight,
        targets,
        labels=torch.tensor([True, False]),
        kl=math.log(2),
        ref_logps=torch.tensor([math.log(1 / 4)] * 2),
    )
    # Ratios log 3 and 0: 2 (1 - sigma(log 3/2)) and 1 - sigma(log 2), over two sequences.
    assert out.loss.item() == pytest.approx((2 * 2 / 5 + 1 / 3) / 2, abs=1e-6)


# -- bad input


def call(loss, B=4, **inputs):
    return loss(torch.zeros(B, 3, 4), torch.zeros(7, 4), torch.zeros(B, 3, dtype=torch.int64), **inputs)


REF = {"ref_logps": torch.zeros(4, device=DEVICE)}
PACKED = torch.tensor([0, 2, 4, 6], device=DEVICE)
BAD = {
    "odd": (lambda: call(SimPOLoss(), 3), "hidden: expected a multiple of 2"),
    "no reference": (lambda: call(DPOLoss()), "ref_logps: expected one of"),
    "both references": (
        lambda: call(DPOLoss(), ref_hidden=torch.zeros(4, 3, 4), **REF),
        "ref_logps: expected one of",
    ),
    "needless reference": (
        lambda: call(DPOLoss(reference_free=True), **REF),
        "ref_logps: expected no reference",
    ),
    "no reference head": (
        lambda: call(DPOLoss(), ref_hidden=torch.zeros(4, 3, 4)),
        "ref_weight: expected the reference's head",
    ),
    "reference head": (
        lambda: call(DPOLoss(), ref_hidden=torch.zeros(4, 3, 5), ref_weight=torch.zeros(7, 4)),
        r"ref_weight: expected shape \(7, 5\)",
    ),
    "reference tokens": (
        lambda: call(DPOLoss(), ref_hidden=torch.zeros(4, 2, 4), ref_weight=torch.zeros(7, 4)),
        "ref_hidden: expected shape",
    ),
    "reference bias": (
        lambda: call(
            DPOLoss(), ref_hidden=torch.zeros(4, 3, 4), ref_weight=torch.zeros(7, 4), ref_bias=torch.zeros(3)
        ),
        "ref_bias: expected",
    ),
    "reference shape": (
        lambda: call(DPOLoss(), ref_logps=torch.zeros(3)),
        r"ref_logps: expected shape \(4,\)",
    ),
    "loss type": (lambda: DPOLoss(loss_type="dpo"), "loss_type: expected one of .*'sigmoid'.*'sft'"),
    "no loss type": (lambda: DPOLoss(loss_type=()), "loss_type: expected at least one"),
    "loss weights": (
        lambda: DPOLoss(loss_type=("ipo", "sft"), loss_weights=(1.0,)),
        "loss_weights: expected 2 numbers",
    ),
    "exo": (lambda: DPOLoss(loss_type="exo_pair"), "label_smoothing: expected .* for exo_pair"),
    "robust": (
        lambda: DPOLoss(loss_type="robust", label_smoothing=0.5),
        "label_smoothing: expected less than 0.5",
    ),
    "smoothing": (lambda: DPOLoss(label_smoothing=1.1), "label_smoothing: expected a number in"),
    "divergence": (lambda: DPOLoss(f_divergence_type="kl"), "f_divergence_type: expected one of"),
    "divergence of a rating": (
        lambda: DPOLoss(f_divergence_type="forward_kl", loss_type="nca_pair"),
        "f_divergence_type: expected 'reverse_kl' for",
    ),
    "weighted sort": (lambda: DPOLoss(use_weighting=True, loss_type="aot"), "use_weighting: expected False"),
    "beta": (lambda: DPOLoss(beta=0.0), "beta: expected a positive"),
    "ld_alpha": (lambda: DPOLoss(ld_alpha=1.5), "ld_alpha: expected"),
    "tau": (lambda: DPOLoss(discopop_tau=0.0), "discopop_tau: expected"),
    "cpo type": (lambda: CPOLoss(loss_type="dpo"), "loss_type: expected one of .*'simpo'"),
    "kto type": (lambda: KTOLoss(loss_type="dpo"), "loss_type: expected one of 'kto'"),
    "labels": (
        lambda: call(KTOLoss(), labels=torch.zeros(3, dtype=torch.bool), kl=0.0, **REF),
        r"labels: expected shape \(4,\)",
    ),
    "label shape": (
        lambda: call(KTOLoss(), labels=torch.zeros(4, 1), kl=0.0, **REF),
        "labels: expected shape",
    ),
    "no kl": (lambda: call(KTOLoss(), labels=torch.zeros(4), **REF), "kl: expected a number"),
    "kl parts": (
        lambda: call(KTOLoss(), labels=torch.zeros(4), kl={"kl_hidden": None}, **REF),
        "kl: expected kl_hidden, kl_targets",
    ),
    "nll targets": (
        lambda: call(ORPOLoss(), nll_targets=torch.zeros(4, 2)),
        "nll_targets: expected targets' shape",
    ),
    "positions": (
        lambda: ORPOLoss(logits_over="position", softcap=3.0),
        "logits_over: expected 'completion' with a softcap",
    ),
    "flat": (
        lambda: SimPOLoss()(torch.zeros(6, 4), torch.zeros(7, 4), torch.zeros(6, dtype=torch.int64)),
        r"hidden: expected shape \(B, T",
    ),
    "boundaries": (
        lambda: SimPOLoss()(
            torch.zeros(9, 4),
            torch.zeros(7, 4),
            torch.zeros(9, dtype=torch.int64),
            cu_seqlens=torch.tensor([0, 2, 8]),
        ),
        "cu_seqlens: expected non-decreasing boundaries from 0 to 9",
    ),
    "falling boundaries": (
        lambda: SimPOLoss()(
            torch.zeros(6, 4),
            torch.zeros(7, 4),
            torch.zeros(6, dtype=torch.int64),
            cu_seqlens=torch.tensor([0, 7, 6]),
        ),
        "cu_seqlens: expected non-decreasing",
    ),
    "boundary dtype": (
        lambda: SimPOLoss()(
            torch.zeros(6, 4),
            torch.zeros(7, 4),
            torch.zeros(6, dtype=torch.int64),
            cu_seqlens=PACKED[:3] * 1.0,
        ),
        "cu_seqlens: expected .* int64",
    ),
    "padded and packed": (
        lambda: call(SimPOLoss(), cu_seqlens=PACKED[:3]),
        r"hidden: expected shape \(N, H\) with cu_seqlens",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    attempt, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        attempt()


def test_a_budget_below_a_pair_warns_how_much_would_do():
    problem = Problem(SimPOLoss, "", packed=False, given="", seed=8)
    engine_budget._WARNED.clear()
    with pytest.warns(BudgetWarning, match="set logits_budget="):
        SimPOLoss(logits_budget=SCRATCH + 4 * ROW)(
            problem.hidden.requires_grad_(), problem.weight.requires_grad_(), problem.targets
        )


@pytest.mark.parametrize("name", ["dpo sigmoid", "orpo with prompts", "kto kto"])
def test_compiles_from_outside(name):
    kind, options = VARIANTS[name]
    problem = Problem(kind, name, packed=False, given="hidden", seed=9, dtype=torch.float32)
    loss = kind(**options)
    hidden, weight = problem.hidden.requires_grad_(), problem.weight.requires_grad_()

    def model(h, w, t):
        return loss(h * 2, w, t, **problem.options).loss

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(hidden, weight, problem.targets), (hidden, weight))
    theirs = torch.autograd.grad(model(hidden, weight, problem.targets), (hidden, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-5
