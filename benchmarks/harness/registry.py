"""Who is measured: a registry of implementations that load lazily, and say why where they cannot."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch


class Absent(Exception):
    """Raised while loading a peer: why it cannot be had here."""


@dataclass(frozen=True)
class Peer:
    name: str
    load: Callable[[], Callable]
    package: str | None = None  # the distribution it needs, as pip names it
    needs_cuda: bool = False

    def why_absent(self, device: torch.device) -> str | None:
        if self.needs_cuda and device.type != "cuda":
            return f"needs CUDA, the device is {device.type}"
        if self.package and package_version(self.package) is None:
            return f"{self.package} is not installed"
        return None


@dataclass(frozen=True)
class Peers:
    """The implementations of one objective, in the order of the table."""

    peers: list[Peer] = field(default_factory=list)

    def add(self, name: str, *, package: str | None = None, needs_cuda: bool = False) -> Callable:
        """Decorates a function that imports an implementation and returns the callable which computes its
        loss."""

        def register(load: Callable[[], Callable]) -> Callable[[], Callable]:
            self.peers.append(Peer(name, load, package, needs_cuda))
            return load

        return register

    def load(
        self, device: torch.device, only: Iterable[str] = (), skip: Iterable[str] = ()
    ) -> tuple[dict[str, Callable], dict[str, str]]:
        """Imports what can be had: name -> callable of the present ones, name -> reason of the absent
        ones."""
        present, absent = {}, {}
        for peer in self._chosen(tuple(only), tuple(skip)):
            reason = peer.why_absent(device)
            if reason is None:
                try:
                    present[peer.name] = peer.load()
                    continue
                except Absent as error:
                    reason = str(error)
                # Anything may go wrong while a foreign package is imported; the others must still be
                # measured.
                except Exception as error:
                    reason = one_line(error)
            absent[peer.name] = reason
        return present, absent

    def versions(self) -> dict[str, str | None]:
        packages = {peer.package for peer in self.peers if peer.package}
        return {package: package_version(package) for package in sorted(packages)}

    def _chosen(self, only: tuple[str, ...], skip: tuple[str, ...]) -> list[Peer]:
        wanted = self._named("--only", only) if only else {peer.name for peer in self.peers}
        return [peer for peer in self.peers if peer.name in wanted - self._named("--skip", skip)]

    def _named(self, option: str, words: tuple[str, ...]) -> set[str]:
        """The names that equal a word; for a word that no name equals, those that contain it."""
        names = [peer.name for peer in self.peers]
        found = set()
        for word in words:
            hits = {word} & set(names) or {name for name in names if word.lower() in name.lower()}
            if not hits:
                raise ValueError(
                    f"{option}: expected a name, or part of a name, among {'; '.join(names)}; got {word!r}."
                )
            found |= hits
        return found


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def one_line(error: BaseException) -> str:
    """An exception as one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
