"""The public losses: what a random call of each draws, and what it means on full logits.

`truth(w, z)` takes the products z (S, T, V), of several depths (depths, S, T, V), as leaves and returns the
value, the metrics and, where it is not as usual, the numbers per token. A value per token is (S, T).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

import logitless as ll
from logitless.kernels.head.statistics import DIFFERENTIABLE, NAMES
from tests import reference
from tests.random.calls import Call, World

# Full logits do not know them.
OF_THE_ENGINE = (
    "logits_budget",
    "accum_dtype",
    "logits_dtype",
    "compact",
    "return_logps",
    "return_predictions",
)
OF_SEQUENCES = ("mask", "shift", "num_items", "none", "sum", "main", "tokens")
OF_TOKENS = (*OF_SEQUENCES, "flat")
Drawn = st.SearchStrategy[dict]


def some(**options) -> Drawn:
    """A dictionary with any of the options, each one of its values."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(x) for name, x in options.items()})


def one(**options) -> Drawn:
    """A dictionary with all of them."""
    return st.fixed_dictionaries({name: st.sampled_from(x) for name, x in options.items()})


def merged(*parts: Drawn) -> Drawn:
    return st.builds(lambda *given: functools.reduce(dict.__or__, given), *parts)


@dataclass(frozen=True)
class Family:
    """One kind of call.

    Attributes:
        make: a loss class, or what makes of a `World` something that is called like a loss.
        truth: see above.
        options, inputs: what is drawn.
        given: the call's own inputs, padded, of what was drawn.
        group: how many sequences belong together; 0 where tokens stand alone.
        takes: of OF_TOKENS.
        fits: whether the loss is defined for what was drawn.
    """

    make: Callable
    truth: Callable[[World, Tensor], tuple]
    options: Drawn = some()
    inputs: Drawn = some()
    given: Callable[[World], dict] = lambda w: {}
    group: int = 0
    takes: tuple[str, ...] = OF_SEQUENCES
    fits: Callable[[Call], bool] = lambda case: True


def defined(w: World, *without: str) -> dict:
    """The loss's options, its head and num_items, as references take them."""
    options = {name: x for name, x in w.options.items() if name not in (*OF_THE_ENGINE, *without)}
    return options | w.head | ({} if w.case.num_items is None else {"num_items": w.case.num_items})


def stats(w: World, z: Tensor) -> dict[str, Tensor]:
    """(S, T) by the names of `TokenStats`, 0 where ignored."""
    logps, entropy, lse = reference.token_logprobs(z, w.eye, w.targets, ignore_index=w.ignore_index, **w.head)
    logits = reference.head_logits(z, w.eye, **w.head)
    others = {"sum_logits": logits.sum(-1), "log_sum_sq_probs": (2 * logits.log_softmax(-1)).logsumexp(-1)}
    others |= {"is_top1": (logits.argmax(-1) == w.targets).double(), "predictions": logits.argmax(-1)}
    others = {name: x.masked_fill(~w.counted, 0) for name, x in others.items()}
    return {"logps": logps, "entropy": entropy, "lse": lse} | others


def per_token(w: World, z: Tensor) -> dict[str, Tensor]:
    """What `return_logps` and `return_predictions` return."""
    actual = stats(w, z.detach())
    names = ["logps", "lse"] if w.options.get("return_logps") else []
    names += ["predictions"] if w.options.get("return_predictions") else []
    actual["predictions"] = actual["predictions"].masked_fill(~w.counted, w.ignore_index)
    return {name: actual[name] for name in names}


def mean(w: World, x: Tensor) -> Tensor:
    return x.detach().masked_fill(~w.counted, 0).sum() / w.counted.sum().clamp(min=1)


def reduced(w: World, values: Tensor) -> Tensor:
    values, reduction = values.masked_fill(~w.counted, 0), w.options.get("reduction", "mean")
    if reduction == "mean":
        return values.sum() / (w.case.num_items or max(1, w.counted.sum().item()))
    return values.sum() if reduction == "sum" else values


# -- cross-entropy


def weights(w: World) -> dict[str, Tensor]:
    actual = {
        "class_weights": w.uniform("class", w.case.V) + 0.25,
        "token_weights": w.random("token", w.S, w.T),
    }
    return {name: x for name, x in actual.items() if name in w.case.inputs}


