"""The tables of docs/migrate.md: each row is computed with the other library and with logitless.

The peers are not among the development packages: `make test-peers` installs their wheels into a folder and
runs this file in Triton's interpreter, in which Liger's kernels run on a CPU.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from logitless import (
    CPOLoss,
    CrossEntropyLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    ORPOLoss,
    SimPOLoss,
    linear_cross_entropy,
)

PAGE = (Path(__file__).parents[1] / "docs" / "migrate.md").read_text()
needs_liger = pytest.mark.skipif(
    find_spec("liger_kernel") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs liger-kernel and TRITON_INTERPRET=1: `make test-peers`",
)
needs_cce = pytest.mark.skipif(
    find_spec("cut_cross_entropy") is None, reason="needs cut-cross-entropy: `make test-peers`"
)
B, T, H, V = 4, 5, 8, 30


class Inputs:
    """The same tensors in every call."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.hidden = normal(B, T, H).requires_grad_()
        self.weight = normal(V, H).requires_grad_()
        self.bias = normal(V).requires_grad_()
        self.targets = torch.randint(0, V, (B, T), generator=generator)
        self.class_weights = torch.rand(V, generator=generator) + 0.5
        self.ref_hidden, self.ref_weight = normal(B, T, H), normal(V, H)
        self.desirable = torch.tensor([True, False, True, True])
        self.kl = torch.tensor(0.3)
        self.mask = torch.rand(B, T, generator=generator) < 0.7
        self.advantages = normal(B)
        self.old_logps, self.ref_logps = (normal(B, T) / 10 - 3.4 for _ in range(2))
        self.ids = self.targets.clone()  # all of them are ids; the others have ignored positions
        self.targets[0, :2] = -100
        self.targets[2, 3:] = -100


def flat(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return x.weight, x.hidden.flatten(0, 1), x.targets.flatten()


def liger_ce(**options):
    def loss(x: Inputs):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss(**options)(*flat(x))

    return loss


def our_ce(**options):
    return lambda x: CrossEntropyLoss(**options)(x.hidden, x.weight, x.targets).loss


def liger_bias(x: Inputs):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(*flat(x), x.bias)


# With these two options Liger's kernel casts numbers, which Triton's interpreter cannot do: their formulas on
# full logits.
def full_class_weights(x: Inputs):
    weight, hidden, targets = flat(x)
    return F.cross_entropy(hidden @ weight.T, targets, weight=x.class_weights)


def full_softcap(x: Inputs):
    weight, hidden, targets = flat(x)
    return F.cross_entropy(2.0 * torch.tanh(hidden @ weight.T / 2.0), targets)


def liger_chunks(x: Inputs):
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    weight, hidden, targets = flat(x)
    options = {"bias": None, "ce_weight": None, "ignore_index": -100, "lse_square_scale": 0.0}
    options |= {"label_smoothing": 0.0, "reduction": "mean", "softcap": None, "return_z_loss": False}
    options |= {"accum_dtype": None, "use_token_scaling": False, "return_token_accuracy": False}
    options |= {"return_predicted_tokens": False, "ce_impl": None, "ce_mode": None, "chunk_mem_const": 2}
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, *options.values())
    return loss


def liger_field(name: str, **options):
    """A field of Liger's output, and the loss."""

    def loss(x: Inputs):
        out = liger_ce(**options)(x)
        return out.loss, getattr(out, name)

    return loss


def our_metric(name: str, **options):
    def loss(x: Inputs):
        out = CrossEntropyLoss(**options)(x.hidden, x.weight, x.targets)
        return out.loss, out.metrics[name]

    return loss


def our_predictions(x: Inputs):
    out = CrossEntropyLoss(return_predictions=True)(x.hidden, x.weight, x.targets)
    supervised = x.targets != -100
    return out.loss, out.predictions[supervised]


def liger_predictions(x: Inputs):
    loss, ids = liger_field("predicted_tokens", return_predicted_tokens=True)(x)
    return loss, ids[x.targets.flatten() != -100]


def other_index(x: Inputs) -> Inputs:
    x.targets = x.targets.masked_fill(x.targets == -100, 7)
    return x


