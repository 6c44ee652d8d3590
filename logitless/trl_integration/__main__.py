"""TRL's command line with our trainers:

    python -m logitless.trl_integration sft --model_name_or_path MODEL --use_chunked_loss true ...
    accelerate launch -m logitless.trl_integration dpo --config dpo.yaml

The commands are TRL's own scripts, with TRL's arguments and YAML files, in which the names of Config and
Trainer mean ours; trainers for which TRL has no script are started by that of their kin. Datasets and models
are on the hub or on disk: `datasets: [{path: json, data_files: rows.jsonl}]` in the YAML file reads a local
one.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import trl
from transformers import AutoTokenizer

import logitless.trl_integration as ours

from .adapter import swapped

# Command -> the pair, and TRL's script that starts it: "grpo" is the one that takes reward functions.
COMMANDS = {
    "sft": ("SFT", "sft"),
    "dpo": ("DPO", "dpo"),
    "kto": ("KTO", "kto"),
    "grpo": ("GRPO", "grpo"),
    "rloo": ("RLOO", "rloo"),
    "distillation": ("Distillation", "distillation"),
    "orpo": ("ORPO", "dpo"),
    "cpo": ("CPO", "dpo"),
    "tpo": ("TPO", "dpo"),
    "gkd": ("GKD", "dpo"),
    "online_dpo": ("OnlineDPO", "grpo"),
    "a2po": ("A2PO", "grpo"),
    "gmpo": ("GMPO", "grpo"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of TRL's scripts with our pair.

    Raises:
        SystemExit: without a known command, or with arguments that TRL's parser, or the trainer, refuses.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command in ("-h", "--help"):
        print(__doc__, "\nCommands: " + ", ".join(COMMANDS))
        return
    if command not in COMMANDS:
        raise SystemExit(f"command: expected one of {', '.join(COMMANDS)}, got {command!r}; see --help.")
    kind, name = COMMANDS[command]
    script, trainer = import_module(f"trl.scripts.{name}"), getattr(ours, f"{kind}Trainer")
    own, trainer = COMMANDS[name][0], trainer if command == name else from_script(trainer)
    # The scripts import these names when they run.
    with swapped(trl, **{f"{own}Config": getattr(ours, f"{kind}Config"), f"{own}Trainer": trainer}):
        parser = script.make_parser(prog=f"python -m logitless.trl_integration {command}")
        script.main(*parser.parse_args_and_config(args=rest))


def from_script(trainer: type) -> Callable[..., Any]:
    """Constructs `trainer` from what a script passes to the trainer of its own pair."""
    stock = next(base for base in trainer.__mro__ if base.__module__.startswith("trl."))
    takes = inspect.signature(stock.__init__).parameters

    def build(*, model: str, args: Any, **given: Any) -> Any:
        if "kwargs" in takes:
            return trainer(model=model, args=args, **given)
        refused = [name for name, value in given.items() if name not in takes and value]
        if refused:
            raise SystemExit(
                f"{refused[0]}: expected None for {stock.__name__}, which takes none; leave its options out."
            )
        given = {name: value for name, value in given.items() if name in takes}
        if "teacher_model" in takes:
            given["teacher_model"] = args.teacher_model_name_or_path or model
        options = {
            "revision": args.model_init_kwargs["revision"],
            "trust_remote_code": args.trust_remote_code,
        }
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", **options)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return trainer(model=model, args=args, processing_class=tokenizer, **given)

    return build


if __name__ == "__main__":
    main()
