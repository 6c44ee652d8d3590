"""Distillation losses."""

from tests.mutants.mutant import Mutant

LOSS, TWIN, TRITON = "losses/distillation.py", "kernels/divergence.py", "kernels/divergence_triton.py"
TESTS, KERNEL = "tests/losses/test_distillation.py", "tests/kernels/test_divergence.py"
STRIDES = "tests/kernels/test_strides.py -k divergence"

# What only the whole head's kernel says before it zeroes a row.
HOLD = "whatever its logits hold.\n            g = tl.where(factor == 0.0, "

MUTANTS = [
    *(
        Mutant(f"divergence: {name}", TWIN, old, new, TESTS)
        for name, old, new in (
            ("phi's sign", "p * (torch.expm1(near) - near)", "p * (near - torch.expm1(near))"),
            ("plain sum that cancels", "torch.where(r < 1, p * (torch.expm1(near) - near), q - p - p * r)", "-p * r"),
            (
                "directions swapped",
                "kl(student, teacher) if beta else kl(teacher, student)",
                "kl(teacher, student) if beta else kl(student, teacher)",
            ),
            ("mixture swapped", "beta + (1 - 2 * beta) * above", "1 - beta - (1 - 2 * beta) * above"),
            (
                "shares swapped",
                "(1 - beta) * kl_terms(student, log_m, to_student) + beta",
                "beta * kl_terms(student, log_m, to_student) + beta",
            ),
            ("skew dropped", "mixture(student, teacher, alpha)", "mixture(student, teacher, 0.5)"),
        )
    ),
    *(
        Mutant(f"distillation: {name}", LOSS, old, new, TESTS)
        for name, old, new in (
            ("forward and reverse swapped", "kernels.kl(teacher, student)", "kernels.kl(student, teacher) + 0"),
            ("total variation doubled", "0.5 * (student.exp()", "(student.exp()"),
            ("cosine of raw logits", "z, t = z / batch.norm(z).clamp(min=TINY), t / batch.norm(t).clamp(min=TINY)", "pass"),
            (
                "vocabularies not cut",
                "common = min(logits.shape[-1], batch.teacher_logits.shape[-1])",
                "common = batch.teacher_logits.shape[-1]",
            ),
            ("hard loss at the temperature", "batch.log_softmax(logits * self.temperature)", "batch.log_softmax(logits)"),
            ("hard loss's weight", "weight * hard + (1 - weight) * soft", "hard + (1 - weight) * soft"),
            ("tail for renormalize", 'if mode == "renormalize":', "if False:"),
            ("student's tail of all ids", "student.masked_fill(covered, NOTHING).logsumexp", "student.logsumexp"),
            ("empty slots filled", "picked = torch.where(filled, student.gather(-1, ids), NOTHING)", "picked = student.gather(-1, ids)"),
            ("mask ignored", "counted = torch.where(mask.bool(), counted, self.ignore_index)", "pass"),
            ("agreement with the label", "(best == favourite)", "(best == batch.targets)"),
            ("ids unchecked", "expect(bool(inside)", "expect(True"),
        )
    ),
    *(
        Mutant(f"divergence kernel: {name}", TRITON, old, new, KERNEL)
        for name, old, new in (
            ("gradient's sign", " g = soft_factor * s * (score - average)", " g = soft_factor * s * (average - score)"),
            ("mean of the score dropped", " g = soft_factor * s * (score - average)", " g = soft_factor * s * score"),
            ("forward gradient's sign", "g = soft_factor * (s - t)", "g = soft_factor * (t - s)"),
            (
                "temperature dropped from the gradient",
                "soft_factor = factor * (1.0 - hard_weight) * cold",
                "soft_factor = factor * (1.0 - hard_weight)",
            ),
            ("slope dropped", f"{HOLD}0.0, g * slope)", f"{HOLD}0.0, g)"),
            ("label's own term dropped", "known, hard_factor * (p - tl.where(cols == y, 1.0, 0.0))", "known, hard_factor * p"),
            ("tail of the student unmasked", 'z = tl.where(shared, z * cold, -float("inf"))', "z = z * cold"),
            ("tail of the teacher unmasked", 't = tl.where(shared, t * cold, -float("inf"))', "t = t * cold"),
            ("tail of the gradient unmasked", "element_ty), mask=mask)\n    tl.store(soft", "element_ty))\n    tl.store(soft"),
            ("uncounted rows not zeroed", f"{HOLD}0.0, g * slope)", f"{HOLD}1.0, g * slope)"),
            ("shares of the mixture swapped", "tl.where(above, 1.0 - beta, beta)", "tl.where(above, beta, 1.0 - beta)"),
            ("divergence's second half dropped", "ours - beta * t * (to_s - d)", "ours"),
            ("last block of equal maxima", "tl.where(top > best, start, best_start)", "tl.where(top >= best, start, best_start)"),
            (
                "last column of equal maxima",
                "favourite = tl.min(tl.where(shared & (z * cold == best_s), cols, far), 0)",
                "favourite = tl.max(tl.where(shared & (z * cold == best_s), cols, 0), 0)",
            ),
            ("drift ignored", "if top > shift + DRIFT:", "if shift < -1e29:"),
            ("softcap's slope dropped", "slope = scale * (1.0 - squashed * squashed)", "slope = scale + 0.0 * squashed"),
            (
                "shard's gradient's sign",
                "soft_factor * s * (score - average)\n            if HARD",
                "soft_factor * s * (average - score)\n            if HARD",
            ),
            ("shard's label of another rank", "tl.where(y >= 0, hard", "tl.where((y >= 0) & (y < V), hard"),
            (
                "shard's temperature dropped",
                "hard_factor = factor * (1.0 - hard_weight) * cold,",
                "hard_factor = factor * (1.0 - hard_weight),",
            ),
            ("shard's mean of one rank", "tl.store(sums_ptr + rows + row, tl.sum(mean, 0))", "tl.store(sums_ptr + rows + row, 0.0)"),
        )
    ),
    *(
        Mutant(f"divergence kernel: gaps in the {name}", TRITON, old, new, STRIDES)
        for name, old, new in (
            ("labels", "if labels is None else dense(labels)", "if labels is None else labels"),
            ("factors", "if factors is None else dense(factors)", "if factors is None else factors"),
            ("shard's labels", "grad, dense(labels)", "grad, labels"),
            ("shard's factors", "dense(factors) if write", "factors if write"),
            ("biases", "dense(x, torch.float32)", "x.float()"),
        )
    ),
]
