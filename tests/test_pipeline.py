"""Pipeline schedules: complete, free of deadlock, with the bubbles and activations of their sources."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

import pytest

from brigata.schedule.pipeline import (
    PIPELINE_ORDERS,
    Action,
    Exchange,
    Kind,
    PipelineError,
    PipelineSchedule,
    Transfer,
    build_pipeline,
    check_messages,
    check_pipeline,
    held_activations,
    with_messages,
)
from brigata.simulate.pipeline import StageTimes, time_pipeline

EQUAL = StageTimes(1.0, 1.0, 1.0)


def built(order: str, ranks: int, micro_batches: int, virtual: int | None = None) -> PipelineSchedule | None:
    """The schedule, or None where the order refuses the numbers."""
    try:
        return build_pipeline(order, ranks, micro_batches, virtual)
    except ValueError as refusal:
        assert "use " in str(refusal)
        return None


def total(schedule: PipelineSchedule, message_s: float = 0.0) -> float:
    return time_pipeline(schedule, [EQUAL] * schedule.stages, message_s).total


@pytest.mark.parametrize("order", PIPELINE_ORDERS)
def test_every_schedule_is_complete_and_ends(order: str) -> None:
    proven = 0
    for ranks in range(1, 9):
        for micro_batches in range(1, 25):
            for virtual in (1, 2, 3) if order == "interleaved" else (None,):
                schedule = built(order, ranks, micro_batches, virtual)
                if schedule is not None:
                    check_pipeline(schedule)
                    proven += 1
    assert proven > 80


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 16, 32])
def test_bubbles_are_those_of_the_sources(ranks: int, micro_batches: int) -> None:
    work = 3.0 * micro_batches
    for order in ("gpipe", "1f1b"):
        assert total(build_pipeline(order, ranks, micro_batches)) == pytest.approx(work + 3 * (ranks - 1))
    for virtual in (2, 4):
        schedule = build_pipeline("interleaved", ranks, micro_batches, virtual)
        assert total(schedule) == pytest.approx(virtual * work + 3 * (ranks - 1))
    # ZB-H1: the bubble of 1F1B, (p - 1)(F + I + W), without two of its three parts
    assert total(build_pipeline("zb-h1", ranks, micro_batches)) == pytest.approx(work + ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_v_schedules_have_nearly_no_bubble(ranks: int) -> None:
    micro_batches = 6 * ranks
    work = 2 * 3.0 * micro_batches
    assert total(build_pipeline("zb-v", ranks, micro_batches)) <= work + ranks
    dual = total(build_pipeline("dualpipe-v", ranks, micro_batches))
    assert dual < 2 * total(build_pipeline("1f1b", ranks, micro_batches))


@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
def test_activations_held_are_those_of_the_sources(ranks: int) -> None:
    micro_batches = 3 * ranks
    for rank in range(ranks):
        assert held_activations(build_pipeline("gpipe", ranks, micro_batches), rank) == micro_batches
        assert held_activations(build_pipeline("1f1b", ranks, micro_batches), rank) == ranks - rank
        assert held_activations(build_pipeline("zb-h1", ranks, micro_batches), rank) == ranks
        assert held_activations(build_pipeline("zb-v", ranks, micro_batches), rank) <= 2 * ranks
    interleaved = build_pipeline("interleaved", ranks, micro_batches, 2)
    assert held_activations(interleaved, 0) == 2 * (ranks - 1) + ranks + 1


def test_unequal_stages_and_messages_are_timed_by_hand() -> None:
    """2 ranks, 2 micro-batches, 1F1B: F0.0 F0.1 | F1.0 B1.0 F1.1 B1.1 | B0.0 B0.1, messages of 0.5."""
    schedule = build_pipeline("1f1b", 2, 2)
    times = time_pipeline(schedule, [StageTimes(1, 1, 1), StageTimes(2, 1, 2)], 0.5)
    assert times.ends[1] == (3.5, 6.5, 8.5, 11.5)
    assert times.ends[0] == (1.0, 2.0, 9.0, 14.0)
    assert times.total == 14.0
    assert times.busy == (6.0, 10.0)
    assert times.bubbles[1] == pytest.approx(4 / 14)


def mutated(schedule: PipelineSchedule, rank: int, change: str) -> PipelineSchedule:
    program = list(schedule.programs[rank])
    match change:
        case "drop":
            program.pop(2)
        case "repeat":
            program.append(program[0])
        case "backward first":
            program.insert(0, program.pop())
        case "other rank":
            program[0] = Action(Kind.FORWARD, (program[0].stage + 1) % schedule.stages, 0)
        case "mixed":
            program[-1] = Action(Kind.INPUT_GRADIENT, program[-1].stage, program[-1].micro_batch)
    programs = tuple(tuple(program) if i == rank else p for i, p in enumerate(schedule.programs))
    return replace(schedule, programs=programs)


@pytest.mark.parametrize("change", ["drop", "repeat", "backward first", "other rank", "mixed"])
@pytest.mark.parametrize("rank", [0, 2])
def test_wrong_schedules_are_found_out(change: str, rank: int) -> None:
    schedule = build_pipeline("1f1b", 4, 8)
    check_pipeline(schedule)
    with pytest.raises(PipelineError):
        check_pipeline(mutated(schedule, rank, change))


def test_messages_out_of_order_are_a_deadlock() -> None:
    """The receiver wants micro-batch 1 first, the sender needs its gradient of 0 before it goes on."""
    schedule = build_pipeline("1f1b", 2, 2)
    first, second = schedule.programs
    starved = (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 1), first[3])
    swapped = (second[2], second[3], second[0], second[1])
    check_pipeline(replace(schedule, programs=(starved, second)))
    with pytest.raises(PipelineError, match="waits for ever"):
        check_pipeline(replace(schedule, programs=(starved, swapped)))


def exchanges(program: Sequence[Action | Exchange]) -> list[Exchange]:
    return [entry for entry in program if isinstance(entry, Exchange)]


@pytest.mark.parametrize("order", PIPELINE_ORDERS)
def test_every_result_that_another_rank_needs_leaves_once(order: str) -> None:
    schedule = build_pipeline(order, 4, 8)
    crossing = sum(a != b for a, b in pairwise(schedule.ranks_of))
    programs = with_messages(schedule)
    sent = 0
    for rank, program in enumerate(programs):
        transfers = [transfer for exchange in exchanges(program) for transfer in exchange.transfers]
        assert len(set(transfers)) == len(transfers)
        sent += sum(transfer.source == rank for transfer in transfers)
    assert sent == 2 * 8 * crossing
    assert check_messages(schedule, programs) >= 1


def test_opposite_messages_of_a_moment_start_together() -> None:
    """In 1F1B's steady state a forward goes one way while a gradient comes the other."""
    programs = with_messages(build_pipeline("1f1b", 4, 16))
    for rank in range(4):
        both = sum(len(exchange.transfers) == 2 for exchange in exchanges(programs[rank]))
        neighbours = 1 if rank in (0, 3) else 2
        assert both >= (16 - 4) * neighbours


