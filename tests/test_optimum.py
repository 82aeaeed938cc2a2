"""How far orders are from the exact optimum: ``pytest -s tests/test_optimum.py`` prints the table."""

from collections.abc import Iterator

import pytest

from brigata.describe import Order
from brigata.schedule import Chunks, Piece, build_schedule
from brigata.simulate import Duration, Durations, Link, Network, candidates, choose, lower_bound, simulate
from optimum import Optimum, mirrored, optimum

GATHER, SCATTER = "all_gather_linear.forward", "linear_reduce_scatter.forward"
OPERATORS = (GATHER, SCATTER)
ROWS = 2
PRODUCT_S = 8
"""Of a chunk; a multiple of all that it is divided by, since the model counts in whole seconds."""
MESSAGES_S = (4, 8, 10, 12, 16, 32)
EVEN = [(ranks, parts) for ranks in (2, 3, 4) for parts in (1, 2)]
WORK = Durations({"output": Duration(PRODUCT_S / ROWS)}, bytes_per_row=1.0)


def network(message_s: int) -> Network:
    return Network(Link(ROWS / message_s))


def simulated(operator: str, order: Order, rows: tuple[int, ...], net: Network) -> float:
    return simulate(build_schedule(operator, order, Chunks(rows, order.parts)), WORK, net).total_s


def orders(parts: int) -> list[Order]:
    """Orders that cut chunks into ``parts``, and those that do not cut."""
    return candidates(parts=sorted({1, parts}))


@pytest.mark.parametrize("ranks, parts", EVEN)
def test_choice_is_optimal_on_equal_links(ranks: int, parts: int) -> None:
    """Within 2 % of the optimum of as many parts, with as many parts, and so with more to choose from."""
    rows = (ROWS,) * ranks
    print(f"\nN={ranks} m={parts}; times over the optimum's (gather, scatter)")
    for message_s in MESSAGES_S:
        net = network(message_s)
        best = optimum(Chunks(rows, parts), WORK, net)
        assert best.proven
        closed = max(ranks * PRODUCT_S, ((ranks - 1) * parts * message_s + PRODUCT_S) / parts)
        assert best.time == closed
        assert best.time >= lower_bound(GATHER, rows, WORK, net)
        print(
            f"  Tp/Tc={message_s / PRODUCT_S:<5} optimum {best.time / PRODUCT_S:<7}",
            row(rows, parts, net, best),
        )
        for operator in OPERATORS:
            assert choose(operator, rows, WORK, net, orders(parts)).seconds <= best.time * 1.02
            assert choose(operator, rows, WORK, net).seconds <= best.time * 1.02


def row(rows: tuple[int, ...], parts: int, net: Network, best: Optimum) -> str:
    cells = []
    for order in [order for order in candidates(parts=(parts,)) if order.parts == parts]:
        times = [simulated(operator, order, rows, net) / best.time for operator in OPERATORS]
        cells.append(f"{order} {times[0]:.3f} {times[1]:.3f}")
    return " | ".join(cells)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2), (4, 2, 2, 0), (2, 2, 2, 2)])
@pytest.mark.parametrize("message_s", [4, 16])
def test_reduce_scatter_is_the_mirror_image_of_all_gather(message_s: int, sizes: tuple[int, ...]) -> None:
    """The optimal gather read backwards is a reduce-scatter: what it adds up to is checked contribution by one."""
    chunks, net = Chunks(sizes, 2), network(message_s)
    best = optimum(chunks, WORK, net)
    check_gather(best, chunks)
    check_scatter(mirrored(best), chunks)
    check_ports(best, net)
    check_ports(mirrored(best), net)
    assert mirrored(mirrored(best)) == best
    assert best.time >= lower_bound(SCATTER, sizes, WORK, net)


def check_gather(found: Optimum, chunks: Chunks) -> None:
    """Played in time: what is sent is there, and what is computed on too."""
    since = {(piece.chunk, piece): 0 for piece in chunks.pieces()}
    for travel in sorted(found.travels, key=lambda travel: travel.start):
        assert since[travel.source, travel.piece] <= travel.start
        since[travel.target, travel.piece] = travel.end
    assert all(since[product.rank, product.piece] <= product.start for product in found.products)


def check_scatter(found: Optimum, chunks: Chunks) -> None:
    """Played in time: a message takes along all contributions that its sender has by then."""
    held: dict[tuple[int, Piece], list[int]] = {}
    for _, source, target, piece in sorted(_happenings(found)):
        if source == target:
            held.setdefault((source, piece), []).append(source)
        else:
            held.setdefault((target, piece), []).extend(held.pop((source, piece)))
    full = [piece for piece in chunks.pieces() if chunks.size(piece)]
    assert {at: sorted(ranks) for at, ranks in held.items()} == {
        (piece.chunk, piece): list(range(chunks.ranks)) for piece in full
    }


def _happenings(found: Optimum) -> Iterator[tuple[float, int, int, Piece]]:
    """Products when they end; messages when they start, with what the sender has, and arrive just after they end.

    A sum that is sent on is one that arrived before: the order of starts is an order of all messages about
    a piece, since a rank sends a piece's sum only after the last arrival.
    """
    for product in found.products:
        yield product.end, product.rank, product.rank, product.piece
    for travel in found.travels:
        arrivals = [
            other.end
            for other in found.travels
            if (other.target, other.piece) == (travel.source, travel.piece)
        ]
        own = [p.end for p in found.products if (p.rank, p.piece) == (travel.source, travel.piece)]
        assert all(end <= travel.start for end in [*arrivals, *own])
        yield travel.start + 0.5, travel.source, travel.target, travel.piece


def check_ports(found: Optimum, net: Network) -> None:
    """One message at a time a port, one product at a time a rank."""
    busy: dict[object, list[tuple[int, int]]] = {}
    for travel in found.travels:
        for port in net.route(travel.source, travel.target):
            busy.setdefault(port, []).append((travel.start, travel.end))
    for product in found.products:
        busy.setdefault(product.rank, []).append((product.start, product.end))
    for spans in busy.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
