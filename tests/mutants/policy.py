"""Policy losses."""

from tests.mutants.mutant import of_file

TEST_POLICY = "tests/losses/test_policy.py"
GRPO = "losses/grpo.py"
POLICY = "losses/policy.py"

MUTANTS = [
    *of_file(
        "losses/grpo_types.py",
        TEST_POLICY,
        ("surrogate's sign", "clipped", "return -torch.minimum", "return torch.minimum"),
        ("maximum for minimum", "clipped", "-torch.minimum(", "-torch.maximum("),
        ("lower bound dropped", "clipped", "(1 - loss.epsilon, 1 + loss.upper)", "(max=1 + loss.upper)"),
        ("upper bound is epsilon", "clipped", "epsilon, 1 + loss.upper", "epsilon, 1 + loss.epsilon"),
        ("delta dropped", "clipped", "ratio = ratio.clamp(max=loss.delta)", "pass"),
        ("low flag of any advantage", "clipped", "(advantages < 0)", "(advantages != 0)"),
        ("cispo differentiates its weight", "cispo", "-ratio.detach().clamp", "-ratio.clamp"),
        ("cispo unbounded", "cispo", "ratio.detach().clamp(max=loss.upper)", "ratio.detach()"),
        (
            "sapo: temperatures swapped",
            "sapo",
            "loss.sapo_temperature_pos, loss.sapo_temperature_neg",
            "loss.sapo_temperature_neg, loss.sapo_temperature_pos",
        ),
        ("sapo without 4 / tau", "sapo", "return -4 / tau *", "return -4 *"),
        ("vespo's sign", "vespo", "return -phi * advantages", "return phi * advantages"),
        prefix="policy: ",
    ),
    *of_file(
        GRPO,
        TEST_POLICY,
        (
            "vespo: k of the other sign",
            "GRPOLoss.phi",
            "self.vespo_k_pos, self.vespo_k_neg",
            "self.vespo_k_neg, self.vespo_k_pos",
        ),
        ("vespo: sampler dropped", "GRPOLoss.phi", "if batch.log_importance is not None:", "if False:"),
        (
            "vespo: a sequence's factor once per token",
            "GRPOLoss.laid_out",
            "(-1) * layout.shares if",
            "(-1) if",
        ),
        ("ratio of a sum", "GRPOLoss.terms", "(log_ratio) / batch.lengths.clamp(min=1)", "(log_ratio)"),
        ("level ignored", "GRPOLoss.by_sequence", 'self.importance_sampling_level == "sequence"', "False"),
        ("entropy mask dropped", "GRPOLoss.terms", "values = values * kept", "pass"),
        ("quantile from the wrong end", "GRPOLoss.kept", "1 - self", "self"),
        (
            "quantile over uncounted tokens too",
            "GRPOLoss.kept",
            "torch.where(batch.supervised, entropy, math.nan)",
            "entropy",
        ),
        ("quantile within a group", "GRPOLoss.scope", 'return "batch"', 'return "group"'),
        ("drift's sign", "GRPOLoss.terms", "(sampling - detached)", "(detached - sampling)"),
        ("positive advantages masked", "GRPOLoss.terms", "(advantages >= 0) | batch.spread", "batch.spread"),
        (
            "sampler's log-probabilities ignored",
            "GRPOLoss.terms",
            "batch.old_logps if batch.sampling_logps is None else batch.sampling_logps",
            "batch.old_logps",
        ),
        ("importance weights dropped", "GRPOLoss.terms", "values * batch.importance_weights", "values"),
        ("kl's sign", "GRPOLoss.terms", "d = (batch.ref_logps - logps)", "d = (logps - batch.ref_logps)"),
        ("kl dropped", "GRPOLoss.terms", "values = values + self.beta * kl", "values = values"),
        ("kl uncorrected", "GRPOLoss.terms", "if self.use_bias_correction_kl else kl", "if False else kl"),
        ("k1 for k3", "GRPOLoss.terms", "kl = torch.expm1(d) - d", "kl = -d"),
        ("lengths dropped", "GRPOLoss.laid_out", 'if self.loss_type in ("grpo", "sapo"):', "if False:"),
        (
            "dr_grpo by lengths",
            "GRPOLoss.laid_out",
            "torch.full_like(layout.lengths, weight)",
            "layout.shares",
        ),
        ("entropy bonus's sign", "GRPOLoss.with_bonus", "-self.entropy_coef", "self.entropy_coef"),
        (
            "entropy bonus over all tokens",
            "GRPOLoss.with_bonus",
            "entropy if kept is None else entropy * kept",
            "entropy",
        ),
        ("entropy not differentiated", "GRPOLoss.differentiates", '("logps", "entropy") if', '("logps",) if'),
        (
            "entropy bonus follows num_items",
            "GRPOLoss.with_bonus",
            "* weight * entropy, over=None)",
            "* entropy, over=self.unit)",
        ),
        prefix="policy: ",
    ),
    *of_file(
        POLICY,
        TEST_POLICY,
        (
            "mask ignored",
            "PolicyLoss.__call__",
            "targets = masked(targets, mask, self.ignore_index)",
            "pass",
        ),
        prefix="policy: ",
    ),
    *of_file(
        GRPO,
        TEST_POLICY,
        (
            "clip ratio by tokens at the sequence level",
            "GRPOLoss.laid_out",
            "layout.shares / layout.sequences if once",
            "layout.share.expand(layout.sequences) if once",
        ),
        prefix="policy: ",
    ),
    *of_file(
        "losses/rloo.py",
        TEST_POLICY,
        ("rloo: mean for sum", "RLOOLoss.terms", "filled)", "filled / batch.lengths.clamp(min=1))"),
        ("rloo: sums ignored", "RLOOLoss.terms", "old = batch.old_sums", "pass"),
        ("reinforce's sign", "REINFORCELoss.terms", "-batch.advantages * stats", "batch.advantages * stats"),
        prefix="policy: ",
    ),
    *of_file(
        POLICY,
        TEST_POLICY,
        ("per-token inputs left behind by shift", "Layout.per_token", "x = self.aligned(x, fill)", "pass"),
        (
            "what stands at uncounted tokens counts",
            "Layout.per_token",
            "torch.where(self.counted, x.detach().to(self.dtype), fill)",
            "x.detach().to(self.dtype)",
        ),
        prefix="policy: ",
    ),
]
