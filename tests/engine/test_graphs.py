"""Graphs of losses of per-token statistics: for which calls they are made, when they are refused, and that
they serve every size. Every formula runs in a graph in tests/random/test_losses.py."""

import copy
import dis
import functools
import gc
import inspect
import logging
import multiprocessing
import pickle
import shutil
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

import numpy as np
import pytest
import torch

import logitless.losses
from logitless import CrossEntropyLoss, DistillationLoss, DPOLoss, GRPOLoss, Term, TokenLoss
from logitless.engine import compiled, reduction, static_rows
from logitless.engine.batch import Batch, TokenStats
from logitless.engine.segments import Segments
from logitless.kernels.head import cross_entropy as kernels
from tests.cases import usually
from tests.support import DEVICE

H, V = 4, 12


@pytest.fixture
def graphs(monkeypatch) -> dict:
    """Graphs are made and run uncompiled, on every device; those that were made."""
    monkeypatch.setattr(compiled, "COMPILES_ON", ("cpu", "cuda"))
    monkeypatch.setattr(compiled, "compile_graph", checked)
    monkeypatch.setattr(compiled, "_GRAPHS", {})
    monkeypatch.setattr(compiled, "_IDENTITIES", {})
    return compiled._GRAPHS


def test_switches():
    assert compiled.compiles_on({}) == compiled.compiles_on({"LOGITLESS_COMPILE": "1"}) == ("cuda",)
    for name, value in compiled.SWITCHES.items():
        assert compiled.compiles_on({name: value}) == ()


def test_a_coefficient_with_a_schedule_is_not_compiled_in_each_step(graphs, caplog):
    with caplog.at_level(logging.DEBUG, "logitless"):
        for step in range(compiled.MOST_IDENTITIES + 3):
            loss, tensors = CrossEntropyLoss(z_loss=0.1 * step), operands(5)
            torch.testing.assert_close(results(loss, *tensors), uncompiled(loss, *tensors))
    assert len(graphs) == compiled.MOST_IDENTITIES and None not in graphs.values()
    line = "CrossEntropyLoss is evaluated uncompiled: 16 others of its class are compiled"
    lines = [record.message for record in caplog.records if record.name == compiled.__name__]
    assert lines == [line] * 3


def test_out_of_memory_while_a_graph_is_made(graphs, monkeypatch):
    """The call runs uncompiled, and a later one makes the graph."""
    make, tensors = compiled.compile_graph, operands(5)

    def fail(graph, fakes):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(compiled, "compile_graph", fail)
    expected = uncompiled(CrossEntropyLoss(), *tensors)
    torch.testing.assert_close(results(CrossEntropyLoss(), *tensors), expected)
    assert not graphs
    monkeypatch.setattr(compiled, "compile_graph", make)
    torch.testing.assert_close(results(CrossEntropyLoss(), *tensors), expected)
    assert len(graphs) == 1 and None not in graphs.values()


def checked(graph, fakes):
    """The compiled code relies on dtypes, strides and fixed sizes of the trace, without a check."""

    def run(*tensors):
        sizes = {}
        for x, fake in zip(tensors, fakes, strict=True):
            assert x.dtype == fake.dtype and x.dim() == fake.dim() and x.is_contiguous()
            for size, traced in zip(x.shape, fake.shape):
                assert size == (sizes.setdefault(str(traced), size) if is_symbol(traced) else traced)
        return graph(*tensors)

    return run


def is_symbol(size: object) -> bool:
    return isinstance(size, torch.SymInt)


