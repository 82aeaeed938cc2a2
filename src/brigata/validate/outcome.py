"""Rows beside their predictions, or the reason why there is none."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import log

from brigata.describe.errors import JobError
from brigata.describe.job import Job
from brigata.simulate.prediction import Prediction, predict
from brigata.validate.jobs import job_of
from brigata.validate.memory_kinds import measured_bytes, predicted_bytes
from brigata.validate.serving import compared, is_serving, serving_of
from brigata.validate.tables import RefusedRowError, Row


@dataclass(frozen=True)
class Outcome:
    """A row that was predicted.

    Attributes:
        row: what was published.
        job: as which job it was read.
        predicted: seconds of a step.
        low: and ``high``, the interval.
        high: see ``low``.
        memory: predicted over published bytes; None where none are published.
        fits: whether the prediction fits into the device.
    """

    row: Row
    job: Job
    predicted: float
    low: float
    high: float
    memory: float | None
    fits: bool

    @property
    def measured(self) -> float | None:
        """Seconds of a step; None: only memory, or that it did not fit, is published."""
        return None if self.row.text("status") == "oom" else self.row.measured_s

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        assert self.measured is not None
        return self.predicted / self.measured - 1

    @property
    def deviation(self) -> float:
        """The error's logarithm, which is as large for half as for twice the time."""
        return log(1 + self.error)


@dataclass(frozen=True)
class Served:
    """One figure of an inference row: ``what`` it is, measured and predicted (seconds)."""

    row: Row
    job: Job
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


@dataclass
class Outcomes:
    """All rows of some tables."""

    predicted: list[Outcome] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    refused: list[tuple[Row, str]] = field(default_factory=list)

    @property
    def timed(self) -> list[Outcome]:
        """Rows whose error counts."""
        return [o for o in self.predicted if o.measured is not None and o.row.judged]

    @property
    def reported(self) -> list[Outcome]:
        """Rows whose error is shown and does not count."""
        return [o for o in self.predicted if o.measured is not None and not o.row.judged]


def predict_rows(rows: Iterable[Row], seen: Callable[[], None] = lambda: None) -> Outcomes:
    """Predict every row that says enough; ``seen`` is called after each."""
    outcomes = Outcomes()
    for row in rows:
        try:
            if is_serving(row):
                outcomes.served += _serve(row)
            else:
                outcomes.predicted.append(_predict(row))
        except (RefusedRowError, JobError) as reason:
            outcomes.refused.append((row, str(reason)))
        seen()
    return outcomes


def _serve(row: Row) -> list[Served]:
    serving = serving_of(row)
    figures = compared(row, serving)
    if not figures:
        raise RefusedRowError("neither latency_ms, ttft_ms nor tpot_ms is published")
    return [Served(row, serving.job, what, *both) for what, both in figures.items()]


def _predict(row: Row) -> Outcome:
    memory = measured_bytes(row)
    if row.text("status") != "oom" and row.measured_s is None and memory is None:
        raise RefusedRowError("neither a time, nor tokens a second with a batch, nor memory is published")
    job = job_of(row)
    found: Prediction = predict(job)
    use = found.memory[found.fullest]
    ratio = None if memory is None else predicted_bytes(row, use) / memory
    fits = use.total <= job.cluster.device.memory_gb * 1e9
    return Outcome(
        row, job, found.seconds, found.seconds * found.low, found.seconds * found.high, ratio, fits
    )
