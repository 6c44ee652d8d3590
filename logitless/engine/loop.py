"""The chunk loop: run the steps of a plan.

The loop does not depend on features. `Projection` implements LoRA, layers and shards of the head, `Objective`
the kind of loss, and `Gradients` several heads and main gradients.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from logitless.engine.gradients import Gradients
from logitless.engine.objectives.base import Objective
from logitless.engine.plan import Plan
from logitless.engine.projection import Chunk, Projection
from logitless.engine.rows import Rows


def run(plan: Plan, rows: Rows, head: Projection, objective: Objective, gradients: Gradients) -> None:
    """Run the steps of `plan`: compute logits, statistics, loss and gradients, chunk by chunk.

    1. Allocate one buffer of logits for all chunks. The gradient of a chunk overwrites its logits.

    Then, for each step:

    2. `head.take`: take the chunk's hidden states, run the layers in front of the head, and convert the
       targets to columns of this rank's logits.
    3. `objective.fill`: compute the values of the reference or teacher, project the chunk (product 1), and
       compute its statistics if the step reads. One kernel may also write the gradient up to a factor per
       row.
    4. If `fill` wrote the gradient, queue product 2 (`head.backproject`) at once, and evaluate the loss on a
       side stream.
    5. `objective.evaluate`, if the step has a span: compute the loss of these rows, and its gradient with
       respect to their statistics.
    6. If the step writes and `fill` did not write the gradient: overwrite the logits with their gradient,
       then run product 2.
    7. `head.scale`: apply the row factors to d_features and to the features (or to a copy of them).
    8. `head.reduce`: start the sum of d_features over the ranks of tp_group.
    9. `gradients.add`: add the chunk's d_weight and d_bias (product 3) while this sum runs.
    10. `head.scatter`: wait for the sum, run the backward pass of the layers, and write the rows of d_hidden.

    FSDP2: the loop does not depend on it. The head is a gathered plain tensor, and its gradient is reduced
    after the backward pass of the Function.

    tp_group: all ranks run the same steps, because they plan for the largest shard. Step 3 gathers the
    statistics of a chunk from all shards and merges them. Steps 8 to 10 sum d_features. d_weight needs no
    collective.

    cp_group: the ranks have different rows, and may run different numbers of chunks. For a loss of sequences,
    all rows of a rank form one group, and the ranks exchange sums in the single evaluation (step 5). For a
    loss of single tokens, the loop has no collective, and `objectives.base.settled` sums the loss after the
    loop.

    torch.compile: the loop runs eagerly in the body of an operator (`operators`), and Dynamo does not trace
    it.
    """
    buffer, place = head.new_buffer(plan, fused_epilogue=objective.fused_epilogue)
    for step in plan.steps:
        size = step.stop - step.start
        chunk = None
        beside = nullcontext()
        if size:
            chunk = Chunk(step, rows.at(step.start, step.stop), buffer[:size], place[:size])
            head.take(chunk)  # features (C, H); targets as this rank's columns
            objective.fill(chunk, head)  # reference or teacher, product 1, statistics if the step reads
            # If `fill` wrote the gradient, only a factor per row is missing. Queue product 2 before the host
            # evaluates the loss, so that the GPU is busy during the evaluation.
            if chunk.gradient is not None:
                beside = side_stream(buffer.device, useful=step.evaluate is not None)
                head.backproject(chunk)  # product 2; nothing where hidden needs no gradient
        if step.evaluate is not None:
            with beside:  # tiny kernels that overlap product 2
                # The span may differ from the rows of this chunk. A rank without rows also evaluates, because
                # the evaluation may contain collectives.
                objective.evaluate(step.evaluate)
        if chunk is not None and step.write:
            if chunk.gradient is None:
                objective.write(chunk, head)
                head.backproject(chunk)
            chunk.factors = objective.row_factors(chunk)  # empty for a loss of logits
            head.scale(chunk)  # apply the factors to d_features and to the features of product 3
            arrival = head.reduce(chunk)  # start the sum over ranks
            gradients.add(chunk, head)  # product 3, overlaps the sum
            head.scatter(chunk, arrival)  # wait for the sum, layers backward, write rows of d_hidden


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device, *, useful: bool) -> AbstractContextManager:
    """Return a context whose body runs on a side stream, if the device is a GPU and `useful` is set.

    The evaluation of a loss launches about a hundred kernels of a few microseconds each, which can overlap a
    product.

    The body starts after all kernels that were queued before the call of this function. It overlaps kernels
    that are queued between this call and the `with` statement. At the end of the context, the main stream
    waits for the side stream.
    """
    if not useful or device.type != "cuda":
        return nullcontext()
    return _beside(device, torch.cuda.current_stream(device).record_event())


@contextmanager
def _beside(device: torch.device, queued_before: torch.cuda.Event) -> Iterator[None]:
    stream = _stream(device)
    main = torch.cuda.current_stream(device)
    stream.wait_event(queued_before)
    with torch.cuda.stream(stream):
        yield
    main.wait_stream(stream)
