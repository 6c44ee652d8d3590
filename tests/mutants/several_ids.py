"""Several ids per token."""

from tests.mutants.mutant import of_file

TEST_IDS = "tests/losses/test_several_ids.py"
TEST_SUPPORT = "tests/losses/test_support.py"
TEST_SELECT = "tests/kernels/test_select.py"
TEST_GATHERED = "tests/kernels/test_gathered.py"

MUTANTS = [
    *of_file(
        "kernels/select.py",
        TEST_SELECT,
        (
            "last of equal logits",
            "_select_twin",
            "equal.cumsum(-1, dtype=torch.int32)",
            "equal.flip(-1).cumsum(-1).flip(-1)",
        ),
        (
            "order among equals lost",
            "_select_twin",
            "descending=True, stable=True",
            "descending=False, stable=True",
        ),
        ("sign of the head dropped", "compared", "z = z * _sign(head)", "pass"),
        ("bias dropped", "compared", "z + bias.to(z.dtype)", "z"),
        prefix="select: ",
    ),
    *of_file(
        "kernels/select_triton.py",
        TEST_SELECT,
        ("zeros of both signs", "ordered", "z = tl.where(z == 0.0, 0.0, z)", "z = z"),
        ("ties not counted", "first_largest", "(equals <= missing)", "(equals <= k)"),
        ("a tile too far", "select_kernel", "tl.where(exists, ordered(maxima), NOWHERE)", "ordered(maxima)"),
        (
            "higher id first",
            "select_kernel",
            "slot[None, :] < slot[:, None]",
            "slot[None, :] > slot[:, None]",
        ),
        prefix="select: ",
    ),
    *of_file(
        "kernels/cross_entropy_triton.py",
        TEST_SELECT,
        ("of a negative scale", "row_kernel", "tl.where(gain > 0.0, 1.0, -1.0)", "1.0"),
        ("of the tile before", "row_kernel", "start // TILE + tl", "(start - TILE) // TILE + tl"),
        ("without the bias", "compared", "if HAS_BIAS:", "if False:"),
        ("a NaN is small", "compared", 'float("inf")', '-float("inf")'),
        prefix="maxima: ",
    ),
    *of_file(
        "kernels/gathered.py",
        TEST_GATHERED,
        (
            "empty slots count",
            "add_rows",
            "torch.where(ids >= 0, coefficients, 0.0)",
            "torch.where(ids >= 0, coefficients, 1.0)",
        ),
        ("earlier sums lost", "add_rows", "total[touched].to(sums.dtype) + sums", "sums"),
        (
            "products of empty slots",
            "gathered_logits",
            "torch.where(ids[:, slot] >= 0, (rows * wide).sum(1), 0.0)",
            "(rows * wide).sum(1)",
        ),
        prefix="gathered: ",
    ),
    *of_file(
        "kernels/gathered_triton.py",
        TEST_GATHERED,
        (
            "a run's last slots lost",
            "run_kernel",
            "range(start, stop, SLOTS)",
            "range(start, stop - 7, SLOTS)",
        ),
        ("slots of the next id", "run_kernel", "here = place < stop", "here = place < stop + 1"),
        (
            "rows that nobody touched left as they are",
            "run_kernel",
            "if FIRST:",
            "if FIRST & (start < stop):",
        ),
        ("what was there is lost", "run_kernel", "total += tl.load(out", "total += 0 * tl.load(out"),
        prefix="gathered: ",
    ),
    *of_file(
        "engine/several_ids.py",
        TEST_IDS,
        ("duplicates not merged", "merged", "while distance < ids.shape[-1]:", "while False:"),
        ("duplicates count twice", "distinct", "first & (ordered >= 0)", "ordered >= 0"),
        ("softmax's share dropped", "Upstream.entries", "- (total - g) * p", ""),
        ("lse dropped", "Upstream.entries", "factor + self.lse", "factor"),
        ("entropy dropped", "Upstream.entries", "d_z - self.entropy[:, None] * share", "d_z"),
        ("slope dropped", "Upstream.entries", "d_z * slope", "d_z"),
        ("what was taken out stays", "Reader._others", "(1 - share.sum(1))", "1 + 0 * share.sum(1)"),
        (
            "rounding of lse dropped",
            "whole_of",
            "rounding.gather(1, at).expm1()",
            "1 + 0 * rounding.gather(1, at)",
        ),
        ("ranks' columns mixed up", "Slots.put", "values.gather(1, self.source)", "values"),
        prefix="several ids: ",
    ),
    *of_file(
        "engine/several_ids.py",
        TEST_SUPPORT,
        ("rest's gradient at the ids", "Upstream.entries", "d_z - self.rest[:, None] * p", "d_z"),
        (
            "rest's gradient elsewhere",
            "Upstream.entries",
            "factor - self.rest * torch.expm1(rest)",
            "factor + self.rest * torch.expm1(rest)",
        ),
        prefix="support: ",
    ),
    *of_file(
        "engine/ids_objective.py",
        TEST_IDS,
        (
            "own rows of the head left out",
            "IdsObjective.scaled",
            "weighted_rows(head.weight, slots.columns, entries)",
            "weighted_rows(head.weight, slots.columns, 0 * entries)",
        ),
        ("ignored rows have ids", "IdsObjective._read", "torch.where(kept, ids, 0)", "ids"),
        (
            "ranks' order of equals",
            "best",
            "ids, by_id = ids.sort(dim=1, stable=True)",
            "ids, by_id = ids.sort(dim=1, stable=True, descending=True)",
        ),
        prefix="several ids: ",
    ),
    *of_file(
        "engine/support_objective.py",
        TEST_SUPPORT,
        (
            "union of one",
            "SupportObjective._support",
            'torch.cat((found["teacher"], found["student"]), 1)',
            'found["teacher"].repeat(1, 2)',
        ),
        (
            "ids of nobody",
            "SupportObjective._support",
            "common = min(logits.shape[1], taught.shape[1])",
            "common = max(logits.shape[1], taught.shape[1])",
        ),
        ("label's own entry", "SupportObjective.write", '-torch.expm1(stats["hard"])[:, None], -p', "-p, -p"),
        ("second softmax dropped", "SupportObjective.write", "chunk.place.add_(other)", "pass"),
        (
            "hard loss at the temperature",
            "SupportObjective._warm",
            "temperature=1.0",
            "softcap=reader.head.softcap",
        ),
        (
            "never gathered",
            "gathered_columns",
            "k if call.loss.cancels and k * GATHERED < call.V else 0",
            "0",
        ),
        (
            "gathered without slope",
            "SupportObjective.write",
            'g = g * self.call.loss.head.derivative_at(stats["logps"])',
            "pass",
        ),
        prefix="support: ",
    ),
    *of_file(
        "losses/support.py",
        TEST_SUPPORT,
        ("tail for renormalize", "SupportDistillation.terms", 'self.topk_mode == "renormalize"', "False"),
        ("hard loss's weight", "SupportDistillation.terms", "weight * hard", "hard"),
        (
            "teacher's rest of all",
            "SupportDistillation._with_rest",
            "torch.log(-torch.expm1(known))",
            "known",
        ),
        prefix="support: ",
    ),
    *of_file(
        "losses/several_ids.py",
        TEST_IDS,
        (
            "negative ids pass",
            "one_per_position",
            "(filled & (ids < 0)).any(-1)",
            "(filled & (ids < -9)).any(-1)",
        ),
        (
            "ties of rounded logits",
            "linear_topk",
            'head["logits_dtype"] = torch.promote_types(_product_dtype(hidden), torch.float32)',
            "pass",
        ),
        ("mask of an ignored id", "counted", "0 if ignore_index != 0 else 1", "0"),
        prefix="several ids: ",
    ),
]
