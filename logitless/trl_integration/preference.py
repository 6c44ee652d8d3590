"""TRL's ORPO, CPO (SimPO, AlphaPO) and TPO, which call the model themselves, on all sequences of a pair or
triple at once, and build the full logits.

Their heads answer with per-token numbers, all made in one walk; what TRL makes of them stays TRL's.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from logitless.engine.head_view import HeadView
from logitless.losses.logprobs import TokenNumbers

from .adapter import Adapter, ChunkedLoss, Seam
from .head import Score, scored
from .per_token import per_token_score

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


def pairs_forward(chunked: ChunkedLoss, stock: Callable, given: Any) -> tuple[Tensor, ...]:
    """The tuple that TRL's `get_batch_loss_metrics` unpacks; of the logits it takes the mean.

    ORPO's NLL counts the prompt as well, so that one walk over all tokens serves both.
    """
    trainer, batch, pairs = chunked.trainer, given.batch, given.batch["chosen_labels"].shape[0]
    orpo = chunked.adapter is ORPO
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


PAIRS = {
    "heads": {"model": scored(all_positions_score)},
    "patches": {"concatenated_forward": Seam(pairs_forward, train=True, evaluate=True)},
}
ORPO = Adapter("trl.experimental.orpo:ORPO", **PAIRS)
CPO = Adapter("trl.experimental.cpo:CPO", **PAIRS)


# --- TPO

TPO_FIELDS = ("entropy", "mean_logits", "is_top1")


class LogitsOf:
    """Per-token numbers that answer what TPO's loss asks of the logits, so that the loss and its metrics stay
    TRL's code.

    The fields have the shape (B, T - 1) of labels that are shifted already. Anything else that is asked of it
    raises.
    """

    def __init__(self, **fields: Tensor):
        self.fields = fields

    def _each(self, change: Callable[[Tensor], Tensor]) -> "LogitsOf":
        return LogitsOf(**{name: change(x) for name, x in self.fields.items()})

    def detach(self) -> "LogitsOf":
        return self._each(Tensor.detach)

    def chunk(self, chunks: int, dim: int) -> list["LogitsOf"]:
        return [self._each(lambda x, i=i: x.chunk(chunks, dim)[i]) for i in range(chunks)]

    def __getitem__(self, index: Any) -> "LogitsOf":
        if isinstance(index, Tensor):
            return self._each(lambda x: x[index])
        if index != (..., slice(None, -1), slice(None)):
            raise TypeError(
                f"index: expected a mask, or the shift that was made before, got {index}; this TRL wants "
                f"the logits themselves."
            )
        return self

    def mean(self, dim: int) -> Tensor:
        return self.fields["mean_logits"]

    def argmax(self, dim: int) -> Tensor:
        """The label itself where it is the most likely token, else an id that no label has."""
        return torch.where(self.fields["is_top1"], self.fields["labels"], -1)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return -args[0].fields["log_probs"].mean() if function is F.cross_entropy else NotImplemented


def logps_and_entropy(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    """TRL's `selective_log_softmax_and_entropy`."""
    fields = given.logits.fields
    return fields["log_probs"], fields["entropy"]


def triples_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    ids, completion, model = given.inputs["input_ids"], given.inputs["completion_mask"].bool(), given.model

    def called(**inputs: Any) -> SimpleNamespace:
        out = model(**inputs, labels=ids.masked_fill(~completion, -100), fused_lm_head=True)
        fields = {name: getattr(out, name) for name in ("log_probs", *TPO_FIELDS)}
        return SimpleNamespace(logits=LogitsOf(labels=ids[:, 1:], **fields))

    return stock(model=called)


def triples_score(chunked: ChunkedLoss) -> Score:
    return per_token_score(chunked, *TPO_FIELDS)


TPO = Adapter(
    "trl.experimental.tpo:TPO",
    heads={"model": scored(triples_score)},
    patches={
        "_compute_loss": Seam(triples_loss, train=True, evaluate=True, replaces=False),
        "trl.experimental.tpo.tpo_trainer:selective_log_softmax_and_entropy": Seam(logps_and_entropy),
    },
    during=("_compute_loss",),
    predicts=True,
)
