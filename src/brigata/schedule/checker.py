"""Proves a schedule: delivery, freedom from deadlock, buffer safety (head and tail: ``exposure``).

The proof executes all programs symbolically under the strictest semantics that a backend may have: messages
have no tags (the k-th send from a to b meets the k-th receive at b from a), a message moves only when both
ends have posted it, and a rank's posts take effect one after the other, as on one stream. A schedule that
ends under these ends under any weaker ones. Schedules for backends whose posts take effect at once are proven
with ``stream=False``.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from brigata.schedule.chunks import Pairs, Piece
from brigata.schedule.content import Content, Partial, Purpose, piece_of
from brigata.schedule.exposure import closing_additions, head_free, live_buffers, tail_free
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
    Schedule,
    Send,
    Step,
    Wait,
    touched,
)


class ScheduleError(AssertionError):
    """A schedule that is wrong. Schedules are ours: this is never the user's mistake."""


@dataclass(frozen=True)
class Proof:
    """What the checker found out about a schedule that is right.

    ``head_free`` and ``tail_free`` hold for every rank. The others are those of the rank that has most: its
    sends, its products, its work and sum places live at once, its additions of two after the last product.
    """

    head_free: bool
    tail_free: bool
    messages: int
    products: int
    buffers: int
    closing_additions: int


@dataclass
class _Rank:
    program: Program
    content: dict[Place, Content]
    stream: bool
    step: int = 0
    posts: deque[list[Message]] = field(default_factory=deque)
    unwaited: set[Message] = field(default_factory=set)
    delivered: set[Message] = field(default_factory=set)
    posted: set[Message] = field(default_factory=set)
    computed: set[tuple[str, Piece]] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return self.step == len(self.program.steps)

    def fail(self, what: str) -> ScheduleError:
        now = self.program.steps[self.step] if not self.done else "the end"
        return ScheduleError(f"rank {self.program.rank}, step {self.step} ({now}): {what}")


def check(schedule: Schedule, stream: bool = True) -> Proof:
    """Prove ``schedule``.

    Args:
        schedule: one program a rank.
        stream: whether a rank's posts take effect one after the other, or at once.

    Raises:
        ScheduleError: naming the rank, the step and the property that fails.
    """
    purpose = Purpose(schedule)
    ranks = [_Rank(program, dict(purpose.inputs(program.rank)), stream) for program in schedule.programs]
    while not all(rank.done and not rank.posts for rank in ranks):
        advanced = [_advance(rank) for rank in ranks]
        if not (_meet(ranks, schedule) | _deliver(ranks) | any(advanced)):
            stuck = "; ".join(
                str(rank.fail("waits for ever")) for rank in ranks if not rank.done or rank.posts
            )
            raise ScheduleError(f"deadlock: {stuck}")
    for rank in ranks:
        _check_end(rank, purpose)
    programs = schedule.programs
    return Proof(
        head_free=all(map(head_free, programs)),
        tail_free=tail_free(programs),
        messages=max(sum(isinstance(message, Send) for message in rank.posted) for rank in ranks),
        products=max(sum(isinstance(step, Compute) for step in program.steps) for program in programs),
        buffers=max(map(live_buffers, programs)),
        closing_additions=max(map(closing_additions, programs)),
    )


def _advance(rank: _Rank) -> bool:
    """Run ``rank`` until it waits; whether it moved."""
    start = rank.step
    while not rank.done:
        step = rank.program.steps[rank.step]
        if isinstance(step, Collective | Barrier):
            break
        if isinstance(step, Wait) and not _settled(rank, step.message):
            break
        _execute(rank, step)
        rank.step += 1
    return rank.step > start


def _settled(rank: _Rank, message: Message) -> bool:
    if message not in rank.unwaited:
        raise rank.fail(f"waits for {message}, which is not under way")
    return message in rank.delivered


def _execute(rank: _Rank, step: Step) -> None:
    reads, writes = touched(step)
    for place in reads:
        if any(isinstance(message, Receive) and message.place == place for message in rank.unwaited):
            raise rank.fail(f"reads {place} before its arrival was waited for")
        if place not in rank.content:
            raise rank.fail(f"reads {place}, which holds nothing")
    for place in writes:
        if any(message.place == place for message in rank.unwaited):
            raise rank.fail(f"overwrites {place} while it is in flight")
    match step:
        case Compute():
            _compute(rank, step)
        case Add():
            rank.content[step.target] = _sum(rank, step)
        case Post(messages=messages):
            for message in messages:
                _post(rank, message)
            if rank.stream or not rank.posts:
                rank.posts.append([])
            rank.posts[-1] += messages
        case Wait(message=message):
            rank.unwaited.remove(message)
            rank.delivered.remove(message)


def _compute(rank: _Rank, step: Compute) -> None:
    for piece in step.pieces:
        if (step.product, piece) in rank.computed:
            raise rank.fail(f"computes {step.product} of {piece} twice")
        rank.computed.add((step.product, piece))
    for piece, place in zip(step.pieces, step.reads, strict=bool(step.reads)):
        if rank.content[place] != piece:
            raise rank.fail(f"needs {piece} but {place} holds {rank.content[place]}")
    for piece, place in zip(step.pieces, step.writes, strict=bool(step.writes)):
        rank.content[place] = Partial(piece, frozenset({rank.program.rank}))


def _sum(rank: _Rank, step: Add) -> Partial:
    parts = [rank.content[source] for source in step.sources]
    assert all(isinstance(part, Partial) for part in parts), step
    sums = [part for part in parts if isinstance(part, Partial)]
    together = frozenset[int]().union(*(part.ranks for part in sums))
    if len({part.piece for part in sums}) != 1:
        raise rank.fail(f"adds different pieces: {sums}")
    if len(together) != sum(len(part.ranks) for part in sums):
        raise rank.fail(f"adds a contribution twice: {sums}")
    return Partial(sums[0].piece, together)


