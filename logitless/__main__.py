"""The commands of the library:

python -m logitless doctor
python -m logitless check yours.py:YourLoss
python -m logitless estimate DPOLoss --tokens 65536 --hidden-size 4096 --vocab-size 128256 --sequences 8
python -m logitless activations path/to/config.json --batch 4 --length 4096 --budget 12GiB
"""

import argparse
import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch

import logitless
from logitless.errors import to_bytes, value_error
from logitless.losses.base import LinearLoss
from logitless.tools.cards import CARDS
from logitless.tools.doctor import run_doctor
from logitless.tools.samples import Samples

BASES = ("LogitsLoss", "TokenLoss")
LOSSES = {
    name: kind
    for name, kind in vars(logitless.losses).items()
    if isinstance(kind, type) and issubclass(kind, LinearLoss) and name not in BASES
}
ESTIMATED = LOSSES | {"linear_logprobs": logitless.linear_logprobs}
NEEDED = {
    "tokens": "positions in all, padding included; all count as supervised",
    "hidden_size": "H, the width of the hidden states",
    "vocab_size": "V, the rows of the head",
}
SIZES = {
    "sequences": "of equal length; default: one, or one group",
    "steps": "S, for SpeculatorLoss",
    "heads": "how many there are beside the model's own, for MedusaLoss and MultiTokenLoss",
    "teacher_hidden_size": "H' of a teacher; default: H",
    "teacher_vocab_size": "V' of a teacher; default: V",
    "teacher_topk": "k, of a teacher that is known by its k best ids instead",
    "reference_hidden_size": "H' of a reference that comes as hidden states and head; default: log-probs",
}
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Tensors of a file that get a gradient in a check.
TRAINED = ("hidden", "weight", "bias")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m logitless", allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, what is accelerated, and a parity check of the main losses")
    _add_check(commands)
    _add_estimate(commands)
    _add_activations(commands)
    return made


def _add_check(commands: argparse._SubParsersAction) -> None:
    about = "compare a loss and its gradients, uncompiled, with the same loss on full logits in fp64"
    made = commands.add_parser("check", help=about, description=about, allow_abbrev=False)
    where = "a loss of the library, or one of your own: file.py:Class, or package.module:Class"
    made.add_argument("loss", metavar="LOSS", help=where)
    _add_options(made)
    file = "of torch.save: a dict of hidden, weight, targets and what else the call takes; default: random"
    made.add_argument("--tensors", type=Path, metavar="FILE", help=file)
    dtype = "of random hidden states and heads; default: float32"
    made.add_argument("--dtype", choices=DTYPES, default="float32", help=dtype)
    made.add_argument("--device", default="cpu", help="where the loss runs; default: cpu")


def _add_estimate(commands: argparse._SubParsersAction) -> None:
    about = "a call's plan, memory and products, before it runs"
    made = commands.add_parser("estimate", help=about, description=about, allow_abbrev=False)
    made.add_argument("loss", choices=ESTIMATED, metavar="LOSS", help=f"one of {', '.join(ESTIMATED)}")
    for name, text in (NEEDED | SIZES).items():
        option = f"--{name.replace('_', '-')}"
        made.add_argument(option, type=int, metavar="N", required=name in NEEDED, help=text)
    of_operands = "of hidden states and heads; default: bfloat16"
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16", help=of_operands)
    where = "one of this machine, where the call would run; default: the GPU, if there is one"
    made.add_argument("--device", help=where)
    card = f"a GPU that need not be here: one of {', '.join(CARDS)}"
    made.add_argument("--card", choices=CARDS, metavar="CARD", help=card)
    memory = "of a GPU that need not be here, such as 80GiB; with --card, in the place of that card's own"
    made.add_argument("--memory", metavar="SIZE", help=memory)
    frozen = "the head gets no gradient, and the hidden states alone do"
    made.add_argument("--frozen-head", action="store_true", help=frozen)
    _add_options(made)


