"""Fits what micro-measurements cannot say: the software's parameters, and each device's sustained speed.

    python tools/fit_software.py DATA [--write] [--without SOURCE] [--leave-each-out]

``DATA`` holds ``train_*.csv``. At most four parameters a generation of software and one a device, by robust
least squares on the logarithm of the step time; every source weighs alike. ``--write`` puts them into the
presets; ``--without`` leaves a source out and prints the errors on it.
"""

import argparse
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import brigata.describe
from brigata.describe.device import DeviceSpec, load_device
from brigata.describe.job import Job
from brigata.describe.software import SoftwareSpec, load_software, software_names
from brigata.simulate.arrangement import Arrangement
from brigata.simulate.iteration import iterate
from brigata.validate.jobs import job_of
from brigata.validate.tables import RefusedRowError, read_rows

PRESETS = Path(brigata.describe.__file__).parent
BOUNDS = {
    "host_us": (0.0, 120.0),
    "elementwise": (0.3, 4.0),
    "contention": (0.0, 1.0),
    "exposed": (0.0, 1.0),
    "attention": (0.2, 1.5),
    "sustained": (0.5, 1.05),
    "network": (0.02, 1.2),
}
PRIOR = {
    "host_us": (40.0, 30.0),
    "elementwise": (1.0, 0.4),
    "contention": (0.1, 0.15),
    "exposed": (0.2, 0.3),
    "attention": (1.0, 0.15),
    "sustained": (0.9, 0.06),
}
"""What a parameter is expected to be, and how surely: a deviation weighs like ``PRIOR_ERROR``."""
UNKNOWN = {"host_us": 40.0, "contention": 0.1, "exposed": 0.2, "sustained": 0.85, "network": 0.5}
"""What is assumed of a parameter that no other source tells; 1 of the others."""
PRIOR_ERROR = 0.12
GENERATION = {"a100-sxm4-40gb": "a100-sxm4-80gb"}
"""Devices that share one sustained speed."""
EVERY = 9
"""Of sources with more than 300 rows, every ninth is fitted on."""


@dataclass
class Case:
    """A row that is fitted on."""

    source: str
    job: Job
    measured: float
    weight: float = 1.0

    @property
    def software(self) -> str:
        """Generation of its software."""
        return self.job.cluster.software

    @property
    def device(self) -> str:
        """Whose sustained speed it feels."""
        return GENERATION.get(self.job.cluster.preset, self.job.cluster.preset)


def cases_of(folder: Path) -> list[Case]:
    """All rows that count and can be predicted."""
    cases = []
    for row in read_rows(sorted(folder.glob("train_*.csv"))):
        if not row.judged or row.measured_s is None or row.text("status") == "oom":
            continue
        try:
            cases.append(Case(row.source, job_of(row), row.measured_s))
        except RefusedRowError:
            continue
    many = {source for source, count in Counter(c.source for c in cases).items() if count > 300}
    kept = [c for i, c in enumerate(cases) if c.source not in many or i % EVERY == 0]
    counts = Counter(c.source for c in kept)
    for case in kept:
        case.weight = min(counts[case.source], 12) ** 0.5 / counts[case.source] ** 0.5
    return kept


