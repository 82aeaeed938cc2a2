"""How far orders are from the exact optimum: ``pytest -s tests/test_optimum.py`` prints the tables."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from brigata.describe import Order
from brigata.schedule import Chunks, Piece, build_schedule
from brigata.simulate import (
    Duration,
    Durations,
    Link,
    Network,
    choose,
    every_order,
    lower_bound,
    simulate,
)
from optimum import Optimum, mirrored, optimum

GATHER, SCATTER = "all_gather_linear.forward", "linear_reduce_scatter.forward"
OPERATORS = (GATHER, SCATTER)
ROWS = 2
PRODUCT_S = 32
"""Of a chunk of ROWS rows; it and the times of messages are multiples of what they are divided by, since the
model counts in whole seconds."""
RATIOS = (0.5, 1.0, 1.25, 1.5, 2.0, 4.0)
"""Time of a chunk's message over that of its product."""
WORK = Durations({"output": Duration(PRODUCT_S / ROWS)}, bytes_per_row=1.0)
EVEN = [(ranks, parts) for ranks in (2, 3, 4) for parts in (1, 2)]
UNEVEN = [(4, 2, 2, 2), (4, 4, 2, 0), (12, 4, 4, 4), (4, 0, 4, 0), (6, 2, 2), (6, 2)]


def link(ratio: float) -> Link:
    return Link(ROWS / (PRODUCT_S * ratio))


def simulated(operator: str, order: Order, rows: Sequence[int], net: Network) -> float:
    return simulate(build_schedule(operator, order, Chunks(tuple(rows), order.parts)), WORK, net).total_s


def show(what: str, rows: Sequence[int], parts: int, net: Network, best: Optimum) -> None:
    """A line of the table: times of orders with ``parts`` parts over the optimum's, gather and scatter."""
    cells = []
    for order in every_order(len(rows), net, (parts,)):
        if order.parts == parts:
            times = [simulated(operator, order, rows, net) / best.time for operator in OPERATORS]
            cells.append(f"{order} {times[0]:.3f} {times[1]:.3f}")
    print(f"{what} m={parts} optimum {best.time / PRODUCT_S:.3f} Tc:", " | ".join(cells))


def no_finer(rows: Sequence[int], net: Network, parts: int) -> list[Order]:
    """Orders that cut chunks into ``parts`` or not at all."""
    return [order for order in every_order(len(rows), net, (1, parts)) if order.parts in (1, parts)]


@pytest.mark.parametrize("ranks, parts", EVEN)
def test_choice_is_optimal_on_equal_links(ranks: int, parts: int) -> None:
    """Within 2 % of the optimum of as many parts, whether finer cuts may be chosen or not."""
    rows = (ROWS,) * ranks
    print()
    for ratio in RATIOS:
        net = Network(link(ratio))
        best = optimum(Chunks(rows, parts), WORK, net)
        show(f"N={ranks} Tp/Tc={ratio:<4}", rows, parts, net, best)
        assert best.proven
        assert best.time == PRODUCT_S * max(ranks, (ranks - 1) * ratio + 1 / parts)
        for operator in OPERATORS:
            assert lower_bound(operator, rows, WORK, net) <= best.time
            for candidates in (no_finer(rows, net, parts), None):
                assert choose(operator, rows, WORK, net, candidates).seconds <= best.time * 1.02


@pytest.mark.parametrize("sharing", ["node", "rank"])
@pytest.mark.parametrize("parts", [1, 2])
def test_choice_is_near_the_optimum_between_nodes(parts: int, sharing: str) -> None:
    """Two nodes of two, links inside four times as fast: the gap is at most a chunk's product, and shown."""
    rows = (ROWS,) * 4
    print()
    for ratio in RATIOS:
        assert sharing in ("node", "rank")
        net = Network(link(ratio / 4), 2, link(ratio), "node" if sharing == "node" else "rank")
        best = optimum(Chunks(rows, parts), WORK, net)
        show(f"2x2, port a {sharing}, Tp/Tc={ratio:<4}", rows, parts, net, best)
        for operator in OPERATORS:
            assert lower_bound(operator, rows, WORK, net) <= best.time
            choice = choose(operator, rows, WORK, net, no_finer(rows, net, parts))
            assert choice.seconds <= best.time + PRODUCT_S
            for order in (Order("ring", parts), Order("direct", parts)):
                assert choice.seconds <= simulated(operator, order, rows, net) * 1.005


