"""Several processes: gathered heads, normalizers, slices of sequences."""

from tests.mutants.mutant import of_file

FSDP = "tests/losses/test_fsdp.py"
SLICES = "tests/losses/test_context_parallel.py"
PREFERENCE = "losses/preference.py"
KTO = "losses/kto.py"
SHARDS = "tests/losses/test_shard.py"

MUTANTS = [
    *of_file(
        "parallel/groups.py",
        FSDP,
        ("parallel: gradient of a gathered head summed", "gathered", '[Partial("avg")]', '[Partial("sum")]'),
    ),
    *of_file(
        "parallel/normalizers.py",
        FSDP,
        ("num_items of all ranks", "global_num_items", "total / dist.get_world_size(group)", "total"),
        ("num_items counts ignored targets", "global_num_items", "items != ignore_index", "items == items"),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/rows.py",
        FSDP,
        ("parallel: pairs of no tokens", "_padded", "roles, grouping.groups, length", "roles, -1, length"),
    ),
    *of_file(
        "parallel/sequences.py",
        SLICES,
        ("shares of a term not summed", "SlicedSequences.sum_unless_whole", "else self.sum(x)", "else x"),
        (
            "whole terms summed",
            "SlicedSequences.sum_unless_whole",
            'x if unit in ("sequences", "pairs") else self.sum(x)',
            "self.sum(x)",
        ),
        ("positions count this rank's too", "SlicedSequences.before", "group.rank()", "group.rank() + 1"),
        (
            "gradient of what is spread, of one rank",
            "SlicedSequences.shared",
            "GroupShared.apply(x, self.group) if x.requires_grad else x",
            "x",
        ),
        (
            "tokens of a slice as normalizer",
            "SlicedSequences.counts",
            "return self.sum(torch.stack([torch.as_tensor(x, device=device) for x in tokens])).unbind()",
            "return tokens",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/terms.py",
        SLICES,
        (
            "parallel: weights of a metric not summed",
            "metric_shares",
            "sequences.sum(weight.sum())",
            "weight.sum()",
        ),
    ),
    *of_file(
        "engine/batch.py",
        SLICES,
        ("lengths of a slice", "Batch.lengths", "_sequences.sum(self._own_lengths)", "_own_lengths"),
        ("positions in a slice", "Batch.positions", "_own_positions + self", "_own_positions + 0 * self"),
        prefix="parallel: ",
    ),
    *of_file(
        "engine/passes.py",
        SLICES,
        ("parallel: ranks meet group by group", "choose_rows", "or loss.cp_group is not None or (", "or ("),
    ),
    *of_file(
        PREFERENCE,
        SLICES,
        (
            "packed slices of few tokens",
            "ReferencedLoss.is_per_token",
            "per_token = not self.sequences.sum(others).item()",
            "pass",
        ),
        ("mean logits of a slice", "mean_logits_over_positions", "sums = loss.sequences.sum(sums)", "pass"),
        prefix="parallel: ",
    ),
    *of_file(
        KTO,
        SLICES,
        ("kl of a slice", "KTOLoss._mean_log_ratio", "self.sequences.sum(sums[0])", "sums[0]"),
        ("reference's kl summed", "KTOLoss._mean_log_ratio", "[1]) if per_token else sums[1]", "[1])"),
        prefix="parallel: ",
    ),
    *of_file(
        "parallel/vocabulary.py",
        SHARDS,
        (
            "d_hidden of one rank",
            "ShardedVocabulary.start_sum",
            "dist.all_reduce(x, group=self.group, async_op=True)",
            "None",
        ),
        (
            "row_scale of one rank",
            "ShardedVocabulary.combine_gradient",
            "factor * self.combine(stats, columns).clamp(min=-40).exp()",
            "factor + 0 * self.combine(stats, columns)",
        ),
        ("share of none", "ShardedVocabulary.combine_gradient", ".clamp(min=-40).exp()", ".exp()"),
        (
            "target's entry of one rank",
            "ShardedVocabulary.combine_gradient",
            "gradient.scatter_(1, at, torch.where(here[:, None], entry, gradient.gather(1, at)))",
            "pass",
        ),
        ("class weights of another rank", "ShardedVocabulary.local", "self.start : self.start +", ":"),
        ("ranks of the frozen head", "ShardedVocabulary.rows_of", "self.all_reduce(torch", "(torch"),
        ("shares of the entropy", "ShardedVocabulary.combine", " - torch.xlogy(shares, shares)", ""),
        ("squares of one rank", "ShardedVocabulary.combine", "2 * shares.log()", "shares.log()"),
        ("tie goes to the last", "ShardedVocabulary.combine", "earlier, shards", "~earlier, shards"),
        ("confident tokens", "ShardedVocabulary.combine", "torch.expm1(-logps_r)", "-torch.expm1(logps_r)"),
        ("softcap of the target", "ShardedVocabulary.combine_gradient", "stats.logps + stats", "0 * stats"),
        (
            "gradient of a log-sum-exp of one rank",
            "ShardedVocabulary.shared",
            "GroupShared.apply(x, self.group)",
            "x",
        ),
        prefix="shard: ",
    ),
    *of_file(
        "engine/token_objective.py",
        SHARDS,
        (
            "shard: reference of one rank",
            "TokenObjective._read_reference",
            "call.vocabulary.combine(stats, chunk.targets)",
            "pass",
        ),
    ),
    *of_file(
        "engine/packing.py",
        SHARDS,
        ("shard: chunks of another size", "unpack", "max(vocabulary.sizes)", "rows"),
    ),
]
