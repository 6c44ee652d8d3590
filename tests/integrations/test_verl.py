"""verl: log-probabilities and entropy of its actors against verl's own PyTorch backend."""

import importlib
import re
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from logitless import GRPOLoss, PPOLoss, REINFORCELoss, SamplerCorrection
from logitless.integrations import verl as module
from logitless.integrations import verl_losses as losses
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
    for name, ours, reference_value in zip(("hidden", "weight"), (hidden, weight), truth):
        assert_close(ours.grad, reference_value.grad, 1e-6, name=f"d_{name}")


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
        actual = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(actual, x, group=group)
        return torch.cat(actual)

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


def check_ranks(actual: list[dict[str, Tensor]], sequence_parallel: bool) -> None:
    hidden, weight, labels = operands()
    truth = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logps, entropy = full(*truth, labels, 0.7)
    scalar(logps, entropy).backward()
    for rank, ours in enumerate(actual):
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


# Losses by verl's config.

DPPO = {"policy_loss": {"loss_mode": "dppo_tv"}}
CONFIGS = {
    "vanilla": ({}, PPOLoss(delta=3.0, epsilon_high=0.2, loss_agg_mode="token-mean")),
    "gspo": (
        {"policy_loss": {"loss_mode": "gspo"}, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
        PPOLoss(
            importance_sampling_level="sequence_token",
            epsilon=3e-4,
            epsilon_high=4e-4,
            loss_agg_mode="token-mean",
        ),
    ),
    "sapo": (
        {"policy_loss": {"loss_mode": "sapo"}, "tau_neg": 2.0},
        GRPOLoss(loss_type="sapo", sapo_temperature_neg=2.0),
    ),
    "dro": ({"policy_loss": {"loss_mode": "dro", "dro_beta": 0.1}}, REINFORCELoss(old_kl_coef=0.1)),
    "geo_mean": (
        {"policy_loss": {"loss_mode": "geo_mean"}, "clip_ratio": 0.4},
        GRPOLoss(loss_type="gmpo", epsilon=0.4, epsilon_high=0.4),
    ),
    "sums": ({"loss_agg_mode": "token-sum"}, PPOLoss(delta=3.0, epsilon_high=0.2, reduction="sum")),
    "norm": (
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 100},
        PPOLoss(
            delta=3.0, epsilon_high=0.2, loss_agg_mode="seq-mean-token-sum-norm", max_completion_length=100
        ),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_of_a_config(name):
    actor, expected = CONFIGS[name]
    options = asdict(losses.policy_loss(actor))
    assert options == asdict(expected)
    # verl's dataclasses have attributes.
    made = {key: SimpleNamespace(**x) if isinstance(x, dict) else x for key, x in actor.items()}
    assert asdict(losses.policy_loss(SimpleNamespace(**made))) == options


def test_the_corrections_of_a_config():
    def of(**options):
        return losses.policy_loss(DPPO, options).sampler_correction

    assert of() is None and of(rollout_rs="token_k1", rollout_rs_threshold="2.0") is None
    assert of(rollout_is="token") == SamplerCorrection(high=2.0)
    icepop = SamplerCorrection(level="sequence", action="mask", low=0.5, high=5.0)
    assert of(rollout_is="sequence", rollout_is_threshold="0.5_5.0") == icepop
    # In the bypass mode the ratio of PPO corrects; REINFORCE is corrected from the policy itself.
    bypass = {"rollout_is": "token", "bypass_mode": True}
    assert losses.policy_loss({}, bypass).sampler_correction is None
    reinforce = losses.policy_loss({}, bypass | {"loss_type": "reinforce"})
    assert isinstance(reinforce, REINFORCELoss) and reinforce.sampler_correction == SamplerCorrection(
        high=2.0
    )
    assert losses.rejections(None) == ()
    two = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "2.0,0.01"}
    assert losses.rejections(two) == (
        SamplerCorrection(action="reject", low=0.5, high=2.0),
        SamplerCorrection(level="geometric", action="reject", measure="k3", high=0.01),
    )


KL = {"use_kl_loss": True}
REFUSED = [
    ({"policy_loss": {"loss_mode": "kl_cov"}}, {}, "policy_loss.loss_mode: .*docs/losses.md has kl_cov"),
    ({"policy_loss": {"loss_mode": "ppo"}}, {}, "policy_loss.loss_mode: expected one of 'vanilla'"),
    ({"clip_ratio_c": 1.1}, {}, "clip_ratio_c: expected at least 1 \\+ clip_ratio_high = 1.2"),
    ({"policy_loss": {"loss_mode": "dro"}}, {}, "policy_loss.dro_beta: expected a positive"),
    (
        {"policy_loss": {"loss_mode": "gpg"}, "loss_agg_mode": "seq-mean-token-mean"},
        {},
        "loss_agg_mode: expected",
    ),
    ({"loss_agg_mode": "seq-mean-token-sum-norm"}, {}, "loss_scale_factor: expected a number"),
    (KL | {"policy_loss": {"loss_mode": "gpg"}}, {}, "use_kl_loss: expected false for gpg"),
    (
        KL | {"policy_loss": {"loss_mode": "sapo"}},
        {},
        "use_kl_loss: expected false for sapo with loss_agg_mode token",
    ),
    (KL | {"kl_loss_type": "full"}, {}, "kl_loss_type: expected one of 'kl'"),
    (
        {"entropy_coeff": 0.1, "loss_agg_mode": "seq-mean-token-mean"},
        {},
        "entropy_coeff: expected 0 for vanilla",
    ),
    (
        {},
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
        "rollout_correction.rollout_is_batch_norm",
    ),
    ({}, {"rollout_is": "geometric"}, "rollout_correction.rollout_is: expected one of 'token', 'sequence'"),
    (
        {"policy_loss": {"loss_mode": "dro", "dro_beta": 0.1}},
        {"rollout_is": "token"},
        "rollout_correction.rollout_is: .*penalty",
    ),
    (
        {"policy_loss": {"loss_mode": "geo_mean"}},
        {"rollout_is": "token"},
        "rollout_correction.rollout_is: .*geometric",
    ),
]


@pytest.mark.parametrize(("actor", "correction", "message"), REFUSED)
def test_configs_that_are_refused(actor, correction, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        losses.policy_loss(actor, correction)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 1.0},
            "rollout_correction.rollout_rs: expected token",
        ),
        ({"rollout_rs": "token_k1"}, "rollout_correction.rollout_rs_threshold: expected"),
    ],
)
def test_rejections_that_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        losses.rejections(options)


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


