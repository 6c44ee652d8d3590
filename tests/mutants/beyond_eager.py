"""Compiled graphs, CUDA graphs, mixed precision, hooks, and accumulation into a main gradient."""

from tests.mutants.mutant import of_file

TEST_ACCUMULATION = "tests/losses/test_accumulation.py"
TEST_COMPILE_HEADS = "tests/losses/test_compile.py -k heads"
TEST_PRECISION = "tests/losses/test_precision.py"
GRADIENTS = "engine/gradients.py"
OPERATORS = "engine/operators.py"
PASSES = "engine/passes.py"

MUTANTS = [
    *of_file(
        "engine/packing.py",
        TEST_COMPILE_HEADS,
        ("blocks outside of autocast", "_layers", "signature.dtype if signature.autocast else None", "None"),
        prefix="graph: ",
    ),
    *of_file(
        OPERATORS,
        TEST_COMPILE_HEADS,
        (
            "d_hidden of several heads too narrow",
            "_fake_sums",
            "stat if several else signature.dtype",
            "signature.dtype",
        ),
        ("the first module's blocks for all", "register_module", "#{next(_NUMBERS)}", ""),
        prefix="graph: ",
    ),
    *of_file(
        "engine/choose.py",
        "tests/losses/test_own_loss.py",
        ("packed groups of equal sizes", "choose_rows", "(grouped and not loss.compact and packed)", "False"),
        prefix="all rows: ",
    ),
    *of_file(
        GRADIENTS,
        TEST_PRECISION,
        ("rounded factor", "Gradients._add_bias", "(factor - column)", "(factor - factor)"),
        prefix="bias: ",
    ),
    *of_file(
        "engine/logits_objective.py",
        TEST_PRECISION,
        ("torch.func under hooks", "LogitsObjective._evaluate", "with no_hooks():", "if True:"),
    ),
    *of_file(
        OPERATORS,
        TEST_ACCUMULATION,
        ("grad_scale dropped", "accumulate", "coefficient=grad_scale", "coefficient=1.0"),
        prefix="main gradient: ",
    ),
    *of_file(
        "engine/function.py",
        TEST_ACCUMULATION,
        ("upstream unchecked", "_expect_one", "expect(upstream.item() == 1", "expect(True"),
        (
            "upstream of what was added unchecked",
            "_backward_added",
            "_expect_one(upstream[0], on_host=ctx.run.signature.loss.compact)",
            "pass",
        ),
        (
            "added in both passes",
            "_backward_added",
            "return _by_slot(",
            "ctx.run.main.add_(1.0)\n    return _by_slot(",
        ),
        ("upstream not asserted", "_expect_one", "upstream == 1, f", "upstream == upstream, f"),
        prefix="main gradient: ",
    ),
    *of_file(
        OPERATORS,
        TEST_ACCUMULATION,
        ("d_bias unscaled", "accumulate", "finish(d_bias, solved", "finish(d_bias, 2 * solved"),
        prefix="main gradient: ",
    ),
    *of_file(
        "engine/main_gradient.py",
        TEST_ACCUMULATION,
        ("added under a checkpoint", "check_now", "expect(not hooks", "expect(True"),
        ("added without autograd", "check_now", "expect(torch.is_grad_enabled()", "expect(True"),
        prefix="main gradient: ",
    ),
    *of_file(
        GRADIENTS,
        TEST_ACCUMULATION,
        (
            "fp16 flushes",
            "Gradients.__init__",
            "None if calls[0].dtype == torch.float16 else 1.0",
            "1.0",
        ),
        ("left shrunk in fp16", "Gradients.close", "self._main.mul_(deferred)", "pass"),
        ("not shrunk in fp16", "Gradients.open", "self._main.div_(deferred)", "pass"),
        prefix="main gradient: ",
    ),
    *of_file(
        PASSES,
        TEST_ACCUMULATION,
        ("not straight", "solve", "= gradients.deferred, [], []", "= None, [], []"),
        prefix="main gradient: ",
    ),
    *of_file(
        "losses/declarations.py",
        "tests/losses/test_declarations.py",
        ("identity without values", "identity_of", "({values})", ""),
        prefix="graph: ",
    ),
    *of_file(
        "engine/compiled.py",
        "tests/engine/test_compiled.py",
        (
            "any error taken for the compiler's",
            "_is_of_the_compiler",
            "return isinstance(error, kinds)",
            "return True",
        ),
    ),
]
