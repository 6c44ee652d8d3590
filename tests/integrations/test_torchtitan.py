"""torchtitan: `LogitlessLoss` against its own `ChunkedLossWrapper`, also under its own FSDP2."""

import json
import logging
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.integrations.support import (
    PAGE,
    another_version,
    check_parameters,
    check_text,
    require,
    sum_gradients,
)
from tests.ranks import in_processes
from tests.support import assert_close

FOLDER = require("torchtitan")

from torchtitan.tools import utils as tools  # noqa: E402


class Cpu:
    """The CPU in the place of `torch.cuda`, which torchtitan takes where there is no accelerator."""

    get_device_name = staticmethod(lambda device: "cpu")
    get_device_properties = staticmethod(lambda device: SimpleNamespace(total_memory=2**30))
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 2)
    set_device = staticmethod(lambda device: None)
    memory_stats = staticmethod(lambda device: {})
    empty_cache = reset_peak_memory_stats = staticmethod(lambda: None)


# Other modules of torchtitan import these by name.
tools.device_type, tools.device_module = "cpu", Cpu()

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402

from logitless.integrations import torchtitan as module  # noqa: E402
from logitless.integrations.torchtitan import LogitlessLoss  # noqa: E402

B, L, H, V = 2, 24, 16, 60
NAMES = ("loss", "d_hidden", "d_weight")


def operands(length: int = L, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, length, H, generator=make)
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, V, (B, length), generator=make)
    return hidden, weight, torch.where(labels % 5 == 0, -100, labels)


def head_of(weight: Tensor) -> Linear:
    head = Linear.Config(in_features=H, out_features=V).build().to(weight.dtype)
    head.weight.data.copy_(weight)
    return head


def run(
    loss_fn, dtype: torch.dtype, length: int = L, count: float | None = 31.0, *, ignored: bool = False
) -> list[Tensor]:
    """Loss, d_hidden and d_weight; `ignored`: of labels that are all ignored."""
    hidden, weight, labels = operands(length)
    labels = torch.full_like(labels, -100) if ignored else labels
    hidden, head = hidden.to(dtype).requires_grad_(), head_of(weight.to(dtype))
    loss_fn.set_lm_head(head)
    valid = None if count is None else torch.tensor(count)
    loss, metrics = loss_fn(hidden * 1, labels, valid, positions=torch.arange(length).expand(B, -1))
    assert metrics == {}
    loss.backward()
    return [loss.detach(), hidden.grad, head.weight.grad]


def truth(length: int = L, count: float | None = 31.0, seeds=(0,)) -> list[Tensor]:
    """On full logits in fp64: the loss and d_hidden of the first seed, d_weight of all."""
    total = None
    for seed in seeds:
        hidden, weight, labels = operands(length, seed)
        hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
        logits = (hidden @ weight.T).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / (count or 1)
        loss.backward()
        if total is None:
            first, total = [loss.detach(), hidden.grad], torch.zeros_like(weight)
        total += weight.grad
    return [*first, total]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [None, 31.0])
def test_the_stock_loss_and_gradients(dtype, count):
    ours = run(LogitlessLoss.Config(logits_budget=100_000).build(compile_config=None), dtype, count=count)
    stock = run(ChunkedLossWrapper.Config().build(compile_config=None), dtype, count=count)
    for name, actual, plain, exact in zip(NAMES, ours, stock, truth(count=count)):
        assert actual.dtype == plain.dtype or name == "loss"
        error = ((plain.double() - exact).norm() / exact.norm()).item()
        least = 1e-6 if dtype == torch.float32 else 4e-3
        assert_close(actual, exact, max(least, error), name=name)


def test_a_step_without_labels():
    """Of all ranks: torchtitan divides by 0, and every gradient is 0."""
    for loss_fn in (ChunkedLossWrapper.Config().build(compile_config=None), LogitlessLoss.Config().build()):
        loss, d_hidden, d_weight = run(loss_fn, torch.float32, count=0.0, ignored=True)
        assert loss.isnan() and not d_hidden.any() and not d_weight.any()


