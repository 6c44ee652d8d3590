"""Benchmarks of whole training steps: time, tokens per second, memory, and the same losses and gradient
norms as the stock model or trainer.

Read `steps.py` first, then `trainers.py`. The modules and their commands:

* `steps.py`: `step`, SFT steps of TRL; each configuration runs in a separate process (`step_process.py`).
* `usecase.py`: `usecase`, the use case of Liger's paper. `recipes.py`: `recipes`, what goes with both flags.
* `trainers.py`: `trl`, each trainer of TRL beside ours; `trainer_steps.py` trains.
* `lora.py`: `lora`. `activations.py`: `activations`, budgets of saved activations.
* `fsdp.py`: `fsdp`, SFT and DPO on several GPUs; `fsdp_process.py` is one rank.

A module named in a list `PRELOADED` is imported once, in the process that the others are forked from. The
modules `*_process.py` and `trainer_steps.py` import TRL; all others can be imported without it.

A new configuration is an entry of `CONFIGURATIONS` in `steps.py`, `usecase.py` or `fsdp.py`, of `RECIPES`
or of `lora.ROWS`; a new trainer is an entry of `trainers.TRAINERS`. A new benchmark adds a module with
`run`, `failed` and `for_page`, a command in `commands.py` and `benchmarks/__main__.py`, and a line in
`ELSEWHERE` of `pages/commands.py`.
"""
