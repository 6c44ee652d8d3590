"""A small call projects every row, with the results of one that projects the supervised rows."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from logitless import CrossEntropyLoss, DistillationLoss, DPOLoss, linear_cross_entropy
from logitless.engine import base, budget, captured, early_projection, static_rows
from logitless.engine.captured import SIGHTINGS
from tests.engine import test_captured
from tests.engine.test_captured import NEVER, WITH_IDS, Operands, V, captures, expect_equal
from tests.losses import every_loss
from tests.support import DEVICE

pytestmark = pytest.mark.usefixtures("uncompiled")
# `captures` replaces it, as the CPU has no kernels.
has_kernel = static_rows.has_kernel
replays = test_captured.replays


@pytest.fixture(autouse=True)
def capturing():
    with captures(static=True):
        yield


@contextmanager
def uncaptured(*, static=True):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "CAPTURES_ON", ())
        if not static:
            patch.setattr(static_rows, "SIZE", 0)
        yield


def poison(x):
    """What no call may read: NaN, and ids that do not exist, wherever a token is ignored."""
    ignored = x.targets == -100
    with torch.no_grad():
        for _, values in x.items():
            if values.shape[:2] == ignored.shape and values is not x.targets:
                values[ignored] = torch.nan if values.is_floating_point() else -7


# Integer inputs are no obstacle.
LOSSES = [name for name in every_loss.LOSSES if name not in NEVER or name in WITH_IDS]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name, replays):
    """Other tokens are ignored in every call: equal to the bit to the pass that is not captured, and to the
    rounding of fp32 to the pass over the supervised rows."""
    heads = every_loss.heads()
    x = every_loss.given(6)

    def run():
        value, *others = every_loss.LOSSES[name](x, heads)
        found = every_loss.gradients(1.5 * value, x, heads)
        return [value.detach(), *others, *found.values()]

    for seed in range(SIGHTINGS + 3):
        every_loss.refill(x, seed, ignored=0.3 if seed % 3 else 0.0)
        poison(x)
        actual = run()
        with uncaptured():
            expect_equal(actual, run())
        with uncaptured(static=False):
            expected = run()
        assert expected[0].isfinite()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert replays == [True] * 4


def rows(call):
    return call().plan.rows


def test_which_calls_have_static_rows(monkeypatch):
    monkeypatch.setattr(captured, "CAPTURES_ON", ())
    x = Operands()
    x.targets[:, 1:] = -100
    some, every = x.targets.shape[0], x.targets.numel()

    class Own(CrossEntropyLoss):
        pass

    def call(loss, **inputs):
        return lambda: loss(x.hidden, x.weight, x.targets, **inputs)

    main = torch.zeros_like(x.weight)
    assert rows(call(CrossEntropyLoss())) == every
    assert rows(call(CrossEntropyLoss(), accumulate_into=main)) == every
    assert rows(call(CrossEntropyLoss(logits_budget=2**20))) == some
    assert rows(call(CrossEntropyLoss(reduction="none"))) == some
    assert rows(call(Own())) == some
    memory = static_rows.total_memory(x.weight.device)
    reference = {"ref_hidden": x.ref_hidden, "ref_weight": x.ref_weight}
    for products, made in ((3, call(CrossEntropyLoss())), (4, call(DPOLoss(), **reference))):
        size = products * x.targets.numel() * x.weight.numel()
        monkeypatch.setattr(static_rows, "SIZE", size / memory)
        assert rows(made) == every
        monkeypatch.setattr(static_rows, "SIZE", (size - 1) / memory)
        assert rows(made) == some
    monkeypatch.setattr(static_rows, "SIZE", 6)
    monkeypatch.setattr(static_rows, "SHARE", x.targets.numel() * V * 4 / memory)
    assert rows(call(CrossEntropyLoss())) == every
    monkeypatch.setattr(static_rows, "SHARE", (x.targets.numel() * V * 4 - 1) / memory)
    assert rows(call(CrossEntropyLoss())) == some
    monkeypatch.setattr(static_rows, "SHARE", 1)
    monkeypatch.setattr(static_rows, "has_kernel", lambda call: False)
    assert rows(call(CrossEntropyLoss())) == some


def test_losses_of_logits_without_a_kernel_have_no_static_rows(monkeypatch):
    monkeypatch.setattr(static_rows, "has_kernel", has_kernel)
    found = []
    assume = static_rows.with_static_rows
    monkeypatch.setattr(early_projection, "with_static_rows", lambda call: found.append(1) or assume(call))
    x = every_loss.given(6)
    every_loss.LOSSES["cosine"](x, None)
    every_loss.LOSSES["top-k teacher"](x, None)
    assert not found
    for number, name in enumerate(("DPO", "support", "support, top-k teacher"), 1):
        every_loss.LOSSES[name](x, None)
        assert len(found) == number


def test_gathered_logits(replays):
    """A call that computes a few logits from rows of the head has static rows, but no captured pass."""
    wide = torch.randn(400, every_loss.H, device=DEVICE, requires_grad=True)
    x = every_loss.given(6)
    poison(x)
    loss = DistillationLoss(divergence="reverse_kl", support="teacher", topk_mode="renormalize")
    best = x.topk_logprobs[..., :2], x.topk_ids[..., :2]

    def run():
        out = loss(x.hidden, wide, x.targets, teacher_logprobs_topk=best)
        assert "gathered: 2 columns" in out.plan.describe()
        return [out.loss, *torch.autograd.grad(out.loss, (x.hidden, wide))], out.plan.rows

    for _ in range(SIGHTINGS + 2):
        actual, rows = run()
    with uncaptured(static=False):
        expected, supervised = run()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert supervised < rows == x.targets.numel() and actual[1].abs().sum() > 0 and not replays


def test_what_is_in_an_ignored_row():
    """Nothing that a call has there reaches a pass."""
    x = every_loss.given(6)
    poison(x)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        assume = static_rows.with_static_rows
        patch.setattr(
            early_projection, "with_static_rows", lambda call: found.append(assume(call)) or found[-1]
        )
        every_loss.LOSSES["GRPO"](x, None)
        every_loss.LOSSES["JSD"](x, None)
        every_loss.LOSSES["top-k teacher"](x, None)
    ignored = x.targets.flatten() == -100
    for assumed in found:
        targets = assumed.call.targets  # with ignore_index, as the labels of a JSD are
        inputs = [
            tensor for tensor in assumed.call.inputs.values() if tensor is not None and tensor is not targets
        ]
        rows = [assumed.call.hidden, *(tensor for tensor in inputs if tensor.shape[:1] == ignored.shape)]
        assert len(rows) > 1 and not any(tensor[ignored].any() for tensor in rows)
    assert len(found) == 3


@pytest.mark.parametrize("number", [0, 1, SIGHTINGS, SIGHTINGS + 1])
def test_errors(number, replays):
    """The same after right calls, and the next right call is right."""
    x = Operands()
    x.targets[1, 2:] = -100
    items = torch.tensor(3.0, device=x.hidden.device)

    def run():
        loss = linear_cross_entropy(x.hidden, x.weight, x.targets, bias=x.bias, num_items=items)
        return [loss.detach(), *torch.autograd.grad(loss, (x.hidden, x.weight, x.bias))]

    for _ in range(number):
        run()
    expected, right = run(), x.targets.clone()
    for wrong in (V, -1):
        x.targets[0, 1] = wrong
        with pytest.raises(ValueError, match="^targets: expected ids in .* got 1 outside"):
            run()
    x.targets = right
    items.zero_()
    with pytest.raises(ValueError, match="^num_items: expected a number above 0"):
        run()
    items.fill_(3)
    passes = list(captured._PASSES.values())
    expect_equal(run(), expected)
    assert all(x in captured._PASSES.values() for x in passes)


def test_labels_that_are_no_flags(replays):
    """A check of the loss's own, whose count the host reads with the others."""
    heads, x = every_loss.heads(), every_loss.given(6)
    for _ in range(SIGHTINGS + 1):
        x.labels = torch.tensor([1, 0, 1, 0], device=x.hidden.device)
        value, *_ = every_loss.LOSSES["KTO"](x, heads)
        x.labels = torch.tensor([1, 0, 1, 2], device=x.hidden.device)
        with pytest.raises(ValueError, match="^labels: "):
            every_loss.LOSSES["KTO"](x, heads)
    assert True in replays


