"""A time that no schedule of an operator can beat on a network, proven term by term."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from brigata.describe.order import Order
from brigata.schedule.build import build_schedule
from brigata.schedule.chunks import Chunks, Pairs
from brigata.schedule.steps import Collective, Compute
from brigata.simulate.cuts import Rows, cut
from brigata.simulate.durations import Durations
from brigata.simulate.network import Network


def lower_bound(operator: str, rows: Rows, durations: Durations, network: Network) -> float:
    """Seconds that every schedule of ``operator`` takes at least, whatever its messages, relays and sums.

    What the operator has to do is read off its blocking schedule: its products and its exchanges. Let G
    be a group of ranks (one rank, or one node), C the bytes per second of all ports together between G
    and the other ranks, L the least latency on the way, b the bytes of a row. F is the number of rows
    that have to enter or leave G at least once: in a gather those outside G enter; in a scatter those
    outside G leave, since each of them needs the contributions of G; in an all-reduce all of them leave
    and all of them enter; in an all-to-all those from or to other ranks. The bound is the largest of
    these terms:

    1.  *Products.* A rank's calls follow each other, and several calls of a product have the fixed time of at
        least one: T >= the sum over the rank's products of one call over all of its rows.
    2.  *Ports.* The last of F rows is through F b / C after the first one starts, and there L later. If the
        exchange brings what products read, one call of each over a row or more still follows; if it takes
        away what a product makes, such a call comes before: T >= F b / C + L + calls over one row.
    3.  *Calls.* On one rank, no call that reads one of F rows from elsewhere starts before one has come,
        and all of them take as long as one call a product over F rows: T >= b / C + L + calls over F
        rows. Turned round in time, the last call that makes one of F rows for elsewhere ends after the
        calls over F rows, and its result still has to leave.
    4.  *All ports.* A gather brings each row to N - 1 other ranks, a scatter takes it from N - 1 other
        ranks, relayed and merged or not: N - 1 messages for each row. An all-reduce has 2 (N - 1): when
        the first rank knows the sum of a row, a message from each of the N - 1 others has arrived, and
        each of these others, which did not know the sum before, has yet to receive one. With C now over
        the ports of all ranks, T >= messages b / C + L, and calls over one row as above if there is only
        one exchange.

    However messages share a port, it never carries more than its bytes per second. Posts, barriers and
    additions only add time. The backend's collectives obey all this if their factors are at least 1.
    """
    demand = _demand(operator, cut(operator, rows))
    n = demand.chunks.ranks
    terms = [sum(durations.product_s(*call) for call in calls) for calls in demand.calls]
    groups = [[rank] for rank in range(n)]
    groups += [[rank for rank in range(n) if network.node(rank) == node] for node in range(network.nodes(n))]
    for exchange in demand.exchanges:
        for group in groups:
            if len(group) < n:
                terms += _group_terms(demand, exchange, group, durations, network)
    if n > 1:
        terms.append(_all_ports(demand, durations, network))
    return max(terms)


@dataclass(frozen=True)
class _Exchange:
    """One operation between ranks, with the products that make what it takes or read what it brings."""

    operation: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def calls_s(self, durations: Durations, rows: int) -> float:
        """One call over ``rows`` rows of each product."""
        return sum(durations.product_s(product, rows) for product in (*self.before, *self.after))


@dataclass(frozen=True)
class _Demand:
    """What an operator has to do: for each rank its products with their rows, and the exchanges."""

    chunks: Chunks
    calls: tuple[tuple[tuple[str, int], ...], ...]
    exchanges: tuple[_Exchange, ...]


def _demand(operator: str, chunks: Chunks) -> _Demand:
    programs = build_schedule(operator, Order("blocking"), chunks).programs
    products = [[step for step in program.steps if isinstance(step, Compute)] for program in programs]
    everywhere = [step for steps in products for step in steps]
    reading = _names([step for step in everywhere if step.reads])
    making = _names([step for step in everywhere if step.writes])
    calls = tuple(_calls(chunks, steps) for steps in products)
    operations = [step.operation for step in programs[0].steps if isinstance(step, Collective)]
    exchanges = tuple(
        _Exchange(
            operation,
            before=making if operation != "all_gather" else (),
            after=reading if operation in ("all_gather", "all_to_all") else (),
        )
        for operation in operations
    )
    return _Demand(chunks, calls, exchanges)


def _calls(chunks: Chunks, steps: Collection[Compute]) -> tuple[tuple[str, int], ...]:
    """Each product with all its rows on one rank."""
    rows: dict[str, int] = {}
    for step in steps:
        rows[step.product] = rows.get(step.product, 0) + sum(map(chunks.size, step.pieces))
    return tuple(rows.items())


def _names(steps: Collection[Compute]) -> tuple[str, ...]:
    return tuple(sorted({step.product for step in steps}))


def _group_terms(
    demand: _Demand, exchange: _Exchange, group: Collection[int], durations: Durations, network: Network
) -> Iterator[float]:
    """Terms 2 and 3 for ``group``."""
    others = [rank for rank in range(demand.chunks.ranks) if rank not in group]
    pairs = [(other, rank) for other in others for rank in group]
    capacity, latency = _capacity(network, pairs), min(network.link(*pair).latency_s for pair in pairs)
    entering, leaving = _foreign_rows(demand.chunks, exchange.operation, group)
    if most := max(entering, leaving):
        yield durations.message_bytes(most) / capacity + latency + exchange.calls_s(durations, 1)
        called = entering if exchange.after else leaving
        if called and len(group) == 1:
            yield durations.message_bytes(1) / capacity + latency + exchange.calls_s(durations, called)


def _foreign_rows(chunks: Chunks, operation: str, group: Collection[int]) -> tuple[int, int]:
    """Rows that have to enter ``group``, and rows that have to leave it."""
    if isinstance(chunks, Pairs):
        n = chunks.ranks
        crossing = [(s, d) for s in range(n) for d in range(n) if (s in group) != (d in group)]
        leaving = sum(chunks.rows[s * n + d] for s, d in crossing if s in group)
        return sum(chunks.rows[s * n + d] for s, d in crossing) - leaving, leaving
    outside = sum(rows for rank, rows in enumerate(chunks.rows) if rank not in group)
    return {
        "all_gather": (outside, 0),
        "reduce_scatter": (0, outside),
        "all_reduce": (chunks.tokens, chunks.tokens),
    }[operation]


def _all_ports(demand: _Demand, durations: Durations, network: Network) -> float:
    """Term 4."""
    chunks, n = demand.chunks, demand.chunks.ranks
    pairs = [(source, target) for source in range(n) for target in range(n) if source != target]
    moved = 0
    for exchange in demand.exchanges:
        if isinstance(chunks, Pairs):
            moved += sum(chunks.rows[source * n + target] for source, target in pairs)
        else:
            moved += (n - 1) * chunks.tokens * (2 if exchange.operation == "all_reduce" else 1)
    if not moved:
        return 0.0
    calls = demand.exchanges[0].calls_s(durations, 1) if len(demand.exchanges) == 1 else 0.0
    latency = min(network.link(*pair).latency_s for pair in pairs)
    return durations.message_bytes(moved) / _capacity(network, pairs) + latency + calls


def _capacity(network: Network, pairs: Collection[tuple[int, int]]) -> float:
    """Bytes per second of all ports that messages between ``pairs`` arrive through."""
    return sum(network.capacity(port) for port in {network.route(*pair)[1] for pair in pairs})
