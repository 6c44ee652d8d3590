"""TRL's trainers that read a model's logits themselves: ORPO, CPO (SimPO, AlphaPO), TPO, OnlineDPO and A2PO
those of sequences, GKD, GOLD, IW-OPD, SDFT, SDPO and ServerDistillation those of student and teacher.

TRL's code computes losses, ratios and metrics from log-probabilities that it gathers from
`GatherableLogits`. Each gather projects its tokens (4 products, 2 with a frozen head, 1 without gradients); a
trainer that gathers twice projects them twice. A cross-entropy is computed by `CrossEntropyLoss`; a function
of two distributions, or of the top-k ids of one, by `DistillationLoss`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless import DistillationLoss
from logitless.errors import check_choice, message, value_error, warn
from logitless.losses.base import LossOutput

from .adapter import EVERY_STEP, MODEL_ATTRIBUTES, Adapter, ChunkedLossSession, Replacement
from .head import GatherableLogits, attach_gatherable_logits, return_gatherable_logits

# Options that the adapters of this file share
GATHERABLE = {
    "attachments": dict.fromkeys(MODEL_ATTRIBUTES, attach_gatherable_logits),
    "context": return_gatherable_logits,
}


def gather_logps(session: ChunkedLossSession, original: Callable, arguments: Any) -> Tensor:
    """Replacement of TRL's `selective_log_softmax`."""
    return arguments.logits.statistics(arguments.index)["logps"]


# --- ORPO, CPO, TPO, OnlineDPO and A2PO


def compute_sequence_logps(session: ChunkedLossSession, original: Callable, arguments: Any) -> Tensor:
    """Replacement of TRL's `get_batch_logps`, which would project the prompts too."""
    if isinstance(arguments.logits, Tensor):
        return original()  # of another model
    labels = arguments.labels[:, 1:]
    lengths = (labels != -100).sum(-1)
    if arguments.average_log_prob and not lengths.all():
        labels, lengths = _keep_nan(session, labels, lengths)
    logps = arguments.logits[:, :-1].statistics(labels)["logps"].sum(-1)
    return logps / lengths if arguments.average_log_prob else logps


