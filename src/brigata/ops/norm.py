"""Normalisation."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each token by its root mean square and scale by ``weight``.

    x (tokens, hidden), weight (hidden,) -> (tokens, hidden) in x's dtype; computed in fp32 or better.
    Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)
