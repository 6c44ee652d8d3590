"""What the calls of losses refuse."""

from tests.mutants.mutant import of_file

TEST_BAD_CALLS = "tests/losses/test_bad_calls.py"

MUTANTS = [
    *of_file(
        "losses/keywords.py",
        TEST_BAD_CALLS,
        (
            "unknown keywords pass",
            "CheckedCall.check_call",
            "if name not in self.keywords and",
            "if False and",
        ),
        (
            "lists pass",
            "CheckedCall.check_call",
            "if x is not None and not isinstance(x, Tensor):",
            "if False:",
        ),
        (
            "declared inputs are no keywords",
            "call_keywords",
            "for inputs in declared if",
            "for inputs in () if",
        ),
        ("refused keywords are passed on", "call_keywords", 'if rest in ([], ["unknown"]):', "if not rest:"),
        (
            "internal inputs are keywords",
            "call_keywords",
            "sorted(names - set(cls.internal_inputs))",
            "sorted(names)",
        ),
        (
            "any remedy for a tuple",
            "CheckedCall.check_call",
            "isinstance(x, (tuple, list)) and self._remedy(name)",
            "None",
        ),
        ("options of functions pass", "check_options", "if name not in known]", "if False]"),
        prefix="calls: ",
    ),
    *of_file(
        "losses/medusa.py",
        TEST_BAD_CALLS,
        (
            "any heads",
            "MedusaLoss.__call__",
            "ours, got = isinstance(heads, MedusaHeads)",
            "ours, got = True",
        ),
        prefix="calls: ",
    ),
]
