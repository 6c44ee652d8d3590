"""Outputs that a model returns in the place of logits while its trainer computes a loss.

`scored`: TRL 1.16 calls `model(..., labels=labels, fused_lm_head=True)` and reads a `FusedCausalLMOutput`.
Our losses compute it, inside the model's own forward pass, where the hooks of DDP, FSDP and DeepSpeed fire.

`picked`: other trainers read `model(...).logits` themselves. They get `PickedLogits`: hidden states and the
head, not multiplied. TRL's code slices them, divides them by a temperature and gathers tokens'
log-probabilities as before. A function of whole distributions goes to one of our losses; any other use
raises.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from trl.trainer.utils import FusedCausalLMOutput

from logitless.engine.head_view import HeadView, unviewed
from logitless.errors import value_error
from logitless.exchange import exchanged, instance_forward
from logitless.losses.logprobs import TokenStatistics
from logitless.losses.several_ids import IdsStatistics, TopkStatistics, logprobs_of_ids
from logitless.models.heads import find_head, sharded_head_weight
from logitless.models.logits import Deferral, DeferredLogits, defer_logits, deferring_head
from logitless.parallel.groups import TENSOR_PARALLEL, split_over_vocabulary, whole

from .adapter import Attach, ChunkedLoss, swapped
from .forwards import Forwards, forwards_of

KEY = "score"

# Scores the labelled tokens: (hidden (B, T, H), head, labels (B, T), shift: whether position i is scored on
# label i + 1) -> fields of `FusedCausalLMOutput`, `log_probs` among them.
Score = Callable[[Tensor, HeadView, Tensor, bool], dict[str, Any]]


@dataclass(frozen=True)
class Scoring:
    """How calls of a model with `fused_lm_head=True` are computed."""

    chunked: ChunkedLoss
    score: Score
    forwards: Forwards

    def autocast(self) -> AbstractContextManager:
        """The autocast context in which TRL runs its fused head and the backbone."""
        return self.chunked.trainer.accelerator.autocast() if self.forwards.prepared else nullcontext()


def scored(score_of: Callable[[ChunkedLoss], Score]) -> Attach:
    """While it is attached, `model(..., labels=..., fused_lm_head=True)` returns a score; every other call
    runs as before."""

    def attach(chunked: ChunkedLoss) -> Callable[[PreTrainedModel], AbstractContextManager]:
        score = score_of(chunked)
        last = None

        @contextmanager
        def attached(model: PreTrainedModel) -> Iterator[None]:
            nonlocal last
            found = instance_forward(model)
            if last is None or last.forwards.model is not model or last.forwards.found is not found:
                # The same object in every step, as a compiled graph knows it by identity.
                last = Scoring(chunked, score, forwards_of(model))
            with ExitStack() as stack:
                stack.enter_context(_answering(chunked, model))
                stack.enter_context(exchanged(model, KEY, _scored_forward, last))
                if "_loss_function" in vars(model):
                    # TRL's fused head ignores a user's own, which may do anything with logits.
                    own = model._loss_function
                    stack.enter_context(swapped(model, _loss_function=_unless_deferred(own)))
                yield

        return attached

    return attach


def _answering(chunked: ChunkedLoss, model: PreTrainedModel) -> AbstractContextManager:
    head = find_head(model)
    return deferring_head(head, chunked.deferrals.setdefault(head, Deferral()))


def _unless_deferred(loss_function: Callable) -> Callable:
    def loss(logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(logits, DeferredLogits) and not logits.deferral.needs_cross_entropy:
            return torch.zeros((), dtype=torch.float32, device=logits.device)
        return loss_function(logits, *args, **kwargs)

    return loss


def compare_tokens(chunked: ChunkedLoss, model: PreTrainedModel, ids: Tensor | None) -> None:
    """Raise if the ranks of a tensor-parallel plan have different tokens; checked until the first step is
    done.

    The model would mix the tokens of these ranks to meaningless results. In TRL's trainers that generate,
    each process has its own sequences or its own order of them.
    """
    weight = sharded_head_weight(model)
    if weight is None or ids is None or "train" in chunked.verified or torch.compiler.is_compiling():
        return
    group = weight.device_mesh.get_group(TENSOR_PARALLEL)
    ids_of_ranks: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(ids_of_ranks, ids.tolist(), group=group)
    if not all(x == ids_of_ranks[0] for x in ids_of_ranks):
        expected = "the same tokens on all ranks of its tensor-parallel plan"
        got = f"others on each in {type(chunked.trainer).__name__}"
        remedy = "shard it by FSDP2 or ZeRO-3, whose ranks have sequences of their own"
        raise value_error("model", expected, got, remedy)


def picked(chunked: ChunkedLoss) -> Callable[[PreTrainedModel], AbstractContextManager]:
    """While it is attached, a model answers with `PickedLogits` in calls inside of `picking`."""

    @contextmanager
    def attached(model: PreTrainedModel) -> Iterator[None]:
        with _answering(chunked, model), exchanged(model, KEY, _picked_forward, chunked):
            yield

    return attached


def _scored_forward(
    model: PreTrainedModel,
    scoring: Scoring,
    stock: Callable,
    *args: Any,
    fused_lm_head: bool = False,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,  # already aligned, as context and sequence parallelism pass them
    **kwargs: Any,
) -> Any:
    if not fused_lm_head:
        own = {"labels": labels, "shift_labels": shift_labels}
        return stock(*args, **kwargs, **{name: x for name, x in own.items() if x is not None})
    with scoring.autocast():
        return _fused_output(model, scoring, *args, labels=labels, shift_labels=shift_labels, **kwargs)


def _fused_output(
    model: PreTrainedModel,
    scoring: Scoring,
    *args: Any,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    **kwargs: Any,
) -> FusedCausalLMOutput:
    targets = labels if shift_labels is None else shift_labels
    count = kwargs.pop("num_items_in_batch", None)
    kwargs |= {"use_cache": False, "return_dict": True}
    with defer_logits(model, needs_cross_entropy=False):
        # TRL's head calls the backbone directly, not the forward that was on the instance before.
        out = scoring.forwards.own(*args, labels=targets, **kwargs)

    names: list[str] = []

    def values(hidden: Tensor, head: HeadView) -> tuple[Tensor, ...]:
        compare_tokens(scoring.chunked, model, targets)
        fields = scoring.score(hidden, head, targets.to(hidden.device), shift_labels is None)
        names.extend(fields)
        # Hooks of modules look for tensors in tuples.
        return tuple(unviewed(x, model) for x in fields.values())

    fields = dict(zip(names, out.logits.call_with_head(values)))
    # Read by TRL under DeepSpeed's sequence parallelism only; elsewhere `compute_loss` divides the sum by its
    # own count
    count = fields["label_mask"].sum().clamp(min=1) if count is None else count
    loss = -fields["log_probs"].sum() / count
    # Of the model's own loss the cross-entropy was left out: what remains is its router loss.
    loss = loss + out.loss
    if scoring.chunked.sums is not None:
        # TRL's own `compute_loss` is running, and has called this.
        fields = {name: SumOfTokens(x) for name, x in fields.items()}
    return FusedCausalLMOutput(loss=loss, aux_loss=getattr(out, "aux_loss", None), **fields)


@dataclass(frozen=True)
class SumOfTokens:
    """A field of TRL's fused output that holds only the sum of its per-token values.

    Only TRL's own `SFTTrainer.compute_loss` gets it, which uses nothing but sums of the fields. Any other
    reader, such as a hook of the model, gets an error instead of a tensor of another shape.
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
        cls._refuse(function.__name__)

    def __getattr__(self, name: str) -> Any:
        self._refuse(repr(name), AttributeError)

    @staticmethod
    def _refuse(use: str, error: type[Exception] = TypeError) -> None:
        raise error(
            f"outputs: expected TRL's SFTTrainer.compute_loss, which sums the fields, got {use} of one; "
            "call the model with fused_lm_head=True yourself, which gives fields per token."
        )


