"""A whole pipeline schedule: a program a rank, and where each stage is."""

from dataclasses import dataclass
from functools import cached_property

from brigata.schedule.pipeline.actions import Action, Kind
from brigata.schedule.pipeline.dependencies import Flat, flatten


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

    @cached_property
    def flat(self) -> Flat:
        """What each action waits for; made once.

        Raises:
            PipelineError: a rank waits for ever.
        """
        return flatten(self.programs, self.ranks_of, self.micro_batches)
