"""Tiny kernels beside a large one.

Evaluating a loss is a hundred kernels of a few microseconds each; a product hides them.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device, *, useful: bool) -> AbstractContextManager:
    """Run the body of the returned context on a side stream, where the device has one and it is useful.

    The body starts after every kernel queued before this call, and overlaps those queued between this call
    and the `with`. Both streams wait for each other at the context's ends, so that memory passes between them
    in order.
    """
    if not useful or device.type != "cuda":
        return nullcontext()
    return _beside(device, torch.cuda.current_stream(device).record_event())


@contextmanager
def _beside(device: torch.device, queued_before: torch.cuda.Event) -> Iterator[None]:
    stream, main = _stream(device), torch.cuda.current_stream(device)
    stream.wait_event(queued_before)
    with torch.cuda.stream(stream):
        yield
    main.wait_stream(stream)
