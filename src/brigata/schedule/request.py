"""What a generator is asked for, and the steps as every order of that collective spells them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from brigata.describe.order import Order
from brigata.schedule.chunks import Chunks, Piece
from brigata.schedule.steps import Add, Compute, Place, Post, Receive, Send, Step, Wait


@dataclass(frozen=True)
class Request:
    """One rank's share of a collective over ``subs``, the sub-chunks that it is about (ordinarily all)."""

    order: Order
    chunks: Chunks
    rank: int
    subs: Sequence[int]

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.chunks.ranks

    def peer(self, distance: int) -> int:
        """The rank that many ranks to the right."""
        return (self.rank + distance) % self.ranks

    def pieces(self) -> list[Piece]:
        """All pieces in token order."""
        return [Piece(chunk, sub) for chunk in range(self.ranks) for sub in self.subs]


@dataclass(frozen=True)
class Gather(Request):
    """``products`` on every piece, each after its arrival."""

    products: tuple[str, ...]

    def place(self, piece: Piece) -> Place:
        """Where ``piece`` lies."""
        return Place("gathered", self.chunks.index(piece))

    def compute(self, *pieces: Piece) -> list[Step]:
        """Every product on ``pieces``."""
        reads = tuple(self.place(piece) for piece in pieces)
        return [Compute(product, pieces, reads=reads) for product in self.products]

    def send(self, piece: Piece, peer: int) -> Send:
        """``piece`` to ``peer``."""
        return Send(piece, self.place(piece), peer)

    def receive(self, piece: Piece, peer: int) -> Receive:
        """``piece`` from ``peer``."""
        return Receive(piece, self.place(piece), peer)


@dataclass(frozen=True)
class Scatter(Request):
    """``product`` on every piece, the results summed over ranks, each chunk's at its owner in ``result``."""

    product: str
    result: Literal["own", "gathered"] = "own"

    def own(self, piece: Piece) -> Place:
        """Where the sum of ``piece``, one of this rank's, is wanted."""
        if self.result == "own":
            return Place("own", piece.sub)
        return Place("gathered", self.chunks.index(piece))

    def compute(self, piece: Piece, into: Place) -> Compute:
        """This rank's contribution to ``piece``."""
        return Compute(self.product, (piece,), writes=(into,))


def work(slot: int) -> Place:
    """A buffer for a partial sum."""
    return Place("work", slot)


@dataclass(frozen=True)
class Turn:
    """Pieces to compute on, once they have arrived, and messages to start first, each tuple together."""

    pieces: tuple[Piece, ...]
    posts: tuple[tuple[Send | Receive, ...], ...] = ()


def compute_as_they_arrive(turns: Iterable[Turn], compute: Callable[..., list[Step]]) -> list[Step]:
    """Each turn in its order: wait for its pieces, start its messages, compute on its pieces meanwhile."""
    steps: list[Step] = []
    sends: list[Send] = []
    arriving: dict[Piece, Receive] = {}
    for turn in turns:
        steps += [Wait(arriving[piece]) for piece in turn.pieces if piece in arriving]
        for messages in turn.posts:
            steps.append(Post(messages))
            sends += [message for message in messages if isinstance(message, Send)]
            arriving |= {message.piece: message for message in messages if isinstance(message, Receive)}
        for piece in turn.pieces:
            steps += compute(piece)
    return steps + [Wait(send) for send in sends]


class Outbox:
    """Buffers for what leaves, slots from ``first`` on in turn; one is free when its message has left."""

    def __init__(self, first: int, depth: int) -> None:
        self._first, self._depth = first, depth
        self._taken = 0
        self._sends: list[Send] = []

    def take(self) -> tuple[list[Step], Place]:
        """The next buffer, and the wait until it is free."""
        number, self._taken = self._taken, self._taken + 1
        before = number - self._depth
        waits: list[Step] = [Wait(self._sends[before])] if before >= 0 else []
        return waits, work(self._first + number % self._depth)

    def send(self, piece: Piece, place: Place, peer: int) -> Send:
        """``piece`` to ``peer``; buffers are sent in the order in which they were taken."""
        self._sends.append(Send(piece, place, peer))
        return self._sends[-1]

    def rest(self) -> list[Step]:
        """Waits for the messages that no ``take`` has waited for."""
        return [Wait(send) for send in self._sends[-self._depth :]]


class Arrivals:
    """Contributions to one piece that arrive one after the other; at most two of them are kept.

    ``places`` has the parts of the sum. With two arrivals or fewer the accumulator ``total`` is not used.
    """

    def __init__(self, total: Place) -> None:
        self.places: tuple[Place, ...] = ()
        self._total = total
        self._under_way: Receive | None = None

    def expect(self, receive: Receive) -> Receive:
        """The next contribution, about to be posted."""
        assert self._under_way is None, f"{self._under_way} is not settled"
        self._under_way = receive
        return receive

    def settle(self) -> list[Step]:
        """Wait for the contribution under way and, when there are two, make them one sum."""
        steps = self.arrive()
        if len(self.places) == 2:
            steps.append(Add(self.places, self._total))
            self.places = (self._total,)
        return steps

    def arrive(self) -> list[Step]:
        """Wait for the contribution under way, if there is one."""
        if self._under_way is None:
            return []
        receive, self._under_way = self._under_way, None
        self.places += (receive.place,)
        return [Wait(receive)]
