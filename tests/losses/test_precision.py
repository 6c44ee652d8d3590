"""Mixed precision and recomputation around a loss: autocast with fp32 master weights, GradScaler,
checkpointing, saved-tensor hooks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from logitless import CrossEntropyLoss
from tests import reference
from tests.losses import every_loss
from tests.losses.every_loss import LOSSES, Given
from tests.support import DEVICE, assert_close, relative_error


def naive(name: str, *inputs: str, **settings) -> Callable[..., Tensor]:
    """A loss of `tests.reference` with these fields of `Given`."""

    def loss(x: Given, heads, **options) -> Tensor:
        given = {key: getattr(x, key) for key in inputs}
        if "ref_logps" in given:
            given["ref_logps"] = x.ref_logps.masked_fill(x.targets == -100, 0.0)
        actual = getattr(reference, name)(
            x.hidden, x.weight, x.targets, bias=x.bias, **given, **settings, **options
        )
        return actual if isinstance(actual, Tensor) else actual[0]

    return loss


def naive_medusa(x: Given, heads, **options) -> Tensor:
    total = reference.cross_entropy(x.hidden[:, :-1], x.weight, x.targets[:, 1:], bias=x.bias, **options)
    for k in range(2):
        hidden, targets = heads.blocks(k)(x.hidden)[:, : -k - 2], x.targets[:, k + 2 :]
        total = total + 0.8**k * reference.cross_entropy(hidden, heads.projection(k), targets, **options)
    return total


NAIVE: dict[str, Callable[..., Tensor]] = {
    "cross-entropy": naive("cross_entropy"),
    "DPO": naive("dpo", "ref_logps"),
    "GRPO": naive("grpo", "advantages", "old_logps", "ref_logps", beta=0.1, entropy_coef=0.01),
    "JSD": naive("distillation", "teacher_hidden", "teacher_weight", hard_loss_weight=0.2),
    "Medusa": naive_medusa,
}
names = pytest.mark.parametrize("name", NAIVE)
pytestmark = pytest.mark.usefixtures("uncompiled")


def outcome(
    loss: Callable, dtype: torch.dtype, autocast: torch.dtype | None = None, scale: float = 1.0, **options
) -> dict[str, Tensor]:
    """Gradients of `scale * loss` on fresh leaves, divided by the scale, as a GradScaler would."""
    x, heads = every_loss.given(40, dtype=dtype), every_loss.heads(dtype)
    with torch.autocast(DEVICE.type, dtype=autocast, enabled=autocast is not None):
        value = loss(x, heads, **options)
        value = value if isinstance(value, Tensor) else value[0]
    return {
        name: gradient / scale for name, gradient in every_loss.gradients(value * scale, x, heads).items()
    }


@pytest.mark.each_value
@names
@pytest.mark.parametrize("budget", [None, 10_000], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_with_fp32_master_weights(name, autocast, budget):
    truth, rough = outcome(NAIVE[name], torch.float64), outcome(NAIVE[name], torch.float32, autocast)
    ours = outcome(LOSSES[name], torch.float32, autocast, logits_budget=budget)
    assert ours.keys() == truth.keys()
    for operand, gradient in ours.items():
        # In the dtype of the naive one, fp32.
        assert_close(gradient, truth[operand], rough[operand], name=operand)


@names
@pytest.mark.parametrize("master", [torch.float32, torch.float16], ids=["fp32 weights", "fp16 weights"])
def test_a_grad_scaler_keeps_what_fp16_flushes(name, master):
    """With p / N below 6e-8, fp16 holds no gradient of a logit, and none of the weights without the scale."""
    autocast = torch.float16 if master == torch.float32 else None
    options = {"num_items": 2.0**20, "scale": 65536.0}
    truth = outcome(NAIVE[name], torch.float64, **options)
    rough = outcome(NAIVE[name], master, autocast, **options)
    for operand, gradient in outcome(LOSSES[name], master, autocast, **options).items():
        assert_close(gradient, truth[operand], rough[operand], name=operand)


# What may stand around a call of (loss, *tensors).
AROUND: dict[str, Callable] = {
    "checkpoint": lambda function, *tensors: checkpoint(function, *tensors, use_reentrant=False),
    "reentrant checkpoint": lambda function, *tensors: checkpoint(function, *tensors, use_reentrant=True),
    "nested checkpoints": lambda function, *tensors: checkpoint(
        lambda *inner: checkpoint(function, *inner, use_reentrant=False), *tensors, use_reentrant=False
    ),
}
HOOKS: dict[str, Callable] = {
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: (x.dtype, x.double()), lambda kept: kept[1].to(kept[0])
    ),
}


def accumulated(around: Callable, name: str, times: int = 1) -> dict[str, Tensor]:
    """`.grad` of all leaves, as a reentrant checkpoint knows no other way, after so many backward passes."""
    x, heads = every_loss.given(9), every_loss.heads()

    def loss(hidden, weight, bias):
        arguments = dict(x.items()) | {"hidden": hidden, "weight": weight, "bias": bias}
        return LOSSES[name](Given(**arguments), heads, logits_budget=10_000)[0]

    value = around(loss, torch.tanh(x.hidden), x.weight, x.bias)
    for time in range(times):
        value.backward(torch.tensor(3.0), retain_graph=time + 1 < times)
    leaves = [*((name, getattr(x, name)) for name in every_loss.TRAINED), *heads.named_parameters()]
    return {name: leaf.grad for name, leaf in leaves if leaf.grad is not None}


@pytest.mark.each_value
@pytest.mark.parametrize("name", [*NAIVE, "logprobs", "own LogitsLoss"])
@pytest.mark.parametrize("around", AROUND)
def test_checkpointing(name, around):
    plain = accumulated(lambda function, *tensors: function(*tensors), name)
    assert {"hidden", "weight", "bias"} <= plain.keys() and all(gradient.any() for gradient in plain.values())
    torch.testing.assert_close(accumulated(AROUND[around], name), plain)


@pytest.mark.parametrize("name", [*NAIVE, "logprobs", "own LogitsLoss"])
@pytest.mark.parametrize("hooks", HOOKS)
def test_saved_tensor_hooks_and_a_second_backward(name, hooks):
    def within(function, *tensors):
        with HOOKS[hooks]():
            return function(*tensors)

    plain = accumulated(lambda function, *tensors: function(*tensors), name)
    torch.testing.assert_close(
        accumulated(within, name, times=2), {name: 2 * gradient for name, gradient in plain.items()}
    )


LARGE = {
    "all": ("hidden", "weight"),
    "frozen head": ("hidden",),
    "frozen hidden states": ("weight",),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("trained", LARGE.values(), ids=LARGE)
def test_sums_in_fp16_before_the_division_of_the_mean(trained, ignored, reduction):
    """Rows of d_hidden of 5e5 and sums of d_weight of 3e5, whose hundredth parts fp16 can hold."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator, device=DEVICE) for shape in ((100, 8), (40, 8)))
    leaves = {"hidden": (hidden * 0.1 + 1).half(), "weight": (weight * 40).half()}
    targets = torch.full((100,), 3, device=DEVICE)
    if ignored:
        targets[::7] = -100
    weights = torch.full((100,), 3000.0, device=DEVICE)

    def gradients(loss, dtype):
        x = {name: leaf.to(dtype).requires_grad_(name in trained) for name, leaf in leaves.items()}
        value = loss(x["hidden"], x["weight"])
        return dict(zip(trained, torch.autograd.grad(value, [x[name] for name in trained]), strict=True))

    def ours(h, w):
        values = CrossEntropyLoss(reduction=reduction)(h, w, targets, token_weights=weights).loss
        return values if reduction == "mean" else values.sum() / (targets != -100).sum()

    def truth(h, w):
        z = h @ w.T
        return 3000 * torch.nn.functional.cross_entropy(z, targets)

    expected = gradients(truth, torch.float64)
    for name, gradient in gradients(ours, torch.float16).items():
        assert gradient.dtype == torch.float16 and gradient.isfinite().all(), name
        assert relative_error(gradient, expected[name]) < 5e-3, name
