"""Megatron-core: `output_processor` against full logits, and in GPTModel itself."""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from logitless.integrations import megatron as module
from logitless.integrations.megatron import output_processor
from tests.integrations.support import another_version, check_parameters, require
from tests.ranks import in_processes
from tests.support import assert_close

V, H, S, B = 40, 16, 12, 3


class ColumnParallelLinear(nn.Module):
    """What `output_processor` reads of Megatron's layer."""

    def __init__(self, weight: Tensor | None, group, *, sequence_parallel: bool = False):
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight)
        self.bias, self.tp_group = None, group
        self.sequence_parallel, self.gradient_accumulation_fusion = sequence_parallel, False

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        assert runtime_gather_output
        return hidden @ (self.weight if weight is None else weight).T, None


def config(**options) -> SimpleNamespace:
    return SimpleNamespace(**{"use_mup": False, "mup_output_mult": 3.0, **options})


ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (s, b, H), the head, labels (b, s), upstream gradients (b, s)."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, H, generator=make).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=make).to(dtype)
    labels = torch.randint(0, V, (B, S), generator=make)
    labels[0, 3:7] = -100
    return hidden, weight, labels, torch.randn(B, S, generator=make)


def full(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """(b, s) from full logits."""
    logits = scale * (hidden.transpose(0, 1) @ weight.T)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(B, S)


def truth(scale: float = 1.0) -> dict[str, Tensor]:
    hidden, weight, labels, upstream = operands()
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    losses = full(hidden, weight, labels, scale)
    (losses * upstream).sum().backward()
    return {"losses": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}


def check(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert_close(actual[name], x, tolerance, name=name)


def processed(hidden: Tensor, layer: nn.Module, labels: Tensor | None, **more: Any) -> Tensor:
    given = {"output_weight": None, "config": config()} | more
    return output_processor(hidden_states=hidden, output_layer=layer, labels=labels, **given)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("use_mup", [False, True])
def test_losses_and_gradients(tied, use_mup):
    hidden, weight, labels, upstream = operands()
    layer = ColumnParallelLinear(None if tied else weight, ALONE)
    shared = nn.Parameter(weight) if tied else None
    losses = processed(hidden, layer, labels, output_weight=shared, config=config(use_mup=use_mup))
    assert losses.shape == (B, S) and (losses[labels == -100] == 0).all()
    (losses * upstream).sum().backward()
    actual = {"losses": losses, "hidden": hidden.grad, "weight": (shared if tied else layer.weight).grad}
    check(actual, truth(3.0 if use_mup else 1.0))


def test_bf16():
    hidden, weight, labels, upstream = operands(torch.bfloat16)
    layer = ColumnParallelLinear(weight, ALONE)
    losses = processed(hidden, layer, labels)
    (losses * upstream).sum().backward()
    assert losses.dtype == torch.float32 and layer.weight.grad.dtype == torch.bfloat16
    check({"losses": losses, "hidden": hidden.grad, "weight": layer.weight.grad}, truth(), 8e-3)


def test_options():
    hidden, weight, labels, _ = operands()
    call = functools.partial(processed, hidden, ColumnParallelLinear(weight, ALONE), labels)
    plain = call()
    context = {"logits_budget": 2**20, "compact": False, "z_loss": 1e-2}
    lse = (hidden.transpose(0, 1) @ weight.T).logsumexp(-1)
    expected = torch.where(labels == -100, 0, plain + 1e-2 * lse.square())
    torch.testing.assert_close(call(context=context), expected)
    with pytest.raises(TypeError, match="^context: expected None or a mapping of options .*, got int"):
        call(context=5)
    with pytest.raises(TypeError, match="surprise"):
        call(context={"surprise": 1})


def test_without_labels_the_layer_runs_as_it_is():
    hidden, weight, _, _ = operands()
    layer = ColumnParallelLinear(weight, ALONE)
    logits = processed(hidden, layer, None, scale_logits=lambda x: 2 * x, runtime_gather_output=True)
    assert torch.equal(logits, 2 * (hidden @ weight.T).transpose(0, 1))


def test_a_weight_that_is_still_being_gathered():
    """overlap_param_gather: a pre-hook of the layer waits for the weight."""
    hidden, weight, labels, _ = operands()
    layer = ColumnParallelLinear(torch.zeros(V, H), ALONE)

    def wait(layer, _):
        layer.weight.data.copy_(weight)

    layer.register_forward_pre_hook(wait)
    losses = processed(hidden, layer, labels)
    assert_close(losses, truth()["losses"], 1e-6, name="losses")
    assert type(layer) is ColumnParallelLinear


def hooked(weight: nn.Parameter) -> Tensor:
    """A main gradient, to which a hook adds as the one of Megatron's DistributedDataParallel does."""
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False

    def hook(*unused):
        assert weight.grad is not None  # or overlap_grad_reduce raises
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    weight.keep = weight.expand_as(weight).grad_fn.next_functions[0][0]
    weight.keep.register_hook(hook)
    return weight.main_grad


@pytest.mark.parametrize(("fused", "marked"), [(False, False), (True, False), (True, True)])
def test_main_gradients(fused, marked):
    """`marked`: a stock layer has added to the main gradient of the same weight before, as that of
    multi-token prediction does with gradient_accumulation_fusion."""
    hidden, weight, labels, upstream = operands()
    layer = ColumnParallelLinear(weight, ALONE)
    layer.gradient_accumulation_fusion = fused
    main = hooked(layer.weight)
    losses = processed(hidden, layer, labels)
    layer.weight.grad_added_to_main_grad = marked
    (losses * upstream).sum().backward()
    assert layer.weight.grad is None and layer.weight.grad_added_to_main_grad is fused
    assert_close(main - 1, truth()["weight"], 1e-6, name="main gradient")


def test_the_main_gradient_of_a_tied_embedding():
    """The hook adds the embedding's gradient to the main gradient, which has the head's already."""
    hidden, weight, labels, upstream = operands()
    shared = nn.Parameter(weight)
    main = hooked(shared)
    shared.zero_out_wgrad = True
    layer = ColumnParallelLinear(None, ALONE)
    layer.gradient_accumulation_fusion = True
    losses = processed(hidden, layer, labels, output_weight=shared)
    ((losses * upstream).sum() + 2 * shared[5].sum()).backward()
    expected = truth()["weight"]
    expected[5] += 2
    assert_close(main - 1, expected, 1e-6, name="main gradient")


class Linear(ColumnParallelLinear):
    pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(S, B, dtype=torch.long)}, r"labels: expected shape \(3, 12\), .* \(12, 3\)"),
        ({"layer": Linear(torch.zeros(V, H), ALONE)}, "output_layer: expected a ColumnParallelLinear"),
        ({"inference_context": 1}, "inference_context: expected None, got int"),
        ({"config": config(defer_embedding_wgrad_compute=True)}, "defer_embedding_wgrad_compute: expected"),
    ],
)
def test_refused(change, message):
    hidden, weight, labels, _ = operands()
    given = {"layer": ColumnParallelLinear(weight, ALONE), "labels": labels} | change
    with pytest.raises(ValueError, match=message):
        processed(hidden, **given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bias", torch.zeros(V), "no bias"),
        ("gtp_remat_size", 2, "gtp_remat_size: expected 1, got 2"),
        ("__fsdp_param__", True, "a weight outside of Megatron-FSDP"),
    ],
)
def test_refused_layers(name, value, message):
    hidden, weight, labels, _ = operands()
    layer = ColumnParallelLinear(weight, ALONE)
    setattr(layer.weight if name == "__fsdp_param__" else layer, name, value)
    with pytest.raises(ValueError, match=message):
        processed(hidden, layer, labels)


