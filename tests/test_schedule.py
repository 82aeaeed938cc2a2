"""Every schedule that can be built is proven, and the checker finds what is wrong with a wrong one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brigata.describe import Order, parse_order
from brigata.schedule import OPERATORS, Chunks, Program, Schedule, ScheduleError, build_schedule, check
from brigata.schedule.steps import Add, Compute, Post, Receive, Send, Step, Wait

ORDERS = st.one_of(
    st.sampled_from([Order("blocking"), Order("blocking_p2p")]),
    st.builds(Order, st.sampled_from(["sliced", "ring", "direct"]), st.integers(1, 4)),
)
OVERLAPPED = st.builds(Order, st.sampled_from(["ring", "direct"]), st.integers(1, 4))
LINEAR_FORWARD = {
    "all_gather": "all_gather_linear.forward",
    "reduce_scatter": "linear_reduce_scatter.forward",
}


def cuts(smallest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(smallest, 9), min_size=1, max_size=16).map(tuple)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(OPERATORS)), ORDERS, cuts(0))
def test_every_schedule_is_right(operator: str, order: Order, rows: tuple[int, ...]) -> None:
    check(build_schedule(operator, order, Chunks(rows, order.parts)))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(set(OPERATORS) - {"exchange"})), OVERLAPPED, cuts(4))
def test_ring_and_direct_are_head_free_and_tail_free(
    operator: str, order: Order, rows: tuple[int, ...]
) -> None:
    proof = check(build_schedule(operator, order, Chunks(rows, order.parts)))
    assert proof.head_free
    assert proof.tail_free


@pytest.mark.parametrize("ranks", range(2, 17))
@pytest.mark.parametrize("kind", ["sliced:2", "ring", "direct", "ring:3", "direct:2", "blocking_p2p"])
def test_volume_is_that_of_the_collective(kind: str, ranks: int) -> None:
    """(n - 1) / n of the tensor leaves each rank: n - 1 chunks, each in its sub-chunks."""
    order = parse_order(kind)
    for operator in LINEAR_FORWARD.values():
        proof = check(build_schedule(operator, order, Chunks.even(8 * ranks, ranks, order.parts)))
        assert proof.messages == (ranks - 1) * order.parts


@pytest.mark.parametrize("kind", ["blocking", "blocking_p2p", "sliced:4"])
def test_baselines_have_the_head_or_tail_they_are_known_for(kind: str) -> None:
    order = parse_order(kind)
    chunks = Chunks.even(64, 4, order.parts)
    assert not check(build_schedule(LINEAR_FORWARD["all_gather"], order, chunks)).head_free
    assert not check(build_schedule(LINEAR_FORWARD["reduce_scatter"], order, chunks)).tail_free


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("kind", ["ring", "direct"])
def test_buffers_do_not_grow_with_the_group(kind: str, ranks: int) -> None:
    chunks = Chunks.even(4 * ranks, ranks)
    assert check(build_schedule(LINEAR_FORWARD["reduce_scatter"], parse_order(kind), chunks)).buffers <= 5


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_weight_gradients_lie_between_messages_and_the_last_product(parts: int) -> None:
    order = Order("ring", parts)
    for program in build_schedule(
        "all_gather_linear.backward_kept", order, Chunks.even(24, 4, parts)
    ).programs:
        computed = [step.product for step in program.steps if isinstance(step, Compute)]
        assert computed[-1] == "input_gradient"
        assert "weight_gradient" in computed[1:-1]


def mutated(schedule: Schedule, rank: int, steps: list[Step]) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = Program(rank, tuple(steps))
    return replace(schedule, programs=tuple(programs))


RING = build_schedule(LINEAR_FORWARD["reduce_scatter"], parse_order("ring"), Chunks.even(12, 4))


@pytest.mark.parametrize("index", range(len(RING.programs[1].steps)))
def test_no_step_is_superfluous(index: int) -> None:
    """Leaving out any one step of a rank breaks the schedule, and the checker says so."""
    steps = list(RING.programs[1].steps)
    del steps[index]
    with pytest.raises(ScheduleError):
        check(mutated(RING, 1, steps))


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
