"""A captured pass has the results of the pass that was captured, for every later call with its key."""

import dataclasses
import gc
import threading
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch

from logitless import CrossEntropyLoss, DPOLoss, GRPOLoss, JSDLoss, KTOLoss, linear_cross_entropy
from logitless.engine import captured, early_projection, remembered, static_rows
from logitless.engine.base import solve
from logitless.engine.call import pack, unpack
from logitless.engine.captured import SIGHTINGS
from logitless.engine.early_projection import LIKELY
from logitless.engine.gradients import finished_sums
from logitless.engine.host_copy import HostCopy
from logitless.losses.base import LinearLoss
from tests.engine.calls import given
from tests.losses import every_loss
from tests.support import DEVICE

pytestmark = pytest.mark.usefixtures("uncompiled")
on_a_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="captures CUDA graphs")

B, T, H, V = 4, 6, 8, 30
# A call is replayed from this one on: the first ones count the rows, the next ones are projected early.
REPLAYED = LIKELY + SIGHTINGS


def tensors(x):
    """The tensors in what a captured function returns, in order."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for each in x.values() for t in tensors(each)]
    if isinstance(x, tuple | list):
        return [t for each in x for t in tensors(each)]
    if dataclasses.is_dataclass(x) or type(x).__name__ == "Projection":
        return [t for name, each in vars(x).items() if name != "call" for t in tensors(each)]
    return []


def simulated_capture(run, device):
    """Without a GPU, a replay runs the function again and copies its results to those of the first run."""
    results = run()

    def replay():
        for old, new in zip(tensors(results), tensors(run()), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    return replay, results


@contextmanager
def captures(*, static=False):
    """Calls are captured, without a GPU in a simulation; before and after, there is no pass.

    `static`: whether the rows of small calls are static.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_projection, "_runs_on_gpu", lambda x: x.shape[0] > 0)
        patch.setattr(static_rows, "has_kernel", lambda call: True)
        if not static:
            patch.setattr(static_rows, "SIZE", 0)
        patch.setattr(early_projection, "_STREAKS", remembered.Remembered())
        patch.setattr(captured, "CAPTURES_ON", (DEVICE.type,))
        patch.setattr(captured, "is_switched_off", lambda: False)  # `uncompiled` switches the compiler off
        if DEVICE.type != "cuda":
            patch.setattr(captured, "capture", simulated_capture)
        captured.forget()
        try:
            yield
        finally:
            captured.forget()


@pytest.fixture(autouse=True)
def capturing():
    with captures():
        yield


@pytest.fixture
def replays(monkeypatch):
    """One entry for each replay: whether its result was used."""
    used, run = [], captured.CapturedPass.run

    def spy(self, *arguments):
        result = run(self, *arguments)
        used.append(result is not None)
        return result

    monkeypatch.setattr(captured.CapturedPass, "run", spy)
    return used


class Operands:
    def __init__(self, seed=0, dtype=torch.float32):
        made = torch.Generator(DEVICE).manual_seed(seed)
        options = {"generator": made, "device": DEVICE}
        self.hidden = torch.randn(B, T, H, **options).to(dtype).requires_grad_()
        self.weight = torch.randn(V, H, **options).to(dtype).requires_grad_()
        self.bias = torch.randn(V, **options).to(dtype).requires_grad_()
        self.targets = torch.randint(V, (B, T), **options)
        self.per_sequence = torch.randn(B, **options)
        self.per_token = -torch.rand(B, T, **options)
        self.items = torch.rand((), **options) * 9 + 1
        self.ref_hidden = torch.randn(B, T, H, **options).to(dtype)
        self.ref_weight = torch.randn(V, H, **options).to(dtype)
        self.weights = torch.rand(V, **options)

    def refill(self, seed):
        """Other values in new tensors, except for the heads, which stay where they are."""
        other = Operands(seed, self.hidden.dtype)
        for name, x in vars(other).items():
            if name in ("weight", "bias", "ref_weight"):
                with torch.no_grad():
                    getattr(self, name).copy_(x)
            else:
                setattr(self, name, x)


def cross_entropy(x):
    out = CrossEntropyLoss(z_loss=0.1, return_predictions=True)(x.hidden, x.weight, x.targets, bias=x.bias)
    return out.loss, out.metrics.values(), out.predictions


