"""Outputs that a model returns in the place of logits while its trainer computes a loss.

`attach_fused_head`: TRL 1.16 calls `model(..., labels=labels, fused_lm_head=True)` and reads a
`FusedCausalLMOutput`. The losses of logitless compute it inside the model's own forward pass, where the hooks
of DDP, FSDP and DeepSpeed run.

`attach_gatherable_logits`: other trainers read `model(...).logits` themselves. They get `GatherableLogits`:
hidden states and the head, not multiplied. TRL's code slices them, divides them by a temperature and gathers
tokens' log-probabilities as before. A function of whole distributions is computed by a loss of logitless; any
other operation raises.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.utils import ModelOutput
from trl.trainer.utils import FusedCausalLMOutput

from logitless.engine.head_view import HeadView, check_no_backward_hooks, unviewed
from logitless.errors import value_error
from logitless.exchange import exchanged
from logitless.losses.logprobs import TokenStatistics
from logitless.losses.several_ids import IdsStatistics, TopkStatistics, logprobs_of_ids
from logitless.models.heads import find_head, sharded_head_weight
from logitless.models.logits import (
    Deferral,
    DeferredLogits,
    accepted,
    defer_logits,
    deferring_head,
    logits_in,
)
from logitless.parallel.groups import TENSOR_PARALLEL, split_over_vocabulary, whole

from .adapter import TRAIN, Attach, ChunkedLossSession, MakeAttach, swap_attributes
from .forwards import Forwards, check_fused_head, forwards_of

KEY = "trainer"

# Computes the fields of a `FusedCausalLMOutput`, among them `log_probs`. Its arguments are hidden (B, T, H),
# head, labels (B, T) and shift, which says whether position i predicts label i + 1; and in a call for sums
# their `SumOptions`.
ComputeFields = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class SumOptions:
    """Passed instead of `fused_lm_head=True`: each field of the output is a `SumOfTokens`, with these options
    of `CrossEntropyLoss`."""

    dft: bool
    label_smoothing: float


@dataclass(frozen=True)
class FusedHead:
    """How calls of a model with `fused_lm_head=True` are computed."""

    session: ChunkedLossSession
    compute_fields: ComputeFields
    forwards: Forwards

    def autocast(self) -> AbstractContextManager:
        """The autocast context in which TRL runs its fused head and the backbone."""
        if self.forwards.has_outer_autocast:
            return self.session.trainer.accelerator.autocast()
        return nullcontext()


def attach_fused_head(make_compute_fields: Callable[[ChunkedLossSession], ComputeFields]) -> MakeAttach:
    """While it is attached, `model(..., labels=..., fused_lm_head=True)` returns an output with the computed
    fields; every other call runs as before."""

    def make_attach(session: ChunkedLossSession) -> Attach:
        compute_fields = make_compute_fields(session)
        fused_head = None

        @contextmanager
        def attach(model: PreTrainedModel) -> Iterator[None]:
            nonlocal fused_head
            if fused_head is None or not fused_head.forwards.is_current(model):
                # The same object is used in every step, because a compiled graph has a guard on its identity.
                forwards = forwards_of(model)
                check_fused_head(forwards)
                fused_head = FusedHead(session, compute_fields, forwards)
            with _defer_logits(session, model), exchanged(model, KEY, _fused_head_forward, fused_head):
                yield

        return attach

    return make_attach


def _defer_logits(session: ChunkedLossSession, model: PreTrainedModel) -> AbstractContextManager:
    """Context manager in which the model's head returns deferred logits in calls inside of `deferred`."""
    head = find_head(model)
    return deferring_head(head, session.deferrals.setdefault(head, Deferral()))


def check_equal_tokens(session: ChunkedLossSession, model: PreTrainedModel, ids: Tensor | None) -> None:
    """Raise ValueError if the ranks of a tensor-parallel plan have different tokens; checked until the first
    training step is done.

    The model would mix the tokens of these ranks to meaningless results. In TRL's trainers that generate,
    each process has its own sequences or its own order of them.
    """
    weight = sharded_head_weight(model)
    is_verified = TRAIN in session.verified_steps
    if weight is None or ids is None or is_verified or torch.compiler.is_compiling():
        return
    group = weight.device_mesh.get_group(TENSOR_PARALLEL)
    ids_of_ranks: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(ids_of_ranks, ids.tolist(), group=group)
    if any(ids_of_rank != ids_of_ranks[0] for ids_of_rank in ids_of_ranks):
        expected = "the same tokens on all ranks of its tensor-parallel plan"
        got = f"others on each in {type(session.trainer).__name__}"
        remedy = "shard it by FSDP2 or ZeRO-3, whose ranks have different sequences"
        raise value_error("model", expected, got, remedy)