def test_no_supervised_token(replays):
    """The loss and all gradients are 0. The pass over every row is discarded."""
    x = Operands()
    targets = x.targets.clone()

    def run():
        loss = linear_cross_entropy(x.hidden, x.weight, x.targets)
        return [loss.detach(), *torch.autograd.grad(loss * torch.inf, (x.hidden, x.weight))]

    for call in range(SIGHTINGS + 3):
        x.targets = targets.clone() if call != SIGHTINGS + 1 else torch.full_like(targets, -100)
        found = run()
        if call == SIGHTINGS + 1:
            assert not any(tensor.any() for tensor in found)
    assert replays == [True, True, False, True]


@pytest.mark.parametrize("ignored", [0.3, 1.0])
@pytest.mark.parametrize("name", ["top-k teacher", "cosine", "DPO"])
def test_the_plan_of_the_pass_into_a_main_gradient(name, ignored, monkeypatch):
    ran, run_spans = [], base.run_spans
    monkeypatch.setattr(base, "run_spans", lambda plan, *more: ran.append(plan) or run_spans(plan, *more))
    plans, plan_into_main = [], base._plan_into_main
    monkeypatch.setattr(
        base, "_plan_into_main", lambda *given: plans.append(plan_into_main(*given)) or plans[-1]
    )
    x = every_loss.given(9)
    if ignored == 1:
        x.targets.fill_(-100)
    every_loss.LOSSES[name](x, None, accumulate_into=torch.zeros_like(x.weight))[0].backward()
    (plan,) = plans
    if ignored == 1:
        ran = ran[1:]  # the first pass was discarded
    assert [replace(plan, in_backward=None), plan.in_backward] == ran
    assert plan.rows == plan.in_backward.rows == (0 if ignored == 1 else x.targets.numel())


