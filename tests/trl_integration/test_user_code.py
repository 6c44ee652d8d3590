"""What users write around TRL's trainers: subclasses with a loss of their own on the head's fields, callbacks
that change options between steps, losses and models of their own. Each beside TRL's trainer without the flag,
on a peaked model: the fields' differences would not show on one that knows nothing."""

import functools
import warnings
from dataclasses import dataclass

import pytest
import torch
import transformers
import trl
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.extras.profiling import profiling_decorator
from trl.trainer import distillation_trainer
from trl.trainer.utils import add_fused_lm_head

from logitless.models import patch_model
from logitless.trl_integration import apply_to
from logitless.trl_integration.head import SumOfTokens, attach_fused_head
from logitless.trl_integration.per_token import make_per_token_fields

from ..models.every import gradients
from . import user_models
from .compare import adapted, assert_same_run, chunked_loss, options, our_pair, sft_trainer, stock, unchanged
from .kinds import step
from .tiny import IDS, INPUTS, LABELS, VOCAB, tiny_dataset, tiny_model, train

LOSS = {"use_chunked_loss": True, "logits_budget": 2**16}
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_trains", [True, False], ids=["trained_head", "frozen_head"])
def test_every_field_is_trls_in_shape_dtype_and_gradient(autocast, head_trains):
    """For whoever calls the model while a trainer of ours computes its loss."""
    model = tiny_model()
    model.lm_head.requires_grad_(head_trains)
    add_fused_lm_head(model, outputs=FIELDS)
    attach = attach_fused_head(lambda session: make_per_token_fields(session, *FIELDS[1:]))
    rtol = 3e-2 if autocast else 1e-4

    def numbers():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(IDS, labels=LABELS, fused_lm_head=True)
        actual = {name: getattr(outputs, name) for name in (*FIELDS, "label_mask", "loss")}
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = {
            name: torch.autograd.grad((x * x).sum(), parameters, retain_graph=True)
            for name, x in actual.items()
            if x.requires_grad
        }
        return actual, gradients

    expected, of_expected = numbers()
    with attach(chunked_loss())(model):
        actual, of_found = numbers()
    for name, x in expected.items():
        assert (actual[name].shape, actual[name].dtype) == (x.shape, x.dtype), name
        torch.testing.assert_close(actual[name], x, rtol=rtol, atol=rtol)
    assert of_found.keys() == of_expected.keys() == {"log_probs", "entropy", "loss"}
    for name, of_stock in of_expected.items():
        for grad, mine in zip(of_stock, of_found[name], strict=True):
            assert (mine - grad).norm() <= rtol * grad.norm() + 1e-5, name


# --- subclasses


