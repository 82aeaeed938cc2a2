"""Messages on the wires: each goes at its fair rate, which changes whenever another starts or ends."""

from collections import deque
from collections.abc import Sequence

from brigata.simulate.network import Network, fair_rates
from brigata.simulate.timed import TimedMessage

_NOW = 1 + 1e-12
"""Ends closer than this are one moment: symmetric messages end together in spite of rounding."""


class Transfers:
    """The messages under way between all ranks.

    Messages from one rank to one other follow each other, as on one connection or one stream; those of
    different pairs share the ports that they cross.
    """

    def __init__(self, messages: Sequence[TimedMessage], network: Network) -> None:
        ports: dict[object, int] = {}
        self._capacities: list[float] = []
        self._routes: list[tuple[int, ...]] = []
        routes: dict[tuple[int, int], tuple[int, ...]] = {}
        for message in messages:
            pair = message.source, message.target
            if pair not in routes:
                for port in network.route(*pair):
                    if port not in ports:
                        ports[port] = len(ports)
                        self._capacities.append(network.capacity(port))
                routes[pair] = tuple(ports[port] for port in network.route(*pair))
            self._routes.append(routes[pair])
        self._messages = messages
        self._lanes: dict[tuple[int, int], deque[int]] = {}
        self._left: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._clock = 0.0
        self._changed = False
        self.started: dict[int, float] = {}
        """When each message that has been on the wires got there."""

    def start(self, message: int, now: float) -> None:
        """Both ends have reached ``message``: it goes behind those of its pair that are still under way."""
        lane = self._lane(message)
        lane.append(message)
        if len(lane) == 1:
            self._enter(message, now)

    def next_end(self) -> float | None:
        """When the next message will have left, if no other starts before; None: nothing is under way."""
        if self._changed:
            self._share()
        return min(self._ends.values(), default=None)

    def end(self, now: float) -> list[int]:
        """Take those that have left by ``now`` off the wires, and let the next ones of their pairs on."""
        ended = [message for message, end in self._ends.items() if end <= now * _NOW]
        if ended:
            self._flow(now)
        for message in ended:
            del self._left[message], self._ends[message], self._rates[message]
            lane = self._lane(message)
            lane.popleft()
            if lane:
                self._enter(lane[0], now)
        return ended

    def _lane(self, message: int) -> deque[int]:
        """Those of the same pair that are under way, the first of them on the wires."""
        timed = self._messages[message]
        return self._lanes.setdefault((timed.source, timed.target), deque())

    def _enter(self, message: int, now: float) -> None:
        self._flow(now)
        self.started[message] = now
        self._left[message] = self._messages[message].size_bytes
        self._changed = True

    def _flow(self, now: float) -> None:
        """Subtract what has left since the last change."""
        elapsed = now - self._clock
        if elapsed > 0:
            for message, rate in self._rates.items():
                self._left[message] = max(self._left[message] - rate * elapsed, 0.0)
        self._clock = now
        self._changed = True

    def _share(self) -> None:
        rates = fair_rates({message: self._routes[message] for message in self._left}, self._capacities)
        self._rates = rates
        self._ends = {message: self._clock + left / rates[message] for message, left in self._left.items()}
        self._changed = False
