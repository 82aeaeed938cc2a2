"""Every schedule that can be built is proven, and the checker finds what is wrong with a wrong one."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brigata.describe import Order, parse_order
from brigata.describe.errors import divisors
from brigata.schedule import (
    OPERATORS,
    PAIR_OPERATORS,
    Chunks,
    Pairs,
    Piece,
    Program,
    Proof,
    Schedule,
    ScheduleError,
    build_program,
    build_schedule,
    check,
)
from brigata.schedule.steps import Add, Barrier, Compute, Place, Post, Receive, Send, Step, Wait

OVERLAPPED = ("ring", "direct", "bidirectional", "hierarchical")
SLICED = (*OVERLAPPED, "sliced")
BASELINES = ("blocking", "blocking_p2p", "userbuffers", "async_tp")
LINEAR_FORWARD = {
    "all_gather": "all_gather_linear.forward",
    "reduce_scatter": "linear_reduce_scatter.forward",
}
POINT_TO_POINT = ["blocking_p2p", "sliced:2", "ring", "direct", "ring:3", "direct:2", "bidirectional",
                  "bidirectional:4", "hierarchical", "hierarchical:2", "userbuffers", "async_tp"]  # fmt: skip
"""Orders with messages of our own; ``hierarchical`` is here without its number of ranks a node."""


def orders(kinds: tuple[str, ...], ranks: int) -> st.SearchStrategy[Order]:
    """Orders of these kinds that suit ``ranks`` ranks."""

    def build(kind: str, parts: int, node: int) -> Order:
        if kind in BASELINES:
            return Order(kind)
        parts = 2 * parts if kind == "bidirectional" else parts
        return Order(kind, parts, node if kind == "hierarchical" else 0)

    nodes = st.sampled_from(divisors(ranks))
    return st.builds(build, st.sampled_from(kinds), st.integers(1, 4), nodes)


@st.composite
def requests(draw: st.DrawFn, kinds: tuple[str, ...], smallest: int) -> tuple[Order, Chunks]:
    rows = tuple(draw(st.lists(st.integers(smallest, 9), min_size=1, max_size=16)))
    order = draw(orders(kinds, len(rows)))
    return order, Chunks(rows, order.parts)


@st.composite
def pair_requests(draw: st.DrawFn, kinds: tuple[str, ...], smallest: int) -> tuple[Order, Pairs]:
    ranks = draw(st.integers(1, 6))
    rows = tuple(draw(st.lists(st.integers(smallest, 6), min_size=ranks**2, max_size=ranks**2)))
    order = draw(orders(kinds, ranks))
    return order, Pairs(rows, order.parts)


def orders_for(name: str, ranks: int) -> list[Order]:
    """The order of this name, or hierarchical ones for every size of a node."""
    if not name.startswith("hierarchical"):
        return [parse_order(name)]
    _, _, parts = name.partition(":")
    return [Order("hierarchical", int(parts or 1), node) for node in divisors(ranks)]


def sent(schedule: Schedule) -> Iterator[tuple[int, Send]]:
    """Every message with the rank that it leaves."""
    for program in schedule.programs:
        for step in program.steps:
            for message in step.messages if isinstance(step, Post) else ():
                if isinstance(message, Send):
                    yield program.rank, message


def forward_proof(collective: str, order: Order, ranks: int) -> Proof:
    chunks = Chunks.even(8 * ranks, ranks, order.parts)
    return check(build_schedule(LINEAR_FORWARD[collective], order, chunks))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(OPERATORS)), requests((*SLICED, *BASELINES), 0))
def test_every_schedule_is_right(operator: str, request: tuple[Order, Chunks]) -> None:
    check(build_schedule(operator, *request))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(PAIR_OPERATORS)),
    pair_requests(("blocking", "blocking_p2p", "sliced", "direct"), 0),
)
def test_every_all_to_all_is_right(operator: str, request: tuple[Order, Pairs]) -> None:
    check(build_schedule(operator, *request))


@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_order_is_right_in_every_group(ranks: int) -> None:
    """Even, uneven and empty chunks, in groups of every size, and nodes of every size that divides it."""
    for name in ["blocking", *POINT_TO_POINT]:
        for order in orders_for(name, ranks):
            for rows in ([6] * ranks, [(5 * r + 3) % 7 for r in range(ranks)]):
                for operator in LINEAR_FORWARD.values():
                    check(build_schedule(operator, order, Chunks(tuple(rows), order.parts)))
    for name in ["blocking", "blocking_p2p", "sliced:3", "direct", "direct:2"]:
        order = parse_order(name)
        rows = [[(3 * s + 5 * d) % 4 for d in range(ranks)] for s in range(ranks)]
        for operator in ["linear_all_to_all.forward", "all_to_all_linear.forward"]:
            check(build_schedule(operator, order, Pairs.of(rows, order.parts)))


TAIL = {"exchange", "linear_all_reduce.forward", "column_all_reduce.backward_input"}
"""Passes without a product that could hide the last message."""


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(set(OPERATORS) - TAIL)), requests(OVERLAPPED, 8))
def test_overlapped_orders_are_head_free_and_tail_free(operator: str, request: tuple[Order, Chunks]) -> None:
    proof = check(build_schedule(operator, *request))
    assert proof.head_free
    assert proof.tail_free


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PAIR_OPERATORS)), pair_requests(("direct",), 4))
def test_direct_all_to_alls_are_head_free_and_tail_free(operator: str, request: tuple[Order, Pairs]) -> None:
    proof = check(build_schedule(operator, *request))
    assert proof.head_free
    assert proof.tail_free


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 9, 12, 16])
@pytest.mark.parametrize("name", POINT_TO_POINT)
def test_volume_is_that_of_the_collective(name: str, ranks: int) -> None:
    """(n - 1) / n of the tensor leaves each rank: n - 1 chunks in their sub-chunks; all-reduce twice that."""
    for order in orders_for(name, ranks):
        for collective in LINEAR_FORWARD:
            assert forward_proof(collective, order, ranks).messages == (ranks - 1) * order.parts
        uneven = Chunks(tuple(r % 3 * 4 for r in range(ranks)), order.parts)
        for operator, factor in [
            *((o, 1) for o in LINEAR_FORWARD.values()),
            ("linear_all_reduce.forward", 2),
        ]:
            rows = sum(
                uneven.size(message.piece) for _, message in sent(build_schedule(operator, order, uneven))
            )
            assert rows == factor * (ranks - 1) * uneven.tokens


@pytest.mark.parametrize("ranks", [4, 6, 8, 12, 16])
def test_few_messages_of_hierarchical_orders_cross_nodes(ranks: int) -> None:
    """One chunk for each other node, where an order that knows no nodes sends one for each other rank."""
    once, twice = LINEAR_FORWARD.values(), ("linear_all_reduce.forward", "all_gather_linear.backward")
    for operator, rounds in [*((o, 1) for o in once), *((o, 2) for o in twice)]:
        for node in divisors(ranks):
            order = Order("hierarchical", 2, node)
            schedule = build_schedule(operator, order, Chunks.even(4 * ranks, ranks, 2))
            crossing = [
                (rank, message) for rank, message in sent(schedule) if rank // node != message.peer // node
            ]
            assert len(crossing) == rounds * ranks * (ranks // node - 1) * order.parts
            assert all(rank % node == message.peer % node for rank, message in crossing)


def test_halves_of_a_bidirectional_ring_travel_either_way() -> None:
    schedule = build_schedule(
        LINEAR_FORWARD["all_gather"], parse_order("bidirectional:4"), Chunks.even(40, 5, 4)
    )
    for rank, message in sent(schedule):
        assert message.peer == (rank + (1 if message.piece.sub % 2 == 0 else -1)) % 5
    posts = [step for step in schedule.programs[0].steps if isinstance(step, Post)]
    assert all({m.peer for m in post.messages if isinstance(m, Send)} == {1, 4} for post in posts)


@pytest.mark.parametrize("kind", ["blocking", "blocking_p2p", "sliced:4"])
def test_baselines_have_the_head_or_tail_they_are_known_for(kind: str) -> None:
    order = parse_order(kind)
    assert not forward_proof("all_gather", order, 4).head_free
    assert not forward_proof("reduce_scatter", order, 4).tail_free
    pairs = Pairs.even(64, 4, order.parts)
    assert not check(build_schedule("all_to_all_linear.forward", order, pairs)).head_free
    assert not check(build_schedule("linear_all_to_all.forward", order, pairs)).tail_free


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_ways_of_others_keep_everything_and_reduce_at_the_end(ranks: int) -> None:
    """Userbuffers has a tail not of messages but of n - 1 additions; asynchronous TP has barriers besides."""
    theirs = {
        kind: forward_proof("reduce_scatter", parse_order(kind), ranks)
        for kind in ("userbuffers", "async_tp")
    }
    gathers = {
        kind: forward_proof("all_gather", parse_order(kind), ranks) for kind in ("userbuffers", "async_tp")
    }
    assert theirs["userbuffers"].head_free
    assert theirs["userbuffers"].tail_free
    assert gathers["userbuffers"].head_free
    assert gathers["userbuffers"].tail_free
    assert not (theirs["async_tp"].head_free or theirs["async_tp"].tail_free)
    assert not (gathers["async_tp"].head_free or gathers["async_tp"].tail_free)
    assert all(proof.closing_additions == ranks - 1 for proof in theirs.values())
    assert theirs["userbuffers"].buffers == 2 * (ranks - 1)
    assert theirs["async_tp"].buffers == ranks


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize(
    ("name", "buffers", "additions"),
    [("ring", 4, 1), ("direct", 5, 2), ("bidirectional", 7, 2), ("hierarchical", 9, 4)],
)
def test_buffers_do_not_grow_with_the_group(name: str, ranks: int, buffers: int, additions: int) -> None:
    """Nor does the number of additions after the last product."""
    for order in orders_for(name, ranks):
        proof = forward_proof("reduce_scatter", order, ranks)
        assert proof.buffers <= buffers
        assert proof.closing_additions <= additions


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_weight_gradients_lie_between_messages_and_the_last_product(parts: int) -> None:
    order = Order("ring", parts)
    for program in build_schedule(
        "all_gather_linear.backward_kept", order, Chunks.even(24, 4, parts)
    ).programs:
        computed = [step.product for step in program.steps if isinstance(step, Compute)]
        assert computed[-1] == "input_gradient"
        assert "weight_gradient" in computed[1:-1]


@pytest.mark.parametrize("name", ["ring", "direct:2", "bidirectional", "hierarchical:2", "sliced:2"])
def test_weight_gradients_hide_the_second_half_of_an_all_reduce(name: str) -> None:
    """What starts after the last input gradient has a weight gradient to travel under."""
    order = parse_order(name)
    schedule = build_schedule("column_all_reduce.backward", order, Chunks.even(48, 6, order.parts))
    for program in schedule.programs:
        computed = [i for i, step in enumerate(program.steps) if isinstance(step, Compute)]
        products = [step.product for step in program.steps if isinstance(step, Compute)]
        last = computed[products.index("weight_gradient") - 1]
        hidden = True
        for step in program.steps[last:]:
            match step:
                case Post():
                    hidden = False
                case Compute(product="weight_gradient"):
                    hidden = True
                case Wait(message=Receive()):
                    assert hidden
                case _:
                    pass
        assert products[-1] == "weight_gradient"


def test_the_gather_of_a_slice_runs_under_the_products_of_the_next() -> None:
    """What stays exposed of an all-reduce is the gather of its last slice."""
    for name, last in [("ring:4", 3), ("direct:4", 3), ("bidirectional:4", 2), ("hierarchical:3:4", 3)]:
        order = parse_order(name)
        for program in build_schedule("linear_all_reduce.forward", order, Chunks.even(48, 6, 4)).programs:
            end = max(i for i, step in enumerate(program.steps) if isinstance(step, Compute))
            late = [step for step in program.steps[end:] if isinstance(step, Post)]
            assert late
            assert all(message.piece.sub >= last for step in late for message in step.messages)


@pytest.mark.parametrize(
    ("order", "ranks", "sentence"),
    [
        (Order("hierarchical", 1, 3), 8, "has nodes of 3 ranks, which do not divide the 8 ranks"),
        (Order("hierarchical", 1, 3), 8, "; use hierarchical:2 or hierarchical:4$"),
        (Order("hierarchical", 2, 2), 9, "use hierarchical:3:2"),
        (Order("hierarchical", 1, 2), 7, "use direct"),
    ],
)  # fmt: skip
def test_nodes_that_do_not_divide_the_group_are_refused(order: Order, ranks: int, sentence: str) -> None:
    for operator in LINEAR_FORWARD.values():
        with pytest.raises(ValueError, match=sentence):
            build_schedule(operator, order, Chunks.even(32, ranks, order.parts))


@pytest.mark.parametrize("name", ["ring", "bidirectional", "hierarchical:2", "userbuffers", "async_tp"])
def test_relays_of_an_all_to_all_are_refused(name: str) -> None:
    order = parse_order(name)
    with pytest.raises(ValueError, match=r"^has no all-to-all.*; use direct$"):
        build_schedule("linear_all_to_all.forward", order, Pairs.even(32, 4, order.parts))


def test_large_groups_are_quick_to_build() -> None:
    """Below 50 ms of CPU time a program for 64 ranks and 4 sub-chunks, even when chunks are uneven."""
    slowest = {}
    for name in [
        "blocking_p2p",
        "sliced:4",
        "ring:4",
        "direct:4",
        "bidirectional:4",
        "hierarchical:8:4",
        "async_tp",
    ]:
        order = parse_order(name)
        for operator in OPERATORS:
            chunks = Chunks(tuple(3 + r % 5 for r in range(64)), order.parts)
            seconds = []
            for _ in range(3):
                start = time.process_time()
                build_program.__wrapped__(operator, order, chunks, 17)
                seconds.append(time.process_time() - start)
            slowest[operator, name] = min(seconds)
    assert max(slowest.values()) < 0.05, max(slowest.items(), key=lambda item: item[1])


def mutated(schedule: Schedule, rank: int, steps: list[Step]) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = Program(rank, tuple(steps))
    return replace(schedule, programs=tuple(programs))


RING = build_schedule(LINEAR_FORWARD["reduce_scatter"], parse_order("ring"), Chunks.even(12, 4))


SUMS = ["linear_reduce_scatter.forward", "all_gather_linear.backward", "linear_all_reduce.forward",
        "column_all_reduce.backward"]  # fmt: skip
SUM_ORDERS = ["sliced:2", "ring:2", "direct:2", "bidirectional", "hierarchical:2", "userbuffers", "async_tp"]
MUTANTS = [
    *((operator, name) for operator in SUMS for name in SUM_ORDERS),
    *((operator, name) for operator in PAIR_OPERATORS for name in ["blocking_p2p", "sliced:2", "direct:2"]),
]


@pytest.mark.parametrize(("operator", "name"), MUTANTS)
def test_no_step_is_superfluous(operator: str, name: str) -> None:
    """Leaving out any one step of a rank breaks the schedule, and the checker says so."""
    order = parse_order(name)
    cut = Pairs.even(64, 4, order.parts) if operator in PAIR_OPERATORS else Chunks.even(16, 4, order.parts)
    schedule = build_schedule(operator, order, cut)
    check(schedule)
    for index in range(len(schedule.programs[1].steps)):
        steps = list(schedule.programs[1].steps)
        del steps[index]
        with pytest.raises(ScheduleError):
            check(mutated(schedule, 1, steps))


def test_sending_a_sum_before_it_is_complete_is_found() -> None:
    schedule = build_schedule("linear_all_reduce.forward", parse_order("ring"), Chunks.even(12, 4))
    steps = list(schedule.programs[1].steps)
    last = max(i for i, step in enumerate(steps) if isinstance(step, Add))
    post = next(i for i, step in enumerate(steps) if i > last and isinstance(step, Post))
    steps.insert(last, steps.pop(post))
    with pytest.raises(ScheduleError):
        check(mutated(schedule, 1, steps))


def test_an_all_to_all_piece_at_the_wrong_place_is_found() -> None:
    """Two pieces from the same rank whose places are mixed up."""
    schedule = build_schedule("linear_all_to_all.forward", parse_order("direct:2"), Pairs.even(64, 4, 2))

    def elsewhere(message: Send | Receive) -> Send | Receive:
        if isinstance(message, Receive) and message.peer == 0:
            return replace(message, place=Place("incoming", 1 - message.place.index))
        return message

    steps: list[Step] = []
    for step in schedule.programs[1].steps:
        match step:
            case Post(messages=messages):
                steps.append(Post(tuple(map(elsewhere, messages))))
            case Wait(message=message):
                steps.append(Wait(elsewhere(message)))
            case _:
                steps.append(step)
    with pytest.raises(ScheduleError, match="ends as"):
        check(mutated(schedule, 1, steps))


def test_an_all_to_all_piece_that_comes_a_second_time_is_found() -> None:
    """Rank 2 passes on to rank 1 what rank 0 has sent there already."""
    schedule = build_schedule("all_to_all_linear.forward", parse_order("direct"), Pairs.even(16, 4))
    again = Receive(Piece(1, 0, 0), Place("incoming", 0), 2)
    steps = [*schedule.programs[1].steps, Post((again,)), Wait(again)]
    with pytest.raises(ScheduleError, match="has its content already"):
        check(mutated(schedule, 1, steps))


def test_a_barrier_that_one_rank_leaves_out_is_a_deadlock() -> None:
    schedule = build_schedule(LINEAR_FORWARD["reduce_scatter"], parse_order("async_tp"), Chunks.even(12, 4))
    steps = list(schedule.programs[1].steps)
    steps.remove(Barrier())
    with pytest.raises(ScheduleError, match="deadlock"):
        check(mutated(schedule, 1, steps))


def test_adding_before_the_arrival_is_a_race() -> None:
    steps = list(RING.programs[1].steps)
    add = next(i for i, step in enumerate(steps) if isinstance(step, Add))
    assert isinstance(steps[add - 1], Wait)
    steps[add - 1], steps[add] = steps[add], steps[add - 1]
    with pytest.raises(ScheduleError, match="before its arrival was waited for"):
        check(mutated(RING, 1, steps))


def test_overwriting_a_buffer_in_flight_is_found() -> None:
    steps = [
        step
        for step in RING.programs[1].steps
        if not (isinstance(step, Wait) and isinstance(step.message, Send))
    ]
    with pytest.raises(ScheduleError, match="in flight"):
        check(mutated(RING, 1, steps))


def test_computing_a_chunk_twice_is_found() -> None:
    steps = list(RING.programs[1].steps)
    with pytest.raises(ScheduleError, match="twice"):
        check(mutated(RING, 1, [*steps[:1], *steps]))


def test_receiving_in_another_order_than_sent_is_found() -> None:
    order = parse_order("ring:2")
    schedule = build_schedule(LINEAR_FORWARD["all_gather"], order, Chunks.even(8, 2, 2))
    steps: list[Step] = []
    for step in schedule.programs[0].steps:
        if isinstance(step, Post):
            flipped = [
                replace(m, piece=m.piece._replace(sub=1 - m.piece.sub)) if isinstance(m, Receive) else m
                for m in step.messages
            ]
            step = Post(tuple(flipped))
        steps.append(step)
    with pytest.raises(ScheduleError):
        check(mutated(schedule, 0, steps))


def test_waiting_in_a_circle_is_a_deadlock() -> None:
    """Each rank waits for its arrival before it sends."""
    schedule = build_schedule(LINEAR_FORWARD["all_gather"], parse_order("ring"), Chunks.even(4, 2))
    programs = []
    for program in schedule.programs:
        (post,) = [step for step in program.steps if isinstance(step, Post)]
        send, receive = post.messages
        rest = [step for step in program.steps if isinstance(step, Compute | Wait)]
        waits = [step for step in rest if isinstance(step, Wait) and isinstance(step.message, Receive)]
        others = [step for step in rest if step not in waits]
        programs.append(Program(program.rank, (Post((receive,)), *waits, Post((send,)), *others)))
    with pytest.raises(ScheduleError, match="deadlock"):
        check(replace(schedule, programs=tuple(programs)))
