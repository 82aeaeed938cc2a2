"""Normalisation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    """y = w * x / rms(x), with the backward written out: five passes over the tokens instead of a dozen.

    x (tokens, hidden), w (hidden,) in fp32 or better; r = 1 / rms is (tokens, 1). x is kept as it came, and
    widened anew in the backward::

        dw = sum over tokens of dy * x * r
        dx = r * (g - x * r^2 * mean(g * x))      with g = dy * w
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(weight.dtype)
        scale = (_dot(wide, wide) / x.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        narrow, weight, scale = ctx.saved_tensors
        x, dy = narrow.to(weight.dtype), grads[0].to(weight.dtype)
        dx = dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.mv((dy * x).t(), scale[:, 0])
        if ctx.needs_input_grad[0]:
            g = dy * weight
            pull = scale.square() * _dot(g, x) / x.shape[-1]
            dx = g.addcmul_(x, pull, value=-1).mul_(scale).to(narrow.dtype)
        return dx, dw, None


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each token: (tokens, hidden) twice -> (tokens, 1)."""
    return torch.linalg.vecdot(a, b)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float, from_one: bool = False) -> Tensor:
    """Divide the last dim by its root mean square and scale by ``weight``, or by 1 + weight (``from_one``).

    x (..., hidden), weight (hidden,) -> (..., hidden) in x's dtype; computed in fp32 or better.
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    scale = weight.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    normed: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), scale + 1 if from_one else scale, eps)
    return normed.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Centre the last dim, divide it by its standard deviation, scale and shift.

    x (..., hidden), weight and bias (hidden,) -> (..., hidden) in x's dtype; computed in fp32 or better.
    Source: Ba et al., arXiv 1607.06450.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return F.layer_norm(wide, x.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps).to(x.dtype)
