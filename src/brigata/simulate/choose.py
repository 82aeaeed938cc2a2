"""``auto``: simulates every order on the network at hand and takes the fastest, or a simpler one as fast."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from brigata.describe.order import ORDERS, Order, parse_order
from brigata.schedule.build import build_schedule
from brigata.schedule.steps import Collective, Compute, Post, Schedule, Send
from brigata.simulate.cuts import Rows, cut
from brigata.simulate.durations import Durations
from brigata.simulate.engine import simulate
from brigata.simulate.network import Network

PARTS = (1, 2, 3, 4, 8)
"""Parts to a chunk that are tried where an order takes parts."""

TIE = 0.005
"""Predictions this close to the best one are as good; the simplest of them is taken."""


@dataclass(frozen=True)
class Prediction:
    """What one order was found to take; ``messages`` and ``products`` of the rank that has most of them."""

    order: Order
    seconds: float
    exposed_s: float
    messages: int
    products: int


@dataclass(frozen=True)
class Choice:
    """The order taken, its predicted seconds, and all predictions, fastest first."""

    order: Order
    seconds: float
    predictions: tuple[Prediction, ...]


def every_order(ranks: int, network: Network, parts: Sequence[int] = PARTS) -> list[Order]:
    """All orders for a group of ``ranks`` on ``network``, with every number of ``parts`` that they take.

    Partial sums travel as they are: whether in fp32 is a matter of precision, not of time.
    """
    found: dict[Order, None] = {}
    for name in _names(ranks, network):
        for count in parts:
            try:
                order = parse_order(name if count == 1 else f"{name}:{count}")
            except ValueError:
                continue
            found[order] = None
    return list(found)


def choose(
    operator: str,
    rows: Rows,
    durations: Durations,
    network: Network,
    candidates: Sequence[Order] | None = None,
    *,
    stream: bool = False,
    tie: float = TIE,
) -> Choice:
    """The order that the simulator finds fastest for one operator pass.

    Args:
        operator: a name in ``schedule.OPERATORS`` or ``schedule.PAIR_OPERATORS``.
        rows: rows of each rank's chunk, or from each rank to each rank.
        durations: what its products, additions, posts and collectives cost.
        network: what its messages cost.
        candidates: orders to try; None: every one that the operator has, the blocking ones included, so that
            overlap is off where it loses.
        stream: as for ``simulate``.
        tie: how much slower than the fastest, as a share, a simpler order may be predicted and be taken.
    """
    if candidates is None:
        asked = every_order(len(rows), network)
        candidates = [order for order in asked if _applies(operator, rows, order)]
    assert candidates, "no candidates"
    predictions = [_predict(operator, rows, order, durations, network, stream) for order in candidates]
    predictions.sort(key=lambda prediction: prediction.seconds)
    limit = predictions[0].seconds * (1 + tie)
    as_good = [prediction for prediction in predictions if prediction.seconds <= limit]
    taken = min(as_good, key=lambda prediction: (prediction.messages, prediction.products))
    return Choice(taken.order, taken.seconds, tuple(predictions))


def _names(ranks: int, network: Network) -> Iterator[str]:
    """Names without parts; nested orders only where the network has the nodes for them."""
    size = network.ranks_per_node
    for kind in ORDERS:
        if kind != "hierarchical":
            yield kind
        elif size is not None and 1 < size < ranks and ranks % size == 0:
            yield f"{kind}:{size}"


def _applies(operator: str, rows: Rows, order: Order) -> bool:
    try:
        build_schedule(operator, order, cut(operator, rows, order.parts))
    except ValueError:
        return False
    return True


def _predict(
    operator: str, rows: Rows, order: Order, durations: Durations, network: Network, stream: bool
) -> Prediction:
    schedule = build_schedule(operator, order, cut(operator, rows, order.parts), ahead=not stream)
    time = simulate(schedule, durations, network, stream=stream)
    return Prediction(order, time.total_s, time.exposed_s, *_most(schedule))


def _most(schedule: Schedule) -> tuple[int, int]:
    """Messages sent and products computed by the rank that has most of each; a collective is one message."""
    messages, products = [], []
    for program in schedule.programs:
        posts = [step for step in program.steps if isinstance(step, Post)]
        sends = sum(isinstance(message, Send) for post in posts for message in post.messages)
        messages.append(sends + sum(isinstance(step, Collective) for step in program.steps))
        products.append(sum(isinstance(step, Compute) for step in program.steps))
    return max(messages), max(products)
