"""Which norms, rotations and activations are recognized by what they compute, and what is not one of them."""

from importlib import import_module

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from logitless.layers import bodies, rope
from logitless.layers.bodies import (
    Norm,
    NormGate,
    Rotation,
    activation_agrees,
    activation_of,
    norm_of,
    rotation_of,
)
from logitless.layers.fuse import fuse_layers
from logitless.layers.fused_forwards import Rotate, RotateOne, add_norm
from logitless.layers.source import UnrecognizedSource

NORM_CLASSES = {
    "llama.LlamaRMSNorm": Norm("llama"),
    "gemma.GemmaRMSNorm": Norm("gemma", "eps"),
    "olmo2.Olmo2RMSNorm": Norm("single"),
    "helium.HeliumRMSNorm": Norm("single"),
    "moshi.MoshiRMSNorm": Norm("single", "eps"),
    "gemma3n.Gemma3nRMSNorm": Norm("single", "eps", options=(("with_scale", True),)),
    "llama4.Llama4TextL2Norm": Norm("single", "eps"),
    "cohere.CohereLayerNorm": Norm("single", center=True),
    "t5.T5LayerNorm": "branches on its arguments",
    "nemotron.NemotronLayerNorm1P": None,
    "zamba2.Zamba2RMSNormGated": Norm(
        "llama", options=(("group_size", 8),), gate=NormGate("silu", True, group_size=8)
    ),
    "qwen3_5.Qwen3_5RMSNormGated": Norm(
        "llama", options=(("activation", "silu"),), gate=NormGate("silu", False, group_size=None)
    ),
    "kimi_linear.KimiLinearRMSNormGated": Norm(
        "single", options=(("activation", "sigmoid"),), gate=NormGate("sigmoid", False, group_size=None)
    ),
    "falcon_h1.FalconH1RMSNormGated": "branches on a call",
}
ROTATION_FUNCTIONS = {
    "llama": Rotation(whole_head=True),
    "gpt_neox": Rotation(),
    "glmasr": Rotation(),
    "nemotron": Rotation(),
    "phi3": Rotation(),
    "olmo2": Rotation(keeps_dtype=True, whole_head=True),
    "modernbert": Rotation(keeps_dtype=True, whole_head=True),
    "cohere": Rotation(interleaved=True, keeps_dtype=True, whole_head=True),
    "glm4v": Rotation(interleaved=True),
    "blt": Rotation(interleaved=True, whole_head=True),
    "glm": Rotation(interleaved=True, angle_layout="first half"),
    "helium": Rotation(interleaved=True, angle_layout="first half", whole_head=True),
    "ernie4_5": Rotation(interleaved=True, angle_layout="first half", keeps_dtype=True, whole_head=True),
    "gpt_oss": Rotation(angle_layout="pairs", whole_head=True),
    "gemma4": Rotation(whole_head=True, single=True),
    "gemma3n": Rotation(whole_head=True, single=True),
    # The text of llama's, with a rotate_half of the other sign.
    "nanochat": None,
    "gptj": None,
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": None,
    "gelu_10": None,
    "relu": None,
}


def transformers_function(name: str, attribute: str = "apply_rotary_pos_emb"):
    return getattr(import_module(f"transformers.models.{name}.modeling_{name}"), attribute)


def module_of(path: str) -> nn.Module:
    cls = transformers_function(*path.split("."))
    if "zamba2" in path:
        return cls(16, group_size=8)
    return cls() if "L2" in path else cls(16)


@pytest.mark.parametrize("path", NORM_CLASSES)
def test_norms(path):
    expected = NORM_CLASSES[path]
    if isinstance(expected, str):
        with pytest.raises(UnrecognizedSource, match=expected):
            norm_of(module_of(path))
    else:
        assert norm_of(module_of(path)) == expected


@pytest.mark.parametrize("name", ROTATION_FUNCTIONS)
def test_rotations(name):
    assert rotation_of(transformers_function(name)) == ROTATION_FUNCTIONS[name]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    activation = ACT2FN[name]
    assert activation_of(activation) == ACTIVATIONS[name]
    assert ACTIVATIONS[name] is None or activation_agrees(activation)


def test_gelu_of_torch():
    assert activation_of(nn.GELU()) == "gelu_erf"
    assert activation_of(nn.GELU("tanh")) == "gelu_tanh"


