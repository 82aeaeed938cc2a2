"""The fastest schedule there can be, found exactly: a small constraint model of the overlapped all-gather.

The model. N ranks, each chunk cut into m pieces. A rank computes one product on every piece, one at a
time. A piece may reach a rank from its owner or from any rank that has it (relay), and each port carries
one message at a time. Products and messages take what ``Durations`` and ``Network`` say; nothing else
takes time.

Reduce-scatter is the same problem with time reversed. Take a reduce-scatter: every rank computes a
contribution to every piece, and partial sums travel, merged anywhere, until each owner has everything. If
a rank sends several messages about a piece, drop all but the last and put all that the rank has by then
into it: what had left earlier still leaves, whoever got a dropped message still sends its own later,
nothing is counted twice, and nothing takes longer. Now each rank but the owner sends exactly one message
about a piece, after its own product on the piece and after the arrival of all that is merged into it.
Read backwards in time, each rank but the owner receives the piece exactly once, and only afterwards
computes on it and passes it on: an all-gather, with as many products and messages, through the same ports
the other way, and as long. The owner's own product is free in time in both. The other direction is the
same argument: a piece received twice is needed once, so all but the first receipt can be dropped. Hence
both have the same optimum; ``mirrored`` is the reversal.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ortools.sat.python import cp_model

from brigata.schedule import Chunks, Piece
from brigata.simulate import Durations, Network


@dataclass(frozen=True)
class Travel:
    """``piece`` goes from rank ``source`` to rank ``target``."""

    source: int
    target: int
    piece: Piece
    start: int
    end: int


@dataclass(frozen=True)
class Product:
    """``rank`` computes on ``piece``."""

    rank: int
    piece: Piece
    start: int
    end: int


@dataclass(frozen=True)
class Optimum:
    """The time of a fastest schedule, and one that takes it; ``proven`` unless the search was cut short."""

    time: int
    travels: tuple[Travel, ...]
    products: tuple[Product, ...]
    proven: bool


def mirrored(gather: Optimum) -> Optimum:
    """The reduce-scatter that is ``gather`` with time reversed, or the other way round."""
    end = gather.time
    return Optimum(
        end,
        tuple(Travel(t.target, t.source, t.piece, end - t.end, end - t.start) for t in gather.travels),
        tuple(Product(p.rank, p.piece, end - p.end, end - p.start) for p in gather.products),
        gather.proven,
    )


def optimum(chunks: Chunks, durations: Durations, network: Network, seconds: float = 20.0) -> Optimum:
    """The optimal all-gather of ``chunks`` with the product ``output``; all times must be whole seconds.

    ``seconds`` limits the search, not the schedule.
    """
    model = _Model(chunks, durations, network)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model.model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Optimum(
        time=solver.value(model.end),
        travels=tuple(
            Travel(source, target, piece, solver.value(start), solver.value(start) + length)
            for (source, target, piece), (start, length, chosen) in model.travels.items()
            if solver.value(chosen)
        ),
        products=tuple(
            Product(rank, piece, solver.value(start), solver.value(start) + model.product_time(piece))
            for (rank, piece), start in model.products.items()
        ),
        proven=status == cp_model.OPTIMAL,
    )


class _Model:
    def __init__(self, chunks: Chunks, durations: Durations, network: Network) -> None:
        self.chunks, self.durations, self.network = chunks, durations, network
        self.model = cp_model.CpModel()
        self.pieces = [piece for piece in chunks.pieces() if chunks.size(piece)]
        slowest = max(self._travel_time(s, t, piece) for s, t, piece in self._possible())
        work = sum(self.product_time(piece) for piece in self.pieces)
        self.horizon = work + slowest * len(self.pieces) * chunks.ranks
        self.end = self.model.new_int_var(work, self.horizon, "end")
        self.products = {(rank, piece): self._time() for rank in range(chunks.ranks) for piece in self.pieces}
        self.arrivals = {(rank, piece): self._time() for rank, piece in self.products if rank != piece.chunk}
        self.travels = {
            (source, target, piece): (
                self.arrivals[target, piece],
                self._travel_time(source, target, piece),
                self.model.new_bool_var(""),
            )
            for source, target, piece in self._possible()
        }
        self._compute_one_at_a_time()
        self._receive_once_from_who_has_it()
        self._carry_one_at_a_time()
        self._break_symmetry()
        self.model.minimize(self.end)

    def product_time(self, piece: Piece) -> int:
        return _whole(self.durations.product_s("output", self.chunks.size(piece)))

    def _travel_time(self, source: int, target: int, piece: Piece) -> int:
        size = self.durations.message_bytes(self.chunks.size(piece))
        return _whole(size / self.network.link(source, target).bytes_per_s)

    def _possible(self) -> Iterator[tuple[int, int, Piece]]:
        ranks = range(self.chunks.ranks)
        for piece in self.pieces:
            for target in ranks:
                for source in ranks:
                    if target not in (source, piece.chunk):
                        yield source, target, piece

    def _time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def _compute_one_at_a_time(self) -> None:
        for rank in range(self.chunks.ranks):
            calls = []
            for piece in self.pieces:
                start, length = self.products[rank, piece], self.product_time(piece)
                calls.append(self.model.new_fixed_size_interval_var(start, length, ""))
                self.model.add(start + length <= self.end)
            self.model.add_no_overlap(calls)

    def _receive_once_from_who_has_it(self) -> None:
        chosen_for: dict[tuple[int, Piece], list[cp_model.IntVar]] = {at: [] for at in self.arrivals}
        for (source, target, piece), (start, length, chosen) in self.travels.items():
            chosen_for[target, piece].append(chosen)
            self.model.add(self.products[target, piece] >= start + length).only_enforce_if(chosen)
            for (_, relay, same), (arrival, lasted, came) in self.travels.items():
                if relay == source and same == piece:
                    self.model.add(start >= arrival + lasted).only_enforce_if(chosen, came)
        for choices in chosen_for.values():
            self.model.add_exactly_one(choices)

    def _carry_one_at_a_time(self) -> None:
        carried: dict[object, list[cp_model.IntervalVar]] = {}
        for (source, target, _), (start, length, chosen) in self.travels.items():
            interval = self.model.new_optional_fixed_size_interval_var(start, length, chosen, "")
            for port in self.network.route(source, target):
                carried.setdefault(port, []).append(interval)
        for intervals in carried.values():
            self.model.add_no_overlap(intervals)

    def _break_symmetry(self) -> None:
        """Pieces of one chunk and of one size are alike: rank 0 computes on them in order."""
        for piece in self.pieces:
            following = piece._replace(sub=piece.sub + 1)
            alike = (
                self.chunks.size(piece) == self.chunks.size(following) if following in self.pieces else False
            )
            if alike:
                self.model.add(self.products[0, piece] <= self.products[0, following])


def _whole(time: float) -> int:
    assert abs(time - round(time)) < 1e-9, f"{time} is no whole number"
    return round(time)
