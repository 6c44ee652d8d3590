"""Functions of TRL's classes and modules that are replaced while trainers use the chunked loss.

`install` puts a dispatcher in the place of such a function when the first trainer needs it. TRL's function is
back when the last of these trainers has switched the chunked loss off or is garbage. In each call the
dispatcher finds the chunked loss that the call belongs to (`Installed.call`), and it runs TRL's function for
everyone else. So a call never changes what a nested call or another thread finds in TRL.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from .versions import import_owner

# The `ChunkedLossSession` of the trainer that is computing its loss; None for a trainer without one
_computing: ContextVar[Any] = ContextVar("_computing", default=None)
_installed: dict[str, "Installed"] = {}  # by path; never removed, because the user may hold a dispatcher
_lock = threading.RLock()  # reentrant: garbage may be collected while it is held


@contextmanager
def computing_with(session: Any) -> Iterator[None]:
    """Context manager in which a trainer computes its loss with this `ChunkedLossSession`, or with None."""
    token = _computing.set(session)
    try:
        yield
    finally:
        _computing.reset(token)


def install(path: str, carrier: str | None, session: Any) -> Callable[[], None]:
    """Put a dispatcher in the place of TRL's function "module:name" or "module:Class.method".

    Args:
        path: the path of the function.
        carrier: as in `Replacement`.
        session: the `ChunkedLossSession` that needs the dispatcher.

    Returns:
        A function that removes the dispatcher, unless another chunked loss needs it. It is called when
        `session` is garbage, too; a second call has no effect.
    """
    owner, name = import_owner(path)
    with _lock:
        if path not in _installed:
            _installed[path] = Installed(path, carrier, owner, name)
        _installed[path].users += 1
        _installed[path].put()
    release = weakref.finalize(session, _release, path)
    release.atexit = False
    return release


def reinstall(path: str) -> None:
    """Put the dispatcher back, if the user has restored TRL's function in its place."""
    with _lock:
        _installed[path].put()


def _release(path: str) -> None:
    with _lock:
        installed = _installed[path]
        installed.users -= 1
        installed.remove()


class Installed:
    """A function of TRL and its dispatcher, which `users` chunked losses need."""

    def __init__(self, path: str, carrier: str | None, owner: Any, name: str):
        self.path = path
        self.carrier = carrier
        self.owner = owner
        self.name = name
        self.is_inherited = name not in vars(owner)
        self.original = getattr(owner, name)
        self.users = 0
        self.signature = inspect.signature(self.original)
        self.position = None if carrier is None else list(self.signature.parameters).index(carrier)

        @functools.wraps(self.original)
        def dispatcher(*args: Any, **kwargs: Any) -> Any:
            return self.call(args, kwargs)

        self.dispatcher = dispatcher

    def put(self) -> None:
        # Another function than TRL's is the user's.
        if getattr(self.owner, self.name) is self.original:
            setattr(self.owner, self.name, self.dispatcher)

    def remove(self) -> None:
        if self.users or getattr(self.owner, self.name) is not self.dispatcher:
            return
        if self.is_inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the replacement of the chunked loss that the call belongs to; without one, TRL's function."""
        if not self.users:
            with _lock:
                self.remove()  # the user has put it back
        session = self._find_session(args, kwargs)
        with self._enter(session):
            if session is None:
                return self.original(*args, **kwargs)
            return session.call_replacement(self.path, self.original, self.signature, args, kwargs)

    def _enter(self, session: Any) -> AbstractContextManager:
        """The context of a trainer's method: the trainer computes its loss, also one without chunked loss."""
        if self.carrier != "self" or _computing.get() is session:
            return nullcontext()
        return computing_with(None) if session is None else session.computing()

    def _find_session(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.carrier is None:
            session = _computing.get()
        else:
            is_positional = len(args) > self.position
            value = args[self.position] if is_positional else kwargs.get(self.carrier)
            is_trainer = self.carrier == "self"
            session = getattr(value, "chunked_loss" if is_trainer else "session", None)
            if is_trainer and session is not None and session.trainer is not value:
                return None  # a shallow copy of the trainer
        is_replaced = session is not None and session.is_active and self.path in session.adapter.replacements
        return session if is_replaced else None
