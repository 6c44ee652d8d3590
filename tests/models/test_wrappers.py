"""`patch_model` and `head_of` of a model that DDP, torch.compile, DeepSpeed or accelerate has wrapped."""

import accelerate
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from logitless import linear_cross_entropy
from logitless.models import head_of, patch_model
from logitless.models.heads import base_of
from tests.cases import usually

from ..trl_integration.tiny import IDS, INPUTS, LABELS, tiny_model
from .every import gradients


class DeepSpeedEngine(nn.Module):
    """Keeps the model as `module`, hands attributes on, and calls the model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        module = super().__getattr__("module") if name != "_modules" else None
        return module if name == "module" else getattr(module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.fixture
def prepared():
    """What accelerate's `prepare` returns under autocast; DDP around it, as there is a process group."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    yield accelerator.prepare
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    file = tmp_path_factory.mktemp("ranks") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "DDP": DistributedDataParallel,
    "torch.compile": compiled,
    "torch.compile around DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DeepSpeed": DeepSpeedEngine,
}


@pytest.mark.parametrize("name", usually({*WRAPPERS} - {"torch.compile"}, WRAPPERS))
def test_a_patched_model_under_its_wrapper(name, one_rank):
    stock, expected = gradients(tiny_model(), **INPUTS)
    model = tiny_model()
    wrapped = WRAPPERS[name](model)
    assert base_of(wrapped) is model and wrapped(**INPUTS).logits is not None
    undo = patch_model(wrapped)
    ours = wrapped(**INPUTS)
    ours.loss.backward()
    assert ours.logits is None
    torch.testing.assert_close(ours.loss, stock.loss)
    torch.testing.assert_close({name: x.grad for name, x in model.named_parameters()}, expected)
    undo()
    assert wrapped(**INPUTS).logits is not None


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_head_of_a_model_under_its_wrapper(name, one_rank):
    model = tiny_model("cohere")
    wrapped = WRAPPERS[name](model)
    assert head_of(wrapped) == head_of(model) and head_of(wrapped).weight is model.lm_head.weight
    hidden = model.model(IDS).last_hidden_state
    loss = linear_cross_entropy(hidden, head_of(wrapped), LABELS, shift=True)
    torch.testing.assert_close(loss, model(**INPUTS).loss)


def test_what_accelerate_prepares(prepared):
    stock = prepared(tiny_model())
    expected = stock(**INPUTS).loss
    model = prepared(tiny_model())
    assert "forward" in vars(model)  # its autocast
    patch_model(model)
    out = model(**INPUTS)
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected, rtol=1e-2, atol=1e-2)
    assert head_of(model).weight is model.lm_head.weight


@pytest.mark.parametrize("use", [patch_model, head_of])
def test_wrappers_that_are_refused(use, one_rank):
    with pytest.raises(
        ValueError, match="model: expected one process per GPU, got nn.DataParallel; use torchrun"
    ):
        use(DataParallel(tiny_model()))
    sharded = FullyShardedDataParallel(tiny_model(), device_id=torch.device("cpu"))
    message = "expected a model that is not sharded, or sharded by FSDP2, got FSDP1's FullySharded"
    with pytest.raises(ValueError, match=message):
        use(sharded)
