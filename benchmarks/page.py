"""Measures everything that is asked and writes dated pages, one a subject; ``make benchmarks``.

    python benchmarks/page.py                                  # everything; root on Linux, over an hour
    python benchmarks/page.py --only operators,end_to_end      # these anew, the others from kept results
    python benchmarks/page.py --rewrite                        # the pages alone, from kept results
    python benchmarks/page.py --quick                          # few cases, to see that everything runs

Raw results are kept in ``benchmarks/results``, one JSON file a section. Verdicts are computed from them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import data_parallel
import emulated
import end_to_end
import experts
import mamba
import overlap
import published
import transformer
from figures import Section, keep, kept, report, table

PAGES: dict[str, tuple[str, dict[str, Section]]] = {
    "overlap-engine": (
        "The overlap engine, measured",
        {
            "operators": overlap.SECTION,
            "end_to_end": end_to_end.SECTION,
            "data_parallel": data_parallel.SECTION,
            "emulated": emulated.SECTION,
            "published": published.SECTION,
        },
    ),
    "models": (
        "Models in one process, measured",
        {"transformer": transformer.SECTION, "mamba": mamba.SECTION, "experts": experts.SECTION},
    ),
}
"""File's name -> title and sections."""
SECTIONS = {name: section for _, sections in PAGES.values() for name, section in sections.items()}
HERE = Path(__file__).resolve().parent
QUICK_REPETITIONS = 3
HOW_TO_READ = """\
Everything that is compared was measured in one run, competitors taking turns, and ratios are taken within
each repetition: absolute times of a shared machine mean little. An interval in brackets behind a ratio is
that of the median of paired ratios, at 95 % or more, by the sign test (two order statistics; exact, no random
numbers). The best of several orders is picked on one half of the repetitions and compared on the other half,
both ways round, so that luck in picking does not count. Verdicts are computed from the kept results."""


def page(title: str, results: dict[str, dict[str, Any]], day: str) -> str:
    """A page in Markdown, from kept results by section."""
    parts = [f"# {title}: {day}"]
    for described in dict.fromkeys(found["machine"] for found in results.values()):
        parts.append(
            f"Machine: {described}. Links, if any, are shaped by `tc tbf` between network namespaces."
        )
    parts += [*_cores(results), HOW_TO_READ, _summary(results)]
    for name, found in results.items():
        section = SECTIONS[name]
        parts += [f"## {section.title}", _origin(name, found), report(section, found["result"])]
    return "\n\n".join(parts) + "\n"


def _summary(results: dict[str, dict[str, Any]]) -> str:
    """How many answers of each section met what was asked, and which did not."""
    rows = []
    for name, found in results.items():
        findings = SECTIONS[name].findings(found["result"])
        missed = [finding.asked for finding in findings if finding.met is False]
        met = sum(finding.met is True for finding in findings)
        rows.append((SECTIONS[name].title, str(met), "; ".join(missed)))
    return table(("section", "met", "**missed**"), rows)


def _cores(results: dict[str, dict[str, Any]]) -> list[str]:
    """What two busy processes get of the machine, as the operators' runs saw it."""
    if "operators" not in results:
        return []
    cases = [case for rows in results["operators"]["result"].values() for case in rows]
    shares = [case["second_core_share"] for case in cases]
    among = f"{min(shares):.0%} to {max(shares):.0%}"
    return [f"While both ranks compute, each has {among} of the speed of one alone (all runs of operators)."]


def _origin(name: str, found: dict[str, Any]) -> str:
    command = f"`python benchmarks/page.py --only {name} --repetitions {found['repetitions']}`"
    return f"{command}, {found['date']}."


def measure(names: Sequence[str], repetitions: int | None, quick: bool, folder: Path) -> None:
    """Measure sections one after the other; each is kept as soon as it is done."""
    for name in names:
        section = SECTIONS[name]
        count = repetitions or (QUICK_REPETITIONS if quick else section.repetitions)
        print(f"{section.title}: {count} repetitions", flush=True)
        keep(folder, name, count, section.measure(count, quick))


def main() -> None:
    """Measure, keep, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"sections to measure, of {','.join(SECTIONS)}; default: all")
    parser.add_argument("--repetitions", type=int, help="default: each section's own")
    parser.add_argument("--rewrite", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="few cases; kept and written apart")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only {','.join(unknown)} is no section; use {', '.join(SECTIONS)}")
    folder = HERE / "results" / "quick" if options.quick else HERE / "results"
    if not options.rewrite:
        measure(names, options.repetitions, options.quick, folder)
    written = 0
    for file, (title, sections) in PAGES.items():
        results = {name: found for name in sections if (found := kept(folder, name)) is not None}
        if not results or not (options.rewrite or set(results) & set(names)):
            continue
        day = max(found["date"] for found in results.values())
        target = (folder if options.quick else HERE) / f"{day}-{file}.md"
        target.write_text(page(title, results, day), encoding="utf-8")
        print(f"wrote {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")
        written += 1
    if not written:
        parser.error("nothing is kept to write a page from; run without --rewrite")


if __name__ == "__main__":
    main()
