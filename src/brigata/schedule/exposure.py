"""What a right schedule leaves exposed and what it needs: head, tail, buffers, closing additions."""

from collections import Counter
from collections.abc import Iterator, Sequence

from brigata.schedule.steps import (
    Add,
    Barrier,
    Collective,
    Compute,
    Message,
    Place,
    Post,
    Program,
    Receive,
    Send,
    Wait,
    touched,
)


def last_product(program: Program) -> int:
    """Index of the last step that is a product; -1 when there is none."""
    return max((i for i, step in enumerate(program.steps) if isinstance(step, Compute)), default=-1)


def head_free(program: Program) -> bool:
    """No product of the rank waits for others before one has been computed."""
    for step in program.steps:
        match step:
            case Compute():
                return True
            case Collective() | Barrier() | Wait(message=Receive()):
                return False
            case _:
                pass
    return True


def tail_free(programs: Sequence[Program]) -> bool:
    """After a rank's last product nothing starts, and what it still needs was posted a product earlier."""
    ends = [last_product(program) for program in programs]
    posted: dict[tuple[int, int], list[int]] = {}
    for program in programs:
        for i, message in _messages(program):
            if isinstance(message, Send):
                posted.setdefault((program.rank, message.peer), []).append(i)
    for program in programs:
        sent_at: dict[Message, int] = {}
        arrivals: Counter[int] = Counter()
        for _, message in _messages(program):
            if isinstance(message, Receive):
                sent_at[message] = posted[message.peer, program.rank][arrivals[message.peer]]
                arrivals[message.peer] += 1
        for step in program.steps[ends[program.rank] + 1 :]:
            match step:
                case Post() | Collective() | Barrier():
                    return False
                case Wait(message=Receive() as message) if sent_at[message] > ends[message.peer]:
                    return False
                case _:
                    pass
    return True


def _messages(program: Program) -> Iterator[tuple[int, Message]]:
    """The messages in the order in which they are posted, each with the index of its step."""
    for i, step in enumerate(program.steps):
        if isinstance(step, Post):
            yield from ((i, message) for message in step.messages)


def closing_additions(program: Program) -> int:
    """Additions of two places after the last product."""
    steps = program.steps[last_product(program) + 1 :]
    return sum(len(step.sources) - 1 for step in steps if isinstance(step, Add))


def live_buffers(program: Program) -> int:
    """Largest number of work and sum places that hold something still needed."""
    uses: dict[Place, list[tuple[int, bool]]] = {}
    for i, step in enumerate(program.steps):
        reads, writes = touched(step)
        events = [(place, False) for place in reads] + [(place, True) for place in writes]
        match step:
            case Post(messages=messages):
                events += [(message.place, isinstance(message, Receive)) for message in messages]
            case Wait(message=message):
                events.append((message.place, False))
        for place, fresh in events:
            if place.space in ("work", "sum"):
                uses.setdefault(place, []).append((i, fresh))
    live = [0] * (len(program.steps) + 1)
    for events_of_place in uses.values():
        born = events_of_place[0][0]
        last = born
        for i, fresh in events_of_place[1:]:
            if fresh:
                live[born] += 1
                live[last + 1] -= 1
                born = i
            last = i
        live[born] += 1
        live[last + 1] -= 1
    level, peak = 0, 0
    for change in live:
        level += change
        peak = max(peak, level)
    return peak
