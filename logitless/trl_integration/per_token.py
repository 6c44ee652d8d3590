"""TRL's trainers that use a fused head for per-token statistics (`add_fused_lm_head`): SFT, DPO, KTO, GRPO,
RLOO, GMPO and AsyncGRPO.

TRL's own code, or a user's, computes their losses from log-probabilities, which have the shape, dtype and
gradient of TRL's. A trainable head is projected twice (4 products), a frozen head once (2), with one vector
per token kept for the backward pass.

SFT is computed by `CrossEntropyLoss` wherever TRL's own `compute_loss` runs: one projection (3 products, 2
with a frozen head) where TRL makes two (4 and 3). TRL's `compute_loss` only sums per-token values, so while
it runs the head returns each field already summed (`SumOfTokens`); gradient accumulation, parallelism, the
router loss and the logs stay TRL's. Label smoothing, for which TRL builds the full logits, is part of the
same projection. A user's own `compute_loss` that calls the model gets per-token values.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.trainer_pt_utils import LabelSmoother

from logitless import CrossEntropyLoss
from logitless.engine.head_view import HeadView
from logitless.errors import value_error
from logitless.losses.logprobs import TokenStatistics

from .adapter import Adapter, Attach, ChunkedLoss, Seam, base_of, is_of_trl, swapped
from .forwards import forwards_of, fused_options
from .head import Score, scored
from .versions import newest_minor

# --- numbers per token


def per_token_score(chunked: ChunkedLoss, *asked: str) -> Score:
    """Log-probabilities and the requested fields, under TRL's names, differentiable as TRL's are."""
    args = chunked.trainer.args
    fp32 = getattr(args, "cast_lm_head_to_fp32", False)
    rounds = follows_server(chunked.trainer)
    statistics = functools.partial(
        TokenStatistics,
        also=tuple("sum_logits" if name == "mean_logits" else name for name in asked if name != "entropy"),
        temperature=getattr(args, "temperature", 1.0),
        logits_budget=chunked.budget,
    )

    def made(entropy: bool | str, dtype: torch.dtype) -> TokenStatistics:
        if fp32:
            return statistics(entropy=entropy, logits_dtype=torch.float32)
        # bf16 products alone are rounded to bf16: a server of another dtype has no such grid.
        rounded = rounds and dtype == torch.bfloat16
        return statistics(entropy=entropy, logits_dtype=torch.bfloat16 if rounded else None)

    made = functools.cache(made)

    def score(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        if fp32:
            # The head's own precision, whatever autocast would make of it.
            hidden = hidden.to(head.dtype)
        autocast = torch.is_autocast_enabled(hidden.device.type) and not fp32
        entropy = "entropy" in asked and entropy_mode(chunked.trainer, hidden, head)
        dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else head.dtype
        compute = functools.partial(
            _with_autocast, autocast, hidden.device.type, head=head, labels=labels, shift=shift
        )
        with chunked.saving():
            statistics, plan = compute(made("metric" if entropy == "recomputed" else entropy, dtype), hidden)
            if entropy == "recomputed":
                again = functools.partial(compute, made(True, dtype))
                statistics["entropy"] = RecomputedEntropy.apply(statistics["entropy"], hidden, again)
        chunked.note(plan)
        mask = labels != -100
        if shift:
            # TRL's fields have an entry for each label but the first of a row.
            statistics = {name: x[:, :-1] for name, x in statistics.items()}
            mask = mask[:, 1:]
        if "mean_logits" in asked:
            statistics["mean_logits"] = statistics["sum_logits"] / head.shape[0]
        if "is_top1" in asked:
            statistics["is_top1"] = statistics["is_top1"].bool()
        return {"log_probs": statistics["logps"], "label_mask": mask} | {
            name: statistics[name] for name in asked
        }

    return score


def follows_server(trainer: Any) -> bool:
    """Whether logits are rounded as vLLM rounds those that the loss is compared with."""
    return uses_server(trainer.args) and not getattr(trainer.args, "cast_lm_head_to_fp32", False)


def uses_server(args: Any) -> bool:
    """Whether the rollouts are those of vLLM; AsyncGRPO, which has no `use_vllm`, always takes them there."""
    return bool(getattr(args, "use_vllm", hasattr(args, "vllm_server_base_url")))


def server_rounding(trainer: Any) -> str | None:
    """The line that is logged once about logits and a vLLM server; None without a server."""
    if follows_server(trainer):
        return (
            "logits of bf16 heads are rounded to bf16, as vLLM rounds them by default; fp32 on both sides is "
            "more accurate: cast_lm_head_to_fp32=True here, and a server with --hf-overrides "
            '\'{"head_dtype": "float32"}\''
        )
    if uses_server(trainer.args):
        return (
            "logits are not rounded (cast_lm_head_to_fp32): the vLLM server needs --hf-overrides "
            '\'{"head_dtype": "float32"}\', or it rounds them to bf16'
        )
    return None


def truncated_sampling(trainer: Any) -> str | None:
    """The line that is logged once about a sampler that truncates; None for one that does not."""
    args = trainer.args
    cuts = {
        "top_p": (getattr(args, "top_p", None) or 1.0) < 1,
        "top_k": (getattr(args, "top_k", None) or 0) > 0,
        "min_p": (getattr(args, "min_p", None) or 0.0) > 0,
    }
    names = [f"{name}={getattr(args, name)}" for name, cut in cuts.items() if cut]
    if not uses_server(args) or not names:
        return None
    return (
        f"{', '.join(names)}: vLLM's log-probabilities are over the ids that it kept, TRL's over the whole "
        "vocabulary, so ratios are biased (TRL #6789); sample without truncation, or replay it in an own "
        "loop (sampling_mask)"
    )


def _with_autocast(
    enabled: bool,
    device: str,
    statistics: TokenStatistics,
    hidden: Tensor,
    *,
    head: HeadView,
    labels: Tensor,
    shift: bool,
) -> tuple[dict[str, Tensor], Any]:
    with torch.autocast(device, enabled=enabled):
        return statistics.statistics(hidden, head, labels, shift=shift)


def entropy_mode(trainer: Any, hidden: Tensor, head: HeadView) -> bool | str:
    """How a head computes the entropy: True, differentiable; "metric", without gradient; or "recomputed",
    differentiable at the price of another projection, in the backward pass, where its gradient arrives.

    TRL's entropy is differentiable wherever it is returned, and hardly ever differentiated. With a head that
    trains the backward pass projects the tokens again anyway, so a gradient that does not arrive costs
    nothing. With a frozen head it would cost the vectors that are kept for the log-probabilities.
    """
    if not (torch.is_grad_enabled() and (hidden.requires_grad or _trains(head))):
        return "metric"
    wanted = getattr(trainer, "_entropy_bonus_enabled", False)
    if torch.compiler.is_compiling():
        # A compiled backward pass computes every gradient that it can, and cannot leave one out where none
        # arrives.
        losses = (getattr(type(trainer), name, None) for name in ("compute_loss", "_compute_loss"))
        return wanted or not all(is_of_trl(loss) for loss in losses if loss is not None) or "metric"
    return wanted or _trains(head) or "recomputed"


def _trains(head: HeadView) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((head.weight, head.bias)))


class RecomputedEntropy(torch.autograd.Function):
    """Identity on the entropy (...) of a frozen head, whose backward pass projects the tokens again."""

    @staticmethod
    def forward(
        ctx, entropy: Tensor, hidden: Tensor, again: Callable[[Tensor], tuple[dict[str, Tensor], Any]]
    ):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden)
        ctx.again = again
        return entropy.view_as(entropy)

    @staticmethod
    def backward(ctx, upstream: Tensor | None):
        if upstream is None:
            return None, None, None
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            statistics, _ = ctx.again(hidden)
        return None, torch.autograd.grad(statistics["entropy"], hidden, upstream)[0], None


def fused_heads(*asked: str) -> dict[str, Attach]:
    """Replacements of the heads that TRL's constructor has put on the policy and on the reference."""

    def policy(chunked: ChunkedLoss) -> Score:
        weighted = getattr(chunked.trainer, "use_weighting", False)
        return per_token_score(chunked, *asked, *(("log_sum_sq_probs",) if weighted else ()))

    return {"model": scored(policy), "ref_model": scored(per_token_score)}


