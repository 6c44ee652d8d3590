"""Statistics and gradient of a loss from a single read of the logits, by programs that share a row."""

import math

import pytest
import torch
import torch.utils.checkpoint

from logitless import cross_entropy
from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import (
    TokenBuffers,
    allocate_stats,
    reads_once,
    statistics_and_gradient,
)
from logitless.kernels.head.transform import LogitTransform
from logitless.losses import given_logits
from tests.support import DEVICE, relative_error

IGNORED = -100
pytestmark = pytest.mark.skipif(not uses_triton(DEVICE, torch.float32), reason="a Triton kernel")


@pytest.fixture(params=[64, 1024], ids=str)
def length(request, monkeypatch):
    """The columns of a part: several parts, and one."""
    from logitless.kernels.head import split_rows_triton

    monkeypatch.setattr(split_rows_triton, "LENGTH", request.param)


def expected(logits, targets, grads, transform, class_weights):
    """({statistic: (N,)}, the gradient) from the definitions, in fp64."""
    supervised = targets != IGNORED
    x = logits.double().where(supervised[:, None], 0.0).requires_grad_()
    u = transform.logit_scale * x
    cap = transform.softcap
    z = (u if cap is None else cap * torch.tanh(u / cap)) / transform.temperature
    lse = z.logsumexp(1)
    stats = {
        "logps": z.gather(1, targets.where(supervised, 0)[:, None])[:, 0] - lse,
        "lse": lse,
        "sum_logits": (z if class_weights is None else z * class_weights.double()).sum(1),
    }
    total = sum((g.double() * stats[name]).where(supervised, 0.0).sum() for name, g in grads.items())
    (gradient,) = torch.autograd.grad(total, x)
    return {name: each.detach().where(supervised, 0.0) for name, each in stats.items()}, gradient


SOFTCAPPED = LogitTransform(5.0, 1.3, 0.7)
CASES = (
    (torch.float32, "logps", LogitTransform(), False),
    (torch.float32, "logps", SOFTCAPPED, False),
    (torch.float32, "logps lse sum_logits", SOFTCAPPED, True),
    (torch.bfloat16, "logps lse", LogitTransform(), False),
    (torch.bfloat16, "logps lse sum_logits", LogitTransform(), False),
    (torch.bfloat16, "logps", LogitTransform(logit_scale=-0.5), False),
    (torch.float16, "logps", LogitTransform(logit_scale=-1.5), False),
    (torch.float16, "logps", LogitTransform(), False),
    (torch.float16, "logps lse sum_logits", LogitTransform(1.0, 2.0), True),
)


@pytest.mark.each_value
@pytest.mark.parametrize(("dtype", "names", "transform", "is_weighted"), CASES)
def test_the_definitions(length, dtype, names, transform, is_weighted):
    names = names.split()
    N, V = 9, 300
    generator = torch.Generator("cpu").manual_seed(0)
    logits = (4 * torch.randn(N, V, generator=generator, device="cpu")).to(DEVICE, dtype)
    targets = torch.randint(V, (N,), generator=generator, device="cpu").to(DEVICE)
    sign = -1.0 if transform.logit_scale < 0 else 1.0
    logits[0, targets[0]] = sign * 25.0  # confident
    targets[1] = IGNORED
    logits[1] = torch.nan
    logits[2, :200] = sign * (-60000.0 if dtype == torch.float16 else -1e30)  # parts with nothing
    targets[2] = 250
    targets[3] = V - 1
    logits[4, 40] = sign * 120.0  # exp overflows, relative to other logits of the part
    weights = torch.rand(V, generator=generator, device="cpu").to(DEVICE) if is_weighted else None
    if "sum_logits" in names:
        logits[2] = logits[2].clamp(min=-60.0)
    grads = {name: torch.randn(N, generator=generator, device="cpu").to(DEVICE) for name in names}
    out = allocate_stats(names, N, torch.float32, DEVICE)
    gradient = torch.full_like(logits, torch.nan)
    options = {"transform": transform, "class_weights": weights, "ignore_index": IGNORED}
    values, *_ = statistics_and_gradient(
        logits, targets, out, TokenBuffers(**grads), gradient=gradient, **options
    )
    stats, truth = expected(logits, targets, grads, transform, weights)
    for name in names:
        assert relative_error(getattr(out, name), stats[name]) < 1e-6, name
    assert values[1] == 0  # ignored
    assert relative_error(values, sum(grads[name] * stats[name] for name in names)) < 1e-5
    assert not gradient[1].any()
    eps = torch.finfo(dtype).eps
    # The gradient of a confident token underflows in fp16.
    for row in (*([] if dtype == torch.float16 else [0]), 2, 3, slice(None)):
        assert relative_error(gradient[row], truth[row]) < (1e-5 if dtype == torch.float32 else eps), row


