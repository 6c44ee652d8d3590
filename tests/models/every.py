"""All causal language models of the installed transformers, tiny: whether the patched loss is their own.

    python -m tests.models.every

writes docs/models.md. A tiny model is made of the family's own defaults with the sizes below; what a family's
configuration demands beyond that is in `CHANGES`.
"""

import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from logitless.models import patch_model

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
VOCAB = 96

SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "intermediate_size", "ffn_dim"), 32),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "state_size"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "encoder_layers": 1,
    "mamba_chunk_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": False,
}
# What is done to logits and added to the loss, strong enough to be noticed when it is left out.
NOTICED = {
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), 0.5),
    **dict.fromkeys(("logit_scale", "lm_head_multiplier", "output_multiplier"), 3.0),
    **dict.fromkeys(("router_aux_loss_coef", "aux_loss_coef", "z_loss_coefficient"), 0.1),
    "logits_scaling": 0.25,
    "logits_mup_width_multiplier": 2.0,
    "unpadded_vocab_size": 90,
    "output_router_logits": True,
}
# Attention in a latent space: one head of keys a head of queries, of the rotated width.
LATENT = {"num_key_value_heads": 4, "qk_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SLIDING = ["sliding_attention", "full_attention"]
FULL = ["full_attention"] * 2
CHANGES: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": LATENT | {"n_group": 1, "topk_group": 1},
    **dict.fromkeys(("AXK2ForCausalLM", "DeepseekV2ForCausalLM"), LATENT),
    **dict.fromkeys(("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM"), LATENT),
    **dict.fromkeys(("GlmMoeDsaForCausalLM", "MiniCPM3ForCausalLM", "YoutuForCausalLM"), LATENT),
    "BambaForCausalLM": MAMBA,
    "BltForCausalLM": {"vocab_size": 260, "encoder_hash_byte_group_vocab": 64},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "CohereCompassForCausalLM": {"layer_types": SLIDING, "rope_parameters": {x: ROPE for x in SLIDING}},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "max_seq_len": 64,
    },
    "DeepseekV4ForCausalLM": {
        "layer_types": ["heavily_compressed_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe"],
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "Dots3NoteForCausalLM": LATENT
    | {
        "head_dim": 16,
        "layer_types": ["sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
        "per_layer_config": {},
    },
    "FlintForCausalLM": {"mlp_only_layers": []},
    "FuyuForCausalLM": {"image_size": 8, "patch_size": 4},
    "GitForCausalLM": {"vision_config": {"image_size": 8, "patch_size": 4}},
    "Gemma3nForCausalLM": {
        "layer_types": FULL,
        "num_kv_shared_layers": 1,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
        "intermediate_size": [32, 32],
    },
    "Gemma3ForConditionalGeneration": {
        "mm_tokens_per_image": 4,
        "vision_config": {"image_size": 8, "patch_size": 4},
    },
    "Gemma4ForCausalLM": {"layer_types": FULL, "num_kv_shared_layers": 1},
    "Gemma4AssistantForCausalLM": {
        "text_config": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2, "layer_types": SLIDING}
    },
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": {"num_kv_shared_layers": 2, "layer_types": SLIDING}},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridForCausalLM": MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "KimiLinearForCausalLM": LATENT | {"linear_head_dim": 8, "linear_num_heads": 4},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashForCausalLM": LATENT | {"expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2},
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "ReformerModelWithLMHead": {
        "attn_layers": ["local", "local"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "feed_forward_size": 32,
        "local_attn_chunk_length": 4,
        "attention_head_size": 8,
    },
    "RoCBertForCausalLM": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 8,
        "shape_embed_dim": 8,
        "shape_vocab_size": 8,
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "num_key_value_heads": 4,
        "use_mamba_kernels": False,
        "hybrid_layer_ids": [1],
        "chunk_size": 8,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


class Result(NamedTuple):
    """How a patched model compares with itself."""

    verdict: str  # "equal", "refused", "not run"
    detail: str = ""
    error: float = 0.0  # the largest relative error of a parameter's gradient


def classes() -> dict[str, list[str]]:
    """Model types by the name of the class, in the order of the mapping."""
    actual: dict[str, list[str]] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        actual.setdefault(name, []).append(kind)
    return actual


def sizes(config_class: type, changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a tiny configuration."""
    known = set(inspect.signature(config_class.__init__).parameters) | set(
        getattr(config_class, "attribute_map", {})
    )
    known |= set(getattr(config_class, "__dataclass_fields__", {}))
    actual = {name: value for name, value in (SMALL | NOTICED).items() if name in known}
    inner = {name: getattr(config_class, name, None) for name in getattr(config_class, "sub_configs", {})}
    if inner and any(x is None for x in inner.values()):
        whole = config_class(**{name: x for name, x in changes.items() if not isinstance(x, dict)})
        inner = {name: getattr(whole, name, None) for name in inner}
    for name, config in inner.items():
        if config is not None:
            actual[name] = sizes(type(config), changes.get(name, {}))
            actual[name] |= {"model_type": config.model_type} if config.model_type else {}
    return actual | {name: value for name, value in changes.items() if name not in inner}


def tiny(name: str) -> PreTrainedModel:
    """A model of this class with the same random weights on every call."""
    cls = getattr(transformers, name)
    config = cls.config_class(**sizes(cls.config_class, CHANGES.get(name, {})))
    with torch.device("meta"):
        count = sum(x.numel() for x in cls(config).parameters())
    if count > 7e6:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            if not x.isfinite().all() or x.dim() > 1 and not x.any():
                torch.nn.init.normal_(x, std=0.1)  # left as it was by a constructor
    return model


def labelled(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(8) < torch.tensor([[3], [0]]), -100, ids)
    return {"input_ids": ids, "labels": labels}


def gradients(model: PreTrainedModel, **inputs: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def compare(name: str) -> Result:
    """The patched model against itself: loss, gradient of each parameter, and the fields of the output."""
    try:
        model = tiny(name)
    except Exception as error:
        return Result("not run", described(error))
    inputs = labelled(model)
    try:
        stock, expected = gradients(model, **inputs)
    except Exception as error:
        stock = Result("not run", described(error))
    try:
        patch = patch_model(model, logits_budget=2**20)
    except (TypeError, ValueError) as error:
        return Result("refused", described(error))
    if isinstance(stock, Result):
        return stock
    ours, actual = gradients(model, **inputs)
    fields = set(stock.keys()) - {"logits"}
    assert set(ours.keys()) == fields, f"{name}: {set(ours.keys())}, not {fields}"
    torch.testing.assert_close(
        ours.loss, stock.loss, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}"
    )
    assert actual.keys() == expected.keys(), f"{name}: {actual.keys() ^ expected.keys()}"
    largest = max(x.norm() for x in expected.values())
    errors = {
        n: ((actual[n] - x).norm() / x.norm().clamp(min=1e-6 * largest)).item() for n, x in expected.items()
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-3, f"{name}: gradient of {worst} is off by {errors[worst]:.1e}"
    return Result("equal", patch.checked, errors[worst])


def described(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {text}"[:220]


def page(actual: dict[str, Result]) -> Iterator[str]:
    """The paragraphs of docs/models.md: what does not work in tables, the rest as a list of names."""
    kinds = classes()
    count = {
        verdict: sum(len(kinds[n]) for n, r in actual.items() if r.verdict == verdict) for verdict in VERDICTS
    }
    yield HEADER.format(
        version=transformers.__version__,
        total=sum(count.values()),
        **{verdict.replace(" ", "_"): n for verdict, n in count.items()},
    )
    for verdict, title in VERDICTS.items():
        names = [name for name, result in actual.items() if result.verdict == verdict]
        if verdict == "equal":
            yield f"\n## {title}\n\n{', '.join(names)}."
            continue
        yield f"\n## {title}\n\n| class | model types | message |\n|---|---|---|"
        for name in names:
            yield f"| {name} | {', '.join(kinds[name])} | {actual[name].detail} |"


VERDICTS = {"refused": "Refused", "not run": "Not run", "equal": "Equal"}
HEADER = """# Models

Whether `patch_model`, and with it the chunked loss of the trainers, works with a model.
`AutoModelForCausalLM` of transformers {version} knows {total} model types. {equal} of them give the
same numbers with `patch_model` and without, {refused} are refused with a message, and {not_run}
could not be run as tiny models, so that nothing is known about them.

`python -m tests.models.every` writes this page. It runs each class as a tiny model with random
weights, with `patch_model` and without, on a CPU in fp32, and compares the loss (with strong
softcaps, scales, router losses and z-losses), the gradient of each parameter (relative error below
1e-3) and the fields of the output. For a class under [Equal](#equal), `patch_model` itself also
compares head and loss with the model's own when it is called."""

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {name: compare(name) for name in classes()}
    TABLE.write_text("\n".join(page(found)) + "\n")
