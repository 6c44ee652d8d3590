"""The chunk loop: the one place where the steps of a plan are carried out.

A feature is a matter of the Projection, of the Objective or of the Gradients; none of them is a branch here.
"""

from contextlib import nullcontext

from logitless.engine.chunk import Chunk
from logitless.engine.gradients import Gradients
from logitless.engine.objectives.base import Objective
from logitless.engine.plan import Plan
from logitless.engine.projection import Projection
from logitless.engine.rows import Rows
from logitless.engine.side_stream import side_stream


def run(plan: Plan, rows: Rows, head: Projection, objective: Objective, gradients: Gradients) -> None:
    """Project each chunk, read it, evaluate the loss once its inputs are complete, multiply the gradient out.

    One buffer of logits is alive; their gradient overwrites them.
    """
    buffer, place = head.new_buffer(plan, in_product=objective.in_product)
    for step in plan.steps:
        size, chunk, beside = step.stop - step.start, None, nullcontext()
        if size:
            chunk = Chunk(step, rows.at(step.start, step.stop), buffer[:size], place[:size])
            head.take(chunk)  # features (C, H); targets as this rank's columns
            objective.fill(chunk, head)  # reference or teacher, product 1, numbers if the step reads
            # A gradient that is there already lacks only a factor per row: the GPU is given product 2 before
            # the host evaluates the loss.
            if chunk.gradient is not None:
                beside = side_stream(buffer.device, useful=step.evaluate is not None)
                head.backproject(chunk)  # product 2; nothing where hidden needs no gradient
        if step.evaluate is not None:
            with beside:  # tiny kernels, hidden behind product 2
                # A span, often not this chunk's rows; also on a rank that has none.
                objective.evaluate(step.evaluate)
        if chunk is not None and step.write:
            if chunk.gradient is None:
                objective.write(chunk, head)
                head.backproject(chunk)
            chunk.factors = objective.row_factors(chunk)  # none for a loss of logits
            head.scale(chunk)  # factors onto d_features, and onto a copy of the features
            arrival = head.reduce(chunk)  # the ranks' sum starts
            gradients.add(chunk, head)  # product 3, overlapping that sum
            head.scatter(chunk, arrival)  # wait, layers backward, rows into d_hidden
