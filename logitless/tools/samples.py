"""Random arguments for a call of a loss, used by `doctor` and `python -m logitless check`."""

import torch
from torch import Tensor

from logitless.engine.spec import Role
from logitless.losses import GRPOLoss, KTOLoss, MedusaHeads, MedusaLoss, MultiTokenLoss, SpeculatorLoss
from logitless.losses.linear import LinearLoss
from logitless.losses.policy import PolicyLoss
from logitless.losses.reference_model import ComparedLoss


class Samples:
    """Draws random tensors for sequences whose last three tokens are ignored.

    Args:
        device: device of all tensors.
        dtype: dtype of hidden states and heads.
        sequences: number of sequences, B.
        length: number of tokens in each sequence, T.
        hidden_size: H.
        vocab_size: V.
        seed: seed of the random numbers.
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

    def draw_arguments(self, loss: LinearLoss) -> dict[str, object]:
        """Return hidden, weight, targets and the inputs that the loss requires, by name."""
        targets = torch.randint(self.vocab_size, self.tokens, generator=self.generator, device=self.device)
        targets[targets == loss.ignore_index] = 1 if loss.ignore_index != 1 else 2
        targets[:, -3:] = loss.ignore_index
        hidden: object = self.draw_hidden()
        weight: object = self.draw_head()
        inputs: dict[str, object] = {}
        if isinstance(loss, MultiTokenLoss | SpeculatorLoss):
            hidden = [hidden, self.draw_hidden()]
            if isinstance(loss, SpeculatorLoss):
                inputs = self._draw_library_inputs(loss)
        elif isinstance(loss, MedusaLoss):
            inputs["base_weight"] = weight
            weight = MedusaHeads(self.hidden_size, self.vocab_size, 2, device=self.device, dtype=self.dtype)
        elif type(loss).__module__.startswith("logitless."):
            inputs = self._draw_library_inputs(loss)
        else:
            inputs = {name: self._draw_declared_input(role, name) for name, role in loss.roles.items()}
        return {"hidden": hidden, "weight": weight, "targets": targets} | inputs

    def draw_normal(self, *shape: int) -> Tensor:
        """Return standard normal random numbers in fp32."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)

    def draw_hidden(self) -> Tensor:
        """Return hidden states (B, T, H) that require a gradient."""
        return self.draw_normal(*self.tokens, self.hidden_size).to(self.dtype).requires_grad_()

    def draw_head(self) -> Tensor:
        """Return a head (V, H) that requires a gradient."""
        return (self.draw_normal(self.vocab_size, self.hidden_size) / 4).to(self.dtype).requires_grad_()

    def _draw_library_inputs(self, loss: LinearLoss) -> dict[str, object]:
        """Return the inputs that a loss of the library requires."""
        inputs: dict[str, object] = {}
        if isinstance(loss, PolicyLoss):
            inputs["advantages"] = self.draw_normal(self.tokens[0])
            if loss.corrections:
                inputs["sampling_logps"] = self.draw_normal(*self.tokens) - 6
        if isinstance(loss, GRPOLoss) or getattr(loss, "old_kl_coef", 0.0):
            inputs["old_logps"] = self.draw_normal(*self.tokens) - 6
        if isinstance(loss, KTOLoss):
            inputs["labels"] = torch.arange(self.tokens[0], device=self.device) % 2 == 0
            inputs["kl"] = 0.1 if loss.loss_type == "kto" else None
        if isinstance(loss, ComparedLoss) and loss.needs_reference:
            inputs["ref_logps"] = self.draw_normal(*self.tokens) - 6
        if getattr(loss, "teacher", False):
            inputs["teacher_hidden"] = self.draw_hidden().detach()
            inputs["teacher_weight"] = self.draw_head().detach()
        return inputs

    def _draw_declared_input(self, role: Role, name: str) -> Tensor | None:
        """Return an input that a custom loss declares."""
        if name.endswith("_bias"):
            return None
        if role is Role.FEATURES:
            return self.draw_hidden().detach()
        if role is Role.HEAD:
            return self.draw_head().detach()
        shapes = {Role.SEQUENCE: self.tokens[:1], Role.VOCABULARY: (self.vocab_size,), Role.WHOLE: ()}
        return self.draw_normal(*shapes.get(role, self.tokens))
