"""The policy losses of the reference against numbers computed by hand and against TRL's own code on the same
tensors."""

import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests import reference

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
BY_SEQUENCE = ("grpo", "sapo", "luspo", "dr_grpo")  # whose means are over sequences
LEVELS = ("token", "sequence")

# Every position has the logits (0, log 3). Two sequences, of two tokens and of one: probabilities 3/4, 1/4
# and 1/4, all 1/2 before.
WEIGHT = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
HIDDEN = torch.ones(2, 2, 1, dtype=torch.float64)
TARGETS = torch.tensor([[1, 0], [0, -100]])
OLD = torch.full((2, 2), -math.log(2), dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -2.0])
RATIOS = (1.5, 0.5, 0.5)
ENTROPY = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
# exp(d) - d - 1 with a reference that gives 1/2 as well.
KL = (2 / 3 - math.log(2 / 3) - 1, 2 - math.log(2) - 1)
LP = (math.log(3 / 4), math.log(1 / 4))
S = math.sqrt(1.5 * 0.5)  # ratio of the first sequence, the second has 0.5


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def phi(w: float, k: float, decay: float) -> float:
    return w**k * math.exp(decay * (1 - w))


def by_hand(loss=reference.grpo, *, hidden=HIDDEN, **options):
    options = {"advantages": ADVANTAGES, "old_logps": OLD, "max_completion_length": 8, **options}
    return loss(hidden, WEIGHT, TARGETS, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Tokens: -1.2 (clipped), -0.5; 1.6 (clipped: -2 * 0.8).
        pytest.param({"loss_type": "grpo"}, ((-1.2 - 0.5) / 2 + 1.6) / 2, id="grpo"),
        pytest.param({"loss_type": "bnpo"}, (-1.2 - 0.5 + 1.6) / 3, id="bnpo"),
        pytest.param({"loss_type": "dapo"}, (-1.2 - 0.5 + 1.6) / 3, id="dapo"),
        pytest.param({}, (-1.2 - 0.5 + 1.6) / 3, id="dapo_is_the_default"),
        pytest.param({"loss_type": "dr_grpo"}, (-1.2 - 0.5 + 1.6) / (2 * 8), id="dr_grpo"),
        pytest.param({"loss_type": "luspo"}, (-1.2 - 0.5 + 1.6) / 2, id="luspo_of_tokens"),
        pytest.param(
            {"loss_type": "cispo", "epsilon_high": 1.1},
            (-1.1 * LP[0] - 0.5 * LP[1] + 2 * 0.5 * LP[1]) / 3,
            id="cispo",
        ),
        pytest.param(
            {"loss_type": "cispo"}, -0.2 * (LP[0] + LP[1] - 2 * LP[1]) / 3, id="cispo_bounded_by_epsilon"
        ),
        pytest.param(
            {"loss_type": "sapo"},
            (-4 * (sigmoid(0.5) + sigmoid(-0.5)) / 2 + 2 * 4 / 1.05 * sigmoid(1.05 * -0.5)) / 2,
            id="sapo",
        ),
        pytest.param(
            {"loss_type": "vespo"},
            (-phi(0.75, 2, 3) * (LP[0] + LP[1]) + 2 * phi(0.5, 3, 2) * LP[1]) / 3,
            id="vespo",
        ),
        # One ratio a sequence: the square root of 3/4, not clipped, and 1/2, clipped.
        pytest.param(
            {"loss_type": "grpo", "importance_sampling_level": "sequence"}, (-S + 1.6) / 2, id="grpo_sequence"
        ),
        pytest.param(
            {"loss_type": "dapo", "importance_sampling_level": "sequence"},
            (-2 * S + 1.6) / 3,
            id="dapo_sequence",
        ),
        pytest.param(
            {"loss_type": "luspo", "importance_sampling_level": "sequence"}, (-2 * S + 1.6) / 2, id="luspo"
        ),
        pytest.param(
            {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 0.7},
            (-0.7 * (LP[0] + LP[1]) + 2 * 0.5 * LP[1]) / 3,
            id="cispo_sequence",
        ),
        pytest.param(
            {"loss_type": "sapo", "importance_sampling_level": "sequence"},
            (-4 * sigmoid(S - 1) + 2 * 4 / 1.05 * sigmoid(1.05 * -0.5)) / 2,
            id="sapo_sequence",
        ),
        pytest.param({"epsilon": 0.6}, (-1.5 - 0.5 + 1.0) / 3, id="epsilon"),
        pytest.param({"epsilon_high": 0.3}, (-1.3 - 0.5 + 1.6) / 3, id="epsilon_high"),
        # Only where the advantage is negative does the upper clip leave the ratio unbounded.
        pytest.param({"advantages": torch.tensor([-1.0, -2.0])}, (1.5 + 0.8 + 1.6) / 3, id="no_delta"),
        pytest.param(
            {"advantages": torch.tensor([-1.0, -2.0]), "delta": 1.4}, (1.4 + 0.8 + 1.6) / 3, id="delta"
        ),
        pytest.param(
            {"advantages": torch.tensor([[1.0, -1.0], [2.0, 9.0]])},
            (-1.2 + 0.8 - 2 * 0.5) / 3,
            id="token_advantages",
        ),
        pytest.param({"old_logps": None}, (-1 - 1 + 2) / 3, id="on_policy"),
        pytest.param(
            {"beta": 0.1, "ref_logps": OLD}, (-1.2 - 0.5 + 1.6 + 0.1 * (KL[0] + 2 * KL[1])) / 3, id="kl"
        ),
        pytest.param(
            {"beta": 0.1, "ref_logps": OLD, "use_bias_correction_kl": True},
            (-1.2 - 0.5 + 1.6 + 0.1 * (1.5 * KL[0] + 2 * 0.5 * KL[1])) / 3,
            id="kl_corrected",
        ),
        pytest.param({"entropy_coef": 0.3}, (-1.2 - 0.5 + 1.6) / 3 - 0.3 * ENTROPY, id="entropy"),
        pytest.param(
            {"entropy_coef": 0.3, "loss_type": "luspo"},
            (-1.2 - 0.5 + 1.6) / 2 - 0.3 * ENTROPY,
            id="entropy_of_tokens",
        ),
        pytest.param(
            {"importance_weights": torch.tensor([[0.5], [2.0]])},
            (-0.6 - 0.25 + 3.2) / 3,
            id="sequence_weights",
        ),
        pytest.param(
            {"importance_weights": torch.tensor([[0.5, 2.0], [3.0, 9.0]])},
            (-0.6 - 1 + 4.8) / 3,
            id="token_weights",
        ),
        # Tokens' own correction enters w: 0.75 * 0.5 * 2 and 0.5 * 3.
        pytest.param(
            {"loss_type": "vespo", "importance_weights": torch.tensor([[0.5, 2.0], [3.0, 9.0]])},
            (-phi(0.75, 2, 3) * (LP[0] + LP[1]) + 2 * phi(1.5, 3, 2) * LP[1]) / 3,
            id="vespo_weights",
        ),
        # The second sequence is log 2 likelier under the old policy, and its advantage is negative.
        pytest.param({"off_policy_mask_threshold": 0.69}, (-1.2 - 0.5) / 3, id="off_policy"),
        pytest.param({"off_policy_mask_threshold": 0.70}, (-1.2 - 0.5 + 1.6) / 3, id="on_policy_enough"),
        pytest.param(
            {"off_policy_mask_threshold": 0.69, "beta": 0.1, "ref_logps": OLD},
            (-1.2 - 0.5 + 0.1 * (KL[0] + 2 * KL[1])) / 3,
            id="off_policy_keeps_kl",
        ),
        # Here it is the first, of mean -log(3/4) / 2 = 0.14.
        pytest.param(
            {"off_policy_mask_threshold": 0.15, "advantages": torch.tensor([-1.0, 2.0])},
            (1.5 + 0.8 - 2 * 0.5) / 3,
            id="mean_drift",
        ),
        pytest.param(
            {"off_policy_mask_threshold": 0.14, "advantages": torch.tensor([-1.0, 2.0])},
            -2 * 0.5 / 3,
            id="mean_drift_over",
        ),
        pytest.param({"num_items": 10}, (-1.2 - 0.5 + 1.6) / 10, id="num_items"),
        pytest.param(
            {"num_items": torch.tensor(10), "loss_type": "bnpo"}, (-1.2 - 0.5 + 1.6) / 10, id="num_items_bnpo"
        ),
        pytest.param(
            {"num_items": 10, "loss_type": "grpo"}, ((-1.2 - 0.5) / 2 + 1.6) / 10, id="num_items_grpo"
        ),
        pytest.param(
            {"num_items": 10, "loss_type": "dr_grpo"}, (-1.2 - 0.5 + 1.6) / (10 * 8), id="num_items_dr_grpo"
        ),
        pytest.param({"num_items": 10, "loss_type": "luspo"}, (-1.2 - 0.5 + 1.6) / 10, id="num_items_luspo"),
        pytest.param(
            {"num_items": 10, "entropy_coef": 0.3},
            (-1.2 - 0.5 + 1.6) / 10 - 0.3 * ENTROPY,
            id="num_items_not_of_entropy",
        ),
        pytest.param({"mask": torch.tensor([[1, 0], [1, 1]])}, (-1.2 + 1.6) / 2, id="mask"),
    ],
)
def test_grpo_by_hand(options, expected):
    loss, _, logps = by_hand(**options)
    assert loss.item() == pytest.approx(expected, rel=1e-6)  # fp32 advantages and weights
    assert logps.flatten().tolist() == pytest.approx([LP[0], LP[1] if "mask" not in options else 0, LP[1], 0])


