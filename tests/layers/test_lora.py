"""Fused LoRA layers: results and gradients are PEFT's, and what PEFT's own code computes is left to it."""

import copy
import functools
import importlib.util
import math
import pickle
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.exchange import exchange
from logitless.layers import lora
from logitless.models import fit_activations, fuse_layers, patch_model
from tests.layers.tiny import IDS, assert_same, step, tiny

peft = pytest.importorskip("peft")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ALL = "all-linear"
Q = "model.layers.0.self_attn.q_proj"


def adapted(model: nn.Module, name: str = "default", **options: object) -> nn.Module:
    """The model with LoRA adapters whose B is not zero, or the gradients of A would be."""
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ALL, "init_lora_weights": False} | options)
    return peft.get_peft_model(model, config, adapter_name=name)


def layer_of(model: nn.Module, name: str = Q) -> nn.Module:
    return model.get_base_model().get_submodule(name)


class Block(nn.Module):
    """Two projections of one input."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40, bias=bias)
        self.second = nn.Linear(24, 16, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def block(*, bias: bool = False, dtype: torch.dtype = FP32, adapters: torch.dtype = FP32, **options: object):
    torch.manual_seed(0)
    model = adapted(Block(bias), target_modules=["first", "second"], **options)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(adapters if "lora_" in name else dtype)
    return model


def outcome(model: nn.Module, dtype: torch.dtype = FP32, seed: int = 5) -> dict[str, Tensor]:
    """Results and gradients for random inputs that bf16 holds; inputs and masks depend on the seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(dtype)

    x = random(3, 7, 24).requires_grad_()
    torch.manual_seed(seed)
    results = model(x)
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(results, [random(*y.shape).to(y.dtype) for y in results])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"first": results[0], "second": results[1], "x": x.grad} | gradients


def assert_equal_outcomes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and value.norm() > 0, name
        distance = (actual[name] - value).norm() / value.norm()
        assert distance <= 1e-6, f"{name}: {distance:.1e}"


def errors(actual: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    return {name: ((actual[name].double() - t).norm() / t.norm()).item() for name, t in truth.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"r": 1},
        {"r": 64, "lora_alpha": 16, "bias": True},
        {"use_rslora": True},
        {"rank_pattern": {"first": 3}, "alpha_pattern": {"second": 7}},
        {"lora_dropout": 0.3, "bias": True},
    ],
    ids=["r 1", "r 64 and biases", "rslora", "patterns", "dropout"],
)
def test_results_and_gradients_in_fp32_are_those_of_peft(options):
    options = dict(options)
    model = block(bias=options.pop("bias", False), **options)
    expected = outcome(model)
    report = fuse_layers(model).report
    assert list(report.fused.values()) == [("LoRA",), ("LoRA",), ("first, second of one input",)]
    assert_equal_outcomes(outcome(model), expected)
    model.eval()
    fused = outcome(model)
    assert options.get("lora_dropout") is None or not torch.equal(fused["first"], expected["first"])
    assert not report.stock_calls


