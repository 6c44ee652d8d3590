"""TRL's distillation from another model, beside GKD and Distillation: IW-OPD, GOLD, and ServerDistillation,
whose teacher is served.

TRL's code picks tokens and log-probabilities out of deferred logits; the divergences are ours.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.errors import expect

from .adapter import Adapter, ChunkedLoss, Seam
from .deferred import DEFERRED, whole_models
from .support_divergence import divergence


def topk_mode(add_tail: bool) -> str:
    return "tail" if add_tail else "renormalize"


def chunked_jsd(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """TRL's `generalized_jsd_loss`; GOLD's has no `top_k`."""
    beta, top_k = float(given.beta), getattr(given, "top_k", 0)
    options = {"beta": beta, "given": {"num_items": given.num_items_in_batch}}
    if 0 < top_k < given.student_logits.weight.shape[0]:
        best = {0.0: ("teacher",), 1.0: ("student",)}.get(beta, ("teacher", "student"))
        options |= {"support": best, "top_k": top_k, "topk_mode": topk_mode(given.add_tail)}
    student, labels = given.student_logits / given.temperature, given.labels
    return divergence(student, given.teacher_logits, labels, labels != -100, **options).loss


def sparse_top_1(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """Over the teacher's best token and the sampled one, whose log-probabilities a server gave."""
    values, ids = given.reverse_teacher_logprobs, given.reverse_token_ids
    if chunked.trainer.beta == 1:
        return served_loss(chunked, given, values[..., None], ids[..., None])
    # An id counts once.
    values = values.masked_fill(ids == given.teacher_top1_token_ids, -torch.inf)
    values = torch.stack((given.teacher_top1_logprobs, values), -1)
    return served_loss(chunked, given, values, torch.stack((given.teacher_top1_token_ids, ids), -1))


def server_forward_kl(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    served = given.teacher_result
    return served_loss(chunked, given, served["topk_logprobs"], served["topk_token_ids"])


def served_loss(chunked: ChunkedLoss, given: Any, logps: Tensor, ids: Tensor) -> Tensor:
    trainer, labels = chunked.trainer, given.labels
    options = {"beta": float(trainer.beta), "topk_mode": topk_mode(trainer.loss_add_tail)}
    options["given"] = {"num_items": getattr(given, "num_items_in_batch", None)}
    return divergence(given.student_log_probs, (logps, ids), labels, labels != -100, **options).loss


def local_sparse_top_1(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    trainer = chunked.trainer
    reverse = "student" if trainer.reverse_kl_top_1_mode == "argmax" else "target"
    return divergence(
        given.student_logits / trainer.temperature,
        given.teacher_logits,
        given.completion_tokens,
        given.labels != -100,
        given={"num_items": given.num_items_in_batch},
        support=(reverse,) if trainer.beta == 1 else ("teacher", reverse),
        beta=float(trainer.beta),
        topk_mode=topk_mode(trainer.loss_add_tail),
    ).loss


def one_vocabulary(trainer: Any) -> None:
    expected, remedy = "False with use_chunked_loss=True", "it sorts whole distributions: leave the flag out"
    expect(not trainer.args.use_uld_loss, "use_uld_loss", expected, True, remedy)


SERVED = {
    "_compute_sparse_top_1_divergence_loss": Seam(sparse_top_1),
    "_compute_server_forward_kl_loss": Seam(server_forward_kl),
}
LOCAL = {
    "generalized_jsd_loss": Seam(chunked_jsd),
    "_compute_local_sparse_top_1_divergence_loss": Seam(local_sparse_top_1),
}
SERVER = "trl.experimental.server_distillation:ServerDistillation"
IW_OPD, ONE = "trl.experimental.iw_opd:IWOPD", (one_vocabulary, whole_models)
JSD = {"generalized_jsd_loss": Seam(chunked_jsd, train=True, evaluate=True)}

ServerDistillation = Adapter(SERVER, (whole_models,), patches=SERVED, predicts=True, **DEFERRED)
IWOPD = Adapter(IW_OPD, (whole_models,), patches=SERVED | LOCAL, predicts=True, **DEFERRED)
GOLD = Adapter("trl.experimental.gold:GOLD", ONE, patches=JSD, **DEFERRED)
