"""The head transform: from the product `hidden @ weight.T` to the logits of a loss.

    z = softcap * tanh(logit_scale * (x + bias) / softcap) / temperature        (with a softcap)
    z = logit_scale * (x + bias) / temperature                                  (without)

`LogitTransform` holds the three numbers; `LogitTransform.logits` is the PyTorch form, the Triton form is in
`cross_entropy_triton.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class LogitTransform(NamedTuple):
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0

    def logits(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
        """Logits and their derivative d z / d x, both in promote(x.dtype, fp32), for a block of raw products
        `x`.

        A wider bias is rounded to that dtype, as in the Triton kernels.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if bias is not None:
            x = x + bias.to(x.dtype)
        gain = self.logit_scale / self.temperature
        if self.softcap is None:
            return (x if gain == 1.0 else x * gain), gain
        squashed = torch.tanh(x * (self.logit_scale / self.softcap))
        return squashed * (self.softcap / self.temperature), (1 - squashed * squashed) * gain

    def derivative_at(self, z: Tensor) -> Tensor | float:
        """d z / d x, computed from the logit `z`, for use after the chunk's products are overwritten."""
        gain = self.logit_scale / self.temperature
        if self.softcap is None:
            return gain
        squashed = z * (self.temperature / self.softcap)
        return (1 - squashed * squashed) * gain
