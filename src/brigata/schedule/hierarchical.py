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
from brigata.schedule.request import (
    Arrivals,
    Gather,
    Outbox,
    Request,
    Scatter,
    Turn,
    compute_as_they_arrive,
    work,
)
from brigata.schedule.steps import Add, Message, Place, Post, Receive, Step


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
        for turn, sub, hop in product(range(grid.nodes), ask.subs, range(grid.size)):
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
    """Node by node, own node last: a node sums what it has for a chunk and sends the sum to the owner."""
    grid, m = _Grid(ask), len(ask.subs)
    inside, between = Outbox(0, m + 1), Outbox(m + 1, 2 * m)
    inboxes = 3 * m + 1
    sums = [Arrivals(Place("sum", i)) for i in range(m)]
    steps: list[Step] = []
    for turn in range(1, grid.nodes + 1):
        stays = turn == grid.nodes
        node_sums = [Arrivals(Place("sum", m + i)) for i in range(m)]
        for hop, (i, sub) in product(range(1, grid.size), enumerate(ask.subs)):
            piece, mine = Piece(grid.rank(turn, hop), sub), Piece(grid.rank(turn, 0), sub)
            free, outgoing = inside.take()
            steps += [*free, ask.compute(piece, outgoing), *node_sums[i].settle()]
            send = inside.send(piece, outgoing, grid.rank(0, hop))
            receive = Receive(mine, work(inboxes + hop % 2 * m + i), grid.rank(0, -hop))
            steps.append(Post((send, node_sums[i].expect(receive))))
        for i, sub in enumerate(ask.subs):
            piece = Piece(grid.rank(turn, 0), sub)
            free, into = ([], ask.own(piece)) if stays else between.take()
            steps += [*free, ask.compute(piece, into), *node_sums[i].arrive()]
            steps += sums[i].arrive() if stays else ()
            parts = (*(sums[i].places if stays else ()), *node_sums[i].places)
            steps += [Add((*parts, into), into)] if parts else []
            if not stays:
                steps += sums[i].settle()
                send = between.send(piece, into, grid.rank(turn, 0))
                slot, source = inboxes + (2 + turn % 2) * m + i, grid.rank(-turn, 0)
                receive = Receive(Piece(ask.rank, sub), work(slot), source)
                steps.append(Post((send, sums[i].expect(receive))))
    return steps + inside.rest() + between.rest()
