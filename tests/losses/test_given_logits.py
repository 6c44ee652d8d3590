"""`cross_entropy` of logits that exist: the formula of `CrossEntropyLoss`, refusals, and memory."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from logitless import cross_entropy
from logitless.engine import compiled
from logitless.engine.budget import PeakBytes
from logitless.engine.host_copy import HostNumbers, HostWrite
from logitless.kernels.head.targets import count_targets
from logitless.losses import given_logits
from tests.support import DEVICE, captured_step, relative_error

V = 23
DTYPES = (torch.float32, torch.float64)  # the kernels run in fp32, their twins in both
OPTIONS = (
    {},
    {"label_smoothing": 0.2, "z_loss": 0.1},
    {"dft": True, "z_loss": 0.3},
    {"softcap": 3.0, "logit_scale": 0.5, "temperature": 2.0, "label_smoothing": 0.1},
    {"ignore_index": 2, "reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.1},
    {"num_items": 7.5},
)
WEIGHTS = ((), ("class_weights",), ("token_weights",), ("class_weights", "token_weights"))


def formula(logits, targets, class_weights=None, token_weights=None, **options):
    """The docstring of `CrossEntropyLoss`, on fp64 logits: the loss of each token and its divisor."""
    c, scale, t = (options.get(name) for name in ("softcap", "logit_scale", "temperature"))
    x = logits.double() * (scale or 1.0)
    z = (x if c is None else c * torch.tanh(x / c)) / (t or 1.0)
    weights = torch.ones(V, dtype=z.dtype, device=z.device) if class_weights is None else class_weights
    supervised = targets != options.get("ignore_index", -100)
    y = torch.where(supervised, targets, 0)
    lse = z.logsumexp(-1)
    z_y = z.gather(-1, y[..., None])[..., 0]
    first = weights[y] * (lse - z_y)
    if options.get("dft"):
        first = first * (z_y - lse).exp().detach()
    epsilon = options.get("label_smoothing", 0.0)
    smooth = (weights * (lse[..., None] - z)).sum(-1) / V
    values = (1 - epsilon) * first + epsilon * smooth + options.get("z_loss", 0.0) * lse.square()
    values = torch.where(supervised, values if token_weights is None else values * token_weights, 0.0)
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    return values.sum() / options.get("num_items", torch.where(supervised, weights[y], 0.0).sum())


def given(*shape: int, dtype=torch.float64, seed: int = 0):
    generator = torch.Generator("cpu").manual_seed(seed)
    logits = (3 * torch.randn(*shape, V, generator=generator, device="cpu")).to(DEVICE, dtype)
    targets = torch.randint(V, shape, generator=generator, device="cpu").to(DEVICE)
    targets[..., 1] = -100
    weights = {
        "class_weights": torch.rand(V, generator=generator, device="cpu").to(DEVICE, torch.float64),
        "token_weights": torch.rand(*shape, generator=generator, device="cpu").to(DEVICE, torch.float64),
    }
    return logits.requires_grad_(), targets, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("names", WEIGHTS, ids=lambda x: "+".join(x) or "plain")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formula(options, names, inplace, dtype):
    logits, targets, weights = given(3, 5, dtype=dtype)
    if "ignore_index" in options:
        targets = torch.where(targets == -100, 2, targets)
    weights = {name: weights[name] for name in names}
    expected = formula(logits, targets, **weights, **options)
    upstream = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64, device=DEVICE).view(
        expected.shape
    )
    (d_expected,) = torch.autograd.grad(expected, logits, upstream)
    actual = cross_entropy(logits * 1.0, targets, **weights, **options, inplace=inplace)
    (d_found,) = torch.autograd.grad(actual, logits, upstream)
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(actual.to(dtype), expected.to(dtype), **near)
    torch.testing.assert_close(d_found, d_expected, **near)
    assert d_found.norm() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    logits, targets, _ = given(40, dtype=dtype)
    actual = cross_entropy(logits, targets, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(actual, logits)
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide, targets, label_smoothing=0.1)
    (d_expected,) = torch.autograd.grad(expected, wide)
    assert actual.dtype == torch.float32 and gradient.dtype == dtype
    assert abs(actual.item() - expected.item()) < 1e-5
    assert relative_error(gradient, d_expected) < 2 * torch.finfo(dtype).eps


def test_shifted_and_masked():
    """Position i predicts targets[i + 1], the last one nothing; mask and weights belong to targets."""
    logits, targets, weights = given(3, 6)
    mask = torch.rand(3, 6, device=DEVICE) < 0.7
    u = weights["token_weights"]
    actual = cross_entropy(logits, targets, shift=True, mask=mask, token_weights=u)
    cut = torch.where(mask, targets, -100)[:, 1:]
    expected = formula(logits[:, :-1], cut, token_weights=u[:, 1:])
    torch.testing.assert_close(actual, expected)
    for x, y in zip(*(torch.autograd.grad(each, logits) for each in (actual, expected)), strict=True):
        torch.testing.assert_close(x, y)


def test_an_infinite_upstream_gradient_is_multiplied():
    """A statistic that has no gradient adds no NaN."""
    logits = torch.tensor([[0.5, -1.0, 2.0]], device=DEVICE, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1], device=DEVICE))
    (gradient,) = torch.autograd.grad(loss, logits, torch.full_like(loss, torch.inf))
    assert gradient.tolist() == [[torch.inf, -torch.inf, torch.inf]]


@pytest.mark.parametrize("upstream", [1.0, torch.inf, torch.nan])
def test_ignored_rows_get_nothing(upstream):
    """Whatever their logits and the upstream gradient are; and a call without a supervised row is 0."""
    logits, targets, _ = given(6)
    with torch.no_grad():
        logits[1] = torch.nan
    for labels, rows in ((targets, [1]), (torch.full_like(targets, -100), slice(None))):
        for reduction in ("mean", "sum"):
            loss = cross_entropy(logits, labels, reduction=reduction)
            (gradient,) = torch.autograd.grad(loss, logits, torch.full_like(loss, upstream))
            assert loss.isfinite() and not gradient[rows].any()
    assert loss == 0


@pytest.mark.parametrize("inplace", [False, True])
def test_the_memory_that_it_takes(inplace):
    """The logits and one tensor of their size, the gradient; in place the logits alone, which become the
    gradient."""
    leaf, targets = torch.randn(400, 50_000, device=DEVICE), torch.randint(50_000, (400,), device=DEVICE)
    leaf.requires_grad_()
    # Storages are counted from the first operation that returns them, so the logits are made here.
    with PeakBytes() as watch:
        logits = leaf * 1.0
        loss = cross_entropy(logits, targets, inplace=inplace)
        (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.equal(logits, leaf) is not inplace
    assert (gradient.data_ptr() == logits.data_ptr()) is inplace
    tensors = 1 if inplace else 2
    temporaries = 0.3 if DEVICE.type == "cpu" else 0.01  # on a CPU those of the twin
    assert tensors <= watch.peak / leaf.nbytes < tensors + temporaries


def test_forward_mode_is_refused():
    """The kernels would lose the tangent."""
    logits, targets, _ = given(6)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits.detach(), torch.ones_like(logits))
        with pytest.raises(ValueError, match="^forward_ad: expected logits without a tangent"):
            cross_entropy(dual, targets)
        assert cross_entropy(logits, targets).isfinite()


def test_num_items_gets_no_gradient():
    logits, targets, _ = given(6)
    num_items = torch.tensor(3.0, device=DEVICE).requires_grad_()
    with pytest.raises(ValueError, match="^num_items: expected a tensor that requires no gradient"):
        cross_entropy(logits, targets, num_items=num_items)
    with torch.no_grad():
        assert cross_entropy(logits, targets, num_items=num_items).isfinite()


def test_what_autograd_needs_again_after_inplace():
    logits, targets, _ = given(6)
    products = logits * 1.0
    loss = cross_entropy(products, targets, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="^inplace: expected one backward pass, got a second one"):
        loss.backward()
    products = logits * 1.0
    square = products * products  # saves products
    loss = cross_entropy(products, targets, inplace=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_targets_that_change_before_the_backward_pass(dtype):
    logits, targets, weights = given(6, dtype=dtype)
    weights = weights["class_weights"].to(dtype)
    for changed, options in ((targets, {}), (weights, {"class_weights": weights, "label_smoothing": 0.1})):
        loss = cross_entropy(logits, targets, **options)
        changed.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    logits, targets, weights = given(6)
    expected = formula(logits, targets, **weights, label_smoothing=0.1)
    with mode():
        loss = cross_entropy(logits, targets, **weights, label_smoothing=0.1)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    with mode():
        logits, targets, weights = given(6)
        torch.testing.assert_close(cross_entropy(logits, targets, **weights, label_smoothing=0.1), expected)


def test_autocast_rounds_nothing():
    logits, targets, weights = given(64, dtype=torch.float32)
    logits = (logits + 100).detach()
    options = {"class_weights": weights["class_weights"], "label_smoothing": 0.5}
    expected = formula(logits, targets, **options)
    compiled = torch.compile(cross_entropy, backend="eager")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        for function in (cross_entropy, compiled):
            assert relative_error(function(logits, targets, **options), expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_host_waits_after_the_statistics_are_launched(dtype, monkeypatch):
    logits, targets, _ = given(6, dtype=dtype)
    order, kernels, read = [], given_logits.kernels, HostNumbers.tolist

    def noted(name, function):
        return lambda *operands, **options: (order.append(name), function(*operands, **options))[1]

    for name in ("token_statistics", "statistics_and_gradient"):
        monkeypatch.setattr(kernels, name, noted("statistics", getattr(kernels, name)))
    monkeypatch.setattr(HostNumbers, "tolist", noted("host", read))
    for options in ({}, {"num_items": torch.tensor(7, device=DEVICE)}, {"reduction": "none"}):
        order.clear()
        cross_entropy(logits, targets, **options).sum().backward()
        assert order == ["statistics", "host"]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a kernel writes to the host's memory")
def test_memory_of_the_host_is_kept_until_a_kernel_has_written_to_it():
    targets = torch.tensor([3, -100, V], device=DEVICE)
    count_targets(targets, V, -100, torch.empty(2, dtype=torch.int64, device=DEVICE))  # compiles
    written = HostWrite((2,), torch.int64, targets.device)
    view = written.numbers.fill_(-1)[:]
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    count_targets(targets, V, -100, written.numbers)
    written.queued()
    assert view.tolist() == [-1, -1]  # the GPU sleeps
    del written  # as after an error before `tolist`
    assert view.tolist() == [2, 1]


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """`x`, but a vector with gaps between its elements, and a matrix in other memory."""
    return torch.stack((x, torch.full_like(x, 7)), 1)[:, 0] if x.dim() == 1 else x.clone()


@pytest.mark.parametrize("upstream", [1.0, -2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hooks_may_return_saved_tensors_elsewhere(dtype, upstream):
    """Also in later calls, for which the launch of the backward pass was looked up."""
    logits, targets, _ = given(6, dtype=dtype)
    (expected,) = torch.autograd.grad(upstream * formula(logits, targets), logits)
    for unpack in (torch.Tensor.detach, elsewhere, torch.Tensor.detach):
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpack):
            loss = cross_entropy(logits, targets)
        (actual,) = torch.autograd.grad(upstream * loss, logits)
        assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_may_be_changed_in_place(reduction, dtype):
    logits, targets, _ = given(6, dtype=dtype)
    expected = 3 * formula(logits, targets, reduction=reduction)
    actual = cross_entropy(logits, targets, reduction=reduction)
    actual *= 3
    pairs = zip(*(torch.autograd.grad(each.sum(), logits) for each in (actual, expected)), strict=True)
    for x, y in ((actual, expected), *pairs):
        assert relative_error(x.detach(), y.detach()) < 1e-5


@pytest.mark.skipif(DEVICE.type != "cuda", reason="captures a CUDA graph")
@pytest.mark.parametrize("compiles_on", [(), ("cuda",)])
@pytest.mark.parametrize("options", [{}, {"num_items": 7.5}, {"reduction": "none"}], ids=str)
def test_capture(options, compiles_on, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILES_ON", compiles_on)
    logits, targets, _ = given(6, dtype=torch.float32)

    def step():
        loss = cross_entropy(logits, targets, **options)
        return loss.detach(), *torch.autograd.grad(loss.sum(), logits)

    graph, captured = captured_step(step)
    for seed in (1, 2):
        for x, y in zip((logits, targets), given(6, dtype=torch.float32, seed=seed)):
            x.data.copy_(y.detach())
        graph.replay()
        torch.testing.assert_close(captured, step())


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_differentiable_twice(dtype):
    logits, targets, _ = given(6, dtype=dtype)
    with pytest.raises(RuntimeError, match="^create_graph: expected False"):
        torch.autograd.grad(cross_entropy(logits, targets), logits, create_graph=True)


# (error, its message, arguments that are wrong as a function of right ones)
REFUSED = (
    (ValueError, r"targets: expected ids in \[0, 23\)", lambda x, y: {"targets": y + V}),
    (ValueError, r"targets: expected ids in \[0, 23\)", lambda x, y: {"targets": y - 2 * V}),
    (ValueError, "logits: expected targets' shape", lambda x, y: {"logits": x[:-1]}),
    (ValueError, "logits: expected targets' shape", lambda x, y: {"logits": x[:, 0]}),
    (TypeError, "logits: expected a bfloat16", lambda x, y: {"logits": x.long()}),
    (TypeError, "logits: expected a bfloat16", lambda x, y: {"logits": {"logits": x}}),
    (TypeError, "targets: expected integer token ids", lambda x, y: {"targets": y.float()}),
    (ValueError, r"class_weights: expected shape \(23,\)", lambda x, y: {"class_weights": x[0, 1:]}),
    (TypeError, "class_weights: expected a tensor", lambda x, y: {"class_weights": [1.0] * V}),
    (ValueError, "class_weights: expected a tensor that requires no", lambda x, y: {"class_weights": x[0]}),
    (ValueError, "token_weights: expected targets' shape", lambda x, y: {"token_weights": x[0]}),
    (ValueError, "num_items: expected None with", lambda x, y: {"num_items": 2, "reduction": "sum"}),
    (ValueError, "num_items: expected a number above 0", lambda x, y: {"num_items": 0}),
    (ValueError, "num_items: expected a number or a 0-d", lambda x, y: {"num_items": y}),
    (ValueError, "label_smoothing: expected a number in", lambda x, y: {"label_smoothing": 2.0}),
    (ValueError, "reduction: expected", lambda x, y: {"reduction": "average"}),
    (ValueError, "mask: expected bool", lambda x, y: {"mask": torch.full_like(y, 3)}),
    (ValueError, "logits: expected no leaf", lambda x, y: {"inplace": True}),
    (ValueError, "logits: expected no leaf", lambda x, y: {"logits": x.view(6, V), "inplace": True}),
    (
        ValueError,
        "logits: expected no leaf",
        lambda x, y: {"logits": (2 * x).detach().view(6, V).requires_grad_(), "inplace": True},
    ),
    (ValueError, "token_weights: expected logits' device", lambda x, y: {"token_weights": y.to("meta")}),
    (
        ValueError,
        "logits: expected contiguous",
        lambda x, y: {"logits": (x * 2)[::2], "targets": y[::2], "inplace": True},
    ),
)


@pytest.mark.parametrize(
    ("error", "message", "wrong"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused(error, message, wrong):
    logits, targets, _ = given(6)
    with pytest.raises(error, match=f"^{message}"):
        cross_entropy(**{"logits": logits, "targets": targets} | wrong(logits, targets))


def test_without_rows():
    logits = torch.empty(0, V, requires_grad=True)
    loss = cross_entropy(logits, torch.empty(0, dtype=torch.int64))
    loss.backward()
    assert loss == 0 and logits.grad.shape == (0, V)


def test_compiled():
    """Two graphs serve all lengths, and a NaN of an ignored row reaches no gradient."""

    def loss(logits, targets, class_weights):
        options = {"label_smoothing": 0.1, "class_weights": class_weights, "inplace": True}
        return cross_entropy(logits * 1.0, targets, **options)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    with torch.compiler.set_stance("default"):
        for rows in (6, 9, 14, 31):
            logits, targets, weights = given(rows, dtype=torch.float32)
            with torch.no_grad():
                logits[1] = torch.nan
            results = []
            for function in (compiled, loss):
                value = function(logits, targets, weights["class_weights"])
                results.append((value.detach(), *torch.autograd.grad(value, logits)))
            torch.testing.assert_close(*results)
    assert counter.frame_count <= 2
