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
        ("the plan of one head", "solve", "heads=len(calls), ", ""),
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
        "engine/passes.py",
        "tests/engine/test_plan.py -k d_weight",
        ("sums of one dtype are spared", "plan_for", "summed and not wide", "summed"),
        ("a frozen head's sum is spared", "plan_for", "summed = needs.weight and ", "summed = "),
        ("an fp32 head's sum is spared", "plan_for", " and call.dtype != call.stat_dtype", ""),
        ("a sum in a dtype of its own is spared", "plan_for", " and loss.accum_dtype is None", ""),
        prefix="plan: ",
    ),
    *of_file(
        "engine/passes.py",
        "tests/engine/test_plan.py -k main_gradient",
        ("a main gradient is spared", "solve", "static or main is not None", "static"),
        prefix="plan: ",
    ),
    *of_file(
        "engine/guess.py",
        "tests/engine/test_guess.py",
        ("the first guess at once", "Guess.__init__", ">= LIKELY", ">= 0"),
        ("of several heads one is begun", "Guess.__init__", "len(calls) == 1", "True"),
        ("a wrong guess is kept", "Guess.head", "every and begun.plan == plan", "True"),
        ("nothing is learned", "Guess.head", "if every else 0", "if every else _STREAKS.get(self._key, 0)"),
        ("streaks without end", "Guess.head", "_STREAKS.clear()", "pass"),
        ("a streak of all losses", "Guess.__init__", "call.loss.identity, call", "0, call"),
        ("the counts first", "Guess._read_beside", "numbers.device", "torch.tensor(numbers.tolist()).device"),
        ("a product twice", "Begun.project", "if self._first is None:", "if True:"),
        ("a product for all chunks", "Begun.project", "self._first = None", "pass"),
        ("a streak of groups", "Guess.head", " and rows.group_sizes is None", ""),
        ("begun over a reference", "_may_begin", " and loss.objective.projects_first(call, purpose)", ""),
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
