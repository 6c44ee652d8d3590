"""Which statements of a forward pass are replaced, that all others stay, and that each replacement computes
the same as the statements."""

import functools
import inspect
import traceback

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from logitless.exchange import state_of
from logitless.layers import fused_forwards
from logitless.layers.rewrite import rewrite
from logitless.layers.source import UnrecognizedSource
from logitless.layers.statements import FusibleNames
from logitless.models import fuse_layers
from tests.layers.tiny import assert_same, counted, step, tiny

NORMS = frozenset({"norm", "q_norm", "k_norm"})
KNOWN = FusibleNames(NORMS, NORMS, frozenset({"act"}), frozenset({"apply_rotary_pos_emb"}))
ADD, POST = "the addition before norm, and the norm", "norm and the addition after it"
GATE, PACKED = "gate act", "gate act of both halves of one tensor"
NORMED, ROTATION = "q_norm, k_norm and the rotation after them", "apply_rotary_pos_emb"
NORMED_Q, NORMED_K = "q_norm and the rotation after it", "k_norm and the rotation after it"
CASES: dict[type[nn.Module], set[str]] = {}  # module -> what is fused in its forward pass


def fuses(*what: str):
    """Adds a class to `CASES`."""

    def add(cls):
        CASES[cls] = set(what)
        return cls

    return add


