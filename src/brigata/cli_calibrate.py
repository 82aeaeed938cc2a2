"""The command that measures this machine: `calibrate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from brigata.describe.errors import JobError


def calibrate_command(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cluster file to write.")] = Path(
        "cluster.toml"
    ),
    threads: Annotated[int, typer.Option(help="CPU threads a rank, as train.threads.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, under 20 seconds.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Measure this machine, and write a cluster file that predictions rest on. Takes under two minutes.

    Best while nothing else runs. A rank is a process on this machine's processor, links are loopback.

    Example: `brigata calibrate --out here.toml`, then
    `brigata simulate job.toml --set cluster.file=here.toml`
    """
    if threads < 1:
        raise JobError(f"--threads {threads} computes nothing; use 1 or more")
    if out.exists() and not (force and out.is_file()):
        raise JobError(f"--out {str(out)!r} exists already; name another file, or overwrite one with --force")
    if not out.parent.is_dir():
        raise JobError(f"the folder {str(out.parent)!r} is not there; make it first")
    from brigata.measure.calibrate import calibrate
    from brigata.measure.calibrate_report import show_calibration, write_cluster

    console = Console()
    found = calibrate(threads, quick, console)
    write_cluster(found.device, out)
    show_calibration(found, console)
    console.print(
        f"wrote {out}; now: brigata simulate job.toml --set cluster.file={out}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
