"""Teachers and references: the precision that they are computed in, and what is asked of them in vain."""

from types import SimpleNamespace

import pytest
import torch
import trl
from torch.utils._python_dispatch import TorchDispatchMode

import logitless.trl_integration as ours
from logitless.tools.check import relative_error
from logitless.trl_integration import apply_to
from logitless.trl_integration.deferred import check_no_uld_loss
from logitless.trl_integration.pairs import ADAPTERS
from tests.support import assert_close

from .compare import options, side_by_side
from .kinds import needs
from .served import serve
from .tiny import VOCAB, tiny_model, words


class Projections(TorchDispatchMode):
    """The dtypes of the factors of every product with a head, `(…, H) x (H, V)`."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
            and result.shape[-1] == VOCAB
        ):
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return result


@pytest.mark.parametrize("kind", ["GKD", "IWOPD", "GOLD"])
def test_autocast_covers_the_teacher_and_both_heads(tmp_path, calls, kind):
    """bf16=True leaves the weights in fp32, and accelerate's autocast inside the forward that the flag
    bypasses."""
    dataset, settings, trainer = needs(kind, tmp_path)
    dtypes = set()
    trainer["teacher_model"].base_model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, args, out: dtypes.add(out.dtype)
    )
    settings |= {"loss_top_k": 0} if kind == "IWOPD" else {}
    with Projections() as projections:
        runs = side_by_side(tmp_path, kind, dataset, trainer=trainer, **settings | {"bf16": True})
    losses = [[log["loss"] for log in run.logs if "loss" in log] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert calls.number and dtypes == projections.dtypes == {torch.bfloat16}


def made(cls, config, kind: str, folder, *, ref_model=None, **settings):
    dataset, given, trainer = needs(kind, folder)
    trainer |= {"ref_model": ref_model} if ref_model else {}
    args = config(**options(folder, **given | settings))
    return cls(tiny_model(), args=args, train_dataset=dataset, processing_class=words(), **trainer)


IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def test_the_reference_is_scored_in_the_policys_precision(tmp_path):
    """Accelerate wraps the reference in autocast before it gets our head."""
    trainer = made(
        ours.OnlineDPOTrainer, ours.OnlineDPOConfig, "OnlineDPO", tmp_path, bf16=True, use_chunked_loss=True
    )
    mask = torch.ones_like(IDS)
    call = (IDS[:, :3], mask[:, :3], IDS[:, 3:], mask[:, 3:])
    picked_by = lambda m: m(IDS).logits[:, 2:-1].log_softmax(-1).gather(-1, IDS[:, 3:, None])[..., 0]  # noqa: E731
    with torch.no_grad():
        reference = trainer._forward(trainer.ref_model, *call)
        policy = trainer._forward(trainer.accelerator.prepare_model(trainer.model), *call)
        exact = picked_by(tiny_model().double())
        with torch.autocast("cpu", torch.bfloat16):
            naive = picked_by(tiny_model())
    assert torch.equal(reference, policy)
    assert (reference - exact).abs().max() > 1e-5
    assert_close(reference, exact, relative_error(naive, exact), name="reference")


def test_apply_to_keeps_the_references_precision(tmp_path):
    trainer = made(trl.DPOTrainer, trl.DPOConfig, "DPO", tmp_path, ref_model=tiny_model(), bf16=True)
    apply_to(trainer)
    policy = trainer.accelerator.prepare_model(trainer.model)
    with torch.no_grad():
        actual = [m(IDS, labels=IDS, fused_lm_head=True).log_probs for m in (policy, trainer.ref_model)]
    assert torch.equal(*actual)
    # Every other call is as it was, and so is generation.
    assert trainer.ref_model(IDS).logits.dtype == torch.float32
    assert trainer.ref_model.generate(IDS, max_new_tokens=2).shape == (2, 11)


def sdft(folder, **settings):
    settings |= {"teacher_model_kind": "live", "use_chunked_loss": True}
    return made(ours.SDFTTrainer, ours.SDFTConfig, "SDFT", folder, **settings)


def test_a_server_that_leaves_tokens_out(tmp_path, monkeypatch):
    serve(monkeypatch, missing=True)
    served = {"use_teacher_server": True, "use_vllm": True, "vllm_mode": "server", "distillation_topk": 5}
    with pytest.raises(ValueError, match="no logprob for a required completion token"):
        sdft(tmp_path, **served).train()


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"distillation_mode": "topk_logits", "distillation_topk": None},
            "distillation_topk: expected a number",
        ),
        ({"distillation_mode": "logits"}, "distillation_mode: expected one of 'full_logits'"),
    ],
)
def test_options_that_make_no_sense(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        sdft(tmp_path, **changes)


def test_vocabularies_that_differ_are_refused():
    trainer = SimpleNamespace(args=SimpleNamespace(use_uld_loss=True))
    with pytest.raises(ValueError, match="use_uld_loss: expected False with use_chunked_loss=True"):
        check_no_uld_loss(trainer)
    assert check_no_uld_loss in ADAPTERS["GOLD"].checks
