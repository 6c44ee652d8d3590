"""Random calls of every loss against full logits in fp64."""

import contextlib
import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from logitless.engine import compiled
from tests.random.calls import WRONG_MASKS, Call, Rounding, World
from tests.random.known import unknown
from tests.random.losses import CORRECTIONS, DIFFERENCES, FAMILIES, OTHERS, Family, per_token
from tests.random.search import REPEATED, search
from tests.support import DEVICE, uncompiled

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT_MASKS = ("float32", "bfloat16", "float16", "float64")
TRAINED = (("hidden", "weight", "bias"), ("hidden",), ("weight",), ("hidden", "bias"), ())
UPSTREAM = (1.0, -2.5, 0.25, 0.0, math.inf, math.nan)
STRIDES = ("contiguous", "offset", "step", "transposed", "mixed", "expanded")
# How often rounding is simulated, and how much more it may be.
ROUNDINGS, SLACK = 3, 32


@st.composite
def calls(draw, name: str) -> Call:
    family, pick = FAMILIES[name], lambda *values: draw(st.sampled_from(values))
    takes, dtype = family.takes, pick(*DTYPES, torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    engine = {
        "ignore_index": (-1, 0, 1000),
        "softcap": [30.0],
        "logit_scale": (0.25, 2.0),
        "temperature": (0.5, 2.0),
        "logits_budget": (1, 1000, 2**20),
        "accum_dtype": (dtype, wide),
        "logits_dtype": (dtype, wide),
        "compact": [False],
    }
    if {"sum", "none"} & set(takes):
        engine["reduction"] = ("mean", *(x for x in ("sum", "none") if x in takes))
    if "tokens" in takes:
        engine |= {"return_logps": [True], "return_predictions": [True]}
    engine = {option: st.sampled_from(values) for option, values in engine.items()}
    options = draw(family.options) | draw(st.fixed_dictionaries({}, optional=engine))
    reduction = options.get("reduction", "mean")
    count, trained = pick(0, 1, 2, 3) * max(1, family.group), pick(*TRAINED)
    layout = pick("padded", "packed", *(("flat",) if "flat" in takes else ()))
    summed = "main" in takes and "weight" in trained and reduction != "none" and dtype != torch.float64
    main = summed and pick(False, True)
    ignored, inputs = pick(0.0, 0.4, 1.0), draw(family.inputs)
    # Without targets, a main gradient takes any upstream gradient.
    scaled = not main or (ignored == 1 and not {"unlabelled", "nll_targets"} & inputs.keys())
    return Call(
        loss=name,
        options=options,
        inputs=inputs,
        lengths=tuple(draw(st.lists(st.sampled_from((3, 1, 2, 5, 7, 0)), min_size=count, max_size=count))),
        padding=pick(0, 1),
        V=pick(7, 1, 2, 13, 61),
        H=pick(3, 1, 2, 5),
        dtype=dtype,
        default_dtype=pick(*[torch.float32] * 4, *DTYPES),
        peak=pick(1.0, 0.125, 4.0, 16.0),
        ignored=ignored,
        bias=pick(False, True),
        mask=pick(None, "bool", "int64", "uint8", *FLOAT_MASKS) if "mask" in takes else None,
        layout=layout,
        shift="shift" in takes and layout != "flat" and pick(False, True),
        num_items=pick(None, 5.0, 0.5) if "num_items" in takes and reduction == "mean" else None,
        trained=trained,
        upstream=pick(*UPSTREAM) if scaled else 1.0,
        strides=pick(*STRIDES),
        poison=pick(False, True),
        module=not main and pick(False, True),
        main=main,
        grad_scale=pick(1.0, 0.25) if main else 1.0,
        seed=draw(st.integers(0, 2**16)),
    )


def fits(case: Call) -> bool:
    o, asked = case.options, case.options.keys() | case.inputs.keys()
    if case.strides == "expanded" and (case.layout != "padded" or case.poison or "depths" in asked):
        return False
    # Other positions count than those with a target.
    if case.poison and (
        {"logits_over", "nll_targets", "depths", "k", "ids"} & asked or not o.get("compact", True)
    ):
        return False
    # A main gradient is the sum of d_weight, in fp32.
    if case.main and o.get("accum_dtype", torch.float32) != torch.float32:
        return False
    # A softcap is saturated by larger logits, and which one is the best is a matter of rounding.
    if "softcap" in o and (case.peak > 4 or "logits_over" in o):
        return False
    return FAMILIES[case.loss].fits(case)


def mistakes(name: str) -> tuple[str, ...]:
    takes = FAMILIES[name].takes
    bounded = FAMILIES[name].group > 0 or "shift" in takes or name == "multi-token"
    return (("short", "long", "late") if bounded else ()) + (tuple(WRONG_MASKS) if "mask" in takes else ())


@st.composite
def wrong_calls(draw, name: str) -> Call:
    """A call that must be refused."""
    kind = draw(st.sampled_from(mistakes(name)))
    # The label at position 1 counts with `shift` too.
    case = draw(calls(name).filter(lambda case: fits(case) and max(case.lengths, default=0) > 1))
    case = replace(case, poison=False)
    if kind in WRONG_MASKS:
        return replace(case, wrong=kind, mask=draw(st.sampled_from(FLOAT_MASKS)))
    return replace(case, wrong=kind, layout="packed", strides="offset", shift="shift" in FAMILIES[name].takes)


SEARCHES = {name: (calls(name).filter(fits).filter(unknown), lambda case: check(case)) for name in FAMILIES}
SEARCHES |= {
    f"{name}, wrong": (wrong_calls(name).filter(unknown), lambda case: check(case))
    for name in FAMILIES
    if mistakes(name)
}


@pytest.mark.parametrize("name", SEARCHES)
def test_loss(name, everything):
    usual = 40 if everything else 12
    search(*SEARCHES[name], REPEATED, max_examples=5 if "wrong" in name else usual)


# Every formula with the options that change it: what a search draws may leave one out.
CLIPPED = {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.1, "beta": 0.1}
FORMULAS = (
    *(("cross-entropy", {"label_smoothing": 0.1, "z_loss": 0.1, "dft": dft}) for dft in (False, True)),
    *(("DPO", {"loss_type": kind, "label_smoothing": 0.1, "beta": 0.5}) for kind in (*DIFFERENCES, *OTHERS)),
    *(
        ("DPO", {"loss_type": "sigmoid", "f_divergence_type": kind, "f_alpha_divergence_coef": 0.3})
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
    ),
    ("DPO", {"loss_type": "sigmoid", "ld_alpha": 0.5, "use_weighting": True}),
    ("ORPO", {"beta": 0.5}),
    *(
        ("CPO", {"loss_type": kind, "label_smoothing": 0.2, "simpo_gamma": 0.3, "cpo_alpha": 0.5})
        for kind in ("sigmoid", "hinge", "ipo", "simpo")
    ),
    ("CPO", {"loss_type": "simpo", "alpha": 0.3, "cpo_alpha": 0.0}),
    ("SimPO", {"beta": 0.5, "gamma": 0.1}),
    *(
        ("KTO", {"loss_type": kind, "beta": 0.5, "desirable_weight": 2.0})
        for kind in ("kto", "apo_zero_unpaired")
    ),
    *(("GRPO", {"loss_type": kind, **CLIPPED}) for kind in ("dapo", "grpo", "bnpo", "luspo")),
    ("GRPO", {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIPPED}),
    ("GRPO", {"loss_type": "dr_grpo", "max_completion_length": 7, "entropy_coef": 0.1}),
    ("GRPO", {"loss_type": "cispo", "epsilon_high": 1.5, "beta": 0.1}),
    ("GRPO", {"loss_type": "sapo", "sapo_temperature_neg": 2.0, "top_entropy_quantile": 0.5}),
    ("GRPO", {"loss_type": "vespo", "vespo_k_pos": 0.5, "vespo_lambda_neg": 0.5}),
    ("GRPO", {"loss_type": "grpo", "entropy_coef": 0.1, "reduction": "none"}),
    ("GRPO", {"loss_type": "dapo", "off_policy_mask_threshold": 0.05}),
    *(
        (
            "GRPO",
            {"loss_type": "dapo", "trust_region": region, "epsilon": 0.05, "epsilon_high": 0.1, "delta": 1.5},
        )
        for region in ("binary_tv", "binary_kl", "absolute_tv", None)
    ),
    ("GRPO", {"loss_type": "gmpo", "epsilon": 0.4}),
    ("GRPO", {"loss_type": "grpo", "importance_sampling_level": "sequence_token", "ref_advantage": 0.5}),
    ("GRPO", {"loss_type": "dapo", "sampler_correction": CORRECTIONS[1], "old_kl_coef": 0.2}),
    ("PPO", {"epsilon": 0.1, "epsilon_high": 0.3, "entropy_coef": 0.1}),
    ("RLOO", {"epsilon": 0.1, "epsilon_high": 0.3}),
    *(
        ("distillation", {"divergence": kind, "skew_alpha": 0.3, "hard_loss_weight": 0.3, "temperature": 2.0})
        for kind in (
            "forward_kl",
            "reverse_kl",
            "skewed_kl",
            "skewed_reverse_kl",
            "total_variation",
            "cosine",
        )
    ),
    *(("distillation", {"divergence": "jsd", "beta": beta}) for beta in (0.0, 0.1, 0.5, 1.0)),
)
# Options by loss.
FIRST, LAST = dict(FORMULAS[::-1]), dict(FORMULAS)
# The graphs that mask ignored rows: those of static rows as well.
MASKED = tuple((name, options | {"compact": False}) for name, options in LAST.items())
# Without --all on a CPU: the first formula of each loss.
IN_GRAPHS = [
    pytest.param(name, options, marks=[] if options == FIRST[name] else pytest.mark.repeats)
    for name, options in FORMULAS
]
FORMULA_INPUTS = {
    "cross-entropy": {"class_weights": True, "token_weights": True},
    "DPO": {"reference": "tokens"},
    "KTO": {"reference": "tokens", "kl": 1.5},
    "GRPO": {"advantages": "tokens", "old_logps": 2.0, "reference": "tokens"},
    "PPO": {"advantages": "tokens", "old_logps": 2.0},
    "RLOO": {"advantages": "sequences", "old_logps": 2.0},
    "distillation": {"teacher": "same", "best": 3},
}


@pytest.mark.parametrize(("name", "options"), FORMULAS, ids=lambda x: x if isinstance(x, str) else str(x))
def test_every_formula(name, options):
    check(formula(name, options))


def test_a_small_weight_of_a_large_loss():
    """WPO's weight of an unlikely pair is below exp(-80), and the loss of `forward_kl` above exp(70)."""
    options = {"loss_type": "sigmoid", "f_divergence_type": "forward_kl", "beta": 0.5, "label_smoothing": 0.1}
    options |= {"use_weighting": True, "reference_free": True}
    case = {"inputs": {"reference": "tokens"}, "lengths": (3, 5), "padding": 1, "peak": 16.0, "main": True}
    check(Call(loss="DPO", options=options, **case))


def formula(name: str, options: dict) -> Call:
    inputs = FORMULA_INPUTS.get(name, {})
    sizes = {"lengths": (3, 5, 1, 4), "padding": 1, "V": 13, "H": 5}
    case = Call(
        loss=name, options=options, inputs=inputs, **sizes, dtype=torch.float64, peak=4.0, ignored=0.2, seed=1
    )
    if options.get("loss_type") == "gmpo":
        case = replace(case, inputs=inputs | {"advantages": "sequences"})
    if "sampler_correction" in options:
        case = replace(case, inputs=inputs | {"sampling_logps": True})
    assert fits(case)
    return case


@pytest.fixture
def graphs(monkeypatch) -> dict:
    """Losses of per-token statistics are evaluated by graphs, which run uncompiled; those that were made."""
    monkeypatch.setattr(compiled, "COMPILES_ON", ("cpu", "cuda"))
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, fakes: graph)
    monkeypatch.setattr(compiled, "is_switched_off", lambda: False)  # `run` switches the compiler off
    monkeypatch.setattr(compiled, "_GRAPHS", {})
    monkeypatch.setattr(compiled, "_IDENTITIES", {})
    return compiled._GRAPHS


