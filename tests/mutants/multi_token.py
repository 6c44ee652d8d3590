"""Medusa and multi-token prediction."""

from tests.mutants.mutant import Mutant

MEDUSA, LOSS, HEADS = "losses/medusa.py", "losses/multi_token.py", "losses/multi_head.py"
WALK, ENGINE = "losses/walk.py", "losses/engine.py"
TESTS = "tests/losses/test_multi_token.py"

MUTANTS = [
    Mutant(f"multi-token: {name}", file, old, new, TESTS)
    for name, file, old, new in (
        ("heads look one token too near", MEDUSA, "weight, None, k + 2, *blocks)", "weight, None, k + 1, *blocks)"),
        ("base looks at its own token", MEDUSA, "base_weight, base_bias, 1)", "base_weight, base_bias, 0)"),
        ("depths look one token too far", LOSS, "weight, bias, k + 1)", "weight, bias, k + 2)"),
        ("targets cross sequences", HEADS, "        inside = positions < end\n", "        pass\n"),
        ("targets wrap around", HEADS, "torch.where(inside, labels[", "torch.where(inside | True, labels["),
        ("coefficients dropped from the gradients", ENGINE, "unit: coefficient * inverse(count)", "unit: inverse(count)"),
        ("decay dropped", MEDUSA, "self.decay**k for k", "1.0 for k"),
        ("metrics keep their coefficient", HEADS, "solved.loss / share.coefficient", "solved.loss"),
        ("d_hidden of the last head alone", HEADS, "if known is None else known.add_(d_hidden)", "if True else known"),
        ("shared d_weight overwritten", HEADS, '"d_weight": self.sums.get(share.weight)', '"d_weight": None'),
        ("blocks' gradients of the last chunk alone", WALK, "            total += gradient\n", "            total.copy_(gradient)\n"),
        (
            "blocks skipped on the way back",
            WALK,
            "                d_hidden = self.blocks.backward(d_hidden)\n",
            "                self.blocks.backward(d_hidden)\n",
        ),
        ("upstream gradient dropped", HEADS, "scale, kept = pending * upstream, iter(kept)", "scale, kept = pending, iter(kept)"),
        ("a second backward finds scaled gradients", HEADS, "and not torch._C", "and torch._C"),
        ("identity at first", MEDUSA, "        nn.init.zeros_(self.linear.weight)\n", "        pass\n"),
        ("projections not copied", MEDUSA, "self.projection(k).copy_(weight)", "pass"),
    )
]
