"""Writes docs/accuracy.md: how far predictions are from published measurements, and why.

    python tools/fit_software.py DATA --leave-each-out | tee left-out.txt
    python tools/accuracy_page.py DATA left-out.txt

``DATA`` holds the ``train_*.csv`` and ``infer_*.csv`` tables; nothing of them but errors enters the page.
"""

import argparse
import re
from datetime import date
from pathlib import Path

from brigata.describe.device import device_names, load_device
from brigata.describe.software import load_software, software_names
from brigata.validate.outcome import Outcomes, predict_rows
from brigata.validate.statistics import KEYS, errors_of, grouped, memory_errors, orderings, served_groups
from brigata.validate.tables import read_rows

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "docs" / "accuracy.md"
ASKED = {
    "korthikanti2022-t5": "mean 3.5 %",
    "vtrain-single": "mean 8 %",
    "vtrain-multi": "mean 10 %",
    "zerobubble2024-t4": "mean 6 %",
    "bigscience-a100": "mean 10 %",
}
"""What is asked of single sources."""


def left_out(path: Path) -> dict[str, tuple[str, str, str]]:
    """Source -> mean, median and bias when it is left out, as ``fit_software`` prints them."""
    pattern = r"(?m)^(\S+)\s+n\s+\d+\s+mean\s+([\d.]+%)\s+median\s+([\d.]+%)\s+bias\s+([+-][\d.]+%)"
    return {m[1]: (m[2], m[3], m[4]) for m in re.finditer(pattern, path.read_text(encoding="utf-8"))}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def source_rows(outcomes: Outcomes, left: dict[str, tuple[str, str, str]]) -> list[tuple[str, ...]]:
    """A row a source."""
    rows = []
    for source, found in grouped(outcomes.timed, KEYS["source"]).items():
        e, out = errors_of(found), left.get(source, ("", "", ""))
        shown = (f"{e.mape:.1%}", f"{e.median_ape:.1%}", f"{e.bias:+.1%}")
        rows.append((source, str(e.rows), *shown, *out, ASKED.get(source, "")))
    return rows


def group_rows(outcomes: Outcomes, key: str) -> list[tuple[str, ...]]:
    """A row a device, or kind."""
    found = ((name, errors_of(rows)) for name, rows in grouped(outcomes.timed, KEYS[key]).items())
    return [
        (name, str(e.rows), f"{e.mape:.1%}", f"{e.median_ape:.1%}", f"{e.p90_ape:.1%}", f"{e.bias:+.1%}")
        for name, e in found
    ]


def summary(outcomes: Outcomes, left: dict[str, tuple[str, str, str]]) -> str:
    """Over sources, orderings, memory."""
    errors = [errors_of(rows) for rows in grouped(outcomes.timed, KEYS["source"]).values()]
    median = sum(e.median_ape for e in errors) / len(errors)
    bias = sum(e.bias for e in errors) / len(errors)
    numbers = [[float(x.strip("%+")) for x in row] for row in left.values()]
    medians, biases = (sum(row[i] for row in numbers) / max(len(numbers), 1) for i in (1, 2))
    order, memory = orderings(outcomes.timed), memory_errors(outcomes)
    failed, seen = memory.out_of_memory
    correlation = sum(o.spearman for o in order) / len(order)
    regret = sum(o.regret for o in order) / len(order)
    rows = [
        ("median error, averaged over sources, fitted on all", f"{median:.1%}", "7 %"),
        ("bias, the same", f"{bias:+.1%}", "3 %"),
        ("median error, averaged over sources, each left out in turn", f"{medians:.1f}%", "10 %"),
        ("bias, the same", f"{biases:+.1f}%", "5 %"),
        (f"order of layouts, {len(order)} groups: Spearman", f"{correlation:.3f}", "0.9"),
        ("the layout predicted fastest is slower than the fastest by", f"{regret:.1%}", "2 %"),
        (f"memory, {memory.rows} rows, mean error", f"{memory.mape:.1%}", "6 %"),
        ("published out-of-memory rows that are predicted so", f"{seen} of {failed}", "all"),
        ("rows that ran and are predicted not to fit", f"{memory.refused_though_ran} of {memory.ran}", "2 %"),
    ]
    return table(("figure", "found", "asked"), rows)


def parameters() -> str:
    """Everything that was fitted on training steps."""
    rows = []
    for name in software_names():
        spec = load_software(name)
        shown = ", ".join(f"{key} {getattr(spec, key):.3g}" for key in spec.free)
        if shown:
            rows.append((name, shown, spec.fitted))
    speeds = [
        f"{name} {load_device(name).curves.sustained:.3g}"
        for name in device_names()
        if load_device(name).curves.sustained != 1.0
    ]
    listed = table(("generation", "parameters", "fitted on"), rows)
    return f"{listed}\n\nSustained speed of products: {', '.join(speeds)}."


def main() -> None:
    """Predict and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("left_out", type=Path)
    options = parser.parse_args()
    left = left_out(options.left_out)
    files = [*sorted(options.data.glob("train_*.csv")), *sorted(options.data.glob("infer_*.csv"))]
    outcomes = predict_rows(read_rows(files))
    timed = outcomes.timed
    inside = sum(o.low <= (o.measured or 0.0) <= o.high for o in timed) / len(timed)
    vtrain = errors_of(grouped(timed, KEYS["source"])["vtrain-multi"])
    served = [
        (name, str(e.rows), f"{e.mape:.0%}", f"{e.median_ape:.0%}", f"{e.bias:+.0%}")
        for name, e in ((name, errors_of(rows)) for name, rows in served_groups(outcomes).items())
    ]
    wide = ("rows", "mean", "median", "90 %", "bias")
    head = ("source", "rows", "mean", "median", "bias", "left out: mean", "median", "bias", "asked")
    page = (
        (HERE / "accuracy_template.md")
        .read_text(encoding="utf-8")
        .format(
            day=date.today(),
            rows=len(timed),
            sources=len(grouped(timed, KEYS["source"])),
            summary=summary(outcomes, left),
            sources_table=table(head, source_rows(outcomes, left)),
            devices_table=table(("device", *wide), group_rows(outcomes, "device")),
            kinds_table=table(("kind", *wide), group_rows(outcomes, "kind")),
            inference_table=table(("software, figure, device", "figures", "mean", "median", "bias"), served),
            parameters=parameters(),
            vtrain_median=f"{vtrain.median_ape:.1%}",
            inside=f"{inside:.0%}",
        )
    )
    TARGET.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
