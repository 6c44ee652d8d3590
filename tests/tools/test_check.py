"""`logitless.check`: passes every loss of the library, and finds what is wrong with a loss of one's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import logitless
from logitless import CrossEntropyLoss, LogitsLoss, MedusaHeads, MultiTokenLoss, Term, TokenLoss
from logitless.__main__ import LOSSES as COMMANDS
from logitless.__main__ import main
from logitless.tools.check import MANY_CHUNKS, MAX_LOGITS_BYTES, ONE_CHUNK
from tests.losses import every_loss
from tests.losses.every_loss import LOSSES, LossCase
from tests.support import DEVICE

pytestmark = pytest.mark.usefixtures("uncompiled")
H, V = 8, 50
CHECKED = [name for name, case in LOSSES.items() if isinstance(case, LossCase)]
# Of one unit, and one head.
UNREDUCED = [name for name in CHECKED if name not in ("DPO, sorted", "ORPO", "CPO", "multi-token", "Medusa")]
HALF = (
    "cross-entropy, smoothed",
    "DPO",
    "GRPO",
    "JSD",
    "multi-token",
    "Medusa",
    "own TokenLoss",
    "own LogitsLoss",
)


def passes(name: str, x: every_loss.Given | None = None, **options) -> logitless.CheckReport:
    """The report about a loss of the library, which has passed."""
    x = every_loss.given(11) if x is None else x
    loss, arguments, inputs = LOSSES[name].prepare(x, every_loss.heads(x.hidden.dtype), **options)
    report = logitless.check(loss, *arguments, **inputs)
    assert report.ok, report
    return report


@pytest.mark.parametrize("name", CHECKED)
def test_every_loss_passes(name):
    report = passes(name)
    for how in (ONE_CHUNK, MANY_CHUNKS):
        compared = {key.removeprefix(f"{how}: ") for key in report.errors if key.startswith(how)}
        expected = {"multi-token": "d_hidden[0]", "Medusa": "d_medusa_head.0.0.linear.weight"}
        assert {"loss", expected.get(name, "d_weight")} <= compared


@pytest.mark.parametrize("name", UNREDUCED)
def test_every_loss_passes_unreduced(name):
    passes(name, reduction="none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", HALF)
def test_losses_pass_in_other_dtypes(name, dtype):
    passes(name, every_loss.given(11, dtype=dtype))


def test_a_loss_whose_terms_cancel_passes():
    """Its sum, 0.015, is a small rest of large numbers, and so is its error."""
    passes("REINFORCE", every_loss.given(40, seed=1000))


@pytest.mark.parametrize("options", [{"return_logps": True}, {"compact": False}], ids="-".join)
def test_the_numbers_of_tokens_and_every_row_may_be_asked_for(options):
    passes("DPO", **options)


def test_packed_sequences_pass():
    cu_seqlens = torch.tensor([0, 5, 22, 30, 44], device=DEVICE)
    passes("DPO", every_loss.given(11).flat(), cu_seqlens=cu_seqlens)


def test_autocast_passes():
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        report = passes("cross-entropy")
        passes("Medusa")
    # As much as bf16 products need, and more than fp32 ones would.
    assert report.allowed["one chunk: d_weight"] > 1e-4


# -- losses that are wrong in a way that no shape shows


@dataclass(frozen=True, kw_only=True)
class LooksAround(TokenLoss):
    """A token's value depends on the other tokens of its chunk."""

    def terms(self, stats, batch):
        return {"variance": Term((stats.logps - stats.logps.mean()) ** 2)}, {}


@dataclass(frozen=True, kw_only=True)
class LogitsLookAround(LogitsLoss):
    def terms(self, logits, batch):
        top = logits.amax(-1)
        return {"variance": Term((top - top.mean()) ** 2)}, {}


@dataclass(frozen=True, kw_only=True)
class ForgetsLse(TokenLoss):
    """It may read `lse`, but the gradient by it is nobody's."""

    def terms(self, stats, batch):
        return {"nll": Term(0.1 * stats.lse.square() - stats.logps)}, {}


