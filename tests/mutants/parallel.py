"""Several processes: gathered heads, normalizers, slices of sequences."""

from tests.mutants.mutant import Mutant

FSDP, SLICES, SHARDS = "tests/losses/test_fsdp.py", "tests/losses/test_context_parallel.py", "tests/losses/test_shard.py"
ARGUMENTS, PARALLEL, SHARD = "losses/arguments.py", "losses/parallel.py", "losses/shard.py"
BATCH, ENGINE, KTO = "losses/batch.py", "losses/engine.py", "losses/kto.py"
PREFERENCE, WALK = "losses/preference.py", "losses/walk.py"

MUTANTS = [
    Mutant(f"parallel: {name}", file, old, new, tests)
    for name, file, old, new, tests in (
        ("gradient of a gathered head summed", ARGUMENTS, 'grad_placements=[Partial("avg")]', 'grad_placements=[Partial("sum")]', FSDP),
        ("num_items of all ranks", PARALLEL, "return total / dist.get_world_size(group)", "return total", FSDP),
        ("num_items counts ignored targets", PARALLEL, "(items != ignore_index).sum()", "(items == items).sum()", FSDP),
        ("pairs of no tokens", BATCH, "view(roles, sequences // roles, length)", "view(roles, -1, length)", FSDP),
        ("shares of a term not summed", BATCH, "own if slices is None or term.over in WHOLE", "own if True", SLICES),
        ("whole terms summed", BATCH, "slices is None or term.over in WHOLE", "slices is None", SLICES),
        ("weights of a metric not summed", BATCH, "weight.sum() if slices is None", "weight.sum() if True", SLICES),
        ("lengths of a slice", BATCH, "return self._own_lengths if self._slices is None", "return self._own_lengths if True", SLICES),
        ("positions in a slice", BATCH, "self._own_positions + self.spread", "self._own_positions + 0 * self.spread", SLICES),
        ("positions count this rank's too", PARALLEL, "parts[: self.group.rank()]", "parts[: self.group.rank() + 1]", SLICES),
        ("gradient of what is spread, of one rank", BATCH, "if self._slices is not None and x.requires_grad", "if False", SLICES),
        ("tokens of a slice as normalizer", ENGINE, "    if loss.slices is None:\n        return tokens\n", "    return tokens\n", SLICES),
        ("ranks meet group by group", ENGINE, " or loss.cp_group is not None or (", " or (", SLICES),
        ("packed slices of few tokens", PREFERENCE, "per_token = not self.slices.sum(others).item()", "pass", SLICES),
        ("mean logits of a slice", PREFERENCE, "sums = loss.slices.sum(sums)", "pass", SLICES),
        ("kl of a slice", KTO, "sums = self.slices.sum(sums[0]),", "sums = sums[0],", SLICES),
        ("reference's kl summed", KTO, "self.slices.sum(sums[1]) if per_token", "self.slices.sum(sums[1]) if True", SLICES),
    )
] + [
    Mutant(f"shard: {name}", file, old, new, SHARDS)
    for name, file, old, new in (
        ("d_hidden of one rank", WALK, "self.shard.all_reduce_async(d_hidden)", "None"),
        (
            "row_scale of one rank",
            WALK,
            "row_scale = row_scale * self.shard.combine",
            "row_scale = row_scale + 0 * self.shard.combine",
        ),
        ("share of none", WALK, ".clamp(min=-40).exp()", ".exp()"),
        ("target's entry of one rank", WALK, "self.shard.set_target(gradient, targets, out, row_scale, self.loss.head)", "pass"),
        ("reference of one rank", WALK, "self.shard.combine(found, targets)", "pass"),
        ("class weights of another rank", SHARD, "return x[self.start : self.start + self.width]", "return x[: self.width]"),
        ("ranks of the frozen head", WALK, "shard.all_reduce(rows)", "rows"),
        ("shares of the entropy", SHARD, " - torch.xlogy(shares, shares)", ""),
        ("squares of one rank", SHARD, "(2 * shares.log() + shards", "(shares.log() + shards"),
        ("tie goes to the last", SHARD, "torch.where(earlier, shards", "torch.where(~earlier, shards"),
        ("confident tokens", SHARD, "torch.where(owner, torch.expm1(-logps_r), ", "torch.where(owner, -torch.expm1(logps_r), "),
        ("softcap of the target", SHARD, "head.derivative_at(stats.logps + stats.lse)", "head.derivative_at(0 * stats.lse)"),
        ("gradient of a log-sum-exp of one rank", SHARD, "return GroupShared.apply(x, self.group)", "return x"),
        ("chunks of another size", ENGINE, "else max(self.shard.sizes)", "else self.weight.shape[0]"),
    )
]