class Focal(trl.SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["use_cache"] = False
        outputs = model(**inputs, fused_lm_head=True)
        logps, mask = outputs.log_probs, outputs.label_mask
        assert logps.shape == mask.shape == inputs["labels"][:, 1:].shape
        loss = -((1 - logps.exp()) ** 2 * logps)[mask].mean() - 0.1 * outputs.entropy[mask].mean()
        return (loss, outputs) if return_outputs else loss


class Added(trl.SFTTrainer):
    """TRL's own loss, and a bonus from another call of the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
        outputs = model(**inputs, fused_lm_head=True)
        logits = model(**{name: x for name, x in inputs.items() if name != "labels"}).logits
        bonus = outputs.entropy.sum() / outputs.label_mask.sum() + 1e-3 * logits.logsumexp(-1).square().mean()
        return (loss - 0.1 * bonus, outputs) if return_outputs else loss - 0.1 * bonus


def scheduled(base, weight):
    """A trainer whose entropy bonus is `weight(step)`, on whatever TRL computes."""

    class Scheduled(base):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            mask = inputs["completion_mask"]
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
            _, entropy, *_ = self._get_per_token_logps_and_entropies(
                model, ids, attention, mask.size(1), compute_entropy=True
            )
            return loss - weight(self.state.global_step) * (entropy * mask).sum() / mask.sum()

    return Scheduled


def pairs(kind, folder, base, **more):
    """The run of a subclass of TRL's trainer, and of the same with the flag."""

    def flagged(trainer):
        apply_to(trainer, logits_budget=2**16)

    return [step(kind, folder, trainer=base, change=change, **more) for change in (unchanged, flagged)]


WHOLE_OR_LORA = pytest.mark.parametrize("wrap", [unchanged, adapted], ids=["whole", "lora"])


@WHOLE_OR_LORA
@pytest.mark.parametrize("base, loss_type", [(Focal, "nll"), (Added, "nll"), (Added, "dft")])
def test_sft_with_a_loss_on_the_heads_fields(folder, calls, base, loss_type, wrap):
    runs = pairs("SFT", folder, base, loss_type=loss_type, max_steps=2, wrap=wrap)
    assert_same_run(*runs, rtol=1e-3)
    # A frozen head projects the tokens again for the entropy's gradient.
    assert calls.number == 2 * (base is Added) + 2 * (2 if wrap is adapted else 1)


@WHOLE_OR_LORA
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_scheduled_entropy_bonus(folder, kind, wrap):
    base = scheduled(getattr(trl, f"{kind}Trainer"), lambda step: 0.3 if step else 0.0)
    assert_same_run(*pairs(kind, folder, base, max_steps=3, wrap=wrap), rtol=2e-3)


@WHOLE_OR_LORA
def test_grpo_with_an_adaptive_entropy_bonus(folder, wrap):
    """Its coefficient starts at 0 and moves between two steps."""
    settings = {
        "use_adaptive_entropy": True,
        "entropy_target": 50.0,
        "entropy_coef_delta": 0.2,
        "entropy_coef_max": 1.0,
    }
    runs = pairs("GRPO", folder, trl.GRPOTrainer, max_steps=4, beta=0.0, wrap=wrap, **settings)
    assert_same_run(*runs, rtol=2e-3)


@pytest.mark.parametrize(
    ("head_trains", "used", "products"),
    [(True, False, 4), (False, False, 2), (True, True, 4), (False, True, 5)],
    ids=["trained", "frozen", "trained-used", "frozen-used"],
)
def test_what_an_entropy_costs(head_trains, used, products):
    """Where nobody differentiates it as much as log-probabilities alone."""
    model = tiny_model()
    model.lm_head.requires_grad_(head_trains)
    for name in ("entropy",) if used else ("entropy", None):
        names = [] if name is None else [name]
        attach = attach_fused_head(lambda session: make_per_token_fields(session, *names))
        with attach(chunked_loss())(model):
            model(IDS, labels=LABELS, fused_lm_head=True)  # which checks the head
            with Counting() as counted:
                out = model(IDS, labels=LABELS, fused_lm_head=True)
                (out.log_probs.sum() + (out.entropy.sum() if used else 0)).backward()
        assert counted.products == products


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Products with something of the vocabulary's size."""

    products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function._overloadpacket in (aten.mm, aten.addmm, aten._addmm_activation):
            shapes = [x.shape for x in args if isinstance(x, torch.Tensor)]
            self.products += any(VOCAB in shape for shape in shapes)
        return function(*args, **kwargs or {})


# --- options


class Changing(transformers.TrainerCallback):
    """Changes the trainer after its first step."""

    def __init__(self, change):
        self.change, self.trainer = change, None

    def on_step_end(self, *args, **kwargs):
        self.change(self.trainer)


def changed(tmp_path, change, flag, **settings):
    callback = Changing(change)

    def build(*args, callbacks, **kwargs):
        trainer = trl.SFTTrainer(*args, callbacks=[*callbacks, callback], **kwargs)
        callback.trainer = trainer
        if flag:
            apply_to(trainer, logits_budget=2**16)
        return trainer

    args = trl.SFTConfig(**options(tmp_path, max_steps=3, **settings))
    return train(build, args, tiny_model(), tiny_dataset(masked=True))


def dft(trainer):
    trainer.args.loss_type = "dft"


def other_smoothing(trainer):
    trainer.label_smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.4)


def no_smoothing(trainer):
    trainer.label_smoother = None


def unread(trainer):
    """What TRL's constructor has read, and nobody after it."""
    trainer.args.label_smoothing_factor = 0.3
    trainer.args.temperature = 3.0


