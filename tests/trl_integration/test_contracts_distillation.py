"""Where the distillation trainers take hold of TRL: each seam by name, so that a TRL that moves one says so
here first."""

import inspect
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from logitless.engine.head_view import HeadView
from logitless.models.logits import Deferral
from logitless.trl_integration.adapter import Adapter, ChunkedLoss
from logitless.trl_integration.head import PickedLogits

SDFT, SDPO = "trl.experimental.sdft.sdft_trainer", "trl.experimental.sdpo.sdpo_trainer"
IW_OPD, GOLD = "trl.experimental.iw_opd.iw_opd_trainer", "trl.experimental.gold.gold_trainer"
SERVER = "trl.experimental.server_distillation.server_distillation_trainer"

LOSS_UTILS = "trl.experimental.sdft.loss_utils", "trl.experimental.sdpo.loss_utils"

SPARSE = (
    "student_log_probs teacher_top1_token_ids teacher_top1_logprobs "
    "reverse_token_ids reverse_teacher_logprobs labels num_items_in_batch"
)
JSD = "student_logits teacher_logits labels beta temperature num_items_in_batch"
FOUND = "completion_ids loss_mask student_logits teacher_logits"

# Module, the function or method that we replace or call, and the arguments that we count on.
SIGNATURES = [
    *(
        (module, name, arguments)
        for module in (SDFT, SDPO)
        for name, arguments in {
            "selective_log_softmax": "logits index",
            "compute_full_logit_self_distillation_loss": "student_logits teacher_logits distillation_alpha",
            "compute_topk_self_distillation_loss": (
                "student_logits teacher_logits distillation_topk distillation_alpha distillation_add_tail"
            ),
        }.items()
    ),
    *((module, "selective_log_softmax", "logits index") for module in LOSS_UTILS),
    *((module, "DistillationLogits", FOUND) for module in (SDFT, SDPO)),
    *(
        (module, f"{trainer}.{name}", arguments)
        for module, trainer in ((SDFT, "SDFTTrainer"), (SDPO, "SDPOTrainer"))
        for name, arguments in {
            "_setup_teacher_model": "self",
            "_forward_logits": "self model input_ids attention_mask logits_to_keep",
            "_compute_rollout_logps": "self prompt_ids prompt_mask completion_ids completion_mask",
            "_compute_teacher_student_logits": "self model teacher_model inputs",
            "_compute_self_distillation_loss": "self model inputs distillation_logits",
            "_compute_server_distillation_loss": "self model inputs",
            "_get_teacher_token_logprobs_from_server": "self inputs logits_to_keep",
            "_log_self_distillation_metric": "self mode value",
            "compute_loss": "self model inputs",
        }.items()
    ),
    *(
        (module, f"{trainer}.{name}", arguments)
        for module, trainer in ((IW_OPD, "IWOPDTrainer"), (SERVER, "ServerDistillationTrainer"))
        for name, arguments in {
            "_compute_sparse_top_1_divergence_loss": "self " + SPARSE,
            "_compute_server_forward_kl_loss": "self teacher_result student_log_probs labels",
            "compute_loss": "self model inputs",
        }.items()
    ),
    (
        IW_OPD,
        "IWOPDTrainer._compute_local_sparse_top_1_divergence_loss",
        "self student_logits teacher_logits completion_tokens labels num_items_in_batch",
    ),
    (IW_OPD, "IWOPDTrainer.generalized_jsd_loss", JSD + " top_k add_tail"),
    (GOLD, "GOLDTrainer.generalized_jsd_loss", JSD),
    (GOLD, "GOLDTrainer.compute_loss", "self model inputs"),
]

# Module, a function, and what its code must still say for ours to be its equal.
SAYINGS = [
    *(
        (module, name.replace("Self", trainer), saying)
        for module, trainer in ((SDFT, "SDFTTrainer"), (SDPO, "SDPOTrainer"))
        for name, saying in {
            "Self._forward_logits": "model(**model_inputs).logits",
            "Self._compute_self_distillation_loss": "loss = loss.mean()",
            "Self._compute_server_distillation_loss": "self_distillation/server_logprob_abs_diff",
            "compute_topk_self_distillation_loss": "torch.topk(student_logits, k=distillation_topk",
        }.items()
    ),
    *(
        (module, f"{trainer}.compute_loss", "F.log_softmax(student_logits / self.temperature, dim=-1)")
        for module, trainer in ((IW_OPD, "IWOPDTrainer"), (SERVER, "ServerDistillationTrainer"))
    ),
    (SDPO, "SDPOTrainer._compute_policy_loss", "selective_log_softmax(student_logits, completion_ids)"),
    (IW_OPD, "IWOPDTrainer.compute_loss", "self.generalized_jsd_loss("),
    (
        IW_OPD,
        "IWOPDTrainer._compute_iw_opd_loss",
        ".gather(dim=-1, index=completion_tokens.unsqueeze(-1)).squeeze(-1)",
    ),
    (GOLD, "GOLDTrainer.compute_loss", "self.generalized_jsd_loss("),
]


