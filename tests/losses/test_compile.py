"""A model that ends in our loss compiles as one graph, and two graphs serve every length (three with a length
of one)."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from logitless import CrossEntropyLoss, LogitsLoss, MedusaHeads, Term, linear_cross_entropy
from logitless.kernels.head.cross_entropy import twin_bytes
from tests.cases import usually
from tests.losses import every_loss
from tests.support import DEVICE, EngineCalls, uncompiled

VOCAB, WIDTH = 64, 8
# One chunk for the shortest lengths and about twenty for the longest: see the test of that.
# Eight rows of fp32 logits beside what the twins need.
BUDGET = twin_bytes(DEVICE, torch.float32, VOCAB, 0) + 8 * 4 * VOCAB
LENGTHS = [24, 40, 157, 8, 3, 160, 96, 5]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Embedding, one layer, head and loss: `forward` returns a tuple whose first member is the scalar to take
    back."""

    def __init__(self, loss: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.loss = loss

    def forward(self, tokens: Tensor, targets: Tensor, *extra: Tensor | int) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.body(self.embed(tokens)))
        return self.loss(hidden, self.head.weight, targets, *extra, bias=self.head.bias)


def ce_object(hidden, weight, targets, **given):
    loss = CrossEntropyLoss(label_smoothing=0.1, z_loss=0.1, logits_budget=BUDGET)
    output = loss(hidden, weight, targets, **given)
    return output.loss, *output.metrics.values()


def ce_none(*operands, **given):
    losses = linear_cross_entropy(*operands, **given, reduction="none", logits_budget=BUDGET)
    return losses.square().sum(), losses


def ce_shifted(*operands, **given):
    return (linear_cross_entropy(*operands, **given, shift=True, compact=False, logits_budget=BUDGET),)


def ce_of_items(hidden, weight, targets, num_items, **given):
    return ce_object(hidden, weight, targets, num_items=num_items, **given)


def ce_weighted(hidden, weight, targets, class_weights, token_weights, **given):
    loss = CrossEntropyLoss(dft=True, logits_budget=BUDGET)
    return (
        loss(hidden, weight, targets, class_weights=class_weights, token_weights=token_weights, **given).loss,
    )


def ce_masked(hidden, weight, targets, mask, **given):
    return (linear_cross_entropy(hidden, weight, targets, mask=mask, **given, logits_budget="200kB"),)


