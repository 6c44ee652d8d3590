"""Several processes: gathered heads, normalizers, slices of sequences."""

from tests.mutants.mutant import of_file

TEST_CONTEXT_PARALLEL = "tests/losses/test_context_parallel.py"
TEST_AGREEMENT = "tests/parallel/test_agreement.py"
TEST_FSDP = "tests/losses/test_fsdp.py"
TEST_SHARD = "tests/losses/test_shard.py"
SEQUENCES = "parallel/sequences.py"
VOCABULARY = "parallel/vocabulary.py"

MUTANTS = [
    *of_file(
        "parallel/groups.py",
        TEST_FSDP,
        ("gradient of a gathered head summed", "gathered", '[Partial("avg")]', '[Partial("sum")]'),
        prefix="parallel: ",
    ),
    *of_file(
        "parallel/normalizers.py",
        TEST_FSDP,
        ("num_items of all ranks", "global_num_items", "total / dist.get_world_size(group)", "total"),
        ("num_items counts ignored targets", "global_num_items", "items != ignore_index", "items == items"),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/rows.py",
        "tests/engine/test_rows.py",
        (
            "pairs of no tokens",
            "_padded",
            ".view(roles, grouping.groups, length)",
            ".view(roles, -1, length)",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        SEQUENCES,
        TEST_CONTEXT_PARALLEL,
        (
            "shares of a term not summed",
            "SlicedSequences.sum_unless_whole",
            'x if unit in ("sequences", "pairs") else self.sum(x)',
            "x",
        ),
        (
            "whole terms summed",
            "SlicedSequences.sum_unless_whole",
            'x if unit in ("sequences", "pairs") else self.sum(x)',
            "self.sum(x)",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/terms.py",
        TEST_CONTEXT_PARALLEL,
        (
            "weights of a metric not summed",
            "means",
            "sequences.sum_unless_whole(sum(others, first), unit)",
            "sum(others, first)",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/batch.py",
        TEST_CONTEXT_PARALLEL,
        (
            "lengths of a slice",
            "Batch.lengths",
            "self._sequences.sum(self._own_lengths)",
            "self._own_lengths",
        ),
        ("positions in a slice", "Batch.positions", "if self._sequences.sliced", "if False"),
        ("twice the same position", "Batch._positions_in_slices", "not twice.any().item()", "True"),
        ("a quantile's share of a slice", "Batch.total", "self._sequences.sum(x)", "x"),
        ("a quantile of a slice", "Batch.everyones", "self._sequences.everyones(x)", "x"),
        prefix="parallel: ",
    ),
    *of_file(
        SEQUENCES,
        TEST_CONTEXT_PARALLEL,
        (
            "gradient of what is spread, of one rank",
            "SlicedSequences.shared",
            "GroupShared.apply(x, self.group) if x.requires_grad else x",
            "x",
        ),
        ("padding among everybody's tokens", "SlicedSequences.everyones", "part[:size]", "part"),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/passes.py",
        TEST_CONTEXT_PARALLEL,
        (
            "tokens of a slice as normalizer",
            "choose_rows",
            "call.sequences.counts(targets.device, rows.tokens, rows.chosen_tokens)",
            "rows.tokens, rows.chosen_tokens",
        ),
        ("ranks meet group by group", "choose_rows", "or loss.cp_group is not None or (", "or ("),
        prefix="parallel: ",
    ),
    *of_file(
        "losses/preference.py",
        TEST_CONTEXT_PARALLEL,
        (
            "packed slices of few tokens",
            "ReferencedLoss.is_per_token",
            "per_token = self.sequences.everywhere(per_token, targets.device)",
            "pass",
        ),
        ("mean logits of a slice", "mean_logits_over_positions", "sums = loss.sequences.sum(sums)", "pass"),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/rows.py",
        TEST_SHARD,
        (
            "a fault told to nobody",
            "_Meeting.told",
            "self.peers.table(numbers[1:])",
            "self.peers.table(numbers[1:] * 0)",
        ),
        (
            "a fault of no rank's name",
            "_Meeting.settle",
            "zip(table[::width], table[i::width])",
            "zip(table[i::width], table[i::width])",
        ),
        (
            "an asserted fault of this rank alone",
            "select_rows",
            "peers.table(numbers[1:]).sum(0)[1:] if",
            "numbers[1:] if",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        "parallel/agreement.py",
        TEST_AGREEMENT,
        ("disagreement passes", "expect_alike", "expect(alike", "expect(True"),
        ("the same parts pass", "expect_different", "expect(fresh", "expect(True"),
        ("no patience", "exchanged", "timedelta(seconds=PATIENCE)", "timedelta(seconds=300)"),
        prefix="parallel: ",
    ),
    *of_file(
        "losses/agreement.py",
        TEST_AGREEMENT,
        ("rows out of order pass", "_expect_in_order", "expect(fits", "expect(True"),
        ("missing rows pass", "_expect_in_order", "expect(rows <= {start}", "expect(True"),
        prefix="parallel: ",
    ),
    *of_file(
        "losses/multi_head.py",
        TEST_SHARD,
        (
            "several heads with the groups' names",
            "MultiHeadLoss.solve_parts",
            "loss = self.resolved(parts[0].weight)",
            "loss = self",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        "losses/policy.py",
        TEST_CONTEXT_PARALLEL,
        ("lengths of a policy's slice", "Layout.lengths", "self._slices.sum(lengths)", "lengths"),
        (
            "packed advantages of few tokens",
            "Layout.is_per_sequence",
            "self._slices.everywhere(flat, x.device)",
            "flat",
        ),
        ("shifted slices", "PolicyLoss.__call__", "self.refuse_shift()", "pass"),
        prefix="parallel: ",
    ),
    *of_file(
        "losses/grpo.py",
        TEST_CONTEXT_PARALLEL,
        (
            "values of tokens where sequences count",
            "GRPOLoss.with_bonus",
            'self.cp_group is not None and self.scope != "token"',
            "False",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/objective.py",
        TEST_CONTEXT_PARALLEL,
        ("slices of tokens not summed", "settled", "and call.sequences.sliced", "and False"),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/token_objective.py",
        TEST_CONTEXT_PARALLEL,
        (
            "ranks meet in every chunk",
            "TokenObjective.evaluate",
            'WHOLE_SEQUENCES if call.loss.scope == "token" else call.sequences',
            "call.sequences",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        "losses/kto.py",
        TEST_CONTEXT_PARALLEL,
        ("kl of a slice", "KTOLoss._mean_log_ratio", "self.sequences.sum(sums[0])", "sums[0]"),
        (
            "reference's kl summed",
            "KTOLoss._mean_log_ratio",
            "sum(sums[1]) if per_token",
            "sum(sums[1]) if True",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/projection.py",
        TEST_SHARD,
        (
            "d_hidden of one rank",
            "Projection.reduce",
            "self.call.vocabulary.start_sum(chunk.d_features)",
            "None",
        ),
        prefix="shard: ",
    ),
    *of_file(
        VOCABULARY,
        TEST_SHARD,
        (
            "row_scale of one rank",
            "ShardedVocabulary.combine_gradient",
            "factor * self.combine",
            "factor + 0 * self.combine",
        ),
        ("share of none", "ShardedVocabulary.combine_gradient", ".clamp(min=-40).exp()", ".exp()"),
        (
            "target's entry of one rank",
            "ShardedVocabulary.combine_gradient",
            "gradient.scatter_(1",
            "gradient.scatter(1",
        ),
        prefix="shard: ",
    ),
    *of_file(
        "engine/token_objective.py",
        TEST_SHARD,
        (
            "reference of one rank",
            "TokenObjective._read_reference",
            "call.vocabulary.combine(stats, chunk.targets)",
            "pass",
        ),
        prefix="shard: ",
    ),
    *of_file(
        VOCABULARY,
        TEST_SHARD,
        ("ranks of the frozen head", "ShardedVocabulary.rows_of", "self.all_reduce(", "("),
        (
            "class weights of another rank",
            "ShardedVocabulary.local",
            "self.start : self.start + self",
            ": self",
        ),
        ("shares of the entropy", "ShardedVocabulary.combine", " - torch.xlogy(shares, shares)", ""),
        (
            "squares of one rank",
            "ShardedVocabulary.combine",
            "(2 * shares.log() + shards",
            "(shares.log() + shards",
        ),
        ("tie goes to the last", "ShardedVocabulary.combine", "earlier, shards", "~earlier, shards"),
        ("confident tokens", "ShardedVocabulary.combine", "torch.expm1(-logps_r)", "-torch.expm1(logps_r)"),
        (
            "softcap of the target",
            "ShardedVocabulary.combine_gradient",
            "(stats.logps + stats.lse)",
            "(0 * stats.lse)",
        ),
        (
            "gradient of a log-sum-exp of one rank",
            "ShardedVocabulary.shared",
            "return GroupShared.apply(x, self.group)",
            "return x",
        ),
        prefix="shard: ",
    ),
    *of_file(
        "engine/call.py",
        TEST_SHARD,
        (
            "chunks of another size",
            "Call.with_shards",
            "max(shards.sizes)",
            "shards.sizes[self.vocabulary.rank]",
        ),
        prefix="shard: ",
    ),
]
