"""`estimate`: the plan, memory and matrix products of a call, without allocating its tensors.

The loss is called with fake tensors, up to the chunk loop, where the engine's planner returns its plan.
Therefore no planning rule is written twice.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from logitless.engine.base import CallResult, Mode, replaced
from logitless.engine.budget import budget_of_memory, default_budget, plan_for
from logitless.engine.call import HeadCall, d_hidden_dtype, pack, unpack
from logitless.engine.choose import resolve_rows
from logitless.engine.gradients import sum_dtypes
from logitless.engine.plan import MIB, Pass, Plan, Write
from logitless.engine.sampling_mask import SamplingMask
from logitless.errors import type_error, value_error
from logitless.kernels import planned_for
from logitless.losses import GRPOLoss, KTOLoss, MedusaHeads, MedusaLoss, MultiTokenLoss, SpeculatorLoss
from logitless.losses.base import LinearLoss
from logitless.losses.policy import PolicyLoss
from logitless.losses.reference_model import ComparedLoss
from logitless.tools.cards import Card, find_card

# Arguments of a call that an estimate does not support.
UNSUPPORTED = ("accumulate_into", "grad_scale")


@dataclass(frozen=True)
class Estimate:
    """The plan of a call, and how much memory and how many products it takes.

    Attributes:
        plan: the plan that `LossOutput.plan` will be.
        plans: the plans of all passes over the tokens: one for each head, and one for a backward pass that
            computes gradients from those of per-token statistics.
        products: matrix products with the heads and their gradients per supervised token, all heads together:
            3, as in plain PyTorch, if the logits are projected once. Includes the separate pass for the
            reference of an unreduced loss. For a `SpeculatorLoss`, per pair of a step and a token.
        other_products: matrix products with the head of a reference or teacher per supervised token.
        chunk_bytes: bytes of the largest chunk: its logits, the temporaries that grow with the vocabulary,
            and those that do not grow with the rows.
        gradient_bytes: bytes of the returned gradients, d_hidden and d_weight.
        sum_bytes: bytes of the wider sum of d_weight over several chunks, until it is cast; 0 if there is
            none.
        logits_bytes: bytes of one head's full logits, once, in the dtype of the operands. Plain PyTorch with
            an fp32 loss holds several copies.
        peak_bytes: approximate peak memory of a step in addition to hidden states and heads: d_hidden,
            d_weight or its wider sum, and the larger of the chunk and the gradient that the sum is cast to
            after the last chunk.
        input_bytes: bytes of hidden states and heads, including those of a teacher or reference.
        card: the GPU that is planned for, if `card` or `memory` was passed.
    """

    plan: Plan
    plans: tuple[Plan, ...]
    products: float
    other_products: float
    chunk_bytes: int
    gradient_bytes: int
    sum_bytes: int
    logits_bytes: int
    peak_bytes: int
    input_bytes: int
    card: Card | None = None

    def __str__(self) -> str:
        total_bytes = self.input_bytes + self.peak_bytes
        on_card = ""
        if self.card is not None:
            on_card = f"\nplanned for {self.card}: about {_mib(total_bytes)} with hidden states and heads"
        others = f", and {self.other_products:g} of the reference or teacher" if self.other_products else ""
        summed = f" and {_mib(self.sum_bytes)} for d_weight's sum" if self.sum_bytes else ""
        return (
            f"{self.plan.describe()}\n"
            f"products per supervised token: {self.products:g}{others}\n"
            f"memory: {_mib(self.chunk_bytes)} for a chunk, "
            f"{_mib(self.gradient_bytes)} for gradients{summed}\n"
            f"peak beyond the inputs: about {_mib(self.peak_bytes)}\n"
            f"full logits: {_mib(self.logits_bytes)} for one copy in the operands' dtype; "
            f"PyTorch with an fp32 upcast holds several{on_card}"
        )


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"


def estimate(
    loss: Callable[..., object],
    *,
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    card: str | None = None,
    memory: int | str | None = None,
    sequences: int | None = None,
    frozen_head: bool = False,
    heads: int | None = None,
    steps: int | None = None,
    teacher_hidden_size: int | None = None,
    teacher_vocab_size: int | None = None,
    teacher_topk: int | None = None,
    reference_hidden_size: int | None = None,
    **inputs: object,
) -> Estimate:
    """Estimate the plan of a call, its memory and its matrix products, without allocating its tensors.

    The estimate includes gradients if autograd is enabled; under torch.no_grad() it is that of an evaluation.
    The memory of a `LogitsLoss` without a kernel is measured on 64 rows, as in the call itself. For a GPU
    that is not in this machine, it is measured without torch.compile, which gives an upper bound. While an
    estimate for a `card` runs, do not call a loss in another thread.

    Args:
        loss: a loss, or `linear_logprobs` (options by functools.partial), without `tp_group` and `cp_group`.
        tokens: number of positions of all sequences; all are supervised unless `targets` is passed.
        hidden_size: H.
        vocab_size: V.
        dtype: dtype of hidden states and heads.
        device: device of this machine on which the call would run; default the GPU, if there is one.
        card: name of a GPU in `logitless.tools.cards.CARDS`, such as "h100-80", which need not be in this
            machine: plan for its memory and for the kernels that it runs.
        memory: memory of a GPU that need not be in this machine, in bytes or as text such as "80GiB". Without
            `card`, the GPU runs only the portable Triton kernels. A few percent of a card's nominal memory
            are not available.
        sequences: number of sequences, all of equal length. Default: the loss's `sequences_per_group` (2 for
            preference pairs), else 1. For sequences of different lengths pass `cu_seqlens`.
        frozen_head: whether the head requires no gradient, so that only hidden does.
        heads: number of heads in addition to the model's LM head, for `MedusaLoss` and `MultiTokenLoss`.
        steps: S, for `SpeculatorLoss`; its draft has `vocab_size` ids, and its verifier, the teacher, has
            `teacher_vocab_size`.
        teacher_hidden_size: H' of a teacher; default H.
        teacher_vocab_size: V' of a teacher; default V.
        teacher_topk: k, for a teacher that is passed as the log-probabilities of its k most probable ids.
        reference_hidden_size: H' of a reference that is passed as hidden states and head; default: the
            reference is passed as log-probabilities.
        **inputs: other arguments of the call: `targets`, `cu_seqlens`, `bias`, or inputs that a custom loss
            declares, of which only shapes, dtypes and the ignored positions of `targets` matter; or a
            `sampling_mask`, whose sets determine which tokens are projected.

    Returns:
        An `Estimate`; print it, or read its attributes.

    Raises:
        ValueError: the loss does not support these sizes or inputs.
        TypeError: `loss` is not a loss, or does not take one of the inputs.
    """
    _check_loss(loss, inputs)
    if not dtype.is_floating_point:
        remedy = "pass the dtype of hidden states and head"
        raise value_error("dtype", "a floating-point dtype", dtype, remedy)
    sizes = _Sizes(
        tokens=tokens,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        sequences=sequences,
        heads=heads,
        steps=steps,
        teacher_hidden_size=teacher_hidden_size,
        teacher_vocab_size=teacher_vocab_size,
        teacher_topk=teacher_topk,
        reference_hidden_size=reference_hidden_size,
    )
    sizes.check(loss)
    gpu = find_card(card, memory)
    if gpu is None:
        device = _check_device(device)
    elif device is not None:
        remedy = "name the device or the card"
        raise value_error("device", "None beside card or memory", device, remedy)
    else:
        loss = _set_budget(gpu, loss)
        device = torch.device("cpu")
    cu_seqlens = inputs.get("cu_seqlens")
    shape = sizes.shape(loss, cu_seqlens)
    num_sequences = shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    with_teacher = getattr(loss, "teacher", False) and "teacher_logprobs_topk" not in inputs
    hidden, head, call_inputs = sizes.operands(loss, shape, dtype, device, frozen_head, with_teacher)
    targets = inputs.pop("targets", None)
    if targets is None:
        targets = _make_targets(shape, inputs.get("sampling_mask"), device)
    call_inputs = _make_inputs(loss, targets, num_sequences, call_inputs) | call_inputs | inputs
    planner = _Planner(gpu)
    with replaced(planner):
        loss(hidden, head, targets, **call_inputs)
    inputs = {id(x): x.nbytes for x in tree_leaves((hidden, head, call_inputs)) if isinstance(x, Tensor)}
    inputs |= {id(x): x.nbytes for x in head.parameters()} if isinstance(head, MedusaHeads) else {}
    return planner.estimate(tokens * vocab_size * dtype.itemsize, sum(inputs.values()))


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The sizes of a call; see the arguments of `estimate`."""

    tokens: int
    hidden_size: int
    vocab_size: int
    sequences: int | None
    heads: int | None
    steps: int | None
    teacher_hidden_size: int | None
    teacher_vocab_size: int | None
    teacher_topk: int | None
    reference_hidden_size: int | None

    def check(self, loss: Callable) -> None:
        """Raise ValueError if the loss has no call of these sizes."""
        for name, size in vars(self).items():
            if size is not None and size <= 0:
                raise value_error(name, "a positive number", size, "give the size of the call")
        has_heads = isinstance(loss, MedusaLoss | MultiTokenLoss)
        got = repr(self.heads)
        if (self.heads is not None) != has_heads:
            expected = (
                "the number of heads in addition to the model's LM head" if has_heads else "None for one head"
            )
            remedy = "pass it" if has_heads else "only MedusaLoss and MultiTokenLoss have several heads"
            raise value_error("heads", expected, got, remedy)
        has_head = self.teacher_hidden_size is not None or self.teacher_vocab_size is not None
        got = self.teacher_topk
        if got is not None and has_head:
            raise value_error(
                "teacher_topk", "None beside a teacher with a head", got, "describe one teacher"
            )
        is_speculator = isinstance(loss, SpeculatorLoss)
        got = self.steps
        if (got is not None) != is_speculator:
            expected = (
                "the number of steps of the draft" if is_speculator else "None for a loss without steps"
            )
            raise value_error(
                "steps", expected, got, "pass it" if is_speculator else "only SpeculatorLoss has steps"
            )

    def shape(self, loss: Callable, cu_seqlens: Tensor | None) -> tuple[int, ...]:
        """Return the shape of the targets: (tokens,) with `cu_seqlens`, else (sequences, tokens / sequences).

        Raises:
            ValueError: `sequences` does not divide the tokens, or is given beside `cu_seqlens`.
        """
        sequences = self.sequences
        if cu_seqlens is not None:
            if sequences is not None:
                remedy = "cu_seqlens has the number of sequences"
                raise value_error("sequences", "None beside cu_seqlens", sequences, remedy)
            return (self.tokens,)
        sequences = sequences or getattr(loss, "sequences_per_group", 1)
        expected = f"a multiple of {sequences} sequences"
        got = self.tokens
        if got % sequences:
            raise value_error("tokens", expected, got, "include the padding in tokens, or pass cu_seqlens")
        return (sequences, got // sequences)

    def operands(
        self,
        loss: Callable,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        frozen_head: bool,
        with_teacher: bool,
    ) -> tuple[Tensor | list[Tensor], Tensor | MedusaHeads, dict]:
        """Return the arguments of the call as fake tensors: hidden, head, and the inputs by name."""
        # Imported here, because it loads more of torch than `import logitless` may.
        from torch._subclasses.fake_tensor import FakeTensorMode

        H, V = self.hidden_size, self.vocab_size
        inputs = {}
        with FakeTensorMode():

            def make(*size: int) -> Tensor:
                return torch.empty(size, dtype=dtype, device=device)

            hidden = make(*shape, H).requires_grad_()
            head = weight = make(V, H).requires_grad_(not frozen_head)
            if isinstance(loss, SpeculatorLoss):
                hidden = [make(*shape, H).requires_grad_() for _ in range(self.steps)]
            elif isinstance(loss, MultiTokenLoss):
                hidden = [hidden, *(make(*shape, H).requires_grad_() for _ in range(self.heads))]
            elif self.heads is not None:
                head = MedusaHeads(H, V, self.heads, device=device, dtype=dtype)
                inputs["base_weight"] = weight
            if self.reference_hidden_size is not None:
                inputs["ref_hidden"] = make(*shape, self.reference_hidden_size)
                inputs["ref_weight"] = make(V, self.reference_hidden_size)
            is_described = self.teacher_hidden_size or self.teacher_vocab_size
            if is_described or (with_teacher and self.teacher_topk is None):
                size = self.teacher_hidden_size or H
                inputs["teacher_hidden"] = make(*shape, size)
                inputs["teacher_weight"] = make(self.teacher_vocab_size or V, size)
        # The call reads the values of these.
        if self.teacher_topk is not None:
            logps = torch.full((*shape, self.teacher_topk), -1.0, dtype=torch.float32, device=device)
            inputs["teacher_logprobs_topk"] = (logps, torch.zeros_like(logps, dtype=torch.int64))
        if isinstance(loss, SpeculatorLoss) and (self.teacher_vocab_size or V) != V:
            inputs["draft_ids"] = torch.arange(V, device=device)
        return hidden, head, inputs


def _check_loss(loss: Callable, inputs: Mapping[str, object]) -> None:
    """Check that an estimate supports the loss and its options; raise TypeError or ValueError if not."""
    remedy = "pass an object such as CrossEntropyLoss(), or linear_logprobs"
    is_loss_instance = callable(loss) and not isinstance(loss, type)
    if not is_loss_instance:
        raise type_error("loss", "a loss", getattr(loss, "__name__", type(loss).__name__), remedy)
    options = getattr(loss, "keywords", None)  # a dict where the loss is a functools.partial
    options = options if isinstance(options, dict) else {}
    for name in ("tp_group", "cp_group"):
        group = getattr(loss, name, options.get(name))
        remedy = "estimate the call of one rank, with its rows of the head or its tokens"
        if group is not None:
            raise value_error(name, "None in an estimate", group, remedy)
    for name in UNSUPPORTED:
        is_absent = name not in inputs
        remedy = "leave it out"
        if not is_absent:
            raise value_error(name, "nothing in an estimate", type(inputs.get(name)).__name__, remedy)


def _set_budget(card: Card, loss: Callable) -> Callable:
    """Return the loss with the default budget of a card, unless its `logits_budget` is set."""
    options = {"logits_budget": budget_of_memory(card.memory)}
    if isinstance(loss, LinearLoss):
        return loss if loss.logits_budget else replace(loss, **options)
    keywords = getattr(loss, "keywords", {})
    return loss if keywords.get("logits_budget") else functools.partial(loss, **options)


def _check_device(requested: torch.device | str | None) -> torch.device:
    """Return the device, by default the GPU if there is one.

    Raises:
        ValueError: it is the meta device, or is not in this machine.
    """
    try:
        device = torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
        exists = torch.empty(0, dtype=torch.float32, device=device).device.type != "meta"
    except (RuntimeError, AssertionError):  # raised by torch for a device that does not exist
        exists = False
    if not exists:
        raise value_error("device", "a device of this machine", requested, "estimate where the call will run")
    return device


def _make_targets(shape: tuple[int, ...], mask: SamplingMask | None, device: torch.device) -> Tensor:
    """Return valid targets: with a sampling mask, ids that are in its sets, else zeros."""
    targets = torch.zeros(shape, dtype=torch.int64, device=device)
    if not isinstance(mask, SamplingMask) or len(mask) != targets.numel() or not mask.token_ids.numel():
        return targets  # the call of the loss raises for a wrong mask
    starts = mask.offsets[:-1].long().clamp(0, mask.token_ids.shape[0] - 1)
    ids = mask.token_ids.long()
    return torch.where(mask.offsets.diff() > 0, ids[starts], 0).view(shape)


def _make_inputs(loss: Callable, targets: Tensor, sequences: int, present: Mapping[str, object]) -> dict:
    """Return zeros for inputs of a policy or preference loss that the caller may leave out of an estimate."""
    tokens = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    inputs: dict[str, object] = {}
    if isinstance(loss, PolicyLoss):
        inputs["advantages"] = tokens.new_zeros(sequences)
        if loss.corrections:
            inputs["sampling_logps"] = tokens
    if isinstance(loss, GRPOLoss) or getattr(loss, "old_kl_coef", 0.0):
        inputs["old_logps"] = tokens
    if isinstance(loss, KTOLoss):
        inputs["labels"] = tokens.new_zeros(sequences, dtype=torch.bool)
        inputs["kl"] = 0.0 if loss.loss_type == "kto" else None
    if isinstance(loss, ComparedLoss) and loss.needs_reference and "ref_hidden" not in present:
        inputs["ref_logps"] = tokens
    return inputs


@dataclass
class _Planner:
    """Replaces the engine's passes (`base.replaced`): records their plans, and returns zeros."""

    card: Card | None = None  # a GPU that need not be in this machine
    planned: list[tuple[HeadCall, Plan, Pass]] = field(default_factory=list)
    # Rows of the teacher per projected row, if the loss declares `teacher_rows`; else None.
    teacher_share: float | None = None
    plan: Plan | None = None  # plan of the last call
    gradient_bytes: int = 0  # of all calls

    def __call__(self, heads: Sequence[HeadCall], mode: Mode) -> CallResult:
        signature, tensors, sequences = pack(heads)
        with self._on_card():  # `unpack` reads which kernels the device has
            calls = unpack(signature, tensors, sequences)
        self.gradient_bytes += sum(x.nbytes for x, needs_grad in zip(tensors, signature.needs) if needs_grad)
        purpose = Pass.STATISTICS if mode is Mode.PER_TOKEN else Pass.SOLVE
        is_statistics_pass = purpose is Pass.STATISTICS
        has_several_heads = len(heads) > 1
        for call, rows in map(resolve_rows, calls):
            if rows.teacher is not None:
                self.teacher_share = len(rows.teacher.index) / max(1, rows.count)
            with self._on_card():
                self.plan = plan_for(call, rows, purpose, len(heads), wide_d_weight=has_several_heads)
            self.planned.append((call, self.plan, purpose))
        if is_statistics_pass and call.trainable and not call.keeps_dlogp_dhidden:
            with self._on_card():
                plan = plan_for(call, rows, Pass.GRADIENTS)
            self.planned.append((call, plan, Pass.GRADIENTS))
        loss = call.loss
        N = call.targets.shape[0]
        dtype = call.stat_dtype
        device = call.targets.device
        if purpose is Pass.SOLVE:
            zeros = torch.zeros(len(heads), 1 + len(loss.metric_names), dtype=dtype, device=device)
            return CallResult(zeros.sum(), zeros, {}, self.plan)
        shapes = loss.reader.statistic_shapes(loss, N, call.inputs).items()
        statistics = {
            name: torch.zeros(size, dtype=statistic_dtype or dtype, device=device)
            for name, (size, statistic_dtype) in shapes
        }
        return CallResult(None, None, statistics, self.plan)

    def _on_card(self) -> AbstractContextManager:
        """Context in which the engine plans for the kernels of `card`."""
        return nullcontext() if self.card is None else planned_for(self.card.generation)

    def estimate(self, logits_bytes: int, input_bytes: int) -> Estimate:
        plans = tuple(plan for _, plan, _ in self.planned)
        products = [_products(call, plan, self.teacher_share) for call, plan, _ in self.planned]
        with self._on_card():
            memory = [self._memory(*entry) for entry in self.planned]
        chunk_bytes, sum_bytes, peak_bytes = map(max, zip(*memory))
        own_products, other_products = map(sum, zip(*products))
        return Estimate(
            plan=self.plan,
            plans=plans,
            products=own_products,
            other_products=other_products,
            chunk_bytes=chunk_bytes,
            gradient_bytes=self.gradient_bytes,
            sum_bytes=sum_bytes,
            logits_bytes=logits_bytes,
            peak_bytes=peak_bytes,
            input_bytes=input_bytes,
            card=self.card,
        )

    def _memory(self, call: HeadCall, plan: Plan, purpose: Pass) -> tuple[int, int, int]:
        """Return the bytes of a chunk, of the wider sums of d_weight and d_bias, and of all at the peak."""
        chunk = plan.chunk_bytes + _fixed_bytes(call, purpose)
        if plan.writes is Write.NEVER:
            return chunk, 0, chunk
        solved = [x for x, _, x_purpose in self.planned if x_purpose is Pass.SOLVE]
        has_several_heads = len(solved) > 1
        wide_d_weight = has_several_heads or plan.d_weight_parts > 1
        dtypes = sum_dtypes(call, multi_head=has_several_heads, wide_d_weight=wide_d_weight)
        gradient_sums = []
        if call.needs.weight:
            gradient_sums.append((call.weight.numel(), dtypes.weight))
        if call.needs.bias:
            gradient_sums.append((call.bias.numel(), dtypes.bias))
        # Only the sums of one head are alive at a time.
        wide_sums = [(size, dtype) for size, dtype in gradient_sums if dtype != call.weight.dtype]
        sum_bytes = sum(size * dtype.itemsize for size, dtype in wide_sums)
        cast_bytes = sum(size * call.weight.itemsize for size, _ in wide_sums)
        # With several heads, and in fp16, d_hidden is summed in fp32.
        itemsize = dtypes.hidden.itemsize
        hidden_states = {x.indices.hidden: x.hidden for x in solved}
        wide_bytes = sum(x.numel() * max(0, itemsize - x.itemsize) for x in hidden_states.values())
        # A statistics pass holds d_logp / d_hidden instead of a sum, and computes d_hidden from it.
        d_hidden_bytes = call.hidden.numel() * d_hidden_dtype(call.dtype).itemsize
        final_bytes = d_hidden_bytes if purpose is Pass.STATISTICS else cast_bytes
        lasting_bytes = self.gradient_bytes - cast_bytes + sum_bytes + wide_bytes
        return chunk, sum_bytes, lasting_bytes + max(chunk, final_bytes)


def _products(call: HeadCall, plan: Plan, teacher_share: float | None) -> tuple[float, float]:
    """Return products per projected row: with the head and its gradients, and with another model's head."""
    read = plan.projected[0] if plan.reads else 0
    has_other = any(call.inputs.get(f"{model}_weight") is not None for model in ("teacher", "ref"))
    tokens = plan.rows if plan.replay is None else plan.replay.rows
    # The later pass has a separate plan.
    products = plan.products - plan.later * plan.rows / max(1, tokens) if plan.products else 0.0
    share = has_other if teacher_share is None else teacher_share
    return products, read / max(1, tokens) * share


def _fixed_bytes(call: HeadCall, purpose: Pass) -> int:
    """Return the bytes of the temporaries that do not grow with the rows."""
    budget = call.loss.logits_budget or default_budget(call.weight.device)
    return call.loss.reader.costs(call, budget, purpose).fixed_bytes
