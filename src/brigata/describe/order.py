"""Names of orders: how a user says in which order an operator computes and sends."""

from dataclasses import dataclass
from typing import Literal

ORDERS = {
    "blocking": "the backend's collective before or after all of the computation",
    "blocking_p2p": "the same with point-to-point messages: a better transport, no overlap",
    "sliced": "slices with asynchronous exchanges; leaves a head or tail of one slice",
    "ring": "neighbour hops, own chunk first or last",
    "direct": "each chunk straight from or to its owner, own chunk first or last",
    "bidirectional": "a ring both ways at once: half of each chunk travels right, the other half left",
    "hierarchical": "direct between nodes and inside them, nested; hierarchical:8 has 8 ranks a node",
    "userbuffers": "TransformerEngine's way: all arrived partial sums are kept, one reduction at the end",
    "async_tp": "PyTorch's way: direct with barriers, one reduction at the end",
}
"""Each order and what it is."""

OVERLAPPED = frozenset(ORDERS) - {"blocking", "blocking_p2p"}
"""Orders that compute while messages travel."""

WITHOUT_PARTS = frozenset({"blocking", "blocking_p2p", "userbuffers", "async_tp"})
"""Orders that do not cut a chunk."""

Wire = Literal["", "fp32"]
"""Dtype of partial sums in messages: the activation's, or fp32 where that is wider."""


@dataclass(frozen=True)
class Order:
    """A parsed order name: ``sliced:4`` has kind ``sliced`` and 4 parts to each rank's chunk.

    ``node`` is the number of ranks a node (``hierarchical`` only). ``wire`` is what partial sums travel in.
    """

    kind: str
    parts: int = 1
    node: int = 0
    wire: Wire = ""

    @property
    def overlapped(self) -> bool:
        """Whether messages travel while products run."""
        return self.kind in OVERLAPPED

    def __str__(self) -> str:
        node = f":{self.node}" if self.kind == "hierarchical" else ""
        parts = "" if self.parts == _fewest_parts(self.kind) else f":{self.parts}"
        return f"{self.kind}{node}{parts}" + (f"@{self.wire}" if self.wire else "")


def _fewest_parts(kind: str) -> int:
    """Parts to a chunk when the name does not say: each direction of a bidirectional ring needs one."""
    return 2 if kind == "bidirectional" else 1


def parse_order(text: str) -> Order:
    """Read ``ring``, ``direct:2``, ``sliced:4``, ``hierarchical:8``, ``hierarchical:8:2``, ``ring@fp32``, ...

    Raises:
        ValueError: with the end of a sentence that begins with the setting and its value.
    """
    name, at, wire = text.partition("@")
    kind, *numbers = name.split(":")
    if kind not in ORDERS:
        raise ValueError(f"is no order; use {', '.join(ORDERS)}, with :k for k parts to a chunk (sliced:4)")
    if kind in WITHOUT_PARTS and numbers:
        raise ValueError(f"has no parts; use {kind}")
    node = 0
    if kind == "hierarchical":
        if not numbers or not _whole(numbers[0], 4096):
            raise ValueError("needs the number of ranks a node, from 1 to 4096; use hierarchical:8")
        node = int(numbers.pop(0))
    elif kind == "sliced" and not numbers:
        raise ValueError("needs a number of slices; use sliced:4")
    parts = _parts(kind, numbers, f"{kind}:{node}" if node else kind)
    if not at:
        return Order(kind, parts, node)
    if kind == "blocking":
        raise ValueError("leaves the dtype of its messages to the backend; use blocking or blocking_p2p@fp32")
    if wire != "fp32":
        raise ValueError(f"can send sums as they are or in fp32; use {name} or {name}@fp32")
    return Order(kind, parts, node, "fp32")


def _parts(kind: str, numbers: list[str], name: str) -> int:
    if not numbers:
        return _fewest_parts(kind)
    if len(numbers) > 1 or not _whole(numbers[0], 64):
        raise ValueError(f"needs a whole number of parts from 1 to 64; use {name}:2")
    parts = int(numbers[0])
    if kind == "bidirectional" and parts % 2:
        raise ValueError(f"needs an even number of parts, half of them either way; use {name}:{parts + 1}")
    return parts


def _whole(text: str, most: int) -> bool:
    return text.isdecimal() and 1 <= int(text) <= most
