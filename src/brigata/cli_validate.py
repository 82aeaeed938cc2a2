"""The command that compares predictions with published measurements."""

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from brigata.describe.software import load_software
from brigata.validate.outcome import Outcomes, predict_rows
from brigata.validate.statistics import (
    KEYS,
    as_dict,
    errors_of,
    grouped,
    memory_errors,
    orderings,
    served_groups,
)
from brigata.validate.tables import NEEDED, read_rows

COLUMNS = (
    *(
        "id",
        "source_key",
        "framework",
        "model",
        "stack_date",
        "arch",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
    ),
    *("ffn", "vocab", "seq_len", "experts", "topk", "gpu", "hw_key", "gpus", "gpus_per_node", "interconnect"),
    *(
        "tp",
        "pp",
        "cp",
        "dp",
        "ep",
        "etp",
        "vpp",
        "micro_batch",
        "global_batch",
        "grad_accum",
        "seq_parallel",
    ),
    *("recompute", "sharding", "precision", "pp_schedule", "iter_time_s", "iter_time_derived_s"),
    *("tokens_per_s_per_gpu", "peak_mem_gb", "mem_kind", "status", "notes", "verification"),
)
"""What is read of a table; the first are needed, a row lacks what it lacks."""


def validate_command(
    tables: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[CSV]...", help="Tables. Default: the one that comes along."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all of it there.")
    ] = None,
    refused: Annotated[
        bool, typer.Option(help="List every row that is not predicted, with the reason.")
    ] = False,
    columns: Annotated[bool, typer.Option(help="Print the columns that are read, and stop.")] = False,
) -> None:
    """Predict every row of tables of published measurements, and show how far off the predictions are.

    Example: `brigata validate my-runs.csv --json errors.json`
    """
    if columns:
        typer.echo("\n".join(f"{name}{'  (needed)' if name in NEEDED else ''}" for name in COLUMNS))
        return
    console = Console()
    if tables:
        rows = list(read_rows(tables))
    else:
        with resources.as_file(resources.files("brigata.validate") / "published.csv") as path:
            rows = list(read_rows([path]))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("predicting", total=len(rows))
        outcomes = predict_rows(rows, lambda: progress.advance(task))
    show_outcomes(outcomes, console, refused)
    if json_file is not None:
        json_file.write_text(json.dumps(as_dict(outcomes), indent=1) + "\n", encoding="utf-8")


def show_outcomes(outcomes: Outcomes, console: Console, refused: bool) -> None:
    """Errors by source, device, software, kind and precision; order, memory, parameters, refusals."""
    for name, key in KEYS.items():
        table = Table(title=f"Step time by {name}", title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in (name, "rows", "mean", "median", "90 %", "bias"):
            table.add_column(column, justify="left" if column == name else "right")
        for group, rows in grouped(outcomes.timed, key).items():
            found = errors_of(rows)
            sizes = (f"{value:.1%}" for value in (found.mape, found.median_ape, found.p90_ape))
            table.add_row(group, str(found.rows), *sizes, f"{found.bias:+.1%}")
        console.print(table, highlight=False)
        console.print()
    by_source = [errors_of(rows) for rows in grouped(outcomes.timed, KEYS["source"]).values()]
    if by_source:
        medians = sum(found.median_ape for found in by_source) / len(by_source)
        bias = sum(found.bias for found in by_source) / len(by_source)
        console.print(
            f"averaged over {len(by_source)} sources: median {medians:.1%}, bias {bias:+.1%}", highlight=False
        )
    _show_order(outcomes, console)
    _show_memory(outcomes, console)
    _show_served(outcomes, console)
    _show_parameters(outcomes, console)
    reasons = Counter(reason for _, reason in outcomes.refused)
    console.print(
        f"\n{len(outcomes.predicted)} rows predicted, {len(outcomes.refused)} refused"
        + (":" if reasons else ""),
        highlight=False,
    )
    if refused:
        for row, reason in outcomes.refused:
            console.print(f"  {row.id}: {reason}", highlight=False, markup=False)
    else:
        for reason, count in reasons.most_common():
            console.print(f"  {count:4d}  {reason}", highlight=False, markup=False)


def _show_order(outcomes: Outcomes, console: Console) -> None:
    found = orderings(outcomes.timed)
    if not found:
        return
    correlation = sum(o.spearman for o in found) / len(found)
    regret = sum(o.regret for o in found) / len(found)
    console.print(
        f"order of layouts, {len(found)} groups: Spearman {correlation:.3f}, "
        f"the one predicted fastest is {regret:.1%} slower than the fastest",
        highlight=False,
    )


def _show_memory(outcomes: Outcomes, console: Console) -> None:
    memory = memory_errors(outcomes)
    failed, seen = memory.out_of_memory
    if memory.rows or failed:
        console.print(
            f"memory, {memory.rows} rows: mean {memory.mape:.1%}, bias {memory.bias:+.1%}; out of memory: "
            f"{seen} of {failed} predicted; of {memory.ran} that ran, {memory.refused_though_ran} "
            "predicted not to",
            highlight=False,
        )


def _show_served(outcomes: Outcomes, console: Console) -> None:
    if not outcomes.served:
        return
    table = Table(title="\nInference", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("software, figure, device", "figures", "mean", "median", "90 %", "bias"):
        table.add_column(column, justify="left" if "," in column else "right")
    for group, rows in served_groups(outcomes).items():
        found = errors_of(rows)
        sizes = (f"{value:.1%}" for value in (found.mape, found.median_ape, found.p90_ape))
        table.add_row(group, str(found.rows), *sizes, f"{found.bias:+.1%}")
    console.print(table, highlight=False)


def _show_parameters(outcomes: Outcomes, console: Console) -> None:
    console.print("\nfitted parameters of the software:", highlight=False)
    for name in grouped(outcomes.timed, KEYS["software"]):
        spec = load_software(name)
        shown = ", ".join(f"{key} {getattr(spec, key):.3g}" for key in spec.free)
        console.print(f"  {name:15s} {shown or 'none'}", highlight=False)
