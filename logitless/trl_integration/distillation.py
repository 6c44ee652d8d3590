"""TRL's distillation trainers that project hidden states themselves: DistillationTrainer, which takes eight
products (four here), and AsyncDistillation, whose teacher is a server that returns its best tokens.

TRL's AsyncDistillation projects 256 rows at a time in fp32, each twice. `DistillationLoss` projects each row
once, within the budget.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless import DistillationLoss
from logitless.engine.head_view import HeadView
from logitless.errors import value_error
from logitless.models.heads import sharded_head_weight

from .adapter import Adapter, ChunkedLoss, Seam, base_of
from .versions import found_in_trl, newest_minor

SYNC = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
PACKAGE = "trl.experimental.async_distillation"
MODULE = f"{PACKAGE}.async_distillation_trainer"


def given_head(given: Any, prefix: str = "") -> HeadView:
    """The head from TRL's arguments whose names have this prefix."""
    parts = ("lm_head_weight", "lm_head_bias", "final_logit_softcapping", "logit_scale")
    weight, bias, softcap, scale = (getattr(given, prefix + part) for part in parts)
    return HeadView(weight, bias, softcap=softcap, logit_scale=scale, of_model=True)


def chunked_divergence(chunked: ChunkedLoss, stock: Callable, given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's `_chunked_divergence_loss`: (loss, sum of the student's entropies, number of counted tokens)."""
    hidden = given.student_hidden_states
    student = given_head(given, "student_")
    taught = given.teacher_hidden_states.to(hidden.device)
    teacher = given_head(given, "teacher_")
    loss = DistillationLoss(beta=given.beta, temperature=given.temperature, logits_budget=chunked.budget)
    others = {"mask": given.completion_mask, "num_items": given.num_items_in_batch}
    out = chunked.solved(loss, hidden, student, teacher_hidden=taught, teacher_weight=teacher, **others)
    count = given.completion_mask.sum()
    return out.loss, out.metrics["entropy"] * count, count


def chunked_jsd(chunked: ChunkedLoss, stock: Callable, given: Any) -> tuple[Tensor, ...]:
    """What TRL's `_chunked_jsd_loss` returns: sums of the loss, of its value for the log, of the student's
    entropies and of the teachers', and for each teacher how many tokens it scored and its share of the
    divergence and of the entropy."""
    hidden = given.hidden_valid
    head = given_head(given)
    index = given.teacher_id_idx
    several = index is not None
    loss = DistillationLoss(
        beta=given.beta,
        temperature=given.temperature,
        topk_mode="tail" if given.add_tail_bucket else "renormalize",
        # Each token's own value, which several teachers are logged by, costs a second projection.
        reduction="none" if several else "sum",
        logits_dtype=torch.float32,
        logits_budget=chunked.budget,
    )
    candidates = given.valid_candidate_mask
    teacher = given.teacher_target_logps.masked_fill(~candidates, -torch.inf)
    if several and hasattr(head.weight, "ds_id"):
        # ZeRO-3 has emptied it again when the backward pass reads it.
        head = head._replace(weight=head.weight.clone())
    served = (teacher, given.target_ids)
    out = chunked.solved(loss, hidden.to(head.dtype), head, teacher_logprobs_topk=served)
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


def no_plan(trainer: Any) -> None:
    """Refuse a tensor-parallel plan: its ranks must have the same tokens, and these trainers' ranks do
    not."""
    whole = sharded_head_weight(base_of(trainer, trainer.model)) is None
    if not whole:
        expected = f"no tensor-parallel plan in {type(trainer).__name__}"
        remedy = "shard it by FSDP2 or ZeRO-3"
        raise value_error("model", expected, "one", remedy)


Distillation = Adapter("trl:Distillation", (no_plan,), patches={SYNC: Seam(chunked_divergence, True, True)})
AsyncDistillation = Adapter(
    f"{PACKAGE}:AsyncDistillation",
    (newest_minor, no_plan),
    patches={f"{MODULE}:_chunked_jsd_loss": Seam(chunked_jsd, True, True)},
)
