"""AdamW with warm-up and cosine decay."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from brigata.describe.job import Job


def build_optimizer(job: Job, parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over ``parameters``, whole or DTensors; weight decay on matrices only, as is the habit."""
    train = job.train
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def learning_rate(job: Job, step: int) -> float:
    """Learning rate of ``step`` (0-based): linear warm-up, then a cosine to ``min_lr_ratio`` of the peak."""
    train, warmup = job.train, job.warmup
    if step < warmup:
        return train.lr * (step + 1) / warmup
    progress = (step - warmup) / max(train.steps - 1 - warmup, 1)
    return train.lr * (
        train.min_lr_ratio + (1 - train.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    )
