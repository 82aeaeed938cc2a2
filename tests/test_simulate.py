"""Simulated times against closed forms, and what sharing, streams and meetings do to them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brigata.describe import parse_order
from brigata.schedule import OPERATORS, Chunks, Pairs, Piece, Program, Schedule, build_schedule
from brigata.schedule.steps import Barrier, Compute, Place, Post, Receive, Send, Step, Wait
from brigata.simulate import Duration, Durations, Link, Network, SimulatedTime, every_order, simulate
from brigata.simulate.network import fair_rates

GATHER, SCATTER = "all_gather_linear.forward", "linear_reduce_scatter.forward"
ROWS = 12
PRODUCTS = ("output", "input_gradient", "weight_gradient")
RATIOS = (0.25, 0.5, 1.0, 1.5, 4.0)
OVERLAPPED = ("ring", "direct")


def durations(product_s: float = 1.0, addition_s: float = 0.0, **others: Any) -> Durations:
    """For a chunk of ROWS rows a product takes ``product_s``, an addition ``addition_s``; bytes are rows."""
    return Durations(
        {product: Duration(product_s / ROWS) for product in PRODUCTS},
        bytes_per_row=1.0,
        addition=Duration(addition_s / ROWS),
        **others,
    )


def network(message_s: float, latency_s: float = 0.0) -> Network:
    """A chunk of ROWS rows takes ``message_s`` on the way."""
    return Network(Link(ROWS / message_s, latency_s))


def time(
    operator: str,
    order: str,
    rows: Sequence[int],
    durations: Durations,
    network: Network,
    stream: bool = False,
) -> SimulatedTime:
    parsed = parse_order(order)
    schedule = build_schedule(operator, parsed, Chunks(tuple(rows), parsed.parts))
    return simulate(schedule, durations, network, stream=stream, timeline=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("message_s", RATIOS)
@pytest.mark.parametrize("order", OVERLAPPED)
def test_everything_but_the_slower_of_product_and_message_is_hidden(
    order: str, message_s: float, ranks: int
) -> None:
    """CommFuse: Tc + (N - 1) max(Tc, Tp), and N - 1 additions more for the reduce-scatter."""
    expected = 1 + (ranks - 1) * max(1, message_s)
    net = network(message_s)
    assert time(GATHER, order, [ROWS] * ranks, durations(), net).total_s == pytest.approx(expected)
    assert time(SCATTER, order, [ROWS] * ranks, durations(), net).total_s == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("message_s", [0.25, 0.5])
def test_a_ring_adds_once_a_hop(message_s: float, ranks: int) -> None:
    """Hidden messages: the products and N - 1 additions remain."""
    found = time(SCATTER, "ring", [ROWS] * ranks, durations(addition_s=0.125), network(message_s))
    assert found.total_s == pytest.approx(ranks + (ranks - 1) * 0.125)
    for rank in found.ranks:
        assert rank.add_s == pytest.approx((ranks - 1) * 0.125)
        assert rank.tail_s == pytest.approx(0.125)


@pytest.mark.parametrize("latency_s", [0.0, 0.25])
@pytest.mark.parametrize("message_s", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_and_latency(parts: int, message_s: float, latency_s: float) -> None:
    """A part leaves when it is posted and the part before it has left; its latency takes no port's time."""
    order = "ring" if parts == 1 else f"ring:{parts}"
    found = time(GATHER, order, [ROWS] * 2, durations(), network(message_s, latency_s))
    left, done = 0.0, 1.0
    for i in range(parts):
        left = max(left, i / parts) + message_s / parts
        done = max(done, left + latency_s) + 1 / parts
    assert found.total_s == pytest.approx(done)


@pytest.mark.parametrize("operator", [GATHER, SCATTER])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("message_s", RATIOS)
def test_blocking_is_messages_and_products_one_after_the_other(
    message_s: float, ranks: int, operator: str
) -> None:
    found = time(operator, "blocking_p2p", [ROWS] * ranks, durations(), network(message_s))
    messages_s = (ranks - 1) * message_s
    assert found.total_s == pytest.approx(ranks + messages_s)
    for rank in found.ranks:
        gathers = operator == GATHER
        assert rank.head_s == pytest.approx(messages_s if gathers else 0)
        assert rank.tail_s == pytest.approx(0 if gathers else messages_s)
    factor = 1.0 if operator == GATHER else 2.0
    collective = time(operator, "blocking", [ROWS] * ranks, durations(), network(message_s, 0.5))
    assert collective.total_s == pytest.approx(ranks + (ranks - 1) * (factor * message_s + 0.5))


@pytest.mark.parametrize("parts", [2, 4])
def test_slices_leave_a_head_or_tail_of_one_slice(parts: int) -> None:
    net = network(0.5)
    for rank in time(GATHER, f"sliced:{parts}", [ROWS] * 4, durations(), net).ranks:
        assert rank.head_s == pytest.approx(3 * 0.5 / parts)
        assert rank.tail_s == pytest.approx(0)
    for rank in time(SCATTER, f"sliced:{parts}", [ROWS] * 4, durations(), net).ranks:
        assert rank.head_s == pytest.approx(0)
        assert rank.tail_s == pytest.approx(3 * 0.5 / parts)


