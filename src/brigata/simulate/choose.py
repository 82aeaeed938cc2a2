"""``auto``: simulates every order on the network at hand and takes the fastest, or a simpler one as fast."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from brigata.describe.order import ORDERS, Order, parse_order
from brigata.schedule.build import build_schedule
from brigata.schedule.chunks import Chunks
from brigata.schedule.steps import Collective, Compute, Post, Schedule, Send
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


def candidates(kinds: Iterable[str] = ORDERS, parts: Sequence[int] = PARTS) -> list[Order]:
    """Orders of ``kinds`` with every number of ``parts`` that they take."""
    found: list[Order] = []
    for kind in kinds:
        for count in parts:
            try:
                order = parse_order(kind if count == 1 else f"{kind}:{count}")
            except ValueError:
                continue
            found.append(order)
    return found


def choose(
    operator: str,
    rows: Sequence[int],
    durations: Durations,
    network: Network,
    candidates: Sequence[Order] | None = None,
    *,
    stream: bool = False,
) -> Choice:
    """The order that the simulator finds fastest for one operator pass.

    Args:
        operator: a name in ``schedule.OPERATORS``.
        rows: rows of each rank's chunk.
        durations: what its products, additions, posts and collectives cost.
        network: what its messages cost.
        candidates: orders to try; None: every one that can be built, the blocking ones included, so that
            overlap is off where it loses.
        stream: as for ``simulate``.
    """
    tried = _default_candidates() if candidates is None else candidates
    assert tried, "no candidates"
    predictions = [_predict(operator, order, rows, durations, network, stream) for order in tried]
    fastest = min(prediction.seconds for prediction in predictions)
    as_good = [prediction for prediction in predictions if prediction.seconds <= fastest * (1 + TIE)]
    taken = min(
        as_good, key=lambda prediction: (prediction.messages, prediction.products, prediction.seconds)
    )
    ranked = sorted(predictions, key=lambda prediction: prediction.seconds)
    return Choice(taken.order, taken.seconds, tuple(ranked))


_default_candidates = candidates


def _predict(
    operator: str, order: Order, rows: Sequence[int], durations: Durations, network: Network, stream: bool
) -> Prediction:
    schedule = build_schedule(operator, order, Chunks(tuple(rows), order.parts))
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