def cross_entropy(w: World, z: Tensor):
    value, actual = reference.cross_entropy(z, w.eye, w.targets, **w.inputs, **defined(w)), stats(w, z)
    metrics = {"token_accuracy": mean(w, actual["is_top1"]), "entropy": mean(w, actual["entropy"])}
    z_loss = w.options.get("z_loss", 0.0) * actual["lse"].square()
    return value, metrics | {"z_loss": mean(w, z_loss), "num_tokens": w.counted.sum().double()}


def multi_token(w: World, z: Tensor):
    labels = w.labels.masked_fill(~w.mask, w.ignore_index)
    return *reference.multi_token(z, w.eye, labels, **defined(w)), {}


def make_multi_token(w: World) -> Callable:
    loss = ll.MultiTokenLoss(**w.options)
    return lambda hidden, *operands, **given: loss(list(hidden.unbind()), *operands, **given)


# -- preferences and policies


def near(w: World) -> dict[str, Tensor]:
    """A reference."""
    kind, S, T, V, H = w.case.inputs.get("reference"), w.S, w.T, w.case.V, w.case.H + 1
    if "reference_free" in w.options or (
        w.case.loss == "GRPO" and not {"beta", "ref_advantage"} & {*w.options}
    ):
        return {}
    if kind == "tokens":
        return {"ref_logps": w.near_logps("ref_logps", 0.5)}
    if kind == "sequences":
        return {"ref_logps": (w.logps.sum(1) + w.random("ref_logps", S)).float().double()}
    head = {"ref_weight": w.grid("ref_weight", V, H, scale=w.case.peak), "ref_bias": w.grid("ref_bias", V)}
    return {"ref_hidden": w.grid("ref_hidden", S, T, H), **head} if kind == "model" else {}


def reference_of(w: World) -> dict[str, Tensor]:
    """Its log-probabilities."""
    if "ref_hidden" not in w.inputs:
        return {name: x for name, x in w.inputs.items() if name == "ref_logps"}
    model = [w.inputs[f"ref_{name}"] for name in ("hidden", "weight")]
    head = {name: w.options.get(f"ref_{name}", w.options.get(name, x)) for name, x in UNCHANGED.items()}
    head |= {"bias": w.inputs["ref_bias"], "ignore_index": w.ignore_index}
    return {"ref_logps": reference.token_logprobs(*model, w.targets, **head)[0]}


UNCHANGED = {"softcap": None, "logit_scale": 1.0, "temperature": 1.0}