def same_head(trainer: Any) -> None:
    """TRL's head has the options of the trainer's constructor; a second trainer may have put its own on
    top."""
    if hasattr(trainer, "chunked_loss"):
        return  # ours has the options that were compared before
    fused = forwards_of(base_of(trainer, trainer.model)).fused
    if fused is None:
        return
    options = fused_options(fused)
    for name, default in (("temperature", 1.0), ("cast_lm_head_to_fp32", False)):
        expected = options[name]
        found = getattr(trainer.args, name, default)
        if expected != found:
            remedy = "another trainer or option has come since its constructor: construct it again"
            raise value_error(
                name, f"{expected!r}, which the fused head of its model has", repr(found), remedy
            )


PER_TOKEN = {"checks": (same_head,), "during": ("compute_loss", "compute_ref_log_probs")}
ONLINE = {"checks": (same_head,), "notes": (server_rounding,), "warnings": (truncated_sampling,)}
DPO = Adapter("trl:DPO", heads=fused_heads("entropy", "mean_logits", "is_top1"), **PER_TOKEN)
KTO = Adapter("trl:KTO", heads=fused_heads("entropy", "mean_logits"), **PER_TOKEN)
GRPO = Adapter("trl:GRPO", heads=fused_heads("entropy"), **ONLINE)
RLOO = Adapter("trl:RLOO", heads=fused_heads("entropy"), **ONLINE)
GMPO = Adapter("trl.experimental.gmpo:GMPO", heads=fused_heads("entropy"), **ONLINE)
AsyncGRPO = Adapter(
    "trl.experimental.async_grpo:AsyncGRPO",
    heads=fused_heads("entropy"),
    **ONLINE | {"checks": (newest_minor, same_head)},
)


