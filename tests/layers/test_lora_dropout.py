"""Dropout of LoRA projections: products with masks against fp64, and the masks themselves."""

import pytest
import torch
from torch import Tensor

from logitless.layers import lora, lora_dropout
from tests.kernels.support import DEVICE, TWINS
from tests.layers.layer_support import randn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def as_bools(masks: Tensor, columns: int) -> Tensor:
    """The masks (count, N, K), of bools or of bits."""
    if masks.dtype == torch.bool:
        return masks
    col = torch.arange(columns, device=masks.device)
    return (masks[..., col // 128 * 16 + col % 16] >> (col % 128 // 16)) % 2 == 1


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    distance = (actual.double() - expected).norm() / expected.norm()
    assert distance < tolerance, f"{distance:.1e}"


@pytest.mark.parametrize("dtype, x_dtype", [(BF16, BF16), (FP16, FP16), (BF16, FP32), (FP32, FP32)], ids=str)
@pytest.mark.parametrize(
    "rows, columns, ranks, ps",
    [
        (70, 200, (3, 3, 3), (0.3, 0.3, 0.3)),
        (5, 264, (16,), (0.05,)),
        (130, 24, (20, 20, 4, 4), (0.5, 0.5, 0.5, 0)),
        (3, 8, (160,), (0.1,)),
    ],
    ids=str,
)
def test_results_and_gradients(rows, columns, ranks, ps, dtype, x_dtype, monkeypatch):
    drawn = []
    draw_masks = lora_dropout.draw_masks

    def draw(x, p, count, rank):
        masks = draw_masks(x, p, count, rank)
        is_for_kernels = not TWINS and rank <= 128 and dtype != FP32
        assert masks.dtype == (torch.uint8 if is_for_kernels else torch.bool)
        drawn.extend(as_bools(masks, columns))
        return masks

    monkeypatch.setattr(lora_dropout, "draw_masks", draw)
    n = len(ranks)
    x = randn(rows, columns + 8, seed=0, dtype=dtype)[:, :columns].to(x_dtype).requires_grad_()
    weights = [randn(12, columns, seed=i + 1, dtype=dtype) for i in range(n)]
    many_a = [randn(r, columns, seed=i + 11, dtype=dtype).requires_grad_() for i, r in enumerate(ranks)]
    many_b = [randn(12, r, seed=i + 21, dtype=dtype).requires_grad_() for i, r in enumerate(ranks)]
    d_ys = [randn(rows, 12, seed=i + 31, dtype=dtype) for i in range(n)]
    layers = [lora.LoraProjection(w, None, a, b, 0.7, p) for w, a, b, p in zip(weights, many_a, many_b, ps)]
    with torch.autocast(DEVICE.type, BF16, enabled=x_dtype != dtype):
        results = lora.apply_projections(x, layers)
    leaves = [x, *many_a, *many_b]
    actual = [*results, *torch.autograd.grad(results, leaves, d_ys)]

    masks = [*drawn, *[torch.ones_like(drawn[0])] * (n - len(drawn))]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = [
        wide[0] @ w.double().t() + (0.7 / (1 - p)) * (wide[0] * mask) @ a.t() @ b.t()
        for w, mask, p, a, b in zip(weights, masks, ps, wide[1 : 1 + n], wide[1 + n :])
    ]
    expected += torch.autograd.grad(expected, wide, [d_y.double() for d_y in d_ys])
    for each, truth in zip(actual, expected, strict=True):
        assert_close(each, truth.detach(), 1e-6 if dtype == FP32 else 2e-2 if dtype == BF16 else 3e-3)


def test_masks_are_random_and_differ():
    x = torch.ones(300, 200, dtype=BF16, device=DEVICE)

    def draw(seed: int, p: float) -> Tensor:
        torch.manual_seed(seed)
        return as_bools(lora_dropout.draw_masks(x, p, 3, 8), 200)

    masks = draw(0, 0.3)
    assert torch.equal(draw(0, 0.3), masks) and not torch.equal(draw(1, 0.3), masks)
    # 60,000 elements a mask: a standard deviation of 0.0019.
    assert ((masks.float().mean((1, 2)) - 0.7).abs() < 0.008).all()
    assert ((masks.float().mean((0, 1)) - 0.7).abs() < 0.08).all()
    # Independent of the other masks, of the next row, of the next column, and of the next bit.
    apart = [
        (masks, masks.roll(shift, dims))
        for shift, dims in ((1, 0), (1, 1), (1, 2), (16, 2), (128, 2), (8, 1))
    ]
    assert all(((a & b).float().mean() - 0.49).abs() < 0.01 for a, b in apart)
    assert torch.cat([draw(0, 0.05), draw(1, 0.05)]).float().mean().item() == pytest.approx(0.95, abs=0.003)
    assert draw(0, 1e-6).all()


def test_the_generator_moves_on():
    x = torch.ones(4, 64, dtype=BF16, device=DEVICE)
    torch.manual_seed(0)
    first, second = (lora_dropout.draw_masks(x, 0.5, 1, 8) for _ in range(2))
    assert not torch.equal(first, second)


def test_more_elements_than_32_bits_count(monkeypatch):
    """Offsets of masks and rows of x are computed with 64 bits: the strides of a view reach far."""
    if TWINS:
        pytest.skip("of the kernels")
    from logitless.layers import lora_dropout_triton

    seen = {}
    monkeypatch.setattr(lora_dropout_triton, "multiprocessors", lambda device: seen.setdefault("n", 1))
    x = randn(200, 130, seed=0, dtype=BF16)
    masks = lora_dropout.draw_masks(x, 0.5, 2, 4)
    d_h = randn(200, 8, seed=1, dtype=BF16)
    actual = lora_dropout.weight_gradient(d_h, x, masks, FP32)
    kept = as_bools(masks, 130)
    expected = [part.double().t() @ (x.double() * m) for part, m in zip(d_h.chunk(2, 1), kept)]
    assert seen and actual.dtype == FP32
    assert_close(actual, torch.cat(expected), 1e-5)
