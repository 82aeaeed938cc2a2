"""The parts a network is made of: the places at which parallelism is applied from outside.

The residual stream is a list of tokens, (tokens, hidden): which sequence a token belongs to matters only to
the parts that mix tokens, and those get a ``Sequences``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brigata.ops.loss import cross_entropy_sum
from brigata.ops.norm import rms_norm


@dataclass(frozen=True)
class Sequences:
    """How the tokens of the residual stream form sequences, and the rotary tables of their positions.

    ``count`` sequences of ``length`` tokens follow each other; cos and sin are (length, head_dim / 2).
    """

    count: int
    length: int
    cos: Tensor
    sin: Tensor


class RMSNorm(nn.Module):
    """x (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each token."""
        return rms_norm(x, self.weight, self.eps)


class Projections(nn.Module):
    """All weights that share an input, as one part: one gather serves them all under tensor parallelism.

    x (tokens, inputs) -> one (tokens, outputs[name]) a name, in order. Weight ``name.weight`` is
    (outputs[name], inputs).
    """

    def __init__(self, inputs: int, outputs: Mapping[str, int]) -> None:
        super().__init__()
        self.names = tuple(outputs)
        for name, width in outputs.items():
            self.add_module(name, nn.Linear(inputs, width, bias=False))

    def weights(self) -> Iterable[Tensor]:
        """The weights in the order of their names."""
        return (self.get_submodule(name).get_parameter("weight") for name in self.names)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project to each output; weights are cast to x's dtype."""
        return tuple(F.linear(x, weight.to(x.dtype)) for weight in self.weights())


class Projection(nn.Module):
    """x (tokens, inputs) -> (tokens, outputs). ``weight`` is (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Project; the weight is cast to x's dtype."""
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Module):
    """tokens (tokens,) int64 -> (tokens, hidden) in ``dtype``. ``weight`` is (vocab, hidden)."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Look each token up."""
        return F.embedding(tokens, self.weight).to(self.dtype)


class HeadLoss(nn.Module):
    """The vocabulary projection and the loss on it. ``weight`` is (vocab, hidden).

    h (tokens, hidden), targets (tokens,) -> the sum of the tokens' losses (nats), a scalar;
    without targets -> logits (tokens, vocab).
    """

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Loss where targets are given, else logits."""
        logits = F.linear(h, self.weight.to(h.dtype))
        return logits if targets is None else cross_entropy_sum(logits, targets)