def _post(rank: _Rank, message: Message) -> None:
    if message in rank.posted:
        raise rank.fail(f"posts {message} twice")
    for other in rank.unwaited:
        if other.place == message.place and not (isinstance(other, Send) and isinstance(message, Send)):
            raise rank.fail(f"posts {message} while {other} is in flight")
    if isinstance(message, Send):
        content = rank.content.get(message.place)
        if content is None or piece_of(content) != message.piece:
            raise rank.fail(f"sends {message.piece} but {message.place} holds {content}")
    elif message.place in rank.content and message.place.space != "work":
        raise rank.fail(f"receives {message.piece} at {message.place}, which has its content already")
    else:
        rank.content.pop(message.place, None)
    rank.posted.add(message)
    rank.unwaited.add(message)


def _deliver(ranks: list[_Rank]) -> bool:
    """Move every message that both ends have reached; whether one moved."""
    moved = False
    for rank in ranks:
        if not rank.posts:
            continue
        for send in [message for message in rank.posts[0] if isinstance(message, Send)]:
            peer = ranks[send.peer]
            receive = _first_receive(peer, rank.program.rank)
            first = next(m for m in rank.posts[0] if isinstance(m, Send) and m.peer == send.peer)
            if receive is None or first is not send:
                continue
            if receive.piece != send.piece:
                raise rank.fail(f"{send} meets {receive} of rank {send.peer}")
            peer.content[receive.place] = rank.content[send.place]
            for end, message in ((rank, send), (peer, receive)):
                end.delivered.add(message)
                end.posts[0].remove(message)
            moved = True
    for rank in ranks:
        while rank.posts and not rank.posts[0]:
            rank.posts.popleft()
            moved = True
    return moved


def _first_receive(rank: _Rank, source: int) -> Receive | None:
    head = rank.posts[0] if rank.posts else []
    return next((m for m in head if isinstance(m, Receive) and m.peer == source), None)


def _meet(ranks: list[_Rank], schedule: Schedule) -> bool:
    """Run a collective or barrier that all ranks have reached, nothing in flight; whether there was one."""
    steps = [rank.program.steps[rank.step] if not rank.done else None for rank in ranks]
    first = steps[0]
    if not isinstance(first, Collective | Barrier) or any(step != first for step in steps):
        return False
    if any(rank.posts for rank in ranks):
        return False
    if isinstance(first, Collective):
        bring = _COLLECTIVES[first.operation]
        brought = [dict(bring(ranks, schedule, rank.program.rank)) for rank in ranks]
        for rank, content in zip(ranks, brought, strict=True):
            rank.content |= content
    for rank in ranks:
        rank.step += 1
    return True


Brought = Iterator[tuple[Place, Content]]


def _all_gather(ranks: list[_Rank], schedule: Schedule, _: int) -> Brought:
    for piece in schedule.chunks.pieces():
        if schedule.chunks.size(piece):
            place = Place("gathered", schedule.chunks.index(piece))
            yield place, _content(ranks[piece.chunk], place, piece)


def _reduce_scatter(ranks: list[_Rank], schedule: Schedule, me: int) -> Brought:
    for piece in schedule.chunks.pieces(me):
        if schedule.chunks.size(piece):
            contributions = Place("work", schedule.chunks.index(piece))
            yield Place("own", piece.sub), _reduced(ranks, contributions, piece)


def _all_reduce(ranks: list[_Rank], schedule: Schedule, _: int) -> Brought:
    for piece in schedule.chunks.pieces():
        if schedule.chunks.size(piece):
            place = Place("gathered", schedule.chunks.index(piece))
            yield place, _reduced(ranks, place, piece)


def _all_to_all(ranks: list[_Rank], schedule: Schedule, me: int) -> Brought:
    pairs = schedule.chunks
    assert isinstance(pairs, Pairs)
    for i, piece in enumerate(pairs.incoming(me)):
        if pairs.size(piece):
            assert piece.source is not None
            outgoing = Place("outgoing", me * pairs.parts + piece.sub)
            yield Place("incoming", i), _content(ranks[piece.source], outgoing, piece)


_COLLECTIVES: dict[str, Callable[[list[_Rank], Schedule, int], Brought]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}


def _content(rank: _Rank, place: Place, piece: Piece) -> Content:
    content = rank.content.get(place)
    if content is None or piece_of(content) != piece:
        raise rank.fail(f"{place} holds {content}, not {piece}")
    return content


def _reduced(ranks: list[_Rank], place: Place, piece: Piece) -> Partial:
    """The sum over ranks of what lies at ``place``."""
    contributors: list[int] = []
    for rank in ranks:
        content = _content(rank, place, piece)
        if not isinstance(content, Partial):
            raise rank.fail(f"{place} holds {content}, not a contribution")
        contributors += content.ranks
    if len(set(contributors)) != len(contributors):
        raise ranks[0].fail(f"a contribution to {piece} is summed twice")
    return Partial(piece, frozenset(contributors))


def _check_end(rank: _Rank, purpose: Purpose) -> None:
    """Every message waited for, every product of every piece computed, every result at its place."""
    if rank.unwaited:
        raise rank.fail(f"never waits for {rank.unwaited}")
    missing = purpose.products_of(rank.program.rank) - rank.computed
    if missing:
        raise rank.fail(f"never computes {missing}")
    for place, content in purpose.results(rank.program.rank):
        if purpose.schedule.chunks.size(piece_of(content)) and rank.content.get(place) != content:
            raise rank.fail(f"{place} ends as {rank.content.get(place)}, not as {content}")
