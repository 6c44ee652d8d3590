"""`fit_activations`: gradients, counted bytes, plans, and what is refused."""

import copy
import gc
import logging
from collections import UserDict
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from logitless.activations import fit as activations
from logitless.activations.plan import BatchSize, Counts, choose_levels
from logitless.errors import to_bytes
from logitless.models import fit_activations, fuse_layers
from tests.layers.tiny import SIZES, Step, step, tiny

PLENTY = 10**9
LAYERS = 3


def batch(sequences: int = 2, length: int = 21, seed: int = 0) -> torch.Tensor:
    return torch.randint(64, (sequences, length), generator=torch.Generator().manual_seed(seed))


def made(family: str = "Llama", *, fused: bool = True, lora: float | None = None, **options) -> nn.Module:
    model = tiny(family, num_hidden_layers=LAYERS, **options).train()
    if fused:
        fuse_layers(model)
    if lora is not None:
        model = get_peft_model(model, LoraConfig(r=4, lora_dropout=lora, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
    return model


def equal(actual: Step, expected: Step) -> bool:
    same = actual.gradients.keys() == expected.gradients.keys() and torch.equal(actual.loss, expected.loss)
    return same and all(torch.equal(actual.gradients[name], x) for name, x in expected.gradients.items())


def seeded(model: nn.Module, ids: torch.Tensor, autocast: bool, between=lambda: 0) -> tuple:
    """A step from a fixed random state, the state after it, and `between()` before the backward pass."""
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    noted = between()
    model.zero_grad(set_to_none=True)
    loss.backward()
    actual = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach(), actual), torch.get_rng_state(), noted


def counted(model: nn.Module, ids: torch.Tensor):
    """A budget for all, after the two steps in which the bytes of the layers become known."""
    fitted = fit_activations(model, PLENTY)
    for _ in range(2):
        step(model, ids)
    return fitted


def budget_of(fitted, level: str) -> int:
    """What the layers hold at that level."""
    costs, shared = fitted.costs
    return shared + sum(cost[level] for cost in costs)


def ends(model: nn.Module, ids: torch.Tensor) -> tuple[int, int]:
    """Bytes with all layers full and with all kept."""
    fitted = fit_activations(model, PLENTY)
    out = model(input_ids=ids, labels=ids)
    least = fitted.held_bytes
    del out
    step(model, ids)
    most = fitted.last_plan.bytes
    assert set(fitted.last_plan.levels) == {"keep"}
    fitted()
    return least, most


CASES = {
    "Llama": {},
    "Llama, stock layers": {"fused": False},
    "Qwen3": {"family": "Qwen3"},
    "Gemma2, eager, dropout": {"family": "Gemma2", "attention_dropout": 0.2, "attn_implementation": "eager"},
    "Mixtral": {"family": "Mixtral"},
    "LoRA": {"family": "Qwen3", "lora": 0.0},
    "LoRA, dropout": {"family": "Qwen3", "lora": 0.1},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"family": "Qwen3", "attention_dropout": 0.2},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_equal_and_bytes_within_the_budget(case):
    """Budgets from the least to plenty: bytes and sets of upgrades only grow."""
    model, ids, autocast = made(**CASES[case]), batch(), case == "autocast"
    truth, state, _ = seeded(model, ids, autocast)
    assert all(x.norm() > 0 for name, x in truth.gradients.items() if "expert" not in name)
    fitted = fit_activations(model, PLENTY)

    def held_bytes() -> int:
        return fitted.held_bytes

    _, _, least = seeded(model, ids, autocast, held_bytes)
    seeded(model, ids, autocast)
    most, ranks = fitted.last_plan.bytes, {"full": 0, "cheap": 1, "keep": 2}
    assert least < most and set(fitted.last_plan.levels) == {"keep"}
    held_before, levels_before, levels_seen = 0, (0,) * LAYERS, set()
    budgets = [least + (most - least) * part // 7 for part in range(8)]
    for budget in budgets:
        fitted.budget = budget
        actual, after, held = seeded(model, ids, autocast, held_bytes)
        # Positions and masks are counted, and some are held by layers under "full" alone.
        shared = 8 * ids.shape[1] + 2 * 4 * ids.numel() * ids.shape[1]
        assert 0 <= fitted.last_plan.bytes - held <= shared and fitted.last_plan.bytes <= budget
        assert equal(actual, truth) and torch.equal(after, state) and fitted.held_bytes == 0
        levels = tuple(ranks[level] for level in fitted.last_plan.levels)
        assert held >= held_before and all(now >= was for now, was in zip(levels, levels_before))
        held_before, levels_before = held, levels
        levels_seen |= set(fitted.last_plan.levels)
    assert levels_before == (2,) * LAYERS
    assert levels_seen == ({"full", "keep"} if "stock" in case else {"full", "cheap", "keep"})


class Made(TorchDispatchMode):
    """Weak references to every storage that an operator returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live(self) -> int:
        made = ((key, *value) for key, value in self.storages.items() if key not in self.parameters)
        return sum(nbytes for _, reference, nbytes in made if not reference.expired())


@pytest.mark.parametrize("options", [{}, {"family": "Gemma2", "attn_implementation": "eager"}], ids=str)
def test_live_storages_stay_within_the_budget_for_lengths_in_any_order(options):
    """Counted from outside: every storage that an operator inside of the layers has made, and that lives."""
    model = made(**options)
    layers, norm, mode = model.model.layers, model.model.norm, []
    layers[0].register_forward_pre_hook(
        lambda *_: (mode.append(Made(model)), mode[-1].__enter__())[:0] or None
    )
    norm.register_forward_pre_hook(lambda *_: mode[-1].__exit__(None, None, None))
    lengths = (64, 16, 200, 40, 333, 512, 17, 256, 333)
    longest = ends(model, batch(1, max(lengths)))
    budget = longest[0] + (longest[1] - longest[0]) // 5
    fitted, levels = fit_activations(model, budget), []
    for length in lengths:
        loss = model(input_ids=(ids := batch(1, length)), labels=ids).loss
        hidden = 4 * ids.numel() * SIZES["hidden_size"]
        # The norm behind the layers holds the last one's output.
        live = mode[-1].live() - hidden
        assert live <= fitted.held_bytes <= budget and live > 0.8 * fitted.held_bytes
        loss.backward()
        levels.append(fitted.last_plan.levels)
    assert levels[1] == ("keep",) * LAYERS and levels[-1] == levels[4] != levels[1]
    # Sizes that were not counted follow from those that were: shapes tell what grows with the square.
    plan, ids = fitted.last_plan, batch(1, 77)
    fitted.budget = PLENTY
    loss = model(input_ids=ids, labels=ids).loss
    masks = 2 * 4 * 77 * 77 + 8 * 77
    assert 0 <= fitted.last_plan.bytes - fitted.held_bytes <= masks and fitted.last_plan != plan
    assert fitted.last_plan.levels == ("keep",) * LAYERS
    del loss


def test_what_is_dropped_is_what_shapes_say():
    """Cheap drops the outputs of both norms, of the rotation of queries and keys, and of the gate."""
    model, ids = made("Qwen3"), batch()
    _, most = ends(model, ids)
    fitted = fit_activations(model, most - 1)
    step(model, ids)
    loss = model(input_ids=ids, labels=ids).loss
    assert fitted.last_plan.levels == ("cheap", "keep", "keep")
    heads = SIZES["num_attention_heads"] + SIZES["num_key_value_heads"]
    elements = 2 * SIZES["hidden_size"] + heads * SIZES["head_dim"] + SIZES["intermediate_size"]
    assert most - fitted.last_plan.bytes == 4 * ids.numel() * elements
    loss.backward()


def test_accumulation_and_several_graphs():
    model, first, second = made(), batch(2, 21), batch(1, 30, seed=1)
    model.zero_grad()
    for ids in (first, second):
        model(input_ids=ids, labels=ids).loss.backward()
    truth = {name: p.grad.clone() for name, p in model.named_parameters()}
    _, most = ends(model, first)
    fitted = fit_activations(model, most)

    def grads() -> dict:
        return {name: p.grad for name, p in model.named_parameters()}

    for _ in range(2):  # one after the other
        model.zero_grad()
        for ids in (first, second):
            model(input_ids=ids, labels=ids).loss.backward()
        assert all(torch.equal(x, truth[name]) for name, x in grads().items())
    assert set(fitted.last_plan.levels) == {"keep"}
    shares = []
    for turn in range(2):  # both alive
        model.zero_grad()
        losses = []
        for ids in (first, second):
            with (
                pytest.warns(UserWarning, match="of another graph, got")
                if shares == [most]
                else nullcontext()
            ):
                losses.append(model(input_ids=ids, labels=ids).loss)
            shares.append(fitted.last_plan.budget)
            assert fitted.held_bytes <= most or turn == 0
        for loss in losses:
            loss.backward()
        assert fitted.held_bytes == 0
        assert all(torch.equal(x, truth[name]) for name, x in grads().items())
    # Known from the first time on: the first of two leaves the second its share.
    assert shares[:3] == [most, 0, most // 2] and most // 2 <= shares[3]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1])
def test_a_graph_that_is_used_twice_in_part_or_not_at_all(share):
    model, ids = made(), batch()
    truth = step(model, ids)
    _, most = ends(model, ids)
    fitted = fit_activations(model, int(share * most))
    step(model, ids)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    held = fitted.held_bytes
    inner = model.model.layers[1].mlp.down_proj.weight
    (part,) = torch.autograd.grad(loss, inner, retain_graph=True)
    assert torch.equal(part, truth.gradients["model.layers.1.mlp.down_proj.weight"])
    loss.backward(retain_graph=True)
    assert fitted.held_bytes == held
    model.zero_grad()
    loss.backward()
    assert equal(Step(loss.detach(), {n: p.grad for n, p in model.named_parameters()}), truth)
    assert fitted.held_bytes == 0
    gc.collect()
    gc.disable()
    try:
        loss = model(input_ids=ids, labels=ids).loss
        assert fitted.held_bytes == held
        del loss  # a batch that is skipped
        assert fitted.held_bytes == 0
    finally:
        gc.enable()


def test_undo_evaluation_and_settings_of_the_model():
    model, ids = made(), batch()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.layers[1].gradient_checkpointing = False
    states = [dict(layer.__dict__) for layer in model.model.layers]
    on = [layer.gradient_checkpointing for layer in model.model.layers]
    fitted, cls = fit_activations(model, PLENTY), type(model.model)
    with pytest.raises(ValueError, match="'activations' on already"):
        fit_activations(model, PLENTY)
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()
    model(input_ids=ids, labels=ids).loss.backward()
    model.generate(ids, max_new_tokens=2, do_sample=False)
    assert fitted.last_plan is None
    model.train()
    step(model, ids)
    assert fitted.last_plan.levels == ("full",) * LAYERS
    twin = copy.deepcopy(model)
    assert type(twin.model) is not cls and not hasattr(twin.model, "_logitless_states")
    fitted()
    assert [dict(layer.__dict__) for layer in model.model.layers] == states
    assert [layer.gradient_checkpointing for layer in model.model.layers] == on and True in on and False in on
    plan = fitted.last_plan
    step(model, ids)
    assert fitted.last_plan is plan and type(model.model) is not cls


def test_a_call_is_what_it_was():
    model, ids = made(), batch()
    model.config.use_cache = True
    fit_activations(model, PLENTY)
    out = model(input_ids=ids, output_hidden_states=True)
    assert out.past_key_values is None and len(out.hidden_states) == LAYERS + 1
    cache = model(input_ids=ids, use_cache=True).past_key_values
    # The name of the backbone's argument, which transformers 5.24 changes.
    with pytest.raises(
        ValueError, match="^(cache|past_key_values): expected None under an activation budget, got Dyn"
    ):
        model(input_ids=ids, past_key_values=cache)


def test_hidden_states_that_a_caller_keeps():
    """What the caller holds is not dropped, and comes out right."""
    model, ids = made(), batch()
    out = model(input_ids=ids, output_hidden_states=True)
    weights = [torch.randn_like(x) for x in out.hidden_states]
    sum((x * w).sum() for x, w in zip(out.hidden_states, weights)).backward()
    truth = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    _, most = ends(model, ids)
    for share in (0.3, 0.6, 1.0):
        fitted = fit_activations(model, int(share * most))
        step(model, ids)
        model.zero_grad()
        out = model(input_ids=ids, output_hidden_states=True)
        sum((x * w).sum() for x, w in zip(out.hidden_states, weights)).backward()
        for name, p in model.named_parameters():
            assert name not in truth or torch.equal(p.grad, truth[name]), name
        fitted()


def test_the_log_line_and_the_report(caplog):
    model, ids = made(), batch()
    fitted = fit_activations(model, "1GB")
    with caplog.at_level(logging.INFO, activations.__name__):
        for _ in range(3):
            step(model, ids)
    plan = fitted.last_plan
    assert [x.message for x in caplog.records] == [f"activation budget: {plan.describe()}"]
    line = f"3 layers, 42 tokens: 3 kept, 0 cheap, 0 full: {plan.bytes / 1024:.2f} KiB of 953.67 MiB"
    assert plan.describe() == line
    assert list(fitted.report) == ["layers.0", "layers.1", "layers.2"]
    assert all(text.startswith("level cheap is available: it holds 7") for text in fitted.report.values())
    stock = fit_activations(made(fused=False), "1GB")
    assert all("nothing in the layer is fused" in text for text in stock.report.values())


# --- Layers that write into what they are given


class Shared(GradientCheckpointingLayer):
    """Reads what earlier layers wrote into containers, and writes over it for later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, hidden, past, shared, nested):
        values = self.linear(hidden)
        if past:
            values = values * past[-1] * shared["values"].exp() + nested[0]["sum"]
        past.append(values)
        shared["values"] = values.tanh()
        assert shared["inner"][0] is nested[0]  # a container that is given twice is one
        shared["inner"][0]["sum"] = nested[0].pop("sum", 0) + values.sin()
        return hidden + values * values


class Sharing(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Shared() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        nested = ({},)
        past, shared = [], self.kind({"inner": [nested[0]]})
        for layer in self.layers:
            hidden = layer(hidden, past, shared=shared, nested=nested)
        return (hidden * past[0] + shared["values"] + nested[0]["sum"]).square().sum()


class DictOfUser(dict):
    """A dict that pytree takes for a leaf."""


@pytest.mark.parametrize("kind", [dict, DictOfUser, UserDict])
def test_layers_that_write_into_containers(kind):
    torch.manual_seed(0)
    model, x = Sharing(kind).train(), torch.randn(1, 5, 8)

    def step() -> Step:
        model.zero_grad()
        loss = model(x)
        loss.backward()
        return Step(loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()})

    truth = step()
    fitted = fit_activations(model, PLENTY)
    gc.collect()
    gc.disable()
    try:
        assert equal(step(), truth) and fitted.held_bytes == 0  # the step that counts
        assert equal(step(), truth) and set(fitted.last_plan.levels) == {"keep"}
        # The layers' inputs, and three tensors that each layer but the last wrote for the next one.
        least = 4 * x.numel() * (LAYERS + 3 * (LAYERS - 1))
        for level in ("full", "keep"):
            fitted.budget = budget_of(fitted, level)
            loss = model(x)
            assert set(fitted.last_plan.levels) == {level}
            assert fitted.held_bytes == least if level == "full" else fitted.held_bytes > least
            assert fitted.held_bytes <= fitted.last_plan.bytes
            del loss  # a batch that is skipped
            assert fitted.held_bytes == 0
            assert equal(step(), truth) and fitted.held_bytes == 0
    finally:
        gc.enable()


# --- What is refused, and what goes wrong


@pytest.mark.parametrize(
    "budget, error",
    [
        (0, ValueError),
        (-5, ValueError),
        (True, TypeError),
        (1.5, TypeError),
        ("12 apples", ValueError),
        ("", ValueError),
        ("-3GiB", ValueError),
    ],
)
def test_budgets_that_are_refused(budget, error):
    model = made()
    expected = f"activation_budget: expected a positive number of bytes, got {budget!r}; write"
    with pytest.raises(error, match=expected):
        fit_activations(model, budget)
    assert not hasattr(model.model, "_logitless_states")


def test_models_that_are_refused():
    with pytest.raises(TypeError, match="model: expected a module, got str; pass a model"):
        fit_activations("model", 5)
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    encoder = T5ForConditionalGeneration(T5Config(**small))
    with pytest.raises(ValueError, match="model: expected a decoder, got an encoder-decoder; use gradient"):
        fit_activations(encoder, 5)
    with pytest.raises(ValueError, match="expected a language model, got LlamaForSequenceClassification"):
        fit_activations(LlamaForSequenceClassification(made().config), 5)
    with pytest.raises(ValueError, match="decoder layers that can be checkpointed .* got Linear with"):
        fit_activations(nn.Linear(2, 2), 5)


def test_texts_of_budgets():
    texts = {
        "12GiB": 12 * 2**30,
        "12GB": 12 * 10**9,
        "1.5 gib": 3 * 2**29,
        "77": 77,
        "3kB": 3000,
        "2 MiB": 2**21,
    }
    assert {text: to_bytes("budget", text) for text in texts} == texts
    assert to_bytes("budget", "9007199254740993") == 9007199254740993


def test_a_budget_below_the_inputs():
    model, ids = made("Gemma2"), batch()
    least, _ = ends(model, ids)
    fitted = fit_activations(model, 4 * ids.numel() * SIZES["hidden_size"] * LAYERS)
    with pytest.raises(ValueError, match="activation_budget: expected at least .* 3 layers for 42 tokens"):
        model(input_ids=ids, labels=ids)
    fitted.budget = least - 1  # both masks are known once the first pass is over
    with pytest.raises(ValueError, match=f"expected at least {least:,} bytes, the inputs"):
        model(input_ids=ids, labels=ids)
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    gc.collect()
    fitted.budget = least
    step(model, ids)


@pytest.mark.parametrize(
    "share, name",
    [(0.2, "model.embed_tokens"), (0.5, "model.layers.2.mlp.up_proj"), (1, "model.layers.2.mlp.up_proj")],
)
def test_a_tensor_that_is_changed_in_place(share, name):
    """As in the model without a budget."""
    model, ids = made(), batch()
    _, most = ends(model, ids)
    fit_activations(model, int(share * most))
    step(model, ids)
    seen = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out))
    loss = model(input_ids=ids, labels=ids).loss
    handle.remove()
    with torch.no_grad():
        seen[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_output_that_is_changed_before_it_is_saved_is_kept():
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.mul_(2))

    model, ids = made(), batch()
    for layer in model.model.layers:
        layer.mlp.down_proj = Doubled(layer.mlp.down_proj)
    truth = step(model, ids)
    _, most = ends(model, ids)
    fitted = fit_activations(model, most - 1)
    step(model, ids)
    assert equal(step(model, ids), truth) and fitted.last_plan.levels[0] == "cheap"


