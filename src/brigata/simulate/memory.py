"""Memory of each pipeline rank at its fullest moment, by what lies in it."""

from dataclasses import dataclass
from statistics import NormalDist

from brigata.cost.activations import scores_kept, unit_activations
from brigata.cost.held import dense_held, routed_held
from brigata.schedule.pipeline.checker import held_activations
from brigata.schedule.pipeline.programs import PipelineSchedule
from brigata.simulate.arrangement import Arrangement
from brigata.simulate.synchronisation import Held, held_by_stage, rank_of, replicas

SPREAD = 0.06
"""Standard deviation of the prediction, as a share of it (``brigata validate``)."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one rank by kind, and when it is fullest."""

    by_kind: dict[str, float]
    moment: str

    @property
    def allocated(self) -> float:
        """What tensors take: neither the device's context nor what the allocator cannot use."""
        return sum(v for kind, v in self.by_kind.items() if kind not in ("context", "fragmentation"))

    @property
    def total(self) -> float:
        """Everything."""
        return sum(self.by_kind.values())

    def too_large_probability(self, capacity: float) -> float:
        """How probable it is that ``capacity`` bytes are too few."""
        return 1.0 - NormalDist(self.total, SPREAD * self.total).cdf(capacity)


def memory_of(arrangement: Arrangement, schedule: PipelineSchedule) -> list[MemoryUse]:
    """Each pipeline rank's use."""
    held = held_by_stage(arrangement)
    return [_rank(arrangement, schedule, rank, held[rank]) for rank in range(schedule.ranks)]


def _rank(arrangement: Arrangement, schedule: PipelineSchedule, rank: int, held: Held) -> MemoryUse:
    software = arrangement.software
    states = _states(arrangement, held)
    own = [number for number in range(schedule.stages) if rank_of(arrangement, number) == rank]
    stages = arrangement.stages
    each = sum(kept_bytes(arrangement, stages[number]) for number in own) / len(own)
    activations = each * held_activations(schedule, rank)
    if arrangement.job.layout.offload == "activations":
        activations = min(activations, 2 * each)
    work = max(_working(arrangement, stages[number]) for number in own)
    head = _logits(arrangement) if len(stages) - 1 in own else 0.0
    by_kind = {
        **states,
        "activations": activations,
        "working": max(work, head),
        "communication": _buffers(arrangement),
        "context": software.context_gb * 1e9,
    }
    by_kind["fragmentation"] = software.fragmentation * (activations + by_kind["working"])
    moment = "the loss of a micro-batch" if head > work else "the first backward of a unit"
    return MemoryUse(by_kind, moment)


def _states(arrangement: Arrangement, held: Held) -> dict[str, float]:
    """Parameters, gradients and optimizer state, as ZeRO shares them out."""
    job, software, item = arrangement.job, arrangement.software, arrangement.share.itemsize
    zero = job.layout.zero
    dense, routed = replicas(arrangement)
    dense //= job.layout.dp_replicate

    def share(stage: int) -> float:
        return held.dense / (dense if zero >= stage else 1) + held.routed / (routed if zero >= stage else 1)

    lora = job.train.trained == "lora"
    wide = item >= 4  # parameters are their own masters
    optimizer = (
        0.0 if lora or job.layout.offload == "optimizer" else (8.0 if wide else software.optimizer_bytes)
    )
    return {
        "parameters": item * share(3),
        "gradients": 0.0 if lora else _gradient_bytes(arrangement) * share(2),
        "optimizer": optimizer * share(1),
    }


def _gradient_bytes(arrangement: Arrangement) -> float:
    software, item = arrangement.software, arrangement.share.itemsize
    if item >= 4:
        return item
    if arrangement.job.train.precision == "bf16" and software.bf16_gradient_bytes is not None:
        return software.bf16_gradient_bytes
    return software.gradient_bytes


def kept_bytes(arrangement: Arrangement, units: str) -> float:
    """Bytes that a stage keeps of one micro-batch."""
    job, share, model = arrangement.job, arrangement.share, arrangement.job.model
    gathered = job.layout.keep_gathered and arrangement.job.cluster.software == "brigata"
    stream = share.stream_tokens * model.hidden * share.itemsize
    again = arrangement.recomputed(units)
    kept = stream * again / 2  # the input of each layer of two units
    for letter in units[again:]:
        kept += unit_activations(model, letter, share, gathered)
        if job.layout.recompute == "selective":
            kept -= scores_kept(model, letter, share)
    return kept


def _working(arrangement: Arrangement, units: str) -> float:
    """What the widest unit's backward needs beside what is kept: gradients, and what it computed again."""
    share, model = arrangement.share, arrangement.job.model
    widest = max((unit_activations(model, letter, share) for letter in set(units)), default=0.0)
    again = 1.4 if arrangement.job.layout.recompute == "full" else 0.5
    return again * widest


def _logits(arrangement: Arrangement) -> float:
    """Logits and their gradients at the loss; computed in blocks by our own runtime."""
    share, model = arrangement.share, arrangement.job.model
    logits = share.tokens * -(-model.vocab // share.tp)
    if arrangement.job.cluster.software == "brigata":
        return min(logits, 2.0**24) * 8.0
    return logits * (6.0 if arrangement.software.fused_loss else 10.0)


def _buffers(arrangement: Arrangement) -> float:
    """ZeRO-3: two units' gathered parameters, and the gradients of one."""
    job, share = arrangement.job, arrangement.share
    if job.layout.zero < 3:
        return 0.0
    model = job.model
    largest = max(dense_held(model, u, share) + routed_held(model, u, share) for u in set(model.pattern))
    return largest * (2 * share.itemsize + arrangement.software.gradient_bytes)
