"""TRL's SFT with `CrossEntropyLoss`: one walk over the logits (3 products, 2 with a frozen head) where TRL
takes two (4 and 3).

TRL's `compute_loss` sums and divides per-token numbers. The fused strategy needs no per-token
log-probabilities, it needs the sum. So our head hands over each field already summed, `compute_loss` runs as
TRL wrote it, and what it does about gradient accumulation, parallelism, the router loss and the logs stays
TRL's. Label smoothing, for which TRL builds the full logits, is part of the same walk.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from logitless import CrossEntropyLoss
from logitless.engine.head_view import HeadView
from logitless.errors import expect

from .adapter import Adapter, ChunkedLoss, Seam, base_of, swapped


def heads(chunked: ChunkedLoss) -> Iterator[Callable[[], None]]:
    model, args = base_of(chunked.trainer, chunked.trainer.model), chunked.trainer.args
    loss = CrossEntropyLoss(
        reduction="sum",
        dft=args.loss_type == "dft",
        label_smoothing=args.label_smoothing_factor,
        logits_budget=chunked.budget,
    )

    def score(hidden: Tensor, head: HeadView, labels: Tensor, shift: bool) -> dict[str, Tensor]:
        output = chunked.solved(loss, hidden, head, labels, shift=shift)
        count = output.metrics["num_tokens"]
        return {
            "log_probs": -output.loss,
            "entropy": output.metrics["entropy"] * count,
            "is_top1": output.metrics["token_accuracy"] * count,
            "label_mask": count,
        }

    yield chunked.attach(model, score)


def compute_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    # DFT's weights and the smoothing are in the sum already; all that TRL has left to do is the plain loss's
    # part.
    trainer = chunked.trainer
    with swapped(trainer.args, loss_type="nll"), swapped(trainer, label_smoother=None):
        return stock()


def smoothing_is_defined(trainer: Any) -> None:
    args, name, smoothing = trainer.args, "label_smoothing_factor", trainer.args.label_smoothing_factor
    remedy = "the DFT loss is not smoothed, so leave it out"
    expect(args.loss_type != "dft" or not smoothing, name, "0 with loss_type='dft'", smoothing, remedy)
    expected = "0 for a model with a router loss"
    remedy = "TRL leaves that out of a smoothed loss: set router_aux_loss_coef=0.0, or no smoothing"
    expect(not trainer.aux_loss_enabled or not smoothing, name, expected, smoothing, remedy)


SFT = Adapter(
    "trl:SFT",
    checks=(smoothing_is_defined,),
    heads=heads,
    patches={"compute_loss": Seam(compute_loss, train=True, evaluate=True, replaces=False)},
)
