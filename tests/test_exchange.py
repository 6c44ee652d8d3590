"""One module with another forward pass: what must go on working, and its undoing."""

import copy
import inspect
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from logitless.exchange import STATES, exchange, exchanged, instance_forward, state_of, stock_forward


class Stock(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, *, offset=0.0):
        """Stock's own."""
        return self.weight * x + offset


def times(module, state, stock, x, **kwargs):
    return state["factor"] * stock(x, **kwargs)


def plus(module, state, stock, x, **kwargs):
    return stock(x, **kwargs) + state["summand"]


def test_only_the_one_module_changes_and_undo_restores_it():
    module, other = Stock(), Stock()
    undo = exchange(module, "times", times, {"factor": 3.0})
    assert module(2.0).item() == 6 and other(2.0).item() == 2 and Stock()(2.0).item() == 2
    assert type(module).__name__ == "Stock" and isinstance(module, Stock)
    assert module.state_dict().keys() == {"weight"}
    assert inspect.signature(module.forward) == inspect.signature(other.forward)
    undo()
    undo()  # twice does no harm
    assert type(module) is Stock and module(2.0).item() == 2
    assert vars(module).keys() == vars(other).keys()


@pytest.mark.parametrize("first", ["times", "plus"])
def test_two_exchanges_are_undone_in_any_order(first):
    module = Stock()
    undo = {"times": exchange(module, "times", times, {"factor": 3.0})}
    undo["plus"] = exchange(module, "plus", plus, {"summand": 1.0})
    assert module(2.0).item() == 7
    undo.pop(first)()
    assert module(2.0).item() == {"times": 3, "plus": 6}[first]
    undo.popitem()[1]()
    assert type(module) is Stock and module(2.0).item() == 2


def test_a_class_on_top_of_ours_may_come_later():
    """As FSDP2's does."""
    module = Stock()
    undo = exchange(module, "times", times, {"factor": 3.0})
    module.__class__ = type("FSDPStock", (type(module),), {})
    assert module(2.0).item() == 6
    undo()
    assert module(2.0).item() == 2 and type(module).__name__ == "FSDPStock"


def test_a_deep_copy_runs_its_own_weights_and_is_undone_on_its_own():
    module = Stock()
    undo = exchange(module, "times", times, {"factor": 3.0})
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.fill_(10.0)
    state_of(twin, "times")["factor"] = 2.0
    assert module(1.0).item() == 3 and twin(1.0).item() == 20
    undo()
    assert module(1.0).item() == 1 and twin(1.0).item() == 20


def test_pickles_as_the_stock_class():
    module = Stock()
    exchange(module, "times", times, {"factor": 3.0})
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for restored in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert type(restored) is Stock and restored(2.0).item() == 2 and state_of(restored, "times") is None


def test_once_for_each_key():
    module = Stock()
    exchange(module, "times", times, {"factor": 3.0})
    with pytest.raises(ValueError, match="undo that first"):
        exchange(module, "times", times, {"factor": 3.0})


def test_traces_into_one_graph():
    module = Stock()
    exchange(module, "times", times, {"factor": 3.0})
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert compiled(torch.tensor(2.0)).item() == 6


def on_instance(module, factor):
    """A forward pass on the instance that calls the one before it, as TRL and Accelerate put there."""
    before = module.forward

    def forward(self, x, **kwargs):
        return factor * before(x, **kwargs)

    module.forward = forward.__get__(module)
    return module.forward


def test_a_forward_on_the_instance_is_back_after_an_undo():
    module = Stock()
    forward = on_instance(module, 2.0)
    assert instance_forward(module) is forward
    undo = exchange(module, "times", times, {"factor": 3.0})
    assert module(1.0).item() == 6 and "forward" not in vars(module) and instance_forward(module) is forward
    undo()
    assert vars(module)["forward"] is forward and type(module) is Stock and STATES not in vars(module)
    assert stock_forward(module)(1.0).item() == 1


@pytest.mark.parametrize("again", [False, True], ids=["undone", "exchanged_again"])
def test_one_below_a_forward_that_came_later_goes_on_passing_calls_on(again):
    """Accelerate wraps the forward pass that it finds, which is ours; undone, what was there before ours
    still runs below it."""
    module = Stock()
    on_instance(module, 2.0)
    undo = exchange(module, "times", times, {"factor": 3.0})
    on_instance(module, 5.0)
    assert module(1.0).item() == 30
    undo()
    assert module(1.0).item() == 10 and state_of(module, "times") is None
    if again:
        undo = exchange(module, "times", times, {"factor": 7.0})
        assert module(1.0).item() == 70
        undo()
    del module.forward
    assert module(1.0).item() == 2


