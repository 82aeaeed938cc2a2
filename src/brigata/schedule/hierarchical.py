"""Nested orders for several nodes: between nodes one message a chunk and node, inside a node the rest.

Rank ``node * g + i`` is the i-th of its node, and between nodes only ranks with the same i talk: rank i of a
node fetches what rank i of another node has, or sends it the sum of its own node's contributions. The direct
order is used on both levels. A message between nodes has the products of a whole node to hide under, g times
as many as one inside. (On a backend whose messages all wait in one stream the messages inside would queue
behind it; there the two levels want a communicator each.)
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from brigata.describe.errors import divisors, one_of
from brigata.schedule.chunks import Piece
from brigata.schedule.request import Arrivals, Gather, Request, Scatter, Turn, compute_as_they_arrive, work
from brigata.schedule.steps import Add, Message, Place, Post, Receive, Send, Step, Wait


class _Grid:
    """Where ``ask.rank`` stands: ``nodes`` nodes of ``size`` ranks."""

    def __init__(self, ask: Request) -> None:
        self.size = ask.order.node
        if ask.ranks % self.size:
            proper = divisors(ask.ranks)[1:-1]
            better = [str(replace(ask.order, node=size)) for size in proper] or ["direct"]
            raise ValueError(
                f"has nodes of {self.size} ranks, which do not divide the {ask.ranks} ranks of the group; "
                f"use {one_of(better)}"
            )
        self.nodes = ask.ranks // self.size
        self.node, self.place = divmod(ask.rank, self.size)

    def rank(self, nodes: int, places: int) -> int:
        """The rank that many nodes and places on."""
        return (self.node + nodes) % self.nodes * self.size + (self.place + places) % self.size


def gather(ask: Gather) -> list[Step]:
    """Node by node, own node first: its chunks are exchanged inside while the next node's chunk comes in."""
    grid = _Grid(ask)

    def turns() -> Iterator[Turn]:
        for turn, hop, sub in product(range(grid.nodes), range(grid.size), ask.subs):
            posts: list[tuple[Message, ...]] = []
            if hop == 0 and turn + 1 < grid.nodes:
                to, source = grid.rank(turn + 1, 0), grid.rank(-turn - 1, 0)
                posts.append((ask.send(Piece(ask.rank, sub), to), ask.receive(Piece(source, sub), source)))
            if hop + 1 < grid.size:
                in_hand, coming = Piece(grid.rank(-turn, 0), sub), Piece(grid.rank(-turn, -hop - 1), sub)
                send = ask.send(in_hand, grid.rank(0, hop + 1))
                posts.append((send, ask.receive(coming, grid.rank(0, -hop - 1))))
            yield Turn((Piece(grid.rank(-turn, -hop), sub),), tuple(posts))

    return compute_as_they_arrive(turns(), ask.compute)


def scatter(ask: Scatter) -> list[Step]:
    """Node by node, own node last: each node sums what it has for a chunk and sends the sum to its owner."""
    grid, nested = _Grid(ask), _NestedScatter(ask)
    for turn in range(1, grid.nodes + 1):
        nested.sum_inside(grid, turn)
    return nested.finish()


class _NestedScatter:
    """The steps of one rank as they come to be, and what is under way between nodes."""

    def __init__(self, ask: Scatter) -> None:
        self.ask = ask
        self.steps: list[Step] = []
        self.inside: list[Send] = []
        self.between: list[Send] = []
        self.arrivals = [Arrivals(Place("sum", i)) for i in range(len(ask.subs))]

    def slot(self, use: int, turn: int, i: int) -> Place:
        """Buffer of the i-th sub-chunk; each use has two sets, which take turns. Use 0: leaves the rank."""
        m = len(self.ask.subs)
        return work((2 * use + turn % 2) * m + i)

    def sum_inside(self, grid: _Grid, turn: int) -> None:
        """The direct order inside the node for the chunks of the node ``turn`` nodes on; then off they go."""
        ask, steps, m = self.ask, self.steps, len(self.ask.subs)
        arrivals = [Arrivals(Place("sum", m + i)) for i in range(m)]
        for hop, (i, sub) in product(range(1, grid.size), enumerate(ask.subs)):
            piece = Piece(grid.rank(turn, hop), sub)
            outgoing = self.slot(0, len(self.inside) // m, i)
            steps += [Wait(send) for send in self.inside[: -2 * m + 1][-1:]]
            steps += [ask.compute(piece, outgoing), *arrivals[i].settle()]
            send = Send(piece, outgoing, grid.rank(0, hop))
            incoming = self.slot(1, hop, i)
            receive = Receive(Piece(grid.rank(turn, 0), sub), incoming, grid.rank(0, -hop))
            arrivals[i].expect(receive)
            steps.append(Post((send, receive)))
            self.inside.append(send)
        for i, sub in enumerate(ask.subs):
            self._hand_over(grid, turn, i, Piece(grid.rank(turn, 0), sub), arrivals[i])
