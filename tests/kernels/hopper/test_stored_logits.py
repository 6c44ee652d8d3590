"""Products that store the logits and compute their softmaxes' normalizers, alone and in distillation losses,
against full logits in fp64.

On a CPU the kernels run in Triton's interpreter, whose products take no bf16: fp32 stands in there.
"""

import pytest
import torch

from logitless import DistillationLoss, JSDLoss
from logitless.kernels import fused_projection as fused
from logitless.kernels.head.softmaxes import Softmaxes
from logitless.kernels.head.transform import LogitTransform
from tests import reference
from tests.cases import covering_array
from tests.kernels.support import DEVICE, INTERPRETED, Random, poisoned
from tests.support import relative_error

FP32, FP64, INF = torch.float32, torch.float64, float("inf")
DTYPE = FP32 if INTERPRETED else torch.bfloat16
SERVED = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not SERVED, reason="needs a Hopper GPU, or the interpreter"
)
# Of a tile; smaller in the interpreter, whose time grows with it.
BM, BN, BK = (16, 32, 16) if INTERPRETED else (128, 256, 64)
# Rows, width and vocabulary, all ragged: several tiles of each. The teacher has another width.
C, H, V = BM + 3, BK + 8, 2 * BN + 8
H_TEACHER = 2 * BK
HEADS = {
    "plain": LogitTransform(),
    "scale": LogitTransform(None, 1.3),
    "negative scale, bias": LogitTransform(None, -0.6),
    "softcap, bias": LogitTransform(6.0, 1.5),
}


@pytest.fixture(autouse=True)
def stores(monkeypatch):
    """The rows of each product that stores logits."""
    from logitless.kernels import hopper
    from logitless.kernels.hopper import product_tiles_triton, stored_logits_triton

    if INTERPRETED:
        monkeypatch.setattr(hopper, "DTYPES", (DTYPE,))
        monkeypatch.setattr(fused, "fused_products", lambda device: hopper)
        for name, size in {"BM": BM, "BN": BN, "BK": BK}.items():
            monkeypatch.setitem(product_tiles_triton.TILE, name, size)
            monkeypatch.setattr(product_tiles_triton, f"BLOCK_{name[1]}", size)
        monkeypatch.setattr(stored_logits_triton, "BLOCK_N", BN)
        monkeypatch.setattr(stored_logits_triton, "TILES", 2)  # more tiles than one turn merges
    assert product_tiles_triton.TILE == {"BM": BM, "BN": BN, "BK": BK}
    rows, store = [], fused.store

    def counted(hidden, *arguments):
        rows.append(len(hidden))
        return store(hidden, *arguments)

    monkeypatch.setattr(fused, "store", counted)
    return rows


def operands(random: Random, V: int = V, H: int = H, spread: float = 3.0):
    return random.normal(C, H).to(DTYPE), (random.normal(V, H) * spread / H**0.5).to(DTYPE)


