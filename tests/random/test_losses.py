"""Random calls of every loss against full logits in fp64."""

import contextlib
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from logitless import BudgetWarning
from tests.random.known import unknown
from tests.random.losses import FAMILIES, Family, depths
from tests.random.search import REPEATED, search
from tests.random.world import Case, Rounding, World
from tests.support import DEVICE, uncompiled

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# How often rounding is simulated, and what more it may be.
ROUNDINGS, SLACK = 3, 8
# Metrics that two nearly equal logits decide.
BY_RANK = ("token_accuracy", "agreement", "mean_token_accuracy", "is_top1", "predictions")


@st.composite
def cases(draw, name: str) -> Case:
    """A call of the loss that is defined."""
    family = FAMILIES[name]

    def maybe(value, otherwise):
        return draw(
            st.sampled_from((otherwise, otherwise, *(value if isinstance(value, tuple) else (value,))))
        )

    takes = family.takes
    options = draw(family.options)
    count = draw(st.integers(0, 3)) * max(1, family.group)
    lengths = draw(st.lists(st.sampled_from((3, 1, 2, 5, 7, 0)), min_size=count, max_size=count))
    dtype = maybe(DTYPES[1:], DTYPES[0])
    wide = torch.promote_types(dtype, torch.float32)
    layouts = ("padded", "packed", *(("flat",) if "flat" in takes else ()))
    layout = draw(st.sampled_from(layouts))
    trained = draw(
        st.sampled_from((("hidden", "weight", "bias"), ("hidden",), ("weight",), ("hidden", "bias"), ()))
    )
    options |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "ignore_index": st.sampled_from((-1, 0, 1000)),
                "reduction": st.sampled_from(("mean", *(r for r in ("sum", "none") if r in takes))),
                "softcap": st.sampled_from((4.0, 30.0)),
                "logit_scale": st.sampled_from((0.25, 3.0)),
                "temperature": st.sampled_from((0.5, 2.0)),
                "logits_budget": st.sampled_from((1, 1000, 2**20)),
                "accum_dtype": st.sampled_from((dtype, wide)),
                "logits_dtype": st.sampled_from((dtype, wide)),
                "compact": st.just(False),
            }
            | (
                {name: st.just(True) for name in ("return_logps", "return_predictions")}
                if "tokens" in takes
                else {}
            ),
        )
    )
    if not takes or name.startswith("linear"):
        options.pop("reduction", None)
    main = None
    if (
        "main" in takes
        and "weight" in trained
        and dtype != torch.float64
        and options.get("reduction") != "none"
    ):
        main = maybe(("add", "now"), None)
    case = Case(
        loss=name,
        options=options,
        inputs=draw(family.inputs),
        lengths=tuple(lengths),
        V=draw(st.sampled_from((7, 1, 2, 13, 61))),
        H=draw(st.sampled_from((3, 1, 2, 5, 7))),
        dtype=dtype,
        default_dtype=maybe(DTYPES[1:], DTYPES[0]),
        peak=draw(st.sampled_from((1.0, 0.125, 4.0, 16.0))),
        ignored=draw(st.sampled_from((0.0, 0.4, 1.0))),
        bias=draw(st.booleans()),
        mask=maybe(("bool", "int64", "uint8"), None) if "mask" in takes else None,
        padding=maybe((1, 2), 0),
        layout=layout,
        shift="shift" in takes and layout != "flat" and draw(st.booleans()),
        num_items=maybe((5.0, 0.5), None)
        if "num_items" in takes and options.get("reduction", "mean") == "mean"
        else None,
        trained=trained,
        upstream=1.0 if main else maybe((-2.5, 0.25), 1.0),
        strides=draw(st.sampled_from(("contiguous", "offset", "step", "transposed", "mixed", "expanded"))),
        poison=draw(st.booleans()),
        head="tensor" if main else maybe("module", "tensor"),
        main=main,
        grad_scale=maybe(0.25, 1.0) if main == "add" else 1.0,
        seed=draw(st.integers(0, 2**16)),
    )
    return case