class Almost(nn.Module):
    """Llama's norm but for one thing."""

    def __init__(self, size: int = 16, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def normalized(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        return self.weight * self.normalized(x.float()).to(x.dtype)


class Detached(Almost):
    def normalized(self, x):
        return x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + self.variance_epsilon)


class HalvesInTraining(Almost):
    def forward(self, x):
        y = self.weight * self.normalized(x.float()).to(x.dtype)
        return y / 2 if self.training else y


class FixedEps(Almost):
    def normalized(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class OtherEps(Almost):
    def normalized(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Clamped(Almost):
    def normalized(self, x):
        x = x.clamp(-100, 100)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class ClampedAtAMillion(Almost):
    def normalized(self, x):
        x = x.clamp(-1e6, 1e6)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class WithoutNaN(Almost):
    def normalized(self, x):
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)).nan_to_num()


class InDtypeOfWeight(Almost):
    def forward(self, x):
        return self.weight * self.normalized(x.float()).to(self.weight.dtype)


class Flat(Almost):
    def normalized(self, x):
        return x * torch.rsqrt(x.flatten(1).square().mean(-1)[:, None] + self.variance_epsilon)


class InLowPrecision(Almost):
    def forward(self, x):
        return self.weight * self.normalized(x)


class WideResult(Almost):
    def forward(self, x):
        return self.weight * self.normalized(x.float())


class Gated(Almost):
    def forward(self, x, gate=None):
        return self.weight * self.normalized(x.float()).to(x.dtype)


class Buffered(Almost):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


class Groups(Almost):
    def normalized(self, x):
        x = x.unflatten(-1, (2, -1))
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)).flatten(-2)


ALMOST = (
    Detached,
    HalvesInTraining,
    FixedEps,
    OtherEps,
    Clamped,
    ClampedAtAMillion,
    WithoutNaN,
    InDtypeOfWeight,
    Flat,
    InLowPrecision,
    WideResult,
    Gated,
    Buffered,
    Groups,
)


def test_a_norm_that_no_table_knows():
    assert norm_of(Almost()) == Norm("llama")
    assert norm_of(Almost(eps=1e-3)) == Norm("llama")


@pytest.mark.parametrize("cls", ALMOST)
def test_almost_a_norm(cls):
    assert norm_of(cls()) is None


class ThroughSuper(Almost):
    def normalized(self, x):
        return super().normalized(x)


class Counts(Almost):
    calls = 0

    def normalized(self, x):
        self.calls += 1
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Drops(Almost):
    def forward(self, x):
        return nn.functional.dropout(self.weight * self.normalized(x.float()).to(x.dtype), 0.0)


class Functional(Almost):
    def forward(self, x):
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)


class OnlyLongInputs(Almost):
    def normalized(self, x):
        scale = 1 if x.shape[0] < 100 else 2
        return scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


SCALE = {"factor": 1.0}


class ReadsGlobal(Almost):
    def normalized(self, x):
        return SCALE["factor"] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class ReadsState(Almost):
    def __init__(self):
        super().__init__()
        self.factors = [1.0]

    def normalized(self, x):
        return self.factors[0] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class ReadsClass(Almost):
    factor = 1.0

    def normalized(self, x):
        return self.factor * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Prints(Almost):
    def normalized(self, x):
        print("called")
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Loops(Almost):
    def normalized(self, x):
        for _ in (1,):
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return x


MORE_THAN_ITS_ARGUMENTS = {
    ThroughSuper: r"calls super\(\)",
    Counts: "assigns to something else than names",
    Drops: "uses dropout",
    Functional: "uses rms_norm",
    OnlyLongInputs: "branches on its arguments",
    ReadsGlobal: "depends on SCALE",
    ReadsState: "it reads self.factors",
    ReadsClass: "reads self.factor, an attribute of its class",
    Prints: "depends on print",
    Loops: "has a For",
}


@pytest.mark.parametrize("cls", MORE_THAN_ITS_ARGUMENTS, ids=lambda cls: cls.__name__)
def test_a_norm_that_depends_on_more_than_its_arguments(cls):
    with pytest.raises(UnrecognizedSource, match=MORE_THAN_ITS_ARGUMENTS[cls]):
        norm_of(cls())


class Scaled(Almost):
    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.factor = factor

    def normalized(self, x):
        return self.factor * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def test_an_option_that_changes_later():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Scaled()

        def forward(self, residual, x):
            residual = residual + x
            x = self.norm(residual)
            return residual + x

    assert norm_of(Scaled(2.0)) is None
    assert norm_of(Scaled()) == Norm("llama", options=(("factor", 1.0),))
    model = Model()
    x, residual = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    before = model(residual, x)
    fuse_layers(model)
    torch.testing.assert_close(model(residual, x), before)
    model.norm.factor = 3.0
    torch.testing.assert_close(model.norm(x), 3 * Almost()(x))
    h = residual + x
    torch.testing.assert_close(model(residual, x), h + 3 * Almost()(h))


