"""The page a run leaves behind: one HTML file that needs no network."""

import json
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from brigata.describe.errors import JobError
from brigata.train.figures import line_figure, loss_figure, time_figure

STYLE = """
:root { --ink: #1c2330; --muted: #667085; --rule: #e6e9ef; --page: #f6f7f9; --accent: #2f6fdf; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 Inter, "Segoe UI", system-ui, -apple-system, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 36px 28px 56px; }
h1 { margin: 0; font-size: 30px; font-weight: 650; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { margin: 0 0 2px; font-size: 16px; font-weight: 620; }
p { margin: 0; color: var(--muted); }
.lead { margin: 6px 0 24px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin-bottom: 16px; }
.card, section { background: #fff; border: 1px solid var(--rule); border-radius: 10px; }
.card { padding: 14px 18px 13px; }
.card .label, .card .note { color: var(--muted); font-size: 13px; }
.card .value { margin: 2px 0 1px; font-size: 25px; font-weight: 640; letter-spacing: -0.015em;
  font-variant-numeric: tabular-nums; }
.card .unit { margin-left: 5px; font-size: 14px; font-weight: 450; letter-spacing: 0; color: var(--muted); }
section { padding: 18px 22px 16px; margin-bottom: 16px; min-width: 0; }
section > p { font-size: 13px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
.text { display: grid; grid-template-columns: minmax(0, 1fr) 330px; gap: 16px; }
pre { margin: 12px 0 2px; padding: 14px 16px; background: #f8f9fb; border: 1px solid var(--rule);
  border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 460px; overflow-y: auto;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
table { width: 100%; margin-top: 8px; border-collapse: collapse; font-size: 14px; }
th, td { padding: 7px 0; border-bottom: 1px solid var(--rule); text-align: left; font-weight: 400; }
tr:last-child > * { border-bottom: 0; }
th { color: var(--muted); }
td { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
@media (max-width: 860px) {
  .cards { grid-template-columns: 1fr 1fr; }
  .pair, .text { grid-template-columns: 1fr; }
}
"""

# The policy makes "needs no network" a promise that the browser keeps.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{name} · Brigata</title>
<style>{style}</style>
<script>{plotly}</script>
</head>
<body>
<main>
<h1>{name}</h1>
<p class="lead">{lead}</p>
<div class="cards">{cards}</div>
<section><h2>Loss</h2><p>Cross-entropy, nats a {token}</p>{loss}</section>
<section><h2>Where a step's time went</h2><p>Each rank's median, milliseconds; communication counts only where
nothing was computed meanwhile</p>{time}</section>
<div class="pair">
<section><h2>Gradient norm</h2><p>Before clipping, over all parameters</p>{grad_norm}</section>
<section><h2>Learning rate</h2><p>Warmup, then cosine</p>{lr}</section>
</div>
<div class="text">
<section><h2>What the model writes</h2><p>Sampled after the last step</p><pre>{sample}</pre></section>
<section><h2>Layout</h2><p>How the job was spread out</p><table>{layout}</table></section>
</div>
</main>
</body>
</html>
"""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` from a finished run's ``metrics.jsonl`` and ``summary.json``; return its path.

    Raises:
        JobError: the folder is not that of a finished run.
    """
    steps, summary = _read_run(run_dir)
    loss = loss_figure(steps, summary.get("held_out_loss"), summary.get("trigram_loss"))
    page = PAGE.format(
        policy=POLICY,
        style=STYLE,
        plotly=get_plotlyjs(),
        name=escape(str(summary["name"])),
        lead=_lead(steps, summary),
        token=escape(str(summary.get("token", "byte"))),
        cards="".join(_card(*card) for card in _key_figures(steps, summary)),
        loss=loss,
        time=time_figure(summary["time_per_rank_s"]),
        grad_norm=line_figure(steps, "grad_norm"),
        lr=line_figure(steps, "lr"),
        sample=escape(summary["sample"] or "") or "(no sample was asked for)",
        layout="".join(_row(key, value) for key, value in summary["layout"].items()),
    )
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def _read_run(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The steps, at least one, and the summary."""
    wanted = "name the folder of a finished run"
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [json.loads(line) for line in lines if line.strip()]
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
        raise JobError(f"run folder {str(run_dir)!r} cannot be read: {reason}; {wanted}") from None
    except ValueError as error:
        raise JobError(f"run folder {str(run_dir)!r} is damaged: {error}; {wanted}") from None
    if not steps:
        raise JobError(f"run folder {str(run_dir)!r} holds no step in metrics.jsonl; {wanted}")
    return steps, summary


def _lead(steps: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    ranks = summary["world_size"]
    parts = [
        f"{_short(summary['parameters'])} parameters on {ranks} {'rank' if ranks == 1 else 'ranks'}",
        f"{len(steps):,} steps, {_short(sum(step['tokens'] for step in steps))} tokens",
        str(summary["corpus"]),
    ]
    return escape(" · ".join(parts))


def _key_figures(steps: list[dict[str, Any]], summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Label, value, unit and note of each card."""
    step_s = summary["median_step_time_s"]
    exposed_s = median(step["exposed_comm_s"] for step in steps)
    peak = max(step["peak_memory_bytes"] or 0 for step in steps)
    return [
        ("Held-out loss", _loss(summary["held_out_loss"]), "nats", _against_trigram(summary)),
        (
            "Training loss",
            _loss(summary["final_loss"]),
            "nats",
            f"{_loss(steps[0]['loss'])} at the first step",
        ),
        ("Throughput", _short(summary["tokens_per_s"]), "tokens/s", "all ranks together"),
        ("Step", f"{1e3 * step_s:,.1f}", "ms", "median"),
        (
            "Exposed communication",
            f"{100 * exposed_s / step_s:.1f}",
            "% of a step",
            f"{1e3 * exposed_s:,.1f} ms",
        ),
        ("Overlapped calls", f"{summary['overlapped_calls']:,}", "", "computed while messages travelled"),
        ("Peak memory", f"{peak / 2**20:,.0f}" if peak else "–", "MiB", "the largest rank"),
        ("Parameters", _short(summary["parameters"]), "", f"{summary['parameters']:,} exactly"),
    ]


def _against_trigram(summary: dict[str, Any]) -> str:
    held_out, trigram = summary["held_out_loss"], summary["trigram_loss"]
    if held_out is None:
        return "not scored"
    if trigram is None:
        return f"a {summary.get('token', 'byte')}"
    return f"{abs(trigram - held_out):.2f} {'below' if held_out < trigram else 'above'} a trigram table"


def _card(label: str, value: str, unit: str, note: str) -> str:
    return (
        f'<div class="card"><div class="label">{escape(label)}</div><div class="value">{escape(value)}'
        f'<span class="unit">{escape(unit)}</span></div><div class="note">{escape(note)}</div></div>'
    )


def _row(key: str, value: object) -> str:
    shown = ("no", "yes")[value] if isinstance(value, bool) else "–" if value is None else str(value)
    return f"<tr><th>{escape(str(key))}</th><td>{escape(shown)}</td></tr>"


def _loss(nats: float | None) -> str:
    return "–" if nats is None else f"{nats:.3f}"


def _short(number: float) -> str:
    """Three digits and a suffix: ``12.3 M``."""
    for size, suffix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}" if number / size < 999.5 else f"{number / size:.0f}{suffix}"
    return f"{number:.3g}"
