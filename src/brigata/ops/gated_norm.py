"""Mamba-2's norm of a gated output."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _GatedNorm(torch.autograd.Function):
    """w * u / rms(u) with u = y * silu(z); saves its inputs and one number a token and group.

    y and z (T, G, K), w (G, K); r = 1 / rms is (T, G, 1)::

        dw = sum over tokens of dout * u * r
        du = r * (g - u * r^2 * mean(g * u))      with g = dout * w
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        gated = F.silu(z.to(weight.dtype)).mul_(y)
        scale = (torch.linalg.vecdot(gated, gated)[..., None] / y.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(y, z, weight, scale)
        return gated.mul_(scale).mul_(weight).to(y.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight, scale = ctx.saved_tensors
        wide = z.to(weight.dtype)
        gate = F.silu(wide)
        gated = gate * y
        g = grads[0].to(weight.dtype)
        dweight = (g * gated * scale).sum(0)
        g = g * weight
        pull = scale.square() * torch.linalg.vecdot(g, gated)[..., None] / y.shape[-1]
        g.addcmul_(gated, pull, value=-1).mul_(scale)
        dz = torch.ops.aten.silu_backward(g * y, wide)
        return (g * gate).to(y.dtype), dz.to(z.dtype), dweight, None


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """RMSNorm of y * silu(z) within each group of neighbouring channels, scaled by ``weight``.

    y and z (tokens, channels), weight (channels,) -> (tokens, channels) in y's dtype; in fp32 or better.
    Source: Dao and Gu, arXiv 2405.21060, section 7.
    """
    wide = weight.to(torch.float64 if y.dtype == torch.float64 else torch.float32)
    cut = (t.unflatten(-1, (groups, -1)) for t in (y, z, wide))
    return _GatedNorm.apply(*cut, eps).flatten(1)  # type: ignore[no-any-return]
