"""The words of a pipeline schedule."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


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


@dataclass(frozen=True)
class PipelineSchedule:
    """A program a rank.

    Attributes:
        programs: each rank's actions in order.
        ranks_of: rank of each stage, first stage first.
        micro_batches: of one optimizer step.
    """

    programs: tuple[tuple[Action, ...], ...]
    ranks_of: tuple[int, ...]
    micro_batches: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.programs)

    @property
    def stages(self) -> int:
        """Number of stages: ranks times the virtual stages of each."""
        return len(self.ranks_of)

    @cached_property
    def split(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(action.kind is Kind.WEIGHT_GRADIENT for action in self.programs[0])

    def sends(self, rank: int) -> list[Transfer]:
        """What ``rank`` sends, in the order in which it is there; nothing between stages of one rank."""
        transfers = []
        for kind, stage, micro_batch in self.programs[rank]:
            if kind is Kind.WEIGHT_GRADIENT:
                continue
            forward = kind is Kind.FORWARD
            neighbour = stage + (1 if forward else -1)
            if 0 <= neighbour < self.stages and self.ranks_of[neighbour] != rank:
                target = self.ranks_of[neighbour]
                transfers.append(Transfer(forward, stage, micro_batch, rank, target))
        return transfers

    def receives(self, rank: int, source: int) -> list[Transfer]:
        """What ``rank`` receives from ``source``: in the order of the sends, so that no tag is needed."""
        return [transfer for transfer in self.sends(source) if transfer.target == rank]
