"""The functions of TRL 1.15 and 1.16 and of transformers that the adapters replace or call, and their
parameters.

With a TRL that has moved or changed one, the test of that function fails. test_parity.py tests for each
trainer that the function is still called, and that the numbers are the same.
"""

import dataclasses
import inspect
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from trl.experimental.async_distillation import async_distillation_trainer
from trl.trainer import distillation_trainer
from trl.trainer.utils import FusedCausalLMOutput

from logitless.engine.head_view import HeadView
from logitless.models.logits import Deferral
from logitless.trl_integration import distillation
from logitless.trl_integration.adapter import Adapter, ChunkedLossSession, Replacement
from logitless.trl_integration.head import GatherableLogits
from logitless.trl_integration.pairs import ADAPTERS

from .compare import chunked_loss

SCRIPT = "script_args training_args model_args dataset_args"
LOSS = "self model inputs return_outputs num_items_in_batch"
ASYNC = "trl.experimental.async_distillation.async_distillation_trainer"
LOGPS = "logits labels average_log_prob is_encoder_decoder"
BOTH = "student_logits teacher_logits"
JSD = f"{BOTH} labels beta temperature reduction"
SELECTIVE = "logits index temperature row_mask"
SELF_DISTILLATION = "self model inputs distillation_logits"
SELF_DISTILLING = ("sdft.sdft_trainer", "sdft.loss_utils", "sdpo.sdpo_trainer", "sdpo.loss_utils")

# By path: the names of the parameters
SIGNATURES = {
    "trl.trainer.utils:add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs",
    "trl.trainer.utils:maybe_gather_lm_head_ctx": "params",
    "transformers.models.mixtral.modeling_mixtral:load_balancing_loss_func": (
        "gate_logits num_experts top_k attention_mask"
    ),
    "trl.trainer.sft_trainer:SFTTrainer.compute_loss": LOSS,
    "trl.trainer.distillation_trainer:DistillationTrainer.compute_loss": LOSS,
    f"{ASYNC}:AsyncDistillationTrainer.compute_loss": LOSS,
    "trl.trainer.distillation_trainer:_chunked_divergence_loss": (
        "student_hidden_states teacher_hidden_states student_lm_head_weight teacher_lm_head_weight "
        "completion_mask beta num_items_in_batch "
        "student_lm_head_bias teacher_lm_head_bias student_logit_scale teacher_logit_scale "
        "student_final_logit_softcapping "
        "teacher_final_logit_softcapping temperature"
    ),
    "trl.experimental.gkd:GKDTrainer.compute_loss": LOSS,
    "trl.experimental.orpo:ORPOTrainer.concatenated_forward": "self model batch",
    "trl.experimental.orpo:ORPOTrainer.concatenated_inputs": "batch is_encoder_decoder padding_value device",
    "trl.experimental.cpo:CPOTrainer.concatenated_forward": "self model batch",
    "trl.experimental.cpo:CPOTrainer.concatenated_inputs": "batch is_encoder_decoder padding_value device",
    "trl.experimental.tpo:TPOTrainer._compute_loss": "self model inputs return_outputs",
    "trl.experimental.tpo.tpo_trainer:selective_log_softmax_and_entropy": (
        "logits index entropy_requires_grad temperature row_mask"
    ),
    "trl.experimental.a2po:A2POTrainer._get_sequence_logps": (
        "self model input_ids attention_mask logits_to_keep"
    ),
    "trl.experimental.online_dpo:OnlineDPOTrainer._forward": (
        "self model prompt_ids prompt_mask completion_ids completion_mask vision_inputs"
    ),
    f"{ASYNC}:_chunked_jsd_loss": (
        "hidden_valid lm_head_weight lm_head_bias logit_scale final_logit_softcapping target_ids "
        "teacher_target_logps valid_candidate_mask "
        "beta temperature add_tail_bucket teacher_id_idx num_teachers chunk_size"
    ),
    f"{ASYNC}:_add_tail_bucket": "log_probs valid_mask",
    "trl.experimental.orpo:ORPOTrainer.get_batch_logps": LOGPS,
    "trl.experimental.cpo:CPOTrainer.get_batch_logps": LOGPS,
    "trl.experimental.gkd:GKDTrainer.generalized_jsd_loss": f"{JSD} num_items_in_batch",
    "trl.experimental.gold:GOLDTrainer.generalized_jsd_loss": f"{JSD} logits_are_probs num_items_in_batch",
    "trl.experimental.iw_opd:IWOPDTrainer.generalized_jsd_loss": f"{JSD} top_k add_tail num_items_in_batch",
    "trl.experimental.a2po.a2po_trainer:selective_log_softmax": SELECTIVE,
    "trl.experimental.sdft:SDFTTrainer._compute_self_distillation_loss": SELF_DISTILLATION,
    "trl.experimental.sdpo:SDPOTrainer._compute_self_distillation_loss": SELF_DISTILLATION,
    **{f"trl.experimental.{name}:selective_log_softmax": SELECTIVE for name in SELF_DISTILLING},
    **{
        f"trl.experimental.{name}:compute_{kind}_self_distillation_loss": f"{BOTH} distillation_{rest}"
        for name in SELF_DISTILLING
        if name.endswith("trainer")
        for kind, rest in (
            ("full_logit", "alpha"),
            ("topk", "topk distillation_alpha distillation_add_tail"),
        )
    },
} | {f"trl.scripts.{name}:main": SCRIPT for name in ("sft", "dpo", "kto", "grpo", "rloo", "distillation")}


