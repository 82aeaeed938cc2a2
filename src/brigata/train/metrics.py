"""What a run writes down: one JSON object a step, and where each rank's time went."""

import json
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from brigata.overlap.evidence import Evidence

PHASES = ("compute", "exposed tensor-parallel", "exposed data-parallel", "optimizer", "data")
"""Parts of a step's time, in the order in which they are shown."""

DATA_PARALLEL = ("fully_shard.", "data_parallel.")
"""Operators of which the name begins so belong to data parallelism."""


class Phases:
    """Seconds a step of one rank, by phase. On an accelerator a phase ends when its work is done."""

    def __init__(self, device: torch.device, evidence: Evidence) -> None:
        self.device, self.evidence = device, evidence
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside under ``name``."""
        start = perf_counter()
        yield
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        end = perf_counter()
        self.now[name] += end - start
        self.evidence.span("phase", name, start, end)

    def end_step(self, exposed: Mapping[str, float]) -> float:
        """Close a step, take exposed communication out of ``compute``, return the step's time (seconds)."""
        total = sum(self.now.values())
        self.now["compute"] -= sum(exposed.values())
        self.now |= exposed
        self.steps.append(dict(self.now))
        self.now.clear()
        return total

    def medians(self, warmup: int = 2) -> list[float]:
        """Median seconds a step of each of ``PHASES``; the first steps count only where there are no more."""
        counted = self.steps[warmup:] or self.steps
        return [median(step.get(phase, 0.0) for step in counted) for phase in PHASES]


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on an accelerator, resident set of the process on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsFile:
    """``metrics.jsonl``: an object a step, written at once, so that a killed run loses nothing."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, record: Mapping[str, float | int]) -> None:
        """Append one step."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No more steps."""
        self._file.close()