def fits(case: Case) -> bool:
    if case.strides == "expanded" and (case.layout != "padded" or case.loss == "multi-token" or case.poison):
        return False
    # Where an ignored target is not the only reason to look at a position.
    whole = {"logits_over", "nll_targets", "depths", "k"} & (case.options.keys() | case.inputs.keys())
    if case.poison and (whole or not case.options.get("compact", True)):
        return False
    if "logits_over" in case.options and "softcap" in case.options:
        return False
    if case.loss == "linear_topk" and "softcap" in case.options:
        return False
    return FAMILIES[case.loss].fits(case) and unknown(case)


@st.composite
def wrong_cases(draw, name: str) -> Case:
    """A call that must be refused."""
    kinds = ("short", "long", "late") if TAKES_BOUNDARIES(name) else ()
    kinds += ("float mask",) if "mask" in FAMILIES[name].takes and name != "linear_topk" else ()
    wrong = draw(st.sampled_from(kinds))
    case = draw(cases(name).filter(lambda case: fits(case) and sum(case.lengths) > 1))
    change = {"mask": "float32"} if wrong == "float mask" else {"layout": "packed", "strides": "offset"}
    if wrong != "float mask" and not FAMILIES[name].group and name != "multi-token":
        change["shift"] = True
    return replace(case, wrong=wrong, **change)


def TAKES_BOUNDARIES(name: str) -> bool:
    family = FAMILIES[name]
    return family.group > 0 or "shift" in family.takes or name == "multi-token"


SEARCHES = {name: (cases(name).filter(fits), lambda case: check(case)) for name in FAMILIES}
WRONG = {
    f"{name}, wrong": (wrong_cases(name).filter(fits), lambda case: check(case))
    for name in FAMILIES
    if name != "linear_topk"
}


@pytest.mark.parametrize("name", SEARCHES)
def test_loss(name):
    search(*SEARCHES[name], REPEATED, max_examples=40)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused(name):
    search(*WRONG[name], REPEATED, max_examples=5)


def check(case: Case) -> None:
    """Compares a call with full logits: value, metrics, numbers per token and gradients."""
    try:
        if case.wrong is None:
            _check(case)
        else:
            _check_refused(case)
    except Exception as error:
        error.add_note(f"from tests.random.test_losses import *; check({case!r})")
        raise


def _check_refused(case: Case) -> None:
    family, w = FAMILIES[case.loss], World(case)
    w.family_inputs = family.given(w)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="mask|cu_seqlens"):
        call(family, w, [w.hidden] if case.loss != "multi-token" else depths(w))


def _check(case: Case) -> None:
    family, w = FAMILIES[case.loss], World(case)
    w.family_inputs = family.given(w)
    hiddens = [w.hidden] if case.loss != "multi-token" else depths(w)
    z = torch.stack([hidden @ w.weight.T for hidden in hiddens])
    truth = solve(family, w, z)
    eps = torch.finfo(case.wide).eps
    rounded = [solve(family, w, z, Rounding(eps, seed)) for seed in range(ROUNDINGS)]

    def allowed(name: str) -> Tensor:
        spread = [(other[name] - truth[name]).abs() for other in rounded]
        return SLACK * torch.stack(spread).amax(0) + 2 * SLACK * eps * truth[name].abs()

    found = call(family, w, hiddens)
    ranked = not w.nearly_tied()
    for name, value in truth.items():
        if name == "products" or (not ranked and name.split("/")[-1].split()[-1] in BY_RANK):
            continue
        # The mean over positions is one product with a mean row of the head.
        by_position = "/" in name and "logits_over" in case.options
        size = (torch.finfo(case.dtype).eps if by_position else eps) * (
            1 + z.abs().amax() if z.numel() else 1.0
        )
        close(name, found[name], value, allowed(name) + 2 * SLACK * size * name.startswith("metric"))
    assert set(truth) - {"products"} == {name for name in found if not name.startswith("d_")}, (
        set(truth),
        set(found),
    )
    if case.trained:
        compare_gradients(w, hiddens, truth["products"], allowed("products"), found)


