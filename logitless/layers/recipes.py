"""How a fused operator's outputs are made again, for callers that drop them between forward and backward.

Inside `collecting(collector)` each fused operator of this thread passes its outputs to `collector.add`, with
a function that makes them again, to the bit, from tensors that the operator saves for its own backward pass.
Without a collector an operator does nothing here.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

_thread = threading.local()


class Collector(Protocol):
    def add(
        self,
        node: object,
        outputs: Sequence[Tensor | None],
        make: Callable[..., Sequence[Tensor | None]],
        inputs: Sequence[Tensor | None],
    ) -> None:
        """`make(*inputs)` returns tensors with the values, shapes and strides of `outputs`.

        `node` is the operator's autograd node: output i of the operator is output i of the node.
        """


@contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    before = current()
    _thread.collector = collector
    try:
        yield
    finally:
        _thread.collector = before


def current() -> Collector | None:
    """The collector of this thread."""
    return getattr(_thread, "collector", None)
