"""One optimizer step, assembled: stages under their pipeline schedule, then what follows it."""

from collections import defaultdict
from dataclasses import dataclass, field

from brigata.cost.messages import Message
from brigata.describe.job import Job
from brigata.schedule.pipeline.build import build_pipeline
from brigata.schedule.pipeline.programs import PipelineSchedule
from brigata.simulate.arrangement import Arrangement
from brigata.simulate.fully_sharded import gather_and_scatter
from brigata.simulate.memory import kept_bytes
from brigata.simulate.pipeline import PipelineTimes, StageTimes, time_pipeline
from brigata.simulate.stages import Passes, StageCosts
from brigata.simulate.synchronisation import (
    gradient_messages,
    held_by_stage,
    optimizer_seconds,
    rank_of,
    tied_seconds,
)


@dataclass
class Iteration:
    """A step's time and where it goes, on the pipeline rank that ends last.

    Attributes:
        seconds: of the whole step.
        breakdown: seconds by what they are spent on; they add up to ``seconds``.
        flops: operations of one rank of each pipeline rank on average, recomputation included.
        schedule: of the pipeline.
        pipeline: when which action of it runs.
        stages: what each stage costs.
    """

    seconds: float
    breakdown: dict[str, float]
    flops: float
    schedule: PipelineSchedule
    pipeline: PipelineTimes
    stages: list[Passes] = field(repr=False, default_factory=list)


def simulate_iteration(job: Job) -> Iteration:
    """Assemble one step of ``job``."""
    return iterate(Arrangement.of(job))


def iterate(arrangement: Arrangement) -> Iteration:
    """Assemble one step of what is arranged."""
    job = arrangement.job
    costs = StageCosts(arrangement)
    passes = _stages(costs)
    if job.layout.zero >= 2:
        for stage in {id(stage): stage for stage in passes}.values():  # equal stages are one object
            exposed = gather_and_scatter(costs, stage)
            stage.forward.book(exposed.forward)
            stage.input_gradient.book(exposed.backward)
    if job.layout.offload == "activations":
        _wait_for_host_memory(arrangement, passes)
    times = [
        StageTimes(p.forward.total, p.again.total + p.input_gradient.total, p.weight_gradient.total)
        for p in passes
    ]
    schedule = schedule_of(job)
    pipeline = time_pipeline(
        schedule, times, _boundaries(costs), overlap=arrangement.software.overlap_pipeline
    )
    after = _after(costs, passes, pipeline)
    # where weight gradients are put off, ranks step by themselves, each when it is done (arXiv 2401.10241)
    spans = [end - (begin if schedule.split else 0.0) for begin, end in pipeline.spans]
    ends = [span + sum(parts.values()) for span, parts in zip(spans, after, strict=True)]
    last = max(range(len(ends)), key=ends.__getitem__)
    breakdown = _breakdown(arrangement, passes, spans[last], last)
    for kind, part in after[last].items():
        breakdown[kind] += part
    flops = sum(
        p.forward.flops + p.again.flops + p.input_gradient.flops + p.weight_gradient.flops for p in passes
    )
    flops *= job.accumulation / job.layout.pp
    return Iteration(ends[last], dict(breakdown), flops, schedule, pipeline, passes)


def _wait_for_host_memory(arrangement: Arrangement, passes: list[Passes]) -> None:
    """Activations go to the host's memory beside the forward and come back beside the backward."""
    for stage, units in {
        id(stage): (stage, units) for stage, units in zip(passes, arrangement.stages, strict=True)
    }.values():
        travel = kept_bytes(arrangement, units) / (arrangement.device.host_gbs * 1e9)
        backward = stage.again.total + stage.input_gradient.total + stage.weight_gradient.total
        stage.forward.book({"exposed offload": max(travel - stage.forward.total, 0.0)})
        stage.input_gradient.book({"exposed offload": max(travel - backward, 0.0)})


def schedule_of(job: Job) -> PipelineSchedule:
    """The pipeline's schedule; of one rank it is trivial."""
    layout = job.layout
    order, stages = job.schedule, layout.virtual_stages
    if layout.pp == 1:
        order, stages = "1f1b", 1
    return build_pipeline(order, layout.pp, job.accumulation, stages if order == "interleaved" else None)


def _stages(costs: StageCosts) -> list[Passes]:
    """Equal stages are computed once."""
    stages = costs.arrangement.stages
    known: dict[tuple[str, bool, bool], Passes] = {}
    result = []
    for number, units in enumerate(stages):
        key = (units, number == 0, number == len(stages) - 1)
        if key not in known:
            known[key] = costs.stage(number)
        result.append(known[key])
    return result


def _boundaries(costs: StageCosts) -> float | list[float]:
    """Seconds of the message over each boundary between stages."""
    arrangement = costs.arrangement
    job, share = arrangement.job, arrangement.share
    if job.layout.pp == 1:
        return 0.0
    stream = share.tokens * job.model.hidden * share.itemsize / job.layout.tp  # cut over tp in any case
    device = arrangement.device
    inside = device.link_gbs * 1e9 * 0.7
    network = job.cluster.network * 1e9 * device.curves.network_share
    near = 10e-6 + stream / inside
    far = device.curves.network_us * 1e-6 + stream / network
    if not share.sequence_parallel and job.layout.tp > 1:
        whole = Message("all_gather", "tp", stream * job.layout.tp, job.layout.tp, "boundary")
        together = costs.message_seconds(whole)
        near, far = near + together, far + together
    return [
        far if arrangement.boundary_crosses(boundary) else near
        for boundary in range(len(arrangement.stages) - 1)
    ]


def _after(costs: StageCosts, passes: list[Passes], pipeline: PipelineTimes) -> list[dict[str, float]]:
    """By pipeline rank, what follows its last action."""
    arrangement = costs.arrangement
    job, software = arrangement.job, arrangement.software
    tied = tied_seconds(costs)
    result = []
    for rank, held in enumerate(held_by_stage(arrangement)):
        travel = sum(costs.message_seconds(m) for m in gradient_messages(arrangement, held))
        own = [p for number, p in enumerate(passes) if rank_of(arrangement, number) == rank]
        window = sum(p.again.total + p.input_gradient.total + p.weight_gradient.total for p in own)
        window += sum(p.forward.total for p in own)  # parameters come back beside the next forward
        hidden = min(travel, window) * (1 - software.exposed) if software.overlap_gradients else 0.0
        exposed, contention = travel - hidden, hidden * software.contention
        ends = tied if rank in (0, job.layout.pp - 1) else 0.0
        result.append(
            {
                "exposed dp": exposed + ends,
                "contention": contention,
                "optimizer": optimizer_seconds(arrangement, held),
            }
        )
    return result


def _breakdown(
    arrangement: Arrangement, passes: list[Passes], span: float, rank: int
) -> defaultdict[str, float]:
    """Seconds of the pipeline by kind on ``rank``: its work, and the bubble."""
    times: defaultdict[str, float] = defaultdict(float)
    count = arrangement.job.accumulation
    for number, stage in enumerate(passes):
        if rank_of(arrangement, number) == rank:
            for part in (stage.forward, stage.input_gradient, stage.weight_gradient):
                for kind, seconds in part.seconds.items():
                    times[kind] += count * seconds
            times["recompute"] += count * stage.again.total
    times["bubble"] = span - sum(times.values())
    return times
