"""Seconds of what follows the pipeline: gradients over data-parallel ranks, the optimizer, clipping."""

from dataclasses import dataclass

from brigata.cost.data_parallel import Shard, Widths, step_messages
from brigata.cost.held import dense_held, routed_held, table_held
from brigata.cost.messages import Message
from brigata.simulate.arrangement import Arrangement
from brigata.simulate.stages import StageCosts

OPTIMIZER_BYTES = 26.0
"""Read and written for each parameter by Adam: master and two moments (24), the 16-bit copy (2)."""


@dataclass(frozen=True)
class Held:
    """Parameters of one rank: dense ones and routed experts."""

    dense: float
    routed: float

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.routed


def held_by_stage(arrangement: Arrangement) -> list[Held]:
    """Parameters of a rank of each pipeline rank; a rank holds the sum of its stages."""
    model, share, layout = arrangement.job.model, arrangement.share, arrangement.job.layout
    dense, routed = [0.0] * layout.pp, [0.0] * layout.pp
    stages = arrangement.stages
    for number, units in enumerate(stages):
        rank = rank_of(arrangement, number)
        dense[rank] += sum(dense_held(model, letter, share) for letter in units)
        routed[rank] += sum(routed_held(model, letter, share) for letter in units)
    table = table_held(model, share)
    first, last = rank_of(arrangement, 0), rank_of(arrangement, len(stages) - 1)
    dense[first] += table
    if first != last or not model.tie_embeddings:
        dense[last] += table
    return [Held(*both) for both in zip(dense, routed, strict=True)]


def rank_of(arrangement: Arrangement, stage: int) -> int:
    """The pipeline rank of a stage."""
    ranks = arrangement.job.layout.pp
    if arrangement.job.schedule in ("zb-v", "dualpipe-v"):
        return stage if stage < ranks else 2 * ranks - 1 - stage
    return stage % ranks


def replicas(arrangement: Arrangement) -> tuple[int, int]:
    """Ranks that hold the same dense parameters, and the same experts."""
    layout, job = arrangement.job.layout, arrangement.job
    dense = job.dp * layout.cp
    everyone = layout.tp * dense
    return dense, max(everyone // (layout.ep * arrangement.share.cut_experts), 1)


def widths_of(arrangement: Arrangement) -> Widths:
    """Bytes of parameters and gradients on the wire."""
    item = arrangement.share.itemsize
    return Widths(item, item if item >= 4 else arrangement.software.gradient_bytes)


def gradient_messages(arrangement: Arrangement, held: Held) -> list[Message]:
    """Messages that sum a rank's gradients and bring back its parameters, once a step.

    None where adapters alone are trained: theirs are too small to count.
    """
    if arrangement.job.train.trained == "lora":
        return []
    dense, routed = replicas(arrangement)
    groups = arrangement.job.layout.dp_replicate
    shards = [Shard(held.dense, dense // groups, replicas=groups)]
    if held.routed:
        shards.append(Shard(held.routed, routed))
    return step_messages(shards, arrangement.job.layout.zero, widths_of(arrangement))


def optimizer_seconds(arrangement: Arrangement, held: Held) -> float:
    """Adam and the gradient norm, bound by memory; cut over data-parallel ranks from ZeRO-1 on."""
    job, device = arrangement.job, arrangement.device
    if job.train.trained == "lora":
        return 0.0
    dense, routed = replicas(arrangement) if job.layout.zero else (1, 1)
    parameters = held.dense / dense + held.routed / routed
    moved = parameters * (OPTIMIZER_BYTES + 2 * arrangement.software.gradient_bytes)
    rate = device.memory_gbs * 1e9 * device.curves.stream.memory
    if job.layout.offload == "optimizer":
        return parameters * (OPTIMIZER_BYTES / 4) / (device.host_gbs * 1e9) + moved / rate
    return moved / rate


def tied_seconds(costs: StageCosts) -> float:
    """Summing the gradients of a tied table between the first and the last stage."""
    arrangement = costs.arrangement
    job = arrangement.job
    if not job.model.tie_embeddings or job.layout.pp == 1:
        return 0.0
    table = table_held(job.model, arrangement.share) * arrangement.software.gradient_bytes
    return costs.message_seconds(Message("all_reduce", "pp", table, 2, "tied embedding"))
