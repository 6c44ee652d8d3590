"""TRL's AsyncDistillation: a teacher behind a server names its best tokens, and the student's head answers
for those alone.

TRL projects 256 rows at a time in fp32, each twice; here it is `DistillationLoss` under the budget, which
projects each row once.
"""

from dataclasses import dataclass
from typing import Any

import torch
import trl.experimental.async_distillation.async_distillation_trainer as stock_module
from torch import Tensor
from trl.experimental.async_distillation import AsyncDistillationConfig as StockAsyncDistillationConfig
from trl.experimental.async_distillation import AsyncDistillationTrainer as StockAsyncDistillationTrainer

from logitless import DistillationLoss

from .mixins import ChunkedLossConfigMixin, ChunkedLossTrainerMixin, swapped


@dataclass
class AsyncDistillationConfig(ChunkedLossConfigMixin, StockAsyncDistillationConfig):
    """`trl.experimental.async_distillation.AsyncDistillationConfig` with `use_chunked_loss` (default False)
    and `logits_budget` (bytes, default the library's)."""


class AsyncDistillationTrainer(ChunkedLossTrainerMixin, StockAsyncDistillationTrainer):
    """`trl.experimental.async_distillation.AsyncDistillationTrainer`; with
    `AsyncDistillationConfig(use_chunked_loss=True)` its divergence is `DistillationLoss`. What TRL asks for
    beside it (vLLM servers, an attention that packs) it asks for here too."""

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if not self.uses_chunked_loss:
            return super()._compute_loss(*args, **kwargs)
        with swapped(stock_module, _chunked_jsd_loss=self._divergence):
            return super()._compute_loss(*args, **kwargs)

    def _divergence(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        logit_scale: float,
        softcap: float | None,
        ids: Tensor,
        teacher_logps: Tensor,
        candidates: Tensor,
        beta: float,
        temperature: float,
        add_tail_bucket: bool,
        teacher_index: Tensor | None,
        num_teachers: int,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What TRL's `_chunked_jsd_loss` returns: sums of the loss, of its value for the log, of the
        student's entropies and of the teachers', and for each teacher how many tokens it scored and its share
        of the divergence and of the entropy."""
        several = teacher_index is not None
        loss = DistillationLoss(
            beta=beta,
            temperature=temperature,
            topk_mode="tail" if add_tail_bucket else "renormalize",
            softcap=softcap,
            # Each token's own value, which several teachers are logged by, costs a second walk.
            logit_scale=logit_scale,
            reduction="none" if several else "sum",
            logits_dtype=torch.float32,
            logits_budget=self.args.logits_budget,
        )
        teacher = teacher_logps.masked_fill(~candidates, -torch.inf)
        out = loss(hidden.to(weight.dtype), weight, bias=bias, teacher_logprobs_topk=(teacher, ids))
        self.last_plan = out.plan
        total = out.loss.sum()

        entropies = _entropy(teacher, candidates, add_tail_bucket)
        by_teacher = total.new_zeros(3 * num_teachers)
        if several:
            mine = teacher_index == torch.arange(num_teachers, device=teacher_index.device)[:, None]
            each = torch.stack((torch.ones_like(entropies), out.loss.detach(), entropies), dim=-1)
            by_teacher = (mine[..., None] * each).sum(1).flatten()
        return total, total.detach(), out.metrics["entropy"] * hidden.shape[0], entropies.sum(), by_teacher


def _entropy(logps: Tensor, candidates: Tensor, add_tail_bucket: bool) -> Tensor:
    """Of a teacher's distribution over its candidates (n, k), as TRL completes it: one bucket more, or a sum
    of 1."""
    if add_tail_bucket:
        logps, candidates = stock_module._add_tail_bucket(logps, candidates)
    else:
        logps = logps - logps.logsumexp(-1, keepdim=True)
    return torch.nan_to_num(-logps.exp() * logps.masked_fill(~candidates, 0.0)).sum(-1)
