"""Product 3 in the backward pass of a compiled graph: in which calls, with the gradients of eager calls."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from logitless import CrossEntropyLoss, DPOLoss, KTOLoss, linear_cross_entropy
from logitless.engine import budget, operators, static_rows
from logitless.engine.captured import SIGHTINGS, CapturedPass
from logitless.engine.operands import SplitHead
from logitless.kernels.matmul import accumulate
from tests.cases import usually
from tests.engine.test_captured import captures
from tests.engine.test_static_rows import uncaptured
from tests.losses import every_loss
from tests.support import DEVICE, uncompiled

LATE = "logitless.weight_gradient.default"
TOKENS, H, V = 6, 8, 30


@pytest.fixture(autouse=True)
def later(monkeypatch):
    monkeypatch.setattr(static_rows, "MULTIPLIES_LATER_ON", ("cpu", "cuda"))
    torch._dynamo.reset()  # the tests share the code of their steps


@dataclass
class Backend:
    """Runs the graphs as they are; `operators`: those of the library in the last backward graph."""

    operators: list[str] = field(default_factory=list)
    graphs: int = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(module, inputs):
            names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
            self.operators = [name for name in names if name.startswith("logitless.")]
            return make_boxed_func(module.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)


def operands(tokens=TOKENS, *, ignored=2, dtype=torch.float32, seed=0):
    made = torch.Generator(DEVICE).manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=made, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=made, device=DEVICE).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=made, device=DEVICE).to(dtype).requires_grad_()
    targets = torch.randint(V, (tokens,), generator=made, device=DEVICE)
    targets[tokens - ignored :] = -100
    return hidden, weight, bias, targets


def gradients(function, x: Sequence[Tensor], factor: float = 3.0) -> list[Tensor]:
    with torch.compiler.set_stance("default"):
        loss = function(*x)
        return list(torch.autograd.grad(loss * factor, [leaf for leaf in x if leaf.requires_grad]))


def compare(step, *calls: Sequence[Tensor], operators: Sequence[str] = (LATE,), rtol=1e-4, atol=1e-6) -> None:
    """The gradients of a compiled step are those of an eager one, from these operators."""
    backend = Backend()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for x in calls:
        with uncompiled():
            expected = gradients(step, x)
        torch.testing.assert_close(gradients(compiled, x), expected, rtol=rtol, atol=atol)
        assert backend.operators == list(operators)


def cross_entropy(hidden, weight, bias, targets):
    return CrossEntropyLoss(z_loss=0.1, label_smoothing=0.1)(hidden, weight, targets, bias=bias).loss


def test_lengths():
    """Three graphs: of the first length, of those of at most H tokens, of more. Ignored tokens, or all."""
    calls = [operands(n, ignored=ignored) for n, ignored in ((6, 2), (5, 0), (8, 8), (4, 1))]
    backend = Backend()
    compiled = torch.compile(cross_entropy, backend=backend, fullgraph=True)
    for x in (*calls, operands(9), operands(40), *calls):
        with uncompiled():
            expected = gradients(cross_entropy, x)
        torch.testing.assert_close(gradients(compiled, x), expected, rtol=1e-4, atol=1e-6)
    assert backend.graphs == 3
    torch._dynamo.reset()
    compare(cross_entropy, *calls)
    compare(cross_entropy, operands(9), operators=())


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
@pytest.mark.parametrize("ignored", [2, TOKENS])
def test_upstream_gradients_that_are_not_finite(factor, ignored):
    """They make the same gradients not finite: those of no ignored token, and of no head without tokens."""
    x = operands(ignored=ignored)
    with uncompiled():
        expected = gradients(cross_entropy, x, factor)
    actual = gradients(torch.compile(cross_entropy, backend="aot_eager", fullgraph=True), x, factor)
    for ours, eager in zip(actual, expected, strict=True):
        assert torch.equal(ours.isfinite(), eager.isfinite())
        assert torch.equal(ours[ours.isfinite()], eager[eager.isfinite()])


# They have no product 3, or one of several heads.
OPERATORS = {
    "logprobs": ["logitless.gradients.default"],
    **dict.fromkeys(("support", "support, top-k teacher", "multi-token", "Medusa"), []),
}
USUAL = ("cross-entropy, smoothed", "DPO", "own LogitsLoss", *OPERATORS)


@pytest.mark.parametrize("name", usually(USUAL, every_loss.LOSSES))
def test_every_loss(name, monkeypatch):
    monkeypatch.setattr(every_loss, "H", 32)
    heads, x = every_loss.heads(), every_loss.given(5)

    def step(hidden, weight, bias):
        x.hidden, x.weight, x.bias = hidden, weight, bias
        return every_loss.LOSSES[name](x, heads)[0]

    leaves = [x.hidden, x.weight, x.bias]
    if name in ("multi-token", "Medusa"):
        leaves = leaves[:1]
        step = functools.partial(step, weight=x.weight, bias=x.bias)
    compare(step, leaves, operators=OPERATORS.get(name, [LATE]))


def test_other_dtypes():
    """bf16; and autocast of an fp32 head, whose gradient is in fp32."""
    compare(cross_entropy, operands(dtype=torch.bfloat16), rtol=1e-2, atol=1e-2)
    x = operands()
    compiled = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        actual = gradients(compiled, x)
        with uncompiled():
            expected = gradients(cross_entropy, x)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    assert not torch.equal(actual[1], actual[1].bfloat16().float())


@pytest.mark.parametrize(
    "options",
    [{"logits_budget": "1MiB"}, {"accum_dtype": torch.float64}],
    ids=["a budget", "another sum"],
)
def test_calls_with_a_product_in_the_forward_pass(options):
    def step(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, **options)

    hidden, weight, _, targets = operands()
    compare(step, (hidden, weight, targets), operators=[])
    compare(step, (hidden, weight.detach(), targets), operators=[])


def test_packed_sequences():
    """Their ignored rows are not projected, and would be rows of zeros in a later product."""
    boundaries = torch.tensor([0, 2, TOKENS], dtype=torch.int32, device=DEVICE)

    def step(hidden, weight, targets):
        loss = DPOLoss()(hidden, weight, targets, ref_logps=targets * 0.1, cu_seqlens=boundaries)
        return loss.loss

    hidden, weight, _, targets = operands(ignored=1)
    compare(step, (hidden, weight, targets), operators=[])


def test_half_precision_has_its_product_in_the_forward_pass():
    compare(cross_entropy, operands(dtype=torch.float16), operators=[], rtol=1e-2, atol=1e-2)


def test_a_frozen_head():
    hidden, weight, bias, targets = operands()
    compare(cross_entropy, (hidden, weight.detach(), bias, targets), operators=[])


def test_hidden_states_that_are_the_head():
    def step(x, targets):
        return linear_cross_entropy(x, x, targets)

    given = operands()[0], torch.arange(TOKENS, device=DEVICE)
    compare(step, given, operators=[])
    torch._dynamo.reset()
    with captures(static=True):
        compare(step, *[given] * (SIGHTINGS + 2), operators=[])


@pytest.mark.parametrize("compact", [True, False])
def test_rows_of_the_product(compact, monkeypatch):
    """The product has the supervised tokens alone, where the pass projects these alone."""
    rows = []

    def accumulated(total, d_logits, features, *, first):
        rows.append((len(d_logits), len(features)))
        accumulate(total, d_logits, features, first=first)

    monkeypatch.setattr(operators, "accumulate", accumulated)

    def step(hidden, weight, bias, targets):
        return CrossEntropyLoss(compact=compact)(hidden, weight, targets, bias=bias).loss

    compare(step, *[operands(ignored=ignored) for ignored in (2, 5, 0)])
    assert rows == [(n, n) for n in ((4, 1, 6) if compact else (6, 6, 6))]


def test_every_row():
    def step(hidden, weight, bias, targets):
        return CrossEntropyLoss(compact=False)(hidden, weight, targets, bias=bias).loss

    compare(step, operands())


def test_several_chunks(monkeypatch):
    monkeypatch.setattr(budget, "default_budget", lambda device: 8 * 4 * V)
    hidden, weight, bias, targets = operands(8, ignored=1)
    assert CrossEntropyLoss()(hidden, weight, targets, bias=bias).plan.chunks > 1
    compare(cross_entropy, (hidden, weight, bias, targets), operands(8, ignored=8))


def test_a_gradient_of_the_logits_above_the_budget(monkeypatch):
    monkeypatch.setattr(budget, "default_budget", lambda device: 8 * 4 * V - 1)
    compare(cross_entropy, operands(8), operators=())
    torch._dynamo.reset()
    compare(cross_entropy, operands(7))


def test_retained_graphs():
    hidden, weight, bias, targets = operands()
    loss = torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)(hidden, weight, bias, targets)
    first = torch.autograd.grad(loss, weight, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(loss, weight))


@pytest.mark.parametrize("compact", [True, False])
def test_replays(compact, monkeypatch):
    """A later replay leaves what an earlier call has kept."""
    used, run = [], CapturedPass.run
    monkeypatch.setattr(CapturedPass, "run", lambda *given: used.append(run(*given)) or used[-1])

    def step(hidden, weight, bias, targets):
        return CrossEntropyLoss(compact=compact)(hidden, weight, targets, bias=bias).loss

    hidden, weight, bias, _ = operands()
    with captures(static=True), torch.compiler.set_stance("default"):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        losses, expected = [], []
        for call in range(SIGHTINGS + 3):
            x = hidden, weight, bias, operands(ignored=call, seed=call)[-1]
            losses.append(compiled(*x))
            with uncaptured():
                expected.append(torch.autograd.grad(step(*x), x[:3]))
        actual = [torch.autograd.grad(loss, (hidden, weight, bias)) for loss in losses]
    assert len(used) == 4
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_an_eager_call_and_a_graph_replay_passes_of_their_own(compiled_first):
    """The eager call is looked up by the flattened call too, because kl is a number."""
    hidden, weight, _, targets = operands()
    given = {"ref_logps": torch.zeros(2, 3, device=DEVICE), "kl": 0.1}
    given["labels"] = torch.tensor([True, False], device=DEVICE)
    loss_fn = KTOLoss()

    def step(hidden, weight, targets):
        return loss_fn(hidden.view(2, 3, H), weight, targets.view(2, 3), **given).loss

    x = hidden, weight, targets
    with uncaptured(), uncompiled():
        expected = gradients(step, x)
    with captures(static=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for function in (compiled, step) if compiled_first else (step, compiled):
            for _ in range(SIGHTINGS + 1):
                torch.testing.assert_close(gradients(function, x), expected, rtol=1e-4, atol=1e-6)


def test_a_head_that_two_losses_share():
    def step(hidden, weight, bias, targets):
        return cross_entropy(hidden, weight, bias, targets) + cross_entropy(-hidden, weight, bias, targets)

    compare(step, operands(), operators=[LATE, LATE])


@pytest.mark.parametrize("rank", [TOKENS - 1, TOKENS])
def test_a_head_with_an_adapter(rank):
    """Its trained columns alone have a gradient."""
    made = torch.Generator(DEVICE).manual_seed(1)
    frozen, b = (torch.randn(V, n, generator=made, device=DEVICE) for n in (H, rank))
    a = torch.randn(rank, H, generator=made, device=DEVICE).requires_grad_()
    hidden, _, _, targets = operands()

    def step(hidden, a, b, targets):
        split = SplitHead(frozen, b)
        return CrossEntropyLoss()(torch.cat((hidden, hidden @ a.t()), -1), split, targets).loss

    operators = [LATE] if rank >= TOKENS else []
    compare(step, (hidden, a, b.requires_grad_(), targets), operators=operators)


def test_another_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        compare(cross_entropy, operands())
    finally:
        torch.set_default_dtype(torch.float32)
