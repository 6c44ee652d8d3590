"""Logits that are nowhere: kernels that read them while the head multiplies, and the rule when they do."""

from tests.mutants.mutant import of_file

KERNELS = "tests/kernels/test_fused_projection.py -k 'not losses and not walked'"
LOSSES = "tests/kernels/test_fused_projection.py -k 'losses or places or nothing'"
RULE = "tests/engine/test_packing.py"

MUTANTS = [
    *of_file(
        "kernels/fused_projection_triton.py",
        KERNELS,
        ("shift left out", "read_half", "d = z - shift[:, None]", "d = z"),
        ("tail of the vocabulary counts", "read_half", "is_target | (cols >= V)", "is_target"),
        ("target counts among the rest", "read_half", "is_target | (cols >= V)", "cols >= V"),
        ("last of equal logits", "read_half", "(cols < y[:, None])", "(cols > y[:, None])"),
        ("slope left out of what is stored", "read_half", "(e * slope if HAS_SOFTCAP else e)", "e"),
        (
            "halves with a target go without masks",
            "read_either_half",
            "(n0 + BN > V) | (tl.max(special.to(tl.int32), 0) > 0)",
            "n0 + BN > V",
        ),
        ("right half at the left's columns", "read_kernel", "right, n0 + BN // 2, y", "right, n0, y"),
        ("target of the other half", "read_kernel", "(at_right, own_r, own)", "(at_right, own, own_r)"),
        ("no row is read again", "read_kernel", "mask=here, other=0), 0) > 0", "mask=here, other=0), 0) > 1"),
        ("equal logits in the left half", "read_kernel", "(top >= own)", "(top > own)"),
        prefix="fused projection: ",
    ),
    *of_file(
        "kernels/row_partials_triton.py",
        KERNELS,
        ("shift stays where it was", "again_kernel", "tl.floor(shift + highest + 0.5)", "shift"),
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
        ("rounded logits", "unpack", "loss.logits_dtype == stat", "True"),
        ("any dtype", "unpack", "dtype in fused_projection.PRODUCT_DTYPES", "True"),
        ("any objective", "unpack", "loss.objective.takes_unrounded", "True"),
        ("shards", "unpack", "and loss.tp_group is None\n", "\n"),
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
        LOSSES,
        ("evaluation in between", "reads_in_product", "not between and", ""),
        ("weighted sums", "reads_in_product", "(weights is None or call.inputs[weights] is None)", "True"),
        ("gradient of the numbers stored", "TokenObjective.costs", "stored = call.trainable and", "stored ="),
        prefix="unrounded logits: ",
    ),
]
