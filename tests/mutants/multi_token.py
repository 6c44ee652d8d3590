"""Medusa and multi-token prediction."""

from tests.mutants.mutant import of_file

MEDUSA = "losses/medusa.py"
TESTS = "tests/losses/test_multi_token.py"
LOSS = "losses/multi_token.py"
HEADS = "losses/multi_head.py"

MUTANTS = [
    *of_file(
        MEDUSA,
        TESTS,
        ("heads look one token too near", "MedusaLoss.__call__", "k + 2, layers", "k + 1, layers"),
        ("base looks at its own token", "MedusaLoss.__call__", "base_bias, 1", "base_bias, 0"),
        ("decay dropped", "MedusaLoss.__call__", "self.decay**k for k", "1.0 for k"),
        ("identity at first", "ResidualBlock.__init__", "nn.init.zeros_(self.linear.weight)", "pass"),
        ("projections not copied", "MedusaHeads.start_from", "self.projection(k).copy_(weight)", "pass"),
        prefix="multi-token: ",
    ),
    *of_file(
        LOSS,
        TESTS,
        ("multi-token: depths look one token too far", "MultiTokenLoss.__call__", "k + 1", "k + 2"),
    ),
    *of_file(
        HEADS,
        TESTS,
        ("targets cross sequences", "ahead", "inside = positions < end", "pass"),
        ("targets wrap around", "ahead", "torch.where(inside, labels[", "torch.where(inside | True, labels["),
        prefix="multi-token: ",
    ),
    *of_file(
        "engine/reduction.py",
        TESTS,
        ("multi-token: coefficients dropped from the gradients", "unit_factors", "call.coefficient", "1.0"),
    ),
    *of_file(
        "engine/passes.py",
        TESTS,
        ("multi-token: metrics keep their coefficient", "solve", "[-1] / call.coefficient", "[-1]"),
    ),
    *of_file(
        "engine/gradients.py",
        TESTS,
        ("d_hidden of the last head alone", "Gradients.close", "add_(head.d_hidden)", "copy_(head.d_hidden)"),
        ("shared d_weight overwritten", "Gradients.open", "sums[weight], written=True", "sums[weight]"),
        prefix="multi-token: ",
    ),
    *of_file(
        "engine/projection.py",
        TESTS,
        (
            "blocks' gradients of the last chunk alone",
            "LayerPasses.backward",
            "total += gradient",
            "total.copy_(gradient)",
        ),
        (
            "blocks skipped on the way back",
            "Projection.scatter",
            "chunk.d_features if self.layers is None else self.layers.backward(chunk.d_features)",
            "chunk.d_features; self.layers and self.layers.backward(chunk.d_features)",
        ),
        prefix="multi-token: ",
    ),
    *of_file(
        "engine/function.py",
        TESTS,
        ("multi-token: a second backward finds scaled gradients", "_backward_solved", "not torch", "torch"),
    ),
]
