"""Trainers that run inside of themselves and of each other, in several threads and with shared arguments,
each beside stock TRL; and TRL's classes and modules after they were switched off."""

import functools
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
import trl
from trl.trainer import distillation_trainer
from trl.trainer.utils import add_fused_lm_head

from logitless.trl_integration import apply_to, remove_from
from logitless.trl_integration.pairs import ADAPTERS
from logitless.trl_integration.versions import import_owner

from .compare import assert_same_run, options, our_pair, sft_trainer, stock, unchanged
from .kinds import ALL, decided, entered_twice, prepare_step, step, tolerance, train_together
from .served import serve
from .tiny import tiny_dataset, tiny_model, tiny_tokenizer

PATHS = [path for adapter in ADAPTERS.values() for path in adapter.replacements if ":" in path]


def functions_of_trl() -> dict:
    actual = {}
    for path in PATHS:
        owner, name = import_owner(path)
        actual[path] = vars(owner)[name]
    return actual


@pytest.fixture(autouse=True, scope="module")
def trl_is_as_before():
    """When all of the trainers below are garbage."""
    gc.collect()
    before = functions_of_trl()
    yield
    gc.collect()
    assert functions_of_trl() == before


class Split(trl.SFTTrainer):
    """Calls itself for each example; a DFT loss and a smoothed one are then other sums than a plain one."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = inputs["input_ids"].shape[0]
        if rows == 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        parts = [{name: x[i : i + 1] for name, x in inputs.items()} for i in range(rows)]
        return sum(self.compute_loss(model, part, False, num_items_in_batch) for part in parts)


class ByName(trl.SFTTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        first = trl.SFTTrainer.compute_loss(self, model, dict(inputs), *args, **kwargs)
        return first + super().compute_loss(model, inputs, *args, **kwargs)


DFT, SMOOTHED = {"loss_type": "dft"}, {"label_smoothing_factor": 0.3}


@pytest.mark.parametrize("cls, settings", [(Split, DFT), (Split, SMOOTHED), (ByName, DFT)])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sft_that_computes_its_loss_in_parts(folder, calls, cls, settings):
    of_stock, mine = (step("SFT", folder, trainer=cls, change=x, **settings) for x in (unchanged, apply_to))
    assert_same_run(of_stock, mine, rtol=1e-4)
    assert mine.strategies == ["fused"]  # one pass, as without nesting


def slow_but(*often: str) -> list:
    return [pytest.param(kind, marks=() if kind in often else pytest.mark.slow) for kind in ALL]


@pytest.mark.parametrize("kind", slow_but("DPO", "ORPO"))
def test_a_loss_that_enters_itself(folder, monkeypatch, kind):
    serve(monkeypatch)
    cls = entered_twice(stock(f"{kind}Trainer"))
    runs = [step(kind, folder, trainer=cls, change=x) for x in (unchanged, apply_to)]
    assert_same_run(*runs, rtol=tolerance(kind))


# Samplers that draw do it by torch's generator, which threads share.
SEQUENTIAL = {"train_sampling_strategy": "sequential", "max_steps": 2}
# Settings that make another loss of the same batch
OTHER: dict[str, dict] = {
    "SFT": {"loss_type": "dft"},
    "CPO": {"loss_type": "simpo"},
    "TPO": {"loss_type": "ipo", "tpo_alpha": 2.0},
    "SDFT": {"distillation_alpha": 0.3, "distillation_mode": "full_logits"},
    "SDPO": {"distillation_alpha": 0.3, "distillation_mode": "full_logits"},
    "A2PO": {"beta2": 0.3},
}
OTHER |= dict.fromkeys(("DPO", "KTO", "ORPO", "OnlineDPO"), {"beta": 0.7})
OTHER |= dict.fromkeys(("GRPO", "RLOO", "GMPO", "GOLD", "Distillation"), {"temperature": 0.7})
OTHER |= dict.fromkeys(("GKD", "IWOPD", "ServerDistillation"), {"beta": 0.7})


@pytest.mark.parametrize("kind", slow_but("SFT", "SDFT", "Distillation"))
def test_two_threads(folder, monkeypatch, kind):
    serve(monkeypatch)

    def prepared(flag):
        def change(trainer):
            decided(trainer)
            if flag:
                apply_to(trainer, logits_budget=2**14)

        settings = ({}, OTHER[kind])
        return [prepare_step(kind, folder, change=change, **SEQUENTIAL, **x) for x in settings]

    of_stock = [train() for _, train in prepared(flag=False)]
    mine = train_together(*prepared(flag=True))
    for one, other in zip(of_stock, mine, strict=True):
        assert_same_run(one, other, rtol=tolerance(kind))
    assert of_stock[0].logs[0]["grad_norm"] != pytest.approx(of_stock[1].logs[0]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("kind", [pytest.param("DPO", marks=pytest.mark.slow), "GKD"])
def test_a_reference_or_teacher_of_two_threads(folder, kind):
    """It is attached to both trainers at a time."""
    shared = tiny_model(num_hidden_layers=1)
    add_fused_lm_head(shared)  # as DPO's constructor does
    runs = []
    for flag in (False, True):

        def change(trainer, flag=flag):
            setattr(trainer, "ref_model" if kind == "DPO" else "teacher_model", shared)
            if flag:
                apply_to(trainer)

        both = [prepare_step(kind, folder, change=change, **SEQUENTIAL, **x) for x in ({}, {"beta": 0.7})]
        runs.append([train() for _, train in both] if not flag else train_together(*both))
    for of_stock, mine in zip(*runs, strict=True):
        assert_same_run(of_stock, mine, rtol=1e-3)


def losses(trainer, model=None) -> tuple:
    """The loss and the head's gradient of the trainer's first batch."""
    model = trainer.model if model is None else model
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(model, batch)
    return loss, *torch.autograd.grad(loss, model.lm_head.weight)


def assert_same_losses(trainer, expected) -> None:
    for mine, of_stock in zip(losses(trainer), expected, strict=True):
        torch.testing.assert_close(mine, of_stock, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [DFT, SMOOTHED], ids=["dft", "smoothed"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_args_object_of_two_trainers(tmp_path, settings):
    """One of them runs while the other computes its loss, with the flag and without."""
    args = trl.SFTConfig(**options(tmp_path, train_sampling_strategy="sequential", **settings))
    read = []

    class Reading(trl.SFTTrainer):
        def get_tp_size(self):  # TRL's compute_loss asks for it
            read.append((self.args.loss_type, self.label_smoother, losses(inner)[0]))
            return super().get_tp_size()

    def made(cls):
        return cls(tiny_model(), args, train_dataset=tiny_dataset(), processing_class=tiny_tokenizer())

    outer, inner = made(Reading), made(trl.SFTTrainer)
    batch = next(iter(outer.get_train_dataloader()))
    for flags in ((), (outer,), (inner,), (outer, inner)):
        for trainer in flags:
            apply_to(trainer)
        outer.compute_loss(outer.model, dict(batch), num_items_in_batch=torch.tensor(7))
        for trainer in flags:
            remove_from(trainer)
    assert [x[:2] for x in read] == 4 * [(args.loss_type, outer.label_smoother)]
    assert [x[2].item() for x in read] == pytest.approx(4 * [read[0][2].item()], rel=1e-4)


def test_a_pair_with_the_args_of_another(tmp_path):
    """A constructor inside of another one's, as in two threads."""
    config, cls = our_pair("SFT").values()
    args = config(**options(tmp_path, use_chunked_loss=True))

    class Outer(cls):
        def _prepare_dataset(self, dataset, *given, **kwargs):
            if type(self) is Outer:
                sft_trainer(tmp_path, cls, lambda **options: args)
            return super()._prepare_dataset(dataset, *given, **kwargs)

    assert "chunked_loss" in vars(sft_trainer(tmp_path, Outer, lambda **options: args))
    with pytest.raises(ValueError, match="use_chunked_loss: expected a trainer that honours it"):
        sft_trainer(tmp_path, trl.SFTTrainer, lambda **options: args)


