"""The product with an epilogue against the product and the row kernels' definitions in plain PyTorch.

On a CPU the kernels run in Triton's interpreter, whose products take no bf16: fp32 stands in there.
"""

import itertools

import pytest
import torch

import logitless
from logitless import CrossEntropyLoss, DPOLoss, ORPOLoss, linear_logprobs
from logitless.kernels import fused_projection as fused
from logitless.kernels.head.cross_entropy import TokenBuffers, allocate_stats
from logitless.kernels.head.transform import LogitTransform
from tests.kernels.hopper.interpreted import replacements
from tests.kernels.support import DEVICE, INTERPRETED
from tests.support import relative_error

FP32 = torch.float32
DTYPE = FP32 if INTERPRETED else torch.bfloat16
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not fused.serves(DTYPE, 8, torch.empty(8, 8, device=DEVICE, dtype=DTYPE)),
    reason="needs a GPU with tensor copies, or the interpreter",
)
PLAIN = LogitTransform()
HEADS = {
    "plain": PLAIN,
    "softcap": LogitTransform(8.0, 1.5, 0.7),
    "scale, bias": LogitTransform(None, -0.6, 1.3),
}
# Of a tile. Its size is time and nothing else in the interpreter, where it is smaller.
BM, BN, BK = (16, 32, 16) if INTERPRETED else (128, 256, 64)
# Ragged in all three, rows, vocabulary and width; one tile of rows, several, and several groups of tiles.
SHAPES = ((5, BK - 8, BN + 12), (BM + 3, BK + 8, 2 * BN + 3), (4 * BM + 3, BK + 8, 2 * BN + 3))


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    from logitless.kernels.hopper import fused_projection_triton, product_tiles_triton

    if INTERPRETED:
        for owner, name, value in replacements(BM, BN, BK):
            monkeypatch.setattr(owner, name, value)
        monkeypatch.setattr(fused_projection_triton, "ROWS", BM // 2)
    # Two row tiles at the widths below.
    monkeypatch.setattr(product_tiles_triton, "GROUP_BYTES", 2 * BM * (BK + 8) * DTYPE.itemsize)
    assert product_tiles_triton.TILE == {"BM": BM, "BN": BN, "BK": BK}


def problem(shape, name, spread=1.0, seed=0):
    C, H, V = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(C, H, generator=generator).to(DTYPE)
    weight = (torch.randn(V, H, generator=generator) * spread / H**0.5).to(DTYPE)
    targets = torch.randint(0, V, (C,), generator=generator)
    targets[1] = -100
    bias = torch.randn(V, generator=generator) if "bias" in name else None
    return [None if x is None else x.to(DEVICE) for x in (hidden, weight, targets, bias)]


def truth(hidden, weight, targets, bias, transform):
    """Logits in fp64, their derivative by the product, log-probabilities, and which rows count."""
    x = hidden.double() @ weight.double().t()
    x = (x if bias is None else x + bias.double()).requires_grad_()
    z = x * transform.logit_scale
    z = (
        z if transform.softcap is None else transform.softcap * torch.tanh(z / transform.softcap)
    ) / transform.temperature
    return x, z, z.log_softmax(1), targets != -100


def read(problem, transform, *names, write=False, sums=None):
    hidden, weight, targets, bias = problem
    out = allocate_stats(names, len(targets), torch.float32, DEVICE)
    place = fused.new_gradient_buffer(weight, len(targets)) if write else None
    factor = fused.read(
        hidden, weight, targets, out, gradient=place, transform=transform, bias=bias, sums=sums
    )
    return out, None if place is None else factor[:, None].double() * place.double()


def check_numbers(out, z, log_p, targets, rows, allowed=2e-6):
    index = targets.clamp(min=0)[:, None]
    expected = {
        "logps": log_p.gather(1, index)[:, 0],
        "lse": z.logsumexp(1),
        "entropy": -(log_p.exp() * log_p).nan_to_num(0.0).sum(1),
        "sum_logits": z.sum(1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(1),
    }
    for name, x in out.items():
        assert not x[~rows].any(), name
        if name in expected:
            error = (x.double() - expected[name])[rows].abs()
            size = expected[name].abs() if name != "sum_logits" else z.abs().sum(1)
            assert (error <= allowed * (1 + size[rows])).all(), (name, error.max())
    if out.is_top1 is not None:
        assert (out.is_top1 == (z.argmax(1) == targets))[rows].all()


def check_pass(
    given, transform=PLAIN, names=("entropy",), *, write=True, sums=None, allowed=2e-6
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Statistics and the gradient of the log-probabilities against the definition; returns log p in fp64 and
    the gradient."""
    x, z, log_p, rows = truth(*given, transform)
    logps = log_p.gather(1, given[2].clamp(min=0)[:, None])[:, 0]
    out, gradient = read(given, transform, *names, write=write, sums=sums)
    check_numbers(out, z.detach(), log_p.detach(), given[2], rows, allowed)
    assert (out.log_sum_sq_probs is None) == ("log_sum_sq_probs" not in names)
    if write:
        (expected,) = torch.autograd.grad((logps * rows).sum(), x)
        assert gradient.isfinite().all() and relative_error(gradient, expected) < 4e-3
    return logps[rows].detach(), gradient


@pytest.mark.each_value
@pytest.mark.parametrize(
    "shape, name",
    [(SHAPES[0], "softcap"), *((SHAPES[1], name) for name in HEADS), (SHAPES[2], "scale, bias")],
    ids=str,
)
def test_reads_and_writes(shape, name):
    transform, given = HEADS[name], problem(shape, name)
    for names, write in itertools.product(((), ("entropy",)), (False, True)):
        check_pass(given, transform, names, write=write)
    sums = fused.head_sums(given[1], given[3], transform)
    assert (sums is None) == (transform.softcap is not None)
    for name, each in itertools.product(("sum_logits", "log_sum_sq_probs"), {None, sums}):
        check_pass(given, transform, (name,), write=False, sums=each)


@pytest.mark.parametrize("in_epilogue", [False, True])
def test_sums_of_logits_where_other_ranks_have_the_targets(in_epilogue):
    """A shard's rows count, whose targets are beyond its vocabulary; ignored ones do not."""
    hidden, weight, targets, _ = given = problem(SHAPES[1], "plain")
    targets[2:] = weight.shape[0] + 7
    sums = None if in_epilogue else fused.head_sums(weight, None, PLAIN)
    out, _ = read(given, PLAIN, "sum_logits", sums=sums)
    expected = (hidden.double() @ weight.double().t()).sum(1) * (targets != -100)
    assert relative_error(out.sum_logits.double(), expected) < 1e-5


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("weights", [False, True])
def test_gradient_of_known_numbers(name, weights):
    transform, given = HEADS[name], problem(SHAPES[1], name)
    hidden, weight, targets, bias = given
    x, z, log_p, rows = truth(*given, transform)
    out, _ = read(given, transform, "entropy")
    generator = torch.Generator().manual_seed(1)
    logps, lse, entropy, total = torch.randn(4, len(targets), generator=generator).to(DEVICE)
    class_weights = torch.rand(weight.shape[0], generator=generator).to(DEVICE) if weights else None
    expected = logps * log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0] + lse * z.logsumexp(1)
    grads = TokenBuffers(logps=logps, lse=lse)
    if weights:
        expected = expected - entropy * (log_p.exp() * log_p).sum(1) + total * (z * class_weights).sum(1)
        grads.entropy, grads.sum_logits = entropy, total
    (expected,) = torch.autograd.grad((expected * rows).sum(), x)
    place = fused.new_gradient_buffer(weight, len(targets))
    options = {"gradient": place, "transform": transform, "bias": bias, "class_weights": class_weights}
    fused.write(hidden, weight, targets, out, grads, **options)
    assert relative_error(place.double(), expected) < 4e-3 and not place[~rows].any()


def test_the_rounding_of_a_large_lse_is_made_up_for():
    # Whole numbers, whose products are exact, near 1500, where fp32 has steps of 1e-4.
    C, H, V = SHAPES[0]
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-1, 2, (n, H), generator=generator) for n in (C, V))
    hidden[:, 0], weight[:, 0] = 50, 30
    hidden, weight = hidden.to(DEVICE, DTYPE), weight.to(DEVICE, DTYPE)
    given = hidden, weight, torch.arange(C, device=DEVICE), None
    _, z, log_p, _ = (None if x is None else x.detach() for x in truth(*given, PLAIN))
    exact = z.logsumexp(1)
    lse, logps = exact.float(), log_p.gather(1, given[2][:, None])[:, 0].float()
    numbers = TokenBuffers(logps=logps, lse=lse, lse_residual=(exact - lse).float())
    assert numbers.lse_residual.abs().max() > 1e-5
    place = fused.new_gradient_buffer(weight, C)
    grads = TokenBuffers(lse=torch.ones(C, device=DEVICE))
    fused.write(hidden, weight, given[2], numbers, grads, gradient=place, transform=PLAIN)
    allowed = 2e-6 if DTYPE == torch.float32 else 4e-3
    assert relative_error(place.double(), log_p.exp()) < allowed


