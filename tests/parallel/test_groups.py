"""What needs no process group: names of groups that are refused, parameters that are no DTensor, and the
equality of sequences."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from logitless.parallel.groups import is_dtensor, local_parameter, process_group
from logitless.parallel.sequences import WHOLE_SEQUENCES, SlicedSequences, WholeSequences


def test_a_plain_parameter_is_multiplied_with_as_it_is():
    for x in (torch.randn(3, 2), nn.Parameter(torch.randn(3, 2)), None):
        assert local_parameter("weight", x, None) is x
        assert local_parameter("weight", x, "a group") is x


def test_a_subclass_that_holds_its_own_numbers_is_as_good():
    class Named(torch.Tensor):
        pass

    x = torch.randn(3, 2).as_subclass(Named)
    assert local_parameter("weight", x, None) is x


def test_a_quantized_parameter_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(3, 2), torch.randn(3, 2))
    with pytest.raises(
        TypeError, match=r"^weight: expected a dense tensor or a DTensor, got TwoTensor; dequantize it"
    ):
        local_parameter("weight", x, None)


@pytest.mark.parametrize(
    "x", [None, 3, "weight", torch.ones(2, device="cpu"), nn.Parameter(torch.ones(2, device="cpu"))], ids=str
)
def test_what_is_no_dtensor(x):
    assert not is_dtensor(x)


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("name", ["tp_group", "cp_group"])
def test_groups_that_are_none(name):
    weight = torch.randn(3, 2)
    message = rf"^{name}: expected a dimension of weight's device mesh, one of \(\), got 'tp'; or pass a Proc"
    with pytest.raises(ValueError, match=message):
        process_group(name, "tp", weight)
    message = rf"^{name}: expected a ProcessGroup, a DeviceMesh or the name of a mesh dimension, got int; "
    with pytest.raises(TypeError, match=message):
        process_group(name, 3, weight)


def test_sequences_are_equal_by_value():
    """They key compiled functions."""
    assert WholeSequences() == WHOLE_SEQUENCES and hash(WholeSequences()) == hash(WHOLE_SEQUENCES)
    assert SlicedSequences("a") == SlicedSequences("a") != SlicedSequences("b")
    assert SlicedSequences("a") != WHOLE_SEQUENCES
    assert pickle.loads(pickle.dumps(WHOLE_SEQUENCES)) == WHOLE_SEQUENCES
    with pytest.raises(AttributeError):
        SlicedSequences("a").group = "b"
