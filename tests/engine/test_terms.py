"""What an own loss hands back is checked once, by shape: every form that is refused, with its text."""

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from logitless import LogitsLoss, Term, TokenLoss
from logitless.engine import terms as module
from logitless.engine.reduction import Factors, report, settled
from logitless.engine.terms import ALWAYS_THERE, unreduced
from logitless.kernels.head.statistics import NAMES
from logitless.parallel.sequences import WHOLE_SEQUENCES
from tests.support import DEVICE, EngineCalls

H, V = 4, 11
REDUCTIONS = ["mean", "sum", "none"]

pytestmark = pytest.mark.usefixtures("uncompiled_parts")


@pytest.fixture
def uncompiled_parts(request):
    """The function of a LogitsLoss stays as it is; tests of torch.compile ask for it themselves."""
    if "compiling" in request.fixturenames:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def compiling():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def own(values: Callable, kind: type = TokenLoss, **attributes) -> type:
    """A loss class of `values(numbers (n,), batch) -> ({name: Term}, {name: Term})`."""

    def terms(self, given, batch):
        return values(given.logps if kind is TokenLoss else given.log_softmax(-1)[:, 0], batch)

    return type("Own", (kind,), {"terms": terms, **attributes})


def head(*shape: int):
    generator = torch.Generator("cpu").manual_seed(0)
    hidden, weight = (
        torch.randn(*size, H, generator=generator, device="cpu").to(DEVICE) for size in (shape, (V,))
    )
    targets = torch.randint(0, V, shape, generator=generator, device="cpu").to(DEVICE)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


# -- what is refused


def per_row(name: str, got: str) -> str:
    return (
        rf"^terms: expected '{name}' of Own as values of shape \(6,\), one per row.* got {re.escape(got)}; "
    )


def nll(value: Callable) -> Callable:
    return lambda x: ({"nll": Term(value(x))}, {})


def metrics(*names: str) -> Callable:
    return lambda x: ({"nll": Term(-x)}, {name: Term(x) for name in names})


