"""What lies where in a proof: at the start, and what must be there at the end."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from brigata.schedule.chunks import Pairs, Piece
from brigata.schedule.steps import Collective, Compute, Place, Post, Receive, Schedule, Space, touched


@dataclass(frozen=True)
class Partial:
    """A sum of contributions to ``piece`` from ``ranks``."""

    piece: Piece
    ranks: frozenset[int]


Content = Piece | Partial

_FILLS: dict[str, Space] = {
    "all_gather": "gathered",
    "reduce_scatter": "own",
    "all_reduce": "gathered",
    "all_to_all": "incoming",
}
"""Where each collective puts its result."""


def piece_of(content: Content) -> Piece:
    """The piece that ``content`` is, or is a sum for."""
    return content.piece if isinstance(content, Partial) else content


@dataclass
class Purpose:
    """What a schedule is for, read off the steps of all its ranks.

    ``computed`` are the spaces into which products or additions write, ``arriving`` those that messages or
    collectives fill; ``products`` says of each product whether it reads what arrives.
    """

    schedule: Schedule
    computed: set[Space] = field(default_factory=set)
    arriving: set[Space] = field(default_factory=set)
    products: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step in (step for program in self.schedule.programs for step in program.steps):
            self.computed.update(place.space for place in touched(step)[1])
            match step:
                case Compute(product=product, reads=reads):
                    self.products[product] = self.products.get(product, False) or bool(reads)
                case Post(messages=messages):
                    self.arriving.update(m.place.space for m in messages if isinstance(m, Receive))
                case Collective(operation=operation):
                    self.arriving.add(_FILLS[operation])
                case _:
                    pass

    def inputs(self, rank: int) -> Iterator[tuple[Place, Piece]]:
        """What lies on ``rank`` at the start: the input, unless the schedule computes what travels."""
        cut = self.schedule.chunks
        if not isinstance(cut, Pairs):
            for piece in cut.pieces(rank) if "gathered" not in self.computed else ():
                yield Place("gathered", cut.index(piece)), piece
        elif not self.computed & {"outgoing", "incoming"}:
            for i, piece in enumerate(cut.outgoing(rank)):
                yield Place("outgoing", i), piece
            for i, piece in enumerate(cut.incoming(rank)):
                if piece.source == rank:
                    yield Place("incoming", i), piece

    def results(self, rank: int) -> Iterator[tuple[Place, Content]]:
        """What must lie on ``rank`` at the end."""
        cut = self.schedule.chunks
        everybody = frozenset(range(self.schedule.ranks))
        if isinstance(cut, Pairs):
            made = bool(self.computed & {"outgoing", "incoming"})
            for i, piece in enumerate(cut.incoming(rank)):
                assert piece.source is not None
                yield Place("incoming", i), Partial(piece, frozenset({piece.source})) if made else piece
            return
        if "own" in self.computed | self.arriving:
            for piece in cut.pieces(rank):
                yield Place("own", piece.sub), Partial(piece, everybody)
        if "gathered" in self.computed | self.arriving:
            for piece in cut.pieces():
                summed = "gathered" in self.computed
                yield Place("gathered", cut.index(piece)), Partial(piece, everybody) if summed else piece

    def products_of(self, rank: int) -> set[tuple[str, Piece]]:
        """What ``rank`` must compute: every product on every piece that it has or gets, empty ones apart."""
        cut = self.schedule.chunks
        wanted: set[tuple[str, Piece]] = set()
        for product, reads in self.products.items():
            pieces = cut.pieces()
            if isinstance(cut, Pairs):
                pieces = cut.incoming(rank) if reads else cut.outgoing(rank)
            wanted.update((product, piece) for piece in pieces if cut.size(piece))
        return wanted
