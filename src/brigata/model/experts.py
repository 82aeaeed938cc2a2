"""Mixture of experts as a unit's block: every token goes to ``top_k`` of the experts, none is dropped."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.describe.units import ExpertsSpec
from brigata.model.mlp import MLP
from brigata.model.sequences import RouterLoad, Sequences
from brigata.ops.grouped import expert_feed_forward
from brigata.ops.routing import balancing_loss, expert_counts, route_sigmoid, route_softmax


class AllTokens(nn.Module):
    """Where every token must be at hand: x (tokens, hidden) -> the same. Parallelism gathers here."""

    def forward(self, x: Tensor) -> Tensor:
        """Nothing to do where all tokens are here."""
        return x


class OwnTokens(nn.Module):
    """Where tokens go back to their owners: y (tokens, hidden) -> the same. Parallelism sums here."""

    def forward(self, y: Tensor) -> Tensor:
        """Nothing to do where all tokens are here."""
        return y


class Router(nn.Module):
    """x (tokens, hidden) -> weights (tokens, top_k) and chosen experts (tokens, top_k) int64.

    ``weight`` is (count, hidden); buffers (with ``balance_bias``): ``balance_bias`` (count,) fp32, added to
    the scores for the choice only, and ``load`` (count,), how often each expert was chosen since the last
    step.
    """

    balance_bias: Tensor
    load: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        self.experts = spec.experts
        self.weight = nn.Parameter(torch.empty(self.experts.count, spec.hidden))
        if self.experts.balance_bias:
            self.register_buffer("balance_bias", torch.zeros(self.experts.count))
            self.register_buffer("load", torch.zeros(self.experts.count), persistent=False)

    def forward(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Choose; append a ``RouterLoad`` to ``sequences.routing``."""
        experts = self.experts
        wide = x if x.dtype == torch.float64 else x.float()
        logits = F.linear(wide, self.weight.to(wide.dtype))
        if experts.router == "softmax":
            routing = route_softmax(logits, experts.top_k, experts.normalize)
        else:
            bias = self.balance_bias.to(wide.dtype) if experts.balance_bias else None
            routing = route_sigmoid(
                logits, bias, experts.top_k, experts.normalize, experts.groups, experts.top_groups
            )
        counts = expert_counts(routing.chosen, experts.count)
        if experts.balance_bias and self.training and torch.is_grad_enabled():
            self.load += counts
        sequences.routing.append(RouterLoad(counts, routing.probabilities.sum(0), len(x)))
        return routing.weights * experts.scale, routing.chosen


@torch.no_grad()
def update_balance(router: Router, load: Tensor) -> None:
    """Raise the bias of experts chosen less often than the mean, lower that of the others; forget the load.

    load (count,): choices since the last step, over all data. Source: Wang et al., arXiv 2408.15664.
    """
    router.balance_bias += router.experts.balance_rate * torch.sign(load.mean() - load)
    router.load.zero_()


class ExpertProducts(nn.Module):
    """The routed experts' feed-forwards as grouped products over the inner width that is here.

    Parameters: gate (if gated) and up (count, ffn, hidden), down (count, hidden, ffn).
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        count, ffn = spec.experts.count, spec.experts.ffn
        self.kind = spec.mlp
        self.gate = nn.Parameter(torch.empty(count, ffn, spec.hidden)) if spec.gated else None
        self.up = nn.Parameter(torch.empty(count, ffn, spec.hidden))
        self.down = nn.Parameter(torch.empty(count, spec.hidden, ffn))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x (tokens, hidden) -> the weighted sum of each token's experts, (tokens, hidden)."""
        return expert_feed_forward(self.kind, x, weights, chosen, self.gate, self.up, self.down)


class SharedExpert(MLP):
    """The expert every token goes to, scaled by sigmoid(x @ gate_weight.T) where there is a shared gate."""

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.experts is not None
        super().__init__(spec, spec.experts.shared_ffn)
        gated = spec.experts.shared_gate
        self.gate_weight = nn.Parameter(torch.empty(1, spec.hidden)) if gated else None

    def forward(self, x: Tensor, sequences: Sequences | None = None) -> Tensor:
        """x (tokens, hidden) -> (tokens, hidden)."""
        gate = None if self.gate_weight is None else F.linear(x, self.gate_weight.to(x.dtype)).sigmoid()
        y = super().forward(x)
        return y if gate is None else y * gate


class BalanceLoss(nn.Module):
    """The load-balancing loss over all routers of a forward pass, times its coefficient; a scalar."""

    def __init__(self, experts: ExpertsSpec) -> None:
        super().__init__()
        self.coefficient, self.count = experts.aux_loss, experts.count

    def forward(self, routing: Sequence[RouterLoad]) -> Tensor:
        """Source: Fedus et al., arXiv 2101.03961, over all layers at once, as in transformers."""
        chosen = torch.stack([load.chosen for load in routing]).sum(0)
        probability = torch.stack([load.probability for load in routing]).sum(0)
        tokens = sum(load.tokens for load in routing)
        return self.coefficient * balancing_loss(chosen, probability, tokens, self.count)


class Experts(nn.Module):
    """x (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        self.enter = AllTokens()
        self.router = Router(spec)
        self.products = ExpertProducts(spec)
        self.leave = OwnTokens()
        self.shared = SharedExpert(spec) if spec.experts.shared_ffn else None

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Route each token and add what its experts make of it."""
        everyone = self.enter(x)
        y = self.leave(self.products(everyone, *self.router(everyone, sequences)))
        return y if self.shared is None else y + self.shared(x)
