"""Group relative policy optimization with TRL: log-probabilities, entropy and KL of the completions without
their logits.

    python examples/grpo.py     # a tiny model learns to write letters; offline, a few seconds on a CPU
    python examples/grpo.py --model Qwen/Qwen3-0.6B --dataset trl-lib/DeepMath-103K --steps 500
    --completion-tokens 1024 --output grpo

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

from logitless.trl_integration import GRPOConfig, GRPOTrainer


def letters(completions: list[str] | list[list[dict]], **_) -> list[float]:
    """The share of letters in a completion; put your own reward here."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in completions]
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts]


def main(
    model: Model = "",
    dataset: Data = "",
    steps: Steps = 15,
    batch_size: Batch = 8,
    output: Output = "",
    use_chunked_loss: Chunked = True,
    num_generations: Annotated[int, typer.Option(help="Completions of each prompt.")] = 8,
    completion_tokens: Annotated[int, typer.Option(help="Tokens of a completion at most.")] = 32,
) -> None:
    with workspace(output) as folder:
        start = model or tiny_model(folder)
        args = GRPOConfig(
            use_chunked_loss=use_chunked_loss,
            num_generations=num_generations,
            max_completion_length=completion_tokens,
            learning_rate=1e-6 if model else 1e-2,
            **settings(folder, steps, batch_size),
        )
        trainer = GRPOTrainer(
            start,
            reward_funcs=letters,
            args=args,
            train_dataset=data(dataset, ["prompt"]),
        )
        trainer.train()
        report(trainer, output, "reward")


if __name__ == "__main__":
    typer.run(main)
