"""`SamplingMask`: for each token, the ids that the sampler's truncation (top-k, top-p, min-p) kept."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Self

import torch
from torch import Tensor

from logitless.engine.operands import shifted
from logitless.errors import check_choice

NAME = "sampling_mask"
IDS = (torch.int32, torch.int64)
# The per-token statistics that are computed over sets; see `kernels.ids.sets.set_statistics`.
STATISTICS_OF_SETS = ("logps", "lse", "entropy", "is_top1")
# What to do with a target that is missing from its row's set.
MISSING = ("raise", "add")


class Sets(NamedTuple):
    """The sets of the rows of a call. The set of row n is `ids[starts[n]:starts[n] + lengths[n]]`."""

    ids: Tensor  # (S,) int32 or int64
    starts: Tensor  # (N,) int64, non-decreasing
    lengths: Tensor  # (N,) int64; 0: the whole vocabulary
    offsets: Tensor  # (N + 1,) as the user passed them, for the check of their values


class AlignedMask(NamedTuple):
    """A sampling mask with one set per row of the hidden states of a call."""

    sets: Sets
    add_targets: bool  # whether a target that is missing from its row's set is added to the set


class SamplingMask:
    """For each token, the ids that the sampler's truncation kept, as inference servers return them.

    The set of token n is `token_ids[offsets[n]:offsets[n + 1]]`. An empty set means the whole vocabulary.
    Sets are aligned with the targets: with `shift=True`, they are shifted with the labels.

    Args:
        token_ids: (S,) int32 or int64 ids of the whole vocabulary (also with `tp_group`), in any order.
            Duplicate ids of a token count once. Ids after offsets[-1] are not read, so that the tensor may be
            longer.
        offsets: (N + 1,) int32 or int64, non-decreasing, starting at 0. N is the number of targets of the
            call: B * T for a padded batch (row by row), or the packed length.
        missing: what to do if a target is not in its set: "raise" a ValueError, or "add" the target to the
            set.
    """

    def __init__(self, token_ids: Tensor, offsets: Tensor, *, missing: str = "raise"):
        _check_ids("token_ids", token_ids, "pass padded sets by SamplingMask.from_padded")
        _check_ids("offsets", offsets, "pass the first slot of each token, and the end of the last")
        if token_ids.dim() != 1:
            remedy = "pass padded sets by SamplingMask.from_padded"
            raise ValueError(f"token_ids: expected shape (S,), got {tuple(token_ids.shape)}; {remedy}.")
        if offsets.dim() != 1 or not offsets.shape[0]:
            raise ValueError(
                f"offsets: expected shape (N + 1,), got {tuple(offsets.shape)}; "
                "pass the first slot of each token, and the end of the last one."
            )
        if offsets.device != token_ids.device:
            raise ValueError(
                f"offsets: expected token_ids' device {token_ids.device}, got {offsets.device}; "
                "move them there."
            )
        check_choice("missing", missing, MISSING)
        self.token_ids = token_ids
        self.offsets = offsets
        self.missing = missing

    @classmethod
    def from_padded(cls, ids: Tensor, *, empty: int = -1, missing: str = "raise") -> Self:
        """Construct a mask from padded sets.

        Args:
            ids: (..., k) int32 or int64, one set of up to k ids per token.
            empty: the value of slots without an id.
            missing: as in the constructor.
        """
        _check_ids("ids", ids, "pass token ids, with empty=-1 in the slots without one")
        if ids.dim() < 1:
            raise ValueError("ids: expected shape (..., k), got a number; pass k slots per token.")
        filled = (ids != empty).reshape(ids.shape[:-1].numel(), ids.shape[-1])
        offsets = torch.nn.functional.pad(filled.sum(1).cumsum(0), (1, 0))
        # Move the ids to the front, in order, without a host sync. The last slot is unused if any slot is
        # empty.
        filled = filled.view(-1)
        size = ids.numel()
        place = torch.where(filled, filled.cumsum(0) - 1, max(0, size - 1))
        return cls(
            torch.empty_like(ids.reshape(-1)).scatter_(0, place, ids.reshape(-1)), offsets, missing=missing
        )

    @classmethod
    def from_lists(
        cls,
        kept: Iterable[Sequence[int] | None],
        *,
        device: torch.device | str | None = None,
        missing: str = "raise",
    ) -> Self:
        """Construct a mask from lists.

        Args:
            kept: one list of ids per token. None or an empty list keeps the whole vocabulary.
            device: device of the mask. Default: the default device of PyTorch.
            missing: as in the constructor.
        """
        ids, offsets = _joined("kept", kept)
        ids = torch.tensor(ids, dtype=torch.int64, device=device)
        return cls(ids, torch.tensor(offsets, dtype=torch.int64, device=device), missing=missing)

    @classmethod
    def from_completions(
        cls,
        masks: Sequence[Sequence[Sequence[int] | None] | tuple | None],
        starts: int | Sequence[int] | Tensor,
        length: int,
        *,
        device: torch.device | str | None = None,
        missing: str = "raise",
    ) -> Self:
        """Construct a mask for a padded batch (B, length) from the masks of its completions.

        Tokens outside the completions keep the whole vocabulary.

        Args:
            masks: for each sequence, a list with one list of ids per token of its completion, such as
                `sampling_mask.token_ids` of vLLM, or a tuple (token_ids, offsets) of lists, arrays or
                tensors. None for a sequence that was sampled without truncation.
            starts: the position of the first token of each completion, or one position for all completions.
            length: number of positions of the batch, T.
            device: device of the batch. Default: the default device of PyTorch.
            missing: as in the constructor.
        """
        count = len(masks)
        starts = torch.as_tensor(starts, dtype=torch.int64, device="cpu")
        starts = starts.tolist() if starts.dim() else [starts.item()] * count
        if len(starts) != count:
            raise ValueError(
                f"starts: expected {count} positions, one per completion, got {len(starts)}; match masks."
            )
        lengths = torch.zeros(count, length, dtype=torch.int64, device="cpu")
        ids = []
        for row, (mask, start) in enumerate(zip(masks, starts, strict=True)):
            if mask is None:
                continue
            if isinstance(mask, list) and all(isinstance(x, list | tuple | None) for x in mask):
                mask = _joined("masks", mask)
            elif not isinstance(mask, tuple) or len(mask) != 2:
                raise TypeError(
                    "masks: expected a list with one list of ids per token, a tuple (token_ids, offsets) or "
                    f"None for each sequence, got {type(mask).__name__} in row {row}; with vLLM, pass "
                    "completion.sampling_mask.token_ids."
                )
            token_ids, offsets = (torch.as_tensor(x, dtype=torch.int64, device="cpu") for x in mask)
            tokens = offsets.shape[0] - 1
            if start < 0 or start + tokens > length:
                raise ValueError(
                    f"masks: expected completions inside {length} positions, got {tokens} tokens from "
                    f"position {start} in row {row}; cut masks and completions to the same length."
                )
            if (
                tokens < 0
                or offsets[0] != 0
                or (offsets.diff() < 0).any()
                or offsets[-1] > token_ids.shape[0]
            ):
                raise ValueError(
                    f"masks: expected offsets that rise from 0 to at most {token_ids.shape[0]}, got others "
                    f"in row {row}; pass the server's token_ids and offsets of the same completion."
                )
            lengths[row, start : start + tokens] = offsets.diff()
            ids.append(token_ids[: offsets[-1]])
        flat = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64, device="cpu")
        offsets = torch.nn.functional.pad(lengths.view(-1).cumsum(0), (1, 0))
        device = torch.get_default_device() if device is None else device
        return cls(flat.to(device), offsets.to(device), missing=missing)

    def __len__(self) -> int:
        """The number of tokens."""
        return self.offsets.shape[0] - 1

    def __repr__(self) -> str:
        size = self.token_ids.shape[0]
        return f"SamplingMask of {len(self)} tokens, up to {size} ids, missing={self.missing!r}"

    def to(self, device: torch.device | str) -> Self:
        """Return the mask on `device`."""
        token_ids, offsets = self.token_ids.to(device), self.offsets.to(device)
        return type(self)(token_ids, offsets, missing=self.missing)

    def aligned(
        self, targets: Tensor, *, shift: bool = False, cu_seqlens: Tensor | None = None
    ) -> AlignedMask:
        """Align the sets with the rows of a call.

        With `shift`, row i gets set i + 1, and the last row of each sequence gets an empty set.

        Args:
            targets: (...) the targets of the call.
            shift: whether the targets are unshifted labels.
            cu_seqlens: boundaries of packed sequences, after `checked_boundaries`.
        """
        offsets = self.offsets.long()
        if len(self) != targets.numel():
            raise ValueError(
                f"{NAME}: expected offsets of {targets.numel()} tokens, one set per target, got "
                f"{len(self)}; pass an empty set for tokens that were not sampled."
            )
        if offsets.device != targets.device:
            raise ValueError(
                f"{NAME}: expected the targets' device {targets.device}, got {offsets.device}; call "
                ".to(device) on it."
            )
        starts = offsets[:-1]
        lengths = offsets.diff()
        if shift:
            starts = offsets[1:]
            lengths = shifted(lengths.view(targets.shape), 0, -1, cu_seqlens).reshape(-1)
        return AlignedMask(Sets(self.token_ids, starts, lengths, self.offsets), self.missing == "add")


def _joined(name: str, kept: Iterable[Sequence[int] | None]) -> tuple[list[int], list[int]]:
    """A list of ids per token -> the ids in one list, and the first slot of each token."""
    sets = [[] if ids is None else list(ids) for ids in kept]
    ids = list(chain.from_iterable(sets))
    if any(isinstance(x, float) for x in ids):
        raise TypeError(f"{name}: expected lists of integer token ids, got floats; pass the ids.")
    return ids, [0, *accumulate(map(len, sets))]


def check_mask(mask: object) -> None:
    """Raise TypeError unless `mask` is a sampling mask."""
    if not isinstance(mask, SamplingMask):
        raise TypeError(
            f"{NAME}: expected a SamplingMask, got {type(mask).__name__}; construct it with "
            "SamplingMask(token_ids, offsets), .from_padded, .from_lists or .from_completions."
        )
    return mask


def _check_ids(name: str, x: object, remedy: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}; pass torch.as_tensor({name}).")
    if x.dtype not in IDS:
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}; {remedy}.")