def test_a_confident_token(length):
    """1 - p of the target does not cancel."""
    logits = torch.zeros(2, 300, device=DEVICE)
    logits[:, 200] = 20.0
    targets = torch.full((2,), 200, device=DEVICE)
    grads = {"logps": torch.full((2,), -1.0, device=DEVICE)}
    out, gradient = allocate_stats(("logps",), 2, torch.float32, DEVICE), torch.empty_like(logits)
    options = {"transform": LogitTransform(), "gradient": gradient}
    statistics_and_gradient(logits, targets, out, TokenBuffers(**grads), **options)
    stats, truth = expected(logits, targets, grads, LogitTransform(), None)
    assert relative_error(out.logps, stats["logps"]) < 1e-6
    assert relative_error(gradient[:, 200], truth[:, 200]) < 1e-6


def check(logits, targets, grads, transform=None):
    """Compare statistics and gradient with the definitions."""
    transform = transform or LogitTransform()
    out = allocate_stats(grads, len(targets), torch.float32, DEVICE)
    gradient = torch.full_like(logits, torch.nan)
    options = {"gradient": gradient, "transform": transform}
    statistics_and_gradient(logits, targets, out, TokenBuffers(**grads), **options)
    stats, truth = expected(logits, targets, grads, transform, None)
    for name in grads:
        assert relative_error(getattr(out, name), stats[name]) < 1e-6, name
    assert relative_error(gradient, truth) < 1e-5


@pytest.mark.parametrize("names", ["logps", "logps lse sum_logits"])
def test_a_negative_scale(length, names):
    grads = {name: torch.randn(3, device=DEVICE) for name in names.split()}
    targets = torch.tensor([0, 70, 299], device=DEVICE)
    check(4 * torch.randn(3, 300, device=DEVICE), targets, grads, LogitTransform(None, -1.3, 0.7))


def test_a_scale_of_zero(length):
    """It would turn the columns behind the last one into NaN."""
    logits, targets = torch.randn(2, 300, device=DEVICE), torch.tensor([7, 299], device=DEVICE)
    for scale in (0.0, 1e-46):
        assert not reads_once(logits, LogitTransform(None, scale))
        loss = cross_entropy(logits.requires_grad_(), targets, logit_scale=scale)
        assert loss.item() == pytest.approx(math.log(300))
        assert not torch.autograd.grad(loss, logits)[0].any()


def test_parts_of_minus_infinity_and_rows_far_below_zero(length):
    grads = {"logps": -torch.ones(1, device=DEVICE)}
    row = torch.full((1, 300), -torch.inf, device=DEVICE)
    row[:, :20] = torch.linspace(-3, 3, 20, device=DEVICE)
    check(row, torch.tensor([10], device=DEVICE), grads)
    check(torch.linspace(-300, -210, 300, device=DEVICE)[None], torch.tensor([250], device=DEVICE), grads)
    # The maximum of a part is 0, and so is the sum of its exponentials without the target.
    row[:], row[0, 70], row[0, 5] = -torch.inf, 0.0, 1.0
    check(row, torch.tensor([70], device=DEVICE), grads)


@pytest.mark.parametrize("transform", [LogitTransform(), SOFTCAPPED])
@pytest.mark.parametrize("target", [-5, 300, 310, 2**40])
def test_a_target_outside_the_vocabulary(length, target, transform):
    """Its row has the gradient of no target, and nothing is written behind the row."""
    logits, targets = torch.randn(2, 300, device=DEVICE), torch.tensor([target, 3], device=DEVICE)
    wide = torch.full((2, 1000), 7.0, device=DEVICE)
    out = allocate_stats(("logps",), 2, torch.float32, DEVICE)
    options = {"transform": transform, "gradient": wide[:, :300]}
    grads = TokenBuffers(logps=-torch.ones(2, device=DEVICE))
    statistics_and_gradient(logits, targets, out, grads, **options)
    assert (wide[:, 300:] == 7).all() and out.logps[0] == -torch.inf and out.logps[1].isfinite()
    z, slope = transform.logits(logits[0].double())
    assert relative_error(wide[0, :300], z.softmax(0) * slope) < 1e-5


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 150])
def test_not_finite(length, value, column):
    logits = torch.randn(2, 300, device=DEVICE)
    logits[0, column] = value
    targets = torch.tensor([7, 7], device=DEVICE)
    grads = TokenBuffers(logps=torch.ones(2, device=DEVICE))
    out, gradient = allocate_stats(("logps",), 2, torch.float32, DEVICE), torch.empty_like(logits)
    statistics_and_gradient(logits, targets, out, grads, transform=LogitTransform(), gradient=gradient)
    assert out.logps[0].isnan() and gradient[0].isnan().all()
    assert out.logps[1].isfinite() and gradient[1].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}], ids=str)
