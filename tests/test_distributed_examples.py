"""The examples of several processes, on tiny models: one process with all batches has the same losses."""

import os
import re
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless import CrossEntropyLoss, GRPOLoss
from tests.commands import EXAMPLES, example
from tests.ranks import on_devices, to_rank_device

pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks
STEPS, LR = 3, 1e-2


def in_fsdp2() -> list[float]:
    from torch.distributed.tensor import DTensor

    module, common = example("fsdp2"), example("process_group")
    with common.process_group() as device:
        trainee = module.sharded(common.tiny_model(), device)
        head = trainee.model.lm_head.weight
        assert isinstance(head, DTensor) and head.to_local().shape[0] == common.VOCAB // 2
        return module.train(trainee, device, STEPS, 3, 2, LR)


def in_tensor_parallel() -> list[float]:
    module, common = example("tensor_parallel"), example("process_group")
    with common.process_group() as device:
        mesh = module.init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
        model = module.split(common.tiny_model().to(device), mesh)
        assert model.lm_head.weight.to_local().shape[0] == common.VOCAB // 2
        norms, clip = [], module.clip

        def noted(*args):
            norms.append(clip(*args).item())

        # Adam's step hardly shows by what the gradients were scaled.
        with mock.patch.object(module, "clip", noted):
            return module.train(model, device, STEPS, 3, LR) + norms


def on_the_page() -> list[float]:
    """The blocks of docs/howto/distributed.md, one after the other; the losses of the last two."""
    page = (EXAMPLES.parent / "docs" / "howto" / "distributed.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    rank, losses, made = dist.get_rank(), [], page_tensors()
    parts = {name: x[:, rank::2] for name, x in made.items() if x.dim() > 1 and name != "weight"}
    rollouts = {"advantages": made["advantages"], "old_logps": parts.pop("old_logps")}
    names = {"torch": torch, "dist": dist, "rollouts": rollouts}
    sliced = parts | {"weight": made["weight"].requires_grad_()}
    sharded = {name: made[name] for name in ("hidden", "targets")} | {"weight": made["weight"].chunk(2)[rank]}
    # The first block makes tensors, and a group of one process; the third makes rollouts.
    for number, (block, own) in enumerate(zip(blocks[1:], (sliced, sliced, sharded), strict=True), 2):
        names |= own
        block = re.sub(r"^rollouts = .*\n", "", block, flags=re.MULTILINE)
        exec(compile(block, f"distributed.md, block {number}", "exec"), names)
        losses.append(names["out"].loss.item() if "out" in names else names["loss"].item())
    return losses


def page_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.device("cpu"):
        targets = torch.randint(0, 8, (4, 6))
        targets[0, 2:] = -100
        made = {
            "hidden": torch.randn(4, 6, 5),
            "weight": torch.randn(8, 5),
            "targets": targets,
            "advantages": torch.randn(4),
            "old_logps": torch.randn(4, 6) - 2,
        }
    return to_rank_device(made)


def everything() -> dict[str, list[float]]:
    with torch.device("cpu"):  # as under torchrun; the examples name other devices
        actual = {"fsdp2": in_fsdp2(), "tensor_parallel": in_tensor_parallel()}
    return actual | {"page": on_the_page()}


def alone(batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Losses and norms of gradients of one process with as many batches a step as the ranks had together."""
    common, losses, norms = example("process_group"), [], []
    model = common.tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        size = len(batches) // STEPS
        ids, labels = (torch.cat(x) for x in zip(*batches[step * size : (step + 1) * size]))
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses + norms


FAILING = """
import sys
import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[1])
from process_group import process_group

with process_group() as device:
    if dist.get_rank() == 1:
        raise ArithmeticError("the cause")
    dist.all_reduce(torch.ones(1, device=device))
"""


@pytest.mark.repeats
def test_a_rank_that_raises_ends_the_others(tmp_path):
    """Under torchrun, which writes what every rank had to say."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    hidden = {} if torch.cuda.device_count() >= 2 else {"CUDA_VISIBLE_DEVICES": ""}
    command += [str(script), str(EXAMPLES)]
    environment = os.environ | hidden
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "rank 1:" in done.stderr and "ArithmeticError: the cause" in done.stderr


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[float]]]:
    return on_devices(2, everything)


@pytest.mark.parametrize(("name", "a_step"), [("fsdp2", 4), ("tensor_parallel", 1)])
def test_equals_one_process(ranks, name, a_step):
    make = example("process_group").batch
    truth = alone([make(i, 3) for i in range(a_step * STEPS)])
    assert truth[STEPS - 1] < truth[0] - 0.1
    for rank in ranks:
        assert rank[name] == pytest.approx(truth[: len(rank[name])], abs=2e-3)


