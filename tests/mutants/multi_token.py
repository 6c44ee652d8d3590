"""Medusa and multi-token prediction."""

from tests.mutants.mutant import of_file

TEST_MULTI_TOKEN = "tests/losses/test_multi_token.py"
GRADIENTS = "engine/gradients.py"
MEDUSA = "losses/medusa.py"

MUTANTS = [
    *of_file(
        MEDUSA,
        TEST_MULTI_TOKEN,
        ("heads look one token too near", "MedusaLoss.__call__", "k + 2, layers", "k + 1, layers"),
        ("base looks at its own token", "MedusaLoss.__call__", "base_bias, 1", "base_bias, 0"),
        prefix="multi-token: ",
    ),
    *of_file(
        "losses/multi_token.py",
        TEST_MULTI_TOKEN,
        ("depths look one token too far", "MultiTokenLoss.__call__", "bias, k + 1", "bias, k + 2"),
        prefix="multi-token: ",
    ),
    *of_file(
        MEDUSA,
        TEST_MULTI_TOKEN,
        ("decay dropped", "MedusaLoss.__call__", "self.decay**k for k", "1.0 for k"),
        ("identity at first", "ResidualBlock.__init__", "nn.init.zeros_(self.linear.weight)", "pass"),
        ("projections not copied", "MedusaHeads.start_from", "self.projection(k).copy_(weight)", "pass"),
        prefix="multi-token: ",
    ),
    *of_file(
        "losses/multi_head.py",
        TEST_MULTI_TOKEN,
        ("targets cross sequences", "ahead", "inside = positions < end", "pass"),
        ("targets wrap around", "ahead", "torch.where(inside, labels[", "torch.where(inside | True, labels["),
        prefix="multi-token: ",
    ),
    *of_file(
        "engine/passes.py",
        TEST_MULTI_TOKEN,
        (
            "metrics keep their coefficient",
            "solve",
            "losses[-1] if call.coefficient == 1.0 else losses[-1] / call.coefficient",
            "losses[-1]",
        ),
        prefix="multi-token: ",
    ),
    *of_file(
        GRADIENTS,
        TEST_MULTI_TOKEN,
        (
            "d_hidden of the last head alone",
            "Gradients.close",
            "self.sums[hidden].add_(head.d_hidden)",
            "self.sums[hidden].copy_(head.d_hidden)",
        ),
        (
            "shared d_weight overwritten",
            "Gradients.open",
            "Sum(self.sums[weight], written=True) if weight in self.sums else None",
            "None",
        ),
        prefix="multi-token: ",
    ),
    *of_file(
        "engine/function.py",
        TEST_MULTI_TOKEN,
        ("a second backward finds scaled gradients", "_backward_solved", "and not torch", "and torch"),
        prefix="multi-token: ",
    ),
    *of_file(
        "engine/reduction.py",
        TEST_MULTI_TOKEN,
        (
            "coefficients dropped from the gradients",
            "unit_factors",
            "call.stat_dtype, call.coefficient",
            "call.stat_dtype, 1.0",
        ),
        prefix="multi-token: ",
    ),
    *of_file(
        "engine/projection.py",
        TEST_MULTI_TOKEN,
        (
            "blocks' gradients of the last chunk alone",
            "LayerPasses.backward",
            "total += gradient",
            "total.copy_(gradient)",
        ),
        (
            "blocks skipped on the way back",
            "Projection.scatter",
            "self.layers.backward(chunk.d_features)",
            "(self.layers.backward(chunk.d_features), chunk.d_features)[1]",
        ),
        prefix="multi-token: ",
    ),
    *of_file(
        GRADIENTS,
        TEST_MULTI_TOKEN,
        ("shared d_bias overwritten", "Gradients.open", "written=known", "written=False"),
        prefix="multi-token: ",
    ),
]
