"""FSDP2 in a training loop of your own: the loss from hidden states and a sharded head.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 8 examples/fsdp2.py --model Qwen/Qwen3-0.6B --steps 100 --batch-size 2

Three things differ from a loop over one GPU:

* Hidden states. FSDP gathers parameters when the module that it wraps is called. `model.model(ids)` on a
  wrapped `model` bypasses it, and would find the head, the embedding and the last norm in shards. So the
  loss is part of a module, `Trainee`, whose forward calls the backbone and uses the head; that is wrapped.
* Accumulation. Gradients are reduced with the last micro-batch alone.
* The mean. FSDP averages gradients over the ranks, whose numbers of tokens differ: every loss is divided by
  the tokens of all micro-batches of all ranks, over the number of ranks (`global_num_items`).
"""

from typing import Annotated

import torch
import torch.distributed as dist
import typer
from process_group import batch, model_of, process_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from logitless import CrossEntropyLoss, count_targets, global_num_items
from logitless.models import head_of


class Trainee(nn.Module):
    """A model that returns its loss: its parameters are whole while `forward` runs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.loss = model, CrossEntropyLoss()

    def forward(self, ids: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=ids).last_hidden_state
        return self.loss(hidden, head_of(self.model), labels, shift=True, num_items=num_items).loss


def sharded(model: nn.Module, device: torch.device) -> Trainee:
    """A group of parameters for each layer, and one for the rest: embedding, norm and head."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    trainee = Trainee(model.to(device))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(trainee, mesh=mesh)


def train(
    trainee: Trainee, device: torch.device, steps: int, batch_size: int, micro_batches: int, lr: float
) -> list[float]:
    """The mean loss of each step, over the tokens of all ranks."""
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=lr)  # made after the parameters were sharded
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(steps):
        first = (step * ranks + rank) * micro_batches
        micro = [batch(first + i, batch_size) for i in range(micro_batches)]
        count = sum(count_targets(labels, shift=True) for _, labels in micro)
        num_items, mean = global_num_items(count.to(device)), torch.zeros((), device=device)
        for i, (ids, labels) in enumerate(micro, 1):
            trainee.set_requires_gradient_sync(i == micro_batches)
            loss = trainee(ids.to(device), labels.to(device), num_items)
            loss.backward()
            mean += loss.detach()
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def main(
    model: Annotated[str, typer.Option(help="Name or path of a model. Default: a tiny one.")] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    batch_size: Annotated[int, typer.Option(help="Sequences of a micro-batch on each rank.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 2,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
) -> None:
    with process_group() as device:
        losses = train(sharded(model_of(model), device), device, steps, batch_size, micro_batches, lr)
        if dist.get_rank() == 0:
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {dist.get_world_size()} ranks")


if __name__ == "__main__":
    typer.run(main)
