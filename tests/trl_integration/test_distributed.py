"""Two processes: each trains on its half of the batches, and both hold the gradients of a single process that
sees them all."""

from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from logitless.models.heads import base_of
from logitless.trl_integration import patch_model
from logitless.trl_integration.head import attach_fused_head
from logitless.trl_integration.per_token import make_per_token_fields
from tests.cases import usually
from tests.ranks import device_type, on_devices, to_rank_device
from tests.support import uncompiled

from .compare import adapted, assert_same, chunked_loss, options, our_pair, side_by_side
from .kinds import KINDS, for_ranks, needs, rolled_out
from .tiny import IDS, LABELS, tiny_model, train, words

pytestmark = pytest.mark.ranks

STEPS = 2
# One trainer of tokens, of pairs, of groups and of a teacher; the others, and IW-OPD, are marked repeats.
USUAL = ("SFT", "DPO", "GRPO", "GKD")
# TRL divides GKD's sum over tokens by those of all processes but does not multiply it by their number, which
# DDP's average then takes away.
SHARE = {"GKD": 0.5}
# One process takes the batches of two either as two micro-batches, or, where TRL mixes what it has rolled
# out, as one.
ALONE = {kind: {"gradient_accumulation_steps": 2} for kind in KINDS} | dict.fromkeys(
    ("GRPO", "RLOO"), {"per_device_train_batch_size": 8}
)


def run(kind: str, folder, **changes) -> dict:
    dataset, settings, trainer = needs(kind, folder)
    settings |= {"use_chunked_loss": True, "logits_budget": 2**14}
    settings |= {"max_grad_norm": 1e9, "max_steps": STEPS}
    settings |= {"train_sampling_strategy": "sequential"} if kind in ("SFT", "GKD") else {}
    # In the two processes only.
    settings["use_fused_layers"] = kind == "DPO" and dist.get_world_size() == 2
    settings |= for_ranks(kind)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    config, cls = our_pair(kind).values()
    args = config(**options(folder / "out", **settings | changes))
    with uncompiled():
        done = train(rolled_out(cls), args, model, dataset, tokenizer=words(), **trainer)
    assert None not in done.strategies
    assert done.trainer.accelerator.num_processes == dist.get_world_size()
    return {"gradients": done.gradients[0], "weights": done.weights}


@pytest.fixture(scope="module")
def ranks(folder, with_repeats):
    """One pair of processes for all tests, as most of their time goes into imports."""
    return on_devices(2, everything, folder, KINDS if with_repeats else USUAL)


@pytest.fixture(scope="module")
def alone(folder, with_repeats):
    """On the same kind of device."""
    (actual,) = on_devices(1, all_alone, folder, KINDS if with_repeats else USUAL)
    return actual


def everything(folder, kinds: tuple[str, ...]) -> dict:
    # Trainers make what they make on the CPU and move it themselves.
    with torch.device("cpu"):
        trainers = {kind: run(kind, folder) for kind in kinds}
        pair = iw_opd(folder) if kinds == KINDS else []
    return {"trainers": trainers, "iw_opd": pair, "heads": all_heads()}


def all_alone(folder, kinds: tuple[str, ...]) -> dict:
    with torch.device("cpu"):
        trainers = {kind: run(kind, folder, **ALONE[kind]) for kind in kinds}
    cases = [(name, score) for name in MODELS for score in SCORES]
    ranks = [slice(rank, rank + 1) for rank in range(2)]
    return {
        "trainers": trainers,
        "heads": {case: [step(scored_model(*case), case[1], rank) for rank in ranks] for case in cases},
    }


def iw_opd(folder) -> list[SimpleNamespace]:
    """TRL's pair and ours: the head is used outside of the forward that DDP watches."""
    # Trainer's own default, under which DDP walks back from the outputs of the forward
    dataset, settings, trainer = needs("IWOPD", folder)
    changes = {"ddp_find_unused_parameters": True, "use_cpu": dist.get_backend() == "gloo"}
    with uncompiled():
        runs = side_by_side(folder, "IWOPD", dataset, trainer=trainer, **settings | changes)
    assert isinstance(runs[1].trainer.model_wrapped, DistributedDataParallel)
    return [SimpleNamespace(**vars(run) | {"trainer": None}) for run in runs]


@pytest.mark.repeats
def test_iwopd_ddp_with_two_processes(ranks):
    assert_same(*ranks[0]["iw_opd"], rtol=1e-3)


@pytest.mark.parametrize("kind", usually(USUAL, KINDS))
def test_ddp_with_two_processes(ranks, alone, kind):
    first, second = (rank["trainers"][kind] for rank in ranks)
    assert torch.equal(first["weights"], second["weights"])
    share = SHARE.get(kind, 1.0)
    expected = {name: share * grad for name, grad in alone["trainers"][kind]["gradients"].items()}
    assert sum(grad.norm() for grad in expected.values()) > 1e-2
    torch.testing.assert_close(second["gradients"], first["gradients"], rtol=0, atol=0)
    torch.testing.assert_close(first["gradients"], expected, rtol=1e-3, atol=1e-5)


# --- the head alone, under DDP and FSDP2

WRAPPERS = ("DDP", "FSDP2")
MODELS = ("llama", "tied", "lora_on_the_head", "lora")
SCORES = ("fused", "numbers")


def scored_model(name: str, score: str) -> torch.nn.Module:
    """Gradients from the forward pass (`patch_model`), or from a second walk in the backward pass (what DPO
    and GRPO do)."""
    with torch.device("cpu"):  # the same numbers everywhere
        model = base = tiny_model("tied" if name == "tied" else "llama")
        if name.startswith("lora"):
            modules = ["q_proj", "lm_head"] if name == "lora_on_the_head" else ["q_proj"]
            model = adapted(model, target_modules=modules)
    model.to(torch.get_default_device())
    if score == "fused":
        patch_model(base, logits_budget=2**12)
    return model


def step(model: torch.nn.Module, score: str, rows: slice) -> dict[str, torch.Tensor]:
    ids, labels = to_rank_device((IDS[rows], LABELS[rows]))
    if score == "fused":
        loss = model(ids, labels=labels).loss
    else:
        with attach_fused_head(make_per_token_fields)(chunked_loss(2**12))(base_of(model)):
            logps = model(ids, labels=labels, fused_lm_head=True).log_probs
        loss = -(logps * torch.arange(1.0, ids.shape[1])).sum() / 50
    loss.backward()
    actual = {
        name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in actual.items()}


def wrapped(model: torch.nn.Module, wrapper: str) -> torch.nn.Module:
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device_type(), (2,))
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    # a head that is a unit of its own is still sharded when the loss reads its weight
    if base.lm_head.weight is not base.model.embed_tokens.weight:
        fully_shard(base.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def all_heads() -> dict[tuple[str, ...], dict[str, torch.Tensor]]:
    rank, actual = dist.get_rank(), {}
    for case in ((wrapper, name, score) for wrapper in WRAPPERS for name in MODELS for score in SCORES):
        wrapper, name, score = case
        actual[case] = step(wrapped(scored_model(name, score), wrapper), score, slice(rank, rank + 1))
    return actual


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_of_the_head_are_averaged(ranks, alone, wrapper, name, score):
    first, second = alone["heads"][name, score]
    for rank in ranks:
        expected = {parameter: (first[parameter] + second[parameter]) / 2 for parameter in first}
        torch.testing.assert_close(rank["heads"][wrapper, name, score], expected, rtol=1e-4, atol=1e-7)