NO_TERM = "^terms: expected a Term as 'nll' of Own, got"
NO_PAIR = r"^terms: expected \(\{name: Term\}, \{metric name: Term\}\) from Own\.terms, got \w+; "
NO_NAMES = "^metric_names: expected "
# What `terms` returns, the declared metrics, and the error of the call.
BAD = {
    "a mean": (nll(lambda x: -x.mean()), (), ValueError, per_row("nll", "()")),
    "one number": (nll(lambda x: -x.mean()[None]), (), ValueError, per_row("nll", "(1,)")),
    "a row too few": (nll(lambda x: -x[1:]), (), ValueError, per_row("nll", "(5,)")),
    "a row too many": (nll(lambda x: torch.cat((x, x[:1]))), (), ValueError, per_row("nll", "(7,)")),
    "two columns": (nll(lambda x: torch.stack((x, x), 1)), (), ValueError, per_row("nll", "(6, 2)")),
    "the second term": (
        lambda x: ({"nll": Term(-x), "reg": Term(x.mean())}, {}),
        (),
        ValueError,
        per_row("reg", "()"),
    ),
    "no part": (
        lambda x: ({}, {}),
        (),
        ValueError,
        "^terms: expected at least one part of the loss from Own.terms, got none; ",
    ),
    "no Term": (lambda x: ({"nll": -x}, {}), (), TypeError, f"{NO_TERM} Tensor; "),
    "a pair for a Term": (lambda x: ({"nll": (-x, "tokens")}, {}), (), TypeError, f"{NO_TERM} tuple; "),
    "no tensor": (
        lambda x: ({"nll": Term(1.0, over=None)}, {}),
        (),
        TypeError,
        "^terms: expected a tensor of values for 'nll' of Own, got float; ",
    ),
    "no unit": (
        lambda x: ({"nll": Term(-x, over="token")}, {}),
        (),
        ValueError,
        "^terms: expected over= one of .* in 'nll' of Own, got 'token'",
    ),
    "a mask in the loss": (
        lambda x: ({"nll": Term(-x, over=x.exp())}, {}),
        (),
        ValueError,
        "^terms: expected .* in 'nll' of Own, ",
    ),
    "a tensor": (lambda x: -x, (), TypeError, NO_PAIR),
    "a Term alone": (lambda x: Term(-x), (), TypeError, NO_PAIR),
    "a dict": (lambda x: {"nll": Term(-x)}, (), TypeError, NO_PAIR),
    "three": (lambda x: ({"nll": Term(-x)}, {}, {}), (), TypeError, NO_PAIR),
    "lists": (lambda x: ([Term(-x)], []), (), TypeError, NO_PAIR),
    "None": (lambda x: None, (), TypeError, NO_PAIR),
    "another metric": (metrics("a"), (), ValueError, NO_NAMES),
    "no metric": (metrics(), ("a",), ValueError, NO_NAMES),
    "a metric of another name": (metrics("b"), ("a",), ValueError, NO_NAMES),
    "a metric too many": (metrics("a", "b"), ("a",), ValueError, NO_NAMES),
    "a mean as a metric": (
        lambda x: ({"nll": Term(-x)}, {"a": Term(x.mean())}),
        ("a",),
        ValueError,
        per_row("a", "()"),
    ),
    "weights too few": (
        lambda x: ({"nll": Term(-x)}, {"a": Term(x, over=x[1:])}),
        ("a",),
        ValueError,
        "^terms: expected weights like the values in 'a' of Own",
    ),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("result", "names", "error", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("kind", [TokenLoss, LogitsLoss])
def test_terms_that_are_refused(kind, result, names, error, message, reduction):
    loss = own(lambda x, batch: result(x), kind, metric_names=names)(reduction=reduction)
    with pytest.raises(error, match=message):
        loss(*head(6))


@pytest.mark.parametrize("over", ["tokens", "sequences", "pairs", "chosen_tokens", None])
def test_one_number_is_right_only_where_nothing_divides_it(over):
    loss = own(lambda x, batch: ({"nll": Term(-x.sum(), over=over)}, {}))()
    hidden, weight, targets = head(6)
    if over is not None:
        with pytest.raises(ValueError, match=r"^terms: expected 'nll' of Own as values of shape"):
            loss(hidden, weight, targets)
        return
    truth = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(loss(hidden, weight, targets).loss, truth)


def test_a_sum_of_nothing_else_is_the_same_in_every_chunk_size():
    hidden, weight, targets = head(16)
    loss = own(lambda x, batch: ({"nll": Term(-x.sum(), over=None)}, {}), LogitsLoss)
    whole, cut = loss()(hidden, weight, targets), loss(logits_budget=1)(hidden, weight, targets)
    assert cut.plan.chunks > whole.plan.chunks
    torch.testing.assert_close(cut.loss, whole.loss)


# -- sequences and pairs

SEQUENCES = {"scope": "group", "unit": "pairs", "sequences_per_group": 2}
OF_PAIRS = {
    "rows": (lambda x, sums: x, True),
    "sequences": (lambda x, sums: sums, True),
    "pairs": (lambda x, sums: sums.chunk(2)[0], True),
    "rows but one": (lambda x, sums: x[1:], False),
    "a sequence too many": (lambda x, sums: torch.cat((sums, sums[:1])), False),
    "a pair too many": (lambda x, sums: sums[:3], False),
    "a mean": (lambda x, sums: sums.mean(), False),
    "one number": (lambda x, sums: sums.mean()[None], False),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("over", ["pairs", "tokens"])
@pytest.mark.parametrize(("values", "right"), OF_PAIRS.values(), ids=OF_PAIRS)
def test_values_of_a_loss_of_pairs(values, right, over, reduction, request):
    """One per row, sequence or pair, as `of` says; `over` is the divisor alone."""
    of = {"rows": "tokens", "sequences": "sequences", "pairs": "pairs"}.get(
        request.node.callspec.id.split("-")[0]
    )
    loss = own(
        lambda x, batch: ({"own": Term(values(x, batch.sum_by_sequence(x)), over, of)}, {}), **SEQUENCES
    )(reduction=reduction)
    arguments = head(4, 5)
    if right:
        loss(*arguments).loss.sum().backward()
        return
    with pytest.raises(
        ValueError,
        match=r"^terms: expected 'own' of Own as values of shape .*per row.*per sequence.*per pair.*, got ",
    ):
        loss(*arguments)


@pytest.mark.parametrize("of", [None, "tokens", "pairs", "words"])
def test_what_a_value_is_of_is_declared(of):
    """By the shape alone it could not be told where there are as many tokens as sequences."""
    loss = own(
        lambda x, batch: ({"own": Term(batch.sum_by_sequence(x), over="tokens", of=of)}, {}), **SEQUENCES
    )()
    told = pytest.warns(UserWarning, match="^terms: 'own' of Own .* Set of= .*, one of 'tokens', 'sequences'")
    message = f"^terms: expected of= the unit of `values` in 'own' of Own, got {of!r} with 4 values"
    with pytest.raises(ValueError, match=message) if of else told:
        loss(*head(4, 5))


def test_values_of_sequences_where_there_are_as_many_tokens():
    """An ignored token's sequence has a value all the same, and its mean a weight of its own."""

    def terms(x, batch):
        sums = batch.sum_by_sequence(x) + 1
        metrics = {"mean": Term(sums, over=torch.ones_like(sums), of="sequences"), "rows": Term(1 + x)}
        return {"own": Term(sums, over="tokens", of="sequences")}, metrics

    hidden, weight, targets = head(4, 1)
    targets[1] = -100
    for options in ({}, {"compact": False}, {"reduction": "none"}):
        kind = own(terms, scope="group", unit="sequences", metric_names=("mean", "rows"))
        out = kind(**options)(hidden, weight, targets)
        logps = (hidden @ weight.T).log_softmax(-1)[:, 0].gather(1, targets.clamp(min=0))[:, 0]
        sums = torch.where(targets[:, 0] == -100, 0.0, logps) + 1
        value = sums if options.get("reduction") else sums.sum() / 3
        assert torch.allclose(out.loss, value), options
        assert out.metrics["mean"].item() == pytest.approx(sums.mean().item()), options
        assert out.metrics["rows"].item() == pytest.approx((1 + logps[targets[:, 0] != -100]).mean().item())


def test_a_loss_of_tokens_has_no_values_per_sequence():
    """Its slices are of rows, wherever their sequences end."""
    loss = own(lambda x, batch: ({"own": Term(x[:4])}, {}))()
    with pytest.raises(
        ValueError, match=r"^terms: expected 'own' of Own as values of shape \(20,\), one per"
    ):
        loss(*head(4, 5))


def test_sequence_inputs_of_a_loss_of_tokens_are_refused_where_the_class_is_defined():
    message = r"^sequence_inputs: expected none in Own, got .*offsets.* with scope 'token'; set scope"
    for kind in (TokenLoss, LogitsLoss):
        with pytest.raises(TypeError, match=message):
            own(lambda x, batch: ({"own": Term(x)}, {}), kind, sequence_inputs=("offsets",))
    own(lambda x, batch: ({"own": Term(x)}, {}), sequence_inputs=("offsets",), scope="batch")


# -- statistics


STATISTICS = tuple(name for name in NAMES if name not in ALWAYS_THERE)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("others", [False, True], ids=["none", "all others"])
@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_that_is_not_declared(name, others, reduction):
    """Kernels compute some numbers together: that others are declared does not make this one declared."""

    def terms(self, stats, batch):
        return {"own": Term(getattr(stats, name) - stats.logps)}, {}

    observes = tuple(other for other in STATISTICS if others and other != name)
    loss = type("Own", (TokenLoss,), {"terms": terms, "observes": observes})(reduction=reduction)
    message = rf"^{name}: expected .*; add '{name}' to `observes`, or to `differentiates`"
    with pytest.raises(AttributeError, match=message):
        loss(*head(6))


@pytest.mark.parametrize("by", ["attribute", "property"])
@pytest.mark.parametrize(
    ("field", "names", "message"),
    [
        ("differentiates", ("logps", "log_sum_sq_probs"), "any of logps, lse, .*observes"),
        ("differentiates", ("logps", "is_top1"), "any of logps, lse, .*observes"),
        ("differentiates", ("logps", "entropi"), "any of logps, lse, .*leave it out"),
        ("differentiates", "entropy", "a tuple of names .* write"),
        ("observes", ("perplexity",), "any of logps, lse, lse_residual, entropy, .*leave it out"),
    ],
)
def test_statistics_that_are_not_there_are_refused_in_the_class(field, names, message, by):
    value = names if by == "attribute" else property(lambda self: names)
    with pytest.raises(TypeError, match=f"^{field}: expected {message}"):
        made = type("Own", (TokenLoss,), {"terms": lambda self, stats, batch: ({}, {}), field: value})
        assert by == "property"  # known where the loss is made
        made()


def test_a_name_that_is_no_statistic():
    loss = type(
        "Own", (TokenLoss,), {"terms": lambda self, stats, batch: ({"own": Term(stats.entropies)}, {})}
    )()
    with pytest.raises(AttributeError, match="^stats: expected one of logps, lse.*, got entropies; "):
        loss(*head(6))


# -- inputs that are None


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", [TokenLoss, LogitsLoss])
def test_an_error_is_noted_with_the_inputs_that_are_none(kind, reduction):
    values = lambda x, batch: ({"own": Term(batch.weights * x)}, {})  # noqa: E731
    loss = own(values, kind, token_inputs=("weights", "others"), shared_inputs=("table",))(
        reduction=reduction
    )
    arguments = head(6)
    with pytest.raises(TypeError) as caught:
        loss(*arguments, others=torch.ones(6, device=DEVICE))
    (note,) = caught.value.__notes__
    assert "Own.terms" in note and "None: weights, table." in note
    assert loss(*arguments, weights=torch.ones(6, device=DEVICE)).loss.isfinite().all()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [TokenLoss, LogitsLoss])
def test_any_error_is_noted_with_declared_inputs_alone(kind, given):
    def values(x, batch):
        if x.shape[0] == 6:  # not where it is measured
            raise KeyError("mine")
        return {"own": Term(x)}, {}

    loss = own(values, kind, token_inputs=("weights",))()
    with pytest.raises(KeyError, match="mine") as caught:
        loss(*head(6), **({"weights": torch.ones(6, device=DEVICE)} if given else {}))
    notes = getattr(caught.value, "__notes__", [])
    assert not notes if given else "None: weights." in notes[0]


# -- once, and when


@pytest.fixture
def checks(monkeypatch):
    """The slices (rows) that were checked."""
    rows, check = [], module.check_terms

    def counted(loss, result, batch):
        rows.append(batch.targets.shape[0])
        return check(loss, result, batch)

    monkeypatch.setattr(module, "check_terms", counted)
    return rows


def fresh(kind: type = TokenLoss, **attributes):
    return own(lambda x, batch: ({"nll": Term(-x)}, {}), kind, **attributes)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", [TokenLoss, LogitsLoss])
def test_a_loss_is_checked_once(kind, reduction, checks):
    loss = fresh(kind)(reduction=reduction)
    for _ in range(3):
        loss(*head(6))
    once = list(checks)
    assert len(once) == 1, "the call's own rows; on a GPU those with which the memory of `terms` is measured"
    type(loss)(reduction=reduction)(*head(6))
    assert checks == once, "an equal loss is known"
    type(loss)(reduction=reduction, ignore_index=-1)(*head(6))
    assert checks == once * 2, "another one is not"


# Right of one row, pair or sequence, and wrong of two: values, kind of the loss, shapes of the two calls.
OF_SEQUENCES = {"scope": "group", "unit": "sequences"}
RIGHT_OF_ONE = {
    "row": (lambda x, batch: Term(-x.mean()[None]), {}, (1,), (2,)),
    "pair": (
        lambda x, batch: Term(batch.sum_by_sequence(x).mean()[None], over="pairs"),
        SEQUENCES,
        (2, 5),
        (6, 5),
    ),
    "sequence of a pair": (
        lambda x, batch: Term(batch.sum_by_sequence(x)[:2], over="pairs", of="sequences"),
        SEQUENCES,
        (2, 5),
        (6, 5),
    ),
    "sequence": (
        lambda x, batch: Term(batch.sum_by_sequence(x).mean()[None], over="sequences"),
        OF_SEQUENCES,
        (1, 5),
        (4, 5),
    ),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", [TokenLoss, LogitsLoss])
@pytest.mark.parametrize(("value", "attributes", "one", "two"), RIGHT_OF_ONE.values(), ids=RIGHT_OF_ONE)
def test_one_of_them_shows_nothing(value, attributes, one, two, kind, reduction):
    """A mean over one row has the shape of a value per row: the next slice must raise."""
    if attributes and kind is LogitsLoss:
        pytest.skip("a loss of logits has values per row")
    loss = own(lambda x, batch: ({"own": value(x, batch)}, {}), kind, **attributes)(reduction=reduction)
    loss(*head(*one))
    with pytest.raises(ValueError, match=r"^terms: expected 'own' of Own as values of shape .*per row.* got"):
        loss(*head(*two))


def test_one_row_is_checked_again(checks):
    loss = fresh()()
    for rows in (1, 1, 2, 1, 7):
        loss(*head(rows))
    assert checks == [1, 1, 2]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checked_for_each_set_of_inputs_that_are_none(reduction):
    """The branch without an input is another function."""

    def values(x, batch):
        return {"own": Term(-x if batch.weights is None else (x * batch.weights).mean())}, {}

    loss = own(values, token_inputs=("weights",))(reduction=reduction)
    hidden, weight, targets = head(6)
    loss(hidden, weight, targets)
    for _ in range(2):
        with pytest.raises(ValueError, match="^terms: expected 'own' of Own"):
            loss(hidden, weight, targets, weights=torch.ones(6, device=DEVICE))
    loss(hidden, weight, targets)


# -- while torch.compile traces, and on fake tensors

TRACED = ["a mean", "a row too few", "a tensor", "no Term", "another metric"]


def traced(how: str, **options) -> TokenLoss:
    """Wrong in one of the ways above."""
    result, *_ = BAD[how]
    return own(lambda x, batch: result(x))(**options)


@pytest.mark.each_value
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", TRACED)
def test_terms_that_are_refused_under_compile(how, reduction, compiling):
    loss = traced(how, reduction=reduction)
    compiled = torch.compile(lambda h, w, t: loss(h * 2, w, t).loss, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception) as caught:
        compiled(*head(6))
    text = str(caught.value)
    # Dynamo may wrap an error that it meets while it traces, or report it as its own.
    expected = "metric_names: expected" if how == "another metric" else "terms: expected"
    assert expected in text, text


def test_right_terms_pass_under_compile_and_no_state_is_touched(compiling):
    loss = own(lambda x, batch: ({"nll": Term(-x)}, {}), LogitsLoss)(reduction="none")
    own_loss = own(lambda x, batch: ({"nll": Term(-x)}, {}))(reduction="none")
    for made in (own_loss, loss):
        compiled = torch.compile(
            lambda h, w, t, made=made: made(h * 2, w, t).loss, backend="aot_eager", fullgraph=True
        )
        hidden, weight, targets = head(6)
        before = set(module._CHECKED)
        with EngineCalls(uncompiled=True):
            actual = compiled(hidden, weight, targets)
        if made is own_loss:
            assert {known for known in set(module._CHECKED) - before if known[1] == made.identity} == set()
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(actual, made(hidden * 2, weight, targets).loss)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", TRACED)
def test_terms_that_are_refused_on_fake_tensors(how, reduction):
    with FakeTensorMode():
        hidden, weight = torch.empty(6, H, requires_grad=True), torch.empty(V, H)
        targets = torch.zeros(6, dtype=torch.int64)
        with pytest.raises((TypeError, ValueError), match="^(terms|metric_names): expected"):
            traced(how, reduction=reduction, compact=False)(hidden, weight, targets)


# -- reductions


def test_means():
    """Of metrics of every kind, from slices that differ in length."""
    values, masks = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.0, 1.0])
    slices = [
        {
            "token": Term(x),
            "other token": Term(3 * x),
            "hit": Term(x > 1),
            "pair": Term(pair, over="pairs"),
            "sum": Term(x, over=None),
            "whole": Term(x.sum(), over=None),
            "masked": Term(x * mask, over=mask),
            "nowhere": Term(0 * x, over=torch.zeros_like(mask)),
        }
        for x, mask, pair in ((values, masks, values[:1]), (values[1:], masks[1:], values[:2]))
    ]
    factors = Factors(None, {None: 1.0, "tokens": 0.2, "pairs": torch.tensor(1 / 3)})
    loss = SimpleNamespace(metric_names=tuple(slices[0]), sequences=WHOLE_SEQUENCES)
    reports = [report(loss, ({"loss": Term(values)}, metrics), factors) for metrics in slices]
    actual = dict(zip(loss.metric_names, settled(loss, reports, torch.float32)[1:].tolist(), strict=True))
    expected = {"token": 2.6, "other token": 7.8, "pair": 4 / 3, "sum": 13.0, "whole": 13.0}
    expected |= {"hit": 0.8, "masked": 3.0, "nowhere": 0.0}
    assert actual == pytest.approx(expected)


def test_terms_of_several_units_are_not_unreduced():
    values = torch.tensor([1.0, 2.0, 4.0])
    with pytest.raises(
        ValueError, match="^reduction: expected 'mean' or 'sum' for a loss of several units, got 'none' with "
    ):
        unreduced({"a": Term(values), "b": Term(values, over="pairs")})
