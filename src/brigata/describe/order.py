"""Names of orders: how a user says in which order an operator computes and sends."""

from dataclasses import dataclass

ORDERS = {
    "blocking": "the backend's collective before or after all of the computation",
    "blocking_p2p": "the same with point-to-point messages: a better transport, no overlap",
    "sliced": "slices with asynchronous exchanges; leaves a head or tail of one slice",
    "ring": "neighbour hops, own chunk first or last",
    "direct": "each chunk straight from or to its owner, own chunk first or last",
}
"""Each order and what it is."""

OVERLAPPED = frozenset({"sliced", "ring", "direct"})
"""Orders that compute while messages travel."""


@dataclass(frozen=True)
class Order:
    """A parsed order name: ``sliced:4`` has kind ``sliced`` and 4 parts to each rank's chunk."""

    kind: str
    parts: int = 1

    @property
    def overlapped(self) -> bool:
        """Whether messages travel while products run."""
        return self.kind in OVERLAPPED

    def __str__(self) -> str:
        return self.kind if self.parts == 1 else f"{self.kind}:{self.parts}"


def parse_order(text: str) -> Order:
    """Read ``ring``, ``direct:2``, ``sliced:4``, ...

    Raises:
        ValueError: with the end of a sentence that begins with the setting and its value.
    """
    kind, colon, parts = text.partition(":")
    if kind not in ORDERS:
        raise ValueError(f"is no order; use {', '.join(ORDERS)}, with :k for k parts to a chunk (sliced:4)")
    if not colon:
        if kind == "sliced":
            raise ValueError("needs a number of slices; use sliced:4")
        return Order(kind)
    if kind.startswith("blocking"):
        raise ValueError(f"has no parts; use {kind}")
    if not parts.isdecimal() or not 1 <= int(parts) <= 64:
        raise ValueError(f"needs a whole number of parts from 1 to 64; use {kind}:2")
    return Order(kind, int(parts))