def test_for_as_long_as_a_with_statement():
    module = Stock()
    forward, before = on_instance(module, 2.0), dict(vars(module))
    with exchanged(module, "times", times, {"factor": 3.0}):
        assert module(1.0).item() == 6
        with exchanged(module, "times", plus, {"summand": 1.0}):
            assert module(1.0).item() == 3
        assert module(1.0).item() == 6
        twin = copy.deepcopy(module)
        assert type(twin) is Stock and vars(twin)["forward"].__func__ is forward.__func__
        with pytest.raises(ValueError, match="undo that first"):
            exchange(module, "times", times, {"factor": 3.0})
    assert vars(module) == before and type(module) is Stock
    with pytest.raises(RuntimeError), exchanged(module, "times", times, {"factor": 3.0}):
        raise RuntimeError
    assert vars(module) == before and type(module) is Stock


def test_of_a_with_statement_in_another_thread():
    """Each thread gets its own, in whatever order they end, and a thread without one what is below."""
    module = Stock()
    forward, before = on_instance(module, 2.0), dict(vars(module))
    actual, turns = {}, [threading.Event() for _ in range(3)]

    def run():
        turns[0].wait(10)
        actual["none"] = module(1.0).item(), state_of(module, "times")
        with exchanged(module, "times", plus, {"summand": 1.0}):
            actual["inside"] = module(1.0).item()
            turns[1].set()
            turns[2].wait(10)
            actual["alone"] = module(1.0).item()
            assert type(copy.deepcopy(module)) is Stock

    thread = threading.Thread(target=run)
    thread.start()
    with exchanged(module, "times", times, {"factor": 3.0}):
        turns[0].set()
        turns[1].wait(10)
        assert module(1.0).item() == 6
    assert module(1.0).item() == 2 and instance_forward(module) is forward
    turns[2].set()
    thread.join()
    assert actual == {"none": (2, None), "inside": 3, "alone": 3}
    assert vars(module) == before and type(module) is Stock


def test_for_as_long_as_a_with_statement_on_one_that_stays():
    module = Stock()
    undo = exchange(module, "times", times, {"factor": 3.0})
    with exchanged(module, "times", times, {"factor": 5.0}):
        assert module(1.0).item() == 5
    assert module(1.0).item() == 3
    undo()
    assert type(module) is Stock


def test_a_deep_copy_of_a_wrapper_that_passes_names_on_is_one_of_the_wrapper():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):  # as PEFT's models
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    wrapper = Wrapper(nn.Linear(2, 2))
    exchange(wrapper.inner, "times", times, {"factor": 3.0})
    twin = copy.deepcopy(wrapper)
    x = torch.ones(1, 2)
    assert type(twin) is Wrapper and torch.equal(twin.inner(x), wrapper.inner(x))


class Gated(Stock):
    def gate(self, x):
        return 2 * x

    def forward(self, x):
        return self.weight * self.gate(x)


def test_another_method_than_the_forward_pass():
    module, other = Gated(), Gated()
    undo = exchange(module, "gate", times, {"factor": 3.0}, method="gate")
    undo_forward = exchange(module, "plus", plus, {"summand": 1.0})
    assert module(2.0).item() == 13 and other(2.0).item() == 4
    assert instance_forward(module) is None and stock_forward(module)(2.0).item() == 12
    twin, restored = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    assert twin(2.0).item() == 13 and restored(2.0).item() == 4 and type(restored) is Gated
    undo()
    assert module(2.0).item() == 5 and twin(2.0).item() == 13
    undo_forward()
    assert type(module) is Gated and vars(module).keys() == vars(other).keys()


def test_another_method_on_the_instance_is_back_afterwards():
    module = Gated()
    mine = module.gate = lambda x: 5 * x
    undo = exchange(module, "gate", times, {"factor": 3.0}, method="gate")
    assert module(2.0).item() == 30 and instance_forward(module) is None
    assert module.__reduce_ex__(2)[2]["gate"] is mine
    undo()
    assert module(2.0).item() == 10 and module.__dict__["gate"] is mine and type(module) is Gated


def test_another_method_that_was_put_on_top_stays():
    """As with a `forward`: it may call what was below it."""
    module = Gated()
    module.gate = lambda x: 5 * x
    undo = exchange(module, "gate", times, {"factor": 3.0}, method="gate")
    inner = module.gate
    module.gate = lambda x: inner(x) + 1
    assert module(2.0).item() == 31
    undo()
    assert module(2.0).item() == 11