def operands(rows: int, *lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(DEVICE).requires_grad_()

    targets = torch.randint(V, (rows, *lengths), generator=generator, device="cpu").to(DEVICE)
    return [normal(rows, *lengths, H), normal(V, H), targets]


def results(loss, hidden, weight, targets, **inputs) -> list[torch.Tensor]:
    out = loss(hidden, weight, targets, **inputs)
    return [out.loss.detach(), *out.metrics.values(), *torch.autograd.grad(out.loss, (hidden, weight))]


def uncompiled(loss, *tensors, **inputs) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as without:
        without.setattr(compiled, "COMPILES_ON", ())
        return results(loss, *tensors, **inputs)


def test_sizes_that_happen_to_be_equal(graphs, monkeypatch):
    """As many rows as token ids, as sequences, and as both inputs; then each of them differs."""
    monkeypatch.setattr(static_rows, "SIZE", 0)  # sequences of one length have another graph
    loss = CrossEntropyLoss(label_smoothing=0.1)
    for rows in (V, H, 2, 3, 100):
        given = {"class_weights": torch.rand(V, device=DEVICE) + 0.5}
        given |= {"token_weights": torch.rand(rows, device=DEVICE)}
        tensors = operands(rows)
        torch.testing.assert_close(results(loss, *tensors, **given), uncompiled(loss, *tensors, **given))
    assert len(graphs) == 1
    for sequences, length in ((4, 1), (8, 4), (2, 6), (6, 2)):
        tensors = operands(sequences, length)
        given = {"ref_logps": torch.randn(sequences, device=DEVICE)}
        torch.testing.assert_close(
            results(DPOLoss(), *tensors, **given), uncompiled(DPOLoss(), *tensors, **given)
        )
    assert len(graphs) == 3, "one for cross-entropy, one for a single pair, one for several pairs"
    loss = GRPOLoss(importance_sampling_level="sequence")
    for sequences, length in ((2, 5), (3, 3), (7, 2)):
        tensors = operands(sequences, length)
        given = {"advantages": torch.randn(sequences, device=DEVICE)}
        given["old_logps"] = torch.randn(sequences, length, device=DEVICE)
        torch.testing.assert_close(results(loss, *tensors, **given), uncompiled(loss, *tensors, **given))
    assert len(graphs) == 4 and None not in graphs.values()


def test_sequences_of_one_length(graphs, monkeypatch):
    """One graph serves every length and number of sequences."""
    monkeypatch.setattr(compiled, "MOST_EQUAL", 40)

    def check(loss, sequences: int, length: int) -> None:
        tensors = operands(sequences, length)
        tensors[2][0, : length // 2] = -100
        given = {"ref_logps": torch.randn(sequences, device=DEVICE)}
        torch.testing.assert_close(results(loss, *tensors, **given), uncompiled(loss, *tensors, **given))

    loss = DPOLoss(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], compact=False)
    for sequences, length in ((4, 2), (8, 4), (6, 6), (6, 3), (40, 40)):
        check(loss, sequences, length)
    (graph,) = graphs.values()
    used = [("loss", "pairs"), ("loss", "chosen_tokens"), ("metrics", "pairs")]
    assert set(used) <= set(graph._factors) and ("loss", "tokens") not in graph._factors
    assert graph._grouping.are_equal
    computed = []
    inverse = reduction.Inverses._inverse
    monkeypatch.setattr(
        reduction.Inverses, "_inverse", lambda self, unit: computed.append(unit) or inverse(self, unit)
    )
    results(loss, *operands(4, 2), ref_logps=torch.randn(4, device=DEVICE))
    assert set(computed) == {unit for _, unit in graph._factors if unit is not None}
    for sequences, length in ((2, 9), (2, 8)):
        check(loss, sequences, length)
    assert len(graphs) == 2, "one for a single pair, one for several pairs"
    for sequences, length in ((4, 1), (42, 3), (4, 41)):
        graphs.clear()
        check(loss, sequences, length)
        (graph,) = graphs.values()
        assert not graph._grouping.are_equal, "the graph is that of sequences that differ"


def test_a_reference_head_is_read_before_the_graph_runs(graphs):
    """Neither its hidden states nor its weight, which may be a view, is an input of the graph."""
    reference = torch.randn(5, 2 * V, H, device=DEVICE)
    for sequences in (2, 4, 6):
        tensors = operands(sequences, 3)
        given = {"ref_hidden": torch.randn(sequences, 3, H, device=DEVICE), "ref_weight": reference[0, ::2]}
        torch.testing.assert_close(
            results(DPOLoss(), *tensors, **given), uncompiled(DPOLoss(), *tensors, **given)
        )
    assert len(graphs) == 2 and None not in graphs.values()
    assert all(graph._inputs == ("ref_logps",) for graph in graphs.values())


def test_statistics_of_which_the_first_are_ids(graphs, monkeypatch):
    """The factors have the dtype of the others."""
    monkeypatch.setattr(static_rows, "SIZE", 0)  # static rows have the graph of compact=False
    hidden, weight, targets = (x.detach().double() if x.is_floating_point() else x for x in operands(7))
    teacher = {"teacher_hidden": torch.randn_like(hidden), "teacher_weight": torch.randn_like(weight)}
    tensors = hidden.requires_grad_(), weight.requires_grad_(), targets
    for options in ({}, {"compact": False}):
        loss = DistillationLoss(support="student", divergence="forward_kl", k=3, **options)
        actual, expected = results(loss, *tensors, **teacher), uncompiled(loss, *tensors, **teacher)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert len(graphs) == 2 and None not in graphs.values()


def test_several_spans_and_counts_that_the_host_does_not_know(graphs):
    tensors = operands(6, 5)
    tensors[2][:, :2] = -100
    for options in ({"logits_budget": 50_000}, {"compact": False}):
        for loss in (CrossEntropyLoss(**options), GRPOLoss(loss_type="grpo", **options)):
            given = (
                {} if isinstance(loss, CrossEntropyLoss) else {"advantages": torch.randn(6, device=DEVICE)}
            )
            torch.testing.assert_close(results(loss, *tensors, **given), uncompiled(loss, *tensors, **given))
    assert len(graphs) == 4 and None not in graphs.values()


def test_a_copy_shares_the_graph_and_keeps_no_tensor(graphs):
    loss = CrossEntropyLoss(z_loss=0.1)
    hidden, weight, targets = operands(5)
    results(loss, hidden, weight, targets)
    kept = [weakref.ref(x) for x in (hidden, weight, targets)]
    del hidden, weight, targets
    gc.collect()
    assert not any(reference() is not None for reference in kept)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), CrossEntropyLoss(z_loss=0.1)):
        results(other, *operands(7))
    assert len(graphs) == 1
    results(CrossEntropyLoss(z_loss=0.2), *operands(7))
    assert len(graphs) == 2


