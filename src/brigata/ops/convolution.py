"""The short causal convolution of Mamba's inputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def _before(segments: Tensor | None, distance: int) -> Tensor | None:
    """Whether the token ``distance`` before is of the same segment: (b, l - distance, 1); None: all are."""
    if segments is None:
        return None
    return (segments[:, distance:] == segments[:, :-distance])[..., None]


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
    """Before the activation: (b, l, channels)."""
    taps = weight.shape[1]
    total = x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])
    for distance in range(1, min(taps, x.shape[1])):
        same, earlier = _before(segments, distance), x[:, :-distance]
        if same is not None:
            earlier = earlier * same
        total[:, distance:].addcmul_(earlier, weight[:, -1 - distance])
    return total


class _CausalConvolution(torch.autograd.Function):
    """silu(bias + sum over taps of weight[:, -1 - d] * x[t - d]); saves its input only.

    x (b, l, channels), weight (channels, taps), bias (channels,) or None -> (b, l, channels).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.segments = segments
        return F.silu(_convolve(x, weight, bias, segments), inplace=True)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        segments, taps = ctx.segments, weight.shape[1]
        d = torch.ops.aten.silu_backward(grads[0], _convolve(x, weight, bias, segments))
        dx = d * weight[:, -1]
        dweight = torch.zeros_like(weight)
        dweight[:, -1] = (d * x).sum((0, 1))
        for distance in range(1, min(taps, x.shape[1])):
            same, later = _before(segments, distance), d[:, distance:]
            if same is not None:
                later = later * same
            dx[:, :-distance].addcmul_(later, weight[:, -1 - distance])
            dweight[:, -1 - distance] = (later * x[:, :-distance]).sum((0, 1))
        return dx, dweight, None if bias is None else d.sum((0, 1)), None


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None = None
) -> Tensor:
    """Depthwise convolution over each token and the ``taps - 1`` before it, then SiLU.

    Args:
        x: (sequences, length, channels).
        weight: (channels, taps), the last tap is the token's own; cast to x's dtype.
        bias: (channels,) or None.
        segments: (sequences, length) int64: no tap reaches into another segment; None: there is one.
    """
    bias = None if bias is None else bias.to(x.dtype)
    return _CausalConvolution.apply(x, weight.to(x.dtype), bias, segments)  # type: ignore[no-any-return]
