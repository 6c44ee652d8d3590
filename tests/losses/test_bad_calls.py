"""What the calls of all losses refuse by name: unknown keywords, lists, model outputs, pairs in two parts."""

import re
from collections import OrderedDict

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
)
from tests.losses.test_bad_input import FORM
from tests.support import DEVICE

B, T, H, V = 4, 3, 6, 11
# What every loss takes.
MAIN = {"accumulate_into", "accumulate_now", "grad_scale"}
REST = {"bias", "num_items", "shift", "cu_seqlens", "mask", *MAIN}
REFERENCE = {"ref_logps", "ref_hidden", "ref_weight", "ref_bias"}
RATIO = {"advantages", "old_logps"}
TEACHER = {"teacher_hidden", "teacher_weight", "teacher_bias", "teacher_logprobs_topk"}


@pytest.fixture(autouse=True)
def uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


class Own(TokenLoss):
    """A user's loss, without an input or a field of its own."""

    def terms(self, stats, batch):
        return {"nll": Term(-stats.logps)}, {}


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), device=DEVICE).view(shape)


def inputs(*names: str) -> dict[str, Tensor]:
    """What a loss needs beside hidden states, weight and targets."""
    every = {
        "ref_logps": numbers(B) - 5,
        "advantages": numbers(B),
        "labels": torch.tensor([True, False, True, False], device=DEVICE),
        "kl": numbers(1)[0] + 1.5,
        "teacher_hidden": numbers(B, T, H),
        "teacher_weight": numbers(V, H),
    }
    return {name: every[name] for name in names}


# The loss, the inputs that it needs, and every keyword of its call.
LOSSES = {
    "CrossEntropyLoss": (CrossEntropyLoss, (), REST | {"class_weights", "token_weights"}),
    "DPOLoss": (DPOLoss, ("ref_logps",), REST | REFERENCE | {"position_ids"}),
    "KTOLoss": (KTOLoss, ("ref_logps", "labels", "kl"), REST | REFERENCE | {"labels", "kl"}),
    "ORPOLoss": (ORPOLoss, (), REST | {"nll_targets"}),
    "CPOLoss": (CPOLoss, (), REST),
    "SimPOLoss": (SimPOLoss, (), REST),
    "GRPOLoss": (
        GRPOLoss,
        ("advantages",),
        REST | RATIO | REFERENCE | {"sampling_logps", "importance_weights", "sampling_mask"},
    ),
    "PPOLoss": (
        PPOLoss,
        ("advantages",),
        REST | RATIO | REFERENCE | {"sampling_logps", "importance_weights", "sampling_mask"},
    ),
    "RLOOLoss": (RLOOLoss, ("advantages",), REST | RATIO | {"sampling_mask"}),
    "REINFORCELoss": (REINFORCELoss, ("advantages",), REST | {"advantages", "sampling_mask"}),
    "DistillationLoss": (DistillationLoss, ("teacher_hidden", "teacher_weight"), REST | TEACHER),
    "JSDLoss": (JSDLoss, ("teacher_hidden", "teacher_weight"), REST | TEACHER),
    "MedusaLoss": (MedusaLoss, (), {"base_weight", "base_bias", "num_items", "cu_seqlens", "mask"}),
    "MultiTokenLoss": (MultiTokenLoss, (), {"bias", "num_items", "cu_seqlens", "mask"}),
    "a user's": (Own, (), REST),
}
PAIRED = ("DPOLoss", "ORPOLoss", "CPOLoss", "SimPOLoss")


def call(name: str, **changes):
    kind, needed, _ = LOSSES[name]
    given = {
        "hidden": numbers(B, T, H),
        "targets": torch.arange(B * T, device=DEVICE).view(B, T) % V,
        **inputs(*needed),
    }
    given["weight"] = numbers(V, H)
    if kind is MedusaLoss:
        given["base_weight"], given["weight"] = given["weight"], MedusaHeads(H, V, 2, device=DEVICE)
    elif kind is MultiTokenLoss:
        given["hidden"] = [given["hidden"]] * 2
    given |= changes
    return kind()(given.pop("hidden"), given.pop("weight"), given.pop("targets"), **given)


def refusal(name: str, **changes) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(name, **changes)
    message = str(caught.value)
    assert FORM.match(message), message
    return message


def every_loss():
    """A test of each loss."""
    return pytest.mark.parametrize("name", LOSSES)


@every_loss()
def test_the_call_itself_is_good(name):
    assert call(name).loss.isfinite()


@every_loss()
def test_an_unknown_keyword(name):
    message = refusal(name, surprise=numbers(B))
    assert "got surprise" in message and LOSSES[name][0].__name__ in message
    listed = re.search(r"\((.*?)\)", message).group(1).split(", ")
    assert set(listed) == LOSSES[name][2]


