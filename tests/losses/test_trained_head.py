"""Errors of the gradients on a head that was trained, where many probabilities are small and some near 1."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from benchmarks.peers.ce import eager_loss
from benchmarks.proof import curves, gradient_errors, sources
from benchmarks.proof.curves import Size, Trainer
from benchmarks.proof.gradient_errors import FILTERED, SeveralChunks, measure
from logitless import CrossEntropyLoss
from tests.support import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="trains on a CPU; the benchmark has GPUs")
STEPS = 120
CPU = torch.device("cpu")
# Rows of a head and its batches: few, as truth and errors are in fp64
SIZE = Size(curves.QUICK.model | {"hidden_size": 64}, (16, 64), 5e-3, 10, (2, 512), 1024)


class Filtered(torch.autograd.Function):
    """Cross-entropy in fp32 whose gradient leaves out pairs of a row and an id with |p - onehot| below
    2^-12."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = hidden.float() @ weight.float().t()
        d_logits = logits.softmax(1)
        d_logits[torch.arange(len(targets)), targets] -= 1
        kept = torch.where(d_logits.abs() < FILTERED, 0.0, d_logits) / len(targets)
        ctx.save_for_backward(hidden, weight, kept)
        return torch.nn.functional.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, kept = ctx.saved_tensors
        d_hidden, d_weight = kept @ weight.float(), kept.t() @ hidden.float()
        return (grad * d_hidden).to(hidden.dtype), (grad * d_weight).to(weight.dtype), None


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    """Errors by implementation, on the head of a model that was trained on Python's own library."""
    trainer = Trainer(sources.bytes_of_the_library(), SIZE, CPU, STEPS)
    _, _, heads = trainer.run(eager_loss, 0, STEPS, stages=(STEPS,))
    calls = {
        "ours": CrossEntropyLoss(),
        "ours, several chunks": SeveralChunks(),
        "ours, fp32 logits": CrossEntropyLoss(logits_dtype=torch.float32),
        "eager": eager_loss,
        "bf16 sums": SeveralChunks(accum_dtype=torch.bfloat16),
        "filter": Filtered.apply,
    }
    section = measure(heads[STEPS], calls)
    assert section["facts"]["nats"] < 3, "the model has learned something"
    print(gradient_errors.title(section) + "\n" + gradient_errors.table(section))
    return {row["name"]: row for row in section["rows"]}


@pytest.mark.parametrize("gradient", ["d_hidden", "d_weight"])
def test_errors_are_at_most_those_of_full_logits(rows, gradient):
    """Of logits that are rounded as PyTorch's are, and near the floor for logits in fp32."""
    floor, eager = rows[gradient_errors.FLOOR][gradient]["error"], rows["eager"][gradient]["error"]
    for name in ("ours", "ours, several chunks"):
        assert rows[name][gradient]["error"] < 1.25 * eager, name
    assert rows["ours, fp32 logits"][gradient]["error"] < 1.5 * floor


def test_no_row_of_d_weight_is_lost(rows):
    assert all(rows[name]["d_weight"]["zero_rows"] == 0 for name in ("ours", "ours, several chunks"))


def test_a_filter_is_seen(rows):
    """What leaves out small probabilities loses them in every batch: a bias."""
    assert rows["filter"]["d_weight_others"] > 5 * rows["ours"]["d_weight_others"]
    assert rows["filter"]["persistence"] > 0.9 > rows["ours"]["persistence"]


def test_sums_in_bf16_are_seen(rows):
    assert rows["bf16 sums"]["d_weight_others"] > 2 * rows["ours, several chunks"]["d_weight_others"]


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_an_adapter_on_the_head_has_exact_gradients_in_fp32():
    random = torch.Generator().manual_seed(0)
    head = gradient_errors.Head(
        "random",
        0.5 * torch.randn(257, 32, generator=random),
        torch.randn(2, 64, 32, generator=random),
        torch.randint(257, (2, 64), generator=random),
    )
    calls, _ = gradient_errors.LORA.load(CPU)
    section = measure(head, calls, problem=gradient_errors.lora)
    for row in section["rows"]:
        assert row["verdict"] == "ok", row
        assert max(row["d_hidden"]["error"], row["d_weight"]["error"]) < 1e-5, row["name"]
