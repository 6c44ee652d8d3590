"""What losses take alike: single tokens, references, names of the clip range, predictions."""

import pytest
import torch
from torch import Tensor, nn

from logitless import (
    CrossEntropyLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    LogitsLoss,
    MedusaLoss,
    MultiTokenLoss,
    PPOLoss,
    RLOOLoss,
    SimPOLoss,
    Term,
    TokenLoss,
    linear_logprobs,
    linear_topk,
)
from tests.losses import every_loss
from tests.losses.every_loss import B, V
from tests.support import DEVICE, AllocationWatcher

T = 7
pytestmark = pytest.mark.usefixtures("uncompiled")


def starts() -> Tensor:
    return torch.arange(0, B * T + 1, T, device=DEVICE)


def test_an_input_of_the_name_of_a_keyword():
    class Masked(TokenLoss):
        token_inputs = ("mask",)

        def terms(self, stats, batch):
            return {"loss": Term(-stats.logps * batch.mask)}, {}

    with pytest.raises(
        TypeError, match="^inputs: expected names that are not arguments of every loss, got mask"
    ):
        Masked()


# -- single tokens


def test_a_single_token():
    x = every_loss.given(T)
    hidden, target = x.hidden[0, 0], x.targets[0, 0]
    full = torch.nn.functional.cross_entropy(hidden @ x.weight.T + x.bias, target)
    (expected,) = torch.autograd.grad(full, x.hidden)
    for reduction in ("mean", "sum", "none"):
        ours = CrossEntropyLoss(reduction=reduction)(x.hidden[0, 0], x.weight, target, bias=x.bias).loss
        assert ours.shape == ()
        torch.testing.assert_close(ours, full)
        torch.testing.assert_close(torch.autograd.grad(ours, x.hidden)[0], expected)
    log_p = (hidden @ x.weight.T + x.bias).log_softmax(-1)
    ids = torch.tensor([3, 1], device=DEVICE)
    torch.testing.assert_close(linear_logprobs(hidden, x.weight, target, bias=x.bias).logps, log_p[target])
    torch.testing.assert_close(linear_logprobs(hidden, x.weight, ids, bias=x.bias).logps, log_p[ids])
    best = linear_topk(hidden, x.weight, 3, bias=x.bias)
    torch.testing.assert_close(best.logps, log_p.topk(3).values)
    assert best.ids.tolist() == log_p.topk(3).indices.tolist()
    taught = JSDLoss()(
        hidden, x.weight, teacher_hidden=x.teacher_hidden[0, 0], teacher_weight=x.teacher_weight
    )
    assert taught.loss > 0


def test_a_single_token_has_no_next_one():
    x = every_loss.given(T)
    for call in (CrossEntropyLoss(), linear_logprobs):
        for targets in (x.targets[0, 0], x.topk_ids[0, 0]) if call is linear_logprobs else (x.targets[0, 0],):
            with pytest.raises(ValueError, match=r"^shift: expected False for hidden \(H,\), got True"):
                call(x.hidden[0, 0], x.weight, targets, shift=True)
    with pytest.raises(ValueError, match=r"^targets: expected shape \(B, T\), got \(\)"):
        MultiTokenLoss()([x.hidden[0, 0]], x.weight, x.targets[0, 0])
    with pytest.raises(ValueError, match="^hidden: expected shape"):
        SimPOLoss()(x.hidden[0, 0], x.weight, x.targets[0, 0])


def test_boundaries_without_shift():
    x = every_loss.given(T).flat()
    with pytest.raises(
        ValueError, match="^cu_seqlens: expected None without shift, got Tensor; leave it out"
    ):
        linear_logprobs(x.hidden, x.weight, x.targets, cu_seqlens=starts())
    for targets in (x.targets, x.topk_ids):
        with pytest.raises(TypeError, match="^cu_seqlens: expected a tensor, got list"):
            linear_logprobs(x.hidden, x.weight, targets, shift=True, cu_seqlens=[0, B * T])


# -- names of the clip range


@pytest.mark.parametrize("kind", [GRPOLoss, PPOLoss, RLOOLoss])
def test_two_names_of_the_lower_clip_range(kind):
    x = every_loss.given(T)
    logps = linear_logprobs(x.hidden, x.weight, x.targets).logps.detach()
    # Ratios of exp(-0.1), outside 1 - 0.05 and inside 1 - 0.2, of tokens whose probability is to fall.
    inputs = {"advantages": -x.advantages.abs(), "old_logps": logps + 0.1}

    def value(**options):
        return kind(**options)(x.hidden, x.weight, x.targets, **inputs).loss

    assert kind().epsilon == kind().upper == 0.2
    assert value(epsilon_low=0.05) == value(epsilon=0.05) == value(epsilon=0.05, epsilon_low=0.05)
    assert value(epsilon_low=0.05, epsilon_high=0.3) != value(epsilon_high=0.3)
    assert kind(epsilon_low=0.1).upper == 0.1
    with pytest.raises(
        ValueError, match="^epsilon_low: expected the value of epsilon, or None, got 0.1 with eps"
    ):
        kind(epsilon=0.2, epsilon_low=0.1)
    with pytest.raises(ValueError, match="^epsilon: expected a number >= 0, got -1"):
        kind(epsilon_low=-1)


# -- the reference of policy losses


