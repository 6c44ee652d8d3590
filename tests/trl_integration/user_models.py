"""Models of users, which train in stock TRL: forward passes and heads of their own, on the weights of
`tiny_model`."""

from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tiny import tiny_model


def stock(self, *args, **kwargs):
    """The forward pass of the class in transformers."""
    of_package = (cls for cls in type(self).__mro__ if cls.__module__.startswith("transformers."))
    return next(of_package).forward(self, *args, **kwargs)


def without_labels(self, input_ids=None, attention_mask=None, use_cache=None):
    return stock(self, input_ids, attention_mask)


def without_return_dict(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
    return stock(self, input_ids, attention_mask, labels=labels)


def without_cache(self, input_ids=None, attention_mask=None):
    return stock(self, input_ids, attention_mask)


def with_required_labels(self, input_ids, attention_mask, labels):
    return stock(self, input_ids, attention_mask, labels=labels)


# Stock TRL's SFT calls the backbone and passes by these two: without `position_ids` they would be another
# model of packed sequences.
def without_loss(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
    return CausalLMOutputWithPast(logits=stock(self, input_ids, attention_mask, position_ids).logits)


def returns_a_tuple(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
    out = stock(self, input_ids, attention_mask, position_ids, labels=labels)
    return (out.logits,) if labels is None else (out.loss, out.logits)


def returns_logits(self, *args, **kwargs):
    return stock(self, *args, **kwargs).logits


def with_a_loss_of_its_own(self, *args, labels=None, **kwargs):
    out = stock(self, *args, **kwargs)
    if labels is not None:
        out.loss = (out.logits**2).mean()
    return out


def with_a_mapped_loss(self, *args, **kwargs):
    self.loss_type = "logitless_test"
    return stock(self, *args, **kwargs)


def mean_square(logits: Tensor, labels: Tensor, **kwargs) -> Tensor:
    return (logits**2).mean()


def writes_into_logits(self, *args, **kwargs):
    out = stock(self, *args, **kwargs)
    out.logits[..., 0] = -1e4
    return out


def returns_the_last_logits(self, *args, **kwargs):
    return stock(self, *args, **kwargs, logits_to_keep=1)


LOSS_MAPPING["logitless_test"] = mean_square
# What stock TRL trains, and so does the flag
TRAINED = {
    forward.__name__: forward
    for forward in (
        without_labels,
        without_return_dict,
        without_cache,
        with_required_labels,
        without_loss,
        returns_a_tuple,
        returns_logits,
        with_a_loss_of_its_own,
        with_a_mapped_loss,
    )
}
# What TRL's fused head does not call, and the flag refuses
REFUSED = {forward.__name__: forward for forward in (writes_into_logits, returns_the_last_logits)}


def subclass(forward, model: PreTrainedModel | None = None) -> PreTrainedModel:
    """The model, as one of a subclass with this forward pass."""
    model = tiny_model() if model is None else model
    model.__class__ = type(forward.__name__, (type(model),), {"forward": forward})
    return model


# --- heads


class Projection(nn.Linear):
    """A subclass with the forward pass of nn.Linear."""


def with_subclass(model: PreTrainedModel) -> PreTrainedModel:
    model.lm_head.__class__ = Projection
    return model


def with_weight_norm(model: PreTrainedModel) -> PreTrainedModel:
    parametrizations.weight_norm(model.lm_head)
    return model


HEADS = {change.__name__: change for change in (with_subclass, with_weight_norm)}