def weighted(x):
    loss = CrossEntropyLoss(label_smoothing=0.1)
    options = {"class_weights": x.weights, "token_weights": -x.per_token, "num_items": x.items}
    return loss(x.hidden, x.weight, x.targets, **options).loss, ()


def frozen_head(x):
    return linear_cross_entropy(x.hidden, x.weight.detach(), x.targets, softcap=20.0), ()


def constant_hidden(x):
    return linear_cross_entropy(x.hidden.detach(), x.weight, x.targets, reduction="sum"), ()


def pairs(x):
    loss = DPOLoss(beta=0.3, return_logps=True)
    out = loss(x.hidden, x.weight, x.targets, ref_hidden=x.ref_hidden, ref_weight=x.ref_weight)
    return out.loss, out.metrics.values(), out.logps


def policies(x):
    loss = GRPOLoss(beta=0.1)
    given = {"old_logps": x.per_token, "ref_logps": x.per_token * 1.1, "advantages": x.per_sequence}
    out = loss(x.hidden, x.weight, x.targets, **given)
    return out.loss, out.metrics.values()


def shifted(x):
    """The last token of each sequence is ignored."""
    return linear_cross_entropy(x.hidden, x.weight, x.targets, shift=True, num_items=x.items), ()


def answers(x):
    """Prompts of one length are ignored."""
    targets = torch.where(torch.arange(T, device=DEVICE) < 2, -100, x.targets)
    out = DPOLoss(return_logps=True)(x.hidden, x.weight, targets, ref_logps=x.per_sequence)
    return out.loss, out.metrics.values(), out.logps


LOSSES = (cross_entropy, weighted, frozen_head, constant_hidden, pairs, policies, shifted, answers)


def results(run, x, scale=1.0):
    """The loss, what is returned beside it, and the gradients."""
    loss, metrics, *others = run(x)
    leaves = [x.hidden, x.weight, x.bias]
    gradients = torch.autograd.grad(scale * loss, leaves, allow_unused=True)
    return [loss.detach(), *metrics, *others, *[g for g in gradients if g is not None]]


def expect_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=0, equal_nan=True)


