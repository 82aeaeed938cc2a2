"""What each action of a pipeline schedule waits for, as flat lists that are made once a schedule."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from brigata.schedule.pipeline.actions import Action, Kind, PipelineError

KINDS = tuple(Kind)
"""Every kind; ``Flat.work`` counts in this order."""


@dataclass(frozen=True)
class Flat:
    """All actions in an order in which whatever an action waits for comes before it.

    Entry 0 of ``ends`` and ``arrivals`` below is the beginning, action k of the list is entry k + 1.

    Attributes:
        before: entry of the action before it on its rank; 0: it is the first.
        needs: entry of the action of another stage whose result it takes; 0: none.
        work: ``stage * len(KINDS) + kind``, to look durations up.
        sends: boundary that its result crosses to another rank, b between the stages b and b + 1; -1: none.
        entries: by rank, the entries of its actions in program order.
    """

    before: list[int]
    needs: list[int]
    work: list[int]
    sends: list[int]
    entries: tuple[tuple[int, ...], ...]

    def run(
        self, seconds: Iterable[float], message_s: Iterable[float], overlap: bool = True
    ) -> tuple[list[float], list[float]]:
        """Every action as early as it can be: when each ends, and when its result is where it is needed.

        Args:
            seconds: of each action.
            message_s: seconds that each action's result travels, 0 where it stays on its rank.
            overlap: whether a rank computes while its own results travel; if not, it waits for them.
        """
        ends, arrivals = [0.0], [0.0]
        free = ends if overlap else arrivals
        ended, arrived = ends.append, arrivals.append
        for previous, needed, duration, travel in zip(
            self.before, self.needs, seconds, message_s, strict=True
        ):
            start, arrival = free[previous], arrivals[needed]
            end = (start if start > arrival else arrival) + duration
            ended(end)
            arrived(end + travel)
        return ends, arrivals


def flatten(programs: Sequence[Sequence[Action]], ranks_of: Sequence[int], micro_batches: int) -> Flat:
    """The flat form of a schedule's ``programs``, whose stages are on ``ranks_of``.

    Raises:
        PipelineError: a rank waits for ever, or repeats or never does what others wait for.
    """
    last, micro = len(ranks_of) - 1, micro_batches
    crosses = [there != here for here, there in pairwise(ranks_of)]
    forward, backward = [0] * (len(ranks_of) * micro), [0] * (len(ranks_of) * micro)
    flat = Flat([], [], [], [], ())
    entries: list[list[int]] = [[] for _ in programs]
    numbers = {kind: i for i, kind in enumerate(KINDS)}
    waiting = list(range(len(programs)))
    while waiting:
        still, count = [], len(flat.work)
        for rank in waiting:
            program, own = programs[rank], entries[rank]
            for kind, stage, number in program[len(own) :]:
                index, needed, boundary = stage * micro + number, 0, -1
                if kind is Kind.FORWARD:
                    if stage and not (needed := forward[index - micro]):
                        break
                    forward[index] = len(flat.work) + 1
                    boundary = stage if stage < last and crosses[stage] else -1
                elif kind is Kind.WEIGHT_GRADIENT:
                    if not backward[index]:
                        break
                else:
                    if not forward[index] or (stage < last and not (needed := backward[index + micro])):
                        break
                    backward[index] = len(flat.work) + 1
                    boundary = stage - 1 if stage and crosses[stage - 1] else -1
                flat.before.append(own[-1] if own else 0)
                flat.needs.append(needed)
                flat.work.append(stage * len(KINDS) + numbers[kind])
                flat.sends.append(boundary)
                own.append(len(flat.work))
            if len(own) < len(program):
                still.append(rank)
        if still and len(flat.work) == count:
            rank = still[0]
            action = programs[rank][len(entries[rank])]
            raise PipelineError(f"rank {rank} waits for ever before {action}")
        waiting = still
    return Flat(flat.before, flat.needs, flat.work, flat.sends, tuple(map(tuple, entries)))
