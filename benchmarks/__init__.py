"""Measurements of logitless beside its peers; `python -m benchmarks --help` lists them.

The rules, which every subcommand keeps by going through `measure.py`:

* **Correct first.** Each implementation is compared with an fp32 computation on fresh inputs before it is
  timed. A wrong one gets its errors in the table and no time.
* **Ratios.** Times are counted in the bare matrix products of the same run (`yardstick.py`), interleaved
  round by round with what is measured (`timing.py`), so that a change of clock or temperature reaches both.
* **The public call.** What is timed is what a user writes, `.backward()` included, with gradients in the
  weight's dtype.
* **Written down.** A JSON file holds every row, the versions, the GPU and the command; tables and pictures
  are made from it.

`compare` alone goes another way: it measures two checkouts of the library, without peers and without a truth
(`compare_trees.py`).

A new objective adds one module like `ce.py` (shapes, inputs, truth, yardstick, goals: an `Objective`), one
like `ce_peers.py`, and one command in `__main__.py`; with its name in `TABLES` there, and markers in
docs/benchmarks.md, it has a table too. The commands that measure whole models are in `model_commands.py`.
"""
