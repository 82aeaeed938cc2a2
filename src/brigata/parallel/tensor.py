"""Tensor and sequence parallelism (TPSP): a model's parts swapped for parallel ones, from outside.

The residual stream is cut by tokens over the tp axis; mixers and feed-forwards see all tokens and a share
of the heads or of the inner width.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from brigata.model.decoder import Decoder
from brigata.model.parts import Embedding, HeadLoss, Projection, Projections, RMSNorm
from brigata.ops.loss import IGNORED
from brigata.ops.norm import rms_norm
from brigata.overlap.channel import Channel
from brigata.overlap.linear import all_gather_linear, linear_reduce_scatter
from brigata.overlap.vocabulary import exchange, vocabulary_cross_entropy, vocabulary_embedding
from brigata.parallel.sharding import TENSOR_SHARDING, shard_parameters


def _local(parameter: Tensor) -> Tensor:
    """The share of a DTensor parameter that is here; gradients go back to the parameter."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class GatheredProjections(nn.Module):
    """``Projections`` by output features: x (T/n, D) -> one (T, F_i/n) a weight."""

    def __init__(self, part: Projections, channel: Channel, keep_gathered: bool) -> None:
        super().__init__()
        self.names, self.channel, self.keep_gathered = part.names, channel, keep_gathered
        for name in part.names:
            self.add_module(name, part.get_submodule(name))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Gather and project."""
        weights = [_local(self.get_submodule(name).get_parameter("weight")) for name in self.names]
        return all_gather_linear(x, weights, self.channel, keep_gathered=self.keep_gathered)


class ScatteredProjection(nn.Module):
    """``Projection`` by input features: x (T, F/n) -> (T/n, D)."""

    def __init__(self, part: Projection, channel: Channel) -> None:
        super().__init__()
        self.channel = channel
        self.weight = part.weight

    def forward(self, x: Tensor) -> Tensor:
        """Project and scatter."""
        return linear_reduce_scatter(x, _local(self.weight), self.channel)


class LocalNorm(nn.Module):
    """``RMSNorm`` of the tokens that are here: x (T/n, D) -> (T/n, D)."""

    def __init__(self, part: RMSNorm) -> None:
        super().__init__()
        self.eps = part.eps
        self.weight = part.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each token."""
        return rms_norm(x, _local(self.weight), self.eps)


class VocabularyEmbedding(nn.Module):
    """``Embedding`` by vocabulary: tokens (T,) -> (T/n, D)."""

    def __init__(self, part: Embedding, channel: Channel) -> None:
        super().__init__()
        self.dtype, self.channel = part.dtype, channel
        self.weight = part.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up and scatter."""
        table = _local(self.weight)
        first = self.channel.rank * table.shape[0]
        return vocabulary_embedding(table, tokens, first, self.dtype, self.channel)


class VocabularyHeadLoss(nn.Module):
    """``HeadLoss`` by vocabulary: h (T/n, D), targets (T,) -> the summed loss.

    Without targets -> the logits of the whole vocabulary, (T, V), without a gradient.
    """

    def __init__(self, part: HeadLoss, channel: Channel, keep_gathered: bool) -> None:
        super().__init__()
        self.channel, self.keep_gathered = channel, keep_gathered
        self.weight = part.weight

    def forward(self, h: Tensor, targets: Tensor | None = None) -> Tensor:
        """Loss where targets are given, else logits."""
        table = _local(self.weight)
        (logits,) = all_gather_linear(h, [table], self.channel, keep_gathered=self.keep_gathered)
        if targets is None:
            everyone = exchange(logits.detach(), self.channel)
            return everyone.transpose(0, 1).reshape(logits.shape[0], -1)
        first = self.channel.rank * table.shape[0]
        return vocabulary_cross_entropy(logits, targets, first, IGNORED, self.channel)


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, channel: Channel, keep_gathered: bool) -> None:
    """Cut ``model``'s parameters over the one-axis ``mesh`` and swap its parts, in place."""
    for path, part in list(model.named_modules()):
        placement = TENSOR_SHARDING.get(type(part))
        if placement is None:
            continue
        shard_parameters(part, mesh, placement)
        if isinstance(part, Embedding) and model.spec.tie_embeddings:
            model.head_loss.weight = model.embed.weight
        model.set_submodule(path, _parallel(part, channel, keep_gathered))


def _parallel(part: nn.Module, channel: Channel, keep_gathered: bool) -> nn.Module:
    match part:
        case Projections():
            return GatheredProjections(part, channel, keep_gathered)
        case Projection():
            return ScatteredProjection(part, channel)
        case RMSNorm():
            return LocalNorm(part)
        case Embedding():
            return VocabularyEmbedding(part, channel)
        case HeadLoss():
            return VocabularyHeadLoss(part, channel, keep_gathered)
    raise AssertionError(f"{type(part).__name__} has a placement but no parallel part")