@pytest.mark.parametrize(
    "name, wrong, right",
    [
        ("DPOLoss", "ref_logp", "ref_logps"),
        ("DPOLoss", "reference_hidden", "ref_hidden"),
        ("ORPOLoss", "nll_target", "nll_targets"),
        ("GRPOLoss", "old_logp", "old_logps"),
        ("KTOLoss", "ref_logprobs", "ref_logps"),
        ("JSDLoss", "teacher_head", "teacher_hidden"),
        ("CrossEntropyLoss", "class_weight", "class_weights"),
        ("MedusaLoss", "basis_weight", "base_weight"),
    ],
)
def test_a_misspelt_keyword(name, wrong, right):
    assert f"perhaps {right} is meant" in refusal(name, **{wrong: numbers(B)})


SYNONYMS = [
    *((name, "mask") for name in ("attention_mask", "completion_mask", "loss_mask", "padding_mask")),
    ("labels", "targets"),
    ("position_ids", "cu_seqlens"),
    ("teacher_logits", "teacher_hidden"),
    ("num_items_in_batch", "num_items"),
    ("ce_weight", "class_weights"),
    ("old_per_token_logps", "old_logps"),
]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("theirs", "ours"), SYNONYMS)
def test_names_of_other_libraries(name, theirs, ours):
    """Behind the last semicolon, where the call has such an argument: what is close by spelling trains on
    padding, or on something else."""
    keywords = LOSSES[name][2]
    if theirs in keywords:
        return  # position_ids of DPO, labels of KTO
    remedy = refusal(name, **{theirs: numbers(B)}).rpartition(";")[2]
    assert (ours in remedy) == (ours in keywords or ours == "targets") or "take a" in remedy, remedy
    assert "perhaps" not in remedy and ("leave it out" in remedy) == (ours == "num_items" not in keywords)


def test_names_of_other_libraries_in_functions():
    operands = numbers(3, H), numbers(V, H), torch.tensor([1, -100, 2], device=DEVICE)
    for entry, name, remedy in (
        (linear_cross_entropy, "attention_mask", "pass it as mask"),
        (linear_cross_entropy, "num_items_in_batch", "pass it as num_items"),
        (linear_cross_entropy, "ce_weight", "pass it as class_weights"),
        (linear_logprobs, "attention_mask", "set the targets to ignore_index where it is off"),
        (linear_logprobs, "position_ids", "pass the boundaries of the packed sequences as cu_seqlens"),
        (linear_cross_entropy, "class_weight", "perhaps class_weights is meant"),
    ):
        with pytest.raises(TypeError, match=f"got {name}; {remedy}.$"):
            entry(*operands, **{name: numbers(3)})


def test_a_misspelt_reference_is_not_called_missing():
    message = refusal("DPOLoss", ref_logps=None, ref_logp=numbers(B))
    assert "got ref_logp; perhaps ref_logps is meant" in message


@pytest.mark.parametrize(
    "name, internal",
    [
        ("DPOLoss", "ref_sequence_logps"),
        ("GRPOLoss", "unit_weights"),
        ("RLOOLoss", "old_sums"),
        ("JSDLoss", "labels"),
        ("ORPOLoss", "completion"),
    ],
)
def test_what_a_loss_makes_itself_is_no_keyword(name, internal):
    assert internal not in LOSSES[name][0].keywords
    # Of a shape and type with which the loss could work.
    given = torch.ones(B, T, dtype=torch.bool, device=DEVICE) if internal == "completion" else numbers(B)
    assert f"got {internal}; " in refusal(name, **{internal: given})


def test_a_subclass_takes_what_it_declares():
    class Weighted(SimPOLoss):
        token_inputs = ("token_weights",)

        def terms(self, stats, batch):
            stats.logps = stats.logps * batch.token_weights
            return super().terms(stats, batch)

    operands = numbers(B, T, H), numbers(V, H), torch.arange(B * T, device=DEVICE).view(B, T) % V
    assert set(Weighted.keywords) == REST | {"token_weights"}
    plain, weighted = SimPOLoss()(*operands), Weighted()(*operands, token_weights=numbers(B, T))
    assert plain.loss != weighted.loss
    with pytest.raises(TypeError, match="perhaps token_weights is meant"):
        Weighted()(*operands, token_weight=numbers(B, T))


# What changes in a call of a function, and its error.
FUNCTION_CALLS = {
    "unknown option": ({"logit_cap": 3.0}, TypeError, "expected .*softcap.*, got logit_cap; "),
    "hidden in a tuple": (
        {"hidden": (numbers(3, H),)},
        TypeError,
        "^hidden: expected a tensor, got tuple; .*last_hidden_state",
    ),
    "meta device": (
        {"hidden": numbers(3, H).to("meta"), "weight": numbers(V, H).to("meta")},
        ValueError,
        "^hidden: expected a tensor with data",
    ),
    "ids outside": (
        {"targets": torch.tensor([1, -100, 2], device=DEVICE), "ignore_index": 0},
        ValueError,
        "first, -100, is that of hidden's row 1; set ignore_index=-100",
    ),
}


