"""verl: log-probabilities and entropy of its actors against verl's own PyTorch backend."""

import importlib
import re
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from logitless.integrations import verl as module
from tests.integrations.support import (
    PAGE,
    at,
    check_parameters,
    check_text,
    hollow,
    require,
    sum_gradients,
    tiny_qwen3,
)
from tests.ranks import in_processes
from tests.support import assert_close

V, H, S = 40, 16, 12
BACKENDS = "verl.models.transformers.dense_common:forward_with_{}_backend"
OWN = "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy"


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron's layout: hidden (s, 1, H), the head, labels (1, s)."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, 1, H, generator=make).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=make).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (1, S), generator=make)


def full(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """From full logits: log-probabilities and entropy, (s,)."""
    logps = (hidden.flatten(0, -2) @ weight.T / temperature).log_softmax(-1)
    return logps.gather(-1, labels.view(-1, 1))[:, 0], -(logps.exp() * logps).sum(-1)


def scalar(logps: Tensor, entropy: Tensor) -> Tensor:
    """With another upstream gradient for each number."""
    factors = torch.arange(1, 1 + logps.numel(), dtype=logps.dtype).view_as(logps)
    return (logps * factors).sum() - 0.3 * (entropy * factors.flip(0)).sum()


def test_megatrons_layout():
    hidden, weight, labels = operands()
    logps, entropy = module.linear_cross_entropy(hidden, weight, labels, 0.7, "none", None)
    assert logps.shape == entropy.shape == (S,)
    truth = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = full(*truth, labels, 0.7)
    assert_close(logps, expected[0], 1e-6, name="log-probabilities")
    assert_close(entropy, expected[1], 1e-6, name="entropy")
    scalar(logps, entropy).backward()
    scalar(*expected).backward()
    for name, ours, theirs in zip(("hidden", "weight"), (hidden, weight), truth):
        assert_close(ours.grad, theirs.grad, 1e-6, name=f"d_{name}")


def test_bf16():
    hidden, weight, labels = operands(torch.bfloat16)
    logps, entropy = module.linear_cross_entropy(hidden, weight, labels)
    assert logps.dtype == entropy.dtype == torch.float32
    expected = full(hidden.double(), weight.double(), labels, 1.0)
    assert_close(logps, expected[0].detach(), 4e-3, name="log-probabilities")
    assert_close(entropy, expected[1].detach(), 4e-3, name="entropy")


def test_the_budget():
    with mock.patch.object(module, "linear_logprobs", wraps=module.linear_logprobs) as loss:
        module.linear_cross_entropy(*operands(), logits_budget=2**20)
    assert loss.call_args.kwargs["logits_budget"] == 2**20


def test_refused():
    with pytest.raises(ValueError, match="^reduction: expected 'none', got 'mean'"):
        module.linear_cross_entropy(*operands(), 1.0, "mean")


class SummingGather(torch.autograd.Function):
    """As Megatron's gather with tensor_parallel_output_grad: the backward pass sums over the ranks."""

    @staticmethod
    def forward(ctx, x, group, tensor_parallel_output_grad):
        ctx.group, ctx.tensor_parallel_output_grad = group, tensor_parallel_output_grad
        found = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(found, x, group=group)
        return torch.cat(found)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None


def on_a_rank(sequence_parallel: bool, gather=SummingGather.apply) -> dict[str, Tensor]:
    """Log-probabilities, entropy and gradients with a sharded head."""
    group = dist.group.WORLD
    rank, ranks = group.rank(), group.size()
    hidden, weight, labels = operands()
    own = weight.detach().chunk(ranks)[rank].clone().requires_grad_()
    leaf = hidden.detach().chunk(ranks)[rank] if sequence_parallel else hidden.detach()
    leaf = leaf.clone().requires_grad_()
    # Not a leaf, as in a model.
    given = gather(leaf * 1.0, group, True) if sequence_parallel else leaf * 1.0
    logps, entropy = module.linear_cross_entropy(given, own, labels, 0.7, "none", group)
    scalar(logps, entropy).backward()
    return {"logps": logps.detach(), "entropy": entropy.detach(), "hidden": leaf.grad, "weight": own.grad}


def check_ranks(found: list[dict[str, Tensor]], sequence_parallel: bool) -> None:
    hidden, weight, labels = operands()
    truth = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logps, entropy = full(*truth, labels, 0.7)
    scalar(logps, entropy).backward()
    for rank, ours in enumerate(found):
        d_hidden = truth[0].grad.chunk(2)[rank] if sequence_parallel else truth[0].grad
        expected = {
            "logps": logps.detach(),
            "entropy": entropy.detach(),
            "hidden": d_hidden,
            "weight": truth[1].grad.chunk(2)[rank],
        }
        for name, x in expected.items():
            assert_close(ours[name], x, 1e-6, name=f"{name} on rank {rank}")


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_on_two_ranks(sequence_parallel):
    check_ranks(in_processes(2, on_a_rank, sequence_parallel), sequence_parallel)


def with_megatrons_gather() -> dict[str, Tensor]:
    hollow("megatron", "megatron.core", "megatron.core.tensor_parallel")
    gather = at("megatron.core.tensor_parallel.mappings:_GatherFromSequenceParallelRegion.apply")
    with mock.patch("torch.cuda.current_device", lambda: "cpu"):
        return on_a_rank(True, lambda x, group, summed: gather(x, group, summed, None, False))


# From here on: verl itself.


@pytest.fixture
def verl():
    """The modules of verl that need neither ray nor tensordict."""
    require("verl")
    before = set(sys.modules)
    hollow("verl", "verl.utils", "verl.utils.kernel", "verl.models", "verl.models.transformers")
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "verl":
            del sys.modules[name]


def test_names_and_parameters(verl):
    arguments = "self hidden_states vocab_weights input_ids temperature"
    check_parameters("verl.utils.experimental.torch_functional:FusedLinearForPPO.forward", arguments)
    arguments = "ctx hidden weight labels temperature reduction dist_process_group"
    check_parameters("verl.utils.kernel.linear_cross_entropy:LinearCrossEntropy.forward", arguments)
    folder = require("verl")
    check_text(folder / "workers/config/model.py", "import_external_libs(self.external_lib)")
    gather = "hidden_states = gather_from_sequence_parallel_region(hidden_states)\n"
    for name in ("model_forward_fused.py", "model_forward_1f1b_overlap.py"):
        check_text(folder / "models/mcore" / name, "import linear_cross_entropy\n")
        check_text(folder / "models/mcore" / name, gather)


def test_the_options_of_the_documentation():
    """They are keys of verl's config, whose default backend is the one that is replaced."""
    words = re.findall(r"^    actor_rollout_ref\.model\.(\w+)=(\S+)", PAGE, re.MULTILINE)
    assert dict(words) == {"use_fused_kernels": "true", "external_lib": "logitless.integrations.verl_on"}
    config = require("verl") / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    model = yaml.safe_load(config.read_text())["actor_rollout_ref"]["model"]
    assert model["use_fused_kernels"] is False and model["external_lib"] is None
    assert model["fused_kernel_options"] == {"impl_backend": "torch"}


def scored(backend: str, dtype: torch.dtype, *, impl: str = "torch", **given) -> dict[str, Tensor]:
    """What an actor's forward pass returns, and the gradients of a tiny Qwen3."""
    model = tiny_qwen3(V, dtype)
    model._verl_fused_kernels_backend = impl
    ids = torch.randint(0, V, (2, S))
    out = at(BACKENDS.format(backend))(model, input_ids=ids, temperature=0.7, return_dict=True, **given)
    logps, entropy = out.log_probs.view(2, S), out.entropy.view(2, S).float()
    scalar(logps, entropy).backward()
    found = {"logps": logps, "entropy": entropy}
    found |= {name: x.grad for name, x in model.named_parameters()}
    return {name: x.detach() for name, x in found.items()}


@pytest.mark.parametrize(("backend", "impl"), [("torch", "torch"), ("torch", "liger"), ("triton", "triton")])
@pytest.mark.parametrize("shifted", [False, True])
def test_an_actor(verl, backend, impl, shifted):
    given = {"shift_labels": torch.randint(0, V, (2, S))} if shifted else {}
    truth = scored("torch", torch.float64, **given)
    stock = scored("torch", torch.float32, **given)
    undo = module.patch(logits_budget=2**20)
    with mock.patch.object(module, "linear_logprobs", wraps=module.linear_logprobs) as loss:
        ours = scored(backend, torch.float32, impl=impl, **given)
    assert loss.call_args.kwargs["logits_budget"] == 2**20
    undo()
    for name, x in truth.items():
        assert_close(ours[name], x.double(), 4 * max(stock_error(stock[name], x), 1e-7), name=name)


def stock_error(stock: Tensor, truth: Tensor) -> float:
    return ((stock - truth).norm() / truth.norm()).item()


def test_an_actor_in_bf16(verl):
    truth, stock = scored("torch", torch.float64), scored("torch", torch.bfloat16)
    undo = module.patch()
    ours = scored("torch", torch.bfloat16)
    undo()
    for name in ("logps", "entropy", "lm_head.weight"):
        assert_close(ours[name], truth[name].double(), stock_error(stock[name], truth[name]), name=name)


def test_it_is_undone(verl):
    places = (module.FSDP_FUNCTION, OWN)
    stock = [at(place) for place in places]
    early = importlib.import_module("verl.models.transformers.dense_common")
    early.linear_cross_entropy = stock[1]  # as a module that has imported it by name
    undo = module.patch(logits_budget=2**20)
    assert all(at(place) is not before for place, before in zip(places, stock))
    assert early.linear_cross_entropy is at(OWN)
    assert at(OWN).keywords == {"logits_budget": 2**20}
    undo()
    assert [at(place) for place in places] == stock and early.linear_cross_entropy is stock[1]


def test_switched_on_as_verl_does_it(verl, caplog):
    stock = at(module.FSDP_FUNCTION)
    name = "logitless.integrations.verl_on"
    sys.modules.pop(name, None)
    with caplog.at_level("INFO", "logitless"):
        at("verl.utils.import_utils:import_external_libs")(name)
    assert at(module.FSDP_FUNCTION) is not stock
    (record,) = caplog.records
    assert record.message.startswith("logitless: verl's FusedLinearForPPO.forward and linear_cross_entropy")


def with_fsdp2() -> list[dict[str, Tensor]]:
    """Ours in the units that verl makes (`apply_fsdp2`), the head one of its own; and the truth in fp64."""
    hollow("verl", "verl.utils", "verl.utils.kernel", "verl.models", "verl.models.transformers")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(0, V, (2, S), generator=torch.Generator().manual_seed(rank))
    twin = tiny_qwen3(V, torch.float64)
    logps, entropy = full(twin.model(ids)[0], twin.lm_head.weight, ids.roll(-1, -1), 0.7)
    scalar(logps.view(2, S), entropy.view(2, S)).backward()
    truth = {"logps": logps.view(2, S), "entropy": entropy.view(2, S)}
    for name, x in twin.named_parameters():
        dist.all_reduce(x.grad)
        truth[name] = x.grad / ranks

    model = tiny_qwen3(V)
    type(model).forward = at(BACKENDS.format("torch"))
    undo = module.patch()
    for part in (model.model.embed_tokens, *model.model.layers, model.lm_head, model):
        fully_shard(part)
    sum_gradients(model)
    out = model(input_ids=ids, temperature=0.7, return_dict=True)
    undo()
    scalar(out.log_probs.view(2, S), out.entropy.view(2, S)).backward()
    ours = {"logps": out.log_probs.view(2, S), "entropy": out.entropy.view(2, S)}
    ours |= {name: x.grad.full_tensor() for name, x in model.named_parameters()}
    return [{name: x.detach() for name, x in found.items()} for found in (ours, truth)]


@pytest.mark.ranks
def test_fsdp2_with_the_head_in_a_unit_of_its_own():
    folder = require("verl")
    check_text(
        folder / "utils" / "fsdp_utils.py", '_wrap_by_name = set() if _tie else {"embed_tokens", "lm_head"}'
    )
    for ours, truth in in_processes(2, with_fsdp2):
        for name, x in truth.items():
            assert_close(ours[name], x.double(), 2e-6, name=name)


@pytest.mark.ranks
def test_megatrons_own_gather():
    require("megatron")
    check_ranks(in_processes(2, with_megatrons_gather), True)
