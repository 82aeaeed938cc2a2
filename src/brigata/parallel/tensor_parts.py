"""The parts that tensor and sequence parallelism (TPSP) swaps in: same parameters, overlapped operators.

T tokens in all, n ranks, D the width of the residual stream.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from brigata.model.experts import BalanceLoss
from brigata.model.mamba import GatedNorm
from brigata.model.parts import Embedding, HeadLoss, LearnedPositions, Projection, Projections, scaled
from brigata.model.sequences import RouterLoad
from brigata.ops.loss import IGNORED
from brigata.overlap.channel import Channel
from brigata.overlap.linear import all_gather_linear, linear_reduce_scatter
from brigata.overlap.tokens import gather_tokens, scatter_tokens, sum_over_ranks
from brigata.overlap.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
from brigata.schedule.chunks import split_evenly


def local(parameter: Tensor) -> Tensor:
    """The share of a DTensor parameter that is here; gradients go back to the parameter."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class GatheredProjections(nn.Module):
    """``Projections`` by output features: x (T/n, D) -> one (T, F_i/n) a weight.

    ``rows``: for weights that every rank holds whole, the output features that are used here.
    """

    def __init__(
        self, part: Projections, channel: Channel, keep_gathered: bool, rows: Mapping[str, slice]
    ) -> None:
        super().__init__()
        self.names, self.channel, self.keep_gathered = part.names, channel, keep_gathered
        self.rows = dict(rows)
        for name in part.names:
            self.add_module(name, part.get_submodule(name))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Gather and project."""
        weights = [self._here(name, "weight") for name in self.names]
        outputs = all_gather_linear(x, weights, self.channel, keep_gathered=self.keep_gathered)
        if getattr(self.get_submodule(self.names[0]), "bias", None) is None:
            return outputs
        biases = (self._here(name, "bias") for name in self.names)
        return tuple(y + bias.to(y.dtype) for y, bias in zip(outputs, biases, strict=True))

    def _here(self, name: str, kind: str) -> Tensor:
        share = local(self.get_submodule(name).get_parameter(kind))
        return share[self.rows[name]] if name in self.rows else share


class ScatteredProjection(nn.Module):
    """``Projection`` by input features: x (T, F/n) -> (T/n, D); the bias is added to the own tokens."""

    def __init__(self, part: Projection, channel: Channel) -> None:
        super().__init__()
        self.channel = channel
        self.weight = part.weight
        self.bias = part.bias

    def forward(self, x: Tensor) -> Tensor:
        """Project and scatter."""
        y = linear_reduce_scatter(x, local(self.weight), self.channel)
        return y if self.bias is None else y + local(self.bias).to(y.dtype)


class VocabularyEmbedding(nn.Module):
    """``Embedding`` by vocabulary: tokens (T,) -> (T/n, D)."""

    def __init__(self, part: Embedding, channel: Channel) -> None:
        super().__init__()
        self.dtype, self.multiplier, self.channel = part.dtype, part.multiplier, channel
        self.weight = part.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up and scatter."""
        first = first_row(self.weight, self.channel)
        h = vocabulary_embedding(local(self.weight), tokens, first, self.dtype, self.channel)
        return scaled(h, self.multiplier)


class OwnPositions(nn.Module):
    """``LearnedPositions`` of the own tokens: h (T/n, D), positions (T,) -> (T/n, D)."""

    def __init__(self, part: LearnedPositions, channel: Channel) -> None:
        super().__init__()
        self.channel = channel
        self.weight = part.weight

    def forward(self, h: Tensor, positions: Tensor) -> Tensor:
        """Add the rows of the own tokens' positions."""
        rows = split_evenly(len(positions), self.channel.size)
        own = positions.split(rows)[self.channel.rank]
        return h + F.embedding(own, local(self.weight)).to(h.dtype)


class VocabularyHeadLoss(nn.Module):
    """``HeadLoss`` by vocabulary: h (T/n, D), targets (T,) -> the summed loss.

    Without targets -> the logits of the whole vocabulary, (T, V), without a gradient.
    """

    def __init__(self, part: HeadLoss, channel: Channel, keep_gathered: bool) -> None:
        super().__init__()
        self.channel, self.keep_gathered = channel, keep_gathered
        self.finish = part.finish
        self.weight = part.weight

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Loss where targets are given, else logits."""
        (logits,) = all_gather_linear(h, [local(self.weight)], self.channel, keep_gathered=self.keep_gathered)
        logits = self.finish(logits)
        if targets is None:
            return self._whole(logits.detach())
        first = first_row(self.weight, self.channel)
        return vocabulary_cross_entropy(logits, targets, first, IGNORED, self.channel)

    def _whole(self, logits: Tensor) -> Tensor:
        """Every rank's columns side by side; ranks with fewer pad theirs while they travel."""
        share = -(-self.weight.shape[0] // self.channel.size)
        padded = F.pad(logits, (0, share - logits.shape[1]))
        everyone = gather_tokens(padded, self.channel).view(self.channel.size, *padded.shape)
        return everyone.transpose(0, 1).reshape(len(logits), -1)[:, : self.weight.shape[0]]


def first_row(table: Tensor, channel: Channel) -> int:
    """The token of the first row that this rank holds: shares are as even as ``torch.chunk`` makes them."""
    rows = table.shape[0]
    return min(channel.rank * -(-rows // channel.size), rows)


class GatherHere(nn.Module):
    """``AllTokens``: x (T/n, D) -> (T, D)."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel

    def forward(self, x: Tensor) -> Tensor:
        """Gather."""
        return gather_tokens(x, self.channel)


class SumToOwners(nn.Module):
    """``OwnTokens``: each rank's contribution y (T, D) -> the sums of the own tokens (T/n, D)."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel

    def forward(self, y: Tensor) -> Tensor:
        """Sum and scatter."""
        return scatter_tokens(y, self.channel)


class SharedBalanceLoss(nn.Module):
    """``BalanceLoss`` that every rank computes alike: the value is whole, the gradient a share of 1/n.

    A router's gradients are summed over ranks, because each rank's products see a share of the inner width.
    """

    def __init__(self, part: BalanceLoss, channel: Channel) -> None:
        super().__init__()
        self.part, self.channel = part, channel

    def forward(self, routing: Sequence[RouterLoad]) -> Tensor:
        """The whole loss."""
        loss: Tensor = self.part(routing)
        share = loss / self.channel.size
        return share + (loss - share).detach()


class GatedNormOverRanks(nn.Module):
    """``GatedNorm`` whose groups of channels lie on several ranks: y and z (T, inner/n) -> (T, inner/n).

    Each rank adds the squares of its channels into its group's column; the columns are summed over ranks, so
    that the norm waits for one message of T * groups numbers.
    """

    def __init__(self, part: GatedNorm, channel: Channel) -> None:
        super().__init__()
        self.groups, self.eps, self.channel = part.groups, part.eps, channel
        self.weight = part.weight

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate, then normalise."""
        wide = y if y.dtype == torch.float64 else y.float()
        gated = wide * F.silu(z.to(wide.dtype))
        group = self.channel.rank * self.groups // self.channel.size
        squares = F.pad(gated.square().sum(1, keepdim=True), (group, self.groups - 1 - group))
        total = sum_over_ranks(squares, self.channel)[:, group, None]
        width = gated.shape[1] * self.channel.size // self.groups
        normed = gated * torch.rsqrt(total / width + self.eps)
        return (normed * local(self.weight).to(wide.dtype)).to(y.dtype)
