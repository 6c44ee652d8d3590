"""TRL's trainers that use a fused head for per-token statistics (`add_fused_lm_head`): SFT, DPO, KTO, GRPO,
RLOO, GMPO and AsyncGRPO.

TRL's own code, or a user's, computes their losses from log-probabilities, which have the shape, dtype and
gradient of TRL's. With a trainable head the tokens are projected twice (4 products), with a frozen head once
(2), and one vector per token is kept for the backward pass.

SFT is computed by `CrossEntropyLoss` wherever TRL's own `compute_loss` runs: one projection (3 products, 2
with a frozen head) where TRL makes two (4 and 3). TRL's `compute_loss` only sums per-token values, so while
it runs the head returns each field already summed (`SumOptions`); gradient accumulation, parallelism, the
router loss and the logs stay TRL's. Label smoothing, for which TRL builds the full logits, is part of the
same projection. A user's own `compute_loss` that calls the model gets per-token values.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.trainer_pt_utils import LabelSmoother

from logitless import CrossEntropyLoss
from logitless.engine.head_view import HeadView, is_of_user
from logitless.errors import value_error
from logitless.exchange import state_of
from logitless.losses.logprobs import TokenStatistics
from logitless.models.heads import WRAPPERS

from .adapter import (
    Adapter,
    ChunkedLossSession,
    MakeAttach,
    Replacement,
    is_from_trl,
    trl_option,
    unwrapped_base,
)
from .forwards import forwards_of, fused_head_options
from .head import KEY, ComputeFields, FusedHead, SumOfTokens, SumOptions, attach_fused_head
from .versions import require_newest_minor

# --- per-token statistics


def make_per_token_fields(session: ChunkedLossSession, *names: str) -> ComputeFields:
    """Make a function that computes per-token fields of TRL's fused output.

    Args:
        chunked: the chunked loss of the trainer.
        *names: fields to compute besides `log_probs` and `label_mask`, such as "entropy".

    Returns:
        A function of hidden (B, T, H), head (a `HeadView`), labels (B, T), -100 where ignored, and shift,
        whether position i predicts label i + 1. It returns the fields by name: (B, T), or (B, T - 1) with
        shift. They have a gradient if TRL's have one.
    """
    trainer = session.trainer
    uses_fp32_head = trl_option(trainer, "cast_lm_head_to_fp32", False)
    rounds_to_bf16 = needs_server_rounding(trainer)
    make_with_budget = functools.partial(
        TokenStatistics,
        also=tuple("sum_logits" if name == "mean_logits" else name for name in names if name != "entropy"),
        temperature=trl_option(trainer, "temperature", 1.0),
        logits_budget=session.logits_budget,
    )

    @functools.cache
    def make_statistics(entropy: bool | str, dtype: torch.dtype) -> TokenStatistics:
        if uses_fp32_head:
            return make_with_budget(entropy=entropy, logits_dtype=torch.float32)
        # Only products in bf16 are rounded to bf16: a server of another dtype does not round to it.
        needs_rounding = rounds_to_bf16 and dtype == torch.bfloat16
        return make_with_budget(entropy=entropy, logits_dtype=torch.bfloat16 if needs_rounding else None)

    def compute_fields(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        device_type = hidden.device.type
        if uses_fp32_head:
            # The head's precision, also under autocast
            hidden = hidden.to(head.dtype)
        uses_autocast = torch.is_autocast_enabled(device_type) and not uses_fp32_head
        dtype = torch.get_autocast_dtype(device_type) if uses_autocast else head.dtype
        entropy_mode = choose_entropy_mode(trainer, hidden, head) if "entropy" in names else False
        compute = functools.partial(
            _compute_with_autocast, uses_autocast, device_type, head=head, labels=labels, shift=shift
        )
        with session.without_offloading():
            is_recomputed = entropy_mode == "recomputed"
            loss = make_statistics("metric" if is_recomputed else entropy_mode, dtype)
            statistics, plan = compute(loss, hidden)
            if is_recomputed:
                recompute = functools.partial(compute, make_statistics(True, dtype))
                statistics["entropy"] = RecomputedEntropy.apply(statistics["entropy"], hidden, recompute)
        session.record_plan(plan)
        mask = labels != -100
        if shift:
            # TRL's fields have an entry for each label except the first of a row.
            statistics = {name: x[:, :-1] for name, x in statistics.items()}
            mask = mask[:, 1:]
        if "mean_logits" in names:
            statistics["mean_logits"] = statistics["sum_logits"] / head.shape[0]
        if "is_top1" in names:
            statistics["is_top1"] = statistics["is_top1"].bool()
        fields = {"log_probs": statistics["logps"], "label_mask": mask}
        return fields | {name: statistics[name] for name in names}

    return compute_fields


def needs_server_rounding(trainer: Any) -> bool:
    """Whether logits are rounded as vLLM rounds those of the rollouts' log-probabilities."""
    return uses_server(trainer) and not trl_option(trainer, "cast_lm_head_to_fp32", False)


