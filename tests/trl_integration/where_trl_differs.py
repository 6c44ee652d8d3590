"""Models whose own loss TRL's fused head does not compute, and ours does:

    python -m tests.trl_integration.where_trl_differs            # prints the table
    python -m tests.trl_integration.where_trl_differs --write    # into docs/trl.md

Each is a tiny model with random weights. Compared are its own labelled loss, without a router loss, that of
`add_fused_lm_head`, and that of a trainer's head with the flag on.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from logitless.trl_integration.head import attach_fused_head
from logitless.trl_integration.per_token import make_per_token_fields

from ..models.every import labelled, tiny
from .compare import chunked_loss
from .tiny import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
VISION = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.35,
}


def of_parts(name: str, **text: object) -> PreTrainedModel:
    """A vision-language model, which is called with text alone."""
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    config = cls.config_class(text_config=TEXT | text, vision_config=VISION | {"num_attention_heads": 4})
    torch.manual_seed(0)
    return cls(config).eval()


def with_hook() -> PreTrainedModel:
    model = tiny_model().eval()
    model.lm_head.register_forward_pre_hook(lambda head, args: (args[0] * 0.5,))
    return model


class Scaled(transformers.LlamaForCausalLM):
    def forward(self, *args, labels=None, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.25
        if labels is not None:
            out.loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=self.config.vocab_size)
        return out


def scaled() -> PreTrainedModel:
    torch.manual_seed(0)
    return Scaled(tiny_model().config).eval()


def spread(name: str) -> PreTrainedModel:
    """With weights large enough for a loss other than the uniform distribution's."""
    model = tiny(name)
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 2:
                x.mul_(0.35 / x.std())
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "BERT decoder (layers before the head)": lambda: spread("BertLMHeadModel"),
    "ModernBERT decoder (layers before the head)": lambda: spread("ModernBertDecoderForCausalLM"),
    "RecurrentGemma (`logits_soft_cap`)": lambda: spread("RecurrentGemmaForCausalLM"),
    "AyaVision (`logit_scale` of its text model)": lambda: of_parts(
        "AyaVision", model_type="cohere", logit_scale=0.25
    ),
    "Gemma3 with vision and `final_logit_softcapping`": lambda: of_parts(
        "Gemma3", final_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "a forward hook on `lm_head` that halves its input": with_hook,
    "a subclass whose forward pass scales its logits": scaled,
    "GraniteMoE": lambda: spread("GraniteMoeForCausalLM"),
    "PhiMoE": lambda: spread("PhimoeForCausalLM"),
}


class Row(NamedTuple):
    """Losses; an exception's name where there is none."""

    own: float
    trl: float | str
    ours: float


def row(name: str) -> Row:
    model = MODELS[name]()
    inputs = labelled(model)
    with torch.no_grad():
        out = model(**inputs)
        router = getattr(out, "aux_loss", None)
        own = out.loss.item()
        if router is not None:
            own -= model.config.router_aux_loss_coef * router.item()
        with attach_fused_head(make_per_token_fields)(chunked_loss(model=model))(model):
            ours = mean_nll(model(**inputs, fused_lm_head=True))
        add_fused_lm_head(model)
        try:
            trl = mean_nll(model(**inputs, fused_lm_head=True))
        except Exception as error:
            trl = type(error).__name__
    return Row(own, trl, ours)


def mean_nll(outputs) -> float:
    return (-outputs.log_probs.sum() / outputs.label_mask.sum()).item()


def table() -> Iterator[str]:
    yield "| model | its own loss | TRL's fused head | with the flag |"
    yield "| --- | --- | --- | --- |"
    for name in MODELS:
        own, trl, ours = row(name)
        yield f"| {name} | {own:.3f} | {trl if isinstance(trl, str) else f'{trl:.3f}'} | {ours:.3f} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    text = "\n".join(table())
    print(text)
    if "--write" in sys.argv:
        from benchmarks.harness.report import rewrite

        rewrite(PAGE, "where_trl_differs", text, kind="tests")
