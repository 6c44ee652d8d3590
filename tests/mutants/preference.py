"""Preference losses."""

from tests.mutants.mutant import Mutant

PREFERENCE = "tests/losses/test_preference.py"
EQUALS = f"{PREFERENCE} -k equals_the_reference"
REFERENCE_POINT, LABELS = "tests/losses/test_kto.py", "tests/losses/test_reference_free.py"
DPO, TYPES, FREE, KTO, SHARED, WALK = (f"losses/{name}.py" for name in ("dpo", "dpo_types", "reference_free", "kto", "preference", "walk"))

MUTANTS = [
    *(
        Mutant(f"preference: {name}", file, old, new, EQUALS)
        for name, file, old, new in (
            (
                "sigmoid's sign",
                TYPES,
                "smoothed(loss.beta * p.delta, loss.label_smoothing)",
                "smoothed(-loss.beta * p.delta, loss.label_smoothing)",
            ),
            (
                "label smoothing dropped",
                SHARED,
                "-(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)",
                "-logsigmoid(x)",
            ),
            ("hinge without beta", TYPES, "relu(1 - loss.beta * p.delta)", "relu(1 - p.delta)"),
            ("ipo of sums", TYPES, "(p.mean_delta - 0.5 / loss.beta)", "(p.delta - 0.5 / loss.beta)"),
            ("exo: odds swapped", TYPES, "logsigmoid(-x) - math.log(epsilon)", "logsigmoid(-x) - math.log1p(-epsilon)"),
            ("nca: rejected dropped", TYPES, " - 0.5 * logsigmoid(-worse)", ""),
            ("robust unnormalized", TYPES, " / (1 - 2 * epsilon)", ""),
            ("bco: rejected's sign", TYPES, "logsigmoid(-loss.beta * p.rejected),", "logsigmoid(loss.beta * p.rejected),"),
            ("sppo: rejected's target", TYPES, "(p.rejected + 0.5 / loss.beta)", "(p.rejected - 0.5 / loss.beta)"),
            ("aot unsorted", TYPES, "policy.sort().values - reference.sort().values", "policy - reference"),
            ("aot_unpaired unsorted", TYPES, "p.chosen.sort().values - p.rejected.sort().values", "p.chosen - p.rejected"),
            (
                "apo_zero: chosen's sign",
                TYPES,
                "(-loss.beta * p.chosen).sigmoid() + (loss.beta * p.rejected)",
                "(loss.beta * p.chosen).sigmoid() + (loss.beta * p.rejected)",
            ),
            ("apo_down: difference's sign", TYPES, "(loss.beta * (p.rejected - p.chosen))", "(loss.beta * (p.chosen - p.rejected))"),
            ("discopop: gate without tau", TYPES, "(x / loss.discopop_tau).sigmoid()", "x.sigmoid()"),
            ("sigmoid_norm of sums", TYPES, "-logsigmoid(loss.beta * p.mean_delta)", "-logsigmoid(loss.beta * p.delta)"),
            ("forward_kl's sign", TYPES, "1 - bounded_exp(-ratios)", "1 - bounded_exp(ratios)"),
            ("js without log 2", TYPES, "math.log(2) + logsigmoid(ratios)", "logsigmoid(ratios).exp()"),
            ("alpha off by one", TYPES, "power = loss.f_alpha_divergence_coef - 1", "power = loss.f_alpha_divergence_coef"),
            (
                "reference dropped",
                DPO,
                "self.sequence_ref_logps(batch, weights) if self.needs_reference",
                "torch.zeros_like(policy) if self.needs_reference",
            ),
            ("ld_alpha off by one", DPO, "batch.positions >= batch.spread", "batch.positions > batch.spread"),
            ("weights of pairs dropped", DPO, "sum(values) * factor", "sum(values)"),
            (
                "weights of pairs differentiated",
                DPO,
                "stats.logps.detach() - stats.log_sum_sq_probs",
                "stats.logps - stats.log_sum_sq_probs",
            ),
            ("weights of sft dropped", DPO, "batch.spread(torch.cat((factor, factor))) if self.use_weighting", "1.0 if self.use_weighting"),
            ("sft over all tokens", DPO, "weight * factor * chosen_nll(stats, batch)", "-weight * factor * stats.logps"),
            ("loss weights dropped", DPO, "weight * DPO_LOSSES[name]", "1 * DPO_LOSSES[name]"),
            ("orpo: odds without 1 - p", FREE, "certain - torch.log(-torch.expm1(certain))", "certain"),
            ("orpo: lengths of the prompt too", FREE, "batch.sum_by_sequence(batch.completion.to(logps.dtype))", "lengths"),
            (
                "orpo: NLL over all tokens",
                FREE,
                '"nll": Term(chosen_nll(stats, batch), over="chosen_tokens"),',
                '"nll": Term(-stats.logps, over="chosen_tokens"),',
            ),
            ("orpo: odds ratio's sign", FREE, "Term(-self.beta * ratio", "Term(self.beta * ratio"),
            ("cpo: alpha dropped", FREE, "if self.alpha else logps", "if False else logps"),
            ("cpo: NLL dropped", FREE, "        if self.cpo_alpha:\n", "        if False:\n"),
            ("cpo: margin dropped", FREE, "loss.beta * delta - loss.simpo_gamma", "loss.beta * delta"),
            ("cpo: sums for means", FREE, 'if self.loss_type in ("ipo", "simpo"):', "if False:"),
            ("simpo: margin dropped", FREE, "(chosen - rejected) - self.gamma", "(chosen - rejected)"),
            (
                "kto: kl's sign",
                KTO,
                "(kl - reward).sigmoid(), (reward - kl).sigmoid()",
                "(-kl - reward).sigmoid(), (reward + kl).sigmoid()",
            ),
            ("kto: apo swapped", KTO, "((-reward).sigmoid(), reward.sigmoid())", "(reward.sigmoid(), (-reward).sigmoid())"),
            (
                "kto: weights swapped",
                KTO,
                "self.desirable_weight * desirable, self.undesirable_weight * undesirable",
                "self.undesirable_weight * desirable, self.desirable_weight * undesirable",
            ),
        )
    ),
    Mutant(
        "preference: sides of the metrics swapped",
        SHARED,
        '"chosen": ours & chosen, "rejected": ours & ~chosen',
        '"chosen": ours & ~chosen, "rejected": ours & chosen',
        EQUALS,
    ),
    Mutant(
        "preference: reference without its tail's weight",
        SHARED,
        "batch.ref_logps if weights is None else batch.ref_logps * weights",
        "batch.ref_logps",
        EQUALS,
    ),
    Mutant(
        "preference: infinite numbers of the other side",
        SHARED,
        "torch.where(mask, values, 0.0)",
        "values * mask",
        f"{PREFERENCE} -k masked_vocabulary",
    ),
    Mutant(
        "preference: unreduced reference beside its labels",
        SHARED,
        "ref_logps.roll(1, -1) if shift else ref_logps",
        "ref_logps",
        f"{PREFERENCE} -k beside_reference",
    ),
    Mutant("kto: negative kl kept", KTO, '"kl": kl.clamp(min=0)', '"kl": kl', REFERENCE_POINT),
    Mutant("kto: kl of unshifted labels", KTO, "        if shift:\n", "        if False:\n", REFERENCE_POINT),
    Mutant("kto: kl by tokens", KTO, "return starts.shape[0] - 1", "return targets.shape[0]", REFERENCE_POINT),
    Mutant("orpo: rejected labels contradict", FREE, "(chosen & (targets", "((targets", LABELS),
    Mutant("orpo: prompts contradict", FREE, "(targets != ignore_index) & (nll", "(nll", LABELS),
    Mutant("reference walked with the trained head", WALK, '{"head": self.loss.ref_head', '{"head": self.loss.head', EQUALS),
    Mutant("reference without its bias", WALK, '"bias": self.inputs["ref_bias"]', '"bias": None', EQUALS),
    Mutant(
        "metrics: weights of ignored tokens counted",
        "losses/batch.py",
        "Term(mask(term.values), mask(term.over))",
        "Term(mask(term.values), term.over)",
        EQUALS,
    ),
    Mutant(
        "chosen tokens: half a sequence too many",
        "losses/batch.py",
        "cu_seqlens[sequences // 2]\n",
        "cu_seqlens[sequences // 2 + 1]\n",
        EQUALS,
    ),
]