def test_one_line_is_logged(caplog):
    hidden, weight, labels, _ = operands()
    layer = ColumnParallelLinear(weight, ALONE)
    context = {"logits_budget": 2**30}
    module._announce_once.cache_clear()
    with caplog.at_level("INFO", "logitless"):
        for _ in range(2):
            processed(hidden, layer, labels, context=context)
    (record,) = caplog.records
    replaced = "logits and cross-entropy of GPTModel replaced, logits_budget 1 GiB"
    assert record.message == f"logitless: Megatron-core's {replaced}"
    module._announce_once.cache_clear()
    with another_version():
        processed(hidden, layer, labels)


def on_a_rank(sequence_parallel: bool) -> dict[str, Tensor]:
    group = dist.group.WORLD
    hidden, weight, labels, upstream = operands()
    own = weight.chunk(group.size())[group.rank()].clone()
    layer = ColumnParallelLinear(own, group, sequence_parallel=sequence_parallel)
    leaf = hidden.detach().chunk(group.size())[group.rank()] if sequence_parallel else hidden.detach()
    leaf = leaf.clone().requires_grad_()
    losses = processed(leaf, layer, labels)
    (losses * upstream).sum().backward()
    return {"losses": losses.detach(), "hidden": leaf.grad, "weight": layer.weight.grad}


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks(sequence_parallel):
    for rank, actual in enumerate(in_processes(2, on_a_rank, sequence_parallel)):
        expected = truth()
        expected["weight"] = expected["weight"].chunk(2)[rank]
        if sequence_parallel:
            expected["hidden"] = expected["hidden"].chunk(2)[rank]
        check(actual, expected)