def attach_gatherable_logits(session: ChunkedLossSession) -> Attach:
    """Return an `Attach`. While a model is attached, the `logits` of its outputs are `GatherableLogits` in
    calls inside of `return_gatherable_logits`."""

    state: tuple[ChunkedLossSession, Forwards] | None = None

    @contextmanager
    def attach(model: PreTrainedModel) -> Iterator[None]:
        nonlocal state
        if state is None or not state[1].is_current(model):
            state = session, forwards_of(model)
        with _defer_logits(session, model), exchanged(model, KEY, _gatherable_forward, state):
            yield

    return attach


def _fused_head_forward(
    model: PreTrainedModel,
    fused_head: FusedHead,
    original: Callable,
    *args: Any,
    fused_lm_head: bool | SumOptions = False,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,  # aligned with hidden, as context and sequence parallelism pass them
    **kwargs: Any,
) -> Any:
    """Forward pass of a model with an attached fused head."""
    if not fused_lm_head:
        all_labels = {"labels": labels, "shift_labels": shift_labels}
        return original(*args, **kwargs, **{name: x for name, x in all_labels.items() if x is not None})
    sum_options = fused_lm_head if isinstance(fused_lm_head, SumOptions) else None
    with fused_head.autocast():
        return _compute_fused_output(
            model, fused_head, sum_options, *args, labels=labels, shift_labels=shift_labels, **kwargs
        )


def _compute_fused_output(
    model: PreTrainedModel,
    fused_head: FusedHead,
    sum_options: SumOptions | None,
    *args: Any,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    **kwargs: Any,
) -> FusedCausalLMOutput:
    targets = labels if shift_labels is None else shift_labels
    num_items = kwargs.pop("num_items_in_batch", None)
    forwards = fused_head.forwards
    kwargs = forwards.arguments(kwargs)
    if forwards.needs_labels:
        kwargs["labels"] = targets
    with defer_logits(model, needs_cross_entropy=False):
        # Without TRL's and Accelerate's forward passes: TRL's fused head calls the backbone directly. Without
        # labels: the loss of TRL's fused head is not the model's, which may do anything with logits.
        output = forwards.base(*args, **kwargs)
    logits = logits_in(output, model)
    if logits.shape[:-1] != targets.shape:
        expected = f"logits of all positions, {tuple(targets.shape)}"
        remedy = "train it without the flag"
        raise value_error("model", expected, f"of {tuple(logits.shape[:-1])}", remedy)

    names: list[str] = []

    def compute_values(hidden: Tensor, head: HeadView) -> tuple[Tensor, ...]:
        check_equal_tokens(fused_head.session, model, targets)
        options = () if sum_options is None else (sum_options,)
        needs_shift = shift_labels is None
        fields = fused_head.compute_fields(hidden, head, targets.to(hidden.device), needs_shift, *options)
        names.extend(fields)
        # A tuple, because hooks of modules look for tensors in tuples
        return tuple(unviewed(x, model) for x in fields.values())

    values = logits.call_with_head(compute_values)
    fields = dict(zip(names, values))
    # TRL reads `loss` under DeepSpeed's sequence parallelism only; elsewhere its `compute_loss` divides the
    # sum of `log_probs` by its own count.
    if num_items is None:
        num_items = fields["label_mask"].sum().clamp(min=1)
    loss = -fields["log_probs"].sum() / num_items
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is not None:
        loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
    elif kwargs.get("output_router_logits"):
        remedy = "return the aux_loss of super().forward(...), or set router_aux_loss_coef=0.0"
        raise value_error("model", "outputs with the router loss, aux_loss", "outputs without", remedy)
    if sum_options is not None:
        fields = {name: SumOfTokens(x) for name, x in fields.items()}
    return FusedCausalLMOutput(loss=loss, aux_loss=aux_loss, **fields)


