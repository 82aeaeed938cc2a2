"""How long a pipeline schedule takes, from the durations of its stages."""

from collections.abc import Sequence
from dataclasses import dataclass

from brigata.schedule.pipeline.actions import Kind, PipelineSchedule


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage's work on one micro-batch; B is I and W together."""

    forward: float
    input_gradient: float
    weight_gradient: float

    def of(self, kind: Kind) -> float:
        """Seconds of one action."""
        match kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.INPUT_GRADIENT:
                return self.input_gradient
            case Kind.WEIGHT_GRADIENT:
                return self.weight_gradient
            case Kind.BACKWARD:
                return self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class PipelineTimes:
    """When what happens (seconds from the start).

    Attributes:
        total: until the last action of all ranks ends.
        ends: by rank, when each of its actions ends, in program order.
        busy: by rank, seconds in which it computes.
    """

    total: float
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """By rank, the share of the whole time in which it computes nothing."""
        return tuple(1 - busy / self.total for busy in self.busy)


def time_pipeline(
    schedule: PipelineSchedule, stages: Sequence[StageTimes], message_s: float = 0.0
) -> PipelineTimes:
    """Run ``schedule`` with every action as early as its program and what it needs allow.

    Args:
        schedule: complete and free of deadlock (``check_pipeline``).
        stages: durations, one a stage.
        message_s: seconds from the end of an action until its result is at another rank; sending and
            receiving do not hold up computation.
    """
    last, ranks_of = schedule.stages - 1, schedule.ranks_of
    micro = schedule.micro_batches
    unknown = -1.0
    forward = [unknown] * ((last + 1) * micro)
    backward = [unknown] * ((last + 1) * micro)
    durations = [{kind: stage.of(kind) for kind in Kind} for stage in stages]
    ends: list[list[float]] = [[] for _ in schedule.programs]
    clock, position = [0.0] * schedule.ranks, [0] * schedule.ranks
    waiting = list(range(schedule.ranks))
    while waiting:
        still = []
        moved = False
        for rank in waiting:
            program, now, place, own = schedule.programs[rank], clock[rank], position[rank], ends[rank]
            while place < len(program):
                kind, stage, number = program[place]
                index = stage * micro + number
                ready = 0.0
                if kind is Kind.FORWARD:
                    if stage:
                        ready = forward[index - micro]
                        if ready < 0:
                            break
                        if ranks_of[stage - 1] != rank:
                            ready += message_s
                elif kind is not Kind.WEIGHT_GRADIENT and stage < last:
                    ready = backward[index + micro]
                    if ready < 0:
                        break
                    if ranks_of[stage + 1] != rank:
                        ready += message_s
                now = (ready if ready > now else now) + durations[stage][kind]
                own.append(now)
                if kind is Kind.FORWARD:
                    forward[index] = now
                elif kind is not Kind.WEIGHT_GRADIENT:
                    backward[index] = now
                place += 1
            moved = moved or place > position[rank]
            clock[rank], position[rank] = now, place
            if place < len(program):
                still.append(rank)
        assert moved, "the schedule does not finish"
        waiting = still
    busy = tuple(sum(durations[stage][kind] for kind, stage, _ in program) for program in schedule.programs)
    return PipelineTimes(max(clock), tuple(map(tuple, ends)), busy)
