"""`fit_activations`: keep the activations of decoder layers within a budget of bytes.

With gradient checkpointing, transformers' `GradientCheckpointingLayer` calls its attribute
`_gradient_checkpointing_func` around its forward pass, inside the module hooks of FSDP2 and others. While a
training forward pass runs, that attribute is `ForwardPass.run`, which runs each layer at the level that the
plan of the pass has for it. Afterwards the attributes of the layers are restored.
"""

import functools
import inspect
import logging
import operator
import weakref
from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from logitless.activations.plan import (
    LEVELS,
    ActivationPlan,
    BatchSize,
    Counts,
    choose_levels,
    format_bytes,
)
from logitless.activations.saved_tensors import (
    AutocastState,
    LayerBytes,
    LayerRun,
    LayerSizes,
    SavedGraph,
    SavedTensor,
    StorageCounter,
    StorageSize,
    find_tensors,
    run_kept_layer,
    storages_of,
)
from logitless.errors import to_bytes, type_error, value_error, warn
from logitless.exchange import exchange, state_of
from logitless.layers.fused_forwards import KEY as FUSED
from logitless.models.heads import base_of

logger = logging.getLogger(__name__)
KEY = "activations"
# One layer's bytes are checked every so many forward passes.
CHECK_EVERY = 16
# Keyword arguments that a layer does not write into; tuples of them are constant too.
CONSTANTS = Tensor, NoneType, bool, int, float, str
CHECKPOINTING_ATTRIBUTES = ("gradient_checkpointing", "_gradient_checkpointing_func")


class FitHandle:
    """Handle of a model with an activation budget; calling it removes the budget.

    Attributes:
        budget: bytes that the decoder layers may hold.
        last_plan: the `ActivationPlan` of the last training forward pass; None before the first.
        costs: for the size of the last batch, (for each layer, a dict from level to bytes; bytes that all
            layers share); None before the first training forward pass has counted them.
    """

    def __init__(self, backbone: nn.Module, layers: dict[str, nn.Module], budget: int) -> None:
        self.budget = budget
        self.last_plan = None
        self.costs: tuple[list[dict[str, int]], int] | None = None
        self._names = list(layers)
        self._layers = list(layers.values())
        self._counter = StorageCounter()
        self._counts = Counts(_model_sizes(backbone))
        self._kinds: list[int] = []  # index of each layer's kind
        self._kind_indices: dict[Hashable, int] = {}  # kind (`kind_of`) -> its index
        self._structures: list[Structure] = []
        self._num_passes = 0
        self._live_graphs: weakref.WeakSet[SavedGraph] = weakref.WeakSet()
        self._max_live_graphs = 1  # largest number of graphs that were alive at the same time
        self._needs_count = False
        self._was_logged = False
        self._undo: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self._undo()

    @property
    def held_bytes(self) -> int:
        """Bytes that the layers hold now, for all live graphs."""
        return self._counter.bytes

    @property
    def report(self) -> dict[str, str]:
        """For each layer, by name, whether the level "cheap" is available, and the reason if it is not."""
        reports = {}
        for index, (name, layer) in enumerate(zip(self._names, self._layers)):
            is_fused = any(state_of(module, FUSED) is not None for module in layer.modules())
            kind = self._kinds[index] if self._kinds else None
            counts = [self._largest_count(kind, level) for level in ("cheap", "keep")]
            if not is_fused:
                reports[name] = (
                    "level cheap is unavailable: nothing in the layer is fused; call fuse_layers first"
                )
            elif None in counts:
                reports[name] = "level cheap: known after the first training forward pass"
            elif counts[0] >= counts[1]:
                reports[name] = "level cheap is unavailable: the layer saves no output of a fused operator"
            else:
                share = counts[0] / counts[1]
                reports[name] = f"level cheap is available: it holds {share:.0%} of the bytes of level keep"
        return reports

    def _largest_count(self, kind: int | None, level: str) -> int | None:
        """Return the most bytes counted for a kind of layer at a level, over all batch sizes and modes.

        None if none were counted.
        """
        counts = (
            count for (key, _), count in self._counts.exact.items() if key[0] == kind and key[-1] == level
        )
        return max(counts, default=None)

    def explain(self) -> str:
        """Return the note for an out-of-memory error: the plan, the held bytes, a smaller budget to try."""
        return self._explain(self.last_plan)

    def _explain(self, plan: ActivationPlan | None) -> str:
        description = "no plan yet" if plan is None else plan.describe()
        held = format_bytes(self.held_bytes)
        smaller = min(self.held_bytes, self.budget) * 3 // 4
        return (
            f"activation_budget: {description}. The layers of all graphs hold {held} now. A "
            f"smaller budget leaves more memory to the rest of the step: try {smaller}."
        )

    def __deepcopy__(self, memo: dict) -> "FitHandle":
        # The deep copy of a model has no activation budget.
        return self


