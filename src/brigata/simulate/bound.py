"""A time that no schedule of an operator can beat on a network, proven term by term."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from brigata.describe.order import Order
from brigata.schedule.build import build_schedule
from brigata.schedule.chunks import Chunks
from brigata.schedule.steps import Collective, Compute
from brigata.simulate.durations import Durations
from brigata.simulate.network import Network


def lower_bound(operator: str, rows: Sequence[int], durations: Durations, network: Network) -> float:
    """Seconds that every schedule of ``operator`` takes at least, whatever its messages, relays and sums.

    What the operator demands is read off its blocking schedule: its products, which of them read gathered
    rows, which contribute to scattered ones. Let G be a group of ranks (one rank, or one node), F the rows
    outside G, C the bytes per second of all ports together between G and the other ranks, L the least latency
    on the way, b the bytes of a row. The bound is the largest of these terms:

    1.  *Products.* A rank computes every product on every row, one call at a time, and several calls of a
        product have the fixed time of at least one: T >= the sum over products of one call over all rows.
    2.  *Gather, ports.* Each of F rows enters G at least once; the last one arrives L later, and every product
        that reads gathered rows still runs for it: T >= F b / C + L + calls over one row.
    3.  *Gather, calls.* On one rank no call that has a foreign row starts before one has come, and all of them
        are no faster than one call a product over F rows: T >= b / C + L + calls over F rows.
    4.  *Scatter, ports.* 2 with time reversed. Each of F rows needs the contributions of G, so that at least
        one message with that row leaves G, after the first call: T >= call over one row + F b / C + L.
    5.  *Scatter, calls.* 3 with time reversed. The last call that has a foreign row ends no earlier than one
        call over F rows would, and its result still has to leave: T >= call over F rows + b / C + L.
    6.  *All ports.* A gather brings each row to N - 1 other ranks: N - 1 arrivals, relayed or not. A scatter
        brings together N contributions to each row: N - 1 departures. With C now over the ports of all ranks,
        T >= (N - 1) rows b (gathers + scatters) / C + L.

    However messages share a port, it never carries more than its bytes per second. Posts, barriers and
    additions only add time. The backend's collectives obey all this if their factors are at least 1.
    """
    demand = _demand(operator, len(rows))
    total = sum(rows)
    terms = [sum(durations.product_s(product, total) for product in demand.products)]
    ranks = range(len(rows))
    if len(rows) > 1 and total:
        for rank in ranks:
            terms += _group_terms(demand, rows, durations, network, [rank])
        for node in range(network.nodes(len(rows))):
            members = [rank for rank in ranks if network.node(rank) == node]
            if 1 < len(members) < len(rows):
                terms += _group_terms(demand, rows, durations, network, members)
        terms.append(_all_ports(demand, rows, durations, network))
    return max(terms)


@dataclass(frozen=True)
class _Demand:
    """What an operator has to do: its products, those after arrivals, those before departures."""

    products: tuple[str, ...]
    gathers: int
    after: tuple[str, ...]
    scatters: int
    before: tuple[str, ...]


def _demand(operator: str, ranks: int) -> _Demand:
    """Read off the blocking schedule of one row a rank."""
    steps = build_schedule(operator, Order("blocking"), Chunks((1,) * ranks)).programs[0].steps
    products = [step for step in steps if isinstance(step, Compute)]
    operations = [step.operation for step in steps if isinstance(step, Collective)]
    return _Demand(
        products=_names(products),
        gathers=operations.count("all_gather"),
        after=_names([step for step in products if step.reads]),
        scatters=operations.count("reduce_scatter"),
        before=_names([step for step in products if step.writes]),
    )


def _names(steps: Collection[Compute]) -> tuple[str, ...]:
    return tuple(sorted({step.product for step in steps}))


def _group_terms(
    demand: _Demand, rows: Sequence[int], durations: Durations, network: Network, group: Sequence[int]
) -> Iterator[float]:
    """Terms 2 to 5 for ``group``."""
    foreign = sum(rows) - sum(rows[rank] for rank in group)
    if not foreign:
        return
    others = [rank for rank in range(len(rows)) if rank not in group]
    pairs = [(other, rank) for other in others for rank in group]
    capacity = sum(network.capacity(port) for port in {network.route(*pair)[1] for pair in pairs})
    latency = min(network.link(*pair).latency_s for pair in pairs)
    for count, calls in ((demand.gathers, demand.after), (demand.scatters, demand.before)):
        if count:
            all_rows = durations.message_bytes(foreign) / capacity
            one_row = durations.message_bytes(1) / capacity
            yield all_rows + latency + sum(durations.product_s(product, 1) for product in calls)
            if len(group) == 1:
                yield one_row + latency + sum(durations.product_s(product, foreign) for product in calls)


def _all_ports(demand: _Demand, rows: Sequence[int], durations: Durations, network: Network) -> float:
    """Term 6."""
    n = len(rows)
    pairs = [(source, target) for source in range(n) for target in range(n) if source != target]
    capacity = sum(network.capacity(port) for port in {network.route(*pair)[1] for pair in pairs})
    latency = min((network.link(*pair).latency_s for pair in pairs), default=inf)
    moved = durations.message_bytes((n - 1) * sum(rows)) * (demand.gathers + demand.scatters)
    return moved / capacity + latency if moved else 0.0
