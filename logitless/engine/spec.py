"""`LossSpec`: the attributes that the engine reads of every loss, and the roles of its inputs.

The engine does not import any loss class.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from logitless.errors import value_error
from logitless.kernels.head.transform import LogitTransform
from logitless.parallel.sequences import WholeSequences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Role(Enum):
    """The alignment of an input. It determines the shape, whether `shift` applies, and how chunks are cut."""

    TOKEN = "its target"  # targets' shape + (...)
    POSITION = (
        "the position that predicts"  # the same shape, aligned with `hidden`: `shift` leaves it where it is
    )
    SEQUENCE = "its sequence"  # (sequences, ...)
    VOCABULARY = "its token id"  # (V,)
    FEATURES = "the position that predicts, in front of another head"  # targets' shape + (H',)
    HEAD = "the rows of another head"  # (V', ...), without gradient
    WHOLE = "the whole call"


def looks_at_sequences(loss: "LossSpec") -> bool:
    """Whether the loss, or the normalizer of its mean, depends on sequences."""
    return loss.scope != "token" or loss.unit != "tokens"


PER_TOKEN = (Role.TOKEN, Role.POSITION, Role.FEATURES)


def roles_of(loss: type) -> dict[str, Role]:
    """Return input name -> role, from the class attributes of a loss."""
    roles = dict.fromkeys(loss.token_inputs, Role.TOKEN) | dict.fromkeys(loss.sequence_inputs, Role.SEQUENCE)
    roles |= dict.fromkeys(loss.prediction_inputs, Role.POSITION) | dict.fromkeys(
        loss.vocabulary_inputs, Role.VOCABULARY
    )
    roles |= dict.fromkeys(loss.shared_inputs, Role.WHOLE)
    for head, present in (("teacher", loss.teacher), ("ref", loss.reference)):
        if present:
            roles |= {f"{head}_hidden": Role.FEATURES, f"{head}_weight": Role.HEAD, f"{head}_bias": Role.HEAD}
    if loss.teacher_rows is not None:
        roles["teacher_hidden"] = Role.WHOLE
    return roles


class Fault(NamedTuple):
    """A check of values on the device, with the error message.

    The number of invalid values is read in the call's one host sync, or asserted to be 0 on the device.
    """

    # 0-d integer: the number of invalid values. Or (N,) bool: the tokens with an invalid value, of which the
    # supervised tokens are counted.
    count: Tensor
    argument: str
    expected: str
    got: str  # may contain {count}
    remedy: str
    # Called only on failure. Returns (text after `got`, a more specific remedy).
    details: Callable[[], tuple[str, str]] | None = None

    def raise_(self, count: int, ranks: Sequence[int] = ()) -> None:
        """Raise ValueError.

        `count`: the count that the host has read. `ranks`: the ranks that have the fault.
        """
        where = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
        more, remedy = ("", self.remedy) if self.details is None else self.details()
        raise value_error(self.argument, self.expected, self.got.format(count=count) + where + more, remedy)

    def assert_async(self, fits: Tensor) -> None:
        """Assert `fits` (0-d bool) on the device, without a host sync."""
        message = f"{self.argument}: expected {self.expected}, got others; {self.remedy}."
        torch._assert_async(fits, message)


class LossSpec(Protocol):
    """A frozen, hashable loss, as `losses.base.LinearLoss` implements it.

    A reader also reads attributes that only the losses with this reader have:

    * `TokenReader`, with a reference: `ref_transform`, the transform of its logits.
    * `LogitsReader`: `has_kernel` and `kernel`; with a teacher `teacher_transform`, the transform of its
      logits.
    * `IdsReader`: `k`, the number of ids that the reader selects per row (None: the ids are an input), and
      `slots`, the number of slots per row.
    * `SupportReader`: `support`, `cancels`, `teacher_transform`; and `has_gathered_kernel` and
      `gathered_kernel`, for `GatheredReader`.
    * `SpeculatorReader`: the fields of `SpeculatorLoss`.
    """

    ignore_index: int
    reduction: str
    identity: str  # two losses are equal if and only if these strings are equal
    logits_budget: int | None
    accum_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    compact: bool
    tp_group: "ProcessGroup | None"
    cp_group: "ProcessGroup | None"
    return_logps: bool
    return_predictions: bool
    scope: str
    unit: str
    sequences_per_group: int
    metric_names: tuple[str, ...]
    # Names of the statistics through which the loss is differentiated, and of those that it takes as
    # constants. Both are empty for a loss of logits.
    differentiates: tuple[str, ...]
    observes: tuple[str, ...]
    teacher: bool  # whether the call takes hidden states and head of a teacher
    sum_logits_weights: str | None
    unmasked: bool
    boundaries_argument: str
    keywords: ClassVar[tuple[str, ...]]  # keyword arguments of the call
    # Names of the inputs that are log-probabilities of the sampled tokens. They are checked against a
    # sampling mask.
    sampled_logps: tuple[str, ...]
    roles: ClassVar[Mapping[str, Role]]
    # Name of the input (N,) that maps each row to a row of `teacher_hidden`; None: row i is compared with row
    # i of the teacher.
    teacher_rows: ClassVar[str | None]
    # The Reader class that reads the logits of the loss.
    reader: ClassVar[type]

    @property
    def logit_transform(self) -> LogitTransform:
        """The transform of the logits: softcap, scale and temperature."""

    @property
    def sequences(self) -> WholeSequences:
        """The collectives over the slices of sequences (`cp_group`)."""

    def name_in_graphs(self) -> str:
        """The name of the loss in a compiled graph."""

    def terms(self, statistics, batch) -> tuple[dict, dict]:
        """The unreduced loss and metrics of a slice."""

    def normalizers(self, counts: Mapping, targets: Tensor, inputs: Mapping[str, Tensor | None]) -> dict:
        """Unit -> the divisor of the sum in a mean."""

    # (targets, inputs, size of the vocabulary) -> checks of the inputs on the device; None: no such checks.
    faults: Callable[[Tensor, Mapping[str, Tensor | None], int], Sequence[Fault]] | None
