"""Normalisation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """y = w * x / rms(x), with the backward written out: five passes over the tokens instead of a dozen.

    x (tokens, hidden), w (hidden,); r = 1 / rms is (tokens, 1)::

        dw = sum over tokens of dy * x * r
        dx = r * (g - x * r^2 * mean(g * x))      with g = dy * w
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (_dot(x, x) / x.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        (dy,) = grads
        dx = dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.mv((dy * x).t(), scale[:, 0])
        if ctx.needs_input_grad[0]:
            g = dy * weight
            pull = scale.square() * _dot(g, x) / x.shape[-1]
            dx = g.addcmul_(x, pull, value=-1).mul_(scale)
        return dx, dw, None


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each token: (tokens, hidden) twice -> (tokens, 1)."""
    return torch.linalg.vecdot(a, b)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float, from_one: bool = False) -> Tensor:
    """Divide the last dim by its root mean square and scale by ``weight``, or by 1 + weight (``from_one``).

    x (..., hidden), weight (hidden,) -> (..., hidden) in x's dtype; computed in fp32 or better.
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    scale = weight.to(wide.dtype)
    normed: Tensor = _RMSNorm.apply(wide.reshape(-1, x.shape[-1]), scale + 1 if from_one else scale, eps)
    return normed.view(x.shape).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Centre the last dim, divide it by its standard deviation, scale and shift.

    x (..., hidden), weight and bias (hidden,) -> (..., hidden) in x's dtype; computed in fp32 or better.
    Source: Ba et al., arXiv 1607.06450.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return F.layer_norm(wide, x.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps).to(x.dtype)
