"""Compiled graphs, CUDA graphs, mixed precision, hooks, and accumulation into a main gradient."""

from tests.mutants.mutant import of_file

HEADS = "losses/multi_head.py"
WALK = "losses/walk.py"
ENGINE = "losses/engine.py"
ACCUMULATION = "losses/accumulation.py"
COMPILE = "tests/losses/test_compile.py -k heads"
PRECISION = "tests/losses/test_precision.py"
ADDED = "tests/losses/test_accumulation.py"

MUTANTS = [
    *of_file(
        HEADS,
        COMPILE,
        (
            "blocks outside of autocast",
            "Totals.solve",
            "self.call.dtype if self.call.autocast else None",
            "None",
        ),
        ("d_hidden of several heads too narrow", "_", "stat if index in hidden else x.dtype", "x.dtype"),
        (
            "the first module's blocks for all",
            "BlockHeads.registered",
            "{type(self).__qualname__}#{len(_MODULES)}",
            "",
        ),
        prefix="graph: ",
    ),
    *of_file(
        ENGINE,
        "tests/losses/test_own_loss.py",
        (
            "all rows: packed groups of equal sizes",
            "_rows",
            "(grouped and not loss.compact and problem.cu_seqlens is not None)",
            "False",
        ),
    ),
    *of_file(
        WALK,
        PRECISION,
        ("bias: rounded factor", "Walk._add_bias", "(column - high)", "(high - high)"),
        ("torch.func under hooks", "LogitsWalk._evaluate", "with _no_hooks():", "with nullcontext():"),
    ),
    *of_file(
        ACCUMULATION,
        ADDED,
        ("grad_scale dropped", "_accumulate", "coefficient=grad_scale", "coefficient=1.0"),
        ("upstream unchecked", "_expect_one", "expect(upstream.item() == 1", "expect(True"),
        ("upstream not asserted", "_expect_one", "upstream == 1, f", "upstream == upstream, f"),
        ("d_bias unscaled", "_accumulate", "(d_bias, solved.pending", "(d_bias, 2 * solved.pending"),
        prefix="main gradient: ",
    ),
    *of_file(
        ENGINE,
        ADDED,
        ("fp16 flushes", "solve", "straight and problem.dtype == torch.float16", "False"),
        ("left shrunk in fp16", "solve", "d_weight.mul_(pending)", "pass"),
        ("not shrunk in fp16", "solve", "d_weight.div_(pending)", "pass"),
        ("not straight", "solve", "pending = 1.0 if straight and not shrinks else pending", "pass"),
        prefix="main gradient: ",
    ),
]
