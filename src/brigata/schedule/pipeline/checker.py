"""Proves a pipeline schedule: complete, free of deadlock, and how many activations it holds."""

from collections import Counter

from brigata.schedule.pipeline.actions import Action, Kind, PipelineSchedule, Transfer

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


class PipelineError(AssertionError):
    """A schedule that is wrong, and why."""


def check_pipeline(schedule: PipelineSchedule) -> None:
    """Prove that every stage of every micro-batch runs forward and backward once, and that all ranks finish.

    Messages between two ranks are matched in order; a rank's sends go out as they are computed, a receive is
    waited for where its action needs it.

    Raises:
        PipelineError: something is missing, done twice, on the wrong rank, or waited for for ever.
    """
    _complete(schedule)
    _finishes(schedule)


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


def _finishes(schedule: PipelineSchedule) -> None:
    """Run all programs as far as they go; at the end nothing may be left."""
    done: set[Action] = set()
    arrived: set[Transfer] = set()
    queues = {
        (source, target): schedule.receives(target, source)
        for source in range(schedule.ranks)
        for target in range(schedule.ranks)
        if source != target
    }
    position = [0] * schedule.ranks
    received = dict.fromkeys(queues, 0)
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(schedule.programs):
            while position[rank] < len(program):
                action = program[position[rank]]
                if not _possible(schedule, rank, action, done, queues, received, arrived):
                    break
                done.add(action)
                position[rank] += 1
                progress = True
    for rank, program in enumerate(schedule.programs):
        if position[rank] < len(program):
            raise PipelineError(f"rank {rank} waits for ever before {program[position[rank]]}")


def _possible(
    schedule: PipelineSchedule,
    rank: int,
    action: Action,
    done: set[Action],
    queues: dict[tuple[int, int], list[Transfer]],
    received: dict[tuple[int, int], int],
    arrived: set[Transfer],
) -> bool:
    """Whether ``action`` has all it needs; messages ahead of its own are received on the way."""
    kind, stage, micro_batch = action
    if kind is W:
        return Action(I, stage, micro_batch) in done
    if kind is not F and Action(F, stage, micro_batch) not in done:
        return False
    source_stage = stage - 1 if kind is F else stage + 1
    if not 0 <= source_stage < schedule.stages:
        return True
    source_kind = F if kind is F else kind
    source = schedule.ranks_of[source_stage]
    before = Action(source_kind, source_stage, micro_batch)
    if source == rank:
        return before in done
    wanted = Transfer(kind is F, source_stage, micro_batch, source, rank)
    queue, key = queues[source, rank], (source, rank)
    while wanted not in arrived and received[key] < len(queue):
        sent = queue[received[key]]
        if Action(F if sent.forward else source_kind_of(schedule), sent.stage, sent.micro_batch) not in done:
            return False
        arrived.add(sent)
        received[key] += 1
    return wanted in arrived


def source_kind_of(schedule: PipelineSchedule) -> Kind:
    """The kind of action whose result travels backwards."""
    return I if schedule.split else B


def held_activations(schedule: PipelineSchedule, rank: int) -> int:
    """The most stages' activations that ``rank`` holds at a time: from a forward to its W, or to its B."""
    held = most = 0
    for kind, _, _ in schedule.programs[rank]:
        if kind is F:
            held += 1
            most = max(most, held)
        elif kind in (B, W):
            held -= 1
    return most
