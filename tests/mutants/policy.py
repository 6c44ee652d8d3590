"""Policy losses."""

from tests.mutants.mutant import Mutant

GRPO, TYPES, RLOO, SHARED = (f"losses/{name}.py" for name in ("grpo", "grpo_types", "rloo", "policy"))
TESTS = "tests/losses/test_policy.py"

MUTANTS = [
    Mutant(f"policy: {name}", file, old, new, TESTS)
    for name, file, old, new in (
        ("surrogate's sign", TYPES, "return -torch.minimum(ratio * advantages", "return torch.minimum(ratio * advantages"),
        ("maximum for minimum", TYPES, "-torch.minimum(", "-torch.maximum("),
        ("lower bound dropped", TYPES, "ratio.clamp(1 - loss.epsilon, 1 + loss.upper)", "ratio.clamp(max=1 + loss.upper)"),
        (
            "upper bound is epsilon",
            TYPES,
            "ratio.clamp(1 - loss.epsilon, 1 + loss.upper)",
            "ratio.clamp(1 - loss.epsilon, 1 + loss.epsilon)",
        ),
        ("delta dropped", TYPES, "        ratio = ratio.clamp(max=loss.delta)\n", "        pass\n"),
        (
            "low flag of any advantage",
            TYPES,
            "(ratio < 1 - loss.epsilon) & (advantages < 0)",
            "(ratio < 1 - loss.epsilon) & (advantages != 0)",
        ),
        (
            "cispo differentiates its weight",
            TYPES,
            "-ratio.detach().clamp(max=loss.upper) * advantages",
            "-ratio.clamp(max=loss.upper) * advantages",
        ),
        ("cispo unbounded", TYPES, "ratio.detach().clamp(max=loss.upper)", "ratio.detach()"),
        (
            "sapo: temperatures swapped",
            TYPES,
            "loss.sapo_temperature_pos, loss.sapo_temperature_neg",
            "loss.sapo_temperature_neg, loss.sapo_temperature_pos",
        ),
        ("sapo without 4 / tau", TYPES, "return -4 / tau *", "return -4 *"),
        ("vespo's sign", TYPES, "return -phi * advantages", "return phi * advantages"),
        ("vespo: k of the other sign", GRPO, "self.vespo_k_pos, self.vespo_k_neg", "self.vespo_k_neg, self.vespo_k_pos"),
        ("vespo: sampler dropped", GRPO, "if batch.log_importance is not None:", "if False:"),
        ("vespo: a sequence's factor once per token", GRPO, "logs.reshape(-1) / lengths if", "logs.reshape(-1) if"),
        ("ratio of a sum", GRPO, "batch.sum_by_sequence(log_ratio) / batch.lengths.clamp(min=1)", "batch.sum_by_sequence(log_ratio)"),
        ("level ignored", GRPO, 'return self.importance_sampling_level == "sequence"', "return False"),
        ("entropy mask dropped", GRPO, "            values = values * kept\n", "            pass\n"),
        ("quantile from the wrong end", GRPO, "1 - self.top_entropy_quantile)", "self.top_entropy_quantile)"),
        ("quantile over uncounted tokens too", GRPO, "torch.where(batch.supervised, entropy, math.nan)", "entropy"),
        ("quantile within a group", GRPO, '            return "batch"\n', '            return "group"\n'),
        ("drift's sign", GRPO, "(sampling - detached)", "(detached - sampling)"),
        ("positive advantages masked", GRPO, "(advantages >= 0) | batch.spread", "batch.spread"),
        (
            "sampler's log-probabilities ignored",
            GRPO,
            "batch.old_logps if batch.sampling_logps is None else batch.sampling_logps",
            "batch.old_logps",
        ),
        ("importance weights dropped", GRPO, "values * batch.importance_weights", "values"),
        ("kl's sign", GRPO, "d = (batch.ref_logps - logps)", "d = (logps - batch.ref_logps)"),
        ("kl dropped", GRPO, "values = values + self.beta * kl", "values = values"),
        ("kl uncorrected", GRPO, "if self.use_bias_correction_kl else kl", "if False else kl"),
        ("k1 for k3", GRPO, "kl = torch.expm1(d) - d", "kl = -d"),
        ("lengths dropped", GRPO, 'if self.loss_type in ("grpo", "sapo"):', "if False:"),
        ("dr_grpo by lengths", GRPO, "torch.full_like(lengths, 1 / self.max_completion_length)", "1 / lengths"),
        ("entropy bonus's sign", GRPO, "Term(-self.entropy_coef * weight", "Term(self.entropy_coef * weight"),
        ("entropy bonus over all tokens", GRPO, "entropy if kept is None else entropy * kept", "entropy"),
        ("entropy not differentiated", GRPO, '("logps", "entropy") if self.entropy_coef', '("logps",) if self.entropy_coef'),
        ("entropy bonus follows num_items", GRPO, "* weight * entropy, over=None)", "* entropy, over=self.unit)"),
        ("mask ignored", SHARED, "targets = torch.where(mask.bool(), targets, self.ignore_index)", "pass"),
        (
            "clip ratio by tokens at the sequence level",
            GRPO,
            "1 / (lengths * layout.sequences) if once",
            "inputs['entropy_weight'].expand(layout.sequences) if once",
        ),
        (
            "rloo: mean for sum",
            RLOO,
            "ratio = bounded_exp((logps - old) * filled)",
            "ratio = bounded_exp((logps - old) * filled / batch.lengths.clamp(min=1))",
        ),
        ("rloo: sums ignored", RLOO, "            old = batch.old_sums\n", "            pass\n"),
        ("reinforce's sign", RLOO, "Term(-batch.advantages * stats.logps)", "Term(batch.advantages * stats.logps)"),
        ("per-token inputs left behind by shift", SHARED, "x = self.aligned(x, fill)", "pass"),
        (
            "what stands at uncounted tokens counts",
            SHARED,
            "torch.where(self.counted, x.detach().to(self.dtype), fill)",
            "x.detach().to(self.dtype)",
        ),
    )
] + [
    Mutant(
        "shift: a sequence predicts the next one",
        "losses/shift.py",
        "return moved.masked_fill(~follows, last)",
        "return moved",
        f"tests/losses/test_shift.py {TESTS} -k packed",
    )
]
