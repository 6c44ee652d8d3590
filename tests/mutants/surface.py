"""What losses take alike, and what they hand out."""

from tests.mutants.mutant import of_file

TEST_SURFACE = "tests/losses/test_even_surface.py"
TEST_TYPING = "tests/test_typing.py -k checkers"
TEST_PREFERENCE = "tests/losses/test_preference.py -k equals"

MUTANTS = [
    *of_file(
        "losses/linear.py",
        TEST_SURFACE,
        ("mask is ignored", "LinearLoss.__call__", "if mask is not None:", "if False:"),
        ("tokens are not aligned", "LinearLoss.__call__", "        if tokens:", "        if False:"),
        prefix="surface: ",
    ),
    *of_file(
        "engine/operands.py",
        TEST_SURFACE,
        (
            "mask is turned round",
            "masked",
            "torch.where(mask.bool(), targets",
            "torch.where(~mask.bool(), targets",
        ),
        ("mask of any shape", "masked", "mask.shape == targets.shape", "True"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/reference_free.py",
        TEST_SURFACE,
        ("mask beside nll_targets", "ORPOLoss.__call__", 'arguments.get("mask") is None', "True"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/multi_head.py",
        TEST_SURFACE,
        ("mask of several heads", "MultiHeadLoss.solve_parts", "if mask is not None:", "if False:"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/declarations.py",
        TEST_SURFACE,
        ("inputs named like keywords", "check_class", "expect(not taken", "expect(True"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/several_ids.py",
        TEST_SURFACE,
        ("several ids are not shifted", "logprobs_of_ids", "    if shift:", "    if False:"),
        ("several ids cross boundaries", "logprobs_of_ids", "-2, cu_seqlens)", "-2)"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/logprobs.py",
        TEST_SURFACE,
        (
            "logprobs: shift is ignored",
            "TokenNumbers.numbers",
            "Options(None, shift,",
            "Options(None, False,",
        ),
        ("logprobs: boundaries alone", "linear_logprobs", "shift or cu_seqlens is None", "True"),
        prefix="surface: ",
    ),
    *of_file(
        "engine/call.py",
        TEST_SURFACE,
        ("a single token is shifted", "prepare", "hidden.dim() > 1", "True"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/policy.py",
        TEST_SURFACE,
        (
            "epsilon_low is ignored",
            "ClippedLoss.__post_init__",
            "(self.epsilon, self.epsilon_low)",
            "(self.epsilon,)",
        ),
        ("two lower clip ranges", "ClippedLoss.__post_init__", "len(set(given)) < 2", "True"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/grpo.py",
        TEST_SURFACE,
        (
            "an unreduced loss's reference is shifted twice",
            "GRPOLoss.laid_out",
            'inputs["ref_logps"] = self.detached_logps(*model.values(), layout.targets, self.ref_head)',
            'inputs["ref_logps"] = layout.per_token("ref_logps", self.detached_logps(*model.values(), '
            "layout.targets, self.ref_head))",
        ),
        ("a reference without a KL", "GRPOLoss.needs_reference", "self.beta > 0", "True"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/reference_model.py",
        TEST_SURFACE,
        ("the trained head's softcap", "ComparedLoss.ref_head", 'if self.ref_softcap == "same"', "if True"),
        (
            "any reference",
            "ComparedLoss.check_one_reference",
            'names[:1] != ["ref_hidden"]:',
            "False:",
        ),
        prefix="surface: ",
    ),
    *of_file(
        "losses/kto.py",
        TEST_SURFACE,
        ("a head of the KL alone", "KTOLoss.__call__", 'if "ref_hidden" in kl and', "if False and"),
        prefix="surface: ",
    ),
    *of_file(
        "engine/token_objective.py",
        TEST_SURFACE,
        (
            "predictions without the bias",
            "TokenObjective.fill",
            "how = loss.head, self.call.bias",
            "how = loss.head, None",
        ),
        (
            "predictions of the first chunk",
            "TokenObjective.fill",
            "self.predictions[chunk.step.start : chunk.step.stop]",
            "self.predictions[: len(ids)]",
        ),
        prefix="surface: ",
    ),
    *of_file(
        "losses/output.py",
        TEST_SURFACE,
        ("ignored positions predict", "aligned", 'if "predictions" in found:', "if False:"),
        (
            "what nobody asked for is None",
            "LossOutput._asked_for",
            "if name not in self.tokens:",
            "if False:",
        ),
        prefix="surface: ",
    ),
    *of_file(
        "losses/dpo.py",
        TEST_PREFERENCE,
        ("averaging is TRL's choice", "DPOLoss.terms", "if self.average_logps is None", "if True"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/inputs.py",
        TEST_TYPING,
        ("checkers: a keyword that is none", "CallInputs", "    mask: Tensor", "    masks: Tensor"),
        ("checkers: an option that is none", "HeadOptions", "    compact: bool", "    compacted: bool"),
        prefix="surface: ",
    ),
    *of_file(
        "losses/grpo_types.py",
        TEST_TYPING,
        ("checkers: a type that is none", "GRPOType", '"vespo"', '"vesper"'),
        prefix="surface: ",
    ),
    *of_file(
        "losses/reference_free.py",
        TEST_PREFERENCE,
        ("cpo: averaging is TRL's choice", "CPOLoss.terms", "if self.average_logps is None", "if True"),
        prefix="surface: ",
    ),
]
