"""Runs a schedule in simulated time: discrete events, the same steps in the same order as the runtime's.

A rank runs ahead until it has to wait for somebody; only messages and meetings tie ranks together, so only
they are events. Messages start when both ends have posted them.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import inf

from brigata.schedule.steps import Schedule
from brigata.simulate.durations import Durations
from brigata.simulate.network import Network
from brigata.simulate.result import Kind, RankTime, SimulatedTime, Span
from brigata.simulate.timed import Await, Busy, Meet, Start, TimedSchedule, TimedStep, with_times
from brigata.simulate.transfers import Transfers


def simulate(
    schedule: Schedule,
    durations: Durations,
    network: Network,
    *,
    stream: bool = False,
    timeline: bool = False,
) -> SimulatedTime:
    """The time of ``schedule`` on ``network``.

    Args:
        schedule: one program a rank.
        durations: what products, additions, posts and collectives cost.
        network: what messages cost.
        stream: whether a rank's posts take effect one after the other, as on NCCL's stream: messages of one
            post together, those of the next when all of them are delivered. Otherwise at once, as with gloo.
        timeline: whether to keep a span for everything that took time.

    Raises:
        AssertionError: a deadlock, with the ranks that wait and what for; or a message with one end.
    """
    simulation = _Simulation(with_times(schedule, durations, network), network, stream, timeline)
    simulation.run()
    return simulation.result()


@dataclass
class _Rank:
    rank: int
    steps: tuple[TimedStep, ...]
    at: int = 0
    clock: float = 0.0
    meetings: int = 0
    posts: deque[tuple[float, set[int]]] = field(default_factory=deque)
    compute_s: float = 0.0
    add_s: float = 0.0
    first_product: float | None = None
    last_product: float = 0.0

    @property
    def waits_for(self) -> TimedStep | None:
        """The step at which the rank stands; None: it is done."""
        return self.steps[self.at] if self.at < len(self.steps) else None


class _Simulation:
    def __init__(self, timed: TimedSchedule, network: Network, stream: bool, timeline: bool) -> None:
        self.messages, self.network, self.stream, self.timeline = timed.messages, network, stream, timeline
        self.ranks = [_Rank(rank, steps) for rank, steps in enumerate(timed.programs)]
        self.transfers = Transfers(timed.messages, network)
        self.posted: dict[int, float] = {}
        self.starts: list[tuple[float, int]] = []
        self.delivered: dict[int, float] = {}
        self.meetings: list[list[_Rank]] = []
        self.spans: list[Span] = []

    def run(self) -> None:
        for rank in self.ranks:
            self._advance(rank)
        while True:
            next_start = self.starts[0][0] if self.starts else inf
            next_end = self.transfers.next_end()
            now = next_start if next_end is None else min(next_start, next_end)
            if now == inf:
                break
            for message in self.transfers.end(now):
                self._deliver(message, now)
            while self.starts and self.starts[0][0] <= now:
                self.transfers.start(heapq.heappop(self.starts)[1], now)
        waiting = [rank for rank in self.ranks if rank.waits_for is not None]
        stuck = [f"rank {rank.rank} at {self._spelled(rank.waits_for)}" for rank in waiting]
        assert not stuck, f"deadlock: {'; '.join(stuck)}"

    def result(self) -> SimulatedTime:
        total = max(rank.clock for rank in self.ranks)
        times = tuple(
            RankTime(
                compute_s=rank.compute_s,
                add_s=rank.add_s,
                head_s=total if rank.first_product is None else rank.first_product,
                tail_s=0.0 if rank.first_product is None else total - rank.last_product,
                exposed_s=total - rank.compute_s,
                end_s=rank.clock,
            )
            for rank in self.ranks
        )
        spans = sorted(self.spans, key=lambda span: (span.start_s, span.rank))
        return SimulatedTime(total, times, tuple(spans))

    def _advance(self, rank: _Rank) -> None:
        """Run ``rank`` until it has to wait for what has not happened yet."""
        while (step := rank.waits_for) is not None:
            match step:
                case Busy(kind=kind, name=name, seconds=seconds):
                    self._busy(rank, kind, name, seconds)
                case Start(messages=messages, seconds=seconds):
                    self._busy(rank, "post", f"{len(messages)} messages", seconds)
                    self._post(rank, messages)
                case Await(message=message):
                    if message not in self.delivered:
                        return
                    self._stand(rank, self.messages[message].name, self.delivered[message])
                case Meet(name=name):
                    if not self._meet(rank, step):
                        return
            rank.at += 1

    def _busy(self, rank: _Rank, kind: Kind, name: str, seconds: float) -> None:
        start = rank.clock
        rank.clock = start + seconds
        if kind == "compute":
            rank.compute_s += seconds
            rank.first_product = start if rank.first_product is None else rank.first_product
            rank.last_product = rank.clock
        elif kind == "add":
            rank.add_s += seconds
        self._span(rank.rank, kind, name, start, rank.clock)

    def _stand(self, rank: _Rank, name: str, until: float) -> None:
        if until > rank.clock:
            self._span(rank.rank, "wait", name, rank.clock, until)
            rank.clock = until

    def _span(self, rank: int, kind: Kind, name: str, start: float, end: float) -> None:
        if self.timeline and end > start:
            self.spans.append(Span(rank, kind, name, start, end))

    def _post(self, rank: _Rank, messages: tuple[int, ...]) -> None:
        if self.stream:
            rank.posts.append((rank.clock, set(messages)))
            if len(rank.posts) > 1:
                return
        for message in messages:
            self._offer(message, rank.clock)

    def _offer(self, message: int, when: float) -> None:
        """One end reaches ``message``; the second to do so starts it."""
        if message in self.posted:
            heapq.heappush(self.starts, (max(when, self.posted[message]), message))
        else:
            self.posted[message] = when

    def _deliver(self, message: int, left: float) -> None:
        source, target = self.messages[message].source, self.messages[message].target
        arrival = left + self.network.link(source, target).latency_s
        self.delivered[message] = arrival
        name = self.messages[message].name
        self._span(source, "message", name, self.transfers.started[message], arrival)
        for end in (self.ranks[source], self.ranks[target]):
            if self.stream:
                self._next_post(end, message, arrival)
            if end.waits_for == Await(message):
                self._advance(end)

    def _next_post(self, rank: _Rank, message: int, arrival: float) -> None:
        """On a stream: ``message`` is done; when it was the last of its post, the next post takes effect."""
        _, under_way = rank.posts[0]
        under_way.remove(message)
        if not under_way:
            rank.posts.popleft()
            if rank.posts:
                posted, messages = rank.posts[0]
                for following in sorted(messages):
                    self._offer(following, max(posted, arrival))

    def _meet(self, rank: _Rank, step: Meet) -> bool:
        """``rank`` has come to its next meeting; whether it was the last, so that everybody goes on."""
        if rank.meetings == len(self.meetings):
            self.meetings.append([])
        present = self.meetings[rank.meetings]
        present.append(rank)
        rank.meetings += 1
        if len(present) < len(self.ranks):
            return False
        assert all(other.waits_for == step for other in present), (
            f"ranks meet for different things: {[other.waits_for for other in present]}"
        )
        end = max(other.clock for other in present) + step.seconds
        for other in present:
            self._stand(other, step.name, end)
        for other in present[:-1]:
            other.at += 1
            self._advance(other)
        return True

    def _spelled(self, step: TimedStep | None) -> str:
        match step:
            case Await(message=message):
                return f"the wait for {self.messages[message].name} from {self.messages[message].source}"
            case Meet(name=name):
                return f"{name}, where others never come"
            case _:
                return str(step)