class Structure:
    """The modules of a layer, and which of their parameters require a gradient."""

    def __init__(self, layer: nn.Module) -> None:
        self._modules = [
            (module, dict(module._modules), _requires_grad_flags(module)) for module in layer.modules()
        ]

    def has_changed(self) -> bool:
        """Whether modules were added (such as adapters) or removed, or parameters frozen or unfrozen."""
        return any(
            module._modules != children or _requires_grad_flags(module) != flags
            for module, children, flags in self._modules
        )


def _requires_grad_flags(module: nn.Module) -> list[bool]:
    return [p.requires_grad for p in module._parameters.values() if p is not None]


class ForwardPass:
    """One training forward pass: makes the plan at the first layer, and runs each layer at its level."""

    def __init__(self, handle: FitHandle) -> None:
        self.handle = handle
        self.graph = SavedGraph(handle._counter, handle._explain)
        self.batch: BatchSize | None = None
        self.held_before = handle.held_bytes
        self.is_counting = False
        self.exceeds_count = False
        self.all_shared_storages: dict[int, StorageSize] = {}  # of keyword arguments, of all layers
        self.keyword_values: list[Any] = []
        self.may_change = False  # whether a layer may write into one of these values, such as a dict
        self.shared_tensors: list[SavedTensor] = []

    def run(self, index: int, function: functools.partial, *args: Any) -> Any:
        """Run one layer. Replaces transformers' `_gradient_checkpointing_func`."""
        if not torch.is_grad_enabled():
            return function(*args)
        if self.graph.plan is None:
            self.begin(function, args)
        if self.graph.plan.levels[index] == "full" or self.is_counting:
            return self.run_under_hooks(index, function, args)
        return self.run_without_counting(index, function, args)

    def run_without_counting(self, index: int, function: functools.partial, args: tuple) -> Any:
        """Run a layer whose bytes are known; those of layer `checked_layer` are counted and compared."""
        counter = self.handle._counter
        level = self.graph.plan.levels[index]
        nbytes = self.costs[index][level]
        self.count_shared(function)
        if index == self.checked_layer:
            held_before = counter.bytes
            out = LayerRun(self.graph, level, self.autocast)(function, *args, device=self.device)
            self.exceeds_count = counter.bytes - held_before > nbytes
            return out
        if level == "keep":
            return run_kept_layer(self.graph, nbytes, self.shared_tensors, function, *args)
        layer_bytes = LayerBytes(self.graph, nbytes, self.shared_tensors)
        return LayerRun(self.graph, level, self.autocast, layer_bytes=layer_bytes)(
            function, *args, device=self.device
        )

    def count_shared(self, function: functools.partial) -> None:
        """Count the keyword arguments of a layer, unless they are those of the layer before it."""
        values = list(function.keywords.values())
        are_same = len(values) == len(self.keyword_values) and all(
            map(operator.is_, values, self.keyword_values)
        )
        if self.may_change or not are_same:
            self.keyword_values = values
            items = [item for value in values for item in (value if type(value) is tuple else (value,))]
            self.may_change = not all(isinstance(item, CONSTANTS) for item in items)
            self.shared_tensors = [SavedTensor(self.graph, x) for x in keyword_tensors(function)]

    def run_under_hooks(self, index: int, function: functools.partial, args: tuple) -> Any:
        """Run a layer with hooks for each saved tensor; if `is_counting`, record its bytes at each level."""
        layer = self.handle._layers[index]
        level = self.graph.plan.levels[index]
        sizes = None
        if self.is_counting:
            shared_storages = {
                s._cdata: StorageSize(s.nbytes(), tuple(x.shape))
                for x in keyword_tensors(function)
                for s in storages_of(x)
            }
            self.all_shared_storages |= shared_storages
            sizes = LayerSizes(set(shared_storages))
        run = LayerRun(self.graph, level, self.autocast, sizes)
        device = next((p.device for p in layer.parameters()), self.device)
        out = run(function, *args, device=device)
        if sizes is not None:
            weight_shapes = []
            if self.autocast.state[0]:
                weight_shapes = [tuple(p.shape) for p in layer.parameters() if p.dim() == 2]
            input_storages = [
                StorageSize(s.nbytes(), tuple(x.shape)) for x in find_tensors(args) for s in storages_of(x)
            ]
            for name, level_storages in (sizes.levels | {"full": input_storages}).items():
                self.handle._counts.add(
                    (*self.count_key(index), name), self.batch, level_storages, weight_shapes
                )
        return out

    def count_key(self, index: int) -> tuple:
        """Return what determines the bytes of a layer, in addition to the level and the size of the batch."""
        # The first layer saves less if its input requires no gradient, as with adapters.
        has_frozen_input = index == 0 and not self.input_requires_grad
        return self.handle._kinds[index], has_frozen_input, self.mode

    def begin(self, function: functools.partial, args: tuple) -> None:
        """Read the size of the batch from the arguments of the first layer, and make the plan."""
        handle = self.handle
        if not find_tensors(args):
            raise ValueError(
                "model: expected layers that are called with hidden states as their first argument, got "
                f"{type(handle._layers[0]).__name__} called with keywords only; use gradient checkpointing."
            )
        hidden = find_tensors(args)[0]
        tokens = hidden.numel() // hidden.shape[-1]
        self.batch = BatchSize(tokens, hidden.shape[-2])
        self.device = hidden.device
        self.autocast = AutocastState(hidden.device.type)
        self.input_requires_grad = hidden.requires_grad
        by_name = {name: find_tensors(value) for name, value in function.keywords.items()}
        self.mode = self.autocast.state, hidden.dtype, tuple(name for name in by_name if by_name[name])
        if not handle._kinds or any(structure.has_changed() for structure in handle._structures):
            kind_indices = handle._kind_indices
            handle._kinds = [
                kind_indices.setdefault(kind_of(layer), len(kind_indices)) for layer in handle._layers
            ]
            handle._structures = [Structure(layer) for layer in handle._layers]
        input_bytes = sum(s.nbytes() for x in find_tensors(args) for s in storages_of(x))
        shared = {s._cdata: s.nbytes() for xs in by_name.values() for x in xs for s in storages_of(x)}
        self.make_plan(input_bytes, sum(shared.values()))

    def make_plan(self, input_bytes: int, shared: int) -> None:
        """Make the plan of this pass, and decide whether and what to count.

        Args:
            input_bytes: bytes of the input of a layer.
            shared: bytes of the keyword arguments of the first layer.

        Raises:
            ValueError: the budget is smaller than the inputs of the layers.
        """
        handle = self.handle
        counts = handle._counts
        num_layers = len(handle._layers)
        num_others = len(handle._live_graphs)
        more_graphs_than_before = num_others >= handle._max_live_graphs
        handle._max_live_graphs = max(handle._max_live_graphs, num_others + 1)
        # Expect as many live graphs as there were before; those that follow get equal shares of the rest.
        remaining = handle.budget - self.held_before
        budget = remaining // (handle._max_live_graphs - num_others)
        counted_shared = counts.predict(("shared", self.mode), self.batch)
        count_keys = [self.count_key(index) for index in range(num_layers)]
        costs_by_key = {
            count_key: {level: counts.predict((*count_key, level), self.batch) for level in LEVELS}
            for count_key in set(count_keys)
        }
        costs = [costs_by_key[count_key] for count_key in count_keys]
        has_costs = (
            not handle._needs_count
            and counted_shared is not None
            and not any(None in cost.values() for cost in costs_by_key.values())
        )
        shared = max(shared, counted_shared or 0)
        min_bytes = sum(cost["full"] for cost in costs) if has_costs else num_layers * input_bytes
        if min_bytes + shared > budget and min_bytes + shared <= remaining:
            budget = remaining
        self.costs = costs
        if has_costs:
            handle.costs = costs, shared
        min_bytes += shared
        if min_bytes > budget:
            budget = remaining
        if min_bytes > budget and not more_graphs_than_before:
            raise self.budget_error(min_bytes)
        if min_bytes > budget:
            warn(
                f"activation_budget: expected {min_bytes:,} bytes for the layers' inputs of another graph, "
                f"got {remaining:,} beside {num_others} live graphs; this graph exceeds the budget, the next "
                "ones share it.",
                UserWarning,
            )
        if has_costs and min_bytes <= budget:
            levels, total = choose_levels(costs, shared, budget)
        else:
            levels = ("full",) * num_layers
            total = min_bytes
        self.graph.plan = handle.last_plan = ActivationPlan(levels, total, budget, self.batch.tokens)
        keys = [("shared", self.mode), *((*count_key, "keep") for count_key in costs_by_key)]
        all_counted = has_costs and all(
            key in counts.rates or (key, self.batch) in counts.exact for key in keys
        )
        self.is_counting = handle._needs_count or not all_counted
        # Every CHECK_EVERY passes, one layer is counted, each layer in turn.
        turn, rest = divmod(handle._num_passes, CHECK_EVERY)
        self.checked_layer = turn % num_layers if rest == 0 else None
        handle._num_passes += 1
        handle._live_graphs.add(self.graph)

    def budget_error(self, min_bytes: int) -> ValueError:
        """Return the error for a budget below `min_bytes`."""
        handle = self.handle
        num_others = len(handle._live_graphs - {self.graph})
        beside = f" beside {self.held_before:,} of other live graphs" if num_others else ""
        return ValueError(
            f"activation_budget: expected at least {min_bytes:,} bytes{beside}, the inputs of "
            f"{len(handle._layers)} layers for {self.batch.tokens:,} tokens, got {handle.budget:,}; raise "
            "the budget, or pass smaller batches."
        )

    def finish(self) -> None:
        """After the last layer: record the shared bytes, and compare the held bytes with the plan."""
        handle = self.handle
        plan = self.graph.plan
        if plan is None:
            return
        held = handle.held_bytes - self.held_before
        if self.is_counting:
            handle._counts.add(("shared", self.mode), self.batch, self.all_shared_storages.values(), ())
        # More bytes than planned are held if, for example, dropout was switched on after the first pass.
        handle._needs_count = not self.is_counting and (self.exceeds_count or held > plan.bytes)
        if self.is_counting and held > plan.budget >= plan.bytes:
            # In the first pass the masks of later layers are known only once these layers have run.
            raise self.budget_error(held)
        if not self.is_counting and not handle._was_logged and _is_rank_zero():
            handle._was_logged = True
            logger.info("activation budget: %s", plan.describe())


