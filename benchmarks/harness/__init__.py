"""The harness: loads an implementation, checks its results, measures its time and memory, and writes JSON.

No command belongs to this package, and it imports no other package of `benchmarks`. Read `measure.py` first.

=================  ==================================================================================
`measure.py`       compares implementations with the truth, then takes milliseconds, ratio and bytes
`timing.py`        milliseconds and peak bytes of one call; the round robin of several calls
`yardstick.py`     the bare matrix products that times are counted in
`objective.py`     an objective with its shapes, problems, implementations and goals, and a run of it
`registry.py`      implementations that load lazily, with the reason where one cannot be loaded
`report.py`        the JSON document, the table for the terminal, and the table's place in a page
`options.py`       the options that commands share
`profiler.py`      the kernels of one call
`forked.py`        processes forked from one that has imported TRL
`styles.py`        colours and marks of the pictures
=================  ==================================================================================
"""