@pytest.mark.parametrize("change", [dft, other_smoothing, no_smoothing, unread], ids=lambda x: x.__name__)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sft_options_that_a_callback_changes(tmp_path, change):
    settings = {"label_smoothing_factor": 0.1} if change is no_smoothing else {}
    assert_same_run(*(changed(tmp_path, change, flag, **settings) for flag in (False, True)), rtol=1e-3)


def smoothed_dft(trainer):
    dft(trainer)
    other_smoothing(trainer)


def own_smoother(trainer):
    trainer.label_smoother = lambda *args, **kwargs: 0.0


def own_loss(trainer):
    trainer.compute_loss_func = lambda *args, **kwargs: 0.0


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_fields_of_a_config_of_the_users(folder, kind):
    """Named like options of GRPO."""
    fields = {
        "temperature": 3.0,
        "cast_lm_head_to_fp32": True,
        "use_vllm": True,
        "vllm_server_base_url": "http://here",
    }
    names = {"__annotations__": {name: type(value) for name, value in fields.items()}}
    config = dataclass(type("OwnConfig", (stock(f"{kind}Config"),), fields | names))
    assert_same_run(*pairs(kind, folder, stock(f"{kind}Trainer"), config=config), rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (smoothed_dft, "label_smoothing_factor: expected 0 with loss_type='dft', got 0.4"),
        (own_smoother, "label_smoother: expected transformers' LabelSmoother"),
        (own_loss, "compute_loss_func: expected None"),
    ],
)
def test_options_that_the_flag_cannot_follow(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        changed(tmp_path, change, flag=True)


def test_a_step_that_leaves_the_head_out_is_noticed_at_any_time(tmp_path):
    """Not in the first one alone."""

    class Sometimes(trl.SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if self.state.global_step < 2:
                return super().compute_loss(model, inputs, *args, **kwargs)
            return model(**inputs).loss

    trainer = sft_trainer(tmp_path, Sometimes, max_steps=4)
    apply_to(trainer)
    message = (
        "expected to be called in every step of Sometimes .train., got .*Sometimes.compute_loss in the pl"
    )
    with pytest.raises(
        RuntimeError, match=f"the chunked loss: {message}ace of SFTTrainer.compute_loss; call"
    ):
        trainer.train()
    assert trainer.state.global_step == 2


class Hooked(trl.SFTTrainer):
    """TRL's own loss, and more from the outputs that a hook of the model sees meanwhile."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        seen = []
        hook = model.register_forward_hook(lambda model, args, outputs: seen.append(outputs))
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        hook.remove()
        bonus = 0.3 * seen[0].entropy.sum() / seen[0].label_mask.sum() - 0.1 * seen[0].loss
        return (loss - bonus, seen[0]) if return_outputs else loss - bonus


@pytest.mark.parametrize("wrap", [unchanged, adapted], ids=["whole", "lora"])
def test_a_hook_without_gradients(folder, wrap):
    """torch's decorator is around it."""

    @torch.no_grad()
    def hook(model, args, outputs):
        if getattr(outputs, "log_probs", None) is not None:
            outputs.log_probs.mean()

    def hooked(model):
        model = wrap(model)
        (model.base_model if wrap is adapted else model).register_forward_hook(hook)
        return model

    assert_same_run(*pairs("SFT", folder, trl.SFTTrainer, max_steps=2, wrap=hooked), rtol=1e-3)


def test_label_smoothing_beside_a_hook(folder):
    def hooked(model):
        model.register_forward_hook(lambda model, args, outputs: None)
        return model

    settings = {"label_smoothing_factor": 0.1, "wrap": hooked}
    assert_same_run(*pairs("SFT", folder, trl.SFTTrainer, max_steps=2, **settings), rtol=1e-3)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_a_hook_sees_the_values_of_tokens(folder, loss_type):
    assert_same_run(*pairs("SFT", folder, Hooked, loss_type=loss_type, max_steps=2), rtol=1e-3)


def test_a_sum_is_no_field():
    """TRL's own compute_loss gets sums, which refuse every other use."""
    entropy = SumOfTokens(torch.ones(()))
    for use in (lambda: entropy.mean(), lambda: entropy.shape, lambda: torch.exp(entropy)):
        with pytest.raises(
            (TypeError, AttributeError), match="outputs: expected TRL's SFTTrainer.compute_loss, "
        ):
            use()
    for use in (lambda: entropy * 2, lambda: entropy[0], lambda: float(entropy)):
        with pytest.raises(TypeError):
            use()


def test_a_replaced_compute_loss_of_the_class(folder, monkeypatch):
    def own(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, fused_lm_head=True)
        loss = -(outputs.log_probs.sum() + 0.3 * outputs.entropy.sum()) / outputs.label_mask.sum()
        return (loss, outputs) if return_outputs else loss

    monkeypatch.setattr(trl.SFTTrainer, "compute_loss", own)
    assert_same_run(*pairs("SFT", folder, trl.SFTTrainer, max_steps=2), rtol=1e-3)


def test_a_forward_that_is_set_above_the_fused_head(tmp_path):
    trainer = sft_trainer(tmp_path)
    below = trainer.model.forward
    trainer.model.forward = lambda *args, **kwargs: below(*args, **kwargs)
    apply_to(trainer)
    with pytest.raises(ValueError, match="model.forward: expected TRL's fused head, got .*<lambda>; set it"):
        trainer.train()


@pytest.mark.parametrize(("kind", "settings"), [("ORPO", {}), ("CPO", {"loss_type": "simpo"})])
def test_a_completion_that_is_truncated_away(folder, kind, settings):
    """Its mean log-probability is NaN in TRL, and so is every gradient."""
    settings |= {"max_length": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = pairs(kind, folder, stock(f"{kind}Trainer"), **settings)
    for run in runs:
        assert run.gradients[0] and all(x.isnan().all() for x in run.gradients[0].values())
    expected = (
        "max_length: expected tokens in every completion, got none for pair 0, 1 of the batch of step 0"
    )
    (actual,) = [str(x.message) for x in caught if "max_length" in str(x.message)]
    assert actual.startswith(expected)


class Penalized(GKDTrainer):
    """TRL's own loss, and more from another call of the model, whose outputs have all their fields."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, dict(inputs), False, num_items_in_batch)
        out = model(input_ids=inputs["input_ids"], labels=inputs["labels"], output_hidden_states=True)
        loss = loss + out.loss + 1e-2 * sum(h.square().mean() for h in out.hidden_states)
        return (loss, out) if return_outputs else loss


def test_a_call_of_the_model_beside_the_loss(folder):
    assert_same_run(*pairs("GKD", folder, Penalized, max_steps=2), rtol=1e-3)


def test_a_method_that_functools_wraps_calls_a_copy_of(folder):
    class Doubled(GKDTrainer):
        @staticmethod
        @functools.wraps(GKDTrainer.generalized_jsd_loss)
        def generalized_jsd_loss(*args, **kwargs):
            return 2 * GKDTrainer.generalized_jsd_loss(*args, **kwargs)

    class Profiled(ORPOTrainer):
        @profiling_decorator
        def get_batch_logps(self, *args, **kwargs):
            return 2 * super().get_batch_logps(*args, **kwargs)

    with pytest.raises(ValueError, match="^generalized_jsd_loss: expected TRL's own in GKDTrainer"):
        pairs("GKD", folder, Doubled)
    with pytest.raises(ValueError, match="^get_batch_logps: expected TRL's own .*got .*Profiled.get_batch"):
        pairs("ORPO", folder, Profiled)


def test_a_function_of_trls_that_the_user_has_replaced(folder, monkeypatch):
    of_stock = distillation_trainer._chunked_divergence_loss
    own = functools.wraps(of_stock)(lambda *args, **kwargs: of_stock(*args, **kwargs))
    monkeypatch.setattr(distillation_trainer, "_chunked_divergence_loss", own)
    with pytest.raises(ValueError, match=":_chunked_divergence_loss: expected TRL's own in Distillation"):
        pairs("Distillation", folder, trl.DistillationTrainer)


# --- losses, methods and models of the user's own


def calls_the_head_by_name(self, input_ids=None, attention_mask=None, **kwargs):
    hidden = self.model(input_ids, attention_mask).last_hidden_state
    return CausalLMOutputWithPast(logits=self.lm_head(input=hidden))


@pytest.mark.parametrize("forward", [*user_models.TRAINED.values(), calls_the_head_by_name])
def test_a_forward_pass_of_the_models_under_trls_fused_head(forward):
    """TRL's head never calls it; with the flag it computes the hidden states and logits."""
    model = user_models.subclass(forward)
    inputs = INPUTS | {"use_cache": False, "fused_lm_head": True}
    with attach_fused_head(make_per_token_fields)(chunked_loss())(model):
        mine, actual = gradients(model, **inputs)
    add_fused_lm_head(model)
    of_stock, expected = gradients(model, **inputs)
    torch.testing.assert_close(mine.log_probs, of_stock.log_probs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "ORPO"])
def test_a_forward_pass_of_the_models_in_a_trainer(folder, kind):
    wrap = functools.partial(user_models.subclass, user_models.without_return_dict)
    assert_same_run(*pairs(kind, folder, stock(f"{kind}Trainer"), wrap=wrap), rtol=1e-3)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (user_models.writes_into_logits, "logits: expected .*, got an assignment to parts of them; compute"),
        (user_models.returns_the_last_logits, r"model: expected logits of all positions, \(2, 11\), got"),
    ],
)
def test_forward_passes_that_the_flag_cannot_follow(forward, message):
    model = user_models.subclass(forward)
    with attach_fused_head(make_per_token_fields)(chunked_loss())(model):
        with pytest.raises((TypeError, ValueError), match=message):
            model(**INPUTS, fused_lm_head=True)