def by_readable_pass(run, x, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(captured, "CAPTURES_ON", ())
        return results(run, x, **options)


def warm(run, x):
    for _ in range(REPLAYED):
        results(run, x)


@pytest.mark.parametrize("run", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_results(run, dtype, replays, monkeypatch):
    """To the bit, for other values in other tensors, and other values of the head."""
    x = Operands(dtype=dtype)
    warm(run, x)
    for seed in range(1, 5):
        x.refill(seed)
        actual = results(run, x, scale=0.5 * seed)
        expect_equal(actual, by_readable_pass(run, x, monkeypatch, scale=0.5 * seed))
    assert replays == [True] * 5


# Not captured: statistics of tokens, several heads, a user's class, integer inputs.
WITH_IDS = ("top-k teacher", "support, top-k teacher")
NEVER = ("logprobs", "multi-token", "Medusa", "own TokenLoss", "own LogitsLoss", *WITH_IDS)


@pytest.mark.parametrize("name", every_loss.LOSSES)
def test_every_loss(name, replays, monkeypatch):
    heads = every_loss.heads()
    x = every_loss.given(6, ignored=0.0)

    def run():
        value, *others = every_loss.LOSSES[name](x, heads)
        found = every_loss.gradients(value, x, heads)
        return [value.detach(), *others, *found.values()]

    for _ in range(REPLAYED):
        run()
    for seed in (1, 2):
        every_loss.refill(x, seed, ignored=0.0)
        actual = run()
        with monkeypatch.context() as patch:
            patch.setattr(captured, "CAPTURES_ON", ())
            expect_equal(tensors(actual), tensors(run()))
    assert replays == ([] if name in NEVER else [True] * 3)


# With compact=False, integer inputs are no obstacle.
NEVER_ALL_ROWS = tuple(name for name in NEVER if name not in WITH_IDS)


@pytest.mark.parametrize("name", every_loss.LOSSES)
def test_all_rows(name, replays, monkeypatch):
    """With compact=False, other tokens are ignored in every call."""
    heads = every_loss.heads()
    x = every_loss.given(6)

    def run():
        value, *others = every_loss.LOSSES[name](x, heads, compact=False)
        found = every_loss.gradients(1.5 * value, x, heads)
        return [value.detach(), *others, *found.values()]

    kept = []
    for seed in range(SIGHTINGS + 3):
        every_loss.refill(x, seed, ignored=0.3 if seed % 3 else 0.0)
        actual = run()
        with monkeypatch.context() as patch:
            patch.setattr(captured, "CAPTURES_ON", ())
            expected = run()
        kept += zip(tensors(actual), tensors(expected), strict=True)
    for actual, expected in kept:  # at the end: no later call has changed the results
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert replays == ([] if name in NEVER_ALL_ROWS else [True] * 4)


def test_all_rows_of_calls_without_a_supervised_token(replays):
    """An upstream gradient of infinity reaches only the rows of supervised tokens, also after later calls."""
    x = Operands()
    targets = x.targets
    calls = []
    for count in (4, 5, 6, 0, 9, 0):
        x.targets = targets.clone()
        x.targets.view(-1)[count:] = -100
        calls.append((count, linear_cross_entropy(x.hidden, x.weight, x.targets, compact=False)))
    for count, loss in calls:
        d_hidden, d_weight = torch.autograd.grad(loss * torch.inf, (x.hidden, x.weight))
        assert d_hidden.flatten(0, 1).isfinite().all(1).tolist() == [False] * count + [True] * (B * T - count)
        assert d_weight.isfinite().all() == (count == 0)
    assert len(replays) == 4


@pytest.mark.skipif(DEVICE.type == "cuda", reason="an assertion ends the process of a GPU")
def test_all_rows_into_a_main_gradient():
    """A call without supervised tokens takes any upstream gradient, also after a replay that has some."""
    x = Operands()
    targets = x.targets

    def call(count):
        x.targets = targets.clone()
        x.targets.view(-1)[count:] = -100
        main = torch.zeros_like(x.weight)
        return CrossEntropyLoss(compact=False)(x.hidden, x.weight, x.targets, accumulate_into=main).loss

    for _ in range(SIGHTINGS):
        call(5)
    assert captured._PASSES
    nothing, something, _ = call(0), call(9), call(0)
    (3 * nothing).backward()
    with pytest.raises(RuntimeError, match="expected an upstream gradient of 1"):
        (3 * something).backward()


def test_all_rows_of_calls_that_are_looked_up_by_the_flattened_call(replays):
    x = Operands()
    labels = torch.tensor([True, False, True, False], device=DEVICE)
    for _ in range(SIGHTINGS + 1):
        loss = KTOLoss(compact=False)
        loss(x.hidden, x.weight, x.targets, ref_logps=x.per_token, labels=labels, kl=0.1)
    assert len(replays) == 2


@on_a_gpu
def test_a_step_that_is_going_to_be_captured_has_no_captured_pass(replays):
    x = Operands()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(SIGHTINGS + 1):
            linear_cross_entropy(x.hidden, x.weight, x.targets, compact=False)
    assert not replays


@pytest.mark.skipif(DEVICE.type == "cuda", reason="an assertion ends the process of a GPU")
def test_all_rows_assert_the_targets():
    x = Operands()
    for _ in range(SIGHTINGS + 1):
        linear_cross_entropy(x.hidden, x.weight, x.targets, compact=False)
    x.targets[1, 2] = V
    with pytest.raises(RuntimeError, match="targets: expected ids"):
        linear_cross_entropy(x.hidden, x.weight, x.targets, compact=False)


def masked(x):
    mask = torch.arange(T, device=DEVICE).expand(B, T) > 1
    return linear_cross_entropy(x.hidden, x.weight, x.targets, mask=mask, shift=True), ()


def halved(x):
    """Rows of hidden that are not contiguous, and another number of items in every call."""
    number = int(10 * x.items) + 1
    return linear_cross_entropy(
        x.hidden[:, 1:], x.weight, x.targets[:, 1:].contiguous(), num_items=number
    ), ()


def by_module(x):
    head = torch.nn.Linear(H, V, device=DEVICE)
    head.weight, head.bias = torch.nn.Parameter(x.weight), torch.nn.Parameter(x.bias)
    out = CrossEntropyLoss(return_logps=True)(x.hidden, head, x.targets)
    return out.loss, (), out.logps


@pytest.mark.parametrize("run", [masked, halved, by_module])
def test_arguments_that_are_bound_in_the_graph(run, replays, monkeypatch):
    """The mask and the shift are applied again for the values of each call."""
    x = Operands()
    warm(run, x)
    for seed in range(1, 4):
        x.refill(seed)
        expect_equal(results(run, x), by_readable_pass(run, x, monkeypatch))
    assert replays == [True] * 4


def test_ids_in_a_wider_tensor_are_not_captured(replays):
    """The graph would read a contiguous copy, for which torch.compile makes another kernel."""
    x = Operands()
    order = torch.rand(B, T, V, device=DEVICE).argsort(-1)
    logps = -torch.ones(B, T, 3, device=DEVICE)
    found = []
    for ids in (order[..., :3].contiguous(), order[..., :3]):
        replays.clear()
        for _ in range(REPLAYED):
            out = JSDLoss(compact=False)(x.hidden, x.weight, x.targets, teacher_logprobs_topk=(logps, ids))
        assert any(replays) == ids.is_contiguous()
        found.append((out.loss, *torch.autograd.grad(out.loss, (x.hidden, x.weight))))
    torch.testing.assert_close(*found)


@on_a_gpu  # a simulated replay runs the pass
@pytest.mark.parametrize("run", LOSSES)
def test_a_replay_checks_nothing_again(run, monkeypatch):
    """A call that is replayed is neither bound nor prepared."""
    x = Operands()
    warm(run, x)
    monkeypatch.setattr(LinearLoss, "bind", lambda *arguments: pytest.fail("bound"))
    x.refill(1)
    results(run, x)


WRONG = {
    "hidden": (lambda x: {"hidden": (x.hidden,), "num_items": 7}, TypeError, "^hidden: expected a tensor"),
    "0-d weight": (lambda x: {"weight": x.weight[0, 0]}, ValueError, "^weight: expected shape"),
    "sparse weight": (lambda x: {"weight": x.weight.detach().to_sparse()}, TypeError, "^weight: expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_arguments_that_have_no_key(name):
    change, kind, match = WRONG[name]
    x = Operands()
    arguments = {"hidden": x.hidden, "weight": x.weight, "targets": x.targets} | change(x)
    with pytest.raises(kind, match=match):
        CrossEntropyLoss()(**arguments)


def test_a_pass_keeps_no_graph_of_autograd():
    """Where nothing is trained, the pass is captured with gradients enabled."""
    x = Operands()
    leaf = x.ref_hidden.clone().requires_grad_()
    for _ in range(REPLAYED):
        teacher = leaf * 2
        mark = set()
        kept = weakref.ref(mark)
        teacher.grad_fn.metadata["mark"] = mark
        JSDLoss()(
            x.hidden.detach(),
            x.weight.detach(),
            x.targets,
            teacher_hidden=teacher,
            teacher_weight=x.ref_weight,
        )
        del teacher, mark
    assert captured._PASSES
    gc.collect()
    assert kept() is None


def test_the_dtypes_of_gradients_in_a_graph():
    """Replayed or not, they do not depend on the dtype of the sum."""
    x = Operands(dtype=torch.bfloat16)
    weight = x.weight.detach().requires_grad_()
    loss = CrossEntropyLoss(accum_dtype=torch.float32)
    hidden, targets = x.hidden.detach().flatten(0, 1), x.targets.flatten()
    for _ in range(REPLAYED):
        calls = unpack(*pack([given(loss, hidden, weight, targets)]))
        with torch.no_grad():
            sums = solve(calls, fixed_dtypes=True).sums
        assert {index: (each.shape, each.dtype) for index, each in sums.items()} == finished_sums(calls)
    assert captured._PASSES


def test_calls_that_are_looked_up_by_the_flattened_call_count():
    """So that a pass becomes stale."""
    x = Operands()
    before = captured.CapturedPass.calls
    labels = torch.tensor([True, False, True, False], device=DEVICE)
    for _ in range(REPLAYED):
        KTOLoss()(x.hidden, x.weight, x.targets, ref_logps=x.per_token, labels=labels, kl=0.1)
    assert captured._PASSES
    assert captured.CapturedPass.calls > before


def test_a_pass_waits_for_its_rows(replays):
    """It is not replayed while the last calls had other rows."""
    x, y = Operands(), Operands()
    with_fewer_tokens(y)
    y.weight = x.weight
    x.targets[0, 0] = y.targets[0, 0] = -100
    for operands in (x, y):
        for _ in range(REPLAYED):
            results(constant_hidden, operands)
    count = len(replays)
    x.targets[1, 0] = -100
    results(constant_hidden, x)
    assert len(replays) == count


@pytest.mark.parametrize("run", LOSSES)
def test_a_later_call_leaves_earlier_results_alone(run, replays):
    x = Operands()
    warm(run, x)
    before = results(run, x)
    copies = [torch.as_tensor(r).clone() for r in before]
    x.refill(1)
    first, second = results(run, x), results(run, x)
    expect_equal(before, copies)
    assert len(replays) == 4
    moved = [r for r in first if isinstance(r, torch.Tensor)]
    others = [r for r in second if isinstance(r, torch.Tensor)]
    assert not {r.data_ptr() for r in moved} & {r.data_ptr() for r in others}


@pytest.mark.parametrize("run", LOSSES)
def test_other_ignored_tokens_discard_the_replay(run, replays, monkeypatch):
    x = Operands()
    warm(run, x)
    x.targets[1, 3:] = -100
    actual = results(run, x)
    expect_equal(actual, by_readable_pass(run, x, monkeypatch))
    assert replays == [True, False]


@pytest.mark.parametrize("number", range(REPLAYED + 1))
def test_the_same_errors(number):
    x = Operands()
    for _ in range(number):
        results(cross_entropy, x)
    right = x.targets.clone()
    x.targets[0, 1] = V
    with pytest.raises(
        ValueError, match=r"^targets: expected ids in \[0, 30\) or ignore_index, got 1 outside"
    ):
        results(cross_entropy, x)
    x.targets = right
    expect_equal(results(cross_entropy, x), results(cross_entropy, x))


@pytest.mark.parametrize("upstream", [torch.inf, torch.nan])
def test_ignored_tokens_get_no_gradient(upstream, replays):
    x = Operands()
    warm(shifted, x)
    loss, _ = shifted(x)
    (d_hidden,) = torch.autograd.grad(loss, x.hidden, torch.tensor(upstream, device=DEVICE))
    assert replays == [True, True]
    assert not d_hidden[:, -1].any()
    assert not d_hidden[:, :-1].isfinite().any()


def test_an_input_that_begins_where_the_targets_do(replays, monkeypatch):
    x = Operands()
    x.targets[0, 0] = 7

    def run(x):
        return linear_cross_entropy(x.hidden, x.weight, x.targets, num_items=x.targets[0, 0]), ()

    warm(run, x)
    expect_equal(results(run, x), by_readable_pass(run, x, monkeypatch))
    assert replays == [True, True]


class OwnLoss(CrossEntropyLoss):
    """May do anything."""


def test_a_subclass_of_a_user_is_not_captured(replays):
    x = Operands()
    warm(lambda x: (OwnLoss()(x.hidden, x.weight, x.targets).loss, ()), x)
    assert not replays


def test_another_default_dtype(replays, monkeypatch):
    x = Operands()
    torch.set_default_dtype(torch.float64)
    try:
        warm(policies, x)
        expect_equal(results(policies, x), by_readable_pass(policies, x, monkeypatch))
    finally:
        torch.set_default_dtype(torch.float32)
    assert replays == [True, True]


def test_num_items_of_zero():
    x = Operands()
    warm(weighted, x)
    x.items = torch.zeros((), device=DEVICE)
    with pytest.raises(ValueError, match="^num_items: expected a number above 0"):
        results(weighted, x)


def with_fewer_tokens(x):
    x.hidden, x.targets = x.hidden[:, :4].detach().requires_grad_(), x.targets[:, :4].contiguous()


def with_another_head(x):
    x.weight = torch.randn_like(x.weight).requires_grad_()


def with_a_frozen_head(x):
    x.weight.requires_grad_(False)


def with_a_frozen_bias(x):
    x.bias.requires_grad_(False)


CHANGES = (with_fewer_tokens, with_another_head, with_a_frozen_head, with_a_frozen_bias)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_noticed(change, replays, monkeypatch):
    x = Operands()

    def run(x):
        return linear_cross_entropy(x.hidden, x.weight, x.targets, bias=x.bias), ()

    def gradients(x):
        leaves = [x.hidden, x.weight, x.bias]
        for leaf in leaves:
            leaf.grad = None
        loss, _ = run(x)
        loss.backward()
        return [loss.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    for _ in range(REPLAYED):
        gradients(x)
    kept = x.weight  # so that its memory is not given to another head
    change(x)
    actual = gradients(x)
    monkeypatch.setattr(captured, "CAPTURES_ON", ())
    expect_equal(actual, gradients(x))
    assert replays == [True]
    assert kept is not None


class Call:
    """A call whose properties a test changes one at a time."""

    def __init__(self, kind, options, names, dtype=torch.float32):
        x = Operands(dtype=dtype)
        self.kind, self.options = kind, options
        self.hidden, self.weight, self.targets = x.hidden, x.weight, x.targets
        inputs = {
            "class_weights": x.weights,
            "token_weights": -x.per_token,
            "ref_hidden": x.ref_hidden,
            "ref_weight": x.ref_weight,
            "old_logps": x.per_token,
            "ref_logps": 1.1 * x.per_token,
            "advantages": x.per_sequence,
        }
        self.arguments = {name: inputs[name] for name in names}
        self.context = nullcontext

    def results(self):
        leaves = [x for x in (self.hidden, self.weight, self.arguments.get("bias")) if x is not None]
        with self.context():
            out = self.kind(**self.options)(self.hidden, self.weight, self.targets, **self.arguments)
        found = [out.loss.detach(), *out.metrics.values(), *out.tokens.values()]
        if out.loss.requires_grad:
            wanted = [x for x in leaves if x.requires_grad]
            found += torch.autograd.grad(out.loss, wanted)
        return found


CALLS = {
    "cross-entropy": (CrossEntropyLoss, {"label_smoothing": 0.1}, ("class_weights", "token_weights")),
    "DPO": (DPOLoss, {"beta": 0.3}, ("ref_hidden", "ref_weight")),
    "GRPO": (GRPOLoss, {"beta": 0.1}, ("old_logps", "ref_logps", "advantages")),
}


def fewer_tokens(x):
    """In tensors of the same strides."""
    x.hidden, x.targets = x.hidden.detach()[:2].requires_grad_(), x.targets[:2]
    for name, y in x.arguments.items():
        if y.shape[0] == B:
            x.arguments[name] = y[:2]


def other_strides(x):
    x.hidden = x.hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()


def rows_of_a_wider_tensor(x):
    x.hidden = torch.cat([x.hidden.detach()] * 2, -1)[..., :H].requires_grad_()


def other_strides_of_the_head(x):
    x.weight = x.weight.detach().t().contiguous().t().requires_grad_()


def in_bf16(x):
    x.hidden, x.weight = (y.detach().bfloat16().requires_grad_() for y in (x.hidden, x.weight))
    for name in ("ref_hidden", "ref_weight"):
        if name in x.arguments:
            x.arguments[name] = x.arguments[name].bfloat16()


def inputs_in_fp64(x):
    for name in ("class_weights", "token_weights", "old_logps", "advantages"):
        if name in x.arguments:
            x.arguments[name] = x.arguments[name].double()


def targets_in_int32(x):
    x.targets = x.targets.int()


def a_constant_hidden(x):
    x.hidden = x.hidden.detach()


def a_frozen_weight(x):
    x.weight.requires_grad_(False)


def a_bias(x):
    x.arguments["bias"] = torch.linspace(-1, 1, V, device=DEVICE, dtype=x.weight.dtype).requires_grad_()


def a_shift(x):
    x.arguments["shift"] = True


def a_mask(x):
    x.arguments["mask"] = torch.arange(T, device=DEVICE).expand(B, T) > 1


def a_divisor(x):
    x.arguments["num_items"] = 7


def another_option(x):
    x.options = x.options | {"temperature": 0.7}


def another_ignore_index(x):
    x.options = x.options | {"ignore_index": int(x.targets[0, 0])}


def statistics_too(x):
    x.options = x.options | {"return_logps": True}


def under_autocast(x):
    x.context = lambda: torch.autocast(DEVICE.type, torch.bfloat16)


def under_no_grad(x):
    x.context = torch.no_grad


def without_an_input(x):
    for name in ("class_weights", "ref_weight", "old_logps"):
        if name in x.arguments:
            x.arguments.pop(name)
    if "ref_hidden" in x.arguments:
        x.arguments["ref_logps"] = x.arguments.pop("ref_hidden").float().mean((1, 2))


PROPERTIES = (
    fewer_tokens,
    other_strides,
    rows_of_a_wider_tensor,
    other_strides_of_the_head,
    in_bf16,
    inputs_in_fp64,
    targets_in_int32,
    a_constant_hidden,
    a_frozen_weight,
    a_bias,
    a_shift,
    a_mask,
    a_divisor,
    another_option,
    another_ignore_index,
    statistics_too,
    under_autocast,
    under_no_grad,
    without_an_input,
)


@pytest.mark.parametrize("change", PROPERTIES)
@pytest.mark.parametrize("name", CALLS)
def test_each_property_of_a_call_is_in_its_key(name, change, replays, monkeypatch):
    """A call that differs in one property is not replayed by the pass of another, and equal to the bit."""
    first, other = Call(*CALLS[name]), Call(*CALLS[name])
    if change not in (other_strides_of_the_head, in_bf16):
        other.weight = first.weight
    change(other)

    def run(call):
        if change is a_frozen_weight:
            first.weight.requires_grad_(call is first)
        actual = call.results()
        with monkeypatch.context() as patch:
            patch.setattr(captured, "CAPTURES_ON", ())
            expect_equal(actual, call.results())

    monkeypatch.setattr(captured, "SIGHTINGS", 1)
    for call in (first, other):
        for _ in range(LIKELY + 1):
            run(call)
        assert replays
    run(first)


def of_other_strides(base):
    return base.view(-1)[: V * H].view(V, H)


def of_fewer_ids(base):
    return base[: V - 1, :H]


@pytest.mark.parametrize("other", [of_other_strides, of_fewer_ids])
def test_two_heads_at_one_address(other, monkeypatch):
    x = Operands()
    x.targets %= V - 1
    base = torch.randn(V, 2 * H, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))

    def run(x):
        return linear_cross_entropy(x.hidden, x.weight, x.targets), ()

    for view in (lambda base: base[:, :H], other):
        x.weight = view(base).requires_grad_()
        warm(run, x)
        expect_equal(results(run, x), by_readable_pass(run, x, monkeypatch))


def test_the_options_of_the_loss(replays, monkeypatch):
    """Losses with equal fields share a pass, others do not."""
    x = Operands()

    def run(smoothing):
        return lambda x: (CrossEntropyLoss(label_smoothing=smoothing)(x.hidden, x.weight, x.targets).loss, ())

    for _ in range(REPLAYED):
        results(run(0.1), x)
        results(run(0.2), x)
    assert replays == [True, True]
    for smoothing in (0.1, 0.2, 0.1):
        expect_equal(results(run(smoothing), x), by_readable_pass(run(smoothing), x, monkeypatch))


def test_precision_by_the_new_api_of_torch(replays):
    x = Operands()
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        warm(cross_entropy, x)
        assert replays == [True]
        matmul.fp32_precision = "tf32"
        results(cross_entropy, x)
        assert replays == [True]
    finally:
        matmul.fp32_precision = before


def test_without_gradients(replays, monkeypatch):
    x = Operands()
    with torch.no_grad():
        for _ in range(REPLAYED):
            pairs(x)
        for seed in (1, 2):
            x.refill(seed)
            loss, metrics, logps = pairs(x)
            with monkeypatch.context() as patch:
                patch.setattr(captured, "CAPTURES_ON", ())
                expected, expected_metrics, expected_logps = pairs(x)
            expect_equal([loss, *metrics, logps], [expected, *expected_metrics, expected_logps])
    assert replays == [True] * 3


def test_with_gradients_after_calls_without(monkeypatch):
    x = Operands()
    with torch.no_grad():
        warm_calls = [cross_entropy(x) for _ in range(REPLAYED)]
    assert captured._PASSES and not warm_calls[-1][0].requires_grad
    expect_equal(results(cross_entropy, x), by_readable_pass(cross_entropy, x, monkeypatch))


def test_pairs_of_alternating_lengths(replays):
    x, y = Operands(), Operands()
    with_fewer_tokens(y)
    y.ref_hidden = y.ref_hidden[:, :4].contiguous()
    y.weight, y.ref_weight, y.bias = x.weight, x.ref_weight, x.bias
    for _ in range(2 * REPLAYED):
        results(pairs, x)
        results(pairs, y)
    assert len(captured._PASSES) == 2
    assert len(replays) > REPLAYED


def test_nothing_of_the_call_is_kept():
    x = Operands()
    warm(pairs, x)
    assert captured._PASSES
    heads = () if DEVICE.type == "cuda" else ("weight", "ref_weight")  # a simulated replay runs the pass
    kept = [weakref.ref(t) for name, t in vars(x).items() if name not in heads]
    del x
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_at_most_so_many_passes(monkeypatch):
    monkeypatch.setattr(captured, "MAX_PASSES", 2)
    monkeypatch.setattr(captured, "STALE", 32)
    xs = [Operands() for _ in range(3)]
    for x in xs:
        warm(cross_entropy, x)
    first, second = captured._PASSES
    for _ in range(captured.STALE):
        results(cross_entropy, xs[1])
    results(cross_entropy, xs[2])
    assert len(captured._PASSES) == 2
    assert second in captured._PASSES
    assert first not in captured._PASSES
    warm(cross_entropy, xs[0])
    assert first not in captured._PASSES  # neither of the others is stale


def test_another_thread_during_a_replay(replays):
    """It runs the pass itself."""
    x = Operands()
    warm(cross_entropy, x)
    expected = results(cross_entropy, x)
    count = len(replays)
    others = []
    with captured._LOCK:
        thread = threading.Thread(target=lambda: others.append(results(cross_entropy, x)))
        thread.start()
        thread.join(60)
    expect_equal(others[0], expected)
    assert len(replays) == count


@pytest.mark.parametrize("large", [False, True])
def test_small_calls_alone(large, monkeypatch):
    x = Operands()
    size = B * T * V * 4
    monkeypatch.setattr(captured, "most_bytes", lambda device: size - 1 if large else 2**20)
    warm(cross_entropy, x)
    assert bool(captured._PASSES) is not large


def test_a_failed_capture(monkeypatch, caplog):
    """The call runs as if there were no captures, and the capture is not tried again."""
    x = Operands()
    tries = []

    def fail(run, device):
        tries.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured, "capture", fail)
    with caplog.at_level("INFO", logger="logitless.engine.captured"):
        for _ in range(REPLAYED + 3):
            results(cross_entropy, x)
    assert len(tries) == 1
    assert "CrossEntropyLoss is not captured: RuntimeError: operation not permitted" in caplog.text


def test_a_call_of_several_chunks_is_not_captured(replays, monkeypatch):
    def small(x):
        return CrossEntropyLoss(logits_budget=3 * V * 4)(x.hidden, x.weight, x.targets).loss, ()

    captures = []
    monkeypatch.setattr(captured, "capture", lambda *arguments: captures.append(arguments))
    x = Operands()
    warm(small, x)
    expect_equal(results(small, x), by_readable_pass(small, x, monkeypatch))
    assert not captures and not replays


def doubled():
    return torch.arange(4, device=DEVICE) * 2


def fails():
    raise ValueError("no reason")


def syncs():
    return doubled().sum().item()


@on_a_gpu
@pytest.mark.parametrize("run", [fails, syncs])
def test_a_capture_that_fails_changes_nothing(run):
    torch.manual_seed(3)
    expected = torch.rand(4, device=DEVICE)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError)):
            captured.capture(run, DEVICE)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(4, device=DEVICE), expected)
    replay, result = captured.capture(doubled, DEVICE)
    replay()
    assert result.tolist() == [0, 2, 4, 6]


@on_a_gpu
def test_the_host_waits_for_the_counts_of_its_own_replay():
    """Not for those of an earlier replay, and not for what is queued after them."""
    x = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    counts = HostCopy(x, repeats=True)

    def run():
        counts.copy(x)
        torch.cuda._sleep(20_000_000)
        return x * 2

    replay, _ = captured.capture(run, DEVICE)
    for number in range(20):
        torch.cuda._sleep(2_000_000)
        x.fill_(number)
        replay()
        assert counts.tolist() == [number] * 4
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()


@on_a_gpu
def test_a_pool_outlives_its_graphs():
    for _ in range(3):
        replay, result = captured.capture(doubled, DEVICE)
        replay()
        assert result.tolist() == [0, 2, 4, 6]
        del replay, result
        gc.collect()