# Wrappers of the model look for tensors in its output.
register_pytree_node(
    SumOfTokens,
    lambda found: ([found.total], None),
    lambda values, context: SumOfTokens(*values),
    serialized_type_name="logitless.SumOfTokens",
)


@dataclass(frozen=True)
class PickedLogits(DeferredLogits):
    """Logits (B, T, V), or with `normalized` their log-probabilities, with the head of their forward pass: an
    adapter may be switched off for a teacher, and on again before anybody reads the logits."""

    chunked: ChunkedLoss | None = None
    normalized: bool = False

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
    def budget(self) -> dict[str, Any]:
        return {"logits_budget": self.deferral.logits_budget}

    def call_with_head(self, function: Callable[[Tensor, HeadView], Any]) -> Any:
        return function(self.hidden, self.current_view())

    def log_softmax(self, dim: int, **kwargs: Any) -> "PickedLogits":
        return replace(self, normalized=True) if dim == -1 else self._refuse(f"log_softmax over {dim}")

    def __mul__(self, factor: Any) -> "PickedLogits":
        return self._refuse("a product after log_softmax") if self.normalized else super().__mul__(factor)

    def __getitem__(self, index: Any) -> "PickedLogits":
        masked = isinstance(index, Tensor) and index.dtype == torch.bool
        return replace(self, hidden=self.hidden[index]) if masked else super().__getitem__(index)

    def chunk(self, chunks: int, dim: int) -> list["PickedLogits"]:
        return [replace(self, hidden=x) for x in self.hidden.chunk(chunks, dim)]

    def detach(self) -> "PickedLogits":
        hidden, head = tree_map_only(Tensor, Tensor.detach, (self.hidden, self.head))
        return replace(self, hidden=hidden, head=head)

    def statistics(self, ids: Tensor, **options: Any) -> dict[str, Tensor]:
        """Statistics by `TokenStatistics` of ids (B, T), or by `IdsStatistics` of (B, T, k); 0 where an id is
        -100."""
        ids = ids.to(self.device)
        head = self.current_view()
        options = self.budget | options
        with self.chunked.saving():
            if ids.dim() < self.dim():
                statistics, plan = TokenStatistics(**options).statistics(self.hidden, head, ids)
            else:
                statistics, plan = logprobs_of_ids(self.hidden, head, ids, None, IdsStatistics(**options))
        self.chunked.note(plan)
        return statistics

    def gather(self, dim: int, index: Tensor) -> Tensor:
        if not self.normalized or dim not in (-1, self.dim() - 1):
            return self._refuse(f"gather of dim {dim} with log_softmax={self.normalized}")
        one = index.shape[-1] == 1
        return self.statistics(index[..., 0])["logps"][..., None] if one else self.statistics(index)["logps"]

    def take_along_dim(self, indices: Tensor, dim: int) -> Tensor:
        return self.gather(dim, indices)

    def cross_entropy(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.chunked.saving():
            loss = super().cross_entropy(*args, **kwargs)
        self.chunked.note(self.deferral.last_plan)
        return loss

    def argmax(self, dim: int) -> Tensor:
        """The best id of each token (B, T); of equal logits, which bf16 makes, the first in fp32."""
        if dim != -1:
            return self._refuse(f"argmax over {dim}")
        best = TopkStatistics(k=1, logits_dtype=torch.float32, **self.budget)
        targets = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        with torch.no_grad():
            return best.statistics(self.hidden, self.current_view(), targets, None)[0]["ids"][..., 0]

    def mean(self, dim: int | None = None) -> Tensor:
        """The mean of each token's logits (dim -1) or of all logits, detached. Without a softcap it is the
        product of the hidden states with the mean row of the head."""
        learns = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((self.hidden, self.head)))
        if dim not in (None, -1) or self.normalized or learns:
            return self._refuse(f"mean over {dim} with requires_grad={learns}")
        head = self.current_view()
        if head.softcap is None:
            row = whole(head.weight.mean(0))
            bias = 0.0 if head.bias is None else whole(head.bias.float().mean())
            mean_logits = ((self.hidden.to(head.dtype) @ row).float() + bias) * head.logit_scale
        else:
            targets = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
            every = TokenStatistics(also=("sum_logits",), **self.budget)
            mean_logits = every.statistics(self.hidden, head, targets)[0]["sum_logits"] / self.rows
        return mean_logits if dim == -1 else mean_logits.mean()


