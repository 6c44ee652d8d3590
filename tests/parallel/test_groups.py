"""What needs no process group: names of groups that are refused, parameters that are no DTensor, and the
equality of `WholeSequences` and `SlicedSequences`."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from logitless.parallel.groups import local_parameter, process_group
from logitless.parallel.sequences import WHOLE_SEQUENCES, SlicedSequences, WholeSequences


def test_a_dense_parameter_is_taken_as_it_is():
    class Named(torch.Tensor):
        pass

    x = torch.randn(3, 2)
    for parameter in (x, nn.Parameter(x), x.as_subclass(Named), None):
        assert local_parameter("weight", parameter, None) is parameter
        assert local_parameter("weight", parameter, "a group") is parameter


def test_a_quantized_parameter_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(3, 2), torch.randn(3, 2))
    with pytest.raises(
        TypeError, match=r"^weight: expected a dense tensor or a DTensor, got TwoTensor; dequantize it"
    ):
        local_parameter("weight", x, None)


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