# --- SFT


class SumOptions(NamedTuple):
    """The options with which TRL's `compute_loss` would reduce per-token values in this step."""

    dft: bool
    label_smoothing: float


def sft_score(chunked: ChunkedLoss) -> Score:
    per_token = per_token_score(chunked, "entropy", "is_top1")

    def score(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        if chunked.sums is None:
            return per_token(hidden, head, labels, shift)
        loss = _summed_loss(chunked.sums, chunked.budget)
        output = chunked.solved(loss, hidden, head, labels, shift=shift)
        count = output.metrics["num_tokens"]
        sums = {"entropy": output.metrics["entropy"], "is_top1": output.metrics["token_accuracy"]}
        return {"log_probs": -output.loss, "label_mask": count} | {
            name: x * count for name, x in sums.items()
        }

    return score


@functools.lru_cache(maxsize=16)
def _summed_loss(options: SumOptions, budget: int | None) -> CrossEntropyLoss:
    return CrossEntropyLoss(**options._asdict(), reduction="sum", logits_budget=budget)


def summed_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    """Run TRL's own `compute_loss` with a head that returns sums."""
    trainer = chunked.trainer
    if given.self is not trainer:
        return stock()
    smoothing_is_defined(trainer)
    sums = SumOptions(trainer.args.loss_type == "dft", smoothing_of(trainer))
    # DFT's weights and the smoothing are in the sum already; all that TRL has left to do is the plain loss's
    # part.
    plain = swapped(trainer.args, loss_type="nll"), swapped(trainer, label_smoother=None)
    with plain[0], plain[1], swapped(chunked, sums=sums):
        return stock()


def smoothing_of(trainer: Any) -> float:
    """The label smoothing of TRL's `compute_loss` in this step."""
    smoother = trainer.label_smoother
    if smoother is None or trainer.args.loss_type != "nll":
        return 0.0
    known = type(smoother) is LabelSmoother and smoother.ignore_index == -100
    if not known:
        expected = "transformers' LabelSmoother with the chunked loss"
        remedy = "it takes full logits: leave the flag out"
        raise value_error("label_smoother", expected, smoother, remedy)
    return smoother.epsilon


def smoothing_is_defined(trainer: Any) -> None:
    dft = trainer.args.loss_type == "dft"
    smoother = trainer.label_smoother
    remedy = "the DFT loss is not smoothed, so leave it out"
    smoothing = getattr(smoother, "epsilon", smoother)
    if dft and smoother:
        raise value_error("label_smoothing_factor", "0 with loss_type='dft'", smoothing, remedy)
    expected = "0 for a model with a router loss"
    remedy = "TRL leaves that out of a smoothed loss: set router_aux_loss_coef=0.0, or no smoothing"
    router = trainer.aux_loss_enabled and smoother is not None
    if router:
        raise value_error("label_smoothing_factor", expected, smoothing, remedy)


SFT = Adapter(
    "trl:SFT",
    checks=(same_head, smoothing_is_defined),
    heads={"model": scored(sft_score)},
    # Where TRL defines it: its scripts run with `trl.SFTTrainer` swapped for ours.
    patches={"trl.trainer.sft_trainer:SFTTrainer.compute_loss": Seam(summed_loss, replaces=False)},
)
