"""`linear_logprobs` of one id per position: backward passes, autocast and dtypes. Values and gradients are in
test_several_ids.py."""

import pytest
import torch

from logitless import linear_logprobs
from tests import reference
from tests.cases import TRAINABLE, operands, trained
from tests.support import assert_close, run


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


@pytest.mark.parametrize("option", ["return_logps", "return_predictions", "also", "cp_group"])
def test_options_of_losses_alone_are_refused(option):
    with pytest.raises(TypeError, match=f"^options: expected any of .*, got {option}"):
        linear_logprobs(torch.randn(3, 4), torch.randn(9, 4), torch.arange(3), **{option: True})