@dataclass(frozen=True, kw_only=True)
class DeclaresLse(ForgetsLse):
    differentiates: ClassVar = ("logps", "lse")


@dataclass(frozen=True, kw_only=True)
class ForgetsEntropy(TokenLoss):
    observes: ClassVar = ("entropy",)

    def terms(self, stats, batch):
        return {"nll": Term(-stats.logps - stats.entropy)}, {}


@dataclass(frozen=True, kw_only=True)
class DividesByBatch(TokenLoss):
    """A loss of groups that looks at all groups."""

    scope: ClassVar = "group"

    def terms(self, stats, batch):
        sums = batch.sum_by_sequence(stats.logps)
        return {"relative": Term((sums - sums.mean()) ** 2, over="sequences")}, {}


@dataclass(frozen=True, kw_only=True)
class DeclaresBatch(DividesByBatch):
    scope: ClassVar = "batch"


@dataclass(frozen=True, kw_only=True)
class WrongMetric(TokenLoss):
    metric_names: ClassVar = ("spread",)

    def terms(self, stats, batch):
        return {"nll": Term(-stats.logps)}, {"spread": Term((stats.logps - stats.logps.mean()).abs())}


@dataclass(frozen=True, kw_only=True)
class TrainedInput(TokenLoss):
    """What comes as an input gets no gradient from the engine."""

    shared_inputs: ClassVar = ("scale",)

    def terms(self, stats, batch):
        return {"nll": Term(-batch.scale * stats.logps)}, {}


def own(loss, dtype: torch.dtype = torch.float32, **inputs) -> logitless.CheckReport:
    given = every_loss.given(11, dtype=dtype)
    return logitless.check(loss, given.hidden, given.weight, given.targets, bias=given.bias, **inputs)


def wrong(report: logitless.CheckReport) -> set[str]:
    return {name for name, error in report.errors.items() if not error <= report.allowed[name]}


GRADIENTS = ("d_hidden", "d_weight", "d_bias")
IN_MANY = {f"{MANY_CHUNKS}: {name}" for name in ("loss", *GRADIENTS)}
EVERY_GRADIENT = {f"{how}: {name}" for how in (ONE_CHUNK, MANY_CHUNKS) for name in GRADIENTS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "loss, where",
    [
        (LooksAround(), IN_MANY),
        (LogitsLookAround(), IN_MANY),
        (ForgetsLse(), EVERY_GRADIENT),
        (ForgetsEntropy(), EVERY_GRADIENT),
        (DividesByBatch(), IN_MANY),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, (TokenLoss, LogitsLoss)) else "",
)
def test_wrong_losses_are_found(loss, where, dtype):
    report = own(loss, dtype)
    assert not report.ok and not report
    assert wrong(report) == where, report
    lines = dict(zip(report.errors, str(report).splitlines()[1:], strict=True))
    assert {name for name, line in lines.items() if "WRONG" in line} == where


def test_a_wrong_metric_is_found():
    report = own(WrongMetric())
    assert wrong(report) == {f"{MANY_CHUNKS}: spread"}, report


@pytest.mark.parametrize("loss", [DeclaresLse(), DeclaresBatch()], ids=lambda loss: type(loss).__name__)
def test_their_right_counterparts_pass(loss):
    report = own(loss)
    assert report.ok and report, report
    assert str(report).startswith("check passed") and "WRONG" not in str(report)


def test_an_input_that_would_be_trained_is_refused():
    scale = torch.tensor(2.0, device=DEVICE)
    assert own(TrainedInput(), scale=scale).ok
    with pytest.raises(ValueError, match="^scale: expected a tensor that requires no gradient"):
        own(TrainedInput(), scale=scale.requires_grad_())


# -- what a check leaves alone, and what it refuses


def test_nothing_is_disturbed():
    given, heads = every_loss.given(11), every_loss.heads()
    loss, arguments, inputs = LOSSES["Medusa"].prepare(given, heads)
    given.bias.requires_grad_(False)
    marked = [given.hidden, given.weight, *heads.parameters()]
    for x in marked:
        x.grad = torch.full_like(x, 3.0)
    before = [x.detach().clone() for x in (*marked, given.bias)]
    report = logitless.check(loss, *arguments, **inputs)
    assert report.ok, report
    assert all((x.grad == 3).all() and x.requires_grad for x in marked)
    assert given.bias.grad is None and not given.bias.requires_grad
    assert all(map(torch.equal, before, (*marked, given.bias)))
    assert "one chunk: d_base_weight" in report.errors and "one chunk: d_base_bias" not in report.errors


