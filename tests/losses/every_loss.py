"""Every loss of the library and two of a user's own, called on the same inputs: what must hold for all is
parametrized over `LOSSES`."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from logitless import (
    CPOLoss,
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    LogitsLoss,
    MedusaHeads,
    MedusaLoss,
    MultiTokenLoss,
    ORPOLoss,
    PPOLoss,
    REINFORCELoss,
    RLOOLoss,
    SamplerCorrection,
    SimPOLoss,
    Term,
    TokenLoss,
    linear_logprobs,
)
from logitless.losses.base import LinearLoss
from logitless.losses.distillation import NAMES
from tests.support import DEVICE

# Sequences, hidden sizes of student and teacher, vocabulary, the teacher's best tokens.
B, H, TEACHER_H, V, K = 4, 8, 6, 50, 5


@dataclass(frozen=True, kw_only=True)
class FocalLoss(TokenLoss):
    def terms(self, stats, batch):
        return {"focal": Term((1 - stats.logps.exp()) ** 2 * -stats.logps)}, {}


@dataclass(frozen=True, kw_only=True)
class BrierLoss(LogitsLoss):
    metric_names: ClassVar = ("top",)

    def terms(self, logits, batch):
        p = logits.softmax(-1)
        columns, _ = batch.columns(batch.targets)
        target = p.gather(1, columns[:, None])[:, 0]
        return {"brier": Term(p.square().sum(-1) - 2 * target + 1)}, {"top": Term(p.amax(-1))}


@dataclass
class Given:
    """What any of the losses takes: (B, T, ...) per token, (B, ...) per sequence."""

    hidden: Tensor
    hidden_2: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    ref_logps: Tensor
    old_logps: Tensor
    sampling_logps: Tensor
    advantages: Tensor
    labels: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    topk_logprobs: Tensor
    topk_ids: Tensor

    def items(self):
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def flat(self) -> "Given":
        """(B, T, ...) -> (B * T, ...): the same sequences side by side."""
        per_token = self.targets.shape
        return Given(**{name: x.flatten(0, 1) if x.shape[:2] == per_token else x for name, x in self.items()})

    def with_hidden(self, function: Callable[[Tensor], Tensor]) -> "Given":
        return Given(**{name: function(x) if name.startswith("hidden") else x for name, x in self.items()})


TRAINED = ("hidden", "hidden_2", "weight", "bias")


def given(T: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, ignored: float = 0.3) -> Given:
    """Random inputs; the first two targets of every sequence count."""
    generator = torch.Generator(DEVICE).manual_seed(seed + T)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    targets = torch.randint(V, (B, T), generator=generator, device=DEVICE)
    mask = torch.rand(B, T, generator=generator, device=DEVICE) < ignored
    mask[:, :2] = False
    made = Given(
        hidden=random(B, T, H),
        hidden_2=random(B, T, H),
        weight=random(V, H) / 2,
        bias=random(V),
        targets=targets.masked_fill(mask, -100),
        ref_logps=random(B, T) - 4,
        old_logps=random(B, T) / 4 - 4,
        sampling_logps=random(B, T) / 4 - 4,
        advantages=random(B),
        labels=torch.arange(B, device=DEVICE) % 2 == 0,
        teacher_hidden=random(B, T, TEACHER_H),
        teacher_weight=random(V, TEACHER_H),
        topk_logprobs=random(B, T, K).log_softmax(-1) - 0.5,
        topk_ids=torch.rand(B, T, V, generator=generator, device=DEVICE).argsort(-1)[..., :K].contiguous(),
    )
    cast = ("teacher_hidden", "teacher_weight", *TRAINED)
    made = Given(**{name: x.to(dtype) if name in cast else x for name, x in made.items()})
    for name in TRAINED:
        getattr(made, name).requires_grad_()
    return made


def refill(x: Given, seed: int, **options) -> None:
    """Other numbers in the same tensors, which is what a CUDA graph is replayed on."""
    with torch.no_grad():
        for (_, old), (_, new) in zip(x.items(), given(6, seed=seed, **options).items(), strict=True):
            old.copy_(new)


def heads(dtype: torch.dtype = torch.float32) -> MedusaHeads:
    generator = torch.Generator(DEVICE).manual_seed(7)
    made = MedusaHeads(H, V, 2, device=DEVICE, dtype=dtype)
    for parameter in made.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator, device=DEVICE) / 3).to(dtype)
    return made


# Options of a call; the others are fields of the loss.
OF_CALLS = ("cu_seqlens", "num_items", "accumulate_into", "grad_scale")


# A loss, and how it is called: positional and keyword arguments.
Prepared = tuple[LinearLoss, tuple, dict]


@dataclass(frozen=True)
class LossCase:
    """A loss of the library: `prepare` says what is called with what, calling the case calls it."""

    prepare: Callable[..., Prepared]

    def __call__(self, x: Given, heads: MedusaHeads, **options) -> tuple[Tensor, ...]:
        loss, arguments, keywords = self.prepare(x, heads, **options)
        out = loss(*arguments, **keywords)
        return out.loss, *out.metrics.values()


def of_call(options: dict) -> dict:
    """Moves the options of the call out of those of the loss."""
    return {name: options.pop(name) for name in OF_CALLS if name in options}


def on(kind: type, *names: str, **settings) -> LossCase:
    """A loss of one set of hidden states that takes the inputs `names` beside them."""

    def prepare(x: Given, heads: MedusaHeads, **options) -> Prepared:
        more = {name: getattr(x, name) for name in names} | of_call(options)
        return kind(**settings, **options), (x.hidden, x.weight, x.targets), {"bias": x.bias, **more}

    return LossCase(prepare)


def distillation(divergence: str) -> LossCase:
    return on(DistillationLoss, "teacher_hidden", "teacher_weight", divergence=divergence)


def logprobs(x: Given, heads: MedusaHeads, **options) -> tuple[Tensor, ...]:
    actual = linear_logprobs(x.hidden, x.weight, x.targets, bias=x.bias, entropy=True, **options)
    return (actual.logps.exp() - 0.1 * actual.entropy + 0.01 * actual.lse.square()).sum(), actual.logps


def top_k(kind: type, **settings) -> LossCase:
    """Distillation from the log-probabilities of k ids per token."""

    def prepare(x: Given, heads: MedusaHeads, **options) -> Prepared:
        more = {"bias": x.bias, "teacher_logprobs_topk": (x.topk_logprobs, x.topk_ids), **of_call(options)}
        return kind(**settings, **options), (x.hidden, x.weight, x.targets), more

    return LossCase(prepare)


def multi_token(x: Given, heads: MedusaHeads, **options) -> Prepared:
    return MultiTokenLoss(**options), ((x.hidden, x.hidden_2), x.weight, x.targets), {"bias": x.bias}


def medusa(x: Given, heads: MedusaHeads, num_items: float | None = None, **options) -> Prepared:
    more = {"base_weight": x.weight, "base_bias": x.bias, "num_items": num_items}
    return MedusaLoss(**options), (x.hidden, heads, x.targets), more


# Without `SpeculatorLoss`, which refuses compact=False and takes unshifted labels: test_speculator.py.
LOSSES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "cross-entropy": on(CrossEntropyLoss),
    "cross-entropy, smoothed": on(CrossEntropyLoss, label_smoothing=0.1, z_loss=0.1),
    "logprobs": logprobs,
    "DPO": on(DPOLoss, "ref_logps"),
    "DPO, sorted": on(DPOLoss, "ref_logps", loss_type=("aot", "sft")),
    "ORPO": on(ORPOLoss),
    "CPO": on(CPOLoss),
    "SimPO": on(SimPOLoss),
    "KTO": on(KTOLoss, "ref_logps", "labels", loss_type="apo_zero_unpaired"),
    "GRPO": on(GRPOLoss, "advantages", "old_logps", "ref_logps", beta=0.1, entropy_coef=0.01),
    "GRPO, whole sequences": on(
        GRPOLoss, "advantages", "old_logps", importance_sampling_level="sequence", loss_type="grpo"
    ),
    "GRPO, top entropy": on(GRPOLoss, "advantages", "old_logps", top_entropy_quantile=0.5),
    "GRPO, corrected": on(
        GRPOLoss,
        *("advantages", "old_logps", "ref_logps", "sampling_logps"),
        trust_region="binary_tv",
        beta=0.1,
        kl_estimator="k3+",
        kl_max=1.0,
        old_kl_coef=0.1,
        ref_advantage=0.5,
        sampler_correction=(SamplerCorrection(high=2.0), SamplerCorrection(level="geometric", high=1.1)),
    ),
    "PPO": on(PPOLoss, "advantages", "old_logps"),
    "RLOO": on(RLOOLoss, "advantages"),
    "REINFORCE": on(REINFORCELoss, "advantages"),
    "JSD": on(JSDLoss, "teacher_hidden", "teacher_weight", hard_loss_weight=0.2),
    **{name: distillation(name) for name in NAMES if name != "jsd"},
    "top-k teacher": top_k(JSDLoss, hard_loss_weight=0.2),
    "support": on(
        DistillationLoss, "teacher_hidden", "teacher_weight", support="union", k=2, hard_loss_weight=0.2
    ),
    "support, top-k teacher": top_k(
        DistillationLoss, divergence="reverse_kl", support="teacher", topk_mode="renormalize"
    ),
    "multi-token": LossCase(multi_token),
    "Medusa": LossCase(medusa),
    "own TokenLoss": on(FocalLoss),
    "own LogitsLoss": on(BrierLoss),
}


# Without reduction="none": losses of several heads or of several units, and the primitive, whose loss is the
# caller's.
REDUCED = ("logprobs", "DPO, sorted", "ORPO", "CPO", "multi-token", "Medusa")
# Those that look at sequences, and take `cu_seqlens`.
SEQUENCES = (
    "DPO",
    "DPO, sorted",
    "ORPO",
    "CPO",
    "SimPO",
    "KTO",
    "GRPO, whole sequences",
    "GRPO, top entropy",
    "GRPO, corrected",
    "RLOO",
)


def gradients(value: Tensor, x: Given, heads: MedusaHeads, **options) -> dict[str, Tensor]:
    """By name, of everything that is trained and was reached."""
    named = {name: getattr(x, name) for name in TRAINED} | {
        f"heads.{name}": p for name, p in heads.named_parameters()
    }
    named = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    actual = torch.autograd.grad(value, list(named.values()), allow_unused=True, **options)
    return {name: gradient for name, gradient in zip(named, actual, strict=True) if gradient is not None}