def test_the_backward_passes_of_a_loss(length, options, monkeypatch):
    """The first one returns what the forward pass has written, unless the upstream gradient is not 1."""
    passes = []
    written = given_logits.kernels.statistics_and_gradient

    def noted(*operands, **arguments):
        passes.append(arguments["gradient"].data_ptr())
        return written(*operands, **arguments)

    def poisoned(*arguments):
        buffers = allocate_stats(*arguments)
        for _, buffer in buffers.items():
            buffer.fill_(torch.nan)  # what is not written must not be read
        return buffers

    monkeypatch.setattr(given_logits.kernels, "statistics_and_gradient", noted)
    monkeypatch.setattr(given_logits.kernels, "allocate_stats", poisoned)
    logits = torch.randn(5, 300, device=DEVICE).requires_grad_()
    targets = torch.tensor([3, IGNORED, 299, 0, 70], device=DEVICE)
    assert reads_once(logits, LogitTransform())
    loss = cross_entropy(logits, targets, **options)
    wide = logits.detach().double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(wide, targets, **options)
    upstream = torch.ones_like(loss)
    if loss.dim():
        upstream[2:] = torch.tensor([0.3, 0.0, -2.0], device=DEVICE)
    found = []
    for factor in (1.0, 1.0, 0.7):
        (actual,) = torch.autograd.grad(loss, logits, factor * upstream, retain_graph=True)
        (d_truth,) = torch.autograd.grad(truth, wide, factor * upstream.double(), retain_graph=True)
        found.append((actual, d_truth))
    for actual, d_truth in found:  # at the end: no pass overwrites what another one has returned
        assert relative_error(actual, d_truth) < 2e-6
    assert len(passes) == 1 and found[0][0].data_ptr() == passes[0]
    loss = cross_entropy(logits, targets, **options)
    loss *= 0.7  # a view from a Function could not be changed
    (actual,) = torch.autograd.grad(loss.sum(), logits)
    (d_truth,) = torch.autograd.grad(0.7 * truth.sum(), wide)
    assert relative_error(actual, d_truth) < 2e-6 and actual.data_ptr() == passes[1]


def test_checkpoints_and_offloading_see_the_gradient(length):
    """It is as large as the logits: a checkpoint must not keep it."""
    logits, targets = torch.randn(5, 300, device=DEVICE).requires_grad_(), torch.arange(5, device=DEVICE)
    (expected,) = torch.autograd.grad(cross_entropy(logits, targets), logits)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(x) or len(packed) - 1, packed.__getitem__
    ):
        loss = cross_entropy(logits, targets)
    assert [x.shape for x in packed].count(logits.shape) == 2
    (function, _), *_ = loss.grad_fn.next_functions  # behind the view
    assert function.name() == "_LinearLossesBackward"
    assert not any(isinstance(x, torch.Tensor) for x in vars(function).values())
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected)
    assert len(packed) == len({x.data_ptr() for x in packed})  # nothing is saved twice
    again = torch.utils.checkpoint.checkpoint(cross_entropy, logits, targets, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, logits)[0], expected)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_saved_tensors_come_back_with_other_strides(length, options):
    logits, targets = torch.randn(5, 300, device=DEVICE).requires_grad_(), torch.arange(5, device=DEVICE)
    (expected,) = torch.autograd.grad(cross_entropy(logits, targets, **options), logits)
    packed = []

    def pack(x):
        packed.append(torch.stack((x, x), 1) if x.dim() == 1 else torch.cat((x, x), 1))
        return len(packed) - 1, x.shape

    def unpack(saved):
        i, shape = saved
        return packed[i][:, 0] if len(shape) == 1 else packed[i][:, : shape[1]]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = cross_entropy(logits, targets, **options)
    (actual,) = torch.autograd.grad(0.5 * loss, logits, retain_graph=True)
    torch.testing.assert_close(actual, 0.5 * expected)
    # With an upstream gradient of 1, the backward pass writes nothing to the saved gradient.
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = cross_entropy(logits, targets, **options)
    (gradient,) = [x for x in packed[len(packed) // 2 :] if x.shape == (5, 600) and not x.equal(packed[0])]
    gradient.fill_(7.0)
    assert (torch.autograd.grad(loss, logits)[0] == 7.0).all()


def test_losses_that_are_not_linear_read_the_logits_twice(monkeypatch):
    monkeypatch.setattr(given_logits.kernels, "statistics_and_gradient", None)
    logits, targets = torch.randn(5, 300, device=DEVICE).requires_grad_(), torch.arange(5, device=DEVICE)
    for options in ({"z_loss": 0.1}, {"dft": True}):
        cross_entropy(logits, targets, **options).backward()
    cross_entropy(logits * 1.0, targets, inplace=True).backward()
