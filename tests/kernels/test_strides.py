"""Every pointer that a launcher hands over, as indexing leaves it: `x[:, 0]`, `x[1:-1]`, one number expanded.

No layout changes a result, with every option switched on and with none, as twins and as kernels. All operands
change at once, each to a stride that no other one has.
"""

import functools

import pytest
import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import (
    TokenBuffers,
    allocate_stats,
    logits_gradient,
    logprob_gradient,
    token_statistics,
)
from logitless.kernels.head.divergence import fused_divergence, sharded_divergence
from logitless.kernels.head.scale import scale
from logitless.kernels.head.statistics import DIFFERENTIABLE
from logitless.kernels.head.transform import LogitTransform
from logitless.kernels.matmul import accumulate, hidden_gradient, project
from tests.cases import covering_array
from tests.kernels.support import DEVICE, Random, expanded, offset, poisoned, strided

C, V, H, IGNORED = 6, 37, 5, -7
HEAD, TEACHER_HEAD = LogitTransform(6.0, 0.8, 1.3), LogitTransform(None, 1.2, 1.0)
# Of gradients, beside logits in fp32, and of the matrices of a product.
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LAYOUTS = ["strided", "offset", "expanded, even", "expanded, odd"]
layouts = pytest.mark.parametrize("layout", LAYOUTS)
triton_runs = uses_triton(DEVICE, torch.float32)
needs_triton = pytest.mark.skipif(not triton_runs, reason="no Triton; the twins are functions of autograd")


def random(*shape: int, seed: int = 0) -> Tensor:
    return Random(seed).normal(*shape)


