"""Detached copies of the arguments of a public call, so that it can be repeated without changing them."""

import copy
from collections.abc import Iterator, Mapping

from torch import Tensor, nn


def flatten(x: object) -> Iterator[object]:
    """Yield the items of nested mappings and sequences."""
    if isinstance(x, Mapping):
        x = tuple(x.values())
    if isinstance(x, (tuple, list)):
        for item in x:
            yield from flatten(item)
    else:
        yield x


class Leaves:
    """Copies arguments; a copy requires a gradient if the original does.

    Args:
        is_fp64: whether floating-point tensors are converted to fp64.
    """

    def __init__(self, is_fp64: bool):
        self.trainable: dict[str, Tensor] = {}  # d_name -> copy that requires a gradient
        self._is_fp64 = is_fp64
        self._copies = {}

    def copy_argument(self, name: str, x: object) -> object:
        """Return a copy of an argument: of a tensor, a module, or a nested container of them."""
        if isinstance(x, Mapping):
            return {key: self.copy_argument(f"{name}.{key}", item) for key, item in x.items()}
        if isinstance(x, (tuple, list)):
            items = [self.copy_argument(f"{name}[{i}]", item) for i, item in enumerate(x)]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        if isinstance(x, (Tensor, nn.Module)):
            # A tensor that is passed twice becomes one leaf, with one gradient.
            if id(x) not in self._copies:
                is_tensor = isinstance(x, Tensor)
                self._copies[id(x)] = self._copy_tensor(name, x) if is_tensor else self._copy_module(x)
            return self._copies[id(x)]
        return x

    def _copy_tensor(self, name: str, x: Tensor) -> Tensor:
        leaf = x.detach()
        if self._is_fp64 and leaf.is_floating_point():
            leaf = leaf.double()
        if x.requires_grad:
            self.trainable[f"d_{name}"] = leaf.requires_grad_()
        return leaf

    def _copy_module(self, x: nn.Module) -> nn.Module:
        module = copy.deepcopy(x)
        module = module.double() if self._is_fp64 else module
        self.trainable |= {f"d_{name}": p for name, p in module.named_parameters() if p.requires_grad}
        return module
