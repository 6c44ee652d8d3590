"""Every number computed by hand here is asked of the reference on full logits and of the library: a test runs
once with `tests.reference` as it is, and once with the library's losses in the place of its functions."""

from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
import torch

import logitless
from tests import reference
from tests.support import uncompiled

LIBRARY = {
    "cpo": logitless.CPOLoss,
    "distillation": logitless.DistillationLoss,
    "dpo": logitless.DPOLoss,
    "grpo": logitless.GRPOLoss,
    "kto": logitless.KTOLoss,
    "orpo": logitless.ORPOLoss,
    "ppo": logitless.PPOLoss,
    "reinforce": logitless.REINFORCELoss,
    "rloo": logitless.RLOOLoss,
    "simpo": logitless.SimPOLoss,
}
WITH_LOGPS = ("grpo", "ppo", "reinforce", "rloo")


def of_library(name: str, kind: type) -> Callable[..., tuple]:
    """A loss of the library, called and answering as the function `name` of `tests.reference`."""
    settings_of = {field.name for field in fields(kind)}

    def call(*operands: torch.Tensor, **options) -> tuple:
        settings = {key: value for key, value in options.items() if key in settings_of}
        inputs = {key: value for key, value in options.items() if key not in settings_of}
        if name in WITH_LOGPS:
            settings["return_logps"] = True
        out = kind(**settings)(*operands, **inputs)
        return (out.loss, out.metrics, out.logps) if name in WITH_LOGPS else (out.loss, out.metrics)

    return call


def cross_entropy(*operands: torch.Tensor, **options) -> torch.Tensor:
    return logitless.linear_cross_entropy(*operands, **options)


def token_logprobs(*operands: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    actual = logitless.linear_logprobs(*operands, entropy=True, **options)
    return actual.logps, actual.entropy, actual.lse


@pytest.fixture(autouse=True, params=["reference", "library"])
def whose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "library":
        for name, kind in LIBRARY.items():
            monkeypatch.setattr(reference, name, of_library(name, kind))
        monkeypatch.setattr(reference, "cross_entropy", cross_entropy)
        monkeypatch.setattr(reference, "token_logprobs", token_logprobs)
    with uncompiled():
        yield request.param
