"""The gates of grouped experts: which are recognized, what they give, and when the model's own code runs."""

import copy
import importlib
import math
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from logitless.exchange import state_of
from logitless.layers import expert_gates
from logitless.layers.clamped_gate import ClampedGate
from logitless.layers.expert_gates import NO_GATE, ExpertGate, calls_gate, expert_gate_of
from logitless.layers.fuse import withdraw_fusions
from logitless.layers.fused_forwards import GATE_KEY
from logitless.layers.source import UnrecognizedSource
from logitless.models import fuse_layers
from tests.layers.tiny import SIZES, assert_same, counted, disturb, error, step

# All experts take part: a choice of some would not be smooth.
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 4),
    "moe_intermediate_size": 24,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DENSE = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
PLAIN, CLAMPED = "expert gate", "clamped expert gate"
# Classes of models -> (options of the config, what is fused in the experts)
FAMILIES = {
    "Mixtral": ({}, PLAIN),
    "Qwen3Moe": ({}, PLAIN),
    "Qwen3_5Moe": ({"layer_types": ["full_attention"] * 2}, PLAIN),
    "DeepseekV3": (MLA | DENSE, PLAIN),
    "Glm4Moe": (DENSE, PLAIN),
    "GraniteMoe": ({}, PLAIN),
    # Limits that a part of the tiny gates exceeds.
    "GptOss": ({"swiglu_limit": 0.5}, CLAMPED),
    "DeepseekV4": ({"swiglu_limit": 0.5, "mlp_layer_types": ["moe"] * 2}, CLAMPED),
}
# The gradients of its hyper-connections are small differences of large numbers.
TOLERANCES = {"DeepseekV4": 1e-5}
OPERATORS = {PLAIN: "gated", CLAMPED: "clamped_gated"}

families = pytest.mark.parametrize("family", FAMILIES)


def tiny(family: str, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    name = f"{family}ForCausalLM"
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has none")
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    config = cls.config_class(**SIZES | EXPERTS | FAMILIES[family][0])
    model = cls._from_config(config, dtype=torch.float32, **options)
    disturb(model)
    model.set_experts_implementation("grouped_mm")
    return model.to(dtype)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: x for name, x in model.named_modules() if hasattr(type(x), "_apply_gate")}


@families
def test_families(family):
    part = FAMILIES[family][1]
    model, stock = tiny(family), tiny(family)
    expected, experts = step(stock), experts_of(model)
    undo = fuse_layers(model)
    assert len(experts) == 2 and all(undo.report.fused[name] == (part,) for name in experts)
    assert not experts.keys() & undo.report.skipped.keys()
    with counted() as calls:
        assert_same(step(model), expected, TOLERANCES.get(family, 3e-6))
    assert calls[OPERATORS[part]] >= 2
    undo()
    assert [type(x) for x in model.modules()] == [type(x) for x in stock.modules()]
    actual = step(model)
    assert all(torch.equal(actual.gradients[name], x) for name, x in expected.gradients.items())


@families
def test_fusions_of_another_call_are_withdrawn(family):
    model, stock = tiny(family), tiny(family)
    for _ in range(2):
        withdraw_fusions(model)
        assert [type(x) for x in model.modules()] == [type(x) for x in stock.modules()]
        fuse_layers(model)


@families
def test_the_gates_by_themselves(family):
    model = tiny(family)
    expected = step(model)
    for experts in experts_of(model).values():
        fuse_layers(experts)
    assert_same(step(model), expected, TOLERANCES.get(family, 1e-6))


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_at_most_that_of_the_models_gate(family, dtype):
    (_, experts), *_ = experts_of(tiny(family)).items()
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    upstream = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(dtype)

    def outcome(x):
        x = x.clone().requires_grad_()
        y = experts._apply_gate(x)
        return y.detach(), *torch.autograd.grad(y, x, upstream.to(y.dtype))

    truth, stock = outcome(x.double()), outcome(x)
    fuse_layers(experts)
    with counted() as calls:
        actual = outcome(x)
    assert calls == {OPERATORS[FAMILIES[family][1]]: 1}
    for wanted, of_stock, ours in zip(truth, stock, actual, strict=True):
        assert ours.dtype == of_stock.dtype
        assert (ours.double() - wanted).norm() <= (of_stock.double() - wanted).norm()


