"""One model through several trainers, with the flag and without: every logged number and every gradient; and
the model and trainer after the flag was taken off again."""

import copy
import pickle

import pytest
import torch
import transformers
import trl

from logitless.exchange import STATES
from logitless.trl_integration import apply_to, remove_from
from logitless.trl_integration.forwards import forwards_of

from .compare import adapted, assert_same_run, options, our_pair, sft_trainer, stock_pair, unchanged
from .kinds import needs
from .tiny import Run, tiny_model, train, words

BUDGET = {"use_chunked_loss": True, "logits_budget": 2**16}


def run(kind, model, folder, *, flag, reference=None, **more) -> Run:
    """One step of the pair with the flag, or of TRL's without."""
    dataset, settings, given = needs(kind, folder)
    if reference is not None:
        given["ref_model"] = reference(model)
    config, cls = (our_pair if flag else stock_pair)(kind).values()
    settings = settings | {"max_steps": 1, "learning_rate": 1e-4} | more | (BUDGET if flag else {})
    torch.manual_seed(0)
    args = config(**options(folder / "out", **settings))
    return train(cls, args, model, dataset, tokenizer=words(), **given)


def loaded(folder, wrap=unchanged):
    return wrap(transformers.AutoModelForCausalLM.from_pretrained(folder / "model"))


def assert_stock(model, expected) -> None:
    """The model has the attributes that a model without the flag has, and no forward pass of ours."""
    assert [type(x) for x in model.modules()] == [type(x) for x in expected.modules()]
    assert not any(STATES in vars(x) for x in model.modules())
    assert vars(model).keys() == vars(expected).keys()
    pairs = [(vars(model).get(name), vars(expected).get(name)) for name in ("forward", "_original_forward")]
    for mine, stock in pairs:
        while mine is not None:
            mine, stock = getattr(mine, "__func__", mine), getattr(stock, "__func__", stock)
            if hasattr(mine, "__code__"):
                assert mine.__code__ is stock.__code__ and mine.__module__ == stock.__module__
            mine, stock = getattr(mine, "__wrapped__", None), getattr(stock, "__wrapped__", None)


LONG = ("SFT", "DPO", "KTO", "ORPO", "GRPO")
CHAINS = [LONG, ("SFT", "SFT"), ("SFT", "KTO"), ("DPO", "SFT"), ("ORPO", "SFT"), ("RLOO", "SFT")]


@pytest.mark.each_value
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("wrap", [unchanged, adapted], ids=["whole", "lora"])
@pytest.mark.parametrize("kinds", CHAINS, ids="-".join)
def test_one_trainer_after_the_other(folder, kinds, wrap, bf16):
    model, expected = loaded(folder, wrap), loaded(folder, wrap)
    trainers = []
    for kind in kinds:
        stock = run(kind, expected, folder, flag=False, bf16=bf16)
        mine = run(kind, model, folder, flag=True, bf16=bf16)
        assert mine.trainer.last_plan is not None
        assert_same_run(stock, mine, rtol=3e-2 if bf16 else 1e-3)
        trainers.append(mine.trainer)
        for adapter in (model, expected):
            if wrap is adapted and "ref" in adapter.peft_config:
                adapter.delete_adapter("ref")  # or TRL's next constructor raises
        # Between two steps the model is the stock trainer's.
        assert_stock(model, expected)
    for trainer in trainers:
        remove_from(trainer)
        assert not {"chunked_loss", "compute_loss", "training_step", "last_plan"} & vars(trainer).keys()
    assert_stock(model, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kinds", [("SFT", "DPO"), ("DPO", "DPO"), ("KTO", "DPO")], ids="-".join)
@pytest.mark.parametrize("which", ["copy", "trained"])
def test_the_trained_model_is_a_reference(folder, kinds, which, bf16):
    first, second = kinds
    runs = []
    for flag in (False, True):
        model = loaded(folder)
        run(first, model, folder, flag=flag, bf16=bf16)
        policy, reference = model, copy.deepcopy
        if which == "trained":
            policy, reference = copy.deepcopy(model), lambda _, model=model: model
        runs.append(run(second, policy, folder, flag=flag, bf16=bf16, reference=reference))
    assert_same_run(*runs, rtol=3e-2 if bf16 else 1e-3)


def batch_of(trainer):
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def loss_and_gradients(trainer, batch):
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    actual = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **{name: grad.clone() for name, grad in actual.items()}}


