"""What the calls of losses refuse."""

from tests.mutants.mutant import Mutant

KEYWORDS, MEDUSA, TESTS = "losses/keywords.py", "losses/medusa.py", "tests/losses/test_bad_calls.py"

MUTANTS = [
    Mutant(f"calls: {name}", file, old, new, TESTS)
    for name, file, old, new in (
        ("unknown keywords pass", KEYWORDS, "if name not in self.keywords and", "if False and"),
        ("lists pass", KEYWORDS, "if x is not None and not isinstance(x, Tensor):", "if False:"),
        ("declared inputs are no keywords", KEYWORDS, "for inputs in declared if", "for inputs in () if"),
        ("refused keywords are passed on", KEYWORDS, 'if rest in ([], ["unknown"]):', "if not rest:"),
        (
            "internal inputs are keywords",
            KEYWORDS,
            "sorted(names - set(cls.internal_inputs))",
            "sorted(names)",
        ),
        ("any remedy for a tuple", KEYWORDS, "isinstance(x, (tuple, list)) and self._remedy(name)", "None"),
        ("options of functions pass", KEYWORDS, "if name not in known]", "if False]"),
        ("any heads", MEDUSA, "ours, got = isinstance(heads, MedusaHeads)", "ours, got = True"),
    )
]
