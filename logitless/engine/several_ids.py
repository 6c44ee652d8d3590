"""Numbers of several ids per token, from a chunk of logits, and the gradient of the logits from theirs.

With S the distinct ids of a token and R all others, the softmax over the vocabulary is that of |S| logits and
of one log-sum-exp, of R. So the logits of S are taken out of the chunk, and what is read of it is R:

    lse = log(exp(lse_R) + sum_S exp(z_s))      log p_s = z_s - lse      rest = lse_R - lse
    entropy = P_R (entropy_R - log P_R) - sum_S p_s log p_s,  P_R = exp(rest)

No number is a difference of nearly equal ones: 1 - sum_S p_s is `rest`, and the log-probability of a certain
token is -log(1 + all others / its own). With g the gradients of log p, G their sum:

    d z_s = g_s - (G + g_rest - g_lse) p_s      d z_r = (g_lse - G + g_rest (1 - P_R) / P_R) p_r
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from logitless.kernels import cross_entropy as kernels
from logitless.kernels.cross_entropy import TokenBuffers
from logitless.kernels.head import Head
from logitless.parallel.vocabulary import WholeVocabulary

# What stands in the chunk for a logit that was taken out: exp() of it is 0 beside any other, and unlike -inf
# it leaves numbers where nothing else is left.
TAKEN_OUT = {torch.float16: -3e4}
FAR_BELOW = -1e30
# log P_R below which its gradient is cut: exp(-LEAST_REST) is still far inside fp32.
LEAST_REST = -60.0


def merged(ids: Tensor, x: Tensor) -> Tensor:
    """(n, k) each -> the sum of x over the slots with the same id, in each of them. Deterministic."""
    ordered, order = ids.sort(dim=-1, stable=True)
    total, distance = x.gather(-1, order), 1
    while distance < ids.shape[-1]:
        same = ordered[:, distance:] == ordered[:, :-distance]
        total = torch.cat(
            (
                total[:, :distance],
                torch.where(same, total[:, distance:] + total[:, :-distance], total[:, distance:]),
            ),
            dim=-1,
        )
        distance *= 2
    last = torch.searchsorted(ordered, ordered, right=True) - 1
    return torch.empty_like(x).scatter_(-1, order, total.gather(-1, last))


def distinct(ids: Tensor) -> Tensor:
    """(n, k) -> the first slot of each id that is not negative."""
    ordered, order = ids.sort(dim=-1, stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(first).scatter_(-1, order, first & (ordered >= 0))


class Slots(NamedTuple):
    """Where the ids (n, k) of some rows are in a chunk of logits. A negative id is an empty slot."""

    ids: Tensor
    first: Tensor  # the first slot of each id
    here: Tensor  # ids that this rank has a column for
    columns: Tensor  # of those; of the others that of one of those
    source: Tensor  # the slot whose column that is
    any_here: Tensor  # (n, 1)

    @classmethod
    def of(cls, ids: Tensor, vocabulary: WholeVocabulary, V: int) -> Self:
        columns, here = vocabulary.find(ids, V)
        slots = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        source = torch.where(here, slots, here.to(torch.uint8).argmax(1, keepdim=True))
        any_here = here.any(1, keepdim=True)
        return cls(ids, distinct(ids), here, columns.gather(1, source), source, any_here)

    def put(self, matrix: Tensor, values: Tensor | float) -> None:
        """Write a value per id (n, k) into its column of (n, columns); equal ids have equal values."""
        if isinstance(values, Tensor):
            values = values.gather(1, self.source).to(matrix.dtype)
        matrix.scatter_(1, self.columns, torch.where(self.any_here, values, matrix.gather(1, self.columns)))


class Reader(NamedTuple):
    """What it takes to read a chunk of logits."""

    head: Head
    bias: Tensor | None  # (columns,)
    vocabulary: WholeVocabulary
    V: int
    targets: Tensor  # (n,) `ignored`, or a column that does not exist
    ignored: int | None
    dtype: torch.dtype  # of the numbers

    def columns_logits(self, logits: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """(n, k) logits of the ids on all ranks, and those that this rank would have for TAKEN_OUT."""
        x = logits.gather(1, slots.columns)
        bias = None if self.bias is None else self.bias[slots.columns]
        z, _ = self.head.logits(x, bias)
        taken, _ = self.head.logits(torch.full_like(x, self._taken_out(x.dtype)), bias)
        z = self.vocabulary.reduce(torch.where(slots.here, z, 0.0))
        return torch.where(slots.ids >= 0, z, -torch.inf), taken

    def _taken_out(self, dtype: torch.dtype) -> float:
        return TAKEN_OUT.get(dtype, FAR_BELOW) * (1 if self.head.logit_scale > 0 else -1)

    def statistics(
        self, logits: Tensor, names: tuple[str, ...], maxima: Tensor | None = None
    ) -> TokenBuffers:
        """Log-sum-exp and the named numbers of each row of this rank's columns; 0 where ignored."""
        stats = kernels.allocate_stats(names, len(self.targets), self.dtype, logits.device)
        options = {"head": self.head, "bias": self.bias, "ignore_index": self._ignore_index}
        kernels.token_statistics(logits, self.targets, stats, **options, maxima=maxima)
        return stats

    def numbers(self, logits: Tensor, slots: Slots, *, entropy: bool) -> dict[str, Tensor]:
        """logps (n, k), lse, its residual, rest and entropy (n,); 0 where ignored.

        The ids' logits are taken out of the chunk.
        """
        z, taken = self.columns_logits(logits, slots)
        slots.put(logits, self._taken_out(logits.dtype))
        stats = self.statistics(logits, ("entropy",) if entropy else ())
        others = self._others(stats, slots, taken, logits.shape[1])
        found = whole_of(torch.where(slots.first, z, -torch.inf), z, *others)
        kept = self.targets != self._ignore_index
        return {
            name: torch.where(kept if x.dim() == 1 else kept[:, None], x, 0.0) for name, x in found.items()
        }

    @property
    def _ignore_index(self) -> int:
        return -100 if self.ignored is None else self.ignored

    def _others(self, stats: TokenBuffers, slots: Slots, taken: Tensor, columns: int) -> list[Tensor]:
        """lse, residual and entropy of the other ids, (ranks, n) each."""
        own = slots.first & slots.here
        share = torch.where(own, (taken - stats.lse[:, None]).exp(), 0.0)
        left = torch.where(own.sum(1) < columns, (1 - share.sum(1)).clamp(min=0.0), 0.0)
        lse = torch.where(left > 0, stats.lse + left.log(), -torch.inf)
        residual = torch.where(lse.isfinite() & stats.lse_residual.isfinite(), stats.lse_residual, 0.0)
        others = [lse, residual]
        if stats.entropy is not None:
            out = torch.where(share > 0, share * (taken - stats.lse[:, None]), 0.0).sum(1)
            others.append(torch.where(left > 0, (stats.entropy + out) / left + left.log(), 0.0))
        stacked = torch.stack(others)
        ranks = self.vocabulary.gathered(stacked) if self.vocabulary.sharded else stacked[None]
        return list(ranks.unbind(1))


