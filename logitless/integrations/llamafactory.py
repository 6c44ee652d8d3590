"""LLaMA-Factory 0.9.5: a command that trains the stages `sft` and `pt` without full logits.

`llamafactory-cli train train.yaml` takes no callbacks. Run this instead, on several GPUs with `torchrun -m`:

    python -m logitless.integrations.llamafactory train.yaml logitless_budget=2684354560

`LogitlessCallback` patches the
model with `logitless.models.patch_model` when training begins, and removes the patch when training ends.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from logitless.errors import value_error
from logitless.integrations.versions import import_owner, log_replacement, unavailable_error
from logitless.models import check_trainer_arguments, fuse_layers, patch_model

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise unavailable_error("llamafactory", error) from error

RUN_FUNCTION = "llamafactory.train.tuner:run_exp"
READ_FUNCTION = "llamafactory.hparams:read_args"
STAGES = ("sft", "pt")
# Keys of LLaMA-Factory with which another code computes the loss, or one that needs logits
INCOMPATIBLE_KEYS = (
    "use_dft_loss",
    "use_asft_loss",
    "use_eaft_loss",
    "enable_liger_kernel",
    "use_mca",
    "use_hyper_parallel",
    "use_kt",
    "use_ray",
    "compute_accuracy",
)


class LogitlessCallback(TrainerCallback):
    """Patch the model of a `Trainer` while it trains.

    Args:
        logits_budget: bytes that a chunk of logits and its temporaries may take; default the library's.
        fused_layers: whether to fuse norms, rotary embeddings and gates too.
    """

    def __init__(self, logits_budget: int | str | None = None, fused_layers: bool = False):
        self.logits_budget = logits_budget
        self.fused_layers = fused_layers
        self.patch: Any = None
        self.unfuse: Callable[[], None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        check_trainer_arguments(args)
        self.patch = patch_model(model, logits_budget=self.logits_budget)
        if self.fused_layers:
            self.unfuse = fuse_layers(model)
        log_replacement("LLaMA-Factory", "loss of labelled calls", self.logits_budget)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.unfuse is not None:
            self.unfuse()
        if self.patch is not None:
            self.patch()


def is_true(value: Any) -> bool:
    """Whether a value of a YAML file or of the command line is true."""
    return value not in (None, False, "false", "False")


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise ValueError for arguments of LLaMA-Factory with which the callback has no effect."""
    stage = arguments.get("stage", "sft")
    if stage not in STAGES:
        remedy = "use llamafactory-cli train: the other stages read logits, or have no LM head"
        raise value_error("stage", " or ".join(map(repr, STAGES)), repr(stage), remedy)
    for key in INCOMPATIBLE_KEYS:
        if is_true(arguments.get(key)):
            remedy = f"leave {key} out, or use llamafactory-cli train"
            raise value_error(key, "unset with logitless", arguments[key], remedy)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as `llamafactory-cli train` does, with `LogitlessCallback`.

    Args:
        arguments: of the command line; default those of the process. Besides LLaMA-Factory's arguments there
            are `logitless_budget`, in bytes, and `logitless_fused_layers`.

    Raises:
        ImportError: LLaMA-Factory is not installed, or has moved a function.
        ValueError: the arguments are not a file with overrides, or the callback does not support them.
    """
    reader, read_args = import_owner("llamafactory", READ_FUNCTION)
    runner, run_exp = import_owner("llamafactory", RUN_FUNCTION)
    original_argv = sys.argv
    try:
        if arguments is not None:
            sys.argv = [original_argv[0], *arguments]
        # A dict for a YAML or JSON file with overrides, else the list of the command line's words
        settings = getattr(reader, read_args)()
    finally:
        sys.argv = original_argv
    if not isinstance(settings, dict):
        remedy = "write the arguments into a YAML file"
        raise value_error("arguments", "train.yaml, then name=value", " ".join(settings), remedy)
    settings = dict(settings)
    budget = settings.pop("logitless_budget", None)
    fused_layers = is_true(settings.pop("logitless_fused_layers", False))
    check_arguments(settings)
    # LLaMA-Factory shows the messages of no other loggers than its own.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("logitless").setLevel(logging.INFO)
    callback = LogitlessCallback(None if budget is None else int(budget), fused_layers)
    getattr(runner, run_exp)(settings, callbacks=[callback])


if __name__ == "__main__":
    main()
