"""The mapping from the rows of a call to the rows of a teacher, if several rows share a row of the teacher.

The loss attribute `teacher_rows` names the input with this mapping. The rows are projected in the order of
the teacher's rows, so that a chunk needs a slice of the teacher's rows, and projects each of them once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TeacherRows(NamedTuple):
    """The rows of a teacher that a call projects: the rows with which supervised rows are compared."""

    index: Tensor  # (m,) positions of these rows in `teacher_hidden`, ascending
    ranks: Tensor  # (count,) for each row, in row order: the index in `index` of its teacher row
    first: Sequence[int]  # `ranks` of the first row of each piece
    last: Sequence[int]  # `ranks` of the last row of each piece
    piece: int  # rows of a piece; chunks begin at multiples of it

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """(first, stop) of the slice of `index` with which rows start:stop are compared."""
        return self.first[start // self.piece], self.last[-(-stop // self.piece) - 1] + 1

    def share(self) -> float:
        """The largest number of the teacher's rows per projected row, in any chunk of whole pieces."""
        rows = self.ranks.shape[0]
        if not rows:
            return 1.0
        sizes = [min(self.piece, rows - at) for at in range(0, rows, self.piece)]
        counts = [last + 1 - first for first, last in zip(self.first, self.last, strict=True)]
        if len(sizes) > 1:  # a shorter last piece is part of a longer chunk
            size = sizes.pop()
            count = counts.pop()
            sizes[-1] += size
            counts[-1] += count
        return max(count / size for count, size in zip(counts, sizes, strict=True))


class Ordered(NamedTuple):
    """The rows of a call in the order of the teacher's rows, on the device; unsupervised rows come last."""

    order: Tensor  # (N,) positions in the call
    rows: Tensor  # (N,) the teacher's row of each position
    starts: Tensor  # (N,) bool, whether the teacher's row differs from that of the previous position
    ranks: Tensor  # (N,) index of the teacher's row among the distinct rows of the teacher
    piece: int

    @classmethod
    def of(cls, supervised: Tensor, rows: Tensor, count: int, piece: int) -> "Ordered":
        """Sort the rows. `count` is the number of rows of the teacher."""
        rows = torch.where(supervised, rows, count)
        order = rows.argsort(stable=True)
        rows = rows[order]
        supervised_rows = rows < count
        starts = torch.cat((supervised_rows[:1], (rows[1:] != rows[:-1]) & supervised_rows[1:]))
        return cls(order, rows, starts, starts.cumsum(0) - 1, piece)

    @property
    def numbers(self) -> Tensor:
        """The numbers that the host reads.

        The rank of the first row of each piece, the rank of the last row of each whole piece, and the number
        of the teacher's rows.
        """
        return torch.cat(
            (self.ranks[:: self.piece], self.ranks[self.piece - 1 :: self.piece], self.starts.sum()[None])
        )

    def read(self, count: int, numbers: Sequence[int]) -> TeacherRows:
        """Return the teacher's rows of the `count` supervised rows, given `numbers` on the host."""
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
