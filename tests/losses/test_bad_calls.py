"""What losses and functions refuse: every message names the argument, what was expected, what came, and the
remedy."""

import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Unpack

import pytest
import torch
from torch import Tensor, nn

from logitless import (
    CPOLoss,
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    LogitsLoss,
    MedusaHeads,
    MedusaLoss,
    MultiTokenLoss,
    ORPOLoss,
    PPOLoss,
    REINFORCELoss,
    RLOOLoss,
    SimPOLoss,
    Term,
    TokenLoss,
    linear_cross_entropy,
    linear_logprobs,
    linear_topk,
)
from logitless.losses.inputs import CallInputs
from tests.support import DEVICE

pytestmark = pytest.mark.usefixtures("uncompiled")
on_the_host = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a device-side assertion ends the process's use of the GPU"
)
B, T, H, V = 4, 3, 6, 11


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), device=DEVICE).view(shape)


def integers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), device=DEVICE).view(shape) % V


class Own(TokenLoss):
    """A user's loss, without an input or a field of its own."""

    def terms(self, stats, batch):
        return {"nll": Term(-stats.logps)}, {}


TEACHER = {"teacher_hidden": numbers(B, T, H), "teacher_weight": numbers(V, H)}
REFERENCE = {"ref_logps": numbers(B) - 5}
# Every loss, and the inputs that it needs beside hidden states, weight and targets.
LOSSES = {
    CrossEntropyLoss: {},
    DPOLoss: REFERENCE,
    KTOLoss: REFERENCE | {"labels": torch.arange(B, device=DEVICE) % 2 == 0, "kl": 1.5},
    ORPOLoss: {},
    CPOLoss: {},
    SimPOLoss: {},
    GRPOLoss: {"advantages": numbers(B)},
    PPOLoss: {"advantages": numbers(B)},
    RLOOLoss: {"advantages": numbers(B)},
    REINFORCELoss: {"advantages": numbers(B)},
    DistillationLoss: TEACHER,
    JSDLoss: TEACHER,
    MedusaLoss: {},
    MultiTokenLoss: {},
    Own: {},
}
every_loss = pytest.mark.parametrize("kind", LOSSES)


def call(kind: type, options: dict | None = None, **changes):
    given = {"hidden": numbers(B, T, H), "weight": numbers(V, H), "targets": integers(B, T), **LOSSES[kind]}
    if kind is MedusaLoss:
        given["base_weight"], given["weight"] = given["weight"], MedusaHeads(H, V, 2, device=DEVICE)
    elif kind is MultiTokenLoss:
        given["hidden"] = [given["hidden"]] * 2
    given |= changes
    return kind(**options or {})(given.pop("hidden"), given.pop("weight"), given.pop("targets"), **given)


def hidden_of(kind: type, hidden):
    return [hidden, hidden] if kind is MultiTokenLoss else hidden


def refused(attempt: Callable[[], object], message: str = "") -> str:
    """The message of what `attempt` raises, which begins with `message`."""
    with pytest.raises((TypeError, ValueError)) as caught:
        attempt()
    actual = str(caught.value)
    assert re.match(r"^\w+: expected .*, got .*; .+", actual, re.DOTALL), actual
    assert re.match(message, actual, re.DOTALL), actual
    return actual


# -- every loss


@every_loss
def test_the_call_itself_is_good(kind):
    assert call(kind).loss.isfinite()


@every_loss
def test_an_unknown_keyword_and_all_that_are_known(kind):
    message = refused(lambda: call(kind, surprise=numbers(B)))
    assert "got surprise; " in message
    assert f"keywords of {kind.__name__} ({', '.join(kind.keywords)})" in message


def test_keywords_that_every_loss_has():
    expected = {"bias", "num_items", "shift", "cu_seqlens", "mask"}
    expected |= {"accumulate_into", "grad_scale"}
    assert set(Own.keywords) == expected


SYNONYMS = [
    *((name, "mask") for name in ("attention_mask", "completion_mask", "loss_mask", "padding_mask")),
    ("labels", "targets"),
    ("position_ids", "cu_seqlens"),
    ("teacher_logits", "teacher_hidden"),
    ("num_items_in_batch", "num_items"),
    ("ce_weight", "class_weights"),
    ("old_per_token_logps", "old_logps"),
]


