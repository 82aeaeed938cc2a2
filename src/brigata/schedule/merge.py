"""Two programs of one rank made one: the second's products fill the first's waits.

A backward is two programs: I (input gradient, which others wait for) and W (weight gradient, for nobody
else).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from brigata.describe.order import Order
from brigata.schedule.chunks import Chunks, split_evenly
from brigata.schedule.steps import Compute, Post, Program, Receive, Step, Wait


def local(chunks: Chunks, rank: int, product: str, parts: int = 1) -> Program:
    """A program without messages: ``product`` over all tokens in ``parts`` runs of whole pieces."""
    pieces = chunks.pieces()
    bounds = [0, *accumulate(split_evenly(len(pieces), min(parts, len(pieces))))]
    return Program(rank, tuple(Compute(product, tuple(pieces[lo:hi])) for lo, hi in pairwise(bounds)))


def merge(order: Order, main: Program, filler: Program) -> Program:
    """``main`` with ``filler`` in its waits, or behind it for orders that do not overlap across products.

    The filler's first messages start at once. Each gap between a message's start and the wait for it gets
    an equal share of the filler; in the last gap the filler goes ahead of main's last product, so that what
    stays on this rank is still computed last.
    """
    assert main.rank == filler.rank
    opening = _opening(filler.steps)
    rest = list(filler.steps[opening:])
    if order.kind not in ("ring", "direct"):
        return Program(main.rank, (*main.steps, *filler.steps))
    gaps = _gaps(main.steps)
    if not gaps:
        return Program(main.rank, (*filler.steps[:opening], *main.steps, *rest))
    shares = dict(zip(gaps, split_evenly(len(rest), len(gaps)), strict=True))
    steps: list[Step] = list(filler.steps[:opening])
    for i, step in enumerate(main.steps):
        if i in shares:
            steps += [rest.pop(0) for _ in range(shares[i])]
        steps.append(step)
    return Program(main.rank, (*steps, *rest))


def _opening(steps: Sequence[Step]) -> int:
    """Number of leading steps that only start messages."""
    for i, step in enumerate(steps):
        if not isinstance(step, Post):
            return i
    return len(steps)


def _gaps(steps: Sequence[Step]) -> list[int]:
    """Where fillers go: before each wait for an arrival, in the last gap right after the message started."""
    waits = [
        i for i, step in enumerate(steps) if isinstance(step, Wait) and isinstance(step.message, Receive)
    ]
    if not waits:
        return []
    last_post = max(i for i, step in enumerate(steps) if isinstance(step, Post))
    early = [i for i in waits if i < last_post]
    return [*early, last_post + 1]