def test_another_model_in_compute_loss(tmp_path):
    """TRL's own head computes it, with all options."""
    other = tiny_model("tied")
    expected = None
    for flag in (False, True):
        trainer = sft_trainer(tmp_path, loss_type="dft", train_sampling_strategy="sequential")
        sft_trainer(tmp_path, model=other)  # which gets TRL's head
        if flag:
            apply_to(trainer)
        batch = next(iter(trainer.get_train_dataloader()))
        loss = trainer.compute_loss(other, batch)
        expected = loss if expected is None else expected
    assert loss == expected


def test_a_wrapper_that_drops_the_request_for_sums(tmp_path):
    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = model

        def forward(self, fused_lm_head=False, **kwargs):
            return self.module(fused_lm_head=bool(fused_lm_head), **kwargs)

    trainer = sft_trainer(tmp_path, loss_type="dft")
    apply_to(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    wrapped = Wrapper(trainer.model)
    wrapped.__class__.__name__ = "DistributedDataParallel"  # as logitless knows wrappers
    with pytest.raises(ValueError, match="model: expected wrappers that pass fused_lm_head on"):
        trainer.compute_loss(wrapped, batch)


def test_evaluation_inside_of_a_training_step(tmp_path):
    """What a step has called, and with which gradients, is that step's."""

    class Evaluating(trl.SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if model.training:
                self.evaluate(self.train_dataset.select(range(3)))
                model.train()
            return loss

    trainer = sft_trainer(tmp_path, Evaluating, max_steps=1)
    apply_to(trainer)
    trainer.train()
    assert trainer.chunked_loss.verified_steps == {"train", "evaluate"}


# --- functions of TRL


@pytest.fixture
def stock_sft():
    gc.collect()  # trainers of other tests
    return vars(trl.SFTTrainer)["compute_loss"]


def is_installed() -> bool:
    return trl.SFTTrainer.compute_loss.__globals__["__name__"].startswith("logitless")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)], ids=str)