@pytest.mark.parametrize(
    ("name", "options"), [*IN_GRAPHS, *MASKED], ids=lambda x: x if isinstance(x, str) else str(x)
)
def test_every_formula_in_a_graph(graphs, everything, name, options):
    """It has the results of the uncompiled evaluation. One graph serves every number of rows and sequences,
    except that a single group has its own, which without --all each loss makes of its first formula."""
    case = formula(name, options)
    several = (case.lengths, (6, 1, 7, 3, 2, 2, 5, 4))
    single = [case.lengths[: max(1, FAMILIES[name].group)]] if everything or options == FIRST[name] else []
    for seed, lengths in enumerate((*several, *single)):
        w = World(replace(case, lengths=lengths, seed=seed))
        w.inputs = FAMILIES[name].given(w)
        solve(FAMILIES[name], w)  # gives the upstream gradient its shape
        actual = run(FAMILIES[name], w)
        made = len(graphs)
        with pytest.MonkeyPatch.context() as without:
            without.setattr(compiled, "COMPILES_ON", ())
            torch.testing.assert_close(actual, run(FAMILIES[name], w), rtol=1e-12, atol=1e-12)
        assert None not in graphs.values()
        if name != "distillation" and options.get("reduction") != "none":
            assert made == 1 or (made == 2 and lengths not in several)


