"""The commands: one thin function each. Heavy imports happen inside, so that help and checks are instant."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from brigata.cli_calibrate import calibrate_command
from brigata.cli_convert import convert_app, generate_command
from brigata.cli_models import models_command
from brigata.cli_simulate import devices_command, simulate_command
from brigata.cli_validate import validate_command
from brigata.describe.errors import JobError
from brigata.describe.job import Job, load_job
from brigata.describe.parameters import count_active_parameters, count_parameters
from brigata.describe.template import job_schema, job_template

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Plans, simulates and runs hybrid-parallel training of language models so that no device waits for "
    "the network. One job file serves every command.\n\nBegin with `brigata init job.toml`, then "
    "`brigata train job.toml`.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(bench_app, name="bench")
app.add_typer(convert_app, name="convert")
app.command("generate")(generate_command)
app.command("models")(models_command)
app.command("simulate")(simulate_command)
app.command("devices")(devices_command)
app.command("calibrate")(calibrate_command)
app.command("validate")(validate_command)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; may be given many times."),
]


@app.command()
def init(path: Annotated[Path, typer.Argument(metavar="JOB.toml")] = Path("job.toml")) -> None:
    """Write a commented job and, beside it, the schema by which editors complete and check it.

    Example: `brigata init my-model.toml`
    """
    schema = path.with_name("job.schema.json")
    if path.exists():
        raise JobError(f"{str(path)!r} exists already; name another file")
    if not path.parent.is_dir():
        raise JobError(f"the folder {str(path.parent)!r} is not there; make it first")
    path.write_text(job_template(_name_from(path), schema.name), encoding="utf-8")
    schema.write_text(job_schema(), encoding="utf-8")
    Console().print(f"wrote {path} and {schema}; now: brigata train {path}", highlight=False, soft_wrap=True)


@app.command()
def check(job_file: JobFile, overrides: Overrides = None) -> None:
    """Print what a job comes to, or every reason why it cannot run. Starts nothing.

    Example: `brigata check job.toml --set layout.tp=4`
    """
    job = load_job(job_file, overrides or [])
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _facts(job).items():
        table.add_row(name, value)
    Console().print(table, highlight=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of job files.

    Example: `brigata schema > job.schema.json`
    """
    typer.echo(job_schema(), nl=False)


@app.command()
def train(
    job_file: JobFile,
    overrides: Overrides = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the run. Default: runs/NAME-TIME.")
    ] = None,
    predict: Annotated[
        bool, typer.Option(help="Afterwards show what was predicted of the step, beside what was measured.")
    ] = False,
) -> None:
    """Train a job's model on local ranks, or as one rank of the world that torchrun or Slurm made.

    Leaves metrics.jsonl, summary.json and report.html in the run's folder. Predictions rest on the file that
    `brigata calibrate` wrote and `cluster.file` names, else on an order of magnitude.

    Example: `brigata train jobs/demo.toml --set layout.tp=1 --set layout.dp=2`
    """
    job = load_job(job_file, overrides or [])
    from brigata.train.launch import RankError, launch

    try:
        folder = launch(job, out)
    except RankError as failure:
        _fail(str(failure), 1)
    except KeyboardInterrupt:
        _fail("stopped by the user; every rank was ended", 130)
    if predict and os.environ.get("RANK", "0") == "0":
        from brigata.measure.predicted import compare_run

        Console().print(compare_run(job, folder), highlight=False)


@bench_app.command("overlap")
def bench_overlap_command(
    ranks: Annotated[int, typer.Option(help="Local ranks.")] = 2,
    op: Annotated[
        str, typer.Option(help="all_gather_linear or linear_reduce_scatter.")
    ] = "linear_reduce_scatter",
    direction: Annotated[str, typer.Option("--pass", help="forward or backward.")] = "forward",
    tokens: Annotated[int, typer.Option(help="Tokens over all ranks.")] = 2048,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 1024,
    ffn: Annotated[int, typer.Option(help="Inner width held by each rank.")] = 4096,
    orders: Annotated[str, typer.Option(help="Orders, separated by commas.")] = (
        "blocking,blocking_p2p,sliced:4,ring,direct"
    ),
    repetitions: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 15,
    rate: Annotated[
        str | None, typer.Option(help="Link rate, for instance 1gbit (Linux, root). Default: loopback.")
    ] = None,
    emulate: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Emulate devices: a chunk's product is a wait of MS milliseconds."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result there too.")] = None,
) -> None:
    """Time an overlapped operator in several orders, interleaved, beside what the machine could do at best.

    Example: `brigata bench overlap --op all_gather_linear --pass backward --rate 1gbit`
    """
    from brigata.measure.overlap_bench import bench_overlap, show_overlap
    from brigata.measure.overlap_cases import Shape

    shape = Shape(op, direction, tokens, hidden, ffn)
    result = bench_overlap(shape, ranks, orders.split(","), repetitions, rate, emulate)
    show_overlap(result, Console())
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _facts(job: Job) -> dict[str, str]:
    layout, replicas = f"tp {job.layout.tp} x dp {job.dp}", job.layout.dp_replicate
    if replicas > 1:
        layout += f": {replicas} replicas of {job.dp // replicas}"
    parameters, active = count_parameters(job.model), count_active_parameters(job.model)
    routed = "" if active == parameters else f", of which a token meets {active:,}"
    return {
        "job": job.name,
        "ranks": f"{job.ranks} ({layout})",
        "parameters": f"{parameters:,}{routed}",
        "a rank holds": f"about {parameters // job.layout.tp:,} of them while it computes",
        "tokens a step": f"{job.tokens_per_step:,} ({job.accumulation} x {job.micro_batch} sequences a rank)",
        "training": f"{job.train.steps} steps, {job.train.steps * job.tokens_per_step:,} tokens",
        "precision": job.train.precision,
        "overlap": job.layout.overlap if job.layout.tp > 1 else "none: one tp rank",
    }


def _name_from(path: Path) -> str:
    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in path.stem)
    return name if name[:1].isalnum() else "job"


def _fail(message: str, code: int) -> None:
    Console(stderr=True).print(message, style="red", highlight=False, soft_wrap=True, markup=False)
    raise SystemExit(code)


def main() -> None:
    """Run the command line: exit code 2 for a job or call that is refused, 1 for a rank that failed."""
    try:
        app()
    except JobError as error:
        _fail("\n".join(error.refusals), 2)


if __name__ == "__main__":
    sys.exit(main())