def of_sequences(function: Callable):
    def truth(w: World, z: Tensor):
        given = {name: x for name, x in w.inputs.items() if not name.startswith("ref_")} | reference_of(w)
        options = defined(w, "ref_softcap", "ref_logit_scale", "logits_over")
        value, metrics, *_ = function(z, w.eye, w.targets, **given, **options)
        if "logits_over" in w.options:  # every position, labelled or not
            logits = reference.head_logits(z.detach(), w.eye, **w.head).mean(-1)
            there = w.valid | (w.case.layout == "padded")
            for side, rows in (("chosen", slice(w.S // 2)), ("rejected", slice(w.S // 2, None))):
                metrics[f"logits/{side}"] = logits[rows][there[rows]].mean()
        if w.case.loss == "KTO" and not w.S:  # nothing to average
            metrics["kl"] = torch.zeros(())
        return value, metrics

    return truth


def nll_targets(w: World) -> dict[str, Tensor]:
    """Labels of ORPO's NLL: those of the completion, and others before it."""
    more = w.ids("nll_targets", w.S, w.T).masked_fill(~w.valid, w.ignore_index)
    actual = torch.where(w.targets == w.ignore_index, w.aligned(more, w.ignore_index), w.targets)
    return {"nll_targets": actual} if "nll_targets" in w.case.inputs else {}


def judged(w: World) -> dict:
    kl = {} if w.options.get("loss_type") == "apo_zero_unpaired" else {"kl": w.case.inputs["kl"]}
    return near(w) | {"labels": w.uniform("judged", w.S) < 0.6} | kl


def rollout(w: World) -> dict[str, Tensor]:
    drawn, shape = w.case.inputs, {"sequences": (w.S,), "tokens": (w.S, w.T)}
    actual = {"advantages": w.random("advantages", *shape[drawn["advantages"]])}
    if "old_logps" in drawn:
        old = w.near_logps("old_logps", drawn["old_logps"])
        actual["old_logps"] = old.sum(1).float().double() if "sums" in drawn else old
    if "sampling_logps" in drawn:
        actual["sampling_logps"] = w.near_logps("sampling_logps", 0.1)
    if "importance_weights" in drawn:
        actual["importance_weights"] = w.uniform("importance", *shape[drawn["importance_weights"]]) + 0.5
    return actual | near(w)


def one_token(case: Call) -> bool:
    """Whether the one token of a packed call is its sequence, so that a shape says neither: advantages are
    read per sequence, and sums per token, as that over no tokens is 0."""
    return case.layout == "packed" and case.lengths == (1,)


def fits_dpo(case: Call) -> bool:
    o = case.options
    names = {o["loss_type"]} if isinstance(o["loss_type"], str) else set(o["loss_type"])
    return (
        ("exo_pair" not in names or "label_smoothing" in o)
        and not (names & {"aot", "aot_unpaired"} and "use_weighting" in o)
        and not ("sft" in names and o.get("reduction") == "none")
    )


def fits_sampler(case: Call) -> bool:
    """Whether the options have the log-probabilities that they need, and these have an option."""
    o, i = case.options, case.inputs
    if case.loss in ("RLOO", "REINFORCE") and ("sampler_correction" in o) != ("sampling_logps" in i):
        return False
    if case.loss == "REINFORCE" and "old_logps" in i and not {"old_kl_coef", "sampler_correction"} & {*o}:
        return False
    correction = o.get("sampler_correction")
    per_token = not ("sums" in i and "old_logps" in i) or getattr(correction, "measure", "ratio") == "ratio"
    return (
        per_token
        and ("old_kl_coef" not in o or "old_logps" in i)
        and (correction is None or "sampling_logps" in i)
    )


def fits_grpo(case: Call) -> bool:
    o, i = case.options, case.inputs
    known = "off_policy_mask_threshold" not in o or "old_logps" in i or "sampling_logps" in i
    known &= fits_sampler(case) and (
        o["loss_type"] != "gmpo" or "tokens" not in (i["advantages"], i.get("importance_weights"))
    )
    try:
        ll.GRPOLoss(**o)
    except ValueError:
        return False
    # Of two ids, many tokens have the same entropy, and rounding tells which is larger.
    known &= not (one_token(case) and o["loss_type"] == "vespo" and i["advantages"] == "tokens")
    return known and ("top_entropy_quantile" not in o or case.V > 2)


# -- distillation


def teacher(w: World) -> dict:
    kind, V, H = w.case.inputs["teacher"], w.case.V, w.case.H + 1
    rows = {"larger": V + 3, "smaller": max(1, V - 2)}.get(kind, V)
    hidden, bias = w.grid("teacher_hidden", w.S, w.T, H), w.grid("teacher_bias", rows)
    weight = w.grid("teacher_weight", rows, H, scale=w.case.inputs.get("peak", 1.0))
    if kind != "topk":
        return {"teacher_hidden": hidden, "teacher_weight": weight, "teacher_bias": bias}
    logits = reference.head_logits(hidden, weight, bias) / w.options.get("temperature", 1.0)
    values, ids = logits.log_softmax(-1).topk(min(w.case.inputs["best"], V))
    values = values.clamp(max=0).to(getattr(torch, w.case.inputs.get("given", "float32")))
    if "empty" in w.case.inputs and values.shape[-1] > 1:
        values[..., -1] = -torch.inf
    return {"teacher_logprobs_topk": (values, ids)}


def distillation(w: World, z: Tensor):
    options = defined(w, "shared_vocabulary") | w.inputs | {"mask": w.counted}
    labels = None if "unlabelled" in w.case.inputs else w.aligned(w.labels, w.ignore_index)
    given = "teacher_logprobs_topk" in w.inputs
    if given:
        options.pop("support", None)
    value, metrics = reference.distillation(z, w.eye, labels, **options)
    exact = given and "support" in w.options and w.options.get("topk_mode") == "renormalize"
    if exact and not w.options.get("hard_loss_weight"):  # the partition function cancels
        metrics = {"soft_loss": metrics["soft_loss"]}
    return value, metrics, {}


def fits_distillation(case: Call) -> bool:
    o, i = case.options, case.inputs
    given = i["teacher"] == "topk"
    partial = o.get("topk_mode") == "partial"
    return (
        not (
            partial
            and (o.get("divergence") not in ("forward_kl", "reverse_kl") or not (given or "support" in o))
        )
        and not (o.get("divergence") == "cosine" and (given or "support" in o))
        and not (given and (o.get("support", "teacher") != "teacher" or "k" in o))
        and (given or ("support" in o) == ("k" in o))
        and o.get("k", 1) <= case.V - 2 * (i["teacher"] == "smaller")
        and not ("unlabelled" in i and ("hard_loss_weight" in o or case.V == 1))
    )


# -- numbers per token


def upstreams(w: World) -> dict[str, Tensor]:
    """Gradients of what `linear_logprobs` returns; of some of it there is none."""
    several = w.case.inputs.get("ids")
    names = {name: (several,) if several and name == "logps" else () for name in w.case.inputs["used"]}
    return {name: w.random(f"upstream {name}", w.S, w.T, *k) for name, k in names.items()}


def slots(w: World) -> Tensor:
    """(S, T, k) ids, some slots empty, unshifted."""
    shape = w.S, w.T, w.case.inputs["ids"]
    empty = (w.uniform("empty", *shape) < w.case.ignored) | ~w.valid[..., None]
    return w.ids("ids", *shape).masked_fill(empty, w.ignore_index)


def weighed(actual: dict[str, Tensor], upstream: dict[str, Tensor]) -> Tensor:
    total = actual["lse"].new_zeros(())
    for name, x in upstream.items():
        total = total + torch.where(actual[name] > -torch.inf, actual[name] * x, 0.0).sum()
    return total


def logprobs(w: World, z: Tensor):
    if "ids" in w.case.inputs:
        ids = slots(w)
        if w.case.shift:
            ids = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], w.ignore_index)), 1)
        options = {"ignore_index": w.ignore_index, **w.head}
        actual = dict(zip(("logps", "entropy", "lse"), reference.ids_logprobs(z, w.eye, ids, **options)))
    else:
        actual = {name: stats(w, z)[name] for name in ("logps", "entropy", "lse")}
    value = weighed(actual, upstreams(w))
    return (
        value,
        {},
        {name: x for name, x in actual.items() if name != "entropy" or "entropy" in w.case.inputs},
    )