@pytest.mark.parametrize("p", [0, 0.25], ids=["", "dropout"])
@pytest.mark.parametrize(
    "base, adapters, x, autocast",
    [
        (BF16, FP32, BF16, True),
        (FP32, FP32, FP32, True),
        (FP32, FP32, BF16, True),
        (BF16, BF16, BF16, True),
        (BF16, BF16, BF16, False),
    ],
    ids=["TRL", "all fp32", "fp32 base", "bf16", "bf16 without autocast"],
)
def test_the_error_in_bf16_is_at_most_that_of_peft(base, adapters, x, autocast, p):
    model = block(bias=True, dtype=base, adapters=adapters, lora_dropout=p, r=8)
    for parameter in model.parameters():  # what bf16 holds, so that the truth has the same numbers
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)
    truths = [outcome(copy.deepcopy(model).double(), FP64, seed) for seed in range(4)]
    with torch.autocast("cpu", BF16, enabled=autocast):
        actual = {"PEFT": [outcome(model, x, seed) for seed in range(4)]}
        report = fuse_layers(model).report
        actual["fused"] = [outcome(model, x, seed) for seed in range(4)]
    assert not report.stock_calls
    for name in truths[0]:
        assert actual["fused"][0][name].dtype == actual["PEFT"][0][name].dtype, name
    pairs = {who: [errors(a, t) for a, t in zip(actual[who], truths)] for who in actual}
    mean = {who: {n: sum(e[n] for e in many) / 4 for n in truths[0]} for who, many in pairs.items()}
    ratios = {name: mean["fused"][name] / mean["PEFT"][name] for name in truths[0]}
    assert min(mean["PEFT"].values()) > 1e-4
    assert max(ratios.values()) < 1.1, ratios
    assert math.prod(ratios.values()) ** (1 / len(ratios)) <= 1.0, ratios


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "r": 16},
        {"modules_to_save": ["lm_head"], "use_rslora": True},
        {"lora_dropout": 0.2, "rank_pattern": {"q_proj": 2}},
    ],
    ids=["all linear layers", "some", "head and embeddings", "a head that is saved", "dropout"],
)
def test_losses_and_gradients_of_a_model_are_those_of_peft(options):
    stock, model = (adapted(tiny("Qwen2"), **options) for _ in range(2))
    fused = fuse_layers(model)
    projections = [name for name, what in fused.report.fused.items() if what == ("LoRA",)]
    assert len(projections) == sum(type(m) is peft.tuners.lora.Linear for m in stock.modules()) > 2
    for each in (stock, model):
        torch.manual_seed(3)
        each.result = step(each)
    assert_same(model.result, stock.result)
    assert not fused.report.stock_calls


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_masks_again(reentrant):
    model = adapted(tiny("Qwen3"), lora_dropout=0.3)
    model.enable_input_require_grads()
    torch.manual_seed(3)
    expected = step(model)
    fuse_layers(model)
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(3)
    assert_same(step(model), expected)


def test_what_is_done_with_adapters_after_fusing():
    model = adapted(tiny("Llama"), target_modules=["q_proj", "down_proj"])
    stock = copy.deepcopy(model)
    report = fuse_layers(model).report
    wanted = step(stock)

    def check(reason: str | None, **kwargs: object) -> None:
        report.stock_calls.clear()
        with torch.no_grad():
            actual, expected = (each(IDS, use_cache=False, **kwargs).logits for each in (model, stock))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        assert dict(report.stock_calls) == ({} if reason is None else {reason: 4})

    check(None)
    with model.disable_adapter(), stock.disable_adapter():
        check("adapters are disabled")
    for each in (model, stock):
        torch.manual_seed(7)
        config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], use_rslora=True)
        each.add_adapter("other", config)
        for name, parameter in each.named_parameters():
            if "other" in name:
                parameter.data.normal_(std=0.2)
    check(None)
    for each in (model, stock):
        each.base_model.set_adapter(["default", "other"])
    check("several adapters are active")
    for each in (model, stock):
        each.set_adapter("other")
    check(None)
    assert_same(step(model), step(stock))
    for each in (model, stock):
        each.eval()
    names = ["default", "other"]
    check("it is called with other arguments than x", adapter_names=names)
    for each in (model, stock):
        each.merge_adapter()
    check("adapters are merged")
    for each in (model, stock):
        each.unmerge_adapter()
        each.set_adapter("default")
        each.train()
    check(None)
    assert_same(step(model), wanted, 1e-5)
    for each in (model, stock):
        each.delete_adapter("other")
    check(None)
    merged, expected = model.merge_and_unload(), stock.merge_and_unload()
    torch.testing.assert_close(merged(IDS).logits, expected(IDS).logits)


def test_a_reason_is_logged_once(caplog):
    model = block()
    fuse_layers(model)
    with model.disable_adapter(), caplog.at_level("INFO", logger="logitless"):
        model(torch.ones(2, 24))
        model(torch.ones(2, 24))
    assert [r.getMessage() for r in caplog.records] == [
        "LoRA layers run PEFT's own forward pass where adapters are disabled"
    ]


def test_the_report_counts_calls_of_pefts_forward_pass():
    model = block()
    fused = fuse_layers(model)
    assert str(fused.report).startswith(
        "fused:\n  2 x Linear: LoRA\n  1 x Block: first, second of one input\nnot fused: none"
    )
    with model.disable_adapter():
        model(torch.ones(2, 24))
    assert str(fused.report).endswith("PEFT's own forward pass:\n  2 x adapters are disabled")