@every_loss
@pytest.mark.parametrize(("their_name", "ours"), SYNONYMS)
def test_names_of_other_libraries(kind, their_name, ours):
    """The remedy names our argument only where the call has it, and never one that is spelt alike."""
    if their_name in kind.keywords:
        return  # position_ids of DPO, labels of KTO
    remedy = refused(lambda: call(kind, **{their_name: numbers(B)})).rpartition(";")[2]
    known = ours in kind.keywords or ours == "targets"
    assert (ours in remedy) == known or "take a" in remedy, remedy
    assert "perhaps" not in remedy and ("leave it out" in remedy) == (ours == "num_items" and not known)


class ModelOutput(OrderedDict):
    """As transformers has it: a dict that also has attributes."""


OUTPUTS = {
    "a tuple": lambda hidden: (hidden, None),
    "a model output": lambda hidden: ModelOutput(last_hidden_state=hidden),
    "nothing": lambda hidden: "hidden",
}


@every_loss
@pytest.mark.parametrize("what", OUTPUTS)
def test_hidden_states_that_are_no_tensor(kind, what):
    given = OUTPUTS[what](numbers(B, T, H))
    refused(lambda: call(kind, hidden=hidden_of(kind, given)), "hiddens?: expected a")


@every_loss
def test_everything_on_the_meta_device(kind):
    hidden = hidden_of(kind, numbers(B, T, H).to("meta"))
    refused(lambda: call(kind, hidden=hidden), "hidden.*: expected a tensor with data, got one on the meta ")


@every_loss
def test_boundaries_in_a_list(kind):
    packed = {"hidden": hidden_of(kind, numbers(B * T, H)), "targets": integers(B * T)}
    if "teacher_hidden" in LOSSES[kind]:
        packed["teacher_hidden"] = numbers(B * T, H)
    bounds = list(range(0, B * T + 1, T))
    assert call(kind, cu_seqlens=torch.tensor(bounds, device=DEVICE), **packed).loss.isfinite()
    message = r"cu_seqlens: expected a tensor, got list; pass torch.as_tensor\(cu_seqlens\)"
    refused(lambda: call(kind, cu_seqlens=bounds, **packed), message)


# -- some losses

NO_DATA = torch.empty(V, H, device="meta")
ONES = torch.ones(B, T, dtype=torch.int64, device=DEVICE)
BOOLEANS = ONES.bool()
HALVES, ID_HALVES = numbers(B, T, H).chunk(2), ONES.chunk(2)
APART = r"(hidden|targets): .*chosen first: torch.cat\(\(chosen, rejected\)\)"
BEST = numbers(B, T, 2)
LINEAR = nn.Linear(H, V, device=DEVICE)
NO_TEACHER = {"teacher_hidden": None, "teacher_weight": None}