def test_another_vocabulary_dtype_and_grad_mode(graphs):
    loss = CrossEntropyLoss(label_smoothing=0.1)
    hidden, weight, targets = operands(5)
    strided = torch.rand(2 * V, device=DEVICE)[::2]
    for size, dtype in ((V, torch.float32), (V - 2, torch.float32), (V, torch.float64)):
        tensors = [hidden.to(dtype), weight[:size].to(dtype), targets.clamp(max=size - 1)]
        tensors[:2] = [x.detach().requires_grad_() for x in tensors[:2]]
        for given in ({}, {"class_weights": strided[:size]}):
            torch.testing.assert_close(results(loss, *tensors, **given), uncompiled(loss, *tensors, **given))
            with torch.no_grad():
                value = loss(*tensors, **given).loss
            torch.testing.assert_close(value, results(loss, *tensors, **given)[0])
    assert len(graphs) == 3 * 2 * 2 and None not in graphs.values()


def test_cross_entropy_of_given_logits(graphs, monkeypatch):
    """What a reduced call evaluates runs in a graph, one for all numbers of rows, with the same results."""
    options = ({}, {"num_items": 7.5}, {"label_smoothing": 0.1, "z_loss": 0.2, "dft": True})
    options += ({"class_weights": torch.rand(V, device=DEVICE)}, {"reduction": "sum"})
    for given in options:
        for rows in (6, 2, V):
            logits = torch.randn(rows, V, device=DEVICE, requires_grad=True)
            targets = torch.randint(V, (rows,), device=DEVICE)
            targets[0] = -100
            actual = []
            for compiles_on in (("cpu", "cuda"), ()):
                monkeypatch.setattr(compiled, "COMPILES_ON", compiles_on)
                loss = logitless.cross_entropy(logits, targets, **given)
                actual.append((loss.detach().clone(), *torch.autograd.grad(loss, logits)))
                loss *= 2
            torch.testing.assert_close(*actual)
    # Where the forward pass writes the gradient, the linear losses without weights are not evaluated.
    # Elsewhere a sum is evaluated as with num_items, whose factor is a number or a tensor.
    expected = 2 if kernels.reads_once(logits, CrossEntropyLoss().logit_transform) else len(options) - 1
    assert len(graphs) == expected and None not in graphs.values()


