"""What we rely on in transformers: where the backbone and the head are, what the head does, and how a forward may be replaced."""

import inspect
import types
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from logitless.trl_integration.head import attach_chunked_head, head_options, head_parameters

from .tiny import FAMILIES, VOCAB, tiny_model

IDS = torch.arange(3, 33).view(2, 15)
LABELS = torch.where(IDS % 4 == 0, -100, IDS)


def full_logits_score(hidden, weight, bias, labels, shift):
    """A score as plain as can be: what is tested here is what surrounds it."""
    if shift:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    mask = labels != -100
    logps = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)
    logps = logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask
    return {"log_probs": logps, "label_mask": mask}


# --- the head ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_backbone_head_and_options_give_the_logits(family):
    model = tiny_model(family).eval()
    options = head_options(model.config)
    weight, bias = head_parameters(model)
    logits = torch.nn.functional.linear(model.base_model(IDS).last_hidden_state, weight, bias) * options["logit_scale"]
    if options["softcap"]:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    torch.testing.assert_close(logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1.0),
        ({"logit_scale": None, "output_multiplier": 3.0}, 3.0),
        ({"logit_scale": 0.0, "output_multiplier": 3.0}, 0.0),
        ({"lm_head_multiplier": 0.5}, 0.5),
        ({"logits_scaling": 8.0, "model_type": "granite"}, 0.125),
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, 8.0),
    ],
    ids=["none", "muse", "zero", "falcon_h1", "granite", "hyperclovax"],
)
def test_names_of_the_logit_scale(fields, expected):
    text = SimpleNamespace(**fields)
    assert head_options(SimpleNamespace(get_text_config=lambda: text)) == {"softcap": None, "logit_scale": expected}


def test_adapter_on_the_head_is_refused():
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="model: expected an LM head without an adapter, got Linear"):
        head_parameters(model.get_base_model())


# --- the forward ---------------------------------------------------------------------------------------------------------


def test_every_other_call_runs_as_before():
    plain, patched = tiny_model().eval(), tiny_model().eval()
    attach_chunked_head(patched, full_logits_score)
    assert isinstance(patched.forward, types.MethodType) and patched.forward.__self__ is patched
    assert inspect.signature(patched.forward) == inspect.signature(plain.forward)

    a, b = plain(IDS, labels=LABELS), patched(IDS, labels=LABELS)
    assert torch.equal(a.logits, b.logits) and torch.equal(a.loss, b.loss)
    generated = [model.generate(IDS, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(IDS)) for model in (plain, patched)]
    assert torch.equal(*generated)


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("mixtral", {"output_router_logits": True})])
@pytest.mark.parametrize("num_items", [None, 50])
def test_loss_is_the_models_own(family, options, num_items):
    """TRL reads this field under sequence parallelism, the router loss included."""
    model = tiny_model(family, **options).eval()
    expected = model(IDS, labels=LABELS, num_items_in_batch=num_items)
    attach_chunked_head(model, full_logits_score)
    got = model(IDS, labels=LABELS, fused_lm_head=True, num_items_in_batch=num_items)
    torch.testing.assert_close(got.loss, expected.loss)
    assert (got.aux_loss is None) is (family == "llama")


def test_aligned_labels_are_not_shifted():
    model = tiny_model().eval()
    attach_chunked_head(model, full_logits_score)
    aligned = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    shifted = model(IDS, labels=LABELS, fused_lm_head=True).log_probs
    given = model(IDS, shift_labels=aligned, fused_lm_head=True).log_probs
    torch.testing.assert_close(given[:, :-1], shifted)
    assert given.shape == IDS.shape and (given[:, -1] == 0).all()


def test_head_is_looked_up_on_every_call():
    model = tiny_model().eval()
    attach_chunked_head(model, full_logits_score)
    before = model(IDS, labels=LABELS, fused_lm_head=True).loss
    model.set_output_embeddings(torch.nn.Linear(32, VOCAB, bias=True))
    after = model(IDS, labels=LABELS, fused_lm_head=True).loss
    assert after != before
    torch.testing.assert_close(after, model(IDS, labels=LABELS).loss)


# --- several processes ---------------------------------------------------------------------------------------------------


def gradients(model) -> dict[str, torch.Tensor]:
    full = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return {name.removeprefix("module."): grad for name, grad in full.items()}


def both_ranks(rank: int, store: str) -> None:
    """Each rank trains on its own row; DDP and FSDP2 must both give the average of the two gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    alone = tiny_model()
    sum(alone(IDS[i : i + 1], labels=LABELS[i : i + 1]).loss for i in range(2)).div(2).backward()
    expected = gradients(alone)

    replicated = tiny_model()
    attach_chunked_head(replicated, full_logits_score)
    replicated = DistributedDataParallel(replicated)

    # a head that is a unit of its own is still sharded when the loss reads its weight
    sharded = tiny_model()
    attach_chunked_head(sharded, full_logits_score)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(sharded.get_output_embeddings(), mesh=mesh)
    fully_shard(sharded, mesh=mesh)

    for model in (replicated, sharded):
        model(IDS[rank : rank + 1], labels=LABELS[rank : rank + 1], fused_lm_head=True).loss.backward()
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, expected[name], msg=lambda m, name=name, model=model: f"{type(model).__name__} {name}: {m}")
    dist.destroy_process_group()


def test_data_parallel_gradients_are_averaged(tmp_path):
    torch.multiprocessing.spawn(both_ranks, args=(str(tmp_path / "store"),), nprocs=2)