def imported(path: str):
    module, qualified_name = path.split(":")
    try:
        value = import_module(module)
        for name in qualified_name.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        pytest.fail(
            f"{path}: TRL {trl.__version__} has moved it ({error}); logitless.trl_integration builds on it."
        )
    return value


@pytest.mark.parametrize("path", SIGNATURES)
def test_parameters(path):
    parameters = list(inspect.signature(imported(path)).parameters)
    assert parameters == SIGNATURES[path].split(), (
        f"{path}: its parameters have changed in TRL {trl.__version__}"
    )


def test_every_replaced_function_is_named():
    replaced = [
        name if ":" in name else f"{adapter.path}Trainer.{name}"
        for adapter in ADAPTERS.values()
        for name in adapter.replacements
    ]
    assert len(replaced) > 20 and set(replaced) <= SIGNATURES.keys()


def test_fields_of_the_fused_output():
    fields = {field.name for field in dataclasses.fields(FusedCausalLMOutput)}
    expected = "loss log_probs entropy log_sum_sq_probs mean_logits is_top1 label_mask aux_loss"
    assert fields == set(expected.split()), (
        f"trl.trainer.utils:FusedCausalLMOutput: its fields have changed in TRL {trl.__version__}"
    )


def test_place_model_on_device_is_a_property():
    member = inspect.getattr_static(transformers.TrainingArguments, "place_model_on_device", None)
    assert isinstance(member, property), (
        "transformers:TrainingArguments.place_model_on_device: no longer a property to override"
    )


# -- what the replaced functions return, in TRL's order


