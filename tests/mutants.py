"""`make mutants`: break the library in one small way at a time, and see that the tests notice.

Every mutant is applied to a temporary copy of the repository, in which a few fast tests then run; they must fail. A mutant that
survives is a missing test. Mutants of Triton code run in its interpreter, or on a GPU.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
COPIED = ("logitless", "tests", "pyproject.toml")

KERNELS = "tests/kernels/test_cross_entropy.py"
CROSS_ENTROPY = "tests/losses/test_cross_entropy.py"
LOGPROBS = "tests/losses/test_logprobs.py"
BASE = "tests/losses/test_base.py"
BAD_INPUT = "tests/losses/test_bad_input.py"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below logitless/
    old: str  # occurs exactly once
    new: str
    tests: str  # arguments of pytest

    @property
    def path(self) -> str:
        return f"logitless/{self.file}"

    @property
    def interpreted(self) -> bool:
        return "triton" in self.file and not torch.cuda.is_available()


TWIN, TRITON, SCALE = "kernels/cross_entropy.py", "kernels/cross_entropy_triton.py", "kernels/scale_triton.py"
PREFERENCE = "tests/losses/test_preference.py"
EQUALS = f"{PREFERENCE} -k equals_the_reference"
ENGINE, WALK, CE, PLAN = "losses/engine.py", "losses/walk.py", "losses/cross_entropy.py", "losses/plan.py"
PREF, PAIRED = "losses/preference.py", "losses/paired.py"

MUTANTS = [
    # Twins
    Mutant("twin: d logp at the target has the wrong sign", TWIN, "g_logp[rows, None])", "-g_logp[rows, None])", KERNELS),
    Mutant("twin: d lse has the wrong sign", TWIN, "else grads.lse - g_logp", "else -grads.lse - g_logp", KERNELS),
    Mutant(
        "twin: d entropy has the wrong sign", TWIN, "grads.entropy[rows, None], value=-1)", "grads.entropy[rows, None], value=1)", KERNELS
    ),
    Mutant("twin: d sum_logits has the wrong sign", TWIN, "g += grads.sum_logits", "g -= grads.sum_logits", KERNELS),
    Mutant(
        "twin: class weights left out of d sum_logits",
        TWIN,
        "grads.sum_logits[rows, None] * class_weights",
        "grads.sum_logits[rows, None]",
        KERNELS,
    ),
    Mutant(
        "twin: fused d logp has the wrong sign", TWIN, "_store(gradient[rows], p.neg_(), slope", "_store(gradient[rows], p, slope", KERNELS
    ),
    Mutant("twin: lse_residual dropped", TWIN, ".sub_(stats.lse_residual[rows, None])", "", KERNELS),
    Mutant("twin: slope of the head dropped", TWIN, "        g *= slope\n", "        pass\n", KERNELS),
    Mutant("twin: ignored rows not zeroed", TWIN, "g.masked_fill_(~supervised[:, None], 0.0)", "g", KERNELS),
    Mutant("twin: numbers of ignored rows not zeroed", TWIN, "torch.where(supervised, found[name], 0.0)", "found[name]", KERNELS),
    Mutant("slope of the softcap dropped", "kernels/head.py", "(1 - squashed * squashed) * gain\n\n", "gain + 0 * squashed\n\n", KERNELS),
    # Triton
    Mutant(
        "kernel: d logp at the target has the wrong sign",
        TRITON,
        "tl.where(cols == y, g_logp, 0.0)",
        "tl.where(cols == y, -g_logp, 0.0)",
        KERNELS,
    ),
    Mutant(
        "kernel: d lse has the wrong sign", TRITON, "g_softmax = tl.load(g_lse_ptr + row)", "g_softmax = -tl.load(g_lse_ptr + row)", KERNELS
    ),
    Mutant("kernel: d entropy has the wrong sign", TRITON, "g -= g_entropy *", "g += g_entropy *", KERNELS),
    Mutant("kernel: d sum_logits has the wrong sign", TRITON, "g += g_sum *", "g -= g_sum *", KERNELS),
    Mutant(
        "kernel: row_scale has the wrong sign", TRITON, "row_scale_ptr + row, -1.0 / total", "row_scale_ptr + row, 1.0 / total", KERNELS
    ),
    Mutant("kernel: target's entry has the wrong sign", TRITON, "(-others * slope_y)", "(others * slope_y)", KERNELS),
    Mutant("kernel: tail of the vocabulary unmasked", TRITON, 'z = tl.where(mask, z, -float("inf"))', "z = z", KERNELS),
    Mutant("kernel: target counted among the rest", TRITON, "e = tl.where(cols == y, 0.0, e)", "e = e", KERNELS),
    Mutant(
        "kernel: target left out of its own block alone",
        TRITON,
        "        if has_target:\n            e =",
        "        if start == 0:\n            e =",
        KERNELS,
    ),
    Mutant(
        "kernel: tail of the gradient unmasked",
        TRITON,
        "(e * slope).to(grad_ptr.dtype.element_ty), mask=mask)",
        "(e * slope).to(grad_ptr.dtype.element_ty))",
        KERNELS,
    ),
    Mutant(
        "kernel: ignored rows not zeroed",
        TRITON,
        "tl.zeros([BLOCK], grad_ptr.dtype.element_ty), mask=cols < V",
        "tl.zeros([BLOCK], grad_ptr.dtype.element_ty), mask=cols < 0",
        KERNELS,
    ),
    Mutant("kernel: ignored rows of logits_gradient read", TRITON, "mask = (cols < V) & (y != ignore_index)", "mask = cols < V", KERNELS),
    Mutant("kernel: sums not scaled down when the shift moves", TRITON, "            rest *= shrink\n", "", KERNELS),
    Mutant(
        "kernel: stored row not scaled down when the shift moves",
        TRITON,
        "for begin in range(0, start, BLOCK)",
        "for begin in range(0, 0, BLOCK)",
        KERNELS,
    ),
    Mutant("kernel: shift never moves", TRITON, "if top > shift + DRIFT:", "if start == 0:", KERNELS),
    Mutant(
        "kernel: entropy's sum does not follow the shift",
        TRITON,
        "rest_z = shrink * tl.where(rest > 0.0, rest_z + (shift - top) * rest, 0.0)",
        "rest_z = shrink * rest_z",
        KERNELS,
    ),
    Mutant(
        "kernel: slope of the softcap dropped",
        TRITON,
        "slope = gain * (1.0 - squashed * squashed)",
        "slope = gain + 0.0 * squashed",
        KERNELS,
    ),
    Mutant("kernel: arg-max is the last of equals", TRITON, "beaten = (best >= z_y)", "beaten = (best > z_y)", KERNELS),
    Mutant("kernel: lse_residual dropped", TRITON, "log_p = (z - lse) - residual", "log_p = z - lse", KERNELS),
    Mutant("scale kernel: factor's stride dropped", SCALE, "row * factor_stride", "row * 0", "tests/kernels/test_scale.py"),
    Mutant("scale kernel: columns beyond a block left out", SCALE, "triton.cdiv(columns, BLOCK)", "1", "tests/kernels/test_scale.py"),
    # Products
    Mutant(
        "d_weight overwritten by later chunks",
        "kernels/matmul.py",
        "out=total) if first else total.addmm_(transposed, hidden)",
        "out=total)",
        "tests/kernels/test_matmul.py",
    ),
    Mutant(
        "d_weight in pieces overwritten by later chunks",
        "kernels/matmul.py",
        "beta=0 if first else 1",
        "beta=0",
        "tests/kernels/test_matmul.py",
    ),
    Mutant(
        "last piece of the vocabulary dropped",
        "kernels/matmul.py",
        "for start in range(0, V, step)",
        "for start in range(0, max(V - step, 1), step)",
        "tests/kernels/test_matmul.py",
    ),
    # Engine
    Mutant("zero d_weight", WALK, "accumulate(self.d_weight, gradient, x, first=first)", "self.d_weight.zero_()", CROSS_ENTROPY),
    Mutant("every chunk is the first one", WALK, "                first = False\n", "", CROSS_ENTROPY),
    Mutant(
        "bias gradient dropped",
        WALK,
        "accumulate(self.d_bias, gradient, column[:, None].to(gradient.dtype), first=first)",
        "self.d_bias.zero_()",
        CROSS_ENTROPY,
    ),
    Mutant("row_scale left out of d_hidden", WALK, "scale(d_hidden, row_scale, d_hidden)", "pass", CROSS_ENTROPY),
    Mutant("row_scale left out of d_weight", WALK, "x = scale(x, row_scale, x if ours else torch.empty_like(x))", "pass", CROSS_ENTROPY),
    Mutant(
        "row_scale without the loss's gradient",
        WALK,
        "return gradient, row_scale * grads.logps",
        "return gradient, row_scale",
        CROSS_ENTROPY,
    ),
    Mutant(
        "frozen head: d lse has the wrong sign",
        WALK,
        "scaled * (grads.logps - grads.lse)[:, None]",
        "scaled * (grads.logps + grads.lse)[:, None]",
        LOGPROBS,
    ),
    Mutant(
        "frozen head: row of the target dropped",
        WALK,
        "torch.addcmul(scaled, slope[:, None], weight[known].to(scaled.dtype))",
        "scaled",
        LOGPROBS,
    ),
    Mutant(
        "frozen head: slope of the head dropped",
        WALK,
        "grads.lse * head.derivative_at(stats.logps + stats.lse)",
        "grads.lse * 1.0",
        LOGPROBS,
    ),
    Mutant(
        "d_hidden not zeroed where rows are ignored",
        WALK,
        "make = torch.empty if plan.rows == N else torch.zeros",
        "make = torch.empty",
        BASE,
    ),
    Mutant("gradients of an empty call not zeroed", WALK, "                    total.zero_()\n", "                    pass\n", BASE),
    Mutant(
        "last chunk dropped",
        PLAN,
        "return [Step(a, min(a + C, stop), **what) for a in range(start, stop, C)]",
        "return [Step(a, min(a + C, stop), **what) for a in range(start, max(stop - C, 1), C)]",
        CROSS_ENTROPY,
    ),
    Mutant(
        "power of two dropped from the gradients",
        ENGINE,
        "return Solved(loss_value, stacked, pending,",
        "return Solved(loss_value, stacked, torch.ones_like(pending),",
        CROSS_ENTROPY,
    ),
    Mutant(
        "normalizer applied twice",
        ENGINE,
        "sum(value for value, _ in walk.reports) * pending",
        "sum(value for value, _ in walk.reports) * pending * factors.loss[loss.unit]",
        CROSS_ENTROPY,
    ),
    Mutant("power of two dropped from later gradients", ENGINE, "return pending, walk.d_hidden", "return one, walk.d_hidden", LOGPROBS),
    Mutant("num_items ignored", ENGINE, "if problem.num_items is not None:", "if False:", CROSS_ENTROPY),
    Mutant(
        "d_weight summed in bf16 whatever the chunks",
        ENGINE,
        "problem.stat_dtype if several_chunks else problem.dtype",
        "problem.dtype",
        CROSS_ENTROPY,
    ),
    Mutant("upstream gradient skipped", "losses/base.py", "else pending * upstream[0]", "else pending", CROSS_ENTROPY),
    Mutant(
        "retained gradients scaled in place",
        "losses/base.py",
        "owned = not compiling and not (ctx.solved and torch._C._autograd._get_current_graph_task_keep_graph())",
        "owned = True",
        BASE,
    ),
    Mutant("create_graph unnoticed", "losses/base.py", "if not compiling and torch.is_grad_enabled():", "if False:", BAD_INPUT),
    Mutant("shift off by one", "losses/base.py", "torch.cat((x[..., 1:], torch", "torch.cat((x[..., :-1], torch", CROSS_ENTROPY),
    Mutant(
        "bad targets unchecked without compaction",
        "losses/batch.py",
        "torch._assert_async(bad == 0",
        "torch._assert_async(bad >= 0",
        BAD_INPUT,
    ),
    Mutant("bad targets unchecked", "losses/batch.py", "expect(not wrong, ", "expect(True, ", BAD_INPUT),
    Mutant(
        "boundaries of packed sequences unchecked", "losses/batch.py", "expect(not gaps, ", "expect(True, ", f"{PREFERENCE} -k bad_input"
    ),
    Mutant(
        "ignored tokens not masked out of the terms",
        "losses/batch.py",
        "torch.where(self._ignored, 0.0, x) if per_token else x",
        "x",
        CROSS_ENTROPY,
    ),
    # Cross-entropy
    Mutant("z-loss dropped", CE, "loss = nll + z_loss if self.z_loss else nll", "loss = nll", CROSS_ENTROPY),
    Mutant(
        "z-loss gradient dropped",
        CE,
        "z_loss = self.z_loss * stats.lse.square()",
        "z_loss = self.z_loss * stats.lse.detach().square()",
        CROSS_ENTROPY,
    ),
    Mutant(
        "gradient of the smoothing's lse dropped",
        CE,
        "(total * stats.lse - stats.sum_logits)",
        "(total * stats.lse.detach() - stats.sum_logits)",
        CROSS_ENTROPY,
    ),
    Mutant(
        "gradient of the smoothing's sum dropped",
        CE,
        "stats.lse - stats.sum_logits)",
        "stats.lse - stats.sum_logits.detach())",
        CROSS_ENTROPY,
    ),
    Mutant("dft differentiates the probability", CE, "stats.logps.detach().exp()", "stats.logps.exp()", CROSS_ENTROPY),
    Mutant("token weights ignored", CE, "loss = loss * batch.token_weights", "pass", CROSS_ENTROPY),
    Mutant("class weights ignored by the normalizer", CE, "        if weights is None:\n", "        if True:\n", CROSS_ENTROPY),
    Mutant(
        "class weights of ignored tokens in the normalizer",
        CE,
        "torch.where(supervised, weights.float()[targets.clamp(0, weights.shape[0] - 1)], 0.0)",
        "weights.float()[targets.clamp(0, weights.shape[0] - 1)]",
        CROSS_ENTROPY,
    ),
    # Preference
    *(
        Mutant(f"preference: {name}", PREF, old, new, EQUALS)
        for name, old, new in (
            (
                "sigmoid's sign",
                "smoothed(loss.beta * p.delta, loss.label_smoothing)",
                "smoothed(-loss.beta * p.delta, loss.label_smoothing)",
            ),
            ("label smoothing dropped", "-(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)", "-logsigmoid(x)"),
            ("hinge without beta", "relu(1 - loss.beta * p.delta)", "relu(1 - p.delta)"),
            ("ipo of sums", "(p.mean_delta - 0.5 / loss.beta)", "(p.delta - 0.5 / loss.beta)"),
            ("exo: odds swapped", "logsigmoid(-x) - math.log(epsilon)", "logsigmoid(-x) - math.log1p(-epsilon)"),
            ("nca: rejected dropped", " - 0.5 * logsigmoid(-worse)", ""),
            ("robust unnormalized", " / (1 - 2 * epsilon)", ""),
            ("bco: rejected's sign", "logsigmoid(-loss.beta * p.rejected),", "logsigmoid(loss.beta * p.rejected),"),
            ("sppo: rejected's target", "(p.rejected + 0.5 / loss.beta)", "(p.rejected - 0.5 / loss.beta)"),
            ("aot unsorted", "policy.sort().values - reference.sort().values", "policy - reference"),
            ("aot_unpaired unsorted", "p.chosen.sort().values - p.rejected.sort().values", "p.chosen - p.rejected"),
            (
                "apo_zero: chosen's sign",
                "(-loss.beta * p.chosen).sigmoid() + (loss.beta * p.rejected)",
                "(loss.beta * p.chosen).sigmoid() + (loss.beta * p.rejected)",
            ),
            ("apo_down: difference's sign", "(loss.beta * (p.rejected - p.chosen))", "(loss.beta * (p.chosen - p.rejected))"),
            ("discopop: gate without tau", "(x / loss.discopop_tau).sigmoid()", "x.sigmoid()"),
            ("sigmoid_norm of sums", "-logsigmoid(loss.beta * p.mean_delta)", "-logsigmoid(loss.beta * p.delta)"),
            ("forward_kl's sign", "1 - bounded_exp(-ratios)", "1 - bounded_exp(ratios)"),
            ("js without log 2", "math.log(2) + logsigmoid(ratios)", "logsigmoid(ratios).exp()"),
            ("alpha off by one", "power = loss.f_alpha_divergence_coef - 1", "power = loss.f_alpha_divergence_coef"),
            ("orpo: odds ratio's sign", "Term(-self.beta * ratio", "Term(self.beta * ratio"),
            ("cpo: alpha dropped", "if self.alpha else logps", "if False else logps"),
            ("cpo: NLL dropped", "        if self.cpo_alpha:\n", "        if False:\n"),
            ("cpo: margin dropped", "loss.beta * delta - loss.simpo_gamma", "loss.beta * delta"),
            ("cpo: sums for means", 'if self.loss_type in ("ipo", "simpo"):', "if False:"),
            ("simpo: margin dropped", "(chosen - rejected) - self.gamma", "(chosen - rejected)"),
            ("kto: kl's sign", "(kl - reward).sigmoid(), (reward - kl).sigmoid()", "(-kl - reward).sigmoid(), (reward + kl).sigmoid()"),
            ("kto: apo swapped", "((-reward).sigmoid(), reward.sigmoid())", "(reward.sigmoid(), (-reward).sigmoid())"),
            (
                "kto: weights swapped",
                "self.desirable_weight * desirable, self.undesirable_weight * undesirable",
                "self.undesirable_weight * desirable, self.desirable_weight * undesirable",
            ),
        )
    ),
    Mutant(
        "preference: sides of the metrics swapped",
        PAIRED,
        '"chosen": ours * chosen, "rejected": ours * ~chosen',
        '"chosen": ours * ~chosen, "rejected": ours * chosen',
        EQUALS,
    ),
    Mutant(
        "preference: reference without its tail's weight",
        PAIRED,
        "batch.ref_logps if weights is None else batch.ref_logps * weights",
        "batch.ref_logps",
        EQUALS,
    ),
    Mutant("kto: negative kl kept", PREF, "targets.shape[0]).clamp(min=0)", "targets.shape[0])", f"{PREFERENCE} -k second_set"),
    Mutant("reference walked with the trained head", WALK, '{"head": self.loss.ref_head', '{"head": self.loss.head', EQUALS),
    Mutant("reference without its bias", WALK, '"bias": self.inputs["ref_bias"]', '"bias": None', EQUALS),
    Mutant(
        "metrics: weights of ignored tokens counted",
        "losses/batch.py",
        "Term(mask(term.values), mask(term.over))",
        "Term(mask(term.values), term.over)",
        EQUALS,
    ),
    Mutant(
        "chosen tokens: half a sequence too many",
        "losses/batch.py",
        "cu_seqlens[sequences // 2]\n",
        "cu_seqlens[sequences // 2 + 1]\n",
        EQUALS,
    ),
]


def applied(mutant: Mutant, text: str) -> str:
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"mutant {mutant.name!r}: `old` occurs {count} times in {mutant.path}, expected once; bring it up to date.")
    return text.replace(mutant.old, mutant.new)


def passes(tests: str, interpreted: bool, mutant: Mutant | None = None) -> tuple[bool, str]:
    """Whether the tests pass on a copy of the repository, with a mutant or as it is, and the telling line of what they print."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder, name))
        if mutant is not None:
            path = Path(folder, mutant.path)
            path.write_text(applied(mutant, path.read_text()))
        python_path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("TRITON_INTERPRET", None)
        if interpreted:
            environment["TRITON_INTERPRET"] = "1"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests.split()]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or [done.stderr[-200:]]
    # 1: tests failed. Anything else but 0 (no tests found, a file that does not import) shows nothing about the tests.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"mutant {mutant and mutant.name!r}: pytest ended with {done.returncode}: {lines[-1]}")
    return done.returncode == 0, next((line for line in reversed(lines) if line.startswith("FAILED")), lines[-1])


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Run only the mutants whose name contains one of these.")] = None,
    jobs: Annotated[int, typer.Option(help="How many to run at once.")] = 2,
) -> None:
    """Break the code in small ways, one at a time, and expect a test to notice each."""
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    for mutant in chosen:
        applied(mutant, (ROOT / mutant.path).read_text())
    with ThreadPoolExecutor(jobs) as pool:
        # A test that fails anyway catches nothing.
        clean = dict.fromkeys((mutant.tests, mutant.interpreted) for mutant in chosen)
        for (tests, interpreted), (passed, last) in zip(clean, pool.map(lambda case: passes(*case), clean), strict=True):
            print(f"{'passes' if passed else 'FAILS'} without a mutant: {tests}{', interpreted' * interpreted}", flush=True)
            if not passed:
                raise SystemExit(last)

        def run(mutant: Mutant) -> tuple[str, ...]:
            start = time.perf_counter()
            alive, last = passes(mutant.tests, mutant.interpreted, mutant)
            print(f"{'SURVIVES' if alive else 'caught':8} {mutant.name}: {last[:150]}", flush=True)
            return mutant.name, mutant.path, "SURVIVES" if alive else "caught", f"{time.perf_counter() - start:.0f} s"

        rows = list(pool.map(run, chosen))
    alive = sum(row[2] == "SURVIVES" for row in rows)
    print("\n" + tabulate(rows, headers=("mutant", "file", "", "time")))
    print(f"\n{len(rows) - alive} of {len(rows)} mutants caught.")
    raise SystemExit(1 if alive else 0)


if __name__ == "__main__":
    typer.run(main)
