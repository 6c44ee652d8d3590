"""Loss types and divergences of `DPOLoss` by TRL's names, as functions of the pairs' log-probabilities."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from logitless.losses.numerics import bounded_exp, sigmoid
from logitless.losses.preference import smoothed

DPOType = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
    "sft",
]
# Remedies for names that are not loss types.
OTHER_NAMES = {
    "dpo": "DPO is 'sigmoid'",
    "simpo": "take SimPOLoss",
    "orpo": "take ORPOLoss",
    "cpo": "take CPOLoss",
    "kto": "take KTOLoss",
}
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


class DPOOptions(Protocol):
    """The fields of `DPOLoss` that the functions in this file use."""

    beta: float
    label_smoothing: float
    discopop_tau: float
    f_alpha_divergence_coef: float


class Pairs(NamedTuple):
    """Log-probabilities under policy and reference, f-divergence scores of their log-ratios, and lengths.

    Each field has shape (pairs,).
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_scores: Tensor
    rejected_scores: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    @property
    def chosen(self) -> Tensor:
        """(pairs,) log-ratios log(policy / reference) of the chosen sequences."""
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected(self) -> Tensor:
        """(pairs,) log-ratios log(policy / reference) of the rejected sequences."""
        return self.rejected_logps - self.ref_rejected_logps

    @property
    def delta(self) -> Tensor:
        return self.chosen_scores - self.rejected_scores

    def averaged(self) -> "Pairs":
        """The pairs with all log-probabilities and scores divided by the lengths of their sequences."""
        *sums, chosen, rejected = self
        means = [x / (rejected if i % 2 else chosen) for i, x in enumerate(sums)]
        return Pairs(*means, chosen, rejected)


def exo_pair(loss: DPOOptions, p: Pairs) -> Tensor:
    x = loss.beta * p.delta
    epsilon = loss.label_smoothing
    better = x.sigmoid() * (logsigmoid(x) - math.log1p(-epsilon))
    return better + (-x).sigmoid() * (logsigmoid(-x) - math.log(epsilon))


def nca_pair(loss: DPOOptions, p: Pairs) -> Tensor:
    better, worse = loss.beta * p.chosen, loss.beta * p.rejected
    return -logsigmoid(better) - 0.5 * logsigmoid(-better) - 0.5 * logsigmoid(-worse)


def robust(loss: DPOOptions, p: Pairs) -> Tensor:
    x = loss.beta * p.delta
    epsilon = loss.label_smoothing
    return (epsilon * logsigmoid(-x) - (1 - epsilon) * logsigmoid(x)) / (1 - 2 * epsilon)


def aot(loss: DPOOptions, p: Pairs) -> Tensor:
    policy, reference = p.chosen_logps - p.rejected_logps, p.ref_chosen_logps - p.ref_rejected_logps
    return smoothed(loss.beta * (policy.sort().values - reference.sort().values), loss.label_smoothing)


def aot_unpaired(loss: DPOOptions, p: Pairs) -> Tensor:
    return smoothed(loss.beta * (p.chosen.sort().values - p.rejected.sort().values), loss.label_smoothing)


def discopop(loss: DPOOptions, p: Pairs) -> Tensor:
    x = loss.beta * p.delta
    gate = (x / loss.discopop_tau).sigmoid()
    return (gate - 1) * logsigmoid(x) + gate * bounded_exp(-x)


# "sft" is missing here: it is a mean over tokens, which `DPOLoss.terms` computes.
DPO_LOSSES: Mapping[str, Callable[[DPOOptions, Pairs], Tensor]] = {
    "sigmoid": lambda loss, p: smoothed(loss.beta * p.delta, loss.label_smoothing),
    "hinge": lambda loss, p: relu(1 - loss.beta * p.delta),
    "ipo": lambda loss, p: (p.delta - 0.5 / loss.beta).square(),
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": lambda loss, p: -logsigmoid(loss.beta * p.chosen) - logsigmoid(-loss.beta * p.rejected),
    "sppo_hard": lambda loss, p: (
        (p.chosen - 0.5 / loss.beta).square() + (p.rejected + 0.5 / loss.beta).square()
    ),
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": lambda loss, p: sigmoid(-loss.beta * p.chosen) + sigmoid(loss.beta * p.rejected),
    "apo_down": lambda loss, p: sigmoid(loss.beta * p.chosen) + sigmoid(loss.beta * (p.rejected - p.chosen)),
    "discopop": discopop,
    "sigmoid_norm": lambda loss, p: -logsigmoid(loss.beta * p.delta),
}
DPO_TYPES = (*DPO_LOSSES, "sft")
# Loss types that TRL computes from means over the tokens of a sequence; the other types use sums.
AVERAGED = frozenset({"ipo", "sigmoid_norm"})
# Loss types that sort the log-ratios of the whole batch.
SORTED = frozenset({"aot", "aot_unpaired"})
# Loss types that depend only on the difference of a pair's scores. The partition function cancels in this
# difference for every divergence. In the other loss types it can be omitted only for the reverse KL.
DIFFERENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")


def alpha_divergence(loss: DPOOptions, ratios: Tensor) -> Tensor:
    power = loss.f_alpha_divergence_coef - 1
    return ratios if abs(power) < 1e-6 else (bounded_exp(power * ratios) - 1) / power


# f'(t) of each divergence at t = exp(log-ratio), up to a constant.
DIVERGENCES: Mapping[str, Callable[[DPOOptions, Tensor], Tensor]] = {
    "reverse_kl": lambda loss, ratios: ratios,
    "forward_kl": lambda loss, ratios: 1 - bounded_exp(-ratios),
    "js_divergence": lambda loss, ratios: math.log(2) + logsigmoid(ratios),
    "alpha_divergence": alpha_divergence,
}
