"""Supervised fine-tuning with TRL, without the logits.

    python examples/sft.py      # a tiny model, offline, a few seconds on a CPU
    python examples/sft.py --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara --steps 1000 --batch-size 8
    --output sft

Other options: --help.
"""

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

from logitless.trl_integration import SFTConfig, SFTTrainer


def main(
    model: Model = "",
    dataset: Data = "",
    steps: Steps = 40,
    batch_size: Batch = 8,
    output: Output = "",
    use_chunked_loss: Chunked = True,
) -> None:
    with workspace(output) as folder:
        start = model or tiny_model(folder)
        args = SFTConfig(
            use_chunked_loss=use_chunked_loss,
            learning_rate=2e-5 if model else 3e-3,
            pad_to_multiple_of=8,  # ranks of context parallelism take two equal chunks of a sequence each
            **settings(folder, steps, batch_size),
        )
        trainer = SFTTrainer(start, args=args, train_dataset=data(dataset, ["text"]))
        trainer.train()
        report(trainer, output)


if __name__ == "__main__":
    typer.run(main)
