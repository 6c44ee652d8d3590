"""verl 0.9.1: log-probabilities and entropy of its actors, with FSDP and with Megatron.

`patch()` replaces the two functions behind `actor_rollout_ref.model.use_fused_kernels=true`:

* `FusedLinearForPPO.forward`, of FSDP and Ulysses, for `fused_kernel_options.impl_backend` "torch" (the
  default) and "liger";
* `linear_cross_entropy`, of impl_backend "triton" and of Megatron.

`logitless.integrations.verl_on` patches verl when it is imported, by `actor_rollout_ref.model.external_lib`.
verl passes labels that are rolled by one position. The label of a sequence's last position belongs to another
sequence; verl masks the result there.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from logitless.errors import value_error
from logitless.integrations.sequences import DivideGradient
from logitless.integrations.versions import (
    import_owner,
    log_replacement,
    replace_attribute,
    replace_function,
)
from logitless.losses import linear_logprobs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FSDP_FUNCTION = "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward"
MEGATRON_FUNCTION = "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy"


def patch(*, logits_budget: int | str | None = None) -> Callable[[], None]:
    """Replace both functions of verl in this process.

    Args:
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.

    Returns:
        A function that restores them.

    Raises:
        ImportError: verl is not installed, or has moved one of the functions.
    """
    fsdp_class, fsdp_name = import_owner("verl", FSDP_FUNCTION)
    megatron_module, megatron_name = import_owner("verl", MEGATRON_FUNCTION)

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

    undo_forward = replace_attribute([fsdp_class], fsdp_name, forward)
    replacement = partial(linear_cross_entropy, logits_budget=logits_budget)
    undo_function = replace_function("verl", megatron_module, megatron_name, replacement)
    log_replacement("verl", "FusedLinearForPPO.forward and linear_cross_entropy", logits_budget)

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
    logits_budget: int | str | None = None,
) -> tuple[Tensor, Tensor]:
    """`verl.utils.kernel.linear_cross_entropy`: log-probabilities and entropy, both differentiable.

    Args:
        hidden: (..., H); with Megatron (s, 1, H).
        weight: (V, H), or this rank's rows of it.
        labels: one per row of hidden; with Megatron (1, s).
        temperature: divisor of the logits.
        reduction: "none".
        dist_process_group: Megatron's tensor-parallel group, which the rows of the head are sharded over.
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.

    Returns:
        (log-probabilities, entropy): (n,) fp32, n the number of rows of hidden.
    """
    if reduction != "none":
        raise value_error("reduction", "'none'", repr(reduction), "reduce the log-probabilities")
    if has_summed_gradient(hidden):
        # Every rank gets all of d_hidden here; from verl's kernel it gets its summand.
        hidden = DivideGradient.apply(hidden, dist_process_group)
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


def has_summed_gradient(hidden: Tensor) -> bool:
    """Whether the backward pass of hidden sums over the ranks: that of Megatron's gather of a sequence."""
    return getattr(hidden.grad_fn, "tensor_parallel_output_grad", False) is True
