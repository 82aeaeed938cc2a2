"""A schedule with times: a step becomes what it costs its rank, a send and its receive become one message."""

from dataclasses import dataclass
from typing import assert_never

from brigata.describe.order import Wire
from brigata.schedule.chunks import Chunks, Pairs, Piece
from brigata.schedule.steps import (
    Add,
    Barrier,
    Collective,
    Compute,
    Message,
    Place,
    Post,
    Program,
    Receive,
    Schedule,
    Send,
    Wait,
)
from brigata.simulate.durations import Durations
from brigata.simulate.network import Network, Port
from brigata.simulate.result import Kind


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """One message from rank ``source`` to rank ``target``."""

    source: int
    target: int
    size_bytes: float
    name: str


@dataclass(frozen=True, slots=True)
class Busy:
    """The rank itself works for ``seconds``."""

    kind: Kind
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """The rank posts its end of messages together, ``seconds`` of work on the host."""

    messages: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Await:
    """The rank stands still until a message has been delivered."""

    message: int


@dataclass(frozen=True, slots=True)
class Meet:
    """All ranks meet here and leave together, ``seconds`` after the last has come."""

    name: str
    seconds: float


TimedStep = Busy | Start | Await | Meet


@dataclass(frozen=True)
class TimedSchedule:
    """For each rank its timed steps, and all messages; a step names a message by its index."""

    programs: tuple[tuple[TimedStep, ...], ...]
    messages: tuple[TimedMessage, ...]


def with_times(schedule: Schedule, durations: Durations, network: Network) -> TimedSchedule:
    """Give every step of ``schedule`` its time and match sends with receives.

    Messages have no tags: the k-th send from a to b meets the k-th receive at b from a, whatever the times.
    """
    matching = _Matching(schedule.chunks, durations)
    costs = _Costs(schedule.chunks, durations, network)
    programs = [_timed_program(program, costs, matching) for program in schedule.programs]
    return TimedSchedule(tuple(programs), matching.messages())


class _Matching:
    """Gives both ends of a message the same index."""

    def __init__(self, chunks: Chunks, durations: Durations) -> None:
        self._chunks, self._durations = chunks, durations
        self._indices: dict[tuple[int, int, int], int] = {}
        self._counts: dict[tuple[bool, int, int], int] = {}
        self._ends: list[list[tuple[Message, Wire]]] = []

    def index(self, program: Program, message: Message) -> int:
        """The number of the message that ``message`` of ``program`` is an end of."""
        sends, rank = isinstance(message, Send), program.rank
        source, target = (rank, message.peer) if sends else (message.peer, rank)
        turn = self._counts.get((sends, source, target), 0)
        self._counts[sends, source, target] = turn + 1
        index = self._indices.setdefault((source, target, turn), len(self._indices))
        if index == len(self._ends):
            self._ends.append([])
        self._ends[index].append((message, program.wire if message.place.space == "work" else ""))
        return index

    def messages(self) -> tuple[TimedMessage, ...]:
        """All messages, with their sizes, once every program has been seen."""
        timed = []
        for (source, target, turn), index in self._indices.items():
            what = f"message {turn} from rank {source} to rank {target}"
            ends = self._ends[index]
            assert len(ends) == 2, f"{what} has one end only: {ends}"
            (one, wire), (other, other_wire) = ends
            assert (one.piece, wire) == (other.piece, other_wire), f"{what} is of two kinds: {ends}"
            size = self._durations.message_bytes(self._chunks.size(one.piece), wire)
            timed.append(TimedMessage(source, target, size, f"{_spelled(one.piece)} to {target}"))
        return tuple(timed)


def _spelled(piece: Piece) -> str:
    source = "" if piece.source is None else f"{piece.source}>"
    return f"{source}{piece.chunk}.{piece.sub}"


@dataclass(frozen=True)
class _Costs:
    chunks: Chunks
    durations: Durations
    network: Network


def _timed_program(program: Program, costs: _Costs, matching: _Matching) -> tuple[TimedStep, ...]:
    chunks, durations = costs.chunks, costs.durations
    timed: list[TimedStep] = []
    indices: dict[Message, int] = {}
    holds: dict[Place, Piece] = {}
    for step in program.steps:
        match step:
            case Compute(product=product, pieces=pieces, writes=writes):
                holds |= dict(zip(writes, pieces, strict=False))
                rows = sum(chunks.size(piece) for piece in pieces)
                name = f"{product} {'+'.join(map(_spelled, pieces))}"
                timed.append(Busy("compute", name, durations.product_s(product, rows)))
            case Post(messages=messages):
                indices |= {message: matching.index(program, message) for message in messages}
                arriving = [message for message in messages if isinstance(message, Receive)]
                holds |= {message.place: message.piece for message in arriving}
                seconds = durations.post_s * len(messages)
                timed.append(Start(tuple(indices[message] for message in messages), seconds))
            case Wait(message=message):
                timed.append(Await(indices[message]))
            case Add(sources=sources, target=target):
                piece = holds[target] = holds[sources[0]]
                seconds = durations.addition_s(len(sources), chunks.size(piece))
                timed.append(Busy("add", f"add {_spelled(piece)}", seconds))
            case Collective(operation=operation):
                timed.append(Meet(operation, collective_s(step, chunks, durations, costs.network)))
            case Barrier():
                timed.append(Meet("barrier", durations.barrier_s))
            case _:
                assert_never(step)
    return tuple(timed)


def collective_s(step: Collective, chunks: Chunks, durations: Durations, network: Network) -> float:
    """Seconds of the backend's collective: those of the usual algorithm, times the measured factor.

    An all-gather or reduce-scatter is a ring's N - 1 hops of the largest chunk (chunks are padded), an
    all-reduce 2 (N - 1) hops of an N-th of the rows, each at the pace of the slowest link; an all-to-all
    sends everything at once and ends with the port that has most to carry.
    """
    n = chunks.ranks
    factor = durations.collective_factors.get(step.operation, 1.0)
    if isinstance(chunks, Pairs):
        return factor * _fullest_port_s(chunks, durations, network)
    hops, rows = n - 1, float(max(chunks.rows))
    if step.operation == "all_reduce":
        hops, rows = 2 * (n - 1), chunks.tokens / n
    links = network.ring_links(n)
    slowest = min(link.bytes_per_s for link in links)
    latency = max(link.latency_s for link in links)
    return hops * (factor * durations.message_bytes(rows) / slowest + latency)


def _fullest_port_s(pairs: Pairs, durations: Durations, network: Network) -> float:
    loads: dict[Port, float] = {}
    latency = 0.0
    for piece in pairs.pieces():
        assert piece.source is not None
        if piece.source != piece.chunk and pairs.size(piece):
            latency = max(latency, network.link(piece.source, piece.chunk).latency_s)
            for port in network.route(piece.source, piece.chunk):
                loads[port] = loads.get(port, 0.0) + durations.message_bytes(pairs.size(piece))
    return max((load / network.capacity(port) for port, load in loads.items()), default=0.0) + latency