@pytest.mark.parametrize("entry", [linear_cross_entropy, linear_logprobs])
@pytest.mark.parametrize(("changes", "error", "message"), FUNCTION_CALLS.values(), ids=FUNCTION_CALLS)
def test_refused_by_functions(entry, changes, error, message):
    given = {"hidden": numbers(3, H), "weight": numbers(V, H), "targets": torch.arange(3, device=DEVICE)}
    with pytest.raises(error, match=message) as caught:
        entry(**given | changes)
    assert FORM.match(str(caught.value))


# -- what is no tensor


class ModelOutput(OrderedDict):
    """As transformers has it: a dict that also has attributes."""


OUTPUTS = {
    "a tuple": lambda hidden: (hidden, None),
    "a model output": lambda hidden: ModelOutput(last_hidden_state=hidden),
    "nothing": lambda hidden: "hidden",
}


@every_loss()
@pytest.mark.parametrize("what", OUTPUTS)
def test_hidden_states_that_are_no_tensor(name, what):
    given = OUTPUTS[what](numbers(B, T, H))
    message = refusal(name, hidden=[given, given] if name == "MultiTokenLoss" else given)
    assert re.match("hiddens?: expected a", message), message


@every_loss()
def test_boundaries_in_a_list(name):
    hidden, packed = numbers(B * T, H), {"ref_logps": numbers(B) - 5, "teacher_hidden": numbers(B * T, H)}
    packed = {key: x for key, x in packed.items() if key in LOSSES[name][1]}
    hidden = [hidden] * 2 if name == "MultiTokenLoss" else hidden
    bounds = list(range(0, B * T + 1, T))
    packed |= {"hidden": hidden, "targets": torch.arange(B * T, device=DEVICE) % V}
    assert call(name, cu_seqlens=torch.tensor(bounds, device=DEVICE), **packed).loss.isfinite()
    message = refusal(name, cu_seqlens=bounds, **packed)
    assert message.startswith("cu_seqlens: expected a tensor, got list; pass torch.as_tensor(cu_seqlens)")


@pytest.mark.parametrize(
    "name, argument",
    [
        ("KTOLoss", "labels"),
        ("GRPOLoss", "advantages"),
        ("RLOOLoss", "old_logps"),
        ("GRPOLoss", "mask"),
        ("DPOLoss", "ref_logps"),
        ("ORPOLoss", "nll_targets"),
        ("CrossEntropyLoss", "class_weights"),
        ("CrossEntropyLoss", "token_weights"),
        ("JSDLoss", "mask"),
        ("DPOLoss", "targets"),
        ("GRPOLoss", "targets"),
    ],
)
def test_numbers_in_a_list(name, argument):
    message = refusal(name, **{argument: [1, 0, 1, 0]})
    assert message.startswith(f"{argument}: expected a tensor, got list; ")


@pytest.mark.parametrize("name, argument", [("DPOLoss", "ref_hidden"), ("JSDLoss", "teacher_hidden")])
def test_another_models_output(name, argument):
    message = refusal(name, **{argument: (numbers(B, T, H),)})
    assert message.startswith(f"{argument}: expected a tensor, got tuple; pass the hidden states alone")


# -- targets that are no ids


def outside(name: str, ids: dict[tuple[int, int], int], **options) -> str:
    """The message about targets with these ids in these places."""
    kind, needed, _ = LOSSES[name]
    targets = torch.ones(B, T, dtype=torch.int64, device=DEVICE)
    for place, value in ids.items():
        targets[place] = value
    with pytest.raises(ValueError) as caught:
        kind(**options)(numbers(B, T, H), numbers(V, H), targets, **inputs(*needed))
    assert FORM.match(str(caught.value))
    return str(caught.value)


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "DPOLoss", "GRPOLoss", "JSDLoss", "SimPOLoss"])
def test_ids_outside_are_shown(name):
    message = outside(name, {(1, 2): V + 3, (0, 1): -100, (2, 0): V, (3, 2): -7})
    assert "got 3 outside: the least is -7, the greatest 14; the first, 14, is that of hidden's row 5; " in (
        message
    )
    assert message.endswith("fix the labels or set ignore_index.")