def seam(module: str, name: str):
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
        assert found is not None, (
            f"seam {module}.{name}: expected in TRL, got nothing of that name; see what replaced it."
        )
    return found


@pytest.mark.parametrize("module, name, arguments", SIGNATURES, ids=lambda x: x.rsplit(".", 1)[-1][:40])
def test_signature(module, name, arguments):
    found = list(inspect.signature(seam(module, name)).parameters)
    missing = [argument for argument in arguments.split() if argument not in found]
    assert not missing, (
        f"seam {module}.{name}: expected the arguments {missing}, got {found}; read what TRL does there now."
    )


@pytest.mark.parametrize("module, name, saying", SAYINGS, ids=lambda x: x.rsplit(".", 1)[-1][:40])
def test_code(module, name, saying):
    source = inspect.getsource(seam(module, name))
    assert saying in source, (
        f"seam {module}.{name}: expected {saying!r} in its code; read what TRL does there now."
    )


def test_a_server_answers_with_these_tensors():
    """The layout of what `_get_teacher_token_logprobs_from_server` returns."""
    for module, trainer in (
        (SDFT, "SDFTTrainer"),
        (SDPO, "SDPOTrainer"),
        (IW_OPD, "IWOPDTrainer"),
        (SERVER, "ServerDistillationTrainer"),
    ):
        name = f"{trainer}._get_teacher_token_logprobs_from_server"
        source = inspect.getsource(seam(module, name))
        for key in ("actual_logprobs", "topk_logprobs", "topk_token_ids"):
            assert f'"{key}":' in source, (
                f"seam {module}.{name}: expected a field {key!r} in its answer; read what TRL does there now."
            )


def test_picked_logits_do_what_trl_does_and_no_more():
    hidden, weight = torch.randn(2, 5, 8), torch.randn(30, 8, requires_grad=True)
    trainer = SimpleNamespace(args=None, last_plan=None)
    chunked = ChunkedLoss(trainer, Adapter("trl:None"), None)
    head = HeadView(weight, of_model=True)
    picked = PickedLogits(hidden, head, Deferral(), 30, gain=2.0, cap=3.0, chunked=chunked)
    logits = 3 * torch.tanh(2 * (hidden @ weight.T) / 3)
    one, several = torch.randint(0, 30, (2, 3, 1)), torch.randint(0, 30, (2, 3, 4))
    for ids in (one, several):
        ours, theirs = (
            torch.log_softmax(x[:, 1:-1, :] / 0.7, dim=-1).gather(dim=-1, index=ids) for x in (picked, logits)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        upstream = torch.randn(ids.shape)
        grads = [torch.autograd.grad(x, weight, upstream, retain_graph=True)[0] for x in (ours, theirs)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
        again = torch.gather(torch.nn.functional.log_softmax(picked[:, 1:-1, :] / 0.7, dim=-1), -1, ids)
        assert torch.equal(again, ours)
    assert torch.equal(picked.argmax(dim=-1), logits.argmax(-1)) and trainer.last_plan is not None
    normalized = torch.log_softmax(picked, dim=-1)
    refused = {
        "index": lambda: picked[one],
        "not normalized": lambda: picked.gather(-1, one),
        "divided late": lambda: normalized / 2,
        "another function": lambda: torch.softmax(picked, dim=-1),
        "another dimension": lambda: torch.log_softmax(picked, dim=1),
        "best of another dimension": lambda: picked.argmax(dim=1),
        "gathered along another dimension": lambda: normalized.gather(1, one),
        "attribute": lambda: picked.sum(),
        "a mean with a gradient": lambda: picked.mean(),
    }
    for name, use in refused.items():
        with pytest.raises((TypeError, AttributeError), match="logits: expected .*set use_chunked_loss=Fal"):
            use()
            pytest.fail(name)