@pytest.mark.parametrize("rows", UNEVEN)
def test_uneven_chunks_want_parts(rows: tuple[int, ...]) -> None:
    """With finer cuts to choose from, nearly as fast as the optimum of two parts to a chunk, or faster."""
    print()
    for ratio in RATIOS:
        net = Network(link(ratio))
        best = optimum(Chunks(rows, 2), WORK, net)
        show(f"{rows} Tp/Tc={ratio:<4}", rows, 2, net, best)
        finer = tuple(8 * size for size in rows)
        work = Durations({"output": Duration(PRODUCT_S / ROWS / 8)}, bytes_per_row=1 / 8)
        for operator in OPERATORS:
            assert lower_bound(operator, rows, WORK, net) <= best.time
            assert choose(operator, finer, work, net).seconds <= best.time * 1.1


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2), (4, 2, 2, 0), (2, 2, 2, 2)])
@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_reduce_scatter_is_the_mirror_image_of_all_gather(ratio: float, sizes: tuple[int, ...]) -> None:
    """The optimal gather read backwards is a reduce-scatter: what arrives where is added up."""
    chunks, net = Chunks(sizes, 2), Network(link(ratio))
    best = optimum(chunks, WORK, net)
    check_gather(best, chunks)
    check_ports(best, net)
    check_scatter(mirrored(best), chunks)
    check_ports(mirrored(best), net)
    assert mirrored(mirrored(best)) == best


def check_gather(found: Optimum, chunks: Chunks) -> None:
    """What is sent or computed on is there at that time; everybody computes on everything."""
    since = {(piece.chunk, piece): 0 for piece in chunks.pieces() if chunks.size(piece)}
    for travel in sorted(found.travels, key=lambda travel: travel.start):
        assert since[travel.source, travel.piece] <= travel.start
        since[travel.target, travel.piece] = travel.end
    assert all(since[product.rank, product.piece] <= product.start for product in found.products)
    assert {(product.rank, product.piece) for product in found.products} == set(since)


def check_scatter(found: Optimum, chunks: Chunks) -> None:
    """A message takes along all contributions that its sender has; in the end each owner has each once."""
    held: dict[tuple[int, Piece], list[int]] = {}
    for at, _, source, target, piece in sorted(_happenings(found)):
        if source == target:
            held.setdefault((target, piece), []).append(source)
        else:
            assert (source, piece) in held, f"{source} has nothing for {piece} at {at}"
            held.setdefault((target, piece), []).extend(held.pop((source, piece)))
    assert {at: sorted(contributions) for at, contributions in held.items()} == {
        (piece.chunk, piece): list(range(chunks.ranks)) for piece in chunks.pieces() if chunks.size(piece)
    }


def _happenings(found: Optimum) -> Iterator[tuple[int, int, int, int, Piece]]:
    """Ends of products, then starts of messages, which take along at once what may leave only later.

    A message is taken to arrive when it starts; that it is not sent on before it has come is checked here.
    """
    for product in found.products:
        yield product.end, 0, product.rank, product.rank, product.piece
    for travel in found.travels:
        here = (travel.source, travel.piece)
        arrivals = [other.end for other in found.travels if (other.target, other.piece) == here]
        assert all(arrival <= travel.start for arrival in arrivals)
        yield travel.start, 1, travel.source, travel.target, travel.piece


def check_ports(found: Optimum, net: Network) -> None:
    """One message at a time a port, one product at a time a rank."""
    busy: dict[object, list[tuple[int, int]]] = {}
    for travel in found.travels:
        for port in net.route(travel.source, travel.target):
            busy.setdefault(port, []).append((travel.start, travel.end))
    for product in found.products:
        busy.setdefault(product.rank, []).append((product.start, product.end))
    for spans in busy.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))
