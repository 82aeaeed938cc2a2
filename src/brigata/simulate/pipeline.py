"""How long a pipeline schedule takes, from the durations of its stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from brigata.schedule.pipeline.actions import Kind
from brigata.schedule.pipeline.dependencies import KINDS, Flat
from brigata.schedule.pipeline.programs import PipelineSchedule


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
        flat: what was run.
        seconds: of each action, as in ``flat``.
        finished: when each action ends, as in ``flat``; entry 0 is the beginning.
    """

    flat: Flat
    seconds: list[float]
    finished: list[float]

    @cached_property
    def total(self) -> float:
        """Until the last action of all ranks ends."""
        return max(self.finished)

    @cached_property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """By rank, when its first action begins and its last one ends."""
        return tuple(
            (self.finished[own[0]] - self.seconds[own[0] - 1], self.finished[own[-1]])
            for own in self.flat.entries
        )

    @cached_property
    def ends(self) -> tuple[tuple[float, ...], ...]:
        """By rank, when each of its actions ends, in program order."""
        return tuple(tuple(self.finished[i] for i in own) for own in self.flat.entries)

    @cached_property
    def starts(self) -> tuple[tuple[float, ...], ...]:
        """By rank, when each of its actions begins, in program order."""
        return tuple(tuple(self.finished[i] - self.seconds[i - 1] for i in own) for own in self.flat.entries)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By rank, seconds in which it computes."""
        return tuple(sum([self.seconds[i - 1] for i in own]) for own in self.flat.entries)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """By rank, the share of the whole time in which it computes nothing."""
        return tuple(1 - busy / self.total for busy in self.busy)


def time_pipeline(
    schedule: PipelineSchedule,
    stages: Sequence[StageTimes],
    message_s: float | Sequence[float] = 0.0,
    *,
    overlap: bool = True,
) -> PipelineTimes:
    """Run ``schedule`` with every action as early as its program and what it needs allow.

    Args:
        schedule: complete and free of deadlock (``check_pipeline``).
        stages: durations, one a stage.
        message_s: seconds from the end of an action until its result is at another rank, at every boundary or
            one a boundary (b between the stages b and b + 1); between stages of one rank nothing travels.
        overlap: whether a rank computes while its own results travel; if not, it waits for them.
    """
    assert len(stages) == schedule.stages, (len(stages), schedule.stages)
    flat = schedule.flat
    table = [stage.of(kind) for stage in stages for kind in KINDS]
    boundaries = [message_s] * len(stages) if isinstance(message_s, float | int) else [*message_s, 0.0]
    assert len(boundaries) == len(stages), (len(boundaries) - 1, len(stages))
    boundaries[-1] = 0.0  # where ``sends`` is -1
    seconds = [table[work] for work in flat.work]
    finished, _ = flat.run(seconds, [boundaries[boundary] for boundary in flat.sends], overlap)
    return PipelineTimes(flat, seconds, finished)
