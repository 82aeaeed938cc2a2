"""The overlapped operators beside their baselines: both operators, both passes, shaped links and loopback.

    python benchmarks/overlap.py --rates 1gbit,loopback --ffn 4096 --repetitions 25 --json overlap.json

Prints the section of the page in Markdown. The shaped rows need root on Linux.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from brigata.measure.overlap_bench import bench_overlap
from brigata.measure.overlap_cases import OPERATIONS, PASSES, Shape
from figures import Finding, Ratio, Section, judge, paired_ratio, ratio_to_best, report, table

TOKENS, HIDDEN = 2048, 1024
WIDTHS = {
    "loopback": (256, 1024, 4096),
    "1gbit": (256, 512, 1024, 2048, 4096, 8192),
    "2gbit": (256, 1024, 2048, 4096),
}
"""Inner widths (ffn) by link: all on one, those in question on the others."""
ORDERS = ("blocking_p2p", "direct", "direct:2", "direct:4", "auto")
MORE_ORDERS, MORE_AT = ("blocking", "sliced:4", "ring"), 4096
"""Orders that are measured at one width only."""
NAMES = {"all_gather_linear": "column", "linear_reduce_scatter": "row"}
MOST_OVER_CONTENDED = {4096: 1.03, 2048: 1.08, 1024: 1.18}
SHAPED = ("1gbit", "2gbit")


def run_cases(
    widths: Mapping[str, Sequence[int]], orders: Sequence[str] | None, repetitions: int
) -> dict[str, Any]:
    """By rate, the results of ``bench_overlap`` for every operator, pass and width.

    ``orders``: None takes ``ORDERS``, and ``MORE_ORDERS`` where they belong.
    """
    everything = {}
    for rate, sizes in widths.items():
        cases = [(op, direction, ffn) for op in OPERATIONS for direction in PASSES for ffn in sizes]
        results = []
        for op, direction, ffn in track(cases, description=rate):
            shape = Shape(op, direction, TOKENS, HIDDEN, ffn)
            wanted = [*ORDERS, *(MORE_ORDERS if ffn == MORE_AT else ())] if orders is None else [*orders]
            shaped = None if rate == "loopback" else rate
            results.append(bench_overlap(shape, 2, wanted, repetitions, shaped))
        everything[rate] = results
    return everything


def measure(repetitions: int, quick: bool) -> dict[str, Any]:
    """All cases; ``quick``: one width on one link."""
    if quick:
        return run_cases({"1gbit": (1024,)}, None, repetitions)
    return run_cases(WIDTHS, None, repetitions)


def to_contended(case: dict[str, Any], order: str) -> Ratio:
    """Paired ratio of an order to the reference ``contended``."""
    return paired_ratio(case["samples_ms"][f"order {order}"], case["samples_ms"]["contended"])


def auto_to_best(case: dict[str, Any]) -> tuple[Ratio, tuple[str, str]]:
    """``auto`` against the best fixed order, which is picked on other repetitions than it is compared on."""
    rivals = [f"order {order}" for order in case["orders"] if order != "auto"]
    ratio, picked = ratio_to_best(case["samples_ms"], "order auto", rivals, "contended")
    first, second = (name.removeprefix("order ") for name in picked)
    return ratio, (first, second)


def findings(result: dict[str, Any]) -> list[Finding]:
    """Answers to what is asked of ``auto``."""
    cases = [case for results in result.values() for case in results if {"auto"} < set(case["orders"])]
    shaped = [case for case in cases if case["rate"] in SHAPED]
    found = [
        judge(
            f"`auto` over contended at 1 and 2 Gbit/s, ffn {ffn}: <= {most}",
            {_row(case): to_contended(case, "auto").median for case in shaped if case["ffn"] == ffn},
            most=most,
        )
        for ffn, most in MOST_OVER_CONTENDED.items()
    ]
    narrow = [case for case in shaped if case["ffn"] == 1024 and case["rate"] == "1gbit"]
    faster = {_row(case): _ratio(case, "blocking_p2p", "auto") for case in narrow}
    found.append(
        judge("`auto` against `blocking_p2p` at 1 Gbit/s, ffn 1024: >= 1.25 times", faster, least=1.25)
    )
    return [*found, _against_best(cases)]


def _ratio(case: dict[str, Any], slower: str, faster: str) -> float:
    samples = case["samples_ms"]
    return paired_ratio(samples[f"order {slower}"], samples[f"order {faster}"]).median


def _against_best(cases: list[dict[str, Any]]) -> Finding:
    asked = "`auto` against the best fixed order: <= 1.03, or not distinguishable (interval includes 1)"
    if not cases:
        return Finding(asked, "not measured", None)
    ratios = {_row(case): auto_to_best(case)[0] for case in cases}
    close = sum(ratio.median <= 1.03 for ratio in ratios.values())
    behind = {row: ratio for row, ratio in ratios.items() if ratio.median > 1.03}
    beyond = [f"{row} {ratio}" for row, ratio in behind.items() if not ratio.includes_one]
    found = (
        f"<= 1.03 in {close} of {len(cases)} rows, not distinguishable in {len(behind) - len(beyond)} more"
    )
    return Finding(asked, found + (f", behind in: {'; '.join(beyond)}" if beyond else ""), not beyond)


def _row(case: dict[str, Any]) -> str:
    return f"{_pass(case)} {case['ffn']} {case['rate']}"


def _pass(case: dict[str, Any]) -> str:
    return f"{NAMES[case['op']]} {case['direction']}"


def render(result: dict[str, Any]) -> str:
    """For every rate a table of times, then one of predictions and choices."""
    parts = [
        f"2 ranks, tokens {TOKENS}, hidden {HIDDEN}, fp32; ffn is the width that each rank holds. *Column* "
        "is `all_gather_linear`, *row* `linear_reduce_scatter`. `contended` is a reference, not a bound: the "
        "messages first, then the same products whole, then the waits, without dependencies. Times are "
        "medians in ms; in brackets the median of the paired ratios to `contended`."
    ]
    for rate, results in result.items():
        parts += [f"### {rate}", _times(results), _predictions(results)]
    return "\n\n".join(parts)


def _columns(results: list[dict[str, Any]]) -> list[str]:
    return list(max((case["orders"] for case in results), key=len))


def _times(results: list[dict[str, Any]]) -> str:
    orders = _columns(results)
    rows = []
    for case in results:
        cells = [_pass(case), str(case["ffn"])]
        cells += [f"{case[key]:.0f}" for key in ("compute_ms", "comm_ms", "contended_ms")]
        for order in orders:
            figures = case["orders"].get(order)
            text = figures and f"{figures['time_ms']:.0f} ({figures['ratio_to_contended']:.3f})"
            cells.append(text or "")
        rows.append(cells)
    return table(("operator", "ffn", "compute", "messages", "contended", *orders), rows)


def _predictions(results: list[dict[str, Any]]) -> str:
    """Predicted beside measured for each order, and what ``auto`` took."""
    orders = _columns(results)
    rows = []
    for case in results:
        cells = [_pass(case), str(case["ffn"])]
        for order in orders:
            figures = case["orders"].get(order)
            text = figures and f"{figures['predicted_ms']:.0f} / {figures['time_ms']:.0f}"
            cells.append(text or "")
        if "auto" in case["orders"]:
            ratio, picked = auto_to_best(case)
            best = picked[0] if picked[0] == picked[1] else " or ".join(picked)
            cells += [case["orders"]["auto"]["chosen"], f"{ratio} of {best}"]
        rows.append(cells)
    header = [f"{order}: predicted / measured" for order in orders]
    asked = ("`auto` took", "`auto` over the best fixed order") if "auto" in orders else ()
    return table(("operator", "ffn", *header, *asked), rows)


SECTION = Section("Operators", 15, measure, findings, render)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="1gbit,loopback")
    parser.add_argument("--ffn", default="4096")
    parser.add_argument("--orders", help="default: those of the page")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    widths = [int(width) for width in options.ffn.split(",")]
    orders = options.orders and options.orders.split(",")
    result = run_cases(dict.fromkeys(options.rates.split(","), widths), orders, options.repetitions)
    print(report(SECTION, result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
