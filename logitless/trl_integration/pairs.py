"""The pairs of Config and Trainer: subclasses of TRL's classes with additional options, made on first use.

With all options off, a pair does exactly what TRL's pair does; with one on, the trainer's constructor ends by
calling `switch_on`.
"""

import functools
import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

from logitless import CrossEntropyLoss
from logitless.errors import to_bytes, value_error

from . import deferred, distillation, per_token
from .adapter import LIGER_LOSS, Adapter
from .layers import switch_on
from .versions import import_from_trl, require_supported

logger = logging.getLogger(__package__)

# The adapters of all trainers that support the chunked loss, by name
ADAPTERS: dict[str, Adapter] = {
    value.name: value
    for module in (per_token, deferred, distillation)
    for value in vars(module).values()
    if isinstance(value, Adapter)
}


# Whether a trainer that supports the options of its config is being constructed
_is_supported: ContextVar[bool] = ContextVar("_is_supported", default=False)


@dataclass
class ChunkedLossConfigMixin:
    """Adds `use_chunked_loss`, `use_fused_layers`, `logits_budget` and `activation_budget` to a TRL config.

    Raises:
        TypeError, ValueError: `logits_budget` is no positive number of bytes, or set with
            `use_chunked_loss=False`; `activation_budget` is no positive number of bytes.
        ValueError: the config, with an option set, is passed to a trainer that would ignore it.
    """

    use_chunked_loss: bool = field(default=False, metadata={"help": "Compute the loss without full logits."})
    use_fused_layers: bool = field(
        default=False, metadata={"help": "Fuse norms, rotary embeddings and gates of the trainer's models."}
    )

    # An int is accepted too, but transformers' argument parser allows one type besides None.
    logits_budget: str | None = field(
        default=None, metadata={"help": "Bytes that the logits alive at one time may take, such as 2GiB."}
    )
    activation_budget: str | None = field(
        default=None,
        metadata={"help": "Bytes that decoder layers may keep between forward and backward, such as 12GiB."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logits_budget = check_budget(self.logits_budget, self.use_chunked_loss)
        if self.activation_budget is not None:
            to_bytes("activation_budget", self.activation_budget)

    @property
    def _options(self) -> list[str]:
        """Names of the options that are set and change the trainer."""
        options = [name for name in ("use_chunked_loss", "use_fused_layers") if getattr(self, name)]
        if self.activation_budget is not None:
            options.append("activation_budget")
        return options

    @property
    def place_model_on_device(self) -> bool | None:
        # `Trainer.__init__` reads this property of its arguments, and nothing else does: only here can a
        # config detect that it was passed to a trainer that ignores its options.
        options = self._options
        if options and not _is_supported.get():
            expected = "a trainer that honours it"
            got = "one that would ignore it"
            remedy = "import the trainer from logitless.trl_integration too"
            raise value_error(", ".join(options), expected, got, remedy)
        return super().place_model_on_device


def check_budget(logits_budget: Any, use_chunked_loss: bool) -> Any:
    """Return the budget in bytes, or None.

    Raise TypeError or ValueError for an invalid budget, or for one without the chunked loss.
    """
    loss = CrossEntropyLoss(logits_budget=logits_budget)  # raises for an invalid budget
    if logits_budget is not None and not use_chunked_loss:
        remedy = "set use_chunked_loss=True"
        raise value_error("logits_budget", "None with use_chunked_loss=False", logits_budget, remedy)
    return loss.logits_budget


class ChunkedLossTrainerMixin:
    """Mixin of a TRL trainer whose constructor switches on the options of its config.

    `last_plan` is the `plan` of the most recent call of a loss, except for a reference model's in a training
    step. It is None before the first call, and in a compiled model.
    """

    adapter: ClassVar[Adapter]
    last_plan: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        configs = (value for value in (*args, *kwargs.values()) if isinstance(value, ChunkedLossConfigMixin))
        config = next(configs, None)
        if config is None or not config._options:
            super().__init__(*args, **kwargs)
            if self.is_world_process_zero():
                # TRL's config beside our trainer is a mistake; a config without an option may not be one.
                level = logging.WARNING if config is None else logging.INFO
                why = "args is no config of this package" if config is None else "its config sets no option"
                name = self.adapter.name
                remedy = f"pass args={name}Config(use_chunked_loss=True) of {__package__}"
                logger.log(level, f"{name}Trainer: the loss is TRL's, because {why}; {remedy}")
            return
        if config.use_chunked_loss and config.use_liger_kernel:
            # Liger's layers without its loss, which would read the head itself
            config.liger_kernel_config = (config.liger_kernel_config or {}) | {LIGER_LOSS: False}
        token = _is_supported.set(True)
        try:
            super().__init__(*args, **kwargs)
        finally:
            _is_supported.reset(token)
        adapter = self.adapter if config.use_chunked_loss else None
        switch_on(
            self,
            adapter,
            config.logits_budget,
            fuse=config.use_fused_layers,
            activation_budget=config.activation_budget,
        )


@functools.cache
def make_pair(name: str) -> tuple[type, type]:
    """The classes (Config, Trainer) of the trainer with this name."""
    require_supported()
    adapter = ADAPTERS[name]
    original_config = import_from_trl(f"{adapter.path}Config")
    original_trainer = import_from_trl(f"{adapter.path}Trainer")
    options = "`use_chunked_loss`, `use_fused_layers`, `logits_budget` and `activation_budget`"
    config_attributes = {"__module__": __package__, "__doc__": f"TRL's `{name}Config` with {options}."}
    trainer_attributes = {
        "__module__": __package__,
        "__doc__": (
            f"TRL's `{name}Trainer`; with `use_chunked_loss=True` the same loss without the full logits, "
            "with `use_fused_layers=True` the same model with fused layers."
        ),
        "adapter": adapter,
    }
    config = type(f"{name}Config", (ChunkedLossConfigMixin, original_config), config_attributes)
    trainer = type(f"{name}Trainer", (ChunkedLossTrainerMixin, original_trainer), trainer_attributes)
    return dataclass(config), trainer
