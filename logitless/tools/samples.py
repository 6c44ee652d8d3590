"""Random arguments for a call of a loss, which `doctor` and `python -m logitless check` call it with."""

import torch
from torch import Tensor

from logitless.engine.spec import Role
from logitless.losses import GRPOLoss, KTOLoss, MedusaHeads, MedusaLoss, MultiTokenLoss, SpeculatorLoss
from logitless.losses.linear import LinearLoss
from logitless.losses.policy import PolicyLoss
from logitless.losses.reference_model import ComparedLoss


class Samples:
    """Draws tensors for `sequences` sequences of `length` tokens each, the last three ignored.

    Args:
        device: of all tensors.
        dtype: of hidden states and heads.
        sequences: B.
        length: T.
        hidden_size: H.
        vocab_size: V.
        seed: of the random numbers.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        sequences: int = 4,
        length: int = 13,
        hidden_size: int = 32,
        vocab_size: int = 997,
        seed: int = 0,
    ):
        self.device = device
        self.dtype = dtype
        self.tokens = (sequences, length)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.generator = torch.Generator(device).manual_seed(seed)

    def call(self, loss: LinearLoss) -> dict[str, object]:
        """What a loss is called with, by argument: hidden, weight, targets, and the inputs that it needs."""
        targets = torch.randint(self.vocab_size, self.tokens, generator=self.generator, device=self.device)
        targets[:, -3:] = -100
        hidden: object = self.hidden()
        weight: object = self.head()
        inputs: dict[str, object] = {}
        if isinstance(loss, MultiTokenLoss | SpeculatorLoss):
            hidden = [hidden, self.hidden()]
            if isinstance(loss, SpeculatorLoss):
                inputs = self._inputs_of_ours(loss)
        elif isinstance(loss, MedusaLoss):
            inputs["base_weight"] = weight
            weight = MedusaHeads(self.hidden_size, self.vocab_size, 2, device=self.device, dtype=self.dtype)
        elif type(loss).__module__.startswith("logitless."):
            inputs = self._inputs_of_ours(loss)
        else:
            inputs = {name: self._declared(role, name) for name, role in loss.roles.items()}
        return {"hidden": hidden, "weight": weight, "targets": targets} | inputs

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in fp32."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)

    def hidden(self) -> Tensor:
        """(B, T, H), of which a gradient is wanted."""
        return self.normal(*self.tokens, self.hidden_size).to(self.dtype).requires_grad_()

    def head(self) -> Tensor:
        """(V, H), of which a gradient is wanted."""
        return (self.normal(self.vocab_size, self.hidden_size) / 4).to(self.dtype).requires_grad_()

    def _inputs_of_ours(self, loss: LinearLoss) -> dict[str, object]:
        """The inputs without which a loss of the library cannot be called."""
        made: dict[str, object] = {}
        if isinstance(loss, PolicyLoss):
            made["advantages"] = self.normal(self.tokens[0])
        if isinstance(loss, GRPOLoss):
            made["old_logps"] = self.normal(*self.tokens) - 6
        if isinstance(loss, KTOLoss):
            made["labels"] = torch.arange(self.tokens[0], device=self.device) % 2 == 0
            made["kl"] = 0.1 if loss.loss_type == "kto" else None
        if isinstance(loss, ComparedLoss) and loss.needs_reference:
            made["ref_logps"] = self.normal(*self.tokens) - 6
        if getattr(loss, "teacher", False):
            made["teacher_hidden"] = self.hidden().detach()
            made["teacher_weight"] = self.head().detach()
        return made

    def _declared(self, role: Role, name: str) -> Tensor | None:
        """An input that a loss of a user's own declares."""
        if name.endswith("_bias"):
            return None
        if role is Role.FEATURES:
            return self.hidden().detach()
        if role is Role.HEAD:
            return self.head().detach()
        shapes = {Role.SEQUENCE: self.tokens[:1], Role.VOCABULARY: (self.vocab_size,), Role.WHOLE: ()}
        return self.normal(*shapes.get(role, self.tokens))