class Left(TokenLoss):
    """A user's loss: its terms may read anything, so that a graph without guards would be wrong."""

    def terms(self, stats, batch):
        return {"left": Term(-stats.logps * FACTORS["now"])}, {}


FACTORS = {"now": 1.0}


@dataclass(frozen=True, kw_only=True)
class Inherits(CrossEntropyLoss):
    pass


class Old(torch.autograd.Function):
    """torch.func does not take it: it has no setup_context."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, upstream):
        return 2 * upstream


class WithOldFunction(TokenLoss):
    def terms(self, stats, batch):
        return {"old": Term(-Old.apply(stats.logps))}, {}


class Prints(TokenLoss):
    def terms(self, stats, batch):
        print("evaluated", file=sys.stderr)
        return {"printed": Term(-stats.logps)}, {}


class BranchesOnSize(TokenLoss):
    def terms(self, stats, batch):
        factor = 2.0 if stats.logps.shape[0] > 8 else 1.0
        return {"branched": Term(-factor * stats.logps)}, {}


class OfPairs(TokenLoss):
    scope = "group"
    sequences_per_group = 2
    metric_names = ("margin",)

    def terms(self, stats, batch):
        chosen, rejected = batch.sum_by_sequence(stats.logps).chunk(2)
        return {"pairs": Term((rejected - chosen).relu(), over="pairs")}, {
            "margin": Term((chosen - rejected).detach(), over="pairs")
        }


class Draws(TokenLoss):
    def terms(self, stats, batch):
        return {"drawn": Term(-stats.logps * torch.rand_like(stats.logps))}, {}


@pytest.fixture
def guarded(graphs, monkeypatch) -> dict:
    """torch.compile runs a loss with its guards, and no Inductor."""
    compiled._compiled_slice.cache_clear()
    without_inductor = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(compiled.torch, "compile", without_inductor)
    yield graphs
    compiled._compiled_slice.cache_clear()
    torch._dynamo.reset()


def test_losses_of_users_are_not_traced_without_guards(guarded):
    tensors = operands(5)
    before = results(Left(), *tensors)[0]
    FACTORS["now"] = 2.0
    torch.testing.assert_close(results(Left(), *tensors)[0], 2 * before)
    results(Inherits(), *tensors)
    assert not guarded


@pytest.mark.parametrize("cls", usually([Inherits], [BranchesOnSize, OfPairs, Inherits]))
def test_losses_of_users_under_torch_compile(guarded, cls):
    """Also a branch on the number of rows: its guard is checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sequences, length in ((4, 1), (4, 3), (2, 5)):
            tensors = operands(sequences, length)
            torch.testing.assert_close(results(cls(), *tensors), uncompiled(cls(), *tensors))
    assert not guarded


def test_a_loss_that_the_compiler_does_not_take(guarded, capsys):
    """One warning; it runs as before, every time."""
    with pytest.warns(UserWarning, match="^Prints is evaluated uncompiled, slower: ") as caught:
        for rows in (5, 9):
            tensors = operands(rows)
            torch.testing.assert_close(results(Prints(), *tensors), uncompiled(Prints(), *tensors))
    assert len([each for each in caught if "uncompiled" in str(each.message)]) == 1
    assert capsys.readouterr().err.count("evaluated") == 4


