"""accumulate_into: the head's gradient goes straight into a main gradient, in the backward pass, and nowhere
else."""

from dataclasses import replace

import pytest
import torch

from logitless import CrossEntropyLoss, DPOLoss
from logitless.engine import base
from tests.cases import operands
from tests.losses import every_loss
from tests.losses.every_loss import LOSSES, Given
from tests.support import DEVICE, AllocationWatcher, GemmCounter, relative_error

# Without those of several heads, and the primitive, whose loss is the caller's.
NAMES = [name for name in LOSSES if name not in ("logprobs", "multi-token", "Medusa")]
pytestmark = [
    pytest.mark.usefixtures("uncompiled"),
    pytest.mark.filterwarnings("ignore::logitless.BudgetWarning"),
]


WAYS = {
    "one chunk": {},
    "chunks": {"logits_budget": 60_000},
    "all rows": {"compact": False},
    "all rows, chunks": {"compact": False, "logits_budget": 60_000},
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_adds_what_weight_grad_would_be(name, options):
    x = every_loss.given(9, dtype=torch.float64)
    start = torch.linspace(-1, 1, x.weight.numel(), dtype=torch.float64).view_as(x.weight)
    main = start.clone()
    plain, *numbers = LOSSES[name](x, None, **options)
    expected = torch.autograd.grad(plain, (x.hidden, x.weight, x.bias))
    ours, *our_numbers = LOSSES[name](x, None, accumulate_into=main, grad_scale=0.3, **options)
    torch.testing.assert_close([ours, *our_numbers], [plain, *numbers])
    assert torch.equal(main, start), "added to in the forward pass"
    ours.backward(retain_graph=True)
    assert x.weight.grad is None
    for actual, truth in zip((x.hidden.grad, main - start, x.bias.grad), expected):
        assert truth.norm() > 0 and relative_error(actual, 0.3 * truth) < 1e-12
    ours.backward()
    assert relative_error(main - start, 0.6 * expected[1]) < 1e-12


def halves(x: Given) -> list[Given]:
    """Two micro-batches of two sequences each; tensors that are no sequences' stay whole."""
    whole = ("weight", "bias", "teacher_weight")
    return [
        Given(**{name: tensor if name in whole else tensor[part] for name, tensor in x.items()})
        for part in ([0, 2], [1, 3])
    ]


@pytest.mark.parametrize(
    "name", ["cross-entropy, smoothed", "DPO", "SimPO", "GRPO", "REINFORCE", "JSD", "own LogitsLoss"]
)
@pytest.mark.parametrize("scaled", [False, True], ids=["num_items", "grad_scale"])
def test_micro_batches_equal_one_batch(name, scaled):
    # Without ignored targets both halves have the same number of each unit.
    x = every_loss.given(9, dtype=torch.float64, ignored=0.0)
    main = torch.zeros_like(x.weight)
    LOSSES[name](x, None)[0].backward()
    items = 2 if name in ("DPO", "SimPO") else x.targets.numel()
    # GRPO's bonus is a mean of the call's own tokens.
    options = {"grad_scale": 0.5} if scaled or name == "GRPO" else {"num_items": items}
    values = [LOSSES[name](half, None, accumulate_into=main, **options)[0] for half in halves(x)]
    # Both forward passes are over: the buffer may change between a forward pass and its backward.
    for value in values:
        value.backward()
    assert relative_error(main, x.weight.grad) < 1e-12


@pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_loses_nothing(dtype, autocast):
    """Of a sum that is in fp32, and with gradients of a logit that fp16 cannot hold."""
    h, w, targets, b = operands((300,), 16, 200, torch.float32)
    operand_dtype = torch.float32 if autocast else dtype
    h, w, b = (x.to(dtype).to(operand_dtype).requires_grad_() for x in (h, w, b))
    exact = [x.detach().double().requires_grad_() for x in (h, w, b)]
    truth = CrossEntropyLoss()(*exact[:2], targets, bias=exact[2], num_items=1e9).loss
    (truth,) = torch.autograd.grad(truth, exact[1])
    start = torch.randn(200, 16) * truth.std()
    main = start.clone()
    given = {"num_items": 1e9, "accumulate_into": main}
    with torch.autocast(DEVICE.type, dtype=dtype, enabled=autocast):
        loss = CrossEntropyLoss(logits_budget=80_000)(h, w, targets, bias=b, **given).loss
    loss.backward()
    assert relative_error(main.double() - start, truth) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(CrossEntropyLoss, {}), (DPOLoss, {"reference_free": True})],
    ids=["token", "group"],
)
def test_products_and_no_buffer(kind, settings):
    B, T, H, V, budget = 4, 32, 512, 3000, 2**21
    h, w, targets, _ = operands((B, T), H, V, torch.float32)
    loss, main = kind(**settings, logits_budget=budget), torch.zeros(V, H)
    h.requires_grad_(), w.requires_grad_()
    with GemmCounter(B * T, V, H) as counter:
        loss(h, w, targets, accumulate_into=main).loss.backward()
    assert counter.gemms == pytest.approx(4, abs=0.05)
    with AllocationWatcher() as watcher:
        loss(h, w, targets, accumulate_into=main).loss.backward()
    limit = 1.02 * budget + 4 * h.nbytes + 200 * B * T
    assert watcher.peak <= limit < main.nbytes
    assert w.grad is None


