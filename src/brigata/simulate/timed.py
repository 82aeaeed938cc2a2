"""A schedule with times: a step becomes what it costs its rank, a send and its receive become one message."""

from dataclasses import dataclass

from brigata.schedule.chunks import Chunks, Piece
from brigata.schedule.steps import (
    Add,
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
from brigata.simulate.network import Network
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
    programs = [
        _timed_program(program, schedule.chunks, durations, network, matching)
        for program in schedule.programs
    ]
    return TimedSchedule(tuple(programs), matching.messages())


class _Matching:
    """Gives both ends of a message the same index."""

    def __init__(self, chunks: Chunks, durations: Durations) -> None:
        self._chunks, self._durations = chunks, durations
        self._indices: dict[tuple[int, int, int], int] = {}
        self._counts: dict[tuple[bool, int, int], int] = {}
        self._ends: list[list[Message]] = []

    def index(self, rank: int, message: Message) -> int:
        sends = isinstance(message, Send)
        source, target = (rank, message.peer) if sends else (message.peer, rank)
        turn = self._counts.get((sends, source, target), 0)
        self._counts[sends, source, target] = turn + 1
        index = self._indices.setdefault((source, target, turn), len(self._indices))
        if index == len(self._ends):
            self._ends.append([])
        self._ends[index].append(message)
        return index

    def messages(self) -> tuple[TimedMessage, ...]:
        timed = []
        for (source, target, turn), index in self._indices.items():
            ends = self._ends[index]
            what = f"message {turn} from rank {source} to rank {target}"
            assert len(ends) == 2, f"{what} has one end only: {ends}"
            assert ends[0].piece == ends[1].piece, f"{what} is of two pieces: {ends}"
            piece = ends[0].piece
            size = self._durations.message_bytes(self._chunks.size(piece))
            timed.append(TimedMessage(source, target, size, f"{_spelled(piece)} to {target}"))
        return tuple(timed)


def _spelled(piece: Piece) -> str:
    return f"{piece.chunk}.{piece.sub}"


def _timed_program(
    program: Program, chunks: Chunks, durations: Durations, network: Network, matching: _Matching
) -> tuple[TimedStep, ...]:
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
                indices |= {message: matching.index(program.rank, message) for message in messages}
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
                timed.append(Meet(operation, collective_s(step, chunks, durations, network)))
    return tuple(timed)


def collective_s(step: Collective, chunks: Chunks, durations: Durations, network: Network) -> float:
    """Seconds of the backend's collective: a ring's, chunks padded to the largest, times the measured factor.

    A ring of N ranks takes N - 1 hops of one chunk, each at the pace of its slowest link.
    """
    n = chunks.ranks
    hops = n - 1
    links = network.ring_links(n)
    slowest = min(link.bytes_per_s for link in links)
    latency = max(link.latency_s for link in links)
    moved = durations.message_bytes(max(chunks.rows))
    return hops * (durations.collective_factors.get(step.operation, 1.0) * moved / slowest + latency)