@pytest.mark.filterwarnings("ignore:.*torch._dynamo hit config")
def test_a_global_that_changes_in_each_call(guarded, monkeypatch):
    """The compiler gives up after some values; the loss then runs uncompiled."""
    tensors = operands(5)
    few = torch._dynamo.config.patch(recompile_limit=2)
    message = "^Left is evaluated uncompiled, slower: FailOnRecompileLimitHit"
    with few, pytest.warns(UserWarning, match=message):
        for step in range(5):
            monkeypatch.setitem(FACTORS, "now", 0.5 + step)
            torch.testing.assert_close(results(Left(), *tensors), uncompiled(Left(), *tensors))


def test_numbers_of_numpy_have_graphs_of_their_own(graphs):
    tensors = operands(5)
    for number in range(5):
        z_loss = np.linspace(0.1, 3, 5)[number]  # freed after the step
        actual = results(CrossEntropyLoss(z_loss=z_loss), *tensors)
        torch.testing.assert_close(actual, uncompiled(CrossEntropyLoss(z_loss=float(z_loss)), *tensors))
    assert len(graphs) == 5 and None not in graphs.values()
    # By value: the address of a number is another number's once it is freed.
    first, second = (CrossEntropyLoss(z_loss=np.float64("0.25")) for _ in range(2))
    assert first.z_loss is not second.z_loss and first.identity == second.identity


def test_a_first_call_under_saved_tensor_hooks(graphs):
    hidden, weight, targets = operands(5)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        results(CrossEntropyLoss(), hidden, weight, targets)
    assert graphs and None not in graphs.values()


@pytest.mark.filterwarnings("ignore:.*evaluated uncompiled")
def test_an_autograd_function_that_torch_func_does_not_take(guarded):
    tensors = operands(5)
    torch.testing.assert_close(results(WithOldFunction(), *tensors), uncompiled(WithOldFunction(), *tensors))


def test_a_random_number_is_drawn_in_each_call(guarded):
    tensors = operands(5)
    first, second = (results(Draws(), *tensors)[0] for _ in range(2))
    assert first != second
    torch.manual_seed(3)
    third = results(Draws(), *tensors)[0]
    torch.manual_seed(3)
    assert results(Draws(), *tensors)[0] == third


def test_an_error_of_a_users_terms_is_raised(guarded):
    class Wrong(TokenLoss):
        def terms(self, stats, batch):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results(Wrong(), *operands(5))


@pytest.mark.parametrize("how", ["deterministic", "stance", "anomaly", "one row", "dispatch mode"])
def test_calls_without_a_graph(graphs, how):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    tensors = operands(1 if how == "one row" else 5)
    if how == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            results(CrossEntropyLoss(), *tensors)
        finally:
            torch.use_deterministic_algorithms(False)
    elif how == "stance":
        with torch.compiler.set_stance("force_eager"):
            results(CrossEntropyLoss(), *tensors)
    elif how == "anomaly":
        with torch.autograd.set_detect_anomaly(True):
            results(CrossEntropyLoss(), *tensors)
    elif how == "dispatch mode":
        with Mode():
            results(CrossEntropyLoss(), *tensors)
    else:
        results(CrossEntropyLoss(), *tensors)
    assert not graphs


class Branches(CrossEntropyLoss):
    def terms(self, stats, batch):
        terms, metrics = super().terms(stats, batch)
        return (terms if stats.logps.shape[0] > 8 else {"other": Term(-2 * stats.logps)}), metrics


class Reads(CrossEntropyLoss):
    def terms(self, stats, batch):
        terms, metrics = super().terms(stats, batch)
        return {"scaled": Term(-stats.logps * float(stats.logps[0].detach()))}, metrics


@pytest.mark.parametrize("cls", [Branches, Reads])
def test_terms_that_cannot_be_traced_run_uncompiled(graphs, monkeypatch, caplog, cls):
    """If the library had such a loss: a line in the log, once, and right numbers at every size."""
    monkeypatch.setattr(cls, "__module__", "logitless.losses.own")
    with caplog.at_level(logging.INFO, "logitless"):
        for rows in (11, 11, 5):
            tensors = operands(rows)
            torch.testing.assert_close(results(cls(), *tensors), uncompiled(cls(), *tensors))
    (line,) = caplog.messages
    assert line.startswith(f"{cls.__name__} is evaluated uncompiled: ")
    assert set(graphs.values()) == {None}


