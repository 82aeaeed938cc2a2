"""Tensor and sequence parallelism (TPSP): a model's parts swapped for parallel ones, from outside.

The residual stream is cut by tokens over the tp axis; mixers and feed-forwards see all tokens and a share
of the heads, of the groups or of the inner width.
"""

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from brigata.model.decoder import Decoder
from brigata.model.experts import AllTokens, BalanceLoss, OwnTokens
from brigata.model.mamba import GatedNorm
from brigata.model.parts import Embedding, HeadLoss, LearnedPositions, Projection, Projections
from brigata.overlap.channel import Channel
from brigata.parallel.local import localise
from brigata.parallel.sharding import TENSOR_SHARDING, shard_parameters
from brigata.parallel.tensor_parts import (
    GatedNormOverRanks,
    GatheredProjections,
    GatherHere,
    OwnPositions,
    ScatteredProjection,
    SharedBalanceLoss,
    SumToOwners,
    VocabularyEmbedding,
    VocabularyHeadLoss,
)


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, channel: Channel, keep_gathered: bool) -> None:
    """Cut ``model``'s parameters over the one-axis ``mesh`` and swap its parts, in place.

    Parts without a parallel form of their own run their code on the shares that are here.
    """
    parts = list(model.named_modules())
    used: dict[str, dict[str, slice]] = {}
    for path, part in parts:
        if type(part) in TENSOR_SHARDING:
            used[path] = shard_parameters(part, path.rpartition(".")[2], model.spec, mesh)
            if isinstance(part, Embedding) and model.spec.tie_embeddings:
                model.head_loss.weight = model.embed.weight
    for path, part in parts:
        if isinstance(part, Projections):
            rows = {name: slices["weight"] for name in part.names if (slices := used[f"{path}.{name}"])}
            model.set_submodule(path, GatheredProjections(part, channel, keep_gathered, rows))
        else:
            swapped = _swapped(part, channel, keep_gathered)
            if swapped is not None:
                model.set_submodule(path, swapped)
            elif path in used and not isinstance(part, nn.Linear):
                _localise(part, used[path], channel.size)


def _localise(part: nn.Module, rows: Mapping[str, slice], ranks: int) -> None:
    if isinstance(part, GatedNorm):
        part.groups //= ranks
    localise(part, rows)


def _swapped(part: nn.Module, channel: Channel, keep_gathered: bool) -> nn.Module | None:
    """The parallel form of ``part``, or None where its own code does."""
    match part:
        case Projection():
            return ScatteredProjection(part, channel)
        case Embedding():
            return VocabularyEmbedding(part, channel)
        case LearnedPositions():
            return OwnPositions(part, channel)
        case HeadLoss():
            return VocabularyHeadLoss(part, channel, keep_gathered)
        case AllTokens():
            return GatherHere(channel)
        case OwnTokens():
            return SumToOwners(channel)
        case BalanceLoss():
            return SharedBalanceLoss(part, channel)
        case GatedNorm() if part.groups % channel.size:
            return GatedNormOverRanks(part, channel)
    return None
