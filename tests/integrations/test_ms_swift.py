"""ms-swift: the callback in a trainer built as ms-swift builds it, with ms-swift's own `compute_loss`."""

import ast
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

from logitless.integrations import ms_swift as module  # noqa: E402
from tests.integrations.support import check_text, require, tiny_qwen3  # noqa: E402

V, T = 60, 12


@pytest.fixture
def callbacks(monkeypatch) -> dict:
    """A stand-in for `swift.callbacks`: the package itself imports modelscope."""
    swift, stub = ModuleType("swift"), ModuleType("swift.callbacks")
    stub.callbacks_map = {"lisa": object}
    monkeypatch.setitem(sys.modules, "swift", swift)
    monkeypatch.setitem(sys.modules, "swift.callbacks", stub)
    return stub.callbacks_map


def template(**change) -> SimpleNamespace:
    scale = SimpleNamespace(is_binary_loss_scale=True)
    given = {"sequence_parallel_size": 1, "is_binary_loss_scale": None, "loss_scale": scale}
    return SimpleNamespace(**given | change)


class Seq2SeqTrainer(transformers.Trainer):
    """Makes its callbacks as ms-swift's trainers do."""

    def __init__(self, model, args, template, callbacks):
        self.template = template
        callbacks = [make(args, self) for make in callbacks]
        super().__init__(model, args, train_dataset=rows(), callbacks=callbacks)


class DPOTrainer(Seq2SeqTrainer):
    pass


def rows() -> list[dict]:
    ids = torch.randint(0, V, (8, T), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :5] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]


def arguments(folder: Path, **change) -> transformers.TrainingArguments:
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    for name, value in change.items():
        setattr(args, name, value)
    return args


def train(folder: Path, callbacks: list) -> list[float]:
    trainer = Seq2SeqTrainer(tiny_qwen3(V), arguments(folder), template(), callbacks)
    trainer.train()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    assert trainer.model(ids, labels=ids).logits is not None  # undone
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_it_trains_as_without(callbacks, tmp_path, caplog):
    undo = module.register(logits_budget=2**20)
    with (
        caplog.at_level("INFO", "logitless"),
        mock.patch.object(module, "patch_model", wraps=module.patch_model) as patched,
    ):
        ours = train(tmp_path, [callbacks["logitless"]])
    assert patched.call_args.kwargs == {"logits_budget": 2**20}
    line = "logitless: ms-swift's loss of Seq2SeqTrainer replaced, logits_budget 0.000977 GiB"
    assert line in [record.message for record in caplog.records]
    stock = train(tmp_path, [])
    assert len(ours) == 2 and ours == pytest.approx(stock, rel=1e-5)
    undo()
    assert list(callbacks) == ["lisa"]


def test_a_name_that_is_taken(callbacks):
    with pytest.raises(ValueError, match="^name: expected one that no callback has, got 'lisa'"):
        module.register("lisa")


# Without the wheel, or with a wheel whose module cannot be imported.
MISSING = r"^ms-swift: expected (4\.6|a complete installation), got .*; pip install 'ms-swift==4\.6"


def test_without_ms_swift(monkeypatch):
    monkeypatch.setitem(sys.modules, "swift", None)
    with pytest.raises(ImportError, match=MISSING):
        module.register()


@pytest.mark.parametrize(
    ("args", "of_template", "message"),
    [
        (
            {"enable_dft_loss": True},
            {},
            "enable_dft_loss: expected False with --callbacks logitless, got True; set it to False",
        ),
        ({"enable_channel_loss": True}, {}, "enable_channel_loss: expected False"),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor: expected 0 "),
        ({"loss_type": "mine"}, {}, "loss_type: expected None .* got mine"),
        ({"use_liger_kernel": True}, {}, "use_liger_kernel: expected False"),
        ({}, {"sequence_parallel_size": 2}, "sequence_parallel_size: expected 1 "),
        ({}, {"is_binary_loss_scale": False}, "loss_scale: expected one that keeps or drops tokens"),
    ],
)
def test_refused(tmp_path, args, of_template, message):
    trainer = type("Seq2SeqTrainer", (), {"template": template(**of_template)})()
    callback = module.LogitlessCallback(None, trainer)
    with pytest.raises(ValueError, match=message):
        callback.on_train_begin(arguments(tmp_path, **args), None, None, model=None)