# A loss, what changes in its call, and how the message begins.
REFUSED = [
    # A misspelt keyword.
    (DPOLoss, {"ref_logp": numbers(B)}, ".*got ref_logp; perhaps ref_logps is meant"),
    (DPOLoss, {"ref_logps": None, "ref_logp": numbers(B)}, ".*got ref_logp; perhaps ref_logps is meant"),
    (DPOLoss, {"reference_hidden": BEST}, ".*perhaps ref_hidden is meant"),
    (ORPOLoss, {"nll_target": ONES}, ".*perhaps nll_targets is meant"),
    (GRPOLoss, {"old_logp": numbers(B, T)}, ".*perhaps old_logps is meant"),
    (KTOLoss, {"ref_logprobs": numbers(B)}, ".*perhaps ref_logps is meant"),
    (JSDLoss, {"teacher_head": BEST}, ".*perhaps teacher_hidden is meant"),
    (CrossEntropyLoss, {"class_weight": numbers(V)}, ".*perhaps class_weights is meant"),
    (MedusaLoss, {"basis_weight": numbers(V, H)}, ".*perhaps base_weight is meant"),
    # What a loss makes itself, of a shape and type with which it could work.
    (DPOLoss, {"ref_sequence_logps": numbers(B)}, ".*got ref_sequence_logps; "),
    (GRPOLoss, {"unit_weights": numbers(B)}, ".*got unit_weights; "),
    (RLOOLoss, {"old_sums": numbers(B)}, ".*got old_sums; "),
    (JSDLoss, {"labels": numbers(B)}, ".*got labels; "),
    (ORPOLoss, {"completion": BOOLEANS}, ".*got completion; "),
    # Lists, and what another model returns.
    *(
        (kind, {name: [1, 0, 1, 0]}, f"{name}: expected a tensor, got list; ")
        for kind, name in (
            (KTOLoss, "labels"),
            (GRPOLoss, "advantages"),
            (RLOOLoss, "old_logps"),
            (GRPOLoss, "mask"),
            (DPOLoss, "ref_logps"),
            (ORPOLoss, "nll_targets"),
            (CrossEntropyLoss, "class_weights"),
            (CrossEntropyLoss, "token_weights"),
            (JSDLoss, "mask"),
            (DPOLoss, "targets"),
            (GRPOLoss, "targets"),
        )
    ),
    (DPOLoss, {"ref_hidden": (BEST,)}, "ref_hidden: expected a tensor, got tuple; pass only the hidden sta"),
    (JSDLoss, {"teacher_hidden": (BEST,)}, "teacher_hidden: expected a tensor, got tuple; pass only the hi"),
    # Tensors without numbers.
    *(
        (kind, {name: NO_DATA}, f"{name}: expected a tensor with data, got one on the meta device; ")
        for kind, name in (
            (CrossEntropyLoss, "class_weights"),
            (CrossEntropyLoss, "weight"),
            (DPOLoss, "ref_logps"),
            (GRPOLoss, "advantages"),
        )
    ),
    # A reference of another shape.
    *(
        (
            kind,
            {"ref_logps": numbers(*shape)},
            rf"ref_logps: expected shape \(4,\) or targets' \(4, 3\), got {re.escape(str(shape))}; ",
        )
        for kind in (DPOLoss, KTOLoss)
        for shape in ((B + 1,), (B, T + 1), ())
    ),
    # Chosen and rejected sequences apart.
    *(
        (kind, changes, APART)
        for kind in (DPOLoss, ORPOLoss, CPOLoss, SimPOLoss)
        for changes in (
            {"hidden": HALVES},
            {"targets": list(ID_HALVES)},
            {"hidden": list(HALVES), "targets": ID_HALVES},
        )
    ),
    *(
        (
            kind,
            {"chosen_hidden": HALVES[0], "rejected_hidden": HALVES[1]},
            ".*got chosen_hidden, rejected_hidden; concatenate.*chosen first",
        )
        for kind in (DPOLoss, ORPOLoss, CPOLoss, SimPOLoss)
    ),
    # Several heads, several depths.
    *(
        (MedusaLoss, {"weight": heads}, f"heads: expected a MedusaHeads module, got {type(heads).__name__}; ")
        for heads in ([LINEAR], LINEAR, nn.ModuleList([LINEAR]))
    ),
    *(
        (kind, {"shift": shift}, ".*got shift; targets are unshifted labels already.$")
        for kind in (MedusaLoss, MultiTokenLoss)
        for shift in (True, False)
    ),
    (MultiTokenLoss, {"hidden": BEST}, "hiddens: expected a list or tuple of tensors, got Tensor; "),
    # The best tokens of a teacher.
    *(
        (JSDLoss, NO_TEACHER | {"teacher_logprobs_topk": best}, "teacher_logprobs_topk: expected a pair")
        for best in (BEST, (BEST,), [BEST, BEST, BEST])
    ),
]


@pytest.mark.parametrize(
    ("kind", "changes", "message"), REFUSED, ids=[f"{k.__name__} {' '.join(c)}" for k, c, _ in REFUSED]
)
def test_refused_by_a_loss(kind, changes, message):
    refused(lambda: call(kind, **changes), message)


def test_a_subclass_takes_what_it_declares():
    class Weighted(SimPOLoss):
        token_inputs = ("token_weights",)

        def terms(self, stats, batch):
            stats.logps = stats.logps * batch.token_weights
            return super().terms(stats, batch)

    operands = numbers(B, T, H), numbers(V, H), integers(B, T)
    assert set(Weighted.keywords) == {*SimPOLoss.keywords, "token_weights"}
    assert SimPOLoss()(*operands).loss != Weighted()(*operands, token_weights=numbers(B, T)).loss
    refused(lambda: Weighted()(*operands, token_weight=numbers(B, T)), ".*perhaps token_weights is meant")


@pytest.mark.parametrize("typed", [False, True])
def test_a_call_of_the_users(typed):
    """Whether or not `__call__` names the keywords of every loss, the declared inputs are keywords."""

    class Scaled(CrossEntropyLoss):
        token_inputs = (*CrossEntropyLoss.token_inputs, "extra")

        def __call__(self, hidden, weight, targets, *, scale=1.0, **arguments):
            return super().__call__(scale * hidden, weight, targets, **arguments)

    if typed:
        Scaled.__call__.__annotations__["arguments"] = Unpack[CallInputs]
        Scaled = type("Scaled", (Scaled,), {"__call__": Scaled.__call__})
    shared = {"extra", "scale", *Own.keywords}
    assert set(Scaled.keywords) == (shared if typed else {*shared, *CrossEntropyLoss.keywords})


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if "advantages" in kind.keywords])
def test_advantages_are_missing(kind):
    message = "advantages: expected a tensor, got None; pass one per sequence or per token"
    refused(lambda: kind()(numbers(B, T, H), numbers(V, H), integers(B, T)), message)


