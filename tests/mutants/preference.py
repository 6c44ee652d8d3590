"""Preference losses."""

from tests.mutants.mutant import of_file

TEST_PREFERENCE_EQUALS_THE_REFERENCE = "tests/losses/test_preference.py -k equals_the_reference"
DPO_TYPES = "losses/dpo_types.py"
KTO = "losses/kto.py"
PREFERENCE = "losses/preference.py"

MUTANTS = [
    *of_file(
        DPO_TYPES,
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        ("sigmoid's sign", "DPO_LOSSES", "loss.beta * p.delta, loss", "-loss.beta * p.delta, loss"),
        prefix="preference: ",
    ),
    *of_file(
        PREFERENCE,
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        (
            "label smoothing dropped",
            "smoothed",
            "-(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)",
            "-logsigmoid(x)",
        ),
        prefix="preference: ",
    ),
    *of_file(
        DPO_TYPES,
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        ("hinge without beta", "DPO_LOSSES", "relu(1 - loss.beta * p.delta)", "relu(1 - p.delta)"),
        ("ipo: margin without beta", "DPO_LOSSES", "(p.delta - 0.5 / loss.beta)", "(p.delta - 0.5)"),
        ("exo: odds swapped", "exo_pair", "(-x) - math.log(epsilon)", "(-x) - math.log1p(-epsilon)"),
        ("nca: rejected dropped", "nca_pair", " - 0.5 * logsigmoid(-worse)", ""),
        ("robust unnormalized", "robust", " / (1 - 2 * epsilon)", ""),
        ("bco: rejected's sign", "DPO_LOSSES", "(-loss.beta * p.rejected)", "(loss.beta * p.rejected)"),
        ("sppo: rejected's target", "DPO_LOSSES", "rejected + 0.5 / loss.beta", "rejected - 0.5 / loss.beta"),
        ("aot unsorted", "aot", "policy.sort().values - reference.sort().values", "policy - reference"),
        (
            "aot_unpaired unsorted",
            "aot_unpaired",
            "p.chosen.sort().values - p.rejected.sort().values",
            "p.chosen - p.rejected",
        ),
        ("apo_zero: chosen's sign", "DPO_LOSSES", "(-loss.beta * p.chosen)", "(loss.beta * p.chosen)"),
        ("apo_down: difference's sign", "DPO_LOSSES", "(p.rejected - p.chosen)", "(p.chosen - p.rejected)"),
        ("discopop: gate without tau", "discopop", "(x / loss.discopop_tau).sigmoid()", "x.sigmoid()"),
        ("sigmoid_norm of sums", "AVERAGED", '{"ipo", "sigmoid_norm"}', '{"ipo"}'),
        ("ipo of sums", "AVERAGED", '{"ipo", "sigmoid_norm"}', '{"sigmoid_norm"}'),
        ("averages by the other length", "Pairs.averaged", "rejected if i % 2 else chosen", "chosen"),
        ("forward_kl's sign", "DIVERGENCES", "1 - bounded_exp(-ratios)", "1 - bounded_exp(ratios)"),
        ("js without log 2", "DIVERGENCES", "math.log(2) + logsigmoid(ratios)", "logsigmoid(ratios).exp()"),
        ("alpha off by one", "alpha_divergence", "f_alpha_divergence_coef - 1", "f_alpha_divergence_coef"),
        prefix="preference: ",
    ),
    *of_file(
        "losses/dpo.py",
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        (
            "reference dropped",
            "DPOLoss.pairs",
            "self.sequence_ref_logps(batch, weights) if self.needs_reference",
            "torch.zeros_like(policy) if self.needs_reference",
        ),
        ("ld_alpha off by one", "DPOLoss.pairs", "positions >= batch.spread", "positions > batch.spread"),
        ("weights of pairs dropped", "DPOLoss.terms", "sum(values) * factor", "sum(values)"),
        ("weights of pairs differentiated", "DPOLoss.pair_weights", "stats.logps.detach()", "stats.logps"),
        ("weights of sft dropped", "DPOLoss.terms", "batch.spread(torch.cat((factor, factor))) if", "1.0 if"),
        (
            "sft over all tokens",
            "DPOLoss.terms",
            "factor * chosen_nll(stats, batch)",
            "factor * -stats.logps",
        ),
        ("loss weights dropped", "DPOLoss.terms", "weight * DPO_LOSSES[name]", "1 * DPO_LOSSES[name]"),
        prefix="preference: ",
    ),
    *of_file(
        "losses/reference_free.py",
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        (
            "orpo: odds without 1 - p",
            "ORPOLoss.terms",
            "certain - torch.log(-torch.expm1(certain))",
            "certain",
        ),
        (
            "orpo: lengths of the prompt too",
            "ORPOLoss.terms",
            "batch.sum_by_sequence(batch.completion.to(logps.dtype))",
            "lengths",
        ),
        ("orpo: NLL over all tokens", "ORPOLoss.terms", "Term(chosen_nll(stats, batch)", "Term(-stats.logps"),
        ("orpo: odds ratio's sign", "ORPOLoss.terms", "Term(-self.beta * ratio", "Term(self.beta * ratio"),
        ("cpo: alpha dropped", "CPOLoss.terms", "if self.alpha else logps", "if False else logps"),
        ("cpo: NLL dropped", "CPOLoss.terms", "if self.cpo_alpha:", "if False:"),
        ("cpo: margin dropped", "CPO_LOSSES", "loss.beta * delta - loss.simpo_gamma", "loss.beta * delta"),
        ("cpo: sums for means", "CPOLoss.terms", "if means:", "if False:"),
        ("simpo: margin dropped", "SimPOLoss.terms", "chosen - rejected) - self.gamma", "chosen - rejected)"),
        prefix="preference: ",
    ),
    *of_file(
        KTO,
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        (
            "kto: kl's sign",
            "KTO_LOSSES",
            "(kl - reward).sigmoid(), (reward - kl).sigmoid()",
            "(-kl - reward).sigmoid(), (reward + kl).sigmoid()",
        ),
        ("kto: apo swapped", "KTO_LOSSES", "(-reward).sigmoid(), reward", "reward.sigmoid(), (-reward)"),
        (
            "kto: weights swapped",
            "KTOLoss.terms",
            "self.desirable_weight * desirable, self.undesirable_weight * undesirable",
            "self.undesirable_weight * desirable, self.desirable_weight * undesirable",
        ),
        prefix="preference: ",
    ),
    *of_file(
        PREFERENCE,
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        (
            "sides of the metrics swapped",
            "preference_metrics",
            "better, worse, entropy = chosen, ~chosen",
            "worse, better, entropy = chosen, ~chosen",
        ),
        (
            "reference without its tail's weight",
            "ReferencedLoss.sequence_ref_logps",
            "batch.ref_logps if weights is None else batch.ref_logps * weights",
            "batch.ref_logps",
        ),
        prefix="preference: ",
    ),
    *of_file(
        KTO,
        "tests/losses/test_kto.py",
        ("negative kl kept", "KTOLoss.__call__", '"kl": kl.clamp(min=0)', '"kl": kl'),
        prefix="kto: ",
    ),
    *of_file(
        "engine/token_objective.py",
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        (
            "reference walked with the trained head",
            "TokenObjective._read_reference",
            "loss.ref_head",
            "loss.head",
        ),
        ("reference without its bias", "TokenObjective._read_reference", 'inputs["ref_bias"]', "None"),
    ),
    *of_file(
        "engine/batch.py",
        TEST_PREFERENCE_EQUALS_THE_REFERENCE,
        ("weights of ignored tokens counted", "Batch.masked", "*map(mask, term)", "mask(term[0]), *term[1:]"),
        prefix="metrics: ",
    ),
    *of_file(
        "engine/rows.py",
        "tests/engine/test_rows.py",
        ("half a sequence too many", "_packed", "sequences // 2", "sequences // 2 + 1"),
        prefix="chosen tokens: ",
    ),
]
