"""TRL's SDFT and SDPO, whose teacher is the student with more to read: nobody builds logits, student or
teacher.

TRL's code makes the rollouts, the policy loss, the metrics and the sampled-token loss of a served teacher
from deferred logits; the divergences, whose weight per token is known beforehand, are one walk over the heads
(4 products, 3 with a frozen head).
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.experimental.sdft import SDFTConfig as StockSDFTConfig
from trl.experimental.sdft import SDFTTrainer as StockSDFTTrainer
from trl.experimental.sdpo import SDPOConfig as StockSDPOConfig
from trl.experimental.sdpo import SDPOTrainer as StockSDPOTrainer

from .deferred import DeferredLogits, DeferredLogitsTrainerMixin
from .mixins import ChunkedLossConfigMixin
from .support_divergence import SampledTokenDistillation, divergence

MODES = ("full_logits", "topk_logits", "sampled_token")


def check_options(args: Any) -> None:
    """What TRL refuses in its first step, refused before."""
    if args.distillation_mode not in MODES:
        raise ValueError(
            f"distillation_mode: expected one of {', '.join(MODES)}, got {args.distillation_mode!r}; choose "
            f"one."
        )
    if args.distillation_mode == "topk_logits" and args.distillation_topk is None:
        raise ValueError(
            "distillation_topk: expected a number of tokens with distillation_mode='topk_logits', got None; "
            "set it."
        )


@dataclass
class SelfDistillationConfigMixin(ChunkedLossConfigMixin):
    """The flag of SDFT and SDPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_chunked_loss:
            check_options(self)


class SelfDistillationTrainerMixin(DeferredLogitsTrainerMixin):
    """What SDFT and SDPO share: TRL's loss code is the same in both."""

    check_options = staticmethod(check_options)

    def _compute_rollout_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self.deferred():
            return super()._compute_rollout_logps(*args, **kwargs)

    def _forward_logits(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        # A served teacher has no model here.
        return None if model is None else super()._forward_logits(model, *args, **kwargs)

    def _compute_self_distillation_loss(
        self, model: Any, inputs: dict[str, Any], distillation_logits: Any
    ) -> Tensor:
        if not self.uses_chunked_loss:
            return super()._compute_self_distillation_loss(model, inputs, distillation_logits)
        found = distillation_logits
        return self._chunked_loss(model, inputs, found.student_logits, found.teacher_logits, found.loss_mask)

    def _chunked_loss(
        self, model: Any, inputs: dict[str, Any], student: DeferredLogits, teacher: Any, mask: Tensor
    ) -> Tensor:
        """The mean over sequences of each one's mean over tokens, and TRL's log of the mean over all
        tokens."""
        ids, args = inputs["completion_ids"], self.args
        weights = mask / mask.sum(-1, keepdim=True).clamp(min=1) / mask.shape[0]
        given = {"token_weights": weights}
        clip = float("inf")
        if args.distillation_is_clip is not None and inputs.get("old_per_token_logps") is not None:
            given["old_logps"], clip = inputs["old_per_token_logps"], args.distillation_is_clip
        if args.distillation_mode == "sampled_token":
            loss = SampledTokenDistillation(reduction="sum", clip=clip, **student.head)
            out = loss(
                student.hidden,
                student.weight,
                torch.where(mask.bool(), ids, -100),
                bias=student.bias,
                teacher_logps=teacher.logps(ids).to(student.hidden.device),
                **given,
            )
            self.last_plan = out.plan
        else:
            options = {"reduction": "sum", "beta": float(args.distillation_alpha), "clip": clip}
            if args.distillation_mode == "topk_logits":
                options["topk_mode"] = "tail" if args.distillation_add_tail else "renormalize"
                if isinstance(teacher, DeferredLogits):
                    options |= {"support": ("student",), "top_k": args.distillation_topk}
            out = divergence(student, teacher, ids, mask, **given, **options)
        mode = "train" if model.training else "eval"
        self._log_self_distillation_metric(
            mode, self.accelerator.gather(out.metrics["soft_loss"]).mean().item()
        )
        return out.loss

    def _compute_server_distillation_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.uses_chunked_loss or self.args.distillation_mode == "sampled_token":
            return super()._compute_server_distillation_loss(model, inputs)
        # As TRL does, up to the loss, for which it gathers from the full log-probabilities.
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self.accelerator.wait_for_everyone()
            self._last_loaded_step = self.state.global_step
        ids = inputs["completion_ids"]
        found = self._compute_teacher_student_logits(model, None, inputs)
        served = self._get_teacher_token_logprobs_from_server(inputs, ids.shape[1])
        mask = found.loss_mask.bool()
        if not served["actual_logprobs"][mask].isfinite().all():
            raise ValueError("Teacher server returned no logprob for a required completion token.")
        with torch.no_grad():
            apart = (found.student_logits.logps(ids) - served["actual_logprobs"]).abs()[
                mask
            ].sum() / mask.sum().clamp(min=1)
        mode = "train" if model.training else "eval"
        self._metrics[mode]["self_distillation/server_logprob_abs_diff"].append(
            self.accelerator.gather(apart).mean().item()
        )
        teacher = (served["topk_logprobs"], served["topk_token_ids"])
        return self._chunked_loss(model, inputs, found.student_logits, teacher, found.loss_mask)


@dataclass
class SDFTConfig(SelfDistillationConfigMixin, StockSDFTConfig):
    """`trl.experimental.sdft.SDFTConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class SDFTTrainer(SelfDistillationTrainerMixin, StockSDFTTrainer):
    """`trl.experimental.sdft.SDFTTrainer`; with `SDFTConfig(use_chunked_loss=True)` neither student nor
    teacher build logits."""

    loss_module = sys.modules[StockSDFTTrainer.__module__]


@dataclass
class SDPOConfig(SelfDistillationConfigMixin, StockSDPOConfig):
    """`trl.experimental.sdpo.SDPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class SDPOTrainer(SelfDistillationTrainerMixin, StockSDPOTrainer):
    """`trl.experimental.sdpo.SDPOTrainer`; with `SDPOConfig(use_chunked_loss=True)` neither student nor
    teacher build logits."""

    loss_module = sys.modules[StockSDPOTrainer.__module__]
