"""What the table says of norms, rotations and activations, and what happens where it is wrong."""

from importlib import import_module

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from logitless.layers import bodies
from logitless.layers.bodies import (
    NORMS,
    ROTATIONS,
    Norm,
    Rotation,
    _rotation_of,
    activation_agrees,
    activation_of,
    norm_of,
    rotation_of,
)
from logitless.layers.fused_forwards import Rotate
from logitless.layers.source import UnrecognizedSource, fingerprint, functions_of

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


def test_the_table_has_nothing_that_no_model_has():
    classes = [found(*path.split(".")) for path in NORM_CLASSES]
    assert set(NORMS) <= {fingerprint(functions_of(cls.forward, cls)) for cls in classes}
    assert set(ROTATIONS) <= {fingerprint(functions_of(found(name))) for name in ROTATION_FUNCTIONS}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    activation = ACT2FN[name]
    assert activation_of(activation) == ACTIVATIONS[name]
    assert ACTIVATIONS[name] is None or activation_agrees(activation)


def test_gelu_of_torch():
    assert activation_of(nn.GELU()) == "gelu_erf"
    assert activation_of(nn.GELU("tanh")) == "gelu_tanh"


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("llama.LlamaRMSNorm", "gemma"),
        ("llama.LlamaRMSNorm", "single"),
        ("gemma.GemmaRMSNorm", "llama"),
        ("gemma.GemmaRMSNorm", "single"),
        ("olmo2.Olmo2RMSNorm", "llama"),
        ("olmo2.Olmo2RMSNorm", "gemma"),
    ],
)
def test_a_table_that_is_wrong_is_found_out(monkeypatch, path, wrong):
    monkeypatch.setattr(bodies, "NORMS", {key: norm._replace(rounding=wrong) for key, norm in NORMS.items()})
    with pytest.raises(UnrecognizedSource, match="its results differ from those of its table entry"):
        norm_of(module_of(path))


@pytest.mark.parametrize(
    "wrong",
    [Rotation(interleaved=True), Rotation(angle_layout="first half"), Rotation(angle_layout="pairs")],
    ids=str,
)
def test_a_rotation_that_is_wrong_is_found_out(monkeypatch, wrong):
    monkeypatch.setattr(bodies, "ROTATIONS", dict.fromkeys(ROTATIONS, wrong))
    assert _rotation_of.__wrapped__(functions_of(found("llama"))) is None


def test_an_activation_that_is_wrong_is_found_out(monkeypatch):
    activation = ACT2FN["silu"]
    monkeypatch.setattr(bodies, "activation_of", lambda module: "gelu_erf")
    assert not activation_agrees(activation)


def test_what_a_body_calls_belongs_to_it():
    gemma = found("gemma", "GemmaRMSNorm")

    class Centered(gemma):
        def _norm(self, x):
            return super()._norm(x - x.mean(-1, keepdim=True))

    assert fingerprint(functions_of(Centered.forward, Centered)) != fingerprint(
        functions_of(gemma.forward, gemma)
    )
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
    norm_of(LlamaRMSNorm(16))
    _rotation_of.__wrapped__(functions_of(found("llama")))
    assert torch.equal(torch.get_rng_state(), before)