@pytest.mark.parametrize("name", ["head", "hed"])
def test_options_of_a_function_are_named_one_by_one(name):
    message = f"options: expected any of .*, got {name}; "
    assert "head is meant" not in refused(lambda: linear_cross_entropy(*ALL_THREE, **{name: 1}), message)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda **options: linear_cross_entropy(*ALL_THREE, **options), "return_logps"),
        (lambda **options: linear_cross_entropy(*ALL_THREE, **options), "return_predictions"),
        (lambda **options: linear_topk(*ALL_THREE[:2], 2, **options), "ignore_index"),
        (lambda **options: linear_topk(*ALL_THREE[:2], 2, **options), "accum_dtype"),
    ],
)
def test_an_option_without_effect_is_refused(function, name):
    refused(lambda: function(**{name: None}), f"options: expected any of .*, got {name}; ")


def test_cispo_without_its_bound():
    message = "epsilon_high: expected the ratio's upper bound for cispo, got None"
    refused(lambda: GRPOLoss(loss_type="cispo"), message)
    refused(lambda: GRPOLoss(loss_type="cispo", epsilon=3.0), message)
    assert GRPOLoss(loss_type="cispo", epsilon_high=5.0).upper == 5.0


# -- constructors and missing targets

ALL_THREE = numbers(B, T, H), numbers(V, H), integers(B, T)
# A wrong construction or call, and the message.
MISNAMED = [
    (
        lambda: CrossEntropyLoss(label_smooth=0.1),
        "options: .*got label_smooth; perhaps label_smoothing is me",
    ),
    (lambda: GRPOLoss(entropy_bonus=0.1), "options: .*got entropy_bonus; perhaps entropy_coef is meant"),
    (lambda: Own(gamma=1.0), r"options: expected fields of Own \(ignore_index, .*got gamma; leave it out"),
    (lambda: CrossEntropyLoss(mask=BOOLEANS), "options: .*got mask; pass it to the call of the loss"),
    (lambda: CrossEntropyLoss(ce_weight=1), ".*got ce_weight; pass it as class_weights, to the call of the"),
    (
        lambda: CrossEntropyLoss(*ALL_THREE),
        "CrossEntropyLoss: expected options by name, got 3 positional arguments; "
        r"pass tensors to the call: CrossEntropyLoss\(\)\(hidden, weight, targets\)",
    ),
    (
        lambda: GRPOLoss(loss_type="gspo"),
        "loss_type: .*'gspo'; GSPO is importance_sampling_level='sequence' ",
    ),
    (lambda: GRPOLoss(loss_type="drgrpo"), "loss_type: .*got 'drgrpo'; perhaps dr_grpo is meant"),
    (lambda: DPOLoss(loss_type="simpo"), "loss_type: .*got 'simpo'; take SimPOLoss"),
    (lambda: CrossEntropyLoss(reduction="average"), "reduction: .*got 'average'; pick one of these"),
    (
        lambda: CrossEntropyLoss(temperature=torch.tensor(2.0)),
        "temperature: expected a constant as a field, got a tensor; pass a number; or, .* divide hidden by",
    ),
    (lambda: DPOLoss(beta=torch.tensor(0.1)), "beta: .*got a tensor; pass a number, such as beta.item"),
    (lambda: CrossEntropyLoss()(*ALL_THREE[:2], labels=ONES), "inputs: .*got labels; pass them as targets"),
    (lambda: ORPOLoss()(*ALL_THREE[:2], labels=ONES), "inputs: .*got labels; pass them as targets"),
    (
        lambda: linear_cross_entropy(*ALL_THREE[:2], labels=ONES),
        "options: .*got labels; pass them as targets",
    ),
    (lambda: linear_logprobs(*ALL_THREE[:2], labels=ONES), "options: .*got labels; pass them as targets"),
    (
        lambda: linear_logprobs(*ALL_THREE[:2]),
        "targets: expected a tensor of token ids, got None; pass the l",
    ),
    (
        lambda: DPOLoss()(*ALL_THREE, ref_logps=linear_logprobs(*ALL_THREE)),
        r"ref_logps: expected a tensor, got TokenLogprobs; pass its \.logps\.detach\(\)",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), MISNAMED, ids=[message[:50] for _, message in MISNAMED])
