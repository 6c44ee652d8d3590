"""Distillation with TRL: the divergence of student and teacher on the student's own completions, without the
logits of either.

    python examples/distill.py  # a tiny student learns from a wider, untrained teacher; offline, under half a
    minute on a CPU python examples/distill.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B --dataset
    trl-lib/DeepMath-103K --output distilled

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

from logitless.trl_integration import DistillationConfig, DistillationTrainer


def main(
    model: Model = "",
    dataset: Data = "",
    steps: Steps = 20,
    batch_size: Batch = 8,
    output: Output = "",
    use_chunked_loss: Chunked = True,
    teacher: Annotated[
        str,
        typer.Option(help="Name or path of the teacher, with the student's vocabulary. Default: a tiny one."),
    ] = "",
    completion_tokens: Annotated[int, typer.Option(help="Tokens of a completion at most.")] = 32,
    beta: Annotated[
        float, typer.Option(help="0: KL(teacher || student), 1: KL(student || teacher), else Jensen-Shannon.")
    ] = 0.5,
) -> None:
    with workspace(output) as folder:
        start = model or tiny_model(folder)
        taught_by = teacher or tiny_model(folder, hidden=128)
        args = DistillationConfig(
            use_chunked_loss=use_chunked_loss,
            beta=beta,
            max_completion_length=completion_tokens,
            learning_rate=1e-5 if model else 1e-2,
            **settings(folder, steps, batch_size),
        )
        trainer = DistillationTrainer(
            start,
            teacher_model=taught_by,
            args=args,
            train_dataset=data(dataset, ["prompt"]),
        )
        trainer.train()
        report(trainer, output)


if __name__ == "__main__":
    typer.run(main)