def test_ids_outside_that_mark_what_is_not_supervised():
    hint = "set ignore_index={0}, not {1}, if {0} marks what is not supervised."
    everyone = {"ids": {(0, 0): -100, (0, 1): -100}, "ignore_index": 0}
    assert outside("CrossEntropyLoss", **everyone).endswith(hint.format(-100, 0))
    assert outside("DPOLoss", **everyone).endswith(hint.format(-100, 0))
    mixed = {(0, 0): -101, (0, 1): -100, (1, 1): V}
    assert outside("CrossEntropyLoss", mixed, ignore_index=-1).endswith(hint.format(-100, -1))
    assert outside("CrossEntropyLoss", {(0, 0): -1, (2, 1): -1}).endswith(hint.format(-1, -100))
    # One id too many is no mark.
    assert outside("CrossEntropyLoss", {(0, 0): V, (2, 1): V}).endswith("fix the labels or set ignore_index.")


# -- tensors without numbers


META = {"CrossEntropyLoss": "class_weights", "DPOLoss": "ref_logps", "GRPOLoss": "advantages"}


@every_loss()
def test_everything_on_the_meta_device(name):
    hidden = numbers(B, T, H).to("meta")
    changes = {"hidden": [hidden] * 2 if name == "MultiTokenLoss" else hidden}
    message = refusal(name, **changes)
    assert re.match("hidden.*: expected a tensor with data, got one on the meta device; ", message), message


@pytest.mark.parametrize("name, argument", [*META.items(), ("CrossEntropyLoss", "weight")])
def test_one_argument_on_the_meta_device(name, argument):
    message = refusal(name, **{argument: torch.empty(V, H, device="meta")})
    assert message.startswith(f"{argument}: expected a tensor with data, got one on the meta device; ")


# -- options and shapes that used to pass, or to fail far from the call


def test_cispo_without_its_bound():
    with pytest.raises(
        ValueError, match="^epsilon_high: expected the ratio's upper bound for cispo, got None"
    ):
        GRPOLoss(loss_type="cispo")
    with pytest.raises(ValueError, match="^epsilon_high: "):
        GRPOLoss(loss_type="cispo", epsilon=3.0)
    assert GRPOLoss(loss_type="cispo", epsilon_high=5.0).upper == 5.0


@pytest.mark.parametrize("name", ["DPOLoss", "KTOLoss"])
@pytest.mark.parametrize("shape", [(B + 1,), (B, T + 1), ()])
def test_reference_of_another_shape(name, shape):
    message = refusal(name, ref_logps=numbers(*shape))
    expected = rf"shape \({B},\) or targets' \({B}, {T}\), got "
    assert re.match(f"ref_logps: expected {expected}{re.escape(str(shape))}; ", message), message


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

    targets = torch.ones(B, T, dtype=torch.int64, device=DEVICE)
    with pytest.raises(TypeError, match="^scope: expected 'group' or 'batch' .*, got 'token'; declare it"):
        Forgetful()(numbers(B, T, H), numbers(V, H), targets)


# -- sequences apart, heads that are none


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("form", [tuple, list])
def test_chosen_and_rejected_in_two_tensors(name, form):
    halves = form(numbers(B, T, H).chunk(2))
    targets = form(torch.zeros(B, T, dtype=torch.int64, device=DEVICE).chunk(2))
    for changes in ({"hidden": halves}, {"targets": targets}, {"hidden": halves, "targets": targets}):
        message = refusal(name, **changes)
        assert "chosen first: torch.cat((chosen, rejected))" in message and re.match(
            "hidden|targets", message
        )


@pytest.mark.parametrize("name", PAIRED)
def test_chosen_and_rejected_by_keyword(name):
    chosen, rejected = numbers(B, T, H).chunk(2)
    message = refusal(name, chosen_hidden=chosen, rejected_hidden=rejected)
    assert "got chosen_hidden, rejected_hidden; concatenate" in message and "chosen first" in message


def test_heads_that_are_no_medusa_heads():
    for heads in ([nn.Linear(H, V)], nn.Linear(H, V), nn.ModuleList([nn.Linear(H, V)])):
        message = refusal("MedusaLoss", weight=heads)
        assert message.startswith(f"heads: expected a MedusaHeads module, got {type(heads).__name__}; ")


@pytest.mark.parametrize("name", ["MedusaLoss", "MultiTokenLoss"])
@pytest.mark.parametrize("shift", [True, False])
def test_labels_of_several_heads_are_never_shifted(name, shift):
    assert refusal(name, shift=shift).endswith("got shift; targets are unshifted labels already.")


def test_hidden_states_of_several_depths():
    assert refusal("MultiTokenLoss", hidden=numbers(B, T, H)).startswith(
        "hiddens: expected a list or tuple of tensors, got Tensor; "
    )


def test_the_best_tokens_of_a_teacher_are_a_pair():
    best = numbers(B, T, 2)
    for given in (best, (best,), [best, best, best]):
        message = refusal("JSDLoss", teacher_hidden=None, teacher_weight=None, teacher_logprobs_topk=given)
        assert message.startswith("teacher_logprobs_topk: expected a pair")
