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
from logitless.doctor import examine
from logitless.losses.base import LinearLoss

BASES = ("LogitsLoss", "TokenLoss")
LOSSES = {
    name: kind
    for name, kind in vars(logitless.losses).items()
    if isinstance(kind, type) and issubclass(kind, LinearLoss) and name not in BASES
} | {"linear_logprobs": logitless.linear_logprobs}
NEEDED = ("tokens", "hidden_size", "vocab_size")
TEACHER = ("teacher_hidden_size", "teacher_vocab_size", "teacher_topk")
SIZES = ("sequences", "heads", *TEACHER, "reference_hidden_size")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m logitless", allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, what is accelerated, and a parity check of the main losses")
    asked = commands.add_parser(
        "estimate", help="a call's plan, memory and products, before it runs", allow_abbrev=False
    )
    asked.add_argument("loss", choices=LOSSES)
    for name in (*NEEDED, *SIZES):
        asked.add_argument(f"--{name.replace('_', '-')}", type=int, required=name in NEEDED)
    asked.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    asked.add_argument("--device", help="default: the GPU, if there is one")
    asked.add_argument("--frozen-head", action="store_true")
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