def stored(hidden, weight, head, *, common=None, bias=None, count=2):
    """(logits, shift, log-sum-exp (count, C), first tile of the largest logit), of NaN where not written."""
    V = weight.shape[0]
    plain = bias is None and head.softcap is None and head.logit_scale > 0
    place = poisoned(len(hidden), V, dtype=DTYPE)
    softmaxes = Softmaxes(head, bias, V if common is None else common, plain, count)
    values, tile = fused.store(hidden, weight, place, softmaxes)
    assert tile == BN and values.shape == (count, 3, len(hidden))
    shift, log_sum, first = values.double().unbind(1)
    return place, (shift + log_sum) * torch.tensor(2.0).double().log(), first


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("common", [V, BN - 3], ids=["all ids", "some ids"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_and_normalizers(name, common, temperature):
    random = Random()
    hidden, weight = operands(random)
    bias = random.normal(V) if "bias" in name else None
    head = HEADS[name]._replace(temperature=temperature)
    logits, lse, first = stored(hidden, weight, head, common=common, bias=bias)
    product = hidden.double() @ weight.double().t()
    assert relative_error(logits, product) < (1e-6 if INTERPRETED else 4e-3)
    # From what was stored, not from what it was rounded from.
    cold = head._replace(temperature=1.0).logits(logits.double(), bias)[0]
    for z, number, column in ((cold[:, :common] / temperature, lse[0], first[0]), (cold, lse[1], first[1])):
        assert (number - z.logsumexp(1)).abs().max() < 4e-6
        assert torch.equal(column, (z.argmax(1) // BN).double())


def test_one_softmax_is_the_first_of_two():
    hidden, weight = operands(Random())
    head = LogitTransform(temperature=0.7)
    two, one = stored(hidden, weight, head), stored(hidden, weight, head, count=1)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1][0], two[1][0]) and torch.equal(one[2][0], two[2][0])


@pytest.mark.parametrize("size", [1e-3, 60.0])
def test_small_and_large_logits(size):
    hidden, weight = operands(Random(), spread=size)
    logits, lse, _ = stored(hidden, weight, LogitTransform(), count=1)
    wanted = logits.double().logsumexp(1)
    assert ((lse[0] - wanted).abs() <= 3e-7 * wanted.abs() + 1e-6).all()


def test_ids_that_a_bias_rules_out():
    random = Random()
    hidden, weight = operands(random)
    bias = random.normal(V)
    bias[3], bias[BN : 2 * BN] = -INF, -INF  # a whole tile
    logits, lse, first = stored(hidden, weight, LogitTransform(), bias=bias)
    z = logits.double() + bias.double()
    for number, column in zip(lse, first, strict=True):
        assert (number - z.logsumexp(1)).abs().max() < 4e-6
        assert torch.equal(column, (z.argmax(1) // BN).double())
    _, nothing, _ = stored(hidden, weight, LogitTransform(), bias=torch.full_like(bias, -INF))
    assert not nothing.isfinite().any()


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_a_row_that_is_not_finite_spoils_no_other(value):
    hidden, weight = operands(Random())
    hidden[4] = value
    logits, lse, _ = stored(hidden, weight, LogitTransform(temperature=2.0))
    others = torch.arange(C, device=DEVICE) != 4
    assert not lse[:, 4].isfinite().any()
    assert (lse[1] - logits.double().logsumexp(1))[others].abs().max() < 4e-6


KINDS = {
    "jsd": ("jsd", 0.3),
    "jsd even": ("jsd", 0.5),
    "forward": ("forward_kl", 0.5),
    "reverse": ("reverse_kl", 0.5),
    "tv": ("total_variation", 0.5),
}
FACTORS = {
    "kind": list(KINDS),
    "head": list(HEADS),
    "teacher_V": [V, V + BN, BN - 4],
    "temperature": [1.0, 1.7],
    "hard": [0.0, 0.4],
    "labels": [True, False],
    "reduction": ["mean", "none"],
}


def has_effect(case: dict) -> bool:
    return not case.get("hard") or case.get("labels", True)


@pytest.mark.filterwarnings("ignore:.*teacher_weight:UserWarning")
@pytest.mark.parametrize("case", covering_array(FACTORS, has_effect))
def test_losses(stores, case):
    random = Random(case["seed"])
    hidden, weight = operands(random)
    teacher_hidden, teacher_weight = operands(random, case["teacher_V"], H_TEACHER)
    targets = random.integers(V, C) if case["labels"] else None
    if case["labels"]:
        targets[1] = -100
    head = HEADS[case["head"]]
    options = dict(zip(("divergence", "beta"), KINDS[case["kind"]], strict=True))
    options |= {"temperature": case["temperature"], "hard_loss_weight": case["hard"]}
    options |= {"reduction": case["reduction"], "softcap": head.softcap, "logit_scale": head.logit_scale}
    options["teacher_logit_scale"] = 1.2
    bias = random.normal(V) if "bias" in case["head"] else None
    teacher_bias = random.normal(case["teacher_V"]) if "softcap" in case["head"] else None
    upstream = random.normal(C) if case["reduction"] == "none" else random.normal(1)[0]

    def both_ways(call, dtype):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        given = {"teacher_hidden": teacher_hidden.to(dtype), "teacher_weight": teacher_weight.to(dtype)}
        given["teacher_bias"] = None if teacher_bias is None else teacher_bias.to(dtype)
        loss, metrics = call(h, w, targets, bias=None if bias is None else bias.to(dtype), **given)
        return loss, metrics, *torch.autograd.grad((loss * upstream).sum(), (h, w))

    def ours(*arguments, **given):
        out = DistillationLoss(**options, logits_dtype=DTYPE)(*arguments, **given)
        return out.loss, out.metrics

    loss, metrics, *gradients = both_ways(ours, DTYPE)
    assert stores and set(stores) == {C - 1 if case["labels"] else C}
    wanted, numbers, *truth = both_ways(
        lambda *arguments, **given: reference.distillation(*arguments, **given, **options), FP64
    )
    limit = 2e-5 if INTERPRETED else 2e-2
    assert relative_error(loss, wanted.detach()) < limit
    for found, one in zip(gradients, truth, strict=True):
        assert relative_error(found, one) < limit
    for name, number in numbers.items():
        exact = name not in ("token_accuracy", "agreement") or INTERPRETED
        assert not exact or abs(metrics[name] - number) < limit * (1 + abs(number)), name


def teacher_of(random: Random) -> dict[str, torch.Tensor]:
    return dict(zip(("teacher_hidden", "teacher_weight"), operands(random, H=H_TEACHER), strict=True))


def run(loss, hidden, weight, targets, teacher):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    out = loss(*leaves, targets, **teacher)
    return out, torch.autograd.grad(out.loss.sum() * 1.3, leaves)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_chunks_change_nothing(stores, temperature):
    random = Random()
    hidden, weight = operands(random)
    targets, teacher = random.integers(V, C), teacher_of(random)
    options = {"temperature": temperature, "reduction": "none"}
    one, (d_hidden, d_weight) = run(JSDLoss(**options), hidden, weight, targets, teacher)
    size = one.plan.row_bytes
    partials = fused.normalizer_bytes(DEVICE, V, 1 if temperature == 1.0 else 2)
    assert size == 2 * V * DTYPE.itemsize + partials + fused.normalizer_bytes(DEVICE, V, 1)
    assert set(stores) == {C}
    stores.clear()
    some = JSDLoss(**options, logits_budget=6 * size)
    several, (d_hidden_of_several, d_weight_of_several) = run(some, hidden, weight, targets, teacher)
    assert several.plan.chunks > 2 and max(stores) <= 6
    assert torch.equal(one.loss, several.loss)
    limit = 1e-6 if INTERPRETED else 4e-3
    assert relative_error(d_hidden_of_several, d_hidden.double()) < limit
    assert relative_error(d_weight_of_several, d_weight.double()) < limit


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("hard", [0.0, 0.5])
def test_as_without_the_kernel(stores, monkeypatch, temperature, hard):
    random = Random()
    hidden, weight = operands(random)
    targets, teacher = random.integers(V, C), teacher_of(random)
    loss = JSDLoss(temperature=temperature, hard_loss_weight=hard)
    new, gradients = run(loss, hidden, weight, targets, teacher)
    assert len(stores) == 2  # student and teacher
    monkeypatch.setattr(fused, "stores", lambda *arguments: False)
    old, wanted = run(loss, hidden, weight, targets, teacher)
    assert len(stores) == 2
    limit = 2e-6 if INTERPRETED else 1e-2  # products whose sums differ in order round some logits otherwise
    assert abs(new.loss - old.loss) < limit * abs(old.loss)
    for found, one in zip(gradients, wanted, strict=True):
        assert relative_error(found, one.double()) < limit


def test_the_first_of_equal_logits_is_the_best():
    random = Random()
    hidden, weight = operands(random, spread=0.1)
    hidden[:, 0] = 1.0
    for column in (5, 9, BN + 2, 2 * BN + 1):  # in one half of a tile, and in several tiles
        weight[column] = 0.0
        weight[column, 0] = 4.0
    teacher = {"teacher_hidden": hidden, "teacher_weight": weight.clone()}
    teacher["teacher_weight"][5] = 0.0
    for temperature in (1.0, 2.0):
        loss = DistillationLoss(temperature=temperature)
        out = loss(hidden, weight, torch.full((C,), 5, device=DEVICE), **teacher)
        assert out.metrics["token_accuracy"] == 1 and out.metrics["agreement"] == 0
        out = loss(hidden, teacher["teacher_weight"], torch.full((C,), 9, device=DEVICE), **teacher)
        assert out.metrics["token_accuracy"] == 1 and out.metrics["agreement"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary": V + 1},
        {"teacher_vocabulary": V + 2},
        {"teacher_dtype": FP64},
        {"support": "teacher", "k": 4},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*teacher_weight:UserWarning")
def test_other_calls_compute_normalizers_from_the_logits(stores, change):
    random = Random()
    dtype = change.pop("teacher_dtype", DTYPE)
    hidden, weight = operands(random, change.pop("vocabulary", V))
    taught = operands(random, change.pop("teacher_vocabulary", V), H_TEACHER)
    teacher = dict(zip(("teacher_hidden", "teacher_weight"), (x.to(dtype) for x in taught), strict=True))
    run(DistillationLoss(**change), hidden, weight, random.integers(V, C), teacher)
    assert not stores


def test_what_the_kernel_takes():
    hidden, weight = operands(Random())
    assert fused.stores(DTYPE, DTYPE, H, weight, weight)
    assert not fused.stores(FP64, DTYPE, H, weight)  # it stores no wider logits
    assert not fused.stores(DTYPE, DTYPE, H, weight, weight[1:])  # rows of logits at odd addresses
    assert not fused.stores(DTYPE, DTYPE, H, weight[:, 1:])
