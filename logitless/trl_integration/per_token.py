"""Per-token numbers in the shape that TRL's trainers read them in, for the trainers whose loss TRL's own code
makes of them: DPO, KTO, GRPO, RLOO, GMPO and AsyncGRPO, whose heads are here too.

The head is walked twice where it trains (4 products) and once where it is frozen (2): one vector per token is
kept for it.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from logitless.engine.head_view import HeadView
from logitless.losses.logprobs import TokenNumbers

from .adapter import Adapter, ChunkedLoss, base_of
from .head import Score

# TRL's names of what a trainer may ask for beside the log-probabilities, and ours.
FIELDS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "sum_logits",
    "is_top1": "is_top1",
}


def per_token_score(
    chunked: ChunkedLoss,
    *,
    outputs: tuple[str, ...] = ("log_probs",),
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
) -> Score:
    """A scorer that answers with log-probabilities and `outputs`, differentiable as TRL's are.

    The arguments are those of TRL's `add_fused_lm_head`.
    """
    asked = tuple(FIELDS[name] for name in outputs if name in FIELDS and name != "entropy")
    # Only GRPO differentiates the entropy.
    differentiable = bool(getattr(chunked.trainer.args, "entropy_coef", 0.0))
    numbers = TokenNumbers(
        entropy=("entropy" in outputs) and (differentiable or "metric"),
        also=asked,
        temperature=temperature,
        logits_budget=chunked.budget,
        logits_dtype=torch.float32 if cast_lm_head_to_fp32 else None,
    )

    def score(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        if cast_lm_head_to_fp32:
            # The head's own precision, whatever autocast would make of it.
            hidden = hidden.to(head.dtype)
        autocast = torch.is_autocast_enabled(hidden.device.type) and not cast_lm_head_to_fp32
        with torch.autocast(hidden.device.type, enabled=autocast), chunked.saving():
            found, plan = numbers.numbers(hidden, head, labels, shift=shift)
        chunked.note(plan)
        mask = labels != -100
        if shift:
            # TRL's fields have an entry for each label but the first of a row.
            found, mask = {name: x[:, :-1] for name, x in found.items()}, mask[:, 1:]
        fields = {"log_probs": found["logps"], "label_mask": mask}
        fields |= {name: found[FIELDS[name]] for name in outputs if name in FIELDS}
        if "mean_logits" in fields:
            fields["mean_logits"] = fields["mean_logits"] / head.shape[0]
        if "is_top1" in fields:
            fields["is_top1"] = fields["is_top1"].bool()
        return fields

    return score


def fused_heads(*outputs: str) -> Callable[[ChunkedLoss], Iterator[Callable[[], None]]]:
    """Heads for the trainers that call `add_fused_lm_head` when they are constructed: ours take the place of
    TRL's, on the policy and on the reference."""

    def heads(chunked: ChunkedLoss) -> Iterator[Callable[[], None]]:
        trainer, asked = chunked.trainer, ("log_probs", *outputs)
        if getattr(trainer, "use_weighting", False):
            asked += ("log_sum_sq_probs",)
        options = {
            "temperature": getattr(trainer, "temperature", 1.0),
            "cast_lm_head_to_fp32": getattr(trainer.args, "cast_lm_head_to_fp32", False),
        }
        policy = base_of(trainer, trainer.model)
        yield chunked.attach(policy, per_token_score(chunked, outputs=asked, **options))
        if getattr(trainer, "ref_model", None) is not None:
            reference = base_of(trainer, trainer.ref_model)
            yield chunked.attach(reference, per_token_score(chunked, **options))

    return heads


DPO = Adapter("trl:DPO", heads=fused_heads("entropy", "mean_logits", "is_top1"))
KTO = Adapter("trl:KTO", heads=fused_heads("entropy", "mean_logits"))
GRPO = Adapter("trl:GRPO", heads=fused_heads("entropy"))
RLOO = Adapter("trl:RLOO", heads=fused_heads("entropy"))
GMPO = Adapter("trl.experimental.gmpo:GMPO", heads=fused_heads("entropy"))
AsyncGRPO = Adapter("trl.experimental.async_grpo:AsyncGRPO", heads=fused_heads("entropy"))
