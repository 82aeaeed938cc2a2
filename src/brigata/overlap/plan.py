"""A program bound to one cut of the tokens: every step with the rows it touches, ready to be executed."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from brigata.describe.order import Wire
from brigata.schedule.chunks import Chunks, Pairs, Piece
from brigata.schedule.steps import (
    Add,
    Barrier,
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

    ``rows`` are a product's token rows (with ``Pairs``: of the incoming tensor when it reads what arrived,
    else of the outgoing one); ``regions`` follow the step: a product's result (none or one contiguous
    region), one a message, or an addition's sources and then its target. ``where`` is ``head``, ``middle`` or
    ``tail``, by the side of the products on which the step lies.
    """

    step: Step
    regions: tuple[Region, ...]
    rows: slice
    where: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's actions, and how many rows of work buffers and accumulators they need.

    ``wire`` is the dtype of the work buffers. ``overlapped`` says whether a product runs while a message is
    on its way.
    """

    actions: tuple[Action, ...]
    chunks: Chunks
    rank: int
    work_rows: int
    sum_rows: int
    products: int
    overlapped: bool
    wire: Wire = ""


def bind(program: Program, chunks: Chunks) -> Plan:
    """Lay out the work slots of ``program``, each as large as its largest piece, and resolve every place."""
    starts: dict[Space, dict[int, int]] = {}
    totals: dict[Space, int] = {}
    for space in ("work", "sum"):
        sizes = _largest(program, chunks, space)
        offsets = [0, *accumulate(sizes[slot] for slot in sorted(sizes))]
        starts[space] = dict(zip(sorted(sizes), offsets, strict=False))
        totals[space] = offsets[-1]
    starts |= _cut_starts(chunks, program.rank)

    def region(place: Place, piece: Piece) -> Region:
        start = starts[place.space][place.index]
        return Region(place.space, slice(start, start + chunks.size(piece)))

    products = [i for i, step in enumerate(program.steps) if isinstance(step, Compute)]
    first, last = (products[0], products[-1]) if products else (len(program.steps), len(program.steps))
    holds: dict[Place, Piece] = {}
    actions = []
    for i, step in enumerate(program.steps):
        where = "head" if i < first else "tail" if i > last else "middle"
        rows = slice(0)
        regions: tuple[Region, ...] = ()
        match step:
            case Compute(pieces=pieces, writes=writes):
                holds.update(zip(writes, pieces, strict=bool(writes)))
                rows = _joined([_token_rows(starts, chunks, step, piece) for piece in pieces])
                results = [region(w, piece).rows for w, piece in zip(writes, pieces, strict=bool(writes))]
                regions = (Region(writes[0].space, _joined(results)),) if writes else ()
            case Post(messages=messages):
                holds.update((message.place, message.piece) for message in messages)
                regions = tuple(region(message.place, message.piece) for message in messages)
            case Add(sources=sources, target=target):
                holds[target] = holds[sources[0]]
                regions = tuple(region(place, holds[target]) for place in (*sources, target))
            case Wait() | Collective() | Barrier():
                pass
        actions.append(Action(step, regions, rows, where))
    return Plan(
        actions=tuple(actions),
        chunks=chunks,
        rank=program.rank,
        work_rows=totals["work"],
        sum_rows=totals["sum"],
        products=len(products),
        overlapped=_overlaps(program),
        wire=program.wire,
    )


def _cut_starts(chunks: Chunks, rank: int) -> dict[Space, dict[int, int]]:
    """First row of each piece in the tensors that are cut: by space, then by index."""
    held: dict[Space, list[Piece]]
    if isinstance(chunks, Pairs):
        held = {"outgoing": chunks.outgoing(rank), "incoming": chunks.incoming(rank)}
    else:
        held = {"gathered": chunks.pieces(), "own": chunks.pieces(rank)}
    ends = {space: [0, *accumulate(map(chunks.size, pieces))] for space, pieces in held.items()}
    return {space: dict(enumerate(starts[:-1])) for space, starts in ends.items()}


def _token_rows(starts: dict[Space, dict[int, int]], chunks: Chunks, step: Compute, piece: Piece) -> slice:
    """Rows that a product on ``piece`` concerns: of the whole tensor, or of what is exchanged with others."""
    if not isinstance(chunks, Pairs):
        return chunks.span(piece)
    assert piece.source is not None
    space: Space = "incoming" if step.reads else "outgoing"
    peer = piece.source if step.reads else piece.chunk
    start = starts[space][peer * chunks.parts + piece.sub]
    return slice(start, start + chunks.size(piece))


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
