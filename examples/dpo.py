"""Direct preference optimization with TRL: every loss type, the reference included, under one budget for the
logits.

    python examples/dpo.py      # a tiny model learns to prefer code to cODE; offline, a few seconds on a CPU
    python examples/dpo.py --model Qwen/Qwen3-0.6B --dataset trl-lib/ultrafeedback_binarized --steps 1000
    --output dpo

Other options: --help.
"""

from typing import Annotated

import typer
from tiny_start import (
    Batch,
    Chunked,
    Data,
    Model,
    Output,
    Steps,
    data,
    report,
    settings,
    tiny_model,
    workspace,
)

from logitless.trl_integration import DPOConfig, DPOTrainer


def main(
    model: Model = "",
    dataset: Data = "",
    steps: Steps = 30,
    batch_size: Batch = 4,
    output: Output = "",
    use_chunked_loss: Chunked = True,
    loss_type: Annotated[str, typer.Option(help="Any of TRL's loss types.")] = "sigmoid",
) -> None:
    with workspace(output) as folder:
        start = model or tiny_model(folder)
        args = DPOConfig(
            use_chunked_loss=use_chunked_loss,
            loss_type=[loss_type],
            learning_rate=1e-6 if model else 1e-3,
            **settings(folder, steps, batch_size),
        )
        rows = data(dataset, ["prompt", "chosen", "rejected"])
        trainer = DPOTrainer(start, args=args, train_dataset=rows)
        trainer.train()
        report(trainer, output, "rewards/accuracies")


if __name__ == "__main__":
    typer.run(main)
