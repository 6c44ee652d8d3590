"""For models and trainers that exist already: `patch_model` and `apply_to`, both undoable."""

from collections.abc import Callable

import transformers
import trl
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

from logitless.models import patch_model

from .async_distillation import AsyncDistillationTrainer
from .attached_head import attach_late
from .deferred import DeferredLogitsTrainerMixin
from .distillation_trainers import DistillationTrainer, GKDTrainer, _base
from .head import remembered
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