def test_a_layer_that_does_something_else_the_second_time():
    model, ids = made(), batch()
    fit_activations(model, PLENTY)
    loss = model(input_ids=ids, labels=ids).loss  # all full
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: x * 1.0
    with pytest.raises(RuntimeError, match="layer: expected .* saved tensor.* when it is recomputed"):
        loss.backward()


def test_out_of_memory_has_a_note(monkeypatch):
    model, ids = made(), batch()
    fitted = fit_activations(model, PLENTY)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    loss = model(input_ids=ids, labels=ids).loss
    held, mlp = fitted.held_bytes, model.model.layers[1].mlp
    monkeypatch.setattr(mlp.down_proj, "forward", full)
    for run in (loss.backward, lambda: model(input_ids=ids, labels=ids)):
        with pytest.raises(torch.OutOfMemoryError, match="no memory") as caught:
            run()
        (note,) = caught.value.__notes__
        assert "3 layers, 42 tokens: " in note and "The layers of all graphs hold" in note and "try" in note
    assert held > 0


def test_compiled_models_are_refused():
    model, ids = made(), batch()
    fit_activations(model, PLENTY)
    with pytest.raises(Exception, match="expected one that runs eagerly"):
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, labels=ids)


# --- The plan


def test_the_ladder_stops_at_the_first_upgrade_that_does_not_fit():
    small, large = {"full": 1, "cheap": 4, "keep": 6}, {"full": 1, "cheap": 50, "keep": 90}
    closed = {"full": 1, "cheap": 7, "keep": 7}
    # The last layer's upgrade does not fit, so that the one before it, which would, is not taken either.
    assert choose_levels([small, large], 2, 20) == (("full", "full"), 4)
    assert choose_levels([small, large], 2, 56) == (("cheap", "cheap"), 56)
    assert choose_levels([small, large], 2, 96) == (("cheap", "keep"), 96)
    assert choose_levels([small, large], 2, 98) == (("keep", "keep"), 98)
    assert choose_levels([closed, small], 0, 8) == (("full", "keep"), 7)
    assert choose_levels([closed, small], 0, 13) == (("keep", "keep"), 13)
    before = ({}, 0)
    for budget in range(4, 200):
        levels, total = choose_levels([small, closed, large, small], 0, budget)
        ranks = {i: ("full", "cheap", "keep").index(level) for i, level in enumerate(levels)}
        assert total <= budget and total >= before[1] and all(ranks[i] >= r for i, r in before[0].items())
        before = ranks, total