@contextmanager
def picking(chunked: ChunkedLoss) -> Iterator[None]:
    """Context in which the models return picked logits, with Accelerate's autocast inside their forward."""
    with swapped(chunked, picking=True), chunked.trainer.accelerator.autocast():
        yield


def _picked_forward(model: Any, chunked: ChunkedLoss, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    if not chunked.picking:
        return stock(*args, **kwargs)
    kwargs |= {"use_cache": False, "return_dict": True}
    compare_tokens(chunked, model, kwargs.get("input_ids", args[0] if args else None))
    with defer_logits(model, needs_cross_entropy=False):
        out = stock(*args, **kwargs)
    logits = out.logits
    aux_loss = getattr(out, "aux_loss", None)
    hidden, *own = logits.call_with_head(lambda hidden, head: (hidden, head.weight, head.bias))
    # Not the parameters: FSDP takes them away after the forward pass, and DDP looks for those in use behind
    # its outputs, where a leaf has nothing behind it.
    copied = torch.clone if chunked.trainer.is_fsdp_enabled else lambda x: x.view_as(x)
    weight, bias = tree_map_only(Tensor, copied, own)
    head = HeadView(weight, bias, of_model=True, in_shards=split_over_vocabulary(weight))
    deferral = Deferral(logits_budget=chunked.budget)
    picked_logits = PickedLogits(
        hidden, head, deferral, head.shape[0], logits.logit_scale, logits.softcap, chunked
    )
    # FSDP looks for tensors among the outputs, to begin the backward pass there.
    return MoeCausalLMOutputWithPast(logits=picked_logits, aux_loss=aux_loss, hidden_states=(hidden,))