@dataclass(frozen=True, kw_only=True)
class Draws(TokenLoss):
    def terms(self, stats, batch):
        torch.rand(3)
        return {"nll": Term(-stats.logps)}, {}


def test_the_random_state_is_restored():
    state = torch.get_rng_state()
    assert own(Draws()).ok
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_need_not_be_on():
    with torch.no_grad():
        assert "many chunks: d_weight" in passes("cross-entropy").errors


def test_the_same_tensor_has_one_gradient():
    given = every_loss.given(11)
    report = logitless.check(MultiTokenLoss(), (given.hidden, given.hidden), given.weight, given.targets)
    assert report.ok, report
    assert "one chunk: d_hidden[0]" in report.errors and "one chunk: d_hidden[1]" not in report.errors


def test_the_call_of_many_chunks_has_several(monkeypatch):
    plans = []
    original = logitless.tools.check.run_calls

    def run_calls(heads, mode):
        outcome = original(heads, mode)
        plans.append(outcome.plan)
        return outcome

    monkeypatch.setattr(logitless.tools.check, "run_calls", run_calls)
    for name in ("cross-entropy", "DPO", "JSD", "multi-token"):
        plans.clear()
        passes(name)
        one, many = plans
        assert one.chunks == 1 and many.chunks > 2


def test_at_most_a_gibibyte_of_logits():
    rows = MAX_LOGITS_BYTES // 8 // V + 1
    hidden = torch.zeros(1, 1, device=DEVICE).expand(rows, 1)
    targets = torch.zeros(1, dtype=torch.int64, device=DEVICE).expand(rows)
    weight = torch.zeros(V, 1, device=DEVICE)
    refused = "hidden: expected at most 1 GiB of logits in fp64, got 1.0 GiB; check fewer"
    with pytest.raises(ValueError, match=refused):
        logitless.check(CrossEntropyLoss(), hidden, weight, targets)
    # Of all heads together.
    heads, half = MedusaHeads(1, V, 2, device=DEVICE), rows // 2
    with pytest.raises(ValueError, match="hidden: expected at most 1 GiB"):
        logitless.check(logitless.MedusaLoss(), hidden[:half], heads, targets[:half], base_weight=weight)


@pytest.mark.parametrize("group", ["tp_group", "cp_group"])
def test_groups_are_refused(group):
    loss = logitless.DPOLoss(**{group: "a mesh dimension"})
    with pytest.raises(ValueError, match=f"{group}: expected None in a check"):
        own(loss)


def test_other_bad_calls():
    given = every_loss.given(11)
    with pytest.raises(TypeError, match="loss: expected a loss, got function"):
        own(logitless.linear_cross_entropy)
    with pytest.raises(ValueError, match="accumulate_into: expected None in a check"):
        own(CrossEntropyLoss(), accumulate_into=torch.zeros(V, H, device=DEVICE))
    with pytest.raises(TypeError, match="hidden: expected a tensor"):
        logitless.check(CrossEntropyLoss(), [1.0], given.weight, given.targets)
    with pytest.raises(ValueError, match="targets: expected at least 2 supervised tokens"):
        logitless.check(CrossEntropyLoss(), given.hidden[0, :1], given.weight, given.targets[0, :1])


# -- on the command line

YOURS = """
from dataclasses import dataclass
from typing import ClassVar

from logitless import Term, TokenLoss


@dataclass(frozen=True, kw_only=True)
class Weighted(TokenLoss):
    gamma: float = 2.0
    token_inputs: ClassVar = ("weights",)
    scope: ClassVar = "group"
    sequence_inputs: ClassVar = ("factors",)
    vocabulary_inputs: ClassVar = ("of_ids",)
    shared_inputs: ClassVar = ("scale",)

    def terms(self, stats, batch):
        per_sequence = batch.sum_by_sequence(-stats.logps * batch.weights) * batch.factors
        return {"weighted": Term(per_sequence * batch.scale**self.gamma, over="sequences")}, {}


@dataclass(frozen=True, kw_only=True)
class LooksAround(TokenLoss):
    def terms(self, stats, batch):
        return {"variance": Term((stats.logps - stats.logps.mean()) ** 2)}, {}
"""