def _add_activations(commands: argparse._SubParsersAction) -> None:
    about = "bytes that decoder layers keep for the backward pass, at each level of an activation budget"
    made = commands.add_parser("activations", help=about, description=about, allow_abbrev=False)
    made.add_argument("config", metavar="CONFIG", help="folder of a transformers model, or its config.json")
    made.add_argument("--batch", type=int, metavar="N", required=True, help="sequences of a batch")
    made.add_argument("--length", type=int, metavar="N", required=True, help="tokens of a sequence")
    budget = "also print the plan of this activation budget, such as 12GiB"
    made.add_argument("--budget", metavar="SIZE", help=budget)
    weights = "of the weights; default: bfloat16"
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16", help=weights)
    where = "where one layer of each kind runs, as kernels decide what is saved; default: the GPU, if any"
    made.add_argument("--device", help=where)
    frozen = "the layers' weights get no gradient, as the base of an adapter"
    made.add_argument("--frozen", action="store_true", help=frozen)
    stock = "run the model without fused layers; the level cheap is then unavailable"
    made.add_argument("--stock-layers", action="store_true", help=stock)


def _add_options(made: argparse.ArgumentParser) -> None:
    options = "an option of the loss, such as --set beta=0.2; again for others"
    made.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], type=_option, help=options)


def _option(text: str) -> tuple[str, object]:
    """NAME=VALUE: VALUE is a dtype of torch, a Python literal, or otherwise text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}; write beta=0.2.")
    if isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
        return name, getattr(torch, value.removeprefix("torch."))
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _loss_class(where: str) -> Callable[..., LinearLoss]:
    """A loss of the library by its name, or one of the user by file.py:Class or module:Class."""
    if where in LOSSES:
        return LOSSES[where]
    module, _, name = where.rpartition(":")
    if not module:
        names = ", ".join(LOSSES)
        remedy = f"write file.py:Class, or one of {names}"
        raise value_error("LOSS", "a loss of the library or file.py:Class", where, remedy)
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise value_error("LOSS", "a file with the loss", module, "check its path")
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded  # where dataclasses look for the names in annotations
        spec.loader.exec_module(loaded)
    else:
        loaded = importlib.import_module(module)
    if not hasattr(loaded, name):
        raise value_error("LOSS", f"a class in {module}", name, "check its name")
    found = getattr(loaded, name)
    if not (isinstance(found, type) and issubclass(found, LinearLoss)):
        raise value_error("LOSS", "a subclass of TokenLoss or LogitsLoss", name, "name the class of the loss")
    return found


def _load(file: Path, device: torch.device) -> dict[str, object]:
    """The arguments of a call, which `torch.save` has written."""
    try:
        call = torch.load(file, map_location=device, weights_only=True)
    except (KeyError, UnpicklingError) as error:
        remedy = "write it with torch.save(dict(hidden=..., weight=..., targets=...), FILE)"
        raise value_error("--tensors", "a file of tensors", f"{file} ({error})"[:300], remedy) from None
    if not isinstance(call, dict):
        raise value_error("--tensors", "a dict", type(call).__name__, "save the arguments by name")
    return call


def _check(options: dict[str, object]) -> int:
    loss = _loss_class(options["loss"])(**dict(options["set"]))
    device = torch.device(options["device"])
    if options["tensors"] is None:
        call = Samples(device, getattr(torch, options["dtype"])).draw_arguments(loss)
    else:
        call = _load(options["tensors"], device)
        for name in TRAINED:
            given = call.get(name)
            for x in given if isinstance(given, list | tuple) else (given,):
                if isinstance(x, torch.Tensor):
                    x.requires_grad_()
    # torch.compile would take a minute for a loss of logits on a CPU, and changes no formula.
    with torch.compiler.set_stance("force_eager"):
        report = logitless.check(loss, **call)
    print(report)
    return 0 if report else 1


def _estimate(options: dict[str, object]) -> int:
    name = options.pop("loss")
    loss = functools.partial(ESTIMATED[name], **dict(options.pop("set")))
    if name in LOSSES:
        loss = loss()
    dtype = getattr(torch, options.pop("dtype"))
    print(logitless.estimate(loss, dtype=dtype, **options))
    return 0


def _activations(options: dict[str, object]) -> int:
    from logitless.activations.table import activation_table

    budget = options.pop("budget")
    number = None if budget is None else to_bytes("--budget", budget)
    dtype = getattr(torch, options.pop("dtype"))
    table = activation_table(dtype=dtype, **options)
    print(table)
    if number is not None:
        print(f"\n{budget}: {table.plan(number).describe()}")
    return 0


RUNS = {"check": _check, "estimate": _estimate, "activations": _activations}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if all is well."""
    commands = parser()
    options = vars(commands.parse_args(arguments))
    command = options.pop("command")
    if command == "doctor":
        return run_doctor()
    try:
        return RUNS[command](options)
    except (TypeError, ValueError, RuntimeError, OSError, ImportError) as error:
        commands.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
