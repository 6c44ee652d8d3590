"""Distillation losses."""

from tests.mutants.mutant import of_file

TWIN = "kernels/divergence.py"
TESTS = "tests/losses/test_distillation.py"
LOSS = "losses/distillation.py"
TRITON = "kernels/divergence_triton.py"
KERNEL = "tests/kernels/test_divergence.py"

MUTANTS = [
    *of_file(
        TWIN,
        TESTS,
        ("phi's sign", "kl_terms", "p * (torch.expm1(near) - near)", "p * (near - torch.expm1(near))"),
        (
            "plain sum that cancels",
            "kl_terms",
            "torch.where(r < 1, p * (torch.expm1(near) - near), q - p - p * r)",
            "-p * r",
        ),
        (
            "directions swapped",
            "jsd",
            "kl(student, teacher) if beta else kl(teacher, student)",
            "kl(teacher, student) if beta else kl(student, teacher)",
        ),
        ("mixture swapped", "mixture", "beta + (1 - 2 * beta) * above", "1 - beta - (1 - 2 * beta) * above"),
        ("shares swapped", "jsd", "(1 - beta) * kl_terms", "beta * kl_terms"),
        ("skew dropped", "skewed_kl", "mixture(student, teacher, alpha)", "mixture(student, teacher, 0.5)"),
        prefix="divergence: ",
    ),
    *of_file(
        LOSS,
        TESTS,
        ("forward and reverse swapped", "DIVERGENCES", "kl(teacher, student)", "kl(student, teacher) + 0"),
        ("total variation doubled", "DIVERGENCES", "0.5 * (student.exp()", "(student.exp()"),
        (
            "cosine of raw logits",
            "DistillationLoss.terms",
            "z, t = z / batch.norm(z).clamp(min=TINY), t / batch.norm(t).clamp(min=TINY)",
            "pass",
        ),
        (
            "vocabularies not cut",
            "DistillationLoss.terms",
            "common = min(logits.shape[-1], batch.teacher_logits.shape[-1])",
            "common = batch.teacher_logits.shape[-1]",
        ),
        ("hard loss at the temperature", "DistillationLoss.terms", "(logits * self.temperature)", "(logits)"),
        ("hard loss's weight", "DistillationLoss._mixed", "weight * hard", "hard"),
        ("tail for renormalize", "on_best_ids", 'if mode == "renormalize":', "if False:"),
        ("student's tail of all ids", "on_best_ids", "masked_fill(covered, NOTHING).logsumexp", "logsumexp"),
        (
            "empty slots filled",
            "on_best_ids",
            "picked = torch.where(filled, student.gather(-1, ids), NOTHING)",
            "picked = student.gather(-1, ids)",
        ),
        (
            "mask ignored",
            "DistillationLoss.__call__",
            "counted = torch.where(mask.bool(), counted, self.ignore_index)",
            "pass",
        ),
        ("agreement with the label", "DistillationLoss.terms", "best == favourite", "best == batch.targets"),
        ("ids unchecked", "_check_topk", "expect(bool(inside)", "expect(True"),
        prefix="distillation: ",
    ),
    *of_file(
        TRITON,
        KERNEL,
        ("gradient's sign", "divergence_kernel", "s * (score - average)", "s * (average - score)"),
        ("mean of the score dropped", "divergence_kernel", "s * (score - average)", "s * score"),
        ("forward gradient's sign", "divergence_kernel", "soft_factor * (s - t)", "soft_factor * (t - s)"),
        ("temperature dropped from the gradient", "divergence_kernel", "hard_weight) * cold", "hard_weight)"),
        ("slope dropped", "divergence_kernel", "(factor == 0.0, 0.0, g * slope)", "(factor == 0.0, 0.0, g)"),
        ("label's own term dropped", "divergence_kernel", "(p - tl.where(cols == y, 1.0, 0.0))", "p"),
        (
            "tail of the student unmasked",
            "divergence_kernel",
            'z = tl.where(shared, z * cold, -float("inf"))',
            "z = z * cold",
        ),
        (
            "tail of the teacher unmasked",
            "divergence_kernel",
            't = tl.where(shared, t * cold, -float("inf"))',
            "t = t * cold",
        ),
        ("tail of the gradient unmasked", "divergence_kernel", "element_ty), mask=mask)", "element_ty))"),
        ("uncounted rows not zeroed", "divergence_kernel", "factor == 0.0, 0.0, g", "factor == 0.0, 1.0, g"),
        ("shares of the mixture swapped", "scored", "(above, 1.0 - beta, beta)", "(above, beta, 1.0 - beta)"),
        ("divergence's second half dropped", "scored", "ours - beta * t * (to_s - d)", "ours"),
        ("last block of equal maxima", "grow", "top > best, start", "top >= best, start"),
        (
            "last column of equal maxima",
            "divergence_kernel",
            "favourite = tl.min(tl.where(shared & (z * cold == best_s), cols, far), 0)",
            "favourite = tl.max(tl.where(shared & (z * cold == best_s), cols, 0), 0)",
        ),
        ("drift ignored", "grow", "if top > shift + DRIFT:", "if shift < -1e29:"),
        ("softcap's slope dropped", "head_at_one", "* (1.0 - squashed * squashed)", "+ 0.0 * squashed"),
        ("shard's gradient's sign", "shard_kernel", "s * (score - average)", "s * (average - score)"),
        ("shard's label of another rank", "shard_kernel", "y >= 0, hard", "(y >= 0) & (y < V), hard"),
        ("shard's temperature dropped", "shard_kernel", "(1.0 - hard_weight) * cold", "(1.0 - hard_weight)"),
        ("shard's mean of one rank", "shard_kernel", "rows + row, tl.sum(mean, 0)", "rows + row, 0.0"),
        prefix="divergence kernel: ",
    ),
]
