"""Kernels, engine, cross-entropy."""

from tests.mutants.mutant import Mutant

KERNELS = "tests/kernels/test_cross_entropy.py"
CROSS_ENTROPY = "tests/losses/test_cross_entropy.py"
LOGPROBS = "tests/losses/test_logprobs.py"
BASE = "tests/losses/test_base.py"
BAD_INPUT = "tests/losses/test_bad_input.py"
SPLIT_HEAD = "tests/losses/test_split_head.py"
TWIN, TRITON, SCALE = "kernels/cross_entropy.py", "kernels/cross_entropy_triton.py", "kernels/scale_triton.py"
ENGINE, WALK, CE, PLAN = "losses/engine.py", "losses/walk.py", "losses/cross_entropy.py", "losses/plan.py"


MUTANTS = [
    # Twins
    Mutant(
        "twin: d logp at the target has the wrong sign",
        TWIN,
        "torch.where(here, g_logp[rows], 0.0)",
        "-torch.where(here, g_logp[rows], 0.0)",
        KERNELS,
    ),
    Mutant("twin: d lse has the wrong sign", TWIN, "else grads.lse - g_logp", "else -grads.lse - g_logp", KERNELS),
    Mutant(
        "twin: d entropy has the wrong sign", TWIN, "grads.entropy[rows, None], value=-1)", "grads.entropy[rows, None], value=1)", KERNELS
    ),
    Mutant("twin: d sum_logits has the wrong sign", TWIN, "g += grads.sum_logits", "g -= grads.sum_logits", KERNELS),
    Mutant(
        "twin: class weights left out of d sum_logits",
        TWIN,
        "1.0 if class_weights is None else class_weights.to(g.dtype)",
        "1.0",
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
    Mutant("kernel: target counted among the rest", TRITON, "e = tl.where(cols == y, 0.0, tl.exp(drop))", "e = tl.exp(drop)", KERNELS),
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
        "self._add_bias(gradient, column, first)",
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
        "return Solved(loss_value, stacked, tokens, pending,",
        "return Solved(loss_value, stacked, tokens, torch.ones_like(pending),",
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
    Mutant("upstream gradient skipped", "losses/function.py", "else pending * upstream[0]", "else pending", CROSS_ENTROPY),
    Mutant(
        "retained gradients scaled in place",
        "losses/function.py",
        "owned = not compiling and not (ctx.solved and torch._C._autograd._get_current_graph_task_keep_graph())",
        "owned = True",
        BASE,
    ),
    Mutant("create_graph unnoticed", "losses/function.py", "if not compiling and torch.is_grad_enabled():", "if False:", BAD_INPUT),
    Mutant("gradient of the frozen columns", WALK, "x[:, self.frozen_columns :]", "x[:, : -self.frozen_columns]", SPLIT_HEAD),
    Mutant(
        "hidden states of a split head scaled in place",
        WALK,
        "x[:, self.frozen_columns :].clone(memory_format=torch.contiguous_format), True",
        "x[:, self.frozen_columns :], True",
        SPLIT_HEAD,
    ),
    Mutant(
        "frozen columns joined on the wrong side",
        "losses/function.py",
        "joined[:, :columns], joined[:, columns:] = frozen, weight",
        "joined[:, weight.shape[1] :], joined[:, : weight.shape[1]] = frozen, weight",
        SPLIT_HEAD,
    ),
    Mutant("shift off by one", "losses/arguments.py", "torch.cat((x[..., 1:], torch", "torch.cat((x[..., :-1], torch", CROSS_ENTROPY),
    Mutant(
        "bad targets unchecked without compaction",
        "losses/batch.py",
        "torch._assert_async(bad == 0",
        "torch._assert_async(bad >= 0",
        BAD_INPUT,
    ),
    Mutant("bad targets unchecked", "losses/batch.py", "expect(not wrong, ", "expect(True, ", BAD_INPUT),
    Mutant(
        "boundaries of packed sequences unchecked",
        "losses/batch.py",
        "expect(not gaps, ",
        "expect(True, ",
        "tests/losses/test_preference.py -k bad_input",
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
        "torch.where(supervised, wide[targets.clamp(0, weights.shape[0] - 1)], 0.0)",
        "wide[targets.clamp(0, weights.shape[0] - 1)]",
        CROSS_ENTROPY,
    ),
]
