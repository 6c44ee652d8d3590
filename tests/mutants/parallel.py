"""Several processes: gathered heads, normalizers, slices of sequences."""

from tests.mutants.mutant import of_file

FSDP = "tests/losses/test_fsdp.py"
SLICES = "tests/losses/test_context_parallel.py"
SHARDS = "tests/losses/test_shard.py"
ARGUMENTS = "losses/arguments.py"
PARALLEL = "losses/parallel.py"
SHARD = "losses/shard.py"
BATCH = "losses/batch.py"
ENGINE = "losses/engine.py"
PAIRED = "losses/paired.py"
PREFERENCE = "losses/preference.py"
WALK = "losses/walk.py"

MUTANTS = [
    *of_file(
        ARGUMENTS,
        FSDP,
        ("parallel: gradient of a gathered head summed", "_gathered", '[Partial("avg")]', '[Partial("sum")]'),
    ),
    *of_file(
        PARALLEL,
        FSDP,
        ("num_items of all ranks", "global_num_items", "total / dist.get_world_size(group)", "total"),
        ("num_items counts ignored targets", "global_num_items", "items != ignore_index", "items == items"),
        prefix="parallel: ",
    ),
    *of_file(
        BATCH,
        FSDP,
        ("parallel: pairs of no tokens", "select_rows", "sequences // roles, length", "-1, length"),
    ),
    *of_file(
        BATCH,
        SLICES,
        ("shares of a term not summed", "reduced.total", "slices is None or term.over in WHOLE", "True"),
        ("whole terms summed", "reduced.total", "slices is None or term.over in WHOLE", "slices is None"),
        ("weights of a metric not summed", "tallied", "sum() if slices is None", "sum() if True"),
        ("lengths of a slice", "Batch.lengths", "if self._slices is None", "if True"),
        ("positions in a slice", "Batch.positions", "_own_positions + self", "_own_positions + 0 * self"),
        (
            "gradient of what is spread, of one rank",
            "Batch.spread",
            "if self._slices is not None and x.requires_grad",
            "if False",
        ),
        prefix="parallel: ",
    ),
    *of_file(
        PARALLEL,
        SLICES,
        ("parallel: positions count this rank's too", "SequenceSlices.before", "rank()", "rank() + 1"),
    ),
    *of_file(
        ENGINE,
        SLICES,
        ("tokens of a slice as normalizer", "counted", "if loss.slices is None:\n        return", "return"),
        ("ranks meet group by group", "_rows", "or loss.cp_group is not None or (", "or ("),
        prefix="parallel: ",
    ),
    *of_file(
        PAIRED,
        SLICES,
        ("packed slices of few tokens", "ReferencedLoss.__call__", "per_token = not others.item()", "pass"),
        ("mean logits of a slice", "mean_logits_over_positions", "sums = loss.slices.sum(sums)", "pass"),
        prefix="parallel: ",
    ),
    *of_file(
        PREFERENCE,
        SLICES,
        ("kl of a slice", "KTOLoss._kl", "sums = self.slices.sum(sums[0]),", "sums = sums[0],"),
        ("reference's kl summed", "KTOLoss._kl", "sum(sums[1]) if per_token", "sum(sums[1]) if True"),
        prefix="parallel: ",
    ),
    *of_file(
        WALK,
        SHARDS,
        ("d_hidden of one rank", "Walk._add", "self.shard.all_reduce_async(d_hidden)", "None"),
        ("row_scale of one rank", "TokenWalk._read", "row_scale * self.shard", "row_scale + 0 * self.shard"),
        ("share of none", "TokenWalk._read", ".clamp(min=-40).exp()", ".exp()"),
        (
            "target's entry of one rank",
            "TokenWalk._read",
            "self.shard.set_target(gradient, targets, out, row_scale, self.loss.head)",
            "pass",
        ),
        ("reference of one rank", "TokenWalk._read_reference", "self.shard.combine(found, targets)", "pass"),
        ("ranks of the frozen head", "scale_rows", "shard.all_reduce(rows)", "rows"),
        prefix="shard: ",
    ),
    *of_file(
        SHARD,
        SHARDS,
        ("class weights of another rank", "VocabShard.rows_of", "self.start : self.start + self", ": self"),
        ("shares of the entropy", "VocabShard.combine", " - torch.xlogy(shares, shares)", ""),
        ("squares of one rank", "VocabShard.combine", "(2 * shares.log() + shards", "(shares.log() + shards"),
        ("tie goes to the last", "VocabShard.combine", "earlier, shards", "~earlier, shards"),
        ("confident tokens", "VocabShard.combine", "torch.expm1(-logps_r)", "-torch.expm1(logps_r)"),
        ("softcap of the target", "VocabShard.set_target", "(stats.logps + stats.lse)", "(0 * stats.lse)"),
        (
            "gradient of a log-sum-exp of one rank",
            "VocabShard.shared",
            "return GroupShared.apply(x, self.group)",
            "return x",
        ),
        prefix="shard: ",
    ),
    *of_file(
        ENGINE,
        SHARDS,
        ("shard: chunks of another size", "Problem.width", "max(self.shard.sizes)", "self.weight.shape[0]"),
    ),
]
