"""The command that lists public models."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from brigata.describe.model import ModelSpec
from brigata.describe.parameters import count_active_parameters, count_parameters
from brigata.describe.pattern import contract_pattern, planning_only
from brigata.describe.presets import MODEL_PRESETS, preset_source


def models_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a model.")] = False,
) -> None:
    """List the public models that `model.preset` knows, with their parameters and patterns.

    Example: `brigata models`, then `brigata check job.toml --set 'model={preset="qwen3-8b"}'`
    """
    specs = {name: ModelSpec.model_validate({"preset": name}) for name in MODEL_PRESETS}
    if as_json:
        for name, spec in specs.items():
            typer.echo(json.dumps(_facts(name, spec)))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("preset")
    table.add_column("parameters", justify="right")
    table.add_column("active", justify="right")
    table.add_column("pattern", overflow="fold")
    table.add_column("runs")
    for name, spec in specs.items():
        total, active = count_parameters(spec), count_active_parameters(spec)
        runs = "yes" if planning_only(spec.pattern) is None else "planning only"
        shown = "" if active == total else billions(active)
        table.add_row(name, billions(total), shown, contract_pattern(spec.pattern), runs)
    Console().print(table, highlight=False)


def _facts(name: str, spec: ModelSpec) -> dict[str, object]:
    return {
        "name": name,
        "parameters": count_parameters(spec),
        "active_parameters": count_active_parameters(spec),
        "pattern": contract_pattern(spec.pattern),
        "runs": planning_only(spec.pattern) is None,
        "source": preset_source(name),
    }


def billions(parameters: int) -> str:
    """Three digits: ``135 M``, ``8.03 B``, ``1.03 T``."""
    if parameters >= 1e12:
        return f"{parameters / 1e12:.3g} T"
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
