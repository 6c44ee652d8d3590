"""The softmaxes whose normalizers the divergence kernel needs. Where there is a kernel for it, the products
with the heads compute them (`fused_projection.store`), elsewhere the divergence kernel itself."""

from typing import NamedTuple

from torch import Tensor

from logitless.kernels.head.transform import LogitTransform


class Softmaxes(NamedTuple):
    """The softmaxes of a chunk of logits whose normalizers its divergence needs."""

    head: LogitTransform
    bias: Tensor | None
    common: int  # columns of the softmax at the temperature
    plain: bool  # `is_plain`
    count: int  # 2: also that at temperature 1 over all columns


class Normalizers(NamedTuple):
    """Normalizers of the softmaxes of a chunk, from `fused_projection.store`.

    With e = 2^(log2(e) z - shift) of the logits z, a softmax has its shift, log2 of the sum of e, and the
    number of the first tile of columns with the largest logit.
    """

    values: Tensor  # (count, 3, C) fp32
    tile: int  # columns per tile


def is_plain(
    head: LogitTransform, teacher_head: LogitTransform, bias: Tensor | None, teacher_bias: Tensor | None
) -> bool:
    """Whether the logits of both are multiples of the products, in the same order."""
    plain = bias is None and teacher_bias is None and head.softcap is None and teacher_head.softcap is None
    return plain and min(head.logit_scale, teacher_head.logit_scale) > 0


def softmaxes_of_divergence(
    V: int,
    teacher_V: int,
    *,
    head: LogitTransform,
    teacher_head: LogitTransform,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
) -> tuple[Softmaxes, Softmaxes]:
    """The softmaxes of student and teacher."""
    common = min(V, teacher_V)
    plain = is_plain(head, teacher_head, bias, teacher_bias)
    taught = teacher_head._replace(temperature=head.temperature)
    count = 1 if head.temperature == 1.0 and common == V else 2
    return Softmaxes(head, bias, common, plain, count), Softmaxes(taught, teacher_bias, common, plain, 1)