def test_switched_off_in_any_order(tmp_path, stock_sft, order):
    trainers = [sft_trainer(tmp_path, loss_type="dft", train_sampling_strategy="sequential") for _ in order]
    expected = losses(trainers[0])
    for trainer in trainers:
        apply_to(trainer)
    for i in order:
        assert is_installed()
        remove_from(trainers[i])
        for trainer in trainers:
            assert_same_losses(trainer, expected)
    assert trl.SFTTrainer.compute_loss is stock_sft


@pytest.mark.parametrize("chunked_first", [True, False])
def test_options_that_wrap_each_other_are_all_removed(tmp_path, chunked_first):
    trainer = sft_trainer(tmp_path)
    before = dict(vars(trainer))
    for use_chunked_loss in (chunked_first, not chunked_first):
        budget = None if use_chunked_loss else "1GiB"
        apply_to(trainer, use_chunked_loss=use_chunked_loss, activation_budget=budget)
    remove_from(trainer)
    assert vars(trainer).keys() == before.keys()


def test_a_trainer_that_is_garbage_needs_nothing(tmp_path, stock_sft):
    trainer = sft_trainer(tmp_path)
    apply_to(trainer)
    assert is_installed()
    del trainer
    gc.collect()
    assert trl.SFTTrainer.compute_loss is stock_sft


@pytest.mark.parametrize("first", ["flag", "own"])
def test_a_compute_loss_that_is_set_on_the_class_meanwhile(tmp_path, stock_sft, first):
    trainer = sft_trainer(tmp_path, loss_type="dft", train_sampling_strategy="sequential")
    loss, grad = losses(trainer)
    undo = apply_to(trainer)
    before = trl.SFTTrainer.compute_loss

    def own(self, *args, **kwargs):
        return 3 * before(self, *args, **kwargs)

    trl.SFTTrainer.compute_loss = own
    assert_same_losses(trainer, (3 * loss, 3 * grad))
    assert trainer.last_plan.strategy == "fused"
    if first == "flag":
        undo()
        assert trl.SFTTrainer.compute_loss is own
        assert_same_losses(trainer, (3 * loss, 3 * grad))
        # The dispatcher is back, and is taken away by the next call that nobody's chunked loss needs.
        trl.SFTTrainer.compute_loss = before
        assert_same_losses(trainer, (loss, grad))
    else:
        trl.SFTTrainer.compute_loss = stock_sft  # as somebody has seen it before the flag
        trainer.last_plan = None
        assert_same_losses(trainer, (loss, grad))
        assert trainer.last_plan.strategy == "fused"
        undo()
    assert trl.SFTTrainer.compute_loss is stock_sft