def test_names_that_are_meant(wrong, message):
    with pytest.raises((TypeError, ValueError), match="^" + message):
        wrong()


@every_loss
def test_a_call_without_targets(kind):
    if kind.needs_targets:
        message = "targets: expected a tensor of token ids, got None; pass the labels as targets"
        refused(lambda: call(kind, targets=None), message)


def test_a_budget_as_text():
    loss = CrossEntropyLoss(logits_budget="1.5 GiB")
    assert loss.logits_budget == 3 * 2**29 and loss == CrossEntropyLoss(logits_budget=3 * 2**29)
    number, text = [linear_cross_entropy(*ALL_THREE, logits_budget=budget) for budget in (1000, "1kB")]
    assert text == number
    message = r"^logits_budget: expected a positive number of bytes, got '1.5 gigs'; write \"12GiB\""
    refused(lambda: CrossEntropyLoss(logits_budget="1.5 gigs"), message)


def test_a_constructor_of_the_users():
    @dataclass(frozen=True, kw_only=True)
    class Scaled(Own):
        gamma: float = 1.0

        def __init__(self, scale: float):
            super().__init__(temperature=scale)

    assert Scaled(2.0).temperature == 2.0 and Scaled(scale=2.0).temperature == 2.0


# -- targets that are no ids


def outside(kind: type, ids: dict[tuple[int, int], int], **options) -> str:
    """The message about targets with these ids in these places."""
    targets = ONES.clone()
    for place, value in ids.items():
        targets[place] = value
    return refused(lambda: call(kind, options, targets=targets))


@pytest.mark.parametrize("kind", [CrossEntropyLoss, DPOLoss, GRPOLoss, JSDLoss, SimPOLoss])
def test_ids_outside_are_shown(kind):
    message = outside(kind, {(1, 2): V + 3, (0, 1): -100, (2, 0): V, (3, 2): -7})
    shown = "got 3 outside: the least is -7, the greatest 14; the first, 14, is that of hidden's row 5; "
    assert shown in message
    assert message.endswith("fix the labels or set ignore_index.")


@pytest.mark.parametrize(
    ("ids", "ignore_index", "mark"),
    [
        ({(0, 0): -100, (0, 1): -100}, 0, -100),
        ({(0, 0): -101, (0, 1): -100, (1, 1): V}, -1, -100),
        ({(0, 0): -1, (2, 1): -1}, -100, -1),
    ],
)
@pytest.mark.parametrize("kind", [CrossEntropyLoss, DPOLoss])
def test_ids_outside_that_mark_what_is_not_supervised(kind, ids, ignore_index, mark):
    hint = f"set ignore_index={mark}, not {ignore_index}, if {mark} marks what is not supervised."
    assert outside(kind, ids, ignore_index=ignore_index).endswith(hint)


def test_one_id_too_many_is_no_mark():
    message = outside(CrossEntropyLoss, {(0, 0): V, (2, 1): V})
    assert message.endswith("fix the labels or set ignore_index.")


def changed_target(value: int) -> Tensor:
    targets = integers(B, T)
    targets[1, 2] = value
    return targets


@on_the_host
@pytest.mark.parametrize("value", [V, -1, 2**40])
@pytest.mark.parametrize("entry", [linear_cross_entropy, linear_logprobs])
def test_bad_targets_never_reach_the_loss_without_compaction(entry, value):
    # On a device the check is then an assertion in the kernel; on CPU it is raised where it happens.
    with pytest.raises(RuntimeError, match="^targets: expected"):
        entry(numbers(B, T, H), numbers(V, H), changed_target(value), compact=False)


# -- the functions


