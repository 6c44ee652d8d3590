"""What an estimate and the doctor say."""

from tests.mutants.mutant import of_file

TEST_ESTIMATING = "tests/test_estimating.py"

MUTANTS = [
    *of_file(
        "estimating.py",
        TEST_ESTIMATING,
        ("another walk", "_Planner.__call__", "and not keeps_vectors(call)", "and keeps_vectors(call)"),
        ("gradients cost no product", "_products", "+ call.needs.weight", "+ 0"),
        ("a teacher is read once more", "_products", "others += rows * step.read", "others += rows"),
        ("sums are never wide", "_Planner._sum_bytes", "plan.chunks > 1", "False"),
        (
            "a frozen head trains",
            "estimate",
            "made(vocab_size, hidden_size).requires_grad_(not frozen_head)",
            "made(vocab_size, hidden_size).requires_grad_()",
        ),
        prefix="estimate: ",
    ),
    *of_file(
        "doctor.py",
        TEST_ESTIMATING,
        ("every loss passes", "examine", "passed and bool(report)", "passed"),
        prefix="doctor: ",
    ),
]