def whole_of(
    own: Tensor,  # (n, k) logits, -inf in all but the first slot of each id
    z: Tensor,  # (n, k) logits of all slots
    lse: Tensor,  # (ranks, n) of each rank's other ids
    residual: Tensor,
    entropy: Tensor | None = None,
) -> dict[str, Tensor]:
    """The numbers of the whole vocabulary from the parts that it falls into."""
    x = torch.cat((own, lse.t()), 1)
    rounding = torch.cat((torch.zeros_like(own), residual.t()), 1)
    top, at = x.max(1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    e = (x - top + rounding).exp()
    # All but the largest, of which only what rounding left out.
    others = e.scatter(1, at, rounding.gather(1, at).expm1()).sum(1)
    log_total, top = others.log1p(), top[:, 0]
    whole = top + log_total
    part = lse - top + residual - log_total
    found = {
        "logps": (z - top[:, None]) - log_total[:, None],
        "lse": whole,
        "lse_residual": torch.where(whole.isfinite(), (top - whole) + log_total, 0.0),
        "rest": part.logsumexp(0),
    }
    if entropy is not None:
        log_p = (own - top[:, None]) - log_total[:, None]
        shares = part.exp()
        found["entropy"] = (shares * entropy - torch.xlogy(shares, shares)).sum(0) - torch.where(
            log_p > -torch.inf, log_p.exp() * log_p, 0.0
        ).sum(1)
    return found


class Upstream(NamedTuple):
    """Gradients of the numbers of some rows; None where there are none."""

    logps: Tensor | None  # (n, k)
    lse: Tensor | None = None  # (n,)
    rest: Tensor | None = None
    entropy: Tensor | None = None

    def entries(self, numbers: dict[str, Tensor], slots: Slots, head: Head) -> tuple[Tensor, Tensor]:
        """d products of the ids (n, k), and the factor (n,) of p for all others (before the entropy's)."""
        logps = numbers["logps"]
        p, g = logps.exp(), torch.zeros_like(logps)
        if self.logps is not None:
            # What comes back to an empty slot, whose log-probability is -inf, may be NaN: it stays there.
            g = merged(slots.ids, self.logps)
        total = torch.where(slots.first, g, 0.0).sum(1, keepdim=True)
        d_z = g * -torch.expm1(logps) - (total - g) * p
        factor = -total[:, 0]
        if self.lse is not None:
            d_z, factor = d_z + self.lse[:, None] * p, factor + self.lse
        if self.rest is not None:
            d_z = d_z - self.rest[:, None] * p
            rest = numbers["rest"]
            factor = factor - self.rest * torch.expm1(rest) * (-rest.clamp(min=LEAST_REST)).exp()
        if self.entropy is not None:
            share = torch.where(p > 0, p * (logps + numbers["entropy"][:, None]), 0.0)
            d_z = d_z - self.entropy[:, None] * share
        slope = head.derivative_at(logps + numbers["lse"][:, None])
        return torch.where(slots.ids >= 0, d_z * slope, 0.0), factor
