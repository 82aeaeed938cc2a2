"""How a tensor's tokens are cut: one chunk a rank, sub-chunks to a chunk, uneven and empty ones included."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isqrt
from typing import NamedTuple


class Piece(NamedTuple):
    """What travels in one message or enters one product: a sub-chunk of the chunk that a rank owns.

    In an all-to-all ``chunk`` is the rank to which the piece goes, ``source`` the rank from which it comes.
    """

    chunk: int
    sub: int = 0
    source: int | None = None


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of ``parts`` shares of ``total`` that differ by at most one, larger ones first."""
    share, rest = divmod(total, parts)
    return tuple(share + (i < rest) for i in range(parts))


@dataclass(frozen=True)
class Chunks:
    """The cut of ``tokens`` rows into one chunk a rank and ``parts`` sub-chunks to a chunk.

    ``rows[c]`` is the number of rows (tokens) of the chunk that rank c owns. Chunks follow each other in rank
    order, so a piece is a contiguous range of rows.
    """

    rows: tuple[int, ...]
    parts: int = 1

    @classmethod
    def even(cls, tokens: int, ranks: int, parts: int = 1) -> "Chunks":
        """Cut ``tokens`` rows over ``ranks`` as evenly as whole rows allow."""
        return cls(split_evenly(tokens, ranks), parts)

    @property
    def ranks(self) -> int:
        """Number of chunks."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Number of rows of the whole tensor."""
        return sum(self.rows)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each piece in token order, and the number of rows at the end."""
        sizes = [size for rows in self.rows for size in split_evenly(rows, self.parts)]
        return (0, *accumulate(sizes))

    def index(self, piece: Piece) -> int:
        """Position of ``piece`` among all pieces in token order."""
        return piece.chunk * self.parts + piece.sub

    def span(self, piece: Piece) -> slice:
        """Rows of ``piece`` in the whole tensor."""
        i = self.index(piece)
        return slice(self.starts[i], self.starts[i + 1])

    def chunk_span(self, chunk: int) -> slice:
        """Rows of the whole chunk of rank ``chunk``."""
        return slice(self.starts[chunk * self.parts], self.starts[(chunk + 1) * self.parts])

    def size(self, piece: Piece) -> int:
        """Number of rows of ``piece``."""
        i = self.index(piece)
        return self.starts[i + 1] - self.starts[i]

    def pieces(self, chunk: int | None = None) -> list[Piece]:
        """All pieces in token order, or those of one chunk."""
        chunks = range(self.ranks) if chunk is None else (chunk,)
        return [Piece(c, s) for c in chunks for s in range(self.parts)]


@dataclass(frozen=True)
class Pairs(Chunks):
    """The cut of an all-to-all: what each rank has for each rank, in ``parts`` sub-chunks.

    ``rows[s * ranks + d]`` rows go from rank s to rank d (``Pairs.of`` takes them as a matrix). The outgoing
    tensor of a rank holds the pieces for rank 0, 1, ... in this order, the incoming one those from them.
    """

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], parts: int = 1) -> "Pairs":
        """``rows[s][d]`` rows go from rank s to rank d."""
        assert all(len(row) == len(rows) for row in rows), rows
        return cls(tuple(size for row in rows for size in row), parts)

    @classmethod
    def even(cls, tokens: int, ranks: int, parts: int = 1) -> "Pairs":
        """Cut ``tokens`` rows over all pairs of ``ranks`` as evenly as whole rows allow."""
        return cls(split_evenly(tokens, ranks * ranks), parts)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return isqrt(len(self.rows))

    def index(self, piece: Piece) -> int:
        """Position of ``piece`` among all pieces: by source, then by destination."""
        assert piece.source is not None, piece
        return (piece.source * self.ranks + piece.chunk) * self.parts + piece.sub

    def pieces(self, chunk: int | None = None) -> list[Piece]:
        """All pieces by source, then by destination, or those that go to rank ``chunk``."""
        if chunk is not None:
            return self.incoming(chunk)
        return [piece for source in range(self.ranks) for piece in self.outgoing(source)]

    def outgoing(self, rank: int) -> list[Piece]:
        """What ``rank`` has, in the order of its outgoing tensor; what it keeps is among it."""
        return [Piece(d, s, rank) for d in range(self.ranks) for s in range(self.parts)]

    def incoming(self, rank: int) -> list[Piece]:
        """What ``rank`` gets, in the order of its incoming tensor; what it keeps is among it."""
        return [Piece(rank, s, source) for source in range(self.ranks) for s in range(self.parts)]

    def rows_between(self, rank: int) -> tuple[list[int], list[int]]:
        """Rows from ``rank`` to each rank, and from each rank to ``rank``."""
        n = self.ranks
        return list(self.rows[rank * n : (rank + 1) * n]), list(self.rows[rank::n])

    def reversed(self) -> "Pairs":
        """The same pairs on their way back."""
        n = self.ranks
        return Pairs(tuple(self.rows[d * n + s] for s in range(n) for d in range(n)), self.parts)