def test_any_length():
    """The stock class takes multiples of `num_chunks` alone."""
    for name, actual, exact in zip(NAMES, run(LogitlessLoss.Config().build(), torch.float32, 7), truth(7)):
        assert_close(actual, exact, 1e-6, name=name)


def test_the_budget_and_a_bias():
    hidden, weight, labels = operands()
    loss_fn, head = LogitlessLoss.Config(logits_budget=100_000).build(), nn.Linear(H, V)
    loss_fn.set_lm_head(head)
    with mock.patch.object(module, "CrossEntropyLoss", wraps=module.CrossEntropyLoss) as made:
        loss, _ = loss_fn(hidden, labels)
    assert made.call_args.kwargs["logits_budget"] == 100_000
    logits = head(hidden).double().flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    assert_close(loss.detach(), expected.detach(), 1e-6, name="loss")


def test_another_version():
    with another_version():
        LogitlessLoss.Config().build()


def test_layouts_that_are_refused(monkeypatch):
    hidden, weight, labels = operands()
    loss_fn = LogitlessLoss.Config().build()
    loss_fn.set_lm_head(head_of(weight))
    monkeypatch.setattr(module, "get_spmd_backend", lambda: "spmd_types")
    monkeypatch.setattr(module, "spmd_mesh_size", lambda name: {"tp": 2}[name])
    with pytest.raises(ValueError, match="^lm_head: expected a DTensor in shards, got a shard of spmd_types"):
        loss_fn(hidden, labels)
    monkeypatch.setattr(module, "DTensor", Tensor)  # labels of full_dtensor, without a process group
    with pytest.raises(ValueError, match="^labels: expected a local tensor, got a DTensor of full_dtensor"):
        loss_fn(hidden, labels)


def test_validation():
    hidden, weight, labels = operands()
    losses = []
    for config in (LogitlessLoss.Config(), ChunkedLossWrapper.Config()):
        loss_fn = config.build()
        loss_fn.set_lm_head(head_of(weight))
        with torch.no_grad():
            losses.append(loss_fn(hidden, labels, torch.tensor(31.0))[0])
        assert not losses[-1].requires_grad
    torch.testing.assert_close(*losses)


def test_in_a_config_registry(caplog):
    """As a function of the registry writes it: the config of a trainer with the loss exchanged."""
    registry = import_module("torchtitan.models.llama3.config_registry")
    config = registry.llama3_debugmodel()
    config.loss = LogitlessLoss.Config(logits_budget=2684354560)
    with caplog.at_level(logging.INFO, "logitless"):
        loss_fn = config.loss.build(compile_config=config.compile)
    assert "logitless: torchtitan's ChunkedLossWrapper replaced, logits_budget 2.5 GiB" in caplog.text
    assert isinstance(loss_fn, ChunkedLossWrapper)  # what the trainer asks
    model = config.model_spec.model.build()
    model.init_weights(buffer_device=None)
    ids = torch.randint(0, 2048, (1, 17), generator=torch.Generator().manual_seed(0))
    # Without the layers, whose FlexAttention takes masks of the data loader.
    hidden = model.norm(model.tok_embeddings(ids[:, :-1]))
    expected = nn.functional.cross_entropy(model.lm_head(hidden)[0].double(), ids[0, 1:])
    loss_fn.set_lm_head(model.lm_head)
    loss, _ = loss_fn(hidden, ids[:, 1:], torch.tensor(16.0))
    assert_close(loss.detach(), expected.detach(), 1e-6, name="loss")


