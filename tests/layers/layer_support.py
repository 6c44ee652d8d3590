"""What the tests of norm, rope and gated share: an operator's results and gradients, and their errors."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.kernels.support import DEVICE
from tests.support import assert_close, relative_error

EPS = 1e-3  # large enough that forgetting it shows


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that bf16 holds, so that operands and gradients are the same in every dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(dtype).to(DEVICE)


def outcome(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    operands: dict[str, Tensor | None],
    *,
    dtype: torch.dtype | None = None,  # of the operands; None leaves each as it is
    frozen: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Results of `function(**operands)` and the gradients of its operands, for random upstream gradients."""
    leaves = {
        name: x if x is None else x.detach().clone().to(dtype or x.dtype).requires_grad_(name not in frozen)
        for name, x in operands.items()
    }
    results = function(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    actual = {f"result {i}": result.detach() for i, result in enumerate(results)}
    torch.autograd.backward(
        results, [randn(*y.shape, seed=i, dtype=y.dtype) for i, y in enumerate(results, 100)]
    )
    return actual | {f"d_{name}": x.grad for name, x in leaves.items() if x is not None and x.requires_grad}


def plain_rms_norm(x: Tensor, weight: Tensor | None, rounding: str) -> Tensor:
    """Zhang and Sennrich, equation 4, with Gemma's weight around zero."""
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)
    if weight is None:
        return x
    return x * (1 + weight) if rounding == "gemma" else x * weight


def assert_as_good(actual: dict[str, Tensor], truth: dict[str, Tensor], stock: dict[str, Tensor]) -> None:
    """The 2x-naive rule; in half precision, where its 8 eps are 6%, the stock module's error as well."""
    assert set(actual) == set(truth) == set(stock)
    for name in truth:
        assert_close(actual[name], truth[name], stock[name], name=name)
        # The error of a handful of roundings is a lottery.
        if actual[name].dtype == torch.float32 or truth[name].numel() < 24:
            continue
        error, allowed = relative_error(actual[name], truth[name]), relative_error(stock[name], truth[name])
        assert error <= 1.2 * allowed + 1e-6, (
            f"{name}: relative error {error:.2e}, the stock module's is {allowed:.2e}"
        )


def strided(x: Tensor, kind: str) -> Tensor:
    """The numbers of `x` with other strides."""
    match kind:
        case "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        case "every other":
            wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device)
            wide[..., ::2] = x
            return wide[..., ::2]
        case "sliced":
            # Rows with a gap between them, from an odd offset: nothing is aligned.
            wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
            wide[..., 1:-2] = x
            return wide[..., 1:-2]
    raise ValueError(kind)


STRIDES = ("transposed", "every other", "sliced")
