"""How to recompute the outputs of fused operators, for callers that drop them between forward and backward.

Inside `collecting(collector)` each fused operator of this thread passes its outputs to `collector.add`, with
a function that recomputes them, bitwise equal, from tensors that the operator saves for its backward pass.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

_thread = threading.local()


class Collector(Protocol):
    """Receives the outputs of fused operators."""

    def add(
        self,
        node: object,
        outputs: Sequence[Tensor | None],
        make: Callable[..., Sequence[Tensor | None]],
        inputs: Sequence[Tensor | None],
    ) -> None:
        """Receive the outputs of one operator.

        Args:
            node: the operator's autograd node; output i of the operator is output i of the node.
            outputs: the outputs.
            make: `make(*inputs)` returns tensors with the values, shapes and strides of `outputs`.
            inputs: tensors that the operator saves for its backward pass.
        """


@contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Context in which the fused operators of this thread pass their outputs to `collector`."""
    outer_collector = current()
    _thread.collector = collector
    try:
        yield
    finally:
        _thread.collector = outer_collector


def current() -> Collector | None:
    """Return the collector of this thread, or None."""
    return getattr(_thread, "collector", None)
