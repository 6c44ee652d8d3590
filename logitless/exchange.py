"""Replace the forward pass of one module; other modules of its class keep theirs.

The module's class becomes a subclass with the same name. A `forward` attribute on the instance would not do:
in a deep copy it would run the weights of the original. FSDP2 may subclass the subclass, gradient
checkpointing still finds its layer class, and pickling writes the stock class.

An exchange lasts until undone (`exchange`: a patched model, fused layers), or as long as a `with` statement
(`exchanged`: a trainer's models, while the trainer computes its loss). Between two steps a trainer's models
are therefore exactly as TRL and Accelerate left them, and TRL, Accelerate, another trainer, a deep copy or a
pickle never contain our forward pass.

A `forward` that another library put on the instance is kept as data: `Entry.below`.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

# Where an exchanged module keeps its entries, by the key of the exchange.
STATES = "_logitless_states"


@dataclass
class Entry:
    """One exchange of a module."""

    forward: Callable  # (module, state, stock, *args, **kwargs)
    state: Any
    below: Callable | None  # a `forward` that was on the instance before, such as TRL's or Accelerate's
    copied: bool  # whether a deep copy of the module has the exchange too
    live: bool = True


def exchange(
    module: nn.Module, key: str, forward: Callable, state: Any, *, copied: bool = True
) -> Callable[[], None]:
    """Give `module` the forward pass `forward(module, state, stock, *args, **kwargs)`, until undone.

    Args:
        module: the one module to change.
        key: name of the exchange, such as "loss"; a module has at most one exchange per key.
        forward: `stock` is the forward pass without this exchange, bound to the module that is called.
        state: the state that `forward` receives; a deep copy of the module has a deep copy of the state.
        copied: whether a deep copy of the module has the exchange too; without it the copy is a stock module.

    Returns:
        A function that undoes it. Exchanges can be undone in any order, and after FSDP2 has made a class of
        its own from the exchanged one. A `forward` that was on the instance is back afterwards, the same
        object.

    Raises:
        ValueError: the module has that exchange already.
    """
    entries = module.__dict__.setdefault(STATES, {})
    if key in entries and entries[key].live:
        raise ValueError(
            f"model: expected {type(module).__name__} as it comes, got one with {key!r} on already; undo "
            f"that first."
        )
    if key in entries:
        # The earlier exchange under this key was undone below another exchange, or below a forward pass on
        # the instance, so its class is still in use.
        entry = entries[key]
        entry.forward = forward
        entry.state = state
        entry.copied = copied
        entry.live = True
    else:
        # On the instance it would hide the class's.
        below = module.__dict__.pop("forward", None)
        entries[key] = Entry(forward, state, below, copied)
        module.__class__ = _exchanged_class(type(module), key)

    def undo() -> None:
        if state_of(module, key) is state:
            withdraw(module, key)

    return undo


@contextmanager
def exchanged(module: nn.Module, key: str, forward: Callable, state: Any) -> Iterator[None]:
    """Context manager of `exchange`; on exit, an earlier exchange under `key` is restored.

    A deep copy that is made inside the context is a stock module.
    """
    entry = module.__dict__.get(STATES, {}).get(key)
    if entry is None or not entry.live:
        exchange(module, key, forward, state, copied=False)
        try:
            yield
        finally:
            withdraw(module, key)
        return
    before = entry.forward, entry.state
    entry.forward, entry.state = forward, state
    try:
        yield
    finally:
        entry.forward, entry.state = before


def withdraw(module: nn.Module, key: str) -> None:
    """Undo the exchange under `key`, if there is one."""
    entries = module.__dict__.get(STATES, {})
    if key not in entries:
        return
    entries[key].live = False
    # From the newest entry to the oldest. A live exchange keeps all older entries, and a `forward` that was
    # put on the instance in between keeps the entry whose `below` it may call.
    for name, entry in reversed(list(entries.items())):
        if entry.live or entry.below is not None and "forward" in module.__dict__:
            break
        if _own(type(module)) == name:
            # A class on top of ours, such as FSDP2's, stays with ours, which finds no entry.
            module.__class__ = type(module).__mro__[1]
        del entries[name]
        if entry.below is not None:
            module.__dict__["forward"] = entry.below
    if not entries:
        del module.__dict__[STATES]


def state_of(module: nn.Module, key: str) -> Any:
    """The `state` of the module's exchange under `key`; None if the module has no such exchange."""
    entry = module.__dict__.get(STATES, {}).get(key)
    return None if entry is None or not entry.live else entry.state


def stock_forward(module: nn.Module) -> Callable:
    """The forward pass of the module's class, bound to the module: without exchanges, and without a `forward`
    attribute on the instance."""
    return MethodType(_stock(type(module)).forward, module)


def instance_forward(module: nn.Module) -> Callable | None:
    """The `forward` on the instance, if any, also while an exchange keeps it aside."""
    entries = reversed(module.__dict__.get(STATES, {}).values())
    below = (entry.below for entry in entries if entry.below is not None)
    return module.__dict__.get("forward") or next(below, None)


def _own(cls: type) -> str | None:
    return vars(cls).get("exchange_key")


def _stock(cls: type) -> type:
    """The class without our subclasses of it."""
    while _own(cls) is not None:
        cls = cls.__mro__[1]
    return cls


@functools.cache
def _exchanged_class(stock: type, key: str) -> type:
    def exchanged_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(STATES, {}).get(key)
        if entry is None:
            return stock.forward(self, *args, **kwargs)
        below = entry.below or functools.partial(stock.forward, self)
        if not entry.live:
            return below(*args, **kwargs)
        return entry.forward(self, entry.state, below, *args, **kwargs)

    functools.update_wrapper(exchanged_forward, stock.forward)
    # Accelerate unwraps a forward pass along `__wrapped__`, and would take ours off with its own.
    del exchanged_forward.__wrapped__
    exchanged_forward.__signature__ = inspect.signature(stock.forward)
    namespace = {
        "forward": exchanged_forward,
        "exchange_key": key,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_as_stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock)(stock.__name__, (stock,), namespace)


def _deepcopy(self: nn.Module, memo: dict) -> nn.Module:
    twin = self.__class__.__new__(self.__class__)
    memo[id(self)] = twin
    twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
    for key, entry in list(twin.__dict__.get(STATES, {}).items()):
        if not entry.copied:
            withdraw(twin, key)
    return twin


def _reduce_as_stock(self: nn.Module, protocol: int) -> tuple:
    """Pickled as a module of the stock class: our classes have no name that could be imported."""
    # Not `copyreg.__newobj__`, for which pickle compares the class with that of the object.
    state = {name: value for name, value in self.__dict__.items() if name != STATES}
    for entry in self.__dict__.get(STATES, {}).values():
        if entry.below is not None:
            state.setdefault("forward", entry.below)
    return object.__new__, (_stock(type(self)),), state
