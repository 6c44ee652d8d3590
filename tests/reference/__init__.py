"""The losses on full logits, in plain PyTorch, written from the papers: the truth that the tests compare
with.

Nothing here is chunked, fused or clever, and nothing is shared with the engine. Every function is generic in
the dtype of its operands, which gives both numbers of the tolerance rule: on fp64 operands it is the truth,
on bf16, fp16 or fp32 operands it is the naive computation (one GEMM in the operands' dtype, then the logits
upcast to at least fp32).
"""

from tests.reference.cross_entropy import cross_entropy, head_logits, multi_token, shift_left, token_logprobs
from tests.reference.distillation import distillation
from tests.reference.policy import grpo, ppo, reinforce, rloo
from tests.reference.preference import cpo, dpo, kto, orpo, simpo
from tests.reference.several_ids import best_ids, ids_logprobs, support_divergence

__all__ = [
    "best_ids",
    "cpo",
    "cross_entropy",
    "distillation",
    "dpo",
    "grpo",
    "head_logits",
    "ids_logprobs",
    "kto",
    "multi_token",
    "orpo",
    "ppo",
    "reinforce",
    "rloo",
    "shift_left",
    "simpo",
    "support_divergence",
    "token_logprobs",
]
