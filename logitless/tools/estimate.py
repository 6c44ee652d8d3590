"""`estimate`: the plan, memory and products of a call, before its tensors exist.

The loss is really called, with stand-ins that have a shape, a dtype and a device but no memory, up to the
chunk loop, where the engine's own planner returns its plan. So no planning rule is written twice.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from logitless.engine.budget import budget_of_memory, default_budget
from logitless.engine.call import HeadCall, d_hidden_dtype
from logitless.engine.choose import resolve_rows
from logitless.engine.function import CallResult, Mode, replaced
from logitless.engine.gradients import sum_dtypes
from logitless.engine.packing import pack, unpack
from logitless.engine.passes import keeps_dlogp_dhidden, plan_for
from logitless.engine.plan import MIB, Kind, Pass, Plan
from logitless.engine.sampling_mask import SamplingMask
from logitless.errors import type_error, value_error
from logitless.kernels import planned_for
from logitless.losses import GRPOLoss, KTOLoss, MedusaHeads, MedusaLoss, MultiTokenLoss, SpeculatorLoss
from logitless.losses.base import LinearLoss
from logitless.losses.policy import PolicyLoss
from logitless.losses.reference_model import ComparedLoss
from logitless.tools.cards import Card, card_of

# Options of a call that an estimate does not cover.
REFUSED = ("accumulate_into", "accumulate_now", "grad_scale")


@dataclass(frozen=True)
class Estimate:
    """How a call will run, and what it will take.

    Attributes:
        plan: what `LossOutput.plan` will be.
        plans: the plans of all passes over the tokens: of each head, and of the backward pass that computes
            gradients from those of per-token statistics.
        products: with the head and its gradients, per supervised token: 3 as in plain PyTorch, where the
            logits are projected once; of all heads together. The reference of an unreduced loss has a pass
            of its own, which counts here. Of a `SpeculatorLoss`, per pair of a step and a token.
        other_products: with the head of a reference or a teacher, likewise.
        chunk_bytes: memory of the largest chunk: its logits, every temporary that grows with the vocabulary,
            and what does not grow with the rows.
        gradient_bytes: of the returned gradients, d_hidden and d_weight.
        sum_bytes: of the wider sum of d_weight over several chunks, until it is cast; 0 if there is none.
        logits_bytes: of one copy of one head's full logits, in the dtype of the operands. PyTorch that takes
            them to fp32 for the loss holds several of them.
        peak_bytes: about what a step takes at its peak beyond hidden states and heads: d_hidden, d_weight or
            its wider sum, and the chunk; or the gradient that the sum is cast to when the chunk is gone,
            where that is larger.
        input_bytes: of hidden states and heads, those of a teacher or reference included.
        card: the GPU that is planned for, where it was named by `card` or `memory`.
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
        whole = self.input_bytes + self.peak_bytes
        on_card = ""
        if self.card is not None:
            on_card = f"\nplanned for {self.card}: about {_mib(whole)} with hidden states and heads"
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
    memory: int | None = None,
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
    """The plan of a call, its memory and its products, without allocating hidden states, heads or logits.

    Gradients are expected where autograd is on: under torch.no_grad() the estimate is of an evaluation. A
    `LogitsLoss` without a kernel is measured on 64 rows, as in the call itself; for a GPU that is not here,
    uncompiled, which is an upper bound. Call no loss in another thread while a `card` is planned for.

    Args:
        loss: a loss, or `linear_logprobs` (options by functools.partial); without tp_group and cp_group.
        tokens: positions in all, T for each sequence; all are supervised unless `targets` says otherwise.
        hidden_size: H.
        vocab_size: V.
        dtype: of hidden states and heads.
        device: one of this machine, where the call would run; default the GPU, if there is one.
        card: a GPU that need not be here, by a name of `logitless.tools.cards.CARDS` such as "h100-80": plan
            for its memory and for the kernels that it runs.
        memory: bytes of a GPU that need not be here; without `card`, a GPU that runs the portable Triton
            kernels alone. A few per cent of the memory that a card is sold with are not available.
        sequences: of equal length; default one, or a group. For others pass `cu_seqlens`.
        frozen_head: whether the head gets no gradient, and hidden alone does.
        heads: how many there are beside the model's own, for `MedusaLoss` and `MultiTokenLoss`.
        steps: S, for `SpeculatorLoss`; its draft has `vocab_size` ids and its verifier, the teacher,
            `teacher_vocab_size`.
        teacher_hidden_size: H' of a teacher; default H.
        teacher_vocab_size: V' of a teacher; default V.
        teacher_topk: k, of a teacher that is known by its k best ids instead.
        reference_hidden_size: H' of a reference that comes as hidden states and head; default: log-probs.
        **inputs: other tensors of the call, whose shapes and dtypes alone matter (and targets' ignored
            positions): `targets`, `cu_seqlens`, `bias`, or what a loss of your own declares; a
            `sampling_mask`, whose sets say which tokens are projected.

    Returns:
        An `Estimate`; print it, or read its numbers.

    Raises:
        ValueError: sizes or inputs that the loss's call refuses.
        TypeError: what is no loss, or an input that it does not take.
    """
    _check(loss, inputs)
    sizes = {"tokens": tokens, "hidden_size": hidden_size, "vocab_size": vocab_size, "sequences": sequences}
    sizes |= {"steps": steps}
    sizes |= {"teacher_hidden_size": teacher_hidden_size, "teacher_vocab_size": teacher_vocab_size}
    sizes |= {"teacher_topk": teacher_topk, "reference_hidden_size": reference_hidden_size}
    for name, size in sizes.items():
        if size is not None and size <= 0:
            raise value_error(name, "a positive number", size, "give the size of the call")
    if not dtype.is_floating_point:
        remedy = "pass that of hidden states and head"
        raise value_error("dtype", "a floating-point dtype", dtype, remedy)
    several = isinstance(loss, MedusaLoss | MultiTokenLoss)
    got = repr(heads)
    if (heads is not None) != several:
        expected = "how many heads there are beside the model's own" if several else "None for one head"
        raise value_error("heads", expected, got, "they are of Medusa and MultiToken losses")
    known = teacher_topk is None or (teacher_hidden_size is None and teacher_vocab_size is None)
    if not known:
        raise value_error(
            "teacher_topk", "None beside a teacher with a head", teacher_topk, "describe one teacher"
        )
    speculates = isinstance(loss, SpeculatorLoss)
    if (steps is not None) != speculates:
        expected = "how many steps the draft has" if speculates else "None but for a SpeculatorLoss"
        raise value_error("steps", expected, steps, "they are of its call")
    packed = inputs.get("cu_seqlens")
    alone = packed is None or sequences is None
    if not alone:
        raise value_error(
            "sequences", "None beside cu_seqlens", sequences, "the boundaries tell how many there are"
        )
    gpu = card_of(card, memory)
    if gpu is None:
        device = _device(device)
    elif device is not None:
        remedy = "name the device or the card"
        raise value_error("device", "None beside card or memory", device, remedy)
    else:
        loss = _with_budget_of(gpu, loss)
        device = torch.device("cpu")
    count = len(packed) - 1 if packed is not None else sequences or getattr(loss, "sequences_per_group", 1)
    expected = f"a multiple of {count} sequences"
    whole = packed is not None or tokens % count == 0
    if not whole:
        raise value_error("tokens", expected, tokens, "count the padding, or pass cu_seqlens")
    shape = (tokens,) if packed is not None else (count, tokens // count)

    # Loads more of torch than importing the library may.
    from torch._subclasses.fake_tensor import FakeTensorMode

    fakes = FakeTensorMode()
    with fakes:

        def made(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        hidden = made(*shape, hidden_size).requires_grad_()
        weight = made(vocab_size, hidden_size).requires_grad_(not frozen_head)
        given = {}
        second = weight
        if speculates:
            hidden = [made(*shape, hidden_size).requires_grad_() for _ in range(steps)]
        elif isinstance(loss, MultiTokenLoss):
            hidden = [hidden, *(made(*shape, hidden_size).requires_grad_() for _ in range(heads))]
        elif several:
            second = MedusaHeads(hidden_size, vocab_size, heads, device=device, dtype=dtype)
            given["base_weight"] = weight
        if reference_hidden_size is not None:
            given["ref_hidden"] = made(*shape, reference_hidden_size)
            given["ref_weight"] = made(vocab_size, reference_hidden_size)
        has_teacher = getattr(loss, "teacher", False) and "teacher_logprobs_topk" not in inputs
        if has_teacher and teacher_topk is None or teacher_hidden_size or teacher_vocab_size:
            size = teacher_hidden_size or hidden_size
            given["teacher_hidden"] = made(*shape, size)
            given["teacher_weight"] = made(teacher_vocab_size or vocab_size, size)
    if teacher_topk is not None:
        best = torch.full((*shape, teacher_topk), -1.0, dtype=torch.float32, device=device)
        given["teacher_logprobs_topk"] = (best, torch.zeros_like(best, dtype=torch.int64))
    if speculates and (teacher_vocab_size or vocab_size) != vocab_size:
        given["draft_ids"] = torch.arange(vocab_size, device=device)
    targets = inputs.pop("targets", None)
    if targets is None:
        targets = _any_targets(shape, inputs.get("sampling_mask"), device)
    given = _required(loss, targets, count, given) | given | inputs
    planner = _Planner(gpu)
    with replaced(planner):
        loss(hidden, second, targets, **given)
    inputs = {id(x): x.nbytes for x in tree_leaves((hidden, second, given)) if isinstance(x, Tensor)}
    inputs |= {id(x): x.nbytes for x in second.parameters()} if isinstance(second, MedusaHeads) else {}
    return planner.estimate(tokens * vocab_size * dtype.itemsize, sum(inputs.values()))


def _check(loss: Callable, inputs: Mapping[str, object]) -> None:
    """What no estimate covers."""
    remedy = "pass an object such as CrossEntropyLoss(), or linear_logprobs"
    ours = callable(loss) and not isinstance(loss, type)
    if not ours:
        raise type_error("loss", "a loss", getattr(loss, "__name__", type(loss).__name__), remedy)
    options = getattr(loss, "keywords", None)  # a dict where the loss is a functools.partial
    options = options if isinstance(options, dict) else {}
    for name in ("tp_group", "cp_group"):
        group = getattr(loss, name, options.get(name))
        remedy = "estimate a rank's share: its rows of the head, or its tokens"
        if group is not None:
            raise value_error(name, "None in an estimate", group, remedy)
    for name in REFUSED:
        absent = name not in inputs
        remedy = "leave it out"
        if not absent:
            raise value_error(name, "nothing in an estimate", type(inputs.get(name)).__name__, remedy)


def _with_budget_of(card: Card, loss: Callable) -> Callable:
    """The loss with the default budget of a card, unless it has a budget of its own."""
    options = {"logits_budget": budget_of_memory(card.memory)}
    if isinstance(loss, LinearLoss):
        return loss if loss.logits_budget else replace(loss, **options)
    given = getattr(loss, "keywords", {})
    return loss if given.get("logits_budget") else functools.partial(loss, **options)


def _device(given: torch.device | str | None) -> torch.device:
    """A device whose memory and kernels can be asked for."""
    try:
        device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
        there = torch.empty(0, dtype=torch.float32, device=device).device.type != "meta"
    except (RuntimeError, AssertionError):  # what torch raises for a device that is not there
        there = False
    if not there:
        raise value_error("device", "a device of this machine", given, "estimate where the call will run")
    return device


def _any_targets(shape: tuple[int, ...], mask: SamplingMask | None, device: torch.device) -> Tensor:
    """Targets of the shape that are in the sets of the sampling mask, if there is one."""
    targets = torch.zeros(shape, dtype=torch.int64, device=device)
    if not isinstance(mask, SamplingMask) or len(mask) != targets.numel() or not mask.token_ids.numel():
        return targets  # the call refuses what is wrong
    starts = mask.offsets[:-1].long().clamp(0, mask.token_ids.shape[0] - 1)
    ids = mask.token_ids.long()
    return torch.where(mask.offsets.diff() > 0, ids[starts], 0).view(shape)


def _required(loss: Callable, targets: Tensor, sequences: int, given: Mapping[str, object]) -> dict:
    """The small inputs that a loss of the library does not go without."""
    tokens = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
    made: dict[str, object] = {}
    if isinstance(loss, PolicyLoss):
        made["advantages"] = tokens.new_zeros(sequences)
    if isinstance(loss, GRPOLoss):
        made["old_logps"] = tokens
    if isinstance(loss, KTOLoss):
        made["labels"] = tokens.new_zeros(sequences, dtype=torch.bool)
        made["kl"] = 0.0 if loss.loss_type == "kto" else None
    if isinstance(loss, ComparedLoss) and loss.needs_reference and "ref_hidden" not in given:
        made["ref_logps"] = tokens
    return made


@dataclass
class _Planner:
    """Replaces the engine's passes: makes the plans, and returns zeros."""

    card: Card | None = None  # a GPU that is not here
    planned: list[tuple[HeadCall, Plan, Pass]] = field(default_factory=list)
    # Rows of a teacher with rows of its own per projected row; None for another teacher, or none.
    teacher_share: float | None = None
    plan: Plan | None = None  # of the last call
    gradient_bytes: int = 0  # of all

    def __call__(self, heads: Sequence[HeadCall], mode: Mode) -> CallResult:
        signature, tensors, sequences = pack(heads)
        with self._on_card():  # a HeadCall asks which kernels its device has
            calls = unpack(signature, tensors, sequences)
        self.gradient_bytes += sum(x.nbytes for x, need in zip(tensors, signature.needs) if need)
        purpose = Pass.STATISTICS if mode is Mode.PER_TOKEN else Pass.SOLVE
        statistics_alone = purpose is Pass.STATISTICS
        several = len(heads) > 1
        for call, rows in map(resolve_rows, calls):
            if rows.teacher is not None:
                self.teacher_share = len(rows.teacher.index) / max(1, rows.count)
            with self._on_card():
                self.plan = plan_for(call, rows, purpose, len(heads), d_weight_in_stat_dtype=several)
            self.planned.append((call, self.plan, purpose))
        if statistics_alone and call.trainable and not keeps_dlogp_dhidden(call):
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
        shapes = loss.objective.statistic_shapes(loss, N, call.inputs).items()
        statistics = {
            name: torch.zeros(size, dtype=kind or dtype, device=device) for name, (size, kind) in shapes
        }
        return CallResult(None, None, statistics, self.plan)

    def _on_card(self) -> AbstractContextManager:
        return nullcontext() if self.card is None else planned_for(self.card.generation)

    def estimate(self, logits_bytes: int, input_bytes: int) -> Estimate:
        plans = tuple(plan for _, plan, _ in self.planned)
        products = [_products(call, plan, self.teacher_share) for call, plan, _ in self.planned]
        with self._on_card():
            chunks, sums, peaks = map(max, zip(*(self._memory(*each) for each in self.planned)))
        own, others = map(sum, zip(*products))
        return Estimate(
            plan=self.plan,
            plans=plans,
            products=own,
            other_products=others,
            chunk_bytes=chunks,
            gradient_bytes=self.gradient_bytes,
            sum_bytes=sums,
            logits_bytes=logits_bytes,
            peak_bytes=peaks,
            input_bytes=input_bytes,
            card=self.card,
        )

    def _memory(self, call: HeadCall, plan: Plan, purpose: Pass) -> tuple[int, int, int]:
        """Bytes: (of a chunk; of wider sums of d_weight and d_bias; of everything at the peak)."""
        chunk = plan.chunk_bytes + _fixed_bytes(call, purpose)
        if not any(step.write for step in plan.steps):
            return chunk, 0, chunk
        solved = [x for x, _, why in self.planned if why is Pass.SOLVE]
        several = len(solved) > 1
        dtypes = sum_dtypes(call, multi_head=several, d_weight_in_stat_dtype=several or plan.chunks > 1)
        sums = []
        if call.needs.weight:
            sums.append((call.weight.numel(), dtypes.weight))
        if call.needs.bias:
            sums.append((call.bias.numel(), dtypes.bias))
        wide = [(size, dtype) for size, dtype in sums if dtype != call.weight.dtype]  # one head's are alive
        held = sum(size * dtype.itemsize for size, dtype in wide)
        copies = sum(size * call.weight.itemsize for size, _ in wide)
        # Of several heads, and in fp16, d_hidden is summed in fp32.
        width = dtypes.hidden
        hidden = {x.indices.hidden: x.hidden for x in solved}
        wider = sum(x.numel() * max(0, width.itemsize - x.itemsize) for x in hidden.values())
        # Numbers that are written have vectors in the place of a sum, and d_hidden is made of them.
        vectors = call.hidden.numel() * d_hidden_dtype(call.dtype).itemsize
        later = vectors if purpose is Pass.STATISTICS else copies
        return chunk, held, self.gradient_bytes - copies + held + wider + max(chunk, later)


def _products(call: HeadCall, plan: Plan, teacher_share: float | None) -> tuple[float, float]:
    """(with the head and its gradients, with another model's head) per projected row."""
    projected = [step for step in plan.steps if step.kind is not Kind.GATHERED]
    read = sum(step.stop - step.start for step in projected if step.read)
    has_other = any(call.inputs.get(f"{model}_weight") is not None for model in ("teacher", "ref"))
    tokens = plan.rows if plan.replay is None else plan.replay.rows
    # The later pass has a plan of its own.
    own = plan.products - plan.later * plan.rows / max(1, tokens) if plan.products else 0.0
    share = has_other if teacher_share is None else teacher_share
    return own, read / max(1, tokens) * share


def _fixed_bytes(call: HeadCall, purpose: Pass) -> int:
    budget = call.loss.logits_budget or default_budget(call.weight.device)
    return call.loss.objective.costs(call, budget, purpose).fixed_bytes
