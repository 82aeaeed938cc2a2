"""How long the steps of a schedule take, as plain data: products, additions, posts, collectives."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from brigata.describe.order import Wire


@dataclass(frozen=True)
class Duration:
    """A straight line in the number of rows: ``call_s`` seconds a call and ``row_s`` seconds a row."""

    row_s: float
    call_s: float = 0.0

    def seconds(self, rows: int) -> float:
        """Seconds for ``rows`` rows in one call; no rows are no call."""
        return self.call_s + self.row_s * rows if rows else 0.0


NO_TIME = Duration(0.0)

GLOO_FACTORS: Mapping[str, float] = {"reduce_scatter": 2.0}
"""Time of gloo's collectives over that of the bytes that they must move, where it is not 1."""


@dataclass(frozen=True)
class Durations:
    """What the steps of one operator cost on every rank.

    Attributes:
        products: by name of the product, its time for a number of rows (tokens) on one rank.
        bytes_per_row: bytes that one row occupies in a message.
        fp32_bytes_per_row: the same for partial sums of orders that send them in fp32; None: no wider.
        addition: time to add one more source to a sum, for a number of rows. k sources are k - 1 additions in
            one call; a copy counts as one.
        post_s: host seconds that a rank spends on starting one message, at either end.
        barrier_s: seconds of a barrier after its last rank has come.
        collective_factors: by operation, seconds of the backend's collective over those that its bytes take
            at the network's bandwidth (``timed.collective_s``); 1 where left out. Additions are included.
    """

    products: Mapping[str, Duration]
    bytes_per_row: float
    fp32_bytes_per_row: float | None = None
    addition: Duration = NO_TIME
    post_s: float = 0.0
    barrier_s: float = 0.0
    collective_factors: Mapping[str, float] = field(default_factory=lambda: dict(GLOO_FACTORS))

    def product_s(self, product: str, rows: int) -> float:
        """Seconds of one call of ``product`` over ``rows`` rows."""
        return self.products[product].seconds(rows)

    def addition_s(self, sources: int, rows: int) -> float:
        """Seconds to sum ``sources`` blocks of ``rows`` rows in one call."""
        return self.addition.seconds(rows * max(sources - 1, 1))

    def message_bytes(self, rows: float, wire: Wire = "") -> float:
        """Bytes of a message of ``rows`` rows, as they are or in the dtype of ``wire``."""
        if wire == "fp32" and self.fp32_bytes_per_row is not None:
            return max(self.fp32_bytes_per_row, self.bytes_per_row) * rows
        return self.bytes_per_row * rows