def module_with(name: str, **attributes: object) -> None:
    """Put a module into `sys.modules` in the place of one that needs more than verl's wheel."""
    actual = sys.modules[name] = ModuleType(name)
    vars(actual).update(attributes)


class ActorConfig(SimpleNamespace):
    """The attributes of verl's dataclass that the losses read."""

    global_batch_info: ClassVar = {}

    def get(self, name: str, default=None):
        return getattr(self, name, default)


@pytest.fixture
def core(verl, monkeypatch):
    """verl's losses: `core_algos`, and the helper of rollout corrections."""
    for name in ("tensordict", "omegaconf"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    hollow("verl.trainer", "verl.trainer.ppo", "verl.workers")
    module_with("tensordict", TensorDict=object)
    module_with("omegaconf", DictConfig=dict)
    module_with("verl.protocol", DataProto=object)
    module_with("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    module_with("verl.trainer.config.algorithm", RolloutCorrectionConfig=object)
    module_with("verl.workers.config", ActorConfig=ActorConfig)
    module_with("verl.workers.config.actor", PolicyLossConfig=object)
    vars(sys.modules["verl.utils"]).update(as_torch_index=None, group_mean_std=None)
    yield importlib.import_module("verl.trainer.ppo.core_algos")
    for name in ("tensordict", "omegaconf"):
        sys.modules.pop(name, None)


def rollout_in_fp64(spread: float) -> SimpleNamespace:
    make = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64)

    x = SimpleNamespace(hidden=random(4, 6, 5), weight=random(30, 5))
    x.targets = torch.randint(0, 30, (4, 6), generator=make)
    x.mask = torch.arange(6) < torch.tensor([[6], [4], [1], [5]])
    logps = (x.hidden @ x.weight.T).log_softmax(-1).gather(-1, x.targets[..., None])[..., 0]
    x.old = (logps + spread * random(4, 6)).clamp(max=-1e-3)
    x.sampled, x.ref = x.old + 0.3 * spread * random(4, 6), logps + spread * random(4, 6)
    x.advantages = random(4)
    return x


def both(x, loss, verls) -> list[tuple[Tensor, Tensor]]:
    """(ours, verl's): value and gradients."""
    actual = []
    for call in (
        lambda h, w: loss(h, w),
        lambda h, w: verls((h @ w.T).log_softmax(-1).gather(-1, x.targets[..., None])[..., 0]),
    ):
        leaves = [x.hidden.clone().requires_grad_(), x.weight.clone().requires_grad_()]
        value = call(*leaves)
        actual.append([value.detach(), *torch.autograd.grad(value, leaves)])
    return list(zip(*actual, strict=True))


MODES = {
    "vanilla": {},
    "dppo_tv": {},
    "dppo_kl": {},
    "gspo": {},
    "sapo": {},
    "gpg": {},
    "geo_mean": {},
    "cispo": {},
}
MODES |= {"dro": {"dro_beta": 0.1}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"])
def test_losses_are_those_of_verl(core, mode, spread, agg):
    if agg.startswith("seq") and mode in ("gpg", "dro"):
        pytest.skip("REINFORCELoss has no mean over sequences")
    x = rollout_in_fp64(spread)
    options = {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    options |= {"tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": agg}
    actor = ActorConfig(**options, policy_loss=SimpleNamespace(loss_mode=mode, **MODES[mode]))
    correction = {} if mode in ("dro", "geo_mean") else {"rollout_is": "token"}
    loss = losses.policy_loss(actor, correction)
    weights = SamplerCorrection(high=2.0).weights(x.old, x.sampled, x.mask) if correction else None
    inputs = {"sampling_logps": x.sampled} if correction else {}
    if not isinstance(loss, REINFORCELoss) or mode == "dro" or correction:
        inputs["old_logps"] = x.old
    advantages = x.advantages[:, None].expand(4, 6)

    def ours(h, w):
        return loss(h, w, x.targets, mask=x.mask, advantages=x.advantages, **inputs).loss

    def verls(logps):
        function = core.get_policy_loss_fn(mode)
        return function(x.old, logps, advantages, x.mask.double(), agg, actor, weights)[0]

    pairs = both(x, ours, verls)
    for actual, expected in pairs[mode.startswith("dppo") :]:  # of DPPO the gradients are equal
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [*losses.ESTIMATORS, *(f"{x}+" for x in losses.ESTIMATORS)])
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_the_kl_is_that_of_verl(core, kind, spread):
    x = rollout_in_fp64(spread)
    loss = losses.policy_loss({"use_kl_loss": True, "kl_loss_type": kind, "kl_loss_coef": 1.0})
    inputs = {"mask": x.mask, "old_logps": x.old, "ref_logps": x.ref, "advantages": torch.zeros(4)}

    def verls(logps):
        return core.agg_loss(core.kl_penalty(logps, x.ref, kind), x.mask.double(), "token-mean")

    for actual, expected in both(x, lambda h, w: loss(h, w, x.targets, **inputs).loss, verls):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "name", [f"{level}_{k}" for level in losses.REJECTED_LEVELS for k in ("k1", "k2", "k3")]
)
def test_rejections_are_those_of_verl(core, name):
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    x = rollout_in_fp64(1.0)
    threshold = "0.95_1.05" if name.endswith("k1") else "0.05"
    (ours,) = losses.rejections({"rollout_rs": name, "rollout_rs_threshold": threshold})
    mask, _ = helper.compute_rollout_rejection_mask(x.old - x.sampled, x.mask.double(), name, threshold)
    actual = x.mask & (ours.weights(x.old, x.sampled, x.mask) > 0)
    assert torch.equal(actual, mask.bool()) and 0 < actual.sum() < x.mask.sum()


@pytest.mark.parametrize("level", losses.CORRECTED_LEVELS)
@pytest.mark.parametrize("threshold", [2.0, "0.5_5.0"])
def test_corrections_are_those_of_verl(core, level, threshold):
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    x = rollout_in_fp64(1.0)
    ours = losses.correction_of({"rollout_is": level, "rollout_is_threshold": threshold})
    expected, _ = helper.compute_rollout_correction_weights(
        x.old - x.sampled, x.mask.double(), level, rollout_is_threshold=threshold
    )
    actual = ours.weights(x.old, x.sampled, x.mask)
    torch.testing.assert_close(actual[x.mask], expected[x.mask])


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
    words = dict(re.findall(r"^    actor_rollout_ref\.model\.(\w+)=(\S+)", PAGE, re.MULTILINE))
    assert words["use_fused_kernels"] == "true"
    assert words["external_lib"] == "logitless.integrations.verl_on"
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
    actual = {"logps": logps, "entropy": entropy}
    actual |= {name: x.grad for name, x in model.named_parameters()}
    return {name: x.detach() for name, x in actual.items()}


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
    return [{name: x.detach() for name, x in actual.items()} for actual in (ours, truth)]


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


def test_the_command_of_the_page_names_options_that_verl_has():
    (command,) = re.findall(r"python3 -m verl\.trainer\.main_ppo \\\n((?:    .*\n)+)", PAGE)
    options = [line.strip(" \\").partition("=")[0] for line in command.splitlines()]
    assert options[-1] == "actor_rollout_ref.model.external_lib" and len(options) > 8
    config = require("verl") / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    known = yaml.safe_load(config.read_text())
    for option in options:
        actual = known
        for name in option.split("."):
            assert name in actual, option
            actual = actual[name]
