"""Errors of predictions: how large, which way, and whether layouts are put in the right order."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from brigata.validate.outcome import Outcome, Outcomes, Served

SMALLEST_GROUP = 6
"""Layouts of one model on one cluster that are worth putting in order."""


@dataclass(frozen=True)
class Errors:
    """Of some rows: mean, median and 90th percentile of the absolute error, and the mean error (shares)."""

    rows: int
    mape: float
    median_ape: float
    p90_ape: float
    bias: float

    def as_dict(self) -> dict[str, float]:
        """For ``--json``."""
        return {
            "rows": self.rows,
            "mape": self.mape,
            "median_ape": self.median_ape,
            "p90_ape": self.p90_ape,
            "bias": self.bias,
        }


def errors_of(outcomes: Sequence[Outcome | Served]) -> Errors:
    """Errors of rows that have a time; all zero of none."""
    if not outcomes:
        return Errors(0, 0.0, 0.0, 0.0, 0.0)
    error = np.array([outcome.error for outcome in outcomes])
    size = np.abs(error)
    return Errors(
        len(error),
        float(size.mean()),
        float(np.median(size)),
        float(np.percentile(size, 90)),
        float(error.mean()),
    )


def grouped(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
    """Outcomes by key, in the keys' order."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome)].append(outcome)
    return dict(sorted(groups.items()))


KEYS: dict[str, Callable[[Outcome], str]] = {
    "source": lambda o: o.row.source,
    "device": lambda o: o.job.cluster.preset,
    "software": lambda o: o.job.cluster.software,
    "kind": lambda o: o.row.text("arch") or "dense",
    "precision": lambda o: o.job.train.precision,
}
"""By what errors are shown."""


@dataclass(frozen=True)
class Ordering:
    """How well layouts of one model on one cluster are ordered.

    Attributes:
        group: source, model, device, devices, length and batch.
        rows: layouts.
        spearman: rank correlation of predicted and measured times.
        regret: by how much the layout predicted fastest is slower than the fastest.
    """

    group: str
    rows: int
    spearman: float
    regret: float


def orderings(outcomes: Iterable[Outcome]) -> list[Ordering]:
    """Of every group of ``SMALLEST_GROUP`` or more layouts."""
    found = []
    for name, rows in grouped(outcomes, _cluster).items():
        if len(rows) < SMALLEST_GROUP:
            continue
        measured = np.array([o.measured for o in rows], dtype=float)
        predicted = np.array([o.predicted for o in rows])
        chosen = measured[predicted.argmin()]
        found.append(
            Ordering(name, len(rows), spearman(predicted, measured), float(chosen / measured.min() - 1))
        )
    return found


def _cluster(outcome: Outcome) -> str:
    job, row = outcome.job, outcome.row
    size = f"{job.workload.seq_len} tokens, batch {job.workload.global_batch}"
    return f"{row.source}: {row.text('model')}, {job.ranks} x {job.cluster.preset}, {size}"


def spearman(a: Sequence[float] | Any, b: Sequence[float] | Any) -> float:
    """Correlation of the ranks; equal values share a rank."""
    first, second = _ranks(np.asarray(a, dtype=float)), _ranks(np.asarray(b, dtype=float))
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale else 0.0


def _ranks(values: Any) -> Any:
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values), dtype=float)
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    return ranks


@dataclass(frozen=True)
class MemoryErrors:
    """Of rows with a published peak, and of those that ran out of memory.

    Attributes:
        rows: with a published peak.
        mape: mean absolute error.
        bias: mean error.
        out_of_memory: published as such, and how many of them are predicted so.
        refused_though_ran: rows that ran and are predicted not to fit.
        ran: rows that ran.
    """

    rows: int
    mape: float
    bias: float
    out_of_memory: tuple[int, int]
    refused_though_ran: int
    ran: int


def memory_errors(outcomes: Outcomes) -> MemoryErrors:
    """Of all rows."""
    ratios = np.array([o.memory for o in outcomes.predicted if o.memory is not None], dtype=float)
    failed = [o for o in outcomes.predicted if o.row.text("status") == "oom"]
    ran = [o for o in outcomes.predicted if o.measured is not None]
    off = ratios - 1 if len(ratios) else np.zeros(1)
    return MemoryErrors(
        len(ratios),
        float(np.abs(off).mean()),
        float(off.mean()),
        (len(failed), sum(not o.fits for o in failed)),
        sum(not o.fits for o in ran),
        len(ran),
    )


def served_groups(outcomes: Outcomes) -> dict[str, list[Served]]:
    """Figures of inference by software, kind of figure and device."""
    groups: dict[str, list[Served]] = defaultdict(list)
    for served in outcomes.served:
        groups[f"{served.job.cluster.software} {served.what} {served.job.cluster.preset}"].append(served)
    return dict(sorted(groups.items()))


def as_dict(outcomes: Outcomes) -> dict[str, Any]:
    """For ``--json``."""
    timed = outcomes.timed
    everything = errors_of(timed).as_dict()
    memory = memory_errors(outcomes)
    served_rows = {served.row.id for served in outcomes.served}
    return {
        "rows": len(outcomes.predicted) + len(served_rows) + len(outcomes.refused),
        "simulated": len(outcomes.predicted) + len(served_rows),
        "refused": [{"id": row.id, "reason": reason} for row, reason in outcomes.refused],
        **{key: value for key, value in everything.items() if key != "rows"},
        **{
            f"by_{name}": {group: errors_of(rows).as_dict() for group, rows in grouped(timed, key).items()}
            for name, key in KEYS.items()
        },
        "ordering": [ordering.__dict__ for ordering in orderings(timed)],
        "memory": memory.__dict__,
        "inference": {name: errors_of(rows).as_dict() for name, rows in served_groups(outcomes).items()},
        "predictions": [
            {"id": o.row.id, "measured": o.measured, "predicted": o.predicted, "low": o.low, "high": o.high}
            for o in outcomes.predicted
        ],
    }
