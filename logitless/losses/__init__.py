"""The losses, and the base classes for custom losses.

Each file contains one family of losses, with its terms, inputs and checks. `base` contains the base classes
for custom losses. `linear` implements the call of all losses with one head, `multi_head` that of losses with
several heads, and `heads` converts LM head modules to tensors. `declarations` checks class declarations,
`arguments` the arguments of a call, and `inputs` has the types of the arguments that several losses share.
The public names are exported by `logitless`. Users, `tools`, `models`, `integrations` and the trainers call
the losses.
"""

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.plan import BudgetWarning, Plan
from logitless.engine.sampling_mask import SamplingMask
from logitless.engine.terms import Term
from logitless.losses.base import LogitsLoss, LossOutput, TokenLoss
from logitless.losses.counting import count_targets
from logitless.losses.cross_entropy import CrossEntropyLoss, linear_cross_entropy
from logitless.losses.distillation import DistillationLoss, JSDLoss
from logitless.losses.dpo import DPOLoss
from logitless.losses.grpo import GRPOLoss, PPOLoss
from logitless.losses.kto import KTOLoss
from logitless.losses.logprobs import TokenLogprobs, linear_logprobs
from logitless.losses.medusa import MedusaHeads, MedusaLoss
from logitless.losses.multi_token import MultiTokenLoss
from logitless.losses.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from logitless.losses.rloo import REINFORCELoss, RLOOLoss
from logitless.losses.sampler_correction import SamplerCorrection
from logitless.losses.several_ids import TopkLogprobs, linear_topk
from logitless.losses.speculator import SpeculatorLoss
from logitless.parallel.normalizers import global_num_items

__all__ = [
    "Batch",
    "BudgetWarning",
    "CPOLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DistillationLoss",
    "GRPOLoss",
    "JSDLoss",
    "KTOLoss",
    "LogitsLoss",
    "LossOutput",
    "MedusaHeads",
    "MedusaLoss",
    "MultiTokenLoss",
    "ORPOLoss",
    "PPOLoss",
    "Plan",
    "REINFORCELoss",
    "RLOOLoss",
    "SamplerCorrection",
    "SamplingMask",
    "SimPOLoss",
    "SpeculatorLoss",
    "Term",
    "TokenLogprobs",
    "TokenLoss",
    "TokenStats",
    "TopkLogprobs",
    "count_targets",
    "global_num_items",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_topk",
]
