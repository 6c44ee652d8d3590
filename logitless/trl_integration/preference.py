"""TRL's ORPO, CPO (SimPO, AlphaPO), OnlineDPO and A2PO, which call the model themselves and build the full
logits.

Each has one method that turns logits into log-probabilities of sequences, or of tokens. Ours answers the same
call from per-token numbers; what TRL makes of it stays TRL's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from logitless.engine.head_view import HeadView
from logitless.losses.logprobs import TokenNumbers

from .adapter import Adapter, ChunkedLoss, Seam, base_of
from .head import Score
from .per_token import per_token_score


def attached(chunked: ChunkedLoss, score: Callable[..., Score] = per_token_score) -> Iterator[Callable]:
    """Heads on the policy, and on the reference where there is one."""
    for model in (chunked.trainer.model, getattr(chunked.trainer, "ref_model", None)):
        if model is not None:
            yield chunked.attach(base_of(chunked.trainer, model), score(chunked))


# --- ORPO and CPO


def all_positions_score(chunked: ChunkedLoss) -> Score:
    """Adds the mean logit of every position, prompts and padding too, as these trainers log it.

    Without a softcap it is the hidden state's product with the mean row of the head; with one, every position
    is projected once more, without gradient.
    """
    every = TokenNumbers(also=("sum_logits",), logits_budget=chunked.budget)
    plain = per_token_score(chunked)

    def score(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        fields = plain(hidden, head, labels, shift)
        with torch.no_grad():
            if head.softcap is None:
                mean = (hidden.to(head.dtype) @ head.weight.mean(0)).float()
                mean = (mean + (0.0 if head.bias is None else head.bias.float().mean())) * head.logit_scale
            else:
                mean = every.numbers(hidden, head, torch.zeros_like(labels))[0]["sum_logits"] / head.shape[0]
        return fields | {"mean_logits": mean}

    return score


def pairs_forward(chunked: ChunkedLoss, given: Any, *, orpo: bool) -> tuple[Tensor, ...]:
    """The tuple that TRL's `get_batch_loss_metrics` unpacks; of the logits it takes the mean.

    ORPO's NLL counts the prompt as well, so that one walk over all tokens serves both.
    """
    trainer, batch, pairs = chunked.trainer, given.batch, given.batch["chosen_labels"].shape[0]
    joined = trainer.concatenated_inputs(
        batch,
        is_encoder_decoder=False,
        padding_value=trainer.padding_value if orpo else trainer.pad_token_id,
        device=trainer.accelerator.device,
    )
    ids, attention = joined["concatenated_input_ids"], joined["concatenated_attention_mask"]
    labels = completions = joined["concatenated_labels"]
    if orpo:
        labels = torch.where(attention == 1, ids, -100)
    router = {"output_router_logits": True} if trainer.aux_loss_enabled else {}
    out = given.model(ids, attention_mask=attention, labels=labels, fused_lm_head=True, **router)
    completions = completions[:, 1:] != -100

    logps, nll = (out.log_probs * completions).sum(-1), out.log_probs.new_zeros(())
    if orpo or trainer.loss_type in ("ipo", "simpo"):
        logps = logps / completions.sum(-1)
    if orpo or trainer.cpo_alpha:
        nll = -out.log_probs[:pairs].sum() / out.label_mask[:pairs].sum()
    logits = out.mean_logits[:, :-1] if orpo else out.mean_logits
    found = (logps[:pairs], logps[pairs:], logits[:pairs], logits[pairs:], nll)
    return (*found, out.aux_loss) if trainer.aux_loss_enabled else found


def pairs_adapter(stock: str, *, orpo: bool) -> Adapter:
    def forward(chunked: ChunkedLoss, stock: Callable, given: Any) -> tuple[Tensor, ...]:
        return pairs_forward(chunked, given, orpo=orpo)

    return Adapter(
        stock,
        heads=lambda chunked: attached(chunked, all_positions_score),
        patches={"concatenated_forward": Seam(forward, train=True, evaluate=True)},
    )


ORPO = pairs_adapter("trl.experimental.orpo:ORPO", orpo=True)
CPO = pairs_adapter("trl.experimental.cpo:CPO", orpo=False)


# --- OnlineDPO and A2PO


def online_dpo_forward(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    prompt_ids, prompt_mask, labels = given.prompt_ids, given.prompt_mask, given.completion_ids
    length = labels.shape[1]
    if given.vision_inputs is None:
        # As TRL cuts a prompt on its left.
        surplus = max(prompt_ids.shape[1] + length - chunked.trainer.max_length, 0)
        prompt_ids, prompt_mask = prompt_ids[:, surplus:], prompt_mask[:, surplus:]
    ids = torch.cat((prompt_ids, labels), dim=1)
    mask = torch.cat((prompt_mask, given.completion_mask), dim=1)
    # What each position predicts, padding included, which TRL's metrics count. Without a prompt TRL does not
    # shift.
    before = prompt_ids.shape[1] - 1
    if before >= 0:
        labels = torch.nn.functional.pad(labels, (before, 1), value=-100)
    vision = given.vision_inputs or {}
    out = given.model(ids, attention_mask=mask, shift_labels=labels, fused_lm_head=True, **vision)
    start = max(before, 0)
    return out.log_probs[:, start : start + length]


def a2po_logps(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    labels = given.input_ids.masked_fill(given.attention_mask == 0, -100)
    labels[:, : -given.logits_to_keep] = -100
    out = given.model(given.input_ids, attention_mask=given.attention_mask, labels=labels, fused_lm_head=True)
    return out.log_probs.sum(dim=1)


OnlineDPO = Adapter(
    "trl.experimental.online_dpo:OnlineDPO",
    heads=attached,
    patches={"_forward": Seam(online_dpo_forward, train=True)},
    # TRL computes no loss there.
    evaluates=False,
)
A2PO = Adapter(
    "trl.experimental.a2po:A2PO",
    heads=attached,
    patches={"_get_sequence_logps": Seam(a2po_logps, train=True, evaluate=True)},
)