def solve(family: Family, w: World, z: Tensor, mode=contextlib.nullcontext()) -> dict[str, Tensor]:  # noqa: B008
    """Value, metrics, numbers per token, and the gradient of the products, on full logits."""
    z = z.clone().requires_grad_()
    with mode:
        value, metrics, tokens = family.truth(w, z if w.case.loss == "multi-token" else z[0])
        gradient = torch.zeros_like(z)
        if value.requires_grad:
            (gradient,) = torch.autograd.grad((value * upstream(w, value)).sum(), z)
    value = value.detach()
    found = {"value": w.lay(value) if value.dim() > 1 else value, "products": gradient * w.case.grad_scale}
    found |= {f"metric {name}": x.detach().double() for name, x in metrics.items()}
    return found | {f"tokens {name}": w.lay(x).double() for name, x in tokens.items()}


def upstream(w: World, value: Tensor) -> Tensor:
    factor = w.case.upstream
    return (
        torch.full_like(value, factor)
        if factor == 1 or not value.dim()
        else factor * w.random("upstream", *value.shape)
    )


def call(family: Family, w: World, hiddens: list[Tensor]) -> dict[str, Tensor]:
    """The same from the library, and the gradients."""
    case = w.case
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.simplefilter("ignore", BudgetWarning)
        stack.enter_context(uncompiled())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(case.default_dtype)
        leaves = {"hidden": [w.ours("hidden", hidden) for hidden in hiddens]}
        leaves["hidden"] = (
            torch.stack(leaves["hidden"])
            if len(hiddens) > 1 or case.loss == "multi-token"
            else leaves["hidden"][0]
        )
        leaves |= {"weight": w.ours("weight", w.weight), "bias": w.ours("bias", w.bias)}
        leaves = {
            name: x.detach().requires_grad_(name in case.trained)
            for name, x in leaves.items()
            if x is not None
        }
        hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
        if case.head == "module":
            module = torch.nn.Linear(case.H, case.V, bias=False, device="meta")
            module.weight = torch.nn.Parameter(weight, requires_grad=weight.requires_grad)
            if bias is not None:
                module.bias = torch.nn.Parameter(bias, requires_grad=bias.requires_grad)
            leaves |= {"weight": module.weight} | ({} if bias is None else {"bias": module.bias})
            weight, bias = module, None
        options = {}
        if w.mask is not None and case.loss != "linear_topk":
            options["mask"] = w.ours("mask", w.mask.to(getattr(torch, case.mask)))
        if case.shift:
            options["shift"] = True
        if case.num_items is not None:
            options["num_items"] = (
                case.num_items if case.seed % 2 else torch.tensor(case.num_items, device=DEVICE)
            )
        if case.layout == "packed" and (family.group or case.shift or case.loss == "multi-token"):
            options["cu_seqlens"] = w.cu_seqlens
        base = None
        if case.main:
            base = w.random("main", case.V, case.H).float().to(DEVICE)
            options |= {
                "accumulate_into": base.clone(),
                "accumulate_now": case.main == "now",
                "grad_scale": case.grad_scale,
            }
        if family.call:
            loss = family.make(**w.options) if family.make is not dict else None
            value, metrics, tokens = family.call(w, loss, hidden, weight, bias, **options)
        else:
            loss = family.make(w, **w.options) if case.loss == "own TokenLoss" else family.make(**w.options)
            extra = {name: ours_of(w, name, x) for name, x in w.family_inputs.items()}
            value, metrics, _, tokens = loss(
                hidden, weight, w.ours("labels", w.labels), bias=bias, **extra, **options
            )
            names = [
                n
                for n, on in (
                    ("logps", "return_logps"),
                    ("lse", "return_logps"),
                    ("predictions", "return_predictions"),
                )
                if w.options.get(on)
            ]
            tokens = {name: tokens[name] for name in names}
        trained = [name for name, x in leaves.items() if x.requires_grad]
        assert value.dtype == case.wide, f"value: {value.dtype}, expected {case.wide}"
        if case.loss != "linear_topk":
            assert value.requires_grad == bool(trained), f"requires_grad is {value.requires_grad}"
        if trained:
            factor = upstream(
                w,
                torch.zeros(value.shape)
                if value.dim() < 2 or case.layout == "padded"
                else torch.zeros(w.S, w.T),
            ).to(value)
            factor = w.lay(factor.cpu()).to(value) if value.dim() and factor.dim() > 1 else factor
            (value * factor).sum().backward() if value.dim() else value.backward(factor)
    found = {"value": value} | {f"metric {name}": x for name, x in metrics.items()}
    found |= {f"tokens {name}": x for name, x in tokens.items()}
    if case.main:
        assert leaves["weight"].grad is None, "weight.grad beside accumulate_into"
        found["d_weight"] = options["accumulate_into"] - base
    return {f"d_{name}": x.grad for name, x in leaves.items() if x.requires_grad} | found


