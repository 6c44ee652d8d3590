"""torchtitan 0.3.0: the cross-entropy of its trainer, from hidden states and the LM head.

In a function of a config registry:

    loss=LogitlessLoss.Config()

in the place of `ChunkedLossWrapper.Config(...)`. The trainer passes hidden states to no other loss than a
`ChunkedLossWrapper`, so `LogitlessLoss` is a subclass of it.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from logitless.errors import type_error, value_error
from logitless.integrations.versions import check_version, log_replacement, unavailable_error
from logitless.losses import CrossEntropyLoss

try:
    from torchtitan.components import loss as torchtitan_loss
    from torchtitan.distributed.spmd_types import spmd_mesh_size
    from torchtitan.distributed.utils import get_spmd_backend
except ImportError as error:
    raise unavailable_error("torchtitan", error) from error

# Inputs of the trainer that a cross-entropy does not use
UNUSED_INPUTS = ("positions",)


class LogitlessLoss(torchtitan_loss.ChunkedLossWrapper):
    """Cross-entropy that keeps one chunk of logits in memory, within `logits_budget` bytes.

    Sequences may have any length. `num_chunks` has no effect: the budget sets the number of chunks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan_loss.ChunkedLossWrapper.Config):
        logits_budget: int | str | None = None
        """Bytes that a chunk of logits and its temporaries may take; default the library's."""
        compact: bool = False
        """Whether to exclude ignored tokens from the products with the head. This needs a host sync, which is
        not possible in the trainer's CUDA graphs (on by default): set `training.disable_cuda_graphs` too."""

    def __init__(self, config: Config, *, compile_config: Any = None):
        loss_config = type(config.loss_fn)
        if loss_config is not torchtitan_loss.CrossEntropyLoss.Config:
            remedy = "keep ChunkedLossWrapper for other losses"
            raise value_error("loss_fn", "CrossEntropyLoss.Config", loss_config.__qualname__, remedy)
        # Without compile_config: it compiles the wrapper's loss of a chunk, which is not used.
        super().__init__(config)
        check_version("torchtitan")
        self.logits_budget = config.logits_budget
        self.compact = config.compact
        log_replacement("torchtitan", "ChunkedLossWrapper", config.logits_budget)

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Set the LM head, a linear layer."""
        if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
            remedy = "leave lm_head out of its conversion, or keep ChunkedLossWrapper"
            raise type_error("lm_head", "a linear layer", type(lm_head).__qualname__, remedy)
        super().set_lm_head(lm_head)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the tokens' losses divided by `global_valid_tokens`, and no metrics.

        Args:
            pred: (B, L, H) hidden states, from a forward pass without the LM head.
            labels: (B, L), shifted.
            global_valid_tokens: the number of labels of all ranks; None does not divide.
            **loss_inputs: inputs that a cross-entropy does not use (`positions`).

        Raises:
            ValueError: another input, or a parallelism that is not supported.
        """
        unknown = [name for name in loss_inputs if name not in UNUSED_INPUTS]
        if unknown:
            expected = f"inputs that a cross-entropy does not use ({', '.join(UNUSED_INPUTS)})"
            remedy = "keep ChunkedLossWrapper for losses with inputs of their own"
            raise value_error("loss_inputs", expected, ", ".join(unknown), remedy)
        if isinstance(labels, DTensor):
            remedy = "set parallelism.spmd_backend to spmd_types or partial_dtensor"
            raise value_error("labels", "a local tensor", "a DTensor of full_dtensor", remedy)
        if get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1:
            remedy = "set parallelism.spmd_backend to partial_dtensor"
            raise value_error("lm_head", "a DTensor in shards", "a shard of spmd_types", remedy)
        if isinstance(self.lm_head, FSDPModule):
            self.lm_head.unshard()
        weight = self.lm_head.weight
        tp_group = None
        if isinstance(weight, DTensor) and "tp" in weight.device_mesh.mesh_dim_names:
            tp_group = weight.device_mesh["tp"]
        if isinstance(pred, DTensor):
            # Every rank of a tensor-parallel group gets all of d_hidden.
            pred = pred.to_local(grad_placements=[Replicate()] * pred.device_mesh.ndim)
        options = {"logits_budget": self.logits_budget, "compact": self.compact, "tp_group": tp_group}
        loss_fn = CrossEntropyLoss(reduction="sum", **options)
        loss = loss_fn(pred, weight, labels, bias=self.lm_head.bias).loss
        if global_valid_tokens is not None:
            loss = loss / global_valid_tokens
        return loss, {}
