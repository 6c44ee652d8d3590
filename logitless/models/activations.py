"""`fit_activations`: decoder layers that hold what fits into a budget of bytes between forward and backward.

transformers' `GradientCheckpointingLayer` calls a function around its forward pass, inside the module hooks
of FSDP2 and others. While a training forward pass runs, that function is ours: it runs each layer at the
level that the plan of this pass has for it. Before and after, the layers are as they were.
"""

import functools
import inspect
import logging
import operator
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from logitless.errors import type_error, value_error, warn
from logitless.exchange import exchange, state_of
from logitless.layers.fused_forwards import KEY as FUSED
from logitless.models.activation_plan import (
    LEVELS,
    ActivationPlan,
    Batch,
    Counts,
    choose,
    in_gib,
    to_bytes,
)
from logitless.models.heads import base_of
from logitless.models.saved_tensors import (
    Autocast,
    Graph,
    Held,
    Kept,
    LayerBytes,
    LayerRun,
    Sizes,
    Storage,
    run_kept,
    storages,
)

logger = logging.getLogger(__name__)
KEY = "activations"
# Passes from one check of a layer's bytes to the next.
CHECK_EVERY = 16
SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")


class Fitted:
    """Handle of a model with an activation budget; calling it takes the budget off.

    Attributes:
        budget: bytes that the decoder layers may hold.
        last_plan: the `ActivationPlan` of the last training forward pass; None before the first.
        costs: for the size of the last batch, the bytes of each layer by level, and those that all layers
            share; None before the first training forward pass has counted them.
    """

    def __init__(self, backbone: nn.Module, layers: dict[str, nn.Module], budget: int) -> None:
        self.budget = budget
        self.last_plan = None
        self.costs: tuple[list[dict[str, int]], int] | None = None
        self._names = list(layers)
        self._layers = list(layers.values())
        self._held = Held()
        self._counts = Counts(_widths(backbone))
        self._kinds: list[int] = []  # of each layer; layers of one kind have one number
        self._numbers: dict[Hashable, int] = {}  # of kinds
        self._structures: list[Structure] = []
        self._passes = 0
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._most_graphs = 1  # that were alive together
        self._count_again = self._logged = False
        self._undo: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self._undo()

    @property
    def held_bytes(self) -> int:
        """Bytes that the layers hold now, for all graphs alive."""
        return self._held.bytes

    @property
    def report(self) -> dict[str, str]:
        """By the layers' names in their order: whether the cheap level is open, and if not, why."""
        reports = {}
        for index, (name, layer) in enumerate(zip(self._names, self._layers)):
            fused = any(state_of(module, FUSED) is not None for module in layer.modules())
            kind = self._kinds[index] if self._kinds else None
            counted = [self._largest(kind, level) for level in ("cheap", "keep")]
            if not fused:
                reports[name] = "cheap level closed: nothing in the layer is fused; call fuse_layers first"
            elif None in counted:
                reports[name] = "cheap level: known after the first training forward pass"
            elif counted[0] >= counted[1]:
                reports[name] = "cheap level closed: the layer saves no output of a fused operator"
            else:
                reports[name] = f"cheap level open: it holds {counted[0] / counted[1]:.0%} of what keep holds"
        return reports

    def _largest(self, kind: int | None, level: str) -> int | None:
        positions = (
            count for (key, _), count in self._counts.exact.items() if key[0] == kind and key[-1] == level
        )
        return max(positions, default=None)

    def explain(self) -> str:
        """What is added to the error of a step that runs out of memory: plan, held bytes, a budget to try."""
        return self._explain(self.last_plan)

    def _explain(self, plan: ActivationPlan | None) -> str:
        plan = "no plan yet" if plan is None else plan.describe()
        smaller = min(self.held_bytes, self.budget) * 3 // 4
        return (
            f"activation_budget: {plan}. The layers of all graphs hold {in_gib(self.held_bytes)} now. A "
            f"smaller budget leaves more memory to the rest of the step: try {smaller}."
        )

    def __deepcopy__(self, memo: dict) -> "Fitted":
        # The copy of a model is not fitted.
        return self


class Structure:
    """Modules of a layer, and which of their parameters have a gradient."""

    def __init__(self, layer: nn.Module) -> None:
        self._modules = [(module, dict(module._modules), _require_grad(module)) for module in layer.modules()]

    def has_changed(self) -> bool:
        """Whether modules were added, as adapters are, or removed, or parameters frozen or no longer."""
        return any(
            module._modules != children or _require_grad(module) != flags
            for module, children, flags in self._modules
        )


