"""Every causal language model of transformers that can be built tiny, stock and with fused layers.

python -m tests.models.every_model            compares them and prints what was found
python -m tests.models.every_model --write    and writes the table of docs/layers.md
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from logitless.models import fuse_layers
from tests.models.tiny import FAMILIES, Step, disturb, step

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
# Sizes by the names that configs have for them.
SMALL = {
    32: "hidden_size d_model n_embd embed_dim hidden_dim dim word_embed_proj_dim embedding_size",
    48: """intermediate_size ffn_dim n_inner d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim
        shared_intermediate_size mlp_intermediate_size dense_intermediate_size""",
    16: """moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_d_state
        expert_ffn_hidden_size moe_shared_expert_intermediate_size index_head_dim linear_key_head_dim
        linear_value_head_dim mamba_head_dim ssm_state_size hidden_size_per_layer_input
        expert_intermediate_size attention_hidden_size vision_feature_dim""",
    8: """head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim mamba_d_head
        global_head_dim rotary_dim""",
    4: """num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts n_routed_experts mamba_n_heads linear_num_value_heads index_n_heads moe_num_experts
        mamba_num_heads num_attn_heads""",
    2: """num_hidden_layers n_layer num_layers decoder_layers encoder_layers num_key_value_heads moe_top_k
        num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads attn_layer_period
        num_kv_heads""",
    1: """n_group topk_group num_shared_experts n_shared_experts num_mtp_modules num_nextn_predict_layers
        mamba_expand first_k_dense_replace mamba_n_groups""",
    64: """vocab_size max_position_embeddings n_positions max_seq_len sliding_window index_topk n_ctx
        vocab_size_per_layer_input""",
    0: "pad_token_id bos_token_id eos_token_id",
}
NAMES = {name: size for size, names in SMALL.items() for name in names.split()}
PARAMETERS = 30_000_000
# Configs whose positions have three parts, and that do not say how many angles each has.
MROPE = re.compile("vl|omni|glm4|glm_ocr|glmga|glm_image")


class Row(NamedTuple):
    model: str
    verdict: str  # "equal", "untouched", "not built" or "wrong"
    detail: str  # what was fused, or why not
    left: str = ""


def kinds() -> dict[str, str]:
    """model_type and the class of its causal language model."""
    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) | dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: type, **more: object) -> transformers.PreTrainedConfig:
    """With small sizes wherever its names are known, in its parts too."""
    default = kind()
    options: dict[str, object] = {}
    for name in set(vars(default)) | set(getattr(default, "attribute_map", {})):
        value = getattr(default, name, None)
        if isinstance(value, transformers.PreTrainedConfig):
            options[name] = tiny_config(type(value)).to_dict()
        elif name in NAMES and isinstance(value, int) and not isinstance(value, bool):
            options[name] = min(value, NAMES[name]) if NAMES[name] else 0
        elif name == "rope_parameters" and isinstance(value, dict) and MROPE.search(kind.model_type):
            options[name] = value | {"mrope_section": [2, 1, 1]}
    for name in getattr(default, "attribute_map", {}):
        if default.attribute_map[name] in options:
            options.pop(name, None)
    return kind(**options | more)


def build(kind: str) -> nn.Module:
    """On the CPU, in evaluation mode.

    Raises:
        Exception: whatever a config or a model has against sizes like these.
    """
    config_class = transformers.CONFIG_MAPPING[kind]
    mapping = next(
        m for m in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING) if config_class in m
    )
    model_class = mapping[config_class]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    failures = []
    for more in ({}, {"num_key_value_heads": 4}, {"num_hidden_layers": 8}, {"head_dim": 8}, {"head_dim": 16}):
        try:
            config = tiny_config(config_class, **more)
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > PARAMETERS:
                raise ValueError(f"{size:,} parameters")
            torch.manual_seed(0)
            model = model_class(config).eval()
            disturb(model)
            stepped(model)
            return model
        # A config may have anything against these sizes; the next try has others.
        except Exception as error:
            failures.append(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90] if str(error) else ''}"
            )
    raise RuntimeError(failures[0])


def stepped(model: nn.Module) -> Step:
    return step(model, use_cache=False)


def furthest(found: Step, wanted: Step) -> tuple[float, str]:
    """The largest relative distance of loss and gradients; gradients that are next to nothing beside the
    others do not count."""
    largest = max(gradient.norm() for gradient in wanted.gradients.values())
    distances = [(((found.loss - wanted.loss).abs() / wanted.loss.abs()).item(), "loss")]
    for name, gradient in wanted.gradients.items():
        apart = (found.gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-5 * largest)
        distances.append((apart.item() if apart.isfinite() else float("inf"), name))
    return max(distances)


def compare(kind: str) -> Row:
    try:
        model = build(kind)
    except Exception as error:
        return Row(kind, "not built", str(error))
    wanted, again = stepped(model), stepped(model)
    if not torch.equal(wanted.loss, again.loss):
        return Row(kind, "not built", "it gives another loss every time")
    # How far the stock model goes when its weights move by a rounding: top-k of experts may not be smooth.
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    sensitivity, _ = furthest(stepped(model), wanted)
    model.load_state_dict(weights, strict=False)
    try:
        report = fuse_layers(model).report
    except ValueError as error:
        return Row(kind, "untouched", str(error).split("(", 1)[1].rsplit(")", 1)[0])
    left = Counter(f"{report.classes[name]}: {why}" for name, why in report.left.items())
    what = dict.fromkeys(short(each) for parts in report.fused.values() for each in parts)
    row = Row(kind, "equal", ", ".join(sorted(what)), "; ".join(left))
    distance, name = furthest(stepped(model), wanted)
    if distance < max(1e-4, 10 * sensitivity):
        return row
    return row._replace(verdict="wrong", detail=f"{name} by {distance:.1e}, {sensitivity:.1e}; {row.detail}")


def short(what: str) -> str:
    """A replacement without the names of the modules."""
    if "rotation after" in what:
        return "qk-norm + rope"
    if "addition after" in what:
        return "norm + add"
    if "addition before" in what:
        return "add + norm"
    if what.startswith("gate"):
        return "packed gate" if "halves" in what else "gate"
    return "rope" if "rot" in what else what


def rows(words: list[str]) -> Iterator[Row]:
    for kind in sorted(kinds()):
        if not words or kind in words:
            yield compare(kind)


def markdown(found: list[Row]) -> str:
    """Fused models, those of one combination in one line."""
    groups: dict[str, list[str]] = {}
    for row in found:
        if row.verdict == "equal":
            groups.setdefault(row.detail, []).append(row.model)
    lines = ["| fused | models (`model_type`) |", "|---|---|"]
    for what, models in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {what} | {', '.join(models)} |")
    untouched = [row.model for row in found if row.verdict == "untouched"]
    absent = [row.model for row in found if row.verdict == "not built"]
    return "\n".join(lines) + (
        f"\n\nNothing in them is known, and `fuse_layers` says so: {', '.join(untouched)}.\n\n"
        f"Not tried, because no tiny one could be built without more than sizes: {', '.join(absent)}."
    )


def families() -> str:
    """What is fused in each family that is tested in every way, from the tests' own table."""
    lines = ["| family | attention | decoder layer | MLP |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        layer = ", ".join(dict.fromkeys(map(short, family.layer))) or "norms by themselves"
        mlp = short(family.mlp) if family.mlp else "experts: left alone"
        lines.append(f"| {name} | {short(family.attention)} | {layer} | {mlp} |")
    return "\n".join(lines)


def replaced(text: str, name: str, block: str) -> str:
    """The page with what stands between two markers exchanged."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}{block}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    transformers.logging.set_verbosity_error()
    write = "--write" in sys.argv
    found = []
    for row in rows([word for word in sys.argv[1:] if not word.startswith("-")]):
        found.append(row)
        print(
            f"{row.model}: {row.verdict}: {row.detail}" + (f" | left: {row.left}" if row.left else ""),
            flush=True,
        )
    print(dict(Counter(row.verdict for row in found)))
    if write:
        text = replaced(PAGE.read_text(), "families", families())
        PAGE.write_text(replaced(text, "models", markdown(found)))
    sys.exit(any(row.verdict == "wrong" for row in found))


if __name__ == "__main__":
    main()
