"""Benchmarks of fused layer operators: norms, rotations and gates, forward and backward.

Read `comparison.py` first. `layers` compares implementations with a copy of as many bytes: time, bandwidth,
host time, peak memory, error. `layer-tiles` times other tile sizes of our launchers, in `tiles.py`.
`picture.py` draws docs/layers.png.

A new operator is an `Operator` in `operators.py`: inputs, our call, the stock model's computation, and the
bytes that each direction must move. A function in `benchmarks/peers/layers.py` has an implementation's
calls by the operator's kind.
"""