def uses_server(trainer: Any) -> bool:
    """Whether vLLM generates the rollouts; always in AsyncGRPO, which has no `use_vllm`."""
    is_always_served = trl_option(trainer, "vllm_server_base_url", None) is not None
    return trl_option(trainer, "use_vllm", is_always_served)


def describe_server_rounding(trainer: Any) -> str | None:
    """The log line about the rounding of logits with a vLLM server; None without a server."""
    if needs_server_rounding(trainer):
        return (
            "logits of bf16 heads are rounded to bf16, as vLLM rounds them by default; fp32 on both sides is "
            "more accurate: cast_lm_head_to_fp32=True here, and a server with --hf-overrides "
            '\'{"head_dtype": "float32"}\''
        )
    if uses_server(trainer):
        return (
            "logits are not rounded (cast_lm_head_to_fp32): the vLLM server needs --hf-overrides "
            '\'{"head_dtype": "float32"}\', or it rounds them to bf16'
        )
    return None


def describe_truncated_sampling(trainer: Any) -> str | None:
    """The warning about vLLM sampling with top_p, top_k or min_p; None without truncation or vLLM."""
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    values = {name: trl_option(trainer, name, None) or off for name, off in neutral.items()}
    is_truncated = {"top_p": values["top_p"] < 1, "top_k": values["top_k"] > 0, "min_p": values["min_p"] > 0}
    options = [f"{name}={values[name]}" for name, truncates in is_truncated.items() if truncates]
    if not uses_server(trainer) or not options:
        return None
    return (
        f"{', '.join(options)}: vLLM's log-probabilities are over the ids that it kept, TRL's over the whole "
        "vocabulary, so ratios are biased (TRL #6789); sample without truncation, or pass `sampling_mask` to "
        "the loss in a custom training loop"
    )


def _compute_with_autocast(
    enabled: bool,
    device_type: str,
    loss: TokenStatistics,
    hidden: Tensor,
    *,
    head: HeadView,
    labels: Tensor,
    shift: bool,
) -> tuple[dict[str, Tensor], Any]:
    with torch.autocast(device_type, enabled=enabled):
        return loss.statistics(hidden, head, labels, shift=shift)


def choose_entropy_mode(trainer: Any, hidden: Tensor, head: HeadView) -> bool | str:
    """Return how to compute the entropy.

    * True: differentiable.
    * "metric": without gradient.
    * "recomputed": differentiable; a backward pass with a gradient of the entropy projects the tokens again.

    The entropy of TRL's fused head is differentiable, but few losses differentiate it. With a trainable head,
    the backward pass projects the tokens in any case, so a differentiable entropy has no additional cost.
    With a frozen head, a differentiable entropy would prevent the forward pass from saving d logp / d hidden,
    and every backward pass would project the tokens again.
    """
    if not (torch.is_grad_enabled() and (hidden.requires_grad or _requires_grad(head))):
        return "metric"
    has_entropy_bonus = getattr(trainer, "_entropy_bonus_enabled", False)
    if has_entropy_bonus:
        return has_entropy_bonus
    if torch.compiler.is_compiling():
        # A compiled backward pass computes the entropy's gradient also where no gradient arrives. TRL's own
        # losses do not differentiate the entropy without a bonus.
        losses = [getattr(type(trainer), name, None) for name in ("compute_loss", "_compute_loss")]
        is_trl_loss = all(is_from_trl(loss) for loss in losses if loss is not None)
        return "metric" if is_trl_loss else True
    return True if _requires_grad(head) else "recomputed"


def _requires_grad(head: HeadView) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((head.weight, head.bias)))


