"""The engine's contracts: autograd, memory, GEMMs, strides, determinism and the edges, for every strategy a
loss may run under."""

from functools import partial

import pytest
import torch

from logitless import CrossEntropyLoss, DPOLoss, linear_logprobs
from tests.cases import TRAINABLE, operands, trained
from tests.support import DEVICE, AllocationWatcher, GemmCounter, run


def fused(*operands, bias=None, **options):
    return CrossEntropyLoss(label_smoothing=0.1, z_loss=0.1, **options)(*operands, bias=bias)


def per_token(*operands, bias=None, **options):
    return CrossEntropyLoss(reduction="none", **options)(*operands, bias=bias)


def value_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def smoothed(*operands, **options):
    return per_token(*operands, **options, label_smoothing=0.1)


def logprobs(hidden, weight, targets, *, bias=None, **options):
    logps, entropy, lse = linear_logprobs(hidden, weight, targets, bias=bias, entropy=True, **options)
    return 0.1 * lse**2 - logps - 0.3 * entropy


STRATEGIES = {
    "fused": (fused, "all"),
    "fused, frozen head": (fused, "hidden"),
    "fused, frozen hidden": (fused, "head"),
    "recompute": (per_token, "all"),
    "cached_grad": (per_token, "hidden"),
    "logprobs": (logprobs, "all"),
    "logprobs, frozen head": (logprobs, "hidden"),
    "logprobs, frozen hidden": (logprobs, "head"),
}
strategies = pytest.mark.parametrize(("loss", "trainable"), STRATEGIES.values(), ids=STRATEGIES)


def small(**options):
    return operands((20,), 6, 40, torch.float64, **options)


@strategies
def test_nan_in_nan_out(loss, trainable):
    h, w, targets, b = small()
    h[3] = torch.nan
    outcome = run(loss, h, w, targets, b, requires=TRAINABLE[trainable])
    assert outcome.value.isnan().nonzero().flatten().tolist() == ([3] if outcome.value.dim() else [])
    assert outcome.value.isnan().any()
    if "hidden" in outcome.grads:
        assert outcome.grads["hidden"][3].isnan().all()
    if "weight" in outcome.grads:
        assert outcome.grads["weight"].isnan().any()


