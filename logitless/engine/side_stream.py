"""Run tiny kernels on a side stream, concurrently with a product.

Evaluating a loss is about a hundred kernels of a few microseconds each, which overlap a product.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device, *, useful: bool) -> AbstractContextManager:
    """Context whose body runs on a side stream, if the device is a GPU and `useful` is set.

    The body starts after the kernels that were queued before this call, and overlaps kernels that are queued
    between this call and the `with` statement. The main stream waits for the side stream at the end of the
    context.
    """
    if not useful or device.type != "cuda":
        return nullcontext()
    return _beside(device, torch.cuda.current_stream(device).record_event())


@contextmanager
def _beside(device: torch.device, queued_before: torch.cuda.Event) -> Iterator[None]:
    stream = _stream(device)
    main = torch.cuda.current_stream(device)
    stream.wait_event(queued_before)
    with torch.cuda.stream(stream):
        yield
    main.wait_stream(stream)
