"""The loss of the distillation trainers against plain PyTorch, on the kernels where there are any (a GPU, or
TRITON_INTERPRET=1)."""

import pytest
import torch

from logitless.trl_integration.support_divergence import SupportDivergence
from tests.kernels.support import DEVICE
from tests.support import relative_error

H, V, N = 16, 80, 12


def problem():
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)  # noqa: E731
    leaves = random(N, H).requires_grad_(), random(V, H).requires_grad_()
    teacher = {"teacher_hidden": random(N, 8), "teacher_weight": random(V, 8)}
    targets = torch.randint(0, V, (N,), generator=generator).to(DEVICE)
    mask = torch.arange(N, device=DEVICE) % 4 > 0
    given = {"token_weights": random(N).abs(), "old_logps": random(N) - 4}
    return leaves, targets, mask, teacher, given


def jsd(s, t, beta):
    m = torch.log((1 - beta) * s.exp() + beta * t.exp())
    return ((1 - beta) * s.exp() * (s - m) + beta * t.exp() * (t - m)).sum(-1)


@pytest.mark.parametrize(
    "used",
    [(), ("token_weights",), ("token_weights", "old_logps")],
    ids=lambda used: "-".join(used) or "plain",
)
@pytest.mark.parametrize("support", [(), ("student", "target")], ids=["all", "some"])
def test_weights_and_ratios(support, used):
    (hidden, weight), targets, mask, teacher, given = problem()
    loss = SupportDivergence(
        beta=0.3, support=support, top_k=2, clip=1.5, reduction="sum", logits_budget=2**14
    )
    out = loss(hidden, weight, targets, mask=mask, **teacher, **{name: given[name] for name in used})

    s = (hidden @ weight.T).double().log_softmax(-1)
    t = (teacher["teacher_hidden"] @ teacher["teacher_weight"].T).double().log_softmax(-1)
    logps = s.gather(-1, targets[:, None])[:, 0].detach()
    if support:
        best = (
            torch.zeros(N, V, dtype=torch.bool, device=DEVICE)
            .scatter(-1, s.topk(2, -1).indices, True)
            .scatter(-1, targets[:, None], True)
        )
        value = jsd(
            *(
                torch.cat(
                    (x.masked_fill(~best, -200.0), x.masked_fill(best, -200.0).logsumexp(-1, keepdim=True)),
                    -1,
                )
                for x in (s, t)
            ),
            0.3,
        )
    else:
        value = jsd(s, t, 0.3)
    if "old_logps" in used:
        value = value * (logps - given["old_logps"]).exp().clamp(max=1.5)
    mean = value[mask].mean()
    if "token_weights" in used:
        value = value * given["token_weights"]
    truth = value[mask].sum()
    assert relative_error(out.loss.detach(), truth.detach()) < 1e-5
    assert relative_error(out.metrics["soft_loss"], mean.detach()) < 1e-5
    for name, ours, theirs in zip(
        ("hidden", "weight"),
        torch.autograd.grad(out.loss, (hidden, weight)),
        torch.autograd.grad(truth, (hidden, weight)),
        strict=True,
    ):
        assert relative_error(ours, theirs) < 1e-4, name