def keyword_tensors(function: functools.partial) -> list[Tensor]:
    """Return the tensors in a layer's keyword arguments: angles and masks, shared by all layers."""
    return find_tensors(function.keywords)


def _is_rank_zero() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def fit_activations(model: nn.Module, activation_budget: int | str) -> FitHandle:
    """Limit the bytes that the decoder layers save for the backward pass to a budget.

    Each training forward pass makes a plan from the size of its batch. It runs every layer at one of three
    levels: "keep" (all saved tensors are kept), "cheap" (the outputs of fused norms, rotations and gates are
    recomputed from kept tensors; products and attention are kept) or "full" (only the input is kept and the
    layer is recomputed, as with gradient checkpointing). Gradients are bitwise equal to those of the model
    without a budget and with `use_cache=False`. Forward passes in evaluation mode or without gradients are
    not changed.

    The first training forward pass runs all layers at "full" and counts their bytes. Gradient checkpointing
    that is switched on in the model has no effect in a training forward pass.

    Args:
        model: a transformers model, which may be wrapped by PEFT, DDP or FSDP2. Add adapters first; for the
            level "cheap" call `fuse_layers` first.
        activation_budget: bytes, as an int or as text such as "12GiB", "12GB" or digits. Saved tensors of all
            live graphs count, and the inputs of layers at "full"; the temporary memory of a layer while it is
            recomputed does not.

    Returns:
        `FitHandle`; call it to undo. It has `last_plan`, `held_bytes` and `report`.

    Raises:
        TypeError: the model is no module, or the budget is neither an int nor text.
        ValueError: the budget is not positive; the model is an encoder-decoder or a sequence classifier, has
            no layers that can be checkpointed, or has a budget already. In a training forward pass: the
            budget is smaller than the layers' inputs (the message has the number), or the call has a cache.

    Example:

        fitted = fit_activations(model, "10GiB")
        model(input_ids=ids, labels=ids).loss.backward()
        print(fitted.last_plan.describe())
        fitted()
    """
    budget = to_bytes("activation_budget", activation_budget)
    if not isinstance(model, nn.Module):
        raise type_error("model", "a module", type(model).__name__, "pass a model")
    base = base_of(model)
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    remedy = "use gradient checkpointing"
    if is_encoder_decoder:
        raise value_error("model", "a decoder", "an encoder-decoder", remedy)
    is_classifier = type(base).__name__.endswith(("ForSequenceClassification", "ForTokenClassification"))
    if is_classifier:
        raise value_error("model", "a language model", type(base).__name__, remedy)
    backbone = decoder_of(base)
    layers = decoder_layers(backbone)
    if not layers:
        expected = "decoder layers that can be checkpointed (GradientCheckpointingLayer of transformers)"
        raise value_error(
            "model", expected, f"{type(base).__name__} with none", "use the model without a budget"
        )
    handle = FitHandle(backbone, layers, budget)
    handle._undo = exchange(backbone, KEY, _forward, handle, copied=False)
    return handle