def test_the_command_line_of_torchtitan(tmp_path, monkeypatch):
    """The documentation's function in a module of the user, and an option of the loss."""
    (text,) = re.findall(r"```python[^\n]*\n(from logitless.integrations.torchtitan.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_configs.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    words = "--module my_configs --config llama3_8b_logitless --training.steps 2"
    config = ConfigManager().parse_args(words.split())
    assert config.loss == LogitlessLoss.Config(logits_budget=2560 * 2**20)
    assert config.to_dict()["loss"]["logits_budget"] == 2560 * 2**20
    config = ConfigManager().parse_args([*words.split(), "--loss.logits-budget", "1000"])
    assert config.loss.logits_budget == 1000


def test_cuda_graphs():
    """The trainer captures its steps in CUDA graphs by default: the loss may not have a host sync."""
    stock = import_module("torchtitan.config").TrainingConfig()
    assert stock.disable_cuda_graphs is False
    for compact in (False, True):
        loss_fn = LogitlessLoss.Config(compact=compact).build()
        with mock.patch.object(module, "CrossEntropyLoss", wraps=module.CrossEntropyLoss) as made:
            actual = run(loss_fn, torch.float32)
        assert made.call_args.kwargs["compact"] is compact
        assert_close(actual[2], truth()[2], 1e-6, name="d_weight")
    assert LogitlessLoss.Config().compact is False


def test_refused():
    with pytest.raises(ValueError, match="^loss_fn: expected CrossEntropyLoss.Config, got MSELoss.Config"):
        LogitlessLoss.Config(loss_fn=MSELoss.Config()).build()
    loss_fn = LogitlessLoss.Config().build()
    with pytest.raises(TypeError, match="^lm_head: expected a linear layer, got Embedding; leave lm_head"):
        loss_fn.set_lm_head(nn.Embedding(3, 4))
    hidden, weight, labels = operands()
    loss_fn.set_lm_head(head_of(weight))
    with pytest.raises(ValueError, match=r"^loss_inputs: expected inputs that a .* got advantages;"):
        loss_fn(hidden, labels, None, advantages=labels)


# -- two ranks


class Decoder(nn.Module):
    """A decoder as `apply_fsdp_to_decoder` takes it."""

    enable_weight_tying = False

    def __init__(self, weight: Tensor):
        super().__init__()
        self.tok_embeddings, self.layers = None, nn.ModuleDict({"0": nn.Linear(H, H, bias=False)})
        nn.init.eye_(self.layers["0"].weight)
        self.norm, self.lm_head = nn.Identity(), head_of(weight)

    def forward(self, x):
        return self.norm(self.layers["0"](x))


def with_fsdp(kind: str, policy: str, dtype: torch.dtype) -> list[Tensor]:
    hidden, weight, labels = operands(seed=dist.get_rank())
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = Decoder(weight)
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=policy,
    )
    sum_gradients(model)
    loss_fn = (LogitlessLoss if kind == "ours" else ChunkedLossWrapper).Config().build()
    loss_fn.set_lm_head(model.lm_head)
    for _ in range(2):  # with gradients of the first step dropped
        model.zero_grad()
        loss, _ = loss_fn(model(hidden.to(dtype)), labels, torch.tensor(31.0))
        loss.backward()
    grads = [model.layers["0"].weight.grad, model.lm_head.weight.grad]
    return [loss.detach(), *(x.full_tensor() for x in grads)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("policy", "dtype"), [("default", torch.float32), ("always", torch.bfloat16)], ids=str
)
def test_torchtitans_fsdp(policy, dtype):
    ours = in_processes(2, with_fsdp, "ours", policy, dtype)
    stock = in_processes(2, with_fsdp, "stock", policy, dtype)
    least = 1e-6 if dtype == torch.float32 else 1e-2
    for actual, plain in zip(ours, stock):
        for name, x, y in zip(("loss", "d_layer", "d_head"), actual, plain):
            assert_close(x, y.double(), least, name=name)
    exact = truth(seeds=(0, 1))
    assert_close(ours[0][0], exact[0], least, name="loss")
    assert_close(ours[0][2], exact[2], least, name="d_head")


WORDS = "what is the loss of a token that the model has not seen yet ?".split()