def test_high_entropy_tokens_by_hand():
    """Entropies 0.69 (a head of zeros), 0.56 and 0.36 (logits of log 9): the quantile is of the tokens that
    count."""
    hidden = torch.tensor([[[0.0], [1.0]], [[2.0], [0.0]]], dtype=torch.float64)
    entropies = [math.log(2), ENTROPY, 0.9 * math.log(10 / 9) + 0.1 * math.log(10)]
    losses = [-1.0, -0.5, 0.8 * 2]
    old = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64).log()
    # Quantile 0.4 of three lies between the lowest two.
    for top, kept in ((1.0, 3), (0.6, 2), (0.4, 1), (0.0, 1)):
        loss, metrics, _ = by_hand(hidden=hidden, old_logps=old, top_entropy_quantile=top, entropy_coef=0.3)
        assert loss.item() == pytest.approx(sum(losses[:kept]) / 3 - 0.3 * sum(entropies[:kept]) / kept)
        assert metrics["entropy"].item() == pytest.approx(sum(entropies) / 3)


def test_high_entropy_leaves_the_kl():
    hidden = torch.tensor([[[0.0], [1.0]], [[2.0], [0.0]]], dtype=torch.float64)
    loss, *_ = by_hand(hidden=hidden, top_entropy_quantile=0.0, beta=0.1, ref_logps=OLD)
    assert loss.item() == pytest.approx((-1.0 + 0.1 * (KL[1] + 5 - math.log(5) - 1)) / 3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            {},
            {"clip_ratio/low_mean": 1 / 3, "clip_ratio/high_mean": 1 / 3, "clip_ratio/region_mean": 2 / 3},
            id="tokens",
        ),
        pytest.param(
            {"importance_sampling_level": "sequence"},
            {
                "clip_ratio/low_mean": 1 / 2,
                "clip_ratio/high_mean": 0,
                "clip_ratio/region_mean": 1 / 2,
                "importance_ratio": (2 * S + 0.5) / 3,
            },
            id="sequences",
        ),
        pytest.param(
            {"importance_sampling_level": "sequence", "advantages": torch.tensor([[1.0, 1.0], [-2.0, 0.0]])},
            {"clip_ratio/low_mean": 1 / 3, "importance_ratio": (2 * S + 0.5) / 3},
            id="tokens_of_sequences",
        ),
        pytest.param({"loss_type": "cispo", "epsilon_high": 1.1}, {"cispo_clip_ratio": 1 / 3}, id="cispo"),
        # Not where the advantage is negative, though the ratio is bounded there too.
        pytest.param({"loss_type": "cispo"}, {"cispo_clip_ratio": 2 / 3}, id="cispo_positive"),
        pytest.param(
            {"loss_type": "vespo"}, {"vespo/phi_seq_mean": (phi(0.75, 2, 3) + phi(0.5, 3, 2)) / 2}, id="vespo"
        ),
        pytest.param({"beta": 0.1, "ref_logps": OLD}, {"kl": (KL[0] + 2 * KL[1]) / 3}, id="kl"),
        pytest.param(
            {"beta": 0.1, "ref_logps": OLD, "use_bias_correction_kl": True},
            {"kl": (1.5 * KL[0] + KL[1]) / 3},
            id="kl_corrected",
        ),
        # The metrics look at the ratio that delta bounds, importance_ratio does not.
        pytest.param({"delta": 1.1}, {"clip_ratio/high_mean": 0}, id="delta"),
    ],
)
def test_metrics_by_hand(options, expected):
    _, metrics, _ = by_hand(**options)
    expected = {"entropy": ENTROPY, "importance_ratio": sum(RATIOS) / 3, **expected}
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected)
    assert not any(x.requires_grad for x in metrics.values())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Ratios of whole sequences: 1.5 * 0.5 and 0.5, both below 0.8; only the second is clipped.
        pytest.param({}, (-0.75 + 1.6) / 2, id="plain"),
        pytest.param({"old_logps": OLD.sum(1) / torch.tensor([1, 2])}, (-0.75 + 1.6) / 2, id="old_sums"),
        pytest.param(
            {"old_logps": torch.tensor([[-3.0], [-3.0]])}, (-1.2 + 2 * math.exp(LP[1] + 3)) / 2, id="high"
        ),
        pytest.param(
            {"old_logps": torch.tensor([-3.0, 0.0]), "epsilon_high": 0.5}, (-1.5 + 1.6) / 2, id="epsilon_high"
        ),
        pytest.param({"epsilon": 0.6}, (-0.75 + 1.0) / 2, id="epsilon"),
        pytest.param({"old_logps": None}, (-1 + 2) / 2, id="on_policy"),
        pytest.param({"num_items": 5}, (-0.75 + 1.6) / 5, id="num_items"),
        pytest.param({"reduction": "sum"}, -0.75 + 1.6, id="sum"),
        pytest.param({"reduction": "none"}, [-0.75, 1.6], id="none"),
    ],
)
def test_rloo_by_hand(options, expected):
    loss, metrics, _ = reference.rloo(
        HIDDEN, WEIGHT, TARGETS, **{"advantages": ADVANTAGES, "old_logps": OLD, **options}
    )
    assert loss.tolist() == pytest.approx(expected)
    if not options:
        assert {name: x.item() for name, x in metrics.items()} == pytest.approx(
            {
                "entropy": ENTROPY,
                "importance_ratio": (2 * 0.75 + 0.5) / 3,
                "clip_ratio/low_mean": 1 / 2,
                "clip_ratio/high_mean": 0,
                "clip_ratio/region_mean": 1 / 2,
            }
        )


