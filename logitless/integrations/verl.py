"""verl 0.9.1: log-probabilities and entropy of its actors, with FSDP and with Megatron.

`patch()` replaces the two functions behind `actor_rollout_ref.model.use_fused_kernels=true`:

* `FusedLinearForPPO.forward`, of FSDP and Ulysses, for `fused_kernel_options.impl_backend` "torch" (the
  default) and "liger";
* `linear_cross_entropy`, of impl_backend "triton" and of Megatron.

`logitless.integrations.verl_on` patches when it is imported: `actor_rollout_ref.model.external_lib` names it.
Labels come rolled by one position. The last position of a sequence is scored on an id of another one, and
masked by verl later.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from logitless.errors import value_error
from logitless.integrations.sequences import PartOfGradient
from logitless.integrations.versions import announce, find, replace, replace_function
from logitless.losses import linear_logprobs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FSDP = "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward"
MEGATRON = "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy"


def patch(*, logits_budget: int | None = None) -> Callable[[], None]:
    """Replace both functions of verl in this process.

    Args:
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.

    Returns:
        A function that restores them.

    Raises:
        ImportError: verl is not installed, or has moved one of the functions.
    """
    owner, name = find("verl", FSDP)
    module, function = find("verl", MEGATRON)

    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        result = linear_logprobs(
            hidden_states,
            vocab_weights,
            input_ids.long(),
            temperature=temperature,
            entropy=True,
            logits_budget=logits_budget,
        )
        return result.logps, result.entropy

    undo_forward = replace([owner], name, forward)
    ours = partial(linear_cross_entropy, logits_budget=logits_budget)
    undo_function = replace_function("verl", module, function, ours)
    announce("verl", "FusedLinearForPPO.forward and linear_cross_entropy", logits_budget)

    def undo() -> None:
        undo_forward()
        undo_function()

    return undo


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: "ProcessGroup | None" = None,
    *,
    logits_budget: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`verl.utils.kernel.linear_cross_entropy`: log-probabilities and entropy, both differentiable.

    Args:
        hidden: (..., H); with Megatron (s, 1, H).
        weight: (V, H), or this rank's rows of it.
        labels: as many as hidden has rows; with Megatron (1, s).
        temperature: divisor of the logits.
        reduction: "none".
        dist_process_group: Megatron's tensor-parallel group, whose ranks have rows of the head.
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.

    Returns:
        (log-probabilities, entropy): fp32, of one dimension.
    """
    if reduction != "none":
        raise value_error("reduction", "'none'", repr(reduction), "reduce the log-probabilities")
    if gradient_is_summed(hidden):
        # d_hidden is whole on every rank here; verl's kernel leaves each rank a part of it.
        hidden = PartOfGradient.apply(hidden, dist_process_group)
    result = linear_logprobs(
        hidden.flatten(0, -2),
        weight,
        labels.flatten().long(),
        temperature=temperature,
        entropy=True,
        tp_group=dist_process_group,
        logits_budget=logits_budget,
    )
    return result.logps, result.entropy


def gradient_is_summed(hidden: Tensor) -> bool:
    """Whether hidden comes from Megatron's gather of a sequence whose backward pass sums over the ranks."""
    return getattr(hidden.grad_fn, "tensor_parallel_output_grad", False) is True