def test_refused_trainers(tmp_path):
    trainer = DPOTrainer(tiny_qwen3(V), arguments(tmp_path), template(), [module.LogitlessCallback])
    with pytest.raises(ValueError, match="callbacks: expected swift sft or swift pt .* got DPOTrainer"):
        trainer.train()


# From here on: the text of ms-swift.


def method(file: Path, cls: str, name: str, names: dict):
    """A method of a class in a file, without the imports of its module."""
    (owner,) = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", None) == cls]
    actual = [node for node in owner.body if getattr(node, "name", None) == name]
    assert actual, f"swift:{cls}.{name} moved: expected it in {file.name}"
    for node in actual:
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
    exec(compile(ast.Module(actual, []), str(file), "exec"), names)
    return names[name]


def test_names_and_parameters():
    folder = require("swift")
    check_text(folder / "trainers/mixin.py", "callbacks.append(callbacks_map[callback](args, self))")
    check_text(folder / "callbacks/mapping.py", "callbacks_map = {")
    check_text(folder / "callbacks/__init__.py", "from .mapping import callbacks_map")
    check_text(folder / "arguments/base_args/base_args.py", "external_plugins: List[str]")
    check_text(folder / "trainers/trainer_factory.py", "'causal_lm': 'swift.trainers.Seq2SeqTrainer'")
    for name in ("enable_dft_loss", "enable_channel_loss", "loss_type"):
        check_text(folder / "trainers/arguments.py", f"    {name}: ")
    for name in ("self.is_binary_loss_scale = ", "def loss_scale(self)"):
        check_text(folder / "template/base.py", name)


@pytest.mark.parametrize(
    ("size", "kept"),
    [(8, False), (8, True), (1, True)],
    ids=["all logits", "a number of logits to keep", "a mask of logits to keep"],
)
def test_its_compute_loss(size, kept):
    folder = require("swift")
    names = {"is_peft_available": lambda: False, "Callable": object, "nn": torch.nn, "is_mp": lambda: False}
    compute_loss = method(folder / "trainers/seq2seq_trainer.py", "Seq2SeqTrainer", "compute_loss", names)
    keep = method(folder / "trainers/mixin.py", "SwiftMixin", "prepare_logits_to_keep", names)
    of_template = method(folder / "template/base.py", "Template", "compute_sft_loss", names)
    actual = []
    for patched in (False, True):
        model = tiny_qwen3(V)
        model.model_info = SimpleNamespace(is_moe_model=False)
        args = arguments(Path("."), enable_dft_loss=False, enable_channel_loss=False, tuner_backend="peft")
        accuracy = []
        trainer = SimpleNamespace(
            args=args,
            template=template(compute_sft_loss=partial(of_template, None), padding_free=False),
            model=model,
            label_smoother=None,
            model_accepts_loss_kwargs=True,
            accelerator=SimpleNamespace(unwrap_model=lambda model: model, num_processes=1),
            _compute_acc=lambda *args, **kwargs: accuracy.append(args),
        )
        undo = module.patch_model(model) if patched else None
        batch = {name: torch.stack([row[name] for row in rows()[:size]]) for name in ("input_ids", "labels")}
        if kept:
            keep(trainer, batch)
        loss = compute_loss(trainer, model, batch, num_items_in_batch=31)
        loss.backward()
        assert bool(accuracy) is not patched  # it has no logits
        assert ("logits_to_keep" in batch) is kept
        actual.append((loss.item(), model.lm_head.weight.grad, model.model.embed_tokens.weight.grad))
        if undo is not None:
            undo()
    assert actual[0][0] == pytest.approx(actual[1][0], rel=1e-6)
    for ours, stock in zip(actual[1][1:], actual[0][1:]):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-7)
