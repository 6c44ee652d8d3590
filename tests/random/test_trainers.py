"""Stock TRL and the flag, one step each, with options drawn at random, on tiny models with peaked heads."""

import functools
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import strategies as st

import logitless.trl_integration as ours
from logitless.losses.dpo_types import DPO_TYPES as DPO_LOSSES
from logitless.trl_integration import apply_to
from tests.random.calls import Case
from tests.random.known import unknown
from tests.random.search import REPEATED, search
from tests.trl_integration.compare import adapted, options, stock
from tests.trl_integration.kinds import entered_twice, needs, train_together
from tests.trl_integration.tiny import Run, assert_same_gradients, prepare, tiny_model, words
from tests.trl_integration.user_models import HEADS, REFUSED, TRAINED, subclass

# To compile a loss of logits takes seconds for each set of options, and its results only differ by rounding.
pytestmark = pytest.mark.usefixtures("uncompiled")

RTOL = 1e-3
BATCHES = {"gradient_accumulation_steps": (2,), "per_device_train_batch_size": (1, 2)}
SHARED = BATCHES | {"gradient_checkpointing": (True,)}
ROLLED = {
    "beta": (0.0, 0.5),
    "num_iterations": (2,),
    "epsilon": (0.05,),
    "temperature": (0.7, 1.5),
    "mask_truncated_completions": (True,),
    "num_generations": (2,),
    "max_completion_length": (3,),
    "gradient_accumulation_steps": (2,),
}
DISTILLED = {"beta": (0.0, 0.3, 1.0), "temperature": (0.7, 2.0)}
SELF_DISTILLED = {
    "distillation_alpha": (0.0, 0.5, 1.0),
    "distillation_mode": ("full_logits", "sampled_token"),
    "distillation_add_tail": (True, False),
}
# By kind of trainer: the options of its config that change a loss.
OPTIONS: dict[str, dict[str, tuple]] = {
    "SFT": SHARED
    | {
        "loss_type": ("dft",),
        "label_smoothing_factor": (0.2,),
        "padding_free": (True,),
        "packing": (True,),
        "max_length": (8, None),
        "pad_to_multiple_of": (8,),
    },
    "DPO": SHARED
    | {
        "loss_type": (*DPO_LOSSES, ["sigmoid", "sft"]),
        "loss_weights": ([0.5], [0.5, 2.0]),
        "label_smoothing": (0.1,),
        "beta": (0.5,),
        "f_divergence_type": ("forward_kl", "js_divergence", "alpha_divergence"),
        "f_alpha_divergence_coef": (0.3,),
        "ld_alpha": (0.5,),
        "use_weighting": (True,),
        "precompute_ref_log_probs": (True,),
        "max_length": (12,),
    },
    "KTO": {
        "loss_type": ("apo_zero_unpaired",),
        "beta": (0.5,),
        "desirable_weight": (2.0,),
        "undesirable_weight": (0.5,),
        "precompute_ref_log_probs": (True,),
        "max_length": (12,),
        "gradient_accumulation_steps": (2,),
    },
    "GRPO": ROLLED
    | {
        "loss_type": ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
        "epsilon_high": (1.5,),
        "delta": (1.2,),
        "importance_sampling_level": ("sequence",),
        "entropy_coef": (0.2,),
        "use_adaptive_entropy": (True,),
        "top_entropy_quantile": (0.5,),
        "off_policy_mask_threshold": (0.01,),
        "use_bias_correction_kl": (True,),
        "cast_lm_head_to_fp32": (True,),
        "scale_rewards": ("batch", "none"),
    },
    "RLOO": ROLLED
    | {"normalize_advantages": (True,), "reward_clip_range": ((0.1, 0.5),), "epsilon_high": (0.4,)},
    "ORPO": SHARED | {"beta": (0.5, 1.0), "max_length": (16,)},
    "CPO": SHARED
    | {
        "loss_type": ("hinge", "ipo", "simpo", "alphapo"),
        "cpo_alpha": (0.0, 0.5),
        "label_smoothing": (0.1,),
        "simpo_gamma": (0.7,),
        "alpha": (0.2,),
        "beta": (0.5,),
    },
    "TPO": SHARED
    | {"loss_type": ("hinge", "ipo", "tpo-l"), "tpo_alpha": (0.0, 2.0), "label_smoothing": (0.1,)},
    "GKD": SHARED | DISTILLED,
    "GOLD": SHARED | DISTILLED,
    "Distillation": BATCHES | DISTILLED,
    "IWOPD": DISTILLED
    | {
        "distillation_objective": ("reverse_kl", "iw_opd"),
        "loss_top_k": (0, 5),
        "loss_add_tail": (False,),
    },
    "SDFT": SELF_DISTILLED | {"temperature": (0.7,)},
    "SDPO": SELF_DISTILLED | {"beta": (0.1,)},
    "OnlineDPO": {
        "loss_type": ("ipo",),
        "beta": (0.5,),
        "temperature": (0.7,),
        "missing_eos_penalty": (0.5,),
    },
    "GMPO": ROLLED,
    "A2PO": {"beta1": (0.1,), "beta2": (0.3,), "temperature": (0.7,)},
}
FORWARDS = TRAINED | REFUSED
# Fields of a user's config, named like options of GRPO
OWN_FIELDS = {"temperature": 3.0, "cast_lm_head_to_fp32": True, "use_vllm": True, "vllm_server_base_url": "x"}
FAMILIES = ("llama", "tied", "gemma2", "granite", "cohere")