def test_the_error_of_models_in_bf16_is_that_of_the_stock_models():
    # More tokens than in the other tests: of a few, the error is a lottery.
    ids = torch.randint(3, SIZES["vocab_size"], (8, 16), generator=torch.Generator().manual_seed(0))
    ratios = {}
    for family in ("Qwen3Moe", "GptOss", "DeepseekV4"):
        model = tiny(family, torch.bfloat16)
        # transformers' grouped products have no fp64.
        truth = step(copy.deepcopy(model).float(), ids)
        stock = error(step(model, ids), truth)
        for experts in experts_of(model).values():
            fuse_layers(experts)
        ratios[family] = error(step(model, ids), truth) / stock
    assert max(ratios.values()) < 1.25, ratios
    assert math.prod(ratios.values()) ** (1 / len(ratios)) < 1.02, ratios


def mixtral_experts(implementation: str | None = "grouped_mm", **attributes: object) -> nn.Module:
    config = transformers.MixtralConfig(**SIZES | EXPERTS)
    config._experts_implementation = implementation
    experts = MixtralExperts(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.1)
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


def arguments(tokens: int = 6) -> tuple[torch.Tensor, ...]:
    index = torch.arange(4).expand(tokens, 4)
    return torch.randn(tokens, 32), index, torch.full((tokens, 4), 0.25)


@pytest.mark.parametrize("implementation", [None, "eager", "batched_mm", "grouped_mm"])
def test_which_code_runs_the_gate(implementation):
    """Mixtral's own loop has the gate in its statements, the others call `_apply_gate`."""
    experts, given = mixtral_experts(implementation), arguments()
    expected = experts(*given)
    is_loop = implementation in (None, "eager")
    assert calls_gate(experts) is not is_loop
    part = "gate act_fn of both halves of one tensor" if is_loop else "expert gate"
    assert fuse_layers(experts).report.fused == {"": (part,)}
    with counted() as calls:
        torch.testing.assert_close(experts(*given), expected)
    assert calls == {"gated": 4 if is_loop else 1}


def test_an_implementation_that_has_a_gate_of_its_own(monkeypatch):
    def own(module, hidden, index, weights):
        return hidden

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "own", own)
    experts = mixtral_experts("own")
    assert not calls_gate(experts)
    with pytest.raises(ValueError, match="MixtralExperts: experts_implementation 'own' runs other code"):
        fuse_layers(experts)


def test_experts_without_a_gate():
    """transformers gives them an `_apply_gate` that nothing calls."""
    experts = mixtral_experts(has_gate=False)
    assert not calls_gate(experts)


