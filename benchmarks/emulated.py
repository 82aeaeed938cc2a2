"""Overlap on 4 and 8 emulated devices: a chunk's product takes 20 ms, a chunk's message 0.8 of it.

    python benchmarks/emulated.py --ranks 4,8 --repetitions 9 --json emulated.json      # root on Linux

Products are timed waits, messages are real, links are shaped both ways. Prints how much of the messages
each order hides, and what the simulator predicts from the bare products and messages.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.progress import track

from brigata.measure.namespaces import parse_rate
from brigata.measure.overlap_bench import bench_overlap
from brigata.measure.overlap_cases import OPERATIONS, PASSES, Shape

ORDERS = ["blocking_p2p", "sliced:4", "ring", "direct"]
PRODUCT_MS, RATIO, RATE, ROWS = 20.0, 0.8, "100mbit", 256
PAYLOAD = 0.957
"""Share of a link's rate that is left for data after the headers."""


def table(results: list[dict[str, Any]]) -> str:
    """Measured and predicted times, and the share of the messages' time that is hidden."""
    lines = [
        "| operator | ranks | order | time ms | predicted ms | off by | messages hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        messages_ms = (result["ranks"] - 1) * RATIO * PRODUCT_MS
        for order, figures in result["orders"].items():
            hidden = 1 - max(figures["exposed_ms"], 0) / messages_ms
            off = figures["predicted_ms"] / figures["time_ms"] - 1
            cells = [f"{result['op']} {result['direction']}", str(result["ranks"]), order]
            cells += [
                f"{figures['time_ms']:.1f}",
                f"{figures['predicted_ms']:.1f}",
                f"{off:+.1%}",
                f"{hidden:.1%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hidden = round(RATIO * PRODUCT_MS / 1e3 * PAYLOAD * parse_rate(RATE) / ROWS / 4)
    cases = [
        (int(ranks), op, direction)
        for ranks in options.ranks.split(",")
        for op in OPERATIONS
        for direction in options.passes.split(",")
    ]
    results = []
    for ranks, op, direction in track(cases, description="emulated"):
        shape = Shape(op, direction, ROWS * ranks, hidden, 1)
        results.append(bench_overlap(shape, ranks, ORDERS, options.repetitions, RATE, PRODUCT_MS))
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