@pytest.mark.parametrize("wrong", [0, -1], ids=["gradient", "table"])
def test_a_graph_with_other_results_is_not_used(graphs, monkeypatch, wrong):
    def miscompiled(graph, fakes):
        def run(*tensors):
            actual = list(graph(*tensors))
            actual[wrong] = actual[wrong] * (1 + 1e-4)
            return actual

        return run

    monkeypatch.setattr(compiled, "compile_graph", miscompiled)
    tensors = operands(50)
    with pytest.warns(UserWarning, match="^CrossEntropyLoss is evaluated uncompiled, slower: its compiled"):
        torch.testing.assert_close(
            results(CrossEntropyLoss(), *tensors), uncompiled(CrossEntropyLoss(), *tensors), rtol=0, atol=0
        )


class OfSequences(CrossEntropyLoss):
    unit = "sequences"


@pytest.mark.usefixtures("counted_rows")
def test_an_error_of_the_call_is_the_callers(graphs, monkeypatch):
    """It is raised as it is, and the next call makes the graph."""
    hidden, weight, targets = operands(5)
    with pytest.raises(ValueError, match="^num_items: expected"):
        CrossEntropyLoss()(hidden, weight, targets, num_items=-1)
    results(CrossEntropyLoss(), hidden, weight, targets)
    assert len(graphs) == 1 and None not in graphs.values()
    # No term of this loss is over the unit that num_items counts, also after a call without it.
    monkeypatch.setattr(OfSequences, "__module__", "logitless.losses.own")
    tensors = operands(4, 3)
    results(OfSequences(), *tensors)
    for _ in range(2):
        with pytest.raises(ValueError, match="^num_items: expected None for a loss without a term over"):
            OfSequences()(*tensors, num_items=3)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_values_that_are_not_finite(graphs, value):
    hidden, weight, targets = operands(5)
    with torch.no_grad():
        hidden[1, 0] = value
    for loss in (CrossEntropyLoss(), CrossEntropyLoss(label_smoothing=0.1)):
        actual, expected = (f(loss, hidden, weight, targets) for f in (results, uncompiled))
        torch.testing.assert_close(actual, expected, equal_nan=True)
    assert len(graphs) == 2 and None not in graphs.values()


