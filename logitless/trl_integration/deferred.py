"""TRL's trainers whose own code reads a model's logits: ORPO, CPO (SimPO, AlphaPO), TPO, OnlineDPO and A2PO
those of sequences, GKD, GOLD, IW-OPD, SDFT, SDPO and ServerDistillation those of student and teacher.

TRL's code computes losses, ratios and metrics from log-probabilities that it gathers from `PickedLogits`.
Each gather projects its tokens (4 products, 2 with a frozen head, 1 without gradients); a trainer that
gathers twice projects them twice. A cross-entropy is computed by `CrossEntropyLoss`; a function of two
distributions, or of the best ids of one, by `DistillationLoss`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from logitless import DistillationLoss
from logitless.errors import check_choice, value_error
from logitless.losses.base import LossOutput

from .adapter import Adapter, ChunkedLoss, Seam
from .head import PickedLogits, picked, picking

# What the adapters of all of them share
PICKED = {"heads": dict.fromkeys(("model", "teacher_model", "ref_model"), picked), "around": picking}


def picked_logps(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """TRL's `selective_log_softmax`."""
    return given.logits.statistics(given.index)["logps"]


# --- ORPO, CPO, TPO, OnlineDPO and A2PO


def sequence_logps(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """TRL's `get_batch_logps`, which would project the prompts too."""
    labels = given.labels[:, 1:]
    logps = given.logits[:, :-1].statistics(labels)["logps"].sum(-1)
    return logps / (labels != -100).sum(-1) if given.average_log_prob else logps


def logps_and_entropy(chunked: ChunkedLoss, stock: Callable, given: Any) -> tuple[Tensor, Tensor]:
    """TRL's `selective_log_softmax_and_entropy`."""
    ids = given.index.masked_fill(given.row_mask == 0, -100)
    statistics = given.logits.statistics(ids, entropy="metric")
    return statistics["logps"], statistics["entropy"]


PAIRS = {
    "patches": {"get_batch_logps": Seam(sequence_logps, train=True, evaluate=True)},
    "during": ("concatenated_forward",),
    **PICKED,
}
ORPO = Adapter("trl.experimental.orpo:ORPO", **PAIRS)
CPO = Adapter("trl.experimental.cpo:CPO", **PAIRS)
TPO_SEAM = "trl.experimental.tpo.tpo_trainer:selective_log_softmax_and_entropy"
TPO_LOGPS = {"patches": {TPO_SEAM: Seam(logps_and_entropy, True, True)}, "during": ("_compute_loss",)}
TPO = Adapter("trl.experimental.tpo:TPO", predicts=True, **TPO_LOGPS, **PICKED)
A2PO_SEAM = "trl.experimental.a2po.a2po_trainer:selective_log_softmax"
A2PO_LOGPS = {"patches": {A2PO_SEAM: Seam(picked_logps, True, True)}, "during": ("_get_sequence_logps",)}
A2PO = Adapter("trl.experimental.a2po:A2PO", **A2PO_LOGPS, **PICKED)
# Its evaluation computes no loss.
ONLINE = {"during": ("_forward",), "evaluates": False}
OnlineDPO = Adapter("trl.experimental.online_dpo:OnlineDPO", **ONLINE, **PICKED)


# --- GKD, GOLD, IW-OPD and ServerDistillation


def divergence(
    student: PickedLogits, teacher: PickedLogits, mask: Tensor, num_items: Any = None, **options: Any
) -> LossOutput:
    """`DistillationLoss` of the tokens in `mask` (B, T)."""
    loss = DistillationLoss(logits_budget=student.chunked.budget, **options)
    taught = {"teacher_hidden": teacher.hidden.to(student.device), "teacher_weight": teacher.current_view()}
    given = {"mask": mask, "num_items": num_items, **taught}
    return student.chunked.solved(loss, student.hidden, student.current_view(), **given)


def best_ids(whose: str, k: int, add_tail: bool) -> dict[str, Any]:
    """Options of `DistillationLoss` for a divergence over the k best ids alone."""
    return {"support": whose, "k": k, "topk_mode": "tail" if add_tail else "renormalize"}


def chunked_jsd(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """TRL's `generalized_jsd_loss`; only IW-OPD's has `top_k`."""
    student, teacher = given.student_logits / given.temperature, given.teacher_logits / given.temperature
    options = {"beta": float(given.beta)}
    top_k = getattr(given, "top_k", 0)
    if 0 < top_k < student.shape[-1]:
        whose = {0.0: "teacher", 1.0: "student"}.get(options["beta"], "union")
        options |= best_ids(whose, top_k, given.add_tail)
    return divergence(student, teacher, given.labels != -100, given.num_items_in_batch, **options).loss


def one_vocabulary(trainer: Any) -> None:
    if trainer.args.use_uld_loss:
        expected = "False with use_chunked_loss=True"
        remedy = "it sorts whole distributions: leave the flag out"
        raise value_error("use_uld_loss", expected, True, remedy)


ALWAYS = {"generalized_jsd_loss": Seam(chunked_jsd, train=True, evaluate=True)}
SOMETIMES = {"generalized_jsd_loss": Seam(chunked_jsd)}

GKD = Adapter("trl.experimental.gkd:GKD", patches=ALWAYS, predicts=True, **PICKED)
GOLD = Adapter("trl.experimental.gold:GOLD", (one_vocabulary,), patches=ALWAYS, **PICKED)
IWOPD = Adapter("trl.experimental.iw_opd:IWOPD", patches=SOMETIMES, predicts=True, **PICKED)
# All that it reads are log-probabilities of the ids that its server names.
SERVER = "trl.experimental.server_distillation:ServerDistillation"
ServerDistillation = Adapter(SERVER, predicts=True, **PICKED)


# --- SDFT and SDPO

MODES = ("full_logits", "topk_logits", "sampled_token")


def known_mode(trainer: Any) -> None:
    """Refuse before training a mode that TRL refuses in its first step."""
    mode, top_k = trainer.args.distillation_mode, trainer.args.distillation_topk
    check_choice("distillation_mode", mode, MODES)
    if mode == "topk_logits" and top_k is None:
        expected = "a number of tokens with distillation_mode='topk_logits'"
        raise value_error("distillation_topk", expected, top_k, "set it")


def counted_tokens(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """Call TRL's loss and keep its mask, which TRL does not pass on to its divergences."""
    outputs = given.distillation_logits
    chunked.mask = outputs.loss_mask.bool()
    if not chunked.mask.any():
        # TRL takes 0 times the sum of the student's logits, for the graph: any sum of them will do.
        outputs = replace(
            outputs,
            student_logits=outputs.student_logits.statistics(outputs.completion_ids)["logps"],
        )
    return stock(distillation_logits=outputs)


def token_divergences(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """(B, T) divergences, over the whole vocabulary or over the student's best ids."""
    options = {"reduction": "none", "beta": float(given.distillation_alpha)}
    if hasattr(given, "distillation_topk"):
        options |= best_ids("student", given.distillation_topk, given.distillation_add_tail)
    return divergence(given.student_logits, given.teacher_logits, chunked.mask, **options).loss


def self_distilling(package: str, name: str) -> Adapter:
    module = f"trl.experimental.{package}"
    trainer = f"{module}.{package}_trainer"
    return Adapter(
        f"{module}:{name}",
        checks=(known_mode,),
        patches={
            "_compute_self_distillation_loss": Seam(counted_tokens, replaces=False),
            f"{trainer}:compute_full_logit_self_distillation_loss": Seam(token_divergences),
            f"{trainer}:compute_topk_self_distillation_loss": Seam(token_divergences),
            f"{trainer}:selective_log_softmax": Seam(picked_logps),
            f"{module}.loss_utils:selective_log_softmax": Seam(picked_logps),
        },
        during=("compute_loss", "_compute_rollout_logps"),
        **PICKED,
    )


SDFT, SDPO = self_distilling("sdft", "SDFT"), self_distilling("sdpo", "SDPO")