def _keep_nan(session: ChunkedLossSession, labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return labels (2 * pairs, T) and lengths (2 * pairs,) with which the mean log-probability of a sequence
    without tokens, and every gradient, are NaN, as in TRL. Its tokens are ignored, and would have no
    gradient: one of them is not."""
    is_empty = lengths == 0
    if not session.has_warned_of_empty_pair:
        session.has_warned_of_empty_pair = True
        pairs = (is_empty.nonzero()[:, 0] % (len(labels) // 2)).unique().tolist()
        step = session.trainer.state.global_step
        expected = "tokens in every completion"
        got = f"none for pair {', '.join(map(str, pairs))} of the batch of step {step}"
        remedy = "loss and gradients are NaN, as in TRL: increase max_length, or filter out long prompts"
        warn(message("max_length", expected, got, remedy), UserWarning)
    labels = labels.clone()
    labels[is_empty, 0] = 0
    return labels, lengths.to(torch.float32).masked_fill(is_empty, torch.nan)


def compute_logps_and_entropy(
    session: ChunkedLossSession, original: Callable, arguments: Any
) -> tuple[Tensor, Tensor]:
    """Replacement of TRL's `selective_log_softmax_and_entropy`."""
    ids = arguments.index.masked_fill(arguments.row_mask == 0, -100)
    statistics = arguments.logits.statistics(ids, entropy="metric")
    return statistics["logps"], statistics["entropy"]


SEQUENCE_LOGPS = {
    "replacements": {"get_batch_logps": Replacement(compute_sequence_logps, EVERY_STEP)},
    "active_during": ("concatenated_forward",),
}
ORPO = Adapter("trl.experimental.orpo:ORPO", **SEQUENCE_LOGPS, **GATHERABLE)
CPO = Adapter("trl.experimental.cpo:CPO", **SEQUENCE_LOGPS, **GATHERABLE)
TPO = Adapter(
    "trl.experimental.tpo:TPO",
    replacements={
        "trl.experimental.tpo.tpo_trainer:selective_log_softmax_and_entropy": Replacement(
            compute_logps_and_entropy, EVERY_STEP, carrier="logits"
        )
    },
    active_during=("_compute_loss",),
    needs_original_to_predict=True,
    **GATHERABLE,
)
A2PO = Adapter(
    "trl.experimental.a2po:A2PO",
    replacements={
        "trl.experimental.a2po.a2po_trainer:selective_log_softmax": Replacement(
            gather_logps, EVERY_STEP, carrier="logits"
        )
    },
    active_during=("_get_sequence_logps",),
    **GATHERABLE,
)
OnlineDPO = Adapter(
    "trl.experimental.online_dpo:OnlineDPO",
    active_during=("_forward",),
    has_evaluation_loss=False,
    **GATHERABLE,
)


# --- GKD, GOLD, IW-OPD and ServerDistillation


def deferred_divergence(
    student: GatherableLogits, teacher: GatherableLogits, mask: Tensor, num_items: Any = None, **options: Any
) -> LossOutput:
    """Compute `DistillationLoss` with these options over the tokens in `mask` (B, T)."""
    loss = DistillationLoss(logits_budget=student.session.logits_budget, **options)
    return student.session.compute(
        loss,
        student.hidden,
        student.current_view(),
        teacher_hidden=teacher.hidden.to(student.device),
        teacher_weight=teacher.current_view(),
        mask=mask,
        num_items=num_items,
    )


def topk_options(support: str, k: int, add_tail: bool) -> dict[str, Any]:
    """Options of `DistillationLoss` for a divergence over the top-k ids of the student, the teacher or
    both."""
    return {"support": support, "k": k, "topk_mode": "tail" if add_tail else "renormalize"}


def compute_jsd(session: ChunkedLossSession, original: Callable, arguments: Any) -> Tensor:
    """Replacement of TRL's `generalized_jsd_loss`; IW-OPD's alone has `top_k`."""
    student = arguments.student_logits / arguments.temperature
    teacher = arguments.teacher_logits / arguments.temperature
    beta = float(arguments.beta)
    options = {"beta": beta}
    top_k = getattr(arguments, "top_k", 0)
    if 0 < top_k < student.shape[-1]:
        support = {0.0: "teacher", 1.0: "student"}.get(beta, "union")
        options |= topk_options(support, top_k, arguments.add_tail)
    mask = arguments.labels != -100
    return deferred_divergence(student, teacher, mask, arguments.num_items_in_batch, **options).loss


def check_no_uld_loss(trainer: Any) -> None:
    if trainer.args.use_uld_loss:
        expected = "False with use_chunked_loss=True"
        remedy = "it sorts whole distributions: leave the flag out"
        raise value_error("use_uld_loss", expected, True, remedy)


REQUIRED_JSD = {"generalized_jsd_loss": Replacement(compute_jsd, EVERY_STEP)}
# IW-OPD computes some of its losses without it.
OPTIONAL_JSD = {"generalized_jsd_loss": Replacement(compute_jsd)}

GKD = Adapter(
    "trl.experimental.gkd:GKD", replacements=REQUIRED_JSD, needs_original_to_predict=True, **GATHERABLE
)
GOLD = Adapter(
    "trl.experimental.gold:GOLD", checks=(check_no_uld_loss,), replacements=REQUIRED_JSD, **GATHERABLE
)
IWOPD = Adapter(
    "trl.experimental.iw_opd:IWOPD", replacements=OPTIONAL_JSD, needs_original_to_predict=True, **GATHERABLE
)
# It only gathers log-probabilities, at the ids that its server returns.
ServerDistillation = Adapter(
    "trl.experimental.server_distillation:ServerDistillation", needs_original_to_predict=True, **GATHERABLE
)


# --- SDFT and SDPO

DISTILLATION_MODES = ("full_logits", "topk_logits", "sampled_token")


def check_distillation_mode(trainer: Any) -> None:
    """Raise ValueError before training for a mode that TRL refuses in its first step."""
    mode = trainer.args.distillation_mode
    top_k = trainer.args.distillation_topk
    check_choice("distillation_mode", mode, DISTILLATION_MODES)
    if mode == "topk_logits" and top_k is None:
        expected = "a number of tokens with distillation_mode='topk_logits'"
        raise value_error("distillation_topk", expected, top_k, "set it")


def compute_self_distillation_loss(session: ChunkedLossSession, original: Callable, arguments: Any) -> Tensor:
    """Call TRL's loss, with its mask in the student's logits for `compute_token_divergences`, which does not
    receive it."""
    outputs = arguments.distillation_logits
    mask = outputs.loss_mask.bool()
    if mask.any():
        student_logits = replace(outputs.student_logits, loss_mask=mask)
    else:
        # TRL returns 0 times the sum of the student's logits, which keeps the graph: any sum of them will do.
        student_logits = outputs.student_logits.statistics(outputs.completion_ids)["logps"]
    return original(distillation_logits=replace(outputs, student_logits=student_logits))


def compute_token_divergences(session: ChunkedLossSession, original: Callable, arguments: Any) -> Tensor:
    """Replacement of TRL's (B, T) divergences over the whole vocabulary or over the student's top-k ids."""
    options = {"reduction": "none", "beta": float(arguments.distillation_alpha)}
    if hasattr(arguments, "distillation_topk"):
        options |= topk_options("student", arguments.distillation_topk, arguments.distillation_add_tail)
    student = arguments.student_logits
    teacher = arguments.teacher_logits
    return deferred_divergence(student, teacher, student.loss_mask, **options).loss


def make_self_distillation_adapter(package: str, name: str) -> Adapter:
    module = f"trl.experimental.{package}"
    trainer_module = f"{module}.{package}_trainer"
    of_divergence = Replacement(compute_token_divergences, carrier="student_logits")
    of_logps = Replacement(gather_logps, carrier="logits")
    return Adapter(
        f"{module}:{name}",
        checks=(check_distillation_mode,),
        replacements={
            "_compute_self_distillation_loss": Replacement(
                compute_self_distillation_loss, calls_original=True
            ),
            f"{trainer_module}:compute_full_logit_self_distillation_loss": of_divergence,
            f"{trainer_module}:compute_topk_self_distillation_loss": of_divergence,
            f"{trainer_module}:selective_log_softmax": of_logps,
            f"{module}.loss_utils:selective_log_softmax": of_logps,
        },
        active_during=("compute_loss", "_compute_rollout_logps"),
        **GATHERABLE,
    )


SDFT = make_self_distillation_adapter("sdft", "SDFT")
SDPO = make_self_distillation_adapter("sdpo", "SDPO")
