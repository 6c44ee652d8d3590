"""A call packed into a flat list of tensors, and back: nothing is lost, and what is shared is there once."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from logitless import CrossEntropyLoss, DistillationLoss, DPOLoss, GRPOLoss
from logitless.engine.base import solve
from logitless.engine.call import HeadCall, Layers, pack, unpack
from logitless.engine.gradients import finished_sums
from logitless.engine.operands import SplitHead
from logitless.kernels import fused_projection
from logitless.parallel.vocabulary import Shards
from tests.engine.calls import call, given

H, V = 4, 11


def head(*shape: int):
    return (
        torch.randn(*shape, H).requires_grad_(),
        torch.randn(V, H).requires_grad_(),
        torch.randint(0, V, shape),
    )


def bias() -> torch.Tensor:
    return torch.randn(V).requires_grad_()


def pair() -> HeadCall:
    hidden, weight, targets = head(8)
    options = {"ref_logps": torch.randn(8), "cu_seqlens": torch.tensor([0, 3, 8]), "num_items": 3}
    return given(DPOLoss(), hidden, weight, targets, bias(), **options)


def split() -> HeadCall:
    hidden, weight, targets = head(2, 3)
    trained = torch.randn(V, 2, requires_grad=True)
    return given(
        CrossEntropyLoss(), torch.cat((hidden, hidden[..., :2]), -1), SplitHead(weight, trained), targets
    )


def taught() -> HeadCall:
    hidden, weight, targets = head(2, 3)
    teacher = {
        "teacher_hidden": torch.randn(2, 3, 6),
        "teacher_weight": torch.randn(V, 6),
        "teacher_bias": torch.randn(V),
    }
    return given(DistillationLoss(), hidden, weight, targets, **teacher)


CALLS = {
    "plain": lambda: given(CrossEntropyLoss(), *head(2, 3)),
    "bias": lambda: given(CrossEntropyLoss(), *head(2, 3), bias()),
    "weights": lambda: given(
        CrossEntropyLoss(), *head(2, 3), class_weights=torch.rand(V), num_items=torch.tensor(5)
    ),
    "pair": pair,
    "split head": split,
    "teacher": taught,
}


def assert_same(actual: object, expected: object, name: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual is expected, name
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), name
        for key in expected:
            assert_same(actual[key], expected[key], f"{name}.{key}")
    else:
        assert actual == expected, name


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_there_and_back(make):
    before = make()
    signature, tensors, sequences = pack([before])
    (after,) = unpack(signature, tensors, sequences)
    for field in fields(HeadCall):
        assert_same(getattr(after, field.name), getattr(before, field.name), field.name)
    trained = [x for x in (before.hidden, before.weight, before.bias) if x is not None]
    assert len(signature.needs) == len(trained)
    for index, x in zip(
        (after.indices.hidden, after.indices.weight, after.indices.bias),
        (before.hidden, before.weight, before.bias),
    ):
        assert (index is None) == (x is None)
        assert x is None or tensors[index] is x
    assert after.needs == (True, True, before.bias is not None, False)
    # Equal calls have equal signatures, which key compiled functions.
    again = make()
    assert pack([again])[0] == signature and hash(pack([again])[0]) == hash(signature)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))

    def blocks(self, head: int) -> nn.Module:
        return self.layers[head]


def heads(module: Blocks) -> list[HeadCall]:
    """A base head and two with layers in front; the second of them has a weight of its own."""
    base = given(CrossEntropyLoss(), *head(2, 3), bias())
    others = []
    for number in range(2):
        layers = Layers(module, number, dict(module.blocks(number).named_parameters()))
        weight = base.weight if number == 0 else torch.randn(V, H).requires_grad_()
        targets = torch.randint(0, V, (6,))
        others.append(replace(base, weight=weight, targets=targets, layers=layers, coefficient=0.5 + number))
    return [base, *others]


def test_what_several_heads_share_is_packed_once():
    module = Blocks()
    given_heads = heads(module)
    signature, tensors, sequences = pack(given_heads)
    trained = tensors[: len(signature.needs)]
    # Hidden, weight, bias, two parameters of each block, and the second head's weight.
    assert len(trained) == 3 + 2 + 2 + 1 and all(signature.needs)
    assert len({id(x) for x in trained}) == len(trained)
    calls = unpack(signature, tensors, sequences)
    assert len(calls) == 3
    base, first, second = calls
    assert base.indices.hidden == first.indices.hidden == second.indices.hidden
    assert base.indices.weight == first.indices.weight != second.indices.weight
    assert base.indices.bias == first.indices.bias == second.indices.bias
    assert not set(first.indices.layers) & set(second.indices.layers)
    assert [made.coefficient for made in calls] == [1.0, 0.5, 1.5]
    for made, before in zip(calls, given_heads, strict=True):
        for name in ("hidden", "weight", "bias", "targets"):
            assert getattr(made, name) is getattr(before, name)
    assert base.layers is None and not base.needs.layers
    for number, made in enumerate((first, second)):
        assert made.layers.head == number and made.layers.module is module and made.needs.layers
        expected = dict(module.blocks(number).named_parameters())
        assert set(made.layers.trained) == set(expected)
        assert all(made.layers.tensors[name] is x for name, x in expected.items())


def test_layers_that_are_frozen():
    module = Blocks()
    module.blocks(0).weight.requires_grad_(False)
    module.blocks(1).requires_grad_(False)
    signature, tensors, sequences = pack(heads(module))
    _, first, second = unpack(signature, tensors, sequences)
    assert first.layers.trained == ("bias",) and first.needs.layers
    assert second.layers.trained == () and not second.needs.layers


def hidden_is_weight(dtype: torch.dtype) -> list[HeadCall]:
    x = torch.randn(V, H, dtype=dtype, requires_grad=True)
    return [given(CrossEntropyLoss(), x, x, torch.randint(0, V, (V,)))]


SUMMED = {
    **{name: lambda make=make: [make()] for name, make in CALLS.items()},
    "heads with layers": lambda: heads(Blocks()),
    "hidden is weight": lambda: hidden_is_weight(torch.float32),
    "hidden is weight, bf16": lambda: hidden_is_weight(torch.bfloat16),
    "hidden is weight, fp16": lambda: hidden_is_weight(torch.float16),
}


@pytest.mark.parametrize("make", SUMMED.values(), ids=SUMMED)
def test_the_sums_of_gradients_are_what_graphs_are_told(make):
    """Shapes and dtypes by `finished_sums`, which the fakes of the operators return."""
    calls = unpack(*pack(make()))
    with torch.no_grad():  # as in the Function
        sums = solve(calls, fixed_dtypes=True).sums
    assert {index: (x.shape, x.dtype) for index, x in sums.items()} == finished_sums(calls)


@pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning")
@pytest.mark.parametrize("budget", [None, 600], ids=["one chunk", "several"])
@pytest.mark.parametrize(
    ("dtype", "autocast", "summed"),
    [
        (torch.bfloat16, False, torch.bfloat16),
        (torch.float16, False, torch.float32),
        (torch.float32, False, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.float32, True, torch.float32),
    ],
)
def test_the_dtype_of_d_weight_in_a_graph_is_that_of_the_weight(dtype, autocast, summed, budget):
    """The dtype does not depend on the number of chunks. It is fp32 for fp16 weights, in which a sum may
    overflow."""
    hidden = torch.randn(9, H, dtype=dtype, device="cpu")
    weight = torch.randn(V, H, dtype=dtype, device="cpu", requires_grad=True)
    targets = torch.arange(9, device="cpu") % V
    loss = CrossEntropyLoss(logits_budget=budget)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        calls = unpack(*pack([given(loss, hidden, weight, targets)]))
        with torch.no_grad():
            solved = solve(calls, fixed_dtypes=True)
    assert {index: (x.shape, x.dtype) for index, x in solved.sums.items()} == finished_sums(calls)
    (d_weight,) = solved.sums.values()
    assert (solved.plan.d_weight_parts > 1) == (budget is not None)
    assert d_weight.dtype == summed


def test_gradient_of_a_tensor_in_two_places():
    x = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    targets = torch.arange(V).flip(0)
    (ours,) = torch.autograd.grad(CrossEntropyLoss()(x, x, targets).loss, x)
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(x @ x.T, targets), x)
    torch.testing.assert_close(ours, expected)


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
WIDE = CrossEntropyLoss(logits_dtype=FP32)


@pytest.mark.parametrize(
    ("loss", "dtype", "fp32_logits"),
    [
        (WIDE, BF16, True),
        (DPOLoss(logits_dtype=FP32), BF16, True),
        # Where `logits_dtype` is open: a loss of one kernel, and one whose numbers are compared with others.
        (CrossEntropyLoss(), BF16, True),
        (GRPOLoss(entropy_coef=0.1), BF16, True),
        (CrossEntropyLoss(reduction="none", z_loss=0.1), BF16, True),
        (CrossEntropyLoss(z_loss=0.1), BF16, False),
        (CrossEntropyLoss(label_smoothing=0.1), BF16, False),
        (CrossEntropyLoss(), FP16, False),
        (replace(WIDE, z_loss=0.1), BF16, True),
        (CrossEntropyLoss(logits_dtype=BF16), BF16, False),
        (WIDE, FP16, False),
        (WIDE, FP32, False),
        (DistillationLoss(logits_dtype=FP32), BF16, False),
        # This rank's own answer; all of them decide (`HeadCall.with_shards`).
        (replace(WIDE, tp_group="tp"), BF16, True),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, CrossEntropyLoss) else str(x),
)
def test_which_logits_are_fp32(monkeypatch, loss, dtype, fp32_logits):
    monkeypatch.setattr(fused_projection, "serves", lambda dtype, H, *heads: dtype == BF16)
    hidden, weight, targets = (x.to(dtype) if x.is_floating_point() else x for x in head(8))
    options = {"advantages": torch.ones(8)} if isinstance(loss, GRPOLoss) else {}
    made = call(loss, hidden, weight, targets, cu_seqlens=torch.tensor([0, 3, 8]), **options)
    assert made.fp32_logits == fp32_logits
    assert made.logits_dtype == (FP32 if fp32_logits else loss.logits_dtype or dtype)


@pytest.mark.parametrize("agreed", [True, False])
def test_ranks_decide_together_on_fp32_logits(monkeypatch, agreed):
    monkeypatch.setattr(fused_projection, "serves", lambda dtype, H, *heads: not agreed)
    hidden, weight, targets = (x.to(BF16) if x.is_floating_point() else x for x in head(8))
    made = call(CrossEntropyLoss(tp_group="tp"), hidden, weight, targets).with_shards(Shards((3, 5), agreed))
    assert made.fp32_logits == agreed and made.logits_dtype == (FP32 if agreed else BF16)
    assert (made.V, made.width, made.vocabulary.sizes) == (8, 5, (3, 5))


@pytest.mark.parametrize("refused", [None, "weight", "ref_weight"])
@pytest.mark.parametrize("lora", [False, True])
def test_all_heads_must_be_served_for_fp32_logits(monkeypatch, refused, lora):
    """The weight or, of LoRA on the head, its frozen columns; and the reference's weight."""
    hidden, weight, targets = (x.to(BF16) if x.is_floating_point() else x for x in head(8))
    ref_weight = torch.randn(V, H, dtype=BF16)
    unserved = {"weight": weight, "ref_weight": ref_weight}.get(refused, targets).data_ptr()
    widths = []

    def serves(dtype, width, *heads):
        widths.append(width)
        return not any(one.data_ptr() == unserved for one in heads)

    monkeypatch.setattr(fused_projection, "serves", serves)
    given_head = SplitHead(weight, torch.randn(V, 2, dtype=BF16, requires_grad=True)) if lora else weight
    wide = torch.cat((hidden, hidden[:, :2]), -1) if lora else hidden
    options = {"cu_seqlens": torch.tensor([0, 3, 8]), "ref_hidden": hidden, "ref_weight": ref_weight}
    made = call(DPOLoss(logits_dtype=FP32), wide, given_head, targets, **options)
    assert made.fp32_logits == (refused is None)
    assert set(widths) == {wide.shape[1]}
