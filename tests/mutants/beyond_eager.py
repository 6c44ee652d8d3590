"""Compiled graphs, CUDA graphs, mixed precision, hooks, and accumulation into a main gradient."""

from tests.mutants.mutant import Mutant

HEADS, WALK, ENGINE, ACCUMULATION = (f"losses/{name}.py" for name in ("multi_head", "walk", "engine", "accumulation"))
COMPILE = "tests/losses/test_compile.py -k heads"
PRECISION, ADDED = "tests/losses/test_precision.py", "tests/losses/test_accumulation.py"

MUTANTS = [
    Mutant("graph: blocks outside of autocast", HEADS, "self.call.dtype if self.call.autocast else None", "None", COMPILE),
    Mutant("graph: d_hidden of several heads too narrow", HEADS, "stat if index in hidden else x.dtype", "x.dtype", COMPILE),
    Mutant("graph: the first module's blocks for all", HEADS, "{type(self).__qualname__}#{len(_MODULES)}", "", COMPILE),
    Mutant(
        "all rows: packed groups of equal sizes", ENGINE, "(grouped and not loss.compact and problem.cu_seqlens is not None)", "False",
        "tests/losses/test_own_loss.py",
    ),
    Mutant("bias: rounded factor", WALK, "(column - high)", "(high - high)", PRECISION),
    Mutant("torch.func under hooks", WALK, "            with _no_hooks():\n", "            with nullcontext():\n", PRECISION),
    Mutant("main gradient: grad_scale dropped", ACCUMULATION, "coefficient=grad_scale", "coefficient=1.0", ADDED),
    Mutant("main gradient: upstream unchecked", ACCUMULATION, "expect(upstream.item() == 1", "expect(True", ADDED),
    Mutant("main gradient: upstream not asserted", ACCUMULATION, "upstream == 1, f", "upstream == upstream, f", ADDED),
    Mutant("main gradient: fp16 flushes", ENGINE, "straight and problem.dtype == torch.float16", "False", ADDED),
    Mutant("main gradient: left shrunk in fp16", ENGINE, "        d_weight.mul_(pending)\n", "        pass\n", ADDED),
    Mutant("main gradient: not shrunk in fp16", ENGINE, "        d_weight.div_(pending)\n", "        pass\n", ADDED),
    Mutant("main gradient: not straight", ENGINE, "pending = 1.0 if straight and not shrinks else pending", "pass", ADDED),
    Mutant("main gradient: d_bias unscaled", ACCUMULATION, "(d_bias, solved.pending", "(d_bias, 2 * solved.pending", ADDED),
]  # fmt: skip
