"""Benchmarks of correctness: gradients on trained heads, gradients of trainers at every step, training
runs, and outcomes of recipes. Their results are docs/proof.md.

Read `convergence.py` first: its class `Proof` runs the parts of `convergence`, which `tables.py` and
`picture.py` show.

* `gradient_errors.py`: part `gradients`, errors against fp64 on a trained head.
* `shadow.py`, `shadow_heads.py`: part `shadow`, the chunked loss at each step of a stock run.
* `curves.py`: part `curves`, training runs with each implementation.
* `outcomes.py`: part `outcomes`, what recipes reach on held-out prompts.
* `sources.py`: `convergence-data`, text and head from published packages; `texts.py`, `sums.py`: the tasks.

A new implementation or objective is registered in `gradient_errors.py`, a trainer in `KINDS` of
`shadow.py`, a recipe in `RECIPES` of `outcomes.py`. A new part is a method of `Proof`, an entry of `PARTS`,
and a table in `tables.of_page`.
"""
