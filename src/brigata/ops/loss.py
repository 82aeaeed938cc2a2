"""Losses."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Target of a position that does not count."""


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over tokens of the negative log-likelihood of the targets (nats), in fp32 or better.

    logits (tokens, vocab), targets (tokens,); targets equal to ``IGNORED`` do not count. A sum, not a mean:
    the caller divides by the number of tokens of the whole batch, which no single rank sees.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, reduction="sum", ignore_index=IGNORED)
