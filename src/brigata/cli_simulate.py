"""The commands that predict: `simulate` and `devices`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from brigata.describe.device import device_names, load_device
from brigata.describe.errors import JobError
from brigata.describe.job import load_job
from brigata.describe.software import load_software, software_names
from brigata.simulate.inference import Serving, serve_times
from brigata.simulate.prediction import CONVENTION, Prediction, predict

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; may be given many times."),
]
BAR = 28
"""Width of the bars (characters)."""


def simulate_command(
    job_file: JobFile,
    overrides: Overrides = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write it there as well.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the pipeline's timeline (ui.perfetto.dev).")
    ] = None,
    anchor: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Correct it by what a run of `brigata train` took.")
    ] = None,
) -> None:
    """Predict how long a step takes, where the time goes, and whether it fits. Starts nothing.

    A job with a `[serve]` section is served instead of trained: first token, tokens, throughput, caches.

    Example: `brigata simulate jobs/llama3-405b.toml --set layout.recompute=selective`
    """
    job = load_job(job_file, overrides or [], run=False)
    if job.serve is not None:
        if trace is not None or anchor is not None:
            raise JobError("--trace and --anchor are for training steps; remove them, or the job's [serve]")
        served = serve_times(job)
        show_serving(served, Console())
        if json_file is not None:
            json_file.write_text(json.dumps(served.as_dict(), indent=2) + "\n", encoding="utf-8")
        return
    found = predict(job, anchor)
    show_prediction(found, Console())
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")
    if trace is not None:
        from brigata.simulate.timeline import pipeline_spans
        from brigata.simulate.trace import write_trace

        write_trace(pipeline_spans(found.iteration), trace, found.job.name)


def show_prediction(found: Prediction, console: Console) -> None:
    """Time, speed, breakdown and memory, within 100 columns."""
    job, facts = found.job, found.as_dict()
    layout = job.layout
    degrees = " x ".join(
        f"{name} {value}"
        for name, value in (
            ("tp", layout.tp),
            ("cp", layout.cp),
            ("pp", layout.pp),
            ("dp", job.dp),
            ("ep", layout.ep),
        )
        if value > 1 or name in ("tp", "dp")
    )
    head = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    head.add_row(
        "job", f"{job.name}: {job.ranks:,} x {job.cluster.preset}, {degrees}, {job.cluster.software}"
    )
    head.add_row(
        "step",
        f"{seconds(found.seconds)} "
        f"({seconds(facts['low_s'])} to {seconds(facts['high_s'])}: four runs of five)",
    )
    head.add_row(
        "speed", f"{facts['tokens_per_s']:,.0f} tokens/s, {facts['tokens_per_s_per_device']:,.0f} a device"
    )
    head.add_row(
        "operations",
        f"{facts['model_tflops_per_device']:,.4g} Tflop/s a device, MFU {found.mfu:.1%}, HFU {found.hfu:.1%}",
    )
    head.add_row("rests on", f"{found.tier}")
    if found.energy_j is not None:
        head.add_row("energy", f"about {found.energy_j / 3.6e6:,.3g} kWh a step (not validated)")
    console.print(head, highlight=False)
    console.print("\n[bold]Where the time goes[/bold] (pipeline rank that ends last)", highlight=False)
    console.print(_bars(facts["breakdown_s"], found.seconds, seconds), highlight=False)
    use, capacity = found.memory[found.fullest], facts["memory_bytes"]["capacity"]
    place = f"pipeline rank {found.fullest}, at {use.moment}" if layout.pp > 1 else f"at {use.moment}"
    console.print(f"\n[bold]Memory of a device[/bold] ({place})", highlight=False)
    console.print(_bars(use.by_kind, capacity, gigabytes), highlight=False)
    verdict = "fits" if facts["fits"] else "does not fit"
    style = "green" if facts["fits"] else "red"
    console.print(
        f"[{style}]{verdict}[/{style}]: {gigabytes(use.total)} of {gigabytes(capacity)}; "
        f"too little with probability {facts['oom_probability']:.0%}",
        highlight=False,
    )
    console.print(f"MFU counts {CONVENTION}.", style="dim", highlight=False, soft_wrap=False)


def show_serving(served: Serving, console: Console) -> None:
    """First token, tokens, throughput, where the time goes, and how many sequences fit."""
    job, spec = served.job, served.spec
    head = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    devices = job.layout.tp * job.layout.pp
    replicas = f"{job.dp} x tp {job.layout.tp} x pp {job.layout.pp}"
    head.add_row("job", f"{job.name}: {replicas} on {job.cluster.preset}, {job.cluster.software}")
    head.add_row(
        "requests", f"{spec.prompt:,} tokens in, {spec.output:,} out, {spec.batch} at a time, {spec.mode}"
    )
    head.add_row("first token", seconds(served.ttft_s))
    head.add_row("each token", f"{seconds(served.tpot_s)}, a request {seconds(served.latency_s)}")
    each = served.tokens_per_s / job.dp / devices
    head.add_row("speed", f"{served.tokens_per_s:,.0f} tokens/s, {each:,.0f} a device")
    room = gigabytes(max(served.memory_bytes - served.parameter_bytes, 0.0))
    head.add_row(
        "memory",
        f"{gigabytes(served.parameter_bytes)} of parameters, {room} for caches of "
        f"{gigabytes(served.sequence_bytes)}",
    )
    head.add_row("capacity", f"{served.capacity:,} sequences")
    console.print(head, highlight=False)
    for name, step in (("A prefill", served.prefill), ("A decoding step", served.decode)):
        console.print(f"\n[bold]{name}[/bold]: {seconds(step.seconds)}", highlight=False)
        console.print(_bars(step.breakdown, step.seconds, seconds), highlight=False)
    style, verdict = ("green", "fits") if served.fits else ("red", "does not fit")
    console.print(
        f"[{style}]{verdict}[/{style}]: {spec.batch} of {served.capacity:,} sequences", highlight=False
    )


def _bars(parts: dict[str, float], whole: float, unit: Callable[[float], str]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for kind, value in sorted(parts.items(), key=lambda item: -item[1]):
        if value > 0.0005 * whole:
            filled = round(BAR * min(value / whole, 1.0) * 8)
            bar = "█" * (filled // 8) + ("▏▎▍▌▋▊▉"[filled % 8 - 1] if filled % 8 else "")
            table.add_row(f"  {kind}", unit(value), f"{value / whole:.1%}", f"[cyan]{bar}[/cyan]")
    return table


def seconds(value: float) -> str:
    """Three digits with a fitting unit."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def gigabytes(value: float) -> str:
    """In GB (1e9 bytes)."""
    return f"{value / 1e9:.1f} GB"


def devices_command() -> None:
    """List the devices and the generations of software that `cluster` knows.

    Example: `brigata devices`, then `brigata simulate job.toml --set cluster.preset=h100-sxm5-80gb`
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column, right in (
        ("preset", False),
        ("bf16 Tflop/s", True),
        ("memory GB", True),
        ("GB/s", True),
        ("link GB/s", True),
        ("network GB/s", True),
        ("curves", False),
    ):
        table.add_column(column, justify="right" if right else "left")
    for name in device_names():
        spec = load_device(name)
        table.add_row(
            name,
            f"{spec.peak('bf16') / 1e12:g}",
            f"{spec.memory_gb:.0f}",
            f"{spec.memory_gbs:g}",
            f"{spec.link_gbs:g}",
            f"{spec.network_gbs:g}",
            "fitted" if spec.fitted else "defaults",
        )
    console = Console()
    console.print(table, highlight=False)
    console.print()
    for name in software_names():
        console.print(f"  {name:16s} {load_software(name).title}", highlight=False)
