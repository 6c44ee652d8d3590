"""Models that are not a plain causal language model, under every trainer: tied embeddings, a router loss, a
head that PEFT trains whole, and images."""

import pytest
import torch
import transformers
from datasets import Dataset

from logitless.trl_integration import patch_model
from tests.cases import usually

from ..models.every import gradients
from .compare import adapted, assert_same, side_by_side
from .kinds import KINDS, needs, tolerance
from .tiny import SIZES, VOCAB

IMAGE = VOCAB - 1


def runs(tmp_path, kind, **changes):
    dataset, settings, trainer = needs(kind, tmp_path)
    return side_by_side(tmp_path, kind, dataset, trainer=trainer, **settings | changes)


USUAL = ("SFT", "DPO", "GRPO", "GKD")


@pytest.mark.parametrize("kind", usually(USUAL, KINDS))
def test_tied_embeddings(tmp_path, kind):
    actual = runs(tmp_path, kind, family="tied")
    assert_same(*actual, rtol=tolerance(kind))
    assert actual[1].trainer.model.lm_head.weight is actual[1].trainer.model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", usually(USUAL, KINDS))
def test_router_loss(tmp_path, kind):
    def routed(model):
        # TRL's Distillation cannot add it.
        model.config.output_router_logits = kind != "Distillation"
        return model

    actual = runs(tmp_path, kind, family="mixtral", wrap=routed)
    assert getattr(actual[1].trainer, "aux_loss_enabled", True)
    assert_same(*actual, rtol=tolerance(kind))


@pytest.mark.parametrize("kind", usually(USUAL, KINDS))
def test_head_that_peft_trains_whole(tmp_path, kind):
    """The policy's head is a copy, and the reference's the original."""
    actual = runs(tmp_path, kind, wrap=lambda model: adapted(model, modules_to_save=["lm_head"]))
    assert_same(*actual, rtol=tolerance(kind))
    head = actual[1].trainer.model.get_base_model().get_output_embeddings()
    assert not torch.equal(head.modules_to_save["default"].weight, head.original_module.weight)


# --- images


def tiny_llava() -> transformers.PreTrainedModel:
    """An image of four patches, each an embedding strong enough to be noticed when it is left out."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text = transformers.LlamaConfig(**SIZES)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config)


def with_images(rows: list[dict]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(row["seed"] for row in rows))
    ids = torch.randint(3, IMAGE, (len(rows), 11), generator=generator)
    ids[:, 1:5] = IMAGE
    images = 3 * torch.randn(len(rows), 3, 8, 8, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.where(ids == IMAGE, -100, ids),
        "pixel_values": images,
    }


def test_patched_model_sees_the_image():
    model, inputs = tiny_llava(), with_images([{"seed": 0}] * 2)
    stock, expected = gradients(model, **inputs)
    undo = patch_model(model, logits_budget=2**12)
    mine, actual = gradients(model, **inputs)
    assert mine.logits is None
    torch.testing.assert_close(mine.loss, stock.loss)
    torch.testing.assert_close(actual, expected)
    assert model.model.vision_tower.embeddings.patch_embedding.weight.grad.norm() > 0
    other = model(**inputs | {"pixel_values": -inputs["pixel_values"]}).loss
    assert (other - mine.loss).abs() > 1e-3
    undo()


def test_sft_vision_language_model(tmp_path):
    # The collator makes the images, so TRL has nothing to prepare.
    settings = {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    runs = side_by_side(
        tmp_path,
        "SFT",
        Dataset.from_dict({"seed": list(range(12))}),
        wrap=lambda model: tiny_llava(),
        trainer={"data_collator": with_images},
        max_length=None,
        **settings,
    )
    assert_same(*runs)
