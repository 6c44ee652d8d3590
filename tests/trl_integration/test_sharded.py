"""FSDP2 through a trainer: two processes hold half of each parameter, train two steps with the flag off and
on, and come to the same losses and parameters."""

import traceback
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import DistributedType, PartialState
from torch.distributed.tensor import DTensor

import logitless.trl_integration as ours
from tests.ranks import on_devices
from tests.support import uncompiled

from .kinds import needs
from .test_distillation_trainers import teacher
from .test_distributed import rolled_out
from .test_log_prob_trainers import words
from .test_sft import options
from .tiny import tiny_model, train

pytestmark = pytest.mark.ranks

# Adam would make a step of the rounding of a gradient that is zero.
SGD = {"optim": "sgd", "learning_rate": 0.3}
KINDS = ("SFT", "DPO", "ORPO", "GRPO", "GKD")
FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}


def run(kind: str, folder, **flags) -> dict:
    dataset, settings, trainer = needs(kind, folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    config, cls = getattr(ours, f"{kind}Config"), rolled_out(getattr(ours, f"{kind}Trainer"))
    if kind in ("DPO", "GRPO"):
        # Else TRL spreads the reference model over all cards, whoever has them.
        settings |= {"model_init_kwargs": {"device_map": None}}
    if "teacher_model" in trainer and dist.get_backend() != "gloo":
        trainer["teacher_model"].cuda()  # under FSDP2, TRL leaves it where it is
    settings["use_cpu"] = on_cpu = dist.get_backend() == "gloo"
    args = config(**options(folder / "out", **settings | FSDP | SGD | flags))
    with uncompiled(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = train(cls, args, model, dataset, tokenizer=words(), **trainer)
    parameters = dict(done.trainer.model.named_parameters())
    assert all(isinstance(x, DTensor) for x in parameters.values())
    plan = done.trainer.last_plan
    assert all(x.device.type == ("cpu" if on_cpu else "cuda") for x in parameters.values())
    return {
        "losses": [log["loss"] for log in done.logs if "loss" in log],
        "parameters": {name: x.full_tensor().detach() for name, x in parameters.items()},
        "strategy": None if plan is None else plan.strategy,
        "of_views": [str(each.message) for each in said if "returned a view tensor" in str(each.message)],
    }


def both(kind: str, folder) -> list[dict] | str:
    try:
        return [run(kind, folder, use_chunked_loss=flag) for flag in (False, True)]
    except Exception:
        return traceback.format_exc()  # the other trainers are tried all the same


def everything(folder) -> dict:
    made = PartialState.__init__

    def with_cards(self, *args, **kwargs):
        # Accelerate shards models for processes with cards alone.
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    # Trainers make what they make on the CPU and move it themselves.
    with mock.patch.object(PartialState, "__init__", with_cards), torch.device("cpu"):
        return {kind: both(kind, folder) for kind in KINDS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    tiny_model().save_pretrained(path / "model")
    words().save_pretrained(path / "model")
    teacher(path)
    return on_devices(2, everything, path)


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2(ranks, kind):
    for pair in (found[kind] for found in ranks):
        assert not isinstance(pair, str), pair
        off, on = pair
        assert off["strategy"] is None and on["strategy"] is not None
        assert on["of_views"] == off["of_views"] == []
        assert on["losses"] == pytest.approx(off["losses"], rel=1e-4) and len(on["losses"]) == 2
        for name, x in off["parameters"].items():
            torch.testing.assert_close(on["parameters"][name], x, rtol=1e-3, atol=1e-5, msg=name)
