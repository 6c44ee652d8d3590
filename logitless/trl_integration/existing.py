"""For models and trainers that exist already: `patch_model` and `apply_to`, both undoable."""

import functools
from collections.abc import Callable
from typing import Any

import transformers
import trl
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl.experimental.a2po import A2POTrainer as StockA2POTrainer
from trl.experimental.async_distillation import AsyncDistillationTrainer as StockAsyncDistillationTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer as StockAsyncGRPOTrainer
from trl.experimental.cpo import CPOTrainer as StockCPOTrainer
from trl.experimental.gkd import GKDTrainer as StockGKDTrainer
from trl.experimental.gmpo import GMPOTrainer as StockGMPOTrainer
from trl.experimental.gold import GOLDTrainer as StockGOLDTrainer
from trl.experimental.iw_opd import IWOPDTrainer as StockIWOPDTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer as StockOnlineDPOTrainer
from trl.experimental.orpo import ORPOTrainer as StockORPOTrainer
from trl.experimental.sdft import SDFTTrainer as StockSDFTTrainer
from trl.experimental.sdpo import SDPOTrainer as StockSDPOTrainer
from trl.experimental.server_distillation import ServerDistillationTrainer as StockServerDistillationTrainer
from trl.experimental.tpo import TPOTrainer as StockTPOTrainer
from trl.trainer.utils import maybe_gather_lm_head_ctx

from logitless import CrossEntropyLoss

from .async_distillation import AsyncDistillationTrainer
from .attached_head import attach_late
from .deferred import DeferredLogitsTrainerMixin
from .distillation_trainers import DistillationTrainer, GKDTrainer, _base
from .head import _load_balancing_loss, head_options, head_projection, remembered, replace_forward
from .log_prob_trainers import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer
from .mixins import ChunkedLossTrainerMixin
from .online_trainers import A2POTrainer, AsyncGRPOTrainer, GMPOTrainer, OnlineDPOTrainer
from .preference_trainers import CPOTrainer, ORPOTrainer
from .self_distillation_trainers import SDFTTrainer, SDPOTrainer
from .sft import SFTTrainer
from .teacher_distillation_trainers import GOLDTrainer, IWOPDTrainer, ServerDistillationTrainer
from .triple_preference import TPOTrainer

# TRL's class -> ours; subclasses before the class (SFT, GRPO, Distillation) that they extend.
TRAINERS = {
    StockGKDTrainer: GKDTrainer,
    StockGMPOTrainer: GMPOTrainer,
    StockGOLDTrainer: GOLDTrainer,
    StockServerDistillationTrainer: ServerDistillationTrainer,
    trl.SFTTrainer: SFTTrainer,
    trl.DPOTrainer: DPOTrainer,
    trl.KTOTrainer: KTOTrainer,
    trl.GRPOTrainer: GRPOTrainer,
    trl.RLOOTrainer: RLOOTrainer,
    trl.DistillationTrainer: DistillationTrainer,
    StockCPOTrainer: CPOTrainer,
    StockORPOTrainer: ORPOTrainer,
    StockA2POTrainer: A2POTrainer,
    StockAsyncDistillationTrainer: AsyncDistillationTrainer,
    StockAsyncGRPOTrainer: AsyncGRPOTrainer,
    StockOnlineDPOTrainer: OnlineDPOTrainer,
    StockTPOTrainer: TPOTrainer,
    StockSDFTTrainer: SDFTTrainer,
    StockSDPOTrainer: SDPOTrainer,
    StockIWOPDTrainer: IWOPDTrainer,
}
# Their loss is exchanged where TRL computes it; no model gets a head.
WITHOUT_HEAD = (AsyncDistillationTrainer, DistillationTrainer)

# What they ask of the head beside log-probabilities and entropy.
OUTPUTS = {
    DPOTrainer: ("log_probs", "entropy", "mean_logits", "is_top1"),
    KTOTrainer: ("log_probs", "entropy", "mean_logits"),
}