def test_a_norm_of_another_width_runs_its_own_code():
    model = nn.Sequential(Almost(1))
    fuse_layers(model)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(model(x), Almost()(x))
    norm = LlamaRMSNorm(8)
    residual = torch.randn(2, 3, 16)
    fuse_layers(nn.Sequential(norm))
    with pytest.raises(RuntimeError, match="must match the size"):
        add_norm(norm, residual=residual, x=x)


def test_a_norm_is_recognized_in_inference_mode_with_odd_eps_and_widths():
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert norm_of(Almost(24)) == Norm("llama")
    assert norm_of(Almost(0)) == norm_of(Almost(1)) == Norm("llama")
    assert norm_of(Almost(eps=0.0)) == norm_of(Almost(eps=0)) == Norm("llama")
    assert norm_of(transformers_function("cohere", "CohereLayerNorm")(16, eps=1e-12)) == Norm(
        "single", center=True
    )


def test_a_helper_that_changes_between_two_models(monkeypatch):
    assert norm_of(Almost()) == Norm("llama")
    monkeypatch.setattr(Almost, "normalized", Groups.normalized)
    assert norm_of(Almost()) is None
    monkeypatch.undo()
    assert norm_of(Almost()) == Norm("llama")


def halves(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotated(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def only_queries(q, k, cos, sin):
    return rotated(q, k, cos, sin)[0], k


def backwards(q, k, cos, sin):
    return rotated(q, k, cos, -sin)


def swapped(q, k, cos, sin):
    return rotated(q, k, sin, cos)


def detached(q, k, cos, sin):
    return tuple(x.detach() + 0 * y for x, y in zip(rotated(q, k, cos, sin), (q, k)))


def widened(q, k, cos, sin):
    return rotated(q.float(), k.float(), cos.float(), sin.float())


def test_a_rotation_that_no_table_knows():
    assert rotation_of(rotated) == Rotation(whole_head=True)


def last(q, k, cos, sin):
    size = q.shape[-1] - cos.shape[-1]
    a, b = rotated(q[..., size:], k[..., size:], cos, sin)
    return torch.cat((q[..., :size], a), -1), torch.cat((k[..., :size], b), -1)


def first(q, k, cos, sin):
    size = cos.shape[-1]
    a, b = rotated(q[..., :size], k[..., :size], cos, sin)
    return torch.cat((a, q[..., size:]), -1), torch.cat((b, k[..., size:]), -1)


def test_how_much_of_a_head_is_rotated():
    """Only for a head as wide as the angles do the three agree."""
    assert rotation_of(rotated) == rotation_of(last) == Rotation(whole_head=True)
    assert rotation_of(first) == Rotation()
    q, k, angles = torch.randn(2, 3, 5, 12), torch.randn(2, 1, 5, 12), torch.randn(2, 2, 5, 8)
    for function in (last, first):
        rotate = Rotate(function, rotation_of(function))
        for ours, stock in zip(rotate(q, k, *angles), function(q, k, *angles)):
            torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize(
    "shapes",
    [
        # (q, k, cos, sin): more queries than keys, a batch of one, one angle, other angles.
        ((2, 3, 5, 8), (2, 1, 1, 8), (2, 5, 8), (2, 5, 8)),
        ((1, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8)),
        ((2, 3, 5, 8), (2, 1, 5, 8), (2, 1, 8), (2, 1, 8)),
        ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (1, 5, 8)),
    ],
)
def test_what_pytorch_broadcasts_runs_the_models_code(shapes):
    operands = [torch.randn(shape) for shape in shapes]
    rotate = Rotate(rotated, rotation_of(rotated))
    for ours, stock in zip(rotate(*operands), rotated(*operands)):
        torch.testing.assert_close(ours, stock)


def one(x, cos, sin, unsqueeze_dim=1):
    return x * cos.unsqueeze(unsqueeze_dim) + halves(x) * sin.unsqueeze(unsqueeze_dim)


def one_by_token(x, cos, sin):
    return one(x, cos, sin, 2)


def one_in_one_layout(x, cos, sin, unsqueeze_dim=1):
    return one(x, cos, sin)


def one_wrong_by_token(x, cos, sin, unsqueeze_dim=1):
    return one(x if unsqueeze_dim == 1 else 2 * x, cos, sin, unsqueeze_dim)


def test_a_rotation_of_one_tensor(monkeypatch):
    assert rotation_of(one) == Rotation(whole_head=True, single=True)
    assert (
        rotation_of(one_by_token) is rotation_of(one_wrong_by_token) is rotation_of(one_in_one_layout) is None
    )
    calls = []
    monkeypatch.setattr(bodies, "rope", lambda *args, **kwargs: calls.append(1) or rope(*args, **kwargs))
    rotate, x = RotateOne(one, rotation_of(one)), torch.randn(2, 5, 5, 8)
    cos, sin = torch.randn(2, 2, 5, 8)
    for kwargs in ({}, {"unsqueeze_dim": 2}):
        torch.testing.assert_close(rotate(x, cos, sin, **kwargs), one(x, cos, sin, **kwargs))
    assert len(calls) == 2
    # Another layout, one angle for all tokens, and a sequence without a batch run the model's code.
    torch.testing.assert_close(rotate(x, cos, sin, 2), one(x, cos, sin, 2))
    torch.testing.assert_close(rotate(x, cos, sin, unsqueeze_dim=-2), one(x, cos, sin, unsqueeze_dim=-2))
    torch.testing.assert_close(rotate(x, cos[:, :1], sin[:, :1]), one(x, cos[:, :1], sin[:, :1]))
    torch.testing.assert_close(rotate(x[0], cos[0], sin[0], unsqueeze_dim=0), one(x[0], cos[0], sin[0], 0))
    assert len(calls) == 2


def test_a_rotation_that_stores_neighbours_in_halves():
    function = transformers_function("deepseek_v3", "apply_rotary_pos_emb_interleave")
    rotation = rotation_of(function)
    assert rotation == Rotation(
        interleaved=True, angle_layout="first half", whole_head=True, deinterleave=True
    )
    q, k, cos, sin = (torch.randn(2, *shape) for shape in ((3, 5, 8), (1, 5, 8), (5, 8), (5, 8)))
    norms = nn.ModuleList([LlamaRMSNorm(8), LlamaRMSNorm(8)])
    fuse_layers(norms)
    # No kernel has the norms before this rotation.
    for ours, stock in zip(
        Rotate(function, rotation).norm_and_rotate(*norms, False, q, k, cos, sin),
        function(LlamaRMSNorm(8)(q), LlamaRMSNorm(8)(k), cos, sin),
    ):
        torch.testing.assert_close(ours, stock)


def only_short(q, k, cos, sin):
    return rotated(q, k, cos, sin) if q.shape[2] < 100 else (q, k)


@pytest.mark.parametrize("function", [only_queries, backwards, swapped, detached, widened, only_short])
def test_almost_a_rotation(function):
    assert rotation_of(function) is None


def test_an_activation_that_is_wrong_is_found_out(monkeypatch):
    activation = ACT2FN["silu"]
    monkeypatch.setattr(bodies, "activation_of", lambda module: "gelu_erf")
    assert not activation_agrees(activation)


def test_what_a_norm_calls_belongs_to_it():
    class Centered(transformers_function("gemma", "GemmaRMSNorm")):
        def _norm(self, x):
            x = x - x.mean(-1, keepdim=True)
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    assert norm_of(Centered(16)) is None


def test_another_eps_is_read_when_the_norm_runs():
    norm = LlamaRMSNorm(16)
    body, x = norm_of(norm), torch.full((2, 16), 1e-3)
    norm.variance_epsilon = 1.0
    torch.testing.assert_close(bodies.apply_norm(body, norm, norm.weight, x), norm(x))


def test_a_weight_of_several_dimensions_is_not_ours():
    with pytest.raises(UnrecognizedSource, match="its weight has 2 dimensions"):
        norm_of(transformers_function("cohere", "CohereLayerNorm")((4, 8)))


def test_a_function_that_kernels_made_a_module_of(monkeypatch):
    """As its decorator does where it is installed."""
    llama = import_module("transformers.models.llama.modeling_llama")
    stock = llama.apply_rotary_pos_emb

    def module_around(func):
        class Func(nn.Module):
            def forward(self, *args, **kwargs):
                return func(*args, **kwargs)

        return Func()

    made = module_around(stock)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", made)
    forward = llama.LlamaAttention.forward

    def recognized():
        rotations, unrecognized = bodies.rotations_of(forward)
        return {name: rotation.value for name, rotation in rotations.items()}, unrecognized

    assert recognized() == ({"apply_rotary_pos_emb": (made, Rotation(whole_head=True))}, [])
    rotate = Rotate(made, Rotation(whole_head=True))
    # A kernel has been put in its place.
    made.forward = lambda *args: "kernel"
    q, k, table = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 3, 4)
    assert rotate(q, k, table, table) == "kernel"
    assert recognized() == ({}, ["apply_rotary_pos_emb"])
    # What somebody patches between two models is seen.
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert recognized() == ({}, ["apply_rotary_pos_emb"])
    monkeypatch.undo()
    assert recognized() == ({"apply_rotary_pos_emb": (stock, Rotation(whole_head=True))}, [])


def test_the_trial_leaves_random_numbers_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    norm_of(LlamaRMSNorm(24))
    bodies._rotation_of.__wrapped__((transformers_function("llama"),))
    assert torch.equal(torch.get_rng_state(), before)