@pytest.mark.parametrize(
    "kinds", [("SFT", "DPO"), ("SFT", "KTO"), ("DPO", "SFT"), ("SFT", "SFT")], ids="-".join
)
def test_a_trainer_goes_on_after_another_has_come(folder, kinds):
    """Each computes its own loss, in whatever order they are called; `dft` shows whose it is. In TRL the head
    of the second trainer has the fields that the second one reads, and the first one may end there."""
    model, trainers, before = loaded(folder), [], []
    for i, kind in enumerate(kinds):
        more = {"loss_type": "dft"} if kind == "SFT" and i == 0 else {}
        trainers.append(run(kind, model, folder, flag=True, learning_rate=0.0, **more).trainer)
        before.append((trainers[-1], batch_of(trainers[-1])))
        before[-1] += (loss_and_gradients(*before[-1]),)
    for trainer, batch, expected in [*before, *before]:
        actual = loss_and_gradients(trainer, batch)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(actual[name], x) for name, x in expected.items())
    assert not torch.equal(before[0][2]["loss"], before[1][2]["loss"])


@pytest.mark.each_value
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO", "ORPO"])
def test_what_is_left_after_undo_is_the_stock_trainer(folder, kind, bf16):
    """Taken off after training, when Accelerate has put its autocast on the model: the same bits as never."""
    actual = []
    for flag in (False, True):
        model = loaded(folder)
        trainer = run(kind, model, folder, flag=flag, bf16=bf16, learning_rate=0.0).trainer
        if flag:
            remove_from(trainer)
            with pytest.raises(ValueError, match="expected one with the chunked loss, fused layers or an"):
                remove_from(trainer)
        torch.manual_seed(0)
        actual.append((trainer, model, loss_and_gradients(trainer, batch_of(trainer))))
    (stock, expected, numbers), (mine, model, actual) = actual
    assert_stock(model, expected)
    assert vars(mine).keys() == vars(stock).keys()
    assert numbers.keys() == actual.keys() and all(
        torch.equal(actual[name], x) for name, x in numbers.items()
    )


def test_undo_gives_back_the_same_objects(tmp_path):
    model = tiny_model()
    trainer = sft_trainer(tmp_path, model=model, bf16=True)
    before, of_model = dict(vars(trainer)), dict(vars(model))
    undo = apply_to(trainer)
    assert vars(model) == of_model
    trainer.train()
    forward = vars(model)["forward"]
    undo()
    assert vars(trainer).keys() >= before.keys() and vars(model)["forward"] is forward
    assert vars(model)["_original_forward"] is of_model["forward"]


def test_a_copy_made_in_a_step_is_a_stock_model(tmp_path):
    """A user's `compute_loss` may keep one, as an average of the weights or as a reference."""

    class Copying(trl.SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.copied, self.saved = copy.deepcopy(model), pickle.dumps(model.lm_head)
            return super().compute_loss(model, inputs, *args, **kwargs)

    model = tiny_model()
    trainer = sft_trainer(tmp_path, Copying, model=model, max_steps=1, learning_rate=0.0)
    apply_to(trainer)
    trainer.train()
    assert_stock(trainer.copied, model)
    ids = torch.arange(3, 13)[None]
    stock, mine = (x(ids, labels=ids, fused_lm_head=True) for x in (model, trainer.copied))
    assert torch.equal(mine.log_probs, stock.log_probs)
    assert type(pickle.loads(trainer.saved)) is torch.nn.Linear


def test_which_forward_passes_are_on_a_model(folder):
    """As TRL and Accelerate stack them, and of a copy, whose inner ones are bound to the original."""
    model = loaded(folder)
    assert forwards_of(model).base == model.forward and forwards_of(model).fused_head is None
    run("SFT", model, folder, flag=False, bf16=True)
    actual = forwards_of(model)
    assert actual.has_outer_autocast and actual.base.__func__ is type(model).forward
    run("DPO", model, folder, flag=False, bf16=True)
    # Accelerate prepares no model twice: TRL's second head is outside of its autocast.
    assert not forwards_of(model).has_outer_autocast and forwards_of(model).base == actual.base
    twin = copy.deepcopy(model)
    assert forwards_of(twin).base.__self__ is twin and not forwards_of(twin).has_outer_autocast

    def of_a_user(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    own = loaded(folder)
    own.forward = of_a_user.__get__(own)
    run("SFT", own, folder, flag=False, bf16=True)
    assert forwards_of(own).base.__func__ is of_a_user
    assert forwards_of(copy.deepcopy(own)).base.__self__ is not own


def test_a_head_with_another_trainers_options_is_refused(folder):
    """As TRL would compute the loss with the head that came last."""
    model = loaded(folder)
    first = run("SFT", model, folder, flag=False).trainer
    run("GRPO", model, folder, flag=False, temperature=0.7)
    with pytest.raises(
        ValueError, match="temperature: expected 0.7, which the fused head of its model has, got 1.0"
    ):
        apply_to(first)