def operands(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Operands of all operators; a gradient is written in `dtype`."""
    x = {
        "logits": random(C, V) * 2,
        "teacher": random(C, V, seed=4) * 2,
        "targets": torch.tensor([3, 0, IGNORED, V - 1, 9, 1], device=DEVICE),
        "bias": random(V, seed=1),
        "teacher_bias": random(V, seed=8),
        "class_weights": random(V, seed=2).abs(),
        "factors": random(C, seed=3),
        "matrix": random(C, V, seed=5).to(dtype),
        "gradient": poisoned(C, V, dtype=dtype),
    }
    x |= {f"d {name}": random(C, seed=9 + i) for i, name in enumerate(DIFFERENTIABLE)}
    return x | dict(statistics(x, "entropy").items())


def laid_out(x: dict[str, Tensor], names: tuple, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The operands with those of `names` in a layout, and the same numbers without gaps.

    "expanded" changes the values; the operands beside an expanded one are strided.
    """
    changed = dict(x)
    for i, name in enumerate(names):
        if layout == "offset":
            changed[name] = offset(x[name])
        elif layout == "strided" or i % 2 == (layout == "expanded, odd"):
            changed[name] = strided(x[name], step=i + 2)
        else:
            changed[name] = expanded(x[name])
    plain = {key: value.clone(memory_format=torch.contiguous_format) for key, value in changed.items()}
    return changed, plain


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        if x is None:  # not asked for
            assert expected[name] is None
            continue
        # Not the same bits: a compiler may contract other products and sums where addresses are not aligned.
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if x.dtype == torch.float32 else {}
        torch.testing.assert_close(x, expected[name], msg=name, **tolerance)


def statistics(x: dict[str, Tensor], *names: str) -> TokenBuffers:
    stats = allocate_stats(names, C, torch.float32, DEVICE)
    options = {"class_weights": x["class_weights"]} if "sum_logits" in names else {}
    token_statistics(
        x["logits"], x["targets"], stats, transform=HEAD, bias=x["bias"], ignore_index=IGNORED, **options
    )
    return stats


def single_pass(x: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    stats, gradient = allocate_stats(names, C, torch.float32, DEVICE), x["gradient"].clone()
    options = {"gradient": gradient, "transform": HEAD, "bias": x["bias"], "ignore_index": IGNORED}
    row_scale = logprob_gradient(x["logits"], x["targets"], stats, **options)
    return {"gradient": gradient, "row_scale": row_scale, **dict(stats.items())}


def gradient_of(x: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    gradient = x["gradient"].clone()
    stats = TokenBuffers(**{name: x[name] for name in ("logps", "lse", "lse_residual", "entropy")})
    grads = TokenBuffers(**{name: x[f"d {name}"] for name in names})
    options = {name: x[name] for name in ("bias", "class_weights")} | {
        "transform": HEAD,
        "ignore_index": IGNORED,
    }
    logits_gradient(x["logits"], x["targets"], stats, grads, gradient=gradient, **options)
    return {"gradient": gradient}


def gradient_operands(*names: str) -> tuple[str, ...]:
    return "targets", "bias", "logps", "lse", "lse_residual", *(f"d {name}" for name in names)


# Operators, and the operands that change.
VECTORS = ("targets", "bias", "class_weights")
OPERATORS = {
    "statistics": (lambda x: dict(statistics(x).items()), VECTORS),
    "statistics, entropy": (lambda x: dict(statistics(x, "entropy").items()), VECTORS),
    "statistics, sum_logits": (lambda x: dict(statistics(x, "sum_logits").items()), VECTORS),
    "single pass": (single_pass, ("targets", "bias")),
    "single pass, entropy": (lambda x: single_pass(x, "entropy"), ("targets", "bias")),
    "d logps": (lambda x: gradient_of(x, "logps"), gradient_operands("logps")),
    "d lse": (lambda x: gradient_of(x, "logps", "lse"), gradient_operands("logps", "lse")),
    "d everything": (
        lambda x: gradient_of(x, *DIFFERENTIABLE),
        (*gradient_operands(*DIFFERENTIABLE), "class_weights", "entropy"),
    ),
    "scale": (lambda x: {"scaled": scale(x["matrix"], x["factors"], x["gradient"])}, ("matrix", "factors")),
}


@pytest.mark.each_value
@layouts
@dtypes
@pytest.mark.parametrize(("call", "names"), OPERATORS.values(), ids=OPERATORS)
def test_operators(call, names, dtype, layout):
    changed, plain = laid_out(operands(dtype), names, layout)
    same(call(changed), call(plain))


DIVERGENCES = {"jsd": 0.3, "forward_kl": 0.5, "reverse_kl": 0.5}


class Alone:
    """The only rank of its group."""

    width = V

    def merge_stats(self, stats: TokenBuffers, columns: Tensor) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def best_id(self, values: Tensor, columns: Tensor) -> Tensor:
        return columns


def divergence_of(
    x: dict[str, Tensor], divergence: str, *, write: bool, ranks: Alone | None = None
) -> dict[str, Tensor]:
    gradient = poisoned(C, V, dtype=torch.float32) if write else None
    call = fused_divergence if ranks is None else functools.partial(sharded_divergence, ranks=ranks)
    actual = call(
        x["logits"],
        x["teacher"],
        x["targets"],
        x["factors"] if write else None,
        gradient=gradient,
        divergence=divergence,
        beta=DIVERGENCES[divergence],
        hard_weight=0.4,
        transform=HEAD,
        teacher_transform=TEACHER_HEAD,
        bias=x["bias"],
        teacher_bias=x["teacher_bias"],
    )
    return actual._asdict() | ({"gradient": gradient} if write else {})


# Matrices of which a kernel knows the distance of rows: each row a part of a longer one, all rows the same
# one.
ROWS = {
    "wide": lambda x: torch.cat((x, x * torch.nan), dim=1)[:, : x.shape[1]],
    "one": lambda x: x[:1].expand(x.shape),
}
FACTORS = {
    "layout": LAYOUTS,
    "rows of logits": [None, *ROWS],
    "rows of the teacher": [None, *ROWS],
    "divergence": list(DIVERGENCES),
    "write": [True, False],
    "shard": [False, True],
}


@needs_triton
@pytest.mark.parametrize("case", covering_array(FACTORS, lambda case: True, repeats=True))
def test_divergence(case):
    names = ("targets", "factors", "bias", "teacher_bias")
    changed, plain = laid_out(operands(), names, case["layout"])
    for name, rows in (("logits", case["rows of logits"]), ("teacher", case["rows of the teacher"])):
        if rows:
            changed[name] = ROWS[rows](changed[name])
            plain[name] = changed[name].clone(memory_format=torch.contiguous_format)
    ranks = Alone() if case["shard"] else None
    actual, expected = (
        divergence_of(x, case["divergence"], write=case["write"], ranks=ranks) for x in (changed, plain)
    )
    same(actual, expected)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_of_logits(rows):
    def call(x: dict[str, Tensor]) -> dict[str, Tensor]:
        stats = statistics(x, "sum_logits")
        grads = TokenBuffers(**{name: x["factors"] for name in DIFFERENTIABLE})
        wide = poisoned(C, 2 * V, dtype=torch.float32)
        options = {"transform": HEAD, "bias": x["bias"], "ignore_index": IGNORED}
        logits_gradient(x["logits"], x["targets"], stats, grads, gradient=wide[:, :V], **options)
        assert wide[:, V:].isnan().all()
        return {"gradient": wide[:, :V], **dict(stats.items())}

    x = operands()
    changed = x | {"logits": rows(x["logits"])}
    same(
        call(changed),
        call(changed | {"logits": changed["logits"].clone(memory_format=torch.contiguous_format)}),
    )


@needs_triton
@pytest.mark.parametrize("operand", ["logits", "gradient", "student", "teacher"])
def test_rows_with_gaps_are_refused(operand):
    x = operands()
    gaps = random(V, C).t()
    stats = statistics(x)
    with pytest.raises(
        ValueError,
        match=rf"^{operand}: expected contiguous rows \(a last stride of 1\), got strides \(1, 6\); ",
    ):
        if operand in ("student", "teacher"):
            divergence_of(x | {"logits" if operand == "student" else operand: gaps}, "jsd", write=True)
        else:
            matrices = {name: gaps if name == operand else x["logits"] for name in ("logits", "gradient")}
            grads = TokenBuffers(logps=x["factors"])
            logits_gradient(
                matrices["logits"], x["targets"], stats, grads, gradient=matrices["gradient"], transform=HEAD
            )


@needs_triton
def test_numbers_with_gaps_are_not_written():
    x, numbers = operands(), poisoned(C, 3, 2, dtype=torch.float32)[..., 0].unbind(1)
    stats = TokenBuffers(**dict(zip(("logps", "lse", "lse_residual"), numbers, strict=True)))
    with pytest.raises(ValueError, match="^logps: expected a contiguous tensor to write to, got strides"):
        token_statistics(x["logits"], x["targets"], stats, transform=HEAD, ignore_index=IGNORED)


@layouts
@dtypes
def test_products(dtype, layout):
    def call(x: dict[str, Tensor]) -> list[Tensor]:
        logits, d_hidden = poisoned(C, V, dtype=dtype), poisoned(C, H, dtype=dtype)
        total = poisoned(V, H, dtype=torch.float32)
        project(x["hidden"], x["weight"], logits)
        hidden_gradient(x["d_logits"], x["weight"], d_hidden)
        for first in (True, False):
            accumulate(total, x["d_logits"], x["hidden"], first=first)
        return [logits, d_hidden, total]

    x = {"hidden": random(C, H), "weight": random(V, H, seed=1), "d_logits": random(C, V, seed=2)}
    changed, plain = laid_out({name: value.to(dtype) for name, value in x.items()}, tuple(x), layout)
    # A matrix product may add up in another order.
    torch.testing.assert_close(
        call(changed), call(plain), rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5
    )


@dtypes
@pytest.mark.parametrize("operand", ["bias", "class_weights"])
def test_wider_vectors_count_in_the_dtype_of_the_arithmetic(operand, dtype):
    """fp64 bias and class weights beside fp32 logits are rounded to fp32 by twins and kernels alike."""

    def call(x: dict[str, Tensor]) -> dict[str, Tensor]:
        x = x | dict(statistics(x, "sum_logits", "entropy").items())
        actual = gradient_of(x, *DIFFERENTIABLE) | {name: x[name] for name in ("logps", "sum_logits")}
        return actual | (divergence_of(x, "jsd", write=True) if triton_runs else {})

    x = operands(dtype)
    exact = x[operand].double() + 1e-9
    actual, expected = call(x | {operand: exact}), call(x | {operand: exact.float()})
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_fp64_logits_keep_the_digits_of_fp64_vectors():
    x = {name: x.double() if x.is_floating_point() else x for name, x in operands().items()}
    exact = {"bias": x["bias"] + 1e-12, "class_weights": x["class_weights"] * (1 + 1e-12)}

    def sums(vectors: dict[str, Tensor]) -> Tensor:
        stats = allocate_stats(("sum_logits",), C, torch.float64, DEVICE)
        token_statistics(
            x["logits"], x["targets"], stats, transform=LogitTransform(), ignore_index=IGNORED, **vectors
        )
        return stats.sum_logits

    kept = x["targets"] != IGNORED
    for name, vector in exact.items():
        vectors = {key: x[key] for key in exact} | {name: vector}
        truth = ((x["logits"] + vectors["bias"]) * vectors["class_weights"]).sum(1)
        assert torch.allclose(sums(vectors)[kept], truth[kept], rtol=1e-15, atol=1e-14)
        assert not torch.equal(sums(vectors), sums({key: x[key] for key in exact}))
