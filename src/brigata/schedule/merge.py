"""Two programs of one rank made one: the second's products fill the first's waits.

A backward is two programs: I (input gradient, which others wait for) and W (weight gradient, for nobody
else).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from brigata.describe.order import Order
from brigata.schedule.chunks import Chunks, Piece, split_evenly
from brigata.schedule.steps import Compute, Post, Program, Receive, Step, Wait

ACROSS_PRODUCTS = frozenset({"ring", "direct", "bidirectional", "hierarchical"})
"""Orders in which one product's messages travel under another product."""


def local(
    chunks: Chunks, rank: int, product: str, parts: int = 1, pieces: Sequence[Piece] | None = None
) -> Program:
    """A program without messages: ``product`` over all ``pieces`` in ``parts`` runs of whole pieces."""
    pieces = chunks.pieces() if pieces is None else pieces
    bounds = [0, *accumulate(split_evenly(len(pieces), min(parts, len(pieces))))]
    return Program(rank, tuple(Compute(product, tuple(pieces[lo:hi])) for lo, hi in pairwise(bounds)))


def merge(order: Order, main: Program, filler: Program) -> Program:
    """``main`` with ``filler`` in its waits, or behind it for orders that do not overlap across products."""
    assert main.rank == filler.rank
    if order.kind not in ACROSS_PRODUCTS:
        return Program(main.rank, (*main.steps, *filler.steps), main.wire)
    return fill(main, filler)


def fill(main: Program, filler: Program) -> Program:
    """``main`` with ``filler`` in its waits.

    The filler's first messages start at once. Each gap between a message's start and the wait for it gets
    an equal share of the filler; in the last gap the filler goes ahead of main's last product, so that what
    stays on this rank is still computed last. Where main has messages to start after its last product
    (all-reduce), the gaps behind that product get everything: the others have main's products in them.
    """
    opening = _opening(filler.steps)
    rest = list(filler.steps[opening:])
    gaps = _gaps(main.steps)
    if not gaps:
        return Program(main.rank, (*filler.steps[:opening], *main.steps, *rest), main.wire)
    amount, count = len(rest), len(gaps)
    shares = {gap: (i + 1) * amount // count - i * amount // count for i, gap in enumerate(gaps)}
    steps: list[Step] = list(filler.steps[:opening])
    for i, step in enumerate(main.steps):
        if i in shares:
            steps += [rest.pop(0) for _ in range(shares[i])]
        steps.append(step)
    return Program(main.rank, (*steps, *rest), main.wire)


def _opening(steps: Sequence[Step]) -> int:
    """Number of leading steps that only start messages."""
    for i, step in enumerate(steps):
        if not isinstance(step, Post):
            return i
    return len(steps)


def _gaps(steps: Sequence[Step]) -> list[int]:
    """Where fillers go, each a place between a message's start and the wait for it."""
    waits = [
        i for i, step in enumerate(steps) if isinstance(step, Wait) and isinstance(step.message, Receive)
    ]
    if not waits:
        return []
    last_post = max(i for i, step in enumerate(steps) if isinstance(step, Post))
    last_product = max(i for i, step in enumerate(steps) if isinstance(step, Compute))
    if last_post > last_product:
        return _gaps_behind(steps, last_product)
    early = [i for i in waits if i < last_post]
    return [*early, last_post + 1]


def _gaps_behind(steps: Sequence[Step], last_product: int) -> list[int]:
    """Each first wait for an arrival after messages were started behind the last product."""
    gaps: list[int] = []
    started = False
    for i, step in enumerate(steps[last_product + 1 :], last_product + 1):
        if isinstance(step, Post):
            started = True
        elif isinstance(step, Wait) and isinstance(step.message, Receive) and started:
            gaps.append(i)
            started = False
    return gaps