def test_rows_far_above_their_target_are_read_again():
    """Gaps of several hundred: exp of them is beyond fp32."""
    given = problem(SHAPES[1], "plain", spread=60.0)
    logps, _ = check_pass(given, names=("entropy", "sum_logits"), allowed=1e-5)
    assert logps.min() < -150


def test_one_row_of_a_tile_is_read_again():
    """The others' targets keep their entries, though their tile is stored anew."""
    given = problem((2 * BM, BK, 2 * BN), "plain")
    given[0][BM + 3] *= 60.0
    logps, _ = check_pass(given, names=("entropy", "sum_logits"), allowed=1e-5)
    assert (logps < -60).sum() == 1 and (logps > -20).sum() == len(logps) - 1


def test_a_row_without_a_target_here():
    """As a shard of the vocabulary has, whose logits may all lie far below the shift of 0."""
    hidden, weight, targets, _ = problem(SHAPES[0], "plain")
    targets.fill_(len(weight))
    bias = torch.full((len(weight),), -300.0, device=DEVICE)
    _, z, log_p, rows = truth(hidden, weight, targets.clamp(max=0), bias, PLAIN)
    out, _ = read((hidden, weight, targets, bias), PLAIN, "entropy")
    assert (out.lse - z.logsumexp(1)).abs().max() < 1e-4
    entropy = -(log_p.exp() * log_p).sum(1)
    assert (out.entropy - entropy).abs().max() < 1e-4