@pytest.mark.parametrize("message_s", RATIOS)
@pytest.mark.parametrize("operator", ["linear_all_to_all.forward", "all_to_all_linear.forward"])
def test_all_to_all_hides_as_much(operator: str, message_s: float) -> None:
    pairs = Pairs.of([[ROWS] * 4] * 4)
    found = simulate(build_schedule(operator, parse_order("direct"), pairs), durations(), network(message_s))
    assert found.total_s == pytest.approx(1 + 3 * max(1, message_s))
    blocking = simulate(
        build_schedule(operator, parse_order("blocking"), pairs), durations(), network(message_s)
    )
    assert blocking.total_s == pytest.approx(4 + 3 * message_s)


def test_all_reduce_leaves_its_last_gather() -> None:
    """The sums are whole only after the last product; the backend's collective hides nothing."""
    net, operator = network(0.5), "linear_all_reduce.forward"
    assert time(operator, "blocking", [ROWS] * 4, durations(), net).total_s == pytest.approx(4 + 2 * 3 * 0.5)
    for rank in time(operator, "direct", [ROWS] * 4, durations(), net).ranks:
        assert rank.tail_s == pytest.approx(3 * 0.5)


def test_sums_in_fp32_are_wider_and_gathered_rows_are_not() -> None:
    wide, net = durations(fp32_bytes_per_row=2.0), network(4.0)
    assert time(SCATTER, "ring@fp32", [ROWS] * 4, wide, net).total_s == pytest.approx(1 + 3 * 8)
    assert time(GATHER, "ring@fp32", [ROWS] * 4, wide, net).total_s == pytest.approx(1 + 3 * 4)


def test_barriers_take_time() -> None:
    operator, net = "all_gather_linear.forward", network(0.5)
    with_barriers = build_schedule(operator, parse_order("async_tp"), Chunks((ROWS,) * 4))
    barriers = sum(isinstance(step, Barrier) for step in with_barriers.programs[0].steps)
    found = simulate(with_barriers, durations(barrier_s=0.25), net)
    assert barriers > 0
    assert found.total_s == pytest.approx(4 + barriers * 0.25)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(OPERATORS)),
    st.sampled_from(every_order(6, network(1.0))),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from(RATIOS),
    st.booleans(),
)
def test_time_is_accounted_for(
    operator: str, order: object, rows: list[int], ratio: float, stream: bool
) -> None:
    """Exposed is the operator's time less the products; what a rank does never overlaps on the rank."""
    spent = durations(addition_s=0.1, post_s=0.01)
    found = time(operator, str(order), rows, spent, network(ratio, 0.05), stream)
    for rank, parts in enumerate(found.ranks):
        own = [span for span in found.timeline if span.rank == rank and span.kind != "message"]
        lasted = {
            kind: sum(s.end_s - s.start_s for s in own if s.kind == kind) for kind in ("compute", "add")
        }
        assert parts.compute_s == pytest.approx(lasted["compute"])
        assert parts.add_s == pytest.approx(lasted["add"])
        assert parts.exposed_s == pytest.approx(found.total_s - parts.compute_s)
        assert parts.head_s + parts.tail_s <= parts.exposed_s + 1e-9
        assert parts.end_s == pytest.approx(sum(span.end_s - span.start_s for span in own))
        for before, after in pairwise(own):
            assert before.end_s <= after.start_s + 1e-9
    assert found.total_s == max(rank.end_s for rank in found.ranks)
    assert found == time(operator, str(order), rows, spent, network(ratio, 0.05), stream)


def exchange(messages: Sequence[tuple[int, int, int]], chunks: Chunks, together: bool = True) -> Schedule:
    """Messages (source, target, chunk) posted together, or one post each, and waited for."""
    programs = []
    for rank in range(chunks.ranks):
        ends: list[Send | Receive] = []
        for source, target, chunk in messages:
            piece = Piece(chunk)
            if rank == source:
                ends.append(Send(piece, Place("gathered", chunk), target))
            elif rank == target:
                ends.append(Receive(piece, Place("gathered", chunk), source))
        posts = [Post(tuple(ends))] if together and ends else [Post((end,)) for end in ends]
        programs.append(Program(rank, (*posts, *map(Wait, ends))))
    return Schedule(chunks, tuple(programs))


def seconds(*messages: tuple[int, int, int], net: Network, rows: Sequence[int] = (ROWS,) * 4) -> float:
    return simulate(exchange(messages, Chunks(tuple(rows))), durations(), net).total_s


def test_messages_share_the_ports_that_they_cross() -> None:
    net = network(1.0)
    assert seconds((0, 1, 0), net=net) == pytest.approx(1)
    assert seconds((0, 1, 0), (1, 0, 1), net=net) == pytest.approx(1), "full duplex"
    assert seconds((0, 1, 0), (2, 3, 2), net=net) == pytest.approx(1), "different ports"
    assert seconds((0, 1, 0), (2, 1, 2), net=net) == pytest.approx(2), "one ingress"
    assert seconds((0, 1, 0), (0, 2, 0), net=net) == pytest.approx(2), "one egress"
    assert seconds((0, 1, 0), (2, 1, 2), (3, 1, 3), net=net) == pytest.approx(3)


