"""The public losses: which options and inputs a random call draws, how it is made, and what it means on full
logits.

`truth(w, z)` takes the exact products z (S, T, V) as a leaf and returns (value, metrics, numbers per token). A
value per token is (S, T), one per sequence (S,), one per pair (S / 2,).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

import logitless as ll
from tests import reference
from tests.random.world import Case, World
from tests.reference.distillation import NOTHING, generalized_jsd, kl, kl_to_mixture

Drawn = st.SearchStrategy[dict]
# Of one engine alone: full logits do not know them.
OURS_ALONE = ("logits_budget", "accum_dtype", "logits_dtype", "compact", "return_logps", "return_predictions")


def some(**options) -> Drawn:
    """A dictionary with any of the options, each one of its values."""
    given = {name: st.sampled_from(values) for name, values in options.items()}
    return st.fixed_dictionaries({}, optional=given)


def one(**options) -> Drawn:
    """A dictionary with all of the options."""
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in options.items()})


def merged(*parts: Drawn) -> Drawn:
    return st.builds(lambda *given: functools.reduce(dict.__or__, given), *parts)


@dataclass(frozen=True)
class Family:
    """One kind of call.

    Attributes:
        make: the loss, of its options.
        truth: see above.
        options, inputs: what is drawn for it.
        group: how many sequences belong together; 0 where tokens stand alone.
        given: the inputs of a call, padded, from what was drawn.
        call: (w, loss, hidden, weight, bias) -> (value, metrics, numbers per token), for what is called in
            another way.
        takes: what it can do: see `test_losses.cases`.
        fits: whether the loss is defined for what was drawn.
    """

    make: Callable
    truth: Callable[[World, Tensor], tuple[Tensor, dict, dict]]
    options: Drawn = field(default_factory=some)
    inputs: Drawn = field(default_factory=some)
    group: int = 0
    given: Callable[[World], dict[str, Tensor]] = lambda w: {}
    call: Callable | None = None
    takes: tuple[str, ...] = ("mask", "shift", "num_items", "none", "sum", "main", "tokens", "flat")
    fits: Callable[[Case], bool] = lambda case: True


def defined(w: World) -> dict:
    return {name: x for name, x in w.options.items() if name not in OURS_ALONE}


def head(w: World) -> dict:
    return w.head | {"bias": w.bias}


def numbers(w: World, z: Tensor) -> dict[str, Tensor]:
    """(S, T) by the names of `TokenStats`, 0 where ignored."""
    logps, entropy, lse = reference.token_logprobs(
        z, w.eye, w.targets, ignore_index=w.ignore_index, **head(w)
    )
    logits = reference.head_logits(z, w.eye, **head(w))
    others = {
        "sum_logits": logits.sum(-1),
        "log_sum_sq_probs": (2 * logits.log_softmax(-1)).logsumexp(-1),
        "is_top1": (logits.argmax(-1) == w.targets).double(),
        "predictions": logits.argmax(-1),
    }
    others = {name: x.masked_fill(~w.counted, 0) for name, x in others.items()}
    return {"logps": logps, "entropy": entropy, "lse": lse} | others


def per_token(w: World, z: Tensor) -> dict[str, Tensor]:
    """What `return_logps` and `return_predictions` hand out."""
    found, names = numbers(w, z), []
    if w.options.get("return_logps"):
        names += ["logps", "lse"]
    if w.options.get("return_predictions"):
        names += ["predictions"]
        found["predictions"] = found["predictions"].masked_fill(~w.counted, w.ignore_index)
    return {name: found[name].detach() for name in names}


def mean_of(w: World, x: Tensor) -> Tensor:
    return x.sum() / w.counted.sum().clamp(min=1)


# -- cross-entropy


def cross_entropy_inputs(w: World) -> dict[str, Tensor]:
    found = {}
    if "class_weights" in w.case.inputs:
        found["class_weights"] = w.uniform("class_weights", w.case.V) + 0.25
    if "token_weights" in w.case.inputs:
        found["token_weights"] = w.random("token_weights", w.S, w.T)
    return found


def cross_entropy(w: World, z: Tensor):
    given = cross_entropy_inputs(w) | {"num_items": w.case.num_items}
    value = reference.cross_entropy(z, w.eye, w.targets, **given, **head(w) | defined(w))
    found = numbers(w, z.detach())
    metrics = {
        "token_accuracy": mean_of(w, found["is_top1"]),
        "entropy": mean_of(w, found["entropy"]),
        "z_loss": mean_of(w, w.options.get("z_loss", 0.0) * found["lse"].square()),
        "num_tokens": w.counted.sum().double(),
    }
    return value, metrics, per_token(w, z)


def depths(w: World) -> list[Tensor]:
    return [w.hidden, *(w.grid(f"hidden {k}", w.S, w.T, w.case.H) for k in range(1, w.case.inputs["depths"]))]


def multi_token(w: World, z: Tensor):
    """z (depths, S, T, V)."""
    coefficients = w.options.get("coefficients") or (1.0, *[0.3] * (len(z) - 1))
    labels = w.labels if w.mask is None else w.labels.masked_fill(~w.mask, w.ignore_index)
    options = defined(w) | {"num_items": w.case.num_items}
    options.pop("coefficients", None)
    value, metrics = 0.0, {}
    for k, (products, coefficient) in enumerate(zip(z, coefficients)):
        labels = reference.shift_left(labels, w.ignore_index)
        depth = reference.cross_entropy(products, w.eye, labels, **head(w) | options)
        best = reference.head_logits(products, w.eye, **head(w)).argmax(-1)
        counted = labels != w.ignore_index
        metrics[f"depth_{k}/loss"] = depth.detach()
        metrics[f"depth_{k}/accuracy"] = ((best == labels) & counted).sum().double() / counted.sum().clamp(
            min=1
        )
        value = value + coefficient * depth
    return value, metrics, {}


def call_multi_token(w: World, loss, hidden: Tensor, weight, bias: Tensor | None, **options):
    """`hidden` (depths, ...)."""
    out = loss(list(hidden.unbind()), weight, w.ours("labels", w.labels), bias=bias, **options)
    return out.loss, out.metrics, {}


# -- preferences


def preference_inputs(w: World) -> dict[str, Tensor]:
    kind, found = w.case.inputs.get("reference"), {}
    if kind == "tokens":
        found["ref_logps"] = w.near_logps("ref_logps", 0.5)
    elif kind == "sequences":
        found["ref_logps"] = (w.logps.sum(1) + w.random("ref_logps", w.S)).float().double()
    elif kind == "model":
        found["ref_hidden"] = w.grid("ref_hidden", w.S, w.T, w.case.H + 1)
        found["ref_weight"] = w.grid("ref_weight", w.case.V, w.case.H + 1, scale=w.case.peak)
        if w.case.bias:
            found["ref_bias"] = w.grid("ref_bias", w.case.V)
    return found


def reference_of(w: World) -> dict[str, Tensor]:
    """Its log-probabilities, as they were given or from its model."""
    found = w.family_inputs
    if "ref_hidden" not in found:
        return {name: found[name] for name in ("ref_logps",) if name in found}
    same = {f"ref_{name}": w.options.get(name) for name in ("softcap", "logit_scale") if name in w.options}
    chosen = {name: x for name, x in w.options.items() if name.startswith("ref_")}
    options = {name.removeprefix("ref_"): x for name, x in (same | chosen).items()}
    options |= {name: x for name, x in w.head.items() if name == "temperature"}
    model = {name: found.get(f"ref_{name}") for name in ("hidden", "weight", "bias")}
    logps, _, _ = reference.token_logprobs(**model, targets=w.targets, ignore_index=w.ignore_index, **options)
    return {"ref_logps": logps}


def preference(function: Callable, *more: str):
    def truth(w: World, z: Tensor):
        options = {name: x for name, x in defined(w).items() if not name.startswith("ref_")}
        options |= reference_of(w) | {"num_items": w.case.num_items}
        by_position = options.pop("logits_over", "completion") == "position"
        value, metrics = function(z, w.eye, w.targets, **head(w) | options)
        if by_position:
            logits = reference.head_logits(z.detach(), w.eye, **head(w)).mean(-1)
            for side, half in (("chosen", slice(0, w.S // 2)), ("rejected", slice(w.S // 2, None))):
                kept = logits[half][w.valid[half]] if w.case.layout == "packed" else logits[half]
                metrics[f"logits/{side}"] = kept.mean()
        return value, metrics, per_token(w, z)

    return truth


def orpo_inputs(w: World) -> dict[str, Tensor]:
    """Labels of the NLL: those of the completion, and more before it."""
    if "nll_targets" not in w.case.inputs:
        return {}
    more = w.ids("nll_targets", w.S, w.T).masked_fill(~w.valid, w.ignore_index)
    return {"nll_targets": torch.where(w.labels == w.ignore_index, more, w.labels)}


def orpo(w: World, z: Tensor):
    given = {name: w.aligned(x, w.ignore_index) for name, x in orpo_inputs(w).items()}
    return preference(functools.partial(reference.orpo, **given))(w, z)


def kto_inputs(w: World) -> dict:
    found = preference_inputs(w) | {"labels": w.uniform("kto labels", w.S) < 0.6}
    if w.options.get("loss_type", "kto") == "kto":
        found["kl"] = unrelated(w)[0] if w.case.inputs["kl"] == "mapping" else w.case.inputs["kl"]
    return found


def unrelated(w: World) -> tuple[dict[str, Tensor], Tensor]:
    """Unrelated completions as the call takes them, and their mean log-ratio."""
    S, T = 3, 2
    hidden, targets = w.grid("kl_hidden", S, T, w.case.H), w.ids("kl_targets", S, T)
    ref_logps = w.random("kl ref", S, T)
    scored = w.aligned(targets, w.ignore_index)
    options = {"ignore_index": w.ignore_index, "bias": w.bias, **w.head}
    logps, _, _ = reference.token_logprobs(hidden, w.weight, scored, **options)
    ratios = logps.sum(1) - w.aligned(ref_logps, 0.0).masked_fill(scored == w.ignore_index, 0).sum(1)
    given = {"kl_hidden": hidden.to(w.case.dtype), "kl_targets": targets, "ref_logps": ref_logps.float()}
    if w.case.layout == "packed":
        given = {name: x.flatten(0, 1) for name, x in given.items()}
        given["kl_cu_seqlens"] = torch.tensor([0, 2, 4, 6])
    return given, ratios.mean()


def kto(w: World, z: Tensor):
    found = w.family_inputs
    point = unrelated(w)[1] if isinstance(found.get("kl"), dict) else found.get("kl") or 0.0
    value, metrics, tokens = preference(functools.partial(reference.kto, labels=found["labels"], kl=point))(
        w, z
    )
    return value, metrics if w.S else metrics | {"kl": torch.zeros(())}, tokens


# -- policies


def policy_inputs(w: World) -> dict[str, Tensor]:
    drawn, found = w.case.inputs, {}
    shape = {"sequences": (w.S,), "column": (w.S, 1), "tokens": (w.S, w.T)}
    found["advantages"] = w.random("advantages", *shape[drawn["advantages"]])
    if "old_logps" in drawn:
        found["old_logps"] = w.near_logps("old_logps", drawn["old_logps"])
        if drawn.get("old") == "sequences":
            found["old_logps"] = found["old_logps"].sum(1).float().double()
    if "sampling_logps" in drawn:
        found["sampling_logps"] = w.near_logps("sampling_logps", 0.1)
    if "importance_weights" in drawn:
        found["importance_weights"] = w.uniform("importance", *shape[drawn["importance_weights"]]) + 0.5
    return found | preference_inputs(w)


def policy(function: Callable):
    def truth(w: World, z: Tensor):
        given = {name: x for name, x in w.family_inputs.items() if not name.startswith("ref_")}
        options = {name: x for name, x in defined(w).items() if not name.startswith("ref_")}
        options |= given | reference_of(w) | {"num_items": w.case.num_items}
        value, metrics, _ = function(z, w.eye, w.targets, **head(w) | options)
        return value, metrics, per_token(w, z)

    return truth


def grpo_options() -> Drawn:
    clipped = st.one_of(
        some(delta=[1.1, 2.0], epsilon=[0.1], epsilon_high=[0.3], importance_sampling_level=["sequence"])
    )
    kinds = st.one_of(
        merged(one(loss_type=["dapo", "grpo", "bnpo", "luspo"]), clipped),
        merged(one(loss_type=["dr_grpo"], max_completion_length=[7]), clipped),
        merged(
            one(loss_type=["cispo"], epsilon_high=[1.5, 5.0]), some(importance_sampling_level=["sequence"])
        ),
        merged(
            one(loss_type=["sapo"]), some(sapo_temperature_neg=[2.0], importance_sampling_level=["sequence"])
        ),
        merged(one(loss_type=["vespo"]), some(vespo_k_pos=[0.5], vespo_lambda_neg=[0.5])),
    )
    others = some(
        beta=[0.1],
        entropy_coef=[0.1],
        use_bias_correction_kl=[True],
        top_entropy_quantile=[0.5, 0.1],
        off_policy_mask_threshold=[0.05],
    )
    return merged(kinds, others)


ROLLOUT = merged(
    one(advantages=["sequences", "tokens"]),
    some(old_logps=[0.1, 2.0], sampling_logps=[True], importance_weights=["sequences", "tokens"]),
)


# -- distillation


def teacher_inputs(w: World) -> dict:
    kind, V = w.case.inputs["teacher"], w.case.V
    rows = {"larger": V + 3, "smaller": max(1, V - 2)}.get(kind, V)
    hidden = w.grid("teacher_hidden", w.S, w.T, w.case.H + 1)
    weight = w.grid("teacher_weight", rows, w.case.H + 1, scale=w.case.inputs.get("teacher_peak", 1.0))
    bias = w.grid("teacher_bias", rows) if w.case.bias else None
    if kind != "topk":
        return {"teacher_hidden": hidden, "teacher_weight": weight, "teacher_bias": bias}
    logits = reference.head_logits(hidden, weight, bias) / w.options.get("temperature", 1.0)
    values, ids = logits.log_softmax(-1).topk(min(w.case.inputs["ids"], V))
    values = values.float().clamp(max=0).double()
    if "empty" in w.case.inputs and values.shape[-1] > 1:
        values[..., -1] = -torch.inf
    return {"topk": (values, ids)}


def teacher_logits(w: World) -> Tensor:
    found = w.family_inputs
    options = {
        name.removeprefix("teacher_"): x for name, x in w.options.items() if name.startswith("teacher_")
    }
    options |= {name: x for name, x in w.head.items() if name == "temperature"}
    model = [found[f"teacher_{name}"] for name in ("hidden", "weight", "bias")]
    return reference.head_logits(*model, **options)


def distillation(w: World, z: Tensor):
    options, found = defined(w), w.family_inputs
    labelled = "unlabelled" not in w.case.inputs
    options |= {"num_items": w.case.num_items, "mask": w.counted}
    # Everything but the ids themselves: which token counts is in the mask.
    labels = w.aligned(w.labels, w.ignore_index) if labelled else None
    if w.options.get("support") and "topk" not in found:
        return on_support(w, z, labels)
    for name in ("support", "k", "shared_vocabulary"):
        options.pop(name, None)
    if "topk" in found:
        teacher = {"teacher_logprobs_topk": found["topk"]}
    else:
        t = teacher_logits(w) * w.options.get("temperature", 1.0)
        t = t[..., : w.options.get("shared_vocabulary")]
        teacher = {"teacher_hidden": t, "teacher_weight": torch.eye(t.shape[-1], dtype=t.dtype)}
        options = {name: x for name, x in options.items() if not name.startswith("teacher_")}
    value, metrics = reference.distillation(z, w.eye, labels, **teacher, **head(w) | options)
    if "topk" in found and w.options.get("support") and w.options.get("topk_mode") == "renormalize":
        if not w.options.get("hard_loss_weight"):  # the partition function cancels
            metrics = {"soft_loss": metrics["soft_loss"]}
    return value, metrics, {}


def on_support(w: World, z: Tensor, labels: Tensor | None):
    """A divergence over the ids that student or teacher rate best: all others are one event, or none."""
    options, support, k = w.options, w.options["support"], w.options["k"]
    s, t = reference.head_logits(z, w.eye, **head(w)), teacher_logits(w)
    common = min(s.shape[-1], t.shape[-1])
    log_s, log_t = s.log_softmax(-1), t.log_softmax(-1)

    def best(logits: Tensor) -> Tensor:
        ids = logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, True)

    of = {"student": best(s[..., :common]), "teacher": best(t[..., :common])}
    kept = of["student"] | of["teacher"] if support == "union" else of[support]

    def over(log_p: Tensor) -> Tensor:
        chosen = log_p[..., :common].masked_fill(~kept, NOTHING)
        if options.get("topk_mode") == "renormalize":
            return chosen.log_softmax(-1)
        rest = torch.cat((log_p[..., :common].masked_fill(kept, NOTHING), log_p[..., common:]), -1)
        return torch.cat((chosen, rest.logsumexp(-1, keepdim=True)), -1)

    student, teacher = over(log_s), over(log_t).detach()
    soft = {
        "jsd": lambda: generalized_jsd(student, teacher, options.get("beta", 0.5)),
        "forward_kl": lambda: kl(teacher, student),
        "reverse_kl": lambda: kl(student, teacher),
        "skewed_kl": lambda: kl_to_mixture(teacher, student, 1 - options.get("skew_alpha", 0.1)),
        "total_variation": lambda: (teacher.exp() - student.exp()).abs().sum(-1) / 2,
    }[options.get("divergence", "jsd")]()
    hard, top1 = torch.zeros_like(soft), torch.zeros_like(soft)
    if labels is not None:
        warm = {name: x for name, x in head(w).items() if name != "temperature"}
        hard = -reference.token_logprobs(z, w.eye, labels, ignore_index=w.ignore_index, **warm)[0]
        top1 = (s.argmax(-1) == labels).double()
    share = options.get("hard_loss_weight", 0.0)
    losses = (share * hard + (1 - share) * soft).masked_fill(~w.counted, 0)
    entropy = -(log_s.exp() * log_s).sum(-1)
    agreement = (s[..., :common].argmax(-1) == t[..., :common].argmax(-1)).double()
    metrics = {"soft_loss": soft, "hard_loss": hard, "entropy": entropy}
    metrics |= {"token_accuracy": top1, "agreement": agreement}
    metrics = {name: mean_of(w, x.detach().masked_fill(~w.counted, 0)) for name, x in metrics.items()}
    reduction = options.get("reduction", "mean")
    if reduction == "mean":
        losses = losses.sum() / (w.case.num_items or max(1, w.counted.sum().item()))
    return losses.sum() if reduction == "sum" else losses, metrics, {}


def call_distillation(w: World, loss, hidden: Tensor, weight, bias: Tensor | None, **options):
    given = {name: w.ours(name, x) for name, x in w.family_inputs.items() if name != "topk"}
    if "topk" in w.family_inputs:
        values, ids = w.family_inputs["topk"]
        given["teacher_logprobs_topk"] = (w.ours("topk_logprobs", values), w.ours("topk_ids", ids))
    targets = None if "unlabelled" in w.case.inputs else w.ours("labels", w.labels)
    out = loss(hidden, weight, targets, bias=bias, **given, **options)
    return out.loss, out.metrics, {}


# -- numbers per token


def upstreams(w: World) -> dict[str, Tensor]:
    """Gradients of what `linear_logprobs` returns; of some of it none."""
    k = (w.case.inputs["ids"],) if "ids" in w.case.inputs else ()
    return {
        name: w.random(f"upstream {name}", w.S, w.T, *(k if name == "logps" else ()))
        for name in w.case.inputs["used"]
    }


def several(w: World) -> Tensor:
    """(S, T, k) ids, some slots empty, unshifted."""
    k = w.case.inputs["ids"]
    ids = w.ids("ids", w.S, w.T, k)
    empty = (w.uniform("empty", w.S, w.T, k) < w.case.ignored) | ~w.valid[..., None]
    return ids.masked_fill(empty, w.ignore_index)


def logprobs(w: World, z: Tensor):
    options = {"ignore_index": w.ignore_index, **head(w)}
    if "ids" in w.case.inputs:
        ids = several(w)
        if w.case.shift:
            ids = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], w.ignore_index)), 1)
        found = dict(zip(("logps", "entropy", "lse"), reference.ids_logprobs(z, w.eye, ids, **options)))
    else:
        found = {name: numbers(w, z)[name] for name in ("logps", "entropy", "lse")}
    value = torch.zeros((), dtype=z.dtype)
    for name, upstream in upstreams(w).items():
        value = value + torch.where(found[name] > -torch.inf, found[name] * upstream, 0.0).sum()
    if not w.case.inputs.get("entropy"):
        found.pop("entropy")
    return value, {}, {name: x.detach() for name, x in found.items()}


def call_logprobs(w: World, make, hidden: Tensor, weight, bias: Tensor | None, **options):
    targets = several(w) if "ids" in w.case.inputs else w.labels
    targets = w.ours("labels", targets)
    options |= {name: x for name, x in w.case.inputs.items() if name == "entropy"} | w.options
    if not w.case.shift:
        options.pop("cu_seqlens", None)
    out = ll.linear_logprobs(hidden, weight, targets, bias=bias, **options)
    found = {name: x for name, x in out._asdict().items() if x is not None}
    value = hidden.new_zeros((), dtype=w.case.wide)
    for name, upstream in upstreams(w).items():
        upstream = w.ours("upstream", upstream.nan_to_num())
        value = value + torch.where(found[name] > -torch.inf, found[name] * upstream.nan_to_num(), 0.0).sum()
    return value, {}, {name: x.detach() for name, x in found.items()}


def topk(w: World, z: Tensor):
    logps, ids = reference.best_ids(z, w.eye, min(w.case.inputs["k"], w.case.V), **head(w))
    found = numbers(w, z)
    counted = w.valid if w.mask is None else w.valid & w.mask
    logits = reference.head_logits(z, w.eye, **head(w))
    log_p = logits.log_softmax(-1)
    found = {
        "logps": logps,
        "ids": ids,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": logits.logsumexp(-1),
    }
    zeroed = {
        name: x.masked_fill(~counted.view(*counted.shape, *[1] * (x.dim() - 2)), 0)
        for name, x in found.items()
    }
    return torch.zeros((), dtype=z.dtype), {}, zeroed


def call_topk(w: World, make, hidden: Tensor, weight, bias: Tensor | None, **options):
    counted = w.valid if w.mask is None else w.valid & w.mask
    mask = w.ours("mask", counted.to(getattr(torch, w.case.mask or "bool")))
    given = {name: x for name, x in w.options.items() if name != "ignore_index"}
    k = min(w.case.inputs["k"], w.case.V)
    out = ll.linear_topk(hidden, weight, k, bias=bias, mask=mask, **given)
    return hidden.new_zeros((), dtype=w.case.wide), {}, out._asdict()


# -- losses of a user's own

STATISTICS = ("logps", "lse", "entropy", "sum_logits", "log_sum_sq_probs", "is_top1")


def mixture(stats: dict[str, Tensor]) -> Tensor:
    """(n,) some function of every statistic."""
    return sum((i + 1) * (0.05 * x).sin() for i, x in enumerate(stats.values()))


@functools.cache
def own_class(names: tuple[str, ...], watched: tuple[str, ...], scope: str) -> type:
    """A `TokenLoss` of the statistics `names`."""

    @dataclass(frozen=True, kw_only=True)
    class OwnLoss(ll.TokenLoss):
        differentiates: ClassVar = names
        observes: ClassVar = watched
        token_inputs: ClassVar = ("token_weights",)
        metric_names: ClassVar = watched

        def terms(self, stats: ll.TokenStats, batch: ll.Batch):
            values = mixture({name: getattr(stats, name) for name in names})
            if batch.token_weights is not None:
                values = values * batch.token_weights
            if scope == "group":
                sums = batch.sum_by_sequence(values)
                values = batch.spread((sums / batch.lengths.clamp(min=1)).tanh())
            return {"own": ll.Term(values)}, {name: ll.Term(getattr(stats, name)) for name in watched}

    OwnLoss.scope = scope
    return OwnLoss


def make_own(w: World, **options):
    drawn = w.case.inputs
    return own_class(
        drawn["differentiates"], drawn["observes"], "group" if w.case.inputs.get("group") else "token"
    )(**options)


def own(w: World, z: Tensor):
    found = numbers(w, z)
    values = mixture({name: found[name] for name in w.case.inputs["differentiates"]})
    if "token_weights" in w.family_inputs:
        values = values * w.family_inputs["token_weights"]
    values = values.masked_fill(~w.counted, 0)
    if w.case.inputs.get("group"):
        values = (values.sum(1) / w.counted.sum(1).clamp(min=1)).tanh()[:, None].expand_as(values)
        values = values.masked_fill(~w.counted, 0)
    metrics = {name: mean_of(w, found[name].detach()) for name in w.case.inputs["observes"]}
    return reduced(w, values), metrics, per_token(w, z)


def reduced(w: World, values: Tensor) -> Tensor:
    reduction = w.options.get("reduction", "mean")
    if reduction == "mean":
        return values.sum() / (w.case.num_items or max(1, w.counted.sum().item()))
    return values.sum() if reduction == "sum" else values


@dataclass(frozen=True, kw_only=True)
class Brier(ll.LogitsLoss):
    """A `LogitsLoss`, which sees the logits themselves."""

    metric_names: ClassVar = ("top",)

    def terms(self, logits: Tensor, batch: ll.Batch):
        p = logits.log_softmax(-1).exp()
        target = p.gather(1, batch.targets.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
        return {"brier": ll.Term(p.square().sum(-1) - 2 * target + 1)}, {"top": ll.Term(p.amax(-1))}


def brier(w: World, z: Tensor):
    p = reference.head_logits(z, w.eye, **head(w)).log_softmax(-1).exp()
    target = p.gather(-1, w.targets.masked_fill(~w.counted, 0)[..., None])[..., 0]
    values = (p.square().sum(-1) - 2 * target + 1).masked_fill(~w.counted, 0)
    return reduced(w, values), {"top": mean_of(w, p.amax(-1).detach() * w.counted)}, {}


# -- the table

DIFFERENCES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm", "sft")
OTHERS = ("nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down")
REFERENCED = one(reference=["tokens", "sequences", "model"])
OF_REFERENCES = some(ref_softcap=[5.0, None], ref_logit_scale=[0.5])
SEQUENCES = ("mask", "shift", "num_items", "none", "sum", "main", "tokens")
DISTILLED = merged(
    one(teacher=["same", "topk", "larger", "smaller"], ids=[1, 3, 100]),
    some(unlabelled=[True], empty=[True], teacher_peak=[8.0, 0.25]),
)


def dpo_options() -> Drawn:
    shared = some(
        beta=[0.5, 0.01],
        label_smoothing=[0.1],
        average_logps=[True, False],
        ld_alpha=[0.5, 0.0],
        use_weighting=[True],
        reference_free=[True],
        discopop_tau=[0.5],
    )
    types = st.one_of(
        merged(
            one(loss_type=DIFFERENCES),
            some(
                f_divergence_type=["forward_kl", "js_divergence", "alpha_divergence"],
                f_alpha_divergence_coef=[0.3, 1.0],
            ),
        ),
        one(loss_type=OTHERS),
        one(loss_type=[("sigmoid", "sft", "bco_pair"), ("ipo", "aot")], loss_weights=[(0.5, 2.0, 1.0)]),
    )
    return merged(types, shared, OF_REFERENCES)


def fits_dpo(case: Case) -> bool:
    o = case.options
    names = {o["loss_type"]} if isinstance(o["loss_type"], str) else set(o["loss_type"])
    weights = o.get("loss_weights")
    return (
        (weights is None or len(weights) == len(o["loss_type"]))
        and (not names & {"exo_pair"} or "label_smoothing" in o)
        and not (names & {"aot", "aot_unpaired"} and o.get("use_weighting"))
        and not ("sft" in names and o.get("reduction") == "none")
        and o.get("reference_free", False) == ("reference" not in case.inputs)
        and clear(case)
    )


def clear(case: Case) -> bool:
    """Whether the reference is per sequence by its shape: of as many tokens as sequences it is per token."""
    same = case.layout == "packed" and sum(case.lengths) == len(case.lengths)
    return not same or case.inputs.get("reference") != "sequences"


def fits_distillation(case: Case) -> bool:
    o, i = case.options, case.inputs
    given = i["teacher"] == "topk"
    return (
        not (o.get("divergence") == "cosine" and (given or "support" in o))
        and not (given and (o.get("support", "teacher") != "teacher" or "k" in o))
        and (given or ("support" in o) == ("k" in o))
        and o.get("k", 1) <= case.V - 2 * (i["teacher"] == "smaller")
        and not (o.get("hard_loss_weight") and "unlabelled" in i)
        and not ("softcap" in o and ("support" in o or "teacher_softcap" in o))
    )


def fits_grpo(case: Case) -> bool:
    o, i = case.options, case.inputs
    known = "old_logps" in i or "sampling_logps" in i
    return (
        (not o.get("off_policy_mask_threshold") or known)
        and bool(o.get("beta")) == ("reference" in i)
        and i.get("reference") != "sequences"
    )


FAMILIES: dict[str, Family] = {
    "cross-entropy": Family(
        ll.CrossEntropyLoss,
        cross_entropy,
        options=some(label_smoothing=[0.1, 1.0], z_loss=[0.1], dft=[True]),
        inputs=some(class_weights=[True], token_weights=[True]),
        given=cross_entropy_inputs,
    ),
    "multi-token": Family(
        ll.MultiTokenLoss,
        multi_token,
        options=some(label_smoothing=[0.1], z_loss=[0.1], dft=[True]),
        inputs=one(depths=[1, 2, 3]),
        call=call_multi_token,
        takes=("mask", "num_items", "sum"),
    ),
    "DPO": Family(
        ll.DPOLoss,
        preference(reference.dpo),
        options=dpo_options(),
        inputs=st.one_of(REFERENCED, some()),
        given=preference_inputs,
        group=2,
        takes=SEQUENCES,
        fits=fits_dpo,
    ),
    "ORPO": Family(
        ll.ORPOLoss,
        orpo,
        options=some(beta=[1.0], logits_over=["position"]),
        inputs=some(nll_targets=[True]),
        given=orpo_inputs,
        group=2,
        takes=("mask", "shift", "num_items", "sum", "main", "tokens"),
        # Predictions are of every position that has a label.
        fits=lambda case: (
            "nll_targets" not in case.inputs
            or (
                case.mask is None
                and "return_predictions" not in case.options
                and "return_logps" not in case.options
            )
        ),
    ),
    "CPO": Family(
        ll.CPOLoss,
        preference(reference.cpo),
        options=merged(
            one(loss_type=["sigmoid", "hinge", "ipo", "simpo"]),
            some(
                beta=[1.0],
                average_logps=[True, False],
                label_smoothing=[0.2],
                cpo_alpha=[0.0, 0.5],
                simpo_gamma=[0.1],
                alpha=[0.3, -0.2],
                logits_over=["position"],
            ),
        ),
        group=2,
        takes=SEQUENCES,
        fits=lambda case: case.options.get("reduction") != "none" or case.options.get("cpo_alpha") == 0,
    ),
    "SimPO": Family(
        ll.SimPOLoss,
        preference(reference.simpo),
        options=some(beta=[0.5], gamma=[0.1]),
        group=2,
        takes=SEQUENCES,
    ),
    "KTO": Family(
        ll.KTOLoss,
        kto,
        options=merged(
            some(
                loss_type=["apo_zero_unpaired"], beta=[1.0], desirable_weight=[2.0], undesirable_weight=[0.3]
            ),
            OF_REFERENCES,
        ),
        inputs=merged(REFERENCED, one(kl=[0.0, 1.5, -1.0, "mapping"])),
        given=kto_inputs,
        group=1,
        takes=SEQUENCES,
        fits=clear,
    ),
    "GRPO": Family(
        ll.GRPOLoss,
        policy(reference.grpo),
        options=merged(grpo_options(), OF_REFERENCES),
        inputs=merged(ROLLOUT, some(reference=["tokens", "model"])),
        given=policy_inputs,
        group=1,
        takes=SEQUENCES,
        fits=fits_grpo,
    ),
    "PPO": Family(
        ll.PPOLoss,
        policy(reference.ppo),
        options=some(epsilon=[0.1], epsilon_high=[0.3], entropy_coef=[0.1]),
        inputs=ROLLOUT,
        given=policy_inputs,
        group=1,
        takes=SEQUENCES,
    ),
    "RLOO": Family(
        ll.RLOOLoss,
        policy(reference.rloo),
        options=some(epsilon=[0.1], epsilon_high=[0.3]),
        inputs=merged(one(advantages=["sequences"]), some(old_logps=[0.1, 2.0], old=["sequences"])),
        given=policy_inputs,
        group=1,
        takes=SEQUENCES,
    ),
    "REINFORCE": Family(
        ll.REINFORCELoss,
        policy(reference.reinforce),
        inputs=one(advantages=["sequences", "tokens"]),
        given=policy_inputs,
        group=1,
        takes=SEQUENCES,
    ),
    "distillation": Family(
        ll.DistillationLoss,
        distillation,
        options=some(
            divergence=["forward_kl", "reverse_kl", "skewed_kl", "total_variation", "cosine"],
            beta=[0.0, 0.1, 1.0],
            skew_alpha=[0.0, 0.5, 1.0],
            hard_loss_weight=[0.3, 1.0],
            topk_mode=["renormalize"],
            support=["teacher", "student", "union"],
            k=[1, 3],
            teacher_softcap=[20.0],
            teacher_logit_scale=[0.5],
        ),
        inputs=DISTILLED,
        given=teacher_inputs,
        call=call_distillation,
        takes=("mask", "shift", "num_items", "none", "sum", "main", "flat"),
        fits=fits_distillation,
    ),
    "linear_logprobs": Family(
        dict,
        logprobs,
        inputs=merged(
            one(used=[("logps",), ("lse",), ("logps", "lse"), ("logps", "entropy"), ("entropy",)]),
            some(entropy=[True, "metric"], ids=[1, 3]),
        ),
        call=call_logprobs,
        takes=("shift", "flat"),
        fits=lambda case: "entropy" not in case.inputs["used"] or case.inputs.get("entropy") is True,
    ),
    "linear_topk": Family(
        dict,
        topk,
        inputs=one(k=[1, 3, 100]),
        call=call_topk,
        takes=("mask", "flat"),
        fits=lambda case: not case.trained,
    ),
    "own TokenLoss": Family(
        make_own,
        own,
        inputs=merged(
            st.fixed_dictionaries(
                {
                    "differentiates": st.lists(st.sampled_from(STATISTICS[:4]), min_size=1, unique=True).map(
                        tuple
                    ),
                    "observes": st.lists(st.sampled_from(STATISTICS), unique=True).map(tuple),
                }
            ),
            some(group=[True], token_weights=[True]),
        ),
        given=cross_entropy_inputs,
        group=1,
        takes=SEQUENCES,
    ),
    "own LogitsLoss": Family(
        Brier, brier, takes=("mask", "shift", "num_items", "none", "sum", "main", "flat")
    ),
}
