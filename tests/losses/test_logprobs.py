"""`linear_logprobs`: values, and the gradients of any later loss of the log-probabilities, the entropy and
the log-sum-exp."""

import pytest
import torch

from logitless import linear_logprobs
from tests import reference
from tests.cases import SHAPES, TRAINABLE, covering_array, dtypes, one_row_warning, operands, trained
from tests.support import DEVICE, assert_close, run


def policy(logps, entropy, lse):
    """A loss that is not linear in any of the three, with coefficients that give each a share of the
    gradient."""
    return (logps / 8).exp() * 4 - 0.5 * entropy + 0.05 * lse**2


def logps_only(logps, entropy, lse):
    return 0.1 * logps**2 + logps


def entropy_only(logps, entropy, lse):
    return entropy * entropy.detach().sin()


def lse_only(logps, entropy, lse):
    return lse.sin() * 2


LOSSES = {"policy": policy, "logps": logps_only, "entropy": entropy_only, "lse": lse_only}

FACTORS = {
    "shape": list(SHAPES),
    "loss": list(LOSSES),
    "trainable": [name for name in TRAINABLE if name != "nothing"],
    "ignored": [0.0, 0.5],
    "budget": [None, 10],
    "softcap": [None, 5.0],
    "logit_scale": [1.0, 0.5],
    "temperature": [1.0, 0.7],
    "bias": [False, True],
    "compact": [True, False],
}


def has_effect(case: dict) -> bool:
    return not (case.get("shape") == "1" and case.get("ignored"))


@one_row_warning
@dtypes
@pytest.mark.parametrize("case", covering_array(FACTORS, has_effect))
def test_any_loss_of_the_outputs(case, dtype):
    shape, hidden, vocab = SHAPES[case["shape"]]
    h, w, targets, b = operands(shape, hidden, vocab, dtype, seed=case["seed"], ignored=case["ignored"])
    head = {name: case[name] for name in ("softcap", "logit_scale", "temperature")}
    engine = {
        "compact": case["compact"],
        "logits_budget": case["budget"] and case["budget"] * vocab * dtype.itemsize,
    }
    upstream = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(case["seed"]))
    loss = LOSSES[case["loss"]]

    def ours(*tensors, **kwargs):
        return loss(*linear_logprobs(*tensors, entropy=True, **kwargs, **head, **engine))

    def full_logits(*tensors, **kwargs):
        return loss(*reference.token_logprobs(*tensors, **kwargs, **head))

    bias = b if case["bias"] else None
    exact_bias = bias if bias is None else bias.double()
    requires = TRAINABLE[case["trainable"]]
    truth = run(full_logits, h.double(), w.double(), targets, exact_bias, upstream, requires)
    naive = run(full_logits, h, w, targets, bias, upstream, requires)
    actual = run(ours, h, w, targets, bias, upstream, requires)
    assert_close(actual.value, truth.value, naive.value, name="value")
    for name in truth.grads:
        assert_close(actual.grads[name], truth.grads[name], naive.grads[name], name=f"d_{name}")


@pytest.mark.parametrize("trainable", ["all", "hidden"])
def test_outputs_may_be_taken_back_one_by_one(trainable):
    h, w, targets, b = operands((9,), 8, 30, torch.float64, ignored=0.3)
    trained(trainable, h, w, b)
    out = linear_logprobs(h, w, targets, bias=b, entropy=True)
    out.logps.sum().backward(retain_graph=True)
    (2 * out.entropy.sum()).backward(retain_graph=True)
    out.lse.square().sum().backward()
    stepwise = h.grad.clone()
    h.grad = None
    out = linear_logprobs(h, w, targets, bias=b, entropy=True)
    (out.logps.sum() + 2 * out.entropy.sum() + out.lse.square().sum()).backward()
    torch.testing.assert_close(stepwise, h.grad)


def test_no_grad_gives_plain_numbers():
    h, w, targets, _ = operands((9,), 8, 30, torch.float32)
    with torch.no_grad():
        out = linear_logprobs(h.requires_grad_(), w, targets, entropy=True)
    assert not any(value.requires_grad for value in out)


def test_fp32_logits_remove_the_rounding_of_low_precision_ones():
    h, w, targets, _ = operands((60,), 64, 500, torch.bfloat16)
    truth = reference.token_logprobs(h.double(), w.double(), targets)[0]
    rounded = (linear_logprobs(h, w, targets, logits_dtype=torch.bfloat16).logps - truth).abs().max()
    unrounded = (linear_logprobs(h, w, targets, logits_dtype=torch.float32).logps - truth).abs().max()
    assert unrounded < 1e-5 < 1e-3 < rounded


@pytest.mark.parametrize("trainable", ["all", "hidden"])
def test_autocast_outside_of_backward(trainable):
    h, w, targets, b = operands((40,), 32, 300, torch.float32)

    def within(function):
        def call(*tensors, **kwargs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*tensors, **kwargs)[0]

        return call

    truth = run(
        lambda *a, **k: reference.token_logprobs(*a, **k)[0], h.double(), w.double(), targets, b.double()
    )
    naive = run(within(reference.token_logprobs), h, w, targets, b, requires=TRAINABLE[trainable])
    actual = run(within(linear_logprobs), h, w, targets, b, requires=TRAINABLE[trainable])
    assert_close(actual.value, truth.value, naive.value, name="logps")
    for name in naive.grads:
        assert_close(actual.grads[name], truth.grads[name], naive.grads[name], name=f"d_{name}")