# The first cell of a row -> Liger's call, ours.
LIGER_CE = {
    "the module's order: `(lin_weight, _input, target)`": (liger_ce(), our_ce()),
    "`bias`": (liger_bias, lambda x: CrossEntropyLoss()(x.hidden, x.weight, x.targets, bias=x.bias).loss),
    "`ce_weight`": (
        full_class_weights,
        lambda x: CrossEntropyLoss()(x.hidden, x.weight, x.targets, class_weights=x.class_weights).loss,
    ),
    "`ignore_index`": (
        lambda x: liger_ce(ignore_index=7)(other_index(x)),
        lambda x: our_ce(ignore_index=7)(other_index(x)),
    ),
    "`lse_square_scale`": (liger_ce(lse_square_scale=0.01), our_ce(z_loss=0.01)),
    "`return_z_loss`": (
        liger_field("z_loss", return_z_loss=True, lse_square_scale=0.01),
        our_metric("z_loss", z_loss=0.01),
    ),
    "`label_smoothing`": (liger_ce(label_smoothing=0.1), our_ce(label_smoothing=0.1)),
    "`reduction`": (liger_ce(reduction="sum"), our_ce(reduction="sum")),
    "`softcap`": (full_softcap, our_ce(softcap=2.0)),
    "`accum_dtype`": (liger_ce(accum_dtype=torch.float32), our_ce(accum_dtype=torch.float32)),
    "`use_token_scaling`": (liger_ce(use_token_scaling=True), our_ce(dft=True)),
    "`return_token_accuracy`": (
        liger_field("token_accuracy", return_token_accuracy=True),
        our_metric("token_accuracy"),
    ),
    "`return_predicted_tokens`": (liger_predictions, our_predictions),
    "`chunk_mem_const`": (liger_chunks, our_ce(logits_budget=4 * V * 16)),
}


def liger(name: str, reference: bool = False, **options):
    """A preference loss of Liger's."""

    def loss(x: Inputs):
        from liger_kernel import chunked_loss

        extra = {"ref_input": x.ref_hidden, "ref_weight": x.ref_weight} if reference else {}
        module = getattr(chunked_loss, name)(compiled=False, **options)
        return module(x.weight, x.hidden, x.targets, **extra)[0]

    return loss


def ours(loss, reference: bool = False):
    def call(x: Inputs):
        extra = {"ref_hidden": x.ref_hidden, "ref_weight": x.ref_weight} if reference else {}
        return loss(x.hidden, x.weight, x.targets, **extra).loss

    return call


def liger_kto(x: Inputs):
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    module = LigerFusedLinearKTOLoss(beta=0.2, use_ref_model=True, compiled=False)
    reference = {"ref_input": x.ref_hidden, "ref_weight": x.ref_weight}
    return module(x.hidden, x.weight, x.targets, preference_labels=x.desirable, kl=x.kl, **reference)[0]


def our_kto(x: Inputs):
    reference = {"ref_hidden": x.ref_hidden, "ref_weight": x.ref_weight}
    return KTOLoss(beta=0.2)(x.hidden, x.weight, x.targets, labels=x.desirable, kl=x.kl, **reference).loss


POLICY = {"beta": 0.05, "epsilon_low": 0.1, "epsilon_high": 0.3, "temperature": 0.8}
POLICIES = ("grpo", "bnpo", "dapo", "cispo", "sapo", "vespo")


def liger_grpo(x: Inputs):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def loss(kind: str) -> Tensor:
        module = LigerFusedLinearGRPOLoss(loss_type=kind, compiled=False, **POLICY)
        given = {"old_per_token_logps": x.old_logps, "ref_per_token_logps": x.ref_logps}
        return module(x.hidden, x.weight, x.ids, x.mask, x.advantages, **given)[0]

    return torch.stack([loss(kind) for kind in POLICIES]).sum()


def our_grpo(x: Inputs):
    def loss(kind: str) -> Tensor:
        given = {"advantages": x.advantages, "old_logps": x.old_logps, "ref_logps": x.ref_logps}
        return GRPOLoss(loss_type=kind, use_bias_correction_kl=False, **POLICY)(
            x.hidden, x.weight, x.ids, mask=x.mask, **given
        ).loss

    return torch.stack([loss(kind) for kind in POLICIES]).sum()


def liger_jsd(x: Inputs):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    weights = {"weight_hard_loss": 0.3, "weight_soft_loss": 0.7}
    module = LigerFusedLinearJSDLoss(beta=0.3, temperature=2.0, compiled=False, **weights)
    student, teacher = x.hidden.flatten(0, 1), x.ref_hidden.flatten(0, 1)
    return module(student, x.weight, teacher, x.ref_weight, x.targets.flatten())


def our_jsd(x: Inputs):
    teacher = {"teacher_hidden": x.ref_hidden, "teacher_weight": x.ref_weight}
    loss = JSDLoss(beta=0.3, temperature=2.0, hard_loss_weight=0.3)
    return loss(x.hidden, x.weight, x.targets, **teacher).loss


