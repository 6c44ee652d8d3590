"""Numbers of the device that the host reads after it has queued more work."""

import torch
from torch import Tensor


class HostNumbers:
    """Numbers that the device writes to the host's memory.

    Args:
        shape: of the numbers.
        dtype: of the numbers.
        device: what writes them.
        repeats: whether a CUDA graph will capture what writes them, so that each replay does. The event is
            then an external one, which ROCm does not have.
    """

    def __init__(self, shape, dtype: torch.dtype, device: torch.device, *, repeats: bool = False):
        on_a_gpu = device.type == "cuda"
        self._device = device
        self._written = torch.cuda.Event(external=repeats) if on_a_gpu else None
        self.numbers = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=on_a_gpu)

    def queued(self) -> None:
        """Say that what writes the numbers is queued."""
        if self._written is not None:
            self._written.record(torch.cuda.current_stream(self._device))

    def tolist(self) -> list:
        """Wait until the numbers are written, not for work that was queued after it, and return them."""
        if self._written is not None:
            self._written.synchronize()
        return self.numbers.tolist()


class HostCopy(HostNumbers):
    """An asynchronous copy of a tensor to the host.

    Args:
        x: the tensor.
        repeats: as in `HostNumbers`.
    """

    def __init__(self, x: Tensor, *, repeats: bool = False):
        super().__init__(x.shape, x.dtype, x.device, repeats=repeats)
        self.copy(x)

    def copy(self, x: Tensor) -> None:
        """Copy another tensor of the same shape."""
        self.numbers.copy_(x, non_blocking=True)
        self.queued()


class HostWrite(HostNumbers):
    """Numbers to which a kernel writes directly: the GPU would wait for a copy.

    Launch the kernel with `numbers`, and then call `queued`.
    """

    def __del__(self):
        # PyTorch does not know that the kernel writes, and uses the memory again, also after an error.
        if self._written is not None:
            self._written.synchronize()