def check(case: Call) -> None:
    """Compares a call with full logits: value, metrics, numbers per token and gradients."""
    family, w = FAMILIES[case.loss], World(case)
    w.inputs = family.given(w)
    if case.wrong is not None:
        with pytest.raises((ValueError, TypeError, RuntimeError), match="mask|cu_seqlens"):
            run(family, w)
        return
    truth, eps = solve(family, w), torch.finfo(case.wide).eps
    if (truth["value"].abs() > 1e18).any():
        return  # its square is no fp32 number
    rounded = [solve(family, w, Rounding(eps, seed)) for seed in range(ROUNDINGS)]
    actual = run(family, w)
    scale = abs(case.upstream) if math.isfinite(case.upstream) else 1.0
    names = {name for name in actual if not name.startswith("d_")} ^ {*truth} ^ {"d_products"}
    assert not names, f"{names}: on one side alone"
    allowed, largest = {}, max([1.0, *w.products.abs().reshape(-1).tolist()])
    for name, x in truth.items():
        spread = torch.stack([(other[name] - x).abs().nan_to_num() for other in rounded]).amax(0)
        # A sum rounds as its terms do; what is near 0 in a row, as its largest.
        size = {"value": torch.tensor(1 + scale)}.get(name, torch.tensor(largest))
        if name == "d_products":
            size = x.abs().amax(-1, keepdim=True) + scale / SLACK
        if "logits_over" in case.options and "logits/" in name:  # a product with a row of the head
            size = size * torch.finfo(case.dtype).eps / eps
        allowed[name] = SLACK * (spread + eps * (x.abs().nan_to_num() + size)) + 1e-13
    margins = "metric rewards/margins"
    # Rounding decides which of two equal rewards is larger.
    tied = margins in truth and bool(truth[margins].abs() <= allowed[margins])
    for name, x in truth.items():
        if tied and name == "metric rewards/accuracies":
            assert 0 <= actual[name] <= 1
        elif name != "d_products":
            close(name, actual[name], x, allowed[name])
    compare = compare_gradients if math.isfinite(case.upstream) else compare_where_not_finite
    compare(w, truth["d_products"], allowed["d_products"], actual)


