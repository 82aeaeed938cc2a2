"""Proves a schedule: delivery, freedom from deadlock, buffer safety, head and tail.

The proof executes all programs symbolically under the strictest semantics that a backend may have: messages
have no tags (the k-th send from a to b meets the k-th receive at b from a), a message moves only when both
ends have posted it, and a rank's posts take effect one after the other, as on one stream. A schedule that
ends under these ends under any weaker ones.
"""

from collections import deque
from dataclasses import dataclass, field

from brigata.schedule.chunks import Piece
from brigata.schedule.steps import (
    Add,
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
class Partial:
    """A sum of contributions to ``piece`` from ``ranks``."""

    piece: Piece
    ranks: frozenset[int]


Content = Piece | Partial


@dataclass(frozen=True)
class Proof:
    """What the checker found out about a schedule that is right.

    ``head_free`` and ``tail_free`` hold for every rank; ``messages`` counts the sends of the rank that sends
    most, ``products`` the products likewise; ``buffers`` is the largest number of work places live at once.
    """

    head_free: bool
    tail_free: bool
    messages: int
    products: int
    buffers: int


@dataclass
class _Rank:
    program: Program
    content: dict[Place, Content]
    step: int = 0
    posts: deque[list[Message]] = field(default_factory=deque)
    unwaited: set[Message] = field(default_factory=set)
    delivered: set[Message] = field(default_factory=set)
    posted_at: dict[Message, int] = field(default_factory=dict)
    computed: set[tuple[str, Piece]] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return self.step == len(self.program.steps)

    def fail(self, what: str) -> ScheduleError:
        now = self.program.steps[self.step] if not self.done else "the end"
        return ScheduleError(f"rank {self.program.rank}, step {self.step} ({now}): {what}")


def check(schedule: Schedule) -> Proof:
    """Prove ``schedule``.

    Raises:
        ScheduleError: naming the rank, the step and the property that fails.
    """
    ranks = [_Rank(program, _initial(schedule, program.rank)) for program in schedule.programs]
    while not all(rank.done and not rank.posts for rank in ranks):
        advanced = [_advance(rank) for rank in ranks]
        if not (_collective(ranks, schedule) | _deliver(ranks) | any(advanced)):
            stuck = "; ".join(
                str(rank.fail("waits for ever")) for rank in ranks if not rank.done or rank.posts
            )
            raise ScheduleError(f"deadlock: {stuck}")
    for rank in ranks:
        _check_end(rank, schedule)
    return Proof(
        head_free=all(_head_free(program) for program in schedule.programs),
        tail_free=all(_tail_free(rank, ranks) for rank in ranks),
        messages=max(len([m for m in rank.posted_at if isinstance(m, Send)]) for rank in ranks),
        products=max(sum(isinstance(s, Compute) for s in p.steps) for p in schedule.programs),
        buffers=max(_live_buffers(program) for program in schedule.programs),
    )


def _initial(schedule: Schedule, rank: int) -> dict[Place, Content]:
    chunks = schedule.chunks
    return {Place("gathered", chunks.index(piece)): piece for piece in chunks.pieces(rank)}


def _advance(rank: _Rank) -> bool:
    """Run ``rank`` until it waits; whether it moved."""
    start = rank.step
    while not rank.done:
        step = rank.program.steps[rank.step]
        if isinstance(step, Collective) or (isinstance(step, Wait) and not _settled(rank, step.message)):
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
            rank.posts.append(list(messages))
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
    if message in rank.posted_at:
        raise rank.fail(f"posts {message} twice")
    for other in rank.unwaited:
        if other.place == message.place and not (isinstance(other, Send) and isinstance(message, Send)):
            raise rank.fail(f"posts {message} while {other} is in flight")
    if isinstance(message, Send):
        content = rank.content.get(message.place)
        if content is None or (content.piece if isinstance(content, Partial) else content) != message.piece:
            raise rank.fail(f"sends {message.piece} but {message.place} holds {content}")
    else:
        rank.content.pop(message.place, None)
    rank.posted_at[message] = rank.step
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


def _collective(ranks: list[_Rank], schedule: Schedule) -> bool:
    """Run a collective that every rank has reached with nothing in flight; whether there was one."""
    steps = [rank.program.steps[rank.step] if not rank.done else None for rank in ranks]
    if not all(isinstance(step, Collective) and step == steps[0] for step in steps):
        return False
    if any(rank.posts for rank in ranks):
        return False
    chunks = schedule.chunks
    for rank in ranks:
        step = rank.program.steps[rank.step]
        assert isinstance(step, Collective)
        if step.operation == "all_gather":
            rank.content |= {Place("gathered", chunks.index(piece)): piece for piece in chunks.pieces()}
        else:
            for piece in chunks.pieces(rank.program.rank):
                if chunks.size(piece):
                    rank.content[Place("own", piece.sub)] = _scattered(ranks, piece, chunks.index(piece))
    for rank in ranks:
        rank.step += 1
    return True


def _scattered(ranks: list[_Rank], piece: Piece, slot: int) -> Partial:
    contributors: set[int] = set()
    for rank in ranks:
        content = rank.content.get(Place("work", slot))
        if not isinstance(content, Partial) or content.piece != piece:
            raise rank.fail(f"work slot {slot} holds {content}, not a contribution to {piece}")
        contributors |= content.ranks
    return Partial(piece, frozenset(contributors))


def _check_end(rank: _Rank, schedule: Schedule) -> None:
    """Every message waited for, every product of every piece computed, the own chunk complete."""
    chunks = schedule.chunks
    if rank.unwaited:
        raise rank.fail(f"never waits for {rank.unwaited}")
    products = {product for product, _ in rank.computed}
    pieces = [piece for piece in chunks.pieces() if chunks.size(piece)]
    missing = {(product, piece) for product in products for piece in pieces} - rank.computed
    if missing:
        raise rank.fail(f"never computes {missing}")
    everybody = frozenset(range(schedule.ranks))
    scatters = any(place.space == "own" for place in rank.content)
    for piece in chunks.pieces(rank.program.rank) if scatters else ():
        place = Place("own", piece.sub)
        if chunks.size(piece) and rank.content.get(place) != Partial(piece, everybody):
            raise rank.fail(f"{place} ends as {rank.content.get(place)}, not as the sum over all ranks")


def _last_product(program: Program) -> int:
    return max((i for i, step in enumerate(program.steps) if isinstance(step, Compute)), default=-1)


def _head_free(program: Program) -> bool:
    """No product of the rank waits for a message before one has been computed."""
    for step in program.steps:
        match step:
            case Compute():
                return True
            case Collective() | Wait(message=Receive()):
                return False
            case _:
                pass
    return True


def _tail_free(rank: _Rank, ranks: list[_Rank]) -> bool:
    """What is waited for after the last product left before the sender's last product, and nothing starts."""
    last = _last_product(rank.program)
    for step in rank.program.steps[last + 1 :]:
        match step:
            case Post() | Collective():
                return False
            case Wait(message=Receive(piece=piece, peer=peer)):
                sender = ranks[peer]
                end = _last_product(sender.program)
                sent = [
                    at
                    for message, at in sender.posted_at.items()
                    if isinstance(message, Send)
                    and (message.piece, message.peer) == (piece, rank.program.rank)
                ]
                if not sent or max(sent) > end:
                    return False
            case _:
                pass
    return True


def _live_buffers(program: Program) -> int:
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
