"""Replace the forward pass, or another method, of one module; other modules of its class keep theirs.

The module's class becomes a subclass with the same name. A `forward` attribute on the instance would not do:
in a deep copy it would run the weights of the original. FSDP2 may subclass the subclass, gradient
checkpointing still finds its layer class, and pickling writes the stock class.

An exchange lasts until undone (`exchange`: a patched model, fused layers), or as long as a `with` statement
(`exchanged`: a trainer's models, while the trainer computes its loss). Between two steps a trainer's models
are therefore exactly as TRL and Accelerate left them, and TRL, Accelerate, another trainer, a deep copy or a
pickle never contain our forward pass. The exchange of a `with` statement is for the calls inside of it, not
for those of other threads: a reference or teacher may be in trainers of several threads.

A `forward` that another library put on the instance is kept as data: `Entry.below`.
"""

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

# Where an exchanged module keeps its entries, by the key of the exchange.
STATES = "_logitless_states"
# Held while a module is changed. Threads that call the module meanwhile find it changed or unchanged.
_lock = threading.RLock()


@dataclass(eq=False)
class Scope:
    """The exchange of a `with` statement."""

    forward: Callable
    state: Any


# The `with` statements that the current call is inside of
_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("_scopes", default=())


@dataclass
class Entry:
    """The exchanges of a module under one key."""

    below: Callable | None  # a `forward` that was on the instance before, such as TRL's or Accelerate's
    method: str = "forward"  # name of the method that is exchanged
    # The exchange that lasts until undone, if it is live
    live: bool = False
    forward: Callable | None = None  # (module, state, stock, *args, **kwargs)
    state: Any = None
    copied: bool = False  # whether a deep copy of the module has the exchange too
    scopes: tuple[Scope, ...] = ()  # of all threads, the newest last

    @property
    def is_used(self) -> bool:
        return self.live or bool(self.scopes)

    def current(self) -> tuple[Callable, Any] | None:
        """(forward, state) for the current call; None if it gets the forward pass below."""
        if self.scopes:
            # A graph cannot read context variables.
            inside = self.scopes if torch.compiler.is_compiling() else _scopes.get()
            for scope in reversed(self.scopes):
                if scope in inside:
                    return scope.forward, scope.state
        return (self.forward, self.state) if self.live else None

    def __deepcopy__(self, memo: dict) -> "Entry":
        below, state = copy.deepcopy((self.below, self.state), memo)
        return Entry(below, self.method, self.live, self.forward, state, self.copied)


def exchange(
    module: nn.Module,
    key: str,
    forward: Callable,
    state: Any,
    *,
    copied: bool = True,
    method: str = "forward",
) -> Callable[[], None]:
    """Give `module` the forward pass `forward(module, state, stock, *args, **kwargs)`, until undone.

    Args:
        module: the one module to change.
        key: name of the exchange, such as "loss"; a module has at most one exchange per key.
        forward: `stock` is the forward pass without this exchange, bound to the module that is called.
        state: the state that `forward` receives; a deep copy of the module has a deep copy of the state.
        copied: whether a deep copy of the module has the exchange too; without it the copy is a stock module.
        method: name of the method that is exchanged, if it is another one than the forward pass.

    Returns:
        A function that undoes it. Exchanges can be undone in any order, and after FSDP2 has made a class of
        its own from the exchanged one. A `forward` that was on the instance is back afterwards, the same
        object.

    Raises:
        ValueError: the module has that exchange already.
    """
    with _lock:
        entry = _entry_of(module, key, method)
        if entry.is_used:
            raise ValueError(
                f"model: expected {type(module).__name__} as it comes, got one with {key!r} on already; undo "
                f"that first."
            )
        entry.forward, entry.state, entry.copied, entry.live = forward, state, copied, True

    def undo() -> None:
        entry = module.__dict__.get(STATES, {}).get(key)
        if entry is not None and entry.state is state:
            withdraw(module, key)

    return undo


def _entry_of(module: nn.Module, key: str, method: str = "forward") -> Entry:
    """The module's entry under `key`; a new one with an exchanged class, if there is none.

    There may be an unused one: an earlier exchange was undone below another exchange, or below a forward pass
    on the instance, so its class is still in use.
    """
    entries = module.__dict__.setdefault(STATES, {})
    if key not in entries:
        entries[key] = Entry(module.__dict__.get(method), method)
        module.__class__ = _exchanged_class(type(module), key, method)
        module.__dict__.pop(method, None)  # on the instance it would hide the class's
    return entries[key]


@contextmanager
def exchanged(module: nn.Module, key: str, forward: Callable, state: Any) -> Iterator[None]:
    """Context manager of `exchange`, for the calls inside of it. It may be inside of another exchange under
    `key`, which is back on exit.

    A deep copy that is made inside the context is a stock module.
    """
    scope = Scope(forward, state)
    with _lock:
        entry = _entry_of(module, key)
        entry.scopes = (*entry.scopes, scope)
    token = _scopes.set((*_scopes.get(), scope))
    try:
        yield
    finally:
        _scopes.reset(token)
        with _lock:
            entry.scopes = tuple(x for x in entry.scopes if x is not scope)
            _drop_unused(module)