def solve(family: Family, w: World, mode=contextlib.nullcontext()) -> dict[str, Tensor]:  # noqa: B008
    """On full logits: value, metrics, statistics per token, gradient of the products (depths, S, T, V).

    The upstream gradient is 1 in the place of inf and NaN.
    """
    z = w.products.clone().requires_grad_()
    with mode:
        value, metrics, *tokens = family.truth(w, z if "depths" in w.case.inputs else z[0])
        gradient = torch.zeros_like(z)
        if value.requires_grad:
            factor = upstream(w, value.shape)
            factor = factor if factor.isfinite().all() else torch.ones_like(factor)
            (gradient,) = torch.autograd.grad((value * factor).sum(), z)
        (tokens,) = tokens or [per_token(w, z[0])]
    w.shape, w.tokens = value.shape, tuple(tokens)
    actual = {"value": w.lay(value) if value.dim() > 1 else value, "d_products": gradient * w.case.grad_scale}
    actual |= {f"metric {name}": x for name, x in metrics.items()}
    actual |= {f"tokens {name}": w.lay(x) for name, x in tokens.items()}
    return {name: x.detach().double() for name, x in actual.items()}


def upstream(w: World, shape: torch.Size) -> Tensor:
    """(S, T), (S,) or ()."""
    factor = torch.full(shape, w.case.upstream, dtype=torch.float64)
    return factor if not shape or w.case.upstream == 1 else factor * w.random("upstream", *shape)


