"""An order found by simulation: each rank takes the best action possible, within a limit of memory."""

from collections import deque
from functools import lru_cache

from brigata.schedule.pipeline.actions import Action, Kind
from brigata.schedule.pipeline.orders import Program

F, I, W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


@lru_cache(maxsize=64)
def zero_bubble_v(ranks: int, micro_batches: int) -> tuple[Program, ...]:
    """Two stages a rank on a V, input gradients first, weight gradients where nothing else is possible.

    A rank holds at most 2 p stages' activations, as much as 1F1B's first rank. Nearly no bubble for m well
    above p. Source: Qi et al., arXiv 2405.15362 (ZB-V); the order is our own greedy one.
    """
    last = 2 * ranks - 1
    return _greedy(tuple((last - rank, rank) for rank in range(ranks)), 2 * ranks, micro_batches)


@lru_cache(maxsize=64)
def zero_bubble_h2(ranks: int, micro_batches: int) -> tuple[Program, ...]:
    """One stage a rank, twice 1F1B's activations, nearly no bubble.

    Source: Qi et al., arXiv 2401.10241 (ZB-H2, and what their search finds within 2 p); the order is our own
    greedy one.
    """
    return _greedy(tuple((rank,) for rank in range(ranks)), 2 * ranks, micro_batches)


def _greedy(places: tuple[tuple[int, ...], ...], limit: int, micro_batches: int) -> tuple[Program, ...]:
    """``places``: each rank's stages, the later first; ``limit``: activations that a rank holds at most.

    Forward, input gradient and weight gradient each take one unit of time.
    """
    ranks, stages = len(places), sum(map(len, places))
    last, never = stages - 1, 6 * stages * micro_batches
    forward = [[never] * micro_batches for _ in range(stages)]
    inputs = [[never] * micro_batches for _ in range(stages)]
    next_forward, next_input = [0] * stages, [0] * stages
    pending: list[deque[Action]] = [deque() for _ in range(ranks)]
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    held = [0] * ranks

    def choose(rank: int, time: int) -> Action | None:
        """An input gradient if one is possible, else a forward, of the later stage first; else a W."""
        own = places[rank]
        for stage in own:
            number = next_input[stage]
            behind = inputs[stage + 1] if stage < last else forward[stage]
            if number < next_forward[stage] and max(forward[stage][number], behind[number]) <= time:
                return Action(I, stage, number)
        for stage in own if held[rank] < limit else ():
            number = next_forward[stage]
            if number < micro_batches and (stage == 0 or forward[stage - 1][number] <= time):
                return Action(F, stage, number)
        return pending[rank][0] if pending[rank] else None

    time, left = 0, 3 * stages * micro_batches
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
