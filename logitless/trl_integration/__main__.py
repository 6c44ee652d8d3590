"""TRL's command line with the trainers of this package:

    python -m logitless.trl_integration sft --model_name_or_path MODEL --use_chunked_loss true ...
    accelerate launch -m logitless.trl_integration dpo --config dpo.yaml

The commands are TRL's own scripts, with TRL's arguments and YAML files. They use the Config and the Trainer
of this package, and so accept its options. Datasets and models are on the hub or on disk:
`datasets: [{path: json, data_files: rows.jsonl}]` in the YAML file reads a local one.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

import logitless.trl_integration as trl_integration

from .versions import require_supported

# By the command, which is the name of TRL's script: the name of the pair
COMMANDS = {name.lower(): name for name in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of TRL's scripts with the pair of this package.

    Args:
        arguments: the command and its arguments; default those of the process.

    Raises:
        SystemExit: the command is not one of `COMMANDS`, or TRL's parser or the trainer refuses an argument.
        ImportError: TRL or transformers is not installed, or not in a supported version.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command in ("-h", "--help"):
        print(__doc__, "\nCommands: " + ", ".join(COMMANDS))
        return
    if command not in COMMANDS:
        raise SystemExit(f"command: expected one of {', '.join(COMMANDS)}, got {command!r}; see --help.")
    require_supported()
    import trl

    from .adapter import swap_attributes

    script = import_module(f"trl.scripts.{command}")
    pair = COMMANDS[command]
    # The script imports these names from TRL when it runs.
    classes = {name: getattr(trl_integration, name) for name in (f"{pair}Config", f"{pair}Trainer")}
    with swap_attributes(trl, **classes):
        parser = script.make_parser(prog=f"python -m logitless.trl_integration {command}")
        script.main(*parser.parse_args_and_config(args=rest))


if __name__ == "__main__":
    main()