def run(family: Family, w: World) -> dict[str, Tensor]:
    """The same from the library, and the gradients of the operands."""
    case, default = w.case, torch.get_default_dtype()
    with warnings.catch_warnings(), uncompiled():
        warnings.simplefilter("ignore")
        torch.set_default_dtype(case.default_dtype)
        try:
            return _run(family, w)
        finally:
            torch.set_default_dtype(default)


def _run(family: Family, w: World) -> dict[str, Tensor]:
    case = w.case
    hidden = [w.ours("hidden", x) for x in w.hiddens]
    leaves = {"hidden": torch.stack(hidden) if "depths" in case.inputs else hidden[0]}
    leaves |= {"weight": w.ours("weight", w.weight), "bias": w.ours("bias", w.head["bias"])}
    leaves = {
        name: x.detach().requires_grad_(name in case.trained) for name, x in leaves.items() if x is not None
    }
    weight, given = leaves["weight"], {"bias": leaves["bias"]} if case.bias else {}
    if case.module:
        weight, given = torch.nn.Linear(case.H, case.V, bias=case.bias, device="meta"), {}
        for name in ("weight", "bias")[: 1 + case.bias]:
            leaves[name] = torch.nn.Parameter(leaves[name], requires_grad=leaves[name].requires_grad)
            setattr(weight, name, leaves[name])
    if case.mask is not None:
        given["mask"] = w.ours("mask", w.numbers_of_mask)
    if case.shift:
        given["shift"] = True
    if case.num_items is not None:
        given["num_items"] = case.num_items if case.seed % 2 else torch.tensor(case.num_items, device=DEVICE)
    if case.layout == "packed" and (family.group or case.shift or "depths" in case.inputs):
        given["cu_seqlens"] = w.cu_seqlens
    if case.main:
        before = w.random("main", case.V, case.H).float().to(DEVICE)
        given |= {"accumulate_into": before.clone()}
        given["grad_scale"] = case.grad_scale
    given |= {name: w.ours(name, x) for name, x in w.inputs.items()}
    loss = family.make(**w.options) if isinstance(family.make, type) else family.make(w)
    labels = None if "unlabelled" in case.inputs else w.ours("targets", w.labels)
    value, metrics, _, tokens = loss(leaves["hidden"], weight, labels, **given)
    trained = {name: x for name, x in leaves.items() if x.requires_grad}
    assert value.dtype == case.wide, f"value: {value.dtype}, expected {case.wide}"
    assert value.requires_grad == bool(trained), f"requires_grad is {value.requires_grad}"
    if trained:
        factor = upstream(w, w.shape)
        value.backward((w.lay(factor) if factor.dim() > 1 else factor).to(value))
    actual = {"value": value} | {f"metric {name}": x for name, x in metrics.items()}
    actual |= {f"tokens {name}": tokens[name] for name in w.tokens}
    actual |= {f"d_{name}": x.grad for name, x in trained.items()}
    if case.main:
        assert actual["d_weight"] is None, "weight.grad beside accumulate_into"
        actual["d_weight"] = given["accumulate_into"] - before
    return actual


