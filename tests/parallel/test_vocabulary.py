"""What needs no process group: the whole vocabulary, and where a shard's ids are."""

import pickle
from dataclasses import dataclass

import pytest
import torch

from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.parallel.vocabulary import (
    IGNORED,
    WHOLE_VOCABULARY,
    LoneShard,
    ShardedVocabulary,
    WholeVocabulary,
)

V = 11
SIZES = (4, 1, 6)


@dataclass(frozen=True)
class Group:
    """As much of a process group as a shard's arithmetic asks for."""

    place: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return len(SIZES)


def shard(rank: int) -> ShardedVocabulary:
    return ShardedVocabulary(Group(rank), SIZES)


ranks = pytest.mark.parametrize("rank", range(len(SIZES)))


def test_functions_of_the_logits():
    z = torch.randn(5, V, dtype=torch.float64)
    torch.testing.assert_close(WHOLE_VOCABULARY.log_softmax(z), z - z.exp().sum(-1, keepdim=True).log())
    torch.testing.assert_close(WHOLE_VOCABULARY.norm(z), z.square().sum(-1, keepdim=True).sqrt())
    assert WHOLE_VOCABULARY.norm(z).shape == (5, 1)
    assert WHOLE_VOCABULARY.argmax(z).tolist() == [row.index(max(row)) for row in z.tolist()]
    tied = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert WHOLE_VOCABULARY.argmax(tied).tolist() == [1, 0]


def test_find():
    """Columns of ids, 0 where they have none, and whether they have one."""
    ids = torch.tensor([0, 10, 11, -100, -1, 5])
    columns, is_local = WHOLE_VOCABULARY.locate(ids, V)
    assert columns.tolist() == [0, 10, 0, 0, 0, 5]
    assert is_local.tolist() == [True, True, False, False, False, True]


@ranks
def test_find_in_a_shard(rank):
    """Every id of the vocabulary is in one shard, and in the right place of it."""
    start = sum(SIZES[:rank])
    ids = torch.tensor([*range(V), -100, -1, V, V + 3])
    columns, is_local = shard(rank).locate(ids, V)
    expected = [start <= i < start + SIZES[rank] for i in ids.tolist()]
    assert is_local.tolist() == expected
    assert columns.tolist() == [i - start if inside else 0 for i, inside in zip(ids.tolist(), expected)]


@ranks
@pytest.mark.parametrize("ignore_index", [-100, -1, 5])
def test_targets_as_columns_of_a_shard(rank, ignore_index):
    """Its width for a target of another shard, `IGNORED` for an ignored one."""
    start, width = sum(SIZES[:rank]), SIZES[rank]
    targets = torch.tensor([*range(V), ignore_index])
    columns, ignored = shard(rank).columns(targets, ignore_index)
    assert ignored == IGNORED
    for target, column in zip(targets.tolist(), columns.tolist()):
        if target == ignore_index:
            assert column == IGNORED
        else:
            assert column == (target - start if start <= target < start + width else width)


@ranks
def test_sizes_of_a_shard(rank):
    mine, start = shard(rank), sum(SIZES[:rank])
    assert mine.sharded and (mine.rank, mine.width, mine.start) == (rank, SIZES[rank], start)
    assert mine.total(SIZES[rank]) == V and mine.max_shard_rows(SIZES[rank]) == 6
    x = torch.arange(V)
    assert mine.local(x).tolist() == list(range(start, start + SIZES[rank])) and mine.local(None) is None


def test_a_lone_shard_is_the_whole():
    """A shard without a process group: the arithmetic of shards must leave the only one as it is."""
    lone, z = LoneShard(None, (V,)), torch.randn(6, V, dtype=torch.float64, requires_grad=True)
    assert lone.sharded and (lone.start, lone.width, lone.total(V), lone.max_shard_rows(V)) == (0, V, V, V)
    assert WHOLE_VOCABULARY.total(V) == WHOLE_VOCABULARY.max_shard_rows(V) == V
    for name in ("log_softmax", "norm", "argmax"):
        torch.testing.assert_close(getattr(lone, name)(z), getattr(WHOLE_VOCABULARY, name)(z))
    for name in ("log_softmax", "norm"):
        upstream = torch.randn_like(getattr(lone, name)(z))
        ours, expected = (
            torch.autograd.grad(getattr(v, name)(z), z, upstream) for v in (lone, WHOLE_VOCABULARY)
        )
        torch.testing.assert_close(ours, expected)


ALONE = [(), ("entropy", "is_top1"), ("sum_logits",), ("log_sum_sq_probs",)]


@pytest.mark.parametrize("names", ALONE, ids=str)
def test_the_numbers_of_a_lone_shard_are_those_of_the_whole(names):
    z = torch.randn(6, V, dtype=torch.float64) * 3
    targets = torch.tensor([0, 4, -100, 10, 2, 7])
    log_p = z.log_softmax(-1)
    supervised = targets != -100
    numbers = {
        "logps": log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0],
        "lse": z.logsumexp(-1),
        "lse_residual": torch.zeros(6, dtype=torch.float64),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "is_top1": (z.argmax(-1) == targets).double(),
        "sum_logits": z.sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
    }
    kept = ("logps", "lse", "lse_residual", *names)
    expected = {name: torch.where(supervised, numbers[name], 0.0) for name in kept}
    stats = TokenBuffers(**{name: numbers[name].clone() for name in kept})
    LoneShard(None, (V,)).merge_stats(stats, torch.where(supervised, targets, IGNORED))
    for name, x in expected.items():
        torch.testing.assert_close(getattr(stats, name), x, msg=name)


def test_equal_by_value():
    """They key compiled functions."""
    assert WholeVocabulary() == WHOLE_VOCABULARY and hash(WholeVocabulary()) == hash(WHOLE_VOCABULARY)
    assert shard(1) == shard(1) and hash(shard(1)) == hash(shard(1))
    assert shard(1) != shard(2) and shard(1) != ShardedVocabulary(Group(1), (4, 2, 5))
    assert LoneShard(None, (V,)) != WHOLE_VOCABULARY and LoneShard(None, SIZES) != ShardedVocabulary(
        None, SIZES
    )
    assert pickle.loads(pickle.dumps(WHOLE_VOCABULARY)) == WHOLE_VOCABULARY
    with pytest.raises(AttributeError):
        shard(1).sizes = (1,)
