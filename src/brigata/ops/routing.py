"""Which experts a token goes to, and with what weights."""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """T tokens, k experts each, E experts in all.

    Attributes:
        weights: (T, k), of each chosen expert's output; differentiable.
        chosen: (T, k) int64.
        probabilities: (T, E), of all experts; differentiable.
    """

    weights: Tensor
    chosen: Tensor
    probabilities: Tensor


def route_softmax(logits: Tensor, top_k: int, normalize: bool) -> Routing:
    """Softmax over all experts, then the ``top_k`` most probable.

    logits (T, E), in fp32 or better. ``normalize``: a token's weights are scaled to sum to 1. Source: Jiang
    et al., arXiv 2401.04088 (Mixtral).
    """
    probabilities = logits.softmax(-1)
    weights, chosen = probabilities.topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(weights, chosen, probabilities)


def route_sigmoid(
    logits: Tensor, bias: Tensor | None, top_k: int, normalize: bool, groups: int, top_groups: int
) -> Routing:
    """A score of its own for each expert; the choice, not the weights, sees ``bias``.

    Experts form ``groups`` groups of neighbours; a token chooses among the ``top_groups`` groups whose two
    best experts have the largest sum. Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.

    Args:
        logits: (T, E), in fp32 or better.
        bias: (E,), added to the scores for the choice; None: nothing is.
        top_k: experts a token.
        normalize: a token's weights are scaled to sum to 1.
        groups: of experts.
        top_groups: groups that a token may choose from.
    """
    scores = logits.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias
    if top_groups < groups:
        grouped = choice.view(len(choice), groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed[..., None], -torch.inf).view_as(choice)
    chosen = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(weights, chosen, scores)


def expert_counts(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen: chosen (T, k) int64 -> (experts,) int64."""
    return torch.bincount(chosen.flatten(), minlength=experts)


def balancing_loss(chosen: Tensor, probability: Tensor, tokens: int, experts: int) -> Tensor:
    """experts * sum over experts of (share of tokens that chose it) * (its mean probability); a scalar.

    1 * top_k where all experts are chosen alike. Source: Fedus et al., arXiv 2101.03961, equations 4 to 6,
    with top_k choices a token.

    Args:
        chosen: (experts,) choices of each expert.
        probability: (experts,) sum over tokens of its probability; differentiable.
        tokens: over which both were counted.
        experts: number of them.
    """
    return experts * (chosen / tokens * (probability / tokens)).sum()
