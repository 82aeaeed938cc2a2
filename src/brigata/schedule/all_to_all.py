"""All-to-all programs: every rank has a piece for every rank, and a product is computed before or after.

Compute-then-send works on remote pieces first and on its own last, receive-then-compute on its own first.
Every piece goes straight to its reader: relays (a ring, two levels) would move more bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from brigata.describe.order import Order
from brigata.schedule.chunks import Pairs, Piece
from brigata.schedule.request import Turn, compute_as_they_arrive
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

When = Literal["before", "after"]


def all_to_all(order: Order, pairs: Pairs, rank: int, products: Sequence[str], compute: When) -> Program:
    """The program of ``rank`` for an all-to-all of ``pairs`` with ``products`` on every piece.

    Args:
        order: how messages and products follow each other; ``pairs.parts`` must be ``order.parts``.
        pairs: what each rank has for each rank.
        rank: whose program.
        products: names of the products, in this order; exactly one that is computed before.
        compute: ``before`` a piece leaves (what stays here is computed into ``incoming``), or ``after`` it
            has arrived (what stays here lies in ``incoming`` from the start).

    Raises:
        ValueError: the order has no all-to-all; the end of a sentence.
    """
    assert pairs.parts == order.parts
    assert compute == "after" or len(products) == 1, products
    builders = _BEFORE if compute == "before" else _AFTER
    if order.kind not in builders:
        raise ValueError(_refusal(order))
    ask = _AllToAll(pairs, rank, tuple(products))
    if pairs.ranks > 1:
        steps = builders[order.kind](ask)
    else:
        steps = ask.compute_into("incoming") if compute == "before" else ask.compute(*pairs.incoming(rank))
    return Program(rank, tuple(steps), order.wire)


def _refusal(order: Order) -> str:
    relays = order.kind in ("ring", "bidirectional", "hierarchical")
    why = ", because pieces that travel through other ranks move more bytes" if relays else ""
    return f"has no all-to-all{why}; use direct"


@dataclass(frozen=True)
class _AllToAll:
    pairs: Pairs
    rank: int
    products: tuple[str, ...]

    def peer(self, distance: int) -> int:
        """The rank that many ranks to the right."""
        return (self.rank + distance) % self.pairs.ranks

    def kept(self, sub: int) -> Piece:
        """What stays here."""
        return Piece(self.rank, sub, self.rank)

    def outgoing(self, piece: Piece) -> Place:
        return Place("outgoing", piece.chunk * self.pairs.parts + piece.sub)

    def incoming(self, piece: Piece) -> Place:
        assert piece.source is not None
        return Place("incoming", piece.source * self.pairs.parts + piece.sub)

    def swap(self, distance: int, sub: int) -> tuple[Send, Receive]:
        """A piece to the rank that far to the right, and one from the rank that far to the left."""
        to, source = self.peer(distance), self.peer(-distance)
        leaving, coming = Piece(to, sub, self.rank), Piece(self.rank, sub, source)
        return Send(leaving, self.outgoing(leaving), to), Receive(coming, self.incoming(coming), source)

    def exchange(self, sub: int) -> tuple[Message, ...]:
        """Everybody's sub-chunk ``sub`` to everybody, nearest peer first."""
        return tuple(message for i in range(1, self.pairs.ranks) for message in self.swap(i, sub))

    def compute(self, *pieces: Piece) -> list[Step]:
        """Every product on ``pieces``, which have arrived."""
        reads = tuple(self.incoming(piece) for piece in pieces)
        return [Compute(product, pieces, reads=reads) for product in self.products]

    def compute_piece(self, piece: Piece) -> Compute:
        """The product that makes ``piece``, at once where it belongs if it stays here."""
        into = self.incoming(piece) if piece.chunk == self.rank else self.outgoing(piece)
        return Compute(self.products[0], (piece,), writes=(into,))

    def compute_into(self, space: Literal["outgoing", "incoming"]) -> list[Step]:
        """One product that makes every piece, kept ones too."""
        pieces = self.pairs.outgoing(self.rank)
        writes = tuple(Place(space, i) for i in range(len(pieces)))
        return [Compute(self.products[0], tuple(pieces), writes=writes)]


def _blocking_before(ask: _AllToAll) -> list[Step]:
    return [*ask.compute_into("outgoing"), Collective("all_to_all")]


def _blocking_after(ask: _AllToAll) -> list[Step]:
    return [Collective("all_to_all"), *ask.compute(*ask.pairs.incoming(ask.rank))]


def _p2p_before(ask: _AllToAll) -> list[Step]:
    messages, kept = ask.exchange(0), ask.kept(0)
    copy = Add((ask.outgoing(kept),), ask.incoming(kept))
    return [*ask.compute_into("outgoing"), Post(messages), copy, *map(Wait, messages)]


def _p2p_after(ask: _AllToAll) -> list[Step]:
    messages = ask.exchange(0)
    return [Post(messages), *map(Wait, messages), *ask.compute(*ask.pairs.incoming(ask.rank))]


def _sliced_before(ask: _AllToAll) -> list[Step]:
    """Slice s is sub-chunk s of every piece; its exchange travels while slice s + 1 is computed."""
    steps: list[Step] = []
    waits: list[Step] = []
    for sub in range(ask.pairs.parts):
        messages = ask.exchange(sub)
        steps += [ask.compute_piece(message.piece) for message in messages if isinstance(message, Send)]
        steps += [ask.compute_piece(ask.kept(sub)), *waits, Post(messages)]
        waits = [Wait(message) for message in messages]
    return steps + waits


def _sliced_after(ask: _AllToAll) -> list[Step]:
    """The exchange of slice s travels while slice s - 1 is computed."""
    exchanges = [ask.exchange(sub) for sub in range(ask.pairs.parts)]
    steps: list[Step] = [Post(exchanges[0])]
    for sub, messages in enumerate(exchanges):
        steps += map(Wait, messages)
        steps += [Post(following) for following in exchanges[sub + 1 : sub + 2]]
        for source in range(ask.pairs.ranks):
            steps += ask.compute(Piece(ask.rank, sub, source))
    return steps


def _direct_before(ask: _AllToAll) -> list[Step]:
    """Remote pieces leave as they are computed, own ones are computed last."""
    swaps = [ask.swap(i, sub) for i in range(1, ask.pairs.ranks) for sub in range(ask.pairs.parts)]
    steps: list[Step] = []
    for pair in swaps:
        steps += [ask.compute_piece(pair[0].piece), Post(pair)]
    steps += [ask.compute_piece(ask.kept(sub)) for sub in range(ask.pairs.parts)]
    return [*steps, *(Wait(message) for pair in swaps for message in pair)]


def _direct_after(ask: _AllToAll) -> list[Step]:
    """Own pieces are computed on first; each message travels under the product on the piece before it."""

    def turns() -> Iterator[Turn]:
        for turn in range(ask.pairs.ranks):
            for sub in range(ask.pairs.parts):
                posts = (ask.swap(turn + 1, sub),) if turn + 1 < ask.pairs.ranks else ()
                yield Turn((Piece(ask.rank, sub, ask.peer(-turn)),), posts)

    return compute_as_they_arrive(turns(), ask.compute)


_BEFORE: dict[str, Callable[[_AllToAll], list[Step]]] = {
    "blocking": _blocking_before,
    "blocking_p2p": _p2p_before,
    "sliced": _sliced_before,
    "direct": _direct_before,
}
_AFTER: dict[str, Callable[[_AllToAll], list[Step]]] = {
    "blocking": _blocking_after,
    "blocking_p2p": _p2p_after,
    "sliced": _sliced_after,
    "direct": _direct_after,
}