def test_counts_of_sizes_that_were_not_seen():
    counts = Counts(frozenset({64, 16}))
    scores, hidden, copy_of_weight = (800, (1, 2, 10, 10)), (640, (1, 10, 16)), (2048, (64, 16))
    counts.add("layer", BatchSize(10, 10), [scores, hidden, copy_of_weight], [(16, 64)])
    assert counts.predict("layer", BatchSize(10, 10)) == 3488
    assert counts.predict("layer", BatchSize(20, 20)) == 4 * 800 + 2 * 640 + 2048
    assert counts.predict("layer", BatchSize(40, 20)) == 8 * 800 + 4 * 640 + 2048
    assert counts.predict("another", BatchSize(10, 10)) is None
    # Where the length is one of the model's sizes, shapes tell nothing: an upper bound.
    counts.add("unsure", BatchSize(32, 16), [(640, (2, 16, 16))], [])
    assert counts.predict("unsure", BatchSize(32, 16)) == counts.predict("unsure", BatchSize(8, 8)) == 640
    assert counts.predict("unsure", BatchSize(64, 32)) == 4 * 640
    # The largest count holds.
    counts.add("layer", BatchSize(10, 10), [hidden], [])
    assert counts.predict("layer", BatchSize(10, 10)) == 3488


def test_adapters_that_are_added_later_are_counted_in_the_next_pass():
    model, ids = made(), batch()
    fitted = counted(model, ids)
    before = fitted.last_plan.bytes
    get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
    model.requires_grad_(True)
    actual = []
    for _ in range(3):
        step(model, ids)
        actual.append((fitted.last_plan.levels, fitted.last_plan.bytes))
    assert actual[0][0] == ("full",) * LAYERS and all(plan == actual[1] for plan in actual[1:])
    assert fitted.held_bytes == 0 and before < actual[1][1]
    # So are layers that are frozen or no longer.
    model.model.layers[0].requires_grad_(False)
    step(model, ids)
    assert fitted.last_plan.levels == ("full",) * LAYERS
    step(model, ids)
    frozen = fitted.last_plan.bytes
    model.model.layers[0].requires_grad_(True)
    fitted()
    assert frozen < actual[1][1] == ends(model, ids)[1]


