"""verl 0.9.1: the loss that an actor's config means, for a training loop with hidden states.

`policy_loss` reads `actor_rollout_ref.actor` and `algorithm.rollout_correction`, as a dict, an OmegaConf
config or verl's dataclasses. verl itself is not imported. Options whose results would differ are refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

from logitless.errors import check_choice, value_error
from logitless.losses import GRPOLoss, REINFORCELoss, SamplerCorrection

# kl_loss_type -> kl_estimator
ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
# verl clamps k3 to +-10.
K3_MAX = 10.0
CORRECTED_LEVELS = {"token": "token", "sequence": "sequence"}
REJECTED_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}
COVARIANCE = "needs means over the micro-batch; docs/losses.md has kl_cov as a custom loss"


def read(config: Any, name: str, default: Any) -> Any:
    """The value of a dotted name in a mapping or an object; the default if it is missing or None."""
    for part in name.split("."):
        config = (
            config.get(part)
            if isinstance(config, Mapping) or hasattr(config, "get")
            else getattr(config, part, None)
        )
        if config is None:
            return default
    return config


def bounds(actor: Any) -> tuple[float, float]:
    clip = read(actor, "clip_ratio", 0.2)
    return read(actor, "clip_ratio_low", clip), read(actor, "clip_ratio_high", clip)


def dual_clip(actor: Any) -> float:
    c = read(actor, "clip_ratio_c", 3.0)
    high = bounds(actor)[1]
    if c < 1 + high:
        remedy = "raise it: below, verl's dual clip also clips the upper bound"
        raise value_error("clip_ratio_c", f"at least 1 + clip_ratio_high = {1 + high}", c, remedy)
    return c


def clipped(actor: Any) -> dict[str, Any]:
    low, high = bounds(actor)
    return {"loss_type": "bnpo", "epsilon": low, "epsilon_high": high}


def cispo(actor: Any) -> dict[str, Any]:
    low, high = bounds(actor)
    return {"loss_type": "cispo", "cispo_min": 1 - low, "epsilon_high": 1 + high}


def sapo(actor: Any) -> dict[str, Any]:
    taus = {
        "sapo_temperature_pos": read(actor, "tau_pos", 1.0),
        "sapo_temperature_neg": read(actor, "tau_neg", 1.05),
    }
    return {"loss_type": "sapo", **taus}


def dro(actor: Any) -> dict[str, Any]:
    beta = read(actor, "policy_loss.dro_beta", None)
    if beta is None:
        raise value_error("policy_loss.dro_beta", "a positive number for dro", None, "set it")
    return {"old_kl_coef": beta}


def dppo(region: str) -> Callable[[Any], dict[str, Any]]:
    return lambda actor: {
        **clipped(actor),
        "trust_region": region,
        "delta": read(actor, "clip_ratio_c", 3.0),
    }


# loss_mode -> (loss, its options from the actor's config)
LOSS_MODES: Mapping[str, tuple[type, Callable[[Any], dict[str, Any]]]] = {
    "vanilla": (GRPOLoss, lambda actor: {**clipped(actor), "delta": dual_clip(actor)}),
    "dppo_tv": (GRPOLoss, dppo("binary_tv")),
    "dppo_kl": (GRPOLoss, dppo("binary_kl")),
    "gspo": (GRPOLoss, lambda actor: {**clipped(actor), "importance_sampling_level": "sequence_token"}),
    "sapo": (GRPOLoss, sapo),
    "gpg": (REINFORCELoss, lambda actor: {}),
    "geo_mean": (GRPOLoss, lambda actor: {**clipped(actor), "loss_type": "gmpo"}),
    "dro": (REINFORCELoss, dro),
    "cispo": (GRPOLoss, cispo),
    "reinforce": (REINFORCELoss, lambda actor: {}),
}
# The mean of loss modes that do not read `loss_agg_mode`.
MEANS = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}


def policy_loss(actor: Any, rollout_correction: Any = None) -> GRPOLoss | REINFORCELoss:
    """Return the loss of an actor's config.

    Args:
        actor: `actor_rollout_ref.actor`. Missing options have verl's defaults.
        rollout_correction: `algorithm.rollout_correction`. `rollout_rs` is not part of the loss, because it
            changes the mask of the call: see `rejections`.

    Returns:
        The loss. verl does not count empty sequences in a mean over sequences: pass `num_items`.

    Raises:
        ValueError: an option without an equal loss.
    """
    mode = read(actor, "policy_loss.loss_mode", "vanilla")
    bypass = mode == "bypass_mode" or read(rollout_correction, "bypass_mode", False)
    if bypass:
        mode = {"ppo_clip": "vanilla"}.get(kind := read(rollout_correction, "loss_type", "ppo_clip"), kind)
    if mode in ("clip_cov", "kl_cov"):
        raise value_error("policy_loss.loss_mode", f"one of {', '.join(LOSS_MODES)}", repr(mode), COVARIANCE)
    check_choice("policy_loss.loss_mode", mode, LOSS_MODES)
    loss, options = LOSS_MODES[mode]
    options = options(actor) | mean_of(actor, mode)
    # In the bypass mode the old policy is the sampler, and the ratio of PPO corrects for it.
    correction = None if bypass and mode == "vanilla" else correction_of(rollout_correction)
    if correction is not None:
        check_correction(mode, correction)
        options["sampler_correction"] = correction
    return loss(**options, **kl_of(actor, mode), **bonus_of(actor, mode))


def check_correction(mode: str, correction: SamplerCorrection) -> None:
    """Raise ValueError for the modes in which verl's factor is not that of the surrogate."""
    differs = {
        "dro": "verl weighs the penalty of dro as well",
        "geo_mean": "verl takes the geometric mean of the tokens' truncated weights; a loss "
        "with level='geometric' truncates the geometric mean",
    }
    if mode in differs:
        name = "rollout_correction.rollout_is"
        raise value_error(
            name, f"null for {mode}", repr(correction.level), f"{differs[mode]}; set it to null"
        )


