"""TRL's distillation trainers that build the logits of student and teacher and compare them in their own
code: SDFT and SDPO, whose teacher is the student with more to read, IW-OPD, GOLD and ServerDistillation.

TRL's code makes rollouts, policy losses, importance ratios, metrics and the losses of served teachers from
log-probabilities that it picks out of deferred logits (4 products, 2 with a frozen head); what takes all of
two distributions, or the best ids of one, is `DistillationLoss`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.errors import check_choice, expect

from .adapter import Adapter, ChunkedLoss, Seam
from .deferred import DEFERRED, divergence, picked_logps, whole_models


def best_ids(whose: str, k: int | None, add_tail: bool) -> dict[str, Any]:
    """Options of a divergence over the k best ids alone."""
    return {"support": whose, "k": k, "topk_mode": "tail" if add_tail else "renormalize"}


# --- SDFT and SDPO

MODES = ("full_logits", "topk_logits", "sampled_token")


def known_mode(trainer: Any) -> None:
    """What TRL refuses in its first step, refused before."""
    mode, top_k = trainer.args.distillation_mode, trainer.args.distillation_topk
    check_choice("distillation_mode", mode, MODES)
    expected = "a number of tokens with distillation_mode='topk_logits'"
    expect(mode != "topk_logits" or top_k is not None, "distillation_topk", expected, top_k, "set it")


def counted_tokens(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """TRL's loss with the mask that its divergences are not told of."""
    found = given.distillation_logits
    chunked.mask = found.loss_mask.bool()
    if not chunked.mask.any():
        # TRL wants 0 with the student's graph: 0 times the sum of its logits.
        nothing = torch.full_like(found.completion_ids, -100)
        found = replace(found, student_logits=found.student_logits.logps(nothing))
    return stock(distillation_logits=found)


def token_divergences(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """(B, T), of the whole vocabulary or of the student's best ids."""
    options = {"reduction": "none", "beta": float(given.distillation_alpha)}
    if hasattr(given, "distillation_topk"):
        options |= best_ids("student", given.distillation_topk, given.distillation_add_tail)
    return divergence(given.student_logits, given.teacher_logits, chunked.mask, **options).loss


def self_distilling(package: str, name: str) -> Adapter:
    module = f"trl.experimental.{package}"
    trainer = f"{module}.{package}_trainer"
    return Adapter(
        f"{module}:{name}",
        checks=(known_mode, whole_models),
        patches={
            "_compute_self_distillation_loss": Seam(counted_tokens, replaces=False),
            f"{trainer}:compute_full_logit_self_distillation_loss": Seam(token_divergences),
            f"{trainer}:compute_topk_self_distillation_loss": Seam(token_divergences),
            f"{trainer}:selective_log_softmax": Seam(picked_logps),
            f"{module}.loss_utils:selective_log_softmax": Seam(picked_logps),
        },
        during=("compute_loss", "_compute_rollout_logps"),
        **DEFERRED,
    )


SDFT, SDPO = self_distilling("sdft", "SDFT"), self_distilling("sdpo", "SDPO")


# --- IW-OPD, GOLD and ServerDistillation


def chunked_jsd(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """TRL's `generalized_jsd_loss`; GOLD's has no `top_k`."""
    student, teacher = given.student_logits / given.temperature, given.teacher_logits / given.temperature
    options, top_k = {"beta": float(given.beta)}, getattr(given, "top_k", 0)
    if 0 < top_k < student.shape[-1]:
        whose = {0.0: "teacher", 1.0: "student"}.get(options["beta"], "union")
        options |= best_ids(whose, top_k, given.add_tail)
    return divergence(student, teacher, given.labels != -100, given.num_items_in_batch, **options).loss


def one_vocabulary(trainer: Any) -> None:
    expected, remedy = "False with use_chunked_loss=True", "it sorts whole distributions: leave the flag out"
    expect(not trainer.args.use_uld_loss, "use_uld_loss", expected, True, remedy)


GOLD = Adapter(
    "trl.experimental.gold:GOLD",
    checks=(one_vocabulary, whole_models),
    patches={"generalized_jsd_loss": Seam(chunked_jsd, train=True, evaluate=True)},
    **DEFERRED,
)
IWOPD = Adapter(
    "trl.experimental.iw_opd:IWOPD",
    checks=(whole_models,),
    patches={"generalized_jsd_loss": Seam(chunked_jsd)},
    predicts=True,
    **DEFERRED,
)
# All that it reads are log-probabilities of the ids that its server names.
ServerDistillation = Adapter(
    "trl.experimental.server_distillation:ServerDistillation",
    checks=(whole_models,),
    predicts=True,
    **DEFERRED,
)
