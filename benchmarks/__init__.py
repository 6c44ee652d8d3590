"""Measurements of logitless beside its peers; `python -m benchmarks --help` lists them.

The packages, by subject. Imports go downwards in this order, which `make lint` checks; packages of one row
do not import each other. The docstring of each package says what it measures, which commands it has, which
module to read first, and how a row is added.

============================  ============================================================================
`pages`                       tables, pictures, numbers and statements of README.md and docs
`proof`, `regressions`        correctness of trained models; the library without peers, against itself
`losses`, `layers`, `models`  calls of losses; layer operators; whole training steps
`peers`                       implementations of other libraries, with the call of each
`harness`                     agreement with the truth, times, memory, result files, options
============================  ============================================================================

`__main__.py` names the function of each command; the functions are in `commands.py` of the packages. Result
files are in `benchmarks/results/`.

The rules, which a comparison with peers keeps by `harness/measure.py`:

* **Correct first.** Each implementation is compared with an fp32 computation on fresh inputs before it is
  timed. A wrong one gets its errors in the table and no time.
* **Ratios.** Times are counted in the bare matrix products of the same run (`harness/yardstick.py`),
  interleaved round by round with what is measured (`harness/timing.py`), so that a change of clock or
  temperature reaches both.
* **The public call.** What is timed is what a user writes, `.backward()` included, with gradients in the
  weight's dtype.
* **Written down.** A JSON file holds every row, the versions, the GPU and the command; tables and pictures
  are made from it.

`compare` alone goes another way: it measures two checkouts of the library, without peers and without a
truth (`regressions/compare_trees.py`).
"""