# From here on: Megatron itself.


def test_names_and_parameters():
    require("megatron")
    arguments = (
        "self input_ids position_ids attention_mask decoder_input labels inference_context packed_seq_params "
        "extra_block_kwargs runtime_gather_output inference_params loss_mask padding_mask output_processor "
        "output_processor_context"
    )
    check_parameters("megatron.core.models.gpt.gpt_model:GPTModel.forward", arguments)
    layer = "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward"
    check_parameters(layer, "self input_ weight runtime_gather_output")


@contextlib.contextmanager
def megatron_on_cpus():
    """Megatron allocates on a GPU, forks its random numbers, and has norms for sequence parallelism in Apex
    and Transformer Engine alone."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def fork(self, name=None):
        return contextlib.nullcontext()

    def norm(cls, config, hidden_size, eps=1e-5, **others):
        return nn.LayerNorm(hidden_size, eps)

    with (
        mock.patch("torch.cuda.current_device", lambda: "cpu"),
        mock.patch.object(CudaRNGStatesTracker, "fork", fork),
        mock.patch.object(WrappedTorchNorm, "__new__", norm),
    ):
        yield


def in_gpt_model(sequence_parallel: bool, tied: bool) -> list[dict[str, Tensor]]:
    """Losses and gradients of GPTModel, as it is and with `output_processor`."""
    with megatron_on_cpus():
        return [run_gpt_model(sequence_parallel, tied, hook) for hook in (None, output_processor)]


def run_gpt_model(sequence_parallel: bool, tied: bool, hook) -> dict[str, Tensor]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks = dist.get_world_size()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    options = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec()
    model = GPTModel(options, spec, V, max_sequence_length=S, share_embeddings_and_output_weights=tied)
    make = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, V, (2, B, S), generator=make)
    mask = torch.ones(B, 1, S, S).triu(1).bool()
    given = {} if hook is None else {"output_processor": hook}
    losses = model(ids, torch.arange(S).expand(B, S), mask, labels=labels, **given)
    (losses * torch.randn(B, S, generator=make)).sum().backward()
    actual = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"losses": losses.detach()} | actual


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "tied"),
    [(1, False, False), (2, False, False), (2, True, False), (2, True, True)],
)
def test_gpt_model(ranks, sequence_parallel, tied):
    require("megatron")
    for stock, ours in in_processes(ranks, in_gpt_model, sequence_parallel, tied):
        assert stock.keys() == ours.keys() and len(stock) > 10
        for name, x in stock.items():
            assert (ours[name] - x).norm() <= 1e-5 * x.norm() + 1e-7, name
