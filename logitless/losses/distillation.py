"""Distillation losses: divergences between the distributions of a student and a teacher, token by token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.operands import supervised_where
from logitless.engine.spec import Fault
from logitless.engine.terms import Term
from logitless.errors import check_choice, type_error, value_error
from logitless.kernels.head import divergence as kernels
from logitless.kernels.head.divergence import MIN_LOGPROB
from logitless.losses.arguments import CallArguments
from logitless.losses.base import LogitsLoss, LossOutput
from logitless.losses.declarations import without_labels
from logitless.losses.divergences import DIVERGENCES, PARTIAL, TOPK_MODES, log_of_others
from logitless.losses.inputs import CallInputs, HeadWeight
from logitless.losses.support import SUPPORTS, check_support, on_support
from logitless.losses.teachers import check_teacher, check_topk, topk_faults, warn_of_sizes
from logitless.parallel.groups import check_alike

# 1 - cos of the logits. It is computed as half the squared distance of the unit vectors, which avoids
# cancellation.
COSINE = "cosine"
# Lower bound of the norm of a row of logits before division, as in torch.nn.functional.normalize.
TINY = 1e-12
NAMES = (*DIVERGENCES, COSINE)
Divergence = Literal[
    "jsd", "forward_kl", "reverse_kl", "skewed_kl", "skewed_reverse_kl", "total_variation", "cosine"
]
# Arguments of a teacher that is passed as hidden states and head.
TEACHER = ("teacher_hidden", "teacher_weight", "teacher_bias")


@dataclass(frozen=True, kw_only=True)
class DistillationLoss(LogitsLoss):
    """Divergence between the distributions of a student (s) and a teacher (t), mixed with cross-entropy on
    labels.

        hard_loss_weight * CE + (1 - hard_loss_weight) * soft

    `soft` is one of these divergences:

        jsd                beta KL(t||m) + (1 - beta) KL(s||m), m = beta t + (1 - beta) s
        forward_kl         KL(t||s)
        reverse_kl         KL(s||t)
        skewed_kl          KL(t||skew_alpha t + (1 - skew_alpha) s)
        skewed_reverse_kl  KL(s||skew_alpha s + (1 - skew_alpha) t)
        total_variation    1/2 sum |s - t|
        cosine             1 - cos of the logits

    Args:
        divergence: the name of the divergence.
        beta: weight of the teacher in the mixture of "jsd", in [0, 1]. As in TRL, beta=0 is KL(t||s) and
            beta=1 is KL(s||t).
        skew_alpha: weight of the teacher in the mixture of "skewed_kl", and of the student in that of
            "skewed_reverse_kl" (DistiLLM), in [0, 1].
        hard_loss_weight: weight of the cross-entropy, in [0, 1]. The cross-entropy uses temperature 1.
        topk_mode: for a divergence over k ids per token. "tail" adds one entry with the probability of all
            other ids; "renormalize" normalizes both distributions over the k ids. "partial", for "forward_kl"
            and "reverse_kl", sums over the k ids alone: both distributions stay normalized over the whole
            vocabulary (verl's `forward_kl_topk`).
        support: the ids of each token over which the divergence is computed: the k most probable ids of the
            "teacher" or of the "student", or the "union" of both. None: the whole vocabulary, or the ids of
            `teacher_logprobs_topk`.
        k: number of ids that the teacher, the student or each of them contributes to the support; None with
            `teacher_logprobs_topk`.
        shared_vocabulary: number of leading ids (0, 1, ...) that are the same tokens in both vocabularies.
            Without `support`, the teacher is normalized over these ids. Default: the smaller vocabulary size,
            with a warning if the sizes differ.
        temperature: divisor of the logits of student and teacher; the loss is not multiplied by
            temperature^2.
        teacher_softcap: `softcap` of the teacher's head.
        teacher_logit_scale: `logit_scale` of the teacher's head.

    Inputs:
        hidden: (..., H).
        weight: (V, H), or the LM head itself.
        targets: (...) int64. None is allowed if `hard_loss_weight` is 0; every token is then supervised.
        teacher_hidden: (..., H'), hidden states of the teacher. The teacher's tensors get no gradient.
        teacher_weight: (V', H'), the weight of the teacher's head.
        teacher_bias: (V',), the bias of the teacher's head.
        teacher_logprobs_topk: replaces the three tensors above: a pair of the teacher's log-probabilities
            (..., k) at `temperature`, with -inf for an empty slot, and their ids (..., k) int64.
        num_items: the number of tokens by which the mean divides.
        **arguments: mask, bias and the other arguments of every loss, see `LinearLoss.__call__`.

    If the vocabularies differ in size, the divergence is computed over the ids that both have. With
    `support`, the "tail" entry contains all other ids of each vocabulary.

    With `support="teacher"`, `teacher_logprobs_topk`, `topk_mode="renormalize"` and `hard_loss_weight=0.0`,
    the partition function cancels. The only metric is then soft_loss, and if k < V / 180, only the k logits
    per token are computed.

    Metrics: soft_loss, hard_loss, entropy (of the student), token_accuracy, and agreement (whether student
    and teacher have the same arg-max). hard_loss and token_accuracy are 0 without targets.

    References: Hinton et al., 2015, https://arxiv.org/abs/1503.02531; Agarwal et al. (GKD), 2023,
    https://arxiv.org/abs/2306.13649; Ko et al. (DistiLLM), 2024, https://arxiv.org/abs/2402.03898; Wen et al.
    (total variation), 2023, https://arxiv.org/abs/2307.15190.

    Examples:
        >>> hidden, weight, targets = torch.randn(6, 8), torch.randn(32, 8), torch.randint(32, (6,))
        >>> teacher = {"teacher_hidden": torch.randn(6, 4), "teacher_weight": torch.randn(32, 4)}
        >>> out = DistillationLoss(divergence="forward_kl")(hidden, weight, targets, **teacher)
        >>> s, t = hidden @ weight.T, teacher["teacher_hidden"] @ teacher["teacher_weight"].T
        >>> kl = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1).mean()
        >>> torch.allclose(out.metrics["soft_loss"], kl, atol=1e-4)
        True
    """

    divergence: Divergence = "jsd"
    beta: float = 0.5
    skew_alpha: float = 0.1
    hard_loss_weight: float = 0.0
    topk_mode: Literal["tail", "renormalize", "partial"] = "tail"
    support: Literal["teacher", "student", "union"] | None = None
    k: int | None = None
    shared_vocabulary: int | None = None

    needs_targets: ClassVar = False
    teacher: ClassVar = True
    vocab_parallel: ClassVar = True
    token_inputs: ClassVar = ("labels",)
    prediction_inputs: ClassVar = ("topk_logprobs", "topk_ids")
    structured_inputs: ClassVar = ("teacher_logprobs_topk",)
    metric_names: ClassVar = ("soft_loss", "hard_loss", "entropy", "token_accuracy", "agreement")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("divergence", self.divergence, NAMES)
        check_choice("topk_mode", self.topk_mode, TOPK_MODES)
        if self.topk_mode == "partial":
            check_partial(self.divergence)
        for name in ("beta", "skew_alpha", "hard_loss_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise value_error(
                    name, "a number in [0, 1]", getattr(self, name), "it is a weight in a mixture"
                )
        if type(self).support is None:  # a subclass may define another support
            check_support(self)

    def terms(self, logits: Tensor, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        if batch.topk_ids is None:
            common = min(logits.shape[-1], batch.teacher_logits.shape[-1])
            z = logits[:, :common]
            t = batch.teacher_logits[:, :common]
            student, teacher = batch.log_softmax(z), batch.log_softmax(t)
            best, argmax_id = batch.argmax(z), batch.argmax(t)
        else:
            values, ids = batch.topk_logprobs, batch.topk_ids
            # Empty slots and unsupervised tokens may have any id.
            ids = ids.clamp(0, logits.shape[-1] - 1)
            full = logits.log_softmax(-1)
            student, teacher = on_best_ids(full, values, ids, self.topk_mode)
            best = logits.argmax(-1)
            argmax_id = ids.gather(-1, values.argmax(-1, keepdim=True))[:, 0]
        if self.divergence == COSINE:
            # Leave out ids whose logit is -inf.
            ruled_out = (z == -torch.inf) | (t == -torch.inf)
            z, t = (x.masked_fill(ruled_out, 0.0) for x in (z, t))
            z, t = z / batch.norm(z).clamp(min=TINY), t / batch.norm(t).clamp(min=TINY)
            soft = 0.5 * (z - t).square().sum(-1)
        else:
            divergences = DIVERGENCES if batch.topk_ids is None else TOPK_MODES[self.topk_mode]
            soft = divergences[self.divergence](self, student, teacher)
        soft = batch.summed(soft)
        hard = top1 = torch.zeros_like(soft)
        if batch.labels is not None:
            columns, labelled = batch.columns(batch.labels)
            hard = -batch.log_softmax(logits * self.temperature).gather(-1, columns[:, None])[:, 0]
            hard = batch.summed(hard.masked_fill(~labelled, 0.0))
            top1 = (batch.argmax(logits) == batch.labels).to(soft.dtype)
        log_p = student if batch.topk_ids is None else full
        entropy = batch.summed(-(log_p.exp() * log_p.clamp(min=MIN_LOGPROB)).sum(-1))
        return self._mixed(soft, hard, entropy, top1, (best == argmax_id).to(soft.dtype))

    def _mixed(
        self, soft: Tensor, hard: Tensor, *statistics: Tensor
    ) -> tuple[dict[str, Term], dict[str, Term]]:
        weight = self.hard_loss_weight
        loss = weight * hard + (1 - weight) * soft if weight else soft
        metrics = zip(self.metric_names, (soft, hard, *statistics), strict=True)
        return {"distillation": Term(loss)}, {name: Term(x) for name, x in metrics}

    def has_kernel(
        self, device: torch.device, dtype: torch.dtype, inputs: Mapping[str, Tensor | None]
    ) -> bool:
        return inputs["topk_ids"] is None and kernels.has_kernel(self.divergence, device, dtype)

    def kernel(
        self,
        logits: Tensor,
        bias: Tensor | None,
        batch: Batch,
        factors: Tensor | None,
        gradient: Tensor | None,
    ) -> tuple[dict[str, Term], dict[str, Term]]:
        options = {
            "gradient": gradient,
            "divergence": self.divergence,
            "beta": self.beta,
            "hard_weight": self.hard_loss_weight,
            "transform": self.logit_transform,
            "teacher_transform": self.teacher_transform,
            "bias": bias,
            "teacher_bias": batch.teacher_bias,
        }
        rows = (logits, batch.teacher_logits)
        labels = batch.labels
        if not batch.vocabulary.sharded:
            stats = kernels.fused_divergence(*rows, labels, factors, **options)
            return self._mixed(*stats[: len(self.metric_names)])
        # The label is -1 if there are no labels, and if the label is outside the vocabulary.
        labels = torch.full_like(batch.given_targets, -1) if labels is None else labels
        labels = torch.where((labels >= 0) & (labels < batch.V), batch.vocabulary.columns(labels, -1)[0], -1)
        stats = kernels.sharded_divergence(*rows, labels, factors, ranks=batch.vocabulary, **options)
        return self._mixed(*stats[: len(self.metric_names)])

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor | None = None,
        *,
        teacher_hidden: Tensor | None = None,
        teacher_weight: HeadWeight | None = None,
        teacher_bias: Tensor | None = None,
        teacher_logprobs_topk: tuple[Tensor, Tensor] | None = None,
        **arguments: Unpack[CallInputs],
    ) -> LossOutput:
        inputs = {
            "teacher_hidden": teacher_hidden,
            "teacher_weight": teacher_weight,
            "teacher_bias": teacher_bias,
            "teacher_logprobs_topk": teacher_logprobs_topk,
        }
        return super().__call__(hidden, weight, targets, **inputs, **arguments)

    def prepare(self, call: CallArguments) -> None:
        shape = call.hidden.shape[:-1]
        topk = call.inputs.pop("teacher_logprobs_topk")
        teacher = {name: call.inputs.pop(name) for name in TEACHER}
        if call.targets is None and self.hard_loss_weight:
            remedy = "or set hard_loss_weight=0.0"
            raise value_error("targets", "labels for the hard loss", None, remedy)
        teachers = (teacher["teacher_hidden"] is not None) + (topk is not None)
        if teachers != 1:
            expected = "one of teacher_hidden and teacher_logprobs_topk"
            raise value_error(
                "teacher_hidden", expected, "both" if teachers else "neither", "pass one teacher"
            )
        if call.targets is None:
            call.loss = without_labels(self)
        if self.topk_mode == "partial" and topk is None and self.support is None:
            expected = "'tail' or 'renormalize' for a divergence over the whole vocabulary"
            remedy = "set support and k, or pass teacher_logprobs_topk"
            raise value_error("topk_mode", expected, "'partial'", remedy)
        if self.support in SUPPORTS:
            call.loss = on_support(call.loss, teacher_is_topk=topk is not None)
        call.inputs["labels"] = call.targets
        if topk is None:
            check_teacher(*teacher.values(), shape)
            teacher = self._shared(teacher, call.weight.shape[0])
            if self.tp_group is not None:
                check_alike("teacher_weight", teacher["teacher_weight"], call.weight)
            call.inputs |= teacher
        else:
            call.inputs |= self._best_ids(topk, shape)
        if call.targets is None:
            call.targets = supervised_where(call.mask, shape, call.loss.ignore_index, call.hidden.device)

    def _shared(self, teacher: dict[str, Tensor | None], V: int) -> dict[str, Tensor | None]:
        """Return the teacher's tensors; without a support, with the head cut to the ids that both
        vocabularies share. A support contains only such ids, and each model is normalized over its own ids.
        """
        rows = teacher["teacher_weight"].shape[0]
        shared = self.shared_vocabulary
        common = min(V, rows, V if shared is None else shared)
        if self.support is not None and self.tp_group is None and self.k > common:
            expected = f"at most the {common} ids that both vocabularies share"
            raise value_error("k", expected, self.k, "lower it")
        if shared is None:
            if rows != V and self.tp_group is None and not torch.compiler.is_compiling():
                warn_of_sizes(V, rows)
            return teacher
        if self.tp_group is not None:
            raise value_error(
                "shared_vocabulary", "None with tp_group", shared, "cut the heads before the call"
            )
        if shared > min(V, rows):
            remedy = "pass the number of leading ids that both vocabularies share"
            raise value_error("shared_vocabulary", f"at most {min(V, rows)}", shared, remedy)
        if self.support is not None:
            return teacher
        head = ("teacher_weight", "teacher_bias")
        return teacher | {name: teacher[name][:shared] for name in head if teacher[name] is not None}

    def _best_ids(self, topk: tuple[Tensor, Tensor], shape: torch.Size) -> dict[str, Tensor]:
        """Check `teacher_logprobs_topk` and return it as declared inputs of the loss."""
        name = "teacher_logprobs_topk"
        remedy = "pass teacher_hidden and teacher_weight"
        if self.tp_group is not None and self.support not in SUPPORTS:
            raise value_error(
                name,
                "a teacher with a sharded head, with tp_group",
                "top-k log-probabilities without support",
                remedy,
            )
        if self.divergence == COSINE:
            raise value_error(name, "a teacher with logits for 'cosine'", "top-k log-probabilities", remedy)
        if not isinstance(topk, (tuple, list)) or len(topk) != 2:
            raise type_error(
                name, "a pair of log-probabilities and ids", type(topk).__name__, "pass (values, ids)"
            )
        values, ids = topk
        check_topk(values, ids, shape)
        names = ("teacher_logps", "ids") if self.support in SUPPORTS else ("topk_logprobs", "topk_ids")
        return dict(zip(names, (values.detach(), ids.long()), strict=True))

    def faults(self, targets: Tensor, inputs: Mapping[str, Tensor | None], V: int) -> list[Fault]:
        return topk_faults(inputs["topk_ids"], inputs["topk_logprobs"], V, self.shared_vocabulary)


@dataclass(frozen=True, kw_only=True)
class JSDLoss(DistillationLoss):
    """`DistillationLoss` with the generalized Jensen-Shannon divergence, the loss of GKD.

    Reference: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649.

    Examples:
        >>> hidden, weight, targets = torch.randn(6, 8), torch.randn(32, 8), torch.randint(32, (6,))
        >>> teacher = {"teacher_hidden": torch.randn(6, 4), "teacher_weight": torch.randn(32, 4)}
        >>> out = JSDLoss(beta=0.5)(hidden, weight, targets, **teacher)
        >>> bool(0 <= out.metrics["soft_loss"] <= torch.tensor(2.0).log())
        True
    """


def check_partial(divergence: str) -> None:
    """Raise ValueError unless the divergence is defined for distributions that do not sum to 1."""
    if divergence not in PARTIAL:
        expected = f"one of {', '.join(map(repr, PARTIAL))} with topk_mode='partial'"
        raise value_error("divergence", expected, repr(divergence), "use topk_mode='tail' or 'renormalize'")


def on_best_ids(student: Tensor, values: Tensor, ids: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of student and teacher over the teacher's k ids.

    Args:
        student: (n, V) log-probabilities.
        values: (n, k) log-probabilities of the teacher; -inf marks an empty slot.
        ids: (n, k) the teacher's ids.
        mode: "renormalize": both are normalized over the k ids, (n, k). "partial": both are as they are.
            "tail": both get one more entry with the log-probability of all other ids, (n, k + 1).
    """
    filled = values > -torch.inf
    teacher = torch.where(filled, values.to(student.dtype), MIN_LOGPROB)
    picked = torch.where(filled, student.gather(-1, ids), MIN_LOGPROB)
    if mode == "renormalize":
        return picked.log_softmax(-1), teacher.log_softmax(-1)
    if mode == "partial":
        return picked, teacher
    covered = torch.zeros_like(student).scatter_add(-1, ids, filled.to(student.dtype)) > 0
    student_rest = student.masked_fill(covered, MIN_LOGPROB).logsumexp(-1, keepdim=True)
    teacher_rest = log_of_others(teacher, values.dtype)
    teacher_rest = torch.where(covered.all(-1, keepdim=True), MIN_LOGPROB, teacher_rest)
    return torch.cat((picked, student_rest), -1), torch.cat((teacher, teacher_rest), -1).log_softmax(-1)
