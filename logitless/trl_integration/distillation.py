"""TRL's distillation from models that are here: GKD, which builds the full logits of student and teacher,
DistillationTrainer, which takes eight products for what takes four, and AsyncDistillation, whose teacher is
behind a server and names its best tokens.

TRL's AsyncDistillation projects 256 rows at a time in fp32, each twice; here it is `DistillationLoss` under
the budget, which projects each row once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from logitless import DistillationLoss, JSDLoss
from logitless.engine.head_view import HeadView

from .adapter import Adapter, ChunkedLoss, Seam, base_of
from .versions import found_in_trl

# --- DistillationTrainer


def chunked_divergence(chunked: ChunkedLoss, stock: Callable, given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What TRL's `_chunked_divergence_loss` returns: the loss, the sum of the student's entropies, and how
    many tokens count."""
    loss = JSDLoss(
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


SEAM = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
Distillation = Adapter(
    "trl:Distillation", patches={SEAM: Seam(chunked_divergence, train=True, evaluate=True)}
)


# --- GKD


def gkd_heads(chunked: ChunkedLoss) -> Iterator[Callable[[], None]]:
    trainer = chunked.trainer
    student, teacher = base_of(trainer, trainer.model), base_of(trainer, trainer.teacher_model)

    def teach(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        """Not a score: what the student learns from, as the teacher's own forward pass has it, with its
        autocast and its gathered shards."""
        chunked.taught = {"teacher_hidden": hidden, "teacher_weight": head}
        return {"log_probs": hidden.new_zeros(()), "label_mask": hidden.new_ones(())}

    def score(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        # The label at the next position, as the student is to predict it; the last position has none.
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        chunked.taught["teacher_hidden"] = chunked.taught["teacher_hidden"].to(hidden.device)
        loss = JSDLoss(beta=trainer.beta, logits_budget=chunked.budget)
        out = chunked.solved(loss, hidden, head, targets, **chunked.taught)
        return {"log_probs": -out.loss, "label_mask": (targets != -100).sum()}

    yield chunked.attach(student, score)
    yield chunked.attach(teacher, teach)


def gkd_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    teacher = chunked.trainer.teacher_model
    inputs = {name: given.inputs[name] for name in ("input_ids", "attention_mask", "labels")}
    teacher.eval()
    with torch.no_grad():
        teacher(**inputs, fused_lm_head=True)
    chunked.taught["num_items"] = getattr(given, "num_items_in_batch", None)
    out = given.model(**inputs, fused_lm_head=True)
    chunked.taught = None
    return (-out.log_probs, out) if getattr(given, "return_outputs", False) else -out.log_probs


GKD = Adapter(
    "trl.experimental.gkd:GKD",
    heads=gkd_heads,
    patches={"compute_loss": Seam(gkd_loss, train=True, evaluate=True)},
    predicts=True,
)


# --- AsyncDistillation

ASYNC = "trl.experimental.async_distillation"
ASYNC_MODULE = f"{ASYNC}.async_distillation_trainer"


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
    served = (teacher, given.target_ids)
    if several and hasattr(weight, "ds_id"):
        # ZeRO-3 has emptied it again when the backward pass walks it.
        weight = weight.clone()
    given_head = {"bias": given.lm_head_bias, "teacher_logprobs_topk": served}
    out = chunked.solved(loss, hidden.to(weight.dtype), weight, **given_head)
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
        logps, candidates = found_in_trl(f"{ASYNC_MODULE}:_add_tail_bucket")(logps, candidates)
    else:
        logps = logps - logps.logsumexp(-1, keepdim=True)
    return torch.nan_to_num(-logps.exp() * logps.masked_fill(~candidates, 0.0)).sum(-1)


AsyncDistillation = Adapter(
    f"{ASYNC}:AsyncDistillation",
    patches={f"{ASYNC_MODULE}:_chunked_jsd_loss": Seam(chunked_jsd, train=True, evaluate=True)},
)
