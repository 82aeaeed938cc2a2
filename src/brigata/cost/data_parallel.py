"""What ranks send to sum gradients and to share out parameters, per micro-batch and per step.

Sources: ZeRO, Rajbhandari et al., arXiv 1910.02054; the engine in ``parallel``, whose counters tests compare
with these. ZeRO-3 gathers everything for a forward and the units again for their backward, every micro-batch;
gradients are scattered every micro-batch from ZeRO-2 on; below, and for ZeRO-2's parameters, once a step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from brigata.cost.held import dense_held, routed_held, table_held
from brigata.cost.messages import Message
from brigata.cost.units import Share
from brigata.describe.model import ModelSpec


@dataclass(frozen=True)
class Shard:
    """Parameters that travel together.

    Attributes:
        parameters: of one rank before data parallelism shares them out.
        ranks: that share them out, or sum their gradients.
        is_unit: a residual unit, which ZeRO-3 gathers a second time for the backward; not a table.
        replicas: groups of ``ranks`` that sum what is left over each other (HSDP).
    """

    parameters: float
    ranks: int
    is_unit: bool = True
    replicas: int = 1


@dataclass(frozen=True)
class Widths:
    """Bytes of an element of parameters and of gradients on the wire."""

    parameters: float
    gradients: float


def model_shards(
    model: ModelSpec, share: Share, dense: int, routed: int, replicas: int = 1
) -> Iterator[Shard]:
    """A whole model's, unit by unit, then its tables; ``dense``, ``routed``: ranks that hold the same."""
    inside = dense // replicas
    for letter in model.pattern:
        yield Shard(dense_held(model, letter, share), inside, True, replicas)
        if letter == "E":
            yield Shard(routed_held(model, letter, share), routed)
    tables = table_held(model, share) * (1 if model.tie_embeddings else 2)
    tables += model.hidden * (2 if model.norm == "layernorm" else 1)
    if model.positions == "learned":
        tables += (model.max_positions or 0) * model.hidden
    yield Shard(tables, inside, False, replicas)


def _gather(shard: Shard, widths: Widths) -> Message:
    return Message("all_gather", "dp", shard.parameters * widths.parameters, shard.ranks, "parameters")


def _scatter(shard: Shard, widths: Widths) -> Message:
    return Message("reduce_scatter", "dp", shard.parameters * widths.gradients, shard.ranks, "gradients")


def forward_messages(shards: Iterable[Shard], zero: int, widths: Widths) -> list[Message]:
    """Of each micro-batch's forward."""
    return [_gather(shard, widths) for shard in shards if zero == 3 and shard.ranks > 1]


def backward_messages(shards: Iterable[Shard], zero: int, widths: Widths) -> list[Message]:
    """Of each micro-batch's backward."""
    messages = []
    for shard in shards:
        if shard.ranks > 1 and zero >= 2:
            if zero == 3 and shard.is_unit:
                messages.append(_gather(shard, widths))
            messages.append(_scatter(shard, widths))
    return messages


def step_messages(shards: Iterable[Shard], zero: int, widths: Widths) -> list[Message]:
    """Once a step."""
    messages = []
    for shard in shards:
        if shard.ranks > 1 and zero == 0:
            size = shard.parameters * widths.gradients
            messages.append(Message("all_reduce", "dp", size, shard.ranks, "gradients"))
        if shard.ranks > 1 and zero == 1:
            messages.append(_scatter(shard, widths))
        if shard.ranks > 1 and zero in (1, 2):
            messages.append(_gather(shard, widths))
        if shard.replicas > 1:
            own = shard.parameters * widths.gradients / (shard.ranks if zero else 1)
            messages.append(Message("all_reduce", "replica", own, shard.replicas, "gradients of replicas"))
    return messages
