"""GPUs that `estimate` can plan for on a machine without them."""

from typing import NamedTuple

from logitless.errors import check_choice, value_error

GIB = 2**30


class Card(NamedTuple):
    """A GPU, as the plan of a call depends on it.

    Attributes:
        name: such as "h100-80".
        memory: bytes, as sold; a driver reports a little less.
        generation: major number of the compute capability.
    """

    name: str
    memory: int
    generation: int

    def __str__(self) -> str:
        return f"{self.name} ({self.memory / GIB:g} GiB)"


# Memory in GiB as sold, and major number of the compute capability.
CARDS = {
    name: Card(name, memory * GIB, generation)
    for name, memory, generation in (
        ("a10-24", 24, 8),
        ("a100-40", 40, 8),
        ("a100-80", 80, 8),
        ("b200-180", 180, 10),
        ("h100-80", 80, 9),
        ("h100-94", 94, 9),
        ("h200-141", 141, 9),
        ("l4-24", 24, 8),
        ("l40s-48", 48, 8),
        ("rtx3090-24", 24, 8),
        ("rtx4090-24", 24, 8),
        ("rtx5090-32", 32, 12),
    )
}


def card_of(card: str | None, memory: int | None) -> Card | None:
    """The card that is asked for by name, by its memory in bytes or by both; None if by neither.

    Memory alone describes a GPU that runs the portable Triton kernels and has none for its generation.
    """
    if card is not None:
        check_choice("card", card, CARDS)
    if memory is None:
        return None if card is None else CARDS[card]
    if memory < GIB:
        remedy = "pass bytes, such as 80 * 2**30; 80GiB on the command line"
        raise value_error("memory", "at least 1 GiB in bytes", memory, remedy)
    return Card("GPU", memory, 0) if card is None else CARDS[card]._replace(memory=memory)
