"""Operands as they come out of indexing: `labels[:, -1]`, `bias[::2]`, one number expanded to many. No layout
changes a result.

Triton kernels see addresses and not strides, so this file goes through them where it can: on a GPU, or with
TRITON_INTERPRET=1.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from logitless import CrossEntropyLoss, DPOLoss, GRPOLoss, JSDLoss, linear_logprobs
from tests.kernels.support import expanded, offset, strided
from tests.support import DEVICE

B, T, H, V = 4, 6, 8, 50
TRAINED = ("hidden", "weight", "bias")
LAYOUTS = {"strided": strided, "offset": offset, "expanded": expanded}


@pytest.fixture(autouse=True)
def uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


def inputs() -> dict[str, Tensor]:
    """Whatever one of the losses takes, all of it contiguous."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    targets = torch.randint(V, (B, T), generator=generator, device=DEVICE)
    mask = torch.rand(B, T, generator=generator, device=DEVICE) < 0.8
    mask[:, :2] = True
    return {
        "hidden": random(B, T, H),
        "weight": random(V, H) / 2,
        "bias": random(V),
        "targets": targets,
        "class_weights": random(V).abs(),
        "token_weights": random(B, T).abs(),
        "mask": mask,
        "advantages": random(B, T),
        "old_logps": random(B, T) / 4 - 4,
        "ref_logps": random(B, T) / 4 - 4,
        "teacher_hidden": random(B, T, H),
        "teacher_weight": random(V, H) / 2,
        "teacher_bias": random(V),
    }


def logprobs(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    found = linear_logprobs(x["hidden"], x["weight"], x["targets"], bias=x["bias"], entropy=True)
    return (
        (found.logps.exp() - 0.1 * found.entropy + 0.01 * found.lse.square()).sum(),
        found.logps,
        found.entropy,
    )


def on(loss, *names: str) -> Callable[[dict[str, Tensor]], tuple[Tensor, ...]]:
    """A call of `loss` with the inputs `names` beside the usual ones."""

    def call(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        out = loss(
            x["hidden"], x["weight"], x["targets"], bias=x["bias"], **{name: x[name] for name in names}
        )
        return out.loss.sum(), out.loss, *out.metrics.values()

    call.names = (*TRAINED, "targets", *names)
    return call


logprobs.names = (*TRAINED, "targets")
WEIGHTS = ("class_weights", "token_weights")
TEACHER = ("teacher_hidden", "teacher_weight", "teacher_bias")
CALLS = {
    "cross-entropy": on(CrossEntropyLoss(), *WEIGHTS),
    "cross-entropy, all rows": on(CrossEntropyLoss(compact=False), *WEIGHTS),
    "smoothed": on(CrossEntropyLoss(label_smoothing=0.2, z_loss=0.1, softcap=5.0), *WEIGHTS),
    "per token": on(CrossEntropyLoss(label_smoothing=0.2, reduction="none"), *WEIGHTS),
    "logprobs": logprobs,
    "DPO": on(DPOLoss(), "ref_logps"),
    "GRPO": on(GRPOLoss(beta=0.1, entropy_coef=0.01), "advantages", "mask", "old_logps", "ref_logps"),
    "JSD": on(JSDLoss(hard_loss_weight=0.2), "mask", *TEACHER),
}
# Each operand apart, so that no second fault hides the first.
CASES = [
    pytest.param(name, operand, id=f"{name}: {operand}")
    for name, call in CALLS.items()
    for operand in call.names
]


def outcome(name: str, given: dict[str, Tensor]) -> list[Tensor]:
    """Everything a call returns, and its gradients."""
    leaves = given | {key: given[key].detach().requires_grad_() for key in TRAINED}
    value, *others = CALLS[name](leaves)
    return [
        value.detach(),
        *(x.detach() for x in others),
        *torch.autograd.grad(value, [leaves[key] for key in TRAINED]),
    ]


@functools.cache
def usual_outcome(name: str) -> list[Tensor]:
    return outcome(name, inputs())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "operand"), CASES)
def test_layouts(name, operand, layout):
    x = inputs()
    x[operand] = LAYOUTS[layout](x[operand])
    plain = x | {operand: x[operand].clone(memory_format=torch.contiguous_format)}
    expected_of = (
        usual_outcome(name) if torch.equal(plain[operand], inputs()[operand]) else outcome(name, plain)
    )
    for found, expected in zip(outcome(name, x), expected_of, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
