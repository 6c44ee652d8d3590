"""TRL's distillation trainers that project hidden states themselves: DistillationTrainer, which takes six
products, or eight with a beta between 0 and 1 (four here), and AsyncDistillation, whose teacher is a server
that returns its top-k tokens.

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

from .adapter import EVERY_STEP, Adapter, ChunkedLossSession, Replacement, unwrapped_base
from .versions import import_from_trl, require_newest_minor

DIVERGENCE_FUNCTION = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
ASYNC_PACKAGE = "trl.experimental.async_distillation"
ASYNC_MODULE = f"{ASYNC_PACKAGE}.async_distillation_trainer"


def make_head_view(arguments: Any, prefix: str = "") -> HeadView:
    """The head in the arguments of TRL's function whose names have this prefix."""
    return HeadView(
        getattr(arguments, f"{prefix}lm_head_weight"),
        getattr(arguments, f"{prefix}lm_head_bias"),
        softcap=getattr(arguments, f"{prefix}final_logit_softcapping"),
        logit_scale=getattr(arguments, f"{prefix}logit_scale"),
        of_model=True,
    )


def compute_divergence(
    session: ChunkedLossSession, original: Callable, arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Replacement of TRL's `_chunked_divergence_loss`.

    Returns:
        (loss, sum of the student's entropies, number of tokens in the completion mask)
    """
    student_hidden = arguments.student_hidden_states
    loss = DistillationLoss(
        beta=arguments.beta, temperature=arguments.temperature, logits_budget=session.logits_budget
    )
    output = session.compute(
        loss,
        student_hidden,
        make_head_view(arguments, "student_"),
        teacher_hidden=arguments.teacher_hidden_states.to(student_hidden.device),
        teacher_weight=make_head_view(arguments, "teacher_"),
        mask=arguments.completion_mask,
        num_items=arguments.num_items_in_batch,
    )
    num_tokens = arguments.completion_mask.sum()
    return output.loss, output.metrics["entropy"] * num_tokens, num_tokens


def compute_topk_jsd(session: ChunkedLossSession, original: Callable, arguments: Any) -> tuple[Tensor, ...]:
    """Replacement of TRL's `_chunked_jsd_loss`.

    Returns:
        Sums over the tokens of the loss, of its detached value, of the student's entropies and of the
        teachers' entropies; and (num_teachers * 3,), for each teacher its number of tokens, its part of the
        loss and its part of the entropies.
    """
    hidden = arguments.hidden_valid
    head = make_head_view(arguments)
    teacher_index = arguments.teacher_id_idx
    has_several_teachers = teacher_index is not None
    loss = DistillationLoss(
        beta=arguments.beta,
        temperature=arguments.temperature,
        topk_mode="tail" if arguments.add_tail_bucket else "renormalize",
        # Per-token losses, which the metrics of several teachers need, cost a second projection.
        reduction="none" if has_several_teachers else "sum",
        logits_dtype=torch.float32,
        logits_budget=session.logits_budget,
    )
    candidate_mask = arguments.valid_candidate_mask
    teacher_logps = arguments.teacher_target_logps.masked_fill(~candidate_mask, -torch.inf)
    if has_several_teachers and hasattr(head.weight, "ds_id"):
        # DeepSpeed ZeRO-3 has released the weight again when the backward pass reads it.
        head = head._replace(weight=head.weight.clone())
    output = session.compute(
        loss, hidden.to(head.dtype), head, teacher_logprobs_topk=(teacher_logps, arguments.target_ids)
    )
    total = output.loss.sum()

    teacher_entropies = compute_teacher_entropies(teacher_logps, candidate_mask, arguments.add_tail_bucket)
    by_teacher = total.new_zeros(3 * arguments.num_teachers)
    if has_several_teachers:
        teacher_ids = torch.arange(arguments.num_teachers, device=teacher_index.device)
        is_of_teacher = teacher_index == teacher_ids[:, None]
        per_token = torch.stack(
            (torch.ones_like(teacher_entropies), output.loss.detach(), teacher_entropies), dim=-1
        )
        by_teacher = (is_of_teacher[..., None] * per_token).sum(1).flatten()
    student_entropy = output.metrics["entropy"] * hidden.shape[0]
    return total, total.detach(), student_entropy, teacher_entropies.sum(), by_teacher


def compute_teacher_entropies(logps: Tensor, candidate_mask: Tensor, add_tail_bucket: bool) -> Tensor:
    """Entropies (n,) of the distributions over the candidates (n, k), which are completed as in TRL: by a
    bucket for the remaining probability, or by normalization."""
    if add_tail_bucket:
        logps, candidate_mask = import_from_trl(f"{ASYNC_MODULE}:_add_tail_bucket")(logps, candidate_mask)
    else:
        logps = logps - logps.logsumexp(-1, keepdim=True)
    return torch.nan_to_num(-logps.exp() * logps.masked_fill(~candidate_mask, 0.0)).sum(-1)


def check_no_tensor_parallel(trainer: Any) -> None:
    """Raise ValueError for a tensor-parallel plan. Its ranks must have the same tokens; in these trainers
    each rank has its own."""
    if sharded_head_weight(unwrapped_base(trainer, trainer.model)) is not None:
        expected = f"no tensor-parallel plan in {type(trainer).__name__}"
        remedy = "shard it by FSDP2 or ZeRO-3"
        raise value_error("model", expected, "one", remedy)


def run_original(session: ChunkedLossSession, original: Callable, arguments: Any) -> Any:
    """Replacement of TRL's `compute_loss`, which tells the dispatchers whose loss is computed: the arguments
    of the divergence functions do not."""
    return original()


OWN_LOSS = Replacement(run_original, calls_original=True)

Distillation = Adapter(
    "trl:Distillation",
    checks=(check_no_tensor_parallel,),
    replacements={
        "trl.trainer.distillation_trainer:DistillationTrainer.compute_loss": OWN_LOSS,
        DIVERGENCE_FUNCTION: Replacement(compute_divergence, EVERY_STEP),
    },
)
AsyncDistillation = Adapter(
    f"{ASYNC_PACKAGE}:AsyncDistillation",
    checks=(require_newest_minor, check_no_tensor_parallel),
    replacements={
        f"{ASYNC_MODULE}:AsyncDistillationTrainer.compute_loss": OWN_LOSS,
        f"{ASYNC_MODULE}:_chunked_jsd_loss": Replacement(compute_topk_jsd, EVERY_STEP),
    },
)