def operands(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def same(ours, of_stock, path):
    assert len(ours) == len(of_stock), f"{path}: returns {len(of_stock)} values in TRL {trl.__version__}"
    for i, (own, stock) in enumerate(zip(ours, of_stock)):
        torch.testing.assert_close(
            own.float(), stock.float(), rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"{path}: value {i}: {m}"
        )


def in_place_of(stock, function):
    """`stock` as a trainer calls it with the flag on."""
    adapter = Adapter("trl:None", replacements={"name": Replacement(function)})
    session = ChunkedLossSession(SimpleNamespace(args=None, last_plan=None), adapter, None)
    signature = inspect.signature(stock)
    return lambda *args, **kwargs: session.call_replacement("name", stock, signature, args, kwargs)


def test_chunked_divergence_loss():
    hidden, taught, weight, teacher_weight = operands((2, 7, 8), (2, 7, 6), (31, 8), (31, 6))
    mask = torch.arange(14).view(2, 7) % 3 > 0
    call = (hidden, taught, weight, teacher_weight, mask, 0.3)
    more = {"student_logit_scale": 0.5, "teacher_final_logit_softcapping": 3.0, "temperature": 1.5}
    path = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
    for num_items in (None, 11):
        stock = distillation_trainer._chunked_divergence_loss
        ours = in_place_of(stock, distillation.compute_divergence)
        more["num_items_in_batch"] = num_items
        same(ours(*call, **more), stock(*call, **more), path)


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "renormalized"])
@pytest.mark.parametrize("teachers", [1, 3])
@pytest.mark.parametrize(
    "beta, dtypes", [(0.0, "bfloat16 bfloat16"), (0.4, "float32 float32"), (1.0, "bfloat16 float32")]
)
def test_chunked_jsd_loss(tail, teachers, beta, dtypes):
    """TRL projects in fp32, whatever the operands are in."""
    hidden, weight, bias, scores = operands((9, 8), (31, 8), (31,), (9, 31))
    states, head = (getattr(torch, name) for name in dtypes.split())
    hidden, weight, bias = hidden.to(states), weight.to(head), bias.to(head)
    logps, ids = scores.log_softmax(-1).topk(4)
    kept = torch.rand(9, 4, generator=torch.Generator().manual_seed(1)) > 0.3
    kept[:, 0] = True
    index = torch.arange(9) % 2 if teachers > 1 else None
    call = (hidden, weight, bias, 0.5, 3.0, ids.masked_fill(~kept, -1), logps, kept)
    call += (beta, 1.5, tail, index, teachers, 4)
    stock = async_distillation_trainer._chunked_jsd_loss
    ours = in_place_of(stock, distillation.compute_topk_jsd)
    same(ours(*call), stock(*call), f"{async_distillation_trainer.__name__}:_chunked_jsd_loss")


def test_gatherable_logits_do_what_trl_does_and_no_more():
    hidden, weight = torch.randn(2, 5, 8), torch.randn(30, 8, requires_grad=True)
    session = chunked_loss(last_plan=None)
    head = HeadView(weight, of_model=True)
    gatherable = GatherableLogits(hidden, head, Deferral(), 30, logit_scale=2.0, softcap=3.0, session=session)
    logits = 3 * torch.tanh(2 * (hidden @ weight.T) / 3)
    one, several = torch.randint(0, 30, (2, 3, 1)), torch.randint(0, 30, (2, 3, 4))
    for ids in (one, several):
        ours, stock = (
            torch.log_softmax(x[:, 1:-1, :] / 0.7, dim=-1).gather(dim=-1, index=ids)
            for x in (gatherable, logits)
        )
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
        upstream = torch.randn(ids.shape)
        grads = [torch.autograd.grad(x, weight, upstream, retain_graph=True)[0] for x in (ours, stock)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
        again = torch.gather(torch.nn.functional.log_softmax(gatherable[:, 1:-1, :] / 0.7, dim=-1), -1, ids)
        assert torch.equal(again, ours)
    assert torch.equal(gatherable.argmax(dim=-1), logits.argmax(-1))
    assert session.trainer.last_plan is not None
    normalized = torch.log_softmax(gatherable, dim=-1)
    refused = {
        "index": lambda: gatherable[one],
        "not normalized": lambda: gatherable.gather(-1, one),
        "divided late": lambda: normalized / 2,
        "another function": lambda: torch.softmax(gatherable, dim=-1),
        "another dimension": lambda: torch.log_softmax(gatherable, dim=1),
        "best of another dimension": lambda: gatherable.argmax(dim=1),
        "gathered along another dimension": lambda: normalized.gather(1, one),
        "attribute": lambda: gatherable.sum(),
        "a mean with a gradient": lambda: gatherable.mean(),
    }
    for name, use in refused.items():
        with pytest.raises((TypeError, AttributeError), match="logits: expected .*set use_chunked_loss=Fal"):
            use()
            pytest.fail(name)
