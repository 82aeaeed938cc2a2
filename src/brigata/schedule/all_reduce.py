"""All-reduce programs: a reduce-scatter, then an all-gather of the finished chunks; every rank gets the sum.

A sum can leave when it is complete, so the last all-gather has no product of its operator to hide under.
Cut into slices, sub-chunk by sub-chunk, only the last slice's all-gather stays exposed; an earlier slice's
travels under the products of the next.
"""

from collections.abc import Iterator, Sequence

from brigata.describe.order import Order
from brigata.schedule.all_gather import exchange, gather_steps
from brigata.schedule.chunks import Chunks
from brigata.schedule.reduce_scatter import scatter_steps, slice_steps
from brigata.schedule.request import Gather, Scatter
from brigata.schedule.steps import Collective, Compute, Post, Program, Receive, Step, Wait


def all_reduce(order: Order, chunks: Chunks, rank: int, product: str) -> Program:
    """The program of ``rank`` for ``product`` on every piece, summed over ranks into all ``gathered``.

    Args:
        order: how messages and products follow each other; ``chunks.parts`` must be ``order.parts``.
        chunks: the cut of the tokens; rank r sums chunk r for everybody.
        rank: whose program.
        product: name of the product that makes a contribution.

    Raises:
        ValueError: the order does not suit the size of the group; the end of a sentence.
    """
    assert chunks.parts == order.parts
    scatter = Scatter(order, chunks, rank, range(chunks.parts), product, result="gathered")
    gather = Gather(order, chunks, rank, range(chunks.parts), ())
    if chunks.ranks == 1:
        steps = scatter_steps(scatter)
    elif order.kind == "blocking":
        steps = _blocking(scatter, gather)
    elif order.kind == "sliced":
        steps = _sliced(scatter, gather)
    else:
        steps = _slice_by_slice(order, chunks, rank, product)
    return Program(rank, tuple(steps), order.wire)


def _blocking(scatter: Scatter, gather: Gather) -> list[Step]:
    pieces = tuple(scatter.pieces())
    writes = tuple(gather.place(piece) for piece in pieces)
    return [Compute(scatter.product, pieces, writes=writes), Collective("all_reduce")]


def _sliced(scatter: Scatter, gather: Gather) -> list[Step]:
    """A slice's first exchange travels while the next one is computed, its second while the one after is."""
    steps: list[Step] = []
    settle: list[Step] = []
    finished: list[Step] = []
    for sub in scatter.subs:
        computes, post, arrive = slice_steps(scatter, sub)
        steps += [*computes, *settle, post]
        messages = exchange(gather, sub)
        settle = [*arrive, Post(tuple(messages))]
        finished += map(Wait, messages)
    return steps + settle + finished


def _slice_by_slice(order: Order, chunks: Chunks, rank: int, product: str) -> list[Step]:
    """Each slice in the order's own way; its all-gather goes on under the products of the next slice."""
    width = 2 if order.kind == "bidirectional" else 1
    steps: list[Step] = []
    gathering: list[Step] = []
    for first in range(0, chunks.parts, width):
        subs = range(first, first + width)
        scattering = scatter_steps(Scatter(order, chunks, rank, subs, product, result="gathered"))
        steps += _under_products(scattering, gathering)
        gather = Gather(order, chunks, rank, subs, ())
        gathering = gather_steps(gather)
    if order.kind == "direct":  # with no product left to wait for, everything leaves at once
        messages = exchange(gather, chunks.parts - 1)
        gathering = [Post(tuple(messages)), *map(Wait, messages)]
    return steps + gathering


def _under_products(steps: Sequence[Step], messages: Sequence[Step]) -> list[Step]:
    """``steps``, with one hop of ``messages`` before each product."""
    hops = _hops(messages)
    merged: list[Step] = []
    for step in steps:
        if isinstance(step, Compute):
            merged += next(hops, [])
        merged.append(step)
    return [*merged, *(step for hop in hops for step in hop)]


def _hops(messages: Sequence[Step]) -> Iterator[list[Step]]:
    """What starts at once, then each arrival with what it lets start."""
    hop: list[Step] = []
    for step in messages:
        arrives = isinstance(step, Wait) and isinstance(step.message, Receive)
        if arrives and any(isinstance(earlier, Post) for earlier in hop):
            yield hop
            hop = []
        hop.append(step)
    yield hop
