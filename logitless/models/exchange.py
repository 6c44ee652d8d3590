"""One module gets another forward pass; other modules of its class keep theirs.

The module's class becomes a subclass with the same name. That survives what a `forward` on the instance does
not: a deep copy runs its own weights, FSDP2 subclasses the subclass, gradient checkpointing still sees a
layer, and pickling writes the stock class.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

# Where an exchanged module keeps what its forward passes need, by the key of the exchange.
STATES = "_logitless_states"


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
    if key in module.__dict__.get(STATES, {}):
        raise ValueError(
            f"model: expected {type(module).__name__} as it comes, got one with {key!r} on already; undo "
            f"that first."
        )
    module.__dict__.setdefault(STATES, {})[key] = state
    module.__class__ = _exchanged_class(type(module), key, forward)

    def undo() -> None:
        states = module.__dict__.get(STATES, {})
        if states.get(key) is not state:
            return
        del states[key]
        # A class on top of ours (FSDP2's, another exchange's) stays, and finds no state under our key.
        while (own := _own(type(module))) is not None and own not in states:
            module.__class__ = type(module).__mro__[1]
        if not states:
            del module.__dict__[STATES]

    return undo


def state_of(module: nn.Module, key: str) -> Any:
    """What `exchange` was given for this module under `key`; None if it has no such exchange."""
    return module.__dict__.get(STATES, {}).get(key)


def _own(cls: type) -> str | None:
    return vars(cls).get("exchange_key")


def _stock(cls: type) -> type:
    """The class without our subclasses at its top."""
    while _own(cls) is not None:
        cls = cls.__mro__[1]
    return cls


@functools.cache
def _exchanged_class(stock: type, key: str, forward: Callable) -> type:
    @functools.wraps(stock.forward)
    def exchanged_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states = self.__dict__.get(STATES)
        if states is None or key not in states:
            return stock.forward(self, *args, **kwargs)
        return forward(self, states[key], functools.partial(stock.forward, self), *args, **kwargs)

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
    return object.__new__, (_stock(type(self)),), state
