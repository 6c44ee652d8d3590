"""Kernels, engine, cross-entropy."""

from tests.mutants.mutant import of_file

TEST_BAD_INPUT = "tests/losses/test_bad_input.py"
TEST_BASE = "tests/losses/test_base.py"
TEST_CROSS_ENTROPY = "tests/losses/test_cross_entropy.py"
TEST_ENGINE_ROWS = "tests/engine/test_rows.py"
TEST_ENGINE_SHIFTED = "tests/engine/test_shifted.py"
TEST_KERNELS_CROSS_ENTROPY = "tests/kernels/test_cross_entropy.py"
TEST_LOGPROBS = "tests/losses/test_logprobs.py"
CROSS_ENTROPY_TRITON = "kernels/cross_entropy_triton.py"
FUNCTION = "engine/function.py"
GRADIENTS = "engine/gradients.py"
OPERANDS = "engine/operands.py"
PASSES = "engine/passes.py"
PROJECTION = "engine/projection.py"
REDUCTION = "engine/reduction.py"
ROWS = "engine/rows.py"
SCALED = "TokenObjective.scaled"

MUTANTS = [
    *of_file(
        "kernels/cross_entropy.py",
        TEST_KERNELS_CROSS_ENTROPY,
        (
            "d logp at the target has the wrong sign",
            "_logits_gradient_twin",
            "- g_logp * torch.expm1",
            "+ g_logp * torch.expm1",
        ),
        ("d lse has the wrong sign", "_logits_gradient_twin", "g_softmax = g_lse", "g_softmax = -g_lse"),
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
        TEST_KERNELS_CROSS_ENTROPY,
        (
            "slope of the softcap dropped",
            "Head.logits",
            "(1 - squashed * squashed) * gain",
            "gain + 0 * squashed",
        ),
    ),
    *of_file(
        CROSS_ENTROPY_TRITON,
        TEST_KERNELS_CROSS_ENTROPY,
        ("d logp at the target has the wrong sign", "logits_gradient_kernel", "p_y + g_logp", "p_y - g_logp"),
        (
            "d lse has the wrong sign",
            "logits_gradient_kernel",
            "g = (g_lse - g_logp)",
            "g = (-g_lse - g_logp)",
        ),
        ("d entropy has the wrong sign", "logits_gradient_kernel", "g -= g_entropy *", "g += g_entropy *"),
        ("d sum_logits has the wrong sign", "logits_gradient_kernel", "g += g_sum *", "g -= g_sum *"),
        ("row_scale has the wrong sign", "row_kernel", "row_scale_ptr + row, -1", "row_scale_ptr + row, 1"),
        ("target's entry has the wrong sign", "row_kernel", "(-others * slope_y)", "(others * slope_y)"),
        ("tail of the vocabulary unmasked", "row_kernel", 'z = tl.where(mask, z, -float("inf"))', "z = z"),
        ("target counted among the rest", "row_kernel", "where(cols == place, 0.0, exp(drop))", "exp(drop)"),
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
        ("lse_residual dropped", "logits_gradient_kernel", "1.0 - complement(-residual)", "1.0"),
        prefix="kernel: ",
    ),
    *of_file(
        "kernels/scale_triton.py",
        "tests/kernels/test_scale.py",
        ("factor's stride dropped", "scale_kernel", "row * factor_stride", "row * 0"),
        ("columns beyond a block left out", "scale", "triton.cdiv(columns, BLOCK)", "1"),
        ("a program's first block alone", "scale_all_kernel", "tl.cdiv(numel, BLOCK)", "tl.num_programs(0)"),
        ("small factors left out", "scale_all_kernel", "factor == 1.0", "factor <= 1.0"),
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
        GRADIENTS,
        TEST_CROSS_ENTROPY,
        (
            "zero d_weight",
            "Gradients.add",
            "head.accumulate(self._weight.total, chunk.gradient, features, first=not self._weight.written)",
            "self._weight.total.zero_()",
        ),
        ("every chunk is the first one", "Gradients.add", "first=not self._weight.written", "first=True"),
        ("bias gradient dropped", "Gradients.add", "self._add_bias(chunk, head)", "pass"),
    ),
    *of_file(
        PROJECTION,
        TEST_CROSS_ENTROPY,
        (
            "row_scale left out of d_hidden",
            "Projection.reduce",
            "scale(chunk.d_features, chunk.factor, chunk.d_features)",
            "pass",
        ),
        (
            "row_scale left out of d_weight",
            "Projection.trained_features",
            "return scale(x, chunk.factor, x if own else torch.empty_like(x))",
            "return x",
        ),
    ),
    *of_file(
        "engine/token_objective.py",
        TEST_CROSS_ENTROPY,
        (
            "row_scale without the loss's gradient",
            "TokenObjective.factor",
            "chunk.factor * self.grads.logps[chunk.step.start : chunk.step.stop]",
            "chunk.factor",
        ),
    ),
    *of_file(
        "engine/token_objective.py",
        TEST_LOGPROBS,
        ("d lse has the wrong sign", SCALED, "(g_logp - g_lse)", "(g_logp + g_lse)"),
        ("row of the target dropped", SCALED, "own[:, None], head_rows)", "own[:, None], 0 * head_rows)"),
        (
            "slope of the head dropped",
            SCALED,
            "call.loss.head.derivative_at(stats.logps + stats.lse)",
            "1.0",
        ),
        ("gradient of ignored tokens", SCALED, "torch.where(supervised, own *", "torch.where(True, own *"),
        ("target's own gradient dropped", SCALED, "- g_logp * torch.expm1(stats.logps)", ""),
        prefix="frozen head: ",
    ),
    *of_file(
        PROJECTION,
        TEST_BASE,
        (
            "d_hidden not zeroed where rows are ignored",
            "Projection.__init__",
            "torch.empty if rows.count == call.hidden.shape[0] else torch.zeros",
            "torch.empty",
        ),
    ),
    *of_file(
        GRADIENTS,
        TEST_BASE,
        ("gradients of an empty call not zeroed", "Gradients.close", "total.total.zero_()", "pass"),
    ),
    *of_file(
        "engine/plan.py",
        TEST_CROSS_ENTROPY,
        ("last chunk dropped", "_chunks", "(start, stop, C)", "(start, max(stop - C, 1), C)"),
    ),
    *of_file(
        PASSES,
        TEST_CROSS_ENTROPY,
        (
            "power of two dropped from the gradients",
            "solve",
            "table, tokens, deferred",
            "table, tokens, torch.ones_like(deferred)",
        ),
        (
            "normalizer applied twice",
            "solve",
            "total * deferred",
            "total * deferred * factors.loss[call.loss.unit]",
        ),
    ),
    *of_file(
        REDUCTION,
        TEST_CROSS_ENTROPY,
        ("num_items ignored", "unit_factors", "if call.num_items is not None:", "if False:"),
    ),
    *of_file(
        GRADIENTS,
        TEST_CROSS_ENTROPY,
        (
            "d_weight summed in bf16 whatever the chunks",
            "Gradients.open",
            "call.stat_dtype if wide else call.dtype",
            "call.dtype",
        ),
    ),
    *of_file(
        PASSES,
        TEST_LOGPROBS,
        (
            "power of two dropped from later gradients",
            "token_gradients",
            "return deferred, gradients",
            "return one, gradients",
        ),
    ),
    *of_file(
        FUNCTION,
        TEST_CROSS_ENTROPY,
        ("upstream gradient skipped", "_backward_solved", "deferred * upstream[0]", "deferred"),
    ),
    *of_file(
        FUNCTION,
        TEST_BASE,
        (
            "retained gradients scaled in place",
            "_backward_solved",
            "owned = not compiling and not torch._C._autograd._get_current_graph_task_keep_graph()",
            "owned = True",
        ),
    ),
    *of_file(
        FUNCTION,
        TEST_BAD_INPUT,
        (
            "create_graph unnoticed",
            "FusedLinearBase.backward",
            "if not compiling and torch.is_grad_enabled():",
            "if False:",
        ),
    ),
    *of_file(
        PROJECTION,
        "tests/losses/test_split_head.py",
        (
            "gradient of the frozen columns",
            "Projection.trained_features",
            "self.frozen_columns :",
            ": -self.frozen_columns",
        ),
        (
            "hidden states of a split head scaled in place",
            "Projection.trained_features",
            "x[:, self.frozen_columns :].clone(memory_format=torch.contiguous_format), True",
            "x[:, self.frozen_columns :], True",
        ),
        (
            "frozen columns joined on the wrong side",
            "_joined",
            "joined[:, : frozen.shape[1]], joined[:, frozen.shape[1] :]",
            "joined[:, weight.shape[1] :], joined[:, : weight.shape[1]]",
        ),
    ),
    *of_file(
        OPERANDS,
        TEST_ENGINE_SHIFTED,
        ("shift off by one", "shifted", "x.roll(-1, dim)", "x"),
    ),
    *of_file(
        "engine/spec.py",
        TEST_BAD_INPUT,
        (
            "bad targets unchecked without compaction",
            "Fault.assert_async",
            "self.count == 0",
            "self.count >= 0",
        ),
        ("bad targets unchecked", "Fault.raise_", "expect(False,", "expect(True,"),
    ),
    *of_file(
        ROWS,
        TEST_ENGINE_ROWS,
        (
            "boundaries of packed sequences unchecked",
            "select_rows",
            "faults = (*faults, _boundary_fault(cu_seqlens, N))",
            "pass",
        ),
    ),
    *of_file(
        "engine/batch.py",
        TEST_CROSS_ENTROPY,
        (
            "ignored tokens not masked out of the terms",
            "Batch.masked.mask",
            "torch.where(self.ignored, 0.0, x) if per_token else x",
            "x",
        ),
    ),
    *of_file(
        "losses/cross_entropy.py",
        TEST_CROSS_ENTROPY,
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
            "torch.where(supervised, of_targets(weights, targets), 0.0)",
            "of_targets(weights, targets)",
        ),
    ),
    *of_file(
        PASSES,
        "tests/losses/test_cuda_graphs.py -k fp16",
        (
            "a factor on the device is read",
            "solve",
            "isinstance(deferred, float) and deferred == 1.0",
            "deferred == 1.0 and isinstance(deferred, float)",
        ),
    ),
    *of_file(
        "kernels/targets.py",
        "tests/losses/test_bad_input.py",
        ("ids below 0 taken for ids", "marked", "(targets < 0) | ", ""),
    ),
    *of_file(
        "engine/choose.py",
        "tests/losses/test_bad_input.py -k num_items_of_0",
        (
            "num_items of 0 unnoticed",
            "choose_rows",
            'if call.num_items is not None and loss.reduction == "mean":',
            "if False:",
        ),
        ("num_items of 0 refused without supervised tokens", "choose_rows", " & marks[0].any()", ""),
    ),
    *of_file(
        ROWS,
        TEST_ENGINE_ROWS,
        ("counts of another sequence", "_Counts.added_up", "start : start + self", "0 : self"),
        ("sequences of a fault", "_Counts.added_up", "tables[0] if tables", "tables[-1] if tables"),
        ("numbers behind the sequences dropped", "_Counts.added_up", "*numbers[end:], ", ""),
        (
            "faults raised with another's text",
            "_supervised_rows",
            "zip(faults, numbers)",
            "zip(faults[::-1], numbers)",
        ),
        (
            "sizes of groups read from the faults",
            "_supervised_rows",
            "numbers[len(faults) :]",
            "numbers[max(0, len(faults) - 1) :]",
        ),
        ("chosen tokens: of padded sequences, one too many", "_padded", "[: N // 2]", "[: N // 2 + 1]"),
    ),
    *of_file(
        "engine/segments.py",
        "tests/engine/test_segments.py",
        ("sequences summed in fp32", "sum_runs", ".cpu().double()", ".cpu()"),
    ),
    *of_file(
        "engine/call.py",
        "tests/engine/test_call.py",
        (
            "inputs of predictions moved by shift",
            "prepare",
            "loss.roles[name] is Role.TOKEN",
            "loss.roles[name] in (Role.TOKEN, Role.POSITION)",
        ),
    ),
    *of_file(
        OPERANDS,
        TEST_ENGINE_SHIFTED,
        ("shift across packed sequences", "shifted", "if cu_seqlens is not None:", "if False:"),
    ),
    *of_file(
        PASSES,
        TEST_CROSS_ENTROPY,
        (
            "deferred factor left out of the loss",
            "solve",
            "total * deferred",
            "total",
        ),
    ),
    *of_file(
        REDUCTION,
        "tests/engine/test_reduction.py",
        ("deferred factor applied in the chunk too", "unit_factors", "factor / deferred", "factor"),
    ),
    *of_file(
        "engine/terms.py",
        "tests/engine/test_terms.py",
        (
            "values unchecked",
            "check_terms",
            "_check_values(whose, term, lengths, in_metric=key in metrics)",
            "pass",
        ),
        ("metrics unchecked", "check_terms", "expect(set(metrics) == set(loss.metric_names)", "expect(True"),
        ("one row is proof enough", "evaluate_terms", "if batch.shows_shapes:", "if True:"),
        ("weights of another metric", "metric_sums", "sums.view(2, -1)", "sums.view(-1, 2).t()"),
        (
            "metrics of several shapes in one sum",
            "metric_sums",
            "all(x.shape == first.shape for x in values)",
            "True",
        ),
        ("metric not divided", "means", "total * factors[unit]", "total"),
        ("metric divided by 0", "means", "torch.where(weights == 0, 1.0, weights)", "weights"),
        ("first slice of a metric alone", "means", "sum(others, first)", "first"),
        prefix="terms: ",
    ),
    *of_file(
        CROSS_ENTROPY_TRITON,
        "tests/kernels/test_strides.py",
        ("targets with gaps read as dense", "row_pass", "dense(targets)", "targets"),
        ("numbers with gaps read as dense", "logits_gradient", "dense(stats.lse)", "stats.lse"),
        ("gaps of written numbers unnoticed", "row_pass", "check_written(**dict(out.items()))", "pass"),
        prefix="kernel: ",
    ),
]