@pytest.mark.parametrize("level", ["keep", "cheap"])
def test_dropout_that_is_switched_on_later_is_noticed(level, monkeypatch):
    """Modules and parameters stay what they were: the check of one layer finds it."""
    monkeypatch.setattr(activations, "CHECK_EVERY", 1)
    model, ids = made(attention_dropout=0.0, attn_implementation="eager"), batch()
    fitted = counted(model, ids)
    costs, _ = fitted.costs
    fitted.budget = budget_of(fitted, level)
    step(model, ids)
    assert fitted.last_plan.levels == (level,) * LAYERS
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    for _ in range(3):
        step(model, ids)
    actual, _ = fitted.costs
    fitted()
    expected, _ = counted(model, ids).costs
    assert costs[0][level] < actual[0][level] and actual == expected


def test_known_layers_refuse_parameters_that_changed_before_the_backward_pass():
    """As the model without a budget does."""
    model, ids = made(), batch()
    fitted = counted(model, ids)
    fitted.budget = budget_of(fitted, "cheap")
    loss = model(input_ids=ids, labels=ids).loss
    assert fitted.last_plan.levels == ("cheap",) * LAYERS
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_kept_layers_whose_bytes_are_known_run_without_hooks():
    """All their tensors but the first reach the hooks of a caller; some passes count a layer."""
    model, ids, seen = made(), batch(), []

    def tensors_outside() -> int:
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(0) or x.detach(), lambda x: x):
            step(model, ids)
        return len(seen)

    stock = tensors_outside()
    fitted = fit_activations(model, PLENTY)
    actual = [tensors_outside() for _ in range(activations.CHECK_EVERY + 1)]
    assert actual[1:-1] == [stock - LAYERS] * (activations.CHECK_EVERY - 1)
    assert actual[0] < actual[-1] < actual[1]
    # Hooks of a layer that saves nothing, or fails before it has, do not stay either.
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    gc.collect()
    assert fitted.held_bytes == 0
    del norm.forward
    model.requires_grad_(False)
    model(input_ids=ids)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None and fitted.held_bytes == 0


def test_layers_are_found_under_every_wrapper():
    names = [name for name, x in made().model.named_modules() if isinstance(x, GradientCheckpointingLayer)]
    assert list(fit_activations(made(), 5).report) == names
    assert list(fit_activations(made(lora=0.0), 5).report) == names
    assert list(fit_activations(made().model, 5).report) == names
    small = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    assert list(fit_activations(GPT2LMHeadModel(GPT2Config(**small)), 5).report) == ["h.0", "h.1"]
