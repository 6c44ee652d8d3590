"""NeMo-RL, main of 2026-08-22 (0.6.0): the log-probabilities of its Megatron policy.

`patch()`, called in the policy's workers, replaces the function behind
`policy.megatron_cfg.use_fused_linear_logprobs: true`. `fused_linear_logprobs_chunk_size` then has no effect,
because `logits_budget` bounds the memory.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.errors import value_error
from logitless.integrations.sequences import GatherSequence
from logitless.integrations.versions import import_owner, log_replacement, replace_function
from logitless.losses import linear_logprobs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOGPROBS_FUNCTION = "nemo_rl.distributed.model_utils:from_parallel_hidden_states_to_logprobs"


def patch(*, logits_budget: int | str | None = None) -> Callable[[], None]:
    """Replace `from_parallel_hidden_states_to_logprobs` of NeMo-RL in this process.

    Args:
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.

    Returns:
        A function that restores it.

    Raises:
        ImportError: NeMo-RL is not installed, or has moved the function.
    """
    owner, name = import_owner("nemo_rl", LOGPROBS_FUNCTION)
    replacement = partial(from_parallel_hidden_states_to_logprobs, logits_budget=logits_budget)
    undo = replace_function("nemo_rl", owner, name, replacement)
    log_replacement("NeMo-RL", name, logits_budget)
    return undo


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: "ProcessGroup",
    inference_only: bool = False,
    cp_group: "ProcessGroup | None" = None,
    chunk_size: int | None = None,
    *,
    logits_budget: int | str | None = None,
) -> Tensor:
    """The log-probability of each next token.

    Args:
        tensor_parallel_hidden_states: (s / ranks, b, H), sharded by sequence parallelism.
        output_weight_layer: (V / ranks, H), this rank's rows of the head.
        runtime_gather_output: has no effect, as in NeMo-RL.
        target: (b, s) token ids.
        vocab_start_index: the first id of this rank's rows.
        vocab_end_index: the last id of this rank's rows, plus 1.
        tp_group: the tensor-parallel group.
        inference_only: whether no gradient is needed.
        cp_group: None, or a group of one rank.
        chunk_size: has no effect.
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.

    Returns:
        (b, s - 1) fp32.

    Raises:
        ValueError: context parallelism, uneven shards of the vocabulary, or no sequence parallelism.
    """
    hidden = tensor_parallel_hidden_states
    weight = output_weight_layer
    cp_size = 1 if cp_group is None else cp_group.size()
    if cp_size != 1:
        raise value_error("cp_group", "1 rank", cp_size, "set use_fused_linear_logprobs to false")
    rows = len(weight)
    start = tp_group.rank() * rows
    indices = (vocab_start_index, vocab_end_index)
    expected_indices = (start, start + rows)
    if indices != expected_indices:
        remedy = "shard the vocabulary evenly"
        raise value_error("vocab_start_index, vocab_end_index", str(expected_indices), indices, remedy)
    b, s = target.shape
    expected_shape = (s // tp_group.size(), b)
    if hidden.shape[:-1] != expected_shape:
        expected = f"shape {expected_shape} and the hidden size"
        remedy = "set policy.megatron_cfg.sequence_parallel to true"
        raise value_error("tensor_parallel_hidden_states", expected, tuple(hidden.shape), remedy)
    has_tensor_parallel = tp_group.size() > 1
    if has_tensor_parallel:
        # Every rank has all of d_hidden, so the backward pass slices it.
        hidden = GatherSequence.apply(hidden, tp_group)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        result = linear_logprobs(
            hidden.transpose(0, 1)[:, :-1],
            weight,
            target[:, 1:],
            tp_group=tp_group if has_tensor_parallel else None,
            logits_budget=logits_budget,
        )
    return result.logps
