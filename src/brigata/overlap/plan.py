"""A program bound to one cut of the tokens: every step with the rows it touches, ready to be executed."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from brigata.schedule.chunks import Chunks, Piece
from brigata.schedule.steps import (
    Add,
    Collective,
    Compute,
    Message,
    Place,
    Post,
    Program,
    Send,
    Space,
    Step,
    Wait,
)


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of the tensor that a space is."""

    space: Space
    rows: slice


@dataclass(frozen=True, slots=True)
class Action:
    """A step and its regions.

    ``rows`` are a product's token rows; ``regions`` follow the step: a product's result (none or one
    contiguous region), one a message, or an addition's sources and then its target. ``where`` is ``head``,
    ``middle`` or ``tail``, by the side of the products on which the step lies.
    """

    step: Step
    regions: tuple[Region, ...]
    rows: slice
    where: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's actions, and how many rows of work buffers and accumulators they need.

    ``overlapped`` says whether a product runs while a message is under way.
    """

    actions: tuple[Action, ...]
    chunks: Chunks
    rank: int
    work_rows: int
    sum_rows: int
    products: int
    overlapped: bool


def bind(program: Program, chunks: Chunks) -> Plan:
    """Lay out the work slots of ``program``, each as large as its largest piece, and resolve every place."""
    starts: dict[Space, dict[int, int]] = {}
    totals: dict[Space, int] = {}
    for space in ("work", "sum"):
        sizes = _largest(program, chunks, space)
        offsets = [0, *accumulate(sizes[slot] for slot in sorted(sizes))]
        starts[space] = dict(zip(sorted(sizes), offsets, strict=False))
        totals[space] = offsets[-1]
    starts["gathered"] = dict(enumerate(chunks.starts))
    own = chunks.starts[program.rank * chunks.parts :]
    starts["own"] = {sub: start - own[0] for sub, start in enumerate(own[: chunks.parts])}

    def region(place: Place, piece: Piece) -> Region:
        start = starts[place.space][place.index]
        return Region(place.space, slice(start, start + chunks.size(piece)))

    products = [i for i, step in enumerate(program.steps) if isinstance(step, Compute)]
    first, last = (products[0], products[-1]) if products else (len(program.steps), len(program.steps))
    holds: dict[Place, Piece] = {}
    actions = []
    for i, step in enumerate(program.steps):
        where = "head" if i < first else "tail" if i > last else "middle"
        rows, regions = slice(0), ()
        match step:
            case Compute(pieces=pieces, writes=writes):
                holds.update(zip(writes, pieces, strict=bool(writes)))
                rows = _joined([chunks.span(piece) for piece in pieces])
                results = [region(w, piece).rows for w, piece in zip(writes, pieces, strict=bool(writes))]
                regions = (Region(writes[0].space, _joined(results)),) if writes else ()
            case Post(messages=messages):
                holds.update((message.place, message.piece) for message in messages)
                regions = tuple(region(message.place, message.piece) for message in messages)
            case Add(sources=sources, target=target):
                holds[target] = holds[sources[0]]
                regions = tuple(region(place, holds[target]) for place in (*sources, target))
            case Wait() | Collective():
                pass
        actions.append(Action(step, regions, rows, where))
    return Plan(
        tuple(actions), chunks, program.rank, totals["work"], totals["sum"], len(products), _overlaps(program)
    )


def _joined(spans: list[slice]) -> slice:
    """One slice that covers contiguous ``spans``."""
    assert all(a.stop == b.start for a, b in pairwise(spans)), f"not contiguous: {spans}"
    return slice(spans[0].start, spans[-1].stop)


def _largest(program: Program, chunks: Chunks, space: Space) -> dict[int, int]:
    """Rows of the largest piece that each slot of ``space`` ever holds."""
    largest: dict[int, int] = {}
    holds: dict[Place, Piece] = {}
    for step in program.steps:
        match step:
            case Compute(pieces=pieces, writes=writes):
                held = dict(zip(writes, pieces, strict=bool(writes)))
            case Post(messages=messages):
                held = {message.place: message.piece for message in messages}
            case Add(sources=sources, target=target):
                held = {target: holds[sources[0]]}
            case _:
                held = {}
        holds.update(held)
        for place, piece in held.items():
            if place.space == space:
                largest[place.index] = max(largest.get(place.index, 0), chunks.size(piece))
    return largest


def _overlaps(program: Program) -> bool:
    """Whether a product lies between a message's start and the wait for it."""
    under_way: set[Message] = set()
    for step in program.steps:
        match step:
            case Post(messages=messages):
                under_way.update(messages)
            case Wait(message=message):
                under_way.discard(message)
            case Compute() if under_way:
                return True
            case _:
                pass
    return False


def sends(plan: Plan) -> int:
    """Number of messages that leave this rank."""
    posts = [action.step for action in plan.actions if isinstance(action.step, Post)]
    return sum(isinstance(message, Send) for post in posts for message in post.messages)