def make_logprobs(w: World) -> Callable:
    def call(hidden: Tensor, weight, targets: Tensor, **given) -> ll.LossOutput:
        targets = w.ours("ids", slots(w)) if "ids" in w.case.inputs else targets
        options = {name: x for name, x in w.case.inputs.items() if name == "entropy"}
        out = ll.linear_logprobs(hidden, weight, targets, **given, **options, **w.options)
        actual = {name: x for name, x in out._asdict().items() if x is not None}
        upstream = {name: w.ours("upstream", x).nan_to_num() for name, x in upstreams(w).items()}
        return ll.LossOutput(weighed(actual, upstream), {}, None, actual)

    return call


def topk(w: World, z: Tensor):
    logps, ids = reference.best_ids(z, w.eye, min(w.case.inputs["k"], w.case.V), **w.head)
    logits = reference.head_logits(z, w.eye, **w.head)
    log_p = logits.log_softmax(-1)
    actual = {
        "logps": logps,
        "ids": ids,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": logits.logsumexp(-1),
    }
    dropped = {name: ~w.mask.view(*w.mask.shape, *[1] * (x.dim() - 2)) for name, x in actual.items()}
    return z.new_zeros(()), {}, {name: x.masked_fill(dropped[name], 0) for name, x in actual.items()}


def make_topk(w: World) -> Callable:
    def call(hidden: Tensor, weight, targets: Tensor, **given) -> ll.LossOutput:
        without_effect = ("ignore_index", "accum_dtype")
        options = {name: x for name, x in w.options.items() if name not in without_effect}
        out = ll.linear_topk(hidden, weight, min(w.case.inputs["k"], w.case.V), **given, **options)
        return ll.LossOutput(out.lse.new_zeros(()), {}, None, out._asdict())

    return call