HOOKS = "a layer of the projection has hooks or a forward attribute"
CHANGES = {
    "base": (lambda m: m.base_layer.register_forward_hook(lambda *args: args[2] * 2), HOOKS),
    "A": (lambda m: m.lora_A.default.register_forward_pre_hook(lambda m, args: (args[0] * 2,)), HOOKS),
    "B": (lambda m: m.lora_B.default.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)), HOOKS),
    "dropout": (lambda m: m.lora_dropout.default.register_forward_hook(lambda *args: args[2] * 2), HOOKS),
    "forward": (lambda m: setattr(m.base_layer, "forward", lambda x: x @ torch.ones(24, 40)), HOOKS),
    "trained": (lambda m: m.base_layer.requires_grad_(True), "the base layer is trained"),
    "another dropout": (
        lambda m: m.lora_dropout.update({"default": nn.AlphaDropout(0.1)}),
        "the dropout is AlphaDropout",
    ),
    "scale": (lambda m: m.scaling.update(default=torch.tensor(0.3)), "the adapter is not plain LoRA"),
    "dtype": (lambda m: m.lora_A.double() and m.lora_B.double(), "several dtypes, without autocast"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_part_run_pefts_code(name):
    change, reason = CHANGES[name]
    model, stock = block(), block()
    plain = outcome(model)
    report = fuse_layers(model).report
    for each in (model, stock):
        change(each.get_base_model().first)
    actual, expected = outcome(model), outcome(stock)
    assert_equal_outcomes(actual, expected)
    assert [reason in known for known in report.stock_calls] == [True] and report.stock_calls.total() == 1
    assert actual.keys() != plain.keys() or any(
        actual[key].dtype != plain[key].dtype or not torch.allclose(actual[key], plain[key]) for key in plain
    )


def replaced(layer: nn.Module, name: str, how: str) -> None:
    """Replace a parameter by another, a buffer, or an attribute as FSDP1 does, with other values."""
    value = 2 * getattr(layer, name).detach()
    if how == "parameter":
        setattr(layer, name, nn.Parameter(value, requires_grad=getattr(layer, name).requires_grad))
        return
    delattr(layer, name)
    if how == "buffer":
        layer.register_buffer(name, value)
    else:
        setattr(layer, name, value)


@pytest.mark.parametrize("how", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("part", ["base_layer", "lora_A.default", "lora_B.default"])
def test_a_parameter_that_was_replaced_is_used(part, how):
    model, stock = block(bias=True), block(bias=True)
    report = fuse_layers(model).report
    before = outcome(model)
    for each in (model, stock):
        layer = each.get_base_model().first.get_submodule(part)
        replaced(layer, "weight", how)
        if layer.bias is not None:
            replaced(layer, "bias", how)
    actual = outcome(model)
    assert_equal_outcomes(actual, outcome(stock))
    assert not report.stock_calls and not torch.equal(actual["first"], before["first"])


def test_a_base_weight_that_changes_before_the_backward_pass_is_an_error():
    model = block()
    fuse_layers(model)
    first, second = model(torch.randn(3, 24, requires_grad=True))
    with torch.no_grad():
        layer_of(model, "first").base_layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation: .*LoRA"):
        (first.sum() + second.sum()).backward()


def test_inference_tensors():
    with torch.inference_mode():
        model = block(bias=True)
        x = torch.randn(3, 24)
        expected = model(x)
        report = fuse_layers(model).report
        torch.testing.assert_close(model(x), expected)
    assert not report.stock_calls


def test_hooks_on_a_fused_layer_run():
    model, seen = block(), []
    fuse_layers(model)
    expected = outcome(model)
    model.get_base_model().first.register_forward_hook(lambda m, args, y: seen.append(len(args)) or y * 2)
    actual = outcome(model)
    assert seen == [1] and torch.equal(actual["first"], 2 * expected["first"])


def test_a_forward_pass_that_replaces_pefts_is_run(monkeypatch):
    model = block()
    report = fuse_layers(model).report
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda self, x: self.base_layer(x) + 1)
    actual, base = model(torch.ones(2, 24)), model.get_base_model().first.base_layer(torch.ones(2, 24)) + 1
    assert torch.equal(actual[0], base) and dict(report.stock_calls) == {
        "PEFT's forward pass was replaced": 2
    }
    other = block()
    with pytest.raises(ValueError, match="2 Linear: its results differ from those of plain LoRA"):
        fuse_layers(other)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"use_dora": True}, "its adapter is DoraLinearVariant"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "its adapter has a bias"),
        ({"target_modules": ["embed_tokens"]}, "it is peft.tuners.lora.layer.Embedding"),
    ],
    ids=["DoRA", "bias", "embedding"],
)
def test_what_is_left_to_peft_is_reported(options, reason):
    model = adapted(tiny("Qwen2"), **options)
    expected = step(model)
    report = fuse_layers(model).report
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert names and {report.skipped.pop(name) for name in names} == {reason} and not report.skipped
    assert not any(name in report.fused for name in names)
    assert_same(step(model), expected)


