"""The head transform from the product x = hidden @ weight.T to the logits z of a loss.

    z = softcap * tanh(logit_scale * (x + bias) / softcap) / temperature        (with a softcap)
    z = logit_scale * (x + bias) / temperature                                  (without)

`LogitTransform` contains the three numbers. `LogitTransform.logits` is the PyTorch implementation. The Triton
implementation is `head_logits` in `cross_entropy_triton.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class LogitTransform(NamedTuple):
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0

    def logits(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
        """Return the logits of a block of products x and their derivative d z / d x, in promote(x.dtype,
        fp32).

        A bias in a wider dtype is rounded to this dtype, as in the Triton kernels.
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
        """Return d z / d x, given the logit `z`: the products of the chunk may already be overwritten."""
        gain = self.logit_scale / self.temperature
        if self.softcap is None:
            return gain
        squashed = z * (self.temperature / self.softcap)
        return (1 - squashed * squashed) * gain