def test_ppo_and_reinforce_by_hand():
    advantages = torch.tensor([[1.0, -1.0], [2.0, 9.0]])
    loss, *_ = by_hand(reference.ppo, advantages=advantages, epsilon=0.3)
    assert loss.item() == pytest.approx((-1.3 + 0.7 - 2 * 0.5) / 3)
    loss, metrics, _ = reference.reinforce(HIDDEN, WEIGHT, TARGETS, advantages=advantages)
    assert loss.item() == pytest.approx((-LP[0] + LP[1] - 2 * LP[1]) / 3)
    assert metrics["entropy"].item() == pytest.approx(ENTROPY)


# Against TRL. Of six sequences the last has no token; the others' log-ratios go both ways for both signs of
# the advantage.


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_problem() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    B, T, V, H = 6, 7, 11, 5
    p = SimpleNamespace(
        hidden=randn(B, T, H), weight=randn(V, H), labels=torch.randint(V, (B, T), generator=generator)
    )
    p.completion = torch.arange(T) < torch.tensor([7, 4, 6, 5, 1, 0])[:, None]
    p.tool = torch.rand(B, T, generator=generator) < 0.8
    p.tool[:, 0] = True
    p.targets = p.labels.masked_fill(~p.completion, -100)
    p.advantages = tensor([1.0, 0.7, -1.2, -0.4, 0.0, 0.9])
    p.token_advantages = randn(B, T)
    logps = full_numbers(p.hidden, p)[0]
    p.old_logps = logps - tensor([0.5, -0.5, 0.5, -0.5, 0.1, 0.3])[:, None] - 0.4 * randn(B, T)
    # The third sequence drifts from its sampler, where the fourth drifts from the old policy.
    p.sampling_logps = logps - tensor([0.1, 0.1, -0.9, 0.3, 0.1, 0.1])[:, None] - 0.1 * randn(B, T)
    p.sampling_logps[3, 0] = math.nan
    p.ref_logps = logps + 0.5 * randn(B, T)
    p.token_weights = (0.5 * randn(B, T)).exp()
    p.token_weights[0, 1] = 0.0
    p.token_weights[~(p.completion & p.tool)] = 1.0
    p.sequence_weights = (0.5 * randn(B, 1)).exp()
    p.sequence_weights[-1] = 1.0
    return p