def _require_grad(module: nn.Module) -> list[bool]:
    return [p.requires_grad for p in module._parameters.values() if p is not None]


class Pass:
    """One training forward pass."""

    def __init__(self, fitted: Fitted) -> None:
        self.fitted = fitted
        self.graph = Graph(fitted._held, fitted._explain)
        self.batch: Batch | None = None
        self.held_before = fitted.held_bytes
        self.counting = False
        self.has_changed = False
        self.shared: dict[int, Storage] = {}  # of the keyword arguments of all layers
        self.shared_values: list[Any] = []
        self.shared_kept: list[Kept] = []

    def run(self, index: int, function: functools.partial, *args: Any) -> Any:
        """Runs one layer; in the place of transformers' `_gradient_checkpointing_func`."""
        if not torch.is_grad_enabled():
            return function(*args)
        if self.graph.plan is None:
            self.begin(function, args)
        if self.graph.plan.levels[index] == "full" or self.counting:
            return self.run_under_hooks(index, function, args)
        return self.run_known(index, function, args)

    def run_known(self, index: int, function: functools.partial, args: tuple) -> Any:
        """Runs a layer whose bytes are known, or counts them, to see whether they have changed."""
        held, level = self.fitted._held, self.graph.plan.levels[index]
        nbytes = self.costs[index][level]
        self.keep_shared(function)
        if index == self.checked:
            held_before = held.bytes
            out = LayerRun(self.graph, level, self.autocast)(function, *args, device=self.device)
            self.has_changed = held.bytes - held_before > nbytes
            return out
        if level == "keep":
            return run_kept(self.graph, nbytes, self.shared_kept, function, *args)
        known = LayerBytes(self.graph, nbytes, self.shared_kept)
        return LayerRun(self.graph, level, self.autocast, nbytes=known)(function, *args, device=self.device)

    def keep_shared(self, function: functools.partial) -> None:
        """Counts what the layer shares with those before it once."""
        values = list(function.keywords.values())
        same = len(values) == len(self.shared_values) and all(map(operator.is_, values, self.shared_values))
        if not same:
            self.shared_values = values
            self.shared_kept = [Kept(self.graph, x) for x in shared_by(function)]

    def run_under_hooks(self, index: int, function: functools.partial, args: tuple) -> Any:
        """Runs a layer with hooks for each tensor that it saves."""
        layer = self.fitted._layers[index]
        level = self.graph.plan.levels[index]
        sizes = None
        if self.counting:
            mine = {
                s._cdata: Storage(s.nbytes(), tuple(x.shape))
                for x in shared_by(function)
                for s in storages(x)
            }
            self.shared |= mine
            sizes = Sizes(set(mine))
        run = LayerRun(self.graph, level, self.autocast, sizes)
        device = next((p.device for p in layer.parameters()), self.device)
        out = run(function, *args, device=device)
        if sizes is not None:
            weights = (
                [tuple(p.shape) for p in layer.parameters() if p.dim() == 2] if self.autocast.state[0] else []
            )
            given = [Storage(s.nbytes(), tuple(x.shape)) for x in tensors(args) for s in storages(x)]
            for name, counted in (sizes.levels | {"full": given}).items():
                self.fitted._counts.add((*self.kind(index), name), self.batch, counted, weights)
        return out

    def kind(self, index: int) -> tuple:
        """What decides, beside the level and the size of the batch, how much a layer holds."""
        # The first layer saves less where its input has no gradient, as with adapters.
        frozen = index == 0 and not self.input_has_gradient
        return self.fitted._kinds[index], frozen, self.mode

    def begin(self, function: functools.partial, args: tuple) -> None:
        """At the first layer: the batch's size is known, and the plan is made."""
        fitted = self.fitted
        if not tensors(args):
            raise ValueError(
                "model: expected layers that are called with hidden states as their first argument, got "
                f"{type(fitted._layers[0]).__name__} called with keywords alone; use gradient checkpointing."
            )
        hidden = tensors(args)[0]
        tokens = hidden.numel() // hidden.shape[-1]
        self.batch = Batch(tokens, hidden.shape[-2])
        self.device = hidden.device
        self.autocast = Autocast(hidden.device.type)
        self.input_has_gradient = hidden.requires_grad
        by_name = {name: tensors(value) for name, value in function.keywords.items()}
        self.mode = self.autocast.state, hidden.dtype, tuple(name for name in by_name if by_name[name])
        if not fitted._kinds or any(structure.has_changed() for structure in fitted._structures):
            numbers = fitted._numbers
            fitted._kinds = [numbers.setdefault(kind_of(layer), len(numbers)) for layer in fitted._layers]
            fitted._structures = [Structure(layer) for layer in fitted._layers]
        given = sum(s.nbytes() for x in tensors(args) for s in storages(x))
        shared = {s._cdata: s.nbytes() for found in by_name.values() for x in found for s in storages(x)}
        self.make_plan(given, sum(shared.values()))

    def make_plan(self, given: int, shared: int) -> None:
        fitted = self.fitted
        counts = fitted._counts
        layers, others = len(fitted._layers), len(fitted._graphs)
        surprise = others >= fitted._most_graphs
        fitted._most_graphs = max(fitted._most_graphs, others + 1)
        # Graphs that are to come have the same share of what is left.
        left = fitted.budget - self.held_before
        budget = left // (fitted._most_graphs - others)
        counted = counts.bytes(("shared", self.mode), self.batch)
        kinds = [self.kind(index) for index in range(layers)]
        by_kind = {
            kind: {level: counts.bytes((*kind, level), self.batch) for level in LEVELS} for kind in set(kinds)
        }
        costs = [by_kind[kind] for kind in kinds]
        known = (
            not fitted._count_again
            and counted is not None
            and not any(None in cost.values() for cost in by_kind.values())
        )
        shared = max(shared, counted or 0)
        least = sum(cost["full"] for cost in costs) if known else layers * given
        if least + shared > budget and least + shared <= left:
            budget = left
        self.costs = costs
        if known:
            fitted.costs = costs, shared
        least += shared
        if least > budget:
            budget = left
        if least > budget and not surprise:
            raise self.too_small(least)
        if least > budget:
            warn(
                f"activation_budget: expected {least:,} bytes for the layers' inputs of another graph, got "
                f"{left:,} beside {others} alive; this graph exceeds the budget, from now on they share it.",
                UserWarning,
            )
        if known and least <= budget:
            levels, total = choose(costs, shared, budget)
        else:
            levels = ("full",) * layers
            total = least
        self.graph.plan = fitted.last_plan = ActivationPlan(levels, total, budget, self.batch.tokens)
        keys = [("shared", self.mode), *((*kind, "keep") for kind in by_kind)]
        sure = known and all(key in counts.rates or (key, self.batch) in counts.exact for key in keys)
        self.counting = fitted._count_again or not sure
        # Some passes count one layer, in turn, if it is kept.
        turn, rest = divmod(fitted._passes, CHECK_EVERY)
        self.checked = turn % layers if rest == 0 else None
        fitted._passes += 1
        fitted._graphs.add(self.graph)

    def too_small(self, least: int) -> ValueError:
        fitted = self.fitted
        others = len(fitted._graphs - {self.graph})
        beside = f" beside {self.held_before:,} of other graphs alive" if others else ""
        return ValueError(
            f"activation_budget: expected at least {least:,} bytes{beside}, the inputs of "
            f"{len(fitted._layers)} layers for {self.batch.tokens:,} tokens, got {fitted.budget:,}; raise "
            "the budget, or pass smaller batches."
        )

    def end(self) -> None:
        """After the last layer."""
        fitted = self.fitted
        plan = self.graph.plan
        if plan is None:
            return
        held = fitted.held_bytes - self.held_before
        if self.counting:
            fitted._counts.add(("shared", self.mode), self.batch, self.shared.values(), ())
        # Dropout that was switched on after the first pass, say.
        fitted._count_again = not self.counting and (self.has_changed or held > plan.bytes)
        if self.counting and held > plan.budget >= plan.bytes:
            # In the first pass the masks of later layers are not known before these run.
            raise self.too_small(held)
        if not self.counting and not fitted._logged and _is_first_rank():
            fitted._logged = True
            logger.info("activation budget: %s", plan.describe())


def tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if x is None or isinstance(x, bool):
        return []
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def shared_by(function: functools.partial) -> list[Tensor]:
    """What a layer is called with beside its hidden states: angles and masks, the same for all layers."""
    return tensors(function.keywords)


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def fit_activations(model: nn.Module, activation_budget: int | str) -> Fitted:
    """Keep what the decoder layers save for the backward pass within a budget of bytes.

    Each training forward pass makes a plan from the size of its batch. Every layer is kept, or "cheap"
    (outputs of fused norms, rotations and gates are dropped and made again from what stays; products and
    attention are kept), or "full" (only its input is kept, and the layer is run again, as with gradient
    checkpointing). Gradients are bit for bit those of the model without a budget. Passes in evaluation mode
    and without gradients are untouched.

    The first training forward pass counts the bytes, with all layers full. Gradient checkpointing that is
    switched on in the model has no effect in a training forward pass.

    Args:
        model: a model of transformers, under PEFT, DDP or FSDP2 or not. Add adapters first, and fuse its
            layers first for the cheap level.
        activation_budget: bytes, or text: "12GiB", "12GB", digits. What the layers of all graphs alive hold
            is counted, the inputs of layers under "full" too; what one layer takes while it is run again is
            not.

    Returns:
        `Fitted`; call it to undo. It has `last_plan`, `held_bytes` and `report`.

    Raises:
        TypeError: the model is no module, or the budget is neither a whole number nor text.
        ValueError: the budget is not positive; the model is an encoder-decoder or a sequence classifier, has
            no layers that can be checkpointed, or is fitted already. In a training forward pass: the budget
            is smaller than the layers' inputs (the message has the number), or the call has a cache.

    Example:

        fitted = fit_activations(model, "10GiB")
        model(input_ids=ids, labels=ids).loss.backward()
        print(fitted.last_plan.describe())
        fitted()
    """
    budget = to_bytes(activation_budget)
    if not isinstance(model, nn.Module):
        raise type_error("model", "a module", type(model).__name__, "pass a model")
    base = base_of(model)
    encoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    remedy = "use gradient checkpointing"
    if encoder:
        raise value_error("model", "a decoder", "an encoder-decoder", remedy)
    classifies = type(base).__name__.endswith(("ForSequenceClassification", "ForTokenClassification"))
    if classifies:
        raise value_error("model", "a language model", type(base).__name__, remedy)
    backbone = decoder_of(base)
    layers = decoder_layers(backbone)
    if not layers:
        expected = "decoder layers that can be checkpointed (GradientCheckpointingLayer of transformers)"
        raise value_error("model", expected, f"{type(base).__name__} with none", "leave it as it is")
    fitted = Fitted(backbone, layers, budget)
    fitted._undo = exchange(backbone, KEY, _forward, fitted, copied=False)
    return fitted