def test_messages_started_where_they_are_needed_would_hang() -> None:
    """Each sent when computed and received when needed: then 1F1B's neighbours wait for each other."""
    schedule = build_pipeline("1f1b", 2, 4)
    programs: list[tuple[Action | Exchange, ...]] = []
    for rank, program in enumerate(schedule.programs):
        entries: list[Action | Exchange] = []
        for action in program:
            down = Exchange((Transfer(True, 0, action.micro_batch, 0, 1),))
            up = Exchange((Transfer(False, 1, action.micro_batch, 1, 0),))
            message = down if action.kind is Kind.FORWARD else up
            sends = (action.kind is Kind.FORWARD) == (rank == 0)
            entries += [action, message] if sends else [message, action]
        programs.append(tuple(entries))
    check_messages(schedule, with_messages(schedule))
    with pytest.raises(PipelineError, match="wait for ever"):
        check_messages(schedule, tuple(programs))


@pytest.mark.parametrize("order", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("change", ["drop", "repeat", "swap", "too early", "too late", "reversed"])
def test_wrong_messages_are_found_out(order: str, change: str) -> None:
    schedule = build_pipeline(order, 4, 8)
    programs = [list(program) for program in with_messages(schedule)]
    program = programs[0]
    first, second, *_ = (i for i, entry in enumerate(program) if isinstance(entry, Exchange))
    message = program[first]
    assert isinstance(message, Exchange)
    match change:
        case "drop":
            del program[first]
        case "repeat":
            program.insert(first, message)
        case "swap":
            program[first], program[second] = program[second], program[first]
        case "too early":
            program.insert(0, program.pop(first))
        case "too late":
            program.append(program.pop(first))
        case "reversed":
            wrong = message.transfers[0]._replace(forward=not message.transfers[0].forward)
            program[first] = Exchange((wrong, *message.transfers[1:]))
    with pytest.raises(PipelineError):
        check_messages(schedule, tuple(map(tuple, programs)))


def test_weight_gradients_hold_only_what_input_gradients_leave() -> None:
    """ZB-H1's last rank holds one micro-batch whole and, of up to p - 1 others, what their W need."""
    schedule = build_pipeline("zb-h1", 4, 16)
    assert held_activations(schedule, 3) == 4
    assert held_activations(schedule, 3, kept=0.5) == pytest.approx(1 + 3 * 0.5)
    assert held_activations(schedule, 3, kept=0.0) == 1
    assert held_activations(build_pipeline("1f1b", 4, 16), 0, kept=0.5) == 4


def test_blocking_sends_and_unequal_boundaries_are_timed_by_hand() -> None:
    """GPipe: with 3 ranks and 1 micro-batch nothing overlaps; with 2 and 2, rank 0 waits to have sent."""
    units = [StageTimes(1, 1, 1)] * 3
    single = time_pipeline(build_pipeline("gpipe", 3, 1), units, [1.0, 2.0])
    assert single.ends == ((1.0, 15.0), (3.0, 12.0), (6.0, 8.0))
    assert single.starts == ((0.0, 13.0), (2.0, 10.0), (5.0, 6.0))
    pair = build_pipeline("gpipe", 2, 2)
    assert time_pipeline(pair, units[:2], 1.0).ends == ((1.0, 2.0, 9.0, 11.0), (3.0, 4.0, 6.0, 8.0))
    blocking = time_pipeline(pair, units[:2], 1.0, overlap=False)
    assert blocking.ends == ((1.0, 3.0, 10.0, 13.0), (3.0, 5.0, 7.0, 10.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f2b", 2, 2), "use gpipe, 1f1b"),
        (("interleaved", 4, 6), "use 4 or 8"),
        (("dualpipe-v", 4, 6), "use 8 or more"),
        (("1f1b", 2, 2, 3), "leave them out"),
        (("1f1b", 0, 2), "use 1 or more"),
    ],
)
def test_what_an_order_cannot_do_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=r"use|leave") as refusal:
        build_pipeline(*arguments)  # type: ignore[arg-type]
    assert words in str(refusal.value)


def test_a_large_pipeline_is_timed_quickly() -> None:
    """Llama-3.1-405B's: 16 ranks, 2 virtual stages, 128 micro-batches; the limit is for a busy machine."""
    schedule = build_pipeline("interleaved", 16, 128, 2)
    stages = [EQUAL] * schedule.stages
    time_pipeline(schedule, stages)
    start = perf_counter()
    time_pipeline(schedule, stages)
    assert perf_counter() - start < 0.1
