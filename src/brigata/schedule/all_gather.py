"""All-gather programs: every rank's chunk reaches every rank, and products are computed on each piece.

Head-free orders compute on the own chunk first, while the first foreign one travels. Source of the ring's
order of computation: CommFuse (arXiv 2604.24013), algorithm 1; ``direct`` sends every chunk straight to its
reader.
"""

from collections.abc import Callable, Sequence

from brigata.describe.order import Order
from brigata.schedule.chunks import Chunks, Piece
from brigata.schedule.steps import (
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


def all_gather(order: Order, chunks: Chunks, rank: int, products: Sequence[str]) -> Program:
    """The program of ``rank`` for an all-gather of ``chunks`` and ``products`` on every piece.

    Args:
        order: how messages and products follow each other; ``chunks.parts`` must be ``order.parts``.
        chunks: the cut of the tokens; rank r owns chunk r.
        rank: whose program.
        products: names of the products computed on each piece, in this order.
    """
    assert chunks.parts == order.parts
    build = _ORDERS[order.kind] if chunks.ranks > 1 else _alone
    return Program(rank, tuple(build(chunks, rank, products)))


def _place(chunks: Chunks, piece: Piece) -> Place:
    return Place("gathered", chunks.index(piece))


def _compute(chunks: Chunks, pieces: Sequence[Piece], products: Sequence[str]) -> list[Step]:
    reads = tuple(_place(chunks, piece) for piece in pieces)
    return [Compute(product, tuple(pieces), reads=reads) for product in products]


def _send(chunks: Chunks, piece: Piece, peer: int) -> Send:
    return Send(piece, _place(chunks, piece), peer)


def _receive(chunks: Chunks, piece: Piece, peer: int) -> Receive:
    return Receive(piece, _place(chunks, piece), peer)


def _alone(chunks: Chunks, rank: int, products: Sequence[str]) -> list[Step]:
    return _compute(chunks, chunks.pieces(), products)


def _blocking(chunks: Chunks, rank: int, products: Sequence[str]) -> list[Step]:
    return [Collective("all_gather"), *_compute(chunks, chunks.pieces(), products)]


def _exchange(chunks: Chunks, rank: int, sub: int) -> list[Message]:
    """Everybody's sub-chunk ``sub`` to everybody, nearest peer first."""
    n = chunks.ranks
    messages: list[Message] = []
    for i in range(1, n):
        messages.append(_send(chunks, Piece(rank, sub), (rank + i) % n))
        messages.append(_receive(chunks, Piece((rank - i) % n, sub), (rank - i) % n))
    return messages


def _blocking_p2p(chunks: Chunks, rank: int, products: Sequence[str]) -> list[Step]:
    messages = _exchange(chunks, rank, 0)
    waits = [Wait(message) for message in messages]
    return [Post(tuple(messages)), *waits, *_compute(chunks, chunks.pieces(), products)]


def _sliced(chunks: Chunks, rank: int, products: Sequence[str]) -> list[Step]:
    """Slice s is sub-chunk s of every chunk; its exchange travels while slice s - 1 is computed."""
    exchanges = [_exchange(chunks, rank, sub) for sub in range(chunks.parts)]
    steps: list[Step] = [Post(tuple(exchanges[0]))]
    for sub, messages in enumerate(exchanges):
        steps += [Wait(message) for message in messages]
        if sub + 1 < len(exchanges):
            steps.append(Post(tuple(exchanges[sub + 1])))
        for chunk in range(chunks.ranks):
            steps += _compute(chunks, [Piece(chunk, sub)], products)
    return steps


def _own_first(
    chunks: Chunks, rank: int, products: Sequence[str], forwarded: Callable[[int, int], tuple[Send, Receive]]
) -> list[Step]:
    """Compute chunk rank - i at turn i, while ``forwarded(turn, sub)`` brings the chunk of the next turn."""
    n = chunks.ranks
    steps: list[Step] = []
    sends: list[Send] = []
    arriving: dict[Piece, Receive] = {}
    for turn in range(n):
        for sub in range(chunks.parts):
            piece = Piece((rank - turn) % n, sub)
            if turn > 0:
                steps.append(Wait(arriving[piece]))
            if turn + 1 < n:
                send, receive = forwarded(turn, sub)
                steps.append(Post((send, receive)))
                sends.append(send)
                arriving[receive.piece] = receive
            steps += _compute(chunks, [piece], products)
    return steps + [Wait(send) for send in sends]


def _ring(chunks: Chunks, rank: int, products: Sequence[str]) -> list[Step]:
    """The chunk in hand goes on to the next rank while it is computed on."""
    n = chunks.ranks

    def forwarded(turn: int, sub: int) -> tuple[Send, Receive]:
        in_hand, coming = Piece((rank - turn) % n, sub), Piece((rank - turn - 1) % n, sub)
        return _send(chunks, in_hand, (rank + 1) % n), _receive(chunks, coming, (rank - 1) % n)

    return _own_first(chunks, rank, products, forwarded)


def _direct(chunks: Chunks, rank: int, products: Sequence[str]) -> list[Step]:
    """The own chunk goes straight to each reader in turn; nothing is forwarded."""
    n = chunks.ranks

    def forwarded(turn: int, sub: int) -> tuple[Send, Receive]:
        reader, owner = (rank + turn + 1) % n, (rank - turn - 1) % n
        return _send(chunks, Piece(rank, sub), reader), _receive(chunks, Piece(owner, sub), owner)

    return _own_first(chunks, rank, products, forwarded)


_ORDERS: dict[str, Callable[[Chunks, int, Sequence[str]], list[Step]]] = {
    "blocking": _blocking,
    "blocking_p2p": _blocking_p2p,
    "sliced": _sliced,
    "ring": _ring,
    "direct": _direct,
}
