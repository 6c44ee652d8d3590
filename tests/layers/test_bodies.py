"""Which norms, rotations and activations are recognized by what they compute, and what is not one of them."""

from importlib import import_module

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from logitless.layers import bodies
from logitless.layers.bodies import (
    Norm,
    Rotation,
    activation_agrees,
    activation_of,
    norm_of,
    rotation_of,
)
from logitless.layers.fused_forwards import Rotate
from logitless.layers.source import UnrecognizedSource

NORM_CLASSES = {
    "llama.LlamaRMSNorm": Norm("llama"),
    "gemma.GemmaRMSNorm": Norm("gemma", "eps"),
    "olmo2.Olmo2RMSNorm": Norm("single"),
    "helium.HeliumRMSNorm": Norm("single"),
    "moshi.MoshiRMSNorm": Norm("single", "eps"),
    "gemma3n.Gemma3nRMSNorm": Norm("single", "eps"),
    "llama4.Llama4TextL2Norm": Norm("single", "eps"),
    "cohere.CohereLayerNorm": Norm("single", center=True),
    "t5.T5LayerNorm": None,
    "nemotron.NemotronLayerNorm1P": None,
    "bamba.BambaRMSNormGated": None,
}
ROTATION_FUNCTIONS = {
    "llama": Rotation(),
    "gpt_neox": Rotation(),
    "glmasr": Rotation(),
    "nemotron": Rotation(),
    "phi3": Rotation(),
    "olmo2": Rotation(keeps_dtype=True),
    "modernbert": Rotation(keeps_dtype=True),
    "cohere": Rotation(interleaved=True, keeps_dtype=True),
    "glm4v": Rotation(interleaved=True),
    "blt": Rotation(interleaved=True),
    "glm": Rotation(interleaved=True, angle_layout="first half"),
    "helium": Rotation(interleaved=True, angle_layout="first half"),
    "ernie4_5": Rotation(interleaved=True, angle_layout="first half", keeps_dtype=True),
    "gpt_oss": Rotation(angle_layout="pairs"),
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


def found(name: str, attribute: str = "apply_rotary_pos_emb"):
    return getattr(import_module(f"transformers.models.{name}.modeling_{name}"), attribute)


def module_of(path: str) -> nn.Module:
    cls = found(*path.split("."))
    if "Gated" in path:
        return cls(group_size=16, hidden_size=16)
    return cls() if "L2" in path else cls(16)


@pytest.mark.parametrize("path", NORM_CLASSES)
def test_norms(path):
    assert norm_of(module_of(path)) == NORM_CLASSES[path]


@pytest.mark.parametrize("name", ROTATION_FUNCTIONS)
def test_rotations(name):
    assert rotation_of(found(name)) == ROTATION_FUNCTIONS[name]


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


class DropsInTraining(Almost):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class FixedEps(Almost):
    def normalized(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class OtherEps(Almost):
    def normalized(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Clamped(Almost):
    def normalized(self, x):
        return super().normalized(x.clamp(-100, 100))


class InLowPrecision(Almost):
    def forward(self, x):
        return self.weight * self.normalized(x)


class WideResult(Almost):
    def forward(self, x):
        return self.weight * self.normalized(x.float())


class Gated(Almost):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class Buffered(Almost):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


class Groups(Almost):
    def normalized(self, x):
        return super().normalized(x.unflatten(-1, (2, -1))).flatten(-2)


ALMOST = (
    Detached,
    DropsInTraining,
    FixedEps,
    OtherEps,
    Clamped,
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
    assert rotation_of(rotated) == Rotation()


@pytest.mark.parametrize("function", [only_queries, backwards, swapped, detached, widened])
def test_almost_a_rotation(function):
    assert rotation_of(function) is None


def test_an_activation_that_is_wrong_is_found_out(monkeypatch):
    activation = ACT2FN["silu"]
    monkeypatch.setattr(bodies, "activation_of", lambda module: "gelu_erf")
    assert not activation_agrees(activation)


def test_what_a_norm_calls_belongs_to_it():
    class Centered(found("gemma", "GemmaRMSNorm")):
        def _norm(self, x):
            return super()._norm(x - x.mean(-1, keepdim=True))

    assert norm_of(Centered(16)) is None


def test_another_eps_is_read_when_the_norm_runs():
    norm = LlamaRMSNorm(16)
    body, x = norm_of(norm), torch.full((2, 16), 1e-3)
    norm.variance_epsilon = 1.0
    torch.testing.assert_close(bodies.apply_norm(body, norm, x, norm.weight), norm(x))


def test_a_weight_of_several_dimensions_is_not_ours():
    with pytest.raises(UnrecognizedSource, match="its weight has 2 dimensions"):
        norm_of(found("cohere", "CohereLayerNorm")((4, 8)))


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

    assert recognized() == ({"apply_rotary_pos_emb": (made, Rotation())}, [])
    rotate = Rotate(made, Rotation())
    # A kernel has been put in its place.
    made.forward = lambda *args: "kernel"
    q, k, table = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 3, 4)
    assert rotate(q, k, table, table) == "kernel"
    assert recognized() == ({}, ["apply_rotary_pos_emb"])
    # What somebody patches between two models is seen.
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert recognized() == ({}, ["apply_rotary_pos_emb"])
    monkeypatch.undo()
    assert recognized() == ({"apply_rotary_pos_emb": (stock, Rotation())}, [])


def test_the_trial_leaves_random_numbers_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    norm_of(LlamaRMSNorm(24))
    bodies._rotation_of.__wrapped__((found("llama"),))
    assert torch.equal(torch.get_rng_state(), before)
