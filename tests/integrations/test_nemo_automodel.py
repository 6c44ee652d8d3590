"""NeMo-Automodel: `LogitlessCrossEntropy` against its own `ChunkedCrossEntropy`."""

import logging
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.support import another_version, check_parameters, check_text, hollow, require
from tests.support import assert_close

FOLDER = require("nemo_automodel")
hollow("nemo_automodel", "nemo_automodel.components", "nemo_automodel.components.loss")

from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy  # noqa: E402
from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy  # noqa: E402

from logitless.integrations.nemo_automodel import LogitlessCrossEntropy  # noqa: E402

B, S, H, V = 2, 13, 16, 60
OWN = "nemo_automodel.components.loss.chunked_ce:ChunkedCrossEntropy"


def operands(dtype: torch.dtype = torch.float32, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    shape = shape or (B, S)
    hidden = torch.randn(*shape, H, generator=make).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=make).to(dtype).requires_grad_()
    labels = torch.randint(0, V, shape, generator=make)
    return hidden, weight, torch.where(labels % 5 == 0, -100, labels)


def compare(dtype: torch.dtype, ours: LogitlessCrossEntropy, stock: ChunkedCrossEntropy, **call) -> None:
    """Loss, d_hidden and d_weight of ours with those of the stock class, whose fp64 run is the truth."""
    runs = []
    for loss_fn, kind in ((ours, dtype), (stock, dtype), (stock, torch.float64)):
        hidden, weight, labels = operands(dtype)
        hidden, weight = (x.detach().to(kind).requires_grad_() for x in (hidden, weight))
        loss = loss_fn(hidden, labels, weight, **call)
        loss.backward(torch.linspace(0.5, 2, loss.numel()).view(loss.shape).to(loss))
        runs.append((loss.detach(), hidden.grad, weight.grad))
    for name, actual, plain, truth in zip(("loss", "d_hidden", "d_weight"), *runs, strict=True):
        truth = truth.double()  # the stock class keeps its loss in fp32
        error = (plain.double() - truth).norm() / truth.norm().clamp_min(1e-30)
        least = 1e-6 if dtype == torch.float32 else 4e-3
        assert_close(
            actual, truth, max(least, error.item()), name=name, allow_zero="num_label_tokens" in call
        )


CALLS = {
    "as it is": {},
    "tokens of all ranks": {"num_label_tokens": 77},
    "no token": {"num_label_tokens": 0},
    "weights": {"loss_weights": torch.rand(B, S, generator=torch.Generator().manual_seed(1))},
    "mask": {"mask": torch.arange(B * S).view(B, S) % 3},
    "logits_dtype": {"logits_dtype": torch.float32},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_stock_loss_and_gradients(name, dtype):
    compare(dtype, LogitlessCrossEntropy(), ChunkedCrossEntropy(chunk_len=5, compile=False), **CALLS[name])


def test_accepted_logits_dtypes_give_the_same_loss():
    """The stock class rounds the product to the head's dtype first, so `logits_dtype` is not passed on."""
    hidden, weight, labels = operands(torch.bfloat16)
    for loss_fn in (LogitlessCrossEntropy(), ChunkedCrossEntropy(chunk_len=5, compile=False)):
        expected = loss_fn(hidden, labels, weight)
        for dtype in (torch.float32, torch.bfloat16):
            assert loss_fn(hidden, labels, weight, logits_dtype=dtype) == expected, (loss_fn, dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_other_reductions(reduction):
    stock = ChunkedCrossEntropy(chunk_len=5, compile=False, reduction=reduction)
    compare(torch.float32, LogitlessCrossEntropy(reduction=reduction), stock)


def test_packed_sequences_and_another_ignore_index():
    hidden, weight, labels = operands(torch.float32, 1, S)
    labels = torch.where(labels == -100, -1, labels)[0]
    stock = ChunkedCrossEntropy(compile=False, ignore_index=-1)
    torch.testing.assert_close(
        LogitlessCrossEntropy(ignore_index=-1)(hidden, labels, weight), stock(hidden, labels, weight)
    )


def test_a_weight_in_another_dtype_than_hidden():
    """FSDP's compute dtype is that of the weight, to which the stock class casts hidden."""
    hidden, weight, labels = operands()
    half = weight.detach().bfloat16()
    ours = LogitlessCrossEntropy()(hidden, labels, half)
    stock = ChunkedCrossEntropy(compile=False)(hidden, labels, half)
    torch.testing.assert_close(ours, stock, rtol=1e-2, atol=1e-2)


def test_the_group_that_sums_the_heads_gradient():
    """FSDP2 gathers the head over this group, and the stock class hands it to the same method."""
    hidden, weight, labels = operands()
    loss_fn, group = LogitlessCrossEntropy(), object()
    with mock.patch.object(loss_fn, "materialize_lm_weight", return_value=weight.detach()) as gathered:
        loss_fn(hidden, labels, weight, grad_reduce_group=group)
    gathered.assert_called_once_with(weight, grad_reduce_group=group)


def test_another_version():
    with another_version():
        LogitlessCrossEntropy()


def test_evaluation():
    hidden, weight, labels = operands()
    with torch.no_grad():
        loss = LogitlessCrossEntropy()(hidden, labels, weight)
        torch.testing.assert_close(loss, ChunkedCrossEntropy(compile=False)(hidden, labels, weight))
    assert not loss.requires_grad


def test_refused():
    hidden, weight, labels = operands()
    with pytest.raises(ValueError, match="^reduction: expected 'sum', got 'mean'; num_label_tokens and"):
        LogitlessCrossEntropy(reduction="mean")(hidden, labels, weight, num_label_tokens=3)
    with pytest.raises(
        ValueError, match="^logits_dtype: expected None, torch.float32 or the head's torch.float"
    ):
        LogitlessCrossEntropy()(hidden, labels, weight, logits_dtype=torch.bfloat16)
    capped = SimpleNamespace(get_text_config=lambda: SimpleNamespace(final_logit_softcapping=30.0))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        LogitlessCrossEntropy().prepare_lm_weight(nn.Linear(H, V, bias=False), model_config=capped)
    with pytest.raises(ValueError, match="bias-free"):
        LogitlessCrossEntropy().prepare_lm_weight(nn.Linear(H, V))


def test_how_the_recipes_use_it(caplog):
    """As `instantiate` of a YAML file makes it, and with the checks of the recipe."""
    loader = import_module("nemo_automodel.components.config.loader")
    target = "logitless.integrations.nemo_automodel.LogitlessCrossEntropy"
    with caplog.at_level(logging.INFO, "logitless"):
        loss_fn = loader.ConfigNode({"_target_": target, "logits_budget": 2684354560}).instantiate()
    assert "logitless: NeMo-Automodel's ChunkedCrossEntropy replaced, logits_budget 2.5 GiB" in caplog.text
    assert isinstance(loss_fn, LinearCrossEntropy) and loss_fn.loss.logits_budget == 2684354560
    head = nn.Linear(H, V, bias=False)
    assert loss_fn.prepare_lm_weight(head) is head.weight


def test_names_and_parameters():
    check_parameters(f"{OWN}.__init__", "self chunk_len compile ignore_index reduction")
    inputs = "hidden_states labels lm_weight num_label_tokens grad_reduce_group loss_weights"
    check_parameters(f"{OWN}.forward", f"self {inputs} mask logits_dtype")
    check_parameters(f"{OWN}.prepare_lm_weight", "self lm_head model_config grad_reduce_group")
    check_text(FOLDER / "recipes" / "llm" / "train_ft.py", "if isinstance(self.loss_fn, LinearCrossEntropy):")
