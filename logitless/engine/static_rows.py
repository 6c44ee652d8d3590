"""Static rows: a small call projects every row, whichever tokens it supervises.

The products of a few hundred rows take less time than the host takes to count the supervised ones and to
launch kernels for them. With static rows, the kernels do not depend on the values of the targets: a pass can
be queued before the host knows them, and replayed for others (`captured`). The evaluation and the kernels
mask the ignored rows, as with compact=False. Unlike there, what the call contains in these rows is replaced
by 0 first, so that it may be NaN, and the host reads the faults after the pass is queued.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.engine import budget
from logitless.engine.call import HeadCall
from logitless.engine.choose import grouping_of
from logitless.engine.compiled import is_capturing, is_of_library
from logitless.engine.graph_names import constant_in_graphs
from logitless.engine.operands import is_same, masked_rows
from logitless.engine.remembered import Remembered
from logitless.engine.rows import Rows, static_rows
from logitless.engine.spec import PER_TOKEN, LossSpec, Role
from logitless.kernels.head.targets import cleaned

# The rows of a call are static if its products have at most this many multiplications for each byte of the
# device's memory: on a GPU with 80 GB the three products of 512 tokens with H 2,048 and a vocabulary of
# 151,936.
SIZE = 6
# A chunk of logits of a call with static rows has at most this share of the device's memory. A captured pass
# keeps it between calls.
SHARE = 1 / 128
# Device types on which a compiled graph computes product 3 in the backward pass: see `multiplies_later`.
MULTIPLIES_LATER_ON = ("cuda",)
# Identity of a loss -> the same loss with compact=False; None if it has no such option.
_STATIC = Remembered()


class Assumed(NamedTuple):
    """A call that is run before the host has read what it assumes."""

    call: HeadCall
    rows: Rows
    unread: Tensor | None  # (n,) integers; None: nothing is assumed
    # All of `unread` are assumed to be 0. If this is 1, the first of them is the number of supervised tokens,
    # which is assumed not to be 0.
    tokens: int = 0


def holds(numbers: list[int], tokens: int) -> bool:
    """Whether `Assumed.unread`, which the host has read, is as assumed."""
    return all(numbers[:tokens]) and not any(numbers[tokens:])


@constant_in_graphs
def total_memory(device: torch.device) -> int:
    """The bytes of the device's memory; of a CPU, as of a GPU with 64 GiB."""
    return _total_memory(device)


@cache
def _total_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**36


def is_static(call: HeadCall) -> bool:
    """Whether the rows of a call of one head are static.

    This depends on the loss, on shapes and on the device, but not on earlier calls. While the user captures a
    CUDA graph, no rows are static: the host cannot read counts, so that a call with compact=True fails.
    """
    loss = call.loss
    return (
        loss.compact
        and bool(loss.identity)
        and _allows_every_row(loss)
        and is_small(call)
        and is_of_library(loss)
        and has_kernel(call)
        and not is_capturing(call.weight.device)
        and _with_every_row(loss) is not None
    )


def is_plain(call: HeadCall) -> bool:
    """Whether the call has no process group, no layers, no packed sequences and no sampling mask."""
    loss = call.loss
    given = loss.tp_group, loss.cp_group, call.layers, call.cu_seqlens, call.sets
    return all([x is None for x in given])


def _allows_every_row(loss: LossSpec) -> bool:
    return loss.logits_budget is None and loss.teacher_rows is None and not loss.unmasked


def is_small(call: HeadCall) -> bool:
    """Whether the products of every row take less time than the host takes for the call."""
    N = call.targets.shape[0]
    heads = [x for name, x in call.inputs.items() if call.loss.roles[name] is Role.HEAD and x is not None]
    products = N * (3 * call.V * call.hidden.shape[1] + sum([x.numel() for x in heads]))
    logits_bytes = N * call.V * call.logits_dtype.itemsize
    memory = total_memory(call.weight.device)
    return 0 < products <= SIZE * memory and logits_bytes <= SHARE * memory


def multiplies_later(call: HeadCall) -> bool:
    """Whether a compiled graph computes product 3 of a call of one head in the backward pass.

    The graph then saves the gradient of the logits (N, V), where it would save d_weight (V, H), and the
    upstream gradient multiplies the features (N, H) instead of d_weight. N is at most H, and the gradient is
    not larger than the default `logits_budget`. If the pass projects the supervised rows alone, so does the
    product.
    """
    loss = call.loss
    N = call.targets.shape[0]
    V, H = call.weight.shape
    return (
        call.weight.device.type in MULTIPLIES_LATER_ON
        and is_plain(call)
        and _allows_every_row(loss)
        and loss.accum_dtype is None
        and call.dtype != torch.float16
        and not loss.reader.gathers
        and 0 < N <= H
        and N * V * call.dtype.itemsize <= _budget(call.weight.device)
    )


@constant_in_graphs
def _budget(device: torch.device) -> int:
    return budget.default_budget(device)


def has_kernel(call: HeadCall) -> bool:
    """Whether the gradient of the logits is computed by a kernel. Otherwise PyTorch computes it, with several
    tensors of the size of the logits, and such a pass is rarely captured."""
    loss = call.loss
    if not hasattr(loss, "has_kernel"):
        return True
    return loss.has_kernel(call.weight.device, call.logits_dtype, call.inputs)


def _with_every_row(loss: LossSpec) -> LossSpec | None:
    if loss.identity not in _STATIC:
        try:
            _STATIC[loss.identity] = replace(loss, compact=False)
        except ValueError:
            _STATIC[loss.identity] = None
    return _STATIC[loss.identity]


def of_every_row(call: HeadCall) -> HeadCall:
    """The call of the same loss with compact=False, which has the plan of a pass over static rows."""
    static = call.with_targets(call.targets, call.inputs)
    static.__dict__.update(loss=_with_every_row(call.loss))
    return static


@torch.no_grad()
def with_static_rows(call: HeadCall) -> Assumed:
    """Return the call with 0 in its ignored rows, its rows, and the counts of its tokens and faults."""
    loss = call.loss
    num_items = call.num_items if loss.reduction == "mean" else None
    targets, supervised, unread = cleaned(call.targets, call.V, loss.ignore_index, num_items)
    if loss.faults is not None:
        faults = [x.count for x in loss.faults(call.targets, call.inputs, call.V)]
        more = [x if x.dim() == 0 else (x & supervised).sum() for x in faults]
        unread = torch.stack((*unread.unbind(), *more)) if more else unread
    inputs = dict(call.inputs)
    for name, x in inputs.items():
        if is_same(x, call.targets):
            inputs[name] = targets
        elif x is not None and loss.roles[name] in PER_TOKEN:
            inputs[name] = masked_rows(x, supervised)
    static = call.with_targets(targets, inputs)
    static.__dict__.update(loss=_with_every_row(loss), hidden=masked_rows(call.hidden, supervised))
    rows = static_rows(supervised, unread[0], grouping_of(static))
    return Assumed(static, rows, unread, tokens=1)
