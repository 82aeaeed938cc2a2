"""The classical orders, each by its rule: GPipe, 1F1B, interleaved 1F1B, ZB-H1 and DualPipeV.

p ranks, v virtual stages a rank, m micro-batches; every stage takes as long as any other.
"""

from collections import deque

from brigata.schedule.pipeline.actions import Action, Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
Program = tuple[Action, ...]


def gpipe(ranks: int, rank: int, micro_batches: int) -> Program:
    """All forwards, then all backwards.

    Bubble (p - 1) / (m + p - 1), m activations held. Source: Huang et al., arXiv 1811.06965.
    """
    numbers = range(micro_batches)
    return (*(Action(F, rank, i) for i in numbers), *(Action(B, rank, i) for i in numbers))


def one_f_one_b(ranks: int, rank: int, micro_batches: int) -> Program:
    """A backward as soon as one is possible, then one forward and one backward in turns.

    Bubble as GPipe's; min(p - rank, m) activations held. Source: Narayanan et al., arXiv 2006.09503.
    """
    ahead = min(ranks - rank - 1, micro_batches)
    program = [Action(F, rank, i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        program += [Action(F, rank, ahead + i), Action(B, rank, i)]
    program += [Action(B, rank, i) for i in range(micro_batches - ahead, micro_batches)]
    return tuple(program)


def interleaved(ranks: int, rank: int, virtual_stages: int, micro_batches: int) -> Program:
    """1F1B over v stages a rank, p micro-batches through one before the next.

    Bubble (p - 1) / (v m + p - 1); rank 0 holds (1 + (p - 1) / (p v)) times 1F1B's activations. Source:
    Narayanan et al., arXiv 2104.04473.

    Raises:
        ValueError: micro-batches are no multiple of the ranks.
    """
    if micro_batches % ranks:
        nearest = max(micro_batches // ranks, 1) * ranks
        raise ValueError(
            f"{micro_batches} micro-batches are no multiple of the {ranks} pipeline ranks, as interleaving "
            f"needs; use {nearest} or {nearest + ranks}"
        )
    total = micro_batches * virtual_stages
    ahead = min(2 * (ranks - rank - 1) + (virtual_stages - 1) * ranks, total)

    def numbered(kind: Kind, number: int) -> Action:
        turn, within = divmod(number, ranks * virtual_stages)
        chunk, place = divmod(within, ranks)
        if kind is B:
            chunk = virtual_stages - 1 - chunk
        return Action(kind, chunk * ranks + rank, turn * ranks + place)

    program = [numbered(F, i) for i in range(ahead)]
    for i in range(total - ahead):
        program += [numbered(F, ahead + i), numbered(B, i)]
    program += [numbered(B, i) for i in range(total - ahead, total)]
    return tuple(program)


def zero_bubble_h1(ranks: int, rank: int, micro_batches: int) -> Program:
    """1F1B with weight gradients put off, on rank r by r micro-batches, into the bubble at the end.

    About a third of 1F1B's bubble, p activations held on every rank. Source: Qi et al., arXiv 2401.10241.
    """
    ahead = min(ranks - rank - 1, micro_batches)
    program = [Action(F, rank, i) for i in range(ahead)]
    done = 0
    for i in range(micro_batches):
        if ahead + i < micro_batches:
            program.append(Action(F, rank, ahead + i))
        program.append(Action(I, rank, i))
        if i >= rank:
            program.append(Action(W, rank, done))
            done += 1
    program += [Action(W, rank, i) for i in range(done, micro_batches)]
    return tuple(program)


def dual_pipe_v(ranks: int, rank: int, micro_batches: int) -> Program:
    """DualPipe cut in half: the stages of a V run forwards and backwards of different micro-batches in pairs.

    Stages ``rank`` and ``2 p - 1 - rank``; 2 p + 1 stages' activations held. Nearly no bubble where a forward
    and a backward of a pair run as one. Source: DualPipe, DeepSeek-V3, arXiv 2412.19437; the cut in half is
    Sea AI Lab's.

    Raises:
        ValueError: fewer than 2 p micro-batches.
    """
    if micro_batches < 2 * ranks:
        raise ValueError(
            f"{micro_batches} micro-batches are too few for {ranks} pipeline ranks, which need two each; "
            f"use {2 * ranks} or more"
        )
    stages = (rank, 2 * ranks - 1 - rank)
    later: deque[Action] = deque()
    forwards, backwards = [0, 0], [0, 0]
    program: list[Action] = []

    def forward(half: int) -> None:
        program.append(Action(F, stages[half], forwards[half]))
        forwards[half] += 1

    def backward(half: int, split: bool = False) -> None:
        program.append(Action(I, stages[half], backwards[half]))
        weights = Action(W, stages[half], backwards[half])
        backwards[half] += 1
        if split:
            later.append(weights)
        else:
            program.append(weights)

    for _ in range(2 * (ranks - rank - 1)):
        forward(0)
    for _ in range(rank + 1):
        forward(0)
        forward(1)
    for _ in range(ranks - rank - 1):
        backward(1, split=True)
        program.append(later.popleft())
        forward(1)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(ranks - rank - 1):
        backward(1)
        forward(1)
        backward(0)
    split = False
    for i in range(rank + 1):
        split = split or i > rank // 2
        backward(1, split)
        backward(0, split or (i == rank // 2 and rank % 2 == 0))
    for _ in range(ranks - rank - 1):
        if later:
            program.append(later.popleft())
        backward(0, split=True)
    program += later
    return tuple(program)
