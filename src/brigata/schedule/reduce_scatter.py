"""Reduce-scatter programs: every rank computes a contribution to every chunk, and each owner gets the sum.

Tail-free orders compute the own chunk last: its contribution needs no message, so that after the last product
only additions remain. Source of the ring: CommFuse (arXiv 2604.24013), its row-parallel algorithm, with the
receive waited for before it is added and with separate buffers for what leaves and what arrives.
"""

from collections.abc import Callable
from itertools import product as every

from brigata.describe.order import Order
from brigata.schedule import baselines, hierarchical
from brigata.schedule.chunks import Chunks, Piece
from brigata.schedule.request import Arrivals, Outbox, Scatter, work
from brigata.schedule.steps import (
    Add,
    Collective,
    Compute,
    Message,
    Place,
    Post,
    Program,
    Receive,
    Send,
    Step,
    Wait,
)


def reduce_scatter(order: Order, chunks: Chunks, rank: int, product: str) -> Program:
    """The program of ``rank`` for ``product`` on every piece and the reduce-scatter of the results.

    Args:
        order: how messages and products follow each other; ``chunks.parts`` must be ``order.parts``.
        chunks: the cut of the tokens; rank r gets the sum of chunk r.
        rank: whose program.
        product: name of the product that makes a contribution.

    Raises:
        ValueError: the order does not suit the size of the group; the end of a sentence.
    """
    assert chunks.parts == order.parts
    ask = Scatter(order, chunks, rank, range(chunks.parts), product)
    return Program(rank, tuple(scatter_steps(ask)), order.wire)


def scatter_steps(ask: Scatter) -> list[Step]:
    """The steps of a reduce-scatter in the order that ``ask`` names."""
    if ask.ranks == 1:
        pieces = ask.pieces()
        return [Compute(ask.product, tuple(pieces), writes=tuple(ask.own(piece) for piece in pieces))]
    return _ORDERS[ask.order.kind](ask)


def compute_all(ask: Scatter) -> Compute:
    """One product over everything, each piece into the work slot of its number."""
    pieces = ask.pieces()
    return Compute(
        ask.product, tuple(pieces), writes=tuple(work(ask.chunks.index(piece)) for piece in pieces)
    )


def _blocking(ask: Scatter) -> list[Step]:
    return [compute_all(ask), Collective("reduce_scatter")]


def _blocking_p2p(ask: Scatter) -> list[Step]:
    own = Piece(ask.rank)
    messages: list[Message] = []
    for i in range(1, ask.ranks):
        piece = Piece(ask.peer(i))
        messages.append(Send(piece, work(ask.chunks.index(piece)), ask.peer(i)))
        messages.append(Receive(own, work(ask.ranks + i - 1), ask.peer(-i)))
    arrived = (message.place for message in messages if isinstance(message, Receive))
    return [
        compute_all(ask),
        Post(tuple(messages)),
        *(Wait(message) for message in messages),
        Add((*arrived, work(ask.chunks.index(own))), ask.own(own)),
    ]


def slice_steps(ask: Scatter, sub: int) -> tuple[list[Step], Post, list[Step]]:
    """Sub-chunk ``sub`` of every chunk: its products, the start of its exchange, and how that is settled."""
    own = Piece(ask.rank, sub)
    base = sub % 2 * 2 * (ask.ranks - 1)  # two sets of buffers take turns
    computes: list[Step] = []
    messages: list[Message] = []
    for i in range(1, ask.ranks):
        piece, outgoing, incoming = Piece(ask.peer(i), sub), work(base + 2 * i - 2), work(base + 2 * i - 1)
        computes.append(ask.compute(piece, outgoing))
        messages += Send(piece, outgoing, ask.peer(i)), Receive(own, incoming, ask.peer(-i))
    computes.append(ask.compute(own, ask.own(own)))
    sources = (*(message.place for message in messages if isinstance(message, Receive)), ask.own(own))
    return computes, Post(tuple(messages)), [*map(Wait, messages), Add(sources, ask.own(own))]


