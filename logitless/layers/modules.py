"""The fused operators as modules, for models of your own.

Parameters have the names of transformers' models: `weight`, `bias`, `gate_proj`, `up_proj`, `down_proj`. A
state dict of such a model loads, and a checkpoint of these modules loads there.
"""

import torch
from torch import Tensor, nn

from logitless.errors import value_error
from logitless.kernels.operands import check_choice
from logitless.layers.gated import ACTIVATIONS, gated
from logitless.layers.norm import ROUNDINGS, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from logitless.layers.rope import rope


class RMSNorm(nn.Module):
    """Root-mean-square normalization of the last dimension, `rms_norm`.

    Args:
        hidden_size: H, the size of the last dimension.
        eps: added to the mean square.
        rounding: "llama", "single" or "gemma", as in `rms_norm`. With "gemma", the weight starts at 0, since
            1 + weight is the factor.
        device, dtype: of the weight.

    Shape:
        Input (..., H), output (..., H). With a `residual` (..., H), the output is (y, h), as in
        `add_rms_norm`: h = residual + x, y = norm(h).

    Examples:
        >>> norm = RMSNorm(64)
        >>> x, residual = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
        >>> y, h = norm(x, residual)
        >>> torch.equal(h, residual + x), torch.allclose(y, norm(h))
        (True, True)
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        rounding: str = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_choice("rounding", rounding, ROUNDINGS)
        self.eps = eps
        self.rounding = rounding
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.rounding == "gemma" else 1.0)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        options = {"eps": self.eps, "rounding": self.rounding}
        if residual is None:
            return rms_norm(x, self.weight, **options)
        return add_rms_norm(x, residual, self.weight, **options)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, rounding={self.rounding!r}"


class LayerNorm(nn.Module):
    """Layer normalization of the last dimension, `layer_norm`.

    Args:
        hidden_size: H, the size of the last dimension.
        eps: added to the variance.
        bias: whether there is a bias.
        device, dtype: of the parameters.

    Shape:
        Input (..., H), output (..., H). With a `residual` (..., H), the output is (y, h), as in
        `add_layer_norm`: h = residual + x, y = norm(h).
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return layer_norm(x, self.weight, self.bias, eps=self.eps)
        return add_layer_norm(x, residual, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class GatedMLP(nn.Module):
    """A gated MLP, `down_proj(act(gate_proj(x)) * up_proj(x))`; the base class of `SwiGLU` and `GeGLU`.

    Args:
        hidden_size: H.
        intermediate_size: I.
        activation: "silu", "gelu_tanh" or "gelu_erf", as in `gated`.
        bias: whether the three linear layers have a bias.
        device, dtype: of the parameters.

    Shape:
        Input (..., H), output (..., H). The activations (..., I) of the gate are not saved for the backward
        pass, which computes them again.

    Reference: Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), activation=self.activation))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class SwiGLU(GatedMLP):
    """A `GatedMLP` with SiLU, as in Llama, Qwen and Mistral.

    Examples:
        >>> SwiGLU(64, 172)(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, **options):
        super().__init__(hidden_size, intermediate_size, "silu", bias, **options)


class GeGLU(GatedMLP):
    """A `GatedMLP` with GELU.

    Args:
        approximate: "tanh", as in Gemma, or "none", the error function; as in `torch.nn.GELU`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        approximate: str = "tanh",
        bias: bool = False,
        **options,
    ):
        check_choice("approximate", approximate, ("tanh", "none"))
        activation = "gelu_tanh" if approximate == "tanh" else "gelu_erf"
        super().__init__(hidden_size, intermediate_size, activation, bias, **options)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries and keys, `rope`, with the angles of RoFormer.

    Args:
        head_dim: D, the size of a head.
        base: the largest period is about 2 pi base.
        rotary_dim: R, the number of elements of a head that are rotated, even; None means D.
        interleaved: whether a pair is two neighbouring elements (RoFormer, GLM, Cohere), rather than one
            element of each half (Llama).

    Shape:
        q (B, heads, T, D), k (B, key heads, T, D) or None, position_ids (T,) or (B, T). Returns rotated q and
        k. The default of position_ids is 0 to T - 1.

    The angles are computed in fp32 in every call: no buffer is saved in a state dict or cast with the model.

    Examples:
        >>> q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
        >>> rotated_q, rotated_k = RotaryEmbedding(16)(q, k)
        >>> torch.equal(rotated_q[:, :, 0], q[:, :, 0])  # position 0
        True
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
    ):
        super().__init__()
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if not 0 < self.rotary_dim <= head_dim or self.rotary_dim % 2:
            expected = f"an even number from 2 to head_dim {head_dim}"
            raise value_error("rotary_dim", expected, self.rotary_dim, "pass the elements that are rotated")
        self.head_dim = head_dim
        self.base = base
        self.interleaved = interleaved

    def forward(
        self, q: Tensor, k: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if q.shape[-1] != self.head_dim:
            expected = f"heads of head_dim {self.head_dim}"
            raise value_error("q", expected, tuple(q.shape), "pass q of shape (B, heads, T, head_dim)")
        if position_ids is None:
            position_ids = torch.arange(q.shape[2], device=q.device)
        exponents = torch.arange(0, self.rotary_dim, 2, device=q.device, dtype=torch.float32)
        frequencies = self.base ** (-exponents / self.rotary_dim)
        angles = position_ids.to(q.device, torch.float32)[..., None] * frequencies
        options = {"rotary_dim": self.rotary_dim, "interleaved": self.interleaved}
        return rope(q, k, angles.cos(), angles.sin(), **options)

    def extra_repr(self) -> str:
        rotated = f"rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"
        return f"{self.head_dim}, base={self.base}, {rotated}"
