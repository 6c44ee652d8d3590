"""The losses of drafts with vocabulary parallelism: each of two ranks has what one process has."""

import pytest
import torch
import torch.distributed as dist

from logitless import SpeculatorLoss
from tests.losses.test_speculator import DIVERGENCES, World
from tests.ranks import on_devices

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")]
# Rows of both heads on each rank.
SIZES = (41, 23)
V = sum(SIZES)
HEADS = {"softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3}
HEADS |= {"teacher_softcap": 7.0, "teacher_logit_scale": 1.2}
# (options of the loss, options of the world, what the call is given)
CASES = {name: ({"divergence": name}, {}, ()) for name in DIVERGENCES}
CASES |= {
    "transformed heads": ({"divergence": "lk_hybrid", **HEADS, "hard_loss_weight": 0.4}, {}, ()),
    "labels": ({"hard_loss_weight": 0.3}, {"steps": 5}, ("targets", "mask")),
    "labels alone": ({"hard_loss_weight": 1.0, "coefficients": (1.0, 0.0, 0.5)}, {}, ("targets",)),
    "the verifier's labels": ({"hard_loss_weight": 0.5, "divergence": "jsd", "beta": 0.3}, {}, ("mask",)),
    "unreduced": ({"divergence": "total_variation", "reduction": "none"}, {}, ("mask",)),
    "sum": ({"reduction": "sum", "offset": 0}, {"steps": 1}, ()),
    "packed": ({"divergence": "reverse_kl"}, {"packed": True}, ("targets",)),
    "blocks": ({"divergence": "lk_hybrid", "offset": 0}, {"blocks": True}, ("mask",)),
    "draft ids alone": ({"teacher_softmax": "draft", "hard_loss_weight": 0.1}, {}, ()),
}
# Half of the cases in chunks of a few rows, the others in one.
CHUNKED = {name: 105_000 if number % 2 else None for number, name in enumerate(CASES)}


def run(name: str, budget: int | None, rank: int | None = None, dtype=torch.float64) -> dict:
    """Loss, metrics and gradients of a case: of the whole heads, or of a rank's shards."""
    options, shape, given = CASES[name]
    w = World(draft=V, vocab=V, dtype=dtype, **shape)
    common = 4 * w.normal(V, dtype=dtype)  # so that the best ids of some pairs agree
    w.bias, w.teacher_bias = (w.bias.detach() + common).requires_grad_(), w.teacher_bias + common
    group = None if rank is None else dist.group.WORLD
    loss = SpeculatorLoss(logits_budget=budget, tp_group=group, **options)

    def cut(x):
        return x if rank is None else x.detach().split(SIZES)[rank].clone().requires_grad_(x.requires_grad)

    weight, bias = cut(w.weight), cut(w.bias)
    call = {"mask": w.mask} if "mask" in given else {}
    out = loss(
        w.hiddens,
        weight,
        w.targets if "targets" in given else None,
        bias=bias,
        teacher_hidden=w.teacher_hidden,
        teacher_weight=cut(w.teacher_weight),
        teacher_bias=cut(w.teacher_bias),
        starts=w.starts,
        **w.packing,
        **call,
    )
    assert budget is None or out.plan.chunks > 1
    upstream = 1.7 if out.loss.dim() == 0 else w.normal(*out.loss.shape)
    trained = [*w.hiddens, weight, bias]
    gradients = torch.autograd.grad((out.loss * upstream).sum(), trained, allow_unused=True)
    names = [*(f"d_hidden {k}" for k in range(w.steps)), "d_weight", "d_bias"]
    actual = {"loss": out.loss.detach(), **out.metrics}
    return actual | {name: x for name, x in zip(names, gradients, strict=True) if x is not None}


def refusals(rank: int) -> dict[str, str]:
    """The errors of calls that every rank must refuse."""
    w = World(draft=V, vocab=V)
    loss = SpeculatorLoss(tp_group=dist.group.WORLD)
    weight, teacher = w.weight.split(SIZES)[rank], w.teacher_weight.split(SIZES)[rank]
    given = {"teacher_hidden": w.teacher_hidden, "teacher_weight": teacher}
    wrong = w.targets.clone()
    wrong[1, 4] = V
    errors = {}
    for name, targets, changes in (
        ("draft ids", None, {"draft_ids": torch.arange(SIZES[rank])}),
        ("whole verifier", None, {"teacher_weight": w.teacher_weight}),
        ("targets", wrong, {}),
        ("targets of one rank", wrong if rank else w.targets, {}),
    ):
        try:
            loss(w.hiddens, weight, targets, **given | changes)
            errors[name] = "nothing"
        except ValueError as error:
            errors[name] = str(error)
    return errors


def everything() -> dict:
    rank = dist.get_rank()
    actual = {name: run(name, budget, rank) for name, budget in CHUNKED.items()}
    actual["fp32"] = run("lk_hybrid", None, rank, torch.float32)
    return actual | {"errors": refusals(rank)}


@pytest.fixture(scope="module")
def ranks():
    """What each rank found."""
    return on_devices(2, everything)


def assert_equal(actual: list[dict], truth: dict, tolerance: float) -> None:
    assert all(rank.keys() == truth.keys() for rank in actual)
    for name, x in truth.items():
        ours = [rank[name] for rank in actual]
        if name in ("d_weight", "d_bias"):
            ours = [torch.cat(ours)]
        else:
            assert torch.equal(*ours), name
        error = (ours[0] - x.cpu()).norm()
        assert error <= tolerance * max(x.norm().item(), 1e-3), f"{name}: {error}"
    assert truth["accepted_length"] > 1


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_vocabulary_is_the_whole(ranks, name):
    """The loss, every gradient and every metric; on all ranks the same, bit for bit."""
    assert_equal([rank[name] for rank in ranks], run(name, CHUNKED[name]), 1e-9)


def test_fp32(ranks):
    assert_equal([rank["fp32"] for rank in ranks], run("lk_hybrid", None, dtype=torch.float32), 1e-5)


def test_refusals(ranks):
    for rank in ranks:
        errors = rank["errors"]
        assert errors["draft ids"].startswith("draft_ids: expected None with tp_group, got a tensor")
        assert errors["whole verifier"].startswith("teacher_weight: expected a plain tensor of")
        assert errors["targets"].startswith(f"targets: expected ids in [0, {V}) or ignore_index, got others")
        assert errors["targets of one rank"].split("; ")[0].endswith("on rank 1")
