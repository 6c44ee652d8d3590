"""Vocabulary parallelism (`tp_group`) and context parallelism (`cp_group`), by torch.distributed collectives.

`vocabulary` and `sequences` each contain a class for calls without a process group, whose collectives return
their inputs, and a class for calls with a group. The engine calls both in the same way. `collectives`
contains the collectives, `groups` resolves process groups and DTensors, `fsdp` reads the gradient divide
factor of FSDP2, `normalizers` counts tokens over ranks, and `agreement` compares calls with
LOGITLESS_DEBUG=1. The engine, the losses and `models` call this package. Users import `global_num_items` from
`logitless`.
"""