# -- losses of a user's own

OBSERVABLE = tuple(name for name in NAMES if name != "lse_residual")


def mixture(actual: dict[str, Tensor]) -> Tensor:
    return sum((i + 1) * (0.05 * x).sin() for i, x in enumerate(actual.values()))


@functools.cache
def own_class(names: tuple[str, ...], watched: tuple[str, ...], by_sequence: bool) -> type:
    """A `TokenLoss` of the statistics `names`."""

    @dataclass(frozen=True, kw_only=True)
    class OwnLoss(ll.TokenLoss):
        scope: ClassVar = "group" if by_sequence else "token"
        differentiates: ClassVar = names
        observes: ClassVar = watched
        metric_names: ClassVar = watched
        token_inputs: ClassVar = ("token_weights",)

        def terms(self, stats: ll.TokenStats, batch: ll.Batch):
            values = mixture({name: getattr(stats, name) for name in names})
            values = values if batch.token_weights is None else values * batch.token_weights
            if by_sequence:
                values = batch.spread((batch.sum_by_sequence(values) / batch.lengths.clamp(min=1)).tanh())
            return {"own": ll.Term(values)}, {name: ll.Term(getattr(stats, name)) for name in watched}

    return OwnLoss


def make_own(w: World) -> ll.TokenLoss:
    drawn = w.case.inputs
    return own_class(drawn["differentiates"], drawn["observes"], "by_sequence" in drawn)(**w.options)


def own(w: World, z: Tensor):
    actual = stats(w, z)
    values = mixture({name: actual[name] for name in w.case.inputs["differentiates"]})
    values = (values * w.inputs.get("token_weights", 1.0)).masked_fill(~w.counted, 0)
    if "by_sequence" in w.case.inputs:
        values = (values.sum(1) / w.counted.sum(1).clamp(min=1)).tanh()[:, None].expand_as(values)
    return reduced(w, values), {name: mean(w, actual[name]) for name in w.case.inputs["observes"]}