def test_an_argument_that_the_forward_pass_does_not_take():
    """TRL's head gives it to the backbone."""
    model = user_models.subclass(user_models.without_cache)
    with attach_fused_head(make_per_token_fields)(chunked_loss())(model):
        with pytest.raises(
            ValueError, match="model: expected a forward pass that takes position_ids, got wit"
        ):
            model(**INPUTS, position_ids=torch.arange(IDS.shape[1])[None], fused_lm_head=True)


def test_a_forward_pass_without_the_router_loss():
    def forward(self, *args, **kwargs):
        return CausalLMOutputWithPast(
            logits=transformers.MixtralForCausalLM.forward(self, *args, **kwargs).logits
        )

    model = user_models.subclass(forward, tiny_model("mixtral"))
    with attach_fused_head(make_per_token_fields)(chunked_loss())(model):
        with pytest.raises(ValueError, match="model: expected outputs with the router loss, aux_loss, got"):
            model(**INPUTS, output_router_logits=True, fused_lm_head=True)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_loss_function_of_the_models(folder, kind):
    """TRL's head never calls it."""

    def own(model):
        model.loss_function = lambda logits, labels, **kwargs: logits.float().square().mean()
        return model

    mine = step(kind, folder, wrap=own, **our_pair(kind), **LOSS)
    assert_same_run(step(kind, folder, wrap=own), mine, rtol=1e-3)


