"""`HostCopy`: numbers of the device that the host reads after it has queued more work."""

import torch
from torch import Tensor


class HostCopy:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, x: Tensor):
        self._copy = x.to("cpu", non_blocking=True)  # to pinned memory
        self._copied = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    def tolist(self) -> list:
        """Wait for the copy, not for work that was queued after it, and return its numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.tolist()
