"""What an estimate and the doctor say."""

from tests.mutants.mutant import of_file

TEST_ESTIMATING = "tests/test_estimating.py"

MUTANTS = [
    *of_file(
        "estimating.py",
        TEST_ESTIMATING,
        ("another walk", "_Planner.__call__", "and not keeps_vectors(call)", "and keeps_vectors(call)"),
        ("a teacher is read once more", "_products", " if step.read)", ")"),
        ("sums are never wide", "_Planner._memory", "plan.chunks > 1", "False"),
        ("the chunk is there in the cast", "_Planner._memory", "max(chunk, later)", "chunk + later"),
        ("heads' d_hidden is not wide", "_Planner._memory", "if several else {}", "if False else {}"),
        (
            "a frozen head trains",
            "estimate",
            "made(vocab_size, hidden_size).requires_grad_(not frozen_head)",
            "made(vocab_size, hidden_size).requires_grad_()",
        ),
        prefix="estimate: ",
    ),
    *of_file(
        "engine/passes.py",
        TEST_ESTIMATING,
        ("gradients cost no product", "plan_for", "+ needs.weight", "+ 0"),
        ("the plan of one head", "solve", "Pass.SOLVE, len(calls),", "Pass.SOLVE, 1,"),
        prefix="estimate: ",
    ),
    *of_file(
        "engine/passes.py",
        "tests/losses/test_plan.py -k told",
        ("a later walk costs nothing", "plan_for", "1 + backward if twice", "0 if twice"),
        ("nothing is deducted", "plan_for", "fixed,\n        heads", "0,\n        heads"),
        prefix="plan: ",
    ),
    *of_file(
        "engine/gradients.py",
        "tests/engine/test_plan.py -k d_weight",
        ("a main gradient is spared", "spared_bytes", "main is None and ", ""),
        ("sums of one dtype are spared", "spared_bytes", " and not static", ""),
        ("a frozen head's sum is spared", "spared_bytes", "call.needs.weight and ", ""),
        ("an fp32 head's sum is spared", "spared_bytes", " and call.dtype != call.stat_dtype", ""),
        prefix="plan: ",
    ),
    *of_file(
        "engine/plan.py",
        "tests/engine/test_plan.py -k one_chunk",
        ("one chunk whatever it takes", "make_plan", "(rows - C) * row_bytes <= facts.spared_bytes and ", ""),
        ("one chunk beyond the budget", "make_plan", " and rows * row_bytes <= budget", ""),
        prefix="plan: ",
    ),
    *of_file(
        "doctor.py",
        TEST_ESTIMATING,
        ("every loss passes", "examine", "passed and bool(report)", "passed"),
        prefix="doctor: ",
    ),
]
