"""Our Config/Trainer pairs: subclasses of TRL's classes with the flags, made on first use.

With all flags off a pair *is* TRL's pair; with one on, the trainer's constructor ends in `switch_on`.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from logitless import CrossEntropyLoss
from logitless.errors import value_error
from logitless.models.activation_plan import to_bytes

from . import deferred, distillation, per_token
from .adapter import LIGER_LOSS, Adapter, swapped
from .layers import switch_on
from .versions import found_in_trl, require_supported

# Every trainer that the flag covers, by name
ADAPTERS: dict[str, Adapter] = {
    found.name: found
    for module in (per_token, deferred, distillation)
    for found in vars(module).values()
    if isinstance(found, Adapter)
}


@dataclass
class ChunkedLossConfigMixin:
    """Adds `use_chunked_loss`, `use_fused_layers`, `logits_budget` and `activation_budget` to a TRL config.

    Raises:
        TypeError, ValueError: `logits_budget` is not a positive whole number of bytes, or given with
            `use_chunked_loss=False`; `activation_budget` is no positive number of bytes.
        ValueError: the config, with a flag on, is given to a trainer that would ignore it.
    """

    use_chunked_loss: bool = field(default=False, metadata={"help": "Compute the loss without full logits."})
    use_fused_layers: bool = field(
        default=False, metadata={"help": "Fuse norms, rotary embeddings and gates of the trainer's models."}
    )
    logits_budget: int | None = field(
        default=None, metadata={"help": "Bytes that the logits alive at one time may take."}
    )

    # A whole number is taken too; transformers' parser takes one type beside None.
    activation_budget: str | None = field(
        default=None,
        metadata={"help": "Bytes that decoder layers may keep between forward and backward, such as 12GiB."},
    )

    # Whether one of our trainers is being constructed with this config
    _claimed = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.logits_budget, self.use_chunked_loss)
        if self.activation_budget is not None:
            to_bytes(self.activation_budget)

    @property
    def _flags(self) -> list[str]:
        """Names of the options that are set."""
        flags = [name for name in ("use_chunked_loss", "use_fused_layers") if getattr(self, name)]
        return flags + ["activation_budget"] * (self.activation_budget is not None)

    @property
    def place_model_on_device(self) -> bool | None:
        # `Trainer.__init__` reads this overridable property of its arguments, and nothing else does: the one
        # moment at which a config can see that it came to a trainer that does not know the flags.
        flags = self._flags
        if flags and not self._claimed:
            expected = "a trainer that honours it"
            found = "one that would ignore it"
            remedy = "import the trainer from logitless.trl_integration too"
            raise value_error(", ".join(flags), expected, found, remedy)
        return super().place_model_on_device


def check_budget(logits_budget: Any, use_chunked_loss: bool) -> None:
    CrossEntropyLoss(logits_budget=logits_budget)  # raises for a value that is no number of bytes
    alone = logits_budget is None or use_chunked_loss
    remedy = "set use_chunked_loss=True"
    if not alone:
        raise value_error("logits_budget", "None with use_chunked_loss=False", logits_budget, remedy)


class ChunkedLossTrainerMixin:
    """A trainer of TRL whose constructor switches on what its config asks for.

    `last_plan` is the `plan` of the most recent loss call, a reference's in a training step left out; None if
    there was none, or in a compiled model, which is traced before anything runs.
    """

    adapter: ClassVar[Adapter]
    last_plan: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        configs = (value for value in (*args, *kwargs.values()) if isinstance(value, ChunkedLossConfigMixin))
        config = next(configs, None)
        if config is None or not config._flags:
            super().__init__(*args, **kwargs)
            return
        if config.use_chunked_loss and config.use_liger_kernel:
            # its layers: its loss would read the head itself
            config.liger_kernel_config = (config.liger_kernel_config or {}) | {LIGER_LOSS: False}
        with swapped(config, _claimed=True):
            super().__init__(*args, **kwargs)
        adapter = self.adapter if config.use_chunked_loss else None
        asked = {"layers": config.use_fused_layers, "activations": config.activation_budget}
        switch_on(self, adapter, config.logits_budget, **asked)


@functools.cache
def pair(name: str) -> tuple[type, type]:
    """(Config, Trainer) of this name."""
    require_supported()
    adapter = ADAPTERS[name]
    stock_config, stock_trainer = (found_in_trl(adapter.stock + part) for part in ("Config", "Trainer"))
    flags = "`use_chunked_loss`, `use_fused_layers`, `logits_budget` and `activation_budget`"
    about = f"TRL's `{name}Config` with {flags}."
    given = {"__module__": __package__, "__doc__": about}
    config = type(f"{name}Config", (ChunkedLossConfigMixin, stock_config), given)
    same = "with `use_chunked_loss=True` the same loss without the full logits"
    about = f"TRL's `{name}Trainer`; {same}, with `use_fused_layers=True` the same model with fused layers."
    given = {"__module__": __package__, "__doc__": about, "adapter": adapter}
    return dataclass(config), type(f"{name}Trainer", (ChunkedLossTrainerMixin, stock_trainer), given)
