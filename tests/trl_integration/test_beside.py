"""What runs beside the flag: compilation, other kernels, scaled gradients, offloading, a resumed run, a
reference that follows the policy, and evaluation that asks for predictions."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from logitless.trl_integration import apply_to
from tests.cases import usually
from tests.support import EngineCalls

from .compare import our_pair, unchanged
from .kinds import ALL, step
from .served import serve
from .tiny import assert_same_gradients, tiny_model

COMPILED = {"SFT": ["solve"], "GRPO": ["statistics", "gradients"], "ORPO": []}


@pytest.mark.parametrize("kind", usually((), ["SFT", "GRPO", "ORPO"]))
def test_compiled_model(folder, kind):
    """The passes are operators of the graph, one each; picked logits are read outside of it."""
    given = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    stock, seen = step(kind, folder), EngineCalls()
    with torch.compiler.set_stance("default"), seen:
        mine = step(kind, folder, change=apply_to, **given)
    assert seen.operators == COMPILED[kind]
    assert_same_gradients(stock, mine, rtol=1e-4)
    described = mine.trainer.chunked_loss.describe()
    assert "compiled model" in described if seen.operators else "4 products; head" in described


def test_sft_compiled_with_inductor(folder):
    """Of a model without layers, which would take a minute to compile."""

    def without_layers(model):
        return tiny_model(num_hidden_layers=0)

    stock, seen = step("SFT", folder, wrap=without_layers), EngineCalls()
    with torch.compiler.set_stance("default"), seen:
        mine = step("SFT", folder, wrap=without_layers, change=apply_to, torch_compile=True)
    assert seen.operators == ["solve"]
    assert_same_gradients(stock, mine, rtol=1e-4)


def liger(model, config) -> None:
    """As `apply_liger_kernel` does: other layers, and unless it is told otherwise a forward pass with a loss
    of its own, which reads the head's weight."""
    model.model.norm.register_forward_hook(lambda module, args, out: 2 * out)
    if (config or {}).get("fused_linear_cross_entropy", True):
        model.forward = lambda *args, **kwargs: pytest.fail("Liger's loss")


@pytest.mark.parametrize("kind", ["SFT", "ORPO"])
def test_liger_s_layers_without_its_loss(folder, monkeypatch, kind):
    """`use_liger_kernel=True`, without its package: what it does is above."""
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", liger)
    without = {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}
    stock, flag = step(kind, folder, **without), {"use_chunked_loss": True, "use_liger_kernel": True}
    assert_same_gradients(stock, step(kind, folder, **our_pair(kind), **flag), rtol=1e-4)
    assert_same_gradients(stock, step(kind, folder, change=apply_to, **without), rtol=1e-4)
    if kind == "SFT":
        # TRL leaves Liger's loss out by itself.
        assert_same_gradients(stock, step(kind, folder, change=apply_to, use_liger_kernel=True), rtol=1e-4)
        return
    with pytest.raises(ValueError, match="liger_kernel_config: expected fused_linear_cross_entropy=False"):
        step(kind, folder, change=apply_to, use_liger_kernel=True)


def scaled(trainer) -> None:
    """What accelerate has for fp16 on a GPU."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("kind", ["SFT", "ORPO"])
def test_grad_scaler(folder, kind):
    def both(trainer):
        scaled(trainer)
        apply_to(trainer)

    runs = [step(kind, folder, change=change) for change in (unchanged, scaled, both)]
    assert runs[2].trainer.accelerator.scaler.get_scale() == 1024.0
    assert_same_gradients(runs[0], runs[1], rtol=1e-4)
    assert_same_gradients(runs[0], runs[2], rtol=1e-4)


def test_activation_offloading_leaves_the_losss_own_tensors(folder):
    """TRL's context copies what is saved to the CPU: the head's gradient must not be among it."""
    packed: list[torch.Size] = []

    def offloading(trainer):
        apply_to(trainer)
        trainer.args.activation_offloading = True

        def pack(x):
            packed.append(x.shape)
            return x

        trainer.maybe_activation_offload_context = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    mine = step("SFT", folder, change=offloading)
    head = mine.trainer.model.lm_head.weight.shape
    assert packed and mine.trainer.last_plan.strategy == "fused"
    assert packed.count(head) == 0, packed


def test_a_resumed_run(folder, tmp_path):
    settings = {
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "output_dir": str(tmp_path / "out"),
    }
    whole = step("SFT", folder, change=apply_to, **settings)

    def resume(trainer):
        apply_to(trainer)
        start = trainer.train
        trainer.train = lambda: start(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))

    again = step("SFT", folder, change=resume, **settings)
    assert len(again.gradients) == 1 and len(whole.gradients) == 2
    for name, grad in whole.gradients[1].items():
        torch.testing.assert_close(again.gradients[0][name], grad)


def test_dpo_reference_that_follows_the_policy(folder):
    settings = {
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 1.0,
        "max_steps": 2,
        "beta": 1.0,
        "optim": "sgd",
        "learning_rate": 1.0,
    }
    runs = [step("DPO", folder, change=change, **settings) for change in (unchanged, apply_to)]
    assert_same_gradients(*runs, rtol=1e-3)
    trainer = runs[1].trainer
    reference = trainer.ref_model.state_dict()
    assert all(torch.equal(reference[name], x) for name, x in trainer.model.state_dict().items())
    assert runs[1].logs[1]["rewards/chosen"] == pytest.approx(runs[0].logs[1]["rewards/chosen"], abs=1e-5)


# A2PO and OnlineDPO have no evaluation of their own.
PREDICTING = [kind for kind in ALL if kind not in ("OnlineDPO", "A2PO")]


@pytest.mark.parametrize("kind", usually(("SFT", "DPO", "KTO", "GRPO", "GKD", "IWOPD"), PREDICTING))
def test_evaluation_and_predictions(folder, monkeypatch, kind):
    """The evaluation loss without logits, and what is predicted, where stock predicts: its own logits."""
    serve(monkeypatch)
    actual = []

    def evaluate(trainer):
        trainer.compute_metrics, data = None, trainer.train_dataset.select(range(4))
        torch.manual_seed(0)
        loss = trainer.evaluate(data)["eval_loss"]
        session = vars(trainer).get("chunked_loss")
        assert session is None or "evaluate" in session.verified_steps
        torch.manual_seed(0)
        trainer.compute_metrics = lambda prediction: {"size": float(prediction.predictions[0].size)}
        predicted = trainer.predict(data)
        actual.append((loss, predicted))
        trainer.train = lambda: None

    def applied(trainer):
        apply_to(trainer)
        evaluate(trainer)

    for change in (evaluate, applied):
        step(kind, folder, change=change, per_device_eval_batch_size=4)
    (stock, stock_predicts), (mine, our_predicts) = actual
    assert mine == pytest.approx(stock, rel=1e-3)
    assert our_predicts.metrics.keys() == stock_predicts.metrics.keys()
    assert our_predicts.metrics["test_loss"] == pytest.approx(stock_predicts.metrics["test_loss"], rel=1e-3)
    expected = stock_predicts.predictions
    if expected is None:
        assert our_predicts.predictions is None
        return
    for x, y in zip(tree_leaves(expected), tree_leaves(our_predicts.predictions), strict=True):
        assert x.shape == y.shape and abs(x - y).max() < 1e-3