def of_operands(w: World, dz: Tensor, error: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients and their errors: those of the products, and rounding, carried through the products."""
    case, h, W = w.case, torch.stack(w.hiddens), w.weight.abs()
    eps, tiny = torch.finfo(case.dtype).eps, torch.finfo(case.dtype).smallest_normal
    error = error + 4 * eps * dz.abs() + tiny
    # A gradient of a logit that the operands' dtype cannot hold is inf, also in PyTorch's own products.
    error = torch.where(dz.abs() > torch.finfo(case.dtype).max / 2, torch.inf, error)
    # Where the user wants them in the operands' dtype, sums over chunks round once a chunk.
    sums = 1 + dz[..., 0].numel() * (case.options.get("accum_dtype") == case.dtype)
    laid = lambda x: torch.stack([w.lay(part) for part in x])  # noqa: E731
    d_hidden, allowed = laid(dz @ w.weight), laid(error @ W)
    return {
        "d_hidden": (d_hidden, allowed) if "depths" in case.inputs else (d_hidden[0], allowed[0]),
        "d_weight": (
            torch.einsum("dstv,dsth->vh", dz, h),
            sums * torch.einsum("dstv,dsth->vh", error, h.abs()),
        ),
        "d_bias": (dz.sum((0, 1, 2)), sums * error.sum((0, 1, 2))),
    }


def compare_where_not_finite(w: World, dz: Tensor, error: Tensor, found: dict[str, Tensor]) -> None:
    """Of an upstream gradient of inf or NaN: rows of ignored tokens, and all gradients of a call without
    targets, are exactly 0; what is not 0 for an upstream gradient of 1 is not finite."""
    case, ignored = w.case, ~w.counted.expand(dz.shape[:-1])
    if {"depths", "nll_targets", "ids"} & case.inputs.keys():  # other rows count than those with a target
        # Equal logits can have the gradient 0, of a mean over the vocabulary.
        uniform = w.products.amax(-1) == w.products.amin(-1)
        ignored = (dz == 0).all(-1) & ~uniform
    laid = torch.stack([w.lay(rows) for rows in ignored])
    laid = laid if "depths" in case.inputs else laid[0]
    for name, (truth, allowed) in of_operands(w, dz, error).items():
        if name not in found:
            continue
        actual, without = found[name].cpu(), laid if name == "d_hidden" else laid.all()
        without = without[..., None] if name == "d_hidden" else without.expand(actual.shape)
        zero = actual[without.expand(actual.shape)]
        assert not zero.any(), f"{name}: {zero.abs().max()} where no token counts"
        finite = actual.isfinite() & (truth.abs() > 4 * allowed) & ~without
        assert not finite.any(), f"{name}: {finite.sum()} finite numbers of an upstream {case.upstream}"


def compare_gradients(w: World, dz: Tensor, error: Tensor, actual: dict[str, Tensor]) -> None:
    case = w.case
    eps, tiny = torch.finfo(case.dtype).eps, torch.finfo(case.dtype).smallest_normal
    expected = of_operands(w, dz, error)
    for name in expected.keys() & actual.keys():
        main = case.main and name == "d_weight"
        wanted = torch.float32 if main else case.dtype
        assert actual[name] is not None and actual[name].dtype == wanted, f"{name}: not in {wanted}"
        truth, allowed = expected[name]
        close(name, actual[name], truth, allowed + 4 * eps * truth.abs() + tiny + 2e-6 * main)


def close(name: str, actual: Tensor, truth: Tensor, allowed: Tensor) -> None:
    most = torch.finfo(actual.dtype).max / 2 if actual.is_floating_point() else torch.inf
    actual = actual.detach().cpu().double()
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    error = (actual - truth).abs()
    wrong = ~(error <= allowed) & (actual != truth) & ~(actual.isnan() & truth.isnan())
    wrong &= (truth.abs() < most) & allowed.isfinite()
    if wrong.any():
        worst = torch.where(wrong, error / allowed, -1.0).nan_to_num(nan=torch.inf).argmax()
        a, t, within = (x.reshape(-1)[worst].item() for x in (actual, truth, allowed))
        count = f"{wrong.sum()} of {wrong.numel()}"
        raise AssertionError(f"{name}: {a:.9g}, expected {t:.9g} within {within:.2g} ({count})")
