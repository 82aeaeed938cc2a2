"""Proves a pipeline schedule: complete, free of deadlock, and how many activations it holds."""

from collections import Counter

from brigata.schedule.pipeline.actions import Action, Kind, PipelineError
from brigata.schedule.pipeline.messages import check_messages, with_messages
from brigata.schedule.pipeline.programs import PipelineSchedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


def check_pipeline(schedule: PipelineSchedule) -> None:
    """Prove that every stage of every micro-batch runs forward and backward once, and that all ranks finish.

    With the messages among the actions as ``with_messages`` puts them, under rendezvous semantics.

    Raises:
        PipelineError: something is missing, done twice, on the wrong rank, or waited for for ever.
    """
    _complete(schedule)
    check_messages(schedule, with_messages(schedule))


def _complete(schedule: PipelineSchedule) -> None:
    expected: Counter[Action] = Counter()
    kinds = {action.kind for program in schedule.programs for action in program}
    if B in kinds and (I in kinds or W in kinds):
        raise PipelineError("whole backwards and split ones are mixed")
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            for kind in (F, I, W) if schedule.split else (F, B):
                expected[Action(kind, stage, micro_batch)] += 1
    found: Counter[Action] = Counter()
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if not 0 <= action.stage < schedule.stages or schedule.ranks_of[action.stage] != rank:
                raise PipelineError(f"rank {rank} computes {action}, whose stage is not there")
            found[action] += 1
    if found != expected:
        missing, extra = expected - found, found - expected
        first = next(iter(missing or extra))
        raise PipelineError(f"{first} is {'missing' if missing else 'there too often'}")


def held_activations(schedule: PipelineSchedule, rank: int, kept: float = 1.0) -> float:
    """The most stages' activations that ``rank`` holds at a time, from a forward to its W, or to its B.

    Args:
        schedule: complete.
        rank: whose.
        kept: the share of a stage's activations that its weight gradients need: what I leaves for W. 1: I
            frees nothing; 0: all that counts is what waits for its I.
    """
    held = most = 0.0
    change = {F: 1.0, I: kept - 1.0, W: -kept, B: -1.0}
    for kind, _, _ in schedule.programs[rank]:
        held += change[kind]
        most = max(most, held)
    return most
