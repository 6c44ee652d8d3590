"""Logits that are nowhere: kernels that read them while the head multiplies, and the rule when they do."""

from tests.mutants.mutant import of_file

KERNELS = "tests/kernels/test_fused_projection.py -k 'not losses and not walked'"
LOSSES = "tests/kernels/test_fused_projection.py -k 'losses or places or nothing'"
SHARDS = "tests/kernels/test_shard_in_product.py"
RULE = "tests/engine/test_packing.py"

MUTANTS = [
    *of_file(
        "kernels/fused_projection_triton.py",
        KERNELS,
        ("shift left out", "read_half", "acc, shift[:, None], bias_ptr", "acc, 0.0, bias_ptr"),
        ("tail of the vocabulary counts", "read_half", "if n0 + BN > V:", "if False:"),
        ("target counts among the rest", "read_half", "tl.where(cols == y[:, None], NEVER, d)", "d"),
        ("last of equal logits", "read_half", "(cols < y[:, None])", "(cols > y[:, None])"),
        ("ids that are ruled out", "read_half", "if EXTRA and HAS_BIAS:", "if False:"),
        ("slope left out of what is stored", "read_half", "(e * slope if HAS_SOFTCAP else e)", "e"),
        ("right half at the left's columns", "read_kernel", "right, n0 + BN // 2, given", "right, n0, given"),
        ("no row is read again", "any_again", "tl.max(found, 0) > 0", "tl.max(found, 0) > 3"),
        ("equal logits in the right half", "read_kernel", "(tied > 0) | (tied_r > 0)", "tied > 0"),
        prefix="fused projection: ",
    ),
    *of_file(
        "kernels/row_partials_triton.py",
        KERNELS,
        ("shift stays where it was", "again_kernel", "shift + rise", "shift"),
        ("target stays where it was", "again_kernel", "own - rise", "own"),
        ("ties are not looked at", "again_kernel", "tl.where(tied, TIE, 0)", "0"),
        ("ignored rows count", "shift_kernel", 'tl.where(y == ignore_index, float("inf"), shift)', "shift"),
        ("rows far below their shift", "again_kernel", "| (sum_e < tl.exp2(-DRIFT))", "| False"),
        ("rest of ln 2", "finish_kernel", "shift * LN2_LOW + residual", "residual"),
        ("sum of logits without the shift", "finish_kernel", " + V * shift", ""),
        ("equal logits in a later tile", "finish_kernel", "earlier & (tops", "(tops"),
        ("sign of the target's entry", "finish_kernel", "(-others * slope)", "(others * slope)"),
        ("scale left out of the factor", "finish_kernel", "-gain / total", "-1.0 / total"),
        prefix="fused projection: ",
    ),
    *of_file(
        "kernels/fused_gradient_triton.py",
        KERNELS,
        ("entry of the target", "gradient_half", "tl.where(cols == y[:, None], g_y[:, None], g)", "g"),
        ("sign of d entropy", "gradient_half", "g -= g_entropy", "g += g_entropy"),
        ("rounding of lse", "gradient_kernel", "1.0 - complement(-residual)", "1.0 + 0.0 * residual"),
        ("ignored rows", "gradient_half", "tl.where(ignored[:, None], 0.0, g * slope)", "(g * slope)"),
        prefix="fused projection: ",
    ),
    *of_file(
        "kernels/product_tiles_triton.py",
        KERNELS,
        ("last columns of the features", "halves_of_product", "range(tl.cdiv(H, BK))", "range(H // BK)"),
        (
            "halves interleaved",
            "halves_of_product",
            "(BM, 2, BN // 2)), (0, 2, 1)",
            "(BM, BN // 2, 2)), (0, 1, 2)",
        ),
        ("offset operands", "aligned", "x.data_ptr() % 16 == 0", "True"),
        ("rows at any byte", "aligned", "x.stride(0) * x.itemsize % 16 == 0", "True"),
        prefix="fused projection: ",
    ),
    *of_file(
        "kernels/fused_projection.py",
        KERNELS,
        ("heads with a stride", "serves", "head.is_contiguous()", "True"),
        ("offset heads", "serves", "head.storage_offset() * head.itemsize % 16 == 0", "True"),
        ("any width", "serves", "H * dtype.itemsize % 16 == 0", "True"),
        ("gradients' rows at any byte", "new_place", "-(-V // step) * step", "V"),
        prefix="fused projection: ",
    ),
    *of_file(
        "kernels/fused_projection.py",
        LOSSES,
        ("bytes of a gradient that is not stored", "row_bytes", "2 * V if stored else 0", "2 * V"),
        prefix="fused projection: ",
    ),
    *of_file(
        "engine/packing.py",
        RULE,
        ("any dtype", "unpack", "dtype in fused_projection.PRODUCT_DTYPES", "True"),
        ("any objective", "unpack", "loss.objective.takes_unrounded(loss, stat)", "True"),
        (
            "frozen columns go unasked",
            "unpack",
            "tensors[weight] if frozen is None else frozen",
            "tensors[weight]",
        ),
        ("reference goes unasked", "unpack", 'inputs.get("ref_weight")', "None"),
        prefix="unrounded logits: ",
    ),
    *of_file(
        "engine/token_objective.py",
        RULE,
        ("rounded logits", "TokenObjective.takes_unrounded", "loss.logits_dtype == dtype", "True"),
        ("z-loss", "TokenObjective.takes_unrounded", '"lse" not in loss.differentiates', "True"),
        ("unreduced", "TokenObjective.takes_unrounded", 'loss.reduction == "none" or', ""),
        prefix="unrounded logits: ",
    ),
    *of_file(
        "engine/token_objective.py",
        LOSSES,
        ("evaluation in between", "reads_in_product", "between or summed", "summed"),
        ("weighted sums", "reads_in_product", "between or summed", "between"),
        ("gradient of the numbers stored", "TokenObjective.costs", "stored = call.trainable and", "stored ="),
        prefix="unrounded logits: ",
    ),
    *of_file(
        "engine/token_objective.py",
        SHARDS,
        (
            "a shard's numbers",
            "TokenObjective.fill",
            "        vocabulary.combine(stats, chunk.targets)\n",
            "",
        ),
        (
            "a shard's gradient",
            "TokenObjective.fill",
            "vocabulary.combine_gradient(chunk.place, chunk.targets, stats, factor, loss.head)",
            "factor",
        ),
        (
            "a reference's shard",
            "TokenObjective._read_reference",
            "call.vocabulary.combine(stats, chunk.targets)",
            "pass",
        ),
        prefix="shard in the product: ",
    ),
    *of_file(
        "engine/call.py",
        SHARDS,
        ("this rank decides", "Call.with_shards", "unrounded=shards.unrounded", "unrounded=self.unrounded"),
        prefix="shard in the product: ",
    ),
    *of_file(
        "parallel/vocabulary.py",
        SHARDS,
        ("one rank suffices", "Shards.read", "all(code", "any(code"),
        prefix="shard in the product: ",
    ),
    *of_file(
        "engine/call.py",
        RULE,
        (
            "rounded all the same",
            "Call.with_shards",
            "self.stat_dtype if shards.unrounded else self.dtype",
            "self.dtype",
        ),
        prefix="shard in the product: ",
    ),
]