def test_a_target_elsewhere_is_no_tie(monkeypatch):
    """Right behind the last tile: a row that ties is read again, and here would be for nothing."""
    from logitless.kernels.hopper import fused_projection_triton

    finish, again = fused_projection_triton.finish_kernel, []

    class Watched:
        def __getitem__(self, grid):
            def launch(*args, **options):
                if options["AGAIN"]:
                    again.append(args[4].clone())
                finish[grid](*args, **options)

            return launch

    monkeypatch.setattr(fused_projection_triton, "finish_kernel", Watched())
    hidden, weight, targets, _ = problem((5, BK, 2 * BN), "plain")
    for elsewhere in (False, True):
        read(
            (hidden, weight, targets.fill_(2 * BN) if elsewhere else targets, None),
            PLAIN,
            "entropy",
        )
    assert len(again) == 2 and not torch.stack(again).any()


def test_certain_tokens_keep_their_digits():
    hidden, weight, targets, _ = given = problem(SHAPES[0], "plain")
    targets.fill_(3)
    weight[3] = 0.0
    hidden[:, 0], weight[:, 0], weight[3, 0] = 4.0, 0.0, 5.0  # some 20 above the others
    x, z, log_p, rows = truth(*given, PLAIN)
    out, gradient = read(given, PLAIN, write=True)
    expected = log_p[:, 3].detach()
    assert (expected > -1e-4).all() and ((out.logps.double() - expected) / expected).abs().max() < 1e-5
    (d,) = torch.autograd.grad(log_p[:, 3].sum(), x)
    assert ((gradient[:, 3] - d[:, 3]) / d[:, 3]).abs().max() < 4e-3