def test_every_class_of_transformers():
    """Of the experts in a file, with limits and factors that some of them read."""
    attributes = {"limit": 7.0, "alpha": 1.702, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    oai = ClampedGate(7.0, 1.702, 1.0)
    clamped = {
        "GptOssExperts": oai._replace(interleaved=True),
        "MiniMaxM3VLExperts": oai,
        "OpenAIPrivacyFilterExperts": oai,
        "DeepseekV4Experts": ClampedGate(7.0),
        "HYV4Experts": ClampedGate(7.0),
        "HYV4VLExperts": ClampedGate(7.0),
        "Glm5NextTextExperts": ClampedGate(7.0),
        # In fp32 throughout; another activation; a limit after the activation.
        "BeamExperts": None,
        "Inkling2Experts": None,
        "Step3p7Experts": None,
    }
    found = []
    folder = Path(transformers.__file__).parent
    for path in sorted(folder.glob("models/*/modeling_*.py")):
        text = path.read_text()
        if "_apply_gate" not in text and "use_experts_implementation" not in text:
            continue
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        module = importlib.import_module(f"transformers.{name}")
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == module.__name__ and "_apply_gate" in vars(cls):
                experts = object.__new__(cls)
                nn.Module.__init__(experts)
                experts.__dict__ |= attributes
                experts.act_fn = ACT2FN["silu"]
                gate = expert_gate_of(experts)
                actual = None if gate is None else gate.value.clamped
                assert (gate is None) == (clamped.get(cls.__name__, ...) is None), cls
                assert actual == clamped.get(cls.__name__), cls
                found.append(cls.__name__)
    assert len(found) > 40 and "GptOssExperts" in found


@pytest.mark.parametrize("kind", ["gelu", "gelu_pytorch_tanh"])
def test_other_activations(kind):
    experts, x = mixtral_experts(act_fn=ACT2FN[kind]), torch.randn(5, 96)
    expected = experts._apply_gate(x)
    fuse_layers(experts)
    with counted() as calls:
        torch.testing.assert_close(experts._apply_gate(x), expected)
    assert calls == {"gated": 1}


class Experts(nn.Module):
    """Base class of experts; each subclass defines `_apply_gate`."""

    has_gate = True

    def __init__(self):
        super().__init__()
        self.act_fn, self.limit, self.factor = nn.SiLU(), 2.0, 1.5

    def forward(self, x):
        return self._apply_gate(x)


class Plain(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return b * self.act_fn(a)


class Clamped(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        a = torch.clamp(a, max=self.limit)
        return (b.clamp(-self.limit, self.limit) + 1) * a * torch.sigmoid(self.factor * a)


class Interleaved(Experts):
    def _apply_gate(self, x):
        a = x[..., 0::2].clamp(max=self.limit)
        return x[..., 1::2].clamp(-self.limit, self.limit) * a.sigmoid() * a


class UpFirst(Experts):
    def _apply_gate(self, x):
        b, a = x.chunk(2, dim=-1)
        return self.act_fn(a) * b


class InterleavedPlain(Experts):
    def _apply_gate(self, x):
        return self.act_fn(x[..., ::2]) * x[..., 1::2]


class Scaled(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a) * b * self.factor


class Detached(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a.detach()) * b


class ClampedFar(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a.clamp(max=1e3)) * b


class LimitFar(Experts):
    def __init__(self):
        super().__init__()
        self.limit = 1e6

    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a.clamp(max=self.limit)) * b


class GateAlone(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a.clamp(max=self.limit)) * b


class LowerLimit(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a.clamp(-self.limit, self.limit)) * b.clamp(-self.limit, self.limit)


class LimitAfterwards(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a).clamp(max=self.limit) * b.clamp(-self.limit, self.limit)


class InFp32(Experts):
    """With an error that is below that of `gated`."""

    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return (self.act_fn(a.float()) * b.float()).to(x.dtype)


class ReturnsFp32(Experts):
    def _apply_gate(self, x):
        a, b = x.float().chunk(2, dim=-1)
        return self.act_fn(a) * b


RECOGNIZED = {
    Plain: ExpertGate("silu", None, (), ("act_fn",)),
    Clamped: ExpertGate("silu", ClampedGate(2.0, 1.5, 1.0), (("limit", 2.0), ("factor", 1.5))),
    Interleaved: ExpertGate("silu", ClampedGate(2.0, interleaved=True), (("limit", 2.0),)),
}
OTHERS = (
    UpFirst,
    InterleavedPlain,
    Scaled,
    Detached,
    ClampedFar,
    LimitFar,
    GateAlone,
    LowerLimit,
    LimitAfterwards,
    InFp32,
    ReturnsFp32,
)


@pytest.mark.parametrize("cls", RECOGNIZED)
def test_recognized(cls):
    experts, x = cls(), 3 * torch.randn(5, 24)
    assert expert_gate_of(experts).value == RECOGNIZED[cls]
    expected = experts(x)
    fuse_layers(experts)
    with counted() as calls:
        torch.testing.assert_close(experts(x), expected)
    assert calls.total() == 1


@pytest.mark.parametrize("cls", OTHERS)
def test_almost_a_gate(cls):
    assert expert_gate_of(cls()) is None
    with pytest.raises(ValueError, match=f"{cls.__name__}: {NO_GATE}" if "Experts" in cls.__name__ else ""):
        fuse_layers(cls())


class Branches(Experts):
    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a) * (2 * b if b[0, 0] > 1e3 else b)


class ReadsAWeight(Experts):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def _apply_gate(self, x):
        a, b = x.chunk(2, dim=-1)
        return self.act_fn(a) * b * self.weight


class OtherActivation(Plain):
    def __init__(self):
        super().__init__()
        self.act_fn = nn.ReLU()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Branches, "branches on its arguments"),
        (ReadsAWeight, "it reads self.weight"),
        (OtherActivation, "its gate has another activation: ReLU"),
    ],
)
def test_a_gate_that_depends_on_more(cls, reason):
    with pytest.raises(UnrecognizedSource, match=reason):
        expert_gate_of(cls())