@pytest.fixture
def yours(tmp_path):
    path = tmp_path / "yours.py"
    path.write_text(YOURS)
    return str(path)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_loss_of_the_library_on_the_command_line(name, capsys):
    assert main(["check", name]) == 0
    told = capsys.readouterr().out
    assert told.startswith("check passed") and f"{MANY_CHUNKS}: loss" in told


def test_a_loss_of_your_own_on_the_command_line(yours, capsys, monkeypatch):
    assert main(["check", f"{yours}:Weighted", "--set", "gamma=1", "--dtype", "bfloat16"]) == 0
    assert main(["check", f"{yours}:LooksAround"]) == 1
    assert "check FAILED" in capsys.readouterr().out
    Path(yours).rename(Path(yours).with_name("module_of_yours.py"))
    monkeypatch.syspath_prepend(Path(yours).parent)
    assert main(["check", "module_of_yours:Weighted"]) == 0


def test_tensors_of_a_file_on_the_command_line(yours, tmp_path, capsys):
    given = every_loss.given(11)
    names = ("hidden", "weight", "bias", "targets")
    call = {name: getattr(given, name).detach() for name in names}
    call |= {"teacher_logprobs_topk": (given.topk_logprobs, given.topk_ids)}
    torch.save(call, tmp_path / "call.pt")
    file = ["--tensors", str(tmp_path / "call.pt"), "--device", str(DEVICE)]
    assert main(["check", "JSDLoss", *file]) == 0
    told = capsys.readouterr().out
    assert all(f"{ONE_CHUNK}: {name}" in told for name in ("d_hidden", "d_weight", "d_bias"))


def test_gradients_of_every_hidden_state_of_a_file(tmp_path, capsys):
    given = every_loss.given(11)
    hidden = [given.hidden.detach(), given.hidden_2.detach()]
    call = {"hidden": hidden, "weight": given.weight.detach(), "targets": given.targets}
    torch.save(call, tmp_path / "call.pt")
    assert main(["check", "MultiTokenLoss", "--tensors", str(tmp_path / "call.pt")]) == 0
    told = capsys.readouterr().out
    assert all(f"{ONE_CHUNK}: d_hidden[{k}]" in told for k in range(2))
    torch.save([given.targets], tmp_path / "list.pt")
    with pytest.raises(SystemExit):
        main(["check", "MultiTokenLoss", "--tensors", str(tmp_path / "list.pt")])
    assert "--tensors: expected a dict, got list; save" in capsys.readouterr().err


@pytest.mark.parametrize("ignored", [0, 1])
def test_another_ignore_index_on_the_command_line(ignored):
    assert main(["check", "CrossEntropyLoss", "--set", f"ignore_index={ignored}"]) == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Focal"], "LOSS: expected a loss of the library or file.py:Class, got Focal; write file.py"),
        (["nowhere.py:Focal"], "LOSS: expected a file with the loss, got nowhere.py; check its path."),
        (["nowhere.at_all:Focal"], "No module named 'nowhere'"),
        (["logitless:Focal"], "LOSS: expected a class in logitless, got Focal; check its name."),
        (["logitless:linear_logprobs"], "LOSS: expected a subclass of TokenLoss or LogitsLoss, got linear_l"),
        (["DPOLoss", "--tensors", __file__], "--tensors: expected a file of tensors, got "),
        (["DPOLoss", "--set", "bta=1"], "bta"),
        (["DPOLoss", "--tensors", "nowhere.pt"], "No such file"),
    ],
)
def test_what_the_command_line_refuses(arguments, told, capsys):
    with pytest.raises(SystemExit):
        main(["check", *arguments])
    assert told in capsys.readouterr().err
