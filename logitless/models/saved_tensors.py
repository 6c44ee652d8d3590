"""What a decoder layer saves for its backward pass: kept and counted, or dropped and made again.

A layer runs under hooks of autograd (`torch.autograd.graph.saved_tensors_hooks`). In the place of each tensor
that an operator saves, the hook hands autograd one of these:

    Kept           the tensor; its storage is counted until the object dies
    a tuple        the tensor, its version, and LayerBytes where the bytes of the layer are known: these are
                   counted until the last such tuple dies. A parameter, or a view of one, is not counted
    FromRecipe     nothing; a fused operator's output, made again from what that operator saves ("cheap")
    FromLayer      nothing; the whole layer is run again from its inputs ("full")

Hooks cost host time for each saved tensor. Where the bytes of a layer are known, its storages are not counted
again, and hooks of a kept layer are removed after the first tensor.

All of them check, as autograd does without hooks, that no operation in place has changed a tensor meanwhile.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from logitless.layers import recipes
from logitless.models.activation_plan import ActivationPlan

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "a tensor of shape {} is at version {}; expected version {} instead."
)
# Autograd nodes of views: what they return has the storage that they were given.
VIEWS = {f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute")}


class Storage(NamedTuple):
    """A storage that was counted, and the shape of the tensor that was saved first."""

    bytes: int
    shape: tuple[int, ...]


class Held:
    """The storages that layers hold, each counted once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._counts: dict[int, list[int]] = {}  # storage -> [number of Kept, bytes]
        # Tensors are let go by autograd's threads too, and where the garbage collector runs.
        self._lock = threading.RLock()

    def change(self, nbytes: int) -> None:
        """Count bytes whose storages are not told apart; negative: no more."""
        with self._lock:
            self.bytes += nbytes

    def add(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        with self._lock:
            entry = self._counts.get(key)
            if entry is None:
                entry = self._counts[key] = [0, storage.nbytes()]
                self.bytes += entry[1]
            entry[0] += 1
        return key

    def remove(self, key: int) -> None:
        with self._lock:
            entry = self._counts[key]
            entry[0] -= 1
            if entry[0] == 0:
                del self._counts[key]
                self.bytes -= entry[1]


class Graph:
    """One forward pass, alive as long as anything that it has saved."""

    def __init__(self, held: Held, explain: Callable[[ActivationPlan | None], str]) -> None:
        self.held, self.explain = held, explain
        self.plan: ActivationPlan | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Where memory runs out inside, the error gets a note."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            note = self.explain(self.plan)
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise


class Kept:
    # Detached: with its node of the graph, a tensor that its own node saves would never be freed.
    __slots__ = ("graph", "keys", "tensor", "version")

    def __init__(self, graph: Graph, x: Tensor) -> None:
        self.tensor = x.detach()
        self.version = x._version
        self.graph = graph
        self.keys = [graph.held.add(storage) for storage in storages(x)]

    def get(self) -> Tensor:
        return unpack((self.tensor, self.version, None))

    def __del__(self) -> None:
        for key in getattr(self, "keys", ()):
            self.graph.held.remove(key)


class LayerBytes:
    """The known bytes of a layer, counted as long as anything that the layer has saved refers to them."""

    __slots__ = ("bytes", "graph", "shared")

    def __init__(self, graph: Graph, nbytes: int, shared: Sequence[Kept]) -> None:
        self.bytes = nbytes
        self.shared = shared
        self.graph = graph
        graph.held.change(nbytes)

    def keep(self, x: Tensor) -> tuple[Tensor, int, "LayerBytes"]:
        return x.detach(), x._version, self

    def __del__(self) -> None:
        self.graph.held.change(-self.bytes)


def storages(x: Tensor) -> list[torch.UntypedStorage]:
    """The storage of a tensor, or those of the tensors inside (DTensor and other subclasses)."""
    if type(x) in (Tensor, nn.Parameter) or not hasattr(x, "__tensor_flatten__"):
        return [x.untyped_storage()]
    return [found for name in x.__tensor_flatten__()[0] for found in storages(getattr(x, name))]


def is_parameter(x: Tensor) -> bool:
    """Whether x is a parameter or a view of one; products save weights transposed."""
    return isinstance(x if x._base is None else x._base, nn.Parameter)


def unpack(saved: Any) -> Any:
    if type(saved) is not tuple:
        return saved if saved is None or isinstance(saved, Tensor) else saved.get()
    x, version, _ = saved
    if x._version != version:
        raise RuntimeError(CHANGED.format(tuple(x.shape), x._version, version))
    return x


class Autocast:
    """The state of autocast on a device, to compute something again in."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.state = self._now()

    def _now(self) -> tuple[bool, torch.dtype]:
        kind = self.device_type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def restored(self) -> AbstractContextManager:
        enabled, dtype = self.state
        if self._now() == self.state:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)


# --- A fused operator's outputs


class Output:
    """An output of a fused operator: its storage and what can be told from it."""

    __slots__ = ("dtype", "is_contiguous", "is_whole", "numbers", "storage")

    def __init__(self, x: Tensor) -> None:
        # Until the layer has run, so that no other storage takes its address.
        self.storage = x.untyped_storage()
        self.dtype = x.dtype
        self.is_contiguous = x.is_contiguous()
        self.numbers = x.numel()
        # The whole storage is made, from its first number on.
        self.is_whole = self.storage.nbytes() == self.numbers * x.element_size()


class Recipe:
    """Outputs of a fused operator that are made again, once for all that use them."""

    def __init__(self, make: Callable, inputs: Sequence[Any]) -> None:
        self.make = make
        self.inputs = inputs
        self.versions = [None if x is None else x._version for x in inputs]
        self.uses = self.left = 0
        self.made: Sequence[Tensor | None] | None = None

    def is_valid(self) -> bool:
        """Whether the inputs still have the values that the outputs were made from."""
        return self.uses > 0 or self.versions == [None if x is None else x._version for x in self.inputs]

    def dropped(self, run: "LayerRun") -> None:
        """An output is dropped: the inputs must stay, or have a recipe themselves."""
        self.uses += 1
        if self.uses == 1:
            self.graph, self.autocast = run.graph, run.autocast
            self.inputs = [x if x is None else run.pack_cheap(x) for x in self.inputs]

    def get(self, index: int) -> Tensor:
        if self.made is None:
            with self.graph.computing(), torch.no_grad(), self.autocast.restored():
                self.made = self.make(*map(unpack, self.inputs))
            self.left = self.uses
        tensor = self.made[index]
        self.left -= 1
        if self.left == 0:
            self.made = None  # made anew for a second backward pass over the same graph
        return tensor


class FromRecipe:
    __slots__ = ("dtype", "index", "place", "recipe")

    def __init__(self, recipe: Recipe, index: int, x: Tensor) -> None:
        self.recipe = recipe
        self.index = index
        self.dtype = x.dtype
        self.place = x.size(), x.stride(), x.storage_offset()

    def get(self) -> Tensor:
        return self.recipe.get(self.index).to(self.dtype).as_strided(*self.place)


class Recipes:
    """What the fused operators of a layer have returned, while the layer runs."""

    def __init__(self) -> None:
        self.by_storage: dict[int, tuple[Recipe, int, Output]] = {}
        self.by_node: dict[tuple[object, int], tuple[Recipe, int, Output]] = {}
        self.dtypes: set[torch.dtype] = set()

    def add(self, node: object, outputs: Sequence, make: Callable, inputs: Sequence) -> None:
        recipe = Recipe(make, inputs)
        for index, x in enumerate(outputs):
            if x is not None and type(x) is Tensor:
                output = Output(x)
                entry = recipe, index, output
                self.by_storage[output.storage._cdata] = self.by_node[node, index] = entry
                self.dtypes.add(x.dtype)

    def find(self, x: Tensor) -> tuple[Recipe, int] | None:
        """The recipe of a tensor that is an operator's output, a view of it, or autocast's copy of it."""
        if type(x) is not Tensor:
            return None
        made_by = self.by_storage.get(x.untyped_storage()._cdata)
        if made_by is None:
            # A copy has another dtype than the output that it was made of.
            return None if self.dtypes <= {x.dtype} else self._find_source(x)
        recipe, index, output = made_by
        same = x.dtype == output.dtype and output.is_whole and x._version == 0
        return (recipe, index) if same and recipe.is_valid() else None

    def _find_source(self, x: Tensor) -> tuple[Recipe, int] | None:
        """The recipe of the output of which x is a copy in another dtype, or a view of such a copy."""
        made_by = self.by_node.get(_copied_from(x))
        if made_by is None or x._version != 0:
            return None
        recipe, index, output = made_by
        whole = output.is_whole and x.untyped_storage().nbytes() == output.numbers * x.element_size()
        return (recipe, index) if whole and output.is_contiguous and recipe.is_valid() else None

    def close(self) -> None:
        """The layer has run: only what its saved tensors need stays."""
        self.by_storage.clear()
        self.by_node.clear()


def _copied_from(x: Tensor) -> tuple[object, int] | None:
    """The output of a node of which x is a copy in another dtype, or a view of such a copy."""
    node = x.grad_fn
    while node is not None and type(node).__name__ in VIEWS:
        node = node.next_functions[0][0]
    if node is None or type(node).__name__ != "ToCopyBackward0":
        return None
    return node.next_functions[0]


# --- A layer that is run again


class LayerAgain:
    """A layer whose inputs are all that is held of it: the first tensor that is asked for runs it again."""

    def __init__(self, graph: Graph, function: functools.partial, args: tuple, device: torch.device) -> None:
        self.graph, self.function = graph, function
        # Keyword arguments are shared by all layers: angles and masks.
        self.given = tree_map_only(
            Tensor, lambda x: x if is_parameter(x) else Input(graph, x), (args, function.keywords)
        )
        self.autocast = Autocast(device.type)
        self.rng = RandomState(device)
        self.count = 0
        self.made: dict[int, Tensor] = {}

    def pack(self, x: Tensor) -> "FromLayer":
        self.count += 1
        return FromLayer(self, self.count - 1, x)

    def get(self, index: int) -> Tensor:
        if index not in self.made:
            self._run()
        return self.made.pop(index)

    def _run(self) -> None:
        made: dict[int, Tensor] = {}

        def keep(x: Tensor) -> Tensor:
            made[len(made)] = x.detach()
            if len(made) == self.count:
                raise _AllMade
            return x.detach()

        args, keywords = tree_map_only(Input, Input.get, self.given)
        again = functools.partial(self.function.func, *self.function.args, **keywords)
        with self.graph.computing(), self.rng.restored(), torch.enable_grad(), self.autocast.restored():
            try:
                with saved_tensors_hooks(keep, lambda x: x):
                    again(*args)
            except _AllMade:
                pass
        if len(made) != self.count:
            raise RuntimeError(
                f"layer: expected {self.count} saved tensors when it is run again, got {len(made)}; it does "
                "not compute the same a second time: fit_activations cannot be used with it."
            )
        self.made = made


class Input:
    """A tensor that a layer was called with."""

    def __init__(self, graph: Graph, x: Tensor) -> None:
        self.kept = Kept(graph, x)
        self.requires_grad = x.requires_grad

    def get(self) -> Tensor:
        return self.kept.get().detach().requires_grad_(self.requires_grad)


class _AllMade(Exception):
    """Ends a layer's second run as soon as it has saved everything."""


class FromLayer:
    __slots__ = ("dtype", "index", "layer", "shape")

    def __init__(self, layer: LayerAgain, index: int, x: Tensor) -> None:
        self.layer = layer
        self.index = index
        self.shape = x.shape
        self.dtype = x.dtype

    def get(self) -> Tensor:
        recomputed = self.layer.get(self.index)
        if recomputed.shape != self.shape or recomputed.dtype != self.dtype:
            raise RuntimeError(
                f"layer: expected a saved tensor {tuple(self.shape)} {self.dtype} when it is run again, got "
                f"{tuple(recomputed.shape)} {recomputed.dtype}; it does not compute the same a second time: "
                "fit_activations cannot be used with it."
            )
        return recomputed


class RandomState:
    """The random state of the CPU and of a device, to run dropout in again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self.state = None if self.module is None else self.module.get_rng_state(device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        devices = [] if self.module is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.set_rng_state(self.cpu)
            if self.module is not None:
                self.module.set_rng_state(self.state, self.device)
            yield


# --- A layer's forward pass


class LayerRun:
    """The forward pass of one layer at one level, under hooks.

    Without `nbytes`, the known bytes of the layer, storages are counted one by one.
    """

    def __init__(
        self,
        graph: Graph,
        level: str,
        autocast: Autocast,
        sizes: "Sizes | None" = None,
        nbytes: LayerBytes | None = None,
    ) -> None:
        self.graph = graph
        self.level = level
        self.autocast = autocast
        self.sizes = sizes
        self.keep = self._count if nbytes is None else nbytes.keep
        self.recipes = Recipes() if level == "cheap" or sizes is not None else None

    def __call__(self, function: functools.partial, *args: Any, device: torch.device) -> Any:
        pack = {"keep": self.keep, "cheap": self.pack_cheap}.get(self.level)
        if pack is None:
            pack = LayerAgain(self.graph, function, args, device).pack
        hook = pack if self.sizes is None else functools.partial(self._measure, pack)
        collecting = nullcontext() if self.recipes is None else recipes.collecting(self.recipes)
        try:
            with saved_tensors_hooks(hook, unpack), collecting:
                return function(*args)
        finally:
            # Autograd keeps the hook, and so all that this object holds.
            if self.recipes is not None:
                self.recipes.close()
            self.recipes = self.sizes = self.keep = None

    def _count(self, x: Tensor) -> Any:
        return (x.detach(), x._version, None) if is_parameter(x) else Kept(self.graph, x)

    def pack_cheap(self, x: Tensor) -> Any:
        match = self.recipes.find(x)
        if match is None:
            return self.keep(x)
        recipe, index = match
        recipe.dropped(self)
        return FromRecipe(recipe, index, x)

    def _measure(self, pack: Callable[[Tensor], Any], x: Tensor) -> Any:
        if not is_parameter(x):
            self.sizes.saved(x, self.recipes)
        return pack(x)


def run_kept(
    graph: Graph, nbytes: int, shared: Sequence[Kept], function: functools.partial, *args: Any
) -> Any:
    """The forward pass of a kept layer that is known to hold `nbytes`, and `shared` with other layers.

    The backward pass of the layer ends at the operator that saved the first tensor; autograd frees it there.
    """

    def pack(x: Tensor) -> tuple:
        # Autograd calls the innermost hooks: these are the ones that are removed.
        hooks.close()
        return LayerBytes(graph, nbytes, shared).keep(x)

    with ExitStack() as hooks:
        hooks.enter_context(saved_tensors_hooks(pack, unpack))
        return function(*args)


class Sizes:
    """Bytes that a layer holds at each level, counted while it runs at any of them."""

    def __init__(self, shared: set[int]) -> None:
        # Storages of keyword arguments: what all layers share is counted by the forward pass.
        self.levels: dict[str, list[Storage]] = {"keep": [], "cheap": []}
        self._seen = {"keep": set(shared), "cheap": set(shared)}
        self._made: set[Recipe] = set()
        # An address is not given to another storage while a weak reference to the first exists.
        self._references: list[StorageWeakRef] = []

    def saved(self, x: Tensor, recipes: Recipes) -> None:
        self._count("keep", x)
        self._saved_cheap(x, recipes)

    def _saved_cheap(self, x: Tensor, recipes: Recipes) -> None:
        match = recipes.find(x)
        if match is None:
            self._count("cheap", x)
        elif match[0] not in self._made:
            recipe = match[0]
            self._made.add(recipe)
            for packed in recipe.inputs:
                tensor = unpack(packed)
                if tensor is not None and not is_parameter(tensor):
                    self._saved_cheap(tensor, recipes)

    def _count(self, level: str, x: Tensor) -> None:
        for storage in storages(x):
            if storage._cdata not in self._seen[level]:
                self._seen[level].add(storage._cdata)
                self._references.append(StorageWeakRef(storage))
                self.levels[level].append(Storage(storage.nbytes(), tuple(x.shape)))
