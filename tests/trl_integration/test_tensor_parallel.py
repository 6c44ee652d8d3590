"""Trainers of a model that transformers splits over two processes (`tp_plan="auto"`), and over a grid of four
beside FSDP2: the flag takes the head in shards of rows as it is, and training goes as without it."""

import inspect
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor

from logitless import CrossEntropyLoss
from logitless.models import head_of, patch_model
from logitless.parallel import groups
from tests.ranks import on_devices
from tests.support import uncompiled

from .compare import options, our_pair
from .kinds import attempt, for_ranks, needs, rolled_out, teacher, with_cards
from .tiny import VOCAB, save, tiny_model, train, words

try:
    from transformers.distributed import DistributedConfig
except ImportError:
    DistributedConfig = None
if "fsdp_size" not in getattr(DistributedConfig, "__dataclass_fields__", ()):
    DistributedConfig = None
pytestmark = pytest.mark.ranks

# Adam would make a step of the rounding of a gradient that is zero.
SGD = {"optim": "sgd", "learning_rate": 0.3}
KINDS = ("SFT", "DPO", "KTO", "ORPO", "GKD")
# TRL gives every process prompts or an order of its own.
ROLLING = ("GRPO", "RLOO")
# The same, and its loss has the hidden states alone.
REFUSED = "Distillation"
# (trainer, what is tried): (family of the model, flags beside the loss)
CASES = {(kind, "llama"): ("llama", ()) for kind in KINDS} | {
    ("SFT", "tied"): ("tied", ()),
    ("ORPO", "cohere"): ("cohere", ()),
    ("SFT", "fused layers"): ("llama", ("use_fused_layers",)),
}
GRID = [(kind, "llama") for kind in ("SFT", "DPO", "ORPO")]
# Run with --all alone.
SELDOM = {("KTO", "llama"), ("ORPO", "llama"), ("GKD", "llama"), ("SFT", "tied")}
OTHER_TOKENS = "model: expected the same tokens on all ranks of its tensor-parallel plan, got others"


