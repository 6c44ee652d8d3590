"""The rows of a teacher with which the rows of a call are compared. Several rows may share a teacher's row.

A loss names the input that holds the teacher's row of each row (`teacher_rows`). The rows are then projected
in the order of the teacher's, so that a chunk needs a slice of the teacher's rows, and projects each once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TeacherRows(NamedTuple):
    """The rows of a teacher that a call projects: those with which a supervised row is compared."""

    index: Tensor  # (m,) their positions in `teacher_hidden`, ascending
    ranks: Tensor  # (count,) place in `index` of the row that each row is compared with, in row order
    first: Sequence[int]  # rank of the first row of each piece
    last: Sequence[int]  # rank of its last row
    piece: int  # rows of a piece; chunks begin at multiples

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """The slice of `index` with which rows start:stop are compared."""
        return self.first[start // self.piece], self.last[-(-stop // self.piece) - 1] + 1

    def share(self) -> float:
        """The largest number of the teacher's rows per projected row, in any chunk of whole pieces."""
        rows = self.ranks.shape[0]
        if not rows:
            return 1.0
        sizes = [min(self.piece, rows - at) for at in range(0, rows, self.piece)]
        counts = [last + 1 - first for first, last in zip(self.first, self.last, strict=True)]
        if len(sizes) > 1:  # a short last piece is part of a longer chunk
            size = sizes.pop()
            count = counts.pop()
            sizes[-1] += size
            counts[-1] += count
        return max(count / size for count, size in zip(counts, sizes, strict=True))


class Ordered(NamedTuple):
    """The rows of a call in the order of the teacher's rows, on the device; unsupervised rows come last."""

    order: Tensor  # (N,) positions in the call
    rows: Tensor  # (N,) the teacher's row of each
    starts: Tensor  # (N,) bool, whether the teacher's row differs from that of the row before
    ranks: Tensor  # (N,) number of different rows of the teacher up to this one, less 1
    piece: int

    @classmethod
    def of(cls, supervised: Tensor, rows: Tensor, count: int, piece: int) -> "Ordered":
        """Sort the rows; `count` is the number of the teacher's rows."""
        rows = torch.where(supervised, rows, count)
        order = rows.argsort(stable=True)
        rows = rows[order]
        supervised_rows = rows < count
        starts = torch.cat((supervised_rows[:1], (rows[1:] != rows[:-1]) & supervised_rows[1:]))
        return cls(order, rows, starts, starts.cumsum(0) - 1, piece)

    @property
    def numbers(self) -> Tensor:
        """Numbers for the host to read: the rank of the first row of each piece, the rank of the last row of
        each whole piece, and the number of the teacher's rows."""
        return torch.cat(
            (self.ranks[:: self.piece], self.ranks[self.piece - 1 :: self.piece], self.starts.sum()[None])
        )

    def read(self, count: int, numbers: Sequence[int]) -> TeacherRows:
        """The teacher's rows of the `count` supervised rows, given the numbers that the host has read."""
        N = self.order.shape[0]
        piece = self.piece
        distinct = numbers[-1]
        pieces = -(-count // piece)
        whole = count // piece
        first = list(numbers[:pieces])
        last = list(numbers[-(-N // piece) :][:whole])
        if whole < pieces:
            last.append(distinct - 1)
        index = torch.nonzero_static(self.starts, size=distinct)[:, 0]
        return TeacherRows(self.rows[index], self.ranks[:count], first, last, piece)
