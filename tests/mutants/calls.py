"""What the calls of losses refuse."""

from tests.mutants.mutant import of_file

KEYWORDS = "losses/keywords.py"
TESTS = "tests/losses/test_bad_calls.py"
MEDUSA = "losses/medusa.py"

MUTANTS = [
    *of_file(
        KEYWORDS,
        TESTS,
        ("unknown keywords pass", "CheckedCall.check_call", "name not in self.keywords and", "False and"),
        ("lists pass", "CheckedCall.check_call", "x is not None and not isinstance(x, Tensor):", "False:"),
        ("declared inputs are no keywords", "call_keywords", "for inputs in declared", "for inputs in ()"),
        ("refused keywords are passed on", "call_keywords", 'if rest in ([], ["unknown"]):', "if not rest:"),
        ("internal inputs are keywords", "call_keywords", "(names - set(cls.internal_inputs))", "(names)"),
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
        MEDUSA,
        TESTS,
        ("calls: any heads", "MedusaLoss.__call__", "got = isinstance(heads, MedusaHeads)", "got = True"),
    ),
]