def test_a_decorated_forward_pass_is_left_to_peft(monkeypatch):
    stock, calls = peft.tuners.lora.Linear.forward, []

    @functools.wraps(stock)
    def counting(self, *args, **kwargs):
        calls.append(self)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", counting)
    model = adapted(Block(), target_modules=["first", "second"])
    with pytest.raises(ValueError, match=f"its forward pass is wrapped by counting of {__name__}"):
        fuse_layers(model)
    assert not calls


def test_another_base_layer_is_left_to_peft():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layers = nn.ModuleDict({"first": Conv1D(8, 6), "second": nn.Linear(6, 8)})
    model = adapted(layers, target_modules=["first", "second"])
    report = fuse_layers(model).report
    assert report.skipped == {"base_model.model.first": "its base layer is Conv1D"}
    assert list(report.fused) == ["base_model.model.second"]


def test_a_projection_that_is_not_used_has_no_gradient():
    """AdamW would decay its weights if it had a gradient of zeros."""
    model = block()
    fuse_layers(model)
    model(torch.randn(3, 24))[1].sum().backward()
    with_gradient = {name.split(".")[2] for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {"second"}


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_a_frozen_matrix_has_no_gradient(frozen):
    model = block()
    for name, parameter in model.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)
    expected = outcome(model)
    fuse_layers(model)
    assert_equal_outcomes(outcome(model), expected)
    assert not any(frozen in name for name in expected)
    x = torch.randn(500, 24, dtype=BF16)
    # x is saved for the gradient of A alone.
    assert (cost(model, x)[1] < x.nbytes) == (frozen == "lora_A")


def test_a_result_can_be_changed_in_place():
    model = block()
    fuse_layers(model)
    first, _ = model(torch.randn(3, 24))
    first.mul_(2).sum().backward()
    assert layer_of(model, "first").lora_A.default.weight.grad.norm() > 0


@pytest.mark.parametrize("p", [0, 0.1], ids=["", "dropout"])
def test_a_checkpoint_does_not_compute_its_last_projection_again(p, monkeypatch):
    """As with nn.Linear: the recomputation ends with the last saved tensor, and the result is not saved."""
    model = block(lora_dropout=p)
    fuse_layers(model)
    layer = layer_of(model, "first")
    writes = []
    write = lora._write_results
    monkeypatch.setattr(lora, "_write_results", lambda *operands: writes.append(write(*operands)))
    found = []
    for forward in (layer, functools.partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False)):
        x = torch.ones(3, 24, requires_grad=True)
        model.zero_grad(set_to_none=True)
        writes.clear()
        torch.manual_seed(0)
        y = forward(x)
        y.square().sum().backward()
        assert len(writes) == 1
        found.append([y, x.grad, layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad])
    for actual, expected in zip(found[1], found[0], strict=True):
        assert torch.equal(actual, expected) and expected.norm() > 0


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # Views and new tensors move nothing.
        self.count += not (function.is_view or "empty" in str(function))
        return function(*args, **(kwargs or {}))