def patch_model(model: PreTrainedModel, *, logits_budget: int | None = None) -> Callable[[], None]:
    """Make `model(..., labels=labels)` compute its loss without logits; returns a function that undoes it.

    The answer's `loss` is the model's own: labels are shifted, `num_items_in_batch` divides the sum where it
    is given, the soft cap and the scale of the model's head apply, and a mixture of experts adds its router
    loss. Its `logits` are None. Calls without labels, generation among them, run as before.

    Args:
        model: any causal language model of transformers, under PEFT or not; LoRA may be on the head too.
        logits_budget: bytes that the logits alive at one time may take; default the library's.

    Raises:
        ValueError: the model has no LM head, or PEFT adapts it with something else than plain LoRA (when
            called).
    """
    base = _base(model)
    if base.get_output_embeddings() is None:
        raise ValueError(
            f"model: expected a causal language model with an LM head, got {type(base).__name__}; pass "
            f"AutoModelForCausalLM's."
        )
    loss = CrossEntropyLoss(logits_budget=logits_budget, **head_options(base.config))
    original = base.forward

    @functools.wraps(type(base).forward)
    def forward(self: PreTrainedModel, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None and kwargs.get("shift_labels") is None:
            return original(*args, **kwargs)
        return _loss_forward(self, loss, *args, labels=labels, **kwargs)

    return replace_forward(base, forward)


def _loss_forward(
    model: PreTrainedModel,
    loss: CrossEntropyLoss,
    *args: Any,
    labels: Tensor | None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    config = model.config.get_text_config()
    kwargs |= {"use_cache": False, "return_dict": True}
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    backbone = model.base_model(*args, **kwargs)
    hidden, weight, bias = head_projection(model, backbone.last_hidden_state)
    targets = labels if shift_labels is None else shift_labels
    with maybe_gather_lm_head_ctx(weight, bias):
        value = loss(
            hidden,
            weight,
            targets.to(weight.device),
            bias=bias,
            shift=shift_labels is None,
            num_items=num_items_in_batch,
        ).loss
    if kwargs.get("output_router_logits"):
        aux_loss = _load_balancing_loss(config, backbone.router_logits, kwargs.get("attention_mask"))
        value = value + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return CausalLMOutputWithPast(
        loss=value,
        hidden_states=getattr(backbone, "hidden_states", None),
        attentions=getattr(backbone, "attentions", None),
    )


def apply_to(trainer: transformers.Trainer, *, logits_budget: int | None = None) -> Callable[[], None]:
    """Switch the chunked loss on in a trainer that exists already; returns a function that switches it off
    again.

    A trainer of TRL becomes the one of ours that it would have been; any other `transformers.Trainer` gets
    `patch_model`.

    Args:
        trainer: TRL's (or a subclass of it), or transformers'.
        logits_budget: bytes that the logits alive at one time may take; default the library's.

    Raises:
        ValueError: the trainer has the flag already, or something that needs logits: `compute_metrics`,
            `compute_loss_func`.
    """
    if isinstance(trainer, ChunkedLossTrainerMixin):
        raise ValueError(
            "trainer: expected one without the chunked loss, got ours; set use_chunked_loss=True in its "
            "config."
        )
    for name in ("compute_metrics", "compute_loss_func"):
        if getattr(trainer, name, None) is not None:
            raise ValueError(
                f"{name}: expected None with the chunked loss, got a function that takes logits; leave it "
                f"out."
            )
    ours = next((ours for stock, ours in TRAINERS.items() if isinstance(trainer, stock)), None)
    if ours is None:
        return patch_model(trainer.accelerator.unwrap_model(trainer.model), logits_budget=logits_budget)

    stock, args = type(trainer), trainer.args
    models = [_base(trainer.accelerator.unwrap_model(trainer.model))]
    defers = issubclass(ours, DeferredLogitsTrainerMixin)
    other = getattr(trainer, "teacher_model" if defers else "ref_model", None)
    if other is not None:
        models.append(_base(trainer.accelerator.unwrap_model(other)))
    restore = remembered(*models)
    trainer.__class__ = type(stock.__name__, (ours, stock), {}) if stock not in ours.__mro__ else ours
    args.use_chunked_loss, args.logits_budget = True, logits_budget
    options = {}
    if ours.stock_module is not None and ours is not SFTTrainer:
        cast = getattr(args, "cast_lm_head_to_fp32", False)
        options = {"temperature": getattr(trainer, "temperature", 1.0), "cast_lm_head_to_fp32": cast}
        options["outputs"] = OUTPUTS.get(ours, ("log_probs", "entropy"))
        if getattr(trainer, "use_weighting", False):
            options["outputs"] += ("log_sum_sq_probs",)
    if ours not in WITHOUT_HEAD and not defers:
        for model in models:
            attach_late(trainer, model, trainer.chunked_score(model, **options))

    def undo() -> None:
        trainer.__class__ = stock
        del args.use_chunked_loss, args.logits_budget
        restore()

    if defers:
        try:
            trainer.defer_heads()
        except ValueError:
            undo()
            raise
    return undo
