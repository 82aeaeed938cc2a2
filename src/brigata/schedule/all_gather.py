"""All-gather programs: every rank's chunk reaches every rank, and products are computed on each piece.

Head-free orders compute on the own chunk first, while the first foreign one travels. Source of the ring's
order of computation: CommFuse (arXiv 2604.24013), algorithm 1; ``direct`` sends every chunk straight to its
reader.
"""

from collections.abc import Callable, Iterator, Sequence

from brigata.describe.order import Order
from brigata.schedule import baselines, hierarchical
from brigata.schedule.chunks import Chunks, Piece
from brigata.schedule.request import Gather, Turn, compute_as_they_arrive
from brigata.schedule.steps import Collective, Message, Post, Program, Step, Wait


def all_gather(order: Order, chunks: Chunks, rank: int, products: Sequence[str]) -> Program:
    """The program of ``rank`` for an all-gather of ``chunks`` and ``products`` on every piece.

    Args:
        order: how messages and products follow each other; ``chunks.parts`` must be ``order.parts``.
        chunks: the cut of the tokens; rank r owns chunk r.
        rank: whose program.
        products: names of the products computed on each piece, in this order.

    Raises:
        ValueError: the order does not suit the size of the group; the end of a sentence.
    """
    assert chunks.parts == order.parts
    ask = Gather(order, chunks, rank, range(chunks.parts), tuple(products))
    return Program(rank, tuple(gather_steps(ask)), order.wire)


def gather_steps(ask: Gather) -> list[Step]:
    """The steps of an all-gather in the order that ``ask`` names."""
    if ask.ranks == 1:
        return ask.compute(*ask.pieces())
    return _ORDERS[ask.order.kind](ask)


def exchange(ask: Gather, sub: int) -> list[Message]:
    """Everybody's sub-chunk ``sub`` to everybody, nearest peer first."""
    messages: list[Message] = []
    for i in range(1, ask.ranks):
        messages.append(ask.send(Piece(ask.rank, sub), ask.peer(i)))
        messages.append(ask.receive(Piece(ask.peer(-i), sub), ask.peer(-i)))
    return messages


def _blocking(ask: Gather) -> list[Step]:
    return [Collective("all_gather"), *ask.compute(*ask.pieces())]


def _blocking_p2p(ask: Gather) -> list[Step]:
    messages = exchange(ask, 0)
    return [Post(tuple(messages)), *(Wait(message) for message in messages), *ask.compute(*ask.pieces())]


def _sliced(ask: Gather) -> list[Step]:
    """Slice s is sub-chunk s of every chunk; its exchange travels while slice s - 1 is computed."""
    exchanges = [exchange(ask, sub) for sub in ask.subs]
    steps: list[Step] = [Post(tuple(exchanges[0]))]
    for i, messages in enumerate(exchanges):
        steps += [Wait(message) for message in messages]
        if i + 1 < len(exchanges):
            steps.append(Post(tuple(exchanges[i + 1])))
        for chunk in range(ask.ranks):
            steps += ask.compute(Piece(chunk, ask.subs[i]))
    return steps


def _ring(ask: Gather) -> list[Step]:
    """The chunk in hand goes on to the next rank while it is computed on."""
    return _rings(ask, [[(sub, 1)] for sub in ask.subs])


def _bidirectional(ask: Gather) -> list[Step]:
    """Two rings: sub-chunks with even numbers travel right, the others left, both at once."""
    return _rings(ask, [[(sub, 1), (sub + 1, -1)] for sub in ask.subs[::2]])


def _rings(ask: Gather, lanes: list[list[tuple[int, int]]]) -> list[Step]:
    """Each lane has sub-chunks that go on together, each with its way: 1 is right, -1 is left."""

    def turns() -> Iterator[Turn]:
        for turn in range(ask.ranks):
            for lane in lanes:
                in_hand = [(Piece(ask.peer(-way * turn), sub), way) for sub, way in lane]
                messages: list[Message] = []
                for piece, way in in_hand if turn + 1 < ask.ranks else ():
                    coming = Piece(ask.peer(-way * (turn + 1)), piece.sub)
                    messages += ask.send(piece, ask.peer(way)), ask.receive(coming, ask.peer(-way))
                yield Turn(tuple(piece for piece, _ in in_hand), (tuple(messages),) if messages else ())

    return compute_as_they_arrive(turns(), ask.compute)


def _direct(ask: Gather) -> list[Step]:
    """The own chunk goes straight to each reader in turn; nothing is forwarded."""

    def turns() -> Iterator[Turn]:
        for turn in range(ask.ranks):
            reader, owner = ask.peer(turn + 1), ask.peer(-turn - 1)
            for sub in ask.subs:
                pair = (ask.send(Piece(ask.rank, sub), reader), ask.receive(Piece(owner, sub), owner))
                yield Turn((Piece(ask.peer(-turn), sub),), (pair,) if turn + 1 < ask.ranks else ())

    return compute_as_they_arrive(turns(), ask.compute)


_ORDERS: dict[str, Callable[[Gather], list[Step]]] = {
    "blocking": _blocking,
    "blocking_p2p": _blocking_p2p,
    "sliced": _sliced,
    "ring": _ring,
    "direct": _direct,
    "bidirectional": _bidirectional,
    "hierarchical": hierarchical.gather,
    "userbuffers": _ring,
    "async_tp": lambda ask: baselines.between_barriers(_direct(ask)),
}
