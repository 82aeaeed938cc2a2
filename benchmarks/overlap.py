"""The overlapped operators beside their baselines: both operators, both passes, shaped link and loopback.

    python benchmarks/overlap.py --rates 1gbit,loopback --repetitions 25 --json overlap.json

Prints one Markdown table a rate. The 1 Gbit/s rows need root on Linux.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.progress import track

from brigata.measure.overlap_bench import bench_overlap
from brigata.measure.overlap_cases import OPERATIONS, PASSES, Shape

ORDERS = "blocking,blocking_p2p,sliced:4,ring,direct"


def table(rate: str, results: list[dict[str, Any]]) -> str:
    """Times in ms, with the median paired ratio to ``contended`` in brackets."""
    orders = list(results[0]["orders"])
    lines = [
        f"\n{rate}, 2 ranks, tokens 2048, hidden 1024, ms (ratio to contended)\n",
        "| operator | ffn | compute | messages | contended | " + " | ".join(orders) + " |",
        "|" + "---|" * (5 + len(orders)),
    ]
    for result in results:
        cells = [f"{result['op']} {result['direction']}", str(result["ffn"])]
        cells += [f"{result[key]:.0f}" for key in ("compute_ms", "comm_ms", "contended_ms")]
        for order in orders:
            figures = result["orders"][order]
            cells.append(f"{figures['time_ms']:.0f} ({figures['ratio_to_contended']:.3f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="1gbit,loopback")
    parser.add_argument("--ffn", default="4096")
    parser.add_argument("--orders", default=ORDERS)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    widths = [int(width) for width in options.ffn.split(",")]
    cases = [(op, direction, ffn) for op in OPERATIONS for direction in PASSES for ffn in widths]
    everything = {}
    for rate in options.rates.split(","):
        results = []
        for op, direction, ffn in track(cases, description=rate):
            shape = Shape(op, direction, 2048, 1024, ffn)
            shaped = None if rate == "loopback" else rate
            results.append(bench_overlap(shape, 2, options.orders.split(","), options.repetitions, shaped))
        everything[rate] = results
        print(table(rate, results), flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=2) + "\n")


if __name__ == "__main__":
    main()