def test_an_error_inside_of_a_loss(tmp_path):
    trainer = sft_trainer(tmp_path, loss_type="dft", train_sampling_strategy="sequential")
    expected = losses(trainer)
    undo = apply_to(trainer)
    hook = trainer.model.model.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        losses(trainer)
    hook.remove()
    assert_same_losses(trainer, expected)
    undo()
    assert_same_losses(trainer, expected)


def test_a_function_of_trls_that_is_replaced_meanwhile(folder, monkeypatch):
    def change(trainer):
        apply_to(trainer)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        monkeypatch.setattr(distillation_trainer, "_chunked_divergence_loss", lambda *args, **kwargs: None)
        with pytest.raises(ValueError, match=":_chunked_divergence_loss: expected TRL's own in Distillation"):
            trainer.compute_loss(trainer.model, batch)
        monkeypatch.undo()

    step("Distillation", folder, change=change)


def test_trls_compute_loss_as_a_function_and_in_another_thread(tmp_path):
    """Neither goes through the method of the instance."""
    trainer = sft_trainer(tmp_path, loss_type="dft", train_sampling_strategy="sequential")
    expected = losses(trainer)
    apply_to(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    with ThreadPoolExecutor(1) as threads:
        call = functools.partial(trl.SFTTrainer.compute_loss, trainer, trainer.model)
        for compute in (call, lambda batch: threads.submit(call, batch).result()):
            trainer.last_plan = None
            torch.testing.assert_close(compute(dict(batch)), expected[0], rtol=1e-4, atol=0)
            assert trainer.last_plan.strategy == "fused"


@pytest.mark.parametrize(
    "kinds",
    [
        ("DPO", "SFT"),
        pytest.param(("GKD", "SFT"), marks=pytest.mark.slow),
        pytest.param(("ORPO", "DPO"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_a_trainer_inside_of_one_of_another_kind(folder, kinds):
    """They train one model, each with the flag or without."""
    outer, inner = kinds

    def run(*flags):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        settings = OTHER[inner] | SEQUENTIAL
        # Before the outer one, whose fused head has all fields
        second, _ = prepare_step(inner, folder, wrap=lambda _: model, **settings)
        batch = second._prepare_inputs(next(iter(second.get_train_dataloader())))

        class Both(stock(f"{outer}Trainer")):
            def compute_loss(self, model, inputs, *args, **kwargs):
                first = second.compute_loss(model, dict(batch))
                return first + 2 * super().compute_loss(model, inputs, *args, **kwargs)

        def change(trainer):
            for name, x in (("outer", trainer), ("inner", second)):
                if name in flags:
                    apply_to(x)

        options = {"trainer": Both, "wrap": lambda _: model, "train_sampling_strategy": "sequential"}
        return step(outer, folder, change=change, **options)

    of_stock = run()
    for flags in (("outer", "inner"), ("outer",), ("inner",)):
        assert_same_run(of_stock, run(*flags), rtol=1e-3)


@pytest.mark.parametrize("kind", ["SDFT", "Distillation"])
def test_a_stock_trainer_inside_of_one_with_the_flag(folder, calls, kind):
    """TRL's functions compute its loss, as without any flag."""
    expected, of_inner = [], []

    def change(trainer):
        decided(trainer)
        inner, _ = prepare_step(kind, folder, change=decided, **SEQUENTIAL)
        inner_batch = inner._prepare_inputs(next(iter(inner.get_train_dataloader())))
        compute_loss = type(trainer).compute_loss

        class Outer(type(trainer)):
            def compute_loss(self, *args, **kwargs):
                before = calls.number
                of_inner.append(inner.compute_loss(inner.model, dict(inner_batch)))
                assert calls.number == before
                return compute_loss(self, *args, **kwargs)

        trainer.__class__ = Outer
        if expected:
            apply_to(trainer)

    for _ in range(2):
        expected.append(step(kind, folder, change=change, train_sampling_strategy="sequential"))
    assert_same_run(*expected, rtol=tolerance(kind))
    assert of_inner[0] == of_inner[1]
