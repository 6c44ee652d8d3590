"""The measuring instruments themselves: a tolerance that lets everything pass, or a blind watcher, would
prove nothing."""

import pytest
import torch

from tests.support import AllocationWatcher, GemmCounter, assert_close

MIB = 1 << 20


@torch.library.custom_op("logitless_tests::square_then_add", mutates_args=())
def square_then_add(x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(x, x, x).add_(1)


def test_tolerance_is_twice_the_naive_error():
    truth = torch.ones(4, dtype=torch.float64)
    naive = (truth * 1.01).float()
    assert_close((truth * 1.019).float(), truth, naive, name="inside")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close((truth * 1.021).float(), truth, naive, name="outside")


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (torch.zeros(4), "relative error"),
        (torch.ones(4, 1), "shape"),
        (torch.ones(4, dtype=torch.bfloat16), "dtype"),
        (torch.full((4,), torch.nan), "not finite"),
        (None, "no tensor"),
    ],
    ids=["zero", "shape", "dtype", "nan", "none"],
)
def test_tolerance_refuses(actual, message):
    truth = torch.ones(4, dtype=torch.float64)
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, truth, truth.float(), name="case")


def test_zero_truth_must_be_allowed():
    zero = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="vacuous"):
        assert_close(zero.float(), zero, zero.float(), name="case")
    assert_close(zero.float(), zero, zero.float(), name="case", allow_zero=True)
    with pytest.raises(AssertionError, match="expected 0"):
        assert_close(zero.float() + 1e-3, zero, zero.float(), name="case", allow_zero=True)


def test_watcher_counts_storages_once_and_forgets_the_dead():
    existing = torch.ones(MIB)
    with AllocationWatcher() as watcher:
        existing.mul_(2).view(1024, 1024).transpose(0, 1)
    assert watcher.peak < 100  # a number is a tensor
    with watcher:
        kept = torch.empty(MIB, dtype=torch.uint8).view(1024, 1024).fill_(1)
        for _ in range(3):
            torch.empty(3 * MIB, dtype=torch.uint8)
        del kept
    assert (watcher.peak, watcher.largest) == (4 * MIB, 3 * MIB)


def test_watcher_sees_inside_custom_operators():
    x = torch.ones(16, 16)
    with AllocationWatcher() as watcher:
        square_then_add(x)
    assert watcher.largest == x.numel() * 4


def test_counter_counts_gemms_wherever_they_are():
    x, w, batch = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8), torch.ones(3, 8, 8)
    with GemmCounter(tokens=8, vocab=8, hidden=8) as counter:
        (x @ w).sum().backward()
        torch.addmm(w, w, w)
        batch @ batch
        torch.mm(w, w, out=torch.empty(8, 8))
        square_then_add(w)
        w @ w[0]
    assert counter.gemms == pytest.approx(2 + 1 + 3 + 1 + 1 + 1 / 8)
