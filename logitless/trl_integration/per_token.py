"""TRL's trainers that ask a head for numbers per token (`add_fused_lm_head`): SFT, DPO, KTO, GRPO, RLOO, GMPO
and AsyncGRPO.

SFT is `CrossEntropyLoss`: one walk over the logits (3 products, 2 with a frozen head) where TRL takes two (4
and 3). TRL's `compute_loss` sums and divides per-token numbers; the fused strategy needs the sum alone. So
the head hands over each field already summed, `compute_loss` runs as TRL wrote it, and what it does about
gradient accumulation, parallelism, the router loss and the logs stays TRL's. Label smoothing, for which TRL
builds the full logits, is part of the same walk.

The others' losses are made by TRL's own code from log-probabilities. Their head is walked twice where it
trains (4 products) and once where it is frozen (2): one vector per token is kept for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless import CrossEntropyLoss
from logitless.engine.head_view import HeadView
from logitless.errors import expect
from logitless.losses.logprobs import TokenNumbers

from .adapter import Adapter, ChunkedLoss, Seam, swapped
from .head import Score, scored

# --- SFT


def summed_score(chunked: ChunkedLoss) -> Score:
    args = chunked.trainer.args
    loss = CrossEntropyLoss(
        reduction="sum",
        dft=args.loss_type == "dft",
        label_smoothing=args.label_smoothing_factor,
        logits_budget=chunked.budget,
    )

    def score(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        output = chunked.solved(loss, hidden, head, labels, shift=shift)
        count = output.metrics["num_tokens"]
        sums = {"entropy": output.metrics["entropy"], "is_top1": output.metrics["token_accuracy"]}
        return {"log_probs": -output.loss, "label_mask": count} | {
            name: x * count for name, x in sums.items()
        }

    return score


def plain_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    # DFT's weights and the smoothing are in the sum already; all that TRL has left to do is the plain loss's
    # part.
    trainer = chunked.trainer
    with swapped(trainer.args, loss_type="nll"), swapped(trainer, label_smoother=None):
        return stock()


def smoothing_is_defined(trainer: Any) -> None:
    args, name, smoothing = trainer.args, "label_smoothing_factor", trainer.args.label_smoothing_factor
    remedy = "the DFT loss is not smoothed, so leave it out"
    expect(args.loss_type != "dft" or not smoothing, name, "0 with loss_type='dft'", smoothing, remedy)
    expected = "0 for a model with a router loss"
    remedy = "TRL leaves that out of a smoothed loss: set router_aux_loss_coef=0.0, or no smoothing"
    expect(not trainer.aux_loss_enabled or not smoothing, name, expected, smoothing, remedy)


SFT = Adapter(
    "trl:SFT",
    checks=(smoothing_is_defined,),
    heads={"model": scored(summed_score)},
    patches={"compute_loss": Seam(plain_loss, train=True, evaluate=True, replaces=False)},
)


# --- the others


def per_token_score(chunked: ChunkedLoss, *asked: str) -> Score:
    """Log-probabilities, and the fields that are asked for by TRL's names, differentiable as TRL's are."""
    args = chunked.trainer.args
    fp32 = getattr(args, "cast_lm_head_to_fp32", False)
    # Only GRPO differentiates the entropy.
    entropy = bool(getattr(args, "entropy_coef", 0.0)) or "metric"
    numbers = TokenNumbers(
        entropy="entropy" in asked and entropy,
        also=tuple("sum_logits" if name == "mean_logits" else name for name in asked if name != "entropy"),
        temperature=getattr(args, "temperature", 1.0),
        logits_budget=chunked.budget,
        logits_dtype=torch.float32 if fp32 else None,
    )

    def score(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        if fp32:
            # The head's own precision, whatever autocast would make of it.
            hidden = hidden.to(head.dtype)
        autocast = torch.is_autocast_enabled(hidden.device.type) and not fp32
        with torch.autocast(hidden.device.type, enabled=autocast), chunked.saving():
            found, plan = numbers.numbers(hidden, head, labels, shift=shift)
        chunked.note(plan)
        mask = labels != -100
        if shift:
            # TRL's fields have an entry for each label but the first of a row.
            found, mask = {name: x[:, :-1] for name, x in found.items()}, mask[:, 1:]
        if "mean_logits" in asked:
            found["mean_logits"] = found["sum_logits"] / head.shape[0]
        if "is_top1" in asked:
            found["is_top1"] = found["is_top1"].bool()
        return {"log_probs": found["logps"], "label_mask": mask} | {name: found[name] for name in asked}

    return score


def fused_heads(*asked: str) -> dict[str, Any]:
    """Heads in the place of those that TRL's constructor has put on the policy and on the reference."""

    def policy(chunked: ChunkedLoss) -> Score:
        weighted = getattr(chunked.trainer, "use_weighting", False)
        return per_token_score(chunked, *asked, *(("log_sum_sq_probs",) if weighted else ()))

    return {"model": scored(policy), "ref_model": scored(per_token_score)}


DPO = Adapter("trl:DPO", heads=fused_heads("entropy", "mean_logits", "is_top1"))
KTO = Adapter("trl:KTO", heads=fused_heads("entropy", "mean_logits"))
GRPO = Adapter("trl:GRPO", heads=fused_heads("entropy"))
RLOO = Adapter("trl:RLOO", heads=fused_heads("entropy"))
GMPO = Adapter("trl.experimental.gmpo:GMPO", heads=fused_heads("entropy"))
AsyncGRPO = Adapter("trl.experimental.async_grpo:AsyncGRPO", heads=fused_heads("entropy"))
