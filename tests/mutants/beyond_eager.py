"""Compiled graphs, CUDA graphs, mixed precision, hooks, and accumulation into a main gradient."""

from tests.mutants.mutant import of_file

COMPILE = "tests/losses/test_compile.py -k heads"
PRECISION = "tests/losses/test_precision.py"
ADDED = "tests/losses/test_accumulation.py"

MUTANTS = [
    *of_file(
        "engine/packing.py",
        COMPILE,
        (
            "graph: blocks outside of autocast",
            "_layers",
            "signature.dtype if signature.autocast else None",
            "None",
        ),
    ),
    *of_file(
        "engine/operators.py",
        COMPILE,
        ("d_hidden of several heads too narrow", "_fake_sums", "stat if several else signature", "signature"),
        (
            "the first module's blocks for all",
            "register_module",
            "{type(module).__qualname__}#{next(_NUMBERS)}",
            "",
        ),
        prefix="graph: ",
    ),
    *of_file(
        "engine/passes.py",
        "tests/losses/test_own_loss.py",
        (
            "all rows: packed groups of equal sizes",
            "choose_rows",
            "(grouped and not loss.compact and packed)",
            "False",
        ),
    ),
    *of_file(
        "engine/gradients.py",
        PRECISION,
        ("bias: rounded factor", "Gradients._add_bias", "(factor - column)", "(column - column)"),
    ),
    *of_file(
        "engine/logits_objective.py",
        PRECISION,
        (
            "torch.func under hooks",
            "LogitsObjective._evaluate",
            "with no_hooks():",
            "with torch.set_grad_enabled(torch.is_grad_enabled()):",
        ),
    ),
    *of_file(
        "engine/operators.py",
        ADDED,
        ("grad_scale dropped", "accumulate", "coefficient=grad_scale", "coefficient=1.0"),
        ("d_bias unscaled", "accumulate", "d_bias, solved.deferred", "d_bias, 2 * solved.deferred"),
        prefix="main gradient: ",
    ),
    *of_file(
        "engine/function.py",
        ADDED,
        ("upstream unchecked", "_expect_one", "expect(upstream.item() == 1", "expect(True"),
        ("upstream not asserted", "_expect_one", "upstream == 1, f", "upstream == upstream, f"),
        prefix="main gradient: ",
    ),
    *of_file(
        "engine/gradients.py",
        ADDED,
        ("fp16 flushes", "Gradients.__init__", "is None or calls[0].dtype == torch.float16", "is None"),
        ("left shrunk in fp16", "Gradients.close", "self._main.mul_(deferred)", "pass"),
        ("not shrunk in fp16", "Gradients.open", "self._main.div_(deferred)", "pass"),
        ("not straight", "Gradients.__init__", "else 1.0", "else 2.0"),
        prefix="main gradient: ",
    ),
]