def full_numbers(hidden: Tensor, p: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """What TRL gets from its model: log-probabilities and entropies, padding included."""
    logprobs = (hidden @ p.weight.T).log_softmax(-1)
    return logprobs.gather(-1, p.labels[..., None])[..., 0], -(logprobs * logprobs.exp()).sum(-1)


P = make_problem()
OPTIONS = {
    "plain": {},
    "epsilon": {"epsilon": 0.5},
    "epsilon_high": {"epsilon_high": 1.3},
    "delta": {"delta": 1.4},
    "kl": {"beta": 0.3, "ref_logps": P.ref_logps},
    "kl_corrected": {"beta": 0.3, "ref_logps": P.ref_logps, "use_bias_correction_kl": True},
    "entropy": {"entropy_coef": 0.2},
    "top_entropy": {"top_entropy_quantile": 0.45},
    "entropy_of_top_entropy": {"top_entropy_quantile": 0.45, "entropy_coef": 0.2},
    "off_policy": {"off_policy_mask_threshold": 0.3},
    "off_policy_of_sampler": {"off_policy_mask_threshold": 0.3, "sampling_logps": P.sampling_logps},
    "token_weights": {"importance_weights": P.token_weights},
    "sequence_weights": {"importance_weights": P.sequence_weights},
    "token_advantages": {"advantages": P.token_advantages},
    "on_policy": {"old_logps": None},
    "sapo": {"sapo_temperature_neg": 2.1, "sapo_temperature_pos": 1.3},
    "vespo": {"vespo_k_pos": 1.3, "vespo_lambda_pos": 2.1, "vespo_k_neg": 2.7, "vespo_lambda_neg": 1.7},
    "everything": {
        "epsilon": 0.15,
        "epsilon_high": 0.25,
        "delta": 1.5,
        "beta": 0.3,
        "ref_logps": P.ref_logps,
        "use_bias_correction_kl": True,
        "entropy_coef": 0.2,
        "top_entropy_quantile": 0.65,
        "off_policy_mask_threshold": 0.3,
        "sampling_logps": P.sampling_logps,
        "importance_weights": P.token_weights,
        "advantages": P.token_advantages,
    },
}


def is_inert(name: str, loss_type: str) -> bool:
    """Whether an option must not change a loss."""
    if name in ("sapo", "vespo"):
        return loss_type != name
    if name in ("epsilon", "delta"):
        return loss_type not in CLIPPED
    return name == "plain" or name == "epsilon_high" and loss_type in ("sapo", "vespo")


def run_ours(
    loss=reference.grpo, p: SimpleNamespace = P, **options
) -> tuple[Tensor, Tensor, dict[str, float]]:
    hidden = p.hidden.clone().requires_grad_()
    options = {"advantages": p.advantages, "old_logps": p.old_logps, **options}
    value, metrics, _ = loss(hidden, p.weight, p.targets, mask=p.tool, **options)
    (grad,) = torch.autograd.grad(value.sum(), hidden)
    return value.detach(), grad, {name: x.item() for name, x in metrics.items()}


@pytest.fixture(scope="module")
def trainers():
    pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    return SimpleNamespace(grpo=GRPOTrainer, rloo=RLOOTrainer)


def run_trl(
    trainer: type,
    p: SimpleNamespace = P,
    *,
    training: bool = True,
    accumulation: int = 1,
    steps_per_generation: int = 1,
    processes: int = 1,
    num_items_in_batch: int | None = None,
    **options,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """`_compute_loss` of a trainer, on a stand-in that has what it reads."""
    hidden = p.hidden.clone().requires_grad_()
    options = {
        "advantages": p.advantages,
        "old_logps": p.old_logps,
        "epsilon": 0.2,
        "epsilon_high": None,
        **options,
    }
    get = options.get
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    accelerator = SimpleNamespace(
        num_processes=processes,
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (*full_numbers(hidden, p), None),
        aux_loss_enabled=False,
        accelerator=accelerator,
        model=SimpleNamespace(training=training),
        args=SimpleNamespace(
            delta=get("delta"),
            steps_per_generation=steps_per_generation,
            use_bias_correction_kl=get("use_bias_correction_kl", False),
            sapo_temperature_neg=get("sapo_temperature_neg", 1.05),
            sapo_temperature_pos=get("sapo_temperature_pos", 1.0),
            vespo_k_pos=get("vespo_k_pos", 2.0),
            vespo_lambda_pos=get("vespo_lambda_pos", 3.0),
            vespo_k_neg=get("vespo_k_neg", 3.0),
            vespo_lambda_neg=get("vespo_lambda_neg", 2.0),
        ),
        beta=get("beta", 0.0),
        epsilon_low=get("epsilon"),
        epsilon_high=get("epsilon") if get("epsilon_high") is None else get("epsilon_high"),
        loss_type=get("loss_type", "dapo"),
        importance_sampling_level=get("importance_sampling_level", "token"),
        max_completion_length=get("max_completion_length"),
        top_entropy_quantile=get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=get("off_policy_mask_threshold"),
        entropy_coef=get("entropy_coef", 0.0),
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=get("entropy_coef", 0.0) != 0.0,
        use_vllm="importance_weights" in options,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=accumulation,
        _metrics=metrics,
    )
    for name in ("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"):
        method = getattr(trainer, name, None)
        setattr(
            stand_in,
            name,
            partial(method, stand_in) if name == "get_high_entropy_mask" and method else method,
        )

    tokens = (p.completion & p.tool).sum()
    inputs = {
        "prompt_ids": p.labels[:, :1],
        "prompt_mask": torch.ones_like(p.labels[:, :1]),
        "completion_ids": p.labels,
        "completion_mask": p.completion.long(),
        "tool_mask": p.tool.long(),
        "advantages": options["advantages"],
        "num_items_in_batch": tokens if num_items_in_batch is None else torch.tensor(num_items_in_batch),
        "ref_per_token_logps": get("ref_logps"),
        "importance_sampling_ratio": get("importance_weights"),
    }
    if options["old_logps"] is not None:
        inputs["old_logps"] = inputs["old_per_token_logps"] = options["old_logps"]
    if get("sampling_logps") is not None:
        inputs["sampling_per_token_logps"] = options["sampling_logps"]

    # TRL makes tensors of its options' values in the default dtype.
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        loss = trainer._compute_loss(stand_in, stand_in.model, inputs)
    finally:
        torch.set_default_dtype(default)
    (grad,) = torch.autograd.grad(loss, hidden)
    found = metrics["train" if training else "eval"]
    assert all(len(values) == 1 for values in found.values())
    return loss.detach(), grad, {name: values[0] for name, values in found.items()}


# What TRL logs and the reference does not: extremes over sequences, and what the caller knows.
LEFT_TO_THE_TRAINER = {"clip_ratio/low_min", "clip_ratio/high_max", "policy_loss", "entropy_coef"}


def assert_same(ours, theirs) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-11, atol=1e-13)
    assert theirs[1].norm() > 0
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-10, atol=1e-13)
    assert {name: x for name, x in ours[2].items() if name != "importance_ratio"} == pytest.approx(
        {name: x for name, x in theirs[2].items() if name not in LEFT_TO_THE_TRAINER}, rel=1e-6
    )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_is_trls(trainers, loss_type, level, name):
    # The default bound of cispo, 0.2, is below every ratio.
    common = {"loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": 16}
    common["epsilon_high"] = 1.1 if loss_type == "cispo" else None
    options = {**common, **OPTIONS[name]}
    ours = run_ours(**options)
    assert_same(ours, run_trl(trainers.grpo, **options))

    plain = run_ours(**common)
    changed = not torch.equal(ours[0], plain[0]) or not torch.equal(ours[1], plain[1])
    assert changed != is_inert(name, loss_type)


