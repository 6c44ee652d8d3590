"""compact=False: nothing is read back from the device, so that forward and backward can be captured into a
CUDA graph and replayed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from logitless.engine import captured, compiled
from logitless.engine.early_projection import LIKELY
from tests.losses import every_loss
from tests.losses.every_loss import LOSSES, refill
from tests.support import DEVICE, captured_step

needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")
# One to a dozen chunks for the 4 x 6 tokens; a row of a LogitsLoss may take more.
BUDGETS = pytest.mark.parametrize("budget", [None, 20 * 4 * every_loss.V], ids=["one chunk", "chunks"])
CAPTURED = (
    "cross-entropy",
    "DPO",
    "GRPO",
    "GRPO, whole sequences",
    "JSD",
    "multi-token",
    "Medusa",
    "own LogitsLoss",
)


# Name, whether the sequences are packed, dtype. In fp16 a power of two that the device alone knows waits for
# the backward pass.
CALLS = [(name, False, torch.float32) for name in LOSSES]
CALLS += [(name, True, torch.float32) for name in every_loss.SEQUENCES]
CALLS += [("cross-entropy", False, torch.float16)]


@pytest.mark.each_value
@pytest.mark.skipif(
    DEVICE.type != "cpu",
    reason="fake tensors take the twins on every device; test_no_host_sync tests the kernels",
)
@pytest.mark.parametrize(("name", "packed", "dtype"), CALLS)
@pytest.mark.usefixtures("uncompiled")
def test_nothing_is_read_back(name, packed, dtype):
    """Fake tensors have shapes and no numbers: whoever asks for one gets an error."""
    with FakeTensorMode():
        x = every_loss.given(6, dtype=dtype)
        heads = every_loss.MedusaHeads(every_loss.H, every_loss.V, 2, device=DEVICE)
        options = {"cu_seqlens": torch.arange(0, 25, 6, device=DEVICE)} if packed else {}
        value, *_ = LOSSES[name](x.flat() if packed else x, heads, compact=False, **options)
        assert {"hidden", "weight"} <= every_loss.gradients(value, x, heads).keys()


# Losses whose evaluation is compiled as well, which is the default on a GPU and takes seconds.
EVALUATED = ("cross-entropy", "DPO", "GRPO")


@pytest.fixture
def compiles(request, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "COMPILES_ON", ("cuda",) if request.param else ())


def calls_of(names) -> pytest.MarkDecorator:
    """Each loss, evaluated uncompiled; then some by a compiled graph."""
    calls = [pytest.param(name, False, id=name) for name in names]
    calls += [pytest.param(name, True, id=f"{name}, compiled") for name in EVALUATED]
    return pytest.mark.parametrize(("name", "compiles"), calls, indirect=["compiles"])


@needs_cuda
@BUDGETS
@pytest.mark.parametrize("replays", [False, True], ids=["uncaptured", "replayed"])
@calls_of(LOSSES)
@pytest.mark.usefixtures("compiles")
def test_no_host_sync(name, replays, budget, monkeypatch):
    heads, x = every_loss.heads(), every_loss.given(6)
    monkeypatch.setattr(captured, "CAPTURES_ON", ("cuda",) if replays else ())
    captured.forget()

    def step():
        value, *_ = LOSSES[name](x, heads, compact=False, logits_budget=budget)
        return every_loss.gradients(value, x, heads)

    for _ in range(captured.SIGHTINGS):  # kernels and functions are compiled, and devices asked, once
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@BUDGETS
@calls_of(CAPTURED)
@pytest.mark.usefixtures("compiles")
def test_capture(name, budget):
    """A capture by hand: forward and backward of the loss alone."""
    heads, x = every_loss.heads(), every_loss.given(6)

    def step():
        outputs = LOSSES[name](x, heads, compact=False, logits_budget=budget)
        return [*outputs, *every_loss.gradients(outputs[0], x, heads).values()]

    graph, results = captured_step(step)
    for seed in (1, 2, 3):
        refill(x, seed)
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=1e-4, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("compact", [True, False])
@calls_of(LOSSES)
@pytest.mark.usefixtures("compiles")
def test_passes_that_the_library_captures(name, compact, monkeypatch):
    """Equal to the bit to the passes that were captured (`engine.captured`)."""
    heads, x = every_loss.heads(), every_loss.given(6)

    def step(types):
        with monkeypatch.context() as patch:
            patch.setattr(captured, "CAPTURES_ON", types)
            outputs = LOSSES[name](x, heads, compact=compact)
            return [*outputs, *every_loss.gradients(outputs[0], x, heads).values()]

    captured.forget()
    for seed in range(LIKELY + captured.SIGHTINGS + 3):
        refill(x, seed)
        torch.testing.assert_close(step(("cuda",)), step(()), rtol=0, atol=0, equal_nan=True)
    captured.forget()


@needs_cuda
@pytest.mark.parametrize("name", CAPTURED)
def test_capture_by_hand_after_replays(name, monkeypatch):
    """The library has captured the pass in the calls before."""
    monkeypatch.setattr(captured, "CAPTURES_ON", ("cuda",))
    heads, x = every_loss.heads(), every_loss.given(6)

    def step():
        outputs = LOSSES[name](x, heads, compact=False)
        return [*outputs, *every_loss.gradients(outputs[0], x, heads).values()]

    captured.forget()
    for _ in range(captured.SIGHTINGS + 1):
        step()
    graph, results = captured_step(step)
    for seed in (1, 2, 3):
        refill(x, seed)
        graph.replay()
        torch.testing.assert_close(results, step(), rtol=1e-4, atol=1e-5)
    captured.forget()


@needs_cuda
@BUDGETS
@pytest.mark.parametrize("name", CAPTURED)
def test_reduce_overhead(name, budget):
    """torch.compile's own CUDA graphs, of a model that ends in the loss: the same as without them, at every
    replay."""
    heads, x = every_loss.heads(), every_loss.given(6)

    def model(x, heads):
        return LOSSES[name](x.with_hidden(torch.tanh), heads, compact=False, logits_budget=budget)

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for seed in range(6):
        refill(x, seed)
        results = []
        for function in (model, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            outputs = function(x, heads)
            actual = every_loss.gradients(outputs[0], x, heads)
            # The next replay writes over what a graph returned.
            results.append([tensor.detach().clone() for tensor in (*outputs, *actual.values())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert not counters["inductor"]["cudagraph_skips"]