class RecomputedEntropy(torch.autograd.Function):
    """Identity on the entropy (...) of a frozen head; the backward pass projects the tokens again.

    `recompute(hidden)` returns differentiable statistics and their plan.
    """

    @staticmethod
    def forward(
        ctx, entropy: Tensor, hidden: Tensor, recompute: Callable[[Tensor], tuple[dict[str, Tensor], Any]]
    ):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden)
        ctx.recompute = recompute
        return entropy.view_as(entropy)

    @staticmethod
    def backward(ctx, upstream: Tensor | None):
        if upstream is None:
            return None, None, None
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            statistics, _ = ctx.recompute(hidden)
        (d_hidden,) = torch.autograd.grad(statistics["entropy"], hidden, upstream)
        return None, d_hidden, None


def fused_head_attachments(*names: str) -> dict[str, MakeAttach]:
    """Attachments of fused heads to the policy, with the fields `names`, and to the reference."""

    def make_policy_fields(session: ChunkedLossSession) -> ComputeFields:
        if getattr(session.trainer, "use_weighting", False):
            return make_per_token_fields(session, *names, "log_sum_sq_probs")
        return make_per_token_fields(session, *names)

    return {
        "model": attach_fused_head(make_policy_fields),
        "ref_model": attach_fused_head(make_per_token_fields),
    }


def check_fused_head_options(trainer: Any) -> None:
    """Raise ValueError if the model's fused head has other options than the trainer.

    TRL's constructor sets the head with the options of the trainer; a second trainer of the same model may
    have set another head since.
    """
    if hasattr(trainer, "chunked_loss"):
        return  # the options were compared when the chunked loss was switched on
    fused_head = forwards_of(unwrapped_base(trainer, trainer.model)).fused_head
    if fused_head is None:
        return
    head_options = fused_head_options(fused_head)
    for name, default in (("temperature", 1.0), ("cast_lm_head_to_fp32", False)):
        head_option = head_options[name]
        option = trl_option(trainer, name, default)
        if option != head_option:
            expected = f"{head_option!r}, which the fused head of its model has"
            remedy = "another trainer or option has come since its constructor: construct it again"
            raise value_error(name, expected, repr(option), remedy)


FUSED_HEAD_CALL = "call the model with fused_lm_head=True in it"
OFFLINE = {
    "remedy": FUSED_HEAD_CALL,
    "checks": (check_fused_head_options,),
    "active_during": ("compute_loss", "compute_ref_log_probs"),
}
ONLINE = {
    "remedy": FUSED_HEAD_CALL,
    "checks": (check_fused_head_options,),
    "attachments": fused_head_attachments("entropy"),
    "notes": (describe_server_rounding,),
    "warnings": (describe_truncated_sampling,),
}
DPO = Adapter("trl:DPO", attachments=fused_head_attachments("entropy", "mean_logits", "is_top1"), **OFFLINE)
KTO = Adapter("trl:KTO", attachments=fused_head_attachments("entropy", "mean_logits"), **OFFLINE)
GRPO = Adapter("trl:GRPO", **ONLINE)
RLOO = Adapter("trl:RLOO", **ONLINE)
GMPO = Adapter("trl.experimental.gmpo:GMPO", **ONLINE)
AsyncGRPO = Adapter(
    "trl.experimental.async_grpo:AsyncGRPO",
    **ONLINE | {"checks": (require_newest_minor, check_fused_head_options)},
)


# --- SFT


def make_sft_fields(session: ChunkedLossSession) -> ComputeFields:
    """Make the function that computes the fields of SFT: sums in calls with `SumOptions`, per-token values in
    other calls."""
    compute_per_token = make_per_token_fields(session, "entropy", "is_top1")

    def compute_fields(
        hidden: Tensor, head: HeadView, labels: Tensor, shift: bool, sum_options: SumOptions | None = None
    ) -> dict[str, Tensor]:
        if sum_options is None:
            return compute_per_token(hidden, head, labels, shift)
        loss = _make_sum_loss(sum_options, session.logits_budget)
        output = session.compute(loss, hidden, head, labels, shift=shift)
        num_tokens = output.metrics["num_tokens"]
        return {
            "log_probs": -output.loss,
            "label_mask": num_tokens,
            "entropy": output.metrics["entropy"] * num_tokens,
            "is_top1": output.metrics["token_accuracy"] * num_tokens,
        }

    return compute_fields


@functools.lru_cache(maxsize=16)
def _make_sum_loss(options: SumOptions, logits_budget: int | str | None) -> CrossEntropyLoss:
    return CrossEntropyLoss(
        dft=options.dft,
        label_smoothing=options.label_smoothing,
        reduction="sum",
        logits_budget=logits_budget,
    )