@dataclass(frozen=True)
class SumOfTokens:
    """A field of TRL's fused output that holds only the sum of its per-token values.

    Returned only to TRL's own `SFTTrainer.compute_loss`, which uses nothing but sums of the fields, and which
    no forward hook of the user's reads (`per_token.compute_sft_loss`). Any other operation raises.
    """

    total: Tensor

    def sum(self) -> Tensor:
        return self.total

    def __neg__(self) -> "SumOfTokens":
        return SumOfTokens(-self.total)

    def detach(self) -> "SumOfTokens":
        return SumOfTokens(self.total.detach())

    @classmethod
    def __torch_function__(
        cls, function: Any, classes: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        cls._raise(function.__name__)

    def __getattr__(self, name: str) -> Any:
        self._raise(repr(name), AttributeError)

    @staticmethod
    def _raise(use: str, error: type[Exception] = TypeError) -> None:
        raise error(
            f"outputs: expected TRL's SFTTrainer.compute_loss, which sums the fields, got {use} of one; "
            "call the model with fused_lm_head=True yourself, which gives fields per token."
        )


# Wrappers of the model look for tensors in its output.
register_pytree_node(
    SumOfTokens,
    lambda field: ([field.total], None),
    lambda values, context: SumOfTokens(*values),
    serialized_type_name="logitless.SumOfTokens",
)


@dataclass(frozen=True, eq=False)
class GatherableLogits(DeferredLogits):
    """Logits (B, T, V), or log-probabilities, that support slicing, division and gathering.

    They hold the head as it was in the forward pass: a PEFT adapter may be switched off for a teacher's
    forward pass, and on again before the logits are read.

    Attributes:
        chunked: the chunked loss that records the plans.
        is_normalized: whether they are log-probabilities, after `log_softmax`.
        loss_mask: (B, T), of the tokens that a self-distillation counts.
    """

    session: ChunkedLossSession | None = None
    is_normalized: bool = False
    loss_mask: Tensor | None = None

    operations: ClassVar = {
        F.log_softmax: "log_softmax",
        torch.log_softmax: "log_softmax",
        torch.gather: "gather",
        torch.take_along_dim: "take_along_dim",
        F.cross_entropy: "cross_entropy",
    }
    supported: ClassVar = "a use without the full logits"
    remedy: ClassVar = "the flag never builds them, so set use_chunked_loss=False"

    @property
    def budget_option(self) -> dict[str, Any]:
        return {"logits_budget": self.deferral.logits_budget}

    def call_with_head(self, function: Callable[[Tensor, HeadView], Any]) -> Any:
        return function(self.hidden, self.current_view())

    def log_softmax(self, dim: int, **kwargs: Any) -> "GatherableLogits":
        if dim != -1:
            self._refuse(f"log_softmax over {dim}")
        return replace(self, is_normalized=True)

    def __mul__(self, factor: Any) -> "GatherableLogits":
        if self.is_normalized:
            self._refuse("a product after log_softmax")
        return super().__mul__(factor)

    def chunk(self, chunks: int, dim: int) -> list["GatherableLogits"]:
        return [replace(self, hidden=x) for x in self.hidden.chunk(chunks, dim)]

    def detach(self) -> "GatherableLogits":
        hidden, head = tree_map_only(Tensor, Tensor.detach, (self.hidden, self.head))
        return replace(self, hidden=hidden, head=head)

    def statistics(self, ids: Tensor, **options: Any) -> dict[str, Tensor]:
        """Statistics by name: of `TokenStatistics` for ids (B, T), of `IdsStatistics` for ids (B, T, k).

        They are 0 where an id is -100. `options`: fields of these classes.
        """
        ids = ids.to(self.device)
        head = self.current_view()
        options = self.budget_option | options
        with self.session.without_offloading():
            if ids.dim() < self.dim():
                statistics, plan = TokenStatistics(**options).statistics(self.hidden, head, ids)
            else:
                statistics, plan = logprobs_of_ids(self.hidden, head, ids, None, IdsStatistics(**options))
        self.session.record_plan(plan)
        return statistics

    def gather(self, dim: int, index: Tensor) -> Tensor:
        if not self.is_normalized or dim not in (-1, self.dim() - 1):
            self._refuse(f"gather of dim {dim} with log_softmax={self.is_normalized}")
        if index.shape[-1] == 1:
            return self.statistics(index[..., 0])["logps"][..., None]
        return self.statistics(index)["logps"]

    def take_along_dim(self, indices: Tensor, dim: int) -> Tensor:
        return self.gather(dim, indices)

    def cross_entropy(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.session.without_offloading():
            loss = super().cross_entropy(*args, **kwargs)
        self.session.record_plan(self.deferral.last_plan)
        return loss

    def argmax(self, dim: int) -> Tensor:
        """The id (B, T) with the largest logit of each token, compared in fp32: bf16 rounds different logits
        to equal ones."""
        if dim != -1:
            self._refuse(f"argmax over {dim}")
        top1 = TopkStatistics(k=1, logits_dtype=torch.float32, **self.budget_option)
        with torch.no_grad():
            statistics, _ = top1.statistics(self.hidden, self.current_view(), self._no_targets(), None)
        return statistics["ids"][..., 0]

    def mean(self, dim: int | None = None) -> Tensor:
        """Return the mean logit of each token (`dim=-1`), or of all tokens (`dim=None`).

        Without a softcap it is computed as `(hidden @ weight.mean(0) + bias.mean()) * logit_scale`.

        Raises:
            TypeError: `hidden` or the head requires grad.
        """
        tensors = [x for x in tree_leaves((self.hidden, self.head)) if isinstance(x, Tensor)]
        requires_grad = any(x.requires_grad for x in tensors)
        if dim not in (None, -1) or self.is_normalized or requires_grad:
            self._refuse(f"mean over {dim} with requires_grad={requires_grad}")
        head = self.current_view()
        if head.softcap is None:
            mean_row = whole(head.weight.mean(0))
            bias = 0.0 if head.bias is None else whole(head.bias.float().mean())
            mean_logits = ((self.hidden.to(head.dtype) @ mean_row).float() + bias) * head.logit_scale
        else:
            loss = TokenStatistics(also=("sum_logits",), **self.budget_option)
            statistics, _ = loss.statistics(self.hidden, head, self._no_targets())
            mean_logits = statistics["sum_logits"] / self.rows
        return mean_logits if dim == -1 else mean_logits.mean()

    def _no_targets(self) -> Tensor:
        """Targets (B, T) for statistics that do not depend on them."""
        return torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)


@contextmanager
def return_gatherable_logits(session: ChunkedLossSession) -> Iterator[None]:
    """Context manager in which attached models return gatherable logits, computed under Accelerate's
    autocast, which is otherwise inside of their forward passes."""
    with swap_attributes(session, returns_gatherable_logits=True), session.trainer.accelerator.autocast():
        yield


def _gatherable_forward(
    model: Any, state: tuple[ChunkedLossSession, Forwards], original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Forward pass of a model that returns `GatherableLogits`."""
    session, forwards = state
    # TRL's fused head computes the loss of another trainer of this model.
    if not session.returns_gatherable_logits or kwargs.get("fused_lm_head"):
        return original(*args, **kwargs)
    kwargs |= accepted(forwards.keywords, use_cache=False, return_dict=True)
    has_labels = kwargs.get("labels") is not None
    if torch.is_grad_enabled():
        check_no_backward_hooks(model.get_output_embeddings(), "model")
    check_equal_tokens(session, model, kwargs.get("input_ids", args[0] if args else None))
    # The loss of a call with labels is the model's own.
    with defer_logits(model, session.logits_budget, needs_cross_entropy=has_labels):
        output = original(*args, **kwargs)
    logits = logits_in(output, model)
    if not isinstance(output, ModelOutput):  # TRL reads its `logits`
        got = f"{type(output).__name__} of {type(model).__name__}"
        raise value_error("model", "a forward pass that returns a ModelOutput", got, "return one")
    hidden, *parameters = logits.call_with_head(lambda hidden, head: (hidden, head.weight, head.bias))
    # Copies or views, not the parameters: FSDP frees the parameters after the forward pass, and DDP searches
    # the graphs of a model's outputs for used parameters, and does not find one that is itself an output.
    copy = torch.clone if session.trainer.is_fsdp_enabled else lambda x: x.view_as(x)
    weight, bias = tree_map_only(Tensor, copy, parameters)
    head = HeadView(weight, bias, of_model=True, in_shards=split_over_vocabulary(weight))
    gatherable_logits = GatherableLogits(
        hidden,
        head,
        Deferral(logits_budget=session.logits_budget),
        head.shape[0],
        logits.logit_scale,
        logits.softcap,
        session,
    )
    fields = dict(output) | {"logits": gatherable_logits}
    if not has_labels:
        fields.pop("loss", None)  # a router loss alone
    if fields.get("hidden_states") is None:
        # FSDP looks for tensors among the outputs, to start the backward pass there.
        fields["hidden_states"] = (hidden,)
    return type(output)(**fields)
