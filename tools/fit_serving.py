"""Fits the parameters of serving engines on published latencies and times a token.

    python tools/fit_serving.py DATA [--write]

``DATA`` holds ``infer_*.csv``. Times to the first token under load are left out: they depend on how requests
arrive.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from brigata.describe.job import Job
from brigata.describe.software import load_software
from brigata.simulate.arrangement import Arrangement
from brigata.simulate.inference import serve_on
from brigata.validate.serving import compared, serving_job
from brigata.validate.tables import RefusedRowError, Row, read_rows
from fit_software import PRESETS, set_value

BOUNDS = {
    "host_us": (0.0, 30.0),
    "elementwise": (0.05, 3.0),
    "messages": (0.1, 2.0),
    "overhead_us": (0.0, 5000.0),
}
MOST = 120
"""Rows of an engine and model that are fitted on at most."""


def cases_of(folder: Path) -> dict[str, list[tuple[Row, Job]]]:
    """Rows by generation of software, thinned out evenly."""
    found: dict[tuple[str, str], list[tuple[Row, Job]]] = defaultdict(list)
    for row in read_rows(sorted(folder.glob("infer_*.csv"))):
        if row.text("status") == "oom":
            continue
        try:
            job = serving_job(row)
        except RefusedRowError:
            continue
        found[job.cluster.software, row.text("model")].append((row, job))
    cases: dict[str, list[tuple[Row, Job]]] = defaultdict(list)
    for (software, _), rows in found.items():
        cases[software] += rows[:: max(len(rows) // MOST, 1)]
    return cases


def errors(software: str, names: list[str], values: np.ndarray, cases: list[tuple[Row, Job]]) -> np.ndarray:
    """Logarithms of predicted over measured."""
    spec = load_software(software).model_copy(update=dict(zip(names, map(float, values), strict=True)))
    found = []
    for row, job in cases:
        serving = serve_on(replace(Arrangement.of(job), software=spec))
        for what, (measured, predicted) in compared(row, serving).items():
            if what != "ttft":
                found.append(np.log(predicted / measured))
    return np.array(found)


def main() -> None:
    """Fit, show, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for software, cases in cases_of(options.data).items():
        names = list(load_software(software).free)
        low, high = zip(*(BOUNDS[name] for name in names), strict=True)
        start = [
            min(max(getattr(load_software(software), n), a), b)
            for n, a, b in zip(names, low, high, strict=True)
        ]
        fitted = least_squares(
            lambda v, s=software, n=names, c=cases: errors(s, n, v, c),
            start,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=0.1,
            x_scale=[b - a for a, b in zip(low, high, strict=True)],
            diff_step=1e-2,
            max_nfev=15,
        )
        off = np.expm1(errors(software, names, fitted.x, cases))
        shown = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, fitted.x, strict=True))
        print(
            f"{software}: {len(off)} figures, median {np.median(np.abs(off)):.1%}, "
            f"bias {off.mean():+.1%}: {shown}"
        )
        if options.write:
            path = PRESETS / "software_presets" / f"{software}.toml"
            for name, value in zip(names, fitted.x, strict=True):
                set_value(path, name, value, None)
            set_value(path, "fitted", ", ".join(sorted({row.source for row, _ in cases})), None)


if __name__ == "__main__":
    main()
