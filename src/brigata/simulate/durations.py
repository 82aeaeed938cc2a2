"""How long the steps of a schedule take, as plain data: products, additions, posts, collectives."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Duration:
    """A straight line in the number of rows: ``call_s`` seconds a call and ``row_s`` seconds a row."""

    row_s: float
    call_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """Seconds for ``rows`` rows in one call; no rows are no call."""
        return self.call_s + self.row_s * rows if rows else 0.0


NO_TIME = Duration(0.0)

GLOO_FACTORS: Mapping[str, float] = {"all_gather": 1.0, "reduce_scatter": 2.0, "all_reduce": 1.0}
"""Time of gloo's collectives over that of a ring's bytes; its reduce-scatter moves twice what it must."""


@dataclass(frozen=True)
class Durations:
    """What the steps of one operator cost on every rank.

    Attributes:
        products: by name of the product, its time for a number of rows (tokens) on one rank.
        bytes_per_row: bytes that one row occupies in a message.
        addition: time to add one more source to a sum, for a number of rows; k sources are k - 1 additions.
        post_s: host seconds that a rank spends on starting one message, at either end.
        barrier_s: seconds of a barrier after its last rank has come.
        collective_factors: by operation, seconds of the backend's collective over those of a ring that moves
            the same bytes at the network's bandwidth; operations left out have 1. Additions are included.
    """

    products: Mapping[str, Duration]
    bytes_per_row: float
    addition: Duration = NO_TIME
    post_s: float = 0.0
    barrier_s: float = 0.0
    collective_factors: Mapping[str, float] = field(default_factory=lambda: dict(GLOO_FACTORS))

    def product_s(self, product: str, rows: int) -> float:
        """Seconds of one call of ``product`` over ``rows`` rows."""
        return self.products[product].seconds(rows)

    def addition_s(self, sources: int, rows: int) -> float:
        """Seconds to sum ``sources`` blocks of ``rows`` rows in one call."""
        return self.addition.call_s + self.addition.row_s * rows * (sources - 1) if rows else 0.0

    def message_bytes(self, rows: int) -> float:
        """Bytes of a message of ``rows`` rows."""
        return self.bytes_per_row * rows
