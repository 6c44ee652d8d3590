"""Losses of draft models for speculative decoding: the draft's distributions of several steps, compared with
a verifier's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, Never

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.head_view import is_head
from logitless.engine.operands import (
    MASKS,
    NAN_MASK,
    apply_mask,
    check_packed,
    checked_boundaries,
    sequence_numbers,
)
from logitless.engine.readers.speculator import SpeculatorReader, chain_metrics
from logitless.engine.spec import Fault
from logitless.engine.terms import Term
from logitless.errors import check_choice, type_error, value_error
from logitless.kernels.head import divergence as kernels
from logitless.losses.arguments import CallArguments, warn_of_zeros
from logitless.losses.base import LogitsLoss, LossOutput
from logitless.losses.declarations import cached_loss, without_labels
from logitless.losses.heads import resolve_heads
from logitless.losses.inputs import HeadWeight
from logitless.losses.teachers import check_teacher
from logitless.parallel.groups import check_alike

SpeculatorDivergence = Literal[
    "forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_acceptance", "lk_hybrid"
]
NAMES = ("forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_acceptance", "lk_hybrid")
SOFTMAXES = ("full", "draft")


@dataclass(frozen=True, kw_only=True)
class SpeculatorLoss(LogitsLoss):
    """Loss of a draft model for speculative decoding: its distributions q in S steps, compared with a
    verifier's p.

        sum_k coefficient_k * mean over the pairs of step k of (hard_loss_weight * CE + (1 - hard_loss_weight)
        * soft)

    Every step predicts one token further ahead. `soft` is one of these divergences, where p' is the softmax
    of the verifier's logits of the draft's ids:

        forward_kl          KL(p'||q)
        reverse_kl          KL(q||p')
        jsd                 beta KL(p'||m) + (1 - beta) KL(q||m), m = beta p' + (1 - beta) q
        total_variation     1 - alpha, alpha = sum min(p, q): the acceptance rate of speculative sampling
        neg_log_acceptance  -log max(alpha, 1e-5)
        lk_hybrid           lam KL(p'||q) + (1 - lam) (1 - alpha), lam = exp(-lk_eta alpha), detached

    A pair consists of the draft's row of step k that starts at position i (row i, or the row a with
    starts[a] = i) and the verifier's row i + offset + k, which predicts token i + offset + k + 1.

    Args:
        divergence: the name of the divergence.
        beta: weight of p' in the mixture of "jsd", in [0, 1]. As in TRL, beta=0 is KL(p'||q) and beta=1 is
            KL(q||p').
        lk_eta: rate at which the weight of the KL in "lk_hybrid" decreases with alpha, at least 0.
        hard_loss_weight: weight of the cross-entropy, in [0, 1]. The cross-entropy uses temperature 1. Its
            labels are `targets` or, without targets, the verifier's most probable ids. If the draft does not
            have the id of a label, the cross-entropy of the pair is 0.
        coefficients: one weight per step; default `decay ** k`. A step with coefficient 0 is not projected,
            and the chains of pairs end before it.
        decay: factor between consecutive default coefficients, above 0; 0.8 in EAGLE-3.
        offset: 1 if the draft's row i was computed from hidden state i and token i + 1 (EAGLE, MTP modules);
            0 if row i predicts the token after position i (blocks, or data that are already shifted).
        teacher_softmax: the ids over which p (in alpha) is normalized and from which the verifier's most
            probable id is chosen. "full": all ids of the verifier. "draft": only the draft's ids; then only
            their rows of the verifier's head are multiplied.
        drop_outside: set the loss of a pair to 0 if the draft does not have the verifier's most probable id,
            as in EAGLE-3. The pair still counts in the mean and in the metrics. Requires
            teacher_softmax="full".
        teacher_softcap: `softcap` of the verifier's head.
        teacher_logit_scale: `logit_scale` of the verifier's head.

    Inputs:
        hiddens: a sequence of S tensors (B, T, H), one per step; or (N, H) with `cu_seqlens` (sequences +
            1,).
        weight: (D, H), or the draft's LM head itself.
        targets: (B, T) int64, or (N,) with `cu_seqlens`: unshifted labels (as with `shift=True` in other
            losses) in the verifier's vocabulary; or None.
        teacher_hidden: (B, T, H'), hidden states of the verifier. The verifier's tensors get no gradient.
        teacher_weight: (V, H'), the weight of the verifier's head.
        teacher_bias: (V,), the bias of the verifier's head.
        draft_ids: (D,) int64, the verifier's id for each row of `weight`. Required if the heads differ in
            size. Refused with `tp_group`: there, each rank passes the same rows of both heads.
        bias: (D,).
        mask: (B, T), same shape as targets. Tokens with mask 0 (False) are not predicted.
        starts: (B, A) int64, for blocks with hidden states (B, A, H): the position i of each row of step 0 in
            its sequence, or -1 for an unused row. A position may occur at most once per sequence.
        num_items: the divisor of the mean of every step; default the number of pairs of the step.

    A pair counts if the token that the verifier's row predicts is in the same sequence as row i of step 0,
    and is supervised: its mask is not 0, and its label is not `ignore_index`. The pairs of row i in all steps
    form a chain.

    With reduction="none", the loss has shape (S, B, T), or (S, B, A) with `starts`. The values are
    multiplied by the coefficients, and are 0 for pairs that do not count.

    Metrics: step_{k}/loss; step_{k}/acceptance (alpha); step_{k}/agreement (whether draft and verifier have
    the same most probable id); step_{k}/conditional_agreement (the agreement of the pairs whose earlier steps
    all agreed); accepted_length and expected_length, the mean number of tokens per verifier pass in greedy
    decoding and in sampling, including the verifier's token. The metrics describe teacher-forced drafts. On
    text that the verifier did not generate, the number of accepted tokens in decoding differs.

    References: Li et al. (EAGLE-3), 2025, https://arxiv.org/abs/2503.01840; Leviathan et al., 2023,
    https://arxiv.org/abs/2211.17192; Samarin et al. (LK losses), 2026, https://arxiv.org/abs/2602.23881.

    Examples:
        >>> draft, weight = [torch.randn(2, 6, 8) for _ in range(2)], torch.randn(32, 8)
        >>> verifier = {"teacher_hidden": torch.randn(2, 6, 4), "teacher_weight": torch.randn(32, 4)}
        >>> out = SpeculatorLoss(decay=0.5)(draft, weight, None, **verifier)
        >>> steps = [out.metrics[f"step_{k}/loss"] for k in (0, 1)]
        >>> torch.allclose(out.loss, steps[0] + 0.5 * steps[1], atol=1e-4)
        True
    """

    divergence: SpeculatorDivergence = "forward_kl"
    beta: float = 0.5
    lk_eta: float = 3.0
    hard_loss_weight: float = 0.0
    coefficients: Sequence[float] | None = None
    decay: float = 0.8
    offset: int = 1
    teacher_softmax: Literal["full", "draft"] = "full"
    drop_outside: bool = False

    reader: ClassVar[type] = SpeculatorReader
    needs_targets: ClassVar = False
    teacher: ClassVar = True
    teacher_rows: ClassVar = "teacher_rows"
    vocab_parallel: ClassVar = True
    prediction_inputs: ClassVar = ("labels", "teacher_rows", "pair_weights")
    shared_inputs: ClassVar = ("draft_ids", "draft_columns", "counted", "problems")
    remedies: ClassVar = {
        "shift": "targets are unshifted labels already",
        "d2t": "pass draft_ids=d2t + torch.arange(D)",
        "t2d": "pass draft_ids=t2d.nonzero()[:, 0]",
    }

    def __post_init__(self) -> None:
        if isinstance(self.coefficients, list):
            object.__setattr__(self, "coefficients", tuple(self.coefficients))
        super().__post_init__()
        check_choice("divergence", self.divergence, NAMES)
        check_choice("teacher_softmax", self.teacher_softmax, SOFTMAXES)
        for name in ("beta", "hard_loss_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise value_error(
                    name, "a number in [0, 1]", getattr(self, name), "it is a weight in a mixture"
                )
        for name in ("lk_eta", "offset"):
            if getattr(self, name) < 0:
                raise value_error(name, "at least 0", getattr(self, name), "leave it out")
        if self.decay <= 0:
            raise value_error("decay", "a number above 0", self.decay, "pass coefficients for other weights")
        if self.coefficients is not None and not any(self.coefficients):
            raise value_error("coefficients", "one that is not 0", self.coefficients, "a loss needs a step")
        if self.drop_outside and self.teacher_softmax != "full":
            raise value_error(
                "drop_outside",
                "False with teacher_softmax='draft'",
                True,
                "set teacher_softmax='full', which normalizes over the verifier's whole vocabulary",
            )
        if not self.compact:
            raise value_error(
                "compact",
                "True for SpeculatorLoss",
                False,
                "the host must read which rows of the verifier a chunk needs",
            )

    @property
    def metric_names(self) -> tuple[str, ...]:
        steps = [k for k, coefficient in enumerate(self.coefficients or ()) if coefficient]
        kinds = ("loss", "acceptance", "agreement", "conditional_agreement")
        return (*(f"step_{k}/{kind}" for k in steps for kind in kinds), "accepted_length", "expected_length")

    def terms(self, logits: Tensor, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        everything = batch.teacher_logits
        ids = batch.draft_ids
        taught = everything if ids is None else everything[:, ids]
        if self.teacher_softmax == "draft":
            everything = taught
        log_q, log_p = logits.log_softmax(-1), taught.log_softmax(-1)
        q = log_q.exp()
        p_of_alpha = (taught - everything.logsumexp(-1, keepdim=True)).exp()
        shared = torch.minimum(q, p_of_alpha).sum(-1)
        excess = (q - p_of_alpha).clamp(min=0).sum(-1)
        kl = kernels.kl(log_p, log_q)
        if self.divergence == "reverse_kl":
            kl = kernels.kl(log_q, log_p)
        elif self.divergence == "jsd":
            kl = kernels.jsd(log_q, log_p, self.beta)
        acceptance, soft, _, _ = kernels.of_acceptance(shared, excess, kl, self.divergence, self.lk_eta)
        if self.divergence == "lk_hybrid":
            lam = (-self.lk_eta * acceptance.detach()).exp()
            soft = lam * kl + (1 - lam) * torch.where(excess < 0.5, excess, 1 - shared)
        best = everything.argmax(-1)
        if ids is not None and self.teacher_softmax == "full":
            best = batch.draft_columns[best]
        if batch.labels is None:
            labels = best
        else:
            labels = batch.labels if ids is None else batch.draft_columns[batch.labels]
        log_q_at_one = (logits * self.temperature).log_softmax(-1)
        hard = -log_q_at_one.gather(-1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, 0.0)
        weight = self.hard_loss_weight
        values = weight * hard + (1 - weight) * soft if weight else soft
        if self.drop_outside:
            values = values.masked_fill(best < 0, 0.0)
        agreement = (logits.argmax(-1) == best).to(values.dtype)
        metrics = self._metrics(batch, values.detach(), acceptance.detach(), agreement)
        return {"speculator": Term(values * batch.pair_weights)}, metrics

    def _metrics(
        self, batch: Batch, values: Tensor, acceptance: Tensor, agreement: Tensor
    ) -> dict[str, Term]:
        """The metrics of all chains, given the values of the pairs that count."""
        counted = batch.counted.reshape(-1)
        pair_values = {"values": values, "acceptance": acceptance, "agreement": agreement}
        pair_values = {
            name: x.new_zeros(counted.shape).masked_scatter(counted, x) for name, x in pair_values.items()
        }
        metrics = chain_metrics(self, counted.to(values.dtype), **pair_values)
        return {name: Term(x, None) for name, x in zip(self.metric_names, metrics.unbind(), strict=True)}

    def __call__(
        self,
        hiddens: Sequence[Tensor],
        weight: HeadWeight,
        targets: Tensor | None = None,
        *,
        teacher_hidden: Tensor | None = None,
        teacher_weight: HeadWeight | None = None,
        teacher_bias: Tensor | None = None,
        draft_ids: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
        num_items: float | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        accumulate_into: Tensor | None = None,
        grad_scale: float = 1.0,
        **unknown: Never,
    ) -> LossOutput:
        tensors = {"targets": targets, "mask": mask, "cu_seqlens": cu_seqlens, "draft_ids": draft_ids}
        tensors |= {"teacher_hidden": teacher_hidden, "teacher_bias": teacher_bias, "bias": bias}
        if unknown:
            raise self.unknown_keywords(unknown)
        self.check_tensors(**tensors, starts=starts)
        check_hiddens(hiddens)
        loss = self._of_steps(len(hiddens))
        chosen = [k for k, coefficient in enumerate(loss.coefficients) if coefficient]
        heads = {"hidden": torch.stack([hiddens[k] for k in chosen]), "weight": weight, "bias": bias}
        heads |= {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
        heads |= {"teacher_bias": teacher_bias}
        if is_head(weight, teacher_weight):
            loss, heads = resolve_heads(loss, heads)
        hidden = heads["hidden"]
        weight = heads["weight"]
        teacher_hidden = heads["teacher_hidden"]
        rows = hidden.shape[1:-1]
        check_verifier(teacher_hidden, heads["teacher_weight"], heads["teacher_bias"], rows, starts)
        V = heads["teacher_weight"].shape[0]
        if loss.tp_group is None:
            check_draft_ids(draft_ids, weight.shape[0], V)
        else:
            check_sharded(draft_ids, heads["teacher_weight"], weight)
        tokens = Tokens.of(loss, teacher_hidden, targets, mask, cu_seqlens)
        pairs = tokens.pairs(loss, chosen, starts)
        ids = DraftIds.of(draft_ids, V, hidden.device)
        inputs = {
            "teacher_hidden": teacher_hidden.reshape(-1, teacher_hidden.shape[-1]),
            "teacher_weight": heads["teacher_weight"],
            "teacher_bias": heads["teacher_bias"],
            "draft_ids": ids.ids,
            "draft_columns": ids.columns,
            "labels": None if targets is None else pairs.labels.reshape(-1),
            "teacher_rows": pairs.teacher_rows.reshape(-1),
            "pair_weights": loss._pair_weights(pairs.counted, num_items, hidden.dtype),
            "counted": pairs.counted,
            "problems": torch.cat((pairs.problems, ids.problems)),
        }
        loss = without_labels(loss)
        counted = torch.where(pairs.counted, 0, loss.ignore_index).reshape(-1)
        call = CallArguments(
            loss,
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            counted,
            inputs,
            bias=heads["bias"],
            num_items=num_items,
            accumulate_into=accumulate_into,
            grad_scale=grad_scale,
        )
        out = loss.solve(call)
        warn_of_zeros(mask, loss, out.plan)
        if loss.reduction != "none":
            return out
        values = dict(zip(chosen, out.loss.view(len(chosen), *rows).unbind(), strict=True))
        nothing = out.loss.new_zeros(rows)
        return out._replace(loss=torch.stack([values.get(k, nothing) for k in range(len(hiddens))]))

    def _of_steps(self, steps: int) -> "SpeculatorLoss":
        """Return the loss with explicit coefficients, one per step."""
        if self.coefficients is not None:
            if len(self.coefficients) != steps:
                raise value_error(
                    "coefficients",
                    f"{steps} numbers, one per step",
                    len(self.coefficients),
                    "or set it to None",
                )
            return self
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        options["coefficients"] = tuple([self.decay**k for k in range(steps)])
        return cached_loss(type(self), **options)

    def _pair_weights(self, counted: Tensor, num_items: object, dtype: torch.dtype) -> Tensor:
        """(steps * rows,) weights of the pairs in the loss.

        The engine divides the sum over all pairs by their total number, or by `num_items`. The weights
        correct the divisor to the number of pairs of each step.
        """
        weights = [coefficient for coefficient in self.coefficients if coefficient]
        stat = torch.promote_types(dtype, torch.float32)
        ones = torch.ones(counted.shape[0], dtype=stat, device=counted.device)
        if self.reduction == "mean" and num_items is None:
            counts = counted.sum(1)
            ones = counts.sum() / counts.clamp(min=1).to(stat)
        each = torch.stack([weight * one for weight, one in zip(weights, ones.unbind(), strict=True)])
        return each[:, None].expand(counted.shape).reshape(-1)

    def faults(self, targets: Tensor, inputs: Mapping[str, Tensor | None], V: int) -> list[Fault]:
        columns = inputs["draft_columns"]
        labels = inputs["labels"]
        counted = inputs["counted"].reshape(-1)
        V = V if columns is None else columns.shape[0]
        outside = counted.new_zeros((), dtype=torch.int64)
        if labels is not None:
            outside = (((labels < 0) | (labels >= V)) & (labels > NAN_MASK) & counted).sum()
        texts = (
            ("targets", f"ids in [0, {V}) or ignore_index", "others in {count} pairs", "fix the labels"),
            ("mask", MASKS, "{count} others", "pass mask == 0 if it is additive (0 keeps, -inf drops)"),
            ("cu_seqlens", "non-decreasing boundaries from 0 to the number of tokens", "others", COVER),
            ("starts", "positions in their sequence, or -1", "{count} outside", "pad with -1"),
            ("starts", "each position at most once", "{count} repeated", "pad with -1"),
            ("draft_ids", f"ids in [0, {V})", "{count} outside", "pass the verifier's ids: " + IDS),
            ("draft_ids", "different ids", "{count} repeated", "pass one id per row of weight: " + IDS),
        )
        problems = (outside, *inputs["problems"].unbind())
        return [Fault(count, *text) for count, text in zip(problems, texts, strict=True)]


COVER = "let them cover every token of teacher_hidden once"
IDS = "d2t + torch.arange(len(d2t)), or t2d.nonzero()[:, 0]"


def check_hiddens(hiddens: Sequence[Tensor]) -> None:
    if not isinstance(hiddens, (tuple, list)) or not all(isinstance(x, Tensor) for x in hiddens):
        expected = "a list or tuple of tensors"
        got = type(hiddens).__name__
        raise type_error("hiddens", expected, got, "pass [hidden] for a single step")
    if not hiddens:
        raise value_error("hiddens", "at least one step", 0, "pass the draft's hidden states")
    shapes = {tuple(x.shape) for x in hiddens}
    if len(shapes) > 1 or hiddens[0].dim() < 2:
        expected = "tensors of one shape (B, T, H)"
        got = ", ".join(map(str, sorted(shapes)))
        raise value_error("hiddens", expected, got, "pass the same number of rows for every step")


def check_verifier(
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: torch.Size,
    starts: Tensor | None,
) -> None:
    """Check the verifier's tensors.

    `rows` is the shape of a step's hidden states without the last dimension.
    """
    if hidden is None:
        expected = "the verifier's hidden states (B, T, H')"
        raise type_error("teacher_hidden", expected, None, "pass them with teacher_weight")
    if starts is None:
        if hidden.shape[:-1] != rows:
            expected = f"shape {tuple(rows)} + (H',)"
            got = tuple(hidden.shape)
            remedy = "pass `starts`, the position of each row in its sequence"
            raise value_error("teacher_hidden", expected, got, remedy)
    else:
        if starts.shape != rows or starts.is_floating_point() or starts.dtype == torch.bool:
            expected = f"integers of shape {tuple(rows)}"
            got = f"{starts.dtype} {tuple(starts.shape)}"
            raise value_error("starts", expected, got, "pass one position per row of hiddens")
        if hidden.dim() != len(rows) + 1 or hidden.shape[:-2] != rows[:-1]:
            expected = f"shape {(*rows[:-1], 'T', 'H_')}".replace("'", "").replace("H_", "H'")
            remedy = "pass whole sequences"
            raise value_error("teacher_hidden", expected, tuple(hidden.shape), remedy)
    check_teacher(hidden, weight, bias, hidden.shape[:-1])


def check_draft_ids(ids: Tensor | None, D: int, V: int) -> None:
    if ids is None:
        if D != V:
            expected = f"the verifier's id of each of the {D} rows of weight, as the verifier has {V}"
            raise value_error("draft_ids", expected, None, f"pass {IDS}")
        return
    if ids.shape != (D,) or ids.is_floating_point() or ids.dtype == torch.bool:
        expected = f"integers of shape ({D},)"
        got = f"{ids.dtype} {tuple(ids.shape)}"
        raise value_error("draft_ids", expected, got, f"pass {IDS}")


def check_sharded(ids: Tensor | None, teacher_weight: Tensor, weight: Tensor) -> None:
    """Check the heads and `draft_ids` of a call with `tp_group`."""
    if ids is not None:
        remedy = "pass its part of teacher_weight[draft_ids] as teacher_weight, and labels as rows of weight"
        raise value_error("draft_ids", "None with tp_group", "a tensor", remedy)
    check_alike("teacher_weight", teacher_weight, weight)


class DraftIds(NamedTuple):
    """The ids of the draft's vocabulary."""

    ids: Tensor | None  # (D,) the verifier's id of each row; None: both vocabularies have the same ids
    columns: Tensor | None  # (V,) the draft's column for each id of the verifier; -1 for none
    problems: Tensor  # (2,) number of ids outside the vocabulary, number of duplicate ids

    @classmethod
    def of(cls, ids: Tensor | None, V: int, device: torch.device) -> "DraftIds":
        if ids is None:
            return cls(None, None, torch.zeros(2, dtype=torch.int64, device=device))
        ids = ids.to(device=device, dtype=torch.int64)
        outside = (ids < 0) | (ids >= V)
        # Replace invalid ids, so that no index is out of bounds before the fault is raised.
        ids = torch.where(outside, 0, ids)
        columns = torch.full((V,), -1, dtype=torch.int64, device=device)
        columns = columns.scatter(0, ids, torch.arange(len(ids), device=device))
        repeated = len(ids) - (columns >= 0).sum()
        return cls(ids, columns, torch.stack((outside.sum(), torch.where(outside.any(), 0, repeated))))


class StepPairs(NamedTuple):
    """The pairs of a call. The first three fields have shape (steps, rows)."""

    counted: Tensor  # bool, whether the pair counts
    teacher_rows: Tensor  # index of the pair's row in the flattened hidden states of the verifier
    labels: Tensor  # id of the predicted token
    problems: Tensor  # (4,) number of invalid entries in mask, boundaries and starts


class Tokens(NamedTuple):
    """The verifier's tokens, flattened."""

    labels: Tensor  # (N,) ids; `ignore_index` if the mask is 0
    length: int  # tokens of a padded sequence; all tokens if the sequences are packed
    boundaries: Tensor | None  # (sequences + 1,) of packed sequences

    @classmethod
    def of(
        cls,
        loss: LogitsLoss,
        hidden: Tensor,
        targets: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> "Tokens":
        shape = hidden.shape[:-1]
        for name, x in (("targets", targets), ("mask", mask)):
            if x is not None and x.shape != shape:
                expected = f"shape {tuple(shape)}"
                got = tuple(x.shape)
                raise value_error(name, expected, got, "pass one entry per token of teacher_hidden")
        any_id = 0 if loss.ignore_index != 0 else 1
        if targets is None:
            labels = torch.full(shape, any_id, dtype=torch.int64, device=hidden.device)
        else:
            labels = targets.long()
        if mask is not None:
            labels = apply_mask(labels, mask, loss.ignore_index)
        if cu_seqlens is not None:
            check_packed("teacher_hidden", hidden, 2)
            cu_seqlens = checked_boundaries(cu_seqlens, hidden)
        return cls(labels.reshape(-1), shape[-1], cu_seqlens)

    def pairs(self, loss: "SpeculatorLoss", steps: Sequence[int], starts: Tensor | None) -> StepPairs:
        """Return the pairs of `steps`.

        `starts`: the positions of the rows of step 0; None: every position.
        """
        N = self.labels.shape[0]
        device = self.labels.device
        problems = self.labels.new_zeros(2)
        if starts is None:
            positions = torch.arange(N, device=device)
            valid = torch.ones(N, dtype=torch.bool, device=device)
        else:
            at = starts.long().flatten(0, -2) if starts.dim() > 1 else starts.long()[None]
            valid = (at >= 0) & (at < self.length)
            ordered = at.sort(1).values
            repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
            problems = torch.stack(((~valid & (at != -1)).sum(), repeated.sum()))
            first = torch.arange(at.shape[0], device=device)[:, None] * self.length
            positions = torch.where(valid, at + first, 0).view(-1)
            valid = valid.view(-1)
        if self.boundaries is None:
            ends = (positions // max(1, self.length) + 1) * self.length
            wrong = problems.new_zeros(())
        else:
            bounds = self.boundaries
            wrong = (bounds.diff() < 0).sum() + (bounds[0] != 0) + (bounds[-1] != N)
            last = bounds[1:] if bounds.shape[0] > 1 else bounds  # there may be no sequence
            ends = last[sequence_numbers(bounds, positions)].clamp(max=N)
        predicted = torch.stack([positions + (loss.offset + k + 1) for k in steps])
        inside = valid & (predicted < ends)
        predicted = torch.where(inside, predicted, 0)
        tokens = self.labels if N else self.labels.new_zeros(1)  # without tokens, no pair is inside
        labels = torch.where(inside, tokens[predicted], loss.ignore_index)
        counted = inside & (labels != loss.ignore_index)
        wrong_mask = (self.labels <= NAN_MASK).sum()
        problems = torch.cat((torch.stack((wrong_mask, wrong)), problems))
        return StepPairs(counted, torch.where(inside, predicted - 1, 0), labels, problems)
