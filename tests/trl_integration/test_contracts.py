"""The seams at which our trainers reach into TRL 1.15 and 1.16 and transformers: what must be there, with
which parameters, and who uses it.

A new TRL that moves one fails here, by the seam's name; that the numbers are still the same is what the tests
of each trainer show.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, SimpleNamespace

import pytest
import torch
import transformers
import trl
from packaging.version import Version
from trl.experimental.async_distillation import async_distillation_trainer
from trl.trainer import distillation_trainer
from trl.trainer.utils import FusedCausalLMOutput

from logitless.trl_integration import distillation
from logitless.trl_integration.adapter import Adapter, ChunkedLoss, Seam

OLD = Version(trl.__version__) < Version("1.16")
SCRIPT = "script_args training_args model_args dataset_args"
LOSS = "self model inputs return_outputs num_items_in_batch"

# Seam -> its parameters; None where they are not ours to know.
SIGNATURES = {
    "trl.trainer.utils:add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs",
    "trl.trainer.utils:maybe_gather_lm_head_ctx": "params",
    "transformers.models.mixtral.modeling_mixtral:load_balancing_loss_func": (
        "gate_logits num_experts top_k attention_mask"
    ),
    "trl:SFTTrainer.compute_loss": LOSS,
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
    "trl.experimental.async_distillation.async_distillation_trainer:_chunked_jsd_loss": (
        "hidden_valid lm_head_weight lm_head_bias logit_scale final_logit_softcapping target_ids "
        "teacher_target_logps valid_candidate_mask "
        "beta temperature add_tail_bucket teacher_id_idx num_teachers chunk_size"
    ),
    "trl.experimental.async_distillation.async_distillation_trainer:_add_tail_bucket": "log_probs valid_mask",
} | {f"trl.scripts.{name}:main": SCRIPT for name in ("sft", "dpo", "kto", "grpo", "rloo", "distillation")}

# Function of TRL -> names it must look up when it runs, as that is where ours take their place.
USES = {
    **{f"trl:{kind}Trainer.__init__": "add_fused_lm_head" for kind in ("SFT", "DPO", "KTO", "GRPO", "RLOO")},
    "trl.experimental.async_grpo:AsyncGRPOTrainer.__init__": "add_fused_lm_head",
    "trl:SFTTrainer.compute_loss": (
        "fused_lm_head label_smoother loss_type log_probs label_mask entropy is_top1"
    ),
    "trl:DPOTrainer._compute_loss": "fused_lm_head log_probs entropy mean_logits log_sum_sq_probs is_top1",
    "trl:KTOTrainer._compute_loss": "fused_lm_head log_probs",
    "trl:GRPOTrainer._get_per_token_logps_and_entropies": "fused_lm_head log_probs entropy",
    "trl:RLOOTrainer._get_per_token_logps_and_entropies": "fused_lm_head log_probs entropy",
    "trl:DistillationTrainer._compute_loss": "_chunked_divergence_loss",
    "trl.experimental.orpo:ORPOTrainer.get_batch_loss_metrics": "concatenated_forward",
    "trl.experimental.cpo:CPOTrainer.get_batch_loss_metrics": "concatenated_forward",
    "trl.experimental.gmpo:GMPOTrainer._compute_loss": "_get_per_token_logps_and_entropies",
    # TRL 1.15 has no context parallelism there.
    "trl.experimental.async_grpo:AsyncGRPOTrainer.compute_loss": (
        "fused_lm_head log_probs entropy" if OLD else "fused_lm_head shift_labels log_probs entropy"
    ),
    "trl.experimental.tpo:TPOTrainer.compute_loss": "_compute_loss",
    "trl.experimental.tpo:TPOTrainer._compute_loss": (
        "selective_log_softmax_and_entropy cross_entropy chunk mean argmax"
    ),
    "trl.experimental.a2po:A2POTrainer.compute_loss": "_get_sequence_logps",
    "trl.experimental.a2po:A2POTrainer._prepare_inputs": "_get_sequence_logps ref_model",
    "trl.experimental.online_dpo:OnlineDPOTrainer.training_step": "_forward ref_model",
    "trl.experimental.async_distillation:AsyncDistillationTrainer._compute_loss": "_chunked_jsd_loss",
    # The one read of the arguments by which a config notices a trainer that would ignore its flag.
    "transformers:Trainer.__init__": "place_model_on_device",
    "trl.scripts.grpo:main": "reward_funcs model_init_kwargs GRPOTrainer",
    "trl.scripts.dpo:main": "model_init_kwargs DPOTrainer",
}


def found(seam: str):
    module, path = seam.split(":")
    try:
        value = import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        pytest.fail(
            f"{seam}: TRL {trl.__version__} has moved it ({error}); logitless.trl_integration builds on it."
        )
    return value


def names(code: CodeType) -> Iterator[str]:
    """What a function looks up, or passes by keyword, in itself and in what is defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)
        elif isinstance(constant, (str, tuple)):
            yield from (constant,) if isinstance(constant, str) else constant


