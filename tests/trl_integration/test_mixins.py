"""The exchange of forward passes during a loss, and `swap_attributes`."""

import pytest
import trl.trainer.sft_trainer as stock_module

from logitless.exchange import state_of
from logitless.trl_integration import SFTConfig, SFTTrainer
from logitless.trl_integration.adapter import swap_attributes
from logitless.trl_integration.head import KEY

from .compare import sft_trainer
from .tiny import tiny_model


def test_the_exchange_ends_with_the_constructor(tmp_path):
    stock = stock_module.add_fused_lm_head
    trainer = sft_trainer(tmp_path, SFTTrainer, SFTConfig, use_chunked_loss=True)
    assert stock_module.add_fused_lm_head is stock
    with trainer.chunked_loss.attach_models():
        assert state_of(trainer.model, KEY) is not None
    assert state_of(trainer.model, KEY) is None
    with pytest.raises(ValueError, match="train_dataset"):
        SFTTrainer(tiny_model(), trainer.args)
    assert stock_module.add_fused_lm_head is stock


def test_swap_attributes_restores_after_an_error():
    class Owner:
        a, b = 1, 2

    with pytest.raises(RuntimeError), swap_attributes(Owner, a=3, b=4):
        assert (Owner.a, Owner.b) == (3, 4)
        raise RuntimeError
    assert (Owner.a, Owner.b) == (1, 2)
    with pytest.raises(AttributeError), swap_attributes(Owner, absent=1):
        pass


def test_swap_attributes_leaves_nothing_on_a_subclass():
    """Neither on a class that has only inherited the attribute, nor on an instance."""

    class Owner:
        a = 1

    class Inherits(Owner):
        pass

    for owner in (Inherits, Inherits()):
        with swap_attributes(owner, a=3):
            assert owner.a == 3
        assert owner.a == 1 and "a" not in vars(owner)
