"""`count_targets` against the tokens that calls with the same arguments report."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from logitless import CrossEntropyLoss, count_targets, global_num_items
from tests.support import DEVICE

H, V = 4, 11


def labels(*shape: int, ignore_index: int = -100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    actual = torch.randint(V, shape, generator=generator, device="cpu")
    ignored = torch.rand(shape, generator=generator, device="cpu") < 0.3
    return actual.masked_fill(ignored, ignore_index).to(DEVICE)


SHAPES = {
    "padded": ((3, 5), None),
    "several dimensions": ((2, 3, 4), None),
    "flat": ((12,), None),
    "packed": ((12,), (0, 3, 4, 9, 12)),
    "empty sequences": ((12,), (0, 0, 5, 5, 12, 12)),
    "one packed sequence": ((12,), (0, 12)),
    "no tokens": ((0,), None),
    "no packed tokens": ((0,), (0, 0)),
}
CASES = list(itertools.product(SHAPES, (False, True), (False, True), (-100, 3)))


@pytest.mark.parametrize(("name", "shift", "with_mask", "ignore_index"), CASES)
def test_it_is_what_the_call_reports(name, shift, with_mask, ignore_index):
    shape, bounds = SHAPES[name]
    targets = labels(*shape, ignore_index=ignore_index)
    options = {"shift": shift}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    if with_mask:
        options["mask"] = torch.arange(targets.numel(), device=DEVICE).view(shape) % 4 != 0
    hidden, weight = torch.randn(*shape, H, device=DEVICE), torch.randn(V, H, device=DEVICE)
    actual = count_targets(targets, ignore_index=ignore_index, **options)
    out = CrossEntropyLoss(ignore_index=ignore_index)(hidden, weight, targets, **options)
    assert actual.shape == () and actual.dtype == torch.int64 and actual.device.type == DEVICE.type
    assert actual == out.metrics["num_tokens"]


@pytest.mark.parametrize("bounds", [None, (0, 3, 4, 9, 12)])
def test_micro_batches_sum_to_one_batch(bounds):
    """The mean over two calls with the count of both is the mean of one call."""
    targets, hidden, weight = (
        labels(24),
        torch.randn(24, H, device=DEVICE),
        torch.randn(V, H, device=DEVICE),
    )
    shape = (2, 12) if bounds is None else (24,)
    whole = None if bounds is None else torch.tensor((*bounds, *(12 + x for x in bounds[1:])), device=DEVICE)
    options = {"shift": True, "cu_seqlens": None if bounds is None else torch.tensor(bounds, device=DEVICE)}
    parts = list(zip(hidden.view(2, 12, H), targets.view(2, 12), strict=True))
    num_items = sum(count_targets(y, **options) for _, y in parts)
    loss = CrossEntropyLoss()
    total = sum(loss(x, weight, y, num_items=num_items, **options).loss for x, y in parts)
    expected = loss(hidden.view(*shape, H), weight, targets.view(shape), shift=True, cu_seqlens=whole).loss
    torch.testing.assert_close(total, expected)
    assert global_num_items(num_items) == num_items


def test_nothing_is_read_back():
    with FakeTensorMode():
        targets, bounds = torch.zeros(12, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        actual = count_targets(targets, shift=True, cu_seqlens=bounds, mask=targets == 0)
        assert actual.shape == ()


def test_it_compiles():
    def count(targets, bounds):
        return count_targets(targets, shift=True, cu_seqlens=bounds)

    compiled = torch.compile(count, backend="aot_eager", fullgraph=True)
    for size in (12, 20):
        arguments = labels(size), torch.tensor((0, 3, 9, size), device=DEVICE)
        assert compiled(*arguments) == count(*arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"targets": torch.zeros(3, device=DEVICE)}, "targets: expected a tensor of integer token ids"),
        ({"targets": [1, 2]}, "targets: expected a tensor of integer token ids"),
        (
            {"targets": labels(2, 3), "cu_seqlens": torch.tensor([0, 6], device=DEVICE)},
            r"targets: expected shape \(N,\) with cu_",
        ),
        (
            {"targets": labels(3), "cu_seqlens": torch.tensor([0.0, 3.0], device=DEVICE)},
            "cu_seqlens: expected .* int64 bound",
        ),
        ({"targets": labels(3), "mask": torch.ones(2, device=DEVICE)}, "mask: expected targets' shape"),
        ({"targets": labels(3)[0], "shift": True}, "shift: expected False for a single target"),
    ],
)
def test_refused(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        count_targets(given.pop("targets"), **given)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device-side assertion ends the process's use of the GPU")
@pytest.mark.parametrize("bounds", [(0, 3, 11), (1, 3, 12), (0, 5, 3, 12)])
def test_wrong_boundaries_are_asserted(bounds):
    with pytest.raises(RuntimeError, match="^cu_seqlens: expected non-decreasing boundaries from 0 to 12"):
        count_targets(labels(12), shift=True, cu_seqlens=torch.tensor(bounds, device=DEVICE))
