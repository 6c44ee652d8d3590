"""Models and modules with a gated RMSNorm: what is recognized and fused, and when their own code runs."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN, GELUActivation, SiLUActivation
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from logitless.exchange import state_of
from logitless.layers.bodies import norm_of
from logitless.layers.fused_forwards import KEY
from logitless.layers.source import UnrecognizedSource
from logitless.models import fuse_layers
from tests.layers.tiny import assert_same, counted, disturb, error, step
from tests.models import every

MODELS = ("Qwen3_5ForCausalLM", "BambaForCausalLM", "Mamba2ForCausalLM", "KimiLinearForCausalLM")


def tiny(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = every.tiny(name)
    disturb(model)
    return model.to(dtype)


def gated_norms(model: nn.Module) -> list[str]:
    return [name for name, x in model.named_modules() if "RMSNormGated" in type(x).__name__]


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has none")
    model, stock = tiny(name), tiny(name)
    expected, norms = step(stock), gated_norms(model)
    undo = fuse_layers(model)
    assert norms and all(undo.report.fused[norm] == ("gated norm",) for norm in norms)
    with counted() as calls:
        assert_same(step(model), expected, 1e-5)
    assert calls["gated_rms_norm"] == len(norms)
    undo()
    actual = step(model)
    assert all(torch.equal(actual.gradients[name], x) for name, x in expected.gradients.items())


def test_the_error_of_models_in_bf16_is_that_of_the_stock_models():
    ratios = {}
    for name in ("Qwen3_5ForCausalLM", "BambaForCausalLM", "Mamba2ForCausalLM"):
        model = tiny(name, torch.bfloat16)
        truth = step(copy.deepcopy(model).double())
        stock = error(step(model), truth)
        fuse_layers(model)
        ratios[name] = error(step(model), truth) / stock
    assert max(ratios.values()) < 1.1, ratios


def test_copies_and_files_of_a_model():
    model = tiny("Mamba2ForCausalLM")
    expected = step(model)
    fuse_layers(model)
    with counted() as calls:
        assert_same(step(copy.deepcopy(model)), expected)
    assert calls["gated_rms_norm"] == 2
    restored = pickle.loads(pickle.dumps(model))
    assert not any(state_of(module, KEY) for module in restored.modules())
    assert_same(step(restored), expected)


def fused(module: nn.Module) -> nn.Module:
    fuse_layers(nn.Sequential(module))
    return module


def test_what_the_operator_does_not_compute_runs_the_modules_code():
    x, gate = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    stock, norm = Zamba2RMSNormGated(32, 16), fused(Zamba2RMSNormGated(32, 16))
    with counted() as calls:
        torch.testing.assert_close(norm(x), stock(x))
        torch.testing.assert_close(norm(x, gate[:1]), stock(x, gate[:1]))
        torch.testing.assert_close(norm(x, gate=gate), stock(x, gate))
        torch.testing.assert_close(norm(x.double(), gate), stock(x.double(), gate))
        compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, gate), stock(x, gate))
        norm.group_size = stock.group_size = 8
        torch.testing.assert_close(norm(x, gate), stock(x, gate))
        assert not calls
        norm.group_size = stock.group_size = 16
        torch.testing.assert_close(norm(x, gate), stock(x, gate))
    assert calls == {"gated_rms_norm": 1}


def test_hooks_and_the_addition_before_a_norm_whose_gate_is_left_out():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first = Zamba2RMSNormGated(32, 32), Qwen3_5RMSNormGated(32)

        def forward(self, residual, x):
            residual = residual + x
            x = self.norm(residual)
            return self.first(x, residual)

    block, x = Block(), torch.randn(2, 3, 32)
    block.first.register_forward_hook(lambda module, inputs, output: 2 * output)
    expected = block(x, x)
    report = fuse_layers(block).report
    assert report.fused == {"norm": ("gated norm",), "first": ("gated norm",)}
    torch.testing.assert_close(block(x, x), expected)


def test_an_activation_of_the_table_that_is_replaced_later(monkeypatch, caplog):
    x, gate = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    norm = fused(Qwen3_5RMSNormGated(32))
    before = norm(x, gate)
    monkeypatch.setitem(ACT2FN, "silu", GELUActivation)
    torch.testing.assert_close(norm(x, gate), Qwen3_5RMSNormGated(32)(x, gate))
    assert not torch.allclose(norm(x, gate), before)
    (record,) = caplog.records
    assert "silu was replaced after fuse_layers" in record.getMessage()
    assert norm_of(Qwen3_5RMSNormGated(32)) is None
    monkeypatch.undo()
    assert torch.equal(norm(x, gate), before) and norm_of(Qwen3_5RMSNormGated(32)) is not None


def test_an_activation_that_nobody_knows(monkeypatch):
    class Mine(SiLUActivation):
        pass

    monkeypatch.setitem(ACT2FN, "silu", Mine)
    with pytest.raises(UnrecognizedSource, match="its gate has another activation: Mine"):
        norm_of(Qwen3_5RMSNormGated(32))


class Almost(nn.Module):
    """Mamba's norm but for one thing."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps, self.factor = 1e-6, factor

    def act(self, gate):
        return nn.functional.silu(gate)

    def forward(self, x, gate=None):
        h = x.float()
        if gate is not None:
            h = h * self.act(gate.float())
        h = self.factor * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class Clamped(Almost):
    def act(self, gate):
        return nn.functional.silu(gate.clamp(max=20))


class ClampedFar(Almost):
    def act(self, gate):
        return nn.functional.silu(gate.clamp(max=1e4))


class Gelu(Almost):
    def act(self, gate):
        return nn.functional.gelu(gate)


class Detached(Almost):
    def act(self, gate):
        return nn.functional.silu(gate.detach()) + 0 * gate


class InLowPrecision(Almost):
    def forward(self, x, gate):
        h = x * nn.functional.silu(gate)
        h = h.float()
        return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_almost_a_gated_norm():
    assert norm_of(Almost()).gate is not None
    for module in (Almost(2.0), Clamped(), ClampedFar(), Gelu(), Detached(), InLowPrecision()):
        assert norm_of(module) is None, type(module).__name__


class BranchesOnItsGate(Almost):
    def forward(self, x, gate=None):
        h = x.float() * nn.functional.silu(gate.float())
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (2 * h if gate[0, 0] > 1e3 else h).to(x.dtype)


class HelperBranches(Almost):
    def act(self, gate, limit=None):
        return nn.functional.silu(gate if limit[0, 0] < 1e3 else 2 * gate)

    def forward(self, x, gate):
        h = x.float() * self.act(gate.float(), gate)
        return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("cls", [BranchesOnItsGate, HelperBranches])
def test_a_branch_on_the_gate(cls):
    with pytest.raises(UnrecognizedSource, match="branches on its arguments"):
        norm_of(cls())