def test_data_clips_on_every_side():
    for level in LEVELS:
        metrics = run_ours(loss_type="grpo", importance_sampling_level=level)[2]
        assert 0 < metrics["clip_ratio/low_mean"] < 1 and 0 < metrics["clip_ratio/high_mean"] < 1
        assert (
            0
            < run_ours(loss_type="cispo", importance_sampling_level=level, epsilon_high=1.1)[2][
                "cispo_clip_ratio"
            ]
            < 1
        )


@pytest.mark.parametrize("name", ["plain", "kl", "entropy_of_top_entropy"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_is_trls_times_its_accumulation_steps(trainers, loss_type, training, name):
    """200 tokens in a generation batch of 2 processes, used up in 8 micro-batches, 4 of which make a step."""
    common = {"loss_type": loss_type, "max_completion_length": 16, **OPTIONS[name]}
    value, grad, metrics = run_trl(
        trainers.grpo,
        training=training,
        accumulation=4,
        steps_per_generation=8,
        processes=2,
        num_items_in_batch=200,
        **common,
    )
    steps = 4 if training else 1
    num_items = None if loss_type in (*BY_SEQUENCE, "bnpo") else 200 / 2 / 8 if training else 200 / 2
    assert_same(run_ours(**common, num_items=num_items), (value * steps, grad * steps, metrics))


def without_empty(p: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{name: x if name == "weight" else x[:-1] for name, x in vars(p).items()})


@pytest.mark.parametrize(
    "options", [{}, {"epsilon": 0.4}, {"epsilon_high": 0.9}], ids=["plain", "epsilon", "epsilon_high"]
)
def test_rloo_is_trls(trainers, options):
    """TRL's RLOO has no tool mask, so it is given the whole one."""
    p = without_empty(P)
    p.completion = p.completion & p.tool
    p.old_logps = (full_numbers(p.hidden, p)[0] * p.completion).sum(1) - tensor([0.5, -0.3, 0.5, -0.3, 0.1])
    ours = run_ours(reference.rloo, p, **options)
    assert_same(ours, run_trl(trainers.rloo, p, **options))
    plain = run_ours(reference.rloo, p)
    assert 0 < plain[2]["clip_ratio/low_mean"] < 1 and 0 < plain[2]["clip_ratio/high_mean"] < 1
    assert torch.equal(ours[1], plain[1]) == (not options)


def test_sequence_without_tokens_is_nothing_to_rloo(trainers):
    """TRL adds the negative of its advantage, which has no gradient."""
    p = SimpleNamespace(**vars(P))
    p.completion = p.completion & p.tool
    p.old_logps = (p.old_logps * p.completion).sum(1)
    value, grad, metrics = run_trl(trainers.rloo, p)
    assert_same(run_ours(reference.rloo, p), (value + p.advantages[-1] / 6, grad, metrics))


# Properties


def packed(p: SimpleNamespace, x: Tensor) -> Tensor:
    return x[p.completion]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_packed_is_padded(loss_type, level, reduction):
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "max_completion_length": 16,
        "reduction": reduction,
    }
    given = {**OPTIONS["everything"], "old_logps": P.old_logps, "mask": P.tool}
    hidden = P.hidden.clone().requires_grad_()
    loss, metrics, logps = reference.grpo(hidden, P.weight, P.targets, **options, **given)
    (grad,) = torch.autograd.grad(loss.sum(), hidden)

    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), P.completion.sum(1).cumsum(0)))
    flat = packed(P, P.hidden).requires_grad_()
    given = {name: packed(P, x) if isinstance(x, Tensor) else x for name, x in given.items()}
    flat_loss, flat_metrics, flat_logps = reference.grpo(
        flat, P.weight, packed(P, P.targets), cu_seqlens=cu_seqlens, **options, **given
    )
    (flat_grad,) = torch.autograd.grad(flat_loss.sum(), flat)

    per_token = reduction == "none" and loss_type not in BY_SEQUENCE
    torch.testing.assert_close(flat_loss, packed(P, loss) if per_token else loss)
    torch.testing.assert_close(flat_metrics, metrics)
    torch.testing.assert_close(flat_logps, packed(P, logps))
    torch.testing.assert_close(flat_grad, packed(P, grad))


