"""`GRPOLoss(loss_type="gmpo")` and the loss of TRL's GMPOTrainer, of the same log-probabilities."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from logitless import GRPOLoss

pytest.importorskip("trl")
B, T, H, V = 4, 6, 5, 30


def trls(logps: Tensor, x: SimpleNamespace, beta: float) -> Tensor:
    from trl.experimental.gmpo import GMPOTrainer

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *given, **options: (logps, torch.zeros_like(logps), None),
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        epsilon_low=0.3,
        epsilon_high=0.4,
        beta=beta,
    )
    prompt = torch.zeros(B, 1, dtype=torch.int64)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt + 1, "completion_ids": x.targets}
    inputs |= {"completion_mask": x.mask.long(), "advantages": x.advantages}
    inputs |= {"old_per_token_logps": x.old, "ref_per_token_logps": x.ref}
    return GMPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_gmpo(spread, beta):
    make = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    x = SimpleNamespace(hidden=random(B, T, H), weight=random(V, H), advantages=random(B))
    x.targets = torch.randint(0, V, (B, T), generator=make)
    x.mask = torch.arange(T) < torch.tensor([[6], [4], [1], [5]])
    logps = (x.hidden @ x.weight.T).log_softmax(-1).gather(-1, x.targets[..., None])[..., 0]
    x.old, x.ref = logps + spread * random(B, T), logps + spread * random(B, T)
    loss = GRPOLoss(loss_type="gmpo", epsilon=0.3, epsilon_high=0.4, beta=beta, use_bias_correction_kl=False)
    given = {"mask": x.mask, "advantages": x.advantages, "old_logps": x.old}
    given |= {"ref_logps": x.ref} if beta else {}

    def stock(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        return trls(logits.log_softmax(-1).gather(-1, x.targets[..., None])[..., 0], x, beta)

    actual = []
    for call in (lambda h, w: loss(h, w, x.targets, **given).loss, stock):
        leaves = x.hidden.clone().requires_grad_(), x.weight.clone().requires_grad_()
        value = call(*leaves)
        actual.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for ours, of_stock in zip(*actual, strict=True):
        torch.testing.assert_close(ours, of_stock)
