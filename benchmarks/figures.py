"""What the benchmarks share: paired ratios with intervals, answers to what was asked, kept results.

All statistics are of interleaved repetitions: sample i of every competitor was taken in turn within
repetition i, so that ratios are taken within a repetition and a machine that slows down slows both sides.
"""

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from math import comb, inf
from pathlib import Path
from statistics import median
from typing import Any

CONFIDENCE = 0.95
NAMED = 6
"""Rows beyond a limit that are named."""


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios and the interval that covers the true one, at ``CONFIDENCE`` or more."""

    median: float
    low: float
    high: float

    @property
    def includes_one(self) -> bool:
        """Whether the two sides cannot be told apart."""
        return self.low <= 1 <= self.high

    def __str__(self) -> str:
        bounded, spread = self.high < inf, self.low < self.high  # nothing is to be said of a ratio to itself
        interval = f" ({self.low:.3f} to {self.high:.3f})" if bounded and spread else ""
        return f"{self.median:.3f}{interval}"


@dataclass(frozen=True)
class Finding:
    """What was asked, what was found, and whether that meets it; None: not measured, so not judged."""

    asked: str
    found: str
    met: bool | None


@dataclass(frozen=True)
class Section:
    """One part of the page.

    ``measure(repetitions, quick)`` returns plain data that JSON can keep; ``quick`` leaves cases out, to see
    that everything runs. ``findings`` and ``render`` (Markdown) work on that data alone.
    """

    title: str
    repetitions: int
    measure: Callable[[int, bool], dict[str, Any]]
    findings: Callable[[dict[str, Any]], list[Finding]]
    render: Callable[[dict[str, Any]], str]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval of the median by the sign test: two order statistics, whatever the distribution.

    The k-th smallest and the k-th largest of n values enclose the median with probability
    1 - 2 P(Binomial(n, 1/2) < k); k is the largest with at least ``CONFIDENCE``. Exact, needs no random
    numbers, and errs on the wide side. Fewer than 6 values enclose nothing: (-inf, inf).
    """
    n, ordered = len(values), sorted(values)
    outside, k = 0.0, 0
    while k < n // 2:
        outside += 2 * comb(n, k) / 2**n
        if 1 - outside < CONFIDENCE:
            break
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else (-inf, inf)


def ratio_of(values: Sequence[float]) -> Ratio:
    """The median of ratios that are already paired."""
    return Ratio(median(values), *median_interval(values))


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Ratio:
    """``times`` over ``reference``, repetition by repetition."""
    return ratio_of([time / other for time, other in zip(times, reference, strict=True)])


def ratio_to_best(
    samples: Mapping[str, Sequence[float]], mine: str, rivals: Sequence[str], reference: str
) -> tuple[Ratio, tuple[str, str]]:
    """``mine`` over the best of ``rivals``, without the winner's curse; and who was the best.

    The smallest of several noisy medians is smaller than the best rival really is. So the best one is picked
    on the even repetitions (smallest median ratio to ``reference``) and compared on the odd ones, then the
    other way round: no ratio comes from a repetition that helped to pick. Both halves' ratios are pooled.

    Returns:
        The ratio over all repetitions; the rivals picked on the even and on the odd ones.
    """
    count = len(samples[mine])
    halves = [range(0, count, 2), range(1, count, 2)]
    picked = []
    for half in halves:
        standing = {r: median(samples[r][i] / samples[reference][i] for i in half) for r in rivals}
        picked.append(min(rivals, key=standing.__getitem__))
    ratios = [samples[mine][i] / samples[picked[1 - i % 2]][i] for i in range(count)]
    return ratio_of(ratios), (picked[0], picked[1])


def judge(
    asked: str,
    values: Mapping[str, float],
    *,
    most: float = inf,
    least: float = -inf,
    form: str = "{:.3f}",
) -> Finding:
    """The answer to one limit on every one of ``values``, by row; the worst of those beyond it are named."""
    if not values:
        return Finding(asked, "not measured", None)
    low, high = min(values.values()), max(values.values())
    found = form.format(low) if low == high else f"{form.format(low)} to {form.format(high)}"
    beyond = {row: value for row, value in values.items() if not least <= value <= most}
    if len(values) > 1:
        found += f" in {len(values)} rows"
        found += f", {len(beyond)} of them beyond: {_worst(beyond, most < inf, form)}" if beyond else ""
    return Finding(asked, found, not beyond)


def _worst(beyond: Mapping[str, float], largest: bool, form: str) -> str:
    """The worst rows with their values, and how many more there are."""
    ordered = sorted(beyond, key=beyond.__getitem__, reverse=largest)
    named = ", ".join(f"{row} {form.format(beyond[row])}" for row in ordered[:NAMED])
    return named + (f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else "")


def findings_table(findings: Iterable[Finding]) -> str:
    """``asked | found`` with the verdicts."""
    verdicts = {True: ": met", False: ": **missed**", None: ""}
    return table(("asked", "found"), [(f.asked, f.found + verdicts[f.met]) for f in findings])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def report(section: Section, result: dict[str, Any]) -> str:
    """A section's tables and answers in Markdown, without its title."""
    found = section.findings(result)
    return section.render(result) + ("\n\n" + findings_table(found) if found else "")


def machine() -> str:
    """In one line, what the measurement ran on."""
    import psutil
    import torch

    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    memory = round(psutil.virtual_memory().total / 2**30)
    return (
        f"{os.cpu_count()} cores of {name}, {memory} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__} on CPU, gloo, one thread a rank"
    )


def keep(folder: Path, name: str, repetitions: int, result: dict[str, Any]) -> None:
    """Write a section's result, with what it ran on and when, to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        "section": name,
        "date": date.today().isoformat(),
        "machine": machine(),
        "repetitions": repetitions,
        "result": result,
    }
    (folder / f"{name}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")


def kept(folder: Path, name: str) -> dict[str, Any] | None:
    """What ``keep`` wrote; None if there is nothing."""
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
