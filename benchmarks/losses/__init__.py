"""Benchmarks of losses: time in bare matrix products, peak memory and gradient error of one call, beside
other implementations.

Read `ce.py` first, then `harness/objective.py`. A module is named after its command unless the list says
otherwise:

* `ce.py`: `ce`, `ce-portable`, `cpu`, `sweep`. `gemm.py`: the bare products against the chunk size.
* `preference.py`: `preference`, `orpo-batch`, `dpo-length`. `policy.py`. `medusa.py`. `speculators.py`.
* `distillation.py`: `distillation`, `distillation-length`.
* `topk.py`, `sampler.py`: several ids per token, and a sampler's kept ids.
* `small.py`: calls of few tokens, which wait for the host.
* `tensor_parallel.py`: heads sharded over several GPUs.
* `given_logits.py`: `given-logits`, cross-entropy of logits that exist already; its peers stand in it.
* `rounding.py`: emulation of engines that round their logits, on a CPU.
* `tables.py`, `summary.py`, `picture.py`: the tables and the picture of the pages.

A new loss needs a module like `ce.py` with shapes, inputs, truth, yardstick and goals (an `Objective`), a
module of the same name in `benchmarks/peers/`, and a command in `commands.py` and `benchmarks/__main__.py`.
With its name in `TABLES` of `pages/commands.py` and markers in docs/benchmarks.md, it has a table. A new
shape is listed beside the others in the module of its loss; a new implementation is a function in
`benchmarks/peers/`.
"""
