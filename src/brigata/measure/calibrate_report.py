"""What ``brigata calibrate`` leaves behind: the cluster file, and a table of what was found."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from brigata.describe.device import DeviceSpec
from brigata.measure.calibrate import Calibration

HEAD = """\
# This machine as a device, a rank being a process on it. Use it in a job: [cluster] file = "{name}"
# What the keys mean: brigata.describe.device.DeviceSpec.
"""
UNITS = {"launch_us": "µs", "base_us": "µs", "half_mb": "MB", "ramp": "keys", "processor_tflops": "Tflop/s"}
"""Of the parameters that are shown; others are shares."""
HIDDEN = {"hop_us"}
"""Parameters that are not shown: they were not measured."""


def write_cluster(device: DeviceSpec, path: Path) -> None:
    """Write ``device`` as ``cluster.file`` reads it."""
    values = device.model_dump(exclude_none=True)
    path.write_text(HEAD.format(name=path.name) + "\n".join(_lines(values)) + "\n", encoding="utf-8")


def _lines(values: dict[str, Any], table: str = "") -> Iterator[str]:
    """TOML: a table's own keys, then the tables in it."""
    own = {key: value for key, value in values.items() if not isinstance(value, dict)}
    if table and own:
        yield f"\n[{table}]"
    for key, value in own.items():
        yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{table}.{key}" if table else key)


def show_calibration(found: Calibration, console: Console) -> None:
    """The machine's rates, then each curve with its error, within 100 columns."""
    device = found.device
    head = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    peaks = ", ".join(f"{name} {peak * 1e3:.3g}" for name, peak in device.peak_tflops.items())
    head.add_row("processor", device.vendor[:80])
    head.add_row("products", f"{peaks} Gflop/s a rank at best")
    head.add_row("memory", f"{device.memory_gb:.1f} GB, {device.memory_gbs:.3g} GB/s")
    head.add_row("loopback", f"{device.link_gbs:.3g} GB/s, {device.curves.network_us:.0f} µs a message")
    head.add_row("two ranks", f"each computes at {device.curves.sustained:.0%} of the speed of one alone")
    console.print(head, highlight=False)
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("curve", no_wrap=True)
    table.add_column("cases", justify="right")
    table.add_column("error", justify="right")
    table.add_column("found")
    for fit in found.fits:
        shown = (_parameter(key, value) for key, value in fit.parameters.items() if key not in HIDDEN)
        table.add_row(fit.name, str(len(fit.measured)), f"{fit.error:.0%}", ", ".join(shown))
    console.print(table, highlight=False)
    if found.disturbed:
        console.print(
            f"Other work took {found.busy:.0%} of the processor: calibrate again when nothing else runs.",
            style="yellow",
            highlight=False,
        )
    console.print("error: median of |predicted / measured - 1|", style="dim", highlight=False)


def _parameter(key: str, value: float) -> str:
    unit = UNITS.get(key)
    name = key.removesuffix("_us").removesuffix("_mb").removesuffix("_tflops")
    return f"{name} {value:.3g} {unit}" if unit else f"{name} {value:.3g}"
