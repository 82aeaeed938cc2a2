"""Rotary position embedding, in the half-split convention (element i turns with element i + head_dim / 2)."""

from typing import Any

import torch
from torch import Tensor


def rotary_tables(seq_len: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles: each (seq_len, head_dim / 2) in ``like``'s dtype, on its device.

    Angles are computed in fp64, so that positions beyond 2**24 / theta keep their precision.
    Source: Su et al., arXiv 2104.09864.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device) / head_dim
    positions = torch.arange(seq_len, dtype=torch.float64, device=like.device)
    angles = torch.outer(positions, theta**-exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class _Rotate(torch.autograd.Function):
    """Turn every pair of elements by its position's angle; the backward turns back.

    x (batch, seq, heads, head_dim), cos and sin (seq, head_dim / 2) -> like x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos[:, None], sin[:, None])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos[:, None], -sin[:, None]), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half:]).addcmul_(first, sin)
    return turned


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding: x (batch, seq, heads, head_dim), tables (seq, head_dim / 2) -> like x."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]