def decoder_of(base: nn.Module) -> nn.Module:
    """The module whose forward pass runs the decoder layers, without head."""
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    return base if decoder is None else decoder


def kind_of(layer: nn.Module) -> Hashable:
    """Layers of one kind hold the same bytes."""
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
    return type(layer).__qualname__, shapes


def decoder_layers(backbone: nn.Module) -> dict[str, nn.Module]:
    """The layers that can be checkpointed, by their names, in their order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            layers[name] = module
    return layers


def _widths(backbone: nn.Module) -> frozenset[int]:
    """The model's own sizes: those of parameters and of attention heads."""
    sizes = {size for p in backbone.parameters() for size in p.shape}
    sizes |= {
        value for value in vars(getattr(backbone, "config", None) or object).values() if type(value) is int
    }
    sizes |= {
        module.head_dim for module in backbone.modules() if type(getattr(module, "head_dim", None)) is int
    }
    return frozenset(sizes)


def _forward(backbone: nn.Module, fitted: Fitted, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    if not (backbone.training and torch.is_grad_enabled()):
        return stock(*args, **kwargs)
    if torch.compiler.is_compiling():
        raise value_error("model", "one that runs eagerly", "torch.compile", "undo fit_activations before")
    given = kwargs.get("past_key_values")
    if given is not None:
        remedy = "train without a cache, and without prefix tuning"
        raise value_error("past_key_values", "None under an activation budget", type(given).__name__, remedy)
    if kwargs.get("use_cache") is None and "use_cache" in _arguments(type(backbone)):
        kwargs["use_cache"] = False  # a layer that is run again would add to it twice
    current = Pass(fitted)
    missing = object()
    before = [[layer.__dict__.get(name, missing) for name in SWITCHES] for layer in fitted._layers]
    try:
        for index, layer in enumerate(fitted._layers):
            values = True, functools.partial(current.run, index)
            layer.__dict__.update(zip(SWITCHES, values))
        with current.graph.computing():
            out = stock(*args, **kwargs)
        current.end()
        return out
    finally:
        for layer, values in zip(fitted._layers, before):
            for name, value in zip(SWITCHES, values):
                if value is missing:
                    layer.__dict__.pop(name, None)
                else:
                    layer.__dict__[name] = value


@functools.cache
def _arguments(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)
