"""Receives posted ahead: the same work, proven anew, and no send that waits for its receiver."""

import pytest
from hypothesis import given, settings

from brigata.describe import parse_order
from brigata.schedule import OPERATORS, Chunks, Program, Schedule, ScheduleError, build_schedule, check
from brigata.schedule.steps import Barrier, Post, Receive, Send, Step
from brigata.simulate import Duration, Durations, Link, Network, simulate
from test_schedule import POINT_TO_POINT, orders_for, requests

GROUPS = range(1, 9)


def receives(program: Program) -> list[Receive]:
    """Receives in the order in which they are posted."""
    posts = [step for step in program.steps if isinstance(step, Post)]
    return [message for post in posts for message in post.messages if isinstance(message, Receive)]


def without_messages(program: Program) -> list[Step]:
    """Everything but posts."""
    return [step for step in program.steps if not isinstance(step, Post)]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", POINT_TO_POINT)
def test_every_schedule_is_proven_with_its_receives_ahead(operator: str, name: str) -> None:
    for ranks in GROUPS:
        for order in orders_for(name, ranks):
            chunks = Chunks(tuple(3 + rank % 3 for rank in range(ranks)), order.parts)
            proof = check(build_schedule(operator, order, chunks))
            ahead = check(build_schedule(operator, order, chunks, ahead=True), stream=False)
            assert (ahead.head_free, ahead.tail_free) == (proof.head_free, proof.tail_free)
            assert (ahead.messages, ahead.products) == (proof.messages, proof.products)


@settings(max_examples=25, deadline=None)
@given(requests(("ring", "direct", "bidirectional", "hierarchical", "sliced"), smallest=0))
def test_only_posts_move(request_: tuple) -> None:  # type: ignore[type-arg]
    order, chunks = request_
    for operator in ("all_gather_linear.backward", "linear_reduce_scatter.forward"):
        plain = build_schedule(operator, order, chunks)
        ahead = build_schedule(operator, order, chunks, ahead=True)
        check(ahead, stream=False)
        for one, other in zip(plain.programs, ahead.programs, strict=True):
            assert without_messages(one) == without_messages(other)
            for peer in range(chunks.ranks):
                by_peer = [[r for r in receives(p) if r.peer == peer] for p in (one, other)]
                assert by_peer[0] == by_peer[1]


def test_receives_of_a_gather_are_all_posted_at_once() -> None:
    schedule = build_schedule("all_gather_linear.forward", parse_order("ring:2"), Chunks.even(16, 4, 2), True)
    for program in schedule.programs:
        first = program.steps[0]
        assert isinstance(first, Post)
        assert [m for m in first.messages if isinstance(m, Receive)] == receives(program)
        assert any(isinstance(m, Send) for m in first.messages)


def test_a_scatter_takes_what_arrives_before_its_first_product() -> None:
    schedule = build_schedule(
        "linear_reduce_scatter.forward", parse_order("direct:2"), Chunks.even(8, 2, 2), True
    )
    for program in schedule.programs:
        first = program.steps[0]
        assert isinstance(first, Post)
        assert list(first.messages) == receives(program)


def test_no_receive_passes_a_barrier() -> None:
    chunks = Chunks.even(12, 3)
    schedule = build_schedule("all_gather_linear.forward", parse_order("async_tp"), chunks, True)
    for program in schedule.programs:
        barriers = [i for i, step in enumerate(program.steps) if isinstance(step, Barrier)]
        plain = build_schedule("all_gather_linear.forward", parse_order("async_tp"), chunks).programs[0]
        assert barriers
        assert len([s for s in program.steps if isinstance(s, Post)]) == len(
            [s for s in plain.steps if isinstance(s, Post)]
        )


def test_on_a_stream_receives_ahead_would_stand_in_the_way() -> None:
    chunks = Chunks.even(12, 3)
    schedule = build_schedule("linear_reduce_scatter.forward", parse_order("ring"), chunks, ahead=True)
    with pytest.raises(ScheduleError, match="deadlock"):
        check(schedule)


def test_the_simulator_runs_what_the_runtime_runs() -> None:
    chunks = Chunks.even(64, 4, 2)
    durations = Durations({"output": Duration(1.0)}, bytes_per_row=1.0)
    for name in ("ring:2", "direct:2"):
        times = []
        for ahead in (False, True):
            schedule: Schedule = build_schedule("all_gather_linear.forward", parse_order(name), chunks, ahead)
            times.append(simulate(schedule, durations, Network(Link(2.0))).total_s)
        assert times[1] <= times[0] * (1 + 1e-9)
