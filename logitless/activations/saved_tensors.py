"""What a decoder layer saves for its backward pass: tensors that are kept and counted, or recomputed.

A layer runs under autograd's hooks for saved tensors (`torch.autograd.graph.saved_tensors_hooks`). For each
tensor that an operator saves, the pack hook returns one of these objects, which autograd saves instead:

    SavedTensor       holds the tensor; its storage is counted as long as the object lives
    a tuple           holds the tensor, its version, and a `LayerBytes` if the bytes of the layer are known:
                      these are counted as long as one such tuple lives. A parameter, or a view of one, is
                      not counted
    RecipeOutput      holds no tensor: the output of a fused operator, recomputed from the tensors that the
                      operator saves (level "cheap")
    RecomputedTensor  holds no tensor: the whole layer is recomputed from its inputs (level "full")

Hooks cost host time for each saved tensor. If the bytes of a layer are known, its storages are not counted
again, and the hooks of a layer at level "keep" are removed after its first saved tensor.

Unpacking raises, as autograd does without hooks, if an in-place operation has changed a tensor since it was
saved.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from logitless.activations.plan import ActivationPlan
from logitless.layers import recipes

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "a tensor of shape {} is at version {}; expected version {} instead."
)
# Names of the autograd nodes of operators whose output is a view of their input.
VIEWS = {f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute")}


class StorageSize(NamedTuple):
    """Bytes of a storage, and the shape of the first saved tensor that uses the storage."""

    bytes: int
    shape: tuple[int, ...]


class StorageCounter:
    """Total bytes of the storages that layers hold, each storage counted once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._counts: dict[int, list[int]] = {}  # storage -> [number of SavedTensors, bytes]
        # Tensors are also freed in autograd's threads, and where the garbage collector runs.
        self._lock = threading.RLock()

    def add_bytes(self, nbytes: int) -> None:
        """Add `nbytes` to the total (negative to subtract) without tracking storages."""
        with self._lock:
            self.bytes += nbytes

    def add(self, storage: torch.UntypedStorage) -> int:
        """Count one more use of a storage; return the key to `remove` it with."""
        key = storage._cdata
        with self._lock:
            entry = self._counts.get(key)
            if entry is None:
                entry = self._counts[key] = [0, storage.nbytes()]
                self.bytes += entry[1]
            entry[0] += 1
        return key

    def remove(self, key: int) -> None:
        """Count one use of a storage less; at none, subtract its bytes."""
        with self._lock:
            entry = self._counts[key]
            entry[0] -= 1
            if entry[0] == 0:
                del self._counts[key]
                self.bytes -= entry[1]


class SavedGraph:
    """One forward pass. It lives as long as an object that was saved in it for the backward pass."""

    def __init__(self, counter: StorageCounter, explain: Callable[[ActivationPlan | None], str]) -> None:
        self.counter = counter
        self.explain = explain
        self.plan: ActivationPlan | None = None

    @contextmanager
    def add_memory_note(self) -> Iterator[None]:
        """Context that adds the note of `explain` to an out-of-memory error."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            note = self.explain(self.plan)
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise


class SavedTensor:
    """A saved tensor, whose storages are counted as long as this object lives.

    The tensor is detached: otherwise a tensor that is saved by its own `grad_fn` would never be freed.
    """

    __slots__ = ("graph", "keys", "tensor", "version")

    def __init__(self, graph: SavedGraph, x: Tensor) -> None:
        self.tensor = x.detach()
        self.version = x._version
        self.graph = graph
        self.keys = [graph.counter.add(storage) for storage in storages_of(x)]

    def get(self) -> Tensor:
        return unpack_saved((self.tensor, self.version, None))

    def __del__(self) -> None:
        for key in getattr(self, "keys", ()):
            self.graph.counter.remove(key)


class LayerBytes:
    """The known bytes of a layer, counted as long as this object lives: as long as a tuple of `pack` does."""

    __slots__ = ("bytes", "graph", "shared")

    def __init__(self, graph: SavedGraph, nbytes: int, shared: Sequence[SavedTensor]) -> None:
        self.bytes = nbytes
        self.shared = shared
        self.graph = graph
        graph.counter.add_bytes(nbytes)

    def pack(self, x: Tensor) -> tuple[Tensor, int, "LayerBytes"]:
        return x.detach(), x._version, self

    def __del__(self) -> None:
        self.graph.counter.add_bytes(-self.bytes)


def storages_of(x: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor: one, or for a subclass such as DTensor those of its inner tensors."""
    if type(x) in (Tensor, nn.Parameter) or not hasattr(x, "__tensor_flatten__"):
        return [x.untyped_storage()]
    return [storage for name in x.__tensor_flatten__()[0] for storage in storages_of(getattr(x, name))]


