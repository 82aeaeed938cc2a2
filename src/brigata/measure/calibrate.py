"""``brigata calibrate``: measures this machine's processors and loopback, and describes them as a device."""

import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from socket import socket
from typing import Any, TypeVar

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from brigata.cost.kernels import Attention, Product, Scan
from brigata.describe.device import (
    AttentionCurve,
    CollectiveCurve,
    DeviceSpec,
    ProductCurve,
    ScanCurve,
    StreamCurve,
)
from brigata.measure import calibrate_fit as fitting
from brigata.measure import calibrate_kernels as kernels
from brigata.measure.calibrate_kernels import Case
from brigata.measure.namespaces import loopback_hosts, run_ranks

K = TypeVar("K")
REPETITIONS, QUICK_REPETITIONS = 11, 5
GROUP_S, QUICK_GROUP_S = 6.0, 0.8
"""Seconds after which a group of cases is not repeated any more."""
STEPS = 10
"""Of the progress bar."""
RANGE = (0.5, 1.05)
"""Between which the speed of two busy ranks, over that of one, is believed."""

BUSY, BUSY_S = 0.1, 0.3
"""Share of the processor that others may take before it is told, and how long that is looked at (seconds)."""


@dataclass
class Calibration:
    """What was found.

    Attributes:
        device: this machine, a rank as a device.
        fits: of its curves.
        products: precision -> the products that were timed, with their seconds.
        busy: share of the processor that others took when this began.
    """

    device: DeviceSpec
    fits: list[fitting.Fit] = field(default_factory=list)
    products: dict[str, list[tuple[Product, float]]] = field(default_factory=dict)

    busy: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether others took more than ``BUSY``: times and latencies are then too long."""
        return self.busy > BUSY

    @property
    def measurements(self) -> int:
        """Medians that the curves were fitted on."""
        return sum(len(found.measured) for found in self.fits)


def calibrate(threads: int = 1, quick: bool = False, console: Console | None = None) -> Calibration:
    """Measure this machine and fit its curves, with ``threads`` threads a rank.

    ``quick``: fewer and smaller cases, under 20 s. ``console``: shows a progress bar; None: silent.
    """
    busy = psutil.cpu_percent(BUSY_S) / 100
    columns = (
        TextColumn("calibrating"),
        BarColumn(30),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=console is None) as progress:
        task = progress.add_task("", total=STEPS)

        def begin(what: str) -> None:
            progress.update(task, description=what, completed=step.pop(0))

        step = list(range(STEPS))
        with _threads(threads), torch.no_grad():
            found = _local(quick, begin)
        begin("messages between two ranks")
        _network(found, threads, quick)
    fitted = f"{found.measurements} measurements of this machine"
    found.device = found.device.model_copy(update={"fitted": fitted})
    found.busy = busy
    return found


def _local(quick: bool, begin: Callable[[str], None]) -> Calibration:
    """Everything that one rank tells; links are still placeholders."""
    begin("memory")
    cases = kernels.memory_cases(quick)
    times = _time(cases, quick)
    bandwidth = max(case.kernels[0].bytes / seconds for case, seconds in zip(cases, times, strict=True))
    found = Calibration(_blank(bandwidth / 1e9))
    for precision in kernels.DTYPES:
        begin(f"{precision} products")
        _products(found, precision, quick)
    begin("elementwise work")
    with torch.enable_grad():
        cases, times = _timed(kernels.stream_cases(quick), quick)
    stream = fitting.fit_stream(found.device, [case.kernels for case in cases], times)
    _add(found, stream, "stream", StreamCurve)
    begin("attention")
    with torch.enable_grad():
        cases, times = _timed(kernels.attention_cases(quick), quick)
    _add(
        found,
        fitting.fit_attention(found.device, _only(cases, Attention), times),
        "attention",
        AttentionCurve,
    )
    begin("Mamba-2's scan")
    with torch.enable_grad():
        cases, times = _timed(kernels.scan_cases(quick), quick)
    _add(found, fitting.fit_scan(found.device, _only(cases, Scan), times), "scan", ScanCurve)
    begin("experts")
    cases, times = _timed(kernels.grouped_cases(quick), quick)
    grouped = fitting.fit_grouped(found.device, [case.kernels for case in cases], times)
    found.fits.append(grouped)
    curve = ProductCurve(**grouped.parameters)
    found.device = fitting.with_curves(found.device, {"grouped": {"fp32": curve}})
    return found


def _blank(memory_gbs: float) -> DeviceSpec:
    """What is known before products and links are measured."""
    return DeviceSpec(
        vendor=_processor(),
        peak_tflops={},
        memory_gb=_round(psutil.virtual_memory().total / 1e9),
        memory_gbs=_round(memory_gbs),
        processors=1,
        node_devices=64,
        domain_devices=64,
        link_gbs=1.0,
        topology="bus",
        network_gbs=1.0,
        host_gbs=_round(memory_gbs),
        source=f"measured by brigata calibrate on {date.today().isoformat()}",
        note="a rank is a process on this machine, links are loopback",
    )


def _products(found: Calibration, precision: str, quick: bool) -> None:
    """The peak of one precision, the best rate there was, and its curve."""
    cases, times = _timed(kernels.product_cases(precision, quick), quick)
    products = _only(cases, Product)
    best = max(k.flops / seconds for k, seconds in zip(products, times, strict=True))
    peaks = found.device.peak_tflops | {precision: _round(best / 1e12)}
    found.device = found.device.model_copy(update={"peak_tflops": peaks})
    fitted = fitting.fit_products(found.device, precision, products, times)
    found.fits.append(fitted)
    found.products[precision] = list(zip(products, times, strict=True))
    curves = found.device.curves.product | {precision: ProductCurve(**fitted.parameters)}
    found.device = fitting.with_curves(found.device, {"product": curves})


def _network(found: Calibration, threads: int, quick: bool) -> None:
    """Links, collectives, and how fast two ranks compute beside each other."""
    request = {"threads": threads, "repetitions": QUICK_REPETITIONS if quick else REPETITIONS}
    argv = [sys.executable, "-m", "brigata.measure.calibrate_rank", json.dumps(request)]
    output = run_ranks(loopback_hosts(2), argv, timeout_s=120.0, port=_free_port())[0]
    measured: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    sizes, seconds = measured["sizes"], measured["seconds"]
    link = max(size / s for size, s in zip(sizes, seconds["send"], strict=True)) / 1e9
    update = {"link_gbs": _round(link), "network_gbs": _round(link)}
    found.device = found.device.model_copy(update=update)
    collective = {}
    for operation, times in seconds.items():
        fitted = fitting.fit_collective(found.device, operation, sizes, times)
        found.fits.append(fitted)
        collective[operation] = CollectiveCurve(**fitted.parameters)
    curves = {
        "collective": collective,
        "network_share": collective["send"].share,
        "network_us": collective["send"].base_us,
        "sustained": _round(min(max(measured["together"], RANGE[0]), RANGE[1])),
    }
    found.device = fitting.with_curves(found.device, curves)


def _timed(cases: Iterator[Case], quick: bool) -> tuple[list[Case], list[float]]:
    built = list(cases)
    return built, _time(built, quick)


def _time(cases: Sequence[Case], quick: bool) -> list[float]:
    limits = (QUICK_REPETITIONS, QUICK_GROUP_S) if quick else (REPETITIONS, GROUP_S)
    return kernels.time_cases(cases, *limits)


def _add(found: Calibration, fitted: fitting.Fit, curve: str, kind: Callable[..., Any]) -> None:
    found.fits.append(fitted)
    found.device = fitting.with_curves(found.device, {curve: kind(**fitted.parameters)})


def _only(cases: Sequence[Case], kind: type[K]) -> list[K]:
    """The one kernel of each case."""
    result: list[K] = []
    for case in cases:
        (kernel,) = case.kernels
        assert isinstance(kernel, kind)
        result.append(kernel)
    return result


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _processor() -> str:
    """The processor's name; nothing that tells one machine from another of its kind."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def _round(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")
