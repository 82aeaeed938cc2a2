"""Mixture of experts as a unit's block: every token goes to ``top_k`` of the experts, none is dropped."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.describe.units import ExpertsSpec
from brigata.model.mlp import MLP
from brigata.model.sequences import RouterLoad, Sequences


class AllTokens(nn.Module):
    """Where every token must be at hand: x (tokens, hidden) -> the same. Parallelism gathers here."""

    def forward(self, x: Tensor) -> Tensor:
        """Nothing to do where all tokens are here."""
        return x


class OwnTokens(nn.Module):
    """Where tokens go back to their owners: y (tokens, hidden) -> the same. Parallelism sums and cuts here."""

    def forward(self, y: Tensor) -> Tensor:
        """Nothing to do where all tokens are here."""
        return y


class Router(nn.Module):
    """x (tokens, hidden) -> weights (tokens, top_k) and chosen experts (tokens, top_k) int64.

    ``weight`` is (count, hidden); buffers (with ``balance_bias``): ``balance_bias`` (count,) fp32, added to the
    scores for the choice only, and ``load`` (count,), how often each expert was chosen since the last step.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        raise AssertionError("written by the experts helper")

    def forward(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Choose; append a ``RouterLoad`` to ``sequences.routing``."""
        raise AssertionError("written by the experts helper")


class ExpertProducts(nn.Module):
    """The routed experts' feed-forwards as grouped products over the inner width that is here.

    Parameters: gate (if gated) and up (count, ffn, hidden), down (count, hidden, ffn).
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        raise AssertionError("written by the experts helper")

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x (tokens, hidden) -> the weighted sum of each token's experts, (tokens, hidden)."""
        raise AssertionError("written by the experts helper")


class SharedExpert(MLP):
    """The expert every token goes to, scaled by sigmoid(x @ gate_weight.T) where ``spec`` has a shared gate."""


class BalanceLoss(nn.Module):
    """The load-balancing loss over all routers of a forward pass, times its coefficient; a scalar."""

    def __init__(self, experts: ExpertsSpec) -> None:
        super().__init__()
        self.coefficient = experts.aux_loss

    def forward(self, routing: Sequence[RouterLoad]) -> Tensor:
        """Source: Fedus et al., arXiv 2101.03961, over all layers at once, as in transformers."""
        raise AssertionError("written by the experts helper")


class Experts(nn.Module):
    """x (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        self.enter = AllTokens()
        self.router = Router(spec)
        self.products = ExpertProducts(spec)
        self.leave = OwnTokens()
        self.shared = SharedExpert(spec, spec.experts.shared_ffn) if spec.experts.shared_ffn else None

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Route each token and add what its experts make of it."""
        everyone = self.enter(x)
        y = self.leave(self.products(everyone, *self.router(everyone, sequences)))
        return y if self.shared is None else y + self.shared(x)
