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


@dtypes
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("entropy", [False, "metric", True])
def test_values(dtype, ignored, entropy):
    h, w, targets, b = operands((3, 11), 16, 300, dtype, ignored=ignored)
    actual = linear_logprobs(h.requires_grad_(), w, targets, bias=b, entropy=entropy)
    truth = reference.token_logprobs(h.double(), w.double(), targets, bias=b.double())
    naive = reference.token_logprobs(h, w, targets, bias=b)
    for index, name in enumerate(("logps", "entropy", "lse")):
        if name == "entropy" and not entropy:
            assert actual.entropy is None
            continue
        value = getattr(actual, name)
        assert value is actual[index]
        assert value.requires_grad == (name != "entropy" or entropy is True)
        assert not value[targets == -100].any()
        assert_close(
            value.detach(), truth[index].detach(), naive[index].detach(), name=name, allow_zero=ignored == 1
        )


@pytest.mark.parametrize("trainable", ["all", "hidden"])
def test_all_ignored_has_zero_gradients(trainable):
    h, w, targets, b = operands((2, 5), 8, 30, torch.float32, ignored=1.0)
    outcome = run(
        lambda *a, **k: policy(*linear_logprobs(*a, entropy=True, **k)),
        h,
        w,
        targets,
        b,
        requires=TRAINABLE[trainable],
    )
    for grad in outcome.grads.values():
        assert not grad.any()


@pytest.mark.parametrize("trainable", ["all", "hidden"])
def test_unused_outputs_cost_nothing_in_correctness(trainable):
    h, w, targets, b = operands((9,), 8, 30, torch.float64, ignored=0.3)
    for name in ("logps", "entropy", "lse"):
        index = ("logps", "entropy", "lse").index(name)
        actual = run(
            lambda *a, **k: getattr(linear_logprobs(*a, entropy=True, **k), name),
            h,
            w,
            targets,
            b,
            requires=TRAINABLE[trainable],
        )
        truth = run(
            lambda *a, **k: reference.token_logprobs(*a, **k)[index],
            h,
            w,
            targets,
            b,
            requires=TRAINABLE[trainable],
        )
        for operand in truth.grads:
            torch.testing.assert_close(actual.grads[operand], truth.grads[operand])


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
def test_a_loss_of_the_whole_batch(trainable):
    # Sequence-level ratios, as in GSPO: no token's gradient is known before every log-probability is.
    h, w, targets, b = operands((4, 13), 8, 40, torch.float64, ignored=0.3)

    def sequence_loss(logps):
        per_sequence = logps.sum(-1) / 5
        return (
            -torch.nn.functional.logsigmoid(per_sequence[:2] - per_sequence[2:]).mean()
            + per_sequence.exp().var()
        )

    actual = run(
        lambda *a, **k: sequence_loss(linear_logprobs(*a, **k, logits_budget=4_000).logps),
        h,
        w,
        targets,
        b,
        requires=TRAINABLE[trainable],
    )
    truth = run(
        lambda *a, **k: sequence_loss(reference.token_logprobs(*a, **k)[0]),
        h,
        w,
        targets,
        b,
        requires=TRAINABLE[trainable],
    )
    torch.testing.assert_close(actual.value, truth.value)
    for name in truth.grads:
        assert truth.grads[name].any()
        torch.testing.assert_close(actual.grads[name], truth.grads[name])


@one_row_warning
@pytest.mark.parametrize("trainable", ["all", "hidden", "head", "all but weight"])
@pytest.mark.parametrize(
    "head", [{}, {"softcap": 2.0, "logit_scale": 1.5, "temperature": 0.7}], ids=["plain", "head options"]
)
def test_gradcheck(trainable, head):
    h, w, _, b = operands((4,), 3, 5, torch.float64)
    targets = torch.tensor([1, -100, 4, 0])

    def outputs(hidden, weight, bias):
        return tuple(
            linear_logprobs(hidden, weight, targets, bias=bias, entropy=True, logits_budget=200, **head)
        )

    trained(trainable, h, w, b)
    assert torch.autograd.gradcheck(outputs, (h, w, b))


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


@pytest.mark.parametrize(
    "head", [{}, {"softcap": 4.0, "logit_scale": 0.8, "temperature": 0.7}], ids=["plain", "softcap"]
)
def test_every_loss_of_logps_and_lse_with_a_frozen_head(head):
    """The vectors that a frozen head keeps are those of log p; the gradient of lse is made from them."""
    h, w, targets, b = operands((29,), 8, 100, torch.float64, ignored=0.3)
    ours, theirs = h.clone().requires_grad_(), h.clone().requires_grad_()
    logps, _, lse = linear_logprobs(ours, w, targets, bias=b, **head)
    (logps.square().sum() + (lse.square() * 0.3).sum()).backward()
    logps, _, lse = reference.token_logprobs(theirs, w, targets, bias=b, **head)
    (logps.square().sum() + (lse.square() * 0.3).sum()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("name", ["logps", "lse"])
def test_ignored_tokens_have_no_gradient_from_a_frozen_head(name, compact):
    h, w, targets, b = operands((3, 20), 16, 300, torch.float32, ignored=0.3)
    found = linear_logprobs(h.requires_grad_(), w, targets, bias=b, compact=compact)
    (d_hidden,) = torch.autograd.grad(getattr(found, name).sum(), h)
    assert d_hidden[targets != -100].any(-1).all() and not d_hidden[targets == -100].any()
