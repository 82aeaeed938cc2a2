"""Traces in the Chrome / Perfetto format: what a simulation predicts and what a run did look the same."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from brigata.simulate.result import Kind, Span

LANES: tuple[str, ...] = get_args(Kind)
"""Rows of a rank, from the top: one a kind of span."""


def write_trace(spans: Iterable[Span], path: Path, title: str) -> None:
    """Write ``spans`` to ``path``; opens in ui.perfetto.dev and chrome://tracing.

    One process a rank, one thread a kind. Messages overlap, so they are written as asynchronous events;
    times are microseconds from the first span's start.
    """
    spans = sorted(spans, key=lambda span: (span.rank, LANES.index(span.kind), span.start_s))
    origin = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, object]] = []
    for rank in sorted({span.rank for span in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for tid, lane in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}})
    for number, span in enumerate(spans):
        common = {"name": span.name, "cat": span.kind, "pid": span.rank, "tid": LANES.index(span.kind)}
        start, end = ((at - origin) * 1e6 for at in (span.start_s, span.end_s))
        if span.kind == "message":
            events.append(common | {"ph": "b", "id": number, "ts": start})
            events.append(common | {"ph": "e", "id": number, "ts": end})
        else:
            events.append(common | {"ph": "X", "ts": start, "dur": end - start})
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
    path.write_text(json.dumps(document), encoding="utf-8")