def mean_of(actor: Any, mode: str) -> dict[str, Any]:
    """Options of the mean."""
    agg = read(actor, "loss_agg_mode", "token-mean")
    if mode in MEANS:
        return {}
    if LOSS_MODES[mode][0] is REINFORCELoss:
        if agg not in ("token-mean", "token-sum"):
            remedy = "use 'token-mean' or 'token-sum', or pass weights as advantages"
            raise value_error("loss_agg_mode", f"'token-mean' or 'token-sum' for {mode}", repr(agg), remedy)
        return {"reduction": "sum"} if agg == "token-sum" else {}
    if agg == "token-sum":
        return {"reduction": "sum"}
    length = {}
    if agg == "seq-mean-token-sum-norm":
        length = {"max_completion_length": read(actor, "loss_scale_factor", None)}
        if None in length.values():
            remedy = "set it; by default verl divides by the length of the padded micro-batch"
            raise value_error("loss_scale_factor", "a number for seq-mean-token-sum-norm", None, remedy)
    return {"loss_agg_mode": agg, **length}


def kl_of(actor: Any, mode: str) -> dict[str, Any]:
    """Options of the KL to the reference model."""
    if not read(actor, "use_kl_loss", False):
        return {}
    agg = read(actor, "loss_agg_mode", "token-mean")
    if LOSS_MODES[mode][0] is REINFORCELoss or MEANS.get(mode, agg) != agg:
        remedy = "set it to false, or compute the KL in a second call"
        raise value_error("use_kl_loss", f"false for {mode} with loss_agg_mode {agg}", True, remedy)
    kind = read(actor, "kl_loss_type", "low_var_kl")
    check_choice("kl_loss_type", kind.removesuffix("+"), ESTIMATORS)
    estimator = ESTIMATORS[kind.removesuffix("+")]
    return {
        "beta": read(actor, "kl_loss_coef", 0.001),
        "kl_estimator": estimator + "+" * kind.endswith("+"),
        "kl_max": K3_MAX if estimator == "k3" else None,
        "use_bias_correction_kl": False,
    }


def bonus_of(actor: Any, mode: str) -> dict[str, Any]:
    """Options of the entropy bonus, which follows verl's loss_agg_mode and is a mean over tokens here."""
    coef = read(actor, "entropy_coeff", 0)
    if not coef:
        return {}
    agg = read(actor, "loss_agg_mode", "token-mean")
    if agg != "token-mean" or LOSS_MODES[mode][0] is REINFORCELoss:
        remedy = "set it to 0, or use loss_agg_mode 'token-mean'"
        raise value_error("entropy_coeff", f"0 for {mode} with loss_agg_mode {agg}", coef, remedy)
    return {"entropy_coef": float(coef)}


def correction_of(rollout_correction: Any) -> SamplerCorrection | None:
    """The factor of `rollout_is`: TIS, or IcePop for a threshold "low_high"."""
    level = read(rollout_correction, "rollout_is", None)
    if level is None:
        return None
    if read(rollout_correction, "rollout_is_batch_normalize", False):
        remedy = "compute the weights outside, and pass them as importance_weights"
        raise value_error("rollout_correction.rollout_is_batch_normalize", "false", True, remedy)
    check_choice("rollout_correction.rollout_is", level, CORRECTED_LEVELS)
    low, _, high = str(read(rollout_correction, "rollout_is_threshold", 2.0)).rpartition("_")
    if not low:
        return SamplerCorrection(level=level, high=float(high))
    return SamplerCorrection(level=level, action="mask", low=float(low), high=float(high))


def rejections(rollout_correction: Any) -> tuple[SamplerCorrection, ...]:
    """The corrections of `rollout_rs`. verl drops rejected tokens from the mask: `mask & (weights > 0)`.

    In verl's bypass mode, the `old_logps` of `SamplerCorrection.weights` are those of the policy itself.
    """
    names = read(rollout_correction, "rollout_rs", None)
    if not names:
        return ()
    names = names.split(",") if isinstance(names, str) else list(names)
    given = read(rollout_correction, "rollout_rs_threshold", None)
    if given is None:
        raise value_error(
            "rollout_correction.rollout_rs_threshold", "a threshold for rollout_rs", None, "set it"
        )
    thresholds = str(given).split(",")
    thresholds = thresholds * len(names) if len(thresholds) == 1 else thresholds
    return tuple(rejection(name.strip(), x.strip()) for name, x in zip(names, thresholds, strict=True))


def rejection(name: str, threshold: str) -> SamplerCorrection:
    level, _, measure = name.rpartition("_")
    if level not in REJECTED_LEVELS or measure not in ("k1", "k2", "k3"):
        expected = f"{', '.join(REJECTED_LEVELS)} with _k1, _k2 or _k3"
        raise value_error(
            "rollout_correction.rollout_rs", expected, repr(name), "compute it outside, and pass it as mask"
        )
    options = {"level": REJECTED_LEVELS[level], "action": "reject"}
    if measure != "k1":
        return SamplerCorrection(**options, measure=measure, high=float(threshold))
    low, _, high = threshold.rpartition("_")
    # verl's bounds are those of the inverse ratio; one number b is the pair 1 / b, b.
    low = 1 / float(high) if not low else float(low)
    return SamplerCorrection(**options, low=1 / float(high), high=1 / low)