class View:
    """An object with other values of some of its attributes, for one function that receives it.

    Everything else, such as methods and what the function sets, is that of the object, which does not change.
    """

    def __init__(self, target: Any, **values: Any):
        object.__setattr__(self, "_target_and_values", (target, values))

    def __getattribute__(self, name: str) -> Any:
        target, values = object.__getattribute__(self, "_target_and_values")
        return values[name] if name in values else getattr(target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_target_and_values")[0], name, value)


def compute_sft_loss(session: ChunkedLossSession, original: Callable, arguments: Any) -> Any:
    """Run TRL's own `compute_loss` with a fused head that returns sums."""
    trainer = session.trainer
    model = arguments.model
    check_label_smoothing(trainer)
    options = SumOptions(dft=trainer.args.loss_type == "dft", label_smoothing=label_smoothing_of(trainer))
    if not is_attached(session, model):
        return original()
    # With label smoothing TRL would compute full logits.
    if not options.label_smoothing and has_user_hooks(model):
        return original()  # with values per token, which a hook may read

    def model_with_sums(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            return model(*args, **kwargs)
        outputs = model(*args, **kwargs | {"fused_lm_head": options})
        if not isinstance(outputs.log_probs, SumOfTokens):
            remedy = "a wrapper has changed the argument: pass it on, or train without the flag"
            raise value_error("model", "wrappers that pass fused_lm_head on", type(model).__name__, remedy)
        return outputs

    # The sums contain DFT's weights and the label smoothing, so TRL has to compute the plain loss from them.
    plain = View(trainer, args=View(trainer.args, loss_type="nll"), label_smoother=None)
    return original(self=plain, model=model_with_sums)


def models_inside(model: Any) -> Iterator[nn.Module]:
    """Yield a model and those inside its wrappers."""
    while isinstance(model, nn.Module):
        yield model
        inside = WRAPPERS.get(type(model).__name__)
        if inside is None and hasattr(model, "peft_config"):  # a PeftModel, or the tuner in it
            inside = "base_model" if hasattr(model, "get_base_model") else "model"
        model = getattr(model, inside, None) if inside else None


def is_attached(session: ChunkedLossSession, model: Any) -> bool:
    """Whether the model that was passed to `compute_loss` has the fused head of this chunked loss."""
    if not isinstance(model, nn.Module):
        return False
    states = (state_of(x, KEY) for x in models_inside(session.base_model("compute_loss", model)))
    return any(isinstance(x, FusedHead) and x.session is session for x in states)


def has_user_hooks(model: nn.Module) -> bool:
    """Whether a forward hook that is not a package's reads the outputs of a model or of those inside its
    wrappers."""
    return any(is_of_user(hook) for x in models_inside(model) for hook in x._forward_hooks.values())


def label_smoothing_of(trainer: Any) -> float:
    """The label smoothing of TRL's `compute_loss` in this step."""
    smoother = trainer.label_smoother
    if smoother is None or trainer.args.loss_type != "nll":
        return 0.0
    is_supported = type(smoother) is LabelSmoother and smoother.ignore_index == -100
    if not is_supported:
        expected = "transformers' LabelSmoother with the chunked loss"
        remedy = "it takes full logits: leave the flag out"
        raise value_error("label_smoother", expected, smoother, remedy)
    return smoother.epsilon


def check_label_smoothing(trainer: Any) -> None:
    """Raise ValueError for label smoothing with an option for which TRL does not define a smoothed loss."""
    smoother = trainer.label_smoother
    smoothing = getattr(smoother, "epsilon", smoother)
    if trainer.args.loss_type == "dft" and smoother:
        remedy = "the DFT loss is not smoothed, so leave it out"
        raise value_error("label_smoothing_factor", "0 with loss_type='dft'", smoothing, remedy)
    if trainer.aux_loss_enabled and smoother is not None:
        expected = "0 for a model with a router loss"
        remedy = "TRL leaves that out of a smoothed loss: set router_aux_loss_coef=0.0, or no smoothing"
        raise value_error("label_smoothing_factor", expected, smoothing, remedy)


SFT = Adapter(
    "trl:SFT",
    remedy=FUSED_HEAD_CALL,
    checks=(check_fused_head_options, check_label_smoothing),
    attachments={"model": attach_fused_head(make_sft_fields)},
    # In the module that defines it: while TRL's scripts run, `trl.SFTTrainer` is the class of this package.
    replacements={
        "trl.trainer.sft_trainer:SFTTrainer.compute_loss": Replacement(compute_sft_loss, calls_original=True)
    },
)
