"""What a simulation says: times of a rank and of the whole, and a timeline."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["phase", "compute", "wait", "add", "post", "message"]
"""``phase`` is a part of a training step; only real runs have it."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time: on ``rank``, or a message that ``rank`` sent."""

    rank: int
    kind: Kind
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RankTime:
    """Where the operator's time went on one rank.

    Attributes:
        compute_s: products.
        add_s: additions, part of ``exposed_s``.
        head_s: from the operator's start to the first product; all of the time if there is none.
        tail_s: from the end of the last product to the operator's end, additions included.
        exposed_s: the operator's time less ``compute_s``: head, tail and what is between.
        end_s: when this rank was done; the operator ends with its last rank.
    """

    compute_s: float
    add_s: float
    head_s: float
    tail_s: float
    exposed_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedTime:
    """The time of a schedule: ``total_s`` seconds until its last rank is done.

    ``timeline`` holds spans in order of their start, then of rank, when it was asked for.
    """

    total_s: float
    ranks: tuple[RankTime, ...]
    timeline: tuple[Span, ...] = ()

    @property
    def exposed_s(self) -> float:
        """Exposed communication of the rank that has most of it."""
        return max(rank.exposed_s for rank in self.ranks)