def test_into_a_main_gradient(replays):
    """The pass of the backward pass has the same rows as that of the forward pass."""
    x = Operands()
    targets = x.targets.clone()
    for call in range(SIGHTINGS + 2):
        x.targets = targets.clone()
        x.targets[1:, call:] = -100
        if call == SIGHTINGS:
            x.targets.fill_(-100)
        with torch.no_grad():
            x.hidden[x.targets == -100] = torch.nan
        loss = linear_cross_entropy(x.hidden, x.weight, x.targets)
        expected = torch.autograd.grad(loss, (x.hidden, x.weight))
        main = torch.zeros_like(x.weight)
        out = CrossEntropyLoss()(x.hidden, x.weight, x.targets, accumulate_into=main)
        (d_hidden,) = torch.autograd.grad(out.loss, x.hidden)
        expect_equal([out.loss, d_hidden, main], [loss, *expected])
        x.hidden = torch.randn_like(x.hidden).requires_grad_()
    with pytest.raises(ValueError, match="expected an upstream gradient of 1"):
        (3 * CrossEntropyLoss()(x.hidden, x.weight, targets, accumulate_into=main).loss).backward()
    assert len(replays) > 3


def test_a_pass_is_planned_once(monkeypatch):
    """A capture measures no loss anew, which compiles it."""
    x = every_loss.given(9)
    monkeypatch.setattr(budget, "_MEASURED", {})
    for _ in range(SIGHTINGS):
        every_loss.LOSSES["cosine"](x, None)
    assert captured._PASSES and len(budget._MEASURED) == 1


def test_upstream_gradients_of_ignored_tokens(replays):
    x = Operands()
    for call in range(SIGHTINGS + 1):
        x.targets[1, call:] = -100
        loss = DPOLoss()(x.hidden, x.weight, x.targets, ref_logps=x.per_token).loss
        (d_hidden,) = torch.autograd.grad(loss * torch.inf, x.hidden)
        ignored = x.targets == -100
        assert not d_hidden[ignored].any()
        assert not d_hidden[~ignored].isfinite().all(-1).any()
    assert len(replays) == 2


@pytest.mark.parametrize("compact", [True, False])
def test_in_a_compiled_graph(compact, replays):
    """The operator of a compiled graph replays the same passes."""
    x = Operands()

    def step(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, compact=compact) * 1.5

    with torch.compiler.set_stance("default"):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for call in range(SIGHTINGS + 2):
            x.targets[1, call:] = -100
            actual = torch.autograd.grad(compiled(x.hidden, x.weight, x.targets), (x.hidden, x.weight))
            with uncaptured():
                expected = torch.autograd.grad(step(x.hidden, x.weight, x.targets), (x.hidden, x.weight))
            expect_equal(actual, expected)
    assert len(replays) == 3