def test_a_gate_on_the_instance():
    experts, x = Plain(), torch.randn(5, 24)
    experts._apply_gate = lambda x: 5 * x
    with pytest.raises(UnrecognizedSource, match="a _apply_gate attribute is set on this instance"):
        expert_gate_of(experts)
    experts = Plain()
    undo = fuse_layers(experts)
    experts._apply_gate = lambda x: 5 * x
    assert torch.equal(experts(x), 5 * x)
    undo()
    assert torch.equal(experts(x), 5 * x) and type(experts) is Plain


def test_a_formula_can_be_left_out(monkeypatch):
    monkeypatch.setattr(expert_gates, "FORMULAS", (expert_gates.plain_gates,))
    expert_gates._expert_gate_of.cache_clear()
    try:
        assert expert_gate_of(Plain()) is not None and expert_gate_of(Clamped()) is None
    finally:
        expert_gates._expert_gate_of.cache_clear()


def test_what_the_operator_does_not_compute_runs_the_models_gate():
    experts, stock, x = Clamped(), Clamped(), 3 * torch.randn(5, 24)
    fuse_layers(experts)
    with counted() as calls:
        torch.testing.assert_close(experts(x.double()), stock(x.double()))
        torch.testing.assert_close(experts._apply_gate(x=x), stock(x))
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), stock(x))
        torch.testing.assert_close(torch.func.vmap(experts)(x[None]), stock(x)[None])
        experts.limit = stock.limit = 1.0
        torch.testing.assert_close(experts(x), stock(x))
        assert not calls
        experts.limit = 2.0
        experts(x)
    assert calls == {"clamped_gated": 1}


def test_hooks_and_another_activation():
    experts, x, seen = Plain(), torch.randn(5, 24), []
    handle = experts.act_fn.register_forward_hook(lambda *args: seen.append(1))
    expected = Plain()(x)
    fuse_layers(experts)
    with counted() as calls:
        torch.testing.assert_close(experts(x), expected)
        assert seen == [1] and not calls
        handle.remove()
        experts.act_fn = nn.GELU()
        torch.testing.assert_close(experts(x), nn.functional.gelu(x[:, :12]) * x[:, 12:])
        assert not calls
        experts.act_fn = nn.SiLU()
        torch.testing.assert_close(experts(x), expected)
    assert calls == {"gated": 1}


def test_code_that_is_replaced_after_fusing_takes_effect(monkeypatch, caplog):
    experts, given = mixtral_experts(), arguments()
    before = experts(*given)
    fuse_layers(experts)
    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda self, x: x.chunk(2, dim=-1)[1])
    with counted() as calls:
        torch.testing.assert_close(experts(*given), mixtral_experts_like(experts)(*given))
    assert not calls and not torch.allclose(experts(*given), before)
    (record,) = caplog.records
    assert "MixtralExperts._apply_gate was replaced after fuse_layers" in record.getMessage()
    monkeypatch.undo()
    with counted() as calls:
        torch.testing.assert_close(experts(*given), before)
    assert calls == {"gated": 1}


def mixtral_experts_like(experts: nn.Module) -> nn.Module:
    stock = mixtral_experts()
    stock.load_state_dict(experts.state_dict())
    return stock


def test_copies_files_and_fusing_twice():
    experts, given = mixtral_experts(), arguments()
    undo = fuse_layers(experts)
    expected = mixtral_experts_like(experts)(*given)
    with pytest.raises(ValueError, match="one that is not fused, got 1 fused modules"):
        fuse_layers(experts)
    with counted() as calls:
        torch.testing.assert_close(copy.deepcopy(experts)(*given), expected)
    assert calls == {"gated": 1}
    restored = pickle.loads(pickle.dumps(experts))
    assert state_of(restored, GATE_KEY) is None and type(restored) is MixtralExperts
    undo()
    with counted() as calls:
        assert torch.equal(experts(*given), expected)
    assert not calls


def test_the_default_gate_of_transformers():
    @use_experts_implementation
    class Own(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return x

    own = Own(mixtral_experts().config)
    assert type(own)._apply_gate is moe._default_apply_gate
    assert calls_gate(own) and expert_gate_of(own).value == RECOGNIZED[Plain]
