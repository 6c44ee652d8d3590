"""Medusa and multi-token prediction."""

from tests.mutants.mutant import of_file

LOSS = "losses/multi_token.py"
HEADS = "losses/multi_head.py"
WALK = "losses/walk.py"
ENGINE = "losses/engine.py"
TESTS = "tests/losses/test_multi_token.py"

MUTANTS = [
    *of_file(
        LOSS,
        TESTS,
        ("heads look one token too near", "MedusaLoss.__call__", "k + 2, *blocks", "k + 1, *blocks"),
        ("base looks at its own token", "MedusaLoss.__call__", "base_bias, 1", "base_bias, 0"),
        ("depths look one token too far", "MultiTokenLoss.__call__", "bias, k + 1", "bias, k + 2"),
        ("decay dropped", "MedusaLoss.__call__", "self.decay**k for k", "1.0 for k"),
        ("identity at first", "ResidualBlock.__init__", "nn.init.zeros_(self.linear.weight)", "pass"),
        ("projections not copied", "MedusaHeads.start_from", "self.projection(k).copy_(weight)", "pass"),
        prefix="multi-token: ",
    ),
    *of_file(
        HEADS,
        TESTS,
        ("targets cross sequences", "ahead", "inside = positions < end", "pass"),
        ("targets wrap around", "ahead", "torch.where(inside, labels[", "torch.where(inside | True, labels["),
        ("metrics keep their coefficient", "solve_parts", "solved.loss / share.coefficient", "solved.loss"),
        (
            "d_hidden of the last head alone",
            "Totals.solve",
            "if known is None else known.add_(d_hidden)",
            "if True else known",
        ),
        ("shared d_weight overwritten", "Totals.solve", "self.sums.get(share.weight)", "None"),
        ("upstream gradient dropped", "MultiHead.backward", "kept = pending * upstream", "kept = pending"),
        ("a second backward finds scaled gradients", "MultiHead.backward", "and not torch", "and torch"),
        prefix="multi-token: ",
    ),
    *of_file(
        ENGINE,
        TESTS,
        (
            "multi-token: coefficients dropped from the gradients",
            "scales",
            "unit: coefficient * inverse(count)",
            "unit: inverse(count)",
        ),
    ),
    *of_file(
        WALK,
        TESTS,
        (
            "blocks' gradients of the last chunk alone",
            "Blocks.backward",
            "total += gradient",
            "total.copy_(gradient)",
        ),
        ("blocks skipped on the way back", "Walk._add", "d_hidden = self.blocks", "self.blocks"),
        prefix="multi-token: ",
    ),
]
