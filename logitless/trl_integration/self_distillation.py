"""TRL's SDFT and SDPO, whose teacher is the student with more to read: nobody builds logits, student or
teacher.

TRL's code makes the rollouts, the policy loss, the metrics and the sampled-token loss of a served teacher
from deferred logits; the divergences, whose weight per token is known beforehand, are one walk over the heads
(4 products, 3 with a frozen head).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.errors import check_choice, expect

from .adapter import Adapter, ChunkedLoss, Seam
from .deferred import DEFERRED, DeferredLogits, picked_logps, whole_models
from .support_divergence import SampledTokenDistillation, divergence

MODES = ("full_logits", "topk_logits", "sampled_token")


def known_mode(trainer: Any) -> None:
    """What TRL refuses in its first step, refused before."""
    mode, top_k = trainer.args.distillation_mode, trainer.args.distillation_topk
    check_choice("distillation_mode", mode, MODES)
    expected = "a number of tokens with distillation_mode='topk_logits'"
    expect(mode != "topk_logits" or top_k is not None, "distillation_topk", expected, top_k, "set it")


def forward_logits(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    # A served teacher has no model here.
    return None if given.model is None else stock()


def distillation_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    return chunked_loss(chunked, given, given.distillation_logits, given.distillation_logits.teacher_logits)


def chunked_loss(chunked: ChunkedLoss, given: Any, found: Any, teacher: Any) -> Tensor:
    """The mean over sequences of each one's mean over tokens, and TRL's log of the mean over all tokens."""
    trainer, inputs, args = chunked.trainer, given.inputs, chunked.trainer.args
    ids, student, mask = inputs["completion_ids"], found.student_logits, found.loss_mask
    more = {"token_weights": mask / mask.sum(-1, keepdim=True).clamp(min=1) / mask.shape[0]}
    clip = float("inf")
    if args.distillation_is_clip is not None and inputs.get("old_per_token_logps") is not None:
        more["old_logps"], clip = inputs["old_per_token_logps"], args.distillation_is_clip
    if args.distillation_mode == "sampled_token":
        loss = SampledTokenDistillation(reduction="sum", clip=clip, **student.head)
        targets, taught = torch.where(mask.bool(), ids, -100), teacher.logps(ids).to(student.hidden.device)
        out = loss(student.hidden, student.weight, targets, bias=student.bias, teacher_logps=taught, **more)
        chunked.note(out.plan)
    else:
        options = {"reduction": "sum", "beta": float(args.distillation_alpha), "clip": clip}
        if args.distillation_mode == "topk_logits":
            options["topk_mode"] = "tail" if args.distillation_add_tail else "renormalize"
            if isinstance(teacher, DeferredLogits):
                options |= {"support": ("student",), "top_k": args.distillation_topk}
        out = divergence(student, teacher, ids, mask, given=more, **options)
    soft_loss = trainer.accelerator.gather(out.metrics["soft_loss"]).mean().item()
    trainer._log_self_distillation_metric("train" if given.model.training else "eval", soft_loss)
    return out.loss


def served_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """Of a teacher behind a server; only its sampled tokens need nothing but log-probabilities."""
    trainer, inputs = chunked.trainer, given.inputs
    if trainer.args.distillation_mode == "sampled_token":
        return stock()
    # As TRL does: rollouts that are used again meet a teacher with the weights of now.
    if trainer.state.global_step != trainer._last_loaded_step:
        trainer.vllm_generation.sync_weights()
        trainer.accelerator.wait_for_everyone()
        trainer._last_loaded_step = trainer.state.global_step
    ids = inputs["completion_ids"]
    found = trainer._compute_teacher_student_logits(given.model, None, inputs)
    served = trainer._get_teacher_token_logprobs_from_server(inputs, ids.shape[1])
    mask = found.loss_mask.bool()
    if not served["actual_logprobs"][mask].isfinite().all():
        raise ValueError("Teacher server returned no logprob for a required completion token.")
    with torch.no_grad():
        apart = (found.student_logits.logps(ids) - served["actual_logprobs"]).abs()
        apart = trainer.accelerator.gather(apart[mask].sum() / mask.sum().clamp(min=1)).mean().item()
    mode = "train" if given.model.training else "eval"
    trainer._metrics[mode]["self_distillation/server_logprob_abs_diff"].append(apart)
    return chunked_loss(chunked, given, found, (served["topk_logprobs"], served["topk_token_ids"]))


def self_distilling(package: str, name: str) -> Adapter:
    return Adapter(
        f"trl.experimental.{package}:{name}",
        checks=(known_mode, whole_models),
        patches={
            "_forward_logits": Seam(forward_logits, train=True, evaluate=True, replaces=False),
            "_compute_self_distillation_loss": Seam(distillation_loss),
            "_compute_server_distillation_loss": Seam(served_loss),
            f"trl.experimental.{package}.{package}_trainer:selective_log_softmax": Seam(picked_logps),
        },
        during=("compute_loss", "_compute_rollout_logps"),
        **DEFERRED,
    )


SDFT, SDPO = self_distilling("sdft", "SDFT"), self_distilling("sdpo", "SDPO")