def test_rates_rise_when_a_message_ends() -> None:
    """12 and 6 rows into one port: 6 of each at half speed, then 6 rows alone."""
    timeline = simulate(
        exchange([(0, 1, 0), (2, 1, 2)], Chunks((12, 12, 6, 12))), durations(), network(1.0), timeline=True
    ).timeline
    ends = {span.rank: span.end_s for span in timeline if span.kind == "message"}
    assert ends == {0: pytest.approx(1.5), 2: pytest.approx(1.0)}


def test_fair_rates_give_the_rest_to_who_can_use_it() -> None:
    """Ports 0 and 1 are shared; message 2 has what message 0, held up at port 0, leaves of port 1."""
    assert fair_rates({0: [0, 1], 1: [0], 2: [1]}, [2.0, 4.0]) == {0: 1.0, 1: 1.0, 2: 3.0}


def test_messages_between_two_ranks_follow_each_other() -> None:
    timeline = simulate(
        exchange([(0, 1, 0), (0, 1, 2)], Chunks((ROWS,) * 3)), durations(), network(1.0), timeline=True
    ).timeline
    assert [span.end_s for span in timeline if span.kind == "message"] == [pytest.approx(1), pytest.approx(2)]


def test_nodes_have_ports_of_their_own() -> None:
    inside, between = Link(float(ROWS)), Link(ROWS / 2, 0.25)
    shared, own = Network(inside, 2, between), Network(inside, 2, between, "rank")
    assert seconds((0, 1, 0), net=shared) == pytest.approx(1)
    assert seconds((0, 2, 0), net=shared) == pytest.approx(2.25)
    assert seconds((0, 2, 0), (0, 1, 0), net=shared) == pytest.approx(2.25), "not the port inside"
    assert seconds((0, 2, 0), (1, 3, 1), net=shared) == pytest.approx(4.25)
    assert seconds((0, 2, 0), (1, 3, 1), net=own) == pytest.approx(2.25)


def test_a_stream_holds_back_the_next_post() -> None:
    """Rank 0 sends to 1, which has not posted yet, then to 2: on a stream the second waits for the first."""
    chunks = Chunks((ROWS,) * 3)
    busy: tuple[Step, ...] = (Compute("output", (Piece(1),)),)
    first, second, *_ = exchange([(0, 1, 0), (0, 2, 0)], chunks, together=False).programs
    third = exchange([(0, 1, 0), (0, 2, 0)], chunks, together=False).programs[2]
    late = Program(1, busy + second.steps)
    schedule = Schedule(chunks, (first, late, third))
    ends = {
        stream: [
            round(rank.end_s, 9)
            for rank in simulate(schedule, durations(), network(1.0), stream=stream).ranks
        ]
        for stream in (False, True)
    }
    assert ends == {False: [2, 2, 1], True: [3, 2, 3]}


def test_posts_take_host_time() -> None:
    found = time(GATHER, "ring", [ROWS] * 2, durations(post_s=0.125), network(0.5))
    assert found.total_s == pytest.approx(2 + 2 * 0.125)
    assert found.ranks[0].head_s == pytest.approx(2 * 0.125)


@pytest.mark.parametrize("order", ["ring", "direct", "sliced:3", "blocking_p2p", "blocking"])
@pytest.mark.parametrize(
    "rows", [(12, 12, 12, 6), (12, 0, 12, 12), (0, 0, 0, 12), (0, 0, 0, 0), (1, 1, 1, 1)]
)
def test_uneven_and_empty_chunks(rows: tuple[int, ...], order: str) -> None:
    for operator in (GATHER, SCATTER):
        found = time(operator, order, rows, durations(), network(1.0))
        assert all(rank.compute_s == pytest.approx(sum(rows) / ROWS) for rank in found.ranks)
        if sum(rows) and order != "blocking":
            moved = sum(span.kind == "message" for span in found.timeline)
            assert moved == 3 * sum(min(size, parse_order(order).parts) for size in rows)


def test_waiting_in_a_circle_names_the_ranks() -> None:
    chunks = Chunks((ROWS,) * 2)
    programs = []
    for rank in range(2):
        send = Send(Piece(rank), Place("gathered", rank), 1 - rank)
        receive = Receive(Piece(1 - rank), Place("gathered", 1 - rank), 1 - rank)
        programs.append(Program(rank, (Post((receive,)), Wait(receive), Post((send,)), Wait(send))))
    with pytest.raises(AssertionError, match=r"deadlock: rank 0 .* rank 1"):
        simulate(Schedule(chunks, tuple(programs)), durations(), network(1.0))


def test_a_message_with_one_end_is_found() -> None:
    chunks = Chunks((ROWS,) * 2)
    lonely = Program(0, (Post((Send(Piece(0), Place("gathered", 0), 1),)),))
    with pytest.raises(AssertionError, match="one end only"):
        simulate(Schedule(chunks, (lonely, Program(1, ()))), durations(), network(1.0))
