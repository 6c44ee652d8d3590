"""ms-swift 4.6.0: a callback for `swift sft` and `swift pt`.

    swift sft --external_plugins plugin.py --callbacks logitless ...

where plugin.py has the lines `from logitless.integrations import ms_swift` and `ms_swift.register()`. The
callback patches the model with `patch_model` when training begins, and removes the patch when training ends.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import TrainerCallback

from logitless.errors import value_error
from logitless.integrations.versions import import_owner, log_replacement
from logitless.models import patch_model

# Arguments with which the trainer computes its loss from logits, and the values with which it does not
REQUIRED_VALUES = {
    "enable_dft_loss": False,
    "enable_channel_loss": False,
    "label_smoothing_factor": 0,
    "loss_type": None,
    "use_liger_kernel": False,
}


def register(name: str = "logitless", *, logits_budget: int | str | None = None) -> Callable[[], None]:
    """Register the callback with ms-swift, for `--callbacks logitless`.

    Args:
        name: the name of the callback.
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.

    Returns:
        A function that removes the callback.

    Raises:
        ImportError: ms-swift is not installed, or has moved `swift.callbacks.callbacks_map`.
        ValueError: ms-swift has a callback of that name.
    """
    owner, table = import_owner("ms_swift", "swift.callbacks:callbacks_map")
    callbacks = getattr(owner, table)
    if name in callbacks:
        raise value_error("name", "one that no callback has", repr(name), "pick another one")
    callbacks[name] = partial(LogitlessCallback, logits_budget=logits_budget)

    def undo() -> None:
        callbacks.pop(name, None)

    return undo


class LogitlessCallback(TrainerCallback):
    """Patches the model of a `Seq2SeqTrainer` of ms-swift while it trains.

    Args:
        args: the trainer's arguments.
        trainer: of ms-swift.
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.

    Raises:
        ValueError: when training begins, if `check_trainer` refuses the trainer or its arguments.
    """

    def __init__(self, args: Any, trainer: Any, *, logits_budget: int | str | None = None):
        self.trainer = trainer
        self.logits_budget = logits_budget
        self.undo: Callable[[], None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        check_trainer(args, self.trainer)
        self.undo = patch_model(model, logits_budget=self.logits_budget)
        log_replacement("ms-swift", f"loss of {type(self.trainer).__name__}", self.logits_budget)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.undo is not None:
            self.undo()
            self.undo = None


def check_trainer(args: Any, trainer: Any) -> None:
    """Check that the patched model can compute the loss of this trainer.

    Raises:
        ValueError: the trainer is not a `Seq2SeqTrainer` (those of `swift rlhf` read logits), an argument
            makes it compute its loss from logits (`REQUIRED_VALUES`), `sequence_parallel_size` is not 1, or
            `loss_scale` has other weights than 0 and 1.
    """
    trainer_name = type(trainer).__name__
    template = trainer.template
    remedy = "take logitless out of --callbacks"
    if trainer_name != "Seq2SeqTrainer":
        raise value_error("callbacks", "swift sft or swift pt for logitless", trainer_name, remedy)
    for name, required in REQUIRED_VALUES.items():
        value = getattr(args, name, required)
        if value != required:
            raise value_error(name, f"{required} with --callbacks logitless", value, f"set it to {required}")
    size = template.sequence_parallel_size
    if size != 1:
        raise value_error("sequence_parallel_size", "1 with --callbacks logitless", size, "set it to 1")
    is_binary = template.is_binary_loss_scale
    if is_binary is None:
        is_binary = template.loss_scale.is_binary_loss_scale
    if not is_binary:
        expected = "one that keeps or drops tokens, such as 'default' or 'last_round'"
        raise value_error("loss_scale", expected, "one with other weights than 0 and 1", remedy)