def batch(*shape: int, ignored: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    tokens, targets = torch.randint(VOCAB, (2, *shape), generator=generator)
    # The first target stays, unless all are ignored: a loss of zero would compare nothing.
    mask = torch.rand(shape, generator=generator) < ignored
    mask.view(-1)[:2] = ignored == 1
    return tokens, targets.masked_fill(mask, -100)


def assert_same_step(compiled: nn.Module, model: Model, *inputs: Tensor | int) -> None:
    """Value and parameter gradients of the compiled model equal the eager ones."""
    results = []
    for function in (model, compiled):
        model.zero_grad()
        outputs = function(*inputs)
        outputs[0].backward()
        results.append((outputs, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    (eager, eager_grads), (ours, our_grads) = results
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(our_grads, eager_grads, rtol=1e-4, atol=1e-6)
    if (inputs[1][..., 1:] != -100).any():
        assert all(grad.any() for grad in our_grads.values())


def compile_counted(model: Model) -> tuple[Callable, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


def assert_two_graphs(loss: Callable, batches: list[tuple]) -> None:
    model = Model(loss)
    compiled, counter = compile_counted(model)
    for inputs in batches:
        assert_same_step(compiled, model, *inputs)
    assert counter.frame_count <= 2


@pytest.mark.repeats
@pytest.mark.parametrize("loss", [ce_object, ce_none, ce_shifted])
def test_two_graphs_serve_every_length(loss):
    model = Model(loss)
    compiled, counter = compile_counted(model)
    for length in LENGTHS:
        assert_same_step(compiled, model, *batch(length))
    assert counter.frame_count <= 2
    assert_same_step(compiled, model, *batch(104, ignored=1.0))
    assert counter.frame_count <= 2
    assert_same_step(compiled, model, *batch(1))
    assert counter.frame_count <= 3


FROZEN = ("DPO", "GRPO", "JSD", "multi-token", "Medusa")
# One loss of tokens, of pairs and of a teacher. It starts with a graph for one length alone, and a length of
# one takes a third graph. The others start with the graph for every length; with --all, none does.
ONE_OF_EACH = ("logprobs", "DPO", "JSD")


# Losses of the same operators as one that is not here, and other terms; run with --all.
SAME_OPERATORS = (
    "PPO",
    "GRPO, whole sequences",
    "KTO",
    "ORPO",
    "cosine",
    "reverse_kl",
    "multi-token",
    "support, top-k teacher",
    "top-k teacher",
    "JSD",
    "own TokenLoss",
    "GRPO, corrected",
    "GRPO, top entropy",
    "RLOO",
    "REINFORCE",
    "DPO, sorted",
    "CPO",
    "SimPO",
    "cross-entropy, smoothed",
    "forward_kl",
    "skewed_kl",
    "skewed_reverse_kl",
    "total_variation",
)


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *(
            pytest.param(name, False, id=name, marks=[pytest.mark.slow] if name in SAME_OPERATORS else [])
            for name in every_loss.LOSSES
        ),
        *(
            pytest.param(
                name, True, id=f"{name}, frozen head", marks=[] if name == "JSD" else [pytest.mark.slow]
            )
            for name in FROZEN
        ),
    ],
)
def test_every_loss(name, frozen, everything):
    """Value, metrics and every gradient, of one to ten chunks; a pass in the graph is one operator."""
    heads = every_loss.heads()
    budget = twin_bytes(DEVICE, torch.float32, every_loss.V, 0) + 8 * 4 * every_loss.V

    def step(x, heads):
        return every_loss.LOSSES[name](x.with_hidden(torch.tanh), heads, logits_budget=budget)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    in_full = everything or (name in ONE_OF_EACH and not frozen)
    for T, graphs in [(6, 2), (9, 2), (4, 2), (17, 2), (1, 3)] if in_full else [(9, 1), (4, 1), (17, 1)]:
        x = every_loss.given(T)
        if not in_full:
            for _, tensor in x.items():
                if tensor.shape[:2] == x.targets.shape:
                    torch._dynamo.mark_dynamic(tensor, 1)
        if frozen:
            x.weight.requires_grad_(False), x.bias.requires_grad_(False)
        # The function of a LogitsLoss stays as it is: compiling it takes its time and shows nothing here.
        with EngineCalls(uncompiled=True) as calls:
            ours = compiled(x, heads)
            our_gradients = every_loss.gradients(ours[0], x, heads)
        with uncompiled():
            eager = step(x, heads)
            gradients = every_loss.gradients(eager[0], x, heads)
        assert 1 <= len(calls.operators) <= 2
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(our_gradients, gradients, rtol=1e-4, atol=1e-6)
        assert "hidden" in gradients and ("weight" in gradients) != frozen
        assert T == 1 or all(gradient.any() for gradient in gradients.values())
        assert counter.frame_count <= graphs


@dataclass(frozen=True, kw_only=True)
class Repeated(LogitsLoss):
    """Two metrics over one unit, and one over another."""

    metric_names: ClassVar = ("largest", "twice", "total")

    def terms(self, logits, batch):
        largest = logits.amax(-1)
        metrics = {"largest": Term(largest), "twice": Term(2 * largest), "total": Term(largest, over=None)}
        return {"squares": Term(logits.square().mean(-1))}, metrics


def repeated(x, heads, **options):
    out = Repeated(**options)(x.hidden, x.weight, x.targets, bias=x.bias)
    return out.loss, *out.metrics.values()


UNREDUCED = {name: loss for name, loss in every_loss.LOSSES.items() if name not in every_loss.REDUCED}
UNREDUCED |= {"several metrics": repeated}
# Two metrics over one unit.
USUAL = ("several metrics", "JSD")


@pytest.mark.parametrize("name", usually(USUAL, UNREDUCED))
def test_every_unreduced_loss(name):
    def step(x):
        value, *metrics = UNREDUCED[name](x.with_hidden(torch.tanh), None, reduction="none")
        return value.square().sum(), value, metrics

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for ignored in (0.3, 1.0):
        x = every_loss.given(6)
        if ignored == 1.0:
            x.targets.fill_(-100)
        with EngineCalls(uncompiled=True):
            ours = compiled(x)
            actual = every_loss.gradients(ours[0], x, every_loss.heads())
        with uncompiled():
            reference_value = step(x)
            expected = every_loss.gradients(reference_value[0], x, every_loss.heads())
        torch.testing.assert_close(ours, reference_value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
        assert actual["hidden"].any() == (ignored < 1)


def test_heads_under_autocast():
    """An operator's body runs outside of the autocast that its call was in. With inductor, which believes the
    operator's dtypes."""
    loss, heads = every_loss.LOSSES["Medusa"], every_loss.heads()

    def step(x, heads):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return loss(x.with_hidden(torch.Tensor.bfloat16), heads)

    x = every_loss.given(6)
    (ours, *_), (eager, *_) = torch.compile(step, fullgraph=True)(x, heads), step(x, heads)
    torch.testing.assert_close(ours, eager)
    actual, expected = (every_loss.gradients(value, x, heads) for value in (ours, eager))
    torch.testing.assert_close(
        actual, expected, rtol=1e-2, atol=1e-5
    )  # inductor leaves out the cast to bf16 and back


class SwitchedHeads(MedusaHeads):
    squashed = False

    def blocks(self, k: int) -> nn.Module:
        layers = super().blocks(k)
        return nn.Sequential(*layers, nn.Tanh()) if self.squashed else layers


@pytest.mark.repeats
def test_heads_of_another_kind_are_compiled_anew():
    """A graph finds the blocks by a name: not those of the first module that was compiled, nor those of a
    copy that is gone."""
    x, loss = every_loss.given(6), every_loss.LOSSES["Medusa"]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for squashed in (False, True, False):
        heads = SwitchedHeads(every_loss.H, every_loss.V, 2, device=DEVICE)
        heads.squashed = squashed
        heads.load_state_dict(every_loss.heads().state_dict())
        torch.testing.assert_close(compiled(x, heads), loss(x, heads), rtol=1e-4, atol=1e-6)
        again = copy.deepcopy(heads)
        del heads
        torch.testing.assert_close(compiled(x, again), loss(x, again), rtol=1e-4, atol=1e-6)


def test_the_lengths_give_one_to_twenty_chunks():
    loss = CrossEntropyLoss(logits_budget=BUDGET)
    weight = torch.randn(VOCAB, WIDTH)
    chunks = [
        loss(torch.randn(length, WIDTH), weight, torch.zeros(length, dtype=torch.int64)).plan.chunks
        for length in LENGTHS
    ]
    assert min(chunks) == 1 and max(chunks) >= 16 and len(set(chunks)) >= 5, chunks


def test_two_graphs_serve_every_batch_of_sequences():
    assert_two_graphs(ce_shifted, [batch(*shape) for shape in [(2, 12), (3, 20), (4, 33), (2, 50), (5, 7)]])


@pytest.mark.parametrize("kind", [torch.tensor, int], ids=["tensor", "int"])
def test_num_items_does_not_recompile(kind):
    assert_two_graphs(ce_of_items, [(*batch(40), kind(num_items)) for num_items in (5, 11, 17, 23)])


def test_token_and_class_weights_compile():
    weights = torch.linspace(0.5, 2, VOCAB)
    batches = [(*batch(length), weights, torch.linspace(0, 2, length)) for length in (24, 40, 157)]
    assert_two_graphs(ce_weighted, batches)


def test_masks_of_floats_compile():
    model = Model(ce_masked)
    compiled, _ = compile_counted(model)
    tokens, targets = batch(24)
    mask = (torch.arange(24) % 3 < 2).bfloat16()
    assert_same_step(compiled, model, tokens, targets, mask)
    with pytest.raises(ValueError, match=r"^mask: expected .* got 8 negative numbers, .*; pass mask == 0"):
        compiled(tokens, targets, mask.log())


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "no_grad"])
def test_a_model_without_gradients_compiles(trainable):
    model = Model(ce_object).requires_grad_(trainable)
    compiled, counter = compile_counted(model)
    with torch.set_grad_enabled(not trainable):
        for length in (24, 40, 157):
            inputs = batch(length)
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-6)
    assert counter.frame_count <= 2


def test_inductor():
    model = Model(ce_object)
    compiled = torch.compile(model, fullgraph=True)
    for length in (40, 157, 24):
        assert_same_step(compiled, model, *batch(length))


OTHERS = {
    "a flag": (CrossEntropyLoss(dft=True), CrossEntropyLoss(dft=False)),
    "a text": (CrossEntropyLoss(reduction="sum"), CrossEntropyLoss(reduction="mean")),
    "None or a number": (CrossEntropyLoss(softcap=None), CrossEntropyLoss(softcap=1.0)),
}


@pytest.mark.parametrize("losses", OTHERS.values(), ids=OTHERS)
def test_a_loss_with_other_options_has_another_graph(losses):
    x = every_loss.given(6)
    compiled = torch.compile(lambda loss: loss(x.hidden, x.weight, x.targets).loss, backend="aot_eager")
    for loss in losses:
        actual, expected = compiled(loss), loss(x.hidden, x.weight, x.targets).loss
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(value, x.hidden) for value in (actual, expected)))