@pytest.mark.parametrize("loss", [reference.rloo, reference.reinforce], ids=["rloo", "reinforce"])
def test_packed_rloo_and_reinforce_are_padded(loss):
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), P.completion.sum(1).cumsum(0)))
    old = {"old_logps": P.old_logps} if loss is reference.rloo else {}
    flat_old = {name: packed(P, x) for name, x in old.items()}
    padded = loss(P.hidden, P.weight, P.targets, advantages=P.advantages, mask=P.tool, **old)
    flat = loss(
        packed(P, P.hidden),
        P.weight,
        packed(P, P.targets),
        advantages=P.advantages,
        mask=packed(P, P.tool),
        cu_seqlens=cu_seqlens,
        **flat_old,
    )
    torch.testing.assert_close(flat[:2], padded[:2])
    torch.testing.assert_close(flat[2], packed(P, padded[2]))


@pytest.mark.parametrize("name", ["plain", "entropy_of_top_entropy", "kl"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_reductions_agree(loss_type, name):
    run = partial(run_ours, loss_type=loss_type, max_completion_length=16, **OPTIONS[name])
    losses, total, mean = (run(reduction=reduction)[0] for reduction in ("none", "sum", "mean"))
    assert losses.shape == ((6,) if loss_type in BY_SEQUENCE else (6, 7))
    torch.testing.assert_close(losses.sum(), total)
    torch.testing.assert_close(
        mean, run(num_items=6 if loss_type in BY_SEQUENCE else (P.completion & P.tool).sum())[0]
    )
    if name != "entropy_of_top_entropy":
        torch.testing.assert_close(
            mean * (6 if loss_type in BY_SEQUENCE else (P.completion & P.tool).sum()), total
        )


def test_on_policy_gradients_are_reinforces():
    """The ratio is 1 and its gradient that of logp, at either level."""
    options = {"advantages": P.advantages, "mask": P.tool}
    hidden = P.hidden.clone().requires_grad_()

    def gradient(loss, **more):
        return torch.autograd.grad(loss(hidden, P.weight, P.targets, **options, **more)[0], hidden)[0]

    expected = gradient(reference.reinforce)
    for loss_type in ("bnpo", "dapo", "cispo"):
        epsilon_high = {"epsilon_high": 1.0} if loss_type == "cispo" else {}
        torch.testing.assert_close(gradient(reference.grpo, loss_type=loss_type, **epsilon_high), expected)
    cispo, *_ = reference.grpo(hidden, P.weight, P.targets, loss_type="cispo", epsilon_high=1.0, **options)
    torch.testing.assert_close(cispo, reference.reinforce(hidden, P.weight, P.targets, **options)[0])
    torch.testing.assert_close(
        gradient(reference.grpo, loss_type="grpo", importance_sampling_level="sequence"),
        gradient(reference.grpo, loss_type="grpo"),
    )


def test_sequence_ratio_has_the_gradient_of_every_token():
    """d s / d logp_t = s / length, with the ratio not clipped: -A s / length over the two sequences of the
    mean."""
    logits = HIDDEN * WEIGHT.T  # the identity as a head, so that the hidden states are the logits
    logits = logits.detach().requires_grad_()
    eye = torch.eye(2, dtype=torch.float64)
    loss, *_ = reference.grpo(
        logits,
        eye,
        TARGETS,
        advantages=ADVANTAGES,
        old_logps=OLD,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )
    (grad,) = torch.autograd.grad(loss, logits)
    # Gradients of logp at the target's logit are 1 - p.
    assert grad[0, :, 1].tolist() == pytest.approx([-S / 2 * (1 - 3 / 4) / 2, S / 2 * (3 / 4) / 2])
    assert (grad[1] == 0).all()  # clipped


@pytest.mark.parametrize(
    "loss", [reference.grpo, reference.rloo, reference.reinforce], ids=["grpo", "rloo", "reinforce"]
)
def test_head_options_shape_the_logits(loss):
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(11, generator=generator, dtype=torch.float64)
    options = {"softcap": 3.0, "logit_scale": 0.7, "temperature": 1.7}
    logits = reference.head_logits(P.hidden, P.weight, bias, **options)
    eye = torch.eye(11, dtype=torch.float64)
    expected = loss(logits, eye, P.targets, advantages=P.advantages)
    torch.testing.assert_close(
        loss(P.hidden, P.weight, P.targets, advantages=P.advantages, bias=bias, **options), expected
    )
    assert not torch.equal(loss(P.hidden, P.weight, P.targets, advantages=P.advantages)[2], expected[2])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_does_not_count_does_not_matter(loss_type):
    """Not even NaN: padding of stored log-probabilities may hold anything."""
    options = {"loss_type": loss_type, "max_completion_length": 16, **OPTIONS["everything"]}
    expected = run_ours(**options)
    uncounted = ~(P.completion & P.tool)
    names = ("old_logps", "ref_logps", "sampling_logps", "importance_weights", "advantages")
    spoiled = {**options, "old_logps": P.old_logps}
    spoiled |= {name: spoiled[name].masked_fill(uncounted, math.nan) for name in names}
    found = run_ours(**spoiled)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_mask_is_ignore_index(loss_type, level):
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "max_completion_length": 16,
        **OPTIONS["everything"],
    }
    options["old_logps"] = P.old_logps
    masked = reference.grpo(P.hidden, P.weight, P.targets, mask=P.tool, **options)
    torch.testing.assert_close(
        reference.grpo(P.hidden, P.weight, P.targets.masked_fill(~P.tool, -100), **options), masked
    )
    renamed = P.targets.masked_fill(P.targets == -100, 99)
    torch.testing.assert_close(
        reference.grpo(P.hidden, P.weight, renamed, mask=P.tool, ignore_index=99, **options), masked
    )


# Extremes


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_huge_log_ratios_are_finite(dtype, loss_type, level, log_ratio):
    hidden, weight = P.hidden.to(dtype, copy=True).requires_grad_(), P.weight.to(dtype)
    old = (full_numbers(P.hidden, P)[0] - log_ratio).to(dtype)
    for corrected in (False, True):
        loss, metrics, _ = reference.grpo(
            hidden,
            weight,
            P.targets,
            advantages=P.advantages,
            old_logps=old,
            ref_logps=old,
            beta=0.1,
            use_bias_correction_kl=corrected,
            loss_type=loss_type,
            importance_sampling_level=level,
            max_completion_length=16,
        )
        (grad,) = torch.autograd.grad(loss, hidden)
        assert loss.isfinite() and grad.isfinite().all() and all(x.isfinite() for x in metrics.values())


@pytest.mark.parametrize("loss", [reference.grpo, reference.rloo], ids=["grpo", "rloo"])
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [(100, -2, 2 * math.exp(80)), (100, 2, -2.4), (-100, -2, 1.6), (-100, 2, -2 * math.exp(-80))],
)
def test_ratio_is_bounded_by_exp_80(loss, log_ratio, advantage, expected):
    hidden = HIDDEN[:1, :1].clone().requires_grad_()
    value, *_ = loss(
        hidden,
        WEIGHT,
        TARGETS[:1, :1],
        advantages=tensor([advantage]),
        old_logps=tensor([[LP[0] - log_ratio]]),
    )
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.grad(value, hidden)[0].item() == 0