class Problem:
    """Named parameters, and the errors of the cases that each of them touches."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        softwares = [s for s in software_names() if any(c.software == s for c in cases)]
        devices = sorted({c.device for c in cases})
        self.names = [(s, p) for s in softwares for p in load_software(s).free] + [
            (d, "sustained") for d in devices
        ]
        self.touched = {
            name: np.array([i for i, c in enumerate(cases) if name[0] in (c.software, c.device)], dtype=int)
            for name in self.names
        }

    def start(self) -> np.ndarray:
        """What the presets say now, inside the bounds."""
        values = []
        for place, parameter in self.names:
            if parameter == "sustained":
                value = load_device(place).curves.sustained
            else:
                value = getattr(load_software(place), parameter)
            low, high = BOUNDS[parameter]
            values.append(min(max(value, low + 1e-3), high - 1e-3))
        return np.array(values)

    def specs(self, values: np.ndarray, case: Case) -> tuple[DeviceSpec, SoftwareSpec]:
        """Device and software of a case under parameter values."""
        software = {
            p: float(v) for (place, p), v in zip(self.names, values, strict=True) if place == case.software
        }
        sustained = [
            float(v) for (place, p), v in zip(self.names, values, strict=True) if place == case.device
        ]
        device = load_device(case.job.cluster.preset)
        if sustained:
            curves = device.curves.model_copy(update={"sustained": sustained[0]})
            device = device.model_copy(update={"curves": curves})
        return device, load_software(case.software).model_copy(update=software)

    def errors(self, values: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
        """Logarithms of predicted over measured, weighted."""
        chosen = range(len(self.cases)) if which is None else which
        found = []
        for i in chosen:
            case = self.cases[i]
            seconds = iterate(Arrangement(case.job, *self.specs(values, case))).seconds
            found.append(case.weight * np.log(seconds / case.measured))
        return np.array(found)

    def jacobian(self, values: np.ndarray) -> np.ndarray:
        """By differences, each parameter on the cases that it touches."""
        base = self.errors(values)
        result = np.zeros((len(self.cases), len(values)))
        for column, name in enumerate(self.names):
            step = 1e-3 * max(abs(values[column]), 0.05)
            if values[column] + step >= BOUNDS[name[1]][1]:
                step = -step
            moved = values.copy()
            moved[column] += step
            rows = self.touched[name]
            result[rows, column] = (self.errors(moved, rows) - base[rows]) / step
        return result

    def prior(self, values: np.ndarray) -> np.ndarray:
        """How far the parameters are from what is expected of them."""
        return np.array(
            [
                PRIOR_ERROR * (value - PRIOR[p][0]) / PRIOR[p][1] if p in PRIOR else 0.0
                for (_, p), value in zip(self.names, values, strict=True)
            ]
        )

    def all_errors(self, values: np.ndarray) -> np.ndarray:
        """Errors of the cases, and of the parameters beside their prior."""
        return np.concatenate([self.errors(values), self.prior(values)])

    def all_slopes(self, values: np.ndarray) -> np.ndarray:
        """Of ``all_errors``."""
        prior = np.diag([PRIOR_ERROR / PRIOR[p][1] if p in PRIOR else 0.0 for _, p in self.names])
        return np.vstack([self.jacobian(values), prior])

    def solve(self, evaluations: int) -> np.ndarray:
        """The parameters that fit best."""
        low, high = zip(*(BOUNDS[p] for _, p in self.names), strict=True)
        return least_squares(
            self.all_errors,
            self.start(),
            self.all_slopes,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=0.05,
            x_scale=[max(b - a, 1e-3) for a, b in zip(low, high, strict=True)],
            max_nfev=evaluations,
        ).x


def show(problem: Problem, values: np.ndarray) -> None:
    """Errors by source."""
    by = defaultdict(list)
    for case, error in zip(problem.cases, problem.errors(values), strict=True):
        by[case.source].append(float(np.expm1(error / case.weight)))
    medians, biases = [], []
    for source, errors in by.items():
        e = np.array(errors)
        medians.append(np.abs(e).mean())
        biases.append(e.mean())
        print(
            f"{source:26s} n {len(e):4d}  mean {np.abs(e).mean():6.1%}  median {np.median(np.abs(e)):6.1%}  "
            f"bias {e.mean():+6.1%}"
        )
    print(
        f"over sources: median {np.median(medians):.1%}, mean {np.mean(medians):.1%}, "
        f"bias {np.mean(biases):+.1%}"
    )


def write(problem: Problem, values: np.ndarray) -> None:
    """Put the parameters into the presets."""
    sources = defaultdict(set)
    for case in problem.cases:
        sources[case.software].add(case.source)
    for (place, parameter), value in zip(problem.names, values, strict=True):
        if parameter == "sustained":
            for name in [place, *[d for d, g in GENERATION.items() if g == place]]:
                set_value(PRESETS / "devices" / f"{name}.toml", parameter, value, "[curves]")
        else:
            set_value(PRESETS / "software_presets" / f"{place}.toml", parameter, value, None)
    for software, names in sources.items():
        if load_software(software).free:
            set_value(
                PRESETS / "software_presets" / f"{software}.toml", "fitted", ", ".join(sorted(names)), None
            )


def write_intervals(problem: Problem, values: np.ndarray) -> None:
    """Write between which factors of a prediction four of five runs lie, by generation."""
    factors = defaultdict(list)
    for case, error in zip(problem.cases, problem.errors(values), strict=True):
        for name in (case.software, "all"):
            factors[name].append(float(np.exp(-error / case.weight)))
    lines = [
        "# Factors of a prediction between which four of five published runs lie; tools/fit_software.py.",
        "[interval]",
    ]
    for name, found in sorted(factors.items()):
        if len(found) >= 8:
            low, high = np.percentile(found, [10, 90])
            lines.append(f"{name} = [{min(low, 0.98):.3f}, {max(high, 1.02):.3f}]")
    target = PRESETS.parent / "simulate" / "accuracy.toml"
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def set_value(path: Path, key: str, value: float | str, section: str | None) -> None:
    """Set a key of a TOML file, at its top level or in a section."""
    text = path.read_text(encoding="utf-8")
    line = f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value:.4g}"
    if "." not in line and not isinstance(value, str) and "e" not in line:
        line += ".0"
    if re.search(rf"(?m)^{key} = ", text):
        text = re.sub(rf"(?m)^{key} = .*$", line, text)
    elif section is None:
        text += line + "\n"
    elif section in text:
        text = text.replace(section + "\n", f"{section}\n{line}\n", 1)
    else:
        first = text.index("\n[curves.") if "\n[curves." in text else len(text)
        text = text[:first] + f"\n{section}\n{line}\n" + text[first:]
    path.write_text(text, encoding="utf-8")


def leave_each_out(cases: list[Case], evaluations: int) -> None:
    """Fit without each source in turn, and show the errors on it."""
    medians, biases = [], []
    for source in dict.fromkeys(case.source for case in cases):
        problem = Problem([c for c in cases if c.source != source])
        known = dict(zip(problem.names, problem.solve(evaluations), strict=True))
        left = Problem([c for c in cases if c.source == source])
        values = [known.get(name, UNKNOWN.get(name[1], 1.0)) for name in left.names]
        off = np.expm1(
            [
                error / case.weight
                for case, error in zip(left.cases, left.errors(np.array(values)), strict=True)
            ]
        )
        medians.append(float(np.median(np.abs(off))))
        biases.append(float(off.mean()))
        print(
            f"{source:26s} n {len(off):4d}  mean {np.abs(off).mean():6.1%}  median {medians[-1]:6.1%}  "
            f"bias {biases[-1]:+6.1%}",
            flush=True,
        )
    print(f"averaged over sources: median {np.mean(medians):.1%}, bias {np.mean(biases):+.1%}")


def main() -> None:
    """Fit, show, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--without", help="a source to leave out")
    parser.add_argument("--evaluations", type=int, default=12)
    parser.add_argument("--leave-each-out", action="store_true", help="fit without each source in turn")
    options = parser.parse_args()
    cases = cases_of(options.data)
    if options.leave_each_out:
        leave_each_out(cases, options.evaluations)
        return
    problem = Problem([c for c in cases if c.source != options.without])
    values = problem.solve(options.evaluations)
    for (place, parameter), value in zip(problem.names, values, strict=True):
        print(f"{place:20s} {parameter:12s} {value:.4g}")
    show(problem, values)
    if options.without:
        left = Problem([c for c in cases if c.source == options.without])
        known = dict(zip(problem.names, values, strict=True))
        show(
            left,
            np.array([known.get(name, start) for name, start in zip(left.names, left.start(), strict=True)]),
        )
    if options.write:
        write(problem, values)
        write_intervals(problem, values)


if __name__ == "__main__":
    main()
