"""Faults that are known and not fixed yet: calls that are left out, so that the rest is tested.

`python -m tests.random --known` takes them in, and finds them.
"""

from collections.abc import Callable
from typing import Any

import torch

from tests.random.calls import Call

# By the name of the fault: which calls, or which trainers' options, meet it. An entry goes when its fault is fixed.
LOSSES: dict[str, Callable[[Call], bool]] = {
    "S7": lambda case: case.wrong == "float mask",
    "S9": lambda case: case.default_dtype != torch.float32,
    "S11": lambda case: "unlabelled" in case.inputs and case.options.get("ignore_index") == 0,
    "S14": lambda case: case.options.get("skew_alpha") in (0.0, 1.0),
    "S15": lambda case: case.wrong in ("short", "long", "late"),
    "S16": lambda case: case.loss == "KTO" and one_token_each(case),
    "KTO's digits": lambda case: case.loss == "KTO" and (case.peak > 1 or "beta" in case.options),
    "phi of sequences without tokens": lambda case: case.options.get("loss_type") == "vespo",
    "an empty batch of sequences, none": lambda case: (
        not case.lengths and case.options.get("reduction") == "none"
    ),
}

TRAINERS: dict[str, Callable[[Any], bool]] = {
    "S1": lambda case: "use_adaptive_entropy" in case.options,
}
KNOWN = {"losses": LOSSES, "trainers": TRAINERS}


def one_token_each(case: Call) -> bool:
    """Whether there may be as many tokens as sequences."""
    tokens = len(case.lengths) * (max(case.lengths, default=0) + case.padding)
    return len(case.lengths) in (tokens, sum(case.lengths))


def unknown(case: Any) -> bool:
    """Whether a case of either kind meets no known fault."""
    known = KNOWN["losses" if isinstance(case, Call) else "trainers"]
    return not any(meets(case) for meets in known.values())