def test_kl_is_bounded_above_only():
    hidden = HIDDEN[:1, :1].clone().requires_grad_()
    for d, expected, slope in ((100, math.exp(80) - 81, 0), (-100, 99, 1), (1, math.e - 2, 1 - math.e)):
        value, *_ = reference.grpo(
            hidden, WEIGHT, TARGETS[:1, :1], advantages=tensor([0]), beta=1.0, ref_logps=tensor([[LP[0] + d]])
        )
        assert value.item() == pytest.approx(expected)
        (grad,) = torch.autograd.grad(value, hidden)
        assert grad.item() == pytest.approx(slope * math.log(3) / 4)  # d logp / d hidden = (1 - 3/4) log 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nothing_counts(loss_type, level):
    hidden = P.hidden.clone().requires_grad_()
    options = {
        **OPTIONS["everything"],
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "max_completion_length": 16,
    }
    nothing = torch.full_like(P.targets, -100)
    loss, metrics, logps = reference.grpo(hidden, P.weight, nothing, **options)
    assert loss.item() == 0 and (torch.autograd.grad(loss, hidden)[0] == 0).all() and (logps == 0).all()
    assert all(x == 0 for name, x in metrics.items() if name != "vespo/phi_seq_mean")
    for other in (reference.rloo, reference.reinforce):
        loss, metrics, _ = other(hidden, P.weight, nothing, advantages=P.advantages)
        assert (
            loss.item() == 0
            and (torch.autograd.grad(loss, hidden)[0] == 0).all()
            and all(x == 0 for x in metrics.values())
        )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_sequence_without_tokens_counts_among_sequences_only(loss_type):
    options = {"loss_type": loss_type, "max_completion_length": 16}
    with_empty, without = run_ours(**options), run_ours(p=without_empty(P), **options)
    factor = 5 / 6 if loss_type in BY_SEQUENCE else 1
    torch.testing.assert_close(with_empty[0], factor * without[0])
    torch.testing.assert_close(with_empty[1][:-1], factor * without[1])
    assert (with_empty[1][-1] == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_token_a_sequence(trainers, loss_type):
    p = SimpleNamespace(
        **{name: x if name == "weight" or x.dim() == 1 else x[:, :1] for name, x in vars(P).items()}
    )
    common = {"loss_type": loss_type, "max_completion_length": 16}
    by_level = [run_ours(p=p, **common, importance_sampling_level=level) for level in LEVELS]
    torch.testing.assert_close(by_level[0][:2], by_level[1][:2])
    # With T = 1, TRL's metrics are means over sequences at the token level too, the one without tokens
    # included.
    torch.testing.assert_close(by_level[0][:2], run_trl(trainers.grpo, p, **common)[:2])
    shown = {name: x for name, x in by_level[0][2].items() if name.startswith("clip_ratio")}
    clipped = {name: 6 / 5 * x for name, x in by_level[1][2].items() if name.startswith("clip_ratio")}
    assert shown == pytest.approx(clipped)


def test_unknown_loss_type_is_an_error():
    with pytest.raises(ValueError, match="loss_type"):
        run_ours(loss_type="gpro")
