"""Pipeline schedules: complete, free of deadlock, with the bubbles and activations of their sources."""

from dataclasses import replace
from time import perf_counter

import pytest

from brigata.schedule.pipeline import (
    PIPELINE_ORDERS,
    Action,
    Kind,
    PipelineSchedule,
    build_pipeline,
    check_pipeline,
    held_activations,
)
from brigata.schedule.pipeline.checker import PipelineError
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


def test_sends_and_receives_match_in_number_and_order() -> None:
    for order in PIPELINE_ORDERS:
        schedule = build_pipeline(order, 4, 8)
        for source in range(4):
            received = [
                t for target in range(4) if target != source for t in schedule.receives(target, source)
            ]
            assert sorted(received) == sorted(schedule.sends(source))
            assert all(t.source == source for t in received)


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
    assert perf_counter() - start < 0.2
