"""Reduce-scatter programs: every rank computes a contribution to every chunk, and each owner gets the sum.

Tail-free orders compute the own chunk last: its contribution needs no message, so that after the last product
only additions remain. Source of the ring: CommFuse (arXiv 2604.24013), its row-parallel algorithm, with the
receive waited for before it is added and with separate buffers for what leaves and what arrives.
"""

from collections.abc import Callable

from brigata.describe.order import Order
from brigata.schedule.chunks import Chunks, Piece
from brigata.schedule.steps import (
    Add,
    Collective,
    Compute,
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
    """
    assert chunks.parts == order.parts
    build = _ORDERS[order.kind] if chunks.ranks > 1 else _alone
    return Program(rank, tuple(build(chunks, rank, product)))


def _work(slot: int) -> Place:
    return Place("work", slot)


def _own(piece: Piece) -> Place:
    return Place("own", piece.sub)


def _compute(product: str, piece: Piece, into: Place) -> Compute:
    return Compute(product, (piece,), writes=(into,))


def _alone(chunks: Chunks, rank: int, product: str) -> list[Step]:
    pieces = chunks.pieces()
    return [Compute(product, tuple(pieces), writes=tuple(_own(piece) for piece in pieces))]


def _compute_all(chunks: Chunks, product: str) -> Compute:
    pieces = chunks.pieces()
    return Compute(product, tuple(pieces), writes=tuple(_work(chunks.index(piece)) for piece in pieces))


def _blocking(chunks: Chunks, rank: int, product: str) -> list[Step]:
    return [_compute_all(chunks, product), Collective("reduce_scatter")]


def _blocking_p2p(chunks: Chunks, rank: int, product: str) -> list[Step]:
    n = chunks.ranks
    own = Piece(rank)
    sends, receives = [], []
    for i in range(1, n):
        to, source = (rank + i) % n, (rank - i) % n
        sends.append(Send(Piece(to), _work(chunks.index(Piece(to))), to))
        receives.append(Receive(own, _work(n + i - 1), source))
    paired = tuple(message for pair in zip(sends, receives, strict=True) for message in pair)
    sources = (*(receive.place for receive in receives), _work(chunks.index(own)))
    return [
        _compute_all(chunks, product),
        Post(paired),
        *(Wait(message) for message in paired),
        Add(sources, _own(own)),
    ]


def _sliced(chunks: Chunks, rank: int, product: str) -> list[Step]:
    """Slice s is sub-chunk s of every chunk; its exchange travels while slice s + 1 is computed."""
    n = chunks.ranks
    steps: list[Step] = []
    settle: list[Step] = []
    for sub in range(chunks.parts):
        own = Piece(rank, sub)
        base = (sub % 2) * 2 * (n - 1)  # two sets of buffers take turns
        sends, receives = [], []
        for i in range(1, n):
            to, source = (rank + i) % n, (rank - i) % n
            outgoing, incoming = _work(base + 2 * (i - 1)), _work(base + 2 * (i - 1) + 1)
            steps.append(_compute(product, Piece(to, sub), outgoing))
            sends.append(Send(Piece(to, sub), outgoing, to))
            receives.append(Receive(own, incoming, source))
        steps.append(_compute(product, own, _own(own)))
        steps += settle
        paired = tuple(message for pair in zip(sends, receives, strict=True) for message in pair)
        steps.append(Post(paired))
        sources = (*(receive.place for receive in receives), _own(own))
        settle = [*(Wait(message) for message in paired), Add(sources, _own(own))]
    return steps + settle


def _ring(chunks: Chunks, rank: int, product: str) -> list[Step]:
    """A chunk's sum travels round the ring to its owner; each rank adds its contribution as it passes."""
    n, depth = chunks.ranks, chunks.parts + 1
    steps: list[Step] = []
    sends: list[Send] = []
    arriving: dict[Piece, Receive] = {}
    turns = [(turn, sub) for turn in range(n) for sub in range(chunks.parts)]
    for j, (turn, sub) in enumerate(turns):
        piece = Piece((rank - turn - 1) % n, sub)
        last = turn == n - 1
        into = _own(piece) if last else _work(j % depth)
        if not last and j >= depth:
            steps.append(Wait(sends[j - depth]))
        steps.append(_compute(product, piece, into))
        if turn > 0:
            receive = arriving[piece]
            steps += [Wait(receive), Add((receive.place, into), into)]
        if not last:
            send = Send(piece, into, (rank + 1) % n)
            receive = Receive(Piece((rank - turn - 2) % n, sub), _work(depth + j % depth), (rank - 1) % n)
            steps.append(Post((send, receive)))
            sends.append(send)
            arriving[receive.piece] = receive
    return steps + [Wait(send) for send in sends[-depth:]]


def _direct(chunks: Chunks, rank: int, product: str) -> list[Step]:
    """Every contribution goes straight to its owner, who adds them in a fixed order and its own one last."""
    n, m = chunks.ranks, chunks.parts
    depth = m + 1
    steps: list[Step] = []
    sends: list[Send] = []
    arrived: dict[int, list[Place]] = {sub: [] for sub in range(m)}
    pending: dict[int, Receive] = {}

    def settle(sub: int) -> None:
        """Wait for the contribution under way to ``sub`` and, when there are two, make them one sum."""
        receive = pending.pop(sub)
        steps.append(Wait(receive))
        arrived[sub].append(receive.place)
        if len(arrived[sub]) == 2:
            total = Place("sum", sub)
            steps.append(Add(tuple(arrived[sub]), total))
            arrived[sub] = [total]

    for j, (turn, sub) in enumerate((turn, sub) for turn in range(1, n) for sub in range(m)):
        to, source = (rank + turn) % n, (rank - turn) % n
        outgoing = _work(j % depth)
        if j >= depth:
            steps.append(Wait(sends[j - depth]))
        steps.append(_compute(product, Piece(to, sub), outgoing))
        if sub in pending:
            settle(sub)
        send = Send(Piece(to, sub), outgoing, to)
        pending[sub] = Receive(Piece(rank, sub), _work(depth + (turn % 2) * m + sub), source)
        steps.append(Post((send, pending[sub])))
        sends.append(send)
    for sub in range(m):
        own, last = Place("own", sub), pending[sub]
        steps += [_compute(product, Piece(rank, sub), own), Wait(last)]
        steps.append(Add((*arrived[sub], last.place, own), own))
    return steps + [Wait(send) for send in sends[-depth:]]


_ORDERS: dict[str, Callable[[Chunks, int, str], list[Step]]] = {
    "blocking": _blocking,
    "blocking_p2p": _blocking_p2p,
    "sliced": _sliced,
    "ring": _ring,
    "direct": _direct,
}
