"""An order found by simulation: each rank takes the best action possible, within a limit of memory."""

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
    last, never = 2 * ranks - 1, 3 * 2 * ranks * micro_batches * 2
    forward = [[never] * micro_batches for _ in range(2 * ranks)]
    inputs = [[never] * micro_batches for _ in range(2 * ranks)]
    next_forward, next_input = [0] * (2 * ranks), [0] * (2 * ranks)
    pending: list[deque[Action]] = [deque() for _ in range(ranks)]
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    held = [0] * ranks

    def choose(rank: int, time: int) -> Action | None:
        """An input gradient if one is possible, else a forward, of the later stage first; else a W."""
        own = (last - rank, rank)
        for stage in own:
            number = next_input[stage]
            behind = inputs[stage + 1] if stage < last else forward[stage]
            if number < next_forward[stage] and max(forward[stage][number], behind[number]) <= time:
                return Action(I, stage, number)
        for stage in own if held[rank] < 2 * ranks else ():
            number = next_forward[stage]
            if number < micro_batches and (stage == 0 or forward[stage - 1][number] <= time):
                return Action(F, stage, number)
        return pending[rank][0] if pending[rank] else None

    time, left = 0, 3 * 2 * ranks * micro_batches
    while left:
        time += 1
        for rank in range(ranks):
            # what ends at ``time`` can be taken from then on, so that the ranks' turns do not matter
            action = choose(rank, time - 1)
            if action is None:
                continue
            kind, stage, number = action
            programs[rank].append(action)
            left -= 1
            if kind is F:
                forward[stage][number] = time
                next_forward[stage] += 1
                held[rank] += 1
            elif kind is I:
                inputs[stage][number] = time
                next_input[stage] += 1
                pending[rank].append(Action(W, stage, number))
            else:
                pending[rank].popleft()
                held[rank] -= 1
    return tuple(map(tuple, programs))
