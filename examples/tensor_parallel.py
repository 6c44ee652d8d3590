"""Tensor parallelism with a vocabulary-parallel loss: no rank has the whole head, and none has its logits.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --model meta-llama/Llama-3.2-1B --steps 100

Every rank has the same batch. The head is a DTensor in shards of rows, which goes to the loss as it is, with
`tp_group`: it is not gathered. Optimizer and clipping take parameters mesh by mesh, as what is split over the
ranks (DTensors) and what is replicated (plain tensors) do not mix in one fused or foreach operation.
"""

from collections import defaultdict
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from process_group import batch, model_of, process_group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from logitless import CrossEntropyLoss

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A Llama whose layers and head are spread over the mesh; embedding and norms are replicas."""
    for layer in model.base_model.layers:
        plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
        parallelize_module(layer, mesh, plan)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    return model


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one mesh each: those of plain tensors apart."""
    groups = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return list(groups.values())


def clip(groups: list[list[nn.Parameter]], max_norm: float) -> Tensor:
    """The norm of all gradients before clipping; every group is scaled by the same factor."""
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(norms).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def train(model: nn.Module, device: torch.device, steps: int, batch_size: int, lr: float) -> list[float]:
    """The loss of each step."""
    groups = by_mesh([p for p in model.parameters() if p.requires_grad])
    options = {"lr": lr, "fused": device.type == "cuda"}
    optimizers = [torch.optim.AdamW(group, **options) for group in groups]
    loss, losses = CrossEntropyLoss(tp_group="tp"), []  # the dimension of the head's mesh
    for step in range(steps):
        ids, labels = (x.to(device) for x in batch(step, batch_size))
        hidden = model.base_model(input_ids=ids).last_hidden_state
        out = loss(hidden, model.lm_head.weight, labels, shift=True)
        out.loss.backward()
        clip(groups, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(out.loss.item())
    return losses


def main(
    model: Annotated[str, typer.Option(help="Name or path of a Llama. Default: a tiny one.")] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    batch_size: Annotated[int, typer.Option(help="Sequences of a batch.")] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
) -> None:
    with process_group() as device:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        losses = train(split(model_of(model).to(device), mesh), device, steps, batch_size, lr)
        if dist.get_rank() == 0:
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {dist.get_world_size()} ranks")


if __name__ == "__main__":
    typer.run(main)
