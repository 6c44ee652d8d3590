"""What can be asked of an installation:

python -m logitless doctor
python -m logitless estimate DPOLoss --tokens 65536 --hidden-size 4096 --vocab-size 128256 --sequences 8
"""

import argparse
import ast
import functools
import sys
from collections.abc import Sequence

import torch

import logitless
from logitless.losses.base import LinearLoss
from logitless.tools.doctor import examine

BASES = ("LogitsLoss", "TokenLoss")
LOSSES = {
    name: kind
    for name, kind in vars(logitless.losses).items()
    if isinstance(kind, type) and issubclass(kind, LinearLoss) and name not in BASES
} | {"linear_logprobs": logitless.linear_logprobs}
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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m logitless", allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, what is accelerated, and a parity check of the main losses")
    asked = commands.add_parser(
        "estimate", help="a call's plan, memory and products, before it runs", allow_abbrev=False
    )
    asked.add_argument("loss", choices=LOSSES, metavar="LOSS", help=f"one of {', '.join(LOSSES)}")
    for name, text in (NEEDED | SIZES).items():
        option, needed = f"--{name.replace('_', '-')}", name in NEEDED
        asked.add_argument(option, type=int, metavar="N", required=needed, help=text)
    of_operands = "of hidden states and heads; default: bfloat16"
    asked.add_argument("--dtype", choices=DTYPES, default="bfloat16", help=of_operands)
    where = "one of this machine, where the call would run; default: the GPU, if there is one"
    asked.add_argument("--device", help=where)
    frozen = "the head gets no gradient, and the hidden states alone do"
    asked.add_argument("--frozen-head", action="store_true", help=frozen)
    options = "an option of the loss, such as --set beta=0.2; again for others"
    asked.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], type=_option, help=options)
    return made


def _option(text: str) -> tuple[str, object]:
    """NAME=VALUE, where what is no Python literal is a word, or a dtype of torch."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}; write beta=0.2.")
    if isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
        return name, getattr(torch, value.removeprefix("torch."))
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if all is well."""
    made = parser()
    given = vars(made.parse_args(arguments))
    if given.pop("command") == "doctor":
        return examine()
    name, options, dtype = given.pop("loss"), dict(given.pop("set")), given.pop("dtype")
    try:
        loss = functools.partial(LOSSES[name], **options)
        loss = loss if name == "linear_logprobs" else loss()
        found = logitless.estimate(loss, dtype=getattr(torch, dtype), **given)
    except (TypeError, ValueError, RuntimeError) as error:
        made.error(str(error))
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
