"""TRL's distillation trainers that project hidden states themselves: DistillationTrainer, which takes eight
products for what takes four, and AsyncDistillation, whose teacher is behind a server and names its best
tokens.

TRL's AsyncDistillation projects 256 rows at a time in fp32, each twice; here it is `DistillationLoss` under
the budget, which projects each row once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless import DistillationLoss

from .adapter import Adapter, ChunkedLoss, Seam
from .versions import found_in_trl

SYNC = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
PACKAGE = "trl.experimental.async_distillation"
MODULE = f"{PACKAGE}.async_distillation_trainer"


def chunked_divergence(chunked: ChunkedLoss, stock: Callable, given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What TRL's `_chunked_divergence_loss` returns: the loss, the sum of the student's entropies, and how
    many tokens count."""
    loss = DistillationLoss(
        beta=given.beta,
        temperature=given.temperature,
        softcap=given.student_final_logit_softcapping,
        logit_scale=given.student_logit_scale,
        teacher_softcap=given.teacher_final_logit_softcapping,
        teacher_logit_scale=given.teacher_logit_scale,
        logits_budget=chunked.budget,
    )
    out = chunked.solved(
        loss,
        given.student_hidden_states,
        given.student_lm_head_weight,
        bias=given.student_lm_head_bias,
        teacher_hidden=given.teacher_hidden_states.to(given.student_hidden_states.device),
        teacher_weight=given.teacher_lm_head_weight,
        teacher_bias=given.teacher_lm_head_bias,
        mask=given.completion_mask,
        num_items=given.num_items_in_batch,
    )
    count = given.completion_mask.sum()
    return out.loss, out.metrics["entropy"] * count, count


def chunked_jsd(chunked: ChunkedLoss, stock: Callable, given: Any) -> tuple[Tensor, ...]:
    """What TRL's `_chunked_jsd_loss` returns: sums of the loss, of its value for the log, of the student's
    entropies and of the teachers', and for each teacher how many tokens it scored and its share of the
    divergence and of the entropy."""
    hidden, weight, index = given.hidden_valid, given.lm_head_weight, given.teacher_id_idx
    several = index is not None
    loss = DistillationLoss(
        beta=given.beta,
        temperature=given.temperature,
        topk_mode="tail" if given.add_tail_bucket else "renormalize",
        softcap=given.final_logit_softcapping,
        logit_scale=given.logit_scale,
        # Each token's own value, which several teachers are logged by, costs a second walk.
        reduction="none" if several else "sum",
        logits_dtype=torch.float32,
        logits_budget=chunked.budget,
    )
    candidates = given.valid_candidate_mask
    teacher = given.teacher_target_logps.masked_fill(~candidates, -torch.inf)
    if several and hasattr(weight, "ds_id"):
        # ZeRO-3 has emptied it again when the backward pass walks it.
        weight = weight.clone()
    others = {"bias": given.lm_head_bias, "teacher_logprobs_topk": (teacher, given.target_ids)}
    out = chunked.solved(loss, hidden.to(weight.dtype), weight, **others)
    total = out.loss.sum()

    entropies = teachers_entropy(teacher, candidates, given.add_tail_bucket)
    by_teacher = total.new_zeros(3 * given.num_teachers)
    if several:
        mine = index == torch.arange(given.num_teachers, device=index.device)[:, None]
        each = torch.stack((torch.ones_like(entropies), out.loss.detach(), entropies), dim=-1)
        by_teacher = (mine[..., None] * each).sum(1).flatten()
    return total, total.detach(), out.metrics["entropy"] * hidden.shape[0], entropies.sum(), by_teacher


def teachers_entropy(logps: Tensor, candidates: Tensor, add_tail_bucket: bool) -> Tensor:
    """Of a teacher's distribution over its candidates (n, k), as TRL completes it: one bucket more, or a sum
    of 1."""
    if add_tail_bucket:
        logps, candidates = found_in_trl(f"{MODULE}:_add_tail_bucket")(logps, candidates)
    else:
        logps = logps - logps.logsumexp(-1, keepdim=True)
    return torch.nan_to_num(-logps.exp() * logps.masked_fill(~candidates, 0.0)).sum(-1)


Distillation = Adapter("trl:Distillation", patches={SYNC: Seam(chunked_divergence, True, True)})
AsyncDistillation = Adapter(
    f"{PACKAGE}:AsyncDistillation", patches={f"{MODULE}:_chunked_jsd_loss": Seam(chunked_jsd, True, True)}
)