def prepared(folder: Path) -> Path:
    """A tokenizer of words and some text, as torchtitan reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "text").mkdir()
    lines = [json.dumps({"text": " ".join(WORDS[i % 7 :] * 3)}) for i in range(200)]
    (folder / "text" / "text.jsonl").write_text("\n".join(lines))
    return folder


def trained(kind: str, folder: str, backend: str) -> list[list[float]]:
    """The losses and gradient norms that torchtitan's trainer logs in two steps with FSDP2."""
    config = import_module("torchtitan.models.llama3.config_registry").llama3_debugmodel()
    for layer in config.model_spec.model.layers:  # FlexAttention has no backward pass on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if kind == "ours":
        config.loss = LogitlessLoss.Config(logits_budget=2**20)
    config.hf_assets_path = config.dump_folder = folder
    config.dataloader.dataset_path = str(Path(folder, "text"))
    config.training.steps, config.training.local_batch_size, config.training.seq_len = 2, 2, 24
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = backend
    config.debug.seed = 1
    trainer = config.build()
    sum_gradients(trainer.model_parts[0])
    logged = []
    with (
        mock.patch.object(utils, "set_pg_timeouts"),  # torch 2.13 has no torch.distributed.set_timeout
        mock.patch("time.sleep"),
        mock.patch.object(
            trainer.metrics_processor, "log", lambda *actual, **rest: logged.append(actual[1:4])
        ),
    ):
        trainer.train()
    return logged


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "backend"), [(1, "spmd_types"), (2, "partial_dtensor")])
def test_torchtitans_trainer(tmp_path, ranks, backend):
    """The default backend is run on one rank: on several ones it needs FSDP2 of a torch after 2.13."""
    folder = str(prepared(tmp_path))
    ours, stock = (in_processes(ranks, trained, kind, folder, backend)[0] for kind in ("ours", "stock"))
    assert len(ours) == len(stock) == 2
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=1e-5, atol=0)


def with_shards(kind: str) -> list[Tensor]:
    """A head in shards of its rows, and replicated hidden states, as torchtitan's plan makes them."""
    utils.set_spmd_backend("partial_dtensor")
    hidden, weight, labels = operands()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    head = head_of(weight)
    head.weight = nn.Parameter(distribute_tensor(head.weight.data, mesh, [Shard(0)]))
    hidden = hidden.requires_grad_()
    pred = DTensor.from_local(hidden, mesh, [Replicate()]) if kind == "dtensor" else hidden
    loss_fn = LogitlessLoss.Config().build()
    loss_fn.set_lm_head(head)
    with mock.patch.object(module, "CrossEntropyLoss", wraps=module.CrossEntropyLoss) as made:
        loss, _ = loss_fn(pred, labels, torch.tensor(31.0))
    # Each rank computes its shard: without a group the loss would gather the head, and have the same numbers.
    assert made.call_args.kwargs["tp_group"] == mesh["tp"]
    loss.backward()
    return [loss.detach(), hidden.grad, head.weight.grad.full_tensor()]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["dtensor", "local"])
def test_tensor_parallelism(kind):
    for actual in in_processes(2, with_shards, kind):
        for name, x, exact in zip(NAMES, actual, truth()):
            assert_close(x, exact, 1e-6, name=name)


def test_names_and_parameters():
    place = "torchtitan.components.loss:ChunkedLossWrapper"
    check_parameters(f"{place}.__init__", "self config compile_config")
    check_parameters(f"{place}.__call__", "self pred labels global_valid_tokens loss_inputs")
    check_parameters(f"{place}.set_lm_head", "self lm_head")
    assert isinstance(ChunkedLossWrapper.Config().loss_fn, CrossEntropyLoss.Config)
    for text in (
        "if isinstance(self.loss_fn, ChunkedLossWrapper):",
        "_skip_lm_head = True",
        'loss_kwargs["positions"] = extra_kwargs["positions"]',
    ):
        check_text(FOLDER / "trainer.py", text)
