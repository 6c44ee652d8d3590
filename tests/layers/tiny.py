"""Tiny models of the families whose layers are fused, and what one step of them gives."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from logitless.layers import bodies, expert_gates, fused_forwards

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4}
IDS = torch.tensor([[5, 9, 3, 17, 40, 8, 22], [11, 4, 33, 9, 60, 2, 7]], device="cpu")

ROPE = "apply_rotary_pos_emb"
NORMED_ROPE = "q_norm, k_norm and the rotation after them"
ADD_NORM = "the addition before post_attention_layernorm, and the norm"
POST_NORMS = (
    "post_attention_layernorm and the addition after it",
    "post_feedforward_layernorm and the addition after it",
)
NORMED_ROPES = ("q_norm and the rotation after it", "k_norm and the rotation after it")
PER_LAYER_NORM = "post_per_layer_input_norm and the addition after it"
GEMMA4 = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "global_head_dim": 8,
    "num_kv_shared_layers": 0,
}


class Family(NamedTuple):
    config: str
    attention: str | tuple[str, ...]  # what is fused in a module of attention
    layer: tuple[str, ...]  # in a decoder layer
    mlp: str | None  # in an MLP
    options: dict = {}
    experts: str | None = None


FAMILIES = {
    "Llama": Family("LlamaConfig", ROPE, (ADD_NORM,), "gate act_fn"),
    "Mistral": Family("MistralConfig", ROPE, (ADD_NORM,), "gate act_fn"),
    "Qwen2": Family("Qwen2Config", ROPE, (ADD_NORM,), "gate act_fn"),
    "Qwen3": Family("Qwen3Config", NORMED_ROPE, (ADD_NORM,), "gate act_fn"),
    "Gemma": Family("GemmaConfig", ROPE, (ADD_NORM,), "gate act_fn"),
    "Gemma2": Family("Gemma2Config", ROPE, POST_NORMS, "gate act_fn"),
    "Gemma3": Family("Gemma3TextConfig", NORMED_ROPE, POST_NORMS, "gate act_fn"),
    "Gemma4": Family("Gemma4TextConfig", NORMED_ROPES, (*POST_NORMS, PER_LAYER_NORM), "gate act_fn", GEMMA4),
    "Phi3": Family("Phi3Config", ROPE, (ADD_NORM,), "gate activation_fn of both halves of one tensor"),
    "OLMo2": Family("Olmo2Config", ROPE, POST_NORMS, "gate act_fn"),
    "Granite": Family("GraniteConfig", ROPE, (ADD_NORM,), "gate act_fn", {"residual_multiplier": 0.7}),
    "Cohere": Family("CohereConfig", ROPE, (), "gate act_fn"),
    "Mixtral": Family("MixtralConfig", ROPE, (ADD_NORM,), None, EXPERTS, "expert gate"),
    "Qwen2 MoE": Family("Qwen2MoeConfig", ROPE, (ADD_NORM,), "gate act_fn", EXPERTS, "expert gate"),
    "Qwen3 MoE": Family("Qwen3MoeConfig", NORMED_ROPE, (ADD_NORM,), None, EXPERTS, "expert gate"),
    "Granite MoE": Family(
        "GraniteMoeConfig", ROPE, (ADD_NORM,), None, EXPERTS | {"residual_multiplier": 0.7}, "expert gate"
    ),
}


def tiny(family: str, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    """With weights of norms that are not all ones, and biases that are not zero."""
    known = FAMILIES[family]
    config = getattr(transformers, known.config)(**SIZES | known.options | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disturb(model)
    return model.to(dtype)


def disturb(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


class Step(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]


def step(model: nn.Module, ids: Tensor = IDS, **kwargs: object) -> Step:
    """Loss and every gradient."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, **kwargs).loss
    loss.backward()
    actual = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach(), actual)


def error(actual: Step, truth: Step) -> float:
    """Root mean square over loss and parameters of the relative errors."""
    assert actual.gradients.keys() == truth.gradients.keys()
    pairs = [(actual.loss, truth.loss)] + [(actual.gradients[n], truth.gradients[n]) for n in truth.gradients]
    relative = [
        ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)).item() for a, b in pairs
    ]
    return (sum(x * x for x in relative) / len(relative)) ** 0.5


def assert_same(actual: Step, expected: Step, tolerance: float = 3e-6) -> None:
    assert actual.gradients.keys() == expected.gradients.keys()
    torch.testing.assert_close(actual.loss, expected.loss, rtol=tolerance, atol=0)
    for name, gradient in expected.gradients.items():
        assert gradient.norm() > 0 or "expert" in name, f"{name}: no gradient, so nothing is compared"
        distance = (actual.gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert distance < tolerance, f"{name}: {distance:.1e}"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts by name how often models call the operators of the fused layers."""
    calls = Counter()

    def counting(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    def patched(module, *names: str):
        return mock.patch.multiple(module, **{name: counting(name, getattr(module, name)) for name in names})

    with (
        patched(fused_forwards, "add_rms_norm", "rms_norm_add", "qk_norm_rope", "gated"),
        patched(expert_gates, "gated", "clamped_gated"),
        patched(bodies, "rms_norm", "gated_rms_norm", "rope"),
    ):
        yield calls