@dataclass(frozen=True, kw_only=True)
class Brier(ll.LogitsLoss):
    """A `LogitsLoss`, which sees the logits themselves."""

    metric_names: ClassVar = ("top",)

    def terms(self, logits: Tensor, batch: ll.Batch):
        p = logits.log_softmax(-1).exp()
        target = p.gather(1, batch.targets.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
        return {"brier": ll.Term(p.square().sum(-1) - 2 * target + 1)}, {"top": ll.Term(p.amax(-1))}


def brier(w: World, z: Tensor):
    p = reference.head_logits(z, w.eye, **w.head).log_softmax(-1).exp()
    target = p.gather(-1, w.targets.masked_fill(~w.counted, 0)[..., None])[..., 0]
    return reduced(w, p.square().sum(-1) - 2 * target + 1), {"top": mean(w, p.amax(-1))}, {}


# -- the table

DIFFERENCES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm", "sft")
OTHERS = ("nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down")
DPO_TYPES = st.one_of(
    merged(
        one(loss_type=DIFFERENCES),
        some(
            f_divergence_type=("forward_kl", "js_divergence", "alpha_divergence"),
            f_alpha_divergence_coef=(0.3, 1.0),
        ),
    ),
    one(loss_type=OTHERS),
    one(loss_type=[("sigmoid", "sft", "bco_pair"), ("ipo", "robust", "aot")], loss_weights=[(0.5, 2.0, 1.0)]),
)
DPO_OPTIONS = some(
    beta=(0.5, 0.01),
    label_smoothing=[0.1],
    average_logps=(True, False),
    ld_alpha=(0.5, 0.0),
    use_weighting=[True],
    reference_free=[True],
    discopop_tau=[0.5],
)
REFERENCE = one(reference=("tokens", "sequences", "model"))
OF_REFERENCES = some(ref_softcap=(30.0, None), ref_logit_scale=[0.5])
LEVELS = some(importance_sampling_level=("sequence", "sequence_token"))
BOUNDS = some(delta=(1.1, 2.0), epsilon=[0.1], epsilon_high=[0.3])
RATIOS = st.one_of(
    merged(BOUNDS, LEVELS),
    merged(BOUNDS, LEVELS, one(trust_region=[None])),
    merged(BOUNDS, one(trust_region=("binary_tv", "binary_kl", "absolute_tv"))),
)
MEANS = some(loss_agg_mode=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"))
GRPO_TYPES = st.one_of(
    merged(one(loss_type=("dapo", "grpo", "bnpo", "luspo")), RATIOS, MEANS),
    merged(one(loss_type=["dr_grpo"], max_completion_length=[7]), RATIOS),
    merged(one(loss_type=["cispo"], epsilon_high=(1.5, 5.0)), some(cispo_min=[0.8]), LEVELS, MEANS),
    merged(one(loss_type=["sapo"]), some(sapo_temperature_neg=[2.0]), LEVELS, MEANS),
    merged(one(loss_type=["vespo"]), some(vespo_k_pos=[0.5], vespo_lambda_neg=[0.5]), MEANS),
    one(loss_type=["gmpo"], epsilon=(0.1, 0.4)),
)
Correction = ll.SamplerCorrection
OF_SEQUENCE_RATIOS = (
    Correction(level="sequence", high=2.0),
    Correction(level="geometric", action="mask", low=0.9, high=1.2),
    Correction(level="geometric", action="reject", measure="k3", high=0.01),
)
CORRECTIONS = (
    Correction(high=1.1),
    (Correction(action="mask", low=0.9), Correction(level="sequence", action="reject", low=0.5, high=2.0)),
    Correction(action="reject", measure="k2", high=0.01),
    *OF_SEQUENCE_RATIOS,
)
GRPO_OPTIONS = some(
    beta=[0.1],
    kl_estimator=("k1", "k2", "abs", "k3+", "k1+"),
    kl_max=(0.1, 1.0),
    entropy_coef=[0.1],
    use_bias_correction_kl=[False],
    old_kl_coef=[0.2],
    ref_advantage=(0.5, -1.0),
    sampler_correction=CORRECTIONS,
    top_entropy_quantile=(0.5, 0.1),
    off_policy_mask_threshold=[0.05],
)
ROLLOUT = merged(
    one(advantages=("sequences", "tokens")),
    some(old_logps=(0.1, 2.0), sampling_logps=[True], importance_weights=("sequences", "tokens")),
)
CPO_OPTIONS = some(
    beta=[1.0],
    average_logps=(True, False),
    label_smoothing=[0.2],
    cpo_alpha=(0.0, 0.5),
    simpo_gamma=[0.1],
    alpha=(0.3, -0.2),
    logits_over=["position"],
)
DIVERGENCES = some(
    divergence=("forward_kl", "reverse_kl", "skewed_kl", "skewed_reverse_kl", "total_variation", "cosine"),
    beta=(0.0, 0.1, 1.0),
    skew_alpha=(0.0, 0.5, 1.0),
    hard_loss_weight=(0.3, 1.0),
    topk_mode=("renormalize", "partial"),
    support=("teacher", "student", "union"),
    k=(1, 3),
    teacher_softcap=[30.0],
    teacher_logit_scale=[0.5],
)
TEACHER = merged(
    one(teacher=("same", "topk", "larger", "smaller"), best=(1, 3, 100)),
    some(unlabelled=[True], empty=[True], peak=(8.0, 0.25), given=("bfloat16", "float16", "float64")),
)
USED = one(used=[("logps",), ("lse",), ("logps", "lse"), ("logps", "entropy"), ("entropy",)])
STATS = st.lists(st.sampled_from(OBSERVABLE), unique=True).map(tuple)
OWN = st.fixed_dictionaries(
    {
        "differentiates": st.lists(st.sampled_from(DIFFERENTIABLE), min_size=1, unique=True).map(tuple),
        "observes": STATS,
    }
)
SMOOTHED = {"label_smoothing": (0.1, 1.0), "z_loss": [0.1], "dft": [True]}

FAMILIES: dict[str, Family] = {
    "cross-entropy": Family(
        ll.CrossEntropyLoss,
        cross_entropy,
        some(**SMOOTHED),
        some(class_weights=[True], token_weights=[True]),
        weights,
        takes=OF_TOKENS,
    ),
    "multi-token": Family(
        make_multi_token,
        multi_token,
        some(**SMOOTHED),
        one(depths=(1, 2, 3)),
        takes=("mask", "num_items", "sum"),
    ),
    "DPO": Family(
        ll.DPOLoss,
        of_sequences(reference.dpo),
        merged(DPO_TYPES, DPO_OPTIONS, OF_REFERENCES),
        REFERENCE,
        near,
        2,
        fits=fits_dpo,
    ),
    "ORPO": Family(
        ll.ORPOLoss,
        of_sequences(reference.orpo),
        some(beta=[1.0], logits_over=["position"]),
        some(nll_targets=[True]),
        nll_targets,
        2,
        ("mask", "shift", "num_items", "sum", "main"),
        fits=lambda case: "nll_targets" not in case.inputs or case.mask is None,
    ),
    "CPO": Family(
        ll.CPOLoss,
        of_sequences(reference.cpo),
        merged(one(loss_type=("sigmoid", "hinge", "ipo", "simpo")), CPO_OPTIONS),
        group=2,
        fits=lambda case: case.options.get("reduction") != "none" or case.options.get("cpo_alpha") == 0,
    ),
    "SimPO": Family(ll.SimPOLoss, of_sequences(reference.simpo), some(beta=[0.5], gamma=[0.1]), group=2),
    "KTO": Family(
        ll.KTOLoss,
        of_sequences(reference.kto),
        merged(some(loss_type=["apo_zero_unpaired"], beta=[1.0], desirable_weight=[2.0]), OF_REFERENCES),
        merged(REFERENCE, one(kl=(0.0, 1.5, -1.0))),
        judged,
        1,
        fits=lambda case: not (one_token(case) and case.inputs["reference"] == "sequences"),
    ),
    "GRPO": Family(
        ll.GRPOLoss,
        of_sequences(reference.grpo),
        merged(GRPO_TYPES, GRPO_OPTIONS, OF_REFERENCES),
        merged(ROLLOUT, one(reference=("tokens", "model"))),
        rollout,
        1,
        fits=fits_grpo,
    ),
    "PPO": Family(
        ll.PPOLoss,
        of_sequences(reference.ppo),
        some(epsilon=[0.1], epsilon_high=[0.3], entropy_coef=[0.1]),
        ROLLOUT,
        rollout,
        1,
    ),
    "RLOO": Family(
        ll.RLOOLoss,
        of_sequences(reference.rloo),
        some(epsilon=[0.1], epsilon_high=[0.3], sampler_correction=OF_SEQUENCE_RATIOS),
        merged(one(advantages=["sequences"]), some(old_logps=(0.1, 2.0), sums=[True], sampling_logps=[True])),
        rollout,
        1,
        fits=fits_sampler,
    ),
    "REINFORCE": Family(
        ll.REINFORCELoss,
        of_sequences(reference.reinforce),
        some(old_kl_coef=[0.2], sampler_correction=CORRECTIONS),
        merged(one(advantages=("sequences", "tokens")), some(old_logps=(0.1, 2.0), sampling_logps=[True])),
        rollout,
        1,
        fits=fits_sampler,
    ),
    "distillation": Family(
        ll.DistillationLoss,
        distillation,
        DIVERGENCES,
        TEACHER,
        teacher,
        0,
        tuple(x for x in OF_TOKENS if x != "tokens"),
        fits_distillation,
    ),
    "linear_logprobs": Family(
        make_logprobs,
        logprobs,
        some(),
        merged(USED, some(entropy=(True, "metric"), ids=(1, 3))),
        takes=("shift", "flat"),
        fits=lambda case: "entropy" not in case.inputs["used"] or case.inputs.get("entropy") is True,
    ),
    "linear_topk": Family(
        make_topk,
        topk,
        some(),
        one(k=(1, 3, 100)),
        takes=("mask", "flat"),
        fits=lambda case: not case.trained,
    ),
    "own TokenLoss": Family(
        make_own, own, some(), merged(OWN, some(by_sequence=[True], token_weights=[True])), weights, 1
    ),
    "own LogitsLoss": Family(Brier, brier, takes=tuple(x for x in OF_TOKENS if x != "tokens")),
}
