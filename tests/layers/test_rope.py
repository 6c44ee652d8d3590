"""Rotary position embedding, alone and after norms, against fp64 and what the models of transformers do."""

import pytest
import torch
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_cohere
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave as rotate_deepseek,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_glm
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as rotate_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_llama
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_phi3
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from logitless.layers.rope import qk_norm_rope, rope
from tests.cases import covering_array
from tests.kernels.support import DEVICE
from tests.layers.layer_support import EPS, assert_as_good, outcome, plain_rms_norm, randn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Dtypes of q and k, cos and sin, and the weights.
DTYPES = {
    "fp32": (FP32, FP32, FP32),
    "bf16": (BF16, BF16, BF16),
    "fp16": (FP16, FP16, FP16),
    "fp32 angles": (BF16, FP32, BF16),
    "fp32 weights": (BF16, BF16, FP32),
}
# B, heads, key heads, T, D.
SHAPES = {
    "2x4/2x5x16": (2, 4, 2, 5, 16),
    "1x3/1x7x24": (1, 3, 1, 7, 24),
    "3x1/1x1x2": (3, 1, 1, 1, 2),
    "1x14/2x3x64": (1, 14, 2, 3, 64),
    "1x2/2x2x96": (1, 2, 2, 2, 96),
    "2x40/8x2x128": (2, 40, 8, 2, 128),
}
# A model's function, whether its pairs are neighbours, the rotated fraction of a head, and the layout of cos.
STYLES = {
    "llama": (rotate_llama, False, 1.0, "halves"),
    "phi3 partial": (rotate_phi3, False, 0.5, "halves"),
    "cohere": (rotate_cohere, True, 1.0, "neighbours"),
    "glm partial": (rotate_glm, True, 0.5, "one per pair"),
    "gpt_oss": (rotate_gpt_oss, False, 1.0, "one per pair"),
}
# How q and k lie in memory.
LAYOUTS = ("by token", "by head", "packed", "every other")
NORMS = {"qwen3": (Qwen3RMSNorm, "llama"), "gemma3": (Gemma3RMSNorm, "gemma")}
POSITIONS = ("shared", "per sequence", "flat")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """`x` (B, heads, T, D) with the strides that models give it."""
    match layout:
        case "by token":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "by head":
            return x.contiguous()
        case "packed":
            # One product gave q, k and v: there are gaps between tokens. And nothing is aligned.
            B, heads, T, D = x.shape
            qkv = torch.full((B, T, heads * D + 5), float("nan"), dtype=x.dtype, device=x.device)
            qkv[..., 3:-2] = x.transpose(1, 2).flatten(2)
            return qkv[..., 3:-2].view(B, T, heads, D).transpose(1, 2)
        case "every other":
            return torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2]
    raise ValueError(layout)


