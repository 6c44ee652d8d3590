"""`Adapter` describes how a TRL trainer gets the chunked loss; `enable` switches it on and off.

The constructors of our pairs and `apply_to` both call `enable`. It changes one trainer, whose methods are
replaced on the instance. The trainer's models and names in TRL's modules are replaced only while it computes
a loss (`ChunkedLoss.attached`). In between they are as TRL left them, for other trainers, copies and other
callers, and whatever was put on the model since then takes part in the next loss.

A replaced function may silently go unused, if TRL or the user calls another one. So each training step and
each evaluation step checks, before the optimizer's step, that every required seam was used, and that the
trainer's options are still those that the chunked loss supports.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from logitless.engine.plan import Plan
from logitless.errors import value_error
from logitless.losses.base import LossOutput
from logitless.models import heads
from logitless.models.logits import Deferral
from logitless.models.patch import Patch

from .versions import SUPPORTED, installed, moved, owner_in_trl

logger = logging.getLogger("logitless.trl_integration")

LIGER_LOSS = "fused_linear_cross_entropy"
# The trainer's chunked loss -> what attaches it to one of the trainer's models, for as long as it is active
Attach = Callable[["ChunkedLoss"], Callable[[PreTrainedModel], AbstractContextManager]]


@dataclass(frozen=True)
class Seam:
    """Replacement of a method or function of TRL.

    `use(chunked, stock, given)` is called in its place: `given` has the call's arguments by name, and
    `stock(**changes)` calls TRL's function with the same arguments, except the changes. `train` and
    `evaluate`: whether a training or evaluation step must use the seam. `replaces`: whether `use` never calls
    TRL's function, so that an override of the user's would be ignored too.
    """

    use: Callable[["ChunkedLoss", Callable, SimpleNamespace], Any]
    train: bool = False
    evaluate: bool = False
    replaces: bool = True


@dataclass(frozen=True)
class Adapter:
    """Description of one of TRL's trainers.

    Attributes:
        stock: "module:Name", where TRL keeps `NameConfig` and `NameTrainer`.
        checks: raise for a trainer whose loss the flag cannot compute; they run in every step.
        heads: by the attribute that holds a model, if any: attaches our head to it.
        patches: by name: a method of the trainer, or "module:name" or "module:Class.method" in a module of
            TRL.
        during: the trainer's methods while which names in modules are exchanged, models are attached, and
            `around` is entered. Models are attached during the whole step too.
        evaluates: whether an evaluation step computes the loss.
        predicts: whether an evaluation step that is asked for predictions, which are logits, is stock.
        notes: lines about a trainer's options, or None, that are logged after its first step.
        warnings: the same, logged as warnings.
    """

    stock: str
    checks: tuple[Callable[[Any], None], ...] = ()
    heads: Mapping[str, Attach] = field(default_factory=dict)
    patches: Mapping[str, Seam] = field(default_factory=dict)
    during: tuple[str, ...] = ("compute_loss",)
    around: Callable[["ChunkedLoss"], AbstractContextManager] = lambda chunked: nullcontext()
    evaluates: bool = True
    predicts: bool = False
    notes: tuple[Callable[[Any], str | None], ...] = ()
    warnings: tuple[Callable[[Any], str | None], ...] = ()

    @property
    def name(self) -> str:
        return self.stock.partition(":")[2]


class ChunkedLoss:
    """The chunked loss of one trainer, while it is switched on."""

    def __init__(self, trainer: Any, adapter: Adapter, budget: int | None):
        self.trainer = trainer
        self.adapter = adapter
        self.budget = budget
        self.plan: Plan | None = None  # of the last loss that was trained on
        # Whether a loss was computed with and without gradients; bools, as a compiled graph sets them.
        self.trained = self.evaluated = False
        self.used: set[str] = set()
        self.verified: set[str] = set()  # the kinds of steps that were checked at least once
        # What the heads of the models answer, kept from step to step.
        self.deferrals: WeakKeyDictionary[nn.Module, Deferral] = WeakKeyDictionary()
        self.sums: Any = None  # the options of a loss whose fields TRL only sums, while it computes that
        # In an evaluation step: whether predictions are asked for, and the stock loss with them.
        self.wants_logits = self.stock_only = False
        self.picking = False  # whether models answer with picked logits
        self.mask: Tensor | None = None  # (B, T), of the tokens that a self-distillation counts
        self.patch: Patch | None = None  # of a trainer outside of TRL
        self.undo: Callable[[], None] = lambda: None
        # By the trainer's attribute its model, and the model inside of that: Accelerate visits all modules to
        # unwrap one.
        self.bases: dict[str, tuple[Any, nn.Module]] = {}
        self.heads: dict[str, Callable[[PreTrainedModel], AbstractContextManager]] = {}

    def __deepcopy__(self, memo: dict) -> "ChunkedLoss":
        # A model that is copied with its head leaves the trainer where it is.
        return self

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the trainer's models have the forward passes of this chunked loss."""
        attach_of: dict[nn.Module, Callable] = {}
        for name, attach in self.heads.items():
            if (model := getattr(self.trainer, name, None)) is not None:
                wrapped, base = self.bases.get(name, (None, None))
                if wrapped is not model:
                    base = base_of(self.trainer, model)
                    self.bases[name] = model, base
                attach_of.setdefault(base, attach)  # a student may be its own teacher
        with ExitStack() as stack:
            for model, attach in attach_of.items():
                stack.enter_context(attach(model))
            yield

    def note(self, plan: Plan | None) -> None:
        """A loss was computed with this plan, which is None inside a compiled graph."""
        if torch.is_grad_enabled():
            self.trained = True
            self.plan = plan
        else:
            self.evaluated = True
        # A reference model's pass, which TRL makes after the policy's in a step, says little about the step.
        if torch.is_grad_enabled() or not (self.trained and self.trainer.model.training):
            self.trainer.last_plan = plan

    def saving(self) -> AbstractContextManager:
        """For a call of a loss: what it saves stays on the GPU under TRL's activation offloading, as the
        backward pass begins with it."""
        if not getattr(self.trainer.args, "activation_offloading", False):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    def solved(self, loss: Callable[..., LossOutput], *args: Any, **kwargs: Any) -> LossOutput:
        """The output of a loss."""
        with self.saving():
            out = loss(*args, **kwargs)
        self.note(out.plan)
        return out

    def methods(self) -> Iterator[tuple[str, Callable]]:
        """(name, what takes its place) of the trainer's methods."""
        patches = self.adapter.patches
        adapter = self.adapter
        for name in dict.fromkeys((*(place for place in patches if ":" not in place), *adapter.during)):
            stock = getattr(self.trainer, name, None)
            if stock is None:
                raise moved(f"{adapter.stock}Trainer.{name}")
            own = not is_of_trl(stock) and name in patches and patches[name].replaces
            if own:
                remedy = "train without the chunked loss, or leave that method as it is"
                found = getattr(stock, "__qualname__", repr(stock))
                raise value_error(name, f"TRL's own in {adapter.name}Trainer", found, remedy)
            ours = self._seam(name, patches[name], stock) if name in patches else self._looked_up(name, stock)
            yield name, self._during(ours, stock) if name in adapter.during else ours
        for name, step in (("training_step", self._train), ("prediction_step", self._evaluate)):
            stock = getattr(self.trainer, name)
            yield name, functools.wraps(stock)(functools.partial(step, stock))

    def _looked_up(self, name: str, stock: Callable) -> Callable:
        """A method of the trainer's class, which may be a seam itself when it is called."""
        if name in vars(self.trainer):
            return stock
        return lambda *args, **kwargs: getattr(type(self.trainer), name)(self.trainer, *args, **kwargs)

    def _seam(self, place: str, seam: Seam, stock: Callable) -> Callable:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def used(*args: Any, **kwargs: Any) -> Any:
            if self.stock_only:
                return stock(*args, **kwargs)
            self.used.add(place)
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()

            def as_meant(**changes: Any) -> Any:
                call.arguments.update(changes)
                return stock(*call.args, **call.kwargs)

            # A method of the user's own may take `**kwargs`.
            given = SimpleNamespace(**call.arguments, **call.arguments.get("kwargs", {}))
            return seam.use(self, as_meant, given)

        return used

    def _during(self, ours: Callable, stock: Callable) -> Callable:
        """`ours`, while which the names in TRL's modules are exchanged."""

        @functools.wraps(stock)
        def computes(*args: Any, **kwargs: Any) -> Any:
            if self.stock_only:
                return stock(*args, **kwargs)
            with ExitStack() as stack:
                for place, seam in self.adapter.patches.items():
                    if ":" in place:
                        owner, name = owner_in_trl(place)
                        seen = self._seam(place, seam, getattr(owner, name))
                        stack.enter_context(swapped(owner, **{name: seen}))
                stack.enter_context(self.attached())
                stack.enter_context(self.adapter.around(self))
                return ours(*args, **kwargs)

        return computes

    def _train(self, stock: Callable, *args: Any, **kwargs: Any) -> Tensor:
        self._begin()
        with self.attached():
            loss = stock(*args, **kwargs)
        self._end("train", loss, self.trained)
        return loss

    def _evaluate(
        self, stock: Callable, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        logits = not prediction_loss_only
        with swapped(self, wants_logits=logits, stock_only=self.adapter.predicts and logits):
            self._begin()
            with self.attached():
                outputs = stock(model, inputs, prediction_loss_only, *args, **kwargs)
            if self.adapter.evaluates and not self.stock_only:
                self._end("evaluate", outputs[0], self.evaluated)
        return outputs

    def check(self) -> None:
        """Raises where the trainer's options are not those of a chunked loss."""
        for check in (any_loss, *self.adapter.checks):
            check(self.trainer)

    def _begin(self) -> None:
        self.check()
        self.used.clear()
        self.trained = self.evaluated = False

    def _end(self, step: str, loss: Tensor | None, computed: bool) -> None:
        """Raises after a step that has a loss if it did not use what it has to use."""
        if loss is None:
            return
        seams = self.adapter.patches.items()
        unused = [place for place, seam in seams if getattr(seam, step) and place not in self.used]
        unused += [] if computed else ["the chunked loss"]
        # A batch without anything to learn from may skip the loss.
        if unused and bool((loss == 0).all()):
            return
        if unused:
            step_of = f"every step of {type(self.trainer).__name__} ({step})"
            found = f"trl {installed('trl')} (supported: {SUPPORTED['trl']})"
            remedy = "leave out a compute_loss of your own, or train without the flag"
            raise RuntimeError(
                f"{', '.join(unused)}: expected to be used by {step_of}, got a loss computed without it by "
                f"{found}; install that version, {remedy}."
            )
        first = step not in self.verified
        self.verified.add(step)
        if first and step == "train" and self.trainer.is_world_process_zero():
            logger.info(self.describe())
            name = type(self.trainer).__name__
            for log, notes in ((logger.info, self.adapter.notes), (logger.warning, self.adapter.warnings)):
                for line in [note(self.trainer) for note in notes]:
                    if line is not None:
                        log(f"{name}: {line}")

    def describe(self) -> str:
        """One line: trainer, plan, products, whether the model was checked, and what was fused in it."""
        head = base_of(self.trainer, self.trainer.model).get_output_embeddings()
        plan = self.plan
        what, checked = "chunked loss in a compiled model", "model not checked: TRL reads its head"
        if plan is not None:
            what = plan.describe()
        if self.patch is not None:
            checked = f"model {self.patch.checked}"
        elif (deferral := self.deferrals.get(head)) is not None:
            checked = f"head {'checked at step 1' if deferral.is_checked else 'not checked'}"
        layers = vars(self.trainer).get("fused_layers")
        fused = "" if layers is None else f"; {layers}"
        return f"{type(self.trainer).__name__}: {what}; {checked}{fused}"


def enable(trainer: Any, adapter: Adapter, budget: int | None) -> Callable[[], None]:
    """Switch the chunked loss on in a trainer; returns a function that switches it off again.

    Raises:
        ValueError: the trainer, its model or its options are not the adapter's.
        ImportError: TRL has moved something that the adapter replaces.
    """
    chunked = ChunkedLoss(trainer, adapter, budget)
    undo = ExitStack()
    chunked.check()
    chunked.heads.update({name: attach(chunked) for name, attach in adapter.heads.items()})
    with ExitStack() as failed:
        failed.callback(undo.close)
        for name, value in (("chunked_loss", chunked), ("last_plan", None), *chunked.methods()):
            before = {name: trainer.__dict__[name]} if name in trainer.__dict__ else {}
            undo.callback(trainer.__dict__.update, before)
            undo.callback(trainer.__dict__.pop, name, None)
            trainer.__dict__[name] = value
        failed.pop_all()
    chunked.undo = undo.close
    return undo.close


def is_of_trl(method: Callable) -> bool:
    """Whether a trainer's method, or what a partial of it calls, is TRL's."""
    while isinstance(method, functools.partial):
        method = method.func
    return getattr(method, "__module__", "").startswith("trl.")


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes that `owner` already has, and puts the old values back on the way out."""
    before = {name: getattr(owner, name) for name in values}
    inherited = [name for name in values if name not in vars(owner)]
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if name in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def base_of(trainer: Any, model: Any) -> PreTrainedModel:
    """The transformers model inside of the wrappers of distribution and PEFT."""
    return heads.base_of(trainer.accelerator.unwrap_model(model), keep_compiled=True)


def any_loss(trainer: Any) -> None:
    """Check the options that no trainer's chunked loss supports."""
    args = trainer.args
    remedy = "start it with torchrun or accelerate launch, or show it one GPU"
    if args.n_gpu > 1:
        found = f"nn.DataParallel over {args.n_gpu} GPUs"
        raise value_error("model", "one process per GPU", found, remedy)
    own = getattr(trainer, "compute_loss_func", None)
    found = "a function of the full logits"
    # With transformers before 5.19, TRL sets it to a string, which says something else.
    if callable(own):
        raise value_error("compute_loss_func", "None with the chunked loss", found, "leave it out")
    found = "an encoder-decoder"
    remedy = "train it without the flag"
    config = getattr(trainer.model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise value_error("model", "a decoder with the chunked loss", found, remedy)
    liger = (getattr(args, "liger_kernel_config", None) or {}).get(LIGER_LOSS, True) and args.use_liger_kernel
    if liger:
        expected = f"{LIGER_LOSS}=False with the chunked loss"
        remedy = "Liger's layers stay, so pass that"
        raise value_error("liger_kernel_config", expected, args.liger_kernel_config, remedy)