def withdraw(module: nn.Module, key: str) -> None:
    """Undo the exchange under `key`, if there is one."""
    with _lock:
        entry = module.__dict__.get(STATES, {}).get(key)
        if entry is not None:
            entry.live, entry.state = False, None
            _drop_unused(module)


def _drop_unused(module: nn.Module) -> None:
    entries = module.__dict__.get(STATES, {})
    # From the newest entry to the oldest. A used entry keeps all older ones, and a `forward` that was put on
    # the instance in between keeps the entry whose `below` it may call.
    for name, entry in reversed(list(entries.items())):
        if entry.is_used or entry.below is not None and entry.method in module.__dict__:
            break
        if entry.below is not None:
            module.__dict__[entry.method] = entry.below
        if _own(type(module)) == name:
            # A class on top of ours, such as FSDP2's, stays with ours, which finds no entry.
            module.__class__ = type(module).__mro__[1]
        del entries[name]
    if not entries:
        module.__dict__.pop(STATES, None)


def state_of(module: nn.Module, key: str) -> Any:
    """The `state` of the module's exchange under `key`, for the current call; None if there is none."""
    entry = module.__dict__.get(STATES, {}).get(key)
    current = None if entry is None else entry.current()
    return None if current is None else current[1]


def is_plain_exchange(module: nn.Module, key: str) -> bool:
    """Whether the exchange under `key` is the module's only one, and its class is not subclassed further."""
    return module.__dict__[STATES].keys() == {key} and _own(type(module)) == key


def stock_forward(module: nn.Module) -> Callable:
    """The forward pass of the module's class, bound to the module: without exchanges, and without a `forward`
    attribute on the instance."""
    return MethodType(_stock(type(module)).forward, module)


def instance_forward(module: nn.Module) -> Callable | None:
    """The `forward` on the instance, if any, also while an exchange keeps it aside."""
    entries = reversed(module.__dict__.get(STATES, {}).values())
    below = (entry.below for entry in entries if entry.below is not None and entry.method == "forward")
    return module.__dict__.get("forward") or next(below, None)


def _own(cls: type) -> str | None:
    return vars(cls).get("exchange_key")


def _stock(cls: type) -> type:
    """The class without our subclasses of it."""
    while _own(cls) is not None:
        cls = cls.__mro__[1]
    return cls


@functools.cache
def _exchanged_class(stock: type, key: str, method: str) -> type:
    def exchanged_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(STATES, {}).get(key)
        if entry is None:
            return getattr(stock, method)(self, *args, **kwargs)
        below = entry.below or functools.partial(getattr(stock, method), self)
        current = entry.current()
        if current is None:
            return below(*args, **kwargs)
        forward, state = current
        return forward(self, state, below, *args, **kwargs)

    stock_method = getattr(stock, method)
    functools.update_wrapper(exchanged_forward, stock_method)
    # Accelerate unwraps a forward pass along `__wrapped__`, and would take ours off with its own.
    del exchanged_forward.__wrapped__
    exchanged_forward.__signature__ = inspect.signature(stock_method)
    namespace = {
        method: exchanged_forward,
        "exchange_key": key,
        "__reduce_ex__": _reduce_as_stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock)(stock.__name__, (stock,), namespace)


def _reduce_as_stock(self: nn.Module, protocol: int) -> tuple:
    """Pickled as a module of the stock class: our classes have no name that could be imported."""
    # Not `copyreg.__newobj__`, for which pickle compares the class with that of the object.
    state = {name: value for name, value in self.__dict__.items() if name != STATES}
    for entry in self.__dict__.get(STATES, {}).values():
        if entry.below is not None:
            state.setdefault(entry.method, entry.below)
    return object.__new__, (_stock(type(self)),), _State(self, state)


class _State(dict):
    """Attributes of an exchanged module: those of a stock module in a pickle, all of them in a deep copy.

    A `__deepcopy__` of the module's class would be called for other objects too: PEFT's models look up what
    they do not define in the model that they wrap.
    """

    def __init__(self, module: nn.Module, stock: dict[str, Any]) -> None:
        super().__init__(stock)
        self.module = module

    def __reduce_ex__(self, protocol: int) -> tuple:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict) -> dict[str, Any]:
        twin = memo[id(self.module)]
        twin.__class__ = type(self.module)
        twin.__dict__.update(copy.deepcopy(self.module.__dict__, memo))
        for key, entry in list(twin.__dict__.get(STATES, {}).items()):
            if not entry.copied:
                withdraw(twin, key)
        return dict(twin.__dict__)
