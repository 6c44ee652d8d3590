"""`HostCopy`: numbers of the device that the host reads after it has queued more work."""

import torch
from torch import Tensor


class HostCopy:
    """An asynchronous copy of a tensor to the host.

    Args:
        x: the tensor.
        repeats: whether a CUDA graph will capture `copy`, so that each replay copies. The event is then an
            external one, which ROCm does not have.
    """

    def __init__(self, x: Tensor, *, repeats: bool = False):
        self.numbers = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        self._copied = torch.cuda.Event(external=repeats) if x.is_cuda else None
        self.copy(x)

    def copy(self, x: Tensor) -> None:
        """Copy another tensor of the same shape."""
        self.numbers.copy_(x, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(x.device))

    def tolist(self) -> list:
        """Wait for the last copy, not for work that was queued after it, and return its numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.numbers.tolist()


class HostWrite(HostCopy):
    """int64 numbers that a kernel writes to the host's memory, without a copy, for which the GPU would wait.

    Launch the kernel with `numbers` and then call `launched`.

    Args:
        count: how many numbers.
    """

    def __init__(self, count: int):
        self.numbers = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
        self._copied = torch.cuda.Event()

    def launched(self, device: torch.device) -> None:
        self._copied.record(torch.cuda.current_stream(device))

    def __del__(self):
        # PyTorch does not know that the kernel writes, and uses the memory again, also after an error.
        self._copied.synchronize()
