"""Detached copies of the arguments of a public call, so that it can be repeated and the originals stay
unchanged."""

import copy
from collections.abc import Iterator, Mapping

from torch import Tensor, nn


def flat(x: object) -> Iterator[object]:
    """The leaves of nested mappings and sequences."""
    if isinstance(x, Mapping):
        x = tuple(x.values())
    if isinstance(x, (tuple, list)):
        for inner in x:
            yield from flat(inner)
    else:
        yield x


class Leaves:
    """Makes the copies, which require a gradient where the originals do.

    Args:
        wide: whether floating-point tensors become fp64 ones.
    """

    def __init__(self, wide: bool):
        self.trained: dict[str, Tensor] = {}  # by d_name
        self._wide = wide
        self._known = {}

    def made(self, name: str, x: object) -> object:
        if isinstance(x, Mapping):
            return {key: self.made(f"{name}.{key}", inner) for key, inner in x.items()}
        if isinstance(x, (tuple, list)):
            inner = [self.made(f"{name}[{i}]", inner) for i, inner in enumerate(x)]
            return type(x)(*inner) if hasattr(x, "_fields") else type(x)(inner)
        if isinstance(x, (Tensor, nn.Module)):
            # A tensor that is passed twice becomes one leaf, with one gradient.
            if id(x) not in self._known:
                self._known[id(x)] = self._leaf(name, x) if isinstance(x, Tensor) else self._module(x)
            return self._known[id(x)]
        return x

    def _leaf(self, name: str, x: Tensor) -> Tensor:
        leaf = x.detach()
        if self._wide and leaf.is_floating_point():
            leaf = leaf.double()
        if x.requires_grad:
            self.trained[f"d_{name}"] = leaf.requires_grad_()
        return leaf

    def _module(self, x: nn.Module) -> nn.Module:
        module = copy.deepcopy(x)
        module = module.double() if self._wide else module
        self.trained |= {f"d_{name}": p for name, p in module.named_parameters() if p.requires_grad}
        return module
