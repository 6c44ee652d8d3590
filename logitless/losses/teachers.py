"""Checks of a teacher's arguments: hidden states and head, or log-probabilities of its top k ids."""

import functools

import torch
from torch import Tensor

from logitless.engine.spec import Fault
from logitless.errors import type_error, value_error, warn
from logitless.kernels.ids.gathered import wrong_slots


def check_teacher(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, shape: torch.Size) -> None:
    if weight is None:
        raise value_error(
            "teacher_weight", "the teacher's head (V', H')", None, "pass it with teacher_hidden"
        )
    if hidden.shape[:-1] != shape:
        raise value_error(
            "teacher_hidden",
            f"shape {tuple(shape)} + (H',)",
            tuple(hidden.shape),
            "pass one row per token of hidden",
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise value_error(
            "teacher_weight",
            f"shape (V', {hidden.shape[-1]})",
            tuple(weight.shape),
            "pass the head of these hidden states",
        )
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise value_error(
                "teacher_bias",
                f"shape ({weight.shape[0]},)",
                tuple(bias.shape),
                "pass one entry per token id",
            )


def check_topk(values: Tensor, ids: Tensor, shape: torch.Size) -> None:
    if values.shape != ids.shape or values.shape[:-1] != shape or values.shape[-1:] == (0,):
        raise value_error(
            "teacher_logprobs_topk",
            f"two tensors {tuple(shape)} + (k,) with k >= 1",
            f"{tuple(values.shape)} and {tuple(ids.shape)}",
            "pass k ids for every token",
        )
    for x, kind, wanted in (
        (ids, not (ids.is_floating_point() or ids.is_complex()), "integer ids"),
        (values, values.is_floating_point(), "floating-point log-probabilities"),
    ):
        if not kind:
            raise type_error("teacher_logprobs_topk", wanted, x.dtype, "pass (values, ids)")


def topk_faults(
    ids: Tensor | None,
    values: Tensor | None,
    V: int,
    shared: int | None,
) -> list[Fault]:
    """Return the device-side checks of a teacher's top-k ids and log-probabilities.

    Args:
        ids: (N, k) integers; None: the teacher is not passed as top-k log-probabilities, and there are no
            checks.
        values: (N, k) log-probabilities.
        V: size of the vocabulary.
        shared: number of leading ids that both vocabularies share; None: V.
    """
    if ids is None:
        return []
    if shared is not None:
        V = min(V, shared)
    outside, above = wrong_slots(ids, values, V).unbind()
    name = "teacher_logprobs_topk"
    expected = f"ids in [0, {V})"
    expected += "" if shared is None else f" and below shared_vocabulary={shared}"
    remedy = "give log-probabilities, normalized over the vocabulary, not logits"
    return [
        Fault(outside, name, expected, "ids outside", "pass ids of the student's vocabulary"),
        Fault(above, name, "log-probabilities of at most 0", "others", remedy),
    ]


@functools.cache
def warn_of_sizes(student: int, teacher: int) -> None:
    """Warn that the vocabularies differ in size. The warning is issued once for each pair of sizes."""
    warn(
        f"teacher_weight: the teacher has {teacher} ids and the student {student}; the first "
        f"{min(student, teacher)} ids are assumed to be the same tokens. Pass the number of shared leading "
        "ids as shared_vocabulary=.",
        UserWarning,
    )
