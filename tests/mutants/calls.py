"""What the calls of losses refuse."""

from tests.mutants.mutant import Mutant, of_file

TEST_BAD_CALLS = "tests/losses/test_bad_calls.py"

MUTANTS = [
    *of_file(
        "losses/keywords.py",
        TEST_BAD_CALLS,
        (
            "unknown keywords pass",
            "CheckedCall.check_call",
            "if name not in self.keywords]",
            "if False]",
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
        (
            "tensors without data pass",
            "CheckedCall.check_call",
            "if x is not None and x.is_meta:",
            "if False:",
        ),
        ("a remedy for a model's output", "CheckedCall.check_call", 'name.endswith("hidden")', "False"),
        ("options of functions pass", "check_options", "if name not in known]", "if False]"),
        prefix="calls: ",
    ),
    *of_file(
        "engine/choose.py",
        TEST_BAD_CALLS,
        ("any id is a mark", "_seen_outside", "(least != greatest or least >= 0)", "False"),
        ("only -100 is a mark", "_seen_outside", "if (ids == -100).any() else least", "if True else least"),
        ("no hint for -100 among others", "_seen_outside", "-100 if (ids == -100).any() else least", "least"),
        ("all targets are shown", "_seen_outside", "ids = targets[outside]", "ids = targets"),
        prefix="calls: ",
    ),
    *of_file(
        "engine/operands.py",
        TEST_BAD_CALLS,
        ("hidden without data", "Operands.check", 'device.type == "meta"', "False"),
        ("weight without data", "Operands.check", "check_data(**{name: x})", "pass"),
        prefix="calls: ",
    ),
    Mutant(
        "calls: sequences of a loss that says token",
        "engine/batch.py",
        "Batch.own_segments",
        "if self.segments is None:",
        "if False:",
        TEST_BAD_CALLS,
    ),
    Mutant(
        "calls: cispo without a bound",
        "losses/grpo.py",
        "GRPOLoss.__post_init__",
        'self.loss_type != "cispo" or self.epsilon_high is not None',
        "True",
        TEST_BAD_CALLS,
    ),
    Mutant(
        "calls: reference of any shape",
        "losses/preference.py",
        "ReferencedLoss.__call__",
        "self._check_sums(ref_logps, targets, cu_seqlens)",
        "pass",
        TEST_BAD_CALLS,
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