def split_model(folder, family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    how = {"tp_plan": "auto"}
    if dist.get_world_size() == 4:
        how = {"distributed_config": DistributedConfig(tp_size=2, fsdp_size=2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a newer keyword than tp_plan
        return transformers.AutoModelForCausalLM.from_pretrained(folder / family, **how)


def run(kind: str, what: str, folder, flag: bool) -> dict:
    # Accelerate keeps the first trainer's parallelism for the process.
    AcceleratorState._reset_state(True)
    family, flags = CASES.get((kind, what), ("llama", ()))
    dataset, settings, trainer = needs(kind, folder)
    model = split_model(folder, family)
    assert isinstance(model.lm_head.weight, DTensor)
    config, cls = our_pair(kind).values()
    settings |= for_ranks(kind)
    if "teacher_model" in trainer and not settings["use_cpu"]:
        trainer["teacher_model"].cuda()
    flags = {name: flag for name in ("use_chunked_loss", *flags)}
    args = config(**options(folder / "out", **settings | SGD | {"max_steps": 2} | flags))
    with uncompiled(), mock.patch.object(groups, "gathered", refused):
        done = train(rolled_out(cls), args, model, dataset, tokenizer=words(), **trainer)
    plan = done.trainer.last_plan
    return {
        # Of a policy that equals its reference, rounding decides who wins.
        "logs": [
            {name: x for name, x in log.items() if name != "rewards/accuracies"}
            for log in done.logs
            if "loss" in log
        ],
        "gradients": [{name: groups.whole(x) for name, x in step.items()} for step in done.gradients],
        "strategy": None if plan is None else plan.strategy,
    }


def refused(name, x):
    raise AssertionError("a head in shards was gathered")


def own_loop(folder) -> dict:
    """Without a trainer: the model's own loss, ours of its head, and the patched model's."""
    actual, ids = {}, torch.arange(3, 33).view(2, 15).to("cpu" if dist.get_backend() == "gloo" else "cuda")
    for how in ("stock", "head_of", "patched"):
        model = split_model(folder, "gemma2")
        # transformers 5.17 gives the mesh no name, and its heads are gathered.
        named = model.lm_head.weight.device_mesh.mesh_dim_names is not None
        with uncompiled(), mock.patch.object(groups, "gathered", refused if named else groups.gathered):
            if how == "head_of":
                hidden = model.base_model(ids).last_hidden_state
                loss = CrossEntropyLoss(tp_group="tp" if named else None)
                loss = loss(hidden, head_of(model), ids, shift=True).loss
            else:
                undo = patch_model(model) if how == "patched" else None
                loss = model(ids, labels=ids).loss
            loss.backward()
        gradients = {name: groups.whole(p.grad) for name, p in model.named_parameters()}
        actual[how] = {"loss": loss.item(), "gradients": gradients}
        if how == "patched":
            actual["checked"] = undo.checked
    return actual


def run_all(folder, cases) -> dict:
    alone = dist.get_world_size() == 2
    with with_cards():
        actual = {case: [attempt(run, *case, folder, flag) for flag in (False, True)] for case in cases}
        if alone:
            actual |= {"own loop": attempt(own_loop, folder)}
            actual |= {kind: attempt(run, kind, "llama", folder, True) for kind in (*ROLLING, REFUSED)}
        return actual


def asked(request, cases) -> list[tuple[str, str]]:
    """Those that this run tests."""
    return [case for case in cases if request.config.getoption("--all") or case not in SELDOM]


def marked(cases) -> list:
    return [pytest.param(*case, marks=[pytest.mark.slow] if case in SELDOM else []) for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("split")
    for family in {"gemma2", *(family for family, _ in CASES.values())}:
        uneven = {"vocab_size": VOCAB + 1} if family == "cohere" else {}
        save(tiny_model(family, **uneven), path / family)
    teacher(path)
    return path


@pytest.fixture(scope="module")
def ranks(folder, request):
    return on_devices(2, run_all, folder, asked(request, CASES))


@pytest.fixture(scope="module")
def grid(folder, request):
    return on_devices(4, run_all, folder, asked(request, GRID))


def check_gradients(actual: dict, expected: dict) -> None:
    assert sum(x.norm() for x in expected.values()) > 1e-2
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)


# Before, the optimizer does not take DTensors beside plain tensors, nor parameters of two meshes.
trains = pytest.mark.skipif(
    "DTensor" not in inspect.getsource(transformers.Trainer.create_optimizer),
    reason="this transformers' trainer does not step with a model in a tensor-parallel plan",
)


def assert_same_runs(off: dict | str, on: dict | str) -> None:
    assert not isinstance(off, str), off
    assert not isinstance(on, str), on
    assert off["strategy"] is None and on["strategy"] is not None
    assert len(on["logs"]) == 2 and on["logs"][0]["grad_norm"] > 0
    for mine, stock in zip(on["logs"], off["logs"], strict=True):
        assert mine == pytest.approx(stock, rel=1e-3, abs=1e-5)
    for mine, stock in zip(on["gradients"], off["gradients"], strict=True):
        check_gradients(mine, stock)


@trains
@pytest.mark.parametrize(("kind", "what"), marked(CASES))
def test_tensor_parallel(ranks, kind, what):
    for actual in ranks:
        assert_same_runs(*actual[kind, what])


@pytest.mark.repeats
@trains
@pytest.mark.skipif(DistributedConfig is None, reason="transformers does not combine it with FSDP2")
@pytest.mark.parametrize(("kind", "what"), marked(GRID))
def test_tensor_parallel_beside_fsdp2(grid, kind, what):
    for actual in grid:
        assert_same_runs(*actual[kind, what])


@trains
@pytest.mark.parametrize("kind", ROLLING)
def test_ranks_with_other_tokens(ranks, kind):
    for actual in ranks:
        assert OTHER_TOKENS in str(actual[kind]), actual[kind]


@trains
def test_a_trainer_that_rolls_out_is_refused(ranks):
    for actual in ranks:
        assert "model: expected no tensor-parallel plan" in str(actual[REFUSED]), actual[REFUSED]


def test_own_loop(ranks):
    for actual in (each["own loop"] for each in ranks):
        assert not isinstance(actual, str), actual
        for how in ("head_of", "patched"):
            assert actual[how]["loss"] == pytest.approx(actual["stock"]["loss"], rel=1e-5)
            check_gradients(actual[how]["gradients"], actual["stock"]["gradients"])
        assert actual["checked"] == "checked at step 1"