def test_threads_make_one_graph(graphs, monkeypatch):
    made = []

    def slowly(graph, fakes):
        time.sleep(0.05)
        made.append(graph)
        return graph

    monkeypatch.setattr(compiled, "compile_graph", slowly)
    expected = uncompiled(CrossEntropyLoss(), *operands(5))
    actual = []
    threads = [
        threading.Thread(target=lambda: actual.append(results(CrossEntropyLoss(), *operands(5))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(actual) == 4, made
    assert None not in graphs.values()
    for each in actual:
        torch.testing.assert_close(each, expected)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a forked process cannot use CUDA")
def test_a_forked_process(graphs):
    """It uses the graphs of its parent, and makes its own."""
    tensors = operands(5)
    made = results(CrossEntropyLoss(), *tensors)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)
        again = results(CrossEntropyLoss(), *tensors)
        other = results(CrossEntropyLoss(z_loss=0.1), *tensors)
        sender.send([[x.tolist() for x in each] for each in (again, other)] + [len(graphs)])

    process = context.Process(target=child)
    process.start()
    assert receiver.poll(60)
    again, other, count = receiver.recv()
    process.join()
    assert again == [x.tolist() for x in made] and count == 2
    expected = uncompiled(CrossEntropyLoss(z_loss=0.1), *tensors)
    torch.testing.assert_close([torch.tensor(x, device=DEVICE) for x in other], expected)


def test_a_resumed_run_repeats_the_first_to_the_bit(graphs):
    """In a new process there are no graphs yet."""
    loss = GRPOLoss(beta=0.1, use_bias_correction_kl=False)

    def steps(weight: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        weights = []
        for size in sizes:
            hidden, _, targets = operands(size, 3)
            given = {"advantages": torch.linspace(-1, 1, size, device=DEVICE)}
            given |= {"ref_logps": torch.full((size, 3), -2.0, device=DEVICE)}
            weight = weight.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(hidden, weight, targets, **given).loss, weight)
            weight = (weight - 0.5 * gradient).detach()
            weights.append(weight)
        return weights

    _, weight, _ = operands(7)
    run = steps(weight, (5, 9, 2, 7))
    graphs.clear()
    resumed = steps(run[1], (2, 7))
    assert all(torch.equal(a, b) for a, b in zip(run[2:], resumed, strict=True))
    assert len(graphs) == 1 and None not in graphs.values()


@pytest.mark.skipif(shutil.which("g++") is None and DEVICE.type == "cpu", reason="Inductor needs a compiler")
@pytest.mark.parametrize("compact", usually([True], [True, False]))
def test_a_compiled_graph(graphs, monkeypatch, compact):
    """By Inductor: the only test here that compiles."""
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "COMPILES_ON", ("cpu", "cuda"))
    monkeypatch.setattr(compiled, "_GRAPHS", {})
    monkeypatch.setattr(compiled, "_IDENTITIES", {})
    loss = DPOLoss(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], compact=compact)
    for sequences, length in ((4, 8), (6, 3), (8, 16)):
        tensors = operands(sequences, length)
        tensors[2][1::2, : length // 2] = -100
        given = {"ref_logps": torch.randn(sequences, device=DEVICE)}
        actual = results(loss, *tensors, **given)
        torch.testing.assert_close(actual, results(loss, *tensors, **given), rtol=0, atol=0)
        torch.testing.assert_close(actual, uncompiled(loss, *tensors, **given))
    (graph,) = compiled._GRAPHS.values()
    assert graph is not None


# -- What a trace may read

IMMUTABLE = (type(None), bool, int, float, str, tuple, frozenset, torch.dtype, ModuleType, type, FunctionType)
LOSSES = [x for x in vars(logitless.losses).values() if inspect.isclass(x) and issubclass(x, TokenLoss)]


def reached(cls: type) -> dict[str, FunctionType]:
    """The functions of the library that `cls.terms` may call, by their names."""
    owners = (cls, Batch, TokenStats, Segments)
    actual: dict[str, FunctionType] = {}
    waiting = [cls.terms]
    while waiting:
        function = waiting.pop()
        if not function.__module__.startswith("logitless.") or function.__qualname__ in actual:
            continue
        actual[function.__qualname__] = function
        for code in codes(function.__code__):
            for name in code.co_names:
                attributes = [inspect.getattr_static(owner, name, None) for owner in owners]
                for x in (function.__globals__.get(name), *attributes):
                    x = getattr(x, "fget", None) or getattr(x, "function", x)  # a property
                    several = x.values() if isinstance(x, dict) and name.isupper() else [x]
                    waiting += [y for y in several if isinstance(y, FunctionType)]
    return actual


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@pytest.mark.parametrize("cls", LOSSES, ids=lambda cls: cls.__name__)
def test_terms_read_nothing_that_changes(cls):
    """Module constants, which nothing rebinds; no closures; and no attributes but those of frozen losses."""
    functions = reached(cls)
    assert f"{cls.terms.__qualname__}" in functions
    for name, function in functions.items():
        assert not function.__closure__, f"{name} is a closure"
        for code in codes(function.__code__):
            for step in dis.get_instructions(code):
                assert step.opname not in ("STORE_GLOBAL", "DELETE_GLOBAL"), f"{name} writes {step.argval}"
                x = function.__globals__.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
                table = isinstance(x, dict) and step.argval.isupper()
                fixed = isinstance(x, IMMUTABLE) or callable(x) or table
                assert fixed, f"{name} reads {step.argval}"


def test_what_is_reached():
    """The walk sees helpers in other modules, tables of functions, methods and properties."""
    names = set(reached(DPOLoss))
    assert {"DPOLoss.pairs", "of_pairs", "Batch.sum_by_sequence", "Segments.sum", "smoothed"} <= names
    assert len(reached(GRPOLoss)) > 15