def test_sft_compute_loss_as_a_partial(folder):
    def partial(trainer):
        trainer.compute_loss = functools.partial(trl.SFTTrainer.compute_loss, trainer)

    def flagged(trainer):
        partial(trainer)
        apply_to(trainer)()
        assert isinstance(trainer.compute_loss, functools.partial)
        apply_to(trainer)

    runs = [step("SFT", folder, change=change, loss_type="dft") for change in (partial, flagged)]
    assert_same_run(*runs, rtol=1e-3)


def test_a_trainer_of_a_module_without_config(tmp_path):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

    trainer = transformers.Trainer(Plain(), args=transformers.TrainingArguments(**options(tmp_path)))
    with pytest.raises(
        ValueError, match="model: expected a causal language model with an LM head, got Plain"
    ):
        apply_to(trainer)
    assert "chunked_loss" not in vars(trainer)


@pytest.mark.parametrize("return_dict", [None, True])
def test_patch_model_under_peft_with_a_task_type(return_dict):
    """PEFT's model passes on return_dict=None."""
    numbers = []
    for patched in (False, True):
        model = adapted(tiny_model(), task_type="CAUSAL_LM")
        if patched:
            patch_model(model)
        out = model(input_ids=IDS, labels=LABELS, return_dict=return_dict)
        out.loss.backward()
        numbers.append([out.loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(numbers[1], numbers[0], rtol=1e-4, atol=1e-6)
    assert out.logits is None
