"""Numbers of the whole vocabulary from those of its shards, against plain PyTorch on all logits in fp64.

Each case runs as this device has it: the kernel on a GPU and in Triton's interpreter, else the twin.
"""

import pytest
import torch
from torch import Tensor

from logitless.kernels.head.cross_entropy import (
    TokenBuffers,
    allocate_stats,
    logprob_gradient,
    token_statistics,
)
from logitless.kernels.head.shards import merge_gradient, merge_stats
from logitless.kernels.head.transform import LogitTransform
from tests.cases import covering_array
from tests.kernels.support import DEVICE, TWINS

LEVELS = {
    "logps": (),
    "entropy": ("entropy",),
    "sums": ("sum_logits",),
    "squares": ("log_sum_sq_probs",),
}
SIZES = {"one": (40,), "two": (30, 17), "five": (3, 20, 1, 9, 14)}
HEADS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(None, -0.6, 1.3),
    "softcap": LogitTransform(4.0, 1.5, 0.7),
}
IGNORED = -100
# What is done within a shard; the row kernels' twins lose the digits of confident tokens, in fp32 soon.
WITHIN = torch.float64 if TWINS else torch.float32


def to_local_ids(targets: Tensor, start: int, width: int) -> Tensor:
    inside = (targets >= start) & (targets < start + width)
    return torch.where(targets == IGNORED, IGNORED, torch.where(inside, targets - start, width))


def problem(sizes: tuple[int, ...], C: int = 9) -> tuple[Tensor, Tensor]:
    """Products (C, V) and targets."""
    generator = torch.Generator().manual_seed(len(sizes))
    products = torch.randn(C, sum(sizes), generator=generator) * 3
    targets = torch.randint(0, sum(sizes), (C,), generator=generator)
    targets[::7] = IGNORED
    products[3, targets[3]] = 30.0  # a confident token
    products[5] = -40.0
    products[5, targets[5]] = 60.0
    return products.to(DEVICE), targets.to(DEVICE)


