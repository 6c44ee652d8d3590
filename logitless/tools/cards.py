"""The GPUs that `estimate` can plan for on a machine without them."""

from typing import NamedTuple

from logitless.errors import check_choice, to_bytes, value_error

GIB = 2**30


class Card(NamedTuple):
    """The properties of a GPU on which the plan of a call depends.

    Attributes:
        name: name such as "h100-80".
        memory: nominal memory in bytes; the driver reports a little less.
        generation: major version of the compute capability.
    """

    name: str
    memory: int
    generation: int

    def __str__(self) -> str:
        return f"{self.name} ({self.memory / GIB:g} GiB)"


# (name, nominal memory in GiB, major version of the compute capability).
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


def find_card(card: str | None, memory: int | str | None) -> Card | None:
    """Return the card with a name, a memory in bytes or text, or both; None if neither is passed.

    A card without a name runs the portable Triton kernels, and none that is specific to a generation.

    Raises:
        ValueError: the name is unknown, or the memory is below 1 GiB.
    """
    if card is not None:
        check_choice("card", card, CARDS)
    if memory is None:
        return None if card is None else CARDS[card]
    memory = to_bytes("memory", memory)
    if memory < GIB:
        remedy = "pass bytes, or text such as 80GiB"
        raise value_error("memory", "at least 1 GiB in bytes", memory, remedy)
    return Card("GPU", memory, 0) if card is None else CARDS[card]._replace(memory=memory)
