"""Time and memory of a step, ours beside others': in turns in one process, peaks in fresh processes."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from figures import Ratio

HOPELESS = 6
"""Times our first step, beyond which a side is not run again: that step is its only sample."""


def take_turns(steps: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Milliseconds of every step, the first of each side left out; each side goes first every other time.

    ``steps``: ours first. A first step of another that takes ``HOPELESS`` times ours is its only sample.
    """
    samples: dict[str, list[float]] = {}
    for side, step in steps.items():
        start = perf_counter()
        step()
        samples[side] = [(perf_counter() - start) * 1e3]
    ours = next(iter(steps))
    again = [side for side in steps if samples[side][0] < HOPELESS * samples[ours][0]]
    samples |= {side: [] for side in again}
    for repetition in range(repetitions):
        for side in again[:: 1 if repetition % 2 else -1]:
            start = perf_counter()
            steps[side]()
            samples[side].append((perf_counter() - start) * 1e3)
    return samples


def peak_mib(build: Callable[[], Callable[[], Any]]) -> float:
    """Peak of the resident set in the first step above what was held before (MiB); for a fresh process."""
    import torch

    torch.ones(64, 64) @ torch.ones(64, 64)  # libraries that are loaded with the first product
    step = build()
    before = _status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here
    step()
    return _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def child(script: str, *arguments: str) -> Any:
    """What ``script`` prints as JSON when a fresh process runs it with ``arguments``."""
    command = [sys.executable, str(Path(script).resolve()), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def interval(ratio: Ratio) -> list[float | None]:
    """A ratio's ends for JSON; None where there were too few repetitions."""
    return [ratio.low, ratio.high] if ratio.high < inf else [None, None]


def with_interval(kept: Sequence[float | None]) -> str:
    """A kept ratio, [median, low, high], in words."""
    middle, low, high = kept
    return f"{middle:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")