def combined(products, targets, sizes, level="entropy", transform=HEADS["plain"], *, write=False):
    """(numbers, gradient of log p by the product) as every rank finds them."""
    C, bounds = len(targets), [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
    numbers, gradients, factors, columns = [], [], [], []
    for start, width in zip(bounds, sizes):
        logits = products[:, start : start + width].to(WITHIN, copy=True).contiguous()
        columns.append(to_local_ids(targets, start, width))
        out = allocate_stats(LEVELS[level], C, WITHIN, DEVICE)
        options = {"transform": transform, "ignore_index": IGNORED}
        if write:
            factors.append(logprob_gradient(logits, columns[-1], out, gradient=logits, **options).float())
            gradients.append(logits.float())
        else:
            token_statistics(logits, columns[-1], out, **options)
        out.lse_residual += out.lse - out.lse.float()  # what the next line rounds away
        numbers.append(torch.stack([x.float() for _, x in out.items()]))
    shards, actual = torch.stack(numbers), []
    for rank in range(len(sizes)):
        out = allocate_stats(LEVELS[level], C, torch.float32, DEVICE)
        options = {"rank": rank, "ignore_index": IGNORED}
        if write:
            options |= {"gradient": gradients[rank], "factor": factors[rank], "transform": transform}
            gradients[rank] *= merge_gradient(shards, columns[rank], out, **options)[:, None]
        else:
            merge_stats(shards, columns[rank], out, **options)
        actual.append(out)
    for out in actual[1:]:
        assert all(torch.equal(x, getattr(actual[0], name)) for name, x in out.items())
    return actual[0], torch.cat(gradients, 1) if write else None


def truth(products: Tensor, targets: Tensor, transform: LogitTransform) -> tuple[TokenBuffers, Tensor]:
    x = products.double().requires_grad_()
    z, rows = transform.logits(x)[0], targets != IGNORED
    log_p, index = z.log_softmax(1), targets.clamp(min=0)[:, None]
    logps = log_p.gather(1, index)[:, 0]
    (gradient,) = torch.autograd.grad((logps * rows).sum(), x)
    p, z, log_p, logps = log_p.exp().detach(), z.detach(), log_p.detach(), logps.detach()
    actual = TokenBuffers(
        logps=logps,
        lse=z.logsumexp(1),
        entropy=-(p * log_p).sum(1),
        sum_logits=z.sum(1),
        log_sum_sq_probs=(2 * log_p).logsumexp(1),
        is_top1=(z.argmax(1) == targets).double(),
    )
    return TokenBuffers(**{name: x * rows for name, x in actual.items()}), gradient


FACTORS = {"level": list(LEVELS), "sizes": list(SIZES), "transform": list(HEADS)}


@pytest.mark.parametrize("case", covering_array(FACTORS, lambda case: True, repeats=True))
def test_equals_the_whole(case):
    level, sizes, transform = case["level"], SIZES[case["sizes"]], HEADS[case["transform"]]
    products, targets = problem(sizes)
    expected, d_products = truth(products, targets, transform)
    actual, _ = combined(products, targets, sizes, level, transform)
    actual.lse = actual.lse.double() + actual.lse_residual
    assert (actual.lse - expected.lse).abs().max() < 6e-7
    for name, x in actual.items():
        if name != "lse_residual":
            error, size = x.double() - getattr(expected, name), 1 + getattr(expected, name).abs()
            assert (error.abs() / size).max() < (1e-5 if name == "sum_logits" else 3e-6), name
    _, gradient = combined(products, targets, sizes, level, transform, write=True)
    assert (gradient.double() - d_products).norm() < 3e-6 * d_products.norm()


def test_rows_of_two_programs():
    products, targets = problem(SIZES["two"], C=131)
    expected, d_products = truth(products, targets, LogitTransform())
    actual, gradient = combined(products, targets, SIZES["two"], "logps", write=True)
    assert (actual.logps.double() - expected.logps).abs().max() < 1e-4
    assert (gradient.double() - d_products).norm() < 3e-6 * d_products.norm()


@pytest.mark.parametrize("level", ["logps", "entropy"])
def test_confident_tokens_keep_their_digits(level):
    """One logit far above all others, which are 0."""
    _, targets = problem(SIZES["five"])
    C, targets = len(targets), targets.clamp(min=0)
    above = torch.linspace(5, 20 if TWINS else 45, C, device=DEVICE)
    products = torch.zeros(C, 47, device=DEVICE).scatter_(1, targets[:, None], above[:, None])
    actual, gradient = combined(products, targets, SIZES["five"], level, write=True)
    expected = -torch.log1p(46 * torch.exp(-above.double()))
    own = gradient.gather(1, targets[:, None])[:, 0].double()
    assert ((actual.logps.double() - expected) / expected).abs().max() < 1e-5
    assert ((own + torch.expm1(expected)) / torch.expm1(expected)).abs().max() < 1e-5


def test_the_first_of_equal_logits_wins():
    sizes = (3, 3, 3)
    products = torch.zeros(3, 9, device=DEVICE)
    products[:, [1, 4, 5, 8]] = 2.0
    actual, _ = combined(products, torch.tensor([1, 4, 8], device=DEVICE), sizes)
    assert actual.is_top1.tolist() == [1.0, 0.0, 0.0]


def test_a_shard_without_a_share():
    """Its logits are so far below that its probability is 0, be the target among them or not."""
    sizes, products = (3, 4), torch.randn(5, 7).to(DEVICE)
    products[0, :3], products[1, 3:], products[4, :3] = -1e4, -200.0, -1e3
    targets = torch.tensor([4, 1, 2, 6, 1], device=DEVICE)
    expected, d_products = truth(products, targets, LogitTransform())
    actual, gradient = combined(products, targets, sizes, write=True)
    for name in ("logps", "lse", "entropy"):
        error = (getattr(actual, name).double() - getattr(expected, name)).abs()
        assert (error / (1 + getattr(expected, name).abs())).max() < 1e-6, name
    assert (gradient.double() - d_products).abs().max() < 1e-6