def test_a_bias_of_minus_infinity_takes_an_id_out():
    hidden, weight, targets, _ = problem(SHAPES[0], "plain")
    bias = torch.zeros(weight.shape[0], device=DEVICE)
    taken_out = [0, 7, len(bias) - 1]
    bias[taken_out] = -torch.inf
    targets.fill_(5)
    _, gradient = check_pass((hidden, weight, targets, bias))
    assert not gradient[:, taken_out].any()


def test_strided_and_offset_operands():
    hidden, weight, targets, bias = problem(SHAPES[1], "scale, bias")
    expected, _ = read((hidden, weight, targets, bias), HEADS["scale, bias"], "entropy")
    H = hidden.shape[1]
    strided = [torch.stack((x, x), 1)[:, 0] for x in (targets, bias)]
    # The first row starts at 16 bytes and the second does not, and the other way round.
    by_row = torch.cat((hidden, hidden[:, :3]), 1)[:, :H]
    by_start = torch.cat((hidden[:, :3], hidden, hidden[:, :5]), 1)[:, 3 : 3 + H]
    for other in (by_row, by_start, hidden.t().contiguous().t()):
        actual, _ = read((other, weight, *strided), HEADS["scale, bias"], "entropy")
        for name, x in actual.items():
            assert torch.equal(x, getattr(expected, name)), name