def decoder_of(base: nn.Module) -> nn.Module:
    """Return the module whose forward pass runs the decoder layers, without the head."""
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    return base if decoder is None else decoder


def kind_of(layer: nn.Module) -> Hashable:
    """Return a key for class and parameter shapes; layers with equal keys hold equally many bytes."""
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
    return type(layer).__qualname__, shapes


def decoder_layers(backbone: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that can be checkpointed, by name, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, GradientCheckpointingLayer) and not is_nested:
            layers[name] = module
    return layers


def _model_sizes(backbone: nn.Module) -> frozenset[int]:
    """Return the sizes of the parameters and attention heads, and all ints of the configuration."""
    sizes = {size for p in backbone.parameters() for size in p.shape}
    config = getattr(backbone, "config", None) or object
    sizes |= {value for value in vars(config).values() if type(value) is int}
    head_dims = (getattr(module, "head_dim", None) for module in backbone.modules())
    sizes |= {size for size in head_dims if type(size) is int}
    return frozenset(sizes)


def _forward(backbone: nn.Module, handle: FitHandle, original: Callable, *args: Any, **kwargs: Any) -> Any:
    if not (backbone.training and torch.is_grad_enabled()):
        return original(*args, **kwargs)
    if torch.compiler.is_compiling():
        raise value_error("model", "one that runs eagerly", "torch.compile", "undo fit_activations before")
    # transformers 5.24 renames the second to the first.
    for name in ("cache", "past_key_values"):
        if (cache := kwargs.get(name)) is not None:
            remedy = "train without a cache, and without prefix tuning"
            raise value_error(name, "None under an activation budget", type(cache).__name__, remedy)
    if kwargs.get("use_cache") is None and "use_cache" in _forward_parameters(type(backbone)):
        kwargs["use_cache"] = False  # a recomputed layer would append to the cache twice
    forward_pass = ForwardPass(handle)
    missing = object()  # marks an attribute that the layer does not have
    saved_values = [
        [layer.__dict__.get(name, missing) for name in CHECKPOINTING_ATTRIBUTES] for layer in handle._layers
    ]
    try:
        for index, layer in enumerate(handle._layers):
            layer.__dict__["gradient_checkpointing"] = True
            layer.__dict__["_gradient_checkpointing_func"] = functools.partial(forward_pass.run, index)
        with forward_pass.graph.add_memory_note():
            out = original(*args, **kwargs)
        forward_pass.finish()
        return out
    finally:
        for layer, values in zip(handle._layers, saved_values):
            for name, value in zip(CHECKPOINTING_ATTRIBUTES, values):
                if value is missing:
                    layer.__dict__.pop(name, None)
                else:
                    layer.__dict__[name] = value


@functools.cache
def _forward_parameters(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)
