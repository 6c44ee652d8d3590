"""What ranks exchange where they share a vocabulary or sequences, by collectives of torch.distributed.

`vocabulary` and `sequences` have a class for ranks that share nothing and one for those that do, so that the
engine calls both alike; `collectives` are theirs. `groups` reads process groups and DTensors, `normalizers`
counts tokens over ranks, `agreement` is what LOGITLESS_DEBUG=1 compares. Called by the engine, losses and
models; users get `global_num_items` from `logitless`.
"""
