"""``auto``: for each operator and shape the order that the simulator finds fastest on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from brigata.describe.order import Order, parse_order
from brigata.overlap.speeds import Speeds
from brigata.schedule.build import INPUT_GRADIENT, OUTPUT, WEIGHT_GRADIENT
from brigata.simulate.choose import Choice, choose
from brigata.simulate.durations import Duration, Durations
from brigata.simulate.network import Link, Network

CANDIDATES = tuple(
    parse_order(name)
    for name in ("blocking_p2p", "direct", "direct:2", "direct:4", "ring", "ring:2", "ring:4")
)
"""Orders among which ``auto`` chooses for an operator."""


TIE = 0.02
"""Predictions from a quick measurement that are this close are as good: the simplest order is taken."""


@dataclass(frozen=True)
class Work:
    """What one token costs an operator.

    Attributes:
        flops: of each of its products, for one token.
        width: elements of a token in a message.
        itemsize: bytes of an element.
    """

    flops: float
    width: int
    itemsize: int


def durations(speeds: Speeds, work: Work) -> Durations:
    """How long the steps of an operator with ``work`` take at ``speeds``."""
    product = Duration(work.flops / speeds.flops_per_s, call_s(speeds, work.flops))
    row_bytes = work.width * work.itemsize
    return Durations(
        products=dict.fromkeys((OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT), product),
        bytes_per_row=row_bytes,
        fp32_bytes_per_row=work.width * max(work.itemsize, 4),
        addition=Duration(row_bytes / speeds.add_bytes_per_s, speeds.product_call_s),
        post_s=speeds.post_s,
    )


def call_s(speeds: Speeds, flops: float) -> float:
    """Seconds that a product with ``flops`` for a token takes however few the tokens are."""
    return speeds.product_call_s + speeds.weight_s * flops / 2


def network(speeds: Speeds) -> Network:
    """The group's links as one node."""
    return Network(Link(speeds.bytes_per_s, speeds.latency_s))


class Chooser:
    """Chooses once for each operator, cut and work; the same on every rank, because ``speeds`` are."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self.choices: dict[tuple[str, tuple[int, ...], Work], Choice] = {}

    def order(self, operator: str, rows: Sequence[int], work: Work) -> Order:
        """The order for one operator pass."""
        key = (operator, tuple(rows), work)
        if key not in self.choices:
            timed = durations(self.speeds, work)
            links = network(self.speeds)
            self.choices[key] = choose(operator, list(rows), timed, links, CANDIDATES, tie=TIE)
        return self.choices[key].order
