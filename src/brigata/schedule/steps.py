"""The vocabulary of schedules: what a rank can do, one step at a time, and where its data lies.

A schedule is plain data. The checker proves it, the runtime executes it, a simulator can time it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from brigata.describe.order import Wire
from brigata.schedule.chunks import Chunks, Piece

Space = Literal["gathered", "work", "sum", "own", "outgoing", "incoming"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one piece lies on a rank.

    ``gathered``  the whole tensor of a gather or all-reduce; index = position of the piece in token order
    ``work``      buffers for partial sums on their way out or in, in the program's ``wire``; index = slot
    ``sum``       accumulators of arrived contributions, fp32 or better; index = slot
    ``own``       the rank's own chunk of a scatter's result; index = sub-chunk
    ``outgoing``  what an all-to-all takes from here; index = position of the piece among ``Pairs.outgoing``
    ``incoming``  what an all-to-all brings here; index = position of the piece among ``Pairs.incoming``

    All but ``work`` and ``sum`` are in the activation's dtype. Inputs are there when a program begins: the
    own chunk in ``gathered``; for an all-to-all all of ``outgoing``, and what the rank keeps in ``incoming``.
    """

    space: Space
    index: int


@dataclass(frozen=True, slots=True)
class Compute:
    """One product over a contiguous run of pieces.

    ``reads`` are places whose arrival the product needs; ``writes`` are the places of its result, one a
    piece, in order; both are empty for tensors that never travel.
    """

    product: str
    pieces: tuple[Piece, ...]
    reads: tuple[Place, ...] = ()
    writes: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """A piece leaves ``place`` for rank ``peer``."""

    piece: Piece
    place: Place
    peer: int


@dataclass(frozen=True, slots=True)
class Receive:
    """A piece from rank ``peer`` arrives at ``place``."""

    piece: Piece
    place: Place
    peer: int


Message = Send | Receive


@dataclass(frozen=True, slots=True)
class Post:
    """Start messages together, without waiting for them."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until a posted message has been delivered: its buffer may be read (received) or reused (sent)."""

    message: Message


@dataclass(frozen=True, slots=True)
class Add:
    """``target`` becomes the sum of ``sources``, added from left to right; ``target`` may be one of them.

    With one source it is a copy.
    """

    sources: tuple[Place, ...]
    target: Place


@dataclass(frozen=True, slots=True)
class Collective:
    """The backend's own blocking collective over the whole tensor.

    ``all_gather`` fills ``gathered``; ``reduce_scatter`` sums ``work``, where piece i lies in slot i, into
    ``own``; ``all_reduce`` sums ``gathered`` in place; ``all_to_all`` takes ``outgoing`` to ``incoming``.
    """

    operation: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Barrier:
    """No rank of the group goes on before all have come here."""


Step = Compute | Post | Wait | Add | Collective | Barrier


@dataclass(frozen=True)
class Program:
    """One rank's steps in order. ``wire`` is the dtype of ``work``, and so of partial sums in messages."""

    rank: int
    steps: tuple[Step, ...]
    wire: Wire = ""


@dataclass(frozen=True)
class Schedule:
    """One program a rank for one cut of the tokens; what it does follows from its steps."""

    chunks: Chunks
    programs: tuple[Program, ...]

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self.programs)


def touched(step: Step) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The places that ``step`` itself (reads, writes); messages touch theirs from post to wait."""
    match step:
        case Compute(reads=reads, writes=writes):
            return reads, writes
        case Add(sources=sources, target=target):
            return sources, (target,)
        case _:
            return (), ()


def without_empty_pieces(steps: Sequence[Step], chunks: Chunks) -> tuple[Step, ...]:
    """Drop whatever concerns pieces of zero rows: no product, no message, no addition."""
    if min(chunks.rows) >= chunks.parts:
        return tuple(steps)

    def empty(piece: Piece) -> bool:
        return chunks.size(piece) == 0

    kept: list[Step] = []
    holds_nothing: set[Place] = set()
    for step in steps:
        match step:
            case Compute(product, pieces, reads, writes):
                full = [i for i, piece in enumerate(pieces) if not empty(piece)]
                holds_nothing.difference_update(writes)
                holds_nothing.update(writes[i] for i, piece in enumerate(pieces) if writes and empty(piece))
                if full:
                    some_reads = tuple(reads[i] for i in full) if reads else ()
                    some_writes = tuple(writes[i] for i in full) if writes else ()
                    kept.append(Compute(product, tuple(pieces[i] for i in full), some_reads, some_writes))
            case Post(messages):
                for message in messages:
                    if isinstance(message, Receive):
                        mark = holds_nothing.add if empty(message.piece) else holds_nothing.discard
                        mark(message.place)
                travelling = tuple(message for message in messages if not empty(message.piece))
                if travelling:
                    kept.append(Post(travelling))
            case Wait(message):
                if not empty(message.piece):
                    kept.append(step)
            case Add(sources, target):
                if any(source in holds_nothing for source in sources):
                    holds_nothing.add(target)
                else:
                    holds_nothing.discard(target)
                    kept.append(step)
            case Collective() | Barrier():
                kept.append(step)
    return tuple(kept)
