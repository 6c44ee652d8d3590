"""Measurements of the library without other implementations, by which a regression is found.

Read `own_rows.py` first: the calls that are measured, `ROWS`. The modules and their commands:

* `compare_trees.py`: `compare`, all rows in two checkouts, in turns: time, memory, host time.
* `profile.py`: `profile`, the kernels of one row by kind.
* `counts.py`: `counts`, what a warm call executes on a CPU and on a simulated Hopper GPU; a
  test compares the counts with `benchmarks/results/counts.json`.
* `simulated_hopper.py`: the path of a call on a Hopper GPU, on a machine without one.

A new row is a `Row` in `ROWS`, by the public API alone, as older checkouts run it. A new count is a `Call`
of `calls` in `counts.py`; write the file anew.
"""