def angles(B: int, T: int, R: int, dtype: torch.dtype, kind: str, positions: str) -> tuple[Tensor, Tensor]:
    """cos and sin of random angles, as the models' rotary embeddings lay them out."""
    angle = torch.rand(*{"shared": (1, T), "per sequence": (B, T), "flat": (T,)}[positions], R // 2) * 6
    match kind:
        case "halves":
            angle = torch.cat([angle, angle], -1)
        case "neighbours":
            angle = angle.repeat_interleave(2, -1)
    return tuple(table.bfloat16().to(dtype).to(DEVICE) for table in (angle.cos(), angle.sin()))


def rotary_dim(D: int, fraction: float) -> int:
    return max(2, int(D * fraction) // 2 * 2)


def full(table: Tensor, R: int, interleaved: bool) -> Tensor:
    """One number for each rotated one."""
    if table.shape[-1] == R:
        return table
    return table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor, R: int, interleaved: bool) -> Tensor:
    """Su et al., section 3.4.2: `x cos + rotated(x) sin` on the first R numbers of each head."""
    cos, sin = (full(table, R, interleaved).to(x.dtype).unsqueeze(-3) for table in (cos, sin))
    turned, kept = x[..., :R], x[..., R:]
    if interleaved:
        partner = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        partner = torch.cat([-turned[..., R // 2 :], turned[..., : R // 2]], -1)
    return torch.cat([turned * cos + partner * sin, kept], -1)


def operands(shape, dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    B, heads, key_heads, T, D = shape
    actual = {
        "q": randn(B, heads, T, D, seed=0, dtype=dtype),
        "k": 2 * randn(B, key_heads, T, D, seed=1, dtype=dtype),
    }
    if weight_dtype is not None:
        actual["q_weight"] = 1 + randn(D, seed=2, dtype=weight_dtype) / 2
        actual["k_weight"] = 1 + randn(D, seed=3, dtype=weight_dtype) / 2
    return actual


CASES = {
    "shape": list(SHAPES),
    "dtypes": list(DTYPES),
    "style": list(STYLES),
    "layout": list(LAYOUTS),
    "positions": list(POSITIONS),
}


def stock_rotation(style: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What the model does, cast to the dtype of q: with fp32 angles, attention under autocast casts it."""
    cos, sin = (table if table.dim() == 3 else table[None] for table in (cos, sin))
    if style == "glm partial":
        # GLM's own embedding gives every number twice, and its rotation takes the first half of them.
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return tuple(x.to(q.dtype) for x in STYLES[style][0](q, k, cos, sin))


@pytest.mark.parametrize(
    "case", covering_array(CASES, lambda case: case.get("dtypes") != "fp32 weights", repeats=True)
)
def test_rope_is_as_good_as_the_stock_function(case):
    shape, (dtype, angle_dtype, _), style = SHAPES[case["shape"]], DTYPES[case["dtypes"]], case["style"]
    _, interleaved, fraction, kind = STYLES[style]
    R = rotary_dim(shape[-1], fraction)
    cos, sin = angles(shape[0], shape[3], R, angle_dtype, kind, case["positions"])
    given = operands(shape, dtype)

    def ours(q, k):
        q, k = laid_out(q, case["layout"]), laid_out(k, case["layout"])
        return rope(q, k, cos, sin, interleaved=interleaved, rotary_dim=R)

    def plain(q, k):
        return tuple(plain_rotation(x, cos, sin, R, interleaved) for x in (q, k))

    truth = outcome(plain, given, dtype=FP64)
    assert_as_good(
        outcome(ours, given), truth, outcome(lambda q, k: stock_rotation(style, q, k, cos, sin), given)
    )


@pytest.mark.parametrize(
    "case", covering_array(CASES | {"norm": list(NORMS)}, lambda case: True, repeats=True)
)
def test_qk_norm_rope_is_as_good_as_the_stock_modules(case):
    shape, (dtype, angle_dtype, weight_dtype) = SHAPES[case["shape"]], DTYPES[case["dtypes"]]
    style, (kind, rounding) = case["style"], NORMS[case["norm"]]
    _, interleaved, fraction, table = STYLES[style]
    D, R = shape[-1], rotary_dim(shape[-1], fraction)
    cos, sin = angles(shape[0], shape[3], R, angle_dtype, table, case["positions"])
    given = operands(shape, dtype, weight_dtype)

    def ours(q, k, q_weight, k_weight):
        q, k = laid_out(q, case["layout"]), laid_out(k, case["layout"])
        options = {"eps": EPS, "rounding": rounding, "interleaved": interleaved, "rotary_dim": R}
        return qk_norm_rope(q, k, cos, sin, q_weight, k_weight, **options)

    def plain(q, k, q_weight, k_weight):
        normalized = (plain_rms_norm(x, w, rounding) for x, w in ((q, q_weight), (k, k_weight)))
        return tuple(plain_rotation(x, cos, sin, R, interleaved) for x in normalized)

    def stock(q, k, q_weight, k_weight):
        norm = kind(D, EPS)
        normalized = (
            torch.func.functional_call(norm, {"weight": w}, (x,)) for x, w in ((q, q_weight), (k, k_weight))
        )
        return tuple(x.to(dtype) for x in stock_rotation(style, *normalized, cos, sin))

    assert_as_good(outcome(ours, given), outcome(plain, given, dtype=FP64), outcome(stock, given))


def test_full_tables_need_not_repeat():
    """A table with a number for each rotated one is taken at its word, as the stock function takes it."""
    given = operands((2, 3, 2, 4, 16), FP32)
    cos, sin = randn(2, 4, 16, seed=5), randn(2, 4, 16, seed=6)
    expected = outcome(lambda q, k: rotate_llama(q, k, cos, sin), given)
    actual = outcome(lambda q, k: rope(q, k, cos, sin), given)
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name])


def test_what_is_not_rotated_stays():
    q, k = operands((1, 2, 1, 3, 16), FP32).values()
    q[..., 11:13] = float("inf")
    cos, sin = angles(1, 3, 8, FP32, "halves", "shared")
    for x, turned in zip((q, k), rope(q, k, cos, sin)):
        assert torch.equal(turned[..., 8:], x[..., 8:])


@pytest.mark.parametrize("normalized", [False, True], ids=["rope", "qk_norm_rope"])
def test_strided_tables_and_weights(normalized):
    given = operands((2, 3, 2, 5, 16), FP32, FP32 if normalized else None)
    cos, sin = angles(2, 5, 16, FP32, "halves", "per sequence")
    function = qk_norm_rope if normalized else rope
    expected = function(given["q"], given["k"], cos, sin, *list(given.values())[2:])
    tables = {
        "transposed": [table.transpose(0, 2).contiguous().transpose(0, 2) for table in (cos, sin)],
        "one of them": [cos, sin.transpose(0, 1).contiguous().transpose(0, 1)],
        "every other": [table.repeat_interleave(2, -1)[..., ::2] for table in (cos, sin)],
    }
    weights = [x.repeat_interleave(2)[::2] for x in list(given.values())[2:]]
    for kind, pair in tables.items():
        for x, wanted in zip(function(given["q"], given["k"], *pair, *weights), expected):
            torch.testing.assert_close(x, wanted, msg=kind)
    shared = [table[:1].expand(2, -1, -1) for table in (cos, sin)]
    for x, wanted in zip(
        function(given["q"], given["k"], *shared, *weights),
        function(given["q"], given["k"], cos[:1], sin[:1], *weights),
    ):
        assert torch.equal(x, wanted)


def test_queries_alone():
    given = operands((2, 3, 2, 5, 16), BF16)
    tables = angles(2, 5, 16, BF16, "halves", "shared")
    expected = outcome(lambda q, k: rope(q, k, *tables), given)
    actual = outcome(lambda q: rope(q, None, *tables)[0], {"q": given["q"]})
    assert rope(given["q"], None, *tables)[1] is None
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())


@pytest.mark.parametrize("weights", ["neither", "q_weight", "k_weight"])
def test_norms_without_weights(weights):
    given = {n: x for n, x in operands((2, 3, 2, 5, 16), FP32, FP32).items() if n in ("q", "k", weights)}
    tables = angles(2, 5, 16, FP32, "halves", "shared")

    def plain(q, k, q_weight=None, k_weight=None):
        return tuple(
            plain_rotation(plain_rms_norm(x, w, "llama"), *tables, 16, False)
            for x, w in ((q, q_weight), (k, k_weight))
        )

    actual = outcome(lambda q, k, **weights: qk_norm_rope(q, k, *tables, **weights, eps=EPS), given)
    assert_as_good(actual, outcome(plain, given, dtype=FP64), outcome(plain, given))


def test_gradients_of_angles():
    given = [x.requires_grad_() for x in operands((2, 2, 1, 3, 6), FP64, FP64).values()]
    tables = [x.requires_grad_() for x in angles(2, 3, 6, FP64, "halves", "per sequence")]
    assert torch.autograd.gradcheck(rope, (*given[:2], *tables))
    assert torch.autograd.gradcheck(qk_norm_rope, (*given[:2], *tables, *given[2:]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 1, 5, 16), (1, 4, 4, 3, 24), (1, 2, 1, 1, 6)], ids=str)
def test_neighbours_that_are_stored_in_halves(shape, dtypes, layout):
    """DeepSeek-V3's rotation, from the formula of the others: it reads neighbours and stores halves."""
    D = shape[-1]
    cos, sin = angles(shape[0], shape[3], D, dtypes[1], "one per pair", "per sequence")
    given = operands(shape, dtypes[0])

    def ours(q, k):
        q, k = laid_out(q, layout), laid_out(k, layout)
        return rope(q, k, cos, sin, rotary_dim=D, interleaved=True, deinterleave=True)

    def plain(q, k):
        rotated = [plain_rotation(x, cos, sin, D, True) for x in (q, k)]
        return tuple(torch.cat([x[..., ::2], x[..., 1::2]], -1) for x in rotated)

    def stock(q, k):
        tables = [torch.cat([table, table], -1) for table in (cos, sin)]
        return tuple(x.to(q.dtype) for x in rotate_deepseek(q, k, *tables))

    assert_as_good(outcome(ours, given), outcome(plain, given, dtype=FP64), outcome(stock, given))


@pytest.mark.parametrize("options", [{"interleaved": False}, {"interleaved": True, "rotary_dim": 8}], ids=str)
def test_only_neighbours_of_whole_heads_are_stored_in_halves(options):
    q, table = torch.zeros(1, 2, 3, 16, device=DEVICE), torch.zeros(1, 3, 8, device=DEVICE)
    with pytest.raises(ValueError, match="deinterleave: expected False unless interleaved=True and all 16"):
        rope(q, None, table, table, **{"rotary_dim": 16} | options, deinterleave=True)
