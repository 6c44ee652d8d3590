"""`apply_to`: the chunked loss in a trainer that exists already, TRL's or transformers' own."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from logitless.errors import expect
from logitless.models import patch_model

from .adapter import Adapter, ChunkedLoss, Seam, base_of, enable
from .adapters import ADAPTERS
from .pairs import check_budget


def apply_to(trainer: transformers.Trainer, *, logits_budget: int | None = None) -> Callable[[], None]:
    """Switch the chunked loss on in a trainer that exists already; returns a function that switches it off
    again.

    A trainer of TRL gets what our trainer of that name does with `use_chunked_loss=True`; any other
    `transformers.Trainer` gets `patch_model`. Its class, and yours on top of it, stay as they are.

    Args:
        trainer: TRL's (or a subclass of it), or transformers'.
        logits_budget: bytes that the logits alive at one time may take; default the library's.

    Raises:
        ValueError: it is no trainer, has the chunked loss already, is one of TRL's that are not covered, or
            has options that the flag would refuse.
    """
    expected, found = "a transformers.Trainer, TRL's among them", type(trainer).__name__
    remedy = "for a model there is patch_model(model)"
    expect(isinstance(trainer, transformers.Trainer), "trainer", expected, found, remedy)
    expected, found = "one without the chunked loss", f"a {found} that has it"
    expect("chunked_loss" not in trainer.__dict__, "trainer", expected, found, "leave apply_to out")
    if logits_budget is not None:
        check_budget(logits_budget)
    return enable(trainer, adapter_of(type(trainer)), logits_budget)


def adapter_of(trainer: type) -> Adapter:
    """The adapter of the TRL trainer that a class is, or extends; `PLAIN` for one outside of TRL."""
    for cls in trainer.__mro__:
        if cls.__module__.split(".")[0] == "trl":
            name = cls.__name__.removesuffix("Trainer")
            expected = f"one of TRL's {', '.join(ADAPTERS)}, or a trainer outside of TRL"
            remedy = "train it without the chunked loss"
            expect(name in ADAPTERS, "trainer", expected, cls.__name__, remedy)
            return ADAPTERS[name]
    return PLAIN


# --- transformers.Trainer


def patched(chunked: ChunkedLoss) -> Iterator[Callable[[], None]]:
    model = base_of(chunked.trainer, chunked.trainer.model)
    chunked.patch = patch_model(model, logits_budget=chunked.budget)
    yield chunked.patch


def model_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    inputs = dict(given.inputs)  # as Trainer takes labels out of them
    loss, outputs = stock(return_outputs=True)
    if isinstance(outputs, dict) and outputs.get("loss") is not None and outputs.get("logits") is None:
        chunked.note(chunked.patch.last_plan)
    if chunked.wants_logits:
        with torch.no_grad():
            outputs = given.model(**{name: x for name, x in inputs.items() if name != "labels"})
    return (loss, outputs) if getattr(given, "return_outputs", False) else loss


def no_smoothing(trainer: Any) -> None:
    expected, found = "0 in a trainer outside of TRL", trainer.args.label_smoothing_factor
    remedy = "it smooths full logits: use the SFTTrainer of logitless.trl_integration, or no smoothing"
    expect(not found, "label_smoothing_factor", expected, found, remedy)


PLAIN = Adapter(
    "transformers:",
    checks=(no_smoothing,),
    heads=patched,
    patches={"compute_loss": Seam(model_loss, train=True, evaluate=True, replaces=False)},
)