def _sliced(ask: Scatter) -> list[Step]:
    """The exchange of a slice travels while the next one is computed."""
    steps: list[Step] = []
    settle: list[Step] = []
    for sub in ask.subs:
        computes, post, settle_next = slice_steps(ask, sub)
        steps += [*computes, *settle, post]
        settle = settle_next
    return steps + settle


def _ring(ask: Scatter) -> list[Step]:
    """A chunk's sum travels round the ring to its owner; each rank adds its contribution as it passes."""
    return _rings(ask, [[(sub, 1)] for sub in ask.subs])


def _bidirectional(ask: Scatter) -> list[Step]:
    """Two rings: sub-chunks with even numbers travel right, the others left, both at once."""
    return _rings(ask, [[(sub, 1), (sub + 1, -1)] for sub in ask.subs[::2]])


def _rings(ask: Scatter, lanes: list[list[tuple[int, int]]]) -> list[Step]:
    """Each lane has sub-chunks that go on together, each with its way: 1 is right, -1 is left."""
    depth = len(ask.subs) + len(lanes[0])
    outbox, inbox = Outbox(0, depth), 0
    steps: list[Step] = []
    arriving: dict[Piece, Receive] = {}
    for turn, lane in every(range(ask.ranks), lanes):
        last = turn + 1 == ask.ranks
        computed: list[tuple[Piece, Place, int]] = []
        for sub, way in lane:
            piece = Piece(ask.peer(-way * (turn + 1)), sub)
            free, into = ([], ask.own(piece)) if last else outbox.take()
            steps += [*free, ask.compute(piece, into)]
            computed.append((piece, into, way))
        messages: list[Message] = []
        for piece, into, way in computed:
            if turn > 0:
                steps += [Wait(arriving[piece]), Add((arriving[piece].place, into), into)]
            if not last:
                coming = Piece(ask.peer(-way * (turn + 2)), piece.sub)
                arriving[coming] = Receive(coming, work(depth + inbox % depth), ask.peer(-way))
                inbox += 1
                messages += outbox.send(piece, into, ask.peer(way)), arriving[coming]
        steps += [Post(tuple(messages))] if messages else []
    return steps + outbox.rest()


def _direct(ask: Scatter) -> list[Step]:
    """Every contribution goes straight to its owner, who adds them in a fixed order and its own one last."""
    m = len(ask.subs)
    outbox = Outbox(0, m + 1)
    arrivals = [Arrivals(Place("sum", i)) for i in range(m)]
    steps: list[Step] = []
    for turn, (i, sub) in every(range(1, ask.ranks), enumerate(ask.subs)):
        piece = Piece(ask.peer(turn), sub)
        free, outgoing = outbox.take()
        steps += [*free, ask.compute(piece, outgoing), *arrivals[i].settle()]
        send = outbox.send(piece, outgoing, ask.peer(turn))
        receive = Receive(Piece(ask.rank, sub), work(m + 1 + turn % 2 * m + i), ask.peer(-turn))
        steps.append(Post((send, arrivals[i].expect(receive))))
    for i, sub in enumerate(ask.subs):
        own = ask.own(Piece(ask.rank, sub))
        steps += [ask.compute(Piece(ask.rank, sub), own), *arrivals[i].arrive()]
        steps.append(Add((*arrivals[i].places, own), own))
    return steps + outbox.rest()


_ORDERS: dict[str, Callable[[Scatter], list[Step]]] = {
    "blocking": _blocking,
    "blocking_p2p": _blocking_p2p,
    "sliced": _sliced,
    "ring": _ring,
    "direct": _direct,
    "bidirectional": _bidirectional,
    "hierarchical": hierarchical.scatter,
    "userbuffers": baselines.userbuffers,
    "async_tp": baselines.async_tp,
}
