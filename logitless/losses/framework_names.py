"""Names of other frameworks for options of policy losses, and the options that mean the same here."""

from collections.abc import Mapping

GSPO = "GSPO is importance_sampling_level='sequence' with loss_type='grpo'"
GSPO_TOKEN = "GSPO-token is importance_sampling_level='sequence_token' with loss_type='grpo'"
DPPO_TV = "use trust_region='binary_tv'"
DPPO_KL = "use trust_region='binary_kl'"
IPO = "use trust_region='absolute_tv'"
GMPO = "use loss_type='gmpo' with epsilon=0.4"
PPO = "take PPOLoss, with delta for a dual clip"
REINFORCE = "take REINFORCELoss"
IMPORTANCE_SAMPLING = "use trust_region=None"
COVARIANCE = "it needs means over the batch: docs/losses.md has it as a custom loss"
ESTIMATOR = "use it as kl_estimator"
CORRECTION = "use sampler_correction=SamplerCorrection(...)"

# Names of policy losses of other frameworks.
LOSSES: Mapping[str, str] = {
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "gspo-token": GSPO_TOKEN,
    "dppo": DPPO_TV,
    "dppo_tv": DPPO_TV,
    "dppo_kl": DPPO_KL,
    "ipo": IPO,
    "geo_mean": GMPO,
    "ppo": "take PPOLoss",
    "ppo_clip": PPO,
    "vanilla": PPO,
    "dual_clip": PPO,
    "reinforce": REINFORCE,
    "gpg": REINFORCE,
    "dro": "use REINFORCELoss(old_kl_coef=...)",
    "rloo": "take RLOOLoss",
    "importance_sampling": IMPORTANCE_SAMPLING,
    "clip_cov": COVARIANCE,
    "kl_cov": COVARIANCE,
    "tis": CORRECTION,
    "icepop": CORRECTION,
}
ESTIMATORS: Mapping[str, str] = {
    "kl": "use 'k1'",
    "mse": "use 'k2'",
    "low_var_kl": "use 'k3'",
    "kl+": "use 'k1+'",
    "mse+": "use 'k2+'",
    "low_var_kl+": "use 'k3+'",
    "schulman": "use 'k3'",
    "forward": "use 'k3' for an estimate, or DistillationLoss for the divergence",
}
OUR_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
# Option -> {name of another framework: remedy}.
REMEDIES: Mapping[str, Mapping[str, str]] = {
    "loss_type": {
        **LOSSES,
        "sequence_token": GSPO_TOKEN,
        "binary_tv": DPPO_TV,
        "binary_kl": DPPO_KL,
        "absolute_tv": IPO,
        **dict.fromkeys(OUR_ESTIMATORS, ESTIMATOR),
        **dict.fromkeys(ESTIMATORS, "it is an estimator of the KL: see kl_estimator"),
    },
    "trust_region": {
        **LOSSES,
        "tv": "use 'binary_tv'",
        "kl": "use 'binary_kl'",
        "ppo": "use 'clip'",
        "none": "use None",
        **dict.fromkeys(OUR_ESTIMATORS, ESTIMATOR),
    },
    "importance_sampling_level": {
        "gspo": "use 'sequence'",
        "gspo_token": "use 'sequence_token'",
        "gspo-token": "use 'sequence_token'",
        "geometric": "it is a level of SamplerCorrection; use 'sequence'",
    },
    "kl_estimator": ESTIMATORS,
    "loss_agg_mode": {
        "token": "use 'token-mean'",
        "token-sum": "use 'token-mean' with reduction='sum'",
        "sequence": "use 'seq-mean-token-mean'",
        "token_mean": "use 'token-mean'",
    },
    "level": {
        "geo_mean": "use 'geometric'",
        "token_truncate": "use level='token', action='truncate'",
        "token_mask": "use level='token', action='mask'",
        "sequence_truncate": "use level='sequence', action='truncate' (level='geometric' in ms-swift)",
        "sequence_mask": "use level='sequence', action='mask'",
        "seq_sum": "use 'sequence'",
        "seq_mean": "use 'geometric'",
        "seq_max": "compute it from the log-ratios, and pass it as mask or importance_weights",
    },
    "action": {
        "tis": "use 'truncate'",
        "icepop": "use 'mask'",
        "clip": "use 'truncate'",
        "seq-mask-tis": "pass a tuple of SamplerCorrection() and SamplerCorrection(level='geometric', "
        "action='reject', low=..., high=...)",
    },
    "measure": {"k1": "use 'ratio', with the inverse bounds: low=1/high, high=1/low"},
}
