"""Overlap on 4 and 8 emulated devices: a chunk's product takes 20 ms, a chunk's message 0.8 of it.

    python benchmarks/emulated.py --ranks 4,8 --repetitions 9 --json emulated.json      # root on Linux

Products are timed waits, messages are real, links are shaped both ways. Prints how much of the messages
each order hides, and what the simulator predicts.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from brigata.measure.namespaces import parse_rate
from brigata.measure.overlap_bench import bench_overlap
from brigata.measure.overlap_cases import OPERATIONS, PASSES, Shape
from figures import Finding, Section, judge, report, table

ORDERS = ["blocking_p2p", "sliced:4", "ring", "direct"]
TAIL_FREE = ("ring", "direct")
RANKS = (4, 8)
PRODUCT_MS, RATIO, RATE, ROWS = 20.0, 0.8, "100mbit", 256
PAYLOAD = 0.957
"""Share of a link's rate that is left for data after the headers."""


def run_cases(ranks: Sequence[int], passes: Sequence[str], repetitions: int) -> dict[str, Any]:
    """Results of ``bench_overlap`` for every number of ranks, operator and pass."""
    hidden = round(RATIO * PRODUCT_MS / 1e3 * PAYLOAD * parse_rate(RATE) / ROWS / 4)
    cases = [(n, op, direction) for n in ranks for op in OPERATIONS for direction in passes]
    results = []
    for n, op, direction in track(cases, description="emulated"):
        shape = Shape(op, direction, ROWS * n, hidden, 1)
        results.append(bench_overlap(shape, n, ORDERS, repetitions, RATE, PRODUCT_MS))
    return {"cases": results}


def measure(repetitions: int, quick: bool) -> dict[str, Any]:
    """All cases; ``quick``: 4 ranks, forward."""
    return run_cases(RANKS[:1], PASSES[:1], repetitions) if quick else run_cases(RANKS, PASSES, repetitions)


def hidden_share(case: dict[str, Any], order: str) -> float:
    """Share of the time of all messages of a rank that ``order`` hides; negative if it adds to it."""
    messages_ms = (case["ranks"] - 1) * RATIO * PRODUCT_MS
    return 1 - max(case["orders"][order]["exposed_ms"], 0) / messages_ms


def off_by(case: dict[str, Any], order: str) -> float:
    """Predicted over measured time, less 1."""
    figures = case["orders"][order]
    return float(figures["predicted_ms"] / figures["time_ms"] - 1)


def findings(result: dict[str, Any]) -> list[Finding]:
    """Answers to what is asked of the tail-free orders and of the prediction."""
    cases = result["cases"]
    best = {_row(case): max(hidden_share(case, order) for order in TAIL_FREE) for case in cases}
    off = {f"{order} {_row(case)}": abs(off_by(case, order)) for order in ORDERS for case in cases}
    asked = "messages hidden by the better of `ring` and `direct`: >= 99 %"
    return [
        judge(asked, best, least=0.99, form="{:.1%}"),
        judge("predicted against measured: within 5 %", off, most=0.05, form="{:.1%}"),
    ]


def _row(case: dict[str, Any]) -> str:
    return f"{case['op']} {case['direction']} {case['ranks']}"


def render(result: dict[str, Any]) -> str:
    """Measured and predicted times, and the share of the messages' time that is hidden."""
    rows = []
    for case in result["cases"]:
        for order, figures in case["orders"].items():
            cells = [f"{case['op']} {case['direction']}", str(case["ranks"]), order]
            cells += [f"{figures['time_ms']:.1f}", f"{figures['predicted_ms']:.1f}"]
            cells += [f"{off_by(case, order):+.1%}", f"{hidden_share(case, order):.1%}"]
            rows.append(cells)
    text = (
        f"Each product of a chunk is a wait of {PRODUCT_MS:g} ms, each message of a chunk takes "
        f"{RATIO * PRODUCT_MS:g} ms at {RATE}, shaped both ways; a backward has two products a chunk and the "
        "messages of one. All ranks share the machine's cores; what an emulated device is, says "
        "`brigata.measure.emulated`. *Messages hidden*: 1 - exposed time / time of all messages of a rank, "
        "one after the other."
    )
    header = ("operator", "ranks", "order", "time ms", "predicted ms", "off by", "messages hidden")
    return text + "\n\n" + table(header, rows)


SECTION = Section("Emulated devices", 9, measure, findings, render)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--repetitions", type=int, default=SECTION.repetitions)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = [int(number) for number in options.ranks.split(",")]
    result = run_cases(ranks, options.passes.split(","), options.repetitions)
    print(report(SECTION, result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
