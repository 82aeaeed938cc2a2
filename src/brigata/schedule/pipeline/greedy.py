"""Orders found by simulation: each rank takes the best action that is possible, within a limit of memory."""

from collections import deque
from functools import lru_cache

from brigata.schedule.pipeline.actions import Action, Kind
from brigata.schedule.pipeline.orders import Program

F, I, W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


@lru_cache(maxsize=64)
def zero_bubble_v(ranks: int, micro_batches: int) -> tuple[Program, ...]:
    """Two stages a rank on a V, input gradients first, weight gradients where nothing else is possible.

    Forward, input gradient and weight gradient each take one unit of time; a rank holds at most 2 p stages'
    activations, as much as 1F1B's first rank. Nearly no bubble for m well above p. Source: Qi et al., arXiv
    2405.15362 (ZB-V); the order is our own greedy one.
    """
    stages = 2 * ranks
    finished: dict[Action, int] = {}
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    next_forward, next_input = [0] * stages, [0] * stages
    pending: list[deque[Action]] = [deque() for _ in range(ranks)]
    held = [0] * ranks
    left = 3 * stages * micro_batches
    time = 0
    while left:
        chosen = []
        for rank in range(ranks):
            own = (rank, stages - 1 - rank)
            action = _choose(own, next_forward, next_input, finished, time, micro_batches, stages)
            if action is not None and action.kind is F and held[rank] >= 2 * ranks:
                action = None
            if action is None and pending[rank]:
                action = pending[rank][0]
            if action is not None:
                chosen.append((rank, action))
        for rank, action in chosen:
            programs[rank].append(action)
            finished[action] = time + 1
            left -= 1
            match action.kind:
                case Kind.FORWARD:
                    next_forward[action.stage] += 1
                    held[rank] += 1
                case Kind.INPUT_GRADIENT:
                    next_input[action.stage] += 1
                    pending[rank].append(Action(W, action.stage, action.micro_batch))
                case _:
                    pending[rank].popleft()
                    held[rank] -= 1
        time += 1
    return tuple(tuple(program) for program in programs)


def _choose(
    own: tuple[int, int],
    next_forward: list[int],
    next_input: list[int],
    finished: dict[Action, int],
    time: int,
    micro_batches: int,
    stages: int,
) -> Action | None:
    """An input gradient if one is possible, else a forward, of the later stage first."""
    for stage in (own[1], own[0]):
        number = next_input[stage]
        if number < next_forward[stage]:
            before = Action(F, stage, number) if stage == stages - 1 else Action(I, stage + 1, number)
            if finished.get(before, time + 1) <= time and finished[Action(F, stage, number)] <= time:
                return Action(I, stage, number)
    for stage in (own[1], own[0]):
        number = next_forward[stage]
        if number < micro_batches:
            ready = stage == 0 or finished.get(Action(F, stage - 1, number), time + 1) <= time
            if ready:
                return Action(F, stage, number)
    return None
