"""A user's mistakes: each marked line is an error before anything runs, and no other is."""

from torch import Tensor, nn

from logitless import (
    Batch,
    CPOLoss,
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    MedusaHeads,
    MedusaLoss,
    MultiTokenLoss,
    ORPOLoss,
    REINFORCELoss,
    RLOOLoss,
    SamplerCorrection,
    SimPOLoss,
    SpeculatorLoss,
    Term,
    TokenLoss,
    TokenStats,
    linear_cross_entropy,
    linear_logprobs,
    linear_topk,
)


def wrong(x: Tensor, head: nn.Linear, t: Tensor) -> None:
    CrossEntropyLoss()(x, x)  # wrong
    CrossEntropyLoss(x, x, t)  # wrong
    DPOLoss()(x, x, t, ref_logp=x)  # wrong
    DPOLoss(loss_type="sigmoyd")  # wrong
    GRPOLoss()(x, x, t)  # wrong
    GRPOLoss(loss_type="gspo")  # wrong
    GRPOLoss()(x, x, t, advantages=x, ref_logp=x)  # wrong
    GRPOLoss(trust_region="dppo_tv")  # wrong
    GRPOLoss(kl_estimator="low_var_kl")  # wrong
    GRPOLoss(loss_agg_mode="token_mean")  # wrong
    GRPOLoss(sampler_correction="tis")  # wrong
    SamplerCorrection(level="seq_sum")  # wrong
    RLOOLoss()(x, x, t, advantages=x, maks=x)  # wrong
    REINFORCELoss()(x, x, t, advantages=x, old_logp=x)  # wrong
    REINFORCELoss()(x, x, t, advantage=x)  # wrong
    KTOLoss()(x, x, t, labels=[True, False])  # wrong
    CrossEntropyLoss()(x, x, t, class_weight=x)  # wrong
    CrossEntropyLoss(reduction="average")  # wrong
    ORPOLoss()(x, x, t, nll_labels=x)  # wrong
    CPOLoss(loss_type="cpo")  # wrong
    SimPOLoss()(x, x, t, ref_logps=x)  # wrong
    JSDLoss()(x, x, t, teacher=x)  # wrong
    DistillationLoss(divergence="kl")  # wrong
    MedusaLoss()(x, MedusaHeads(8, 32, 2), t, shift=True)  # wrong
    MultiTokenLoss()([x], x, t, shift=True)  # wrong
    SpeculatorLoss(divergence="kl")  # wrong
    SpeculatorLoss()([x], x, t, d2t=x)  # wrong
    SpeculatorLoss()([x], x, t, teacher_hidden=[x])  # wrong
    linear_cross_entropy(x, head, t, soft_cap=30.0)  # wrong
    linear_logprobs(x, head, t, entropy="yes")  # wrong
    linear_logprobs(x, head, t).entropy.mean()  # wrong
    linear_topk(x, head, 2, temprature=2.0)  # wrong
    CrossEntropyLoss()("hidden", x, t)  # wrong
    print(CrossEntropyLoss()(x, x, t).logprobs)  # wrong


class Own(TokenLoss):
    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        return {"loss": Term(stats.entropie)}, {}  # wrong
