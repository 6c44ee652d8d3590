"""Vocabulary parallelism (`tp_group`) and context parallelism (`cp_group`), by torch.distributed collectives.

`vocabulary` and `sequences` each have a class for the case without a group, which does nothing, and a class
for the case with one, so that the engine calls both in the same way; `collectives` has the collectives of
both. `groups` reads process groups and DTensors, `fsdp` the gradient factor of FSDP2, `normalizers` counts
tokens over ranks, and `agreement` compares calls with LOGITLESS_DEBUG=1. The engine, losses and models call
this package; users get `global_num_items` from `logitless`.
"""
