"""Kernels, engine, cross-entropy."""

from tests.mutants.mutant import of_file

KERNELS = "tests/kernels/test_cross_entropy.py"
CROSS_ENTROPY = "tests/losses/test_cross_entropy.py"
LOGPROBS = "tests/losses/test_logprobs.py"
BASE = "tests/losses/test_base.py"
BAD_INPUT = "tests/losses/test_bad_input.py"
SPLIT_HEAD = "tests/losses/test_split_head.py"
TWIN = "kernels/cross_entropy.py"
TRITON = "kernels/cross_entropy_triton.py"
SCALE = "kernels/scale_triton.py"
ENGINE = "losses/engine.py"
WALK = "losses/walk.py"
CE = "losses/cross_entropy.py"
PLAN = "losses/plan.py"

MUTANTS = [
    *of_file(
        TWIN,
        KERNELS,
        (
            "d logp at the target has the wrong sign",
            "_logits_gradient_twin",
            "torch.where(here, g_logp[rows], 0.0)",
            "-torch.where(here, g_logp[rows], 0.0)",
        ),
        ("d lse has the wrong sign", "_logits_gradient_twin", "grads.lse - g_logp", "-grads.lse - g_logp"),
        ("d entropy has the wrong sign", "_logits_gradient_twin", "value=-1", "value=1"),
        ("d sum_logits has the wrong sign", "_logits_gradient_twin", "g += grads", "g -= grads"),
        (
            "class weights left out of d sum_logits",
            "_logits_gradient_twin",
            "1.0 if class_weights is None else class_weights.to(g.dtype)",
            "1.0",
        ),
        ("fused d logp has the wrong sign", "_token_statistics_twin", "[rows], p.neg_()", "[rows], p"),
        ("lse_residual dropped", "_logits_gradient_twin", ".sub_(stats.lse_residual[rows, None])", ""),
        ("slope of the head dropped", "_store", "g *= slope", "pass"),
        ("ignored rows not zeroed", "_store", "g.masked_fill_(~supervised[:, None], 0.0)", "g"),
        (
            "numbers of ignored rows not zeroed",
            "_token_statistics_twin",
            "torch.where(supervised, found[name], 0.0)",
            "found[name]",
        ),
        prefix="twin: ",
    ),
    *of_file(
        "kernels/head.py",
        KERNELS,
        (
            "slope of the softcap dropped",
            "Head.logits",
            "(1 - squashed * squashed) * gain",
            "gain + 0 * squashed",
        ),
    ),
    *of_file(
        TRITON,
        KERNELS,
        ("d logp at the target has the wrong sign", "logits_gradient_kernel", "g_logp, 0.0", "-g_logp, 0.0"),
        ("d lse has the wrong sign", "logits_gradient_kernel", "g_softmax = tl.load", "g_softmax = -tl.load"),
        ("d entropy has the wrong sign", "logits_gradient_kernel", "g -= g_entropy *", "g += g_entropy *"),
        ("d sum_logits has the wrong sign", "logits_gradient_kernel", "g += g_sum *", "g -= g_sum *"),
        ("row_scale has the wrong sign", "row_kernel", "row_scale_ptr + row, -1", "row_scale_ptr + row, 1"),
        ("target's entry has the wrong sign", "row_kernel", "(-others * slope_y)", "(others * slope_y)"),
        ("tail of the vocabulary unmasked", "row_kernel", 'z = tl.where(mask, z, -float("inf"))', "z = z"),
        ("target counted among the rest", "row_kernel", "where(cols == y, 0.0, tl.exp(drop))", "exp(drop)"),
        ("tail of the gradient unmasked", "row_kernel", "dtype.element_ty), mask=mask", "dtype.element_ty)"),
        ("ignored rows not zeroed", "row_kernel", "mask=cols < V", "mask=cols < 0"),
        (
            "ignored rows of logits_gradient read",
            "logits_gradient_kernel",
            "mask = (cols < V) & (y != ignore_index)",
            "mask = cols < V",
        ),
        ("sums not scaled down when the shift moves", "row_kernel", "            rest *= shrink\n", ""),
        ("stored row not scaled down when the shift moves", "row_kernel", "0, start, BLOCK", "0, 0, BLOCK"),
        ("shift never moves", "row_kernel", "if top > shift + DRIFT:", "if start == 0:"),
        (
            "entropy's sum does not follow the shift",
            "row_kernel",
            "rest_z = shrink * tl.where(rest > 0.0, rest_z + (shift - top) * rest, 0.0)",
            "rest_z = shrink * rest_z",
        ),
        ("slope of the softcap dropped", "head_logits", "* (1.0 - squashed * squashed)", "+ 0.0 * squashed"),
        ("arg-max is the last of equals", "row_kernel", "beaten = (best >= z_y)", "beaten = (best > z_y)"),
        ("lse_residual dropped", "logits_gradient_kernel", "log_p = (z - lse) - residual", "log_p = z - lse"),
        prefix="kernel: ",
    ),
    *of_file(
        SCALE,
        "tests/kernels/test_scale.py",
        ("factor's stride dropped", "scale_kernel", "row * factor_stride", "row * 0"),
        ("columns beyond a block left out", "scale", "triton.cdiv(columns, BLOCK)", "1"),
        prefix="scale kernel: ",
    ),
    *of_file(
        "kernels/matmul.py",
        "tests/kernels/test_matmul.py",
        (
            "d_weight overwritten by later chunks",
            "accumulate",
            "out=total) if first else total.addmm_(transposed, hidden)",
            "out=total)",
        ),
        ("d_weight in pieces overwritten by later chunks", "accumulate", "beta=0 if first else 1", "beta=0"),
        ("last piece of the vocabulary dropped", "_vocabulary_pieces", "V, step", "max(V - step, 1), step"),
    ),
    *of_file(
        WALK,
        CROSS_ENTROPY,
        (
            "zero d_weight",
            "Walk._add",
            "accumulate(self.d_weight, gradient, x, first=first)",
            "self.d_weight.zero_()",
        ),
        ("every chunk is the first one", "Walk.run", "                first = False\n", ""),
        ("bias gradient dropped", "Walk._add", "_add_bias(gradient, column, first)", "d_bias.zero_()"),
        ("row_scale left out of d_hidden", "Walk._add", "scale(d_hidden, row_scale, d_hidden)", "pass"),
        (
            "row_scale left out of d_weight",
            "Walk._add",
            "x = scale(x, row_scale, x if ours else torch.empty_like(x))",
            "pass",
        ),
        ("row_scale without the loss's gradient", "TokenWalk._write", "row_scale * grads.logps", "row_scale"),
    ),
    *of_file(
        WALK,
        LOGPROBS,
        ("d lse has the wrong sign", "scale_rows", "(grads.logps - grads.lse)", "(grads.logps + grads.lse)"),
        (
            "row of the target dropped",
            "scale_rows",
            "torch.addcmul(scaled, slope[:, None], weight[known].to(scaled.dtype))",
            "scaled",
        ),
        ("slope of the head dropped", "scale_rows", "head.derivative_at(stats.logps + stats.lse)", "1.0"),
        prefix="frozen head: ",
    ),
    *of_file(
        WALK,
        BASE,
        (
            "d_hidden not zeroed where rows are ignored",
            "Walk.run",
            "make = torch.empty if plan.rows == N else torch.zeros",
            "make = torch.empty",
        ),
        ("gradients of an empty call not zeroed", "Walk.run", "total.zero_()", "pass"),
    ),
    *of_file(
        PLAN,
        CROSS_ENTROPY,
        ("last chunk dropped", "make_plan.chunks", "(start, stop, C)", "(start, max(stop - C, 1), C)"),
    ),
    *of_file(
        ENGINE,
        CROSS_ENTROPY,
        (
            "power of two dropped from the gradients",
            "solve",
            "return Solved(loss_value, stacked, tokens, pending,",
            "return Solved(loss_value, stacked, tokens, torch.ones_like(pending),",
        ),
        ("normalizer applied twice", "solve", "* pending", "* pending * factors.loss[loss.unit]"),
        ("num_items ignored", "scales", "if problem.num_items is not None:", "if False:"),
        (
            "d_weight summed in bf16 whatever the chunks",
            "accumulation_dtype",
            "problem.stat_dtype if several_chunks else problem.dtype",
            "problem.dtype",
        ),
    ),
    *of_file(
        ENGINE,
        LOGPROBS,
        ("power of two dropped from later gradients", "token_gradients", "return pending", "return one"),
    ),
    *of_file(
        "losses/function.py",
        CROSS_ENTROPY,
        ("upstream gradient skipped", "FusedLinearBase.backward", "pending * upstream[0]", "pending"),
    ),
    *of_file(
        "losses/function.py",
        BASE,
        (
            "retained gradients scaled in place",
            "FusedLinearBase.backward",
            "owned = not compiling and not (ctx.solved and torch._C._autograd._get_current_graph_task_keep_graph())",
            "owned = True",
        ),
    ),
    *of_file(
        "losses/function.py",
        BAD_INPUT,
        (
            "create_graph unnoticed",
            "FusedLinearBase.backward",
            "if not compiling and torch.is_grad_enabled():",
            "if False:",
        ),
    ),
    *of_file(
        WALK,
        SPLIT_HEAD,
        ("gradient of the frozen columns", "Walk._add", "self.frozen_columns :", ": -self.frozen_columns"),
        (
            "hidden states of a split head scaled in place",
            "Walk._add",
            "x[:, self.frozen_columns :].clone(memory_format=torch.contiguous_format), True",
            "x[:, self.frozen_columns :], True",
        ),
    ),
    *of_file(
        "losses/function.py",
        SPLIT_HEAD,
        (
            "frozen columns joined on the wrong side",
            "_problem",
            "joined[:, :columns], joined[:, columns:] = frozen, weight",
            "joined[:, weight.shape[1] :], joined[:, : weight.shape[1]] = frozen, weight",
        ),
    ),
    *of_file(
        "losses/arguments.py",
        CROSS_ENTROPY,
        ("shift off by one", "shifted", "torch.cat((x[..., 1:], torch", "torch.cat((x[..., :-1], torch"),
    ),
    *of_file(
        "losses/batch.py",
        BAD_INPUT,
        ("bad targets unchecked without compaction", "select_rows", "bad == 0", "bad >= 0"),
        ("bad targets unchecked", "select_rows", "expect(not wrong,", "expect(True,"),
    ),
    *of_file(
        "losses/batch.py",
        "tests/losses/test_preference.py -k bad_input",
        ("boundaries of packed sequences unchecked", "select_rows", "expect(not gaps,", "expect(True,"),
    ),
    *of_file(
        "losses/batch.py",
        CROSS_ENTROPY,
        (
            "ignored tokens not masked out of the terms",
            "Batch.masked.mask",
            "torch.where(self._ignored, 0.0, x) if per_token else x",
            "x",
        ),
    ),
    *of_file(
        CE,
        CROSS_ENTROPY,
        ("z-loss dropped", "CrossEntropyLoss.terms", "nll + z_loss if self.z_loss else nll", "nll"),
        ("z-loss gradient dropped", "CrossEntropyLoss.terms", "lse.square()", "lse.detach().square()"),
        ("gradient of the smoothing's lse dropped", "CrossEntropyLoss.terms", ".lse -", ".lse.detach() -"),
        (
            "gradient of the smoothing's sum dropped",
            "CrossEntropyLoss.terms",
            "stats.lse - stats.sum_logits)",
            "stats.lse - stats.sum_logits.detach())",
        ),
        ("dft differentiates the probability", "CrossEntropyLoss.terms", "logps.detach().exp", "logps.exp"),
        ("token weights ignored", "CrossEntropyLoss.terms", "loss = loss * batch.token_weights", "pass"),
        (
            "class weights ignored by the normalizer",
            "CrossEntropyLoss.normalizers",
            "if weights is None:",
            "if True:",
        ),
        (
            "class weights of ignored tokens in the normalizer",
            "CrossEntropyLoss.normalizers",
            "torch.where(supervised, wide[targets.clamp(0, weights.shape[0] - 1)], 0.0)",
            "wide[targets.clamp(0, weights.shape[0] - 1)]",
        ),
    ),
]
