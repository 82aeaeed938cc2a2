"""Who computes and sends what, and when: schedules as plain data, their generators and their proof."""

from brigata.schedule.build import OPERATORS, PAIR_OPERATORS, build_program, build_schedule
from brigata.schedule.checker import Proof, ScheduleError, check
from brigata.schedule.chunks import Chunks, Pairs, Piece
from brigata.schedule.steps import Program, Schedule

__all__ = [
    "OPERATORS",
    "PAIR_OPERATORS",
    "Chunks",
    "Pairs",
    "Piece",
    "Program",
    "Proof",
    "Schedule",
    "ScheduleError",
    "build_program",
    "build_schedule",
    "check",
]