@pytest.mark.parametrize("budget", [None, 20_000], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_is_that_of_both_passes(name, budget, monkeypatch):
    ran = []

    def recorded(plan, *arguments):
        ran.append(plan)
        run(plan, *arguments)

    run = base.run_spans
    monkeypatch.setattr(base, "run_spans", recorded)
    plans = []
    plan_into_main = base._plan_into_main
    monkeypatch.setattr(
        base, "_plan_into_main", lambda *given: plans.append(plan_into_main(*given)) or plans[-1]
    )
    x = every_loss.given(9)
    main = torch.zeros_like(x.weight)
    LOSSES[name](x, None, accumulate_into=main, logits_budget=budget)[0].backward()
    (plan,) = plans
    assert [replace(plan, in_backward=None), plan.in_backward] == ran
    assert plan.strategy == "loss_only" and plan.in_backward.strategy != "loss_only"
    assert plan.products == sum(each.products for each in ran)
    assert plan.products >= 4 or plan.columns


# A pair above the budget is projected three times.
@pytest.mark.parametrize(
    ("kind", "settings", "strategy", "products"),
    [
        (CrossEntropyLoss, {}, "fused", 4),
        (DPOLoss, {"reference_free": True}, "resident", 4),
        (DPOLoss, {"reference_free": True, "logits_budget": 2**15}, "recompute", 5),
    ],
    ids=["token", "group", "large group"],
)
def test_what_the_plan_says(kind, settings, strategy, products):
    B, T, H, V = 4, 16, 64, 300
    h, w, targets, _ = operands((B, T), H, V, torch.float32)
    h.requires_grad_(), w.requires_grad_()
    main = torch.zeros(V, H)
    loss = kind(**settings)
    with GemmCounter(B * T, V, H) as counter:
        out = loss(h, w, targets, accumulate_into=main)
        out.loss.backward()
    assert out.plan.products == products == pytest.approx(counter.gemms, abs=0.05)
    text = str(out.plan)
    assert text.startswith("loss_only: ") and f"; then, in the backward pass, {strategy}: " in text
    assert text.endswith(f", {products} products in all")
    with torch.no_grad():
        assert loss(h, w, targets, accumulate_into=main).plan.in_backward is None


@torch.compiler.set_stance("default")
def test_under_torch_compile():
    x = every_loss.given(9)
    mains = torch.zeros(2, every_loss.V, every_loss.H)

    def step(x, main):
        return LOSSES["DPO"](x.with_hidden(torch.tanh), None, accumulate_into=main)[0]

    torch._dynamo.reset()
    gradients = []
    for function, main in zip((step, torch.compile(step, backend="aot_eager", fullgraph=True)), mains):
        value = function(x, main)
        assert not main.any()
        gradients.append(torch.autograd.grad(value, (x.hidden, x.bias)))
    torch.testing.assert_close(*gradients)
    assert mains[0].any()
    torch.testing.assert_close(*mains)


def test_without_gradients_it_stays_as_it_is():
    x, main = every_loss.given(6), torch.zeros(every_loss.V, every_loss.H)
    with torch.no_grad():
        assert not LOSSES["cross-entropy"](x, None, accumulate_into=main)[0].requires_grad
    assert not main.any()


MAIN = torch.zeros(every_loss.V, every_loss.H, device=DEVICE)
INTO = {"accumulate_into": MAIN}
BAD = {
    "no tensor": ({"accumulate_into": 3}, "accumulate_into: expected a tensor, got int; "),
    "dtype": ({"accumulate_into": MAIN.bfloat16()}, "accumulate_into: expected a torch.float32 tensor"),
    "shape": (
        {"accumulate_into": MAIN[1:]},
        r"accumulate_into: expected weight's shape \(50, 8\), got \(49, 8\)",
    ),
    "device": ({"accumulate_into": MAIN.to("meta")}, "accumulate_into: expected weight's device"),
    "leaf": (
        {"accumulate_into": MAIN.clone().requires_grad_()},
        "accumulate_into: expected a tensor that requires no",
    ),
    "nothing to scale": ({"grad_scale": 0.5}, "grad_scale: expected 1.0 without accumulate_into"),
    "infinite": (INTO | {"grad_scale": float("inf")}, "grad_scale: expected a finite number"),
    "a sum in another dtype": (
        {"accumulate_into": MAIN, "accum_dtype": torch.float64},
        "accum_dtype: expected None or torch.float32 with accumulate_into, got torch.float64; leave it out",
    ),
    "unreduced": (INTO | {"reduction": "none"}, "reduction: expected 'mean' or 'sum' with"),
}


def test_adding_in_the_forward_pass_is_refused():
    x = every_loss.given(6)
    message = "got accumulate_now; leave it out: accumulate_into adds in the backward pass, with 4 products"
    with pytest.raises(TypeError, match=message):
        CrossEntropyLoss()(x.hidden, x.weight, x.targets, accumulate_into=MAIN, accumulate_now=True)


def test_only_the_weight_that_is_trained():
    """A computed weight is refused, as its gradient would not reach what it was computed from; a part of a
    parameter is not."""
    whole = torch.randn(2 * every_loss.V, every_loss.H).requires_grad_()
    hidden, targets = torch.randn(6, every_loss.H), torch.arange(6)
    main = torch.zeros_like(MAIN)
    with pytest.raises(
        ValueError, match="^accumulate_into: expected a parameter as weight, or a view of one"
    ):
        CrossEntropyLoss()(hidden, whole[: every_loss.V] * 2, targets, accumulate_into=main)
    CrossEntropyLoss()(hidden, whole[: every_loss.V], targets, accumulate_into=main).loss.backward()
    assert main.any()


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_input(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LOSSES["cross-entropy"](every_loss.given(6), None, **options)


@torch.compiler.set_stance("default")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_sum_in_another_dtype_is_refused(compiled):
    """d_weight would be summed in the main gradient's dtype; that dtype is accepted."""

    def step(hidden, weight, accum_dtype):
        loss = CrossEntropyLoss(accum_dtype=accum_dtype)
        return loss(hidden, weight, targets, accumulate_into=main).loss

    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, backend="eager", fullgraph=True)
    h, w, targets, _ = operands((12,), 8, 50, torch.bfloat16)
    h.requires_grad_(), w.requires_grad_()
    main = torch.zeros(50, 8)
    with pytest.raises(Exception, match=r"accum_dtype: expected None or torch.float32 with accumulate_into"):
        step(h, w, torch.bfloat16)
    step(h, w, torch.float32).backward()
    assert main.any() and w.grad is None


def test_a_frozen_weight_is_refused():
    x = every_loss.given(6)
    x.weight.requires_grad_(False)
    with pytest.raises(
        ValueError, match="accumulate_into: expected a trainable weight, got a frozen one; .+"
    ):
        LOSSES["cross-entropy"](x, None, accumulate_into=MAIN)


@pytest.mark.parametrize(
    ("compact", "error"), [(True, ValueError), (False, RuntimeError)], ids=["compact", "all-rows"]
)
def test_another_upstream_gradient_is_refused(compact, error):
    if DEVICE.type != "cpu" and not compact:
        pytest.skip("a device-side assertion ends the process's use of the GPU")
    main = torch.zeros(every_loss.V, every_loss.H)
    options = {"accumulate_into": main, "compact": compact}
    value = LOSSES["cross-entropy"](every_loss.given(6), None, **options)[0]
    with pytest.raises(
        error, match="loss: expected an upstream gradient of 1 with accumulate_into, got .*; .*grad_scale"
    ):
        (0.5 * value).backward()
    assert not main.any()
