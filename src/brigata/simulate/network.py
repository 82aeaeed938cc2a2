"""The links between ranks: which ports a message crosses, and how messages share them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Link:
    """``bytes_per_s`` each way at once, and ``latency_s`` from the last byte's departure to its arrival."""

    bytes_per_s: float
    latency_s: float = 0.0


class Port(NamedTuple):
    """One way in or out: of a rank inside its node, or towards other nodes."""

    way: Literal["out", "in"]
    scope: Literal["inside", "between"]
    number: int


@dataclass(frozen=True)
class Network:
    """Ranks with an egress and an ingress port each, full duplex, in one node or several.

    Attributes:
        inside: what each rank has towards the ranks of its own node.
        ranks_per_node: consecutive ranks form a node; None: all ranks are in one node.
        between: what carries messages between nodes; they do not cross the ports of ``inside``.
        sharing: whether ``between`` is one port a ``node``, shared by its ranks, or one a ``rank``.
    """

    inside: Link
    ranks_per_node: int | None = None
    between: Link | None = None
    sharing: Literal["node", "rank"] = "node"

    def __post_init__(self) -> None:
        assert (self.ranks_per_node is None) == (self.between is None)

    def node(self, rank: int) -> int:
        """The node of ``rank``."""
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def nodes(self, ranks: int) -> int:
        """Number of nodes that ``ranks`` ranks fill, the last one perhaps in part."""
        return self.node(ranks - 1) + 1

    def link(self, source: int, target: int) -> Link:
        """The link that a message from ``source`` to ``target`` takes."""
        if self.between is None or self.node(source) == self.node(target):
            return self.inside
        return self.between

    def route(self, source: int, target: int) -> tuple[Port, Port]:
        """The ports that a message from ``source`` to ``target`` crosses."""
        if self.link(source, target) is self.inside:
            return Port("out", "inside", source), Port("in", "inside", target)
        out, into = (self.node(source), self.node(target)) if self.sharing == "node" else (source, target)
        return Port("out", "between", out), Port("in", "between", into)

    def capacity(self, port: Port) -> float:
        """Bytes per second of ``port``."""
        if port.scope == "inside":
            return self.inside.bytes_per_s
        assert self.between is not None
        return self.between.bytes_per_s

    def ring_links(self, ranks: int) -> list[Link]:
        """The links of a ring through ``ranks`` ranks in order: no port carries two of its messages."""
        return [self.link(rank, (rank + 1) % ranks) for rank in range(ranks)]


_SAME = 1 + 1e-12
"""Shares closer than this are one share: equal ports fill in the same round in spite of rounding."""


def fair_rates(routes: Mapping[int, Sequence[int]], capacities: Sequence[float]) -> dict[int, float]:
    """Max-min fair rates of messages: nobody gains except at the cost of somebody who has no more.

    Progressive filling: the port with the smallest share for each of its messages fixes their rates; what
    they take is subtracted along their routes; the rest goes on.

    Args:
        routes: by message, the indices of the ports that it crosses.
        capacities: bytes per second of each port.
    """
    crossing: dict[int, list[int]] = {}
    for message, ports in routes.items():
        for port in ports:
            crossing.setdefault(port, []).append(message)
    left = {port: capacities[port] for port in crossing}
    unfixed = {port: len(messages) for port, messages in crossing.items()}
    rates: dict[int, float] = {}
    while len(rates) < len(routes):
        share = min(left[port] / count for port, count in unfixed.items() if count)
        full = [port for port, count in unfixed.items() if count and left[port] / count <= share * _SAME]
        for port in full:
            for message in crossing[port]:
                if message not in rates:
                    rates[message] = share
                    for crossed in routes[message]:
                        left[crossed] -= share
                        unfixed[crossed] -= 1
    return rates
