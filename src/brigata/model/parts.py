"""The parts a network is made of: the places at which parallelism is applied from outside.

The residual stream is a list of tokens, (tokens, hidden): which sequence a token belongs to matters only to
the parts that mix tokens, and those get ``Sequences``.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brigata.describe.model import ModelSpec
from brigata.ops.linear import linear
from brigata.ops.linear_cross_entropy import linear_cross_entropy_sum
from brigata.ops.norm import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """x (..., hidden) -> (..., hidden). ``from_one``: the scale is 1 + weight, and weights begin at 0."""

    def __init__(self, hidden: int, eps: float, from_one: bool = False) -> None:
        super().__init__()
        self.eps, self.from_one = eps, from_one
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        return rms_norm(x, self.weight, self.eps, self.from_one)


class LayerNorm(nn.Module):
    """x (..., hidden) -> (..., hidden), with a bias."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden))
        self.bias = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        return layer_norm(x, self.weight, self.bias, self.eps)


def build_norm(spec: ModelSpec) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, of the kind that ``spec`` names."""
    if spec.norm == "layernorm":
        return LayerNorm(spec.hidden, spec.norm_eps)
    return RMSNorm(spec.hidden, spec.norm_eps, spec.norm_from_one)


class Projections(nn.Module):
    """All weights that share an input, as one part: one gather serves them all under tensor parallelism.

    x (tokens, inputs) -> one (tokens, outputs[name]) a name, in order. Weight ``name.weight`` is
    (outputs[name], inputs), ``name.bias``, if there is one, (outputs[name],).
    """

    def __init__(self, inputs: int, outputs: Mapping[str, int], bias: bool = False) -> None:
        super().__init__()
        self.names = tuple(outputs)
        for name, width in outputs.items():
            self.add_module(name, nn.Linear(inputs, width, bias=bias))

    def weights(self) -> Iterable[Tensor]:
        """The weights in the order of their names."""
        return (self.get_submodule(name).get_parameter("weight") for name in self.names)

    def biases(self) -> Iterable[Tensor | None]:
        """The biases in the order of their names."""
        return (getattr(self.get_submodule(name), "bias", None) for name in self.names)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project to each output; weights and biases are cast to x's dtype."""
        return tuple(linear(x, w, b) for w, b in zip(self.weights(), self.biases(), strict=True))


class Projection(nn.Module):
    """x (tokens, inputs) -> (tokens, outputs). ``weight`` (outputs, inputs), ``bias`` (outputs,) or None."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Project; weight and bias are cast to x's dtype."""
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """tokens (tokens,) int64 -> (tokens, hidden) in ``dtype``, times ``multiplier``.

    ``weight`` is (vocab, hidden).

    The multiplier is rounded to ``dtype`` first, as published models of this kind do.
    """

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, multiplier: float = 1.0) -> None:
        super().__init__()
        self.dtype, self.multiplier = dtype, multiplier
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Look each token up."""
        return scaled(F.embedding(tokens, self.weight).to(self.dtype), self.multiplier)


class LearnedPositions(nn.Module):
    """h (tokens, hidden) + the row of each token's position. ``weight`` is (max_positions, hidden)."""

    def __init__(self, positions: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, hidden))

    def forward(self, h: Tensor, positions: Tensor) -> Tensor:
        """Add positions (tokens,) int64."""
        return h + F.embedding(positions, self.weight).to(h.dtype)


class HeadLoss(nn.Module):
    """The vocabulary projection and the loss on it. ``weight`` is (vocab, hidden).

    h (tokens, hidden), targets (tokens,) -> the sum of the tokens' losses (nats), a scalar in fp32 or better;
    without targets -> logits (tokens, vocab). Logits are scaled by ``multiplier``, then squashed by
    ``softcap``; for the loss only those of a chunk of tokens exist at a time.
    """

    def __init__(
        self, vocab: int, hidden: int, multiplier: float = 1.0, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.multiplier, self.softcap = multiplier, softcap
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Loss where targets are given, else logits."""
        if targets is not None:
            return linear_cross_entropy_sum(h, self.weight, targets, self.multiplier, self.softcap)
        return self.finish(linear(h, self.weight))

    def finish(self, logits: Tensor) -> Tensor:
        """Scale and squash the product's result."""
        return soft_cap(scaled(logits, self.multiplier), self.softcap)


def scaled(x: Tensor, factor: float) -> Tensor:
    """x * factor, the factor rounded to x's dtype; x itself where it is 1."""
    return x if factor == 1.0 else x * torch.tensor(factor, dtype=x.dtype, device=x.device)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap); x itself without a cap. Source: Gemma 2, arXiv 2408.00118."""
    return x if cap is None else torch.tanh(x / cap) * cap