def quantized(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantized tensors are deprecated
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


WEIGHT = numbers(V, H)
# How the message begins, and what changes in the call.
OPERANDS = {
    "hidden 0-d": ("hidden: ", {"hidden": torch.tensor(1.0, device=DEVICE)}),
    "hidden of another size": ("(hidden|weight): ", {"hidden": numbers(B, T, H + 1)}),
    "hidden of integers": ("hidden: ", {"hidden": integers(B, T, H)}),
    "hidden in a tuple": (
        "hidden: expected a tensor, got tuple; .*last_hidden_state",
        {"hidden": (numbers(3, H),)},
    ),
    "weight 1-d": ("weight: ", {"weight": numbers(H)}),
    "weight 3-d": ("weight: ", {"weight": numbers(1, V, H)}),
    "weight transposed": ("(hidden|weight): ", {"weight": numbers(H, V)}),
    "weight of another dtype": ("(hidden|weight): ", {"weight": WEIGHT.bfloat16()}),
    "weight of integers": ("weight: ", {"weight": integers(V, H).to(torch.int8)}),
    "weight quantized": ("weight: ", {"weight": quantized(WEIGHT)}),
    "weight sparse": ("weight: ", {"weight": WEIGHT.to_sparse()}),
    "weight on another device": ("(hidden|weight): ", {"weight": WEIGHT.to("meta")}),
    "weight without rows": ("(weight|targets): ", {"weight": WEIGHT[:0]}),
    "meta device": (
        "hidden: expected a tensor with data",
        {"hidden": numbers(B, T, H).to("meta"), "weight": WEIGHT.to("meta")},
    ),
    "targets of another shape": ("targets: ", {"targets": integers(B, T - 1)}),
    "targets flat": ("targets: ", {"targets": integers(B * T)}),
    "targets of floats": ("targets: ", {"targets": numbers(B, T)}),
    "targets on another device": ("targets: ", {"targets": integers(B, T).to("meta")}),
    "target too large": ("targets: ", {"targets": changed_target(V)}),
    "target much too large": ("targets: ", {"targets": changed_target(2**40)}),
    "target negative": ("targets: ", {"targets": changed_target(-1)}),
    "target -100 that is not ignore_index": (
        "targets: .*first, -100, is that of hidden's row 5; set ignore_index=-100",
        {"targets": changed_target(-100), "ignore_index": 0},
    ),
    "bias of another size": ("bias: ", {"bias": numbers(V + 1)}),
    "bias 2-d": ("bias: ", {"bias": numbers(V, 1)}),
    "bias on another device": ("bias: ", {"bias": numbers(V).to("meta")}),
    "negative budget": ("logits_budget: ", {"logits_budget": -1}),
    "no budget": ("logits_budget: ", {"logits_budget": 0}),
    "budget in words": ("logits_budget: ", {"logits_budget": "one GB"}),
    "softcap 0": ("softcap: ", {"softcap": 0.0}),
    "softcap negative": ("softcap: ", {"softcap": -5.0}),
    "temperature 0": ("temperature: ", {"temperature": 0.0}),
    "temperature negative": ("temperature: ", {"temperature": -1.0}),
    "unknown option": (".*expected .*softcap.*, got logit_cap; ", {"logit_cap": 3.0}),
}
CROSS_ENTROPY = {
    "reduction": ("reduction: .*'mean', 'sum', 'none', got 'average'", {"reduction": "average"}),
    "label_smoothing above 1": ("label_smoothing: ", {"label_smoothing": 1.1}),
    "label_smoothing negative": ("label_smoothing: ", {"label_smoothing": -0.1}),
    "label_smoothing nan": ("label_smoothing: ", {"label_smoothing": float("nan")}),
    "class_weights of another length": ("class_weights: ", {"class_weights": numbers(V - 1)}),
    "class_weights 2-d": ("class_weights: ", {"class_weights": numbers(V, 1)}),
    "token_weights of another shape": ("token_weights: ", {"token_weights": numbers(B, T - 1)}),
    "shift with aligned targets": ("targets: ", {"targets": integers(B, T - 1), "shift": True}),
    "num_items of several": ("num_items: ", {"num_items": numbers(2)}),
    "mask by another name": (".*got attention_mask; pass it as mask.$", {"attention_mask": BOOLEANS}),
    "items by another name": (".*got num_items_in_batch; pass it as num_items.$", {"num_items_in_batch": 3}),
    "weights by another name": (".*got ce_weight; pass it as class_weights.$", {"ce_weight": numbers(V)}),
    "class_weights misspelt": (".*got class_weight; perhaps class_weights is ", {"class_weight": numbers(V)}),
}
LOGPROBS = {
    "entropy": ("entropy: ", {"entropy": "yes"}),
    "mask": (
        ".*got attention_mask; set the targets to ignore_index where it is off.$",
        {"attention_mask": BOOLEANS},
    ),
    "position ids": (
        ".*got position_ids; pass the boundaries of the packed sequences as cu_seqlens.$",
        {"position_ids": integers(B, T)},
    ),
}
ENTRIES = {linear_cross_entropy: OPERANDS | CROSS_ENTROPY, linear_logprobs: OPERANDS | LOGPROBS}


@pytest.mark.parametrize(("entry", "what"), [(entry, what) for entry in ENTRIES for what in ENTRIES[entry]])
def test_refused_by_functions(entry, what):
    message, changes = ENTRIES[entry][what]
    given = {"hidden": numbers(B, T, H), "weight": WEIGHT, "targets": integers(B, T)}
    refused(lambda: entry(**given | changes), message)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x.expand(2, *x.shape)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen head", "trained head"])
def test_transforms(transform, reduction, trainable):
    hidden, weight, targets = numbers(B, T, H), numbers(V, H).requires_grad_(trainable), integers(B, T)

    def value(x: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, reduction=reduction).sum()

    with pytest.raises(
        ValueError, match=r"^torch\.func: expected a call outside .*, got one inside of (grad|vmap|jvp); "
    ):
        TRANSFORMS[transform](value, hidden)


@pytest.mark.parametrize("trainable", [False, True])
def test_dual_tensors_and_batches_of_gradients(trainable):
    hidden, weight, targets = numbers(B, T, H), numbers(V, H).requires_grad_(trainable), integers(B, T)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(hidden, hidden)
        with pytest.raises(
            ValueError, match="^forward_ad: expected tensors without a tangent, got a dual tensor"
        ):
            linear_cross_entropy(dual, weight, targets)
        linear_cross_entropy(hidden, weight, targets)
    hidden.requires_grad_()
    for reduction, shape in (("mean", ()), ("none", (B, T))):
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        with pytest.raises(
            ValueError, match="^is_grads_batched: expected False, got True; call torch.autograd"
        ):
            torch.autograd.grad(loss, hidden, torch.ones(3, *shape, device=DEVICE), is_grads_batched=True)


def test_constants_inside_of_transforms():
    """What has no gradient, as the k best of a teacher, may be computed inside."""
    hidden, weight, targets = numbers(B, T, H), numbers(V, H), integers(B, T)

    def value(x: Tensor) -> Tensor:
        with torch.no_grad():
            known = linear_logprobs(hidden, weight, targets).logps
        return (x.sum(-1) * known * linear_topk(x, weight, 1).lse).sum()

    if DEVICE.type != "cpu":  # kernels cannot read a wrapped tensor
        with pytest.raises(ValueError, match=r"^torch.func: expected a call outside of the transforms"):
            torch.func.grad(value)(hidden)
        return
    actual = torch.func.grad(value)(hidden)
    known, best = linear_logprobs(hidden, weight, targets).logps, linear_topk(hidden, weight, 1).lse
    torch.testing.assert_close(actual, (known * best)[..., None].expand_as(hidden))


@pytest.mark.parametrize("entry", [linear_cross_entropy, linear_logprobs])
@pytest.mark.parametrize("trainable", ["hidden", "weight"])
def test_create_graph(entry, trainable):
    given = {"hidden": numbers(B, T, H), "weight": numbers(V, H), "targets": integers(B, T)}
    leaf = given[trainable].requires_grad_()
    output = entry(**given)
    value = output if isinstance(output, Tensor) else output.logps.sum()
    with pytest.raises(RuntimeError, match=r"^\w+: expected .*, got .*; .*hidden @ weight\.T"):
        torch.autograd.grad(value, leaf, create_graph=True)


SMALL_BUDGET = """
import torch, warnings
from logitless import CrossEntropyLoss
torch.manual_seed(0)
hidden, weight, targets = torch.randn(5, 4, requires_grad=True), torch.randn(100, 4), torch.arange(5)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for _ in range(3):
        output = CrossEntropyLoss(logits_budget=16)(hidden, weight, targets)
expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
print(output.plan.chunks, output.plan.token_chunk, torch.allclose(output.loss, expected))
for warning in caught:
    print(issubclass(warning.category, UserWarning), warning.message)
"""


def test_budget_below_one_row_works_and_warns_once():
    # In a process of its own: "once" counts from the start of the process.
    result = subprocess.run([sys.executable, "-c", SMALL_BUDGET], capture_output=True, text=True, check=True)
    facts, *warned = result.stdout.strip().splitlines()
    assert facts == "5 1 True"
    assert len(warned) == 1 and warned[0].startswith("True logits_budget: "), warned


# -- a user's own loss. What is wrong with the class may be said when it is defined, made or called.


def define_without_terms():
    @dataclass(frozen=True, kw_only=True)
    class Forgetful(TokenLoss):
        gamma: float = 2.0

    return Forgetful()


def define_without_the_decorator():
    class Undecorated(TokenLoss):
        gamma: float = 2.0

        def terms(self, stats, batch):
            return {"nll": Term(-self.gamma * stats.logps)}, {}

    return Undecorated()


def define_with_a_tensor():
    @dataclass(frozen=True, kw_only=True)
    class Tabled(TokenLoss):
        table: Tensor

        def terms(self, stats, batch):
            return {"nll": Term(-stats.logps * self.table[batch.targets])}, {}

    return Tabled(table=torch.ones(V))


OPERANDS_ALONE = numbers(B, T, H), numbers(V, H), integers(B, T)


@pytest.mark.parametrize(
    ("define", "named"),
    [
        (define_without_terms, "terms"),
        (define_without_the_decorator, "dataclass"),
        (define_with_a_tensor, "shared_inputs"),
    ],
)
def test_a_class_that_is_no_loss(define, named):
    assert named in refused(lambda: define()(*OPERANDS_ALONE))


@pytest.mark.parametrize("kind", [TokenLoss, CrossEntropyLoss, LogitsLoss])
@pytest.mark.parametrize("name", ["logit_transform", "terms", "sequences", "unit", "metric_names", "reader"])
def test_a_field_that_hides_what_the_library_reads(kind, name):
    body = {"__annotations__": {name: float}, name: 2.0}
    message = (
        f"^{name}: expected a name that .*Loss does not use, as a field of Own, got '{name}'; rename the"
    )
    with pytest.raises(TypeError, match=message):
        type("Own", (kind,), body)


@pytest.mark.parametrize("name", ["ignored", "V", "lengths", "supervised"])
def test_an_input_that_hides_what_terms_read(name):
    with pytest.raises(
        TypeError, match=f"^inputs: expected names that Batch does not use, as inputs of Own, got {name}; re"
    ):
        type("Own", (TokenLoss,), {"token_inputs": (name,)})


def test_fields_that_a_loss_may_offer():
    @dataclass(frozen=True, kw_only=True)
    class Own(CrossEntropyLoss):
        return_logps: bool = True
        label_smoothing: float = 0.1

    assert Own()(*OPERANDS_ALONE).tokens["logps"].shape == (B, T)


def test_class_variables_need_no_decorator():
    class Undecorated(TokenLoss):
        metric_names: ClassVar[tuple[str, ...]] = ("logps",)

        def terms(self, stats, batch):
            return {"nll": Term(-stats.logps)}, {"logps": Term(stats.logps)}

    out = Undecorated()(*OPERANDS_ALONE)
    assert out.loss == -out.metrics["logps"]


@pytest.mark.parametrize(
    "use",
    [
        lambda stats, batch: batch.sum_by_sequence(stats.logps),
        lambda stats, batch: stats.logps * batch.positions,
        lambda stats, batch: stats.logps * batch.is_chosen,
        lambda stats, batch: batch.spread(batch.lengths.float()),
    ],
)
def test_a_loss_of_sequences_that_says_token(use):
    class Forgetful(TokenLoss):
        def terms(self, stats, batch):
            return {"loss": Term(use(stats, batch))}, {}

    message = "scope: expected 'group' or 'batch' .*, got 'token'; declare it"
    refused(lambda: Forgetful()(*OPERANDS_ALONE), message)


# -- normalizer

normalized = pytest.mark.parametrize("kind", [CrossEntropyLoss, DPOLoss, SimPOLoss, GRPOLoss])
ZEROS = {"int": 0, "float": 0.0, "tensor": torch.tensor(0, device="cpu"), "negative": -1}
zeros = pytest.mark.parametrize("zero", ZEROS.values(), ids=ZEROS)


@normalized
@zeros
def test_num_items_that_is_not_above_0_with_supervised_tokens(kind, zero):
    refused(lambda: call(kind, num_items=zero), "num_items: expected")


@on_the_host
def test_num_items_of_0_on_the_device_without_compaction():
    with pytest.raises(RuntimeError, match="^num_items: expected"):
        call(CrossEntropyLoss, {"compact": False}, num_items=torch.tensor(0))


@zeros
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
def test_num_items_of_0_without_supervised_tokens(zero, compact):
    hidden, nothing = numbers(B, T, H).requires_grad_(), torch.full_like(ONES, -100)
    loss = call(CrossEntropyLoss, {"compact": compact}, hidden=hidden, targets=nothing, num_items=zero).loss
    loss.backward()
    assert loss == 0 and not hidden.grad.any()


@normalized
@pytest.mark.parametrize("num_items", [3, torch.tensor(3, device=DEVICE)], ids=["number", "tensor"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_num_items_of_what_is_no_mean(kind, num_items, reduction):
    options = {"reduction": reduction}
    assert call(kind, options).loss.isfinite().all()
    refused(lambda: call(kind, options, num_items=num_items), "num_items: expected None")
