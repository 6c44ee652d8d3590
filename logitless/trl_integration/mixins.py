"""What every Config/Trainer pair shares: the flag, and the swap of TRL's fused head for ours.

A pair is two short classes:

    @dataclass
    class DPOConfig(ChunkedLossConfigMixin, trl.DPOConfig): ...

    class DPOTrainer(ChunkedLossTrainerMixin, trl.DPOTrainer):
        stock_module = trl.trainer.dpo_trainer

The constructors of TRL's trainers (SFT, DPO, KTO, GRPO, RLOO) call `add_fused_lm_head` for the policy, and
DPO uses the patched reference model before its constructor ends. So the name is exchanged in that trainer's
module, and only while it constructs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

from transformers import PreTrainedModel

from .head import Score, attach_chunked_head
from .per_token import PerTokenScore


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes that `owner` already has, and puts the old values back on the way out."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@dataclass
class ChunkedLossConfigMixin:
    """Adds `use_chunked_loss` and `logits_budget` to a TRL config.

    Raises:
        TypeError, ValueError: `logits_budget` is not a positive whole number of bytes, or given with the flag
            off.
        ValueError: the config, with the flag on, is given to a trainer that would ignore it.
    """

    use_chunked_loss: bool = field(
        default=False,
        metadata={
            "help": "Compute the loss from the hidden states and the LM head, chunk by chunk, without full "
            "logits."
        },
    )
    logits_budget: int | None = field(
        default=None,
        metadata={"help": "Bytes that the logits alive at one time may take. Unset: the library's default."},
    )

    # Whether one of our trainers is being constructed with this config
    _claimed = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logits_budget is None:
            return
        if not isinstance(self.logits_budget, int) or isinstance(self.logits_budget, bool):
            raise TypeError(
                f"logits_budget: expected a whole number of bytes, got {self.logits_budget!r}; 256 MiB is "
                f"256 * 2**20."
            )
        if self.logits_budget <= 0:
            raise ValueError(
                f"logits_budget: expected at least 1 byte, got {self.logits_budget}; leave it out for the "
                f"default."
            )
        if not self.use_chunked_loss:
            raise ValueError(
                f"logits_budget: expected None with use_chunked_loss=False, got {self.logits_budget}; set "
                f"use_chunked_loss=True."
            )

    @property
    def place_model_on_device(self) -> bool | None:
        # `Trainer.__init__` reads this overridable property of its arguments, and nothing else does: the one
        # moment at which a config can see that it came to a trainer that does not know the flag.
        if self.use_chunked_loss and not self._claimed:
            raise ValueError(
                "use_chunked_loss: expected a trainer that honours it, got one that would ignore it; import "
                "the trainer "
                "from logitless.trl_integration too."
            )
        return super().place_model_on_device


class ChunkedLossTrainerMixin:
    """Puts our head on the models of a TRL trainer, if its config says so.

    `last_plan` is the `plan` of the most recent loss call; None if there was none, or in a compiled model,
    which is traced before anything runs.
    """

    # The TRL module whose `add_fused_lm_head` the stock constructor calls; None if it calls none
    stock_module: ClassVar[ModuleType | None] = None
    last_plan: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        configs = (value for value in (*args, *kwargs.values()) if isinstance(value, ChunkedLossConfigMixin))
        config = next(configs, None)
        if config is None or not config.use_chunked_loss:
            super().__init__(*args, **kwargs)
            return
        # AsyncGRPO puts the head on before it keeps its arguments.
        self.args = config
        head = (
            nullcontext()
            if self.stock_module is None
            else swapped(self.stock_module, add_fused_lm_head=self._add_chunked_head)
        )
        with head, swapped(config, _claimed=True):
            super().__init__(*args, **kwargs)

    @property
    def uses_chunked_loss(self) -> bool:
        return getattr(self.args, "use_chunked_loss", False)

    def chunked_score(self, model: PreTrainedModel, **stock_options: Any) -> Score:
        """The scorer for `model`; `stock_options` are what TRL passes to `add_fused_lm_head` (`temperature`,
        `outputs`, …).

        By default per-token numbers, from which TRL's own code makes any of its losses and metrics.
        """
        # Only GRPO differentiates the entropy.
        differentiable = bool(getattr(self.args, "entropy_coef", 0.0))
        return PerTokenScore(self, model, differentiable_entropy=differentiable, **stock_options)

    def _add_chunked_head(self, model: PreTrainedModel, **stock_options: Any) -> None:
        attach_chunked_head(model, self.chunked_score(model, **stock_options))
