"""Dropout of LoRA projections: products with masks against fp64, and the masks themselves."""

from types import SimpleNamespace

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
    return (masks[..., col // 8] >> (col % 8)) % 2 == 1


def draw_masks(x: Tensor, p: float, count: int) -> Tensor:
    """The masks (count, N, K) of a projection of x, of bools."""
    a = torch.zeros(8 * count, x.shape[1], dtype=x.dtype, device=x.device)
    out = x.new_empty(x.shape[0], 8 * count)
    return as_bools(lora_dropout.project(x, p, count, a, 1.0, out), x.shape[1])


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
    project = lora_dropout.project

    def draw(x, p, count, a, scale, out):
        masks = project(x, p, count, a, scale, out)
        is_for_kernels = not TWINS and a.shape[0] // count <= 128 and dtype != FP32
        assert masks.dtype == (torch.uint8 if is_for_kernels else torch.bool)
        drawn.extend(as_bools(masks, columns))
        return masks

    monkeypatch.setattr(lora_dropout, "project", draw)
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
    x = torch.ones(100, 200, dtype=BF16, device=DEVICE)

    def draw(seed: int, p: float) -> Tensor:
        torch.manual_seed(seed)
        return draw_masks(x, p, 3)

    masks = draw(0, 0.3)
    assert torch.equal(draw(0, 0.3), masks) and not torch.equal(draw(1, 0.3), masks)
    # 20,000 elements a mask: a standard deviation of 0.0032.
    assert ((masks.float().mean((1, 2)) - 0.7).abs() < 0.013).all()
    assert ((masks.float().mean((0, 1)) - 0.7).abs() < 0.12).all()
    # Independent of the other masks, of the next row, of the next column, and of the next bit.
    apart = [
        (masks, masks.roll(shift, dims))
        for shift, dims in ((1, 0), (1, 1), (1, 2), (16, 2), (128, 2), (8, 1))
    ]
    assert all(((a & b).float().mean() - 0.49).abs() < 0.016 for a, b in apart)
    assert torch.cat([draw(0, 0.05), draw(1, 0.05)]).float().mean().item() == pytest.approx(0.95, abs=0.004)
    assert draw(0, 1e-6).all()


def test_the_generator_moves_on():
    x = torch.ones(4, 64, dtype=BF16, device=DEVICE)
    torch.manual_seed(0)
    first, second = (draw_masks(x, 0.5, 1) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("trains", ["A", "x"])
def test_gradients_of_one_operand(trains):
    x, a, b, w = (
        randn(*size, seed=i, dtype=BF16) for i, size in enumerate([(40, 136), (4, 136), (8, 4), (8, 136)])
    )
    leaf = (a if trains == "A" else x).requires_grad_()
    layer = lora.LoraProjection(w, None, a, b, 0.7, 0.25)
    both = [leaf, b.requires_grad_()]
    torch.manual_seed(0)
    (result,) = lora.apply_projections(x, [layer])
    torch.manual_seed(0)
    (mask,) = draw_masks(x.detach(), 0.25, 1)
    wide = [each.detach().double().requires_grad_() for each in (x, a, b, w)]
    expected = wide[0] @ wide[3].t() + (0.7 / 0.75) * (wide[0] * mask) @ wide[1].t() @ wide[2].t()
    d_y = randn(40, 8, seed=9, dtype=BF16)
    expected = torch.autograd.grad(expected, [wide[1] if trains == "A" else wide[0], wide[2]], d_y.double())
    for each, truth in zip(torch.autograd.grad(result, both, d_y), expected, strict=True):
        assert_close(each, truth, 2e-2)


def test_pieces_of_rows_and_members(monkeypatch):
    """Gradients are sums over pieces of the rows; large ranks take a launch for some of the projections."""
    if TWINS:
        pytest.skip("of the kernels")
    from logitless.layers import lora_dropout_triton

    monkeypatch.setattr(lora_dropout_triton, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(lora_dropout_triton, "MAX_HEIGHT", 32)
    x, a, d_h = (
        randn(*size, seed=i, dtype=BF16) for i, size in enumerate([(200, 130), (12, 130), (200, 12)])
    )
    d_x = torch.full((200, 130), torch.nan, dtype=FP32, device=DEVICE)  # is overwritten
    masks = lora_dropout.project(x, 0.5, 3, a, 1.0, torch.empty_like(d_h))
    parts = list(zip(d_h.chunk(3, 1), a.chunk(3), as_bools(masks, 130)))
    expected = sum(mask * (part.double() @ each.double()) for part, each, mask in parts)
    actual = lora_dropout.backward(d_h, x, d_x, masks, a, FP32)
    assert actual.dtype == FP32
    assert_close(d_x, expected, 1e-5)
    expected = [part.double().t() @ (x.double() * mask) for part, _, mask in parts]
    assert_close(actual, torch.cat(expected), 1e-5)


def test_rows_that_are_far_apart_are_copied():
    """Offsets within a block of rows have 32 bits."""
    if TWINS:
        pytest.skip("of the kernels")
    from logitless.layers.lora_dropout_triton import _strided

    x = torch.zeros(2**24 + 136, dtype=BF16, device=DEVICE)
    for stride, expected in ((2**24, 2**24), (2**24 + 8, 128)):
        rows = x.as_strided((2, 128), (stride, 1))
        copied, copied_stride = _strided(rows)
        assert torch.equal(copied, rows) and copied_stride == copied.stride(0) == expected


def test_random_numbers_of_the_host(monkeypatch):
    """With the seed and the offset of a generator as numbers, masks are those of a seed on the device."""
    if TWINS:
        pytest.skip("of the kernels")
    from logitless.layers import lora_dropout_triton

    x = torch.ones(40, 200, dtype=BF16, device=DEVICE)
    halves = lora_dropout_triton._halves

    def draw(seed: int, offset: tuple[int, int], count: int, *, on_host: bool = True) -> Tensor:
        number = None if on_host else torch.tensor(seed, device=DEVICE)
        state = number, *halves(seed if on_host else 0), *offset
        monkeypatch.setattr(lora_dropout_triton, "_random_state", lambda x, count: state)
        return draw_masks(x, 0.5, count)

    seed = 2**63 - 2**31 - 5
    first = draw(seed, (0, 0), 2)
    assert torch.equal(first, draw(seed, (0, 0), 2, on_host=False))
    assert torch.equal(first[1], draw(seed, (1, 0), 1)[0])  # a mask is an offset
    others = [(seed + 1, (0, 0)), (seed + 2**32, (0, 0)), (seed, (0, 1)), (seed, (2**31 - 1, 0))]
    others = [draw(*state, 1) for state in others]
    assert all(((first[0] == each).float().mean() - 0.5).abs() < 0.05 for each in others)


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32 with 7 rounds, from the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(7):
        (high0, low0), (high2, low2) = divmod(0xD2511F53 * c0, 2**32), divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def test_masks_are_comparisons_of_random_numbers(monkeypatch):
    """Each element has a number of 16 bits; those of eight columns share 128 random bits."""
    if TWINS:
        pytest.skip("of the kernels")
    from logitless.layers import lora_dropout_triton

    monkeypatch.setattr(lora_dropout_triton, "_random_state", lambda x, count: (None, -7, 9, 2**31 - 1, 3))
    x = torch.ones(33, 136, dtype=BF16, device=DEVICE)
    member, row, col = torch.cartesian_prod(torch.arange(2), torch.arange(33), torch.arange(136)).T
    numbers = []
    for m, r, c in zip(member.tolist(), row.tolist(), col.tolist()):
        if c % 8 == 0:
            words = philox((r, c // 8, 2**31 - 1 + m, 3), (2**32 - 7, 9))
        bits = [words[k % 4] >> (8 * (k // 4) + c % 8) & 1 for k in range(16)]
        numbers.append(sum(bit << k for k, bit in enumerate(bits)))
    numbers = torch.tensor(numbers, device=DEVICE).view(2, 33, 136)
    for threshold in (1, 255, 256, 3277, 4096, 40000, 65535):
        assert torch.equal(draw_masks(x, threshold / 2**16, 2), numbers >= threshold), threshold


def test_a_generator_of_a_gpu_moves_on_by_four_for_each_mask(monkeypatch):
    if TWINS:
        pytest.skip("of the kernels")
    from logitless.layers.lora_dropout_triton import _random_state

    offsets = []
    generator = SimpleNamespace(
        get_offset=lambda: 4 * (2**31 + 5), set_offset=offsets.append, initial_seed=lambda: 2**64 - 2**31
    )
    monkeypatch.setattr(torch.cuda, "default_generators", [None, generator])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x = SimpleNamespace(device=torch.device("cuda", 1))
    assert _random_state(x, 3) == (None, -(2**31), -1, 5, 1)
    assert offsets == [4 * (2**31 + 8)]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs")
def test_a_graph_draws_new_masks_in_every_replay():
    x = torch.ones(40, 200, dtype=BF16, device=DEVICE)
    draw_masks(x, 0.5, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        masks = draw_masks(x, 0.5, 2)
    graph.replay()
    first = masks.clone()
    graph.replay()
    assert not torch.equal(first, masks)