def test_reference_head_as_a_module():
    x = every_loss.given(T)
    head = nn.Linear(every_loss.TEACHER_H, V, device=DEVICE)
    given = {"advantages": x.advantages, "ref_hidden": x.teacher_hidden}
    apart = {"ref_weight": head.weight, "ref_bias": head.bias}
    for kind in (GRPOLoss(beta=0.1), PPOLoss(beta=0.1)):
        ours = kind(x.hidden, x.weight, x.targets, ref_weight=head, **given)
        assert torch.equal(ours.loss, kind(x.hidden, x.weight, x.targets, **apart, **given).loss)


ONE = "ref_logps: expected one of ref_logps and ref_hidden .*, got "
UNUSED = "ref_logps: expected no reference for this GRPOLoss, got ref_"
# A loss, what is given of "logps", "hidden", "weight" and "bias", and the message.
BAD_REFERENCES = {
    "none": (GRPOLoss(beta=0.1), "", ONE + "neither; pass one"),
    "two": (GRPOLoss(beta=0.1), "logps hidden weight", ONE + "ref_logps and ref_hidden"),
    "a head alone": (GRPOLoss(beta=0.1), "logps weight", ONE + "ref_logps and ref_weight"),
    "a bias alone": (GRPOLoss(beta=0.1), "logps bias", ONE + "ref_logps and ref_bias"),
    "no head": (GRPOLoss(beta=0.1), "hidden", "ref_weight: expected the reference's head"),
    "no KL": (GRPOLoss(), "hidden weight", UNUSED),
    "no KL, log-probs": (GRPOLoss(), "logps", UNUSED),
    "DPO, none": (DPOLoss(), "", ONE + "neither; pass one"),
    "DPO, a head alone": (DPOLoss(), "logps weight", ONE + "ref_logps and ref_weight"),
    "DPO, a bias alone": (DPOLoss(), "logps bias", ONE + "ref_logps and ref_bias"),
    "KTO, a head alone": (KTOLoss(), "logps weight", ONE + "ref_logps and ref_weight"),
}


def with_reference(loss, names: str, x: every_loss.Given, **inputs):
    every = {"logps": x.ref_logps, "hidden": x.teacher_hidden, "weight": x.teacher_weight, "bias": x.bias}
    inputs |= {f"ref_{name}": every[name].detach() for name in names.split()}
    inputs |= {"advantages": x.advantages} if isinstance(loss, GRPOLoss) else {}
    inputs |= {"labels": x.labels} if isinstance(loss, KTOLoss) else {}
    return loss(x.hidden, x.weight, x.targets, **inputs)


@pytest.mark.parametrize(("loss", "names", "message"), BAD_REFERENCES.values(), ids=BAD_REFERENCES)
def test_a_reference_that_does_not_fit(loss, names, message):
    kl = {"kl": 0.1} if isinstance(loss, KTOLoss) else {}
    with pytest.raises(ValueError, match=f"^{message}"):
        with_reference(loss, names, every_loss.given(T), **kl)


def test_ktos_reference_head_may_be_that_of_the_kl_alone():
    x = every_loss.given(T)
    kl = {"kl_hidden": x.hidden, "kl_targets": x.targets, "ref_hidden": x.teacher_hidden}
    assert with_reference(KTOLoss(), "logps weight", x, kl=kl).loss.isfinite()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="watches what the CPU allocates")
def test_the_reference_stays_within_the_budget():
    tokens, wide, budget = 512, 4096, 2**20
    hidden, weight = torch.randn(2, tokens // 2, 8), torch.randn(wide, 8)
    loss = GRPOLoss(beta=0.1, logits_budget=budget)
    given = {"ref_hidden": hidden, "ref_weight": weight + 1, "advantages": torch.randn(2)}
    with torch.no_grad(), AllocationWatcher() as watch:
        loss(hidden, weight, torch.randint(wide, (2, tokens // 2)), **given)
    assert watch.peak < 1.5 * budget < tokens * wide * 4 / 4


# -- predictions


def test_predictions_under_torch_compile():
    x = every_loss.given(T)
    loss = CrossEntropyLoss(return_predictions=True)
    with torch.compiler.set_stance("default"):
        graph = torch.compile(
            lambda h, w, t: tuple(loss(h, w, t))[3]["predictions"], backend="aot_eager", fullgraph=True
        )
        actual = graph(x.hidden, x.weight, x.targets)
    best = (x.hidden @ x.weight.T).argmax(-1)
    assert torch.equal(actual, best.masked_fill(x.targets == -100, -100))


def test_nothing_is_handed_out_unasked():
    x = every_loss.given(T)
    out = CrossEntropyLoss()(x.hidden, x.weight, x.targets)
    for name, option in (("logps", "return_logps"), ("predictions", "return_predictions")):
        with pytest.raises(
            AttributeError, match=f"^{name}: expected a loss that .* got {option}=False; make"
        ):
            getattr(out, name)
    with pytest.raises(ValueError, match="^return_predictions: expected False for several heads"):
        MedusaLoss(return_predictions=True)


# -- inputs


def test_an_input_that_is_not_declared():
    class Weighted(TokenLoss):
        def terms(self, stats, batch):
            return {"loss": Term(-stats.logps * batch.weights)}, {}

    class WeightedLogits(LogitsLoss):
        def terms(self, logits, batch):
            return {"loss": Term(logits.sum(-1) * batch.weights)}, {}

    x = every_loss.given(T)
    for loss in (Weighted(), WeightedLogits()):
        with pytest.raises(AttributeError, match="^weights: expected an input that the loss declares"):
            loss(x.hidden, x.weight, x.targets)
