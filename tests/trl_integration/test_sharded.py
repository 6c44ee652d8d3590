"""FSDP2 and DeepSpeed ZeRO through a trainer: two processes hold half of each parameter, or of its gradient
and the optimizer's state (ZeRO-2), train two steps with the flag off and on, and come to the same losses and
parameters."""

import importlib.util
import warnings
from collections.abc import Iterable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.ranks import on_devices
from tests.support import uncompiled

from .compare import options, our_pair
from .kinds import attempt, for_ranks, needs, rolled_out, with_cards
from .tiny import train, words

pytestmark = pytest.mark.ranks

# Adam would make a step of the rounding of a gradient that is zero; clipping would hide a wrong factor.
SGD = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 1e9}
KINDS = ("SFT", "DPO", "ORPO", "GRPO", "GKD")
FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}
# By default ZeRO-3 keeps small parameters gathered; here each is emptied after every call of its module.
EMPTIED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def zero(stage: int) -> dict:
    return {
        "deepspeed": {
            "zero_optimization": {"stage": stage} | (EMPTIED if stage == 3 else {}),
            # SGD is PyTorch's, which DeepSpeed does not list as tested.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    }


ENGINES = {"fsdp2": FSDP, "zero2": zero(2), "zero3": zero(3)}


def whole(engine: str, trainer) -> dict[str, Tensor]:
    """The trained parameters, once it is certain that this engine held them, on this rank's device."""
    parameters = dict(trainer.model.named_parameters())
    held, device = list(parameters.values()), "cpu" if dist.get_backend() == "gloo" else "cuda"
    assert all(x.device.type == device for x in held)
    if engine == "fsdp2":
        assert all(isinstance(x, DTensor) for x in held)
        return {name: x.full_tensor().detach() for name, x in parameters.items()}
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero import GatheredParameters

    wrapped = trainer.model_wrapped
    assert isinstance(wrapped, DeepSpeedEngine) and engine == f"zero{wrapped.zero_optimization_stage()}"
    assert wrapped.dp_world_size == dist.get_world_size()
    assert all(hasattr(x, "ds_id") and x.numel() == 0 for x in held) == (engine == "zero3")
    with GatheredParameters(held) if engine == "zero3" else nullcontext():
        return {name: x.detach().clone() for name, x in parameters.items()}


def run(engine: str, kind: str, folder, **flags) -> dict:
    # Of the trainer before: while it lives, ZeRO-3's also shards what `from_pretrained` loads.
    unset_hf_deepspeed_config()
    dataset, settings, trainer = needs(kind, folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    config, cls = our_pair(kind).values()
    settings |= for_ranks(kind)
    if engine == "fsdp2" and "teacher_model" in trainer and not settings["use_cpu"]:
        trainer["teacher_model"].cuda()  # under FSDP2, TRL leaves it where it is
    args = config(**options(folder / "out", **settings | ENGINES[engine] | SGD | flags))
    with uncompiled(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = train(rolled_out(cls), args, model, dataset, tokenizer=words(), **trainer)
    plan = done.trainer.last_plan
    parameters = whole(engine, done.trainer)
    return {
        "losses": [log["loss"] for log in done.logs if "loss" in log],
        "parameters": parameters,
        "moved": {name: x.cpu() - start[name] for name, x in parameters.items()},
        "strategy": None if plan is None else plan.strategy,
        "of_views": [str(each.message) for each in said if "returned a view tensor" in str(each.message)],
    }


def both(engine: str, kind: str, folder) -> list[dict]:
    return [run(engine, kind, folder, use_chunked_loss=flag) for flag in (False, True)]


def everything(engine: str, folder) -> dict:
    # Accelerate takes DeepSpeed's processes as they are.
    with with_cards() if engine == "fsdp2" else torch.device("cpu"):
        return {kind: attempt(both, engine, kind, folder) for kind in KINDS}


without_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=() if x == "fsdp2" else without_deepspeed) for x in ENGINES],
)
def ranks(request, folder):
    return on_devices(2, everything, request.param, folder)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors]).norm()


@pytest.mark.parametrize("kind", KINDS)
def test_same_training(ranks, kind):
    for pair in (actual[kind] for actual in ranks):
        assert not isinstance(pair, str), pair
        off, on = pair
        assert off["strategy"] is None and on["strategy"] is not None
        assert on["of_views"] == off["of_views"] == []
        assert on["losses"] == pytest.approx(off["losses"], rel=1e-4) and len(on["losses"]) == 2
        torch.testing.assert_close(on["parameters"], off["parameters"], rtol=1e-3, atol=1e-5)
        # Some trainers' steps are hardly larger than that tolerance.
        errors = [on["moved"][name] - x for name, x in off["moved"].items()]
        assert norm(errors) < 1e-2 * norm(off["moved"].values())
