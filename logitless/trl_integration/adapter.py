"""`Adapter` describes how a TRL trainer gets the chunked loss; `enable` switches it on and off.

The trainers of this package and `apply_to` both call `enable`. It sets methods on one trainer's instance, and
installs dispatchers in TRL's classes and modules (`installed.py`), which run TRL's own functions for every
other trainer. The forward passes of the trainer's models are replaced only while the trainer computes a loss
(`ChunkedLossSession.attach_models`). Between two losses the models have the forward passes that TRL gave
them, so other trainers, copies and other callers see no change. A hook or wrapper that is added to a model
between two losses runs in the next loss.

A trainer may run inside of itself or of another trainer, and trainers may run in several threads. So nothing
is changed for the time of a call that other code could read, such as the trainer's options. What the chunked
loss has to know about a call is in the call: in its arguments, in the `ChunkedLossSession` of its trainer, or
in a context variable (`installed.computing_with`).

A replacement may silently go unused, if TRL or the user calls another function. So each training step and
each evaluation step checks, before the optimizer's step, that every required replacement was called, and that
the trainer's options are still those that the chunked loss supports.
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

from logitless.engine.head_view import PACKAGES, defined, is_of_user
from logitless.engine.plan import Plan
from logitless.errors import message, value_error
from logitless.losses.base import LossOutput
from logitless.models import heads
from logitless.models.logits import Deferral
from logitless.models.patch import Patch

from .installed import computing_with, install, reinstall
from .versions import SUPPORTED, import_from_trl, installed_version, missing_name_error

logger = logging.getLogger("logitless.trl_integration")

LIGER_LOSS = "fused_linear_cross_entropy"

# attach(model): a context manager inside of which the model has the forward pass of a chunked loss
Attach = Callable[[PreTrainedModel], AbstractContextManager]
MakeAttach = Callable[["ChunkedLossSession"], Attach]

# Values of `Replacement.required_in`
TRAIN = "train"
EVALUATE = "evaluate"
# Attributes of a trainer that hold models. Rollouts come from the first, or from an inference engine with a
# copy of its weights.
MODEL_ATTRIBUTES = ("model", "ref_model", "teacher_model")
EVERY_STEP = (TRAIN, EVALUATE)


@dataclass(frozen=True)
class Replacement:
    """Replacement of a method or function of TRL.

    Attributes:
        function: is called instead of TRL's function, as `function(session, original, arguments)`.
            `arguments` holds the arguments of the call by name. `original(**changes)` calls TRL's function,
            or the user's override of it, with the same arguments, except for `changes`.
        required_in: the kinds of steps, "train" and "evaluate", in which the replacement must be called.
        calls_original: whether `function` may call `original`. If it never does, a trainer that overrides the
            method is refused, because the override would be ignored.
        carrier: for "module:name", the argument whose `session` tells which chunked loss a call belongs to:
            logits. None: it belongs to the trainer that is computing its loss. For "module:Class.method" the
            argument is always `self`.
    """

    function: Callable[["ChunkedLossSession", Callable, SimpleNamespace], Any]
    required_in: tuple[str, ...] = ()
    calls_original: bool = False
    carrier: str | None = None


@dataclass(frozen=True)
class Adapter:
    """Description of one of TRL's trainers.

    Attributes:
        path: "module:Name" for the classes `NameConfig` and `NameTrainer` in TRL's module `module`.
        checks: functions of the trainer, called in every step. They raise if the chunked loss does not
            support the trainer's options.
        attachments: name of an attribute of the trainer that may hold a model -> function of the
            `ChunkedLossSession` that returns the `Attach` for this model.
        replacements: name of a method of the trainer, or path "module:name" or "module:Class.method" of a
            function of TRL -> its `Replacement`.
        active_during: names of methods of the trainer. While one of them runs, the trainer computes its loss:
            calls of the functions named by a path may belong to it, the models are attached and `context` is
            entered. Models are also attached during every training and prediction step.
        context: returns the context manager that is entered while a method of `active_during` runs.
        has_evaluation_loss: whether an evaluation step computes the loss.
        needs_original_to_predict: whether an evaluation step that has to return predictions, which are
            logits, runs without the chunked loss.
        notes: functions that return a line about a trainer's options, logged after its first step, or None.
        warnings: the same, logged as warnings.
        remedy: what a method of the user's has to do instead of computing the loss from full logits.
    """

    path: str
    checks: tuple[Callable[[Any], None], ...] = ()
    attachments: Mapping[str, MakeAttach] = field(default_factory=dict)
    replacements: Mapping[str, Replacement] = field(default_factory=dict)
    active_during: tuple[str, ...] = ("compute_loss",)
    context: Callable[["ChunkedLossSession"], AbstractContextManager] = lambda session: nullcontext()
    has_evaluation_loss: bool = True
    needs_original_to_predict: bool = False
    notes: tuple[Callable[[Any], str | None], ...] = ()
    warnings: tuple[Callable[[Any], str | None], ...] = ()
    remedy: str = "call TRL's method from it"

    @property
    def name(self) -> str:
        return self.path.partition(":")[2]


class ChunkedLossSession:
    """What the chunked loss of one trainer keeps from step to step, from `enable` until it is switched off.

    The functions of the adapter get it as `session`.
    """

    def __init__(self, trainer: Any, adapter: Adapter, logits_budget: int | str | None):
        self.trainer = trainer
        self.adapter = adapter
        self.logits_budget = logits_budget
        self.plan: Plan | None = None  # of the last loss with gradients
        # Whether this step computed a loss with gradients, and one without. Bools, because a compiled graph
        # sets them.
        self.has_loss_with_grad = False
        self.has_loss_without_grad = False
        self.called_replacements: set[str] = set()  # in this step
        self.verified_steps: set[str] = set()  # kinds of steps that passed `_end_step` at least once
        # The `Deferral` of each head, kept from step to step
        self.deferrals: WeakKeyDictionary[nn.Module, Deferral] = WeakKeyDictionary()
        # In an evaluation step: whether it returns predictions, and whether the original methods compute it
        self.needs_logits = False
        self.uses_original = False
        self.is_off = False  # whether it was switched off
        self.returns_gatherable_logits = False
        self.has_warned_of_empty_pair = False
        self.patch: Patch | None = None  # of the model of a trainer outside of TRL
        self.attach_functions: dict[str, Attach] = {}  # by the trainer's attribute
        self.methods: dict[str, Callable] = {}  # by name: those that are set on the trainer
        self.previous: dict[str, Callable] = {}  # those in their place before
        self.releases: dict[str, Callable[[], None]] = {}  # by the path of an installed function
        # By name: a value of the trainer, and the model inside of the value's wrappers. Looking it up in
        # every step would be slow, as Accelerate visits all modules.
        self.base_models: dict[str, tuple[Any, nn.Module]] = {}

    def __deepcopy__(self, memo: dict) -> "ChunkedLossSession":
        if id(self.trainer) in memo:
            # The methods of the copy would be those of this trainer.
            remedy = "call remove_from(trainer) before, and apply_to(copy), or construct another trainer"
            raise value_error("trainer", "one without the flag to copy", "use_chunked_loss=True", remedy)
        # A model that is copied with its head leaves the trainer where it is.
        return self

    @property
    def is_active(self) -> bool:
        """Whether the trainer computes its loss with the chunked loss."""
        return not (self.is_off or self.uses_original)

    def base_model(self, name: str, model: Any) -> nn.Module:
        """The model inside of the wrappers of `model`, which the trainer has under this name."""
        wrapped, base = self.base_models.get(name, (None, None))
        if wrapped is not model:
            base = unwrapped_base(self.trainer, model)
            self.base_models[name] = model, base
        return base

    @contextmanager
    def attach_models(self) -> Iterator[None]:
        """Context manager in which the trainer's models have the forward passes of this chunked loss."""
        attach_by_model: dict[nn.Module, Attach] = {}
        for name, attach in self.attach_functions.items():
            model = getattr(self.trainer, name, None)
            if model is not None:
                # A student may be its own teacher.
                attach_by_model.setdefault(self.base_model(name, model), attach)
        with ExitStack() as stack:
            for model, attach in attach_by_model.items():
                stack.enter_context(attach(model))
            yield

    def record_plan(self, plan: Plan | None) -> None:
        """Record that a loss was computed with this plan, which is None inside a compiled graph."""
        if torch.is_grad_enabled():
            self.has_loss_with_grad = True
            self.plan = plan
        else:
            self.has_loss_without_grad = True
        # In a training step TRL calls a reference model after the policy: its plan is not the step's.
        is_reference = not torch.is_grad_enabled() and self.has_loss_with_grad and self.trainer.model.training
        if not is_reference:
            self.trainer.last_plan = plan

    def without_offloading(self) -> AbstractContextManager:
        """Context manager for the call of a loss: under TRL's activation offloading, the tensors that the
        loss saves stay on the GPU, because the backward pass begins with them."""
        if not trl_option(self.trainer, "activation_offloading", False):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    def compute(self, loss: Callable[..., LossOutput], *args: Any, **kwargs: Any) -> LossOutput:
        """Call a loss and record its plan."""
        with self.without_offloading():
            output = loss(*args, **kwargs)
        self.record_plan(output.plan)
        return output

    def switch_on(self) -> None:
        """Set the methods on the trainer and install the functions of TRL.

        Raises:
            ImportError: TRL has no name of something that the adapter replaces.
            ValueError: the user has replaced something that the chunked loss would not call.
        """
        self.check_options()
        for name, make_attach in self.adapter.attachments.items():
            self.attach_functions[name] = make_attach(self)
        replaced = [name for name in self.adapter.replacements if ":" not in name]
        functions = {"training_step": self._training_step, "prediction_step": self._prediction_step}
        for name in (*replaced, *self.adapter.active_during):
            functions[name] = functools.partial(self._call_method, name)
        for name, function in functions.items():
            original = getattr(self.trainer, name, None)
            if original is None:
                raise missing_name_error(f"{self.adapter.path}Trainer.{name}")
            if name in replaced:
                self._check_not_replaced(name, original)
            self.methods[name] = functools.update_wrapper(functools.partial(function), original)
        self.install()
        attributes = vars(self.trainer)
        self.previous = {name: attributes[name] for name in functions if name in attributes}
        attributes.update(self.methods, chunked_loss=self, last_plan=None)

    def undo(self) -> None:
        """Switch the chunked loss off."""
        # A wrapper of the user's may go on calling our methods.
        self.is_off = True
        while self.releases:
            self.releases.popitem()[1]()
        attributes = vars(self.trainer)
        attributes.pop("chunked_loss", None)
        attributes.pop("last_plan", None)
        for name, method in self.methods.items():
            if attributes.get(name) is not method:
                continue  # the user has set another one since
            del attributes[name]
            if name in self.previous:
                attributes[name] = self.previous[name]

    def install(self) -> None:
        """Install the functions of TRL that the adapter replaces, unless they are installed.

        A function that the user has set in the place of one runs as it is, if the replacement would call it,
        and is refused otherwise.
        """
        for path, replacement in self.adapter.replacements.items():
            if ":" not in path:
                continue
            function = import_from_trl(path)
            if not is_from_trl(function):
                self._check_not_replaced(path, function)
            elif path in self.releases:
                reinstall(path)
            else:
                carrier = "self" if "." in path.partition(":")[2] else replacement.carrier
                self.releases[path] = install(path, carrier, self)

    def _check_not_replaced(self, path: str, function: Callable) -> None:
        """Raise ValueError if this is a function of the user's that the replacement would not call."""
        if not (is_from_trl(function) or self.adapter.replacements[path].calls_original):
            raise replaced_error(path, function, self.adapter.name)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context manager in which the trainer computes its loss."""
        self.install()
        with computing_with(self), self.attach_models(), self.adapter.context(self):
            yield

    def original(self, name: str) -> Callable:
        """The trainer's method without the chunked loss: of the instance, or of the class at this time."""
        if name in self.previous:
            return self.previous[name]
        cls = type(self.trainer)
        return inspect.getattr_static(cls, name).__get__(self.trainer, cls)

    def call_replacement(
        self,
        path: str,
        original: Callable,
        signature: inspect.Signature,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the replacement under this path with the arguments of a call of `original`."""
        self.called_replacements.add(path)
        # A user's override may take `**kwargs`, under any name.
        extra = next((x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD), None)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()

        def call_original(**changes: Any) -> Any:
            for name, value in changes.items():
                is_parameter = name in signature.parameters or extra is None
                (call.arguments if is_parameter else call.arguments[extra])[name] = value
            return original(*call.args, **call.kwargs)

        arguments = SimpleNamespace(**call.arguments, **call.arguments.get(extra, {}))
        return self.adapter.replacements[path].function(self, call_original, arguments)

    def _call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if not self.is_active:
            return self.original(name)(*args, **kwargs)
        with self.computing() if name in self.adapter.active_during else nullcontext():
            original = self.original(name)
            if name in self.adapter.replacements:
                return self.call_replacement(name, original, inspect.signature(original), args, kwargs)
            return original(*args, **kwargs)

    def _training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        original = self.original("training_step")
        if self.is_off:
            return original(*args, **kwargs)
        with self._step():
            with self.attach_models():
                loss = original(*args, **kwargs)
            self._end_step(TRAIN, loss, self.has_loss_with_grad)
        return loss

    def _prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        original = self.original("prediction_step")
        if self.is_off:
            return original(model, inputs, prediction_loss_only, *args, **kwargs)
        with self._step(needs_logits=not prediction_loss_only):
            with self.attach_models():
                outputs = original(model, inputs, prediction_loss_only, *args, **kwargs)
            if self.adapter.has_evaluation_loss and not self.uses_original:
                self._end_step(EVALUATE, outputs[0], self.has_loss_without_grad)
        return outputs

    @contextmanager
    def _step(self, needs_logits: bool = False) -> Iterator[None]:
        """Context manager of one step, which may be inside of another step of the trainer."""
        self.check_options()
        of_this_step = {
            "needs_logits": needs_logits,
            "uses_original": needs_logits and self.adapter.needs_original_to_predict,
            "called_replacements": set(),
            "has_loss_with_grad": False,
            "has_loss_without_grad": False,
        }
        with swap_attributes(self, **of_this_step):
            yield

    def check_options(self) -> None:
        """Raise ValueError if the chunked loss does not support the trainer's options."""
        for check in (check_common_options, *self.adapter.checks):
            check(self.trainer)

    def _end_step(self, step: str, loss: Tensor | None, has_chunked_loss: bool) -> None:
        """Raise RuntimeError if a step with a loss did not call every replacement that it requires; log a
        description after the first training step."""
        if loss is None:
            return
        unused = [
            path
            for path, replacement in self.adapter.replacements.items()
            if step in replacement.required_in and path not in self.called_replacements
        ]
        if not has_chunked_loss:
            unused.append("the chunked loss")
        # A batch without supervised tokens may skip the loss.
        if unused and bool((loss == 0).all()):
            return
        if unused:
            expected = f"to be called in every step of {type(self.trainer).__name__} ({step})"
            got, remedy = self._bypassed_by()
            raise RuntimeError(message(", ".join(unused), expected, got, remedy))
        is_first = step not in self.verified_steps
        self.verified_steps.add(step)
        if is_first and step == TRAIN and self.trainer.is_world_process_zero():
            logger.info(self.describe())
            name = type(self.trainer).__name__
            for log, notes in ((logger.info, self.adapter.notes), (logger.warning, self.adapter.warnings)):
                for note in notes:
                    line = note(self.trainer)
                    if line is not None:
                        log(f"{name}: {line}")

    def _bypassed_by(self) -> tuple[str, str]:
        """What computes the loss in the place of TRL's methods, and what to do about it."""
        overrides = user_methods(self.trainer)
        if not overrides:
            got = (
                f"a loss that trl {installed_version('trl')} computed without (supported: {SUPPORTED['trl']})"
            )
            return got, "train without the flag"
        got = ", ".join(f"{mine} in the place of {theirs}" for theirs, mine in overrides.items())
        return got, f"{self.adapter.remedy}, or train without the flag"

    def describe(self) -> str:
        """One line: trainer, plan, products, whether the model was checked, and the fused layers."""
        head = unwrapped_base(self.trainer, self.trainer.model).get_output_embeddings()
        deferral = self.deferrals.get(head)
        loss = "chunked loss in a compiled model" if self.plan is None else self.plan.describe()
        if self.patch is not None:
            checked = f"model {self.patch.checked}"
        elif deferral is not None:
            checked = f"head {'checked at step 1' if deferral.is_checked else 'not checked'}"
        else:
            checked = "model not checked: TRL reads its head"
        layers = vars(self.trainer).get("fused_layers")
        fused = "" if layers is None else f"; {layers}"
        return f"{type(self.trainer).__name__}: {loss}; {checked}{fused}"


def enable(trainer: Any, adapter: Adapter, logits_budget: int | str | None) -> Callable[[], None]:
    """Switch the chunked loss on in a trainer; returns a function that switches it off again.

    Raises:
        ValueError: the chunked loss does not support the trainer, its model or its options.
        ImportError: TRL has no name of something that the adapter replaces.
    """
    session = ChunkedLossSession(trainer, adapter, logits_budget)
    with ExitStack() as on_error:
        on_error.callback(session.undo)
        session.switch_on()
        on_error.pop_all()
    return session.undo


def replaced_error(path: str, found: Callable, trainer: str) -> ValueError:
    """The error for a function of TRL's that the user has replaced and the chunked loss would not call."""
    remedy = "train without the chunked loss, or leave that function as it is"
    return value_error(path, f"TRL's own in {trainer}Trainer", name_of(found), remedy)


def user_methods(trainer: Any) -> dict[str, str]:
    """The trainer's methods with a parameter `model` that are the user's: by the name of the method of TRL or
    transformers, the name of the user's."""
    found = {}
    for cls in type(trainer).__mro__:
        if cls.__module__.partition(".")[0] not in ("trl", "transformers"):
            continue
        for name, function in vars(cls).items():
            if name in found or not inspect.isfunction(function):
                continue
            method = getattr(trainer, name) if "model" in inspect.signature(function).parameters else None
            while method is not None and not is_of_user(method):
                method = getattr(method, "__wrapped__", None)  # inside of ours
            if method is not None:
                found[name] = f"{cls.__name__}.{name}", name_of(method)
    return dict(found.values())


def name_of(function: Callable) -> str:
    """The name of a function, inside decorators of packages, where it is defined: functools.wraps changes
    `__qualname__`."""
    function, module = defined(function)
    if module.partition(".")[0] in PACKAGES and hasattr(function, "__wrapped__"):
        return name_of(function.__wrapped__)
    return function.__code__.co_qualname if hasattr(function, "__code__") else repr(function)


def is_from_trl(method: Callable) -> bool:
    """Whether a method, or the function that a partial or a decorator of torch or TRL calls, is defined in
    TRL."""
    function, module = defined(method)
    is_decorator = module.partition(".")[0] in ("torch", "trl", "logitless", "contextlib")
    if is_decorator and hasattr(function, "__wrapped__"):
        return is_from_trl(function.__wrapped__)
    return module.startswith("trl.")


@contextmanager
def swap_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Context manager that sets existing attributes of `owner`, and restores their values on exit.

    Raises:
        AttributeError: `owner` has no attribute of that name.
    """
    previous = {name: getattr(owner, name) for name in values}
    inherited = [name for name in values if name not in vars(owner)]
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in previous.items():
            if name in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def trl_option(trainer: Any, name: str, default: Any) -> Any:
    """The value of an option of TRL's config for this trainer; `default` if that config has no such option. A
    field of that name in a config of the user's is the user's own."""
    return getattr(trainer.args, name) if _has_option(type(trainer.args), name) else default


@functools.cache
def _has_option(config_class: type, name: str) -> bool:
    classes = (cls for cls in config_class.__mro__ if cls.__module__.split(".")[0] == "trl")
    return name in getattr(next(classes, None), "__dataclass_fields__", ())


def unwrapped_base(trainer: Any, model: Any) -> PreTrainedModel:
    """The transformers model inside of the wrappers of distribution and PEFT."""
    return heads.base_of(trainer.accelerator.unwrap_model(model), keep_compiled=True)


def check_common_options(trainer: Any) -> None:
    """Raise ValueError for options that the chunked loss supports in no trainer."""
    args = trainer.args
    if args.n_gpu > 1:
        got = f"nn.DataParallel over {args.n_gpu} GPUs"
        remedy = "start it with torchrun or accelerate launch, or show it one GPU"
        raise value_error("model", "one process per GPU", got, remedy)
    # With transformers before 5.19, TRL sets `compute_loss_func` to a string, for another purpose.
    if callable(getattr(trainer, "compute_loss_func", None)):
        got = "a function of the full logits"
        raise value_error("compute_loss_func", "None with the chunked loss", got, "leave it out")
    config = getattr(trainer.model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        remedy = "train it without the flag"
        raise value_error("model", "a decoder with the chunked loss", "an encoder-decoder", remedy)
    liger_options = getattr(args, "liger_kernel_config", None) or {}
    if args.use_liger_kernel and liger_options.get(LIGER_LOSS, True):
        expected = f"{LIGER_LOSS}=False with the chunked loss"
        remedy = "Liger's layers stay, so pass that"
        raise value_error("liger_kernel_config", expected, args.liger_kernel_config, remedy)
