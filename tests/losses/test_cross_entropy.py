"""Cross-entropy against the fp64 reference: every pair of options meets in one case, then the regimes that
break a fused loss."""

from dataclasses import FrozenInstanceError, fields
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from logitless import CrossEntropyLoss, Term, linear_cross_entropy
from tests import reference
from tests.cases import SHAPES, TRAINABLE, covering_array, dtypes, one_row_warning, operands
from tests.support import DEVICE, assert_close, relative_error, row_product_error, run, sum_error

NUM_ITEMS = {
    "": None,
    "int": 7,
    "float": 2.5,
    "tensor": torch.tensor(33, device=DEVICE),
    "float tensor": torch.tensor(2.5, device=DEVICE),
}
BUDGETS = {"": None, "few rows": lambda tokens, row: 10 * row, "third": lambda tokens, row: tokens * row // 3}

FACTORS = {
    "shape": list(SHAPES),
    "trainable": [name for name in TRAINABLE if name != "nothing"],
    "reduction": ["none", "mean", "sum"],
    "num_items": list(NUM_ITEMS),
    "budget": list(BUDGETS),
    "ignored": [0.0, 0.5],
    "label_smoothing": [0.0, 0.3],
    "z_loss": [0.0, 0.1],
    "class_weights": [False, True],
    "token_weights": [False, True],
    "softcap": [None, 5.0],
    "logit_scale": [1.0, 0.5],
    "temperature": [1.0, 0.7],
    "bias": [False, True],
    "shift": [False, True],
    "dft": [False, True],
    "compact": [True, False],
}
# FIELDS: the options of the loss object. All other options are arguments of its call.
# ENGINE: the fields that do not change the equation. They are not passed to the reference.
FIELDS = {field.name for field in fields(CrossEntropyLoss)}
ENGINE = {"logits_budget", "compact", "logits_dtype", "accum_dtype"}


def has_effect(case: dict) -> bool:
    if case.get("shape") == "1" and (case.get("shift") or case.get("ignored") == 0.5):
        return False
    return not case.get("num_items") or case.get("reduction", "mean") == "mean"


def compare(
    options: dict,
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    b: Tensor | None = None,
    *,
    requires=TRAINABLE["all"],
    seed=0,
):
    """Value and gradients of CrossEntropyLoss against the reference, with an upstream gradient other than
    one."""
    settings = {name: value for name, value in options.items() if name in FIELDS}
    arguments = {name: value for name, value in options.items() if name not in FIELDS}
    maths = {name: value for name, value in options.items() if name not in ENGINE}
    loss = CrossEntropyLoss(**settings)

    def ours(*tensors, **kwargs):
        return loss(*tensors, **kwargs, **arguments)

    def full_logits(*tensors, **kwargs):
        return reference.cross_entropy(*tensors, **{**maths, **kwargs})

    def per_token(*tensors, **kwargs):
        return reference.cross_entropy(*tensors, **{**maths, **kwargs, "reduction": "none"})

    exact = [None if tensor is None else tensor.double() for tensor in (h, w, b)]
    upstream = 0.37
    if options.get("reduction") == "none":
        upstream = torch.randn(targets.shape, generator=torch.Generator(DEVICE).manual_seed(seed))

    truth = run(full_logits, *exact[:2], targets, exact[2], upstream, requires)
    naive = run(full_logits, h, w, targets, b, upstream, requires)
    actual = run(ours, h, w, targets, b, upstream, requires)

    nothing_counts = not per_token(*exact[:2], targets, bias=exact[2]).any()
    assert actual.value.dtype == naive.value.dtype
    naive_error = naive.value
    if naive.value.dim() == 0 and not nothing_counts:
        terms = [per_token(*tensors[:2], targets, bias=tensors[2]).detach() for tensors in ((h, w, b), exact)]
        naive_error = max(relative_error(naive.value, truth.value), sum_error(*terms))
    assert_close(actual.value, truth.value, naive_error, name="loss", allow_zero=nothing_counts)
    assert actual.grads.keys() == truth.grads.keys()
    for name in truth.grads:
        naive_error = naive.grads[name]
        if name == "hidden" and truth.grads[name].norm() > 0:  # a chunk may be one row
            assert actual.grads[name].dtype == naive_error.dtype
            naive_error = max(relative_error(naive_error, truth.grads[name]), row_product_error(w))
        assert_close(
            actual.grads[name],
            truth.grads[name],
            naive_error,
            name=f"d_{name}",
            allow_zero=nothing_counts,
        )
    return actual.output


def expected_strategy(case: dict) -> str:
    trainable = set(TRAINABLE[case["trainable"]]) - (set() if case["bias"] else {"bias"})
    if not trainable:
        return "loss_only"
    if case["reduction"] != "none":
        return "fused"
    return "cached_grad" if trainable == {"hidden"} and not case["label_smoothing"] else "recompute"


def check_case(case: dict, dtype: torch.dtype) -> None:
    """Value, gradients, strategy and number of chunks of a case: a value of each of FACTORS, and a seed."""
    shape, hidden, vocab = SHAPES[case["shape"]]
    seed = case["seed"]
    h, w, targets, b = operands(shape, hidden, vocab, dtype, seed=seed, ignored=case["ignored"])
    generator = torch.Generator(DEVICE).manual_seed(seed)
    budget = BUDGETS[case["budget"]]
    options = {name: value for name, value in case.items() if name in FIELDS or name == "shift"}
    options["num_items"] = NUM_ITEMS[case["num_items"]]
    options["logits_budget"] = budget and budget(targets.numel(), vocab * dtype.itemsize)
    if case["class_weights"]:
        options["class_weights"] = torch.rand(vocab, generator=generator) + 0.5
    if case["token_weights"]:
        options["token_weights"] = torch.rand(shape, generator=generator) * 2

    bias = b if case["bias"] else None
    output = compare(options, h, w, targets, bias, requires=TRAINABLE[case["trainable"]], seed=seed)

    assert output.plan.strategy == expected_strategy(case), output.plan.describe()
    # Rows that are read in the product take less than their logits, for which the budget was chosen.
    stored = output.plan.row_bytes >= vocab * dtype.itemsize
    if case["budget"] == "third" and targets.numel() > 1 and not (case["ignored"] or case["shift"]):
        assert output.plan.chunks >= 3 or not stored, output.plan.describe()


@one_row_warning
@dtypes
@pytest.mark.parametrize("case", covering_array(FACTORS, has_effect))
def test_pairs_of_options(case, dtype):
    check_case(case, dtype)


# The logits of a row are the column of the head that its one-hot hidden state selects, so that a case can
# state them.
EXTREME_VOCAB = 5003


def one_peak(position: int, height: float) -> Tensor:
    logits = torch.zeros(EXTREME_VOCAB, device=DEVICE)
    logits[position] = height
    return logits


def drift(end: float) -> Tensor:
    return torch.linspace(-end, end, EXTREME_VOCAB, device=DEVICE)


EXTREME = {
    # p = 1 / (1 + 5002 exp(-14)) = 0.996
    "target certain": ([one_peak(i * 700, 14.0) for i in range(7)], [i * 700 for i in range(7)]),
    "certainly wrong": ([one_peak(i * 700, 14.0) for i in range(7)], [i * 700 + 1 for i in range(7)]),
    "maximum last": (
        [one_peak(-1, height) for height in (1.0, 5.0, 12.0, 25.0)],
        [0, EXTREME_VOCAB - 1, 2500, EXTREME_VOCAB - 1],
    ),
    "drift of 12": ([drift(6), drift(-6)] * 2, [0, 0, 5002, 5002]),
    "drift of 200": ([drift(100), drift(-100)] * 2, [0, 0, 5002, 5002]),
    "jump up at the end": ([torch.tensor([-50.0] * 5000 + [50.0] * 3, device=DEVICE)] * 3, [0, 5000, 5002]),
    # d_hidden is a sum of 5,003 numbers up to 1,000 that leaves one of order 1: 16 rows, as the naive error
    # of a few may be small by luck.
    "far from zero": (
        [
            sign * torch.linspace(999 + i / 7, 1001 + i / 5, EXTREME_VOCAB, device=DEVICE)
            for i in range(8)
            for sign in (1, -1)
        ],
        [77 + 300 * i for i in range(16)],
    ),
}


@dtypes
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_rows(name, reduction, dtype):
    rows, targets = EXTREME[name]
    h, w = torch.eye(len(rows), dtype=dtype), torch.stack(rows, dim=1).to(dtype)
    compare({"reduction": reduction}, h, w, torch.tensor(targets))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_lse_of_a_frozen_head_keeps_its_digits(reduction, softcap):
    """With dft, d_hidden is nearly that of the z-loss: a mean of many rows of the head, a hundredth of the
    target's."""
    h, w, targets, _ = operands((32,), 8, 50257, torch.float32, ignored=0.2)
    options = {"reduction": reduction, "dft": True, "z_loss": 0.1, "softcap": softcap}
    compare(options, h, w, targets, requires=("hidden",))


def test_fp16_survives_probabilities_below_its_smallest_number():
    tokens, hidden, vocab, num_items = 64, 16, 4099, 20_000
    h, w, targets, _ = operands((tokens,), hidden, vocab, torch.float16)
    # With a mean, the head's rows matter through Σ p w even where every single p / num_items is flushed to
    # zero.
    h, w = h / 8, w + 1
    assert 1 / vocab / num_items < 6e-8

    loss = CrossEntropyLoss()
    truth = run(reference.cross_entropy, h.double(), w.double(), targets, upstream=tokens / num_items)
    naive = run(lambda *a, **k: reference.cross_entropy(*a, **k, num_items=num_items), h, w, targets)
    actual = run(lambda *a, **k: loss(*a, **k, num_items=num_items), h, w, targets)

    assert relative_error(naive.grads["hidden"], truth.grads["hidden"]) > 0.05, "the case does not underflow"
    assert_close(actual.grads["hidden"], truth.grads["hidden"], 0.0, name="d_hidden")
    # d_weight itself is mostly below fp16's smallest normal number, so half a step of its grid is added to
    # the rule.
    assert (actual.grads["weight"].double() - truth.grads["weight"]).abs().max() < 6e-8 + 8e-3 * truth.grads[
        "weight"
    ].abs().max()


ALL_OPTIONS = {
    "ignore_index": 3,
    "reduction": "sum",
    "label_smoothing": 0.2,
    "z_loss": 0.05,
    "dft": True,
    "softcap": 8.0,
    "logit_scale": 0.9,
    "temperature": 1.2,
    "logits_budget": 30_000,
    "accum_dtype": torch.float32,
    "logits_dtype": torch.float32,
    "compact": False,
}


def test_function_is_the_object():
    h, w, targets, b = operands((3, 20), 16, 300, torch.bfloat16)
    targets[:, ::5] = 3
    arguments = {
        "bias": b,
        "class_weights": torch.linspace(0.5, 1.5, 300),
        "token_weights": torch.linspace(0, 2, 60).view(3, 20),
        "mask": torch.arange(60).view(3, 20) % 4 != 0,
        "shift": True,
    }
    function = linear_cross_entropy(h, w, targets, **arguments, **ALL_OPTIONS)
    assert isinstance(function, Tensor)
    assert torch.equal(function, CrossEntropyLoss(**ALL_OPTIONS)(h, w, targets, **arguments).loss)
    mean = {**ALL_OPTIONS, "reduction": "mean"}
    function = linear_cross_entropy(h, w, targets, num_items=17, **arguments, **mean)
    assert torch.equal(function, CrossEntropyLoss(**mean)(h, w, targets, num_items=17, **arguments).loss)


def test_loss_object_is_frozen_and_keyword_only():
    with pytest.raises(TypeError):
        CrossEntropyLoss(-100)
    with pytest.raises(FrozenInstanceError):
        CrossEntropyLoss().reduction = "sum"
    assert CrossEntropyLoss(z_loss=0.1) == CrossEntropyLoss(z_loss=0.1) != CrossEntropyLoss()
    assert hash(CrossEntropyLoss()) == hash(CrossEntropyLoss())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_fp32_logits_remove_the_rounding_of_low_precision_ones(reduction):
    h, w, targets, _ = operands((60,), 64, 500, torch.bfloat16)
    options = {"reduction": reduction, "logits_dtype": torch.float32, "logits_budget": 40_000}
    compare(options, h, w, targets)

    truth = reference.cross_entropy(h.double(), w.double(), targets, reduction=reduction)
    rounded = CrossEntropyLoss(reduction=reduction, logits_dtype=torch.bfloat16)(h, w, targets).loss
    unrounded = CrossEntropyLoss(**options)(h, w, targets).loss
    assert relative_error(unrounded, truth) < 2e-6
    assert relative_error(rounded, truth) > 20 * relative_error(unrounded, truth)


def test_d_weight_accumulates_in_fp32_unless_told_otherwise():
    h, w, targets, _ = operands((2048,), 16, 256, torch.bfloat16)
    budget = 100_000
    compare({"logits_budget": budget}, h, w, targets)
    truth = run(reference.cross_entropy, h.double(), w.double(), targets).grads["weight"]
    errors = {}
    for accum_dtype in (None, torch.float32, torch.bfloat16):
        actual = run(CrossEntropyLoss(logits_budget=budget, accum_dtype=accum_dtype), h, w, targets)
        assert actual.output.plan.chunks >= 8
        assert actual.grads["weight"].dtype == torch.bfloat16
        errors[accum_dtype] = relative_error(actual.grads["weight"], truth)
    assert errors[None] == errors[torch.float32] < 5e-3
    assert errors[torch.float32] < errors[torch.bfloat16] < 5e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_hidden_states_of_either_dtype(dtype):
    h, w, targets, b = operands((40,), 32, 300, torch.float32)
    loss = CrossEntropyLoss(label_smoothing=0.1, logits_budget=40_000)

    def within(*tensors, **given):
        with torch.autocast(DEVICE.type, dtype=dtype):
            return loss(*tensors, **given)

    cast, kept = (run(within, hidden, w, targets, b, 0.7) for hidden in (h.to(dtype), h))
    assert torch.equal(cast.value, kept.value)
    assert torch.equal(cast.grads["weight"], kept.grads["weight"])
    assert kept.grads["hidden"].dtype == torch.float32 and cast.grads["hidden"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64 weights", "fp32 weights"])
def test_class_weights_of_fp64_operands_are_summed_in_fp64(dtype):
    h, w, targets, b = operands((301,), 8, 50, torch.float64, ignored=0.4)
    weights = torch.linspace(0.1, 0.7, 50, dtype=torch.float64, device=DEVICE).to(dtype)
    ours = linear_cross_entropy(h, w, targets, bias=b, class_weights=weights)
    expected = torch.nn.functional.cross_entropy(h @ w.T + b, targets, weight=weights.double())
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("ignore_index", [50, 2**40, -1])
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_an_ignored_id_needs_no_class_weight(reduction, compact, ignore_index):
    h, w, targets, b = operands((31,), 8, 50, torch.float64, ignored=0.4)
    targets[targets == -100] = ignore_index
    weights = torch.linspace(7.0, 0.0, 50, dtype=torch.float64, device=DEVICE)
    options = {"ignore_index": ignore_index, "reduction": reduction}
    expected = torch.nn.functional.cross_entropy(h @ w.T + b, targets, weight=weights, **options)
    ours = linear_cross_entropy(h, w, targets, bias=b, class_weights=weights, compact=compact, **options)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


class WithSum(CrossEntropyLoss):
    """Reports the sum of the logits, each times its class weight."""

    observes: ClassVar = (*CrossEntropyLoss.observes, "sum_logits")
    metric_names: ClassVar = (*CrossEntropyLoss.metric_names, "sum_logits")

    def terms(self, stats, batch):
        terms, metrics = super().terms(stats, batch)
        return terms, metrics | {"sum_logits": Term(stats.sum_logits)}


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
def test_class_weights_of_an_observed_sum_of_logits(trains):
    h, w, targets, _ = operands((31,), 8, 50, torch.float32)
    weights = torch.linspace(0.1, 0.7, 50, device=DEVICE)
    h.requires_grad_(trains)
    out = WithSum()(h, w, targets, class_weights=weights)
    expected = (h @ w.T * weights).sum(1)[targets != -100].mean()
    torch.testing.assert_close(out.metrics["sum_logits"], expected.detach(), rtol=1e-5, atol=1e-5)
