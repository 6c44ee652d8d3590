"""The GPUs that `estimate` can plan for on a machine without them, and what was run on which device."""

from typing import NamedTuple

import torch

from logitless.errors import check_choice, to_bytes, value_error

GIB = 2**30


class Card(NamedTuple):
    """The properties of a GPU on which the plan of a call depends.

    Attributes:
        name: name such as "h100-80".
        memory: nominal memory in bytes; the driver reports a little less.
        generation: major version of the compute capability; 0 for other makers' GPUs.
    """

    name: str
    memory: int
    generation: int

    def __str__(self) -> str:
        return f"{self.name} ({self.memory / GIB:g} GiB)"


# (name, nominal memory in GiB, major version of the compute capability or 0).
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
        ("mi300x-192", 192, 0),
        ("mi350x-288", 288, 0),
        ("rtx3090-24", 24, 8),
        ("rtx4090-24", 24, 8),
        ("rtx5090-32", 32, 12),
        ("rx7900xtx-24", 24, 0),
    )
}


class Support(NamedTuple):
    """A row of the table of devices in docs/versions.md.

    Attributes:
        devices: names of the devices.
        architecture: compute capability such as "9.0", AMD's name such as "gfx942", or torch's device type.
        kernels: what runs there.
        state: what was done on such a device.
    """

    devices: str
    architecture: str
    kernels: str
    state: str


TRITON = "Triton kernels"
TWINS = "PyTorch code in the place of each kernel, in the same chunks"
TESTED, COMPILED, UNTRIED = "tested", "compiled, not run", "not tried"
SUPPORT = (
    Support("A100", "8.0", TRITON, COMPILED),
    Support("A10, A40, RTX 3090", "8.6", TRITON, COMPILED),
    Support("L4, L40S, RTX 4090", "8.9", TRITON, COMPILED),
    Support("H100, H200", "9.0", f"{TRITON}, and those for Hopper (bf16 operands)", TESTED),
    Support("B200", "10.0", TRITON, COMPILED),
    Support("RTX 5090", "12.0", TRITON, COMPILED),
    Support("other NVIDIA GPUs", "cuda", TRITON, UNTRIED),
    Support("AMD MI300", "gfx942", TRITON, COMPILED),
    Support("AMD MI350", "gfx950", TRITON, COMPILED),
    Support("AMD RX 7900", "gfx1100", TRITON, COMPILED),
    Support("other AMD GPUs", "hip", TRITON, UNTRIED),
    Support("Intel GPUs", "xpu", TRITON, UNTRIED),
    Support("CPU", "cpu", TWINS, TESTED),
    Support("Apple GPUs", "mps", f"{TWINS}; sums over sequences on the CPU", UNTRIED),
)


def find_support(device: torch.device) -> Support:
    """Return the row of `SUPPORT` for a device of this machine."""
    rows = {row.architecture: row for row in SUPPORT}
    if device.type != "cuda":  # the keys "cuda" and "hip" are for GPUs that no other row names
        return rows[device.type]
    gpu = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return rows.get(gpu.gcnArchName.partition(":")[0], rows["hip"])
    return rows.get(f"{gpu.major}.{gpu.minor}", rows["cuda"])


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