@strategies
def test_second_backward_repeats_the_first(loss, trainable):
    h, w, targets, b = small()
    expected = trained(trainable, h, w, b)
    value = value_of(loss(h, w, targets, bias=b)).sum()
    first = torch.autograd.grad(3 * value, expected, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(-6 * value, expected)
    for one, unchanged, two in zip(first, kept, second):
        assert torch.equal(one, unchanged)
        torch.testing.assert_close(-2 * one, two)


@pytest.mark.each_value
@strategies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_call_same_bits(loss, trainable, dtype):
    h, w, targets, b = operands((200,), 16, 300, dtype, ignored=0.2)

    def in_chunks(*tensors, **given):
        return loss(*tensors, **given, logits_budget=50_000)

    one, two = (run(in_chunks, h, w, targets, b, requires=TRAINABLE[trainable]) for _ in "12")
    assert torch.equal(one.value, two.value)
    for name in one.grads:
        assert torch.equal(one.grads[name], two.grads[name])


def test_metrics_and_metric_entropy_carry_no_gradient():
    h, w, targets, _ = small()
    output = CrossEntropyLoss()(h.requires_grad_(), w, targets)
    assert output.loss.requires_grad
    assert not any(metric.requires_grad for metric in output.metrics.values())
    assert not linear_logprobs(h, w, targets, entropy="metric").entropy.requires_grad


def logps_alone(hidden, weight, targets, *, bias=None, entropy=False, **options):
    out = linear_logprobs(hidden, weight, targets, bias=bias, entropy=entropy, **options)
    return (out.logps.exp() * out.lse).sum()


# By strategy: loss, what is trainable, share of ignored tokens, and the GEMMs of forward and backward.
# The tolerance of the test leaves room for the gradient of the bias, a product with a vector of ones: 1 / H =
# 0.03 GEMMs.
GEMMS = {
    "fused": (fused, "all", 0, 3),
    "fused, frozen head": (fused, "hidden", 0, 2),
    "fused, frozen weight": (fused, "all but weight", 0, 2),
    "fused, frozen hidden": (fused, "head", 0, 2),
    "loss_only": (fused, "nothing", 0, 1),
    "loss_only, unreduced": (per_token, "nothing", 0, 1),
    "fused, half ignored": (fused, "all", 0.5, 1.5),
    "fused, all ignored": (fused, "all", 1.0, 0),
    "recompute": (per_token, "all", 0, 4),
    "recompute, half ignored": (per_token, "all", 0.5, 2),
    "recompute, frozen hidden": (per_token, "head", 0, 3),
    "recompute, frozen weight": (per_token, "all but weight", 0, 3),
    "recompute, smoothed, frozen head": (smoothed, "hidden", 0, 3),
    "cached_grad": (per_token, "hidden", 0, 2),
    "logprobs with entropy": (logprobs, "all", 0, 4),
    "logprobs with entropy, frozen head": (logprobs, "hidden", 0, 3),
    "logprobs": (logps_alone, "all", 0, 4),
    "logprobs, frozen head": (logps_alone, "hidden", 0, 2),
    "logprobs, frozen hidden": (logps_alone, "head", 0, 3),
    "logprobs, loss_only": (logps_alone, "nothing", 0, 1),
    "logprobs, entropy as a metric": (partial(logps_alone, entropy="metric"), "hidden", 0, 2),
}


@pytest.mark.parametrize("budget", [None, 60_000], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.usefixtures("counted_rows")
def test_gemms(name, budget):
    (loss, trainable, ignored, gemms), strategy = GEMMS[name], name.split(",")[0]
    tokens, hidden, vocab = 64, 32, 501
    h, w, targets, b = operands((tokens,), hidden, vocab, torch.float32, ignored=ignored)
    with GemmCounter(tokens, vocab, hidden) as counter:
        actual = run(partial(loss, logits_budget=budget), h, w, targets, b, requires=TRAINABLE[trainable])
    assert counter.gemms == pytest.approx(gemms, abs=0.05)
    if "logprobs" not in name and ignored < 1:
        plan, products = actual.output.plan, round(gemms / (1 - ignored))
        assert plan.strategy == strategy and strategy in (text := plan.describe())
        assert text.endswith(f", {products} product" + "s" * (products > 1)), text
        assert ("the budget less" in text) == (plan.fixed_bytes > 0)
        # The temporaries of the twins.
        assert DEVICE.type == "cuda" or strategy == "loss_only" or plan.fixed_bytes > 0
        assert budget is None or plan.budget + plan.fixed_bytes == budget


MEMORY = {
    "one token": (fused, "all", 1, torch.float32, 0),
    "fused": (fused, "all", 500, torch.float32, 0),
    "fused bf16": (fused, "all", 500, torch.bfloat16, 0),
    "fused fp16, half ignored": (fused, "all", 500, torch.float16, 0.5),
    "fused, frozen head": (fused, "hidden", 500, torch.bfloat16, 0),
    "fused, frozen hidden": (fused, "head", 500, torch.bfloat16, 0),
    "loss_only": (fused, "nothing", 500, torch.bfloat16, 0),
    "recompute": (per_token, "all", 500, torch.bfloat16, 0),
    "cached_grad": (per_token, "hidden", 500, torch.bfloat16, 0),
    "logprobs": (logprobs, "all", 500, torch.bfloat16, 0.5),
    "logprobs, frozen head": (logprobs, "hidden", 500, torch.float32, 0),
    "long, fused": (fused, "all", 16_384, torch.bfloat16, 0.2),
    "long, logprobs": (logprobs, "hidden", 16_384, torch.float32, 0.8),
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 30.0}, {"compact": False}], ids=["defaults", "softcap", "not compact"]
)
@pytest.mark.parametrize(("loss", "trainable", "tokens", "dtype", "ignored"), MEMORY.values(), ids=MEMORY)
def test_memory_stays_within_the_budget(loss, trainable, tokens, dtype, ignored, options):
    if options and tokens > 500:
        pytest.skip("slow, and the length changes nothing here")
    hidden, vocab, budget = 8, 2003, (8 << 20 if tokens > 500 else 1 << 20)
    h, w, targets, b = operands((tokens,), hidden, vocab, dtype, ignored=ignored)
    expected = trained(trainable, h, w, b)

    with AllocationWatcher() as watcher:
        value = value_of(loss(h, w, targets, bias=b, logits_budget=budget, **options))
        if expected:
            value.backward(torch.ones_like(value))

    returned = sum(tensor.nbytes for tensor in expected)
    # What a strategy may save for the backward pass: one or two [N, H] in the operands' dtype, and d_weight
    # and d_bias in fp32.
    saved = 2 * h.nbytes * h.requires_grad + 4 * w.numel() * w.requires_grad + 4 * b.numel() * b.requires_grad
    # Rows gathered for one chunk and their gradient, a few [C, H].
    rows = 4 * hidden * 4 * min(tokens, budget // (vocab * dtype.itemsize))
    per_token_vectors = 150 * tokens
    assert watcher.peak <= 1.02 * budget + returned + saved + rows + per_token_vectors
    assert watcher.largest <= max(1.02 * budget, 4 * h.numel(), 4 * w.numel())
    assert watcher.peak >= min(budget // 4, tokens * vocab * dtype.itemsize), (
        "the watcher did not see the logits"
    )


@pytest.mark.parametrize("options", [{"compact": False}, {"reduction": "none"}], ids=str)
def test_as_many_tokens_as_sequences(options):
    """A value per sequence is not taken for one per token, to be masked or shaped like the targets."""
    h, w, targets, _ = operands((4, 1), 6, 40, torch.float64)
    targets[1] = -100  # a sequence without tokens has a loss, log 2
    inputs = {"ref_logps": torch.linspace(-1, 1, 4, dtype=torch.float64)}
    truth = DPOLoss()(h, w, targets, **inputs).loss
    actual = DPOLoss(**options)(h, w, targets, **inputs).loss
    assert actual.dim() == 0 or actual.shape == (2,)
    torch.testing.assert_close(actual.mean(), truth)


ARITHMETIC = {
    "out * 2": lambda out: out * 2,
    "2 * out": lambda out: 2 * out,
    "out + out": lambda out: out + out,
    "sum([out, out])": lambda out: sum([out, out]),
    "out - out": lambda out: out - out,
    "out / 2": lambda out: out / 2,
    "-out": lambda out: -out,
    "tensor * out": lambda out: torch.ones((), device=DEVICE) * out,
    "tensor + out": lambda out: torch.ones((), device=DEVICE) + out,
    "float(out)": float,
    "out.backward()": lambda out: out.backward(),
    "out.item()": lambda out: out.item(),
}


@pytest.mark.parametrize("use", ARITHMETIC.values(), ids=ARITHMETIC)
def test_a_loss_output_is_no_number(use):
    """A tuple would repeat and join itself."""
    hidden, weight = torch.ones(2, 3, device=DEVICE, requires_grad=True), torch.ones(5, 3, device=DEVICE)
    out = CrossEntropyLoss()(hidden, weight, torch.tensor([1, 4], device=DEVICE))
    with pytest.raises((TypeError, AttributeError), match=r"expected a tensor, got the LossOutput .*\.loss"):
        use(out)
    loss, metrics, plan, tokens = out
    assert (loss, metrics, plan, tokens) == tuple(out) and not hasattr(out, "backward")