def ours_of(w: World, name: str, x):
    if isinstance(x, dict):
        return {key: value.to(DEVICE) for key, value in x.items()}
    return w.ours(name, x) if isinstance(x, Tensor) else x


def compare_gradients(
    w: World, hiddens: list[Tensor], dz: Tensor, error: Tensor, found: dict[str, Tensor]
) -> None:
    """Of the operands, from that of the products: rounding of either is carried through the products."""
    case = w.case
    eps = torch.finfo(case.dtype).eps
    error = (
        error
        + 4 * eps * dz.abs()
        + 4 * torch.finfo(case.dtype).smallest_normal * eps * (1 + dz.abs().amax() if dz.numel() else 1.0)
    )
    h, W = torch.stack(hiddens), w.weight
    sums = 1 + (dz[..., 0].numel() if case.options.get("accum_dtype") == case.dtype else 1)
    d_hidden = [w.lay(x) for x in dz @ W], [w.lay(x) for x in error @ W.abs()]
    single = case.loss != "multi-token"
    expected = {
        "d_hidden": tuple(x[0] if single else torch.stack(x) for x in d_hidden),
        "d_weight": (
            torch.einsum("dstv,dsth->vh", dz, h),
            sums * torch.einsum("dstv,dsth->vh", error, h.abs()),
        ),
        "d_bias": (dz.sum((0, 1, 2)), sums * error.sum((0, 1, 2))),
    }
    for name, (truth, allowed) in expected.items():
        if name not in found:
            continue
        wanted = torch.float32 if case.main and name == "d_weight" else case.dtype
        assert found[name] is not None, f"{name}: None"
        assert found[name].dtype == wanted, f"{name}: {found[name].dtype}, expected {wanted}"
        main = 4 * torch.finfo(torch.float32).eps * 4 if case.main and name == "d_weight" else 0.0
        close(
            name,
            found[name],
            truth,
            allowed + 4 * eps * truth.abs() + torch.finfo(case.dtype).smallest_normal + main,
        )


def close(name: str, actual: Tensor, truth: Tensor, allowed: Tensor) -> None:
    actual = actual.detach().cpu().double()
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    wrong = ~((actual - truth).abs() <= allowed) & (actual != truth) & ~(actual.isnan() & truth.isnan())
    if wrong.any():
        i = int(
            (((actual - truth).abs() / allowed.clamp(min=1e-300)).nan_to_num(nan=torch.inf) * wrong).argmax()
        )
        a, t, tol = (x.reshape(-1)[i].item() for x in (actual, truth, allowed.expand(truth.shape)))
        raise AssertionError(
            f"{name}: {a:.9g}, expected {t:.9g} within {tol:.2g} ({int(wrong.sum())} of {wrong.numel()} wrong)"
        )
