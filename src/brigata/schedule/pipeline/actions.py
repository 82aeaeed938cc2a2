"""The words of a pipeline schedule."""

from enum import StrEnum
from typing import NamedTuple


class PipelineError(AssertionError):
    """A schedule that is wrong, and why. Schedules are ours: this is never the user's mistake."""


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input and weight gradients in one."""
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One computation of a rank: a stage of the model on a micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


class Transfer(NamedTuple):
    """A message between ranks: activations of ``stage`` to the next one, or gradients to the one before.

    ``stage`` is the stage that computed what is sent.
    """

    forward: bool
    stage: int
    micro_batch: int
    source: int
    target: int