@pytest.mark.parametrize("seam", SIGNATURES)
def test_parameters(seam):
    parameters = list(inspect.signature(found(seam)).parameters)
    assert parameters == SIGNATURES[seam].split(), (
        f"{seam}: its parameters have changed in TRL {trl.__version__}"
    )


@pytest.mark.parametrize("seam", USES)
def test_uses(seam):
    missing = set(USES[seam].split()) - set(names(inspect.unwrap(found(seam)).__code__))
    assert not missing, f"{seam}: in TRL {trl.__version__} it no longer uses {missing}"


def test_fields_of_the_fused_output():
    fields = {field.name for field in dataclasses.fields(FusedCausalLMOutput)}
    expected = {
        "loss",
        "log_probs",
        "entropy",
        "log_sum_sq_probs",
        "mean_logits",
        "is_top1",
        "label_mask",
        "aux_loss",
    }
    assert fields == expected, (
        f"trl.trainer.utils:FusedCausalLMOutput: its fields have changed in TRL {trl.__version__}"
    )


def test_place_model_on_device_is_a_property():
    seam = inspect.getattr_static(transformers.TrainingArguments, "place_model_on_device", None)
    assert isinstance(seam, property), (
        "transformers:TrainingArguments.place_model_on_device: no longer a property to override"
    )


# -- what the exchanged functions return, in TRL's order


def operands(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def same(ours, theirs, seam):
    assert len(ours) == len(theirs), f"{seam}: returns {len(theirs)} values in TRL {trl.__version__}"
    for i, (own, stock) in enumerate(zip(ours, theirs)):
        torch.testing.assert_close(
            own.float(), stock.float(), rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"{seam}: value {i}: {m}"
        )


def in_place_of(stock, use):
    """`stock` as a trainer calls it with the flag on."""
    trainer = SimpleNamespace(args=SimpleNamespace(), last_plan=None)
    return ChunkedLoss(trainer, Adapter("trl:None"), None)._seam("name", Seam(use), stock)


def test_chunked_divergence_loss():
    hidden, taught, weight, teacher_weight = operands((2, 7, 8), (2, 7, 6), (31, 8), (31, 6))
    mask = torch.arange(14).view(2, 7) % 3 > 0
    call = (hidden, taught, weight, teacher_weight, mask, 0.3)
    more = {"student_logit_scale": 0.5, "teacher_final_logit_softcapping": 3.0, "temperature": 1.5}
    seam = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
    for num_items in (None, 11):
        stock = distillation_trainer._chunked_divergence_loss
        ours = in_place_of(stock, distillation.chunked_divergence)
        more["num_items_in_batch"] = num_items
        same(ours(*call, **more), stock(*call, **more), seam)


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
    call = (
        hidden,
        weight,
        bias,
        0.5,
        3.0,
        ids.masked_fill(~kept, -1),
        logps,
        kept,
        beta,
        1.5,
        tail,
        index,
        teachers,
        4,
    )
    stock = async_distillation_trainer._chunked_jsd_loss
    ours = in_place_of(stock, distillation.chunked_jsd)
    same(ours(*call), stock(*call), f"{async_distillation_trainer.__name__}:_chunked_jsd_loss")
