"""The modules of `logitless.layers` beside those of torch and of transformers, with the same parameters."""

import copy

import pytest
import torch
from torch import nn

from logitless.layers import GatedMLP, GeGLU, LayerNorm, RMSNorm, RotaryEmbedding, SwiGLU

transformers = pytest.importorskip("transformers")
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP, GemmaRMSNorm  # noqa: E402
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as interleaved_rotation  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaConfig,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

H, INNER = 16, 24
LLAMA = LlamaConfig(hidden_size=H, intermediate_size=INNER, num_attention_heads=2, rope_theta=500.0)
GEMMA = GemmaConfig(hidden_size=H, intermediate_size=INNER, hidden_activation="gelu_pytorch_tanh")


class Sequential(nn.Module):
    """gelu of torch in the MLP of Llama."""

    def __init__(self):
        super().__init__()
        mlp = LlamaMLP(LLAMA)
        mlp.act_fn = nn.GELU()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.forward = mlp.forward


PAIRS = {
    "RMSNorm": (lambda: RMSNorm(H, eps=1e-5), lambda: LlamaRMSNorm(H, eps=1e-5)),
    "RMSNorm gemma": (lambda: RMSNorm(H, rounding="gemma"), lambda: GemmaRMSNorm(H)),
    "LayerNorm": (lambda: LayerNorm(H), lambda: nn.LayerNorm(H)),
    "LayerNorm without bias": (lambda: LayerNorm(H, bias=False), lambda: nn.LayerNorm(H, bias=False)),
    "SwiGLU": (lambda: SwiGLU(H, INNER), lambda: LlamaMLP(LLAMA)),
    "GeGLU": (lambda: GeGLU(H, INNER), lambda: GemmaMLP(GEMMA)),
    "GeGLU erf": (lambda: GeGLU(H, INNER, approximate="none"), Sequential),
}


@pytest.mark.parametrize(("ours", "stock"), PAIRS.values(), ids=PAIRS)
def test_modules_of_others(ours, stock):
    """Their state dict loads, and results and gradients are equal; a new module has the same parameters."""
    torch.manual_seed(0)
    ours, stock = ours(), stock()
    for name, x in stock.named_parameters():
        if "norm" in type(stock).__name__.lower():
            torch.testing.assert_close(dict(ours.named_parameters())[name], x)
    with torch.no_grad():
        for x in stock.parameters():
            x.add_(0.3 * torch.randn_like(x))
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, H, requires_grad=True)
    upstream = torch.randn(2, 5, H)
    results = []
    for module in (ours, stock):
        y = module(x)
        results.append((y, *torch.autograd.grad(y, (x, *module.parameters()), upstream)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm])
def test_a_norm_with_a_residual(make):
    norm = make(H)
    x, residual = torch.randn(2, 5, H), torch.randn(2, 5, H)
    y, h = norm(x, residual)
    torch.testing.assert_close(h, residual + x)
    torch.testing.assert_close(y, norm(residual + x))


@pytest.mark.parametrize("positions", [None, "packed"])
def test_the_rotation_of_llama(positions):
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    position_ids = None if positions is None else torch.tensor([[0, 1, 2, 0, 1, 2], [5, 6, 7, 8, 0, 1]])
    used = torch.arange(6)[None] if position_ids is None else position_ids
    cos, sin = LlamaRotaryEmbedding(LLAMA)(q, used)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    actual = RotaryEmbedding(8, base=500.0)(q, k, position_ids)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_interleaved_rotation_of_glm():
    """Half of each head, as pairs of neighbours."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    angles = torch.arange(6.0)[:, None] * 100.0 ** (-torch.arange(0, 4, 2) / 4)
    cos, sin = (torch.cat((x, x), -1)[None] for x in (angles.cos(), angles.sin()))
    expected = interleaved_rotation(q, k, cos, sin)
    actual = RotaryEmbedding(8, base=100.0, rotary_dim=4, interleaved=True)(q, k)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_small_model_trains():
    """bf16 on the meta device, a copy, and a step of an optimizer."""
    model = nn.Sequential(RMSNorm(H, dtype=torch.bfloat16), SwiGLU(H, INNER, dtype=torch.bfloat16))
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert RMSNorm(H, device="meta").weight.is_meta and SwiGLU(H, INNER, device="meta").up_proj.weight.is_meta
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, H, dtype=torch.bfloat16)
    losses = []
    for _ in range(5):
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert "rounding='llama'" in repr(model) and "activation='silu'" in repr(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RMSNorm(H, rounding="mistral"), "rounding: expected one of"),
        (lambda: GatedMLP(H, INNER, "relu"), "activation: expected one of"),
        (lambda: GeGLU(H, INNER, approximate="erf"), "approximate: expected one of"),
        (lambda: RotaryEmbedding(8, rotary_dim=3), "rotary_dim: expected an even number"),
        (lambda: RotaryEmbedding(8, rotary_dim=10), "rotary_dim: expected an even number"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