@dataclass(frozen=True, kw_only=True, repr=False)
class Step(Case):
    """A training step, or two.

    Attributes:
        kind: the trainer's name without "Trainer".
        options: of its config.
        family: of the model.
        lora: whether the model is adapted.
        applied: whether `apply_to` puts the flag on, and not our pair.
        forward: name of a forward pass of the user's (`user_models`); "" for the model's own.
        head: name of what the user has made of the LM head.
        own_fields: whether the config is a subclass of the user's, with fields named like TRL's in others.
        is_nested: whether the method of the loss calls itself.
        neighbour: options of a trainer of this kind that trains in another thread; None for no such trainer.
    """

    kind: str
    options: dict = field(default_factory=dict)
    family: str = "llama"
    lora: bool = False
    applied: bool = False
    forward: str = ""
    head: str = ""
    own_fields: bool = False
    is_nested: bool = False
    neighbour: dict | None = None
    seed: int = 0


# Others draw completions from torch's generator, which threads share.
THREADED = ("SFT", "DPO", "KTO", "ORPO", "CPO", "TPO", "GKD", "GOLD", "IWOPD")


@st.composite
def options_of(draw, kind: str) -> dict:
    # Few at a time: most combinations of many are refused by TRL.
    names = draw(st.lists(st.sampled_from(list(OPTIONS[kind])), max_size=4, unique=True))
    return {name: draw(st.sampled_from(OPTIONS[kind][name])) for name in names}


@st.composite
def steps(draw, kind: str) -> Step:
    chosen = draw(options_of(kind))
    family = draw(st.sampled_from(FAMILIES))
    # Seldom: most trainers read logits in a way that some of these forward passes do not know.
    forward = draw(st.sampled_from(("", "", *FORWARDS)))
    return Step(
        kind=kind,
        options=chosen,
        family=family,
        lora=draw(st.booleans()),
        applied=draw(st.booleans()),
        forward=forward,
        head=draw(st.sampled_from(("", *HEADS))),
        own_fields=draw(st.booleans()),
        is_nested=draw(st.booleans()),
        neighbour=draw(st.none() | options_of(kind)) if kind in THREADED else None,
        seed=draw(st.integers(0, 100)),
    )


def with_own_fields(config: type) -> type:
    fields = {name: value for name, value in OWN_FIELDS.items() if name not in config.__dataclass_fields__}
    annotations = {"__annotations__": {name: type(value) for name, value in fields.items()}}
    return dataclass(type("OwnConfig", (config,), fields | annotations))


@functools.cache
def folder(family: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix=f"logitless-{family}-"))
    tiny_model(family).save_pretrained(path / "model")
    words().save_pretrained(path / "model")
    return path