def test_the_page(ranks):
    made = page_tensors()
    rollouts = {name: made.pop(name) for name in ("advantages", "old_logps")}
    truth = [
        CrossEntropyLoss()(**made).loss.item(),
        GRPOLoss(importance_sampling_level="sequence")(**made, **rollouts).loss.item(),
        CrossEntropyLoss()(**made).loss.item(),
    ]
    mean = [sum(x) / 2 for x in zip(*(rank["page"] for rank in ranks))]
    assert mean == pytest.approx(truth, rel=1e-5)
    assert all(rank["page"][1:] == pytest.approx(truth[1:], rel=1e-5) for rank in ranks)


# What accelerate reads of each file: environment variables of the processes that it starts.
CONFIGS = {
    "fsdp2": {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    "context_parallel": {
        "FSDP_VERSION": "2",
        "PARALLELISM_CONFIG_CP_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_takes_the_config(name):
    """Parsed, not run: every setting is one that its launcher knows."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils.launch import prepare_multi_gpu_env

    file = str(EXAMPLES / "accelerate" / f"{name}.yaml")
    parser = launch.launch_command_parser()
    known = vars(parser.parse_args(["script.py"]))
    config = load_config_from_file(file)
    settings = {**config.fsdp_config, **config.deepspeed_config, **config.parallelism_config}
    assert settings and not settings.keys() - known.keys()
    args, *_ = launch._validate_launch_command(parser.parse_args(["--config_file", file, "script.py"]))
    actual = prepare_multi_gpu_env(args) if name != "zero3" else deepspeed_env(args)
    assert {key: actual.get(key) for key in CONFIGS[name]} == CONFIGS[name]


def deepspeed_env(args) -> dict[str, str]:
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    args.deepspeed_fields_from_accelerate_config = ""  # what the launcher adds, where deepspeed is installed
    return prepare_deepspeed_cmd_env(args)[1]


# (file, changes) of each launch by accelerate.
ACCELERATE = {
    "fsdp2": ["fsdp2.yaml"],
    "zero3": ["zero3.yaml"],
    "zero2": ["zero3.yaml", "--zero_stage", "2", "--zero3_init_flag", "false"],
    "context_parallel": [
        "context_parallel.yaml", "--num_processes", "2", "--parallelism_config_dp_shard_size", "1"
    ],
    "sequence_parallel": ["zero3.yaml"],
}  # fmt: skip
# Accelerate's launcher takes its options beside FSDP2 alone, and DeepSpeed must be what runs it.
ENVIRONMENT = {
    "sequence_parallel": {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_SIZE": "2",
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
    }
}
# Processes of one machine; torchrun's on CPUs, which shows that the test can pass and fail.
LAUNCHERS = {"torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]} | {
    name: ["accelerate.commands.launch", "--config_file", f"examples/accelerate/{file}", *changes]
    for name, (file, *changes) in ACCELERATE.items()
}
# TRL refuses its other trainers there.
RUNS = [(launcher, script) for launcher in LAUNCHERS for script in ("sft", "dpo")]
RUNS = [run for run in RUNS if not run[0].endswith("_parallel") or run[1] == "sft"]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("launcher", "script"),
    [pytest.param(*run, marks=[pytest.mark.slow] if run[0] == "torchrun" else []) for run in RUNS],
)
def test_examples_of_trl_under_a_launcher(launcher, script):
    """With the flag and without, the logged metric goes the same way."""
    if launcher != "torchrun" and torch.cuda.device_count() < 2:
        pytest.skip("accelerate shards models for processes with cards alone")
    if "zero3.yaml" in LAUNCHERS[launcher][2]:
        pytest.importorskip("deepspeed")
    courses, port = [], [] if launcher == "torchrun" else ["--main_process_port", str(free_port())]
    for flag in ("--use-chunked-loss", "--no-use-chunked-loss"):
        launch = [sys.executable, "-m", *LAUNCHERS[launcher], *port]
        command = [*launch, f"examples/{script}.py", "--steps", "8", flag]
        given = {"cwd": EXAMPLES.parent, "env": os.environ | ENVIRONMENT.get(launcher, {})}
        done = subprocess.run(command, **given, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        actual = re.findall(r"([\d.]+) -> ([\d.]+); (.*)", done.stdout)
        assert actual and all(("TRL's own loss" in how) == flag.startswith("--no") for *_, how in actual)
        courses.append([float(x) for x in actual[0][:2]])
    # DPO's is the share of 16 pairs that are told right, of which rounding may tip one.
    assert courses[0] == pytest.approx(courses[1], rel=0.02, abs=1 / 16 if script == "dpo" else 0.0)
