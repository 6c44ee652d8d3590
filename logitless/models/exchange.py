"""One module gets another forward pass; other modules of its class keep theirs.

The module's class becomes a subclass with the same name. That survives what a `forward` on the instance does
not: a deep copy runs its own weights, FSDP2 subclasses the subclass, gradient checkpointing still sees a
layer, and pickling writes the stock class.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

# Where an exchanged module keeps what its forward passes need, by the key of the exchange.
STATES = "_logitless_states"


@dataclass
class Entry:
    """One exchange of a module."""

    state: Any
    inner: Callable | None  # a `forward` that was on the instance before, such as accelerate's autocast
    live: bool = True


def exchange(module: nn.Module, key: str, forward: Callable, state: Any) -> Callable[[], None]:
    """Give `module` the forward pass `forward(module, state, stock, *args, **kwargs)`, until undone.

    Args:
        module: the one module to change.
        key: names what is done, such as "loss"; one module takes each key once.
        forward: `stock` is the forward pass without this exchange, bound to the module that is called.
        state: what `forward` needs beside the module; a deep copy of the module has a deep copy of it.

    Returns:
        its undoing. Exchanges can be undone in any order, and after FSDP2 has made a class of its own from
        the exchanged one.

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
        # Undone below another one: its class is still there.
        entries[key].state, entries[key].live = state, True
    else:
        # On the instance it would hide the class's.
        entries[key] = Entry(state, module.__dict__.pop("forward", None))
        module.__class__ = _exchanged_class(type(module), key, forward)

    def undo() -> None:
        if state_of(module, key) is state:
            withdraw(module, key)

    return undo


def withdraw(module: nn.Module, key: str) -> None:
    """Undo the exchange under `key`, if there is one."""
    entries = module.__dict__.get(STATES, {})
    if key not in entries:
        return
    entries[key].live = False
    # A class on top of ours (FSDP2's, another exchange's) stays, and finds no live entry under our key.
    while (own := _own(type(module))) is not None and not entries[own].live:
        module.__class__ = type(module).__mro__[1]
        if (inner := entries.pop(own).inner) is not None:
            module.__dict__.setdefault("forward", inner)
    if not any(entry.live for entry in entries.values()):
        for entry in entries.values():
            if entry.inner is not None:
                module.__dict__.setdefault("forward", entry.inner)
        del module.__dict__[STATES]


def state_of(module: nn.Module, key: str) -> Any:
    """What `exchange` was given for this module under `key`; None if it has no such exchange."""
    entry = module.__dict__.get(STATES, {}).get(key)
    return None if entry is None or not entry.live else entry.state


def _own(cls: type) -> str | None:
    return vars(cls).get("exchange_key")


def _stock(cls: type) -> type:
    """The class without our subclasses at its top."""
    while _own(cls) is not None:
        cls = cls.__mro__[1]
    return cls


@functools.cache
def _exchanged_class(stock: type, key: str, forward: Callable) -> type:
    def exchanged_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(STATES, {}).get(key)
        if entry is None:
            return stock.forward(self, *args, **kwargs)
        below = entry.inner or functools.partial(stock.forward, self)
        if not entry.live:
            return below(*args, **kwargs)
        return forward(self, entry.state, below, *args, **kwargs)

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
    return twin


def _reduce_as_stock(self: nn.Module, protocol: int) -> tuple:
    """Pickled as a module of the stock class: our classes have no name that could be imported."""
    # Not `copyreg.__newobj__`, for which pickle compares the class with that of the object.
    state = {name: value for name, value in self.__dict__.items() if name != STATES}
    for entry in self.__dict__.get(STATES, {}).values():
        if entry.inner is not None:
            state.setdefault("forward", entry.inner)
    return object.__new__, (_stock(type(self)),), state