def step(case: Step, flag: bool) -> Run:
    """One step, beside its neighbour if it has the flag."""
    beside = []
    if flag and case.neighbour is not None:
        other = replace(case, options=case.neighbour, is_nested=not case.is_nested)
        with suppress(Exception):  # what TRL refuses
            trainer, train = prepared(other, flag)
            beside.append((trainer, lambda: unraised(train)))
    return train_together(prepared(case, flag), *beside)[0]


def unraised(function: Callable) -> Any:
    with suppress(Exception):
        return function()


def prepared(case: Step, flag: bool) -> tuple[Any, Callable[[], Run]]:
    """The trainer, and the function that trains it."""
    path = folder(case.family)
    dataset, settings, given = needs(case.kind, path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "model")
    torch.manual_seed(case.seed)
    with torch.no_grad():  # so that it is not the reference that a trainer loads
        for p in model.parameters():
            p += 0.05 * p.std() * torch.randn_like(p)
    if case.kind == "OnlineDPO" and not case.lora:  # whose reference is a copy of the model otherwise
        given["ref_model"] = transformers.AutoModelForCausalLM.from_pretrained(path / "model")
    model = HEADS[case.head](model) if case.head else model
    model = subclass(FORWARDS[case.forward], model) if case.forward else model
    model = adapted(model) if case.lora else model
    in_pair = flag and not case.applied
    config = getattr(ours, f"{case.kind}Config") if in_pair else stock(f"{case.kind}Config")
    config = with_own_fields(config) if case.own_fields else config
    trainer = getattr(ours, f"{case.kind}Trainer") if in_pair else stock(f"{case.kind}Trainer")
    trainer = entered_twice(trainer) if case.is_nested else trainer
    settings |= {"max_steps": case.options.get("num_iterations", 1), "seed": case.seed, "learning_rate": 1e-3}
    settings |= {"train_sampling_strategy": "sequential"} | case.options
    settings |= {"use_chunked_loss": True, "logits_budget": 2**14} if in_pair else {}

    def build(*args, **kwargs):
        made = trainer(*args, **kwargs)
        if flag and case.applied:
            apply_to(made, logits_budget=2**14)
        return made

    torch.manual_seed(case.seed)
    args = config(**options(path / "out", **settings))
    return prepare(build, args, model, dataset, tokenizer=words(), **given)


def check(case: Step) -> None:
    """Compares a step with the flag to stock TRL's: logs and gradients, or the refusal."""
    try:
        of_stock = step(case, flag=False)
    except Exception:  # what stock TRL refuses or cannot do
        if case.forward:
            return  # the flag may be able to
        with pytest.raises(Exception):  # noqa: B017
            step(case, flag=True)
        return
    try:
        mine = step(case, flag=True)
    except (ValueError, TypeError) as error:
        assert ": expected " in str(error), f"not refused by name: {error}"
        return
    for theirs_logged, logged in zip(of_stock.logs, mine.logs, strict=True):
        assert theirs_logged.keys() == logged.keys()
        for name, value in theirs_logged.items():
            # Where the reference is the policy itself, margins and their signs are rounding errors.
            tied = "accuracies" in name and abs(theirs_logged.get("rewards/margins", 1.0)) < 1e-3
            if "time" not in name and not tied:
                expected = value if value is None else pytest.approx(value, rel=RTOL, abs=1e-4, nan_ok=True)
                assert logged[name] == expected, f"logged {name}: {logged[name]}, stock {value}"
    of_finite = [
        [{name: x.isfinite() for name, x in step.items()} for step in run.gradients]
        for run in (of_stock, mine)
    ]
    if not all(x.all() for step in of_finite[0] for x in step.values()):  # an overflow in stock TRL
        torch.testing.assert_close(of_finite[1], of_finite[0])
        return
    assert_same_gradients(of_stock, mine, rtol=RTOL)


SEARCHES = {kind: (steps(kind).filter(unknown), lambda case: check(case)) for kind in OPTIONS}


@pytest.mark.repeats
@pytest.mark.parametrize("kind", SEARCHES)
def test_step(kind):
    search(*SEARCHES[kind], REPEATED, max_examples=4)
