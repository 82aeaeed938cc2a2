"""Rotary position embedding, half-split: element i turns with element i + rotary_dim / 2."""

from typing import Any

import torch
from torch import Tensor

from brigata.describe.units import RopeScaling
from brigata.ops.rope_scaling import rotary_frequencies


def rotary_tables(
    positions: Tensor, dim: int, theta: float, like: Tensor, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles: each positions.shape + (dim / 2,) in ``like``'s dtype, on its device.

    Angles are computed in fp64, so that positions beyond 2**24 / theta keep their precision.
    Source: Su et al., arXiv 2104.09864.

    Args:
        positions: int64, of any shape.
        dim: elements of a head that turn.
        theta: base of the frequencies.
        like: gives dtype and device.
        scaling: how frequencies are stretched; rules that depend on the length take the largest position + 1.
    """
    reach = scaling is not None and scaling.kind in ("dynamic", "longrope") and positions.numel() > 0
    length = int(positions.max()) + 1 if reach else 0
    frequencies, factor = rotary_frequencies(dim, theta, scaling, length, like.device)
    angles = positions.to(torch.float64)[..., None] * frequencies
    return tuple((x * factor).to(like.dtype) for x in (angles.cos(), angles.sin()))  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    """Turn every pair of elements by its position's angle; the backward turns back (and scales alike).

    x (..., length, heads, head_dim), cos and sin (..., length, rotary_dim / 2) -> like x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos[..., None, :], sin[..., None, :])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(dy, cos, -sin), None, None  # type: ignore[no-untyped-call]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half : 2 * half]).addcmul_(first, sin)
    turned[..., 2 * half :] = x[..., 2 * half :]
    return turned


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to the leading elements of each head, twice as many as the tables are wide.

    x (count, length, heads, head_dim), tables (length, rotary_dim / 2) or (count, length, rotary_dim / 2)
    -> like x.
    """
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]