def is_parameter(x: Tensor) -> bool:
    """Whether x is a parameter or a view of one, such as the transposed weight that a product saves."""
    return isinstance(x if x._base is None else x._base, nn.Parameter)


def unpack_saved(saved: Any) -> Any:
    """Return the tensor of an object that a pack hook returned: the unpack hook."""
    if type(saved) is not tuple:
        return saved if saved is None or isinstance(saved, Tensor) else saved.get()
    x, version, _ = saved
    if x._version != version:
        raise RuntimeError(CHANGED.format(tuple(x.shape), x._version, version))
    return x


def find_tensors(x: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    if isinstance(x, Tensor):
        return [x]
    if x is None or isinstance(x, (bool, int, float, str)):
        return []
    if isinstance(x, (Mapping, MutableSequence, tuple)):
        values = x.values() if isinstance(x, Mapping) else x
        return [tensor for value in values for tensor in find_tensors(value)]
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def copy_containers(x: Any, kind: type, convert: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    """Return x with `convert(leaf)` for each leaf of type `kind`, in copies of the nested containers.

    Args:
        x: a leaf or a container.
        kind: the type of the leaves to convert.
        convert: returns what stands for the leaf in the copy.
        copies: the copies that were made, by the id of the container: one that occurs twice is copied once.
    """
    if isinstance(x, kind):
        return convert(x)
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if id(x) in copies:
        return copies[id(x)]
    if isinstance(x, (MutableMapping, MutableSequence)):
        # Also one that pytree takes for a leaf, such as the `KVSharingDict` of transformers.
        copies[id(x)] = copied = copy.copy(x)
        for key, value in x.items() if isinstance(x, MutableMapping) else enumerate(x):
            copied[key] = copy_containers(value, kind, convert, copies)
        return copied
    if isinstance(x, tuple):
        values = [copy_containers(value, kind, convert, copies) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return tree_map_only(kind, convert, x)


class AutocastState:
    """Autocast's state on a device at the time of construction."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.state = self._current_state()

    def _current_state(self) -> tuple[bool, torch.dtype]:
        device_type = self.device_type
        return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def restore(self) -> AbstractContextManager:
        """Return a context with this state of autocast."""
        enabled, dtype = self.state
        if self._current_state() == self.state:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)


# --- A fused operator's outputs


class OperatorOutput:
    """Storage, dtype and memory layout of a fused operator's output."""

    __slots__ = ("dtype", "is_contiguous", "is_whole", "numel", "storage")

    def __init__(self, x: Tensor) -> None:
        # Held until the layer has run, so that no other storage gets its address.
        self.storage = x.untyped_storage()
        self.dtype = x.dtype
        self.is_contiguous = x.is_contiguous()
        self.numel = x.numel()
        # The output fills its storage from the first element on, as the recomputed output does.
        self.is_whole = self.storage.nbytes() == self.numel * x.element_size()


class Recipe:
    """How to recompute the outputs of a fused operator: `make(*inputs)`, once for all dropped outputs.

    Attributes:
        make: function that recomputes the outputs.
        inputs: arguments of `make`; once an output was dropped, what `LayerRun.pack_cheap` packed them into.
        versions: versions of the inputs.
        num_uses: number of dropped outputs, that is, of `RecipeOutput`s.
        num_left: number of dropped outputs that were not read since the outputs were recomputed.
        outputs: the recomputed outputs, until all dropped ones were read.
    """

    def __init__(self, make: Callable, inputs: Sequence[Any]) -> None:
        self.make = make
        self.inputs = inputs
        self.versions = [None if x is None else x._version for x in inputs]
        self.num_uses = 0
        self.num_left = 0
        self.outputs: Sequence[Tensor | None] | None = None

    def is_valid(self) -> bool:
        """Whether the inputs are unchanged since the outputs were computed.

        True once an output was dropped: reading the packed inputs then checks their versions.
        """
        return self.num_uses > 0 or self.versions == [None if x is None else x._version for x in self.inputs]

    def drop_output(self, run: "LayerRun") -> None:
        """Note that an output is dropped; at the first one, pack the inputs as the level "cheap" does."""
        self.num_uses += 1
        if self.num_uses == 1:
            self.graph = run.graph
            self.autocast = run.autocast
            self.inputs = [x if x is None else run.pack_cheap(x) for x in self.inputs]

    def get(self, index: int) -> Tensor:
        """Return output `index`, recomputed."""
        if self.outputs is None:
            with self.graph.add_memory_note(), torch.no_grad(), self.autocast.restore():
                self.outputs = self.make(*map(unpack_saved, self.inputs))
            self.num_left = self.num_uses
        output = self.outputs[index]
        self.num_left -= 1
        if self.num_left == 0:
            self.outputs = None  # a second backward pass over the graph recomputes them again
        return output


class RecipeOutput:
    """A dropped output of a fused operator, a view of it, or a copy in another dtype."""

    __slots__ = ("dtype", "index", "layout", "recipe")

    def __init__(self, recipe: Recipe, index: int, x: Tensor) -> None:
        self.recipe = recipe
        self.index = index
        self.dtype = x.dtype
        self.layout = x.size(), x.stride(), x.storage_offset()

    def get(self) -> Tensor:
        return self.recipe.get(self.index).to(self.dtype).as_strided(*self.layout)


class Recipes:
    """The outputs of the fused operators of a layer, while the layer runs: a `layers.recipes.Collector`."""

    def __init__(self) -> None:
        self.by_storage: dict[int, tuple[Recipe, int, OperatorOutput]] = {}
        self.by_node: dict[tuple[object, int], tuple[Recipe, int, OperatorOutput]] = {}
        self.dtypes: set[torch.dtype] = set()

    def add(self, node: object, outputs: Sequence, make: Callable, inputs: Sequence) -> None:
        recipe = Recipe(make, inputs)
        for index, x in enumerate(outputs):
            if x is not None and type(x) is Tensor:
                output = OperatorOutput(x)
                entry = recipe, index, output
                self.by_storage[output.storage._cdata] = self.by_node[node, index] = entry
                self.dtypes.add(x.dtype)

    def find(self, x: Tensor) -> tuple[Recipe, int] | None:
        """Return (recipe, output index) if x is an operator's output, a view of one, or autocast's copy."""
        if type(x) is not Tensor:
            return None
        entry = self.by_storage.get(x.untyped_storage()._cdata)
        if entry is None:
            # A copy by autocast has another dtype than the output.
            return None if self.dtypes <= {x.dtype} else self._find_source(x)
        recipe, index, output = entry
        is_unchanged = x.dtype == output.dtype and output.is_whole and x._version == 0
        return (recipe, index) if is_unchanged and recipe.is_valid() else None

    def _find_source(self, x: Tensor) -> tuple[Recipe, int] | None:
        """Return (recipe, output index) if x is a copy of an output in another dtype, or a view of such a
        copy; else None."""
        entry = self.by_node.get(_cast_source(x))
        if entry is None or x._version != 0:
            return None
        recipe, index, output = entry
        is_whole_copy = output.is_whole and x.untyped_storage().nbytes() == output.numel * x.element_size()
        return (recipe, index) if is_whole_copy and output.is_contiguous and recipe.is_valid() else None

    def close(self) -> None:
        """Forget the outputs when the layer has run; the recipes that dropped outputs use stay alive."""
        self.by_storage.clear()
        self.by_node.clear()


def _cast_source(x: Tensor) -> tuple[object, int] | None:
    """Return (node, output index) of the tensor that was cast to x or to x's base; None if none was."""
    node = x.grad_fn
    while node is not None and type(node).__name__ in VIEWS:
        node = node.next_functions[0][0]
    if node is None or type(node).__name__ != "ToCopyBackward0":
        return None
    return node.next_functions[0]


# --- A layer that is recomputed


class RecomputedLayer:
    """A layer at level "full": holds its inputs; reading one saved tensor recomputes all of them.

    A layer may write tensors into a container that it is given, for the layers after it. These tensors refer
    to the graph, and the graph to this object: with the container it would never be freed. Therefore this
    object holds copies of the containers, made before the layer runs, and each recomputation gets copies too.
    """

    def __init__(
        self, graph: SavedGraph, function: functools.partial, args: tuple, device: torch.device
    ) -> None:
        self.graph = graph
        self.forward = functools.partial(function.func, *function.args)
        # Keyword arguments, such as angles and masks, are shared by all layers.
        self.inputs = copy_containers(
            (args, function.keywords), Tensor, lambda x: x if is_parameter(x) else LayerInput(graph, x), {}
        )
        self.autocast = AutocastState(device.type)
        self.rng = RandomState(device)
        self.num_saved = 0
        self.saved: dict[int, Tensor] = {}

    def pack(self, x: Tensor) -> "RecomputedTensor":
        self.num_saved += 1
        return RecomputedTensor(self, self.num_saved - 1, x)

    def get(self, index: int) -> Tensor:
        if index not in self.saved:
            self._run()
        return self.saved.pop(index)

    def _run(self) -> None:
        saved: dict[int, Tensor] = {}

        def record(x: Tensor) -> Tensor:
            saved[len(saved)] = x.detach()
            if len(saved) == self.num_saved:
                raise _RecomputeDone
            return x.detach()

        args, keywords = copy_containers(self.inputs, LayerInput, LayerInput.get, {})
        with self.graph.add_memory_note(), self.rng.restore(), torch.enable_grad(), self.autocast.restore():
            try:
                with saved_tensors_hooks(record, lambda x: x):
                    self.forward(*args, **keywords)
            except _RecomputeDone:
                pass
        if len(saved) != self.num_saved:
            raise RuntimeError(
                f"layer: expected {self.num_saved} saved tensors when it is recomputed, got {len(saved)}; "
                "its computation is not repeatable, so run the model without fit_activations."
            )
        self.saved = saved


class LayerInput:
    """A tensor argument of a layer."""

    def __init__(self, graph: SavedGraph, x: Tensor) -> None:
        self.saved = SavedTensor(graph, x)
        self.requires_grad = x.requires_grad

    def get(self) -> Tensor:
        return self.saved.get().detach().requires_grad_(self.requires_grad)


class _RecomputeDone(Exception):
    """Raised to end the recomputation of a layer once all its saved tensors are recomputed."""


class RecomputedTensor:
    """A saved tensor of a `RecomputedLayer`."""

    __slots__ = ("dtype", "index", "layer", "shape")

    def __init__(self, layer: RecomputedLayer, index: int, x: Tensor) -> None:
        self.layer = layer
        self.index = index
        self.shape = x.shape
        self.dtype = x.dtype

    def get(self) -> Tensor:
        recomputed = self.layer.get(self.index)
        if recomputed.shape != self.shape or recomputed.dtype != self.dtype:
            raise RuntimeError(
                f"layer: expected a saved tensor {tuple(self.shape)} {self.dtype} when it is recomputed, got "
                f"{tuple(recomputed.shape)} {recomputed.dtype}; its computation is not repeatable, so run "
                "the model without fit_activations."
            )
        return recomputed


class RandomState:
    """The random state of the CPU and of a device at the time of construction, to repeat dropout."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self.state = None if self.module is None else self.module.get_rng_state(device)

    @contextmanager
    def restore(self) -> Iterator[None]:
        devices = [] if self.module is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.set_rng_state(self.cpu)
            if self.module is not None:
                self.module.set_rng_state(self.state, self.device)
            yield


# --- A layer's forward pass


class LayerRun:
    """Runs the forward pass of one layer at one level, under hooks for saved tensors.

    Args:
        graph: the forward pass of the model.
        level: "keep", "cheap" or "full".
        autocast: autocast's state of the forward pass.
        sizes: where to count the bytes of every level; None: they are not counted.
        layer_bytes: the known bytes of the layer; None: storages are counted one by one.
    """

    def __init__(
        self,
        graph: SavedGraph,
        level: str,
        autocast: AutocastState,
        sizes: "LayerSizes | None" = None,
        layer_bytes: LayerBytes | None = None,
    ) -> None:
        self.graph = graph
        self.level = level
        self.autocast = autocast
        self.sizes = sizes
        self.pack_keep = self._count if layer_bytes is None else layer_bytes.pack
        self.recipes = Recipes() if level == "cheap" or sizes is not None else None

    def __call__(self, function: functools.partial, *args: Any, device: torch.device) -> Any:
        pack = {"keep": self.pack_keep, "cheap": self.pack_cheap}.get(self.level)
        if pack is None:
            pack = RecomputedLayer(self.graph, function, args, device).pack
        hook = pack if self.sizes is None else functools.partial(self._measure, pack)
        context = nullcontext() if self.recipes is None else recipes.collecting(self.recipes)
        try:
            with saved_tensors_hooks(hook, unpack_saved), context:
                return function(*args)
        finally:
            # Autograd keeps the pack hook alive, and with it this object.
            if self.recipes is not None:
                self.recipes.close()
            self.recipes = self.sizes = self.pack_keep = None

    def _count(self, x: Tensor) -> Any:
        return (x.detach(), x._version, None) if is_parameter(x) else SavedTensor(self.graph, x)

    def pack_cheap(self, x: Tensor) -> Any:
        match = self.recipes.find(x)
        if match is None:
            return self.pack_keep(x)
        recipe, index = match
        recipe.drop_output(self)
        return RecipeOutput(recipe, index, x)

    def _measure(self, pack: Callable[[Tensor], Any], x: Tensor) -> Any:
        if not is_parameter(x):
            self.sizes.add(x, self.recipes)
        return pack(x)


def run_kept_layer(
    graph: SavedGraph, nbytes: int, shared: Sequence[SavedTensor], function: functools.partial, *args: Any
) -> Any:
    """Run a layer at level "keep" that is known to hold `nbytes`, and `shared` together with other layers.

    Only the first saved tensor is packed with the `LayerBytes`. Autograd frees it when the backward pass of
    the layer ends.
    """

    def pack(x: Tensor) -> tuple:
        # Autograd calls only the innermost hooks: they are these, so `close` removes these.
        hooks.close()
        return LayerBytes(graph, nbytes, shared).pack(x)

    with ExitStack() as hooks:
        hooks.enter_context(saved_tensors_hooks(pack, unpack_saved))
        return function(*args)


class LayerSizes:
    """The storages that a layer would hold at "keep" and at "cheap", counted while it runs at any level."""

    def __init__(self, shared: set[int]) -> None:
        self.levels: dict[str, list[StorageSize]] = {"keep": [], "cheap": []}
        # `shared` are storages of keyword arguments, which `SavedGraph` counts once for all layers.
        self._counted = {"keep": set(shared), "cheap": set(shared)}
        self._added_recipes: set[Recipe] = set()
        # As long as a weak reference to a storage exists, no other storage gets its address.
        self._references: list[StorageWeakRef] = []

    def add(self, x: Tensor, recipes: Recipes) -> None:
        self._count("keep", x)
        self._add_cheap(x, recipes)

    def _add_cheap(self, x: Tensor, recipes: Recipes) -> None:
        match = recipes.find(x)
        if match is None:
            self._count("cheap", x)
        elif match[0] not in self._added_recipes:
            recipe = match[0]
            self._added_recipes.add(recipe)
            for packed in recipe.inputs:
                tensor = unpack_saved(packed)
                if tensor is not None and not is_parameter(tensor):
                    self._add_cheap(tensor, recipes)

    def _count(self, level: str, x: Tensor) -> None:
        for storage in storages_of(x):
            if storage._cdata not in self._counted[level]:
                self._counted[level].add(storage._cdata)
                self._references.append(StorageWeakRef(storage))
                self.levels[level].append(StorageSize(storage.nbytes(), tuple(x.shape)))
