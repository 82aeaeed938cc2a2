"""Who computes and sends what, and when: schedules as plain data, their generators and their proof."""

from brigata.schedule.build import OPERATORS, build_program, build_schedule
from brigata.schedule.checker import Proof, ScheduleError, check
from brigata.schedule.chunks import Chunks, Piece
from brigata.schedule.steps import Program, Schedule

__all__ = [
    "OPERATORS",
    "Chunks",
    "Piece",
    "Program",
    "Proof",
    "Schedule",
    "ScheduleError",
    "build_program",
    "build_schedule",
    "check",
]