def cost(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """(operators of forward and backward pass, saved bytes that are no parameters)."""
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    saved = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = tensor, storage.nbytes()
        return tensor

    with Counted() as counted, torch.autocast("cpu", BF16):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = model(x)
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    return counted.count, sum(nbytes for _, nbytes in saved.values())


@pytest.mark.parametrize("p", [0, 0.1], ids=["", "dropout"])
def test_fewer_operators_and_saved_bytes_than_pefts(p):
    model = block(dtype=BF16, lora_dropout=p)
    x = torch.randn(500, 24, dtype=BF16, requires_grad=True)
    stock_count, stock_bytes = cost(model, x)
    fuse_layers(model)
    cost(model, x)
    count, nbytes = cost(model, x)
    assert count < 0.75 * stock_count, (count, stock_count)
    # x once for both projections, h, and a byte a number for the mask.
    assert nbytes < x.nbytes + 2 * (500 * 4 * 2 + 2 * 4 * 40 * 2 + (p > 0) * x.numel()) < stock_bytes


def test_undone_layers_are_those_of_peft_to_the_bit():
    model, stock = adapted(tiny("Llama")), adapted(tiny("Llama"))
    fuse_layers(model)()
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    actual, expected = step(model), step(stock)
    assert all(torch.equal(actual.gradients[name], expected.gradients[name]) for name in expected.gradients)
    with pytest.raises(ValueError, match="expected one that is not fused"):
        fuse_layers(model)
        fuse_layers(model)


def test_copies_and_files(tmp_path):
    model = block()
    expected = outcome(model)
    fused = fuse_layers(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        layer_of(copied, "first").lora_B.default.weight.zero_()
    assert_equal_outcomes(outcome(model), expected)
    with copied.disable_adapter():
        copied(torch.ones(2, 24))
    assert not fused.report.stock_calls
    layer = pickle.loads(pickle.dumps(layer_of(model, "first")))
    assert type(layer) is peft.tuners.lora.Linear
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    restored = peft.PeftModel.from_pretrained(Block(), tmp_path, is_trainable=True)
    assert_equal_outcomes(outcome(restored), expected)


def test_a_compiled_layer_is_pefts_in_one_graph():
    model = block()
    wanted = outcome(model)
    report = fuse_layers(model).report
    compiled = torch.compile(model.get_base_model(), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 24)
    for actual, expected in zip(compiled(x), model(x)):
        torch.testing.assert_close(actual, expected)
    assert not report.stock_calls
    assert_equal_outcomes(outcome(model), wanted)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_under_an_activation_budget_x_is_recomputed(autocast):
    """At the level "cheap", the inputs of projections are outputs of fused operators, or copies of them."""
    costs = {}
    for is_fused in (False, True):
        model = tiny("Qwen3", num_hidden_layers=3)
        if not is_fused:
            fuse_layers(model)
        model = adapted(model).train()
        if is_fused:
            fuse_layers(model)
        with torch.autocast("cpu", BF16, enabled=autocast):
            expected = step(model)
            fitted = fit_activations(model, "1GiB")
            step(model)
            step(model)
            assert_same(step(model), expected, 1e-12)
        costs[is_fused] = fitted.costs[0][0]
    # Without autocast, the A of a group are copied into one matrix.
    limit = 0.6 if autocast else 1.2
    assert costs[True]["cheap"] <= limit * costs[False]["cheap"] < costs[False]["keep"]


def test_the_probe_of_a_patched_loss_is_not_counted(caplog):
    """It runs without the autocast that steps have."""
    model = adapted(tiny("Qwen2", BF16))
    assert layer_of(model).lora_A.default.weight.dtype == FP32
    report = fuse_layers(model).report
    with caplog.at_level("INFO", logger="logitless.layers"):
        patch_model(model)
        with torch.autocast("cpu", BF16):
            step(model)
    assert not report.stock_calls and not caplog.records
    step(model)
    assert list(report.stock_calls) == ["input, weights and adapters have several dtypes, without autocast"]


def test_beside_a_patched_loss():
    model = adapted(tiny("Qwen2"), target_modules=["q_proj", "lm_head"])
    expected = step(model)
    fused = fuse_layers(model)
    patch_model(model)
    assert_same(step(model), expected, 1e-5)
    assert not fused.report.stock_calls


@contextmanager
def memory_filled_with_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", [{}, {"alpha_pattern": {"second": 7}}, {"lora_dropout": 0.3}], ids=str)
def test_projections_of_one_input_in_one_operator(options):
    model = block(bias=True, rank_pattern={"second": 3}, **options)
    layers = [layer_of(model, name) for name in ("first", "second")]
    expected = outcome(model)
    model.forward = lambda x: lora.apply_projections(x, [lora.read_projection(layer, x) for layer in layers])
    assert_equal_outcomes(outcome(model), expected)
    # AdamW would decay the weights of a projection that is not used if it had a gradient of zeros.
    for used, name in enumerate(("first", "second")):
        model.zero_grad(set_to_none=True)
        x = torch.randn(3, 24, requires_grad=True)
        with memory_filled_with_nan():
            model.forward(x)[used].sum().backward()
        with_gradient = {n.split(".")[2] for n, p in model.named_parameters() if p.grad is not None}
        assert with_gradient == {name} and x.grad.norm() > 0 and x.grad.isfinite().all()


BOTH = ("first, second of one input",)
GROUPED: dict[type[nn.Module], tuple[str, ...]] = {}  # module -> groups in its forward pass


def groups(*what: str):
    """Add a class to `GROUPED`."""

    def add(cls):
        GROUPED[cls] = what
        return cls

    return add


class Projections(nn.Module):
    """Layers of one size, so that a forward pass can use any of them for anything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(24, 24) for _ in range(4))
        self.is_second_used = True


@groups("first, second, third of one input")
class Attention(Projections):
    def forward(self, x, y):
        shape = (*x.shape[:-1], 2, -1)
        q = self.first(x).view(shape).transpose(1, 2)
        k = self.second(x).view(*x.shape[:-1], 2, -1).transpose(1, 2)
        y = y.view(shape)
        v = self.third(x).view(shape).transpose(1, 2)
        return self.fourth((q + k * v).transpose(1, 2).flatten(2)) + y.flatten(2)


@groups(*BOTH)
class MLP(Projections):
    def forward(self, x, y):
        x = self.third(nn.functional.silu(self.first(x)) * self.second(x))
        return self.fourth(x) * y


@groups(*BOTH)
class OneReturn(Projections):
    def forward(self, x, y):
        return self.third(self.first(x) * torch.add(self.second(x), other=y))


@groups("first, third of one input", "second, fourth of one input")
class TwoInputs(Projections):
    def forward(self, x, y):
        a, b = self.first(x), self.second(y)
        c, d = self.third(x), self.fourth(y)
        return a * b + c * d


@groups(*BOTH)
class Loop(Projections):
    def forward(self, x, y):
        for layer in (self.third, self.fourth):
            a = self.first(x)
            x = self.second(x) * a
            y = layer(y)
        return x * y


@groups(*BOTH)
class Unused(Projections):
    def forward(self, x, y):
        a = self.first(x)
        b = self.second(x)  # noqa: F841
        return a * y


@groups(*BOTH)
class Twice(Projections):
    def forward(self, x, y):
        a = self.first(x)
        b = self.second(x)
        c = self.second(x)
        return a * b * c + y


@groups()
class AssignedBetween(Projections):
    def forward(self, x, y):
        a = self.first(x)
        x = x * y
        return a + self.second(x)


@groups()
class AssignedByTheFirst(Projections):
    def forward(self, x, y):
        x = self.first(x)
        y = self.second(x) * y
        return x + y


@groups()
class ChangedBetween(Projections):
    def forward(self, x, y):
        x = x * 1
        view = x.view(-1)
        with torch.no_grad():
            a = self.first(x)
            b = view.mul_(2)
            c = self.second(x)
        return a * c * y + b.view(x.shape) + self.third(y)


@groups()
class ChangedByAnItem(Projections):
    def forward(self, x, y):
        x = x * 1
        with torch.no_grad():
            a = self.first(x)
            x[0] = 2
            b = self.second(x)
        return self.third(y) * a + b + x


@groups()
class PassedOn(Projections):
    def double(self, x):
        return x.mul_(2)

    def forward(self, x, y):
        x = x * 1
        with torch.no_grad():
            a = self.first(x)
            b = self.double(x)
            c = self.second(x)
        return self.third(y) * a + b + c + x


@groups()
class EarlyReturn(Projections):
    def forward(self, x, y):
        a = self.first(x)
        if a.numel():
            return a * y
        return a + self.second(x)


@groups()
class Condition(Projections):
    def forward(self, x, y):
        a = self.first(x)
        b = a if x is not None else self.second(x)
        c = x is None and self.third(x)
        return a * b + y + c


@groups()
class Lazy(Projections):
    def forward(self, x, y):
        a = self.first(x)
        second = lambda: self.second(x)  # noqa: E731
        d = [self.third(x) for _ in range(2)]
        return a * y + d[1] if x.numel() else second()


@groups()
class GradientModeBetween(Projections):
    def forward(self, x, y):
        a = self.first(x)
        torch.set_grad_enabled(False)
        b = self.second(x)
        torch.set_grad_enabled(True)
        return a * b + y


def projected(cls: type[nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(0)
    names = ["first", "second", "third", "fourth"]
    return adapted(cls(), target_modules=names, **options)


def two_inputs(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Result, and gradients of all that has one."""
    generator = torch.Generator().manual_seed(2)
    x, y, z = (torch.randn(2, 3, 24, generator=generator) for _ in range(3))
    x, y = x.requires_grad_(), y.requires_grad_()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    result = model(x, y)
    result.backward(z)
    named = {"x": x, "y": y} | dict(model.named_parameters())
    return result.detach(), {name: each.grad for name, each in named.items() if each.grad is not None}


@pytest.mark.parametrize("cls", GROUPED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("p", [0, 0.3], ids=["", "dropout"])
def test_projections_are_grouped_where_nothing_else_changes(cls, p, monkeypatch):
    sizes = []
    project = lora.apply_projections
    monkeypatch.setattr(
        lora, "apply_projections", lambda x, layers: sizes.append(len(layers)) or project(x, layers)
    )
    model = projected(cls, lora_dropout=p)
    expected, gradients = two_inputs(model)
    fused = fuse_layers(model)
    assert fused.report.fused.get("base_model.model", ()) == GROUPED[cls]
    actual = two_inputs(model)
    assert sorted(n for n in set(sizes) if n > 1) == sorted({g.count(",") + 1 for g in GROUPED[cls]})
    assert actual[1].keys() == gradients.keys()
    if p == 0 or cls is not TwoInputs:  # whose masks are drawn in another order
        torch.testing.assert_close(actual, (expected, gradients))
    # The rewritten code without results of a group.
    model.get_base_model().first.register_forward_hook(lambda *args: None)
    model.get_base_model().second.register_forward_hook(lambda *args: None)
    sizes.clear()
    torch.testing.assert_close(two_inputs(model), (expected, gradients))
    assert set(sizes) == {1}
    fused()
    again, same = two_inputs(model)
    assert torch.equal(again, expected) and all(
        torch.equal(same[name], gradients[name]) for name in gradients
    )


def test_a_member_of_a_group_that_would_run_other_code_runs_it(monkeypatch):
    model, calls = projected(Attention), []
    first = model.get_base_model().first
    fused = fuse_layers(model)
    expected, _ = two_inputs(model)
    handles = [layer.register_forward_hook(lambda m, args, y: calls.append(m)) for layer in (first,)]
    assert torch.allclose(two_inputs(model)[0], expected, atol=1e-5) and calls == [first]
    handles[0].remove()
    first.forward = lambda x: torch.zeros_like(x)
    zero = two_inputs(model)[0]
    assert not torch.allclose(zero, expected)
    del first.forward
    undo = exchange(first, "other", lambda module, state, original, x: 0 * original(x), None)
    assert torch.allclose(two_inputs(model)[0], zero, atol=1e-6)
    undo()
    with model.disable_adapter():
        base = two_inputs(model.get_base_model())[0]
    assert dict(fused.report.stock_calls) == {"adapters are disabled": 4}
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda self, x: self.base_layer(x))
    assert torch.allclose(two_inputs(model)[0], base, atol=1e-6)


def test_results_of_a_group_are_released_as_those_of_single_layers():
    class Watching(Projections):
        def forward(self, x, y):
            a = self.first(x)
            b = self.second(x)
            references = [weakref.ref(a), weakref.ref(b)]
            a = b = None
            self.alive = [reference() is not None for reference in references]
            return x * y

    model = projected(Watching)
    assert fuse_layers(model).report.fused["base_model.model"] == BOTH
    with torch.no_grad():
        model(torch.ones(2, 24), torch.ones(2, 24))
    assert model.get_base_model().alive == [False, False]


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_groups_of_a_model(family):
    stock, model = adapted(tiny(family), lora_dropout=0.1), adapted(tiny(family), lora_dropout=0.1)
    fused = fuse_layers(model)
    parts = {part for parts in fused.report.fused.values() for part in parts if "of one input" in part}
    assert parts == {"q_proj, k_proj, v_proj of one input", "gate_proj, up_proj of one input"}
    for each in (stock, model):
        torch.manual_seed(3)
        each.result = step(each)
    assert_same(model.result, stock.result, 1e-5)
    assert not fused.report.stock_calls


class Params4bit(nn.Parameter):
    """Stands in for that of bitsandbytes: one byte for two numbers from -8 to 7, and a scale."""

    __module__ = "bitsandbytes.nn.modules"

    def __new__(cls, weight: Tensor):
        scale = weight.abs().max() / 7
        numbers = (weight / scale).round().to(torch.int16).flatten() + 8
        packed = (numbers[::2] * 16 + numbers[1::2]).to(torch.uint8)
        self = torch.Tensor._make_subclass(cls, packed, False)
        self.quant_state = SimpleNamespace(shape=weight.shape, scale=scale, dtype=weight.dtype)
        return self


def dequantize_4bit(packed: Tensor, quant_state: SimpleNamespace) -> Tensor:
    packed = packed.detach().as_subclass(Tensor).to(torch.int16)
    numbers = torch.stack([packed // 16, packed % 16], -1) - 8
    return (numbers.view(quant_state.shape) * quant_state.scale).to(quant_state.dtype)


class Linear4bit(nn.Linear):
    """Stands in for that of bitsandbytes."""

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, weight: Tensor) -> None:
        super().__init__(*weight.shape[::-1], bias=False, device="meta")
        self.weight = Params4bit(weight)
        self.compute_dtype, self.compute_type_is_set = BF16, True

    def forward(self, x: Tensor) -> Tensor:
        weight = dequantize_4bit(self.weight, self.weight.quant_state).to(self.compute_dtype)
        return nn.functional.linear(x.to(self.compute_dtype), weight).to(x.dtype)


@pytest.fixture
def peft_4bit(monkeypatch) -> type[nn.Module]:
    """PEFT's class of 4-bit LoRA layers, which it defines only beside bitsandbytes."""
    stub = ModuleType("bitsandbytes")
    stub.functional = SimpleNamespace(dequantize_4bit=dequantize_4bit)
    stub.nn = SimpleNamespace(Linear4bit=Linear4bit)
    monkeypatch.setitem(sys.modules, "bitsandbytes", stub)
    for name in ("is_bnb_available", "is_bnb_4bit_available"):
        monkeypatch.setattr(peft.import_utils, name, lambda: True)
    spec = importlib.util.find_spec("peft.tuners.lora.bnb")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Linear4bit


def test_a_base_in_4_bits(peft_4bit):
    class Block4bit(nn.Module):
        def forward(self, x):
            return self.first(x), self.second(x)

    torch.manual_seed(0)
    model = Block4bit()
    for name, size in (("first", 40), ("second", 16)):
        config = peft.LoraConfig(r=4, init_lora_weights=False)
        layer = peft_4bit(Linear4bit(torch.randn(size, 24, dtype=BF16)), "default", config=config, r=4)
        layer.update_layer("default", 4, lora_alpha=8, config=config)
        setattr(model, name, layer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.train()
    with torch.autocast("cpu", BF16):
        expected = outcome(model, BF16)
        stock_cost = cost(model, torch.randn(500, 24, dtype=BF16))
        fused = fuse_layers(model)
        actual = outcome(model, BF16)
        assert actual.keys() == expected.keys() and len(expected) == 7
        assert max(errors(actual, {name: x.double() for name, x in expected.items()}).values()) < 1e-2
        count, saved = cost(model, torch.randn(500, 24, dtype=BF16))
    assert list(fused.report.fused.values()) == [("LoRA",), ("LoRA",), BOTH] and not fused.report.stock_calls
    # No matrix in bf16 is kept.
    assert count < stock_cost[0] and saved < stock_cost[1] and saved < 500 * 24 * 2 + 2 * 500 * 4 * 2 + 2000
    for x, reason in (
        (torch.randn(3, 24), "the 4-bit base layer computes in another dtype"),
        (torch.randn(3, 24, dtype=BF16), "input, weights and adapters have several dtypes, without autocast"),
    ):
        fused.report.stock_calls.clear()
        results = model(x)
        assert dict(fused.report.stock_calls) == {reason: 2}
        fused()
        assert all(torch.equal(y, z) for y, z in zip(results, model(x)))
        fused = fuse_layers(model)


class WithoutGradient(torch.autograd.Function):
    """The identity, whose backward pass returns no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, d_x: Tensor) -> None:
        return None


@pytest.mark.parametrize("n", [1, 2])
def test_no_result_gets_a_gradient(n):
    """As for `nn.Linear`, there is no gradient of x, A and B."""
    x, a, b = (torch.randn(*shape).requires_grad_() for shape in ((5, 24), (4, 24), (16, 4)))
    members = [lora.LoraProjection(torch.randn(16, 24), None, a, b, 0.5, 0.0) for _ in range(n)]
    sum(WithoutGradient.apply(y).sum() for y in lora.apply_projections(x, members)).backward()
    assert x.grad is None
    assert a.grad is None
    assert b.grad is None