DPO, SIMPO = "LigerFusedLinearDPOLoss", "LigerFusedLinearSimPOLoss"
MORE = (
    "with `selected_token_ids`, `attention_mask`, `old_per_token_logps`, `ref_per_token_logps`",
    "with `preference_labels`, `ref_input`, `kl`",
)
LIGER_LOSSES = {
    f"`{DPO}(beta, loss_type, label_smoothing)` with `ref_input`, `ref_weight`": (
        liger(DPO, reference=True, beta=0.2, loss_type="robust", label_smoothing=0.1),
        ours(DPOLoss(beta=0.2, loss_type="robust", label_smoothing=0.1), reference=True),
    ),
    f"`{DPO}(use_ref_model=False)`": (
        liger(DPO, use_ref_model=False),
        ours(DPOLoss(reference_free=True)),
    ),
    f"`{DPO}(average_log_prob=True)`": (
        liger(DPO, reference=True, average_log_prob=True),
        ours(DPOLoss(average_logps=True), reference=True),
    ),
    "`LigerFusedLinearORPOLoss(beta)`": (
        liger("LigerFusedLinearORPOLoss", beta=0.2),
        ours(ORPOLoss(beta=0.2)),
    ),
    f"`{SIMPO}(beta, gamma, compute_nll_loss=False)`": (
        liger(SIMPO, beta=2.0, gamma=0.6, compute_nll_loss=False),
        ours(SimPOLoss(beta=2.0, gamma=0.6)),
    ),
    f"`{SIMPO}(beta, gamma, alpha)`": (
        liger(SIMPO, beta=2.0, gamma=0.6, alpha=0.7),
        ours(CPOLoss(beta=2.0, loss_type="simpo", simpo_gamma=0.6, cpo_alpha=0.7)),
    ),
    "`LigerFusedLinearCPOLoss(beta, alpha, label_smoothing)`": (
        liger("LigerFusedLinearCPOLoss", beta=0.2, alpha=0.7, label_smoothing=0.1),
        ours(CPOLoss(beta=0.2, cpo_alpha=0.7, label_smoothing=0.1)),
    ),
    f"`LigerFusedLinearKTOLoss(beta, use_ref_model=True)` {MORE[1]}": (liger_kto, our_kto),
    f"`LigerFusedLinearGRPOLoss(beta, epsilon_low, epsilon_high, loss_type, temperature)` {MORE[0]}": (
        liger_grpo,
        our_grpo,
    ),
    "`LigerFusedLinearJSDLoss(beta, temperature, weight_hard_loss=h, weight_soft_loss=1 - h)`": (
        liger_jsd,
        our_jsd,
    ),
}


def cce(*positional, **options):
    def loss(x: Inputs):
        from cut_cross_entropy import linear_cross_entropy as peer

        return peer(x.hidden, x.weight, x.targets, *positional, impl="torch_compile", **options)

    return loss


def our_function(**options):
    return lambda x: linear_cross_entropy(x.hidden, x.weight, x.targets, **options)


CCE = {
    "`(e, c, targets)`": (cce(), our_function()),
    "`ignore_index`, which may be positional": (
        lambda x: cce(7)(other_index(x)),
        lambda x: our_function(ignore_index=7)(other_index(x)),
    ),
    "`softcap`": (cce(softcap=2.0), our_function(softcap=2.0)),
    "`reduction`": (cce(reduction="sum"), our_function(reduction="sum")),
    "`shift=True`": (cce(shift=True), our_function(shift=True)),
    '`shift=True, reduction="none"`: shape (B, T - 1)': (
        lambda x: cce(shift=True, reduction="none")(x).sum(),
        lambda x: our_function(shift=True, reduction="none")(x)[:, :-1].sum(),
    ),
    "`filter_eps`": (cce(filter_eps=None), our_function()),
    "`impl`": (cce(), our_function()),
}


def test_every_row_is_tested():
    tables = [re.findall(r"^\| (.+?) \|", part, re.MULTILINE)[1:] for part in PAGE.split("\n## ")[1:]]
    assert tables == [list(cases) for cases in (LIGER_CE, LIGER_LOSSES, CCE)]


def same(peer, own) -> None:
    """Both return a loss, or a loss and something to compare."""
    results = []
    with torch.compiler.set_stance("force_eager"):
        for call in (peer, own):
            x = Inputs()
            out = call(x)
            loss, *others = out if isinstance(out, tuple) else (out,)
            (1.7 * loss).backward()
            results.append([loss.detach(), *others, *(leaf.grad for leaf in (x.weight, x.hidden, x.bias))])
    for expected, actual in zip(*results, strict=True):
        assert (expected is None) == (actual is None)  # of the bias, where it is not used
        if actual is None:
            continue
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, check_dtype=False)
    assert results[1][-2].abs().max() > 1e-4  # a gradient that could be wrong


@needs_liger
@pytest.mark.parametrize("row", LIGER_CE)
def test_a_row_of_ligers_cross_entropy(row):
    same(*LIGER_CE[row])


@needs_liger
@pytest.mark.parametrize("row", LIGER_LOSSES)
def test_a_row_of_ligers_other_losses(row):
    same(*LIGER_LOSSES[row])


@needs_cce
@pytest.mark.parametrize("row", CCE)
def test_a_row_of_cut_cross_entropy(row):
    same(*CCE[row])


@needs_liger
def test_the_two_values_that_differ():
    smoothed = liger(DPO, reference=True, label_smoothing=0.1)
    assert torch.equal(smoothed(Inputs()), liger(DPO, reference=True)(Inputs()))
    cdpo = ours(DPOLoss(label_smoothing=0.1), reference=True)
    assert not torch.allclose(cdpo(Inputs()), smoothed(Inputs()), rtol=1e-2)