def test_the_first_of_equal_logits_is_the_top():
    H, V = 16, 2 * BN + 20
    # Twice in one half of a tile, in the other, and in another tile; or twice in the other half alone.
    for equal in ([10, 12, BN // 2 + 8, 2 * BN + 5], [BN // 2 + 3, BN // 2 + 8]):
        targets = torch.tensor([*equal, 11])
        hidden, weight = torch.ones(len(targets), H, dtype=DTYPE), torch.zeros(V, H, dtype=DTYPE)
        weight[equal] = 1.0
        given = [x.to(DEVICE) for x in (hidden, weight, targets)]
        out, _ = read((*given, None), PLAIN, "entropy")
        assert out.is_top1.tolist() == [1, *[0] * len(equal)]


def test_same_bits_again():
    given = problem(SHAPES[1], "plain", spread=20.0)
    (first, d_first), (second, d_second) = (read(given, PLAIN, "entropy", write=True) for _ in range(2))
    assert torch.equal(d_first, d_second)
    assert all(torch.equal(x, getattr(second, name)) for name, x in first.items())


def test_what_it_does_not_serve():
    weight = torch.zeros(16, 24, dtype=DTYPE, device=DEVICE)
    assert fused.serves(DTYPE, 24, weight) and fused.serves(DTYPE, 24, weight, None)
    assert not fused.serves(torch.float16, 24, weight)  # a dtype that the kernels were not tried with
    assert not fused.serves(DTYPE, 23, weight) and not fused.serves(DTYPE, 24, weight, weight[:, 1:])
    assert not fused.serves(DTYPE, 24, weight, weight.t()) and not fused.serves(
        DTYPE, 24, weight.flatten()[1:][:16]
    )


# The engine on these kernels


@pytest.fixture
def served(monkeypatch):
    """How often each kernel ran."""
    ran = {"read": 0, "write": 0}

    def counted(name, function):
        def run(*args, **kwargs):
            ran[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(fused, name, run)

    counted("read", fused.read)
    counted("write", fused.write)
    return ran


PAIRS, LENGTH, WIDTH, IDS = 4, 6, 16, BN + 8


def pairs():
    """Hidden states (sequences, tokens, H), head, targets, and the like of a reference model."""
    generator = torch.Generator().manual_seed(3)
    hidden, ref = torch.randn(2, PAIRS, LENGTH, WIDTH, generator=generator).to(DEVICE, DTYPE).unbind(0)
    weight, ref_weight = torch.randn(2, IDS, WIDTH, generator=generator).to(DEVICE, DTYPE).unbind(0)
    targets = torch.randint(0, IDS, (PAIRS, LENGTH), generator=generator).to(DEVICE)
    targets[:, 0] = -100
    return hidden, weight, targets, {"ref_hidden": ref, "ref_weight": ref_weight}


# Loss, its options, and the kernels that run.
BOTH = {"read", "write"}
LOSSES = {
    "cross-entropy": (CrossEntropyLoss, {}, {"read"}),
    "cross-entropy, all rows": (CrossEntropyLoss, {"compact": False}, {"read"}),
    "cross-entropy, softcap": (CrossEntropyLoss, {"softcap": 5.0, "logit_scale": 1.2}, {"read"}),
    "z-loss: in fp32": (CrossEntropyLoss, {"z_loss": 0.1}, set()),
    "smoothing: in fp32": (CrossEntropyLoss, {"label_smoothing": 0.1}, set()),
    "class weights": (CrossEntropyLoss, {"class_weights": True}, {"read"}),
    "weighted sums of logits": (
        CrossEntropyLoss,
        {"reduction": "none", "label_smoothing": 0.1, "class_weights": True},
        set(),
    ),
    "unreduced": (CrossEntropyLoss, {"reduction": "none"}, BOTH),
    "unreduced, z-loss": (CrossEntropyLoss, {"reduction": "none", "z_loss": 0.1}, BOTH),
    # In the many chunks of `check` a pair is beyond the budget, and projected twice.
    "DPO with a reference": (DPOLoss, {"beta": 0.5}, BOTH),
    "ORPO": (ORPOLoss, {}, BOTH),
}


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning")
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen head"])
@pytest.mark.parametrize(("kind", "options", "expected"), LOSSES.values(), ids=LOSSES)
def test_losses(served, kind, options, expected, frozen):
    hidden, weight, targets, reference = pairs()
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    given = reference if kind is DPOLoss else {}
    if "class_weights" in options:
        generator = torch.Generator().manual_seed(5)
        given = {"class_weights": torch.rand(IDS, generator=generator).to(DEVICE)}
    loss = kind(logits_dtype=FP32, **{name: x for name, x in options.items() if name != "class_weights"})
    report = logitless.check(loss, hidden, weight, targets, **given)
    assert report.ok, report
    ran = {kernel for kernel, times in served.items() if times}
    # A loss of log p and lse of a frozen head keeps d logp / d hidden, and needs no second pass.
    assert ran == expected or (frozen and ran == {"read"} and expected)


@pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning")
def test_a_pair_beyond_the_budget_is_walked_twice(served):
    hidden, weight, targets, reference = pairs()
    hidden.requires_grad_()
    weight.requires_grad_()
    whole = DPOLoss(logits_dtype=FP32, beta=0.5)(hidden, weight, targets, **reference)
    assert served["write"] == 0
    expected = torch.autograd.grad(whole.loss, (hidden, weight))
    cut = DPOLoss(logits_dtype=FP32, beta=0.5, logits_budget=4 * fused.row_bytes(DEVICE, IDS, stored=True))(
        hidden, weight, targets, **reference
    )
    assert cut.plan.strategy == "recompute" and served["write"] >= 2
    assert (cut.loss - whole.loss).abs() < 1e-6
    for actual, one in zip(torch.autograd.grad(cut.loss, (hidden, weight)), expected, strict=True):
        assert relative_error(actual, one.double()) < 8e-3


@pytest.mark.filterwarnings("ignore:.*logits_budget:UserWarning")
@pytest.mark.parametrize(("softcap", "few"), [(None, False), (None, True), (5.0, False)])
def test_sums_of_logits_come_from_the_sum_of_the_head(served, monkeypatch, softcap, few):
    """The sum of the head is computed once a call, and only if the loss observes the sums of logits. With few
    rows or a softcap, the kernel of the product sums the logits."""
    made, counted, given = [], fused.read, []
    monkeypatch.setattr(fused, "HEAD_SUM_ROWS", PAIRS * LENGTH if few else 1)
    add_up = fused.head_sums
    monkeypatch.setattr(fused, "head_sums", lambda *args: made.append(add_up(*args)) or made[-1])
    monkeypatch.setattr(fused, "read", lambda *args, **how: given.append(how) or counted(*args, **how))
    hidden, weight, targets, _ = pairs()
    weight.requires_grad_()
    chunks = {"logits_budget": 4 * fused.row_bytes(DEVICE, IDS, stored=True), "logits_dtype": FP32}
    loss = ORPOLoss(softcap=softcap, **chunks)(hidden, weight, targets)
    z = hidden.double() @ weight.double().t()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    mean = loss.metrics["logits/chosen"]
    assert abs(mean - z[: PAIRS // 2, 1:].mean()) < 1e-6 * z.abs().mean()
    in_epilogue = few or softcap is not None
    assert len(given) > 2 and all((how["sums"] is None) == in_epilogue for how in given)
    assert softcap is not None or len(made) == (not few)
    made.clear()
    CrossEntropyLoss(**chunks)(hidden, weight, targets)
    assert not made


@pytest.mark.parametrize("entropy", [False, True, "metric"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen head"])
def test_log_probabilities_are_the_same_whoever_asks(served, entropy, frozen):
    hidden, weight, targets, _ = pairs()
    with torch.no_grad():
        old = linear_logprobs(hidden, weight, targets, entropy=bool(entropy) and "metric", logits_dtype=FP32)
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    new = linear_logprobs(hidden, weight, targets, entropy=entropy, logits_dtype=FP32)
    assert torch.equal(old.logps, new.logps) and torch.equal(old.lse, new.lse)
    value = new.logps.sum() + 0.3 * new.lse.sum() + (0.1 * new.entropy.sum() if entropy is True else 0.0)
    leaves = [hidden] if frozen else [hidden, weight]
    actual = torch.autograd.grad(value, leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    z = wide[0] @ (weight.detach().double() if frozen else wide[1]).t()
    log_p, rows = z.log_softmax(-1), targets != -100
    truth = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] + 0.3 * z.logsumexp(-1)
    truth = truth - (0.1 * (log_p.exp() * log_p).sum(-1) if entropy is True else 0.0)
    for one, other in zip(actual, torch.autograd.grad((truth * rows).sum(), wide), strict=True):
        assert relative_error(one, other) < 8e-3
    assert served["read"] and (frozen and entropy is not True or served["write"])


def test_nothing_is_stored_where_logits_are_only_read(served, monkeypatch):
    places, new_gradient_buffer = [], fused.new_gradient_buffer
    monkeypatch.setattr(
        fused,
        "new_gradient_buffer",
        lambda weight, rows: places.append(rows) or new_gradient_buffer(weight, rows),
    )
    hidden, weight, targets, reference = pairs()
    with torch.no_grad():
        linear_logprobs(hidden, weight, targets, logits_dtype=FP32)
        plan = DPOLoss(logits_dtype=FP32)(hidden, weight, targets, **reference).plan
    assert places == [0, 0] and plan.row_bytes < 2 * IDS
