"""The cases that tests of several losses share: dtypes, ragged shapes, what is trainable, operands and
covering arrays."""

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from allpairspy import AllPairs

from tests.support import DEVICE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

# Shape of the targets, H and V.
SHAPES = {
    "1": ((1,), 16, 1000),
    "7": ((7,), 8, 17),
    "129": ((129,), 24, 1000),
    "3x1x43": ((3, 1, 43), 8, 17),
    "2x3": ((2, 3), 8, 50257),
}

TRAINABLE = {
    "all": ("hidden", "weight", "bias"),
    "hidden": ("hidden",),
    "head": ("weight", "bias"),
    "all but weight": ("hidden", "bias"),
    "nothing": (),
}

one_row_warning = pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")


def operands(
    shape: tuple[int, ...],
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    ignored: float = 0.0,
):
    """Hidden states, head, targets and bias whose logits have a standard deviation of about 2."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    h = torch.randn(*shape, hidden, generator=generator, device=DEVICE).to(dtype)
    w = (torch.randn(vocab, hidden, generator=generator, device=DEVICE) * 2 / hidden**0.5).to(dtype)
    b = torch.randn(vocab, generator=generator, device=DEVICE).to(dtype)
    targets = torch.randint(vocab, shape, generator=generator, device=DEVICE)
    order = torch.randperm(targets.numel(), generator=generator, device=DEVICE)
    targets.view(-1)[order[: round(ignored * targets.numel())]] = -100
    return h, w, targets, b


def trained(trainable: str, h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Switches requires_grad on for the operands that `TRAINABLE[trainable]` names, and returns those."""
    named = {"hidden": h, "weight": w, "bias": b}
    return [named[name].requires_grad_() for name in TRAINABLE[trainable]]


def usually(usual: Iterable, values: Iterable) -> list:
    """The values as parameters, of which all but the usual ones are left out on a CPU without --all."""
    usual = tuple(usual)
    return [pytest.param(x, marks=[] if x in usual else pytest.mark.repeats) for x in values]


def covering(cases: Sequence[set]) -> list[int]:
    """Numbers of cases in which every value of the cases occurs: few, by a greedy search."""
    missing, actual = set().union(*cases), []
    while missing:
        actual.append(max(range(len(cases)), key=lambda number: len(cases[number] & missing)))
        missing -= cases[actual[-1]]
    return sorted(actual)


def covering_array(
    factors: dict[str, list], has_effect: Callable[[dict], bool], *, repeats: bool = False
) -> list:
    """Cases in which every pair of values of two factors occurs; each has a seed, and an id that names what
    is switched on.

    Args:
        factors: values by name of the factor.
        has_effect: tells of a case, which may be partial, whether its values can all matter together.
        repeats: mark the cases all of whose values earlier cases have.
    """
    names, off = list(factors), ("", None, False, 1.0)
    pairs = AllPairs(list(factors.values()), filter_func=lambda values: has_effect(dict(zip(names, values))))
    cases, seen = [], set()
    for seed, values in enumerate(pairs):
        case = dict(zip(names, values))
        occurring = {f"{name}={value}" for name, value in case.items()}
        marks = [pytest.mark.repeats] if repeats and occurring <= seen else []
        seen |= occurring
        named = [
            # Every process of a run must have the same ids: of a function its name, not its address.
            name if value is True else f"{name}={getattr(value, '__name__', value)}"
            for name, value in case.items()
            if value is True or value not in off
        ]
        cases.append(pytest.param({**case, "seed": seed}, id=" ".join(named), marks=marks))
    return cases