def renamed(old: str, new: str):
    """Decorator that renames an argument, as transformers' `deprecate_kwarg`."""

    def decorate(function):
        @functools.wraps(function)
        def renaming(*args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renaming

    return decorate


def doubled(function):
    """Decorator that changes the result."""

    @functools.wraps(function)
    def doubling(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return doubling


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.q_norm, self.k_norm = LlamaRMSNorm(8), LlamaRMSNorm(8), LlamaRMSNorm(8)
        self.proj, self.act, self.multiplier = nn.Linear(8, 8), ACT2FN["silu"], 0.5
        for norm in (self.norm, self.q_norm, self.k_norm):
            nn.init.normal_(norm.weight)


@fuses(ADD)
class Plain(Base):
    def forward(self, x, r):
        x = r + x
        r = x
        x = self.norm(x)
        return x, r


@fuses(ADD)
class Scaled(Base):
    def forward(self, x, r):
        x = r + self.proj(x) * self.multiplier
        r = x
        x = self.norm(x)
        return x, r


@fuses(ADD)
class OtherNames(Base):
    def forward(self, x, r):
        total = self.proj(x) + r
        y = self.norm(total)
        return y, total


@fuses(ADD)
class SumIsLost(Base):
    def forward(self, x, r):
        x = r + x
        x = self.norm(x)
        return x


@fuses()
class SumHasTwoNames(Base):
    def forward(self, x, r):
        x = r + x
        s = x
        y = self.norm(x)
        return x, s, y


@fuses()
class NormElsewhere(Base):
    def forward(self, x, r):
        x = r + x
        r = x
        x = x * 2
        x = self.norm(x)
        return x, r


@fuses(POST)
class AfterNorm(Base):
    def forward(self, x, r):
        x = self.norm(self.proj(x))
        x = x + r
        return x


@fuses()
class NormIsUsedTwice(Base):
    def forward(self, x, r):
        y = self.norm(x)
        x = r + y
        return x, y


@fuses(ADD)
class TorchsLayerNorm(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x, r):
        x = self.proj(x) + r
        r = x
        x = self.norm(x)
        return x, r


@fuses()
class AfterTorchsLayerNorm(TorchsLayerNorm):
    def forward(self, x, r):
        x = self.norm(x)
        x = r + x
        return x


@fuses(ADD, POST)
class InABranch(Base):
    def forward(self, x, r):
        if x.shape == r.shape:
            x = self.norm(x)
            x = r + x
        else:
            x = r + x
            x = self.norm(x)
        return x


@fuses(GATE)
class Gate(Base):
    def forward(self, x, r):
        return self.proj(r * self.act(x)) + self.act(r) * x


@fuses(PACKED)
class Packed(Base):
    def forward(self, x, r):
        a, x = torch.cat((x, r), -1).chunk(2, dim=-1)
        x = x * self.act(a)
        return self.proj(x)


@fuses(PACKED)
class PackedAtOnce(Base):
    def forward(self, x, r):
        a, b = torch.cat((x, r), -1).chunk(2, -1)
        return self.proj(self.act(a) * b)


@fuses(GATE)
class HalvesLiveOn(Base):
    def forward(self, x, r):
        a, b = torch.cat((x, r), -1).chunk(2, dim=-1)
        y = self.act(a) * b
        return y + b


@fuses(GATE)
class GateIsSecond(Base):
    def forward(self, x, r):
        b, a = torch.cat((x, r), -1).chunk(2, dim=-1)
        return self.act(a) * b


@fuses(NORMED)
class NormBeforeTransposition(Base):
    def forward(self, x, r):
        q = self.q_norm(x.view(2, 3, 1, 8)).transpose(1, 2)
        k = self.k_norm(r.view(2, 3, 1, 8)).transpose(1, 2)
        v = self.proj(x)
        q, k = apply_rotary_pos_emb(q, k, torch.cos(x), torch.sin(x))
        return q, k, v


@fuses(NORMED)
class NormAfterTransposition(Base):
    def forward(self, x, r):
        q = x.view(2, 3, 1, 8).transpose(1, 2)
        k = r.view(2, 3, 1, 8).transpose(1, 2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, torch.cos(x), torch.sin(x))
        return q, k


@fuses(ROTATION)
class NormedIsUsed(Base):
    def forward(self, x, r):
        q = self.q_norm(x.view(2, 3, 1, 8)).transpose(1, 2)
        k = self.k_norm(r.view(2, 3, 1, 8)).transpose(1, 2)
        size = q.abs().sum()
        q, k = apply_rotary_pos_emb(q, k, torch.cos(x), torch.sin(x))
        return q, k, size


def rotate_one(x, cos, sin, unsqueeze_dim=1):
    """Gemma 4's."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return x * cos + rotate_half(x) * sin


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


@fuses(NORMED_Q, NORMED_K)
class NormsAndRotationsOfOneTensor(Base):
    def forward(self, x, r):
        q = self.q_norm(x.view(2, 3, 1, 8))
        q = rotate_one(q, torch.cos(x), torch.sin(x), unsqueeze_dim=2)
        q = q.transpose(1, 2)
        if r is not None:
            k = r.view(2, 3, 1, 8).transpose(1, 2)
            v = k
            k = self.k_norm(k)
            v = self.proj(v)
            k = rotate_one(k, torch.cos(x), torch.sin(x))
        return q, k, v


@fuses("rotate_one")
class NormsThatAreNotBeforeARotationOfOneTensor(Base):
    def forward(self, x, r):
        normed = self.q_norm(x.view(2, 3, 1, 8))
        q = rotate_one(normed, torch.cos(x), torch.sin(x), unsqueeze_dim=2)
        k = self.k_norm(r.view(2, 3, 1, 8)).transpose(1, 2)
        k = rotate_one(k, torch.cos(x), torch.sin(x))
        return q, k, normed


@fuses("rotate_one")
class NormedIsUsedBeforeARotationOfOneTensor(Base):
    def forward(self, x, r):
        q = self.q_norm(x.view(2, 3, 1, 8))
        size = q.abs().sum()
        q = rotate_one(q, torch.cos(x), torch.sin(x), unsqueeze_dim=2)
        k = self.k_norm(r.view(2, 3, 1, 8))
        k = rotate_one(k, torch.cos(x), torch.sin(x), 2)
        return q, k, size


@fuses()
class SumBeforeALinear(Base):
    def forward(self, x, r):
        x = r + x
        r = x
        x = self.proj(x)
        return x, r


@fuses(ROTATION)
class AnotherTransposition(Base):
    def forward(self, x, r):
        q = self.q_norm(x.view(3, 1, 2, 8)).transpose(0, 2)
        k = self.k_norm(r.view(3, 1, 2, 8)).transpose(0, 2)
        q, k = apply_rotary_pos_emb(q, k, torch.cos(x), torch.sin(x))
        return q, k


@fuses(ROTATION)
class NormedHasAnotherName(Base):
    def forward(self, x, r):
        q = x.view(2, 1, 3, 8)
        k = r.view(2, 1, 3, 8)
        normed = self.q_norm(q)
        k = self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, torch.cos(x), torch.sin(x))
        return q, k, normed


@fuses(ROTATION)
class RotatedHasAnotherName(Base):
    def forward(self, x, r):
        q = self.q_norm(x.view(2, 1, 3, 8))
        k = self.k_norm(r.view(2, 1, 3, 8))
        q_rotated, k_rotated = apply_rotary_pos_emb(q, k, torch.cos(x), torch.sin(x))
        return q_rotated, k_rotated, q, k


@fuses(ROTATION)
class NormsOfAnotherKind(NormBeforeTransposition):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)


@fuses()
class NormBesideASum(Base):
    def forward(self, x, r):
        y = self.norm(r)
        x = x + r
        return x, y


@fuses()
class SumBesideANorm(Base):
    def forward(self, x, r):
        x = r + x
        y = self.norm(r)
        return x, y


@fuses(ROTATION)
class NormOfAllHeads(Base):
    def forward(self, x, r):
        q = self.q_norm(x)
        k = self.k_norm(r)
        q = q.view(2, 3, 1, 8).transpose(1, 2)
        k = k.view(2, 3, 1, 8).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, torch.cos(x), torch.sin(x))
        return q, k


@fuses(ADD, GATE)
class Decorated(Base):
    @doubled
    @renamed("residual", "r")
    def forward(self, x, r):
        x = r + x
        y = self.norm(x)
        return self.act(y) * x


def outcome(module: nn.Module, x: Tensor, r: Tensor) -> list[Tensor]:
    """Results, and gradients of all that has one."""
    x, r = x.detach().requires_grad_(), r.detach().requires_grad_()
    results = module(x, r)
    results = results if isinstance(results, tuple) else (results,)
    leaves = [x, r, *module.parameters()]
    total = sum((y * torch.arange(y.numel()).view(y.shape).cos()).sum() for y in results)
    actual = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*(y.detach() for y in results), *(g for g in actual if g is not None)]


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 8, generator=generator), torch.randn(2, 3, 8, generator=generator)


def fuse_and_compare(module: nn.Module, x: Tensor, r: Tensor) -> set[str]:
    """What was fused in the module's own forward pass, which computes the same as before."""
    expected = outcome(module, x, r)
    report = fuse_layers(module).report
    torch.testing.assert_close(outcome(module, x, r), expected, rtol=1e-5, atol=1e-5)
    return set(report.fused.get("", ()))


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_a_rewritten_forward_computes_the_same(cls):
    assert fuse_and_compare(cls(), *operands()) == CASES[cls]


# Shapes that hooks on q_norm and k_norm see.
HEADS = {
    NormBeforeTransposition: [(2, 3, 1, 8)] * 2,
    NormAfterTransposition: [(2, 1, 3, 8)] * 2,
    NormsAndRotationsOfOneTensor: [(2, 3, 1, 8), (2, 1, 3, 8)],
}


@pytest.mark.parametrize("cls", [cls for cls, fused in CASES.items() if fused], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("why", ["hooks", "a forward on the instance", "another dtype", "compiled modules"])
def test_and_so_does_its_way_around_the_operators(cls, why, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("an operator that goes around a module")

    module, (x, r) = cls(), operands()
    seen = []
    if why == "another dtype":
        module, x, r = module.double(), x.double(), r.double()
    expected = outcome(module, x, r)
    fuse_layers(module)
    for child in (module.norm, module.q_norm, module.k_norm, module.act):
        if why == "hooks":
            child.register_forward_hook(lambda module, args, output: seen.append([x.shape for x in args]))
        if why == "a forward on the instance":
            child.forward = child.forward
        if why == "compiled modules":
            child._compiled_call_impl = child._call_impl
    for name in ("add_rms_norm", "add_layer_norm", "rms_norm_add", "qk_norm_rope", "gated"):
        monkeypatch.setattr(fused_forwards, name, forbidden)
    torch.testing.assert_close(outcome(module, x, r), expected, rtol=1e-5, atol=1e-5)
    if why == "hooks" and cls in HEADS:
        assert seen == [[shape] for shape in HEADS[cls]]


@pytest.mark.parametrize("cls", [Plain, AfterNorm, Gate])
def test_operands_that_must_be_stretched(cls):
    x, r = operands()
    fuse_and_compare(cls(), x, r[:1])


@pytest.mark.parametrize("cls", [Plain, TorchsLayerNorm, AfterNorm, Gate, NormAfterTransposition])
def test_dtypes_under_autocast(cls):
    """As the stock module's: a LayerNorm is one in fp32 then."""
    module, (x, r) = cls(), operands()
    r = r.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(module.proj(x), r)
        fuse_layers(module)
        actual = module(module.proj(x), r)
    for y, z in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (actual, expected)), strict=True
    ):
        # A rotation keeps bf16 where stock goes to fp32, and attention comes back to bf16.
        assert y.dtype == z.dtype or cls is NormAfterTransposition
        torch.testing.assert_close(y.float(), z.float(), rtol=3e-2, atol=3e-2)


def test_a_factor_that_is_a_tensor_keeps_its_gradient():
    module = Scaled()
    module.multiplier = nn.Parameter(torch.tensor(0.5))
    fuse_and_compare(module, *operands())


def test_sides_are_evaluated_in_their_order():
    class Ordered(Base):
        def side(self, x, name):
            self.seen.append(name)
            return x

        def forward(self, x, r):
            self.seen = []
            before = self.side(r, "left") * self.act(self.side(x, "right"))
            return before + self.act(self.side(x, "a")) * self.side(r, "b")

    module = Ordered()
    fuse_layers(module)
    module(*operands())
    assert module.seen == ["left", "right", "a", "b"]


def test_tracebacks_show_the_models_own_lines():
    class Failing(Base):
        def forward(self, x, r):
            x = self.act(x) * r
            return x.no_such_attribute

    module = Failing()
    fuse_layers(module)
    with pytest.raises(AttributeError) as caught:
        module(*operands())
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename == __file__ and last.line == "return x.no_such_attribute"


def test_globals_stay_live():
    module = Gate()
    fuse_layers(module)
    assert state_of(module, fused_forwards.KEY).value.__globals__ is Gate.forward.__globals__


@pytest.mark.parametrize("when", ["before", "after"])
def test_torchs_layer_norm_may_be_replaced(when, monkeypatch):
    module, (x, r) = TorchsLayerNorm(), operands()
    stock = nn.LayerNorm.forward
    if when == "after":
        assert fuse_layers(module).report.fused[""] == (ADD,)
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: 2 * stock(self, x))
    if when == "before":
        assert "" not in fuse_layers(module).report.fused
    total = module.proj(x) + r
    torch.testing.assert_close(module(x, r), (2 * stock(module.norm, total), total))


def test_defaults_are_those_of_the_function():
    size = 3

    class Defaults(Base):
        def forward(self, x, r=None, *, factor=size):
            return self.act(x) * (x if r is None else r) * factor

    module = Defaults()
    x, _ = operands()
    expected = module(x)
    fuse_layers(module)
    torch.testing.assert_close(module(x), expected)
    assert inspect.signature(state_of(module, fused_forwards.KEY).value) == inspect.signature(
        Defaults.forward
    )


def test_what_cannot_be_told_from_the_source():
    class WithSuper(Base):
        def forward(self, x, r):
            return self.act(x) * super().forward(x)

    class WithPrivateNames(Base):
        def forward(self, x, r):
            return self.act(x) * self.__factor

    namespace = {"Base": Base}
    exec("class NoSource(Base):\n    def forward(self, x, r):\n        return self.act(x) * r", namespace)
    for cls, why in (
        (WithSuper, "depends on where it is defined"),
        (WithPrivateNames, "depends on where it is defined"),
        (namespace["NoSource"], "its source is not available"),
    ):
        with pytest.raises(UnrecognizedSource, match=why):
            rewrite(cls.forward, KNOWN, {})


def test_decorators_run_around_the_rewritten_forward():
    module, (x, r) = Decorated(), operands()
    expected = module(x, residual=r)
    fuse_layers(module)
    with counted() as calls:
        torch.testing.assert_close(module(x, residual=r), expected)
    assert calls == {"add_rms_norm": 1, "gated": 1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'rest'"):
        module(x, rest=r)


def test_a_decorator_that_is_not_a_closure_is_left_alone():
    class Calling:
        def __init__(self, function):
            functools.update_wrapper(self, function)

        def __get__(self, module, cls):
            return self if module is None else functools.partial(self.__wrapped__, module)

    class Attention(Base):
        @Calling
        def forward(self, x, r):
            return self.act(x) * r

    module, (x, r) = Attention(), operands()
    expected = module(x, r)
    report = fuse_layers(module).report
    assert report.skipped[""] == "its forward pass is wrapped by Calling"
    assert torch.equal(module(x, r), expected)


def test_a_decorated_norm_is_left_alone():
    class DoubledNorm(LlamaRMSNorm):
        @doubled
        def forward(self, hidden_states):
            return super().forward(hidden_states)

    module, (x, r) = Plain(), operands()
    module.norm = DoubledNorm(8)
    expected = outcome(module, x, r)
    report = fuse_layers(module).report
    assert report.skipped["norm"] == f"its forward pass is wrapped by doubling of {__name__}"
    assert "" not in report.fused and all(map(torch.equal, outcome(module, x, r), expected))


@pytest.mark.parametrize("name", ["cache", "past_key_values", "layer_past"])
def test_a_call_with_a_cache_and_without_gradients_runs_the_models_code(name):
    class WithCache(Base):
        def forward(self, x, r, **kwargs):
            return self.act(x) * r

    module, (x, r) = WithCache(), operands()
    fuse_layers(module)
    with counted() as calls, torch.no_grad():
        module(x, r, **{name: object()})
        assert not calls
        module(x, r, **{name: None})
    assert calls == {"gated": 1}


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_are_fused_where_their_forward_pass_runs(implementation):
    model = tiny("Mixtral")
    model.set_experts_implementation(implementation)
    expected = step(model)
    report = fuse_layers(model).report
    experts = {name for name, cls in report.classes.items() if cls == "MixtralExperts"}
    part = "gate act_fn of both halves of one tensor" if implementation == "eager" else "expert gate"
    assert {report.fused[name] for name in experts} == {(part,)}
    with counted() as calls:
        assert_same(step(model), expected)
    assert calls["gated"] == (8 if implementation == "eager" else 2)


def test_the_rotation_of_the_models_file_is_not_touched():
    assert modeling_llama.apply_rotary_pos_emb is apply_rotary_pos_emb
    assert rewrite(NormedIsUsed.forward, KNOWN, {"apply_rotary_pos_emb": None}) is not None
    assert NormedIsUsed.forward.__globals__["apply_rotary_pos_emb"] is apply_rotary_pos_emb
